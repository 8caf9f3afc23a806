"""Attention to a prefix that batch rows share, and to what each has after it.

The keys of the prefix are read once for all rows that share them, whose queries go over them together; each row's own
keys are a second part. The two are merged exactly by their log-sum-exps, as in parts.py.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.call import Call
from regard.eager import transformed
from regard.guard import cleaned, poisoned, taint
from regard.key_values import Run
from regard.mask import Mask, causal
from regard.paths import decode, parts, sdpa
from regard.structure import structure

if TYPE_CHECKING:
    from regard.mechanism import Mechanism


def cannot(mechanism: Any, q: Tensor, keys: int, mask: Mask | None, bias: Tensor | None, recorded: bool) -> str | None:
    """Why queries at the end of `keys` keys cannot attend to a prefix and the rest apart; None if they can."""
    known, queries = structure(mask, q.shape[2], keys), q.shape[2]
    plain = sdpa.PATH in mechanism.paths() and mechanism.sdpa_scale(q.shape[3]) is not None
    if bias is not None or not plain:
        return "only plain softmax merges parts"
    if known.rest is not None or known.windowed or known.paddings or not (known.causal or queries == 1):
        return "the mask is not causal alone"
    if recorded or transformed() or torch.compiler.is_compiling():
        return "gradients, transforms and traces take one call"
    return None if q.is_cpu else "made for the CPU"


def attend(mechanism: "Mechanism", q: Tensor, run: Run, length: int) -> Tensor:
    """The output of a run's newest queries, (rows, H, T, K) -> (rows, H, T, V), each over the keys up to its own."""
    assert run.prefix is not None
    prefix, rest = run.prefix, length - run.begin - run.prefix.length
    first_keys, first_values = (prefix.buffer.read(which, prefix.length) for which in (0, 1))
    keys, values = (run.buffer.read(which, rest) for which in (0, 1))
    scale, size = sdpa.scale(Call(mechanism, q, keys, values)), values.shape[3]
    longest = max(size, q.shape[3])
    queries, keys, values, scale = sdpa.fitted(q, keys, values, scale, longest)
    grouped, order = _by_parent(queries, prefix.places)
    outputs, sums = [], []
    for parents, rows in grouped:
        k, v = (F.pad(t[parents], (0, longest - t.shape[3])) for t in (first_keys, first_values))
        if decode.cannot(Call(mechanism, rows, k, v)) is None:
            out, lse = torch.ops.regard.decode_part(rows, k, v, scale, None)
        else:
            out, lse = parts.over_old(rows, k, v, scale)
        outputs.append(_by_row(out, queries.shape[2]))
        sums.append(_by_row(lse, queries.shape[2]))
    part = torch.cat(outputs)[order], torch.cat(sums)[order]
    tainted = None
    if decode.cannot(Call(mechanism, queries, keys, values, causal)) is None:
        tail = torch.ops.regard.decode_part(queries, keys, values, scale, 0)
    else:
        tainted = taint(keys, values) if q.shape[2] > 1 else None
        tail = parts.over_tail(queries, cleaned(keys, tainted), cleaned(values, tainted), scale)
    out, _ = parts.merge(*part, *tail)
    return poisoned(out[..., :size].to(q.dtype), causal, tainted)


def _by_parent(q: Tensor, places: tuple[int, ...]) -> tuple[list[tuple[slice | list[int], Tensor]], Tensor]:
    """Queries of rows that share a parent as queries of one row, (parents, H, rows · T, K), with their parents; and
    where each row is among all of them."""
    rows = torch.tensor(places).argsort(stable=True)
    counts = torch.tensor(places).bincount().tolist()
    order = rows.argsort()
    ordered = q if bool((rows == torch.arange(len(rows))).all()) else q[rows]
    if len(set(counts)) == 1:
        together = ordered.unflatten(0, (len(counts), counts[0])).transpose(1, 2).flatten(2, 3)
        return [(slice(None), together)], order
    pieces = ordered.split(counts)
    return [([parent], piece.transpose(0, 1).flatten(1, 2)[None]) for parent, piece in enumerate(pieces)], order


def _by_row(part: Tensor, queries: int) -> Tensor:
    """(parents, H, rows · T, …) as (parents · rows, H, T, …)."""
    return part.unflatten(2, (-1, queries)).transpose(1, 2).flatten(0, 1)
