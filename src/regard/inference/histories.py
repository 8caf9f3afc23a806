"""One run of our attention as a call over all keys so far, for whoever computes it a second time: traces, changes."""

import inspect
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, Padding, as_mask
from regard.core.masks.padded import join_padding
from regard.core.masks.structure import padding_between
from regard.core.states.state import State
from regard.inference.tracing.record import Kind
from regard.models.layers.attention import Attend

History = tuple[Tensor, Tensor, Padding | None]
"""Keys, values, and which of them are real."""
ARGUMENTS = inspect.signature(Attend.forward)


@dataclass(frozen=True, eq=False, kw_only=True)
class WholeCall:
    """One run of an `Attend` as a call over all keys so far, also if a state was extended."""

    kind: Kind
    mechanism: Mechanism
    q: Tensor
    k: Tensor
    v: Tensor
    rule: Mask | None
    bias: Tensor | None
    first: int = 0
    """The position of the first key in its sequence: a sliding window drops the keys before it."""


class Histories:
    """The keys and values behind every state that is extended while this lives."""

    def __init__(self) -> None:
        self.kept: WeakKeyDictionary[State, History] = WeakKeyDictionary()
        """Keys, values and padding of states that do not keep them, such as recurrent ones."""

    def whole(self, module: Attend, args: tuple[Any, ...], kwargs: dict[str, Any], longer: Any) -> WholeCall:
        """The call that a module was given; `longer` is the state that it returned."""
        arguments = ARGUMENTS.bind(module, *args, **kwargs).arguments
        k, v = arguments["k"], arguments["v"]
        rule, state = as_mask(arguments.get("mask")), arguments.get("state")
        first = 0
        if state is not None:
            first = longer.dropped
            k, v, padding = self._history(module, k, v, rule, state, longer)
            rule = padding if rule is None else rule if padding is None else rule & padding
        return WholeCall(
            kind="cross" if arguments.get("cross") else "self",
            mechanism=module.mechanism,
            q=arguments["q"],
            k=k,
            v=v,
            rule=rule,
            bias=arguments.get("bias"),
            first=first,
        )

    def _history(
        self, module: Attend, k: Tensor, v: Tensor, rule: Mask | None, state: State, longer: State
    ) -> "History":
        """All keys and values so far, and their padding."""
        if longer.earliest == 0 and (history := longer.history()) is not None:
            return history
        before = self.kept.get(state) or state.history()
        if before is None and state.length:
            raise ValueError(
                f"state: expected a state that began under the trace or change, got one with {state.length} tokens "
                f"already summed by {module.mechanism!r}; begin with the sequence"
            )
        keys, values, padding = before or (k[:, :, :0], v[:, :, :0], None)
        new, total = k.shape[2], state.length + k.shape[2]
        fresh = padding_between(rule, state.length, total, total)
        joined = join_padding(padding, state.length, fresh, new, k.shape[0], k.device)
        history = torch.cat([keys, k.detach()], dim=2), torch.cat([values, v.detach()], dim=2), joined
        self.kept[longer] = history
        return history
