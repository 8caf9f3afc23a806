"""The kinds of files that hostile.py mutates: how a small valid one is made, and how it is read."""

import contextlib
import json
from dataclasses import dataclass
from functools import partial

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


def read_template(path):
    tokenizer = Tokenizer.from_folder(path.parent)
    messages = [{"role": "user", "content": " hi "}, {"role": "a", "content": "xyxé"}]
    tokenizer.chat(messages)


def make_template(folder):
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)


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
