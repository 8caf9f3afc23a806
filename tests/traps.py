"""A command that is killed at a named point: `python tests/traps.py train …`, with the point in $CHAOS as JSON.

The command knows nothing of this. The process first replaces open, os.fsync, os.rename, os.replace and shutil.rmtree by
functions that kill it at the n-th call, and then runs the ordinary command line. No clock decides when a kill comes, so
that the load of the machine changes nothing; a process that does not reach its point is killed at its end.
"""

import builtins
import io
import json
import os
import runpy
import shutil
import signal
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

STEPS = 30
SAVE_EVERY = 5


class Trap:
    """Counts how often each point is reached, in the run's folder and its checkpoints, and kills at a given point.

    Points are writes of files, imports, and steps (lines of metrics).
    """

    def __init__(self, asked):
        self.asked = asked
        self.folder = os.path.abspath(asked["folder"]) + os.sep
        # Where it is made before it has its name.
        self.unfinished = os.path.join(os.path.dirname(self.folder[:-1]), f".{os.path.basename(asked['folder'])}.")
        self.mine = int(os.environ.get("RANK", 0)) == asked.get("rank")
        self.seen = Counter()

    def reached(self, point, path):
        place = os.path.abspath(path) if isinstance(path, str | os.PathLike) else ""
        if not place.startswith((self.folder, self.unfinished)):
            return False
        if point == "mid-write" and place == self.folder + "metrics.jsonl" and self.counted("step"):
            self.spring_later()
        point += ", checkpoint" if place.startswith(self.folder + "checkpoints") else ", elsewhere"
        return self.counted(point)

    def counted(self, point):
        self.seen[point] += 1
        return self.mine and point == self.asked.get("point") and self.seen[point] == self.asked["number"]

    def spring_later(self):
        left = self.asked["calls"]

        def count(frame, event, argument):
            nonlocal left
            left -= event == "call"
            if left < 0:
                self.spring()

        sys.setprofile(count)

    def spring(self):
        Path(self.asked["marker"]).touch()
        if self.asked["group"]:
            for process in reversed(relatives(os.getppid())):  # torchrun last: the harness waits for its end
                if process != os.getpid():
                    kill(process)
        kill(os.getpid())

    def at(self, point, path):
        if self.reached(point, path):
            self.spring()

    def set(self):
        opened, fsync, rmtree = io.open, os.fsync, shutil.rmtree

        def watched_open(file, mode="r", *args, **kwargs):
            file_object = opened(file, mode, *args, **kwargs)
            if not set(mode) & set("wxa+"):
                return file_object
            self.at("open", file)
            return Watched(file_object, file, self)

        def watched_fsync(descriptor):
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            self.at("before flush", path)
            fsync(descriptor)
            self.at("after flush", path)

        def watched_rename(rename):
            def run(source, target, *args, **kwargs):
                self.at("before rename", target)
                rename(source, target, *args, **kwargs)
                self.at("after rename", target)

            return run

        def watched_rmtree(path, *args, **kwargs):
            if self.reached("prune", path):
                for file in [entry for entry in sorted(Path(path).rglob("*")) if entry.is_file()][:1]:
                    os.unlink(file)
                self.spring()
            rmtree(path, *args, **kwargs)

        def watched_import(event, _):
            if event == "import" and self.counted("import"):
                self.spring()

        sys.addaudithook(watched_import)
        builtins.open = io.open = watched_open
        os.fsync, shutil.rmtree = watched_fsync, watched_rmtree
        os.rename, os.replace = watched_rename(os.rename), watched_rename(os.replace)


class Watched:
    """A file whose process is killed in the middle of a write."""

    def __init__(self, file, path, trap):
        self._file, self._path, self._trap = file, path, trap

    def write(self, data):
        if self._trap.reached("mid-write", self._path):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._trap.spring()
        return self._file.write(data)

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)


def child(command):
    """Set the trap, then run the command."""
    asked = json.loads(os.environ["CHAOS"])
    trap = Trap(asked)
    trap.set()
    try:
        if asked["job"] == "store":
            small_training(Path(asked["folder"]))
        else:
            sys.argv = ["regard", *command]
            runpy.run_module("regard", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if ended.code:
            raise
    if "counts" in asked:
        counts = Path(f"{asked['counts']}-{os.environ.get('RANK', 0)}")
        counts.write_text(json.dumps(trap.seen))
    if trap.mine:
        trap.spring()


def small_training(folder):
    """A tiny training run that uses the store like a real one, with shards and dropout."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from regard.training import store

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Dropout(0.2), nn.Linear(33, 7))
    if world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo")
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            **{n: torch.zeros_like(parameter) for n in ("exp_avg", "exp_avg_sq")},
        }
    torch.manual_seed(rank + 1)
    state = torch.get_rng_state()
    tensors = {
        **model.state_dict(),
        **{
            f"{n}.{part}": t
            for n, parameter in model.named_parameters()
            for part, t in optimizer.state[parameter].items()
        },
        f"random.{rank}": state,
    }
    path, _ = store.newest(folder / "checkpoints")
    first, metrics = 0, folder / "metrics.jsonl"
    if path is not None:
        first = store.load(path, tensors)["step"]
        torch.set_rng_state(state)
    if rank == 0:
        lines = metrics.read_text().splitlines()[:first] if metrics.exists() else []
        metrics.write_text("".join(f"{line}\n" for line in lines))
    for step in range(first + 1, STEPS + 1):
        data = torch.randn(5, 7)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
                file.flush()
        if step % SAVE_EVERY == 0:
            state.copy_(torch.get_rng_state())
            store.save(folder / "checkpoints", step, tensors, {"step": step}, keep=2)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def kill(process):
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def relatives(parent):
    """The process and its children."""
    processes = [parent]
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                processes.append(int(entry.name))
    return processes


if __name__ == "__main__":
    child(sys.argv[1:])
