"""Gradients of softmax attention within a band of positions, in Triton: the backward pass of band.py.

With two sums in registers, these kernels have a single loop over keys with a branch at the edges of the band, and read
the rows of their own tile from shared memory.
"""

import triton
import triton.language as tl

from regard.core.kernels.band import numbers_of, part_of, span_of, spoiled_heads, tile_of, visible
from regard.core.kernels.common import bad_rows, product, rows_of


@triton.jit
def queries_step(
    grads, q, g, lse, delta, start, begin, end, k_base, v_base, k_row, v_row, position, low, high, before, after,
    factor,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, STEP: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, WITHIN: tl.constexpr, CLEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one step of keys adds to the gradients of a tile of queries."""
    place = start + tl.arange(0, STEP)
    k = tile_of(k_base, k_row, start, high, STEP, C, CB, True)
    values = tile_of(v_base, v_row, start, high, STEP, V, VB, True)
    if CLEAN:
        bad = bad_rows(k, values)
        k = tl.where(bad[:, None], tl.zeros_like(k), k)
        values = tl.where(bad[:, None], tl.zeros_like(values), values)
    weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * factor - lse[:, None])
    reached = tl.dot(g, tl.trans(values), input_precision=PRECISION) - delta[:, None]
    slopes = weights * reached
    if (start < begin) | (start >= end):
        seen = visible(position[:, None], place[None, :], low, high, before, after, BEFORE, AFTER, WITHIN)
        slopes = tl.where(seen, slopes, 0.0)
    return product(slopes.to(k.dtype), k, grads, PRECISION)


@triton.jit(do_not_specialize=["queries", "keys", "before", "after", "sequences"])
def band_queries_kernel(
    Q, K, VALUES, LOW, HIGH, PARTS, OUT, LSE, GRAD, DELTA, Q_GRAD,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    g_batch, g_head, g_row, dq_batch, dq_head, dq_row,
    queries, keys, heads, groups, before, after, factor, sequences, scale,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BOUNDED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of queries, and their delta = sum of gradient · output, which those of the keys need."""
    tile, line = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    group, origin = head // (heads // groups), 0
    row = line.to(tl.int64) * queries
    if PACKED:
        batch, origin, row, queries = part_of(PARTS, batch, head, heads, queries, sequences)
        keys = queries
        if tile * ROWS >= queries:
            return
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.minimum(tl.load(HIGH + batch), keys)
    t = tile * ROWS + tl.arange(0, ROWS)
    shift = keys - queries
    position = t + shift
    lowest, begin, end, highest = span_of(
        tile * ROWS + shift, tl.minimum(tile * ROWS + ROWS, queries) - 1 + shift, low, high, before, after,
        BEFORE, AFTER, STEP,
    )  # fmt: skip
    q, g, lse, delta = queries_of(
        Q + batch * q_batch + head * q_head + origin * q_row, GRAD + batch * g_batch + head * g_head + origin * g_row,
        OUT + batch * o_batch + head * o_head + origin * o_row, LSE + row, q_row, g_row, o_row, t, queries,
        C, V, CB, VB,
    )  # fmt: skip
    tl.store(DELTA + row + t, delta, mask=t < queries)
    k_base = K + batch * k_batch + group * k_head + origin * k_row
    v_base = VALUES + batch * v_batch + group * v_head + origin * v_row
    grads = tl.zeros([ROWS, CB], tl.float32)
    for start in range(lowest, highest, STEP):
        grads = queries_step(
            grads, q, g, lse, delta, start, begin, end, k_base, v_base, k_row, v_row, position, lowest, highest,
            before, after, factor, C, V, CB, VB, STEP, BEFORE, AFTER, not BOUNDED, False, PRECISION,
        )  # fmt: skip
    bad = tl.sum(tl.sum((grads - grads != 0).to(tl.int32), 1), 0)
    if bad > 0:
        grads = tl.zeros([ROWS, CB], tl.float32)
        for start in range(lowest, highest, STEP):
            grads = queries_step(
                grads, q, g, lse, delta, start, highest, highest, k_base, v_base, k_row, v_row, position, lowest,
                highest, before, after, factor, C, V, CB, VB, STEP, BEFORE, AFTER, False, True, PRECISION,
            )  # fmt: skip
    c = tl.arange(0, CB)
    place = Q_GRAD + batch * dq_batch + head * dq_head + (origin + t.to(tl.int64))[:, None] * dq_row + c[None, :]
    tl.store(place, grads * scale, mask=(t < queries)[:, None] & (c < C)[None, :])


@triton.jit
def queries_of(
    q_base, g_base, o_base, LSE, q_row, g_row, o_row, t, queries,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """A tile of queries: the queries, the gradients of their outputs, log-sum-exps in base 2, and delta. Queries that
    see nothing, or a number that is not finite, have an infinite log-sum-exp and pass nothing on."""
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    lse = tl.load(LSE + t, mask=t < queries, other=float("inf"))
    usable = lse < float("inf")
    q = rows_of(q_base, q_row, t, t < queries, c, C, C == CB)
    g = rows_of(g_base, g_row, t, usable, v, V, V == VB)
    o = rows_of(o_base, o_row, t, usable, v, V, V == VB)
    return q, g.to(q.dtype), lse * 1.4426950408889634, tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)


@triton.jit
def keys_step(
    k_grads, v_grads, k, values, start, q_base, g_base, o_base, q_row, g_row, o_row, LSE, DELTA, place, shift, queries,
    first, last, low, high, before, after, factor,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, WITHIN: tl.constexpr, CLEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to the gradients of a step of keys."""
    t = start + tl.arange(0, ROWS)
    if CLEAN:  # the gradients of queries whose output is NaN go nowhere, whatever they are
        q, g, lse, delta = queries_of(q_base, g_base, o_base, LSE, q_row, g_row, o_row, t, queries, C, V, CB, VB)
    else:
        lse = numbers_of(LSE, start, queries, ROWS, float("inf")) * 1.4426950408889634
        delta = numbers_of(DELTA, start, queries, ROWS, 0.0)
        q = tile_of(q_base, q_row, start, queries, ROWS, C, CB, True)
        g = tile_of(g_base, g_row, start, queries, ROWS, V, VB, True).to(q.dtype)
    weights = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * factor - lse[None, :])
    if CLEAN | (start < first) | (start + ROWS > last):
        seen = visible((t + shift)[None, :], place[:, None], low, high, before, after, BEFORE, AFTER, WITHIN)
        weights = tl.where(seen, weights, 0.0)
    v_grads = product(weights.to(g.dtype), g, v_grads, PRECISION)
    reached = tl.dot(values, tl.trans(g), input_precision=PRECISION)
    slopes = weights * (reached - delta[None, :])
    k_grads = product(slopes.to(q.dtype), q, k_grads, PRECISION)
    return k_grads, v_grads


@triton.jit
def clean_keys(
    k_base, v_base, k_row, v_row, place, inside,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """Keys and values, 0 where they are hidden or not finite."""
    k = rows_of(k_base, k_row, place, inside, tl.arange(0, CB), C, C == CB)
    values = rows_of(v_base, v_row, place, inside, tl.arange(0, VB), V, V == VB)
    bad = bad_rows(k, values)
    return tl.where(bad[:, None], tl.zeros_like(k), k), tl.where(bad[:, None], tl.zeros_like(values), values)


@triton.jit
def store_keys(
    k_grads, v_grads, place, inside, keys, scale, k_base, v_base, k_row, v_row,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr,
):  # fmt: skip
    """Write the gradients of keys and values: exactly 0 where they are hidden."""
    c, v, real = tl.arange(0, CB), tl.arange(0, VB), place < keys
    k_grads, v_grads = tl.where(inside[:, None], k_grads, 0.0), tl.where(inside[:, None], v_grads, 0.0)
    row = place.to(tl.int64)[:, None]
    tl.store(k_base + row * k_row + c[None, :], k_grads * scale, mask=real[:, None] & (c < C)[None, :])
    tl.store(v_base + row * v_row + v[None, :], v_grads, mask=real[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["queries", "keys", "before", "after", "sequences"])
def band_keys_kernel(
    Q, K, VALUES, LOW, HIGH, PARTS, OUT, LSE, GRAD, DELTA, K_GRAD, V_GRAD,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    g_batch, g_head, g_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    queries, keys, heads, groups, before, after, factor, sequences, scale,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BOUNDED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of STEP keys and values, over all query heads of their group."""
    tile, line = tl.program_id(0), tl.program_id(1)
    batch, group = (line // groups).to(tl.int64), (line % groups).to(tl.int64)
    shared, origin, total = heads // groups, 0, queries
    if PACKED:
        batch, origin, _, queries = part_of(PARTS, batch, group, groups, total, sequences)
        keys = queries
        if tile * STEP >= keys:
            return
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.minimum(tl.load(HIGH + batch), keys)
    place = tile * STEP + tl.arange(0, STEP)
    inside = (place >= low) & (place < high)
    k_base = K + batch * k_batch + group * k_head + origin * k_row
    v_base = VALUES + batch * v_batch + group * v_head + origin * v_row
    k = rows_of(k_base, k_row, place, inside, tl.arange(0, CB), C, C == CB)
    values = rows_of(v_base, v_row, place, inside, tl.arange(0, VB), V, V == VB)
    shift = keys - queries
    nearest, furthest = tl.maximum(tile * STEP, low), tl.minimum(tile * STEP + STEP, high) - 1
    # Queries that see one of these keys, and those that see all of them.
    lowest, highest, first, last = 0, queries, 0, queries
    if AFTER:
        lowest = tl.maximum(lowest, nearest - after - shift)
        first = tl.maximum(first, furthest - after - shift)
    if BEFORE:
        highest = tl.minimum(highest, furthest + before - shift + 1)
        last = tl.minimum(last, nearest + before - shift + 1)
    highest = tl.where(nearest > furthest, lowest, highest)  # padding alone: nobody sees it
    k_grads, v_grads = tl.zeros([STEP, CB], tl.float32), tl.zeros([STEP, VB], tl.float32)
    for r in range(shared):
        head = group * shared + r
        row = (batch * heads + head) * total + origin
        q_base = Q + batch * q_batch + head * q_head + origin * q_row
        g_base = GRAD + batch * g_batch + head * g_head + origin * g_row
        for start in range(lowest, highest, ROWS):
            k_grads, v_grads = keys_step(
                k_grads, v_grads, k, values, start, q_base, g_base, OUT, q_row, g_row, o_row, LSE + row, DELTA + row,
                place, shift, queries, first, last, low, high, before, after, factor, C, V, CB, VB, ROWS, BEFORE, AFTER,
                not BOUNDED, False, PRECISION,
            )  # fmt: skip
    bad = tl.sum(tl.sum((k_grads - k_grads != 0).to(tl.int32), 1), 0)
    bad += tl.sum(tl.sum((v_grads - v_grads != 0).to(tl.int32), 1), 0)
    if bad > 0:
        k, values = clean_keys(k_base, v_base, k_row, v_row, place, inside, C, V, CB, VB)
        k_grads, v_grads = tl.zeros([STEP, CB], tl.float32), tl.zeros([STEP, VB], tl.float32)
        for r in range(shared):
            head = group * shared + r
            row = (batch * heads + head) * total + origin
            q_base = Q + batch * q_batch + head * q_head + origin * q_row
            g_base = GRAD + batch * g_batch + head * g_head + origin * g_row
            o_base = OUT + batch * o_batch + head * o_head + origin * o_row
            for start in tl.range(lowest, highest, ROWS, num_stages=1):  # rare: no room is spent on a pipeline
                k_grads, v_grads = keys_step(
                    k_grads, v_grads, k, values, start, q_base, g_base, o_base, q_row, g_row, o_row,
                    LSE + row, DELTA + row, place, shift, queries, first, last, low, high, before, after, factor,
                    C, V, CB, VB, ROWS, BEFORE, AFTER, False, True, PRECISION,
                )  # fmt: skip
    store_keys(
        k_grads, v_grads, place, inside, keys, scale, K_GRAD + batch * dk_batch + group * dk_head + origin * dk_row,
        V_GRAD + batch * dv_batch + group * dv_head + origin * dv_row, dk_row, dv_row, C, V, CB, VB,
    )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def mend_backward_kernel(
    Q, K, VALUES, OUT, LSE, GRAD, Q_GRAD, K_GRAD, V_GRAD,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    g_batch, g_head, g_row, dq_batch, dq_head, dq_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    queries, heads, groups, factor, scale,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of causal attention as another kernel computed them, computed again for groups in which the last query
    of a head is not finite. Tiles have as many queries as keys."""
    line = tl.program_id(1)
    batch, group = (line // groups).to(tl.int64), (line % groups).to(tl.int64)
    shared = heads // groups
    if spoiled_heads(OUT + batch * o_batch, o_head, o_row, group, shared, queries, V, VB) == 0:
        return
    k_base, v_base = K + batch * k_batch + group * k_head, VALUES + batch * v_batch + group * v_head
    c = tl.arange(0, CB)
    for tile in range(tl.program_id(0), tl.cdiv(queries, ROWS), tl.num_programs(0)):
        t = tile * ROWS + tl.arange(0, ROWS)
        here = t < queries
        k, values = clean_keys(k_base, v_base, k_row, v_row, t, here, C, V, CB, VB)
        k_grads, v_grads = tl.zeros([STEP, CB], tl.float32), tl.zeros([STEP, VB], tl.float32)
        for r in range(shared):
            head, row = group * shared + r, (batch * heads + group * shared + r) * queries
            q_base, g_base = Q + batch * q_batch + head * q_head, GRAD + batch * g_batch + head * g_head
            o_base = OUT + batch * o_batch + head * o_head
            q, g, lse, delta = queries_of(
                q_base, g_base, o_base, LSE + row, q_row, g_row, o_row, t, queries, C, V, CB, VB
            )
            grads = tl.zeros([ROWS, CB], tl.float32)
            for start in range(0, tl.minimum(tile * ROWS + ROWS, queries), STEP):
                grads = queries_step(
                    grads, q, g, lse, delta, start, queries, queries, k_base, v_base, k_row, v_row, t, 0, queries,
                    0, 0, factor,
                    C, V, CB, VB, STEP, False, True, False, True, PRECISION,
                )  # fmt: skip
            at = Q_GRAD + batch * dq_batch + head * dq_head + t.to(tl.int64)[:, None] * dq_row + c[None, :]
            tl.store(at, grads * scale, mask=here[:, None] & (c < C)[None, :])
            for start in range(tile * ROWS, queries, ROWS):
                k_grads, v_grads = keys_step(
                    k_grads, v_grads, k, values, start, q_base, g_base, o_base, q_row, g_row, o_row, LSE + row, LSE, t,
                    0, queries, 0, 0, 0, queries, 0, 0, factor, C, V, CB, VB, ROWS, False, True, False, True, PRECISION,
                )  # fmt: skip
        store_keys(
            k_grads, v_grads, t, here, queries, scale, K_GRAD + batch * dk_batch + group * dk_head,
            V_GRAD + batch * dv_batch + group * dv_head, dk_row, dv_row, C, V, CB, VB,
        )  # fmt: skip
