"""Kernel attention with a second-order polynomial, d·(q·k)² + b·q·k + a, in Triton: features never reach memory.

Positions are cut into chunks. A query takes its own chunk in score form and everything before it from the state, the
sums over earlier keys

    square[ij, v] = sum k_i k_j v      linear[i, v] = sum k_i v      constant[v] = sum v
    and the same with 1 in place of v, for the denominator

The square is symmetric, so only blocks of 16 coordinates with i's block up to j's are kept. It is cut into units of 128
features: 8 coordinates i (an octet) times one block of 16 coordinates j. A tile of features is an outer product of two
narrow tiles in registers, and goes from there to the matrix units.

The kernels of the forward and the backward pass:

    sum_chunks    linear, constant and the denominator's sums of each chunk; in the backward pass also the gradients
                  that reach numerator and denominator
    prefix        those sums before each chunk (in the backward pass: after it)
    square        the square before each chunk, some of its features in the registers of each program
    near          rows meet their own chunk, and the state but for the square
    far           they meet the square: the output, or the values' gradient
    near_queries, near_keys, pull       the same for the gradients of queries and keys (quadratic_gradients.py)

`near` and `far` are apart because a kernel with both kinds of loop is compiled to wait for each matrix product.
"""

import triton
import triton.language as tl

from regard.core.kernels.common import bad_rows, product, rows_of

EQUAL = tl.constexpr(8)
"""Columns of a denominator that a product with ones gives: the fewest it may have."""


@triton.jit
def feature(i, j):
    """Where the feature of coordinates i and j stands; the one in the earlier block of 16 is the octet's."""
    swap = i // 16 > j // 16
    first, second = tl.where(swap, j, i), tl.where(swap, i, j)
    block = second // 16
    return (block * (block + 1) + first // 8) * 128 + (first % 8) * 16 + second % 16


@triton.jit
def finer_product(a, b, PRECISION: tl.constexpr):
    """a @ b for a float32 b, of which a half-precision product takes both halves of the digits."""
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision=PRECISION)
    high = b.to(a.dtype)
    low = (b - high.to(tl.float32)).to(a.dtype)
    return tl.dot(a, high) + tl.dot(a, low)


@triton.jit
def sum_chunks_kernel(
    X, Y, GRAD, OUT, REST_OUT, DEN, E, TURNED, SUMS, BAD, LOW, HIGH,
    x_batch, x_head, x_row, y_batch, y_head, y_row, g_batch, g_head, g_row,
    length, turned_row, shift, heads, slots, size,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
    BOUNDED: tl.constexpr, BACKWARD: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each chunk and head: sum x yᵀ, sum e x xᵀ, sum e x, sum y, sum e, and whether a row is not finite.

    Forward: x are keys, y values, e is 1. Backward: x are queries; y = g / den and e = -(g·out) / den are made here.
    x is written again with tokens last: `square` multiplies neighbouring tokens by neighbouring tokens.
    """
    slot, row = tl.program_id(0), tl.program_id(1)
    batch, head = row // heads, row % heads
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    start = slot * CHUNK - shift
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    y_base = Y + batch.to(tl.int64) * y_batch + head.to(tl.int64) * y_head
    turned = TURNED + row.to(tl.int64) * DB * turned_row + i[:, None] * turned_row
    low, high = 0, length
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    linear, second = tl.zeros([DB, VB], tl.float32), tl.zeros([DB, DB], tl.float32)
    first, constant, count = tl.zeros([L, DB], tl.float32), tl.zeros([L, VB], tl.float32), tl.zeros([L], tl.float32)
    for begin in range(0, CHUNK, L):
        t = start + begin + tl.arange(0, L)
        inside = (t >= 0) & (t < length)
        shown = inside
        if BOUNDED:
            shown = shown & (t >= low) & (t < high)
        x = rows_of(x_base, x_row, t, shown, i, D, D == DB).to(COMPUTE)
        if BACKWARD:
            at = row.to(tl.int64) * length + t
            g_base = GRAD + batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
            g = rows_of(g_base, g_row, t, shown, v, V, V == VB).to(tl.float32)
            o = rows_of(OUT + row.to(tl.int64) * length * V, V, t, shown, v, V, V == VB).to(tl.float32)
            o += rows_of(REST_OUT + row.to(tl.int64) * length * V, V, t, shown, v, V, V == VB).to(tl.float32)
            den = tl.load(DEN + at, mask=shown, other=0.0)
            # A query that sees a NaN or an infinity passes no gradient on.
            usable = (den != 0) & (den - den == 0) & (tl.sum((o - o != 0).to(tl.int32), 1) == 0)
            y = tl.where(usable[:, None], g / tl.where(usable, den, 1.0)[:, None], 0.0).to(COMPUTE)
            # From the rounded w: where few keys are seen, w·v + e is a difference of nearly equal numbers.
            e = -tl.sum(tl.where(usable[:, None], y.to(tl.float32) * o, 0.0), 1)
            tl.store(E + at, e, mask=shown)
            tl.store(y_base + t.to(tl.int64)[:, None] * y_row + v[None, :], y, mask=shown[:, None] & (v < V)[None, :])
            weighted = x.to(tl.float32) * e[:, None]
            first += weighted
            count += e
            weighted = weighted.to(COMPUTE)
        else:
            y = rows_of(y_base, y_row, t, shown, v, V, V == VB).to(COMPUTE)
            weighted = x
            first += x.to(tl.float32)
            count += shown.to(tl.float32)
        constant += y.to(tl.float32)
        columns = tl.trans(x)
        tl.store(turned + t[None, :], columns, mask=inside[None, :])
        linear = product(columns, y, linear, PRECISION)
        second = product(columns, weighted, second, PRECISION)
    base = SUMS + (row.to(tl.int64) * slots + slot) * size
    tl.store(base + i[:, None] * VB + v[None, :], linear)
    tl.store(base + DB * VB + i[:, None] * DB + i[None, :], second)
    total, other_total = tl.sum(first, 0), tl.sum(constant, 0)
    tl.store(base + DB * VB + DB * DB + i, total)
    tl.store(base + DB * VB + DB * DB + DB + v, other_total)
    tl.store(base + DB * VB + DB * DB + DB + VB, tl.sum(count))
    if not BACKWARD:
        # A NaN or an infinity shows in the sums; huge sums too, and then finite numbers are cleaned of nothing.
        bad = tl.sum((total - total != 0).to(tl.int32)) + tl.sum((other_total - other_total != 0).to(tl.int32))
        tl.store(BAD + row * slots + slot, bad)


@triton.jit
def square_kernel(
    X, Y, TURNED, STATE, INITIAL, FINAL, LOW, HIGH,
    x_batch, x_head, x_row, y_batch, y_head, y_row,
    length, turned_row, shift, groups, total, span, room, units,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, L: tl.constexpr, CHUNK: tl.constexpr,
    SHARED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BOUNDED: tl.constexpr, REVERSE: tl.constexpr,
    LAST: tl.constexpr, WHOLE: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum x_i x_j y over the tokens before each chunk but the first; reversed, after each chunk but the last.

    A program walks all `total` chunks of a key/value head and holds LEFT · RIGHT features of the sums in registers.
    With more than one program along the third axis each walks `span` chunks and sums those alone; FINAL are its sums in
    the end. From INITIAL on, where it is given, the sums before the first chunk are kept too. With LAST the last chunk
    is walked for FINAL only.
    """
    tile, row, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, group = row // groups, row % groups
    column = 0
    for b in tl.static_range(1, 8):
        column += (tile * LEFT * 2 >= RIGHT * b * (b + 1)).to(tl.int32)
    first = (tile - column * (column + 1) // 2 * (RIGHT // LEFT)) * LEFT
    i, j = first + tl.arange(0, LEFT), column * RIGHT + tl.arange(0, RIGHT)
    v = tl.arange(0, VB)
    low, high = 0, length
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    # Where the features stand, as `feature` has it, written so that what differs within a thread is a constant.
    u, w = tl.arange(0, LEFT * RIGHT) // RIGHT, tl.arange(0, LEFT * RIGHT) % RIGHT
    block = column * (RIGHT // 16)
    stands = (block * (block + 1) + first // 8) * 128 + first % 8 * 16
    within = u // 8 * 128 + u % 8 * 16 + w % 16 + w // 16 * ((2 * block + 2) * 128)
    kept = (first // 16 <= block + w // 16) & (block + w // 16 < (D + 15) // 16)
    place = STATE + row.to(tl.int64) * room * units * 128 * VB + stands * VB
    place = place + within[:, None] * VB + v[None, :]
    ends = within[:, None] * VB + v[None, :] + stands * VB
    if INITIAL is not None:
        acc = tl.load(INITIAL + row.to(tl.int64) * units * 128 * VB + ends, mask=kept[:, None], other=0.0)
        tl.store(place, acc, mask=kept[:, None])
        place += units * 128 * VB
    else:
        acc = tl.zeros([LEFT * RIGHT, VB], tl.float32)
    for walked in range(segment * span, tl.minimum(segment * span + span, total)):
        chunk = walked
        slot = walked
        if REVERSE:
            chunk = total - walked
            slot = chunk - 1
        for r in range(0, SHARED):
            head = (group * SHARED + r).to(tl.int64)
            x_base = X + batch.to(tl.int64) * x_batch + head * x_head
            y_base = Y + batch.to(tl.int64) * y_batch + head * y_head
            for begin in range(0, CHUNK, L):
                t = chunk * CHUNK - shift + begin + tl.arange(0, L)
                shown = (t >= 0) & (t < length)
                if WHOLE:
                    shown = tl.full([L], True, tl.int1)
                if BOUNDED:
                    shown = shown & (t >= low) & (t < high)
                turned = TURNED + (batch.to(tl.int64) * groups * SHARED + head) * DB * turned_row
                left = tl.load(turned + i[:, None] * turned_row + t[None, :], mask=shown[None, :], other=0.0)
                right = rows_of(x_base, x_row, t, shown, j, D, D % RIGHT == 0).to(COMPUTE)
                y = rows_of(y_base, y_row, t, shown, v, V, V == VB).to(COMPUTE)
                phi = tl.reshape(left[:, None, :] * tl.trans(right)[None, :, :], [LEFT * RIGHT, L])
                acc = product(phi, y, acc, PRECISION)
        after = place + tl.cast(slot, tl.int64) * units * 128 * VB
        if not LAST:
            tl.store(after, acc, mask=kept[:, None])
        else:
            if walked < total - 1:
                tl.store(after, acc, mask=kept[:, None])
    if FINAL is not None:
        ends += (row * tl.num_programs(2) + segment).to(tl.int64) * units * 128 * VB
        tl.store(FINAL + ends, acc, mask=kept[:, None])


@triton.jit
def shift_kernel(STATE, BEFORE, total, span, room, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Add to the sums that a program of `square` kept what is before its chunks (reversed, after them)."""
    segment, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(BEFORE + (row * tl.num_programs(1) + segment) * size + place, mask=place < size, other=0.0)
    for walked in range(segment * span, tl.minimum(segment * span + span, total)):
        slot = walked
        if REVERSE:
            slot = total - 1 - walked
        at = STATE + (row * room + slot) * size + place
        kept = tl.load(at, mask=place < size, other=0.0).to(tl.float32)
        tl.store(at, kept + before, mask=place < size)


@triton.jit
def near_rows(
    x, place, num, den, XO, YO, xo_row, yo_row, first, last, length, low, high, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, BOUNDED: tl.constexpr, CLEAN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to num and den what rows see in keys [first, last) of their own chunk, in score form.

    num is multiplied by d in the end: a product that is used at once lets the compiler keep the others in flight. den
    has EQUAL equal columns, as a product gives it.
    """
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
        score = tl.dot(x, tl.trans(other), input_precision=PRECISION) + BETA
        if MASKED or BOUNDED:
            # Keys from `last` on come after every query that is stored. Places within a tile compare in 32 bits.
            visible = tl.arange(0, N)[None, :] <= (place - begin)[:, None]
            if BOUNDED or CLEAN:
                visible = visible & shown[None, :]
            score = tl.where(visible, score, 0.0)
        similar = score * score  # as `similarity` has it: no smaller than 0 in any rounding
        if REST is not None:
            if MASKED or BOUNDED:
                similar = tl.where(visible, similar + REST, 0.0)
            else:
                similar += REST
        if CLEAN:
            similar = tl.where(visible & bad[None, :], float("nan"), similar)
        # The denominator has the same digits as num: one key alone weighs 1.
        rounded = similar.to(COMPUTE)
        num += D2 * tl.dot(rounded, values, input_precision=PRECISION)
        if rounded.dtype == tl.float32:
            den += D2 * tl.sum(rounded, 1)[:, None]
        else:
            den += D2 * tl.dot(rounded, tl.full([N, EQUAL], 1.0, COMPUTE))
    return num, den


@triton.jit
def near_kernel(
    X, XO, YO, BEFORE, BAD, NUM, DEN, LOW, HIGH,
    x_batch, x_head, x_row, xo_batch, xo_head, xo_row, yo_batch, yo_head, yo_row,
    rows, row_shift, length, heads, groups, chunks, size, first_block, A2, B2, D2, BETA, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    CHUNK: tl.constexpr, CAUSAL: tl.constexpr, CARRIED: tl.constexpr, BOUNDED: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries meet their own chunk, and everything before it but for the square: num and den.

    With sums CARRIED from earlier calls there is something before the first chunk too.
    """
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
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    x = rows_of(x_base, x_row, t, shown_rows, i, D, D == DB).to(COMPUTE)
    num, den = tl.zeros([M, VB], tl.float32), tl.zeros([M, EQUAL], tl.float32)
    chunk = 0
    if CAUSAL:
        chunk = tl.maximum(block * M, 0) // CHUNK
    if (chunk > 0) | (not CAUSAL) | CARRIED:
        small = BEFORE + (group.to(tl.int64) * chunks + chunk) * size
        linear = tl.load(small + i[:, None] * VB + v[None, :])
        second = tl.load(small + DB * VB + i[:, None] * DB + i[None, :])
        first = tl.load(small + DB * VB + DB * DB + i)
        constant = tl.load(small + DB * VB + DB * DB + DB + v)
        count = tl.load(small + DB * VB + DB * DB + DB + VB)
        num += B2 * tl.dot(x, linear.to(COMPUTE), input_precision=PRECISION) + A2 * constant[None, :]
        reached = D2 * finer_product(x, second, PRECISION) + B2 * first[None, :]
        den += tl.sum(reached * x.to(tl.float32), 1)[:, None] + A2 * count
    if CAUSAL:
        begin, middle, end = chunk * CHUNK, tl.maximum(block * M, 0), tl.minimum(block * M + M, length)
        xo_base = XO + batch.to(tl.int64) * xo_batch + group_head.to(tl.int64) * xo_head
        yo_base = YO + batch.to(tl.int64) * yo_batch + group_head.to(tl.int64) * yo_head
        bad = tl.load(BAD + group * chunks + chunk)
        if bad > 0:
            num, den = near_rows(
                x, place, num, den, xo_base, yo_base, xo_row, yo_row, begin, end, length, low, high, BETA, D2, REST,
                D, V, DB, VB, N, True, BOUNDED, True, COMPUTE, PRECISION,
            )  # fmt: skip
        else:
            num, den = near_rows(
                x, place, num, den, xo_base, yo_base, xo_row, yo_row, begin, middle, length, low, high, BETA, D2, REST,
                D, V, DB, VB, N, False, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip
            num, den = near_rows(
                x, place, num, den, xo_base, yo_base, xo_row, yo_row, middle, end, length, low, high, BETA, D2, REST,
                D, V, DB, VB, N, True, BOUNDED, False, COMPUTE, PRECISION,
            )  # fmt: skip
    at = line.to(tl.int64) * rows + t
    tl.store(NUM + at[:, None] * VB + v[None, :], num, mask=shown_rows[:, None])
    tl.store(DEN + at, tl.sum(den, 1) / EQUAL, mask=shown_rows)


@triton.jit
def alone_kernel(
    X, XO, YO, OUT, REST_OUT, DEN, LOW, HIGH,
    x_batch, x_head, x_row, xo_batch, xo_head, xo_row, yo_batch, yo_head, yo_row,
    rows, row_shift, length, heads, groups, first_block, BETA, D2, REST,
    D: tl.constexpr, V: tl.constexpr, DB: tl.constexpr, VB: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BOUNDED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of causal queries where there is one chunk alone, and nothing before it. A tile whose result is not
    finite is computed again, with NaN for the queries that see a bad key and for no others."""
    line = tl.program_id(1)
    batch, head = line // heads, line % heads
    group = head // (heads // groups)
    block = tl.program_id(0) + first_block
    place = block * M + tl.arange(0, M)
    t = place - row_shift
    shown_rows = (t >= 0) & (t < rows)
    low, high = 0, length
    if BOUNDED:
        low, high = tl.load(LOW + batch), tl.load(HIGH + batch)
    i, v = tl.arange(0, DB), tl.arange(0, VB)
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    xo_base = XO + batch.to(tl.int64) * xo_batch + group.to(tl.int64) * xo_head
    yo_base = YO + batch.to(tl.int64) * yo_batch + group.to(tl.int64) * yo_head
    x = rows_of(x_base, x_row, t, shown_rows, i, D, D == DB).to(COMPUTE)
    num, den = tl.zeros([M, VB], tl.float32), tl.zeros([M, EQUAL], tl.float32)
    middle, end = tl.maximum(block * M, 0), tl.minimum(block * M + M, length)
    num, den = near_rows(
        x, place, num, den, xo_base, yo_base, xo_row, yo_row, 0, middle, length, low, high, BETA, D2, REST,
        D, V, DB, VB, N, False, BOUNDED, False, COMPUTE, PRECISION,
    )  # fmt: skip
    num, den = near_rows(
        x, place, num, den, xo_base, yo_base, xo_row, yo_row, middle, end, length, low, high, BETA, D2, REST,
        D, V, DB, VB, N, True, BOUNDED, False, COMPUTE, PRECISION,
    )  # fmt: skip
    bad = tl.sum(tl.sum((den - den != 0).to(tl.int32), 1), 0) + tl.sum(tl.sum((num - num != 0).to(tl.int32), 1), 0)
    if bad > 0:
        num, den = tl.zeros([M, VB], tl.float32), tl.zeros([M, EQUAL], tl.float32)
        num, den = near_rows(
            x, place, num, den, xo_base, yo_base, xo_row, yo_row, 0, end, length, low, high, BETA, D2, REST,
            D, V, DB, VB, N, True, BOUNDED, True, COMPUTE, PRECISION,
        )  # fmt: skip
    at = line.to(tl.int64) * rows + t
    den = tl.sum(den, 1) / EQUAL
    num = num / tl.where(den == 0, float("inf"), den)[:, None]
    keep = shown_rows[:, None] & (v < V)[None, :]
    tl.store(DEN + at, den, mask=shown_rows)
    tl.store(OUT + at[:, None] * V + v[None, :], num, mask=keep)
    if REST_OUT is not None:  # the digits that rounding takes, for the backward pass
        rest = num - num.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(REST_OUT + at[:, None] * V + v[None, :], rest, mask=keep)


@triton.jit
def far_kernel(
    X, STATE, NUM, DEN, OUT, REST_OUT,
    x_batch, x_head, x_row, rows, row_shift, lines_shared, heads, chunks, first_block, D2,
    D: tl.constexpr, V: tl.constexpr, VB: tl.constexpr, UNITS: tl.constexpr, M: tl.constexpr, CHUNK: tl.constexpr,
    CAUSAL: tl.constexpr, CARRIED: tl.constexpr, STATED: tl.constexpr, REVERSE: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """num + d · (x_i x_j)·square, the rest of what rows see; over den, the output. Reversed, the values' gradient."""
    line = tl.program_id(1)
    batch, head = line // heads, line % heads
    group = line // lines_shared
    block = tl.program_id(0) + first_block
    t = block * M + tl.arange(0, M) - row_shift
    shown_rows = (t >= 0) & (t < rows)
    slots, slot = 1, 0
    if CAUSAL:
        slots = chunks if CARRIED else chunks - 1
        slot = tl.maximum(block * M, 0) // CHUNK
        if not REVERSE and not CARRIED:
            slot -= 1
    v, f = tl.arange(0, VB), tl.arange(0, 128)
    at = line.to(tl.int64) * rows + t
    acc = tl.zeros([M, VB], tl.float32)
    has_state = (slot >= 0) & (slot < slots) & (block * M + M > 0)
    slot = tl.where(has_state, slot, 0)
    x_base = X + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head
    tile = STATE + (group.to(tl.int64) * slots + slot) * UNITS * 128 * VB + f[:, None] * VB + v[None, :]
    octet, pair = 0, 0
    # A loop that may run no time at all is compiled to wait for each product; rows without a state drop the result.
    for unit in tl.range(0, UNITS if STATED else 0, num_stages=STAGES):
        left = rows_of(x_base, x_row, t, shown_rows, octet * 8 + tl.arange(0, 8), D, D % 16 == 0).to(COMPUTE)
        right = rows_of(x_base, x_row, t, shown_rows, pair * 16 + tl.arange(0, 16), D, D % 16 == 0).to(COMPUTE)
        # A block of two different sixteens stands for its mirror image too.
        left *= tl.where(octet < 2 * pair, 2.0, 1.0).to(COMPUTE)
        phi = tl.reshape(left[:, :, None] * right[:, None, :], [M, 128])
        acc = product(phi, tl.load(tile + unit * 128 * VB).to(COMPUTE), acc, PRECISION)
        done = octet == 2 * pair + 1
        octet = tl.where(done, 0, octet + 1)
        pair = tl.where(done, pair + 1, pair)
    num = tl.where(has_state, D2 * acc, 0.0) + tl.load(
        NUM + at[:, None] * VB + v[None, :], mask=shown_rows[:, None], other=0.0
    )
    if REVERSE:  # what is hidden, or not finite, has no gradient: near_keys_kernel has marked it
        num = tl.where(tl.load(DEN + at, mask=shown_rows, other=0.0)[:, None] != 0, num, 0.0)
    else:
        den = tl.load(DEN + at, mask=shown_rows, other=0.0)
        num = num / tl.where(den == 0, float("inf"), den)[:, None]
    keep = shown_rows[:, None] & (v < V)[None, :]
    tl.store(OUT + at[:, None] * V + v[None, :], num, mask=keep)
    if REST_OUT is not None:  # the digits that rounding takes, for the backward pass
        rest = num - num.to(OUT.dtype.element_ty).to(tl.float32)
        tl.store(REST_OUT + at[:, None] * V + v[None, :], rest, mask=keep)
