"""Attention to a prefix that batch rows share (prompt cache), and to what each row has after it.

The prefix is read once for the queries of all rows that share it; the other keys of each row are a second part. The two
parts are merged exactly by their log-sum-exps, as in parts.py.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.eager import transformed
from regard.core.masks import Mask, causal
from regard.core.masks.guard import bad_keys, cleaned, poisoned
from regard.core.masks.structure import structure_of
from regard.core.paths import decode, parts, sdpa, torch_softmax
from regard.core.states.key_value_runs import Run

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


def cannot(mechanism: Any, q: Tensor, keys: int, mask: Mask | None, bias: Tensor | None, recorded: bool) -> str | None:
    """Why queries at the end of `keys` keys cannot attend to a prefix and the rest separately; None if they can."""
    structure, queries = structure_of(mask, q.shape[2], keys), q.shape[2]
    plain = sdpa.PATH in mechanism.paths() and mechanism.sdpa_scale(q.shape[3]) is not None
    if bias is not None or not plain:
        return "only plain softmax merges parts"
    if structure.rest is not None or structure.windowed or structure.paddings or not (structure.causal or queries == 1):
        return "the mask is not causal alone"
    if recorded or transformed() or torch.compiler.is_compiling():
        return "gradients, transforms and traces need a single call"
    return None if q.is_cpu else "made for the CPU"


def attend(mechanism: "Mechanism", q: Tensor, run: Run, length: int) -> Tensor:
    """The output of a run's newest queries, (rows, H, T, K) -> (rows, H, T, V), each over the keys up to its
    position."""
    assert run.prefix is not None
    prefix, rest = run.prefix, length - run.begin - run.prefix.length
    first_keys, first_values, first_scales = prefix.buffer.stored(prefix.length)
    grouped, order = _by_parent(q, prefix.places)
    outputs, sums = [], []
    for parents, rows in grouped:
        scales = None if first_scales is None else (first_scales[0][parents], first_scales[1][parents])
        out, lse = _part(Call(mechanism, rows, first_keys[parents], first_values[parents], scales=scales))
        outputs.append(_by_row(out, q.shape[2]))
        sums.append(_by_row(lse, q.shape[2]))
    k, v, scales = run.buffer.stored(rest)
    tail = _part(Call(mechanism, q, k, v, causal, scales=scales))
    out, _ = parts.merge(torch.cat(outputs)[order], torch.cat(sums)[order], *tail)
    return out.to(q.dtype)


def _part(call: Call) -> tuple[Tensor, Tensor]:
    """The output over all keys, or, causal, of queries at the last keys; and its log-sum-exp."""
    scale, size = sdpa.scale(call), call.value_length
    if decode.cannot(call) is None:
        return decode.part(call)
    call = call.widened()
    bad = bad_keys(call.k, call.v) if call.structure.causal else None
    k, v = cleaned(call.k, bad), cleaned(call.v, bad)
    q, k, v, scale = torch_softmax.fitted(call.q, k, v, scale, max(size, call.qk_length))
    out, lse = (parts.over_tail if call.structure.causal else parts.over_old)(q, k, v, scale)
    return poisoned(out[..., :size], call.mask, bad), lse


def _by_parent(q: Tensor, places: tuple[int, ...]) -> tuple[list[tuple[slice, Tensor]], Tensor]:
    """Queries of rows with the same parent as queries of one row, (parents, H, rows · T, K), with their parents; and
    the index of each row among them."""
    rows = torch.tensor(places).argsort(stable=True)
    counts = torch.tensor(places).bincount().tolist()
    order = rows.argsort()
    ordered = q if bool((rows == torch.arange(len(rows))).all()) else q[rows]
    if len(set(counts)) == 1:
        together = ordered.unflatten(0, (len(counts), counts[0])).transpose(1, 2).flatten(2, 3)
        return [(slice(None), together)], order
    pieces = ordered.split(counts)
    together = [piece.transpose(0, 1).flatten(1, 2)[None] for piece in pieces]
    return [(slice(parent, parent + 1), rows) for parent, rows in enumerate(together)], order


def _by_row(part: Tensor, queries: int) -> Tensor:
    """(parents, H, rows · T, …) as (parents · rows, H, T, …)."""
    return part.unflatten(2, (-1, queries)).transpose(1, 2).flatten(0, 1)
