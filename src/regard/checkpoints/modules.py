"""Weights of any module: its tensors in model.safetensors, and the name of its class. Loading imports no code: it fills
a module that the caller makes."""

import errno
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import open_folder
from regard.core.extras import needed_for
from regard.core.files import naming, write_folder

VERSION = 1


def save_tensors(tensors: Mapping[str, Any], path: Path) -> None:
    """Write tensors to a safetensors file; an OSError names it.

    >>> import tempfile
    >>> from regard.checkpoints.modules import save_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_tensors({"weight": torch.ones(2, 3)}, Path(folder) / "model.safetensors")
    ...     open_folder(folder).shapes
    {'weight': (2, 3)}
    """
    with needed_for("saving a model"):
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, mostly
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code), str(path)) from error


def save_module(model: nn.Module, tensors: Mapping[str, Any], folder: Path) -> Path:
    """Write the state dict of a module, atomically. Of tied tensors one is written.

    >>> import tempfile
    >>> from regard.checkpoints.modules import load_module, save_module
    >>> model, other = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_module(model, model.state_dict(), Path(folder) / "model")
    ...     bool((load_module(saved, other).weight == model.weight).all())
    True
    """
    wrong = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong:
        raise ValueError(
            f"model: expected a state dict of tensors, got {type(tensors[wrong[0]]).__name__} {wrong[0]!r}"
        )
    places: dict[Any, str] = {}
    plain = {}
    for name, tensor in tensors.items():
        if places.setdefault(_place(tensor), name) == name:
            plain[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    values = {"regard": VERSION, "module": type(model).__name__}

    def fill(beside: Path) -> None:
        save_tensors(plain, beside / "model.safetensors")
        with naming(beside / "config.json"):
            (beside / "config.json").write_text(json.dumps(values) + "\n", encoding="utf-8")
        if getattr(model, "tokenizer", None) is not None:
            model.tokenizer.save(beside)  # type: ignore[union-attr, operator]

    return write_folder(folder, fill)


def load_module(folder: Path, model: nn.Module) -> nn.Module:
    """Fill a module with the tensors of a folder, and put it in eval mode. CheckpointError, which names all of them,
    for tensors that are missing, not the module's, or of another shape: then the module stays as it was."""
    source, state = open_folder(folder), model.state_dict()
    saved = {_place(state[name]): name for name in source.shapes if name in state}
    origins = {name: name if name in source.shapes else saved.get(_place(tensor)) for name, tensor in state.items()}
    wrong = [f"no {name!r}" for name, origin in origins.items() if origin is None]
    wrong += [f"{name!r}, which it does not have" for name in source.shapes if name not in state]
    for name, origin in origins.items():
        if origin is not None and source.shapes[origin] != tuple(state[name].shape):
            wrong.append(f"{name!r} of {source.shapes[origin]} instead of {tuple(state[name].shape)}")
    if wrong:
        got = "; ".join(wrong[:8]) + (f"; {len(wrong)} in all" if wrong[8:] else "")
        raise CheckpointError(f"{folder}: expected the tensors of the {type(model).__name__}, got {got}")
    model.load_state_dict({name: source.read(str(origin)) for name, origin in origins.items()})
    return model.eval()


def _place(tensor: Tensor) -> Any:
    """Equal for tied tensors."""
    if not tensor.numel() or tensor.is_meta:
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()
