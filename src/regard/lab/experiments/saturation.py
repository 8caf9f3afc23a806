"""Softmax of scores that are not scaled saturates: its Jacobian vanishes, and a typical query learns nothing."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements, Rule
from regard.lab.registry import experiment
from regard.lab.statistics import Estimate, generator, mean, median, over, randomised

MECHANISMS = {"unscaled": rg.Softmax(beta=1.0), "scaled": rg.Softmax()}
ROUNDING = 1e-12
WIDTH = 32
"""The width of the layer's input; its head may be wider."""
SEQUENCES = 96
LARGE = 4096
"""The head dimension at which "vanishes" (to a tenth) and "does not vanish" (not to a half) are decided."""
GRADIENTS = ("median gradient of a query", "median gradient of a key")
MEAN_GRADIENT = "mean gradient of a query"


def jacobian(weights: Tensor) -> Tensor:
    """The derivative of weights (…, S) by their scores, (…, S, S)."""
    return weights.diag_embed() - weights[..., :, None] * weights[..., None, :]


def ceiling(d: int, n: int) -> float:
    """The most that the mean norm of the Jacobian can be, for unscaled scores of normal queries and n normal keys.

    ‖J‖ ≤ tr J ≤ 2 (1 − a_max) ≤ 2 Σ 1/(1 + exp(gap to the best key)). All gaps together have a density of at most
    n/(√(2π) ‖q‖), and the integral of 1/(1 + e^x) is ln 2. The mean of 1/‖q‖ is a quotient of gamma functions.
    """
    inverse = math.exp(math.lgamma((d - 1) / 2) - math.lgamma(d / 2)) / math.sqrt(2)
    return math.sqrt(2 / math.pi) * math.log(2) * n * inverse


@experiment(
    claims=("000.1a.softmax",),
    title="Without the scale softmax saturates",
    statement=(
        "Let queries and keys have independent standard normal entries. Without a scale the scores grow like "
        "$\\sqrt{d}$ and the weights $a$ become one-hot. Where the largest weight is $1 - \\varepsilon$, the norm of "
        "their Jacobian $J$ is at most $n\\varepsilon$; its mean falls like $1/\\sqrt{d}$, below "
        "$\\sqrt{2/\\pi} \\ln 2 \\; n \\, E(1/\\lVert q\\rVert)$. What a layer's queries and keys learn comes through "
        "$J$: the median of their gradients vanishes. (The mean does not: the few queries between two keys get the "
        "more.) With the scale $1/\\sqrt{d}$ nothing vanishes."
    ),
    formula=r"J = \frac{\partial a}{\partial s} = \operatorname{diag}(a) - a a^\top",
)
def saturation(
    *,
    dims: Annotated[tuple[int, ...], Between(4, 4096, log=True)] = (4, 16, 64, 256, 1024, 4096),
    keys: Annotated[int, Between(8, 32, log=True)] = 16,
    samples: Annotated[int, Between(500, 4000, log=True)] = 1000,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Measure the Jacobian of the library's weights, and gradients in a layer, over the head dimension.

    >>> saturation(dims=(4, 64), keys=8, samples=500).verdict
    'holds'
    """
    random = generator(seed)
    checks: list[Check] = []
    measured: dict[int, dict[str, Estimate]] = {}
    for d in sorted(set(dims)):
        sizes: dict[str, Estimate] = {}
        for name, (weights, derivative) in _jacobians(d, keys, samples, random).items():
            norms, least = derivative.flatten(1).norm(dim=-1), keys * _rest(weights)
            sizes[f"mean ‖J‖, {name}"] = mean(norms)
            checks += [
                _below(f"largest |J − formula|, {name}, d = {d}", (derivative - jacobian(weights)).abs().max().item()),
                _below(f"most of ‖J‖ − nε, {name}, d = {d}", (norms - least).max().item()),
            ]
        measured[d] = sizes | _learned(d, keys, random)
        checks.append(_check(f"mean ‖J‖, unscaled, d = {d}", "at most", ceiling(d, keys), sizes["mean ‖J‖, unscaled"]))
    first, last, far = min(measured), max(measured), _learned(LARGE, keys, random)
    checks += [
        _check(f"{what}, unscaled over scaled, d = {LARGE}", "at most", 0.1, over(far[unscaled], far[scaled]))
        for what in GRADIENTS
        for unscaled, scaled in [(f"{what}, unscaled", f"{what}, scaled")]
    ]
    checks += [
        _check(
            f"{what}, scaled, d = {d} over d = {first}", "at least", 0.5, over(most[scaled], measured[first][scaled])
        )
        for what, d, most in (("mean ‖J‖", last, measured[last]), *((what, LARGE, far) for what in GRADIENTS))
        for scaled in [f"{what}, scaled"]
    ]
    rows = [
        {"d": d, "scores": name, "bound of mean ‖J‖": ceiling(d, keys) if name == "unscaled" else None}
        | {what: estimates[f"{what}, {name}"].value for what in ("mean ‖J‖", *GRADIENTS, MEAN_GRADIENT)}
        for d, estimates in measured.items()
        for name in MECHANISMS
    ]
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, keys))


def _jacobians(d: int, n: int, samples: int, random: torch.Generator) -> dict[str, tuple[Tensor, Tensor]]:
    """Weights (N, n) of random queries over n keys and their derivatives by the scores (N, n, n), by autograd."""
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in MECHANISMS}
    for begin in range(0, samples, step := max(1, (1 << 22) // (d * n))):
        count = min(step, samples - begin)
        q, k = (torch.randn(count, 1, size, d, generator=random, dtype=torch.float64) for size in (1, n))
        for name, mechanism in MECHANISMS.items():
            # A bias is added to the scores: the derivative by the bias is that by the scores.
            bias = torch.zeros(count, 1, 1, n, dtype=torch.float64, requires_grad=True)
            weights = rg.weights(q, k, mechanism, bias=bias)[:, 0, 0]
            derivative = [torch.autograd.grad(weights[:, i].sum(), bias, retain_graph=True)[0] for i in range(n)]
            parts[name].append((weights.detach(), torch.stack(derivative, 1)[:, :, 0, 0]))
    return {name: (torch.cat([w for w, _ in part]), torch.cat([j for _, j in part])) for name, part in parts.items()}


def _rest(weights: Tensor) -> Tensor:
    """What the largest weight leaves to the others: their sum, since 1 − a_max would round to 0."""
    return weights.sort(descending=True).values[:, 1:].sum(-1)


def _learned(d: int, n: int, random: torch.Generator) -> dict[str, Estimate]:
    """How long the gradients are that reach the queries and the keys of a layer with one head.

    Those of a sequence are not independent: the median is that over sequences of the median in a sequence.
    """
    row: dict[str, Estimate] = {}
    for name, mechanism in MECHANISMS.items():
        # Queries and keys have entries of variance 1.
        layer = randomised(
            rg.MultiHeadAttention(WIDTH, 1, qk_length=d, value_length=WIDTH, mechanism=mechanism, bias=False), random
        )
        x, wanted = torch.randn(2, SEQUENCES, n, WIDTH, generator=random, dtype=torch.float64)
        q, k, v = layer.project(x)
        out, _ = layer.attend(q, k, v)
        loss = (layer.W_o(layer.combine_heads(out)) * wanted).sum()
        queries, keys = (gradient.norm(dim=-1) for gradient in torch.autograd.grad(loss, (q, k)))
        row |= {
            f"{GRADIENTS[0]}, {name}": median(queries.flatten(1).median(-1).values),
            f"{GRADIENTS[1]}, {name}": median(keys.flatten(1).median(-1).values),
            f"{MEAN_GRADIENT}, {name}": mean(queries.flatten(1).mean(-1)),
        }
    return row


def _check(name: str, rule: Rule, predicted: float, estimate: Estimate) -> Check:
    return Check(name=name, predicted=predicted, measured=estimate.value, rule=rule, interval=estimate.interval)


def _below(name: str, measured: float) -> Check:
    return Check(name=name, predicted=0, measured=measured, rule="at most", tolerance=ROUNDING)


def _figure(rows: Sequence[dict[str, Any]], keys: int) -> Figure:
    figure = new_figure(
        8.5,
        3.8,
        title="Without the scale the Jacobian and the typical gradient vanish",
        note=f"{keys} keys. Left: mean over random queries. Right: length of the gradient in a layer of one head.",
    )
    left, right = figure.subplots(1, 2)
    for (name, colour), marker in zip((("unscaled", COLOURS[1]), ("scaled", COLOURS[0])), "os", strict=True):
        mine = [row for row in rows if row["scores"] == name]
        dims = [row["d"] for row in mine]
        if name == "unscaled":
            left.plot(dims, [row["bound of mean ‖J‖"] for row in mine], ":", color=colour, label="bound")
        left.plot(dims, [row["mean ‖J‖"] for row in mine], f"{marker}-", color=colour, label=name)
        for what, line in zip((*GRADIENTS, MEAN_GRADIENT), ("-", "--", ":"), strict=True):
            # A logarithmic axis has no 0.
            right.plot(dims, [max(row[what], 1e-30) for row in mine], f"{marker}{line}", color=colour,
                       label=f"{what}, {name}")  # fmt: skip
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    dress(left, x="head dimension d", y="‖J‖")
    dress(right, x="head dimension d", y="length of the gradient")
    for axes in (left, right):
        axes.legend(fontsize=7, frameon=False)
    return figure
