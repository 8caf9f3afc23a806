"""Sentence pairs from files: tables, gettext's catalogues, and Debian's package lists."""

import gettext
import importlib.util
import io
import random
import re
import struct
from pathlib import Path

import pytest

from regard.training.data.pairs import read_pairs

ROOT = Path(__file__).parent.parent


# --- tables


def test_a_table(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufeffun\tone\r\ndeux  fois\t two times \nun\tone\nun\u2028e\tone\n".encode())
    assert read_pairs(path) == [("un", "one"), ("deux fois", "two times"), ("un e", "one")]
    assert read_pairs(str(path)) == read_pairs(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a file of sentence pairs, got an empty file"),
        (b"a\tb\nc\n", "line 2: expected 2 columns, got 1"),
        (b"a\tb\n\nc\td\n", "line 2: expected 2 columns, got an empty line"),
        (b"a\tb\tc\n", "line 1: expected 2 columns, got 3"),
        (b"a\tb\na\t\n", "line 2: expected a source and a target, got an empty target"),
        (b"a\tb\n \tb\n", "line 2: expected a source and a target, got an empty source"),
        (b"a\tb\nc\td\ne\t\xe9\n", "line 3: expected UTF-8 text, got byte 0xe9"),
    ],
)
def test_tables_that_are_refused(data, message, tmp_path):
    (tmp_path / "pairs.tsv").write_bytes(data)
    with pytest.raises(ValueError, match=rf"pairs\.tsv[,:] {re.escape(message)}|pairs\.tsv: expected {message}"):
        read_pairs(tmp_path / "pairs.tsv")


def test_files_that_are_not_there_or_not_known(tmp_path):
    (tmp_path / "pairs.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"none\.tsv: expected a file of sentence pairs, got no such file"):
        read_pairs(tmp_path / "none.tsv")
    with pytest.raises(ValueError, match=r"pairs\.csv: expected a \.tsv, \.txt, \.po, \.mo file .* got '\.csv'"):
        read_pairs(tmp_path / "pairs.csv")
    with pytest.raises(ValueError, match=r"expected a folder with \.tsv.* files, got none"):
        read_pairs(tmp_path)
    with pytest.raises(ValueError, match="path: expected one or more files, got none"):
        read_pairs([])


def test_several_sources_are_joined(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "b.tsv").write_text("un\tone\n")
    (tmp_path / "in" / "deep" / "a.txt").write_text("deux\ttwo\nun\tone\n")
    (tmp_path / "in" / "other.md").write_text("nothing")
    (tmp_path / "c.tsv").write_text("trois\tthree\nun\ta\n")
    assert read_pairs(tmp_path / "in") == [("un", "one"), ("deux", "two")]
    both = read_pairs([tmp_path / "c.tsv", tmp_path / "in"])
    assert both == [("trois", "three"), ("un", "a"), ("un", "one"), ("deux", "two")]


# --- catalogues

PO = r"""
# A comment.
msgid ""
msgstr ""
"Project-Id-Version: a\n"
"Content-Type: text/plain; charset=UTF-8\n"

#: a.c:1
#, c-format
msgid "Cannot open %s: \"%d\"\n"
msgstr ""
"Impossible d'ouvrir %s"
" : « %d »\n"

#, c-format, fuzzy
#| msgid "before"
msgid "a guess"
msgstr "une idée"

msgid "not yet"
msgstr ""

msgctxt "menu"
msgid "Open"
msgstr "Ouvrir"

msgid "%d file"
msgid_plural "%d files"
msgstr[0] "%d fichier"
msgstr[1] "%d fichiers"

#~ msgid "of the past"
#~ msgstr "du passé"

msgid "tab\there"
msgstr "l\303\240"
"""
PAIRS = [
    ("Impossible d'ouvrir %s : « %d »", 'Cannot open %s: "%d"'),
    ("Ouvrir", "Open"),
    ("%d fichier", "%d file"),
]


def test_a_po_file(tmp_path):
    path = tmp_path / "fr.po"
    path.write_text(PO, encoding="utf-8")
    assert read_pairs(path) == [*PAIRS, ("lÃ", "tab here")]


def test_a_po_file_says_its_charset(tmp_path):
    path = tmp_path / "fr.po"
    path.write_bytes(PO.replace("UTF-8", "ISO-8859-1").encode("latin-1"))
    assert read_pairs(path)[:3] == PAIRS
    path.write_bytes(PO.replace("UTF-8", "utf-7").encode())
    with pytest.raises(ValueError, match=r"fr\.po: expected a catalogue in UTF-8 or ISO-8859-1, got b'utf-7'"):
        read_pairs(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'msgid "a"\nmsgstr "b\n', "line 2: expected msgid, msgstr"),
        (b'msgid "a"\nmsgstr "b"\nnonsense\n', "line 3: expected msgid, msgstr"),
        (b'"a"\n', "line 1: expected msgid, msgstr"),
        (b'msgid "a"\nmsgid "b"\n', "line 2: expected one msgid and then its msgstr"),
        (b'msgstr "a"\n', "line 1: expected one msgid and then its msgstr"),
        (b'msgid "a"\n', "line 1: expected a msgstr for the last msgid, got the end"),
        (b'msgid "a"\nmsgstr "\xff"\n', "line 2: expected UTF-8 text, got byte 0xff"),
        (b'msgid "a"\nmsgstr ""\n', "expected at least one pair, got none"),
    ],
)
def test_po_files_that_are_refused(text, message, tmp_path):
    (tmp_path / "a.po").write_bytes(text)
    with pytest.raises(ValueError, match=rf"a\.po.*{message}"):
        read_pairs(tmp_path / "a.po")


def make_mo(messages, order="<"):
    """A .mo file as msgfmt writes it."""
    entries = sorted(messages.items())
    head = struct.pack(f"{order}7I", 0x950412DE, 0, len(entries), 28, 28 + 8 * len(entries), 0, 0)
    at = 28 + 16 * len(entries)
    tables, strings = [b"", b""], b""
    for side in (0, 1):
        for entry in entries:
            text = entry[side].encode()
            tables[side] += struct.pack(f"{order}2I", len(text), at + len(strings))
            strings += text + b"\0"
    return head + tables[0] + tables[1] + strings


MESSAGES = {
    "": "Content-Type: text/plain; charset=UTF-8\nPlural-Forms: nplurals=2; plural=n>1;\n",
    "Cannot open %s": "Impossible d'ouvrir %s",
    "menu\x04Open": "Ouvrir",
    "%d file\0%d files": "%d fichier\0%d fichiers",
    "not yet": "",
    "two\nlines": "deux\nlignes",
}


@pytest.mark.parametrize("order", "<>")
def test_a_mo_file(order, tmp_path):
    data = make_mo(MESSAGES, order)
    assert gettext.GNUTranslations(io.BytesIO(data)).gettext("Cannot open %s") == "Impossible d'ouvrir %s"
    (tmp_path / "fr.mo").write_bytes(data)
    expected = {("Impossible d'ouvrir %s", "Cannot open %s"), ("Ouvrir", "Open"), ("%d fichier", "%d file")}
    assert set(read_pairs(tmp_path / "fr.mo")) == expected | {("deux lignes", "two lines")}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello, world, this is no catalogue", "expected a .mo catalogue, got a file that begins with 68 65 6c 6c"),
        (make_mo(MESSAGES)[:20], "expected a .mo catalogue"),
        (make_mo(MESSAGES)[:60], "expected tables of 6 messages in 60 bytes"),
        (make_mo(MESSAGES)[:150], "expected strings within its 150 bytes"),
        (struct.pack("<7I", 0x950412DE, 0, 2**32 - 1, 28, 28, 0, 0), "expected tables of 4,294,967,295 messages"),
        (struct.pack("<7I", 0x950412DE, 7 << 16, 0, 28, 28, 0, 0), "expected revision 0 or 1 of .mo, got 7"),
        (
            struct.pack("<7I", 0x950412DE, 0, 1, 28, 36, 0, 0) + struct.pack("<4I", 40, 0, 40, 8),
            "expected strings within",
        ),
        (make_mo({"": "charset=klingon\n", "a": "b"}), "expected a catalogue in UTF-8"),
        (make_mo({"a": "é"}).replace("é".encode(), b"\xff\xff"), "message 1: expected UTF-8 text"),
        (make_mo({"": "x"}), "expected at least one pair, got none"),
    ],
)
def test_mo_files_that_are_refused(data, message, tmp_path):
    (tmp_path / "a.mo").write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.mo[:,] {re.escape(message)}"):
        read_pairs(tmp_path / "a.mo")


def test_mo_files_that_share_their_bytes_do_not_grow(tmp_path):
    count = 2_000
    table = 28 + 8 * count
    data = struct.pack("<7I", 0x950412DE, 0, count, 28, table, 0, 0) + struct.pack("<2I", 10_000, 28) * 2 * count
    (tmp_path / "a.mo").write_bytes(data)
    with pytest.raises(ValueError, match="strings within"):
        read_pairs(tmp_path / "a.mo")


def test_damaged_catalogues_give_pairs_or_one_error(tmp_path):
    dice = random.Random(0)
    for name, whole in (("a.mo", make_mo(MESSAGES)), ("a.po", PO.encode())):
        path = tmp_path / name
        read = refused = 0
        for attempt in range(300):
            data = bytearray(whole)
            if attempt % 2:
                data = data[: dice.randrange(1, len(data))]
            else:
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            path.write_bytes(data)
            try:
                read += bool(read_pairs(path))
            except ValueError as error:
                refused += str(path) in str(error)
        assert read + refused == 300
        assert read > 30
        assert refused > 30


# --- Debian's lists

EN = """Package: a
Description-md5: 1
Description-en: a small game
 This is a game. You play it (e.g. Chess) alone.
 It is fun!
 .
 Features:
  * many levels
  * one long item
    that goes on
 .
 It has one sentence too many. It has.

Package: b
Description-md5: 2
Description-en: only in English

Package: c
Description-md5: 3
Description-en: not translated at all here
 This paragraph is.
 .
 <this> is missing.
"""
FR = """Package: a
Description-md5: 1
Description-fr: un petit jeu
 Ceci est un jeu. Vous y jouez (e.g. Échecs)
 seul. C'est amusant !
 .
 Fonctions :
  - plusieurs niveaux ;
  - un long élément
    qui continue.
 .
 Il a une phrase de trop.

Package: c
Description-md5: 3
Description-fr: not translated at all here
 Ce paragraphe-ci l'est.
 .
 <trans>

Package: d
Description-md5: 4
Description-fr: seulement en français
"""


@pytest.fixture(scope="module")
def debian():
    spec = importlib.util.spec_from_file_location("debian_pairs", ROOT / "examples" / "debian_pairs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_debian_lists_become_a_table(debian, tmp_path, capsys):
    (tmp_path / "host_dists_x_main_i18n_Translation-en").write_text(EN, encoding="utf-8")
    (tmp_path / "host_dists_x_main_i18n_Translation-fr").write_text(FR, encoding="utf-8")
    debian.main(["--lists", str(tmp_path), "--out", str(tmp_path / "debian.tsv")])
    assert "debian.tsv: 9 pairs" in capsys.readouterr().out
    assert read_pairs(tmp_path / "debian.tsv") == [
        ("un petit jeu", "a small game"),
        ("Ceci est un jeu.", "This is a game."),
        ("Vous y jouez (e.g. Échecs) seul.", "You play it (e.g. Chess) alone."),
        ("C'est amusant !", "It is fun!"),
        ("Fonctions :", "Features:"),
        ("plusieurs niveaux ;", "many levels"),
        ("un long élément qui continue.", "one long item that goes on"),
        ("Il a une phrase de trop.", "It has one sentence too many. It has."),
        ("Ce paragraphe-ci l'est.", "This paragraph is."),
    ]


def test_debian_lists_that_are_not_there(debian, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        debian.main(["--lists", str(tmp_path), "--out", str(tmp_path / "debian.tsv")])
    assert stop.value.code == 2
    assert "expected a folder with Translation-fr files" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_debian_help_shows_how(debian, capsys):
    with pytest.raises(SystemExit):
        debian.main(["--help"])
    shown = capsys.readouterr().out
    assert "apt-get update" in shown
    assert "python examples/debian_pairs.py --lists lists --out debian.tsv" in shown
