"""The values: `Work`, a piece of work, and `Cost`, what it costs."""

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from regard.core.cost.units import human
from regard.core.display import Html, table
from regard.core.masks import Mask, MaskFunction, as_mask
from regard.core.masks.structure import count_keys, count_pairs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.core.families.mechanism import Mechanism

LONGEST = 10**15
"""Tokens, or sequences: beyond this a float cannot distinguish neighbouring lengths."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A piece of work: how many queries attend to how many keys, and in which shape.

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
    """Whether the keys before the last `query_length` are already in a state (a decode step); in cross-attention they
    are not."""
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
        """Keys that some query may see, over the batch; a structured mask's other keys need not be read."""
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
        rows = [{"field": field.name, "value": getattr(self, field.name)} for field in fields(self)]
        return table(rows, title="Work")


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
    """The least that must move: inputs and state read once, output written once."""
    state_bytes: int
    """Size of the state (KV cache or recurrent state) after all keys."""
    activation_bytes: int
    """Memory besides inputs and output: the (T, S) weights, or linear attention's sums and the features of one
    chunk."""
    parameters: int = 0
    form: str = "score"
    """"score" grows with queries × keys, "linear" with the length."""
    note: str = ""

    @property
    def intensity(self) -> float:
        """FLOPs per byte: below the machine's ratio, memory bandwidth is the limit."""
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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which statistics and state are kept: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def with_length(work: Work, length: int) -> Work:
    """The same work at another length: both lengths for a whole sequence, else only the key length."""
    queries = length if work.query_length == work.key_length else work.query_length
    return replace(work, key_length=length, query_length=queries)


MODES = ("prefill", "decode")
"""A whole sequence at once; one new token over a KV cache."""


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


def heads_label(num_heads: int, num_kv_heads: int) -> str:
    """The field's name for a grouping of heads.

    >>> from regard.core.cost import heads_label
    >>> [heads_label(32, kv) for kv in (32, 8, 1)]
    ['MHA', 'GQA', 'MQA']
    """
    if num_heads == num_kv_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"
