"""A plain decoder and its training loop, as nanoGPT writes them: the peer of ours in speed and in loss.

    x      = embedding(tokens) + positions
    x      = x + attention(norm(x));  x = x + network(norm(x))          for each layer
    logits = head(norm(x))

GPT-2's form without biases, GELU, the head tied to the embedding; what enters the residual stream begins divided by
√(2·layers). Rows are cut from one long array of tokens at random places, AdamW has decays 0.9 and 0.95, and the rate
falls along a cosine to a tenth. See https://github.com/karpathy/nanoGPT.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.models.decoder import Decoder, DecoderConfig
from regard.training.batches import Integers


class PlainDecoder(nn.Module):
    """A decoder of torch's modules alone; `plain(tokens, targets)` is its loss.

    >>> import torch
    >>> from regard.commands.suite.plain_decoder import PlainDecoder
    >>> plain = PlainDecoder(vocabulary_size=50, width=16, layers=2, heads=4, context=8)
    >>> tokens = torch.randint(50, (2, 8))
    >>> 3 < plain(tokens, tokens).item() < 5
    True
    """

    def __init__(self, *, vocabulary_size: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocabulary_size, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                adds = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def logits(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def forward(self, tokens: Int[Tensor, "B T"], targets: Int[Tensor, "B T"]) -> Float[Tensor, ""]:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def as_decoder(self, **changes: Any) -> Decoder:
        """The same function as one of our models, so that both are evaluated by the same code.

        >>> import torch
        >>> from regard.commands.suite.plain_decoder import PlainDecoder
        >>> plain = PlainDecoder(vocabulary_size=50, width=16, layers=2, heads=4, context=8)
        >>> tokens = torch.randint(50, (2, 8))
        >>> torch.allclose(plain.as_decoder()(tokens), plain.logits(tokens), atol=1e-5)
        True
        """
        vocabulary_size, width = self.embedding.weight.shape
        blocks: list[Any] = list(self.blocks)
        sizes: dict[str, Any] = {"vocabulary_size": vocabulary_size, "embedding_dim": width, "num_layers": len(blocks)}
        sizes |= {"num_heads": blocks[0].heads, "context_length": len(self.positions.weight), "activation": "gelu"}
        biases = {"attention_bias": False, "output_bias": False, "network_bias": False}
        model = Decoder(DecoderConfig.gpt2(**sizes, **biases, **changes))
        pairs: list[tuple[Any, Any]] = [(model.embedding, self.embedding), (model.positions, self.positions)]
        pairs.append((model.stack.norm, self.norm))
        for ours, block in zip(model.stack.layers, blocks, strict=True):
            inner = ours.attention
            for linear, part in zip((inner.W_q, inner.W_k, inner.W_v), block.qkv.weight.chunk(3), strict=True):
                linear.weight.copy_(part)
            pairs += [(ours.attention_norm, block.attention_norm), (ours.network_norm, block.network_norm)]
            pairs += [(inner.W_o, block.out), (ours.network.up, block.up), (ours.network.down, block.down)]
        for module, plain in pairs:
            module.weight.copy_(plain.weight)
        return model


class _PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        b, t, e = x.shape
        parts = self.qkv(self.attention_norm(x)).split(e, 2)
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, e))
        return x + self.down(F.gelu(self.up(self.network_norm(x))))


def plain_steps(
    model: PlainDecoder, ids: Integers, *, steps: int, rows: int, rate: float, warmup: int, seed: int
) -> Iterator[float]:
    """Train a plain decoder on an array of tokens; yields the loss of each step."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    context, random = len(model.positions.weight), np.random.default_rng(seed)
    for step in range(steps):
        places = random.integers(len(ids) - context - 1, size=rows)
        table = torch.from_numpy(np.stack([ids[place : place + context + 1] for place in places]).astype(np.int64))
        part = (step - warmup) / max(1, steps - warmup)
        falling = 0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * (step + 1) / (warmup + 1) if step < warmup else rate * falling
        loss = model(table[:, :-1], table[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()
