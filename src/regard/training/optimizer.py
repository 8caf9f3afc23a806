"""AdamW with weight decay for matrices only, and the learning rate of each step.

warm-up        rate = highest · step / warmup
cosine         rate = highest · (final + (1 - final) · (1 + cos(π · part)) / 2)      part: of the steps after warm-up
inverse root   rate = highest · √(warmup / step)                                     Vaswani et al. 2017
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.training.settings import Settings


def rate(settings: Settings, step: int) -> float:
    """The learning rate of a step; steps count from 1.

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
    """The optimizer. Its state is allocated now, not in the first step, so that a checkpoint can be loaded into it.

    >>> import regard as rg
    >>> from regard.training import Settings
    >>> from regard.training.optimizer import adamw
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=8, num_layers=1, num_heads=2))
    >>> [group["weight_decay"] for group in adamw(model, Settings(steps=1, batch_size=1)).param_groups]
    [0.01, 0.0]
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {
            "params": [parameter for parameter in parameters if parameter.ndim >= 2],
            "weight_decay": settings.weight_decay,
        },
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=1e-9, fused=True
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def clip(optimizer: torch.optim.AdamW, parameters: Iterable[Tensor], longest: float | None) -> Tensor:
    """Clip the next step's gradient to the norm `longest`. Returns the norm before clipping.

    A fused AdamW divides float32 gradients by `grad_scale` as it reads them, which saves a pass over all gradients.
    Sharded and float64 gradients are divided here: `grad_scale` would round the latter.

    >>> import torch
    >>> from regard.training.optimizer import clip
    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> parameter.grad = torch.tensor([3.0, 4.0])
    >>> clip(torch.optim.AdamW([parameter], fused=True), [parameter], 1.0)
    tensor(5.)
    """
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    if longest is not None and (isinstance(norm, DTensor) or norm.dtype != torch.float32):
        nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    elif longest is not None:
        optimizer.grad_scale = (norm / longest).clamp(min=1.0)  # type: ignore[attr-defined]
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state tensors, named after their parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}.{part}": tensor
        for parameter, state in optimizer.state.items()
        for part, tensor in state.items()
    }
