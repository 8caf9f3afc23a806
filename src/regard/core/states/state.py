"""States: what a mechanism keeps of the tokens it has met, so that the next one costs one step.

A state is a value. Extending it gives a new state and leaves the old one as it was, so a prompt's state can be forked,
kept and used again. What a state is made of is its mechanism's affair; everybody else asks what `State` lists here and
nothing more. Mechanisms that look at every key again keep keys and values (key_values.py), kernels keep sums
(kernel_state.py). A state of your own is a subclass of `FixedState` (fixed_state.py), in the file of its mechanism.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.core.masks import Padding


@dataclass(frozen=True)
class Sizes:
    """What a state is made for: how many sequences and key/value heads, of what lengths, in which dtype, and where."""

    batch: int
    num_kv_heads: int
    qk_length: int
    value_length: int
    dtype: torch.dtype
    device: torch.device | str

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros (B, G, …) on the state's device, in float32 or better unless told otherwise."""
        kind = dtype or torch.promote_types(self.dtype, torch.float32)
        return torch.zeros(self.batch, self.num_kv_heads, *shape, dtype=kind, device=self.device)


@runtime_checkable
class Stored(Protocol):
    """A saved state as its file holds it: nothing is made by a number in the file, tensors are as large as they are."""

    @property
    def plan(self) -> dict[str, Any]:
        """What the state's `saved` gave besides tensors."""

    @property
    def batch(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def window(self) -> int | None:
        """How many tokens the state's layer sees, if it has a window."""

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor, which must have this dtype and shape."""

    def padding(self, name: str, count: int) -> Padding | None:
        """Which of `count` tokens are real, as saved by `Padding.valid`; None if nothing was saved: all are."""

    def part(self, name: str, plan: dict[str, Any]) -> "Stored":
        """A state within the state."""

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of the name."""


class State:
    """What everybody may ask of a state. A new one answers what raises here; the rest has answers."""

    length: Any
    """Tokens met so far, those of padding included."""
    mechanism: Any
    """Whose state it is: no other mechanism can go on with it. None for keys and values, which are alike for all."""

    forgotten: int = 0
    """How many of the first tokens a window has left behind for good."""

    @property
    def batch(self) -> int:
        """How many sequences it is of."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes it really holds, its room to spare included."""
        raise NotImplementedError

    @property
    def earliest(self) -> int:
        """The shortest length it can be cropped to."""
        return int(self.length)

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError for keys and values that are not of its batch, heads, lengths, dtype and device."""
        raise NotImplementedError

    def reorder(self, index: Tensor) -> "State":
        """The state of other batch rows: row i becomes row `index[i]`. Rows may repeat (beam search)."""
        raise NotImplementedError

    def crop(self, length: int) -> "State":
        """The state as it was at an earlier length, `earliest` or more."""
        raise NotImplementedError

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What it takes to make it again: plain values, and tensors by name."""
        raise NotImplementedError

    def restored(self, stored: Stored) -> "State":
        """The state that was saved, given an empty one like it."""
        raise NotImplementedError

    def recordable(self) -> "State":
        """The state as autograd can record it: what was made in inference mode is copied outside of it."""
        return self

    def with_room(self, more: int, most: int) -> "State":
        """The state with room for `more` tokens, and for `most` at the most; itself if it needs no room."""
        return self

    def windowed(self, before: int, new: int) -> "State":
        """The state with room for `new` tokens, without those that none of them sees, `before` back at the most."""
        return self

    def history(self) -> tuple[Tensor, Tensor, Padding | None] | None:
        """Keys and values met so far, and which are real; None where they are not kept."""
        return None


def frozen(tensor: Tensor) -> bool:
    """Whether autograd cannot record what is computed with a tensor, since inference mode made it."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return tensor.is_inference()


def check_tokens(
    name: str, tensor: Tensor, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ValueError unless a tensor is (batch, heads, any number of tokens, length), of this dtype and device."""
    batch, heads, count, length = tensor.shape
    if (batch, heads, length) != sizes or tensor.dtype != dtype or tensor.device != device:
        raise ValueError(
            f"{name}: expected the state's (B, G, T, ·) = {(*sizes[:2], count, sizes[2])}, {dtype}, {device}, "
            f"got {tuple(tensor.shape)}, {tensor.dtype}, {tensor.device}"
        )


def row_index(index: Tensor, rows: int, device: torch.device) -> Tensor:
    """Batch rows as a tensor on a device, or ValueError."""
    index = torch.as_tensor(index, device=device)
    index = index if index.numel() else index.long()  # an empty list is of no kind
    if index.ndim != 1 or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ValueError(f"index: expected whole numbers of shape (B,), got {index.dtype} {tuple(index.shape)}")
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < rows):
        raise ValueError(f"index: expected batch rows 0 to {rows - 1}, got {index.tolist()}")
    return index
