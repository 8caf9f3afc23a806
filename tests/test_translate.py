"""The translate recipe, the translator that comes with the package, and `regard translate`."""

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # of processes started here: one thread a worker, as in conftest

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from regard.training import Settings, train
from regard.training.data.phrasebook import phrasebook, swaps
from regard.training.recipes import translate
from regard.training.recipes.translate import END, PAD, SHIPPED, START, Options, Translation
from test_cli import Inside, entry_point, regard

RED_CAR = "La voiture rouge est rapide."
TINY = {
    "count": 300,
    "held_out": 20,
    "vocabulary_size": 600,
    "embedding_dim": 16,
    "num_heads": 2,
    "num_layers": 1,
    "hidden_dim": 32,
}
CAUSAL = [name for name, mechanism in REGISTRY.items() if weighs_tokens(mechanism, 8) and not mechanism.ordered]


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Inside:
    return entry_point(monkeypatch, capsys)


@pytest.fixture(scope="module")
def shipped() -> rg.Transformer:
    return translate.shipped()


def made(folder: Path, **changes: Any) -> Translation:
    return translate.build(Options(**{**TINY, **changes}), folder, seed=0)


class TestTask:
    def test_a_batch_is_its_pairs(self, tmp_path: Path) -> None:
        task = made(tmp_path)
        batch = task.batch([3, 0, 7], epoch=0)
        tokenizer = task.model.tokenizer
        for row, index in enumerate([3, 0, 7]):
            source, target = phrasebook("train", TINY["count"])[index]
            read, written = tokenizer.encode(source), [START, *tokenizer.encode(target, special=False), END]
            for name, wanted in (("source", read), ("target", written)):
                length = int(batch[f"{name}_lengths"][row])
                assert batch[name][row, :length].tolist() == wanted
                assert (batch[name][row, length:] == PAD).all()
            assert task.sizes()[index] == len(read) + len(written) - 1
        assert task.batch([3, 0, 7], epoch=5)["target"].equal(batch["target"])

    @torch.no_grad()
    def test_a_total_is_the_sum_over_pairs_one_by_one(self, tmp_path: Path) -> None:
        task = made(tmp_path, label_smoothing=0.2)
        model = task.model.double()
        indices = [5, 11, 2, 40]
        batch = task.batch(indices, epoch=0)
        total, count = 0.0, 0
        for index in indices:
            pair = task.batch([index], epoch=0)
            logits = model(pair["source"], pair["target"][:, :-1])[0].log_softmax(-1)
            labels = pair["target"][0, 1:]
            right = -logits[torch.arange(len(labels)), labels]
            total += float((0.8 * right - 0.2 * logits.mean(-1)).sum())
            count += len(labels)
        assert float(task.totals(model, batch)["loss"]) == pytest.approx(total, abs=1e-8)
        assert task.counts(batch) == {"loss": count}

    def test_logits_of_padding_are_not_computed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        task, seen = made(tmp_path), []
        predict = rg.Transformer.predict

        def spy(model: rg.Transformer, hidden: Tensor) -> Tensor:
            seen.append(hidden.shape)
            return predict(model, hidden)

        monkeypatch.setattr(rg.Transformer, "predict", spy)
        batch = task.batch(range(9), epoch=0)
        task.totals(task.model, batch)
        assert seen == [(task.counts(batch)["loss"], TINY["embedding_dim"])]

    def test_the_tokenizer_of_the_folder_is_used_again(self, tmp_path: Path) -> None:
        first = made(tmp_path)
        again = made(tmp_path, vocabulary_size=300)
        assert again.model.config.vocabulary_size == first.model.config.vocabulary_size > 300
        assert all(map(torch.equal, first.model.state_dict().values(), again.model.state_dict().values()))

    def test_results_are_those_of_the_held_out_pairs(self, tmp_path: Path) -> None:
        task = made(tmp_path)
        model = task.model.eval()
        total, right, count = 0.0, 0, 0
        pairs = phrasebook("held_out", TINY["held_out"])
        with torch.no_grad():
            results = task.evaluate(model)
            for source, target in pairs:
                written = model.tokenizer.encode(target)
                logits = model(torch.tensor([model.tokenizer.encode(source)]), torch.tensor([[START, *written[:-1]]]))
                total += float(F.cross_entropy(logits[0], torch.tensor(written), reduction="sum"))
                right += int((logits[0].argmax(-1) == torch.tensor(written)).sum())
                count += len(written)
        assert results["loss"] == pytest.approx(total / count, rel=1e-5)
        assert results["accuracy"] == pytest.approx(right / count)
        assert results["exact"] == 0
        assert 0 <= results["bleu"] < 10
        assert set(results) == {"loss", "accuracy", "exact", "bleu"}
        assert [line.split(" → ")[0] for line in task.samples(model)] == [source for source, _ in pairs[:3]]

    def test_without_sacrebleu_there_is_no_bleu_and_the_card_says_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        task = made(tmp_path)
        assert "sacrebleu" not in task.card().data
        monkeypatch.setitem(sys.modules, "sacrebleu", None)
        assert "bleu" not in translate.quality(task.model.eval(), phrasebook("held_out", 3))
        assert "sacrebleu" in task.card().data

    def test_a_users_own_pairs(self, tmp_path: Path) -> None:
        lines = [f"un mot {number}\ta word {number}\n" for number in range(60)]
        lines.append(f"{'long ' * 300}\t{'long ' * 300}\n")
        (tmp_path / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
        task = made(tmp_path, data=(str(tmp_path / "pairs.tsv"),), held_out=10)
        assert len(task.sizes()) + len(task.validation.pairs) + len(task.tested.pairs) in (60, 61)
        assert max(task.sizes()) < 100
        assert "pairs.tsv" in task.card().data
        assert str(tmp_path) not in task.card().data

    @pytest.mark.parametrize("name", CAUSAL)
    def test_every_causal_mechanism_learns_and_translates(self, name: str, tmp_path: Path) -> None:
        task = made(tmp_path, mechanism=name, num_kv_heads=1, pre_norm=name != "elu")
        losses = []
        optimizer = torch.optim.Adam(task.model.parameters(), 0.01)
        for _ in range(12):
            batch = task.batch(range(64), epoch=0)
            loss = task.totals(task.model, batch)["loss"] / task.counts(batch)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0]
        assert len(translate.translate(task.model.eval(), ["Bonjour."], max_new_tokens=4)) == 1

    def test_a_run_in_a_folder_is_a_model_that_translates(self, tmp_path: Path) -> None:
        task = made(tmp_path, encoder_window=rg.Window(4, 4), decoder_window=rg.Window(3), dropout=0.1)
        report = train(task, Settings(steps=4, batch_size=8, evaluate_every=2), tmp_path / "run")
        assert report.finished
        again = rg.load(tmp_path / "run" / "model")
        assert again.config.encoder_window == rg.Window(4, 4)
        assert again.config.decoder_window == rg.Window(3)
        assert len(translate.translate(again, [RED_CAR, "Oui."], beams=2)) == 2

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"count": 0}, "count: expected at least 1, got 0"),
            ({"vocabulary_size": 3}, "vocabulary_size: expected at least 8, got 3"),
            ({"label_smoothing": 1.0}, "label_smoothing: expected at least 0 and below 1, got 1.0"),
            ({"mechanism": "channel"}, "mechanism: expected one that can be causal, got channel"),
            ({"mechanism": "none"}, "mechanism: expected one of"),
            ({"mechanism": "elu", "decoder_window": rg.Window(7)}, "decoder_window: expected none with Elu"),
            ({"encoder_window": 8}, r"encoder_window: expected Window\(before, after\), got 8"),
            ({"dropout": 1.0}, "dropout: expected at least 0 and below 1"),
            ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads"),
            ({"num_heads": 3}, "num_heads: expected a divisor of embedding_dim"),
        ],
    )
    def test_options_that_cannot_be(self, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            made(tmp_path, **changes)


class TestTranslator:
    """The weights that come with the package."""

    def test_they_are_small(self) -> None:
        assert sum(path.stat().st_size for path in SHIPPED.iterdir()) <= 8e6

    def test_97_of_100_held_out_sentences_are_exact(self, shipped: rg.Transformer) -> None:
        assert translate.quality(shipped, phrasebook("held_out", 400, seed=1))["exact"] >= 0.97

    def test_noun_and_adjective_look_across_their_swap(self, shipped: rg.Transformer) -> None:
        aligned = translate.alignment(shipped, swaps("held_out", 100, seed=1))
        assert aligned.share >= 0.95
        assert aligned.weight > 0.5

    def test_a_translation_is_the_same_alone_and_among_others(self, shipped: rg.Transformer) -> None:
        texts = [source for source, _ in phrasebook("held_out", 80, seed=2)]
        for beams in (1, 3):
            together = translate.translate(shipped, texts, beams=beams)
            for at in (0, 17, 79):
                assert translate.translate(shipped, [texts[at]], beams=beams) == [together[at]]

    def test_where_words_look(self, shipped: rg.Transformer) -> None:
        rows, columns, weights = translate.looks(shipped, RED_CAR, "The red car is fast.")
        assert rows == ["The", "red", "car", "is", "fast", ".", "[END]"]
        assert columns == ["La", "voiture", "rouge", "est", "rapide", ".", "[END]"]
        config = shipped.config
        assert weights.shape == (config.num_layers, config.num_heads, 7, 7)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)

    def test_words_of_several_tokens_are_words(self, tmp_path: Path) -> None:
        task = made(tmp_path, vocabulary_size=270)  # hardly more than the bytes
        rows, columns, weights = translate.looks(task.model.eval(), RED_CAR, "The red car is fast.")
        assert rows == ["The", "red", "car", "is", "fast", ".", "[END]"]
        assert columns == ["La", "voiture", "rouge", "est", "rapide", ".", "[END]"]
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)

    def test_only_what_can_translate_is_asked_to(self) -> None:
        sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
        with pytest.raises(ValueError, match="model: expected an encoder-decoder, got Decoder"):
            translate.translate(rg.Decoder(rg.DecoderConfig(**sizes)), ["Oui."])
        with pytest.raises(ValueError, match="model: expected one with a tokenizer"):
            translate.translate(rg.Transformer(rg.TransformerConfig(**sizes)), ["Oui."])


class TestCommand:
    def test_it_works_at_once(self) -> None:
        done = regard("translate", RED_CAR)
        assert (done.returncode, done.stdout, done.stderr) == (0, "The red car is fast.\n", "")

    def test_sentences_files_and_standard_input(
        self, inside: Inside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pairs = phrasebook("held_out", 3)
        (tmp_path / "text.txt").write_text(f"{pairs[0][0]}\r\n\n{pairs[1][0]}\n", encoding="utf-8")
        several = inside("translate", pairs[0][0], pairs[1][0], "--beams", "1")
        assert several.stdout.splitlines() == [pairs[0][1], pairs[1][1]]
        wanted = f"{pairs[0][1]}\n\n{pairs[1][1]}\n"
        assert inside("translate", "--file", str(tmp_path / "text.txt")).stdout == wanted
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((tmp_path / "text.txt").read_bytes())))
        assert inside("translate", "-").stdout == wanted

    def test_json(self, inside: Inside) -> None:
        [line] = inside("translate", RED_CAR, "--json").stdout.splitlines()
        answer = json.loads(line)
        assert (answer["text"], answer["translation"], answer["reason"]) == (RED_CAR, "The red car is fast.", "end")
        assert -1 < answer["score"] < 0

    def test_the_picture(self, inside: Inside, tmp_path: Path) -> None:
        done = inside("translate", RED_CAR, "--show", str(tmp_path / "attention.png"))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")

    def test_another_model(self, inside: Inside, tmp_path: Path) -> None:
        rg.save(made(tmp_path).model, tmp_path / "model")
        done = inside("translate", RED_CAR, "--model", str(tmp_path / "model"))
        assert done.returncode == 0, done.stderr
        assert done.stdout != "The red car is fast.\n"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                [],
                'expected a sentence to translate, as in regard translate "Le chat dort.", or --file FILE, got none',
            ),
            ([""], "text: expected sentences"),
            (["Oui.", "--file", "here.txt"], "text: expected sentences or --file, got both"),
            (["--file", "missing.txt"], "missing.txt: No such file"),
            (["--file", "bytes.txt"], "text: expected UTF-8 text, got bytes.txt"),
            (["--file", "nothing.txt"], "text: expected sentences, got none in nothing.txt"),
            (["Oui.", "Non.", "--show", "a.png"], "show: expected one sentence to draw, got 2"),
            (["Oui.", "--show", "a.doc"], "--show: expected a picture file"),
            (["Oui.", "--model", "decoder"], "model: expected an encoder-decoder, got Decoder"),
            (["Oui.", "--model", "nowhere"], "nowhere"),
            (["Oui.", "--beams", "0"], "beams"),
        ],
    )
    def test_one_line_errors(self, inside: Inside, tmp_path: Path, arguments: list[str], message: str) -> None:
        (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
        (tmp_path / "nothing.txt").write_text("\n")
        sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
        rg.save(rg.Decoder(rg.DecoderConfig(**sizes)), tmp_path / "decoder")
        done = inside("translate", *arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("regard: error: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
