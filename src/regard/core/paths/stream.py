"""Linear attention token by token: running sums over old tokens, and the newest tokens as keys and values."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.core.calls.repeats import Step
from regard.core.eager import recorded, transformed
from regard.core.masks import Padding
from regard.core.masks import causal as causal_mask
from regard.core.masks.guard import bad_keys, cleaned, not_finite, poisoned
from regard.core.masks.structure import both
from regard.core.paths import fused_stream
from regard.core.paths.sums import Walk, step, steps, sweep, tiled, unreadable, untiled
from regard.core.states.kernel_state import KernelState


def folded(length: int, recent: int) -> int:
    """How many of `length` tokens are in the sums: all but the newest recent/2 … recent, however they were appended."""
    half = recent // 2
    return half * max(0, math.ceil(length / half) - 2)


def stream(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KernelState,
    causal: bool,
    padding: Padding | None,
    recent: int,
) -> tuple[Tensor, KernelState]:
    """Append tokens to a state and attend from them. `padding` covers the tokens not yet in the sums, new ones
    included.

    A key that padding hides never enters the sums.
    """
    new, length = k.shape[2], state.length + k.shape[2]
    # After a crop the sums may contain more tokens than this length implies: then nothing is folded until the length
    # catches up.
    fold_to = max(0, folded(length, recent) - state.folded)
    newest = state.recent if state.recent.length + new <= recent else state.recent.resized(state.recent.length + new)
    newest = newest.append(k, v, None, recorded=q.requires_grad or mechanism.learns(k.shape[3]))
    if padding is not None:
        newest = replace(newest, padding=both(newest.padding, padding, newest.length))
    holes = newest.padding is not None and newest.padding.rows is None
    keys, values = newest.keys, newest.values
    if fused_stream.cannot(mechanism, q, k, v, state.sums, causal, holes) is None:
        before = state.sums, state.normaliser
        out, sums, normaliser = fused_stream.run(mechanism, q, keys, values, newest.padding, *before, fold_to)
    else:
        out, sums, normaliser = _guarded(mechanism, q, keys, values, newest.padding, causal, state, fold_to)
    longer = KernelState(
        mechanism=state.mechanism,
        sums=sums,
        normaliser=normaliser,
        folded=state.folded + fold_to,
        recent=newest.resized(recent, fold_to) if fold_to else newest,
        padding=state.padding_after(newest.padding, fold_to, newest.length),
    )
    return out, longer


def token_step(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, state: KernelState, recent: int) -> Step | None:
    """What extends states like this one by one token that folds nothing, by kernels that store its key and value."""
    if fused_stream.cannot(mechanism, q, k, v, state.sums, True, False) is not None:
        return None
    token = fused_stream.step(mechanism, q, k, v, state.recent.buffer, state.sums)
    if token is None:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, state: KernelState) -> tuple[Tensor, KernelState] | None:
        sums, normaliser = state.sums, state.normaliser
        if state.recent.length >= recent or (sums.requires_grad and torch.is_grad_enabled()):  # full: it folds
            return None
        if not (sums.is_contiguous() and normaliser.is_contiguous()) or (newest := state.recent.longer()) is None:
            return None
        buffer = newest.buffer
        out = token(q, k, v, buffer.keys, buffer.values, sums, normaliser, number=newest.length)
        return out, KernelState(state.mechanism, sums, normaliser, state.folded, newest)

    return run


def _guarded(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Padding | None,
    causal: bool,
    state: KernelState,
    fold_to: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_walk` with the guard: a NaN or infinity reaches only the queries that see it, and not the gradients of
    others."""
    valid = None if padding is None else padding.valid(k.shape[2], k.device)
    derived = recorded(q, k, v, state.sums) or mechanism.learns(k.shape[3]) or transformed()
    if not derived and (q.shape[2] == 1 or not causal):  # all queries see all keys and the sums: no guard needed
        return _walk(mechanism, q, k, v, valid, None, causal, state, fold_to)
    bad = bad_keys(k, v)
    if bad is None:
        return _walk(mechanism, q, k, v, valid, None, causal, state, fold_to)
    if valid is not None:
        bad = bad & valid[:, None]
    clean, bad_lines = state, bad
    if derived and state.folded:  # a bad value shows in all rows of the sums, a bad key in the normaliser
        lines = not_finite(state.normaliser.unsqueeze(2), state.sums[:, :, :1])
        zeros = torch.where(lines, 0, state.normaliser)
        clean, bad_lines = (
            replace(state, sums=cleaned(state.sums, lines), normaliser=zeros),
            torch.cat([lines, bad], -1),
        )
    out, sums, normaliser = _walk(mechanism, q, k, v, valid, bad, causal, clean, fold_to)
    if not fold_to:
        sums, normaliser = state.sums, state.normaliser
    else:  # folded keys come first in `bad_lines`; every later query divides by the normaliser
        spoiled = bad_lines[..., : bad_lines.shape[-1] - k.shape[2] + fold_to].any(-1)
        normaliser = torch.where(spoiled[..., None], math.nan, normaliser)
    return poisoned(out, causal_mask if causal else None, bad_lines), sums, normaliser


def _walk(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    valid: Tensor | None,
    bad: Tensor | None,
    causal: bool,
    state: KernelState,
    fold_to: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of the last tokens of k and v, and the sums with the first `fold_to` of them added, by PyTorch
    operators."""
    new, length = q.shape[2], k.shape[2]
    rows, keys, values, real = tiled(q, k, v, valid)
    bad = None if bad is None else bad.flatten(0, 1)
    if new == 1 and not fold_to:
        hidden = unreadable(real, bad)
        keys, values = cleaned(keys, hidden), cleaned(values, hidden)
        out = step(mechanism, real, rows, keys, values, state.sums, state.normaliser, history=state.folded > 0)
        return untiled(out, k), state.sums, state.normaliser
    offset = length - new if causal else None
    walk = Walk(steps(new, length, offset, fold_to), offset, real, bad)
    sums, normaliser = state.sums.flatten(0, 1), state.normaliser.flatten(0, 1)
    out, sums, normaliser = sweep(mechanism, walk, rows, keys, values, sums, normaliser, history=state.folded > 0)
    shape = state.sums.shape[:2]
    return untiled(out, k), sums.unflatten(0, shape), normaliser.unflatten(0, shape)
