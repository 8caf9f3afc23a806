"""The encoder-decoder: an encoder reads the source, a decoder generates the target and attends to it. Two forms.

    memory = encoder(embedding(source) [· √E + positions])
    x      = embedding(target) [· √E + positions]
    x      = x + attention(x);  x = x + cross(x, memory);  x = x + network(x)          for each layer, with norms
    logits = head(x [/ √E])

The original Transformer (Vaswani et al. 2017): norms after each sum, sinusoids, ReLU, biases. T5 (Raffel et al. 2019):
RMSNorm before each sub-layer; a learned bias by distance in self-attention, shared by all layers of a stack; scores not
divided by √K; projections without bias; in v1.1, gated networks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core.masks import Mask, Window, as_mask
from regard.core.masks.structure import padding_between
from regard.core.mechanisms import Softmax
from regard.models.base import GenerativeModel, check_length, check_state, check_tokens
from regard.models.config import TextConfig, block_config, check_decoder_window, check_window
from regard.models.layers.attention import AnyMask, MultiHeadAttention
from regard.models.layers.block import Stack
from regard.models.layers.int8 import tied_head
from regard.models.layers.linear import Linear
from regard.models.layers.positions import RelativeBias, sinusoidal
from regard.models.layers.streaming import ModelState, places, rounded
from regard.models.padded_rows import pad_rows
from regard.models.summary import Part, children, stack_part

Positions = Literal["sinusoidal", "relative", "learned", "none"]
Side = Literal["source", "target"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(TextConfig):
    """An encoder-decoder. The defaults are the original's form; `TransformerConfig.t5(…)` has T5's.

    >>> import regard as rg
    >>> sizes = {"vocabulary_size": 100, "embedding_dim": 32, "num_layers": 2, "num_heads": 4}
    >>> rg.TransformerConfig(**sizes).positions, rg.TransformerConfig.t5(**sizes).positions
    ('sinusoidal', 'relative')
    """

    embedding_dim: int
    num_layers: int
    num_heads: int
    target_vocabulary_size: int | None = None
    """If given, the target has a separate embedding; if not, source and target share one."""
    num_decoder_layers: int | None = None
    """Layers of the decoder; as many as the encoder's if not given."""
    num_kv_heads: int | None = None
    qk_length: int | None = None
    value_length: int | None = None
    hidden_dim: int | None = None
    """Hidden units of the position-wise networks; 4 · embedding_dim if not given."""
    context_length: int = 512
    """The size of the table of learned positions, and the default capacity of `start`."""
    positions: Positions = "sinusoidal"
    num_buckets: int = 32
    """Buckets of relative positions."""
    longest_distance: int = 128
    """All larger distances share one relative position."""
    encoder_window: Window | None = None
    """The sliding window of the encoder's layers; all tokens see each other if not given."""
    decoder_window: Window | None = None
    """The sliding window of the decoder's layers over the target, with after = 0; all earlier tokens if not given. The
    target sees all of the source in any case."""
    norm: str = "layer"
    norm_epsilon: float = 1e-5
    pre_norm: bool = False
    activation: str = "relu"
    attention_bias: bool = True
    output_bias: bool = True
    network_bias: bool = True
    scaled_embedding: bool = True
    """Whether embeddings are multiplied by √E."""
    tied: bool = True
    """Whether the head is the target's embedding."""
    scaled_output: bool = False
    """Whether the head's input is divided by √E."""
    start_token: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = ("sinusoidal", "relative", "learned", "none")
        if self.positions not in kinds:
            raise ValueError(f"positions: expected one of {', '.join(kinds)}, got {self.positions!r}")
        if self.positions == "relative" and not self.longest_distance > self.num_buckets // 2:
            least = self.num_buckets // 2
            raise ValueError(
                f"longest_distance: expected more than num_buckets / 2 = {least}, got {self.longest_distance}"
            )
        check_window("encoder_window", self.encoder_window, self.mechanism)
        check_decoder_window("decoder_window", self.decoder_window, self.mechanism, self.head_length)

    @classmethod
    def t5(cls, **changes: Any) -> "TransformerConfig":
        """T5's form; v1.1's has `activation="geglu_tanh", tied=False, scaled_output=False`."""
        form = {"positions": "relative", "norm": "rms_t5", "norm_epsilon": 1e-6, "pre_norm": True}
        biases = {"attention_bias": False, "output_bias": False, "network_bias": False}
        scales = {"mechanism": Softmax(beta=1.0), "scaled_embedding": False, "scaled_output": True}
        return cls(**{**form, **biases, **scales, "end_tokens": (1,), "padding_token": 0, **changes})

    @property
    def head_length(self) -> int:
        return self.qk_length or self.embedding_dim // self.num_heads

    def explicit(self) -> "TransformerConfig":
        """The same config with every size filled in, also those that are computed from others by default."""
        return replace(
            self,
            num_decoder_layers=self.decoder_layers,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            qk_length=self.head_length,
            value_length=self.value_length or self.head_length,
            hidden_dim=self.hidden_dim or 4 * self.embedding_dim,
        )

    @property
    def target_size(self) -> int:
        """How many different tokens a target may have."""
        return self.target_vocabulary_size or self.vocabulary_size

    @property
    def decoder_layers(self) -> int:
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers


class Transformer(GenerativeModel):
    """An encoder-decoder: `transformer(source, target)` gives the logits of each next token of the target.

    Padding in `source_mask` is hidden from encoder and decoder; other parts of that mask apply to the encoder only.

    >>> import regard as rg, torch
    >>> model = rg.Transformer(rg.TransformerConfig(vocabulary_size=50, embedding_dim=16, num_layers=2, num_heads=4))
    >>> source, target = torch.randint(50, (2, 9)), torch.randint(50, (2, 6))
    >>> logits = model(source, target, source_mask=rg.padding([9, 5]))
    >>> state = model.start(source, source_mask=rg.padding([9, 5]))
    >>> first, state = model.extend(target[:, :4], state)
    >>> last, state = model.extend(target[:, 4:], state)
    >>> torch.allclose(torch.cat([first, last], dim=1), logits, atol=1e-5)
    True
    """

    noun = "an encoder-decoder"
    reads_source = True
    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.embedding_dim)
        if config.target_vocabulary_size is not None:
            self.target_embedding = nn.Embedding(config.target_vocabulary_size, config.embedding_dim)
        if config.positions == "learned":
            self.source_positions = nn.Embedding(config.context_length, config.embedding_dim)
            self.target_positions = nn.Embedding(config.context_length, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)
        block = block_config(config)
        self.encoder = Stack(
            block,
            config.num_layers,
            windows=(config.encoder_window,) * config.num_layers,
            bias=_bias(config, bidirectional=True),
        )
        self.decoder = Stack(
            replace(block, cross=True),
            config.decoder_layers,
            causal=True,
            windows=(config.decoder_window,) * config.decoder_layers,
            bias=_bias(config, bidirectional=False),
        )
        if not config.tied:
            self.head = Linear(config.embedding_dim, config.target_size, bias=False)
        self.initialise()

    def initialise(self, spread: float = 1.0) -> None:
        """Random weights that keep activations at a scale of about 1, times `spread`; biases are 0."""
        super().initialise(spread)
        config = self.config
        for module in self.modules():
            if isinstance(module, RelativeBias) and not module.table.weight.is_meta:
                nn.init.normal_(module.table.weight, std=spread * config.embedding_dim**-0.5)
            elif isinstance(module, MultiHeadAttention) and module.mechanism == Softmax(beta=1.0):
                # Scores are not divided by √K here, so W_q starts smaller instead.
                module.W_q.weight.data.mul_(config.head_length**-0.5)

    def deviation(self, module: nn.Linear | nn.Embedding | nn.Conv2d) -> float:
        """1/√fan-in; 1 for embeddings that are not multiplied by √E."""
        unit = isinstance(module, nn.Embedding) and not self.config.scaled_embedding
        return 1.0 if unit else module.weight.shape[1:].numel() ** -0.5

    def forward(
        self,
        source: Int[Tensor, "B S"],
        target: Int[Tensor, "B T"],
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
        *,
        at: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "*b D"]:
        """Logits (B, T, vocabulary). Masks are usually `rg.padding(…)`, left or right; the decoder is always causal.

        With `at`, logits (N, vocabulary) of the positions where it is True, in order; others are not computed.
        """
        rule, target_rule = self._check("source", source, source_mask), self._check("target", target, target_mask)
        if target.shape[0] != (batch := source.shape[0]):
            raise ValueError(f"target: expected as many sequences as the source's {batch}, got {target.shape[0]}")
        if at is not None and (at.dtype != torch.bool or at.shape != target.shape):
            raise ValueError(f"at: expected bool {tuple(target.shape)}, got {at.dtype} {tuple(at.shape)}")
        memory = self.decoder.remember(self._encode(source, rule))
        padding = padding_between(rule, 0, source.shape[1], source.shape[1])
        x = self._embed("target", target, target_rule)
        hidden, _ = self.decoder(x, target_rule, memory=memory, memory_mask=padding)
        return self.predict(hidden if at is None else hidden[at])

    def encode(self, source: Int[Tensor, "B S"], source_mask: AnyMask = None) -> Float[Tensor, "B S E"]:
        """The encoder's output, exactly 0 at padding."""
        return self._encode(source, self._check("source", source, source_mask))

    def start(
        self,
        source: Int[Tensor, "B S"],
        source_mask: AnyMask = None,
        capacity: int | None = None,
        storage: torch.dtype | None = None,
    ) -> ModelState:
        """A state for `extend` with no target yet: the source is encoded here, once.

        `capacity` is the room for target tokens (by default the context length). `storage=torch.int8` keeps keys and
        values in 8 bits, those of the source too; see `Mechanism.start`.
        """
        rule = self._check("source", source, source_mask)
        room = self.config.context_length if capacity is None else capacity
        empty = self.decoder.start(batch=source.shape[0], capacity=room, storage=storage)
        memory = self.decoder.remember(self._encode(source, rule))
        return replace(
            empty,
            memory=memory if storage is None else rounded(memory),
            memory_mask=padding_between(rule, 0, source.shape[1], source.shape[1]),
        )

    def extend(
        self, target: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T D"], ModelState]:
        """Logits of T new target tokens after those in the state, and the longer state.

        The mask covers the whole target; a token that was padding when it was added stays padding.
        """
        hidden, longer = self.advance(target, state, mask)
        return self.predict(hidden), longer

    def advance(
        self, target: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T E"], ModelState]:
        """`extend` without the head: hidden states, so that `predict` can compute the last token's logits alone."""
        check_state(state)
        if state.memory is None:
            raise ValueError("state: expected one from start(source, …), got one without a source")
        rule = self._check("target", target, mask, state)
        hidden, longer = self.decoder(self._embed("target", target, rule, state), rule, state=state)
        assert longer is not None
        return hidden, longer

    def predict(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"]:
        """Logits from the decoder's hidden states."""
        config = self.config
        if config.scaled_output:
            hidden = hidden * config.embedding_dim**-0.5
        return tied_head(hidden, self._table("target")) if config.tied else self.head(hidden)

    def read_prompts(
        self, prompts: Sequence[Sequence[int]], *, room: int, chunk: int, storage: torch.dtype | None
    ) -> tuple[Float[Tensor, "B D"], ModelState]:
        """The logits of each target's first token, and the state. Sources are padded on the right, read in one pass."""
        rows = pad_rows(prompts)
        mask = rows.mask if rows.ragged else None
        state = self.start(rows.tokens.to(self.device), mask, capacity=1 + room, storage=storage)
        first = torch.full((len(prompts), 1), self.config.start_token or 0, device=self.device)
        hidden, state = self.advance(first, state)
        return self.predict(hidden)[:, 0], state

    def room_after(self, prompt_length: int) -> int:
        """How many target tokens the context has room for after the start token."""
        limit = self.context_length
        if self.config.positions == "learned" and prompt_length > limit:
            raise ValueError(f"prompts: expected at most {limit} tokens (the model's context), got {prompt_length}")
        return limit - 1

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def decoder_stack(self) -> Stack:
        return self.decoder

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.blocks, *self.decoder.blocks]

    @property
    def sharded_blocks(self) -> list[nn.Module]:
        """The encoder's blocks: a decoder block's cross-attention computes its keys and values before it runs."""
        return list(self.encoder.blocks)

    @property
    def token_tables(self) -> list[nn.Embedding]:
        return list(dict.fromkeys([self._table("source"), self._table("target")]))

    @property
    def source_stack(self) -> Stack | None:
        return self.encoder

    @property
    def tied_table(self) -> nn.Embedding | None:
        return self._table("target") if self.config.tied else None

    def parts(self, length: int) -> Iterator[Part]:
        """Embeddings, both stacks, and the head, for the last of `length` target tokens and a source as long."""
        encoder = stack_part("encoder", self.encoder, length, self.dtype)
        decoder = stack_part("decoder", self.decoder, length, self.dtype, stream=True)
        yield from children(self, {"encoder": encoder, "decoder": decoder})
        if self.config.tied:
            yield Part(name="head (tied)", parameters=0, flops=2 * self._table("target").weight.numel())

    def _check(self, side: Side, tokens: Tensor, mask: AnyMask, state: ModelState | None = None) -> Mask | None:
        config = self.config
        check_tokens(side, tokens, config.vocabulary_size if side == "source" else config.target_size)
        total = tokens.shape[1] + (0 if state is None else state.length)
        if config.positions == "learned":
            check_length(side, total, config.context_length)
        rule = as_mask(mask)
        if rule is not None:
            rule.fits(tokens.shape[0], config.num_heads, tokens.shape[1], total)
        return rule

    def _encode(self, source: Tensor, rule: Mask | None) -> Tensor:
        return self.encoder(self._embed("source", source, rule), rule)[0]

    def _embed(self, side: Side, tokens: Tensor, rule: Mask | None, state: ModelState | None = None) -> Tensor:
        return self.embed(tokens, places(tokens, rule, state), side)

    def embed(
        self, tokens: Int[Tensor, "B T"], place: Int[Tensor, "..."], side: Side = "target"
    ) -> Float[Tensor, "B T E"]:
        """The first layer's input on one side: embeddings of tokens at their positions."""
        config = self.config
        x = self._table(side)(tokens)
        if config.scaled_embedding:
            x = x * math.sqrt(config.embedding_dim)
        if config.positions == "sinusoidal":
            x = x + sinusoidal(place, config.embedding_dim).to(x.dtype)
        elif config.positions == "learned":
            positions = self.source_positions if side == "source" else self.target_positions
            x = x + positions(place)
        return self.dropout(x)

    def _table(self, side: Side) -> nn.Embedding:
        separate = side == "target" and self.config.target_vocabulary_size is not None
        return self.target_embedding if separate else self.embedding


def _bias(config: TransformerConfig, *, bidirectional: bool) -> RelativeBias | None:
    if config.positions != "relative":
        return None
    return RelativeBias(
        config.num_heads,
        bidirectional=bidirectional,
        num_buckets=config.num_buckets,
        longest_distance=config.longest_distance,
    )
