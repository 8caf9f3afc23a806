"""Vocabularies that are learned from texts: BPE and WordPiece."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regard.checkpoints.tokenizer import Tokenizer
from regard.training.data.phrasebook import phrasebook
from regard.training.data.vocabulary import train_bpe, train_wordpiece


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
        [sys.executable, "-c", "import test_vocabulary; print(*test_vocabulary.fingerprints())"],
        cwd=Path(__file__).parent,
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
