"""Training throughput of a 124M decoder on a GPU: our loop against a plain PyTorch GPT loop, both compiled, bfloat16.

    python benchmarks/train_gpu.py --out benchmarks/results/training

The peer is a usual GPT-2: one projection for queries, keys and values, `scaled_dot_product_attention` with `is_causal`,
tied head, fused AdamW, gradient clipping, autocast, torch.compile. Both begin with the same weights and run the same
batches in turn; the first steps, which compile, are not counted. MFU is (6 · parameters + 12 · layers · width · length)
· tokens FLOPs over the measured rate of a large bfloat16 product on the same GPU, and over the data sheet's 989
TFLOP/s.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import regard as rg
from regard.core.files import write_text
from regard.training import Settings, Task, train
from regard.training.parallel import Place
from regard.training.records import commit

VOCABULARY, WIDTH, LAYERS, HEADS = 50304, 768, 12, 12
SHEET = 989e12


class RandomText(Task):
    name = "random text"

    def __init__(self, rows: int, length: int) -> None:
        torch.manual_seed(0)
        sizes = {"vocabulary_size": VOCABULARY, "embedding_dim": WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
        self.model = rg.Decoder(rg.DecoderConfig.gpt2(**sizes, context_length=length))
        self.tokens = torch.randint(VOCABULARY, (8 * rows, length + 1))

    def sizes(self):
        return [self.tokens.shape[1] - 1] * len(self.tokens)

    def batch(self, indices, epoch):
        return {"tokens": self.tokens[indices]}

    def counts(self, batch):
        return {"loss": batch["tokens"][:, 1:].numel()}

    def totals(self, model, batch):
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")}

    def evaluate(self, model):
        return {"loss": 0.0}


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, e = x.shape
        q, k, v = (part.view(b, t, HEADS, -1).transpose(1, 2) for part in self.qkv(self.first(x)).split(e, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, e))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Plain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.blocks = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    @torch.no_grad()
    def take(self, model: rg.Decoder) -> "Plain":
        """Copy the weights of a model: the speed of a GPU depends on the numbers, through its power consumption."""
        self.embedding.load_state_dict(model.embedding.state_dict())
        self.positions.load_state_dict(model.positions.state_dict())
        self.norm.load_state_dict(model.stack.norm.state_dict())
        for plain, block in zip(self.blocks, model.stack.blocks, strict=True):
            inner, network = block.attention, block.network
            plain.qkv.weight.copy_(torch.cat([linear.weight for linear in (inner.W_q, inner.W_k, inner.W_v)]))
            plain.qkv.bias.copy_(torch.cat([linear.bias for linear in (inner.W_q, inner.W_k, inner.W_v)]))
            for linear, other in ((plain.out, inner.W_o), (plain.up, network.up), (plain.down, network.down)):
                linear.load_state_dict(other.state_dict())
        return self

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class PlainLoop:
    """The plain training loop, run some steps at a time."""

    def __init__(self, task: RandomText, rows: int, length: int) -> None:
        self.tokens, self.rows, self.step = task.tokens, rows, 0
        self.model = Plain(length).take(task.model).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.98), fused=True)
        self.compiled = torch.compile(self.model)

    def run(self, steps: int) -> float:
        """Run some steps; returns their seconds."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            start = self.step % 8 * self.rows
            tokens = self.tokens[start : start + self.rows].pin_memory().to("cuda", non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = self.compiled(tokens)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1
        torch.cuda.synchronize()
        return time.perf_counter() - began


def interleaved(rows: int, length: int, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of rounds of `steps` steps, ours and the peer's in turn, since the GPU's clock changes as it warms up."""
    task = RandomText(rows, length)
    peer = PlainLoop(task, rows, length)
    times: tuple[list[float], list[float]] = ([], [])
    began = [0.0]

    def watch(report):
        if report.kind != "step" or report.step % steps:
            return
        torch.cuda.synchronize()
        now = time.perf_counter()
        seconds = peer.run(steps)
        if report.step > steps:  # the first round compiles
            times[0].append(now - began[0])
            times[1].append(seconds)
        began[0] = time.perf_counter()

    settings = Settings(  # one step more, because the last step is followed by an evaluation and a checkpoint
        steps=steps * (rounds + 1) + 1, batch_size=rows, learning_rate=3e-4, precision="bfloat16", compile=True,
        evaluate_every=10**6, save_every=10**6,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        train(task, settings, folder, place=Place(0, 1, torch.device("cuda")), watch=watch)
    return times


def product_rate(size: int = 8192) -> float:
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * size**3 / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=40, help="Steps per round.")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/training"))
    options = parser.parse_args()
    times = interleaved(options.rows, options.length, options.rounds, options.steps)
    tokens = options.rows * options.length * options.steps
    ours, theirs = (tokens / statistics.median(rounds) for rounds in times)
    parameters = sum(p.numel() for p in RandomText(1, options.length).model.parameters())
    flops = 6 * parameters + 12 * LAYERS * WIDTH * options.length
    rate = product_rate()
    rows = f"{options.rows} rows of {options.length} tokens"
    result = {
        "environment": {
            "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
            "commit": commit(), "date": time.strftime("%Y-%m-%d"),
        },
        "title": f"decoder of {parameters / 1e6:.0f}M parameters, {rows}, bfloat16",
        "peer": "a plain PyTorch GPT loop with SDPA and torch.compile",
        "ours_tokens_per_second": ours, "peer_tokens_per_second": theirs, "ratio": ours / theirs,
        "seconds_of_rounds": times, "flops_per_token": flops, "mfu_of_measured_product": ours * flops / rate,
        "mfu_of_data_sheet": ours * flops / SHEET, "product_flops": rate,
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(options.out / "gpu.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
