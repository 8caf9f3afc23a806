"""The classes of a trace: `Trace`, its `Layers` and each `TracedLayer`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.display import Html, table, weights_image
from regard.inference.tracing.definition import Definition
from regard.inference.tracing.predictions import Prediction, Predictions, joined

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from regard.inference.tracing.gather import Gathered
    from regard.inference.tracing.patterns import Patterns
    from regard.inference.tracing.predictions import PredictedRows, Spelling
    from regard.inference.tracing.statistics import Comparison, Statistics

MOST_SHOWN = 16
"""The most layers of a trace, and heads of a layer, that are printed or shown in a notebook."""
KEEP = ("weights", "queries", "keys", "values", "scores", "outputs")
"""Tensors of a layer that a trace can record."""
PADDING = "[PAD]"
"""What a position of padding is called, whichever token fills it."""
Kind = Literal["self", "cross"]
Tokens = Sequence[str] | Sequence[Sequence[str]]


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedLayer:
    """One attention layer as it ran: weights (B, H, T, S) of H heads between T queries and S keys.

    With chosen heads or rows, H and T are the numbers of those; keys and values then have one head per chosen head. For
    channel attention, weights are (B, H, K, K) between channels and `by_pairs` is False.

    Attention within the windows of a picture (DaViT) has an axis for them after the batch's: weights are
    (B, N, H, T, S), and `windows` says how many there are down and across, N = rows · columns, row by row. `flat()`
    gives every window as a sequence of its own.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> with rg.trace(model) as trace:
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> layer = trace.layers[1]
    >>> layer.kind, layer.definition.name, layer.definition.scale, layer.weights.shape
    ('self', 'Softmax', 0.5, torch.Size([1, 2, 3, 3]))
    """

    index: int
    name: str
    """The module's path in the model."""
    kind: Kind
    mechanism: str
    heads: tuple[int, ...]
    rows: tuple[int, ...]
    """Positions of the queries: among the keys in self-attention, from 0 in cross-attention."""
    definition: Definition | None = None
    """The mechanism as a value; None in files of older versions."""
    weights: Float[Tensor, "*b H _ _"] | None = None
    """(B, H, T, S), before dropout."""
    queries: Float[Tensor, "*b H T K"] | None = None
    """(B, H, T, K), with rotary positions applied if the model has them."""
    keys: Float[Tensor, "*b G S K"] | None = None
    """(B, G, S, K). Query head h reads key head h // (H // G)."""
    values: Float[Tensor, "*b G S V"] | None = None
    """(B, G, S, V)."""
    scores: Float[Tensor, "*b H T S"] | None = None
    """(B, H, T, S): the input of softmax, -inf if hidden; for linear attention the similarity, 0 if hidden."""
    outputs: Float[Tensor, "*b H T V"] | None = None
    """(B, H, T, V): what each head gives, before W_o; in training with dropout."""
    projection: Float[Tensor, "H E V"] | None = None
    """(H, E, V): the columns of W_o for each head, with `outputs`. It is the model's own memory where W_o is not
    quantized, and changes if the model is trained; `save` writes a copy."""
    visible: Bool[Tensor, "..."] | None = None
    """Which pairs the mask allows, broadcastable to (B, H, T, S); None if all."""
    real: Bool[Tensor, "*b S"] | None = None
    """Which keys (B, S) are real, not padding; None if all."""
    causal: bool = False
    """Whether no query sees a later key."""
    by_pairs: bool = True
    grid: tuple[int, int] | None = None
    """Rows and columns of the picture's map that the layer attends over: patches of a ViT, positions of a DaViT's map;
    None for text."""
    windows: tuple[int, int] | None = None
    """How many windows the map is cut into, down and across; None if the layer sees it whole. Where the map's sides are
    no multiples of a window's, the windows reach beyond it at its right and bottom."""

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
        first = self.flat()
        assert first.weights is not None
        weights = first.weights[0]
        visible = None if first.visible is None else first.visible[0, 0].expand(weights.shape[1:])
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

    def flat(self) -> "TracedLayer":
        """The layer with every window of a picture as a sequence of its own; itself, if it has no windows.

        >>> import regard as rg, torch
        >>> sizes = {"embedding_dim": (8,), "num_layers": (1,), "num_heads": (2,), "num_groups": (2,)}
        >>> stage = {"patch_size": (2,), "patch_stride": (2,), "patch_padding": (0,), "norm_first": (False,)}
        >>> model = rg.DaViT(rg.DaViTConfig(**sizes, **stage, window_size=4))
        >>> with rg.trace(model) as trace:
        ...     logits = model(torch.randn(2, 3, 24, 16))
        >>> layer = trace.layers[0]
        >>> layer.grid, layer.windows, layer.weights.shape, layer.flat().weights.shape
        ((12, 8), (3, 2), torch.Size([2, 6, 2, 16, 16]), torch.Size([12, 2, 16, 16]))
        """
        if self.windows is None:
            return self
        names = (*KEEP, "visible", "real")
        tensors: dict[str, Any] = {name: x.flatten(0, 1) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, windows=None, **tensors)

    def contributions(
        self, heads: Sequence[int] | None = None, rows: Sequence[int] | None = None
    ) -> Float[Tensor, "*b H T E"]:
        """What each head adds to the layer's output, W_o,h out_h (B, H, T, E), for chosen heads and rows.

        Their sum over all heads, and W_o's bias, is what the layer gives. Needs `keep=("outputs", …)`; nothing is
        computed but what is chosen.

        >>> import regard as rg, torch
        >>> layer, x = rg.MultiHeadAttention(16, 4), torch.randn(1, 6, 16)
        >>> with rg.trace(layer, keep=("outputs",)) as trace:
        ...     y = layer(x)
        >>> each_head = trace.layers[0].contributions()
        >>> each_head.shape, torch.allclose(each_head.sum(1) + layer.W_o.bias, y, atol=1e-5)
        (torch.Size([1, 4, 6, 16]), True)
        >>> trace.layers[0].contributions(heads=[2], rows=[5]).shape
        torch.Size([1, 1, 1, 16])
        """
        outputs = self.need("outputs")
        if self.projection is None:
            raise ValueError(
                f"layer {self.index}: expected a projection that reads the heads' outputs, got none in {self.name!r}"
            )
        chosen = _places("heads", heads, self.heads)
        outputs = outputs[..., chosen, :, :][..., _places("rows", rows, self.rows), :]
        return torch.einsum("hev,...htv->...hte", self.projection[chosen].to(outputs), outputs)


def _places(name: str, chosen: Sequence[int] | None, recorded: tuple[int, ...]) -> list[int]:
    """Where the chosen heads or positions are among the recorded ones."""
    if chosen is None:
        return list(range(len(recorded)))
    if wrong := [number for number in chosen if number not in recorded]:
        raise ValueError(f"{name}: expected some of those that were recorded, {list(recorded)}, got {wrong[0]!r}")
    return [recorded.index(number) for number in chosen]


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
    """What `trace` recorded: `layers`, the strings of the `tokens`, the `predictions`. Prints as a list of its layers.

    The tokens are those that were given, or those of the input ids where the model has a tokenizer; `source_tokens` are
    those of an encoder-decoder's source. None where they are unknown: in pictures, or in streams that began before the
    trace.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> with rg.trace(model, tokens=["a", "b", "c"]) as trace:
    ...     logits = model(torch.tensor([[1, 2, 3]]))
    >>> trace.layers[1].weights.shape, trace.rollout().shape, trace.patterns().of(layer=1, head=0).score["uniform"] > 0
    (torch.Size([1, 2, 3, 3]), torch.Size([1, 3, 3]), True)
    """

    class_token: int | None
    """The position of a picture's class token; None for text, and where there is none."""

    def __init__(
        self,
        layers: Sequence[TracedLayer] = (),
        *,
        tokens: Tokens | None = None,
        source_tokens: Tokens | None = None,
        model: str = "",
        class_token: int | None = None,
        predictions: Predictions | None = None,
    ) -> None:
        self.model, self.class_token = model, class_token
        self._layers, self._predictions = Layers(layers), predictions
        self._gathered: dict[int, Gathered] = {}
        self._predicted: list[PredictedRows] = []
        self._read: dict[str, list[Tensor] | None] = {}
        self._spelling: Spelling | None = None
        self._settle: Callable[[], None] = lambda: None
        self._spelled: dict[str, list[list[str]] | None] = {}
        self.label(tokens, source_tokens)

    @property
    def layers(self) -> Layers:
        """The layers recorded so far."""
        if self._gathered:
            self._layers = Layers([*(gathered.layer() for gathered in self._gathered.values())])
        return self._layers

    @property
    def predictions(self) -> Predictions | None:
        """The likeliest tokens at every recorded position, or classes; None for models that predict neither."""
        self._settle()
        return joined(self._predicted) if self._predicted else self._predictions

    def top(self, k: int = 5, *, position: int | None = None, sequence: int = 0) -> tuple[Prediction, ...]:
        """The k likeliest tokens after the last one, with their probabilities and ids, or at another `position`.

        In models of masked words they are the tokens at the position itself. Of a model that classifies pictures or
        texts, they are the classes. k is at most 20.

        >>> import regard as rg, torch
        >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
        >>> with rg.trace(model) as trace:
        ...     logits = model(torch.tensor([[1, 2, 3]]))
        >>> best = trace.top(3)[0]
        >>> best.id == int(logits[0, -1].argmax()), trace.top(position=0)[0].id == int(logits[0, 0].argmax())
        (True, True)
        """
        if (predictions := self.predictions) is None:
            raise ValueError(
                "top: expected a model with logits over tokens or classes (an encoder needs masked_words), traced with "
                f"keep=('predictions', …), got a trace of {self.model or 'layers'} without them"
            )
        return predictions.top(k, position=position, sequence=sequence)

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of a picture's patches, which are the last tokens of every layer; None for text, and for
        models whose layers see maps of several sizes or windows (`layer.grid` and `layer.windows` say which)."""
        grids = {(layer.grid, layer.windows) for layer in self.layers}
        (grid, windows) = grids.pop() if len(grids) == 1 else (None, None)
        return grid if windows is None else None

    @property
    def tokens(self) -> list[list[str]] | None:
        """The strings of the tokens, for each sequence."""
        return self._strings("tokens")

    @property
    def source_tokens(self) -> list[list[str]] | None:
        """The strings of an encoder-decoder's source, for each sequence."""
        return self._strings("source_tokens")

    def _strings(self, side: str) -> list[list[str]] | None:
        if (labels := self._labels[side]) is not None:
            return labels
        if self._spelling is None:
            return self._spelled.get(side)
        parts = self._read.get(side)
        return [_spelled(sequence, self._spelling) for sequence in torch.cat(parts, 1).tolist()] if parts else None

    def label(self, tokens: Tokens | None = None, source_tokens: Tokens | None = None) -> "Trace":
        """Set the token strings: of one sequence, or of each in the batch. `source_tokens` are those of an encoder."""
        self._labels = {
            "tokens": _sequences("tokens", tokens),
            "source_tokens": _sequences("source_tokens", source_tokens),
        }
        return self

    def labels(self, layer: TracedLayer) -> tuple[list[list[str]] | None, list[list[str]] | None]:
        """The strings of a layer's queries (at all positions, not only `layer.rows`) and keys, for each sequence."""
        if layer.kind == "cross":
            return self.tokens, self.source_tokens
        encoder = self.source_tokens is not None and "encoder" in layer.name.split(".")
        side = "source_tokens" if encoder else "tokens"
        tokens = self._strings(side)
        if tokens is not None and self._labels[side] is None and not _fits(tokens, layer):
            tokens = None  # read by another part of the model
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
        return Trace(
            chosen,
            tokens=self.tokens,
            source_tokens=self.source_tokens,
            model=self.model,
            class_token=self.class_token,
            predictions=self.predictions,
        )

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

    def statistics(self) -> "Statistics":
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

    def plot(
        self, layer: int | None = None, head: int | None = None, *, sequence: int = 0, window: int = 0
    ) -> "Figure":
        """A matplotlib figure of the weights: of all layers and heads, of a layer's heads with their tokens, or of one
        head. `sequence` is the row of the batch, `window` that of a picture's windows, in layers that have them.

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
        if layer is None:
            return overview_figure(self, sequence, window)
        return heads_figure(self, layer, head, sequence, window)

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


def _spelled(ids: list[int], spell: "Spelling") -> list[str]:
    """The strings of token ids; those of padding are -1."""
    names = spell([max(0, number) for number in ids])
    return [PADDING if number < 0 else name for number, name in zip(ids, names, strict=True)]


def _fits(tokens: list[list[str]], layer: TracedLayer) -> bool:
    """Whether a layer's keys may be these tokens, by their number."""
    sizes = {len(sequence) for sequence in tokens}
    keys = next((x.shape[-1] for x in (layer.weights, layer.scores, layer.real) if x is not None), None)
    keys = layer.keys.shape[-2] if keys is None and layer.keys is not None else keys
    return keys is None or not layer.by_pairs or sizes <= {keys}


def _sequences(name: str, tokens: Tokens | None) -> list[list[str]] | None:
    if tokens is None:
        return None
    nested: Any = [tokens] if all(isinstance(token, str) for token in tokens) else tokens
    listed = not isinstance(tokens, str) and all(isinstance(sequence, list | tuple) for sequence in nested)
    if not listed or any(not isinstance(token, str) for sequence in nested for token in sequence):
        raise ValueError(f"{name}: expected a list of strings, or one list for each sequence, got {tokens!r}")
    return [list(sequence) for sequence in nested]
