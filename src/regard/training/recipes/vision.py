"""Image classification: a ViT or a DaViT, on rendered letters and digits, IDX files, CIFAR-10 or folders of pictures.

    loss = Σ over images of  -Σ over classes of  target · log p      target: 1 - ε for the class, and ε spread over all

An example is an image and some random numbers. Images are shifted, mirrored, erased and mixed on the model's device, a
whole batch at once.

Pre-training may use a head with a hidden layer (`head="mlp"`); fine-tuning starts from a run or a checkpoint (`start`)
and replaces the head by one linear layer, which is initialised to 0 (Dosovitskiy et al. 2020).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from regard.checkpoints import resolve
from regard.core.mechanisms.text import CHOICES, from_text, lookup
from regard.models.base import ImageModel, Model, expect
from regard.models.davit import DaViTConfig
from regard.models.registry import build as build_model
from regard.models.vision import VisionConfig
from regard.training.batches import Integers
from regard.training.data.draws import draws
from regard.training.data.glyphs import CHARACTERS, glyphs
from regard.training.data.images import Images, Split, pixels, read_images, read_test
from regard.training.divided import divided
from regard.training.fingerprint import digest
from regard.training.initial import initial
from regard.training.recipes.started import Started, adapt_started, started
from regard.training.settings import Settings, option
from regard.training.task import Batch, Card, Task, Totals


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. For a DaViT these are the sizes of its first stage, and the layers of each stage."""

    patch_size: int | None
    """None: by the size of the images."""
    embedding_dim: int
    num_layers: tuple[int, ...]
    num_heads: int


SHAPES = {"vit": Shape(None, 96, (4,), 3), "davit": Shape(4, 32, (1, 1), 1)}
"""The default sizes."""
WINDOWS = ("window_radius", "window_size")
FIXED = ("model", "patch_size", "embedding_dim", "num_layers", "num_heads", "num_kv_heads", *WINDOWS)
"""Options that fine-tuning refuses: the model that it starts from determines them."""
PATCH, PATCHES = 7, 256
"""The largest default patch, unless there would be more patches than this."""
TRAIN_GLYPHS, TEST_GLYPHS = 20_000, 2_000
GLYPH_SIZE = 28
TESTED = 500
"""Images per batch of an evaluation."""
SHOWN = 6
"""Validation images that are printed with their class after an evaluation."""
CHANGES = 7
"""Random numbers per image: shift down, shift across, mirroring, and height, width, top and left of the erased part."""


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The images, the model, and how images are augmented.

    >>> from regard.training.recipes.vision import Options
    >>> Options(model="davit", num_layers=(1, 2)).shape
    Shape(patch_size=4, embedding_dim=32, num_layers=(1, 2), num_heads=1)
    """

    data: str | None = option(
        None, "A folder: IDX files (MNIST, Fashion-MNIST), CIFAR-10, or pictures by class. Rendered glyphs if none."
    )
    validation_data: str | None = option(
        None, "A folder of images, as for --data, that choose the best model; part of --data if not given."
    )
    test_data: str | None = option(
        None, "A folder of images to measure the best model with, at the end; the test set of --data, or part of it."
    )
    size: int | None = option(None, f"Side of a rendered glyph's image; {GLYPH_SIZE} if not given.")
    start: str | None = option(None, "A run or a checkpoint to fine-tune: its model, with a new head.")
    model: Literal["vit", "davit"] | None = option(None, "vit or davit; vit if not given.")
    head: Literal["linear", "mlp"] = option(
        "linear", "The head of a ViT: linear, or for pre-training mlp, with a hidden layer."
    )
    patch_size: int | None = option(
        None,
        "Side of a patch in pixels; if not given, the largest up to "
        f"{PATCH} that divides the images, or the smallest with at most {PATCHES} patches. For a DaViT the stride of "
        "its first stage, 4 if not given.",
    )
    embedding_dim: int | None = option(
        None, "Embedding dimension; for a DaViT that of its first stage, doubled at each further stage."
    )
    num_layers: tuple[int, ...] | None = option(None, "Layers; for a DaViT those of each stage, like 1,2,1.")
    num_heads: int | None = option(
        None, "Attention heads; for a DaViT those of its first stage, doubled at each further stage."
    )
    num_kv_heads: int | None = option(
        None, "A ViT's key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    window_radius: int | None = option(
        None, "A ViT's: how many patches away a patch sees others, down and across; all if not given."
    )
    window_size: int | None = option(None, "A DaViT's: tokens of a window's side; 7 if not given.")
    mechanism: str | None = option(None, f"Attention, one of {CHOICES}. Softmax if not given.")
    dropout: float = option(0.0, "Dropout of each sub-layer's output in training.")
    label_smoothing: float = option(0.1, "Share of the target probability that is spread over all classes.")
    shift: int = option(1, "Largest shift of an image in pixels, down and across.")
    flip: bool | None = option(None, "Mirror half of the images; if not given, only for Fashion-MNIST and CIFAR-10.")
    erase: float = option(0.0, "Largest side of an erased rectangle, as a fraction of the image's side.")
    mixup: float = option(0.0, "Largest share of another image that is mixed in.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("model", (None, *SHAPES)), ("head", ("linear", "mlp"))):
            if (value := getattr(self, name)) not in choices:
                raise ValueError(f"{name}: expected {' or '.join(filter(None, choices))}, got {value!r}")
        for name in ("patch_size", "embedding_dim", "num_heads", "num_kv_heads", *WINDOWS):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        if self.num_layers is not None and (not self.num_layers or min(self.num_layers) < 1):
            raise ValueError(
                f"num_layers: expected numbers of at least 1, like 4 or 1,2,1, got {_text(self.num_layers)}"
            )
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 0 and below 1, got {getattr(self, name)}")
        for name, most in (("erase", 1.0), ("mixup", 0.5)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}: expected 0 to {most}, got {getattr(self, name)}")
        if self.shift < 0:
            raise ValueError(f"shift: expected at least 0, got {self.shift}")
        if self.mechanism is not None:
            lookup(self.mechanism)
        if self.data is not None and self.size is not None:
            raise ValueError(f"size: expected none with data, whose images have a size, got {self.size}")
        if self.size is not None and self.size < 8:
            raise ValueError(f"size: expected at least 8, got {self.size}")
        self._check_kind()
        if self.data is None and self.start is None:
            side = self.size or GLYPH_SIZE
            self._check_patch(side, side)

    def _check_patch(self, high: int, wide: int) -> None:
        size = self.patch_size
        if size is not None and self.model != "davit" and (high % size or wide % size):
            raise ValueError(f"patch_size: expected a divisor of the images' sides, {high} and {wide}, got {size}")

    def _check_kind(self) -> None:
        if self.start is not None:
            for name in FIXED:
                if (value := getattr(self, name)) is not None:
                    raise ValueError(
                        f"{name}: expected none when fine-tuning a model, which determines it, got {value}"
                    )
        if self.head == "mlp" and (self.start is not None or self.model == "davit"):
            who = "a DaViT" if self.model == "davit" else "fine-tuning"
            raise ValueError(f"head: expected linear for {who}, got mlp")
        kind = "DaViT" if self.model == "davit" else "ViT"
        for name in ("num_kv_heads", "window_radius") if kind == "DaViT" else ("window_size",):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}: expected none for a {kind}, got {value}")
        if self.model != "davit" and len(self.shape.num_layers) != 1:
            raise ValueError(f"num_layers: expected one number for a ViT, got {_text(self.shape.num_layers)}")

    @property
    def shape(self) -> Shape:
        """The sizes of the model, with defaults for those that are not given."""
        values = {field.name: getattr(self, field.name) for field in fields(Shape)}
        return replace(
            SHAPES[self.model or "vit"], **{name: value for name, value in values.items() if value is not None}
        )

    def config(self, images: Images) -> VisionConfig | DaViTConfig:
        """The model's config for these images."""
        shape, sides = self.shape, _sides(images)
        self._check_patch(*sides)
        shared: dict[str, Any] = {
            "num_channels": images.train.images.shape[1],
            "num_classes": len(images.class_names),
            "class_names": images.class_names,
            "mechanism": from_text(self.mechanism or "softmax"),
            "dropout": self.dropout,
        }
        if self.model != "davit":
            return VisionConfig(
                image_size=sides,
                patch_size=shape.patch_size or default_patch(*sides),
                embedding_dim=shape.embedding_dim,
                num_layers=shape.num_layers[0],
                num_heads=shape.num_heads,
                num_kv_heads=self.num_kv_heads,
                window_radius=self.window_radius,
                head=self.head,
                **shared,
            )
        assert shape.patch_size is not None
        stages = len(shape.num_layers)
        further = stages - 1
        kernel = max(3, 2 * shape.patch_size - 1)
        heads = tuple(shape.num_heads * 2**stage for stage in range(stages))
        return DaViTConfig(
            embedding_dim=tuple(shape.embedding_dim * 2**stage for stage in range(stages)),
            num_layers=shape.num_layers,
            num_heads=heads,
            num_groups=heads,
            patch_size=(kernel, *[3] * further),
            patch_stride=(shape.patch_size, *[2] * further),
            patch_padding=(kernel // 2, *[1] * further),
            norm_first=(False, *[True] * further),
            window_size=self.window_size or 7,
            **shared,
        )


def default_patch(high: int, wide: int) -> int:
    """The side of a patch for images of this size: the largest up to `PATCH` that divides both sides, or the smallest
    with at most `PATCHES` patches.

    >>> from regard.training.recipes.vision import default_patch
    >>> [default_patch(side, side) for side in (8, 16, 28, 32, 64, 224)]
    [4, 4, 7, 4, 4, 14]
    """
    divisors = [size for size in range(1, max(1, min(high, wide) // 2) + 1) if high % size == wide % size == 0]
    small = max(size for size in divisors if size <= PATCH)
    return next((size for size in divisors if size >= small and high * wide <= PATCHES * size * size), small)


def _text(numbers: Sequence[int]) -> str:
    """Numbers as typed on the command line: 1,2,1."""
    return ",".join(map(str, numbers))


def settings() -> Settings:
    """Defaults that learn rendered glyphs in minutes on two cores.

    >>> from regard.training.recipes import vision
    >>> vision.settings().batch_size
    64
    """
    return Settings(steps=4000, batch_size=64, learning_rate=1e-3, warmup=100, weight_decay=0.05)


def build(options: Options, folder: Path, seed: int) -> "Vision":
    """The task: images, and a model for them.

    >>> from pathlib import Path
    >>> from regard.training.recipes import vision
    >>> task = vision.build(vision.Options(embedding_dim=16, num_heads=2, num_layers=(1,)), Path(), seed=0)
    >>> sorted((name, tuple(tensor.shape)) for name, tensor in task.batch([3, 5], epoch=0).items())
    [('draws', (2, 9)), ('images', (2, 1, 28, 28)), ('labels', (2,))]
    """
    if options.start is not None and not (folder / "start").is_dir():
        resolve(options.start)  # fail before reading images, which takes seconds
    others = [None if path is None else Path(path) for path in (options.validation_data, options.test_data)]
    images = _rendered(options, seed, *others) if options.data is None else read_images(Path(options.data), *others)
    torch.manual_seed(seed)
    return Vision(_model(options, images, folder, seed), images, options, seed)


class Vision(Task):
    """Images, and the model that learns their classes."""

    name: ClassVar[str] = "vision"
    watched: ClassVar[tuple[str, Literal["least", "most"]]] = ("accuracy", "most")
    model: ImageModel

    def __init__(self, model: ImageModel, images: Images, options: Options, seed: int) -> None:
        self.model, self.images, self.options, self.seed = model, images, options, seed
        self.label_smoothing = options.label_smoothing
        self.flip = images.mirrored if options.flip is None else options.flip

    def sizes(self) -> Integers:
        high, wide = _sides(self.images)
        return np.broadcast_to(np.int64(self.model.num_tokens(high, wide)), len(self.images.train.labels))

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        picked, (images, labels) = torch.tensor(indices), self.images.train
        count = 2 + (2 if self.options.mixup else 1) * CHANGES
        numbers = torch.from_numpy(draws(self.seed, epoch, indices, count)).float()
        batch = {"images": images[picked], "labels": labels[picked], "draws": numbers}
        if self.options.mixup:
            others = (numbers[:, 0] * len(labels)).long()
            batch |= {"other images": images[others], "other labels": labels[others]}
        return batch

    def fingerprint(self) -> str:
        images = self.images
        return digest(images.class_names, *images.train, *images.validation, *images.test)

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"classes": len(batch["labels"])}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        numbers, share = batch["draws"], batch["draws"][:, 1] * self.options.mixup
        images = self._changed(batch["images"], numbers[:, 2 : 2 + CHANGES])
        if "other images" in batch:
            others = self._changed(batch["other images"], numbers[:, 2 + CHANGES :])
            images = torch.lerp(images, others, share[:, None, None, None].to(images.dtype))
        logits = model(images)
        losses = self._losses(logits, batch["labels"])
        if "other labels" in batch:
            losses = torch.lerp(losses, self._losses(logits, batch["other labels"]), share.to(losses.dtype))
        return {"classes": losses.sum()}

    def _changed(self, images: UInt8[Tensor, "B C Y X"], numbers: Float[Tensor, "B D"]) -> Float[Tensor, "B C Y X"]:
        options = self.options
        moved = shifted(images, numbers[:, :3], options.shift, self.flip)
        bright = pixels(moved, self.model.dtype)
        return erased(bright, numbers[:, 3:], options.erase) if options.erase else bright

    def _losses(self, logits: Float[Tensor, "B D"], labels: Int64[Tensor, "B"]) -> Float[Tensor, "B"]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, labels, reduction="none", label_smoothing=self.label_smoothing)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Accuracy and loss on all validation images."""
        return self._results(model, self.images.validation)

    def test(self, model: Model) -> dict[str, float]:
        """The same of all test images."""
        return self._results(model, self.images.test) if len(self.images.test.labels) else {}

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all images of folders: of their test sets, if they have some."""
        images = self.images
        parts = [read_test(Path(path), images.class_names, images.train.images) for path in paths]
        return self._results(model, Split(*map(torch.cat, zip(*parts, strict=True))))

    def _results(self, model: Model, split: Split) -> dict[str, float]:
        images, labels = split

        def sums(low: int) -> tuple[int, float]:
            truth = labels[low : low + TESTED].to(model.device)
            logits = self._logits(model, images[low : low + TESTED])
            return int((logits.argmax(-1) == truth).sum()), float(F.cross_entropy(logits, truth, reduction="sum"))

        rights, losses = zip(*divided(sums, range(0, len(labels), TESTED)), strict=True)
        return {"accuracy": sum(rights) / len(labels), "loss": sum(losses) / len(labels)}

    def samples(self, model: Model) -> list[str]:
        images, labels = self.images.validation
        guesses = self._logits(model, images[:SHOWN]).softmax(-1).max(-1)
        names = self.images.class_names
        return [
            f"{names[truth]}: classified as {names[guess]} ({sure:.0%})"
            for truth, guess, sure in zip(
                labels[:SHOWN].tolist(), guesses.indices.tolist(), guesses.values.tolist(), strict=True
            )
        ]

    def _logits(self, model: Model, images: UInt8[Tensor, "B C Y X"]) -> Float[Tensor, "B D"]:
        with torch.no_grad():
            return model(pixels(images.to(model.device), model.dtype)).double()

    def card(self) -> Card:
        high, wide = _sides(self.images)
        train, validation, test = (
            f"{len(split.labels):,}" for split in (self.images.train, self.images.validation, self.images.test)
        )
        names = self.images.class_names
        return Card(
            data=f"{self.images.name}: {train} training images of {high}×{wide} pixels, {validation} to validate with, "
            f"{test} test images.",
            use=f"Classifies images into {len(names)} classes: {', '.join(names)[:300]}. Pixels are from -1 to 1.",
        )


def shifted(
    images: UInt8[Tensor, "B C Y X"], numbers: Float[Tensor, "B 3"], most: int, flip: bool
) -> UInt8[Tensor, "B C Y X"]:
    """Images shifted by up to `most` pixels down and across, with black borders, and, with `flip`, mirrored if their
    third number is below 1/2.

    >>> import torch
    >>> from regard.training.recipes.vision import shifted
    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> shifted(image, torch.tensor([[0.5, 0.9, 0.1]]), 1, flip=True).tolist()
    [[[[1, 0], [3, 0]]]]
    """
    (high, wide), places = images.shape[2:], images.device
    down, across = ((numbers[:, :2] * (2 * most + 1)).long() - most).unbind(1)
    rows = torch.arange(high, device=places) + down[:, None]
    columns = torch.arange(wide, device=places) + across[:, None]
    inside = ((rows >= 0) & (rows < high))[:, None, :, None] & ((columns >= 0) & (columns < wide))[:, None, None, :]
    rows, columns = rows.clamp(0, high - 1), columns.clamp(0, wide - 1)
    if flip:
        columns = torch.where(numbers[:, 2:] < 0.5, wide - 1 - columns, columns)
    batch = torch.arange(len(images), device=places)[:, None, None, None]
    channels = torch.arange(images.shape[1], device=places)[:, None, None]
    return images[batch, channels, rows[:, None, :, None], columns[:, None, None, :]] * inside


def erased(images: Float[Tensor, "B C Y X"], numbers: Float[Tensor, "B 4"], most: float) -> Float[Tensor, "B C Y X"]:
    """Images with a grey rectangle somewhere, whose sides are 0 to `most` times those of the image.

    >>> import torch
    >>> from regard.training.recipes.vision import erased
    >>> erased(torch.ones(1, 1, 2, 4), torch.tensor([[0.5, 0.5, 0.99, 0.99]]), 1.0).tolist()
    [[[[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]]]
    """
    down = _stretch(images.shape[2], numbers[:, 0] * most, numbers[:, 2])
    across = _stretch(images.shape[3], numbers[:, 1] * most, numbers[:, 3])
    return images.masked_fill(down[:, None, :, None] & across[:, None, None, :], 0)


def _stretch(side: int, share: Float[Tensor, "B"], place: Float[Tensor, "B"]) -> Bool[Tensor, "B N"]:
    """Which pixels of a side are in a stretch of `share` of it; `place` is 0 at its beginning, 1 at its end."""
    first = place * (1 - share) * side
    pixel = torch.arange(side, device=share.device)
    return (pixel >= first.round()[:, None]) & (pixel < (first + share * side).round()[:, None])


def _rendered(options: Options, seed: int, validation: Path | None, test: Path | None) -> Images:
    size, names = options.size or GLYPH_SIZE, tuple(CHARACTERS)
    train = glyphs("train", TRAIN_GLYPHS, size=size, seed=seed)

    def others(path: Path | None, part: Literal["validation", "test"]) -> Split:
        if path is not None:
            return read_test(path, names, train.images)
        return glyphs(part, TEST_GLYPHS, size=size, seed=seed)

    return Images(
        name="letters and digits in matplotlib's typefaces, some of them held out",
        train=train,
        validation=others(validation, "validation"),
        test=others(test, "test"),
        class_names=names,
    )


def _model(options: Options, images: Images, folder: Path, seed: int) -> ImageModel:
    if options.start is None:
        config = options.config(images)
        return expect(ImageModel, initial(lambda: build_model(config), seed))
    source = started(ImageModel, options.start, options.mechanism, folder)
    channels = images.train.images.shape[1]
    if source.config.num_channels != channels:
        raise ValueError(
            f"from: expected a model for images of {channels} channels, as {images.name} has, "
            f"got {options.start}, which is for {source.config.num_channels}"
        )
    base = source.state_dict()
    source = source.resized(_sides(images)).with_classes(len(images.class_names), images.class_names)
    # Dropout is an option of this run and part of the config, so the model is built again with it.
    model = type(source)(replace(source.config, dropout=options.dropout))
    model.load_state_dict(source.state_dict(), assign=True)
    adapt_started(model, options, base, seed)
    return model


def _sides(images: Images) -> tuple[int, int]:
    return images.train.images.shape[2], images.train.images.shape[3]
