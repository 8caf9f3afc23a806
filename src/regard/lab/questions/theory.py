"""What attention reaches, which masks it needs, what it costs, and what norms do."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import regard as rg
from regard.lab.answers import entries, formula, function, letters, number, together, unfilled, word
from regard.lab.question import question
from regard.lab.questions.heads import numbers


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


def masks_needed(*, generates: bool, left: bool = False, cross: bool = False) -> str:
    """The fewest masks with which padding changes no real token and, if text is generated, later ones no earlier one.

    `left` is where the padding is; in cross-attention it is among the keys alone.

    >>> masks_needed(generates=False), masks_needed(generates=True)
    ('padding', 'causal')
    """
    position = torch.arange(6)
    real = position >= 2 if left else position < 4
    choices: dict[str, rg.Mask | None] = {"none": None, "padding": rg.padding(valid=real[None]), "causal": rg.causal}
    choices["both"] = rg.causal & rg.padding(valid=real[None])
    rows = torch.ones_like(real) if cross else real
    for name, mask in choices.items():
        hides = not _moved(~real, rows, mask)
        if hides and (not generates or not _moved(position > 2, rows & (position <= 2), mask)):
            return name
    raise AssertionError("both masks are enough")


def _moved(changed: Tensor, rows: Tensor, mask: rg.Mask | None) -> bool:
    """Whether some outputs move when some keys and values change."""
    q, k, v = numbers(1, 1, 6, 4), numbers(1, 1, 6, 4, seed=1), numbers(1, 1, 6, 4, seed=2)
    other_k, other_v = (torch.where(changed[:, None], x + 1, x) for x in (k, v))
    difference = rg.attend(q, k, v, mask=mask) - rg.attend(q, other_k, other_v, mask=mask)
    return bool((difference[:, :, rows].abs() > 1e-6).any())


@question(
    "masks.1",
    tasks=("000.2b",),
    text=(
        "A batch has sentences of unequal length, padded on the right. Which masks does each attention **need**: "
        '`"none"`, `"padding"`, `"causal"` or `"both"`? Needed is what keeps padding from changing real tokens and, '
        "where text is generated, later tokens from changing earlier ones. What comes out at padding itself does not "
        "matter."
    ),
    begin=(
        "masks_1 = {\n"
        '    "BERT, self-attention": ...,\n'
        '    "GPT, self-attention": ...,\n'
        '    "T5, encoder self-attention": ...,\n'
        '    "T5, decoder self-attention": ...,\n'
        '    "T5, cross-attention": ...,\n'
        "}"
    ),
    solution=(
        "{\n"
        '    "BERT, self-attention": "padding",\n'
        '    "GPT, self-attention": "causal",\n'
        '    "T5, encoder self-attention": "padding",\n'
        '    "T5, decoder self-attention": "causal",\n'
        '    "T5, cross-attention": "padding",\n'
        "}"
    ),
    points=3,
)
def _masks(answer: object) -> str:
    encoder, decoder = masks_needed(generates=False), masks_needed(generates=True)
    cross = masks_needed(generates=False, cross=True)
    enough = {
        "causality already hides padding on the right from real tokens": "both",
        "later tokens are visible": "padding",
    }
    both_ways = {
        "an encoder reads in both directions": "both",
        "an encoder reads in both directions, and sees its padding": "causal",
    }
    return entries(
        answer,
        {
            "BERT, self-attention": encoder,
            "GPT, self-attention": decoder,
            "T5, encoder self-attention": encoder,
            "T5, decoder self-attention": decoder,
            "T5, cross-attention": cross,
        },
        {
            "BERT, self-attention": both_ways,
            "GPT, self-attention": enough,
            "T5, encoder self-attention": both_ways,
            "T5, decoder self-attention": enough,
            "T5, cross-attention": {
                "the whole source may be read at each step, but not its padding": "none",
                "source and target have different positions: there is no earlier and later between them": "causal",
                "there is no earlier and later between source and target": "both",
            },
        },
    )


@question(
    "masks.2",
    tasks=("000.2b",),
    text="GPT again, but padded on the **left**, as for generating from prompts of unequal length. Which masks now?",
    solution='"both"',
)
def _left(answer: object) -> str:
    return word(
        answer,
        masks_needed(generates=True, left=True),
        {
            "padding on the left comes before the real tokens, where causality shows it": "causal",
            "later tokens are visible": "padding",
        },
    )


@question(
    "masks.3",
    tasks=("000.2b",),
    text=(
        "Write the mask of a decoder with padding on the left as a bool tensor `(B, T, T)`, rows queries and columns "
        "keys, `True` = may attend: from `lengths`, a tensor with the number of real tokens of each sequence, and `T`. "
        "The real tokens of a sequence are its last ones."
    ),
    begin="def mask(lengths, T):",
    solution=(
        "position = torch.arange(T)\n"
        "causal = position[None, :] <= position[:, None]\n"
        "real = position >= T - lengths[:, None]\n"
        "return causal & real[:, None, :]"
    ),
    points=2,
)
def _mask(answer: object) -> str:
    def table(lengths: Tensor, T: int, *, causal: bool = True, left: bool = True) -> Tensor:
        ahead = torch.arange(T) >= T - lengths[:, None] if left else torch.arange(T) < lengths[:, None]
        mask: rg.Mask = rg.padding(valid=ahead)
        mask = mask & rg.causal if causal else mask
        return mask.visible(len(lengths), 1, T, T).expand(len(lengths), 1, T, T)[:, 0].int()

    def exact(lengths: Tensor, T: int) -> Tensor:
        return table(lengths, T)

    return function(
        answer,
        exact,
        {
            "lengths (3, 5), T = 5": [torch.tensor([3, 5]), 5],
            "lengths (1), T = 4": [torch.tensor([1]), 4],
            "lengths (0, 2), T = 3": [torch.tensor([0, 2]), 3],
        },
        {
            "the wrong way round: True means visible": lambda lengths, T: 1 - table(lengths, T),
            "causality is missing": lambda lengths, T: table(lengths, T, causal=False),
            "padding is visible": lambda lengths, T: table(lengths * 0 + T, T),
            "here the padding is on the left: the last tokens are real": lambda lengths, T: table(
                lengths, T, left=False
            ),
        },
    )


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
    "norms.1",
    tasks=("000.3a",),
    text=(
        "`x` is a batch, `(B, D)`. On which inputs does the output $y_{ij}$ depend, in training: under layer "
        "normalization, and under batch normalization?\n\n"
        "a) $x_{ij}$ itself\n"
        "b) $x_{i'j}$ of other rows $i'$, the same column\n"
        "c) $x_{ij'}$ of the same row, other columns\n"
        "d) $x_{i'j'}$ of other rows and other columns"
    ),
    begin='norms_1 = {"layer": ..., "batch": ...}',
    solution='{"layer": "ac", "batch": "ab"}',
    points=2,
)
def _dependence(answer: object) -> str:
    if fault := unfilled(answer, ("layer", "batch")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    x = numbers(4, 3)
    faults = {}
    for name, module in (("layer", nn.LayerNorm(3)), ("batch", nn.BatchNorm1d(4 - 1))):
        slopes = torch.autograd.functional.jacobian(module, x)[1, 1]  # of y₁₁ by all x
        row, column = slopes[1].clone(), slopes[:, 1].clone()
        rest = slopes.clone()
        rest[1], rest[:, 1] = 0, 0
        row[1] = column[1] = 0
        parts = {"a": slopes[1, 1], "b": column, "c": row, "d": rest}
        right = "".join(letter for letter, part in parts.items() if part.abs().max() > 1e-6)
        faults[name] = letters(
            values[name],
            right,
            "abcd",
            {
                "a": "it is scaled and moved, but it is still there",
                "b": "the mean of layer normalization is that of a row"
                if name == "layer"
                else "its mean is that of a column",
                "c": "its mean is that of a row"
                if name == "layer"
                else "the mean of batch normalization is that of a column",
                "d": "no mean has rows and columns in it",
            },
        )
    return together(faults)


def _norm(gamma: float, d: int, beta: float, epsilon: float, std: float = 1.0) -> float:
    """The distance of a layer-normalized vector of this standard deviation from its shift."""
    x = numbers(int(d), seed=4).double()
    x = std * (x - x.mean()) / x.std(unbiased=False)
    norm = nn.LayerNorm(int(d), eps=epsilon, dtype=torch.float64)
    nn.init.constant_(norm.weight, gamma)
    nn.init.constant_(norm.bias, beta)
    return (norm(x) - beta).norm().item()


@question(
    "norms.2",
    tasks=("000.3b",),
    text=(
        "Layer normalization with the scale $\\gamma > 0$ and the shift $\\beta$, the same for all $d$ entries, and "
        "$\\epsilon = 0$: how long is $y - \\beta \\mathbf{1}$, in the Euclidean norm?"
    ),
    begin="def distance(gamma, beta, d):",
    solution="return gamma * d**0.5",
)
def _distance(answer: object) -> str:
    return formula(
        answer,
        lambda gamma, beta, d: _norm(gamma, d, beta, 0.0),
        [(1.0, 0.0, 16), (2.5, 1.0, 9), (0.5, -3.0, 100)],
        {
            "this is the square of the length": lambda gamma, beta, d: gamma**2 * d,
            "each of d entries has mean square γ²: add them, then take the root": lambda gamma, beta, d: gamma,
            "this is γ d; the d entries add up under the root": lambda gamma, beta, d: gamma * d,
            "the length does not depend on the shift, which is subtracted": lambda gamma, beta, d: (
                gamma * d**0.5 + beta
            ),
            "γ multiplies every entry": lambda gamma, beta, d: d**0.5,
            "the variance divides by d, not by d − 1": lambda gamma, beta, d: gamma * (d - 1) ** 0.5,
        },
    )


@question(
    "norms.3",
    tasks=("000.3b",),
    text=(
        "And with $\\epsilon > 0$, for an input whose entries have the standard deviation $s$ (`std`)? PyTorch adds "
        "$\\epsilon$ to the variance."
    ),
    begin="def distance_with_epsilon(gamma, d, std, epsilon):",
    solution="return gamma * (d * std**2 / (std**2 + epsilon)) ** 0.5",
    points=2,
)
def _epsilon(answer: object) -> str:
    return formula(
        answer,
        lambda gamma, d, std, epsilon: _norm(gamma, d, 0.0, epsilon, std),
        [(1.0, 16, 1.0, 0.5), (2.0, 9, 0.1, 0.01), (0.5, 64, 3.0, 2.0)],
        {
            "that is the length for ε = 0; it is smaller now": lambda gamma, d, std, epsilon: gamma * d**0.5,
            "ε is added to the variance, before the root": lambda gamma, d, std, epsilon: (
                gamma * d**0.5 * std / (std + epsilon)
            ),
            "this is the square of the length": lambda gamma, d, std, epsilon: (
                gamma**2 * d * std**2 / (std**2 + epsilon)
            ),
            "the factor var / (var + ε) stands under the root": lambda gamma, d, std, epsilon: (
                gamma * d**0.5 * std**2 / (std**2 + epsilon)
            ),
        },
    )


@question(
    "encoder.1",
    tasks=("001.B1", "001.B3"),
    text=(
        "An encoder with `embedding_dim = 32` reads 2 French sentences of 5 tokens. Which shapes have what goes into "
        "the model, what goes into its first layer, and what comes out of its last?"
    ),
    begin='encoder_1 = {"input": ..., "first layer": ..., "output": ...}',
    solution='{"input": (2, 5), "first layer": (2, 5, 32), "output": (2, 5, 32)}',
)
def _encoder(answer: object) -> str:
    model, tokens = _model(), torch.zeros(2, 5, dtype=torch.long)
    shapes = {"input": tokens, "first layer": model.embedding(tokens), "output": model(tokens)}
    return entries(
        answer,
        {name: tuple(value.shape) for name, value in shapes.items()},
        {
            "input": {"the model embeds; what goes in are numbers of tokens": (2, 5, 32)},
            "first layer": {
                "tokens come before the embedding's axis here": (2, 32, 5),
                "an embedding is a vector for each token": (2, 5),
            },
            "output": {"one vector for each token comes out, not one for each sentence": (2, 32)},
        },
    )


def _model() -> rg.Encoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = rg.EncoderConfig(vocabulary_size=30, embedding_dim=32, num_layers=1, num_heads=4)
        return rg.Encoder(config).eval()


@question(
    "encoder.2",
    tasks=("001.B2", "002.1.4d"),
    text=(
        "Of which two parts is a layer of the encoder made (besides norms and residual connections)?\n\n"
        "a) multi-head attention\n"
        "b) a convolution over tokens\n"
        "c) a recurrent layer\n"
        "d) a position-wise network of two linear layers"
    ),
    solution='"ad"',
)
def _parts(answer: object) -> str:
    from regard.models.layers.network import PositionWise

    classes = {"a": rg.MultiHeadAttention, "b": nn.Conv1d, "c": nn.RNNBase, "d": PositionWise}
    modules = list(_model().modules())
    right = "".join(letter for letter, kind in classes.items() if any(isinstance(part, kind) for part in modules))
    return letters(
        answer,
        right,
        "abcd",
        {
            "a": "it is the part in which tokens meet",
            "b": "tokens meet in attention",
            "c": "the encoder reads all tokens at once",
            "d": "after tokens have met, each is worked on by itself",
        },
    )


@question(
    "encoder.3",
    tasks=("001.B2a", "002.1.4d"),
    text=(
        "One token of the input is changed. Do the outputs at **other** positions change, of multi-head attention, and "
        "of the position-wise network? `True` or `False`. And how many weights and biases has the network, from "
        "$e$ numbers to $f$ and back? A function, `lambda e, f: …`."
    ),
    begin='encoder_3 = {"attention": ..., "network": ..., "parameters": ...}',
    solution='{"attention": True, "network": False, "parameters": lambda e, f: 2 * e * f + e + f}',
    points=2,
)
def _meeting(answer: object) -> str:
    from regard.models.layers.network import PositionWise

    if fault := unfilled(answer, ("attention", "network", "parameters")):
        return fault
    values: Mapping[str, object] = answer  # type: ignore[assignment]
    block = next(part for part in _model().modules() if hasattr(part, "network") and hasattr(part, "attention"))
    x = numbers(1, 5, 32)
    changed = x.clone()
    changed[0, 2] += 1
    moves: dict[str, object] = {
        name: not torch.allclose(part(x)[0, :2], part(changed)[0, :2], atol=1e-6)
        for name, part in ((name, block.get_submodule(name)) for name in ("attention", "network"))
    }
    fault = entries({name: values[name] for name in moves}, moves)
    of_network = formula(
        values["parameters"],
        lambda e, f: sum(p.numel() for p in PositionWise(int(e), int(f)).parameters()),
        [(8, 32), (3, 5)],
        {
            "biases count, too": lambda e, f: 2 * e * f,
            "there is a second layer, back to e numbers": lambda e, f: e * f + f,
            "each layer has as many biases as outputs": lambda e, f: 2 * e * f + 2 * f,
        },
        tolerance=0,
    )
    return "; ".join(filter(None, [fault, f"parameters: {of_network}" if of_network else ""]))
