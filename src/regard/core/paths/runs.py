"""Attention over a KV cache: one call for each run of batch rows; most caches have one run.

The cache keeps a NaN or infinity as it is: each call has the guard of any other call (masks/guard.py).
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import choose, compute
from regard.core.calls.repeats import Step
from regard.core.eager import transformed
from regard.core.masks import Mask
from regard.core.masks.structure import FOREVER, part_of, structure_of
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
    mechanism: "Mechanism", q: Tensor, state: KeyValueState, mask: Mask | None, bias: Tensor | None, recorded: bool
) -> KeyValueState:
    """The state in a form that this attention can use: without shared prefixes if they cannot be attended to apart."""
    if state.whole or not state.has_prefix:
        return state
    derived = recorded or any([run.derived for run in state.runs])

    def cannot(run: Run) -> str | None:
        part = None if q.is_cpu else part_of(mask, run.rows, run.begin, state.length)  # only a GPU's kernels ask
        return shared.cannot(mechanism, run.of(q), run, state.length, part, bias, derived)

    return state if all([cannot(run) is None for run in state.runs if run.prefixes]) else state.apart()


def step(
    mechanism: "Mechanism", q: Tensor, k: Tensor, v: Tensor, state: KeyValueState, mask: Mask | None
) -> Step | None:
    """What extends states like this one by one token: in one kernel that stores its key and value too."""
    if not isinstance(state, KeyValueState) or state.layout is None:
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
    mechanism: "Mechanism", q: Tensor, state: KeyValueState, mask: Mask | None, bias: Tensor | None
) -> Tensor:
    """The output of the new tokens' queries over the whole history, (B, H, T, K) -> (B, H, T, V)."""
    if state.whole:
        k, v, scales = state.buffer.stored(state.length)
        return _run(Call(mechanism, q, k, v, mask, bias, scales))
    if len(state.runs) == 1 and state.runs[0].prefixes:
        run = state.runs[0]
        return shared.attend(mechanism, q, run, state.length, part_of(mask, run.rows, run.begin, state.length))
    causal = structure_of(mask, q.shape[2], state.length).causal
    outputs = q.new_zeros(*q.shape[:3], state.buffer.values.shape[3])
    if transformed():  # so that a transform over keys or values only reaches the output
        outputs = outputs + sum(t[..., :0].sum() for run in state.runs for t in (run.buffer.keys, run.buffer.values))
    for run in state.runs:
        keys = state.length - run.begin
        if keys == 0:  # rows with padding only
            continue
        # Causal queries before the run's first key see only padding: their output is 0.
        first = max(0, q.shape[2] - keys) if causal else 0
        part = part_of(mask, run.rows, run.begin, state.length)
        if run.prefixes:
            outputs[list(run.rows)] = shared.attend(mechanism, run.of(q), run, state.length, part)
            continue
        scores = bias
        if bias is not None:
            scores = run.of(bias.expand(*q.shape[:3], state.length))[:, :, first:, run.begin :]
        k, v, scales = run.buffer.stored(keys)
        outputs[list(run.rows), :, first:] = _run(Call(mechanism, run.of(q)[:, :, first:], k, v, part, scores, scales))
    return outputs


def _run(call: Call) -> Tensor:
    derived = torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad)
    return compute(call, choose(call), derived=derived)
