"""Channel attention: the channels attend to each other, with all tokens as their features (DaViT).

    w_cd = softmax over d of scale · sum over real tokens t of q_tc k_td          out_tc = sum over d of w_cd v_td

Two published conventions differ in the scale: 1/sqrt(tokens) (`scale="tokens"`, Florence-2's DaViT) and
1/sqrt(channels) (`scale="channels"`, the first DaViT, which also calls the three roles k, v, q instead of q, k, v:
pass them in that order). The weights are (B, H, K, K). Cost is linear in the tokens; there is no order of tokens in
it, so no causality.

Ding et al. 2022, "DaViT: Dual Attention Vision Transformers".
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from regard.call import Call, Path
from regard.cost import Cost, Work, accumulator
from regard.mechanism import Mechanism
from regard.paths import reference
from regard.structure import EVERYTHING, Structure, structure


@dataclass(frozen=True, kw_only=True)
class Channel(Mechanism):
    """Attention between channels. Needs T = S and qk_length = value_length; padding is the only mask with a meaning.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 49, 8)
    >>> rg.attend(q, k, v, rg.Channel()).shape, rg.weights(q, k, rg.Channel()).shape
    (torch.Size([1, 2, 49, 8]), torch.Size([1, 2, 8, 8]))
    """

    by_pairs: ClassVar[bool] = False
    scale: Literal["tokens", "channels"] = "tokens"

    def __post_init__(self) -> None:
        if self.scale not in ("tokens", "channels"):
            raise ValueError(f"scale: expected 'tokens' or 'channels', got {self.scale!r}")

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H K K"]:
        kind, groups = accumulator(q.dtype), k.shape[1]
        real = None if visible is None else visible[:, :, 0, :, None]  # (B, 1, S, 1): padding is alike for all queries
        tokens = torch.full((1, 1, 1, 1), q.shape[2], dtype=kind, device=q.device)
        queries, keys = q.to(kind), k.to(kind)
        if real is not None:
            tokens = real.sum(2, keepdim=True).to(kind)
            queries, keys = queries.masked_fill(~real, 0), keys.masked_fill(~real, 0)
        scores = rearrange(queries, "b (g r) t c -> b g (r c) t", g=groups) @ keys
        size = tokens.clamp(min=1) if self.scale == "tokens" else torch.full_like(tokens, q.shape[-1])
        scores = rearrange(scores, "b g (r c) d -> b (g r) c d", c=q.shape[-1]) * size.rsqrt()
        weights = torch.softmax(scores, dim=-1)
        return weights if real is None else weights.masked_fill(tokens == 0, 0)

    def mix(self, weights: Float[Tensor, "B H K K"], v: Float[Tensor, "B G T K"]) -> Float[Tensor, "B H T K"]:
        tiled = rearrange(weights, "b (g r) c d -> b g d (r c)", g=v.shape[1])
        return rearrange(v.to(weights.dtype) @ tiled, "b g t (r c) -> b (g r) t c", c=weights.shape[-1])

    def refuses(self, call: Call) -> str | None:
        if call.bias is not None:
            return super().refuses(call)
        known = call.structure
        if known.causal or known.windowed or known.rest is not None:
            return f"mask: expected padding or none, got {call.mask!r}; Channel has no order of tokens to be causal in"
        if call.queries != call.keys:
            return f"q: expected as many queries as keys for Channel, {call.keys}, got {call.queries}"
        if call.qk_length != call.value_length:
            return f"v: expected value_length = qk_length = {call.qk_length} for Channel, got {call.value_length}"
        return None

    def streams(self, qk_length: int, known: Structure = EVERYTHING) -> str | None:
        return "mechanism: expected one with a token-by-token form, got Channel, which looks at all tokens at once"

    def paths(self) -> tuple[Path, ...]:
        return (Path("reference", reference.cannot, _run),)

    def cost(self, work: Work) -> Cost:
        known = structure(work.rule, work.query_length, work.key_length)
        if known.causal or known.windowed or known.rest is not None:
            raise ValueError(f"mask: expected padding or none for Channel, got {work.mask!r}")
        if work.query_length != work.key_length:
            raise ValueError(
                f"query_length: expected key_length={work.key_length} for Channel, got {work.query_length}"
            )
        pairs = work.batch * work.num_heads * work.qk_length**2
        return Cost(
            flops=2 * pairs * (work.query_length + work.key_length),
            bytes=work.io_bytes,
            state_bytes=0,
            activation_bytes=pairs * accumulator(work.dtype).itemsize,
            form="linear",
        )


def _run(call: Call) -> Tensor:
    """the plain formula: K×K weights between channels, linear in the tokens."""
    out = reference.run(call)
    valid = call.structure.valid(call.keys, call.q.device)
    return out if valid is None else out.masked_fill(~valid[:, None, :, None], 0)
