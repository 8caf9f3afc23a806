"""Layers: multi-head attention, positions, norms, networks, blocks, ragged batches."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from regard.core.calls.choice import refusal
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.models.layers.attention import Attend
from regard.models.layers.block import Block, BlockConfig, Stack
from regard.models.layers.network import ACTIVATIONS, PositionWise, RMSNorm
from regard.models.layers.positions import Rotary
from regard.models.layers.ragged import Ragged
from regard.models.layers.streaming import ModelState

CAUSAL = [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)]


def filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double().eval()


def test_agrees_with_torch_multihead_attention_self_and_cross():
    theirs = filled(nn.MultiheadAttention(24, 4, kdim=10, vdim=14, batch_first=True))
    ours = rg.MultiHeadAttention(24, 4, key_dim=10, value_dim=14).double().eval()
    with torch.no_grad():
        for name, bias in zip("qkv", theirs.in_proj_bias.chunk(3), strict=True):
            getattr(ours, f"W_{name}").weight.copy_(getattr(theirs, f"{name}_proj_weight"))
            getattr(ours, f"W_{name}").bias.copy_(bias)
        ours.W_o.load_state_dict(theirs.out_proj.state_dict())
    q, k, v = torch.randn(2, 5, 24).double(), torch.randn(2, 9, 10).double(), torch.randn(2, 9, 14).double()
    dropped = torch.arange(9) >= torch.tensor([[9], [4]])
    expected, _ = theirs(q, k, v, key_padding_mask=dropped)  # True drops there, and keeps here (pytorch#170400)
    assert (ours(q, k, v, mask=rg.padding([9, 4])) - expected).abs().max() <= 1e-12
    assert (ours.cross(q, *ours.remember(k, v), rg.padding([9, 4])) - expected).abs().max() <= 1e-12


@pytest.mark.parametrize("mechanism", REGISTRY)
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_any_mechanism_in_any_layer_is_the_mechanism_between_projections(mechanism, groups):
    layer = filled(rg.MultiHeadAttention(16, 4, groups, qk_length=6, value_length=6, mechanism=mechanism))
    x = torch.randn(2, 7, 16).double()
    q, k, v = layer.W_q(x), layer.W_k(x), layer.W_v(x)
    q, k, v = (t.view(2, 7, -1, 6).transpose(1, 2) for t in (q, k, v))
    heads = []
    for h in range(4):
        group = h // (4 // groups)  # repeated, not tiled (onnx#7274)
        alone = rg.Retention(decay=1 - 2.0 ** (-5 - group)) if mechanism == "retention" else layer.mechanism
        heads.append(rg.attend(q[:, [h]], k[:, [group]], v[:, [group]], alone, path="reference"))
    expected = layer.W_o(torch.cat(heads, 1).transpose(1, 2).reshape(2, 7, 24))
    assert (layer(x) - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("mechanism", CAUSAL)
def test_a_layer_streams_as_it_computes_whole(mechanism):
    layer = filled(
        rg.MultiHeadAttention(16, 4, 2, qk_length=6, value_length=5, mechanism=mechanism, rotary=Rotary(length=6))
    )
    x = torch.randn(2, 40, 16).double()
    whole, state, outs = layer(x, mask=rg.causal), layer.start(batch=2, capacity=40), []
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        out, state = layer.extend(x[:, start:stop], state, rg.causal)
        outs.append(out)
    assert (torch.cat(outs, 1) - whole).abs().max() <= 1e-10
    assert state.length == 40


def test_heads_split_and_combine():
    layer, x = rg.MultiHeadAttention(12, 3), torch.randn(2, 5, 12)
    heads = layer.split_heads(x, 4)
    assert heads.shape == (2, 3, 5, 4)
    assert torch.equal(heads[:, 1], x[..., 4:8])
    assert torch.equal(layer.combine_heads(heads), x)
    assert [name for name, _ in layer.named_children()] == ["W_q", "W_k", "W_v", "W_o", "attend"]


@pytest.mark.parametrize("mechanism", ["softmax", "quadratic"])
def test_dropout_of_weights_acts_in_training_only_and_keeps_the_mean(mechanism):
    attend, q = Attend(REGISTRY[mechanism], dropout=0.3), torch.randn(1, 1, 1, 8)
    k, v = torch.randn(1, 1, 6, 8), torch.randn(1, 1, 6, 3)
    exact = rg.attend(q, k, v, REGISTRY[mechanism])
    assert torch.equal(attend.eval()(q, k, v)[0], exact)
    attend.train()
    many = torch.stack([attend(q, k, v)[0] for _ in range(4000)])
    assert many.std(0).max() > 0.05
    assert (many.mean(0) - exact).abs().max() < 5 * many.std(0).max() / math.sqrt(4000)


@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize(("mask", "visible"), [(rg.padding([5, 6]), False), (rg.causal, True), (rg.window(2, 0), True)])
@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)])
def test_dropout_of_weights_lets_no_masked_number_through(name, mask, visible, where):
    """The first row's last key is spoiled: padding hides it from all queries, the other masks from all but the last."""
    if (reason := refusal(REGISTRY[name], mask)) is not None:
        pytest.skip(reason)
    attend, outs = Attend(REGISTRY[name], dropout=0.3), []
    tensors = {"q": torch.randn(2, 4, 6, 8), "k": torch.randn(2, 2, 6, 8), "v": torch.randn(2, 2, 6, 3)}
    for value in (1.0, math.nan, math.inf):
        tensors[where][0, :, 5] = value
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        torch.manual_seed(3)
        outs.append(attend(**leaves, mask=mask)[0])
        outs[-1].nan_to_num().sum().backward()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves.values())
    plain, *spoiled = outs
    for out in spoiled:
        assert torch.equal(out[1], plain[1])
        assert torch.equal(out[0, :, :5], plain[0, :, :5])
        assert out[0, :, 5].isnan().all() if visible else torch.equal(out[0, :, 5], plain[0, :, 5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads: expected a divisor of embedding_dim = 16"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads = 4, got 3"),
        ({"qk_length": 0}, "qk_length: expected a whole number of at least 1"),
        ({"dropout": 1.5}, "dropout: expected at least 0 and below 1"),
        ({"mechanism": "fast"}, "mechanism: expected one of softmax"),
        ({"mechanism": 3}, "mechanism: expected a mechanism like"),
        ({"rotary": Rotary(length=6)}, "rotary: expected one of length 4"),
        ({"key_dim": 0}, "key_dim: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_layer_that_cannot_be_is_one_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        rg.MultiHeadAttention(**{"embedding_dim": 16, "num_heads": 4, **arguments})


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, lambda layer, x: layer(x[..., :12]), r"query: expected \(B, T, 16\), got \(2, 5, 12\)"),
        ({}, lambda layer, x: layer(x[0]), r"query: expected \(B, T, 16\), got \(5, 16\)"),
        ({}, lambda layer, x: layer(x, value=x), "key: expected a tensor, since value is given, got None"),
        ({}, lambda layer, x: layer(x.double()), "query: expected the layer's dtype torch.float32, got torch.float64"),
        ({}, lambda layer, x: layer(x.long()), "query: expected the layer's dtype torch.float32, got torch.int64"),
        ({}, lambda layer, x: layer(x, x.half()), "key: expected the layer's dtype torch.float32, got torch.float16"),
        ({}, lambda layer, x: layer(x, x, x.bool()), "value: expected the layer's dtype torch.float32, got torch.bool"),
        ({}, lambda layer, x: layer.extend(x.half(), layer.start(batch=2)), "query: expected the layer's dtype"),
        ({}, lambda layer, x: layer.cross(x[0], *layer.remember(x)), r"query: expected \(B, T, 16\)"),
        ({}, lambda layer, x: layer.extend(x, None), "state: expected one from start"),
        ({}, lambda layer, x: layer.extend(x, ModelState(())), "state: expected one from start.*got ModelState"),
        ({"key_dim": 8}, lambda layer, x: layer(x), r"key: expected an input of width 8 \(key_dim\), got None"),
        ({"key_dim": 8}, lambda layer, x: layer(x, x), r"key: expected \(B, T, 8\), got \(2, 5, 16\)"),
        ({"value_dim": 8}, lambda layer, x: layer(x, x), r"value: expected \(B, T, 8\), got \(2, 5, 16\)"),
        ({"rotary": Rotary(length=4)}, lambda layer, x: layer(x, x), "key: expected None with rotary heads"),
        (
            {"rotary": Rotary(length=4)},
            lambda layer, x: layer(x, positions=torch.arange(7)),
            r"positions: expected those of 5 tokens, got \(7,\)",
        ),
    ],
)
def test_inputs_that_cannot_be_are_named(options, call, message):
    with pytest.raises(ValueError, match=message):
        call(rg.MultiHeadAttention(16, 4, **options), torch.randn(2, 5, 16))


def test_norms_and_networks_are_torchs():
    x = torch.randn(3, 8)
    ours = RMSNorm(8, 1e-6)
    nn.init.normal_(ours.weight)
    assert torch.allclose(ours(x), F.rms_norm(x, (8,), ours.weight, 1e-6), atol=1e-6)
    large = torch.full((1, 8), 300.0, dtype=torch.float16)  # its square is beyond half precision
    assert torch.allclose(RMSNorm(8).half()(large), torch.ones(1, 8, dtype=torch.float16))
    for name, (function, gated, _) in ACTIVATIONS.items():
        network = PositionWise(8, 12, activation=name)
        expected = function(network.gate(x)) * network.up(x) if gated else function(network.up(x))
        assert torch.equal(network(x), network.down(expected))


def differentiated_twice(function, *leaves):
    """The result, its gradients, and the gradients of their squares."""
    out = function(*leaves)
    weights = torch.arange(out.numel()).view_as(out).sin()
    first = torch.autograd.grad(out, leaves, weights, create_graph=True)
    return [out, *first, *torch.autograd.grad(sum((grad * grad).sum() for grad in first), leaves)]


def test_norms_and_rotations_with_gradients_are_the_formulas():
    """Their backward passes on a CPU are written by hand; here torch derives them."""
    norm, rotary = RMSNorm(8, 1e-3), Rotary(length=8)
    turns = torch.arange(5)[:, None] * 10000.0 ** (-torch.arange(4) / 4)

    def normed(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def formula(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight

    def turned(x):
        return rotary(x, torch.arange(5)) ** 2  # whose second derivative is not 0

    def rotated(x):
        left, right = x.chunk(2, -1)
        cos, sin = turns.cos(), turns.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], -1) ** 2

    x, weight = torch.randn(3, 5, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    assert type(normed(x, weight).grad_fn).__name__ == "_RecordedNormBackward"
    assert type(rotary(x, torch.arange(5)).grad_fn).__name__ == "_RecordedTurnBackward"
    for ours, plain, leaves in ((normed, formula, (x, weight)), (turned, rotated, (x,))):
        for got, expected in zip(
            differentiated_twice(ours, *leaves), differentiated_twice(plain, *leaves), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_a_block_adds_and_norms_where_it_says(pre_norm):
    config = BlockConfig(
        embedding_dim=8, num_heads=2, hidden_dim=12, mechanism="softmax", pre_norm=pre_norm, cross=True
    )
    block = filled(Block(config))
    x, memory = torch.randn(1, 5, 8).double(), torch.randn(1, 3, 8).double()
    y, _ = block(x, memory=block.cross.remember(memory))
    first_norm, second_norm, third_norm = block.attention_norm, block.cross_norm, block.network_norm
    if pre_norm:
        x = x + block.attention(first_norm(x))
        x = x + block.cross(second_norm(x), memory)
        x = x + block.network(third_norm(x))
    else:
        x = first_norm(x + block.attention(x))
        x = second_norm(x + block.cross(x, memory))
        x = third_norm(x + block.network(x))
    assert (y - x).abs().max() <= 1e-12


def test_ragged_batches_do_no_work_for_padding():
    config = BlockConfig(embedding_dim=16, num_heads=2, hidden_dim=32, mechanism="softmax")
    stack, x = Stack(config, 2), torch.randn(4, 100, 16)

    def flops(mask):
        with FlopCounterMode(display=False) as counter:
            stack(x, mask)
        return sum(count for op, count in counter.get_flop_counts()["Global"].items() if "mm" in str(op))

    assert flops(rg.padding([100, 25, 50, 25])) == flops(None) // 2


def test_packing_is_undone_by_padding():
    valid = torch.rand(3, 7) > 0.4
    ragged, x = Ragged(valid), torch.randn(3, 7, 2)
    assert torch.equal(ragged.pack(x), x[valid])
    assert torch.equal(ragged.pad(ragged.pack(x)), x * valid[..., None])


@torch.no_grad()
def test_a_ragged_batch_extends_a_state_as_the_padded_one_does():
    """With rotary heads, and as many positions as the padded batch has."""
    layer, x, valid = (
        rg.MultiHeadAttention(16, 2, rotary=Rotary(length=8)),
        torch.randn(2, 7, 16),
        torch.ones(2, 7).bool(),
    )
    valid[1, 5:] = False
    ragged = Ragged(valid)
    _, state = layer.extend(torch.randn(2, 3, 16), layer.start(batch=2), rg.causal)
    mask = rg.causal & rg.padding(valid=torch.cat([torch.ones(2, 3).bool(), valid], 1))
    expected, _ = layer.extend(x, state, mask)
    out, longer = layer.extend(ragged.pack(x), state, mask, ragged=ragged)
    torch.testing.assert_close(out, ragged.pack(expected))
    assert longer.length == 10


def test_a_mask_for_another_batch_is_one_error():
    stack = Stack(BlockConfig(embedding_dim=8, num_heads=2, hidden_dim=8, mechanism="softmax"), 1)
    with pytest.raises(ValueError, match="mask: expected padding for 2 sequences"):
        stack(torch.randn(2, 5, 8), rg.padding([5, 4, 3]))
    with pytest.raises(ValueError, match="num_shared: expected 1 to 1 different blocks"):
        Stack(BlockConfig(embedding_dim=8, num_heads=2, hidden_dim=8, mechanism="softmax"), 1, num_shared=2)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["plain", "causal", "window, rotary"])
def test_a_ragged_batch_is_packed_where_a_kernel_takes_it_so(form, side, monkeypatch):
    """On a CPU another path takes the packed sequences: the same tokens, positions and masks."""
    from regard.core.paths import gpu
    from regard.models.layers.positions import Rotary
    from regard.models.layers.ragged import Ragged

    lengths = torch.tensor([7, 0, 3, 1])
    place = torch.arange(7)
    valid = place < lengths[:, None] if side == "right" else place >= 7 - lengths[:, None]
    ragged, rule = Ragged(valid), rg.padding(valid=valid)
    rule = rule if form == "plain" else rg.causal & rule
    rule = rule & rg.window(before=2) if form.startswith("window") else rule
    rotary = Rotary(length=4) if form.startswith("window") else None
    layer = rg.MultiHeadAttention(16, 4, 2, qk_length=4, rotary=rotary).double().eval()
    x = torch.randn(int(valid.sum()), 16, dtype=torch.float64, requires_grad=True)
    positions = (valid.cumsum(-1) - 1).clamp(min=0)
    options = {"mask": rule, "positions": positions, "ragged": ragged}
    padded = layer(x, **options)
    seen = []
    monkeypatch.setattr(gpu, "packs", lambda tokens: not seen.append(tokens.shape))
    packed = layer(x, **options)
    assert seen == [x.shape]
    torch.testing.assert_close(packed, padded, rtol=1e-12, atol=1e-12)
    for packed_grad, padded_grad in zip(
        *(torch.autograd.grad(out.square().sum(), x) for out in (packed, padded)), strict=True
    ):
        torch.testing.assert_close(packed_grad, padded_grad, rtol=1e-10, atol=1e-10)
    if rotary is not None:
        tables = {**options, "positions": rotary.tables(positions)}
        torch.testing.assert_close(layer(x, **tables), padded, rtol=1e-12, atol=1e-12)
    layer.attend.register_forward_hook(lambda *_: None)
    assert torch.equal(layer(x, **options), padded)
