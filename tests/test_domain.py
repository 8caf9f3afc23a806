"""What a translator was trained on, and what is outside of it."""

import json
import unicodedata

import pytest

from regard.training.data.domain import Domain
from regard.training.data.phrasebook import phrasebook
from regard.training.recipes import translate

SENTENCE = "La voiture rouge est rapide."


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        (SENTENCE, []),
        (unicodedata.normalize("NFD", "Elle a très faim."), []),
        ("Bonjour.", ["not among the words of its training: Bonjour"]),
        ("La voiture bleuâtre est rapide.", ["not among the words of its training: bleuâtre"]),
        ("La VOITURE rouge est rapide.", ["not among the words of its training: VOITURE"]),
        ("la voiture rouge est rapide", ["no capital letter at the beginning", "no . or ? at the end"]),
        ("La voiture rouge est rapide!", ["not among the words of its training: !", "no . or ? at the end"]),
        ("", []),
    ],
)
def test_the_shipped_translator_says_what_is_outside(text, reasons):
    assert translate.domain().outside(text) == reasons


def test_a_long_sentence_of_known_words_is_outside():
    domain = translate.domain()
    reasons = domain.outside("La voiture rouge est rapide" + " et la voiture rouge est rapide" * 4 + ".")
    assert reasons == [f"30 words and signs, where its training had {domain.longest} at most"]


def test_every_held_out_sentence_is_inside():
    domain = translate.domain()
    assert [source for source, _ in phrasebook("held_out", 500, seed=5) if domain.outside(source)] == []


def test_sentences_without_a_common_end_ask_for_none():
    domain = Domain.of(["one two.", "Three"])
    assert not domain.capital
    assert domain.outside("three two") == []


def test_the_command_says_what_is_outside_and_translates(monkeypatch, capsys):
    from test_cli import entry_point

    regard = entry_point(monkeypatch, capsys)
    done = regard("translate", SENTENCE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "The red car is fast.\n", "")
    done = regard("translate", "Bonjour.")
    assert done.returncode == 0
    assert done.stdout.strip()
    assert done.stderr == (
        "regard: outside of what the translator knows (not among the words of its training: Bonjour)\n"
    )
    done = regard("translate", "--json", SENTENCE, "Bonjour.")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["outside"] for row in rows] == [[], ["not among the words of its training: Bonjour"]]
    assert done.stderr.startswith("regard: line 2 is outside of what the translator knows")
