"""Attention to tokens that forks or batch rows share, and to what each row has after them, on a GPU: a launch of
`split`'s kernel for each buffer, which reads shared tokens for a tile of all their rows' queries; then one that merges.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.core.eager import kept, untouched
from regard.core.masks import Mask
from regard.core.masks.structure import structure_of
from regard.core.paths import gpu, split
from regard.core.states.key_value_runs import Run


def cannot(mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None) -> str | None:
    """Why no kernel computes a run's newest queries (rows, H, T, K) in parts; None if one does. `mask` counts positions
    from where the run begins."""
    if (reason := unfit(mechanism, q, run)) is not None:
        return reason
    if run.count(length) == run.prefix_length:
        return "nothing comes after the shared tokens"
    if not untouched():
        return "a mode must see every operator"
    structure = structure_of(mask, q.shape[2], run.count(length))
    shared_by = q.shape[1] // run.buffer.keys.shape[1]
    if (reason := split.beyond(structure, q.shape[2], shared_by) or gpu.no_band(structure)) is not None:
        return reason
    alike = structure.rows is None or all(_same_for_members(structure.rows, prefix.places) for prefix in run.prefixes)
    return None if alike else "rows that share tokens have different padding"


def unfit(mechanism: Any, q: Tensor, run: Run) -> str | None:
    """Why no kernel computes over a run in parts, for any mask; None if one does."""
    if split.scale(mechanism, q.shape[3]) is None:
        return "not plain softmax"
    serves = gpu.serves(q, run.buffer.values)
    return None if serves else f"made for GPUs, heads of at most {gpu.LONGEST} numbers and at most float32"


def attend(mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None) -> Tensor:
    """The output of a run's newest queries, (rows, H, T, K) -> (rows, H, T, V), if `cannot` is None."""
    # Triton is imported only where it is used.
    from regard.core.kernels import decode_attention

    total = run.count(length)
    structure = structure_of(mask, q.shape[2], total)
    bounds = None if structure.rows is None else gpu.table(structure.rows, q.device)
    q, scale = scaled(mechanism, q)
    return decode_attention.forward_parts(
        q, parts(run), total, scale, bounds, causal=structure.causal, before=structure.before
    )


def scaled(mechanism: Any, q: Tensor) -> tuple[Tensor, float]:
    """Queries and a scale above 0: a key that is hidden by -inf times 0 would be NaN."""
    scale = split.scale(mechanism, q.shape[3])
    assert scale is not None
    return (q, scale) if scale > 0 else (q * 0, 1.0)


def parts(run: Run) -> list[Any]:
    """A run's prefixes and what comes after them, as its kernel is given them."""
    from regard.core.kernels.decode_attention import Part

    listed, first = [], 0
    for prefix in run.prefixes:
        buffer, stop = prefix.buffer, first + prefix.length
        members = None if prefix.in_order else _members(prefix.places, len(buffer.keys), buffer.keys.device)
        listed.append(Part(buffer.keys, buffer.values, first, stop, buffer.scales, members))
        first = stop
    return [*listed, Part(run.buffer.keys, run.buffer.values, first, scales=run.buffer.scales)]


@kept(64)
def _members(places: tuple[int, ...], parents: int, device: torch.device) -> Tensor:
    """The rows of each parent, (parents, most), and -1 where there are fewer."""
    rows = [[row for row, place in enumerate(places) if place == parent] for parent in range(parents)]
    most = max(map(len, rows))
    padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows], dtype=torch.int32, device="cpu")
    return padded.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else padded


def _same_for_members(rows: Sequence[tuple[int, int]], places: Sequence[int]) -> bool:
    """Whether rows of the same parent have the same real keys."""
    by_parent = dict(zip(places, rows, strict=True))
    return all(by_parent[place] == span for place, span in zip(places, rows, strict=True))
