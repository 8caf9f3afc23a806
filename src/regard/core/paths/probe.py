"""A check that JIT-compiled code gives right numbers on this CPU, before any call uses it."""

import hashlib
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from regard.core import cpu
from regard.core.states.buffer import quantize

PASSED = b"right"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator] # a trace runs the check, and does not trace it
def off(dtype: torch.dtype, int8: bool = False) -> str | None:
    """Why code for queries of this dtype, over int8 keys or not, is refused: small calls were off; None if they are
    right. Computed once in a process, and not again by later ones that have the same code, processor and LLVM."""
    return _off(dtype, int8, cpu.LANES)


@cache
def _off(dtype: torch.dtype, int8: bool, lanes: int) -> str | None:
    from regard.core.paths import compiler  # llvmlite is imported only when a pass needs it

    name = _name(dtype, int8, compiler.described(lanes))
    if compiler.load(name) == PASSED:
        return None
    with _disable_current_modes(), torch.no_grad():  # no counter, trace or fake tensor sees the check
        error = max(_error(dtype, int8, queries) for queries in (1, 5))  # a vector of a key, and a vector of rows
    if not error <= 4 * torch.finfo(dtype).eps:
        return f"a test of JIT-compiled code on this CPU was off by {error:.1g} in {dtype}"
    compiler.store(name, PASSED)
    return None


def _name(dtype: torch.dtype, int8: bool, processor: tuple[str, ...]) -> str:
    """The file that says that the check has passed: named by all that its result depends on."""
    sources = [
        Path(__file__).with_name(f"{module}.py").read_bytes()
        for module in ("decode_code", "decode_block", "machine_code")
    ]
    described = "\n".join((*processor, str(dtype), str(int8))).encode()
    return hashlib.sha256(b"\n".join((described, *sources))).hexdigest()


def _error(dtype: torch.dtype, int8: bool, queries: int) -> float:
    """The error of attention of some queries to 130 keys."""
    from regard.core.paths.decode import compute

    generator = torch.Generator(device="cpu").manual_seed(0)
    shapes = (1, 2, queries, 16), (1, 2, 130, 16), (1, 2, 130, 16)
    q, k, v = (torch.randn(shape, generator=generator, device="cpu").to(dtype) for shape in shapes)
    if int8:
        (small_k, k_scales), (small_v, v_scales) = quantize(k), quantize(v)
        out = compute(q, small_k, small_v, 0.25, None, None, None, k_scales, v_scales)
        k, v = small_k * k_scales, small_v * v_scales
    else:
        out = compute(q, k, v, 0.25, None, None, None)
    exact = torch.softmax(0.25 * q.double() @ k.double().mT, -1) @ v.double()
    return float((out.double() - exact).abs().max().item())
