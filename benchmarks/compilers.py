"""Three ways to compile a decode step, compared: LLVM IR by llvmlite (ours), numba, C++ with at::vec.

    python benchmarks/compilers.py            a table, and one line of JSON

It needs numba, ninja and a C++ compiler besides the requirements of regard; docs/machine_code.md has the conclusions.
Steps are timed in turn on the same tensors, after their results are compared; `SDPA` is PyTorch's. The first step of
each way is timed in separate processes: with an empty cache on disk, and again with the cache of the first run. All
times are CPU time on one thread, so that other processes on the machine do not count.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.commands.suite.harness import environment

HERE, SOURCES = Path(__file__).parent, Path(__file__).parents[1] / "src/regard/core/paths"
FILES = {
    "llvmlite": [SOURCES / name for name in ("decode_code.py", "decode_block.py", "machine_code.py", "compiler.py")],
    "numba": [HERE / "decode_numba.py"],
    "C++": [HERE / "decode_vec.cpp"],
}
FLAGS = {
    "AVX512": ["-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512", "-mavx512f", "-mavx512dq", "-mavx512vl",
               "-mavx512bw", "-mfma"],
    "AVX2": ["-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2", "-mavx2", "-mfma", "-mf16c"],
}  # fmt: skip
THREADS = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def llvmlite() -> Step:
    from regard.core.paths import decode  # noqa: F401 - defines the operator

    return lambda q, k, v: torch.ops.regard.decode(q, k, v, q.shape[3] ** -0.5, None, None, None)


def numba() -> Step:
    sys.path.insert(0, str(HERE))
    from decode_numba import decode

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        decode(q[0, :, 0].numpy(), k[0].numpy(), v[0].numpy(), q.shape[3] ** -0.5, out[0, :, 0].numpy())
        return out

    return step


def cpp() -> Step:
    from torch.utils.cpp_extension import load

    flags = ["-O3", "-fopenmp", *FLAGS[torch.backends.cpu.get_cpu_capability()]]
    built = load("regard_decode_vec", [str(HERE / "decode_vec.cpp")], extra_cflags=flags)
    return lambda q, k, v: built.decode(q, k, v, q.shape[3] ** -0.5)


WAYS: dict[str, Callable[[], Step]] = {"llvmlite": llvmlite, "numba": numba, "C++": cpp}


def cpu_seconds() -> float:
    """CPU time of this process and of the compilers that it ran."""
    return sum(os.times()[:4])


def interleaved(steps: list[Callable[[], Tensor]], rounds: int) -> list[float]:
    """Median CPU seconds of each step, timed in turn, in a random order, since a step finds the CPU cache as the step
    before it has left it."""
    times: list[list[float]] = [[] for _ in steps]
    turns = random.Random(0)
    for _ in range(rounds):
        for number in turns.sample(range(len(steps)), len(steps)):
            begin = time.process_time()
            steps[number]()
            times[number].append(time.process_time() - begin)
    return [statistics.median(slot) for slot in times]


def tensors(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """32 heads over 8 key/value heads and 4,096 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, *shape, size, generator=generator) for shape in ((32, 1), (8, 4096), (8, 4096)))
    return q, k, v


def first_step(way: str) -> float:
    """Seconds to the first result in this process, importing and compiling included."""
    q, k, v = tensors(64)
    F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # warm up torch itself
    begin = cpu_seconds()
    WAYS[way]()(q, k, v)
    return cpu_seconds() - begin


def first_steps(way: str) -> tuple[float, float]:
    """Seconds to the first step with an empty cache, and with the cache that this leaves."""
    script = f"import compilers; print(compilers.first_step({way!r}))"
    with tempfile.TemporaryDirectory() as folder:
        names = ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
        rooms = {**os.environ, **THREADS, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        rooms.update(dict.fromkeys(names, folder))
        run = [sys.executable, "-c", script]
        cold, warm = (
            float(subprocess.run(run, env=rooms, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
            for _ in range(2)
        )
    return cold, warm


def lines(paths: list[Path]) -> int:
    """The number of lines that are neither empty nor only a comment."""
    text = "\n".join(path.read_text() for path in paths).splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith(("#", "//")) for line in text)


def main() -> None:
    """Measure, print a table and a line of JSON."""
    os.environ.update(THREADS)
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for way in WAYS:
        cold, warm = first_steps(way)
        results[way] = {"lines": lines(FILES[way]), "first_step_s": cold, "first_step_kept_s": warm}
    steps = {way: make() for way, make in WAYS.items()}
    steps["SDPA"] = partial(F.scaled_dot_product_attention, enable_gqa=True)
    for size in (64, 128):
        q, k, v = tensors(size)
        for way, step in steps.items():
            if (step(q, k, v) - steps["SDPA"](q, k, v)).abs().max() > 1e-5:
                raise ValueError(f"{way}: expected the result of SDPA, got another")
        times = interleaved([partial(step, q, k, v) for step in steps.values()], 201)
        for way, seconds in zip(steps, times, strict=True):
            results.setdefault(way, {})[f"ms_{size}"] = 1000 * seconds
    columns = ["lines", "first_step_s", "first_step_kept_s", "ms_64", "ms_128"]
    print(" " * 10 + "".join(f"{name:>20}" for name in columns))
    for way, numbers in results.items():
        print(f"{way:10}" + "".join(f"{numbers[n]:20.3f}" if n in numbers else " " * 20 for n in columns))
    print(json.dumps({"environment": environment(), "results": results}))


if __name__ == "__main__":
    main()
