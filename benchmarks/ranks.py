"""Runs on 1, 2 and 4 processes with FSDP, and one that goes on with 4, 2, 1 and 3: hashed bytes, memory, weights.

Memory is the most that a process has had while the model was made and trained, above what it had before. The weights
after each change of the number of processes are hashed: they are those that were saved.
`python benchmarks/ranks.py --out benchmarks/results/training/ranks.json`
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from regard.core.files import write_text
from regard.training import Settings, checkpoint_folders, storage, train
from regard.training.parallel import placed
from regard.training.recipes import lm
from regard.training.runs import begin, reopen

lm.TOGETHER = 256  # tokens of an evaluation's batch: their activations are no part of the model
SIZES = {"embedding_dim": 512, "num_heads": 8, "num_layers": 8, "context_length": 64, "vocabulary_size": 1024}


def peak(reset: bool = False) -> int:
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole: Any = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(name.encode() + whole.detach().numpy().tobytes())
    return total.hexdigest()[:16]


def work(folder: Path, steps: int) -> None:
    """What one process does: go on to a step, and say what it took."""
    hashed = 0
    original, write = hashlib.file_digest, storage._write_part

    def counted(file: Any, name: Any) -> Any:
        nonlocal hashed
        hashed += os.fstat(file.fileno()).st_size
        return original(file, name)

    def written(*words: Any) -> tuple[int, str]:
        nonlocal hashed
        size, name = write(*words)
        hashed += size
        return size, name

    checkpoint_folders.hashlib.file_digest, storage._write_part = counted, written
    world = int(os.environ.get("WORLD_SIZE", 1))
    with placed("cpu", "fsdp" if world > 1 else "ddp") as place:
        chosen = Settings(steps=steps, batch_size=4, schedule="constant", evaluate_every=1000, save_every=1000)
        text = folder.parent / "text.txt"
        before = peak(reset=True)
        if not (folder / "run.json").exists():
            task = begin("lm", lm.Options(data=str(text), **SIZES), chosen, folder, place)
            loaded = None
        else:
            task, former = reopen(folder, place)
            train(task, former, folder, place=place, watch=lambda report: None)  # loads alone
            loaded = digest(task.model)
            task, chosen = reopen(folder, place, steps=steps)
        report = train(task, chosen, folder, place=place, watch=lambda report: None)
        answer = {"rank": place.rank, "hashed": hashed, "memory": peak() - before, "loaded": loaded,
                  "saved": digest(task.model), "parameters": sum(p.numel() for p in task.model.parameters()),
                  "tokens_per_second": report.tokens_per_second}  # fmt: skip
    (folder.parent / f"answer-{answer['rank']}.json").write_text(json.dumps(answer))


def run(folder: Path, ranks: int, steps: int) -> list[dict[str, Any]]:
    many = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *many, __file__, "--folder", str(folder), "--steps", str(steps)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    return [json.loads((folder.parent / f"answer-{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the result to this file, with machine and commit")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        work(options.folder, options.steps)
        return
    rows, chain = [], []
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "text.txt").write_text("".join(f"It is {n}. So it was {n}.\n" for n in range(4000)))
        for ranks in (1, 2, 4):
            answers = run(Path(temporary) / f"run-{ranks}", ranks, 3)
            rows.append({
                "ranks": ranks, "parameters": answers[0]["parameters"],
                "hashed_megabytes_of_a_rank": [round(answer["hashed"] / 1e6, 1) for answer in answers],
                "memory_megabytes_of_a_rank": [round(answer["memory"] / 1e6) for answer in answers],
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        saved = None
        for steps, ranks in enumerate((4, 2, 1, 3), start=2):
            answers = run(Path(temporary) / "resharded", ranks, steps)
            same = saved is None or all(answer["loaded"] == saved for answer in answers)
            saved = answers[0]["saved"]
            chain.append({"ranks": ranks, "steps": steps, "weights are those that were saved": same})
            print(json.dumps(chain[-1]), flush=True)
    if options.out is not None:
        from regard.commands.suite.harness import environment

        write_text(
            options.out, json.dumps({"environment": environment(), "rows": rows, "chain": chain}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
