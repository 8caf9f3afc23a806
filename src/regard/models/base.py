"""The base classes of all models: modules that have a config and describe themselves.

No other code asks which class a model has. A `Model` says what it is made of (`parts`, for its summary), which of its
modules repeat (`blocks`, for recomputation and sharding) and what its head shares (`tied_table`, for int8 weights). A
`GenerativeModel` also says how it reads a prompt and generates the tokens after it; an `ImageModel`, how it is adapted
to other image sizes and classes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.core.display import Html
from regard.core.eager import readable
from regard.models.config import Config, ImageConfig, TextConfig, names_of_classes
from regard.models.layers.attention import AnyMask, without_mechanisms
from regard.models.layers.block import Stack
from regard.models.layers.streaming import ModelState
from regard.models.summary import Part, StateSize, Summary, children, size, stack_state

if TYPE_CHECKING:
    from regard.checkpoints.tokenizer import Tokenizer

LONGEST = 4096
"""The default length of a summary, in tokens; the context length if that is shorter."""

SomeModel = TypeVar("SomeModel", bound="Model")


class Model(nn.Module):
    """A model with its `config` and, if it came from a checkpoint with one, its `tokenizer`."""

    noun: ClassVar[str] = "one of regard's models"
    """What errors call it."""
    unit: ClassVar[Literal["token", "image"]] = "token"
    """A summary counts the FLOPs of one of these."""
    config: Config
    tokenizer: "Tokenizer | None" = None
    quantized: bool = False
    """Whether its projections have int8 weights; see `regard.quantized`."""

    def logits(self, output: Float[Tensor, "..."]) -> Float[Tensor, "... D"] | None:
        """The logits in what a call of the model returns, of tokens (B, T, D) or of classes (B, D); None for a model
        that has none."""
        return None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes that its logits stand for; none where they stand for tokens."""
        return ()

    def initialise(self, spread: float = 1.0) -> None:
        """Random weights, times `spread`, and biases of 0. Norms and mechanisms stay as they were built."""
        for module in without_mechanisms(self):
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv2d) and not module.weight.is_meta:
                nn.init.normal_(module.weight, std=spread * self.deviation(module))
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def deviation(self, module: nn.Linear | nn.Embedding | nn.Conv2d) -> float:
        """The standard deviation of a module's first weights: BERT's, if a model has no better one."""
        return 0.02

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def blocks(self) -> list[nn.Module]:
        """The repeated modules, in the order they run; activation checkpointing recomputes them one by one."""
        return []

    @property
    def sharded_blocks(self) -> list[nn.Module]:
        """The blocks whose weights are read only in their own forward pass, so that FSDP can shard each of them."""
        return self.blocks

    @property
    def tied_table(self) -> nn.Embedding | None:
        """The embedding that is also the head, if the two are tied."""
        return None

    def summary(self, length: int | None = None) -> Summary:
        """The model in numbers: layers, heads, parameters, state and FLOPs per token at some length. Print it."""
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
        """The default length of a summary: tokens of a text, or pixels of an image's side."""
        return LONGEST

    def parts(self, length: int) -> Iterable[Part]:
        """The parts of the model, with the FLOPs of one `unit` at some length."""
        return children(self, {})

    def state_size(self, length: int) -> StateSize:
        """Bytes of the decoding state after `length` tokens."""
        return StateSize()


class TextModel(Model):
    """A model whose input is tokens."""

    config: TextConfig

    @property
    def context_length(self) -> int:
        """The longest sequence that the model is made for, in tokens."""
        raise NotImplementedError

    @property
    def default_length(self) -> int:
        return min(self.context_length, LONGEST)

    @property
    def token_tables(self) -> list[nn.Embedding]:
        """The embeddings that token ids are looked up in."""
        raise NotImplementedError

    @property
    def output_stack(self) -> Stack:
        """The blocks whose hidden states `vocabulary_logits` reads."""
        raise NotImplementedError

    @property
    def source_stack(self) -> Stack | None:
        """The blocks that read a separate source sequence; None without one."""
        return None

    def vocabulary_logits(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"] | None:
        """Logits over the vocabulary from hidden states; None for a model without such a head."""
        raise NotImplementedError


class GenerativeModel(TextModel):
    """A model that generates token by token: the interface that sampling, beam search and saved prompts use."""

    noun = "a decoder or an encoder-decoder"
    reads_source: ClassVar[bool] = False
    """Whether the prompt is a separate source sequence (encoder-decoders) or the beginning of the output (decoders)."""

    @property
    def decoder_stack(self) -> Stack:
        """The blocks that generate; their states are the decoding state."""
        raise NotImplementedError

    @property
    def output_stack(self) -> Stack:
        return self.decoder_stack

    def vocabulary_logits(self, hidden: Float[Tensor, "*b E"]) -> Float[Tensor, "*b D"] | None:
        return self.predict(hidden)

    def logits(self, output: Float[Tensor, "..."]) -> Float[Tensor, "... D"] | None:
        return output

    def embed(self, tokens: Int[Tensor, "B T"], place: Int[Tensor, "..."]) -> Float[Tensor, "B T E"]:
        """The first block's input: embeddings of tokens at their positions."""
        raise NotImplementedError

    def advance(
        self, tokens: Int[Tensor, "B T"], state: ModelState, mask: AnyMask = None
    ) -> tuple[Float[Tensor, "B T E"], ModelState]:
        """Hidden states of T new tokens after those in the state, and the longer state."""
        raise NotImplementedError

    def predict(self, hidden: Float[Tensor, "B T E"]) -> Float[Tensor, "B T D"]:
        """Logits of the next token from hidden states."""
        raise NotImplementedError

    def read_prompts(
        self, prompts: Sequence[Sequence[int]], *, room: int, chunk: int, storage: torch.dtype | None
    ) -> tuple[Float[Tensor, "B D"], ModelState]:
        """The logits of the token after each prompt, and a state with room for `room` more tokens.

        Prompts are read in chunks of at most `chunk` tokens where that saves memory. `storage` is as in `start`.
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

    def logits(self, output: Float[Tensor, "..."]) -> Float[Tensor, "... D"] | None:
        return output if self.config.num_classes else None

    @property
    def class_names(self) -> tuple[str, ...]:
        return names_of_classes(self.config.class_names, self.config.num_classes)

    def num_tokens(self, height: int, width: int) -> int:
        """How many tokens the first attention layer sees of an image."""
        raise NotImplementedError

    @property
    def token_grid(self) -> tuple[int, int] | None:
        """Rows and columns of the patches that are the last tokens of every layer; None where layers differ."""
        return None

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Height and width of its images; None where they may have any."""
        return None

    def resized(self: SomeModel, image_size: int | tuple[int, int]) -> SomeModel:
        """A copy for images of another size."""
        raise NotImplementedError

    def with_classes(self: SomeModel, num_classes: int, class_names: tuple[str, ...] = ()) -> SomeModel:
        """A copy with a new head, initialised to 0, for other classes."""
        raise NotImplementedError


def expect(kind: type[SomeModel], model: object, name: str = "model") -> SomeModel:
    """The model, if it is an instance of `kind`; otherwise a ValueError that names the argument.

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
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"{name}: expected whole numbers of shape (B, T), got {got}")
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
    """Raise ValueError for a sequence that is longer than the model's context."""
    if length > limit:
        raise ValueError(f"{name}: expected at most {limit} tokens (the model's context), got {length}")
