"""French and English sentences from Debian's package descriptions, as a table for `regard train translate --data`.

Debian's translators have translated a third of the descriptions into French. On Debian or Ubuntu, apt downloads them
into a folder of yours, without root:

    mkdir -p lists/partial
    apt-get update -o Dir::State::Lists=$PWD/lists -o Dir::Cache=$PWD/lists \\
        -o Acquire::Languages=en,fr -o Acquire::GzipIndexes=false
    python examples/debian_pairs.py --lists lists --out debian.tsv

A description and its translation have the same checksum (Description-md5). Both are cut into summary, paragraphs, list
items and sentences, and parts are paired if both sides have the same number of them.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from regard.core.files import write_text

HELPER = "/usr/lib/apt/apt-helper"
"""apt's program that reads compressed lists."""
ITEM = re.compile(r"\s*(?:[-*+•·o–—]|\d+[.)])\s+")
SENTENCE_END = re.compile(
    r"(?<![ (]e\.g\.)(?<![ (]i\.e\.)(?<![ (]p\. ex\.)(?<! vs\.)(?<! cf\.)(?<!\b[A-Z]\.)"
    r"(?<=[.!?]) (?=[A-ZÀÂÇÉÈÊÎÔŒ«\"(])"
)
MOST_WORDS = 80
"""The most words of a side of a pair; a longer paragraph that cannot be cut into sentences is left out."""


def main(arguments: list[str] | None = None) -> None:
    """Read the lists, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", type=Path, required=True, help="folder with apt's Translation-en and Translation-fr")
    parser.add_argument("--out", type=Path, required=True, help="the table to write: French, a tab, English")
    options = parser.parse_args(arguments)
    try:
        pairs = debian_pairs(options.lists)
    except ValueError as error:
        parser.error(str(error))
    write_text(options.out, "".join(f"{french}\t{english}\n" for french, english in pairs))
    words = sum(len(english.split()) for _, english in pairs)
    print(f"{options.out}: {len(pairs):,} pairs, {words:,} English words")


def debian_pairs(lists: Path) -> list[tuple[str, str]]:
    """The pairs (French, English) of all lists in a folder, without duplicates."""
    french, english = (_descriptions(lists, language) for language in ("fr", "en"))
    pairs = (
        pair
        for checksum, translated in french.items()
        if checksum in english
        for pair in _paired(translated, english[checksum])
    )
    return list(dict.fromkeys(filter(_is_translated, pairs)))


def _descriptions(lists: Path, language: str) -> dict[str, list[str]]:
    """Descriptions by checksum, each as its lines."""
    files = sorted(lists.glob(f"*_Translation-{language}*"))
    if not files:
        raise ValueError(f"--lists: expected a folder with Translation-{language} files, got {lists}; see --help")
    descriptions: dict[str, list[str]] = {}
    for file in files:
        for stanza in _text(file).split("\n\n"):
            checksum = re.search(r"^Description-md5: (\w+)", stanza, re.MULTILINE)
            description = re.search(rf"^Description-{language}: (.*(?:\n[ \t].*)*)", stanza, re.MULTILINE)
            if checksum and description:
                descriptions.setdefault(checksum[1], description[1].split("\n"))
    return descriptions


def _text(file: Path) -> str:
    if "." not in file.name.rpartition("Translation-")[2]:
        return file.read_text(encoding="utf-8")
    return subprocess.run([HELPER, "cat-file", str(file)], check=True, capture_output=True).stdout.decode("utf-8")


def _paired(french: list[str], english: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of summaries, and of all parts if both sides have the same number of them."""
    yield _clean(french[0]), _clean(english[0])
    paragraphs = _paragraphs(french[1:]), _paragraphs(english[1:])
    if len(paragraphs[0]) != len(paragraphs[1]):
        return
    for here, there in zip(*paragraphs, strict=True):
        if len(here) != len(there):
            continue
        for left, right in zip(here, there, strict=True):
            sentences = SENTENCE_END.split(left), SENTENCE_END.split(right)
            if len(sentences[0]) == len(sentences[1]):
                yield from zip(*sentences, strict=True)
            else:
                yield left, right


def _paragraphs(lines: list[str]) -> list[list[str]]:
    """The paragraphs of a description, each as a list of texts and list items.

    A dot is an empty line. A line that begins with two spaces is not joined with the line before it, unless it
    continues a list item.
    """
    paragraphs: list[list[str]] = [[]]
    item = False
    for line in lines:
        line = line[1:]
        if line.strip() in ("", "."):
            paragraphs.append([])
            continue
        begun = ITEM.match(line)
        goes_on = paragraphs[-1] and not begun and (item or not line.startswith(" "))
        item = bool(begun) or (item and bool(goes_on))
        text = _clean(line[begun.end() :] if begun else line)
        if goes_on:
            paragraphs[-1][-1] += f" {text}"
        else:
            paragraphs[-1].append(text)
    return [paragraph for paragraph in paragraphs if paragraph]


def _clean(text: str) -> str:
    return " ".join(text.split())


def _is_translated(pair: tuple[str, str]) -> bool:
    """Whether both sides have words, differ, and have similar lengths."""
    french, english = (re.findall(r"\w+", side.lower()) for side in pair)
    if "<trans>" in pair[0] or not french or not english:
        return False
    if len(set(french) & set(english)) > 0.8 * len(set(french)):
        return False
    shorter, longer = sorted((len(french), len(english)))
    return longer <= MOST_WORDS and longer <= 2 * shorter + 4


if __name__ == "__main__":
    sys.exit(main())
