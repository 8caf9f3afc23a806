"""Attention between the channels of a picture."""

import regard as rg
from regard.lab.answers import entries, formula
from regard.lab.question import question


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
        "A picture has 16 × 16 patches with 512 channels each. How many **multiplications** do the inner products of "
        "attention take (the scores alone), (a) between patches, over all channels, and (b) between channels, over all "
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
                "twice as many: these are operations (a multiplication and its addition), or those of (b)": channels,
                "these are scores and weighted sums": 4 * patches,
                "this is one patch": patches // 256,
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
        "With `G` groups, channels attend to those of their own group only, and with one head patches attend "
        "over all `D` channels. How many times as many multiplications do the inner products between channels"
        " take as those between `N` patches?"
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
        size = rows * 4
        return int(rg.window2d((rows, 4), 1).visible(1, 1, size, size).sum())

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
