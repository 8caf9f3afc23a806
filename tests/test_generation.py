"""Generation: the same tokens however they are computed, and errors before any work."""

import copy
import functools
import math
import pydoc_data.topics

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard as rg
from generating import DECODERS, PROMPTS, SEQUENCES, SIZES, made


def whole(model: rg.Decoder | rg.Transformer, prompt: list[int], tokens: list[int]) -> list[int]:
    """The likeliest token after the prompt and after each of the tokens but the last, all computed in one call."""
    if isinstance(model, rg.Decoder):
        logits = model(torch.tensor([[*prompt, *tokens[:-1]]]))
    else:
        logits = model(torch.tensor([prompt]), torch.tensor([[model.config.start_token, *tokens[:-1]]]))
    return logits[0, -len(tokens) :].argmax(-1).tolist()


@pytest.mark.parametrize("name", [*DECODERS, *SEQUENCES])
@torch.no_grad()
def test_whole_is_streamed_is_chunked_is_batched_is_forked(name):
    model = made(name)
    expected = [rg.generate(model, [prompt], max_new_tokens=12)[0].tokens for prompt in PROMPTS]
    assert expected == [whole(model, prompt, tokens) for prompt, tokens in zip(PROMPTS, expected, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for chunk in (1, 5, 64):
        assert [text.tokens for text in rg.generate(model, PROMPTS, max_new_tokens=12, chunk=chunk)] == expected
    state = rg.prefill(model, PROMPTS)
    for _ in range(2):
        assert [text.tokens for text in rg.generate(model, state=state, max_new_tokens=12)] == expected
    forked = rg.generate(model, PROMPTS, max_new_tokens=12, n=2)
    assert [text.tokens for text in forked] == [tokens for tokens in expected for _ in range(2)]
    pieces = rg.stream(model, PROMPTS[2], max_new_tokens=12)
    assert "".join(pieces) == " ".join(map(str, expected[2])) == pieces.text


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "elu", "transformer"])
@torch.no_grad()
def test_seeded_draws_of_a_batch_are_those_of_one_alone(name):
    model = made(name)
    options = {"max_new_tokens": 20, "temperature": 1.3, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
    together = rg.generate(model, PROMPTS, seed=[3, 1, 4, 1, 5], **options)
    for prompt, seed, text in zip(PROMPTS, [3, 1, 4, 1, 5], together, strict=True):
        assert rg.generate(model, [prompt], seed=seed, **options)[0].tokens == text.tokens
    three = rg.generate(model, PROMPTS[:2], seed=9, n=3, **options)
    assert len({tuple(text.tokens) for text in three[:3]}) == 3
    assert [text.tokens for text in rg.generate(model, PROMPTS[1:2], seed=9, n=3, **options)] == [
        text.tokens for text in three[3:]
    ]
    assert rg.generate(model, PROMPTS[0], **options)[0] != rg.generate(model, PROMPTS[0], **options)[0]


@torch.no_grad()
def test_finished_sequences_are_dropped_from_the_batch():
    model, seen = made("gqa"), []
    model.stack.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2]))
    longest = rg.generate(model, PROMPTS, max_new_tokens=30)
    ends = sorted({text.tokens[4] for text in longest[:3]})
    seen.clear()
    stopped = rg.generate(model, PROMPTS, max_new_tokens=30, stop=ends)
    assert [text.tokens for text in stopped] == [
        text.tokens[: next((at + 1 for at, token in enumerate(text.tokens) if token in ends), 30)] for text in longest
    ]
    rows = [shape[0] for shape in seen[1:]]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < 5


@pytest.mark.parametrize("early", [False, True])
@torch.no_grad()
def test_rows_without_room_leave_a_batch_that_goes_on(early):
    """Also one that ended before its context did: while it stays, it is fed as the others are."""
    torch.manual_seed(0)
    model = rg.Decoder(rg.DecoderConfig.gpt2(**{**SIZES, "context_length": 12}))
    model.initialise(5)
    prompts = [[1] * 9, *([at, 3] for at in range(4))]
    first = rg.generate(model, prompts[:1], max_new_tokens=1)[0]
    options = {"max_new_tokens": 20, "stop": first.tokens if early else None}
    together = rg.generate(model.double(), prompts, **options)
    assert [row.reason for row in together] == ["stop" if early else "context", *["context"] * 4]
    assert [row.tokens for row in together] == [rg.generate(model, [prompt], **options)[0].tokens for prompt in prompts]


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(data=st.data())
@torch.no_grad()
def test_any_options_give_a_row_of_a_batch_what_it_gets_alone(data):
    model = random_options_model(data.draw(st.sampled_from(["gqa", "window", "quadratic", "t5"])))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=9), min_size=2, max_size=4))
    seeds = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(prompts), max_size=len(prompts)))
    maybe = lambda values: data.draw(st.none() | values)  # noqa: E731
    options = {
        "max_new_tokens": data.draw(st.integers(1, 9)),
        "temperature": data.draw(st.sampled_from([0.0, 0.3, 1.0, 3.0])),
        "top_k": maybe(st.integers(1, 80)),
        "top_p": maybe(st.floats(0.05, 1.0)),
        "min_p": maybe(st.floats(0.01, 1.0)),
        "repetition_penalty": data.draw(st.sampled_from([1.0, 0.8, 1.5])),
        "stop": maybe(st.lists(st.integers(0, 60) | st.text("0123456789 ", min_size=1, max_size=3), max_size=3)),
        "n": data.draw(st.integers(1, 3)),
        "chunk": data.draw(st.integers(1, 9)),
        "log_probabilities": True,
    }
    together = rg.generate(model, prompts, seed=seeds, **options)
    for at, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = rg.generate(model, [prompt], seed=seed, **options)
        for text, other in zip(alone, together[at * len(alone) :], strict=False):
            assert (text, text.tokens, text.reason) == (other, other.tokens, other.reason)
            assert text.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)
    if options["n"] == 1:
        pieces = rg.stream(
            model,
            prompts[0],
            seed=seeds[0],
            **{k: v for k, v in options.items() if k not in ("n", "log_probabilities")},
        )
        assert "".join(pieces) == together[0] == pieces.text


@functools.cache
def random_options_model(name: str) -> rg.Decoder | rg.Transformer:
    return made(name)


@torch.no_grad()
def test_logits_that_are_not_finite_are_one_error_that_says_where():
    config = rg.DecoderConfig(**SIZES, tied=False)
    torch.manual_seed(4)
    model = rg.Decoder(config).double().eval()
    model.initialise(5)
    prompts = [[5, 9, 2], [7]]
    for options in ({}, {"temperature": 1.0, "top_p": 0.9, "seed": [3, 4]}, {"repetition_penalty": 1.3}):
        first, second = rg.generate(model, prompts, max_new_tokens=6, **options)
        others = {5, 9, 2, 7, *first.tokens}
        at, bad = next((at, token) for at, token in enumerate(second.tokens) if token not in others)
        broken = copy.deepcopy(model)
        broken.embedding.weight[bad] = math.nan
        expected = f"logits: expected finite numbers, got nan after {at + 1} new tokens of row 1"
        with pytest.raises(ValueError, match=expected):
            rg.generate(broken, prompts, max_new_tokens=at + 2, **options)
        before = rg.generate(broken, prompts, max_new_tokens=at + 1, **options)
        assert before[1].tokens == second.tokens[: at + 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["gqa", "quadratic", "t5"])
@torch.no_grad()
def test_a_model_that_is_not_finite_generates_nothing(name, value):
    model = made(name)
    (model.stack if name != "t5" else model.decoder).norm.weight.fill_(value)
    small = rg.quantized(made(name).float(), least=1)
    (small.stack if name != "t5" else small.decoder).norm.weight.fill_(value)
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.5, "top_k": 4}, {"beams": 3}):
        for broken in (model, small):
            storages = (None,) if name == "quadratic" else (None, torch.int8)
            for storage in storages:
                with pytest.raises(
                    ValueError, match=r"logits: expected finite numbers, got .* after 0 new tokens of row 0"
                ):
                    rg.generate(broken, PROMPTS[:2], max_new_tokens=3, storage=storage, **options)
    with pytest.raises(ValueError, match="logits: expected finite"):
        next(rg.stream(model, PROMPTS[0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": []}, "prompts: expected at least one, got none"),
        ({"prompts": [[]]}, "prompts: expected at least one token, got an empty prompt"),
        ({"prompts": [[1], []]}, "empty prompt at index 1"),
        ({"prompts": ["text"]}, "prompts: expected lists of tokens, since the model has no tokenizer"),
        ({"prompts": [[61]]}, "prompts: expected tokens from 0 to 60"),
        ({"prompts": [[1] * 256]}, r"prompts: expected fewer than 256 tokens \(the model's context\), got 256"),
        ({"prompts": None}, "prompts: expected either prompts or a state, got none"),
        ({"stop": 61}, "stop: expected tokens from 0 to 60, got 61"),
        ({"stop": ""}, "stop: expected texts and tokens"),
        ({"n": 0}, "n: expected a whole number of at least 1, got 0"),
        ({"beams": 0}, "beams: expected a whole number of at least 1"),
        ({"alternatives": -1}, "alternatives: expected a whole number of at least 0"),
        ({"beams": 2, "alternatives": 3}, "alternatives: expected 0 with beams"),
        ({"beams": 2, "n": 3}, r"n: expected at most 2 \(beams\)"),
        ({"beams": 2, "temperature": 1.0}, "beams: expected 1 with a temperature"),
        ({"temperature": -1.0}, "temperature: expected a finite number of at least 0"),
        ({"temperature": math.nan}, "temperature: expected a finite number"),
        ({"top_p": 0.0}, "top_p: expected a number above 0"),
        ({"top_k": 0}, "top_k: expected a whole number of at least 1"),
        ({"min_p": 2}, "min_p: expected a number above 0 and at most 1"),
        ({"repetition_penalty": 0}, "repetition_penalty: expected a number above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1"),
        ({"seed": [1, 2]}, "seed: expected a whole number, or one for each of 1 prompts"),
        ({"seed": -1}, "seed: expected whole numbers from 0"),
        ({"chunk": 0}, "chunk: expected a whole number of at least 1"),
        ({"prompts": 5}, "prompts: expected a text, a list of texts, or lists of tokens, got int"),
        ({"prompts": {"a": 1}}, "prompts: expected a text, a list of texts, or lists of tokens, got dict"),
        ({"prompts": (prompt for prompt in [[1]])}, "prompts: expected a text, .*, got generator"),
        ({"prompts": {1, 2}}, "prompts: expected a text, .*, got set"),
        ({"prompts": torch.tensor(5)}, "prompts: expected a text, .*, got int"),
        ({"prompts": [5.0]}, "prompts: expected a text or a list of tokens at index 0, got float"),
        ({"prompts": [{1: 2}]}, "prompts: expected a text or a list of tokens at index 0, got dict"),
        ({"prompts": [[1], 5]}, "prompts: expected a text or a list of tokens at index 1, got int"),
        ({"prompts": [torch.zeros(2)]}, "prompts: expected tokens from 0 to 60, got others at index 0"),
        ({"stop": 1.5}, "stop: expected texts and tokens, or None, got float"),
        ({"stop": {"a": 1}}, "stop: expected texts and tokens, or None, got dict"),
        ({"stop": [None]}, "stop: expected texts and tokens, got None"),
        ({"seed": 1.0}, "seed: expected a whole number, or one for each of 1 prompts, got 1.0"),
        ({"seed": "1"}, "seed: expected a whole number, or one for each of 1 prompts, got '1'"),
        ({"seed": {1: 2}}, "seed: expected a whole number"),
        ({"seed": True}, "seed: expected a whole number"),
        ({"max_new_tokens": 5.0}, "max_new_tokens: expected a whole number of at least 1, got 5.0"),
        ({"prompts": None, "state": 5}, "state: expected a Prompt from prefill, got int"),
    ],
)
def test_what_cannot_be_is_one_error_before_any_work(arguments, message):
    model, ran = made("mha"), []
    model.stack.register_forward_pre_hook(lambda module, args: ran.append(1))
    with pytest.raises(ValueError, match=message):
        rg.generate(model, **{"prompts": [[1]], **arguments})
    streamed = {"prompt" if name == "prompts" else name: value for name, value in arguments.items()}
    if "prompts" not in arguments and not {"n", "beams", "alternatives"} & arguments.keys():
        with pytest.raises(ValueError, match=message):
            rg.stream(model, **{"prompt": [1], **streamed})
    assert not ran


def test_prompts_may_be_tensors_and_there_may_be_no_stops():
    model = made("mha")
    expected = rg.generate(model, [[1, 2], [3, 4]], max_new_tokens=3)
    assert rg.generate(model, torch.tensor([[1, 2], [3, 4]]), max_new_tokens=3, stop=None) == expected
    assert rg.generate(model, [torch.tensor([1, 2]), np.array([3, 4])], max_new_tokens=3) == expected
    assert rg.generate(model, torch.tensor([1, 2]), max_new_tokens=3) == expected[:1]
    for room in (-1, 1.0, True):
        with pytest.raises(ValueError, match="room: expected a whole number of at least 0"):
            rg.prefill(model, [[1]], room=room)


def test_only_what_can_speak_is_asked_to():
    with pytest.raises(ValueError, match="model: expected a decoder or an encoder-decoder, got Encoder"):
        rg.generate(rg.Encoder(rg.EncoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=1)), [[1]])
    with pytest.raises(ValueError, match="model: expected a model in eval mode"):
        rg.generate(rg.Decoder(rg.DecoderConfig(**SIZES, dropout=0.1)), [[1]])
    for several in ([[1, 2], [3]], ["a", "b"], torch.tensor([[1, 2]]), [torch.tensor([1])], ([1], 2)):
        with pytest.raises(ValueError, match=r"prompt: expected one text or one list of tokens, got a list of \d prom"):
            rg.stream(made("mha"), several)
    with pytest.raises(ValueError, match="state: expected one prompt to stream from, got 5"):
        rg.stream(made("mha"), state=rg.prefill(made("mha"), PROMPTS))


@torch.no_grad()
def test_smollm2_gives_ragged_prompts_what_it_gives_each_alone():
    model = rg.load("smollm2")
    text = " ".join(pydoc_data.topics.topics[key] for key in ("assert", "class", "del", "for", "lambda"))
    tokens = model.tokenizer.encode(text)
    prompts = [tokens[17 * at : 17 * at + length] for at, length in enumerate((1, 2, 17, 40, 64, 65, 90, 130))]
    together = rg.generate(model, prompts, max_new_tokens=6)
    alone = [rg.generate(model, [prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert [text.tokens for text in together] == [text.tokens for text in alone]
    state = rg.prefill(model, prompts[4:], chunk=64)
    assert [text.tokens for text in rg.generate(model, state=state, max_new_tokens=6)] == [
        row.tokens for row in alone[4:]
    ]
