"""Temperature: the factor of the scores, from the average to argmax attention, which has no gradients."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import (
    formula,
    function,
    kind,
    letters,
    number,
    real,
    tensor,
    together,
    unfilled,
)
from regard.lab.question import question
from regard.lab.questions.inputs import numbers, weights_of
from regard.lab.statistics import generator

EXAMPLE = {
    "keys": [[1.0, 2.0, 0.0], [0.0, 3.0, 4.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
    "values": [[2.0, 0.0, 1.0], [1.0, 4.0, 3.0], [0.0, -1.0, 4.0], [1.0, 0.0, -1.0]],
    "query": [1.0, 1.0, 2.0],
}


@question(
    "temperature.1",
    tasks=("002.1.1a",),
    text=(
        "In this convention vectors are **columns**: $Q$ is $d \\times n$, $K$ is $d \\times m$ and $V$ is $t \\times "
        "m$. Write attention with $\\beta$ as the factor of the scores; the result $H$ is $t \\times n$."
    ),
    begin="def attend(Q, K, V, beta):",
    solution="A = torch.softmax(beta * K.T @ Q, dim=0)\nreturn V @ A",
    points=2,
)
def _columns(answer: object) -> str:
    def attend(Q: Tensor, K: Tensor, V: Tensor, beta: float) -> Tensor:
        q, k, v = (x.T[None, None] for x in (Q, K, V))
        return rg.attend(q, k, v, rg.Softmax(beta=beta))[0, 0].T

    def across(Q: Tensor, K: Tensor, V: Tensor, beta: float) -> Tensor:
        """The softmax over queries."""
        scores = rg.Softmax(beta=1.0).score(K.T, Q.T) * beta
        return V @ torch.stack([weights_of(row) for row in scores])

    random = generator(5)

    def draw(d: int, n: int, m: int, t: int, beta: float) -> list[object]:
        return [*(torch.randn(*size, generator=random) for size in ((d, n), (d, m), (t, m))), beta]

    return function(
        answer,
        attend,
        {
            "d = 4, n = 3, m = 5, t = 2, beta = 0.5": draw(4, 3, 5, 2, 0.5),
            "d = 3, n = m = 4, t = 3, beta = 2": draw(3, 4, 4, 3, 2.0),
            "one query": draw(6, 1, 7, 2, 0.3),
        },
        {
            "the softmax is over the queries: the weights of a query (a column of A) must sum to 1 over the "
            "keys": across,
            "beta is not used": lambda Q, K, V, beta: attend(Q, K, V, 1.0),
            "scores are divided by √d besides: here beta is the whole factor": lambda Q, K, V, beta: attend(
                Q, K, V, beta / math.sqrt(len(Q))
            ),
            "scores are divided by beta, which would be the temperature": lambda Q, K, V, beta: attend(
                Q, K, V, 1 / beta
            ),
        },
    )


@question(
    "temperature.2",
    tasks=("002.1.1b",),
    text="Which $\\beta$ is usual for keys of length 256?",
    solution="1 / math.sqrt(256)",
)
def _usual(answer: object) -> str:
    beta = rg.Softmax().scale(256)
    return number(
        answer, beta, {"this is √d; beta multiplies the scores": 1 / beta, "this is 1/d, and not its root": beta**2}
    )


@question(
    "temperature.3",
    tasks=("002.1.1c", "002.1.1d"),
    text=(
        "Which $\\beta$ (a) hands on exactly one value vector for each query, where no two scores are equal, and "
        "which (b) gives every value the same weight? `float` knows more than the finite numbers."
    ),
    begin='temperature_3 = {"one value": ..., "average": ...}',
    solution='{"one value": float("inf"), "average": 0.0}',
    points=2,
)
def _ends(answer: object) -> str:
    extremes = {"one value": rg.Argmax(), "average": rg.Uniform()}
    if fault := unfilled(answer, extremes):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    return together({name: _extreme(values[name], mechanism) for name, mechanism in extremes.items()})


def _extreme(value: object, mechanism: rg.Softmax) -> str:
    """What is wrong with a beta that should give the weights of another mechanism."""
    beta = real(value)
    if beta is None or not beta >= 0:
        return f"expected a number of at least 0, got {kind(value)}"
    random = generator(6)
    q, k = (torch.randn(1, 1, 5, 4, generator=random, dtype=torch.float64) for _ in range(2))
    weights, wanted = rg.weights(q, k, rg.Softmax(beta=beta)), rg.weights(q, k, mechanism)
    if math.isinf(beta) == math.isinf(mechanism.scale(4)) and torch.allclose(weights, wanted, rtol=0, atol=1e-12):
        return ""
    low, high = weights.min().item(), weights.max().item()
    return f"with beta = {beta:g} the weights of five keys go from {low:.2g} to {high:.4g}"


@question(
    "temperature.4",
    tasks=("002.1.1c", "002.1.1d"),
    text=(
        "The same by a fully connected layer without bias: which matrix `W`, (5, 5), applied as `W @ V` to five value "
        "vectors (the rows of `V`), (a) hands every value on unchanged, and which (b) gives what attention with equal "
        "weights gives?"
    ),
    begin='temperature_4 = {"unchanged": ..., "average": ...}',
    solution='{"unchanged": torch.eye(5), "average": torch.full((5, 5), 1 / 5)}',
)
def _matrices(answer: object) -> str:
    if fault := unfilled(answer, ("unchanged", "average")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    unit = 100 * torch.eye(5)[None, None]
    hard, even = (rg.weights(unit, unit, mechanism)[0, 0] for mechanism in (rg.Argmax(), rg.Uniform()))
    summed = {"this sums the values; an average divides by their number": torch.ones(5, 5)}
    return together(
        {
            "unchanged": tensor(values["unchanged"], hard, {"this mixes the values": even}),
            "average": tensor(values["average"], even, summed, probabilities=True),
        }
    )


@question(
    "argmax.1",
    tasks=("003.2a",),
    text=(
        "Argmax attention returns the value of the key with the largest inner product. What does it give for the query "
        "$(1, 1, 2)$, the keys $(1, 2, 0)$, $(0, 3, 4)$, $(5, 0, 0)$, $(0, 0, 1)$ and the values $(2, 0, 1)$, "
        "$(1, 4, 3)$, $(0, -1, 4)$, $(1, 0, -1)$? A list of three numbers."
    ),
    solution="[1, 4, 3]",
)
def _argmax(answer: object) -> str:
    q, k, v = (torch.tensor(EXAMPLE[name]).view(1, 1, -1, 3) for name in ("query", "keys", "values"))
    hard = rg.attend(q, k, v, rg.Argmax())[0, 0, 0]
    mistakes = {
        "this is the key that was found; its value was asked for": (rg.weights(q, k, rg.Argmax()) @ k)[0, 0, 0],
        "this is softmax attention with scaled scores: all values are in it": rg.attend(q, k, v)[0, 0, 0],
        "this is softmax attention: all values are in it": rg.attend(q, k, v, rg.Softmax(beta=1.0))[0, 0, 0],
        "this is the mean of the values": rg.attend(q, k, v, rg.Uniform())[0, 0, 0],
        "these are the scores; the value of the key with the largest was asked for": (q @ k.mT)[0, 0, 0],
        "these are the weights; they are still to be applied to the values": rg.weights(q, k, rg.Argmax())[0, 0, 0],
    }
    for place, value in enumerate(v[0, 0]):
        if not torch.equal(value, hard):
            mistakes[f"this is value {place + 1}, whose key does not have the largest inner product"] = value
    return tensor(answer, hard, mistakes, tolerance=1e-3)


@question(
    "argmax.2",
    tasks=("003.2b",),
    text=(
        "A loss is a function of the output of **argmax** attention, and its gradient is computed. Which of these get "
        "a gradient other than 0?\n\n"
        "a) the queries\n"
        "b) the keys\n"
        "c) the value that was chosen\n"
        "d) the values that were not chosen"
    ),
    solution='"c"',
)
def _gradients(answer: object) -> str:
    q, k, v = (numbers(1, 1, n, 3, seed=seed).requires_grad_() for seed, n in enumerate((1, 4, 4)))
    rg.attend(q, k, v, rg.Argmax()).square().sum().backward()
    chosen = rg.weights(q, k, rg.Argmax())[0, 0, 0] > 0

    def size(gradient: Tensor | None) -> float:
        return 0.0 if gradient is None else gradient.abs().sum().item()

    assert v.grad is not None
    parts = {"a": size(q.grad), "b": size(k.grad), "c": size(v.grad[0, 0, chosen]), "d": size(v.grad[0, 0, ~chosen])}
    return letters(
        answer,
        "".join(letter for letter, gradient in parts.items() if gradient > 0),
        "abcd",
        {
            "a": "a small change of the query does not change which key wins",
            "b": "a small change of a key does not change which key wins",
            "c": "the output is this value",
            "d": "the output does not depend on them",
        },
    )


@question(
    "argmax.3",
    tasks=("003.2b",),
    text=(
        "So that queries and keys learn, the weights must be soft. For two keys with the scores $s$ and $0$ and "
        "softmax weights with the factor $\\beta$: what is the derivative of the first weight by $s$? See what becomes "
        "of it for large $\\beta$."
    ),
    begin="def slope(s, beta):",
    solution="a = 1 / (1 + math.exp(-beta * s))\nreturn beta * a * (1 - a)",
    points=2,
)
def _slope(answer: object) -> str:
    def slope(s: float, beta: float) -> float:
        score = torch.tensor([[[[s]]]], dtype=torch.float64, requires_grad=True)
        keys = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.float64)
        rg.weights(score, keys, rg.Softmax(beta=beta))[..., 0].sum().backward()
        assert score.grad is not None
        return score.grad.item()

    def weight(s: float, beta: float) -> float:
        return 1 / (1 + math.exp(-beta * s))

    return formula(
        answer,
        slope,
        [(0.5, 1.0), (1.0, 2.0), (-0.5, 5.0), (0.3, 20.0)],
        {
            "the inner derivative is missing: the score is multiplied by beta": lambda s, beta: slope(s, beta) / beta,
            "this is the weight itself": weight,
            "the derivative has the factor 1 − a, too": lambda s, beta: beta * weight(s, beta),
        },
    )
