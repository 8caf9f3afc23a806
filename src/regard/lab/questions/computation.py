"""Attention as a computation: noise, orthogonal keys, convolutions, positions, recurrence, and pictures."""

import math
from collections.abc import Mapping
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from regard.lab.answers import entries, formula, function, letters, number, real, tensor, together, unfilled
from regard.lab.question import question
from regard.lab.questions.heads import layer, numbers
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

    one = torch.ones((), dtype=K.dtype)
    if exact:
        return output(alpha * one) - output(one)
    return (alpha - 1) * torch.autograd.functional.jacobian(output, one)


@question(
    "key_scale.1",
    tasks=("002.1.1f",),
    text=(
        "Key $k_i$ becomes $\\alpha k_i$. Write the **first-order** change of the output for one query (around "
        "$\\alpha = 1$), with $\\beta = 1$: `q` is `(d,)`, `K` is `(n, d)`, `V` is `(n, t)`, the result `(t,)`. A sum "
        "of all values remains, of which one gets more and the others get less weight."
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


@question(
    "orthogonal.1",
    tasks=("002.1.3c",),
    text=(
        "$K$ has $n$ orthonormal keys and $Q = K$, so $K^\\top Q = I$. Is attention then the identity? Write the "
        "weight that each token gives **itself**, for the factor $\\beta$ of the scores."
    ),
    begin="def own_weight(n, beta):",
    solution="return math.exp(beta) / (math.exp(beta) + n - 1)",
    points=2,
)
def _orthogonal(answer: object) -> str:
    def diagonal(n: int, beta: float) -> float:
        keys = torch.eye(int(n), dtype=torch.float64)[None, None]
        return rg.weights(keys, keys, rg.Softmax(beta=beta))[0, 0, 0, 0].item()

    return formula(
        answer,
        diagonal,
        [(8, 1.0), (4, 3.0), (64, 0.5), (2, 0.0)],
        {
            "K^T Q is the identity, but its softmax is not: the zeros have weight, too": lambda n, beta: 1.0,
            "there are n − 1 other keys, with e⁰ = 1 each": lambda n, beta: math.exp(beta) / (math.exp(beta) + n),
            "e^0 is 1, not 0": lambda n, beta: 1.0,
            "this is the weight of all other tokens": lambda n, beta: 1 - diagonal(n, beta),
            "this is the weight of one other token": lambda n, beta: (1 - diagonal(n, beta)) / (n - 1),
            "beta is not used": lambda n, beta: diagonal(n, 1.0),
        },
    )


@question(
    "orthogonal.2",
    tasks=("002.1.3c",),
    text="With $n = 8$ orthonormal keys and $Q = K$: which $\\beta$ gives every token 99 % of its own weight?",
    solution="math.log(7 * 99)",
)
def _almost(answer: object) -> str:
    keys = torch.eye(8, dtype=torch.float64)[None, None]
    beta = real(answer)
    if beta is None or not math.isfinite(beta):
        return (
            number(answer, math.nan)
            if beta is None or math.isnan(beta)
            else "that gives 100 %: a finite beta is enough"
        )
    weight = rg.weights(keys, keys, rg.Softmax(beta=beta))[0, 0, 0, 0].item() if beta >= 0 else 0.0
    return "" if abs(weight - 0.99) < 1e-4 else f"with this beta the weight is {weight:.2%}"


@question(
    "pointwise.1",
    tasks=("002.1.3d",),
    text=(
        "Every token gives all its weight to itself. Attention with the layer's projections `W_v` and `W_o` is then "
        "the same linear map at every position. Which convolution over tokens is that, by the size of its kernel?"
    ),
    solution="1",
)
def _pointwise(answer: object) -> str:
    apart = 1000 * torch.eye(7)[None, None]

    def middle(values: Tensor) -> Tensor:
        return rg.attend(apart, apart, values[None, None])[0, 0, 3]

    slopes = torch.autograd.functional.jacobian(middle, numbers(7, 2))
    width = int((slopes.abs().sum((0, 2)) > 0).sum())
    near = {"no token is mixed with its neighbours": 3, "a kernel has at least one entry": 0}
    return number(answer, width, near, tolerance=0)


@question(
    "convolution.1",
    tasks=("002.1.3e",),
    text=(
        "Attention as a convolution of width 3 with equal weights: every token attends to itself and its two "
        "neighbours. Write the weights of **6 tokens**, `(6, 6)`. The first and the last token have one neighbour "
        "only, and weights are probabilities."
    ),
    solution=(
        "torch.tensor(\n"
        "    [\n"
        "        [1 / 2, 1 / 2, 0, 0, 0, 0],\n"
        "        [1 / 3, 1 / 3, 1 / 3, 0, 0, 0],\n"
        "        [0, 1 / 3, 1 / 3, 1 / 3, 0, 0],\n"
        "        [0, 0, 1 / 3, 1 / 3, 1 / 3, 0],\n"
        "        [0, 0, 0, 1 / 3, 1 / 3, 1 / 3],\n"
        "        [0, 0, 0, 0, 1 / 2, 1 / 2],\n"
        "    ]\n"
        ")"
    ),
    points=2,
)
def _band(answer: object) -> str:
    x = torch.ones(1, 1, 6, 2)
    band = rg.weights(x, x, rg.Uniform(), rg.window(before=1, after=1))[0, 0]
    return tensor(
        answer,
        band,
        {
            "the first and the last row sum to 2/3 only: they have two keys, not three": (band > 0) / 3,
            "a token attends to itself, too": rg.weights(
                x, x, rg.Uniform(), rg.window(before=1, after=1) & ~rg.window(before=0, after=0)
            )[0, 0],
            "this looks back only": rg.weights(x, x, rg.Uniform(), rg.window(before=2, after=0))[0, 0],
            "these are not divided by the number of neighbours": (band > 0).double(),
            "this is width 5": rg.weights(x, x, rg.Uniform(), rg.window(before=2, after=2))[0, 0],
        },
        probabilities=True,
    )


@question(
    "convolution.2",
    tasks=("002.1.2b",),
    text=(
        "A convolution looks at every place through many kernels, and attention through many heads. How many heads "
        "does a layer need to be any given one-dimensional convolution of width $w$, if each head can look at one "
        "relative position only (all its weight is on the token $t + s$)?"
    ),
    begin="def heads_needed(width):",
    solution="return width",
)
def _kernels(answer: object) -> str:
    def offsets(width: int) -> int:
        weight = numbers(3, 2, width)
        x = numbers(1, 2, 31)
        slopes = torch.autograd.functional.jacobian(lambda y: F.conv1d(y, weight, padding=width // 2)[0, :, 15], x)
        return int((slopes.abs().sum((0, 1, 2)) > 0).sum())

    return formula(
        answer,
        offsets,
        [(1,), (3,), (5,), (9,)],
        {
            "the token itself is one of the positions": lambda width: width - 1,
            "a head has one position on one side": lambda width: (width - 1) / 2,
            "each relative position needs a head of its own": lambda width: 1,
            "channels do not count: W_v and W_o of a head mix them all": lambda width: 2 * width,
        },
        tolerance=0,
    )


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
    "block.1",
    tasks=("002.1.4e",),
    text=(
        "Write what stands around each part of the original Transformer: the residual connection and the layer "
        "normalization, in their order. `x` is `(B, T, E)`, `part` is a function of it (attention or network), `norm` "
        "a module."
    ),
    begin="def add_and_norm(x, part, norm):",
    solution="return norm(x + part(x))",
)
def _add_and_norm(answer: object) -> str:
    config = rg.TransformerConfig(vocabulary_size=20, embedding_dim=8, num_layers=1, num_heads=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = next(m for m in rg.Transformer(config).eval().modules() if hasattr(m, "attention_norm"))
    nn.init.normal_(block.get_parameter("attention_norm.weight"), generator=torch.Generator().manual_seed(1))
    other = nn.LayerNorm(8)

    def ours(x: Tensor, part: nn.Module, norm: nn.Module) -> Tensor:
        """What the library's block computes before its network."""
        seen: list[Tensor] = []
        hook = block.get_submodule("network").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        block(x)
        hook.remove()
        return seen[0] if norm is block.attention_norm else norm(x + part(x))

    return function(
        answer,
        ours,
        {
            "the library's block": [numbers(2, 5, 8), block.attention, block.attention_norm],
            "a linear part": [numbers(1, 3, 8), nn.Linear(8, 8), other],
        },
        {
            "the residual connection is missing": lambda x, part, norm: norm(part(x)),
            "the normalization is missing": lambda x, part, norm: x + part(x),
            "this is the pre-norm of later models: norm before the part": lambda x, part, norm: x + part(norm(x)),
            "normalization comes after the sum": lambda x, part, norm: x + norm(part(x)),
        },
    )


@question(
    "patches.1",
    tasks=("002.1.5a",),
    text=(
        "A Vision Transformer with patches of 16 × 16 reads pictures of 224 × 224 and three colours. Its patch "
        "embedding is a convolution: which kernel size and stride? How many tokens does the first layer get, with the "
        "class token, and how many numbers does one patch have?"
    ),
    begin='patches_1 = {"kernel": ..., "stride": ..., "tokens": ..., "numbers": ...}',
    solution='{"kernel": 16, "stride": 16, "tokens": (224 // 16) ** 2 + 1, "numbers": 16 * 16 * 3}',
)
def _patches(answer: object) -> str:
    model = _vision()
    patches = (224 // model.patches.stride[0]) ** 2
    return entries(
        answer,
        {
            "kernel": model.patches.kernel_size[0],
            "stride": model.patches.stride[0],
            "tokens": model.positions.shape[1],
            "numbers": model.patches.weight[0].numel(),
        },
        {
            "stride": {"then patches would overlap": 1},
            "tokens": {"the class token is one more": patches, "there are that many patches in a row": 14},
            "numbers": {"there are three colours": 16 * 16},
        },
    )


def _vision(**changes: object) -> rg.VisionTransformer:
    config = {"image_size": 224, "patch_size": 16, "embedding_dim": 24, "num_layers": 1, "num_heads": 2, **changes}
    with torch.device("meta"):
        return rg.VisionTransformer(rg.VisionConfig(**config))  # type: ignore[arg-type]


def _small_vision() -> rg.VisionTransformer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = rg.VisionConfig(image_size=8, patch_size=4, embedding_dim=8, num_layers=1, num_heads=2)
        return rg.VisionTransformer(config).eval()


@question(
    "patches.2",
    tasks=("002.1.5b",),
    text=(
        "What of the original Transformer does a Vision Transformer for classification **not** have?\n\n"
        "a) a decoder\n"
        "b) cross-attention\n"
        "c) a causal mask\n"
        "d) self-attention\n"
        "e) position-wise networks"
    ),
    solution='"abc"',
)
def _lacks(answer: object) -> str:
    from regard.models.layers.network import PositionWise

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = rg.TransformerConfig(vocabulary_size=20, embedding_dim=8, num_layers=1, num_heads=2)
        original = rg.Transformer(config).eval()
        vision = _small_vision()
    tokens = torch.arange(5)[None]
    changed = torch.where(tokens == 4, 9, tokens)
    early = original(tokens, tokens)[:, :4], original(tokens, changed)[:, :4]
    image = numbers(1, 3, 8, 8)
    features = vision.features(image), vision.features(torch.where(torch.arange(8) > 5, 0, image))

    def has(model: nn.Module, causal: bool) -> str:
        names = " ".join(name for name, _ in model.named_modules())
        modules = list(model.modules())
        parts = {
            "a": "decoder" in names,
            "b": ".cross" in names,
            "c": causal,
            "d": any(isinstance(module, rg.MultiHeadAttention) for module in modules),
            "e": any(isinstance(module, PositionWise) for module in modules),
        }
        return "".join(letter for letter, there in parts.items() if there)

    theirs = has(original, torch.allclose(early[0], early[1], atol=1e-6))
    ours = has(vision, torch.allclose(features[0][:, :2], features[1][:, :2], atol=1e-6))
    return letters(
        answer,
        "".join(letter for letter in theirs if letter not in ours),
        "abcde",
        {
            "a": "nothing is generated token by token: a class is read off",
            "b": "there is no second sequence",
            "c": "a patch may see all others",
            "d": "patches attend to one another",
            "e": "its layers are those of an encoder",
        },
    )


@question(
    "patches.3",
    tasks=("002.1.5c",),
    text=(
        "How many parameters do the learned positions of a Vision Transformer have, for pictures of `size` × `size`, "
        "patches of `patch` × `patch` and the width `width`? (The sines of the original Transformer have none.)"
    ),
    begin="def position_parameters(size, patch, width):",
    solution="return ((size // patch) ** 2 + 1) * width",
)
def _positions(answer: object) -> str:
    return formula(
        answer,
        lambda size, patch, width: _vision(image_size=size, patch_size=patch, embedding_dim=width).positions.numel(),
        [(224, 16, 24), (32, 8, 16), (48, 16, 8)],
        {
            "the class token has a position, too": lambda size, patch, width: (size // patch) ** 2 * width,
            "a position is a vector": lambda size, patch, width: (size // patch) ** 2 + 1,
            "positions are numbered along the sequence (1-D), not by row and column": lambda size, patch, width: (
                2 * (size // patch) * width
            ),
        },
        tolerance=0,
    )


@question(
    "patches.4",
    tasks=("002.1.5d",),
    text=(
        "How many linear layers has the classification head of a Vision Transformer in pre-training, and how many in "
        'fine-tuning? What does the head read: `"class token"`, or the `"mean"` of all patches?'
    ),
    begin='patches_4 = {"pre-training": ..., "fine-tuning": ..., "reads": ...}',
    solution='{"pre-training": 2, "fine-tuning": 1, "reads": "class token"}',
)
def _head(answer: object) -> str:
    def linear_layers(head: str) -> int:
        model = _vision(head=head)
        return sum(isinstance(part, nn.Linear) for part in (model.hidden, model.head))

    model = _small_vision()
    features = numbers(1, 5, 8)
    changed = torch.cat([features[:, :1], features[:, 1:] + 1], 1)
    reads = "class token" if torch.equal(model.predict(features), model.predict(changed)) else "mean"
    return entries(
        answer,
        {"pre-training": linear_layers("mlp"), "fine-tuning": linear_layers("linear"), "reads": reads},
        {
            "pre-training": {"there is a hidden layer before the classes": 1, "the patches' layers do not count": 3},
            "fine-tuning": {"the hidden layer is left out in fine-tuning": 2},
            "reads": {"the class token has gathered what matters": "mean"},
        },
    )
