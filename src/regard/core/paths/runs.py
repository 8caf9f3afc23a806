"""Attention over a KV cache: one call for each run of batch rows; most caches have one run.

The cache keeps a NaN or infinity as it is: each call has the guard of any other call (masks/guard.py).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import choose, compute
from regard.core.calls.repeats import Step
from regard.core.eager import transformed
from regard.core.masks import Mask, causal, padding_of
from regard.core.masks.structure import FOREVER, both, part_of, structure_of, with_padding
from regard.core.paths import shared
from regard.core.states.key_value_runs import Run
from regard.core.states.key_values import KeyValueState

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


def with_space(state: KeyValueState, mask: Mask | None, new: int) -> KeyValueState:
    """The state with room for `new` tokens: if it is full, keys that have left the sliding window are dropped."""
    if not state.forgotten and state.length + new <= state.capacity:
        return state
    before = structure_of(mask, FOREVER, FOREVER).before
    first = 0 if before is None else max(0, state.length - before)
    if first < state.forgotten:
        shown = "all keys" if before is None else f"keys from position {first} on"
        raise ValueError(
            f"mask: expected a window that does not reach the first {state.forgotten} tokens, which were left behind "
            f"by a window and forgotten to make room, got {mask!r}, which shows {shown}"
        )
    return state.forget(first) if state.length + new - state.forgotten > state.capacity else state


def usable_state(
    mechanism: "Mechanism", q: Tensor, state: KeyValueState, rule: Mask | None, bias: Tensor | None, recorded: bool
) -> KeyValueState:
    """The state in a form that this attention can use: without shared prefixes if they cannot be attended to apart, and
    without gaps if the positions in them count."""
    if state.whole or not state.in_parts:
        return state
    derived = recorded or any([run.derived for run in state.runs])
    limits = structure_of(rule, FOREVER, FOREVER)
    is_traced = torch.compiler.is_compiling() and limits.paddings  # a trace cannot ask which of a table's rows are real
    fills_gaps = mechanism.ordered or limits.rest is not None or limits.windowed or is_traced

    def cannot_share(run: Run) -> bool:
        part = None if q.is_cpu else _part(rule, state, run)  # only a GPU's kernels ask
        reason = shared.cannot(mechanism, run.of(q), run, state.length, part, bias, derived) if run.prefixes else None
        return reason is not None

    runs, may_share = [], state.may_share
    for run in state.runs:
        buffer = run.buffer
        if run.gap is not None and fills_gaps:
            run = run.apart(state.length)
        elif cannot_share(run):
            run, may_share = run.joined(state.length), False
        if run.buffer is not buffer and derived and torch.is_grad_enabled():
            run.buffer.recorded = True  # also where nothing was appended
        runs.append(run)
    return state if tuple(runs) == state.runs else replace(state, runs=tuple(runs), may_share=may_share)


def step(
    mechanism: "Mechanism", q: Tensor, k: Tensor, v: Tensor, state: KeyValueState, mask: Mask | None
) -> Step | None:
    """What extends states like this one by one token: in one kernel that stores its key and value too."""
    if state.layout is None:
        return None
    call = Call(mechanism, q, *state.buffer.stored(state.length)[:2], mask)
    path = choose(call)
    attend = None if path.step is None else path.step(call, k, v, structure_of(mask, FOREVER, FOREVER).before)
    if attend is None:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, state: KeyValueState) -> tuple[Tensor, KeyValueState] | None:
        if state.forgotten or (longer := state.longer()) is None:
            return None
        buffer = state.buffer
        return attend(q, k, v, buffer.keys, buffer.values, longer.length), longer

    return run


def over_runs(
    mechanism: "Mechanism", q: Tensor, state: KeyValueState, rule: Mask | None, bias: Tensor | None
) -> Tensor:
    """The output of the new tokens' queries over the whole history, (B, H, T, K) -> (B, H, T, V)."""
    if state.whole:
        k, v, scales = state.buffer.stored(state.length)
        return _run(Call(mechanism, q, k, v, _with_padding(rule, state), bias, scales))
    if len(state.runs) == 1 and state.runs[0].prefixes and state.runs[0].gap is None:
        run = state.runs[0]
        return shared.attend(mechanism, q, run, state.length, _part(rule, state, run))
    queries = q.shape[2]
    ordered = structure_of(rule, queries, state.length).causal
    outputs = q.new_zeros(*q.shape[:3], state.buffer.values.shape[3])
    if transformed():  # so that a transform over keys, values or a bias only reaches the output
        tensors = [tensor for run in state.runs for tensor in (run.buffer.keys, run.buffer.values)]
        outputs = outputs + sum(t[..., :0].sum() for t in (*tensors, *([] if bias is None else [bias])))
    for run in state.runs:
        keys = run.count(state.length)
        if keys == 0:  # rows with padding only
            continue
        # Causal queries before the run's first key see only padding: their output is 0. Those in its gap see all keys.
        last = queries - run.in_gap(queries, state.length) if ordered else queries
        first = max(0, last - keys) if ordered else 0
        for low, high, in_gap in ((first, last, False), (last, queries, True)):
            if low < high:
                part = _part(rule, state, run, in_gap)
                outputs[list(run.rows), :, low:high] = _over_run(mechanism, q, low, high, run, state, part, bias)
    return outputs


def _over_run(
    mechanism: "Mechanism",
    q: Tensor,
    low: int,
    high: int,
    run: Run,
    state: KeyValueState,
    part: Mask | None,
    bias: Tensor | None,
) -> Tensor:
    """The output of some queries of a run's rows."""
    queries = run.of(q)[:, :, low:high]
    if run.prefixes:
        return shared.attend(mechanism, queries, run, state.length, part)
    scores = None
    if bias is not None:
        scores = run.columns_of(run.of(bias.expand(*q.shape[:3], state.length))[:, :, low:high])
    k, v, scales = run.buffer.stored(run.count(state.length))
    return _run(Call(mechanism, queries, k, v, part, scores, scales))


def _with_padding(rule: Mask | None, state: KeyValueState) -> Mask | None:
    return rule if state.padding is None else with_padding(rule, state.padding)


def _part(rule: Mask | None, state: KeyValueState, run: Run, in_gap: bool = False) -> Mask | None:
    """The mask of a run's rows over the keys that it stores, with positions counted among those; `in_gap`: for queries
    in its gap."""
    if run.gap is None:
        return part_of(_with_padding(rule, state), run.rows, run.begin, state.length)
    # Without the gap, queries after it are still at the last keys, so that a causal mask stays as it is.
    limits = structure_of(rule, FOREVER, FOREVER)
    real, valid = run.real, limits.valid(state.length)
    if valid is not None:
        real = both(real, padding_of(run.columns_of(valid[list(run.rows)])), run.count(state.length))
    if not limits.causal or in_gap:
        return real
    return causal if real is None else with_padding(causal, real)


def _run(call: Call) -> Tensor:
    derived = torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad)
    return compute(call, choose(call), derived=derived)
