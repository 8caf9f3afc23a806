"""Adapters in a folder of their own: what training has changed, and where the rest of the model is.

    config.json             the model's config; `adapters`: rank, alpha, targets, and `base`, the folder with all else
    adapters.safetensors    the adapters, and tensors that the base does not have (a new head), by our names

A model is loaded with its adapters merged into its weights. `peft_files` gives them as the peft library reads them.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.checkpoints import huggingface
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import Source, open_folder, open_safetensors, read_json
from regard.checkpoints.writing import save_tensors
from regard.core.files import naming, write_folder
from regard.models.base import Model
from regard.models.layers.lora import PARTS, Lora, lora_of, merged

FILE = "adapters.safetensors"
PEFT = ("adapter_config.json", "adapter_model.safetensors")
"""The files of the peft library."""
VERSION = 1
TASKS = {"CausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "SequenceClassification": "SEQ_CLS"}
"""What peft calls the tasks of transformers' classes, by the ends of their names."""


def save_adapters(model: Model, tensors: Mapping[str, Tensor], folder: str | Path, base: str) -> Path:
    """Write a model's adapters and its other trained tensors, atomically; `base` is a path from the folder.

    >>> import tempfile, regard as rg, torch
    >>> from regard.checkpoints.adapters import save_adapters
    >>> from regard.models.layers.lora import Lora, adapt, trained_tensors
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = rg.save(model, f"{folder}/base")
    ...     adapt(model, Lora(rank=2))
    ...     _ = save_adapters(model, trained_tensors(model), f"{folder}/adapters", "../base")
    ...     again = rg.load(f"{folder}/adapters")
    >>> torch.equal(again.embedding.weight, model.embedding.weight)
    True
    """
    lora = lora_of(model)
    assert lora is not None, "save writes models without adapters"
    values = {
        "regard": VERSION,
        "model": type(model).__name__,
        "config": model.config.to_json(),
        "adapters": {**lora.to_json(), "base": base},
    }

    def fill(beside: Path) -> None:
        save_tensors(tensors, beside / FILE)
        with naming(beside / "config.json"):
            (beside / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        # safetensors makes files readable by their owner only
        shutil.copymode(beside / "config.json", beside / FILE)
        if model.tokenizer is not None:
            model.tokenizer.save(beside)

    return write_folder(folder, fill)


class Merged(Source):
    """The tensors of a base, with a folder's adapters merged into them and its other tensors in place of the base's."""

    def __init__(self, folder: Path, values: Mapping[str, Any]) -> None:
        self.lora, base = _described(folder, values)
        if not (base / "config.json").is_file():
            raise CheckpointError(
                f"{folder}: expected the model that its adapters belong to in {base}, got none; "
                "`regard convert RUN FOLDER` writes a whole model from the run"
            )
        self._base, self._trained = open_folder(base), open_safetensors(folder / FILE)
        shapes = {name: shape for name, shape in self._trained.shapes.items() if name.rpartition(".")[2] not in PARTS}
        super().__init__(folder, {**self._base.shapes, **shapes})
        self._adapted = {name.rpartition(".")[0] + ".weight" for name in self._trained.shapes if name not in shapes}
        for name in self._adapted:
            parts = [self._trained.shapes.get(_part(name, part), ()) for part in PARTS]
            rows, columns = self._base.shapes.get(name, (0, 0))
            if parts != [(self.lora.rank, columns), (rows, self.lora.rank)]:
                raise CheckpointError(
                    f"{folder / FILE}: expected adapters of rank {self.lora.rank} for {name} {(rows, columns)}, "
                    f"got {parts}"
                )

    def _tensor(self, name: str) -> Tensor:
        if name not in self._adapted:
            return (self._trained if name in self._trained.shapes else self._base).read(name)
        adapter = {part: self._trained.read(_part(name, part)) for part in PARTS}
        weight = self._base.read(name)
        return merged(weight.to(adapter["lora_A"].dtype), self.lora, adapter).to(weight.dtype)


def _part(weight: str, part: str) -> str:
    return f"{weight.removesuffix('.weight')}.{part}"


def _described(folder: Path, values: Mapping[str, Any]) -> tuple[Lora, Path]:
    """The adapters that a config.json describes, and the folder of their base."""
    try:
        fields = dict(values["adapters"])
        base = folder / str(fields.pop("base"))
        return Lora(**{**fields, "targets": tuple(fields["targets"])}), base
    except (KeyError, TypeError, ValueError) as error:
        wanted = "rank, alpha, targets and base of adapters"
        raise CheckpointError(f"{folder / 'config.json'}: expected {wanted}, got {error!s:.200}") from None


def peft_files(folder: Path, model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and the tensors of adapter_model.safetensors for the adapters in a folder, which belong to
    `model`: the peft library loads them onto the base as transformers has it."""
    values = read_json(folder / "config.json")
    if "adapters" not in values:
        raise ValueError(f"source: expected a run that was trained with --lora-rank, got {folder} without adapters")
    lora, _ = _described(folder, values)
    trained = open_safetensors(folder / FILE)
    links, architecture = huggingface.links(model)
    tensors: dict[str, Tensor] = {}
    targets: set[str] = set()
    whole: set[str] = set()
    for name in trained.shapes:
        ours, _, part = name.rpartition(".")
        link = links.get(f"{ours}.weight" if part in PARTS else name)
        if link is None or len(link.ours) > 1 or link.transposed or (part not in PARTS and ours != "classes"):
            raise ValueError(
                f"to: expected huggingface, which merges the adapters, since peft has no tensor like {name}, got peft"
            )
        theirs, _, last = link.theirs.rpartition(".")
        (targets if part in PARTS else whole).add(theirs)
        end = f"{part}.weight" if part in PARTS else last
        tensors[f"base_model.model.{theirs}.{end}"] = trained.read(name).clone()
    config = {
        "peft_type": "LORA",
        "task_type": TASKS.get(architecture.rpartition("For")[2], "FEATURE_EXTRACTION"),
        "base_model_name_or_path": None,  # wherever the base was converted to
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(whole) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return config, tensors
