"""The training loop: steps that do not depend on how they are cut, runs that go on as if nothing had happened."""

import itertools
import math
import multiprocessing
import os
import platform
import resource
import signal
import tracemalloc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.models.base import Model
from regard.models.layers.attention import Attend
from regard.models.registry import MODELS
from regard.training import IGNORED, Report, Settings, Task, train
from regard.training.batches import plan
from regard.training.loop import _recompute
from regard.training.metrics import read_metrics
from regard.training.optimizer import adamw, clip, rate
from regard.training.progress import progress
from regard.training.signals import listening

SIZES = np.random.default_rng(0).integers(3, 30, 400).tolist()


class Counting(Task):
    """A decoder learns sequences that count upwards: ragged, random, and cheap."""

    name = "counting"

    def __init__(self, dropout: float = 0.0, spoiled: bool = False, **changes: object) -> None:
        torch.manual_seed(0)
        sizes = {"vocabulary_size": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "dropout": dropout}
        self.model, self.spoiled = rg.Decoder(rg.DecoderConfig(**{**sizes, **changes})), spoiled

    def sizes(self):
        return SIZES

    def batch(self, indices, epoch):
        lengths = [SIZES[index] for index in indices]
        tokens = torch.full((len(indices), max(lengths)), IGNORED)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            first = np.random.default_rng((7, epoch, index)).integers(16)
            tokens[row, :length] = (first + torch.arange(length)) % 16
        return {"tokens": tokens, "lengths": torch.tensor(lengths)}

    def counts(self, batch):
        return {"next": int((batch["lengths"] - 1).sum())}

    def totals(self, model, batch):
        tokens = batch["tokens"]
        logits = model(tokens.clamp(min=0), mask=rg.padding(batch["lengths"]))
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        return {"next": total * math.nan if self.spoiled else total}

    def evaluate(self, model):
        batch = {name: tensor.to(model.device) for name, tensor in self.batch(list(range(32)), 10**6).items()}
        return {"loss": float(self.totals(model, batch)["next"]) / self.counts(batch)["next"]}


class Measured(Counting):
    """With a test that gives what the evaluation gave."""

    def test(self, model):
        return self.evaluate(model)


@pytest.fixture(autouse=True)
def figures(request, monkeypatch):
    """Curves are most of the time of a small run: they are drawn for one."""
    if request.node.name != "test_a_run_leaves_what_people_and_programs_look_at":
        monkeypatch.setattr("regard.training.loop.write_curves", lambda *_: None)


def settings(**changes):
    return Settings(**{"steps": 12, "batch_size": 16, "learning_rate": 1e-2, "warmup": 2, "save_every": 4, **changes})


def losses(folder):
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def weights(task):
    return {name: tensor.clone() for name, tensor in task.model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{"batch_size": 16}, {"batch_tokens": 300}])
def test_a_plan_holds_every_example_once_and_little_padding(options):
    first = plan(SIZES, 0, 0, **options)
    assert sorted(index for batch in first for index in batch) == list(range(len(SIZES)))
    assert list(first) == list(plan(SIZES, 0, 0, **options))
    assert list(first) != list(plan(SIZES, 0, 1, **options))
    assert list(first) != list(plan(SIZES, 1, 0, **options))
    if "batch_tokens" in options:
        assert all(len(batch) * max(SIZES[index] for index in batch) <= 300 for batch in first)
    room = sum(len(batch) * max(SIZES[index] for index in batch) for batch in first)
    assert first.padding == (room - sum(SIZES[index] for batch in first for index in batch)) / room < 0.06


def test_a_batch_takes_all_that_fits():
    batches = plan(SIZES, 0, 0, batch_tokens=300)
    examples, bounds = batches.examples, batches.bounds.tolist()
    for begin, end in itertools.pairwise(bounds[:-1]):
        longest = max(SIZES[index] for index in examples[begin : end + 1])
        assert longest * (end + 1 - begin) > 300


@pytest.mark.once
def test_a_billion_tokens_are_planned_in_little_memory():
    """Peak memory while rows of 256 tokens are planned, and how many bytes of them remain."""
    tracemalloc.start()
    batches = plan(np.broadcast_to(np.int64(256), 10**9 // 256), 0, 0, batch_tokens=2**14)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(batches) == 61_036
    assert kept < 40e6
    assert peak < 100e6


def test_an_example_longer_than_a_step_is_named():
    with pytest.raises(ValueError, match="batch_tokens: expected room for the longest example, 29 tokens, got 20"):
        plan(SIZES, 0, 0, batch_tokens=20)


def test_rates_rise_and_fall():
    cosine = settings(steps=100, warmup=10, learning_rate=1.0)
    assert rate(cosine, 5) == 0.5
    assert rate(cosine, 10) == 1.0
    assert rate(cosine, 100) == pytest.approx(0.05)
    original = settings(warmup=400, schedule="inverse_root", learning_rate=1.0)
    assert rate(original, 1600) == pytest.approx(0.5)
    assert rate(settings(schedule="constant", learning_rate=1.0), 999) == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("longest", [None, 0.5, 1e6])
def test_a_long_gradient_is_shortened_and_its_length_told(dtype, longest):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Linear(7, 5, dtype=dtype) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, fused=True) for model in (ours, theirs)]
    for size, limit in ((100.0, longest), (1e-3, longest), (7.0, longest), (7.0, None)):
        x = size * torch.randn(3, 7, dtype=dtype)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit or torch.inf)
        torch.testing.assert_close(clip(optimizers[0], ours.parameters(), limit), expected)
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight)


def test_only_matrices_decay():
    model = Counting().model
    decaying, others = adamw(model, settings(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0
    assert {parameter.ndim for parameter in decaying["params"]} == {2}
    assert {parameter.ndim for parameter in others["params"]} == {1}
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps: expected a whole number of at least 1, got 0"),
        ({"batch_tokens": 100}, "batch_tokens: expected either this or batch_size"),
        ({"batch_size": None}, "batch_tokens: expected either this or batch_size"),
        ({"learning_rate": -1.0}, "learning_rate: expected 0 to 100, got -1.0"),
        ({"learning_rate": math.nan}, "learning_rate: expected 0 to 100, got nan"),
        ({"schedule": "linear"}, "schedule: expected one of cosine, inverse_root, constant, got 'linear'"),
        ({"precision": "float16"}, "precision: expected one of float32, float64, bfloat16, got 'float16'"),
        ({"clip": 0.0}, "clip: expected a norm above 0, got 0.0"),
        ({"patience": 0}, "patience: expected a whole number of at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        settings(**changes)


def test_it_learns(tmp_path):
    report = train(Counting(), settings(steps=120), tmp_path)
    assert report.finished
    assert losses(tmp_path)[0] > 2.5
    assert report.results["loss"] < 1.0


def test_pieces_of_a_step_weigh_what_they_hold(tmp_path):  # transformers#34191
    whole, cut = Counting(), Counting()
    train(whole, settings(precision="float64"), tmp_path / "whole")
    train(cut, settings(precision="float64", accumulate=3), tmp_path / "cut")
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "cut"), abs=1e-10)
    for name, tensor in weights(whole).items():
        assert (tensor - cut.model.state_dict()[name]).abs().max() <= 1e-10, name


@pytest.mark.once
def test_batches_made_ahead_change_nothing(tmp_path):
    """Dropout draws from the generator that a loader would draw from. Ctrl-C reaches all processes of a terminal."""
    changes = {"batch_size": 100, "accumulate": 2}

    def interrupt(report):
        if report.kind == "step" and report.step == 5:
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    straight, ahead = Counting(dropout=0.1), Counting(dropout=0.1)
    train(straight, settings(**changes), tmp_path / "straight")
    assert train(Counting(dropout=0.1), settings(**changes, workers=2), tmp_path / "ahead", watch=interrupt).interrupted
    train(ahead, settings(**changes, workers=1), tmp_path / "ahead")
    assert losses(tmp_path / "ahead") == losses(tmp_path / "straight")
    assert same(weights(ahead), weights(straight))


@pytest.mark.once
def test_an_error_in_a_batch_made_ahead_is_the_error(tmp_path):
    class Broken(Counting):
        def batch(self, indices, epoch):
            raise ValueError(f"data: expected a readable example, got {len(indices)} of none")

    with pytest.raises(ValueError, match=r"^data: expected a readable example, got 16 of none$"):
        train(Broken(), settings(workers=1), tmp_path)
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]


def test_recomputing_blocks_changes_nothing(tmp_path):
    kept, again = Counting(dropout=0.1), Counting(dropout=0.1)
    train(kept, settings(), tmp_path / "kept")
    train(again, settings(recompute=True), tmp_path / "again")
    assert losses(tmp_path / "kept") == losses(tmp_path / "again")


TEXT = {"vocabulary_size": 16, "embedding_dim": 16, "num_layers": 3, "num_heads": 2}
STAGES = {"embedding_dim": (8, 16), "num_layers": (1, 2), "num_heads": (1, 2), "num_groups": (1, 2)}
PATCHES = {"patch_size": (4, 2), "patch_stride": (4, 2), "patch_padding": (0, 0), "norm_first": (False, True)}
PICTURES = {"image_size": 16, "patch_size": 4, "embedding_dim": 16, "num_layers": 3, "num_heads": 2, "num_classes": 4}
RECOMPUTED = {
    "Decoder": (rg.DecoderConfig(**TEXT), lambda model, x: model(x)),
    "Encoder": (rg.EncoderConfig.bert(**TEXT), lambda model, x: model(x)),
    "Transformer": (rg.TransformerConfig(**TEXT), lambda model, x: model(x, x)),
    "VisionTransformer": (
        rg.VisionConfig(**PICTURES),
        lambda model, x: model(torch.ones(2, 3, 16, 16, dtype=model.dtype)),
    ),
    "DaViT": (
        rg.DaViTConfig(**STAGES, **PATCHES, window_size=2),
        lambda model, x: model(torch.ones(2, 3, 16, 16, dtype=model.dtype)),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_recomputing_keeps_less_of_every_model(name):
    config, run = RECOMPUTED[name]
    torch.manual_seed(0)
    model, x, saved, ran = MODELS[name][0](config), torch.randint(16, (2, 9)), [0, 0], [0, 0]
    attentions = [module for module in model.modules() if isinstance(module, Attend)]
    gradients = []
    for again in (0, 1):
        if again:
            _recompute(model)

        def keep(tensor, again=again):
            saved[again] += tensor.nbytes
            return tensor

        hooks = [
            attention.register_forward_hook(lambda *_, again=again: ran.__setitem__(again, ran[again] + 1))
            for attention in attentions
        ]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = run(model, x)
        model.zero_grad()
        out.square().sum().backward()
        gradients.append(
            [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        )
        for hook in hooks:
            hook.remove()
    assert ran == [len(attentions), 2 * len(attentions)]
    assert saved[1] < saved[0] / 2
    for kept, computed in zip(*gradients, strict=True):
        assert (kept is None and computed is None) or torch.equal(kept, computed)


def test_recomputing_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match="recompute: expected a model with repeated blocks, got Model without any"):
        _recompute(Model())


def test_bfloat16_learns_like_float32(tmp_path):
    train(Counting(), settings(steps=40), tmp_path / "float32")
    train(Counting(), settings(steps=40, precision="bfloat16"), tmp_path / "bfloat16")
    assert losses(tmp_path / "bfloat16")[-1] == pytest.approx(losses(tmp_path / "float32")[-1], rel=0.05)
    assert losses(tmp_path / "bfloat16") != losses(tmp_path / "float32")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_bitwise(tmp_path, number):  # transformers#40245
    straight = Counting(dropout=0.2)
    train(straight, settings(steps=30), tmp_path / "straight")

    def interrupt(report):
        if report.kind == "step" and report.step == 7:
            os.kill(os.getpid(), number)

    first = train(Counting(dropout=0.2), settings(steps=30), tmp_path / "run", watch=interrupt)
    assert first.interrupted
    assert first.step == 8, "the step under way ends, then the run does"
    second = Counting(dropout=0.2)
    report = train(second, settings(steps=30), tmp_path / "run")
    assert report.finished
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert same(weights(second), weights(straight))
    evaluations = [
        [record for record in read_metrics(tmp_path / name) if "evaluation" in record] for name in ("run", "straight")
    ]
    assert evaluations[0] == evaluations[1]


def test_steps_that_a_kill_took_back_are_taken_out_of_the_metrics(tmp_path):
    train(Counting(), settings(steps=10, keep=5), tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')
    train(Counting(), settings(steps=12), tmp_path)
    assert [record["step"] for record in read_metrics(tmp_path) if "loss" in record] == list(range(1, 13))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path):
    straight = Counting(dropout=0.2)
    train(straight, settings(), tmp_path / "straight")
    train(Counting(dropout=0.2), settings(), tmp_path / "run")
    newest = tmp_path / "run/checkpoints/step-00000012"
    data = max(newest.iterdir(), key=lambda file: file.stat().st_size)
    spoiled = bytearray(data.read_bytes())
    spoiled[len(spoiled) // 2] ^= 16
    data.write_bytes(spoiled)
    messages = []
    again = Counting(dropout=0.2)
    train(again, settings(), tmp_path / "run", watch=lambda report: messages.append(report.message))
    assert any("step-00000012" in message and "resumed after step 8" in message for message in messages), messages
    assert same(weights(again), weights(straight))
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_it_stops_when_results_get_no_better(tmp_path):
    report = train(Counting(), settings(steps=200, learning_rate=0.0, evaluate_every=2, patience=3), tmp_path)
    assert (report.early, report.finished) == (True, True)
    assert report.step == 8
    assert train(Counting(), settings(steps=200, learning_rate=0.0, evaluate_every=2, patience=3), tmp_path).step == 8


def test_a_loss_that_is_none_is_one_clear_error(tmp_path):
    words = (
        "loss: expected a finite number, got nan .* at step 1; try a lower learning rate. The last checkpoint is none"
    )
    with pytest.raises(ValueError, match=words):
        train(Counting(spoiled=True), settings(), tmp_path)


def test_a_run_leaves_what_people_and_programs_look_at(tmp_path):
    train(Counting(), settings(), tmp_path)
    assert {"metrics.jsonl", "tensorboard", "checkpoints", "model", "curves.png", "README.md"} <= set(
        os.listdir(tmp_path)
    )
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000008", "step-00000012"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "README.md").read_text()
    assert "Softmax" in card
    assert "| loss |" in card
    model = rg.load(tmp_path / "model")
    best = min(record["evaluation"]["loss"] for record in read_metrics(tmp_path) if "evaluation" in record)
    with torch.no_grad():
        assert Counting().evaluate(model)["loss"] == pytest.approx(best, abs=1e-5)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in board.Scalars("training/loss")] == pytest.approx(losses(tmp_path), rel=1e-6)


def test_any_mechanism_trains(tmp_path):
    for name in ("quadratic", "elu", "uniform"):
        train(Counting(mechanism=name, num_kv_heads=1), settings(steps=3), tmp_path / name)
        assert len(losses(tmp_path / name)) == 3


def test_a_second_signal_ends_it_at_once():
    with listening() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.asked == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a background job of a script
    try:
        with listening() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.asked is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.asked == "SIGTERM"
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_log_has_a_line_of_the_first_step_and_then_twice_a_minute(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("regard.training.progress.time.monotonic", lambda: now)
    with progress("counting", 1000, log=True) as watch:
        for step in range(1, 9):
            watch(Report(step=step, steps=1000, loss=2.5, seconds=step * 12.0, tokens_per_second=1200))
            now += 12
    assert capsys.readouterr().err.splitlines() == [
        f"step {step} of 1,000: loss 2.500  1,200 tokens/s  {left} min left"
        for step, left in ((1, 200), (4, 199), (7, 199))
    ]


def page_faults(kept: bool, results) -> None:
    """How many pages the system maps while 16 MB are allocated and freed 20 times."""
    from regard.core.cpu import keep_freed_memory

    if kept:
        keep_freed_memory()
    counts = []
    for _ in range(21):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        several = [np.ones(2**21) for _ in range(3)]
        del several
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    results.put(sum(counts[1:]))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_a_training_process_keeps_the_memory_that_it_frees():
    context, faults = multiprocessing.get_context("spawn"), []
    for kept in (False, True):
        results = context.Queue()
        process = context.Process(target=page_faults, args=(kept, results))
        process.start()
        faults.append(results.get(timeout=120))
        process.join()
    assert faults[1] < faults[0] / 10
