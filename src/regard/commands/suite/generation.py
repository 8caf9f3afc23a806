"""Generation against transformers, on the same real weights."""

import pydoc_data.topics
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints import load
from regard.commands.suite.harness import Bench, Pair, Result, interleaved
from regard.commands.suite.models import peer_decoder
from regard.inference.generation import generate
from regard.models.quantized import quantized

NEW = 32
"""New tokens per prompt."""


def _prompts(count: int, shortest: int, longest: int) -> list[list[int]]:
    lengths = torch.linspace(shortest, longest, count).long().tolist()
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(100, 49000, (length,), generator=generator).tolist() for length in lengths]


def _theirs(model: Any, prompts: list[list[int]], new: int = NEW) -> Tensor:
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    kept = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": new, "pad_token_id": 0}
    return model.generate(tokens, attention_mask=kept, **options)[:, longest:]


def _ours(model: Any, prompts: list[list[int]], new: int = NEW) -> Tensor:
    return torch.tensor([generated.tokens for generated in generate(model, prompts, max_new_tokens=new)])


def _endless(model: Any) -> Any:
    """The model without end tokens, so that both sides generate the same number of tokens."""
    model.tokenizer, model.config = None, replace(model.config, end_tokens=())
    return model


def _pair(count: int, shortest: int, longest: int) -> Pair:
    prompts = _prompts(count, shortest, longest)
    ours, theirs = _endless(load("smollm2")), peer_decoder()
    return Pair(lambda: _ours(ours, prompts), lambda: _theirs(theirs, prompts), tolerance=0.0)


def _first() -> Pair:
    """The time to the first token after a prompt of 256 tokens."""
    prompts = _prompts(1, 256, 256)
    ours, theirs = _endless(load("smollm2")), peer_decoder()
    return Pair(lambda: _ours(ours, prompts, 1), lambda: _theirs(theirs, prompts, 1), tolerance=0.0)


def _int8(bench: Bench) -> Result:
    """int8 weights against the peer's float32 weights, and how often int8 and float32 predict the same token."""
    prompts = _prompts(1, 64, 64)
    plain, theirs = _endless(load("smollm2")), peer_decoder()
    ours = quantized(plain)
    ours_seconds, peer_seconds = interleaved(
        [lambda: _ours(ours, prompts), lambda: _theirs(theirs, prompts)], bench.rounds
    )
    tokenizer = load("smollm2").tokenizer
    assert tokenizer is not None
    text = torch.tensor([tokenizer.encode(pydoc_data.topics.topics["class"])[:512]])
    with torch.inference_mode():
        same = (ours(text).argmax(-1) == plain(text).argmax(-1)).float().mean().item()
    note = f"same next token at {same:.1%} of {text.shape[1]} positions"
    return Result(
        bench.name,
        bench.title,
        bench.peer,
        bench.goal,
        peer_seconds / ours_seconds,
        ours_seconds * 1e3,
        peer_seconds * 1e3,
        note=note,
    )


MEMORY = """
import re, torch
from pathlib import Path
from regard.commands.suite import generation as g
torch.set_grad_enabled(False)
prompts = g._prompts(1, 256, 256)
{run}
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def _memory(bench: Bench) -> Result:
    """The peak memory of a process that loads the model and continues one prompt."""
    runs = {
        "ours": "g._ours(g._endless(g.load('smollm2')), prompts)",
        "peer": "g._theirs(g.peer_decoder(), prompts)",
    }
    peak = {}
    for name, run in runs.items():
        done = subprocess.run(
            [sys.executable, "-c", MEMORY.format(run=run)], capture_output=True, text=True, check=True
        )
        peak[name] = int(re.findall(r"\d+", done.stdout)[-1]) / 1024
    note = f"{peak['ours']:.0f} MB, the peer {peak['peer']:.0f} MB"
    return Result(bench.name, bench.title, bench.peer, bench.goal, peak["peer"] / peak["ours"], 0.0, 0.0, note=note)


BENCHES: tuple[Bench, ...] = (
    Bench("generate", f"SmolLM2, 1 prompt of 64 tokens, {NEW} new", "transformers", 1.3, lambda: _pair(1, 64, 64), 15),
    Bench("generate-16", f"SmolLM2, 16 prompts of 8…200 tokens, {NEW} new", "transformers", 1.5,
          lambda: _pair(16, 8, 200), 3),
    Bench("generate-int8", f"SmolLM2 with int8 weights, 1 prompt of 64, {NEW} new", "transformers, float32", 2.0,
          rounds=5, special=_int8),
    Bench("first-token", "SmolLM2, prompt of 256 tokens, its first token", "transformers", 1.0, _first, 7),
    Bench("generate-memory", "SmolLM2, peak memory of loading and generating", "transformers", 1.0, special=_memory),
)  # fmt: skip
