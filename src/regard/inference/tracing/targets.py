"""The keys that each pattern of a head is about, which follow from positions, mask and tokens alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.inference.tracing.record import Kind, Trace, TracedLayer

SEPARATORS = frozenset(
    ("[SEP]", "</s>", "<sep>", "<eos>", "<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|end|>")
)
PADS = frozenset(("[PAD]", "<pad>", "<|pad|>"))
STARTS = ("Ġ", "▁", " ")
"""How byte-level and SentencePiece tokens mark the beginning of a word."""
Spoken = list[list[str]] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class Targets:
    """What the heads of a layer are scored on, besides their weights: P patterns, the last of them uniform."""

    names: tuple[str, ...]
    wanted: Tensor
    """Which keys are visible targets, (P - 1, B or 1, H or 1, T, S): numbers where all heads share them, else bool."""
    rows: Tensor
    """Which rows (P, B, H or 1, T) could show a pattern."""
    shares: Tensor
    """What uniform weights have on the targets, (P, B or 1, H or 1, T); of the last pattern 1 / keys."""
    even: Tensor
    """The uniform weights themselves, broadcastable to (B, H, T, S)."""
    made_for: tuple[Kind, tuple[int, ...], torch.Size, torch.device, tuple[Spoken, Spoken]]
    visible: Tensor | None
    real: Tensor | None

    def fit(self, layer: TracedLayer, weights: Tensor, strings: tuple[Spoken, Spoken]) -> bool:
        """Whether they are a layer's targets, too."""
        same = self.made_for == _made_for(layer, weights, strings)
        return same and _alike(self.visible, layer.visible) and _alike(self.real, layer.real)


def _made_for(
    layer: TracedLayer, weights: Tensor, strings: tuple[Spoken, Spoken]
) -> tuple[Kind, tuple[int, ...], torch.Size, torch.device, tuple[Spoken, Spoken]]:
    return layer.kind, layer.rows, weights.shape, weights.device, strings


def _alike(mask: Tensor | None, other: Tensor | None) -> bool:
    if mask is None or other is None:
        return mask is other
    return mask is other or (mask.shape == other.shape and torch.equal(mask, other))


def targets_of(
    layer: TracedLayer,
    weights: Tensor,
    strings: tuple[Spoken, Spoken],
    separators: Sequence[str] | Sequence[int] | None,
) -> Targets:
    """The targets of a layer without windows, whose queries and keys have these strings."""
    batch, _, queries, keys = weights.shape
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if layer.visible is None else layer.visible
    visible = visible.to(weights.device).expand(-1, -1, queries, keys)
    everyone = visible.sum(-1)
    by_name = _keys_by_pattern(layer, *strings, separators, batch, keys)
    tables = [visible & targets.to(weights.device)[:, None] for targets in by_name.values()]
    wanted = torch.stack(torch.broadcast_tensors(*tables))
    among = wanted.sum(-1)
    rows = torch.cat([(among > 0) & (among < everyone), (everyone > 1).expand(among.shape[1:])[None]])
    fewest = everyone.clamp(min=1)
    shares = torch.cat([among / fewest, (1 / fewest).expand(among.shape[1:])[None]])
    even = (1 / fewest)[..., None]
    return Targets(
        names=(*by_name, "uniform"),
        wanted=wanted.to(weights.dtype) if wanted.shape[2] == 1 else wanted,
        rows=rows & _counted_rows(layer, strings[0], batch, weights.device)[:, None],
        shares=shares,
        even=even if layer.visible is None else even.masked_fill(~visible, 0),
        made_for=_made_for(layer, weights, strings),
        visible=layer.visible,
        real=layer.real,
    )


def spoken(trace: Trace, layer: TracedLayer, batch: int, keys: int) -> tuple[Spoken, Spoken]:
    """The token strings of queries (by position) and of keys, if the trace has tokens."""
    asked, answered = trace.labels(layer)
    queries = max(layer.rows, default=-1) + 1
    for name, tokens, least, whole in (
        ("tokens" if layer.kind == "self" else "source_tokens", answered, keys, True),
        ("tokens", asked, queries, len(layer.rows) == queries),  # of chosen rows the last need not be there
    ):
        # The last generated token has not run yet, so there may be one string more.
        most = least + 1 if whole else math.inf
        if tokens is not None and (len(tokens) != batch or any(not least <= len(t) <= most for t in tokens)):
            lengths = [len(sequence) for sequence in tokens]
            raise ValueError(f"{name}: expected {batch} sequences of {least} strings, got lengths {lengths}")
    return asked, None if answered is None else [sequence[:keys] for sequence in answered]


def _counted_rows(layer: TracedLayer, asked: Spoken, batch: int, device: torch.device) -> Tensor:
    """Which rows (B, T) are not at padding."""
    places = torch.tensor(layer.rows, dtype=torch.long, device=device)
    counted = torch.ones(batch, len(places), dtype=torch.bool, device=device)
    if layer.kind == "self" and layer.real is not None:
        counted &= layer.real.to(device)[:, places]
    if asked is not None:
        counted &= torch.tensor([[s[place] not in PADS for place in layer.rows] for s in asked], device=device)
    return counted


def _keys_by_pattern(
    layer: TracedLayer,
    asked: Spoken,
    answered: Spoken,
    separators: Sequence[str] | Sequence[int] | None,
    batch: int,
    keys: int,
) -> dict[str, Tensor]:
    """For each pattern that is defined here, which keys are targets, broadcastable to (B, T, S)."""
    query, key = torch.tensor(layer.rows, dtype=torch.long)[:, None], torch.arange(keys)
    start = torch.zeros(1, 1) if layer.real is None else layer.real.cpu().int().argmax(-1)[:, None]
    targets = {"first": (key == start)[:, None]}
    if (marked := _separated(answered, separators, keys)) is not None:
        targets["separator"] = marked[:, None]
    if layer.kind == "cross":
        if asked is not None and answered is not None:
            mine, theirs = _numbered(_words(asked, "asked"), _words(answered, "answered"))
            targets["same word"] = mine[:, layer.rows, None] == theirs[:, None]
        return targets
    targets |= {"previous": (key == query - 1)[None], "next": (key == query + 1)[None], "self": (key == query)[None]}
    if answered is not None:
        words = torch.tensor([[-1 if word is None else word for word in word_ids(s)] for s in answered])
        mine = words[:, layer.rows, None]
        targets["same word"] = (mine == words[:, None]) & (mine >= 0) & (key != query)
        tokens, _ = _numbered(answered, answered)
        before = torch.cat([torch.full((batch, 1), -1), tokens[:, :-1]], dim=1)
        targets["induction"] = (tokens[:, layer.rows, None] == before[:, None]) & (key <= query)
    return targets


def _separated(answered: Spoken, separators: Sequence[str] | Sequence[int] | None, keys: int) -> Tensor | None:
    """Which keys (B, S) are separators; None without tokens."""
    if separators is not None and all(type(place) is int for place in separators):
        if wrong := [place for place in separators if not -keys <= place < keys]:  # type: ignore[operator]
            raise ValueError(f"separators: expected positions below {keys}, got {wrong[0]}")
        marked = torch.zeros(1, keys, dtype=torch.bool)
        marked[:, list(separators)] = True
        return marked
    if answered is None:
        return None
    marks = SEPARATORS if separators is None else set(separators)
    return torch.tensor([[token in marks for token in sequence] for sequence in answered])


def _words(sequences: list[list[str]], side: str) -> list[list[str]]:
    """Tokens without their marks; special tokens are no words, and equal to none of the other side."""
    return [
        [
            f"{side} {token}" if word is None else bare(token)
            for token, word in zip(tokens, word_ids(tokens), strict=True)
        ]
        for tokens in sequences
    ]


def _numbered(*groups: list[list[str]]) -> list[Tensor]:
    """Strings as integers, equal for equal strings."""
    numbers: dict[str, int] = {}
    width = [max(len(sequence) for sequence in group) for group in groups]
    return [
        torch.tensor([[numbers.setdefault(t, len(numbers)) for t in s] + [-2] * (wide - len(s)) for s in group])
        for group, wide in zip(groups, width, strict=True)
    ]


def bare(token: str) -> str:
    """A token without the marks for the beginning and end of words.

    >>> [bare(token) for token in ("Ġcat", "▁cat", "##cat", "cat</w>")]
    ['cat', 'cat', 'cat', 'cat']
    """
    return token.lstrip("".join(STARTS)).removeprefix("##").removesuffix("</w>")


def word_ids(tokens: Sequence[str]) -> list[int | None]:
    """Which word each token belongs to, by the marks of its tokenizer; None for special tokens.

    WordPiece marks tokens that continue a word (##), byte-level BPE and SentencePiece those that begin one (Ġ, ▁),
    CLIP's BPE those that end one (</w>). Without marks each token is a word. A token without letters and digits is a
    word.

    >>> word_ids(["[CLS]", "re", "##gard", "this", "[SEP]"])
    [None, 0, 0, 1, None]
    >>> word_ids(["<s>", "▁re", "gard", ",", "▁this"])
    [None, 0, 0, 1, 2]
    """
    pieces = any(token.startswith("##") for token in tokens)
    begins = any(token.startswith(STARTS) for token in tokens)
    ends = any(token.endswith("</w>") for token in tokens)
    words: list[int | None] = []
    word, goes_on = -1, False
    for token in tokens:
        special = len(token) > 2 and (token[0], token[-1]) in (("[", "]"), ("<", ">")) and token[:2] != "</w"
        signs = not any(letter.isalnum() and letter not in "ĠĊĉ" for letter in bare(token))
        if pieces:
            joined = token.startswith("##")
        else:
            joined = (begins or ends) and goes_on and not token.startswith(STARTS) and not signs
        if not special and not (joined and words and words[-1] is not None):
            word += 1
        words.append(None if special else word)
        goes_on = not special and not signs and not token.endswith("</w>")
    return words
