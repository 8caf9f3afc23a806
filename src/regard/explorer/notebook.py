"""The explorer in a notebook: the exported page in a sandboxed frame, without a server, or the live page."""

from dataclasses import replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regard.core.display import Html
from regard.core.extras import needed_for
from regard.core.files import write_text
from regard.explorer.catalog import Entry
from regard.explorer.export import check_target, exported_page
from regard.explorer.layers import layer_views
from regard.explorer.limits import check_size
from regard.explorer.session import Session
from regard.explorer.snapshot import Snapshot, take
from regard.explorer.subject import Input, Output, Pair, Picture, Side, Subject, Text, subject_of
from regard.inference.trace import Trace, TracedLayer, word_ids

if TYPE_CHECKING:
    from regard.explorer.background import Background

SANDBOX = "allow-scripts allow-downloads allow-popups"
"""What the frame may do; it has no origin, so that it reaches nothing of the notebook."""
LIVE_SANDBOX = f"{SANDBOX} allow-same-origin"
"""With a server the page's origin is the server's, which is not the notebook's either."""


class View:
    """A page of the explorer: a notebook shows it, `save` writes it, `html` is its text."""

    def __init__(
        self, snapshot: Snapshot, *, full: bool = False, height: int = 720, server: "Background | None" = None
    ) -> None:
        self.snapshot, self.full, self.height, self.server = snapshot, full, height, server

    @cached_property
    def html(self) -> str:
        """The saved page; of a live one, as it was at its beginning."""
        return exported_page(self.snapshot, full=self.full)

    def close(self) -> None:
        """End the live page's server, if there is one; the saved page is shown from then on."""
        if self.server is not None:
            self.server.close()
            self.server = None

    def save(self, path: str | Path) -> Path:
        """Write the page to one HTML file."""
        return write_text(check_target(path), self.html)

    def _repr_html_(self) -> Html:
        sandbox, page = SANDBOX, f'srcdoc="{escape(self.html)}"'
        if self.server is not None:
            sandbox, page = LIVE_SANDBOX, f'src="{escape(self.server.url)}"'
        return Html(
            f'<iframe sandbox="{sandbox}" style="width:100%;height:{self.height}px;border:1px solid '
            f'rgba(128,128,128,.35)" title="Attention of {escape(self.snapshot.subject.name)}" {page}></iframe>'
        )

    def __repr__(self) -> str:
        heads = sum(view.heads for view in self.snapshot.layers)
        layers = len(self.snapshot.layers)
        where = f"{len(self.html):,} bytes" if self.server is None else self.server.url
        return f"View of {self.snapshot.subject.name}: {layers} layers, {heads} heads, {where}"


def view(
    trace_or_model: Trace | nn.Module,
    text: str | None = None,
    *,
    target: str | None = None,
    image: str | Path | bytes | None = None,
    tokenizer: Any = None,
    full: bool = False,
    live: bool = False,
    height: int = 720,
) -> View:
    """Show a model's attention to a text, or a trace, as a page in a notebook: every layer and head, in any browser.

    `text` is what the model reads, the source of an encoder-decoder, which writes the `target` if there is none;
    `image` is the path or the bytes of a PNG or JPEG file, for a model of pictures. A Hugging Face model needs its
    `tokenizer`. Of a batch the first sequence is shown. With `full` the page has all weights, in 8 bits; otherwise
    thumbnails and the largest weights. `height` is in pixels.

    With `live` the page can change the model's attention and run it again, as `regard view` does, wherever the browser
    reaches 127.0.0.1 of the machine that runs this code. The model stays in evaluation mode; `close()` of what is
    returned ends the server.

    >>> import regard as rg, torch
    >>> layer = rg.MultiHeadAttention(16, 4)
    >>> with rg.trace(layer, tokens=["a", "b", "c"]) as trace:
    ...     y = layer(torch.randn(1, 3, 16))
    >>> "<iframe sandbox" in rg.view(trace)._repr_html_()
    True
    """
    if isinstance(trace_or_model, Trace):
        if text is not None or target is not None or image is not None:
            raise ValueError("text: expected none with a trace, which has its tokens, got one")
        if live:
            raise ValueError("live: expected a model, which can run again, got a trace")
        return View(of_trace(trace_or_model), full=full, height=height)
    if not isinstance(trace_or_model, nn.Module):
        raise ValueError(f"trace_or_model: expected a trace or a model, got {type(trace_or_model).__name__}")
    chosen = chosen_input(text, target, image)
    if isinstance(chosen, Text) and _writes_another(trace_or_model):
        chosen = Pair(chosen.text, None)
    name = type(trace_or_model).__name__
    if live:
        return _live_view(name, trace_or_model, chosen, tokenizer, full=full, height=height)
    training = {module: module.training for module in trace_or_model.modules()}
    trace_or_model.eval()
    try:
        subject = check_size(subject_of(name, trace_or_model, chosen, tokenizer))
        return View(take("1", subject), full=full, height=height)
    finally:
        for module, mode in training.items():
            module.training = mode


def _live_view(name: str, model: nn.Module, chosen: Input, tokenizer: Any, *, full: bool, height: int) -> View:
    with needed_for("the live page"):
        from regard.explorer.background import Background
    session = Session({name: model}, tokenizers={name: tokenizer})
    subject = session.subject(name, chosen)
    entry = Entry(name=name, title=name, kind=subject.kind, example=None if subject.kind == "image" else chosen)
    return View(take("1", subject), full=full, height=height, server=Background(session, [entry], name, chosen))


def _writes_another(model: nn.Module) -> bool:
    """Whether a model reads one sequence and writes another."""
    config: Any = getattr(model, "config", None)
    return bool(getattr(model, "reads_source", False) or getattr(config, "is_encoder_decoder", False))


def chosen_input(text: str | None, target: str | None, image: str | Path | bytes | None) -> Input:
    """What a model reads, of what a caller gave."""
    if image is not None:
        if text is not None or target is not None:
            raise ValueError("image: expected it without a text, got both")
        return Picture(image if isinstance(image, bytes) else Path(image).read_bytes())
    if text is None:
        raise ValueError("text: expected what the model reads, or image, got none")
    return Text(text) if target is None else Pair(text, target)


def of_trace(trace: Trace, sequence: int = 0) -> Snapshot:
    """A trace alone as a snapshot of one of its sequences."""
    layers = [_of_sequence(layer, sequence) for layer in trace.layers]
    if not layers:
        raise ValueError("trace: expected at least one layer, got none")
    for layer in layers:
        weights = layer.need("weights")
        if layer.by_pairs and layer.kind == "self" and layer.rows != tuple(range(weights.shape[3])):
            raise ValueError(
                f"trace: expected all rows of layer {layer.index}, got {len(layer.rows)}; trace without rows"
            )
    alone = Trace(
        layers,
        tokens=None if trace.tokens is None else trace.tokens[sequence],
        source_tokens=None if trace.source_tokens is None else trace.source_tokens[sequence],
        model=trace.model,
    )
    crossing = any(layer.kind == "cross" for layer in layers)
    encoder = [layer for layer in layers if crossing and "encoder" in layer.name.split(".")]
    by_side = {"tokens": [layer for layer in layers if layer not in encoder], "sources": encoder}
    read = next((layer.need("weights").shape[3] for layer in layers if layer.kind == "cross"), 0)
    subject = Subject(
        name=trace.model or "trace",
        model=nn.Identity(),
        kind="pair" if crossing else "text",
        inputs=(),
        tokens=_side(alone.tokens, max((layer.need("weights").shape[2] for layer in by_side["tokens"]), default=0)),
        sources=_side(alone.source_tokens, read) if crossing else None,
    )
    nothing = Output(values=torch.zeros(0, 0), logits=None)
    views = tuple(layer_views(alone.layers, {}, crossing))
    return Snapshot(name="1", subject=subject, origin=subject, trace=alone, layers=views, output=nothing)


def _side(tokens: list[list[str]] | None, count: int) -> Side:
    strings = [str(place) for place in range(count)] if tokens is None else tokens[0]
    special = [word is None for word in word_ids(strings)]
    words = [place if word is None else word for place, word in enumerate(word_ids(strings))]
    numbers: dict[tuple[bool, int], int] = {}
    for is_special, word in zip(special, words, strict=True):
        numbers.setdefault((is_special, word), len(numbers))
    merged = [numbers[key] for key in zip(special, words, strict=True)]
    return Side(tuple(strings), tuple(special), tuple(merged))


def _of_sequence(layer: TracedLayer, sequence: int) -> TracedLayer:
    """One sequence of a traced layer."""

    def row(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or tensor.shape[0] == 1:
            return tensor
        return tensor[sequence : sequence + 1]

    return replace(
        layer,
        weights=row(layer.weights),
        queries=row(layer.queries),
        keys=row(layer.keys),
        values=row(layer.values),
        scores=row(layer.scores),
        visible=row(layer.visible),
        real=row(layer.real),
    )
