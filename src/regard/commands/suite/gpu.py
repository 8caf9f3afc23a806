"""Linear attention on a GPU against named peers, in one run: `regard bench --gpu`.

Every row is first compared with the plain formula in float64 on a shorter input, and is not timed unless it is within
the error budget. Times are medians of many runs by CUDA events. The floor is the larger of the least FLOPs over the
measured matrix rate and the least bytes over the measured copy rate.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.commands.suite.rates import Rates, overtaken
from regard.core.attention import attend
from regard.core.cost import Work, cost, crossover, with_length
from regard.core.families.mechanism import Mechanism
from regard.core.files import write_text
from regard.core.laws.case import within_budget
from regard.core.masks import causal
from regard.core.mechanisms import Elu, Quadratic, Softmax
from regard.training.records import commit

LENGTH, HEADS, SHORT = 65536, 16, 2048


@dataclass(frozen=True)
class Row:
    """A measured computation."""

    name: str
    ours_ms: float
    peers_ms: dict[str, float]
    floor_ms: float
    memory_gb: float
    """Peak allocation above the inputs, the output included."""

    def to_dict(self) -> dict[str, Any]:
        ratios = {name: peer / self.ours_ms for name, peer in self.peers_ms.items()}
        return {**asdict(self), "ratios": ratios, "fraction_of_the_ceiling": self.floor_ms / self.ours_ms}


def milliseconds(run: Callable[[], Any], rounds: int = 30) -> float:
    """The median time of a computation on the GPU, after three warm-up runs."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:  # queued without waiting, so that launch overhead is hidden while the GPU is busy
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[rounds // 2]


def ceilings() -> tuple[float, float]:
    """FLOP/s of a large bfloat16 matrix product, and bytes/s of a large copy, reads and writes counted."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.empty(1 << 30, device="cuda", dtype=torch.float32) for _ in range(2))
    product, copy = milliseconds(lambda: a @ b), milliseconds(lambda: target.copy_(source))
    return 2 * 8192**3 / product * 1e3, 2 * source.nbytes / copy * 1e3


def _inputs(length: int, size: int) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def check(mechanism: Mechanism, size: int) -> None:
    """Raise unless output and gradients are within the error budget."""
    q, k, v, grad = _inputs(SHORT, size)
    visible = torch.ones(SHORT, SHORT, dtype=torch.bool, device="cuda").tril()[None, None]
    leaves = [[t.to(kind).requires_grad_() for t in (q, k, v)] for kind in (q.dtype, torch.float64, q.dtype)]
    ours, *others = leaves
    outs = [attend(ours[0], ours[1], ours[2], mechanism, causal)]
    outs += [mechanism.mix(mechanism.weigh(a, b, visible).to(a.dtype), c).to(a.dtype) for a, b, c in others]
    within_budget("output", *outs)
    grads = [torch.autograd.grad(out, inputs, grad.to(out.dtype)) for out, inputs in zip(outs, leaves, strict=True)]
    for name, *gradients in zip("qkv", *grads, strict=True):
        within_budget(f"gradient of {name}", *gradients, gradient=True)


def least_work(mechanism: Mechanism, size: int) -> float:
    """FLOPs per token of the linear form: adding a key to the sums, and reading them with a query."""
    features = math.comb(size + 2, 2) if isinstance(mechanism, Quadratic) else size
    return 4.0 * features * (size + 1)


def measure(mechanism: Mechanism, size: int, backward: bool, rates: tuple[float, float]) -> Row:
    """Time ours and the peers on one shape."""
    q, k, v, grad = _inputs(LENGTH, size)
    leaves = [t.requires_grad_(backward) for t in (q, k, v)]

    def timed(run: Callable[..., Tensor]) -> Callable[[], Any]:
        return (lambda: torch.autograd.grad(run(*leaves), leaves, grad)) if backward else lambda: run(*leaves)

    ours = timed(lambda q, k, v: attend(q, k, v, mechanism, causal))
    ours_ms = milliseconds(ours)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours()
    memory = torch.cuda.max_memory_allocated() - before
    peers = {}
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        softmax = timed(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        peers["cuDNN softmax"] = milliseconds(softmax, 10)
    if isinstance(mechanism, Elu) and (peer := _fla()) is not None:
        # In its layout, (B, T, H, K), prepared beforehand.
        turned = [t.detach().transpose(1, 2).contiguous().requires_grad_(backward) for t in leaves]
        turned_grad = grad.transpose(1, 2).contiguous()
        peers["fla chunk_linear_attn, features given"] = milliseconds(  # without computing the feature map
            (lambda: torch.autograd.grad(peer(*turned), turned, turned_grad)) if backward else lambda: peer(*turned)
        )
    tokens, passes = HEADS * LENGTH, 3 if backward else 1
    work = passes * tokens * least_work(mechanism, size) / rates[0]
    moved = (4 if not backward else 4 + 8) * q.nbytes / rates[1]
    name = f"{mechanism!r}, D={size}, {'forward + backward' if backward else 'forward'}"
    return Row(name, ours_ms, peers, 1e3 * max(work, moved), memory / 1e9)


RATED, BETWEEN = (512, 2048, 8192, 32768), (1024, 3072, 4096, 6144, 12288, 16384)
"""Lengths whose rates predict where the quadratic kernel overtakes softmax, and further lengths to time both at."""


def crossing(size: int = 64) -> dict[str, Any]:
    """The length from which the quadratic kernel is faster than cuDNN's softmax: by FLOPs, as predicted from the rates
    measured here, and as measured."""
    both = Softmax(), Quadratic()
    work = Work(query_length=SHORT, key_length=SHORT, num_heads=HEADS, num_kv_heads=HEADS, qk_length=size,
                value_length=size, mask=causal, dtype=torch.bfloat16)  # fmt: skip
    times: dict[int, tuple[float, float]] = {}
    for length in sorted((*RATED, *BETWEEN)):
        times[length] = _both_ms(*_inputs(length, size)[:3])
    rates = [
        tuple((n, cost(mechanism, with_length(work, n)).flops / times[n][place] * 1e3) for n in RATED)
        for place, mechanism in enumerate(both)
    ]
    seconds = Rates(tuple(zip(both, rates, strict=True))).seconds
    return {
        "by_flops": crossover(*both, work),
        "predicted": crossover(*both, work, seconds=seconds),
        "measured": overtaken([(length, softmax / quadratic) for length, (softmax, quadratic) in times.items()]),
        "softmax_and_quadratic_ms": times,
    }


def _both_ms(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, float]:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        softmax = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return softmax, milliseconds(lambda: attend(q, k, v, Quadratic(), causal))


def million(size: int = 64) -> dict[str, float]:
    """Time and memory (above the inputs) of the quadratic kernel's forward pass over 2**20 tokens, in one call."""
    q, k, v = _inputs(1 << 20, size)[:3]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ms = milliseconds(lambda: attend(q, k, v, Quadratic(), causal), 5)
    return {"ms": ms, "memory_gb": (torch.cuda.max_memory_allocated() - before) / 1e9}


def _fla() -> Callable[..., Tensor] | None:
    """flash-linear-attention's kernel, which takes features instead of queries and keys; None if not installed."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None
    return lambda q, k, v: chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]


def run() -> dict[str, Any]:
    """The whole table, with the machine it belongs to."""
    if not torch.cuda.is_available():
        raise ValueError("gpu: expected a CUDA device, got none")
    torch.manual_seed(0)
    rates, rows = ceilings(), []
    torch.cuda.empty_cache()
    for mechanism in (Quadratic(), Elu()):
        for size in (64, 32):
            check(mechanism, size)
            rows += [measure(mechanism, size, backward, rates).to_dict() for backward in (False, True)]
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "shape": f"batch 1, {HEADS} heads, {LENGTH} tokens, causal, bfloat16",
        "matrix_tflops": rates[0] / 1e12,
        "copy_terabytes_per_s": rates[1] / 1e12,
        "rows": rows,
        "crossover_of_softmax_and_quadratic": crossing(),
        "quadratic_forward_of_a_million_tokens": million(),
    }


def save(results: dict[str, Any], folder: str | Path) -> Path:
    """Write the table to `gpu.json` in a folder, atomically."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    return write_text(target / "gpu.json", json.dumps(results, indent=1) + "\n")
