"""Conversations to learn from, one on each line of a file: {"messages": [{"role": …, "content": …}, …]}.

A conversation is written by the template of the model's tokenizer, and only the assistant's answers are learned. Where
an answer begins is what the template writes before it, the beginning of the assistant's turn included, as `regard chat`
does; it ends with the token that ends a turn. A template that writes earlier turns differently once there are later
ones (without their reasoning, say) makes an example of each answer.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.files import write
from regard.models.padded_rows import pad_ranges
from regard.training.data.arrays import load_arrays
from regard.training.data.lines import read_lines
from regard.training.task import IGNORED

EMBEDDED = Path(__file__).parents[2] / "shipped" / "chats.jsonl"
"""Short questions about attention, with short answers."""
ANSWERS = "assistant"
"""The role whose messages are learned."""

Integers = NDArray[np.int64]
Chat = list[dict[str, str]]
"""The messages of a conversation, each with a role and a content."""


def chats(path: Path | None = None, name: str = "data") -> list[Chat]:
    """The conversations of a file; without one, those of the package.

    >>> from regard.training.data.chats import chats
    >>> chats()[0]
    [{'role': 'user', 'content': 'What does attention compute?'}, {'role': 'assistant', 'content': 'A mean of the \
values. Each query weights them by how well it matches their keys.'}]
    """
    path = path or EMBEDDED
    if not path.is_file():
        raise ValueError(f"{name}: expected a file of conversations, got {path}, which is not a file")
    lines = ((number, line) for number, line in enumerate(read_lines(path), start=1) if line.strip())
    return [_chat(line, f"{path}, line {number}") for number, line in lines]


def _chat(line: str, place: str) -> Chat:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: expected a JSON object, got {error!s:.100}") from None
    messages = values.get("messages") if isinstance(values, dict) else values
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: expected messages, a list of objects, got {messages!r:.100}")
    for message in messages:
        texts = [message.get(name) for name in ("role", "content")] if isinstance(message, dict) else []
        if not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{place}: expected messages with a role and a content, got {message!r:.100}")
    if not any(message["role"] == ANSWERS for message in messages):
        raise ValueError(f"{place}: expected an answer, a message of the role {ANSWERS}, got none")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def question(chat: Chat) -> str:
    """What a conversation is known by: all before the first answer."""
    first = next(at for at, message in enumerate(chat) if message["role"] == ANSWERS)
    return "\n".join(message["content"] for message in chat[:first])


def written(chat: Chat, tokenizer: Tokenizer) -> list[tuple[str, list[tuple[int, int]]]]:
    """A conversation as the template writes it, and where its answers begin and end; several texts if the template
    writes earlier turns differently once there are later ones.

    >>> from regard.training.data.chats import written
    >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a"])
    >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
    >>> tokenizer.chat_template += "{% if add_generation_prompt %}<a>{% endif %}"
    >>> written([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], tokenizer)
    [('<u>hi<a>yes', [(8, 11)])]
    """
    texts: list[tuple[str, list[tuple[int, int]]]] = []
    for at, message in enumerate(chat):
        if message["role"] != ANSWERS:
            continue
        before = tokenizer.chat(chat[:at], add_generation_prompt=True)
        until = tokenizer.chat(chat[: at + 1], add_generation_prompt=False)
        if not until.startswith(before) or len(until) == len(before):
            raise CheckpointError(
                "chat_template: expected answers to follow what begins the assistant's turn, got "
                f"{until[-80:]!r} after {before[-80:]!r}"
            )
        spans = texts.pop()[1] if texts and until.startswith(texts[-1][0]) else []
        texts.append((until, [*spans, (len(before), len(until))]))
    return texts


def tokens_of(
    text: str, spans: Sequence[tuple[int, int]], tokenizer: Tokenizer, ends: Collection[int]
) -> tuple[list[int], list[bool]]:
    """The tokens of a text, and which of them are learned: those in answers, up to the last that is one of `ends`. A
    token across the beginning of an answer is not: the model will never be asked for it.

    >>> from regard.training.data.chats import tokens_of
    >>> tokens_of("aabaa", [(1, 5)], Tokenizer.from_vocabulary(["[UNK]", "a", "b"]), ends=[2])
    ([1, 1, 2, 1, 1], [False, True, True, False, False])
    """
    ids, places = tokenizer.places(text)
    learned = [False] * len(ids)
    for first, last in spans:
        # A byte-level token may have its place without its spaces: it is then empty, and where the spaces end.
        inside = [at for at, (begin, end) in enumerate(places) if first <= begin and first < end <= last]
        last_end = max((at for at in inside if ids[at] in ends), default=len(ids))
        for at in inside:
            learned[at] = at <= last_end
    return ids, learned


@dataclass(frozen=True, eq=False)
class ChatTokens:
    """Conversations as tokens: all tokens in one array, which of them are learned, and the start of each conversation
    (and the end of the last).

    >>> from regard.training.data.chats import ChatTokens
    >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a", "b", "<", ">"])
    >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    >>> tokenizer.chat_template += "{% if add_generation_prompt %}<{% endif %}"
    >>> chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    >>> batch = ChatTokens.of([chat], tokenizer, length=9, ends=[]).batch([0])
    >>> batch["tokens"].tolist(), batch["targets"].tolist()
    ([[3, 1, 4, 3, 2]], [[-100, -100, -100, 2, 4]])
    """

    tokens: Integers
    learned: NDArray[np.bool_]
    starts: Integers

    @classmethod
    def of(cls, chats: Iterable[Chat], tokenizer: Tokenizer, length: int, ends: Collection[int]) -> "ChatTokens":
        """Conversations as tokens; `ends` are those that end a turn. More than `length` predictions are truncated; what
        then has no answer is left out."""
        rows = [row for chat in chats for row in _rows(chat, tokenizer, length, ends)]
        return cls(
            np.array([token for ids, _ in rows for token in ids], np.int64),
            np.array([flag for _, learned in rows for flag in learned], np.bool_),
            np.cumsum([0, *(len(ids) for ids, _ in rows)]),
        )

    @property
    def sizes(self) -> Integers:
        """Predictions of each conversation, learned or not."""
        return np.diff(self.starts) - 1

    def batch(self, indices: Sequence[int]) -> dict[str, Integers]:
        """Some conversations as rows, padded on the right: `tokens` and `targets` (B, T), `lengths` (B,)."""
        chosen = np.asarray(indices, np.int64)
        starts, lengths = self.starts[chosen], self.sizes[chosen]
        learned = np.where(self.learned, self.tokens, IGNORED)
        return {
            "tokens": pad_ranges(self.tokens, starts, lengths, filling=0),
            "targets": pad_ranges(learned, starts + 1, lengths, filling=IGNORED),
            "lengths": lengths,
        }

    def save(self, path: Path) -> None:
        """Write one file atomically."""
        arrays = {"tokens": self.tokens, "learned": self.learned, "starts": self.starts}
        write(path, lambda temporary: np.savez(temporary, **arrays))  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> "ChatTokens":
        """Read a file that `save` wrote."""
        return cls(*load_arrays(path, "tokens", "learned", "starts"))


def _rows(
    chat: Chat, tokenizer: Tokenizer, length: int, ends: Collection[int]
) -> Iterator[tuple[list[int], list[bool]]]:
    for text, spans in written(chat, tokenizer):
        ids, learned = tokens_of(text, spans, tokenizer, ends)
        ids, learned = ids[: length + 1], learned[: length + 1]
        if any(learned[1:]):
            yield ids, learned
