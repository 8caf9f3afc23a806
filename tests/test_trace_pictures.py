"""Traces of pictures: their maps, class tokens, and windows."""

import pytest
import torch
from einops import rearrange

import regard as rg
from regard.inference.trace import Trace, trace
from regard.models.davit import windows
from traced_contents import likeliest, ours, same, traced_davit
from traced_models import MODELS, transformers


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


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
