"""Kernels in place of softmax: the quadratic one, its features, and what linear attention costs."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

import regard as rg
from regard.core.cost.counting import count_flops
from regard.lab.answers import (
    blank,
    called,
    entries,
    formula,
    function,
    kind,
    number,
    real,
    together,
    unfilled,
)
from regard.lab.question import BLANK, question
from regard.lab.questions.inputs import numbers


@question(
    "kernel.1",
    tasks=("003.6a",),
    text=(
        "Weights are similarities divided by their sum, so that sum must not be 0. Show that "
        "$\\mathrm{sim}(q, k) = (q \\cdot k + 1)^2$ is not safe: give a query and a key, two lists of two numbers "
        "each, with similarity 0. Neither may be a list of zeros."
    ),
    begin='kernel_1 = {"query": ..., "key": ...}',
    solution='{"query": [1.0, 0.0], "key": [-1.0, 0.0]}',
)
def _zero(answer: object) -> str:
    if fault := unfilled(answer, ("query", "key")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    vectors = {}
    for name in ("query", "key"):
        vector = values[name]
        entries_of = [real(entry) for entry in vector] if isinstance(vector, list | tuple | Tensor) else []
        if len(entries_of) != 2 or None in entries_of:
            return f"{name}: expected a list of two numbers, got {kind(vector)}"
        vectors[name] = torch.tensor(entries_of, dtype=torch.float64)
        if not vectors[name].any():
            return f"{name}: expected one that is not all zeros"
    similarity = rg.Quadratic().similarity(vectors["query"][None], vectors["key"][None]).item()
    if abs(similarity) < 1e-12:
        return ""
    product = (vectors["query"] @ vectors["key"]).item()
    if product == 0:
        return "orthogonal vectors have q·k = 0, and (0 + 1)² is 1"
    return f"with q·k = {product:g} the similarity is {similarity:g}"


@question(
    "kernel.2",
    tasks=("003.6b",),
    text=(
        "How many features does the quadratic kernel $(q \\cdot k + 1)^2$ have for vectors of length $D$, if each "
        "product of two entries is counted once?"
    ),
    begin="def features(D):",
    solution="return (D + 1) * (D + 2) // 2",
)
def _features(answer: object) -> str:
    return formula(
        answer,
        lambda D: rg.Quadratic().features(torch.ones(1, int(D))).shape[-1],
        [(1,), (2,), (5,), (64,)],
        {
            "these are all products of two entries, x₁x₂ and x₂x₁ apart, and nothing of lower degree": lambda D: D**2,
            "x₁x₂ and x₂x₁ are the same feature": lambda D: (D + 1) ** 2,
            "the entries themselves and the 1 are missing": lambda D: D * (D + 1) // 2,
            "the constant 1 is a feature, too": lambda D: (D + 1) * (D + 2) // 2 - 1,
            "squares are features, too": lambda D: 1 + D + D * (D - 1) // 2,
            "the products of two entries are missing": lambda D: 2 * D + 1,
        },
        tolerance=0,
    )


@question(
    "kernel.3",
    tasks=("003.6b",),
    text=(
        "Write its feature map: from `x`, `(n, D)`, to `(n, C)`, so that $\\phi(q) \\cdot \\phi(k) = (q \\cdot k + "
        "1)^2$. The order of the features does not matter."
    ),
    begin="def phi(x):",
    solution=(
        "n, D = x.shape\n"
        "i, j = torch.triu_indices(D, D, 1)\n"
        "return torch.cat([torch.ones(n, 1), 2**0.5 * x, x**2, 2**0.5 * x[:, i] * x[:, j]], dim=1)"
    ),
    points=3,
)
def _phi(answer: object) -> str:
    if answer is ... or answer is None:
        return BLANK
    if not callable(answer):
        return f"expected a function of (x), got {kind(answer)}"
    for length in (2, 5):
        q, k = numbers(4, length), numbers(3, length, seed=1)
        maps = []
        for x in (q, k):
            mapped, error = called(answer, x)
            if error or blank(mapped):
                return BLANK if error in ("", BLANK) else f"for an x of shape {tuple(x.shape)} it {error}"
            if not isinstance(mapped, Tensor) or mapped.ndim != 2 or len(mapped) != len(x):
                return f"expected a tensor ({len(x)}, C), got {kind(mapped)}"
            maps.append(mapped)
        products, exact = (maps[0] @ maps[1].T).double(), rg.Quadratic().similarity(q, k).double()
        inner = q.double() @ k.double().T
        if torch.allclose(products, exact, atol=1e-4):
            continue
        squares = q.double().square() @ k.double().square().T
        mistakes = {
            "this is (q·k)², without the entries themselves and the 1": inner**2,
            "the constant feature 1 is missing": exact - 1,
            "the products are missing: this is 1 + 2 q·k + the sum of squares": 1 + 2 * inner + squares,
            "the entries need the factor √2: q·k comes twice in (q·k + 1)²": exact - inner,
            "products of two different entries need the factor √2, since they come twice": (
                exact - (inner**2 - squares) / 2
            ),
            "√2 is missing, at the entries and at products of two different entries": (
                exact - inner - (inner**2 - squares) / 2
            ),
        }
        for sentence, wrong in mistakes.items():
            if torch.allclose(products, wrong, atol=1e-4):
                return sentence
        return f"at D = {length} φ(q)·φ(k) is {products[0, 0].item():.4g} where (q·k + 1)² is {exact[0, 0].item():.4g}"
    return ""


@question(
    "kernel.4",
    tasks=("003.6b", "003.6d", "004.12.10"),
    text=(
        "Write attention with features, `phi_q` `(N, C)`, `phi_k` `(N, C)`, and values `v` `(N, M)`. Weights are inner "
        "products of features divided by their sum. Use that products can be computed in another order: **no table of "
        "N × N numbers** may be made."
    ),
    begin="def linear_attention(phi_q, phi_k, v):",
    solution=(
        "sums = phi_k.T @ v  # (C, M)\ntotal = phi_k.sum(0)  # (C,)\nreturn (phi_q @ sums) / (phi_q @ total)[:, None]"
    ),
    points=3,
)
def _linear(answer: object) -> str:
    mechanism = rg.Kernel(feature_map=lambda x: x)

    def exact(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
        return rg.attend(phi_q[None, None], phi_k[None, None], v[None, None], mechanism)[0, 0]

    def positive(*size: int, seed: int) -> Tensor:
        return numbers(*size, seed=seed).abs() + 0.1

    fault = function(
        answer,
        exact,
        {
            f"N = {n}, C = {c}, M = {m}": [positive(n, c, seed=1), positive(n, c, seed=2), numbers(n, m)]
            for n, c, m in ((6, 3, 2), (1, 4, 5), (40, 3, 3))
        },
        {
            "the denominator is missing: weights must sum to 1": lambda phi_q, phi_k, v: phi_q @ (phi_k.T @ v),
            "the denominator is the mean, not the sum, of the similarities": lambda phi_q, phi_k, v: (
                len(phi_k) * exact(phi_q, phi_k, v)
            ),
            "the softmax is gone: similarities are the inner products themselves": lambda phi_q, phi_k, v: rg.attend(
                phi_q[None, None], phi_k[None, None], v[None, None], rg.Softmax(beta=1.0)
            )[0, 0],
        },
    )
    if fault:
        return fault
    assert callable(answer)

    def flops(n: int) -> int:
        inputs = positive(n, 4, seed=1), positive(n, 4, seed=2), numbers(n, 4)
        return count_flops(lambda: answer(*inputs))

    if flops(256) > 3 * flops(128):
        return "the result is right, but the number of operations grows with N²: a table of N × N numbers is made"
    return ""


@question(
    "kernel.5",
    tasks=("003.6c",),
    text=(
        "Softmax attention of $N$ tokens, with queries and keys of length $D$ and values of length $M$. How many "
        "operations do its two matrix products take (two for a multiplication and its addition), and how many numbers "
        "must the backward pass find stored: queries, keys, values, the weights, and the output? Two functions. (The "
        "weights are kept once.)"
    ),
    begin='kernel_5 = {"operations": ..., "stored": ...}',
    solution=(
        '{"operations": lambda N, D, M: 2 * N**2 * (D + M), "stored": lambda N, D, M: 2 * N * D + 2 * N * M + N**2}'
    ),
    points=2,
)
def _softmax(answer: object) -> str:
    if fault := unfilled(answer, ("operations", "stored")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def price(N: int, D: int, M: int) -> rg.Cost:
        return rg.cost(rg.Softmax(), _tokens(int(N), int(D), int(M)))

    def stored(N: int, D: int, M: int) -> float:
        work = _tokens(int(N), int(D), int(M))
        return (work.io_bytes + price(N, D, M).activation_bytes) / 4

    cases = [(10, 4, 3), (64, 16, 8)]
    return together(
        {
            "operations": formula(
                values["operations"],
                lambda N, D, M: price(N, D, M).flops,
                cases,
                {
                    "these are multiplications; each comes with an addition": lambda N, D, M: N**2 * (D + M),
                    "there are two products: with the values, too": lambda N, D, M: 2 * N**2 * D,
                },
                tolerance=0,
            ),
            "stored": formula(
                values["stored"],
                stored,
                cases,
                {
                    "the weights are missing: a number for each pair of tokens": lambda N, D, M: 2 * N * D + 2 * N * M,
                    "the output is missing": lambda N, D, M: 2 * N * D + N * M + N**2,
                    "queries and keys have N·D numbers each": lambda N, D, M: N * D + 2 * N * M + N**2,
                    "inputs and output are kept, too": lambda N, D, M: N**2,
                },
                tolerance=0,
            ),
        }
    )


def _tokens(N: int, D: int, M: int) -> rg.Work:
    return rg.Work(
        query_length=N,
        key_length=N,
        num_heads=1,
        num_kv_heads=1,
        qk_length=D,
        value_length=M,
        cached=False,
        dtype=torch.float32,
    )


@question(
    "kernel.6",
    tasks=("003.6d", "004.12.10"),
    text=(
        "Linear attention without a mask computes two products: sums of $\\phi(k) v^\\top$ over the tokens, and those "
        "times $\\phi(q)$. The operations go like $N^a C^b M^c$. Which $a$, $b$, $c$? And which power of $D$ is that "
        "for the quadratic kernel ($C \\approx D^2/2$, $M = D$, large $D$)?"
    ),
    begin='kernel_6 = {"N": ..., "C": ..., "M": ..., "D": ...}',
    solution='{"N": 1, "C": 1, "M": 1, "D": 3}',
    points=2,
)
def _powers(answer: object) -> str:
    def flops(N: int, C: int, M: int) -> int:
        def products() -> Tensor:
            phi_q, phi_k, v = (torch.empty(*size, device="meta") for size in ((N, C), (N, C), (N, M)))
            return phi_q @ (phi_k.T @ v)

        return count_flops(products)

    def growth(*sizes: tuple[int, int, int]) -> int:
        return round(math.log2(flops(*sizes[1]) / flops(*sizes[0])))

    def of_length(D: int) -> tuple[int, int, int]:
        return 64, rg.Quadratic().features(torch.empty(1, D, device="meta")).shape[-1], D

    base = (64, 32, 16)
    return entries(
        answer,
        {
            "N": growth(base, (128, 32, 16)),
            "C": growth(base, (64, 64, 16)),
            "M": growth(base, (64, 32, 32)),
            "D": growth(of_length(256), of_length(512)),
        },
        {
            "N": {"no table of pairs is made": 2},
            "C": {"each feature is multiplied with each value once": 2, "there is a product for each feature": 0},
            "M": {"there is a product for each number of a value": 0},
            "D": {"C is of the order of D², and M adds another factor": 2, "that would be C = D": 1},
        },
    )


@question(
    "kernel.7",
    tasks=("003.6d",),
    text=(
        "From which length $N$ on does the quadratic kernel's linear form take fewer operations than softmax, with "
        "$D = M = 64$? Compare $4 N^2 D$ with $4 N C D$, and leave the denominators aside. (To 10 %.)"
    ),
    solution="(64 + 1) * (64 + 2) // 2",
)
def _crossover(answer: object) -> str:
    length = rg.Quadratic().features(torch.ones(1, 64)).shape[-1]
    return number(
        answer,
        length,
        {
            "that is C·D; divide both costs by 4 N D": length * 64,
            "that is D²: there are half as many features": 64**2,
            "that is D; the number of features counts": 64,
        },
        tolerance=0.1,
    )


@question(
    "kernel.8",
    tasks=("003.6d",),
    text=(
        "What linear attention keeps in place of the table of weights: the sums of $\\phi(k) v^\\top$ and, for "
        "the denominator, of $\\phi(k)$. How many numbers are these, with $C$ features and values of length "
        "$M$? How many for the quadratic kernel with $D = M = 64$? And does that grow with the number of "
        "tokens, `True` or `False`?"
    ),
    begin='kernel_8 = {"numbers": ..., "quadratic": ..., "grows": ...}',
    solution='{"numbers": lambda C, M: C * M + C, "quadratic": 2145 * 64 + 2145, "grows": False}',
)
def _sums(answer: object) -> str:
    if fault := unfilled(answer, ("numbers", "quadratic", "grows")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def kept(C: int, M: int, tokens: int = 7) -> int:
        phi_k, v = (torch.empty(tokens, int(size), device="meta") for size in (C, M))
        return (phi_k.T @ v).numel() + phi_k.sum(0).numel()

    features = rg.Quadratic().features(torch.empty(1, 64, device="meta")).shape[-1]
    of_quadratic, more = kept(features, 64), kept(features, 64, tokens=14)
    denominator = "the denominator needs the sum of φ(k), too"
    return together(
        {
            "numbers": formula(
                values["numbers"],
                kept,
                [(6, 4), (10, 3)],
                {
                    denominator: lambda C, M: C * M,
                    "the sum of φ(k) has C numbers, one for each feature": lambda C, M: C * M + M,
                    "a product of a column and a row has C·M entries": lambda C, M: C + M,
                },
                tolerance=0,
            ),
            **{
                name: entries({name: values[name]}, {name: right}, {name: near}).removeprefix(f"{name}: ")
                for name, right, near in (
                    ("quadratic", of_quadratic, {denominator: features * 64, "that is C = D": 64 * 64 + 64}),
                    ("grows", more > of_quadratic, {}),
                )
            },
        }
    )
