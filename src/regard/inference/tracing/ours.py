"""The trace of our models: hooks at every `Attend`. `regard.weights` computes the weights a second time, for the chosen
rows and heads only; the model computes exactly as without a trace."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.core.attention import weights
from regard.core.calls.call import ordered
from regard.core.masks.structure import structure_of
from regard.core.paths.exact import choose_scores
from regard.core.tensors import fitted, weighs_tokens
from regard.core.user_code import runs_user_code
from regard.inference.histories import Histories, WholeCall
from regard.inference.interventions.change import Changed, call_shape, changes_of
from regard.inference.interventions.ours import changed_weights
from regard.inference.tracing.gather import Met, Recorder
from regard.models.layers.attention import Attend
from regard.models.layers.block import Stack


def find(model: nn.Module) -> tuple[dict[nn.Module, str], list[nn.Module]]:
    """The attention modules of a model with their paths, and the modules at which a pass begins."""
    attentions: dict[nn.Module, str] = {m: name for name, m in model.named_modules() if isinstance(m, Attend)}
    return attentions, [module for module in model.modules() if isinstance(module, Stack)]


class Adapter:
    """Reports every run of our attention modules to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.histories = recorder, Histories()

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks at every attention of a model."""
        attentions = (module for module in model.modules() if isinstance(module, Attend))
        return [module.register_forward_hook(self.after, with_kwargs=True) for module in attentions]

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record one run."""
        assert isinstance(module, Attend)
        self.recorder.enter(module)
        call = self.histories.whole(module, args, kwargs, output[1])
        self.recorder.meet(module, met(call, changes_of(module, call_shape(call.q, call.k, call.first))))


def met(call: WholeCall, changes: list[Changed]) -> Met:
    """One run of a mechanism, for a recorder; `changes` are those of `regard.intervene`."""
    kind, mechanism, q, k, v, bias = call.kind, call.mechanism, call.q, call.k, call.v, call.bias
    rule = ordered(mechanism, call.rule)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if not weighs_tokens(mechanism, q.shape[3]):
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
    added = None if bias is None else bias.expand(batch, heads, queries, keys)

    def see(rows: list[int] | None, chosen: list[int] | None) -> Tensor | None:
        places = torch.arange(queries) if rows is None else torch.tensor(rows, dtype=torch.long)
        seen = None
        if rule is not None:
            seen = rule.at(batch, heads, places + keys - queries, torch.arange(keys), q.device)
            seen = seen if chosen is None or seen.shape[1] == 1 else seen[:, chosen]
        reachable = None if added is None else choose_scores(added, rows, chosen) != -torch.inf
        if reachable is None or bool(reachable.all()):
            return seen
        return reachable if seen is None else seen & reachable

    def score(rows: list[int] | None, chosen: list[int] | None) -> Tensor | None:
        computed = None if runs_user_code(mechanism) else chosen  # a user's formula may treat heads differently
        wanted = choose_scores(q, rows, computed)
        shared = k if computed is None else k[:, [head // (heads // k.shape[1]) for head in computed]]
        extra = None if added is None else choose_scores(added, rows, computed)
        scores, seen = fitted(mechanism, q.dtype).trace_scores(wanted, shared, extra), see(rows, chosen)
        if scores is None:
            return None
        scores = scores if computed is chosen else choose_scores(scores, None, chosen)
        return (scores if seen is None else scores.masked_fill(~seen, mechanism.hidden_score)).to(q.dtype)

    structure = structure_of(rule, queries, keys)
    return Met(
        kind=kind,
        mechanism=repr(mechanism),
        q=q,
        k=k,
        v=v,
        weigh=lambda rows, chosen: changed_weights(call, changes, rows, chosen),
        score=score,
        see=see,
        real=structure.valid(keys, q.device),
        causal=kind == "self" and (structure.causal or queries == 1),
        hidden_score=mechanism.hidden_score,
    )
