"""Which examples are held out: one rule for all data that is read from files.

Every example has a key: the name or the text of a document, a source sentence, the path of a picture. `chance` hashes
a key to a number, and the keys with the lowest numbers are held out: those with the very lowest to validate with, the
others to test with. So an example stays on its side of the split when other examples are added or removed, in any order
and on any machine. Results on validation examples choose the best model; those on test examples choose nothing.

The phrase-book, which is generated, holds out pairs of words instead (`phrasebook`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

SHARE = 0.1
"""The share of the keys that is held out by default."""
FEW = 4
"""Keys that are held out at least, if there are four times as many."""

Example = TypeVar("Example")


def chance(key: str) -> float:
    """A number in [0, 1): a hash of the key, ordered by its last decimal digit first.

    >>> from regard.training.data.held_out import chance
    >>> round(chance("json/decoder.py"), 3), round(chance("json/encoder.py"), 3)
    (0.711, 0.609)
    """
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return (number % 10 + number / 2**64) / 10


def is_held_out(key: str, share: float = SHARE) -> bool:
    """Whether the example with this key is held out. It does not depend on other examples.

    >>> from regard.training.data.held_out import is_held_out
    >>> sum(is_held_out(str(number)) for number in range(1000))
    89
    """
    return chance(key) < share


def split(
    examples: Iterable[Example],
    key: Callable[[Example], str],
    *,
    share: float = SHARE,
    count: int | None = None,
    test: bool = True,
) -> tuple[list[Example], list[Example], list[Example]]:
    """Examples to train on, to validate with, and to test with; examples with the same key stay together.

    A `share` of the keys is held out, by `is_held_out`, half of it for each; of few keys a quarter, at most `FEW`, and
    at least one. With a `count`, that many examples are held out for each instead, those with the lowest `chance`;
    fewer if examples that share a key do not fit. Without a `test`, all of it is to validate with.

    >>> from regard.training.data.held_out import split
    >>> pairs = [("un", "one"), ("deux", "two"), ("un", "a"), ("trois", "three")]
    >>> split(pairs, lambda pair: pair[0])[1:]
    ([('deux', 'two')], [])
    >>> [len(part) for part in split(map(str, range(100)), str)]
    [91, 4, 5]
    """
    examples = list(examples)
    sizes = Counter(map(key, examples))
    ranked = sorted(sizes, key=chance)
    if len(ranked) < 2:
        raise ValueError(f"held_out: expected at least 2 different examples to choose from, got {len(ranked)}")
    if count is None:
        few = max(1, min(FEW, len(ranked) // 4))
        number = max(few, sum(is_held_out(name, share) for name in ranked[:-1]))
        half = sum(is_held_out(name, share / 2) for name in ranked[:number])
        if not number <= 4 * half <= 3 * number:  # few keys, or an unlikely hash
            half = -(-number // 2)
        half = half if test else number
        chosen = set(ranked[:half]), set(ranked[half:number])
    else:
        most = (sizes.total() - 1) // (1 + test)
        if type(count) is not int or not 1 <= count <= most:
            raise ValueError(f"held_out: expected 1 to {most} of {sizes.total()} examples, got {count!r}")
        first = _fitting(ranked, sizes, count)
        chosen = first, _fitting([name for name in ranked if name not in first], sizes, count) if test else set()
    parts: tuple[list[Example], list[Example], list[Example]] = [], [], []
    for example in examples:
        name = key(example)
        parts[1 if name in chosen[0] else 2 if name in chosen[1] else 0].append(example)
    return parts


def parts(
    examples: Iterable[Example],
    key: Callable[[Example], str],
    validation: Iterable[Example] | None,
    test: Iterable[Example] | None,
    *,
    share: float = SHARE,
    count: int | None = None,
) -> tuple[list[Example], list[Example], list[Example]]:
    """Examples to train on, to validate with, and to test with, where a user may have files of the last two: only a
    part that has no files is held out of the others, and with files to validate with nothing is.

    >>> from regard.training.data.held_out import parts
    >>> parts("abcdef", str, "xy", None)
    (['a', 'b', 'c', 'd', 'e', 'f'], ['x', 'y'], [])
    """
    if validation is not None:
        return list(examples), list(validation), list(test or ())
    train, held_out, tested = split(examples, key, share=share, count=count, test=test is None)
    return train, held_out, tested if test is None else list(test)


def _fitting(ranked: list[str], sizes: Counter[str], count: int) -> set[str]:
    """Keys in this order that together have at most `count` examples; a key with too many is skipped."""
    chosen: set[str] = set()
    for name in ranked:
        if sizes[name] <= count:
            chosen.add(name)
            count -= sizes[name]
    return chosen
