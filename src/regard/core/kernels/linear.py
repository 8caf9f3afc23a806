"""Kernel attention with few features, in Triton: a feature map that works coordinate by coordinate, or features given.

Positions are cut into segments. The sums of a segment, sum phi(k) vᵀ and sum phi(k), are added up to those before it;
then one program walks each segment block by block with the sums in registers:

    num = scores of its own block · v + phi(q)·sums        den = the same with 1 in place of v

The backward pass walks forward for the queries' gradient, and backward, with the sums of phi(q) wᵀ and e phi(q), for
the keys' and values'; w = g / den and e = -(g·out) / den are the gradients that reach num and den.
"""

import triton
import triton.language as tl

from regard.core.kernels.common import bad_rows, product, rows_of


@triton.jit
def mapped(x, shown, C: tl.constexpr, MAP: tl.constexpr):
    """phi of rows, 0 where they are not shown and from feature C on."""
    if MAP == "elu":
        wide = x.to(tl.float32)
        wide = tl.where(wide > 0, wide + 1, tl.exp(wide))  # a minimum would hide NaN
        x = tl.where(shown[:, None] & (tl.arange(0, x.shape[1]) < C)[None, :], wide, 0.0)
    return x


@triton.jit
def through_map(grad, x, MAP: tl.constexpr):
    """The gradient of x from that of phi(x)."""
    if MAP == "elu":
        wide = x.to(tl.float32)
        grad *= tl.where(wide > 0, 1.0, tl.exp(wide))
    return grad


@triton.jit
def sum_segments_kernel(
    X, Y, GRAD, OUT, DEN, E, SUMS, BAD, LOW, HIGH,
    x_batch, x_head, x_row, y_batch, y_head, y_row, g_batch, g_head, g_row,
    length, shift, heads, slots, size,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    MAP: tl.constexpr, BOUNDED: tl.constexpr, BACKWARD: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum phi(x) yᵀ and sum e phi(x) of each segment. Forward: keys, values and 1. Backward: queries, w and e, which
    are made here."""
    slot, row = tl.program_id(0), tl.program_id(1)
    batch, head = row // heads, row % heads
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    y_base = Y + batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head
    low, high = 0, length
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    sums, first = tl.zeros([CB, VB], tl.float32), tl.zeros([L, CB], tl.float32)
    finite = tl.zeros([L, VB], tl.float32)
    for begin in range(0, SEGMENT, L):
        t = slot * SEGMENT - shift + begin + tl.arange(0, L)
        shown = (t >= 0) & (t < length)
        if BOUNDED:
            shown = shown & (t >= low) & (t < high)
        x = mapped(rows_of(x_base, x_row, t, shown, c, C, C == CB), shown, C, MAP)
        if BACKWARD:
            at = row.to(tl.int64) * length + t
            g_base = GRAD + batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
            g = rows_of(g_base, g_row, t, shown, v, V, V == VB).to(tl.float32)
            o = rows_of(OUT + row.to(tl.int64) * length * V, V, t, shown, v, V, V == VB).to(tl.float32)
            den = tl.load(DEN + at, mask=shown, other=0.0)
            usable = (den != 0) & (den - den == 0) & (tl.sum((o - o != 0).to(tl.int32), 1) == 0)
            y = tl.where(usable[:, None], g / tl.where(usable, den, 1.0)[:, None], 0.0).to(COMPUTE)
            e = -tl.sum(tl.where(usable[:, None], y.to(tl.float32) * o, 0.0), 1)
            tl.store(E + at, e, mask=shown)
            tl.store(y_base + t.to(tl.int64)[:, None] * y_row + v[None, :], y, mask=shown[:, None] & (v < V)[None, :])
            first += x.to(tl.float32) * e[:, None]
        else:
            y = rows_of(y_base, y_row, t, shown, v, V, V == VB).to(COMPUTE)
            first += x.to(tl.float32)
            finite += y.to(tl.float32)
        sums = product(tl.trans(x.to(COMPUTE)), y, sums, PRECISION)
    base = SUMS + (row.to(tl.int64) * slots + slot) * size
    tl.store(base + c[:, None] * VB + v[None, :], sums)
    total = tl.sum(first, 0)
    tl.store(base + CB * VB + c, total)
    if not BACKWARD:
        other = tl.sum(finite, 0)
        bad = tl.sum((total - total != 0).to(tl.int32)) + tl.sum((other - other != 0).to(tl.int32))
        tl.store(BAD + row * slots + slot, bad)


@triton.jit
def walk_block(
    place, sums, first, q_base, k_base, v_base, q_row, k_row, v_row, OUT, DEN, line,
    queries, keys, shift, low, high,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, CLEAN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of positions: the output of its queries, the sums with its keys, and how many numbers of the output are
    not finite."""
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    t = place - shift
    here = (t >= 0) & (t < queries)
    q = mapped(rows_of(q_base, q_row, t, here, c, C, C == CB), here, C, MAP).to(COMPUTE)
    num = tl.dot(q, sums.to(COMPUTE), input_precision=PRECISION)
    den = tl.sum(q.to(tl.float32) * first[None, :], 1)
    if CAUSAL:
        shown = (place >= 0) & (place < keys)
        if BOUNDED:
            shown = shown & (place >= low) & (place < high)
        k = mapped(rows_of(k_base, k_row, place, shown, c, C, C == CB), shown, C, MAP).to(COMPUTE)
        values = rows_of(v_base, v_row, place, shown, v, V, V == VB).to(COMPUTE)
        clean, clean_values = k, values
        if CLEAN:
            bad = bad_rows(k, values)
            clean = tl.where(bad[:, None], tl.zeros_like(k), k)
            clean_values = tl.where(bad[:, None], tl.zeros_like(values), values)
        similar = tl.dot(q, tl.trans(clean), input_precision=PRECISION)
        visible = place[None, :] <= place[:, None]
        similar = tl.where(visible, similar, 0.0)
        if CLEAN:
            similar = tl.where(visible & bad[None, :], float("nan"), similar)
        rounded = similar.to(COMPUTE)
        den += tl.sum(rounded.to(tl.float32), 1)  # of the same digits as num: one key alone weighs 1
        num += tl.dot(rounded, clean_values, input_precision=PRECISION)
        sums += tl.dot(tl.trans(k), values, input_precision=PRECISION)
        first += tl.sum(k.to(tl.float32), 0)
    out = num / tl.where(den == 0, float("inf"), den)[:, None]
    at = line.to(tl.int64) * queries + t
    keep = here[:, None] & (v < V)[None, :]
    tl.store(DEN + at, den, mask=here)
    tl.store(OUT + at[:, None] * V + v[None, :], out, mask=keep)
    return sums, first, tl.sum(tl.sum((out - out != 0).to(tl.int32), 1), 0)


@triton.jit
def walk_kernel(
    Q, K, VALUES, BEFORE, BAD, OUT, DEN, LOW, HIGH,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    queries, keys, shift, heads, groups, slots, size, first_segment,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, ALONE: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of the queries of one segment. ALONE: there is nothing before it, and nobody looked for a NaN, so that
    it is computed again where the output is not finite."""
    segment, line = tl.program_id(0) + first_segment, tl.program_id(1)
    batch, head = line // heads, line % heads
    group_head = head // (heads // groups)
    group = batch * groups + group_head
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    if ALONE:
        sums, first = tl.zeros([CB, VB], tl.float32), tl.zeros([CB], tl.float32)
    else:
        slot = segment if CAUSAL else 0
        base = BEFORE + (group.to(tl.int64) * slots + slot) * size
        summed = c + slot * CB >= 0  # before the first key there are no sums
        sums = tl.load(base + c[:, None] * VB + v[None, :], mask=summed[:, None], other=0.0)
        first = tl.load(base + CB * VB + c, mask=summed, other=0.0)
    q_base = Q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k_base = K + batch.to(tl.int64) * k_batch + group_head.to(tl.int64) * k_head
    v_base = VALUES + batch.to(tl.int64) * v_batch + group_head.to(tl.int64) * v_head
    bad = 0
    if ALONE:
        for begin in range(0, SEGMENT, L):
            sums, first, spoiled = walk_block(
                segment * SEGMENT + begin + tl.arange(0, L), sums, first, q_base, k_base, v_base, q_row, k_row, v_row,
                OUT, DEN, line, queries, keys, shift, low, high,
                C, V, CB, VB, MAP, CAUSAL, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip
            bad += spoiled
        sums, first = tl.zeros([CB, VB], tl.float32), tl.zeros([CB], tl.float32)
    elif CAUSAL:
        bad = tl.load(BAD + group * slots + slot, mask=slot >= 0, other=0)
    if bad > 0:
        for begin in range(0, SEGMENT, L):
            sums, first, _ = walk_block(
                segment * SEGMENT + begin + tl.arange(0, L), sums, first, q_base, k_base, v_base, q_row, k_row, v_row,
                OUT, DEN, line, queries, keys, shift, low, high,
                C, V, CB, VB, MAP, CAUSAL, BOUNDED, True, COMPUTE, PRECISION,
            )  # fmt: skip
    elif not ALONE:
        for begin in range(0, SEGMENT, L):
            sums, first, _ = walk_block(
                segment * SEGMENT + begin + tl.arange(0, L), sums, first, q_base, k_base, v_base, q_row, k_row, v_row,
                OUT, DEN, line, queries, keys, shift, low, high,
                C, V, CB, VB, MAP, CAUSAL, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip


@triton.jit
def walk_queries_block(
    place, sums, first, q_base, w_base, k_base, v_base, q_row, w_row, k_row, v_row, E, GRAD, line,
    queries, keys, shift, low, high,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr,
    BOUNDED: tl.constexpr, CLEAN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of positions: the gradient of its queries, and the sums with its keys."""
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    t = place - shift
    here = (t >= 0) & (t < queries)
    x = rows_of(q_base, q_row, t, here, c, C, C == CB)
    w = rows_of(w_base, w_row, t, here, v, V, V == VB).to(COMPUTE)
    at = line.to(tl.int64) * queries + t
    e = tl.load(E + at, mask=here, other=0.0)
    grad = tl.dot(w, tl.trans(sums.to(COMPUTE)), input_precision=PRECISION) + e[:, None] * first[None, :]
    if CAUSAL:
        shown = (place >= 0) & (place < keys)
        if BOUNDED:
            shown = shown & (place >= low) & (place < high)
        k = mapped(rows_of(k_base, k_row, place, shown, c, C, C == CB), shown, C, MAP).to(COMPUTE)
        values = rows_of(v_base, v_row, place, shown, v, V, V == VB).to(COMPUTE)
        sums += tl.dot(tl.trans(k), values, input_precision=PRECISION)
        first += tl.sum(k.to(tl.float32), 0)
        if CLEAN:
            bad = bad_rows(k, values)
            k = tl.where(bad[:, None], tl.zeros_like(k), k)
            values = tl.where(bad[:, None], tl.zeros_like(values), values)
        pulled = tl.dot(w, tl.trans(values), input_precision=PRECISION) + e[:, None]
        pulled = tl.where(place[None, :] <= place[:, None], pulled, 0.0)
        grad += tl.dot(pulled.to(COMPUTE), k, input_precision=PRECISION)
    # A row that receives no gradient passes none on, whatever it saw.
    live = (e != 0) | (tl.sum((w != 0).to(tl.int32), 1) > 0)
    grad = tl.where(live[:, None], through_map(grad, x, MAP), 0.0)
    tl.store(GRAD + at[:, None] * C + c[None, :], grad, mask=here[:, None] & (c < C)[None, :])
    return sums, first


@triton.jit
def walk_queries_kernel(
    Q, W, E, K, VALUES, BEFORE, BAD, GRAD, LOW, HIGH,
    q_batch, q_head, q_row, w_batch, w_head, w_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    queries, keys, shift, heads, groups, slots, size, first_segment,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    MAP: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries of one segment."""
    segment, line = tl.program_id(0) + first_segment, tl.program_id(1)
    batch, head = line // heads, line % heads
    group_head = head // (heads // groups)
    group = batch * groups + group_head
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    slot = segment if CAUSAL else 0
    base = BEFORE + (group.to(tl.int64) * slots + slot) * size
    summed = c + slot * CB >= 0  # before the first key there are no sums
    sums = tl.load(base + c[:, None] * VB + v[None, :], mask=summed[:, None], other=0.0)
    first = tl.load(base + CB * VB + c, mask=summed, other=0.0)
    q_base = Q + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    w_base = W + batch.to(tl.int64) * w_batch + head.to(tl.int64) * w_head
    k_base = K + batch.to(tl.int64) * k_batch + group_head.to(tl.int64) * k_head
    v_base = VALUES + batch.to(tl.int64) * v_batch + group_head.to(tl.int64) * v_head
    bad = 0
    if CAUSAL:
        bad = tl.load(BAD + group * slots + slot, mask=slot >= 0, other=0)
    if bad > 0:
        for begin in range(0, SEGMENT, L):
            sums, first = walk_queries_block(
                segment * SEGMENT + begin + tl.arange(0, L), sums, first, q_base, w_base, k_base, v_base, q_row, w_row,
                k_row, v_row, E, GRAD, line, queries, keys, shift, low, high,
                C, V, CB, VB, MAP, CAUSAL, BOUNDED, True, COMPUTE, PRECISION,
            )  # fmt: skip
    else:
        for begin in range(0, SEGMENT, L):
            sums, first = walk_queries_block(
                segment * SEGMENT + begin + tl.arange(0, L), sums, first, q_base, w_base, k_base, v_base, q_row, w_row,
                k_row, v_row, E, GRAD, line, queries, keys, shift, low, high,
                C, V, CB, VB, MAP, CAUSAL, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip


@triton.jit
def walk_keys_kernel(
    K, VALUES, Q, W, E, AFTER, K_GRAD, V_GRAD, LOW, HIGH,
    k_batch, k_head, k_row, v_batch, v_head, v_row, q_batch, q_head, q_row, w_batch, w_head, w_row,
    queries, keys, shift, groups, slots, size,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    SHARED: tl.constexpr, MAP: tl.constexpr, CAUSAL: tl.constexpr, BOUNDED: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the keys and values of one segment, from its last block to its first."""
    segment, line = tl.program_id(0), tl.program_id(1)
    batch, head = line // groups, line % groups
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    base = AFTER + (line.to(tl.int64) * slots + (segment if CAUSAL else 0)) * size
    sums = tl.load(base + c[:, None] * VB + v[None, :])
    first = tl.load(base + CB * VB + c)
    k_base = K + batch.to(tl.int64) * k_batch + head.to(tl.int64) * k_head
    v_base = VALUES + batch.to(tl.int64) * v_batch + head.to(tl.int64) * v_head
    for step in range(0, SEGMENT, L):
        place = segment * SEGMENT + SEGMENT - L - step + tl.arange(0, L)
        here = place < keys
        shown = here
        if BOUNDED:
            shown = shown & (place >= low) & (place < high)
        x = rows_of(k_base, k_row, place, shown, c, C, C == CB)
        values = rows_of(v_base, v_row, place, shown, v, V, V == VB).to(COMPUTE)
        k = mapped(x, shown, C, MAP).to(COMPUTE)
        summed = sums.to(COMPUTE)
        v_grad = tl.dot(k, summed, input_precision=PRECISION)
        k_grad = tl.dot(values, tl.trans(summed), input_precision=PRECISION) + first[None, :]
        if CAUSAL:
            t = place - shift
            seen = (t >= 0) & (t < queries)
            for r in range(0, SHARED):
                other = (head * SHARED + r).to(tl.int64)
                q_base = Q + batch.to(tl.int64) * q_batch + other * q_head
                w_base = W + batch.to(tl.int64) * w_batch + other * w_head
                e_base = E + (batch * groups * SHARED + other) * queries
                q = mapped(rows_of(q_base, q_row, t, seen, c, C, C == CB), seen, C, MAP).to(COMPUTE)
                w = rows_of(w_base, w_row, t, seen, v, V, V == VB).to(COMPUTE)
                e = tl.load(e_base + t, mask=seen, other=0.0)
                visible = seen[None, :] & (place[None, :] >= place[:, None])
                similar = tl.where(visible, tl.dot(k, tl.trans(q), input_precision=PRECISION), 0.0)
                pulled = tl.dot(values, tl.trans(w), input_precision=PRECISION) + e[None, :]
                pulled = tl.where(visible, pulled, 0.0)
                v_grad += tl.dot(similar.to(COMPUTE), w, input_precision=PRECISION)
                k_grad += tl.dot(pulled.to(COMPUTE), q, input_precision=PRECISION)
                sums += tl.dot(tl.trans(q), w, input_precision=PRECISION)
                first += tl.sum(q.to(tl.float32) * e[:, None], 0)
        live = shown & (bad_rows(x, values) == 0)
        at = (line.to(tl.int64) * keys + place)[:, None]
        k_grad = tl.where(live[:, None], through_map(k_grad, x, MAP), 0.0)
        tl.store(K_GRAD + at * C + c[None, :], k_grad, mask=here[:, None] & (c < C)[None, :])
        v_grad = tl.where(live[:, None], v_grad, 0.0)
        tl.store(V_GRAD + at * V + v[None, :], v_grad, mask=here[:, None] & (v < V)[None, :])
