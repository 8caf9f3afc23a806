"""A KV cache in several buffers on a GPU, which one kernel reads through a block table.

Tokens that forks and batch rows share are stored once (states/key_value_runs.py). The table says for every page of 128
positions in which buffer a batch row has them: addresses of its keys and values, and strides from head to head.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.masks import Mask
from regard.core.masks.structure import structure_of
from regard.core.paths import gpu, split, torch_softmax
from regard.core.states.buffer import Buffer
from regard.core.states.key_value_runs import TABLE_PAGE, Prefix, Run

_TABLES: WeakKeyDictionary[Buffer, tuple[tuple[Prefix, ...], Tensor]] = WeakKeyDictionary()
"""The table of a run, by its last buffer; and the prefixes it was made for."""


def cannot(mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None) -> str | None:
    """Why no kernel computes a run's newest queries (rows, H, T, K) through a table; None if one does. `mask` counts
    positions from where the run begins."""
    structure = structure_of(mask, q.shape[2], length - run.begin)
    if (reason := unfit(mechanism, q, run)) is not None:
        return reason
    if q.shape[2] > 1 and q.shape[2] * (q.shape[1] // run.buffer.keys.shape[1]) > torch_softmax.MOST_ROWS:
        return f"more than {torch_softmax.MOST_ROWS} query rows a key/value head"
    if structure.rest is not None or structure.after not in (None, 0):
        return "the mask is no band of positions up to each query's own"
    return "padding with holes" if structure.paddings and structure.rows is None else None


def unfit(mechanism: Any, q: Tensor, run: Run) -> str | None:
    """Why no kernel reads a run through a table, for any mask; None if one does."""
    if not gpu.serves(q, run.buffer.values) or split.scale(mechanism, q.shape[3]) is None:
        return "not a softmax that kernels of ours compute"
    if run.buffer.scales is not None:
        return "int8 numbers have scales, which a table does not name"
    return "a prefix ends within a page" if any(prefix.length % TABLE_PAGE for prefix in run.prefixes) else None


def attend(mechanism: Any, q: Tensor, run: Run, length: int, mask: Mask | None) -> Tensor:
    """The output of a run's newest queries, (rows, H, T, K) -> (rows, H, T, V), if `cannot` is None."""
    # Triton is imported only where it is used.
    from regard.core.kernels import decode_attention

    total = length - run.begin
    structure = structure_of(mask, q.shape[2], total)
    bounds = None if structure.rows is None else gpu.table(structure.rows, q.device)
    q, scale = scaled(mechanism, q)
    return decode_attention.forward(
        q, run.buffer.keys, run.buffer.values, scale, bounds, causal=structure.causal, before=structure.before,
        table=table(run), keys=total,
    )  # fmt: skip


def scaled(mechanism: Any, q: Tensor) -> tuple[Tensor, float]:
    """Queries and a scale above 0: a key that is hidden by -inf times 0 would be NaN."""
    scale = split.scale(mechanism, q.shape[3])
    assert scale is not None
    return (q, scale) if scale > 0 else (q * 0, 1.0)


def table(run: Run) -> Tensor:
    """Where a run's keys and values are, (rows, pages, 4) whole numbers on its device: from each address, the key or
    value at position p, counted from where the run begins, is p rows on."""
    prefixes, made = _TABLES.get(run.buffer, ((), None))
    if made is not None and prefixes is run.prefixes:
        return made
    rows = tuple(range(len(run.rows)))
    parts = [*run.prefixes, Prefix(run.buffer, run.buffer.room, rows)]
    entries, first = [], 0
    for part in parts:
        keys, values = part.buffer.keys, part.buffer.values
        entries.append(
            [[_address(keys, row, first), _address(values, row, first), keys.stride(1), values.stride(1)]
             for row in part.places]
        )  # fmt: skip
        first += part.length
    pages = torch.tensor([-(-part.length // TABLE_PAGE) for part in parts])
    numbers = torch.tensor(entries, device="cpu").repeat_interleave(pages, 0).transpose(0, 1).contiguous()
    device = run.buffer.keys.device
    made = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
    _TABLES[run.buffer] = run.prefixes, made
    return made


def _address(tensor: Tensor, row: int, first: int) -> int:
    """Where a row's position 0 would be, if the tensor's first position were `first`."""
    return tensor.data_ptr() + (row * tensor.stride(0) - first * tensor.stride(2)) * tensor.element_size()
