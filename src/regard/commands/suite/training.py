"""Training against plain loops: over `torch.nn.Transformer` on the same ragged batches, and as nanoGPT's."""

import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.commands.suite.harness import Bench, Result
from regard.commands.suite.plain_decoder import PlainDecoder, plain_steps
from regard.core.masks import padding
from regard.models.base import Model
from regard.models.decoder import Decoder
from regard.models.layers.positions import sinusoidal
from regard.models.transformer import Transformer, TransformerConfig
from regard.training import Batch, Report, Settings, Task, Totals, train
from regard.training.data.text import Tokens
from regard.training.recipes import lm

WIDTH, LAYERS, HEADS, HIDDEN, WORDS = 256, 3, 4, 1024, 4000
STEPS, ROWS, SHORTEST, LONGEST = 10, 32, 5, 60
DECODER_STEPS = 20


class RandomPairs(Task):
    """Pairs of random token sequences of different lengths, with the shapes of a translation task."""

    name: ClassVar[str] = "random pairs"

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (STEPS * ROWS,)
        self.lengths = torch.randint(SHORTEST, LONGEST + 1, (2, *shape), generator=generator)
        self.tokens = torch.randint(1, WORDS, (2, *shape, LONGEST), generator=generator)
        torch.manual_seed(0)
        self.model = Transformer(
            TransformerConfig(
                vocabulary_size=WORDS, embedding_dim=WIDTH, num_layers=LAYERS, num_heads=HEADS, hidden_dim=HIDDEN
            )
        )

    def sizes(self) -> Sequence[int]:
        return [1] * (STEPS * ROWS)  # equal sizes, so that examples are not sorted by length

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        lengths = self.lengths[:, indices]
        source, target = (
            rows[:, : int(most.max())] for rows, most in zip(self.tokens[:, indices], lengths, strict=True)
        )
        return {"source": source, "source_lengths": lengths[0], "target": target, "target_lengths": lengths[1]}

    def counts(self, batch: Batch) -> dict[str, int]:
        return {"loss": int((batch["target_lengths"] - 1).sum())}

    def totals(self, model: nn.Module, batch: Batch) -> Totals:
        target, lengths = batch["target"], batch["target_lengths"] - 1
        at = torch.arange(target.shape[1] - 1) < lengths[:, None]
        logits = model(batch["source"], target[:, :-1], padding(batch["source_lengths"]), padding(lengths), at=at)
        return {"loss": F.cross_entropy(logits, target[:, 1:][at], reduction="sum")}

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"loss": 0.0}


class Plain(nn.Module):
    """The same model, built from torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, dropout=0.0, batch_first=True)
        self.positions = sinusoidal(torch.arange(LONGEST), WIDTH)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch."""
        source, target = batch["source"], batch["target"]
        source_hidden = torch.arange(source.shape[1]) >= batch["source_lengths"][:, None]
        target_hidden = torch.arange(1, target.shape[1]) >= batch["target_lengths"][:, None]
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, dtype=torch.bool)
        out = self.inner(
            self._embed(source),
            self._embed(target[:, :-1]),
            tgt_mask=causal,
            src_key_padding_mask=source_hidden,
            memory_key_padding_mask=source_hidden,
            tgt_key_padding_mask=target_hidden,
            tgt_is_causal=True,
        )
        logits = out @ self.embedding.weight.T
        labels = target[:, 1:].masked_fill(target_hidden, -100)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(WIDTH) + self.positions[: tokens.shape[1]]


def _ours() -> float:
    with tempfile.TemporaryDirectory() as folder, torch.enable_grad():
        settings = Settings(steps=STEPS, batch_size=ROWS, evaluate_every=STEPS)
        return train(RandomPairs(), settings, folder).seconds


def _theirs() -> float:
    task, model = RandomPairs(), Plain().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    began = time.perf_counter()
    with torch.enable_grad():
        for step in range(STEPS):
            loss = model(task.batch(list(range(step * ROWS, (step + 1) * ROWS)), 0))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - began


def _ragged(bench: Bench) -> Result:
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(bench.rounds + 1):
        for slot, run in zip(times, (_ours, _theirs), strict=True):
            seconds = run()
            if turn:
                slot.append(seconds)
    ours, theirs = statistics.median(times[0]), statistics.median(times[1])
    tokens = int(RandomPairs().lengths.sum())
    note = f"{tokens / ours:,.0f} tokens/s, the peer {tokens / theirs:,.0f}"
    return Result(bench.name, bench.title, bench.peer, bench.goal, theirs / ours, ours * 1e3, theirs * 1e3, note=note)


class RandomText(lm.LanguageModelling):
    """The language model's default sizes and batches, over documents of random tokens."""

    def __init__(self) -> None:
        options, generator = lm.Options(), np.random.default_rng(0)
        starts = np.append(0, generator.integers(1000, 8000, size=64).cumsum())
        ids = generator.integers(lm.END + 1, options.vocabulary_size, size=starts[-1]).astype(np.uint16)
        ids[starts[:-1]] = lm.START
        torch.manual_seed(0)
        super().__init__(options, Decoder(options.config(options.vocabulary_size)), Tokens(ids, starts, b""), [], [], 0)

    def evaluate(self, model: Model) -> dict[str, float]:
        return {"loss": 0.0}

    def samples(self, model: Model) -> list[str]:
        return []


def our_decoder() -> float:
    """Seconds of a step of the language model, as the recipe trains it by default."""
    ends: list[float] = []

    def watch(report: Report) -> None:
        if report.kind == "step":
            ends.append(time.perf_counter())

    settings = Settings(**{**lm.settings().to_json(), "steps": DECODER_STEPS + 1, "evaluate_every": 10**6})
    with tempfile.TemporaryDirectory() as folder:
        train(RandomText(), settings, folder, watch=watch)
    return _median(ends[:-1])  # the last step ends with an evaluation and a checkpoint


def plain_decoder() -> float:
    """Seconds of a step of a plain loop over a plain decoder of equal size, on the same tokens."""
    text, options = RandomText(), lm.Options()
    context, batch = options.context_length, lm.settings().batch_tokens or 0
    model = PlainDecoder(
        vocabulary_size=options.vocabulary_size, width=options.embedding_dim, layers=options.num_layers,
        heads=options.num_heads, context=context,
    )  # fmt: skip
    loop = plain_steps(model, text.tokens.ids, steps=DECODER_STEPS, rows=batch // context, rate=1e-3, warmup=10, seed=0)
    return _median([time.perf_counter() for _ in loop])


def _median(ends: Sequence[float]) -> float:
    return statistics.median(later - earlier for earlier, later in pairwise(ends))


def _decoder(bench: Bench) -> Result:
    """Each side has a process of its own: how long a step takes depends on how a process keeps its memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as first, ProcessPoolExecutor(1, context) as second:
        turns: list[tuple[ProcessPoolExecutor, Callable[[], float]]] = [(first, our_decoder), (second, plain_decoder)]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(bench.rounds + 1):
            for slot, (pool, run) in zip(times, turns, strict=True):
                seconds = pool.submit(run).result()
                if turn:
                    slot.append(seconds)
    ours, theirs = statistics.median(times[0]), statistics.median(times[1])
    tokens = lm.settings().batch_tokens or 0
    note = f"{tokens / ours:,.0f} tokens/s, the peer {tokens / theirs:,.0f}"
    return Result(bench.name, bench.title, bench.peer, bench.goal, theirs / ours, ours * 1e3, theirs * 1e3, note=note)


BENCHES: tuple[Bench, ...] = (
    Bench("train-ragged", f"training an encoder-decoder, {STEPS} steps of {ROWS} pairs of {SHORTEST}…{LONGEST} tokens",
          "a plain loop over torch.nn.Transformer", 1.2, rounds=5, special=_ragged),
    Bench("train-decoder", "training a decoder of 2.6M parameters, a step of 1,024 tokens",
          "a plain loop as nanoGPT's", 1.0, rounds=5, special=_decoder),
)  # fmt: skip
