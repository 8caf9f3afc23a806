"""Text classification: a pre-trained encoder with a new head (Devlin et al. 2018, 4.1), or an encoder from scratch.

    loss = -mean log p(class | text)

The embedded texts are sentences of Python's documentation; their class is an area of the standard library.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.masks import Window, padding
from regard.core.masks.text import WINDOW_HELP
from regard.core.mechanisms.text import CHOICES, from_text, lookup
from regard.models.base import Model
from regard.models.encoder import Encoder, EncoderConfig
from regard.training.data.labels import Integers, LabelledTokens, labelled, read_labelled, split_labelled
from regard.training.data.vocabulary import train_wordpiece
from regard.training.divided import divided
from regard.training.fingerprint import digest
from regard.training.initial import initial
from regard.training.recipes.started import Started, adapt_started, scratch, started, with_heads
from regard.training.settings import Settings, option
from regard.training.task import Batch, Card, Task, Totals

JUDGED = 2048
"""Texts that an evaluation uses, at most."""
FILES = ("train.npz", "validation.npz", "test.npz")
"""The tokens of a run's texts."""
TOGETHER = 64
"""Texts per batch of an evaluation."""
SHOWN = 4
"""Texts that are printed with their class after an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The texts and the encoder.

    >>> import regard as rg
    >>> from regard.training.recipes.classify import Options
    >>> Options(start="runs/bert", window=rg.Window(16, 16)).start
    'runs/bert'
    """

    data: str | None = option(None, "A table of `label TAB text` lines; areas of Python's documentation if not given.")
    validation_data: str | None = option(
        None, "A table of such lines that chooses the best model; part of --data if not given."
    )
    test_data: str | None = option(None, "A table to measure the best model with, at the end; likewise.")
    context_length: int = option(128, "Tokens of a text; longer texts are truncated.")
    dropout: float = option(0.1, "Dropout of each sub-layer's output in training.")
    mechanism: str = scratch("softmax", f"Attention, one of {CHOICES}.", changes=True)
    window: Window | None = scratch(None, f"{WINDOW_HELP} All if not given.", changes=True)
    vocabulary_size: int = scratch(4096, "Tokens of the WordPiece vocabulary, at most.")
    embedding_dim: int = scratch(128, "Embedding dimension.")
    num_layers: int = scratch(2, "Layers.")
    num_heads: int = scratch(4, "Attention heads.")
    num_kv_heads: int | None = scratch(
        None, "Key/value heads; as many as heads if not given, 1 is MQA.", also="--kv-heads"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.context_length < 8:
            raise ValueError(f"context_length: expected at least 8, got {self.context_length}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: expected at least 0 and below 1, got {self.dropout}")
        if self.mechanism is not None:
            lookup(self.mechanism)
        if self.start is None:
            self.config(self.vocabulary_size)

    def config(self, vocabulary_size: int) -> EncoderConfig:
        """The config of a model from scratch; `build` adds the classes."""
        return EncoderConfig(
            vocabulary_size=vocabulary_size,
            embedding_dim=self.embedding_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            window=self.window,
            context_length=self.context_length,
            mechanism=from_text(self.mechanism),
            padding_token=0,
        )


def settings() -> Settings:
    """Defaults that learn the embedded classes in one or two minutes on two cores; fine-tuning needs fewer steps."""
    return Settings(steps=1500, learning_rate=5e-4, warmup=100, batch_size=32)


def build(options: Options, folder: Path, seed: int) -> "Classification":
    """The task. Tokenizer and tokens are read from `folder`, or made and saved there.

    >>> import tempfile
    >>> from regard.training.recipes import classify
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = Path(folder, "own.tsv")
    ...     _ = table.write_text("".join(f"{'odd' if n % 2 else 'even'}\\tThe number {n}.\\n" for n in range(99)))
    ...     small = classify.Options(data=str(table), vocabulary_size=80, embedding_dim=16, num_heads=2, num_layers=1)
    ...     task = classify.build(small, Path(folder), seed=0)
    >>> task.model.config.class_names
    ('even', 'odd')
    """
    torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
    source = None if options.start is None else _started(options.start, options, folder)
    tokenizer = Tokenizer.from_folder(folder)
    paths = [folder / name for name in FILES]
    if tokenizer is None or not all(path.is_file() for path in paths):
        examples = labelled(None if options.data is None else Path(options.data))
        names = sorted({label for label, _ in examples})
        others = [
            None if path is None else read_labelled(Path(path), name, names)
            for name, path in (("validation_data", options.validation_data), ("test_data", options.test_data))
        ]
        parts = split_labelled(examples, *others)
        tokenizer = source.tokenizer if source is not None else None
        if tokenizer is None:
            tokenizer = train_wordpiece((text for _, text in parts[0]), options.vocabulary_size)
        length = options.context_length
        if source is not None:
            length = min(length, source.config.context_length)
        tokenizer.save(folder)
        for part, path in zip(parts, paths, strict=True):
            LabelledTokens.of(part, names, tokenizer, length).save(path)
    train, validation, test = (LabelledTokens.load(path) for path in paths)
    torch.manual_seed(seed)
    heads: dict[str, Any] = {
        "num_classes": len(train.class_names),
        "class_names": train.class_names,
        "dropout": options.dropout,
    }
    if source is None:
        config = replace(options.config(tokenizer.vocabulary_size), pooler=True, **heads)
        model = initial(lambda: Encoder(config), seed)
    else:
        model = with_heads(source, masked_words=False, next_sentence=False, inverted_sentence=False, **heads)
        adapt_started(model, options, source.state_dict(), seed)
    model.tokenizer = tokenizer
    return Classification(model, train, validation, test, options)


def _started(start: str, options: Options, folder: Path) -> Encoder:
    """The encoder to start from, with the options' attention."""
    source = started(Encoder, start, options.mechanism, folder)
    if source.tokenizer is None or source.tokenizer.classification is None:
        raise ValueError(f"from: expected an encoder with a tokenizer that puts [CLS] first, got {start}")
    if options.window is not None:
        source.config = replace(source.config, window=options.window)
    return source


class Classification(Task):
    """Texts, and the encoder that learns their classes."""

    name: ClassVar[str] = "classify"
    model: Encoder

    def __init__(
        self, model: Encoder, train: LabelledTokens, validation: LabelledTokens, test: LabelledTokens, options: Options
    ) -> None:
        self.model, self.train, self.options = model, train, options
        self.validation, self.tested = validation, test
        self.judged = np.arange(len(validation.labels))[:: -(-len(validation.labels) // JUDGED)]
        self.commonest = int(np.bincount(train.labels, minlength=len(train.class_names)).argmax())

    def sizes(self) -> Integers:
        return self.train.sizes

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return {name: torch.from_numpy(values) for name, values in self.train.batch(indices).items()}

    def fingerprint(self) -> str:
        parts = ((part.tokens, part.starts, part.labels) for part in (self.train, self.validation, self.tested))
        return digest(self.train.class_names, *(array for part in parts for array in part))

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": len(batch["labels"])}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {"loss": F.cross_entropy(self._logits(model, batch), batch["labels"], reduction="sum")}

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        mask = padding(batch["lengths"])
        return self.model.classify(model(batch["tokens"], None, mask), mask)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss, accuracy and macro F1 on texts to validate with, and the accuracy of always the most frequent class."""
        return self._results(model, self.validation, self.judged)

    def test(self, model: Model) -> dict[str, float]:
        """The same of all texts to test with."""
        chosen = np.arange(len(self.tested.labels))
        return self._results(model, self.tested, chosen) if len(chosen) else {}

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all texts of files."""
        names, tokenizer = self.train.class_names, self.model.tokenizer
        assert tokenizer is not None
        examples = [example for path in paths for example in read_labelled(Path(path), names=names)]
        length = min(self.options.context_length, self.model.config.context_length)
        texts = LabelledTokens.of(examples, names, tokenizer, length)
        return self._results(model, texts, np.arange(len(texts.labels)))

    def _results(self, model: Model, texts: LabelledTokens, chosen: Integers) -> dict[str, float]:
        order = chosen[np.argsort(texts.sizes[chosen], kind="stable")]

        def judged(start: int) -> tuple[float, Integers]:
            rows = texts.batch(order[start : start + TOGETHER].tolist())
            batch = {name: torch.from_numpy(values).to(model.device) for name, values in rows.items()}
            logits = self._logits(model, batch)
            loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
            return float(loss), logits.argmax(-1).cpu().numpy()

        losses, guesses = zip(*divided(judged, range(0, len(order), TOGETHER)), strict=True)
        labels, predictions = texts.labels[order], np.concatenate(guesses)
        return {
            "loss": sum(losses) / len(order),
            "accuracy": float((predictions == labels).mean()),
            "baseline": float((labels == self.commonest).mean()),
            "macro F1": macro_f1(labels, predictions),
        }

    def card(self) -> Card:
        source = Path(self.options.data).name if self.options.data else "Sentences of Python's documentation, by area"
        begun = f" Fine-tuned from {self.options.start}." if self.options.start else ""
        return Card(
            data=f"{source}: {len(self.train.labels):,} texts of {len(self.train.class_names)} classes "
            f"({', '.join(self.train.class_names)}); {len(self.validation.labels):,} to validate with, "
            f"{len(self.tested.labels):,} to test with.{begun}",
            use="Classes of texts like these: `regard classify RUN TEXT`.",
        )

    def samples(self, model: Model) -> list[str]:
        """Some held-out texts with the model's predictions."""
        chosen = self.judged[:: -(-len(self.judged) // SHOWN)].tolist()
        batch = {
            name: torch.from_numpy(values).to(model.device) for name, values in self.validation.batch(chosen).items()
        }
        guesses = self._logits(model, batch).argmax(-1).tolist()
        assert self.model.tokenizer is not None
        lines = []
        for row, length, label, guess in zip(batch["tokens"], batch["lengths"], batch["labels"], guesses, strict=True):
            guessed, true = self.train.class_names[guess], self.train.class_names[int(label)]
            text = self.model.tokenizer.decode(row[: int(length)])
            lines.append(f"{guessed}{'' if guessed == true else f', not {true}'}: {text}")
        return lines


def macro_f1(labels: Integers, guesses: Integers) -> float:
    """The mean over classes of 2 · hits / (examples + guesses); classes without examples and guesses are left out.

    >>> import numpy as np
    >>> from regard.training.recipes.classify import macro_f1
    >>> macro_f1(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1]))
    0.38888888888888884
    """
    size = int(max(labels.max(), guesses.max())) + 1
    hits = np.bincount(labels[labels == guesses], minlength=size)
    both = np.bincount(labels, minlength=size) + np.bincount(guesses, minlength=size)
    return float((2 * hits[both > 0] / both[both > 0]).mean())
