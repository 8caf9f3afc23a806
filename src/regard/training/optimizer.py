"""AdamW with decay for matrices alone, and the learning rate of each step.

warm-up        rate = highest · step / warmup
cosine         rate = highest · (final + (1 - final) · (1 + cos(π · part)) / 2)      part: of what is left
inverse root   rate = highest · √(warmup / step)                                     Vaswani et al. 2017
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.training.settings import Settings


def rate(settings: Settings, step: int) -> float:
    """The learning rate of a step, counted from 1.

    >>> from regard.training import Settings
    >>> from regard.training.optimizer import rate
    >>> settings = Settings(steps=100, learning_rate=1.0, warmup=10, batch_size=1)
    >>> [round(rate(settings, step), 3) for step in (1, 10, 55, 100)]
    [0.1, 1.0, 0.525, 0.05]
    """
    highest, warmup = settings.learning_rate, settings.warmup
    if step <= warmup:
        return highest * step / warmup
    if settings.schedule == "inverse_root":
        return highest * math.sqrt(max(1, warmup) / step)
    if settings.schedule == "constant":
        return highest
    part = (step - warmup) / max(1, settings.steps - warmup)
    return highest * (settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * min(1.0, part))) / 2)


def adamw(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """The optimizer, its state there from the beginning, so that a checkpoint finds where to go.

    >>> import regard as rg
    >>> from regard.training import Settings
    >>> from regard.training.optimizer import adamw
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> [group["weight_decay"] for group in adamw(model, Settings(steps=1, batch_size=1)).param_groups]
    [0.01, 0.0]
    """
    known = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in known if one.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [one for one in known if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=1e-9, fused=True
    )
    for one in known:
        optimizer.state[one] = {
            "step": torch.zeros((), dtype=torch.float32, device=one.device),
            "exp_avg": torch.zeros_like(one, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(one, memory_format=torch.preserve_format),
        }
    return optimizer


def clip(optimizer: torch.optim.AdamW, parameters: Iterable[Tensor], longest: float | None) -> Tensor:
    """See that the next step's gradient is no longer than `longest`. Gives its length before.

    A fused AdamW divides float32 gradients by a scale as it reads them, which saves a pass over them all; shards and
    float64, whose scale would be rounded, are divided beforehand.

    >>> import torch
    >>> from regard.training.optimizer import clip
    >>> one = torch.nn.Parameter(torch.zeros(2))
    >>> one.grad = torch.tensor([3.0, 4.0])
    >>> clip(torch.optim.AdamW([one], fused=True), [one], 1.0)
    tensor(5.)
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    known = list(parameters)
    norm = nn.utils.get_total_norm([one.grad for one in known if one.grad is not None])
    if longest is not None and (isinstance(norm, DTensor) or norm.dtype != torch.float32):
        nn.utils.clip_grads_with_norm_(known, longest, norm)
    elif longest is not None:
        optimizer.grad_scale = (norm / longest).clamp(min=1.0)  # type: ignore[attr-defined]
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of each parameter, by name."""
    names = {id(one): name for name, one in model.named_parameters()}
    return {
        f"{names[id(one)]}.{part}": tensor for one, held in optimizer.state.items() for part, tensor in held.items()
    }
