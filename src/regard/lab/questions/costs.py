"""What a layer costs: its operations, its parameters, its weights, and how many heads share them."""

from collections.abc import Mapping

import torch
from torch import nn

import regard as rg
from regard.lab.answers import called, entries, formula, letters, together, unfilled
from regard.lab.question import question
from regard.lab.questions.inputs import numbers
from regard.models.layers.linear import Linear


def work(queries: int, keys: int, width: int, heads: int = 8) -> rg.Work:
    """Attention of new queries to new keys, with heads of width / heads.

    >>> work(3, 5, 64).qk_length
    8
    """
    return rg.Work(
        query_length=queries,
        key_length=keys,
        num_heads=heads,
        num_kv_heads=heads,
        qk_length=width // heads,
        value_length=width // heads,
        cached=False,
    )


@question(
    "cost.1",
    tasks=("000.2c",),
    text=(
        "How many floating-point operations does a multi-head attention layer take, with $n_t$ queries, $n_s$ keys and "
        "width $d$ (all heads together)? Count matrix products alone, with **2 operations for a multiplication and its "
        "addition**: four projections, the scores, and the weighted sums."
    ),
    begin="def flops(n_t, n_s, d):",
    solution="return 4 * n_t * d**2 + 4 * n_s * d**2 + 4 * n_t * n_s * d",
    points=2,
)
def _flops(answer: object) -> str:
    def count(n_t: int, n_s: int, d: int) -> int:
        return rg.layer_cost(work(n_t, n_s, d), embedding_dim=d).flops

    return formula(
        answer,
        count,
        [(5, 9, 64), (100, 10, 16), (7, 7, 128)],
        {
            "these are multiplications; each comes with an addition": lambda n_t, n_s, d: count(n_t, n_s, d) / 2,
            "the output projection is missing": lambda n_t, n_s, d: count(n_t, n_s, d) - 2 * n_t * d**2,
            "scores are one product, weighted sums another of the same size": lambda n_t, n_s, d: (
                count(n_t, n_s, d) - 2 * n_t * n_s * d
            ),
            "the products between tokens are missing": lambda n_t, n_s, d: 4 * (n_t + n_s) * d**2,
            "the projections are missing": lambda n_t, n_s, d: 4 * n_t * n_s * d,
            "keys and values are made of the n_s inputs, queries and outputs of the n_t": lambda n_t, n_s, d: (
                8 * n_t * d**2 + 4 * n_t * n_s * d
            ),
        },
        tolerance=0,
    )


@question(
    "cost.2",
    tasks=("000.2d",),
    text=(
        'What takes most of the operations, the `"projections"` or the products between tokens (`"attention"`): '
        "(a) with $d = 4096$ and 128 tokens, (b) with $d = 256$ and 8192 tokens? And (c): at which length do both take "
        "the same, with $d = 512$ and self-attention?"
    ),
    begin='cost_2 = {"wide": ..., "long": ..., "length": ...}',
    solution='{"wide": "projections", "long": "attention", "length": 2 * 512}',
    points=2,
)
def _bottleneck(answer: object) -> str:
    wide, long = (rg.layer_cost(work(n, n, d), embedding_dim=d).bottleneck for n, d in ((128, 4096), (8192, 256)))
    low, high = 1, 1 << 20
    while low < high:  # the first length at which attention takes as much
        middle = (low + high) // 2
        price = rg.layer_cost(work(middle, middle, 512), embedding_dim=512)
        low, high = (low, middle) if price.attention.flops >= price.projections.flops else (middle + 1, high)
    return entries(
        answer,
        {"wide": wide, "long": long, "length": low},
        {
            "length": {
                "8 n d² = 4 n² d: the projections have four products, attention has two": low / 2,
                "solve 8 n d² = 4 n² d for n": low * 2,
            }
        },
    )


@question(
    "counts.1",
    tasks=("004.12.1",),
    text=(
        "Self-attention takes $N$ inputs of length $D$ to $N$ outputs of length $D$, with one head. How many "
        "parameters, **weights and biases**, compute queries, keys and values?"
    ),
    begin="def parameters(D, N):",
    solution="return 3 * D**2 + 3 * D",
)
def _parameters(answer: object) -> str:
    def count(D: int, N: int) -> int:
        attention = rg.MultiHeadAttention(embedding_dim=D, num_heads=1)
        return sum(p.numel() for part in (attention.W_q, attention.W_k, attention.W_v) for p in part.parameters())

    return formula(
        answer,
        count,
        [(4, 3), (16, 5), (32, 64)],
        {
            "a bias is a vector of D numbers, one for each output": lambda D, N: 3 * D**2 + 3,
            "these are the weights; biases count, too": lambda D, N: 3 * D**2,
            "these are the parameters of one of the three": lambda D, N: D**2 + D,
            "all inputs go through the same weights: N does not matter": lambda D, N: N * (3 * D**2 + 3 * D),
            "this counts W_o, too; the question is about three projections": lambda D, N: 4 * D**2 + 4 * D,
        },
        tolerance=0,
    )


@question(
    "counts.2",
    tasks=("004.12.1",),
    text="How many attention weights does it have, and does that depend on $D$?",
    begin="def attention_weights(D, N):",
    solution="return N**2",
)
def _weights(answer: object) -> str:
    return formula(
        answer,
        lambda D, N: rg.weights(torch.ones(1, 1, N, D), torch.ones(1, 1, N, D)).numel(),
        [(4, 3), (16, 5), (3, 8)],
        {
            "every pair of inputs has one weight, however long they are": lambda D, N: D * N**2,
            "each input attends to itself, too": lambda D, N: N * (N - 1),
            "each query has N weights": lambda D, N: N,
        },
        tolerance=0,
    )


@question(
    "counts.3",
    tasks=("004.12.1",),
    text=(
        "A fully connected layer takes all $DN$ inputs to all $DN$ outputs. How many weights and biases does **it** "
        "have?"
    ),
    begin="def fully_connected(D, N):",
    solution="return (D * N) ** 2 + D * N",
)
def _connected(answer: object) -> str:
    return formula(
        answer,
        lambda D, N: sum(p.numel() for p in nn.Linear(D * N, D * N, device="meta").parameters()),
        [(4, 3), (16, 5), (3, 8)],
        {
            "there is a bias for each of the D·N outputs, not for each pair of inputs": lambda D, N: (
                (D * N) ** 2 + N**2
            ),
            "these are the weights; biases count, too": lambda D, N: (D * N) ** 2,
            "there is one bias for each of all D·N outputs": lambda D, N: (D * N) ** 2 + N,
        },
        tolerance=0,
    )


@question(
    "counts.4",
    tasks=("004.12.5",),
    text=(
        "How many weights (without biases) do the projections of queries, keys and values of **all** $H$ "
        'heads have together, with an input of length $D$, (a) if each head has length $D/H$ (`"narrow"`), '
        'and (b) if each head has length $D$ (`"full"`)? Two functions.'
    ),
    begin='counts_4 = {"narrow": ..., "full": ...}',
    solution='{"narrow": lambda D, H: 3 * D**2, "full": lambda D, H: 3 * D**2 * H}',
    points=2,
)
def _narrow(answer: object) -> str:
    if fault := unfilled(answer, ("narrow", "full")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def count(D: int, H: int, length: int) -> int:
        work = rg.Work(query_length=1, key_length=1, num_heads=H, num_kv_heads=H, qk_length=length, value_length=length)
        return rg.layer_cost(work, embedding_dim=D).parameters * 3 // 4

    cases = [(16, 1), (16, 4), (64, 8)]
    square = "a head's projection goes from D to D/H numbers: D·D/H weights, and there are H heads"
    return together(
        {
            "narrow": formula(
                values["narrow"],
                lambda D, H: count(D, H, D // H),
                cases,
                {
                    square: lambda D, H: 3 * D**2 / H,
                    "all three projections count": lambda D, H: D**2,
                    "this is one head": lambda D, H: 3 * (D / H) ** 2,
                },
                tolerance=0,
            ),
            "full": formula(
                values["full"],
                lambda D, H: count(D, H, D),
                cases,
                {"this is one head": lambda D, H: 3 * D**2, "all three projections count": lambda D, H: D**2 * H},
                tolerance=0,
            ),
        }
    )


@question(
    "counts.5",
    tasks=("004.12.5",),
    text=(
        "And the scores: how many **operations** do the inner products of all $H$ heads take for $N$ tokens, two for a "
        "multiplication and its addition, (a) with heads of length $D/H$, and (b) with heads of length $D$?"
    ),
    begin='counts_5 = {"narrow": ..., "full": ...}',
    solution='{"narrow": lambda N, D, H: 2 * N**2 * D, "full": lambda N, D, H: 2 * N**2 * D * H}',
    points=2,
)
def _score_flops(answer: object) -> str:
    if fault := unfilled(answer, ("narrow", "full")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def flops(N: int, H: int, length: int) -> int:
        # The weighted sums are the other half, with values as long as the keys.
        return rg.cost(rg.Softmax(), work(N, N, H * length, heads=H)).flops // 2

    def narrow(N: int, D: int, H: int) -> int:
        return flops(N, H, D // H)

    def full(N: int, D: int, H: int) -> int:
        return flops(N, H, D)

    cases = [(5, 16, 4), (10, 64, 8), (3, 16, 2)]
    faults = {}
    for name, right in (("narrow", narrow), ("full", full)):
        near = {
            "these are multiplications; each comes with an addition": lambda *case, right=right: right(*case) / 2,
            "there are N² pairs of tokens": lambda N, *rest, right=right: right(N, *rest) / N,
            "this is one head": lambda N, D, H, right=right: right(N, D, H) / H,
            "this counts the weighted sums, too": lambda *case, right=right: 2 * right(*case),
        }
        faults[name] = formula(values[name], right, cases, near, tolerance=0)
    return together(faults)


@question(
    "counts.6",
    tasks=("004.12.2",),
    text=(
        "Which of these layers can be stacked, one after another of its kind, with residual connections, "
        "`x + layer(x)`? The lengths of their inputs and outputs are\n\n"
        "a) 64 to 64, with 8 heads of length 8\n"
        "b) 64 to 32, with 8 heads of length 8\n"
        "c) 64 to 64, with 4 heads of length 32\n"
        "d) 32 to 64, with 8 heads of length 8"
    ),
    solution='"ac"',
)
def _stack(answer: object) -> str:
    sizes = {"a": (64, 64, 8, 8), "b": (64, 32, 8, 8), "c": (64, 64, 4, 32), "d": (32, 64, 8, 8)}

    def stacks(inputs: int, outputs: int, heads: int, length: int) -> bool:
        attention = rg.MultiHeadAttention(embedding_dim=inputs, num_heads=heads, qk_length=length, value_length=length)
        attention.W_o = Linear(heads * length, outputs)
        _, error = called(lambda x: (y := x + attention(x)) + attention(y), numbers(1, 3, inputs))
        return not error

    return letters(
        answer,
        "".join(letter for letter, case in sizes.items() if stacks(*case)),
        "abcd",
        {
            "a": "what goes out can go in again, and be added",
            "b": "32 numbers cannot be added to 64, nor go into the next layer",
            "c": "heads may have any length: W_o brings their values back to 64",
            "d": "64 numbers cannot be added to 32",
        },
    )
