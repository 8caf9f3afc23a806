"""Gradients of queries and keys of kernel attention with a second-order polynomial, in Triton.

The backward pass is the computation of quadratic.py with time reversed: the values' gradient comes from `near` and
`far` there, with keys for queries and the state made of queries and of w = g / den. With e = -(g·out) / den, which
reaches the denominator,

    dv_s = sum over t of sim(q_t, k_s) w_t
    dk_s = sum over t of (w_t·v_s + e_t) (2d q_t·k_s + b) q_t        and dq_t likewise
"""

import triton
import triton.language as tl

from regard.core.kernels.common import bad_rows, product, rows_of
from regard.core.kernels.quadratic import feature, finer_product


@triton.jit
def near_pull_rows(
    x, y, e, place, acc, XO, YO, xo_row, yo_row, first, last, length, low, high, B2, D2,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, CLEAN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to acc the gradient of queries through keys [first, last) of their own chunk, in score form."""
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    for begin in range(first, last, N):
        t = begin + tl.arange(0, N)
        shown = t < last
        if BOUNDED:
            shown = shown & (t >= low) & (t < high)
        other = rows_of(XO, xo_row, t, shown, i, D, D == DB).to(COMPUTE)
        values = rows_of(YO, yo_row, t, shown, v, V, V == VB).to(COMPUTE)
        if CLEAN:
            bad = bad_rows(other, values)
            other = tl.where(bad[:, None], tl.zeros_like(other), other)
            values = tl.where(bad[:, None], tl.zeros_like(values), values)
        slope = 2 * D2 * tl.dot(x, tl.trans(other), input_precision=PRECISION) + B2
        pulled = (tl.dot(y, tl.trans(values), input_precision=PRECISION) + e[:, None]) * slope
        if MASKED or BOUNDED:
            pulled = tl.where(shown[None, :] & (t[None, :] <= place[:, None]), pulled, 0.0)
        # Scaled on the way, so that the product is used at once: see near_rows.
        acc += 0.5 * tl.dot((2 * pulled).to(COMPUTE), other, input_precision=PRECISION)
    return acc


@triton.jit
def near_queries_kernel(
    X, Y, E, XO, YO, BEFORE, BAD, ACC, LOW, HIGH,
    x_batch, x_head, x_row, y_batch, y_head, y_row, xo_batch, xo_head, xo_row, yo_batch, yo_head, yo_row,
    rows, row_shift, length, heads, groups, chunks, size, first_block, B2, D2,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The queries' gradient through their own chunk, and through everything before it but for the square."""
    line = tl.program_id(1)
    batch, head = line // heads, line % heads
    group_head = head // (heads // groups)
    group = batch * groups + group_head
    block = tl.program_id(0) + first_block
    place = block * M + tl.arange(0, M)
    t = place - row_shift
    shown_rows = (t >= 0) & (t < rows)
    low, high = 0, length
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    y_base = Y + batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    x = rows_of(x_base, x_row, t, shown_rows, i, D, D == DB).to(COMPUTE)
    y = rows_of(y_base, y_row, t, shown_rows, v, V, V == VB).to(COMPUTE)
    at = line.to(tl.int64) * rows + t
    e = tl.load(E + at, mask=shown_rows, other=0.0)
    acc = tl.zeros([M, DB], tl.float32)
    chunk = 0
    if CAUSAL:
        chunk = tl.maximum(block * M, 0) // CHUNK
    if (chunk > 0) | (not CAUSAL):
        small = BEFORE + (group.to(tl.int64) * chunks + chunk) * size
        linear = tl.load(small + i[:, None] * VB + v[None, :])
        second = tl.load(small + DB * VB + i[:, None] * DB + i[None, :])
        first = tl.load(small + DB * VB + DB * DB + i)
        through = 2 * D2 * finer_product(x, second, PRECISION) + B2 * first[None, :]
        acc += B2 * finer_product(y, tl.trans(linear), PRECISION) + through * e[:, None]
    if CAUSAL:
        begin, middle, end = chunk * CHUNK, tl.maximum(block * M, 0), tl.minimum(block * M + M, length)
        xo_base = XO + batch.to(tl.int64) * xo_batch + group_head.to(tl.int64) * xo_head
        yo_base = YO + batch.to(tl.int64) * yo_batch + group_head.to(tl.int64) * yo_head
        bad = tl.load(BAD + group * chunks + chunk)
        if bad > 0:
            acc = near_pull_rows(
                x, y, e, place, acc, xo_base, yo_base, xo_row, yo_row, begin, end, length, low, high, B2, D2,
                D, V, DB, VB, N, True, BOUNDED, True, COMPUTE, PRECISION,
            )  # fmt: skip
        else:
            acc = near_pull_rows(
                x, y, e, place, acc, xo_base, yo_base, xo_row, yo_row, begin, middle, length, low, high, B2, D2,
                D, V, DB, VB, N, False, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip
            acc = near_pull_rows(
                x, y, e, place, acc, xo_base, yo_base, xo_row, yo_row, middle, end, length, low, high, B2, D2,
                D, V, DB, VB, N, True, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip
    tl.store(ACC + at[:, None] * DB + i[None, :], acc, mask=shown_rows[:, None])


@triton.jit
def near_keys_kernel(
    X, Y, XO, YO, E, AFTER, XACC, YACC, LIVE, LOW, HIGH,
    x_batch, x_head, x_row, y_batch, y_head, y_row, xo_batch, xo_head, xo_row, yo_batch, yo_head, yo_row,
    rows, length, shift, heads, chunks, size, A2, B2, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, SHARED: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys' and values' gradients through their own chunk, and through all later queries but for the square."""
    line = tl.program_id(1)
    batch, head = line // heads, line % heads
    block = tl.program_id(0)
    t = block * M + tl.arange(0, M)
    shown_rows = t < rows
    if BOUNDED:
        shown_rows = shown_rows & (t >= tl.load(LOW + batch)) & (t < tl.load(HIGH + batch))
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    y_base = Y + batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    x = rows_of(x_base, x_row, t, shown_rows, i, D, D == DB).to(COMPUTE)
    y = rows_of(y_base, y_row, t, shown_rows, v, V, V == VB).to(COMPUTE)
    xacc, yacc = tl.zeros([M, DB], tl.float32), tl.zeros([M, VB], tl.float32)
    chunk = 0
    if CAUSAL:
        chunk = block * M // CHUNK
    if (chunk < chunks - 1) | (not CAUSAL):
        small = AFTER + (line.to(tl.int64) * chunks + chunk) * size
        linear = tl.load(small + i[:, None] * VB + v[None, :])
        second = tl.load(small + DB * VB + i[:, None] * DB + i[None, :])
        first = tl.load(small + DB * VB + DB * DB + i)
        constant = tl.load(small + DB * VB + DB * DB + DB + v)
        yacc += B2 * finer_product(x, linear, PRECISION) + A2 * constant[None, :]
        xacc += 2 * D2 * finer_product(x, second, PRECISION) + B2 * first[None, :]
        xacc += B2 * finer_product(y, tl.trans(linear), PRECISION)
    if CAUSAL:
        for r in range(0, SHARED):
            other_head = (head * SHARED + r).to(tl.int64)
            xo_base = XO + batch.to(tl.int64) * xo_batch + other_head * xo_head
            yo_base = YO + batch.to(tl.int64) * yo_batch + other_head * yo_head
            e_base = E + (batch * heads * SHARED + other_head) * length
            for begin in range(block * M, (chunk + 1) * CHUNK, N):
                position = begin + tl.arange(0, N)
                q = position - shift
                shown = (q >= 0) & (q < length)
                other = rows_of(xo_base, xo_row, q, shown, i, D, D == DB).to(COMPUTE)
                values = rows_of(yo_base, yo_row, q, shown, v, V, V == VB).to(COMPUTE)
                e = tl.load(e_base + q, mask=shown, other=0.0)
                visible = shown[None, :] & (position[None, :] >= t[:, None])
                slope = 2 * D2 * tl.dot(x, tl.trans(other), input_precision=PRECISION) + B2
                pulled = (tl.dot(y, tl.trans(values), input_precision=PRECISION) + e[None, :]) * slope
                # d·s² + b·s + a from its slope 2d·s + b
                similar = tl.where(visible, slope * slope / (2 * D2) + 2 * D2 * REST, 0.0)
                pulled = tl.where(visible, 2 * pulled, 0.0)
                yacc += 0.5 * tl.dot(similar.to(COMPUTE), values, input_precision=PRECISION)
                xacc += 0.5 * tl.dot(pulled.to(COMPUTE), other, input_precision=PRECISION)
    live = shown_rows & (bad_rows(x, y) == 0)
    at = line.to(tl.int64) * rows + t
    tl.store(XACC + at[:, None] * DB + i[None, :], xacc, mask=(t < rows)[:, None])
    tl.store(YACC + at[:, None] * VB + v[None, :], yacc, mask=(t < rows)[:, None])
    tl.store(LIVE + at, live.to(tl.float32), mask=t < rows)


@triton.jit
def pull_kernel(
    X, Y, STATE, ACC, LIVE, GRAD,
    x_batch, x_head, x_row, y_batch, y_head, y_row,
    rows, row_shift, lines_shared, heads, chunks, first_block, D2,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, UNITS: tl.constexpr, M: tl.constexpr,
    TAKEN: tl.constexpr, CHUNK: tl.constexpr, CAUSAL: tl.constexpr, STATED: tl.constexpr, REVERSE: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc + 2d · sum over j of x_j (square_ij·y), the whole gradient of x: queries, or reversed, keys."""
    line = tl.program_id(1)
    batch, head = line // heads, line % heads
    group = line // lines_shared
    block = tl.program_id(0) + first_block
    t = block * M + tl.arange(0, M) - row_shift
    shown_rows = (t >= 0) & (t < rows)
    slots, slot = 1, 0
    if CAUSAL:
        slots = chunks - 1
        slot = tl.maximum(block * M, 0) // CHUNK
        if not REVERSE:
            slot -= 1
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    c = tl.arange(0, TAKEN * VB)
    at = line.to(tl.int64) * rows + t
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    y_base = Y + batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head
    y = rows_of(y_base, y_row, t, shown_rows, v, V, V == VB).to(COMPUTE)
    acc = tl.zeros([M, DB], tl.float32)
    has_state = (slot >= 0) & (slot < slots) & (block * M + M > 0)
    slot = tl.where(has_state, slot, 0)
    base = STATE + (group.to(tl.int64) * slots + slot) * UNITS * 128 * VB
    for start in tl.range(0, D if STATED else 0, TAKEN, num_stages=STAGES):
        left = rows_of(x_base, x_row, t, shown_rows, start + tl.arange(0, TAKEN), D, D % 16 == 0).to(COMPUTE)
        phi = tl.reshape(left[:, :, None] * y[:, None, :], [M, TAKEN * VB])
        stands = base + feature(start + (c // VB)[None, :], i[:, None]) * VB + (c % VB)[None, :]
        if DB > 16 * ((D + 15) // 16):
            tile = tl.load(stands, mask=(i < 16 * ((D + 15) // 16))[:, None], other=0.0)
        else:
            tile = tl.load(stands)
        acc = product(phi, tl.trans(tile.to(COMPUTE)), acc, PRECISION)
    grad = tl.where(has_state, 2 * D2 * acc, 0.0) + tl.load(
        ACC + at[:, None] * DB + i[None, :], mask=shown_rows[:, None], other=0.0
    )
    live = tl.load(LIVE + at, mask=shown_rows, other=0.0) != 0
    if not REVERSE:  # a row that receives no gradient passes none on
        live = live | (tl.sum((y != 0).to(tl.int32), 1) > 0)
    grad = tl.where(live[:, None], grad, 0.0)
    tl.store(GRAD + at[:, None] * D + i[None, :], grad, mask=shown_rows[:, None] & (i < D)[None, :])
