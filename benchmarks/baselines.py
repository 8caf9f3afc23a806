"""Baselines for language models: xz, and n-grams with Kneser–Ney smoothing.

    p_k(w | c) = (max(n(c w) - D, 0) + D · kinds(c) · p_{k-1}(w | c without its oldest)) / n(c)          p_0 = 1 / size

n are counts at the highest order and, below it, numbers of different preceding symbols (Kneser and Ney 1995; Chen and
Goodman 1999, equation 16). Each order has its own discount D = n₁ / (n₁ + 2 n₂), where n₁ and n₂ are the numbers of
n-grams that occur once and twice. Results are in bits per byte of UTF-8 text, as for a language model.
"""

import lzma
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]
Numbers = NDArray[np.float64]

MOST_DICTIONARY = 256 * 2**20
"""The largest dictionary of xz in bytes; xz needs about eleven times as much memory."""


def xz_bits_per_byte(train: bytes, held_out: Sequence[bytes]) -> dict[str, float]:
    """Bits per byte of `xz -9e` on held-out documents: `each` document separately, all as one stream (`together`), and
    this stream after the training text, as far as it fits into the dictionary of xz (`after_training`).

    Sizes are those of the raw LZMA2 streams, without the container's header and checksum.

    >>> from baselines import xz_bits_per_byte
    >>> bits = xz_bits_per_byte(bytes(range(256)), [bytes(range(128)), bytes(range(128))])
    >>> bits["each"] > 8, bits["together"] < bits["each"], bits["after_training"] < 1
    (True, True, True)
    """
    total = _total(held_out)
    stream = b"".join(held_out)
    sizes = {
        "each": sum(_compressed(document) for document in held_out),
        "together": _compressed(stream),
        "after_training": _compressed(train + stream) - _compressed(train),
    }
    return {name: 8 * size / total for name, size in sizes.items()}


def ngram_bits_per_byte(train: Sequence[bytes], held_out: Sequence[bytes], order: int = 5) -> float:
    """Bits per byte of an n-gram model of bytes that is trained on some documents and tested on others.

    >>> from baselines import ngram_bits_per_byte
    >>> ngram_bits_per_byte([b"abcd" * 100], [b"abcd" * 100]) < 0.2
    True
    """
    total = _total(held_out)
    model = ngrams([np.frombuffer(document, np.uint8) for document in train], size=256, order=order)
    return -float(np.log2(model([np.frombuffer(document, np.uint8) for document in held_out])).sum()) / total


@dataclass(frozen=True, eq=False)
class Order:
    """The n-grams of one length. The number of an n-gram is its index in the sorted `keys`. A key is the number of the
    n-gram without its oldest symbol, plus the oldest symbol times the number of shorter n-grams."""

    keys: Integers
    counts: Integers
    totals: Integers
    """n(c) by the number of the context c."""
    kinds: Integers
    discount: float


@dataclass(frozen=True, eq=False)
class NGrams:
    """A model of symbols below `size`; `model(documents)` is the probability of every symbol, given those before it."""

    size: int
    orders: tuple[Order, ...]

    def __call__(self, documents: Sequence[ArrayLike]) -> Numbers:
        symbols, place = _joined(documents, self.size)
        probabilities = np.full(len(symbols), 1 / self.size)
        context = np.zeros(len(symbols), np.int64)  # order 0 has one context, the empty one
        numbers = np.zeros(len(symbols), np.int64)
        smaller = 1
        for length, order in enumerate(self.orders, 1):
            key = _keys(symbols, numbers, length, smaller)
            at = np.searchsorted(order.keys, key).clip(max=len(order.keys) - 1)
            there = (order.keys[at] == key) & (numbers >= 0) & (place >= length - 1)
            usable = np.flatnonzero((place >= length - 1) & (context >= 0))
            usable = usable[order.totals[context[usable]] > 0]
            contexts = context[usable]
            seen = np.where(there[usable], order.counts[at[usable]], 0)
            backed = order.discount * order.kinds[contexts] * probabilities[usable]
            probabilities[usable] = (np.maximum(seen - order.discount, 0) + backed) / order.totals[contexts]
            numbers = np.where(there, at, -1)
            context = np.concatenate([[-1], numbers[:-1]])
            smaller = len(order.keys)
        return probabilities


def ngrams(documents: Sequence[ArrayLike], *, size: int, order: int = 5) -> NGrams:
    """Train n-grams of up to `order` symbols on documents of whole numbers below `size`.

    >>> from baselines import ngrams
    >>> model = ngrams([[0, 1, 0, 1, 0, 2]], size=3, order=2)
    >>> [round(float(model([[0, symbol]])[1]), 3) for symbol in range(3)]
    [0.044, 0.644, 0.311]
    """
    if order < 1:
        raise ValueError(f"order: expected at least 1, got {order}")
    symbols, place = _joined(documents, size)
    if not len(symbols):
        raise ValueError("documents: expected some text, got none")
    numbers, smaller = np.zeros(len(symbols), np.int64), 1
    tables: list[tuple[Integers, Integers, Integers]] = []
    for length in range(1, order + 1):
        inside = np.flatnonzero(place >= length - 1)
        if not len(inside):
            break
        keys, first, inverse, raw = np.unique(
            _keys(symbols, numbers, length, smaller)[inside],
            return_index=True,
            return_inverse=True,
            return_counts=True,
        )
        prefix = numbers[inside[first] - 1] if length > 1 else np.zeros(len(keys), np.int64)
        tables.append((keys, prefix, raw))
        numbers = np.full(len(symbols), -1, np.int64)
        numbers[inside] = inverse
        smaller = len(keys)
    orders = []
    for length, (keys, prefix, raw) in enumerate(tables, 1):
        longer = tables[length][0] if length < len(tables) else None
        counts = raw if longer is None else np.bincount(longer % len(keys), minlength=len(keys))
        contexts = len(tables[length - 2][0]) if length > 1 else 1
        totals = np.bincount(prefix, weights=counts, minlength=contexts).astype(np.int64)
        kinds = np.bincount(prefix[counts > 0], minlength=contexts)
        orders.append(Order(keys, counts, totals, kinds, _discount(counts)))
    return NGrams(size, tuple(orders))


def _joined(documents: Sequence[ArrayLike], size: int) -> tuple[Integers, Integers]:
    """All symbols one after another, and the position of each in its document."""
    rows = [np.asarray(document, np.int64) for document in documents]
    symbols = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    if len(symbols) and not 0 <= symbols.min() <= symbols.max() < size:
        raise ValueError(f"documents: expected symbols from 0 to {size - 1}, got {symbols.min()} to {symbols.max()}")
    place = np.concatenate([np.arange(len(row)) for row in rows]) if rows else np.zeros(0, np.int64)
    return symbols, place


def _keys(symbols: Integers, numbers: Integers, length: int, smaller: int) -> Integers:
    """The key of the n-gram that ends at each symbol, from the number of the n-gram without its oldest symbol."""
    oldest = np.concatenate([np.zeros(length - 1, np.int64), symbols[: len(symbols) - length + 1]])
    return oldest[: len(symbols)] * smaller + numbers


def _discount(counts: Integers) -> float:
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    # If no n-gram occurs once, the formula gives 0, and a new symbol would be impossible.
    return once / (once + 2 * twice) if once and twice else 0.5


def _compressed(data: bytes) -> int:
    reach = min(max(len(data), 64 * 2**20), MOST_DICTIONARY)
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": reach}]
    return len(lzma.compress(data, format=lzma.FORMAT_RAW, filters=filters))


def _total(documents: Sequence[bytes]) -> int:
    total = sum(map(len, documents))
    if not total:
        raise ValueError("held_out: expected some text, got none")
    return total
