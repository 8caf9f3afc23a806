"""What a trace has besides weights: predictions, tokens, definitions, heads' outputs, pictures' maps and windows."""

import math

import pytest
import torch
from einops import rearrange

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.inference.trace import Definition, Trace, trace
from regard.inference.tracing.predictions import MOST
from regard.models.davit import windows
from traced_models import EVERYTHING, MODELS, PAIR, SIZES, decoder, gpt2, inputs, t5, transformers

WORDS = [f"w{number}" for number in range(40)]
FORM = {"vocabulary_size": 40, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def ours(**more):
    return rg.Decoder(rg.DecoderConfig(**FORM, **more)).eval()


def with_tokenizer(model):
    model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", *WORDS[1:]])
    return model


def pair():
    return rg.Transformer(rg.TransformerConfig(**FORM)).eval()


def encoder(**more):
    return rg.Encoder(rg.EncoderConfig(**FORM, **more)).eval()


def likeliest(logits, k):
    largest = logits.softmax(-1).topk(k)
    return list(zip(largest.indices.tolist(), largest.values.tolist(), strict=True))


def same(top, expected):
    assert [prediction.id for prediction in top] == [number for number, _ in expected]
    assert [prediction.probability for prediction in top] == pytest.approx([share for _, share in expected], abs=1e-5)


def test_the_likeliest_tokens_of_a_decoder_at_every_position():
    model, ids = ours(), torch.randint(40, (2, 6))
    with trace(model) as traced:
        logits = model(ids, mask=rg.padding([6, 4]))
        same(traced.top(), likeliest(logits[0, 5], 5))  # also while it is recorded
    same(traced.top(), likeliest(logits[0, 5], 5))
    same(traced.top(3, sequence=1), likeliest(logits[1, 3], 3))  # after the last token that is not padding
    same(traced.top(MOST, position=2), likeliest(logits[0, 2], MOST))
    same(traced.top(1, position=-3, sequence=1), likeliest(logits[1, 3], 1))
    assert traced.top()[0].token == str(traced.top()[0].id)
    assert traced.predictions.ids.shape == (2, 6, MOST)


def test_predictions_of_chosen_rows_alone():
    model, ids = ours(), torch.randint(40, (1, 6))
    with trace(model, rows=[1, -1]) as traced:
        logits = model(ids)
    assert traced.predictions.positions == (1, 5)
    same(traced.top(position=1), likeliest(logits[0, 1], 5))
    same(traced.top(), likeliest(logits[0, 5], 5))
    with pytest.raises(ValueError, match=r"position: expected a recorded position, one of \[1, 5\], got 2"):
        traced.top(position=2)


def test_a_long_sequences_logits_are_not_kept():
    model, ids = ours(), torch.randint(40, (1, 64))
    with trace(model) as traced:
        model(ids)
    size = traced.predictions.ids.numel() * 8 + traced.predictions.probabilities.numel() * 4
    assert size == 64 * MOST * 12
    with trace(model, keep=("weights",)) as light:
        model(ids)
    with pytest.raises(ValueError, match=r"top: expected .* keep=\('predictions', …\), got a trace of Decoder"):
        light.top()


@pytest.mark.parametrize("rows", [None, [-1]])
def test_generation_has_predictions_and_tokens_of_all_its_passes(rows):
    model = with_tokenizer(ours())
    with trace(model, rows=rows) as traced:
        [written] = rg.generate(model, [[3, 4, 5]], max_new_tokens=5, alternatives=3)
    sequence = [3, 4, 5, *written.tokens][:-1]
    assert traced.tokens == [[WORDS[number] for number in sequence]]
    logits = model(torch.tensor([sequence]))[0]
    assert traced.predictions.positions == tuple(range(len(sequence)) if rows is None else range(2, len(sequence)))
    for position in traced.predictions.positions:
        same(traced.top(position=position), likeliest(logits[position], 5))
    assert [traced.top(3, position=2 + step)[0].id for step in range(len(written.tokens))] == list(written.tokens)
    assert traced.top()[0].token == WORDS[traced.top()[0].id]


def test_an_encoder_decoder_knows_both_its_texts():
    model = with_tokenizer(pair())
    source, target = torch.randint(1, 40, (2, 7)), torch.randint(1, 40, (2, 4))
    with trace(model) as traced:
        logits = model(source, target)
    assert traced.source_tokens == [[WORDS[number] for number in row] for row in source.tolist()]
    assert traced.tokens == [[WORDS[number] for number in row] for row in target.tolist()]
    same(traced.top(sequence=1), likeliest(logits[1, -1], 5))
    sides = [tuple(len(side[0]) for side in traced.labels(layer)) for layer in traced.layers]
    assert sides == [(7, 7), (7, 7), (4, 4), (4, 7), (4, 4), (4, 7)]
    assert traced.patterns().of(3, 0).rows["same word"] >= 0
    with trace(model) as generated:
        [written] = rg.generate(model, [source[0].tolist()], max_new_tokens=3)
    assert generated.source_tokens == traced.source_tokens[:1]
    start = model.config.start_token or 0
    assert generated.tokens == [model.tokenizer.tokens([start, *written.tokens][: len(generated.tokens[0])])]
    with trace(model, source_tokens=list("abcdefg")) as labelled:
        model(source[:1], target[:1])
    assert (labelled.source_tokens, len(labelled.tokens[0])) == ([list("abcdefg")], 4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_called_so_whichever_token_fills_it(side):
    model, ids = with_tokenizer(ours()), torch.randint(1, 40, (2, 5))
    valid = torch.ones(2, 5, dtype=torch.bool)
    hidden = slice(0, 2) if side == "left" else slice(3, 5)
    valid[1, hidden] = False
    with trace(model) as traced:
        logits = model(ids, mask=rg.padding(valid=valid))
    assert traced.tokens[0] == model.tokenizer.tokens(ids[0])
    assert [token == "[PAD]" for token in traced.tokens[1]] == (~valid[1]).tolist()
    same(traced.top(sequence=1), likeliest(logits[1, 4 if side == "left" else 2], 5))


def test_logits_at_chosen_positions_are_not_taken_for_classes():
    model = pair()
    source, target = torch.randint(1, 40, (1, 7)), torch.randint(1, 40, (1, 4))
    with trace(model) as traced:
        model(source, target, at=torch.tensor([[False, True, False, True]]))
    assert traced.predictions.positions == (0, 1, 2, 3)
    same(traced.top(position=1), likeliest(model(source, target)[0, 1], 5))


def test_tokens_that_nobody_knows_are_none():
    model = with_tokenizer(ours())
    ids = torch.randint(1, 40, (2, 6))
    with trace(ours()) as bare:
        model(ids)
    assert bare.tokens is None
    _, state = model.extend(ids[:, :4], model.start(batch=2))
    with trace(model) as late:  # the first four came before it
        model.extend(ids[:, 4:], state)
    assert late.tokens is None
    with trace(model) as replaced:
        model(ids)
        model(ids[:1, :3])
        assert replaced.tokens == [model.tokenizer.tokens(ids[0, :3])]
    with trace(model, tokens=list("abc")) as labelled:
        model(ids[:1, :3])
    assert labelled.tokens == [["a", "b", "c"]]
    theirs = gpt2().eval()
    theirs.tokenizer = model.tokenizer
    with trace(theirs) as embedded:
        theirs(inputs_embeds=torch.randn(1, 5, 16))
    assert embedded.tokens is None
    assert len(embedded.patterns().heads) == 12


def test_hugging_face_models_predict_and_read_too():
    model, ids = gpt2().eval(), torch.randint(3, 40, (1, 5))
    model.tokenizer = with_tokenizer(ours()).tokenizer
    with trace(model) as traced:
        made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    sequence = made[:, :-1]
    assert traced.tokens == [[WORDS[number] for number in sequence[0].tolist()]]
    logits = model(sequence).logits[0]
    assert traced.predictions.positions == tuple(range(4, 8))  # it computes the last logits of the prompt alone
    for position in range(4, 8):
        same(traced.top(position=position), likeliest(logits[position], 5))
    both = MODELS["bart"]().eval()
    both.tokenizer = model.tokenizer
    with trace(both) as traced:
        out = both(**inputs("bart"))
    assert [len(traced.source_tokens[0]), len(traced.tokens[0])] == [9, 5]
    same(traced.top(sequence=1), likeliest(out.logits[1, -1], 5))


def test_masked_words_are_predicted_where_they_are():
    ids = torch.randint(1, 40, (1, 6))
    model = encoder(masked_words=True)
    with trace(model) as traced:
        hidden = model(ids)
    same(traced.top(position=2), likeliest(model.masked_words(hidden)[0, 2], 5))
    plain = encoder()
    with trace(plain) as traced:
        plain(ids)
    with pytest.raises(ValueError, match="an encoder needs masked_words"):
        traced.top()
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)).eval()
    with trace(theirs) as traced:
        logits = theirs(ids).logits
    same(traced.top(position=2), likeliest(logits[0, 2], 5))


PICTURE = {"image_size": (12, 20), "patch_size": 4, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}


def test_a_picture_has_a_grid_a_class_token_and_classes():
    names = ("cat", "dog", "owl")
    model = rg.VisionTransformer(rg.VisionConfig(**PICTURE, num_classes=3, class_names=names)).eval()
    with trace(model) as traced:
        logits = model(torch.randn(2, 3, 12, 20))
    assert (traced.grid, traced.class_token, traced.tokens) == ((3, 5), 0, None)
    assert {layer.grid for layer in traced.layers} == {(3, 5)}
    best = traced.top(3, sequence=1)
    same(best, likeliest(logits[1], 3))
    assert best[0].token == names[best[0].id]
    with trace(ours()) as text:
        pass
    assert (text.grid, text.class_token) == (None, None)


def test_a_hugging_face_picture_has_its_grid_also_at_another_size():
    model = MODELS["vit"]().eval()
    with trace(model) as traced:
        model(torch.randn(1, 3, 16, 16))
    assert (traced.grid, traced.class_token) == ((4, 4), 0)
    with trace(model) as wide:
        model(torch.randn(1, 3, 16, 24), interpolate_pos_encoding=True)
    assert (wide.grid, wide.class_token) == ((4, 6), 0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=4)
    siglip = transformers.SiglipVisionModel(config).eval()
    with trace(siglip, layers=[0]) as traced:
        siglip(torch.randn(1, 3, 16, 16))
    assert (traced.grid, traced.class_token) == ((4, 4), None)
    classes = transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=16, patch_size=4, id2label={0: "cat", 1: "dog"})
    ).eval()
    with trace(classes) as traced:
        logits = classes(torch.randn(1, 3, 16, 16)).logits
    assert traced.top(1)[0].token == ("cat", "dog")[int(logits.argmax())]


def test_a_text_beside_a_picture_has_no_grid():
    text = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision)
    model = transformers.CLIPModel(config).eval()
    with trace(model) as traced:
        model(input_ids=torch.randint(3, 40, (1, 9)), pixel_values=torch.randn(1, 3, 16, 16))
    assert {layer.name.split("_")[0]: layer.grid for layer in traced.layers} == {"text": None, "vision": (2, 2)}
    assert traced.grid is None


STAGES = {"embedding_dim": (8, 16), "num_layers": (1, 1), "num_heads": (2, 4), "num_groups": (2, 4)}
PATCHES = {"patch_size": (3, 2), "patch_stride": (2, 2), "patch_padding": (1, 0), "norm_first": (False, True)}


def davit():
    return rg.DaViT(rg.DaViTConfig(**STAGES, **PATCHES, window_size=3, num_classes=3)).eval()


def traced_davit(**more):
    model, images = davit(), torch.randn(2, 3, 16, 24)
    with trace(model, keep=(*EVERYTHING, "predictions"), **more) as traced:
        model(images)
    return model, images, traced


def test_windows_of_a_picture_have_an_axis_of_their_own():
    model, images, traced = traced_davit()
    stage = model.stages[0]
    seen = []
    handle = stage.halves[0].attention.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(images)
    handle.remove()
    layer = traced.layers[0]
    assert (layer.grid, layer.windows) == ((8, 12), (3, 4))
    assert layer.weights.shape == (2, 12, 2, 9, 9)
    assert layer.outputs.shape == layer.values.shape == (2, 12, 2, 9, 4)
    q, k, _ = stage.halves[0].attention.project(seen[0])
    assert torch.allclose(layer.weights.flatten(0, 1), rg.weights(q, k), atol=1e-6)
    # Window n of picture b is at row n // 4 and column n % 4 of its windows.
    cells = torch.arange(2 * 8 * 12).view(2, 8, 12, 1).float() + 1
    numbered = rearrange(windows(cells, 3), "(b n) t 1 -> b n t", b=2)
    assert numbered[1, 4 * 1 + 2, 0] == cells[1, 3, 6, 0]
    channels = traced.layers[1]
    assert (channels.grid, channels.windows, channels.by_pairs) == ((8, 12), None, False)
    assert (traced.layers[2].grid, traced.layers[2].windows) == ((4, 6), (2, 2))
    assert traced.grid is traced.class_token is None
    same(traced.top(3), likeliest(model(images)[0], 3))


def test_everything_that_reads_a_trace_takes_windows(tmp_path):
    model, images, traced = traced_davit()
    flat = Trace([layer.flat() for layer in traced.layers])
    assert str(traced.patterns()) == str(flat.patterns())
    assert traced.statistics() == flat.statistics()
    assert max(head.change for head in traced.compare(flat).heads) == 0
    layer = traced.layers[0]
    assert traced.value_weighted(0).shape == layer.weights.shape
    assert torch.equal(traced.value_weighted(0).flatten(0, 1), flat.value_weighted(0))
    with pytest.raises(ValueError, match="trace: expected self-attention of one stack"):
        Trace([layer]).rollout()
    assert "<table" in traced._repr_html_()
    assert "(2, 12, 2, 9, 9)" in repr(traced)
    shown = traced.plot(0, 1, sequence=1, window=7).axes[0].images[0].get_array()
    assert torch.allclose(torch.as_tensor(shown.filled(0)).float(), layer.weights[1, 7, 1])
    assert traced.select(name="stages.0").plot()
    with pytest.raises(ValueError, match="window: expected 0 to 11 in layer 0, got 12"):
        traced.plot(0, window=12)
    added = layer.contributions()
    half = model.stages[0].halves[0]
    whole = []
    handle = half.attention.register_forward_hook(lambda module, args, out: whole.append(out))
    before = model(images)
    handle.remove()
    assert torch.allclose(added.sum(2).flatten(0, 1) + half.attention.W_o.bias, whole[0], atol=1e-5)
    with rg.intervene(model, layers=[0], weights=traced):
        assert torch.allclose(model(images), before, atol=1e-5)
    with rg.intervene(model, layers=[0], values=traced):
        assert torch.allclose(model(images), before, atol=1e-5)
    with rg.intervene(model, layers=[0], mean=traced), trace(model, layers=[0], keep=["outputs"]) as changed:
        model(images)
    assert torch.allclose(changed.layers[0].outputs[1, 5, 1, 3], layer.outputs[:, :, 1].mean((0, 1, 2)), atol=1e-6)
    again = Trace.open(traced.save(tmp_path / "davit.safetensors"))
    assert torch.equal(again.layers[0].weights, layer.weights)
    assert [(kept.grid, kept.windows) for kept in again.layers] == [(kept.grid, kept.windows) for kept in traced.layers]


def test_rows_and_heads_of_windows_are_chosen():
    torch.manual_seed(0)
    _, _, some = traced_davit(layers=[0], heads=[1], rows=[-1, 2])
    assert some.layers[0].weights.shape == (2, 12, 1, 2, 9)
    torch.manual_seed(0)
    _, _, whole = traced_davit(layers=[0])
    assert torch.allclose(some.layers[0].weights, whole.layers[0].weights[:, :, [1]][..., [8, 2], :], atol=1e-6)


@pytest.mark.parametrize("name", REGISTRY)
def test_contributions_of_heads_sum_to_what_the_layer_gives(name):
    layer, x = rg.MultiHeadAttention(16, 4, num_kv_heads=2, mechanism=name).eval(), torch.randn(2, 5, 16)
    with trace(layer, keep=("outputs",)) as traced:
        y = layer(x)
    recorded = traced.layers[0]
    assert recorded.outputs.shape == (2, 4, 5, 4)
    added = recorded.contributions()
    assert torch.allclose(added.sum(1) + layer.W_o.bias, y, atol=1e-5)
    some = recorded.contributions(heads=[3, 1], rows=[4])
    assert torch.allclose(some, added[:, [3, 1], 4:], atol=1e-6)
    with pytest.raises(ValueError, match="heads: expected some of those that were recorded"):
        recorded.contributions(heads=[4])
    with pytest.raises(ValueError, match="rows: expected some of those that were recorded"):
        recorded.contributions(rows=[-1])


def test_contributions_of_int8_weights_and_of_chosen_heads():
    model = rg.quantized(ours(), least=1)
    with trace(model, keep=("outputs",), heads=[2]) as traced:
        model(torch.randint(40, (1, 5)))
    attention = model.stack.layers[1].attention
    exact = attention.W_o.weight.float() * attention.W_o.scale[:, None]
    assert torch.allclose(traced.layers[1].projection, exact[:, 8:12][None])
    assert traced.layers[1].contributions(heads=[2]).shape == (1, 1, 5, 16)


@pytest.mark.parametrize("name", MODELS)
def test_contributions_of_hugging_face_models(name):
    model, outputs = MODELS[name]().eval(), {}
    projections = ("c_proj", "o_proj", "out_proj", "dense", "o")
    with trace(model, keep=("outputs", "weights", "values")) as traced:
        handles = [
            module.register_forward_hook(lambda module, args, out, path=path: outputs.setdefault(path, []).append(out))
            for path, module in model.named_modules()
            if path.split(".")[-1] in projections
        ]
        model(**inputs(name))
    for handle in handles:
        handle.remove()
    for layer in traced.layers:
        mixed = layer.weights @ layer.values.repeat_interleave(4 // layer.values.shape[1], 1)
        assert torch.allclose(layer.outputs, mixed, atol=1e-5)
        parent = layer.name.removesuffix(".self")
        path = next(path for path in outputs if path.startswith(f"{parent}."))
        bias = getattr(model.get_submodule(path), "bias", None)
        whole = layer.contributions().sum(1) + (0 if bias is None else bias)
        run = 0 if len(outputs[path]) == 1 else layer.index
        assert torch.allclose(whole, outputs[path][run], atol=1e-5), path


def test_a_projection_that_reads_something_else_than_the_heads_is_refused():
    model = decoder("BitNet").eval()  # norms the heads' outputs before their projection
    with trace(model, keep=("outputs",)) as traced:
        model(torch.randint(3, 40, (1, 5)))
    assert traced.layers[0].outputs.shape == (1, 4, 5, 4)
    with pytest.raises(ValueError, match="layer 0: expected a projection that reads the heads' outputs"):
        traced.layers[0].contributions()


@pytest.mark.parametrize("outer", ["trace", "intervene"])
@pytest.mark.parametrize("builder", [ours, lambda: gpt2().eval()], ids=["ours", "gpt2"])
def test_outputs_are_those_after_a_change_whichever_began_first(builder, outer):
    model, ids = builder(), torch.randint(3, 40, (1, 5))
    change, record = rg.intervene(model, layers=[1], heads=[2], silence=True), trace(model, keep=("outputs",))
    first, second = (record, change) if outer == "trace" else (change, record)
    with first as a, second as b:
        model(ids)
    traced = a or b
    assert (traced.layers[1].outputs[:, 2] == 0).all()
    assert (traced.layers[1].outputs[:, [0, 1, 3]] != 0).any()


@pytest.mark.parametrize(
    ("mechanism", "expected"),
    [
        (rg.Softmax(), Definition(name="Softmax", scale=0.5)),
        (rg.Softmax(beta=2.0, softcap=5.0), Definition(name="Softmax", scale=2.0, softcap=5.0)),
        (rg.Argmax(), Definition(name="Softmax", scale=math.inf)),
        (rg.Uniform(), Definition(name="Softmax", scale=0.0)),
        (rg.Quadratic(c=2.0), Definition(name="Quadratic", options={"c": 2.0})),
        (rg.Channel(), Definition(name="Channel", options={"scale": "tokens"})),
    ],
)
def test_a_mechanism_is_a_value_also_in_a_file(mechanism, expected, tmp_path):
    layer = rg.MultiHeadAttention(16, 4, mechanism=mechanism)
    with trace(layer) as traced:
        layer(torch.randn(1, 5, 16))
    assert traced.layers[0].definition == expected
    assert traced.layers[0].mechanism == repr(mechanism)
    assert Trace.open(traced.save(tmp_path / "layer.safetensors")).layers[0].definition == expected


def test_a_bias_is_a_field_of_the_mechanism():
    model = ours(positions="alibi")
    with trace(model) as traced:
        model(torch.randint(40, (1, 5)))
    assert all(layer.definition.bias for layer in traced.layers)
    both = t5().eval()
    with trace(both) as traced:
        both(**inputs("t5"))
    assert {(layer.kind, layer.definition.bias) for layer in traced.layers} == {("self", True), ("cross", False)}
    assert {layer.definition.scale for layer in traced.layers} == {1.0}


def test_scale_and_softcap_of_hugging_face_models_are_those_that_make_the_scores():
    model = decoder("Gemma2", attn_logit_softcapping=3.0, query_pre_attn_scalar=9, head_dim=4).eval()
    with trace(model, keep=EVERYTHING) as traced:
        model(torch.randint(3, 40, (1, 5)))
    for layer in traced.layers:
        made = layer.definition
        assert (made.name, made.softcap, made.bias) == ("Softmax", 3.0, False)
        products = made.scale * layer.queries @ layer.keys.repeat_interleave(2, 1).transpose(-1, -2)
        scores = made.softcap * torch.tanh(products / made.softcap)
        seen = layer.visible.expand_as(scores)
        assert torch.allclose(layer.scores[seen], scores[seen], atol=1e-5)
    inverse = gpt2(scale_attn_by_inverse_layer_idx=True).eval()
    with trace(inverse) as traced:
        inverse(torch.randint(3, 40, (1, 5)))
    assert [layer.definition.scale for layer in traced.layers] == pytest.approx([0.5, 0.25, 0.5 / 3])


def bert_decoder():
    config = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    return transformers.BertLMHeadModel(config).eval()


CROSSING = {
    "bert": bert_decoder,
    "gpt2": lambda: gpt2(add_cross_attention=True).eval(),
}


@pytest.mark.parametrize("length", [5, 8])
@pytest.mark.parametrize("name", CROSSING)
def test_cross_attention_is_what_gets_another_sequence(name, length):
    model, ids = CROSSING[name](), torch.randint(3, 40, (1, 5))
    with trace(model) as traced:
        model(ids, encoder_hidden_states=torch.randn(1, length, 16))
    assert [layer.kind for layer in traced.layers] == ["self", "cross"] * 3
    assert [layer.weights.shape[3] for layer in traced.layers] == [5, length] * 3
    assert [layer.causal for layer in traced.layers] == [True, False] * 3


@pytest.mark.parametrize(("name", "count"), [("t5", 6), ("bart", 6)])
def test_kinds_hold_in_generation_whose_sides_have_one_length(name, count):
    model, arguments = MODELS[name]().eval(), inputs(name)
    arguments = {key: value[:, :4] for key, value in arguments.items() if key != "decoder_input_ids"}
    with trace(model) as traced:
        model.generate(**arguments, max_new_tokens=4, min_new_tokens=4, num_beams=1, do_sample=False)
    assert [layer.kind for layer in traced.layers] == ["self", "self", "self", "cross", "self", "cross"]
    assert len(traced.layers) == count


class Cross(torch.nn.Module):
    """A module whose name says cross and whose attention is of one sequence."""

    def __init__(self):
        super().__init__()
        self.cross = transformers.BartModel(transformers.BartConfig(**PAIR)).encoder
        self.encoder_attn = self.cross.layers[0].self_attn

    def forward(self, ids):
        return self.cross(ids)


def test_a_name_says_nothing_about_a_hugging_face_layer():
    model = Cross().eval()
    with trace(model) as traced:
        model(torch.randint(3, 40, (1, 5)))
    assert {layer.kind for layer in traced.layers} == {"self"}


@pytest.mark.parametrize("name", ["gpt2", "bart", "vit", "davit", "ours"])
def test_a_file_has_all_of_it(name, tmp_path):
    if name == "davit":
        _, _, traced = traced_davit()
    elif name == "ours":
        model = with_tokenizer(ours())
        with trace(model, keep=(*EVERYTHING, "predictions")) as traced:
            model(torch.randint(1, 40, (2, 6)), mask=rg.padding([6, 4]))
    else:
        model = MODELS[name]().eval()
        with trace(model, keep=(*EVERYTHING, "predictions")) as traced:
            model(**inputs(name))
    again = Trace.open(traced.save(tmp_path / "trace.safetensors"))
    assert (again.tokens, again.source_tokens) == (traced.tokens, traced.source_tokens)
    assert (again.grid, again.class_token) == (traced.grid, traced.class_token)
    for mine, theirs in zip(again.layers, traced.layers, strict=True):
        assert mine.definition == theirs.definition
        assert torch.equal(mine.contributions(), theirs.contributions())
    if traced.predictions is not None:
        assert again.top(sequence=1) == traced.top(sequence=1)
        assert again.top(position=0) == traced.top(position=0)
