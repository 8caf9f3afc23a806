"""What a server of the explorer keeps: models in memory, snapshots by name; and what it computes from them.

Every computation gets `check`, which raises as soon as nobody waits for its answer, and `emit`, which sends a frame.
"""

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import RLock
from typing import Any

import torch
from torch import nn

from regard.explorer.catalog import catalog, check_name, load_model
from regard.explorer.changes import HeadChange, changed, with_windows
from regard.explorer.costs import cost_card
from regard.explorer.experiments import generate_steps, silence_heads
from regard.explorer.frames import frame, tensor_bytes
from regard.explorer.layers import no_check, products, scale_of
from regard.explorer.limits import MOST_BYTES, MOST_MODELS, check_size
from regard.explorer.pictures import picture_by_name
from regard.explorer.requests import RunRequest
from regard.explorer.snapshot import Snapshot, run_frames, take
from regard.explorer.subject import Input, Subject, subject_of, written
from regard.explorer.twin import random_twin
from regard.models.base import GenerativeModel

Emit = Callable[[bytes], None]
Check = Callable[[], None]


class Session:
    """The models and snapshots of one server. Its methods may be called from several threads; models run in one.

    >>> session = Session()
    >>> from regard.explorer.requests import run_request
    >>> frames = []
    >>> session.run(run_request({"model": "translator", "input": {"source": "Le chat dort."}}), frames.append)
    >>> len(frames), [snapshot.text for snapshot in session.snapshots.values()]
    (21, ['The cat sleeps.'])
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module] | None = None,
        mechanism: str | None = None,
        *,
        tokenizers: Mapping[str, Any] | None = None,
        folders: Sequence[str] = (),
        any_path: bool = True,
    ) -> None:
        """`models` are at hand by their names, with `tokenizers` where they have none. `mechanism` is that of
        the models that are loaded by name. Without `any_path`, only models of the catalog with these
        folders are."""
        self.models: OrderedDict[str, nn.Module] = OrderedDict()
        self.shown_models = {name: model.eval() for name, model in (models or {}).items()}
        self.mechanism, self.any_path, self.tokenizers = mechanism, any_path, tokenizers or {}
        self.snapshots: OrderedDict[str, Snapshot] = OrderedDict()
        self.subjects: OrderedDict[tuple[str, Input], Subject] = OrderedDict()
        self.folders = tuple(folders)
        self._twins: dict[str, nn.Module] = {}
        self._numbers = itertools.count(1)
        self._lock = RLock()

    def model(self, name: str) -> nn.Module:
        """A model by name; the last few stay in memory."""
        if name in self.shown_models:
            return self.shown_models[name]
        if name not in self.models:
            if not self.any_path and name not in {entry.name for entry in catalog(self.folders)}:
                raise ValueError(f"model: expected one of the menu, got {name!r:.80}")
            check_name(name)
            self.models[name] = load_model(name, self.mechanism)
            while len(self.models) > MOST_MODELS:
                dropped, _ = self.models.popitem(last=False)
                self._twins.pop(dropped, None)
                for key in [key for key in self.subjects if key[0] == dropped]:
                    del self.subjects[key]
        self.models.move_to_end(name)
        return self.models[name]

    def snapshot(self, name: object) -> Snapshot:
        """A snapshot by name; ValueError if it is gone."""
        with self._lock:
            if not isinstance(name, str) or name not in self.snapshots:
                raise ValueError(f"run: expected a recent run, got {name!r:.40}; run it again")
            self.snapshots.move_to_end(name)
            return self.snapshots[name]

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a snapshot, and drop those that were not asked for the longest, beyond the memory for all."""
        with self._lock:
            self.snapshots[snapshot.name] = snapshot
            while len(self.snapshots) > 2 and sum(kept.nbytes for kept in self.snapshots.values()) > MOST_BYTES:
                self.snapshots.popitem(last=False)

    def subject(self, name: str, chosen: Input | str) -> Subject:
        """A model with an input; the last few are kept, since a translator writes its target first."""
        model = self.model(name)
        read = picture_by_name(chosen) if isinstance(chosen, str) else chosen
        key = (name, read)
        if key not in self.subjects:
            self.subjects[key] = check_size(subject_of(name, model, read, self.tokenizers.get(name)))
            while len(self.subjects) > 16:
                self.subjects.popitem(last=False)
        self.subjects.move_to_end(key)
        return self.subjects[key]

    def run(self, request: RunRequest, emit: Emit, check: Check = no_check) -> None:
        """A pass, changed or not: its frames."""
        more: dict[str, Any] = {}
        if request.origin is None:
            subject = self.subject(request.model, request.chosen)
        else:
            before = self.snapshot(request.origin)
            subject, more = before.origin, {"generated": before.generated}
        self.show(self.taken(subject, request.changes, twin=request.twin, check=check, **more), emit, check)

    def show(self, snapshot: Snapshot, emit: Emit, check: Check = no_check) -> None:
        """Keep a snapshot, and emit its frames."""
        self.keep(snapshot)
        for content in run_frames(snapshot, check):
            emit(content)

    def taken(
        self,
        subject: Subject,
        changes: Sequence[HeadChange] = (),
        *,
        twin: bool = False,
        check: Check = no_check,
        **more: Any,
    ) -> Snapshot:
        """A snapshot of a subject, compared with the unchanged model if it is changed or random."""
        base, position = None, None
        if changes or twin:
            unchanged = self._base(subject, check)
            base, position = unchanged.output, unchanged.position
            views = unchanged.layers
            changes = with_windows(changes, [(v.traced.index, v.traced.kind, v.mechanism) for v in views])
        run = replace(subject, model=self._twin(subject)) if twin else subject
        text = _text(run, changes)
        return take(
            str(next(self._numbers)),
            run,
            changes,
            origin=subject,
            base=base,
            position=position,
            check=check,
            text=text,
            twin=twin,
            **more,
        )

    def _base(self, subject: Subject, check: Check) -> Snapshot:
        """A pass of the unchanged model: a recent one, or a new one."""
        with self._lock:
            for kept in self.snapshots.values():
                if kept.subject is subject and not kept.changes:
                    return kept
        return take("", subject, check=check)

    def _twin(self, subject: Subject) -> nn.Module:
        if subject.name not in self._twins:
            self._twins = {subject.name: random_twin(subject.model)}
        return self._twins[subject.name]

    def effects(self, name: object, emit: Emit, check: Check = no_check) -> None:
        """Every head of a snapshot silenced once."""
        silence_heads(self.snapshot(name), emit, check)

    def generate(self, name: object, steps: int, prefix: Sequence[int], emit: Emit, check: Check = no_check) -> None:
        """New tokens after a snapshot's prompt, step by step, and then a pass over all of them."""
        before = self.snapshot(name)
        subject, first = generate_steps(before, steps, prefix, emit, check)
        snapshot = self.taken(subject, before.changes, twin=before.twin, check=check, generated=first)
        self.show(snapshot, emit, check)

    def cost(self, name: object, layer: int, head: int = 0) -> dict[str, Any]:
        """What a head costs over the length."""
        snapshot = self.snapshot(name)
        view = snapshot.layer(layer)
        return cost_card(view, snapshot.mechanism(view, snapshot.head_number(view, head)))

    def rollout(self, name: object) -> bytes:
        """Attention rollout through the model, or through its encoder if it has one."""
        recorded = self.snapshot(name).trace
        two_sided = recorded.source_tokens is not None
        flow = recorded.select(kind="self", name="encoder" if two_sided else None).rollout()[0]
        header = {"type": "rollout", "rows": flow.shape[0], "columns": flow.shape[1]}
        return frame(header, tensor_bytes(flow.float()))

    def head(self, name: object, layer: int, head: int | str, window: int | None = None) -> bytes:
        """The exact weights of a head, and which pairs are visible."""
        weights, visible = self.snapshot(name).head(layer, head, window)
        header = {"type": "head", "rows": weights.shape[0], "columns": weights.shape[1]}
        return frame(header, tensor_bytes(weights) + tensor_bytes(visible.to(torch.uint8)))

    def scores(self, name: object, layer: int, head: int, window: int | None = None) -> bytes:
        """The products of queries and keys of a head, its bias if it has one, and which pairs are visible."""
        snapshot = self.snapshot(name)
        view = snapshot.layer(layer, window)
        place = snapshot.head_number(view, head)
        if not view.traced.by_pairs:
            raise ValueError(f"layer: expected attention between tokens, got layer {layer}, between channels")
        _, visible = snapshot.head(layer, place, window)
        mechanism, bias = view.mechanism, view.head_bias(place)
        scale = scale_of(mechanism, view.query(place).shape[-1])
        header = {
            "type": "scores",
            "rows": visible.shape[0],
            "columns": visible.shape[1],
            "scale": "inf" if scale == math.inf else scale,
            "softcap": getattr(mechanism, "softcap", None),
            "has_bias": bias is not None,
        }
        added = b"" if bias is None else tensor_bytes(bias.float())
        return frame(header, tensor_bytes(products(view, place)) + added + tensor_bytes(visible.to(torch.uint8)))


def _text(subject: Subject, changes: Sequence[HeadChange]) -> str | None:
    """What an encoder-decoder of ours writes for its source, with the changes."""
    model = subject.model
    if not isinstance(model, GenerativeModel) or not model.reads_source or model.tokenizer is None:
        return None
    assert subject.sources is not None
    if any(change.mean for change in changes):  # a mean over tokens is not defined token by token
        return None
    with changed(model, changes):
        return model.tokenizer.decode(written(model, subject.sources.ids))
