"""A few queries over a long cache, in Triton: keys are split over the whole GPU (Dao et al. 2023, "Flash-Decoding").

All query heads of a key/value head are rows of one tile, so each key and value is read once. A program attends to its
part of the keys and keeps its sum of weighted values, its sum of weights and its largest score; a second kernel merges
the parts exactly. How many keys each batch row has is read on the GPU: a graph captured once serves any length. Keys
may be in several buffers, a launch for each: those that batch rows share are read for a tile of all their queries.
"""

import triton
import triton.language as tl

from regard.core.kernels.common import bad_rows, product, rows_of


@triton.jit(do_not_specialize=["keys", "splits", "before", "first", "stop", "slot", "slots"])
def decode_kernel(
    Q, K, VALUES, NEW_K, NEW_V, K_SCALE, V_SCALE, LOW, HIGH, LENGTH, MEMBERS, OUT, PARTS, keys, splits,
    first, stop, slot, slots,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, new_k_batch, new_k_head, new_v_batch,
    new_v_head, scale_batch, scale_head, scale_row,
    queries, groups, shared, before, factor, count, members,
    C: tl.constexpr, V: tl.constexpr, CB: tl.constexpr, VB: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    BOUNDED: tl.constexpr, COUNTED: tl.constexpr, WINDOWED: tl.constexpr, CAUSAL: tl.constexpr,
    POSITIONAL: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr, APPENDED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one key/value head, for a tile of its query rows: heads, and queries of each.

    The keys are at the positions from `first` on, up to `stop`. Of `slots` parts of all launches, this one's begin at
    `slot`. APPENDED: the last key, of the only query, is not among the others yet. The last part takes it and stores
    it. A line is a batch row of the keys and a key/value head. MEMBERS: the batch rows of queries that have a row of
    keys, `members` of them or fewer and then -1.
    """
    split, tile, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    parent, group = (line // groups).to(tl.int64), (line % groups).to(tl.int64)
    c, v = tl.arange(0, CB), tl.arange(0, VB)
    row = tile * ROWS + tl.arange(0, ROWS)
    if MEMBERS is not None:
        member = row // (shared * queries)
        batch = tl.load(MEMBERS + parent * members + member, mask=member < members, other=-1).to(tl.int64)
        here = batch >= 0
        bounds_row = tl.load(MEMBERS + parent * members)  # of rows that share keys, all have the same real ones
        row %= shared * queries
    else:
        batch, here, bounds_row = parent, row < shared * queries, parent
    head, t = group * shared + row // queries, row % queries
    if COUNTED:
        keys = tl.load(LENGTH)
    low, high = first, tl.minimum(keys, stop)
    if BOUNDED:
        low = tl.maximum(tl.load(LOW + bounds_row), low)
        high = tl.minimum(tl.load(HIGH + bounds_row), high)
    if WINDOWED:
        low = tl.maximum(low, keys - queries - before)
    is_seen = (keys > low) & (keys <= high)
    if APPENDED:
        high = tl.minimum(high, keys - 1)
    part = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), splits), STEP) * STEP
    begin = low + split * part
    end = tl.minimum(begin + part, high)

    q_place = Q + (batch * q_batch + head * q_head + t * q_row)[:, None] + c[None, :]
    q = tl.load(q_place, mask=here[:, None] & (c < C)[None, :], other=0.0)
    skipped = first.to(tl.int64)
    k_base = K + parent * k_batch + group * k_head - skipped * k_row
    v_base = VALUES + parent * v_batch + group * v_head - skipped * v_row
    scales = parent * scale_batch + group * scale_head - skipped * scale_row
    position = keys - queries + t
    sums = tl.zeros([ROWS, VB], tl.float32)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    spoiled = tl.zeros([ROWS], tl.int32)
    for start in range(begin, end, STEP):
        place = start + tl.arange(0, STEP)
        inside = place < end
        k = rows_of(k_base, k_row, place, inside, c, C, C == CB)
        values = rows_of(v_base, v_row, place, inside, v, V, V == VB)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * factor
        if SCALED:
            k_scale = tl.load(K_SCALE + scales + place * scale_row, mask=inside, other=0.0)
            v_scale = tl.load(V_SCALE + scales + place * scale_row, mask=inside, other=0.0)
            scores *= k_scale[None, :]
        seen = inside[None, :] & here[:, None]
        if POSITIONAL:  # queries of one tile see different keys: what some do not see must not reach them
            if CAUSAL:
                seen &= place[None, :] <= position[:, None]
            if WINDOWED:
                seen &= place[None, :] >= position[:, None] - before
            if SCALED:  # int8 numbers are finite, their scales may not be
                bad = (k_scale - k_scale != 0) | (v_scale - v_scale != 0)
                v_scale = tl.where(bad, 0.0, v_scale)
            else:
                bad = bad_rows(k, values)
                values = tl.where(bad[:, None], tl.zeros_like(values), values)
            spoiled |= tl.max((seen & bad[None, :]).to(tl.int32), 1)
        scores = tl.where(seen, scores, float("-inf"))
        larger = tl.maximum(top, tl.max(scores, 1))
        middle = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp2(scores - middle[:, None])
        share = tl.exp2(top - middle)
        total = total * share + tl.sum(weights, 1)
        if SCALED:
            weights *= v_scale[None, :]
        sums = product(weights.to(q.dtype), values.to(q.dtype), sums * share[:, None], PRECISION)
        top = larger
    if APPENDED:  # noqa: SIM102 - the first is known when it is compiled
        if split == splits - 1:
            last = (keys - 1).to(tl.int64)
            k_new = tl.load(NEW_K + parent * new_k_batch + group * new_k_head + c, mask=c < C, other=0.0)
            v_new = tl.load(NEW_V + parent * new_v_batch + group * new_v_head + v, mask=v < V, other=0.0)
            if tile == 0:
                tl.store(k_base + last * k_row + c, k_new, mask=c < C)
                tl.store(v_base + last * v_row + v, v_new, mask=v < V)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * factor
            score = tl.where(is_seen & here, score, float("-inf"))
            larger = tl.maximum(top, score)
            middle = tl.where(larger == float("-inf"), 0.0, larger)
            weight, share = tl.exp2(score - middle), tl.exp2(top - middle)
            total = total * share + weight
            value = tl.where(is_seen, v_new.to(tl.float32), 0.0)
            sums = sums * share[:, None] + weight.to(q.dtype).to(tl.float32)[:, None] * value[None, :]
            top = larger
    if POSITIONAL:
        total = tl.where(spoiled > 0, float("nan"), total)
    at = (batch * groups * shared + head) * queries + t
    if SPLIT:  # sums, then largest scores, then sums of weights, each of all parts
        count = tl.full([], count, tl.int64) * slots
        at = at * slots + slot + split
        tl.store(PARTS + at[:, None] * V + v[None, :], sums, mask=here[:, None] & (v < V)[None, :])
        tl.store(PARTS + count * V + at, top, mask=here)
        tl.store(PARTS + count * (V + 1) + at, total, mask=here)
    else:
        out = sums / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(OUT + at[:, None] * V + v[None, :], out, mask=here[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(PARTS, OUT, splits, V: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr):
    """The parts of one query of one head as one: WIDTH numbers of its output."""
    row, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    count = tl.num_programs(0).to(tl.int64) * splits
    TOPS, TOTALS = PARTS + count * V, PARTS + count * (V + 1)
    s = tl.arange(0, SPLITS)
    tops = tl.load(TOPS + row * splits + s, mask=s < splits, other=float("-inf"))
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(TOTALS + row * splits + s, mask=s < splits, other=0.0) * tl.exp2(tops - top), 0)
    sums = tl.zeros([WIDTH], tl.float32)
    for start in range(0, splits, STEP):
        part = start + tl.arange(0, STEP)
        shown = part < splits
        share = tl.exp2(tl.load(TOPS + row * splits + part, mask=shown, other=float("-inf")) - top)
        at = (row * splits + part)[:, None] * V + v[None, :]
        sums += tl.sum(tl.load(PARTS + at, mask=shown[:, None] & (v < V)[None, :], other=0.0) * share[:, None], 0)
    tl.store(OUT + row * V + v, sums / tl.where(total == 0, 1.0, total), mask=v < V)
