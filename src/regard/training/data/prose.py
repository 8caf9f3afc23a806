"""English prose that every machine has, sentence by sentence: Python's own documentation.

The language reference (`pydoc_data.topics`) and the docstrings of the standard library, whose modules are not imported.
What is left of them are sentences in their order: no code, no signatures, no markup.
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
"""Sentences in their order."""

SUFFIXES = (".txt", ".md", ".rst")
"""Of the files that are read in a folder of text."""
FEWEST_WORDS, MOST_WORDS = 4, 60
"""Of a sentence; others are headings and tables, mostly."""
LEAST_PLAIN = 0.75
"""Part of a sentence's words that are letters alone; code has less."""

OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings"}
"""Folders of the standard library's place that are not it, or hold next to no prose."""
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
    (re.compile(r'"([^"\s]+)"'), r"\1"),  # what the reference writes code as
    (re.compile(r"(?<=\s)-{2,3}(?=\s)|[–—]"), "-"),
    (re.compile(r"…"), "..."),
)
_CODE = re.compile(r">>>|::=|\s=\s|[{}<>\\|]|==|->|__main__|https?://|^\s*[@#$%]")
_RULE = re.compile(r"[\W_]*")


def prose(path: Path | None = None) -> list[Document]:
    """Documents of English: a user's text file or folder of them, or else what every machine has.

    In a file of one's own a blank line ends a document.

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
    found = [document for file in _files(path) for document in _read(file)]
    if not found:
        raise ValueError(f"{path}: expected text, got nothing but blank lines")
    return found


@cache
def embedded() -> dict[str, Document]:
    """Python's documentation: sentences by where they come from, `topics/with` or `email/charset`. A sentence that
    stands in several places is kept at the first.

    >>> from regard.training.data.prose import embedded
    >>> embedded()["topics/lambda"][0]
    'Lambda expressions (sometimes called lambda forms) are used to create anonymous functions.'
    """
    found: dict[str, Document] = {}
    seen: set[str] = set()
    for name, text in _documentation():
        fresh = [one for one in dict.fromkeys(sentences(text)) if one.lower() not in seen]
        seen.update(one.lower() for one in fresh)
        found[name] = found.get(name, []) + fresh
    return found


def sentences(text: str) -> Document:
    """The sentences in a text of Python's documentation, without code, signatures and markup.

    >>> from regard.training.data.prose import sentences
    >>> sentences("Return the *first* item.  Raises :exc:`KeyError` if there is none.\\n\\n    >>> first([1])\\n    1")
    ['Return the first item.', 'Raises KeyError if there is none.']
    """
    candidates = (one for paragraph in _paragraphs(text) for one in split_sentences(plain(paragraph)))
    return [one for one in candidates if _is_prose(one)]


def split_sentences(paragraph: str) -> Document:
    """A paragraph in sentences: after a full stop and before a capital, unless the stop ends an abbreviation.

    >>> from regard.training.data.prose import split_sentences
    >>> split_sentences("See e.g. Knuth. Is it right? Yes.")
    ['See e.g. Knuth.', 'Is it right?', 'Yes.']
    """
    found: Document = []
    for piece in _END.split(paragraph):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] = f"{found[-1]} {piece}"
        elif piece:
            found.append(piece)
    return found


def plain(text: str) -> str:
    """A text without the marks of reStructuredText, on one line.

    >>> from regard.training.data.prose import plain
    >>> plain("a ``None`` or  *any* :class:`~email.Message`")
    'a None or any email.Message'
    """
    for pattern, instead in _MARKUP:
        text = pattern.sub(instead, text)
    return " ".join(text.split())


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"data: expected a text file or a folder of them, got {path}, which is not there")
    if path.is_file():
        return [path]
    found = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
    if not found:
        raise ValueError(f"{path}: expected a folder with {', '.join(SUFFIXES)} files, got none")
    return found


def _read(file: Path) -> Iterator[Document]:
    paragraph: list[str] = []
    for line in [*read_lines(file), ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield split_sentences(" ".join(" ".join(paragraph).split()))
            paragraph = []


def _documentation() -> Iterator[tuple[str, str]]:
    """Names and texts: the reference's topics, and each docstring under its module's name."""
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
            warnings.simplefilter("ignore")  # of old escapes in its strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):  # a template, or a file for another version
        return
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        waiting += reversed([one for one in getattr(node, "body", []) if hasattr(one, "body")])


def _paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines, an item of a list each for itself; without doctests and lines of signs alone."""
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
