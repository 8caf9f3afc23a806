"""Training throughput of a 124M decoder on long sequences: the quadratic kernel against softmax, on a GPU.

    python benchmarks/train_long.py --out benchmarks/results/training

12 layers, width 768, 12 heads, rotary positions, one sequence per step, bfloat16 autocast, fused AdamW, gradient
clipping; not compiled, the same loop for both. Softmax is cuDNN's kernel, as `attend` chooses it. Outputs and gradients
of the kernels are first compared with the plain formula in float64. Times are medians of some steps, after two warm-up
steps.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.commands.suite import gpu, gpu_softmax
from regard.core.calls.call import all_finite
from regard.core.files import write_text
from regard.training.records import commit

VOCABULARY, LENGTHS = 50304, (16384, 65536)


def seconds(mechanism: str, length: int, rounds: int) -> dict[str, float]:
    """Seconds of a training step, with the peak memory and the first and last loss."""
    torch.manual_seed(0)
    config = rg.DecoderConfig(
        vocabulary_size=VOCABULARY, embedding_dim=768, num_layers=12, num_heads=12, context_length=length,
        norm="layer", activation="gelu", mechanism=mechanism,
    )  # fmt: skip
    model = rg.Decoder(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.98), fused=True)
    tokens = torch.randint(VOCABULARY, (1, length + 1), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for _ in range(2 + rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16), all_finite():
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            del logits
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    assert all(loss == loss for loss in losses), losses
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds_per_step": statistics.median(times[2:]),
        "tokens_per_second": length / statistics.median(times[2:]),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training"))
    wanted = parser.parse_args()
    gpu.check(rg.Quadratic(), 64)
    gpu_softmax.check([(1, 12, 2048, 64)] * 3, rg.causal, True)
    rows = []
    for length in wanted.lengths:
        both = {name: seconds(name, length, wanted.rounds) for name in ("quadratic", "softmax")}
        ratio = both["quadratic"]["tokens_per_second"] / both["softmax"]["tokens_per_second"]
        rows.append({"length": length, "ratio": ratio, **both})
        print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    environment = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
        "commit": commit(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    wanted.out.mkdir(parents=True, exist_ok=True)
    write_text(wanted.out / "long.json", json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
