"""The trace of Hugging Face models, through transformers' AttentionInterface.

During a trace the model's attention implementation is "eager", and under that name the interface has a function of
ours, which calls the model's eager function and records what it computed. Everything else is as in eager attention,
masks included, so the outputs are exactly those of eager attention.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from threading import RLock
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard.inference.interventions.change import call_shape, changes_of
from regard.inference.interventions.huggingface import EagerCall, real_keys, visible_pairs
from regard.inference.tracing.definition import Definition
from regard.inference.tracing.gather import Map, Met, Readers, Recorder
from regard.inference.tracing.projections import by_head, their_projection
from regard.inference.tracing.record import Kind

SOURCES = ("key_value_states", "encoder_hidden_states", "context_hidden_states", "context")
"""Arguments of attention modules for the other sequence, in cross-attention."""
ALWAYS_CROSS = "cross_attention_states"
"""The argument of modules that are cross-attention only: later passes leave it out, since the cache has the keys."""
PAIRS = (("query", "key"), ("queries", "keys"))
"""Arguments for queries and keys where a module gets both: the same tensor in self-attention."""

_TRACED: dict[nn.Module, list["Adapter | None"]] = {}
"""The modules whose attention goes through `_attend`, and who records it; None if it is only changed."""
_CALLS: dict[nn.Module, "ModuleCall"] = {}
"""What is known of the run that each of these modules is in."""
_UPCASTING: set[nn.Module] = set()
_LOCK = RLock()


def find(model: nn.Module) -> tuple[dict[nn.Module, str], list[nn.Module]]:
    """The attention modules of a model with their paths, and the modules at which a pass begins."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return {}, []
    starters = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    if not starters:
        return {}, []
    attentions = {module: name for name, module in model.named_modules() if eager_of(module) is not None}
    # Recording only a part of the attention would look like all of it.
    aside = [
        type(starter).__name__
        for starter in starters
        if not _uses_interface(type(starter), transformers.PreTrainedModel)
    ]
    aside += [type(module).__name__ for module in model.modules() if _computes_alone(module)]
    if aside or not attentions:
        raise ValueError(
            f"model: expected attention that goes through transformers' AttentionInterface, "
            f"got {aside[0] if aside else type(model).__name__}, which computes it in another way"
        )
    return attentions, starters


def _uses_interface(kind: type, base: type) -> bool:
    """Whether a model class, or one it inherits from, uses the interface, which transformers reads from its source."""
    owners: list[Any] = [owner for owner in kind.__mro__ if issubclass(owner, base) and owner is not base]
    return any(owner._can_set_attn_implementation() for owner in owners)


def eager_of(module: nn.Module) -> Any:
    """The eager attention function that a module falls back to; None if it does not use the interface."""
    kind: Any = type(module)
    return _eager_of(kind)


@lru_cache(maxsize=1024)
def _eager_of(kind: Any) -> Any:
    # The name that the module's code refers to: some files have several eager functions, others inherit from other
    # files.
    for method in _methods(kind):
        for name in method.__code__.co_names:
            if name.endswith("eager_attention_forward") and "get_interface" in method.__code__.co_names:
                return method.__globals__[name]
    return None


def _methods(kind: type) -> Iterator[FunctionType]:
    """The functions of a class and its bases, without their decorators."""
    for owner in kind.__mro__:
        for method in vars(owner).values():
            plain = inspect.unwrap(method) if callable(method) else None
            if isinstance(plain, FunctionType):
                yield plain


def _computes_alone(module: nn.Module) -> bool:
    """Whether an attention module computes its softmax itself, without the interface."""
    kind = type(module)
    if "Attention" not in kind.__name__ or kind.__module__.startswith("torch.") or eager_of(module) is not None:
        return False
    return any("softmax" in method.__code__.co_names for method in _methods(kind))


@dataclass(frozen=True)
class ModuleCall:
    """What the arguments of an attention module say of its run."""

    kind: Kind
    packed: bool = False
    """Whether the batch is several sequences in one row, which attend one after another."""
    past: int | None = None
    """How many tokens the KV cache has already; None without a cache."""

    def extent(self, queries: int, keys: int) -> tuple[int, int]:
        """The position of the first key, and how many keys at the end are room in a static cache."""
        end = keys if self.past is None or self.kind == "cross" else self.past + queries
        return max(0, end - keys), max(0, keys - end)


def module_call(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> ModuleCall:
    """What the arguments say: cross-attention is attention to another sequence, whatever a module is called."""
    parameters = inspect.signature(type(module).forward)
    arguments = parameters.bind_partial(module, *args, **(kwargs or {})).arguments
    arguments = {**arguments, **arguments.get("kwargs", {})}
    crosses = getattr(module, "is_cross_attention", False) or ALWAYS_CROSS in parameters.parameters
    sources = [source for name in SOURCES if (source := arguments.get(name)) is not None]
    crosses = crosses or any(source is not arguments.get("hidden_states") for source in sources)
    crosses = crosses or any(arguments.get(queries) is not arguments.get(keys) for queries, keys in PAIRS)
    cache: Any = arguments.get("past_key_values")
    past = None
    if not crosses and hasattr(cache, "get_seq_length"):
        past = int(cache.get_seq_length(getattr(module, "layer_idx", None) or 0))
    return ModuleCall("cross" if crosses else "self", arguments.get("cu_seqlens") is not None, past)


def _begin_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _CALLS[module] = module_call(module, args, kwargs)


@contextmanager
def eager(model: nn.Module, attentions: Sequence[nn.Module], adapter: "Adapter | None" = None) -> Iterator[None]:
    """Set the model's attention to eager, and eager to `_attend`; both are restored at the end, also after an error."""
    interface = sys.modules["transformers"].AttentionInterface
    configs = {id(config): config for module in model.modules() for config in _configs(getattr(module, "config", None))}
    before = {key: config._attn_implementation for key, config in configs.items()}
    # GPT-2's upcast form does not use the interface: it is switched off, and `_attend` computes it instead.
    apart: list[Any] = [module for module in attentions if getattr(module, "reorder_and_upcast_attn", False)]
    with _LOCK:
        _UPCASTING.update(apart)
        for module in attentions:
            _TRACED.setdefault(module, []).append(adapter)
        handles = [module.register_forward_pre_hook(_begin_call, with_kwargs=True) for module in attentions]
        interface.register("eager", _attend)
    try:
        for config in configs.values():
            config._attn_implementation_internal = "eager"  # the public attribute would also set sub-configs
        for module in apart:
            module.reorder_and_upcast_attn = False
        yield
    finally:
        for module in apart:
            module.reorder_and_upcast_attn = True
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]
        for handle in handles:
            handle.remove()
        with _LOCK:
            _UPCASTING.difference_update(apart)
            for module in attentions:
                _TRACED[module].remove(adapter)
                if not _TRACED[module]:
                    del _TRACED[module]
                    _CALLS.pop(module, None)
            if not _TRACED:
                interface._global_mapping.pop("eager", None)


def _configs(config: Any) -> Iterator[Any]:
    """A config and the configs in it."""
    if not isinstance(config, sys.modules["transformers"].PreTrainedConfig):
        return
    yield config
    for name in config.sub_configs:
        yield from _configs(getattr(config, name, None))


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """The module's eager attention, recorded if the module is traced."""
    forward = eager_of(module)
    if module in _UPCASTING:
        forward, args, kwargs = _upcast, (), {}
    of_module = _CALLS.get(module) or module_call(module)
    parts = changes_of(module, call_shape(query, key, *of_module.extent(query.shape[2], key.shape[2])))
    traced = [adapter for adapter in _TRACED.get(module, ()) if adapter is not None]
    adapters = [adapter for adapter in traced if adapter.wants(module)]
    if not any("scores" in adapter.recorder.chosen.keep for adapter in adapters):
        out, weights = forward(module, query, key, value, attention_mask, *args, **kwargs)
        scores = None
    else:
        with _SoftmaxInputs() as inputs:
            out, weights = forward(module, query, key, value, attention_mask, *args, **kwargs)
        scores = inputs.scores
    undropped = weights
    if adapters and module.training and kwargs.get("dropout"):
        with torch.no_grad():
            _, undropped = forward(module, query, key, value, attention_mask, *args, **{**kwargs, "dropout": 0.0})
    if parts:
        call = EagerCall(
            module, of_module.kind, of_module.past, forward, query, key, value, attention_mask, args, kwargs
        )
        undisturbed = replace(call, kwargs={**kwargs, "dropout": 0.0})
        same = undropped is weights
        out, weights = call.changed(out, weights, parts)
        undropped = weights if same else undisturbed.changed(out, undropped, parts)[1]
    for adapter in traced:
        adapter.meet(
            module, of_module, query, key, value, attention_mask, undropped, scores, out.transpose(1, 2), kwargs
        )
    return out, weights


def _upcast(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Any:
    return module._upcast_and_reordered_attn(query, key, value, attention_mask)


class _SoftmaxInputs(TorchFunctionMode):
    """Keeps the input of softmax: the scores, with everything that a model adds to them."""

    scores: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            self.scores = args[0] if args else kwargs["input"]
        return func(*args, **(kwargs or {}))


class Adapter:
    """Reports every run of a Hugging Face model's attention modules to a recorder."""

    def __init__(self, recorder: Recorder, model: nn.Module, attentions: dict[nn.Module, str]) -> None:
        self.recorder, self.model, self.attentions = recorder, model, list(attentions)
        self._entered: set[nn.Module] = set()
        self._last: tuple[Any, int, int] = (None, 0, 0)
        self._masked_last = Seen()
        self._outputs: dict[nn.Module, list[Tensor]] = {}
        """What each module's heads gave in its run, (B, T, H · V), until their projection reads it."""
        self.projections: dict[nn.Module, nn.Module | None] = {}
        if "outputs" in recorder.chosen.keep:
            self.projections = {module: their_projection(model, path) for module, path in attentions.items()}

    def attach(self) -> list[Any]:
        """Hooks at every attention module, and where the model reads tokens and pictures."""
        handles = [module.register_forward_pre_hook(self.before) for module in self.attentions]
        for module, projection in self.projections.items():
            if projection is not None:
                handles.append(projection.register_forward_pre_hook(self._checked(module)))
        for module in self.model.modules():
            if isinstance(module, nn.Conv2d) and module.kernel_size == module.stride != (1, 1):
                handles.append(module.register_forward_hook(self._see_map))
        handles += [table.register_forward_pre_hook(self._read) for table in token_tables(self.model)]
        return handles

    def _checked(self, attention: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Some models gate or norm the heads before the projection: then it does not tell what a head adds."""

        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            outputs = self._outputs.pop(attention, [])
            together = torch.cat(outputs, 1) if outputs else torch.empty(0)
            read = args[0].detach() if args else torch.empty(1)
            if read.numel() != together.numel() or not torch.equal(read.reshape(together.shape), together):
                self.projections[attention] = None

        return before

    def _read(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        ids = args[0] if args else None
        if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
            self.recorder.read(ids)

    def _see_map(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.recorder.see_map((output.shape[-2], output.shape[-1]))

    def before(self, module: nn.Module, args: tuple[Any, ...] = ()) -> None:
        """Number the run."""
        self.recorder.enter(module)
        self._entered.add(module)
        self._outputs.pop(module, None)

    def wants(self, module: nn.Module) -> bool:
        """Whether the module's run is recorded."""
        if module not in self._entered:  # its forward was called without its hooks
            self.before(module)
        return self.recorder.wants(module)

    def meet(
        self,
        module: nn.Module,
        call: ModuleCall,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        weights: Any,
        scores: Tensor | None,
        out: Tensor,
        options: dict[str, Any],
    ) -> None:
        """Record one run; `options` are those of the eager function."""
        kind, about = call.kind, self._masked(mask, q, k)
        seen = about.visible
        if self.projections.get(module) is not None:
            self._outputs.setdefault(module, []).append(out.detach().transpose(1, 2).flatten(2))
        grid = self.recorder.grid
        patches = grid is not None and kind == "self" and k.shape[2] >= grid[0] * grid[1]

        def pick(whole: Tensor | None, rows: list[int] | None, heads: list[int] | None) -> Tensor | None:
            if whole is None:
                return None
            whole = whole if heads is None or whole.shape[1] == 1 else whole[:, heads]
            return whole if rows is None or whole.shape[2] == 1 else whole[:, :, rows]

        def weigh(rows: list[int] | None, heads: list[int] | None) -> Tensor:
            full = (*q.shape[:3], k.shape[2])
            if not isinstance(weights, Tensor) or tuple(weights.shape) != full:
                got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
                raise ValueError(f"model: expected weights {full} of {type(module).__name__}, got {got}")
            picked = pick(weights, rows, heads)
            assert picked is not None
            return picked

        def score(rows: list[int] | None, heads: list[int] | None) -> Tensor | None:
            if scores is None or scores.shape[:3] != q.shape[:3]:
                raise ValueError(f"keep: expected no scores of {type(module).__name__}, which has no softmax of them")
            picked, visible = pick(scores[..., : k.shape[2]], rows, heads), pick(seen, rows, heads)
            return picked if picked is None or visible is None else picked.masked_fill(~visible, -torch.inf)

        self.recorder.meet(
            module,
            Met(
                kind=kind,
                mechanism=type(module).__name__,
                definition=_definition(module, q, options, about.biased),
                q=q,
                k=k,
                v=v,
                weigh=weigh,
                score=score,
                see=lambda rows, heads: pick(seen, rows, heads),
                real=about.real,
                causal=about.causal and kind == "self",
                outputs=out,
                project=lambda heads: by_head(self.projections.get(module), q.shape[1], out.shape[3], heads),
                map=Map(grid) if grid is not None and patches else None,
            ),
            packed=call.packed,
        )

    def _masked(self, mask: Any, q: Tensor, k: Tensor) -> "Seen":
        """What a mask says; computed once per mask."""
        queries, keys = q.shape[2], k.shape[2]
        if not isinstance(mask, Tensor):
            return Seen(causal=queries == 1)
        if self._last[0] is not mask or self._last[1:] != (queries, keys):
            seen = visible_pairs(mask, keys)
            assert seen is not None
            after = torch.ones(queries, keys, dtype=torch.bool, device=seen.device).triu(keys - queries + 1)
            real = real_keys(seen, q.shape[0])
            self._last = mask, queries, keys
            self._masked_last = Seen(
                None if bool(seen.all()) else seen,
                None if bool(real.all()) else real,
                not bool((seen & after).any()),
                mask.is_floating_point() and bool((mask.masked_select(seen) != 0).any()),
            )
        return self._masked_last


@dataclass(frozen=True, eq=False)
class Seen:
    """What a mask of transformers says."""

    visible: Tensor | None = None
    """Which pairs it shows; None if all."""
    real: Tensor | None = None
    """Which keys are not padding; None if all."""
    causal: bool = False
    biased: bool = False
    """Whether it also adds to the scores of visible pairs, as ALiBi does."""


def _definition(module: nn.Module, q: Tensor, options: dict[str, Any], biased: bool) -> Definition:
    """How eager attention makes weights, by its options."""
    scale, bias = options.get("scaling", getattr(module, "scaling", None)), options.get("position_bias")
    biased = biased or (isinstance(bias, Tensor) and bool((bias != 0).any()))
    window = options.get("sliding_window")
    return Definition(
        name="Softmax",
        scale=float(q.shape[3] ** -0.5 if scale is None else scale),
        softcap=options.get("softcap"),
        bias=biased,
        options={"sliding_window": window} if isinstance(window, int) else {},
    )


def token_tables(model: nn.Module) -> list[nn.Module]:
    """The embeddings of token ids."""
    tables = []
    for module in model.modules():
        if isinstance(module, sys.modules["transformers"].PreTrainedModel):
            try:
                tables.append(module.get_input_embeddings())
            except NotImplementedError:  # it has several, or none
                continue
    return list(dict.fromkeys(table for table in tables if isinstance(table, nn.Module)))


def readers(model: nn.Module) -> Readers:
    """What the Hugging Face models in a module read and predict."""
    kind = sys.modules["transformers"].PreTrainedModel
    models: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    pairs = [(module, module.get_encoder()) for module in models if getattr(module.config, "is_encoder_decoder", False)]
    configs = [module.config for module in models]
    names: dict[int, str] = next((labels for config in configs if (labels := getattr(config, "id2label", None))), {})
    classifies = all(getattr(config, "vocab_size", None) != len(names) for config in configs)
    return Readers(
        num_classes=len(names) if classifies else None,
        name_classes=lambda ids: [str(names.get(number, number)) for number in ids],
        logits=dict.fromkeys(models, _logits),
        # A decoder by itself says that it is its encoder.
        sources=frozenset(encoder for module, encoder in pairs if encoder is not module),
    )


def _logits(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim in (2, 3) else None
