"""Changes of a Hugging Face model's attention: its eager function is called again with what is changed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn

from regard.core.attention import attend, weights
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, causal, dense
from regard.core.mechanisms import Softmax
from regard.inference.interventions.change import Changed, HeadOutputs, always_causal, changed_output
from regard.inference.tracing.record import Kind


def visible_pairs(mask: Any, keys: int) -> Tensor | None:
    """Which pairs a mask of transformers shows, broadcastable to (B, H, T, S); None if there is no mask."""
    if not isinstance(mask, Tensor):
        return None
    seen = mask[(None,) * (4 - mask.ndim)][..., :keys]
    seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    return seen.expand(*seen.shape[:3], keys)


def real_keys(seen: Bool[Tensor, "..."], batch: int) -> Bool[Tensor, "B S"]:
    """Which keys are no padding: those that some query sees."""
    return seen.any(1).any(1).expand(batch, seen.shape[3])


def _rule(seen: Tensor) -> Mask:
    """A mask by its table; `causal` if it is no more than that, which every mechanism of decoders takes."""
    queries, keys = seen.shape[2:]
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).tril(keys - queries)
    return causal if bool((seen == triangle).all()) else dense(seen)


@dataclass(frozen=True, eq=False)
class EagerCall:
    """One run of a module's eager attention."""

    module: nn.Module
    kind: Kind
    past: int | None
    """How many tokens the KV cache has already; None without a cache."""
    forward: Callable[..., tuple[Tensor, Any]]
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def changed(self, out: Tensor, weighed: Any, parts: list[Changed]) -> tuple[Tensor, Any]:
        """The output (B, T, H, V) and the weights with all changes."""
        again = {id(part): self.again(part) for part in parts if part.recomputes}
        outputs = HeadOutputs(
            out=out.transpose(1, 2), real=self._real(), step=self._step(), compute=lambda part: again[id(part)][0]
        )
        for part in parts:
            if part.weighs and isinstance(weighed, Tensor):
                heads = torch.tensor(part.heads, device=weighed.device)
                weighed = weighed.index_copy(1, heads, again[id(part)][1][:, list(part.heads)].to(weighed))
        return changed_output(outputs, parts).transpose(1, 2).contiguous(), weighed

    def _step(self) -> bool:
        """Whether these are new tokens after others."""
        if self.kind == "cross":
            return False
        return self.q.shape[2] < self.k.shape[2] if self.past is None else self.past > 0

    def _real(self) -> Tensor | None:
        """Which queries (B, T) are no padding, by the mask of self-attention; None if it does not say."""
        seen, queries = visible_pairs(self.mask, self.k.shape[2]), self.q.shape[2]
        if seen is None or self.kind == "cross" or self._step():
            return None
        return real_keys(seen, self.q.shape[0])[:, :queries]

    def again(self, part: Changed) -> tuple[Tensor, Tensor]:
        """The output (B, H, T, V) and the weights of all heads with a change."""
        values = self.v if part.values is None else part.values.to(self.v)
        if part.weights is not None:
            return self._mixed(part, values)
        mask = self._mask(part)
        if part.mechanism is not None:
            return self._swapped(part, values, mask)
        kwargs = self.kwargs
        if part.beta is not None:
            if "scaling" not in kwargs:
                raise ValueError(f"beta: expected attention with a scale, got {type(self.module).__name__}")
            if part.beta == torch.inf:
                return self._swapped(part, values, mask)
            kwargs = {**kwargs, "scaling": part.beta}
        out, weighed = self.forward(self.module, self.q, self.k, values, mask, *self.args, **kwargs)
        out, seen = out.transpose(1, 2), visible_pairs(mask, self.k.shape[2]) if part.hidden else None
        if seen is None:
            return out, weighed
        # A query that sees no key any more gets 0; softmax would give it all of them.
        blind = ~seen.any(-1, keepdim=True)
        return out.masked_fill(blind, 0), weighed.masked_fill(blind, 0)

    def _mixed(self, part: Changed, values: Tensor) -> tuple[Tensor, Tensor]:
        assert part.weights is not None
        whole = self.q.new_zeros(*self.q.shape[:3], self.k.shape[2])
        whole[:, list(part.heads)] = part.weights.to(whole)
        whole[..., sorted(part.hidden)] = 0
        return whole @ values.repeat_interleave(whole.shape[1] // values.shape[1], 1), whole

    def _swapped(self, part: Changed, values: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        if self.kwargs.get("position_bias") is not None:
            raise ValueError(
                f"mechanism: expected attention without a bias by position, got {type(self.module).__name__}"
            )
        mechanism: Mechanism = Softmax(beta=part.beta) if part.mechanism is None else part.mechanism
        seen = visible_pairs(mask, self.k.shape[2])
        rule = None if seen is None else _rule(seen.expand(-1, -1, self.q.shape[2], -1))
        if mechanism.ordered and rule is not causal and self.q.shape[2] > 1:
            raise always_causal(mechanism)
        return (
            attend(self.q, self.k, values, mechanism, rule).to(self.q.dtype),
            weights(self.q, self.k, mechanism, rule),
        )

    def _mask(self, part: Changed) -> Any:
        """The mask with the hidden keys, as transformers writes it."""
        if not part.hidden:
            return self.mask
        hidden = sorted(part.hidden)
        if isinstance(self.mask, Tensor) and self.mask.dtype == torch.bool:
            mask = self.mask.clone()
            mask[..., hidden] = False
            return mask
        nothing = self.mask is None
        mask = self.q.new_zeros(1, 1, self.q.shape[2], self.k.shape[2]) if nothing else self.mask.clone()
        mask[..., hidden] = torch.finfo(mask.dtype).min
        return mask
