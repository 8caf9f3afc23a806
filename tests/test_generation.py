"""Generation: the same tokens however they are computed, the right distribution, the right endings."""

import copy
import functools
import itertools
import json
import math
import pickle
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import peers
import regard as rg
from memory import Allocations
from regard.checkpoints import Tokenizer
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.inference.generation.prompt import KEY, with_room
from regard.inference.generation.sampling import Sampling
from regard.inference.generation.text import Writer

SIZES = {"vocabulary_size": 61, "embedding_dim": 16, "num_layers": 3, "num_heads": 4, "context_length": 256}
DECODERS = {
    "mha": rg.DecoderConfig(**SIZES),
    "gqa": rg.DecoderConfig(**SIZES, num_kv_heads=2),
    "mqa": rg.DecoderConfig(**SIZES, num_kv_heads=1),
    "gpt2": rg.DecoderConfig.gpt2(**SIZES),
    "alibi": rg.DecoderConfig(**SIZES, positions="alibi"),
    "window": rg.DecoderConfig(**SIZES, window=rg.Window(6), window_layers=(0, 2), num_kv_heads=2),
    "window-alibi": rg.DecoderConfig(**SIZES, window=rg.Window(4), positions="alibi"),
    **{name: rg.DecoderConfig(**SIZES, mechanism=name) for name, one in REGISTRY.items() if weighs_tokens(one, 8)},
}
SEQUENCES = {
    "transformer": rg.TransformerConfig(**SIZES, num_decoder_layers=2, start_token=1),
    "t5": rg.TransformerConfig.t5(**SIZES, qk_length=6, end_tokens=()),
    "kernel": rg.TransformerConfig(**SIZES, mechanism="quadratic", start_token=2),
}
PROMPTS = [[5, 9, 2], [7], list(range(3, 40)), [11, 12, 13, 14, 15, 16, 17, 18, 19], [60, 1]]


def made(name: str) -> rg.Decoder | rg.Transformer:
    torch.manual_seed(0)
    if name in DECODERS:
        model: rg.Decoder | rg.Transformer = rg.Decoder(DECODERS[name])
        model.initialise(0.5)
    else:
        model = rg.Transformer(SEQUENCES[name])
    return model.double().eval()


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
    assert len({tuple(one) for one in expected}) > 1
    for chunk in (1, 5, 64):
        assert [one.tokens for one in rg.generate(model, PROMPTS, max_new_tokens=12, chunk=chunk)] == expected
    state = rg.prefill(model, PROMPTS)
    for _ in range(2):
        assert [one.tokens for one in rg.generate(model, state=state, max_new_tokens=12)] == expected
    forked = rg.generate(model, PROMPTS, max_new_tokens=12, n=2)
    assert [one.tokens for one in forked] == [one for one in expected for _ in range(2)]
    pieces = rg.stream(model, PROMPTS[2], max_new_tokens=12)
    assert "".join(pieces) == " ".join(map(str, expected[2])) == pieces.text


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "elu", "transformer"])
@torch.no_grad()
def test_seeded_draws_of_a_batch_are_those_of_one_alone(name):
    model = made(name)
    options = {"max_new_tokens": 20, "temperature": 1.3, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1.1}
    together = rg.generate(model, PROMPTS, seed=[3, 1, 4, 1, 5], **options)
    for prompt, seed, found in zip(PROMPTS, [3, 1, 4, 1, 5], together, strict=True):
        assert rg.generate(model, [prompt], seed=seed, **options)[0].tokens == found.tokens
    three = rg.generate(model, PROMPTS[:2], seed=9, n=3, **options)
    assert len({tuple(one.tokens) for one in three[:3]}) == 3
    assert [one.tokens for one in rg.generate(model, PROMPTS[1:2], seed=9, n=3, **options)] == [
        one.tokens for one in three[3:]
    ]
    assert rg.generate(model, PROMPTS[0], **options)[0] != rg.generate(model, PROMPTS[0], **options)[0]


@torch.no_grad()
def test_rows_that_finish_leave_the_batchs_work():
    model, seen = made("gqa"), []
    model.stack.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[:2]))
    longest = rg.generate(model, PROMPTS, max_new_tokens=30)
    ends = sorted({one.tokens[4] for one in longest[:3]})
    seen.clear()
    found = rg.generate(model, PROMPTS, max_new_tokens=30, stop=ends)
    assert [one.tokens for one in found] == [
        one.tokens[: next((at + 1 for at, token in enumerate(one.tokens) if token in ends), 30)] for one in longest
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
    model.initialise(0.5)
    prompts = [[1] * 9, *([at, 3] for at in range(4))]
    first = rg.generate(model, prompts[:1], max_new_tokens=1)[0]
    options = {"max_new_tokens": 20, "stop": first.tokens if early else None}
    together = rg.generate(model.double(), prompts, **options)
    assert [row.reason for row in together] == ["stop" if early else "context", *["context"] * 4]
    assert [row.tokens for row in together] == [rg.generate(model, [one], **options)[0].tokens for one in prompts]


@torch.no_grad()
def test_a_prompt_is_read_once_for_all_its_samples_and_in_bounded_pieces():
    model, seen = made("gqa"), []
    model.stack.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape[:2])))
    rg.generate(model, [PROMPTS[2]], max_new_tokens=2, n=4, chunk=10, temperature=1.0, seed=0)
    assert seen == [(1, 10), (1, 10), (1, 10), (1, 7), (4, 1)]


@torch.no_grad()
def test_a_window_keeps_a_window_sized_state():
    model = made("window-alibi")
    short, long = rg.prefill(model, [[1] * 20]), rg.prefill(model, [[1] * 200], chunk=16)
    assert long.state.length == 200
    assert all(one.capacity <= 2 * 5 + 16 for one in long.state.layers)
    assert long.nbytes <= 2 * short.nbytes
    with pytest.raises(ValueError, match=r"length: expected at least .* the window is past, got 3"):
        long.state.crop(3)
    tokens = torch.randint(61, (1, 90))
    _, state = model.extend(tokens[:, :80], model.start(batch=1, capacity=8))
    back = state.crop(state.length - 1)
    again, _ = model.extend(tokens[:, 79:], back)
    assert (again - model(tokens)[:, 79:]).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "random-features", "argmax", "transformer", "t5"])
@torch.no_grad()
def test_a_prompt_comes_back_from_its_file(name, tmp_path):
    model = made(name)
    state = rg.prefill(model, [*PROMPTS, [7, 8] * 100])  # so unequal that a state keeps it in several runs
    expected = rg.generate(model, state=state, max_new_tokens=15)
    path = state.save(tmp_path / "prompt.safetensors")
    back = rg.Prompt.load(path, model)
    assert back.tokens == state.tokens
    assert rg.generate(model, state=back, max_new_tokens=15) == expected
    with pytest.raises(rg.CheckpointError, match=r"safetensors|header"):
        rg.Prompt.load(__file__, model)
    for none in (None, "smollm2", torch.nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="model: expected a decoder or an encoder-decoder, got"):
            rg.Prompt.load(path, none)


@pytest.mark.parametrize("name", ["gqa", "window", "transformer", "t5"])
@torch.no_grad()
def test_a_prompt_in_int8_goes_on_in_int8(name, tmp_path):
    model = made(name)
    plain, small = rg.prefill(model, PROMPTS), rg.prefill(model, PROMPTS, storage=torch.int8)
    assert small.nbytes < plain.nbytes / 2
    assert all(layer.buffer.keys.dtype == torch.int8 for layer in small.state.layers)
    assert 0 < (small.logits - plain.logits).abs().max() < 0.5
    expected = [rg.generate(model, [prompt], max_new_tokens=12, storage=torch.int8)[0].tokens for prompt in PROMPTS]
    assert [one.tokens for one in rg.generate(model, PROMPTS, max_new_tokens=12, storage=torch.int8)] == expected
    assert [one.tokens for one in rg.generate(model, state=small, max_new_tokens=12)] == expected
    back = rg.Prompt.load(small.save(tmp_path / "prompt.safetensors"), model)
    assert back.nbytes <= small.nbytes
    given = torch.tensor([[3]] * len(PROMPTS))
    steps = [model.extend(given, with_room(one.state, 1, 9))[0] for one in (small, back)]
    assert torch.equal(*steps)


@torch.no_grad()
def test_what_cannot_be_stored_in_int8_is_refused():
    with pytest.raises(ValueError, match=r"storage: expected None, .* keeps sums"):
        rg.generate(made("kernel"), [[1]], storage=torch.int8)
    with pytest.raises(ValueError, match=r"storage: expected torch.int8 or None, got torch.int16"):
        rg.generate(made("t5"), [[1]], storage=torch.int16)


@pytest.mark.parametrize("options", [{}, {"beams": 2}], ids=str)
def test_a_state_has_its_storage(options):
    model = made("gqa")
    prompt = rg.prefill(model, [[1, 2]])
    message = "storage: expected None with a state, which has its storage from prefill, got torch.int8"
    with pytest.raises(ValueError, match=message):
        rg.generate(model, state=prompt, storage=torch.int8, **options)
    with pytest.raises(ValueError, match=message):
        rg.stream(model, state=prompt, storage=torch.int8)


def stepped(model: rg.Decoder) -> rg.Decoder:
    """A model after one step of training."""
    with torch.enable_grad():
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        model(torch.tensor([[1, 2]])).square().sum().backward()
        optimizer.step()
    return model


OTHERS = {
    "weights": lambda: seeded(5, DECODERS["mha"]),
    "trained": lambda: stepped(made("mha")),
    "dtype": lambda: made("mha").float(),
    "mechanism": lambda: made("argmax"),
    "softmax": lambda: seeded(0, replace(DECODERS["mha"], mechanism=rg.Softmax(beta=0.5))),
    "rotary": lambda: seeded(0, replace(DECODERS["mha"], rotary_base=500.0)),
    "heads": lambda: made("gqa"),
    "kind": lambda: made("t5"),
    "int8": lambda: rg.quantized(made("mha").float(), least=1),
}


def seeded(seed: int, config: rg.DecoderConfig) -> rg.Decoder:
    torch.manual_seed(seed)
    model = rg.Decoder(config)
    model.initialise(0.5)
    return model.double().eval()


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_no_other_model_goes_on_with_a_prompt(name, tmp_path):
    model, other = made("mha"), OTHERS[name]()
    prompt = rg.prefill(model, PROMPTS)
    path = prompt.save(tmp_path / "prompt.safetensors")
    for call in (
        lambda: rg.generate(other, state=prompt, max_new_tokens=2),
        lambda: rg.generate(other, state=prompt, max_new_tokens=2, beams=2),
        lambda: rg.stream(other, state=prompt.chosen([0])),
        lambda: rg.Prompt.load(path, other),
    ):
        with pytest.raises(
            ValueError,
            match=r"a prompt that this model read, got a prompt of a (Decoder$|model with (other|another))",
        ):
            call()


@pytest.mark.parametrize("name", ["mha", "quadratic", "t5"])
@torch.no_grad()
def test_a_prompt_goes_on_with_its_model_reloaded(name, tmp_path):
    model = made(name)
    model.config = replace(model.config, dropout=0.1)  # of training alone
    prompt = rg.prefill(model, PROMPTS)
    expected = rg.generate(model, state=prompt, max_new_tokens=4)
    again = rg.load(rg.save(model, tmp_path / "model"))
    again.config = replace(again.config, dropout=0.0, padding_token=3)
    path = prompt.save(tmp_path / "prompt.safetensors")
    for same in (prompt, rg.Prompt.load(path, again), copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):
        assert rg.generate(again, state=same, max_new_tokens=4) == expected
    pieces = rg.stream(model, PROMPTS[0], max_new_tokens=4)
    next(pieces)
    rg.generate(model, state=pieces.prompt_so_far(), max_new_tokens=2)
    with pytest.raises(ValueError, match="expected a prompt that this model read"):
        rg.generate(made("gqa"), state=pieces.prompt_so_far(), max_new_tokens=2)


@pytest.mark.parametrize("name", ["gqa", "quadratic", "retention"])
@torch.no_grad()
def test_layers_whose_states_share_tensors_are_saved(name, tmp_path):
    model = made(name)
    prompt = rg.prefill(model, PROMPTS)
    shared = replace(prompt, state=replace(prompt.state, layers=prompt.state.layers[:1] * 3))
    loaded = rg.Prompt.load(shared.save(tmp_path / "prompt.safetensors"), model)
    assert rg.generate(model, state=loaded, max_new_tokens=4) == rg.generate(model, state=shared, max_new_tokens=4)


@pytest.mark.parametrize("rows", [[0.0, 1.0], [False, True], ["0", "1"], [[0], [1]]])
@torch.no_grad()
def test_a_prompts_file_numbers_its_rows_by_whole_numbers(rows, tmp_path):
    model = made("gqa")
    path = rg.prefill(model, [[7, 8], [9, 10]]).save(tmp_path / "prompt.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        plan = json.loads(file.metadata()[KEY])
    assert plan["layers"][0]["runs"][0]["rows"] == [0, 1]
    plan["layers"][0]["runs"][0]["rows"] = rows
    save_file(load_file(path), tmp_path / "changed", metadata={KEY: json.dumps(plan)})
    with pytest.raises(rg.CheckpointError, match=r"expected a saved prompt of this model, got .*a run of rows"):
        rg.Prompt.load(tmp_path / "changed", model)


NUMBERS = (0, -1, 1, 2, 5, 64, 128, 159, 160, 161, 2**31, 2**62, 10**30, 1.5, True, None, "9", [], {}, [[1]], [2**31])


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "t5", "kernel"])
@torch.no_grad()
def test_no_number_in_a_prompts_file_takes_memory_that_is_not_there(name, tmp_path):
    model, random = made(name), Random(0)
    path = rg.prefill(model, [[7, 8] * 80, PROMPTS[0]]).save(tmp_path / "prompt.safetensors")
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    usual = rg.Prompt.load(path, model).nbytes
    target = tmp_path / "hostile.safetensors"
    read = 0
    for _ in range(40):
        changed = copy.deepcopy(header)
        plan = json.loads(changed["__metadata__"]["regard.prompt"])
        chosen = random.choice((plan, plan, {key: value for key, value in changed.items() if key != "__metadata__"}))
        spoil(chosen, random)
        changed["__metadata__"]["regard.prompt"] = json.dumps(plan)
        text = json.dumps(changed).encode()
        target.write_bytes(len(text).to_bytes(8, "little") + text + body)
        with Allocations() as seen:
            try:
                found = rg.Prompt.load(target, model)
            except rg.CheckpointError:
                found = None
            if found is not None:  # what was changed says the same, or nothing
                rg.generate(model, state=found, max_new_tokens=2)
                read += 1
        assert seen.peak < 8 * usual + 2**20
    assert read < 40


def spoil(values: Any, random: Random) -> None:
    """Put another value somewhere in a tree of JSON."""
    while True:
        places = list(values) if isinstance(values, dict) else list(range(len(values)))
        key = random.choice(places)
        if isinstance(values[key], dict | list) and values[key] and random.random() < 0.7:
            values = values[key]
            continue
        if random.random() < 0.2:
            del values[key]
        else:
            values[key] = random.choice(NUMBERS)
        return


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 0.6, 2.0])
@pytest.mark.parametrize("name", ["mha", "quadratic", "window"])
@torch.no_grad()
def test_beam_search_with_beams_enough_is_exhaustive(name, length_penalty):
    torch.manual_seed(1)
    config = {**vars(DECODERS[name]), "vocabulary_size": 5, "end_tokens": (4,)}
    model = rg.Decoder(rg.DecoderConfig(**config)).double().eval()
    model.initialise(0.6)
    prompt, most = [1, 2, 0], 4
    every = []
    for length in range(1, most + 1):
        ended = [
            tokens
            for tokens in itertools.product(range(5), repeat=length)
            if 4 not in tokens[:-1] and (length == most or tokens[-1] == 4)
        ]
        logits = model(torch.tensor([[*prompt, *tokens] for tokens in ended])).log_softmax(-1)
        for tokens, one in zip(ended, logits[:, len(prompt) - 1 : -1], strict=True):
            total = float(one[range(length), tokens].sum())
            every.append((total / length**length_penalty, list(tokens)))
    every.sort(key=lambda one: -one[0])
    found = rg.generate(model, [prompt], max_new_tokens=most, beams=5**most, n=3, length_penalty=length_penalty)
    assert [one.tokens for one in found] == [tokens for _, tokens in every[:3]]
    assert [one.score for one in found] == pytest.approx([score for score, _ in every[:3]], abs=1e-10)


@pytest.mark.parametrize("name", ["gqa", "elu", "window", "t5"])
@torch.no_grad()
def test_beams_of_a_batch_are_those_of_one_alone_and_score_as_they_say(name):  # transformers#46612
    model = made(name)
    together = rg.generate(model, PROMPTS, max_new_tokens=12, beams=4)
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert rg.generate(model, [prompt], max_new_tokens=12, beams=4)[0].tokens == found.tokens
        if isinstance(model, rg.Decoder):
            tokens = torch.tensor([[*prompt, *found.tokens]])
            scores = model(tokens).log_softmax(-1)[0, len(prompt) - 1 : -1].gather(1, tokens[0, len(prompt) :, None])
            assert found.score == pytest.approx(float(scores.mean()), abs=1e-9)


@torch.no_grad()
def test_beams_are_those_of_transformers(tmp_path):
    theirs = peers.decoder("llama")
    ours = rg.load(peers.saved(theirs, tmp_path / "model"))
    tokens = peers.sequences(1, 12)
    options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
    expected = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), **options)[0, 12:].tolist()
    assert rg.generate(ours, tokens.tolist(), max_new_tokens=10, beams=4)[0].tokens == expected


def test_draws_follow_the_models_distribution():
    """Chi-square of 20,000 first tokens, and of the second given the first, against the model's own probabilities."""
    torch.manual_seed(2)
    model = rg.Decoder(rg.DecoderConfig(**{**SIZES, "vocabulary_size": 12})).double().eval()
    model.initialise(0.4)
    with torch.no_grad():
        wanted = (model(torch.tensor([[3, 1]]))[0, -1] / 0.9).softmax(-1)
    found = rg.generate(model, [[3, 1]], max_new_tokens=2, temperature=0.9, n=20000, seed=1)
    first = torch.bincount(torch.tensor([one.tokens[0] for one in found]), minlength=12)
    assert _chi_square(first, wanted) < 38  # 11 degrees of freedom: exceeded once in 10,000
    favourite = int(first.argmax())
    with torch.no_grad():
        after = (model(torch.tensor([[3, 1, favourite]]))[0, -1] / 0.9).softmax(-1)
    second = [one.tokens[1] for one in found if one.tokens[0] == favourite]
    assert _chi_square(torch.bincount(torch.tensor(second), minlength=12), after) < 38
    assert _chi_square(first, after.roll(1)) > 38


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"top_k": 7}, transformers.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, transformers.TopPLogitsWarper(0.7)),
        ({"min_p": 0.1}, transformers.MinPLogitsWarper(0.1)),
    ],
)
def test_cuts_are_those_of_transformers(ours, theirs):
    for seed in range(20):
        logits = 3 * torch.randn(50, generator=torch.Generator().manual_seed(seed))
        expected = theirs(None, logits[None])[0].isfinite()
        assert torch.equal(Sampling(temperature=1.0, **ours).cut(logits).isfinite(), expected)


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-30])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_the_likeliest_token_is_drawn_at_any_small_temperature(temperature, options):
    logits = torch.tensor([[10.0, 20.0, 30.0], [-10.0, -30.0, -20.0], [1e38, 2e38, -3e38]])
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    assert Sampling(temperature=temperature, **options).draw(logits, generators).tolist() == [2, 0, 1]


def test_the_repetition_penalty_is_that_of_transformers():
    logits, seen = torch.randn(30), [3, 4, 4, 29]
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), logits[None])[0]
    assert torch.allclose(Sampling(repetition_penalty=1.7).penalised(logits, seen), expected)


@torch.no_grad()
def test_log_probabilities_are_the_models():
    model = made("gqa")
    found = rg.generate(model, [PROMPTS[0]], max_new_tokens=6, temperature=2.0, top_k=5, seed=0, log_probabilities=True)
    tokens = torch.tensor([[*PROMPTS[0], *found[0].tokens]])
    scores = model(tokens).log_softmax(-1)[0, 2:-1].gather(1, tokens[0, 3:, None])[:, 0]
    assert found[0].log_probabilities == pytest.approx(scores.tolist(), abs=1e-10)
    assert rg.generate(model, [PROMPTS[0]], max_new_tokens=2)[0].log_probabilities is None


@pytest.mark.parametrize("vocabulary", [300, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_cuts_and_draws_of_rows_are_those_of_each_alone_to_the_last_bit(vocabulary, spread):
    logits = spread * torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(3))
    logits[1] = logits[1].round()  # ties at every border
    for options in ({"top_p": 0.9}, {"top_p": 0.999}, {"top_p": 1.0}, {"top_k": 30, "top_p": 0.7}, {"min_p": 0.2}, {}):
        sampling = Sampling(temperature=0.7, **options)
        cut = sampling.cut(logits)
        assert torch.equal(cut, torch.stack([sampling.cut(row) for row in logits]))
        if options == {"top_p": 1.0}:
            assert cut.isfinite().all()
        elif options.keys() == {"top_p"}:  # by sorting everything
            ordered = (logits.double() / 0.7).sort(descending=True).values
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            kept = (before < options["top_p"]).sum(-1)
            least = ordered.gather(-1, kept[:, None] - 1)
            assert torch.equal(cut.isfinite(), logits.double() / 0.7 >= least)
        together = sampling.draw(logits, [torch.Generator().manual_seed(seed) for seed in range(5)])
        for seed, row in enumerate(logits):
            assert int(together[seed]) == int(sampling.draw(row[None], [torch.Generator().manual_seed(seed)]))


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
        for one, other in zip(alone, together[at * len(alone) :], strict=False):
            assert (one, one.tokens, one.reason) == (other, other.tokens, other.reason)
            assert one.log_probabilities == pytest.approx(other.log_probabilities, abs=1e-9)
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


ALPHABET = [chr(97 + at) for at in range(26)] + [chr(65 + at) for at in range(26)] + list("0123456")


def lettered(hidden: Sequence[int]) -> Tokenizer:
    """A tokenizer of 61 tokens, single letters, and special ones at the places of `hidden`, whose ids end nothing."""
    roles = ("unk", "pad", "mask")
    names = [*ALPHABET, "<a>", "<b>"]
    special = {}
    for role, at in zip(roles, hidden, strict=False):
        names[at] = special[role] = f"<|{role}|>"
    return Tokenizer.from_vocabulary(names, special=special)


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
            found = rg.generate(model, [PROMPTS[0]], max_new_tokens=8, stop=stop, **options)
            if not options:
                assert (found[0], found[0].tokens) == ("".join(text), tokens[:count])
                assert found[0].reason == ("length" if count == 8 else "stop")
            else:
                assert all(stop not in model.tokenizer.decode(one.tokens[:-1], special=True) for one in found)
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
        found = rg.generate(model, [PROMPTS[0]], **options)[0]
        assert (found, found.tokens) == (text, tokens[:4])
        assert found.reason == (reason if ends == "the model" else "stop")
        pieces = rg.stream(model, PROMPTS[0], **options)
        assert "".join(pieces) == text == pieces.text


@torch.no_grad()
def test_a_stop_string_may_have_the_token_that_ends_a_beam():
    model, options = made("mha"), {"max_new_tokens": 4, "beams": 8, "n": 8}
    end = rg.generate(model, [PROMPTS[0]], **options)[0].tokens[2]
    model.tokenizer, model.config = lettered([end]), replace(model.config, end_tokens=(end,))
    plain = rg.generate(model, [PROMPTS[0]], **options)
    ended = [one for one in plain if one.reason == "end" and len(one.tokens) > 2]
    letter = model.tokenizer.tokens(ended[0].tokens)[-2]
    found = rg.generate(model, [PROMPTS[0]], stop=f"{letter}<|unk|>", **options)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    for one, other in zip(found, plain, strict=True):
        stopped = other.reason == "end" and other.endswith(letter)
        assert (one, one.reason) == ((other[:-1], "stop") if stopped else (other, other.reason))


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
        for one in stop:
            if (at := "".join(text).find(one)) >= 0:
                places.append(at)
            if (at := "".join(written).find(one)) >= 0:
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


@torch.no_grad()
def test_beams_look_for_stop_strings_in_what_is_new():
    model, inner, decoded = made("mha"), lettered([0]), []

    class Counting:
        eos = None

        def decode(self, ids, special=False):
            decoded.append(len(ids))
            return inner.decode(ids, special)

    plain, model.tokenizer = rg.generate(model, [[5]], max_new_tokens=30, beams=2)[0].tokens, Counting()
    found = rg.generate(model, [[5]], max_new_tokens=30, beams=2, stop="no such letters")[0]
    assert (found.tokens, found) == (plain, inner.decode(plain))
    candidates = 4  # two for each beam
    assert sum(decoded) <= 6 * candidates * len(plain)


VALUES = {
    "generated": lambda: rg.Generated("Paris.", tokens=[7, 8], reason="end", log_probabilities=[-0.1, -2.0], score=0.5),
    "prompt": lambda: rg.prefill(made("gqa"), PROMPTS),
    "prompt of sums": lambda: rg.prefill(made("quadratic"), PROMPTS),
    "prompt of a source": lambda: rg.prefill(made("t5"), PROMPTS),
    "prompt in int8": lambda: rg.prefill(made("gqa"), PROMPTS, storage=torch.int8),
    "state": lambda: made("gqa").start(batch=1, capacity=4),
    "config": lambda: DECODERS["window"],
    "scaling": lambda: rg.RotaryScaling(kind="linear", factor=2.0),
    "mask": lambda: rg.causal & rg.padding([3, 2]) & ~rg.window(before=1, after=0),
    "mechanism": lambda: rg.Quadratic(),
    "work": lambda: rg.Work(query_length=4, key_length=4),
    "cost": lambda: rg.cost(rg.Softmax(), rg.Work(query_length=4, key_length=4)),
    "plan": lambda: rg.explain(*torch.randn(3, 1, 1, 4, 4)),
    "summary": lambda: made("gqa").summary(5),
    "model": lambda: made("gqa"),
    "int8 model": lambda: rg.quantized(made("gqa").float(), least=1),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("way", ["copy", "deepcopy", 0, pickle.HIGHEST_PROTOCOL])
def test_every_value_is_itself_when_copied_and_pickled(name, way):
    value = VALUES[name]()
    again = getattr(copy, way)(value) if isinstance(way, str) else pickle.loads(pickle.dumps(value, way))
    assert type(again) is type(value)
    assert same(vars(value), vars(again))
    assert str(again) == str(value)


def same(left, right) -> bool:
    """Whether two values hold the same, whatever they are made of."""
    if isinstance(left, torch.Tensor):
        alike = (left.shape, left.dtype) == (right.shape, right.dtype)
        return alike and bool(((left == right) | (left != left)).all())  # room to spare may hold anything
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (type(left) is type(right) and hasattr(left, "__dict__") and same(vars(left), vars(right)))


@torch.no_grad()
def test_logits_that_are_not_finite_are_one_error_that_says_where():
    config = rg.DecoderConfig(**SIZES, tied=False)
    torch.manual_seed(4)
    model = rg.Decoder(config).double().eval()
    model.initialise(0.5)
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


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "t5"])
@torch.no_grad()
def test_room_is_made_for_tokens_as_they_come(name):
    model = made(name)
    model.config = replace(model.config, context_length=10**9)
    plain = made(name)
    expected = rg.generate(plain, PROMPTS[2:4], max_new_tokens=40)
    end = expected[0].tokens[5]
    with Allocations() as seen:
        found = rg.generate(model, PROMPTS[2:4], max_new_tokens=99999999, stop=[end, expected[1].tokens[5]])
        assert found[0].tokens == expected[0].tokens[: expected[0].tokens.index(end) + 1]
        pieces = rg.stream(model, PROMPTS[2], max_new_tokens=99999999)
        assert [next(pieces) for _ in range(3)]
        rg.generate(model, PROMPTS[2], max_new_tokens=99999999, beams=2, length_penalty=0.0, stop=list(range(60)))
        assert rg.prefill(model, PROMPTS[2], room=7).nbytes <= rg.prefill(plain, PROMPTS[2], room=7).nbytes
    assert seen.peak < 2**26
    assert rg.prefill(plain, PROMPTS[2], room=10**9).nbytes < 2**22  # no more than the context


@torch.no_grad()
def test_states_grow_beyond_their_first_room():
    model = made("gqa")
    model.config = replace(model.config, context_length=40)
    expected = rg.generate(model, [[1, 2]], max_new_tokens=20)[0].tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.core.states.key_values.LEAST_MORE", 3)
        assert rg.generate(model, [[1, 2]], max_new_tokens=20)[0].tokens == expected
        assert rg.generate(model, state=rg.prefill(model, [[1, 2]]), max_new_tokens=20)[0].tokens == expected
        beams = rg.generate(model, [[1, 2], [5]], max_new_tokens=20, beams=3)
        assert [one.reason for one in rg.generate(model, [[1, 2], [7]], max_new_tokens=10**8)] == ["context"] * 2
    assert beams == rg.generate(model, [[1, 2], [5]], max_new_tokens=20, beams=3)


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
        ({"prompts": (one for one in [[1]])}, "prompts: expected a text, .*, got generator"),
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
    if "prompts" not in arguments and not {"n", "beams"} & arguments.keys():
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
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    state = rg.prefill(model, prompts[4:], chunk=64)
    assert [one.tokens for one in rg.generate(model, state=state, max_new_tokens=6)] == [o.tokens for o in alone[4:]]
