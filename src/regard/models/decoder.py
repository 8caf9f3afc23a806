"""Decoders: each token sees those before it and predicts the next. GPT-2's form and Llama's.

    x      = embedding(tokens) [+ positions(place)]
    x      = x + attention(norm(x));  x = x + network(norm(x))          for each layer
    logits = head(norm(x))

Weights begin with the deviation 1/√(3·fan-in), about the 0.02 of GPT-2 at its width of 768, and those that write into
the residual stream divided by √(2·layers), as in GPT-2 (docs/start.md).

GPT-2: learned positions, LayerNorm, GELU, biases. Llama (Mistral, Qwen2): rotary positions, RMSNorm, SwiGLU, grouped
key/value heads, a window in some layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.core.eager import readable
from regard.core.masks import Window, as_mask
from regard.core.masks.structure import padding_between
from regard.models.base import GenerativeModel, check_length, check_state, check_tokens
from regard.models.config import TextConfig, block_config, check_decoder_window
from regard.models.layers.attention import AnyMask
from regard.models.layers.block import Stack
from regard.models.layers.int8 import tied_head
from regard.models.layers.linear import Linear
from regard.models.layers.positions import Alibi, Rotary, RotaryScaling, sinusoidal
from regard.models.layers.streaming import ModelState, places
from regard.models.padded_rows import pad_rows
from regard.models.summary import Part, children, stack_part

Positions = Literal["rotary", "learned", "sinusoidal", "alibi", "none"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(TextConfig):
    """A decoder. The defaults are Llama's form; `DecoderConfig.gpt2(…)` has GPT-2's.

    >>> import regard as rg
    >>> rg.DecoderConfig.gpt2(vocabulary_size=100, embedding_dim=32, num_layers=2, num_heads=4).positions
    'learned'
    """

    embedding_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    qk_length: int | None = None
    value_length: int | None = None
    hidden_dim: int | None = None
    """Hidden units of the position-wise network; 4 · embedding_dim if not given."""
    context_length: int = 2048
    positions: Positions = "rotary"
    rotary_base: float = 10000.0
    rotary_scaling: RotaryScaling | None = None
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    activation: str = "swiglu"
    attention_bias: bool = False
    output_bias: bool = False
    network_bias: bool = False
    window: Window | None = None
    """The sliding window of the layers of `window_layers`, with after = 0."""
    window_layers: tuple[int, ...] | None = None
    """Which layers have the window; all if not given."""
    tied: bool = True
    """Whether the head is the embedding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = ("rotary", "learned", "sinusoidal", "alibi", "none")
        if self.positions not in kinds:
            raise ValueError(f"positions: expected one of {', '.join(kinds)}, got {self.positions!r}")
        check_decoder_window("window", self.window, self.mechanism, self.head_length)
        if any(not 0 <= index < self.num_layers for index in self.window_layers or ()):
            raise ValueError(f"window_layers: expected layers below {self.num_layers}, got {self.window_layers}")
        if self.positions == "rotary" and self.head_length % 2:
            raise ValueError(
                f"qk_length: expected an even number (rotary positions rotate pairs), got {self.head_length}"
            )

    @classmethod
    def gpt2(cls, **changes: Any) -> "DecoderConfig":
        """GPT-2's form."""
        form = {"positions": "learned", "norm": "layer", "norm_epsilon": 1e-5, "activation": "gelu_tanh"}
        biases = {"attention_bias": True, "output_bias": True, "network_bias": True}
        return cls(**{**form, **biases, "context_length": 1024, **changes})

    @property
    def head_length(self) -> int:
        return self.qk_length or self.embedding_dim // self.num_heads

    def explicit(self) -> "DecoderConfig":
        """The same config with every size filled in, also those that are computed from others by default."""
        layers = tuple(index for index, window in enumerate(self.windows) if window is not None)
        return replace(
            self,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            qk_length=self.head_length,
            value_length=self.value_length or self.head_length,
            hidden_dim=self.hidden_dim or 4 * self.embedding_dim,
            window_layers=None if self.window is None else layers,
        )

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """The window of each layer."""
        chosen = range(self.num_layers) if self.window_layers is None else self.window_layers
        return tuple(self.window if index in chosen else None for index in range(self.num_layers))


class Decoder(GenerativeModel):
    """A decoder: `decoder(tokens, mask=None)` gives the logits of each next token. It is always causal.

    >>> import regard as rg, torch
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=50, embedding_dim=16, num_layers=2, num_heads=4))
    >>> tokens = torch.randint(50, (2, 6))
    >>> model(tokens, mask=rg.padding([6, 4])).shape
    torch.Size([2, 6, 50])
    >>> logits, state = model.extend(tokens[:, :4], model.start(batch=2, capacity=8))
    >>> logits, state = model.extend(tokens[:, 4:], state)
    >>> torch.allclose(logits, model(tokens)[:, 4:], atol=1e-5)
    True
    """

    noun = "a decoder"
    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary_size, config.embedding_dim)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.embedding_dim)
        self.dropout = nn.Dropout(config.dropout)
        bias = Alibi(config.num_heads) if config.positions == "alibi" else None
        block = block_config(config, rotary=_rotary(config))
        self.stack = Stack(block, config.num_layers, causal=True, windows=config.windows, bias=bias)
        if not config.tied:
            self.head = Linear(config.embedding_dim, config.vocabulary_size, bias=False)
        self.initialise()

    def initialise(self, spread: float = 1.0) -> None:
        """Random weights, times `spread`, and biases of 0; what enters the residual stream is divided by the root of
        how many sub-layers add to it."""
        super().initialise(spread)
        self.stack.scale_writers()

    def deviation(self, module: nn.Linear | nn.Embedding | nn.Conv2d) -> float:
        """PyTorch's own scale for linear layers, about the 0.02 of GPT-2 at its width of 768."""
        return (3 * module.weight.shape[1:].numel()) ** -0.5

    def forward(
        self, tokens: Int[Tensor, "B T"], mask: AnyMask = None, *, at: Bool[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "*b D"]:
        """Logits (B, T, vocabulary). `mask` comes on top of causality: usually `rg.padding(lengths)`, left or right.

        With `at`, logits (N, vocabulary) of the positions where it is True, in order; others are not computed.
        """
        if at is not None and (at.dtype != torch.bool or at.shape != tokens.shape):
            raise ValueError(f"at: expected bool {tuple(tokens.shape)}, got {at.dtype} {tuple(at.shape)}")
        hidden, _ = self._run(tokens, mask, None)
        return self.predict(hidden if at is None else hidden[at])

    def start(self, *, batch: int, capacity: int | None = None, storage: torch.dtype | None = None) -> ModelState:
        """An empty state for `extend`, with room for `capacity` tokens (by default the context length).

        `storage=torch.int8` keeps keys and values in 8 bits; see `Mechanism.start`.
        """
        room = self.config.context_length if capacity is None else capacity
        return self.stack.start(batch=batch, capacity=room, storage=storage)

    def extend(
        self, tokens: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T D"], ModelState]:
        """Logits of T new tokens after those in the state, and the longer state.

        The mask covers the whole history; a token that was padding when it was added stays padding.
        """
        hidden, longer = self.advance(tokens, state, mask)
        return self.predict(hidden), longer

    def advance(
        self, tokens: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T E"], ModelState]:
        """`extend` without the head: hidden states, so that `predict` can compute the last token's logits alone."""
        check_state(state)
        hidden, longer = self._run(tokens, mask, state)
        assert longer is not None
        return hidden, longer

    def predict(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"]:
        """Logits from hidden states."""
        return tied_head(hidden, self.embedding) if self.config.tied else self.head(hidden)

    def read_prompts(
        self, prompts: Sequence[Sequence[int]], *, room: int, chunk: int, storage: torch.dtype | None
    ) -> tuple[Float[Tensor, "B D"], ModelState]:
        """The logits of the token after each prompt, and the state. Prompts are padded on the left to one length."""
        rows = pad_rows(prompts, side="left")
        tokens, longest = rows.tokens.to(self.device), rows.tokens.shape[1]
        state = self.start(batch=len(prompts), capacity=longest + room, storage=storage)
        hidden = tokens.new_zeros(0)
        for begin in range(0, longest, chunk):
            end = min(begin + chunk, longest)
            mask = padding_between(rows.mask, 0, end, longest) if rows.ragged else None
            hidden, state = self.advance(tokens[:, begin:end], state, mask)
        return self.predict(hidden[:, -1:])[:, 0], state

    def room_after(self, prompt_length: int) -> int:
        """How many new tokens the context has room for."""
        if prompt_length >= self.context_length:
            raise ValueError(
                f"prompts: expected fewer than {self.context_length} tokens (the model's context), got {prompt_length}"
            )
        return self.context_length - prompt_length

    @property
    def context_length(self) -> int:
        return self.config.context_length

    @property
    def decoder_stack(self) -> Stack:
        return self.stack

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.stack.blocks)

    @property
    def token_tables(self) -> list[nn.Embedding]:
        return [self.embedding]

    @property
    def tied_table(self) -> nn.Embedding | None:
        return self.embedding if self.config.tied else None

    def parts(self, length: int) -> Iterator[Part]:
        """Embeddings, the stack, and the head, for the last of `length` tokens."""
        yield from children(self, {"stack": stack_part("stack", self.stack, length, self.dtype, stream=True)})
        if self.config.tied:
            yield Part(name="head (tied)", parameters=0, flops=2 * self.embedding.weight.numel())

    def _run(self, tokens: Tensor, mask: AnyMask, state: ModelState | None) -> tuple[Tensor, ModelState | None]:
        check_tokens("tokens", tokens, self.config.vocabulary_size)
        past = 0 if state is None else state.length
        rule = as_mask(mask)
        place = places(tokens, rule, state)
        if self.config.positions == "learned":
            # Padding takes no position. Under torch.compile the amount of padding cannot be read.
            reach = past + tokens.shape[1] if place.ndim == 1 or not readable(place) else int(place.max()) + 1
            check_length("tokens", reach, self.config.context_length)
        return self.stack(self.embed(tokens, place), rule, positions=place, state=state)

    def embed(self, tokens: Int[Tensor, "B T"], place: Int[Tensor, "..."]) -> Float[Tensor, "B T E"]:
        """The first layer's input: embeddings of tokens at their positions."""
        x = self.embedding(tokens)
        if self.config.positions == "learned":
            x = x + self.positions(place)
        elif self.config.positions == "sinusoidal":
            x = x + sinusoidal(place, self.config.embedding_dim).to(x.dtype)
        return self.dropout(x)


def _rotary(config: DecoderConfig) -> Rotary | None:
    if config.positions != "rotary":
        return None
    return Rotary(
        length=config.head_length,
        base=config.rotary_base,
        scaling=config.rotary_scaling,
        context_length=config.context_length,
    )
