"""BLEU on held-out sentences: our translator and `torch.nn.Transformer`, with the same size and training budget.

    python examples/debian_pairs.py --lists LISTS --out debian.tsv
    python benchmarks/bleu.py --data debian.tsv --side ours --device cuda --out benchmarks/results/bleu
    python benchmarks/bleu.py --data debian.tsv --side peer --device cuda --out benchmarks/results/bleu

Both have the same vocabulary, widths, layers, norms, label smoothing and dropout, and train on the same batches in the
same order, with the same AdamW and schedule; both translate greedily. The peer is built from torch's modules:
embedding, sinusoidal positions, `nn.Transformer`, tied output head.
"""

import argparse
import json
import math
import time
from pathlib import Path

import sacrebleu
import torch
import torch.nn.functional as F
from torch import nn

from regard.core.files import write_text
from regard.models.layers.positions import sinusoidal
from regard.training import Settings, train
from regard.training.batches import plan
from regard.training.optimizer import adamw, rate
from regard.training.parallel import Place
from regard.training.recipes import translate
from regard.training.recipes.translate import END, PAD, START

OPTIONS = {
    "vocabulary_size": 8000,
    "embedding_dim": 384,
    "num_layers": 4,
    "num_heads": 6,
    "hidden_dim": 1536,
    "dropout": 0.3,
    "held_out": 2000,
}


class Plain(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.width = config.embedding_dim
        self.embedding = nn.Embedding(config.vocabulary_size, self.width)
        nn.init.normal_(self.embedding.weight, std=self.width**-0.5)  # like ours; the rest has torch's defaults
        layers, hidden = config.num_layers, config.hidden_dim
        self.inner = nn.Transformer(
            self.width, config.num_heads, layers, layers, hidden, config.dropout,
            batch_first=True, norm_first=config.pre_norm,
        )  # fmt: skip
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens):
        places = sinusoidal(torch.arange(tokens.shape[1], device=tokens.device), self.width)
        return self.dropout(self.embedding(tokens) * math.sqrt(self.width) + places)

    def decode(self, target, memory, hidden):
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        return self.inner.decoder(
            self.embed(target), memory, tgt_mask=causal, memory_key_padding_mask=hidden, tgt_is_causal=True
        )

    def encode(self, source, hidden):
        return self.inner.encoder(self.embed(source), src_key_padding_mask=hidden)


def peer(task, settings, device) -> list[str]:
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN builds a plan for each new shape, and every batch has one
    torch.manual_seed(settings.seed)
    model = Plain(task.model.config).to(device)
    optimizer = adamw(model, settings)
    step = epoch = 0
    while step < settings.steps:
        for indices in plan(task.sizes(), settings.seed, epoch, batch_tokens=settings.batch_tokens):
            if step == settings.steps:
                break
            step += 1
            batch = {name: tensor.to(device) for name, tensor in task.batch(indices, epoch).items()}
            source, target = batch["source"], batch["target"]
            hidden = torch.arange(source.shape[1], device=device) >= batch["source_lengths"][:, None]
            with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
                out = model.decode(target[:, :-1], model.encode(source, hidden), hidden)
                logits = F.linear(out, model.embedding.weight)
            labels = target[:, 1:].masked_fill(target[:, 1:] == PAD, -100)
            smoothing = task.options.label_smoothing
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=smoothing)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            for group in optimizer.param_groups:
                group["lr"] = rate(settings, step)
            optimizer.step()
            optimizer.zero_grad()
            if step % 500 == 0:
                print(f"peer, step {step}: loss {loss.item():.3f}", flush=True)
        epoch += 1
    return written(task, model.eval(), device)


@torch.inference_mode()
def written(task, model, device) -> list[str]:
    """The peer's greedy translations; it has no KV cache, so every step computes the whole target again."""
    texts = {}
    tokenizer = task.model.tokenizer
    sizes = task.validation.sizes
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    for start in range(0, len(order), 200):
        part = order[start : start + 200]
        batch = {name: tensor.to(device) for name, tensor in task.validation.batch(part).items()}
        source = batch["source"]
        hidden = torch.arange(source.shape[1], device=device) >= batch["source_lengths"][:, None]
        with torch.autocast(device.type, torch.bfloat16):
            memory = model.encode(source, hidden)
            target = torch.full((len(part), 1), START, device=device)
            ended = torch.zeros(len(part), dtype=torch.bool, device=device)
            while target.shape[1] < 2 * source.shape[1] + 16 and not bool(ended.all()):
                hidden_last = model.decode(target, memory, hidden)[:, -1]
                token = F.linear(hidden_last, model.embedding.weight).argmax(-1)
                token = torch.where(ended, END, token)
                ended |= token == END
                target = torch.cat([target, token[:, None]], 1)
        for at, row in zip(part, target[:, 1:].tolist(), strict=True):
            texts[at] = tokenizer.decode(row[: row.index(END)] if END in row else row)
    return [texts[at] for at in range(len(sizes))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--side", choices=("ours", "peer"), required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch-tokens", type=int, default=12000)
    parser.add_argument("--run", type=Path, default=Path("runs/bleu"), help="Folder of the run.")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/bleu"))
    options = parser.parse_args()
    translate.TOGETHER = 250
    settings = Settings(
        steps=options.steps, batch_tokens=options.batch_tokens, learning_rate=1e-3, warmup=600, precision="bfloat16",
        beta2=0.98, weight_decay=0.01, evaluate_every=options.steps,
    )  # fmt: skip
    folder, device = options.run / options.side, torch.device(options.device)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    task = translate.build(translate.Options(data=(options.data,), **OPTIONS), folder / "data", settings.seed)
    pairs = task.validation.pairs
    began = time.perf_counter()
    result = {"pairs": len(task.sizes()), "held_out": len(pairs), "steps": options.steps, "options": OPTIONS}
    if options.side == "ours":
        train(task, settings, folder, place=Place(0, 1, device), watch=lambda r: r.kind == "evaluated" and print(
            f"ours, step {r.step}: {r.results}", flush=True))  # fmt: skip
        seconds = time.perf_counter() - began
        from regard import load

        model = load(folder / "model", device=device)
        texts = [source for source, _ in pairs]
        translations = [str(text) for text in translate.translate(model, texts, beams=1)]
    else:
        translations = peer(task, settings, device)
        seconds = time.perf_counter() - began
    result |= {"side": options.side, "bleu": _bleu(translations, pairs), "seconds": seconds, "torch": torch.__version__}
    result["examples"] = [[*pair, text] for pair, text in zip(pairs[:5], translations, strict=False)]
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(options.out / f"{options.side}.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


def _bleu(translations, pairs) -> float:
    return sacrebleu.corpus_bleu([str(text) for text in translations], [[target for _, target in pairs]]).score


if __name__ == "__main__":
    main()
