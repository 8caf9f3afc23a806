"""Labelled texts: a user's table, or sentences of Python's documentation labelled with their subject.

The label of a sentence is the area of the standard library that it comes from, so that no annotation or download is
needed. Areas share most of their words, so that there is something to learn: some sentences of the mail modules are
recognised by their first word, others not at all.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.files import write
from regard.models.padded_rows import pad_ranges
from regard.training.data.arrays import load_arrays
from regard.training.data.held_out import parts
from regard.training.data.lines import read_lines
from regard.training.data.prose import embedded

Integers = NDArray[np.int64]
Labelled = tuple[str, str]
"""A label and a text."""

AREAS = {
    "language": ("topics",),
    "network": (
        *("asyncio", "http", "urllib", "socket", "socketserver", "ssl", "ftplib", "xmlrpc", "wsgiref", "selectors"),
        *("ipaddress", "webbrowser"),
    ),
    "mail": ("email", "mailbox", "smtplib", "imaplib", "poplib", "mimetypes"),
    "windows": ("tkinter", "idlelib", "turtle", "turtledemo", "curses"),
    "testing": (
        *("unittest", "doctest", "pdb", "bdb", "trace", "profile", "cProfile", "pstats", "timeit", "traceback", "cmd"),
    ),
    "numbers": (
        *("decimal", "_pydecimal", "fractions", "statistics", "random", "numbers", "datetime", "_pydatetime"),
        *("_strptime", "calendar", "heapq", "bisect", "colorsys"),
    ),
    "files": (
        *("os", "io", "_pyio", "pathlib", "posixpath", "ntpath", "genericpath", "shutil", "tempfile", "glob", "csv"),
        *("fileinput", "filecmp", "zipfile", "tarfile", "gzip", "bz2", "lzma", "json", "pickle", "pickletools"),
        *("shelve", "dbm", "plistlib", "configparser", "codecs"),
    ),
    "code": (
        *("importlib", "inspect", "ast", "dis", "tokenize", "typing", "types", "pydoc", "dataclasses", "functools"),
        *("enum", "abc", "_collections_abc", "contextlib", "copy", "pkgutil", "zipimport", "symtable", "runpy"),
    ),
}
"""Modules and packages by area: those that all supported versions of Python have, and that belong to one area only."""


def labelled(path: Path | None = None) -> list[Labelled]:
    """Labels and texts: a table with `label TAB text` on each line, or without a path the embedded sentences.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.data.labels import labelled
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "own.tsv").write_text("good\\tI like it.\\nbad\\tI do not.\\n")
    ...     labelled(Path(folder, "own.tsv"))
    [('good', 'I like it.'), ('bad', 'I do not.')]
    """
    if path is None:
        areas = {module: area for area, modules in AREAS.items() for module in modules}
        examples = [
            (areas[module], sentence)
            for name, sentences in embedded().items()
            if (module := name.split("/")[0]) in areas
            for sentence in sentences
        ]
    else:
        examples = read_labelled(path)
    if len({label for label, _ in examples}) < 2:
        got = f"only {examples[0][0]!r}" if examples else "none"
        raise ValueError(f"{path or 'the embedded text'}: expected at least 2 classes, got {got}")
    return examples


def read_labelled(path: Path, name: str = "data", names: Collection[str] | None = None) -> list[Labelled]:
    """Labels and texts of a table, with labels among `names`. An error about the path calls it `name`.

    >>> from regard.training.data.labels import read_labelled
    >>> read_labelled(Path("nowhere.tsv"), "test_data")
    Traceback (most recent call last):
    ValueError: test_data: expected a file of labels and texts, got nowhere.tsv, which is not a file
    """
    if not path.is_file():
        raise ValueError(f"{name}: expected a file of labels and texts, got {path}, which is not a file")
    examples = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2:
            raise ValueError(f"{path}, line {number}: expected 2 columns, label and text, got {len(columns)}")
        for part, value in zip(("label", "text"), columns, strict=True):
            if not value:
                raise ValueError(f"{path}, line {number}: expected a {part}, got an empty one")
        if names is not None and columns[0] not in names:
            raise ValueError(
                f"{path}, line {number}: expected a label of the training texts ({', '.join(names):.200}), "
                f"got {columns[0]!r:.80}"
            )
        examples.append((columns[0], columns[1]))
    return examples


def split_labelled(
    examples: Sequence[Labelled], validation: Sequence[Labelled] | None = None, test: Sequence[Labelled] | None = None
) -> tuple[list[Labelled], list[Labelled], list[Labelled]]:
    """Examples to train on, of at least two classes, to validate with and to test with, split by their text, unless
    there are some to validate or test with.

    >>> from regard.training.data.labels import split_labelled
    >>> examples = [("even" if n % 2 == 0 else "odd", str(n)) for n in range(100)]
    >>> [len(part) for part in split_labelled(examples)]
    [91, 4, 5]
    """
    split = parts(examples, lambda example: example[1], validation, test)
    labels = {label for label, _ in split[0]}
    if len(labels) < 2:
        raise ValueError(
            f"data: expected examples of at least 2 classes to train on, got {len(split[0])} of {len(labels)} class, "
            f"and {len(split[1]) + len(split[2])} held out"
        )
    return split


@dataclass(frozen=True, eq=False)
class LabelledTokens:
    """Examples as tokens: all tokens in one array, the start of each example (and the end of the last), the labels.

    >>> from regard.checkpoints.tokenizer import Tokenizer
    >>> from regard.training.data.labels import LabelledTokens
    >>> tokenizer = Tokenizer.from_vocabulary(["[PAD]", "[CLS]", "[SEP]", "a", "b"])
    >>> examples = LabelledTokens.of([("yes", "abab"), ("no", "b")], ("no", "yes"), tokenizer, length=4)
    >>> examples.batch([0, 1])["tokens"].tolist(), examples.batch([0, 1])["labels"].tolist()
    ([[1, 3, 4, 2], [1, 4, 2, 0]], [1, 0])
    """

    tokens: Integers
    starts: Integers
    labels: Integers
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, examples: Sequence[Labelled], class_names: Sequence[str], tokenizer: Tokenizer, length: int
    ) -> "LabelledTokens":
        """Examples as tokens. Texts longer than `length` tokens are truncated."""
        rows = [tokenizer.encode(text) for _, text in examples]
        rows = [row if len(row) <= length else [*row[: length - 1], row[-1]] for row in rows]
        numbers = {name: number for number, name in enumerate(class_names)}
        return cls(
            np.array([token for row in rows for token in row], np.int64),
            np.cumsum([0, *map(len, rows)]),
            np.array([numbers[label] for label, _ in examples], np.int64),
            tuple(class_names),
        )

    @property
    def sizes(self) -> Integers:
        """Tokens of each example."""
        return np.diff(self.starts)

    def batch(self, indices: Sequence[int], padding_token: int = 0) -> dict[str, Integers]:
        """Some examples as rows: `tokens` (B, T), `lengths` and `labels` (B,)."""
        chosen = np.asarray(indices, np.int64)
        lengths = self.sizes[chosen]
        tokens = pad_ranges(self.tokens, self.starts[chosen], lengths, filling=padding_token)
        return {"tokens": tokens, "lengths": lengths, "labels": self.labels[chosen]}

    def save(self, path: Path) -> None:
        """Write one file atomically."""
        names = np.array(self.class_names)
        write(
            path,
            lambda temporary: np.savez(
                temporary, tokens=self.tokens, starts=self.starts, labels=self.labels, class_names=names
            ),
        )

    @classmethod
    def load(cls, path: Path) -> "LabelledTokens":
        """Read a file that `save` wrote."""
        tokens, starts, labels, names = load_arrays(path, "tokens", "starts", "labels", "class_names")
        return cls(tokens, starts, labels, tuple(names.tolist()))
