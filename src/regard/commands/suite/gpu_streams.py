"""Decode steps on a GPU: a step of linear attention, a decoder's step after histories of several lengths, and the CPU
time of a call.

A step's GPU time is measured with a CUDA graph of 64 consecutive steps, so that a fold of the newest tokens into the
sums is included. Outputs are first compared with the plain formula in float64.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.commands.suite.gpu_softmax import SMOLLM2, compared, milliseconds, per_token
from regard.core.attention import attend
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import within_budget
from regard.core.masks import causal
from regard.core.mechanisms import Elu, Quadratic, Softmax
from regard.inference.generation import generate, prefill
from regard.models.decoder import Decoder, DecoderConfig

HEADS, STEPS = 16, 64
CHECKED = (900, 1, 1, 1, 60, 1, 1)
"""Lengths of the pieces in which the checked stream is read."""


class Stream:
    """A mechanism's stream of random tokens, 16 heads."""

    def __init__(self, mechanism: Mechanism, batch: int, size: int, history: int, groups: int = HEADS) -> None:
        self.mechanism = mechanism
        self.shapes = [(batch, heads, 1, size) for heads in (HEADS, groups, groups)]
        self.state = mechanism.start(
            batch=batch, num_kv_heads=groups, qk_length=size, value_length=size, capacity=history + 4096,
            dtype=torch.bfloat16, device="cuda",
        )  # fmt: skip
        self.read(history)

    def read(self, tokens: int) -> tuple[Tensor, list[Tensor]]:
        """Extend the state by random tokens. Returns the output, and queries, keys and values."""
        shapes = [(*shape[:2], tokens, shape[3]) for shape in self.shapes]
        new = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
        out, self.state = self.mechanism.extend(new[0], new[1], new[2], self.state, mask=causal)
        return out, new

    def check(self) -> None:
        """Raise unless the outputs of this stream, still empty and then read in pieces, are within the error budget."""
        pieces = [self.read(count) for count in CHECKED]
        out = torch.cat([piece for piece, _ in pieces], 2)
        q, k, v = (torch.cat(parts, 2) for parts in zip(*(new for _, new in pieces), strict=True))
        visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device="cuda").tril()[None, None]

        def plain(*tensors: Tensor) -> Tensor:
            a, b, c = tensors
            return self.mechanism.mix(self.mechanism.weigh(a, b, visible).to(a.dtype), c).to(a.dtype)

        within_budget("output", out, plain(q.double(), k.double(), v.double()), plain(q, k, v))

    def step(self) -> Callable[[], Any]:
        """A decode step that extends the state by the same token each time."""
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in self.shapes)

        def run() -> None:
            self.state = self.mechanism.extend(q, k, v, self.state, mask=causal)[1]

        return run


def replayed(stream: Stream) -> float:
    """GPU milliseconds per token."""
    state, step = stream.state, stream.step()

    def steps() -> None:
        stream.state = state
        for _ in range(STEPS):
            step()

    return milliseconds([steps]) / STEPS


def launching(*runs: Callable[[], Any]) -> list[float]:
    """CPU microseconds per call, without waiting for the GPU: medians of forty rounds of ten calls, in turn."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(45):
        for run, taken in zip(runs, times, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                run()
            taken.append((time.perf_counter() - start) * 1e5)
    return [sorted(taken[5:])[20] for taken in times]


@torch.no_grad()
def stream_rows() -> list[Any]:
    """A decode step of linear attention: GPU time, CPU time, and the rate at which the state is read."""
    rows = []
    for mechanism, size in ((Quadratic(), 64), (Quadratic(), 32), (Elu(), 64)):
        Stream(mechanism, 2, size, 0).check()
        for batch, history in ((1, 1024), (1, 65536), (16, 1024)):
            stream = Stream(mechanism, batch, size, history)
            ms, nbytes = replayed(stream), stream.state.nbytes
            rows.append(
                {
                    "name": f"one token of {mechanism!r}, D={size}, batch {batch}, after {history}",
                    **compared(ms, {}),
                    "cpu_us": launching(stream.step())[0],
                    "state_bytes": nbytes,
                    "terabytes_per_s": nbytes / ms / 1e9,
                }
            )
    return rows


def history_rows(lengths: tuple[int, ...] = (1024, 8192, 65536)) -> list[Any]:
    """A decode step of a decoder with SmolLM2's sizes after prompts of several lengths, batch 1."""
    rows = []
    for mechanism in ("quadratic", "softmax"):
        sizes = {**SMOLLM2, "context_length": 66560}
        model = Decoder(DecoderConfig(**sizes, mechanism=mechanism)).cuda().bfloat16().eval()  # type: ignore[arg-type]
        for length in lengths:
            prompt = prefill(model, [torch.randint(49152, (length,)).tolist()], room=512)

            def run(count: int, prompt: Any = prompt, model: Any = model) -> None:
                generate(model, state=prompt, max_new_tokens=count)

            ours = per_token(run)
            rows.append({"name": f"one token of SmolLM2's form, {mechanism}, after {length}", **compared(ours, {})})
    return rows


@torch.no_grad()
def python_rows() -> list[Any]:
    """CPU microseconds of calls, without waiting for the GPU, and those of SDPA: 16 heads of 64."""
    q, k, v = (torch.randn(1, HEADS, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    long = [torch.randn(1, HEADS, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    cache = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16)
    query = q[:, :, :1]
    streams = [Stream(Softmax(), 1, 64, 512, 4), Stream(Quadratic(), 1, 64, 512, 4), Stream(Elu(), 1, 64, 512, 4)]

    def over_cache() -> Tensor:
        return F.scaled_dot_product_attention(query, cache, cache, enable_gqa=True)

    def whole() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "attend, causal, 512 tokens": (lambda: attend(q, k, v, mask=causal), whole),
        "attend, causal, 4,096 tokens": (
            lambda: attend(long[0], long[1], long[2], mask=causal),
            lambda: F.scaled_dot_product_attention(long[0], long[1], long[2], is_causal=True),
        ),
        "attend, one query over a cache of 512": (lambda: attend(query, cache, cache), over_cache),
        "attend, quadratic, causal, 512 tokens": (lambda: attend(q, k, v, Quadratic(), causal), whole),
        "attend, elu, causal, 512 tokens": (lambda: attend(q, k, v, Elu(), causal), whole),
        **{f"extend, {stream.mechanism!r}, one token": (stream.step(), over_cache) for stream in streams},
    }
    rows = []
    for name, (ours, theirs) in calls.items():
        mine, peer = launching(ours, theirs)
        rows.append({"name": name, "ours_us": mine, "sdpa_us": peer, "beyond_us": mine - peer})
    return rows


def run() -> dict[str, list[Any]]:
    """All rows."""
    torch.manual_seed(0)
    return {"tokens": stream_rows(), "histories": history_rows(), "python": python_rows()}
