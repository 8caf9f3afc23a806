"""Layers: multi-head attention, positions, norms, networks, blocks, ragged batches."""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import regard as rg
from regard.core import cpu
from regard.core.calls.choice import refusal
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.models.layers.attention import Attend
from regard.models.layers.block import Block, BlockConfig, Stack
from regard.models.layers.linear import Linear, by_machine_code, by_onednn, lay_together, projections
from regard.models.layers.network import ACTIVATIONS, PositionWise, RMSNorm
from regard.models.layers.positions import Alibi, RelativeBias, Rotary, alibi_slopes, sinusoidal
from regard.models.layers.ragged import Ragged
from regard.models.layers.streaming import places

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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its exporter
def test_rotations_outlive_an_export():
    """Nothing that a tracer made may be kept for later calls."""
    layer, x = rg.MultiHeadAttention(16, 4, rotary=Rotary(length=4, base=777.0)).eval(), torch.randn(1, 5, 16)
    torch.export.export(layer, (x,))
    assert type(layer(x)) is torch.Tensor


def test_sinusoids_are_the_papers():
    table = sinusoidal(torch.tensor([0, 7, 300]), 10)
    for row, place in enumerate((0, 7, 300)):
        for i in range(5):
            angle = place / 10000 ** (2 * i / 10)
            assert table[row, 2 * i].item() == pytest.approx(math.sin(angle), abs=3e-5)
            assert table[row, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=3e-5)


@pytest.mark.parametrize("pairing", ["halves", "neighbours"])
def test_rotations_depend_on_the_distance_alone_and_keep_lengths(pairing):
    rotary = Rotary(length=8, pairing=pairing)
    q, k = torch.randn(1, 8).double(), torch.randn(1, 8).double()

    def score(i, j):
        return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum()

    assert score(9, 4) == pytest.approx(score(59, 54).item(), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5).item(), abs=1e-3)
    assert rotary(q, torch.tensor([77])).norm() == pytest.approx(q.norm().item(), abs=1e-5)
    assert torch.equal(rotary(q, torch.tensor([0])), q)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_frequencies_are_those_of_transformers_bit_by_bit(data):
    kind = data.draw(st.sampled_from(["linear", "dynamic", "llama3"]))
    length, context = 2 * data.draw(st.integers(2, 64)), data.draw(st.integers(16, 9000))
    base, factor = data.draw(st.floats(10.0, 1e6)), data.draw(st.floats(1.0, 40.0))
    low, high = data.draw(st.floats(0.5, 2.0)), data.draw(st.floats(2.5, 8.0))
    reach = data.draw(st.integers(1, 3 * context))
    scaling = rg.RotaryScaling(
        kind=kind,
        factor=factor,
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_context_length=context,
    )
    rotary = Rotary(length=length, base=base, scaling=scaling, context_length=context)
    bands = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": context}
    theirs = {"rope_type": kind, "rope_theta": base, "factor": factor, **(bands if kind == "llama3" else {})}
    config = transformers.LlamaConfig(head_dim=length, max_position_embeddings=context, rope_parameters=theirs)
    beyond = torch.tensor(reach) if kind == "dynamic" and reach > context else None
    expected, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=beyond)
    assert torch.equal(rotary.frequencies(reach), expected)


def test_dynamic_rotations_of_rows_are_those_of_each_alone():
    rotary = Rotary(length=6, scaling=rg.RotaryScaling(kind="dynamic", factor=3.0), context_length=8)
    positions = torch.stack([torch.arange(20).clamp(max=last) for last in (2, 7, 8, 19)])
    for row, (cos, sin) in zip(positions, zip(*rotary.tables(positions), strict=True), strict=True):
        assert all(map(torch.equal, (cos[0], sin[0]), rotary.tables(row)))
    with pytest.raises(
        ValueError, match="length: expected at least 4, since dynamic scaling divides by length - 2, got 2"
    ):
        Rotary(length=2, scaling=rotary.scaling)


def test_rotations_in_half_precision_use_float32_tables():  # transformers#25681
    rotary, x, place = Rotary(length=64), torch.randn(1, 64), torch.tensor([4001])
    exact = rotary(x.double(), place)
    error = (rotary(x.bfloat16(), place).double() - exact).abs().max()
    cos, sin = rotary.tables(place)
    rough = rotary.turn(x.bfloat16(), (cos.bfloat16(), sin.bfloat16())).double()
    assert error <= (x.bfloat16().double() - x.double()).abs().max() * 3
    assert error < (rough - exact).abs().max()
    # a table of half-precision positions cannot tell them apart
    assert torch.tensor(4001.0).bfloat16() == torch.tensor(4000.0).bfloat16()


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 20])
def test_alibi_is_the_published_one(heads):
    theirs = build_alibi_tensor(torch.ones(1, 9, dtype=torch.long), heads, torch.float32)
    ours = Alibi(heads)(queries=1, keys=9)
    # theirs counts from the first key, which softmax cannot tell from counting back from the query
    expected = theirs.view(1, heads, 1, 9)
    assert torch.allclose(ours - ours[..., :1], expected - expected[..., :1], atol=1e-5)
    assert alibi_slopes(heads).shape == (heads,)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_are_t5s(bidirectional):
    distance = torch.arange(-300, 301)[None]
    for buckets, longest in ((32, 128), (8, 20), (16, 40)):
        ours = RelativeBias(2, bidirectional=bidirectional, num_buckets=buckets, longest_distance=longest)
        theirs = T5Attention._relative_position_bucket(distance, bidirectional, buckets, longest)
        assert torch.equal(ours.buckets(distance), theirs)
    bias = ours(queries=3, keys=7)
    assert torch.equal(bias[:, :, -1:], ours(queries=1, keys=7))


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


@pytest.mark.parametrize("missing", [None, "no machine code"])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 128, 129])
def test_every_product_agrees_and_is_counted(monkeypatch, rows, missing):
    monkeypatch.setattr(cpu, "missing", cpu.missing if missing is None else lambda: missing)
    x, layer = torch.randn(2, rows, 512), Linear(512, 8192)
    with torch.no_grad():
        assert by_machine_code(x, layer.weight) == (rows <= 4 and cpu.missing() is None)
        assert by_onednn(x, layer.weight) == (rows <= 128 and cpu.MAY_COMPILE)
        with FlopCounterMode(display=False) as counter:
            out = layer(x)
    assert counter.get_total_flops() == 2 * 2 * rows * 512 * 8192
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    plain = F.linear(x, layer.weight, layer.bias)
    assert (out - exact).abs().max() <= 4 * (plain - exact).abs().max() + 1e-6
    for by in (by_machine_code, by_onednn):  # they have no gradient
        assert not by(x, layer.weight)
        assert not by(x.double(), layer.weight.double())
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "width", "size"), [(1, 576, 576), (2, 1536, 192), (3, 1008, 777), (4, 1024, 99)])
def test_few_rows_are_multiplied_in_machine_code_within_the_budget(rows, width, size, bias):
    layer = Linear(width, size, bias=bias)
    x = torch.randn(1, rows, width)
    with torch.no_grad():
        assert by_machine_code(x, layer.weight) == (width * size >= 100_000)
        out, plain = layer(x), F.linear(x, layer.weight, layer.bias)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6
        x[0, 0, 5] = torch.nan
        bad = layer(x)[0].isnan()
    assert bad[0].all()
    assert not bad[1:].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it loads its jvp
def test_derivatives_and_transforms_take_torchs_product():
    layer, x = Linear(512, 512), torch.randn(1, 512)
    with torch.no_grad():
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x))))
        assert (out.tangent - layer.weight.sum(-1)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_row_has_its_own_dtype_whatever_the_default_is(dtype):
    layer, norm, x = Linear(512, 512), RMSNorm(512, 1e-8), torch.randn(1, 1, 512) * 1e-4
    with torch.no_grad():
        expected, scaled = layer(x), norm(x)
        torch.set_default_dtype(dtype)
        try:
            outs = layer(x), norm(x)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(outs[0], expected)
    assert torch.equal(outs[1], scaled)


def test_a_norm_without_gradients_is_the_formula():
    norm, x = RMSNorm(64, 1e-5), torch.randn(3, 7, 64) * torch.logspace(-4, 4, 7)[:, None]
    torch.nn.init.normal_(norm.weight)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    with torch.no_grad():
        out = norm(x)
    assert ((out - exact).norm(dim=-1) < 3e-7 * exact.norm(dim=-1)).all()


def test_projections_map_over_a_batch_of_single_rows():
    layer, x = Linear(512, 512), torch.randn(3, 1, 512)
    with torch.no_grad():
        assert (torch.func.vmap(layer)(x) - layer(x)).abs().max() < 1e-5


@pytest.mark.parametrize("by", ["compile", "export", "vmap", "fake"])
@torch.no_grad()
def test_a_layer_without_bias_is_traced_and_transformed_where_no_gradient_is_recorded(by):
    layer, x = rg.MultiHeadAttention(32, 4, bias=False), torch.randn(2, 5, 32)
    if by == "compile":
        out = torch.compile(layer, backend="eager", fullgraph=True)(x)
    elif by == "export":
        out = torch.export.export(layer, (x,)).module()(x)
    elif by == "vmap":
        many = {name: torch.stack([weight, weight]) for name, weight in layer.named_parameters()}
        out = torch.vmap(lambda weights: torch.func.functional_call(layer, weights, (x,)))(many)[1]
    else:
        with FakeTensorMode():
            assert rg.MultiHeadAttention(32, 4, bias=False)(torch.randn(2, 5, 32)).shape == x.shape
        return
    torch.testing.assert_close(out, layer(x))


def test_projections_of_one_input_are_one_product_once_their_weights_lie_together():
    layers = [Linear(1024, size, bias=False) for size in (1024, 512, 512)]
    values = [layer.weight.clone() for layer in layers]
    x = torch.randn(1, 1024)

    def products():
        with torch.no_grad(), torch.profiler.profile() as profile:
            outs = projections(x, *layers)
        for out, layer in zip(outs, layers, strict=True):
            assert (out - F.linear(x, layer.weight)).abs().max() < 1e-5
        return sum(
            event.count
            for event in profile.key_averages()
            if event.key in ("regard::linear", "mkldnn::_linear_pointwise")
        )

    before = products()
    lay_together(*layers)
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, values, strict=True))
    assert (before, products()) == (3, 1)
    called = []
    layers[1].register_forward_hook(lambda *_: called.append(1))
    assert products() == 3
    assert called == [1], "a layer that somebody watches runs by itself"
    layers[0].weight.data = values[0]
    layers[1]._forward_hooks.clear()
    assert products() == 3
    projections(x, *layers)[2].sum().backward()
    assert layers[2].weight.grad is not None


def test_packing_is_undone_by_padding():
    valid = torch.rand(3, 7) > 0.4
    ragged, x = Ragged(valid), torch.randn(3, 7, 2)
    assert torch.equal(ragged.pack(x), x[valid])
    assert torch.equal(ragged.pad(ragged.pack(x)), x * valid[..., None])


def test_places_count_real_tokens():  # transformers#25420
    valid = torch.tensor([[False, False, True, True], [True, True, True, True]])
    tokens = torch.zeros(2, 4, dtype=torch.long)
    assert places(tokens, rg.padding(valid=valid)).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert places(tokens, None).tolist() == [0, 1, 2, 3]
    assert places(tokens, rg.padding([2, 4]))[0, :2].tolist() == [0, 1]


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
