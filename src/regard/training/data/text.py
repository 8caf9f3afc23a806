"""Text to train on (the Python standard library's source, a folder, or a file), and its tokens on disk.

Documents are read when they are needed, and tokens are written document by document and read through a memory map, so
that a corpus may be larger than memory.

A token file has a header, the tokens of its documents one after another, with [START] before and [END] after each, and
the start of each document. It is written to a temporary name and renamed, and its checksum is verified when it is
opened. The tokens of much text are several files, of which each process of a run verifies its share.
"""

import hashlib
import json
import os
import re
import struct
import sysconfig
import tempfile
import warnings
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.files import write
from regard.training.parallel import share

SUFFIXES = (".txt", ".md", ".rst", ".py")
PART = 32 * 2**10
"""Bytes of the parts that a single file is cut into; a twentieth of the file if that is less."""
ASIDE = {
    *("test", "tests", "idle_test", "__phello__"),
    *("site-packages", "dist-packages", "__pycache__"),
    *("encodings", "pydoc_data"),
}
"""Folders of the standard library that are left out: tests, other packages, and generated code (forty nearly equal
character tables, and the language reference as one string)."""
HEADER = struct.Struct("<8sIIQQ32s")
"""Magic, bytes of a token, checksum, documents, tokens, fingerprint."""
MAGIC = b"regardT1"
CHUNK = 2**24
FILE = 256 * 2**20
"""Bytes of text whose tokens are in one file, about."""


@dataclass(frozen=True)
class Document:
    """A file, or its bytes from `start` to `stop`. The text is read when it is needed.

    >>> import tempfile
    >>> from regard.training.data.text import documents
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "a.txt").write_text("Hello.")
    ...     _ = (Path(folder) / "b.txt").write_text("Goodbye.")
    ...     [(document.name, document.text) for document in documents(Path(folder))]
    [('a.txt', 'Hello.'), ('b.txt', 'Goodbye.')]
    """

    name: str
    path: Path
    start: int
    stop: int

    @property
    def text(self) -> str:
        """The text; ValueError with file and line if it is not UTF-8."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.stop - self.start)
        except OSError as error:
            raise ValueError(f"{self.path}: expected a file of text, got {error.strerror}") from error
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = 1 + _newlines(self.path, self.start + error.start)
            wrong = f"the byte 0x{data[error.start]:02x} ({error.reason})"
            raise ValueError(f"{self.path}, line {line}: expected UTF-8 text, got {wrong}") from None


def documents(
    path: Path | None = None, suffixes: Sequence[str] = SUFFIXES, *, name: str = "data", least: int = 2
) -> list[Document]:
    """The documents of a folder (every file with one of the suffixes, sorted by name), or the parts of a single file,
    which is cut at line ends, at `least` so many. Without a path, the modules of Python's standard library without its
    tests. An error about the path calls it `name`.

    Empty and hidden files are left out, and modules of the standard library that are not UTF-8, with a warning that
    names them.

    >>> from regard.training.data.text import documents
    >>> names = [one.name for one in documents()]
    >>> "json/decoder.py" in names, "test/test_json/test_decode.py" in names
    (True, False)
    """
    if path is None:
        return _standard_library()
    if path.is_file():
        return _parts(path, least)
    if not path.is_dir():
        raise ValueError(f"{name}: expected a folder or a file of text, got {str(path)!r}")
    endings = tuple(suffix if suffix.startswith(".") else f".{suffix}" for suffix in suffixes)
    files = [document for document in _files(path, endings, set()) if document.stop]
    if not files:
        raise ValueError(f"{path}: expected files that end in {', '.join(endings)} and are not empty, got none")
    return _parts(files[0].path, least) if len(files) == 1 else files


class Joined:
    """Arrays one after another, read as one.

    >>> import numpy as np
    >>> from regard.training.data.text import Joined
    >>> joined = Joined([np.array([5, 6]), np.array([7, 8, 9])])
    >>> len(joined), joined[np.array([[0, 4], [2, 1]])].tolist()
    (5, [[5, 9], [7, 6]])
    """

    def __init__(self, parts: Sequence[NDArray[Any]]) -> None:
        self.parts = tuple(parts)
        self.bounds = np.cumsum([0, *map(len, parts)])
        self.dtype = np.result_type(*parts)

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getitem__(self, places: Any) -> NDArray[Any]:
        wanted = np.asarray(places)
        part = np.searchsorted(self.bounds, wanted, side="right") - 1
        out = np.empty(wanted.shape, self.dtype)
        for number in np.unique(part):
            here = part == number
            out[here] = self.parts[number][wanted[here] - self.bounds[number]]
        return out


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of many documents, memory-mapped from one file or several.

    >>> import tempfile
    >>> from regard.training.data.text import documents, write_tokens
    >>> from regard.training.data.vocabulary import train_bpe
    >>> some = documents()[:3]
    >>> tokenizer = train_bpe([document.text for document in some], 300)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tokens = write_tokens(Path(folder) / "some.tokens", some, tokenizer)
    ...     len(tokens.starts) - 1, int(tokens.ids[0]) == tokenizer.bos, tokens.ids.dtype.name
    (3, True, 'uint16')
    """

    ids: NDArray[Any]
    """All tokens: an array, or what is read like one."""
    starts: NDArray[np.int64]
    """Where each document starts, and where the last one ends."""
    fingerprint: bytes
    """A hash of the documents and the tokenizer."""

    @property
    def parts(self) -> tuple[NDArray[Any], ...]:
        """The tokens of each file."""
        return getattr(self.ids, "parts", (self.ids,))

    @classmethod
    def open(cls, path: str | Path, *, verified: bool = True) -> "Tokens":
        """Open a token file; CheckpointError if it is truncated or, unless it need not be `verified`, damaged."""
        path = Path(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise CheckpointError(f"{path}: expected a token file, got {size:,} bytes of something else")
        _, width, checksum, count, total, fingerprint = HEADER.unpack(header)
        expected = HEADER.size + width * total + 8 * (count + 1)
        if size != expected:
            raise CheckpointError(f"{path}: expected {expected:,} bytes, got {size:,}; delete it to make it again")
        if verified and _checksum(path, _plain(header)) != checksum:
            raise CheckpointError(f"{path}: expected its checksum, got another; delete it to make it again")
        ids = np.memmap(path, f"<u{width}", "r", HEADER.size, (total,))
        starts = np.fromfile(path, "<i8", count + 1, offset=HEADER.size + width * total)
        return cls(ids, starts, fingerprint)

    @classmethod
    def joined(cls, parts: "Sequence[Tokens]") -> "Tokens":
        """The tokens of several files as one."""
        if len(parts) == 1:
            return parts[0]
        ids: Any = Joined([part.ids for part in parts])
        shifted = (part.starts[:-1] + begin for part, begin in zip(parts, ids.bounds, strict=False))
        starts = np.concatenate([*shifted, ids.bounds[-1:]])
        return cls(ids, starts, b"".join(part.fingerprint for part in parts))


def write_tokens(path: str | Path, documents: Sequence[Document], tokenizer: Tokenizer) -> Tokens:
    """The tokens of documents, in a file, or in several if they are long. Existing files are used if they were made
    from these documents with this tokenizer. Tokens are 2 bytes each if the vocabulary allows it, else 4."""
    path, groups = Path(path), _groups(documents)
    names = [path.name]
    if len(groups) > 1:
        names = [f"{path.stem}-{at:05}-of-{len(groups):05}{path.suffix}" for at in range(len(groups))]
    mine = range(len(groups))[share()]
    parts = [
        _write_file(path.with_name(name), group, tokenizer, at in mine)
        for at, (name, group) in enumerate(zip(names, groups, strict=True))
    ]
    return Tokens.joined(parts)


def _groups(documents: Sequence[Document]) -> list[Sequence[Document]]:
    """Documents in groups whose text fills a file."""
    ends = np.cumsum([document.stop - document.start for document in documents])
    cuts = [0, *(1 + np.flatnonzero(np.diff(ends // FILE))).tolist(), len(documents)]
    return [documents[low:high] for low, high in pairwise(cuts)]


def _write_file(path: Path, documents: Sequence[Document], tokenizer: Tokenizer, verified: bool) -> Tokens:
    fingerprint = _fingerprint(documents, tokenizer)
    if path.exists() and (there := Tokens.open(path, verified=verified)).fingerprint == fingerprint:
        return there
    width = 2 if tokenizer.vocabulary_size <= 2**16 else 4
    start, end = bounds(tokenizer)

    def produce(temporary: Path) -> None:
        starts = array("q", [0])
        with temporary.open("wb") as file:
            file.write(bytes(HEADER.size))
            for document in documents:
                ids = np.array([start, *plain_ids(tokenizer, document.text), end], f"<u{width}")
                file.write(ids.tobytes())
                starts.append(starts[-1] + len(ids))
            file.write(np.array(starts, "<i8").tobytes())
        fields = (len(documents), starts[-1], fingerprint)
        checksum = _checksum(temporary, HEADER.pack(MAGIC, width, 0, *fields))
        with temporary.open("r+b") as file:
            file.write(HEADER.pack(MAGIC, width, checksum, *fields))
            file.flush()
            os.fsync(file.fileno())

    return Tokens.open(write(path, produce))


def bounds(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens before and after a document; one token for both, if the vocabulary has no other.

    >>> from regard.training.data.text import bounds
    >>> from regard.training.data.vocabulary import train_bpe
    >>> bounds(train_bpe(["some text"], 300))
    (1, 2)
    """
    ids = [token for token in (tokenizer.bos, tokenizer.eos) if token is not None]
    if not ids:
        raise ValueError("from: expected a model whose tokenizer has a token that starts or ends texts, got none")
    return ids[0], ids[-1]


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens, where the name of a special token is encoded as ordinary text.

    >>> from regard.training.data.text import plain_ids
    >>> from regard.training.data.vocabulary import train_bpe
    >>> tokenizer = train_bpe(["[END] of text"], 300)
    >>> tokenizer.eos in tokenizer.encode("[END]", special=False), tokenizer.eos in plain_ids(tokenizer, "[END]")
    (True, False)
    """
    names = "|".join(f"(?<={re.escape(name[:1])})(?={re.escape(name[1:])})" for name in tokenizer.special.values())
    parts = re.split(names, text) if names else [text]
    return [token for part in parts for token in tokenizer.encode(part, special=False)]


def _standard_library() -> list[Document]:
    modules = [module for module in _files(Path(sysconfig.get_paths()["stdlib"]), (".py",), ASIDE) if module.stop]
    unreadable = set()
    for module in modules:
        try:
            _ = module.text
        except ValueError:
            unreadable.add(module.name)
    if unreadable:
        summary = f"{len(unreadable)} of {len(modules)} modules: {', '.join(sorted(unreadable))}"
        warnings.warn(f"left out, because they are not UTF-8: {summary}", stacklevel=3)
    return [module for module in modules if module.name not in unreadable]


def _files(folder: Path, endings: tuple[str, ...], aside: set[str]) -> list[Document]:
    matches = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in aside and not name.startswith(".")]
        for name in files:
            path = Path(parent, name)
            if name.endswith(endings) and not name.startswith(".") and path.is_file():
                matches.append(Document(path.relative_to(folder).as_posix(), path, 0, path.stat().st_size))
    return sorted(matches, key=lambda document: document.name)


def _parts(path: Path, least: int) -> list[Document]:
    """A file as documents of about the same length, cut at line ends."""
    size = path.stat().st_size
    if not size:
        raise ValueError(f"{path}: expected text, got an empty file")
    length = max(1, min(PART, size // 20))
    cuts = [0]
    with path.open("rb") as file:
        position = 0
        for line in file:
            position += len(line)
            if position - cuts[-1] >= length:
                cuts.append(position)
    if cuts[-1] < size:
        cuts.append(size)
    if len(cuts) <= least:
        raise ValueError(f"{path}: expected at least 2 lines, some to train on and some to hold out, got 1")
    return [Document(f"{path.name}:{at}", path, *ends) for at, ends in enumerate(pairwise(cuts))]


def _newlines(path: Path, before: int) -> int:
    with path.open("rb") as file:
        return sum(file.read(min(CHUNK, before - at)).count(b"\n") for at in range(0, before, CHUNK))


def _fingerprint(documents: Sequence[Document], tokenizer: Tokenizer) -> bytes:
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        digest.update((Path(folder) / "tokenizer.json").read_bytes())
    for document in documents:
        status = document.path.stat()
        digest.update(
            json.dumps([document.name, document.start, document.stop, status.st_size, status.st_mtime_ns]).encode()
        )
    return digest.digest()


def _plain(header: bytes) -> bytes:
    """A header with its checksum set to 0."""
    magic, width, _, *rest = HEADER.unpack(header)
    return HEADER.pack(magic, width, 0, *rest)


def _checksum(path: Path, header: bytes) -> int:
    """The CRC-32 of a header and of everything after the header of a file."""
    checksum = zlib.crc32(header)
    for chunk in _chunks(path):
        checksum = zlib.crc32(chunk, checksum)
    return checksum


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(HEADER.size)
        while chunk := file.read(CHUNK):
            yield chunk
