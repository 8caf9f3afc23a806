"""Training on several processes and machines: the weights and losses of one process."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import regard as rg
from processes import started
from regard.models.registry import MODELS, build
from regard.training import Lora, adapt, train
from regard.training.metrics import read_metrics
from regard.training.parallel import Objective, spread
from test_training import RECOMPUTED, Counting, Measured, figures, losses, settings  # noqa: F401  -- figures is for all

ROOT = Path(__file__).parent.parent


def adapted():
    task = Measured()
    adapt(task.model, Lora(rank=2))
    return task


class Running(Counting):
    """A model's output as what it is to learn."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        config, self.run = RECOMPUTED[name]
        self.model = build(config).double()

    def totals(self, model, batch):
        return {"sum": self.run(model, batch["x"]).square().sum()}


def check_shards(place):
    """Each model's blocks are shards of their own, and its gradients those of the whole model."""
    from torch.distributed.fsdp import FSDPModule

    for name in MODELS:
        whole, parts = Running(name), Running(name)
        batch = {"x": torch.arange(18).view(2, 9) % 16}
        whole.totals(whole.model, batch)["sum"].backward()
        objective = spread(Objective(parts), place)
        shards = [module for module in objective.modules() if isinstance(module, FSDPModule)]
        assert shards == [objective, *parts.model.sharded_blocks], name
        assert len(shards) > 3, name
        objective(batch)["sum"].backward()
        for expected, parameter in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
            if expected.grad is not None:
                assert (parameter.grad.full_tensor() - expected.grad).abs().max() <= 1e-12, name


def check_gathered(place):
    """With bfloat16, blocks compute with weights of half the size, and keep float32 weights and gradients."""
    task, seen = Counting(), set()
    objective = spread(Objective(task), place, "bfloat16")
    for block in task.model.sharded_blocks:
        for module in block.modules():
            module.register_forward_pre_hook(
                lambda module, _: seen.update(weight.dtype for weight in module.parameters(recurse=False))
            )
    with torch.autocast("cpu", torch.bfloat16):
        totals = objective(task.batch(range(8), 0))
    sum(totals.values()).backward()
    assert seen == {torch.bfloat16}
    for parameter in task.model.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32


RANKS = """
import sys
import time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from test_training import Measured, settings
from test_training_processes import adapted, check_gathered, check_shards
from regard.training import train
from regard.training.parallel import placed
with placed("cpu", sys.argv[3]) as place:
    for steps in (6, 12):  # the second goes on from the checkpoint of the first
        changes = {"precision": "float64", "schedule": "constant", "ema": 0.8, "steps": steps, "save_every": 3}
        train(Measured(), settings(**changes), Path(sys.argv[2]), place=place)
        train(adapted(), settings(**changes), Path(sys.argv[2], "adapted"), place=place)
    if sys.argv[3] == "fsdp":
        check_shards(place)
        check_gathered(place)
    if place.first:
        time.sleep(0.2)
        Path(sys.argv[2], "last").touch()
assert Path(sys.argv[2], "last").exists(), "a process left before the others"
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(("strategy", "machines", "processes"), [("ddp", 2, 1), ("fsdp", 1, 2), ("hsdp", 2, 2)])
def test_many_processes_are_one(tmp_path, strategy, machines, processes):
    """Machines are torchruns of their own, which meet at an address of this machine."""
    for task, folder in ((Counting(), "one"), (adapted(), "one/adapted")):
        train(task, settings(precision="float64", schedule="constant", ema=0.8), tmp_path / folder)
    (tmp_path / "ranks.py").write_text(RANKS)
    command = ["-m", "torch.distributed.run", "--nnodes", machines, "--nproc-per-node", processes]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "test"]
    command += [tmp_path / "ranks.py", ROOT / "tests", tmp_path / "many", strategy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        launchers = [stack.enter_context(started(*map(str, command), env=environment)) for _ in range(machines)]
        for launcher in launchers:
            _, err = launcher.communicate()
            assert launcher.returncode == 0, err[-3000:]
    for folder in (".", "adapted"):
        records = read_metrics(tmp_path / "many" / folder)
        best = min(record["evaluation"]["loss"] for record in records if "evaluation" in record)
        last = {"step": 12, "test": {"loss": pytest.approx(best, abs=1e-10)}}
        assert records[-1] == last, "the best weights are tested"
        assert losses(tmp_path / "many" / folder) == pytest.approx(losses(tmp_path / "one" / folder), abs=1e-10)
        loaded = rg.load(tmp_path / "many" / folder / "model").state_dict()
        for name, tensor in rg.load(tmp_path / "one" / folder / "model").state_dict().items():
            assert (tensor - loaded[name]).abs().max() <= 1e-10, name
