"""Benchmarks: what they sum up, and that their scripts run as they stand."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import mechanisms  # noqa: E402
import table  # noqa: E402


def test_the_table_of_attentions_has_a_row_for_each():
    page = table.with_tables("before\n<!-- attention table -->\nold\n<!-- end of the attention table -->\nafter\n")
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    rows = [line for line in page.split("\n") if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == ["| attention", *(f"| {name}" for name in mechanisms.VARIANTS)]


def test_means_and_deviations_over_seeds():
    same = {"parameters": 10, "state_bytes_at_64": 2048, "state_bytes_at_4096": 3_000_000}
    runs = [
        {"name": "elu", "seed": seed, "loss": 1.0, "exact": exact, "tokens_per_second": 100.0, **same}
        for seed, exact in enumerate((0.5, 0.7))
    ]
    summary = mechanisms.summary(runs)
    assert [row["seeds"] for row in summary] == [2]
    assert summary[0]["exact"] == {"mean": pytest.approx(0.6), "deviation": pytest.approx(0.1 * 2**0.5)}
    text = mechanisms.table({"device": "cuda", "summary": summary})
    assert text.split("\n")[2] == "| elu | 60.0 ± 14.1 | 2 kB | 3.0 MB |"


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
    assert stored["summary"][0]["exact"] == {"mean": row["exact"], "deviation": None}
    assert mechanisms.read(tmp_path / "some_translations.json", None)[0]["translations"] == text["translations"]
