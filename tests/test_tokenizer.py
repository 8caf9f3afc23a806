"""Tokenizers: text to tokens and back, from every file that holds one; what is wrong with a file is said.

Tests named after a defect are of defects that other readers of these files had (FIELD.md).
"""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import regard as rg
from hostile_formats import make_tokenizer
from regard.checkpoints import names
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.gguf_file import open_gguf
from regard.checkpoints.names import NAMES, resolve
from regard.checkpoints.tokenizer import Tokenizer
from regard.checkpoints.tokenizer_parts import SMILES

TEXTS = [
    "Hello world",
    "def f(x):\n    return x**2 + 3.14159\n\n\n",
    "1234567890 12 a1b2c3 1,000.50",
    "naïve café — 日本語 한국어 العربية",
    "😀👩‍👩‍👧 🇫🇷",
    "  \t\t  \n \n  x   y    ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "don't we'll I'VE he'd",
    "",
    "   ",
    "\u00a0\u2003a\u200bb e\u0301 \ufb01",
    "https://a.b/c?d=e&f=%20\r\n\r\n\x00\x7f",
    "a" * 300,
]


def installed(name):
    return pytest.mark.skipif(NAMES[name].find() is None, reason=NAMES[name].command)


@pytest.mark.slow
@installed("smollm2")
def test_smollm2_tokens_are_those_of_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    path = resolve("smollm2")
    ours = Tokenizer.from_gguf(open_gguf(path).metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == again.encode(text) == loaded.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, special=True) == text
    assert (ours.bos, ours.eos, ours.pad, ours.unk, ours.vocabulary_size) == (1, 2, 2, 0, 49152)
    messages = [{"role": "user", "content": "hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.chat(messages) == again.chat(messages) == expected
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    assert ours.chat(messages, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")


@installed("smollm2")
def test_smollm2_splits_every_digit_as_its_own_tokenizer_does():
    """Its tokenizer.json splits all digits first; transformers forgets that for GGUF, which shows beyond 0 to 9."""
    tokenizer = Tokenizer.from_gguf(open_gguf(resolve("smollm2")).metadata)
    assert tokenizer.tokens(tokenizer.encode(" ٣")) == [" ", "\\xd9", "\\xa3"]


@installed("smollm2")
def test_tokens_are_readable():
    tokenizer = Tokenizer.from_gguf(open_gguf(resolve("smollm2")).metadata)
    expected = ["Hi", " café", "\n", "<|im_end|>", "\\xf0\\x9f", "\\x98", "\\x80"]
    assert tokenizer.tokens(tokenizer.encode("Hi café\n<|im_end|>😀")) == expected


@installed("minilm")
def test_vocab_txt_gives_the_tokens_of_tokenizer_json(tmp_path):
    folder = resolve("minilm")
    ours = Tokenizer.from_folder(folder)
    shutil.copy(folder / "vocab.txt", tmp_path)
    rebuilt = Tokenizer.from_folder(tmp_path)
    for text in [*TEXTS, "Ünaffable [MASK] TEXT " * 100]:
        assert ours.encode(text) == rebuilt.encode(text)
        assert ours.decode(ours.encode(text)) == rebuilt.decode(ours.encode(text))
    assert (ours.pad, ours.unk, ours.classification, ours.separator, ours.mask, ours.bos) == (
        0,
        100,
        101,
        102,
        103,
        None,
    )
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert rebuilt.unk not in rebuilt.encode("PARIS")
    assert rebuilt.unk in Tokenizer.from_folder(tmp_path).encode("PARIS")


@installed("rxnmapper")
def test_reactions_are_cut_into_atoms_and_bonds():
    tokenizer = NAMES["rxnmapper"].tokenizer()
    reaction = "CC(=O)O.[Na+]>>c1ccccc1Br.C%12"
    pieces = [*"CC(=O)O.", "[Na+]", ">>", *"c1ccccc1", "Br", ".", "C", "%12"]
    assert tokenizer.tokens(tokenizer.encode(reaction)) == ["[CLS]", *pieces, "[SEP]"]
    assert tokenizer.decode(tokenizer.encode(reaction)) == reaction
    assert tokenizer.encode("Qé") == tokenizer.encode("")
    assert tokenizer.tokens(tokenizer.encode("C[MASK][Xx]", special=False)) == ["C", "[MASK]", "[UNK]"]


@installed("antiberty")
def test_antibodies_are_cut_into_letters(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    path = resolve("antiberty").parent / "vocab.txt"
    tokenizer = NAMES["antiberty"].tokenizer()
    theirs = transformers.BertTokenizer(vocab=str(path), do_lower_case=False)
    for sequence in ("EVQLVQSGPEVKKPGTSVX", "E", ""):
        assert tokenizer.encode(sequence) == theirs(" ".join(sequence))["input_ids"]
    assert tokenizer.encode("E[MASK]V") == theirs("E [MASK] V")["input_ids"]


def test_vocabularies_may_hold_any_character_but_newline(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("[UNK]\r\n\u2028\r\na\r\n##b\r\n".encode())
    assert Tokenizer.from_folder(tmp_path).vocabulary_size == 4


def test_gpt2_vocabulary_and_merges(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    vocabulary = ["<|endoftext|>", *"abĠ1", "ab", "Ġab"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.tokens(tokenizer.encode("ab ab1<|endoftext|>")) == ["ab", " ab", "1", "<|endoftext|>"]
    assert tokenizer.eos == 0
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2TokenizerFast.from_pretrained(tmp_path)
    assert tokenizer.encode("ab ab1  ba") == theirs.encode("ab ab1  ba")


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_a_sentencepiece_model_alone_says_how_to_get_a_tokenizer(name, tmp_path):
    (tmp_path / name).write_bytes(b"\n\x0e\n\x05<unk>")
    with pytest.raises(CheckpointError, match=f"expected tokenizer.json, got {name} alone.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=9, embedding_dim=4, num_layers=1, num_heads=1))
    folder = rg.save(model, tmp_path / "model")
    shutil.copy(tmp_path / name, folder)
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.json"):
        rg.load(folder)
    make_tokenizer(tmp_path)
    assert Tokenizer.from_folder(tmp_path).vocabulary_size == 5


def test_sentencepiece_joins_the_best_piece_first():
    """Against its definition: join the neighbours that make the piece of the highest score, until none does."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "ca"]
    scores = np.array([0, 0, 0, -20, -21, -22, -23, -1, -2, -3, -0.5, -4, -0.2], dtype=np.float32)
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    scores = np.concatenate([scores, np.zeros(256, np.float32)])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": np.array([2, 3, 3, *[1] * 10, *[6] * 256]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    tokenizer = Tokenizer.from_gguf(metadata)

    def joined(text):
        parts = list("▁" + text.replace(" ", "▁"))
        while True:
            pairs = [(scores[pieces.index(a + b)], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in pieces]
            if not pairs:
                return parts
            at = -max(pairs)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]

    generator = np.random.default_rng(0)
    for _ in range(200):
        text = "".join(generator.choice(list("abc "), generator.integers(1, 12)))
        ids = tokenizer.encode(text)
        assert ids == [1, *map(pieces.index, joined(text))]
        assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer.encode("aé<s>b")) == "aé b"
    assert tokenizer.tokens(tokenizer.encode("é", special=False)) == [" ", "<0xC3>", "<0xA9>"]


def test_gguf_tokenizers_of_unknown_form_are_named():
    base = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    assert Tokenizer.from_gguf(base).encode("a") == [0]
    for change, message in (
        ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
        ({"tokenizer.ggml.model": 3}, "expected gpt2 or llama, got 3"),
        ({"tokenizer.ggml.pre": "martian"}, "martian"),
        ({"tokenizer.ggml.eos_token_id": 1}, "eos_token_id: expected 0 to 0, got 1"),
        ({"tokenizer.ggml.eos_token_id": "a"}, "eos_token_id: expected 0 to 0, got 'a'"),
        ({"tokenizer.ggml.tokens": None}, "a list of strings"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "distinct"),
        ({"tokenizer.ggml.merges": ["ab"]}, "two tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "got"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "expected 1 numbers"),
        ({"tokenizer.ggml.model": "llama"}, "scores"),
    ):
        with pytest.raises(CheckpointError, match=message):
            Tokenizer.from_gguf({**base, **change})


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_filled_up_and_masked(side):
    tokenizer = Tokenizer.from_vocabulary(["[PAD]", "[CLS]", "[SEP]", "a", "b"])
    tokens, mask = tokenizer.batch(["ab", "a"], side)
    assert tokens.tolist() == [[1, 3, 4, 2], [0, 1, 3, 2] if side == "left" else [1, 3, 2, 0]]
    assert torch.equal(mask.valid(4), tokens != 0)
    for texts in ("ab", [], [3]):
        with pytest.raises(ValueError, match="text"):
            tokenizer.batch(texts, side)


def test_padding_and_cutting_in_a_tokenizer_file_are_left_out(tmp_path):
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer.json").read_text())
    config["padding"] = {
        **{"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None},
        **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
    }
    config["truncation"] = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    assert len(Tokenizer.from_folder(tmp_path).encode("a b a b")) == 7


def test_tokenizer_panics_are_errors_of_the_file(tmp_path):
    """tokenizers cuts a prefix off merged tokens that may be shorter than it."""
    make_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer.json").read_text())
    config["model"]["continuing_subword_prefix"] = "longer than any token"
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        Tokenizer.from_folder(tmp_path)


def test_tokenizer_arguments_are_checked(tmp_path):
    tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a"])
    for call in (
        lambda: tokenizer.encode(3),
        lambda: tokenizer.decode([-1]),
        lambda: tokenizer.decode(torch.zeros(1, 1).long()),
        lambda: tokenizer.batch(["a"], side="top"),
        lambda: tokenizer.chat([]),
        lambda: Tokenizer.from_vocabulary([]),
        lambda: Tokenizer.from_vocabulary(["a"], pattern="("),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    assert tokenizer.decode(torch.tensor([1, 1])) == "aa"
    assert Tokenizer.from_folder(tmp_path) is None


def test_smiles_is_the_pattern_of_rxnmapper():
    spec = names.find_spec("rxnmapper")
    if spec is None:
        pytest.skip(NAMES["rxnmapper"].command)
    source = (Path(spec.origin).parent / "smiles_utils.py").read_text()
    assert f'SMI_REGEX_PATTERN = r"{SMILES}"' in source


def test_a_tokenizer_says_its_size_and_special_tokens():
    tokenizer = Tokenizer.from_vocabulary(["[UNK]", "a", "b"], special={"unk": "[UNK]"})
    assert repr(tokenizer) == "Tokenizer(vocabulary_size=3, special={'unk': '[UNK]'})"
