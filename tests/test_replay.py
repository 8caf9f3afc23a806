"""Steps over slots, as a GPU replays them: on a CPU they run as they are, and give what eager steps give."""

from dataclasses import replace

import pytest
import torch

import regard as rg
from regard.inference.generation import replay

MODELS = {
    "softmax": {"num_kv_heads": 2},
    "window": {"window": rg.Window(23)},
    "some windows": {"window": rg.Window(7), "window_layers": (1,)},
    "quadratic": {"mechanism": "quadratic"},
    "elu": {"mechanism": "elu", "num_kv_heads": 2},
    "softcap": {"mechanism": rg.Softmax(softcap=20.0)},
    "argmax": {"mechanism": rg.Argmax()},
    "learned positions": {"positions": "learned"},
}
PROMPTS = [list(range(1, 70)), [5, 6, 7], list(range(3, 80)), [9]]


def decoder(**changes):
    sizes = {"vocabulary_size": 97, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}
    return rg.Decoder(rg.DecoderConfig(**{**sizes, **changes})).double().eval()


def both(monkeypatch, generate):
    """What eager steps give and what steps over slots do, and how many times slots were made."""
    eager, made = generate(), []

    class Counted(replay.Replay):
        def __init__(self, *arguments):
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(replay, "Replay", Counted)
    monkeypatch.setattr(replay, "unfit", replay.uncapturable)
    return eager, generate(), len(made)


@pytest.mark.parametrize("name", MODELS)
def test_steps_over_slots_are_the_eager_ones_also_when_rows_leave(name, monkeypatch):
    model = decoder(**MODELS[name])
    ends = rg.generate(model, PROMPTS, max_new_tokens=60)
    stop = [ends[1].tokens[5], ends[3].tokens[20]]
    eager, slots, made = both(
        monkeypatch, lambda: rg.generate(model, PROMPTS, max_new_tokens=60, stop=stop, log_probabilities=True)
    )
    assert made
    assert [text.tokens for text in slots] == [text.tokens for text in eager]
    for replayed, launched in zip(slots, eager, strict=True):
        torch.testing.assert_close(replayed.log_probabilities, launched.log_probabilities, rtol=1e-9, atol=1e-9)


def test_int8_states_and_an_encoder_decoder(monkeypatch):
    model = decoder(num_kv_heads=2).float()
    eager, slots, made = both(monkeypatch, lambda: rg.generate(model, PROMPTS, max_new_tokens=20, storage=torch.int8))
    assert made == 1
    assert [text.tokens for text in slots] == [text.tokens for text in eager]
    monkeypatch.undo()
    sizes = {"vocabulary_size": 31, "embedding_dim": 16, "num_layers": 1, "num_heads": 2}
    translator = rg.Transformer(rg.TransformerConfig(**sizes, start_token=1, end_tokens=())).eval()
    eager, slots, made = both(monkeypatch, lambda: rg.generate(translator, [[3, 4, 5], [6]], max_new_tokens=20))
    assert made == 1
    assert [text.tokens for text in slots] == [text.tokens for text in eager]


@pytest.mark.parametrize("name", ["softmax", "window", "quadratic"])
@torch.inference_mode()
def test_a_state_that_was_reached_goes_on_anywhere(name, monkeypatch):
    model = decoder(**MODELS[name])
    monkeypatch.setattr(replay, "unfit", replay.uncapturable)
    reading, exact = replay.Reading(model, rg.prefill(model, PROMPTS)), rg.prefill(model, PROMPTS, room=80)
    for token in range(70):
        reading.read([token] * 4, most=200)
        if token % 30 == 9:
            reading.choose([0, 1, 2, 3])
    hidden, state = model.advance(torch.arange(70).expand(4, 70), exact.state)
    prompt = reading.prompt
    assert prompt.length == state.length
    assert prompt.tokens[3] == (9, *range(70))
    torch.testing.assert_close(prompt.logits, model.predict(hidden[:, -1:])[:, 0], rtol=1e-9, atol=1e-9)
    more = torch.tensor([[3, 1, 4]] * 4)
    torch.testing.assert_close(model.extend(more, prompt.state)[0], model.extend(more, state)[0], rtol=1e-9, atol=1e-9)


def test_room_that_is_full_is_made_anew(monkeypatch):
    monkeypatch.setattr(replay, "first_room", lambda *_: 16)
    model = decoder()
    eager, slots, made = both(monkeypatch, lambda: rg.generate(model, [[1, 2, 3]], max_new_tokens=40))
    assert made == 2  # and the last seven tokens eagerly
    assert slots[0].tokens == eager[0].tokens


def test_what_is_not_captured_says_why():
    model = decoder()
    state = rg.prefill(model, [[1, 2], [3]]).state
    assert replay.unfit(model, state, 100) == "made for GPUs"
    assert replay.uncapturable(model, state, 100) is None
    assert "fewer than" in replay.uncapturable(model, state, 2)
    right = replace(state, padding=rg.padding([2, 1]))
    assert "not on the left" in replay.uncapturable(model, right, 100)
    assert "training" in replay.uncapturable(decoder().train(), state, 100)
    handle = model.stack.norm.register_forward_hook(lambda *_: None)
    assert "hooks" in replay.uncapturable(model, state, 100)
    handle.remove()
    assert "bias" in replay.uncapturable(decoder(positions="alibi"), state, 100)
    sizes = {"vocabulary_size": 31, "embedding_dim": 16, "num_layers": 1, "num_heads": 2}
    kernels = rg.Transformer(rg.TransformerConfig(**sizes, mechanism="elu", start_token=1, end_tokens=())).eval()
    assert "cross-attention" in replay.uncapturable(kernels, rg.prefill(kernels, [[1, 2]]).state, 100)
    users = decoder(mechanism=rg.Kernel(feature_map=torch.relu))
    assert "may read values" in replay.uncapturable(users, rg.prefill(users, [[1, 2]]).state, 100)
