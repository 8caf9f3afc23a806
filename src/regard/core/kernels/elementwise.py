"""What a decoder does to each token by itself, in Triton, for steps of few tokens: one launch instead of eight.

Every product is rounded where the plain operators round it, so that a model's numbers stay what they were.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(X, WEIGHT, OUT, row_stride, epsilon, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x / sqrt(mean x² + epsilon), rounded to its dtype, · weight."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(X + row * row_stride + place, mask=place < SIZE, other=0.0)
    weight = tl.load(WEIGHT + place, mask=place < SIZE, other=0.0)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + epsilon)).to(OUT.dtype.element_ty)
    tl.store(OUT + row * SIZE + place, normed * weight, mask=place < SIZE)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The norm of the last axis, in half precision."""
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(size)
    if len(rows):
        rms_norm_kernel[(len(rows),)](
            rows, weight, out, rows.stride(0), epsilon, SIZE=size, BLOCK=block,
            num_warps=4 if block <= 2048 else 8,
        )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def turn_kernel(
    Q, K, COS, SIN, OUT, q_batch, q_head, q_row, k_batch, k_head, k_row, table_batch, table_row, tokens, heads, both,
    HALF: tl.constexpr, BLOCK: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Pairs of coordinates of one head of one token, turned."""
    line = tl.program_id(0)
    batch, head, t = (line // (both * tokens)).to(tl.int64), (line // tokens) % both, line % tokens
    pair = tl.arange(0, BLOCK)
    left, right = pair, pair + HALF
    if NEIGHBOURS:
        left, right = 2 * pair, 2 * pair + 1
    inside = pair < HALF
    base = Q + batch * q_batch + head * q_head + t * q_row
    if head >= heads:
        base = K + batch * k_batch + (head - heads) * k_head + t * k_row
    a = tl.load(base + left, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + right, mask=inside, other=0.0).to(tl.float32)
    table = batch * table_batch + t * table_row
    cos, sin = tl.load(COS + table + left, mask=inside, other=0.0), tl.load(SIN + table + left, mask=inside, other=0.0)
    out = OUT + line.to(tl.int64) * 2 * HALF
    tl.store(out + left, a * cos - b * sin, mask=inside)
    tl.store(out + right, b * cos + a * sin, mask=inside)


def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Queries (B, H, T, K) and keys (B, G, T, K) turned by tables (T, K) or (B, 1, T, K) in float32."""
    batch, heads, tokens, length = q.shape
    both = heads + k.shape[1]
    out = q.new_empty(batch, both, tokens, length)
    table_batch = 0 if cos.ndim == 2 else cos.stride(0)
    if out.numel():
        turn_kernel[(batch * both * tokens,)](
            q, k, cos, sin, out, *q.stride()[:3], *k.stride()[:3], table_batch, cos.stride(-2), tokens, heads, both,
            HALF=length // 2, BLOCK=triton.next_power_of_2(length // 2), NEIGHBOURS=neighbours, num_warps=1,
        )  # fmt: skip
    return out[:, :heads], out[:, heads:]


@triton.jit
def gate_kernel(GATE, UP, OUT, size, BLOCK: tl.constexpr):
    """silu(gate), rounded to its dtype, · up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + place, mask=place < size, other=0.0)
    up = tl.load(UP + place, mask=place < size, other=0.0)
    wide = gate.to(tl.float32)
    tl.store(OUT + place, (wide / (1 + tl.exp(-wide))).to(gate.dtype) * up, mask=place < size)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, written over `gate`; both contiguous."""
    size = gate.numel()
    if size:
        gate_kernel[(triton.cdiv(size, 1024),)](gate, up, gate, size, BLOCK=1024, num_warps=4)
    return gate
