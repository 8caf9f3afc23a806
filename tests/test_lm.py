"""Language modelling: documents and their tokens, and what a row of a batch may see."""

import math
import os
import sysconfig
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.checkpoints.errors import CheckpointError
from regard.checkpoints.tokenizer import Tokenizer
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.training import Settings, train
from regard.training.data.text import Tokens, documents, plain_ids, write_tokens
from regard.training.data.vocabulary import train_bpe
from regard.training.recipes import lm
from regard.training.task import IGNORED

CAUSAL = [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8)]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "dog", "run", "é", "naïve"]


def written(folder: Path, **texts: str | bytes) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def prose(seed: int, words: int) -> str:
    random = np.random.default_rng(seed)
    return " ".join(random.choice(WORDS, words)) + ".\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Some forty documents, from two words to some hundred."""
    texts = {f"{at:02}_txt": prose(at, 2 + 7 * (at % 13) ** 2 // 10) for at in range(40)}
    return written(tmp_path_factory.mktemp("corpus"), **texts)


def built(corpus: Path, folder: Path, **changes):
    sizes = {"vocabulary_size": 320, "context_length": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2}
    folder.mkdir(exist_ok=True)
    task = lm.build(lm.Options(data=str(corpus), **{**sizes, **changes}), folder, seed=3)
    task.model.double().eval()
    return task


# Documents


def test_a_folder_is_its_files_by_name_without_hidden_and_empty_ones(tmp_path):
    folder = written(tmp_path / "a", b_txt="b", a_md="a", sub__c_txt="c", x_csv="1", e_txt="", _h_txt="hidden")
    assert [(document.name, document.text) for document in documents(folder)] == [
        ("a.md", "a"),
        ("b.txt", "b"),
        ("sub/c.txt", "c"),
    ]
    assert [document.name for document in documents(folder, ("csv", ".md"))] == ["a.md", "x.csv"]


def test_one_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path):
    text = "".join(f"line {at} é\r\n" for at in range(500)) + "no newline"
    folder = written(tmp_path, one_txt=text)
    parts = documents(folder / "one.txt")
    assert len(parts) > 15
    assert "".join(part.text for part in parts) == text
    assert all(part.text.endswith("\n") for part in parts[:-1])
    assert documents(folder) == parts  # a folder with one file is that file


def test_the_standard_library_is_modules_without_tests_and_tables():
    modules = documents()
    names = [module.name for module in modules]
    assert names == sorted(names)
    assert {"json/decoder.py", "ast.py"} <= set(names)
    assert not {"test", "tests", "encodings", "pydoc_data"} & {part for name in names for part in name.split("/")}
    assert sum(module.stop for module in modules) > 5e6


def test_modules_that_are_not_utf8_are_left_out_and_named(tmp_path, monkeypatch):
    library = written(tmp_path / "lib", good_py="x = 1\n", fine_py="y = 2\n", latin_py=b"# \xe9\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(library)})
    with pytest.warns(UserWarning, match="not UTF-8: 1 of 3 modules: latin.py"):
        assert [document.name for document in documents()] == ["fine.py", "good.py"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "expected a folder or a file of text, got"),
        ("empty.txt", "empty.txt: expected text, got an empty file"),
        ("nothing", r"nothing: expected files that end in \.txt, .* and are not empty, got none"),
        ("tables", "expected files that end in"),
        ("line.txt", "line.txt: expected at least 2 lines"),
    ],
)
def test_what_is_no_text_is_one_clear_error(tmp_path, name, message):
    written(tmp_path, empty_txt="", nothing__e_txt="", tables__x_csv="1", line_txt="all in one line")
    with pytest.raises(ValueError, match=message):
        documents(tmp_path / name)


def test_broken_utf8_is_named_by_file_and_line(tmp_path):
    folder = written(tmp_path / "a", a_txt="fine", b_txt=b"one\ntwo\nth\xffree\n")
    with pytest.raises(ValueError, match=r"b\.txt, line 3: expected UTF-8 text, got the byte 0xff"):
        write_tokens(tmp_path / "t", documents(folder), train_bpe(["fine"], 300))
    assert not (tmp_path / "t").exists()
    alone = written(tmp_path / "b", one_txt=b"good\n" * 300 + b"b\xc3d\n" + b"good\n" * 300)
    with pytest.raises(ValueError, match=r"one\.txt, line 301: expected UTF-8 text, got the byte 0xc3"):
        _ = [document.text for document in documents(alone)]


def test_the_standard_librarys_split_is_of_whole_modules():
    train_side, validation, test = lm.split_documents(documents())
    held_out = validation + test
    assert 0.03 < len(held_out) / (len(train_side) + len(held_out)) < 0.07
    assert not {document.path for document in train_side} & {document.path for document in held_out}


# Tokens


def test_tokens_are_the_documents_again(corpus, tmp_path):
    every = documents(corpus)
    tokenizer = train_bpe([document.text for document in every], 320)
    tokens = write_tokens(tmp_path / "x.tokens", every, tokenizer)
    assert tokens.ids.dtype == np.uint16
    assert isinstance(tokens.ids, np.memmap)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.tokens"]
    for document, start, stop in zip(every, tokens.starts, tokens.starts[1:], strict=False):
        row = tokens.ids[start:stop].tolist()
        assert (row[0], row[-1]) == (tokenizer.bos, tokenizer.eos)
        assert tokenizer.decode(row[1:-1]) == document.text


@pytest.mark.parametrize("packed", [True, False])
def test_much_text_has_several_files_that_are_read_as_one(corpus, tmp_path, monkeypatch, packed):
    single = built(corpus, tmp_path / "one", packed=packed)
    monkeypatch.setattr(
        "regard.training.data.text.FILE", sum(path.stat().st_size for path in corpus.rglob("*.txt")) // 4
    )
    many = built(corpus, tmp_path / "many", packed=packed)
    files = sorted((tmp_path / "many").glob("*.tokens"))
    assert len(files) >= 3
    assert files[0].name == f"train-00000-of-{len(files):05}.tokens"
    assert all(isinstance(part, np.memmap) for part in many.tokens.parts), "no part is in memory"
    assert many.tokens.starts.tolist() == single.tokens.starts.tolist()
    assert len(many.sizes()) == len(single.sizes())
    for epoch in (0, 1):
        there, here = (task.batch(range(len(single.sizes())), epoch) for task in (single, many))
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name], here[name]) for name in there)
    assert built(corpus, tmp_path / "many", packed=packed).fingerprint() == many.fingerprint() != single.fingerprint()
    files[2].write_bytes(files[2].read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CheckpointError, match=rf"{files[2].name}: expected its checksum, got another"):
        built(corpus, tmp_path / "many", packed=packed)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    special = {"bos": "[START]", "eos": "[END]", "unk": "[UNK]"}
    tokenizer = Tokenizer.from_vocabulary([*special.values(), *(f"w{at}" for at in range(70000))], r"\S+", special)
    folder = written(tmp_path / "a", a_txt="w1 w69999", b_txt="w2")
    tokens = write_tokens(tmp_path / "t", documents(folder), tokenizer)
    assert tokens.ids.dtype == np.uint32
    assert tokens.ids.tolist() == [0, 4, 70002, 1, 0, 5, 1]


def test_tokens_are_made_again_only_for_other_documents_or_another_tokenizer(tmp_path):
    folder = written(tmp_path / "a", a_txt="a cat", b_txt="a dog")
    tokenizer, path = train_bpe(["a cat"], 300), tmp_path / "t"

    def made(tokenizer):
        write_tokens(path, documents(folder), tokenizer)
        return path.stat().st_ino

    first = made(tokenizer)
    assert made(tokenizer) == first
    other = made(train_bpe(["a cat a cat a cat"], 300))
    assert other != first
    written(folder, b_txt="a cow")
    os.utime(folder / "b.txt", ns=(1, 1))
    assert made(tokenizer) != other
    assert tokenizer.decode(Tokens.open(path).ids[-4:-1].tolist())[-3:] == "cow"


def test_cut_and_damaged_token_files_are_refused(corpus, tmp_path):
    every = documents(corpus)[:5]
    path = tmp_path / "t"
    write_tokens(path, every, train_bpe([every[0].text], 300))
    good = path.read_bytes()
    random = np.random.default_rng(0)
    for size in (0, 1, 63, 64, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(rg.CheckpointError, match="t: expected"):
            Tokens.open(path)
    for bit in random.choice(8 * len(good), 300, replace=False).tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(rg.CheckpointError, match="t: expected"):
            Tokens.open(path)
    path.write_bytes(good + b"x")
    with pytest.raises(rg.CheckpointError, match="t: expected"):
        Tokens.open(path)


def test_special_names_in_a_text_are_text():
    tokenizer = train_bpe(["some text"], 300)
    text = "a [END] b[[START][PAD]"
    ids = plain_ids(tokenizer, text)
    assert min(ids) > 3
    assert tokenizer.decode(ids) == text


# Rows


@torch.no_grad()
def alone(model, rows):
    """-log p of each row after its first token, each computed by itself."""
    return sum(
        float(F.cross_entropy(model(torch.tensor([row[:-1]]))[0], torch.tensor(row[1:]), reduction="sum"))
        for row in rows
        if len(row) > 1
    )


@pytest.mark.parametrize(
    ("mechanism", "positions", "within"),
    [
        ("softmax", "none", 1e-12),
        ("quadratic", "none", 1e-12),
        ("elu", "none", 1e-12),
        ("softmax", "rotary", 1e-5),  # rotary tables are float32
        ("quadratic", "rotary", 1e-5),
    ],
)
@torch.no_grad()
def test_in_a_packed_row_no_document_sees_another(corpus, tmp_path, mechanism, positions, within):
    task = built(corpus, tmp_path, mechanism=mechanism, context_length=40)
    model = rg.Decoder(replace(task.model.config, positions=positions)).double().eval()
    model.initialise(3)
    batch = task.batch(range(len(task.sizes())), epoch=1)
    pieces, seen = [], 0
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        row = [*tokens, targets[-1] if targets[-1] != IGNORED else lm.START]
        cuts = [0, *(at for at in range(1, len(row)) if row[at] == lm.START), len(row)]
        pieces += [row[a:b] for a, b in pairwise(cuts)]
        seen = max(seen, len(cuts) - 1)
    assert seen > 2
    assert task.counts(batch)["loss"] == sum(len(piece) - 1 for piece in pieces)
    exact = alone(model, pieces)
    assert float(task.totals(model, batch)["loss"]) == pytest.approx(exact, rel=within)
    leaky = {name: tensor for name, tensor in batch.items() if name != "segments"}
    assert abs(float(task.totals(model, leaky)["loss"]) / exact - 1) > 10 * within


def test_packed_rows_are_the_circle_of_all_tokens_cut_elsewhere_each_epoch(corpus, tmp_path):
    task = built(corpus, tmp_path)
    ids = task.tokens.ids.tolist()
    everything = range(len(task.sizes()))
    assert task.sizes().tolist() == [16] * len(everything)
    shifts = set()
    for epoch in range(4):
        flat = task.batch(everything, epoch)["tokens"].flatten().tolist()
        shift = next(s for s in range(16) if flat == [ids[(at + s) % len(ids)] for at in range(len(flat))])
        shifts.add(shift)
        one_by_one = torch.cat([task.batch([at], epoch)["tokens"] for at in everything])
        assert one_by_one.flatten().tolist() == flat
    assert len(shifts) > 1


def test_rows_of_one_document_predict_every_token_once_whatever_the_epoch(corpus, tmp_path):
    task = built(corpus, tmp_path, packed=False)
    starts, ids = task.tokens.starts.tolist(), task.tokens.ids.tolist()
    wanted = sorted((ids[at], ids[at + 1]) for a, b in pairwise(starts) for at in range(a, b - 1))
    sizes, cuts = task.sizes(), set()
    assert min(sizes) < 16 == max(sizes)
    for epoch in range(4):
        batch = task.batch(range(len(sizes)), epoch)
        assert batch["lengths"].tolist() == sizes.tolist()
        predicted = batch["targets"] != IGNORED
        pairs = zip(batch["tokens"][predicted].tolist(), batch["targets"][predicted].tolist(), strict=True)
        assert sorted(pairs) == wanted
        assert task.counts(batch)["loss"] == len(wanted)
        cuts.add(tuple(batch["tokens"].flatten().tolist()))
    assert len(cuts) > 1
    full = [at for at, size in enumerate(sizes) if size == 16]
    assert "lengths" not in task.batch(full[:3], 0)


@torch.no_grad()
def test_padding_changes_no_loss(corpus, tmp_path):
    task = built(corpus, tmp_path, packed=False)
    everything = range(len(task.sizes()))
    together = float(task.totals(task.model, task.batch(everything, 0))["loss"])
    one_by_one = sum(float(task.totals(task.model, task.batch([at], 0))["loss"]) for at in everything)
    assert together == pytest.approx(one_by_one, rel=1e-10)


@pytest.mark.parametrize("packed", [None, False])
@pytest.mark.parametrize("mechanism", CAUSAL)
def test_every_causal_mechanism_learns_from_both_kinds_of_rows(corpus, tmp_path, mechanism, packed):
    """Rows are packed if not told otherwise, but for mechanisms whose sums would mix the documents of a row."""
    task = built(corpus, tmp_path, mechanism=mechanism, packed=packed, num_kv_heads=1)
    assert task.options.packed == (packed is None and not REGISTRY[mechanism].ordered)
    batch = task.batch(range(8), 0)
    before = task.totals(task.model, batch)["loss"]
    before.backward()
    with torch.no_grad():
        for parameter in task.model.parameters():
            if parameter.grad is not None:  # a uniform average and a hard choice tell queries and keys nothing
                parameter -= 0.01 * parameter.grad / task.counts(batch)["loss"]
        assert float(task.totals(task.model, batch)["loss"]) < float(before.detach())


@pytest.mark.parametrize("changes", [{"form": "gpt2"}, {"window": rg.Window(3)}, {"num_kv_heads": 1, "dropout": 0.1}])
def test_forms_and_windows(corpus, tmp_path, changes):
    task = built(corpus, tmp_path, **changes)
    assert math.isfinite(task.evaluate(task.model)["loss"])
    assert task.model.config.positions == ("learned" if changes.get("form") == "gpt2" else "rotary")
    assert len(task.samples(task.model)) == 2


# Results


@torch.no_grad()
def test_bits_per_byte_of_a_model_that_knows_nothing(corpus, tmp_path):
    task = built(corpus, tmp_path)
    for parameter in task.model.parameters():
        parameter.zero_()
    texts = [document.text for document in task.validation]
    count = sum(len(plain_ids(task.model.tokenizer, text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert size > sum(map(len, texts))  # letters of two bytes count two
    every = math.log2(task.model.config.vocabulary_size)
    assert lm.bits_per_byte(task.model, iter(texts)) == pytest.approx(count * every / size, rel=1e-6)
    results = task.evaluate(task.model)
    assert results["bits_per_byte"] == pytest.approx(count * every / size, rel=1e-6)
    assert results["perplexity"] == pytest.approx(task.model.config.vocabulary_size, rel=1e-6)
    assert results["loss"] == pytest.approx(every * math.log(2), rel=1e-6)


@torch.no_grad()
def test_bits_per_byte_slides_so_that_every_token_has_half_a_context_before_it(corpus, tmp_path):
    task = built(corpus, tmp_path)
    model = task.model
    model.train()
    texts = [prose(seed, words) for seed, words in ((1, 1), (2, 9), (3, 40))]
    nats = 0.0
    for text in texts:
        ids = [lm.START, *plain_ids(model.tokenizer, text)]
        last = len(ids) - 1 - 16
        starts = [*range(0, last, 8), last] if last > 0 else [0]
        for at in range(1, len(ids)):
            start = next(candidate for candidate in starts if at <= candidate + 16)
            assert at - start >= 8 or start == 0
            nats -= float(model(torch.tensor([ids[start:at]]))[0, -1].log_softmax(-1)[ids[at]])
    size = sum(len(text.encode()) for text in texts)
    assert lm.bits_per_byte(model, texts) == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    assert model.training
    with pytest.raises(ValueError, match="texts: expected some text, got none"):
        lm.bits_per_byte(model, [])
    model.tokenizer = None
    with pytest.raises(ValueError, match="model: expected one with a tokenizer, got one without"):
        lm.bits_per_byte(model, texts)


def test_evaluations_look_at_a_part_of_a_large_held_out_text(tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "EXCERPT", 50)
    monkeypatch.setattr(lm, "EXCERPTS", 120)
    corpus = written(tmp_path / "c", **{f"{at:03}_txt": prose(at, 40) for at in range(200)})
    task = built(corpus, tmp_path / "run")
    assert len(task.validation) > 3
    assert [len(excerpt) for excerpt in task.excerpts] == [50, 50, 20]


# Runs


def test_a_folder_gives_its_tokenizer_and_tokens_back(corpus, tmp_path):
    first = built(corpus, tmp_path)
    files = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "train.tokens"}
    again = built(corpus, tmp_path)
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == files
    for parameter, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(parameter, other)
    assert again.samples(again.model) == first.samples(first.model)
    (tmp_path / "tokenizer_config.json").unlink()  # as if stopped in the middle of writing it
    half = built(corpus, tmp_path)
    assert half.model.tokenizer.special == first.model.tokenizer.special
    assert half.batch([0], 0)["tokens"].equal(first.batch([0], 0)["tokens"])


def test_a_prompt_does_not_end(corpus, tmp_path):
    tokenizer = built(corpus, tmp_path).model.tokenizer
    assert tokenizer.encode("the cat") == tokenizer.encode("the cat", special=False)
    assert Tokenizer.from_folder(tmp_path).encode("the cat") == tokenizer.encode("the cat")


def test_training_beats_what_it_must(tmp_path):
    """A text whose every word follows from the one before: a model that learned it needs next to nothing."""
    line = "one two three four five six seven eight nine ten.\n"
    folder = written(tmp_path / "data", **{f"{at:02}_txt": line * 5 for at in range(40)})
    options = lm.Options(
        data=str(folder), vocabulary_size=300, context_length=32, embedding_dim=32, num_layers=1, num_heads=2
    )
    run = tmp_path / "run"
    run.mkdir()
    task = lm.build(options, run, seed=0)
    texts = [document.text for document in task.validation]
    report = train(task, Settings(steps=80, warmup=10, learning_rate=1e-2, batch_tokens=512), run)
    after = lm.bits_per_byte(task.model, texts)
    assert report.finished
    assert after < 0.1 < 8 * len(zlib.compress(texts[0].encode())) / len(texts[0]) / 4
    loaded = rg.load(run / "model")
    assert lm.bits_per_byte(loaded, texts) == pytest.approx(after, rel=0.5)
    assert rg.generate(loaded, "one two three", max_new_tokens=8)[0].startswith(" four five six")
    assert "documents of data" in (run / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary_size": 200}, "vocabulary_size: expected at least 300, got 200"),
        ({"context_length": 1}, "context_length: expected at least 2, got 1"),
        ({"form": "bert"}, "form: expected llama or gpt2, got 'bert'"),
        ({"suffix": ()}, "suffix: expected at least one, got none"),
        ({"mechanism": "channel"}, "mechanism: expected one that can be causal, got channel"),
        ({"mechanism": "soft"}, "mechanism: expected one of softmax, .*, got 'soft'"),
        ({"mechanism": "elu", "window": rg.Window(7)}, r"window: expected none with Elu\(\), whose sums cannot drop"),
        ({"window": 8}, r"window: expected Window\(before, after\), got 8"),
        ({"num_heads": 5}, "num_heads: expected a divisor of embedding_dim = 192"),
        ({"dropout": 1.0}, "dropout: expected at least 0 and below 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        lm.Options(**changes)
