"""What each head is worth: every head silenced once, and how far the output moves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.display import Html, table
from regard.inference.intervene import applied
from regard.inference.interventions.change import Change
from regard.inference.trace import trace
from regard.models.base import GenerativeModel, Model

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP = 5
"""How many of the likeliest tokens are kept."""
LISTED = 10
"""Heads that are printed."""


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadEffect:
    """What one head's absence does."""

    layer: int
    head: int
    kind: str
    """"self" or "cross"."""
    distance: float
    """How far the output moves: the norm of the difference over that of the output."""
    divergence: float | None
    """The KL divergence in nats of the distributions with the head from those without it, mean over the tokens."""
    top: tuple[tuple[str, float], ...]
    """The likeliest tokens after the last one, and their probabilities."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Effects:
    """What `effects` measured: `heads`, by layer and head. Prints the heads whose absence matters most.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> measured = rg.effects(model, torch.tensor([[1, 2, 3]]))
    >>> len(measured.strongest), measured.of(layer=1, head=0).top[0][1] > 1 / 11
    (4, True)
    """

    heads: tuple[HeadEffect, ...]
    top: tuple[tuple[str, float], ...]
    """The likeliest tokens of the model as it is."""
    model: str

    @property
    def strongest(self) -> list[HeadEffect]:
        """The heads by how far their absence moves the output."""
        return sorted(self.heads, key=_size, reverse=True)

    def of(self, *, layer: int, head: int) -> HeadEffect:
        """The effect of one head."""
        for effect in self.heads:
            if (effect.layer, effect.head) == (layer, head):
                return effect
        raise ValueError(f"layer, head: expected a head of the model, got layer {layer}, head {head}")

    def grid(self) -> Float[Tensor, "layers heads"]:
        """Sizes of the effects: divergences, or distances where the model has no logits; NaN where there is no head."""
        layers = list(dict.fromkeys(effect.layer for effect in self.heads))
        grid = torch.full((len(layers), 1 + max(effect.head for effect in self.heads)), torch.nan)
        for effect in self.heads:
            grid[layers.index(effect.layer), effect.head] = _size(effect)
        return grid

    def plot(self) -> "Figure":
        """A matplotlib figure: layers down, heads across, darker where a head's absence moves the output further."""
        from regard.inference.tracing.figures import effects_figure

        return effects_figure(self)

    def rows(self) -> list[dict[str, object]]:
        """The strongest heads, for tables."""
        before = dict(self.top)
        rows = []
        for effect in self.strongest[:LISTED]:
            row: dict[str, object] = {
                "layer": effect.layer,
                "head": effect.head,
                "kind": effect.kind,
                "distance": f"{effect.distance:.3g}",
            }
            if effect.divergence is not None:
                row["divergence (nats)"] = f"{effect.divergence:.3g}"
                first, share = effect.top[0]
                row["likeliest"] = (
                    f"{first!r} {share:.1%} (was {before[first]:.1%})" if first in before else repr(first)
                )
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        rows = self.rows()
        names = list(rows[0])
        cells = [names, *([str(row[name]) for name in names] for row in rows)]
        widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([f"Effects of {len(self.heads)} heads of {self.model}, the strongest first", *lines])

    def _repr_html_(self) -> Html:
        return table(self.rows(), title=f"Effects of {len(self.heads)} heads of {self.model}, the strongest first")


def _size(effect: HeadEffect) -> float:
    return effect.distance if effect.divergence is None else effect.divergence


def effects(
    model: nn.Module,
    *inputs: Tensor | str,
    batch_size: int = 16,
    predict: Callable[[Any], Tensor] | None = None,
    watch: Callable[[int, int], None] = lambda done, total: None,
    **options: Any,
) -> Effects:
    """Silence every head of a model once, several in one batched pass, and measure how far the output moves.

    `inputs` and `options` are what the model takes, for one sequence: tensors, or texts where the model has a
    tokenizer (for an encoder-decoder a source and a target). The logits are the output of our decoders and
    encoder-decoders, the classes or masked words of other models and the `logits` of Hugging Face models; `predict`
    gives other ones. Without logits the distance alone is measured. `watch` is told how many heads are
    done, and may raise to stop. Two threads on one Hugging Face model at the same time are not supported.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=11, embedding_dim=8, num_layers=2, num_heads=2))
    >>> measured = rg.effects(model, torch.tensor([[1, 2, 3]]))
    >>> measured.grid().shape, measured.strongest[0].divergence >= 0
    (torch.Size([2, 2]), True)
    """
    if not inputs and not options:
        raise ValueError("inputs: expected what the model takes for one sequence, got nothing")
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size: expected a whole number of at least 1, got {batch_size!r}")
    texts = sum(isinstance(value, str) for value in inputs)
    wanted = 2 if isinstance(model, GenerativeModel) and model.reads_source else 1
    if texts not in (0, wanted):
        raise ValueError(
            f"inputs: expected {'a source and a target' if wanted == 2 else 'one text'}, got {texts} texts"
        )
    tensors = [_tokens(model, value) if isinstance(value, str) else value for value in inputs]
    if any(isinstance(value, Tensor) and value.shape[:1] != (1,) for value in (*tensors, *options.values())):
        raise ValueError("inputs: expected one sequence, tensors whose first size is 1, got more")
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            return _measure(model, tensors, options, batch_size, predict, watch)
    finally:
        for module, mode in training.items():
            module.training = mode


def _measure(
    model: nn.Module,
    inputs: list[Any],
    options: dict[str, Any],
    batch_size: int,
    predict: Callable[[Any], Tensor] | None,
    watch: Callable[[int, int], None],
) -> Effects:
    with trace(model, keep=("queries",)) as traced:
        result = model(*inputs, **options)
    output, logits = _read(model, result, predict)
    before = None if logits is None else logits.float().log_softmax(-1)
    places = [(layer, head) for layer in traced.layers for head in layer.heads]
    measured: list[HeadEffect] = []
    watch(0, len(places))
    for start in range(0, len(places), batch_size):
        group = places[start : start + batch_size]
        changes: dict[int, Tensor] = {}
        for row, (layer, head) in enumerate(group):
            nothing = torch.zeros(len(group), len(layer.heads), dtype=torch.bool)
            silenced = changes.setdefault(layer.index, nothing)
            silenced[row, head] = True
        with applied(model, *(Change(layers=frozenset({number}), silence=rows) for number, rows in changes.items())):
            repeated = dict(zip(options, _repeated(options.values(), len(group)), strict=True))
            result = model(*_repeated(inputs, len(group)), **repeated)
        outputs, logits = _read(model, result, predict)
        for row, (layer, head) in enumerate(group):
            distance = (outputs[row].float() - output[0].float()).norm() / output[0].float().norm().clamp_min(1e-30)
            divergence: float | None = None
            top: tuple[tuple[str, float], ...] = ()
            if before is not None and logits is not None:
                after = logits[row].float().log_softmax(-1)
                divergence = float((before[0].exp() * (before[0] - after)).sum(-1).mean())
                top = _top(model, after)
            measured.append(
                HeadEffect(
                    layer=layer.index,
                    head=head,
                    kind=layer.kind,
                    distance=float(distance),
                    divergence=divergence,
                    top=top,
                )
            )
        watch(len(measured), len(places))
    return Effects(
        heads=tuple(measured),
        top=() if before is None else _top(model, before[0]),
        model=type(model).__name__,
    )


def _tokens(model: nn.Module, text: str) -> Int[Tensor, "1 T"]:
    tokenizer: Any = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"inputs: expected tensors for a model without a tokenizer, got {text!r:.60}")
    return torch.tensor([tokenizer.encode(text)], device=next(model.parameters()).device)


def _repeated(values: Any, count: int) -> list[Any]:
    return [value.expand(count, *value.shape[1:]) if isinstance(value, Tensor) else value for value in values]


def _read(
    model: nn.Module, result: Any, predict: Callable[[Any], Tensor] | None
) -> tuple[Float[Tensor, "B ..."], Float[Tensor, "B ... D"] | None]:
    """The output as a tensor, and the logits if there are any."""
    logits = getattr(result, "logits", None)
    if predict is not None:
        logits = predict(result)
    elif isinstance(result, Tensor) and isinstance(model, Model):
        logits = model.logits(result)
    output = logits if logits is not None else getattr(result, "last_hidden_state", result)
    if not isinstance(output, Tensor):
        raise ValueError(f"predict: expected a function from {type(result).__name__} to logits, got none")
    return output, logits


def _top(model: nn.Module, scores: Float[Tensor, "... D"]) -> tuple[tuple[str, float], ...]:
    last = scores.reshape(-1, scores.shape[-1])[-1]
    chosen = last.topk(min(TOP, len(last)))
    tokenizer: Any = getattr(model, "tokenizer", None)
    ids = chosen.indices.tolist()
    names = [str(index) for index in ids] if tokenizer is None else tokenizer.tokens(ids)
    return tuple(zip(names, chosen.values.exp().tolist(), strict=True))
