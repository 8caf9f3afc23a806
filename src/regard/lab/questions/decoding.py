"""Decoding with a cache: multi-head and multi-query attention, a new token, operations and memory."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import entries, formula, function, letters, number, together, unfilled
from regard.lab.question import question
from regard.lab.questions.inputs import layer, numbers


def _decoding(kv_heads: int, heads: int = 4, width: int = 16) -> tuple[rg.MultiHeadAttention, list[Tensor]]:
    """A layer without biases, and its four weights as a decoding step of the sheets has them."""
    exact = layer(embedding_dim=width, num_heads=heads, num_kv_heads=kv_heads, qk_length=4, value_length=3, bias=False)
    W_q, W_k, W_v = (
        part.weight.detach().unflatten(0, (-1, length)).mT
        for part, length in ((exact.W_q, 4), (exact.W_k, 4), (exact.W_v, 3))
    )
    W_o = exact.W_o.weight.detach().T.unflatten(0, (heads, -1))
    return exact, [W_q, W_k[0] if kv_heads == 1 else W_k, W_v[0] if kv_heads == 1 else W_v, W_o]


@question(
    "decoding.1",
    tasks=("003.4a", "003.4b"),
    text=(
        "Multi-query attention: all heads share one set of keys and values. With the width $d = 64$, $h = 8$ "
        "heads and queries and keys of length $k = 8$: what are the shapes of the weights `W_q` and `W_k`, as"
        " `(heads, d, k)`, or `(d, k)` where there is no axis of heads? And the cache of the keys of $n = "
        "100$ tokens for a batch of 2?"
    ),
    begin='decoding_1 = {"W_q": ..., "W_k": ..., "cached keys": ...}',
    solution='{"W_q": (8, 64, 8), "W_k": (64, 8), "cached keys": (2, 100, 8)}',
)
def _shapes(answer: object) -> str:
    exact = layer(embedding_dim=64, num_heads=8, num_kv_heads=1, qk_length=8, value_length=8)
    keys, _ = exact.remember(numbers(2, 100, 64))
    shared = keys.shape[1] == 1
    W_k = exact.W_k.weight.unflatten(0, (-1, 8)).mT
    return entries(
        answer,
        {
            "W_q": tuple(exact.W_q.weight.unflatten(0, (-1, 8)).mT.shape),
            "W_k": tuple(W_k[0].shape if shared else W_k.shape),
            "cached keys": tuple(keys[:, 0].shape if shared else keys.shape),
        },
        {
            "W_q": {"every head still has queries of its own": (64, 8)},
            "W_k": {"keys are shared: there is no axis of heads": (8, 64, 8)},
            "cached keys": {"keys are shared: there is no axis of heads": (2, 8, 100, 8)},
        },
    )


@question(
    "decoding.2",
    tasks=("003.4c", "003.4d", "003.4e"),
    text=(
        "The projections of one new token in multi-query attention: from `x`, `(b, d)`, and the weights `W_q`, `(h, d, "
        "k)`, `W_k`, `(d, k)`, and `W_v`, `(d, v)`, return `q`, `(b, h, k)`, `k`, `(b, k)`, and `v`, `(b, v)`. "
        "`torch.einsum` needs one line for each."
    ),
    begin="def project(x, W_q, W_k, W_v):",
    solution=(
        'q = torch.einsum("bd,hdk->bhk", x, W_q)\n'
        'k = torch.einsum("bd,dk->bk", x, W_k)\n'
        'v = torch.einsum("bd,dv->bv", x, W_v)\n'
        "return q, k, v"
    ),
    points=2,
)
def _project(answer: object) -> str:
    exact, weights = _decoding(1)

    def ours(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        q, k, v = exact.project(x[:, None])
        return q[:, :, 0], k[:, 0, 0], v[:, 0, 0]

    def swapped(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ours(x, *rest)
        return q.mT, k, v

    return function(
        answer,
        ours,
        {"b = 3": [numbers(3, 16), *weights[:3]], "b = 1": [numbers(1, 16), *weights[:3]]},
        {"the queries' axes are (b, k, h), not (b, h, k)": swapped},
        parts=("q", "k", "v"),
    )


@question(
    "decoding.3",
    tasks=("003.4c", "003.4d", "003.4e", "004.12.7"),
    text=(
        "One step of decoding with a cache, multi-query attention. `x` is `(b, d)`, `old_K` `(b, n, k)`, `old_V` "
        "`(b, n, v)`, the weights are those above and `W_o` `(h, v, d)`. Return `y`, `(b, d)`, and the longer caches. "
        "Scores are scaled, and the new token sees itself. At the first step $n = 0$."
    ),
    begin="def step(x, old_K, old_V, W_q, W_k, W_v, W_o):",
    solution=(
        'q = torch.einsum("bd,hdk->bhk", x, W_q)\n'
        "K = torch.cat([old_K, (x @ W_k)[:, None]], dim=1)\n"
        "V = torch.cat([old_V, (x @ W_v)[:, None]], dim=1)\n"
        'scores = torch.einsum("bhk,bnk->bhn", q, K) / K.shape[-1] ** 0.5\n'
        'heads = torch.einsum("bhn,bnv->bhv", torch.softmax(scores, dim=-1), V)\n'
        'return torch.einsum("bhv,hvd->bd", heads, W_o), K, V'
    ),
    points=4,
)
def _step(answer: object) -> str:
    exact, weights = _decoding(1)

    def state_of(x: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = exact.remember(x)
        return keys[:, 0], values[:, 0]

    def stepped(beta: float | None = None, sees: int = 0) -> Callable[..., object]:
        def ours(x: Tensor, old_K: Tensor, old_V: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
            q, k, v = exact.project(x[:, None])
            K, V = torch.cat([old_K[:, None], k], 2), torch.cat([old_V[:, None], v], 2)
            heads = rg.attend(q, K[:, :, : K.shape[2] - sees], V[:, :, : V.shape[2] - sees], rg.Softmax(beta=beta))
            return exact._finish(heads, None)[:, 0], K[:, 0], V[:, 0]

        return ours

    history = numbers(2, 7, 16, seed=1)
    cases = {
        "a cache of 7 tokens": [numbers(2, 16), *state_of(history), *weights],
        "an empty cache": [numbers(2, 16), *state_of(history[:, :0]), *weights],
    }
    return function(
        answer,
        stepped(),
        cases,
        {
            "the scale 1/√k is missing": stepped(beta=1.0),
            "the new token does not see itself: attend to the longer cache": stepped(sees=1),
        },
        parts=("y", "the longer K", "the longer V"),
    )


@question(
    "decoding.4",
    tasks=("003.4f",),
    text=(
        "How many operations do the **scores and the weighted sums** of one new token over $n$ cached tokens "
        "(itself included) take, for a batch of $b$ and $h$ query heads of length $k$? Two operations for a "
        "multiplication and its addition. (a) in multi-head attention, (b) in multi-query attention? Two "
        "functions."
    ),
    begin='decoding_4 = {"multi-head": ..., "multi-query": ...}',
    solution=(
        '{"multi-head": lambda b, n, h, k: 4 * b * n * h * k, "multi-query": lambda b, n, h, k: 4 * b * n * h * k}'
    ),
    points=2,
)
def _step_flops(answer: object) -> str:
    if fault := unfilled(answer, ("multi-head", "multi-query")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def flops(kv_heads: int, b: int, n: int, h: int, k: int) -> int:
        return rg.cost(rg.Softmax(), _one_token(kv_heads, b, n, h, k)).flops

    cases = [(1, 10, 4, 8), (3, 100, 2, 16)]
    halves = {
        "these are multiplications; each comes with an addition": lambda b, n, h, k: 2 * b * n * h * k,
        "all queries meet all cached tokens, but there is one new query only": lambda b, n, h, k: 4 * b * n * n * h * k,
    }
    shared = {
        "keys are shared, but each of h queries still meets each of them": lambda b, n, h, k: 4 * b * n * k,
        **halves,
    }
    return together(
        {
            "multi-head": formula(
                values["multi-head"], lambda b, n, h, k: flops(h, b, n, h, k), cases, halves, tolerance=0
            ),
            "multi-query": formula(
                values["multi-query"], lambda b, n, h, k: flops(1, b, n, h, k), cases, shared, tolerance=0
            ),
        }
    )


def _one_token(kv_heads: int, b: int, n: int, h: int, k: int) -> rg.Work:
    return rg.Work(
        batch=b, query_length=1, key_length=n, num_heads=h, num_kv_heads=kv_heads, qk_length=k, value_length=k
    )


@question(
    "decoding.5",
    tasks=("003.4g",),
    text=(
        "How many **numbers** does a decoding step read from the cache, keys and values of $n$ tokens, for a batch of "
        "$b$, heads of length $k$ and $g$ key/value heads? ($g = h$ is multi-head, $g = 1$ multi-query attention.)"
    ),
    begin="def numbers_read(b, n, g, k):",
    solution="return 2 * b * n * g * k",
)
def _read(answer: object) -> str:
    return formula(
        answer,
        lambda b, n, g, k: rg.cost(rg.Softmax(), _one_token(g, b, n, g * 2, k)).state_bytes // 2,
        [(1, 10, 4, 8), (3, 100, 2, 16), (2, 5, 1, 4)],
        {
            "keys and values are both read": lambda b, n, g, k: b * n * g * k,
            "these are bytes, at two for a number": lambda b, n, g, k: 4 * b * n * g * k,
            "every sequence has a cache of its own": lambda b, n, g, k: 2 * n * g * k,
            "each of g key/value heads has a cache": lambda b, n, g, k: 2 * b * n * k,
        },
        tolerance=0,
    )


@question(
    "decoding.6",
    tasks=("003.4f", "003.4g"),
    text=(
        "The arithmetic intensity is the number of operations for each byte read. Over a long cache, by which factor "
        "is it larger with multi-query than with multi-head attention, for 8 query heads? (To 10 %.)"
    ),
    solution="8",
)
def _intensity(answer: object) -> str:
    many, single = (rg.cost(rg.Softmax(), _one_token(kv_heads, 1, 1_000_000, 8, 64)).intensity for kv_heads in (8, 1))
    return number(
        answer,
        single / many,
        {
            "the operations stay, the bytes become fewer": many / single,
            "operations are as many as before, and an eighth is read": 1,
        },
        tolerance=0.1,
    )


@question(
    "decoding.7",
    tasks=("003.4f", "003.4g"),
    text=(
        "The projections of a decoding step: from the width $d$ to $h$ query heads and $g$ key/value heads, "
        "all of length $k = d / h$, and back to $d$. How many numbers do their **weights** have, which every "
        "step reads, and how many **operations** do they take for a batch of $b$, two for a multiplication "
        "and its addition? Two functions, without biases."
    ),
    begin='decoding_7 = {"weights": ..., "operations": ...}',
    solution=(
        "{\n"
        '    "weights": lambda d, h, g: 2 * d**2 + 2 * d * g * d // h,\n'
        '    "operations": lambda b, d, h, g: 2 * b * (2 * d**2 + 2 * d * g * d // h),\n'
        "}"
    ),
    points=2,
)
def _projections(answer: object) -> str:
    if fault := unfilled(answer, ("weights", "operations")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]

    def price(b: int, d: int, h: int, g: int) -> rg.Cost:
        return rg.layer_cost(_one_token(g, b, 1, h, d // h), embedding_dim=d).projections

    def flops(b: int, d: int, h: int, g: int) -> int:
        return price(b, d, h, g).flops

    def weights(d: int, h: int, g: int) -> int:
        return price(1, d, h, g).parameters

    return together(
        {
            "weights": formula(
                values["weights"],
                weights,
                [(64, 8, 8), (64, 8, 1), (48, 6, 2)],
                {
                    "right for multi-head attention, g = h": lambda d, h, g: 4 * d**2,
                    "right for multi-query attention, g = 1": lambda d, h, g: 2 * d**2 + 2 * d * d // h,
                    "the output projection is missing": lambda d, h, g: weights(d, h, g) - d**2,
                    "keys and values both have a projection": lambda d, h, g: 2 * d**2 + d * g * d // h,
                },
                tolerance=0,
            ),
            "operations": formula(
                values["operations"],
                flops,
                [(1, 64, 8, 8), (3, 64, 8, 1), (2, 48, 6, 2)],
                {
                    "these are multiplications; each comes with an addition": lambda *case: flops(*case) / 2,
                    "every sequence of the batch is projected": lambda b, *case: flops(1, *case),
                    "right for multi-head attention, g = h": lambda b, d, h, g: 8 * b * d**2,
                },
                tolerance=0,
            ),
        }
    )


@question(
    "new_token.1",
    tasks=("004.12.7",),
    text=(
        "Causal attention over $N$ tokens is computed, and its keys and values are kept. One token comes. How many "
        "**new scores** must be computed for a head?"
    ),
    begin="def new_scores(N):",
    solution="return N + 1",
)
def _scores(answer: object) -> str:
    def scores(N: int) -> int:
        x = numbers(1, 1, int(N) + 1, 4)
        before, after = (rg.weights(y, y, mask=rg.causal)[0, 0] for y in (x[:, :, :-1], x))
        old = torch.nn.functional.pad(before, (0, 1, 0, 1))
        return int(((after - old).abs() > 1e-7).sum())

    return formula(
        answer,
        scores,
        [(1,), (5,), (12,)],
        {
            "the new token attends to itself, too": lambda N: N,
            "old scores stay as they are": lambda N: (N + 1) ** 2,
            "the old queries do not see the new key: it comes later": lambda N: 2 * N + 1,
        },
        tolerance=0,
    )


@question(
    "new_token.2",
    tasks=("004.12.7",),
    text=(
        "And what else must be computed anew?\n\n"
        "a) the query, key and value of the new token\n"
        "b) the queries of the old tokens\n"
        "c) the outputs of the old tokens\n"
        "d) the output of the new token"
    ),
    solution='"ad"',
)
def _anew(answer: object) -> str:
    exact = layer()
    x = numbers(1, 6, 32)
    q, _, _ = exact.project(x)
    shorter, _, _ = exact.project(x[:, :5])
    whole, before = exact(x, mask=rg.causal), exact(x[:, :5], mask=rg.causal)
    moved = {
        "a": q.shape[2] > shorter.shape[2],
        "b": not torch.allclose(q[:, :, :5], shorter, atol=1e-6),
        "c": not torch.allclose(whole[:, :5], before, atol=1e-6),
        "d": whole.shape[1] > before.shape[1],
    }
    return letters(
        answer,
        "".join(letter for letter, change in moved.items() if change),
        "abcd",
        {
            "a": "nobody has computed them yet",
            "b": "they depend on their own token alone",
            "c": "under a causal mask old tokens do not see the new one",
            "d": "nobody has computed it yet",
        },
    )
