"""`make wheel`: the sdist, and the wheel built from it, tried in clean environments.

    python tests/wheel.py python3.11 python3.12 python3.13

In an environment for each Python, the wheel is installed without extras: the first block of the README runs, and what
needs an extra says which. Then with all extras: the commands run. A Python that is not on this machine is named and
left out; anything that goes wrong ends the script.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

from blocks import python_blocks

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
SHIPPED = ("regard/py.typed", "regard/shipped/translator/model.safetensors", "regard/core/attention.py")
ABSENT = ("numpy", "hypothesis", "typer", "matplotlib", "safetensors", "tokenizers", "llvmlite")
"""Packages that an installation without extras must not have."""
NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"
"""What PyTorch itself says once when it is imported without NumPy."""
CORE = """
import importlib.util, sys
import regard as rg, torch

present = [name for name in {absent} if importlib.util.find_spec(name)]
assert present == [], present
try:
    rg.check(rg.Softmax())
except ModuleNotFoundError as error:
    assert str(error) == 'a check of laws needs hypothesis: pip install "regard[check]"', error
model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=16, num_layers=1, num_heads=2))
assert len(rg.generate(model, [[1, 2, 3]], max_new_tokens=4)[0].tokens) == 4
q = torch.randn(1, 2, 1, 64)
plan = str(rg.explain(q, q, q))
assert sys.platform != "linux" or 'pip install "regard[fast]"' in plan, plan
"""
COMMANDS = (
    ("--help",),
    ("translate", "La voiture rouge est rapide."),
    ("check", "quadratic", "--law", "weights", "--law", "streamed", "--mask", "causal", "--dtype", "float32"),
)


def main(pythons: list[str]) -> None:
    """Build, then try every Python that is here."""
    wheel = build()
    tried = [python for python in pythons if try_on(python, wheel)]
    if not tried:
        sys.exit(f"wheel: expected a Python that runs, got none of {', '.join(pythons)}")
    print(f"{wheel.name}: right on {', '.join(tried)}")


def build() -> Path:
    """The wheel, built from the sdist as an installer would, both in dist/."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    done(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(DIST)!r})", cwd=ROOT)
    [sdist] = DIST.glob("*.tar.gz")
    done(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(DIST), str(sdist)),
    )
    [wheel] = DIST.glob("*.whl")
    with tarfile.open(sdist) as files:
        check_shipped([re.sub(r"^[^/]+/src/", "", name) for name in files.getnames()], sdist)
    with zipfile.ZipFile(wheel) as files:
        check_shipped(files.namelist(), wheel)
    for path in (sdist, wheel):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
    return wheel


def check_shipped(names: list[str], archive: Path) -> None:
    """Stop if an archive lacks a file that is not Python, or the Python."""
    missing = [name for name in SHIPPED if name not in names]
    if missing:
        sys.exit(f"{archive.name}: expected {', '.join(missing)} in it, got none")


def try_on(python: str, wheel: Path) -> bool:
    """Install and run on one Python; False if it is not here."""
    version = subprocess.run([python, "--version"], capture_output=True, text=True) if shutil.which(python) else None
    if version is None or version.returncode:
        print(f"{python}: not on this machine, left out")
        return False
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        inner = Path(folder, "venv", "bin", "python")
        install = (str(inner), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        done(python, "-m", "venv", str(Path(folder, "venv")))
        done(*install, *torch_of_the_lock())
        done(*install, str(wheel))
        first, *_ = python_blocks(ROOT / "README.md")
        without_checks = "\n".join(line for line in first.split("\n") if "rg.check(" not in line)
        for code in (without_checks, CORE.format(absent=ABSENT)):
            done(str(inner), "-W", "error", "-W", NO_NUMPY, "-c", code, cwd=folder)
        core = time.monotonic() - begun
        done(*install, f"regard[all] @ {wheel.as_uri()}")
        for words in COMMANDS:
            done(str(inner.with_name("regard")), *words, cwd=folder)
    extras = time.monotonic() - begun - core
    print(f"{version.stdout.strip()}: right; {core:.0f} s without extras, {extras:.0f} s with all", flush=True)
    return True


def torch_of_the_lock() -> list[str]:
    """The torch that Regard is developed with."""
    return re.findall(r"^torch==.+$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)


def done(*command: str, cwd: str | Path | None = None) -> None:
    """Run a command; its output is shown only if it fails, which ends the script."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode:
        output = f"{result.stdout}{result.stderr}"
        sys.exit(f"{' '.join(command)[:500]}\n{output}\nwheel: expected exit 0, got {result.returncode}")


if __name__ == "__main__":
    main(sys.argv[1:])
