"""Weights of any module: its tensors in model.safetensors, and the name of its class. Loading imports no code: it fills
a module that the caller makes."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import open_folder
from regard.checkpoints.writing import save_tensors
from regard.core.files import naming, write_folder

VERSION = 1


def save_module(model: nn.Module, tensors: Mapping[str, Any], folder: Path) -> Path:
    """Write a state dict of a module, atomically. Of tied tensors one is written.

    >>> import tempfile, torch
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
            plain[name] = tensor
    return write_module(model, folder, partial(save_tensors, plain))


def write_module(model: nn.Module, folder: Path, weights: Callable[[Path], object]) -> Path:
    """Write the folder of a module, atomically; `weights` writes its model.safetensors.

    >>> import tempfile, torch
    >>> from regard.checkpoints.modules import write_module
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_module(torch.nn.Linear(2, 3), Path(folder) / "model", Path.touch)
    ...     sorted(file.name for file in path.iterdir())
    ['config.json', 'model.safetensors']
    """
    values = {"regard": VERSION, "module": type(model).__name__}

    def fill(beside: Path) -> None:
        weights(beside / "model.safetensors")
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
