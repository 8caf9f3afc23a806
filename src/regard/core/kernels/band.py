"""Softmax attention within a band of positions and an interval of keys for each batch row, in Triton.

The flash algorithm (Dao et al. 2022): a tile of queries walks only the keys that some of its rows
may see; keys that all of its rows see need no mask. Causal, windows, padding, and as many queries as you like.

A hidden key has weight 0, but 0 · NaN is NaN. So a tile whose result is not finite is computed again, with bad keys and
values set to 0, and with NaN for the queries that see one. Keys need no look beforehand.

Registers are what these kernels are short of. The forward pass has three loops over keys, for those at the two edges of
the band and for those between, which need no mask. Gradients are in band_gradients.py.
"""

import triton
import triton.language as tl

from regard.core.kernels.common import bad_rows, product, rows_of


@triton.jit
def visible(position, place, low, high, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, WITHIN: tl.constexpr):
    """Which queries at `position` see which keys at `place`; one of them is a column, the other a row. WITHIN says that
    keys beyond [low, high) are hidden by the band, or need not be hidden."""
    if WITHIN and BEFORE and AFTER:
        seen = (place >= position - before) & (place <= position + after)
    elif WITHIN and AFTER:
        seen = place <= position + after
    elif WITHIN and BEFORE:
        seen = place >= position - before
    else:
        seen = (place >= low) & (place < high)
        if BEFORE:
            seen = seen & (place >= position - before)
        if AFTER:
            seen = seen & (place <= position + after)
    return seen


@triton.jit
def tile_of(
    base, row_stride, start, end, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    """ROWS rows of a matrix from row `start` on, 0 from row `end` on; without a mask if all rows are before `end`.

    What differs from tile to tile is a single pointer, the same for all threads: pointers per row take registers.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    place = base + tl.cast(start, tl.int64) * row_stride + (row.to(tl.int64)[:, None] * row_stride + column[None, :])
    if MASKED and WIDTH == BLOCK:
        tile = tl.load(place, mask=(row < end - start)[:, None], other=0.0)
    elif MASKED:
        tile = tl.load(place, mask=(row < end - start)[:, None] & (column < WIDTH)[None, :], other=0.0)
    elif WIDTH == BLOCK:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def numbers_of(base, start, end, ROWS: tl.constexpr, OTHER: tl.constexpr):
    """A number per row, for ROWS rows from `start` on; OTHER from `end` on."""
    row = tl.arange(0, ROWS)
    return tl.load(base + start + row, mask=row < end - start, other=OTHER)


@triton.jit
def span_of(first, last, low, high, before, after, BEFORE: tl.constexpr, AFTER: tl.constexpr, STEP: tl.constexpr):
    """For queries at [first, last]: the first key that one of them sees, the steps of keys that all of them see, and
    the end of the keys that one of them sees."""
    full_low, full_high = low, high
    if BEFORE:
        low, full_low = tl.maximum(low, first - before), tl.maximum(low, last - before)
    if AFTER:
        high, full_high = tl.minimum(high, last + after + 1), tl.minimum(high, first + after + 1)
    begin = low + tl.cdiv(tl.maximum(full_low - low, 0), STEP) * STEP
    end = begin + tl.maximum(full_high - begin, 0) // STEP * STEP
    return low, begin, end, high


@triton.jit
def attend_step(
    q, sums, top, total, spoiled, start, k_base, v_base, k_row, v_row, position, low, high, before, after, factor,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, STEP: tl.constexpr, BEFORE: tl.constexpr,
    AFTER: tl.constexpr, WITHIN: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of keys for a tile of queries."""
    place = start + tl.arange(0, STEP)
    k = tile_of(k_base, k_row, start, high, STEP, C, CB, MASKED)
    values = tile_of(v_base, v_row, start, high, STEP, V, VB, MASKED)
    if CLEAN:
        bad = bad_rows(k, values)
        k = tl.where(bad[:, None], tl.zeros_like(k), k)
        values = tl.where(bad[:, None], tl.zeros_like(values), values)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    middle = tl.maximum(top, tl.max(scores, 1) * factor)
    if MASKED:
        seen = visible(position[:, None], place[None, :], low, high, before, after, BEFORE, AFTER, WITHIN)
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1) * factor)
        middle = tl.where(larger == float("-inf"), 0.0, larger)
        if CLEAN:
            spoiled |= tl.max((seen & bad[None, :]).to(tl.int32), 1)
    weights = tl.exp2(scores * factor - middle[:, None])
    share = tl.exp2(top - middle)
    total = total * share + tl.sum(weights, 1)
    sums = product(weights.to(values.dtype), values, sums * share[:, None], PRECISION)
    top = middle
    if MASKED:
        top = larger
    return sums, top, total, spoiled


@triton.jit(do_not_specialize=["queries", "keys", "before", "after", "sequences"])
def band_kernel(
    Q, K, VALUES, LOW, HIGH, PARTS, OUT, LSE,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    queries, keys, heads, groups, before, after, factor, sequences,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BOUNDED: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, NARROW: tl.constexpr, SIMPLE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The output of a tile of queries, and its log-sum-exp: infinite where it sees nothing, or a key or value that is
    not finite."""
    tile, line = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # the longest rows first
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
    q_base = Q + batch * q_batch + head * q_head + origin * q_row
    q = rows_of(q_base, q_row, t, t < queries, tl.arange(0, CB), C, C == CB)
    k_base = K + batch * k_batch + group * k_head + origin * k_row
    v_base = VALUES + batch * v_batch + group * v_head + origin * v_row
    sums, spoiled = tl.zeros([ROWS, VB], tl.float32), tl.zeros([ROWS], tl.int32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    if BEFORE:
        for start in range(lowest, tl.minimum(begin, highest), STEP):
            sums, top, total, spoiled = attend_step(
                q, sums, top, total, spoiled, start, k_base, v_base, k_row, v_row, position, lowest, highest,
                before, after, factor, C, V, CB, VB, STEP, BEFORE, AFTER and NARROW, not NARROW, True, False, PRECISION,
            )  # fmt: skip
    for start in range(begin, end, STEP):
        sums, top, total, spoiled = attend_step(
            q, sums, top, total, spoiled, start, k_base, v_base, k_row, v_row, position, lowest, highest,
            before, after, factor, C, V, CB, VB, STEP, BEFORE, AFTER, False, False, False, PRECISION,
        )  # fmt: skip
    for start in range(end, highest, STEP):
        sums, top, total, spoiled = attend_step(
            q, sums, top, total, spoiled, start, k_base, v_base, k_row, v_row, position, lowest, highest,
            before, after, factor, C, V, CB, VB, STEP, False, AFTER, SIMPLE, True, False, PRECISION,
        )  # fmt: skip
    bad = tl.sum((total - total != 0).to(tl.int32), 0) + tl.sum(tl.sum((sums - sums != 0).to(tl.int32), 1), 0)
    if bad > 0:
        sums, top, total, spoiled = attend_carefully(
            q, spoiled, k_base, v_base, k_row, v_row, position, lowest, highest, before, after, factor,
            C, V, CB, VB, ROWS, STEP, BEFORE, AFTER, PRECISION,
        )  # fmt: skip
    store_tile(
        sums, top, total, spoiled, t, queries, OUT + batch * o_batch + head * o_head + origin * o_row, o_row, LSE + row,
        V, VB,
    )  # fmt: skip


@triton.jit
def part_of(PARTS, part, head, heads, total, sequences):
    """A packed sequence: its batch row, its first token, where its numbers per query begin, its length."""
    batch, origin = tl.load(PARTS + part).to(tl.int64), tl.load(PARTS + sequences + part).to(tl.int64)
    return batch, origin, (batch * heads + head) * total + origin, tl.load(PARTS + 2 * sequences + part)


@triton.jit
def attend_carefully(
    q, spoiled, k_base, v_base, k_row, v_row, position, low, high, before, after, factor,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All steps of keys, bad ones set to 0; `spoiled` are the queries that see one."""
    sums = tl.zeros([ROWS, VB], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(low, high, STEP):
        sums, top, total, spoiled = attend_step(
            q, sums, top, total, spoiled, start, k_base, v_base, k_row, v_row, position, low, high,
            before, after, factor, C, V, CB, VB, STEP, BEFORE, AFTER, False, True, True, PRECISION,
        )  # fmt: skip
    return sums, top, total, spoiled


@triton.jit
def store_tile(sums, top, total, spoiled, t, queries, o_base, o_row, LSE, V: tl.constexpr, VB: tl.constexpr):
    """Write the outputs of a tile of queries and their log-sum-exps."""
    here, v = t < queries, tl.arange(0, VB)
    out = sums / tl.where(total == 0, 1.0, total)[:, None]
    out = tl.where((spoiled > 0)[:, None], float("nan"), out)
    lse = (top + tl.log2(total)) * 0.6931471805599453
    lse = tl.where((total == 0) | (spoiled > 0), float("inf"), lse)
    tl.store(LSE + t, lse, mask=here)
    tl.store(o_base + t.to(tl.int64)[:, None] * o_row + v[None, :], out, mask=here[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["queries"])
def mend_kernel(
    Q, K, VALUES, OUT, LSE,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    queries, heads, groups, factor,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Causal attention as another kernel computed it, computed again for heads whose last query is not finite."""
    line = tl.program_id(1)
    batch, head = (line // heads).to(tl.int64), (line % heads).to(tl.int64)
    group = head // (heads // groups)
    o_base = OUT + batch * o_batch + head * o_head
    if spoiled_heads(o_base, 0, o_row, 0, 1, queries, V, VB) == 0:
        return
    for tile in range(tl.program_id(0), tl.cdiv(queries, ROWS), tl.num_programs(0)):
        t = tile * ROWS + tl.arange(0, ROWS)
        q = rows_of(Q + batch * q_batch + head * q_head, q_row, t, t < queries, tl.arange(0, CB), C, C == CB)
        k_base, v_base = K + batch * k_batch + group * k_head, VALUES + batch * v_batch + group * v_head
        sums, top, total, spoiled = attend_carefully(
            q, tl.zeros([ROWS], tl.int32), k_base, v_base, k_row, v_row, t, 0,
            tl.minimum(tile * ROWS + ROWS, queries), 0, 0, factor, C, V, CB, VB, ROWS, STEP, False, True, PRECISION,
        )  # fmt: skip
        store_tile(sums, top, total, spoiled, t, queries, o_base, o_row, LSE + line.to(tl.int64) * queries, V, VB)


@triton.jit
def spoiled_heads(base, o_head, o_row, group, shared, queries, V: tl.constexpr, VB: tl.constexpr):
    """How many numbers of the last query's outputs, of all heads of a group, are not finite."""
    v, bad = tl.arange(0, VB), 0
    for r in range(shared):
        place = base + (group * shared + r) * o_head + (queries - 1).to(tl.int64) * o_row + v
        newest = tl.load(place, mask=v < V, other=0.0).to(tl.float32)
        bad += tl.sum((newest - newest != 0).to(tl.int32), 0)
    return bad
