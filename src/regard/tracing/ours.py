"""The trace of our own models: hooks at every `Attend`. The weights are computed a second time, exactly, by
`regard.weights`, for the chosen rows and heads alone; the model computes as it does without."""

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.attention import weights
from regard.layers.attention import Attend
from regard.layers.block import Stack
from regard.mask import Mask, Padding, as_mask
from regard.mechanism import Mechanism
from regard.mechanisms import Softmax
from regard.state import KernelState, KeyValueState, join_padding
from regard.structure import structure
from regard.tracing.gather import Met, Recorder
from regard.tracing.record import Kind

ARGUMENTS = inspect.signature(Attend.forward)


def find(model: nn.Module) -> tuple[dict[nn.Module, str], list[nn.Module]]:
    """The attention modules of a model with their paths, and the modules at which a pass begins."""
    attentions: dict[nn.Module, str] = {m: name for name, m in model.named_modules() if isinstance(m, Attend)}
    return attentions, [module for module in model.modules() if isinstance(module, Stack)]


class Adapter:
    """Tells a recorder of every run of our attention modules."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.histories: WeakKeyDictionary[KernelState, tuple[Tensor, Tensor]] = WeakKeyDictionary()
        """Keys and values behind a state that holds only their sums."""

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks at every attention of a model."""
        attentions = (module for module in model.modules() if isinstance(module, Attend))
        return [module.register_forward_hook(self.after, with_kwargs=True) for module in attentions]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record one run."""
        assert isinstance(module, Attend)
        given = ARGUMENTS.bind(module, *args, **kwargs).arguments
        q, k, v = given["q"], given["k"], given["v"]
        rule, state = as_mask(given.get("mask")), given.get("state")
        self.recorder.enter(module)
        if state is not None:
            k, v, held = self._history(module, k, v, state, output[1])
            rule = held if rule is None else rule if held is None else rule & held
        kind: Kind = "cross" if given.get("cross") else "self"
        self.recorder.meet(module, met(kind, module.mechanism, q, k, v, rule, given.get("bias")))

    def _history(self, module: Attend, k: Tensor, v: Tensor, state: Any, longer: Any) -> Any:
        """All keys and values up to now, and their padding."""
        if isinstance(longer, KeyValueState):
            keys = longer.keys
            if longer.tainted is not None:  # the state holds zeros in their place
                keys = keys.masked_fill(longer.tainted[..., None], torch.nan)
            return keys, longer.values, longer.padding
        before = self.histories.get(state)
        if before is None:
            if state.folded:
                raise ValueError(
                    f"state: expected one whose tokens all came under the trace, got one with {state.folded} tokens "
                    f"already summed by {module.mechanism!r}; trace from the start of the sequence"
                )
            before = state.recent.keys, state.recent.values
        history = torch.cat([before[0], k.detach()], dim=2), torch.cat([before[1], v.detach()], dim=2)
        self.histories[longer] = history
        return *history, _padding(longer)


def _padding(state: KernelState) -> Padding | None:
    recent = state.recent
    return join_padding(
        state.padding, state.folded, recent.padding, recent.length, state.sums.shape[0], state.sums.device
    )


def met(
    kind: Kind, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None, bias: Tensor | None
) -> Met:
    """One run of a mechanism, for a recorder."""
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if not mechanism.by_pairs:
        return Met(
            kind=kind,
            mechanism=repr(mechanism),
            q=q,
            k=k,
            v=v,
            weigh=lambda rows, chosen: weights(q, k, mechanism, rule, rows=rows, heads=chosen),
            score=lambda rows, chosen: None,
            see=lambda rows, chosen: None,
            by_pairs=False,
        )

    def see(rows: list[int] | None, chosen: list[int] | None) -> Tensor | None:
        places = torch.arange(queries) if rows is None else torch.tensor(rows, dtype=torch.long)
        seen = None
        if rule is not None:
            seen = rule.at(batch, heads, places + keys - queries, torch.arange(keys), q.device)
            seen = seen if chosen is None or seen.shape[1] == 1 else seen[:, chosen]
        reachable = None if bias is None else _rows_heads(bias, q, keys, rows, chosen) != -torch.inf
        if reachable is None or bool(reachable.all()):
            return seen
        return reachable if seen is None else seen & reachable

    def score(rows: list[int] | None, chosen: list[int] | None) -> Tensor | None:
        if type(mechanism).similarity is Mechanism.similarity:  # weights of a user's own making
            return None
        every = range(heads) if chosen is None else chosen
        wanted = q[:, list(every)][:, :, list(range(queries) if rows is None else rows)]
        shared = k if chosen is None else k[:, [head // (heads // k.shape[1]) for head in chosen]]
        found = mechanism.grouped(mechanism.similarity, wanted, shared)
        if isinstance(mechanism, Softmax):
            found = _softmax_scores(mechanism, found, q.shape[3])
            found = found if bias is None else found + _rows_heads(bias, q, keys, rows, chosen)
        seen = see(rows, chosen)
        return (found if seen is None else found.masked_fill(~seen, hidden)).to(q.dtype)

    known, hidden = structure(rule, queries, keys), -torch.inf if isinstance(mechanism, Softmax) else 0.0
    return Met(
        kind=kind,
        mechanism=repr(mechanism),
        q=q,
        k=k,
        v=v,
        weigh=lambda rows, chosen: weights(q, k, mechanism, rule, bias=bias, rows=rows, heads=chosen),
        score=score,
        see=see,
        real=known.valid(keys, q.device),
        causal=kind == "self" and (known.causal or queries == 1),
        hidden_score=hidden,
    )


def _softmax_scores(mechanism: Softmax, plain: Tensor, qk_length: int) -> Tensor:
    beta = qk_length**-0.5 if mechanism.beta is None else mechanism.beta
    if mechanism.hard:  # an infinite scale: the choice is by the plain products
        return plain
    if mechanism.softcap is not None:
        return mechanism.softcap * torch.tanh(plain * (beta / mechanism.softcap))
    return plain * beta


def _rows_heads(bias: Tensor, q: Tensor, keys: int, rows: list[int] | None, heads: list[int] | None) -> Tensor:
    """The chosen rows and heads of what broadcasts to (B, H, T, S)."""
    full = bias.expand(*q.shape[:3], keys)
    full = full if heads is None else full[:, heads]
    return full if rows is None else full[:, :, rows]
