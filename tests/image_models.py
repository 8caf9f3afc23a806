"""Vision models and images for their tests."""

import torch
from torch import nn

from regard.core.mechanisms import REGISTRY
from regard.models.davit import DaViT, DaViTConfig
from regard.models.vision import VisionConfig, VisionTransformer

BOTH_WAYS = [name for name, mechanism in REGISTRY.items() if not mechanism.ordered]


SMALL = {"image_size": (12, 20), "patch_size": 4, "embedding_dim": 16, "num_layers": 2, "num_heads": 4}


STAGES = {
    "embedding_dim": (8, 16, 24),
    "num_layers": (1, 2, 1),
    "num_heads": (2, 4, 3),
    "num_groups": (4, 2, 6),
    "patch_size": (7, 2, 2),
    "patch_stride": (4, 2, 2),
    "patch_padding": (3, 0, 0),
    "norm_first": (False, True, True),
}


def shuffled(model: nn.Module) -> nn.Module:
    """The model in float64 with every number of it random, so that none is 0 or 1 by default."""
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


def make(**changes) -> VisionTransformer:
    return shuffled(VisionTransformer(VisionConfig(**{**SMALL, "num_classes": 5, **changes})))


def make_davit(**changes) -> DaViT:
    return shuffled(DaViT(DaViTConfig(**{**STAGES, "window_size": 3, "num_classes": 5, **changes})))


def pictures(*sides: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, *(sides or (12, 20)), dtype=torch.float64)


def close(ours, theirs, atol=1e-10):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
