"""Weights as 8-bit codes, and thumbnails of heads.

    code = round(254 · sqrt(w)),  w within [0, 1];  255 where the mask hides the pair

The square root leaves room for small weights: 1/512, a uniform weight over 512 keys, is code 11 and not 0. Masked has a
code of its own, so that a page can draw it apart from 0.

A thumbnail is max-pooled over squares that do not overlap: a single large weight stays visible, in exactly one cell,
where a mean would fade it. A cell is masked only if all of it is.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

MASKED = 255
"""The code of pairs that a mask hides."""
LEVELS = 254
LARGEST = 64
"""The most cells of a thumbnail, down and across."""


def codes(weights: Float[Tensor, "*b T S"], visible: Bool[Tensor, "..."] | None = None) -> UInt8[Tensor, "*b T S"]:
    """The codes of weights; negative weights, which some mechanisms have, count by their size.

    >>> import torch
    >>> codes(torch.tensor([[0.0, 0.25, 1.0]]), torch.tensor([[False, True, True]])).tolist()
    [[255, 127, 254]]
    """
    sizes = weights.float().abs().nan_to_num(0.0).clamp(max=1.0)
    coded = sizes.sqrt_().mul_(LEVELS).round_().to(torch.uint8)
    return coded if visible is None else coded.masked_fill_(~visible, MASKED)


def decoded(coded: UInt8[Tensor, "*b T S"]) -> Float[Tensor, "*b T S"]:
    """The weights of codes, within 1/254 of their square roots; 0 where they are masked.

    >>> import torch
    >>> decoded(codes(torch.tensor([[0.0, 0.25, 1.0]]))).tolist()
    [[0.0, 0.25, 1.0]]
    """
    roots = coded.float().masked_fill(coded == MASKED, 0) / LEVELS
    return roots.square()


def pool_size(length: int) -> int:
    """How many tokens share a cell of a thumbnail.

    >>> pool_size(64), pool_size(65), pool_size(512)
    (1, 2, 8)
    """
    return max(1, -(-length // LARGEST))


def thumbnails(weights: Float[Tensor, "H T S"], visible: Bool[Tensor, "..."] | None = None) -> UInt8[Tensor, "H h w"]:
    """The codes of each head's weights, pooled to at most 64 × 64 cells.

    >>> import torch
    >>> thumbnails(torch.eye(128)[None]).shape
    torch.Size([1, 64, 64])
    """
    size = pool_size(weights.shape[-2]), pool_size(weights.shape[-1])
    if size == (1, 1):
        return codes(weights, visible)
    # Pooled before it is coded: the codes rise with the weights, and there are fewer of them.
    if visible is not None:
        weights = weights.masked_fill(~visible, 0)
        visible = visible.expand(*visible.shape[:-2], *weights.shape[-2:])
        visible = _pooled(visible.float(), size) > 0
    sizes, least = weights.float(), float(weights.amin())
    if least != least:  # a NaN would hide the other weights of its cell
        sizes, least = sizes.nan_to_num(0.0), -1.0
    sizes = sizes.abs() if least < 0 else sizes
    return codes(_pooled(sizes, size), visible)


def _pooled(table: Float[Tensor, "H T S"], size: tuple[int, int]) -> Float[Tensor, "H h w"]:
    """The largest number of each square: of whole rows first, which is several times as fast as `max_pool2d`."""
    whole = table.shape[1] // size[0] * size[0]
    rows = [table[:, :whole].unflatten(1, (-1, size[0])).amax(2)]
    if whole < table.shape[1]:
        rows.append(table[:, whole:].amax(1, keepdim=True))
    return F.max_pool1d(torch.cat(rows, 1), size[1], ceil_mode=True)
