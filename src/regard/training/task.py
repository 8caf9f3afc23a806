"""What the training loop asks of a recipe.

    loss = Σ over terms of  total(term) / count(term)

A recipe returns totals (sums over predictions) and counts (numbers of predictions). The loop divides by the counts of
the whole step, summed over micro-batches and processes, so that every prediction has the same weight: a step is the
same on one device, with gradient accumulation, or on many machines.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from regard.training.batches import Integers
from regard.training.fingerprint import of_attributes

Batch = dict[str, Tensor]
"""Tensors by name, whose first dimension is the batch; the loop moves them to the device."""
Totals = dict[str, Tensor]
"""Sums over predictions by loss term: scalars with gradients."""

IGNORED = -100
"""The target at positions without a prediction: the `ignore_index` of torch's cross-entropy."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a model card says beyond results, in sentences.

    >>> from regard.training import Card
    >>> Card(data="60,000 images of clothes.").use
    'An experiment.'
    """

    data: str = "Not described."
    use: str = "An experiment."


class Task(ABC):
    """A model, its examples and what it is to learn.

    Methods depend on their arguments alone: a run that is resumed makes the same batches again.

    >>> import tempfile, regard as rg, torch
    >>> from torch.nn.functional import cross_entropy
    >>> from regard.training import Settings, Task, train
    >>> class Counting(Task):
    ...     name = "counting"
    ...
    ...     def __init__(self):
    ...         sizes = {"vocabulary_size": 9, "embedding_dim": 16, "num_layers": 1, "num_heads": 2}
    ...         self.model = rg.Decoder(rg.DecoderConfig(**sizes))
    ...         self.tokens = (torch.arange(40)[:, None] + torch.arange(6)) % 9  # (40, 6)
    ...
    ...     def sizes(self):
    ...         return [5] * 40
    ...
    ...     def batch(self, indices, epoch):
    ...         return {"tokens": self.tokens[list(indices)]}  # (B, 6)
    ...
    ...     def counts(self, batch):
    ...         return {"loss": batch["tokens"][:, 1:].numel()}
    ...
    ...     def totals(self, model, batch):
    ...         logits = model(batch["tokens"][:, :-1])  # (B, 5, 9)
    ...         return {"loss": cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="sum")}
    ...
    ...     def evaluate(self, model):
    ...         return {"loss": float(self.totals(model, self.batch(range(9), 0))["loss"]) / 45}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     report = train(Counting(), Settings(steps=30, batch_size=8, warmup=5, learning_rate=1e-2), folder)
    ...     type(rg.load(f"{folder}/model")).__name__, report.results["loss"] < 1
    ('Decoder', True)
    """

    name: ClassVar[str]
    model: nn.Module
    """One of this library's models, or any module: its weights are loaded by `rg.load(folder, model=…)`."""
    watched: ClassVar[tuple[str, Literal["least", "most"]]] = ("loss", "least")
    """Which result of `evaluate` decides what the best model is and when to stop early, and which way is better."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss. Held-out losses have none, and the curves say so."""

    @abstractmethod
    def sizes(self) -> Sequence[int] | Integers:
        """How many tokens each example has, as a list or as an array; examples of similar size are batched together."""

    @abstractmethod
    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Some examples as tensors. What is random about an example (masked words, shifted images) depends on the
        task's seed, the epoch and the example's index only, never on the rest of the batch."""

    @abstractmethod
    def counts(self, batch: Batch) -> dict[str, int]:
        """How many predictions each term of the loss has."""

    @abstractmethod
    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        """The terms of the loss, summed over predictions. `model` is this task's model, perhaps wrapped (DDP, FSDP):
        call it."""

    @abstractmethod
    def evaluate(self, model: Any) -> dict[str, float]:
        """Results on validation examples, `watched` among them: they choose the best model. The model is in eval mode,
        without gradients."""

    def test(self, model: Any) -> dict[str, float]:
        """Results on test examples, measured once, at the end, of the best model; none if there are no such examples.
        They choose nothing."""
        return {}

    def measure(self, model: Any, paths: Sequence[str]) -> dict[str, float]:
        """Results on the examples of files: `regard evaluate RUN --data FILE`."""
        raise ValueError(f"data: expected a task that reads files by `measure`, got {type(self).__name__}")

    def fingerprint(self) -> str:
        """A hash of all data: a run refuses to resume with other data. By default it covers sizes, some examples, and
        the attributes that hold data (tensors, arrays, lists, dicts), those that `evaluate` uses among them. For data
        elsewhere return `regard.training.digest(…)` of what tells it apart."""
        return of_attributes(self)

    def card(self) -> Card:
        """What the model card says beyond results."""
        return Card()

    def samples(self, model: Any) -> list[str]:
        """A few lines to print after an evaluation: translations, continuations."""
        return []
