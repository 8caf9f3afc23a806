"""A key that is scaled: the first-order change of the output, and the exact one."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import Estimate, generator, power, ratio

ROUNDING = 1e-12
SMALL = 0.01
"""The relative error up to which the first order counts as right, and how near to 1 a scale is near."""
NEAR = (1.0001, 1.001, 1.01)
ERROR = "relative error of the first order"


def first_order(rise: Tensor, weight: Tensor) -> Tensor:
    """The step along v − H when the key's score rises: linear in the rise."""
    return weight * rise


def exact(rise: Tensor, weight: Tensor) -> Tensor:
    """The same for a rise of any size: the other keys keep their shares of what is left."""
    grown = weight * torch.expm1(rise)
    return grown / (1 + grown)


@experiment(
    claims=("002.1.1f",),
    title="Scaling a key: when the first order is enough",
    statement=(
        "Multiply key $i$ by $\\alpha$. The output changes by the derivative of softmax times the change of the "
        "score: $\\Delta H = (\\alpha - 1)\\,s_i\\,a_i\\,(v_i - H)$, where $s_i = \\beta q \\cdot k_i$. (It counts as "
        "right up to a relative error of 1 %.)"
    ),
    formula=(
        r"\Delta H = \frac{a_i (e^{\delta} - 1)}{1 + a_i (e^{\delta} - 1)} (v_i - H), \quad "
        r"\delta = (\alpha - 1) s_i"
    ),
    condition=(
        "$\\alpha$ is near 1: the error is of second order in $\\alpha - 1$, and 0.3 % of the change at 1.01, but a "
        "fifth of it at 2. The formula below is exact for every $\\alpha$, and the first order is its tangent."
    ),
)
def key_scale(
    *,
    alphas: Annotated[tuple[float, ...], Between(-4, 8)] = (0, 0.5, 0.9, 0.99, 1.01, 1.1, 1.5, 2, 4),
    keys: Annotated[int, Between(2, 256, log=True)] = 8,
    dim: Annotated[int, Between(1, 256, log=True)] = 16,
    samples: Annotated[int, Between(20, 10_000, log=True)] = 1000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure how far a scaled key moves the output, against the first order and against the exact change.

    >>> key_scale(alphas=(1.01, 2), samples=100).verdict
    'holds under a condition'
    """
    random = generator(seed)
    q, k, v = (torch.randn(samples, 1, size, dim, generator=random, dtype=torch.float64) for size in (1, keys, keys))
    before, weight = rg.attend(q, k, v)[:, 0, 0], rg.weights(q, k)[:, 0, 0, :1]
    score = (q[:, 0, 0] * k[:, 0, 0]).sum(-1, keepdim=True) * dim**-0.5
    along = v[:, 0, 0] - before
    moves = {alpha: _scaled(q, k, v, alpha) - before for alpha in sorted({*alphas, *NEAR} - {1.0})}
    wrong = {
        alpha: (first_order((alpha - 1) * score, weight) * along - moved).norm(dim=-1) for alpha, moved in moves.items()
    }
    sizes = {alpha: moved.norm(dim=-1) for alpha, moved in moves.items()}
    relative = {alpha: ratio(wrong[alpha], sizes[alpha]) for alpha in moves}
    chosen = [alpha for alpha in moves if alpha in alphas]
    statement = [_small(alpha, relative[alpha]) for alpha in chosen]
    within = [_small(alpha, relative[alpha]) for alpha in moves if abs(alpha - 1) <= SMALL * 1.01]
    growth = power([alpha - 1 for alpha in NEAR], [wrong[alpha].mean().item() for alpha in NEAR])
    within.append(Check(name="exponent of α − 1 in the error, near 1", predicted=2, measured=growth, tolerance=0.05))
    instead = [
        Check(
            name=f"largest difference from the exact change, α = {alpha:g}",
            predicted=0,
            measured=(exact((alpha - 1) * score, weight) * along - moved).abs().max().item(),
            tolerance=ROUNDING,
        )
        for alpha, moved in moves.items()
    ]
    rows = [
        {
            "alpha": alpha,
            "mean ‖ΔH‖": sizes[alpha].mean().item(),
            ERROR: relative[alpha].value,
        }
        for alpha in moves
    ]
    high = int((score.flatten() - score.quantile(0.97)).abs().argmin())
    steps = {alpha: (moved[high] @ along[high] / along[high].norm()).item() for alpha, moved in moves.items()}
    shown = steps, score[high], weight[high], along[high].norm().item()
    return Measurements(
        statement=tuple(statement),
        within=tuple(within),
        instead=tuple(instead),
        table=tuple(rows),
        draw=lambda: _figure(rows, *shown),
    )


def _scaled(q: Tensor, k: Tensor, v: Tensor, alpha: float) -> Tensor:
    """The output with the first key multiplied by alpha."""
    scaled = k.clone()
    scaled[:, :, 0] *= alpha
    return rg.attend(q, scaled, v)[:, 0, 0]


def _small(alpha: float, relative: Estimate) -> Check:
    return Check(
        name=f"{ERROR}, α = {alpha:g}",
        predicted=SMALL,
        measured=relative.value,
        rule="at most",
        interval=relative.interval,
    )


def _figure(
    rows: Sequence[dict[str, float]], steps: dict[float, float], score: Tensor, weight: Tensor, length: float
) -> Figure:
    figure = new_figure(
        8.5,
        3.8,
        title="The first order is the tangent at α = 1: right near it, wrong away from it",
        note="Left: a query with a high score for the key. Right: mean error over mean change; the line has slope 1.",
    )
    left, right = figure.subplots(1, 2)
    low, high = min(steps), max(steps)
    across = torch.linspace(low, high, 200, dtype=torch.float64)
    rises = (across - 1) * score
    left.plot(across, exact(rises, weight) * length, color=COLOURS[0], label="exact formula")
    left.plot(across, first_order(rises, weight) * length, "--", color=COLOURS[1], label="first order")
    left.plot(list(steps), list(steps.values()), "o", color=COLOURS[0], label="measured")
    dress(left, x="α, the factor on one key", y="step of the output along v − H")
    left.legend(fontsize=8, frameon=False)
    for colour, marker, side, name in ((COLOURS[1], "o", 1, "α > 1"), (COLOURS[2], "s", -1, "α < 1")):
        mine = [row for row in rows if (row["alpha"] - 1) * side > 0]
        away = [abs(row["alpha"] - 1) for row in mine]
        errors = [row[ERROR] for row in mine]
        right.plot(away, errors, marker, color=colour, label=name)
    anchor = next(row[ERROR] for row in rows if math.isclose(row["alpha"], 1.01))
    ends = [1e-4, max(abs(low - 1), abs(high - 1))]
    right.plot(ends, [anchor * end / 0.01 for end in ends], color=COLOURS[6], linewidth=0.8)
    right.axhline(SMALL, color=COLOURS[6], linewidth=0.8, linestyle=":")
    right.set_xscale("log")
    right.set_yscale("log")
    dress(right, x="|α − 1|", y="relative error of the first order")
    right.legend(fontsize=8, frameon=False)
    return figure
