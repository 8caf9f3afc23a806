"""Where the statements come from: five course documents on attention, and how their statements are numbered.

`002.1.1e` is question 1.1 (e) of document 002. `real` are statements of our own.
"""

import re

DOCUMENTS = {
    "000": "Transformer theory: scaled dot products, heads and masks, layer normalization",
    "001": "Coding the transformer's encoder: multi-head attention by shapes",
    "002": "Attention as a computation: temperature, noise, convolutions, recurrence, vision transformers",
    "003": "Attention in practice: argmax attention, heads, incremental decoding, GPT and BERT, linear attention",
    "004": "Transformers, problems of a textbook chapter: counts, equivariance, saturation, patches, channels",
    "real": "What trained models and their layers show",
}


def document(claim: str) -> str:
    """The document of a statement.

    >>> document("004.12.3")[:12]
    'Transformers'
    """
    return DOCUMENTS[claim.partition(".")[0]]


def place(claim: str) -> tuple[tuple[int, str], ...]:
    """What sorts statements as the documents do: 12.3 is before 12.10.

    >>> place("004.12.3") < place("004.12.10") < place("004.12.10a")
    True
    """
    number, *parts = claim.split(".")
    split = (re.fullmatch(r"(\d*)(.*)", part) for part in parts)
    return ((list(DOCUMENTS).index(number), ""), *((int(part[1] or 0), part[2]) for part in split if part))
