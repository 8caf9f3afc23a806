"""Benchmarks: what they sum up, and that their scripts run as they stand."""

import sys
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.commands.suite.training import RandomText
from regard.training.recipes import lm

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import mechanisms  # noqa: E402
import recall  # noqa: E402
import start  # noqa: E402
import table  # noqa: E402


def test_the_table_of_attentions_has_a_row_for_each():
    page = table.with_tables("before\n<!-- attention table -->\nold\n<!-- end of the attention table -->\nafter\n")
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    rows = [line for line in page.split("\n") if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| attention", *(f"| {name}" for name in mechanisms.VARIANTS)]


def test_means_over_seeds_and_their_confidence_intervals():
    same = {"parameters": 10, "state_bytes_at_64": 2048, "state_bytes_at_4096": 3_000_000}
    runs = [
        {"name": "elu", "seed": seed, "loss": 1.0, "exact": exact, "tokens_per_second": 100.0, **same}
        for seed, exact in enumerate((0.5, 0.7))
    ]
    summary = mechanisms.summary(runs)
    assert [row["seeds"] for row in summary] == [2]
    assert summary[0]["exact"] == {"mean": pytest.approx(0.6), "deviation": pytest.approx(0.1 * 2**0.5), "count": 2}
    text = mechanisms.table({"device": "cuda", "summary": summary})
    assert text.split("\n")[2] == "| elu | 60.0 ± 127.1 | 2 kB | 3.0 MB |", "12.706 standard errors of two runs"


def test_a_run_translates_all_held_out_sentences_and_goes_into_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr(
        mechanisms,
        "OPTIONS",
        {"count": 100, "vocabulary_size": 300, "embedding_dim": 16, "num_layers": 1, "num_heads": 2},
    )
    row, text = mechanisms.measure("softmax, MQA", seed=3, steps=2, sentences=7, device="cpu")
    assert len(text["translations"]) == len(text["pairs"]) == 7
    assert row["seed"] == 3
    assert len(row["curve"]) == len(row["evaluations"]) == 2
    assert row["state_bytes_at_4096"] == 64 * row["state_bytes_at_64"]
    content = {"device": "cpu", "runs": [row]}
    mechanisms.score(content["runs"], [text])
    mechanisms.save(tmp_path / "some.json", content, [text])
    stored = mechanisms.read(tmp_path / "some.json", None)
    assert stored["runs"][0]["bleu"] == pytest.approx(row["bleu"], abs=1e-4)
    assert stored["summary"][0]["exact"] == {"mean": row["exact"], "deviation": None, "count": 1}
    assert mechanisms.read(tmp_path / "some_translations.json", None)[0]["translations"] == text["translations"]


def test_starts_draw_the_same_numbers_and_divide_what_enters_the_residual_stream():
    model = rg.Decoder(rg.DecoderConfig(vocabulary_size=20, embedding_dim=16, num_layers=3, num_heads=2))
    drawn = {}
    for kind in ("0.02", "0.02, residual", "third, residual", "0.02, zero"):
        start.begin(model, kind, seed=1)
        block = model.stack.blocks[1]
        drawn[kind] = [matrix.weight.clone() for matrix in (block.attention.W_q, block.attention.W_o)]
    (q, out), (same, divided), (wide, _), (_, zero) = drawn.values()
    assert torch.equal(q, same)
    torch.testing.assert_close(divided, out * 6**-0.5)
    torch.testing.assert_close(wide, q * (3 * 16) ** -0.5 / 0.02)
    assert not zero.any()
    start.begin(model, "third, residual", seed=1)
    torch.manual_seed(1)
    model.initialise()  # what was chosen is the default
    torch.testing.assert_close(model.stack.blocks[1].attention.W_q.weight, wide)


def test_a_cell_of_a_study_is_trained_by_both_loops(monkeypatch):
    text = RandomText()
    small = lm.Options(vocabulary_size=4096, embedding_dim=16, num_layers=1, num_heads=2, context_length=32)
    text.options, text.model = small, rg.Decoder(small.config(4096))
    monkeypatch.setattr(RandomText, "evaluate", lambda self, model: {"loss": float(isinstance(model, rg.Decoder))})
    monkeypatch.setattr(lm, "build", lambda options, folder, seed: text)
    sizes = {"tiny": {"embedding_dim": 16, "num_layers": 1, "num_heads": 2}}
    monkeypatch.setattr(start, "RECIPES", {"lm": start.replace(start.RECIPES["lm"], sizes=sizes)})
    rows = []
    for kind in ("0.02, residual", start.PLAIN):
        cell = start.Cell(task="lm", size="tiny", start=kind, rate=1e-3, warmup=1, steps=4)
        rows.append(start.measure(cell, seed=0))
        assert [len(rows[-1][name]) for name in ("curve", "evaluations")] == [4, 4]
        assert 8 < rows[-1]["curve"][0][1] < 9  # log 4096 is 8.3
    assert [row["seeds"] for row in start.summary([*rows, {**rows[0], "seed": 1}])] == [2, 1]


def test_what_is_asked_of_a_copy_is_in_the_string_before_it():
    model = recall.Copying(rg.Softmax(), rg.causal)
    seen = []
    model.layer.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    logits, answers = model(8, 64, torch.Generator().manual_seed(0))
    string = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    assert torch.equal(answers, string[:, 3:])
    assert logits.shape == (4, 5, 32)
    torch.testing.assert_close(seen[0][:, 3:7], seen[0][:, 11:])  # the same four letters look the same
