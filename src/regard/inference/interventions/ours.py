"""Changes of our models' attention: a hook at every `Attend`, which computes changed heads a second time."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.attention import attend, weights
from regard.core.calls.call import ordered
from regard.core.calls.choice import refusal
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, padding
from regard.core.masks.structure import structure_of
from regard.core.tensors import weighs_tokens
from regard.inference.histories import Histories, WholeCall
from regard.inference.interventions.change import (
    Changed,
    HeadOutputs,
    always_causal,
    call_shape,
    changed_output,
    changes_of,
)
from regard.models.layers.attention import Attend


def with_beta(mechanism: Mechanism, beta: float) -> Mechanism:
    """The mechanism at another temperature; ValueError for one that has none.

    >>> import regard as rg
    >>> with_beta(rg.Softmax(), 0.5)
    Softmax(beta=0.5, softcap=None)
    """
    if not is_dataclass(mechanism) or "beta" not in {field.name for field in fields(mechanism)}:
        raise ValueError(f"beta: expected layers of softmax, got {mechanism!r}, which has no beta")
    return replace(mechanism, beta=beta)  # type: ignore[call-arg]


def changed_call(call: WholeCall, part: Changed) -> tuple[Mechanism, Mask | None, Tensor | None]:
    """The mechanism, the mask and the bias of a call with a change."""
    mechanism = call.mechanism if part.mechanism is None else part.mechanism
    mechanism = mechanism if part.beta is None else with_beta(mechanism, part.beta)
    rule = call.rule
    if part.hidden:
        valid = torch.ones(call.k.shape[0], call.k.shape[2], dtype=torch.bool, device=call.k.device)
        valid[:, sorted(part.hidden)] = False
        rule = padding(valid=valid) if rule is None else rule & padding(valid=valid)
    if weighs_tokens(mechanism, call.q.shape[3]) != weighs_tokens(call.mechanism, call.q.shape[3]):
        between = "tokens" if weighs_tokens(call.mechanism, call.q.shape[3]) else "channels"
        raise ValueError(f"mechanism: expected attention between {between}, as the layer has, got {mechanism!r}")
    if call.bias is not None and refusal(mechanism, bias=True) is not None:
        raise ValueError(f"mechanism: expected one that takes the layer's bias, got {mechanism!r}")
    if mechanism.ordered and not call.mechanism.ordered:
        structure = structure_of(call.rule, call.q.shape[2], call.k.shape[2])
        if call.q.shape[2] > 1 and not (call.kind == "self" and structure.causal):
            raise always_causal(mechanism)
    return mechanism, ordered(mechanism, rule), call.bias


def output(call: WholeCall, part: Changed) -> Tensor:
    """The output of all heads with a change."""
    values = call.v if part.values is None else part.values.to(call.v)
    mechanism, rule, bias = changed_call(call, part)
    if part.weights is None:
        return attend(call.q, call.k, values, mechanism, rule, bias=bias)
    whole = call.q.new_zeros(*call.q.shape[:3], call.k.shape[2])
    whole[:, list(part.heads)] = part.weights.to(whole)
    if part.hidden:
        whole[..., sorted(part.hidden)] = 0
    return mechanism.mix(whole, values, None).to(call.q.dtype)


def changed_weights(call: WholeCall, parts: list[Changed], rows: list[int] | None, heads: list[int] | None) -> Tensor:
    """The weights of chosen rows and heads with all changes."""
    rule = ordered(call.mechanism, call.rule)
    chosen = weights(call.q, call.k, call.mechanism, rule, bias=call.bias, rows=rows, heads=heads)
    for part in parts:
        if not part.weighs:
            continue
        if part.weights is not None:
            new = part.weights.to(chosen)
            new = new if rows is None else new[:, :, rows]
            if part.hidden:
                new = new.index_fill(3, torch.tensor(sorted(part.hidden), device=new.device), 0)
        else:
            mechanism, rule, bias = changed_call(call, part)
            new = weights(call.q, call.k, mechanism, rule, bias=bias, rows=rows, heads=list(part.heads))
        listed = range(call.q.shape[1]) if heads is None else heads
        for place, head in enumerate(listed):
            if head in part.heads:
                chosen = chosen.index_copy(
                    1, torch.tensor([place], device=chosen.device), new[:, [part.heads.index(head)]].to(chosen)
                )
    return chosen


class Adapter:
    """Changes the output of one attention module, as long as a context wants it."""

    def __init__(self, module: nn.Module) -> None:
        self.histories = Histories()
        # Before the hooks of traces, which record what is changed.
        self.handle = module.register_forward_hook(self.after, with_kwargs=True, prepend=True)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], produced: Any) -> Any:
        """The output of a run with its changes."""
        assert isinstance(module, Attend)
        out, state = produced
        call = self.histories.whole(module, args, kwargs, state)
        parts = changes_of(module, call_shape(call.q, call.k, call.first))
        if not parts:
            return None
        real = None
        if call.kind == "self":
            tokens, keys = call.q.shape[2], call.k.shape[2]
            valid = structure_of(call.rule, tokens, keys).valid(keys, call.q.device)
            real = None if valid is None else valid[:, keys - tokens :].expand(call.q.shape[0], tokens)
        step = call.kind == "self" and call.q.shape[2] < call.first + call.k.shape[2]
        outputs = HeadOutputs(out=out, real=real, step=step, compute=lambda part: output(call, part))
        return changed_output(outputs, parts), state
