"""Turns of a conversation: the template is the checkpoint's own, and no token is read twice.

A turn is rendered with all those before it. What of that the model has read already, its own answers among it, is in
its state; only what follows the longest common beginning is read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.inference.generation import Generated, Prompt, Stream, prefill, stream
from regard.inference.generation.prompt import CHUNK, with_room
from regard.models.base import GenerativeModel, Model, expect


class ContextError(ValueError):
    """A turn that the model's context has no more room for.

    >>> from regard.inference.generation.conversation import ContextError
    >>> issubclass(ContextError, ValueError)
    True
    """


class Answer:
    """The pieces of one answer, to be iterated over; `text` and `result` are what has come so far."""

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin = begin
        self._stream: Stream | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._stream is None:
            self._stream = self._begin()
        return next(self._stream)

    @property
    def text(self) -> str:
        return self.result

    @property
    def result(self) -> Generated:
        return Generated("", tokens=[], reason="interrupted") if self._stream is None else self._stream.result

    def prompt_so_far(self) -> Prompt | None:
        """What the model has read: the conversation and the answer, but its newest token; None if it has not begun."""
        return None if self._stream is None else self._stream.prompt_so_far()


class Conversation:
    """A conversation with a model, turn by turn; the options are those of `stream`.

    An answer joins the conversation as far as it was taken, so one may stop in the middle of it. With a `seed`, each
    turn has its own: the seed and the number of turns before it.

    >>> import regard as rg
    >>> from regard.checkpoints import Tokenizer
    >>> from regard.inference.generation.conversation import Conversation
    >>> config = rg.DecoderConfig(vocabulary_size=4, embedding_dim=8, num_layers=1, num_heads=2)
    >>> model = rg.Decoder(config).eval()
    >>> model.tokenizer = Tokenizer.from_vocabulary(["h", "i", "<", ">"], special={})
    >>> model.tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    >>> conversation = Conversation(model, max_new_tokens=5)
    >>> answer = "".join(conversation.say("hi"))
    >>> len(answer), [message["role"] for message in conversation.messages]
    (5, ['user', 'assistant'])
    """

    def __init__(self, model: Model, system: str | None = None, **options: Any) -> None:
        model = expect(GenerativeModel, model)
        if model.reads_source:
            raise ValueError(f"model: expected a decoder to talk with, got {type(model).__name__}")
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            lacking = "tokenizer" if model.tokenizer is None else "chat template"
            raise ValueError(f"model: expected a checkpoint with a chat template, got one without a {lacking}")
        stream(model, [0], **options)  # checks them, and reads nothing yet
        self.model, self.system, self.options = model, system, options
        self._tokenizer = model.tokenizer
        self.reset()
        self._rendered("a message")  # whether the template takes such

    def reset(self) -> None:
        """Begin anew: only the system's message stays."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._turns = 0
        self._prompt: Prompt | None = None
        self._last: tuple[str, Answer] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """All that was said so far, as templates take it."""
        return [*self._messages, *self._last_turn()]

    def say(self, text: str) -> Answer:
        """Say something; what this gives is the answer, made as it is iterated over.

        Raises ContextError, and leaves the conversation as it was, if there is no room for the text and a token more.
        """
        self._settle()
        tokens = tuple(self._tokenizer.encode(self._rendered(text), special=False))
        limit = self.model.context_length
        if len(tokens) >= limit:
            raise ContextError(f"context: expected fewer than {limit} tokens with this message, got {len(tokens)}")
        answer = Answer(lambda: self._answer(tokens))
        self._last = (text, answer)
        return answer

    def _rendered(self, text: str) -> str:
        return self._tokenizer.chat([*self._messages, {"role": "user", "content": text}])

    def _last_turn(self) -> list[dict[str, str]]:
        """The last turn's messages, as far as the answer came; a turn without any was not said."""
        if self._last is None:
            return []
        text, answer = self._last
        found = answer.result
        if not found and found.reason == "interrupted":
            return []
        return [{"role": "user", "content": text}, {"role": "assistant", "content": str(found)}]

    def _settle(self) -> None:
        """Make the last turn one of those before."""
        said = self._last_turn()
        if self._last is not None:
            self._prompt = self._last[1].prompt_so_far() or self._prompt
        self._messages += said
        self._turns += len(said) // 2
        self._last = None

    def _answer(self, tokens: tuple[int, ...]) -> Stream:
        # The state that `_read` gives has its storage already.
        options = {name: value for name, value in self.options.items() if name != "storage"}
        if options.get("seed") is not None:
            options["seed"] = (options["seed"] + self._turns) % 2**63
        return stream(self.model, state=self._read(tokens), **options)

    @torch.inference_mode()
    def _read(self, tokens: tuple[int, ...]) -> Prompt:
        """The state of all tokens; those that the model has met at the same place are not read again."""
        room = min(self.options.get("max_new_tokens", 128), self.model.context_length - len(tokens))
        kept = None if self._prompt is None else _beginning(self._prompt, tokens)
        if kept is None:
            more = {name: self.options[name] for name in ("chunk", "storage") if name in self.options}
            return prefill(self.model, [tokens], room=room, **more)
        same = kept.length
        unread = len(tokens) - same
        state, logits = with_room(kept.state, unread, unread + room), kept.logits
        chunk = self.options.get("chunk", CHUNK)
        for begin in range(same, len(tokens), chunk):
            part = torch.tensor([tokens[begin : begin + chunk]], device=self.model.device)
            hidden, state = self.model.advance(part, state)
            logits = self.model.predict(hidden[:, -1:])[:, 0]
        return replace(kept, state=state, tokens=(tokens,), logits=logits)


def _beginning(prompt: Prompt, tokens: Sequence[int]) -> Prompt | None:
    """The prompt as far as it begins as `tokens` do, the last of them left to read; None if the state has no such."""
    met = prompt.tokens[0]
    most = min(len(met), len(tokens) - 1)
    same = next((at for at in range(most) if met[at] != tokens[at]), most)
    try:
        return replace(prompt, state=prompt.state.crop(same), tokens=(met[:same],)) if same else None
    except ValueError:  # sums that cannot be taken apart again, or a window that has moved on
        return None
