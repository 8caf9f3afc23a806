"""The vision recipe: what a batch is, that options are checked, that models learn, fine-tuning."""

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard as rg
from image_files import idx, random_bytes, write_idx, write_pictures
from regard.models.vision import local
from regard.training.data.draws import draws as drawn
from regard.training.data.glyphs import CHARACTERS
from regard.training.data.images import IDX, Images, Split, pixels
from regard.training.recipes import vision
from regard.training.recipes.vision import Options, Vision, build, erased, shifted

SMALL = {"patch_size": 7, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,)}


def draws(seed, epoch, indices, count):
    return torch.from_numpy(drawn(seed, epoch, indices, count)).float()


def test_shifts_are_padded_crops_and_mirrors():
    images = torch.from_numpy(random_bytes(49, 3, 6, 7))
    padded = F.pad(images, (3, 3, 3, 3))
    steps = torch.arange(7)
    many = torch.cartesian_prod(steps, steps)
    numbers = torch.cat([(many + 0.5) / 7, torch.full((49, 1), 0.9)], 1)
    moved = shifted(images, numbers, 3, flip=False)
    for at, (down, across) in enumerate(many.tolist()):
        assert torch.equal(moved[at], padded[at, :, down : down + 6, across : across + 7])
    assert torch.equal(shifted(images, numbers * 0 + 0.5, 3, flip=True), images)
    assert torch.equal(shifted(images, numbers * 0 + 0.5, 0, flip=False), images)
    mirrored = shifted(images, torch.tensor([[0.5, 0.5, 0.1]]).expand(49, 3), 3, flip=True)
    assert torch.equal(mirrored, images.flip(-1))


def test_erased_rectangles_have_every_place_and_size():
    numbers = draws(0, 0, range(3000), 4)
    gone = erased(torch.ones(3000, 2, 10, 20), numbers, 0.5) == 0
    assert torch.equal(gone[:, 0], gone[:, 1])
    rows, columns = gone[:, 0].any(2), gone[:, 0].any(1)
    assert torch.equal(gone[:, 0], rows[:, :, None] & columns[:, None])
    assert rows.sum(1).max() == 5
    assert columns.sum(1).max() == 10
    assert rows.any(0).all()
    assert columns.any(0).all()
    assert ((rows.int().diff(dim=1).abs().sum(1)) <= 2).all()
    assert not (erased(torch.ones(9, 1, 8, 8), numbers[:9] * 0, 1.0) == 0).any()


def tiny(count: int = 24, mirrored: bool = False) -> Images:
    pictures = torch.from_numpy(random_bytes(count, 1, 8, 8))
    labels = torch.arange(count) % 3
    return Images(
        name="tiny",
        train=Split(pictures, labels),
        validation=Split(pictures[10:], labels[10:]),
        test=Split(pictures[:10], labels[:10]),
        class_names=("a", "b", "c"),
        mirrored=mirrored,
    )


def make(images: Images | None = None, seed: int = 1, **options) -> Vision:
    small = Options(**{"patch_size": 4, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,), **options})
    data = images or tiny()
    torch.manual_seed(seed)
    return Vision(vision._model(small, data, Path(), seed), data, small, seed)


@pytest.mark.parametrize("options", [{}, {"mixup": 0.4, "erase": 0.5}])
def test_an_example_does_not_know_its_neighbours(options):
    task = make(tiny(mirrored=True), **options)
    whole = task.batch([4, 9, 2, 7], epoch=3)
    for at, index in enumerate([4, 9, 2, 7]):
        alone = task.batch([index], epoch=3)
        assert alone.keys() == whole.keys()
        assert all(torch.equal(alone[name][0], whole[name][at]) for name in whole)
    assert not torch.equal(task.batch([4], epoch=4)["draws"], whole["draws"][:1])
    assert not torch.equal(make(seed=2).batch([4], epoch=3)["draws"][:, :9], whole["draws"][:1, :9])


def test_totals_are_sums_of_what_the_formula_says():
    task = make(label_smoothing=0.2, shift=1)
    model, batch = task.model.double().eval(), task.batch([0, 5, 6], epoch=0)
    assert task.counts(batch) == {"classes": 3}
    images = pixels(shifted(batch["images"], batch["draws"][:, 2:5], 1, flip=False), torch.float64)
    logs = model(images).log_softmax(-1)
    target = 0.8 * F.one_hot(batch["labels"], 3).double() + 0.2 / 3
    assert task.totals(model, batch)["classes"].item() == pytest.approx(-(target * logs).sum().item(), abs=1e-12)
    apart = sum(task.totals(model, task.batch([index], epoch=0))["classes"].item() for index in (0, 5, 6))
    assert task.totals(model, batch)["classes"].item() == pytest.approx(apart, abs=1e-10)


def test_mixup_mixes_images_and_targets_alike():
    task = make(mixup=0.5, shift=0, label_smoothing=0.0)
    model, batch = task.model.double().eval(), task.batch([0, 5, 6], epoch=0)
    partners = (batch["draws"][:, 0] * 24).long()
    assert torch.equal(batch["other images"], task.images.train.images[partners])
    assert torch.equal(batch["other labels"], task.images.train.labels[partners])
    share = batch["draws"][:, 1].double() * 0.5
    assert share.max() <= 0.5
    both = pixels(batch["images"], torch.float64), pixels(batch["other images"], torch.float64)
    logits = model(both[0] + share[:, None, None, None] * (both[1] - both[0]))
    targets = F.one_hot(batch["labels"], 3) * (1 - share[:, None])
    targets = targets + F.one_hot(batch["other labels"], 3) * share[:, None]
    expected = -(targets * logits.log_softmax(-1)).sum()
    assert task.totals(model, batch)["classes"].item() == pytest.approx(expected.item(), abs=1e-6)


def test_images_are_mirrored_where_that_is_known_to_be_right():
    for images, flip, expected in ((tiny(), None, False), (tiny(mirrored=True), None, True), (tiny(), True, True)):
        assert make(images, flip=flip).flip is expected
    assert not make(tiny(mirrored=True), flip=False).flip


def test_evaluation_is_over_all_test_images(monkeypatch):
    task = make()
    model = task.model.eval()
    with torch.no_grad():
        logits = model(pixels(task.images.test.images))
    labels = task.images.test.labels
    monkeypatch.setattr(vision, "TESTED", 4)
    results = task.test(model)
    assert task.evaluate(model) != results
    assert results["accuracy"] == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert results["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-6)
    assert len(task.samples(model)) == 6
    assert task.samples(model)[0].startswith("b: classified as ")
    assert "24 training images of 8×8 pixels, 14 to validate with, 10 test images" in task.card().data
    assert task.watched[0] in results


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_a_task_is_the_same_again(model, monkeypatch):
    monkeypatch.setattr(vision, "TRAIN_GLYPHS", 300)
    shape = {"patch_size": 7, "embedding_dim": 8, "num_heads": 1, "num_layers": (1,), "model": model}
    first, second = (build(Options(**shape), Path("unused"), seed=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.images.train, second.images.train, strict=True))
    other = build(Options(**shape), Path("unused"), seed=5)
    assert not torch.equal(first.images.train.images, other.images.train.images)
    assert first.model.config.class_names == tuple(CHARACTERS)
    assert len(first.sizes()) == len(first.images.train.labels) == 300
    assert first.sizes()[0] == {"vit": 17, "davit": 16}[model]


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_both_models_learn(model, tmp_path):
    folder = write_idx(tmp_path, train=60, test=12, side=12, classes=3)
    images = random_bytes(60, 12, 12)
    for label in range(3):
        images[label::3, 4 * label : 4 * label + 4] //= 8
    (folder / IDX[0]).write_bytes(idx(images))
    (folder / IDX[2]).write_bytes(idx(images[:12]))
    options = Options(
        data=str(folder),
        model=model,
        patch_size=4,
        embedding_dim=16,
        num_heads=2,
        num_layers=(1, 1) if model == "davit" else (2,),
        shift=0,
    )
    task = build(options, tmp_path, seed=0)
    task.images = replace(task.images, validation=task.images.train)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=3e-3)
    before = task.evaluate(task.model.eval())["loss"]
    task.model.train()
    for epoch in range(40):
        batch = task.batch(range(len(task.sizes())), epoch)
        (task.totals(task.model, batch)["classes"] / 60).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = task.evaluate(task.model.eval())
    assert results["accuracy"] == 1
    assert results["loss"] < before / 2


def test_options_become_the_models_config():
    images = replace(tiny(), train=Split(torch.zeros(4, 3, 28, 28, dtype=torch.uint8), torch.arange(4) % 3))
    options = Options(
        patch_size=7,
        embedding_dim=24,
        num_heads=4,
        num_kv_heads=2,
        num_layers=(3,),
        window_radius=1,
        mechanism="quadratic",
        head="mlp",
    )
    config = options.config(images)
    assert config == rg.VisionConfig(
        image_size=(28, 28), patch_size=7, num_channels=3, embedding_dim=24, num_layers=3, num_heads=4, num_kv_heads=2,
        window_radius=1, mechanism="quadratic", head="mlp", num_classes=3, class_names=("a", "b", "c"),
    )  # fmt: skip
    assert rg.VisionTransformer(config)(torch.zeros(2, 3, 28, 28)).shape == (2, 3)
    config = Options(
        model="davit", patch_size=2, embedding_dim=8, num_heads=2, num_layers=(1, 2, 1), window_size=5, dropout=0.1
    ).config(images)
    assert (config.embedding_dim, config.num_heads, config.num_layers) == ((8, 16, 32), (2, 4, 8), (1, 2, 1))
    assert (config.window_size, config.dropout) == (5, 0.1)
    assert [features.shape[-1] for features in rg.DaViT(config).features(torch.zeros(1, 3, 28, 28))] == [14, 7, 4]


BAD = {
    "model": ({"model": "resnet"}, "model: expected vit or davit, got 'resnet'"),
    "head": ({"head": "deep"}, "head: expected linear or mlp, got 'deep'"),
    "patch_size": ({"patch_size": 0}, "patch_size: expected at least 1, got 0"),
    "window": ({"window_radius": 0}, "window_radius: expected at least 1, got 0"),
    "a ViT's side": ({"window_size": 3}, "window_size: expected none for a ViT, got 3"),
    "a DaViT's radius": ({"model": "davit", "window_radius": 3}, "window_radius: expected none for a DaViT, got 3"),
    "num_layers": ({"num_layers": (2, 0)}, "num_layers: expected numbers of at least 1, like 4 or 1,2,1, got 2,0"),
    "no layers": ({"num_layers": (0,)}, "num_layers: expected numbers of at least 1"),
    "stages": ({"num_layers": (1, 2)}, "num_layers: expected one number for a ViT, got 1,2"),
    "dropout": ({"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
    "smoothing": ({"label_smoothing": -0.1}, "label_smoothing: expected at least 0 and below 1"),
    "erase": ({"erase": 1.5}, "erase: expected 0 to 1.0, got 1.5"),
    "mixup": ({"mixup": 0.6}, "mixup: expected 0 to 0.5, got 0.6"),
    "shift": ({"shift": -1}, "shift: expected at least 0, got -1"),
    "mechanism": ({"mechanism": "magic"}, "mechanism: expected one of"),
    "size": ({"size": 32, "data": "somewhere"}, "size: expected none with data"),
    "patch of a glyph": ({"patch_size": 5}, "patch_size: expected a divisor of the images' sides, 28 and 28, got 5"),
    "small": ({"size": 4}, "size: expected at least 8, got 4"),
    "davit's head": ({"model": "davit", "head": "mlp"}, "head: expected linear for a DaViT, got mlp"),
    "davit's kv": ({"model": "davit", "num_kv_heads": 1}, "num_kv_heads: expected none for a DaViT, got 1"),
    "tuned head": ({"start": "run", "head": "mlp"}, "head: expected linear for fine-tuning, got mlp"),
    "tuned width": ({"start": "run", "embedding_dim": 8}, "embedding_dim: expected none when fine-tuning a model"),
}


@pytest.mark.parametrize(("side", "patch_size"), [(16, 4), (32, 4), (28, 7), (30, 6), (13, 1), (96, 6)])
def test_pictures_of_any_size_have_a_patch(side, patch_size, tmp_path):
    task = build(Options(data=str(write_idx(tmp_path / "data", side=side))), tmp_path, seed=0)
    assert task.model.config.patch_size == patch_size
    assert task.model.eval()(torch.zeros(2, 1, side, side)).shape == (2, 3)


@pytest.mark.parametrize("name", BAD)
def test_bad_options_say_so(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_every_option_has_a_sentence():
    assert all(field.metadata["help"].endswith(".") for field in fields(Options))


def test_options_that_do_not_fit_the_images_say_so(tmp_path):
    write_idx(tmp_path)
    with pytest.raises(ValueError, match="patch_size: expected a divisor of the images' sides, 8 and 8, got 3"):
        build(Options(data=str(tmp_path), patch_size=3), tmp_path, 0)
    with pytest.raises(ValueError, match=r"window_radius: expected none with Channel"):
        build(Options(data=str(tmp_path), patch_size=4, window_radius=1, mechanism="channel"), tmp_path, 0)


@pytest.mark.parametrize("model", ["vit", "davit"])
def test_fine_tuning_starts_from_what_was_learned(model, tmp_path):
    shape = {"patch_size": 4, "embedding_dim": 16, "num_heads": 2, "num_layers": (1,), "model": model}
    first = make(head="mlp" if model == "vit" else "linear", **shape)
    start = str(rg.save(first.model, tmp_path / "first"))
    data = write_idx(tmp_path / "data", side=8 if model == "davit" else 12, classes=5)
    task = build(Options(data=str(data), start=start, dropout=0.1), tmp_path, seed=0)
    config = task.model.config
    assert (config.num_classes, config.class_names, config.dropout) == (5, ("0", "1", "2", "3", "4"), 0.1)
    before, after = first.model.state_dict(), task.model.state_dict()
    kept = [name for name in after if not name.startswith("head") and name != "positions"]
    assert len(kept) > 10
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert not after["head.weight"].any()
    assert "hidden.weight" not in after
    assert task.totals(task.model.train(), task.batch(range(6), 0))["classes"].item() == pytest.approx(6 * np.log(5))
    other = build(Options(data=str(data), start=start, mechanism="elu"), tmp_path / "other", seed=0)
    assert other.model.config.mechanism == rg.Elu()


def test_a_start_that_does_not_fit_says_so(tmp_path):
    data = write_pictures(tmp_path / "data", {"cat": 3, "dog": 3}, mode="RGB")
    start = rg.save(make().model, tmp_path / "grey")
    with pytest.raises(ValueError, match=r"from: expected a model for images of 3 channels, as data has, got .*for 1"):
        build(Options(data=str(data), start=str(start)), tmp_path, 0)
    decoder = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="from: expected a model of images, got Decoder"):
        build(Options(data=str(data), start=str(rg.save(decoder, tmp_path / "text"))), tmp_path / "other", 0)


SIZES = {
    "image_size": (12, 20),
    "patch_size": 4,
    "embedding_dim": 16,
    "num_layers": 1,
    "num_heads": 4,
    "num_classes": 3,
}


def test_a_windowed_vit_sees_its_neighbours_and_the_class_token_everything():
    near = rg.VisionTransformer(rg.VisionConfig(**SIZES, window_radius=1)).eval()
    whole = rg.VisionTransformer(rg.VisionConfig(**SIZES)).eval()
    whole.load_state_dict(near.state_dict())
    images = torch.randn(1, 3, 12, 20)
    changed = images.clone()
    changed[:, :, :4, :4] += 1
    with torch.no_grad():
        moved = (near.features(images) != near.features(changed)).any(-1)[0]
        assert moved[0]
        assert moved[1:].view(3, 5).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        by_hand = whole.features(images, local((3, 5), 1, torch.device("cpu")))
        assert torch.equal(near.features(images), by_hand)
        assert (near.features(images) - whole.features(images)).abs().max() > 1e-4
        wide = rg.VisionTransformer(rg.VisionConfig(**SIZES, window_radius=4)).eval()
        wide.load_state_dict(near.state_dict())
        torch.testing.assert_close(wide(images), whole(images))
        # A mask of the caller's is added, and a resized model has the window on its own grid.
        blind = rg.dense((torch.arange(16) == 0)[None])
        assert torch.equal(near.features(images, blind), whole.features(images, blind))
        assert near.resized((8, 8))(images[:, :, :8, :8]).isfinite().all()


def test_a_windowed_vit_comes_back_from_its_file(tmp_path):
    model = rg.VisionTransformer(
        rg.VisionConfig(**SIZES, window_radius=1, num_kv_heads=2, class_names=("x", "y", "z"))
    ).eval()
    back, images = rg.load(rg.save(model, tmp_path / "model")), torch.randn(2, 3, 12, 20)
    assert back.config == model.config
    with torch.no_grad():
        assert torch.equal(back(images), model(images))
    with pytest.raises(ValueError, match=r"huggingface|form"):
        rg.save(model, tmp_path / "theirs", layout="huggingface")


def test_class_names_go_to_hugging_faces_config_and_back(tmp_path):
    model = rg.VisionTransformer(rg.VisionConfig(**SIZES, class_names=("x", "y", "z")))
    folder = rg.save(model, tmp_path / "theirs", layout="huggingface")
    assert json.loads((folder / "config.json").read_text())["id2label"] == {"0": "x", "1": "y", "2": "z"}
    assert rg.load(folder).config.class_names == ("x", "y", "z")
    plain = rg.save(rg.VisionTransformer(rg.VisionConfig(**SIZES)), tmp_path / "plain", layout="huggingface")
    assert rg.load(plain).config.class_names == ()


def test_configs_check_names_and_windows():
    for config in (rg.VisionConfig(**SIZES), rg.DaViTConfig(num_classes=3)):
        with pytest.raises(ValueError, match="class_names: expected 3, one per class, or none, got 2"):
            replace(config, class_names=("x", "y"))
        with pytest.raises(ValueError, match="class_names: expected tuple"):
            replace(config, class_names=(1, 2, 3))
        named = replace(config, class_names=("x", "y", "z"))
        assert type(config).from_json(json.loads(json.dumps(named.to_json()))) == named
    for radius in (0, 1.5):
        with pytest.raises(ValueError, match="window_radius: expected"):
            rg.VisionConfig(**SIZES, window_radius=radius)
    with pytest.raises(ValueError, match="window_radius: expected none with Channel"):
        rg.VisionConfig(**SIZES, window_radius=1, mechanism="channel")


def test_a_davit_for_other_classes_begins_at_zero():
    config = rg.DaViTConfig(embedding_dim=(8, 16, 32, 32), num_heads=(1, 2, 4, 4), num_groups=(1, 2, 4, 4))
    model = rg.DaViT(config)
    tuned = model.with_classes(2, ("x", "y"))
    assert tuned.config == replace(config, num_classes=2, class_names=("x", "y"))
    assert tuned(torch.randn(1, 3, 32, 32)).tolist() == [[0.0, 0.0]]
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 1000)
    assert tuned.with_classes(0).head is None
    assert rg.DaViT(tuned.config).load_state_dict(tuned.state_dict())
