"""What is divided over the processes of a run: the model's first weights, evaluations, and the hashing of checkpoints.
And checkpoints that are written while training goes on."""

import errno
import gc
import hashlib
import json
import math
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import chaos
import regard as rg
from forked import Forks, forks
from regard.models.registry import MODELS, build
from regard.training import Settings, Task, checkpoint_folders, storage, store, train
from regard.training.divided import dividing
from regard.training.initial import fill, filled_later, initial, without_memory
from regard.training.parallel import Objective, placed, spread
from regard.training.recipes import bert, classify, lm, recipe, translate, vision
from regard.training.recipes.started import started
from regard.training.runs import begin, reopen
from test_training import RECOMPUTED, Counting, losses, settings

WIDE = {"vocabulary_size": 512, "embedding_dim": 512, "num_layers": 8, "num_heads": 8}
"""A model of 101 MB, whose largest tensor has 4."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Forks]:
    with forks() as parent:
        yield parent


@pytest.fixture(autouse=True)
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are most of the time of a small run."""
    monkeypatch.setattr("regard.training.loop.write_curves", lambda *_: None)


def in_ranks(processes, count, call, folder):
    """Call a function of this file in each of `count` processes; returns what each returned."""
    code = f"sys.path.insert(0, {str(Path(__file__).parent)!r}); import json, test_ranks; from pathlib import Path\n"
    code += f"print('answer', json.dumps(test_ranks.{call.__name__}(Path({str(folder)!r}))), flush=True)"
    texts = processes.ranks(count, code, folder)
    return [json.loads(text.rpartition("answer ")[2]) for text in texts]


def digest(model):
    """A hash of all weights, gathered one after another."""
    total = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        total.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


# The first weights


@pytest.mark.parametrize("name", MODELS)
def test_a_model_built_without_memory_is_that_which_initialise_makes(name):
    config, _ = RECOMPUTED[name]
    torch.manual_seed(3)
    expected = build(config)
    torch.manual_seed(3)
    expected.initialise()
    model = initial(lambda: build(config), 3)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key


def test_what_a_mechanism_of_a_user_makes_is_kept():
    @dataclass(frozen=True, kw_only=True, eq=False)
    class Turned(rg.Kernel):
        feature_map: torch.nn.Module = torch.relu

        def for_layer(self, qk_length):
            made = torch.nn.Linear(qk_length, qk_length, bias=False)
            torch.nn.init.eye_(made.weight)
            return Turned(feature_map=torch.nn.Sequential(made, torch.nn.Softplus()))

    sizes = {"vocabulary_size": 9, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
    model = initial(lambda: rg.Decoder(rg.DecoderConfig(**sizes, mechanism=Turned())), 0)
    learned = [tensor for name, tensor in model.state_dict().items() if ".attend." in name]
    assert [tensor.tolist() for tensor in learned] == [torch.eye(4).tolist()]


def test_a_module_without_weights_or_a_way_to_make_them_is_refused():
    net = torch.nn.Linear(2, 3, device="meta")
    with pytest.raises(ValueError, match="model: expected weights, or a method `initialise` that draws them, got a Li"):
        fill(net, net, 0, torch.device("cpu"))


# Many processes


def small(folder):
    """Options of a small task of each recipe."""
    sizes = {"embedding_dim": 16, "num_heads": 2, "num_layers": 1}
    words = {**sizes, "data": f"{folder}/words.txt", "vocabulary_size": 300}
    return {
        "translate": translate.Options(**sizes, count=60, held_out=40, vocabulary_size=300, hidden_dim=32),
        "lm": lm.Options(**words, context_length=16),
        "bert": bert.Options(**words, context_length=16),
        "classify": classify.Options(**{**words, "data": f"{folder}/labels.tsv"}, context_length=16),
        "vision": vision.Options(**{**sizes, "num_layers": (1,)}, data=f"{folder}/images", patch_size=4),
    }


def ranked(folder):
    """In one of several processes: the first weights of every recipe's model, its evaluation and how many calls of the
    model it took; the bytes that a run and its resumption hash; the memory that a larger model takes at most."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data, sharded = folder / f"data-{rank}-of-{world}", world in (2, 3)
    lm.TOGETHER, translate.TOGETHER, bert.TOGETHER, classify.TOGETHER, vision.TESTED = 16, 8, 1, 1, 2
    chaos.write_data(data)
    answer = {"hashes": {}, "results": {}, "calls": {}}
    with placed("cpu", "fsdp" if sharded else "ddp") as place:
        for name, options in small(data).items():
            (data / name).mkdir()
            with filled_later(place):
                task = recipe(name).build(options, data / name, seed=0)
            assert without_memory(task.model) == sharded
            objective = Objective(task).eval()
            runner = spread(objective, place)
            fill(objective, task.model, 0, place.device)
            answer["hashes"][name] = digest(task.model)
            calls = []
            task.model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            with torch.no_grad(), dividing(place):
                answer["results"][name] = (runner if sharded else objective)(task.evaluate)
            answer["calls"][name] = len(calls)
        answer["hashed"] = hashed(folder / f"run-{world}", data, place)
        with filled_later(place):
            task.model = initial(lambda: rg.Decoder(rg.DecoderConfig(**WIDE)), 0)
        objective, before = Objective(task), peak(reset=True)
        spread(objective, place)
        fill(objective, task.model, 0, place.device)
        size = sum(parameter.nbytes for parameter in task.model.parameters())
        answer["memory"] = (peak() - before) / size
        before = anonymous()
        with filled_later(place):
            task.model = started(rg.Decoder, "a model that is gone", None, folder / "wide")
        answer["started"] = [(anonymous() - before) / size]
        objective = Objective(task)
        spread(objective, place)
        answer["started"].append((anonymous() - before) / size)
        answer["hashes"]["started"] = digest(task.model)
    return answer


def hashed(folder, data, place):
    """The bytes that this process hashes of checkpoints while a run saves one and is resumed, and that there are."""
    seen, digest_of, sha256 = [0], hashlib.file_digest, hashlib.sha256

    def file_digest(file, name):
        seen[0] += os.fstat(file.fileno()).st_size
        return digest_of(file, name)

    class Counted:
        def __init__(self, *words):
            self.inner = sha256(*words)

        def update(self, piece):
            seen[0] += len(piece)
            self.inner.update(piece)

        def hexdigest(self):
            return self.inner.hexdigest()

    counts = []
    for steps in (2, 4):
        options = small(data)["lm"]
        chosen = Settings(steps=steps, batch_size=8, save_every=2, evaluate_every=9, schedule="constant")
        if steps == 2:
            task = begin("lm", options, chosen, folder, place)
        else:
            task, chosen = reopen(folder, place, steps=steps)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_folders.hashlib, "file_digest", file_digest)
            patch.setattr(storage, "hashlib", SimpleNamespace(sha256=Counted))
            seen[0] = 0
            train(task, chosen, folder, place=place, watch=lambda report: None)
        counts.append(seen[0])
    path = folder / "checkpoints/step-00000004"
    return [*counts, sum(file.stat().st_size for file in path.glob("*.safetensors"))]


def anonymous():
    """The memory of this process, in bytes, that is no file's."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def peak(reset=False):
    """The most memory that this process has had, in bytes, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.fixture(scope="module")
def worlds(processes, tmp_path_factory):
    """What each of 1, 2, 3 and 4 processes did; 2 and 3 of them share the model."""
    folder = tmp_path_factory.mktemp("ranks")
    rg.save(initial(lambda: rg.Decoder(rg.DecoderConfig(**WIDE)), 1), folder / "wide/start")
    return {count: in_ranks(processes, count, ranked, folder) for count in (1, 2, 3, 4)}


def test_every_number_of_processes_begins_with_the_same_weights(worlds):
    (alone,) = worlds[1]
    for ranks in worlds.values():
        assert all(answer["hashes"] == alone["hashes"] for answer in ranks)


def test_no_process_ever_has_the_whole_of_a_sharded_model(worlds):
    """Its part, and while it draws two of the largest tensors."""
    for count in (2, 3):
        shares = [answer["memory"] for answer in worlds[count]]
        assert max(shares) < 1 / count + 0.25, shares


def test_a_model_that_training_starts_from_stays_in_its_file_until_each_process_copies_its_part(worlds):
    for count in (2, 3):
        for answer in worlds[count]:
            loaded, sharded = answer["started"]
            assert loaded < 0.1, loaded
            assert 0.6 / count < sharded < 1 / count + 0.25, sharded
    assert worlds[1][0]["started"][0] > 0.9, "a single process has a copy: the file may change"


def test_an_evaluation_is_bitwise_that_of_one_process(worlds):
    (alone,) = worlds[1]
    for count, ranks in worlds.items():
        assert all(answer["results"] == alone["results"] for answer in ranks), count
    for name, calls in alone["calls"].items():
        assert calls >= 3, name
        shares = [answer["calls"][name] for answer in worlds[4]]
        assert sum(shares) == calls, name
        assert max(shares) <= math.ceil(calls / 4) + (name == "translate"), (name, shares)


def test_each_process_hashes_its_own_part(worlds):
    """A save hashes each byte once; so does a resumption, and the save after it hashes the new checkpoint."""
    for count, ranks in worlds.items():
        saved, resumed = (sum(answer["hashed"][at] for answer in ranks) for at in (0, 1))
        whole = ranks[0]["hashed"][2]
        assert (saved, resumed) == (whole, 2 * whole), count
        assert max(answer["hashed"][1] for answer in ranks) < 2 * whole / count + 0.1 * whole, count


class Drawn(torch.nn.Sequential):
    """A model of a user's, which draws its weights when it is asked to."""

    def __init__(self):
        super().__init__(torch.nn.Linear(3, 8, device="meta"), torch.nn.ReLU(), torch.nn.Linear(8, 1, device="meta"))

    def initialise(self):
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)


class Sums(Task):
    name = "sums"

    def __init__(self, watched="loss"):
        self.model, self.watched = Drawn(), (watched, "least")
        self.x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))

    def sizes(self):
        return [1] * len(self.x)

    def batch(self, indices, epoch):
        return {"x": self.x[list(indices)]}

    def counts(self, batch):
        return {"square": len(batch["x"])}

    def totals(self, model, batch):
        x = batch["x"].to(next(model.parameters()).dtype)
        return {"square": (model(x) - x.sum(1, keepdim=True)).square().sum()}

    def evaluate(self, model):
        return {"loss": float(self.totals(model, {"x": self.x[:9]})["square"])}


OWN = {"steps": 6, "batch_size": 8, "save_every": 3, "evaluate_every": 3, "schedule": "constant"}


def own_model(folder):
    """In one of several processes, sharded and not: the losses of a user's model, and what is said of a wrong task."""
    answers, quiet = [], {"watch": lambda report: None}
    for strategy in ("fsdp", "ddp"):
        with placed("cpu", strategy) as place:
            chosen = {"place": place, **quiet}
            with pytest.raises(ValueError, match="watched") as error:
                train(Sums("accuracy"), Settings(**OWN), folder / f"wrong-{strategy}", **chosen)
            train(Sums(), Settings(**OWN, precision="float64"), folder / strategy, **chosen)
            train(Counting(), settings(steps=2, precision="bfloat16"), folder / f"halves-{strategy}", **chosen)
        answers.append([losses(folder / strategy), str(error.value), (folder / f"wrong-{strategy}").exists()])
    return answers


def test_a_model_of_a_users_may_draw_its_weights_when_it_is_sharded(processes, tmp_path):
    train(Sums(), Settings(**OWN, precision="float64"), tmp_path / "alone", watch=lambda report: None)
    for answers in in_ranks(processes, 2, own_model, tmp_path):
        for values, error, left in answers:
            assert values == pytest.approx(losses(tmp_path / "alone"), abs=1e-10)
            assert error == "watched: expected a result of evaluate (loss), got 'accuracy'"
            assert not left, "a start that fails leaves nothing"


def test_a_buffer_without_values_is_refused():
    net = torch.nn.BatchNorm1d(2, device="meta")
    net.initialise = net.reset_parameters
    with pytest.raises(ValueError, match="model: expected buffers with values, got 'running_mean' on the meta device"):
        fill(net, net, 0, torch.device("cpu"))


# Checkpoints while training goes on


@pytest.fixture
def slow(monkeypatch):
    """Checkpoints whose parts are written once `go` is set."""
    go, write = threading.Event(), storage._write_part

    def waiting(*words):
        assert go.wait(60), "the checkpoint was waited for"
        return write(*words)

    monkeypatch.setattr(storage, "_write_part", waiting)
    return go


def test_training_goes_on_while_a_checkpoint_is_written(slow, tmp_path):
    straight, behind, seen = Counting(dropout=0.2), Counting(dropout=0.2), []

    def watch(report):
        seen.append((report.step, sorted(path.name for path in (tmp_path / "behind/checkpoints").glob("step-*"))))
        if report.kind == "step" and report.step == 7:
            slow.set()

    train(behind, settings(), tmp_path / "behind", watch=watch)
    assert (7, []) in seen, "step 4 is not on the disk yet"
    assert sorted(os.listdir(tmp_path / "behind/checkpoints")) == ["step-00000008", "step-00000012"]
    train(straight, settings(), tmp_path / "straight")
    assert losses(tmp_path / "behind") == losses(tmp_path / "straight")
    for step in (8, 12):
        first, second = (tmp_path / name / f"checkpoints/step-{step:08}" for name in ("behind", "straight"))
        parts = [next(path.glob("*.safetensors")).read_bytes() for path in (first, second)]
        assert parts[0] == parts[1]


def test_what_is_saved_is_the_state_of_its_step(slow, tmp_path):
    weight = torch.ones(3)
    with store.Saver(tmp_path, keep=2) as saver:
        for step in (1, 2):
            saver.save(step, {"weight": weight}, {"step": step})
            weight += 1
            slow.set()
    for step in (1, 2):
        loaded = torch.zeros(3)
        assert store.load(tmp_path / f"step-{step:08}", {"weight": loaded}) == {"step": step}
        assert loaded.tolist() == [step] * 3


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_error(tmp_path, monkeypatch):
    write, steps = storage._write_part, []

    def full(path, *words):
        if "step-00000008" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *words)

    monkeypatch.setattr(storage, "_write_part", full)
    with pytest.raises(OSError, match="checkpoint of step 8: No space left on device") as error:
        train(Counting(), settings(steps=500), tmp_path, watch=lambda report: steps.append(report.step))
    assert error.value.filename == str(tmp_path / "checkpoints")
    assert steps[-1] < 500, "it does not train on in vain"
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004"]
    monkeypatch.undo()
    assert train(Counting(), settings(), tmp_path, watch=lambda _: None).finished


def test_an_error_of_training_waits_for_the_checkpoint(slow, tmp_path):
    class Broken(Counting):
        def batch(self, indices, epoch):
            if self.step == 5:
                slow.set()
                raise ValueError("data: expected an example")
            return super().batch(indices, epoch)

    task = Broken()
    task.step = 0
    with pytest.raises(ValueError, match="data: expected an example"):
        train(task, settings(), tmp_path, watch=lambda report: setattr(task, "step", report.step))
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000004"]
