"""How a run is trained: everything that is not the task."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

PRECISIONS = ("float32", "float64", "bfloat16")
SCHEDULES = ("cosine", "inverse_root", "constant")


def option(default: Any, help: str, *, also: str | None = None, fixed: bool = False) -> Any:
    """A dataclass field with its `--help` text and, with `also`, a second spelling of its flag. A `fixed` setting
    cannot change when a run resumes.

    >>> from dataclasses import dataclass, fields
    >>> from regard.training.settings import option
    >>> @dataclass
    ... class Options:
    ...     num_layers: int = option(2, "Layers of the encoder.")
    >>> Options().num_layers, fields(Options)[0].metadata["help"]
    (2, 'Layers of the encoder.')
    """
    return field(default=default, metadata={"help": help, "also": also, "fixed": fixed})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is trained: steps, learning rate, batch size. Checked when it is made.

    >>> from regard.training import Settings
    >>> settings = Settings(steps=1000, learning_rate=3e-4, batch_tokens=4096)
    >>> Settings(**settings.to_json()) == settings
    True
    """

    steps: int = option(1000, "Steps to train.")
    learning_rate: float = option(1e-3, "The highest learning rate, reached after the warm-up.")
    warmup: int = option(100, "Steps over which the learning rate rises.")
    schedule: Literal["cosine", "inverse_root", "constant"] = option(
        "cosine", "The learning rate after the warm-up: half a cosine, 1/√step as in Vaswani et al., or constant."
    )
    final_rate: float = option(0.05, "Where the cosine ends, as a fraction of the highest learning rate.")
    batch_tokens: int | None = option(None, "Tokens per step, padding included.", fixed=True)
    batch_size: int | None = option(None, "Examples per step; instead of --batch-tokens.", fixed=True)
    accumulate: int = option(1, "Micro-batches per step, to use less memory. The step stays the same.")
    weight_decay: float = option(0.01, "Weight decay of matrices; norms and biases have none.")
    beta1: float = option(0.9, "AdamW's decay of the mean gradient.")
    beta2: float = option(0.98, "AdamW's decay of the mean squared gradient.")
    clip: float | None = option(1.0, "The largest gradient norm; longer gradients are scaled down to it.")
    precision: Literal["float32", "float64", "bfloat16"] = option(
        "float32", "The dtype of matrix products; bfloat16 keeps weights in float32.", fixed=True
    )
    ema: float | None = option(
        None, "Evaluate and keep the moving average of the weights, of this decay per step, like 0.999.", fixed=True
    )
    workers: int = option(0, "Processes that make batches ahead; 0: each batch is made when its step needs it.")
    recompute: bool = option(False, "Recompute activations of blocks in the backward pass: less memory.")
    compile: bool = option(False, "Compile the model with torch.compile.")
    evaluate_every: int | None = option(None, "Steps between evaluations; a tenth of the run if not given.")
    save_every: int | None = option(None, "Steps between checkpoints; those between evaluations if not given.")
    keep: int = option(2, "How many checkpoints to keep.")
    patience: int | None = option(None, "Stop early after this many evaluations without a better result.")
    wandb: bool = option(False, "Log to Weights & Biases, too: offline, in the run's folder wandb/.")
    seed: int = option(0, "Seed of weights, the order of examples and everything else that is random.", fixed=True)

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "keep"):
            _at_least(name, getattr(self, name), 1)
        for name in ("warmup", "workers", "seed"):
            _at_least(name, getattr(self, name), 0)
        for name in ("batch_tokens", "batch_size", "evaluate_every", "save_every", "patience"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        if (self.batch_tokens is None) == (self.batch_size is None):
            raise ValueError(
                "batch_tokens: expected either this or batch_size, "
                f"got batch_tokens = {self.batch_tokens}, batch_size = {self.batch_size}"
            )
        for name, choices in (("schedule", SCHEDULES), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        for name, low, high in (
            ("learning_rate", 0, 100),
            ("final_rate", 0, 1),
            ("weight_decay", 0, 100),
            ("beta1", 0, 1),
            ("beta2", 0, 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}: expected {low} to {high}, got {getattr(self, name)}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema: expected a decay above 0 and below 1, got {self.ema}")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"clip: expected a norm above 0, got {self.clip}")

    @property
    def between_evaluations(self) -> int:
        return self.evaluate_every or max(1, self.steps // 10)

    @property
    def between_checkpoints(self) -> int:
        return self.save_every or self.between_evaluations

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)


def _at_least(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
