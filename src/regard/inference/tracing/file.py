"""A trace as one safetensors file: its tensors by layer and name, everything else as JSON in the metadata."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Source, open_safetensors, parse_json, refuse
from regard.core.extras import needed_for
from regard.core.files import write
from regard.inference.tracing.record import KEEP, Trace, TracedLayer

FORMAT = 1
KEY = "regard.inference.trace"
TENSORS = (*KEEP, "visible", "real")
FACTS = ("index", "name", "kind", "mechanism", "heads", "rows", "causal", "by_pairs")


def save(trace: Trace, path: str | Path) -> Path:
    """Write a trace to a file, atomically."""
    with needed_for("saving a trace"):
        from safetensors.torch import save_file

    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"path: expected an existing folder, got {str(target.parent)!r}")
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # layers share masks, which are written once
    layers = []
    for layer in trace.layers:
        entry: dict[str, Any] = {fact: getattr(layer, fact) for fact in FACTS}
        for kind in TENSORS:
            tensor = getattr(layer, kind)
            if tensor is not None:
                name = names.setdefault(id(tensor), f"{layer.index}.{kind}")
                if name not in tensors:
                    tensors[name] = tensor.detach().cpu().contiguous().clone()
                entry[kind] = name
        layers.append(entry)
    about = {
        "format": FORMAT,
        "model": trace.model,
        "tokens": trace.tokens,
        "source_tokens": trace.source_tokens,
        "layers": layers,
    }
    return write(target, lambda beside: save_file(tensors, beside, metadata={KEY: json.dumps(about)}))


def read(path: str | Path) -> Trace:
    """Read a trace; raises CheckpointError for another file, or an inconsistent one."""
    source = open_safetensors(path)
    text = source.metadata.get(KEY)
    if not isinstance(text, str):
        refuse(source.path, "a file that Trace.save wrote", "another safetensors file")
    about = parse_json(text, source.path)
    if about.get("format") != FORMAT:
        refuse(source.path, f"a trace of format {FORMAT}", repr(about.get("format")))
    try:
        layers = [_layer(source, entry) for entry in about["layers"]]
        texts = {name: about[name] for name in ("tokens", "source_tokens", "model")}
        if not isinstance(texts["model"], str) or len({layer.index for layer in layers}) < len(layers):
            raise ValueError("a model's name and each layer once")
        return Trace(layers, **texts)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source.path}: expected the facts of a trace, got {error!r:.200}") from error


def _layer(source: Source, entry: dict[str, Any]) -> TracedLayer:
    facts = {fact: entry[fact] for fact in FACTS}
    for name in ("heads", "rows"):
        if not isinstance(facts[name], list) or any(type(number) is not int or number < 0 for number in facts[name]):
            refuse(source.path, f"whole numbers as {name}", repr(facts[name])[:80])
        facts[name] = tuple(facts[name])
    kinds = {"index": int, "name": str, "kind": str, "mechanism": str, "causal": bool, "by_pairs": bool}
    if any(type(facts[name]) is not kind for name, kind in kinds.items()) or facts["kind"] not in ("self", "cross"):
        refuse(source.path, "the facts of a layer", repr({name: facts[name] for name in kinds})[:200])
    tensors: dict[str, Any] = {kind: source.read(entry[kind]) for kind in TENSORS if kind in entry}
    _check_shapes(source, facts, tensors)
    return TracedLayer(**facts, **tensors)


def _check_shapes(source: Source, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Refuse a layer whose tensors have inconsistent shapes."""
    heads, rows, pairs = len(facts["heads"]), len(facts["rows"]), facts["by_pairs"]
    sizes: dict[str, int] = {"H": heads, "T": rows}
    axes = {
        "weights": "BHTS" if pairs else "BHKK",
        "scores": "BHTS",
        "queries": "BHTK",
        "keys": "BGSK",
        "values": "BGSV",
        "real": "BS",
    }
    for name, tensor in tensors.items():
        masks = name in ("visible", "real")
        fits = tensor.ndim == len(axes.get(name, "BHTS")) and (tensor.dtype == torch.bool) == masks
        for axis, size in zip(axes.get(name, ""), tensor.shape, strict=False):
            fits &= sizes.setdefault(axis, size) == size
        if not fits or not (masks or tensor.dtype.is_floating_point):
            refuse(
                source.path, f"{name} {axes.get(name, 'BHTS')} with {sizes}", f"{tensor.dtype} {tuple(tensor.shape)}"
            )
    if sizes.get("G", heads) == 0 or heads % sizes.get("G", max(heads, 1)):
        refuse(source.path, f"key heads that divide {heads}", f"{sizes.get('G')}")
    visible = tensors.get("visible")
    full = [sizes.get(axis) for axis in "BHTS"]
    if visible is not None and any(n not in (1, size, None) for n, size in zip(visible.shape, full, strict=True)):
        refuse(source.path, f"visible broadcastable to {full}", f"{tuple(visible.shape)}")
