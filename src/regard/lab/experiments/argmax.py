"""Hard attention: the worked example, and why queries and keys learn nothing from it."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

import regard as rg
from regard.core.style import COLOURS, Figure, dress, new_figure
from regard.lab.experiment import Between, Check, Measurements
from regard.lab.registry import experiment
from regard.lab.statistics import generator

QUERY = (1.0, 1.0, 2.0)
KEYS = ((1.0, 2.0, 0.0), (0.0, 3.0, 4.0), (5.0, 0.0, 0.0), (0.0, 0.0, 1.0))
VALUES = ((2.0, 0.0, 1.0), (1.0, 4.0, 3.0), (0.0, -1.0, 4.0), (1.0, 0.0, -1.0))
ANSWER = (1.0, 4.0, 3.0)
TINY_STEP = 1e-9
"""A change of keys and queries that is far smaller than the gap between any two scores."""


def query_gradient(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, beta: float) -> Tensor:
    """The gradient of upstream·softmax(beta q kᵀ) v with respect to q."""
    weights = torch.softmax(beta * q @ k.mT, -1)
    gains = upstream @ v.mT
    return beta * (weights * (gains - (weights * gains).sum(-1, keepdim=True))) @ k


@experiment(
    claims=("003.2",),
    title="Argmax attention, and why nobody trains with it",
    statement=(
        "Argmax attention returns the value of the key that is most similar to the query. In the worked example with "
        "$q = (1, 1, 2)$ the similarities are 3, 11, 5 and 2, and the output is $(1, 4, 3)$. A small change of queries "
        "or keys does not change which key wins, so their gradients are zero, and the maps that make them are never "
        "updated. Softmax at any finite $\\beta$ has a gradient."
    ),
    formula=(
        r"\frac{\partial \ell}{\partial q} = \beta \sum_s a_s \Bigl(c_s - \sum_{s'} a_{s'} c_{s'}\Bigr) k_s, "
        r"\quad c_s = v_s \cdot \frac{\partial \ell}{\partial o}"
    ),
)
def argmax(
    *,
    betas: Annotated[tuple[float, ...], Between(0.001, 1000, log=True)] = (
        *(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        *(100.0, 300.0, 1000.0),
    ),
    keys: Annotated[int, Between(2, 512, log=True)] = 16,
    d: Annotated[int, Between(1, 256, log=True)] = 8,
    queries: Annotated[int, Between(1, 512, log=True)] = 64,
    seed: Annotated[int, Between(0, 2**31 - 1)] = 0,
) -> Measurements:
    """Run the worked example, and measure the gradients of queries and keys over beta.

    >>> argmax(betas=(0.1, 1.0), queries=8).verdict
    'holds'
    """
    random = generator(seed)
    q, upstream = (torch.randn(1, 1, queries, d, generator=random, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 1, keys, d, generator=random, dtype=torch.float64) for _ in range(2))
    hard = _gradients(rg.Argmax(), q, k, v, upstream)
    moved = rg.attend(q + TINY_STEP, k - TINY_STEP, v, rg.Argmax()) - rg.attend(q, k, v, rg.Argmax())
    checks = [
        *_example(),
        Check(name="gradient of the queries, argmax", predicted=0, measured=_norm(hard[0])),
        Check(name="gradient of the keys, argmax", predicted=0, measured=_norm(hard[1])),
        Check(name="share of queries with a gradient, argmax", predicted=0, measured=_reached(hard[0])),
        Check(
            name="gradient of the values, argmax (what arrives at the outputs)",
            predicted=upstream.sum().item(),
            measured=hard[2].sum().item(),
            tolerance=1e-12 * upstream.abs().sum().item(),
        ),
        Check(name=f"change of the output when q and k move by {TINY_STEP:g}", predicted=0, measured=_norm(moved)),
    ]

    def size(beta: float) -> float:
        return _norm(query_gradient(q, k, v, upstream, beta))

    rows: list[dict[str, float]] = []
    for beta in betas:
        soft = _gradients(rg.Softmax(beta=beta), q, k, v, upstream)
        largest = beta * _norm(k) * _norm(upstream) * _norm(v)  # what the terms of the sum can reach before they cancel
        checks.append(
            Check(
                name=f"gradient of the queries, β = {beta:g}",
                predicted=size(beta),
                measured=_norm(soft[0]),
                tolerance=1e-14 * largest,
            )
        )
        rows.append(
            {
                "β": beta,
                "gradient of q": _norm(soft[0]),
                "by the formula": size(beta),
                "gradient of k": _norm(soft[1]),
                "largest weight": rg.weights(q, k, rg.Softmax(beta=beta)).amax(-1).mean().item(),
            }
        )
    gentle = _gradients(rg.Softmax(), q, k, v, upstream)
    checks.append(Check(name="share of queries with a gradient, softmax", predicted=1, measured=_reached(gentle[0])))
    return Measurements(statement=tuple(checks), table=tuple(rows), draw=lambda: _figure(rows, size, _norm(hard[0])))


def _example() -> list[Check]:
    q, k, v = (torch.tensor(numbers).view(1, 1, -1, 3) for numbers in (QUERY, KEYS, VALUES))
    out = rg.attend(q, k, v, rg.Argmax()).flatten().tolist()
    return [
        Check(name=f"worked example, coordinate {place + 1}", predicted=ANSWER[place], measured=out[place])
        for place in range(3)
    ]


def _gradients(mechanism: rg.Mechanism, q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values; 0 for those that the output does not depend on."""
    inputs = q, k, v = tuple(x.clone().requires_grad_() for x in (q, k, v))
    out = rg.attend(q, k, v, mechanism)
    return torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


def _norm(x: Tensor) -> float:
    return x.norm().item()


def _reached(gradient: Tensor) -> float:
    """The share of rows whose gradient is not 0."""
    return (gradient != 0).any(-1).double().mean().item()


def _figure(rows: Sequence[Mapping[str, float]], formula: Callable[[float], float], hard: float) -> Figure:
    figure = new_figure(
        7.5,
        3.8,
        title="The gradient vanishes on the way to argmax",
        note=f"Argmax is β = ∞: its gradient is {hard:g}. Norms over all queries or keys. Linear below 0.0001.",
    )
    axes = figure.subplots()
    betas = [row["β"] for row in rows]
    low, high = math.log(min(betas)), math.log(max(betas))
    dense = [math.exp(low + (high - low) * step / 100) for step in range(101)]
    axes.plot(dense, [formula(beta) for beta in dense], color=COLOURS[0], label="formula, queries")
    axes.plot(betas, [row["gradient of q"] for row in rows], "o", color=COLOURS[0], label="measured, queries")
    axes.plot(
        betas, [row["gradient of k"] for row in rows], "s", color=COLOURS[1], fillstyle="none", label="measured, keys"
    )
    axes.axhline(hard, color=COLOURS[6], linestyle=":", label="argmax")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1e-4)
    axes.set_ylim(-5e-5, 5 * max(row["gradient of k"] for row in rows))
    dress(axes, x="β", y="norm of the gradient")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(0.3, 0.28))
    return figure
