"""The model that training starts from: a copy of it stays with the run, which then resumes without the original."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints import load, load_mapped, load_with, save
from regard.core.mechanisms.text import lookup
from regard.models.base import Model, SomeModel, expect
from regard.models.encoder import Encoder
from regard.models.layers.lora import TARGETS, Lora, adapt
from regard.training.initial import sharded_later
from regard.training.settings import option

NEW = ("classes.",)
"""Beginnings of the names of parameters that are a task's own, also if the model that training starts from has them."""


def scratch(default: Any, help: str, *, also: str | None = None, changes: bool = False) -> Any:
    """The `option` of a model from scratch, where it has its default. With `--from` it is refused, or `changes` the
    model.

    >>> from regard.training.recipes.lm import Options
    >>> Options(start="smollm2", num_layers=2)
    Traceback (most recent call last):
    ValueError: num_layers: expected none, the model that training starts from has its own, got 2
    """
    words = help if default is None else f"{help.removesuffix('.')}; {default} if not given."
    words = words.replace("if not given", "or the start's, if not given") if changes else words
    return field(default=None, metadata={**option(None, words, also=also).metadata, "scratch": (default, changes)})


@dataclass(frozen=True, kw_only=True)
class Started:
    """The options of recipes that may start from a model: which, and how it is trained.

    >>> from regard.training.recipes.lm import Options
    >>> Options(start="smollm2", lora_rank=8).lora
    Lora(rank=8, alpha=16.0, targets=('query', 'value'))
    """

    start: str | None = option(
        None, "A run, a checkpoint or a name of `regard models` to fine-tune; from scratch if not given."
    )
    lora_rank: int | None = option(
        None, "With --from: train adapters of this rank (LoRA), and leave the weights as they are."
    )
    lora_alpha: float | None = option(None, "Adapters are scaled by this over their rank; 2 x rank if not given.")
    lora_targets: str = option("query,value", f"What gets adapters: some of {','.join(TARGETS)}; or all.")

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, (default, changes) = getattr(self, entry.name), entry.metadata.get("scratch", (None, True))
            if self.start is None and value is None:
                object.__setattr__(self, entry.name, default)
            elif self.start is not None and value is not None and not changes:
                wanted = "expected none, the model that training starts from has its own"
                raise ValueError(f"{entry.name}: {wanted}, got {value}")
        if self.start is None and self.lora_rank is not None:
            raise ValueError(f"lora_rank: expected --from, a model to fine-tune, got {self.lora_rank} without it")
        _ = self.lora

    @property
    def lora(self) -> Lora | None:
        """The adapters; None if all weights are trained."""
        if self.lora_rank is None:
            if self.lora_alpha is not None or self.lora_targets != "query,value":
                raise ValueError("lora_rank: expected one with --lora-alpha and --lora-targets, got none")
            return None
        return Lora(rank=self.lora_rank, alpha=self.lora_alpha, targets=self.lora_targets)


def started(kind: type[SomeModel], start: str, mechanism: str | None, folder: Path) -> SomeModel:
    """The model `start` (a run, a checkpoint, a name of `regard models`) in float32, perhaps with another mechanism;
    ValueError for one of another kind. It is read from the folder start/ in `folder`, or saved there. In a sharded run
    its weights stay in that file, memory-mapped, until each process copies its part.

    >>> import tempfile
    >>> import regard as rg
    >>> from regard.training.recipes.started import started
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     original = rg.save(model, f"{folder}/original")
    ...     first = started(rg.Decoder, str(original), "quadratic", Path(folder))
    ...     again = started(rg.Decoder, "gone", "quadratic", Path(folder))
    >>> again.config.mechanism, bool((first.embedding.weight == again.embedding.weight).all())
    (Quadratic(c=1.0), True)
    """
    copy = folder / "start"
    chosen = None if mechanism is None else lookup(mechanism)
    if not copy.is_dir():
        model = expect(kind, load_with(start, chosen, dtype=torch.float32), "from")
        save(model, copy)
        if not sharded_later():
            return model
        del model
    mechanisms = [] if chosen is None else [chosen]
    if sharded_later():
        return expect(kind, load_mapped(copy, mechanisms, torch.float32))
    return expect(kind, load(copy, mechanisms=mechanisms, dtype=torch.float32))


def with_heads(source: Encoder, **changes: Any) -> Encoder:
    """An encoder whose config has changes, with the tensors that both have, shared: not the heads for classes.

    >>> import regard as rg
    >>> from regard.training.recipes.started import with_heads
    >>> source = rg.Encoder(rg.EncoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> model = with_heads(source, num_classes=3)
    >>> model.classes.out_features, bool((model.embedding.weight == source.embedding.weight).all())
    (3, True)
    """
    model = Encoder(replace(source.config, pooler=True, attention_dropout=0.0, **changes))
    shared = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith(NEW)}
    state = {name: shared.get(name, tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)  # the source's own tensors, which may be in a file
    return model


def adapt_started(model: Model, options: Started, base: Mapping[str, Tensor], seed: int) -> None:
    """Give a model the adapters of the options, if there are any. Parameters that the model training starts from does
    not have (`base` is its state dict) are trained whole.

    >>> import regard as rg
    >>> from regard.training.recipes.lm import Options
    >>> from regard.training.recipes.started import adapt_started, with_heads
    >>> sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> source = rg.Encoder(rg.EncoderConfig(**sizes, pooler=True))
    >>> model = with_heads(source, num_classes=3)
    >>> adapt_started(model, Options(start="source", lora_rank=2), source.state_dict(), seed=0)
    >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][-2:]
    ['classes.weight', 'classes.bias']
    """
    if (lora := options.lora) is None:
        return
    parameters = dict(model.named_parameters())
    new = [
        name
        for name, parameter in parameters.items()
        if name.startswith(NEW)
        or name not in base
        or not torch.equal(parameter, base[name])
        or (".attend." in name and getattr(options, "mechanism", None) is not None)
    ]
    torch.manual_seed(seed)
    adapt(model, lora, tuple(new))
