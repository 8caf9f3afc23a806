"""Building tokenizers of the `tokenizers` library from files that do not describe the whole tokenizer.

A vocabulary of word pieces or whole tokens, byte-level merges, and GGUF metadata say which tokens there are; how text
is normalised, split and decoded is defined here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.checkpoints.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

BERT = {"pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]", "separator": "[SEP]", "classification": "[CLS]"}

CHARACTERS = r"\S"
SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
"""The tokens of SMILES, the text notation of molecules (Schwaller et al. 2018, doi.org/10.1039/C8SC02339E)."""

# How byte-level tokenizers split text before merging, by GGUF's names; from llama.cpp's src/llama-vocab.cpp.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = (r"\p{N}", GPT2)
CUTS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2,),
    "mpt": (GPT2,),
    "olmo": (GPT2,),
    "phi-2": (GPT2,),
    "smollm": DIGITS,
    "starcoder": DIGITS,
    "refact": DIGITS,
    "command-r": DIGITS,
    "llama-bpe": (LLAMA3,),
    "llama3": (LLAMA3,),
    "qwen2": (LLAMA3.replace("{1,3}", ""),),
}
CONTROL, USER_DEFINED = 3, 4


def numbered(lines: Sequence[str]) -> dict[str, int]:
    """The id of each token: the number of its line."""
    vocabulary = {line: i for i, line in enumerate(lines)}
    if len(vocabulary) < len(lines) or not lines:
        raise CheckpointError(f"vocabulary: expected distinct tokens, got {len(vocabulary)} in {len(lines)} lines")
    return vocabulary


def pattern_of(lines: Sequence[str]) -> str | None:
    """The pattern that splits text for a vocabulary of whole tokens; None for one of word pieces."""
    plain = [line for line in lines if not re.fullmatch(r"\[[^\]]+]", line)]
    if all(len(line) == 1 for line in plain):
        return CHARACTERS
    return SMILES if all(re.fullmatch(SMILES, line) for line in plain) else None


def wordpiece(lines: Sequence[str], config: Mapping[str, Any], special: Mapping[str, str]) -> "tokenizers.Tokenizer":
    """BERT's word pieces."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    inner = tokenizers.Tokenizer(models.WordPiece(numbered(lines), unk_token=special["unk"]))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return with_special(inner, special)


def byte_level(vocabulary: dict[str, int], merges: Sequence[str], cuts: Sequence[str]) -> "tokenizers.Tokenizer":
    """Byte-level merges; `cuts` are the patterns that split text first."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    pairs = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise CheckpointError(f"merges: expected two tokens with a space between, got {merge!r:.80}")
        pairs.append((left, right))
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=LLAMA3 in cuts))
    splits = [pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") for cut in cuts]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def gguf_bytes(names: list[str], metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """Byte-level merges from GGUF metadata."""
    from tokenizers import normalizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in CUTS:
        raise CheckpointError(f"tokenizer.ggml.pre: expected one of {', '.join(CUTS)}, got {pre!r:.80}")
    inner = byte_level(numbered(names), strings_of(metadata, "tokenizer.ggml.merges"), CUTS[pre])
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner


def gguf_pieces(names: list[str], metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """SentencePiece as merges: it joins the neighbours whose piece has the highest score, so the best come first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocabulary = numbered(names)
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(names):
        raise CheckpointError(f"tokenizer.ggml.scores: expected {len(names)} numbers, got {scores!r:.80}")
    merges = [
        (-float(score), vocabulary[name[:at]], vocabulary[name[at:]], name[:at], name[at:])
        for name, score in zip(names, scores, strict=True)
        for at in range(1, len(name) if len(name) <= 256 else 1)
        if name[:at] in vocabulary and name[at:] in vocabulary
    ]
    pairs = [(left, right) for *_, left, right in sorted(merges)]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, unk_token=names[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return inner


def strings_of(metadata: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings in GGUF metadata."""
    strings = metadata.get(key)
    if not isinstance(strings, list) or not all(isinstance(entry, str) for entry in strings):
        raise CheckpointError(f"{key}: expected a list of strings, got {strings!r:.80}")
    return strings


def add_typed(inner: "tokenizers.Tokenizer", names: list[str], types: Sequence[int]) -> None:
    """Add the file's control tokens as special tokens, and its user-defined tokens as whole tokens."""
    import tokenizers

    if len(types) not in (0, len(names)):
        raise CheckpointError(f"tokenizer.ggml.token_type: expected {len(names)} numbers, got {len(types)}")
    of_type = {
        wanted: [
            tokenizers.AddedToken(name, normalized=False, special=wanted == CONTROL)
            for name, kind in zip(names, types, strict=False)
            if kind == wanted
        ]
        for wanted in (CONTROL, USER_DEFINED)
    }
    inner.add_special_tokens(of_type[CONTROL])
    inner.add_tokens(of_type[USER_DEFINED])


def with_special(inner: "tokenizers.Tokenizer", special: Mapping[str, str]) -> "tokenizers.Tokenizer":
    """Register the special tokens that the vocabulary has; if it has [CLS] and [SEP], put them around each text."""
    import tokenizers

    there = {role: token for role, token in special.items() if inner.token_to_id(token) is not None}
    inner.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in set(there.values())])
    if "classification" in there and "separator" in there:
        surround(inner, there["classification"], there["separator"])
    return inner


def surround(inner: "tokenizers.Tokenizer", before: str | None, after: str | None) -> None:
    """Put two tokens around each text."""
    from tokenizers import processors

    around = [token for token in (before, after) if token is not None]
    if not around:
        return
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    inner.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, "$B:1", *([f"{after}:1"] if after else [])],
        special_tokens=[(token, inner.token_to_id(token)) for token in dict.fromkeys(around)],
    )
