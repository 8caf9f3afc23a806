"""FLOPs of a formula, whatever it contains: counted as it runs, on tensors without numbers."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from regard.core.cost.work import Work
from regard.core.tensors import made_on, probe

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

COUNTED = 64
"""Tokens on which a formula is counted, where not on all of them: a formula may treat its first few differently."""
FEW = 32
"""The same where it takes numbers, which cost time and memory."""


def count_flops(compute: Callable[[], object]) -> int:
    """FLOPs of what runs, as torch counts them.

    >>> import torch
    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


class _WithoutNumbers(TorchDispatchMode):
    """A formula on meta tensors, which have shapes and no numbers: what it computes with them (a parameter, a captured
    tensor) or writes to is taken as a meta tensor too, so that nothing is moved, copied or changed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func._schema.is_mutable or any(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs or {})


@dataclass(frozen=True)
class _Count:
    flops: int
    numbers: bool
    """Whether it took numbers to count."""


_counts: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of each mechanism what was counted, by formula and shapes: a crossover asks for the same some hundred times."""


def takes_numbers(mechanism: "Mechanism") -> bool:
    """Whether a formula of this mechanism had to be counted on zeros: it does not run on meta tensors."""
    return any(count.numbers for count in _counts.get(mechanism, {}).values())


def count_formula(mechanism: "Mechanism", formula: Callable[..., object], *shapes: tuple[int, ...]) -> int:
    """FLOPs of a mechanism's formula, whatever it contains, for tensors of these shapes: counted on meta tensors, and
    on zeros where it reads numbers.

    >>> import regard as rg
    >>> from regard.core.cost import count_formula
    >>> count_formula(rg.Softmax(), rg.Softmax().score, (2, 3), (4, 3))
    48
    """
    counts: dict[Any, _Count] = _counts.setdefault(mechanism, {})
    key = formula.__name__, shapes
    if key not in counts:
        like = probe(mechanism, (0,))
        with made_on(like.device):
            try:
                tensors = [torch.empty(shape, dtype=like.dtype, device="meta") for shape in shapes]
                with _WithoutNumbers():  # type: ignore[no-untyped-call] # torch's own
                    counts[key] = _Count(count_flops(lambda: formula(*tensors)), False)
            except Exception:  # of a user's formula, which may not run without numbers, or not at all
                tensors = [like.new_zeros(shape) for shape in shapes]
                counts[key] = _Count(count_flops(lambda: formula(*tensors)), True)
    return counts[key].flops


def similarity_flops(mechanism: "Mechanism", work: Work) -> int:
    """FLOPs of comparing queries and keys: those of the tokens, and of what the pairs take, the visible pairs' share.

    What is counted without keys is the queries', without queries the keys', and the rest the pairs'.
    """
    if not work.batch or not work.query_length or not work.key_length:
        return 0

    def count(queries: int, keys: int) -> int:
        shapes = (1, work.num_heads, queries, work.qk_length), (1, work.num_kv_heads, keys, work.qk_length)
        return count_formula(mechanism, mechanism.compare_heads, *shapes)

    count(1, 1)
    # What it gives for other numbers of queries than keys is checked, if it takes them.
    with suppress(RuntimeError, IndexError, TypeError):
        count(2, 3)
    step = FEW if takes_numbers(mechanism) else COUNTED

    def at(queries: int, keys: int) -> Fraction:
        points = product(_interpolation(queries, step), _interpolation(keys, step))
        return sum((share * part * count(rows, columns) for (rows, share), (columns, part) in points), Fraction())

    try:
        nothing, of_queries, of_keys = count(0, 0), at(work.query_length, 0), at(0, work.key_length)
        of_pairs = at(work.query_length, work.key_length) - of_queries - of_keys + nothing
    except Exception:  # of a formula that needs a token, or a key for each query: all it costs counts as the pairs'
        return work.pairs * count(step, step) // (work.num_heads * step**2)
    tokens = work.batch * (of_queries + of_keys - 2 * nothing)
    return round(nothing + tokens + of_pairs * work.pairs / (work.num_heads * work.query_length * work.key_length))


def _interpolation(length: int, step: int) -> list[tuple[int, Fraction]]:
    """Lengths to count at, and by what each count is multiplied: the length itself, or three from which a polynomial of
    the second degree follows (a formula may multiply keys with keys), since one may walk over the tokens in Python."""
    if length <= 3 * step:
        return [(length, Fraction(1))]
    x = Fraction(length, step)
    return [(step, (x - 2) * (x - 3) / 2), (2 * step, (x - 1) * (3 - x)), (3 * step, (x - 1) * (x - 2) / 2)]
