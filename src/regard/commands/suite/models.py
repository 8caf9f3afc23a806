"""Models against transformers, on the same real weights."""

import gc
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints import load, resolve
from regard.commands.suite.harness import Bench, Pair, Result
from regard.core.masks import padding


def _transformers() -> Any:
    """The transformers package, set to offline and quiet before it is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        import transformers
    except ImportError:
        raise ValueError('peer: expected transformers to be installed: pip install "regard[hf]"') from None
    quiet: Any = transformers.logging
    quiet.disable_progress_bar()
    return transformers


def _encoder() -> Pair:
    """16 texts of 16 to 512 tokens in one padded batch."""
    folder = resolve("minilm")
    ours, theirs = load("minilm"), _transformers().AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    lengths = torch.linspace(16, 512, 16).long()
    tokens = torch.randint(1000, 30000, (16, 512))
    keep = torch.arange(512) < lengths[:, None]
    tokens = tokens.masked_fill(~keep, 0)
    rule = padding(lengths)
    return Pair(
        lambda: ours(tokens, mask=rule),
        lambda: theirs(input_ids=tokens, attention_mask=keep.long()).last_hidden_state,
        lambda: (ours(tokens, mask=rule)[keep], theirs(tokens, attention_mask=keep.long()).last_hidden_state[keep]),
    )


def peer_decoder() -> Any:
    """SmolLM2 loaded by transformers."""
    path, build = resolve("smollm2"), _transformers().AutoModelForCausalLM.from_pretrained
    return build(path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa").eval()


def _prefill(length: int) -> Pair:
    ours, theirs = load("smollm2"), peer_decoder()
    tokens = torch.randint(0, 49152, (1, length))
    return Pair(lambda: ours(tokens), lambda: theirs(tokens, use_cache=False).logits, tolerance=1e-3)


def _loading(bench: Bench) -> Result:
    """Loading SmolLM2 and its tokenizer from a GGUF file; the best of three."""
    path, transformers = resolve("smollm2"), _transformers()

    def theirs() -> Tensor:
        options = {"gguf_file": path.name}
        transformers.AutoTokenizer.from_pretrained(path.parent, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **options)
        return model.get_input_embeddings().weight

    def ours() -> Tensor:
        model = load("smollm2")
        return next(model.parameters())

    best = {}
    for name, run in (("ours", ours), ("peer", theirs)):
        times = []
        for _ in range(3):
            gc.collect()
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        best[name] = min(times)
    ratio = best["peer"] / best["ours"]
    return Result(bench.name, bench.title, bench.peer, bench.goal, ratio, best["ours"] * 1e3, best["peer"] * 1e3)


BENCHES: tuple[Bench, ...] = (
    Bench("encoder", "MiniLM, 16 texts of 16…512 tokens, padded", "transformers BERT, sdpa", 1.5, _encoder, 7),
    *(
        Bench(f"prefill-{n}", f"SmolLM2, prompt of {n} tokens", "transformers, sdpa", 1.0, partial(_prefill, n), 7)
        for n in (128, 512)
    ),
    Bench("load", "SmolLM2 from GGUF, with its tokenizer", "transformers", 3.0, special=_loading),
)
