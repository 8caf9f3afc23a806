"""Language modelling: a decoder learns to predict the next token of source code or of any other text.

    loss          = mean over tokens of  -log p(token | the tokens before it)
    bits per byte = Σ over tokens of -log₂ p / bytes of UTF-8 text

The embedded text is the source of the Python standard library; whole modules are held out. Bits per byte compare models
with different vocabularies, and compressors.

A row of a batch has `context` tokens, cut at different places in each epoch. Packed rows are cut from all documents in
a circle, and the document mask `rg.segments` keeps the documents of a row apart. Linear attention is then computed in
its quadratic form, which for a context of hundreds of tokens costs about as much as its linear form. A row that is not
packed has one document, or a piece of one: linear attention runs in its linear form, softmax in one fused call.
Mechanisms with decay or gates, whose state runs through the whole row, need rows that are not packed.

Positions count along the row. A document in the middle of a packed row gives the same result as alone if attention
depends on relative positions only: rotary positions with softmax and polynomial kernels, but not with elementwise
feature maps (elu), and not learned positions. In training those see documents at all positions.
"""

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.calls.choice import refusal
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Window, padding, segments
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text
from regard.inference.generation import generate
from regard.models.base import Model, expect
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.padded_rows import pad_ranges, pad_rows
from regard.training.batches import Integers
from regard.training.data.held_out import chance, parts, split
from regard.training.data.text import SUFFIXES, Document, Tokens, bounds, documents, plain_ids, write_tokens
from regard.training.data.vocabulary import train_bpe
from regard.training.divided import divided
from regard.training.fingerprint import digest
from regard.training.initial import initial
from regard.training.recipes import check_causal
from regard.training.recipes.started import Started, adapt_started, scratch, started
from regard.training.settings import Settings, option
from regard.training.task import IGNORED, Batch, Card, Task, Totals

PAD, START, END = 0, 1, 2
HELD_OUT = 0.05
"""The share of the documents that is held out."""
SAMPLE = 16 * 2**20
"""Bytes of text that the vocabulary is learned from."""
EXCERPT, EXCERPTS, TESTED = 8_000, 80_000, 800_000
"""Characters of each document to validate with, and of all together, that evaluations use; characters of the test."""
TOGETHER = 8192
"""Tokens per batch of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The text and the decoder.

    >>> from regard.training.recipes.lm import Options
    >>> Options(mechanism="quadratic", num_kv_heads=1).context_length
    256
    """

    data: str | None = option(None, "A folder or a file of text; the Python standard library's source if not given.")
    validation_data: str | None = option(
        None, "A folder or a file of text that chooses the best model; part of --data if not given."
    )
    test_data: str | None = option(
        None, "A folder or a file of text to measure the best model with, at the end; likewise."
    )
    suffix: tuple[str, ...] = option(SUFFIXES, "Suffixes of the files to read from a folder.")
    vocabulary_size: int = scratch(4096, "Tokens of the vocabulary, at most.")
    context_length: int = option(256, "Tokens of a row: the context that a prediction can have.", also="--context")
    embedding_dim: int = scratch(192, "Embedding dimension.")
    num_layers: int = scratch(4, "Layers.")
    num_heads: int = scratch(6, "Attention heads.")
    form: Literal["llama", "gpt2"] = scratch(
        "llama", "llama (rotary positions, RMSNorm, SwiGLU) or gpt2 (learned positions, LayerNorm, GELU)."
    )
    dropout: float = scratch(0.0, "Dropout of each sub-layer's output in training.")
    mechanism: str = scratch("softmax", f"Attention, one of {CHOICES}.", changes=True)
    num_kv_heads: int | None = scratch(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    window: Window | None = scratch(None, f"{WINDOW_HELP} Here AFTER is 0. All before it if not given.")
    packed: bool | None = option(
        None,
        "Pack several documents into a row, with a document mask; if not, one document per row. Packed if not given, "
        "unless the mechanism does not support a document mask.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("vocabulary_size", 300), ("context_length", 2)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.form not in ("llama", "gpt2", None):
            raise ValueError(f"form: expected llama or gpt2, got {self.form!r}")
        if not self.suffix:
            raise ValueError("suffix: expected at least one, got none")
        if self.mechanism is not None:
            check_causal(self.mechanism)
            object.__setattr__(self, "packed", self.packs(from_text(self.mechanism)))
        if self.start is None:
            self.config(self.vocabulary_size)

    def packs(self, mechanism: Mechanism) -> bool:
        """Whether several documents are packed into a row for a model with this mechanism."""
        apart = refusal(mechanism, segments(torch.zeros(1, 8, dtype=torch.long))) is None
        if self.packed and not apart:
            name = self.mechanism or mechanism
            raise ValueError(f"packed: expected --no-packed with {name}, which has no document mask, got --packed")
        return apart if self.packed is None else self.packed

    @property
    def least_batch(self) -> int:
        """The tokens of a batch, at least, as far as one knows before the text is read."""
        return self.context_length if self.packed else 1

    def config(self, vocabulary_size: int) -> DecoderConfig:
        """The model's config."""
        # SwiGLU has three matrices: with two thirds of the hidden units it is as large as a GELU network.
        llama = partial(DecoderConfig, hidden_dim=64 * math.ceil(self.embedding_dim / 24))
        make = DecoderConfig.gpt2 if self.form == "gpt2" else llama
        return make(
            vocabulary_size=vocabulary_size,
            embedding_dim=self.embedding_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            context_length=self.context_length,
            window=self.window,
            dropout=self.dropout,
            mechanism=from_text(self.mechanism),
            start_token=START,
            end_tokens=(END,),
            padding_token=PAD,
        )


def settings() -> Settings:
    """Defaults that train on the standard library in about ten minutes on two cores."""
    return Settings(steps=3000, learning_rate=3e-3, warmup=100, batch_tokens=1024, weight_decay=0.1)


def build(options: Options, folder: Path, seed: int) -> "LanguageModelling":
    """The task. Tokenizer and tokens are read from `folder`, or made and saved there.

    >>> import tempfile
    >>> from regard.training.recipes import lm
    >>> sizes = {"vocabulary_size": 300, "context_length": 32, "embedding_dim": 16, "num_heads": 2, "num_layers": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "some.txt").write_text("To be, or not to be.\\n" * 100)
    ...     small = lm.Options(data=f"{folder}/some.txt", **sizes)
    ...     task = lm.build(small, Path(folder), seed=0)
    ...     task.batch([0, 1], epoch=0)["tokens"].shape
    torch.Size([2, 32])
    """
    every = documents(None if options.data is None else Path(options.data), options.suffix)
    others = [
        None if path is None else documents(Path(path), options.suffix, name=name, least=1)
        for name, path in (("validation_data", options.validation_data), ("test_data", options.test_data))
    ]
    train, validation, test = parts(every, _name, *others, share=HELD_OUT)
    if options.start is not None:
        torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
        model = started(Decoder, options.start, options.mechanism, folder)
        options = _fitted(options, model)
        tokens = write_tokens(folder / "train.tokens", train, _tokenizer(model))
        adapt_started(model, options, model.state_dict(), seed)
        return LanguageModelling(options, model, tokens, validation, test, seed)
    tokenizer = _vocabulary(train, options.vocabulary_size, folder)
    tokens = write_tokens(folder / "train.tokens", train, tokenizer)
    torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
    config = options.config(tokenizer.vocabulary_size)
    model = initial(lambda: Decoder(config), seed)
    model.tokenizer = tokenizer
    return LanguageModelling(options, model, tokens, validation, test, seed)


def _fitted(options: Options, model: Decoder) -> Options:
    """The options for a model that training starts from."""
    if options.context_length > model.context_length:
        raise ValueError(
            f"context_length: expected at most {model.context_length}, as {options.start} has, "
            f"got {options.context_length}"
        )
    assert isinstance(model.config.mechanism, Mechanism)
    return replace(options, packed=options.packs(model.config.mechanism))


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document], list[Document]]:
    """Documents to train on, to validate with and to test with, split by name.

    >>> from regard.training.data.text import documents
    >>> from regard.training.recipes.lm import split_documents
    >>> train, validation, test = split_documents(documents())
    >>> 0.02 < len(validation + test) / len(train + validation + test) < 0.08
    True
    """
    return split(documents, _name, share=HELD_OUT)


def _name(document: Document) -> str:
    return document.name


def _vocabulary(train: Sequence[Document], size: int, folder: Path) -> Tokenizer:
    """The tokenizer in a folder; if there is none, it is trained on some of the documents and saved there."""
    if not (folder / "tokenizer_config.json").exists():  # the file that is written last
        with tempfile.TemporaryDirectory() as aside:
            train_bpe(_sample(train), size).save(aside)
            path = Path(aside, "tokenizer.json")
            # A prompt gets no [END]: the model continues it.
            path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "post_processor": None}), "utf-8")
            _read(Path(aside)).save(folder)
    return _read(folder)


def _read(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_folder(folder)
    if tokenizer is None:
        raise CheckpointError(f"{folder}: expected a tokenizer.json next to tokenizer_config.json, got none")
    return tokenizer


def _sample(train: Sequence[Document]) -> Iterator[str]:
    room = SAMPLE
    for document in sorted(train, key=lambda document: chance(document.name)):
        if room > 0:
            yield document.text
            room -= document.stop - document.start


class LanguageModelling(Task):
    """Documents, and the decoder that learns to continue them."""

    name: ClassVar[str] = "lm"
    model: Decoder

    def __init__(
        self,
        options: Options,
        model: Decoder,
        tokens: Tokens,
        validation: Sequence[Document],
        test: Sequence[Document],
        seed: int,
    ) -> None:
        self.options, self.model, self.tokens, self.seed = options, model, tokens, seed
        self.validation, self.tested = validation, test
        self.pieces = None if options.packed else _Pieces(tokens.starts, options.context_length)
        self.excerpts = list(_excerpts(validation, EXCERPT, EXCERPTS))

    def sizes(self) -> Integers:
        if self.pieces is not None:
            return self.pieces.lengths
        context = self.options.context_length
        return np.broadcast_to(np.int64(context), math.ceil(len(self.tokens.ids) / context))

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        chosen = np.asarray(indices)
        return self._packed(chosen, epoch) if self.pieces is None else self._single(self.pieces, chosen, epoch)

    def fingerprint(self) -> str:
        others = (*self.validation, *self.tested)
        texts = (digest(document.name, document.text) for document in others)  # one in memory at a time
        return digest(*self.tokens.parts, self.tokens.starts, *texts)

    def _packed(self, indices: Integers, epoch: int) -> Batch:
        """Rows cut from all documents in a circle, at different places in each epoch."""
        context, ids = self.options.context_length, self.tokens.ids
        shift = np.random.default_rng((self.seed, epoch)).integers(context)
        place = (indices[:, None] * context + shift + np.arange(context + 1)) % len(ids)
        table = ids[place].astype(np.int64)
        # By their places: in some vocabularies a token that starts documents ends them, too.
        starts = self.tokens.starts
        begins = starts[np.searchsorted(starts, place, side="right") - 1] == place
        tokens, targets = table[:, :-1], table[:, 1:]
        batch = {"tokens": tokens, "targets": np.where(begins[:, 1:], IGNORED, targets)}
        if begins[:, 1:-1].any():
            batch["segments"] = begins[:, :-1].cumsum(1)
        return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in batch.items()}

    def _single(self, pieces: "_Pieces", indices: Integers, epoch: int) -> Batch:
        """Rows of one document each, padded on the right."""
        starts, lengths, overlap = pieces.cut(indices, np.random.default_rng((self.seed, epoch)).random())
        tokens = pad_ranges(self.tokens.ids, starts, lengths, filling=PAD)
        targets = pad_ranges(self.tokens.ids, starts + 1, lengths, filling=IGNORED)
        targets[np.arange(targets.shape[1]) < overlap[:, None]] = IGNORED
        batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
        return batch if (lengths == lengths.max()).all() else {**batch, "lengths": torch.from_numpy(lengths)}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": int((batch["targets"] != IGNORED).sum())}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {"loss": _nats(model, batch)}

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss, perplexity and bits per byte of excerpts of the documents to validate with: the first `EXCERPT`
        characters of each, `EXCERPTS` in all, in rows of a context."""
        return self._results(model, self.excerpts)

    def test(self, model: Model) -> dict[str, float]:
        """The same of the documents to test with, whole, `TESTED` characters in all."""
        return self._results(model, _excerpts(self.tested, TESTED, TESTED)) if self.tested else {}

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all text of files and folders."""
        files = [part for path in paths for part in documents(Path(path), self.options.suffix, least=1)]
        return self._results(model, _excerpts(files))

    def _results(self, model: Model, texts: Iterable[str]) -> dict[str, float]:
        context = self.options.context_length
        nats, count, size = _measured(model, texts, context, context)
        return {
            "loss": nats / count,
            "perplexity": math.exp(min(nats / count, 700)),
            "bits_per_byte": nats / math.log(2) / size,
        }

    def card(self) -> Card:
        data = self.options.data
        text = "the Python standard library's source" if data is None else Path(data).name
        count = len(self.tokens.starts) - 1
        rows = "packed" if self.options.packed else "one document per row"
        return Card(
            data=f"{count:,} documents of {text}, {len(self.tokens.ids):,} tokens, in rows of "
            f"{self.options.context_length} ({rows}); {len(self.validation):,} others to validate with, "
            f"{len(self.tested):,} to test with.",
            use="Continues text like its training data: `regard generate`.",
        )

    def samples(self, model: Model) -> list[str]:
        tokenizer = _tokenizer(model)
        texts = ["def", "class"] if self.options.data is None else self.excerpts[:2]
        prompts = [plain_ids(tokenizer, text)[: min(8, self.options.context_length // 2)] for text in texts]
        continuations = [
            generate(model, [prompt], max_new_tokens=48, temperature=0.7, seed=self.seed)[0] for prompt in prompts
        ]
        return [tokenizer.decode([*prompt, *more.tokens]) for prompt, more in zip(prompts, continuations, strict=True)]


class _Pieces:
    """Documents in pieces of `context` predictions; shorter documents are not cut. Where two pieces overlap, the shared
    tokens are only context in the later piece, so that each token is predicted once."""

    def __init__(self, starts: Integers, context: int) -> None:
        self.starts, self.context = starts, context
        self.first = np.append(0, -(-(np.diff(starts) - 1) // context)).cumsum()
        """The first piece of each document; there are more pieces than documents, so nothing is kept of each."""

    @property
    def lengths(self) -> Integers:
        lengths = np.minimum(np.diff(self.starts) - 1, self.context).astype(np.int32)
        return np.repeat(lengths, np.diff(self.first))

    def cut(self, indices: Integers, chance: float) -> tuple[Integers, Integers, Integers]:
        """Starts and lengths of some pieces, and how many of their tokens the pieces before them predict. Cuts may be
        shifted left by the slack of the last piece; `chance` says by how much of it."""
        context, document = self.context, np.searchsorted(self.first, indices, side="right") - 1
        begin, predictions = self.starts[document], self.starts[document + 1] - self.starts[document] - 1
        offset = (indices - self.first[document]) * context
        slack = -predictions % context
        shifted = offset - (chance * (slack + 1)).astype(np.int64)
        last = np.maximum(0, predictions - context)
        first, before = (np.clip(place, 0, last) for place in (shifted, shifted - context))
        overlap = np.where(offset > 0, before + context - first, 0)
        return begin + first, np.minimum(predictions, context), overlap


def bits_per_byte(model: Model, texts: Iterable[str]) -> float:
    """Bits that a model needs per byte of UTF-8 text; all tokens and all bytes are counted.

    Each token is predicted from at least half a context before it, or from all tokens before it. The first token is
    predicted from [START]; [END] is not predicted.

    >>> import tempfile
    >>> from regard.training.recipes import lm
    >>> sizes = {"vocabulary_size": 300, "context_length": 32, "embedding_dim": 16, "num_heads": 2, "num_layers": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "some.txt").write_text("To be, or not to be.\\n" * 100)
    ...     small = lm.Options(data=f"{folder}/some.txt", **sizes)
    ...     task = lm.build(small, Path(folder), seed=0)
    ...     0 < lm.bits_per_byte(task.model, (document.text for document in task.tested)) < 9
    True
    """
    trained = model.training
    model.eval()
    try:
        nats, _, size = _measured(model, texts, _context(model), _context(model) // 2)
    finally:
        model.train(trained)
    return nats / math.log(2) / size


@torch.no_grad()
def _measured(model: Model, texts: Iterable[str], context: int, stride: int) -> tuple[float, int, int]:
    """-log p of texts in nats, their number of tokens, and their number of bytes."""
    nats, count, size = 0.0, 0, 0

    def windows() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal size
        tokenizer = _tokenizer(model)
        for text in texts:
            size += len(text.encode())
            yield from _windows([bounds(tokenizer)[0], *plain_ids(tokenizer, text)], context, stride)

    def sums(batch: Batch) -> tuple[float, int]:
        there = {name: tensor.to(model.device) for name, tensor in batch.items()}
        return float(_nats(model, there)), int((batch["targets"] != IGNORED).sum())

    for part, number in divided(sums, _together(windows(), max(1, TOGETHER // context))):
        nats, count = nats + part, count + number
    if not count:
        raise ValueError("texts: expected some text, got none")
    return nats, count, size


def _windows(ids: list[int], context: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and targets of a text in overlapping windows. Each token is a target once; a window, except the first, has
    at most `stride` targets."""
    last = len(ids) - 1 - context
    done = 0
    for start in [*range(0, last, stride), max(0, last)] if len(ids) > 1 else []:
        targets = ids[start + 1 : start + context + 1]
        overlap = done - start
        yield ids[start : start + len(targets)], [IGNORED] * overlap + targets[overlap:]
        done = start + len(targets)


def _together(windows: Iterator[tuple[list[int], list[int]]], size: int) -> Iterator[Batch]:
    """Windows in batches, padded on the right."""
    rows = list(islice(windows, size))
    while rows:
        lengths = [len(inputs) for inputs, _ in rows]
        tokens = pad_rows([inputs for inputs, _ in rows], filling=PAD)
        targets = pad_rows([targets for _, targets in rows], filling=IGNORED)
        batch = {"tokens": tokens.tokens, "targets": targets.tokens}
        yield {**batch, "lengths": torch.tensor(lengths)} if tokens.ragged else batch
        rows = list(islice(windows, size))


def _nats(model: nn.Module, batch: Batch) -> Tensor:
    """-log p of a batch's targets, summed."""
    mask = None
    if "segments" in batch:
        mask = segments(batch["segments"])
    elif "lengths" in batch:
        mask = padding(batch["lengths"])
    logits = model(batch["tokens"], mask).flatten(0, 1)
    precise = logits.float() if logits.dtype.itemsize < 4 else logits
    return F.cross_entropy(precise, batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum")


def _excerpts(documents: Sequence[Document], most: int = sys.maxsize, room: int = sys.maxsize) -> Iterator[str]:
    """The beginnings of documents, of at most so many characters each and in all, in an order of their names: what is
    measured again is added up in the same order, and comes out bitwise the same."""
    for document in sorted(documents, key=lambda document: chance(document.name)):
        if room > 0:
            excerpt = document.text[: min(most, room)]
            room -= len(excerpt)
            yield excerpt


def _context(model: Model) -> int:
    return expect(Decoder, model).context_length


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("model: expected one with a tokenizer, got one without")
    return model.tokenizer
