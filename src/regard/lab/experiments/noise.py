"""Noise on a key: it moves the output at first order, and the mean of the output at second order."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import Estimate, generator, mean, power

SLOPES = 0.05
"""How far a slope may be from its order at most."""


def expected(q: Tensor, weight: float, step: float) -> tuple[float, float]:
    """Mean of ‖ΔH‖ over sigma, and length of the mean of ΔH over sigma², for small sigma.

    `weight` is that of the noisy key and `step` = ‖v − H‖: the output moves along v − H, by the change of the weight.
    """
    size = q.norm().item() / math.sqrt(q.shape[-1])  # standard deviation of the score, over sigma
    return math.sqrt(2 / math.pi) * size * weight * step, size**2 * weight * (1 - 2 * weight) * step / 2


@experiment(
    claims=("002.1.1e",),
    title="Zero-mean noise on a key does move the output",
    statement=(
        "Add Gaussian noise of mean 0 and a small standard deviation $\\sigma$ to a key. Since the mean of the noise "
        "is 0, the output $H$ does not change."
    ),
    formula=(
        r"E\lVert\Delta H\rVert \approx \sqrt{2/\pi}\,\beta\lVert q\rVert\,a_i\lVert v_i - H\rVert\,\sigma, \quad "
        r"\lVert E\,\Delta H\rVert \approx \tfrac{1}{2}\beta^2\lVert q\rVert^2 a_i(1 - 2a_i)"
        r"\lVert v_i - H\rVert\,\sigma^2"
    ),
    instead=(
        "Every single output moves in proportion to $\\sigma$: a zero-mean change of the score is no zero change. What "
        "cancels is the first order of the mean over the noise; the mean output moves, too, in proportion to "
        "$\\sigma^2$, because softmax is curved."
    ),
)
def noise(
    *,
    sigmas: Annotated[tuple[float, ...], Between(1e-4, 0.1, log=True)] = (0.001, 0.003, 0.01, 0.03, 0.1),
    keys: Annotated[int, Between(3, 64, log=True)] = 8,
    dim: Annotated[int, Between(1, 128, log=True)] = 16,
    samples: Annotated[int, Between(10_000, 100_000, log=True)] = 40_000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure how far noise on one key moves the output, and its mean, over the size of the noise.

    >>> noise(sigmas=(0.01, 0.1), samples=10_000).verdict
    'does not hold'
    """
    random = generator(seed)
    q, k, v = (torch.randn(1, 1, size, dim, generator=random, dtype=torch.float64) for size in (1, keys, keys))
    exact = rg.attend(q, k, v)
    weights = rg.weights(q, k)[0, 0, 0]
    # The key with the least weight: at a weight of 1/2 the second order vanishes.
    chosen = int(weights.argmin())
    along = (v[:, :, chosen] - exact[:, :, 0]).flatten()
    step = along.norm().item()
    sizes = sorted({min(sigmas) / 10, *sigmas})
    draws = torch.randn(samples // 2, dim, generator=random, dtype=torch.float64)
    moved = [_moved(q, k, v, chosen, sigma * draws, exact) for sigma in sizes]
    lengths = [mean(part.norm(dim=-1).mean(0)) for part in moved]
    shifts = [mean(part.mean(0) @ (along / step)) for part in moved]
    first, second = expected(q, weights[chosen].item(), step)
    statement = [
        check
        for sigma, length, shift in zip(sizes, lengths, shifts, strict=True)
        for check in (
            _check(f"mean of ‖ΔH‖, σ = {sigma:g}", 0, length),
            _check(f"mean of ΔH along v − H, σ = {sigma:g}", 0, shift),
        )
    ]
    # What the orders left out can change: the square of the largest standard deviation of a score.
    next_order = min(SLOPES, 1e-3 + 2 * (q.norm().item() * dim**-0.5 * sizes[-1]) ** 2)
    powers = [power(sizes, [abs(estimate.value) for estimate in estimates]) for estimates in (lengths, shifts)]
    instead = [
        Check(name="exponent of σ in the mean of ‖ΔH‖", predicted=1, measured=powers[0], tolerance=next_order),
        Check(name="exponent of σ in ‖mean of ΔH‖", predicted=2, measured=powers[1], tolerance=next_order),
        _check("mean of ‖ΔH‖/σ, smallest σ", first, _over(lengths[0], sizes[0])),
        _check("mean of ΔH/σ² along v − H, smallest σ", second, _over(shifts[0], sizes[0] ** 2)),
    ]
    rows = [
        {
            "sigma": sigma,
            "mean of ‖ΔH‖": length.value,
            "first order": first * sigma,
            "‖mean of ΔH‖": abs(shift.value),
            "second order": second * sigma**2,
        }
        for sigma, length, shift in zip(sizes, lengths, shifts, strict=True)
    ]
    return Measurements(
        statement=tuple(statement), instead=tuple(instead), table=tuple(rows), draw=lambda: _figure(rows, powers)
    )


def _moved(q: Tensor, k: Tensor, v: Tensor, chosen: int, draws: Tensor, exact: Tensor) -> Tensor:
    """How the output moves by each draw of noise and by its opposite, (2, N, K)."""
    signed = torch.stack([draws, -draws]).flatten(0, 1)
    noisy = k.repeat(len(signed), 1, 1, 1)
    noisy[:, 0, chosen] += signed
    rows = (part.expand(len(signed), -1, -1, -1) for part in (q, v))
    query, values = rows
    return (rg.attend(query, noisy, values) - exact).reshape(2, len(draws), -1)


def _over(estimate: Estimate, scale: float) -> Estimate:
    low, high = estimate.interval
    return Estimate(estimate.value / scale, (low / scale, high / scale))


def _check(name: str, predicted: float, estimate: Estimate) -> Check:
    return Check(
        name=name,
        predicted=predicted,
        measured=estimate.value,
        tolerance=abs(estimate.value) / 4,
        interval=estimate.interval,
    )


def _figure(rows: Sequence[dict[str, float]], powers: Sequence[float]) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="Noise of mean 0 moves every output (slope 1), and their mean a little (slope 2)",
        note="Lines: first and second order by the formula. Points: measured. The statement has both at 0.",
    )
    axes = figure.subplots()
    sigmas = [row["sigma"] for row in rows]
    for colour, marker, measured, line, exponent in zip(
        COLOURS, "os", ("mean of ‖ΔH‖", "‖mean of ΔH‖"), ("first order", "second order"), powers, strict=False
    ):
        axes.plot(sigmas, [row[line] for row in rows], color=colour)
        label = f"{measured}, fitted slope {exponent:.3f}"
        axes.plot(sigmas, [row[measured] for row in rows], marker, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    dress(axes, x="σ of the noise on one key", y="change of the output")
    axes.legend(fontsize=8, frameon=False)
    return figure
