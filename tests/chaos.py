"""Kills of training runs, and damage to their checkpoints.

A run is killed with SIGKILL at named points: where it writes files, at the n-th import of its start, at the n-th call
of a function after some step. It resumes from its newest checkpoint, is killed again, and so on until it is complete.
Then it must be bitwise equal to a run that was not disturbed: metrics, weights, optimizer state, random states. And no
kill may leave an incomplete checkpoint under the name of a checkpoint. traps.py kills the process.
`python tests/chaos.py --kills 200 --flips 1000 --recipe all` runs more of it than the tests do.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import traps
from damaged import flips, make_two, truncations
from traps import SAVE_EVERY, STEPS, kill, relatives

FILES = ("open", "mid-write", "before flush", "after flush", "before rename", "after rename", "prune")
KILLS_OF_A_RUN = 8
CALLS_OF_A_STEP = 3000
"""Calls of Python functions in a step, about."""
PATIENCE = 180
"""Seconds after which a process that neither ends nor is killed counts as hanging."""
VOLATILE = {"seconds", "tokens_per_second"}
"""Fields that differ between two equal runs."""

TRAIN = [
    *("--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--evaluate-every", "10", "--keep", "2"),
    *("--batch-size", "8"),
]
SIZES = ["--embedding-dim", "16", "--num-heads", "2", "--num-layers", "1", "--dropout", "0.1"]
RECIPES = {
    "translate": [*SIZES, "--count", "400", "--held-out", "16", "--vocabulary-size", "300", "--hidden-dim", "32"],
    "lm": [*SIZES, "--data", "words.txt", "--vocabulary-size", "300", "--context", "16"],
    "chat": ["--from", "base", "--lora-rank", "2", "--ema", "0.9"],
    "bert": [*SIZES, "--data", "words.txt", "--vocabulary-size", "90", "--context-length", "16"],
    "classify": [*SIZES, "--data", "labels.tsv", "--vocabulary-size", "90", "--context-length", "16"],
    "vision": [*SIZES, "--data", "images", "--patch-size", "4"],
}
"""The flags of each recipe; `write_data` makes the files."""


@dataclass(frozen=True)
class Kill:
    """When a process is killed: at the n-th time that it reaches a point, and `calls` function calls after that."""

    point: str
    number: int
    calls: int
    rank: int
    group: bool
    """Whether all processes of the run are killed, torchrun with them, or only this rank."""


@dataclass(frozen=True)
class Variant:
    """The job, the recipe, the number of processes, and whether the model is sharded over them."""

    job: str
    recipe: str
    ranks: int
    shards: bool

    @property
    def name(self):
        return f"{self.job}-{self.recipe}-{self.ranks}{'-shards' if self.shards else ''}"


def write_data(folder):
    """Small data for every recipe."""
    import numpy as np

    import regard as rg
    from regard.training.data.vocabulary import train_bpe

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "words.txt").write_text("".join(f"It is {n}. So it was {n}.\n\n" for n in range(99)))
    (folder / "labels.tsv").write_text("".join(f"{n % 2}\ttext number {n} of some\n" for n in range(99)))
    sizes = {"vocabulary_size": 300, "embedding_dim": 16, "num_heads": 2, "num_layers": 1, "dropout": 0.1}
    base = rg.Decoder(rg.DecoderConfig(**sizes))
    base.tokenizer = train_bpe(["Who? What? Where?"], 300)
    base.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}[END]{% endfor %}"
    rg.save(base, folder / "base")
    (folder / "images").mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    for kind in ("train", "t10k"):
        pictures, labels = random.integers(256, size=(64, 8, 8), dtype=np.uint8), np.arange(64, dtype=np.uint8) % 2
        for name, axes, values in (("images-idx3", 3, pictures), ("labels-idx1", 1, labels)):
            header = bytes([0, 0, 8, axes]) + np.array(values.shape, ">u4").tobytes()
            (folder / "images" / f"{kind}-{name}-ubyte").write_bytes(header + values.tobytes())


def launch(variant, folder, asked, log, forks=None):
    """Start a run, or resume it: in a process of its own, or as a fork."""
    command, data = [], folder.parent / "data"
    if variant.job == "train":
        begun = (folder / "run.json").exists()
        if not begun:
            shutil.rmtree(folder, ignore_errors=True)
        begin = ["train", variant.recipe, "--out", str(folder), *TRAIN, *RECIPES[variant.recipe]]
        command = ["train", "resume", str(folder)] if begun else begin
        command += ["--device", "cpu", "--strategy", "fsdp" if variant.shards else "ddp"]
    else:
        folder.mkdir(parents=True, exist_ok=True)
    chaos = {"CHAOS": json.dumps({"job": variant.job, "folder": str(folder), **asked})}
    if forks is not None and variant.ranks == 1:
        code = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import traps; traps.child({command!r})"
        return forks.run(code, Path(log.name), cwd=data, environment=chaos)
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(variant.ranks)]
    environment = {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **chaos,
    }
    return subprocess.Popen(
        [sys.executable, *(many if variant.ranks > 1 else []), os.path.abspath(traps.__file__), *command],
        cwd=data,
        env=environment,
        stdout=log,
        stderr=log,
    )


def finish(process):
    """Wait for the end of a process; a process that hangs is killed."""
    try:
        return process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        for process_id in relatives(process.pid):
            kill(process_id)
        process.wait()
        return "hangs"


@dataclass
class Tally:
    """Counts of kills, runs and failures, written by several threads."""

    kills: Counter = field(default_factory=Counter)
    runs: int = 0
    failures: list = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Undisturbed:
    """A run without kills: its folder, and how often each process reached each point."""

    folder: Path
    counts: list


def undisturbed(variant, folder, forks=None):
    counts = folder.with_name(f"{folder.name}-counts")
    log = folder.with_name(f"{folder.name}.log")
    with open(log, "wb") as output:
        ended = finish(launch(variant, folder, {"counts": str(counts)}, output, forks))
    if ended != 0:
        raise RuntimeError(f"the undisturbed run ends with {ended}:\n{log.read_text()[-3000:]}")
    return Undisturbed(folder, [json.loads(Path(f"{counts}-{rank}").read_text()) for rank in range(variant.ranks)])


def planned(kills, whole, rng):
    """Plans of `kills` kills: half of them in steps and at the start, half where files are written."""
    plans, points = [], rng.sample(FILES, len(FILES))
    for number in range(kills):
        rank = rng.randrange(len(whole.counts))
        group = len(whole.counts) > 1 and rng.random() < 0.5
        if number % 2:
            point = points[number // 2 % len(points)]
            # Some points only rank 0 reaches.
            rank = rank if any(name.startswith(point) for name in whole.counts[rank]) else 0
            counts = whole.counts[rank]
            places = [name for name in counts if name.startswith(point)]
            chosen = rng.choice([name for name in places if "checkpoint" in name] * 3 + places)
            # Within the first third of its calls, so that a resumed run still reaches it.
            plans.append(Kill(chosen, rng.randint(1, max(1, counts[chosen] // 3)), 0, rank, group))
        elif rng.random() < 0.1:
            plans.append(Kill("import", rng.randint(1, max(1, whole.counts[rank].get("import", 0))), 0, rank, group))
        else:  # rank 0 writes the metrics
            plans.append(Kill("step", rng.randint(1, 12), rng.randrange(CALLS_OF_A_STEP), 0, group))
    rng.shuffle(plans)
    return plans


def attempt(variant, plan, folder, log, forks=None):
    """Start or resume a run once. Returns "killed", "complete", or what went wrong."""
    marker = folder.with_name(f"{folder.name}-killed")
    marker.unlink(missing_ok=True)
    ended = finish(launch(variant, folder, {"marker": str(marker), **(asdict(plan) if plan else {})}, log, forks))
    if ended != "hangs" and marker.exists():
        return "killed"
    return "complete" if ended == 0 else f"ends with {ended}"


def difference(whole, other):
    """A difference between two run folders, or None."""
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
    """The errors of incomplete checkpoints under a checkpoint's name."""
    from regard.training import store

    errors = []
    for path in sorted((folder / "checkpoints").glob("step-*")):
        try:
            store.load(path, {})
        except store.CheckpointError as error:
            errors.append(str(error))
    return errors


def disturbed(variant, plans, whole, folder, tally, advance, forks=None):
    """Run after run until all plans are carried out."""
    plans, number = list(plans), 0
    while plans:
        number += 1
        run, kills = folder.with_name(f"{folder.name}-{number}"), 0
        log = run.with_name(f"{run.name}.log")
        while True:
            plan = plans[0] if plans and kills < KILLS_OF_A_RUN else None
            with open(log, "ab") as output:
                ended = attempt(variant, plan, run, output, forks)
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


def chaos(job, kills, ranks, seed, out, at_once=2, advance=lambda: None, recipes=("translate",), forks=None):
    """Disturb runs of a job, of each recipe; returns the tally."""
    tally = Tally()
    variants = []
    write_data(out / "data")
    for place, (recipe, count) in enumerate(product(recipes, ranks)):
        cells = len(recipes) * len(ranks)
        share = kills // cells + (place < kills % cells)
        # The small training on several processes is always sharded.
        kinds = [True] if job == "store" else [False, True]
        for at, shards in enumerate(kinds if count > 1 else [False]):
            part = share // len(kinds) + (at < share % len(kinds)) if count > 1 else share
            variants.append((Variant(job, recipe, count, shards), part))
    with ThreadPoolExecutor(at_once) as pool:
        jobs = []
        for variant, share in variants:
            whole = undisturbed(variant, out / f"{variant.name}-undisturbed", forks)
            plans = planned(share, whole, random.Random(f"{seed} {variant}"))
            for part in range(at_once):
                folder = out / f"{variant.name}-{'abcdefgh'[part]}"
                share = plans[part::at_once]
                jobs.append(pool.submit(disturbed, variant, share, whole, folder, tally, advance, forks))
        for running in jobs:
            running.result()
    return tally


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
    parser.add_argument("--recipe", choices=[*RECIPES, "all"], default="translate", help="the recipe of --job train")
    parser.add_argument("--at-once", type=int, default=2, help="runs side by side")
    parser.add_argument("--out", type=Path, help="where runs go; those that fail stay there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, not as a table")
    parser.add_argument("--save", type=Path, help="also write the result to this file, with machine and commit")
    options = parser.parse_args()
    ranks = [int(rank) for rank in options.ranks.split(",")]
    chosen = list(RECIPES) if options.recipe == "all" else [options.recipe]
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
            options.job, options.kills, ranks, options.seed, out, options.at_once, lambda: bar.advance(killed), chosen
        )
    missed = [where for outcomes in damage.values() for where, seen in outcomes if not seen]
    results = {
        "job": options.job,
        "recipes": chosen,
        "ranks": ranks,
        "seed": options.seed,
        "kills": sum(tally.kills.values()),
        "kills by point": dict(tally.kills),
        "runs": tally.runs,
        "runs that are bitwise the undisturbed one": tally.runs - len(tally.failures),
        **{kind: len(outcomes) for kind, outcomes in damage.items()},
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
    sys.exit(main())
