"""Lines of text files. Errors are ValueErrors that name the file and the line."""

from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file; ValueError for an empty file.

    >>> import tempfile
    >>> from regard.training.data.lines import read_lines
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "own.txt").write_text("One.\\nTwo.\\n")
    ...     read_lines(Path(folder, "own.txt"))
    ['One.', 'Two.']
    """
    data = path.read_bytes()
    if not data.strip():
        raise ValueError(f"{path}: expected text, got an empty file")
    return decoded_lines(path, data)


def decoded_lines(path: Path, data: bytes, charset: str = "utf-8") -> list[str]:
    """The lines of a file's bytes. Only newlines end a line: `str.splitlines` would split at other characters, too.

    >>> from regard.training.data.lines import decoded_lines
    >>> decoded_lines(Path("own.txt"), b"One.\\r\\nTwo.\\r\\n")
    ['One.', 'Two.']
    """
    try:
        text = data.decode(charset)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{data[error.start]:02x}"
        raise ValueError(f"{path}, line {line}: expected {charset.upper()} text, got {byte}") from None
    return text.removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n").split("\n")
