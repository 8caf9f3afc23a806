"""Traces of our models: what is recorded is what was computed, and recording changes nothing."""

import math
from itertools import pairwise

import pytest
import torch

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.inference.trace import trace
from regard.models.layers.attention import MultiHeadAttention
from traced_models import (
    EVERYTHING,
    stack,
)


@pytest.mark.parametrize("name", REGISTRY)
def test_every_mechanism_is_traced_exactly_and_computes_the_same(name):
    mechanism, x = REGISTRY[name], torch.randn(2, 7, 16)
    model, mask = stack(mechanism), rg.padding([7, 5])
    with torch.no_grad():
        plain, _ = model(x, mask)
        with trace(model, keep=EVERYTHING) as traced:
            out, _ = model(x, mask)
    assert torch.equal(out, plain)
    assert [layer.index for layer in traced.layers] == [0, 1, 2]
    for layer in traced.layers:
        learned = model.blocks[layer.index].attention.mechanism
        assert layer.mechanism == repr(learned)
        rule = (rg.causal & mask) if weighs_tokens(mechanism, 8) else mask
        again = rg.weights(layer.queries, layer.keys, learned, rule)
        assert torch.equal(layer.weights, again)
        output = rg.attend(layer.queries, layer.keys, layer.values, learned, rule)
        real = rg.padding([7, 5]).valid(7)[:, None, :, None]
        mixed = mechanism.mix(layer.weights, layer.values)
        assert torch.allclose(mixed.masked_fill(~real, 0), output.masked_fill(~real, 0), atol=1e-5)
        assert (layer.scores is not None) == (weighs_tokens(mechanism, 8) and not mechanism.ordered)
        if not weighs_tokens(mechanism, 8):
            assert layer.weights.shape == (2, 4, 4, 4)
        elif isinstance(mechanism, rg.Softmax) and not mechanism.hard:
            assert torch.allclose(layer.scores.softmax(-1), layer.weights, atol=1e-6)
        elif not isinstance(mechanism, rg.Softmax) and not mechanism.ordered:
            similar = layer.scores / layer.scores.sum(-1, keepdim=True)
            assert torch.allclose(similar, layer.weights, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)])
def test_streams_are_joined_for_every_mechanism(name):
    mechanism, x = REGISTRY[name], torch.randn(2, 150, 16)
    model = stack(mechanism, layers=2)
    with torch.no_grad(), trace(model, keep=EVERYTHING) as whole:
        model(x, rg.padding([150, 140]))
    cuts = [0, 100, 110, 111, 150]
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        state = model.start(batch=2, capacity=160)
        for low, high in pairwise(cuts):
            real = rg.padding([high, min(high, 140)])
            _, state = model(x[:, low:high], real, state=state)
    for step, layer in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == tuple(range(150))
        for part in EVERYTHING:
            mine, theirs = getattr(step, part), getattr(layer, part)
            if part == "scores" and mechanism.ordered:  # it states weights alone
                assert mine is theirs is None
                continue
            real = torch.isfinite(theirs) & torch.isfinite(mine)
            if part in ("weights", "scores", "queries", "outputs"):  # rows of padding mean nothing
                real[1, :, 140:] = False
            # A choice between near ties may fall differently on differently rounded inputs.
            wrong = ((mine - theirs).abs() > 1e-3 * (1 + theirs.abs()))[real]
            assert wrong.float().mean() < (0.02 if name == "argmax" else 1e-9), part
        assert torch.equal(step.visible.expand(2, 1, 150, 150)[0], layer.visible.expand(2, 1, 150, 150)[0])
        assert torch.equal(step.real, layer.real)
        assert step.causal
        assert layer.causal


def test_sums_whose_keys_came_before_the_trace_are_refused():
    layer = MultiHeadAttention(16, 4, mechanism=rg.Elu()).eval()
    x = torch.randn(1, 300, 16)
    with torch.no_grad():
        _, state = layer.extend(x[:, :299], layer.start(batch=1), rg.causal)
        with (
            pytest.raises(ValueError, match=r"state: expected a state that began under the trace"),
            trace(layer),
        ):
            layer.extend(x[:, 299:], state, rg.causal)
        _, state = layer.extend(x[:, :20], layer.start(batch=1), rg.causal)
        with trace(layer) as traced:  # tokens that are not summed yet are still there
            layer.extend(x[:, 20:21], state, rg.causal)
    assert traced.layers[0].rows == (20,)
    expected = rg.weights(traced.layers[0].queries, traced.layers[0].keys, rg.Elu())
    assert torch.allclose(traced.layers[0].weights, expected, atol=1e-6)


def test_only_what_is_chosen_is_recorded():
    model, x = stack(rg.Softmax(), layers=4), torch.randn(2, 7, 16)
    with trace(model, keep=EVERYTHING) as whole:
        model(x)
    with trace(model, layers=[0, 3], heads=[3, 1], rows=[-1, 2], keep=EVERYTHING) as some:
        model(x)
    assert [layer.index for layer in some.layers] == [0, 3]
    mine, theirs = some.layers[3], whole.layers[3]
    assert (mine.heads, mine.rows) == ((3, 1), (6, 2))
    for part in ("weights", "scores", "queries", "outputs"):
        assert torch.allclose(getattr(mine, part), getattr(theirs, part)[:, [3, 1]][:, :, [6, 2]]), part
    assert torch.equal(mine.projection, theirs.projection[[3, 1]])
    assert torch.equal(mine.keys, theirs.keys[:, [1, 0]])
    assert torch.equal(mine.visible.expand(2, 1, 2, 7), theirs.visible.expand(2, 1, 7, 7)[:, :, [6, 2]])
    with trace(model, keep=["weights"]) as light:
        model(x)
    assert light.layers[0].keys is light.layers[0].scores is None


FORM = {"embedding_dim": 16, "num_layers": 2, "num_heads": 4}
STAGES = {"embedding_dim": (8, 16), "num_layers": (1, 1), "num_heads": (2, 2), "num_groups": (2, 4)}
PATCHES = {"patch_size": (3, 2), "patch_stride": (2, 2), "patch_padding": (1, 0), "norm_first": (False, True)}
PICTURE = torch.arange(2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()
WORDS = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
OURS = {
    "decoder": (lambda: rg.Decoder(rg.DecoderConfig(vocabulary_size=20, **FORM, window=rg.Window(2))), (WORDS,), 2),
    "gpt2": (lambda: rg.Decoder(rg.DecoderConfig.gpt2(vocabulary_size=20, **FORM)), (WORDS, rg.padding([6, 4])), 2),
    "encoder": (lambda: rg.Encoder(rg.EncoderConfig(vocabulary_size=20, **FORM, num_shared=1)), (WORDS,), 2),
    "t5": (lambda: rg.Transformer(rg.TransformerConfig.t5(vocabulary_size=20, **FORM)), (WORDS, WORDS[:, :4]), 6),
    "vit": (lambda: rg.VisionTransformer(rg.VisionConfig(image_size=16, patch_size=4, **FORM)), (PICTURE,), 2),
    "davit": (lambda: rg.DaViT(rg.DaViTConfig(**STAGES, **PATCHES, window_size=2)), (PICTURE,), 4),
}


@pytest.mark.parametrize("name", OURS)
def test_our_models_compute_the_same_under_a_trace(name):
    make, arguments, count = OURS[name]
    model = make().eval()
    with torch.no_grad():
        plain = model(*arguments)
        with trace(model, keep=EVERYTHING) as traced:
            out = model(*arguments)
    assert torch.equal(out, plain) if isinstance(out, torch.Tensor) else torch.equal(out[0], plain[0])
    assert [layer.index for layer in traced.layers] == list(range(count))
    sums = traced.layers[0].weights[0].sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    assert len(traced.patterns().heads) == sum(len(layer.heads) for layer in traced.layers if layer.by_pairs)


def test_our_encoder_decoder_step_by_step_is_one_trace():
    model = OURS["t5"][0]().eval()
    source, target = WORDS, WORDS[:, :4]
    with torch.no_grad(), trace(model, keep=EVERYTHING) as whole:
        model(source, target, rg.padding([6, 4]))
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        state = model.start(source, rg.padding([6, 4]))
        for step in range(4):
            _, state = model.extend(target[:, step : step + 1], state)
    for step, layer in zip(traced.layers, whole.layers, strict=True):
        assert (step.kind, step.rows, step.causal) == (layer.kind, layer.rows, layer.causal)
        for part in EVERYTHING:
            assert torch.allclose(getattr(step, part), getattr(layer, part), atol=1e-5), part
    assert [layer.kind for layer in whole.layers] == ["self", "self", "self", "cross", "self", "cross"]
    traced.label([list("abcd")] * 2, [list("uvwxyz")] * 2)
    names = [tuple(len(sides[0]) for sides in traced.labels(layer)) for layer in traced.layers]
    assert names == [(6, 6), (6, 6), (4, 4), (4, 6), (4, 4), (4, 6)]
    assert traced.patterns().of(3, 0).score["same word"] is None  # no letter is on both sides


def test_rows_of_channel_attention_are_refused():
    model = stack(rg.Channel())
    with pytest.raises(ValueError, match="rows: expected none, the weights of Channel"), trace(model, rows=[0]):
        model(torch.randn(1, 5, 16))


def test_shared_blocks_and_cross_attention_of_ours():
    shared = stack(rg.Softmax(), layers=4, shared=2)
    with trace(shared) as traced:
        shared(torch.randn(1, 5, 16))
    assert [layer.name.split(".")[1] for layer in traced.layers] == ["0", "0", "1", "1"]

    both = stack(rg.Quadratic(), layers=2, cross=True)
    x, source = torch.randn(2, 5, 16), torch.randn(2, 8, 16)
    with torch.no_grad(), trace(both) as whole:
        both(x, memory=both.remember(source), memory_mask=rg.padding([8, 6]))
    assert [layer.kind for layer in whole.layers] == ["self", "cross", "self", "cross"]
    assert whole.layers[1].weights.shape == (2, 4, 5, 8)
    assert not whole.layers[1].weights[1, :, :, 6:].any()


class Reader(torch.nn.Module):
    """A module of a user's own, whose attributes are called as they please."""

    def __init__(self):
        super().__init__()
        self.cross = MultiHeadAttention(16, 4)  # of one sequence: a name says nothing
        self.glance = MultiHeadAttention(16, 4)

    def forward(self, x, page):
        x = self.cross(x, mask=rg.causal)
        return self.glance.cross(x, *self.glance.remember(page))


@pytest.mark.parametrize("length", [5, 7])
def test_a_layer_says_what_it_is_whatever_it_is_called(length):
    reader = Reader().eval()
    with trace(reader) as traced:
        reader(torch.randn(1, 5, 16), torch.randn(1, length, 16))
    assert [(layer.name.split(".")[0], layer.kind) for layer in traced.layers] == [
        ("cross", "self"),
        ("glance", "cross"),
    ]


def test_a_layer_on_its_own_knows_when_it_crosses():
    layer, x = MultiHeadAttention(16, 4), torch.randn(1, 5, 16)
    with trace(layer) as traced:
        layer(x, torch.randn(1, 5, 16))
        assert traced.layers[0].kind == "cross"
        layer.extend(x, layer.start(batch=1), rg.causal)  # a stream is of its own sequence, whatever ran before
        assert traced.layers[0].kind == "self"
    with trace(layer) as traced:
        layer(x)
    assert traced.layers[0].kind == "self"


def test_a_sequence_that_attends_to_itself_by_name_is_self_attention():
    layer, x = MultiHeadAttention(16, 4).eval(), torch.randn(1, 5, 16)
    with trace(layer) as traced:
        layer(x, x, x)
    assert traced.layers[0].kind == "self"


def test_a_bias_is_in_the_scores_and_what_it_forbids_is_hidden():
    layer, x = MultiHeadAttention(16, 4), torch.randn(1, 5, 16)
    bias = torch.randn(1, 4, 5, 5)
    bias[..., 0] = -math.inf
    with trace(layer, keep=EVERYTHING, heads=[1]) as traced:
        layer(x, bias=bias)
    recorded = traced.layers[0]
    assert torch.allclose(recorded.scores.softmax(-1), recorded.weights, atol=1e-6)
    assert not recorded.visible[..., 0].any()
    assert recorded.visible[..., 1:].all()


def test_dropout_of_ours_changes_neither_the_random_numbers_nor_the_weights():
    layer, x = MultiHeadAttention(16, 4, dropout=0.5).train(), torch.randn(1, 6, 16)
    torch.manual_seed(3)
    plain = layer(x, mask=rg.causal)
    torch.manual_seed(3)
    with trace(layer) as traced:
        assert torch.equal(layer(x, mask=rg.causal), plain)
    assert torch.allclose(traced.layers[0].weights.sum(-1), torch.ones(1, 4, 6))
    assert not traced.layers[0].weights.requires_grad
