"""Layer and batch normalization, and where they stand in a block."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import regard as rg
from regard.lab.answers import formula, function, letters, together, unfilled
from regard.lab.question import question
from regard.lab.questions.inputs import numbers


@question(
    "norms.1",
    tasks=("000.3a",),
    text=(
        "`x` is a batch, `(B, D)`. On which inputs does the output $y_{ij}$ depend, in training: under layer "
        "normalization, and under batch normalization?\n\n"
        "a) $x_{ij}$ itself\n"
        "b) $x_{i'j}$ of other rows $i'$, the same column\n"
        "c) $x_{ij'}$ of the same row, other columns\n"
        "d) $x_{i'j'}$ of other rows and other columns"
    ),
    begin='norms_1 = {"layer": ..., "batch": ...}',
    solution='{"layer": "ac", "batch": "ab"}',
    points=2,
)
def _dependence(answer: object) -> str:
    if fault := unfilled(answer, ("layer", "batch")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    x = numbers(4, 3)
    faults = {}
    for name, module in (("layer", nn.LayerNorm(3)), ("batch", nn.BatchNorm1d(4 - 1))):
        slopes = torch.autograd.functional.jacobian(module, x)[1, 1]  # of y₁₁ by all x
        row, column = slopes[1].clone(), slopes[:, 1].clone()
        rest = slopes.clone()
        rest[1], rest[:, 1] = 0, 0
        row[1] = column[1] = 0
        parts = {"a": slopes[1, 1], "b": column, "c": row, "d": rest}
        right = "".join(letter for letter, part in parts.items() if part.abs().max() > 1e-6)
        faults[name] = letters(
            values[name],
            right,
            "abcd",
            {
                "a": "it is scaled and moved, but it is still there",
                "b": "the mean of layer normalization is that of a row"
                if name == "layer"
                else "its mean is that of a column",
                "c": "its mean is that of a row"
                if name == "layer"
                else "the mean of batch normalization is that of a column",
                "d": "no mean has rows and columns in it",
            },
        )
    return together(faults)


def _norm(gamma: float, d: int, beta: float, epsilon: float, std: float = 1.0) -> float:
    """The distance of a layer-normalized vector of this standard deviation from its shift."""
    x = numbers(int(d), seed=4).double()
    x = std * (x - x.mean()) / x.std(unbiased=False)
    norm = nn.LayerNorm(int(d), eps=epsilon, dtype=torch.float64)
    nn.init.constant_(norm.weight, gamma)
    nn.init.constant_(norm.bias, beta)
    return (norm(x) - beta).norm().item()


@question(
    "norms.2",
    tasks=("000.3b",),
    text=(
        "Layer normalization with the scale $\\gamma > 0$ and the shift $\\beta$, the same for all $d$ entries, and "
        "$\\epsilon = 0$: how long is $y - \\beta \\mathbf{1}$, in the Euclidean norm?"
    ),
    begin="def distance(gamma, beta, d):",
    solution="return gamma * d**0.5",
)
def _distance(answer: object) -> str:
    return formula(
        answer,
        lambda gamma, beta, d: _norm(gamma, d, beta, 0.0),
        [(1.0, 0.0, 16), (2.5, 1.0, 9), (0.5, -3.0, 100)],
        {
            "this is the square of the length": lambda gamma, beta, d: gamma**2 * d,
            "each of d entries has mean square γ²: add them, then take the root": lambda gamma, beta, d: gamma,
            "this is γ d; the d entries add up under the root": lambda gamma, beta, d: gamma * d,
            "the length does not depend on the shift, which is subtracted": lambda gamma, beta, d: (
                gamma * d**0.5 + beta
            ),
            "γ multiplies every entry": lambda gamma, beta, d: d**0.5,
            "the variance divides by d, not by d − 1": lambda gamma, beta, d: gamma * (d - 1) ** 0.5,
        },
    )


@question(
    "norms.3",
    tasks=("000.3b",),
    text=(
        "And with $\\epsilon > 0$, for an input whose entries have the standard deviation $s$ (`std`)? PyTorch adds "
        "$\\epsilon$ to the variance."
    ),
    begin="def distance_with_epsilon(gamma, d, std, epsilon):",
    solution="return gamma * (d * std**2 / (std**2 + epsilon)) ** 0.5",
    points=2,
)
def _epsilon(answer: object) -> str:
    return formula(
        answer,
        lambda gamma, d, std, epsilon: _norm(gamma, d, 0.0, epsilon, std),
        [(1.0, 16, 1.0, 0.5), (2.0, 9, 0.1, 0.01), (0.5, 64, 3.0, 2.0)],
        {
            "that is the length for ε = 0; it is smaller now": lambda gamma, d, std, epsilon: gamma * d**0.5,
            "ε is added to the variance, before the root": lambda gamma, d, std, epsilon: (
                gamma * d**0.5 * std / (std + epsilon)
            ),
            "this is the square of the length": lambda gamma, d, std, epsilon: (
                gamma**2 * d * std**2 / (std**2 + epsilon)
            ),
            "the factor var / (var + ε) stands under the root": lambda gamma, d, std, epsilon: (
                gamma * d**0.5 * std**2 / (std**2 + epsilon)
            ),
        },
    )


@question(
    "block.1",
    tasks=("002.1.4e",),
    text=(
        "Write what stands around each part of the original Transformer: the residual connection and the layer "
        "normalization, in their order. `x` is `(B, T, E)`, `part` is a function of it (attention or network), `norm` "
        "a module."
    ),
    begin="def add_and_norm(x, part, norm):",
    solution="return norm(x + part(x))",
)
def _add_and_norm(answer: object) -> str:
    config = rg.TransformerConfig(vocabulary_size=20, embedding_dim=8, num_layers=1, num_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = next(m for m in rg.Transformer(config).eval().modules() if hasattr(m, "attention_norm"))
    nn.init.normal_(block.get_parameter("attention_norm.weight"), generator=torch.Generator().manual_seed(1))
    other = nn.LayerNorm(8)

    def ours(x: Tensor, part: nn.Module, norm: nn.Module) -> Tensor:
        """What the library's block computes before its network."""
        seen: list[Tensor] = []
        hook = block.get_submodule("network").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        block(x)
        hook.remove()
        return seen[0] if norm is block.attention_norm else norm(x + part(x))

    return function(
        answer,
        ours,
        {
            "the library's block": [numbers(2, 5, 8), block.attention, block.attention_norm],
            "a linear part": [numbers(1, 3, 8), nn.Linear(8, 8), other],
        },
        {
            "the residual connection is missing": lambda x, part, norm: norm(part(x)),
            "the normalization is missing": lambda x, part, norm: x + part(x),
            "this is the pre-norm of later models: norm before the part": lambda x, part, norm: x + part(norm(x)),
            "normalization comes after the sum": lambda x, part, norm: x + norm(part(x)),
        },
    )
