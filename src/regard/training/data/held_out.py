"""What is held out: one rule for all data that is read.

Every example has a key: the name or the text of a document, a source sentence, the path of a picture. `chance` turns a
key into a number, and the keys with the lowest numbers are held out. So an example stays on its side when other
examples come and go, in whatever order they come and on whatever machine.

The phrase-book, which is written and not read, holds out pairs of words (`phrasebook`).
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

SHARE = 0.1
"""The share of the keys that is held out, unless a recipe says otherwise."""

Example = TypeVar("Example")


def chance(key: str) -> float:
    """A number from 0 to below 1 that follows from a key: a hash, whose last decimal digit counts first.

    >>> from regard.training.data.held_out import chance
    >>> round(chance("json/decoder.py"), 3), round(chance("json/encoder.py"), 3)
    (0.711, 0.609)
    """
    digest = blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    number = int.from_bytes(digest, "big")
    return (number % 10 + number / 2**64) / 10


def is_held_out(key: str, share: float = SHARE) -> bool:
    """Whether the example with this key is held out, whatever other examples there are.

    >>> from regard.training.data.held_out import is_held_out
    >>> sum(is_held_out(str(number)) for number in range(1000))
    89
    """
    return chance(key) < share


def split(
    examples: Iterable[Example], key: Callable[[Example], str], *, share: float = SHARE, count: int | None = None
) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and held-out examples; examples with the same key stay together.

    Held out is a `share` of the keys, by `is_held_out`; one key at least, and never all of them. With a `count`, it is
    so many examples instead, those with the lowest `chance`; fewer, where examples that share a key do not fit.

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
    """The first keys that together have at most `count` examples."""
    if type(count) is not int or not 1 <= count < sizes.total():
        raise ValueError(f"held_out: expected 1 to {sizes.total() - 1} of {sizes.total()} examples, got {count!r}")
    chosen: set[str] = set()
    for name in ranked:
        if sizes[name] <= count:
            chosen.add(name)
            count -= sizes[name]
    return chosen
