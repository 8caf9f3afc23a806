"""Traces of Hugging Face models: eager attention's outputs and weights, and everything restored."""

import pytest
import torch
from torch import nn

import regard as rg
from regard.inference.trace import rollout, trace
from traced_models import (
    EVERYTHING,
    MODELS,
    PAIR,
    SIZES,
    TWO_SIDED,
    attentions,
    decoder,
    eager,
    gpt2,
    inputs,
    t5,
    transformers,
)


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_compute_as_eager_does_and_their_weights_are_eagers(name):
    model, arguments = MODELS[name]().eval(), inputs(name)
    before = model.config._attn_implementation
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        out = model(**arguments)
    assert model.config._attn_implementation == before
    assert "eager" not in transformers.AttentionInterface()
    with torch.no_grad():
        expected = eager(model, **arguments)
    assert torch.equal(out[0], expected[0])
    for layer, weights in zip(traced.layers, attentions(expected), strict=True):
        assert torch.equal(layer.weights, weights)
        alive = layer.scores.isfinite().any(-1)  # a row that sees nothing has no softmax
        assert torch.allclose(layer.scores.softmax(-1)[alive], layer.weights[alive], atol=1e-6)
        assert layer.queries.shape[:3] == weights.shape[:3]
        assert layer.keys.shape[2] == layer.values.shape[2] == weights.shape[3]
        if layer.visible is not None:
            hidden = ~layer.visible.expand_as(weights)
            assert not weights[hidden & alive[..., None]].any()
    decoding = name in TWO_SIDED or name in ("gpt2", "llama", "mistral", "qwen2")
    assert any(layer.causal for layer in traced.layers) == decoding
    assert any(layer.kind == "cross" for layer in traced.layers) == (name in TWO_SIDED)


def test_layers_of_an_encoder_and_a_decoder_are_numbered_in_the_order_they_run():
    model = MODELS["bart"]().eval()
    with trace(model) as traced:
        model(**inputs("bart"))
    assert [layer.kind for layer in traced.layers] == ["self", "self", "self", "cross", "self", "cross"]
    assert len(traced.select(kind="cross").layers) == 2
    assert [layer.index for layer in traced.select(kind="self", name="decoder").layers] == [2, 4]
    # Without its encoder, the decoder's layers keep their numbers.
    states = model.get_encoder()(inputs("bart")["input_ids"])
    with trace(model) as traced:
        model(encoder_outputs=states, decoder_input_ids=torch.tensor([[2, 5], [2, 6]]))
    assert [layer.index for layer in traced.layers] == [2, 3, 4, 5]


def test_a_shared_module_counts_once_for_each_run():
    model = MODELS["albert"]().eval()
    with trace(model, layers=[2]) as traced:
        for _ in range(2):
            model(**inputs("albert"))
    assert [layer.index for layer in traced.layers] == [2]


def test_grouped_heads_keep_their_own_number_of_keys():
    model, arguments = MODELS["llama"]().eval(), inputs("llama")
    with trace(model, keep=EVERYTHING) as traced:
        model(**arguments)
    layer = traced.layers[1]
    assert layer.queries.shape == (2, 4, 9, 4)
    assert layer.keys.shape == layer.values.shape == (2, 2, 9, 4)
    products = layer.queries @ layer.keys.repeat_interleave(2, dim=1).transpose(-1, -2) / 2
    seen = layer.visible.expand_as(products)
    assert torch.allclose(layer.scores[seen], products[seen], atol=1e-6)


def test_t5_scores_have_the_position_bias_in_them():
    model, arguments = t5().eval(), inputs("t5")
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        model(**arguments)
    layer = traced.layers[1]
    bias = model.encoder.block[0].layer[0].SelfAttention.compute_bias(9, 9)
    plain = layer.queries @ layer.keys.transpose(-1, -2) + bias
    seen = layer.visible.expand_as(plain)
    assert bias.abs().min() > 0
    assert torch.allclose(layer.scores[seen], plain.expand_as(layer.scores)[seen], atol=1e-5)


def test_a_sliding_window_shows_as_hidden_pairs():
    model = MODELS["mistral"]().eval()
    with trace(model) as traced:
        model(torch.randint(3, 40, (1, 9)))
    expected = (rg.causal & rg.window(before=3)).draw(9).visible
    for layer in traced.layers:
        assert torch.equal(layer.visible[0, 0], expected)
        assert torch.equal(layer.weights[0] > 0, expected.expand(4, 9, 9))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_generation_gives_the_same_layers_as_one_pass_over_its_result(name):
    model = MODELS[name]().eval()
    prompt = torch.randint(3, 40, (2, 5))
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        made = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    with torch.no_grad(), trace(model, keep=EVERYTHING) as whole:
        model(made[:, :-1])
    for step, layer in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == layer.rows == tuple(range(10))
        for part in EVERYTHING:
            assert torch.allclose(getattr(step, part), getattr(layer, part), atol=1e-5), part
        assert torch.equal(step.visible.expand(2, 1, 10, 10), layer.visible.expand(2, 1, 10, 10))
        assert step.causal


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_generation_with_an_encoder(name):
    model, arguments = MODELS[name]().eval(), inputs(name)
    arguments.pop("decoder_input_ids")
    with torch.no_grad(), trace(model) as traced:
        made = model.generate(**arguments, max_new_tokens=4, min_new_tokens=4, num_beams=1, do_sample=False)
    with torch.no_grad(), trace(model) as whole:
        model(**arguments, decoder_input_ids=made[:, :-1])
    assert [layer.index for layer in traced.layers] == list(range(6))
    for step, layer in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == layer.rows
        assert torch.allclose(step.weights, layer.weights, atol=1e-5)
        assert torch.allclose(step.keys, layer.keys, atol=1e-5)


def test_newest_rows_of_a_generation():
    model = MODELS["llama"]().eval()
    prompt = torch.randint(3, 40, (1, 5))
    with torch.no_grad(), trace(model, layers=[1], heads=[2], rows=[-1]) as newest:
        made = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with torch.no_grad(), trace(model, layers=[1]) as whole:
        model(made[:, :-1])
    assert newest.layers[1].rows == (4, 5, 6)
    assert newest.layers[1].heads == (2,)
    assert torch.allclose(newest.layers[1].weights, whole.layers[1].weights[:, [2], 4:], atol=1e-5)
    assert torch.allclose(newest.layers[1].keys, whole.layers[1].keys[:, [1]], atol=1e-5)


def test_one_row_of_a_generation_has_all_its_keys():
    model = MODELS["llama"]().eval()
    prompt = torch.randint(3, 40, (1, 5))
    with torch.no_grad(), trace(model, rows=[2], keep=EVERYTHING) as chosen:
        made = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with torch.no_grad(), trace(model, rows=[2], keep=EVERYTHING) as whole:
        model(made[:, :-1])
    for step, expected in zip(chosen.layers, whole.layers, strict=True):
        assert step.rows == (2,)
        assert torch.equal(step.visible, expected.visible)
        for part in EVERYTHING:
            assert torch.allclose(getattr(step, part), getattr(expected, part), atol=1e-5), part


def test_a_model_of_ones_own_on_top_of_a_hugging_face_one():
    kind = type("Mine", (transformers.BertModel,), {"__module__": "nowhere"})
    model = nn.Sequential(kind(transformers.BertConfig(**SIZES)))
    with trace(model) as traced:
        model(torch.tensor([[3, 4, 5]]))
    assert traced.layers[2].name == "0.encoder.layer.2.attention.self"


def test_another_input_replaces_the_last_and_beams_are_not_mixed():
    model = MODELS["llama"]().eval()
    with torch.no_grad(), trace(model) as traced:
        model(torch.randint(3, 40, (1, 5)))
        model(torch.randint(3, 40, (1, 7)))
        assert traced.layers[0].weights.shape == (1, 4, 7, 7)
        model(torch.randint(3, 40, (1, 7)))
    assert traced.layers[0].rows == tuple(range(7))
    with torch.no_grad(), trace(model) as traced:
        model.generate(torch.randint(3, 40, (1, 5)), max_new_tokens=6, min_new_tokens=6, num_beams=3, do_sample=False)
    sums = traced.layers[0].weights.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)


def test_everything_is_restored_after_an_exception():
    model = MODELS["bart"]()
    model.set_attn_implementation("sdpa")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with trace(model):
        assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"eager"}
    with pytest.raises(IndexError), trace(model):  # a token beyond the vocabulary
        model(torch.tensor([[99]]), decoder_input_ids=torch.tensor([[1]]))
    assert {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")} == {"sdpa"}
    assert "eager" not in transformers.AttentionInterface()
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_traces_within_traces_and_other_models_are_left_alone():
    model, other = MODELS["gpt2"]().eval(), MODELS["gpt2"]().eval()
    tokens = torch.randint(3, 40, (1, 6))
    other.set_attn_implementation("eager")
    with torch.no_grad():
        plain = other(tokens).logits
        with trace(model) as first:
            with trace(model, layers=[0]) as inner:
                model(tokens)
            assert torch.equal(other(tokens).logits, plain)
            model(tokens[:, :4])
    assert inner.layers[0].weights.shape == (1, 4, 6, 6)
    assert len(inner.layers) == 1
    assert first.layers[2].weights.shape == (1, 4, 4, 4)


def test_training_records_weights_before_dropout_and_computes_the_same():
    model, arguments = MODELS["bert"]().train(), inputs("bert")
    torch.manual_seed(1)
    with trace(model) as traced:
        out = model(**arguments)
    torch.manual_seed(1)
    expected = eager(model, **arguments)
    assert torch.equal(out[0], expected[0])
    sums = traced.layers[0].weights.sum(-1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
    assert not traced.layers[0].weights.requires_grad
    out[0].sum().backward()
    assert model.embeddings.word_embeddings.weight.grad.abs().sum() > 0


def test_gpt2_that_upcasts_its_attention_does_so_under_a_trace():
    model = gpt2(reorder_and_upcast_attn=True).eval().to(torch.bfloat16)
    tokens = torch.randint(3, 40, (1, 6))
    with torch.no_grad():
        with trace(model) as traced:
            out = model(tokens).logits
        expected = eager(model, input_ids=tokens)
    assert torch.equal(out, expected.logits)
    assert torch.equal(traced.layers[2].weights, expected.attentions[2])


def test_attention_that_is_computed_in_parts_is_joined():
    sizes = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 2, "mlp_ratio": 2}
    config = transformers.models.qwen2_vl.configuration_qwen2_vl.Qwen2VLVisionConfig(**sizes)
    kind = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    model = kind(config).eval()
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    pixels = torch.randn(24, 3 * 2 * 2 * 2)
    with torch.no_grad(), trace(model) as traced:
        model(pixels, grid)
    layer = traced.layers[1]
    assert len(traced.layers) == 2
    assert layer.weights.shape == (1, 2, 24, 24)
    assert torch.equal((layer.weights > 0)[0, 0], torch.block_diag(torch.ones(16, 16), torch.ones(8, 8)).bool())
    assert torch.equal(layer.visible.expand(1, 2, 24, 24), layer.weights > 0)


def test_a_difference_of_two_attentions_is_refused():
    model = decoder("DiffLlama").eval()
    with pytest.raises(ValueError, match=r"expected DiffLlamaAttention \(.*\) to attend once per run"), trace(model):
        model(torch.tensor([[3, 4, 5]]))


def test_rows_alone_are_held_not_what_they_were_taken_from():
    model = MODELS["llama"]().eval()
    with torch.no_grad(), trace(model, rows=[-1], keep=["weights"]) as traced:
        model(torch.randint(3, 40, (1, 64)))
    for layer in traced.layers:
        assert layer.weights.untyped_storage().nbytes() == 4 * 64 * 4
        assert layer.visible is None or layer.visible.untyped_storage().nbytes() == 64


def test_models_whose_attention_is_their_own_are_refused():
    model = transformers.BloomModel(transformers.BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"AttentionInterface.*BloomModel"), trace(model):
        pass
    sizes = {**PAIR, "block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse"}
    half = transformers.BigBirdPegasusModel(transformers.BigBirdPegasusConfig(**sizes))  # its decoder's is not
    with pytest.raises(ValueError, match=r"AttentionInterface.*BigBirdPegasus\w*Attention"), trace(half):
        pass
    with pytest.raises(ValueError, match=r"model: expected .*got Linear"), trace(nn.Linear(2, 2)):
        pass
    with pytest.raises(ValueError, match=r"model: expected a torch module, got str"), trace("gpt2"):
        pass


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": [7]}, r"layers: expected layers that ran, 0 to 2, got \[7\]"),
        ({"layers": [-1]}, "layers: expected a list of whole numbers from 0"),
        ({"heads": [4]}, "heads: expected whole numbers from -4 to 3, got 4"),
        ({"rows": [20]}, r"rows: expected positions of queries that ran, got \[20\]"),
        ({"rows": []}, "rows: expected a list of whole numbers"),
        ({"rows": "last"}, "rows: expected a list of whole numbers"),
        ({"keep": ["logits"]}, "keep: expected some of weights, queries"),
        ({"tokens": "word"}, "tokens: expected a list of strings"),
        ({"tokens": [1, 2]}, "tokens: expected a list of strings"),
    ],
)
def test_choices_that_cannot_be_are_named(choice, message):
    model = MODELS["gpt2"]().eval()
    with pytest.raises(ValueError, match=message), trace(model, **choice):
        model(torch.randint(3, 40, (1, 5)))


def test_a_layer_that_was_not_recorded_is_named():
    model = MODELS["gpt2"]().eval()
    with trace(model, layers=[0, 2], keep=["keys"]) as traced:
        model(torch.randint(3, 40, (1, 5)))
    assert traced.layers[-1].index == 2
    with pytest.raises(ValueError, match=r"layers: expected a recorded layer, one of \[0, 2\], got 1"):
        traced.layers[1]
    with pytest.raises(ValueError, match=r"layer 0: expected weights, got none"):
        rollout(traced)
