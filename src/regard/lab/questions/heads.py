"""Heads: shapes, splitting and combining them, and the layer around them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import regard as rg
from regard.lab.answers import blank, called, entries, function, kind, tensor
from regard.lab.question import BLANK, question
from regard.lab.questions.inputs import B, E, H, K, S, T, V, layer, numbers


@question(
    "heads.1",
    tasks=("001.1", "002.1.3a"),
    text=(
        "A French sentence (the *source*) is translated into English (the *target*). Where do queries, keys "
        'and values come from in the decoder\'s **cross-attention**? Answer `"source"` or `"target"`. And what'
        " is the shape of the weights of one head and one pair of sentences, (queries, keys), with 7 source "
        "tokens and 5 target tokens?"
    ),
    begin='heads_1 = {"queries": ..., "keys": ..., "values": ..., "weights": ...}',
    solution='{"queries": "target", "keys": "source", "values": "source", "weights": (5, 7)}',
)
def _cross(answer: object) -> str:
    attention = layer()
    target, source = numbers(1, T, E).requires_grad_(), numbers(1, S, E, seed=1).requires_grad_()
    keys, values = attention.remember(source)
    queries = attention.split_heads(attention.W_q(target), K)
    lengths = {target.shape[1]: "target", source.shape[1]: "source"}
    expected = {name: lengths[x.shape[2]] for name, x in (("queries", queries), ("keys", keys), ("values", values))}
    shape = tuple(rg.weights(queries, keys, rg.Softmax()).shape[-2:])
    return entries(
        answer,
        {**expected, "weights": shape},
        {
            "queries": {"the sentence that is being written asks": "source"},
            "keys": {"what is looked up is in the sentence to be translated": "target"},
            "values": {"values come from where the keys come from": "target"},
            "weights": {"a row for each query, a column for each key": shape[::-1]},
        },
    )


@question(
    "heads.2",
    tasks=("001.2", "001.3", "001.5", "002.1.2a", "002.1.3a"),
    text=(
        "Self-attention with batch 2, 5 tokens, `embedding_dim = 32`, `num_heads = 4`, `qk_length = 8` and "
        "`value_length = 6`. Which shapes follow one another: the input, queries and values after their linear "
        "projections, both after `split_heads`, the weights, the output of the heads, that after `combine_heads`, and "
        "the layer's output?"
    ),
    begin=(
        "heads_2 = {\n"
        '    "input": ...,\n'
        '    "queries projected": ...,\n'
        '    "values projected": ...,\n'
        '    "queries split": ...,\n'
        '    "values split": ...,\n'
        '    "weights": ...,\n'
        '    "heads": ...,\n'
        '    "combined": ...,\n'
        '    "output": ...,\n'
        "}"
    ),
    solution=(
        "{\n"
        '    "input": (2, 5, 32),\n'
        '    "queries projected": (2, 5, 4 * 8),\n'
        '    "values projected": (2, 5, 4 * 6),\n'
        '    "queries split": (2, 4, 5, 8),\n'
        '    "values split": (2, 4, 5, 6),\n'
        '    "weights": (2, 4, 5, 5),\n'
        '    "heads": (2, 4, 5, 6),\n'
        '    "combined": (2, 5, 4 * 6),\n'
        '    "output": (2, 5, 32),\n'
        "}"
    ),
    points=3,
)
def _shapes(answer: object) -> str:
    attention, x = layer(), numbers(B, T, E)
    queries, keys, values = attention.project(x)
    heads = rg.attend(queries, keys, values)
    shapes = {
        "input": x,
        "queries projected": attention.W_q(x),
        "values projected": attention.W_v(x),
        "queries split": queries,
        "values split": values,
        "weights": rg.weights(queries, keys),
        "heads": heads,
        "combined": attention.combine_heads(heads),
        "output": attention(x),
    }
    sizes = {name: tuple(value.shape) for name, value in shapes.items()}
    narrow = {"these are the numbers of one head; the projection makes those of all heads": (B, T, K)}
    later = "the axis of heads comes before that of tokens, so that a product goes over all heads at once"
    return entries(
        answer,
        sizes,
        {
            "queries projected": narrow,
            "values projected": {
                "values have a length of their own, value_length": sizes["queries projected"],
                **{sentence: (B, T, V) for sentence in narrow},
            },
            "queries split": {later: (B, T, H, K)},
            "values split": {later: (B, T, H, V), "values have a length of their own": sizes["queries split"]},
            "weights": {"every head has its own weights": (B, T, T)},
            "heads": {"the output has the length of the values, not of the keys": sizes["queries split"]},
            "combined": {"heads are concatenated, not added": (B, T, V)},
            "output": {"W_o goes back to embedding_dim": sizes["combined"]},
        },
    )


@question(
    "heads.3",
    tasks=("001.3", "001.split", "003.3a"),
    text=(
        "Write `split_heads`: from `(B, T, num_heads · length)` to `(B, num_heads, T, length)`. Head $h$ gets the "
        "$h$-th block of `length` numbers of every token."
    ),
    begin="def split_heads(x, num_heads):",
    solution="return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)",
    points=2,
)
def _split(answer: object) -> str:
    def split(x: Tensor, num_heads: int) -> Tensor:
        return layer().split_heads(x, x.shape[-1] // num_heads)

    return function(
        answer,
        split,
        {
            "4 heads of 8, 5 tokens": [numbers(B, T, E), H],
            "one head": [numbers(1, 3, 6), 1],
            "as many tokens as heads": [numbers(2, 4, 8), 4],
            "a tensor that is not contiguous": [numbers(B, E, T).mT, H],
        },
        {
            "a plain view to this shape mixes tokens: the last axis must be split first, and then swapped with that "
            "of the tokens": lambda x, num_heads: x.reshape(x.shape[0], num_heads, x.shape[1], -1),
            "the axes of tokens and heads are still to be swapped": lambda x, num_heads: split(
                x, num_heads
            ).mT.mT.transpose(1, 2),
            "neighbouring numbers belong to one head: split (num_heads, length), not (length, num_heads)": (
                lambda x, num_heads: x.unflatten(-1, (-1, num_heads)).permute(0, 3, 1, 2)
            ),
        },
    )


@question(
    "heads.4",
    tasks=("001.5", "001.combine", "003.3a"),
    text=(
        "Write the way back, `combine_heads`: from `(B, num_heads, T, length)` to `(B, T, num_heads · length)`. "
        "`view` alone raises an error here. Why?"
    ),
    begin="def combine_heads(x):",
    solution="return x.transpose(1, 2).flatten(2)",
    points=2,
)
def _combine(answer: object) -> str:
    fault = function(
        answer,
        layer().combine_heads,
        {
            "4 heads of 6, 5 tokens": [numbers(B, H, T, V)],
            "as many tokens as heads": [numbers(2, 4, 4, 3)],
            "one head": [numbers(1, 1, 3, 6)],
            "the output of split_heads": [numbers(B, T, E).unflatten(-1, (H, K)).transpose(1, 2)],
        },
        {
            "tokens are mixed: swap the axes of heads and tokens back before joining": lambda x: x.reshape(
                x.shape[0], x.shape[2], -1
            ),
            "heads are concatenated, not added": lambda x: x.sum(1),
            "the numbers of a head must stay side by side": lambda x: x.permute(0, 2, 3, 1).flatten(2),
        },
    )
    if "view size is not compatible" in fault:
        return f"{fault.partition(':')[0]}: a transposed tensor is not contiguous; use reshape, flatten or contiguous()"
    return fault


def _cases() -> dict[str, list[object]]:
    """Inputs of attention: lengths that differ, masks, a query that sees nothing, and half precision."""
    q, k, v = numbers(B, H, T, K), numbers(B, H, S, K, seed=1), numbers(B, H, S, V, seed=2)
    visible = numbers(B, H, T, S, seed=3) > -0.5
    none = visible.clone()
    none[0, :, 2] = False
    return {
        "no mask": [q, k, v, None],
        "one query": [q[:, :, :1], k, v, None],
        "a random mask": [q, k, v, visible],
        "a causal mask": [q, q, v[:, :, :T], rg.causal.visible(B, H, T, T).expand(B, H, T, T)],
        "scores of a few hundred": [40 * q, 40 * k, v, visible],
        "a query that sees no key": [q, k, v, none],
        "float16": [q.half(), k.half(), v.half(), visible],
    }


@question(
    "heads.5",
    tasks=("001.attention", "003.3a"),
    text=(
        "Write scaled dot-product attention for `q`, `k`, `v` of shapes `(B, H, T, K)`, `(B, H, S, K)` and "
        "`(B, H, S, V)`. In `mask`, a bool tensor `(B, H, T, S)` or `None`, `True` means: may attend. A query that "
        "sees no key at all gets zeros. It must work in float16, too."
    ),
    begin="def attention(q, k, v, mask=None):",
    solution=(
        "scores = q @ k.mT / k.shape[-1] ** 0.5\n"
        "if mask is not None:\n"
        '    scores = scores.masked_fill(~mask, float("-inf"))\n'
        "weights = torch.softmax(scores, dim=-1)\n"
        "return weights.nan_to_num(0.0) @ v  # a row of -inf alone has no weights"
    ),
    points=4,
)
def _attention(answer: object) -> str:
    def scaled(beta: float | None) -> Callable[..., Tensor]:
        return lambda q, k, v, mask: rg.attend(q, k, v, rg.Softmax(beta=beta), mask)

    def average(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """A query without a key gets the mean of all values, as with a large negative number in place of -inf."""
        out = rg.attend(q, k, v, rg.Softmax(), mask)
        return out if mask is None else torch.where(mask.any(-1, keepdim=True), out, v.mean(-2, keepdim=True))

    def across(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights = rg.weights(k, q, rg.Softmax(), None if mask is None else mask.mT)
        return weights.mT @ v

    fault = function(
        answer,
        scaled(None),
        _cases(),
        {
            "the scale is missing: scores are divided by √K": scaled(1.0),
            "scores are divided by K, and not by its root": scaled(1 / K),
            "scores are multiplied by √K, and not divided": scaled(K**0.5),
            "the scale is that of the values: it is the length of queries and keys that counts": scaled(V**-0.5),
            "the mask is the wrong way round: True means visible": lambda q, k, v, mask: rg.attend(
                q, k, v, rg.Softmax(), None if mask is None else ~mask
            ),
            "the mask is not used": lambda q, k, v, mask: rg.attend(q, k, v),
            "a query that sees no key gets the mean of all values; it should get zeros": average,
            "the softmax is over the queries; the weights of a query must sum to 1 over the keys (dim=-1)": across,
            "these are the weights without the values": lambda q, k, v, mask: rg.weights(q, k, rg.Softmax(), mask),
        },
        tolerance=2e-3,
    )
    if "without overflow" in fault:
        return f"{fault}: float16 ends at 65,504; -inf exists in every dtype"
    if "sees no key" in fault and "nan" in fault:
        return f"{fault}: a softmax of -inf alone is 0/0"
    if "without overflow" not in fault and "float16" in fault and "nan" in fault:
        return f"{fault}: an overflow"
    return fault


@question(
    "heads.6",
    tasks=("001.init", "001.forward", "002.1.2a", "003.3a", "003.3b"),
    text=(
        "Write the layer as a module with four linear layers `W_q`, `W_k`, `W_v`, `W_o` (with biases), for any "
        "`qk_length` and `value_length`. `forward(Q, K, V)` gives `(B, T, embedding_dim)`; all three inputs have width "
        "`embedding_dim`. The check sets the weights of your layers and compares."
    ),
    begin=(
        "class MultiHeadAttention(torch.nn.Module):\n"
        "    def __init__(self, num_heads, embedding_dim, qk_length, value_length):\n"
        "        super().__init__()\n"
        "        ...\n\n"
        "    def forward(self, Q, K, V):"
    ),
    solution=(
        "class MultiHeadAttention(torch.nn.Module):\n"
        "    def __init__(self, num_heads, embedding_dim, qk_length, value_length):\n"
        "        super().__init__()\n"
        "        self.num_heads = num_heads\n"
        "        self.W_q = torch.nn.Linear(embedding_dim, num_heads * qk_length)\n"
        "        self.W_k = torch.nn.Linear(embedding_dim, num_heads * qk_length)\n"
        "        self.W_v = torch.nn.Linear(embedding_dim, num_heads * value_length)\n"
        "        self.W_o = torch.nn.Linear(num_heads * value_length, embedding_dim)\n\n"
        "    def split(self, x):\n"
        "        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)\n\n"
        "    def forward(self, Q, K, V):\n"
        "        q, k, v = self.split(self.W_q(Q)), self.split(self.W_k(K)), self.split(self.W_v(V))\n"
        "        out = torch.softmax(q @ k.mT / k.shape[-1] ** 0.5, dim=-1) @ v\n"
        "        return self.W_o(out.transpose(1, 2).flatten(2))"
    ),
    points=5,
)
def _module(answer: object) -> str:
    if blank(answer):
        return BLANK
    if not isinstance(answer, type) or not issubclass(answer, nn.Module):
        return f"expected a class, a torch.nn.Module, got {kind(answer)}"
    for sizes in ((4, 32, 8, 8), (4, 32, 8, 16), (2, 12, 5, 3)):
        label = "num_heads = {}, embedding_dim = {}, qk_length = {}, value_length = {}".format(*sizes)
        if fault := _built(answer, *sizes):
            return fault if fault == BLANK else f"with {label}: {fault}"
    return ""


def _built(kind_of: type[nn.Module], heads: int, width: int, qk_length: int, value_length: int) -> str:
    """What is wrong with a student's layer of these sizes."""
    exact = layer(num_heads=heads, embedding_dim=width, qk_length=qk_length, value_length=value_length)
    built, error = called(kind_of, heads, width, qk_length, value_length)
    if error:
        return error
    assert isinstance(built, nn.Module)
    if not list(built.children()):
        return BLANK
    for name in ("W_q", "W_k", "W_v", "W_o"):
        linear, right = getattr(built, name, None), getattr(exact, name)
        if not isinstance(linear, nn.Linear):
            return f"{name}: expected a torch.nn.Linear, got {kind(linear)}"
        got, wanted = (linear.in_features, linear.out_features), (right.in_features, right.out_features)
        if got != wanted:
            side = "input" if got[0] != wanted[0] else "output"
            return f"{name} goes from {got[0]} to {got[1]} numbers, which is wrong in its {side}"
        if linear.bias is None:
            return f"{name}: expected a bias"
        with torch.no_grad():
            linear.weight.copy_(right.weight)
            linear.bias.copy_(right.bias)
    q, k, v = numbers(2, 5, width), numbers(2, 7, width, seed=1), numbers(2, 7, width, seed=2)
    with torch.no_grad():
        for label, inputs in {"self-attention": (q, q, q), "cross-attention": (q, k, v)}.items():
            out, error = called(built, *inputs)
            if error or blank(out):
                return (error and f"for {label} it {error}") or BLANK
            mistakes = {
                "the values are not those of V": exact(inputs[0], inputs[1], inputs[1]),
                "W_o is not applied": exact.combine_heads(_heads(exact, *inputs)),
                "the scale 1/√qk_length is missing": exact.W_o(exact.combine_heads(_heads(exact, *inputs, beta=1.0))),
            }
            if label == "self-attention":
                del mistakes["the values are not those of V"]
            if fault := tensor(out, exact(*inputs), mistakes):
                return f"for {label}: {fault}"
    return ""


def _heads(exact: rg.MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, beta: float | None = None) -> Tensor:
    keys, values = exact.remember(k, v)
    return rg.attend(exact.split_heads(exact.W_q(q), exact.qk_length), keys, values, rg.Softmax(beta=beta))


@question(
    "heads.7",
    tasks=("003.3a", "003.3b"),
    text=(
        "`d_model = 64`, 8 heads, and keys of length 8. Values get twice that length, 16 numbers a head. What are "
        "the sizes of the four projections, as `(in_features, out_features)`? And of what length are the pieces into "
        "which `split_heads` must cut the output of `W_v`?"
    ),
    begin='heads_7 = {"W_q": ..., "W_k": ..., "W_v": ..., "W_o": ..., "length of values": ...}',
    solution='{"W_q": (64, 64), "W_k": (64, 64), "W_v": (64, 128), "W_o": (128, 64), "length of values": 16}',
)
def _doubled(answer: object) -> str:
    attention = layer(embedding_dim=64, num_heads=8, qk_length=8, value_length=16)
    sizes: dict[str, object] = {
        name: (part.in_features, part.out_features)
        for name, part in attention.named_children()
        if isinstance(part, nn.Linear)
    }
    return entries(
        answer,
        {**sizes, "length of values": attention.value_length},
        {
            "W_q": {"queries meet keys, not values: they stay as they are": (64, 128)},
            "W_k": {"keys meet queries, not values: they stay as they are": (64, 128)},
            "W_v": {"(in, out): the input is still the embedding": (128, 64), "values got longer": (64, 64)},
            "W_o": {"its input is all heads' values": (64, 64), "the output is added to the input": (128, 128)},
            "length of values": {"that is the length of the keys": 8},
        },
    )


@question(
    "heads.8",
    tasks=("002.1.2a", "002.1.3a"),
    text=(
        "$W_o$ of the concatenated heads is a **sum over heads**. Write each head's part: `heads` is `(B, H, T, V)`, "
        "`weight` is that of `W_o`, `(E, H · V)` as `torch.nn.Linear` keeps it. The result is `(B, H, T, E)`, and its "
        "sum over `H` is the layer's output without its bias."
    ),
    begin="def contributions(heads, weight):",
    solution=(
        "blocks = weight.unflatten(1, (heads.shape[1], -1))  # (E, H, V)\n"
        'return torch.einsum("bhtv,ehv->bhte", heads, blocks)'
    ),
    points=2,
)
def _contributions(answer: object) -> str:
    def parts(heads: Tensor, weight: Tensor) -> Tensor:
        count, length = heads.shape[1], heads.shape[3]
        exact = layer(embedding_dim=len(weight), num_heads=count, qk_length=length, value_length=length)
        with torch.no_grad():
            exact.W_o.weight.copy_(weight)
            masks = torch.eye(count)[:, None, :, None, None]
            return (
                torch.cat([exact.W_o(exact.combine_heads(heads * mask)) - exact.W_o.bias for mask in masks])
                .view(count, heads.shape[0], heads.shape[2], -1)
                .transpose(0, 1)
            )

    return function(
        answer,
        parts,
        {
            "4 heads of 6": [numbers(B, H, T, V), numbers(E, H * V, seed=1)],
            "2 heads of 2, E = 4": [numbers(1, 2, 3, 2), numbers(4, 4, seed=1)],
        },
        {
            "the blocks are taken across heads: neighbouring columns of W_o belong to one head": lambda heads, weight: (
                torch.einsum("bhtv,evh->bhte", heads, weight.unflatten(1, (-1, heads.shape[1])))
            ),
            "this is already the sum over heads": lambda heads, weight: parts(heads, weight).sum(1),
        },
    )
