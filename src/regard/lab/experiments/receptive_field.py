"""How far a stack of windowed layers looks back."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.style import Figure, dress, line_styles, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator


def reach(layers: int, window: int, tokens: int) -> int:
    """How many of so many tokens the last one depends on, if each layer sees `window` tokens, itself among them."""
    return min(tokens, 1 + layers * (window - 1))


@experiment(
    claims=("real.reach",),
    title="The receptive field of windowed layers",
    statement=(
        "In a decoder whose layers have a sliding window of $w$ tokens (the token itself and $w - 1$ before it), the "
        "output at a position depends on $1 + L(w - 1)$ tokens after $L$ layers: windows add up. On all tokens, if the "
        "sequence is shorter."
    ),
    formula=r"r = \min\bigl(T, 1 + L (w - 1)\bigr)",
)
def receptive_field(
    *,
    windows: Annotated[tuple[int, ...], Between(1, 64, log=True)] = (1, 2, 4, 8, 16),
    layers: Annotated[int, Between(1, 12)] = 6,
    tokens: Annotated[int, Between(2, 256, log=True)] = 80,
    heads: Annotated[int, Between(1, 8)] = 2,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Count the tokens whose embedding has a gradient from the last position, after every layer.

    >>> receptive_field(windows=(3,), layers=2, tokens=8).verdict
    'holds'
    """
    random = generator(seed)
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    for window in windows:
        sizes = _gradients(layers, window, tokens, heads, random)
        for depth, gradient in enumerate(sizes, start=1):
            seen = torch.nonzero(gradient).flatten()
            predicted, counted = reach(depth, window, tokens), len(seen)
            checks += [
                Check(name=f"tokens seen, w = {window}, {depth} layers", predicted=predicted, measured=counted),
                Check(
                    name=f"oldest token seen, w = {window}, {depth} layers",
                    predicted=tokens - predicted,
                    measured=int(seen[0]),
                ),
            ]
            rows.append(
                {
                    "window": window,
                    "layers": depth,
                    "tokens seen": counted,
                    "by the formula": predicted,
                    "gradient of the oldest": gradient[seen[0]].item() / gradient.max().item(),
                }
            )
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, tokens))


def _gradients(layers: int, window: int, tokens: int, heads: int, random: torch.Generator) -> list[Tensor]:
    """For the last position after 1, 2, … layers: the size of its gradient at the embedding of every token."""
    config = rg.DecoderConfig(
        vocabulary_size=2,
        embedding_dim=8 * heads,
        num_layers=layers,
        num_heads=heads,
        context_length=tokens,
        window=rg.Window(before=window - 1),
    )
    model = rg.Decoder(config).double().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5, generator=random)
    hidden: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, out: hidden.append(out[0])) for block in model.blocks]
    x = torch.randn(1, tokens, config.embedding_dim, generator=random, dtype=torch.float64, requires_grad=True)
    model.stack(x, positions=torch.arange(tokens))
    for hook in hooks:
        hook.remove()
    direction = torch.randn(config.embedding_dim, generator=random, dtype=torch.float64)
    return [torch.autograd.grad(out[0, -1] @ direction, x, retain_graph=True)[0][0].norm(dim=-1) for out in hidden]


def _figure(rows: Sequence[Mapping[str, Any]], tokens: int) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="Windows add up: the receptive field grows by w − 1 with every layer",
        note=f"Tokens of {tokens} whose embedding has a gradient from the last position. Lines: the formula.",
    )
    axes = figure.subplots()
    windows = list(dict.fromkeys(row["window"] for row in rows))
    for window, (colour, marker) in zip(windows, line_styles(len(windows)), strict=True):
        mine = [row for row in rows if row["window"] == window]
        depths = [row["layers"] for row in mine]
        axes.plot(depths, [row["by the formula"] for row in mine], color=colour)
        axes.plot(depths, [row["tokens seen"] for row in mine], marker, color=colour, label=f"w = {window}")
    axes.axhline(tokens, color="black", linestyle=":", linewidth=1)
    axes.set_xticks(depths)
    dress(axes, x="layers", y="tokens that the last position depends on")
    axes.legend(fontsize=8, frameon=False)
    return figure
