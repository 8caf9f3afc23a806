"""Kernel attention: similarity as an inner product of features, so that the keys can be summed before any query comes.

    w_ts = phi(q_t)·phi(k_s) / sum over visible s' of phi(q_t)·phi(k_s')
    out_t = phi(q_t)·(sum_s phi(k_s) v_s^T) / phi(q_t)·(sum_s phi(k_s))

The second line never forms a (T, S) matrix: time and memory are linear in the length, and the sums are the whole state
of the stream. A query whose similarities sum to 0 gets 0.

Katharopoulos et al. 2020, "Transformers are RNNs".
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from regard.call import Call, Path
from regard.cost import COUNTED, Cost, Work, accumulator, count_flops, key_value_bytes, score_cost
from regard.mask import Mask
from regard.mechanism import Mechanism, made_on, own_dtype, probe
from regard.paths import blocks, chunked, fused, reference, stream, sums_cost
from regard.state import KernelState, KeyValueState
from regard.structure import EVERYTHING, Structure, padding_between, structure

MOST_FEATURES = 16384
"""Features beyond which sums cost more than any history they would replace, and the score form is used instead."""

RECENT = 128
"""Tokens a stream keeps as they are; when they are full, the older half is folded into the sums."""


@dataclass(frozen=True, kw_only=True)
class FeatureMechanism(Mechanism):
    """A mechanism with phi. A subclass states `features` and `feature_length`, and any shorter form of `similarity`."""

    short: ClassVar[bool] = False
    """Whether `similarity` has a form shorter than the product of features."""
    fused_form: ClassVar[str] = "given"
    """What a GPU kernel makes of queries and keys: "square", d (q·k)² + b q·k + a from `coefficients`; "elu"; or
    nothing, "given" their features."""

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        """phi(x), for queries and keys alike."""
        raise NotImplementedError(f"{type(self).__name__} states no features(x)")

    def feature_length(self, qk_length: int) -> int:
        """C, how many features phi has."""
        raise NotImplementedError(f"{type(self).__name__} states no feature_length(qk_length)")

    def summed_features(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """phi(x) as the running sums use it: `features`, or a layout with the same product that computes faster."""
        return self._features(x)

    def summed_length(self, qk_length: int) -> int:
        """How many features the running sums hold for each value."""
        return self.feature_length(qk_length)

    def normaliser_length(self, qk_length: int) -> int:
        """How many numbers the running normaliser holds."""
        return self.summed_length(qk_length)

    def normaliser(self, k: Tensor, phi: Tensor, real: Tensor | None) -> Tensor:
        """What the real ones of some keys add to the normaliser: sum of phi(k), (…, S, K) -> (…, C)."""
        return (phi if real is None else phi.masked_fill(~real[..., None], 0)).sum(-2)

    def denominator(self, q: Tensor, phi: Tensor, normaliser: Tensor) -> Tensor:
        """phi(q)·normaliser, (…, T, K) -> (…, T)."""
        return (phi @ normaliser[..., None])[..., 0]

    def feature_flops(self, qk_length: int) -> int:
        """FLOPs of the contractions inside phi, per token: counted as it runs."""
        x = probe(self, (1, COUNTED, qk_length))
        with made_on(x.device):
            return count_flops(lambda: self._features(x)) // COUNTED

    def normaliser_flops(self, qk_length: int) -> tuple[int, int]:
        """FLOPs of the contractions in `denominator`, a query, and in `normaliser`, a key."""
        return 2 * self.summed_length(qk_length), 0

    def similarity(self, q: Float[Tensor, "*b T K"], k: Float[Tensor, "*b S K"]) -> Float[Tensor, "*b T S"]:
        return self._features(q) @ self._features(k).transpose(-1, -2)

    def formula_dtype(self, precision: torch.dtype) -> torch.dtype:
        return precision  # phi alone computes in its tensors' dtype: products of features are too large for half

    def _features(self, x: Tensor) -> Tensor:
        return self.features(x.to(own_dtype(self) or x.dtype)).to(x.dtype)

    def linear(self, qk_length: int) -> bool:
        """Whether the sums are small enough to be worth keeping."""
        return self.summed_length(qk_length) <= MOST_FEATURES

    def paths(self) -> tuple[Path, ...]:
        return (fused.PATH, chunked.PATH, blocks.PATH, reference.PATH)

    def notes(self, call: Call) -> tuple[str, ...]:
        why = chunked.cannot(call)
        return () if why is None else (f"quadratic in the length: {why}",)

    def streams(self, qk_length: int, known: Structure = EVERYTHING) -> str | None:
        if self.linear(qk_length) and (known.rest is not None or known.windowed):
            given = f"{known.rest!r}" if known.rest is not None else "a window"
            return (
                f"mask: expected causal, padding, both or none to stream {self!r}: its sums forget no key, got {given}"
            )
        return None

    def empty_state(self, tokens: KeyValueState, capacity: int) -> Any:
        keys, values = tokens.buffer.keys, tokens.buffer.values
        if not self.linear(keys.shape[3]):
            return tokens.resized(capacity)
        if tokens.buffer.scales is not None:
            raise ValueError(f"storage: expected None, {self!r} keeps sums, not keys and values, got torch.int8")
        kind, shape = accumulator(keys.dtype), keys.shape[:2]
        return KernelState(
            mechanism=self,
            sums=keys.new_zeros(*shape, self.summed_length(keys.shape[3]), values.shape[3], dtype=kind),
            normaliser=keys.new_zeros(*shape, self.normaliser_length(keys.shape[3]), dtype=kind),
            folded=0,
            recent=tokens.resized(RECENT),
        )

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
        if isinstance(state, KeyValueState):
            if self.linear(k.shape[3]):
                raise ValueError(
                    f"state: expected one from {self!r}.start(…), whose sums it needs, got a KeyValueState"
                )
            return super().advance(q, k, v, state, rule, bias, tainted)
        new, total = k.shape[2], state.length + k.shape[2]
        state.check_folded(padding_between(rule, 0, state.folded, total))
        if new == 0:
            return q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum(), state
        hidden = padding_between(rule, state.folded, total, total)
        return stream.stream(self, q, k, v, state, structure(rule, new, total).causal, hidden, tainted, RECENT)

    def cost(self, work: Work) -> Cost:
        state_bytes = key_value_bytes(work)
        if self.linear(work.qk_length):
            state_bytes = sums_cost.sums_bytes(self, work) + key_value_bytes(
                replace(work, key_length=RECENT, mask=None)
            )
        why = chunked.quadratic(self, work.qk_length, structure(work.rule, work.query_length, work.key_length))
        if why is None:
            return sums_cost.cost(self, work, RECENT, state_bytes)
        plain = score_cost(work, self.precision(work.dtype))
        tokens = work.batch * (work.num_heads * work.query_length + work.num_kv_heads * work.key_length)
        flops = 2 * work.pairs * (self.score_length(work.qk_length) + work.value_length)
        flops += tokens * self.feature_flops(work.qk_length)
        return replace(plain, flops=flops, state_bytes=state_bytes, note=f"quadratic in the length: {why}")

    def score_length(self, qk_length: int) -> int:
        """How long the inner product behind `similarity` is."""
        return qk_length if self.short else self.feature_length(qk_length)


@dataclass(frozen=True, kw_only=True)
class Kernel(FeatureMechanism):
    """Kernel attention with any feature map: a function (…, K) -> (…, C), or a module, whose parameters learn.

    A learned map is a module: a layer registers it. Tensors that a function captures get their gradients here, and a
    layer, which could not register them, refuses them by name.

    The features of a query and a key must have an inner product of at least 0; `regard.check` says if they do not.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 5, 4)
    >>> rg.attend(q, k, v, rg.Kernel(feature_map=torch.relu), mask=rg.causal).shape
    torch.Size([1, 2, 5, 4])
    """

    feature_map: Callable[[Tensor], Tensor]

    def __post_init__(self) -> None:
        if not callable(self.feature_map):
            raise ValueError(
                f"feature_map: expected a function (…, K) -> (…, C), got {type(self.feature_map).__name__}"
            )

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        phi = self.feature_map(x.to(own_dtype(self) or x.dtype))
        if not isinstance(phi, Tensor) or phi.shape[:-1] != x.shape[:-1]:
            shape = tuple(phi.shape) if isinstance(phi, Tensor) else type(phi).__name__
            raise ValueError(f"feature_map: expected {(*x.shape[:-1], 'C')} from {tuple(x.shape)}, got {shape}")
        return phi.to(x.dtype)

    def feature_length(self, qk_length: int) -> int:
        x = probe(self, (0, 1, qk_length))  # no tokens: nothing is computed, and nothing is counted
        with torch.no_grad(), made_on(x.device):
            return self.features(x).shape[-1]


@dataclass(frozen=True, kw_only=True)
class Elu(FeatureMechanism):
    """phi(x) = elu(x) + 1, the original linear attention: as many features as qk_length.

    >>> import regard as rg, torch
    >>> rg.Elu().features(torch.tensor([0.0, 1.0])).tolist()
    [1.0, 2.0]
    """

    fused_form: ClassVar[str] = "elu"

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        return nn.functional.elu(x) + 1

    def feature_length(self, qk_length: int) -> int:
        return qk_length

    def feature_flops(self, qk_length: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class RandomFeatures(FeatureMechanism):
    """Positive random features: n draws whose mean product approaches exp(q·k / sqrt(K)), softmax's own kernel.

        phi(x) = exp(w·x' - |x'|²/2) / sqrt(n),    x' = x / K^(1/4),    w ~ N(0, I) from `seed`

    Long queries and keys underflow: where |x'|² passes about 80 in float32, phi is 0, and a query all of whose
    similarities are 0 gets 0.

    Choromanski et al. 2021, "Rethinking attention with Performers".

    >>> import regard as rg, torch
    >>> q, k = torch.full((1, 1, 1, 4), 0.3), torch.full((1, 1, 1, 4), 0.5)
    >>> close = rg.RandomFeatures(n=20000).similarity(q, k).item(), (q * k).sum().div(2).exp().item()
    >>> abs(close[0] - close[1]) < 0.05
    True
    """

    n: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or self.n < 1:
            raise ValueError(f"n: expected a whole number of at least 1, got {self.n!r}")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed: expected a whole number, got {self.seed!r}")

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        length = x.shape[-1]
        # Fake tensors take none but fake ones beside them, except in an export, to which the draws are constants.
        draw = _drawn if isinstance(x, FakeTensor) and not torch.compiler.is_exporting() else _draws
        draws = draw(self.n, length, self.seed)
        scaled = x * length**-0.25
        exponent = scaled @ draws.to(x).transpose(0, 1) - scaled.square().sum(-1, keepdim=True) / 2
        return exponent.exp() * self.n**-0.5

    def feature_length(self, qk_length: int) -> int:
        return self.n

    def feature_flops(self, qk_length: int) -> int:
        return 2 * qk_length * self.n


@lru_cache(maxsize=32)
def _draws(n: int, length: int, seed: int) -> Tensor:
    """Drawn once, outside of any transform or mode: real numbers, the same for all."""
    if torch.compiler.is_dynamo_compiling():
        return _drawn(n, length, seed)
    with torch._C._DisableFuncTorch(), _disable_current_modes(), torch.inference_mode(False):
        return _drawn(n, length, seed)


def _drawn(n: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, generator=generator, dtype=torch.float64, device="cpu")
