"""What every model is: a module with a config that answers for itself.

Nothing else asks of which class a model is. A `Model` says what it is made of (`parts`, for its summary), which of its
modules repeat (`blocks`, for recomputation and sharding) and what its head shares (`tied_table`, for int8 weights). A
`GenerativeModel` says in addition how it reads a prompt and writes the tokens after it; an `ImageModel`, how it is
fitted to other images and classes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.display import Html
from regard.core.eager import readable
from regard.models.config import Config, ImageConfig, TextConfig
from regard.models.layers.attention import AnyMask, without_mechanisms
from regard.models.layers.block import Stack
from regard.models.layers.streaming import ModelState
from regard.models.summary import Part, StateSize, Summary, children, size, stack_state

if TYPE_CHECKING:
    from regard.checkpoints.tokenizer import Tokenizer

LONGEST = 4096
"""Tokens at which a summary is made if no length is given, or the context if that is shorter."""

SomeModel = TypeVar("SomeModel", bound="Model")


class Model(nn.Module):
    """A model with its `config` and, if it came from a checkpoint with one, its `tokenizer`."""

    noun: ClassVar[str] = "one of regard's models"
    """What errors call it."""
    unit: ClassVar[Literal["token", "image"]] = "token"
    """What a summary counts FLOPs of."""
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
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules that repeat, in the order they run: each may be computed again in the backward pass."""
        return []

    @property
    def sharded_blocks(self) -> list[nn.Module]:
        """Those of the blocks whose weights nobody reads outside of their forward pass, so that each can be a shard."""
        return self.blocks

    @property
    def tied_table(self) -> nn.Embedding | None:
        """The embedding that is the head too, if there is one."""
        return None

    def summary(self, length: int | None = None) -> Summary:
        """What the model is: layers, heads, parameters, state and FLOPs per token at some length. Print it."""
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"length: expected a whole number of at least 1, got {length!r}")
        measured = self.default_length if length is None else length
        parts, state = tuple(self.parts(measured)), self.state_size(measured)
        return Summary(
            model=type(self).__name__,
            parts=parts,
            parameters=size(self),
            unit=self.unit,
            length=measured,
            flops=sum(part.flops for part in parts),
            state_per_token=state.per_token,
            state_fixed=state.fixed,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def _repr_html_(self) -> Html:
        return self.summary()._repr_html_()

    @property
    def default_length(self) -> int:
        """The length at which a summary is made if none is given: of a text, or of an image's sides."""
        return LONGEST

    def parts(self, length: int) -> Iterable[Part]:
        """What the model consists of, with the FLOPs of one `unit` at some length."""
        return children(self, {})

    def state_size(self, length: int) -> StateSize:
        """Bytes of its stream's state after `length` tokens."""
        return StateSize()


class TextModel(Model):
    """A model whose input is tokens."""

    config: TextConfig

    @property
    def context_length(self) -> int:
        """How many tokens it is made for."""
        raise NotImplementedError

    @property
    def default_length(self) -> int:
        return min(self.context_length, LONGEST)


class GenerativeModel(TextModel):
    """A model that writes tokens one after another: what generation, beam search and saved prompts ask of it."""

    noun = "a decoder or an encoder-decoder"
    reads_source: ClassVar[bool] = False
    """Whether a prompt is another sequence than the one it writes (an encoder-decoder's source), or its beginning."""

    @property
    def decoder_stack(self) -> Stack:
        """The blocks that write; their states are those of a stream."""
        raise NotImplementedError

    def embed(self, tokens: Int[Tensor, "B T"], place: Int[Tensor, "..."]) -> Float[Tensor, "B T E"]:
        """What the first block reads: tokens, and the position of each in its sequence."""
        raise NotImplementedError

    def advance(
        self, tokens: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T E"], ModelState]:
        """Hidden states of T more tokens after those of the state, and the longer state."""
        raise NotImplementedError

    def predict(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Logits of the next token from hidden states."""
        raise NotImplementedError

    def read_prompts(
        self, prompts: Sequence[Sequence[int]], *, room: int, chunk: int, storage: torch.dtype | None
    ) -> tuple[Float[Tensor, "B D"], ModelState]:
        """The logits of what follows each prompt, and the state, with room for `room` more tokens.

        At most `chunk` tokens of a prompt are read at once where that saves memory. `storage` is that of `start`.
        """
        raise NotImplementedError

    def room_after(self, prompt_length: int) -> int:
        """How many new tokens the context has room for; ValueError for a prompt that leaves none."""
        raise NotImplementedError

    def state_size(self, length: int) -> StateSize:
        return stack_state(self.decoder_stack, length, self.dtype)


class ImageModel(Model):
    """A model whose input is images, (B, C, height, width)."""

    noun = "a model of images"
    unit = "image"
    config: ImageConfig

    @property
    def default_length(self) -> int:
        return 224

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens its first attention sees of an image."""
        raise NotImplementedError

    def resized(self: SomeModel, image_size: int | tuple[int, int]) -> SomeModel:
        """A copy for images of another size."""
        raise NotImplementedError

    def with_classes(self: SomeModel, num_classes: int, class_names: tuple[str, ...] = ()) -> SomeModel:
        """A copy with a new head, which begins at 0, for other classes."""
        raise NotImplementedError


def expect(kind: type[SomeModel], model: object, name: str = "model") -> SomeModel:
    """The model, if it is of a kind; else a ValueError that names the argument.

    >>> import regard as rg
    >>> from regard.models.base import expect
    >>> sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> expect(rg.Encoder, rg.Decoder(rg.DecoderConfig(**sizes)))
    Traceback (most recent call last):
    ValueError: model: expected an encoder, got Decoder
    """
    if not isinstance(model, kind):
        raise ValueError(f"{name}: expected {kind.noun}, got {type(model).__name__}")
    return model


def check_tokens(name: str, tokens: Int[Tensor, "B T"], vocabulary_size: int) -> None:
    """Raise ValueError unless `tokens` is a tensor (B, T) of token ids."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        given = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{name}: expected whole numbers of shape (B, T), got {given}")
    if not readable(tokens) or not tokens.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(tokens))
    if low < 0 or high >= vocabulary_size:
        raise ValueError(f"{name}: expected tokens from 0 to {vocabulary_size - 1}, got {low if low < 0 else high}")


def check_state(state: object) -> None:
    """Raise ValueError unless `state` is a model's state."""
    if not isinstance(state, ModelState):
        raise ValueError(f"state: expected one from start(…), got {type(state).__name__}")


def check_length(name: str, length: int, limit: int) -> None:
    """Raise ValueError for a sequence longer than a model has positions for."""
    if length > limit:
        raise ValueError(f"{name}: expected at most {limit} tokens (the model's context), got {length}")
