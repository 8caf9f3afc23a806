"""A snapshot as one self-contained HTML file: no server, no network, nothing beside it.

It has what a page draws first (thumbnails, labels, the output), and of each head the largest weights of every row as
they are; with `full` also the codes of all of its weights.
"""

import gzip
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.files import write_text
from regard.explorer.bundle import one_page
from regard.explorer.codes import codes
from regard.explorer.frames import frame, tensor_bytes
from regard.explorer.snapshot import Snapshot, done_header, layer_frames, run_header, statistics_frames

CELLS = 1024
"""Weights of a head that are stored as they are, at least one in each row."""


def exported_page(snapshot: Snapshot, *, full: bool = False, title: str | None = None) -> str:
    """The HTML of a snapshot.

    >>> import regard as rg
    >>> from regard.explorer.snapshot import take
    >>> from regard.explorer.subject import Text, subject_of
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=1, num_heads=2)).eval()
    >>> model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> exported_page(take("1", subject_of("mine", model, Text("a b")))).startswith("<!doctype html>")
    True
    """
    content = b"".join(exported_frames(snapshot, full))
    # The same content gives the same file: gzip would write the time into it.
    data = gzip.compress(content, compresslevel=6, mtime=0)
    return one_page(data, title or f"{snapshot.subject.name} · Regard")


def export(snapshot: Snapshot, path: str | Path, *, full: bool = False) -> Path:
    """Write the HTML file of a snapshot, whole or not at all."""
    return write_text(check_target(path), exported_page(snapshot, full=full))


def check_target(path: str | Path) -> Path:
    """The path of an HTML file that can be written; ValueError otherwise, before any work."""
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"export: expected a file.html, got {str(path)!r}")
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"export: expected a file in an existing folder, got {str(path)!r}")
    return target


def exported_frames(snapshot: Snapshot, full: bool = False) -> Iterator[bytes]:
    """The frames of a run, without its times, then of each head its largest weights and, if `full`, the codes of all.

    The same pass gives the same bytes.
    """
    yield frame({**run_header(snapshot), "version": version("regard"), "full": full})
    yield from layer_frames(snapshot)
    yield frame(done_header(snapshot))
    yield from statistics_frames(snapshot)
    for place, view in enumerate(snapshot.layers):
        visible = snapshot.visible(view)
        for head in range(view.heads):
            weights = view.weights[head].float()
            shown = None if visible is None else visible[head if visible.shape[0] > 1 else 0]
            header: dict[str, Any] = {"layer": place, "head": head}
            cells = largest(weights, shown)
            yield frame({"type": "top", **header, "cells": len(cells) // 8}, cells)
            if full:
                size = {"rows": weights.shape[0], "columns": weights.shape[1]}
                yield frame({"type": "codes", **header, **size}, tensor_bytes(codes(weights, shown)))


def largest(weights: Float[Tensor, "T S"], visible: Bool[Tensor, "T S"] | None = None) -> bytes:
    """The largest weights of every row: uint16 row, uint16 column, float32 weight, for each.

    >>> import torch
    >>> largest(torch.tensor([[0.0, 1.0]])).hex()
    '000001000000803f0000000000000000'
    """
    rows, columns = weights.shape
    count = min(columns, max(1, CELLS // max(1, rows)))
    sizes = weights.abs().nan_to_num(0.0)
    sizes = sizes if visible is None else sizes.masked_fill(~visible, -1)
    chosen = sizes.topk(count, dim=-1)
    cells = torch.empty(rows, count, 4, dtype=torch.int16)
    values = weights.gather(1, chosen.indices).contiguous()
    cells[..., 0] = torch.arange(rows).to(torch.int16)[:, None]
    cells[..., 1] = chosen.indices.cpu().to(torch.int16)
    cells[..., 2:] = values.cpu().view(torch.int16).unflatten(-1, (count, 2))
    return tensor_bytes(cells[(chosen.values >= 0).cpu()])
