"""Checkpoints: `load` and `save`, for every format."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from regard.checkpoints import adapters, gguf, huggingface, native, sentences
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.modules import load_module
from regard.checkpoints.names import NAMES, Package, resolve
from regard.checkpoints.sources import read_json
from regard.checkpoints.tokenizer import Tokenizer
from regard.checkpoints.writing import save_tensors
from regard.core.families.mechanism import Mechanism
from regard.core.files import naming, write_folder
from regard.core.mechanisms.text import made
from regard.models.base import Model, expect
from regard.models.layers.lora import lora_of, merged_tensors
from regard.models.registry import MODELS, is_listed
from regard.models.stored import UserMechanism, check_user_mechanisms, is_own

__all__ = [
    "NAMES",
    "CheckpointError",
    "Tokenizer",
    "check_target",
    "load",
    "load_mapped",
    "load_with",
    "resolve",
    "save",
    "save_peft",
]

FILES = (
    *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    *(sentences.MODULES, sentences.LIMITS[0], sentences.PROMPTS),
    *adapters.PEFT,
)
"""All files that `save` writes, besides a folder with the pooling's config.json."""
M = TypeVar("M", bound=nn.Module)
RUN = "run.json"
"""The file that marks the folder of a training run; its best model so far is in model/."""


@overload
def load(
    name_or_path: str | Path,
    *,
    mechanism: Mechanism | str | None = None,
    mechanisms: Sequence[UserMechanism] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model: ...


@overload
def load(
    name_or_path: str | Path, *, model: M, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> M: ...


def load(
    name_or_path: str | Path,
    *,
    model: nn.Module | None = None,
    mechanism: Mechanism | str | None = None,
    mechanisms: Sequence[UserMechanism] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Load a model with its tokenizer, in eval mode, from a name of `regard models`, a folder (of a checkpoint or a
    training run) or a .gguf file.

    A module of your own that `train` has trained is filled with its weights: `load(folder, model=Net())`.

    Loading imports no code. If the checkpoint's mechanism is a user's, pass its class in `mechanisms` (or an instance,
    if a field is a function or a module); the file supplies fields and tensors. `mechanism` replaces the checkpoint's
    mechanism by another, with that one's tensors.

    All weights get one `dtype`. By default that is float32 for GGUF and otherwise the dtype of most of the file's
    numbers, except that a float16 file with some float32 tensors (transformers' T5) becomes float32. The tokens that
    start and end texts come from config.json and generation_config.json; sampling options are arguments of `generate`.
    A checkpoint with any fault raises CheckpointError and gives no model.

    >>> import regard as rg, tempfile, torch
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Mine(rg.Mechanism):
    ...     scale: torch.nn.Parameter
    ...     def similarity(self, q, k):
    ...         return torch.sigmoid(self.scale * (q @ k.transpose(-1, -2)))
    >>> sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> mine = Mine(scale=torch.nn.Parameter(torch.tensor(0.5)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = rg.save(rg.Decoder(rg.DecoderConfig(**sizes, mechanism=mine)), folder + "/model")
    ...     model = rg.load(saved, mechanisms=[Mine])
    >>> model.stack.blocks[0].attention.mechanism.scale
    Parameter containing:
    tensor(0.5000, requires_grad=True)
    """
    _check_place(dtype, device)
    check_user_mechanisms(mechanisms)
    path = resolve(name_or_path)
    if model is not None:
        if mechanism is not None or mechanisms:
            raise ValueError("model: expected no mechanism with a model, which has its own, got both")
        return load_module(sentences.weights_folder(_of_run(path)), model).to(device=device, dtype=dtype)
    options: dict[str, Any] = {"mechanism": mechanism, "dtype": dtype, "device": device}
    if path.is_file():
        return gguf.load(path, **options)
    return _load_folder(_of_run(path), mechanisms, NAMES.get(str(name_or_path)), **options)


def load_mapped(folder: Path, mechanisms: Sequence[UserMechanism], dtype: torch.dtype) -> Model:
    """`load` a folder that `save` wrote in our layout, with tensors that stay in its file, memory-mapped: those of the
    dtype take no memory until they are used, and give it back when others need it. The file must not change as long as
    the model is used; writing to its tensors changes a private copy.

    >>> import regard as rg, tempfile, torch
    >>> from pathlib import Path
    >>> from regard.checkpoints import load_mapped
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     mapped = load_mapped(rg.save(model, f"{folder}/model"), [], torch.float32)
    ...     torch.equal(mapped.embedding.weight, model.embedding.weight)
    True
    """
    return _load_folder(folder, mechanisms, None, dtype=dtype, mapped=True)


def _load_folder(
    path: Path, mechanisms: Sequence[UserMechanism], package: Package | None, *, mapped: bool = False, **options: Any
) -> Model:
    folder = sentences.weights_folder(path)
    values = read_json(folder / "config.json")
    if "module" in values:
        raise CheckpointError(
            f"{folder}: expected model={values['module']!s:.80}(…), as a file imports no code, got none"
        )
    if "regard" in values:
        loaded = native.load(folder, values, mechanisms=mechanisms, mapped=mapped, **options)
    else:
        loaded = huggingface.load(folder, values, root=path, **options)
    tokenizer = package.tokenizer() if package is not None else Tokenizer.from_folder(folder)
    if tokenizer is not None and "regard" not in values and sentences.lowercase(folder):
        tokenizer = tokenizer.lowercased()
    loaded.tokenizer = tokenizer
    return loaded


def load_with(
    name_or_path: str | Path,
    mechanism: UserMechanism | None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """`load` with the mechanism that a command line names: if the checkpoint names the same class, the mechanism is
    loaded with its learned tensors; otherwise it replaces the checkpoint's."""
    if mechanism is None:
        return load(name_or_path, dtype=dtype, device=device)
    if _own_class(resolve(name_or_path)) == (mechanism if isinstance(mechanism, type) else type(mechanism)).__name__:
        return load(name_or_path, mechanisms=[mechanism], dtype=dtype, device=device)
    return load(name_or_path, mechanism=made(mechanism), dtype=dtype, device=device)


def _of_run(path: Path) -> Path:
    """The folder of a training run's model, or the folder itself."""
    if not (path / RUN).is_file():
        return path
    if not (path / "model").is_dir():
        raise CheckpointError(
            f"{path / 'model'}: expected the model of a training run, got none yet: the first evaluation writes it"
        )
    return path / "model"


def _own_class(path: Path) -> str | None:
    """The class name of a checkpoint's mechanism if it is a user's; None if it is a shipped one."""
    config = (
        None if path.is_file() else read_json(sentences.weights_folder(_of_run(path)) / "config.json").get("config")
    )
    mechanism = config.get("mechanism") if isinstance(config, dict) else None
    return str(mechanism.get("name")) if isinstance(mechanism, dict) and is_own(mechanism) else None


def save(model: Model, folder: str | Path, *, layout: Literal["regard", "huggingface"] = "regard") -> Path:
    """Write a model to a folder, atomically: model.safetensors, config.json and tokenizer files.

    `layout="huggingface"` writes a folder that transformers, and every engine that reads such folders, loads with equal
    logits. An encoder from a sentence-transformers folder is written so that this library loads it too. Adapters are
    merged into the weights.

    >>> import regard as rg, tempfile
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in rg.save(model, folder + "/model").iterdir())
    ['config.json', 'model.safetensors']
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the model
    model = expect(Model, model)
    if model.quantized:
        raise ValueError("model: expected float weights, got a quantized model; save the model it was made from")
    if layout == "huggingface":
        values, tensors = huggingface.export(model)
        files = {"config.json": values, **huggingface.other_files(model)}
    elif layout == "regard":
        state = merged_tensors(model.state_dict(), lora_of(model))
        files, tensors = _native_files(model), state
    else:
        raise ValueError(f"layout: expected regard or huggingface, got {layout!r}")
    _check_own(tensors)
    return _write(model, Path(folder), files, partial(save_tensors, tensors))


def write_model(model: Model, folder: Path, weights: Callable[[Path], object]) -> Path:
    """Write a model to a folder in our layout, atomically, as `save` does; `weights` writes its model.safetensors.

    >>> import regard as rg, tempfile
    >>> from regard.checkpoints import write_model
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in write_model(model, Path(folder) / "model", Path.touch).iterdir())
    ['config.json', 'model.safetensors']
    """
    return _write(model, folder, _native_files(model), weights)


def _native_files(model: Model) -> dict[str, Any]:
    """The files of our layout besides the weights and the tokenizer."""
    if not is_listed(model):
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, which load builds, got {type(model).__name__}")
    return {"config.json": {"regard": native.VERSION, "model": type(model).__name__, "config": model.config.to_json()}}


def _write(model: Model, folder: Path, files: dict[str, Any], weights: Callable[[Path], object]) -> Path:
    check_target(folder)

    def fill(beside: Path) -> None:
        weights(beside / "model.safetensors")
        for name, content in files.items():
            (beside / name).parent.mkdir(exist_ok=True)
            with naming(beside / name):
                (beside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.save(beside)

    return write_folder(folder, fill)


def save_peft(run: Path, model: Model, folder: str | Path) -> Path:
    """Write the adapters of a run, whose model is `model`, as the peft library reads them: for the model that the run
    started from, which `save(…, layout="huggingface")` writes for transformers."""
    values, tensors = adapters.peft_files(_of_run(run), model)
    check_target(Path(folder))

    def fill(beside: Path) -> None:
        save_tensors(tensors, beside / adapters.PEFT[1])
        with naming(beside / adapters.PEFT[0]):
            (beside / adapters.PEFT[0]).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(beside / adapters.PEFT[0], beside / adapters.PEFT[1])

    return write_folder(folder, fill)


def _check_place(dtype: object, device: torch.device | str) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype: expected a floating-point dtype like torch.bfloat16, got {dtype!r}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = f"{str(error).splitlines()[0]:.100}"
        if reason.startswith("Expected one of"):  # torch lists every kind of device that it was ever built for
            reason = "torch calls them cpu, cuda, cuda:1, …"
        raise ValueError(f"device: expected a device of this machine, got {device!r}: {reason}") from None


def _check_own(tensors: dict[str, Tensor]) -> None:
    """Raise ValueError for tied weights that the config does not declare: the tie would be lost."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first = names.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        if first != name:
            raise ValueError(
                f"model: expected separate weights, or tied=True in its config, got {first} tied to {name}"
            )


def check_target(target: Path) -> None:
    """Raise ValueError for a folder that `save` must not replace, since it has other files in it."""
    if not target.name:
        raise ValueError(f"folder: expected a name, got {str(target)!r}")
    above = next((folder for folder in target.parents if folder.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"folder: expected a path inside a folder, got {target}, where {above} is a file")
    if target.exists() and not target.is_dir():
        raise ValueError(f"folder: expected a folder or nothing yet, got the file {target}")
    if not target.is_dir():
        return
    # The whole folder is replaced, so it may contain only files that `save` writes.
    others = sorted(entry.name for entry in target.iterdir() if not _written_here(entry))
    if others:
        raise ValueError(
            f"folder: expected an earlier checkpoint, an empty folder or nothing yet, got {target}, "
            f"which contains {others[0]}"
        )


def _written_here(entry: Path) -> bool:
    if entry.name == sentences.POOLING and entry.is_dir():
        return [inside.name for inside in entry.iterdir()] == ["config.json"]
    return entry.name in FILES and entry.is_file()
