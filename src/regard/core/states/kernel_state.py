"""The recurrent state of linear attention: running sums over old keys, and the newest tokens as keys and values."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from regard.core.masks import Padding
from regard.core.masks.padded import check_taken_in, join_padding, reorder_padding
from regard.core.states.key_values import KeyValueState
from regard.core.states.state import State, Stored, frozen, row_index


@dataclass(frozen=True, eq=False)
class KernelState(State):
    """The running sums of linear attention, and the newest tokens as keys and values.

    `sums` holds sum phi(k) v^T (B, G, C, V) and `normaliser` sum phi(k) (B, G, C) over the first `folded` tokens, in
    float32 or better. The newest tokens are kept in `recent` until it is full, then the older half is folded into the
    sums by one matrix product. So the sums are read once per token and written rarely, and short histories use the
    score form, which is exact. The size of the state is constant. A NaN that is folded in stays in the sums, and every
    later query sees it.
    """

    mechanism: object
    """The mechanism whose features are summed: no other mechanism can extend this state."""
    sums: Tensor
    normaliser: Tensor
    folded: int
    recent: KeyValueState
    padding: Padding | None = None
    """Which of the folded tokens are real; None while all are."""

    @property
    def length(self) -> int:
        return self.folded + self.recent.length

    @property
    def batch(self) -> int:
        return self.sums.shape[0]

    @property
    def earliest(self) -> int:
        return self.folded

    @property
    def layout(self) -> Any:
        recent = None if self.padding is not None else self.recent.layout
        return None if recent is None else (recent, self.mechanism)

    def check(self, k: Tensor, v: Tensor) -> None:
        self.recent.check(k, v)

    @property
    def nbytes(self) -> int:
        table = None if self.padding is None else self.padding.table
        tensors = [t for t in (self.sums, self.normaliser, table) if t is not None]
        return self.recent.nbytes + sum(t.numel() * t.element_size() for t in tensors)

    def check_folded(self, padding: Padding | None) -> None:
        """Raise ValueError if a mask's padding hides a token that is already in the sums."""
        check_taken_in(self.padding, self.folded, self.sums.shape[0], padding)

    def padding_after(self, padding: Padding | None, fold_to: int, keys: int) -> Padding | None:
        """Which folded tokens are real after `fold_to` more are folded."""
        more = None if padding is None else padding.between(0, fold_to, keys)
        return join_padding(self.padding, self.folded, more, fold_to, self.sums.shape[0], self.sums.device)

    def __repr__(self) -> str:
        return f"KernelState({self.mechanism!r}, length={self.length}, nbytes={self.nbytes})"

    def reorder(self, index: Tensor) -> "KernelState":
        index = row_index(index, self.sums.shape[0], self.sums.device)
        return replace(
            self,
            sums=self.sums[index],
            normaliser=self.normaliser[index],
            recent=self.recent.reorder(index),
            padding=reorder_padding(self.padding, index, self.folded),
        )

    def crop(self, length: int) -> "KernelState":
        if not isinstance(length, int) or not self.folded <= length <= self.length:
            raise ValueError(
                f"length: expected {self.folded} to {self.length}, got {length}; "
                f"the first {self.folded} tokens are in the sums and cannot be taken out again"
            )
        return replace(self, recent=self.recent.crop(length - self.folded))

    def recordable(self) -> "KernelState":
        if not frozen(self.sums):
            return self
        return replace(self, sums=self.sums.clone(), normaliser=self.normaliser.clone())

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        plan, recent = self.recent.saved()
        tensors = {"sums": self.sums, "normaliser": self.normaliser}
        if self.padding is not None:
            tensors["folded"] = self.padding.valid(self.folded).clone()
        tensors |= {f"recent.{name}": tensor for name, tensor in recent.items()}
        return {"kind": "sums", "folded": self.folded, "recent": plan}, tensors

    def restored(self, stored: Stored) -> "KernelState":
        folded = stored.plan["folded"]
        if type(folded) is not int or folded < 0 or not 0 <= stored.length - folded <= self.recent.capacity:
            raise ValueError(f"{folded!r} summed tokens of {stored.length}")
        tensors = {
            name: stored.tensor(name, like.dtype, stored.batch, *like.shape[1:])
            for name, like in (("sums", self.sums), ("normaliser", self.normaliser))
        }
        recent = stored.part("recent", stored.plan["recent"])
        if recent.plan["forgotten"] != 0 or recent.plan["length"] != stored.length - folded:
            raise ValueError(f"{recent.plan['length']!r} of the newest {stored.length - folded} tokens")
        return replace(
            self,
            **tensors,
            folded=folded,
            recent=self.recent.filled(recent, stored.length - folded, self.recent.capacity),
            padding=stored.padding("folded", folded),
        )

    def history(self) -> tuple[Tensor, Tensor, Padding | None] | None:
        return None if self.folded else self.recent.history()
