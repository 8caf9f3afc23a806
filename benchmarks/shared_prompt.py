"""A decode step of many continuations of one prompt on a GPU, which keeps the prompt once and reads it for all of them;
against the same step over a copy for each row, by ours and by SDPA.

    python benchmarks/shared_prompt.py --out benchmarks/results/gpu/shared_prompt.json

32 heads over 8 key/value heads of 128, bfloat16. Outputs are first compared with the plain formula in float64. Times
are the GPU's, by replays of CUDA graphs; memory is that of the keys and values.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.commands.suite.gpu_softmax import backend, milliseconds
from regard.core.files import write_text
from regard.core.laws.case import within_budget
from regard.core.paths import shared_gpu
from regard.core.states.key_values import KeyValueState
from regard.training.records import commit

HEADS, GROUPS, SIZE = 32, 8, 128
TAIL = 128
CASES = [(rows, prompt) for prompt in (4096, 16384) for rows in (4, 16, 64)]


def tokens(heads: int, count: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, heads, count, SIZE, device="cuda", dtype=torch.bfloat16)


def shared_state(rows: int, prompt: int) -> KeyValueState:
    """A state of `rows` continuations, each with tokens of its own after the prompt."""
    softmax = rg.Softmax()
    state: Any = softmax.start(
        batch=1, num_kv_heads=GROUPS, qk_length=SIZE, value_length=SIZE, capacity=prompt + 2 * TAIL,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    _, state = softmax.extend(tokens(HEADS, prompt), tokens(GROUPS, prompt), tokens(GROUPS, prompt), state)
    state = state.reorder(torch.zeros(rows, dtype=torch.long, device="cuda"))
    for _ in range(TAIL // 4):
        new = (tokens(heads, 4, rows) for heads in (HEADS, GROUPS, GROUPS))
        _, state = softmax.extend(*new, state, mask=rg.causal)
    return state


def measure(rows: int, prompt: int) -> dict[str, Any]:
    state, softmax, q = shared_state(rows, prompt), rg.Softmax(), tokens(HEADS, 1, rows)
    [run] = state.runs
    assert run.prefix_length == prompt, run.prefix_length
    k, v = state.keys.contiguous(), state.values.contiguous()

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return softmax.mix(softmax.weigh(q, k, None).to(q.dtype), v).to(q.dtype)

    for row in range(0, rows, max(1, rows // 4)):
        part = slice(row, row + 1)
        out = shared_gpu.attend(softmax, q, run, state.length, None)[part]
        exact = plain(q[part].double(), k[part].double(), v[part].double())
        within_budget("output", out, exact, plain(q[part], k[part], v[part]))
    with torch.no_grad():
        times = {
            "ours_ms": milliseconds([lambda: shared_gpu.attend(softmax, q, run, state.length, None)]),
            "copies_ms": milliseconds([lambda: rg.attend(q, k, v)]),
            **{f"{name}_ms": milliseconds([partial(backend(name), q, k, v)]) for name in ("cuDNN", "flash")},
        }
    peer = min(times["cuDNN_ms"], times["flash_ms"])
    return {
        "rows": rows,
        "prompt": prompt,
        **times,
        "ratio": peer / times["ours_ms"],
        "shared_mb": state.nbytes / 1e6,
        "copies_mb": (k.nbytes + v.nbytes) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu/shared_prompt.json"))
    wanted = parser.parse_args()
    rows = []
    for case in CASES:
        rows.append(measure(*case))
        print(json.dumps(rows[-1]), flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "commit": commit()}
    write_text(wanted.out, json.dumps({"environment": environment, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
