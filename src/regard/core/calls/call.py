"""One call of attention: queries, keys, values, mask and bias, checked once."""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.core.eager import surely_equal
from regard.core.masks import Mask, causal
from regard.core.masks.structure import Structure, structure_of
from regard.core.tensors import fitted
from regard.core.user_code import runs_user_code

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
A_FLOAT = "a floating-point dtype (float16, bfloat16, float32 or float64)"


class Call:
    """Queries (B, H, T, K), keys (B, G, S, K) and values (B, G, S, V), with the mechanism, mask and bias to apply.

    Sizes are read once: for a short sequence, reading them a dozen times takes Python longer than the attention.
    """

    __slots__ = (
        "batch", "bias", "groups", "heads", "k", "keys", "mask", "mechanism", "q", "qk_length", "queries", "scales",
        "square", "structure", "v", "value_length",
    )  # fmt: skip

    def __init__(
        self,
        mechanism: "Mechanism",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.ndim != 4:
                raise ValueError(f"{name}: expected 4 dimensions (B, H, T, K), got shape {tuple(tensor.shape)}")
        mask = ordered(mechanism, mask)
        mechanism = fitted(mechanism, q.dtype) if runs_user_code(mechanism) else mechanism
        self.mechanism, self.q, self.k, self.v, self.mask, self.bias = mechanism, q, k, v, mask, bias
        self.batch, self.heads, self.queries, self.qk_length = q.shape
        _, self.groups, self.keys, _ = k.shape
        self.value_length = v.shape[3]
        self.scales = scales
        """The scales of int8 keys and values, (B, G, S, 1), if a KV cache stores them in int8."""
        self.square = surely_equal(self.queries, self.keys)
        """Whether there are as many queries as keys; False where a trace with dynamic lengths leaves it open."""
        self.structure: Structure = structure_of(mask, self.queries, self.keys)
        """The band, padding and rest of the mask at this shape."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no queries, or no keys to attend to."""
        return self.batch * self.heads * self.queries * self.keys * self.value_length == 0

    def with_keys(self, k: Tensor, v: Tensor) -> "Call":
        """The same call over other keys and values of the same sizes and kind."""
        call = object.__new__(Call)  # not checked again; torch.compile cannot trace copy.copy
        for name in Call.__slots__:
            setattr(call, name, getattr(self, name))
        call.k, call.v = k, v
        return call

    def widened(self) -> "Call":
        """The same call over keys and values of the queries' dtype, if they are int8."""
        if self.scales is None:
            return self
        k, v = ((x * scale).to(self.q.dtype) for x, scale in zip((self.k, self.v), self.scales, strict=True))
        call = self.with_keys(k, v)
        call.scales = None
        return call

    def check(self) -> None:
        """Raise ValueError for wrong arguments, before anything is computed."""
        kind, device, batch = self.q.dtype, self.q.device, self.batch
        if kind not in FLOATS:
            raise ValueError(f"q: expected {A_FLOAT}, got {kind}")
        if self.qk_length == 0:
            raise ValueError("q: expected a qk_length of at least 1, got 0")
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.dtype != kind:
                expected = f"q's dtype {kind}" if tensor.is_floating_point() else A_FLOAT
                raise ValueError(f"{name}: expected {expected}, got {tensor.dtype}")
            if tensor.device != device:
                raise ValueError(f"{name}: expected q's device {device}, got {tensor.device}")
        shape = self.k.shape
        if shape[0] != batch:
            raise ValueError(f"k: expected q's batch of {batch}, got shape {tuple(shape)}")
        if shape[3] != self.qk_length:
            raise ValueError(f"k: expected q's qk_length of {self.qk_length}, got {shape[3]}")
        if self.v.shape[:3] != shape[:3]:
            raise ValueError(
                f"v: expected k's batch, heads and length {tuple(shape[:3])}, got {tuple(self.v.shape[:3])}"
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
            kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(f"bias: expected a floating-point tensor, got {kind}; a bool tensor belongs in `mask`")
        if bias.device != self.q.device:
            raise ValueError(f"bias: expected q's device {self.q.device}, got {bias.device}")
        try:
            fits = torch.broadcast_shapes(bias.shape, full) == full
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(f"bias: expected a shape broadcastable to (B, H, T, S) = {full}, got {tuple(bias.shape)}")


def ordered(mechanism: "Mechanism", mask: Mask | None) -> Mask | None:
    """The mask under which a mechanism computes: made causal if the mechanism is causal by definition.

    >>> import regard as rg
    >>> from regard.core.calls.call import ordered
    >>> ordered(rg.Softmax(), None), ordered(rg.Retention(), None), ordered(rg.Retention(), rg.causal)
    (None, causal, causal)
    """
    if not mechanism.ordered or (mask is not None and causal in mask.terms().bands):
        return mask
    return causal if mask is None else causal & mask


def nothing(call: Call, queries: int) -> Tensor:
    """The output of queries that see no key: exactly 0 whatever the inputs are, and still part of the autograd
    graph."""
    zeros = call.q.new_zeros(call.batch, call.heads, queries, call.value_length)
    return zeros + sum(t[..., :0].sum() for t in (call.q, call.k, call.v))


_AS_IT_IS = nullcontext()


def in_own_dtype(q: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast is off: attention computes in its inputs' dtype or better.

    This does not reach a backward pass that torch.compile traces: it runs under the autocast around its forward pass.
    """
    place = "cpu" if q.is_cpu else q.device.type
    if q.is_meta or not torch.is_autocast_enabled(place):
        return _AS_IT_IS
    return torch.autocast(place, enabled=False)
