"""The Vision Transformer: an image is a sequence of patches, read by a pre-norm encoder.

    x      = [class token, patches(image)] + positions        patches: a convolution whose stride is its kernel
    x      = x + attention(norm(x));  x = x + network(norm(x))          for each layer
    logits = head(norm(x) of the class token)                 linear, or linear(tanh(linear(·))) in pre-training

Positions are learned, one per patch in reading order; the model gets positions in no other way. For images of another
size they are interpolated on the grid of patches, and the rest of the model does not change.

With a window a patch sees the patches around it and the class token, which sees all: `window2d` on the grid, and the
class token global.

Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words".
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.eager import kept
from regard.core.masks import Mask, as_mask, dense, window2d
from regard.models.base import ImageModel, Model
from regard.models.config import ImageConfig, block_config, check_window
from regard.models.layers.attention import AnyMask, without_mechanisms
from regard.models.layers.block import Stack
from regard.models.layers.linear import Linear
from regard.models.summary import Part, Summary, products, size, stack_part

SPREAD = 0.02
"""Standard deviation of the initial class token and positions."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig(ImageConfig):
    """A Vision Transformer. Sizes are one number, or (height, width).

    >>> import regard as rg
    >>> config = rg.VisionConfig(image_size=(32, 48), patch_size=16, embedding_dim=64, num_layers=2, num_heads=4)
    >>> config.grid, config.num_patches
    ((2, 3), 6)
    """

    image_size: int | tuple[int, int] = 224
    patch_size: int | tuple[int, int] = 16
    embedding_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    """Heads of keys and values; as many as num_heads if not given."""
    window_radius: int | None = None
    """How many patches away a patch sees others, down and across; all of them if not given."""
    hidden_dim: int | None = None
    """Hidden units of the position-wise network; 4 · embedding_dim if not given."""
    head: Literal["linear", "mlp"] = "linear"
    """`mlp` has a hidden tanh layer and is used for pre-training; `linear` for fine-tuning."""
    representation_dim: int | None = None
    """Width of the MLP head's hidden layer; embedding_dim if not given."""
    positions: Literal["learned", "none"] = "learned"
    norm: str = "layer"
    norm_epsilon: float = 1e-6
    activation: str = "gelu"
    attention_bias: bool = True
    """Whether queries, keys and values have a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, allowed in (("head", ("linear", "mlp")), ("positions", ("learned", "none"))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}: expected {' or '.join(allowed)}, got {value!r}")
        image, patch = pair("image_size", self.image_size), pair("patch_size", self.patch_size)
        if any(side % part for side, part in zip(image, patch, strict=True)):
            raise ValueError(f"image_size: expected multiples of patch_size = {patch}, got {image}")
        if self.window_radius is not None and self.window_radius < 1:
            raise ValueError(f"window_radius: expected at least 1 patch, got {self.window_radius}")
        check_window("window_radius", self.window_radius, self.mechanism)

    def explicit(self) -> "VisionConfig":
        """The same config with every size filled in, also those that are computed from others by default."""
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            hidden_dim=self.hidden_dim or 4 * self.embedding_dim,
            representation_dim=self.representation_dim or self.embedding_dim if self.head == "mlp" else None,
        )

    @property
    def grid(self) -> tuple[int, int]:
        """How many patches an image has, down and across."""
        (height, width), (down, across) = pair("image_size", self.image_size), pair("patch_size", self.patch_size)
        return height // down, width // across

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]


class VisionTransformer(ImageModel):
    """A Vision Transformer: `vision(images)` gives the logits of the classes.

    >>> import regard as rg, torch
    >>> config = rg.VisionConfig(image_size=32, patch_size=8, embedding_dim=16, num_layers=2, num_heads=4)
    >>> vision = rg.VisionTransformer(config)
    >>> images = torch.randn(2, 3, 32, 32)
    >>> vision(images).shape, vision.features(images).shape
    (torch.Size([2, 1000]), torch.Size([2, 17, 16]))
    """

    noun = "a Vision Transformer"
    config: VisionConfig

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        patch, width = pair("patch_size", config.patch_size), config.embedding_dim
        self.patches = nn.Conv2d(config.num_channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        if config.positions == "learned":
            self.positions = nn.Parameter(torch.empty(1, 1 + config.num_patches, width))
        self.dropout = nn.Dropout(config.dropout)
        self.stack = Stack(block_config(config), config.num_layers)
        read = (config.representation_dim or width) if config.head == "mlp" else width
        self.hidden = Linear(width, read) if config.head == "mlp" else None
        self.head = Linear(read, config.num_classes) if config.num_classes else None
        self.initialise()

    def initialise(self, spread: float = 1.0) -> None:
        """Weights that keep the scale of activations at every width (Glorot & Bengio 2010), where they write into the
        residual stream divided by √(2·layers); a small class token and small positions. All times `spread`."""
        super().initialise(spread)
        for module in without_mechanisms(self):
            if isinstance(module, nn.Linear) and not module.weight.is_meta:
                nn.init.xavier_uniform_(module.weight, gain=spread)
        self.stack.scale_writers()
        if not (patches := self.patches.weight).is_meta:
            nn.init.normal_(patches, std=spread * patches[0].numel() ** -0.5)
        nn.init.normal_(self.class_token, std=spread * SPREAD)
        if self.config.positions == "learned":
            nn.init.normal_(self.positions, std=spread * SPREAD)

    def forward(self, images: Float[Tensor, "B C Y X"], mask: AnyMask = None) -> Float[Tensor, "B D"]:
        """Logits (B, num_classes). Without classes: the class token's features, after the MLP head's hidden layer if
        there is one. In `mask` the class token is the first token."""
        return self.predict(self.features(images, mask))

    def features(self, images: Float[Tensor, "B C Y X"], mask: AnyMask = None) -> Float[Tensor, "B T E"]:
        """The class token and the patches, row by row, after all layers and the last norm: (B, 1 + patches, E)."""
        _check_images(images, self.config)
        x = rearrange(self.patches(images), "b e y x -> b (y x) e")
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        if self.config.positions == "learned":
            x = x + self.positions
        if self.config.window_radius is not None:
            near, rule = local(self.config.grid, self.config.window_radius, x.device), as_mask(mask)
            mask = near if rule is None else near & rule
        return self.stack(self.dropout(x), mask)[0]

    def predict(self, features: Float[Tensor, "B T E"]) -> Float[Tensor, "B D"]:
        """Logits from features."""
        x = features[:, 0]
        if self.hidden is not None:
            x = torch.tanh(self.hidden(x))
        return x if self.head is None else self.head(x)

    def resized(self, image_size: int | tuple[int, int]) -> "VisionTransformer":
        """A copy for images of another size: the positions of patches are interpolated (bicubic).

        >>> import regard as rg, torch
        >>> config = rg.VisionConfig(image_size=32, patch_size=8, embedding_dim=16, num_layers=1, num_heads=4)
        >>> larger = rg.VisionTransformer(config).resized((48, 64))
        >>> larger.config.grid, larger(torch.randn(1, 3, 48, 64)).shape
        ((6, 8), torch.Size([1, 1000]))
        """
        model = deepcopy(self)
        model.config = replace(self.config, image_size=image_size)
        if self.config.positions == "learned":
            kept, patches = self.positions.detach().split([1, self.config.num_patches], dim=1)
            maps = rearrange(patches, "b (y x) e -> b e y x", y=self.config.grid[0])
            maps = F.interpolate(maps, size=model.config.grid, mode="bicubic", align_corners=False)
            both = torch.cat([kept, rearrange(maps, "b e y x -> b (y x) e")], dim=1)
            model.positions = nn.Parameter(both, requires_grad=self.positions.requires_grad)
        return model

    def with_classes(self, num_classes: int, class_names: tuple[str, ...] = ()) -> "VisionTransformer":
        """A copy to fine-tune on other classes: the head becomes one linear layer, initialised to 0.

        >>> import regard as rg, torch
        >>> shape = {"image_size": 32, "patch_size": 8, "embedding_dim": 16, "num_layers": 1, "num_heads": 4}
        >>> vision = rg.VisionTransformer(rg.VisionConfig(**shape, head="mlp"))
        >>> vision.with_classes(3)(torch.randn(1, 3, 32, 32)).tolist()
        [[0.0, 0.0, 0.0]]
        """
        model = deepcopy(self)
        model.config = replace(
            self.config, num_classes=num_classes, class_names=class_names, head="linear", representation_dim=None
        )
        model.hidden = None
        model.head = zero_head(self.config.embedding_dim, num_classes, self) if num_classes else None
        return model

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.stack.blocks)

    @property
    def token_grid(self) -> tuple[int, int] | None:
        return self.config.grid

    @property
    def image_size(self) -> tuple[int, int]:
        return pair("image_size", self.config.image_size)

    def num_tokens(self, height: int, width: int) -> int:
        """The class token and the patches."""
        return 1 + self.config.num_patches

    def summary(self, length: int | None = None) -> Summary:
        """The model in numbers; FLOPs are those of one image."""
        if length is not None:
            raise ValueError(
                f"length: expected None, since images always have image_size = {self.config.image_size}, got {length}"
            )
        high, wide = pair("image_size", self.config.image_size)
        return replace(super().summary(), length=high if high == wide else (high, wide))

    def parts(self, length: int) -> Iterator[Part]:
        """The class token and positions, the stack, patches and heads, for one image."""
        patches = self.config.num_patches
        loose = sum(parameter.numel() for _, parameter in self.named_parameters(recurse=False))
        yield Part(name="class token, positions", parameters=loose, flops=0)
        stack = stack_part("stack", self.stack, 1 + patches, self.dtype)
        yield replace(stack, flops=stack.flops * (1 + patches))
        yield Part(name="patches", parameters=size(self.patches), flops=products(self.patches) * patches)
        for name, head in (("hidden", self.hidden), ("head", self.head)):
            if head is not None:
                yield Part(name=name, parameters=size(head), flops=products(head))


@kept(64)
def local(grid: tuple[int, int], radius: int, device: torch.device) -> Mask:
    """The mask of local attention: a patch sees patches within a radius; the class token sees all and is seen by all.

    >>> import torch
    >>> from regard.models.vision import local
    >>> print(local((1, 3), 1, torch.device("cpu")).draw(4))
    ■ ■ ■ ■
    ■ ■ ■ ·
    ■ ■ ■ ■
    ■ · ■ ■
    """
    patches = grid[0] * grid[1]
    with torch.device("cpu"):  # also while a model is built on the meta device
        table = window2d(grid, radius).visible(1, 1, patches, patches)
    return dense(F.pad(table, (1, 0, 1, 0), value=True).to(device))


def zero_head(width: int, num_classes: int, like: Model) -> Linear:
    """A classification layer initialised to 0, in a model's dtype and on its device.

    >>> import regard as rg
    >>> from regard.models.vision import zero_head
    >>> sizes = {"image_size": 32, "patch_size": 8, "embedding_dim": 16, "num_layers": 1, "num_heads": 4}
    >>> zero_head(16, 3, rg.VisionTransformer(rg.VisionConfig(**sizes))).weight.abs().sum().item()
    0.0
    """
    head = Linear(width, num_classes, device=like.device, dtype=like.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def pair(name: str, size: int | tuple[int, int]) -> tuple[int, int]:
    """(height, width) of a size.

    >>> from regard.models.vision import pair
    >>> pair("image_size", 32), pair("image_size", (32, 48))
    ((32, 32), (32, 48))
    """
    if isinstance(size, int):
        return size, size
    if not isinstance(size, tuple) or len(size) != 2:
        raise ValueError(f"{name}: expected one number or (height, width), got {size!r}")
    return size[0], size[1]


def check_pictures(images: Tensor, num_channels: int) -> None:
    """Raise ValueError unless `images` is a float tensor (B, C, height, width)."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        got = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images: expected floating-point numbers of shape (B, C, height, width), got {got}")
    if images.shape[1] != num_channels:
        raise ValueError(f"images: expected {num_channels} channels, got {images.shape[1]} in {tuple(images.shape)}")


def _check_images(images: Tensor, config: VisionConfig) -> None:
    check_pictures(images, config.num_channels)
    expected, sides = pair("image_size", config.image_size), tuple(images.shape[2:])
    if sides != expected:
        raise ValueError(
            f"images: expected {expected[0]}×{expected[1]} (image_size), got {sides[0]}×{sides[1]}; "
            f"model.resized({sides}) gives a model for that size"
        )
