"""The cost of the linear form, from the list of steps that the computation walks."""

from collections import Counter
from dataclasses import replace
from typing import Any

from regard.core.cost import Cost, Work, accumulator
from regard.core.masks.structure import structure_of
from regard.core.paths.stream import folded
from regard.core.paths.sums import CHUNK, Step, steps

EDGE_CHUNKS = 2
"""Chunks that differ from the others: the first has no sums to read yet, the last is not folded."""


def sums_bytes(mechanism: Any, work: Work) -> int:
    """Bytes of the running sums and their normaliser."""
    numbers = mechanism.summed_length(work.qk_length) * work.value_length + mechanism.normaliser_length(work.qk_length)
    return work.batch * work.num_kv_heads * numbers * accumulator(work.dtype).itemsize


def cost(mechanism: Any, work: Work, recent: int, state_bytes: int) -> Cost:
    """The cost of the linear form, step by step.

    Fewer queries than keys are a decode step, unless the work says that its keys are not cached: earlier keys are in
    the sums. The cost of folding is spread over the tokens.
    """
    length, streamed = work.key_length, work.cached and work.query_length < work.key_length
    groups, kind = work.batch * work.num_kv_heads, accumulator(work.dtype).itemsize
    size = mechanism.summed_length(work.qk_length)
    if streamed:
        flops = work.batch * _stream_flops(mechanism, work, recent)
        moved = replace(work, key_length=work.query_length, mask=None).io_bytes + state_bytes
    else:
        structure = structure_of(work.rule, work.query_length, length)
        spans = Counter(structure.rows) if structure.rows else {(0, length): work.batch}
        offset = length - work.query_length
        flops = sum(
            rows
            * _walk_flops(mechanism, work, work.query_length, high - low, offset - low if structure.causal else None)
            for (low, high), rows in spans.items()
            if high > low and work.query_length
        )
        moved = work.io_bytes
    # A whole sequence folds chunk by chunk; a decode step folds half of the newest keys, which its queries read
    # directly.
    fold, keys = (recent // 2, recent) if streamed else (min(CHUNK, length), min(CHUNK, length))
    rows = max(work.num_heads // work.num_kv_heads * min(CHUNK, work.query_length), fold)
    return Cost(
        flops=work.num_kv_heads * flops,
        bytes=moved,
        state_bytes=state_bytes,
        activation_bytes=sums_bytes(mechanism, work) + groups * rows * (size + keys) * kind,
        form="linear",
    )


def _walk_flops(mechanism: Any, work: Work, queries: int, keys: int, offset: int | None) -> int:
    """FLOPs per key head for the steps of a whole sequence of any length.

    The steps repeat chunk by chunk in three places: where keys are folded that no query attends to, where a chunk of
    queries attends to its chunk of keys, and where queries after all keys attend to the last chunk. Each repetition
    costs the same, so two short walks determine the cost of a long one.
    """
    places: tuple[tuple[int, tuple[int, int, int]], ...]
    if offset is None:
        places = ((keys, (0, CHUNK, 0)), (queries, (CHUNK, 0, 0)))
    else:
        inside = min(queries + min(offset, 0), keys - max(offset, 0))
        places = (
            (min(offset, keys), (0, CHUNK, CHUNK)),
            (inside, (CHUNK, CHUNK, 0)),
            (min(queries, queries + offset - keys), (CHUNK, 0, 0)),
        )
    for room, (more_queries, more_keys, more_offset) in places:
        repeats = room // CHUNK - EDGE_CHUNKS
        if repeats > 1:
            fewer, more = (
                _walk_flops(
                    mechanism,
                    work,
                    queries - left_out * more_queries,
                    keys - left_out * more_keys,
                    None if offset is None else offset - left_out * more_offset,
                )
                for left_out in (repeats, repeats - 1)
            )
            return fewer + repeats * (more - fewer)
    return _flops(mechanism, work, steps(queries, keys, offset), False)


def _stream_flops(mechanism: Any, work: Work, recent: int) -> int:
    """FLOPs per key head for the new tokens of a decode step."""
    before, length = work.key_length - work.query_length, work.key_length
    start, end = folded(before, recent), folded(length, recent)
    causal = structure_of(work.rule, work.query_length, length).causal
    plan = steps(work.query_length, length - start, before - start if causal else None, end - start)
    meetings = [step for step in plan if not step.folds]
    spread = work.query_length * _fold_flops(mechanism, work) if end else 0
    return _flops(mechanism, work, meetings, end > 0) + spread


def _flops(mechanism: Any, work: Work, plan: list[Step], history: bool) -> int:
    """FLOPs per key head for a list of steps."""
    size, phi = mechanism.summed_length(work.qk_length), mechanism.feature_flops(work.qk_length)
    score = work.qk_length if mechanism.short else size
    per_query = 2 * size * work.value_length + mechanism.normaliser_flops(work.qk_length)[0]
    per_fold = _fold_flops(mechanism, work)
    total = 0
    for step in plan:
        keys, queries = step.high - step.low, work.num_heads // work.num_kv_heads * (step.stop - step.start)
        if step.folds:
            total += keys * per_fold
            history = True
            continue
        total += 2 * queries * keys * (score + work.value_length) + history * queries * per_query
        total += phi * (queries * (history or not mechanism.short) + keys * (not mechanism.short))
    return total


def _fold_flops(mechanism: Any, work: Work) -> int:
    per_key = mechanism.normaliser_flops(work.qk_length)[1]
    size = mechanism.summed_length(work.qk_length)
    return int(2 * size * work.value_length + per_key + mechanism.feature_flops(work.qk_length))
