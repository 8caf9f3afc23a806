"""Speed as ratios: ours and a named peer on the same numbers, interleaved in one run.

Each benchmark first checks that both give the same result and refuses to report a speed otherwise. Then it times peer
and ours in turn, round after round, and reports the ratio of the medians: above 1, ours is faster. Absolute times
belong to the machine; ratios travel better.
"""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.attention import attend
from regard.cost import Work, cost, crossover, with_length
from regard.files import write_text
from regard.mask import Mask, as_mask, causal, padding, window
from regard.mechanism import Mechanism
from regard.mechanisms import Quadratic, Softmax


@dataclass(frozen=True)
class Pair:
    """Two computations of the same thing, and how far apart their results may be."""

    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor]
    check: Callable[[], tuple[Tensor, Tensor]] | None = None
    """Two results that must agree, where the pair computes different things on purpose: a kernel against softmax."""
    tolerance: float = 1e-4


@dataclass(frozen=True)
class Bench:
    """A named comparison with its goal, the least ratio we mean to reach."""

    name: str
    title: str
    peer: str
    goal: float | None
    make: "Callable[[], Pair] | None" = None
    rounds: int = 15
    special: "Callable[[Bench], Result] | None" = None
    """Where there is no pair to time, how to measure instead."""


@dataclass(frozen=True)
class Result:
    """What a benchmark measured."""

    name: str
    title: str
    peer: str
    goal: float | None
    ratio: float
    ours_ms: float
    peer_ms: float
    note: str = ""

    @property
    def passed(self) -> bool | None:
        """Whether the goal is reached; None if there is none."""
        return None if self.goal is None else self.ratio >= self.goal

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def interleaved(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Median seconds of both, timed in turn.

    >>> a, b = interleaved(lambda: None, lambda: None, rounds=3)
    >>> a >= 0 and b >= 0
    True
    """
    times: tuple[list[float], list[float]] = ([], [])
    for one in (ours, peer):
        one()
    for _ in range(rounds):
        for slot, one in zip(times, (ours, peer), strict=True):
            begin = time.perf_counter()
            one()
            slot.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


@torch.no_grad()
def run(name: str, quick: bool = False) -> Result:
    """Run one benchmark of the suite: check that both agree, then time them in turn."""
    if name not in SUITE:
        raise ValueError(f"name: expected one of {', '.join(SUITE)}, got {name!r}")
    bench = SUITE[name]
    torch.manual_seed(0)
    if bench.special is not None:
        return bench.special(bench)
    assert bench.make is not None
    pair = bench.make()
    one, two = (pair.ours(), pair.peer()) if pair.check is None else pair.check()
    apart = (one - two).abs().max().item()
    if not apart <= pair.tolerance:
        raise ValueError(f"{name}: expected results within {pair.tolerance}, got {apart:.3g}: no speed to report")
    ours, peer = interleaved(pair.ours, pair.peer, 3 if quick else bench.rounds)
    return Result(bench.name, bench.title, bench.peer, bench.goal, peer / ours, ours * 1e3, peer * 1e3)


def environment() -> dict[str, Any]:
    """The machine, versions and commit a result belongs to.

    >>> sorted(environment())
    ['commit', 'cores', 'cpu', 'date', 'python', 'threads', 'torch']
    """
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(results: Sequence[Result], folder: str | Path) -> Path:
    """Write results and their environment to `cpu.json` in a folder, whole or not at all."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "results": [result.to_dict() for result in results]}
    return write_text(target / "cpu.json", json.dumps(content, indent=1) + "\n")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    here = Path(__file__).parent
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True)
    return found.stdout.strip() or None


def _qkv(batch: int, heads: int, length: int, size: int, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    groups = heads if kv_heads is None else kv_heads
    return (
        torch.randn(batch, heads, length, size),
        torch.randn(batch, groups, length, size),
        torch.randn(batch, groups, length, size),
    )


def _causal(length: int) -> Pair:
    q, k, v = _qkv(1, 8, length, 64)
    return Pair(
        lambda: attend(q, k, v, mask=causal),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


def _padded() -> Pair:
    length = 1024
    q, k, v = _qkv(8, 8, length, 64)
    lengths = torch.linspace(64, length - 64, 8).long()  # half of all positions are padding
    keep = (torch.arange(length) < lengths[:, None])[:, None, None]
    rule = padding(lengths)
    return Pair(
        lambda: attend(q, k, v, mask=rule),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=keep),
    )


def _decode(kv_heads: int, size: int) -> Pair:
    """One step over a cache of 4096, appending included; the cache grows a little over the rounds."""
    q, k, v = torch.randn(1, 32, 1, size), torch.randn(1, kv_heads, 1, size), torch.randn(1, kv_heads, 1, size)
    past_k, past_v = torch.randn(1, kv_heads, 4095, size), torch.randn(1, kv_heads, 4095, size)
    mechanism, room = Softmax(), 4096 + 256
    state = mechanism.start(batch=1, num_kv_heads=kv_heads, qk_length=size, value_length=size, capacity=room)
    state = state.append(past_k, past_v)

    def ours() -> Tensor:
        nonlocal state
        out, state = mechanism.extend(q, k, v, state, mask=causal)
        return out

    def peer() -> Tensor:  # the same cache, which ours has just appended to
        return F.scaled_dot_product_attention(q, state.keys, state.values, enable_gqa=True)

    return Pair(ours, peer)


def _append() -> Pair:
    tokens = torch.randn(1, 32, 1024, 128)

    def ours() -> Tensor:
        state = Softmax().start(batch=1, num_kv_heads=32, qk_length=128, value_length=128, capacity=1024)
        for i in range(1024):
            state = state.append(tokens[:, :, i : i + 1], tokens[:, :, i : i + 1])
        return state.keys

    def peer() -> Tensor:
        keys = values = tokens[:, :, :0]
        for i in range(1024):
            keys, values = (torch.cat([t, tokens[:, :, i : i + 1]], dim=2) for t in (keys, values))
        return keys

    return Pair(ours, peer, tolerance=0.0)


def _quadratic(size: int) -> Pair:
    q, k, v = _qkv(1, 4, 16384, size)

    def short() -> tuple[Tensor, Tensor]:
        few = slice(0, 1024)
        one, two, three = q[:, :, few], k[:, :, few], v[:, :, few]
        plain = attend(one, two, three, Quadratic(), causal, path="reference")
        return attend(one, two, three, Quadratic(), causal), plain

    return Pair(
        lambda: attend(q, k, v, Quadratic(), causal),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        short,
    )


def _window() -> Pair:
    q, k, v = _qkv(1, 4, 8192, 64)
    rule = causal & window(before=127)
    dense = rule.visible(1, 1, 8192, 8192)
    return Pair(
        lambda: attend(q, k, v, mask=rule),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda: (attend(q, k, v, mask=rule), F.scaled_dot_product_attention(q, k, v, attn_mask=dense)),
    )


def _peak(bench: Bench) -> Result:
    """Peak extra memory of the quadratic forward pass in a process of its own: 64 MB over what it took."""
    code = (
        "import re, torch, regard as rg\n"
        "from pathlib import Path\n"
        "kb = lambda name: int(re.search(name + r':\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "make = lambda n: [torch.randn(1, 4, n, 32) for _ in range(3)]\n"
        "torch.set_grad_enabled(False)\n"
        "rg.attend(*make(512), rg.Quadratic(), rg.causal)\n"  # libraries and thread pools are loaded now
        "q, k, v = make(16384)\n"
        "Path('/proc/self/clear_refs').write_text('5')\n"  # the peak starts anew
        "before = kb('VmRSS')\n"
        "rg.attend(q, k, v, rg.Quadratic(), rg.causal)\n"
        "print((kb('VmHWM') - before) / 1024)\n"
    )
    taken = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    ratio = 64 / max(taken, 1e-9)
    return Result(
        bench.name, bench.title, bench.peer, bench.goal, ratio, 0.0, 0.0, note=f"{taken:.1f} MB, output included"
    )


def _crossing(bench: Bench) -> Result:
    """Predicted against measured crossover of softmax and quadratic attention: the smaller over the larger."""
    size = int(bench.name.rsplit("-", 1)[1])
    work = Work(
        query_length=4096, key_length=4096, num_heads=4, num_kv_heads=4, qk_length=size, value_length=size,
        dtype=torch.float32, mask=causal,
    )  # fmt: skip
    first, second = Softmax(), Quadratic()
    predicted = crossover(first, second, work, seconds=measure([first, second], work).seconds)
    measured = None if predicted is None else measured_crossover(first, second, work, near=predicted)
    if predicted is None or measured is None:
        raise ValueError(f"{bench.name}: expected a crossover, got {predicted} predicted and {measured} measured")
    ratio = min(predicted, measured) / max(predicted, measured)
    note = f"predicted {predicted}, measured {measured}"
    return Result(bench.name, bench.title, bench.peer, bench.goal, ratio, 0.0, 0.0, note=note)


SUITE: dict[str, Bench] = {
    bench.name: bench
    for bench in (
        *(
            Bench(f"causal-{n}", f"softmax, causal, N={n}, 8 heads, D=64", "SDPA is_causal", 0.97,
                  partial(_causal, n), max(9, 32768 // n))
            for n in (512, 1024, 2048, 4096, 8192)
        ),
        Bench("padded", "softmax, batch 8 of 1024, half of it padding", "SDPA with the same mask", 1.3, _padded),
        *(
            Bench(f"decode-{kv}-{size}", f"decode step, cache 4096, 32 heads over {kv}, D={size}", "SDPA enable_gqa",
                  goal, partial(_decode, kv, size), 101)
            for size in (64, 128)
            for kv, goal in ((32, 1.0), (8, 1.8), (1, 2.0))
        ),
        Bench("append", "1,024 appends of one token, 32 heads, D=128", "torch.cat", 20.0, _append, 9),
        *(
            Bench(f"quadratic-{size}", f"quadratic, causal, N=16384, 4 heads, D={size}", "SDPA softmax, is_causal",
                  goal, partial(_quadratic, size), 7)
            for size, goal in ((16, 6.0), (32, 3.5), (64, 2.0))
        ),
        Bench("quadratic-memory", "quadratic, N=16384, 4 heads, D=32: peak extra memory", "64 MB", 1.0, special=_peak),
        Bench("window", "softmax, causal & window(before=127), N=8192, D=64", "SDPA is_causal", 5.0, _window, 9),
        *(
            Bench(f"crossover-{size}", f"softmax to quadratic, D={size}: predicted length against measured",
                  "measured", 0.75, special=_crossing)
            for size in (16, 32, 64)
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """FLOPs a second that mechanisms reach on this machine, at some lengths."""

    points: dict[Mechanism, tuple[tuple[int, float], ...]]
    """(length, FLOPs a second), by length."""

    def seconds(self, mechanism: Mechanism, work: Work) -> float:
        """The time some work should take: its FLOPs over the rate, read between the measured lengths."""
        points = self.points[mechanism]
        at = math.log(max(1, work.key_length))
        rate = points[0][1] if at <= math.log(points[0][0]) else points[-1][1]
        for (low, slow), (high, fast) in pairwise(points):
            if math.log(low) <= at <= math.log(high):
                rate = slow + (fast - slow) * (at - math.log(low)) / (math.log(high) - math.log(low))
        return cost(mechanism, work).flops / rate

    @property
    def table(self) -> dict[str, dict[str, float]]:
        """For each mechanism, the best rate measured."""
        return {repr(m): {"flops_per_second": max(rate for _, rate in pts)} for m, pts in self.points.items()}


def measure(
    mechanisms: Sequence[Mechanism], work: Work, lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192), rounds: int = 5
) -> Rates:
    """Measure what mechanisms reach on this machine for work of this shape."""
    points: dict[Mechanism, list[tuple[int, float]]] = {mechanism: [] for mechanism in mechanisms}
    for length in lengths:
        at = with_length(work, length)
        calls = {mechanism: _attending(mechanism, at) for mechanism in mechanisms}
        times: dict[Mechanism, list[float]] = {mechanism: [] for mechanism in mechanisms}
        with torch.no_grad():
            for turn in range(rounds + 1):
                for mechanism, compute in calls.items():
                    begin = time.perf_counter()
                    compute()
                    if turn:
                        times[mechanism].append(time.perf_counter() - begin)
        for mechanism in mechanisms:
            points[mechanism].append((length, cost(mechanism, at).flops / statistics.median(times[mechanism])))
    return Rates({mechanism: tuple(found) for mechanism, found in points.items()})


def measured_crossover(first: Mechanism, second: Mechanism, work: Work, *, near: int, rounds: int = 7) -> int | None:
    """The length from which `second` really is faster, looked for from half to twice `near`; None if not there.

    Both are timed at lengths a quarter of an octave apart; the last change of sides is read between two of them.
    """
    lengths = sorted({max(2, round(near * 2 ** (step / 4))) for step in range(-4, 5)})
    gains: list[tuple[float, float]] = []  # logarithms of length and of how many times faster the second is
    with torch.no_grad():
        for length in lengths:
            at = with_length(work, length)
            one, two = interleaved(_attending(first, at), _attending(second, at), rounds)
            gains.append((math.log(length), math.log(one / two)))
    for (x, slower), (y, faster) in reversed(list(pairwise(gains))):
        if slower <= 0 < faster:
            return round(math.exp(x + (y - x) * -slower / (faster - slower)))
    return None


def _attending(mechanism: Mechanism, work: Work) -> Callable[[], Tensor]:
    shape = (work.batch, work.num_kv_heads, work.key_length)
    q = torch.randn(work.batch, work.num_heads, work.query_length, work.qk_length, dtype=work.dtype)
    k, v = (torch.randn(*shape, size, dtype=work.dtype) for size in (work.qk_length, work.value_length))
    rule: Mask | None = as_mask(work.mask)
    return lambda: attend(q, k, v, mechanism, rule)
