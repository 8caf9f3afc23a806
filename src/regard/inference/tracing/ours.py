"""The trace of our models: hooks at every `Attend`. `regard.weights` computes the weights a second time, for the chosen
rows and heads only; the model computes exactly as without a trace."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

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
from regard.inference.tracing.definition import definition_of
from regard.inference.tracing.gather import Map, Met, Readers, Recorder
from regard.inference.tracing.projections import by_head, our_projections
from regard.models.base import GenerativeModel, ImageModel, TextModel
from regard.models.layers.attention import Attend, MultiHeadAttention
from regard.models.layers.block import Stack


def find(model: nn.Module) -> tuple[dict[nn.Module, str], list[nn.Module]]:
    """The attention modules of a model with their paths, and the modules at which a pass begins."""
    attentions: dict[nn.Module, str] = {m: name for name, m in model.named_modules() if isinstance(m, Attend)}
    return attentions, [module for module in model.modules() if isinstance(module, Stack)]


def readers(model: nn.Module) -> Readers:
    """What our models in a module read and predict."""
    logits: dict[nn.Module, Callable[[Any], Tensor | None]] = {}
    heads: dict[nn.Module, Callable[[Tensor], Tensor | None]] = {}
    sources, name_classes = set[nn.Module](), None
    for module in model.modules():
        if isinstance(module, TextModel):
            heads[module.output_stack] = module.vocabulary_logits
            if isinstance(module, GenerativeModel):
                logits[module] = _of_positions
            if (source := module.source_stack) is not None:
                sources.add(source)
        elif isinstance(module, ImageModel) and module.config.num_classes:
            logits[module] = _of_classes
            name_classes = _class_names(module.config.class_names)
    return Readers(name_classes=name_classes, logits=logits, heads=heads, sources=frozenset(sources))


def _of_positions(output: Any) -> Tensor | None:
    """Logits of a whole pass; not those of chosen positions, (N, D), since their places are unknown here."""
    return output if isinstance(output, Tensor) and output.ndim == 3 else None


def _of_classes(output: Any) -> Tensor | None:
    return output if isinstance(output, Tensor) and output.ndim == 2 else None


def _class_names(names: tuple[str, ...]) -> Callable[[list[int]], list[str]]:
    return lambda ids: [names[number] if number < len(names) else str(number) for number in ids]


@runtime_checkable
class MapReader(Protocol):
    """A module that attends over a picture's map, whole or in windows, as DaViT's halves do."""

    attention: MultiHeadAttention

    def window_counts(self, height: int, width: int) -> tuple[int, int] | None:
        """How many windows a map is cut into, down and across; None if it is not."""


class Adapter:
    """Reports every run of our attention modules to a recorder."""

    def __init__(self, recorder: Recorder, model: nn.Module) -> None:
        self.recorder, self.histories = recorder, Histories()
        self.projections, self.maps = our_projections(model), dict[nn.Module, Map]()

    def attach(self, model: nn.Module) -> list[Any]:
        """Hooks at every attention of a model, and where it reads tokens and maps."""
        handles = []
        for module in model.modules():
            if isinstance(module, Attend):
                handles.append(module.register_forward_hook(self.after, with_kwargs=True))
            elif isinstance(module, TextModel):
                for table in module.token_tables:
                    handles.append(table.register_forward_pre_hook(self._read))
            elif isinstance(module, MapReader):
                handles.append(module.register_forward_pre_hook(self._see_map))
            elif isinstance(module, ImageModel) and (grid := module.token_grid) is not None:
                self.maps |= {inner: Map(grid) for inner in module.modules() if isinstance(inner, Attend)}
        return handles

    def _read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.recorder.read(args[0])

    def _see_map(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, MapReader)
        grid = args[0].shape[2], args[0].shape[3]
        self.maps[module.attention.attend] = Map(grid, module.window_counts(*grid))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record one run."""
        assert isinstance(module, Attend)
        self.recorder.enter(module)
        call = self.histories.whole(module, args, kwargs, output[1])
        changes = changes_of(module, call_shape(call.q, call.k, call.first))
        run = met(call, changes, output[0], self.projections.get(module), self.maps.get(module))
        self.recorder.meet(module, run)


def met(
    call: WholeCall, changes: list[Changed], out: Tensor, projection: nn.Module | None, map: Map | None = None
) -> Met:
    """One run of a mechanism, for a recorder; `changes` are those of `regard.intervene`."""
    kind, mechanism, q, k, v, bias = call.kind, call.mechanism, call.q, call.k, call.v, call.bias
    facts: dict[str, Any] = {
        "kind": kind,
        "mechanism": repr(mechanism),
        "definition": definition_of(mechanism, q.shape[3], bias=bias is not None),
        "q": q,
        "k": k,
        "v": v,
        "outputs": out,
        "project": lambda chosen: by_head(projection, q.shape[1], out.shape[3], chosen),
        "map": map,
    }
    rule = ordered(mechanism, call.rule)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if not weighs_tokens(mechanism, q.shape[3]):
        return Met(
            **facts,
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
        **facts,
        weigh=lambda rows, chosen: changed_weights(call, changes, rows, chosen),
        score=score,
        see=see,
        real=structure.valid(keys, q.device),
        causal=kind == "self" and (structure.causal or queries == 1),
        hidden_score=mechanism.hidden_score,
    )
