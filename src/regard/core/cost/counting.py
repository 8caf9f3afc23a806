"""FLOPs of a formula, whatever operators it uses: counted while it runs on meta tensors, which have shapes and no
data."""

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
"""How many tokens a formula is counted on when there are more: enough, since a formula may treat its first tokens
differently."""
FEW = 32
"""The same for a formula that has to run on real tensors, which costs time and memory."""


def count_flops(compute: Callable[[], object]) -> int:
    """FLOPs of what `compute` runs, as torch counts them.

    >>> import torch
    >>> count_flops(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    48
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        compute()
    return int(counter.get_total_flops())


class _WithoutNumbers(TorchDispatchMode):
    """Runs a formula on meta tensors. Other tensors it computes with (a parameter, a captured tensor) or writes to
    become meta tensors too, so that nothing is moved, copied or changed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func._schema.is_mutable or any(tensor.is_meta for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return func(*args, **kwargs or {})


@dataclass(frozen=True)
class _Count:
    flops: int
    numbers: bool
    """Whether the formula had to run on real tensors."""


_counts: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Counts by mechanism, formula and shapes: a crossover asks for the same counts hundreds of times."""


def takes_numbers(mechanism: "Mechanism") -> bool:
    """Whether a formula of this mechanism had to be counted on zeros: it does not run on meta tensors."""
    return any(count.numbers for count in _counts.get(mechanism, {}).values())


def count_formula(mechanism: "Mechanism", formula: Callable[..., object], *shapes: tuple[int, ...]) -> int:
    """FLOPs of a mechanism's formula, whatever it contains, for tensors of these shapes: counted on meta tensors, or on
    zeros if the formula reads numbers.

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
            except Exception:  # a user's formula may not run on meta tensors, or not at all
                tensors = [like.new_zeros(shape) for shape in shapes]
                counts[key] = _Count(count_flops(lambda: formula(*tensors)), True)
    return counts[key].flops


def similarity_flops(mechanism: "Mechanism", work: Work) -> int:
    """FLOPs of comparing queries and keys: those spent on single tokens, and the visible share of those spent on pairs.

    A run without keys counts what the queries cost, a run without queries what the keys cost; the rest belongs to the
    pairs.
    """
    if not work.batch or not work.query_length or not work.key_length:
        return 0

    def count(queries: int, keys: int) -> int:
        shapes = (1, work.num_heads, queries, work.qk_length), (1, work.num_kv_heads, keys, work.qk_length)
        return count_formula(mechanism, mechanism.compare_heads, *shapes)

    count(1, 1)
    # Check the shape of its result for unequal numbers of queries and keys, if it accepts them.
    with suppress(RuntimeError, IndexError, TypeError):
        count(2, 3)
    step = FEW if takes_numbers(mechanism) else COUNTED

    def at(queries: int, keys: int) -> Fraction:
        points = product(interpolation(queries, step), interpolation(keys, step))
        return sum((share * part * count(rows, columns) for (rows, share), (columns, part) in points), Fraction())

    try:
        nothing, of_queries, of_keys = count(0, 0), at(work.query_length, 0), at(0, work.key_length)
        of_pairs = at(work.query_length, work.key_length) - of_queries - of_keys + nothing
    except Exception:  # the formula needs a token, or a key for each query: all of its cost counts as the pairs'
        return work.pairs * count(step, step) // (work.num_heads * step**2)
    tokens = work.batch * (of_queries + of_keys - 2 * nothing)
    return round(nothing + tokens + of_pairs * work.pairs / (work.num_heads * work.query_length * work.key_length))


def interpolation(length: int, step: int) -> list[tuple[int, Fraction]]:
    """Lengths to count at, each with its factor: the length itself, or, for long ones, three short lengths that
    determine a quadratic polynomial (a formula may multiply keys with keys; it may also loop over tokens in Python,
    slowly)."""
    if length <= 3 * step:
        return [(length, Fraction(1))]
    x = Fraction(length, step)
    return [(step, (x - 2) * (x - 3) / 2), (2 * step, (x - 1) * (3 - x)), (3 * step, (x - 1) * (x - 2) / 2)]
