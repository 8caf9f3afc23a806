"""Baselines of a language model: n-grams by hand, and xz as it is."""

import doctest
import lzma
import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import baselines
from baselines import ngram_bits_per_byte, ngrams, xz_bits_per_byte

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "é", "naïve"]


def prose(seed: int, words: int) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(WORDS, words)) + ".\n"


def test_examples_in_docstrings_run():
    assert doctest.testmod(baselines).failed == 0


def test_bigrams_by_hand():
    # 01 twice, 10 twice, 02 once: D = 1 / (1 + 2 · 2). Each symbol follows one other: p₁ = 1/3.
    model = ngrams([[0, 1, 0, 1, 0, 2]], size=3, order=2)
    exact = [0.2 * 2 / 3 / 3, (1.8 + 0.2 * 2 / 3) / 3, (0.8 + 0.2 * 2 / 3) / 3]
    np.testing.assert_allclose([model([[0, symbol]])[1] for symbol in range(3)], exact, rtol=1e-12)
    # Nothing ever followed 2, so what follows is p₁; the first symbol of a text too.
    np.testing.assert_allclose(model([[2, 1], [1]]), [1 / 3, 1 / 3, 1 / 3], rtol=1e-12)


def test_unigrams_by_hand():
    # Three of 0, one of 1: D = 1/2 for want of any met twice. Two kinds of four symbols.
    np.testing.assert_allclose(
        ngrams([[0, 0, 0, 1]], size=4, order=1)([[0, 1, 2, 3]]),
        [(2.5 + 0.25) / 4, (0.5 + 0.25) / 4, 0.25 / 4, 0.25 / 4],
        rtol=1e-12,
    )


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_of_ngrams_sum_to_one(order):
    random = np.random.default_rng(order)
    texts = [random.integers(0, 5, random.integers(1, 60)) for _ in range(20)]
    model = ngrams(texts, size=6, order=order)
    for _ in range(100):
        before = random.integers(0, 6, random.integers(0, 8)).tolist()
        assert sum(model([[*before, symbol]])[-1] for symbol in range(6)) == pytest.approx(1, abs=1e-12)


def test_ngrams_do_not_reach_over_documents():
    texts = [[0, 1, 2], [3, 4]]
    model = ngrams(texts, size=5, order=3)
    apart = np.concatenate([model([text]) for text in texts])
    np.testing.assert_array_equal(model(texts), apart)


def test_longer_ngrams_say_more_of_text():
    train_texts = [prose(seed, 400).encode() for seed in range(5)]
    held_out = [prose(seed, 100).encode() for seed in (7, 8)]
    bits_per_byte = [ngram_bits_per_byte(train_texts, held_out, order) for order in (1, 2, 5)]
    assert bits_per_byte[0] > bits_per_byte[1] > bits_per_byte[2] > math.log2(len(WORDS)) / 5
    bits = -np.log2(ngrams([list(text) for text in train_texts], size=256)([list(text) for text in held_out])).sum()
    assert bits_per_byte[2] == pytest.approx(bits / sum(map(len, held_out)))


def test_xz_is_xz():
    train, *held_out = (prose(seed, 300).encode() for seed in range(3))

    def size(data):
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
        return 8 * len(lzma.compress(data, lzma.FORMAT_RAW, filters=filters)) / sum(map(len, held_out))

    bits = xz_bits_per_byte(train, held_out)
    assert bits["each"] == pytest.approx(sum(map(size, held_out)))
    assert bits["together"] == pytest.approx(size(b"".join(held_out)))
    assert bits["after_training"] == pytest.approx(size(train + b"".join(held_out)) - size(train))
    assert bits["after_training"] < bits["together"] < bits["each"]


def test_baselines_refuse_what_is_no_text():
    with pytest.raises(ValueError, match="held_out: expected some text, got none"):
        ngram_bits_per_byte([b"a"], [])
    with pytest.raises(ValueError, match="held_out: expected some text, got none"):
        xz_bits_per_byte(b"a", [b""])
    with pytest.raises(ValueError, match="documents: expected some text, got none"):
        ngrams([], size=3)
    with pytest.raises(ValueError, match="documents: expected symbols from 0 to 2, got 0 to 3"):
        ngrams([[0, 3]], size=3)
    with pytest.raises(ValueError, match="order: expected at least 1, got 0"):
        ngrams([[0]], size=3, order=0)
