"""What heads look at, in GPT and BERT, trained or not."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import (
    blank,
    called,
    entries,
    formula,
    kind,
    letters,
    number,
    real,
    tensor,
)
from regard.lab.question import BLANK, question
from regard.lab.questions.inputs import layer, numbers


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


def _weights(trace: rg.Trace, layer: int = 0) -> Tensor:
    """The weights of a trace's layer, (B, H, T, S)."""
    weights = trace.layers[layer].weights
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
        "".join(letter for letter, separate in apart.items() if separate),
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


@question(
    "patterns.8",
    tasks=("003.5a",),
    text=(
        "How does attention differ between layers? In many models of the GPT kind, later layers give the "
        "**first** token much weight. From `layers`, a list with the weights `(H, T, T)` of each layer, "
        "return a list with the mean weight on the first token, for each layer: over its heads, and over all "
        "queries but the first, which sees nothing else."
    ),
    begin="def first_token(layers):",
    solution="return [weights[:, 1:, 0].mean() for weights in layers]",
    points=2,
)
def _first_token(answer: object) -> str:
    trace, _ = _traces()
    count = len(trace.layers)
    layers = [_weights(trace, layer)[0] for layer in range(count)]
    heads = range(len(layers[0]))
    mass = [[trace.patterns().of(layer, head).mass["first"] or 0.0 for head in heads] for layer in range(count)]
    if answer is ... or answer is None:
        return BLANK
    if not callable(answer):
        return f"expected a function of (layers), got {kind(answer)}"
    result, error = called(answer, [weights.clone() for weights in layers])
    if error or blank(result):
        return BLANK if error in ("", BLANK) else f"it {error}"
    values = [real(value) for value in result] if isinstance(result, list | tuple | Tensor) and len(result) else []
    if len(values) != count or None in values:
        return f"expected a list of {count} numbers, got {kind(result)}"
    return tensor(
        [value or 0.0 for value in values],
        torch.tensor(mass).mean(1),
        {
            "the first query counts, too: it gives itself all weight": torch.stack(
                [weights[:, :, 0].mean() for weights in layers]
            ),
            "this is the weight that the first query gives: rows are queries": torch.stack(
                [weights[:, 0, 1:].mean() for weights in layers]
            ),
            "this is the weight of tokens on themselves": torch.stack(
                [weights[:, 1:].diagonal(1, 1, 2).mean() for weights in layers]
            ),
        },
    )
