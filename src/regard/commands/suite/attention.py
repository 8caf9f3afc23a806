"""Attention against PyTorch's SDPA."""

import subprocess
import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.commands.suite.harness import Bench, Pair, Result
from regard.commands.suite.rates import crossing
from regard.core.attention import attend
from regard.core.calls.choice import refusal
from regard.core.cost import Work, cost
from regard.core.families.mechanism import Mechanism
from regard.core.masks import causal, padding, window
from regard.core.mechanisms import Quadratic, Softmax


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


def _turn(queries: int, heads: int, kv_heads: int) -> Pair:
    """New tokens after a KV cache, 4,096 tokens in all: a turn of a chat, or chunked prefill."""
    q, k, v = _qkv(1, heads, 4096, 64, kv_heads)
    q = q[:, :, -queries:].contiguous()
    dense = causal.visible(1, 1, queries, 4096)
    return Pair(
        lambda: attend(q, k, v, mask=causal),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=heads != kv_heads),
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


def _decode(kv_heads: int, size: int, dtype: torch.dtype = torch.float32) -> Pair:
    """A decode step over a KV cache of 4096 tokens, appending included; the cache grows a little over the rounds."""
    lengths = (32, 1), (kv_heads, 1), (kv_heads, 1), (kv_heads, 4095), (kv_heads, 4095)
    q, k, v, past_k, past_v = (torch.randn(1, *length, size, dtype=dtype) for length in lengths)
    mechanism, room = Softmax(), 4096 + 256
    state = mechanism.start(
        batch=1, num_kv_heads=kv_heads, qk_length=size, value_length=size, capacity=room, dtype=dtype
    ).append(past_k, past_v)

    def ours() -> Tensor:
        nonlocal state
        out, state = mechanism.extend(q, k, v, state, mask=causal)
        return out

    def peer() -> Tensor:  # the same cache, which ours has just appended to
        return F.scaled_dot_product_attention(q, state.keys, state.values, enable_gqa=True)

    return Pair(ours, peer, tolerance=max(1e-4, torch.finfo(dtype).eps / 4))


def _int8(stepped: bool) -> Pair:
    """A decode step over an int8 KV cache of 4096 tokens, rounding and appending included, against a float32 KV cache:
    our step (`stepped`), or only PyTorch's attention."""
    lengths = (32, 1), (8, 1), (8, 1), (8, 4095), (8, 4095)
    q, k, v, past_k, past_v = (torch.randn(1, *length, 128) for length in lengths)
    mechanism = Softmax()
    state, wide = (
        mechanism.start(
            batch=1, num_kv_heads=8, qk_length=128, value_length=128, capacity=4096 + 256, storage=storage
        ).append(past_k, past_v)
        for storage in (torch.int8, None)
    )

    def ours() -> Tensor:
        nonlocal state
        out, state = mechanism.extend(q, k, v, state, mask=causal)
        return out

    def peer() -> Tensor:
        nonlocal wide
        if not stepped:
            return F.scaled_dot_product_attention(q, wide.keys, wide.values, enable_gqa=True)
        out, wide = mechanism.extend(q, k, v, wide, mask=causal)
        return out

    def check() -> tuple[Tensor, Tensor]:  # against the dequantized keys and values
        return ours(), F.scaled_dot_product_attention(q, state.keys, state.values, enable_gqa=True)

    return Pair(ours, peer, check)


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
        few_q, few_k, few_v = q[:, :, few], k[:, :, few], v[:, :, few]
        plain = attend(few_q, few_k, few_v, Quadratic(), causal, path="reference")
        return attend(few_q, few_k, few_v, Quadratic(), causal), plain

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
    """Peak extra memory of the quadratic forward pass in a separate process; the ratio is 64 MB over this peak."""
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
    crossed = crossing(Softmax(), Quadratic(), work, rounds=9 * 64 // size)  # short heads take less time, and vary more
    predicted, measured = crossed.predicted, crossed.measured
    if predicted is None or measured is None:
        raise ValueError(f"{bench.name}: expected a crossover, got {predicted} predicted and {measured} measured")
    ratio = min(predicted, measured) / max(predicted, measured)
    note = f"predicted {predicted}, measured {measured}"
    return Result(bench.name, bench.title, bench.peer, bench.goal, ratio, 0.0, 0.0, note=note)


LENGTHS = (256, 1024, 2048)
"""Lengths at which `of_mechanism` times: the plain formula keeps all attention weights in memory."""


def of_mechanism(name: str, mechanism: Mechanism, qk_length: int = 64) -> tuple[Bench, ...]:
    """A mechanism against PyTorch's softmax and against its plain formula, causal if the mechanism can be."""
    cost(mechanism, Work(query_length=1, key_length=1, num_heads=8, qk_length=qk_length))  # raises if it cannot run
    rule = causal if refusal(mechanism, causal) is None else None
    words = ", causal" if rule is not None else ""

    def pair(length: int, peer: str) -> Pair:
        q, k, v = _qkv(1, 8, length, qk_length)

        def ours(path: str | None = None) -> Tensor:
            return attend(q, k, v, mechanism, rule, path=path)

        def check() -> tuple[Tensor, Tensor]:
            plain = ours("reference")
            size = plain.abs().max().clamp(min=1)
            return ours() / size, plain / size

        softmax = partial(F.scaled_dot_product_attention, q, k, v, is_causal=rule is not None)
        return Pair(ours, softmax if peer == "sdpa" else partial(ours, "reference"), check)

    return tuple(
        Bench(f"{name}-{length}-{peer}", f"{name}{words}, N={length}, 8 heads, D={qk_length}", title, None,
              partial(pair, length, peer))
        for length in LENGTHS
        for peer, title in (("sdpa", "SDPA softmax"), ("reference", "its plain formula"))
    )  # fmt: skip


BENCHES: tuple[Bench, ...] = (
    *(
        Bench(f"causal-{n}", f"softmax, causal, N={n}, 8 heads, D=64", "SDPA is_causal", 0.97,
              partial(_causal, n), max(15, 131072 // n))
        for n in (512, 1024, 2048, 4096, 8192)
    ),
    *(
        Bench(f"turn-{n}{groups}", f"softmax, causal, {n} new tokens of 4096, {heads} heads over {kv}, D=64",
              "SDPA with the same mask", 1.1, partial(_turn, n, heads, kv), max(15, 512 // n))
        for heads, kv, groups in ((8, 8, ""), (32, 8, "-8"))
        for n in (2, 4, 8, 16, 32, 64, 128, 512)
    ),
    Bench("padded", "softmax, batch 8 of 1024, half of it padding", "SDPA with the same mask", 1.3, _padded),
    *(
        Bench(f"decode-{kv}-{size}", f"decode step, cache 4096, 32 heads over {kv}, D={size}", "SDPA enable_gqa",
              goal, partial(_decode, kv, size), 101)
        for size in (64, 128)
        for kv, goal in ((32, 1.0), (8, 1.8), (1, 2.0))
    ),
    Bench("decode-8-128-bfloat16", "decode step, cache 4096, 32 heads over 8, D=128, bfloat16", "SDPA enable_gqa", 1.8,
          partial(_decode, 8, 128, torch.bfloat16), 101),
    *(
        Bench(name, "decode step, int8 cache of 4096, 32 heads over 8, D=128", peer, goal, partial(_int8, stepped), 101)
        for name, peer, goal, stepped in (
            ("decode-int8", "SDPA enable_gqa, float32", 3.0, False),
            ("decode-int8-wide", "the same step, float32", 1.3, True),
        )
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
)  # fmt: skip
