"""The training loop: batches, steps, evaluations, checkpoints; the same on one process and on many.

A run that is killed resumes bitwise as if nothing had happened. For this a checkpoint has the weights, the optimizer's
state, the states of random generators, and the position in the order of examples. The rest follows from settings and
data.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.checkpoints.errors import CheckpointError
from regard.core.cpu import keep_freed_memory
from regard.core.files import write_text
from regard.core.masks.guard import all_finite, finite
from regard.models.layers.lora import trained_tensors
from regard.training import run_file, store
from regard.training.ahead import Course, Step, Turn, steps
from regard.training.average import Average
from regard.training.checked import check_task
from regard.training.checkpoint_folders import listed
from regard.training.divided import dividing
from regard.training.evaluation import MODEL, best_weights, better
from regard.training.initial import fill, without_memory
from regard.training.lock import writing
from regard.training.metrics import Logger, Metrics, check_loggers, with_nan, without_nan
from regard.training.optimizer import adamw, clip, memory, rate
from regard.training.parallel import Measure, Objective, Place, placed, resharded, spread, unsynchronised
from regard.training.progress import progress
from regard.training.records import environment, write_card, write_curves, write_model
from regard.training.settings import Settings
from regard.training.signals import listening
from regard.training.task import Batch, Task

QUEUED = 20
"""With several GPUs, how many steps may be pending before the loop waits for their losses."""


@dataclass(frozen=True)
class _Pending:
    """The results of a step that are not logged yet: the loop does not wait for a GPU after every step."""

    step: int
    counts: dict[str, float]
    tokens: int
    values: Tensor
    """The total of each loss term, and the norm of the gradient."""
    event: torch.cuda.Event | None
    """Reached when the values have been copied to the CPU."""


@dataclass(frozen=True)
class Report:
    """The state of a run.

    >>> from regard.training import Report
    >>> Report(step=10, steps=10, results={"loss": 0.5}).finished
    True
    """

    step: int
    steps: int
    results: dict[str, float] = field(default_factory=dict)
    """The results of the best evaluation, whose model is in the run's folder."""
    test: dict[str, float] = field(default_factory=dict)
    """The results of that model on test examples, measured once, at the end of the run: no choice depends on them."""
    loss: float = math.nan
    seconds: float = 0.0
    """Since the run began, evaluations and checkpoints included, pauses between a kill and a resume excluded."""
    tokens_per_second: float = 0.0
    samples: tuple[str, ...] = ()
    """Lines to show, after an evaluation."""
    message: str = ""
    kind: Literal["step", "evaluated", "message", "end"] = "step"
    """What has just happened."""
    interrupted: bool = False
    early: bool = False
    """Whether it stopped early because results no longer improved."""

    @property
    def finished(self) -> bool:
        return self.early or self.step >= self.steps


Watch = Callable[[Report], object]


def train(
    task: Task,
    settings: Settings,
    folder: str | Path,
    *,
    place: Place | None = None,
    watch: Watch | None = None,
    loggers: Sequence[Logger] = (),
    restart: bool = False,
) -> Report:
    """Train a task in a folder, from the newest valid checkpoint there if there is one. Returns the last report.

    The folder gets run.json, metrics.jsonl, tensorboard/, checkpoints/, model/ (the best so far; `rg.load(folder)`
    opens it), curves.png and README.md. It has one writer, and goes on with the same task only: another model, other
    data and settings that cannot change are refused. If none of its checkpoints can be loaded, that is an error;
    `restart=True` begins again, and keeps what there was in the folder former-1.

    `watch` is called after each step and each evaluation; without it there is a progress bar in a terminal, a line that
    is updated in a notebook, and lines in a log. `loggers` get the numbers of each step and of each evaluation, besides
    metrics.jsonl. Under torchrun all processes call this, and train one model together; rank 0 watches and logs.

    >>> import tempfile, regard as rg
    >>> from regard.training import Settings, train
    >>> from regard.training.recipes import translate
    >>> options = translate.Options(count=200, embedding_dim=16, num_heads=2, num_layers=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     task = translate.build(options, Path(folder), seed=0)
    ...     train(task, Settings(steps=2, batch_size=8), Path(folder) / "run").finished
    True
    """
    with ExitStack() as stack:
        check_loggers(settings)
        here = place or stack.enter_context(_place(task.model))
        shown: AbstractContextManager[Watch] = nullcontext(watch or (lambda _: None))
        if watch is None and here.first:
            shown = progress(task.name, settings.steps, log=True)
        target = Path(folder)
        stack.enter_context(_made(target, here))
        stack.enter_context(writing(target, here))
        watching = stack.enter_context(shown)
        return _Run(task, settings, target, here, watching, loggers, restart).go()


@contextmanager
def _place(model: nn.Module) -> Iterator[Place]:
    """The place of this process in a process group, or where torchrun put it; otherwise alone, where the model is."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    device = next(devices, torch.device("cpu"))
    if dist.is_available() and dist.is_initialized():
        yield Place(dist.get_rank(), dist.get_world_size(), device)
    elif "RANK" in os.environ:
        with placed(device.type) as place:
            yield place
    else:
        yield Place(0, 1, device)


@contextmanager
def _made(folder: Path, place: Place) -> Iterator[None]:
    """Make the folder of a run. If nothing was written into it, because the run could not begin, it is removed."""
    place.wait()
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()] if place.first else []
    store.together(lambda: folder.mkdir(parents=True, exist_ok=True) if place.first else None)
    try:
        yield
    finally:
        for parent in missing:
            with suppress(OSError):  # not empty
                parent.rmdir()


class _Run:
    def __init__(
        self,
        task: Task,
        settings: Settings,
        folder: Path,
        place: Place,
        watch: Watch,
        loggers: Sequence[Logger],
        restart: bool,
    ) -> None:
        self.task, self.settings, self.folder, self.place, self.watch = task, settings, folder, place, watch
        self.loggers = loggers
        self.record = run_file.read(folder)
        begins = not self.record
        self._confirm(restart)
        model, sharded = task.model.train(), place.sharded and place.world > 1
        drawn, dtype = without_memory(model), torch.float64 if settings.precision == "float64" else None
        if not sharded:
            fill(model, model, settings.seed, torch.device("cpu"))
            model.to(device=place.device, dtype=dtype)
        if settings.recompute:
            _recompute(model)
        self.objective = Objective(task)
        if settings.compile:
            # On an H200 the loss over 50,000 tokens takes 2.4 ms with inductor's single-pass softmax, 1.8 ms with two.
            self.objective.compile(options={"online_softmax": False} if place.device.type == "cuda" else None)
        self.runner = spread(self.objective, place, settings.precision)
        self.evaluated = self.runner if place.sharded else self.objective  # what evaluations call
        if sharded:  # its parts are on the device, or without memory
            fill(self.objective, model, settings.seed, place.device)
            self.objective.to(dtype=dtype)
        torch.manual_seed(settings.seed * 65537 + place.rank + 1)
        self.optimizer = adamw(self.objective, settings)
        self.average = None if settings.ema is None else Average(self.objective.model, settings.ema)
        self.sizes = task.sizes()
        self.course = Course(self.sizes, settings)
        self.turn = Turn([], 0, 0)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.best: dict[str, float] | None = None
        self.tested: dict[str, float] = {}
        self.stale = 0
        self.pending: deque[_Pending] = deque()
        self.loss = math.nan
        self.resumed = self._resume()
        if begins or (drawn and not self.resumed):
            with self._precision(), self._eager(), resharded(self.runner):
                check_task(task, self.evaluated)
        store.together(self._begin)

    def _confirm(self, restart: bool) -> None:
        """Refuse another task, model, data and settings than those that the folder's run began with; set the run aside
        to restart it."""

        def confirm() -> None:
            if self.place.first:
                self.record = run_file.confirmed(self.record, self.task, self.settings, self.folder)
                if restart:
                    from regard.training.runs import set_aside

                    set_aside(self.folder)

        store.together(confirm)

    def _begin(self) -> None:
        """Write what the run is, and open its logs."""
        self.metrics: Metrics | None = None
        if self.place.first:
            run_file.write(self.folder, run_file.changed(self.record, self.settings, self.step))
            if not (self.folder / "environment.json").exists():
                write_text(self.folder / "environment.json", json.dumps(environment(self.place), indent=1) + "\n")
            self.metrics = Metrics(self.folder, self.step, self.loggers, wandb=self.settings.wandb)

    def go(self) -> Report:
        try:
            with store.Saver(self.folder / "checkpoints", self.settings.keep) as self.saver:
                interrupted = self._loop()
            if not interrupted:
                self._test()
        finally:
            if self.metrics is not None:
                self.metrics.close()
        if self.place.first:
            write_curves(self.task, self.folder)
            write_card(self.task, self.settings, self.folder, self._report())
        return self._report(kind="end", interrupted=interrupted)

    def _loop(self) -> bool:
        """Run steps until the end, or until a signal asks to stop; returns whether one did."""
        keep_freed_memory()
        if self.resumed:
            self.watch(self._report(kind="message", message=self.resumed))
        settings = self.settings
        padding = self.course.batches.padding
        self.watch(self._report(kind="message", message=f"padding is {padding:.1%} of an epoch's tokens"))
        began, asked = time.perf_counter() - self.seconds, False
        with listening() as signals, closing(steps(self.task, self.course, self.place, settings)) as ahead:
            while self.step < settings.steps and not asked and not self._tired():
                asked = self._advance(next(ahead), stop=signals.asked is not None)
                self.seconds = time.perf_counter() - began
                due = self.step % settings.between_evaluations == 0 or self.step == settings.steps
                save = asked or self.step == settings.steps or self.step % settings.between_checkpoints == 0
                self._settle(wait=due or save)
                if due:
                    self._evaluate()
                if save or self._tired():
                    self._save()
                self.watch(self._report())
        return asked and self.step < settings.steps

    def _advance(self, step: Step, stop: bool) -> bool:
        """Run one step. Returns whether any process was asked to stop."""
        settings, place = self.settings, self.place
        flags = float(stop), float(self.saver.failed)
        summed = place.added(torch.tensor([*step.counts.values(), *flags], dtype=torch.float64)).tolist()
        if summed[-1]:
            self.saver.wait()
        counts = {name: max(1.0, total) for name, total in zip(step.counts, summed, strict=False)}
        self.step += 1
        terms = torch.zeros(len(counts), dtype=torch.float64, device=place.device)
        for at, (weight, batch) in enumerate(zip(step.weights, step.batches, strict=True)):
            with unsynchronised(self.runner, at == len(step.batches) - 1):
                with self._precision(), all_finite():
                    totals = self.runner(_moved(batch, place.device))
                # DDP and FSDP average gradients over processes; the loss is multiplied to get their sum.
                loss = sum(totals[name] / count for name, count in counts.items()) * place.world * weight
                loss.backward()
            if weight:
                terms += torch.stack([totals[name].detach().double() for name in counts])
        for group in self.optimizer.param_groups:
            group["lr"] = rate(settings, self.step)
        norm = clip(self.optimizer, self.objective.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.step)
        self.turn = step.turn
        size = sum(int(self.sizes[index]) for index in step.turn.indices)
        self.tokens += size
        values = torch.cat([place.added(terms), norm.detach().double()[None]]).to("cpu", non_blocking=True)
        event = torch.cuda.current_stream(place.device).record_event() if place.device.type == "cuda" else None
        self.pending.append(_Pending(self.step, counts, size, values, event))
        return summed[-2] > 0

    def _eager(self) -> Any:
        return torch.compiler.set_stance("force_eager") if self.settings.compile else nullcontext()

    def _precision(self) -> Any:
        wanted = self.settings.precision == "bfloat16"
        return torch.autocast(self.place.device.type, torch.bfloat16) if wanted else nullcontext()

    def _settle(self, wait: bool) -> None:
        """Log the losses that are computed, or with `wait` all of them."""
        while self.pending and (wait or self._readable(self.pending[0])):
            done = self.pending.popleft()
            if done.event is not None:
                done.event.synchronize()
            *totals, norm = done.values.tolist()
            terms = {name: total / count for (name, count), total in zip(done.counts.items(), totals, strict=True)}
            self.loss = sum(terms.values())
            values = {
                "loss": self.loss, "norm": norm, "rate": rate(self.settings, done.step), "tokens": done.tokens
            }  # fmt: skip
            if len(terms) > 1:
                values |= {f"{name} loss": term for name, term in terms.items()}
            if self.metrics is not None:
                self.metrics.log(done.step, {**values, "seconds": round(self.seconds, 3)}, "training")
            if not math.isfinite(self.loss) or not math.isfinite(norm):
                self.saver.wait()
                last = next((path for path, whole in listed(self.folder / "checkpoints") if whole), None)
                raise ValueError(
                    f"loss: expected a finite number, got {self.loss} (gradient {norm}) at step {done.step}; try a "
                    f"lower learning rate. The last checkpoint is {'none' if last is None else last.name}"
                )

    def _readable(self, pending: _Pending) -> bool:
        if pending.event is None:
            return True
        # All processes must raise for a loss that is not finite at the same step, although some GPUs are ahead.
        return pending.event.query() if self.place.world == 1 else len(self.pending) > QUEUED

    def _evaluate(self) -> None:
        with nullcontext() if self.average is None else self.average.used():
            self._judge()

    def _judge(self) -> None:
        """Evaluate the weights as they are, and keep the model if it is the best so far."""
        results = self._measured(self.task.evaluate)
        name, way = self.task.watched
        best = self.best is None or better(self.best[name], results[name], way)
        self.stale = 0 if best else self.stale + 1
        if best:
            self.best = dict(results)
            store.together(lambda: write_model(self.objective, self.folder / MODEL, self.place))
        self.objective.eval()
        lines = tuple(self.task.samples(self.task.model)) if self._speaks() else ()
        self.objective.train()
        if self.metrics is not None:
            self.metrics.log(self.step, results, "evaluation")
        self.watch(self._report(kind="evaluated", results=results, samples=lines))

    def _test(self) -> None:
        """Measure the best model on the test examples."""
        if self.best is None or not (self.folder / MODEL).is_dir():
            return
        with best_weights(self.objective.model, self.folder):
            self.tested = self._measured(self.task.test)
        if self.tested:
            if self.metrics is not None:
                self.metrics.log(self.step, self.tested, "test")
                self.metrics.flush()
            words = ", ".join(f"{name} {value:.4g}" for name, value in self.tested.items())
            self.watch(self._report(kind="message", message=f"test of the best model: {words}"))

    def _measured(self, measure: Measure) -> dict[str, float]:
        self.objective.eval()
        with torch.no_grad(), self._precision(), self._eager(), resharded(self.runner), dividing(self.place):
            results: dict[str, float] = self.evaluated(measure)
        self.objective.train()
        return store.together(lambda: results)[0]  # all processes choose the same model

    def _speaks(self) -> bool:
        return self.place.first and not self.place.sharded

    def _tired(self) -> bool:
        return self.settings.patience is not None and self.stale >= self.settings.patience

    def _save(self) -> None:
        if self.metrics is not None:
            self.metrics.flush()
        note = {
            "step": self.step,
            "epoch": self.turn.epoch,
            "batch": self.turn.batch,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "best": without_nan(self.best),
            "stale": self.stale,
            "world": self.place.world,
        }
        self.saver.save(self.step, {**self._tensors(), **self._random()}, note)

    def _tensors(self) -> dict[str, Tensor]:
        model = {f"model.{name}": tensor for name, tensor in trained_tensors(self.objective.model).items()}
        if self.average is not None:
            model |= {f"average.{name}": tensor for name, tensor in self.average.tensors.items()}
        return model | {f"optimizer.{name}": tensor for name, tensor in memory(self.objective, self.optimizer).items()}

    def _random(self) -> dict[str, Tensor]:
        states = {f"random.cpu.{self.place.rank}": torch.get_rng_state()}
        if self.place.device.type == "cuda":
            states[f"random.cuda.{self.place.rank}"] = torch.cuda.get_rng_state(self.place.device)
        return states

    def _resume(self) -> str:
        """Load the newest valid checkpoint. Returns a message about it."""
        try:
            path, damaged = store.newest(self.folder / "checkpoints")
        except CheckpointError as error:
            again = f"regard train resume {self.folder} --restart, or train(…, restart=True)"
            raise CheckpointError(f"{error}; to begin again, and keep all of this: {again}") from None
        if path is None:
            return " ".join(damaged)
        tensors, random = self._tensors(), self._random()
        note = store.read_note(path)
        alike = note["world"] == self.place.world
        store.load(path, {**tensors, **(random if alike else {})}, sound=True)
        if alike:
            torch.set_rng_state(random[f"random.cpu.{self.place.rank}"])
            if self.place.device.type == "cuda":
                torch.cuda.set_rng_state(random[f"random.cuda.{self.place.rank}"], self.place.device)
        self.step, self.tokens, self.seconds = note["step"], note["tokens"], note["seconds"]
        self.best, self.stale = None if note["best"] is None else with_nan(note["best"]), note["stale"]
        self.course.move(note["epoch"], note["batch"])
        self.turn = Turn([], note["epoch"], note["batch"])
        return " ".join([*damaged, f"resumed after step {self.step}"])

    def _report(self, **changes: Any) -> Report:
        passed = max(self.seconds, 1e-9)
        values: dict[str, Any] = {
            "step": self.step,
            "steps": self.settings.steps,
            "results": self.best or {},
            "test": self.tested,
            "loss": self.loss,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / passed,
            "early": self._tired(),
        }
        return Report(**{**values, **changes})


def _moved(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def _recompute(model: nn.Module) -> None:
    """Recompute the activations of the model's blocks in the backward pass instead of storing them."""
    blocks: Any = getattr(model, "blocks", ())
    if not blocks:
        raise ValueError(f"recompute: expected a model with repeated blocks, got {type(model).__name__} without any")
    for block in blocks:
        block.forward = _again(block.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The backward pass runs outside of the forward pass's `all_finite`, and on a GPU in another thread.
        policy = all_finite if finite() else nullcontext
        return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), policy()), **kwargs)

    return run
