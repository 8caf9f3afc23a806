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
        train, held_out = split(pairs, source, **choice)
        assert sorted(train + held_out) == sorted(pairs)
        assert not set(map(source, train)) & set(map(source, held_out))
    assert len(split(pairs, source, count=100)[1]) == 100


def test_an_example_keeps_its_side_in_any_order_and_among_others(pairs):
    shuffled = random.Random(0).sample(pairs, len(pairs))
    for choice in ({"count": 50}, {}):
        assert set(split(pairs, source, **choice)[1]) == set(split(shuffled, source, **choice)[1])
    assert set(split(pairs, source, count=50)[1]) <= set(split(pairs, source, count=60)[1])
    held_out = split(pairs[:300], source)[1]
    assert set(held_out) <= set(split(pairs, source)[1])


def test_the_share_of_the_keys_is_held_out():
    keys = [f"folder/{number}.txt" for number in range(20_000)]
    for share in (0.05, 0.1, 0.5):
        assert len(split(keys, str, share=share)[1]) / len(keys) == pytest.approx(share, rel=0.1)
    assert 0 <= min(map(chance, keys)) < 1e-3
    assert 1 - 1e-3 < max(map(chance, keys)) < 1


def test_however_few_there_are_both_sides_have_some():
    for number in range(500):
        train, held_out = split([str(number), str(number + 1)], str)
        assert len(train) == len(held_out) == 1


def test_names_that_are_no_text_have_a_side():
    assert 0 <= chance(b"caf\xe9.txt".decode("utf-8", "surrogateescape")) < 1


def test_nothing_to_choose_from_is_refused():
    for few in ([], ["a"], ["a", "a"]):
        with pytest.raises(
            ValueError, match=f"held_out: expected at least 2 different examples .* got {len(set(few))}"
        ):
            split(few, str)
    for count in (0, 2, -1, 0.5):
        with pytest.raises(ValueError, match=r"held_out: expected 1 to 1 of 2 examples, got"):
            split(["a", "b"], str, count=count)
