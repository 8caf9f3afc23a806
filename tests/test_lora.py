"""LoRA: a model begins as its base, whose weights never change; merged, it is the same model."""

import json

import pytest
import torch

import regard as rg
from regard.checkpoints.adapters import Merged, peft_files, save_adapters
from regard.checkpoints.errors import CheckpointError
from regard.models.layers.lora import lora_of, trained_tensors
from regard.training import Lora, Settings, adapt, train
from regard.training.metrics import read_metrics
from test_training import Counting, settings

SIZES = {"vocabulary_size": 40, "embedding_dim": 64, "num_layers": 2, "num_heads": 4}
MODELS = {
    "decoder": (rg.Decoder, rg.DecoderConfig(**SIZES, num_kv_heads=2, tied=False)),
    "gpt2": (rg.Decoder, rg.DecoderConfig.gpt2(**SIZES, mechanism="quadratic")),
    "encoder": (rg.Encoder, rg.EncoderConfig.bert(**SIZES, num_classes=3)),
    "albert": (rg.Encoder, rg.EncoderConfig.albert(**SIZES)),
    "transformer": (rg.Transformer, rg.TransformerConfig(**SIZES)),
}


@pytest.fixture(autouse=True)
def without_figures(monkeypatch):
    monkeypatch.setattr("regard.training.loop.write_curves", lambda *_: None)


def made(name):
    torch.manual_seed(0)
    build, config = MODELS[name]
    return build(config).eval()


def outputs(model):
    tokens = torch.arange(24).reshape(2, 12) % 40
    more = [tokens[:, :5]] if isinstance(model, rg.Transformer) else []
    hidden = model(tokens, *more)
    return model.classify(hidden) if getattr(model.config, "num_classes", 0) else hidden


def moved(model):
    """The model with other numbers in B and in the new head, as if it were trained."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and name.endswith(("lora_B", "classes.weight")):
                torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", ["query,value", "all"])
@torch.no_grad()  # where a gradient is recorded, rotary positions are computed in another order
def test_it_begins_as_its_base_and_merged_it_stays_the_same(name, targets, tmp_path):
    model = made(name)
    rg.save(model, tmp_path / "data/start")
    before, weights = outputs(model), {key: value.clone() for key, value in model.state_dict().items()}
    adapt(model, Lora(rank=3, targets=targets), ("classes.weight", "classes.bias"))
    assert torch.equal(outputs(model), before)
    after = outputs(moved(model))
    assert (after - before).abs().max() > 1e-3
    save_adapters(model, trained_tensors(model), tmp_path / "model", "../data/start")
    whole = (tmp_path / "data/start/model.safetensors").stat().st_size
    assert (tmp_path / "model/adapters.safetensors").stat().st_size < whole / 4
    for way in (tmp_path / "model", rg.save(model, tmp_path / "whole")):
        loaded = rg.load(way)
        assert lora_of(loaded) is None
        torch.testing.assert_close(outputs(loaded), after, rtol=1e-5, atol=1e-5)
    fresh = {"classes.weight"}
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items() if key not in fresh)


def test_training_leaves_the_base_as_it_is_and_resumes_bitwise(tmp_path):
    def task():
        counting = Counting()
        adapt(counting.model, Lora(rank=2, targets="all"))
        return counting

    straight = task()
    before = {name: tensor.clone() for name, tensor in straight.model.state_dict().items()}
    train(straight, settings(ema=0.9, schedule="constant"), tmp_path / "straight")
    state = straight.model.state_dict()
    changed = {name for name, tensor in state.items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name, parameter in straight.model.named_parameters() if "lora_" in name}
    train(task(), settings(ema=0.9, schedule="constant", steps=8), tmp_path / "cut")
    again = task()
    train(again, settings(ema=0.9, schedule="constant"), tmp_path / "cut")
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.model.state_dict().items())
    for file in ("checkpoints/step-00000012/part-00000-of-00001.safetensors", "model/model.safetensors"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()
    saved = json.loads((tmp_path / "cut/checkpoints/step-00000012/manifest.json").read_text())["tensors"]
    assert not any(name.startswith("model.") and "lora_" not in name for name in saved)
    losses = [record["loss"] for record in read_metrics(tmp_path / "cut") if "loss" in record]
    assert losses[-1] < losses[0]


def test_the_averaged_weights_are_evaluated_and_kept(tmp_path):
    """By hand: the same steps, and the formula."""
    decay, seen = 0.6, []

    class Watched(Counting):
        def evaluate(self, model):
            seen.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
            return super().evaluate(model)

    task = Counting()
    recorded = [{name: tensor.double().clone() for name, tensor in task.model.state_dict().items()}]

    def record(report):
        if report.kind == "step" and report.step:
            recorded.append({name: tensor.double().clone() for name, tensor in task.model.state_dict().items()})

    watched = Watched()
    train(watched, settings(ema=decay, evaluate_every=12), tmp_path / "averaged")
    train(task, settings(), tmp_path / "plain", watch=record)
    averages = recorded[0]
    for step, weights in enumerate(recorded[1:], 1):
        d = min(decay, (1 + step) / (10 + step))
        averages = {name: d * average + (1 - d) * weights[name] for name, average in averages.items()}
    assert len(recorded) == 13
    for name, expected in averages.items():
        torch.testing.assert_close(seen[-1][name].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(rg.load(tmp_path / "averaged").state_dict()[name], seen[-1][name])
        assert torch.equal(watched.model.state_dict()[name], task.model.state_dict()[name])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "lora_rank: expected a whole number of at least 1, got 0"),
        ({"rank": 2, "alpha": 0.0}, "lora_alpha: expected a number above 0"),
        ({"rank": 2, "targets": "querry"}, "lora_targets: expected some of query, key, value, output, network, got"),
    ],
)
def test_wrong_adapters_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        adapt(made("decoder"), Lora(**options))


def test_adapters_without_their_base_or_with_another_are_refused(tmp_path):
    model = made("decoder")
    rg.save(model, tmp_path / "data/start")
    adapt(model, Lora(rank=2))
    save_adapters(model, trained_tensors(model), tmp_path / "model", "../data/start")
    values = json.loads((tmp_path / "model/config.json").read_text())
    for changes, words in (
        ({"base": "../gone"}, "gone, got none"),
        ({"rank": 3}, "rank 3"),
        ({"rank": "x"}, "lora_rank"),
    ):
        with pytest.raises(CheckpointError, match=words):
            Merged(tmp_path / "model", {"adapters": {**values["adapters"], **changes}})
    with pytest.raises(ValueError, match="has them already"):
        adapt(model, Lora(rank=2))
    with pytest.raises(ValueError, match="--lora-rank"):
        peft_files(tmp_path / "data/start", model)


def test_a_module_of_ones_own_has_adapters_by_the_names_of_its_layers(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    before = net(x)
    adapt(net, Lora(rank=2, targets="2"))
    assert torch.equal(net(x), before)
    assert [name for name, parameter in net.named_parameters() if parameter.requires_grad] == ["2.lora_A", "2.lora_B"]


class Kept:
    def __init__(self):
        self.seen, self.closed = [], 0

    def log(self, step, values, kind):
        self.seen.append((step, kind, sorted(values)))

    def close(self):
        self.closed += 1


def test_loggers_get_every_step_and_every_evaluation(tmp_path):
    logger = Kept()
    train(Counting(), settings(steps=4, evaluate_every=2), tmp_path, loggers=[logger])
    assert [(step, kind) for step, kind, _ in logger.seen] == [
        *((1, "training"), (2, "training"), (2, "evaluation")),
        *((3, "training"), (4, "training"), (4, "evaluation")),
    ]
    assert logger.seen[0][2] == ["loss", "norm", "rate", "seconds", "tokens"]
    assert logger.closed == 1


def test_a_logger_that_fails_is_the_error_and_the_others_are_closed(tmp_path):
    class Failing(Kept):
        def log(self, step, values, kind):
            raise OSError(28, "No space left on device", "mine.txt")

    loggers = Failing(), Kept()
    with pytest.raises(OSError, match=r"mine\.txt"):
        train(Counting(), settings(), tmp_path, loggers=loggers)
    assert loggers[1].closed == 1


@pytest.mark.parametrize("ema", [0.0, 1.0])
def test_a_decay_is_between_0_and_1(ema):
    with pytest.raises(ValueError, match="ema: expected a decay above 0 and below 1"):
        Settings(batch_size=1, ema=ema)
