"""sentence-transformers folders: how an encoder's hidden states become one vector per text.

Besides a Hugging Face model such a folder has modules.json, which lists the processing steps of a text: the encoder, a
pooling (1_Pooling/config.json), possibly a normalization. Steps that `Encoder.embed` supports are read into the
encoder's config and written back; any other is refused, since without it the vectors would be wrong.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import read_json, read_json_list
from regard.models.encoder import EncoderConfig

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
POOLING = "1_Pooling"
LIMITS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "albert", "roberta", "distilbert", "camembert", "xlm-roberta", "xlnet")
)
"""Files with the maximum text length; versions of the library have used these names."""
MODES = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_length",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
"""Their poolings, and ours."""
SWITCHES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Fields of older files, true or false, in the order in which several poolings are concatenated."""
ENCODERS, IGNORED = ("Transformer", "BERT", "ALBERT"), ("Dropout",)
FIELDS = ("pooling", "normalized", "text_length", "text_prefix", "prefix_pooled")
"""The fields of an encoder's config that come from these files."""
PLAIN = EncoderConfig(vocabulary_size=1, embedding_dim=1, num_layers=1, num_heads=1)


def weights_folder(folder: Path) -> Path:
    """The folder with the encoder: the folder itself or, in the library's first layout, that of the first module."""
    if not (folder / MODULES).exists() or (folder / "config.json").exists():
        return folder
    return folder / _modules(folder)[0][1]


def read(folder: Path, weights: Path, config: EncoderConfig) -> dict[str, Any]:
    """The fields of an encoder's config that a folder's modules define; none without modules.json."""
    if not (folder / MODULES).exists():
        return {}
    (kind, _), *others = _modules(folder)
    others = [module for module in others if module[0] not in IGNORED]
    if kind not in ENCODERS:
        _refuse(folder, "the encoder as the first module", kind)
    if not others:  # the folder does not define sentence embeddings
        return {}
    (kind, pooling), *others = others
    if kind != "Pooling" or any(name != "Normalize" for name, _ in others):
        names = [name for name in (kind, *(name for name, _ in others)) if name not in ("Pooling", "Normalize")]
        _refuse(folder, "an encoder, a Pooling and perhaps Normalize", ", ".join(names) or f"{kind} first")
    for _, inside in others:
        values = _read_if_there(folder / inside / "config.json") if inside else {}
        if {values.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")} != {
            "sentence_embedding"
        }:
            _refuse(folder, "Normalize of the sentence's vector", f"{values!r:.80}")
    values = read_json(folder / pooling / "config.json")
    width = values.get("word_embedding_dimension", values.get("embedding_dimension", config.embedding_dim))
    if width != config.embedding_dim:
        _refuse(folder / pooling / "config.json", f"the model's width, {config.embedding_dim}", f"{width!r:.40}")
    return {
        "pooling": _pooling(folder / pooling / "config.json", values),
        "normalized": bool(others),
        "text_length": _text_length(weights, config.context_length),
        "text_prefix": _prefix(folder),
        "prefix_pooled": values.get("include_prompt", True) is not False,
    }


def lowercase(weights: Path) -> bool:
    """Whether texts are lowercased before the tokenizer reads them."""
    return _limits(weights).get("do_lower_case") is True


def written(config: EncoderConfig) -> dict[str, Any]:
    """The files, by name, that sentence-transformers needs in addition; none for an encoder with default pooling."""
    if all(getattr(config, name) == getattr(PLAIN, name) for name in FIELDS):
        return {}
    names = {ours: theirs for theirs, ours in MODES.items()}
    modes = [names[mode] for mode in config.pooling]
    modules = [
        ("Transformer", ""),
        ("Pooling", POOLING),
        *([("Normalize", "2_Normalize")] if config.normalized else []),
    ]
    pooling: dict[str, Any] = {
        "word_embedding_dimension": config.embedding_dim,
        **{switch: mode in modes for switch, mode in SWITCHES.items()},
        "include_prompt": config.prefix_pooled,
    }
    if modes != [mode for mode in SWITCHES.values() if mode in modes]:
        pooling["pooling_mode"] = modes  # switches have no order; newer versions of the library read this field
    files: dict[str, Any] = {
        MODULES: [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(modules)
        ],
        f"{POOLING}/config.json": pooling,
        LIMITS[0]: {"max_seq_length": config.text_length, "do_lower_case": False},
    }
    if config.text_prefix:
        files[PROMPTS] = {"prompts": {"default": config.text_prefix}, "default_prompt_name": "default"}
    return files


def _modules(folder: Path) -> list[tuple[str, str]]:
    """The kind of each module and its folder."""
    modules = []
    for module in read_json_list(folder / MODULES):
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str) or not re.fullmatch(r"(?!\.)[^/\\:\0]*", path):
            _refuse(folder / MODULES, "modules with a type and a folder name", f"{module!r:.80}")
        modules.append((kind.rpartition(".")[2], path))
    if not modules:
        _refuse(folder / MODULES, "at least one module", "none")
    return modules


def _pooling(path: Path, values: dict[str, Any]) -> tuple[str, ...]:
    modes = values.get("pooling_mode")
    switches = {key: value for key, value in values.items() if key.startswith("pooling_mode_") and value is not False}
    if modes is None:
        modes = [mode for switch, mode in SWITCHES.items() if switch in switches]
    modes = [modes] if isinstance(modes, str) else modes
    unknown = [key for key, value in switches.items() if value is not True or key not in SWITCHES]
    if unknown or not isinstance(modes, list) or not modes or any(mode not in MODES for mode in map(str, modes)):
        _refuse(path, f"a pooling of {', '.join(MODES)}", f"{unknown or modes or 'none'!s:.80}")
    return tuple(MODES[mode] for mode in modes)


def _text_length(weights: Path, context_length: int) -> int:
    """The maximum text length in tokens: max_seq_length or the tokenizer's limit, at most the model's context."""
    stated = _limits(weights).get("max_seq_length")
    if stated is None:
        tokenizer_length = _read_if_there(weights / "tokenizer_config.json").get("model_max_length")
        stated = tokenizer_length if type(tokenizer_length) is int else context_length
    if type(stated) is not int or stated < 1:
        _refuse(weights, "max_seq_length to be a whole number of at least 1", f"{stated!r:.40}")
    return min(stated, context_length)


def _prefix(folder: Path) -> str:
    values = _read_if_there(folder / PROMPTS)
    name, prompts = values.get("default_prompt_name"), values.get("prompts")
    if name is None:
        return ""
    if not isinstance(prompts, dict) or not isinstance(name, str) or not isinstance(prompts.get(name), str):
        _refuse(folder / PROMPTS, "a text for default_prompt_name among its prompts", f"{name!r:.80}")
    return str(prompts[name])


def _limits(weights: Path) -> dict[str, Any]:
    return next((read_json(weights / name) for name in LIMITS if (weights / name).exists()), {})


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _refuse(path: Path, expected: str, got: str) -> NoReturn:
    hint = "; without modules.json the encoder alone is loaded" if path.is_dir() else ""
    raise CheckpointError(f"{path}: expected {expected}, got {got}, which is not supported{hint}")
