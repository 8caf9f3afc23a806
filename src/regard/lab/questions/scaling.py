"""Scores: their mean and variance, why they are scaled, and what a saturated softmax does."""

import math

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import evaluated, formula, function, letters, number
from regard.lab.experiments.scaling import expected as moments
from regard.lab.question import question
from regard.lab.questions.inputs import numbers, weights_of
from regard.lab.statistics import generator

SETTINGS = [(4, 0.0, 1.0), (64, 0.5, 1.0), (64, 0.0, 2.0), (256, -1.0, 0.5)]

LOGITS = (-3.0, 1.0, 100.0, 5.0, -1.0)


@question(
    "scaling.1",
    tasks=("003.1a",),
    text=(
        "Queries and keys have `d` independent entries, all with mean $\\mu$ and standard deviation $s$. What is "
        "the mean of their inner product $q \\cdot k$?"
    ),
    begin="def mean_of_scores(d, mean, std):",
    solution="return d * mean**2",
)
def _mean(answer: object) -> str:
    return formula(
        answer,
        lambda d, mean, std: moments(d, mean, std)[0],
        SETTINGS,
        {
            "this is the mean of a single product: an inner product adds d of them": lambda d, mean, std: mean**2,
            "the mean of a product of independent numbers is the product of their means: "
            "both have one": lambda d, mean, std: d * mean,
            "this would be the mean of the squared length of q; q and k are independent": lambda d, mean, std: (
                d * (mean**2 + std**2)
            ),
        },
    )


@question(
    "scaling.2",
    tasks=("000.1a", "001.4", "003.1b"),
    text=(
        "The same queries and keys: what is the variance of $q \\cdot k$? Check your formula first in the case"
        " that most texts take, $\\mu = 0$ and $s = 1$."
    ),
    begin="def variance_of_scores(d, mean, std):",
    solution="return d * (2 * std**2 * mean**2 + std**4)",
    points=2,
)
def _variance(answer: object) -> str:
    def variance(d: int, mean: float, std: float) -> float:
        return moments(d, mean, std)[1]

    return formula(
        answer,
        variance,
        SETTINGS,
        {
            "this is the standard deviation; the question asks for the variance": lambda *case: variance(*case) ** 0.5,
            "right where the mean is 0; otherwise the mean of either factor adds to it": lambda d, mean, std: (
                d * std**4
            ),
            "this is the second moment: the square of the mean is still to be subtracted": lambda d, mean, std: (
                variance(d, mean, std) + moments(d, mean, std)[0] ** 2
            ),
            "the variance of a product has the product of both variances, s⁴": lambda d, mean, std: d * std**2,
            "right where s = 1 and the mean is 0 only": lambda d, mean, std: d,
            "this is one product; d of them are added": lambda d, mean, std: variance(1, mean, std),
        },
    )


@question(
    "scaling.3",
    tasks=("000.1a", "001.4", "003.1c"),
    text=(
        "Entries have mean 0 and standard deviation 1, and a head has $d = 64$ of them. By which number are scores "
        "**multiplied**, so that their variance is 1?"
    ),
    solution="1 / math.sqrt(64)",
)
def _factor(answer: object) -> str:
    factor = rg.Softmax().scale(64)
    return number(
        answer,
        factor,
        {
            "this is √d; scores are multiplied by its reciprocal": 1 / factor,
            "this is 1/d: it makes the variance 1/d. Dividing scores by c divides their variance by c²": factor**2,
            "this is d, the variance of the scores": factor**-2,
        },
    )


@question(
    "scaling.4",
    tasks=("000.1a",),
    text=(
        "Weights are $a = \\mathrm{softmax}(s)$. Write the matrix of their derivatives, $J_{ij} = \\partial a_i / "
        "\\partial s_j$, as a function of the weights `a` (a tensor of shape `(n,)`)."
    ),
    begin="def jacobian(a):",
    solution="return torch.diag(a) - torch.outer(a, a)",
    points=2,
)
def _jacobian(answer: object) -> str:
    random = generator(1)
    draws = {f"{n} keys": torch.randn(n, generator=random, dtype=torch.float64) for n in (2, 5, 9)}
    draws["a saturated row"] = torch.tensor([0.0, 30.0, 1.0], dtype=torch.float64)
    weights = {label: weights_of(scores) for label, scores in draws.items()}
    exact = {
        id(weights[label]): torch.autograd.functional.jacobian(weights_of, scores) for label, scores in draws.items()
    }
    return function(
        answer,
        lambda a: exact[id(a)],
        {label: [a] for label, a in weights.items()},
        {
            "the entries off the diagonal are missing: raising one score lowers all other weights": lambda a: (
                torch.diag(a * (1 - a))
            ),
            "every entry has the wrong sign": lambda a: torch.outer(a, a) - torch.diag(a),
            "− a aᵀ is missing: the weights sum to 1 whatever the scores, so every column must sum to 0": torch.diag,
        },
        tolerance=1e-9,
    )


@question(
    "scaling.5",
    tasks=("000.1a", "001.4"),
    text=(
        "Scores stay unscaled and $d$ grows, with 16 keys. What happens? Choose all letters that are right.\n\n"
        "a) The largest weight of a row goes to 1.\n"
        "b) The largest weight of a row goes to 1/16.\n"
        "c) The derivatives of the weights by the scores vanish.\n"
        "d) The derivatives of the weights by the scores grow without bound."
    ),
    solution='"ac"',
)
def _unscaled(answer: object) -> str:
    largest, slope = zip(*(_sharpness(d) for d in (4, 64, 4096)), strict=True)
    right = "a" if largest[0] < largest[1] < largest[2] else "b"
    right += "c" if slope[0] > slope[1] > slope[2] else "d"
    return letters(
        answer,
        right,
        "abcd",
        {
            "a": "the spread of scores grows like √d, and softmax then gives nearly all weight to the largest",
            "b": "that is the uniform average, where all scores are equal; here they spread",
            "c": "J = diag(a) − a aᵀ is 0 where one weight is 1 and the others are 0",
            "d": "entries of diag(a) − a aᵀ lie between −1/4 and 1/4",
        },
    )


def _sharpness(d: int) -> tuple[float, float]:
    """The mean of the largest weight of 64 unscaled rows over 16 keys, and of the size of their Jacobian."""
    random = generator(3)
    q, k = torch.randn(1, 1, 64, d, generator=random), torch.randn(1, 1, 16, d, generator=random)
    weights = rg.weights(q, k, rg.Softmax(beta=1.0))[0, 0]
    slopes = torch.diag_embed(weights) - weights[:, :, None] * weights[:, None, :]
    return weights.amax(-1).mean().item(), slopes.flatten(1).norm(dim=1).mean().item()


@question(
    "scaling.6",
    tasks=("000.1a",),
    text=(
        "Prove that saturation stops the gradients. The largest of $n$ weights is $1 - \\epsilon$. Give an "
        "**upper bound** of the Frobenius norm of $J = \\mathrm{diag}(a) - a a^\\top$ that is proportional to "
        "$\\epsilon$, or falls faster. The check tries it on many rows of weights. (How large can an entry of $J$ be?)"
    ),
    begin="def bound(n, epsilon):",
    solution="# every entry of J is at most epsilon in size, and there are n² of them\nreturn n * epsilon",
    points=3,
)
def _bound(answer: object) -> str:
    cases = [(2, 0.2), (5, 0.05), (16, 0.01), (16, 1e-6)]
    values, fault = evaluated(answer, ("n", "epsilon"), cases)
    if fault:
        return fault
    for value, (n, epsilon) in zip(values, cases, strict=True):
        largest = _largest_norm(n, epsilon)
        if not largest * (1 - 1e-9) <= value < math.inf:
            return f"at n = {n}, epsilon = {epsilon:g} it is {value:.4g}: no bound, there are rows with {largest:.4g}"
    if not values[3] <= 1e-4 * values[2] * (1 + 1e-9):
        return f"from epsilon = 0.01 to 0.000001, at n = 16, it goes from {values[2]:.4g} to {values[3]:.4g} only"
    return ""


def _largest_norm(n: int, epsilon: float) -> float:
    """The largest norm of J among rows whose largest weight is 1 - epsilon: the rest on one, on all, and drawn."""
    rest = torch.cat([torch.eye(n - 1)[:1], torch.ones(1, n - 1), numbers(4, n - 1).exp()]).double()
    rows = torch.cat([torch.full((6, 1), 1 - epsilon), epsilon * rest / rest.sum(-1, keepdim=True)], dim=1)
    slopes = [torch.autograd.functional.jacobian(weights_of, row.clamp(min=1e-30).log()) for row in rows]
    return max(slope.norm().item() for slope in slopes)


@question(
    "saturation.1",
    tasks=("004.12.4",),
    text=(
        "Write the derivatives of $y = \\mathrm{softmax}(z)$: from `z`, of shape `(n,)`, all $n^2$ derivatives "
        "$\\partial y_i / \\partial z_j$ in a tensor `(n, n)`. It must also work at $z = (-3, 1, 100, 5, -1)$ in "
        "float32, where $e^{100}$ is too large a number."
    ),
    begin="def derivatives(z):",
    solution="y = torch.softmax(z, 0)\nreturn torch.diag(y) - torch.outer(y, y)",
    points=2,
)
def _derivatives(answer: object) -> str:
    def exact(z: Tensor) -> Tensor:
        return torch.autograd.functional.jacobian(weights_of, z)

    def overflowing(z: Tensor) -> Tensor:
        y = z.exp() / z.exp().sum()
        return torch.diag(y) - torch.outer(y, y)

    cases = {"z = (0, 1, 2)": torch.arange(3.0), "z = (-1, 0.5, 0, 2)": torch.tensor([-1.0, 0.5, 0.0, 2.0])}
    cases |= {"z = (-3, 1, 100, 5, -1) in float32": torch.tensor(LOGITS)}
    fault = function(
        answer,
        exact,
        {label: [z] for label, z in cases.items()},
        {
            "the derivatives for i ≠ j are missing: they are −yᵢ yⱼ": lambda z: torch.diag(
                weights_of(z) * (1 - weights_of(z))
            ),
            "the sign for i ≠ j is wrong: raising zⱼ lowers all other yᵢ": lambda z: (
                2 * torch.diag(exact(z).diag()) - exact(z)
            ),
        },
    )
    if "float32" in fault and "nan" in fault:
        return f"{fault}: e¹⁰⁰ is infinite in float32; subtract the largest z from all first, which changes nothing"
    return fault


@question(
    "saturation.2",
    tasks=("004.12.4",),
    text=(
        "At $z = (-3, 1, 100, 5, -1)$ the derivative $\\partial y_3 / \\partial z_3$ is tiny, and it is not 0. How "
        "large is it (to 1 %)? Counting starts at 1: $z_3 = 100$."
    ),
    solution="math.exp(-103) + math.exp(-99) + math.exp(-95) + math.exp(-101)",
    points=2,
)
def _third(answer: object) -> str:
    weights = weights_of(torch.tensor(LOGITS, dtype=torch.float64))
    others = weights.sum() - weights[2] if weights[2] < 1 else weights[[0, 1, 3, 4]].sum()
    return number(
        answer,
        (weights[2] * others).item(),
        {
            "y₃ (1 − y₃) loses it: y₃ rounds to 1. What is 1 − y₃, in terms of the other y?": 0.0,
        },
        tolerance=0.01,
    )


@question(
    "saturation.3",
    tasks=("004.12.4",),
    text=(
        "What do these 25 derivatives say?\n\n"
        "a) A small change of the inputs changes the outputs much.\n"
        "b) A small change of the inputs hardly changes the outputs.\n"
        "c) No gradient reaches the queries and keys that made these scores.\n"
        "d) The weights are all equal."
    ),
    solution='"bc"',
)
def _insensitive(answer: object) -> str:
    z = torch.tensor(LOGITS, dtype=torch.float64)
    moved = (weights_of(z + 0.1 * torch.arange(5)) - weights_of(z)).abs().max().item()
    slopes = torch.autograd.functional.jacobian(weights_of, z)
    spread = weights_of(z).max() - weights_of(z).min()
    right = ("a" if moved > 1e-3 else "b") + ("c" if slopes.abs().max() < 1e-3 else "") + ("d" if spread < 1e-3 else "")
    return letters(
        answer,
        right,
        "abcd",
        {
            "a": "derivatives near 0 mean the opposite: add 0.1 to an input and look at the output",
            "b": "that is what derivatives near 0 say",
            "c": "the gradient of a score has one of these derivatives as a factor",
            "d": "one weight is 1, the others are nearly 0",
        },
    )
