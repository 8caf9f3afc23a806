"""Text as it is written: whole characters, stop strings, special tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from generating import PROMPTS, lettered, made
from regard.checkpoints import Tokenizer
from regard.inference.generation.text import Writer


@torch.no_grad()
def test_stop_strings_may_name_special_tokens():
    model = made("mha")
    tokens = rg.generate(model, [PROMPTS[0]], max_new_tokens=8)[0].tokens
    assert len(set(tokens[:6])) == 6
    model.tokenizer = lettered([tokens[3]])
    names = model.tokenizer.tokens(tokens)
    hidden = names[3]
    assert hidden == "<|unk|>"
    plain = rg.generate(model, [PROMPTS[0]], max_new_tokens=8)[0]
    assert plain == "".join(name for name in names if name != hidden)
    for stop, text, count in (
        (hidden, names[:3], 4),
        (hidden + names[4], names[:3], 5),
        (names[2] + hidden, names[:2], 4),
        (names[2] + hidden + names[4] + names[5], names[:2], 6),
        (names[2] + names[4], names[:2], 5),  # of the text as it is given back
        (f"{hidden}!", [name for name in names if name != hidden], 8),
    ):
        for options in ({}, {"beams": 2}):
            if options and count == 8:
                continue
            results = rg.generate(model, [PROMPTS[0]], max_new_tokens=8, stop=stop, **options)
            if not options:
                assert (results[0], results[0].tokens) == ("".join(text), tokens[:count])
                assert results[0].reason == ("length" if count == 8 else "stop")
            else:
                assert all(stop not in model.tokenizer.decode(result.tokens[:-1], special=True) for result in results)
        pieces = rg.stream(model, PROMPTS[0], max_new_tokens=8, stop=stop)
        assert "".join(pieces) == "".join(text) == pieces.text


@pytest.mark.parametrize("ends", ["the model", "stop"])
@torch.no_grad()
def test_a_stop_string_may_have_the_token_that_ends_the_text(ends):
    """Whatever ends the sequence with the string's last token, the string says where the text ends."""
    model = made("mha")
    tokens = rg.generate(model, [PROMPTS[0]], max_new_tokens=8)[0].tokens
    end = tokens[3]
    assert end not in tokens[:3]
    model.tokenizer = lettered([end])
    first, second, third, name = model.tokenizer.tokens(tokens[:4])
    if ends == "the model":
        model.config = replace(model.config, end_tokens=(end,))
    for stop, text, reason in (
        (name, first + second + third, "stop"),
        (third + name, first + second, "stop"),
        (name[:4], first + second + third, "stop"),
        (second + name, first + second + third, "end"),
        (name + "x", first + second + third, "end"),
    ):
        options = {"max_new_tokens": 8, "stop": [stop] if ends == "the model" else [stop, end]}
        result = rg.generate(model, [PROMPTS[0]], **options)[0]
        assert (result, result.tokens) == (text, tokens[:4])
        assert result.reason == (reason if ends == "the model" else "stop")
        pieces = rg.stream(model, PROMPTS[0], **options)
        assert "".join(pieces) == text == pieces.text


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    tokens=st.lists(st.integers(0, 5), max_size=12),
    stop=st.lists(
        st.sampled_from(["ab", "b", "aba", "<|unk|>", "a<|unk|>", "<|unk|>b", "<|pad|><|unk|>c", "|>"]), max_size=3
    ),
)
def test_a_writer_gives_the_text_before_the_first_stop_string_whatever_is_special(tokens, stop):
    tokenizer = Tokenizer.from_vocabulary(
        ["<|unk|>", "<|pad|>", "a", "b", "c", "d"], special={"unk": "<|unk|>", "pad": "<|pad|>"}
    )
    writer, expected = Writer(tokenizer, stop), None
    pieces = [writer.add(token) for token in tokens] + [writer.finish()]
    for count in range(len(tokens) + 1):
        written = [tokenizer.decode([token], special=True) for token in tokens[:count]]
        text = [name if token > 1 else "" for name, token in zip(written, tokens, strict=False)]
        places = []  # in characters of the text
        for stop_string in stop:
            if (at := "".join(text).find(stop_string)) >= 0:
                places.append(at)
            if (at := "".join(written).find(stop_string)) >= 0:
                before = "".join(written)[:at]
                places.append(len(before.replace("<|unk|>", "").replace("<|pad|>", "").split("<|")[0]))
        if places:
            expected = "".join(text)[: min(places)]
            break
    assert writer.stopped == (expected is not None)
    assert writer.text == "".join(pieces) == (tokenizer.decode(tokens) if expected is None else expected)


class Formatted(int):
    """A token that counts how often it is written."""

    count = 0

    def __format__(self, spec: str) -> str:
        type(self).count += 1
        return format(int(self), spec)

    __str__ = __repr__ = lambda self: format(self)


@pytest.mark.parametrize("stop", [(), ("7 7 7 8",)])
def test_writing_takes_as_many_steps_as_there_are_tokens(stop):
    Formatted.count = 0
    writer = Writer(None, stop)
    for token in map(Formatted, [7, 1] * 150):
        writer.add(token)
    writer.finish()
    assert Formatted.count == 300
    assert writer.text == " ".join("71" * 150)

    class Counting:
        decoded = 0

        def decode(self, ids, special=False):
            self.decoded += len(ids)
            return inner.decode(ids, special)

    inner = lettered([0])
    for tokens in ([1, 2, 3] * 100, [0] * 300, [0, 5] * 150):  # letters, nothing but special tokens, both
        counting = Counting()
        writer = Writer(counting, stop)
        for token in tokens:
            writer.add(token)
        writer.finish()
        assert writer.text == inner.decode(tokens)
        assert counting.decoded <= 6 * len(tokens)


def test_text_is_written_in_whole_characters_and_stops_at_stop_strings():
    tokenizer = rg.load("smollm2").tokenizer
    for text in ("naïve café – 日本語 👩‍👩‍👧 🇫🇷 end", "a\n\n  b\tc", "ﷺ𝔘𝔫𝔦"):
        writer = Writer(tokenizer)
        pieces = [writer.add(token) for token in tokenizer.encode(text, special=False)]
        pieces.append(writer.finish())
        assert "".join(pieces) == text == writer.text
        assert not any("\ufffd" in piece for piece in pieces)
    writer = Writer(tokenizer, stop=["lazy dog", "never"])
    pieces = [writer.add(token) for token in tokenizer.encode("The quick fox and the lazy cat, the lazy dog!")]
    assert writer.stopped
    assert writer.text == "The quick fox and the lazy cat, the " == "".join(pieces)
    cut = Writer(tokenizer)
    pieces = [cut.add(token) for token in tokenizer.encode("日本語", special=False)[:-1]]
    assert all("\ufffd" not in piece for piece in pieces)
    cut.finish()


@torch.no_grad()
def test_endings_say_why():
    model = made("mha")
    plain = rg.generate(model, [PROMPTS[0]], max_new_tokens=8)[0]
    assert (plain.reason, len(plain.tokens)) == ("length", 8)
    stop = rg.generate(model, [PROMPTS[0]], max_new_tokens=8, stop=plain.tokens[3])[0]
    at = plain.tokens.index(plain.tokens[3])
    assert (stop.reason, stop.tokens) == ("stop", plain.tokens[: at + 1])
    assert stop == " ".join(map(str, plain.tokens[:at]))
    text = rg.generate(model, [PROMPTS[0]], max_new_tokens=8, stop=f" {plain.tokens[5]}")[0]
    assert text.reason == "stop"
    assert plain.startswith(text)
    context = rg.generate(model, [[1] * 250], max_new_tokens=50)[0]
    assert (context.reason, len(context.tokens)) == ("context", 6)
