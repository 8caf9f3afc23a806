"""Channel attention: the channels attend to each other, with all tokens as their features (DaViT).

    w_cd = softmax over d of scale · sum over real tokens t of q_tc k_td          out_tc = sum over d of w_cd v_td

Two published conventions differ in the scale: 1/sqrt(tokens) (`scale="tokens"`, Florence-2's DaViT) and
1/sqrt(channels) (`scale="channels"`, the first DaViT, which also calls the three roles k, v, q instead of q, k, v:
pass them in that order).

Ding et al. 2022, "DaViT: Dual Attention Vision Transformers".
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.core.families.channels import ChannelMechanism


@dataclass(frozen=True, kw_only=True)
class Channel(ChannelMechanism):
    """Attention between channels. Needs T = S and qk_length = value_length; padding is the only mask with a meaning.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 49, 8)
    >>> rg.attend(q, k, v, rg.Channel()).shape, rg.weights(q, k, rg.Channel()).shape
    (torch.Size([1, 2, 49, 8]), torch.Size([1, 2, 8, 8]))
    """

    scale: Literal["tokens", "channels"] = "tokens"

    def __post_init__(self) -> None:
        if self.scale not in ("tokens", "channels"):
            raise ValueError(f"scale: expected 'tokens' or 'channels', got {self.scale!r}")

    def size(self, tokens: Tensor, channels: int) -> Tensor:
        return tokens.clamp(min=1) if self.scale == "tokens" else torch.full_like(tokens, channels)
