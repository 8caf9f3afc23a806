"""What a page knows of an attention layer besides its weights: its mechanism as a value, its bias, whose tokens its
queries and keys are."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.core.families.mechanism import Mechanism
from regard.core.families.scores import ScoreMechanism
from regard.core.mechanisms import REGISTRY, Softmax
from regard.explorer.changes import WindowedSoftmax
from regard.inference.trace import TracedLayer
from regard.inference.tracing import huggingface, ours
from regard.models.base import Model
from regard.models.layers.attention import Attend

RELATIVE = "relative_attention_num_buckets"
"""What the configs of Hugging Face models with T5's bias have."""
ARGUMENTS = inspect.signature(Attend.forward)
Owner = Literal["tokens", "sources", "channels"]
"""What the rows or the columns of a table of weights stand for."""
TITLES = {
    "softmax": ("Softmax", "exp(β q·k) / Σ exp(β q·k)"),
    "softcap": ("Softmax, soft-capped", "softmax of c tanh(β q·k / c)"),
    "argmax": ("Argmax", "1 on the largest q·k"),
    "uniform": ("Uniform", "1 / visible keys"),
    "quadratic": ("Quadratic kernel", "(q·k + c)² / Σ (q·k + c)²"),
    "polynomial": ("Polynomial kernel", "(q·k + c)ⁿ / Σ (q·k + c)ⁿ"),
    "elu": ("Linear attention, elu + 1", "φ(q)·φ(k) / Σ φ(q)·φ(k),  φ(x) = elu(x) + 1"),
    "taylor": ("Taylor kernel", "(1 + s + s²/2) / Σ,  s = q·k / √K"),
    "random-features": ("Random features", "φ(q)·φ(k) / Σ φ(q)·φ(k),  φ random"),
    "retention": ("Retention", "γ^(t−s) q·k / √K"),
    "gated": ("Gated linear attention", "(q ⊙ gates between s and t)·k / √K"),
    "delta": ("Delta rule", "q · Π (I − r k kᵀ) k r / √K"),
    "window": ("Softmax within a window", "softmax over |t − s| ≤ window"),
}
"""Titles and formulas of mechanisms, by their names in the registry."""


@dataclass(frozen=True, eq=False)
class AttentionRun:
    """One run of an attention module of ours: its mechanism, with tensors and functions that it has, and its bias."""

    mechanism: Mechanism
    bias: Float[Tensor, "..."] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """An attention layer of a pass, as a page shows it."""

    traced: TracedLayer
    mechanism: Mechanism | None
    """None for a trace without its model."""
    bias: Float[Tensor, "..."] | None
    """Added to the scores, broadcastable to (1, H, T, S); None without one, and where nothing is known of it."""
    side: Literal["decoder", "encoder"]
    queries: Owner
    keys: Owner
    window: int | None = None
    """The window of a picture that is shown; None for a layer without windows."""

    def at_window(self, window: int | None) -> "LayerView":
        """The same layer with another of its windows; itself for None."""
        if window is None:
            return self
        down, across = self.traced.windows or (0, 0)
        if window >= down * across:
            raise ValueError(
                f"window: expected a number below {down * across} in layer {self.traced.index}, got {window}"
            )
        return replace(self, window=window)

    def _alone(self, tensor: Tensor) -> Float[Tensor, "H N D"]:
        """The part of the first sequence, and of the window that is shown."""
        if self.traced.windows is None:
            return tensor[0]
        return tensor[0, self.window if tensor.shape[1] > 1 else 0]

    @property
    def weights(self) -> Float[Tensor, "H T S"]:
        """The weights of the first sequence."""
        return self._alone(self.traced.need("weights"))

    @property
    def heads(self) -> int:
        return self.weights.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.heads if self.traced.keys is None else self._alone(self.traced.keys).shape[0]

    @property
    def qk_length(self) -> int | None:
        """The head dimension; None if the trace has no queries."""
        return None if self.traced.queries is None else self.traced.queries.shape[-1]

    @property
    def visible(self) -> Bool[Tensor, "..."] | None:
        """Which pairs the mask shows, (1 or H, T, S); None if all."""
        layer = self.traced
        if not layer.by_pairs:
            return None
        visible = None if layer.visible is None else self._alone(layer.visible).expand(-1, *self.weights.shape[1:])
        if layer.real is None:
            return visible
        real = layer.real[:1, None].expand(1, *self.weights.shape[1:])
        return real if visible is None else visible & real

    def query(self, head: int) -> Float[Tensor, "T K"]:
        """The queries of a head."""
        return self._alone(self.traced.need("queries"))[head]

    def key(self, head: int) -> Float[Tensor, "S K"]:
        """The keys that a head reads."""
        return self._alone(self.traced.need("keys"))[head // (self.heads // self.kv_heads)]

    def value(self, head: int) -> Float[Tensor, "S V"]:
        """The values that a head reads."""
        return self._alone(self.traced.need("values"))[head // (self.heads // self.kv_heads)]

    def head_bias(self, head: int) -> Float[Tensor, "T S"] | None:
        """The bias of a head's scores."""
        if self.bias is None:
            return None
        whole = self.bias.expand(1, self.heads, *self.weights.shape[1:])
        return whole[0, head]

    def to_json(self) -> dict[str, Any]:
        """The layer without its numbers."""
        layer = self.traced
        return {
            "index": layer.index,
            "name": layer.name,
            "kind": layer.kind,
            "side": self.side,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "qk_length": self.qk_length,
            "rows": self.weights.shape[1],
            "columns": self.weights.shape[2],
            "queries": self.queries,
            "keys": self.keys,
            "grid": layer.grid,
            "windows": layer.windows,
            "window": self.window,
            "causal": layer.causal or (self.mechanism is not None and self.mechanism.ordered),
            "mechanism": self.mechanism_json(self.mechanism),
        }

    def mechanism_json(self, mechanism: Mechanism | None) -> dict[str, Any]:
        """A mechanism of this layer as a page shows it."""
        if mechanism is None or self.qk_length is None:
            text = self.traced.mechanism
            unknown = dict.fromkeys(("formula", "family", "scale", "softcap"))
            return {"name": text, "title": text, **unknown, "bias": False, "fields": {}, "text": text}
        return mechanism_json(mechanism, self.qk_length, self.bias is not None)


def mechanism_json(mechanism: Mechanism, qk_length: int, bias: bool = False) -> dict[str, Any]:
    """A mechanism as a page shows it: its name, title and formula, scale, softcap, and its other fields.

    >>> import regard as rg
    >>> described = mechanism_json(rg.Softmax(), 16)
    >>> described["name"], described["scale"], described["family"]
    ('softmax', 0.25, 'softmax')
    """
    name = next((name for name, shipped in REGISTRY.items() if shipped == mechanism), None)
    if isinstance(mechanism, WindowedSoftmax):
        name = "window"
    elif name is None:  # other numbers than the shipped mechanism's
        same = (name for name, shipped in REGISTRY.items() if type(shipped) is type(mechanism))
        name = next(same, type(mechanism).__name__)
    title, formula = TITLES.get(name, (type(mechanism).__name__, repr(mechanism)))
    if isinstance(mechanism, Softmax) and mechanism.softcap is None and name == "softcap":
        title, formula = TITLES["softmax"]
    plain = {
        entry.name: value
        for entry in fields(mechanism)
        if isinstance(value := getattr(mechanism, entry.name), bool | int | float | str)
    }
    scale: float | None = qk_length**-0.5 if mechanism.ordered else None
    if isinstance(mechanism, Softmax):
        scale = plain.get("beta", qk_length**-0.5)
    elif isinstance(mechanism, ScoreMechanism):
        scale = mechanism.scale(qk_length)
    return {
        "name": name,
        "title": title,
        "formula": formula,
        "family": family(mechanism),
        "scale": "inf" if scale == math.inf else scale,
        "softcap": plain.get("softcap"),
        "bias": bias,
        "fields": {key: "inf" if value == math.inf else value for key, value in plain.items()},
        "text": repr(mechanism),
    }


def family(mechanism: Mechanism) -> Literal["softmax", "similarity", "recurrent", "channel"]:
    """How a mechanism makes its weights.

    >>> import regard as rg
    >>> [family(m) for m in (rg.Softmax(), rg.Quadratic(), rg.Retention(), rg.Channel())]
    ['softmax', 'similarity', 'recurrent', 'channel']
    """
    from regard.core.families.channels import ChannelMechanism

    if isinstance(mechanism, ScoreMechanism):
        return "softmax"
    if isinstance(mechanism, ChannelMechanism):
        return "channel"
    return "recurrent" if mechanism.ordered else "similarity"


@contextmanager
def watched(model: nn.Module, check: Callable[[], None]) -> Iterator[dict[str, list[AttentionRun]]]:
    """The runs of every attention module of ours, by its path, while the context lasts. `check` is called at each of
    any model, and may raise to stop the pass.

    A trace's definition has a mechanism's name and numbers; to compute a weight again takes the mechanism itself, with
    its tensors and functions, and the bias."""
    attentions, _ = ours.find(model)
    theirs, _ = huggingface.find(model)
    runs: dict[str, list[AttentionRun]] = {}

    def before_ours(module: nn.Module, args: Any, kwargs: Any) -> None:
        check()
        assert isinstance(module, Attend)
        bias = ARGUMENTS.bind(module, *args, **kwargs).arguments.get("bias")
        runs.setdefault(attentions[module], []).append(AttentionRun(module.mechanism, bias))

    with ExitStack() as stack:
        for module in attentions:
            stack.callback(module.register_forward_pre_hook(before_ours, with_kwargs=True).remove)
        for module in theirs:
            stack.callback(module.register_forward_pre_hook(lambda module, args: check()).remove)
        yield runs


def kept(model: nn.Module) -> tuple[str, ...]:
    """What a page needs of a model's layers. Scores are as large as weights: only where nothing else has the bias."""
    biased = not isinstance(model, Model) and hasattr(getattr(model, "config", None), RELATIVE)
    return ("weights", "queries", "keys", "values", "outputs", *(("scores",) if biased else ()))


def layer_views(
    layers: Iterable[TracedLayer], runs: Mapping[str, list[AttentionRun]], two_sided: bool
) -> list[LayerView]:
    """The layers of a pass with what ran in them; `two_sided` if an encoder reads another sequence."""
    left = {name: iter(several) for name, several in runs.items()}
    views = []
    for layer in layers:
        run = next(left[layer.name]) if layer.name in left else None
        encoder = two_sided and "encoder" in layer.name.split(".")
        own_tokens: Owner = "sources" if encoder else "tokens"
        queries: Owner = own_tokens if layer.by_pairs else "channels"
        keys: Owner = "sources" if layer.kind == "cross" else queries
        mechanism = _softmax_of(layer) if run is None else run.mechanism
        views.append(
            LayerView(
                traced=replace(layer, scores=None),
                mechanism=mechanism,
                bias=_bias_of(layer, mechanism) if run is None else run.bias,
                side="encoder" if encoder else "decoder",
                queries=queries,
                keys=keys,
                window=None if layer.windows is None else _middle(layer.windows),
            )
        )
    return views


def _middle(windows: tuple[int, int]) -> int:
    """The window in the middle of a picture: the one that is shown first, since corners have the least to see."""
    down, across = windows
    return down // 2 * across + across // 2


def _softmax_of(layer: TracedLayer) -> Softmax | None:
    """Softmax as a layer's definition has it; None for another mechanism, of which a definition says too little."""
    definition = layer.definition
    if definition is None or definition.name != "Softmax" or layer.queries is None:
        return None
    return Softmax(beta=definition.scale, softcap=definition.softcap)


def _bias_of(layer: TracedLayer, mechanism: Mechanism | None) -> Float[Tensor, "1 H T S"] | None:
    """What was added to the scores of a Hugging Face model, as T5's bias: the rest of its recorded scores."""
    if layer.scores is None or layer.definition is None or not layer.definition.bias or mechanism is None:
        return None
    q, k = layer.need("queries")[:1].double(), layer.need("keys")[:1].double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    assert isinstance(mechanism, Softmax)
    before = mechanism.score(q, k) * mechanism.scale(q.shape[-1])
    return (layer.scores[:1] - before).masked_fill(layer.scores[:1] == -math.inf, 0).float()


def no_check() -> None:
    """A check that never stops a pass."""


def scale_of(mechanism: Mechanism | None, qk_length: int) -> float:
    """The factor on products of queries and keys: beta of softmax, 1/sqrt(K) where a mechanism has none.

    >>> import regard as rg
    >>> scale_of(rg.Softmax(beta=2.0), 16), scale_of(rg.Quadratic(), 16)
    (2.0, 0.25)
    """
    if isinstance(mechanism, Softmax) and mechanism.beta is not None:
        return float(mechanism.beta)
    return qk_length**-0.5


def products(view: LayerView, head: int) -> Float[Tensor, "T S"]:
    """q·k of every pair of a head, in float64 and rounded once: what softmax scales."""
    return (view.query(head).double() @ view.key(head).double().T).to(torch.float32)
