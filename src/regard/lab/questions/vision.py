"""Pre-training tasks, and attention that costs less: windows, global tokens and channels."""

from functools import partial

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import blank, called, entries, formula, function, kind
from regard.lab.question import BLANK, question

SENTENCES = (
    "The boy ran to the river.",
    "He threw a stone into the water.",
    "The stone sank at once.",
    "A fish looked at it.",
    "Nobody else saw the stone.",
    "Then it began to rain.",
)


@question(
    "pretraining.1",
    tasks=("004.12.6",),
    text=(
        "BERT is trained on two tasks: predicting masked words, and saying whether the second sentence follows the "
        'first. Which is `"generative"` (a word is made), and which `"contrastive"` (true examples are told from false '
        "ones)? And among how many classes does each choose, with a vocabulary of 30,000?"
    ),
    begin=(
        "pretraining_1 = {\n"
        '    "masked words": ...,\n'
        '    "next sentence": ...,\n'
        '    "classes of masked words": ...,\n'
        '    "classes of next sentence": ...,\n'
        "}"
    ),
    solution=(
        "{\n"
        '    "masked words": "generative",\n'
        '    "next sentence": "contrastive",\n'
        '    "classes of masked words": 30_000,\n'
        '    "classes of next sentence": 2,\n'
        "}"
    ),
)
def _tasks(answer: object) -> str:
    with torch.device("meta"):
        config = rg.EncoderConfig.bert(vocabulary_size=30_000, embedding_dim=8, num_layers=1, num_heads=1)
        model = rg.Encoder(config)
        hidden = model(torch.zeros(1, 4, dtype=torch.long))
        words, order = model.masked_words(hidden).shape[-1], model.next_sentence(hidden).shape[-1]

    def sort(classes: int) -> str:
        return "generative" if classes == config.vocabulary_size else "contrastive"

    return entries(
        answer,
        {
            "masked words": sort(words),
            "next sentence": sort(order),
            "classes of masked words": words,
            "classes of next sentence": order,
        },
        {
            "masked words": {"a word of the whole vocabulary is predicted": "contrastive"},
            "next sentence": {"nothing is written: it is decided whether a pair is true": "generative"},
            "classes of next sentence": {"follows, or does not: two classes": 1},
        },
    )


@question(
    "pretraining.2",
    tasks=("004.12.6",),
    text=(
        "Propose a contrastive task that needs no labels: from a list of `sentences` of a text (at least four), return "
        "examples `(first, second, label)`. Label 1: `second` is what it should be. Label 0: it was spoilt, in a way "
        "that *you* choose, but not by taking another sentence: `second` must differ from all sentences of the text. "
        "Both labels must occur equally often, and nothing may be drawn that the text does not give."
    ),
    begin="def examples(sentences):",
    solution=(
        "def reverse(sentence):\n"
        '    return " ".join(reversed(sentence.split()))\n\n'
        "true = [(a, b, 1) for a, b in zip(sentences, sentences[1:])]\n"
        "return true + [(a, reverse(b), 0) for a, b, _ in true]"
    ),
    points=3,
)
def _examples(answer: object) -> str:
    if blank(answer):
        return BLANK
    if not callable(answer):
        return f"expected a function of (sentences), got {kind(answer)}"
    made, error = called(answer, list(SENTENCES))
    if error or blank(made):
        return BLANK if error in ("", BLANK) else f"it {error}"
    triples = [tuple(example) for example in made] if isinstance(made, list | tuple) else []
    if not triples or any(len(example) != 3 for example in triples):
        return f"expected a list of (first, second, label), got {kind(made)}"
    if any(not isinstance(text, str) for *texts, _ in triples for text in texts):
        return "expected strings as first and second"
    labels = [label for *_, label in triples]
    if not set(labels) <= {0, 1}:
        return f"expected the labels 0 and 1, got {sorted(set(map(str, labels)))}"
    if labels.count(0) != labels.count(1):
        return f"{labels.count(1)} examples have label 1, {labels.count(0)} have label 0: guessing would pay"
    true, false = ({(first, second) for first, second, label in triples if label == which} for which in (1, 0))
    if both := true & false:
        return f"a pair has both labels: {next(iter(both))}"
    if copied := [second for _, second in false if second in SENTENCES]:
        return f"label 0 has a sentence of the text as it stands: {copied[0]!r}"
    words = {word.strip(".").lower() for sentence in SENTENCES for word in sentence.split()}
    strange = {word.strip(".").lower() for first, second in true | false for word in (first + " " + second).split()}
    if strange - words:
        return f"the text does not have the word {sorted(strange - words)[0]!r}"
    return ""


def grid_mask(side: int, radius: int, *, tokens: int = 0) -> Tensor:
    """Which patches of a square grid see which, (T, T); before them come global tokens.

    >>> grid_mask(3, 1).sum().item()
    49
    """
    if not tokens:
        return rg.window2d((side, side), radius).visible(1, 1, side**2, side**2)[0, 0]
    from regard.models.vision import local

    return local((side, side), radius, torch.device("cpu")).visible(1, 1, side**2 + 1, side**2 + 1)[0, 0]


def layers_to_meet(visible: Tensor) -> int:
    """After how many layers every token depends on every other one.

    >>> layers_to_meet(torch.ones(3, 3, dtype=torch.bool))
    1
    """
    x = torch.zeros(1, 1, len(visible), 2)
    step = (rg.weights(x, x, mask=visible)[0, 0] > 0).float()
    reached, layers = step, 1
    while not reached.all():
        reached, layers = (step @ reached > 0).float(), layers + 1
    return layers


@question(
    "local_patches.1",
    tasks=("004.12.8",),
    text=(
        "Pictures of `side` × `side` patches. With a window each patch attends to itself and its eight neighbours, and "
        "at the border to fewer. How many pairs (query, key) have weights? Compare with `side**4` of all pairs."
    ),
    begin="def pairs(side):",
    solution="return (3 * side - 2) ** 2",
    points=2,
)
def _pairs(answer: object) -> str:
    return formula(
        answer,
        lambda side: int(grid_mask(int(side), 1).sum()),
        [(2,), (4,), (16,)],
        {
            "patches at the border have fewer neighbours": lambda side: 9 * side**2,
            "a patch attends to itself, too": lambda side: (3 * side - 2) ** 2 - side**2,
            "these are all pairs": lambda side: side**4,
            "diagonal neighbours count, too": lambda side: side**2 + 4 * side * (side - 1),
        },
        tolerance=0,
    )


@question(
    "local_patches.2",
    tasks=("004.12.8",),
    text=(
        "After how many layers does every patch depend on every other one, on a grid of 16 × 16: (a) with the window "
        "above, and (b) if there is a global token besides, which sees all patches and is seen by all?"
    ),
    begin='local_patches_2 = {"window": ..., "with a global token": ...}',
    solution='{"window": 15, "with a global token": 2}',
    points=2,
)
def _meet(answer: object) -> str:
    return entries(
        answer,
        {
            "window": layers_to_meet(grid_mask(16, 1)),
            "with a global token": layers_to_meet(grid_mask(16, 1, tokens=1)),
        },
        {
            "window": {
                "a layer goes one patch further, and the far corner is 15 patches away": 16,
                "a window reaches one patch to each side, also on the diagonal": 30,
                "from corner to corner, not from the centre": 8,
            },
            "with a global token": {
                "in the first layer the token reads all, in the second all read the token": 1,
                "two are enough: all to the token, the token to all": 3,
            },
        },
    )


@question(
    "local_patches.3",
    tasks=("004.12.8",),
    text=(
        "Write the window's mask: for a grid of `height` × `width` patches, numbered row by row, a bool tensor `(T, "
        "T)` that is `True` where two patches are at most `radius` apart, in rows **and** in columns."
    ),
    begin="def near(height, width, radius):",
    solution=(
        "place = torch.arange(height * width)\n"
        "row, column = place // width, place % width\n"
        "rows = (row[:, None] - row[None, :]).abs() <= radius\n"
        "columns = (column[:, None] - column[None, :]).abs() <= radius\n"
        "return rows & columns"
    ),
    points=2,
)
def _near(answer: object) -> str:
    def exact(height: int, width: int, radius: int) -> Tensor:
        size = height * width
        return rg.window2d((height, width), radius).visible(1, 1, size, size)[0, 0].int()

    def along(height: int, width: int, radius: int) -> Tensor:
        size = height * width
        return rg.window(before=radius, after=radius).visible(1, 1, size, size).expand(1, 1, size, size)[0, 0].int()

    def apart(height: int, width: int, radius: int, norm: str) -> Tensor:
        place = torch.arange(height * width)
        rows, columns = ((axis[:, None] - axis).abs() for axis in (place // width, place % width))
        return {"or": (rows <= radius) | (columns <= radius), "sum": rows + columns <= radius}[norm].int()

    return function(
        answer,
        exact,
        {"3 × 4, radius 1": [3, 4, 1], "5 × 2, radius 2": [5, 2, 2], "4 × 4, radius 0": [4, 4, 0]},
        {
            "this is a window along the sequence: the end of a row is near the begin of the next": along,
            "rows and columns must both be near": partial(apart, norm="or"),
            "diagonal neighbours count: compare rows and columns apart": partial(apart, norm="sum"),
            "rows and columns are exchanged: a row has `width` patches": lambda height, width, radius: exact(
                width, height, radius
            ),
            "the wrong way round: True means visible": lambda *case: 1 - exact(*case),
        },
    )


def _products(mechanism: rg.Mechanism, tokens: int, channels: int) -> int:
    """Multiplications of the score product alone, for one head or group."""
    work = rg.Work(
        query_length=tokens,
        key_length=tokens,
        num_heads=1,
        num_kv_heads=1,
        qk_length=channels,
        value_length=channels,
        cached=False,
    )
    return rg.cost(mechanism, work).flops // 4


@question(
    "channels.1",
    tasks=("004.12.9",),
    text=(
        "A picture has 16 × 16 patches with 512 channels each. How many **multiplications** take the inner products of "
        "attention (the scores alone), (a) between patches, over all channels, and (b) between channels, over all "
        "patches? One head, one group."
    ),
    begin='channels_1 = {"patches": ..., "channels": ...}',
    solution='{"patches": 256 * 256 * 512, "channels": 512 * 512 * 256}',
)
def _channels(answer: object) -> str:
    patches, channels = _products(rg.Softmax(), 256, 512), _products(rg.Channel(), 256, 512)
    return entries(
        answer,
        {"patches": patches, "channels": channels},
        {
            "patches": {
                "these are operations, two for a multiplication and its addition": 2 * patches,
                "these are scores and weighted sums": 4 * patches,
                "this is one patch": patches // 256,
                "a grid of 16 × 16 has 256 patches": 16 * 16 * 512,
                "(a) and (b) are exchanged": channels,
            },
            "channels": {
                "these are operations, two for a multiplication and its addition": 2 * channels,
                "this is one channel": channels // 512,
                "(a) and (b) are exchanged": patches,
            },
        },
    )


@question(
    "channels.2",
    tasks=("004.12.9",),
    text=(
        "With `G` groups, channels attend to those of their own group only, and with one head patches attend over all "
        "`D` channels. By which factor do the inner products between channels take more than those between `N` patches?"
    ),
    begin="def ratio(D, N, G):",
    solution="return D / (G * N)",
    points=2,
)
def _ratio(answer: object) -> str:
    def ratio(D: int, N: int, G: int) -> float:
        return G * _products(rg.Channel(), N, D // G) / _products(rg.Softmax(), N, D)

    return formula(
        answer,
        ratio,
        [(512, 256, 1), (512, 256, 4), (64, 16, 8), (128, 64, 2)],
        {
            "right for one group": lambda D, N, G: D / N,
            "this is the factor the other way round": lambda D, N, G: G * N / D,
            "there are G groups, each with (D/G)² pairs": lambda D, N, G: D / (G**2 * N),
            "fewer pairs, not more: groups do not see each other": lambda D, N, G: G * D / N,
        },
    )


@question(
    "channels.3",
    tasks=("004.12.8", "004.12.9"),
    text=(
        "Twice as many patches: by which factor do the inner products grow, with attention between patches, between "
        "channels, and within a window of fixed radius (on a large grid)?"
    ),
    begin='channels_3 = {"patches": ..., "channels": ..., "window": ...}',
    solution='{"patches": 4, "channels": 2, "window": 2}',
)
def _growth(answer: object) -> str:
    def window(rows: int) -> int:
        size = rows * 60
        return int(rg.window2d((rows, 60), 1).visible(1, 1, size, size).sum())

    return entries(
        answer,
        {
            "patches": _products(rg.Softmax(), 512, 64) / _products(rg.Softmax(), 256, 64),
            "channels": _products(rg.Channel(), 512, 64) / _products(rg.Channel(), 256, 64),
            "window": round(window(30) / window(15), 1),
        },
        {
            "patches": {"each of twice as many attends to twice as many": 2},
            "channels": {"the pairs of channels stay, their inner products get longer": 4},
            "window": {"each patch still has its few neighbours": 4},
        },
    )
