"""The domain of a translator: what its training sentences have in common, to warn about a sentence outside of it."""

import json
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from regard.core.files import write_text

FILE = "domain.json"
_WORD = re.compile(r"[^\W\d_]+|\S")


@dataclass(frozen=True)
class Domain:
    """The words of the training sentences, and what all sentences have in common.

    >>> from regard.training.data.domain import Domain
    >>> domain = Domain.of(["Le chat dort.", "Le chien dort-il ?"])
    >>> domain.outside("Le chien dort."), domain.outside("le coq dort.")
    ([], ['not among the words of its training: coq', 'no capital letter at the beginning'])
    """

    words: frozenset[str]
    capital: bool
    """Whether every sentence begins with a capital letter."""
    ends: frozenset[str]
    """The punctuation that sentences end with; empty if a sentence ends without any."""
    longest: int
    """The number of words and punctuation marks in the longest sentence."""

    @classmethod
    def of(cls, sentences: Iterable[str]) -> "Domain":
        """The domain of some sentences."""
        rows = [row for row in map(_words, sentences) if row]
        ends = frozenset(row[-1] for row in rows)
        return cls(
            words=frozenset(word for row in rows for word in row),
            capital=all(row[0][0].isupper() for row in rows),
            ends=frozenset() if any(end.isalnum() for end in ends) else ends,
            longest=max(map(len, rows), default=0),
        )

    def outside(self, text: str) -> list[str]:
        """Reasons why a text is outside of the domain; empty if there are none."""
        row = _words(text)
        # A lower-case word may also begin a sentence; whether it needs a capital letter is checked below.
        first = {row[0].capitalize(), row[0].lower()} & self.words if row else set()
        unknown = list(dict.fromkeys(word for word in row[bool(first) :] if word not in self.words))
        reasons = [f"not among the words of its training: {', '.join(unknown)}"] if unknown else []
        if self.capital and row and not row[0][0].isupper():
            reasons.append("no capital letter at the beginning")
        if self.ends and row and row[-1] not in self.ends:
            reasons.append(f"no {' or '.join(sorted(self.ends))} at the end")
        if len(row) > self.longest:
            reasons.append(f"{len(row)} words and signs, where its training had {self.longest} at most")
        return reasons

    def save(self, folder: Path) -> None:
        """Write domain.json into a folder."""
        values = {"capital": self.capital, "ends": sorted(self.ends), "longest": self.longest}
        write_text(folder / FILE, json.dumps({**values, "words": sorted(self.words)}, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Domain | None":
        """The domain that `save` wrote into a folder; None if the folder has none.

        >>> import tempfile
        >>> from regard.training.data.domain import Domain
        >>> domain = Domain.of(["Le chat dort."])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     domain.save(Path(folder))
        ...     Domain.load(Path(folder)) == domain
        True
        """
        path = folder / FILE
        if not path.is_file():
            return None
        values = json.loads(path.read_text(encoding="utf-8"))
        return cls(frozenset(values["words"]), values["capital"], frozenset(values["ends"]), values["longest"])


def _words(text: str) -> list[str]:
    """The words, digits and punctuation marks of a text, in order."""
    return _WORD.findall(unicodedata.normalize("NFC", text))
