"""The choice of a path for a call, in words and in deed."""

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
"""What runs a call again on other queries, keys and values of the same sizes, strides, dtype and device."""


@dataclass(frozen=True)
class Path:
    """One way to compute a mechanism."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why it cannot serve a call, None if it can: a pure function of shapes, dtype, device, mask, whether gradients are
    recorded, and the machine."""
    run: Callable[[Call], Tensor]
    reads_hidden: Callable[[Call], bool] = lambda call: True
    """Whether numbers of a key that a mask hides can reach queries that do not see it, or their gradients."""
    reads_int8: bool = False
    """Whether it reads int8 keys and values as they are; for others they are widened first."""
    again: Callable[[Call], Again | None] | None = None
    """For a call that it serves on a GPU without gradients: what runs calls like it, all set up; None if it cannot
    (repeats.py)."""


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
    """Why a mechanism has no meaning under a mask, or with a bias, at whatever size; None if it has one.

    >>> import regard as rg
    >>> from regard.core.calls.choice import refusal
    >>> refusal(rg.Softmax(), rg.causal), refusal(rg.Channel(), rg.causal) is None
    (None, False)
    """
    x = torch.empty(1, 1, 8, 8, device="meta")
    return mechanism.refuses(Call(mechanism, x, x, x, mask, x[0, 0] if bias else None))


def choose(call: Call, name: str | None = None) -> Path:
    """The first of the mechanism's paths that can serve the call, or the named one, which must."""
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
    """What `choose` chooses, in words."""
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
    """Run a path so that NaN and infinity in masked places reach nothing, forward or backward.

    `derived` is for a step whose gradients are recorded: what its queries see may be bad, and then the gradients of
    earlier queries, which did not see it, must not be.
    """
    if call.empty:
        return nothing(call, call.queries)
    call = call if path.reads_int8 else call.widened()
    structure = call.structure
    if finite() or (not derived and (structure is EVERYTHING or not path.reads_hidden(call))):
        return path.run(call)
    if (
        not structure.positional and not torch.is_grad_enabled()
    ):  # padding alone hides, and it is the same for all queries
        valid = structure.valid(call.keys, call.q.device)
        assert valid is not None
        hidden = ~valid[:, None]
        return path.run(call.with_keys(cleaned(call.k, hidden), cleaned(call.v, hidden)))
    bad = bad_keys(call.k, call.v)
    clean = call.with_keys(cleaned(call.k, bad), cleaned(call.v, bad))
    return poisoned(path.run(clean), call.mask, bad)


def never(call: Call) -> bool:
    """Of a path that leaves out, or guards against, whatever is hidden."""
    return False


def between_queries(call: Call) -> bool:
    """Of a path that leaves padding out by slices: what is hidden from some queries alone is read. Gradients need more:
    those of queries that see a bad number must be finite too."""
    structure = call.structure
    return structure.positional or structure.rows is None or torch.is_grad_enabled()
