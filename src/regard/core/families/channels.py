"""Mechanisms between channels: every channel attends to all channels, with the real tokens as their features.

    w_cd = softmax over d of (sum over real tokens t of q_tc k_td) / sqrt(size)         out_tc = sum over d of w_cd v_td

A member defines `size`. The weights are (B, H, K, K) at any length, and the cost is linear in the number of tokens. The
order of tokens plays no part, so there is no causal form and no token-by-token form.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.calls.call import Call, in_own_dtype
from regard.core.calls.choice import Path
from regard.core.cost import Cost, Work, accumulator
from regard.core.families.mechanism import Mechanism
from regard.core.masks.guard import bad_keys, cleaned
from regard.core.masks.structure import EVERYTHING, Structure, structure_of
from regard.core.paths import reference
from regard.core.user_code import undefined


@dataclass(frozen=True, kw_only=True)
class ChannelMechanism(Mechanism):
    """Attention between channels. Needs T = S and qk_length = value_length; padding is the only mask with a meaning."""

    def size(self, tokens: Tensor, channels: int) -> Tensor:
        """The products are divided by the square root of this. `tokens` (B or 1, 1, 1, 1) says how many tokens are
        real."""
        raise undefined(self, "size(tokens, channels)")

    def weigh(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G T K"],
        visible: Bool[Tensor, "..."] | None,
        bias: Float[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H K K"]:
        kind, groups = accumulator(q.dtype), k.shape[1]
        real = _real(visible)
        tokens = torch.full((1, 1, 1, 1), q.shape[2], dtype=kind, device=q.device)
        queries, keys = q.to(kind), k.to(kind)
        if real is not None:
            tokens = real.sum(2, keepdim=True).to(kind)
            queries, keys = queries.masked_fill(~real, 0), keys.masked_fill(~real, 0)
        scores = rearrange(queries, "b (g r) t c -> b g (r c) t", g=groups) @ keys
        size = self.size(tokens, q.shape[-1])
        scores = rearrange(scores, "b g (r c) d -> b (g r) c d", c=q.shape[-1]) * size.rsqrt()
        weights = torch.softmax(scores, dim=-1)
        return weights if real is None else weights.masked_fill(tokens == 0, 0)

    def mix(
        self,
        weights: Float[Tensor, "B H K K"],
        v: Float[Tensor, "B G T K"],
        visible: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "B H T K"]:
        tiled = rearrange(weights, "b (g r) c d -> b g d (r c)", g=v.shape[1])
        out = rearrange(v.to(weights.dtype) @ tiled, "b g t (r c) -> b (g r) t c", c=weights.shape[-1])
        real = _real(visible)
        return out if real is None else out.masked_fill(~real, 0)  # the output at padding is 0

    def choose_weights(self, call: Call, rows: list[int] | None, heads: list[int] | None) -> Tensor:
        if rows is not None:
            raise ValueError(f"rows: expected none, the weights of {self!r} are between channels, got {rows}")
        bad = None if call.mask is None else bad_keys(call.k, call.k)
        visible = None
        if call.mask is not None:
            visible = call.mask.visible(call.batch, call.heads, call.queries, call.keys, call.q.device)
        with in_own_dtype(call.q):
            weights = self.weigh(call.q, cleaned(call.k, bad), visible).to(call.q.dtype)
        if bad is not None:
            valid = call.structure.valid(call.keys, call.q.device)
            bad = (bad if valid is None else bad & valid[:, None]).any(-1)
            weights = weights.masked_fill(
                bad.repeat_interleave(call.heads // call.groups, 1)[..., None, None], torch.nan
            )
        return weights if heads is None else weights[:, heads]

    def trace_scores(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B G S K"],
        bias: Float[Tensor, "..."] | None = None,
    ) -> None:
        return None

    def refuses(self, call: Call) -> str | None:
        if call.bias is not None:
            return super().refuses(call)
        structure, name = call.structure, type(self).__name__
        if structure.causal or structure.windowed or structure.rest is not None:
            return f"mask: expected padding or none, got {call.mask!r}; {name} ignores the order of tokens"
        if call.queries != call.keys:
            return f"q: expected as many queries as keys for {name}, {call.keys}, got {call.queries}"
        if call.qk_length != call.value_length:
            return f"v: expected value_length = qk_length = {call.qk_length} for {name}, got {call.value_length}"
        return None

    def streams(self, qk_length: int, structure: Structure = EVERYTHING) -> str | None:
        name = type(self).__name__
        return f"mechanism: expected one with a token-by-token form, got {name}, which looks at all tokens at once"

    def paths(self) -> tuple[Path, ...]:
        return (_PATH,)

    def cost(self, work: Work) -> Cost:
        structure, name = structure_of(work.rule, work.query_length, work.key_length), type(self).__name__
        if structure.causal or structure.windowed or structure.rest is not None:
            raise ValueError(f"mask: expected padding or none for {name}, got {work.mask!r}")
        if work.query_length != work.key_length:
            raise ValueError(f"query_length: expected key_length={work.key_length} for {name}, got {work.query_length}")
        pairs = work.batch * work.num_heads * work.qk_length**2
        return Cost(
            flops=2 * pairs * (work.query_length + work.key_length),
            bytes=work.io_bytes,
            state_bytes=0,
            activation_bytes=pairs * accumulator(work.dtype).itemsize,
            form="linear",
        )


def _real(visible: Tensor | None) -> Tensor | None:
    """Which tokens are real, (B, 1, S, 1): padding is the same for all queries."""
    return None if visible is None else visible[:, :, 0, :, None]


def _run(call: Call) -> Tensor:
    """the plain formula: K×K weights between channels, linear in the tokens."""
    return reference.run(call)


_PATH = Path("reference", reference.cannot, _run)
