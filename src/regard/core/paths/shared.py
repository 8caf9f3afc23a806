"""Attention to tokens that forks or batch rows share (prompt cache), and to what each row has after them.

The shared tokens are read once for the queries of all rows that have them in common; the other tokens of each row are
another part. The parts are merged exactly: by their log-sum-exps, as in parts.py, or by their largest scores, which
serves softcap, argmax and any mask. On a GPU the parts are launches of one kernel
(shared_gpu.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from regard.core import cpu
from regard.core.calls.call import Call
from regard.core.eager import transformed
from regard.core.masks import Mask, Span, causal
from regard.core.masks.guard import bad_keys, cleaned, poisoned
from regard.core.masks.structure import QUERY_BLOCK, Structure, structure_of
from regard.core.paths import decode, parts, sdpa, shared_gpu, torch_softmax
from regard.core.states.key_value_runs import Run

_LEAST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class _Part:
    """Some tokens of a run: keys and values, (parents, G, S, ·), as they are stored."""

    first: int
    """The position of the first key, from where the run begins."""
    k: Tensor
    v: Tensor
    scales: tuple[Tensor, Tensor] | None
    places: tuple[int, ...] | None
    """The parent of each row; None if every row has its own, in order."""

    @property
    def count(self) -> int:
        return self.k.shape[2]


def cannot(
    mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None, bias: Tensor | None, recorded: bool
) -> str | None:
    """Why a run's newest queries cannot attend to shared tokens and the rest separately; None if they can. On a GPU,
    `mask` is for the rows of the run and counts positions from where the run begins."""
    if not getattr(mechanism, "as_defined", False):
        return "only softmax merges parts"
    if bias is not None:
        return "a bias is for all keys"
    if recorded or transformed() or torch.compiler.is_compiling():
        return "gradients, transforms and traces need a single call"
    return None if q.is_cpu else shared_gpu.cannot(mechanism, q, run, length, mask)


def attend(mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None) -> Tensor:
    """The output of a run's newest queries, (rows, H, T, K) -> (rows, H, T, V). `mask` is for the rows of the run and
    counts positions from where the run begins."""
    if not q.numel():
        return q.new_zeros(*q.shape[:3], run.buffer.values.shape[3])
    if not q.is_cpu:
        return shared_gpu.attend(mechanism, q, run, length, mask)
    total = run.count(length)
    structure = structure_of(mask, q.shape[2], total)
    pieces = list(_parts(run, total))
    computed = _by_kernels(mechanism, q, pieces, structure, total)
    return _by_scores(mechanism, q, pieces, structure, mask, total) if computed is None else computed.to(q.dtype)


def _parts(run: Run, total: int) -> Iterator[_Part]:
    first = 0
    for prefix in run.prefixes:
        places = None if prefix.in_order else prefix.places
        yield _Part(first, *prefix.buffer.stored(prefix.length), places)
        first += prefix.length
    if first < total:
        yield _Part(first, *run.buffer.stored(total - first), None)


def _by_kernels(mechanism: Any, q: Tensor, pieces: list[_Part], structure: Structure, total: int) -> Tensor | None:
    """Each part by a kernel that returns its log-sum-exp; None if there is none for some part."""
    if mechanism.sdpa_scale(q.shape[3]) is None or structure.rest is not None:
        return None
    if structure.paddings and structure.rows is None:
        return None
    results: list[tuple[Tensor, ...]] = []
    for part in pieces:
        spans = None if structure.rows is None else _spans(part, structure.rows)
        if structure.rows is not None and spans is None:
            return None
        computed = _by_parent(q, part.places, partial(_kernel, mechanism, part, structure, total, spans))
        if computed is None:
            return None
        results.append(computed)
    *earlier, (last, last_lse) = results
    if not earlier:
        return last
    out, lse = earlier[0]
    for second, second_lse in earlier[1:]:
        out, lse = parts.merge(out, lse, second, second_lse)
    share = torch.sigmoid(lse - last_lse)[..., None]  # as parts.merge, without the log-sum-exp of all
    return last.to(share.dtype).lerp(out.to(share.dtype), share)


def _kernel(
    mechanism: Any, part: _Part, structure: Structure, total: int, spans: list[Span] | None, q: Tensor, parents: slice
) -> tuple[Tensor, Tensor] | None:
    """The output over a part and its log-sum-exp, by JIT-compiled code or by PyTorch; None if neither can."""
    k, v, scales = part.k, part.v, part.scales
    if part.places is not None:
        k, v, scales = k[parents], v[parents], scales and (scales[0][parents], scales[1][parents])
    call = Call(mechanism, q, k, v, scales=scales)
    offset = total - call.queries - part.first
    limited = spans is not None or structure.windowed
    # Rows of one parent are heads here; decode's limit for half precision counts them as queries.
    together = 1 if part.places is None else len(part.places) // len(part.k)
    crowded = cpu.MATRIX_UNITS and q.dtype.itemsize == 2 and together * call.queries > decode.MOST_IN_HALF
    if (limited or not crowded) and decode.cannot(call) is None:
        here = None if spans is None else spans[parents]
        out, lse = decode.part(call, here, structure.before, structure.after, offset)
        # A query may see nothing here, or nothing at all: the difference of two infinities would be NaN.
        return out, lse if here is None and structure.before is None else lse.clamp(min=_LEAST)
    if limited:
        return None
    return _flash(call, causal if structure.causal and part.first + part.count == total else None)


def _flash(call: Call, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """The output over all keys, or, causal, of queries at the last keys; and its log-sum-exp."""
    scale, size = sdpa.scale(call), call.value_length
    call = call.widened()
    bad = None if mask is None else bad_keys(call.k, call.v)
    k, v = cleaned(call.k, bad), cleaned(call.v, bad)
    q, k, v, scale = torch_softmax.fitted(call.q, k, v, scale, max(size, call.qk_length))
    out, lse = (parts.over_old if mask is None else parts.over_tail)(q, k, v, scale)
    return poisoned(out[..., :size], mask, bad), lse


def _spans(part: _Part, rows: Sequence[Span]) -> list[Span] | None:
    """The real keys of each parent, counted from the part's first; None if rows of one parent differ."""
    clipped = [(max(low - part.first, 0), min(high - part.first, part.count)) for low, high in rows]
    clipped = [span if span[0] < span[1] else (0, 0) for span in clipped]
    if part.places is None:
        return clipped
    by_parent = dict(zip(part.places, clipped, strict=True))
    agree = all(by_parent[place] == span for place, span in zip(part.places, clipped, strict=True))
    return [by_parent[place] for place in sorted(by_parent)] if agree else None


def _by_scores(
    mechanism: Any, q: Tensor, pieces: list[_Part], structure: Structure, mask: Mask | None, total: int
) -> Tensor:
    """The formula over each part, for a block of queries at a time."""
    outputs: list[Tensor] = []
    for block in q.split(QUERY_BLOCK, dim=2):
        start = total - q.shape[2] + sum(out.shape[2] for out in outputs)
        place = torch.arange(start, start + block.shape[2])
        scored = []
        for part in pieces:
            low = 0 if structure.before is None else max(0, start - structure.before - part.first)
            if low >= part.count:  # the window has left it
                continue
            limited = structure.rest is not None or structure.paddings or structure.before is not None
            later = structure.after is not None and part.first + part.count > start + structure.after + 1
            visible = None
            if mask is not None and (limited or later):
                keys = torch.arange(part.first + low, part.first + part.count)
                visible = mask.at(len(block), block.shape[1], place, keys)
            scored.append(_scored(mechanism, block, part, low, visible))
        outputs.append(_merged(mechanism, q.shape[3], scored).to(q.dtype))
    return torch.cat(outputs, dim=2)


def _scored(mechanism: Any, q: Tensor, part: _Part, low: int, visible: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of a part's values from key `low` on, weighted relative to the largest score; that score; and the sum of
    the weights."""
    k, v = part.k[:, :, low:], part.v[:, :, low:]
    if part.scales is not None:
        k, v = ((t * scale[:, :, low:]).to(q.dtype) for t, scale in zip((k, v), part.scales, strict=True))
    bad = None if visible is None and not mechanism.hard else bad_keys(k, v)
    k, v = cleaned(k, bad), cleaned(v, bad)
    (scores,) = _by_parent(
        q if mechanism.beta != 0 else q * 0, part.places,
        lambda rows, parents: (mechanism.grouped(mechanism.score, rows, k[parents]),),
    ) or ()  # fmt: skip
    scores = scores if visible is None else scores.masked_fill(~visible, -math.inf)
    best = scores.amax(-1, keepdim=True)
    weights = _faded(mechanism, q.shape[3], scores - best.masked_fill(best == -math.inf, 0))
    (out,) = _by_parent(weights, part.places, lambda rows, parents: (mechanism.mix(rows, v[parents]),)) or ()
    if bad is not None:
        bad = bad if part.places is None else bad[list(part.places)]
        seen = bad.repeat_interleave(q.shape[1] // bad.shape[1], dim=1)[:, :, None]
        out = torch.where((seen if visible is None else seen & visible).any(-1, keepdim=True), math.nan, out)
    return out, best, weights.sum(-1, keepdim=True)


def _faded(mechanism: Any, qk_length: int, below: Tensor) -> Tensor:
    """The weight of scores that are this far below the best."""
    if mechanism.hard:
        return (below == 0).to(below.dtype)
    return torch.exp((mechanism.scale(qk_length) or 1.0) * below)


def _merged(mechanism: Any, qk_length: int, scored: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """The parts as one; 0 for a query that sees nothing."""
    top = torch.stack([best for _, best, _ in scored]).amax(0)
    top = top.masked_fill(top == -math.inf, 0)
    shares = [_faded(mechanism, qk_length, best - top) for _, best, _ in scored]
    sums = sum(share * out for share, (out, _, _) in zip(shares, scored, strict=True))
    total = sum(share * part for share, (_, _, part) in zip(shares, scored, strict=True))
    assert isinstance(sums, Tensor)
    assert isinstance(total, Tensor)
    return sums / total.masked_fill(total == 0, 1)


Results = tuple[Tensor, ...]


def _by_parent(
    x: Tensor, places: tuple[int, ...] | None, compute: Callable[[Tensor, slice], Results | None]
) -> Results | None:
    """`compute(x, parents)` for rows (rows, H, T, ·), with rows of the same parent as heads of one row: its results,
    (parents, heads, T, ·), as rows again."""
    if places is None:
        return compute(x, slice(None))
    rows, counts, order = _grouped(places)
    x = x if rows is None else x[rows]
    if len(set(counts)) == 1:
        pieces = [(slice(None), x.unflatten(0, (len(counts), counts[0])))]
    else:
        pieces = [(slice(parent, parent + 1), piece[None]) for parent, piece in enumerate(x.split(counts))]
    results = []
    for parents, piece in pieces:
        computed = compute(piece.transpose(1, 2).flatten(1, 2), parents)
        if computed is None:
            return None
        results.append([t.unflatten(1, (x.shape[1], -1)).transpose(1, 2).flatten(0, 1) for t in computed])
    joined = (torch.cat(same) for same in zip(*results, strict=True))
    return tuple(t if rows is None else t[order] for t in joined)


@lru_cache(maxsize=64)
def _grouped(places: tuple[int, ...]) -> tuple[list[int] | None, list[int], list[int]]:
    """Rows in the order of their parents (None: as they are), how many each parent has, and the index of each row among
    them. Lists, since a tensor that is made under a trace must not be kept."""
    rows = sorted(range(len(places)), key=lambda row: (places[row], row))
    counts = [places.count(parent) for parent in sorted(set(places))]
    in_order = rows == list(range(len(places)))
    return None if in_order else rows, counts, sorted(range(len(rows)), key=lambda row: rows[row])
