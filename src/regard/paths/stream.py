"""A kernel's stream: the sums of what is old, and the newest tokens as they are."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.call import cleaned, poisoned, taint
from regard.eager import readable
from regard.kernel_state import KernelState
from regard.mask import Padding
from regard.mask import causal as causal_mask
from regard.paths import fused_stream
from regard.paths.sums import steps, sweep, tiled, untiled
from regard.structure import both


def folded(length: int, recent: int) -> int:
    """How many of `length` tokens a stream has folded: all but the newest recent/2 … recent, whatever the chunks."""
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
    tainted: Tensor | None,
    recent: int,
) -> tuple[Tensor, KernelState]:
    """Append tokens to a state and attend from them. `padding` speaks of the tokens not yet folded, new ones included.

    A key the padding hides is left out of the sums for good.
    """
    new, length = k.shape[2], state.length + k.shape[2]
    # After a crop more may be folded than the length alone would have: then nothing is, until the stream catches up.
    fold_to = max(0, folded(length, recent) - state.folded)
    held = state.recent if state.recent.length + new <= recent else state.recent.resized(state.recent.length + new)
    recorded = q.requires_grad or mechanism.learns(k.shape[3])
    held = held.append(k, v, None, tainted, recorded=recorded)
    if padding is not None:
        held = replace(held, padding=both(held.padding, padding, held.length))
    holes = held.padding is not None and held.padding.rows is None
    if fused_stream.cannot(mechanism, q, k, v, state.sums, causal, holes) is None:
        out, sums, normaliser = fused_stream.run(
            mechanism, q, held.keys, held.values, held.padding, state.sums, state.normaliser, fold_to
        )
    else:
        keys, values = held.keys, held.values
        if k.is_cuda:  # kernels of ours keep tokens as they come
            held = replace(held, tainted=_either(held.tainted, taint(keys, values)))
            keys, values = cleaned(keys, held.tainted), cleaned(values, held.tainted)
        out, sums, normaliser = _walk(mechanism, q, keys, values, held.padding, causal, state, fold_to)
    valid = None
    if held.tainted is not None and held.padding is not None:
        valid = held.padding.valid(held.length, k.device)
    longer = replace(
        state,
        sums=sums,
        normaliser=normaliser,
        folded=state.folded + fold_to,
        recent=held.resized(recent, fold_to) if fold_to else held,
        tainted=_folded_taint(state, held.tainted, valid, fold_to),
        padding=state.padding_after(held.padding, fold_to, held.length),
    )
    return poisoned(out, causal_mask if causal else None, _taint(state, held.tainted, valid, held.length)), longer


def _walk(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Padding | None,
    causal: bool,
    state: KernelState,
    fold_to: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output of the last tokens of k and v, and the sums with the first `fold_to` of them, by PyTorch."""
    new, length = q.shape[2], k.shape[2]
    rows, keys, values, real = tiled(q, k, v, None if padding is None else padding.valid(length, q.device))
    offset = length - new if causal else None
    out, sums, normaliser = sweep(
        mechanism,
        steps(new, length, offset, fold_to),
        offset,
        real,
        rows,
        keys,
        values,
        state.sums.flatten(0, 1),
        state.normaliser.flatten(0, 1),
        history=state.folded > 0,
    )
    shape = state.sums.shape[:2]
    return untiled(out, k), sums.unflatten(0, shape), normaliser.unflatten(0, shape)


def _either(tainted: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if tainted is None else tainted if other is None else tainted | other


def _taint(state: KernelState, tainted: Tensor | None, valid: Tensor | None, keys: int) -> Tensor | None:
    """Real keys that came with a NaN or infinity: the sums, as if they were one key, and those not folded before."""
    if tainted is None and state.tainted is None:
        return None
    batch, groups = state.sums.shape[:2]
    before = state.tainted if state.tainted is not None else state.sums.new_zeros(batch, groups, dtype=torch.bool)
    if tainted is None:
        tainted = state.sums.new_zeros(batch, groups, keys, dtype=torch.bool)
    elif valid is not None:
        tainted = tainted & valid[:, None]
    return torch.cat([before[..., None], tainted], dim=-1)


def _folded_taint(state: KernelState, tainted: Tensor | None, valid: Tensor | None, fold_to: int) -> Tensor | None:
    if not fold_to or tainted is None:
        return state.tainted
    found = _taint(state, tainted, valid, tainted.shape[-1])
    assert found is not None
    more = found[..., : fold_to + 1].any(-1)
    return None if state.tainted is None and readable(more) and not bool(more.any()) else more
