"""DaViT: Florence-2's vision tower, windows and channels."""

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange

import regard as rg
from image_models import STAGES, close, make_davit, pictures, shuffled
from regard.checkpoints.form import Link
from regard.core.mechanisms import REGISTRY
from regard.models.davit import DaViT, DaViTConfig, unwindowed, windows
from regard.models.layers.attention import Attend


@pytest.fixture(scope="module")
def theirs():
    return pytest.importorskip("transformers")


def their_davit(theirs, **changes):
    names = {
        "embed_dim": "embedding_dim",
        "depths": "num_layers",
        "patch_prenorm": "norm_first",
        **{name: name for name in ("num_heads", "num_groups", "patch_size", "patch_stride", "patch_padding")},
    }
    shape = {name: STAGES[ours] for name, ours in names.items()}
    module = pytest.importorskip("transformers.models.florence2.modeling_florence2")
    config = theirs.Florence2VisionConfig(**{**shape, "window_size": 3, "drop_path_rate": 0.1, **changes})
    return shuffled(module.Florence2VisionBackbone(config))


def davit_links(config: DaViTConfig):
    """Florence-2's names and ours."""
    for stage, layers in enumerate(config.num_layers):
        yield f"convs.{stage}.conv", (f"stages.{stage}.embed",)
        yield f"convs.{stage}.norm", (f"stages.{stage}.norm",)
        for half in range(2 * layers):
            kind, attention = ("channel", "channel_attn") if half % 2 else ("spatial", "window_attn")
            block, ours = f"blocks.{stage}.{half // 2}.{kind}_block", f"stages.{stage}.halves.{half}"
            yield f"{block}.conv1", (f"{ours}.attention_conv",)
            yield f"{block}.norm1", (f"{ours}.attention_norm",)
            yield f"{block}.{attention}.qkv", tuple(f"{ours}.attention.W_{name}" for name in "qkv")
            yield f"{block}.{attention}.proj", (f"{ours}.attention.W_o",)
            yield f"{block}.conv2", (f"{ours}.network_conv",)
            yield f"{block}.norm2", (f"{ours}.network_norm",)
            yield f"{block}.ffn.fc1", (f"{ours}.network.up",)
            yield f"{block}.ffn.fc2", (f"{ours}.network.down",)


def copied(model, **changes) -> DaViT:
    """Our DaViT with the weights of Florence-2's vision tower."""
    ours = DaViT(DaViTConfig(**{**STAGES, "num_classes": 0, **changes})).double().eval()
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    state = {name: tensor for name, tensor in ours.state_dict().items() if name.startswith("norm.")}
    left = dict(model.state_dict())
    for name, modules in davit_links(ours.config):
        for part in ("weight", "bias"):
            if f"{name}.{part}" in left:
                pair = Link(f"{name}.{part}", tuple(f"{module}.{part}" for module in modules))
                state |= pair.split(left.pop(pair.theirs), shapes)
    assert not left, sorted(left)
    ours.load_state_dict(state)
    return ours


TOWERS = {
    "windows fit": ({}, {}, (48, 48)),
    "windows are padded": ({}, {}, (64, 40)),
    "windows are larger than the map": ({"window_size": 12}, {"window_size": 12}, (32, 48)),
    "odd maps": ({}, {}, (45, 59)),
    "overlapping patches, as Florence-2 has them": (
        {"patch_size": (7, 3, 3), "patch_padding": (3, 1, 1)},
        {"patch_size": (7, 3, 3), "patch_padding": (3, 1, 1)},
        (40, 33),
    ),
    "norms elsewhere": ({"patch_prenorm": (True, False, True)}, {"norm_first": (True, False, True)}, (48, 32)),
    "no bias": ({"qkv_bias": False}, {"attention_bias": False}, (40, 40)),
    "network": (
        {"mlp_ratio": 2.5, "activation_function": "gelu_pytorch_tanh"},
        {"network_ratio": 2.5, "activation": "gelu_tanh"},
        (40, 40),
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_davit_is_florences_vision_tower(name, theirs):
    changes, options, sides = TOWERS[name]
    model = their_davit(theirs, **changes)
    ours, images = copied(model, **{"window_size": 3, **options}), pictures(*sides)
    with torch.no_grad():
        close(ours.features(images)[-1], model(images).last_hidden_state)


def test_the_stages_maps_shrink_and_the_head_reads_the_mean_of_the_last():
    model, images = make_davit(), pictures(64, 40)
    maps = model.features(images)
    assert [tuple(features.shape) for features in maps] == [(2, 8, 16, 10), (2, 16, 8, 5), (2, 24, 4, 2)]
    pooled = F.layer_norm(maps[-1].mean((2, 3)), (24,), model.norm.weight, model.norm.bias)
    close(model(images), F.linear(pooled, model.head.weight, model.head.bias))


def test_a_window_sees_itself_alone_and_channels_see_the_whole_map():
    x = torch.randn(1, 8, 6, 6, dtype=torch.float64)
    changed = x.clone()
    changed[..., :3, :3] += 1
    windowed, channels = make_davit().stages[0].halves
    tokens, others = (rearrange(image, "b e y x -> b y x e") for image in (x, changed))
    apart = (windowed._attend(tokens) != windowed._attend(others)).any(-1)[0]
    assert apart[:3, :3].all()
    assert not apart[3:].any()
    assert not apart[:, 3:].any()
    assert (channels._attend(tokens) != channels._attend(others)).any(-1).all()


def test_attention_in_windows_is_attention_under_a_mask():
    half = make_davit().stages[0].halves[0]
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    place = torch.arange(54)
    ids = place // 9 // 3 * 3 + place % 9 // 3
    whole = half.attention(rearrange(x, "b y x e -> b (y x) e"), mask=rg.segments(ids))
    close(half._attend(x), rearrange(whole, "b (y x) e -> b y x e", y=6))


@pytest.mark.parametrize(("height", "width", "size"), [(6, 6, 3), (5, 7, 3), (2, 3, 7), (1, 1, 1), (4, 9, 2)])
def test_windows_come_back_as_the_map(height, width, size):
    x = torch.randn(2, height, width, 3)
    parts = windows(x, size)
    assert parts.shape == (2 * -(-height // size) * -(-width // size), size * size, 3)
    assert torch.equal(unwindowed(parts, height, width, size), x)
    assert parts.ne(0).sum() == x.numel()


@pytest.mark.parametrize("name", REGISTRY)
def test_every_mechanism_runs_in_windows_and_a_batch_is_its_images(name):
    images = pictures(40, 33, batch=3)
    model = make_davit(mechanism=name)
    logits = model(images)
    assert logits.isfinite().all()
    close(logits, torch.cat([model(image[None]) for image in images]))


def test_all_attention_of_a_davit_happens_where_a_trace_stands():
    met = []
    model = make_davit(channel_scale="channels")
    for module in model.modules():
        if isinstance(module, Attend):
            module.register_forward_hook(lambda attend, args, _: met.append((attend.mechanism, tuple(args[0].shape))))
    model(pictures(64, 40))
    channel = rg.Channel(scale="channels")
    assert met == [
        (rg.Softmax(), (2 * 6 * 4, 2, 9, 4)),
        (channel, (2, 4, 160, 2)),
        *[(rg.Softmax(), (2 * 3 * 2, 4, 9, 4)), (channel, (2, 2, 40, 8))] * 2,
        (rg.Softmax(), (2 * 2 * 1, 3, 9, 8)),
        (channel, (2, 6, 8, 4)),
    ]
