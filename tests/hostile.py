"""Damaged and hostile files, made from good ones by seeded mutations.

Every mutation must be read, or refused with CheckpointError, within the format's limits of CPU time and memory; the
operating system enforces a memory limit, too. Both the readers and the public functions are tried: `rg.load` and a
forward pass, `Prompt.load`, chat templates. `python tests/hostile.py --mutations 20000` runs more mutations than the
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
import resource
import struct
import sys
import tempfile
import time
import tracemalloc
import zipfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers

import regard as rg
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf import links
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.sources import open_bin, open_folder, open_safetensors, read_json
from regard.checkpoints.tokenizer import Tokenizer

SECONDS = 0.1
MEMORY = 8 * 2**20
"""Parsed JSON needs many times the memory of its text; the number of values that it may have is limited."""
LIMIT = 2**30
"""Bytes of address space for the whole process: an attempt to allocate more fails."""
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
    """A kind of file: how a small valid one is made, which of its files is mutated, and how it is read."""

    make: object
    file: str
    read: object
    text: bool = False
    counted: bool = False
    """Whether the format accounts for every byte, so that a missing tensor is always noticed."""
    seconds: float = SECONDS
    memory: int = MEMORY
    cuts: int = 100
    sample: int = 1_000
    """How many mutations the tests try, and at how many positions they first truncate the file."""
    traced: bool = True
    """Whether Python's memory is traced, which is slow; the operating system's limit applies in any case."""


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


# The doors that users take.

SIZES = {"vocabulary_size": 23, "embedding_dim": 8, "num_layers": 2, "num_heads": 2}
MODELS = {
    "llama": lambda: rg.Decoder(rg.DecoderConfig(**SIZES, num_kv_heads=1, rotary_scaling=SCALING)),
    "gpt2": lambda: rg.Decoder(rg.DecoderConfig.gpt2(**SIZES)),
    "bert": lambda: rg.Encoder(rg.EncoderConfig.bert(**SIZES, num_classes=2, text_length=6, text_prefix="a ")),
    "albert": lambda: rg.Encoder(rg.EncoderConfig.albert(**SIZES, factor_dim=5)),
    "t5": lambda: rg.Transformer(rg.TransformerConfig.t5(**SIZES)),
    "vit": lambda: rg.VisionTransformer(
        rg.VisionConfig(image_size=8, patch_size=4, embedding_dim=8, num_layers=1, num_heads=2, num_classes=3)
    ),
}
SCALING = rg.RotaryScaling(kind="llama3", factor=8.0)


def make_model(name, layout, folder):
    torch.manual_seed(0)
    model = MODELS[name]()
    model.tokenizer = Tokenizer.from_vocabulary(["[UNK]", "[CLS]", "[SEP]", *"abcdefg"])
    rg.save(model, folder / "model", layout=layout)
    if name == "llama":
        (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)


def make_llama_gguf(folder):
    torch.manual_seed(0)
    config = rg.DecoderConfig(**SIZES, num_kv_heads=1)
    state = rg.Decoder(config).state_dict()
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{number}" for number in range(20))])
    writer.add_token_merges(["a b"])
    writer.add_chat_template(TEMPLATE)
    for link in links(config):
        writer.add_tensor(link.theirs, link.join(state).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_model(path):
    """Load a model and, if that succeeds, run it: whatever loads must run."""
    folder = path if path.suffix == ".gguf" else path.parents[path.parent.name == "1_Pooling"]
    model = rg.load(folder)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        if isinstance(model, rg.VisionTransformer):
            size = model.config.image_size
            sides = size if isinstance(size, tuple) else (size, size)
            if max(sides) <= 64:
                model(torch.zeros(1, model.config.num_channels, *sides, dtype=model.dtype))
        elif isinstance(model, rg.Transformer):
            model(tokens, tokens)
        elif model.config.context_length >= 3:
            model(tokens)
    if isinstance(model, rg.Encoder) and model.tokenizer is not None and model.config.context_length > 9:
        model.embed(["ab", ""])


def make_prompt(folder):
    rg.prefill(prompt_model(), [[1, 2, 3], [4]]).save(folder / "prompt.safetensors")


def prompt_model():
    torch.manual_seed(0)
    return rg.Decoder(rg.DecoderConfig(**SIZES, mechanism="elu"))


def read_prompt(path):
    rg.Prompt.load(path, prompt_model())


TEMPLATE = (
    "{% set ns = namespace(x='ab', l=[0], n=3) %}{% macro f(n) %}{{ n }}{% endmacro %}"
    "{% for m in messages %}{% if m.role == 'user' and not loop.last %}<{{ m['content'] | trim }}>"
    "{% set ns.x = ns.x ~ m.content[1:] %}{% elif m.role in ['a', 'b'] %}"
    "{{ f(m.content.split('x')[-1]) + bos_token }}"
    "{% endif %}{% endfor %}{{ messages | tojson(indent=2) }}{{ '%s' % ns.n }}"
    "{% if add_generation_prompt %}>{% endif %}"
)
# What makes much out of little, to be put anywhere into a template.
GROWTH = [
    *("'%10000000000d' % 1", "'%*d' % (9999999999, 1)", "'%.999999999f' % 1.5", "[[0]*9999]*9999", "'x' * 10**10"),
    *("'x'|center(1000000000)", "'x'.center(1000000000)", "'x'.zfill(999999999)", "'{:9999999999}'.format(1)"),
    *("'{:{}}'.format(1, 9999999999)", "('x'*99999).replace('x', 'y'*99999)", "('x'*99999)|replace('', 'y'*99999)"),
    *("range(99999)|join('x'*99999)", "('\\n'*99999)|indent(99999)", "[1]|batch(999999999, 0)|list", "9**9**9**9"),
    *("1.5|round(99999999, 'ceil')", "([[0]]*99999)|sum(start=[])", "(5).to_bytes(9999999999, 'big')", "lipsum(99999)"),
    *(
        "([0]*9999)|tojson(indent=99999)",
        "'\\t'.expandtabs(999999999)",
        "dict.fromkeys(range(99999))",
        "messages * 9999999",
    ),
    *("strftime_now('%999999999Y')", "range(99999)|map('center', 99999)|list", "('1'*99999)|int(base=2)", "f(f)"),
    *(
        "('x'*99999).join('y'*99999)",
        "'a'.translate({97: 'x'*99999})",
        "cycler('x'*999999).next() * 99",
        "ns.x * 99999",
    ),
]
STATEMENTS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% for i in range(99) %}{% set ns.l = (ns.l, ns.l) %}{% endfor %}{{ {}[ns.l] }}",
    "{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% for i in range(99999) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l == ns.l }}",
    "{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
    "{% macro g(n) %}{% if n %}{{ g(n - 1) }}{{ g(n - 1) }}{% endif %}{% endmacro %}{{ g(60) }}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}" + "{% if a %}x{% endif %}" * 999 + "{% endfor %}",
    "{% for a in [1] %}" * 200 + "{% endfor %}" * 200,
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{{ " + "(" * 9999 + " }}",
    "".join(f"{{% set a{number} = 'x' * 4000000 %}}" for number in range(999)),
]


def read_template(path):
    tokenizer = Tokenizer.from_folder(path.parent)
    messages = [{"role": "user", "content": " hi "}, {"role": "a", "content": "xyxé"}]
    tokenizer.chat(messages)


def make_template(folder):
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def templated(data, rng):
    """A template with an expression or statement that grows, or with two of its pieces exchanged."""
    text = data.decode()
    pieces = [text[a:b] for a, b in spans(text)]
    choice = rng.randrange(4)
    if choice == 0:
        at = rng.choice([at for at, piece in enumerate(pieces) if piece.startswith("{{")])
        pieces[at] = "{{ " + rng.choice(GROWTH) + rng.choice(["", "", "|length", "|string|length", " ~ ns.x"]) + " }}"
    elif choice == 1:
        pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(STATEMENTS))
    elif choice == 2:
        value = f"{{% set ns.x = {rng.choice(GROWTH)} %}}{{% set ns.l = [ns.x] + ns.l %}}"
        pieces.insert(rng.randrange(len(pieces) + 1), value)
    else:
        a, b = rng.randrange(len(pieces)), rng.randrange(len(pieces))
        pieces[a], pieces[b] = pieces[b], pieces[a]
    return "".join(pieces).encode()


def spans(text):
    """The start and end of each tag, and of each text between tags."""
    edges = [0]
    for opening, closing in (("{%", "%}"), ("{{", "}}")):
        at = text.find(opening)
        while at >= 0:
            edges += [at, text.find(closing, at) + 2]
            at = text.find(opening, at + 2)
    edges = sorted({*edges, len(text)})
    return list(pairwise(edges))


LOADED = {"seconds": 1.0, "memory": 64 * 2**20, "cuts": 10, "sample": 50}
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
    **{
        f"{name} folder": Format(
            partial(make_model, name, "huggingface"), "model/config.json", read_model, text=True, **LOADED
        )
        for name in MODELS
    },
    "own folder": Format(partial(make_model, "llama", "regard"), "model/config.json", read_model, text=True, **LOADED),
    "weights": Format(partial(make_model, "bert", "huggingface"), "model/model.safetensors", read_model, **LOADED),
    "modules": Format(
        partial(make_model, "bert", "huggingface"), "model/modules.json", read_model, text=True, **LOADED
    ),
    "pooling": Format(
        partial(make_model, "bert", "huggingface"), "model/1_Pooling/config.json", read_model, text=True, **LOADED
    ),
    "gguf model": Format(make_llama_gguf, "model.gguf", read_model, **LOADED),
    "prompt": Format(make_prompt, "prompt.safetensors", read_prompt, **LOADED),
    "template": Format(
        make_template, "chat_template.jinja", read_template, seconds=5.0, cuts=10, sample=80, traced=False
    ),
}


def flip(data, rng):
    mutated = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    return bytes(mutated)


def extreme(data, rng):
    """Overwrite bytes somewhere, mostly in the header, with an impossible count, length or offset."""
    mutated = bytearray(data)
    at = rng.randrange(min(len(mutated), rng.choice([16, 32, 512, len(mutated)])))
    word = rng.choice([2**63, 2**63 - 1, 2**64 - 1, 2**62, 2**32, 2**31, len(data), len(data) + 1, 2**61 + 1, 0])
    word = struct.pack("<Q", word)[: rng.choice([4, 8])]
    mutated[at : at + len(word)] = word
    return bytes(mutated[: len(data)])


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
    """A JSON value with a change somewhere: another number, name, type or place."""
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
    """`twist` the JSON inside of a format, packed correctly again, so that a reader gets as far as the change."""
    if FORMATS[name].text:
        return json.dumps(twist(json.loads(data), rng)).encode()
    if name == "template":
        return templated(data, rng)
    if name in ("safetensors", "weights", "prompt"):
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        if name == "prompt" and rng.randrange(4):  # what Prompt.save says of its state
            metadata = header["__metadata__"]
            key = next(iter(metadata))
            metadata[key] = json.dumps(twist(json.loads(metadata[key]), rng))
        else:
            header = twist(header, rng)
        packed = json.dumps(header).encode()
        return struct.pack("<Q", len(packed)) + packed + data[8 + length :]
    if name == "bin":
        return repack(data, rng)
    return extreme(extreme(data, rng), rng)


def repack(data, rng):
    """A zip archive with a changed record whose checksum is right."""
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
    """Handmade files that try to use much time or memory, through JSON if the format has any."""
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
    if name == "template":
        for statement in STATEMENTS:
            yield "statement", TEMPLATE[: TEMPLATE.index("{% macro")].encode() + statement.encode()
        for expression in GROWTH:
            yield "expression", b"{{ " + expression.encode() + b" }}"
    if name == "gguf":
        for count in (2**64 - 1, 2**63, 2**61, 2**32, 10_000_000):
            yield f"{count} tensors", data[:8] + struct.pack("<Q", count) + data[16:]
            yield f"{count} keys", data[:16] + struct.pack("<Q", count) + data[24:]


def mutations(name, data, count, seed):
    """`count` pairs of a kind and a mutated file: truncated at evenly spaced positions, then bombs, then random."""
    cuts = FORMATS[name].cuts
    fixed = [(f"cut at {part}/{cuts}", data[: len(data) * part // cuts]) for part in range(cuts)]
    fixed += bombs(name, data)
    for number in range(count):
        if number < len(fixed):
            yield fixed[number]
            continue
        rng = random.Random(f"{seed} {name} {number}")
        kind = rng.choice(["flip", "flip", "extreme", "extreme", "cut", "repeat", "noise", *["structured"] * 5])
        yield kind, structured(name, data, rng) if kind == "structured" else globals()[kind](data, rng)


def attempt(form, path, expected):
    """Returns "read" or "refused"; AssertionError for everything else. Tracing memory takes additional time."""
    if not form.traced:
        outcome, read, seconds = timed(form, path)
        assert seconds <= form.seconds, f"took {seconds:.3f} s"
        return outcome
    size = path.stat().st_size
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    outcome, read, seconds = timed(form, path)
    memory = tracemalloc.get_traced_memory()[1] - before
    if seconds > form.seconds:  # once more, untraced: the first of a kind may have to import something
        tracemalloc.stop()
        outcome, read, seconds = timed(form, path)
        tracemalloc.start()
    assert seconds <= form.seconds, f"took {seconds:.3f} s"
    assert memory <= 2 * size + form.memory, f"took {memory:,} bytes of memory for a file of {size:,}"
    assert outcome == "refused" or not form.counted or read == expected, f"read {read} tensors of {expected}"
    return outcome


def timed(form, path):
    before = time.process_time()
    try:
        return "read", form.read(path), time.process_time() - before
    except CheckpointError as error:
        if isinstance(error.__cause__, MemoryError):
            raise AssertionError("took all the memory it could get") from error
        return "refused", None, time.process_time() - before
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        raise AssertionError(f"raised {type(error).__name__}: {error}") from error


def run(name, count, seed, folder, advance=lambda: None):
    """Try `count` mutations of a format. Returns the outcomes; AssertionError for the first mutation that fails."""
    # One watchdog for all: threads that come and go while tracemalloc starts and stops crash the interpreter.
    form = FORMATS[name]
    faulthandler.dump_traceback_later(HANG + count * form.seconds, exit=True)
    folder.mkdir(parents=True)
    form.make(folder)
    path = folder / form.file
    good = path.read_bytes()
    expected = form.read(path)
    outcomes = Counter()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space() + LIMIT, limits[1]))
    if form.traced:
        tracemalloc.start()
    try:
        for number, (kind, data) in enumerate(mutations(name, good, count, seed)):
            path.write_bytes(data)
            try:
                outcomes[attempt(form, path, expected)] += 1
            except AssertionError as error:
                kept = path.with_name(f"failed-{seed}-{number}-{path.name}")
                kept.write_bytes(data)
                message = f"{name}, seed {seed}, mutation {number} ({kind}): {error}; kept in {kept}"
                raise AssertionError(message) from error
            advance()
    finally:
        tracemalloc.stop()
        resource.setrlimit(resource.RLIMIT_AS, limits)
        faulthandler.cancel_dump_traceback_later()
    return outcomes


def address_space():
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


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
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="hostile-"))
    torch.set_num_threads(1)
    os.environ["RUST_BACKTRACE"] = "0"  # tokenizers panics on some files; that it is caught is what matters
    total, failures = Counter(), []
    began = time.monotonic()
    with Progress(auto_refresh=False) as progress:
        for name in options.formats:
            task = progress.add_task(f"{name:12}", total=options.mutations)
            try:
                folder = out / f"{name.replace(' ', '-')}-{options.seed}-{time.time_ns()}"
                total += run(name, options.mutations, options.seed, folder, partial(show, progress, task))
            except AssertionError as error:
                failures.append(str(error))
    for failure in failures:
        print(failure)
    print(
        f"{sum(total.values()):,} mutations of {len(options.formats)} formats, seed {options.seed}, "
        f"{time.monotonic() - began:.0f} s: {total['read']:,} read, {total['refused']:,} refused, "
        f"{len(failures)} got through"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
