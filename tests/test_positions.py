"""Positions: sinusoids, rotary positions, ALiBi and T5's buckets are the published ones."""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import regard as rg
from regard.models.layers.positions import Alibi, RelativeBias, Rotary, alibi_slopes, sinusoidal
from regard.models.layers.streaming import places


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


def test_places_count_real_tokens():  # transformers#25420
    valid = torch.tensor([[False, False, True, True], [True, True, True, True]])
    tokens = torch.zeros(2, 4, dtype=torch.long)
    assert places(tokens, rg.padding(valid=valid)).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]
    assert places(tokens, None).tolist() == [0, 1, 2, 3]
    assert places(tokens, rg.padding([2, 4]))[0, :2].tolist() == [0, 1]
