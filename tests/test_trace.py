"""Traces: what is recorded is what was computed, and recording changes nothing."""

import json
import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.inference.trace import Trace, TracedLayer, patterns, rollout, trace, value_weighted, word_ids
from regard.inference.tracing.patterns import PATTERNS
from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.block import BlockConfig, Stack

transformers = pytest.importorskip("transformers")

EVERYTHING = ("weights", "queries", "keys", "values", "scores")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STEPS = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
SIDES = {
    f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("attention_heads", 4), ("ffn_dim", 32))
}
PAIR = {"vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, **SIDES, **ENDS, **STEPS}


def gpt2(**more):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=3, n_head=4, n_positions=64, **ENDS, **more)
    )


def decoder(name, **more):
    config = getattr(transformers, f"{name}Config")(**SIZES, **ENDS, num_key_value_heads=2, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def t5():
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    )


def vit():
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    return transformers.ViTModel(transformers.ViTConfig(**sizes, intermediate_size=32, image_size=16, patch_size=4))


def whisper():
    sizes = {**PAIR, "max_source_positions": 10, "max_target_positions": 32, "num_mel_bins": 8}
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes))


MODELS = {
    "gpt2": gpt2,
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**SIZES, embedding_size=8)),
    "llama": lambda: decoder("Llama"),
    "mistral": lambda: decoder("Mistral", sliding_window=4),
    "qwen2": lambda: decoder("Qwen2"),
    "t5": t5,
    "vit": vit,
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**PAIR)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**PAIR)),
    "whisper": whisper,
}
TWO_SIDED = ("t5", "bart", "marian", "whisper")


def inputs(name):
    tokens = torch.randint(3, 40, (2, 9))
    real = torch.ones(2, 9, dtype=torch.long)
    real[1, 6:] = 0
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": tokens[:, :5]}
    given = {"input_ids": tokens, "attention_mask": real}
    return {**given, "decoder_input_ids": tokens[:, :5]} if name in TWO_SIDED else given


def eager(model, **given):
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    out = model(**given, output_attentions=True)
    model.set_attn_implementation(before)
    return out


def attentions(out):
    if getattr(out, "cross_attentions", None):
        pairs = zip(out.decoder_attentions, out.cross_attentions, strict=True)
        return [*out.encoder_attentions, *(one for pair in pairs for one in pair)]
    return list(out.attentions)


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models_compute_as_eager_does_and_their_weights_are_eagers(name):
    model, given = MODELS[name]().eval(), inputs(name)
    before = model.config._attn_implementation
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        out = model(**given)
    assert model.config._attn_implementation == before
    assert "eager" not in transformers.AttentionInterface()
    with torch.no_grad():
        expected = eager(model, **given)
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
    model, given = MODELS["llama"]().eval(), inputs("llama")
    with trace(model, keep=EVERYTHING) as traced:
        model(**given)
    layer = traced.layers[1]
    assert layer.queries.shape == (2, 4, 9, 4)
    assert layer.keys.shape == layer.values.shape == (2, 2, 9, 4)
    products = layer.queries @ layer.keys.repeat_interleave(2, dim=1).transpose(-1, -2) / 2
    seen = layer.visible.expand_as(products)
    assert torch.allclose(layer.scores[seen], products[seen], atol=1e-6)


def test_t5_scores_have_the_position_bias_in_them():
    model, given = t5().eval(), inputs("t5")
    with torch.no_grad(), trace(model, keep=EVERYTHING) as traced:
        model(**given)
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
    for step, one in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == one.rows == tuple(range(10))
        for part in EVERYTHING:
            assert torch.allclose(getattr(step, part), getattr(one, part), atol=1e-5), part
        assert torch.equal(step.visible.expand(2, 1, 10, 10), one.visible.expand(2, 1, 10, 10))
        assert step.causal


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_generation_with_an_encoder(name):
    model, given = MODELS[name]().eval(), inputs(name)
    given.pop("decoder_input_ids")
    with torch.no_grad(), trace(model) as traced:
        made = model.generate(**given, max_new_tokens=4, min_new_tokens=4, num_beams=1, do_sample=False)
    with torch.no_grad(), trace(model) as whole:
        model(**given, decoder_input_ids=made[:, :-1])
    assert [layer.index for layer in traced.layers] == list(range(6))
    for step, one in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == one.rows
        assert torch.allclose(step.weights, one.weights, atol=1e-5)
        assert torch.allclose(step.keys, one.keys, atol=1e-5)


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
    with torch.no_grad(), trace(model, rows=[2], keep=EVERYTHING) as one:
        made = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    with torch.no_grad(), trace(model, rows=[2], keep=EVERYTHING) as whole:
        model(made[:, :-1])
    for step, expected in zip(one.layers, whole.layers, strict=True):
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
    one, two = MODELS["gpt2"]().eval(), MODELS["gpt2"]().eval()
    tokens = torch.randint(3, 40, (1, 6))
    two.set_attn_implementation("eager")
    with torch.no_grad():
        plain = two(tokens).logits
        with trace(one) as first:
            with trace(one, layers=[0]) as inner:
                one(tokens)
            assert torch.equal(two(tokens).logits, plain)
            one(tokens[:, :4])
    assert inner.layers[0].weights.shape == (1, 4, 6, 6)
    assert len(inner.layers) == 1
    assert first.layers[2].weights.shape == (1, 4, 4, 4)


def test_training_records_weights_before_dropout_and_computes_the_same():
    model, given = MODELS["bert"]().train(), inputs("bert")
    torch.manual_seed(1)
    with trace(model) as traced:
        out = model(**given)
    torch.manual_seed(1)
    expected = eager(model, **given)
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


# Our own models.


def stack(mechanism, *, cross=False, layers=3, causal=True, shared=None, **more):
    config = BlockConfig(embedding_dim=16, num_heads=4, hidden_dim=32, mechanism=mechanism, num_kv_heads=2, cross=cross)
    return Stack(config, layers, causal=causal and weighs_tokens(mechanism, 8), num_shared=shared, **more).eval()


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
    for step, one in zip(traced.layers, whole.layers, strict=True):
        assert step.rows == tuple(range(150))
        for part in EVERYTHING:
            mine, theirs = getattr(step, part), getattr(one, part)
            if part == "scores" and mechanism.ordered:  # it states weights alone
                assert mine is theirs is None
                continue
            real = torch.isfinite(theirs) & torch.isfinite(mine)
            if part in ("weights", "scores", "queries"):  # rows of padding mean nothing
                real[1, :, 140:] = False
            # A choice between near ties may fall differently on differently rounded inputs.
            wrong = ((mine - theirs).abs() > 1e-3 * (1 + theirs.abs()))[real]
            assert wrong.float().mean() < (0.02 if name == "argmax" else 1e-9), part
        assert torch.equal(step.visible.expand(2, 1, 150, 150)[0], one.visible.expand(2, 1, 150, 150)[0])
        assert torch.equal(step.real, one.real)
        assert step.causal
        assert one.causal


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
    for part in ("weights", "scores", "queries"):
        assert torch.allclose(getattr(mine, part), getattr(theirs, part)[:, [3, 1]][:, :, [6, 2]]), part
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
    make, given, count = OURS[name]
    model = make().eval()
    with torch.no_grad():
        plain = model(*given)
        with trace(model, keep=EVERYTHING) as traced:
            out = model(*given)
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
    for step, one in zip(traced.layers, whole.layers, strict=True):
        assert (step.kind, step.rows, step.causal) == (one.kind, one.rows, one.causal)
        for part in EVERYTHING:
            assert torch.allclose(getattr(step, part), getattr(one, part), atol=1e-5), part
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


def test_a_bias_is_in_the_scores_and_what_it_forbids_is_hidden():
    layer, x = MultiHeadAttention(16, 4), torch.randn(1, 5, 16)
    bias = torch.randn(1, 4, 5, 5)
    bias[..., 0] = -math.inf
    with trace(layer, keep=EVERYTHING, heads=[1]) as traced:
        layer(x, bias=bias)
    found = traced.layers[0]
    assert torch.allclose(found.scores.softmax(-1), found.weights, atol=1e-6)
    assert not found.visible[..., 0].any()
    assert found.visible[..., 1:].all()


def test_dropout_of_ours_changes_neither_the_random_numbers_nor_the_weights():
    layer, x = MultiHeadAttention(16, 4, dropout=0.5).train(), torch.randn(1, 6, 16)
    torch.manual_seed(3)
    plain = layer(x, mask=rg.causal)
    torch.manual_seed(3)
    with trace(layer) as traced:
        assert torch.equal(layer(x, mask=rg.causal), plain)
    assert torch.allclose(traced.layers[0].weights.sum(-1), torch.ones(1, 4, 6))
    assert not traced.layers[0].weights.requires_grad


# What follows from a trace.


def layer_of(weights, *, kind="self", visible=None, index=0, real=None, **more):
    """A layer of given weights (B, H, T, S)."""
    heads, rows = tuple(range(weights.shape[1])), tuple(range(weights.shape[2]))
    facts = {"index": index, "name": "", "kind": kind, "mechanism": "", "heads": heads, "rows": rows}
    return TracedLayer(**facts, weights=weights, visible=visible, real=real, **more)


TOKENS = ["[CLS]", "the", "re", "##gard", "the", "re", "##gard", "[SEP]"]
CAUSAL = rg.causal.draw(8).visible[None, None]


def looking(targets):
    """A head that puts all weight on some keys of each row, and on its last visible key where there are none."""
    weights = torch.zeros(8, 8)
    for row, columns in enumerate(targets):
        weights[row, columns or [row]] = 1 / max(1, len(columns))
    return weights


HEADS = {
    "previous": [[row - 1] if row else [] for row in range(8)],
    "next": [[row + 1] if row < 7 else [] for row in range(8)],
    "first": [[0]] * 8,
    "separator": [[7]] * 8,
    "same word": [[], [], [3], [2], [], [6], [5], []],
    "self": [[row] for row in range(8)],
    "induction": [[], [], [], [], [2], [3], [4], []],
}


@pytest.mark.parametrize(
    ("name", "causal"),
    # Under a causal mask no row but the last sees the next token or the separator.
    [(name, causal) for name in HEADS for causal in (False, True) if not causal or name not in ("next", "separator")],
)
def test_a_head_of_one_pattern_scores_1_on_it(name, causal):
    targets = [[c for c in columns if not causal or c <= row] for row, columns in enumerate(HEADS[name])]
    weights = torch.stack([looking(targets), looking([list(range(row + 1 if causal else 8)) for row in range(8)])])[
        None
    ]
    found = patterns(Trace([layer_of(weights, visible=CAUSAL if causal else None)], tokens=TOKENS))
    sharp, flat = found.heads
    assert sharp.score[name] == pytest.approx(1)
    assert sharp.mass[name] == pytest.approx(1)
    for other in PATTERNS:
        if flat.score[other] is not None:
            assert flat.score[other] == pytest.approx(1 if other == "uniform" else 0, abs=1e-6), other
    assert flat.top == "uniform"
    assert sharp.score["uniform"] == pytest.approx(0, abs=1e-6) or name in ("same word", "induction")


def test_a_mixture_of_a_pattern_and_uniform_scores_its_parts():
    weights = 0.3 * looking(HEADS["self"]) + 0.7 / 8
    one = patterns(Trace([layer_of(weights[None, None])])).of(0, 0)
    assert one.score["self"] == pytest.approx(0.3)
    assert one.score["uniform"] == pytest.approx(0.7)
    assert one.score["separator"] is one.score["same word"] is one.score["induction"] is None


def test_induction_on_a_repeated_sequence():
    tokens = list("abcdabcd")
    weights = torch.zeros(8, 8)
    for row in range(8):
        weights[row, row - 3 if row > 3 else 0] = 1
    found = patterns(Trace([layer_of(weights[None, None], visible=CAUSAL)], tokens=tokens)).of(0, 0)
    assert found.score["induction"] == pytest.approx(1)
    assert found.top == "induction"
    assert found.baseline["induction"] == pytest.approx(sum(1 / n for n in (5, 6, 7, 8)) / 4)


def test_the_baseline_is_of_the_visible_keys_and_padding_is_left_out():
    real = torch.ones(2, 8, dtype=torch.bool)
    real[1, :3] = False  # padded on the left
    visible = CAUSAL & real[:, None, None]
    weights = visible / visible.sum(-1, keepdim=True).clamp(min=1)
    weights[1, 0, 3:, 3:] = torch.eye(5)
    weights[1, 0, 4:] = 0
    weights[1, 0, 4:, 3] = 1  # the first real token
    weights[0, 0] = weights[0, 0] * 0 + torch.eye(8)[0]
    found = patterns(Trace([layer_of(weights, visible=visible, real=real)])).of(0, 0)
    assert found.score["first"] == pytest.approx(1)
    first = [1 / n for n in range(2, 9)] + [1 / n for n in range(2, 6)]  # rows that see the first token and more
    assert found.baseline["first"] == pytest.approx(sum(first) / len(first))


def test_patterns_of_cross_attention_and_of_patches():
    source, target = ["▁chat", "▁noir", "</s>"], ["▁noir", "▁cat"]
    weights = torch.tensor([[0.0, 1, 0], [0, 0, 1]])[None, None]
    found = patterns(Trace([layer_of(weights, kind="cross")], tokens=target, source_tokens=source)).of(0, 0)
    assert found.score["same word"] == pytest.approx(1)
    assert found.score["separator"] == pytest.approx((0.5 - 1 / 3) / (1 - 1 / 3))
    assert [name for name in PATTERNS if found.score[name] is None] == ["previous", "next", "self", "induction"]
    model = vit().eval()
    with trace(model) as traced:
        model(torch.randn(1, 3, 16, 16))
    patches = traced.patterns()
    assert {name for name, score in patches.heads[0].score.items() if score is None} == {
        "separator",
        "same word",
        "induction",
    }
    assert patches.heads[0].baseline["first"] == pytest.approx(1 / 17)


def test_patterns_print_draw_and_go_to_json():
    model = MODELS["bart"]().eval()
    words = [[f"▁{n}" for n in range(9)]] * 2
    with trace(model, tokens=[w[:5] for w in words], source_tokens=words) as traced:
        model(**inputs("bart"))
    found = traced.patterns(separators=["▁8"])
    assert len(str(found).splitlines()) == 1 + 6 * 4
    assert len(json.loads(json.dumps(found.to_dict()))["heads"]) == 24
    assert found.plot().axes
    assert traced.patterns(separators=[-1]).of(1, 0).score["separator"] is not None
    with pytest.raises(ValueError, match="separators: expected positions below"):
        traced.patterns(separators=[20])
    with pytest.raises(ValueError, match=r"tokens: expected 2 sequences of 5 strings, got lengths \[3\]"):
        traced.label(["a", "b", "c"], words).patterns()
    with pytest.raises(ValueError, match="head: expected a recorded layer and head, got layer 9 head 0"):
        found.of(9, 0)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["[CLS]", "un", "##like", "##ly", "!", "[SEP]"], [None, 0, 0, 0, 1, None]),
        (["Hel", "lo", ",", "Ġwor", "ld", "<|endoftext|>"], [0, 0, 1, 2, 2, None]),
        (["<s>", "▁Hel", "lo", "▁", "you", "</s>"], [None, 0, 0, 1, 2, None]),
        (["<|startoftext|>", "hel", "lo</w>", "you</w>"], [None, 0, 0, 1]),
        (["C", "C", "(", "=", "O", ")"], [0, 1, 2, 3, 4, 5]),
        ([], []),
    ],
)
def test_words_of_tokens(tokens, words):
    assert word_ids(tokens) == words


def test_rollout_is_the_product_of_mixed_layers():
    model, x = stack(rg.Quadratic(), layers=3, causal=False), torch.randn(2, 6, 16)
    with trace(model) as traced:
        model(x)
    flow = rollout(traced)
    assert torch.allclose(flow.sum(-1), torch.ones(2, 6), atol=1e-6)
    expected = torch.eye(6).expand(2, 6, 6)
    for layer in traced.layers:
        expected = (0.5 * layer.weights.mean(1) + 0.5 * torch.eye(6)) @ expected
    assert torch.allclose(flow, expected, atol=1e-6)
    assert torch.equal(traced.rollout(), flow)


def test_rollout_wants_one_stack():
    model = MODELS["bart"]().eval()
    with trace(model) as traced:
        model(**inputs("bart"))
    with pytest.raises(ValueError, match=r"trace: expected self-attention of one stack"):
        rollout(traced)
    assert rollout(traced.select(kind="self", name="encoder")).shape == (2, 9, 9)
    with pytest.raises(ValueError, match="trace: expected at least one layer"):
        rollout(Trace())


def test_value_weighted_attention_is_the_norm_of_weighted_values():
    layer, x = MultiHeadAttention(16, 4, num_kv_heads=2, value_length=3), torch.randn(2, 5, 16)
    with trace(layer) as traced:
        layer(x, mask=rg.causal)
    found = traced.layers[0]
    plain, projected = value_weighted(found), traced.value_weighted(0, layer.W_o.weight)
    for b, h, t, s in [(0, 0, 4, 1), (1, 3, 2, 2), (1, 1, 3, 0), (0, 2, 1, 3)]:
        value = found.weights[b, h, t, s] * found.values[b, h // 2, s]
        assert plain[b, h, t, s] == pytest.approx(value.norm().item(), abs=1e-6)
        through = layer.W_o.weight[:, 3 * h : 3 * h + 3] @ value
        assert projected[b, h, t, s] == pytest.approx(through.norm().item(), abs=1e-6)
    with pytest.raises(ValueError, match=r"projection: expected \(E, H · 3\)"):
        value_weighted(found, torch.randn(16, 7))


# Files.


def same(one, two):
    assert (one.tokens, one.source_tokens, one.model) == (two.tokens, two.source_tokens, two.model)
    for mine, theirs in zip(one.layers, two.layers, strict=True):
        for name in TracedLayer.__dataclass_fields__:
            a, b = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


@pytest.mark.parametrize("name", ["llama", "bart", "vit"])
def test_a_trace_is_saved_and_opened_as_it_was(name, tmp_path):
    model = MODELS[name]().eval().to(torch.bfloat16 if name == "llama" else torch.float32)
    with trace(model, keep=EVERYTHING, tokens=["ä", "\udc80"], source_tokens=[["▁"], ["b"]]) as traced:
        model(**inputs(name))
    same(Trace.open(traced.save(tmp_path / "one.safetensors")), traced)
    same(Trace.open(Trace().save(tmp_path / "none.safetensors")), Trace())


def test_channel_attention_is_saved_too(tmp_path):
    model = stack(rg.Channel())
    with trace(model) as traced:
        model(torch.randn(1, 5, 16))
    same(Trace.open(traced.save(tmp_path / "one.safetensors")), traced)
    assert patterns(traced).heads == ()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.safetensors"
    Trace([layer_of(torch.ones(1, 1, 2, 2) / 2)]).save(path)
    before = path.read_bytes()

    def broken(tensors, to, metadata):
        to.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        Trace().save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"]
    with pytest.raises(ValueError, match="path: expected an existing folder"):
        Trace().save(tmp_path / "nowhere" / "one.safetensors")


FACTS = {"index": 0, "name": "", "kind": "self", "mechanism": "", "heads": [0], "rows": [0, 1], "causal": False}
LAYER = {**FACTS, "by_pairs": True, "weights": "w"}
ABOUT = {"format": 1, "model": "", "tokens": None, "source_tokens": None, "layers": [LAYER]}


@pytest.mark.parametrize(
    "about",
    [
        None,
        [],
        {**ABOUT, "format": 2},
        {**ABOUT, "layers": 3},
        {**ABOUT, "layers": [3]},
        {**ABOUT, "layers": [LAYER, LAYER]},
        {**ABOUT, "model": 1},
        {**ABOUT, "tokens": [[1]]},
        {**ABOUT, "tokens": 5},
        {**ABOUT, "layers": [{**LAYER, "index": "0"}]},
        {**ABOUT, "layers": [{**LAYER, "kind": "other"}]},
        {**ABOUT, "layers": [{**LAYER, "heads": [0, 1]}]},
        {**ABOUT, "layers": [{**LAYER, "heads": [-1]}]},
        {**ABOUT, "layers": [{**LAYER, "rows": "01"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "gone"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": ["w"]}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "flat"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "whole"}]},
        {**ABOUT, "layers": [{**LAYER, "visible": "wide"}]},
        {**ABOUT, "layers": [{**LAYER, "real": "w"}]},
        {**ABOUT, "layers": [{**LAYER, "keys": "none"}]},
        {**ABOUT, "layers": [{name: fact for name, fact in LAYER.items() if name != "causal"}]},
    ],
)
def test_files_that_are_no_traces_are_refused(about, tmp_path):
    tensors = {
        "w": torch.ones(1, 1, 2, 3),
        "flat": torch.ones(2, 3),
        "whole": torch.ones(1, 1, 2, 3, dtype=torch.int64),
        "wide": torch.ones(1, 1, 2, 4, dtype=torch.bool),
        "none": torch.ones(1, 0, 3, 4),
    }
    path = tmp_path / "one.safetensors"
    save_file(tensors, path, metadata={} if about is None else {"regard.inference.trace": json.dumps(about)})
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)


def test_the_file_that_the_refused_ones_were_made_of_opens(tmp_path):
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(1, 1, 2, 3)}, path, metadata={"regard.inference.trace": json.dumps(ABOUT)})
    assert Trace.open(path).layers[0].weights.shape == (1, 1, 2, 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)
    path.write_text("not a trace")
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)
