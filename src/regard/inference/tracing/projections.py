"""What W_o makes of each head: the output projection of a layer, cut by head.

layer output  =  Σ_h W_o,h out_h + bias        out_h (T, V) the head's output;  W_o,h (E, V) its columns of W_o
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.layers.attention import MultiHeadAttention
from regard.models.layers.lora import Adapted

NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo", "Wo", "o", "proj", "projection", "linear_out", "out_lin")
"""What Hugging Face models call the output projection."""


def our_projections(model: nn.Module) -> dict[nn.Module, nn.Linear]:
    """W_o of every attention of ours."""
    return {module.attend: module.W_o for module in model.modules() if isinstance(module, MultiHeadAttention)}


def their_projection(model: nn.Module, path: str) -> nn.Module | None:
    """The module that projects the heads of a Hugging Face model's attention, by its name; None if there is none."""
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    output = getattr(parent, "output", None)
    candidates = [*(getattr(module, name, None) for name in NAMES), getattr(output, "dense", None), output]
    return next((candidate for candidate in candidates if _weight(candidate) is not None), None)


def _weight(module: Any) -> Float[Tensor, "E D"] | None:
    """The weight of a projection, output by input; None for other modules."""
    if isinstance(module, Adapted):
        return module.whole()
    if isinstance(module, nn.Linear):
        scale = getattr(module, "scale", None)  # of int8 weights
        weight = module.weight.detach()
        return weight if weight.is_floating_point() or scale is None else weight.float() * scale[:, None]
    gpt2_linear: Any = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ())  # input by output
    return module.weight.detach().T if isinstance(module, gpt2_linear) else None


def by_head(
    module: nn.Module | None, num_heads: int, value_length: int, heads: Sequence[int] | None
) -> Float[Tensor, "H E V"] | None:
    """The columns of a projection for each chosen head; None if the projection does not read these heads.

    >>> import torch
    >>> by_head(torch.nn.Linear(8, 6), 4, 2, [0, 3]).shape
    torch.Size([2, 6, 2])
    """
    weight = _weight(module)
    if weight is None or weight.ndim != 2 or weight.shape[1] != num_heads * value_length:
        return None
    parts = weight.unflatten(1, (num_heads, value_length)).transpose(0, 1)
    return parts if heads is None else parts[torch.tensor(heads, device=parts.device)]
