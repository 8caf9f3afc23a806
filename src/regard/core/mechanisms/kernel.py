"""Kernel attention (linear attention with a feature map phi): any phi, elu(x) + 1 (Katharopoulos et al. 2020), random
features.

w_ts = phi(q_t)·phi(k_s) / sum over visible s' of phi(q_t)·phi(k_s')
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.core.eager import kept
from regard.core.families.features import FeatureMechanism
from regard.core.tensors import fitted, made_on, own_dtype, probe


@dataclass(frozen=True, kw_only=True)
class Kernel(FeatureMechanism):
    """Kernel attention with any feature map: a function (…, K) -> (…, C), or a module, whose parameters learn.

    A learned feature map should be a module, which a layer registers. Tensors that a plain function captures do get
    gradients, but a layer could not train, move or save them and refuses them by name, learned or not.

    The features of a query and a key must have an inner product of at least 0; `regard.check` tests it.

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
        x = probe(self, (0, 1, qk_length))  # no tokens, so that nothing is computed or counted
        with torch.no_grad(), made_on(x.device):
            computing: Any = fitted(self, x.dtype)
            return int(computing.features(x).shape[-1])


@dataclass(frozen=True, kw_only=True)
class Elu(FeatureMechanism):
    """phi(x) = elu(x) + 1, the original linear attention: as many features as qk_length.

    >>> import regard as rg, torch
    >>> rg.Elu().features(torch.tensor([0.0, 1.0])).tolist()
    [1.0, 2.0]
    """

    fused_form: ClassVar[str] = "elu"

    def features(self, x: Float[Tensor, "*b T K"]) -> Float[Tensor, "*b T C"]:
        return nn.functional.elu(x).add_(1)

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
        make = _constant_draws if torch.compiler.is_dynamo_compiling() else _draws
        draws = make(*map(index, (self.n, length, self.seed))).to(
            x
        )  # plain integers, also in a trace with dynamic sizes
        scaled = x * length**-0.25
        exponent = scaled @ draws.transpose(0, 1) - scaled.square().sum(-1, keepdim=True) / 2
        return exponent.exp() * self.n**-0.5

    def feature_length(self, qk_length: int) -> int:
        return self.n

    def feature_flops(self, qk_length: int) -> int:
        return 2 * qk_length * self.n


@kept(32)
def _draws(n: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, generator=generator, dtype=torch.float64, device="cpu")


def _constant_draws(n: int, length: int, seed: int) -> Tensor:
    """torch.compile calls this while it traces, since a generator cannot be made inside of a graph."""
    return nn.Parameter(_draws(n, length, seed), requires_grad=False)  # its sizes become constants too


# The effect of torch.compiler.assume_constant_result, without importing torch._dynamo.
_constant_draws._dynamo_marked_constant = True  # type: ignore[attr-defined]
