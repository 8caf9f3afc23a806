"""Pictures as patches: the Vision Transformer, windows and global tokens."""

from functools import partial

import torch
from torch import Tensor, nn

import regard as rg
from regard.lab.answers import entries, formula, function, letters
from regard.lab.question import question
from regard.lab.questions.inputs import numbers


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
        "How many linear layers does the classification head of a Vision Transformer have in pre-training, and how "
        'many in fine-tuning? What does the head read: `"class token"`, or the `"mean"` of all patches?'
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
