"""What a page knows of an attention layer besides its weights: its mechanism as a value, its bias, whose tokens its
queries and keys are."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
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
from regard.models.layers.attention import Attend, MultiHeadAttention

ARGUMENTS = inspect.signature(Attend.forward)
Owner = Literal["tokens", "sources", "channels"]
"""Whose places rows and columns are."""
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
    """One run of an attention module: the module around it, its mechanism and its bias."""

    module: nn.Module
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
    projection: Float[Tensor, "E HV"] | None
    """The weight of the output projection W_o."""
    side: Literal["decoder", "encoder"]
    queries: Owner
    keys: Owner

    @property
    def weights(self) -> Float[Tensor, "H T S"]:
        """Of the one sequence."""
        return _alone(self.traced.need("weights"))

    @property
    def heads(self) -> int:
        return self.weights.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.heads if self.traced.keys is None else _alone(self.traced.keys).shape[0]

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
        visible = None if layer.visible is None else _alone(layer.visible).expand(-1, *self.weights.shape[1:])
        if layer.real is None:
            return visible
        real = layer.real[:1, None].expand(1, *self.weights.shape[1:])
        return real if visible is None else visible & real

    def query(self, head: int) -> Float[Tensor, "T K"]:
        """The queries of a head."""
        return _alone(self.traced.need("queries"))[head]

    def key(self, head: int) -> Float[Tensor, "S K"]:
        """The keys that a head reads."""
        return _alone(self.traced.need("keys"))[head // (self.heads // self.kv_heads)]

    def value(self, head: int) -> Float[Tensor, "S V"]:
        """The values that a head reads."""
        return _alone(self.traced.need("values"))[head // (self.heads // self.kv_heads)]

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
            "rows": self.weights.shape[1],
            "columns": self.weights.shape[2],
            "queries": self.queries,
            "keys": self.keys,
            "causal": layer.causal or (self.mechanism is not None and self.mechanism.ordered),
            "mechanism": self.mechanism_json(self.mechanism),
        }

    def mechanism_json(self, mechanism: Mechanism | None) -> dict[str, Any]:
        """A mechanism of this layer as a page shows it."""
        if mechanism is None or self.qk_length is None:
            text = self.traced.mechanism
            unknown = dict.fromkeys(("formula", "family", "scale", "softcap"))
            return {"name": text, "title": text, **unknown, "bias": False, "signed": False, "fields": {}, "text": text}
        return mechanism_json(mechanism, self.qk_length, self.bias is not None)


def _alone(tensor: Tensor) -> Float[Tensor, "H N D"]:
    """Of the first sequence; of a picture in windows, the first window."""
    return tensor[(0,) * (tensor.ndim - 3)]


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
        "signed": mechanism.ordered,
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
    """The runs of every attention module, by its path, while the context lasts; `check` is called at each, and may
    raise to stop the pass."""
    attentions, _ = ours.find(model)
    theirs, _ = huggingface.find(model)
    around = {layer.attend: layer for layer in model.modules() if isinstance(layer, MultiHeadAttention)}
    runs: dict[str, list[AttentionRun]] = {}

    def before_ours(module: nn.Module, args: Any, kwargs: Any) -> None:
        check()
        assert isinstance(module, Attend)
        bias = ARGUMENTS.bind(module, *args, **kwargs).arguments.get("bias")
        run = AttentionRun(around.get(module, module), module.mechanism, bias)
        runs.setdefault(attentions[module], []).append(run)

    def before_theirs(module: Any, args: Any) -> None:
        check()
        scaling = getattr(module, "scaling", None)
        softcap = getattr(module, "attn_logit_softcapping", None)
        mechanism = Softmax(beta=scaling if isinstance(scaling, int | float) else None, softcap=softcap)
        runs.setdefault(theirs[module], []).append(AttentionRun(module, mechanism, None))

    with ExitStack() as stack:
        for module in attentions:
            stack.callback(module.register_forward_pre_hook(before_ours, with_kwargs=True).remove)
        for module in theirs:
            stack.callback(module.register_forward_pre_hook(before_theirs).remove)
        yield runs


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
        views.append(
            LayerView(
                traced=layer,
                mechanism=None if run is None else run.mechanism,
                bias=None if run is None else run.bias,
                projection=None if run is None else _projection(run.module),
                side="encoder" if encoder else "decoder",
                queries=queries,
                keys=keys,
            )
        )
    return views


def _projection(module: nn.Module) -> Tensor | None:
    """The weight of the output projection of an attention layer."""
    for name in ("W_o", "o_proj", "out_proj", "c_proj", "o"):
        weight = getattr(getattr(module, name, None), "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.ndim == 2:
            # GPT-2's projections in transformers have their weights the other way round.
            return weight.detach().T if type(getattr(module, name)).__name__ == "Conv1D" else weight.detach()
    return None


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
