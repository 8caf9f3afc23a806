"""Linear attention with a matrix-valued recurrent state: every token changes S, a sum over keys and values, and queries
read it.

    out_t = scale · q_t S_t,       scale = 1 / sqrt(qk_length)

A member defines how a token changes S: `walk` does it for a sequence, and `table` gives the resulting weights. S is
linear in the values, so exact weights exist; they are not normalised and can have any sign. The formula depends on the
order of tokens, so members are causal by definition, with or without a mask. A key that padding hides adds nothing.
Other masks hide keys from some queries only, or drop them again, which S cannot do: they are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.calls.call import Call, in_own_dtype
from regard.core.calls.choice import Path
from regard.core.cost import Cost, Work, accumulator
from regard.core.eager import symbolic
from regard.core.families.mechanism import UnnormalisedMechanism
from regard.core.masks import Mask
from regard.core.masks.guard import bad_keys, cleaned
from regard.core.masks.structure import reached, structure_of
from regard.core.paths import reference
from regard.core.paths.exact import choose_scores
from regard.core.states.fixed_state import FixedState
from regard.core.states.state import Sizes, State
from regard.core.user_code import undefined

CHUNK = 64
"""Tokens per chunk, after which the sums are updated: a common head dimension."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentState(FixedState):
    """The sums S (B, G, K, V), in float32 or better: its size does not depend on the length."""

    sums: Tensor


@dataclass(frozen=True, kw_only=True)
class RecurrentMechanism(UnnormalisedMechanism):
    """A mechanism with a matrix as its state. A subclass defines `table`, `walk` and their cost."""

    ordered: ClassVar[bool] = True
    slotted: ClassVar[bool] = False
    excuses: ClassVar[Mapping[str, str]] = {
        **UnnormalisedMechanism.excuses,
        "permuted": "the weight of a key depends on the tokens after it",
    }

    def table(
        self, q: Tensor, k: Tensor, places: Tensor, real: Tensor | None, groups: list[int] | None = None
    ) -> Tensor:
        """The plain formula: the weights (B, H, T, S) of queries at the positions `places` among the keys.

        `real` (B, 1, S, 1) is False for keys that padding hides; `groups` is the key head of each query head, if heads
        are chosen.
        """
        raise undefined(self, "table(q, k, places, real, groups)")

    def walk(
        self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, sums: Tensor | None, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The output of the last tokens' queries, given the sums before all tokens; and, if `keep`, the sums after
        them. Hidden keys are 0."""
        raise undefined(self, "walk(q, k, v, real, sums, keep)")

    def walk_flops(self, work: Work, queries: int, keys: int, history: bool, keep: bool) -> int:
        """FLOPs of `walk` for each key head."""
        raise undefined(self, "walk_flops(work, queries, keys, history, keep)")

    def walk_size(self, work: Work, tokens: int) -> int:
        """How many numbers `walk` keeps in memory at once, for each key head."""
        raise undefined(self, "walk_size(work, tokens)")

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T S"]:
        # The last query is at the last key, so it sees every key that padding does not hide.
        real = None if visible is None else visible[..., -1, :, None]
        return self.table(q, k, torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device), real)

    def choose_weights(self, call: Call, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        bad = bad_keys(call.k, call.k)
        k, q = cleaned(call.k, bad), choose_scores(call.q, rows, heads)
        size = (*q.shape[:3], call.keys)
        if 0 in size:
            return q.new_zeros(size) + q[..., :0].sum() + k[..., :0].sum()
        groups = None if heads is None else [head // (call.heads // call.groups) for head in heads]
        places = torch.arange(call.queries, device=q.device) + call.keys - call.queries
        with in_own_dtype(q):
            weights = self.table(q, k, places if rows is None else places[rows], _real(call), groups).to(q.dtype)
        if bad is None:
            return weights
        spoiled = choose_scores(reached(call.mask, bad, call.heads, call.queries)[..., None], rows, heads)
        return weights.masked_fill(spoiled, torch.nan)

    def refuses(self, call: Call) -> str | None:
        return super().refuses(call) or self.streams(call.qk_length, call.structure)

    def paths(self) -> tuple[Path, ...]:
        return (RECURRENT, reference.PATH)

    def state_type(self, qk_length: int) -> type[Any]:
        return RecurrentState

    def empty_state(self, sizes: Sizes, capacity: int) -> State:
        return RecurrentState(mechanism=self, sizes=sizes, sums=sizes.zeros(sizes.qk_length, sizes.value_length))

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: RecurrentState,
        rule: Mask | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Any]:
        new = state.receive(q, k, v, rule)
        if k.shape[2] == 0 or state.batch == 0:
            return new.attended(q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum())
        out, sums = self.walk(q, new.k, new.v, new.real, new.state.sums if state.length else None, keep=True)
        assert sums is not None
        return new.attended(out, sums=sums)

    def cost(self, work: Work) -> Cost:
        structure = structure_of(work.rule, work.query_length, work.key_length)
        if (reason := self.streams(work.qk_length, structure)) is not None:
            raise ValueError(reason)
        heads, itemsize = work.batch * work.num_kv_heads, accumulator(work.dtype).itemsize
        state_bytes = heads * work.qk_length * work.value_length * itemsize
        # Fewer queries than keys are a decode step, unless the keys are not cached.
        streamed = work.cached and work.query_length < work.key_length
        keys = work.query_length if streamed else work.key_length
        queries = min(work.query_length, keys)
        moved = work.io_bytes
        if streamed:
            moved = replace(work, key_length=keys, mask=None).io_bytes + state_bytes
        return Cost(
            flops=heads * self.walk_flops(work, queries, keys, streamed, streamed) if queries else 0,
            bytes=moved,
            state_bytes=state_bytes,
            # What the walk needs, and a copy of keys and values without NaN.
            activation_bytes=heads * self.walk_size(work, queries) * itemsize
            + heads * keys * (work.qk_length + work.value_length) * work.itemsize,
            form="linear",
        )


def _real(call: Call) -> Tensor | None:
    """Which keys are real, (B, 1, S, 1)."""
    valid = call.structure.valid(call.keys, call.q.device)
    return None if valid is None else valid[:, None, :, None]


def _cannot(call: Call) -> str | None:
    if symbolic(call.queries, call.keys):
        return "a dynamic length in a trace cannot be cut into chunks"
    return None


def _run(call: Call) -> Tensor:
    """a recurrent state, in chunks of 64: time and memory linear in the length."""
    mechanism: Any = call.mechanism
    q, k, real = call.q, call.k, _real(call)
    if real is not None:
        k = k.masked_fill(~real, 0)
        sees = reached(call.mask, torch.ones_like(k[..., 0], dtype=torch.bool), call.heads, call.queries)
        q = q.masked_fill(~sees[..., None], 0)  # a query that sees no key must not contribute to the keys' gradients
    # Plain integers: torch.compile makes a graph for each length. With a symbolic length, tracing the blocks takes
    # minutes.
    blind = max(0, index(call.queries) - index(call.keys))  # queries before the first key
    out, _ = mechanism.walk(q[:, :, blind:], k, call.v, real, None, keep=False)
    return F.pad(out, (0, 0, blind, 0)) if blind else out


RECURRENT = Path("recurrent", _cannot, _run)


def seen_keys(places: Tensor, keys: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Which keys are at or before queries at the positions `places`, (T, S); and which of these padding does not
    hide."""
    before = places[:, None] >= torch.arange(keys, device=places.device)
    return before, before if real is None else before & real.transpose(-1, -2)


def chunk_size(tokens: int) -> int:
    """Tokens per chunk: a power of two, so that its blocks can be joined in pairs."""
    return min(CHUNK, 1 << (tokens - 1).bit_length())


def filled(x: Tensor, more: int) -> Tensor:
    """Tokens (…, T, D) with `more` zeros after them."""
    return F.pad(x, (0, 0, 0, more)) if more else x
