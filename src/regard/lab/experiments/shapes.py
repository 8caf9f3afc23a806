"""The shapes of multi-head attention, with lengths of its own for queries and keys and for values."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, INK, RULE, Axes, Figure, dress, new_figure, ticker
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator, randomised
from regard.models.layers.block import Block, BlockConfig
from regard.models.layers.network import PositionWise

ROUNDING = 1e-12


def parameters(embedding_dim: int, heads: int, qk_length: int, value_length: int) -> int:
    """The weights of the four projections, without biases."""
    return embedding_dim * heads * (2 * qk_length + value_length) + heads * value_length * embedding_dim


@experiment(
    claims=("001",),
    title="Multi-head attention by its shapes",
    statement=(
        "Queries and keys of all heads come from one projection to $H K$ columns each, values from one to $H V$; $K$ "
        "and $V$ are free. The columns are split to $(B, H, T, K)$, so that all heads are computed in parallel, each "
        "as if it were alone. Weights are $(B, H, T, S)$; the outputs $(B, H, T, V)$ are combined to $(B, T, H V)$, "
        "the inverse of splitting, and $W_o$ brings them back to $E$ columns. In cross-attention keys and values come "
        "from another sequence. An encoder layer is this attention and a network that treats each position by itself, "
        "each with a residual connection and a norm."
    ),
    formula=r"(B, T, E) \to (B, T, H K) \to (B, H, T, K) \to (B, H, T, V) \to (B, T, H V) \to (B, T, E)",
)
def shapes(
    *,
    batch: Annotated[int, Between(1, 8)] = 2,
    length: Annotated[int, Between(1, 64)] = 5,
    source_length: Annotated[int, Between(1, 64)] = 7,
    embedding_dim: Annotated[int, Between(2, 256)] = 12,
    heads: Annotated[int, Between(1, 16)] = 3,
    qk_length: Annotated[int, Between(1, 64)] = 4,
    value_lengths: Annotated[tuple[int, ...], Between(1, 64)] = (2, 4, 8, 16),
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Follow a batch through the library's layer, for self-attention and cross-attention.

    >>> shapes(value_lengths=(8,)).verdict
    'holds'
    """
    random = generator(seed)
    x = torch.randn(batch, length, embedding_dim, generator=random, dtype=torch.float64)
    source = torch.randn(batch, source_length, embedding_dim + 1, generator=random, dtype=torch.float64)
    checks: list[Check] = []
    rows: list[dict[str, Any]] = []
    counts = []
    for value_length in dict.fromkeys(value_lengths):
        layer, cross = (
            randomised(
                rg.MultiHeadAttention(
                    embedding_dim, heads, qk_length=qk_length, value_length=value_length, key_dim=key_dim
                ),
                random,
            )
            for key_dim in (embedding_dim, embedding_dim + 1)
        )
        with torch.no_grad():
            stages = _stages(layer, x, x) | {"output": layer(x)}
            to_source = _stages(cross, x, source) | {"output": cross(x, source)}
        sizes = batch, length, embedding_dim, heads, qk_length, value_length
        for kind, measured, keys in (("self", stages, length), ("cross", to_source, source_length)):
            for (name, shape), tensor in zip(_expected(*sizes, keys).items(), measured.values(), strict=True):
                row = {"V": value_length, "attention": kind, "stage": name, "shape": tuple(tensor.shape)}
                rows.append(row | {"predicted": shape})
                checks.append(_same_shape(f"{kind}, V = {value_length}: axes of {name}", shape, tensor))
        checks += _equalities(layer, x, stages, value_length)
        count = sum(parameter.numel() for name, parameter in layer.named_parameters() if name.endswith("weight"))
        counts.append((value_length, count))
        checks.append(
            Check(
                name=f"V = {value_length}: weights of the projections",
                predicted=parameters(embedding_dim, heads, qk_length, value_length),
                measured=count,
            )
        )
    checks += [_alone(embedding_dim, x), _encoder_layer(embedding_dim, heads, qk_length, x)]
    last = rows[-len(to_source) :]
    fixed = embedding_dim, heads, qk_length
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(last, counts, fixed))


def _stages(layer: rg.MultiHeadAttention, x: Tensor, source: Tensor) -> dict[str, Tensor]:
    """The tensors between a layer's input and its output, by its own parts."""
    q = layer.split_heads(layer.W_q(x), layer.qk_length)
    k, v = layer.remember(source)
    out, _ = layer.attend(q, k, v)
    return {
        "W_q x": layer.W_q(x),
        "queries": q,
        "keys": k,
        "values": v,
        "weights": rg.weights(q, k, layer.mechanism),
        "heads' outputs": out,
        "combined": layer.combine_heads(out),
    }


def _expected(B: int, T: int, E: int, H: int, K: int, V: int, S: int) -> dict[str, tuple[int, ...]]:
    return {
        "W_q x": (B, T, H * K),
        "queries": (B, H, T, K),
        "keys": (B, H, S, K),
        "values": (B, H, S, V),
        "weights": (B, H, T, S),
        "heads' outputs": (B, H, T, V),
        "combined": (B, T, H * V),
        "output": (B, T, E),
    }


def _same_shape(name: str, expected: Sequence[int], tensor: Tensor) -> Check:
    """Check that all axes of a tensor have the expected sizes."""
    right = sum(a == b for a, b in zip(expected, tensor.shape, strict=False))
    return Check(name=name, predicted=len(expected), measured=right if tensor.ndim == len(expected) else 0)


def _equalities(
    layer: rg.MultiHeadAttention, x: Tensor, stages: Mapping[str, Tensor], value_length: int
) -> list[Check]:
    """Checks that the stages make up the layer, that combining undoes splitting, and that heads are computed alone."""
    q, k, v = stages["queries"], stages["keys"], stages["values"]
    heads = [rg.attend(q[:, [h]], k[:, [h]], v[:, [h]], layer.mechanism) for h in range(layer.num_heads)]
    with torch.no_grad():
        together = layer.W_o(stages["combined"])
    split = layer.split_heads(stages["combined"], layer.value_length)
    apart = {
        "W_o of the combined heads − the layer": together - stages["output"],
        "combined after split − the same": layer.combine_heads(split) - stages["combined"],
        "heads in parallel − each alone": stages["heads' outputs"] - torch.cat(heads, 1),
    }
    return [
        Check(
            name=f"V = {value_length}: {name}",
            predicted=0,
            measured=gap.abs().max().item(),
            tolerance=ROUNDING * max(1.0, together.abs().max().item()),
        )
        for name, gap in apart.items()
    ]


def _alone(embedding_dim: int, x: Tensor) -> Check:
    """Check that the position-wise network gives each position what it gives that position alone."""
    network = PositionWise(embedding_dim, 4 * embedding_dim).double()
    with torch.no_grad():
        alone = torch.cat([network(x[:, [place]]) for place in range(x.shape[1])], 1)
        gap = (network(x) - alone).abs().max().item()
    return Check(name="network: all positions − each alone", predicted=0, measured=gap, tolerance=ROUNDING)


def _encoder_layer(embedding_dim: int, heads: int, qk_length: int, x: Tensor) -> Check:
    """Check that a layer of an encoder is attention and the position-wise network, added to what they read."""
    config = BlockConfig(
        embedding_dim=embedding_dim,
        num_heads=heads,
        qk_length=qk_length,
        value_length=qk_length,
        hidden_dim=4 * embedding_dim,
        mechanism=rg.Softmax(),
        pre_norm=False,
    )
    block = Block(config).double().eval()
    with torch.no_grad():
        attended = block.attention_norm(x + block.attention(x))
        by_hand = block.network_norm(attended + block.network(attended))
        gap = (block(x)[0] - by_hand).abs().max().item()
    return Check(name="encoder layer − attention and network", predicted=0, measured=gap, tolerance=ROUNDING)


def _figure(
    rows: Sequence[Mapping[str, Any]], counts: Sequence[tuple[int, int]], fixed: tuple[int, int, int]
) -> Figure:
    figure = new_figure(
        8.5,
        3.9,
        title="Split into heads, attend, combine: every shape as predicted, for any V",
        note="Left: measured shapes in cross-attention. Right: weights of the four projections; line: formula.",
    )
    flow, axes = figure.subplots(1, 2, width_ratios=(2.7, 1))
    _draw_flow(flow, {row["stage"]: row["shape"] for row in rows})
    steps = range(1, max(length for length, _ in counts) + 1)
    axes.plot(steps, [parameters(*fixed, step) for step in steps], color=COLOURS[0])
    axes.plot(*zip(*counts, strict=True), "o", color=COLOURS[0])
    axes.axvline(fixed[2], color=RULE, zorder=0)
    axes.text(fixed[2], axes.get_ylim()[0], " V = K", fontsize=8, color=INK, va="bottom")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
    dress(axes, x="value length V", y="weights of a layer")
    return figure


_PLACES = {
    "W_q x": (0, 2),
    "queries": (1, 2),
    "keys": (1, 1),
    "values": (1, 0),
    "weights": (2, 1.5),
    "heads' outputs": (3, 1),
    "combined": (4, 1),
    "output": (5, 1),
}
_ARROWS = (
    ("W_q x", "queries"),
    ("queries", "weights"),
    ("keys", "weights"),
    ("weights", "heads' outputs"),
    ("values", "heads' outputs"),
    ("heads' outputs", "combined"),
    ("combined", "output"),
)


def _draw_flow(axes: Axes, measured: Mapping[str, tuple[int, ...]]) -> None:
    """The stages as boxes with their shapes, and arrows between them."""
    for begin, end in _ARROWS:
        axes.annotate(
            "",
            xy=_PLACES[end],
            xytext=_PLACES[begin],
            arrowprops={"arrowstyle": "-|>", "color": RULE, "shrinkA": 26, "shrinkB": 26},
        )
    for name, (across, up) in _PLACES.items():
        shape = "(" + ", ".join(map(str, measured[name])) + ")"
        axes.text(
            across,
            up,
            f"{name}\n{shape}",
            ha="center",
            va="center",
            fontsize=7.5,
            color=INK,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": COLOURS[0]},
        )
    axes.set_xlim(-0.5, 5.5)
    axes.set_ylim(-0.5, 2.5)
    axes.axis("off")
