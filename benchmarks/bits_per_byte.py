"""Bits per byte of held-out modules of the Python standard library: xz, 5-grams, and a trained model.

    python benchmarks/bits_per_byte.py
    python benchmarks/bits_per_byte.py --model runs/lm --device cuda

To train a decoder of 34 million parameters for it, in minutes on a GPU:

    regard train lm --context-length 1024 --embedding-dim 512 --num-layers 10 --num-heads 8 --dropout 0.3 --no-packed \
        --steps 2500 --learning-rate 1e-3 --warmup 200 --batch-tokens 32768 --precision bfloat16 --evaluate-every 250
"""

import argparse
import json
from pathlib import Path

import numpy as np

import regard as rg
from baselines import ngram_bits_per_byte, ngrams, xz_bits_per_byte
from regard.training.data.text import documents, plain_ids
from regard.training.data.vocabulary import train_bpe
from regard.training.recipes import lm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="A folder of text; the standard library's source if not given.")
    parser.add_argument("--model", help="A run of `regard train lm`.")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    parts = lm.split_documents(documents(options.data))
    train, held_out = ([document.text for document in part] for part in (parts[0], parts[1] + parts[2]))
    raw = [text.encode() for text in train], [text.encode() for text in held_out]
    result = {"modules": len(held_out), "bytes": sum(map(len, raw[1]))}
    result["xz"] = xz_bits_per_byte(b"".join(raw[0]), raw[1])
    result["5-gram of bytes"] = ngram_bits_per_byte(*raw, order=5)
    tokenizer = train_bpe(train, lm.Options().vocabulary_size)
    tokens = [[np.asarray(plain_ids(tokenizer, text)) for text in part] for part in (train, held_out)]
    model = ngrams(tokens[0], size=tokenizer.vocabulary_size, order=5)
    result["5-gram of tokens"] = -float(np.log2(model(tokens[1])).sum()) / result["bytes"]
    if options.model is not None:
        model = rg.load(options.model, device=options.device)
        result["model"] = lm.bits_per_byte(model, held_out)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
