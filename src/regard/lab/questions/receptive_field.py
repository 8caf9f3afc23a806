"""How far argmax attention reaches through layers."""

import torch

import regard as rg
from regard.lab.answers import formula, number
from regard.lab.question import question


def reach(heads: int, layers: int, *, apart: bool = True) -> int:
    """How many tokens reach the last one through layers of argmax attention with residual connections.

    Each head picks one token: all other ones (`apart`), as far away as all layers before it reach, or all the same.

    >>> reach(heads=1, layers=3), reach(heads=2, layers=2), reach(heads=2, layers=2, apart=False)
    (8, 9, 4)
    """
    length = (heads + 1) ** layers
    reached = torch.eye(length)
    for layer in range(layers):
        picks = []
        for head in range(heads):
            steps = (head + 1 if apart else 1) * (heads + 1 if apart else 2) ** layer
            chosen = (torch.arange(length) - steps).clamp(min=0)
            keys = torch.eye(length)
            picks.append(rg.weights(keys[chosen][None, None], keys[None, None], rg.Argmax())[0, 0])
        reached = (torch.eye(length) + sum(picks)) @ reached
    return int((reached[-1] > 0).sum())


@question(
    "reach.1",
    tasks=("000.2a",),
    text=(
        "Every head attends to exactly one token (argmax attention), and around each layer is a residual connection. "
        "How many input tokens can a token depend on after $n$ layers with $k$ heads, at most? Begin with one head, "
        "then two."
    ),
    begin="def receptive_field(heads, layers):",
    solution="return (heads + 1) ** layers",
    points=2,
)
def _reach(answer: object) -> str:
    return formula(
        answer,
        reach,
        [(1, 1), (1, 4), (2, 3), (3, 2), (3, 3)],
        {
            "the residual connection is missing: a token keeps itself, too": lambda heads, layers: heads**layers,
            "it multiplies from layer to layer: each of the tokens reached had reached as many itself": (
                lambda heads, layers: heads * layers + 1
            ),
            "it grows by a factor with each layer, and not by a term": lambda heads, layers: (heads + 1) * layers,
            "right for one head": lambda heads, layers: 2**layers,
        },
        tolerance=0,
    )


@question(
    "reach.2",
    tasks=("000.2a",),
    text=(
        "Two heads in each of 3 layers, but in every layer both heads pick the **same** token. How many tokens can a "
        "token depend on, at most?"
    ),
    solution="2**3",
)
def _same(answer: object) -> str:
    return number(
        answer,
        reach(2, 3, apart=False),
        {"that is where the heads pick different tokens": reach(2, 3), "the token itself counts in each layer": 1},
        tolerance=0,
    )
