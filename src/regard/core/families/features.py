"""Linear attention: the similarity is an inner product of features phi, so that keys can be summed before any query
comes.

    w_ts  = phi(q_t)·phi(k_s) / sum over visible s' of phi(q_t)·phi(k_s')
    out_t = phi(q_t)·(sum_s phi(k_s) v_s^T) / phi(q_t)·(sum_s phi(k_s))

The second line never forms a (T, S) matrix: time and memory are linear in the length, and the sums are the recurrent
state. A query whose similarities sum to 0 gets 0.

Katharopoulos et al. 2020, "Transformers are RNNs".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.core.calls.call import Call
from regard.core.calls.choice import Path
from regard.core.calls.repeats import Step
from regard.core.cost import COUNTED, Cost, Work, count_formula, key_value_bytes, score_cost
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, Window
from regard.core.masks.structure import padding_between, structure_of
from regard.core.paths import blocks, chunked, fused, fused_stream, reference, stream, sums_cost
from regard.core.paths.slots import Clock, Slot, SumSlot
from regard.core.states.kernel_state import KernelState
from regard.core.states.key_values import KeyValueState
from regard.core.states.state import Sizes, State
from regard.core.tensors import own_dtype
from regard.core.user_code import read_only, runs_user_code, undefined

MOST_FEATURES = 16384
"""With more features than this the sums would cost more than the keys and values they replace: the score form is
used."""

RECENT = 128
"""The newest tokens, kept as keys and values; when there are this many, the older half is folded into the sums."""


@dataclass(frozen=True, kw_only=True)
class FeatureMechanism(Mechanism):
    """A mechanism with a feature map phi. A subclass defines `features` and `feature_length`, and may define a shorter
    `similarity`.

    >>> import regard as rg, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Squared(rg.FeatureMechanism):
    ...     def features(self, x):
    ...         return x.relu().square()
    ...     def feature_length(self, qk_length):
    ...         return qk_length
    >>> q = k = v = torch.randn(1, 2, 300, 4)
    >>> rg.explain(q, k, v, Squared(), rg.causal).path
    'chunked'
    """

    short: ClassVar[bool] = False
    """Whether `similarity` has a cheaper formula than the product of features."""
    fused_form: ClassVar[str] = "given"
    """What a GPU kernel computes from queries and keys: "square" is d (q·k)² + b q·k + a from `coefficients`; "elu" is
    elu(x) + 1; for "given" it gets their features."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        stated = {"features", "similarity"} & vars(cls).keys()
        shipped = [parent for parent in cls.__mro__[1:] if parent.__module__.startswith("regard.core.mechanisms.")]
        if stated and shipped and not cls.__module__.startswith("regard."):
            raise TypeError(
                f"{cls.__name__}: expected to inherit from rg.FeatureMechanism (or rg.Mechanism, for a similarity "
                f"alone), since {shipped[0].__name__} has faster forms of its own formula, got another {stated.pop()}"
            )

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        """phi(x), the same for queries and keys."""
        raise undefined(self, "features(x)")

    def feature_length(self, qk_length: int) -> int:
        """C, the number of features of phi."""
        raise undefined(self, "feature_length(qk_length)")

    def summed_features(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """phi(x) as the running sums use it: `features`, or a layout with the same inner products that is faster to
        compute."""
        return self._features(x)

    def summed_length(self, qk_length: int) -> int:
        """The number of features in the running sums."""
        return self.feature_length(qk_length)

    def normaliser_length(self, qk_length: int) -> int:
        """The size of the running normaliser."""
        return self.summed_length(qk_length)

    def normaliser(self, k: Tensor, phi: Tensor, real: Tensor | None) -> Tensor:
        """What keys add to the normaliser: the sum of phi(k) over the real ones, (…, S, K) -> (…, C)."""
        return (phi if real is None else phi.masked_fill(~real[..., None], 0)).sum(-2)

    def denominator(self, q: Tensor, phi: Tensor, normaliser: Tensor) -> Tensor:
        """phi(q)·normaliser, (…, T, K) -> (…, T)."""
        return (phi @ normaliser.unsqueeze(-1)).squeeze(-1)

    def feature_flops(self, qk_length: int) -> int:
        """FLOPs of the contractions inside phi per token, counted as it runs."""
        return count_formula(self, self._features, (1, COUNTED, qk_length)) // COUNTED

    def normaliser_flops(self, qk_length: int) -> tuple[int, int]:
        """FLOPs of the contractions in `denominator` per query, and in `normaliser` per key."""
        return 2 * self.summed_length(qk_length), 0

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        return self._features(q) @ self._features(k).transpose(-1, -2)

    def formula_dtype(self, precision: torch.dtype) -> torch.dtype:
        return (
            precision  # only phi computes in its tensors' dtype: products of features are too large for half precision
        )

    def _features(self, x: Tensor) -> Tensor:
        if not runs_user_code(self):  # no tensors, so no dtype but that of x
            return self.features(x)
        phi = read_only(self, "features", self.features, x.to(own_dtype(self) or x.dtype))
        if not self.shipped:
            expected = (*x.shape[:-1], self.feature_length(x.shape[-1]))
            if not isinstance(phi, Tensor) or phi.shape != expected:
                shape = tuple(phi.shape) if isinstance(phi, Tensor) else type(phi).__name__
                raise ValueError(
                    f"features: expected (…, C) = {expected} from {tuple(x.shape)}, since feature_length("
                    f"{x.shape[-1]}) is {expected[-1]}, got {shape} from {type(self).__name__}"
                )
        return phi.to(x.dtype)

    def linear(self, qk_length: int) -> bool:
        """Whether the sums are small enough to replace keys and values."""
        return self.summed_length(qk_length) <= MOST_FEATURES

    def paths(self) -> tuple[Path, ...]:
        return (fused.PATH, chunked.PATH, blocks.PATH, reference.PATH)

    def notes(self, call: Call) -> tuple[str, ...]:
        why = chunked.cannot(call)
        if why is not None:
            return (f"quadratic in the length: {why}",)
        if not call.q.is_cuda:
            return ()
        holes = bool(call.structure.paddings) and call.structure.rows is None
        why = fused_stream.cannot(self, call.q, call.k, call.v, None, call.structure.causal, holes)
        how = "by the kernels of `fused`" if why is None else f"by PyTorch's operators: {why}"
        return (f"a state is extended by such tokens {how}",)

    def state_type(self, qk_length: int) -> type[Any]:
        return KernelState if self.linear(qk_length) else KeyValueState

    def empty_state(self, sizes: Sizes, capacity: int) -> State:
        if not self.linear(sizes.qk_length):
            return super().empty_state(sizes, capacity)
        return KernelState(
            mechanism=self,
            sums=sizes.zeros(self.summed_length(sizes.qk_length), sizes.value_length),
            normaliser=sizes.zeros(self.normaliser_length(sizes.qk_length)),
            folded=0,
            recent=KeyValueState.empty(sizes, RECENT),
        )

    def advance(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        rule: Mask | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Any]:
        if not self.linear(k.shape[3]):
            return super().advance(q, k, v, state, rule, bias)
        new, total = k.shape[2], state.length + k.shape[2]
        state.check_folded(padding_between(rule, 0, state.folded, total))
        if new == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum(), state
        hidden = padding_between(rule, state.folded, total, total)
        return stream.stream(self, q, k, v, state, structure_of(rule, new, total).causal, hidden, RECENT)

    def step(self, q: Tensor, k: Tensor, v: Tensor, state: Any, rule: Mask | None) -> Step | None:
        if not self.linear(k.shape[3]):
            return super().step(q, k, v, state, rule)
        return stream.token_step(self, q, k, v, state, RECENT)

    def slot(self, qk_length: int, state: Any, clock: Callable[[int], Clock], window: Window | None) -> Slot:
        if not self.linear(qk_length):
            return super().slot(qk_length, state, clock, window)
        return SumSlot(state, clock(state.length))

    def cost(self, work: Work) -> Cost:
        state_bytes = key_value_bytes(work)
        if self.linear(work.qk_length):
            state_bytes = sums_cost.sums_bytes(self, work) + key_value_bytes(
                replace(work, key_length=RECENT, mask=None)
            )
        why = chunked.quadratic(self, work.qk_length, structure_of(work.rule, work.query_length, work.key_length))
        if why is None:
            return sums_cost.cost(self, work, RECENT, state_bytes)
        plain = score_cost(work, self.precision(work.dtype))
        tokens = work.batch * (work.num_heads * work.query_length + work.num_kv_heads * work.key_length)
        flops = 2 * work.pairs * (self.score_length(work.qk_length) + work.value_length)
        flops += tokens * self.feature_flops(work.qk_length)
        return replace(plain, flops=flops, state_bytes=state_bytes, note=f"quadratic in the length: {why}")

    def score_length(self, qk_length: int) -> int:
        """The length of the inner product that `similarity` computes."""
        return qk_length if self.short else self.feature_length(qk_length)
