"""A recurrent state of constant size, for a mechanism that keeps something other than keys and values."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from regard.core.eager import recorded, transformed
from regard.core.masks import Mask, Padding, causal
from regard.core.masks.guard import bad_keys, cleaned, poisoned
from regard.core.masks.padded import check_taken_in, join_padding, reorder_padding
from regard.core.masks.structure import padding_between
from regard.core.states.state import Sizes, State, Stored, check_tokens, frozen, row_index


@dataclass(frozen=True, eq=False, kw_only=True)
class FixedState(State):
    """A state of constant size: some tensors, whose first axes are the batch and the key/value heads.

    A subclass is a frozen dataclass with tensors as its fields. Reordering rows, counting bytes and saving work on
    these fields. A field may also be None (a tensor that does not exist yet), a number, a string or a bool, the same
    for all rows; other fields cannot be saved. The state cannot be cropped, since the tokens are not kept.

    Its mechanism creates it in `empty_state`, names its class in `state_type`, and extends it in `advance`: `receive`
    prepares new keys and values, and `attended` gives the output and the longer state.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, eq=False, kw_only=True)
    ... class Sum(rg.FixedState):
    ...     total: torch.Tensor
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Summing(rg.UnnormalisedMechanism):  # every weight is 1
    ...     ordered = True
    ...     def weigh(self, q, k, visible, bias=None):
    ...         seen = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2])
    ...         return (seen if visible is None else seen * visible).expand(*q.shape[:3], k.shape[2])
    ...     def state_type(self, qk_length):
    ...         return Sum
    ...     def empty_state(self, sizes, capacity):
    ...         return Sum(mechanism=self, sizes=sizes, total=sizes.zeros(1, sizes.value_length))
    ...     def advance(self, q, k, v, state, rule, bias):
    ...         new = state.receive(q, k, v, rule)
    ...         totals = new.state.total + new.v.cumsum(2)
    ...         heads = q.shape[1] // k.shape[1]
    ...         return new.attended(totals.repeat_interleave(heads, 1), total=totals[:, :, -1:])
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> state = Summing().start(batch=1, num_kv_heads=2, qk_length=4, value_length=4)
    >>> out, state = Summing().extend(q, k, v, state)
    >>> torch.equal(out, rg.attend(q, k, v, Summing())), state.length, state.nbytes
    (True, 3, 32)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign] # defined here, so that dataclass generates no other

    mechanism: Any
    sizes: Sizes
    length: int = 0
    padding: Padding | None = None
    """Which of the tokens so far are real; None while all are."""

    def _tensors(self) -> dict[str, Tensor]:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _added(self) -> dict[str, Any]:
        """The fields of the subclass."""
        common = {entry.name for entry in fields(FixedState)}
        return {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in common}

    @property
    def batch(self) -> int:
        return self.sizes.batch

    @property
    def nbytes(self) -> int:
        table = None if self.padding is None else self.padding.table
        tensors = [*self._tensors().values(), *(() if table is None else (table,))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def check(self, k: Tensor, v: Tensor) -> None:
        sizes = self.sizes
        for name, tensor, length in (("k", k, sizes.qk_length), ("v", v, sizes.value_length)):
            check_tokens(name, tensor, (sizes.batch, sizes.num_kv_heads, length), sizes.dtype, self.device)

    @property
    def device(self) -> torch.device:
        tensors = [*self._tensors().values()] or [self.sizes.zeros(0)]
        return tensors[0].device

    def reorder(self, index: Tensor) -> "FixedState":
        index = row_index(index, self.batch, self.device)
        chosen: dict[str, Any] = {name: tensor[index] for name, tensor in self._tensors().items()}
        padding = reorder_padding(self.padding, index, self.length)
        return replace(self, **chosen, padding=padding, sizes=replace(self.sizes, batch=len(index)))

    def crop(self, length: int) -> "FixedState":
        if type(length) is not int or length != self.length:
            raise ValueError(
                f"length: expected {self.length}, since {type(self).__name__} cannot be cropped, got {length!r}"
            )
        return self

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        padding = {} if self.padding is None else {"padding": self.padding.valid(self.length).clone()}
        described = {name: _described(self, name, value) for name, value in self._added().items()}
        return {"fields": described}, self._tensors() | padding

    def restored(self, stored: Stored) -> "FixedState":
        described = stored.plan.get("fields", {})
        added = {name: _field(stored, name, described.get(name, {}), like) for name, like in self._added().items()}
        sizes = replace(self.sizes, batch=stored.batch)
        padding = stored.padding("padding", stored.length)
        return replace(self, **added, padding=padding, length=stored.length, sizes=sizes)

    def recordable(self) -> "FixedState":
        changes: dict[str, Any] = {name: tensor.clone() for name, tensor in self._tensors().items() if frozen(tensor)}
        return replace(self, **changes) if changes else self

    def receive(self, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> "Received":
        """New keys and values, prepared for a mechanism's `advance`, given a mask over the whole history. The queries
        only decide whether gradients are recorded.

        ValueError if the mask hides a token that is already in the state: that cannot be undone.
        """
        count = k.shape[2]
        total = self.length + count
        check_taken_in(self.padding, self.length, self.batch, padding_between(rule, 0, self.length, total))
        fresh = padding_between(rule, self.length, total, total)
        if fresh is not None:
            hidden = ~fresh.valid(count, k.device)[:, None]
            k, v = cleaned(k, hidden), cleaned(v, hidden)
        derived = recorded(q, k, v, *self._tensors().values()) or self.mechanism.learns(k.shape[3]) or transformed()
        bad = bad_keys(k, v) if count > 1 or derived else None
        if bad is None or not (derived and self.length):
            return Received(self, self, cleaned(k, bad), cleaned(v, bad), fresh, bad)
        kept = {name: tensor for name, tensor in self._tensors().items() if tensor.is_floating_point()}
        flat = [tensor.flatten(2)[:, :, None] for tensor in kept.values()]
        before = torch.stack([flags for x in flat if (flags := bad_keys(x, x)) is not None]).any(0)
        clean: dict[str, Any] = {name: _marked(tensor, before[..., 0], 0) for name, tensor in kept.items()}
        flags = torch.cat([before, bad], dim=-1)
        return Received(self, replace(self, **clean), cleaned(k, bad), cleaned(v, bad), fresh, flags)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.mechanism!r}, length={self.length}, nbytes={self.nbytes})"


@dataclass(frozen=True, eq=False)
class Received:
    """New tokens for a `FixedState`, and the state, safe to compute with.

    Tokens that padding hides are 0. A NaN or infinity is 0 too if it could reach queries that do not see it, or their
    gradients: `attended` restores it. Otherwise it stays, and shows in everything that is computed from it.
    """

    before: FixedState
    state: Any
    """The state to extend."""
    k: Tensor
    v: Tensor
    fresh: Padding | None
    """Which of the tokens are real; None if all are."""
    bad: Tensor | None
    """Which tokens were bad, (B, G, T), or (B, G, 1 + T) with the history as one key; None if `attended` need not
    know."""

    @property
    def real(self) -> Tensor | None:
        """Which of the tokens are real, (B, 1, T, 1); None if all are."""
        return None if self.fresh is None else self.fresh.valid(self.k.shape[2], self.k.device)[:, None, :, None]

    def attended(self, out: Tensor, **tensors: Tensor) -> tuple[Tensor, Any]:
        """The output of the tokens' queries, each of which sees the tokens up to its position, and the state after
        them."""
        state, count = self.before, self.k.shape[2]
        if self.bad is not None:
            bad = self.bad.any(-1)
            tensors = {name: _marked(tensor, bad, torch.nan) for name, tensor in tensors.items()}
        padding = join_padding(state.padding, state.length, self.fresh, count, state.batch, state.device)
        changes: dict[str, Any] = {**tensors, "length": state.length + count, "padding": padding}
        return poisoned(out, causal, self.bad), replace(state, **changes)


def _marked(tensor: Tensor, rows: Tensor, number: float) -> Tensor:
    """A tensor (B, G, …) with a number in place of some rows and heads (B, G); integer and bool tensors are
    unchanged."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(rows[(..., *[None] * (tensor.ndim - 2))], number, tensor)


PLAIN = (type(None), bool, int, float, str)
"""Types of fields that a file stores directly."""


def _described(state: FixedState, name: str, value: Any) -> Any:
    """A field of a state as JSON: a tensor's dtype and shape without the batch, anything else unchanged."""
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[1:])}
    if type(value) in PLAIN:
        return value
    raise ValueError(
        f"{name}: expected a tensor, a number, a string, a bool or None in a {type(state).__name__} that is saved, "
        f"got {type(value).__name__}"
    )


def _field(stored: Stored, name: str, described: Any, like: Any) -> Any:
    """A field from a file, given the field of an empty state; where that is None, the file gives dtype and shape."""
    if isinstance(described, dict) and isinstance(like, Tensor):
        return stored.tensor(name, like.dtype, stored.batch, *like.shape[1:])
    if isinstance(described, dict) and like is None:
        dtype = getattr(torch, described["dtype"], None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} of dtype {described['dtype']!r:.40}")
        return stored.tensor(name, dtype, stored.batch, *described["shape"])
    numbers = type(like) in (int, float) and type(described) in (int, float)
    alike = numbers or like is None or described is None or type(like) is type(described)
    if type(described) not in PLAIN or not alike:
        raise ValueError(f"{name}: {described!r:.40}")
    return described
