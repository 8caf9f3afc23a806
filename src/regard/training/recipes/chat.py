"""Chat: a pre-trained decoder learns to answer as in conversations, which its own template writes.

    loss = mean over the tokens of answers of  -log p(token | the conversation before it)

With `--lora-rank` the weights stay as they are, and adapters are trained. The embedded conversations are short
questions about attention with short answers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.checkpoints.tokenizer import Tokenizer
from regard.core.masks import padding
from regard.core.mechanisms.text import CHOICES
from regard.inference.generation import generate
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.training.batches import Integers
from regard.training.data.chats import Chat, ChatTokens, chats, question
from regard.training.data.held_out import parts
from regard.training.fingerprint import digest
from regard.training.recipes import check_causal
from regard.training.recipes.started import Started, adapt_started, started
from regard.training.settings import Settings, option
from regard.training.task import IGNORED, Batch, Card, Task, Totals

TOGETHER = 8
"""Conversations per batch of an evaluation."""
SHOWN = 2
"""Conversations that are answered after an evaluation."""
SEEN = 60
"""Characters of their questions that are printed with it."""
FILES = ("train.npz", "validation.npz", "test.npz")


@dataclass(frozen=True, kw_only=True)
class Options(Started):
    """The conversations, and the model that learns them.

    >>> from regard.training.recipes.chat import Options
    >>> Options(lora_rank=8).start
    'smollm2'
    """

    start: str | None = option("smollm2", "A run, a checkpoint or a name of `regard models` that has a chat template.")
    data: str | None = option(
        None, 'A file with a conversation on each line, {"messages": [{"role": …, "content": …}, …]}; '
        "short answers about attention if not given."
    )  # fmt: skip
    validation_data: str | None = option(None, "A file that chooses the best model; part of --data if not given.")
    test_data: str | None = option(None, "A file to measure the best model with, at the end; likewise.")
    context_length: int = option(512, "Tokens of a conversation; longer ones are truncated.", also="--context")
    mechanism: str | None = option(None, f"Attention, one of {CHOICES}. The start's if not given.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start is None:
            raise ValueError("start: expected a model to fine-tune, got none")
        if self.context_length < 2:
            raise ValueError(f"context_length: expected at least 2, got {self.context_length}")
        if self.mechanism is not None:
            check_causal(self.mechanism)


def settings() -> Settings:
    """Defaults that learn the embedded conversations in minutes on two cores."""
    return Settings(steps=60, learning_rate=5e-4, warmup=10, batch_size=8)


def build(options: Options, folder: Path, seed: int) -> "Conversation":
    """The task. The model and the tokens are read from `folder`, or made and saved there.

    >>> import tempfile
    >>> import regard as rg
    >>> from regard.training.data.vocabulary import train_bpe
    >>> from regard.training.recipes import chat
    >>> tokenizer = train_bpe(["Who? What? Where?"], 300)
    >>> tokenizer.chat_template = "{% for m in messages %}{{ m.content }}[END]{% endfor %}"
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=300, embedding_dim=16, num_layers=1, num_heads=2))
    >>> model.tokenizer = tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     start = str(rg.save(model, f"{folder}/model"))
    ...     task = chat.build(chat.Options(start=start, lora_rank=2), Path(folder), seed=0)
    >>> len(task.train.sizes), sorted(task.batch([0], epoch=0))
    (83, ['lengths', 'targets', 'tokens'])
    """
    assert options.start is not None
    torch.manual_seed(seed)  # a user's mechanism may draw random numbers when it is made
    model = started(Decoder, options.start, options.mechanism, folder)
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise ValueError(f"from: expected a model whose tokenizer has a chat template, got {options.start}")
    most = model.context_length
    if options.context_length > most:
        raise ValueError(f"context_length: expected at most the {most} of the model, got {options.context_length}")
    paths = [folder / name for name in FILES]
    if not all(path.is_file() for path in paths):
        for name, part, path in zip(("data", "validation_data", "test_data"), _parts(options), paths, strict=True):
            tokens = _tokens(model, part, options.context_length)
            if part and not len(tokens.sizes):
                raise ValueError(f"{name}: expected answers within {options.context_length} tokens, got none")
            tokens.save(path)
    train, validation, test = (ChatTokens.load(path) for path in paths)
    adapt_started(model, options, model.state_dict(), seed)
    return Conversation(options, model, train, validation, test)


def _parts(options: Options) -> tuple[list[Chat], list[Chat], list[Chat]]:
    """Conversations to learn from, to validate with and to test with, split by their questions."""
    every = chats(None if options.data is None else Path(options.data))
    others = [
        None if path is None else chats(Path(path), name)
        for name, path in (("validation_data", options.validation_data), ("test_data", options.test_data))
    ]
    return parts(every, question, *others)


def _tokens(model: Decoder, part: Sequence[Chat], length: int) -> ChatTokens:
    tokenizer = _tokenizer(model)
    ends = {token for token in (tokenizer.eos, *model.config.end_tokens) if token is not None}
    return ChatTokens.of(part, tokenizer, length, ends)


class Conversation(Task):
    """Conversations, and the decoder that learns their answers."""

    name: ClassVar[str] = "chat"
    model: Decoder

    def __init__(
        self, options: Options, model: Decoder, train: ChatTokens, validation: ChatTokens, test: ChatTokens
    ) -> None:
        self.options, self.model = options, model
        self.train, self.validation, self.tested = train, validation, test

    def sizes(self) -> Integers:
        return self.train.sizes

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        return _tensors(self.train, indices)

    def fingerprint(self) -> str:
        every = (self.train, self.validation, self.tested)
        return digest(*(array for part in every for array in vars(part).values()))

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": int((batch["targets"] != IGNORED).sum())}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        return {"loss": F.cross_entropy(*_predictions(model, batch), reduction="sum")}

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and perplexity of the tokens of answers to validate with, and how many of them are the likeliest."""
        return _results(model, self.validation)

    def test(self, model: Model) -> dict[str, float]:
        """The same of the answers to test with."""
        return _results(model, self.tested) if len(self.tested.sizes) else {}

    def measure(self, model: Model, paths: Sequence[str]) -> dict[str, float]:
        """The same of all conversations of files."""
        every = [chat for path in paths for chat in chats(Path(path))]
        return _results(model, _tokens(self.model, every, self.options.context_length))

    def card(self) -> Card:
        source = Path(self.options.data).name if self.options.data else "Short answers about attention"
        trained, validated, tested = (len(part.sizes) for part in (self.train, self.validation, self.tested))
        return Card(
            data=f"{source}: {trained:,} conversations with {int(self.train.learned.sum()):,} tokens of answers; "
            f"{validated:,} others to validate with, {tested:,} to test with. Fine-tuned from {self.options.start}.",
            use="Answers like those it was trained on: `regard chat RUN`.",
        )

    def samples(self, model: Model) -> list[str]:
        """The beginnings of conversations to validate with, and the model's answers."""
        tokenizer, part = _tokenizer(self.model), self.validation
        lines = []
        for start, end in zip(part.starts[:SHOWN], part.starts[1:], strict=False):
            prompt = part.tokens[start : start + part.learned[start:end].argmax()].tolist()
            answer = str(generate(model, [prompt], max_new_tokens=48)[0])
            asked = " ".join(tokenizer.decode(prompt).split())[-SEEN:]
            lines.append(f"{asked} → {' '.join(answer.split())}")
        return lines


def _results(model: Model, part: ChatTokens) -> dict[str, float]:
    loss, right, count = 0.0, 0, 0
    order = np.argsort(part.sizes, kind="stable")
    for start in range(0, len(order), TOGETHER):
        rows = _tensors(part, order[start : start + TOGETHER].tolist())
        logits, targets = _predictions(model, {name: tensor.to(model.device) for name, tensor in rows.items()})
        loss += float(F.cross_entropy(logits, targets, reduction="sum"))
        right += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return {"loss": loss / count, "perplexity": math.exp(min(loss / count, 700)), "accuracy": right / count}


def _tensors(part: ChatTokens, indices: Sequence[int]) -> Batch:
    return {name: torch.from_numpy(values) for name, values in part.batch(indices).items()}


def _predictions(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits (N, D) and targets (N,) of a batch's learned tokens; other logits are not computed."""
    at = batch["targets"] != IGNORED
    logits = model(batch["tokens"], padding(batch["lengths"]), at=at)
    return logits.float() if logits.dtype.itemsize < 4 else logits, batch["targets"][at]


def _tokenizer(model: Model) -> Tokenizer:
    assert model.tokenizer is not None
    return model.tokenizer
