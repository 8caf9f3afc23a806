"""int8 weights: small, close to float32 by a stated bound, and otherwise as everything else is."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from int8_models import decoder, nbytes
from regard.core import cpu
from regard.core.states.buffer import quantize
from regard.models.layers.int8 import Int8Embedding, Int8Linear, product, tied_head

fast = pytest.mark.skipif(cpu.missing() is not None, reason=f"int8 weights are refused here: {cpu.missing()}")


def plain(model):
    """The model with the weights that its quantized copy stands for, in float32."""
    small, same = rg.quantized(model, least=0), copy.deepcopy(model)
    for name, module in small.named_modules():
        if isinstance(module, Int8Linear | Int8Embedding):
            weight = module.weight * module.scale[:, None]
            same.get_submodule(name).weight.data = weight
    return small, same


@fast
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 23, 100, 300])
@pytest.mark.parametrize(("width", "size"), [(16, 4), (64, 5), (576, 193), (1536, 40), (784, 33), (1, 4), (100, 7)])
def test_the_product_is_as_exact_as_float32_with_the_weights_it_stands_for(rows, width, size):
    """At any width: machine code is made for multiples of 16, and models keep other projections in float32."""
    numbers, scale = quantize(torch.randn(size, width) * torch.logspace(-3, 3, size)[:, None])
    numbers[0], scale[0] = 0, 0
    x = torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]
    if width % 16:
        with pytest.raises(ValueError, match="linear: expected a width that is a multiple of 16"):
            product(x, numbers, scale[:, 0])
        return
    out = product(x, numbers, scale[:, 0])
    weight = numbers.double() * scale.double()
    exact, plain = x.double() @ weight.T, x @ weight.float().T
    size = x.double().abs() @ weight.abs().T  # what rounding is relative to
    assert ((out - exact).abs() <= 2 * (plain - exact).abs().max() + 1e-6 * size).all()


@fast
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_projection_of_any_dtype_is_made_int8_for_tokens_in_float32(dtype):
    layer, x = nn.Linear(64, 32).to(dtype), torch.randn(3, 64)
    torch.testing.assert_close(Int8Linear(layer).eval()(x), layer.float()(x).detach(), atol=0.05, rtol=0)


@fast
def test_scales_are_read_only_as_they_are():
    x, (numbers, scale) = torch.randn(3, 64), quantize(torch.randn(32, 64))
    expected = product(x, numbers, scale[:, 0])
    assert torch.equal(product(x, numbers, scale.expand(32, 2)[:, 0].repeat_interleave(2)[::2]), expected)
    for other in (scale[:, 0].double(), scale[:31, 0], scale):
        with pytest.raises(ValueError, match=r"scale: expected torch.float32 \(32,\), got torch.float"):
            product(x, numbers, other)


@fast
@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_lanes_and_threads_give_the_same(monkeypatch, lanes, threads):
    monkeypatch.setattr(cpu, "LANES", min(lanes, cpu.LANES))
    numbers, scale = quantize(torch.randn(70, 848))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 4, 9):
            x = torch.randn(rows, 848)
            exact = x.double() @ (numbers.double() * scale.double()).T
            assert (product(x, numbers, scale[:, 0]) - exact).abs().max() < 1e-4
    finally:
        torch.set_num_threads(before)


def test_weights_are_rounded_to_nearest_and_never_clipped():
    weight = torch.randn(300, 33) * torch.logspace(-30, 30, 300)[:, None]
    numbers, scale = quantize(weight)
    assert numbers.dtype == torch.int8
    assert (numbers.abs().amax(-1) == 127).all()
    assert ((numbers.double() * scale.double() - weight).abs() <= scale.double() * (0.5 + 1e-5)).all()


@fast
def test_the_product_of_a_trace_an_export_and_a_transform_is_the_same():
    layer = Int8Linear(nn.Linear(64, 32).requires_grad_(False)).eval()
    x = torch.randn(6, 64)
    expected = layer(x)
    torch.library.opcheck(
        torch.ops.regard.linear.default, (x, layer.weight, layer.scale), test_utils=["test_schema", "test_faketensor"]
    )
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 6 * 64 * 32
    traced = torch.compile(layer, backend="eager", fullgraph=True)(x)
    mapped = torch.func.vmap(layer)(x[:, None])[:, 0]
    for out in (traced, mapped):
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@fast
@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_with_nan_stays_one_and_spoils_no_other(rows, bad):
    small = Int8Linear(nn.Linear(64, 8).requires_grad_(False)).eval()
    x = torch.randn(rows, 64)
    expected = small(x)
    x[0, 3] = bad
    out = small(x)
    assert not out[0].isfinite().any()
    assert torch.equal(out[1:], expected[1:])


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_decoder_computes_with_the_weights_it_stands_for(tied):
    small, same = plain(decoder(tied=tied))
    tokens = torch.randint(97, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(small(tokens), same(tokens), atol=2e-4, rtol=0)
    assert (small.embedding.weight.dtype == torch.int8) is tied
    assert small.stack.blocks[0].attention.W_q.weight.dtype == torch.int8


@pytest.mark.parametrize("length", [1, 5])
def test_a_tied_head_is_a_product_with_its_table(length):
    table = nn.Embedding(500, 64).requires_grad_(False)
    small, x = Int8Embedding(table).eval(), torch.randn(2, length, 64)
    expected = x @ small(torch.arange(500)).T
    torch.testing.assert_close(tied_head(x, small), expected, atol=1e-4, rtol=0)


def test_the_model_it_was_made_of_stays_as_it_was():
    model = decoder().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.tokenizer = object()
    small = rg.quantized(model, least=0)
    assert type(small) is type(model)
    assert small.config is model.config
    assert small.tokenizer is model.tokenizer
    assert model.training
    assert not small.training
    assert not any(parameter.requires_grad for parameter in small.parameters())
    assert not model.quantized
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {parameter.data_ptr() for parameter in small.parameters()}.isdisjoint(
        parameter.data_ptr() for parameter in model.parameters()
    )


def test_layers_that_share_a_block_share_its_int8_weights():
    config = rg.EncoderConfig(
        vocabulary_size=50, embedding_dim=32, num_layers=3, num_heads=4, num_shared=1, context_length=16
    )
    model = rg.Encoder(config).eval()
    small = rg.quantized(model, least=0)
    assert sum(isinstance(module, Int8Linear) for module in small.modules()) == sum(
        isinstance(module, nn.Linear) for module in model.modules()
    )
    tokens = torch.randint(50, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(small(tokens), model(tokens), atol=0.05, rtol=0)


def test_an_encoder_decoder_streams_with_int8_weights():
    config = rg.TransformerConfig.t5(vocabulary_size=60, embedding_dim=64, num_layers=2, num_heads=4)
    small, same = plain(rg.Transformer(config).eval())
    assert small.embedding.weight.dtype == torch.int8
    source, target = torch.randint(60, (2, 9)), torch.randint(60, (2, 12))
    with torch.no_grad():
        whole = small(source, target)
        torch.testing.assert_close(whole, same(source, target), atol=1e-3, rtol=1e-3)
        logits, _ = small.extend(target, small.start(source))
    torch.testing.assert_close(logits, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "config", [{}, {"window": rg.Window(3)}, {"positions": "learned", "norm": "layer", "activation": "gelu"}]
)
def test_a_quantized_model_streams_as_it_computes_whole(config):
    small, _ = plain(decoder(**config))
    tokens = torch.randint(97, (2, 20))
    whole, state = small(tokens), small.start(batch=2, capacity=32)
    parts = []
    for piece in tokens.split([9, 1, 1, 4, 5], dim=1):
        logits, state = small.extend(piece, state)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=0)


def test_left_padded_rows_compute_as_they_do_alone():
    small, _ = plain(decoder())
    tokens = torch.randint(97, (2, 12))
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[0, :3] = False
    both = small(tokens, mask=rg.padding(valid=valid))
    torch.testing.assert_close(both[0, 3:], small(tokens[:1, 3:])[0], atol=2e-4, rtol=0)
    torch.testing.assert_close(both[1], small(tokens[1:])[0], atol=2e-4, rtol=0)


def test_the_weights_take_a_quarter_of_the_memory():
    model = decoder(embedding_dim=256, hidden_dim=1024, vocabulary_size=2000)
    small = rg.quantized(model, least=0)
    assert nbytes(model) / nbytes(small) > 3.9
    assert sum(parameter.numel() for parameter in small.parameters()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_small_projections_stay_as_they_are():
    small = rg.quantized(decoder(embedding_dim=256, vocabulary_size=200))
    assert small.embedding.weight.dtype == torch.float32
    assert small.stack.blocks[0].network.up.weight.dtype == torch.int8
    assert small.stack.blocks[0].attention.W_k.weight.dtype == torch.float32


def test_a_summary_and_a_trace_work_as_before():
    model = decoder()
    small, tokens = rg.quantized(model, least=0), torch.randint(97, (1, 20))
    ours, theirs = small.summary(20), model.summary(20)
    assert (ours.parameters, ours.flops, ours.state_per_token) == (
        theirs.parameters,
        theirs.flops,
        theirs.state_per_token,
    )
    assert ours.dtype == "float32"
    with torch.no_grad(), rg.trace(model) as expected:
        model(tokens)
    with torch.no_grad(), rg.trace(small) as traced:
        small(tokens)
    torch.testing.assert_close(traced.layers[1].weights, expected.layers[1].weights, atol=0.02, rtol=0)


def test_what_int8_weights_cannot_do_is_refused(tmp_path):
    model = decoder()
    small, tokens = rg.quantized(model, least=0), torch.randint(97, (1, 4))
    for layout in ("regard", "huggingface"):
        with pytest.raises(ValueError, match=r"model: expected float weights, got a quantized model"):
            rg.save(small, tmp_path / "model", layout=layout)
    assert not (tmp_path / "model").exists()
    with pytest.raises(ValueError, match="expected eval mode, since int8 weights cannot be trained, got training mode"):
        small.train()(tokens)
    small.eval()(tokens)
    x = torch.randn(1, 64, requires_grad=True)
    with pytest.raises(ValueError, match="x: expected no gradients, since int8 weights have none"):
        small.stack.blocks[0].network.up(x)
    with torch.no_grad():
        small.stack.blocks[0].network.up(x)
    with pytest.raises(
        ValueError, match=r"expected float32 on the CPU, since the weights are int8, got torch\.bfloat16"
    ):
        rg.quantized(decoder(tied=False), least=0).to(torch.bfloat16)(tokens)
    with pytest.raises(
        ValueError, match=r"expected float32 on the CPU, since the weights are int8, got .* weights on meta"
    ):
        rg.quantized(model, least=0).stack.blocks[0].network.up.to("meta")(torch.randn(1, 64))
    with pytest.raises(ValueError, match="expected float32 weights, got a quantized model"):
        rg.quantized(rg.quantized(model))
    with pytest.raises(ValueError, match=r"expected float32 weights on the CPU, got embedding\.weight in torch\.bfl"):
        rg.quantized(decoder().bfloat16())
    with pytest.raises(ValueError, match="on meta; load it with"):
        rg.quantized(decoder().to("meta"))
    with pytest.raises(ValueError, match="model: expected one of regard's models, got Linear"):
        rg.quantized(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="least: expected a number of weights, got -1"):
        rg.quantized(model, least=-1)


def test_float_of_a_quantized_model_changes_nothing():
    small, tokens = rg.quantized(decoder(), least=0), torch.randint(97, (1, 4))
    expected = small(tokens)
    assert torch.equal(small.float()(tokens), expected)


@pytest.mark.gpu
def test_another_device_is_refused():
    with pytest.raises(ValueError, match=r"expected float32 weights on the CPU, got .* on cuda"):
        rg.quantized(decoder().cuda())
    with pytest.raises(ValueError, match="expected float32 on the CPU, since the weights are int8"):
        rg.quantized(decoder(), least=0).cuda()(torch.zeros(1, 4, dtype=torch.long, device="cuda"))
