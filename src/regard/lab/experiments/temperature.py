"""Beta as the inverse of a temperature: from the uniform average to the hard choice."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, QUIET, WEIGHT_MAP, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

ROUNDING = 1e-12


def shares(beta: float, products: Tensor) -> Tensor:
    """The weights of keys by their products with a query."""
    similarities = torch.exp(beta * (products - products.amax(-1, keepdim=True)))
    return similarities / similarities.sum(-1, keepdim=True)


def hard_bound(beta: float, gaps: Tensor, n: int) -> Tensor:
    """The most that the weights leave to all keys but the best, which is ahead of the second by a gap."""
    return (n - 1) * torch.exp(-beta * gaps)


def soft_bound(beta: float, ranges: Tensor, n: int) -> Tensor:
    """The furthest that a weight is from 1/n, when the products of a query differ by a range at most."""
    return torch.expm1(beta * ranges) / n


@experiment(
    claims=("002.1.1b", "002.1.1c", "002.1.1d"),
    title="β is an inverse temperature",
    statement=(
        "The factor $\\beta$ of the scores sets how sharp the weights are; usually it is $1/\\sqrt{d}$. As "
        "$\\beta \\to \\infty$ they become one-hot, and the output is one of the values (hard attention): the best "
        "key leaves at most $(n-1) e^{-\\beta g}$ to all others, where it is ahead of the second by $g$. As "
        "$\\beta \\to 0$ they become uniform, and the output is the mean of the values: no weight is further from "
        "$1/n$ than $(e^{\\beta r} - 1)/n$, where the products differ by at most $r$. In between the entropy falls."
    ),
    formula=r"a_i = \frac{e^{\beta q \cdot k_i}}{\sum_j e^{\beta q \cdot k_j}}",
)
def temperature(
    *,
    betas: Annotated[tuple[float, ...], Between(1e-4, 1000, log=True)] = (0.001, 0.01, 0.03, 0.1, 0.25, 1, 3, 10, 100),
    keys: Annotated[int, Between(2, 1024, log=True)] = 16,
    dim: Annotated[int, Between(1, 1024, log=True)] = 16,
    queries: Annotated[int, Between(1, 4096, log=True)] = 200,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure entropy and largest weight over beta, and compare the two ends with `Argmax` and `Uniform`.

    >>> temperature(betas=(0.1, 10), queries=20).verdict
    'holds'
    """
    random = generator(seed)
    q, k, v = (torch.randn(1, 1, size, dim, generator=random, dtype=torch.float64) for size in (queries, keys, keys))
    products = (q @ k.mT)[0, 0]
    best = products.topk(2).values
    gaps, ranges = best[:, 0] - best[:, 1], best[:, 0] - products.amin(-1)
    betas = tuple(sorted(set(betas)))
    weights = {beta: rg.weights(q, k, rg.Softmax(beta=beta))[0, 0] for beta in (0.0, *betas, math.inf)}
    checks = [
        *_ends(q, k, v, products),
        *(
            Check(
                name=f"β = {beta:g}: weights against the formula, largest difference",
                predicted=0,
                measured=(weights[beta] - shares(beta, products)).abs().max().item(),
                tolerance=ROUNDING * max(1.0, beta),
            )
            for beta in betas
        ),
        *(
            _excess(f"β = {beta:g}: 1 − largest weight, above its bound", 1 - weights[beta].amax(-1), bound)
            for beta in betas
            for bound in [hard_bound(beta, gaps, keys)]
        ),
        *(
            _excess(f"β = {beta:g}: |weight − 1/n|, above its bound", (weights[beta] - 1 / keys).abs().amax(-1), bound)
            for beta in betas
            for bound in [soft_bound(beta, ranges, keys)]
        ),
    ]
    entropies = [torch.special.entr(part).sum(-1) for part in weights.values()]
    rises = max((after - before).max().item() for before, after in pairwise(entropies))
    checks.append(
        Check(name="largest rise of the entropy with β", predicted=0, measured=rises, rule="at most", tolerance=1e-9)
    )
    rows = [
        {
            "beta": beta,
            "entropy": entropy.mean().item(),
            "largest weight": part.amax(-1).mean().item(),
            "smallest weight": part.amin(-1).mean().item(),
        }
        for (beta, part), entropy in zip(weights.items(), entropies, strict=True)
    ]
    first = {beta: part[0].sort(descending=True).values for beta, part in weights.items()}
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, first, dim))


def _ends(q: Tensor, k: Tensor, v: Tensor, products: Tensor) -> list[Check]:
    """Checks of both limits and of the default."""
    chosen, keys, dim = v[0, 0, products.argmax(-1)], k.shape[2], q.shape[3]
    plain = rg.weights(q, k, rg.Softmax(beta=dim**-0.5))
    apart = {
        "β = ∞: output against the value of the best key": rg.attend(q, k, v, rg.Softmax(beta=math.inf)) - chosen,
        "β = ∞ against Argmax": rg.attend(q, k, v, rg.Softmax(beta=math.inf)) - rg.attend(q, k, v, rg.Argmax()),
        "β = 0: weights against 1/n": rg.weights(q, k, rg.Softmax(beta=0.0)) - 1 / keys,
        "β = 0: output against the mean value": rg.attend(q, k, v, rg.Softmax(beta=0.0)) - v.mean(2, keepdim=True),
        "β = 0 against Uniform": rg.attend(q, k, v, rg.Softmax(beta=0.0)) - rg.attend(q, k, v, rg.Uniform()),
        "no β against 1/√d": rg.weights(q, k) - plain,
    }
    return [
        Check(name=f"{name}, largest difference", predicted=0, measured=gap.abs().max().item(), tolerance=ROUNDING)
        for name, gap in apart.items()
    ]


def _excess(name: str, measured: Tensor, bound: Tensor) -> Check:
    """Check that no query is above its bound."""
    return Check(name=name, predicted=0, measured=(measured - bound).max().item(), rule="at most", tolerance=ROUNDING)


def _figure(rows: Sequence[dict[str, float]], first: dict[float, Tensor], dim: int) -> Figure:
    figure = new_figure(
        8.5,
        3.8,
        title="From the uniform average to the hard choice",
        note="Left: means over the queries; dotted lines are Uniform (β = 0) and Argmax (β = ∞). Right: one query.",
    )
    axes, picture = figure.subplots(1, 2, width_ratios=(1.5, 1))
    inner = rows[1:-1]
    betas = [row["beta"] for row in inner]
    # The entropy as a share of that of equal weights, so that both curves have one axis.
    most = rows[0]["entropy"]
    axes.plot(betas, [row["entropy"] / most for row in inner], "o-", color=COLOURS[0], label="entropy / ln n")
    axes.plot(betas, [row["largest weight"] for row in inner], "s-", color=COLOURS[1], label="largest weight")
    for end in (rows[0], rows[-1]):
        axes.axhline(end["entropy"] / most, color=COLOURS[0], linestyle=":", linewidth=1)
        axes.axhline(end["largest weight"], color=COLOURS[1], linestyle=":", linewidth=1)
    axes.axvline(dim**-0.5, color=QUIET, linewidth=0.8)
    axes.annotate(
        "1/√d", (dim**-0.5, 0.5), xytext=(-3, 0), textcoords="offset points", fontsize=8, color=QUIET, ha="right"
    )
    axes.set_xscale("log")
    dress(axes, x="β", y="share")
    axes.legend(fontsize=8, frameon=False)
    picture.imshow(torch.stack(list(first.values())), cmap=WEIGHT_MAP, vmin=0, vmax=1, aspect="auto")
    dress(picture, x="keys, the best first", y="β", title="weights of one query")
    picture.grid(visible=False)
    picture.set_yticks(range(len(first)), ["∞" if beta == math.inf else f"{beta:g}" for beta in first])
    return figure
