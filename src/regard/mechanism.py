"""What a mechanism is.

The legend, for the whole project:

    B batch · T query length · S key length · H query heads · G key/value heads · K qk_length · V value_length
    E embedding_dim · C features of phi · N chunks · L layers

Tensors are (B, H, T, K) as in SDPA. Query head h reads key/value head h // (H // G).

A mechanism of your own is one class with one method, `similarity(q, k)`, how alike each query and each key are. The
weights are the similarities of the visible keys over their sum. Everything else (the output, the stream, the exact
weights, the cost, the laws of `regard.check`) follows from it. See examples/your_own_mechanism.py.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from regard.call import Call, Path, choose, cleaned, in_own_dtype, nothing, poisoned, taint
from regard.cost import Cost, Work, accumulator, score_cost
from regard.mask import Mask, MaskFunction, as_mask
from regard.paths import blocks, reference
from regard.state import KernelState, KeyValueState
from regard.structure import EVERYTHING, Structure, padding_between, structure

FOREVER = 1 << 62
"""A length no mask's limit reaches."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """An attention mechanism: a frozen value that holds its own fields and no others.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Sigmoid(rg.Mechanism):
    ...     def similarity(self, q, k):
    ...         return torch.sigmoid(q @ k.transpose(-1, -2))
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> rg.attend(q, k, v, Sigmoid(), mask=rg.causal).shape
    torch.Size([1, 2, 5, 4])
    """

    by_pairs: ClassVar[bool] = True
    """Whether the weights are between queries and keys, (B, H, T, S)."""

    @property
    def takes_bias(self) -> bool:
        """Whether the scores are additive, so that a bias has a meaning."""
        return False

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        """How alike each query and key are: at least 0, in whatever scale. The one method a new mechanism writes."""
        raise NotImplementedError(f"{type(self).__name__} states no similarity(q, k)")

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        """The exact weights: similarity over its sum among the visible keys, 0 where there is none to sum."""
        if visible is not None:
            # A query that sees nothing must not reach the keys' gradients either.
            q = q.masked_fill(~visible.any(-1, keepdim=True), 0)
        similar = self.grouped(self.similarity, q, k)
        if visible is not None:
            similar = similar.masked_fill(~visible, 0)
        total = similar.sum(-1, keepdim=True)
        return similar / total.masked_fill(total == 0, 1)

    def mix(self, weights: Float[Tensor, "B H T S"], v: Float[Tensor, "B G S V"]) -> Float[Tensor, "B H T V"]:
        """The output from the weights: each query's mean of the values."""
        tiled = rearrange(weights, "b (g r) t s -> b g (r t) s", g=v.shape[1])
        out = tiled @ v.to(weights.dtype)
        return rearrange(out, "b g (r t) v -> b (g r) t v", r=weights.shape[1] // v.shape[1])

    def grouped(self, compare: Any, q: Tensor, k: Tensor) -> Tensor:
        """`compare` for H query heads over G key heads, the queries of a group as rows of one comparison."""
        groups, kind = k.shape[1], self.precision(q.dtype)
        tiled = rearrange(q, "b (g r) t k -> b g (r t) k", g=groups)
        found = compare(tiled.to(kind), k.to(kind))
        return rearrange(found, "b g (r t) s -> b (g r) t s", r=q.shape[1] // groups)

    def precision(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype the weights are computed in."""
        return accumulator(dtype)

    def refuses(self, call: Call) -> str | None:
        """Why this mechanism has no meaning for a call, as an error message; None if it has one."""
        return None if call.bias is None else f"bias: expected none, {self!r} has no additive scores, got one"

    def streams(self, qk_length: int, known: Structure = EVERYTHING) -> str | None:
        """Why there is no token-by-token form under a mask of this structure, as an error message; None if there is."""
        return None

    def paths(self) -> tuple[Path, ...]:
        """The ways to compute this mechanism, best first; the last one serves every call."""
        return (blocks.PATH, reference.PATH)

    def notes(self, call: Call) -> tuple[str, ...]:
        """What a person should know about this call besides the path."""
        return ()

    def sdpa_scale(self, qk_length: int) -> float | None:
        """The scale with which PyTorch's SDPA computes this mechanism; None if it does not."""
        return None

    def start(
        self,
        *,
        batch: int,
        num_kv_heads: int,
        qk_length: int,
        value_length: int,
        capacity: int = 4096,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        storage: torch.dtype | None = None,
    ) -> Any:
        """An empty state. `capacity` limits states that keep every key; a kernel's sums have room for any length.

        `storage=torch.int8` keeps keys and values in 8 bits, with a scale for each token and head, and takes no
        gradients. Softmax attention is then off by 0.8 % (normal keys and values of length 64), and SmolLM2's logits by
        0.07 on average and 1.6 at most, where their spread is 5.3: the same likeliest token at 97.3 % of 512 places.

        >>> import regard as rg
        >>> sizes = {"batch": 1, "num_kv_heads": 1, "qk_length": 8, "value_length": 8}
        >>> rg.Softmax().start(**sizes, capacity=16).nbytes, rg.Elu().start(**sizes).nbytes
        (1024, 8480)
        """
        check_start(self, batch, num_kv_heads, qk_length, value_length, capacity, dtype)
        if storage not in (None, torch.int8):
            raise ValueError(f"storage: expected torch.int8 or None, got {storage!r}")
        none = KeyValueState.empty(batch, num_kv_heads, qk_length, value_length, 0, dtype, device, storage)
        return self.empty_state(none, capacity)

    def empty_state(self, tokens: KeyValueState, capacity: int) -> Any:
        """The state to start from, given one with no tokens and no room for any."""
        return tokens.resized(capacity)

    def extend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        v: Float[Tensor, "B G T V"],
        state: Any,
        mask: Mask | MaskFunction | Tensor | None = None,
        *,
        bias: Float[Tensor, "..."] | None = None,
    ) -> tuple[Float[Tensor, "B H T V"], Any]:
        """Append T tokens and attend from them to the whole history. Gives the output and the longer state.

        The mask speaks of absolute positions over the whole history, S = state.length + T. Padding is remembered: a key
        hidden by `padding` when it came stays hidden.

        >>> import regard as rg, torch
        >>> q = k = v = torch.randn(1, 2, 6, 4)
        >>> m = rg.Softmax()
        >>> state = m.start(batch=1, num_kv_heads=2, qk_length=4, value_length=4, capacity=8)
        >>> first, state = m.extend(q[:, :, :5], k[:, :, :5], v[:, :, :5], state, mask=rg.causal)
        >>> last, state = m.extend(q[:, :, 5:], k[:, :, 5:], v[:, :, 5:], state, mask=rg.causal)
        >>> torch.allclose(torch.cat([first, last], 2), rg.attend(q, k, v, m, mask=rg.causal), atol=1e-6)
        True
        """
        rule = as_mask(mask)
        if not isinstance(state, KeyValueState | KernelState) or state.mechanism not in (None, self):
            owner = getattr(state, "mechanism", None)
            given = type(state).__name__ if owner is None else f"a {type(state).__name__} of {owner!r}"
            raise ValueError(f"state: expected one from {self!r}.start(…), got {given}")
        check_extend(self, q, k, v, state, rule, bias)
        tainted = taint(k, v)
        with in_own_dtype(q):
            return self.advance(q, cleaned(k, tainted), cleaned(v, tainted), state, rule, bias, tainted)

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        rule: Mask | None,
        bias: Tensor | None,
        tainted: Tensor | None,
    ) -> tuple[Tensor, Any]:
        """`extend`, once everything is checked and new keys and values are free of NaN."""
        total = state.length + k.shape[2]
        fresh = padding_between(rule, state.length, total, total)
        longer = state.append(k, v, fresh, tainted, recorded=q.requires_grad)
        if longer.padding is not None:
            rule = longer.padding if rule is None else rule & longer.padding
        call = Call(self, q, longer.keys, longer.values, rule, bias)
        # The history was cleaned when it came, so there is nothing left to look for.
        out = nothing(call, call.queries) if call.empty else choose(call).run(call)
        return poisoned(out, rule, longer.tainted), longer

    def cost(self, work: Work) -> Cost:
        """What this mechanism costs on some work; see `regard.cost`."""
        return score_cost(work, self.precision(work.dtype))


def check_start(
    mechanism: Mechanism,
    batch: int,
    num_kv_heads: int,
    qk_length: int,
    value_length: int,
    capacity: int,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError for a state that cannot be."""
    sizes = {"batch": batch, "num_kv_heads": num_kv_heads, "qk_length": qk_length}
    for name, size in {**sizes, "value_length": value_length, "capacity": capacity}.items():
        least = 0 if name in ("batch", "capacity") else 1
        if not isinstance(size, int) or size < least:
            raise ValueError(f"{name}: expected a whole number of at least {least}, got {size!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating-point dtype, got {dtype!r}")
    if (reason := mechanism.streams(qk_length)) is not None:
        raise ValueError(reason)


def check_extend(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: KeyValueState | KernelState,
    mask: Mask | None,
    bias: Tensor | None,
) -> None:
    """Raise ValueError for tokens that do not belong to a state, or a mask under which it cannot go on."""
    Call(mechanism, q, k, v).check()
    tokens = state if isinstance(state, KeyValueState) else state.recent
    dtype = tokens.buffer.dtype
    for name, given, held in (("k", k, tokens.buffer.keys), ("v", v, tokens.buffer.values)):
        expected = (held.shape[0], held.shape[1], given.shape[2], held.shape[3])
        if given.shape != expected or given.dtype != dtype or given.device != held.device:
            raise ValueError(
                f"{name}: expected the state's (B, G, T, ·) = {expected}, {dtype}, {held.device}, "
                f"got {tuple(given.shape)}, {given.dtype}, {given.device}"
            )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q: expected as many new queries as new keys, {k.shape[2]}, got {q.shape[2]}")
    total = state.length + k.shape[2]
    if mask is not None:
        mask.fits(q.shape[0], q.shape[1], q.shape[2], total)
    # A window that does not bind yet will: better refused at the first token than in the middle.
    if (reason := mechanism.streams(k.shape[3], structure(mask, FOREVER, FOREVER))) is not None:
        raise ValueError(reason)
    if bias is not None:
        keys, values = (t.new_empty(1).expand(*t.shape[:2], total, t.shape[3]) for t in (k, v))
        Call(mechanism, q, keys, values, None, bias).check()
