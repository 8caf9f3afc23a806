"""The models that the explorer is measured with, and two commands that run in processes of their own.

`python subjects.py prepare` says what preparing a page takes beyond the model's own pass; `python subjects.py serve`
serves the explorer with all models until its input ends.
"""

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import regard as rg
from regard.explorer.catalog import Entry, catalog
from regard.explorer.export import export
from regard.explorer.guard import Place
from regard.explorer.requests import RunRequest
from regard.explorer.server import Explorer, listen, serving
from regard.explorer.session import Session
from regard.explorer.subject import Text

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS, LONG, SHORT = 512, 1024, 128
NAME = "bert-base-sized"
SPREAD = 3.0
"""Queries and keys have weights three times as large as BERT's at its start: the entropy of a head's weights is about
4.3 nats at 512 tokens then. At its start BERT attends uniformly, which compresses better than any trained model."""


def text(tokens: int) -> str:
    """Random letters, so many that a sequence has this many tokens."""
    return " ".join(random.Random(0).choices(LETTERS, k=tokens))


def model() -> rg.Encoder:
    """An encoder of BERT-base's size with random weights."""
    torch.manual_seed(0)
    sizes = {"vocabulary_size": 30522, "embedding_dim": 768, "num_layers": 12, "num_heads": 12}
    encoder = rg.Encoder(rg.EncoderConfig.bert(**sizes, context_length=LONG)).eval()
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if name.endswith(("W_q.weight", "W_k.weight")):
                parameter.mul_(SPREAD * 0.02 / parameter.std())
    encoder.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", *LETTERS], special={"unk": "[UNK]"})
    return encoder


def weights(tokens: int) -> list[torch.Tensor]:
    """The weights of every layer for a text: (1, heads, tokens, tokens)."""
    encoder = model()
    ids = torch.tensor([encoder.tokenizer.encode(text(tokens))])
    with torch.inference_mode(), rg.trace(encoder, keep=("weights",)) as recorded:
        encoder(ids)
    return [layer.weights for layer in recorded.layers]


class Peak:
    """The most memory that this process had at once, in bytes: the kernel's count, set back at the beginning."""

    def __enter__(self) -> "Peak":
        Path("/proc/self/clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        lines = Path("/proc/self/status").read_text().split("\n")
        self.bytes = next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def prepare(rounds: int = 3) -> dict[str, Any]:
    """Time (a median) and memory of a page's data beyond those of the model's pass, and the sizes of exported pages."""
    encoder = model()
    request = RunRequest(model=NAME, chosen=Text(text(TOKENS)))
    ids = torch.tensor([encoder.tokenizer.encode(text(TOKENS))])
    with torch.inference_mode():
        encoder(ids)  # the first pass compiles
    passes, totals, memory = [], [], 0
    for turn in range(rounds + 1):
        with Peak() as plain, torch.inference_mode():
            begun = time.perf_counter()
            encoder(ids)
            alone = time.perf_counter() - begun
        session = Session({NAME: encoder})
        with Peak() as whole:
            begun = time.perf_counter()
            session.run(request, lambda content: None)
            total = time.perf_counter() - begun
        if turn:
            passes.append(alone)
            totals.append(total)
        else:  # later the process has kept what it had before
            memory = whole.bytes - plain.bytes
        if turn < rounds:
            session.snapshots.clear()
    (snapshot,) = session.snapshots.values()
    with tempfile.TemporaryDirectory() as folder:
        sizes = {}
        for full in (False, True):
            path = Path(folder) / "page.html"
            export(snapshot, path, full=full)
            sizes["full" if full else "brief"] = path.stat().st_size
    entropy = torch.stack([layer.weights for layer in snapshot.layers]).double()
    return {
        "pass_seconds": median(passes),
        "total_seconds": median(totals),
        "seconds": median(total - alone for total, alone in zip(totals, passes, strict=True)),
        "bytes": memory,
        "export_bytes": sizes["brief"],
        "full_export_bytes": sizes["full"],
        "entropy": float(torch.special.entr(entropy).sum(-1).mean()),
    }


def serve() -> None:
    """Serve the page with the encoder and the models of the catalog; the address goes to the output."""
    session = Session({NAME: model()})
    entry = Entry(name=NAME, title="BERT-base-sized, random weights", kind="text", example=Text(text(TOKENS)))
    with listen("127.0.0.1", 0) as opened:
        place = Place(host="127.0.0.1", port=opened.getsockname()[1])
        explorer = Explorer(session, place, lambda: [entry, *catalog()])
        server = serving(explorer.app())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        print(json.dumps({"address": f"http://127.0.0.1:{place.port}/"}), flush=True)
        sys.stdin.read()
        server.should_exit = True
        thread.join(10)
        explorer.close()


if __name__ == "__main__":
    if sys.argv[1] == "prepare":
        print(json.dumps(prepare()))
    else:
        serve()
