"""What is held out: one rule, which follows from keys alone."""

import random

import pytest

from regard.training.data.held_out import chance, split


def source(pair: tuple[str, str]) -> str:
    return pair[0]


@pytest.fixture
def pairs():
    return [(f"source {number % 700}", f"target {number}") for number in range(1_000)]


def test_examples_with_one_key_stay_together(pairs):
    for choice in ({"count": 100}, {"share": 0.2}, {}):
        parts = split(pairs, source, **choice)
        assert sorted(pair for part in parts for pair in part) == sorted(pairs)
        sides = [set(map(source, part)) for part in parts]
        assert all(sides)
        assert len(set.union(*sides)) == sum(map(len, sides)), "a key is on one side only"
    assert [len(part) for part in split(pairs, source, count=100)] == [800, 100, 100]
    assert [len(part) for part in split(pairs, source, count=100, test=False)] == [900, 100, 0]


def test_an_example_keeps_its_side_in_any_order_and_among_others(pairs):
    shuffled = random.Random(0).sample(pairs, len(pairs))
    for choice in ({"count": 50}, {}):
        assert list(map(set, split(pairs, source, **choice))) == list(map(set, split(shuffled, source, **choice)))
    assert set(split(pairs, source, count=50)[1]) <= set(split(pairs, source, count=60)[1])
    for fewer, more in zip(split(pairs[:300], source), split(pairs, source), strict=True):
        assert set(fewer) <= set(more)


def test_the_share_of_the_keys_is_held_out():
    keys = [f"folder/{number}.txt" for number in range(20_000)]
    for share in (0.05, 0.1, 0.5):
        for part in split(keys, str, share=share)[1:]:
            assert len(part) / len(keys) == pytest.approx(share / 2, rel=0.1)
    assert 0 <= min(map(chance, keys)) < 1e-3
    assert 1 - 1e-3 < max(map(chance, keys)) < 1


def test_however_few_there_are_both_sides_have_some():
    for number in range(500):
        assert [len(part) for part in split([str(number), str(number + 1)], str)] == [1, 1, 0]
        few = [len(part) for part in split(map(str, range(number, number + 20)), str)]
        assert few[1] + few[2] >= 4
        assert min(few[1:]) >= max(few[1:]) / 3


def test_names_that_are_no_text_have_a_side():
    assert 0 <= chance(b"caf\xe9.txt".decode("utf-8", "surrogateescape")) < 1


def test_nothing_to_choose_from_is_refused():
    for few in ([], ["a"], ["a", "a"]):
        with pytest.raises(
            ValueError, match=f"held_out: expected at least 2 different examples .* got {len(set(few))}"
        ):
            split(few, str)
    for count in (0, 2, -1, 0.5):
        with pytest.raises(ValueError, match=r"held_out: expected 1 to 1 of 3 examples, got"):
            split(["a", "b", "c"], str, count=count)
