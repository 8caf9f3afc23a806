"""Loading and exporting of Hugging Face folders: config.json, safetensors or .bin files, tokenizer files."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.assembly import assemble
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.form import Form, Link
from regard.checkpoints.forms import bert, gpt2, llama, t5, vit
from regard.checkpoints.sources import open_folder, read_json
from regard.core.families.mechanism import Mechanism
from regard.models.base import Model
from regard.models.layers.lora import lora_of, merged_tensors

FORMS: tuple[Form, ...] = (gpt2.FORM, llama.FORM, bert.BERT, bert.ALBERT, t5.FORM, vit.FORM)


def load(
    folder: Path,
    values: dict[str, Any],
    *,
    root: Path,
    mechanism: Mechanism | str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Model:
    """The model of a folder whose config.json has `values`; `root` has modules.json, if there is one."""
    form = _form(folder, values)
    source = open_folder(folder)
    names = _their_names(source.shapes, form)
    shapes = {ours: source.shapes[theirs] for ours, theirs in names.items()}
    try:
        config = replace(form.read_config(values, shapes), **_tokens(folder, values))
        config = replace(config, **form.read_more(root, folder, config))
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: expected a {form.model_types[0]} config, got {error!r:.200}"
        ) from None
    if mechanism is not None:
        config = config.with_mechanism(mechanism)
    if getattr(config, "tied", False):
        # An exact copy of a tied weight is ignored; a tensor that differs is unexpected and raises.
        for pair in form.copies.items():
            if set(pair) <= names.keys():
                copy, first = (source.read(names[name]) for name in pair)
                if copy.dtype == first.dtype and torch.equal(copy, first):
                    del shapes[pair[0]]
    return assemble(
        form.model,
        config,
        form.links,
        shapes,
        # A copy, since a memory-mapped tensor would change when its file does.
        lambda name: source.read(names[name]).clone(),
        path=folder,
        ignored=form.ignored,
        dtype=dtype,
        device=device,
    )


def _form(folder: Path, values: dict[str, Any]) -> Form:
    kind = values.get("model_type")
    for form in FORMS:
        if kind in form.model_types:
            return form
    types = ", ".join(name for form in FORMS for name in form.model_types)
    raise CheckpointError(f"{folder / 'config.json'}: expected model_type to be one of {types}, got {kind!r:.80}")


def _their_names(shapes: dict[str, tuple[int, ...]], form: Form) -> dict[str, str]:
    """The file's tensor names by the form's names, which have its prefix and the modern names of norms."""
    bare = not any(name.startswith(form.prefix) for name in shapes)
    names = {}
    for name in shapes:
        modern = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        names[form.prefix + modern if bare else modern] = name
    return names


def export(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config.json and the tensors of a model in Hugging Face's format.

    >>> import regard as rg
    >>> from regard.checkpoints.huggingface import export
    >>> config = rg.DecoderConfig.gpt2(vocabulary_size=9, embedding_dim=4, num_layers=1, num_heads=2)
    >>> values, tensors = export(rg.Decoder(config))
    >>> values["model_type"], tuple(tensors["transformer.h.0.attn.c_attn.weight"].shape)
    ('gpt2', (4, 12))
    """
    form, values = _chosen(model)
    state = {name: tensor.detach().cpu() for name, tensor in merged_tensors(model.state_dict(), lora_of(model)).items()}
    dtype = str(model.dtype).removeprefix("torch.")
    # transformers before version 5 reads torch_dtype
    values |= {"dtype": dtype, "torch_dtype": dtype}
    tensors: dict[str, Tensor] = {}
    written: set[str] = set()
    for link in form.links(model.config):
        joined = link.join(state)  # safetensors files have no aliases, so a tensor that is written twice is copied
        tensors[link.theirs] = joined.clone() if written & set(link.ours) else joined
        written |= set(link.ours)
    return values | _special(model, form), tensors


def links(model: Model) -> tuple[dict[str, Link], str]:
    """The links of a model's tensors by our names, and the name of its class in transformers."""
    form, values = _chosen(model)
    return {name: link for link in form.links(model.config) for name in link.ours}, values["architectures"][0]


def other_files(model: Model) -> dict[str, Any]:
    """The files besides config.json, by name, with the rest of a model's config."""
    return _chosen(model)[0].write_more(model.config)


def _chosen(model: Model) -> tuple[Form, dict[str, Any]]:
    """The form that can represent the whole config of a model, and the config.json; checked by reading it back."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    reasons: list[tuple[int, str]] = []
    for form in FORMS:
        if type(model.config) is form.config:
            values, names = form.write_config(model.config), " or ".join(form.model_types)
            try:
                lost = form.lost(model.config, values, shapes)
            except ValueError as error:
                reasons.append((len(values), f"a model that cannot be read back as {names}: {error}"))
                continue
            if not lost:
                return form, values
            reasons.append((len(lost), f"a model whose {', '.join(lost)} cannot be written in a config of {names}"))
    _, reason = min(reasons, default=(0, f"{model.noun}, which has no such form"))
    raise ValueError(f"model: expected the form of a Hugging Face model, got {reason}")


def _tokens(folder: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The special tokens in config.json and generation_config.json; the latter takes precedence, as in transformers.

    `"eos_token_id": null` in config.json means no end token; without that field the form's default stays. Only special
    tokens are read from generation_config.json: sampling options are arguments of `generate`.
    """
    path = folder / "generation_config.json"
    later = {name: value for name, value in (read_json(path) if path.exists() else {}).items() if value is not None}
    both = {**values, **later}
    ends, start = both.get("eos_token_id"), both.get("decoder_start_token_id")
    tokens: dict[str, Any] = {
        "start_token": both.get("bos_token_id") if start is None else start,
        "end_tokens": tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        "padding_token": both.get("pad_token_id"),
    }
    for name, value in tokens.items():
        if any(
            token is not None and type(token) is not int for token in (value if isinstance(value, tuple) else (value,))
        ):
            raise CheckpointError(f"{folder}: expected whole numbers for {name}, got {value!r:.80}")
    size = values.get("vocab_size")
    if type(size) is int and not all(0 <= token < size for token in tokens["end_tokens"]):
        raise CheckpointError(f"{folder}: expected eos_token_id from 0 to {size - 1}, or null for none, got {ends}")
    if "eos_token_id" not in both:
        del tokens["end_tokens"]
    return {name: value for name, value in tokens.items() if value is not None}


def _special(model: Model, form: Form) -> dict[str, Any]:
    """The special tokens for config.json, where inference engines look for them."""
    config, tokenizer = model.config, model.tokenizer
    start, ends, padding = config.start_token, config.end_tokens, config.padding_token
    if tokenizer is not None:
        start = tokenizer.bos if start is None else start
        ends = ends or (() if tokenizer.eos is None else (tokenizer.eos,))
        padding = tokenizer.pad if padding is None else padding
    return {
        **dict.fromkeys(form.start_fields, start),
        "eos_token_id": ends[0] if len(ends) == 1 else list(ends) or None,
        "pad_token_id": padding,
    }
