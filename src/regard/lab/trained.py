"""Models with real weights, and the same models without training."""

from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

import regard as rg
from regard.models.base import TextModel, expect

SomeText = TypeVar("SomeText", bound=TextModel)

LEAST = 4
"""A vocabulary has room for the special tokens that configs name."""


@lru_cache(maxsize=2)
def trained(name: str) -> TextModel:
    """A model by its name in `regard models`; the newest two stay loaded, for those who move a parameter."""
    return expect(TextModel, rg.load(name))


def untrained(model: SomeText, ids: Tensor, layers: int | None = None) -> tuple[SomeText, Tensor]:
    """A model of the same config for a text of these tokens alone, and their ids in it; `initialise` it by a seed.

    Rows of the embedding that no token uses would take time and change nothing; so would the layers after the first
    `layers`, if nobody looks at them.

    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=99, embedding_dim=8, num_layers=1, num_heads=2))
    >>> twin, ids = untrained(model, torch.tensor([[98, 7, 98]]))
    >>> ids.tolist(), twin.config.vocabulary_size
    ([[1, 0, 1]], 4)
    """
    used, places = ids.unique(return_inverse=True)
    sizes: dict[str, Any] = {"vocabulary_size": max(LEAST, len(used))}
    if layers is not None:
        sizes["num_layers"] = layers
    config = replace(model.config, **sizes)
    return type(model)(config).eval(), places


def initialise(model: SomeText, seed: int) -> SomeText:
    """The model with random weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model.initialise()
    return model
