"""Masks: which attention needs which, and how they are written."""

import torch
from torch import Tensor

import regard as rg
from regard.lab.answers import entries, function, word
from regard.lab.question import question
from regard.lab.questions.inputs import numbers


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
