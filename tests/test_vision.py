"""Facts about ViT and DaViT: patches, positions, heads, and the published models' numbers."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

import regard as rg
from image_models import BOTH_WAYS, SMALL, STAGES, close, make, make_davit, pictures, shuffled
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.forms import vit
from regard.checkpoints.huggingface import export
from regard.models.davit import DaViTConfig
from regard.models.vision import VisionConfig, VisionTransformer


def saved(folder, model) -> VisionTransformer:
    """Our model of a folder that transformers wrote."""
    model.save_pretrained(folder)
    return rg.load(folder)


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers")


def their_vit(theirs, name="ViTForImageClassification", **changes):
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    config = theirs.ViTConfig(**{**shape, "image_size": 16, "patch_size": 4, "num_labels": 5, **changes})
    return shuffled(getattr(theirs, name)(config))


FORMS = {
    "square": ({}, (16, 16)),
    "not square": ({"image_size": (12, 20)}, (12, 20)),
    "patches not square": ({"image_size": (12, 20), "patch_size": (3, 5)}, (12, 20)),
    "odd patches": ({"image_size": (14, 21), "patch_size": 7}, (14, 21)),
    "one patch": ({"image_size": 4}, (4, 4)),
    "no bias": ({"qkv_bias": False}, (16, 16)),
    "gelu by tanh": ({"hidden_act": "gelu_new"}, (16, 16)),
    "relu": ({"hidden_act": "relu", "layer_norm_eps": 1e-3}, (16, 16)),
    "two classes": ({"num_labels": 2}, (16, 16)),
}


@pytest.mark.parametrize("name", FORMS)
def test_vit_is_the_published_one(name, theirs, tmp_path):
    changes, sides = FORMS[name]
    model = their_vit(theirs, **changes)
    images = pictures(*sides)
    ours = saved(tmp_path, model)
    with torch.no_grad():
        close(ours(images), model(images).logits)
        close(ours.features(images), model.vit(images).last_hidden_state)


def test_the_pooler_is_the_hidden_layer_of_the_mlp_head(theirs, tmp_path):
    model = their_vit(theirs, "ViTModel", pooler_output_size=9)
    ours, images = saved(tmp_path, model), pictures(16, 16)
    assert (ours.config.head, ours.config.num_classes, ours.config.representation_dim) == ("mlp", 0, 9)
    with torch.no_grad():
        expected = model(images)
        close(ours(images), expected.pooler_output)
        close(ours.features(images), expected.last_hidden_state)


def test_without_a_pooler_the_class_token_is_given(theirs, tmp_path):
    model = shuffled(theirs.ViTModel(their_vit(theirs).config, add_pooling_layer=False))
    ours, images = saved(tmp_path, model), pictures(16, 16)
    with torch.no_grad():
        close(ours(images), model(images).last_hidden_state[:, 0])


def test_a_pooler_next_to_a_classifier_is_left_out():
    shapes = {"classifier.weight": (3, 16), "vit.pooler.dense.weight": (16, 16)}
    values = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = vit.read_config(values, shapes)
    assert (config.head, config.num_classes, config.image_size, config.norm_epsilon) == ("linear", 3, 224, 1e-12)
    assert not any("pooler" in link.theirs for link in vit.links(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"patch_size": (3, 5), "attention_bias": False, "activation": "gelu_tanh", "norm_epsilon": 1e-4},
        {"num_classes": 0, "head": "mlp", "representation_dim": 7},
        {"num_classes": 0, "head": "mlp"},
        {"num_classes": 1, "activation": "relu", "hidden_dim": 30},
    ],
)
def test_vit_goes_to_transformers_and_back(changes, theirs, tmp_path):
    ours, images = make(**changes), pictures()
    folder = rg.save(ours, tmp_path / "there", layout="huggingface")
    name = "ViTForImageClassification" if ours.config.num_classes else "ViTModel"
    assert json.loads((folder / "config.json").read_text())["architectures"] == [name]
    model, notes = getattr(theirs, name).from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    assert not any(notes.values()), notes
    back = saved(tmp_path / "back", model)
    with torch.no_grad():
        expected = model(images)
        close(ours(images), expected.logits if ours.config.num_classes else expected.pooler_output)
        assert torch.equal(back(images), ours(images))
    explicit = {"hidden_dim": 64, **changes}
    if explicit.get("head") == "mlp":
        explicit = {"representation_dim": 16, **explicit}
    assert back.config == replace(ours.config, **explicit)


@pytest.mark.parametrize(
    "changes",
    [{"mechanism": "elu"}, {"positions": "none"}, {"norm": "rms"}, {"head": "mlp"}, {"activation": "swiglu"}],
)
def test_what_transformers_cannot_say_is_not_exported(changes):
    [name] = changes
    lost = {"activation": "hidden_act"}.get(name, name)
    with pytest.raises(ValueError, match=f"form of a Hugging Face model, got .*{lost}"):
        export(make(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"image_size": "large"}, "image_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"pooler_act": "relu"}, "pooler_act"),
    ],
)
def test_configs_that_mean_something_else_are_refused(changes, message):
    values = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    with pytest.raises(CheckpointError, match=message):
        vit.read_config({**values, **changes}, {"vit.pooler.dense.weight": (16, 16)})


@pytest.mark.parametrize("sides", [(32, 32), (24, 40), (8, 12), (4, 4), (16, 16)])
def test_interpolated_positions_are_the_published_ones(sides, theirs, tmp_path):
    model, images = their_vit(theirs), pictures(*sides)
    ours = saved(tmp_path, model).resized(sides)
    with torch.no_grad():
        close(ours(images), model(images, interpolate_pos_encoding=True).logits)


def test_a_resized_model_shares_nothing_and_keeps_the_rest():
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    other = model.resized((24, 24))
    assert other.config == replace(model.config, image_size=(24, 24))
    assert torch.equal(other.positions[:, 0], model.positions[:, 0])
    for name, tensor in other.state_dict().items():
        assert name == "positions" or torch.equal(tensor, before[name])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not other.training
    assert other.positions.requires_grad


def test_resizing_to_the_same_size_changes_nothing():
    model, images = make(), pictures()
    assert torch.equal(model.resized((12, 20))(images), model(images))


def test_positions_interpolate_down_and_across_from_their_own_grid():
    model = make()
    with torch.no_grad():
        rows = torch.arange(3.0).repeat_interleave(5)
        model.positions[0, 1:] = rows[:, None]
    grid = model.resized((24, 60)).positions[0, 1:].unflatten(0, (6, 15))
    assert torch.allclose(grid, grid[:, :1])
    assert (grid[1:, 0] > grid[:-1, 0]).all()


def test_patches_are_a_linear_layer_on_flattened_patches():
    model, images = make(patch_size=(3, 5)), pictures()
    flat = rearrange(images, "b c (y v) (x u) -> b (y x) (c v u)", v=3, u=5)
    by_hand = F.linear(flat, model.patches.weight.flatten(1), model.patches.bias)
    close(rearrange(model.patches(images), "b e y x -> b (y x) e"), by_hand, atol=1e-13)


def permuted(images: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    flat = rearrange(images, "b c (y v) (x u) -> b c (y x) v u", v=4, u=4)[:, :, order]
    return rearrange(flat, "b c (y x) v u -> b c (y v) (x u)", y=3)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_without_positions_patches_are_a_set(name):
    images, order = pictures(), torch.randperm(15)
    model = make(mechanism=name, positions="none")
    features = model.features(images)
    moved = model.features(permuted(images, order))
    close(moved[:, 0], features[:, 0])
    close(moved[:, 1:], features[:, 1:][:, order])


def test_with_positions_they_are_a_picture():
    images, order = pictures(), torch.randperm(15)
    model = make()
    assert (model(permuted(images, order)) - model(images)).abs().max() > 1e-3


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_every_mechanism_runs_and_a_batch_is_its_images(name):
    images = pictures(batch=3)
    model = make(mechanism=name)
    logits = model(images)
    assert logits.shape == (3, 5)
    assert logits.isfinite().all()
    close(logits, torch.cat([model(image[None]) for image in images]))
    logits.sum().backward()
    assert model.patches.weight.grad.abs().sum() > 0


def test_a_mask_hides_patches():
    model, images = make(num_layers=1), pictures()
    changed = images.clone()
    changed[:, :, :, -4:] += 1
    unseen = rg.dense(torch.tensor([[column != 4 for column in [0, *list(range(5)) * 3]]]).repeat(16, 1))
    assert torch.equal(model(images, unseen), model(changed, unseen))
    assert not torch.allclose(model(images), model(changed))


def test_the_two_heads():
    features = make().features(pictures()).detach()
    linear, deep = make(), make(head="mlp", representation_dim=7)
    close(linear.predict(features), F.linear(features[:, 0], linear.head.weight, linear.head.bias))
    hidden = torch.tanh(F.linear(features[:, 0], deep.hidden.weight, deep.hidden.bias))
    close(deep.predict(features), F.linear(hidden, deep.head.weight, deep.head.bias))
    assert hidden.shape == (2, 7)


def test_a_model_for_other_classes_has_one_linear_layer_that_begins_at_zero():
    model, images = make(head="mlp"), pictures()
    tuned = model.with_classes(3)
    assert tuned.config == replace(model.config, head="linear", num_classes=3)
    assert tuned.hidden is None
    assert tuned(images).tolist() == [[0.0] * 3] * 2
    assert torch.equal(tuned.features(images), model.features(images))
    assert model(images).shape == (2, 5)
    F.cross_entropy(tuned(images), torch.tensor([0, 2])).backward()
    assert tuned.head.weight.grad.abs().sum() > 0
    assert model.patches.weight.grad is None
    assert VisionTransformer(tuned.config).load_state_dict(tuned.float().state_dict())


def test_no_classes_gives_the_class_tokens_features():
    model, images = make(), pictures()
    bare = model.with_classes(0)
    assert torch.equal(bare(images), model.features(images)[:, 0])
    assert VisionTransformer(bare.config).state_dict().keys() == bare.state_dict().keys()


def test_first_weights_are_small_and_nowhere_unset():
    for parameter in VisionTransformer(VisionConfig(**SMALL)).parameters():
        assert parameter.isfinite().all()
        assert parameter.abs().max() <= 1
    again = VisionTransformer(VisionConfig(**SMALL, positions="none"))
    assert "positions" not in again.state_dict()
    assert 0 < again.class_token.abs().max() < 0.2


def test_configs_survive_json():
    for config in (VisionConfig(**SMALL, head="mlp", mechanism="quadratic"), DaViTConfig(**STAGES, mechanism="elu")):
        assert type(config).from_json(json.loads(json.dumps(config.to_json()))) == config


BAD = {
    "not divisible": (
        VisionConfig,
        {"image_size": (12, 21)},
        r"image_size: expected multiples of patch_size = \(4, 4\)",
    ),
    "three sides": (VisionConfig, {"image_size": (12, 12, 12)}, "image_size: expected one number or"),
    "no side": (VisionConfig, {"image_size": [12, 0]}, "image_size: expected a whole number of at least 1"),
    "no size": (VisionConfig, {"patch_size": None}, "patch_size: expected int | tuple"),
    "head": (VisionConfig, {"head": "deep"}, "head: expected linear or mlp, got 'deep'"),
    "positions": (VisionConfig, {"positions": "rotary"}, "positions: expected learned or none"),
    "mechanism": (VisionConfig, {"mechanism": "nope"}, "mechanism: expected one of"),
    "stages": (DaViTConfig, {"num_heads": (2, 4)}, "num_heads: expected 3 values, one per stage"),
    "one number": (DaViTConfig, {"embedding_dim": 8}, r"embedding_dim: expected tuple\[int, \.\.\.\], got 8"),
    "groups": (DaViTConfig, {"num_groups": (3, 2, 6)}, "num_groups: expected divisors of embedding_dim"),
    "stride": (DaViTConfig, {"patch_stride": (4, 0, 2)}, "patch_stride: expected whole numbers of at least 1"),
    "padding": (DaViTConfig, {"patch_padding": (3, -1, 0)}, "patch_padding: expected whole numbers of at least 0"),
    "scale": (DaViTConfig, {"channel_scale": "heads"}, "channel_scale: expected tokens or channels"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_say_so(name):
    config, changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        config(**{**(SMALL if config is VisionConfig else STAGES), **changes})


@pytest.mark.parametrize("build", [make, make_davit])
@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 12, 20), r"images: expected floating-point numbers of shape \(B, C, height, width\)"),
        (torch.zeros(1, 3, 12, 20, dtype=torch.uint8), "images: expected floating-point.*uint8"),
        ([[0.0]], "images: expected floating-point.*got list"),
        (torch.zeros(1, 1, 12, 20), "images: expected 3 channels, got 1"),
    ],
)
def test_images_that_are_none_say_so(build, images, message):
    with pytest.raises(ValueError, match=message):
        build()(images)


def test_images_of_another_size_name_the_way_out():
    with pytest.raises(ValueError, match=r"expected 12×20 \(image_size\), got 20×12; model\.resized\(\(20, 12\)\)"):
        make()(pictures(20, 12))
    with pytest.raises(ValueError, match="image_size: expected multiples"):
        make().resized((13, 20))
    with pytest.raises(ValueError, match="nothing is left at stage 3"):
        make_davit()(pictures(5, 64))


@pytest.mark.parametrize("build", [make, make_davit])
def test_training_reaches_every_weight(build):
    model = build(dropout=0.1, attention_dropout=0.1).train()
    model(pictures() if build is make else pictures(40, 33)).square().sum().backward()
    # A softmax is blind to what all keys share, so the bias of the keys has no gradient.
    reached = {name for name, parameter in model.named_parameters() if parameter.grad.abs().max() > 1e-9}
    missed = {name for name, _ in model.named_parameters()} - reached
    assert all(name.endswith("W_k.bias") for name in missed), missed


@pytest.mark.parametrize("width", [32, 512])
@pytest.mark.parametrize("patch", [2, 8])
def test_tokens_begin_at_one_size_whatever_width_and_patch_are(width, patch):
    torch.manual_seed(0)
    config = rg.VisionConfig(image_size=16, patch_size=patch, embedding_dim=width, num_layers=1, num_heads=4)
    model = rg.VisionTransformer(config)
    images = torch.randn(32, 3, 16, 16)
    block = model.stack.blocks[0]
    with torch.no_grad():
        patches = model.patches(images)
        assert 0.8 < patches.std() < 1.2
        values = block.attention.W_v(torch.randn(1000, width))
        assert 0.8 < values.std() < 1.2
