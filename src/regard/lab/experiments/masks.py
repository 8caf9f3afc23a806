"""Which masks a model needs so that padding changes nothing: encoder, decoder, encoder-decoder."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, QUIET, Figure, Line2D, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, randomised

ROUNDING = 1e-11
MOVES = 1e-6
"""From here on an output has moved: far above rounding in float64."""
VOCABULARY = 50


class Padded(NamedTuple):
    """A batch with padding on one side."""

    tokens: Tensor
    real: Tensor
    """Which tokens are real, (B, T)."""

    @property
    def mask(self) -> rg.Mask:
        return rg.padding(valid=self.real)


class Case(NamedTuple):
    """A model, the masks it has, what is padded, and how far the outputs move when the padding changes."""

    model: str
    masks: str
    padding: str
    kind: str
    """"right": the statement asks for these masks, and they are enough. "condition": it asks for them, and they are
    not. "dropped": one that it asks for is missing."""
    moved: float

    @property
    def name(self) -> str:
        return f"{self.model}, {self.masks}; {self.padding}"


@experiment(
    claims=("000.2b",),
    title="Which masks padding needs",
    statement=(
        "An encoder needs a padding mask in its self-attention. A decoder needs its causal mask alone: no token sees "
        "the padding. An encoder-decoder needs padding masks in the encoder's self-attention and in the decoder's "
        "cross-attention, and the causal mask in the decoder's self-attention. Then it makes no difference what the "
        "padding is, and how much of it there is."
    ),
    formula=r"\text{output}(x, \text{padding}) = \text{output}(x, \text{other padding})",
    condition=(
        "It holds for the outputs at real tokens; those at padding mean nothing, and move. A decoder without a padding "
        "mask must have its padding on the right: tokens see padding on their left, and it takes up positions, so that "
        "it needs the mask. Each of these masks is needed: without it, outputs move."
    ),
)
def masks(
    *,
    length: Annotated[int, Between(2, 64, log=True)] = 6,
    padding: Annotated[int, Between(1, 32, log=True)] = 3,
    batch: Annotated[int, Between(1, 16)] = 2,
    layers: Annotated[int, Between(1, 6)] = 2,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Change the tokens and the amount of padding, with each mask and without it, and measure what moves.

    >>> masks(length=4, layers=1).verdict
    'holds under a condition'
    """
    random = generator(seed)
    source, target = (torch.randint(VOCABULARY, (batch, length), generator=random) for _ in range(2))
    filling = torch.randint(VOCABULARY, (batch, 2 * padding), generator=random)
    sizes: dict[str, Any] = {"vocabulary_size": VOCABULARY, "embedding_dim": 16, "num_layers": layers, "num_heads": 2}
    with torch.no_grad():
        cases = [
            *_encoder(randomised(rg.Encoder(rg.EncoderConfig(**sizes)), random), source, filling),
            *_decoder(randomised(rg.Decoder(rg.DecoderConfig.gpt2(**sizes)), random), source, filling),
            *_transformer(randomised(rg.Transformer(rg.TransformerConfig(**sizes)), random), source, target, filling),
        ]
    return Measurements(
        statement=tuple(_still(case) for case in cases if case.kind != "dropped"),
        within=tuple(_still(case) for case in cases if case.kind == "right"),
        instead=tuple(_moves(case) for case in cases if case.kind != "right"),
        table=tuple(case._asdict() for case in cases),
        draw=lambda: _figure(cases),
    )


def _paddings(tokens: Tensor, filling: Tensor, side: str) -> list[Padded]:
    """The same tokens with no padding, with half of the filling, and with all of it, other tokens than in the half."""
    half = filling.shape[1] // 2
    batches = []
    for more in (filling[:, :0], filling[:, :half], (filling + 1) % VOCABULARY):
        parts = [tokens, more] if side == "right" else [more, tokens]
        real = [torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(more, dtype=torch.bool)]
        batches.append(Padded(torch.cat(parts, 1), torch.cat(real if side == "right" else real[::-1], 1)))
    return batches


def _moved(model: Callable[[Padded], Tensor], batches: Sequence[Padded]) -> float:
    """How far the outputs at real tokens differ between batches."""
    return _spread([model(batch)[batch.real] for batch in batches])


def _spread(outputs: Sequence[Tensor]) -> float:
    """The largest difference from the first of them."""
    return max((output - outputs[0]).abs().max().item() for output in outputs)


def _encoder(model: rg.Encoder, tokens: Tensor, filling: Tensor) -> list[Case]:
    def masked(batch: Padded) -> Tensor:
        return model(batch.tokens, mask=batch.mask)

    def bare(batch: Padded) -> Tensor:
        return model(batch.tokens)

    cases = []
    for side in ("right", "left"):
        batches = _paddings(tokens, filling, side)
        cases += [
            Case("encoder", "padding mask", f"{side} padding", "right", _moved(masked, batches)),
            Case("encoder", "no mask", f"{side} padding", "dropped", _moved(bare, batches)),
        ]
    return cases


def _decoder(model: rg.Decoder, tokens: Tensor, filling: Tensor) -> list[Case]:
    def causal(batch: Padded) -> Tensor:
        return model(batch.tokens)

    def both(batch: Padded) -> Tensor:
        return model(batch.tokens, mask=batch.mask)

    right, left = (_paddings(tokens, filling, side) for side in ("right", "left"))
    _, _, full = right
    other = full._replace(tokens=torch.where(full.real, full.tokens, (full.tokens + 1) % VOCABULARY))
    everywhere = (causal(full) - causal(other)).abs().max().item()
    cases = [
        Case("decoder", "causal mask", "right padding", "right", _moved(causal, right)),
        Case("decoder", "causal mask", "right padding, outputs at padding", "condition", everywhere),
        Case("decoder", "causal mask", "left padding", "condition", _moved(causal, left)),
        Case("decoder", "causal and padding mask", "left padding", "right", _moved(both, left)),
    ]
    model.stack.causal = False
    return [*cases, Case("decoder", "no mask", "right padding", "dropped", _moved(causal, right))]


def _transformer(model: rg.Transformer, source: Tensor, target: Tensor, filling: Tensor) -> list[Case]:
    def masked(batch: Padded) -> Tensor:
        return model(batch.tokens, target, source_mask=batch.mask)

    def without_encoder_mask(batch: Padded) -> Tensor:
        return model.extend(target, replace(model.start(batch.tokens), memory_mask=batch.mask))[0]

    def without_cross_mask(batch: Padded) -> Tensor:
        return model.extend(target, replace(model.start(batch.tokens, batch.mask), memory_mask=None))[0]

    def causal(batch: Padded) -> Tensor:
        return model(source, batch.tokens)

    def both(batch: Padded) -> Tensor:
        return model(source, batch.tokens, target_mask=batch.mask)

    model_name = "encoder-decoder"
    cases: list[Case] = []
    for side in ("right", "left"):
        batches = _paddings(source, filling, side)
        for kind, name, run in (
            ("right", "both padding masks", masked),
            ("dropped", "none in the encoder", without_encoder_mask),
            ("dropped", "none in cross-attention", without_cross_mask),
        ):
            outputs = [run(batch) for batch in batches]
            cases.append(Case(model_name, name, f"source, {side}", kind, _spread(outputs)))
    right, left = (_paddings(target, filling, side) for side in ("right", "left"))
    cases += [
        Case(model_name, "causal mask", "target, right", "right", _moved(causal, right)),
        Case(model_name, "causal mask", "target, left", "condition", _moved(causal, left)),
        Case(model_name, "causal and padding mask", "target, left", "right", _moved(both, left)),
    ]
    model.decoder.causal = False
    return [*cases, Case(model_name, "no mask", "target, right", "dropped", _moved(causal, right))]


def _still(case: Case) -> Check:
    return Check(name=case.name, predicted=0, measured=case.moved, tolerance=ROUNDING)


def _moves(case: Case) -> Check:
    return Check(name=case.name, predicted=MOVES, measured=case.moved, rule="at least")


def _figure(cases: Sequence[Case]) -> Figure:
    figure = new_figure(
        8.5,
        5.4,
        title="With the right masks the padding moves nothing; without one of them it does",
        note="Largest change of an output in float64 when tokens and amount of the padding change. Dotted: rounding.",
    )
    axes = figure.subplots()
    meaning = {
        "right": ("the masks that it needs", COLOURS[0], "o"),
        "condition": ("asked for, and not enough", COLOURS[4], "^"),
        "dropped": ("one mask dropped", COLOURS[1], "s"),
    }
    lowest = 1e-17
    for place, case in enumerate(cases):
        _, colour, marker = meaning[case.kind]
        axes.plot([lowest, max(case.moved, lowest)], [place, place], color=colour, linewidth=2)
        axes.plot(max(case.moved, lowest), place, marker, color=colour)
        if case.moved == 0:
            axes.text(lowest * 2, place, "exactly 0", fontsize=7.5, color=QUIET, va="center")
    axes.axvline(ROUNDING, color=QUIET, linestyle=":", linewidth=1)
    axes.set_yticks(range(len(cases)), [case.name for case in cases])
    axes.invert_yaxis()
    axes.set_xscale("log")
    dress(axes, x="largest change of an output")
    handles = [Line2D([], [], color=colour, marker=marker, label=name) for name, colour, marker in meaning.values()]
    axes.legend(handles=handles, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=3)
    return figure
