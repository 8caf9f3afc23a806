"""Tokens in a sequence: their order, and attention beside recurrence."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

import regard as rg
from regard.core.cost.counting import count_flops
from regard.lab.answers import entries, formula, function, number, together, unfilled
from regard.lab.question import question
from regard.lab.questions.inputs import layer, numbers


@question(
    "equivariance.1",
    tasks=("002.1.3b", "004.12.3"),
    text=(
        "The tokens of a sequence are permuted. For which of these are the outputs the same as before, only permuted? "
        "`True` or `False`."
    ),
    begin=(
        "equivariance_1 = {\n"
        '    "softmax attention": ...,\n'
        '    "argmax attention": ...,\n'
        '    "linear attention": ...,\n'
        '    "with a causal mask": ...,\n'
        '    "with learned positions": ...,\n'
        "}"
    ),
    solution=(
        "{\n"
        '    "softmax attention": True,\n'
        '    "argmax attention": True,\n'
        '    "linear attention": True,\n'
        '    "with a causal mask": False,\n'
        '    "with learned positions": False,\n'
        "}"
    ),
    points=2,
)
def _equivariant(answer: object) -> str:
    x, positions, order = numbers(1, 1, 6, 4), numbers(1, 1, 6, 4, seed=1), torch.tensor([3, 0, 5, 1, 4, 2])

    def keeps(mechanism: rg.Mechanism, mask: rg.Mask | None = None, added: Tensor | float = 0.0) -> bool:
        before, after = (rg.attend(y, y, y, mechanism, mask) for y in (x + added, x[:, :, order] + added))
        return torch.allclose(after, before[:, :, order], atol=1e-5)

    return entries(
        answer,
        {
            "softmax attention": keeps(rg.Softmax()),
            "argmax attention": keeps(rg.Argmax()),
            "linear attention": keeps(rg.Quadratic()),
            "with a causal mask": keeps(rg.Softmax(), rg.causal),
            "with learned positions": keeps(rg.Softmax(), added=positions),
        },
    )


@question(
    "equivariance.2",
    tasks=("004.12.3",),
    text=(
        "With columns as tokens, permuted data are $XP$ with a permutation matrix $P$, and scores are $K^\\top Q$. "
        "Write the weights `(n, n)` of the permuted data from the weights `A` of the original ones and `P`. (Each "
        "column of `A` sums to 1.) Multiply them with the permuted values to see that all of the order but one $P$ "
        "cancels."
    ),
    begin="def permuted_weights(A, P):",
    solution="return P.T @ A @ P",
    points=2,
)
def _permuted(answer: object) -> str:
    cases: dict[str, list[object]] = {}
    after: dict[int, Tensor] = {}
    for seed, order in enumerate(([1, 2, 0], [3, 0, 1, 2, 4])):
        n = len(order)
        P = torch.eye(n)[order]
        q, k = numbers(n, 4, seed=seed), numbers(n, 4, seed=seed + 7)
        A, moved = (rg.weights(x[None, None], y[None, None])[0, 0].T for x, y in ((q, k), (P.T @ q, P.T @ k)))
        cases[f"{n} tokens"] = [A, P]
        after[id(A)] = moved
    return function(
        answer,
        lambda A, P: after[id(A)],
        cases,
        {
            "queries are permuted, and keys are, too: rows and columns of A both move": lambda A, P: A @ P,
            "the two permutations are swapped: K P has the scores Pᵀ Kᵀ Q P": lambda A, P: P @ A @ P.T,
            "rows alone have moved": lambda A, P: P.T @ A,
            "the weights move with the tokens": lambda A, P: A,
        },
    )


def depth(result: Tensor) -> int:
    """The longest chain of operations that a result waits for.

    >>> x = torch.ones(1, requires_grad=True)
    >>> depth(x * 2 + 1) - depth(x * 2)
    1
    """
    levels: dict[object, int] = {None: 0}
    stack: list[torch.autograd.graph.Node | None] = [result.grad_fn]
    while stack:
        node = stack[-1]
        before = [parent for parent, _ in node.next_functions] if node is not None else []
        waiting = [parent for parent in before if parent not in levels]
        if waiting:
            stack += waiting
        else:
            levels[node] = 1 + max((levels[parent] for parent in before), default=0)
            stack.pop()
    return levels[result.grad_fn]


@question(
    "recurrence.1",
    tasks=("002.1.4a", "002.1.4b"),
    text=(
        "How long is the chain of operations that must come **one after another** to compute all outputs of $n$ "
        'tokens: with attention, and with a recurrent layer? Is it `"constant"`, or does it `"grow"` with $n$?'
    ),
    begin='recurrence_1 = {"attention": ..., "recurrent": ...}',
    solution='{"attention": "constant", "recurrent": "grow"}',
)
def _sequential(answer: object) -> str:
    cell, attention = nn.GRUCell(4, 4), layer(embedding_dim=4, num_heads=1)

    def recurrent(n: int) -> Tensor:
        state = torch.zeros(1, 4)
        for token in numbers(n, 1, 4):
            state = cell(token, state)
        return state

    def growth(lengths: list[int]) -> str:
        return "grow" if all(before < after for before, after in pairwise(lengths)) else "constant"

    return entries(
        answer,
        {
            "attention": growth([depth(attention(numbers(1, n, 4))) for n in (4, 8, 16)]),
            "recurrent": growth([depth(recurrent(n)) for n in (4, 8, 16)]),
        },
        {
            "attention": {"all pairs of tokens can be computed at once": "grow"},
            "recurrent": {"each step needs the state of the one before": "constant"},
        },
    )


@question(
    "recurrence.2",
    tasks=("002.1.4b", "002.1.4c"),
    text=(
        "The first token shall reach the output at the last of $n$ tokens. Through how many layers or steps must it "
        "go, (a) in attention without a mask, (b) in a recurrent layer, whose steps include those of the first and the "
        "last token? And (c): with $h$ heads, how many different averages of all tokens can one token get in one "
        "layer? Two functions of `n` and one of `h`."
    ),
    begin='recurrence_2 = {"attention": ..., "recurrent": ..., "averages": ...}',
    solution='{"attention": lambda n: 1, "recurrent": lambda n: n, "averages": lambda h: h}',
)
def _paths(answer: object) -> str:
    if fault := unfilled(answer, ("attention", "recurrent", "averages")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def layers(n: int) -> int:
        seen = rg.weights(torch.ones(1, 1, int(n), 2), torch.ones(1, 1, int(n), 2))[0, 0]
        reached, count = torch.eye(int(n)), 0
        while reached[-1, 0] == 0:
            reached, count = seen @ reached, count + 1
        return count

    def steps(n: int) -> int:
        cell = nn.GRUCell(2, 2)

        def chain(count: int) -> int:
            state = torch.zeros(1, 2)
            for token in numbers(count, 1, 2):
                state = cell(token, state)
            return depth(state)

        step = chain(3) - chain(2)  # the operations that a step adds to the chain
        return 1 + (chain(int(n)) - chain(1)) // step

    def averages(h: int) -> int:
        attention = layer(embedding_dim=8 * int(h), num_heads=int(h))
        q, k, _ = attention.project(numbers(1, 5, 8 * int(h)))
        return len(rg.weights(q, k)[0, :, -1].unique(dim=0))

    direct = {"every token reads every other one directly": lambda n: n, "there is no step in between": lambda n: n - 1}
    return together(
        {
            "attention": formula(values["attention"], layers, [(2,), (5,), (9,)], direct, tolerance=0),
            "recurrent": formula(
                values["recurrent"],
                steps,
                [(2,), (5,), (9,)],
                {
                    "the step of the first token counts, too": lambda n: n - 1,
                    "the state goes from step to step": lambda n: 1,
                },
                tolerance=0,
            ),
            "averages": formula(
                values["averages"],
                averages,
                [(1,), (2,), (4,)],
                {"each head has its own weights": lambda h: 1},
                tolerance=0,
            ),
        }
    )


@question(
    "recurrence.3",
    tasks=("002.1.4b",),
    text=(
        "Which takes less computation in a layer? For $n$ tokens of width $d$, count the **multiplications** "
        "(a) of the two products of attention with one head, scores and weighted sums, and (b) of a recurrent"
        " layer, which multiplies its state of width $d$ by one $d \\times d$ matrix at each token. (c) Up to "
        "which $n$ does attention take no more, with $d = 512$? Two functions and a number."
    ),
    begin='recurrence_3 = {"attention": ..., "recurrent": ..., "length": ...}',
    solution='{"attention": lambda n, d: 2 * n**2 * d, "recurrent": lambda n, d: n * d**2, "length": 512 / 2}',
    points=2,
)
def _computation(answer: object) -> str:
    if fault := unfilled(answer, ("attention", "recurrent", "length")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def attention(n: int, d: int) -> float:
        work = rg.Work(
            query_length=n, key_length=n, num_heads=1, num_kv_heads=1, qk_length=d, value_length=d, cached=False
        )
        return rg.cost(rg.Softmax(), work).flops / 2

    def recurrent(n: int, d: int) -> float:
        weight, state = torch.empty(int(d), int(d), device="meta"), torch.empty(1, int(d), device="meta")
        return sum(count_flops(lambda: state @ weight) for _ in range(int(n))) / 2

    cases, step = [(4, 8), (10, 3)], recurrent(1, 512)
    twice = "these are operations, two for a multiplication and its addition"
    return together(
        {
            "attention": formula(
                values["attention"],
                attention,
                cases,
                {
                    twice: lambda n, d: 4 * n**2 * d,
                    "there are two products: the scores, and the weighted sums": lambda n, d: n**2 * d,
                    "every token meets every other one: n² pairs": lambda n, d: 2 * n * d**2,
                },
                tolerance=0,
            ),
            "recurrent": formula(
                values["recurrent"],
                recurrent,
                cases,
                {
                    twice: lambda n, d: 2 * n * d**2,
                    "this is one token; there are n of them": lambda n, d: d**2,
                    "the matrix has d² entries, and each token meets it once": lambda n, d: n**2 * d,
                },
                tolerance=0,
            ),
            "length": number(
                values["length"],
                max(n for n in range(64, 1024, 64) if attention(n, 512) <= n * step),
                {"attention has two products": 512, "solve 2 n² d = n d² for n": 1024},
                tolerance=0,
            ),
        }
    )
