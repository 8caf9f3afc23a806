"""Random cases for the laws, and the error budget: how far from the exact result an output may be."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from regard.core.calls.call import Call
from regard.core.families.features import RECENT
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, causal, global_tokens, padding, window
from regard.core.paths.sums import CHUNK
from regard.core.tensors import own_dtype, replaced

LENGTHS = (1, 2, 3, 5, 17, 0, 63, RECENT, RECENT + 1, CHUNK - 1, CHUNK, CHUNK + 1)
SHORT = (1, 2, 3, 5, 17, 0, CHUNK + 1)
"""For slow laws: few lengths, one of them longer than a chunk."""
LENGTH_PAIRS = ((4, 3), (1, 1), (16, 16), (5, 17))
"""qk_length and value_length; one pair is for JIT-compiled code, which needs multiples of the vector length."""
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values."""


def apply(change: Callable[[Tensor], Tensor], tensors: Triple) -> Triple:
    """Apply `change` to queries, keys and values."""
    q, k, v = tensors
    return change(q), change(k), change(v)


@dataclass(frozen=True)
class Case:
    """One drawn example: shapes, mask, dtype and the seed of its numbers."""

    mask: str
    heads: str
    dtype: str
    batch: int
    queries: int
    keys: int
    qk_length: int
    value_length: int
    seed: int
    device: str = "cpu"

    @property
    def kind(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def drawn(self) -> dict[str, int]:
        """What was drawn for a cell: sizes and a seed."""
        return {name: getattr(self, name) for name in ("batch", "queries", "keys", "qk_length", "value_length", "seed")}

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def lengths(self, salt: int = 1) -> list[int]:
        """A length for each sequence, from 0 to all keys."""
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randint(0, self.keys + 1, (self.batch,), generator=generator).tolist()

    def rule(self, keys: int | None = None) -> Mask | None:
        """The mask, over the first `keys` keys of the sequence."""
        return MASKS[self.mask](self, self.keys if keys is None else keys)

    def tensors(self) -> Triple:
        heads, groups = HEADS[self.heads]
        generator = self.generator

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        q = draw(self.batch, heads, self.queries, self.qk_length)
        k = draw(self.batch, groups, self.keys, self.qk_length)
        v = draw(self.batch, groups, self.keys, self.value_length)
        return apply(lambda t: t.to(self.device, self.kind), (q, k, v))


def _right(case: Case, keys: int) -> Mask:
    return padding([min(length, keys) for length in case.lengths()])


def _left(case: Case, keys: int) -> Mask:
    starts = torch.tensor(case.lengths(), dtype=torch.long)
    return padding(valid=torch.arange(keys) >= starts[:, None])


MASKS: dict[str, Callable[[Case, int], Mask | None]] = {
    "none": lambda case, keys: None,
    "causal": lambda case, keys: causal,
    "padding left": _left,
    "padding right": _right,
    "window": lambda case, keys: window(before=2 + case.seed % 3, after=case.seed % 2),
    "global": lambda case, keys: global_tokens(2) | window(before=3),
    "combined": lambda case, keys: causal & _left(case, keys) & (window(before=4) | global_tokens(1)),
}


class Broken(AssertionError):  # noqa: N818 - an outcome, not an error
    """A law that does not hold."""


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference from the float64 reference; NaN counts as infinite."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - exact.double()).abs().max().item()
    return difference if difference == difference else float("inf")


def budget(dtype: torch.dtype, plain_error: float, *, gradient: bool = False) -> float:
    """How far from the float64 reference a result in `dtype` may be, given the plain formula's error in that dtype.

    On a few numbers the plain formula can be exact by luck. Its error counts as at least half a unit in the last place
    of results around 1, the cost of rounding the output.

    >>> import torch
    >>> budget(torch.float64, 1e-3)
    1e-12
    """
    plain_error = max(plain_error, torch.finfo(dtype).eps / 2)
    if dtype == torch.float64:
        return 1e-12
    if dtype == torch.float32:
        return 2 * plain_error + 1e-6
    return (3 if gradient else 2) * plain_error + 1e-5


def within_budget(what: str, actual: Tensor, exact: Tensor, plain: Tensor, *, gradient: bool = False) -> None:
    """Raise Broken if `actual` is further from `exact` (float64) than the error budget allows."""
    size = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    distance, allowed = error(actual, exact), size * budget(actual.dtype, error(plain, exact) / size, gradient=gradient)
    if actual.shape != exact.shape or not distance <= allowed:
        raise Broken(f"{what} is off by {distance:.2g}, {allowed:.2g} allowed")


def plain_output(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> Tensor:
    """The plain formula in the dtype of the tensors: exact weights, rounded, times the values."""
    call = Call(mechanism, q, k, v, rule)
    if call.empty:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    visible = None if rule is None else rule.visible(call.batch, call.heads, call.queries, call.keys).to(q.device)
    mechanism = call.mechanism  # with its tensors in the dtype that it computes in
    return mechanism.mix(mechanism.weigh(q, k, visible).to(q.dtype), v, visible)


def exact_output(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> Tensor:
    """The plain formula in float64: what every result is compared with."""
    return plain_output(in_dtype(mechanism, torch.float64), q.double(), k.double(), v.double(), rule)


def in_dtype(mechanism: Mechanism, dtype: torch.dtype, device: str | None = None) -> Mechanism:
    """The mechanism with its tensors in a dtype (and on a device); unchanged if they are already."""
    current = own_dtype(mechanism)
    if current is None or (current == dtype and device is None):
        return mechanism
    tensors: dict[str, Tensor | nn.Module] = {}
    for name, value in mechanism.tensors().items():
        if isinstance(value, nn.Module):
            tensors[name] = copy.deepcopy(value).to(device=device, dtype=dtype)
        elif value.is_floating_point():
            other = value.detach().to(device=device, dtype=dtype)
            tensors[name] = nn.Parameter(other, value.requires_grad) if isinstance(value, nn.Parameter) else other
    return replaced(mechanism, tensors)


def agrees(what: str, actual: Tensor, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> None:
    """Raise Broken if `actual` is not, within the error budget, what the mechanism gives for these tensors."""
    if actual.dtype != q.dtype:
        raise Broken(f"{what} is in {actual.dtype}, not in {q.dtype}")
    within_budget(what, actual, exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule))
