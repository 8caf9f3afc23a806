"""How machine code is made: for which processors and systems, by which instructions, and how often."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from decode_calls import agree, reason_against, tensors
from regard.core import cpu
from regard.core.paths import compiler, decode, machine_code, probe

pytestmark = pytest.mark.skipif(cpu.missing() is not None, reason=str(cpu.missing()))


def test_sums_of_many_threads_stay_small():
    """64 threads over 65 heads were 64 parts of each."""
    seen: list[int] = []
    before, real = torch.get_num_threads(), torch.empty
    torch.set_num_threads(64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda *size, **rest: seen.append(math.prod(size)) or real(*size, **rest))
            agree(*tensors(batch=65, groups=1, keys=300))
    finally:
        torch.set_num_threads(before)
    assert max(seen) <= 4 * 8 * 64 * 3 * 16


def test_compiled_code_is_made_once_for_all_threads():
    compiler._compiled.cache_clear()
    decode._program.cache_clear()
    case = tensors(repeats=5)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: rg.attend(*case, path="decode"), range(16)))
    assert compiler._compiled.cache_info().misses == 1


@pytest.mark.once
@pytest.mark.parametrize("gone", ["llvmlite", "libgomp"])
def test_where_something_is_missing_torch_computes(gone):
    """In a process of its own, since what is there is looked up once."""
    script = f"""
import importlib.util, pathlib, torch
real, glob = importlib.util.find_spec, pathlib.Path.glob
if {gone == "llvmlite"}:
    importlib.util.find_spec = lambda name, *rest: None if name == "llvmlite" else real(name, *rest)
else:
    pathlib.Path.glob = lambda self, pattern: iter(()) if "libgomp" in pattern else glob(self, pattern)
import regard as rg
q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
plan = rg.explain(q, k, k)
print(plan.path, plan.rejected["decode"])
print((rg.attend(q, k, k) - rg.attend(q, k, k, path="reference")).abs().max() < 1e-5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("sdpa ")
    assert {"llvmlite": "needs llvmlite, which is not installed", "libgomp": "GNU OpenMP"}[gone] in done.stdout
    assert done.stdout.endswith("tensor(True)\n")


PROGRAMS = """
from regard.core import cpu
from regard.models.layers import linear_code
from regard.core.paths import compiler, decode_code
for source, sizes in (
    (decode_code.source, (64, 64, 4, "bfloat16", "bfloat16", "bfloat16")),
    (linear_code.source, ("int8",)),
    (linear_code.source, ("float32",)),
):
    machine, _ = compiler.host(cpu.LANES)
    code = machine.emit_assembly(compiler.optimized(source(*sizes, cpu.LANES), machine))
    print(cpu.LANES, "vfmadd" in code, "zmm" in code, "%k1" in code)
"""


def test_code_takes_the_widest_registers_there_are(capsys):
    exec(PROGRAMS, {})
    for line in capsys.readouterr().out.splitlines():
        assert line.startswith("16 True True " if cpu.LANES == 16 else "8 True False False")


@pytest.mark.once
def test_code_keeps_to_the_instructions_that_torch_was_told():
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", PROGRAMS], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == 3 * "8 True False False\n"


@pytest.mark.once
def test_a_process_that_may_not_make_code_takes_other_ways_and_says_why():
    """As under systemd's MemoryDenyWriteExecute. LLVM used to die there of a segmentation fault, and oneDNN raised."""
    script = """
import ctypes, torch
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE: no memory that was written becomes code
    raise SystemExit("this kernel has no PR_SET_MDWE")
import regard as rg
q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 2, 4096, 64)
plan = rg.explain(q, k, k)
print(plan.path, plan.rejected["decode"])
print((rg.attend(q, k, k) - rg.attend(q, k, k, path="reference")).abs().max() < 1e-5)
model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9000, embedding_dim=512, num_layers=1, num_heads=8)).eval()
with torch.no_grad():
    print(model(torch.zeros(1, 1, dtype=torch.long)).isfinite().all())
try:
    rg.quantized(model)
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if "PR_SET_MDWE" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    reason = "the system forbids code generated at run time (W^X, MemoryDenyWriteExecute)"
    assert done.stdout.splitlines() == [
        f"sdpa {reason}",
        "tensor(True)",
        "tensor(True)",
        f"model: expected a machine on which int8 weights are fast, got one without: {reason}",
    ]


def forget():
    for cached in (compiler._compiled, decode._program, probe._off):
        cached.cache_clear()


@pytest.mark.once
@pytest.mark.parametrize("lanes", sorted({4, 8, cpu.LANES}))
def test_code_is_probed_before_its_first_use_and_not_again_by_later_processes(monkeypatch, tmp_path, lanes):
    """Four lanes are ARM's."""
    monkeypatch.setattr(cpu, "LANES", lanes)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as broken:
        broken.setattr(machine_code, "_POWERS", (0.0, *machine_code._POWERS[1:5], 0.7, 1.0))
        for _ in range(2):  # a failure is not kept for later processes
            forget()
            assert "was off by" in rg.explain(*tensors()).rejected["decode"]
    for compiles in (True, False):
        forget()
        if not compiles:
            monkeypatch.setattr(probe, "_error", None)
        assert rg.explain(*tensors()).path == "decode"
    forget()


def test_a_probe_is_no_part_of_what_is_counted_or_traced(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    q, k, v = tensors()
    forget()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        rg.attend(q, k, v)
    assert counter.get_total_flops() == 2 * 2 * 6 * 50 * (32 + 16)
    forget()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        assert rg.attend(*(mode.from_tensor(x) for x in (q, k, v))).shape == (*q.shape[:3], 16)


@pytest.mark.once
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_with_the_reason(monkeypatch, system):
    monkeypatch.setattr(sys, "platform", system)
    assert f"made for Linux, where PyTorch uses GNU OpenMP; this is {system}" in reason_against(*tensors())


@pytest.mark.once
def test_llvm_is_imported_only_when_it_is_needed():
    script = "import sys, regard; print('llvmlite' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
