"""Wrong answers to the questions of worksheets: those that graders name, those of custom graders, and nonsense."""

import inspect
import itertools
import math
import sys

import numpy as np
import torch

import regard as rg
from regard.lab import answers
from regard.lab.sheet import answer_code

GRADERS = ("formula", "function", "number", "tensor", "letters", "entries", "word")


def value(question, code=None):
    """What the code of an answer's cell defines: the solution, unless other code is given."""
    names = {"math": math, "torch": torch, "rg": rg}
    exec(code or answer_code(question, solution=True), names)
    return names[question.variable]


def grades(question, solution, monkeypatch):
    """The calls of graders while a solution is checked: their name and their arguments by name."""
    module = sys.modules[question.wrong.__module__]
    calls = []
    with monkeypatch.context() as patch:
        for name in GRADERS:
            grader = getattr(answers, name)
            if hasattr(module, name):

                def recorded(*args, grader=grader, name=name, **options):
                    bound = inspect.signature(grader).bind(*args, **options)
                    calls.append((name, bound.arguments))
                    return grader(*args, **options)

                patch.setattr(module, name, recorded)
        assert question.wrong(solution) == ""
    return calls


def replaced(solution, path, part):
    """The solution with one part of it replaced; the empty path is the whole."""
    return part if path is None else {**solution, path: part}


def mistakes(question, monkeypatch):
    """The wrong answers that graders name, each with its sentence."""
    solution = value(question)
    for name, arguments in grades(question, solution, monkeypatch):
        near, answer = arguments.get("near") or {}, arguments["answer"]
        if name == "entries":
            for part, sentences in near.items():
                for sentence, wrong in sentences.items():
                    yield replaced(solution, part, wrong), sentence
            continue
        if answer is not solution and not isinstance(solution, dict):
            continue  # of what the answer gave: WRITTEN has such answers
        path = None if answer is solution else next(key for key in solution if solution[key] is answer)
        if name == "letters":
            for letter, sentence in near.items():
                flipped = {letter} ^ set(arguments["expected"])
                if flipped:
                    verb = "should not be chosen" if letter in flipped else "is missing"
                    yield replaced(solution, path, "".join(sorted(flipped))), f"{letter} {verb}: {sentence}"
            continue
        for sentence, wrong in near.items():
            yield replaced(solution, path, wrong), sentence


WRITTEN = [
    ("kernel.1", 'kernel_1 = {"query": [1.0, 0.0], "key": [0.0, 1.0]}', "orthogonal vectors have q·k = 0"),
    ("kernel.1", 'kernel_1 = {"query": [1.0, 0.0], "key": [1.0, 0.0]}', "the similarity is 4"),
    ("kernel.1", 'kernel_1 = {"query": [1.0, 0.0], "key": [0.0, 0.0]}', "key: expected one that is not all zeros"),
    ("kernel.1", 'kernel_1 = {"query": [1.0, 0.0], "key": [1.0]}', "key: expected a list of two numbers"),
    ("kernel.3", "def phi(x): return (x[:, :, None] * x[:, None]).flatten(1)", "this is (q·k)²"),
    ("kernel.3", "def phi(x): return torch.cat([torch.ones(len(x), 1), x], 1)", "φ(q)·φ(k) is"),
    (
        "kernel.3",
        "def phi(x):\n"
        "    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)\n"
        "    return torch.cat([torch.ones(len(x), 1), x, x**2, x[:, i] * x[:, j]], 1)",
        "√2 is missing, at the entries and at products",
    ),
    (
        "kernel.3",
        "def phi(x):\n"
        "    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)\n"
        "    return torch.cat([torch.ones(len(x), 1), x, x**2, 2**0.5 * x[:, i] * x[:, j]], 1)",
        "the entries need the factor √2",
    ),
    (
        "kernel.3",
        "def phi(x):\n"
        "    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)\n"
        "    return torch.cat([torch.ones(len(x), 1), 2**0.5 * x, x**2, x[:, i] * x[:, j]], 1)",
        "products of two different entries need the factor √2",
    ),
    (
        "kernel.3",
        "def phi(x): return torch.cat([torch.ones(len(x), 1), 2**0.5 * x, x**2], 1)",
        "the products are missing",
    ),
    (
        "kernel.3",
        "def phi(x): return torch.cat([2**0.5 * x, (x[:, :, None] * x[:, None]).flatten(1)], 1)",
        "the constant feature 1 is missing",
    ),
    ("kernel.3", "def phi(x): return x.sum()", "expected a tensor (4, C)"),
    (
        "kernel.4",
        "def linear_attention(phi_q, phi_k, v):\n"
        "    table = phi_q @ phi_k.T\n"
        "    return (table / table.sum(1, keepdim=True)) @ v",
        "the number of operations grows with N²",
    ),
    ("temperature.3", 'temperature_3 = {"one value": 1e6, "average": 0}', "one value: with beta = 1e+06"),
    ("temperature.3", 'temperature_3 = {"one value": float("inf"), "average": 1e-3}', "average: with beta = 0.001"),
    ("temperature.3", 'temperature_3 = {"one value": float("inf"), "average": -1}', "expected a number of at least 0"),
    ("orthogonal.2", "orthogonal_2 = 1.0", "with this beta the weight is 27.97%"),
    ("orthogonal.2", 'orthogonal_2 = float("inf")', "a finite beta is enough"),
    ("orthogonal.2", "orthogonal_2 = -3", "with a negative factor"),
    ("scaling.6", "def bound(n, epsilon): return epsilon", "no bound, there are rows with 0.32"),
    ("scaling.6", "def bound(n, epsilon): return n * epsilon**0.5", "from epsilon = 0.01 to 0.000001"),
    (
        "saturation.1",
        "def derivatives(z):\n    y = z.exp() / z.exp().sum()\n    return torch.diag(y) - torch.outer(y, y)",
        "subtract the largest z from all first",
    ),
    ("heads.4", "def combine_heads(x): return x.transpose(1, 2).view(x.shape[0], x.shape[2], -1)", "not contiguous"),
    (
        "heads.5",
        "def attention(q, k, v, mask=None):\n"
        "    s = q @ k.mT / k.shape[-1] ** 0.5\n"
        "    s = s if mask is None else s.masked_fill(~mask, -1e9)\n"
        "    return torch.softmax(s, -1).masked_fill(~mask if mask is not None else torch.tensor(False), 0) @ v",
        "float16 ends at 65,504",
    ),
    (
        "heads.5",
        "def attention(q, k, v, mask=None):\n"
        "    s = q @ k.mT / k.shape[-1] ** 0.5\n"
        '    s = s if mask is None else s.masked_fill(~mask, float("-inf"))\n'
        "    return torch.softmax(s, -1) @ v",
        "a softmax of -inf alone is 0/0",
    ),
    ("patterns.1", "def previous(weights): return weights.diagonal().mean()", "this is the weight on the token itself"),
    ("patterns.1", "def previous(weights): return weights.diagonal(1).mean()", "this is the weight on the next token"),
    ("patterns.1", "def previous(weights): return weights.diagonal(-1).sum() / 8", "does not count in the mean"),
    ("patterns.1", "def previous(weights): return weights.diagonal(-1).sum()", "this is a sum"),
    (
        "patterns.3",
        "def looks_at(weights, tokens): return [tokens[i] for i in weights.argmax(0).tolist()]",
        "rows are queries, columns keys",
    ),
    ("patterns.3", "def looks_at(weights, tokens): return tokens", "does not look at"),
    ("patterns.3", "def looks_at(weights, tokens): return tokens[:2]", "expected a list of 8 strings"),
    (
        "pretraining.2",
        "def examples(sentences): return [(a, b, 1) for a, b in zip(sentences, sentences[1:])]",
        "guessing would pay",
    ),
    (
        "pretraining.2",
        "def examples(sentences): return [(sentences[0], sentences[1], 1), (sentences[0], sentences[2], 0)]",
        "label 0 has a sentence of the text as it stands",
    ),
    (
        "pretraining.2",
        'def examples(sentences): return [(sentences[0], sentences[1], 1), (sentences[0], "A cat.", 0)]',
        "the text does not have the word 'cat'",
    ),
    ("pretraining.2", 'def examples(sentences): return [("a", "b", 2)]', "expected the labels 0 and 1"),
    ("pretraining.2", "def examples(sentences): return [(1, 2, 1), (1, 2, 0)]", "expected strings"),
    (
        "pretraining.2",
        'def examples(sentences): return [("the", "the", 1), ("the", "the", 0)]',
        "a pair has both labels",
    ),
    (
        "heads.6",
        "class MultiHeadAttention(torch.nn.Module):\n"
        "    def __init__(self, *sizes): super().__init__(); self.W_q = torch.nn.ReLU()",
        "W_q: expected a torch.nn.Linear",
    ),
    ("heads.6", "def MultiHeadAttention(*sizes): return torch.nn.Linear(1, 1)", "expected a class"),
]
"""Wrong answers to questions that have a grader of their own: the code of the answer, and words of the message."""
MODULE = [
    ("W_o = torch.nn.Linear(num_heads * value_length", "W_o = torch.nn.Linear(num_heads * qk_length", "W_o goes from"),
    (
        "W_v = torch.nn.Linear(embedding_dim, num_heads * value_length",
        "W_v = torch.nn.Linear(embedding_dim, value_length",
        "output",
    ),
    ("num_heads * qk_length)", "num_heads * qk_length, bias=False)", "W_q: expected a bias"),
    (" / k.shape[-1] ** 0.5", "", "the scale 1/√qk_length is missing"),
    ("return self.W_o(out.transpose(1, 2).flatten(2))", "return out.transpose(1, 2).flatten(2)", "for self-attention"),
    ("self.split(self.W_v(V))", "self.split(self.W_v(K))", "the values are not those of V"),
    ("super().__init__()", "super().__init__(); raise OSError('no')", "raises OSError: no"),
    ("super().__init__()", "super().__init__(); self.none = torch.nn.ReLU()", ""),
]
"""Edits of the solution of heads.6, the layer as a module, and words of the message; no words: it stays right."""


class Hostile:
    """A value whose every operation raises."""

    def _refuse(self, *_):
        raise RuntimeError("no")

    __float__ = __iter__ = __len__ = __eq__ = __bool__ = __getitem__ = __contains__ = __array__ = _refuse
    __hash__ = object.__hash__


def raising(*_):
    raise OSError("no\nsuch answer")


def circle():
    """A list that has itself as its entry."""
    loop = []
    loop.append(loop)
    return loop


NONSENSE = {
    "None": None,
    "dots": ...,
    "NaN": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "text": "text",
    "empty text": "",
    "an empty list": [],
    "an empty dict": {},
    "a dict": {"a": 1},
    "bytes": b"ac",
    "a class": int,
    "a complex number": 1j,
    "a huge number": 10**5000,
    "a range": range(3),
    "an empty tensor": torch.empty(0),
    "NaNs": torch.full((2, 3), math.nan),
    "a tensor without numbers": torch.empty(2, 3, device="meta"),
    "an array of texts": np.array(["a", "b"]),
    "a hostile object": Hostile(),
    "a list in itself": circle(),
    "an endless list": itertools.count(),
    "a raising function": raising,
    "a function of nothing": lambda: 0.0,
    "a function that gives text": lambda *_: "text",
    "a function that gives NaN": lambda *_: math.nan,
    "a function that gives infinity": lambda *_: math.inf,
    "a function that gives None": lambda *_: None,
    "a function that gives a hostile object": lambda *_: Hostile(),
    "a function that gives itself in itself": lambda *_: circle(),
    "a function that gives an empty tensor": lambda *_: torch.empty(0),
    "a function that gives a tensor without numbers": lambda *_: torch.empty(2, 3, device="meta"),
}


def spoilt(answer):
    """Answers like this one, and wrong: another sign, a factor, another shape, another type."""
    if isinstance(answer, bool):
        return [not answer, str(answer)]
    if isinstance(answer, str):
        return [f"not {answer}", answer.encode(), 3]
    if isinstance(answer, int | float):
        smaller = 0.01 * answer - 1 if math.isfinite(answer) else 1e9
        return [-answer if answer else 1.0, smaller, [answer, answer], str(answer)]
    if isinstance(answer, torch.Tensor):
        return [~answer if answer.dtype == torch.bool else -answer, 0.01 * answer, answer[None, None], answer[..., :-1]]
    if isinstance(answer, tuple | list):
        parts = [spoilt(part) for part in answer]
        whole = [type(answer)(changed) for changed in zip(*parts, strict=False)]
        return [*whole, answer[:-1], answer[0]]
    if isinstance(answer, dict):
        changed = [{**answer, name: wrong} for name in answer for wrong in spoilt(answer[name])]
        return [*changed, {name: answer[name] for name in list(answer)[1:]}, list(answer.values())]
    if isinstance(answer, type):
        return [answer(2, 8, 4, 4)]
    return [lambda *inputs, place=place: spoilt(answer(*inputs))[place] for place in range(4)]
