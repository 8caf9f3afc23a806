"""Attention that is another layer: the identity, a linear layer, a convolution."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.lab.answers import (
    formula,
    number,
    real,
    tensor,
)
from regard.lab.question import question
from regard.lab.questions.inputs import numbers


@question(
    "orthogonal.1",
    tasks=("002.1.3c",),
    text=(
        "$K$ has $n$ orthonormal keys and $Q = K$, so $K^\\top Q = I$. Is attention then the identity? Write the "
        "weight that each token gives **itself**, for the factor $\\beta$ of the scores."
    ),
    begin="def own_weight(n, beta):",
    solution="return math.exp(beta) / (math.exp(beta) + n - 1)",
    points=2,
)
def _orthogonal(answer: object) -> str:
    def diagonal(n: int, beta: float) -> float:
        keys = torch.eye(int(n), dtype=torch.float64)[None, None]
        return rg.weights(keys, keys, rg.Softmax(beta=beta))[0, 0, 0, 0].item()

    return formula(
        answer,
        diagonal,
        [(8, 1.0), (4, 3.0), (64, 0.5), (2, 0.0)],
        {
            "Kᵀ Q is the identity, but its softmax is not: e⁰ is 1, so the zeros have weight, too": lambda n, beta: 1.0,
            "there are n − 1 other keys, with e⁰ = 1 each": lambda n, beta: math.exp(beta) / (math.exp(beta) + n),
            "this is the weight of all other tokens": lambda n, beta: 1 - diagonal(n, beta),
            "this is the weight of one other token": lambda n, beta: (1 - diagonal(n, beta)) / (n - 1),
            "beta is not used": lambda n, beta: diagonal(n, 1.0),
        },
    )


@question(
    "orthogonal.2",
    tasks=("002.1.3c",),
    text=(
        "With $n = 8$ orthonormal keys and $Q = K$: with which $\\beta$ does every token give 99 % of its weight to "
        "itself?"
    ),
    solution="math.log(7 * 99)",
)
def _almost(answer: object) -> str:
    keys = torch.eye(8, dtype=torch.float64)[None, None]
    beta = real(answer)
    if beta is None or math.isnan(beta):
        return number(answer, 0.0)
    if beta < 0:
        return "with a negative factor the other tokens get more weight, and not less"
    if math.isinf(beta):
        return "that gives 100 %: a finite beta is enough"
    weight = rg.weights(keys, keys, rg.Softmax(beta=beta))[0, 0, 0, 0].item()
    return "" if abs(weight - 0.99) < 1e-4 else f"with this beta the weight is {weight:.2%}"


@question(
    "pointwise.1",
    tasks=("002.1.3d",),
    text=(
        "Every token gives all its weight to itself. Attention with the layer's projections `W_v` and `W_o` is then "
        "the same linear map at every position. Which convolution over tokens is that, by the size of its kernel?"
    ),
    solution="1",
)
def _pointwise(answer: object) -> str:
    apart = 1000 * torch.eye(7)[None, None]

    def middle(values: Tensor) -> Tensor:
        return rg.attend(apart, apart, values[None, None])[0, 0, 3]

    slopes = torch.autograd.functional.jacobian(middle, numbers(7, 2))
    width = int((slopes.abs().sum((0, 2)) > 0).sum())
    near = {"no token is mixed with its neighbours": 3, "a kernel has at least one entry": 0}
    return number(answer, width, near, tolerance=0)


@question(
    "convolution.1",
    tasks=("002.1.3e",),
    text=(
        "Attention as a convolution of width 3 with equal weights: every token attends to itself and its two "
        "neighbours. Write the weights of **6 tokens**, `(6, 6)`. The first and the last token have one neighbour "
        "only, and weights are probabilities."
    ),
    solution=(
        "torch.tensor(\n"
        "    [\n"
        "        [1 / 2, 1 / 2, 0, 0, 0, 0],\n"
        "        [1 / 3, 1 / 3, 1 / 3, 0, 0, 0],\n"
        "        [0, 1 / 3, 1 / 3, 1 / 3, 0, 0],\n"
        "        [0, 0, 1 / 3, 1 / 3, 1 / 3, 0],\n"
        "        [0, 0, 0, 1 / 3, 1 / 3, 1 / 3],\n"
        "        [0, 0, 0, 0, 1 / 2, 1 / 2],\n"
        "    ]\n"
        ")"
    ),
    points=2,
)
def _band(answer: object) -> str:
    x = torch.ones(1, 1, 6, 2)
    band = rg.weights(x, x, rg.Uniform(), rg.window(before=1, after=1))[0, 0]
    return tensor(
        answer,
        band,
        {
            "the first and the last row sum to 2/3 only: they have two keys, not three": (band > 0) / 3,
            "a token attends to itself, too": rg.weights(
                x, x, rg.Uniform(), rg.window(before=1, after=1) & ~rg.window(before=0, after=0)
            )[0, 0],
            "this looks back only": rg.weights(x, x, rg.Uniform(), rg.window(before=2, after=0))[0, 0],
            "these are not divided by the number of neighbours": (band > 0).double(),
            "this is width 5": rg.weights(x, x, rg.Uniform(), rg.window(before=2, after=2))[0, 0],
        },
        probabilities=True,
    )


@question(
    "convolution.2",
    tasks=("002.1.2b",),
    text=(
        "A convolution looks at every place through many kernels, and attention through many heads. How many heads "
        "does a layer need to be any given one-dimensional convolution of width $w$, if each head can look at one "
        "relative position only (all its weight is on the token $t + s$)?"
    ),
    begin="def heads_needed(width):",
    solution="return width",
)
def _kernels(answer: object) -> str:
    def offsets(width: int) -> int:
        weight = numbers(3, 2, width)
        x = numbers(1, 2, 31)
        slopes = torch.autograd.functional.jacobian(lambda y: F.conv1d(y, weight, padding=width // 2)[0, :, 15], x)
        return int((slopes.abs().sum((0, 1, 2)) > 0).sum())

    return formula(
        answer,
        offsets,
        [(1,), (3,), (5,), (9,)],
        {
            "the token itself is one of the positions": lambda width: width - 1,
            "a head has one position on one side": lambda width: (width - 1) / 2,
            "each relative position needs a head of its own": lambda width: 1,
            "channels do not count: W_v and W_o of a head mix them all": lambda width: 2 * width,
        },
        tolerance=0,
    )
