"""The classes of a trace: `Trace`, its `Layers` and each `TracedLayer`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from regard.core.display import Html, table, weights_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.inference.tracing.gather import Gathered
    from regard.inference.tracing.patterns import Patterns
    from regard.inference.tracing.statistics import Comparison, HeadStatistics

MOST_SHOWN = 16
"""The most layers of a trace, and heads of a layer, that are printed or shown in a notebook."""
KEEP = ("weights", "queries", "keys", "values", "scores")
Kind = Literal["self", "cross"]
Tokens = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedLayer:
    """One attention layer as it ran: weights (B, H, T, S) of H heads between T queries and S keys.

    With chosen heads or rows, H and T are the numbers of those; keys and values then have one head per chosen head. For
    channel attention, weights are (B, H, K, K) between channels and `by_pairs` is False.
    """

    index: int
    name: str
    """The module's path in the model."""
    kind: Kind
    mechanism: str
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    """Positions of the queries: among the keys in self-attention, from 0 in cross-attention."""
    weights: Tensor | None = None
    """(B, H, T, S), before dropout."""
    queries: Tensor | None = None
    """(B, H, T, K), with rotary positions applied if the model has them."""
    keys: Tensor | None = None
    """(B, G, S, K). Query head h reads key head h // (H // G)."""
    values: Tensor | None = None
    """(B, G, S, V)."""
    scores: Tensor | None = None
    """(B, H, T, S): the input of softmax, -inf if hidden; for linear attention the similarity, 0 if hidden."""
    visible: Tensor | None = None
    """Which pairs the mask allows, broadcastable to (B, H, T, S); None if all."""
    real: Tensor | None = None
    """Which keys (B, S) are real, not padding; None if all."""
    causal: bool = False
    """Whether no query sees a later key."""
    by_pairs: bool = True

    def __repr__(self) -> str:
        tensors = ", ".join(f"{n} {tuple(t.shape)}" for n in KEEP if (t := getattr(self, n)) is not None)
        return f"TracedLayer({self.index}, {self.name!r}, {self.kind}, {tensors})"

    def _repr_html_(self) -> Html:
        return table([self._row()])

    def _row(self) -> dict[str, object]:
        """A row of a notebook's table: the layer's name and kind, and its heads' weights for the first sequence."""
        row: dict[str, object] = {
            "layer": self.index,
            "name": self.name,
            "kind": self.kind,
            "mechanism": self.mechanism,
        }
        if self.weights is None:
            return row
        weights = self.weights[0]
        visible = None if self.visible is None else self.visible[0, 0].expand(weights.shape[1:])
        shown = weights[:MOST_SHOWN]
        heading = f"weights of heads {self.heads[0]} to {self.heads[len(shown) - 1]}" if len(shown) > 1 else "weights"
        images = Html("".join(weights_image(shown[at : at + 8].unbind(), visible) for at in range(0, len(shown), 8)))
        return {**row, heading: images}

    def need(self, name: str) -> Tensor:
        """The tensor with that name, or an error that says how to record it."""
        tensor = getattr(self, name)
        if tensor is None:
            raise ValueError(f"layer {self.index}: expected {name}, got none; trace with keep=({name!r}, …)")
        return tensor


class Layers:
    """Traced layers, in order; `layers[3]` is the model's layer 3, if it was recorded, `layers[-1]` the last one."""

    def __init__(self, layers: Sequence[TracedLayer] = ()) -> None:
        self._layers = {layer.index: layer for layer in sorted(layers, key=lambda layer: layer.index)}

    def __getitem__(self, index: int) -> TracedLayer:
        recorded = list(self._layers)
        if type(index) is int and -len(recorded) <= index < 0:
            index = recorded[index]
        if type(index) is not int or index not in self._layers:
            raise ValueError(f"layers: expected a recorded layer, one of {recorded}, got {index!r}")
        return self._layers[index]

    def __iter__(self) -> Iterator[TracedLayer]:
        return iter(self._layers.values())

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return "\n".join(repr(layer) for layer in self) or "no layers"


class Trace:
    """What `trace` recorded: `layers`, and the strings of the tokens. Prints as a list of its layers.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> with rg.trace(model, tokens=["a", "b", "c"]) as trace:
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> trace.layers[1].weights.shape, trace.rollout().shape, trace.patterns().of(layer=1, head=0).score["uniform"] > 0
    (torch.Size([1, 2, 3, 3]), torch.Size([1, 3, 3]), True)
    """

    def __init__(
        self,
        layers: Sequence[TracedLayer] = (),
        *,
        tokens: Tokens | None = None,
        source_tokens: Tokens | None = None,
        model: str = "",
    ) -> None:
        self.model = model
        self._layers = Layers(layers)
        self._gathered: dict[int, Gathered] = {}
        self.label(tokens, source_tokens)

    @property
    def layers(self) -> Layers:
        """The layers recorded so far."""
        if self._gathered:
            self._layers = Layers([*(gathered.layer() for gathered in self._gathered.values())])
        return self._layers

    def label(self, tokens: Tokens | None = None, source_tokens: Tokens | None = None) -> "Trace":
        """Set the token strings: of one sequence, or of each in the batch. `source_tokens` are those of an encoder."""
        self.tokens = _sequences("tokens", tokens)
        self.source_tokens = _sequences("source_tokens", source_tokens)
        return self

    def labels(self, layer: TracedLayer) -> tuple[list[list[str]] | None, list[list[str]] | None]:
        """The strings of a layer's queries (at all positions, not only `layer.rows`) and keys, for each sequence."""
        if layer.kind == "cross":
            return self.tokens, self.source_tokens
        encoder = self.source_tokens is not None and "encoder" in layer.name.split(".")
        tokens = self.source_tokens if encoder else self.tokens
        return tokens, tokens

    def select(self, *, kind: Kind | None = None, name: str | None = None) -> "Trace":
        """A trace of the layers of a kind, or of those whose module path contains `name`.

        >>> from regard.inference.trace import Trace
        >>> len(Trace().select(kind="cross", name="decoder").layers)
        0
        """
        if kind not in (None, "self", "cross"):
            raise ValueError(f"kind: expected 'self' or 'cross', got {kind!r}")
        chosen = [layer for layer in self.layers if kind in (None, layer.kind) and (name or "") in layer.name]
        return Trace(chosen, tokens=self.tokens, source_tokens=self.source_tokens, model=self.model)

    def rollout(self) -> Tensor:
        """See `regard.inference.trace.rollout`."""
        from regard.inference.tracing.analysis import rollout

        return rollout(self)

    def value_weighted(self, index: int, projection: Tensor | None = None) -> Tensor:
        """See `regard.inference.trace.value_weighted`."""
        from regard.inference.tracing.analysis import value_weighted

        return value_weighted(self.layers[index], projection)

    def patterns(self, separators: Sequence[str] | Sequence[int] | None = None) -> "Patterns":
        """See `regard.inference.trace.patterns`."""
        from regard.inference.tracing.patterns import patterns

        return patterns(self, separators)

    def statistics(self) -> "list[HeadStatistics]":
        """Entropy, weight on the first token and mean distance of every recorded head."""
        from regard.inference.tracing.statistics import statistics

        return statistics(self)

    def compare(self, other: "Trace") -> "Comparison":
        """How far the weights of every head differ from those of another trace: of another model, text or change."""
        from regard.inference.tracing.statistics import compare

        return compare(self, other)

    def save(self, path: str | Path) -> Path:
        """Write the trace to one safetensors file."""
        from regard.inference.tracing.file import save

        return save(self, path)

    @classmethod
    def open(cls, path: str | Path) -> "Trace":
        """Read a file that `save` wrote; any other file raises CheckpointError."""
        from regard.inference.tracing.file import read

        return read(path)

    def plot(self, layer: int | None = None, head: int | None = None, *, sequence: int = 0) -> "Figure":
        """A matplotlib figure of the weights: of all layers and heads, of a layer's heads with their tokens, or of one
        head. `sequence` is the row of the batch.

        >>> import regard as rg, torch
        >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
        >>> with rg.trace(model, tokens=["a", "b", "c"]) as trace:
        ...     logits = model(torch.tensor([[1, 2, 3]]))
        >>> [axes.get_title("left") for axes in trace.plot(layer=1).axes]
        ['head 0', 'head 1', '']
        """
        from regard.inference.tracing.figures import heads_figure, overview_figure

        if layer is None and head is not None:
            raise ValueError(f"layer: expected the layer of head {head}, got None")
        return overview_figure(self, sequence) if layer is None else heads_figure(self, layer, head, sequence)

    def __repr__(self) -> str:
        layers = list(self.layers)
        lines = [repr(layer) for layer in layers]
        if len(lines) > MOST_SHOWN:
            lines = [*lines[: MOST_SHOWN // 2], f"… {len(lines) - MOST_SHOWN} more", *lines[-MOST_SHOWN // 2 :]]
        return "\n".join([f"Trace of {self.model or 'a model'}, {len(layers)} layers", *(lines or ["no layers"])])

    def _repr_html_(self) -> Html:
        layers = list(self.layers)
        shown = [layer._row() for layer in layers[:MOST_SHOWN]]
        names = list(dict.fromkeys(name for row in shown for name in row))
        rows = [{name: row.get(name, "") for name in names} for row in shown]
        notes = ["weights of the first sequence, queries down, keys across, from 0 (white) to 1 (dark); grey: hidden"]
        if len(layers) > MOST_SHOWN:
            notes.append(f"and {len(layers) - MOST_SHOWN} more layers: trace.plot()")
        return table(rows, title=f"Trace of {self.model or 'a model'}, {len(layers)} layers", notes=notes)


def _sequences(name: str, tokens: Tokens | None) -> list[list[str]] | None:
    if tokens is None:
        return None
    nested: Any = [tokens] if all(isinstance(token, str) for token in tokens) else tokens
    listed = not isinstance(tokens, str) and all(isinstance(sequence, list | tuple) for sequence in nested)
    if not listed or any(not isinstance(token, str) for sequence in nested for token in sequence):
        raise ValueError(f"{name}: expected a list of strings, or one list for each sequence, got {tokens!r}")
    return [list(sequence) for sequence in nested]
