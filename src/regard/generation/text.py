"""Tokens to text as they come: no character in two halves, and nothing of a stop string shown before it is known."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from regard.checkpoints.tokenizer import Tokenizer

BROKEN = "\ufffd"
"""What a decoder gives for bytes that are no character, or not yet one."""


class Writer:
    """The text of a growing list of tokens, piece by piece.

    >>> from regard.generation.text import Writer
    >>> writer = Writer(None, stop=["7 8"])
    >>> writer.add(5), writer.add(7), writer.add(8)
    ('5', ' ', '')
    >>> writer.text, writer.stopped
    ('5 ', True)
    """

    def __init__(self, tokenizer: "Tokenizer | None", stop: Sequence[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.tokens: list[int] = []
        self.text = ""
        """What has been given out."""
        self.stopped = False
        """Whether a stop string has come; the text ends before it."""
        self._held = ""
        self._read = 0
        self._start = 0

    def add(self, token: int) -> str:
        """Take one more token; give what of the text is certain now."""
        self.tokens.append(token)
        if self.stopped:
            return ""
        return self._give(self._fresh(last=False), last=False)

    def finish(self) -> str:
        """Give what was held back: there is no more to come."""
        return "" if self.stopped else self._give(self._fresh(last=True), last=True)

    def _fresh(self, last: bool) -> str:
        """The characters that the newest tokens complete."""
        if self.tokenizer is None:
            text = "".join(f" {token}" if at else str(token) for at, token in enumerate(self.tokens))
            found, self._read = text[self._read :], len(text)
            return found
        # Tokens are decoded with some that are known already, since a tokenizer may treat the first one differently.
        known = self.tokenizer.decode(self.tokens[self._start : self._read])
        whole = self.tokenizer.decode(self.tokens[self._start :])
        if len(whole) <= len(known) or (whole.endswith(BROKEN) and not last):
            return whole[len(known) :] if last else ""
        self._start, self._read = self._read, len(self.tokens)
        return whole[len(known) :]

    def _give(self, fresh: str, last: bool) -> str:
        self._held += fresh
        places = [place for place in (self._held.find(one) for one in self.stop) if place >= 0]
        if places:
            self.stopped = True
            piece, self._held = self._held[: min(places)], ""
        else:
            keep = 0 if last else self._beginning()
            piece, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self.text += piece
        return piece

    def _beginning(self) -> int:
        """How many of the last characters could be the beginning of a stop string."""
        longest = max((len(one) for one in self.stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(one.startswith(self._held[-size:]) for one in self.stop):
                return size
        return 0
