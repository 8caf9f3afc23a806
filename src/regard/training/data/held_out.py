"""Which examples are held out: one rule for all data that is read from files.

Every example has a key: the name or the text of a document, a source sentence, the path of a picture. `chance` hashes
a key to a number, and the keys with the lowest numbers are held out. So an example stays on its side of the split when
other examples are added or removed, in any order and on any machine.

The phrase-book, which is generated, holds out pairs of words instead (`phrasebook`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

SHARE = 0.1
"""The share of the keys that is held out by default."""

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
    examples: Iterable[Example], key: Callable[[Example], str], *, share: float = SHARE, count: int | None = None
) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and held-out examples; examples with the same key stay together.

    A `share` of the keys is held out, by `is_held_out`: at least one key, and never all of them. With a `count`, that
    many examples are held out instead, those with the lowest `chance`; fewer if examples that share a key do not fit.

    >>> from regard.training.data.held_out import split
    >>> train, held_out = split([("un", "one"), ("deux", "two"), ("un", "a"), ("trois", "three")], lambda pair: pair[0])
    >>> len(train), held_out
    (3, [('deux', 'two')])
    """
    examples = list(examples)
    sizes = Counter(map(key, examples))
    ranked = sorted(sizes, key=chance)
    if len(ranked) < 2:
        raise ValueError(f"held_out: expected at least 2 different examples to choose from, got {len(ranked)}")
    if count is None:
        chosen = {name for name in ranked[:-1] if is_held_out(name, share)} or {ranked[0]}
    else:
        chosen = _fitting(ranked, sizes, count)
    parts: tuple[list[Example], list[Example]] = [], []
    for example in examples:
        parts[key(example) in chosen].append(example)
    return parts


def _fitting(ranked: list[str], sizes: Counter[str], count: int) -> set[str]:
    """Keys in this order that together have at most `count` examples; a key with too many is skipped."""
    if type(count) is not int or not 1 <= count < sizes.total():
        raise ValueError(f"held_out: expected 1 to {sizes.total() - 1} of {sizes.total()} examples, got {count!r}")
    chosen: set[str] = set()
    for name in ranked:
        if sizes[name] <= count:
            chosen.add(name)
            count -= sizes[name]
    return chosen
