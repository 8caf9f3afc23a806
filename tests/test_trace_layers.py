"""What a trace says of a layer: its definition, its kind, the outputs of its heads, what W_o makes of them."""

import math

import pytest
import torch

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.inference.trace import Definition, Trace, trace
from traced_contents import ours
from traced_models import EVERYTHING, MODELS, PAIR, SIZES, decoder, gpt2, inputs, t5, transformers


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


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
