"""What linear attention costs: not N·D, but N times features times value length."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch

import regard as rg
from regard.core.cost import count_flops
from regard.core.paths.sums import CHUNK
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import power


def sums_flops(n: int, c: int, m: int) -> int:
    """FLOPs of running sums of c features and values of length m: every key but those of the last chunk is added,
    every query reads the sums and the normaliser."""
    return 2 * (n - last_chunk(n)) * c * m + 2 * n * c * m + 2 * n * c


def last_chunk(n: int) -> int:
    """How many keys are in the last chunk, to which queries attend by scores."""
    return n - (n - 1) // CHUNK * CHUNK


@experiment(
    claims=("004.12.10",),
    title="The cost of linear attention",
    statement=(
        "With $g[k]^T g[q]$ in place of $\\exp[k^T q]$, sums over keys can be computed before any query comes. That "
        "reduces attention from $O(N^2 D)$ to $O(ND)$."
    ),
    formula=r"\sum_m \left(g[k_m]^T g[q]\right) v_m = \left(\sum_m v_m\, g[k_m]^T\right) g[q]",
    instead=(
        "The sums are a matrix of C features by M value numbers, to which every key adds and which every query reads: "
        "O(N·C·M), which is O(N·D²) for C = M = D. It is linear in N, but not in D."
    ),
)
def linear_cost(
    *,
    dims: Annotated[tuple[int, ...], Between(2, 512, log=True)] = (16, 32, 64, 128, 256),
    length: Annotated[int, Between(2 * CHUNK, 16 * CHUNK, log=True)] = 2048,
    copies: Annotated[tuple[int, ...], Between(1, 16, log=True)] = (1, 2, 4),
    value_lengths: Annotated[tuple[int, ...], Between(1, 512, log=True)] = (8, 32, 128),
) -> Measurements:
    """Count the FLOPs of linear attention over N, features C, value length M and D; `copies` of 16 features are C.

    >>> linear_cost(dims=(16, 32), length=600, copies=(1, 2), value_lengths=(4, 8)).verdict
    'does not hold'
    """
    rows = [
        *(_row("D", length, d, d, d, rg.Elu()) for d in dims),
        *(_row("C", length, 16, 16 * times, 16, _repeated(times)) for times in copies),
        *(_row("M", length, 16, 16, m, rg.Elu()) for m in value_lengths),
        *(_row("N", n, 16, 16, 16, rg.Elu()) for n in (length, 2 * length, 4 * length)),
    ]
    instead = [
        Check(
            name=f"FLOPs of sums, N = {row['N']}, C = {row['C']}, M = {row['M']}",
            predicted=sums_flops(row["N"], row["C"], row["M"]),
            measured=row["FLOPs of sums"],
        )
        for row in rows
    ]
    over_n, over_d = ([row for row in rows if row["over"] == name] for name in ("N", "D"))
    # The last chunk is not added to the sums: that is less than a chunk of the shortest length.
    statement = [
        Check(
            name="power of N",
            predicted=1,
            measured=power([row["N"] for row in over_n], [row["FLOPs"] for row in over_n]),
            tolerance=CHUNK / length,
        )
    ]
    if len(set(dims)) > 1:
        sizes = [row["D"] for row in over_d]
        statement.append(
            Check(
                name="power of D, for C = M = D",
                predicted=1,
                measured=power(sizes, [row["FLOPs"] for row in over_d]),
                rule="at most",
            )
        )
        # The normaliser is a share of 1/(2D + 1) of reading the sums.
        instead.append(
            Check(
                name="power of D of the sums, for C = M = D",
                predicted=2,
                measured=power(sizes, [row["FLOPs of sums"] for row in over_d]),
                tolerance=1 / min(dims),
            )
        )
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, length)
    )


def _repeated(times: int) -> rg.Kernel:
    """Linear attention with each feature so many times."""
    return rg.Kernel(feature_map=lambda x: torch.cat([x.relu()] * times, -1))


def _row(over: str, n: int, d: int, c: int, m: int, mechanism: rg.FeatureMechanism) -> dict[str, Any]:
    x, v = torch.ones(1, 1, n, d), torch.ones(1, 1, n, m)
    flops = count_flops(lambda: rg.attend(x, x, v, mechanism, path="chunked"))
    scores = 2 * n * last_chunk(n) * (c + m)
    return {"over": over, "N": n, "D": d, "C": c, "M": m, "FLOPs": flops, "FLOPs of sums": flops - scores}


def _figure(rows: Sequence[dict[str, Any]], length: int) -> Figure:
    figure = new_figure(
        8.5,
        3.9,
        title="Twice the dimension, four times the FLOPs: linear attention costs N·C·M",
        note=f"N = {length} where it is fixed; D, C and M are 16 where they are. Points: counted as attention runs, "
        "without the scores of the last chunk. Lines: the formula.",
    )
    for axes, name, title in zip(
        figure.subplots(1, 4, sharey=True),
        ("N", "D", "C", "M"),
        ("over N", "over D = C = M", "over features C", "over value length M"),
        strict=True,
    ):
        mine = sorted((row for row in rows if row["over"] == name), key=lambda row: row[name])
        values = [row[name] for row in mine]
        axes.plot(values, [sums_flops(row["N"], row["C"], row["M"]) for row in mine], color=COLOURS[0])
        axes.plot(values, [row["FLOPs of sums"] for row in mine], "o", color=COLOURS[0], label="counted")
        if name == "D":
            first = mine[0]
            printed = [first["FLOPs of sums"] * value / first["D"] for value in values]
            axes.plot(values, printed, "x--", color=COLOURS[1], label="as printed, N·D")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        dress(axes, title=title, x=name, y="FLOPs" if name == "N" else "")
        axes.legend(fontsize=8, frameon=False)
    return figure
