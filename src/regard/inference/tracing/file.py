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
from regard.inference.tracing.definition import Definition
from regard.inference.tracing.predictions import Predictions
from regard.inference.tracing.record import KEEP, Trace, TracedLayer

FORMAT = 2
READ = (1, 2)
"""Formats that are read. The first had no definitions, outputs, maps and predictions, and windows on the batch axis."""
KEY = "regard.inference.trace"
TENSORS = (*KEEP, "projection", "visible", "real")
FACTS = ("index", "name", "kind", "mechanism", "heads", "rows", "causal", "by_pairs")
MAPS = ("grid", "windows")
PREDICTED = ("ids", "probabilities", "real")


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
        entry: dict[str, Any] = {fact: getattr(layer, fact) for fact in (*FACTS, *MAPS)}
        entry["definition"] = None if layer.definition is None else layer.definition.to_json()
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
        "class_token": trace.class_token,
        "predictions": None if trace.predictions is None else _predicted(trace.predictions, tensors),
        "layers": layers,
    }
    return write(target, lambda beside: save_file(tensors, beside, metadata={KEY: json.dumps(about)}))


def _predicted(predictions: Predictions, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The facts of predictions; their tensors are added to the others."""
    for name in PREDICTED:
        if (tensor := getattr(predictions, name)) is not None:
            tensors[f"predictions.{name}"] = tensor.detach().cpu().contiguous()
    names = [[number, name] for number, name in predictions.names.items()]
    return {"positions": predictions.positions, "names": names, "real": predictions.real is not None}


def read(path: str | Path) -> Trace:
    """Read a trace; raises CheckpointError for another file, or an inconsistent one."""
    source = open_safetensors(path)
    text = source.metadata.get(KEY)
    if not isinstance(text, str):
        refuse(source.path, "a file that Trace.save wrote", "another safetensors file")
    about = parse_json(text, source.path)
    if about.get("format") not in READ:
        refuse(source.path, f"a trace of format {' or '.join(map(str, READ))}", repr(about.get("format")))
    try:
        layers = [_layer(source, entry) for entry in about["layers"]]
        texts = {name: about[name] for name in ("tokens", "source_tokens", "model")}
        if not isinstance(texts["model"], str) or len({layer.index for layer in layers}) < len(layers):
            raise ValueError("a model's name and each layer once")
        class_token = about.get("class_token")
        if class_token is not None and (type(class_token) is not int or class_token < 0):
            raise ValueError(f"class_token: {class_token!r:.40}")
        predictions = _predictions(source, about["predictions"]) if about.get("predictions") is not None else None
        return Trace(layers, **texts, class_token=class_token, predictions=predictions)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{source.path}: expected the facts of a trace, got {error!r:.200}") from error


def _predictions(source: Source, entry: dict[str, Any]) -> Predictions:
    tensors: dict[str, Any] = {
        name: source.read(f"predictions.{name}") for name in PREDICTED if name != "real" or entry["real"] is True
    }
    positions, ids = tuple(entry["positions"]), tensors["ids"]
    shape = ids.shape[0], len(positions)
    shapes = tensors["probabilities"].shape == ids.shape and ids.shape[:2] == shape and ids.shape[2] > 0
    kinds = ids.dtype == torch.int64 and tensors["probabilities"].dtype == torch.float32
    fits = positions and ids.ndim == 3 and shapes and kinds
    if "real" in tensors:
        fits = fits and tuple(tensors["real"].shape) == shape and tensors["real"].dtype == torch.bool
    names = {number: name for number, name in entry["names"]}
    whole = all(type(number) is int for number in (*positions, *names))
    if not fits or not whole or any(type(name) is not str for name in names.values()):
        refuse(source.path, "the predictions of a trace", f"positions {positions!r:.40}, ids {tuple(ids.shape)}")
    return Predictions(positions=positions, names=names, **tensors)


def _pair(source: Source, name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or any(type(side) is not int or side < 1 for side in value):
        refuse(source.path, f"rows and columns as {name}", repr(value)[:80])
    return value[0], value[1]


def _layer(source: Source, entry: dict[str, Any]) -> TracedLayer:
    facts = {fact: entry[fact] for fact in FACTS}
    for name in ("heads", "rows"):
        if not isinstance(facts[name], list) or any(type(number) is not int or number < 0 for number in facts[name]):
            refuse(source.path, f"whole numbers as {name}", repr(facts[name])[:80])
        facts[name] = tuple(facts[name])
    kinds = {"index": int, "name": str, "kind": str, "mechanism": str, "causal": bool, "by_pairs": bool}
    if any(type(facts[name]) is not kind for name, kind in kinds.items()) or facts["kind"] not in ("self", "cross"):
        refuse(source.path, "the facts of a layer", repr({name: facts[name] for name in kinds})[:200])
    for name in MAPS:
        facts[name] = _pair(source, name, entry.get(name))
    definition = entry.get("definition")
    facts["definition"] = None if definition is None else Definition.from_json(definition)
    tensors: dict[str, Any] = {kind: source.read(entry[kind]) for kind in TENSORS if kind in entry}
    _check_shapes(source, facts, _flat(source, tensors, facts["windows"]))
    return TracedLayer(**facts, **tensors)


def _flat(source: Source, tensors: dict[str, Tensor], windows: tuple[int, int] | None) -> dict[str, Tensor]:
    """The tensors of a layer with its windows on the batch axis."""
    if windows is None:
        return tensors
    count, flat = windows[0] * windows[1], {}
    for name, tensor in tensors.items():
        if name == "projection":
            flat[name] = tensor
            continue
        if tensor.ndim < 2 or tensor.shape[1] not in ((1, count) if name == "visible" else (count,)):
            refuse(source.path, f"{name} of {count} windows", f"{tuple(tensor.shape)}")
        flat[name] = tensor.flatten(0, 1)
    return flat


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
        "outputs": "BHTV",
        "projection": "HEV",
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
