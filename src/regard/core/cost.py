"""What attention costs: FLOPs, bytes, state and activation memory, as formulas that tests hold against counters.

A multiply-add is 2 FLOPs. Contractions only: elementwise work is left out. Pairs a structured mask hides are not
counted.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from regard.core.calls.call import ordered
from regard.core.display import Html, table
from regard.core.masks import Mask, MaskFunction, as_mask
from regard.core.masks.structure import count_keys, count_pairs
from regard.core.owned import made_on, probe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.core.families.mechanism import Mechanism


LONGEST = 10**15
"""Tokens, or sequences: beyond it a float no longer tells neighbouring lengths apart."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A piece of work: how many queries meet how many keys, in which shape.

    One new token over a cache of 4096 is `Work(query_length=1, key_length=4096)`; a whole prompt of 4096 is
    `Work(query_length=4096, key_length=4096, mask=rg.causal)`.

    >>> import regard as rg
    >>> rg.Work(key_length=1024, num_heads=8, num_kv_heads=8).pairs
    8192
    """

    batch: int = 1
    query_length: int = 1
    key_length: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    qk_length: int = 64
    value_length: int = 64
    dtype: torch.dtype = torch.bfloat16
    cached: bool = True
    """Whether keys before the last `query_length` are in a state already (a decode step); cross-attention's are not."""
    mask: Mask | MaskFunction | None = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "qk_length", "value_length"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a whole number of at least 1, got {getattr(self, name)!r}")
        for name in ("batch", "query_length", "key_length"):
            if not isinstance(getattr(self, name), int) or not 0 <= getattr(self, name) <= LONGEST:
                raise ValueError(
                    f"{name}: expected a whole number of at least 0, at most {LONGEST:,}, got {getattr(self, name)!r}"
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {self.dtype!r}")
        object.__setattr__(self, "mask", as_mask(self.mask))
        if isinstance(self.mask, Mask):
            self.mask.fits(self.batch, self.num_heads, self.query_length, self.key_length)

    @property
    def rule(self) -> Mask | None:
        return as_mask(self.mask)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs over batch and heads."""
        return count_pairs(self.rule, self.batch, self.num_heads, self.query_length, self.key_length)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def io_bytes(self) -> int:
        """Queries, visible keys and their values read once, the output written once."""
        per_query = self.num_heads * (self.qk_length + self.value_length) * self.query_length
        per_key = self.num_kv_heads * (self.qk_length + self.value_length)
        return (self.batch * per_query + self.keys_read * per_key) * self.itemsize

    @property
    def keys_read(self) -> int:
        """Keys that some query may see, over the batch: a structured mask's others need not be read."""
        return count_keys(self.rule, self.batch, self.query_length, self.key_length)

    def plot(self, *mechanisms: "Mechanism", shortest: int = 512, longest: int = 131072) -> "Figure":
        """What mechanisms cost on this work over its length: a matplotlib figure of prefill and decode.

        >>> import regard as rg
        >>> len(rg.Work(mask=rg.causal).plot(rg.Softmax(), rg.Quadratic()).axes)
        2
        """
        from regard.core.cost_figure import cost_figure

        if not mechanisms:
            raise ValueError("mechanisms: expected at least one, like rg.Softmax(), got none")
        kinds = [type(mechanism).__name__ for mechanism in mechanisms]
        names = {
            kind if kinds.count(kind) == 1 else repr(mechanism): mechanism
            for kind, mechanism in zip(kinds, mechanisms, strict=True)
        }
        return cost_figure(names, self, shortest=shortest, longest=longest)

    def _repr_html_(self) -> Html:
        return table([{field.name: getattr(self, field.name) for field in fields(self)}], title="Work")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a piece of work costs.

    >>> import regard as rg, torch
    >>> work = rg.Work(key_length=4096, num_heads=8, num_kv_heads=8, dtype=torch.float32)
    >>> cost = rg.cost(rg.Softmax(), work)
    >>> cost.flops, cost.state_bytes
    (8388608, 16777216)
    """

    flops: int
    """2 for each multiply-add of the contractions."""
    bytes: int
    """Read or written at the least: inputs and state once, output once."""
    state_bytes: int
    """What the stream's state holds once it has met all keys."""
    activation_bytes: int
    """What is held besides inputs and output: the (T, S) weights, or a kernel's sums and one chunk's features."""
    parameters: int = 0
    form: str = "score"
    """"score" grows with queries × keys, "linear" with the length."""
    note: str = ""

    @property
    def intensity(self) -> float:
        """FLOPs per byte: below the machine's own ratio, memory is the limit."""
        return self.flops / self.bytes if self.bytes else 0.0

    def _repr_html_(self) -> Html:
        return table([self.row()], right=NUMBERS, notes=[self.note] if self.note else [])

    def row(self) -> dict[str, str]:
        """The numbers as people read them, by their names in tables."""
        return {
            "FLOPs": human(self.flops),
            "bytes": human(self.bytes, "B"),
            "FLOPs/byte": f"{self.intensity:.3g}",
            "state": human(self.state_bytes, "B"),
            "activation": human(self.activation_bytes, "B"),
            "parameters": human(self.parameters),
            "form": self.form,
        }


NUMBERS = ("FLOPs", "bytes", "FLOPs/byte", "state", "activation", "parameters")
"""The columns of `Cost.row` that are numbers."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A whole attention layer: its four projections, its attention, and which of them is the bottleneck.

    >>> import regard as rg
    >>> cost = rg.layer_cost(rg.Work(query_length=128, key_length=128, num_heads=8, num_kv_heads=8), embedding_dim=512)
    >>> cost.bottleneck, cost.parameters
    ('projections', 1048576)
    """

    projections: Cost
    attention: Cost

    @property
    def flops(self) -> int:
        return self.projections.flops + self.attention.flops

    @property
    def bytes(self) -> int:
        return self.projections.bytes + self.attention.bytes

    @property
    def parameters(self) -> int:
        return self.projections.parameters + self.attention.parameters

    @property
    def bottleneck(self) -> str:
        return "projections" if self.projections.flops >= self.attention.flops else "attention"

    def _repr_html_(self) -> Html:
        rows = [
            {"part": "projections", **self.projections.row()},
            {"part": "attention", **self.attention.row()},
        ]
        notes = [
            f"{human(self.flops, 'FLOP')}, {human(self.bytes, 'B')}, {human(self.parameters)} parameters in all; "
            f"bottleneck: {self.bottleneck}",
        ]
        return table(rows, right=NUMBERS, notes=notes)


def cost(mechanism: "Mechanism", work: Work) -> Cost:
    """What `mechanism` costs on `work`.

    >>> import regard as rg
    >>> prefill = rg.Work(query_length=65536, key_length=65536, mask=rg.causal)
    >>> rg.cost(rg.Quadratic(), prefill).flops < rg.cost(rg.Softmax(), prefill).flops
    True
    """
    if isinstance(mechanism, type) or not hasattr(mechanism, "cost"):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax(), got {mechanism!r}")
    parameters = sum(tensor.numel() for tensor in mechanism.parameters())
    try:
        result = mechanism.cost(replace(_checked(work), mask=ordered(mechanism, work.rule)))
    except (RuntimeError, IndexError, TypeError) as error:  # a user's formula, which is run to be counted
        raise ValueError(
            f"qk_length: expected one that {type(mechanism).__name__} takes, got {work.qk_length}, with which it "
            f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
        ) from error
    notes = [result.note] if result.note else []
    if _takes_numbers(mechanism):
        notes.append(f"FLOPs are counted on zeros: {type(mechanism).__name__} does not run on meta tensors")
    return replace(result, parameters=parameters, note="; ".join(notes))


def _checked(work: Work) -> Work:
    if not isinstance(work, Work):
        raise ValueError(f"work: expected rg.Work(…), got {work!r}")
    return work


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


def _takes_numbers(mechanism: "Mechanism") -> bool:
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
    step = FEW if _takes_numbers(mechanism) else COUNTED

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


def score_cost(work: Work, precision: torch.dtype, similarity: int | None = None) -> Cost:
    """The cost of a mechanism that compares every visible pair and keeps every key; its weights are in `precision`.

    `similarity` is what comparing costs in FLOPs, that of q·k if not given.
    """
    comparing = 2 * work.pairs * work.qk_length if similarity is None else similarity
    weights = work.batch * work.num_heads * work.query_length * work.key_length
    unknown = work.rule is not None and not work.rule.structured
    return Cost(
        flops=comparing + 2 * work.pairs * work.value_length,
        bytes=work.io_bytes,
        state_bytes=key_value_bytes(work),
        activation_bytes=weights * precision.itemsize,
        note="the mask has no known structure: all pairs count" if unknown else "",
    )


def key_value_bytes(work: Work) -> int:
    """Bytes of the keys and values of `key_length` tokens."""
    per_token = work.batch * work.num_kv_heads * (work.qk_length + work.value_length)
    return per_token * work.key_length * work.itemsize


def layer_cost(work: Work, embedding_dim: int, mechanism: "Mechanism | None" = None) -> LayerCost:
    """What a multi-head attention layer costs on `work`: W_q, W_k, W_v, W_o, and the mechanism, softmax by default.

    Keys and values of `query_length` new tokens are projected, those of a cache are there already; all are projected
    where the work is not cached (cross-attention).

    >>> import regard as rg
    >>> short = rg.Work(query_length=64, key_length=64, num_heads=8, num_kv_heads=8)
    >>> long = rg.Work(query_length=8192, key_length=8192, num_heads=8, num_kv_heads=8)
    >>> rg.layer_cost(short, embedding_dim=512).bottleneck, rg.layer_cost(long, embedding_dim=512).bottleneck
    ('projections', 'attention')
    """
    if not isinstance(embedding_dim, int) or embedding_dim < 1:
        raise ValueError(f"embedding_dim: expected a whole number of at least 1, got {embedding_dim!r}")
    of_queries = work.num_heads * (work.qk_length + work.value_length)  # W_q and W_o
    of_keys = work.num_kv_heads * (work.qk_length + work.value_length)  # W_k and W_v
    queries = _checked(work).batch * work.query_length
    keys = queries if work.cached else work.batch * work.key_length
    projected = queries * of_queries + keys * of_keys
    parameters = embedding_dim * (of_queries + of_keys)
    touched = parameters + 2 * embedding_dim * (queries + keys) + projected
    return LayerCost(
        projections=Cost(
            flops=2 * embedding_dim * projected,
            bytes=touched * work.itemsize,
            state_bytes=0,
            activation_bytes=projected * work.itemsize,
            parameters=parameters,
            form="linear",
        ),
        attention=score_cost(work, accumulator(work.dtype)) if mechanism is None else cost(mechanism, work),
    )


Rate = Callable[["Mechanism", Work], float]
"""Seconds a mechanism takes for some work on a machine."""


def crossover(
    first: "Mechanism", second: "Mechanism", work: Work, *, seconds: Rate | None = None, limit: int = 1 << 22
) -> int | None:
    """The length from which `second` is cheaper than `first`, or None if it is not up to `limit`.

    The work's `key_length` is varied; where `query_length` equals it (prefill), both are, else queries stay (decode).
    By FLOPs, or by `seconds(mechanism, work)` for a machine's measured rates (`commands.suite.crossing(…).rates`).

    >>> import regard as rg
    >>> work = rg.Work(query_length=1024, key_length=1024, num_heads=4, num_kv_heads=4, mask=rg.causal)
    >>> rg.crossover(rg.Softmax(), rg.Quadratic(), work)  # by FLOPs, at D = 64
    5213
    """
    _checked(work)
    price: Rate = seconds or (lambda mechanism, at: float(cost(mechanism, at).flops))

    def gain(length: int) -> float:
        at = with_length(work, length)
        return price(first, at) - price(second, at)

    # From the longest down: a kernel's first chunk can be cheaper too, but "from which" means for good.
    high = limit
    if gain(high) <= 0:
        return None
    while high > 1 and gain(high // 2) > 0:
        high //= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    # A new chunk costs a little at once, so the gain can dip below 0 again not far on.
    stride = max(1, high // (512 if high < 1 << 16 else 16))
    dips = [length for length in range(high, 2 * high, stride) if gain(length) <= 0]
    if not dips:
        return high
    low, high = dips[-1], dips[-1] + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 0 else (middle, high)
    return high


def with_length(work: Work, length: int) -> Work:
    """The same work at another length: both lengths if it is a whole sequence, else the keys'."""
    queries = length if work.query_length == work.key_length else work.query_length
    return replace(work, key_length=length, query_length=queries)


MODES = ("prefill", "decode")
"""A whole sequence at once; one new token over a cache."""


def heads_label(num_heads: int, num_kv_heads: int) -> str:
    """What a grouping of heads is called.

    >>> from regard.core.cost import heads_label
    >>> [heads_label(32, kv) for kv in (32, 8, 1)]
    ['MHA', 'GQA', 'MQA']
    """
    if num_heads == num_kv_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def mode_work(work: Work, mode: str, length: int) -> Work:
    """The work at a length: a whole sequence for "prefill", one new token over a cache for "decode".

    >>> import regard as rg
    >>> from regard.core.cost import mode_work
    >>> mode_work(rg.Work(), "decode", 512).query_length
    1
    """
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return replace(work, query_length=length if mode == "prefill" else 1, key_length=length)


PRICES: dict[str, Rate] = {
    "flops": lambda mechanism, work: float(cost(mechanism, work).flops),
    "bytes": lambda mechanism, work: float(cost(mechanism, work).bytes),
}
"""What `crossover` can go by without a machine to measure."""


def mode_price(mode: str) -> Rate:
    """What decides a mode's speed, as a price for `crossover`: FLOPs for prefill, bytes moved for decode.

    >>> import regard as rg
    >>> from regard.core.cost import mode_price
    >>> mode_price("decode")(rg.Softmax(), rg.Work(key_length=1024))
    2105344.0
    """
    return PRICES["flops" if mode == "prefill" else "bytes"]


def mode_crossover(
    first: "Mechanism", second: "Mechanism", work: Work, mode: str, price: Rate | None = None
) -> int | None:
    """The length from which `second` is cheaper in a mode, by what decides the mode's speed or by another price.

    >>> import regard as rg
    >>> from regard.core.cost import mode_crossover
    >>> mode_crossover(rg.Softmax(), rg.Quadratic(), rg.Work(mask=rg.causal), "decode")
    2565
    """
    # Any length of at least 2 does: a decode of length 1 would read as a whole sequence of one token.
    at = mode_work(work, mode, 2)
    return crossover(first, second, at, seconds=price or mode_price(mode))


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and state are kept: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def human(value: float, unit: str = "") -> str:
    """A number for people: 1.23 G, 456 k.

    >>> human(1.5e9, "FLOP")
    '1.5 GFLOP'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".strip()
    step = 0
    while step < 10 and abs(value) >= 999.5:
        value, step = value / 1000, step + 1
    return f"{value:.3g} {' kMGTPEZYRQ'[step].strip()}{unit}".strip()
