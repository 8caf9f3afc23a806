"""Kills of running trainings, and damage to their checkpoints.

A run is killed with SIGKILL, at named points of what it does with files, at the n-th import of its start and at the
n-th call of a function after some step, goes on from its newest checkpoint, is killed again, and so on until it is
complete. Then it must be bitwise the run that nobody disturbed: its metrics, its weights, the optimizer's memory, the
random states. And no kill may ever leave a checkpoint under its name that is not whole.
`python tests/chaos.py --kills 200 --flips 1000` runs more of it than the tests do.

What is run knows nothing of this: a child process first puts its own functions in the place of open, os.fsync,
os.rename, os.replace and shutil.rmtree, which kill it at the n-th call, and then becomes the ordinary command line. No
clock decides when a kill comes, so the load of the machine changes nothing; a point that a life does not come to any
more is its end, and the process is killed there.
"""

import argparse
import builtins
import io
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILES = ("open", "mid-write", "before flush", "after flush", "before rename", "after rename", "prune")
STEPS = 30
SAVE_EVERY = 5
KILLS_OF_A_RUN = 8
CALLS_OF_A_STEP = 3000
"""Of Python functions, about."""
PATIENCE = 180
"""Seconds after which a process that neither ends nor is killed counts as hanging."""
VOLATILE = {"seconds", "tokens_per_second"}
"""What differs between two runs that are alike."""

TRAIN = [
    *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--evaluate-every", "10", "--keep", "2"),
    *("--count", "400", "--held-out", "16", "--vocabulary-size", "300", "--batch-size", "8", "--dropout", "0.1"),
    *("--embedding-dim", "16", "--num-heads", "2", "--num-layers", "1", "--hidden-dim", "32"),
]


@dataclass(frozen=True)
class Kill:
    """How a process is to end: at the n-th time that it comes to a point, and so many calls of functions after."""

    point: str
    number: int
    calls: int
    rank: int
    group: bool
    """Whether all processes of the run are killed, torchrun with them, or this rank alone."""


@dataclass(frozen=True)
class Variant:
    """What is run, and on how many processes; with shards, each of them holds a part of the model."""

    job: str
    ranks: int
    shards: bool

    @property
    def name(self):
        return f"{self.job}-{self.ranks}{'-shards' if self.shards else ''}"


# The child


class Trap:
    """Counts how often each point is reached, in the run's folder and its checkpoints, and kills at the one asked for.

    The points are files that are written, imports, and steps: lines of metrics.
    """

    def __init__(self, asked):
        self.asked = asked
        self.folder = os.path.abspath(asked["folder"]) + os.sep
        self.mine = int(os.environ.get("RANK", 0)) == asked.get("rank")
        self.seen = Counter()

    def reached(self, point, path):
        place = os.path.abspath(path) if isinstance(path, str | os.PathLike) else ""
        if not place.startswith(self.folder):
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
            for process in reversed(relatives(os.getppid())):  # torchrun last: its end is waited for
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
    """A file that is killed in the midst of a write."""

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
    """Set the trap, then be the command."""
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
    """A training of a few numbers: it asks of the store what the real one asks, shards and dropout among it."""
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
        dist.destroy_process_group()


# Processes


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


def launch(variant, folder, asked, log):
    """Start a run, or go on with it."""
    command = []
    if variant.job == "train":
        begun = (folder / "run.json").exists()
        if not begun:
            shutil.rmtree(folder, ignore_errors=True)
        command = ["train", "resume", str(folder)] if begun else ["train", "translate", "--out", str(folder), *TRAIN]
        command += ["--device", "cpu", "--strategy", "fsdp" if variant.shards else "ddp"]
    else:
        folder.mkdir(parents=True, exist_ok=True)
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(variant.ranks)]
    environment = {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CHAOS": json.dumps({"job": variant.job, "folder": str(folder), **asked}),
    }
    return subprocess.Popen(
        [sys.executable, *(many if variant.ranks > 1 else []), __file__, "--child", "--", *command],
        env=environment,
        stdout=log,
        stderr=log,
    )


def finish(process):
    """Wait for the end; a process that hangs is killed and reported."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        for process_id in relatives(process.pid):
            kill(process_id)
        process.wait()
        return "hangs"


# The harness


@dataclass
class Tally:
    """What has happened so far, written to by several threads."""

    kills: Counter = field(default_factory=Counter)
    runs: int = 0
    failures: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Undisturbed:
    """The run that nobody disturbed: what it left, and how often each process came to each point."""

    folder: Path
    counts: list


def undisturbed(variant, folder):
    counts = folder.with_name(f"{folder.name}-counts")
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "wb") as output:
        ended = finish(launch(variant, folder, {"counts": str(counts)}, output))
    if ended != 0:
        raise RuntimeError(f"the run that nobody disturbed ends with {ended}:\n{log.read_text()[-3000:]}")
    return Undisturbed(folder, [json.loads(Path(f"{counts}-{rank}").read_text()) for rank in range(variant.ranks)])


def planned(kills, whole, rng):
    """So many kills: half of them in steps and in the start, half where files are written, each point alike."""
    plans, points = [], rng.sample(FILES, len(FILES))
    for number in range(kills):
        rank = rng.randrange(len(whole.counts))
        group = len(whole.counts) > 1 and rng.random() < 0.5
        if number % 2:
            point = points[number // 2 % len(points)]
            # Some things only the first process does.
            rank = rank if any(name.startswith(point) for name in whole.counts[rank]) else 0
            counts = whole.counts[rank]
            places = [name for name in counts if name.startswith(point)]
            chosen = rng.choice([name for name in places if "checkpoint" in name] * 3 + places)
            # Within the first third of its calls, so that a resumed run still comes to it.
            plans.append(Kill(chosen, rng.randint(1, max(1, counts[chosen] // 3)), 0, rank, group))
        elif rng.random() < 0.1:
            plans.append(Kill("import", rng.randint(1, whole.counts[rank]["import"]), 0, rank, group))
        else:  # the first process writes the metrics
            plans.append(Kill("step", rng.randint(1, 12), rng.randrange(CALLS_OF_A_STEP), 0, group))
    rng.shuffle(plans)
    return plans


def attempt(variant, plan, folder, log):
    """One life of a run. 'killed', 'complete', or what went wrong."""
    marker = folder.with_name(f"{folder.name}-killed")
    marker.unlink(missing_ok=True)
    ended = finish(launch(variant, folder, {"marker": str(marker), **(asdict(plan) if plan else {})}, log))
    if ended != "hangs" and marker.exists():
        return "killed"
    return "complete" if ended == 0 else f"ends with {ended}"


def difference(whole, other):
    """What two folders of runs differ in, or nothing."""
    from regard.training import store

    def metrics(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [{name: value for name, value in json.loads(line).items() if name not in VOLATILE} for line in lines]

    if metrics(whole) != metrics(other):
        return "metrics.jsonl differs"
    pair = [store.newest(folder / "checkpoints")[0] for folder in (whole, other)]
    if None in pair or pair[0].name != pair[1].name:
        return f"the last checkpoints are {pair}"
    notes = [{n: v for n, v in store.read_note(path).items() if n not in VOLATILE} for path in pair]
    if notes[0] != notes[1]:
        return "the last note differs"
    for folders in (pair, (whole / "model", other / "model")):
        for path in sorted(folders[0].glob("*.safetensors")):
            if path.read_bytes() != (folders[1] / path.name).read_bytes():
                return f"{path.parent.name}/{path.name} differs"
    return None


def half_there(folder):
    """What is wrong with checkpoints that bear their name without being whole."""
    from regard.training import store

    errors = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            store.load(path, {})
        except store.CheckpointError as error:
            errors.append(str(error))
    return errors


def disturbed(variant, plans, whole, folder, tally, advance):
    """Run after run until all the plans are carried out."""
    plans, number = list(plans), 0
    while plans:
        number += 1
        run, kills = folder.with_name(f"{folder.name}-{number}"), 0
        log = run.with_name(f"{run.name}.log")
        while True:
            plan = plans[0] if plans and kills < KILLS_OF_A_RUN else None
            with open(log, "ab") as output:
                ended = attempt(variant, plan, run, output)
            wrong = half_there(run)
            if wrong or ended != "killed":
                break
            kills += 1
            plans.pop(0)
            with tally.lock:
                tally.kills[plan.point] += 1
            advance()
        if ended != "complete" or plan is not None:
            wrong = wrong or f"{ended}, and no kill"
        wrong = wrong or difference(whole.folder, run)
        with tally.lock:
            tally.runs += 1
            if wrong:
                tally.failures.append(f"{run}, after {kills} kills, {plan}: {wrong}; its output is in {log}")
        if wrong:
            return
        shutil.rmtree(run)
        log.unlink()


def chaos(job, kills, ranks, seed, out, at_once=2, advance=lambda: None):
    """Disturb runs of a job; gives the tally."""
    tally = Tally()
    variants = []
    for place, count in enumerate(ranks):
        share = kills // len(ranks) + (place < kills % len(ranks))
        # The small training of several processes always has shards.
        kinds = [True] if job == "store" else [False, True]
        for at, shards in enumerate(kinds if count > 1 else [False]):
            part = share // len(kinds) + (at < share % len(kinds)) if count > 1 else share
            variants.append((Variant(job, count, shards), part))
    with ThreadPoolExecutor(at_once) as pool:
        jobs = []
        for variant, share in variants:
            whole = undisturbed(variant, out / f"{variant.name}-undisturbed")
            plans = planned(share, whole, random.Random(f"{seed} {variant}"))
            for part in range(at_once):
                folder = out / f"{variant.name}-{'abcdefgh'[part]}"
                jobs.append(pool.submit(disturbed, variant, plans[part::at_once], whole, folder, tally, advance))
        for job in jobs:
            job.result()
    return tally


# Damage


def make_two(folder):
    """Two checkpoints of a few tensors; gives the newer one."""
    import torch

    from regard.training import store

    generator = torch.Generator().manual_seed(0)
    tensors = {
        "weight": torch.randn(7, 5, generator=generator),
        "half": torch.randn(9, generator=generator).bfloat16(),
        "step": torch.tensor(12.0),
        "random": torch.randint(256, (99,), generator=generator, dtype=torch.uint8),
    }
    for step in (5, 10):
        path = store.save(folder, step, tensors, {"step": step, "best": {"loss": 0.25}}, keep=2)
    return path


def noticed(path):
    """Whether the older checkpoint is chosen and the sentence names the damaged one."""
    from regard.training import store

    newest, skipped = store.newest(path.parent)
    return newest is not None and newest.name == "step-00000005" and len(skipped) == 1 and str(path) in skipped[0]


def flips(path, count, rng):
    """Flip one bit of a file, somewhere; gives, for each, where it was and whether it was noticed."""
    files = sorted(path.iterdir())
    for number in range(count):
        file = files[number % len(files)]
        good = file.read_bytes()
        bit = rng.randrange(8 * len(good))
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        yield f"{file.name}, bit {bit}", noticed(path)
        file.write_bytes(good)


def truncations(path, count, rng):
    """Cut files short, at both ends of what is possible and at random between."""
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        for size in {0, 1, 7, 8, 9, len(good) - 1, *(rng.randrange(len(good)) for _ in range(count))}:
            file.write_bytes(good[:size])
            yield f"{file.name}, {size} bytes of {len(good)}", noticed(path)
            file.write_bytes(good)


def main():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2", help="numbers of processes, with commas")
    parser.add_argument(
        "--job", choices=["train", "store"], default="train", help="the command line, or the store alone"
    )
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--out", type=Path, help="where runs go; those that fail stay there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, not as a table")
    parser.add_argument("--save", type=Path, help="also write the result to this file, with machine and commit")
    options = parser.parse_args()
    ranks = [int(rank) for rank in options.ranks.split(",")]
    out = (options.out or Path(tempfile.mkdtemp(prefix="chaos-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        killed = bar.add_task("kills", total=options.kills)
        flipped = bar.add_task("flips", total=options.flips)
        path = make_two(out / "damage")
        damage = {}
        for kind, make, count in (("flips", flips, options.flips), ("truncations", truncations, options.flips // 20)):
            damage[kind] = list(make(path, count, random.Random(f"{options.seed} {kind}")))
            bar.update(flipped, completed=len(damage["flips"]))
        tally = chaos(
            options.job, options.kills, ranks, options.seed, out, options.at_once, lambda: bar.advance(killed)
        )
    missed = [where for results_of in damage.values() for where, seen in results_of if not seen]
    results = {
        "job": options.job,
        "ranks": ranks,
        "seed": options.seed,
        "kills": sum(tally.kills.values()),
        "kills by point": dict(tally.kills),
        "runs": tally.runs,
        "runs that are bitwise the undisturbed one": tally.runs - len(tally.failures),
        **{kind: len(results_of) for kind, results_of in damage.items()},
        "damage unnoticed": missed,
        "failures": tally.failures,
        "seconds": round(time.monotonic() - began),
    }
    if options.save is not None:
        from regard.commands.suite.harness import environment
        from regard.core.files import write_text

        write_text(options.save, json.dumps({"environment": environment(), **results}, indent=1) + "\n")
    if options.json:
        print(json.dumps(results))
    else:
        table = Table("kills", "", title=f"{results['kills']} kills, {ranks} ranks, seed {options.seed}")
        for point, number in sorted(tally.kills.items()):
            table.add_row(point, str(number))
        Console().print(table)
        for name in ("runs", "runs that are bitwise the undisturbed one", *damage, "damage unnoticed", "seconds"):
            print(f"{name}: {results[name]}")
        for failure in tally.failures:
            print(failure)
    failed = bool(missed or tally.failures or results["kills"] < options.kills)
    if not failed and options.out is None:
        shutil.rmtree(out)
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[3:])
    else:
        sys.exit(main())
