"""Language modelling: a decoder learns to predict the next token of source code or of any text.

    loss          = mean over tokens of  -log p(token | the tokens before it)
    bits per byte = Σ over tokens of -log₂ p / bytes of UTF-8 text

The embedded text is the Python standard library's own source; whole modules are held out. Bits per byte compare models
of any vocabulary with each other and with compressors.

A row of a batch is `context` tokens, cut at other places in each epoch. Packed rows are cut from all documents in a
circle, and the documents in a row are kept apart by `rg.segments`: none sees another. A kernel then computes its
weights pair by pair, which within a context of hundreds of tokens costs about what its running sums do. Rows that are
not packed hold one document, or a piece of one, each: kernels run by their sums, softmax by one fused call. Mechanisms
that forget, whose sums run through the whole row, take such rows only.

Positions count along the row. A document in the middle of a packed row computes as it would alone where attention knows
distances only: rotary positions with softmax and with polynomial kernels, but not with elementwise features (elu), and
not with learned positions. Those meet all documents at all places in training.
"""

import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.calls.choice import refusal
from regard.core.masks import Window, padding, segments
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text
from regard.inference.generation import generate
from regard.models.base import Model, expect
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.padded_rows import pad_ranges, pad_rows
from regard.training.data.held_out import chance, split
from regard.training.data.text import SUFFIXES, Document, Tokens, documents, plain_ids, write_tokens
from regard.training.data.vocabulary import train_bpe
from regard.training.recipes import check_causal
from regard.training.settings import Settings, option
from regard.training.task import IGNORED, Batch, Card, Task, Totals

PAD, START, END = 0, 1, 2
HELD_OUT = 0.05
"""The share of the documents that is held out."""
SAMPLE = 16 * 2**20
"""Bytes of text that the vocabulary is learnt from."""
EXCERPT, EXCERPTS = 8_000, 80_000
"""Characters of one held-out document, and of all, that the evaluations during training look at."""
TOGETHER = 8192
"""Tokens that an evaluation computes at once."""

Integers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to read, and with what.

    >>> from regard.training.recipes.lm import Options
    >>> Options(mechanism="quadratic", num_kv_heads=1).context_length
    256
    """

    data: str | None = option(None, "A folder or a file of text; the Python standard library's source if not given.")
    suffix: tuple[str, ...] = option(SUFFIXES, "How the names of a folder's files end.")
    vocabulary_size: int = option(4096, "Tokens of the vocabulary, at most.")
    context_length: int = option(256, "Tokens of a row, the most that a prediction sees.", also="--context")
    embedding_dim: int = option(192, "Numbers of a token.")
    num_layers: int = option(4, "Layers.")
    num_heads: int = option(6, "Heads of an attention.")
    form: Literal["llama", "gpt2"] = option(
        "llama", "llama (rotary positions, RMSNorm, SwiGLU) or gpt2 (learned ones, LayerNorm, GELU)."
    )
    dropout: float = option(0.0, "Share of what each sub-layer adds that is dropped in training.")
    mechanism: str = option("softmax", f"Attention, one of {CHOICES}.")
    num_kv_heads: int | None = option(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )
    window: Window | None = option(None, f"{WINDOW_HELP} Here AFTER is 0. All before it if not given.")
    packed: bool | None = option(
        None,
        "Rows with pieces of several documents, kept apart; if not, one document a row. Packed if not given, unless "
        "the mechanism cannot keep documents apart.",
    )

    def __post_init__(self) -> None:
        for name, least in (("vocabulary_size", 300), ("context_length", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: expected at least {least}, got {getattr(self, name)}")
        if self.form not in ("llama", "gpt2"):
            raise ValueError(f"form: expected llama or gpt2, got {self.form!r}")
        if not self.suffix:
            raise ValueError("suffix: expected at least one, got none")
        check_causal(self.mechanism)
        apart = refusal(from_text(self.mechanism), segments(torch.zeros(1, 8, dtype=torch.long))) is None
        if self.packed and not apart:
            raise ValueError(
                f"packed: expected --no-packed with {self.mechanism}, whose documents would mix, got --packed"
            )
        object.__setattr__(self, "packed", apart if self.packed is None else self.packed)
        self.config(self.vocabulary_size)

    def config(self, vocabulary_size: int) -> DecoderConfig:
        """The model's config."""
        # SwiGLU has three matrices: two thirds of the hidden units make it as large as GELU's network.
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
    """What learns the standard library in about ten minutes on two cores."""
    return Settings(steps=3000, learning_rate=3e-3, warmup=100, batch_tokens=1024, weight_decay=0.1)


def build(options: Options, folder: Path, seed: int) -> "LanguageModelling":
    """The task. `folder` gets the tokenizer and the tokens, or gives them, if it has them.

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
    train, held_out = split_documents(every)
    tokenizer = _vocabulary(train, options.vocabulary_size, folder)
    tokens = write_tokens(folder / "train.tokens", train, tokenizer)
    torch.manual_seed(seed)
    model = Decoder(options.config(tokenizer.vocabulary_size))
    model.tokenizer = tokenizer
    return LanguageModelling(options, model, tokens, held_out, seed)


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and held-out documents, by their names.

    >>> from regard.training.data.text import documents
    >>> from regard.training.recipes.lm import split_documents
    >>> train, held_out = split_documents(documents())
    >>> 0.02 < len(held_out) / (len(train) + len(held_out)) < 0.08
    True
    """
    return split(documents, key=lambda document: document.name, share=HELD_OUT)


def _vocabulary(train: Sequence[Document], size: int, folder: Path) -> Tokenizer:
    """The tokenizer of a folder, or one learnt from some of the training documents, which it gets."""
    if not (folder / "tokenizer_config.json").exists():  # the one that is written last
        with tempfile.TemporaryDirectory() as aside:
            train_bpe(_sample(train), size).save(aside)
            path = Path(aside, "tokenizer.json")
            # A prompt is text alone: whether it ends is for the model to say.
            path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "post_processor": None}), "utf-8")
            _read(Path(aside)).save(folder)
    return _read(folder)


def _read(folder: Path) -> Tokenizer:
    found = Tokenizer.from_folder(folder)
    if found is None:
        raise CheckpointError(f"{folder}: expected a tokenizer.json beside tokenizer_config.json, got none")
    return found


def _sample(train: Sequence[Document]) -> Iterator[str]:
    room = SAMPLE
    for one in sorted(train, key=lambda one: chance(one.name)):
        if room > 0:
            yield one.text
            room -= one.stop - one.start


class LanguageModelling(Task):
    """Documents, and the decoder that learns to continue them."""

    name: ClassVar[str] = "lm"
    model: Decoder

    def __init__(
        self, options: Options, model: Decoder, tokens: Tokens, held_out: Sequence[Document], seed: int
    ) -> None:
        self.options, self.model, self.tokens, self.held_out, self.seed = options, model, tokens, held_out, seed
        self.pieces = None if options.packed else _Pieces(tokens.starts, options.context_length)
        self.excerpts = _excerpts(held_out)

    def sizes(self) -> Sequence[int]:
        if self.pieces is not None:
            return self.pieces.lengths.tolist()
        return [self.options.context_length] * math.ceil(len(self.tokens.ids) / self.options.context_length)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        chosen = np.asarray(indices)
        return self._packed(chosen, epoch) if self.pieces is None else self._single(self.pieces, chosen, epoch)

    def _packed(self, indices: Integers, epoch: int) -> Batch:
        """Rows of all documents in a circle, cut at other places in each epoch."""
        context, ids = self.options.context_length, self.tokens.ids
        shift = np.random.default_rng((self.seed, epoch)).integers(context)
        place = (indices[:, None] * context + shift + np.arange(context + 1)) % len(ids)
        table = ids[place].astype(np.int64)
        tokens, targets = table[:, :-1], table[:, 1:]
        batch = {"tokens": tokens, "targets": np.where(targets == START, IGNORED, targets)}
        if (tokens[:, 1:] == START).any():
            batch["segments"] = (tokens == START).cumsum(1)
        return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in batch.items()}

    def _single(self, pieces: "_Pieces", indices: Integers, epoch: int) -> Batch:
        """Rows of one document each, filled up on the right."""
        starts, lengths, known = pieces.cut(indices, np.random.default_rng((self.seed, epoch)).random())
        tokens = pad_ranges(self.tokens.ids, starts, lengths, filling=PAD)
        targets = pad_ranges(self.tokens.ids, starts + 1, lengths, filling=IGNORED)
        targets[np.arange(targets.shape[1]) < known[:, None]] = IGNORED
        batch = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
        return batch if (lengths == lengths.max()).all() else {**batch, "lengths": torch.from_numpy(lengths)}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": int((batch["targets"] != IGNORED).sum())}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {"loss": _nats(model, batch)}

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss, perplexity and bits per byte of excerpts of held-out documents: the first `EXCERPT` characters of
        each, `EXCERPTS` in all, in pieces of a context. `bits_per_byte` measures all of the text."""
        nats, count, size = _measured(model, self.excerpts, self.options.context_length)
        return {
            "loss": nats / count,
            "perplexity": math.exp(min(nats / count, 700)),
            "bits_per_byte": nats / math.log(2) / size,
        }

    def card(self) -> Card:
        given = self.options.data
        text = "the Python standard library's source" if given is None else Path(given).name
        known = len(self.tokens.starts) - 1
        rows = "packed" if self.options.packed else "one document each"
        return Card(
            data=f"{known:,} documents of {text}, {len(self.tokens.ids):,} tokens, in rows of "
            f"{self.options.context_length} ({rows}); {len(self.held_out):,} others held out.",
            use="Continues text like that it was trained on: `regard generate`.",
        )

    def samples(self, model: Model) -> list[str]:
        tokenizer = _tokenizer(model)
        texts = ["def", "class"] if self.options.data is None else self.excerpts[:2]
        prompts = [plain_ids(tokenizer, text)[: min(8, self.options.context_length // 2)] for text in texts]
        found = [generate(model, [one], max_new_tokens=48, temperature=0.7, seed=self.seed)[0] for one in prompts]
        return [tokenizer.decode([*prompt, *more.tokens]) for prompt, more in zip(prompts, found, strict=True)]


class _Pieces:
    """Documents in pieces of `context` predictions, shorter documents whole. Where two pieces overlap, the later one
    has what they share as context only, so that each prediction is made once."""

    def __init__(self, starts: Integers, context: int) -> None:
        predictions = np.diff(starts) - 1
        each = -(-predictions // context)
        document = np.repeat(np.arange(len(each)), each)
        self.context = context
        self.begin, self.predictions = starts[:-1][document], predictions[document]
        self.offset = (np.arange(len(document)) - np.repeat(each.cumsum() - each, each)) * context
        self.slack = (each * context - predictions)[document]

    @property
    def lengths(self) -> Integers:
        return np.minimum(self.predictions, self.context)

    def cut(self, indices: Integers, chance: float) -> tuple[Integers, Integers, Integers]:
        """Starts and lengths of some pieces, and how many of their predictions the pieces before them make. The cuts
        have some slack, of which they take a part."""
        offset, last = self.offset[indices], self.predictions[indices] - self.context
        shifted = offset - (chance * (self.slack[indices] + 1)).astype(np.int64)
        first, before = (np.clip(one, 0, np.maximum(0, last)) for one in (shifted, shifted - self.context))
        known = np.where(offset > 0, before + self.context - first, 0)
        return self.begin[indices] + first, self.lengths[indices], known


def bits_per_byte(model: Model, texts: Iterable[str]) -> float:
    """Bits that a model needs for each byte of UTF-8 text, exactly: all tokens are counted, and all bytes.

    Each token is predicted from half a context before it at least, or from all of its text. The first is predicted from
    [START]; that a text ends is not.

    >>> import tempfile
    >>> from regard.training.recipes import lm
    >>> sizes = {"vocabulary_size": 300, "context_length": 32, "embedding_dim": 16, "num_heads": 2, "num_layers": 1}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = (Path(folder) / "some.txt").write_text("To be, or not to be.\\n" * 100)
    ...     small = lm.Options(data=f"{folder}/some.txt", **sizes)
    ...     task = lm.build(small, Path(folder), seed=0)
    ...     0 < lm.bits_per_byte(task.model, (one.text for one in task.held_out)) < 9
    True
    """
    trained = model.training
    model.eval()
    try:
        nats, _, size = _measured(model, texts, _context(model) // 2)
    finally:
        model.train(trained)
    return nats / math.log(2) / size


@torch.no_grad()
def _measured(model: Model, texts: Iterable[str], stride: int) -> tuple[float, int, int]:
    """-log p of texts in nats, how many tokens they are, and how many bytes."""
    nats, count, size = 0.0, 0, 0

    def windows() -> Iterator[tuple[list[int], list[int]]]:
        nonlocal size
        tokenizer = _tokenizer(model)
        for text in texts:
            size += len(text.encode())
            yield from _windows([START, *plain_ids(tokenizer, text)], _context(model), stride)

    for batch in _together(windows(), max(1, TOGETHER // _context(model))):
        nats += float(_nats(model, {name: one.to(model.device) for name, one in batch.items()}))
        count += int((batch["targets"] != IGNORED).sum())
    if not count:
        raise ValueError("texts: expected some text, got none")
    return nats, count, size


def _windows(ids: list[int], context: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Inputs and targets of a text, each token a target once, at most `stride` of them in a window but the first."""
    last = len(ids) - 1 - context
    done = 0
    for start in [*range(0, last, stride), max(0, last)] if len(ids) > 1 else []:
        targets = ids[start + 1 : start + context + 1]
        known = done - start
        yield ids[start : start + len(targets)], [IGNORED] * known + targets[known:]
        done = start + len(targets)


def _together(windows: Iterator[tuple[list[int], list[int]]], size: int) -> Iterator[Batch]:
    """Windows in batches, filled up on the right."""
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


def _excerpts(held_out: Sequence[Document]) -> list[str]:
    """What evaluations during training look at."""
    found, room = [], EXCERPTS
    for one in sorted(held_out, key=lambda one: chance(one.name)):
        if room > 0:
            found.append(one.text[: min(EXCERPT, room)])
            room -= len(found[-1])
    return found


def _context(model: Model) -> int:
    return expect(Decoder, model).context_length


def _tokenizer(model: Model) -> Tokenizer:
    if model.tokenizer is None:
        raise ValueError("model: expected one with a tokenizer, got one without")
    return model.tokenizer
