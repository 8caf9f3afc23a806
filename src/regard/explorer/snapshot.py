"""One traced pass of a model as a value: its layers, labels and statistics, output, and the frames that show it."""

import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.families.mechanism import Mechanism
from regard.explorer.changes import HeadChange, WindowedSoftmax, changed, changed_mechanism, hidden_keys
from regard.explorer.codes import pool_size, thumbnails
from regard.explorer.frames import frame, tensor_bytes
from regard.explorer.layers import LayerView, kept, layer_views, no_check, watched
from regard.explorer.requests import input_json
from regard.explorer.subject import (
    Output,
    Picture,
    Side,
    Subject,
    output_names,
    read_output,
    shown_position,
)
from regard.inference.trace import Trace, TracedLayer, trace
from regard.inference.tracing.patterns import DIFFUSE, HeadPatterns, Scoring
from regard.inference.tracing.record import KEEP
from regard.inference.tracing.statistics import layer_statistics
from regard.models.base import GenerativeModel

TOP = 5
"""How many of the likeliest tokens are shown."""
MOST_LOGITS = 32_000_000
"""Logits of a pass that are kept for comparisons, in all; beyond that those of the shown position are."""
SAMPLE = 128
"""Rows of a layer by which the head that a page begins with is chosen."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Snapshot:
    """A pass."""

    name: str
    """The name by which a page refers to it."""
    subject: Subject
    origin: Subject
    """The same with the trained model, if this is its random twin."""
    changes: tuple[HeadChange, ...] = ()
    trace: Trace
    layers: tuple[LayerView, ...]
    output: Output
    base: "Output | None" = None
    """The output of the unchanged model, if this is a changed or a random one."""
    position: int | None = None
    """The row of logits that is shown first."""
    text: str | None = None
    """What the model writes, if it writes."""
    twin: bool = False
    generated: int | None = None
    """The position of the first generated token."""
    seconds: float = 0.0
    """How long the pass took."""

    def layer(self, index: int, window: int | None = None) -> LayerView:
        """A layer by its number, at one of its windows if it has any; ValueError if there is none."""
        for view in self.layers:
            if view.traced.index == index:
                return view.at_window(window)
        raise ValueError(f"layer: expected 0 to {len(self.layers) - 1}, got {index!r}")

    def mechanism(self, view: LayerView, head: int) -> Mechanism:
        """The mechanism of a head, with the changes."""
        if view.mechanism is None:
            raise ValueError("trace: expected a model as well, got a trace alone")
        return changed_mechanism(view.mechanism, self.changes, view.traced.index, head)

    def visible(self, view: LayerView) -> Bool[Tensor, "..."] | None:
        """Which pairs are visible, (1 or H, T, S), without keys that the changes hide; None if all."""
        visible, keys = view.visible, view.weights.shape[2]
        if not view.traced.by_pairs or not self.changes:
            return visible
        hidden = [hidden_keys(self.changes, view.traced.index, head, keys) for head in range(view.heads)]
        mechanisms = [self.mechanism(view, head) for head in range(view.heads)]
        if not any(hidden) and not any(isinstance(mechanism, WindowedSoftmax) for mechanism in mechanisms):
            return visible
        table = torch.ones_like(view.weights, dtype=torch.bool) if visible is None else visible.expand_as(view.weights)
        table = table.clone()
        for head, (places, mechanism) in enumerate(zip(hidden, mechanisms, strict=True)):
            table[head, :, sorted(places)] = False
            if isinstance(mechanism, WindowedSoftmax):
                table[head] &= mechanism.band(*table.shape[1:])
        return table

    def head(
        self, index: int, head: int | str, window: int | None = None
    ) -> tuple[Float[Tensor, "T S"], Bool[Tensor, "T S"]]:
        """The weights of a head, or their mean or maximum over the layer's heads, and which pairs are visible."""
        view = self.layer(index, window)
        weights, visible = view.weights.float(), self.visible(view)
        shown = torch.ones_like(weights[0], dtype=torch.bool)
        if head == "mean":
            return weights.mean(0), shown if visible is None else visible.any(0)
        if head == "max":
            return weights.amax(0), shown if visible is None else visible.any(0)
        place = self.head_number(view, head)
        if visible is not None:
            shown = visible[place if visible.shape[0] > 1 else 0]
        return weights[place], shown

    def head_number(self, view: LayerView, head: object) -> int:
        """A head of a layer; ValueError if it has no such head."""
        if type(head) is not int or not 0 <= head < view.heads:
            raise ValueError(f"head: expected 0 to {view.heads - 1}, got {head!r:.40}")
        return head

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        layers = [tensor for view in self.layers for name in KEEP if (tensor := getattr(view.traced, name)) is not None]
        added = [view.bias for view in self.layers if view.bias is not None]
        output = [self.output.values] if self.output.logits is None else [self.output.values, self.output.logits]
        return sum(tensor.nbytes for tensor in (*layers, *added, *output))

    def top(self, position: int | None) -> list[dict[str, Any]] | None:
        """The likeliest tokens or classes at a row of the logits."""
        logits = self.output.logits
        if logits is None or position is None:
            return None
        if not 0 <= position < len(logits):
            raise ValueError(f"position: expected 0 to {len(logits) - 1}, got {position}")
        return likeliest(self.subject, logits[position])

    def divergence(self) -> float | None:
        """KL in nats of the unchanged model's distributions from these, mean over the positions."""
        if self.base is None or self.base.logits is None or self.output.logits is None:
            return None
        before, after = self.base.logits, self.output.logits
        if before.shape != after.shape:
            return None
        total = 0.0
        for start in range(0, len(before), 64):  # in parts: a vocabulary of 50,000 makes large temporaries
            first, second = (logits[start : start + 64].float().log_softmax(-1) for logits in (before, after))
            total += float((first.exp() * (first - second)).sum())
        return max(0.0, total / len(before))

    def distance(self) -> float | None:
        """How far the output is from the unchanged model's: the norm of the difference over that of the output."""
        if self.base is None or self.base.values.shape != self.output.values.shape:
            return None
        before = self.base.values.float()
        return float((self.output.values.float() - before).norm() / before.norm().clamp_min(1e-30))


def likeliest(subject: Subject, logits: Float[Tensor, "D"]) -> list[dict[str, Any]]:
    """The likeliest tokens or classes of a row of logits, with their ids and probabilities."""
    chosen = logits.float().softmax(-1).topk(min(TOP, logits.numel()))
    ids = chosen.indices.tolist()
    return [
        {"token": name, "id": number, "probability": probability}
        for name, number, probability in zip(output_names(subject, ids), ids, chosen.values.tolist(), strict=True)
    ]


@torch.no_grad()
def take(
    name: str,
    subject: Subject,
    changes: Sequence[HeadChange] = (),
    *,
    origin: Subject | None = None,
    base: Output | None = None,
    position: int | None = None,
    check: Callable[[], None] = no_check,
    **more: Any,
) -> Snapshot:
    """Run the model on its input with some changes, traced. `check` may raise to stop the pass.

    >>> import regard as rg
    >>> from regard.explorer.subject import Text, subject_of
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=2, num_heads=2))
    >>> model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> snapshot = take("1", subject_of("mine", model.eval(), Text("a b")))
    >>> snapshot.head(1, 0)[0].shape, len(snapshot.layers)
    (torch.Size([2, 2]), 2)
    """
    begun = time.perf_counter()
    sources = None if subject.sources is None else list(subject.sources.tokens)
    tokens = None if subject.kind == "image" else list(subject.tokens.tokens)
    options: dict[str, Any] = {"tokens": tokens, "source_tokens": sources, "keep": kept(subject.model)}
    with (
        changed(subject.model, changes),
        watched(subject.model, check) as runs,
        trace(subject.model, **options) as recorded,
    ):
        result = subject()
    output = _kept(subject, read_output(subject, result))
    if position is None and output.logits is not None:
        position = shown_position(subject, output.logits)
    return Snapshot(
        name=name,
        subject=subject,
        origin=origin or subject,
        changes=tuple(changes),
        trace=recorded,
        layers=tuple(layer_views(recorded.layers, runs, subject.sources is not None)),
        output=output,
        base=base,
        position=position,
        seconds=time.perf_counter() - begun,
        **more,
    )


def _kept(subject: Subject, output: Output) -> Output:
    """The output without logits of too many positions."""
    logits = output.logits
    if logits is None or logits.numel() <= MOST_LOGITS:
        return output
    return Output(values=output.values[-1:].clone(), logits=logits[-1:].clone())


def run_frames(snapshot: Snapshot, check: Callable[[], None] = no_check) -> Iterator[bytes]:
    """What a page draws of a pass: what it is, its layers' thumbnails and labels, the output, the heads' statistics."""
    begun = time.perf_counter()
    yield frame({**run_header(snapshot), "seconds": snapshot.seconds})
    yield from layer_frames(snapshot, check)
    yield frame({**done_header(snapshot), "seconds": time.perf_counter() - begun})
    yield from statistics_frames(snapshot, check)


def run_header(snapshot: Snapshot) -> dict[str, Any]:
    """The first frame of a pass: its tokens and layers."""
    subject = snapshot.subject
    described = [_layer_json(snapshot, view) for view in snapshot.layers]
    picture = None if subject.picture is None else f"data:image/png;base64,{b64encode(subject.picture).decode()}"
    return {
        "type": "run",
        "run": snapshot.name,
        "model": subject.name,
        "kind": subject.kind,
        **_side_json(subject.tokens, "tokens", "special", "words", "ids"),
        **_side_json(subject.sources, "sources", "source_special", "source_words", "source_ids"),
        "grid": subject.grid,
        "class_token": subject.class_token,
        "picture": picture,
        "input": subject_json(subject),
        "written": subject_text(subject) if subject.sources is not None else None,
        "generates": isinstance(subject.model, GenerativeModel),
        "twin": snapshot.twin,
        "changed": bool(snapshot.changes),
        "generated": snapshot.generated,
        "layers": described,
    }


def done_header(snapshot: Snapshot) -> dict[str, Any]:
    """The frame of a pass's output, and how far it is from the unchanged model's."""
    return {
        "type": "done",
        "top": snapshot.top(snapshot.position),
        "position": snapshot.position,
        "divergence": snapshot.divergence(),
        "distance": snapshot.distance(),
        "text": snapshot.text,
    }


def subject_json(subject: Subject) -> dict[str, Any] | None:
    """What the model was asked to read, as the body of a run has it; of a picture its pixels are apart."""
    chosen = subject.chosen
    if isinstance(chosen, Picture):
        return {"image": None}
    if chosen is not None:
        return input_json(chosen)
    if subject.sources is None:
        return {"text": subject_text(subject)}
    return {"source": subject_text(subject, subject.sources), "target": subject_text(subject)}


def subject_text(subject: Subject, side: Side | None = None) -> str | None:
    """The tokens of a sequence as a text, if the model has a tokenizer of ours."""
    tokenizer = getattr(subject.model, "tokenizer", None)
    return tokenizer.decode((side or subject.tokens).ids) if isinstance(tokenizer, Tokenizer) else None


def _layer_json(snapshot: Snapshot, view: LayerView) -> dict[str, Any]:
    described = view.to_json()
    if not snapshot.changes:
        return described
    mechanisms = [snapshot.mechanism(view, head) for head in range(view.heads)]
    if any(mechanism != view.mechanism for mechanism in mechanisms):
        described["head_mechanisms"] = [view.mechanism_json(mechanism) for mechanism in mechanisms]
    return described


def _side_json(side: Side | None, tokens: str, special: str, words: str, ids: str) -> dict[str, Any]:
    if side is None:
        return dict.fromkeys((tokens, special, words, ids))
    return {tokens: side.tokens, special: side.special, words: side.words, ids: side.ids}


def layer_frames(snapshot: Snapshot, check: Callable[[], None] = no_check) -> Iterator[bytes]:
    """The thumbnails of every layer and the head that a page begins with, then the labels of all heads: a page can draw
    before a long text's labels are there."""
    for view in snapshot.layers:
        check()
        yield _thumbnails_frame(snapshot, view)
    sampled = [_some_rows(view.traced) for view in snapshot.layers]
    scoring = Scoring(snapshot.trace)
    patterns = [scoring.heads(layer) for layer in sampled]
    check()
    yield frame({"type": "strongest", **_strongest_head([head for heads in patterns for head in heads])})
    for view, layer, heads in zip(snapshot.layers, sampled, patterns, strict=True):
        check()
        yield _labels_frame(view, heads if layer is view.traced else scoring.heads(view.traced))


def statistics_frames(snapshot: Snapshot, check: Callable[[], None] = no_check) -> Iterator[bytes]:
    """The entropy of every head and where it looks: nothing else waits for them."""
    for view in snapshot.layers:
        check()
        yield _statistics_frame(view)


def _thumbnails_frame(snapshot: Snapshot, view: LayerView) -> bytes:
    weights = view.weights.float()
    coded = thumbnails(weights, snapshot.visible(view))
    header = {"type": "layer", "index": view.traced.index, "size": list(coded.shape[1:])}
    return frame({**header, "pool": [pool_size(side) for side in weights.shape[1:]]}, tensor_bytes(coded))


def _some_rows(layer: TracedLayer) -> TracedLayer:
    """The layer with at most `SAMPLE` of its rows, evenly spread; itself if it has no more."""
    step = -(-len(layer.rows) // SAMPLE)
    if step <= 1 or not layer.by_pairs:
        return layer
    visible = layer.visible
    return replace(
        layer,
        rows=layer.rows[::step],
        weights=layer.need("weights")[..., ::step, :],
        visible=visible if visible is None or visible.shape[-2] == 1 else visible[..., ::step, :],
    )


def _strongest_head(heads: Sequence[HeadPatterns]) -> dict[str, int]:
    """The head with the strongest label that says something; the first head if none has one."""
    labelled = [head for head in heads if head.label is not None]
    if not labelled:
        return {"index": 0, "head": 0}
    strongest = max(labelled, key=lambda head: (head.label != DIFFUSE, head.strength))
    return {"index": strongest.layer, "head": strongest.head}


def _labels_frame(view: LayerView, patterns: Sequence[HeadPatterns]) -> bytes:
    labels: list[str | None] = [None] * view.heads
    strength = [0.0] * view.heads
    if patterns:  # none between channels
        labels, strength = [head.label for head in patterns], [head.strength for head in patterns]
    return frame({"type": "labels", "index": view.traced.index, "labels": labels, "strength": strength})


def _statistics_frame(view: LayerView) -> bytes:
    unknown = [None] * view.heads
    header: dict[str, Any] = {"entropy": unknown, "first": unknown, "distance": unknown}
    if view.traced.by_pairs:
        statistics = layer_statistics(view.traced)
        header = {name: [getattr(head, name) for head in statistics] for name in header}
    return frame({"type": "statistics", "index": view.traced.index, **header})
