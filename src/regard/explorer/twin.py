"""A model's twin with random weights: what its attention looks like without any training."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn

from regard.models.base import Model

SEED = 0


def random_twin(model: nn.Module) -> nn.Module:
    """A model of the same config, initialised anew, the same at every call.

    >>> import regard as rg, torch
    >>> generator = torch.manual_seed(7)
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=1, num_heads=2))
    >>> trained, first, second = (next(m.parameters()) for m in (model, random_twin(model), random_twin(model)))
    >>> torch.equal(first, second), torch.equal(first, trained)
    (True, False)
    """
    kind: Any = type(model)
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(f"twin: expected a model with a config, got {type(model).__name__}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        twin = kind(config if isinstance(model, Model) else deepcopy(config))
    if isinstance(model, Model):
        twin.tokenizer = model.tokenizer
    parameter = next(model.parameters())
    return twin.to(parameter.device, parameter.dtype).eval()
