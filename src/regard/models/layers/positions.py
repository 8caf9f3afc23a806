"""Positions of tokens: sinusoids, rotary positions, biases by distance.

    sinusoidal   added to the embedding: sin and cos of position · base^(-2i/E)          Vaswani et al. 2017
    rotary       pairs of coordinates of queries and keys, rotated by position · frequency  Su et al. 2021
    ALiBi        a bias on the scores: minus slope · distance                              Press et al. 2021
    buckets      a learned bias on the scores by bucketed distance                         Raffel et al. 2019 (T5)

A learned table of positions is an `nn.Embedding` and needs no code here. Rotary tables are float32 for every dtype of
the model: in half precision neighbouring positions beyond 256 would get the same rotation.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.eager import recorded, transformed

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of a rotation."""


def sinusoidal(positions: Int[Tensor, "*t"], embedding_dim: int, base: float = 10000.0) -> Float[Tensor, "*t E"]:
    """The table of the original Transformer, sin and cos alternating, in float32.

    >>> import torch
    >>> from regard.models.layers.positions import sinusoidal
    >>> sinusoidal(torch.arange(2), 4)[0].tolist()
    [0.0, 1.0, 0.0, 1.0]
    """
    pairs = torch.arange(0, embedding_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(pairs * (-math.log(base) / embedding_dim))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :embedding_dim]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How a rotary model was extended to a longer context than it was first trained on.

    `linear` divides every frequency by `factor`. `dynamic` raises the base once a sequence is longer than the context.
    `llama3` divides the low frequencies, leaves the high ones, and blends in between.

    >>> from regard.models.layers.positions import RotaryScaling
    >>> RotaryScaling(kind="linear", factor=2.0).factor
    2.0
    """

    kind: Literal["linear", "dynamic", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "dynamic", "llama3"):
            raise ValueError(f"kind: expected linear, dynamic or llama3, got {self.kind!r}")
        if type(self.factor) not in (int, float) or not self.factor >= 1:
            raise ValueError(f"factor: expected at least 1, got {self.factor!r}")
        bounds = (self.low_frequency_factor, self.high_frequency_factor)
        if any(type(bound) not in (int, float) for bound in bounds) or not 0 < bounds[0] < bounds[1]:
            raise ValueError(f"low_frequency_factor: expected above 0 and below high_frequency_factor, got {bounds}")
        if type(self.original_context_length) is not int or self.original_context_length < 1:
            length = self.original_context_length
            raise ValueError(f"original_context_length: expected a whole number of at least 1, got {length!r}")


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions: pairs of coordinates are rotated by position, so that q·k depends only on the distance.

    `pairing` says which coordinates are a pair: `halves` (i and i + K/2, Hugging Face's) or `neighbours` (2i and
    2i + 1, the paper's and GGUF's).

    >>> import torch
    >>> from regard.models.layers.positions import Rotary
    >>> rotary = Rotary(length=8)
    >>> q, k = torch.randn(2, 8)
    >>> def score(i, j): return (rotary(q, torch.tensor(i)) * rotary(k, torch.tensor(j))).sum()
    >>> torch.allclose(score(5, 3), score(105, 103), atol=1e-4)
    True
    """

    length: int
    base: float = 10000.0
    scaling: RotaryScaling | None = None
    pairing: Literal["halves", "neighbours"] = "halves"
    context_length: int = 2048
    """Longer sequences get `dynamic` scaling."""

    def __post_init__(self) -> None:
        if self.length < 2 or self.length % 2:
            raise ValueError(
                f"length: expected an even number of at least 2 (rotary positions rotate pairs), got {self.length}"
            )
        if self.length == 2 and self.scaling is not None and self.scaling.kind == "dynamic":
            raise ValueError("length: expected at least 4, since dynamic scaling divides by length - 2, got 2")
        if not 0 < self.base < math.inf:
            raise ValueError(f"base: expected a number above 0, got {self.base}")
        if self.pairing not in ("halves", "neighbours"):
            raise ValueError(f"pairing: expected halves or neighbours, got {self.pairing!r}")

    def frequencies(self, reach: int = 0) -> Float[Tensor, "pairs"]:
        """Radians per position for each pair; `reach` is the length of the sequence, for `dynamic` scaling."""
        return _frequencies(self.length, self.base, self.scaling, self.context_length, reach)

    def tables(self, positions: Int[Tensor, "*t"]) -> Tables:
        """Cosines and sines in float32: (T, K) for positions (T,), (B, 1, T, K) for positions (B, T)."""
        if self.scaling is not None and self.scaling.kind == "dynamic" and positions.numel():
            if torch.compiler.is_exporting():
                raise ValueError(
                    "rotary_scaling: expected none, linear or llama3 for torch.export, "
                    "got dynamic, which reads how long each sequence is"
                )
            # Each sequence is scaled by its length: a longer one in the same batch must not change it.
            rows = positions if positions.ndim == 2 else positions.reshape(1, -1)
            frequencies = torch.stack([self.frequencies(int(last) + 1) for last in rows.amax(-1).tolist()])
            frequencies = frequencies[:, None] if positions.ndim == 2 else frequencies[0]
        else:
            frequencies = self.frequencies()
        angles = positions[..., None].float() * frequencies.to(positions.device)
        if self.pairing == "halves":
            angles = torch.cat([angles, angles], dim=-1)
        else:
            angles = angles.repeat_interleave(2, dim=-1)
        if positions.ndim == 2:
            angles = angles[:, None]
        return angles.cos(), angles.sin()

    def turn(self, x: Float[Tensor, "*b T K"], tables: Tables) -> Float[Tensor, "*b T K"]:
        """Rotate queries or keys by tables that broadcast to them."""
        cos, sin = tables
        halves = self.pairing == "halves"
        if halves and recorded(x) and x.is_cpu and cos.dtype == x.dtype and not transformed():
            turned: Tensor = _RecordedTurn.apply(x, cos, sin)  # type: ignore[no-untyped-call]
            return turned
        if halves:
            left, right = x.chunk(2, dim=-1)
            across = torch.cat([-right, left], dim=-1)
        else:
            across = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        if torch.is_grad_enabled() or cos.dtype != x.dtype:
            return (x * cos + across * sin).to(x.dtype)
        return (x * cos).add_(across.mul_(sin))  # the same, with fewer temporary tensors

    def __call__(self, x: Float[Tensor, "*b T K"], positions: Int[Tensor, "*t"]) -> Float[Tensor, "*b T K"]:
        """Rotate queries or keys at `positions`."""
        return self.turn(x, self.tables(positions))


class _RecordedTurn(torch.autograd.Function):
    """Rotation of pairs (i, i + K/2) on a CPU with gradients: half the passes over memory, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out = torch.empty_like(x)
        (left, right), (first, second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        (cos_left, cos_right), (sin_left, sin_right) = cos.chunk(2, dim=-1), sin.chunk(2, dim=-1)
        torch.mul(left, cos_left, out=first).addcmul_(right, sin_left, value=-1)
        torch.mul(right, cos_right, out=second).addcmul_(left, sin_right)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        turned: Tensor = _RecordedTurn.apply(grad, cos, -sin)  # type: ignore[no-untyped-call]
        return turned, None, None


def _frequencies(length: int, base: float, scaling: RotaryScaling | None, context: int, reach: int) -> Tensor:
    """Radians per position, for each pair (K/2,)."""
    if scaling is not None and scaling.kind == "dynamic":
        # Transformers computes the base in float32 for sequences beyond the context, and keeps it for shorter ones.
        longest = torch.tensor(reach) if reach > context else context
        stretched = base * ((scaling.factor * longest / context) - (scaling.factor - 1)) ** (length / (length - 2))
    else:
        stretched = base
    turns = 1.0 / (stretched ** (torch.arange(0, length, 2, dtype=torch.float32) / length))
    if scaling is None or scaling.kind == "dynamic":
        return turns
    if scaling.kind == "linear":
        return turns / scaling.factor
    wavelength = 2 * math.pi / turns
    longest_kept = scaling.original_context_length / scaling.high_frequency_factor
    shortest_divided = scaling.original_context_length / scaling.low_frequency_factor
    spread = scaling.high_frequency_factor - scaling.low_frequency_factor
    blend = (scaling.original_context_length / wavelength - scaling.low_frequency_factor) / spread
    # The order of these products is that of Transformers; another order differs in the last bit.
    blended = (1 - blend) * turns / scaling.factor + blend * turns
    outside = torch.where(wavelength > shortest_divided, turns / scaling.factor, turns)
    between = (wavelength >= longest_kept) & (wavelength <= shortest_divided)
    return torch.where(between, blended, outside)


def alibi_slopes(num_heads: int) -> Float[Tensor, "H"]:
    """ALiBi's slope of each head: 2^(-8/n), 2^(-16/n), …; if n is not a power of two, the rest come from 2n heads.

    >>> from regard.models.layers.positions import alibi_slopes
    >>> alibi_slopes(8).tolist()[:2]
    [0.5, 0.25]
    """
    even = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / even) for i in range(even)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / even) for i in range(num_heads - even)]
    return torch.tensor(slopes)


class Alibi(nn.Module):
    """A bias that falls with the distance, with a fixed slope for each head.

    >>> from regard.models.layers.positions import Alibi
    >>> Alibi(2)(queries=1, keys=3).shape
    torch.Size([1, 2, 1, 3])
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, queries: int, keys: int, like: Tensor | None = None) -> Float[Tensor, "1 H T S"]:
        """The bias for the last `queries` of `keys` positions, in the dtype and on the device of `like`."""
        device = None if like is None else like.device
        distance = _distance(queries, keys, device).abs().float()
        bias = -alibi_slopes(self.num_heads).to(device)[:, None, None] * distance
        return bias[None] if like is None else bias[None].to(like.dtype)


class RelativeBias(nn.Module):
    """T5's bias: one learned number per head and bucket of distances, exact when near, logarithmic when far.

    >>> from regard.models.layers.positions import RelativeBias
    >>> RelativeBias(num_heads=4, bidirectional=True)(queries=3, keys=5).shape
    torch.Size([1, 4, 3, 5])
    """

    def __init__(
        self, num_heads: int, *, bidirectional: bool, num_buckets: int = 32, longest_distance: int = 128
    ) -> None:
        super().__init__()
        least = 4 if bidirectional else 2
        if num_buckets < least or num_buckets % 2:
            raise ValueError(f"num_buckets: expected an even number of at least {least}, got {num_buckets}")
        self.bidirectional, self.num_buckets, self.longest_distance = bidirectional, num_buckets, longest_distance
        self.table = nn.Embedding(num_buckets, num_heads)

    def forward(self, queries: int, keys: int, like: Tensor | None = None) -> Float[Tensor, "1 H T S"]:
        """The bias for the last `queries` of `keys` positions."""
        bias = self.table(self.buckets(_distance(queries, keys, self.table.weight.device)))
        return bias.permute(2, 0, 1)[None]

    def buckets(self, distance: Int[Tensor, "T S"]) -> Int[Tensor, "T S"]:
        """The bucket of each distance, key position minus query position."""
        buckets, offset = self.num_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset = (distance > 0).long() * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        spread = math.log(self.longest_distance / exact)
        far = exact + (torch.log(distance.float().clamp(min=1) / exact) / spread * (buckets - exact)).long()
        return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


def _distance(queries: int, keys: int, device: torch.device | None) -> Tensor:
    """Key position minus query position, (T, S); the last query is at the last key."""
    place = torch.arange(keys, device=device)
    return place - place[keys - queries :, None]
