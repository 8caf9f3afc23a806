"""Mechanisms that forget: the papers' formulas, gates of any strength, what a mask means to them, what they learn."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from forgetting_cases import SIZES, B, G, K, V, draw, off
from memory import Allocations
from regard.core.calls.call import ordered
from regard.core.mechanisms import delta
from regard.core.mechanisms.delta import Rate
from regard.core.mechanisms.gated import Gate
from test_cli import entry_point

ROOT = Path(__file__).parent.parent


def recurrence(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, out_t = q_t S_t / sqrt(K): the formula of the papers, token by token."""
    k, v, gates = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v, gates))
    sums, out = torch.zeros_like(k[:, :, 0, :, None] * v[:, :, 0, None]), []
    for t in range(k.shape[2]):
        sums = gates[:, :, t, :, None].exp() * sums + k[:, :, t, :, None] * v[:, :, t, None]
        out.append(q[:, :, t, None] @ sums * q.shape[3] ** -0.5)
    return torch.cat(out, 2)


# The formula


@pytest.mark.parametrize("path", ["recurrent", "reference"])
@pytest.mark.parametrize("form", ["retention", "gla", "simple_gla", "simple_gla_chunked", "delta_rule"])
def test_agrees_with_flash_linear_attentions_naive_form(form: str, path: str) -> None:
    """Numbers of version 0.5.2, whose naive forms computed in float64: tests/data/forgetting.py made them."""
    numbers = load_file(ROOT / "tests/data/forgetting.safetensors")
    gates = numbers["by_feature" if form == "gla" else "by_head"]
    mechanism: rg.Mechanism = rg.Retention() if form == "retention" else rg.Gated(gate=lambda k: gates)
    if form == "delta_rule":
        mechanism = rg.Delta(rate=lambda k: numbers["rates"])
    out = rg.attend(numbers["q"], numbers["k"], numbers["v"], mechanism, path=path)
    assert (out - numbers[form]).abs().max() <= 1e-10


GATES = {
    "mild": lambda k: logsigmoid(k) / 16,
    "scalar": lambda k: logsigmoid(k.sum(-1, keepdim=True)),
    "strong": lambda k: -20 * k.square(),
    "enormous": lambda k: -1e4 * k.square(),
    "none": lambda k: torch.zeros_like(k),
    "closed": lambda k: (-k.abs()).masked_fill(k > 0.5, -math.inf),
    "closed for all features": lambda k: k.new_zeros(*k.shape[:-1], 1).masked_fill(
        k.sum(-1, keepdim=True) > 2, -math.inf
    ),
}


@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 65, 200])
@pytest.mark.parametrize("gate", GATES)
def test_gates_of_any_strength_are_the_recurrence(gate: str, length: int) -> None:
    mechanism, (q, k, v) = rg.Gated(gate=GATES[gate]), draw(length)
    expected = recurrence(q, k, v, GATES[gate](k))
    for path in ("recurrent", "reference"):
        assert off(rg.attend(q, k, v, mechanism, path=path), expected) <= 1e-13
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=V, dtype=torch.float64)
    out = []
    for begin in range(0, length, 7):
        piece = slice(begin, begin + 7)
        part, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state)
        out.append(part)
    assert off(torch.cat(out, 2), expected) <= 1e-13


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_any_strength_keep_float32s_digits_and_finite_gradients(gate: str) -> None:
    """Sums of gates are never subtracted from each other: one strong gate costs the later ones no digits."""
    mechanism, tensors = rg.Gated(gate=GATES[gate]), draw(200, torch.float32)
    exact = recurrence(*(t.double() for t in tensors), GATES[gate](tensors[1].double()))
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = rg.attend(*leaves, mechanism)
    assert off(out.double(), exact) <= 2e-6
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.square().sum(), leaves))


def test_a_heads_decay_is_that_of_its_key_head() -> None:
    q, k, v = draw(70)
    out = rg.attend(q, k, v, rg.Retention())
    wide = [t.repeat_interleave(2, 1) for t in (k, v)]
    near, far = 1 - 2**-5, 1 - 2**-6
    assert off(out, rg.attend(q, *wide, rg.Retention(decay=(near, near, far, far)))) <= 1e-13
    assert off(out, rg.attend(q, k, v, rg.Retention(decay=[near, far]))) <= 1e-13
    assert (
        off(rg.attend(q, k, v, rg.Retention(decay=0.9)), recurrence(q, k, v, torch.full_like(k, math.log(0.9)))) < 1e-13
    )
    chosen = rg.weights(q, k, rg.Retention(), rows=[3, -1], heads=[3, 0])
    assert off(chosen, rg.weights(q, k, rg.Retention())[:, [3, 0]][:, :, [3, -1]]) <= 1e-14


@pytest.mark.parametrize("mechanism", [rg.Retention(), rg.Gated(), rg.Delta()], ids=str)
def test_weights_of_chosen_rows_need_no_table_of_all(mechanism, monkeypatch) -> None:
    monkeypatch.setattr(delta, "TABLE", 32)
    q, k, _ = draw(500)
    every = rg.weights(q, k, mechanism)
    with Allocations() as seen:
        chosen = rg.weights(q, k, mechanism, rows=[3, -1], heads=[3, 0])
    assert off(chosen, every[:, [3, 0]][:, :, [3, -1]]) <= 1e-13
    assert seen.peak < every.nbytes / 4


def test_what_is_no_decay_and_no_gate_is_refused() -> None:
    for decay in (0, 1.5, (), (0.5, -1), "0.5", (True,)):
        with pytest.raises(ValueError, match=r"^decay: expected numbers above 0, at most 1, one for each head, got"):
            rg.Retention(decay=decay)
    with pytest.raises(ValueError, match=r"^gate: expected a function \(…, S, K\) -> .* got float$"):
        rg.Gated(gate=0.5)
    q, k, v = draw(5)
    with pytest.raises(ValueError, match=r"^rate: expected a function \(…, S, K\) -> .* got float$"):
        rg.Delta(rate=0.5)
    with pytest.raises(ValueError, match=r"^rate: expected \(…, S, 1\) from keys"):
        rg.attend(q, k, v, rg.Delta(rate=torch.sigmoid))
    for gate in (lambda k: k[..., :2], lambda k: k.sum(-1), lambda k: 1.0):
        with pytest.raises(ValueError, match=r"^gate: expected \(…, S, 1\) or \(…, S, K\) from keys"):
            rg.attend(q, k, v, rg.Gated(gate=gate))


# Masks


@pytest.mark.parametrize("mechanism", [rg.Retention(), rg.Gated(), rg.Delta()], ids=repr)
def test_no_query_sees_what_comes_after_it_with_a_mask_or_without(mechanism: rg.Mechanism) -> None:
    q, k, v = draw(70)
    whole = rg.attend(q, k, v, mechanism)
    assert torch.equal(whole, rg.attend(q, k, v, mechanism, rg.causal))
    assert not rg.weights(q, k, mechanism).triu(1).any()
    for bad in (math.nan, math.inf, 7.0):
        dirty = [torch.cat([t[:, :, :40], torch.full_like(t[:, :, 40:], bad)], 2) for t in (k, v)]
        for path in ("recurrent", "reference"):
            out = rg.attend(q, *dirty, mechanism, path=path)
            assert off(out[:, :, :40], whole[:, :, :40]) <= 1e-14
            assert bad == 7 or out[:, :, 40:].isnan().all()
        weights = rg.weights(q, dirty[0], mechanism)
        assert bad == 7 or (weights[:, :, :40].isfinite().all() and weights[:, :, 40:].isnan().all())
    assert "mask       causal" in str(rg.explain(q, k, v, mechanism))


def test_a_hidden_key_fades_retention_by_its_place_and_gates_not_at_all() -> None:
    q, k, v = draw(20)
    real = torch.arange(20) % 3 != 1
    rule = rg.padding(valid=real.expand(B, 20))
    fixed, gated = rg.Retention(decay=0.8), rg.Gated(gate=lambda k: -k.square())
    shown = k.masked_fill(~real[:, None], 0)
    expected = recurrence(q, shown, v, torch.full_like(k, math.log(0.8)))
    assert off(rg.attend(q, k, v, fixed, rule), expected) <= 1e-13
    alone = recurrence(q[:, :, real], k[:, :, real], v[:, :, real], -k[:, :, real].square())
    assert off(rg.attend(q, k, v, gated, rule)[:, :, real], alone) <= 1e-13


@pytest.mark.parametrize("mechanism", [rg.Retention(), rg.Gated(), rg.Delta()], ids=repr)
def test_other_masks_and_biases_are_refused_with_a_reason(mechanism: rg.Mechanism) -> None:
    q, k, v = draw(9)
    masks = {
        "a window": rg.causal & rg.window(before=3),
        "segments": rg.segments([[0] * 4 + [1] * 5] * B),
        "dense": rg.dense(torch.ones(9, 9, dtype=torch.bool)),
    }
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=V, dtype=torch.float64)
    for name, mask in masks.items():
        message = rf"^mask: expected causal, padding, both or none for .*: its state cannot drop a key, got {name}"
        for call in (
            lambda mask=mask: rg.attend(q, k, v, mechanism, mask),
            lambda mask=mask: rg.weights(q, k, mechanism, mask),
            lambda mask=mask: mechanism.extend(q, k, v, state, mask),
            lambda mask=mask: rg.cost(mechanism, rg.Work(batch=B, query_length=9, key_length=9, mask=mask)),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    with pytest.raises(ValueError, match=r"^bias: expected none"):
        rg.attend(q, k, v, mechanism, bias=torch.zeros(9, 9, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"^storage: expected None"):
        mechanism.start(batch=1, num_kv_heads=1, qk_length=4, value_length=4, storage=torch.int8)


@pytest.mark.parametrize("name", ["retention", "gated", "delta"])
def test_models_that_look_both_ways_or_at_another_sequence_are_refused(name: str) -> None:
    """A class token that comes first would see nothing of its sentence or picture."""
    sizes = {"vocabulary_size": 11, "embedding_dim": 16, "num_layers": 1, "num_heads": 2, "mechanism": name}
    both = r"^mechanism: expected one for tokens that see each other both ways, got .* always causal$"
    for build in (
        lambda: rg.Encoder(rg.EncoderConfig(**sizes)),
        lambda: rg.Transformer(rg.TransformerConfig(**sizes)),
    ):
        with pytest.raises(ValueError, match=both):
            build()
    with pytest.raises(ValueError, match=r"^window: expected none with .* whose sums cannot drop a key, got Window"):
        rg.Decoder(rg.DecoderConfig(**sizes, window=rg.Window(3)))


# What is learned


def test_a_gate_by_name_is_the_layers_own_and_starts_as_the_keys_themselves() -> None:
    layer = rg.MultiHeadAttention(16, 4, 2, mechanism="gated").double()
    assert {name for name, _ in layer.attend.named_parameters()} == {"gate.weight", "gate.bias"}
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    bare = rg.MultiHeadAttention(16, 4, 2, mechanism=rg.Gated(gate=lambda k: logsigmoid(k) / 16)).double()
    bare.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "gate" not in name})
    assert off(layer(x), bare(x)) <= 1e-14
    before = [parameter.clone() for parameter in layer.attend.parameters()]
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.01).step()
    assert all(not torch.equal(old, new) for old, new in zip(before, layer.attend.parameters(), strict=True))
    assert off(layer(x), bare(x)) > 1e-3
    passed = Gate(4).double()
    assert rg.MultiHeadAttention(16, 4, mechanism=rg.Gated(gate=passed)).attend.gate is passed


@pytest.mark.parametrize(("name", "field"), [("gated", "gate"), ("delta", "rate")])
def test_gates_by_name_learn_in_a_decoder_layer_by_layer_and_are_saved_and_loaded(
    name: str, field: str, tmp_path: Path
) -> None:
    model = rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=name)).eval()
    tokens = torch.randint(11, (2, 7))
    gates = [parameter for place, parameter in model.named_parameters() if f".attend.{field}." in place]
    assert len({id(gate) for gate in gates}) == 4
    torch.nn.functional.cross_entropy(model(tokens).transpose(1, 2), tokens).backward()
    assert all(gate.grad.abs().sum() > 0 for gate in gates)
    assert model.summary(8).parameters == sum(parameter.numel() for parameter in model.parameters())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(0.01 * number)  # layers differ, as they do once trained
    folder = rg.save(model, tmp_path / "model")
    assert torch.equal(rg.load(folder)(tokens), model(tokens))
    assert torch.equal(rg.load(folder, mechanism="retention")(tokens).isfinite(), torch.ones(2, 7, 11).bool())
    fresh = rg.load(rg.save(rg.Decoder(rg.DecoderConfig(**SIZES)), tmp_path / "softmax"), mechanism=name)
    for block in fresh.stack.blocks:
        learned = getattr(block.attention.attend, field)
        assert torch.equal(learned.weight, torch.eye(8) if name == "gated" else torch.zeros(1, 8))
        assert not learned.bias.any()
    decayed = rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=rg.Retention(decay=(0.9, 0.5)))).eval()
    again = rg.load(rg.save(decayed, tmp_path / "retention"))
    assert again.config.mechanism == rg.Retention(decay=(0.9, 0.5))
    assert torch.equal(again(tokens), decayed(tokens))


def test_prompts_of_other_decays_are_told_apart(tmp_path: Path) -> None:
    def decoder(decay: float) -> rg.Decoder:
        torch.manual_seed(0)
        return rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=rg.Retention(decay=decay))).eval()

    rg.prefill(decoder(0.9), [[1, 2, 3]]).save(tmp_path / "prompt.safetensors")
    with pytest.raises(rg.CheckpointError, match="a model with another config"):
        rg.Prompt.load(tmp_path / "prompt.safetensors", decoder(0.5))


@pytest.mark.parametrize("law", ["streamed", "weights", "paths", "learned", "curved", "cost"])
@pytest.mark.parametrize("features", [1, 12])
def test_a_learned_gate_keeps_the_law(law: str, features: int) -> None:
    torch.manual_seed(0)
    mechanism = rg.Gated(gate=nn.Sequential(nn.Linear(12, features), nn.LogSigmoid()))
    report = rg.check(mechanism, laws=[law], masks=["causal", "padding left"], heads=["GQA"], qk_length=12, examples=1)
    assert report.ok, str(report)
    assert any(cell.outcome == "held" for cell in report.cells)


@pytest.mark.parametrize("name", ["retention", "gated", "delta"])
def test_a_language_model_trains_by_name(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    (tmp_path / "text").mkdir()
    for number in range(30):
        words = " ".join(f"word{(number * at) % 17} and{at % 5}" for at in range(60))
        (tmp_path / "text" / f"{number}.txt").write_text(words)
    command = ["train", "lm", "--data", "text", "--mechanism", name, "--steps", "3", "--vocabulary-size", "300",
               "--context-length", "16", "--embedding-dim", "16", "--num-heads", "2", "--num-layers", "1",
               "--device", "cpu"]  # fmt: skip
    done = entry_point(monkeypatch, capsys)(*command, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    model = rg.load(tmp_path / "run")
    assert type(model.config.mechanism).__name__.lower() == name
    assert model(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()
    done = entry_point(monkeypatch, capsys)(*command, "--packed", "--out", "other", cwd=tmp_path)
    assert (done.returncode, "packed: expected --no-packed with" in done.stderr) == (2, True)


# Cost


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mechanism", [rg.Retention(), rg.Gated(gate=Gate(8)), rg.Delta(rate=Rate(8))], ids=repr)
def test_a_streams_flops_are_the_counted_ones(mechanism: rg.Mechanism, groups: int) -> None:
    q, k, v = torch.randn(2, 4, 50, 8), torch.randn(2, groups, 50, 8), torch.randn(2, groups, 50, 5)
    state = mechanism.start(batch=2, num_kv_heads=groups, qk_length=8, value_length=5)
    work = rg.Work(batch=2, num_heads=4, num_kv_heads=groups, qk_length=8, value_length=5, dtype=torch.float32)
    with torch.no_grad():
        _, state = mechanism.extend(q[:, :, :3], k[:, :, :3], v[:, :, :3], state)
        for low, high in ((3, 4), (4, 5), (5, 12), (12, 50)):
            here = slice(low, high)
            with FlopCounterMode(display=False) as counter:
                _, state = mechanism.extend(q[:, :, here], k[:, :, here], v[:, :, here], state)
            stated = rg.cost(mechanism, replace(work, query_length=high - low, key_length=high))
            assert counter.get_total_flops() == stated.flops
            assert state.nbytes == stated.state_bytes


@pytest.mark.parametrize("groups", [4, 1])
@pytest.mark.parametrize("mechanism", [rg.Retention(), rg.Gated(), rg.Delta()], ids=repr)
def test_memory_is_linear_in_the_length_and_what_the_cost_says(mechanism: rg.Mechanism, groups: int) -> None:
    def peak(length: int) -> int:
        q, k, v = (torch.randn(1, heads, length, 32) for heads in (4, groups, groups))
        with Allocations() as allocations, torch.no_grad():
            out = rg.attend(q, k, v, mechanism)
        return allocations.peak - out.numel() * 4

    short, long = peak(1024), peak(2048)
    assert long <= 2.05 * short
    sizes = {"num_heads": 4, "num_kv_heads": groups, "qk_length": 32, "value_length": 32, "dtype": torch.float32}
    stated = rg.cost(mechanism, rg.Work(query_length=2048, key_length=2048, **sizes)).activation_bytes
    assert 0.67 * stated <= long <= 1.5 * stated


def test_no_length_is_too_long_to_count() -> None:
    work = rg.Work(query_length=10**15, key_length=10**15, mask=rg.causal)
    assert rg.cost(rg.Retention(), work).flops < rg.cost(rg.Softmax(), work).flops / 10**9
    assert rg.crossover(rg.Softmax(), rg.Retention(), replace(work, query_length=512, key_length=512)) < 1024


@pytest.mark.parametrize("mask", [None, rg.causal, rg.causal & rg.padding([3]), rg.padding([3]) & rg.causal], ids=repr)
def test_a_mask_that_is_causal_is_not_made_causal_again(mask: rg.Mask | None) -> None:
    q = torch.randn(1, 2, 5, 4)
    assert str(rg.explain(q, q, q, rg.Retention(), mask)).count("causal") == 1
    assert ordered(rg.Retention(), mask) is (rg.causal if mask is None else mask)
