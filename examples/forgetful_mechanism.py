"""A mechanism with its own state, in one file: sums that decay with every token.

    python examples/forgetful_mechanism.py

Linear attention in which keys count less the further back they are,

    sim_ts = rate^(t-s) · phi(q_t)·phi(k_s) for s ≤ t,     w_ts = sim_ts / sum over visible s' of sim_ts'
    out_t  = phi(q_t) S_t / phi(q_t)·z_t,                  S_t = rate · S_{t-1} + phi(k_t) v_t^T,  phi = elu + 1
                                                           z_t = rate · z_{t-1} + phi(k_t)

`weigh` defines the weights. A stream keeps (S, z) instead of a KV cache: `empty_state` creates them, `advance` updates
them. Everything else (layers, models, generation, saved prompts, traces, the laws) follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import elu

import regard as rg


@dataclass(frozen=True, eq=False, kw_only=True)
class FadingState(rg.FixedState):
    """Sums over the tokens so far, (B, G, K, V) and (B, G, K); the library reorders, counts and saves the fields."""

    sums: Tensor
    total: Tensor


@dataclass(frozen=True, kw_only=True)
class Forgetful(rg.Mechanism):
    """Weights fall by `rate` with every token between query and key."""

    ordered: ClassVar[bool] = True  # the weights depend on positions, and are causal without a mask
    excuses: ClassVar[Mapping[str, str]] = {"permuted": "a key counts for less the further back it is"}
    rate: float = 0.9

    def weigh(self, q: Tensor, k: Tensor, visible: Tensor | None, bias: Tensor | None = None) -> Tensor:
        """The exact weights; the last query is at the position of the last key."""
        keys = torch.arange(k.shape[2], device=q.device)
        distance = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)[:, None] - keys
        seen = distance >= 0 if visible is None else (distance >= 0) & visible
        q = q.masked_fill(~seen.any(-1, keepdim=True), 0)  # a query that sees nothing reaches no key's gradient
        similar = self.grouped(lambda q, k: phi(q) @ phi(k).transpose(-1, -2), q, k)
        fade = similar.new_tensor(self.rate) ** distance.clamp(min=0)
        return self.normalise((similar * fade).masked_fill(~seen, 0))

    def state_type(self, qk_length: int) -> type[FadingState]:
        """The class of its state."""
        return FadingState

    def empty_state(self, sizes: rg.Sizes, capacity: int) -> FadingState:
        """The state before the first token."""
        sums, total = sizes.zeros(sizes.qk_length, sizes.value_length), sizes.zeros(sizes.qk_length)
        return FadingState(mechanism=self, sizes=sizes, sums=sums, total=total)

    def advance(self, q: Tensor, k: Tensor, v: Tensor, state: Any, rule: Any, bias: None) -> tuple[Tensor, FadingState]:
        """Add tokens to the sums one after another; padding adds nothing."""
        new = state.receive(q, k, v, rule)
        sums, total = new.state.sums, new.state.total
        queries, keys, values = phi(q.to(sums.dtype)), phi(new.k.to(sums.dtype)), new.v.to(sums.dtype)
        if new.real is not None:
            keys = keys.masked_fill(~new.real, 0)
        out = [queries.new_zeros(*q.shape[:2], 0, v.shape[3])]
        for t in range(k.shape[2]):
            sums = self.rate * sums + keys[:, :, t, :, None] * values[:, :, t, None]
            total = self.rate * total + keys[:, :, t]
            query = queries[:, :, t].unflatten(1, (k.shape[1], -1))
            size = query @ total[..., None]
            out.append((query @ sums / size.masked_fill(size == 0, 1)).flatten(1, 2)[:, :, None])
        return new.attended(torch.cat(out, 2).to(q.dtype), sums=sums, total=total)


def phi(x: Tensor) -> Tensor:
    """The feature map of queries and keys, above 0."""
    return elu(x) + 1


def main() -> None:
    """Compute, stream, inspect, price and check the mechanism; then use it in a model."""
    torch.manual_seed(0)
    mechanism = Forgetful()
    q, k, v = torch.randn(2, 8, 100, 16), torch.randn(2, 2, 100, 16), torch.randn(2, 2, 100, 16)
    whole = rg.attend(q, k, v, mechanism)
    state = mechanism.start(batch=2, num_kv_heads=2, qk_length=16, value_length=16)
    out, state = mechanism.extend(q[:, :, :60], k[:, :, :60], v[:, :, :60], state)
    rest, state = mechanism.extend(q[:, :, 60:], k[:, :, 60:], v[:, :, 60:], state)
    print(f"streamed: off by at most {(torch.cat([out, rest], 2) - whole).abs().max():.1e}, {state}")
    print(rg.weights(q, k, mechanism, rows=[-1], heads=[0])[0, 0, 0, -4:])
    print(rg.cost(mechanism, rg.Work(query_length=4096, key_length=4096, mask=rg.causal)))
    sizes = {"vocabulary_size": 50, "embedding_dim": 32, "num_layers": 2, "num_heads": 4}
    model = rg.Decoder(rg.DecoderConfig(**sizes, mechanism=mechanism))
    print(rg.generate(model, [[1, 2, 3]], max_new_tokens=5)[0].tokens)
    print(rg.check(mechanism, masks=["causal", "padding left"], dtypes=["float32"]))


if __name__ == "__main__":
    main()
