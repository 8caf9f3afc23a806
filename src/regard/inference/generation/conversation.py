"""A conversation in turns, with the checkpoint's chat template; no token is read twice.

Each turn is rendered together with all turns before it. The state already has the tokens that the model has read or
generated; only the tokens after the longest common prefix are read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from regard.inference.generation import Generated, Prompt, Stream, prefill, stream
from regard.inference.generation.prompt import CHUNK, with_room
from regard.models.base import GenerativeModel, Model, expect


class ContextError(ValueError):
    """A message that does not fit the rest of the model's context.

    >>> from regard.inference.generation.conversation import ContextError
    >>> issubclass(ContextError, ValueError)
    True
    """


class Answer:
    """An iterator over the pieces of one answer; `text` and `result` are what was generated so far."""

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
        """What the model has read: the conversation and the answer except its last token; None before it begins."""
        return None if self._stream is None else self._stream.prompt_so_far()


class Conversation:
    """A conversation with a model, turn by turn; the options are those of `stream`.

    The part of an answer that was iterated over becomes part of the conversation, so an answer may be interrupted. Each
    turn adds the number of turns before it to `seed`.

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
        stream(model, [0], **options)  # checks the options; the model reads nothing yet
        self.model, self.system, self.options = model, system, options
        self._tokenizer = model.tokenizer
        self.reset()
        self._rendered("a message")  # raises if the template does not accept these messages

    def reset(self) -> None:
        """Start again; only the system message stays."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._turns = 0
        self._prompt: Prompt | None = None
        self._last: tuple[str, Answer] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages so far, in the form that chat templates take."""
        return [*self._messages, *self._last_turn()]

    def say(self, text: str) -> Answer:
        """Send a message; returns the answer, which is generated while it is iterated over.

        Raises ContextError, and leaves the conversation as it was, if the text and one more token do not fit the
        context.
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
        """The messages of the last turn, with the answer as far as it was generated; none if it was not begun."""
        if self._last is None:
            return []
        text, answer = self._last
        result = answer.result
        if not result and result.reason == "interrupted":
            return []
        return [{"role": "user", "content": text}, {"role": "assistant", "content": str(result)}]

    def _settle(self) -> None:
        """Move the last turn into the history."""
        turn = self._last_turn()
        if self._last is not None:
            self._prompt = self._last[1].prompt_so_far() or self._prompt
        self._messages += turn
        self._turns += len(turn) // 2
        self._last = None

    def _answer(self, tokens: tuple[int, ...]) -> Stream:
        # The state from `_read` has its storage already.
        options = {name: value for name, value in self.options.items() if name != "storage"}
        if options.get("seed") is not None:
            options["seed"] = (options["seed"] + self._turns) % 2**63
        return stream(self.model, state=self._read(tokens), **options)

    @torch.inference_mode()
    def _read(self, tokens: tuple[int, ...]) -> Prompt:
        """The state of all tokens; the common prefix with the previous state is not read again."""
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
    """The prompt cropped to its common prefix with `tokens` (without the last); None if the state cannot be cropped."""
    met = prompt.tokens[0]
    most = min(len(met), len(tokens) - 1)
    same = next((at for at in range(most) if met[at] != tokens[at]), most)
    try:
        return replace(prompt, state=prompt.state.crop(same), tokens=(met[:same],)) if same else None
    except ValueError:  # a recurrent state, or a sliding window that has dropped tokens
        return None
