"""Tiles of the quadratic kernel's forward pass at D = 32, each checked before it is timed: `python … OUT [seconds]`."""

import json
import multiprocessing
import os
import sys
import time
from dataclasses import replace

START = time.time()
OUT = sys.argv[1] if len(sys.argv) > 1 else "/tmp"
SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 90.0
TINY = os.environ.get("TRITON_INTERPRET") == "1"  # a dry run on a CPU

import torch  # noqa: E402

from regard.core.kernels import square_attention as sq  # noqa: E402
from regard.core.kernels.common import prefix_kernel  # noqa: E402
from regard.core.kernels.launch import ceil_divide  # noqa: E402

DEVICE = "cpu" if TINY else "cuda"
DTYPE = torch.float32 if TINY else torch.bfloat16
N, HEADS, SHORT = (192, 1, 96) if TINY else (65536, 16, 2048)
FIRST_TILES, FIRST_LAUNCH, PARTS = sq.tiles, sq.launch, sq.PARTS
L = sq.Launch
BASE = {}
"""A configuration is what it changes: fields of Tiles (as tuples for launches), `parts`, `prefix`, `small`, `shift`."""
TRIED = {
    "sums": [(64, 0, 2, 3), (32, 0, 1, 1), (64, 0, 2, 1), (64, 0, 4, 1), (128, 0, 4, 1), (32, 0, 4, 1), (16, 0, 1, 1),
             (128, 0, 8, 1), (64, 0, 1, 1), (32, 0, 2, 2)],
    "near": [(128, 32, 4, 3), (64, 64, 4, 3), (128, 128, 4, 2), (128, 64, 8, 3), (64, 32, 4, 3), (64, 64, 2, 2),
             (128, 64, 4, 2), (128, 32, 4, 4), (256, 64, 8, 3), (32, 64, 2, 2), (64, 32, 2, 3), (128, 16, 4, 4)],
    "parts": [480, 1056, 768, 288, 2112, 576],
    "square": [(64, 0, 4, 4), (64, 0, 4, 2), (128, 0, 4, 3), (128, 0, 4, 2), (32, 0, 4, 4), (64, 0, 8, 3),
               (128, 0, 8, 3), (64, 0, 4, 5)],
    "far": [(128, 0, 4, 2), (128, 0, 4, 4), (256, 0, 8, 3), (64, 0, 4, 3), (128, 0, 8, 3), (64, 0, 2, 3),
            (64, 0, 4, 2), (256, 0, 8, 2), (128, 0, 4, 6)],
    "prefix": [(16, 128, 4), (16, 64, 2), (16, 32, 1), (32, 32, 1), (16, 256, 4)],
    "small": [(32, 32, 1), (128, 32, 4), (64, 32, 2), (64, 64, 4), (32, 64, 2)],
    "shift": [(2048, 8), (512, 4), (512, 2), (1024, 2), (2048, 4)],
    "chunk": [256, 1024],
}  # fmt: skip


def say(*words):
    print(f"{time.time() - START:6.1f}", *words, flush=True)


WIDE = [{}, {"sums": (32, 0, 4, 1)}, {"sums": (64, 0, 4, 1)}, {"near": (128, 32, 4, 3)}]
"""The same for D = 64."""


def use(config, size=32):
    """Make a configuration that of all calls."""
    changed = {name: L(*value) if isinstance(value, tuple) else value for name, value in config.items()
               if name not in ("parts", "prefix", "small", "shift")}  # fmt: skip

    def tiles(qk_length, value_length, dtype):
        chosen = FIRST_TILES(qk_length, value_length, dtype)
        if TINY:
            tile = L(32, 32, 4, 1)
            return replace(chosen, chunk=32, near=tile, far=tile, sums=tile, square=tile, left=8, right=16)
        return replace(chosen, **changed) if max(qk_length, value_length) == size else chosen

    def launch(launches, place, kernel, grid, tensors, arguments, fresh=()):
        which = "shift" if kernel is sq.shift_kernel else "other"
        if kernel is prefix_kernel:
            which = "small" if tensors[0].shape[-1] < 10000 else "prefix"
        if which in config:
            first = arguments

            def arguments():
                numbers, options = first()
                if which == "shift":
                    return numbers, dict(options, BLOCK=config[which][0], num_warps=config[which][1])
                steps, block, warps = config[which]
                return numbers, dict(options, STEPS=steps, BLOCK=block, num_warps=warps)

            block = config[which][0] if which == "shift" else config[which][1]
            grid = (ceil_divide(tensors[0].shape[-1] if which != "shift" else tensors[1].shape[2], block), *grid[1:])
        FIRST_LAUNCH(launches, place, kernel, grid, tensors, arguments, fresh)
        if NOTED is not None:
            NOTED.append((which if which != "other" else kernel.__name__[:-7], launches, place, kernel, grid, tensors,
                          arguments, fresh))  # fmt: skip

    sq.tiles, sq.launch, sq.PARTS = tiles, launch, config.get("parts", PARTS)
    sq._work.cache_clear()


NOTED = None


def inputs(length, size=32, heads=HEADS):
    generator = torch.Generator(DEVICE).manual_seed(length + size)
    return [torch.randn(1, heads, length, size, device=DEVICE, dtype=DTYPE, generator=generator) for _ in range(3)]


def forward(q, k, v):
    return sq.forward(sq.work_of(q, k, v, 1.0, 2.0, 1.0, True), q, k, v, None)[0]


def exact(q, k, v, rows, kind):
    """The plain formula for some rows."""
    score = (q[:, :, rows].to(kind) @ k.to(kind).mT + 1) ** 2
    score = score * (torch.arange(k.shape[2], device=DEVICE)[None, :] <= rows[:, None])
    return (score / score.sum(-1, keepdim=True)).to(kind) @ v.to(kind)


def milliseconds(run, rounds=20):
    if TINY:
        run()
        return 1.0
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in events)[rounds // 2]


def warm(config):
    """Compile what a configuration needs, in a process of its own."""
    try:
        if "rows" in config:
            from regard.commands.suite import gpu
            from regard.core.mechanisms import Quadratic

            gpu.check(Quadratic(), config["rows"])
        elif "wide" in config:
            use(config["wide"], 64)
            forward(*inputs(N, 64))
            forward(*inputs(SHORT, 64))
        else:
            use(config)
            forward(*inputs(N))
            forward(*inputs(SHORT))
        if not TINY:
            torch.cuda.synchronize()
    except Exception as error:
        return config, repr(error)[:200]
    return config, None


class Bench:
    def __init__(self, size=32):
        self.size = size
        self.long, self.short = inputs(N, size), inputs(SHORT, size)
        rows = torch.arange(SHORT, device=DEVICE)
        self.short_exact = exact(*self.short, rows, torch.float64)
        self.plain = (exact(*self.short, rows, DTYPE).double() - self.short_exact).abs().max().item()
        self.rows = torch.tensor([0, 1, 5, N // 8 - 1, N // 8, N // 3, N // 2 + 3, N - 2, N - 1], device=DEVICE)
        self.long_exact = exact(*self.long, self.rows, torch.float64)
        self.results = []
        say("plain formula off by", self.plain)

    def measure(self, config, kernels=True):
        """Check and time a configuration; print and keep the result."""
        global NOTED
        try:
            use(config, self.size)
            short = (forward(*self.short).double() - self.short_exact).abs().max().item()
            out = forward(*self.long)[:, :, self.rows].double()
            long = ((out - self.long_exact).norm() / self.long_exact.norm()).item()
            allowed = max(2 * self.plain, 0.01)
            if self.results:  # no worse than the first
                allowed = min(allowed, 1.5 * self.results[0]["short"] + 1e-5)
            if not (short <= allowed and long <= 0.01):
                say("WRONG", config, short, long)
                return None
            ms = milliseconds(lambda: forward(*self.long))
            parts = {}
            if kernels:
                NOTED = []
                forward(*self.long)
                noted, NOTED = NOTED, None
                for name, *call in noted:
                    us = 1e3 * milliseconds(lambda call=call: FIRST_LAUNCH(*call), 10)
                    parts[name] = round(parts.get(name, 0) + us, 1)
        except Exception as error:
            NOTED = None
            say("FAILED", config, repr(error)[:200])
            return None
        result = {"config": config, "ms": ms, "short": short, "long": long, "kernels": parts}
        self.results.append(result)
        say(f"{ms:.4f} ms", config, f"off {short:.4f} {long:.5f}", parts)
        with open(f"{OUT}/tune_{self.size}.json", "w") as file:
            json.dump(sorted(self.results, key=lambda r: r["ms"]), file, indent=1)
        return result


KERNEL = {"sums": "sum_chunks", "near": "near", "square": "square", "far": "far"}


def main():
    singles = [{name: value} for name in ("sums", "near", "parts", "far", "square") for value in TRIED[name]]
    singles += [{name: value} for name in ("prefix", "small", "shift") for value in TRIED[name]]
    singles += [{"chunk": chunk} for chunk in TRIED["chunk"]]
    # Interleaved, so that a cut-off costs each kernel its last candidates and no kernel all of them.
    singles.sort(key=lambda c: next(TRIED[n].index(v) for n, v in c.items()))
    if TINY:
        singles = [c for c in singles if next(iter(c)) in ("parts", "prefix", "shift")][:4]
    pool = multiprocessing.get_context("spawn").Pool(1 if TINY else 14)
    wide = [] if TINY else [{"wide": config} for config in WIDE]
    first = [BASE] if TINY else [BASE, {"rows": 32}, {"rows": 64}]
    warmed, done = pool.imap_unordered(warm, [*first, *singles, *wide]), {}
    for _ in range(len(first) + len(singles) + len(wide)):
        try:
            config, error = warmed.next(timeout=max(1.0, SECONDS * 0.6 - (time.time() - START)))
        except multiprocessing.TimeoutError:
            say("not waiting for more to compile")
            break
        if error:
            say("does not compile", config, error)
        else:
            done[repr(config)] = config
    pool.terminate()
    say("compiled", len(done), "of", len(first) + len(singles) + len(wide))
    bench = Bench()
    base = bench.measure(BASE)
    best = {}
    for config in singles:
        if repr(config) not in done or time.time() - START > SECONDS * 0.8:
            continue
        result = bench.measure(config)
        if result is None or "chunk" in config:
            continue
        ((name, value),) = config.items()
        if name == "parts":  # it changes square, prefix and shift
            gain = sum(base["kernels"].get(n, 0) - result["kernels"].get(n, 0) for n in ("square", "prefix", "shift"))
        else:
            kernel = KERNEL.get(name, name)
            gain = base["kernels"].get(kernel, 0) - result["kernels"].get(kernel, 0)
        best.setdefault(name, []).append((gain, value))
    config = {}
    # Only what is at least 2 % of its kernel faster, then the whole is timed with each added.
    for name, gains in best.items():
        gain, value = max(gains, key=lambda pair: pair[0])
        say("best", name, value, f"saves {gain:.1f} us alone")
        if gain > 2:
            config[name] = value
    final = bench.measure(config) or base
    chosen = final
    for name in list(config):  # does the whole lose by going without?
        if time.time() - START > SECONDS:
            break
        fewer = bench.measure({n: v for n, v in chosen["config"].items() if n != name}, kernels=False)
        if fewer is not None and fewer["ms"] < chosen["ms"] * 0.998:
            chosen = fewer
    chosen = min([r for r in (chosen, base) if r], key=lambda r: r["ms"])
    again = [bench.measure(c, kernels=False) for c in (chosen["config"], BASE, chosen["config"], BASE)]
    say("CHOSEN", chosen["config"], [r and round(r["ms"], 4) for r in again])
    with open(f"{OUT}/chosen.json", "w") as file:
        json.dump(chosen["config"], file)
    if TINY:
        return
    use(chosen["config"])
    from regard.commands.suite import gpu
    from regard.core.mechanisms import Quadratic

    rates, rows = gpu.ceilings(), []
    torch.cuda.empty_cache()
    for size in (32, 64):
        for backward in (False, True):
            if not backward:
                gpu.check(Quadratic(), size)
            row = gpu.measure(Quadratic(), size, backward, rates).to_dict()
            say("ROW", row["name"], round(row["ours_ms"], 4), row["peers_ms"], row["ratios"])
            rows.append(row)
            with open(f"{OUT}/rows.json", "w") as file:
                json.dump(rows, file, indent=1)
    del bench
    torch.cuda.empty_cache()
    bench = Bench(64)
    for config in WIDE:
        if repr({"wide": config}) in done and time.time() - START < SECONDS + 20:
            bench.measure(config)


if __name__ == "__main__":
    main()
