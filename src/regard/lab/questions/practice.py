"""Attention in practice: argmax attention, decoding with a cache, and what heads look at."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import (
    blank,
    called,
    entries,
    formula,
    function,
    kind,
    letters,
    number,
    tensor,
    together,
    unfilled,
)
from regard.lab.question import BLANK, question
from regard.lab.questions.heads import layer, numbers

EXAMPLE = {
    "keys": [[1.0, 2.0, 0.0], [0.0, 3.0, 4.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
    "values": [[2.0, 0.0, 1.0], [1.0, 4.0, 3.0], [0.0, -1.0, 4.0], [1.0, 0.0, -1.0]],
    "query": [1.0, 1.0, 2.0],
}


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
        "Multi-query attention: all heads share one set of keys and values. With the width $d = 64$, $h = 8$ heads and "
        "queries and keys of length $k = 8$: which shapes have the weights `W_q` and `W_k`, as `(heads, d, k)`, or "
        "`(d, k)` where there is no axis of heads? And the cache of the keys of $n = 100$ tokens for a batch of 2?"
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
        "How many operations take the **scores and the weighted sums** of one new token over $n$ cached tokens (itself "
        "included), for a batch of $b$ and $h$ query heads of length $k$? Two operations for a multiplication and its "
        "addition. (a) in multi-head attention, (b) in multi-query attention? Two functions."
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


@cache
def _traces() -> tuple[rg.Trace, rg.Trace]:
    """What an untrained decoder and an untrained encoder give weight to, with sharp heads in the decoder."""
    sizes = {"vocabulary_size": 30, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder, encoder = rg.Decoder(rg.DecoderConfig(**sizes)), rg.Encoder(rg.EncoderConfig(**sizes))  # type: ignore[arg-type]
    tokens = torch.tensor([[3, 17, 5, 22, 9, 11, 2, 28]])
    with torch.no_grad():
        for block in decoder.blocks:
            block.get_parameter("attention.W_q.weight").mul_(200)
        with rg.trace(decoder.eval()) as of_decoder:
            decoder(tokens)
        with rg.trace(encoder.eval(), keep=("weights", "keys")) as of_encoder:
            encoder(torch.cat([tokens, tokens.clone()]).index_put((torch.tensor(1), torch.tensor(6)), torch.tensor(4)))
    return of_decoder, of_encoder


def _weights(trace: rg.Trace) -> Tensor:
    """The weights of a trace's first layer, (B, H, T, S)."""
    weights = trace.layers[0].weights
    assert weights is not None
    return weights


@question(
    "patterns.1",
    tasks=("003.5a", "003.5b"),
    text=(
        "How much does a head look at the **previous** token? From the weights of a decoder's head, `(T, T)`, rows are "
        "queries, return the mean weight on the token before, over all queries that have one."
    ),
    begin="def previous(weights):",
    solution="return weights.diagonal(-1).mean()",
)
def _previous(answer: object) -> str:
    trace, _ = _traces()
    heads = list(_weights(trace)[0])
    mass = [trace.patterns().of(0, head).mass["previous"] or 0.0 for head in range(len(heads))]
    if answer is ... or answer is None:
        return BLANK
    if not callable(answer):
        return f"expected a function of (weights), got {kind(answer)}"
    return _of_heads([called(answer, head) for head in heads], heads, mass)


def _of_heads(results: Sequence[tuple[object, str]], heads: Sequence[Tensor], mass: Sequence[float]) -> str:
    """What is wrong with a score of heads."""
    mistakes = {
        "the first token has no token before it: it does not count in the mean": [
            h.diagonal(-1).sum() / len(h) for h in heads
        ],
        "this is the weight on the token itself": [h.diagonal().mean() for h in heads],
        "this is the weight on the next token, above the diagonal": [h.diagonal(1).mean() for h in heads],
        "this is a sum; the mean was asked for": [h.diagonal(-1).sum() for h in heads],
    }
    for place, (result, error) in enumerate(results):
        if error or blank(result):
            return BLANK if error in ("", BLANK) else f"for head {place} it {error}"
        fault = number(result, mass[place])
        if not fault:
            continue
        for sentence, wrong in mistakes.items():
            if not number(result, wrong[place].item()):
                return sentence
        return f"for head {place}: {fault}"
    return ""


@question(
    "patterns.2",
    tasks=("003.5b", "003.5d"),
    text=(
        "Compare with chance: what would this score be in a decoder over $n$ tokens if every query gave **equal** "
        "weight to all tokens that it sees?"
    ),
    begin="def chance(n):",
    solution="return sum(1 / seen for seen in range(2, n + 1)) / (n - 1)",
    points=2,
)
def _chance(answer: object) -> str:
    def chance(n: int) -> float:
        x = torch.zeros(1, 1, int(n), 2)
        return rg.weights(x, x, mask=rg.causal)[0, 0].diagonal(-1).mean().item()

    return formula(
        answer,
        chance,
        [(2,), (8,), (30,)],
        {
            "a query sees the tokens up to itself, not all n": lambda n: 1 / n,
            "the token itself is seen, too": lambda n: sum(1 / seen for seen in range(1, int(n))) / (n - 1),
            "the first query has no token before it": lambda n: sum(1 / seen for seen in range(1, int(n) + 1)) / n,
        },
    )


@question(
    "patterns.3",
    tasks=("003.5a", "003.5b", "003.5e"),
    text=(
        "Which token does each query look at most? From the `weights` of a head, `(T, T)`, and the list of `tokens` "
        "return a list of strings, one for each query."
    ),
    begin="def looks_at(weights, tokens):",
    solution="return [tokens[key] for key in weights.argmax(-1).tolist()]",
)
def _looks_at(answer: object) -> str:
    if answer is ... or answer is None:
        return BLANK
    if not callable(answer):
        return f"expected a function of (weights, tokens), got {kind(answer)}"
    tokens = ["the", "dog", "that", "ran", "saw", "the", "red", "car"]
    trace, _ = _traces()
    for head, weights in enumerate(_weights(trace)[0]):
        result, error = called(answer, weights, tokens)
        if error or blank(result):
            return BLANK if error in ("", BLANK) else f"for head {head} it {error}"
        if not isinstance(result, list) or len(result) != len(tokens):
            return f"expected a list of {len(tokens)} strings, got {kind(result)}"
        strongest = rg.weights(weights[None, None], torch.eye(8)[None, None], rg.Argmax())[0, 0]
        right = [tokens[int(row.argmax())] for row in strongest]
        if result != right:
            column = [tokens[int(key)] for key in weights.argmax(0)]
            if result == column:
                return "these are the queries that look at each token most: rows are queries, columns keys"
            query = next(place for place in range(8) if result[place] != right[place])
            return (
                f"for head {head}: query {query} ({tokens[query]!r}) does not look at {str(result[query])[:20]!r} most"
            )
    return ""


@question(
    "patterns.4",
    tasks=("003.5b",),
    text=(
        "GPT and BERT: can a token look at **later** tokens? And how much weight does the first token of GPT give "
        "itself?"
    ),
    begin='patterns_4 = {"GPT": ..., "BERT": ..., "first token": ...}',
    solution='{"GPT": False, "BERT": True, "first token": 1.0}',
)
def _later(answer: object) -> str:
    decoder, encoder = _traces()
    later = {
        name: bool((_weights(trace)[0].triu(1) > 0).any()) for name, trace in (("GPT", decoder), ("BERT", encoder))
    }
    return entries(
        answer,
        {**later, "first token": _weights(decoder)[0, 0, 0, 0].item()},
        {"first token": {"it sees one token, itself, and weights sum to 1": 0.0}},
    )


@question(
    "patterns.5",
    tasks=("003.5c",),
    text=(
        "Why can heads of a layer look at different things? Which of these does each head have for itself?\n\n"
        "a) its rows of `W_q`\n"
        "b) its rows of `W_k`\n"
        "c) the input of the layer\n"
        "d) its softmax"
    ),
    solution='"abd"',
)
def _apart(answer: object) -> str:
    exact, x = layer(), numbers(1, 5, 32).requires_grad_()
    q, k, _ = exact.project(x)
    weights = rg.weights(q, k)
    by = torch.autograd.grad(weights[0, 0].square().sum(), (exact.W_q.weight, exact.W_k.weight, x))
    apart = {
        "a": bool((by[0][8:] == 0).all()),  # other heads' rows do not matter to head 0
        "b": bool((by[1][8:] == 0).all()),
        "c": bool((by[2] == 0).any()),
        "d": torch.allclose(weights.sum(-1), torch.ones(1, 4, 5)),
    }
    return letters(
        answer,
        "".join(letter for letter, own in apart.items() if own),
        "abcd",
        {
            "a": "a head's queries are made by its rows alone",
            "b": "a head's keys are made by its rows alone",
            "c": "all heads read the same input",
            "d": "the weights of every head sum to 1 for themselves",
        },
    )


@question(
    "patterns.6",
    tasks=("003.5d",),
    text=(
        "An untrained BERT has small random weights. What is the entropy of a row of its attention over $n$ tokens, in "
        "nats, nearly? (To 1 %.)"
    ),
    begin="def entropy(n):",
    solution="return math.log(n)",
)
def _entropy(answer: object) -> str:
    def entropy(n: int) -> float:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = rg.Encoder(rg.EncoderConfig(vocabulary_size=99, embedding_dim=32, num_layers=1, num_heads=4)).eval()
        with torch.no_grad(), rg.trace(model) as trace:
            model(torch.arange(int(n))[None])
        weights = _weights(trace)
        return -(weights * weights.log()).sum(-1).mean().item()

    return formula(
        answer,
        entropy,
        [(4,), (16,), (64,)],
        {
            "these are bits; nats were asked for": lambda n: math.log2(n),
            "that is a row with all its weight on one token; here all weights are nearly equal": lambda n: 0.0,
            "this is the weight of one token": lambda n: 1 / n,
        },
        tolerance=0.01,
    )


@question(
    "patterns.7",
    tasks=("003.5b",),
    text=(
        "The same word at the same position in two sentences that differ in **another** word, in BERT. Are its keys "
        "the same in the first layer, and in the second? `True` or `False`."
    ),
    begin='patterns_7 = {"first layer": ..., "second layer": ...}',
    solution='{"first layer": True, "second layer": False}',
)
def _contexts(answer: object) -> str:
    _, trace = _traces()
    keys = [layer.keys[:, :, 2] for layer in trace.layers if layer.keys is not None]
    same = [torch.allclose(pair[0], pair[1], rtol=0, atol=1e-7) for pair in keys]
    return entries(
        answer,
        {"first layer": same[0], "second layer": same[1]},
    )
