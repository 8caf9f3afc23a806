"""Incremental detokenization: pieces never split a character, and never contain the beginning of a stop string.

Special tokens and the end token are not part of the text, but a stop string may contain them: stop strings are searched
both in the text with special tokens and in the text without.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.checkpoints.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""The replacement character, which stands for bytes that are not, or not yet, a complete character."""


class Writer:
    """The text of a growing list of tokens, piece by piece.

    >>> from regard.inference.generation.text import Writer
    >>> writer = Writer(None, stop=["7 8"])
    >>> writer.add(5), writer.add(7), writer.add(8)
    ('5', ' ', '')
    >>> writer.text, writer.stopped
    ('5 ', True)
    """

    def __init__(self, tokenizer: "Tokenizer | None", stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.stopped = False
        """Whether a stop string was found; the text ends before it."""
        self._pieces: list[str] = []
        self._pending: list[tuple[str, bool]] = []
        """Characters that may begin a stop string, and whether they are text or belong to a special token."""
        self._plain: list[int] = []
        """Tokens that are not special; those from `_start` on are decoded together, those from `_read` on are new."""
        self._start = self._read = 0

    @property
    def text(self) -> str:
        """The text so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def add(self, token: int) -> str:
        """Add a token; returns the text that is now certain."""
        self.tokens.append(token)
        if self.stopped:
            return ""
        if self.tokenizer is None:
            return self._give(self._written(token), text=True)
        written = "" if self.tokenizer.decode([token]) else self._written(token)
        if written:
            return self._give(written, text=False)
        self._plain.append(token)
        return self._give(self._fresh(last=False), text=True)

    def end(self, token: int) -> str:
        """Add the end token, which is not text but may be part of a stop string; returns the rest of the text."""
        self.tokens.append(token)
        piece = self._complete()
        if self.stop and not self.stopped:
            piece += self._give(self._written(token), text=False)
        return piece + self.finish()

    def finish(self) -> str:
        """Return the text that was held back, since no more tokens will come."""
        piece = self._complete()
        return piece if self.stopped else piece + self._release(len(self._pending))

    def fork(self) -> "Writer":
        """A copy that continues separately."""
        other = copy.copy(self)
        other.tokens, other._plain = [*self.tokens], [*self._plain]
        other._pieces, other._pending = [*self._pieces], [*self._pending]
        return other

    def _complete(self) -> str:
        """Return the characters of incomplete tokens as they are."""
        if self.tokenizer is None or self.stopped:
            return ""
        return self._give(self._fresh(last=True), text=True)

    def _written(self, token: int) -> str:
        """The newest token as text, special tokens included, for the search of stop strings."""
        if self.tokenizer is None:
            return f" {token}" if len(self.tokens) > 1 else f"{token}"
        return self.tokenizer.decode([token], special=True)

    def _fresh(self, last: bool) -> str:
        """The characters that the newest tokens complete."""
        assert self.tokenizer is not None
        # Tokens are decoded together with some older ones, since a tokenizer may treat the first token differently.
        before = self.tokenizer.decode(self._plain[self._start : self._read])
        whole = self.tokenizer.decode(self._plain[self._start :])
        if len(whole) <= len(before) or (whole.endswith(BROKEN) and not last):
            return whole[len(before) :] if last else ""
        self._start, self._read = self._read, len(self._plain)
        return whole[len(before) :]

    def _give(self, fresh: str, *, text: bool) -> str:
        """Add characters; returns those that can no longer be the beginning of a stop string."""
        if not self.stop:
            self._pieces.append(fresh if text else "")
            return self._pieces[-1]
        self._pending += [(character, text) for character in fresh]
        shown = [place for place, (_, is_text) in enumerate(self._pending) if is_text]
        ends = [end for places in (range(len(self._pending)), shown) for end in self._ends(places)]
        if ends:
            self.stopped = True
            return self._release(min(ends))
        kept = [begin for places in (range(len(self._pending)), shown) for begin in self._begins(places)]
        return self._release(min(kept, default=len(self._pending)))

    def _ends(self, places: Sequence[int]) -> list[int]:
        """The positions at which stop strings begin in the pending characters at `places`."""
        text = "".join(self._pending[place][0] for place in places)
        return [places[at] for at in (text.find(stop) for stop in self.stop) if at >= 0]

    def _begins(self, places: Sequence[int]) -> list[int]:
        """The position from which the pending characters at `places` may be the beginning of a stop string."""
        text = "".join(self._pending[place][0] for place in places)
        longest = max(map(len, self.stop)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stop):
                return [places[-size]]
        return []

    def _release(self, count: int) -> str:
        """Return the first pending characters that are text, and drop them from the pending ones."""
        self._pieces.append("".join(character for character, text in self._pending[:count] if text))
        del self._pending[:count]
        return self._pieces[-1]
