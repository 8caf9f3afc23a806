"""Sentence pairs from files: tables of two columns, and gettext's catalogues of translated messages.

A table (.tsv, .txt) has a source, a tab and a target on each line. A catalogue (.po, .mo) has English messages and
their French translations, which are read as (French, English). White space inside a sentence becomes one space.

Errors are ValueErrors that name the file and the line: "pairs.tsv, line 7: expected 2 columns, got 3".
"""

import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from regard.checkpoints.sources import check_file
from regard.training.data.lines import decoded_lines

Pair = tuple[str, str]
"""Source and target: French and English, unless a user's table has other languages."""

CHARSETS = re.compile(rb"utf-?8|us-ascii|ascii|iso-8859-1|iso-8859-15|charset", re.IGNORECASE)
"""Charsets of French catalogues; "CHARSET" is the placeholder of a template."""
MO = 0x950412DE
"""The magic number of a .mo file, in either byte order."""


def read_pairs(path: str | Path | Iterable[str | Path]) -> list[Pair]:
    """The pairs of a .tsv, .txt, .po or .mo file, of all such files in a folder, or of several files and folders.

    Pairs are in the order of the files, a folder's files sorted by name, without duplicates.

    >>> import tempfile
    >>> from pathlib import Path
    >>> file = Path(tempfile.mkdtemp()) / "pairs.tsv"
    >>> _ = file.write_text("un chat\\ta cat\\nun chien\\ta dog\\n")
    >>> read_pairs(file)
    [('un chat', 'a cat'), ('un chien', 'a dog')]
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise ValueError("path: expected one or more files, got none")
    return list(dict.fromkeys(pair for source in paths for file in _files(Path(source)) for pair in _read(file)))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
    if not files:
        raise ValueError(f"{path}: expected a folder with {', '.join(_READERS)} files, got none")
    return files


def _read(path: Path) -> list[Pair]:
    if path.suffix not in _READERS:
        raise ValueError(
            f"{path}: expected a {', '.join(_READERS)} file or a folder of them, got {path.suffix or 'none'!r}"
        )
    data = check_file(path, "a file of sentence pairs").read_bytes()
    pairs = list(_READERS[path.suffix](path, data))
    if not pairs:
        raise ValueError(f"{path}: expected at least one pair, got none")
    return pairs


def _refuse(path: Path, line: int, expected: str, got: str) -> NoReturn:
    raise ValueError(f"{path}, line {line}: expected {expected}, got {got if len(got) <= 80 else got[:80] + '…'}")


def _plain(text: str) -> str:
    return " ".join(text.split())


# --- tables


def _read_table(path: Path, data: bytes) -> Iterator[Pair]:
    for number, line in enumerate(decoded_lines(path, data), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            _refuse(path, number, "2 columns", str(len(columns)) if line else "an empty line")
        source, target = map(_plain, columns)
        if not source or not target:
            _refuse(path, number, "a source and a target", f"an empty {'target' if source else 'source'}")
        yield source, target


# --- catalogues

_KEYWORD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+])?)\s*(".*)')
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}


def _charset(path: Path, header: bytes) -> str:
    """The charset in a catalogue's header; UTF-8 if there is none."""
    match = re.search(rb"charset=([^\s\\\"]*)", header)
    if match is None:
        return "utf-8"
    if not CHARSETS.fullmatch(match[1]):
        raise ValueError(f"{path}: expected a catalogue in UTF-8 or ISO-8859-1, got {match[1][:40]!r}")
    return "utf-8" if match[1].lower() == b"charset" else match[1].decode()


def _read_po(path: Path, data: bytes) -> Iterator[Pair]:
    lines = decoded_lines(path, data, _charset(path, data))
    for fuzzy, message in _messages(path, lines):
        source, target = _plain(message["msgstr"]), _plain(message["msgid"])
        if source and target and not fuzzy:
            yield source, target


def _messages(path: Path, lines: list[str]) -> Iterator[tuple[bool, dict[str, str]]]:
    """The messages of a .po file, as strings by keyword, each with whether it is marked fuzzy."""
    message: dict[str, str] = {}
    field, fuzzy, marked = "", False, False
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            marked = marked or (line.startswith("#,") and "fuzzy" in line)
            continue
        keyword = _KEYWORD.fullmatch(line)
        string = _STRING.fullmatch(keyword[2] if keyword else line)
        if string is None or not (keyword or field):
            _refuse(path, number, "msgid, msgstr, a string that goes on, or a comment", repr(line))
        if keyword:
            field = "msgstr" if keyword[1] == "msgstr[0]" else keyword[1]
            if field in ("msgctxt", "msgid") and "msgstr" in message:
                yield fuzzy, message
                message = {}
            if field in message or (field.startswith("msgstr") and "msgid" not in message):
                _refuse(path, number, "one msgid and then its msgstr", repr(line))
            if not message:
                fuzzy, marked = marked, False
            message[field] = ""
        message[field] += _ESCAPE.sub(_unescaped, string[1])
    if message and "msgstr" not in message:
        _refuse(path, len(lines), "a msgstr for the last msgid", "the end of the file")
    if message:
        yield fuzzy, message


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "01234567":
        return chr(int(code, 8))
    return chr(int(code[1:], 16)) if code[0] == "x" and len(code) > 1 else _ESCAPED.get(code, code)


def _read_mo(path: Path, data: bytes) -> Iterator[Pair]:
    """The messages of a .mo file, which has two tables of (length, offset): originals and translations."""
    order = next((order for order in "<>" if data[:4] == struct.pack(f"{order}I", MO)), None)
    if order is None or len(data) < 28:
        raise ValueError(f"{path}: expected a .mo catalogue, got a file that begins with {data[:4].hex(' ')}")
    revision, count, *tables = struct.unpack_from(f"{order}4I", data, 4)
    if revision >> 16 > 1:
        raise ValueError(f"{path}: expected revision 0 or 1 of .mo, got {revision >> 16}")
    spans = []
    for table in tables:
        if table + 8 * count > len(data):
            raise ValueError(
                f"{path}: expected tables of {count:,} messages in {len(data):,} bytes, got one at {table:,}"
            )
        numbers = struct.unpack_from(f"{order}{2 * count}I", data, table)
        spans.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
        # Overlapping strings could make more text than the file has bytes.
        if any(length + start > len(data) for length, start in spans[-1]) or sum(numbers[::2]) > len(data):
            raise ValueError(f"{path}: expected strings within its {len(data):,} bytes, got some beyond")
    headers = (data[start : start + length] for (empty, _), (length, start) in zip(*spans, strict=True) if not empty)
    charset = _charset(path, next(headers, b""))
    for number, ((length, start), (other, at)) in enumerate(zip(*spans, strict=True), 1):
        try:
            original, translation = data[start : start + length].decode(charset), data[at : at + other].decode(charset)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, message {number}: expected {charset.upper()} text, got {error}") from None
        # \x04 ends a context, \0 separates plural forms.
        source, target = _plain(translation.split("\0")[0]), _plain(original.split("\0")[0].split("\x04")[-1])
        if source and target:
            yield source, target


_READERS = {".tsv": _read_table, ".txt": _read_table, ".po": _read_po, ".mo": _read_mo}
