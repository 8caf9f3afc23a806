"""The derivatives of a saturated softmax: nearly 0, so that its output hardly moves."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, INK, WEIGHT_MAP, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment

SOFTMAX = rg.Softmax(beta=1.0)
MOVED = 1.0
"""How far every score is moved."""
_SMALLEST = 5e-324
"""The smallest float64 above 0."""


def derivatives(scores: Sequence[float]) -> Tensor:
    """The matrix of derivatives in float64, computed in logarithms: y_i (1 − y_i) and −y_i y_j, where 1 − y_i is a sum
    over the others, without cancellation."""
    z = torch.tensor(scores, dtype=torch.float64)
    logs = torch.log_softmax(z, 0)
    table = -(logs[:, None] + logs).exp()
    for place in range(len(z)):
        others = torch.cat([z[:place], z[place + 1 :]])
        rest = torch.logsumexp(others, 0) - torch.logsumexp(z, 0) if len(others) else torch.tensor(-math.inf)
        table[place, place] = (logs[place] + rest).exp()
    return table


def sensitivity(table: Tensor) -> float:
    """The largest factor by which a small change of the scores is multiplied: the largest singular value."""
    size = table.abs().max().item() or 1.0  # the values are too small to be squared
    return float(torch.linalg.matrix_norm(table / size, ord=2)) * size


@experiment(
    claims=("004.12.4",),
    title="A saturated softmax is insensitive",
    statement=(
        "At the scores $(-3, 1, 100, 5, -1)$ all 25 derivatives $\\partial y_i/\\partial z_j$ of softmax are close to "
        "0. It is therefore very sensitive: small changes of the scores lead to large changes of its output."
    ),
    formula=r"\frac{\partial y_i}{\partial z_j} = y_i(\delta_{ij} - y_j)",
    instead=(
        "Derivatives near 0 mean that the output hardly moves: a saturated softmax is insensitive, and passes no "
        "gradient back. y₃(1 − y₃) computed directly is 0, since y₃ rounds to 1; in logarithms it is 5.64e-42. Plain "
        "exponentials overflow in float32."
    ),
)
def saturated_softmax(
    *, scores: Annotated[tuple[float, ...], Between(-1000, 1000)] = (-3.0, 1.0, 100.0, 5.0, -1.0)
) -> Measurements:
    """The derivatives of the library's weights by autograd, in float32 and float64, against those in logarithms.

    >>> saturated_softmax().verdict
    'does not hold'
    """
    exact, count = derivatives(scores), len(scores)
    top = int(torch.tensor(scores).argmax())
    within = exact[top, top].item()
    even = sensitivity(derivatives([0.0] * count))
    statement, instead, rows = [], [], []
    for kind in (torch.float32, torch.float64):
        name, rounding = str(kind).removeprefix("torch."), torch.finfo(kind).eps
        weights, table = _softmax(scores, kind)
        direct = (weights * (1 - weights))[top].item()
        off = -(table[top].sum() - table[top, top]).item()
        statement += [
            Check(
                name=f"largest derivative, {name}", predicted=0, measured=table.abs().max().item(), tolerance=rounding
            ),
            Check(
                name=f"sensitivity, at least that of equal scores, {name}",
                predicted=even,
                measured=sensitivity(table.double()),
                tolerance=rounding,
                rule="at least",
            ),
        ]
        instead += [
            Check(
                name=f"largest error of the {count**2} derivatives, {name}",
                predicted=0,
                measured=(table.double() - exact).abs().max().item(),
                tolerance=4 * rounding,
            ),
            Check(
                name=f"y(1 − y) of the largest weight, directly, {name}",
                predicted=0 if within < rounding / 4 else within,
                measured=direct,
                tolerance=0 if within < rounding / 4 else 4 * rounding,
            ),
            Check(
                name=f"change of the output when scores move by {MOVED:g}, {name}",
                predicted=math.exp(2 * MOVED) * within / weights[top].item(),
                measured=_moved(scores, kind),
                tolerance=4 * rounding,
                rule="at most",
            ),
            Check(
                name=f"exp of the largest score overflows (1) or not (0), {name}",
                predicted=float(max(scores) > math.log(torch.finfo(kind).max)),
                measured=float(math.isnan(_plain(scores, kind))),
            ),
        ]
        rows.append(
            {
                "dtype": name,
                "largest weight": weights[top].item(),
                "y(1 − y), directly": direct,
                "sum of y·y_j over the others": off,
                "y(1 − y), in logarithms": within,
                "plain exp": _plain(scores, kind),
            }
        )
    # Rounded scores change a power by as much as they are large; powers below the smallest number lose digits.
    spread = max(scores) - min(scores)
    digits = count * (1 + spread) * torch.finfo(torch.float64).eps + (_SMALLEST / within if within else 0)
    instead.append(
        Check(
            name="log of y(1 − y), from the others' derivatives, float64",
            predicted=math.log(within) if within else -math.inf,
            measured=math.log(off) if off else -math.inf,
            tolerance=digits,
        )
    )
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(scores, exact)
    )


def _softmax(scores: Sequence[float], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """The library's weights for keys that are the scores and a query of 1, and their derivatives by autograd."""
    q, k = torch.ones(1, 1, 1, 1, dtype=kind), torch.tensor(scores, dtype=kind)

    def weights(z: Tensor) -> Tensor:
        return rg.weights(q, z[None, None, :, None], SOFTMAX).flatten()

    return weights(k), torch.autograd.functional.jacobian(weights, k)


def _moved(scores: Sequence[float], kind: torch.dtype) -> float:
    """The largest change of a weight when the scores are moved by MOVED, the largest one down and the others up."""
    top = max(scores)
    moved = [score - MOVED if score == top else score + MOVED for score in scores]
    return (_softmax(moved, kind)[0] - _softmax(scores, kind)[0]).abs().max().item()


def _plain(scores: Sequence[float], kind: torch.dtype) -> float:
    """The largest weight by the printed formula, exp(z) over the sum of exp(z): NaN where exp overflows."""
    powers = torch.tensor(scores, dtype=kind).exp()
    return (powers / powers.sum()).max().item()


def _figure(scores: Sequence[float], exact: Tensor) -> Figure:
    figure = new_figure(
        8.5,
        4,
        title="The further apart the scores, the less the output moves with them",
        note="Scores z = (" + ", ".join(f"{score:g}" for score in scores) + "), times t on the right.",
    )
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    logs = exact.abs().clamp(min=1e-320).log10()
    middle = (logs.min() + logs.max()) / 2
    left.imshow(logs, cmap=WEIGHT_MAP)
    for row, column in product(range(len(scores)), repeat=2) if len(scores) <= 6 else ():
        colour = "white" if logs[row, column] > middle else INK
        value = exact[row, column].item()
        left.text(column, row, f"{value:.1e}", ha="center", va="center", fontsize=8, color=colour)
    names = [f"{score:g}" for score in scores]
    left.set_xticks(range(len(scores)), names)
    left.set_yticks(range(len(scores)), names)
    dress(left, title="all derivatives ∂yᵢ/∂zⱼ, exact", x="j, by its score", y="i, by its score")
    left.grid(visible=False)
    times = [step / 40 for step in range(41)]
    line = [sensitivity(derivatives([time * score for score in scores])) for time in times]
    right.plot(times, [max(value, 1e-320) for value in line], color=COLOURS[0], label="formula, in logarithms")
    for colour, marker, kind in ((COLOURS[1], "o", torch.float64), (COLOURS[2], "x", torch.float32)):
        points = [(time, sensitivity(_softmax([time * z for z in scores], kind)[1].double())) for time in times[::2]]
        above = [(time, value) for time, value in points if value > 0]
        label = f"library, {str(kind).removeprefix('torch.')}"
        right.plot(*zip(*above, strict=True), marker, color=colour, label=label) if above else None
    right.set_yscale("log")
    dress(right, title="sensitivity: largest singular value", x="t", y="sensitivity")
    right.legend(fontsize=8, frameon=False)
    return figure
