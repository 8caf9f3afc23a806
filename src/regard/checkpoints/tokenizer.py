"""Text to token ids and back, with the tokenizer of any checkpoint.

The `tokenizers` library does the work. Files that do not describe the whole tokenizer (BERT's vocab.txt, GPT-2's
vocab.json with merges.txt, plain lists of tokens, GGUF metadata) are completed in tokenizer_parts.py.
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
from regard.checkpoints.tokenizer_parts import (
    BERT,
    CHARACTERS,
    GPT2,
    add_typed,
    byte_level,
    gguf_bytes,
    gguf_pieces,
    numbered,
    pattern_of,
    strings_of,
    surround,
    with_special,
    wordpiece,
)
from regard.core.extras import needed_for
from regard.core.files import write_text
from regard.core.masks import Mask
from regard.models.padded_rows import Side, pad_rows

if TYPE_CHECKING:
    import tokenizers

MOST_BYTES = 128 * 2**20
"""The largest tokenizer.json that is read; the largest in use have about 35 MB."""

ROLES = {
    "bos": "bos_token",
    "eos": "eos_token",
    "pad": "pad_token",
    "unk": "unk_token",
    "mask": "mask_token",
    "separator": "sep_token",
    "classification": "cls_token",
}
"""The roles of special tokens, and their names in Hugging Face's files."""
GGUF_ROLES = {
    "bos": "bos",
    "eos": "eos",
    "pad": "padding",
    "unk": "unknown",
    "mask": "mask",
    "separator": "seperator",  # the format spells it so
    "classification": "cls",
}
SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""File names of SentencePiece models: of Llama and Mistral, of T5 and ALBERT, and of XLM-R."""


class Tokenizer:
    """Text to ids and back.

    `bos`, `eos`, `pad`, `unk`, `mask`, `separator` and `classification` are ids, or None where there is no such token.

    A loaded model has its tokenizer as `model.tokenizer`.

    >>> from regard import Tokenizer
    >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> tokenizer.encode("a bee"), tokenizer.decode([1, 2]), tokenizer.unk
    ([1, 2, 0, 0], 'ab', 0)
    """

    def __init__(
        self, inner: "tokenizers.Tokenizer", special: Mapping[str, str | None], chat_template: str | None = None
    ) -> None:
        """Wrap a tokenizer of the tokenizers library; `special` gives the tokens of the roles in ROLES."""
        # Files may ask for padding or truncation; here the caller decides about both.
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

    def __repr__(self) -> str:
        return f"Tokenizer(vocabulary_size={self.vocabulary_size}, special={self.special})"

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens, special ones included."""
        return int(self._inner.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, special: bool = True, length: int | None = None) -> list[int]:
        """The ids of a text. `special` adds the special tokens that the model expects around it. A text of more than
        `length` tokens is truncated."""
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

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of a text that has its special tokens already, and where in it each token begins and ends.

        >>> Tokenizer.from_vocabulary(["[UNK]", "a", "b"]).places("ab")
        ([1, 2], [(0, 1), (1, 2)])
        """
        with _checked("tokenizer"):
            encoding = self._inner.encode(text, add_special_tokens=False)
            return list(encoding.ids), [(begin, end) for begin, end in encoding.offsets]

    def decode(self, ids: Sequence[int] | Tensor, special: bool = False) -> str:
        """The text of some ids; `special` keeps special tokens in it."""
        with _checked("tokenizer"):
            return str(self._inner.decode(self._checked_ids(ids), skip_special_tokens=not special))

    def tokens(self, ids: Sequence[int] | Tensor) -> list[str]:
        """Each id as readable text, with its spaces; bytes of incomplete characters are shown as \\x…."""
        names = [self._inner.id_to_token(i) or "" for i in self._checked_ids(ids)]
        return [_spelled(name) if self._byte_level else name.replace("▁", " ") for name in names]

    def batch(self, texts: Sequence[str], side: Side = "right") -> tuple[Tensor, Mask]:
        """Texts as one batch of ids (B, T), padded on one side, and the mask that hides the padding.

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
        """A conversation in the text format the model was trained on; messages are {"role": …, "content": …}.

        The text contains the special tokens already: encode it with special=False.
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
        """A tokenizer that lowercases texts (not special tokens) first; the tokenizer itself if it already does."""
        import tokenizers
        from tokenizers import normalizers

        with _checked("tokenizer"):
            inner = tokenizers.Tokenizer.from_str(self._inner.to_str())
            normalizer = inner.normalizer
            if normalizer is not None and re.search(rb'"Lowercase"|"lowercase": ?true', normalizer.__getstate__()):
                return self
            lower = normalizers.Lowercase()
            inner.normalizer = lower if normalizer is None else normalizers.Sequence([lower, normalizer])
        return Tokenizer(inner, self.special, self.chat_template)

    def _checked_ids(self, ids: Sequence[int] | Tensor) -> list[int]:
        numbers = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        if any(type(i) is not int or not 0 <= i < 2**32 for i in numbers):
            raise ValueError(f"ids: expected a list of whole numbers of at least 0, got {numbers!r:.80}")
        return numbers

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer | None":
        """The tokenizer of a folder: tokenizer.json, else vocab.txt, else vocab.json with merges.txt; None without.

        A folder with only a SentencePiece model is refused; transformers can convert that to a tokenizer.json.
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
            pattern = pattern_of(lines)
            if pattern:
                return cls.from_vocabulary(lines, pattern, {**BERT, **special})
            with _checked(str(path)):
                return cls(wordpiece(lines, config, {**BERT, **special}), {**BERT, **special}, template)
        if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
            with _checked(str(folder / "vocab.json")):
                inner = _gpt2(folder)
                if inner.token_to_id("<|endoftext|>") is not None:
                    special = {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "unk": "<|endoftext|>", **special}
                return cls(with_special(inner, special), special, template)
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
        """A tokenizer of whole tokens: it looks up matches of `pattern` in `lines` and drops the text between them.

        If `lines` has [CLS] and [SEP], they are put around each text; `special` gives other names to the roles.

        >>> from regard.checkpoints.tokenizer_parts import SMILES
        >>> tokenizer = Tokenizer.from_vocabulary(["[UNK]", "[CLS]", "[SEP]", "C", "Cl", "="], SMILES)
        >>> tokenizer.tokens(tokenizer.encode("C=CCl"))
        ['[CLS]', 'C', '=', 'C', 'Cl', '[SEP]']
        """
        special = dict(BERT if special is None else special)
        with _checked("vocabulary"):
            import tokenizers
            from tokenizers import decoders, models, pre_tokenizers

            vocabulary = numbered(lines)
            inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=special.get("unk", "[UNK]")))
            inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
            inner.decoder = decoders.Fuse()
            return cls(with_special(inner, special), special)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata: byte-level merges ("gpt2") or SentencePiece's scores ("llama")."""
        model = metadata.get("tokenizer.ggml.model")
        builders = {"gpt2": gguf_bytes, "llama": gguf_pieces}
        if not isinstance(model, str) or model not in builders:
            raise CheckpointError(f"tokenizer.ggml.model: expected {' or '.join(builders)}, got {model!r:.80}")
        template = metadata.get("tokenizer.chat_template")
        with _checked("tokenizer.ggml"):
            names = strings_of(metadata, "tokenizer.ggml.tokens")
            inner = builders[model](names, metadata)
            ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in GGUF_ROLES.items()}
            special = {role: names[i] for role, i in ids.items() if isinstance(i, int) and 0 <= i < len(names)}
            if ids["eos"] is not None and "eos" not in special:  # without it generation would not end
                last = len(names) - 1
                raise CheckpointError(f"tokenizer.ggml.eos_token_id: expected 0 to {last}, got {ids['eos']!r:.40}")
            add_typed(inner, names, metadata.get("tokenizer.ggml.token_type", ()))
            before = special.get("bos") if metadata.get("tokenizer.ggml.add_bos_token", model == "llama") else None
            after = special.get("eos") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
            surround(inner, before, after)
            return cls(inner, special, template if isinstance(template, str) else None)


@contextmanager
def _checked(what: str) -> Iterator[None]:
    """Turn any error of the tokenizers library into CheckpointError."""
    try:
        with needed_for("a tokenizer"):
            yield
    except (CheckpointError, ModuleNotFoundError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what}: expected a tokenizer that can be read, got {str(error)[:200]}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a panic in Rust code, which is not an Exception
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
    """The lines of a file. Only newlines end a line: tokens may contain other characters at which splitlines splits."""
    text = read_text(path, MOST_BYTES, expected).replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n")


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens in a config, given as strings or as objects with a content."""
    special = {}
    for role, key in ROLES.items():
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            special[role] = token
    return special


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").exists():
        return read_text(folder / "chat_template.jinja", expected="a chat template")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _gpt2(folder: Path) -> "tokenizers.Tokenizer":
    vocabulary = read_json(folder / "vocab.json", MOST_BYTES)
    lines = _lines(folder / "merges.txt", "a list of merges")
    merges = [line for line in lines if line and not line.startswith("#version")]
    return byte_level(vocabulary, merges, (GPT2,))


def _byte_letters() -> dict[str, int]:
    """The byte that each character means in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_LETTERS = _byte_letters()


def _spelled(name: str) -> str:
    """A byte-level token as readable text."""
    if any(letter not in _LETTERS for letter in name):
        return name
    return bytes(_LETTERS[letter] for letter in name).decode("utf-8", "backslashreplace")
