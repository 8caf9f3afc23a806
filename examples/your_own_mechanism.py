"""A mechanism of your own, in one class of a few lines, and everything that follows from it.

    python examples/your_own_mechanism.py
    regard check examples/your_own_mechanism.py:Cauchy
    regard cost --own examples/your_own_mechanism.py:Cauchy
    regard train lm --mechanism examples/your_own_mechanism.py:Learned --out runs/learned
    regard generate runs/learned "def" --mechanism examples/your_own_mechanism.py:Learned

Cauchy attention: a key counts less the further it is from the query,

    w_ts = sim(q_t, k_s) / sum over visible s' of sim(q_t, k_s'),        sim(q, k) = 1 / (1 + |q - k|² / width²)
"""

import tempfile
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import regard as rg


@dataclass(frozen=True, kw_only=True)
class Cauchy(rg.Mechanism):
    """Weights fall with the squared distance of query and key; `width` is the distance at which they are halved."""

    width: float = 2.0

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        """The similarity of each query and key, (…, T, K) and (…, S, K) -> (…, T, S)."""
        # |q - k|² = |q|² - 2 q·k + |k|² is one matrix product; it is below 0 only by rounding.
        distance = q.square().sum(-1)[..., None] - 2 * q @ k.transpose(-1, -2) + k.square().sum(-1)[..., None, :]
        return 1 / (1 + distance.clamp(min=0) / self.width**2)


@dataclass(frozen=True, kw_only=True)
class Learned(Cauchy):
    """The same with a learned factor of the width; every layer of a model has a factor of its own."""

    factor: nn.Parameter = field(default_factory=lambda: nn.Parameter(torch.ones(1)))

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return super().similarity(q / self.factor, k / self.factor)


def main() -> None:
    """Compute, stream, inspect, price, check, save and load the mechanism."""
    torch.manual_seed(0)
    mechanism = Cauchy()
    q, k, v = torch.randn(2, 8, 100, 16), torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16)
    mask = rg.causal & rg.padding([100, 60])

    whole = rg.attend(q, k, v, mechanism, mask)
    print(rg.explain(q, k, v, mechanism, mask))

    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=16, value_length=16, capacity=100)
    steps = []
    for t in range(100):
        token = slice(t, t + 1)
        seen = rg.causal & rg.padding([t + 1, min(t + 1, 60)])
        out, state = mechanism.extend(q[:, :, token], k[:, :, token], v[:, :, token], state, mask=seen)
        steps.append(out)
    print(f"\nstreamed token by token: off by at most {(torch.cat(steps, 2) - whole).abs().max():.1e}")

    weights = rg.weights(q, k, mechanism, mask, rows=[-1], heads=[0])
    print(f"the last token of the first sequence looks most at token {weights[0, 0, 0].argmax()}")
    print(rg.cost(mechanism, rg.Work(query_length=4096, key_length=4096, mask=rg.causal)))
    print()
    print(rg.check(mechanism, masks=["causal", "padding left"], dtypes=["float32"]))

    config = rg.DecoderConfig(
        vocabulary_size=50, embedding_dim=32, num_layers=2, num_heads=4, mechanism=Learned(width=3.0)
    )
    model = rg.Decoder(config)
    with tempfile.TemporaryDirectory() as folder:
        # A checkpoint has the class's name, its fields and its tensors, but no code: pass the class to load it.
        loaded = rg.load(rg.save(model, f"{folder}/model"), mechanisms=[Learned])
    print(f"\nsaved and loaded: {loaded.config.mechanism}, {loaded.summary(100).parameters:,} parameters")


if __name__ == "__main__":
    main()
