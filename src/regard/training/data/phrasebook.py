"""A phrase-book without end: French sentences and their English translations, out of a grammar.

    La voiture rouge est rapide.                The red car is fast.
    Tu ne vas pas me le montrer.                You are not going to show it to me.
    Est-ce que Marie aime les vieux films ?     Does Marie like old movies?

French agrees in gender and number, elides and contracts, puts most adjectives after the noun and pronouns before the
verb; English asks and denies with "do", puts owners first and minutes before hours. So words change their order, which
is what cross-attention has to find. Each French sentence has one translation: exact match means something.

The split is by combination. One in ten pairs of (noun, adjective), (subject, verb) and (verb, object) is held out,
chosen by a hash of the words: no sentence to train on has one of those, every held-out sentence has at least one,
and all its words occur in training, in other company.
"""

import re
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import islice
from random import Random
from typing import Literal, get_args

from regard.training.data.grammar import Sentence, Writer
from regard.training.data.pairs import Pair

Split = Literal["train", "held_out"]
Swap = tuple[str, str, Pair, Pair]
"""A French sentence, its translation, (noun, adjective) as the one has them and as the other."""

SHORTEST, LONGEST = 3, 14
"""Words of a sentence."""


def phrasebook(split: Split, count: int, seed: int = 0) -> list[Pair]:
    """`count` distinct pairs (French, English). A larger count begins with the same pairs.

    >>> from regard.training.data.phrasebook import phrasebook
    >>> phrasebook("train", 2)[1]
    ('Nos taxis dangereux partent à huit heures.', "Our dangerous taxis leave at eight o'clock.")
    """
    return [(sentence.french, sentence.english) for sentence in islice(_sentences(split, seed), _checked(split, count))]


def swaps(split: Split, count: int, seed: int = 0) -> list[Swap]:
    """`count` sentences of the phrase-book in which a noun and its adjective change places, with these words.

    Each of the four words stands once in its sentence, so that it can be found there.

    >>> from regard.training.data.phrasebook import swaps
    >>> french, english, before, after = swaps("held_out", 1)[0]
    >>> english, before, after
    ('Do they come from the beautiful dirty hospitals?', ('hôpitaux', 'sales'), ('hospitals', 'dirty'))
    """
    found = (
        (sentence.french, sentence.english, *sentence.swap)
        for sentence in _sentences(split, seed)
        if sentence.swap is not None
        and _once(sentence.french, sentence.swap[0])
        and _once(sentence.english, sentence.swap[1])
    )
    return list(islice(found, _checked(split, count)))


def words(sentence: str) -> list[str]:
    """The words of a sentence: runs of letters or digits.

    >>> words("L'homme a-t-il 3 chats ?")
    ['L', 'homme', 'a', 't', 'il', '3', 'chats']
    """
    return re.findall(r"\w+", sentence)


def _once(sentence: str, pair: Pair) -> bool:
    found = words(sentence)
    return all(found.count(word) == 1 for word in pair)


def _checked(split: str, count: int) -> int:
    if split not in get_args(Split):
        raise ValueError(f"split: expected {' or '.join(get_args(Split))}, got {split!r}")
    if type(count) is not int or count < 0:
        raise ValueError(f"count: expected a whole number of at least 0, got {count!r}")
    return count


@cache
def _is_held_out(combination: Pair) -> bool:
    # The translator that ships was trained without these combinations; (voiture, rouge) is among them.
    return zlib.crc32(" ".join(combination).encode()) % 10 == 8


def _sentences(split: Split, seed: int) -> Iterator[Sentence]:
    """Distinct sentences of a split, without end."""
    writer = Writer(Random(f"{split} {seed}"))
    said: set[str] = set()
    while True:
        sentence = writer.sentence()
        if any(map(_is_held_out, sentence.combinations)) != (split == "held_out") or sentence.french in said:
            continue
        lengths = sentence.french.removesuffix(" ?").count(" ") + 1, sentence.english.count(" ") + 1
        if min(lengths) >= SHORTEST and max(lengths) <= LONGEST:
            said.add(sentence.french)
            yield sentence
