"""Text to token ids and back, from any of the forms in which checkpoints carry their tokenizer.

The work is done by the `tokenizers` library; here its parts are put together for the files that do not say how: BERT's
vocab.txt, GPT-2's vocab.json with merges.txt, plain lists of tokens, and the metadata of GGUF files.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.sources import check_file, read_json, read_text, refuse
from regard.core.extras import needed_for
from regard.core.files import write_text
from regard.core.masks import Mask
from regard.models.padded_rows import Side, pad_rows

if TYPE_CHECKING:
    import tokenizers

MOST_BYTES = 128 * 2**20
"""Of a tokenizer.json; the largest in use have some 35 MB."""

ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "pad": "pad_token",
    "unk": "unk_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "classification": "cls_token",
}
"""What a special token is for, and how Hugging Face's files call it."""
GGUF_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "pad": "padding",
    "unk": "unknown",
    "mask": "mask",
    "separator": "seperator",  # so spelled in the format
    "classification": "cls",
}
BERT = {"pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]", "separator": "[SEP]", "classification": "[CLS]"}

CHARACTERS = r"\S"
SMILES = r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
"""The pieces of a molecule's text form, as in Schwaller et al. 2018 (doi.org/10.1039/C8SC02339E)."""

# How byte-level vocabularies cut text before they merge, by the name GGUF gives it; llama.cpp's src/llama-vocab.cpp.
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
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""What Llama and Mistral, T5 and ALBERT, and XLM-R call their SentencePiece models."""


class Tokenizer:
    """Text to ids and back.

    `bos`, `eos`, `pad`, `unk`, `mask`, `separator` and `classification` are ids, or None where there is no such token.

    A loaded model has its own, as `model.tokenizer`.

    >>> from regard import Tokenizer
    >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> tokenizer.encode("a bee"), tokenizer.decode([1, 2]), tokenizer.unk
    ([1, 2, 0, 0], 'ab', 0)
    """

    def __init__(
        self, inner: "tokenizers.Tokenizer", special: Mapping[str, str | None], chat_template: str | None = None
    ) -> None:
        """Wrap a tokenizer of the tokenizers library; `special` gives the tokens of the roles in ROLES."""
        # Files may ask for any length; padding and cutting are the caller's.
        inner.no_padding()
        inner.no_truncation()
        self._inner = inner
        self._byte_level = b"ByteLevel" in inner.decoder.__getstate__() if inner.decoder else False
        self.chat_template = chat_template
        self.special = {
            role: token for role, token in special.items() if token and inner.token_to_id(token) is not None
        }
        """The special tokens by role."""
        ids = {role: inner.token_to_id(token) for role, token in self.special.items()}
        self.bos: int | None = ids.get("bos")
        self.eos: int | None = ids.get("eos")
        self.pad: int | None = ids.get("pad")
        self.unk: int | None = ids.get("unk")
        self.mask: int | None = ids.get("mask")
        self.separator: int | None = ids.get("separator")
        self.classification: int | None = ids.get("classification")

    @property
    def vocabulary_size(self) -> int:
        """How many tokens there are, special ones among them."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, special: bool = True, length: int | None = None) -> list[int]:
        """The ids of a text; with `special`, between the tokens that the model expects around it. With `length`, of a
        text that is longer, the beginning."""
        if not isinstance(text, str):
            raise ValueError(f"text: expected a string, got {type(text).__name__}")
        with _checked("tokenizer"):
            encoding = self._inner.encode(text, add_special_tokens=special)
            if length is not None and len(encoding) > length:
                around = self._inner.num_special_tokens_to_add(False) if special else 0
                encoding = self._inner.encode(text, add_special_tokens=False)
                encoding.truncate(max(0, length - around))
                encoding = self._inner.post_process(encoding, None, special)
            return list(encoding.ids)

    def decode(self, ids: Sequence[int] | Tensor, special: bool = False) -> str:
        """The text of some ids; with `special`, special tokens are written out."""
        with _checked("tokenizer"):
            return str(self._inner.decode(self._known(ids), skip_special_tokens=not special))

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Each id as readable text of its own, spaces and all; half characters show their bytes as \\x…."""
        names = [self._inner.id_to_token(i) or "" for i in self._known(ids)]
        return [_spelled(name) if self._byte_level else name.replace("▁", " ") for name in names]

    def batch(self, texts: Sequence[str], side: Side = "right") -> tuple[Tensor, Mask]:
        """Texts as one table of ids (B, T), padded on one side, with the mask that hides the padding.

        >>> tokens, mask = Tokenizer.from_vocabulary(["[PAD]", "a"]).batch(["a", "aa"], side="left")
        >>> tokens.tolist()
        [[0, 1], [1, 1]]
        >>> print(mask.draw(2, batch=0))
        · ■
        · ■
        """
        if isinstance(texts, str) or not texts:
            raise ValueError(f"texts: expected one or more strings, got {texts!r}")
        filling = next((token for token in (self.pad, self.eos) if token is not None), 0)
        tokens, mask, _ = pad_rows([self.encode(text) for text in texts], filling=filling, side=side)
        return tokens, mask

    def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """A conversation as the text the model was trained on; messages are {"role": …, "content": …}.

        The text holds its special tokens already: encode it with special=False.
        """
        from regard.checkpoints.chat import render

        if self.chat_template is None:
            raise CheckpointError("chat_template: expected a tokenizer with a chat template, got one without")
        names = {ROLES[role]: token for role, token in self.special.items()}
        return render(
            self.chat_template, {**names, "messages": messages, "add_generation_prompt": add_generation_prompt}
        )

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, as from_folder and transformers read them."""
        config: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{ROLES[role]: token for role, token in self.special.items()},
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_text(Path(folder) / "tokenizer.json", self._inner.to_str(pretty=True))
        write_text(Path(folder) / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")

    def lowercased(self) -> "Tokenizer":
        """The same tokenizer for texts in lower case, special tokens as they are; itself if it is that already."""
        import tokenizers
        from tokenizers import normalizers

        with _checked("tokenizer"):
            inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
            own = inner.normalizer
            if own is not None and re.search(rb'"Lowercase"|"lowercase": ?true', own.__getstate__()):
                return self
            lower = normalizers.Lowercase()
            inner.normalizer = lower if own is None else normalizers.Sequence([lower, own])
        return Tokenizer(inner, self.special, self.chat_template)

    def _known(self, ids: Sequence[int] | Tensor) -> list[int]:
        found = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if any(type(i) is not int or not 0 <= i < 2**32 for i in found):
            raise ValueError(f"ids: expected whole numbers from 0, in one row, got {found!r:.80}")
        return found

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """The tokenizer of a folder: tokenizer.json, else vocab.txt, else vocab.json with merges.txt; None without.

        A SentencePiece model alone is refused: it is a program's own format, and transformers writes a tokenizer.json
        of it.
        """
        folder = Path(folder)
        config = _read_if_there(folder / "tokenizer_config.json")
        special = _special({**_read_if_there(folder / "special_tokens_map.json"), **config})
        template = _template(folder, config)
        if (folder / "tokenizer.json").exists():
            return cls(_from_file(folder / "tokenizer.json"), special, template)
        if (folder / "vocab.txt").exists():
            path = folder / "vocab.txt"
            lines = _lines(path, "a vocabulary")
            pattern = _pattern(lines)
            if pattern:
                return cls.from_vocabulary(lines, pattern, {**BERT, **special})
            with _checked(str(path)):
                return cls(_wordpiece(lines, config, {**BERT, **special}), {**BERT, **special}, template)
        if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            with _checked(str(folder / "vocab.json")):
                inner = _gpt2(folder)
                if inner.token_to_id("<|endoftext|>") is not None:
                    special = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>", **special}
                return cls(_with_special(inner, special), special, template)
        for name in SENTENCEPIECE:
            if (folder / name).exists():
                refuse(
                    folder,
                    "tokenizer.json",
                    f"{name} alone, a SentencePiece model, which is not read here; to write the tokenizer.json: "
                    "pip install transformers sentencepiece protobuf, then in Python "
                    "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
                )
        return None

    @classmethod
    def from_vocabulary(
        cls, lines: Sequence[str], pattern: str = CHARACTERS, special: Mapping[str, str] | None = None
    ) -> "Tokenizer":
        """Whole tokens: the matches of `pattern` in a text, each looked up in `lines`; what does not match is left out.

        A text goes between [CLS] and [SEP] where `lines` has them; `special` gives other names to the roles.

        >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "[CLS]", "[SEP]", "C", "Cl", "="], SMILES)
        >>> tokenizer.tokens(tokenizer.encode("C=CCl"))
        ['[CLS]', 'C', '=', 'C', 'Cl', '[SEP]']
        """
        special = dict(BERT if special is None else special)
        with _checked("vocabulary"):
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers

            vocabulary = _numbered(lines)
            inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk", "[UNK]")))
            inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
            inner.decoder = decoders.Fuse()
            return cls(_with_special(inner, special), special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata: byte-level merges ("gpt2") or SentencePiece's scores ("llama")."""
        model = metadata.get("tokenizer.ggml.model")
        builders = {"gpt2": _gguf_bytes, "llama": _gguf_pieces}
        if not isinstance(model, str) or model not in builders:
            raise CheckpointError(f"tokenizer.ggml.model: expected {' or '.join(builders)}, got {model!r:.80}")
        template = metadata.get("tokenizer.chat_template")
        with _checked("tokenizer.ggml"):
            names = _strings(metadata, "tokenizer.ggml.tokens")
            inner = builders[model](names, metadata)
            found = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in GGUF_ROLES.items()}
            special = {role: names[i] for role, i in found.items() if isinstance(i, int) and 0 <= i < len(names)}
            if found["eos"] is not None and "eos" not in special:  # without it texts would not end
                given = f"{found['eos']!r:.40}"
                raise CheckpointError(f"tokenizer.ggml.eos_token_id: expected 0 to {len(names) - 1}, got {given}")
            _add_typed(inner, names, metadata.get("tokenizer.ggml.token_type", ()))
            before = special.get("bos") if metadata.get("tokenizer.ggml.add_bos_token", model == "llama") else None
            after = special.get("eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
            _surround(inner, before, after)
            return cls(inner, special, template if isinstance(template, str) else None)


@contextmanager
def _checked(what: str) -> Iterator[None]:
    """Turn whatever the tokenizers library throws into CheckpointError."""
    try:
        with needed_for("a tokenizer"):
            yield
    except (CheckpointError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: expected a tokenizer that can be read, got {str(error)[:200]}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a failure in Rust comes as: no Exception
            raise
        raise CheckpointError(f"{what}: expected a tokenizer that can be read, got {str(error)[:200]}") from error


def _from_file(path: Path) -> "tokenizers.Tokenizer":
    if check_file(path, "a tokenizer.json").stat().st_size > MOST_BYTES:
        refuse(path, f"a tokenizer.json of at most {MOST_BYTES:,} bytes", "more")
    with _checked(str(path)):
        import tokenizers

        return tokenizers.Tokenizer.from_file(str(path))


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _lines(path: Path, expected: str) -> list[str]:
    """Lines end with newlines only: tokens may be other characters that str.splitlines takes for an end."""
    text = read_text(path, MOST_BYTES, expected).replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n")


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens a config names, as strings or as objects with their content."""
    found = {}
    for role, key in ROLES.items():
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[role] = token
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja", expected="a chat template")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _numbered(lines: Sequence[str]) -> dict[str, int]:
    found = {line: i for i, line in enumerate(lines)}
    if len(found) < len(lines) or not lines:
        raise CheckpointError(f"vocabulary: expected distinct tokens, got {len(found)} in {len(lines)} lines")
    return found


def _pattern(lines: Sequence[str]) -> str | None:
    """How to cut text for a vocabulary of whole tokens; None for one of word pieces."""
    plain = [line for line in lines if not re.fullmatch(r"\[[^\]]+]", line)]
    if all(len(line) == 1 for line in plain):
        return CHARACTERS
    return SMILES if all(re.fullmatch(SMILES, line) for line in plain) else None


def _wordpiece(lines: Sequence[str], config: Mapping[str, Any], special: Mapping[str, str]) -> "tokenizers.Tokenizer":
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    inner = tokenizers.Tokenizer(models.WordPiece(_numbered(lines), unk_token=special["unk"]))
    inner.normalizer = normalizers.BertNormalizer(
        lowercase=config.get("do_lower_case", True),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars", True),
    )
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    return _with_special(inner, special)


def _gpt2(folder: Path) -> "tokenizers.Tokenizer":
    vocabulary = read_json(folder / "vocab.json", MOST_BYTES)
    lines = _lines(folder / "merges.txt", "a list of merges")
    merges = [line for line in lines if line and not line.startswith("#version")]
    return _byte_level(vocabulary, merges, (GPT2,))


def _byte_level(vocabulary: dict[str, int], merges: Sequence[str], cuts: Sequence[str]) -> "tokenizers.Tokenizer":
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


def _gguf_bytes(names: list[str], metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    from tokenizers import normalizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in CUTS:
        raise CheckpointError(f"tokenizer.ggml.pre: expected one of {', '.join(CUTS)}, got {pre!r:.80}")
    inner = _byte_level(_numbered(names), _strings(metadata, "tokenizer.ggml.merges"), CUTS[pre])
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    return inner


def _gguf_pieces(names: list[str], metadata: Mapping[str, Any]) -> "tokenizers.Tokenizer":
    """SentencePiece joins the neighbours that make the piece of the highest score; as merges, best first."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    vocabulary = _numbered(names)
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


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    found = metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise CheckpointError(f"{key}: expected a list of strings, got {found!r:.80}")
    return found


def _add_typed(inner: "tokenizers.Tokenizer", names: list[str], types: Sequence[int]) -> None:
    """Control tokens are special; those a user defined are found whole in a text."""
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


def _with_special(inner: "tokenizers.Tokenizer", special: Mapping[str, str]) -> "tokenizers.Tokenizer":
    """Declare the special tokens that the vocabulary has, and put a text between the first and the last of BERT's."""
    import tokenizers

    there = {role: token for role, token in special.items() if inner.token_to_id(token) is not None}
    inner.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in set(there.values())])
    if "classification" in there and "separator" in there:
        _surround(inner, there["classification"], there["separator"])
    return inner


def _surround(inner: "tokenizers.Tokenizer", before: str | None, after: str | None) -> None:
    """Put a text between two tokens."""
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


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_LETTERS = _byte_letters()


def _spelled(name: str) -> str:
    """A byte-level token as text."""
    if any(letter not in _LETTERS for letter in name):
        return name
    return bytes(_LETTERS[letter] for letter in name).decode("utf-8", "backslashreplace")
