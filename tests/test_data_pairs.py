"""French and English pairs: the phrase-book's grammar and split, users' files, vocabularies, Debian's lists."""

import gettext
import hashlib
import importlib.util
import io
import os
import random
import re
import struct
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.checkpoints.tokenizer import Tokenizer
from regard.training.data import grammar, lexicon
from regard.training.data.grammar import Writer
from regard.training.data.pairs import read_pairs
from regard.training.data.phrasebook import _is_held_out, _sentences, phrasebook, swaps, words
from regard.training.data.vocabulary import train_bpe, train_wordpiece

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def train():
    return list(islice(_sentences("train", 0), 50_000))


@pytest.fixture(scope="module")
def held_out():
    return list(islice(_sentences("held_out", 0), 3_000))


# --- the phrase-book: one translation a sentence, and the split


def test_a_french_sentence_has_one_translation(train, held_out):
    translation = {}
    for seed in (1, 2):
        for french, english in phrasebook("train", 5_000, seed):
            assert translation.setdefault(french, english) == english
    for sentence in (*train, *held_out):
        assert translation.setdefault(sentence.french, sentence.english) == sentence.english
    assert len(translation) > 50_000


def test_a_sentence_that_can_be_derived_twice_means_the_same(monkeypatch):
    # A few words only, so that the grammar's forms meet often.
    few = {"livre", "ami", "amie", "chat", "gare", "pain", "médecin", "boîte", "sac", "table"}
    whole = grammar._nouns

    def nouns(kinds):
        return tuple(noun for noun in whole(kinds) if noun.french in few) or whole(kinds)

    monkeypatch.setattr(grammar, "_nouns", nouns)
    monkeypatch.setattr(grammar, "_NOUNS", nouns("koat"))
    monkeypatch.setattr(grammar, "_NAMES", grammar._NAMES[:2])
    for table in ("_VERBS", "_DEEDS", "_ACTING", "_INDIRECT", "_GIVING"):
        monkeypatch.setattr(grammar, table, getattr(grammar, table)[:3])
    writer = Writer(random.Random(0))
    meanings = {}
    repeated = 0
    for _ in range(20_000):
        sentence = writer.sentence()
        repeated += sentence.french in meanings
        meaning = sentence.english, set(sentence.combinations)
        assert meanings.setdefault(sentence.french, meaning) == meaning, sentence.french
    assert repeated > 2_000


def test_held_out_combinations_are_never_seen(train, held_out):
    seen = {combination for sentence in train for combination in sentence.combinations}
    assert not any(map(_is_held_out, seen))
    for sentence in held_out:
        assert set(sentence.combinations) - seen, sentence.french
    unseen = [pair for sentence in held_out for pair in sentence.combinations if _is_held_out(pair)]
    assert len(set(unseen)) > 500
    assert not seen & set(unseen)


def forms():
    """Every form that a word of the dictionary can take."""
    forms_of = {name: {name} for name in lexicon.NAMES}
    for noun in lexicon.nouns(lexicon.NOUNS):
        forms_of[noun.french] = {noun.french, noun.french_plural}
    for adjective in (*lexicon.adjectives(lexicon.BEFORE, True), *lexicon.adjectives(lexicon.AFTER, False)):
        forms_of[adjective.forms[0]] = {*adjective.forms, adjective.before_vowel}
    tables = (lexicon.VERBS, *lexicon.INDIRECT.values(), lexicon.GIVING, lexicon.ACTING, lexicon.GOING)
    tables += (lexicon.STAYING, lexicon.STATING, "coûter = cost")
    for verb in (verb for table in tables for verb in lexicon.verbs(table)):
        participles = {verb.participle + end for end in ("", "e", "s", "es")}
        forms_of[verb.french] = {verb.french, *verb.present, *participles}
    return forms_of


def test_combinations_are_of_words_in_the_sentence(train, held_out):
    table = forms()
    for sentence in (*train, *held_out):
        there = set(words(sentence.french)) | set(words(sentence.french.lower()))
        for word in {word for combination in sentence.combinations for word in combination}:
            assert table[word] & there, (sentence.french, word)


def test_no_sentence_is_in_both_splits(train, held_out):
    assert not {sentence.french for sentence in train} & {sentence.french for sentence in held_out}


def test_held_out_words_all_occur_in_training(train, held_out):
    for side in ("french", "english"):
        trained = {word for sentence in train for word in words(getattr(sentence, side))}
        met = {word for sentence in held_out for word in words(getattr(sentence, side))}
        assert met <= trained, met - trained
        assert len(trained) > 800


def test_the_red_car_is_said_and_is_held_out(monkeypatch):
    car = [noun for noun in lexicon.nouns(lexicon.NOUNS) if noun.french == "voiture"]
    few = [
        adjective
        for adjective in lexicon.adjectives(lexicon.AFTER, False)
        if adjective.forms[0] in ("rouge", "rapide", "cher")
    ]
    monkeypatch.setattr(grammar, "_NOUNS", car)
    monkeypatch.setattr(grammar, "_adjectives", lambda kinds, precedes: [] if precedes else few)
    monkeypatch.setattr(grammar, "_FORMS", [Writer._describe])
    writer = Writer(random.Random(0))
    sentences = {writer.sentence()[:2] for _ in range(5_000)}
    assert ("La voiture rouge est rapide.", "The red car is fast.") in sentences
    assert _is_held_out(("voiture", "rouge"))


def test_the_first_pairs_of_more_are_the_same_and_seeds_differ():
    assert phrasebook("train", 500) == phrasebook("train", 2_000)[:500]
    assert phrasebook("held_out", 50, 7) == phrasebook("held_out", 200, 7)[:50]
    assert swaps("train", 50) == swaps("train", 200)[:50]
    assert phrasebook("train", 50, 1) != phrasebook("train", 50, 2)
    assert len(set(phrasebook("train", 2_000))) == 2_000
    assert phrasebook("train", 0) == []


def test_the_phrasebook_is_the_same_on_every_machine():
    assert phrasebook("train", 4, 3) == [
        ("Votre salade était froide.", "Your salad was cold."),
        ("Tu adores la mère.", "You love the mother."),
        ("Les jeunes chevaux ont nagé.", "The young horses swam."),
        ("Leur roman n'était pas espagnol.", "Their novel was not Spanish."),
    ]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="split: expected train or held_out, got 'test'"):
        phrasebook("test", 1)
    with pytest.raises(ValueError, match="count: expected a whole number of at least 0, got -1"):
        swaps("train", -1)


# --- the phrase-book: grammar


def test_spelling(train):
    elision = re.compile(r"\b(le|la|de|ne|je|me|te|que) (?!onze|huit)[aeiouyhâéêèîôœ]", re.IGNORECASE)
    for sentence in train:
        french, english = sentence.french, sentence.english
        assert not elision.search(french), french
        assert not re.search(r"\b(de|à) les? |\b[mts]a [aeiouhéêâîœ]|\bce [aeiouhéêâîœ]", french), french
        assert not re.search(r"\b(beau|vieux|nouveau) (ami|arbre|avion|âne|œuf|hôtel|homme)\b", french), french
        assert not re.search(r"\b[aA] (?!useful)[aeiouAEIO]|\b[aA]n (?![aeiouAEIO])", english), english
        assert (french[-2:] == " ?") == (english[-1] == "?")
        for side in (french, english):
            assert side[0].isupper()
            assert side[-1] in ".?"
            assert "  " not in side
        assert 3 <= len(french.removesuffix(" ?").split()) <= 14
        assert 3 <= len(english.split()) <= 14


@pytest.mark.parametrize(
    ("french", "english"),
    [
        (r"\bn(e |').* jamais\b", r"\bnever\b"),
        (r"\bn(e |').* pas\b(?!.*\b(et|mais|que|qui)\b)", r"\b(not|cannot|no)\b"),
        (r"^(Tu|Elles) ne (man|dor|li|voi|ven)\w+ pas ", r"\bdo not (eat|sleep|read|see|sell)\b"),
        (r"^Est-ce qu(e |')", r"^(Do|Does|Did|Is|Are|Am|Can|Must)\b.*\?$"),
        (
            r"^\w+-(t-)?(tu|il|elle|nous|vous|ils|elles)\b.* \?",
            r"^(Do|Does|Did|Is|Are|Can) (you|he|she|we|they|there)\b",
        ),
        (r"^Qu'est-ce qu(e |')", r"^What (do|does|did|is|are|am|can|must) "),
        (r"^Combien de? ?", r"^How (many|much) "),
        (r"^Qui\b", r"^Who\b"),
        (r"\bsoixante-quinze\b", r"\bseventy-five\b"),
        (r"\bvingt et une \w+s\b", r"\btwenty-one\b"),
        (r"\bquatre-vingts ", r"\beighty "),
        (r"\bquatre-vingt-dix\b(?!-)", r"\bninety\b"),
        (r"\ble 1er mai\b", r"\bMay 1\b"),
        (r"\ble lundi (\d+) (\w+)", r"Monday, [A-Z]\w+ \d+"),
        (r"\bheures? et demie", r"\bhalf past \w+"),
        (r"\bheures? moins le quart", r"\ba quarter to \w+"),
        (r"\b(le|la) \w+ (de |d')(Marie|Paul|Emma)\b", r"\b(Marie|Paul|Emma)'s \w+"),
        (r"\b(du|de la|de l')\s?voisine?\b", r"neighbor"),
        (r"^(Je|Nous) (les?|la) \w+\.", r"^(I|We) [\w ]+ (it|them)\."),
        (r"^\w+ l'a vue?\.", r"^\w+ (saw|has never seen) it\."),
        (r"\b(me|te) (le|la|les|l')", r"\b(it|them) to (me|you)\b"),
        (r"^(Ils|Elles) sont (parti|arrivé|tombé)e?s\b", r"^They (left|arrived|fell)\b"),
        (r"^Elle est (partie|arrivée|restée)\b", r"^She (left|arrived|stayed)\b"),
        (r"^(Je vais|Tu vas) \w+(er|ir|re)\b(?<!aller)", r"\b(am|are) going to \w+"),
        (r"^(Marie|Sophie|Anne) \w+ (son|sa|ses) ", r"\bher\b"),
        (r"^(Paul|Luc|Marc) \w+ (son|sa|ses) ", r"\bhis\b"),
        (r"\b(aime|adore)\w* les \w+[sx]\.", r"\b(like|love)s? (?!the )\w+\."),
        (r"\bbel (arbre|avion|oiseau|hôtel|hôpital)\b", r"\bbeautiful \w+"),
        (r"\b(vieil|nouvel) \w+", r"\b(old|new) "),
        (r"\bla voiture (bleue|noire|blanche)\b", r"\b(blue|black|white) car\b"),
        (r"\bla petite \w+ (rouge|verte)\b", r"\bsmall (red|green) \w+"),
        (r"\bbeaucoup d'\w+", r"\ba lot of \w+"),
        (r"\b(homme|femme|garçon)s? qui\b", r"\b(man|woman|boy|men|women|boys) who\b"),
        (r"\b(chat|chien)s? qui\b", r"\b(cat|dog)s? that\b"),
        (r"\bqu'(il|elle)s? ", r"\b(that|what|because|there|when|where|why|how|do|does|did|is|are|can|must)\b"),
        (r"^(Au|En) \w+, ", r"^In \w+, "),
        (r"\bau (marché|parc|musée)[.,]", r"\b(at|to) the (market|park|museum)\b"),
        (r"\baux (écoles|magasins)\b(?! \w+s\b)", r"\b(at|to) the (schools|stores)\b"),
        (r"\best (né|née) le\b", r"\bwas born on\b"),
        (r"\bai vingt ans\b|\ba trente ans\b", r"\b(am|is) (twenty|thirty) years old\b"),
        (r"^Il est (professeur|pilote)\.", r"^He is a (teacher|pilot)\."),
        (r"^J'ai (faim|soif)\.|^Il a (faim|soif)\.", r"^(I am|He is) (hungry|thirsty)\."),
    ],
)
def test_constructions(french, english, train):
    matches = [sentence for sentence in train if re.search(french, sentence.french)]
    assert matches, f"no sentence has {french}"
    for sentence in matches:
        assert re.search(english, sentence.english, re.IGNORECASE), sentence[:2]


def test_nouns_and_adjectives_agree_and_swap():
    nouns = {}
    for noun in lexicon.nouns(lexicon.NOUNS):
        nouns[noun.french_plural] = (noun.feminine, True, noun.english_plural)
        nouns[noun.french] = (noun.feminine, False, noun.english)
    adjectives = {adjective.english: adjective for adjective in lexicon.adjectives(lexicon.AFTER, False)}
    for split in ("train", "held_out"):
        for french, english, before, after in swaps(split, 1_000):
            feminine, plural, translated = nouns[before[0]]
            assert after[0] == translated
            assert before[1] == adjectives[after[1]].forms[feminine + 2 * plural]
            here, there = words(french), words(english)
            assert here.index(before[1]) == here.index(before[0]) + 1
            assert there.index(after[1]) == there.index(after[0]) - 1
            article = here[here.index(before[0]) - 1]
            if article in ("un", "une", "le", "la"):
                assert (article in ("une", "la")) == feminine
            assert all(here.count(word) == 1 for word in before)
            assert all(there.count(word) == 1 for word in after)


def test_swaps_are_of_the_phrasebook():
    pairs = set(phrasebook("held_out", 300))
    assert {swap[:2] for swap in swaps("held_out", 60)} <= pairs


@pytest.mark.parametrize(
    ("value", "french", "english"),
    [
        (2, "deux", "two"),
        (17, "dix-sept", "seventeen"),
        (31, "trente et un", "thirty-one"),
        (60, "soixante", "sixty"),
        (70, "soixante-dix", "seventy"),
        (77, "soixante-dix-sept", "seventy-seven"),
        (81, "quatre-vingt-un", "eighty-one"),
        (91, "quatre-vingt-onze", "ninety-one"),
        (100, "cent", "one hundred"),
    ],
)
def test_numbers(value, french, english):
    assert lexicon.number(value) == (french, english)


def test_every_number_has_its_own_name():
    for feminine in (False, True):
        numbers = [lexicon.number(value, feminine) for value in range(101)]
        assert len({french for french, _ in numbers}) == len({english for _, english in numbers}) == 101
    with pytest.raises(ValueError, match="value: expected 0 to 100, got 101"):
        lexicon.number(101)


def test_nothing_is_said_twice(train):
    for sentence in train:
        assert not re.search(r" (\w+) (et|mais) \1\b", sentence.french), sentence.french


def test_words_are_entered_once():
    for table in (lexicon.NOUNS, lexicon.BEFORE + lexicon.AFTER, lexicon.VERBS):
        entries = [line.split()[0] for line in table.strip().splitlines() if line]
        assert len(set(entries)) == len(entries)
    assert len(lexicon.nouns(lexicon.NOUNS)) > 150


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


# --- vocabularies


@pytest.fixture(scope="module")
def texts():
    return [text for pair in phrasebook("train", 2_000) for text in pair]


@pytest.fixture(scope="module")
def bpe(texts):
    return train_bpe(texts, 1_500)


def test_bpe_special_tokens(bpe):
    assert (bpe.pad, bpe.bos, bpe.eos, bpe.unk) == (0, 1, 2, 3)
    assert bpe.special == {"pad": "[PAD]", "bos": "[START]", "eos": "[END]", "unk": "[UNK]"}
    ids = bpe.encode("La voiture")
    assert ids[-1] == bpe.eos
    assert ids[:-1] == bpe.encode("La voiture", special=False)
    assert not set(ids[:-1]) & {0, 1, 2, 3}
    assert bpe.vocabulary_size == 1_500


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_bpe_gives_every_text_back(text, bpe):
    assume(not any(token in text for token in bpe.special.values()))
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.unk not in ids


@pytest.mark.parametrize(
    "text",
    ["", " ", "  a  b\n\n\tc ", "L’arbre qu'il a", "don't Marie's o'clock", "e\u0301 日本 😀 \x00", "1998 3,5 %"],
)
def test_bpe_gives_difficult_texts_back(text, bpe):
    assert bpe.decode(bpe.encode(text)) == text


def test_bpe_cuts_where_languages_do():
    tokenizer = train_bpe(["l'homme aujourd'hui Marie's book don't 23"] * 50, 400)
    cut = tokenizer.tokens(tokenizer.encode("l'homme aujourd'hui Marie's don't 23", special=False))
    assert cut == ["l'", "homme", " aujourd'", "hui", " Marie", "'s", " don", "'t", " 2", "3"]


@pytest.mark.parametrize("learn", [train_bpe, train_wordpiece])
def test_vocabularies_survive_their_files(learn, texts, tmp_path):
    tokenizer = learn(texts, 800)
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.special == tokenizer.special
    for text in texts[:50]:
        assert again.encode(text) == tokenizer.encode(text)
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_wordpiece(texts):
    tokenizer = train_wordpiece(texts, 1_200)
    ids = [tokenizer.pad, tokenizer.unk, tokenizer.classification, tokenizer.separator, tokenizer.mask]
    assert ids == [0, 1, 2, 3, 4]
    assert tokenizer.vocabulary_size <= 1_200
    tokens = tokenizer.tokens(tokenizer.encode("The house."))
    assert tokens == ["[CLS]", "The", "house", ".", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("Marie does not see")) == "Marie does not see"
    assert tokenizer.encode("the") != tokenizer.encode("The")
    # Letters inside of words are pieces like others: decoding does not leave them out.
    assert tokenizer.decode(tokenizer.encode("catcatz", special=False)) == "catcatz"
    assert len(set(tokenizer.special.values())) == 5


def fingerprints():
    """Of some sentences and of the vocabularies learnt from them."""
    texts = [text for pair in phrasebook("train", 800) for text in pair]
    learnt = (learn(texts, 700)._inner.to_str() for learn in (train_bpe, train_wordpiece))
    return [hashlib.sha256(text.encode()).hexdigest() for text in (repr(texts), *learnt)]


def test_vocabularies_are_the_same_in_every_process():
    printed = subprocess.run(
        [sys.executable, "-c", "import test_data_pairs; print(*test_data_pairs.fingerprints())"],
        cwd=ROOT / "tests",
        env={**os.environ, "PYTHONHASHSEED": "5"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.split() == fingerprints() == fingerprints()


def test_vocabularies_refuse_what_they_cannot_learn():
    with pytest.raises(ValueError, match=r"size: expected at least 260, .*got 259"):
        train_bpe(["a"], 259)
    with pytest.raises(ValueError, match=r"size: expected at least 8, .*got 7"):
        train_wordpiece(["ab"], 7)
    for learn in (train_bpe, train_wordpiece):
        with pytest.raises(ValueError, match="texts: expected one or more strings, got none"):
            learn([], 300)
        with pytest.raises(ValueError, match="texts: expected several strings, got one"):
            learn("text", 300)


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
