"""States: what a mechanism keeps of earlier tokens, so that the next token costs one step. A KV cache is one, a
recurrent state another.

A state is a value. Extending it gives a new state and leaves the old one as it was, so a prompt's state can be forked,
kept and used again. Only its mechanism knows what a state consists of; all other code uses what `State` lists here.
Mechanisms that attend to every key again keep keys and values (key_values.py), linear attention keeps sums
(kernel_state.py). A state of your own is a subclass of `FixedState` (fixed_state.py), in the file of its mechanism.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from regard.core.masks import Padding, Window


@dataclass(frozen=True)
class Sizes:
    """The sizes of a state: batch, key/value heads, head dimensions; and its dtype and device. A mechanism's
    `empty_state` gets them.

    >>> import regard as rg, torch
    >>> sizes = rg.Sizes(
    ...     batch=2, num_kv_heads=4, qk_length=8, value_length=16, dtype=torch.bfloat16, device="cpu"
    ... )
    >>> sums = sizes.zeros(sizes.qk_length, sizes.value_length)
    >>> tuple(sums.shape), sums.dtype
    ((2, 4, 8, 16), torch.float32)
    """

    batch: int
    num_kv_heads: int
    qk_length: int
    value_length: int
    dtype: torch.dtype
    device: torch.device | str
    storage: torch.dtype | None = None
    """The dtype in which a KV cache keeps keys and values, if it is another."""

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros (B, G, …) on the state's device, in float32 or better by default."""
        kind = dtype or torch.promote_types(self.dtype, torch.float32)
        return torch.zeros(self.batch, self.num_kv_heads, *shape, dtype=kind, device=self.device)


@runtime_checkable
class Stored(Protocol):
    """A saved state in a file. No size in the file is trusted: tensors have the size of their data."""

    @property
    def plan(self) -> dict[str, Any]:
        """What the state's `saved` returned besides tensors."""

    @property
    def batch(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def window(self) -> Window | None:
        """The sliding window of the state's layer, if it has one."""

    def tensor(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor; ValueError unless it has this dtype and shape."""

    def padding(self, name: str, count: int) -> Padding | None:
        """Which of `count` tokens are real, as saved by `Padding.valid`; None if nothing was saved, that is, if all
        are."""

    def part(self, name: str, plan: dict[str, Any]) -> "Stored":
        """A state within the state."""

    def holds(self, name: str) -> bool:
        """Whether there is a tensor of this name."""


class State:
    """The interface of a state. A new kind of state implements the methods that raise here; the others have
    defaults. `FixedState` implements all of them for tensors whose size does not grow.

    >>> import regard as rg
    >>> state = rg.Softmax().start(batch=3, num_kv_heads=2, qk_length=8, value_length=8, capacity=16)
    >>> isinstance(state, rg.State), state.length, state.nbytes, state.reorder([2, 0]).batch
    (True, 0, 6144, 2)
    """

    keeps_keys: ClassVar[bool] = False
    """Whether it is a KV cache: any mask can hide its keys again, and they can be stored in int8."""
    length: Any
    """The number of tokens so far, including padding."""
    mechanism: Any
    """The mechanism it belongs to: no other can extend it. None for keys and values, which any mechanism can use."""

    forgotten: int = 0
    """How many of the first tokens were dropped because they left the sliding window."""
    dropped: int = 0
    """How many tokens came before position 0 of this state: `windowed` dropped them and counts from there again."""

    @property
    def batch(self) -> int:
        """The number of sequences."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """The bytes it occupies, including room for more tokens."""
        raise NotImplementedError

    @property
    def earliest(self) -> int:
        """The shortest length it can be cropped to."""
        return int(self.length)

    @property
    def layout(self) -> Any:
        """The key under which a token's step is kept for states like this (repeats.py); None if it must not be kept."""
        return None

    def extended(
        self, mechanism: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The output of new tokens and the longer state, as a layer asks for them: its mechanism's `extend`."""
        extended: tuple[Tensor, Any] = mechanism.extend(q, k, v, self, mask, bias=bias)
        return extended

    def check(self, k: Tensor, v: Tensor) -> None:
        """Raise ValueError unless keys and values fit its batch, heads, head dimensions, dtype and device."""
        raise NotImplementedError

    def reorder(self, index: Tensor) -> "State":
        """The state of other batch rows: row i becomes row `index[i]`. Rows may repeat (beam search)."""
        raise NotImplementedError

    def crop(self, length: int) -> "State":
        """The state as it was at an earlier length, `earliest` or more."""
        raise NotImplementedError

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is needed to restore it: plain values, and tensors by name."""
        raise NotImplementedError

    def restored(self, stored: Stored) -> "State":
        """The saved state, restored from an empty state of the same kind (`self`)."""
        raise NotImplementedError

    def recordable(self) -> "State":
        """The state in a form that autograd can record: tensors made in inference mode are copied."""
        return self

    def with_room(self, more: int, most: int) -> "State":
        """The state with room for `more` tokens, but for `most` at most; itself if it needs no room."""
        return self

    def windowed(self, window: Window, new: int) -> "State":
        """The state with room for `new` tokens, without tokens that none of them sees in a sliding window."""
        return self

    def history(self) -> tuple[Tensor, Tensor, Padding | None] | None:
        """All keys and values so far, and which are real; None if the state does not keep them."""
        return None


def frozen(tensor: Tensor) -> bool:
    """Whether a tensor was made in inference mode, so that autograd cannot record what is computed with it."""
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
    try:
        index = torch.as_tensor(index, device=device)
    except (RuntimeError, TypeError, ValueError):
        kind = type(index).__name__
        raise ValueError(f"index: expected whole numbers of shape (B,), got {kind} {index!r:.60}") from None
    index = index if index.numel() else index.long()  # an empty list has no integer dtype
    if index.ndim != 1 or index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ValueError(f"index: expected whole numbers of shape (B,), got {index.dtype} {tuple(index.shape)}")
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < rows):
        raise ValueError(f"index: expected batch rows 0 to {rows - 1}, got {index.tolist()}")
    return index
