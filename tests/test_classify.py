"""Classes of texts: tables with labels, fine-tuning, and `regard classify`."""

import io
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

import regard as rg
from regard.training.data.labels import AREAS, labelled, split_labelled
from regard.training.data.vocabulary import train_wordpiece
from regard.training.recipes import classify
from test_cli import Inside, entry_point

SIZES = {"vocabulary_size": 80, "embedding_dim": 32, "num_layers": 1, "num_heads": 4}
WORDS = {"food": ("bread", "soup", "rice"), "sky": ("moon", "cloud", "star"), "work": ("desk", "office", "boss")}


def table() -> list[tuple[str, str]]:
    draw = random.Random(0)
    rows = []
    for number in range(480):
        label = list(WORDS)[number % 3]
        rows.append((label, f"I see the {draw.choice(WORDS[label])} number {number} again."))
    return rows


@pytest.fixture(scope="module")
def table_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "own.tsv"
    path.write_text("".join(f"{label}\t{text}\n" for label, text in table()))
    return path


def learned(task: classify.Classification, steps: int, rate: float = 3e-3) -> dict[str, float]:
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=rate)
    draw = np.random.default_rng(0)
    task.model.train()
    for step in range(steps):
        batch = task.batch(draw.integers(0, len(task.sizes()), 24).tolist(), epoch=step)
        loss = task.totals(task.model, batch)["loss"] / task.counts(batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    task.model.eval()
    with torch.no_grad():
        return task.evaluate(task.model)


@pytest.fixture(scope="module")
def trained(table_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has learnt the table."""
    folder = tmp_path_factory.mktemp("run")
    task = classify.build(
        classify.Options(data=str(table_file), context_length=24, dropout=0.0, **SIZES), folder, seed=0
    )
    results = learned(task, 150)
    assert results["accuracy"] > 0.95 > 0.6 > results["baseline"]
    assert results["macro F1"] > 0.95
    samples = task.samples(task.model)
    assert 1 < len(samples) <= 4
    assert all(sample.split(":")[0] in WORDS and "I see the" in sample for sample in samples)
    return rg.save(task.model, folder / "model")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", r"own\.tsv: expected text, got an empty file"),
        (b"good\tfine\nbad\tawful\textra\n", r"own\.tsv, line 2: expected 2 columns, label and text, got 3"),
        (b"good\tfine\n\njust text\n", r"own\.tsv, line 3: expected 2 columns, label and text, got 1"),
        (b"good\tfine\nbad\t \n", r"own\.tsv, line 2: expected a text, got an empty one"),
        (b"good\tfine\n\tawful\n", r"own\.tsv, line 2: expected a label, got an empty one"),
        (b"good\tfine\nbad\taw\xfful\n", r"own\.tsv, line 2: expected UTF-8 text, got byte 0xff"),
        (b"good\tfine\ngood\tvery fine\n", r"own\.tsv: expected at least 2 classes, got only 'good'"),
        (
            b"good\tfine\nbad\tawful\n",
            r"data: expected examples of at least 2 classes to train on, got 1 of 1 class, and 1 held out",
        ),
    ],
)
def test_bad_tables_are_one_error_that_names_file_and_line(tmp_path, data, words):
    (tmp_path / "own.tsv").write_bytes(data)
    with pytest.raises(ValueError, match=words):
        classify.build(classify.Options(data=str(tmp_path / "own.tsv"), **SIZES), tmp_path, seed=0)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match="data: expected a file of labels and texts, got"):
        labelled(tmp_path / "nowhere.tsv")


def test_lines_of_other_systems_are_read(tmp_path):
    (tmp_path / "own.tsv").write_bytes("\ufeffgood\tfine\u2028day\r\nbad\t awful \r\n".encode())
    assert labelled(tmp_path / "own.tsv") == [("good", "fine\u2028day"), ("bad", "awful")]


def test_the_embedded_classes():
    examples = labelled(None)
    counts = {area: sum(label == area for label, _ in examples) for area in AREAS}
    assert sum(count > 200 for count in counts.values()) >= 4
    assert sum(counts.values()) == len(examples)
    modules = [module for modules in AREAS.values() for module in modules]
    assert len(set(modules)) == len(modules)
    train, validation, test = split_labelled(examples)
    for part, other in ((validation, test), (test, train)):
        assert 0.03 < len(part) / len(examples) < 0.07
        assert not {text for _, text in train + other} & {text for _, text in part}


def test_results_are_right(table_file, tmp_path):
    task = classify.build(classify.Options(data=str(table_file), context_length=24, **SIZES), tmp_path, seed=0)
    with torch.no_grad():
        task.model.classes.weight.zero_()
        task.model.classes.bias.copy_(torch.tensor([0.0, 0.0, 9.0]))
        results = task.evaluate(task.model.eval())
    labels = task.validation.labels
    share = (labels == 2).mean()
    assert results["accuracy"] == pytest.approx(share)
    assert results["macro F1"] == pytest.approx(2 * share / (1 + share) / 3)
    assert results["baseline"] == pytest.approx((labels == np.bincount(task.train.labels).argmax()).mean())
    assert "3 classes (food, sky, work)" in task.card().data


def test_a_batch_is_the_sum_of_its_examples(table_file, tmp_path):
    task = classify.build(classify.Options(data=str(table_file), context_length=24, **SIZES), tmp_path, seed=0)
    model = task.model.double().eval()
    together = task.totals(model, task.batch([3, 1, 8], 0))["loss"]
    assert abs(together - sum(task.totals(model, task.batch([index], 5))["loss"] for index in (3, 1, 8))) <= 1e-10
    assert [int(size) for size in task.sizes()][:9:5] == task.batch([0, 5], 0)["lengths"].tolist()


def test_a_folder_with_tokens_needs_no_table(table_file, tmp_path):
    gone = tmp_path / "gone.tsv"
    gone.write_text(table_file.read_text())
    (tmp_path / "data").mkdir()
    options = classify.Options(data=str(gone), **SIZES)
    first = classify.build(options, tmp_path / "data", seed=0)
    gone.unlink()
    second = classify.build(options, tmp_path / "data", seed=0)
    assert all(torch.equal(tensor, second.batch([4, 2], 1)[name]) for name, tensor in first.batch([4, 2], 1).items())
    state = second.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in first.model.state_dict().items())
    assert second.model.config == first.model.config


@pytest.mark.parametrize("pooler", [True, False])
def test_a_pre_trained_encoder_keeps_its_body_and_gets_a_new_head(table_file, tmp_path, pooler):
    tokenizer = train_wordpiece([text for _, text in table()], 80)
    torch.manual_seed(1)
    heads = {"pooler": pooler, "next_sentence": pooler, "masked_words": True}
    sizes = {"vocabulary_size": tokenizer.vocabulary_size, "embedding_dim": 16, "num_layers": 2, "num_heads": 2}
    source = rg.Encoder(rg.EncoderConfig(**sizes, **heads, context_length=20, attention_dropout=0.1))
    source.tokenizer = tokenizer
    rg.save(source, tmp_path / "model")
    (tmp_path / "data").mkdir()
    options = classify.Options(
        data=str(table_file), start=str(tmp_path / "model"), mechanism="quadratic", window=rg.Window(4, 2)
    )
    model = classify.build(options, tmp_path / "data", seed=0).model
    state, start = model.state_dict(), source.state_dict()
    shared = state.keys() & start.keys()
    assert {"embedding.weight", "stack.blocks.1.network.up.weight"} <= shared
    assert ("pooler.weight" in shared) == pooler
    assert all(torch.equal(state[name], start[name]) for name in shared)
    assert not [name for name in state if name.startswith(("words", "order", "inversion"))]
    config = model.config
    assert (config.num_classes, config.class_names, config.pooler) == (3, ("food", "sky", "work"), True)
    assert (config.window, config.mechanism, config.dropout) == (rg.Window(4, 2), rg.Quadratic(), 0.1)
    assert max(classify.build(options, tmp_path / "data", seed=0).sizes()) <= 20


def test_minilm_learns_other_classes(table_file, tmp_path):
    task = classify.build(classify.Options(data=str(table_file), start="minilm", context_length=16), tmp_path, seed=0)
    results = learned(task, 8, rate=3e-4)
    assert results["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"start": "minilm", "embedding_dim": 64},
            "embedding_dim: expected none, the model that training starts from has its own",
        ),
        ({"start": "minilm", "num_kv_heads": 2}, "num_kv_heads: expected none, the model"),
        ({"context_length": 2}, "context_length: expected at least 8"),
        ({"mechanism": "hope"}, "mechanism: expected one of"),
        ({"embedding_dim": 30}, "num_heads: expected a divisor of embedding_dim = 30"),
    ],
)
def test_options_are_checked_before_any_work(changes, words):
    with pytest.raises(ValueError, match=words):
        classify.Options(**changes)


def test_what_is_no_encoder_is_refused(table_file, tmp_path):
    sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    decoder = rg.save(rg.Decoder(rg.DecoderConfig(**sizes)), tmp_path / "decoder")
    encoder = rg.save(rg.Encoder(rg.EncoderConfig(**sizes)), tmp_path / "encoder")
    for start, words in (
        (decoder, "from: expected an encoder, got"),
        (encoder, "an encoder with a tokenizer"),
    ):
        with pytest.raises(ValueError, match=words):
            classify.build(classify.Options(data=str(table_file), start=str(start)), tmp_path, seed=0)


# The command


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


def test_one_text_gets_every_class(inside, trained):
    done = inside("classify", str(trained), "I see the moon number 3 again.")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if "%" in line]
    assert rows[0][0] == "sky"
    assert sorted(row[0] for row in rows) == ["food", "sky", "work"]
    shares = [float(row[1].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert abs(sum(shares) - 100) < 0.3
    assert rows[0][2].count("█") > 15
    assert done.stderr == ""


def test_several_texts_get_a_row_each(inside, trained, tmp_path):
    (tmp_path / "texts.txt").write_text("I see the [red] bread number 1 again.\nI see the boss number 2 again.\n")
    done = inside("classify", str(trained), "--file", str(tmp_path / "texts.txt"))
    rows = [line for line in done.stdout.splitlines() if "%" in line]
    assert [row.split()[0] for row in rows] == ["food", "work"]
    assert "I see the [red] bread number 1 again." in rows[0]


def test_json_has_what_the_library_gives(inside, trained):
    texts = ["I see the star number 5 again.", "I see the rice number 6 again."]
    done = inside("classify", str(trained), *texts, "--json")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [answer["text"] for answer in answers] == texts
    assert [answer["label"] for answer in answers] == ["sky", "food"]
    expected = rg.load(trained).probabilities(texts)
    for answer, row in zip(answers, expected.tolist(), strict=True):
        assert answer["probabilities"] == pytest.approx(dict(zip(("food", "sky", "work"), row, strict=True)))
        assert next(iter(answer["probabilities"])) == answer["label"]


def test_long_texts_are_cut_and_that_is_said(inside, trained):
    model = rg.load(trained)
    text = "I see the moon " + "again " * 50
    done = inside("classify", str(trained), text, "short moon", "--json")
    assert "1 of the texts were truncated to 24 tokens" in done.stderr
    ids = model.tokenizer.encode(text)
    kept = torch.tensor([[*ids[:23], ids[-1]]])
    with torch.no_grad():
        expected = model.classify(model(kept)).softmax(-1)[0]
    assert torch.allclose(model.probabilities([text])[0], expected, atol=1e-6)


def test_a_model_without_names_gives_numbers(inside, trained, tmp_path):
    model = rg.load(trained)
    model.config = replace(model.config, class_names=())
    rg.save(model, tmp_path / "nameless")
    done = inside("classify", str(tmp_path / "nameless"), "I see the moon number 3 again.", "--json")
    assert json.loads(done.stdout)["label"] == "1"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["minilm", "text"], "model: expected an encoder with classes and a tokenizer"),
        (
            ["TRAINED"],
            'text: expected a text to classify, as in regard classify MODEL "Some text.", or --file FILE, got none',
        ),
        (["TRAINED", "a", " "], "text: expected words, got an empty text 2"),
        (["TRAINED", "a", "--file", "x.txt"], "text: expected texts or --file, got both"),
        (["TRAINED", "--file", "gap.txt"], "text: expected words, got an empty line 2"),
        (["TRAINED", "--file", "bytes.txt"], "text: expected UTF-8 text, got"),
        (["TRAINED", "--file", "nowhere.txt"], "nowhere.txt"),
        (["nowhere", "a"], "nowhere"),
    ],
)
def test_errors_are_one_line(inside, trained, tmp_path, arguments, words):
    (tmp_path / "gap.txt").write_text("a\n\nb\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    typed = [str(trained) if argument == "TRAINED" else argument for argument in arguments]
    done = inside("classify", *typed, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("regard: error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_standard_input_is_read_line_by_line(inside, trained, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(b"I see the moon number 3 again.\nI see the soup number 9 again.\n"))
    )
    done = inside("classify", str(trained), "-", "--json")
    assert [json.loads(line)["label"] for line in done.stdout.splitlines()] == ["sky", "food"]
