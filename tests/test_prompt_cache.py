"""Prompt caches: their size, their files, int8, and no other model goes on from them."""

import copy
import json
import pickle
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

import regard as rg
from generating import DECODERS, PROMPTS, made
from memory import Allocations
from regard.inference.generation.prompt import KEY, with_room


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
    assert all(layer.capacity <= 2 * 5 + 16 for layer in long.state.layers)
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
    assert [text.tokens for text in rg.generate(model, PROMPTS, max_new_tokens=12, storage=torch.int8)] == expected
    assert [text.tokens for text in rg.generate(model, state=small, max_new_tokens=12)] == expected
    back = rg.Prompt.load(small.save(tmp_path / "prompt.safetensors"), model)
    assert back.nbytes <= small.nbytes
    newest = torch.tensor([[3]] * len(PROMPTS))
    steps = [model.extend(newest, with_room(prompt.state, 1, 9))[0] for prompt in (small, back)]
    assert torch.equal(*steps)


@torch.no_grad()
def test_continuations_of_a_full_prompt_share_it():
    """Ten of them hold two copies of the prompt, the first continuation's among them, and ten tails."""
    config = replace(DECODERS["mha"], context_length=4096)
    model = rg.Decoder(config).double().eval()
    prompt = rg.prefill(model, [[token % config.vocabulary_size for token in range(2100)]])
    assert prompt.state.layers[0].capacity == 2100
    newest = torch.tensor([[3]])
    states = [model.extend(newest, with_room(prompt.state, 1, 50))[1] for _ in range(10)]
    buffers = {
        buffer for state in (prompt.state, *states) for layer in state.layers for buffer in layer.runs[0].buffers
    }
    memory = sum(tensor.nbytes for buffer in buffers for tensor in buffer.tensors)
    assert memory <= 2.4 * prompt.nbytes
    whole = model(torch.tensor([[*prompt.tokens[0], 3, 4]]))[:, -1:]
    for state in states:
        assert (model.extend(torch.tensor([[4]]), state)[0] - whole).abs().max() <= 1e-10


@torch.no_grad()
def test_what_cannot_be_stored_in_int8_is_refused():
    with pytest.raises(ValueError, match=r"storage: expected None, since .* is no KV cache"):
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
    model.initialise(5)
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
                prompt = rg.Prompt.load(target, model)
            except rg.CheckpointError:
                prompt = None
            if prompt is not None:  # what was changed says the same, or nothing
                rg.generate(model, state=prompt, max_new_tokens=2)
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


@pytest.mark.parametrize("name", ["gqa", "window", "quadratic", "t5"])
@torch.no_grad()
def test_room_is_made_for_tokens_as_they_come(name):
    model = made(name)
    model.config = replace(model.config, context_length=10**9)
    plain = made(name)
    expected = rg.generate(plain, PROMPTS[2:4], max_new_tokens=40)
    end = expected[0].tokens[5]
    with Allocations() as seen:
        texts = rg.generate(model, PROMPTS[2:4], max_new_tokens=99999999, stop=[end, expected[1].tokens[5]])
        assert texts[0].tokens == expected[0].tokens[: expected[0].tokens.index(end) + 1]
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
        assert [text.reason for text in rg.generate(model, [[1, 2], [7]], max_new_tokens=10**8)] == ["context"] * 2
    assert beams == rg.generate(model, [[1, 2], [5]], max_new_tokens=20, beams=3)
