"""The model that training starts from: a copy of it stays with the run, which then resumes without the original."""

from pathlib import Path

import torch

from regard.checkpoints import load, load_with, save
from regard.core.mechanisms.text import lookup
from regard.models.base import SomeModel, expect


def started(kind: type[SomeModel], start: str, mechanism: str | None, folder: Path) -> SomeModel:
    """The model `start` (a run, a checkpoint, a name of `regard models`) in float32, perhaps with another mechanism;
    ValueError for one of another kind. It is read from the folder start/ in `folder`, or saved there.

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
    if copy.is_dir():
        return expect(kind, load(copy, mechanisms=[] if chosen is None else [chosen], dtype=torch.float32))
    model = expect(kind, load_with(start, chosen, dtype=torch.float32), "from")
    save(model, copy)
    return model
