"""Checkpoints: `load` and `save`, whatever the format."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

from regard.checkpoints import gguf, huggingface, native
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.names import NAMES, resolve
from regard.checkpoints.sources import read_json
from regard.checkpoints.tokenizer import Tokenizer
from regard.mechanism import Mechanism
from regard.models.base import Model

__all__ = ["NAMES", "CheckpointError", "Tokenizer", "check_target", "load", "resolve", "save"]


def load(
    name_or_path: str | Path,
    *,
    mechanism: Mechanism | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """A model with its tokenizer, in eval mode: a name of `regard models`, a checkpoint folder, or a .gguf file.

    `mechanism` swaps the attention; `dtype` is the file's if not given, float32 for GGUF. Whatever is wrong with a
    checkpoint is one CheckpointError, and no model.

    >>> import regard as rg, tempfile
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     rg.load(rg.save(model, folder + "/model")).config == model.config
    True
    """
    path = resolve(name_or_path)
    options: dict[str, Any] = {"mechanism": mechanism, "dtype": dtype, "device": device}
    if path.is_file():
        return gguf.load(path, **options)
    values = read_json(path / "config.json")
    model = (native if "regard" in values else huggingface).load(path, values, **options)
    known = NAMES.get(str(name_or_path))
    model.tokenizer = known.tokenizer() if known is not None else Tokenizer.from_folder(path)
    return model


def save(model: Model, folder: str | Path, *, layout: Literal["regard", "huggingface"] = "regard") -> Path:
    """Write a model's folder: model.safetensors, config.json, tokenizer files. Whole or not at all.

    `layout="huggingface"` writes what transformers, and every engine that reads its folders, loads with equal logits.

    >>> import regard as rg, tempfile
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in rg.save(model, folder + "/model").iterdir())
    ['config.json', 'model.safetensors']
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if layout == "huggingface":
        values, tensors = huggingface.export(model)
    elif layout == "regard":
        values = {"regard": native.VERSION, "model": type(model).__name__, "config": model.config.to_json()}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    else:
        raise ValueError(f"layout: expected regard or huggingface, got {layout!r}")
    target = Path(folder)
    check_target(target)
    beside = target.with_name(f".{target.name}-{uuid4().hex[:8]}")
    beside.mkdir(parents=True)
    try:
        try:
            save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, mostly
            raise OSError(f"{target}: {error}") from error
        (beside / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(beside)
        _put(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return target


def check_target(target: Path) -> None:
    """Raise ValueError for a folder that `save` would not write: one that holds something else."""
    if not target.name:
        raise ValueError(f"folder: expected a name, got {str(target)!r}")
    above = next((one for one in target.parents if one.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"folder: expected a place in a folder, got {target}, and {above} is a file")
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder: expected a folder or nothing yet, got the file {target}")
    if target.is_dir() and any(target.iterdir()) and not (target / "config.json").is_file():
        raise ValueError(f"folder: expected an earlier checkpoint, an empty folder or nothing yet, got {target}")


def _put(beside: Path, target: Path) -> None:
    """Move a finished folder into place; what was there stays until the new one stands."""
    if not target.exists():
        os.replace(beside, target)
        return
    former = target.with_name(f".{target.name}-{uuid4().hex[:8]}-former")
    os.replace(target, former)
    os.replace(beside, target)
    shutil.rmtree(former)
