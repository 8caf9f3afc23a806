"""Which path computes a call, why (`Plan`), and the call computed by it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.core.calls.call import Call, nothing
from regard.core.display import Html, escape, table
from regard.core.masks import Mask
from regard.core.masks.guard import bad_keys, cleaned, finite, poisoned
from regard.core.masks.structure import EVERYTHING

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


Again = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function that runs the same call on other queries, keys and values of the same sizes, strides, dtype and device."""
Stepped = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""The output for one query per head: of queries, their keys and values, the KV cache's keys and values, and its length
with the new token."""


@dataclass(frozen=True)
class Path:
    """One way to compute a mechanism."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why this path cannot compute a call, None if it can: a pure function of shapes, dtype, device, mask, whether
    gradients are recorded, and the machine."""
    run: Callable[[Call], Tensor]
    reads_hidden: Callable[[Call], bool] = lambda call: True
    """Whether the numbers of a masked key can reach queries that do not see it, or their gradients."""
    reads_int8: bool = False
    """Whether it reads int8 keys and values directly; for other paths they are dequantized first."""
    step: Callable[[Call, Tensor, Tensor, int | None], Stepped | None] | None = None
    """For a call of one query over a KV cache on a GPU without gradients, its new key and value, and the window's
    `before`: a function that computes such calls and stores key and value in the cache; None if the path has no such
    function."""
    again: Callable[[Call], Again | None] | None = None
    """For a call on a GPU without gradients: a function that runs calls like it without the set-up; None if there is
    none (repeats.py)."""


@dataclass(frozen=True, repr=False)
class Plan:
    """The path chosen for a call, why, and why not the others.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 300, 16)
    >>> print(rg.explain(q, k, v, rg.Quadratic(), rg.causal))
    Quadratic(c=1.0) on q (1, 2, 300, 16), k (1, 2, 300, 16), v (1, 2, 300, 16), torch.float32, cpu
    mask       causal
    path       chunked    running sums in chunks of 256: time and memory linear in the length
    not        fused      made for GPUs
    not        blocks     can serve, but is not the first choice
    not        reference  can serve, but is not the first choice
    """

    call: str
    mask: str
    path: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.call, f"mask       {self.mask}", f"path       {self.path:<10} {self.reason}"]
        lines += [f"not        {name:<10} {why}" for name, why in self.rejected.items()]
        lines += [f"note       {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> Html:
        rows = [{"path": Html(f"<b>{escape(self.path)}</b>"), "": "chosen", "why": self.reason}]
        rows += [{"path": name, "": "not chosen", "why": why} for name, why in self.rejected.items()]
        return table(rows, title=self.call, notes=[f"mask: {self.mask}", *self.notes])


def refusal(mechanism: "Mechanism", mask: Mask | None = None, *, bias: bool = False) -> str | None:
    """Why a mechanism has no meaning under a mask, or with a bias, at any size; None if it has one.

    >>> import regard as rg
    >>> from regard.core.calls.choice import refusal
    >>> refusal(rg.Softmax(), rg.causal), refusal(rg.Channel(), rg.causal) is None
    (None, False)
    """
    x = torch.empty(1, 1, 8, 8, device="meta")
    return mechanism.refuses(Call(mechanism, x, x, x, mask, x[0, 0] if bias else None))


def choose(call: Call, name: str | None = None) -> Path:
    """The first of the mechanism's paths that can compute the call; or the named path, with ValueError if it cannot."""
    paths = call.mechanism.paths()
    for path in paths:
        if name not in (None, path.name):
            continue
        if (why := path.cannot(call)) is None:
            return path
        if name is not None:
            raise ValueError(f"path: expected one that can serve this call, got {name!r}: {why}")
    raise ValueError(f"path: expected one of {[path.name for path in paths]} for {call.mechanism!r}, got {name!r}")


def plan(call: Call, name: str | None = None) -> Plan:
    """What `choose` chooses, and the reasons, as a value to print."""
    chosen = choose(call, name)
    others = {path.name: path.cannot(call) for path in call.mechanism.paths() if path is not chosen}
    shapes = ", ".join(f"{n} {tuple(t.shape)}" for n, t in (("q", call.q), ("k", call.k), ("v", call.v)))
    return Plan(
        call=f"{call.mechanism!r} on {shapes}, {call.q.dtype}, {call.q.device}",
        mask=repr(call.mask) if call.mask is not None else "none",
        path=chosen.name,
        reason=(chosen.run.__doc__ or "").strip().split("\n")[0].rstrip(".") + (" (asked for)" if name else ""),
        rejected={other: why or "can serve, but is not the first choice" for other, why in others.items()},
        notes=call.mechanism.notes(call),
    )


def compute(call: Call, path: Path, *, derived: bool = False) -> Tensor:
    """Run a path so that a NaN or infinity in a masked key or value reaches nothing, forward or backward.

    `derived` is for a decode step with gradients: where its queries see a NaN, the gradients of earlier queries, which
    did not see it, must stay finite.
    """
    if call.empty:
        return nothing(call, call.queries)
    call = call if path.reads_int8 else call.widened()
    structure = call.structure
    if finite() or (not derived and (structure is EVERYTHING or not path.reads_hidden(call))):
        return path.run(call)
    if not structure.positional and not torch.is_grad_enabled():  # only padding hides keys, the same for all queries
        valid = structure.valid(call.keys, call.q.device)
        assert valid is not None
        hidden = ~valid[:, None]
        return path.run(call.with_keys(cleaned(call.k, hidden), cleaned(call.v, hidden)))
    bad = bad_keys(call.k, call.v)
    clean = call.with_keys(cleaned(call.k, bad), cleaned(call.v, bad))
    return poisoned(path.run(clean), call.mask, bad)


def never(call: Call) -> bool:
    """`reads_hidden` of a path that does not read masked keys, or guards against them itself."""
    return False


def between_queries(call: Call) -> bool:
    """`reads_hidden` of a path that slices padding off: it still reads keys that only some queries see. With gradients
    it needs the guard too: those of queries that see a NaN must be finite."""
    structure = call.structure
    return structure.positional or structure.rows is None or torch.is_grad_enabled()
