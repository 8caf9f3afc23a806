"""What the kernels share: tiles of rows, products, sums before each chunk."""

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b."""
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def rows_of(pointer, row_stride, index, shown, column, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """The rows of a matrix at `index` where `shown`, else 0; so are columns from WIDTH on, unless none are (EVEN)."""
    place = pointer + index.to(tl.int64)[:, None] * row_stride + column[None, :]
    if EVEN:
        tile = tl.load(place, mask=shown[:, None], other=0.0)
    else:
        tile = tl.load(place, mask=shown[:, None] & (column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def bad_rows(x, y):
    """Which rows of two tiles hold a NaN or an infinity."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    return (tl.sum((x - x != 0).to(tl.int32), 1) + tl.sum((y - y != 0).to(tl.int32), 1)) > 0


@triton.jit
def prefix_kernel(
    SUMS, TOTALS, INITIAL, FINAL, slots, size, SHARED: tl.constexpr, REVERSE: tl.constexpr, INCLUSIVE: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums before each chunk (reversed, after it), over the SHARED heads that belong together; or through it.

    From INITIAL, the sums before all of them, or 0; FINAL are those after all.
    """
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if INITIAL is not None:
        total = tl.load(INITIAL + row * size + place, mask=place < size, other=0.0)
    else:
        total = tl.zeros([BLOCK], tl.float32)
    if not INCLUSIVE:  # what is before the next chunk is what is through this one: a difference would spread NaN
        begin = slots - 1 if REVERSE else 0
        tl.store(TOTALS + (row * slots + begin) * size + place, total, mask=place < size)
    for start in range(0, slots, STEPS):
        step = start + tl.arange(0, STEPS)
        slot, next_slot = step, step + 1
        if REVERSE:
            slot, next_slot = slots - 1 - step, slots - 2 - step
        keep = (step < slots)[:, None] & (place < size)[None, :]
        added = tl.zeros([STEPS, BLOCK], tl.float32)
        for r in tl.static_range(SHARED):
            at = ((row * SHARED + r) * slots + slot.to(tl.int64))[:, None] * size + place[None, :]
            added += tl.load(SUMS + at, mask=keep, other=0.0)
        through = tl.cumsum(added, 0) + total[None, :]
        total += tl.sum(added, 0)
        if INCLUSIVE:
            at = (row * slots + slot.to(tl.int64))[:, None] * size + place[None, :]
        else:
            at = (row * slots + next_slot.to(tl.int64))[:, None] * size + place[None, :]
            keep = (step + 1 < slots)[:, None] & (place < size)[None, :]
        tl.store(TOTALS + at, through, mask=keep)
    if FINAL is not None:
        tl.store(FINAL + row * size + place, total, mask=place < size)
