"""The same programs for ARM: four lanes, by LLVM's cross target, and run where an emulator and a linker are installed.

On Debian: apt-get install qemu-user gcc-aarch64-linux-gnu
"""

import shutil
import struct
import subprocess
from math import e, log2
from pathlib import Path

import pytest
import torch

pytest.importorskip("llvmlite", reason="llvmlite is not installed")

from regard.core.paths import compiler, decode_code
from regard.core.states.buffer import quantize
from regard.models.layers import linear_code

LANES, TRIPLE, BASE = 4, "aarch64-unknown-linux-gnu", 0x4000_0000
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
LINKER = shutil.which("aarch64-linux-gnu-gcc")
MAIN = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
void step(long fields[]);
int main(int count, char **given) {  /* memory lies in a file, at one address, and is changed there */
    int file = open(given[1], O_RDWR);
    void *memory = mmap((void *)%#xL, atol(given[2]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
    if (file < 0 || memory == MAP_FAILED) return 1;
    step(memory);
    return 0;
}
"""


def assembled(text: str) -> tuple[str, bytes]:
    """A program for a plain ARMv8 processor: as assembly, and as an object file."""
    machine = compiler.elsewhere(TRIPLE, "generic", "+neon")
    module = compiler.optimized(text, machine)
    return machine.emit_assembly(module), machine.emit_object(module)


def run(text: str, fields: list[int | torch.Tensor], folder: Path) -> list[torch.Tensor]:
    """Call a program in an emulator. Tensors among its fields are addresses to it; they come back as it left them."""
    if EMULATOR is None or LINKER is None:
        pytest.skip("no qemu-aarch64 and aarch64-linux-gnu-gcc here: the code was assembled, not run")
    (folder / "step.o").write_bytes(assembled(text)[1])
    (folder / "main.c").write_text(MAIN % BASE)
    subprocess.run([LINKER, "-static", "-o", "main", "main.c", "step.o"], cwd=folder, check=True)
    places, arguments, memory = [], [], bytearray(8 * len(fields))
    for value in fields:
        if isinstance(value, torch.Tensor):
            memory += bytes(-len(memory) % 64)
            arguments.append(BASE + len(memory))
            places.append((len(memory), value))
            memory += value.contiguous().view(torch.uint8).numpy().tobytes()
        else:
            arguments.append(value)
    struct.pack_into(f"{len(arguments)}q", memory, 0, *arguments)
    (folder / "memory").write_bytes(memory)
    subprocess.run([EMULATOR, "./main", "memory", str(len(memory))], cwd=folder, check=True)
    left = (folder / "memory").read_bytes()
    return [
        torch.frombuffer(bytearray(left[place : place + value.nbytes]), dtype=value.dtype).view(value.shape)
        for place, value in places
    ]


@pytest.mark.parametrize(("dtype", "tile"), [("float32", 1), ("float16", 2), ("bfloat16", 4), ("float32", 8)])
def test_the_code_has_vectors_of_four(dtype, tile):
    text, code = assembled(decode_code.source(32, 16, tile, dtype, dtype, dtype, LANES))
    assert "fmla\tv" in text
    assert ".4s" in text
    assert code[:4] == b"\x7fELF"
    assert code[18] == 183  # a file for AArch64


@pytest.mark.parametrize(
    ("dtype", "rows", "result", "stored"),
    [
        (torch.float32, 1, torch.float32, torch.float32),
        (torch.float16, 2, torch.float16, torch.float16),
        (torch.bfloat16, 4, torch.bfloat16, torch.bfloat16),
        (torch.float32, 7, torch.float32, torch.float32),
        (torch.float16, 20, torch.float32, torch.float16),
        (torch.float32, 1, torch.float32, torch.int8),
        (torch.float16, 2, torch.float32, torch.int8),
        (torch.bfloat16, 7, torch.float32, torch.int8),
    ],
    ids=str,
)
def test_attention_is_right_in_an_emulator(dtype, rows, result, stored, tmp_path):
    torch.manual_seed(rows)
    groups, keys, K, V, parts = 2, 150, 32, 16, 2
    tile, lanes = decode_code.tiles(rows, LANES)
    chunk = -(-rows // tile) * tile
    q, k, v = (torch.randn(groups, *shape).to(dtype) for shape in ((rows, K), (keys, K), (keys, V)))
    (k, k_scales), (v, v_scales) = (quantize(t) if stored is torch.int8 else (t, torch.ones(1)) for t in (k, v))
    (factor,) = struct.unpack("q", struct.pack("d", K**-0.5 * log2(e)))
    fields = {
        "next": 0, "tasks": groups * parts, "parts": parts, "chunks": 1, "chunk": chunk, "groups": groups,
        "rows": rows, "queries": rows, "offset": keys - rows, "before": 1 << 40, "after": 0, "spans": 0,
        "q": q, "k": k, "v": v, "out": torch.full((groups, rows, V), torch.nan, dtype=result), "tops": 0, "room": 0,
        "k_batch": 0, "k_head": keys * K, "k_token": K, "v_batch": 0, "v_head": keys * V, "v_token": V,
        "k_scales": k_scales, "v_scales": v_scales,
        "k_scales_batch": 0, "k_scales_head": keys, "v_scales_batch": 0, "v_scales_head": keys,
        "threads": 1, "parallel": 0, "scale": factor, "span": 3,
    }  # fmt: skip
    text = decode_code.source(
        K, V, tile, *(str(kind).removeprefix("torch.") for kind in (dtype, stored, result)), lanes
    )
    *_, out, _, _ = run(text, [*(fields[name] for name in decode_code.FIELDS), keys], tmp_path)
    q, k, v = q.double(), k.double() * k_scales, v.double() * v_scales
    place = torch.arange(keys)
    seen = (place >= 3) & (place <= torch.arange(keys - rows, keys)[:, None])
    wanted = torch.softmax((q @ k.mT * K**-0.5).masked_fill(~seen, -torch.inf), -1) @ v
    rounding = 0 if result is torch.float32 else torch.finfo(result).eps / 2
    assert ((out - wanted).abs() < 2e-6 + rounding * wanted.abs()).all()


@pytest.mark.parametrize(("kind", "tokens"), [("float32", 3), ("int8", 1), ("int8", 9)])
def test_products_are_right_in_an_emulator(kind, tokens, tmp_path):
    torch.manual_seed(tokens)
    width, rows, step = 48, 22, 8
    x, scale = torch.randn(tokens, width), torch.rand(rows) + 0.5
    weight = torch.randn(rows, width) if kind == "float32" else torch.randint(-127, 128, (rows, width)).to(torch.int8)
    out = torch.full((tokens, rows), torch.nan)
    fields = [0, -(-rows // step), tokens, width, rows, step, width, x, weight, scale, out]
    *_, out = run(linear_code.source(kind, LANES), fields, tmp_path)
    wanted = x.double() @ weight.double().T * (scale if kind == "int8" else 1)
    assert (out - wanted).abs().max() < 1e-6 * wanted.abs().max() + 1e-6
