"""A model with an input: what its forward pass is called with, and what the tokens of queries and keys are called."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from regard.core.extras import needed_for
from regard.inference.generation import generate
from regard.inference.trace import word_ids
from regard.models.base import GenerativeModel, ImageModel, Model, TextModel

Kind = Literal["text", "pair", "image"]
MOST_PIXELS = 16_000_000
"""The most pixels of a picture: a small file can unpack to any size."""
LARGEST_PICTURE = 224
"""The longer side of a picture for models that take any size."""


@dataclass(frozen=True)
class Text:
    """One text."""

    text: str


@dataclass(frozen=True)
class Pair:
    """A source and a target; None lets the model write the target first."""

    source: str
    target: str | None = None


@dataclass(frozen=True)
class Picture:
    """The bytes of a PNG or JPEG file."""

    content: bytes = field(repr=False)


Input = Text | Pair | Picture


@dataclass(frozen=True)
class Side:
    """The tokens of one sequence: their strings, which are special, and the number of the word that each belongs to."""

    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    words: tuple[int, ...]
    ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class Subject:
    """A model with an input."""

    name: str
    model: nn.Module
    kind: Kind
    inputs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tokens: Side
    sources: Side | None = None
    """The tokens that an encoder reads, if the model writes others."""
    grid: tuple[int, int] | None = None
    """Rows and columns of a picture's patches."""
    class_token: bool = False
    picture: bytes | None = None
    """What the model sees of a picture, as PNG."""
    tokenizer: Any = None
    chosen: Input | None = None
    """What was asked for; None for tokens that were generated."""

    def __call__(self) -> Any:
        """The forward pass."""
        return self.model(*self.inputs, **self.options)


@dataclass(frozen=True, eq=False, kw_only=True)
class Output:
    """What a model returns for one sequence: `values`, and the logits of tokens or classes if it has any."""

    values: Float[Tensor, "N E"]
    logits: Float[Tensor, "N D"] | None


def subject_of(name: str, model: nn.Module, chosen: Input, tokenizer: Any = None) -> Subject:
    """A model with an input; ValueError if the two do not fit.

    >>> import regard as rg
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=1, num_heads=2))
    >>> model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> subject_of("mine", model, Text("a b")).tokens.tokens
    ('a', 'b')
    """
    return replace(_read(name, model, chosen, tokenizer), chosen=chosen)


def _read(name: str, model: nn.Module, chosen: Input, tokenizer: Any) -> Subject:
    if isinstance(model, ImageModel):
        return _of_picture(name, model, chosen)
    if isinstance(chosen, Picture):
        raise ValueError(f"input: expected a text for {name}, got a picture")
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError(f"model: expected one with a tokenizer, got {name} without")
    if not isinstance(model, TextModel):
        return _of_transformers(name, model, chosen, tokenizer)
    if isinstance(model, GenerativeModel) and model.reads_source:
        if not isinstance(chosen, Pair):
            raise ValueError(f"input: expected a source and a target for {name}, got one text")
        return _of_pair(name, model, chosen)
    if not isinstance(chosen, Text):
        raise ValueError(f"input: expected one text for {name}, got a source and a target")
    return of_ids(name, model, tokenizer.encode(chosen.text))


def of_ids(name: str, model: TextModel, ids: Sequence[int], source_ids: Sequence[int] | None = None) -> Subject:
    """One of regard's models with the ids of its tokens; those of the source too, for an encoder-decoder."""
    if not ids or (source_ids is not None and not source_ids):
        raise ValueError("input: expected a text of at least one token, got an empty one")
    most = model.context_length
    longest = max(len(ids), len(source_ids or ()))
    if longest > most:
        raise ValueError(f"input: expected at most {most:,} tokens (the context of {name}), got {longest:,}")
    tensor = torch.tensor([list(ids)], device=model.device)
    if source_ids is None:
        return Subject(name=name, model=model, kind="text", inputs=(tensor,), tokens=_side(model.tokenizer, ids))
    source = torch.tensor([list(source_ids)], device=model.device)
    return Subject(
        name=name,
        model=model,
        kind="pair",
        inputs=(source, tensor),
        tokens=_side(model.tokenizer, ids),
        sources=_side(model.tokenizer, source_ids),
    )


def _of_pair(name: str, model: GenerativeModel, chosen: Pair) -> Subject:
    assert model.tokenizer is not None
    source = model.tokenizer.encode(chosen.source)
    if not source or not chosen.source.strip():
        raise ValueError("source: expected a text, got an empty one")
    start = model.config.start_token or 0
    if chosen.target is None:
        return of_ids(name, model, [start, *written(model, source)], source)
    target = model.tokenizer.encode(chosen.target)
    ends = {*model.config.end_tokens, model.tokenizer.eos}
    return of_ids(name, model, [start, *(target[:-1] if target and target[-1] in ends else target)], source)


def written(model: GenerativeModel, source: Sequence[int]) -> list[int]:
    """The tokens that an encoder-decoder writes for a source, greedily, without the one that ends them."""
    (result,) = generate(model, [list(source)], max_new_tokens=2 * len(source) + 16)
    return result.tokens[:-1] if result.reason == "end" else result.tokens


def _of_transformers(name: str, model: Any, chosen: Text | Pair, tokenizer: Any) -> Subject:
    """A Hugging Face model, with a tokenizer of transformers."""

    def side(ids: list[int]) -> Side:
        special = set(tokenizer.all_special_ids)
        strings = tokenizer.convert_ids_to_tokens(ids)
        return _named_side([_readable(string) for string in strings], [number in special for number in ids], ids)

    device = next(model.parameters()).device
    source = tokenizer(chosen.text if isinstance(chosen, Text) else chosen.source, return_tensors="pt").to(device)
    options = {key: source[key] for key in ("input_ids", "attention_mask") if key in source}
    if "input_ids" not in options or not options["input_ids"].shape[1]:
        raise ValueError("input: expected a text of at least one token, got an empty one")
    read = side(options["input_ids"][0].tolist())
    if not getattr(model.config, "is_encoder_decoder", False):
        if isinstance(chosen, Pair):
            raise ValueError(f"input: expected one text for {name}, got a source and a target")
        return Subject(
            name=name, model=model, kind="text", inputs=(), options=options, tokens=read, tokenizer=tokenizer
        )
    if not isinstance(chosen, Pair) or chosen.target is None:
        raise ValueError(f"input: expected a source and a target for {name}, got no target")
    target = tokenizer(text_target=chosen.target, return_tensors="pt").to(device)["input_ids"]
    start = torch.full_like(target[:, :1], model.config.decoder_start_token_id or 0)
    ids = torch.cat([start, target[:, :-1]], 1)
    options["decoder_input_ids"] = ids
    return Subject(
        name=name,
        model=model,
        kind="pair",
        inputs=(),
        options=options,
        tokens=side(ids[0].tolist()),
        sources=read,
        tokenizer=tokenizer,
    )


def _readable(token: str) -> str:
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n")


def _side(tokenizer: Any, ids: Sequence[int]) -> Side:
    """The tokens of one of our tokenizers; without one, tokens are their ids."""
    if tokenizer is None:
        return _named_side([str(number) for number in ids], [False] * len(ids), ids)
    special = {
        number
        for role, number in ((role, getattr(tokenizer, role)) for role in tokenizer.special)
        if number is not None and role not in ("unk", "mask")
    }
    return _named_side(tokenizer.tokens(list(ids)), [number in special for number in ids], ids)


def _named_side(strings: Sequence[str], special: Sequence[bool], ids: Sequence[int]) -> Side:
    """Tokens by their strings. Words are numbered in order, and a special token is a word of its own."""
    # What looks special to `word_ids` may be a word: chemists write atoms as [nH].
    words: list[int] = []
    before: int | None = None
    for number, is_special in zip(word_ids(strings), special, strict=True):
        joined = number is not None and number == before and not is_special
        words.append(words[-1] if joined else len(set(words)))
        before = None if is_special else number
    return Side(tuple(strings), tuple(special), tuple(words), tuple(ids))


def _of_picture(name: str, model: ImageModel, chosen: Input) -> Subject:
    if not isinstance(chosen, Picture):
        raise ValueError(f"input: expected a picture for {name}, got a text")
    pixels = picture_pixels(chosen.content, model)
    grid = model.token_grid
    class_token = grid is not None and model.num_tokens(*pixels.shape[1:]) > grid[0] * grid[1]
    tokens = [f"{row + 1}, {column + 1}" for row in range(grid[0]) for column in range(grid[1])] if grid else []
    tokens = ["[CLASS]", *tokens] if class_token else tokens
    numbers = pixels.to(model.dtype)[None].to(model.device) / 127.5 - 1
    return Subject(
        name=name,
        model=model,
        kind="image",
        inputs=(numbers,),
        tokens=Side(tuple(tokens), tuple(token == "[CLASS]" for token in tokens), tuple(range(len(tokens)))),
        grid=grid,
        class_token=class_token,
        picture=_png(pixels),
    )


def picture_pixels(content: bytes, model: ImageModel) -> UInt8[Tensor, "C Y X"]:
    """A PNG or JPEG file in the size and the channels of a model."""
    with needed_for("a picture"):
        from PIL import Image, UnidentifiedImageError
    try:
        with Image.open(BytesIO(content), formats=("PNG", "JPEG")) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(
                    f"image: expected at most {MOST_PIXELS:,} pixels, got {picture.width} × {picture.height}"
                )
            mode = "L" if model.config.num_channels == 1 else "RGB"
            converted = picture.convert(mode)
    except Image.DecompressionBombError:
        raise ValueError(f"image: expected at most {MOST_PIXELS:,} pixels, got more") from None
    except (UnidentifiedImageError, OSError, SyntaxError):
        raise ValueError("image: expected a PNG or JPEG file, got another or a damaged one") from None
    if model.image_size is not None:
        height, width = model.image_size
    else:
        share = min(1.0, LARGEST_PICTURE / max(converted.size))
        width, height = (max(32, round(side * share)) for side in converted.size)
    if converted.size != (width, height):
        converted = converted.resize((width, height), Image.Resampling.BILINEAR)
    numbers = torch.frombuffer(bytearray(converted.tobytes()), dtype=torch.uint8)
    return numbers.view(height, width, -1).permute(2, 0, 1)


def _png(pixels: UInt8[Tensor, "C Y X"]) -> bytes:
    from PIL import Image

    channels, height, width = pixels.shape
    mode = "L" if channels == 1 else "RGB"
    file = BytesIO()
    Image.frombytes(mode, (width, height), pixels.permute(1, 2, 0).contiguous().numpy().tobytes()).save(file, "PNG")
    return file.getvalue()


def read_output(subject: Subject, result: Any) -> Output:
    """What the model returned, for its one sequence."""
    if isinstance(result, Tensor) and isinstance(subject.model, Model):
        predicted = subject.model.logits(result)
        return Output(values=_rows(result), logits=None if predicted is None else _rows(predicted))
    logits = getattr(result, "logits", None)
    values = logits if logits is not None else getattr(result, "last_hidden_state", None)
    if not isinstance(values, Tensor):
        raise ValueError(f"model: expected one that returns logits or hidden states, got {type(result).__name__}")
    return Output(values=_rows(values), logits=None if logits is None else _rows(values))


def _rows(values: Float[Tensor, "..."]) -> Float[Tensor, "N D"]:
    """Those of the one sequence, or the one row of an image."""
    return values[0] if values.ndim == 3 else values


def output_names(subject: Subject, ids: Sequence[int]) -> list[str]:
    """The names of what logits stand for: tokens, or classes."""
    if isinstance(subject.model, Model) and (classes := subject.model.class_names):
        return [classes[number] if number < len(classes) else str(number) for number in ids]
    if subject.tokenizer is not None:
        return [_readable(str(token)) for token in subject.tokenizer.convert_ids_to_tokens(list(ids))]
    tokenizer = getattr(subject.model, "tokenizer", None)
    return [str(number) for number in ids] if tokenizer is None else tokenizer.tokens(list(ids))


def shown_position(subject: Subject, logits: Float[Tensor, "N D"]) -> int:
    """The row of logits that is shown first: after a text, at a masked word, or where a translator is least sure."""
    if len(logits) == 1:
        return 0
    if subject.kind == "pair":
        return int(logits.float().softmax(-1).amax(-1).argmin())
    mask = getattr(getattr(subject.model, "tokenizer", None), "mask", None)
    return subject.tokens.ids.index(mask) if mask in subject.tokens.ids else len(logits) - 1
