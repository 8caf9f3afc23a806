"""Which inputs an output of a norm depends on: layer normalization its own row, batch normalization its own column."""

from typing import Annotated

import torch
from torch import Tensor, nn

from regard.core.style import COLOURS, WEIGHT_MAP, Figure, dress, lattice, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator
from regard.models.layers import network


def same_row(batch: int, dim: int) -> Tensor:
    """Whether input (k, l) is in the row of output (i, j), as (i, j, k, l)."""
    return torch.eye(batch, dtype=torch.bool)[:, None, :, None].expand(batch, dim, batch, dim)


def same_column(batch: int, dim: int) -> Tensor:
    """Whether input (k, l) is in the column of output (i, j), as (i, j, k, l)."""
    return torch.eye(dim, dtype=torch.bool)[None, :, None, :].expand(batch, dim, batch, dim)


@experiment(
    claims=("000.3a",),
    title="LayerNorm looks along a row, BatchNorm along a column",
    statement=(
        "Normalize a batch of vectors $X$, of shape $B \\times D$. With layer normalization $y_{ij}$ depends on the "
        "entries of its own row $i$ alone, all of them; with batch normalization, in training, on those of its own "
        "column $j$ alone, all of them. So a token's layer normalization does not depend on the batch it is in. (The "
        "RMSNorm of Llama is like layer normalization. In use, batch normalization has stored statistics, and $y_{ij}$ "
        "depends on $x_{ij}$ only.)"
    ),
    formula=(
        r"\frac{\partial y_{ij}}{\partial x_{kl}} = 0 \text{ unless } k = i \text{ (layer)}, "
        r"\; l = j \text{ (batch)}"
    ),
)
def norm_dependence(
    *,
    batch: Annotated[int, Between(3, 24)] = 6,
    dim: Annotated[int, Between(3, 24)] = 8,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Differentiate every output by every input and look which derivatives are 0.

    >>> norm_dependence(batch=3, dim=4).verdict
    'holds'
    """
    x = torch.randn(batch, dim, generator=generator(seed), dtype=torch.float64)
    row, column = same_row(batch, dim), same_column(batch, dim)
    cases = {
        "LayerNorm": (network.norm("layer", dim, 1e-5), row),
        "RMSNorm": (network.norm("rms", dim, 1e-6), row),
        "BatchNorm": (nn.BatchNorm1d(dim), column),
        "BatchNorm in use": (nn.BatchNorm1d(dim).eval(), row & column),
    }
    checks, table, sizes = [], [], {}
    for name, (module, expected) in cases.items():
        jacobian = torch.autograd.functional.jacobian(module.double(), x)
        depends = jacobian != 0
        outside, inside = (depends & ~expected).sum().item(), (depends & expected).sum().item()
        checks += [
            Check(name=f"{name}: dependences outside", predicted=0, measured=outside),
            Check(name=f"{name}: dependences inside", predicted=expected.sum().item(), measured=inside),
        ]
        table.append(
            {
                "norm": name,
                "pairs of output and input": depends.numel(),
                "that depend": int(depends.sum()),
                "predicted": int(expected.sum()),
            }
        )
        sizes[name] = jacobian[batch // 2, dim // 2].abs()
    return Measurements(
        statement=tuple(checks), table=tuple(table), draw=lambda: _figure(sizes, (batch // 2, dim // 2))
    )


def _figure(sizes: dict[str, Tensor], output: tuple[int, int]) -> Figure:
    figure = new_figure(
        8.5,
        3.0,
        title="What one output depends on: its row, or its column",
        note=f"Size of the derivative of output {output} (ring) by each input, relative to the largest; roots of them.",
    )
    for axes, (name, size) in zip(figure.subplots(1, len(sizes)), sizes.items(), strict=True):
        # Roots, so that small derivatives show beside the output's own.
        axes.imshow((size / size.max()).sqrt(), cmap=WEIGHT_MAP, vmin=0, vmax=1)
        axes.plot(output[1], output[0], "o", color=COLOURS[4], markerfacecolor="none", markeredgewidth=1.5)
        lattice(axes, *size.shape)
        dress(axes, title=name, x="entry of the vector j", y="vector of the batch i" if name == "LayerNorm" else "")
        axes.grid(visible=False, which="major")
    return figure
