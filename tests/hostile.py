"""Damaged and hostile files, made from good ones by seeded mutations.

Every mutation must be read, or refused with CheckpointError: nothing else, within 100 ms of processor time, and within
twice the file's size in memory and a little. `python tests/hostile.py --mutations 20000` runs more of them than the
tests do. A failure prints the seed, the format, the number and the kind of the mutation, and keeps the file.
"""

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import os
import random
import struct
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.sources import open_bin, open_folder, open_safetensors, read_json
from regard.checkpoints.tokenizer import Tokenizer

SECONDS = 0.1
MEMORY = 8 * 2**20
"""Parsed JSON takes many times its text; how much at most is bounded by the number of values it may hold."""
HANG = 60
NUMBERS = [0, 1, -1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 0.5, 1e400]
NAMES = [
    "",
    ".",
    "..",
    "../a.safetensors",
    "/etc/passwd",
    "a\0b",
    "model.safetensors.index.json",
    "C:\\a.bin",
    "é" * 300,
]


@dataclass(frozen=True)
class Format:
    """A kind of file: how a small good one is made, which file of it is damaged, and how it is read."""

    make: object
    file: str
    read: object
    text: bool = False
    counted: bool = False
    """Whether every byte is accounted for, so that no tensor can go missing unseen."""


def tensors():
    torch.manual_seed(0)
    return {
        "embedding.weight": torch.randn(8, 16),
        "norm.weight": torch.ones(16).half(),
        "ids": torch.arange(4),
        "scalar": torch.tensor(1.0),
    }


def make_safetensors(folder):
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})


def make_shards(folder):
    halves = list(tensors().items())
    placed = {}
    for number, part in enumerate((halves[:2], halves[2:]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file(dict(part), folder / shard)
        placed |= dict.fromkeys(dict(part), shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": placed})
    )


def make_config(folder):
    config = {"model_type": "bert", "hidden_size": 16, "layers": [1, 2, {"a": None}], "eps": 1e-12, "tied": True}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def make_bin(folder):
    torch.save(tensors(), folder / "pytorch_model.bin")


def make_old_bin(folder):
    torch.save(tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def make_gguf(folder):
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "a", "b", "ab", "é"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_array("nested", [[1, 2], [3, 4]])
    writer.add_add_bos_token(True)
    generator = np.random.default_rng(0)
    for name, kind in (("a", "F32"), ("b", "F16"), ("c", "Q8_0"), ("d", "Q4_1"), ("e", "Q6_K"), ("f", "BF16")):
        quant = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[quant]
        if kind == "F32":
            writer.add_tensor(name, generator.standard_normal((2, 8)).astype(np.float32))
        else:
            rows = generator.integers(0, 60, (2, max(1, 8 // block) * size), dtype=np.uint8)
            writer.add_tensor(name, rows, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_tokenizer(folder):
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "Ġ": 3, "<s>": 4}, [("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.add_special_tokens(["<s>"])
    inner.save(str(folder / "tokenizer.json"))


def read_tensors(source):
    for name, shape in source.shapes.items():
        # Copied, so that all of its memory is touched.
        assert tuple(source.read(name).clone().shape) == shape, f"{name}: another shape than announced"
    return len(source.shapes)


def read_gguf(path):
    file = open_gguf(path)
    with contextlib.suppress(CheckpointError):
        Tokenizer.from_gguf(file.metadata)
    return read_tensors(file)


def read_tokenizer(path):
    tokenizer = Tokenizer.from_folder(path.parent)
    tokenizer.decode(tokenizer.encode("ab <s> héllo 12"))
    tokenizer.tokens(range(tokenizer.vocabulary_size))


FORMATS = {
    "safetensors": Format(
        make_safetensors, "model.safetensors", lambda path: read_tensors(open_safetensors(path)), counted=True
    ),
    "gguf": Format(make_gguf, "model.gguf", read_gguf, counted=True),
    "index": Format(
        make_shards, "model.safetensors.index.json", lambda path: read_tensors(open_folder(path.parent)), text=True
    ),
    "config": Format(make_config, "config.json", read_json, text=True),
    "bin": Format(make_bin, "pytorch_model.bin", lambda path: read_tensors(open_bin(path))),
    "old bin": Format(make_old_bin, "pytorch_model.bin", lambda path: read_tensors(open_bin(path))),
    "tokenizer": Format(make_tokenizer, "tokenizer.json", read_tokenizer, text=True),
}


def flip(data, rng):
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def extreme(data, rng):
    """A count, length or offset somewhere, set to what no file holds; mostly in the header."""
    found = bytearray(data)
    at = rng.randrange(min(len(found), rng.choice([16, 32, 512, len(found)])))
    word = rng.choice([2**63, 2**63 - 1, 2**64 - 1, 2**62, 2**32, 2**31, len(data), len(data) + 1, 2**61 + 1, 0])
    word = struct.pack("<Q", word)[: rng.choice([4, 8])]
    found[at : at + len(word)] = word
    return bytes(found[: len(data)])


def cut(data, rng):
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:a] + data[b:]


def repeat(data, rng):
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    return data[:b] + data[a:b] + data[b:]


def noise(data, rng):
    at = rng.randrange(len(data))
    return data[:at] + rng.randbytes(rng.choice([1, 4, 64])) + data[at + rng.choice([0, 1, 4, 64]) :]


def twist(value, rng):
    """A JSON value with something in it changed: another number, name, kind or place."""
    value = copy.deepcopy(value)
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(value)
    node, key = rng.choice(places)
    other, there = rng.choice(places)
    choice = rng.randrange(6)
    if choice == 0:
        node[key] = rng.choice(NUMBERS)
    elif choice == 1:
        node[key] = rng.choice(NAMES)
    elif choice == 2:
        node[key] = rng.choice([None, True, [], {}, [[]], {"a": {}}, [0, 0], [2**32, 2**32], [0] * 100])
    elif choice == 3:
        node[key] = copy.deepcopy(other[there])
    elif choice == 4 and isinstance(node, dict):
        node[rng.choice(NAMES)] = node.pop(key)
    else:
        del node[key]
    return value


def structured(name, data, rng):
    """The same, inside the format's own packing, so that the change is what is met first."""
    if FORMATS[name].text:
        return json.dumps(twist(json.loads(data), rng)).encode()
    if name == "safetensors":
        (length,) = struct.unpack_from("<Q", data)
        header = json.dumps(twist(json.loads(data[8 : 8 + length]), rng)).encode()
        return struct.pack("<Q", len(header)) + header + data[8 + length :]
    if name == "bin":
        return repack(data, rng)
    return extreme(extreme(data, rng), rng)


def repack(data, rng):
    """A zip archive with a record changed and its checksum right."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(packed, "w") as new:
        names = old.namelist()
        chosen = rng.choice([n for n in names if n.endswith("data.pkl")] * 4 + names)
        for name in names:
            record = old.read(name)
            if name == chosen and record:
                record = rng.choice([flip, flip, extreme, cut, noise])(record, rng)
            new.writestr(name, record, rng.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED]))
    return packed.getvalue()


def bombs(name, data):
    """Made by hand: what is meant to take much time or memory, for JSON wherever the format holds any."""
    texts = {
        "deep list": "[" * 100_000,
        "deep object": '{"a name of some length": ' * 50_000 + "1" + "}" * 50_000,
        "digits": '{"a": ' + "9" * 100_000 + "}",
        "exponent": '{"a": 1e' + "9" * 10_000 + "}",
        "many": "[" + "[]," * 100_000 + "[]]",
        "surrogate": '{"\\ud800": "\\udfff"}',
        "not an object": "[]",
        "nothing": "{}",
    }
    for kind, text in texts.items():
        if FORMATS[name].text:
            yield kind, text.encode()
        elif name == "safetensors":
            (length,) = struct.unpack_from("<Q", data)
            yield kind, struct.pack("<Q", len(text)) + text.encode() + data[8 + length :]
    if name == "safetensors":
        for length in (2**64 - 1, 2**63, len(data), len(data) - 7, 2**40, 0):
            yield f"header length {length}", struct.pack("<Q", length) + data[8:]
    if name == "gguf":
        for count in (2**64 - 1, 2**63, 2**61, 2**32, 10_000_000):
            yield f"{count} tensors", data[:8] + struct.pack("<Q", count) + data[16:]
            yield f"{count} keys", data[:16] + struct.pack("<Q", count) + data[24:]


def mutations(name, data, count, seed):
    """`count` pairs of a kind and a damaged file: cut at every percent, then bombs, then at random."""
    fixed = [(f"cut at {percent}%", data[: len(data) * percent // 100]) for percent in range(100)] + list(
        bombs(name, data)
    )
    for number in range(count):
        if number < len(fixed):
            yield fixed[number]
            continue
        rng = random.Random(f"{seed} {name} {number}")
        kind = rng.choice(["flip", "flip", "extreme", "extreme", "cut", "repeat", "noise", *["structured"] * 5])
        yield kind, structured(name, data, rng) if kind == "structured" else globals()[kind](data, rng)


def attempt(form, path, expected):
    """'read' or 'refused'; AssertionError for all else. Memory is being traced, which takes time of its own."""
    size = path.stat().st_size
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcome, found, seconds = timed(form, path)
    memory = tracemalloc.get_traced_memory()[1] - before
    if seconds > SECONDS:  # once more, untraced: the first of a kind may have to import something
        tracemalloc.stop()
        outcome, found, seconds = timed(form, path)
        tracemalloc.start()
    assert seconds <= SECONDS, f"took {seconds:.3f} s"
    assert memory <= 2 * size + MEMORY, f"took {memory:,} bytes of memory for a file of {size:,}"
    assert outcome == "refused" or not form.counted or found == expected, f"read {found} tensors of {expected}"
    return outcome


def timed(form, path):
    before = time.process_time()
    try:
        return "read", form.read(path), time.process_time() - before
    except CheckpointError:
        return "refused", None, time.process_time() - before
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise AssertionError(f"raised {type(error).__name__}: {error}") from error


def run(name, count, seed, folder, advance=lambda: None):
    """Try `count` mutations of a format; what became of them, or AssertionError with the first that got through."""
    # One watchdog for all: threads that come and go while tracemalloc starts and stops crash the interpreter.
    faulthandler.dump_traceback_later(HANG + count * SECONDS, exit=True)
    form = FORMATS[name]
    folder.mkdir(parents=True)
    form.make(folder)
    path = folder / form.file
    good = path.read_bytes()
    expected = form.read(path)
    outcomes = Counter()
    tracemalloc.start()
    try:
        for number, (kind, data) in enumerate(mutations(name, good, count, seed)):
            path.write_bytes(data)
            try:
                outcomes[attempt(form, path, expected)] += 1
            except AssertionError as error:
                kept = path.with_name(f"failed-{seed}-{number}-{form.file}")
                kept.write_bytes(data)
                found = f"{name}, seed {seed}, mutation {number} ({kind}): {error}; kept in {kept}"
                raise AssertionError(found) from error
            advance()
    finally:
        tracemalloc.stop()
        faulthandler.cancel_dump_traceback_later()
    return outcomes


def show(progress, task):
    progress.advance(task)
    if progress.tasks[task].completed % 100 == 0:
        progress.refresh()


def main():
    from rich.progress import Progress

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=20_000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where a file that got through is kept")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    given = parser.parse_args()
    out = given.out or Path(tempfile.mkdtemp(prefix="hostile-"))
    torch.set_num_threads(1)
    os.environ["RUST_BACKTRACE"] = "0"  # tokenizers panics on some files; that it is caught is what matters
    total, failures = Counter(), []
    began = time.monotonic()
    with Progress(auto_refresh=False) as progress:
        for name in given.formats:
            task = progress.add_task(f"{name:12}", total=given.mutations)
            try:
                folder = out / f"{name.replace(' ', '-')}-{given.seed}-{time.time_ns()}"
                total += run(name, given.mutations, given.seed, folder, partial(show, progress, task))
            except AssertionError as error:
                failures.append(str(error))
    for failure in failures:
        print(failure)
    print(
        f"{sum(total.values()):,} mutations of {len(given.formats)} formats, seed {given.seed}, "
        f"{time.monotonic() - began:.0f} s: {total['read']:,} read, {total['refused']:,} refused, "
        f"{len(failures)} got through"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
