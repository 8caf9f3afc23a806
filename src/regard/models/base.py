"""What every model is: a module with a config, perhaps a tokenizer, and a summary of itself."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.core.display import Html
from regard.core.eager import readable
from regard.models.config import Config
from regard.models.layers.attention import without_mechanisms
from regard.models.layers.streaming import ModelState

if TYPE_CHECKING:
    from regard.checkpoints.tokenizer import Tokenizer


class Model(nn.Module):
    """A model with its `config` and, if it came from a checkpoint with one, its `tokenizer`."""

    config: Config
    tokenizer: "Tokenizer | None" = None
    quantized: bool = False
    """Whether its projections hold int8 weights; see `regard.quantized`."""

    def initialise(self, spread: float = 0.02) -> None:
        """Small random weights, as GPT-2 and BERT begin; norms, biases and a mechanism's tensors as they are."""
        for module in without_mechanisms(self):
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=spread)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return next(one.dtype for one in self.parameters() if one.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def summary(self, length: int | None = None) -> Any:
        """What the model is: layers, heads, parameters, state and FLOPs a token at some length. Print it."""
        from regard.models.summary import summarise

        return summarise(self, length)

    def _repr_html_(self) -> Html:
        return self.summary()._repr_html_()


def check_tokens(name: str, tokens: Int[Tensor, "B T"], vocabulary_size: int) -> None:
    """Raise ValueError for tokens that are none."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{name}: expected whole numbers of shape (B, T), got {given}")
    if not readable(tokens) or not tokens.numel():
        return
    low, high = (int(one) for one in torch.aminmax(tokens))
    if low < 0 or high >= vocabulary_size:
        raise ValueError(f"{name}: expected tokens from 0 to {vocabulary_size - 1}, got {low if low < 0 else high}")


def check_state(state: object) -> None:
    """Raise ValueError for what is no model's state."""
    if not isinstance(state, ModelState):
        raise ValueError(f"state: expected one from start(…), got {type(state).__name__}")


def check_length(name: str, length: int, limit: int) -> None:
    """Raise ValueError for a sequence longer than a model has positions for."""
    if length > limit:
        raise ValueError(f"{name}: expected at most {limit} tokens (the model's context), got {length}")
