"""One token of a kernel mechanism's stream, in Triton, on the state as it is kept: sums (C, V) and a normaliser.

    token      queries of one position meet the sums, a part of the features in each program, and the newest keys
    combine    the parts added up and divided: the output
    fold       more keys go into the sums, which are read once and written once

phi has three forms. "square": feature c is scale_c x_i x_j, of coordinates from two tables, where coordinate D is 1;
its normaliser is the matrix sum [k, 1] [k, 1]ᵀ. "elu": feature c is elu(x_c) + 1. "given": the rows are features. The
normaliser of the last two is sum phi(k). All numbers are float32.
"""

import triton
import triton.language as tl


@triton.jit
def coordinate(rows, i, shown, other, D: tl.constexpr):
    """Coordinates i of rows, `other` from D on; 0 where not shown."""
    x = tl.load(rows[:, None] + i[None, :], mask=shown & (i < D)[None, :], other=0.0).to(tl.float32)
    return tl.where(shown, tl.where((i < D)[None, :], x, other), 0.0)


@triton.jit
def features_of(rows, shown, c, inside, LEFT, RIGHT, SCALE, D: tl.constexpr, FORM: tl.constexpr):
    """phi_c of rows, (rows, features), 0 where not shown and where a feature is not inside."""
    shown = shown[:, None] & inside[None, :]
    if FORM == "square":
        left = coordinate(rows, tl.load(LEFT + c, mask=inside, other=0), shown, 1.0, D)
        right = coordinate(rows, tl.load(RIGHT + c, mask=inside, other=0), shown, 1.0, D)
        phi = left * right * tl.load(SCALE + c, mask=inside, other=0.0)[None, :]
    else:
        phi = tl.load(rows[:, None] + c[None, :], mask=shown, other=0.0).to(tl.float32)
        if FORM == "elu":
            phi = tl.where(shown, tl.where(phi > 0, phi + 1, tl.exp(phi)), 0.0)
    return phi


@triton.jit
def added(acc, weights, tile):
    """acc + weights @ tile, of few rows by multiplications in registers."""
    if weights.shape[0] >= 16:
        acc = tl.dot(weights, tile, acc, input_precision="tf32x3")
    else:
        acc += tl.sum(weights[:, :, None] * tile[None, :, :], 1)
    return acc


@triton.jit
def token_kernel(
    Q, K, VALUES, SUMS, NORMALISER, LEFT, RIGHT, SCALE, PARTS, LOW, HIGH,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row,
    keys, groups, features, span, norms, norm_span, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Part of the numerators and denominators of the SHARED queries of a key/value head. The last program of a line
    takes the newest keys, the others the sums."""
    part, line = tl.program_id(0), tl.program_id(1)
    batch, group = line // groups, line % groups
    r, v, block = tl.arange(0, ROWS), tl.arange(0, VB), tl.arange(0, BLOCK)
    shown = r < SHARED
    rows = Q + batch.to(tl.int64) * q_batch + (group * SHARED + r).to(tl.int64) * q_head
    num, den = tl.zeros([ROWS, VB], tl.float32), tl.zeros([ROWS], tl.float32)
    if part < tl.num_programs(0) - 1:
        last = tl.minimum(part * span + span, features)
        for begin in range(part * span, last, BLOCK):
            c = begin + block
            phi = features_of(rows, shown, c, c < last, LEFT, RIGHT, SCALE, D, FORM)
            tile = SUMS + (line.to(tl.int64) * features + c)[:, None] * V + v[None, :]
            num = added(num, phi, tl.load(tile, mask=(c < last)[:, None] & (v < V)[None, :], other=0.0))
            if FORM != "square":
                total = tl.load(NORMALISER + line.to(tl.int64) * features + c, mask=c < last, other=0.0)
                den += tl.sum(phi * total[None, :], 1)
        if FORM == "square":
            last = tl.minimum(part * norm_span + norm_span, norms)
            for begin in range(part * norm_span, last, BLOCK):
                c = begin + block
                inside = shown[:, None] & (c < last)[None, :]
                total = tl.load(NORMALISER + line.to(tl.int64) * norms + c, mask=c < last, other=0.0)
                left = coordinate(rows, c // (D + 1), inside, BETA, D)
                right = coordinate(rows, c % (D + 1), inside, BETA, D)
                den += D2 * tl.sum(left * right * total[None, :], 1)
                den += D2 * REST * tl.sum(tl.where(c == norms - 1, total, 0.0), 0)
    else:
        low, high = 0, keys
        if BOUNDED:
            low, high = tl.load(LOW + batch), tl.minimum(tl.load(HIGH + batch), keys)
        i = tl.arange(0, DB)
        k_base = K + batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
        v_base = VALUES + batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
        q = tl.load(rows[:, None] + i[None, :], mask=shown[:, None] & (i < D)[None, :], other=0.0).to(tl.float32)
        if FORM == "elu":
            q = tl.where(shown[:, None] & (i < D)[None, :], tl.where(q > 0, q + 1, tl.exp(q)), 0.0)
        for begin in range(0, keys, N):
            t = begin + tl.arange(0, N)
            seen = (t >= low) & (t < high)
            inside = seen[:, None] & (i < D)[None, :]
            k = tl.load(k_base + t[:, None] * k_row + i[None, :], mask=inside, other=0.0).to(tl.float32)
            values = v_base + t[:, None] * v_row + v[None, :]
            values = tl.load(values, mask=seen[:, None] & (v < V)[None, :], other=0.0).to(tl.float32)
            if FORM == "elu":
                k = tl.where(inside, tl.where(k > 0, k + 1, tl.exp(k)), 0.0)
            similar = added(tl.zeros([ROWS, N], tl.float32), q, tl.trans(k))
            if FORM == "square":
                similar = D2 * ((similar + BETA) * (similar + BETA) + REST)
            similar = tl.where(seen[None, :], similar, 0.0)
            num = added(num, similar, values)
            den += tl.sum(similar, 1)
    at = PARTS + ((line * tl.num_programs(0) + part) * SHARED + r) * (VB + 16)
    tl.store(at[:, None] + v[None, :], num, mask=shown[:, None])
    tl.store(at + VB, den, mask=shown)


@triton.jit
def combine_kernel(PARTS, OUT, parts, V: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr):
    """The parts of one query added up, num / den; 0 where there is nothing to divide by."""
    row = tl.program_id(0)
    p, v = tl.arange(0, COUNT), tl.arange(0, VB)
    num, den = tl.zeros([COUNT, VB], tl.float32), tl.zeros([COUNT], tl.float32)
    for begin in range(0, parts, COUNT):
        inside = begin + p < parts
        at = PARTS + ((row // SHARED * parts + begin + p) * SHARED + row % SHARED) * (VB + 16)
        num += tl.load(at[:, None] + v[None, :], mask=inside[:, None], other=0.0)
        den += tl.load(at + VB, mask=inside, other=0.0)
    total = tl.sum(den, 0)
    tl.store(OUT + row * V + v, tl.sum(num, 0) / tl.where(total == 0, float("inf"), total), mask=v < V)


@triton.jit
def fold_kernel(
    K, VALUES, SUMS, NORMALISER, NEW_SUMS, NEW_NORMALISER, LEFT, RIGHT, SCALE, LOW, HIGH,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    keys, groups, features, norms,
    D: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, FORM: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """BLOCK features of the sums with more keys in them; by the programs after those, of the square's normaliser."""
    tile, line = tl.program_id(0), tl.program_id(1)
    batch, group = line // groups, line % groups
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.minimum(tl.load(HIGH + batch), keys)
    v, block = tl.arange(0, VB), tl.arange(0, BLOCK)
    k_base = K + batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_base = VALUES + batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    tiles = tl.cdiv(features, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if tile < tiles:
        c = tile * BLOCK + block
        at = (line.to(tl.int64) * features + c)[:, None] * V + v[None, :]
        keep = (c < features)[:, None] & (v < V)[None, :]
        acc = tl.load(SUMS + at, mask=keep, other=0.0)
        for begin in range(0, keys, N):
            t = begin + tl.arange(0, N)
            seen = (t >= low) & (t < high)
            phi = features_of(k_base + t * k_row, seen, c, c < features, LEFT, RIGHT, SCALE, D, FORM)
            values = v_base + t[:, None] * v_row + v[None, :]
            values = tl.load(values, mask=seen[:, None] & (v < V)[None, :], other=0.0).to(tl.float32)
            acc = tl.dot(tl.trans(phi), values, acc, input_precision="tf32x3")
            total += tl.sum(phi, 0)
        tl.store(NEW_SUMS + at, acc, mask=keep)
        if FORM != "square":
            first = line.to(tl.int64) * features + c
            old = tl.load(NORMALISER + first, mask=c < features, other=0.0)
            tl.store(NEW_NORMALISER + first, old + total, mask=c < features)
    else:
        c = (tile - tiles) * BLOCK + block
        for begin in range(0, keys, N):
            t = begin + tl.arange(0, N)
            inside = ((t >= low) & (t < high))[:, None] & (c < norms)[None, :]
            left = coordinate(k_base + t * k_row, c // (D + 1), inside, 1.0, D)
            right = coordinate(k_base + t * k_row, c % (D + 1), inside, 1.0, D)
            total += tl.sum(left * right, 0)
        place = line.to(tl.int64) * norms + c
        old_norms = tl.load(NORMALISER + place, mask=c < norms, other=0.0)
        tl.store(NEW_NORMALISER + place, old_norms + total, mask=c < norms)
