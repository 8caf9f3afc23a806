"""English prose without a download, sentence by sentence: Python's documentation.

It is the language reference (`pydoc_data.topics`) and the docstrings of the standard library, whose modules are parsed
but not imported. Code, signatures and markup are removed; sentences stay in order.
"""

import ast
import re
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from regard.training.data.lines import read_lines

Document = list[str]
"""Sentences in order."""

SUFFIXES = (".txt", ".md", ".rst")
"""Suffixes of the files that are read from a folder."""
FEWEST_WORDS, MOST_WORDS = 4, 60
"""Words of a sentence; shorter and longer strings are mostly headings and tables."""
LEAST_PLAIN = 0.75
"""The least share of a sentence's words that consist of letters only; code has less."""

OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
"""Folders next to the standard library that do not belong to it, or have almost no prose."""
FUNCTION_WORDS = re.compile(
    r"\b(?:an?|the|is|are|was|were|be|been|it|its|this|that|these|those|of|to|in|on|at|by|for|with|from|as|and|or|but|if|when"
    r"|which|who|not|no|can|may|will|must|should|would|has|have|had|do|does|there|all|any|each|returns?)\b",
    re.IGNORECASE,
)

_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s+(?=["'(\[]?[A-Z])""")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|cf|resp|Dr|Mr|Mrs|St|Fig)\.$")
_ITEM = re.compile(r"^\s*(?:[*•+-]|\d+[.)])\s+(?=\S)")
_MARKUP = (
    (re.compile(r":[a-z:]+:`~?([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),  # :class:`x`
    (re.compile(r"``([^`]*)``|`([^`]*)`_?"), r"\1\2"),
    (re.compile(r"(?<![\w*])\*{1,2}([^*\s](?:[^*]*[^*\s])?)\*{1,2}(?![\w*])"), r"\1"),
    (re.compile(r"[“”]"), '"'),
    (re.compile(r"[‘’]"), "'"),
    (re.compile(r'"([^"\s]+)"'), r"\1"),  # the reference quotes code
    (re.compile(r"(?<=\s)-{2,3}(?=\s)|[–—]"), "-"),
    (re.compile(r"…"), "..."),
)
_CODE = re.compile(r">>>|::=|\s=\s|[{}<>\\|]|==|->|__main__|https?://|^\s*[@#$%]")
_RULE = re.compile(r"[\W_]*")


def prose(path: Path | None = None, name: str = "data") -> list[Document]:
    """English documents: those of a text file or a folder of text files, or without a path Python's documentation.

    In a file, a blank line ends a document. An error about the path calls it `name`.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard.training.data.prose import prose
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "own.txt").write_text("One day it rained. It was\\nMonday.\\n\\nAnother text.")
    ...     prose(Path(folder))
    [['One day it rained.', 'It was Monday.'], ['Another text.']]
    """
    if path is None:
        return [sentences for sentences in embedded().values() if sentences]
    documents = [document for file in _files(path, name) for document in _read(file)]
    if not documents:
        raise ValueError(f"{path}: expected text, got nothing but blank lines")
    return documents


@cache
def embedded() -> dict[str, Document]:
    """Python's documentation: sentences by their origin, such as `topics/with` or `email/charset`. A sentence that
    occurs in several places is kept in the first.

    >>> from regard.training.data.prose import embedded
    >>> embedded()["topics/lambda"][0]
    'Lambda expressions (sometimes called lambda forms) are used to create anonymous functions.'
    """
    documents: dict[str, Document] = {}
    seen: set[str] = set()
    for name, text in _documentation():
        fresh = [sentence for sentence in dict.fromkeys(sentences(text)) if sentence.lower() not in seen]
        seen.update(sentence.lower() for sentence in fresh)
        documents[name] = documents.get(name, []) + fresh
    return documents


def sentences(text: str) -> Document:
    """The sentences in a text of Python's documentation, without code, signatures and markup.

    >>> from regard.training.data.prose import sentences
    >>> sentences("Return the *first* item.  Raises :exc:`KeyError` if there is none.\\n\\n    >>> first([1])\\n    1")
    ['Return the first item.', 'Raises KeyError if there is none.']
    """
    candidates = (sentence for paragraph in _paragraphs(text) for sentence in split_sentences(plain(paragraph)))
    return [sentence for sentence in candidates if _is_prose(sentence)]


def split_sentences(paragraph: str) -> Document:
    """The sentences of a paragraph, split between a full stop and a capital letter, but not after an abbreviation.

    >>> from regard.training.data.prose import split_sentences
    >>> split_sentences("See e.g. Knuth. Is it right? Yes.")
    ['See e.g. Knuth.', 'Is it right?', 'Yes.']
    """
    pieces: Document = []
    for piece in _END.split(paragraph):
        if pieces and _ABBREVIATION.search(pieces[-1]):
            pieces[-1] = f"{pieces[-1]} {piece}"
        elif piece:
            pieces.append(piece)
    return pieces


def plain(text: str) -> str:
    """A text without the markup of reStructuredText, on one line.

    >>> from regard.training.data.prose import plain
    >>> plain("a ``None`` or  *any* :class:`~email.Message`")
    'a None or any email.Message'
    """
    for pattern, instead in _MARKUP:
        text = pattern.sub(instead, text)
    return " ".join(text.split())


def _files(path: Path, name: str) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{name}: expected a text file or a folder of them, got {path}, which does not exist")
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"{path}: expected a folder with {', '.join(SUFFIXES)} files, got none")
    return files


def _read(file: Path) -> Iterator[Document]:
    paragraph: list[str] = []
    for line in [*read_lines(file), ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield split_sentences(" ".join(" ".join(paragraph).split()))
            paragraph = []


def _documentation() -> Iterator[tuple[str, str]]:
    """Names and texts: the topics of the reference, and the docstrings of every module under the module's name."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if OUTSIDE.isdisjoint(place.parts):
            for text in _docstrings(path):
                yield place.with_suffix("").as_posix().removesuffix("/__init__"), text


def _docstrings(path: Path) -> Iterator[str]:
    """A module's docstrings, in the order of the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # a template, or a file for another version of Python
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        waiting += reversed([child for child in getattr(node, "body", []) if hasattr(child, "body")])


def _paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines, without doctests and lines of punctuation; every item of a list is a block."""
    block: list[str] = []
    doctest = False
    for line in [*text.expandtabs().splitlines(), ""]:
        doctest = bool(line.strip()) and (doctest or line.lstrip().startswith(">>>"))
        if _RULE.fullmatch(line) or doctest or _ITEM.match(line):
            if block:
                yield "\n".join(block)
            block = []
        if not _RULE.fullmatch(line) and not doctest:
            block.append(_ITEM.sub("", line, count=1) if not block else line)


def _is_prose(sentence: str) -> bool:
    words = sentence.split()
    if not FEWEST_WORDS <= len(words) <= MOST_WORDS or _CODE.search(sentence):
        return False
    if not sentence[0].isupper() or sentence[-1] not in ".!?":
        return False
    bare = [word.strip(".,;:!?()\"'").lower() for word in words]
    letters = sum(word.replace("-", "").replace("'", "").isalpha() for word in bare)
    return letters >= LEAST_PLAIN * len(words) and FUNCTION_WORDS.search(sentence) is not None
