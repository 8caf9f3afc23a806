"""A full disk is one error that names the file, wherever it is met; Ctrl-C at the start is one line."""

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from forked import Forks, forks
from regard.checkpoints.modules import save_module
from regard.training.data.domain import Domain
from regard.training.data.labels import LabelledTokens
from regard.training.data.vocabulary import train_bpe
from regard.training.metrics import Metrics
from test_store import files_of_at_most, names

RUN = [
    *("train", "lm", "--data", "words.txt", "--vocabulary-size", "300", "--context", "16", "--embedding-dim", "16"),
    *("--num-heads", "2", "--num-layers", "1", "--batch-size", "2", "--device", "cpu"),
    *("--steps", "6", "--save-every", "2", "--evaluate-every", "4"),
]
NO_MOUNT = 77
MOUNTED = """
import ctypes
NAMESPACE, PRIVATE = 0x20000, 0x44000
libc = ctypes.CDLL(None)
if (
    libc.unshare(NAMESPACE)
    or libc.mount(b"none", b"/", None, PRIVATE, None)
    or libc.mount(b"none", b"run", b"tmpfs", 0, b"size={size}k")
):
    os._exit(77)
"""
"""Mount a small disk at run, which only this process sees."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks() as parent:
        yield parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "words.txt").write_text("".join(f"It is {n}. So it was {n}.\n\n" for n in range(60)))
    return tmp_path


def model() -> rg.Decoder:
    return rg.Decoder(rg.DecoderConfig(vocabulary_size=300, embedding_dim=16, num_layers=1, num_heads=2))


def log(folder: Path) -> None:
    metrics = Metrics(folder, 0)
    for step in range(1, 1000):
        metrics.log(step, {"loss": 1.0}, "training")


def labelled(folder: Path) -> None:
    rows = LabelledTokens(np.arange(9000), np.array([0, 9000]), np.array([1]), ("a", "b"))
    rows.save(folder / "train.npz")


def module(folder: Path) -> None:
    net = torch.nn.Linear(50, 50)
    save_module(net, net.state_dict(), folder / "model")


WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "metrics": (log, r"metrics\.jsonl|tensorboard/events\.out\.tfevents\..*"),
    "a model": (lambda folder: rg.save(model(), folder / "model"), r"model/model\.safetensors"),
    "a module": (module, r"model/model\.safetensors"),
    "labelled tokens": (labelled, r"train\.npz"),
    "a tokenizer": (lambda folder: train_bpe(["some words"] * 9, 300).save(folder), r"tokenizer\.json"),
    "words": (lambda folder: Domain.of(f"Le {chr(n)}." for n in range(0x4E00, 0x5800)).save(folder), r"domain\.json"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_writer_names_its_file(name, tmp_path):
    write, file = WRITERS[name]
    for size in (0, 5000):
        place = tmp_path / str(size)
        place.mkdir()
        with pytest.raises(OSError, match="File too large") as error, files_of_at_most(size):
            write(place)
        path = Path(str(error.value.filename))
        assert re.fullmatch(file, str(path.relative_to(place))), path
        if name != "metrics":
            assert names(place) == [], "half a file is not left"


def test_a_run_on_a_full_disk_is_one_error(processes, folder):
    (folder / "run").mkdir()
    files = set()
    for size in (8, 60, 130, 200, 4096):
        out = folder / f"{size}.txt"
        child = processes.regard([*RUN, "--out", "run"], out, cwd=folder, before=MOUNTED.replace("{size}", str(size)))
        code = child.wait()
        if code == NO_MOUNT:
            pytest.skip("this process may not mount a disk")
        errors = [line for line in child.text.splitlines() if "error" in line.lower() or "Traceback" in line]
        if size == 4096:
            assert code == 0, child.text
            continue
        assert code == 2, child.text
        assert len(errors) == 1, child.text
        named = re.search(r"^regard: error: (.*): No space left on device$", errors[0])
        assert named is not None, errors
        files.add(re.sub(r"\.unfinished-\w+/", "", named[1].rpartition("run/")[2]).split("/")[0])
        assert named[1].startswith(("run/", str(folder / "run"), "checkpoint of step")) or "run/" in named[1]
    assert len(files) >= 2, files


def test_a_full_standard_output_is_one_line(processes, folder):
    full = "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    child = processes.regard(["--version"], folder / "out.txt", cwd=folder, before=full)
    assert child.wait() == 2
    assert child.text == "regard: error: standard output: No space left on device\n"


# Ctrl-C

AT = {
    "its data is read": "from regard.training.recipes import lm; place, name = lm, 'train_bpe'",
    "its tokens are written": "from regard.training.recipes import lm; place, name = lm, 'write_tokens'",
    "its model is made": "from regard.training.recipes import lm; place, name = lm, 'Decoder'",
    "it gets its name": "from regard.training import runs as place; name = '_move'",
    "its order is planned": "from regard.training import ahead as place; name = 'plan'",
    "its logs are opened": "from regard.training import loop as place; name = 'Metrics'",
}
INTERRUPT = """
original = getattr(place, name)
def interrupting(*words, **options):
    os.kill(os.getpid(), signal.SIGINT)
    return original(*words, **options)
setattr(place, name, interrupting)
"""


@pytest.mark.parametrize("moment", AT)
def test_ctrl_c_at_the_start_is_one_line(moment, processes, folder):
    child = processes.regard([*RUN, "--out", "run"], folder / "out.txt", cwd=folder, before=AT[moment] + INTERRUPT)
    assert child.wait() == 130, child.text
    assert child.text == "regard: interrupted\n"
    begun = (folder / "run/run.json").exists()
    assert begun == (moment in ("its order is planned", "its logs are opened"))
    assert sorted(os.listdir(folder)) == ["out.txt", *(["run"] if begun else []), "words.txt"]
    assert not (folder / "run/.lock").exists()


# The demo

SMALL = "from regard.commands import demo_page; demo_page.SIZES.update({'count': 2000, 'vocabulary-size': 400})\n"


def descendants(parent: int) -> list[int]:
    """The processes that a process has started."""
    children = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(entry.name))
    return children


@pytest.mark.slow
def test_the_children_of_a_demo_end_with_it(processes, folder):
    demo = processes.regard(["demo", "--out", "demo"], folder / "out.txt", cwd=folder)
    while len(children := descendants(demo.pid)) < 2:
        assert demo.poll() is None, demo.text
        time.sleep(0.1)
    os.kill(demo.pid, signal.SIGKILL)
    assert demo.wait() == -signal.SIGKILL
    limit = time.monotonic() + 60
    while [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < limit, "a child outlives the demo"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_demo_on_a_full_disk_is_one_error(processes, folder):
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, {resource.RLIM_INFINITY}))"
    demo = processes.regard(["demo", "--out", "demo"], folder / "out.txt", cwd=folder, before=SMALL + limit)
    assert demo.wait() == 2, demo.text
    errors = [line for line in demo.text.splitlines() if "error" in line]
    assert len(errors) == 1, demo.text
    assert re.search(r"^regard: error: training with (softmax|quadratic): .*/data/\S*: File too large$", errors[0])
    assert descendants(demo.pid) == []
