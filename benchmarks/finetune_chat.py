"""SmolLM2 fine-tuned with adapters on the embedded conversations: loss before and after, minutes, memory.

    python benchmarks/finetune_chat.py runs/finetuned --steps 40 --json benchmarks/results/training/chat.json

The validation conversations choose the best model; the test conversations are measured once, at the end. Before the
first step the model is SmolLM2 bitwise. SIGTERM stops the training, and the same command resumes it: the times of the
pieces are added up, and CPU times do not depend on what else the machine does.
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch

import regard as rg
from regard.checkpoints.names import NAMES
from regard.core.files import write_text
from regard.training import Settings, train
from regard.training.machine import environment
from regard.training.parallel import Place
from regard.training.recipes import chat
from regard.training.runs import begin, reopen

QUESTIONS = ("What is a receptive field?", "Why do large batches need larger learning rates?")
"""Neither is in the data."""


def answers(model):
    prompts = [model.tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    return dict(zip(QUESTIONS, map(str, rg.generate(model, prompts, max_new_tokens=60)), strict=True))


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def size(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder of the run")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = chat.Options(lora_rank=arguments.rank, lora_targets="all")
    settings = Settings(steps=arguments.steps, learning_rate=1e-3, warmup=5, batch_size=8, evaluate_every=10)
    place, run = Place(0, 1, torch.device("cpu")), arguments.folder
    began = time.perf_counter()
    if (run / "run.json").exists():
        task, settings = reopen(run, place, steps=arguments.steps)
    else:
        task = begin("chat", options, settings, run, place)
    pieces = json.loads((run / "pieces.json").read_text()) if (run / "pieces.json").exists() else {"minutes": []}
    loading, memories = time.perf_counter() - began, [memory()]
    if "before" not in pieces:
        model = task.model.eval()
        with torch.no_grad():
            pieces |= {"loading": loading, "before": task.evaluate(model), "test": task.test(model)}
        pieces |= {"answers": answers(model), "memory": memories}
        write_text(run / "pieces.json", json.dumps(pieces))
    trained, cpu = time.perf_counter(), time.process_time()
    report = train(task, settings, run, place=place)
    spent = (time.perf_counter() - trained) / 60, (time.process_time() - cpu) / 60
    pieces |= {"minutes": [*pieces["minutes"], spent], "memory": [*pieces["memory"], memory()]}
    write_text(run / "pieces.json", json.dumps(pieces))
    if not report.finished:
        print(f"stopped after step {report.step}")
        return
    best = rg.load(run)
    result = {
        "model": NAMES["smollm2"].description,
        "adapters": options.lora.to_json(),
        "trained parameters": sum(part.numel() for part in task.model.parameters() if part.requires_grad),
        "parameters": sum(part.numel() for part in best.parameters()),
        "settings": {"steps": report.step, "batch size": 8, "learning rate": 1e-3},
        "conversations": {
            "train": len(task.train.sizes), "validation": len(task.validation.sizes), "test": len(task.tested.sizes)
        },
        "tokens a step": round(float(task.train.sizes.mean()) * 8),
        "validation": {"before": pieces["before"], "after": report.results},
        "test": {"before": pieces["test"], "after": report.test},
        "answers": {"before": pieces["answers"], "after": answers(best)},
        "seconds to load and begin": round(pieces["loading"], 1),
        "minutes of training": round(sum(wall for wall, _ in pieces["minutes"]), 2),
        "CPU minutes of training": round(sum(cpu for _, cpu in pieces["minutes"]), 2),
        "pieces": len(pieces["minutes"]),
        "tokens per second": round(report.tokens_per_second, 1),
        "GB at the start, at most": round(pieces["memory"][0], 2),
        "GB in all, at most": round(max(pieces["memory"]), 2),
        "MB on disk": {
            name: round(size(run / name), 1) for name in ("model", "data/start", "checkpoints")
        },
        "machine": environment(),
    }  # fmt: skip
    for part in ("validation", "test", "answers"):
        print(part, json.dumps(result[part], indent=1, ensure_ascii=False))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
