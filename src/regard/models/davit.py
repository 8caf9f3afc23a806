"""DaViT: attention between the tokens of a window and attention between channels, in turn, on ever smaller maps.

    for each stage:   x = embed(x)                                      a convolution with a stride, and a norm
    for each layer:   x = half(x, attention in w×w windows);  x = half(x, attention between channels)
    half(x, f):       x = x + conv(x);  x = x + f(norm(x));  x = x + conv(x);  x = x + network(norm(x))
    logits            = head(norm(mean over the last map))

Both are linear in the tokens: windows see every channel of few tokens, channels see every token of few channels. The
convolutions are depthwise, 3×3, and the only source of positions, so images may have any size.

A map whose sides are not multiples of w is padded with zeros at its right and bottom before queries, keys and values
are computed, and **the padding is attended to**: its keys and values are the projections' biases. A mask would be
cleaner, but published weights were trained this way, and this code computes the same as they do (Florence-2's vision
tower, up to rounding).

Ding et al. 2022, "DaViT: Dual Attention Vision Transformers".
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

from regard.core.families.mechanism import Mechanism
from regard.core.mechanisms import Channel
from regard.models.base import ImageModel
from regard.models.config import ImageConfig
from regard.models.layers.attention import MultiHeadAttention, as_mechanism, own_copy
from regard.models.layers.linear import Linear
from regard.models.layers.network import PositionWise
from regard.models.summary import Part, attention_flops, brief, products, size
from regard.models.vision import check_pictures, zero_head


@dataclass(frozen=True, kw_only=True)
class DaViTConfig(ImageConfig):
    """A DaViT; `mechanism` is that of the windows. Tuples have one number per stage. The defaults are DaViT-Tiny.

    Florence-2's vision tower has `patch_size=(7, 3, 3, 3)`, `patch_padding=(3, 1, 1, 1)`, `window_size=12`.

    >>> import regard as rg
    >>> rg.DaViTConfig().num_stages
    4
    """

    embedding_dim: tuple[int, ...] = (96, 192, 384, 768)
    num_layers: tuple[int, ...] = (1, 1, 3, 1)
    """Layers of each stage; a layer is a window attention half and a channel attention half."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """Heads of window attention, for each stage."""
    num_groups: tuple[int, ...] = (3, 6, 12, 24)
    """Groups of channels that attend to each other, for each stage."""
    patch_size: tuple[int, ...] = (7, 2, 2, 2)
    patch_stride: tuple[int, ...] = (4, 2, 2, 2)
    patch_padding: tuple[int, ...] = (3, 0, 0, 0)
    norm_first: tuple[bool, ...] = (False, True, True, True)
    """Whether a stage's embedding has its norm before the convolution, or after it."""
    window_size: int = 7
    network_ratio: float = 4.0
    """Width of the position-wise network, as a multiple of embedding_dim."""
    channel_scale: Literal["tokens", "channels"] = "tokens"
    """`rg.Channel`'s scale: Florence-2 divides by the root of the tokens, the first DaViT by that of the channels."""
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    attention_bias: bool = True
    """Whether queries, keys and values have a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        stages = ("embedding_dim", "num_layers", "num_heads", "num_groups", "patch_size", "patch_stride")
        for name in (*stages, "patch_padding", "norm_first"):
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name}: expected a tuple of one value per stage, got {values!r}")
            if len(values) != self.num_stages:
                raise ValueError(f"{name}: expected {self.num_stages} values, one per stage, got {values!r}")
        for name, least in (("patch_stride", 1), ("patch_padding", 0)):
            if any(type(number) is not int or number < least for number in getattr(self, name)):
                raise ValueError(f"{name}: expected whole numbers of at least {least}, got {getattr(self, name)}")
        for name in ("num_heads", "num_groups"):
            for width, parts in zip(self.embedding_dim, getattr(self, name), strict=True):
                if width % parts:
                    raise ValueError(f"{name}: expected divisors of embedding_dim = {self.embedding_dim}, got {parts}")
        if self.channel_scale not in ("tokens", "channels"):
            raise ValueError(f"channel_scale: expected tokens or channels, got {self.channel_scale!r}")

    @property
    def num_stages(self) -> int:
        return len(self.embedding_dim)


class DaViT(ImageModel):
    """A DaViT: `davit(images)` gives the logits of the classes, for images of any size.

    >>> import regard as rg, torch
    >>> config = rg.DaViTConfig(embedding_dim=(8, 16, 32, 32), num_heads=(1, 2, 4, 4), num_groups=(1, 2, 4, 4))
    >>> davit = rg.DaViT(config)
    >>> images = torch.randn(2, 3, 64, 96)
    >>> davit(images).shape, davit.features(images)[-1].shape
    (torch.Size([2, 1000]), torch.Size([2, 32, 2, 3]))
    """

    noun = "a DaViT"
    config: DaViTConfig

    def __init__(self, config: DaViTConfig) -> None:
        super().__init__()
        self.config = config
        self.stages = nn.ModuleList(Stage(config, index) for index in range(config.num_stages))
        self.norm = nn.LayerNorm(config.embedding_dim[-1], eps=config.norm_epsilon)
        self.head = Linear(config.embedding_dim[-1], config.num_classes) if config.num_classes else None
        self.initialise()

    def forward(self, images: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B D"]:
        """Logits (B, num_classes); without classes, the normed mean of the last map."""
        pooled = self.norm(self.features(images)[-1].mean((-2, -1)))
        return pooled if self.head is None else self.head(pooled)

    def features(self, images: Float[Tensor, "B C Y X"]) -> tuple[Float[Tensor, "B _ _ _"], ...]:
        """The map each stage leaves, (B, embedding_dim, height, width), the last one the smallest."""
        check_pictures(images, self.config.num_channels)
        check_sides((images.shape[2], images.shape[3]), self.config)
        x, maps = images, []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        return tuple(maps)

    def with_classes(self, num_classes: int, class_names: tuple[str, ...] = ()) -> "DaViT":
        """A copy to fine-tune on other classes, with a new head that is initialised to 0.

        >>> import regard as rg, torch
        >>> config = rg.DaViTConfig(embedding_dim=(8, 16, 32, 32), num_heads=(1, 2, 4, 4), num_groups=(1, 2, 4, 4))
        >>> rg.DaViT(config).with_classes(2)(torch.randn(1, 3, 32, 32)).tolist()
        [[0.0, 0.0]]
        """
        model = deepcopy(self)
        model.config = replace(self.config, num_classes=num_classes, class_names=class_names)
        model.head = zero_head(self.config.embedding_dim[-1], num_classes, self) if num_classes else None
        return model

    def resized(self, image_size: int | tuple[int, int]) -> "DaViT":
        """A copy: images may have any size."""
        return deepcopy(self)

    @property
    def blocks(self) -> list[nn.Module]:
        return [half for stage in self.stages for half in stage.halves]  # type: ignore[union-attr]

    def num_tokens(self, height: int, width: int) -> int:
        """The positions of the first stage's map."""
        stride = self.config.patch_stride[0]
        return -(-height // stride) * -(-width // stride)

    def parts(self, length: int) -> Iterator[Part]:
        """The stages, the norm and the head, for one image of length × length pixels."""
        check_sides((length, length), self.config)
        side = length
        for index, stage in enumerate(self.stages):
            assert isinstance(stage, Stage)
            side = _next_side(side, self.config, index)
            yield stage.part(f"stage {index + 1}, {side}×{side}", side, self.dtype)
        yield Part(name="norm", parameters=size(self.norm), flops=0)
        if self.head is not None:
            yield Part(name="head", parameters=size(self.head), flops=products(self.head))


class Stage(nn.Module):
    """Downsampling to a smaller map with more channels, then layers of two halves: windows and channels."""

    def __init__(self, config: DaViTConfig, index: int) -> None:
        super().__init__()
        width = config.embedding_dim[index]
        before = config.embedding_dim[index - 1] if index else config.num_channels
        self.norm_first = config.norm_first[index]
        self.num_heads, self.num_groups = config.num_heads[index], config.num_groups[index]
        self.mechanism = f"{brief(as_mechanism(config.mechanism))} · Channel"
        self.embed = nn.Conv2d(
            before, width, config.patch_size[index], config.patch_stride[index], config.patch_padding[index]
        )
        self.norm = nn.LayerNorm(before if self.norm_first else width, eps=config.norm_epsilon)
        channel = Channel(scale=config.channel_scale)
        halves: list[Half] = []
        for _ in range(config.num_layers[index]):
            halves.append(Half(config, width, config.num_heads[index], config.mechanism, config.window_size))
            halves.append(Half(config, width, config.num_groups[index], channel))
        self.halves = nn.ModuleList(halves)

    def forward(self, x: Float[Tensor, "B C Y X"]) -> Float[Tensor, "B E V U"]:
        if self.norm_first:
            x = _normed(x, self.norm)
        x = self.embed(x)
        if not self.norm_first:
            x = _normed(x, self.norm)
        for half in self.halves:
            x = half(x)
        return x

    def part(self, name: str, side: int, dtype: torch.dtype) -> Part:
        """The stage in numbers, on a map of side × side positions."""
        flops = products(self.embed) * side**2 + sum(half.flops(side, dtype) for half in self.halves)  # type: ignore[operator]
        return Part(
            name=name,
            parameters=size(self),
            flops=flops,
            layers=len(self.halves) // 2,
            heads=f"{self.num_heads} · {self.num_groups} groups",
            mechanism=self.mechanism,
        )


class Half(nn.Module):
    """Attention, in windows of `window_size` or over the whole map, and a position-wise network, each after a
    convolution. In training `dropout` applies to both outputs; the published models use stochastic depth instead."""

    def __init__(
        self,
        config: DaViTConfig,
        width: int,
        num_heads: int,
        mechanism: Mechanism | str,
        window_size: int | None = None,
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.attention_conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.attention = MultiHeadAttention(
            width,
            num_heads,
            mechanism=own_copy(mechanism),
            bias=config.attention_bias,
            dropout=config.attention_dropout,
            output_bias=True,
        )
        self.network_conv = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.network_norm = nn.LayerNorm(width, eps=config.norm_epsilon)
        self.network = PositionWise(width, int(width * config.network_ratio), activation=config.activation)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B E Y X"]) -> Float[Tensor, "B E Y X"]:
        height, width = x.shape[2:]
        tokens = rearrange(x + self.attention_conv(x), "b e y x -> b y x e")
        tokens = tokens + self.dropout(self._attend(self.attention_norm(tokens)))
        x = rearrange(tokens, "b y x e -> b e y x", y=height, x=width)
        tokens = rearrange(x + self.network_conv(x), "b e y x -> b y x e")
        tokens = tokens + self.dropout(self.network(self.network_norm(tokens)))
        return rearrange(tokens, "b y x e -> b e y x")

    def window_counts(self, height: int, width: int) -> tuple[int, int] | None:
        """How many windows a map is cut into, down and across; None for attention over the whole map."""
        size = self.window_size
        return None if size is None else (-(-height // size), -(-width // size))

    def flops(self, side: int, dtype: torch.dtype) -> int:
        """FLOPs on a map of side × side positions."""
        everywhere = products(self.attention_conv) + products(self.network_conv) + products(self.network)
        down, across = self.window_counts(side, side) or (1, 1)
        tokens = side**2 if self.window_size is None else self.window_size**2
        window = products(self.attention) * tokens + attention_flops(self.attention, tokens, tokens, dtype)
        return everywhere * side**2 + window * down * across

    def _attend(self, x: Float[Tensor, "B Y X E"]) -> Float[Tensor, "B Y X E"]:
        if self.window_size is None:
            out = self.attention(rearrange(x, "b y x e -> b (y x) e"))
            return rearrange(out, "b (y x) e -> b y x e", y=x.shape[1])
        out = self.attention(windows(x, self.window_size))
        return unwindowed(out, x.shape[1], x.shape[2], self.window_size)


def windows(x: Float[Tensor, "B Y X E"], size: int) -> Float[Tensor, "N T E"]:
    """The size×size windows of a map, image by image and row by row, zeros where they reach beyond it.

    >>> import torch
    >>> from regard.models.davit import windows
    >>> windows(torch.arange(9.0).view(1, 3, 3, 1), 2)[..., 0].tolist()
    [[0.0, 1.0, 3.0, 4.0], [2.0, 0.0, 5.0, 0.0], [6.0, 7.0, 0.0, 0.0], [8.0, 0.0, 0.0, 0.0]]
    """
    x = F.pad(x, (0, 0, 0, -x.shape[2] % size, 0, -x.shape[1] % size))
    return rearrange(x, "b (y v) (x u) e -> (b y x) (v u) e", v=size, u=size)


def unwindowed(x: Float[Tensor, "N T E"], height: int, width: int, size: int) -> Float[Tensor, "B Y X E"]:
    """The map (B, height, width, E) of its windows.

    >>> import torch
    >>> from regard.models.davit import unwindowed, windows
    >>> x = torch.randn(2, 5, 7, 3)
    >>> torch.equal(unwindowed(windows(x, 3), 5, 7, 3), x)
    True
    """
    down, across = -(-height // size), -(-width // size)
    whole = rearrange(x, "(b y x) (v u) e -> b (y v) (x u) e", y=down, x=across, v=size)
    return whole[:, :height, :width]


def _normed(x: Float[Tensor, "B E Y X"], norm: nn.Module) -> Float[Tensor, "B E Y X"]:
    return rearrange(norm(rearrange(x, "b e y x -> b y x e")), "b y x e -> b e y x")


def check_sides(image_sides: tuple[int, int], config: DaViTConfig) -> None:
    """Raise ValueError for images that are too small."""
    sides: tuple[int, ...] = image_sides
    for index in range(config.num_stages):
        sides = tuple(_next_side(side, config, index) for side in sides)
        if min(sides) < 1:
            raise ValueError(
                f"images: expected sides large enough for {config.num_stages} stages, got {image_sides}, "
                f"of which nothing is left at stage {index + 1}"
            )


def _next_side(side: int, config: DaViTConfig, index: int) -> int:
    """The side of the map after a stage's embedding, from a map of `side`."""
    return (side + 2 * config.patch_padding[index] - config.patch_size[index]) // config.patch_stride[index] + 1
