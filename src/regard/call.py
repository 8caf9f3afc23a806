"""One call of attention, checked once, and the choice of a path for it."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.eager import readable
from regard.mask import Mask, causal
from regard.structure import EVERYTHING, Structure, reached, structure

if TYPE_CHECKING:
    from regard.mechanism import Mechanism


class Call:
    """Queries (B, H, T, K), keys (B, G, S, K) and values (B, G, S, V), with what is to be done with them.

    Sizes are read once: a short sequence is attended to sooner than Python reads them a dozen times.
    """

    __slots__ = (
        "batch", "bias", "groups", "heads", "k", "keys", "mask", "mechanism", "q", "qk_length", "queries", "square",
        "structure", "v", "value_length",
    )  # fmt: skip

    def __init__(
        self,
        mechanism: "Mechanism",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
    ) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.ndim != 4:
                raise ValueError(f"{name}: expected 4 dimensions (B, H, T, K), got shape {tuple(tensor.shape)}")
        mask = ordered(mechanism, mask)
        self.mechanism, self.q, self.k, self.v, self.mask, self.bias = mechanism, q, k, v, mask, bias
        self.batch, self.heads, self.queries, self.qk_length = q.shape
        _, self.groups, self.keys, _ = k.shape
        self.value_length = v.shape[3]
        self.square = bool(self.queries == self.keys)
        """Whether there are as many queries as keys. A trace that holds lengths open must know early."""
        self.structure: Structure = structure(mask, self.queries, self.keys)
        """What is known of the mask at this shape."""

    @property
    def empty(self) -> bool:
        """Nothing to compute: no queries, or no keys to look at."""
        return self.batch * self.heads * self.queries * self.keys * self.value_length == 0

    def check(self) -> None:
        """Raise ValueError for what a user can get wrong, before any compute."""
        kind, device, batch = self.q.dtype, self.q.device, self.batch
        if not kind.is_floating_point:
            raise ValueError(f"q: expected a floating-point dtype, got {kind}")
        if self.qk_length == 0:
            raise ValueError("q: expected a qk_length of at least 1, got 0")
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.dtype != kind:
                wanted = f"q's dtype {kind}" if tensor.is_floating_point() else "a floating-point dtype"
                raise ValueError(f"{name}: expected {wanted}, got {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"{name}: expected q's device {device}, got {tensor.device}")
        held = self.k.shape
        if held[0] != batch:
            raise ValueError(f"k: expected q's batch of {batch}, got shape {tuple(held)}")
        if held[3] != self.qk_length:
            raise ValueError(f"k: expected q's qk_length of {self.qk_length}, got {held[3]}")
        if self.v.shape[:3] != held[:3]:
            raise ValueError(
                f"v: expected k's batch, heads and length {tuple(held[:3])}, got {tuple(self.v.shape[:3])}"
            )
        if self.groups == 0 or self.heads % self.groups:
            raise ValueError(
                f"k: expected a number of heads that divides q's {self.heads}, got {self.groups} key/value heads"
            )
        if self.mask is not None:
            self.mask.fits(batch, self.heads, self.queries, self.keys)
        if self.bias is not None:
            self._check_bias(self.bias)
        if (reason := self.mechanism.refuses(self)) is not None:
            raise ValueError(reason)

    def _check_bias(self, bias: Tensor) -> None:
        full = (self.batch, self.heads, self.queries, self.keys)
        if not isinstance(bias, Tensor) or not bias.dtype.is_floating_point:
            given = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias: expected a floating-point tensor, got {given}; a bool tensor belongs in `mask`")
        if bias.device != self.q.device:
            raise ValueError(f"bias: expected q's device {self.q.device}, got {bias.device}")
        try:
            fits = torch.broadcast_shapes(bias.shape, full) == full
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"bias: expected a shape broadcastable to (B, H, T, S) = {full}, got {tuple(bias.shape)}")


def ordered(mechanism: "Mechanism", mask: Mask | None) -> Mask | None:
    """The mask under which a mechanism computes: causal too, if the mechanism is causal by itself.

    >>> import regard as rg
    >>> from regard.call import ordered
    >>> ordered(rg.Softmax(), None), ordered(rg.Retention(), None)
    (None, causal)
    """
    if not mechanism.ordered:
        return mask
    return causal if mask is None else causal & mask


@dataclass(frozen=True)
class Path:
    """One way to compute a mechanism."""

    name: str
    cannot: Callable[[Call], str | None]
    """Why it cannot serve a call, None if it can: a pure function of shapes, dtype, device, mask, whether gradients are
    recorded, and the machine."""
    run: Callable[[Call], Tensor]
    last_sees_all: bool = False
    """Whether the last query meets every key that is computed with, so that a NaN among them shows in its output."""
    slices: bool = False
    """Whether padding is left out by slices, so that what it hides is never read."""
    guards_itself: bool = False
    """Whether NaN and infinity in masked places reach nothing as it is, so that nobody has to look for them."""


@dataclass(frozen=True)
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


def refusal(mechanism: "Mechanism", mask: Mask | None = None, *, bias: bool = False) -> str | None:
    """Why a mechanism has no meaning under a mask, or with a bias, at whatever size; None if it has one.

    >>> import regard as rg
    >>> from regard.call import refusal
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


class _Policy(threading.local):
    """What is taken for granted, in this thread alone. torch.compile follows it, which it does not a ContextVar."""

    finite = False


_policy = _Policy()


@contextmanager
def all_finite() -> Iterator[None]:
    """Within this, keys and values are taken to be finite, and nobody looks for those that are not: for training,
    where one NaN anywhere spoils the loss, which is looked at. Other threads look as ever.

    >>> import torch
    >>> from regard.call import all_finite, taint
    >>> spoiled = torch.full((1, 1, 2, 4), torch.nan)
    >>> taint(spoiled, spoiled)
    tensor([[[True, True]]])
    >>> with all_finite():
    ...     print(taint(spoiled, spoiled))
    None
    """
    before, _policy.finite = _policy.finite, True
    try:
        yield
    finally:
        _policy.finite = before


def finite() -> bool:
    """Whether keys and values are taken to be finite, here and now."""
    return _policy.finite


def taint(k: Tensor, v: Tensor) -> Tensor | None:
    """Which keys (B, G, S) carry a NaN or infinity, or whose value does; None if none do.

    Where Python cannot read numbers the answer is always a tensor, and the computation goes on from it.
    """
    if _policy.finite:
        return None
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    look = readable(k, v)
    if look and math.isfinite((k + v if k.shape == v.shape else k.sum() + v.sum()).sum().item()):
        return None
    tainted = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return None if look and not bool(tainted.any()) else tainted


def cleaned(tensor: Tensor, tainted: Tensor | None) -> Tensor:
    """The tensor with zeros where it is tainted."""
    return tensor if tainted is None else tensor.masked_fill(tainted[..., None], 0)


def poisoned(out: Tensor, mask: Mask | None, tainted: Tensor | None) -> Tensor:
    """NaN for exactly the queries that see a tainted key: no masked NaN leaks, and no visible one is hidden."""
    if tainted is None:
        return out
    return out.masked_fill(reached(mask, tainted, out.shape[1], out.shape[2])[..., None], math.nan)


def nothing(call: Call, queries: int) -> Tensor:
    """The output of queries that see no key: exactly 0 whatever the inputs hold, and still part of the graph."""
    zeros = call.q.new_zeros(call.batch, call.heads, queries, call.value_length)
    return zeros + sum(t[..., :0].sum() for t in (call.q, call.k, call.v))


_AS_IT_IS = nullcontext()


def in_own_dtype(q: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off: attention computes in its inputs' dtype, or better, and in no other.

    A backward pass that torch.compile traces is under the autocast around its forward pass all the same.
    """
    place = "cpu" if q.is_cpu else q.device.type
    if q.is_meta or not torch.is_autocast_enabled(place):
        return _AS_IT_IS
    return torch.autocast(place, enabled=False)


def run_guarded(call: Call, path: Path) -> Tensor:
    """Run a path so that NaN and infinity in masked places reach nothing, forward or backward."""
    if call.empty:
        return nothing(call, call.queries)
    known = call.structure
    if known is EVERYTHING or path.guards_itself:
        return path.run(call)
    if path.slices and known.rows is not None and not known.positional and not torch.is_grad_enabled():
        # What is hidden is not read. Gradients need more: those of queries that see a bad number must be finite too.
        return path.run(call)
    if path.last_sees_all and not torch.is_grad_enabled() and readable(call.k, call.v):
        # A bad number that anyone sees shows in the last query's output, unless it rightly weighs nothing there.
        out = path.run(call)
        if math.isfinite(out.select(2, -1).sum().item()):
            return out
    tainted = taint(call.k, call.v)
    if tainted is None:
        return path.run(call)
    clean = Call(call.mechanism, call.q, cleaned(call.k, tainted), cleaned(call.v, tainted), call.mask, call.bias)
    return poisoned(path.run(clean), call.mask, tainted)
