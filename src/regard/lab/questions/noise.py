"""A key that is disturbed: noise, and another length."""

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import entries, function
from regard.lab.question import question
from regard.lab.questions.inputs import numbers
from regard.lab.statistics import power


@question(
    "noise.1",
    tasks=("002.1.1e",),
    text=(
        "Noise with mean 0 and standard deviation $\\sigma$ is added to **one** key. The output changes by $\\Delta "
        "H$. For small $\\sigma$, how large is the change, and how large is its mean over many draws? Both go like a "
        "power of $\\sigma$: which? (0 would be: it does not depend on $\\sigma$.)"
    ),
    begin='noise_1 = {"mean of the size of the change": ..., "size of the mean change": ...}',
    solution='{"mean of the size of the change": 1, "size of the mean change": 2}',
    points=2,
)
def _noise(answer: object) -> str:
    q, k, v = (numbers(1, 1, 6, 4, seed=seed).double() for seed in range(3))
    whole = rg.attend(q, k, v)
    sizes, means, levels = [], [], (1e-3, 1e-2)
    for sigma in levels:
        noise = torch.zeros(200, 1, 6, 4, dtype=torch.float64)
        noise[:100, 0, 2] = sigma * numbers(100, 4, seed=9).double()
        noise[100:] = -noise[:100]  # pairs of opposite noise have mean 0 exactly
        change = rg.attend(q.expand(200, -1, -1, -1), k + noise, v.expand(200, -1, -1, -1)) - whole
        sizes.append(change.flatten(1).norm(dim=1).mean().item())
        means.append(change.mean(0).norm().item())
    return entries(
        answer,
        {
            "mean of the size of the change": round(power(levels, sizes)),
            "size of the mean change": round(power(levels, means)),
        },
        {
            "mean of the size of the change": {
                "a mean of 0 lets changes cancel on average; each single draw still moves the output": 0,
                "that is the size of the mean; a single draw moves the output at first order": 2,
            },
            "size of the mean change": {
                "the first order cancels in the mean: what is the next one?": 1,
                "the first order cancels in the mean, the second does not: softmax is curved": 0,
            },
        },
    )


def _change(alpha: float, i: int, q: Tensor, K: Tensor, V: Tensor, *, exact: bool = False) -> Tensor:
    """The change of the output when key i is multiplied by alpha: exact, or to first order around alpha = 1."""

    def output(factor: Tensor) -> Tensor:
        scaled = torch.where(torch.arange(len(K))[:, None] == i, factor * K, K)
        return rg.attend(q[None, None, None], scaled[None, None], V[None, None], rg.Softmax(beta=1.0))[0, 0, 0]

    unchanged = torch.ones((), dtype=K.dtype)
    if exact:
        return output(alpha * unchanged) - output(unchanged)
    return (alpha - 1) * torch.autograd.functional.jacobian(output, unchanged)


@question(
    "key_scale.1",
    tasks=("002.1.1f",),
    text=(
        "Key $k_i$ becomes $\\alpha k_i$. Write the **first-order** change of the output for one query (around "
        "$\\alpha = 1$), with $\\beta = 1$: `q` is `(d,)`, `K` is `(n, d)`, `V` is `(n, t)`, the result `(t,)`. The "
        "weights still sum to 1: what one of them gains, the others lose."
    ),
    begin="def change(alpha, i, q, K, V):",
    solution=(
        "scores = K @ q\na = torch.softmax(scores, 0)\nH = a @ V\nreturn (alpha - 1) * scores[i] * a[i] * (V[i] - H)"
    ),
    points=3,
)
def _key_scale(answer: object) -> str:
    def first(alpha: float, i: int, q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        return _change(alpha, i, q, K, V)

    def own_weight(alpha: float, i: int, q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        """Without what the other weights lose."""
        weight = rg.weights(q[None, None, None], K[None, None], rg.Softmax(beta=1.0))[0, 0, 0, i]
        return (alpha - 1) * (K[i] @ q) * weight * V[i]

    cases: dict[str, list[object]] = {}
    for alpha, i in ((1.1, 2), (2.0, 0), (0.5, 3)):
        tensors = [numbers(*size, seed=i + 1).double() for size in ((3,), (5, 3), (5, 2))]
        cases[f"alpha = {alpha}, i = {i}"] = [alpha, i, *tensors]
    return function(
        answer,
        first,
        cases,
        {
            "this is the exact change; asked for is its first order, which is linear in alpha − 1": lambda *case: (
                _change(*case, exact=True)
            ),
            "the other keys lose what key i gains: vᵢ − H instead of vᵢ": own_weight,
            "the factor alpha − 1 is missing": lambda alpha, *rest: first(2.0, *rest),
            "this is proportional to alpha; at alpha = 1 nothing changes": lambda alpha, *rest: first(alpha + 1, *rest),
            "the score sᵢ = q·kᵢ is missing: it is the score that is scaled": lambda alpha, i, q, K, V: (
                first(alpha, i, q, K, V) / (K[i] @ q)
            ),
        },
        tolerance=1e-7,
    )
