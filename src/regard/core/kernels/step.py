"""One token of a kernel mechanism's stream, in Triton, on the state as it is kept: sums (C, V) and a normaliser.

    token      queries of one position meet the sums, BLOCK features in each program, and the newest keys, N in each;
               the token's own key and value are stored on the way
    combine    the parts added up and divided: the output
    fold       more keys go into the sums, which are read once and written once

phi has three forms. "square": feature c is scale_c x_i x_j, of coordinates from two tables, where coordinate D is 1;
its normaliser is the matrix sum [k, 1] [k, 1]ᵀ. "elu": feature c is elu(x_c) + 1. "given": the rows are features. The
normaliser of the last two is sum phi(k). All sums are float32.
"""

import triton
import triton.language as tl


@triton.jit
def coordinate(rows, i, shown, other, D: tl.constexpr):
    """Coordinates i of rows, `other` from D on; 0 where not shown."""
    x = tl.load(rows + i, mask=shown & (i < D), other=0.0).to(tl.float32)
    return tl.where(shown, tl.where(i < D, x, other), 0.0)


@triton.jit
def mapped(x, shown):
    """elu(x) + 1; 0 where not shown."""
    return tl.where(shown, tl.where(x > 0, x + 1, tl.exp(x)), 0.0)


@triton.jit
def features_of(rows, shown, c, LEFT, RIGHT, SCALE, D: tl.constexpr, FORM: tl.constexpr):
    """phi_c of rows, 0 where not shown."""
    if FORM == "square":
        left = coordinate(rows, tl.load(LEFT + c, mask=shown, other=0), shown, 1.0, D)
        right = coordinate(rows, tl.load(RIGHT + c, mask=shown, other=0), shown, 1.0, D)
        phi = left * right * tl.load(SCALE + c, mask=shown, other=0.0)
    else:
        phi = tl.load(rows + c, mask=shown, other=0.0).to(tl.float32)
        if FORM == "elu":
            phi = mapped(phi, shown)
    return phi


@triton.jit
def meet_sums(
    first, q_head, SUMS, NORMALISER, LEFT, RIGHT, SCALE, at, tile, line, features, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """What BLOCK features of the sums, and LINES lines of the square's normaliser, give to the queries of a line."""
    v, r = tl.arange(0, VB), tl.arange(0, ROWS)
    c = tile * BLOCK + tl.arange(0, BLOCK)
    inside = c < features
    place = (line.to(tl.int64) * features + c)[:, None] * V + v[None, :]
    sums = tl.load(SUMS + place, mask=inside[:, None] & (v < V)[None, :], other=0.0)
    if FORM == "square":
        a, b = tile * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH)
        matrix = NORMALISER + line.to(tl.int64) * (D + 1) * (D + 1) + a[:, None] * (D + 1) + b[None, :]
        total = tl.load(matrix, mask=(a <= D)[:, None] & (b <= D)[None, :], other=0.0)
        corner = (a == D)[:, None] & (b == D)[None, :]
        count = tl.sum(tl.sum(tl.where(corner, total, 0.0), 1), 0)
    else:
        total = tl.load(NORMALISER + line.to(tl.int64) * features + c, mask=inside, other=0.0)
    if ROWS >= 16:
        here = r < SHARED
        rows = (first + r.to(tl.int64) * q_head)[:, None]
        phi = features_of(rows, here[:, None] & inside[None, :], c[None, :], LEFT, RIGHT, SCALE, D, FORM)
        num = tl.dot(phi, sums, input_precision="tf32x3")
        if FORM == "square":
            left = coordinate(rows, a[None, :], here[:, None] & (a <= D)[None, :], BETA, D)
            right = coordinate(rows, b[None, :], here[:, None] & (b <= D)[None, :], BETA, D)
            den = D2 * (tl.sum(left * tl.dot(right, tl.trans(total), input_precision="tf32x3"), 1) + REST * count)
        else:
            den = tl.sum(phi * total[None, :], 1)
        tl.store(at + r[:, None] * (VB + 16) + v[None, :], num, mask=here[:, None])
        tl.store(at + r * (VB + 16) + VB, den, mask=here)
    else:
        for row in tl.static_range(SHARED):
            phi = features_of(first + row * q_head, inside, c, LEFT, RIGHT, SCALE, D, FORM)
            tl.store(at + row * (VB + 16) + v, tl.sum(phi[:, None] * sums, 0))
            if FORM == "square":
                left = coordinate(first + row * q_head, a, a <= D, BETA, D)
                right = coordinate(first + row * q_head, b, b <= D, BETA, D)
                den = D2 * (tl.sum(left * tl.sum(total * right[None, :], 1), 0) + REST * count)
            else:
                den = tl.sum(phi * total, 0)
            tl.store(at + row * (VB + 16) + VB, den)


@triton.jit
def meet_keys(
    first, q_head, k_rows, k_from, v_rows, v_from, at, seen, newest, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    FORM: tl.constexpr, APPENDED: tl.constexpr,
):  # fmt: skip
    """What the newest keys that are seen give to the queries of a line; the very newest is stored."""
    i, v, r = tl.arange(0, DB), tl.arange(0, VB), tl.arange(0, ROWS)
    wanted = seen | newest
    k = tl.load(k_from[:, None] + i[None, :], mask=wanted[:, None] & (i < D)[None, :], other=0.0)
    values = tl.load(v_from[:, None] + v[None, :], mask=wanted[:, None] & (v < V)[None, :], other=0.0)
    if APPENDED:
        tl.store(k_rows[:, None] + i[None, :], k, mask=newest[:, None] & (i < D)[None, :])
        tl.store(v_rows[:, None] + v[None, :], values, mask=newest[:, None] & (v < V)[None, :])
    inner = seen[:, None] & (i < D)[None, :]
    k = tl.where(inner, k.to(tl.float32), 0.0)
    values = tl.where(seen[:, None], values.to(tl.float32), 0.0)
    if FORM == "elu":
        k = mapped(k, inner)
    if ROWS >= 16:
        here = r < SHARED
        shown = here[:, None] & (i < D)[None, :]
        rows = first + r.to(tl.int64) * q_head
        q = tl.load(rows[:, None] + i[None, :], mask=shown, other=0.0).to(tl.float32)
        if FORM == "elu":
            q = mapped(q, shown)
        similar = tl.dot(q, tl.trans(k), input_precision="tf32x3")
        if FORM == "square":
            similar = D2 * ((similar + BETA) * (similar + BETA) + REST)
        similar = tl.where(seen[None, :], similar, 0.0)
        num = tl.dot(similar, values, input_precision="tf32x3")
        tl.store(at + r[:, None] * (VB + 16) + v[None, :], num, mask=here[:, None])
        tl.store(at + r * (VB + 16) + VB, tl.sum(similar, 1), mask=here)
    else:
        for row in tl.static_range(SHARED):
            q = tl.load(first + row * q_head + i, mask=i < D, other=0.0).to(tl.float32)
            if FORM == "elu":
                q = mapped(q, i < D)
            similar = tl.sum(k * q[None, :], 1)
            if FORM == "square":
                similar = D2 * ((similar + BETA) * (similar + BETA) + REST)
            similar = tl.where(seen, similar, 0.0)
            tl.store(at + row * (VB + 16) + v, tl.sum(similar[:, None] * values, 0))
            tl.store(at + row * (VB + 16) + VB, tl.sum(similar, 0))


@triton.jit(do_not_specialize=["keys"])
def token_kernel(
    Q, K, VALUES, NEW_K, NEW_V, SUMS, NORMALISER, LEFT, RIGHT, SCALE, PARTS, LOW, HIGH, LENGTH, GONE, keys,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, new_k_batch, new_k_head, new_v_batch, new_v_head,
    groups, features, near, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
    BOUNDED: tl.constexpr, COUNTED: tl.constexpr, APPENDED: tl.constexpr,
):  # fmt: skip
    """Part of the numerators and denominators of the SHARED queries of a key/value head.

    The first `near` programs of a line take N of the newest keys each, the others BLOCK features of the sums. Nothing
    is loaded in a loop: programs side by side hide how long memory takes.
    """
    part, line = tl.program_id(0), tl.program_id(1)
    batch, group = (line // groups).to(tl.int64), (line % groups).to(tl.int64)
    first = Q + batch * q_batch + group * SHARED * q_head
    at = PARTS + (line.to(tl.int64) * tl.num_programs(0) + part) * SHARED * (VB + 16)
    if part >= near:
        meet_sums(
            first, q_head, SUMS, NORMALISER, LEFT, RIGHT, SCALE, at, part - near, line, features, BETA, D2, REST,
            D, V, VB, SHARED, ROWS, BLOCK, LINES, WIDTH, FORM,
        )  # fmt: skip
    else:
        low = 0
        if COUNTED:
            gone = tl.load(GONE).to(tl.int32)
            keys = tl.load(LENGTH).to(tl.int32) - gone
            if BOUNDED:
                low = tl.load(LOW + batch) - gone
        elif BOUNDED:
            low = tl.load(LOW + batch)
        high = keys
        if BOUNDED and not COUNTED:
            high = tl.minimum(tl.load(HIGH + batch), keys)
        t = part * N + tl.arange(0, N)
        seen, newest = (t >= low) & (t < high), t < 0
        k_rows = K + batch * k_batch + group * k_head + t.to(tl.int64) * k_row
        v_rows = VALUES + batch * v_batch + group * v_head + t.to(tl.int64) * v_row
        k_from, v_from = k_rows, v_rows
        if APPENDED:  # the newest token is not among the keys yet
            newest = t == keys - 1
            k_from = tl.where(newest, NEW_K + batch * new_k_batch + group * new_k_head, k_rows)
            v_from = tl.where(newest, NEW_V + batch * new_v_batch + group * new_v_head, v_rows)
        meet_keys(
            first, q_head, k_rows, k_from, v_rows, v_from, at, seen, newest, BETA, D2, REST,
            D, V, DB, VB, SHARED, ROWS, FORM, APPENDED,
        )  # fmt: skip


@triton.jit
def combine_kernel(PARTS, OUT, parts, V: tl.constexpr, VB: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr):
    """The parts of one query added up, num / den; 0 where there is nothing to divide by."""
    row = tl.program_id(0).to(tl.int64)
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
def chosen(x, index, D: tl.constexpr):
    """Columns of x (tokens, coordinates) by their index, 1 from D on: a product with zeros and ones, where loads from
    a table of places would wait for each other."""
    i = tl.arange(0, x.shape[1])
    columns = tl.dot(x, (i[:, None] == index[None, :]).to(x.dtype), input_precision="tf32x3")
    return tl.where((index < D)[None, :], columns, 1.0)


@triton.jit
def fold_kernel(
    K, VALUES, SUMS, NORMALISER, NEW_SUMS, NEW_NORMALISER, LEFT, RIGHT, SCALE, LOW, HIGH,
    k_batch, k_head, k_row, v_batch, v_head, v_row,
    keys, groups, features,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    LINES: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """BLOCK features of the sums with more keys in them; by the programs after those, LINES lines of the square's
    normaliser."""
    tile, line = tl.program_id(0), tl.program_id(1)
    batch, group = (line // groups).to(tl.int64), (line % groups).to(tl.int64)
    low, high = 0, keys
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.minimum(tl.load(HIGH + batch), keys)
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    k_base = K + batch * k_batch + group * k_head
    v_base = VALUES + batch * v_batch + group * v_head
    tiles = tl.cdiv(features, BLOCK)
    if tile < tiles:
        c = tile * BLOCK + tl.arange(0, BLOCK)
        inside = c < features
        at = (line.to(tl.int64) * features + c)[:, None] * V + v[None, :]
        keep = inside[:, None] & (v < V)[None, :]
        acc, total = tl.load(SUMS + at, mask=keep, other=0.0), tl.zeros([BLOCK], tl.float32)
        if FORM == "square":
            left, right = tl.load(LEFT + c, mask=inside, other=D), tl.load(RIGHT + c, mask=inside, other=D)
            scale = tl.load(SCALE + c, mask=inside, other=0.0)
        for begin in range(0, keys, N):
            t = begin + tl.arange(0, N)
            seen = (t >= low) & (t < high)
            rows = k_base + t.to(tl.int64) * k_row
            if FORM == "square":
                x = tl.load(rows[:, None] + i[None, :], mask=seen[:, None] & (i < D)[None, :], other=0.0)
                phi = chosen(x, left, D) * chosen(x, right, D) * scale[None, :]
                phi = tl.where(seen[:, None], phi, 0.0)
            else:
                shown = seen[:, None] & inside[None, :]
                phi = features_of(rows[:, None], shown, c[None, :], LEFT, RIGHT, SCALE, D, FORM)
            values = v_base + t.to(tl.int64)[:, None] * v_row + v[None, :]
            values = tl.load(values, mask=seen[:, None] & (v < V)[None, :], other=0.0).to(tl.float32)
            acc = tl.dot(tl.trans(phi), values, acc, input_precision="tf32x3")
            total += tl.sum(phi, 0)
        tl.store(NEW_SUMS + at, acc, mask=keep)
        if FORM != "square":
            first = line.to(tl.int64) * features + c
            old = tl.load(NORMALISER + first, mask=inside, other=0.0)
            tl.store(NEW_NORMALISER + first, old + total, mask=inside)
    else:
        # Names of its own: Triton wants one type for a name in both branches.
        a, b = (tile - tiles) * LINES + tl.arange(0, LINES), tl.arange(0, WIDTH)
        matrix = line.to(tl.int64) * (D + 1) * (D + 1) + a[:, None] * (D + 1) + b[None, :]
        kept = (a <= D)[:, None] & (b <= D)[None, :]
        square = tl.load(NORMALISER + matrix, mask=kept, other=0.0)
        for start in range(0, keys, N):
            place = start + tl.arange(0, N)
            real = ((place >= low) & (place < high))[:, None]
            token = k_base + place.to(tl.int64)[:, None] * k_row
            # [k, 1]: coordinate D is 1, and those after it are not kept.
            x = tl.load(token + a[None, :], mask=real & (a < D)[None, :], other=0.0)
            y = tl.load(token + b[None, :], mask=real & (b < D)[None, :], other=0.0)
            x = tl.where(real & (a == D)[None, :], tl.full([1, 1], 1.0, x.dtype), x)
            y = tl.where(real & (b == D)[None, :], tl.full([1, 1], 1.0, y.dtype), y)
            square = tl.dot(tl.trans(x), y, square, input_precision="tf32x3")
        tl.store(NEW_NORMALISER + matrix, square, mask=kept)
