"""Collects a trace while a model runs.

Attention modules are numbered in the order in which the model lists them, which is the order they run in; a module that
runs several times in one pass (ALBERT) gets a new number each time. Passes that continue each other through a KV cache
are joined into one layer with more rows; a pass that starts a new sequence replaces what was recorded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.inference.tracing.definition import Definition
from regard.inference.tracing.predictions import PredictedRows, Spelling, likeliest
from regard.inference.tracing.record import KEEP, Kind, Trace, TracedLayer


@dataclass(frozen=True)
class Chosen:
    """Which layers, heads and rows to record (None is all), and which tensors."""

    layers: frozenset[int] | None
    heads: tuple[int, ...] | None
    rows: tuple[int, ...] | None
    keep: frozenset[str]

    def these_heads(self, count: int) -> list[int]:
        """The chosen heads among `count`, counted from 0."""
        if self.heads is None:
            return list(range(count))
        if wrong := [head for head in self.heads if not -count <= head < count]:
            raise ValueError(f"heads: expected whole numbers from {-count} to {count - 1}, got {wrong[0]}")
        return [head % count for head in self.heads]

    def these_rows(self, start: int, count: int) -> tuple[list[int], set[int]]:
        """The chosen rows among `count` from position `start` on, counted from 0, and which choices they satisfy."""
        if self.rows is None:
            return list(range(count)), set()
        places = {row: row + count if row < 0 else row - start for row in self.rows}
        answered = {row for row, place in places.items() if 0 <= place < count}
        return list(dict.fromkeys(places[row] for row in self.rows if row in answered)), answered


@dataclass(frozen=True)
class Map:
    """What the tokens of a picture are: positions of a map, all of them or in windows."""

    grid: tuple[int, int]
    windows: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Met:
    """One run of attention, as an adapter reports it. Costly tensors are functions of the wanted rows and heads."""

    kind: Kind
    mechanism: str
    q: Tensor
    k: Tensor
    v: Tensor
    weigh: Callable[[list[int] | None, list[int] | None], Tensor]
    score: Callable[[list[int] | None, list[int] | None], Tensor | None]
    see: Callable[[list[int] | None, list[int] | None], Tensor | None]
    real: Tensor | None = None
    causal: bool = False
    by_pairs: bool = True
    hidden_score: float = -torch.inf
    definition: Definition
    outputs: Tensor
    """(B, H, T, V)."""
    project: Callable[[list[int] | None], Tensor | None]
    """The columns (H, E, V) of W_o for the wanted heads."""
    map: Map | None = None
    """What a picture's tokens are; None for text."""


@dataclass(frozen=True, eq=False)
class _Piece:
    """The rows of one run, and the positions of its keys among all keys."""

    columns: tuple[int, int]
    rows: tuple[int, ...]
    tensors: dict[str, Tensor]
    visible: Tensor | None
    real: Tensor | None
    causal: bool


@dataclass(eq=False)
class Gathered:
    """A layer while the model runs: the pieces of consecutive passes."""

    index: int
    name: str
    kind: Kind
    mechanism: str
    by_pairs: bool
    hidden_score: float
    heads: tuple[int, ...]
    size: tuple[int, int]
    """Sequences and heads."""
    device: torch.device
    definition: Definition
    project: Callable[[list[int] | None], Tensor | None] | None
    """None unless the heads' outputs are kept."""
    map: Map | None = None
    pieces: list[_Piece] = field(default_factory=list)
    keys: int = 0
    queries: int = 0
    joined: TracedLayer | None = None

    def takes(self, met: Met) -> bool:
        """Whether a run can continue where the last one ended."""
        if (met.kind, tuple(met.q.shape[:2])) != (self.kind, self.size):
            return False
        keys = met.k.shape[2]
        return keys <= self.keys + met.q.shape[2] if met.kind == "self" else keys == self.keys

    def layer(self) -> TracedLayer:
        """All pieces as one layer."""
        if self.joined is None:
            tensors: dict[str, Any] = {
                name: self._joined(name) for name in KEEP if any(name in p.tensors for p in self.pieces)
            }
            tensors |= {"visible": self._visible(), "real": self._real()}
            if self.map is not None and self.map.windows is not None:
                tensors = {name: _by_window(tensor, self.map.windows) for name, tensor in tensors.items()}
            projection = None if self.project is None else self.project(list(self.heads))
            self.joined = TracedLayer(
                index=self.index,
                name=self.name,
                kind=self.kind,
                mechanism=self.mechanism,
                heads=self.heads,
                rows=tuple(row for piece in self.pieces for row in piece.rows),
                causal=all(piece.causal for piece in self.pieces),
                by_pairs=self.by_pairs,
                definition=self.definition,
                projection=projection,
                grid=None if self.map is None else self.map.grid,
                windows=None if self.map is None else self.map.windows,
                **tensors,
            )
        return self.joined

    def _joined(self, name: str) -> Tensor:
        parts = [(piece.columns, piece.tensors[name]) for piece in self.pieces if name in piece.tensors]
        if name in ("weights", "scores") and self.by_pairs:
            empty = 0.0 if name == "weights" else self.hidden_score
            parts = [(columns, _spread(part, columns, self.keys, empty)) for columns, part in parts]
        return parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts], dim=2)

    def _visible(self) -> Tensor | None:
        seen = [piece for piece in self.pieces if piece.rows]
        if len(seen) == 1 and seen[0].columns == (0, self.keys):
            return seen[0].visible
        if all(piece.visible is None and piece.columns == (0, self.keys) for piece in seen):
            return None
        parts = []
        for piece in seen:
            size = (len(piece.rows), piece.columns[1] - piece.columns[0])
            pairs = torch.ones(1, 1, *size, dtype=torch.bool, device=self.device)
            pairs = pairs if piece.visible is None else piece.visible.expand(*piece.visible.shape[:2], *size)
            parts.append(_spread(pairs, piece.columns, self.keys, False))
        shape = [max(part.shape[axis] for part in parts) for axis in (0, 1)] if parts else []
        return torch.cat([part.expand(*shape, *part.shape[2:]) for part in parts], dim=2) if parts else None

    def _real(self) -> Tensor | None:
        if all(piece.real is None for piece in self.pieces):
            return None
        real = torch.zeros(self.size[0], self.keys, dtype=torch.bool, device=self.device)
        for piece in self.pieces:
            low, high = piece.columns
            real[:, low:high] |= True if piece.real is None else piece.real
        return real


def _spread(part: Tensor, columns: tuple[int, int], keys: int, empty: float | bool) -> Tensor:
    """A piece (…, s) in its columns of (…, S), `empty` elsewhere."""
    if columns == (0, keys):
        return part
    room = part.new_full((*part.shape[:-1], keys), empty)
    room[..., columns[0] : columns[1]] = part
    return room


def _by_window(tensor: Tensor | None, windows: tuple[int, int]) -> Tensor | None:
    """A tensor whose first axis has the windows of all pictures, or 1, with an axis for the windows."""
    if tensor is None:
        return None
    return tensor[:, None] if len(tensor) == 1 else tensor.unflatten(0, (-1, windows[0] * windows[1]))


@dataclass(eq=False)
class _Pass:
    """One run of a module in which attention is numbered from 0."""

    starter: nn.Module
    continues: bool | None = None
    """Whether it continues where the starter's last pass ended; None until its first self-attention shows it."""
    queries: int = 0
    """Tokens that this pass reads."""
    end: int = 0
    """The position after the last of them."""
    real: Tensor | None = None
    """Which of them (B, T) are not padding; None if all."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the patches that were read in it, if any were."""


@dataclass(frozen=True, eq=False)
class Readers:
    """What of a model says which tokens it reads and predicts."""

    spell: Spelling | None = None
    """The strings of token ids; None without a tokenizer."""
    name_classes: Spelling | None = None
    num_classes: int | None = None
    """How many classes each token may have, in models that classify tokens."""
    logits: dict[nn.Module, Callable[[Any], Tensor | None]] = field(default_factory=dict)
    """For modules whose output has logits: what finds them in it."""
    heads: dict[nn.Module, Callable[[Tensor], Tensor | None]] = field(default_factory=dict)
    """For stacks: what computes logits from their hidden states, where nobody else did."""
    sources: frozenset[nn.Module] = frozenset()
    """Modules that read the source of an encoder-decoder."""


class Recorder:
    """Numbers the attention modules of a model as they run, and collects the chosen tensors."""

    def __init__(
        self, trace: Trace, chosen: Chosen, attentions: dict[nn.Module, str], readers: Readers | None = None
    ) -> None:
        self.trace, self.chosen, self.names = trace, chosen, attentions
        self.readers = Readers() if readers is None else readers
        trace._spelling, trace._settle = self.readers.spell, self.settle
        self.numbers: dict[tuple[nn.Module, int], int] = {}
        self.met_rows: set[int] = set()
        self._order = {module: place for place, module in enumerate(attentions)}
        self._runs: dict[nn.Module, int] = {}
        self._open: list[_Pass] = []
        self._anchors: dict[nn.Module, Tensor] = {}
        self._current: dict[nn.Module, tuple[_Pass, int, int]] = {}
        """For each module, the pass and number of its last run, and how often it attended in that run."""
        self._ends: dict[nn.Module, int] = {}
        """For each starter, the position after the last token that it read."""
        self._ids: Tensor | None = None
        """The token ids that were looked up last."""
        self._hidden: tuple[_Pass, Tensor, Callable[[Tensor], Tensor | None]] | None = None
        """A stack's last hidden states, and what makes logits of them, unless the model makes them itself."""

    def watch(self, starters: Sequence[nn.Module]) -> list[Any]:
        """Hooks that begin and end a pass at each of these modules."""
        handles = []
        for starter in starters:
            beneath = [module for module in starter.modules() if module in self._order]
            begin = _begin(self, beneath)
            handles.append(starter.register_forward_pre_hook(begin))
            handles.append(starter.register_forward_hook(self._end, always_call=True))
        return handles

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._open:
            ended = self._open.pop()
            if self._open and ended.queries:  # an outer pass reads what its last inner one reads
                outer = self._open[-1]
                outer.continues, outer.queries, outer.end, outer.real = (
                    ended.continues, ended.queries, ended.end, ended.real
                )  # fmt: skip
            if ended.starter is module:
                if "predictions" in self.chosen.keep and output is not None:
                    self._predicted(ended, output)
                return

    def _predicted(self, ended: _Pass, output: Any) -> None:
        """Note what a module predicts, if it does."""
        if (head := self.readers.heads.get(ended.starter)) is not None:
            self._hidden = ended, output[0].detach(), head
        find = self.readers.logits.get(ended.starter)
        if find is not None and (logits := find(output)) is not None:
            self._hidden = None
            self._note(ended, logits)

    def settle(self) -> None:
        """Make predictions of the last hidden states, if the model itself did not."""
        if self._hidden is not None:
            (ended, hidden, head), self._hidden = self._hidden, None
            with torch.no_grad():
                places = self._predicted_places(ended, hidden.shape[1])
                if (logits := head(hidden[:, places])) is not None:
                    self._note(ended, logits, places)

    def _predicted_places(self, ended: _Pass, count: int) -> list[int]:
        """Which of a pass's last `count` tokens have predictions to keep, from 0."""
        return self.chosen.these_rows((ended.end or count) - count, count)[0]

    def _note(self, ended: _Pass, logits: Tensor, places: list[int] | None = None) -> None:
        """Keep the likeliest tokens of a pass, at all its tokens or at those of `places`; or the likeliest classes."""
        classes = logits.ndim == 2
        if classes:
            logits, places, start = logits[:, None], [0], 0
        elif places is None:
            places = self._predicted_places(ended, logits.shape[1])
            start, logits = (ended.end or logits.shape[1]) - logits.shape[1], logits[:, places]
        else:
            start = ended.end - ended.queries
        real = None
        if ended.real is not None and not classes:
            real = ended.real[:, [start + place - (ended.end - ended.queries) for place in places]]
        with torch.no_grad():
            ids, probabilities = likeliest(logits.detach())
        named = classes or logits.shape[-1] == self.readers.num_classes
        spell = (self.readers.name_classes if named else self.readers.spell) or _numbers
        rows = PredictedRows(tuple(start + place for place in places), ids, probabilities, real, spell)
        before = self.trace._predicted if ended.continues else []
        # Two modules may give logits of one pass, one within the other.
        kept = [part for part in before if not set(part.positions) & set(rows.positions)]
        self.trace._predicted = [*kept, rows]

    def read(self, ids: Tensor) -> None:
        """Note token ids (B, T) that a model looks up."""
        self._ids = ids.detach()

    def see_map(self, grid: tuple[int, int]) -> None:
        """Note the patches (rows, columns) that a model makes of a picture."""
        if self._open:
            self._open[-1].grid = grid

    @property
    def grid(self) -> tuple[int, int] | None:
        """The patches that the current pass, or one around it, has read."""
        return next((outer.grid for outer in reversed(self._open) if outer.grid is not None), None)

    def begin(self, starter: nn.Module, beneath: list[nn.Module]) -> None:
        """Begin a pass: the modules in it count their runs from 0 again."""
        self.settle()
        self._open.append(_Pass(starter))
        for module in beneath:
            self._runs[module] = 0

    def enter(self, module: nn.Module) -> int:
        """Note that an attention module begins to run; returns its number."""
        if self._open:
            under = self._open[-1]
        else:
            under, self._runs[module] = _Pass(module), 0
        run = self._runs.get(module, 0)
        self._runs[module] = run + 1
        key = (module, run)
        if key not in self.numbers:
            place, used = self._order[module], self.numbers.values()
            self.numbers[key] = place if run == 0 and place not in used else max(used, default=-1) + 1
        self._current[module] = under, self.numbers[key], 0
        return self.numbers[key]

    def wants(self, module: nn.Module) -> bool:
        """Whether the current run of the module is recorded."""
        return self.chosen.layers is None or self._current[module][1] in self.chosen.layers

    def meet(self, module: nn.Module, met: Met, *, packed: bool = False) -> None:
        """Record one run of attention. With `packed`, a module attends several times, once for each packed sequence."""
        under, index, times = self._current[module]
        if times and not packed:
            raise ValueError(
                f"model: expected {type(module).__name__} ({self.names[module]}) to attend once per run, got twice"
            )
        if met.kind == "self" and under.continues is None:
            under.continues = met.by_pairs and self._goes_on(under.starter, met)
            self._follow(under, met)
        self._current[module] = under, index, times + 1
        if self.wants(module):
            self._gather(module, index, met, under.continues is True, times > 0)

    def _goes_on(self, starter: nn.Module, met: Met) -> bool:
        """Whether the keys before the new ones are equal to those of the last pass."""
        past, before = met.k.shape[2] - met.q.shape[2], self._anchors.get(starter)
        self._anchors[starter] = met.k.detach()
        if before is None or not 0 < past <= before.shape[2]:
            return False
        return torch.equal(met.k[:, :, :past], before[:, :, before.shape[2] - past :])

    def _follow(self, under: _Pass, met: Met) -> None:
        """Note which tokens a pass reads, by its first self-attention."""
        queries, keys, starter = met.q.shape[2], met.k.shape[2], under.starter
        under.queries = queries
        under.end = self._ends.get(starter, 0) + queries if under.continues else keys
        under.real = None if met.real is None else met.real[:, keys - queries :].expand(len(met.q), queries)
        self._ends[starter] = under.end
        (ids, self._ids), read = (self._ids, None), self.trace._read
        side = "source_tokens" if starter in self.readers.sources else "tokens"
        before = read.get(side) if under.continues else [] if keys == queries else None
        fits = ids is not None and ids.shape == (met.q.shape[0], queries)
        # What came before the trace, or came as embeddings, has no tokens here.
        if before is None or ids is None or not fits:
            read[side] = None
        else:  # a copy, since the caller may reuse the tensor
            real = ids.clone() if under.real is None else ids.masked_fill(~under.real.to(ids.device), -1)
            read[side] = [*before, real]
        if side == "source_tokens":  # a new source begins a new target
            read["tokens"] = None

    def _gather(self, module: nn.Module, index: int, met: Met, continues: bool, apart: bool) -> None:
        gathered, queries, keys = self.trace._gathered.get(index), met.q.shape[2], met.k.shape[2]
        heads = tuple(self.chosen.these_heads(met.q.shape[1]))
        fresh = keys
        if gathered is None or not (apart or (continues and gathered.takes(met))):
            gathered = self.trace._gathered[index] = Gathered(
                index=index,
                name=self.names[module],
                kind=met.kind,
                mechanism=met.mechanism,
                by_pairs=met.by_pairs,
                hidden_score=met.hidden_score,
                heads=heads,
                size=(met.q.shape[0], met.q.shape[1]),
                device=met.q.device,
                definition=met.definition,
                project=met.project if "outputs" in self.chosen.keep else None,
                map=met.map,
            )
            if met.map is not None and met.map.windows is None and met.by_pairs:
                high, wide = met.map.grid
                self.trace.class_token = 0 if keys > high * wide else None
        elif not apart:
            fresh = queries if met.kind == "self" else 0
        gathered.keys += fresh
        gathered.joined = None
        start = gathered.keys - queries if met.kind == "self" else gathered.queries
        columns = (gathered.keys - keys, gathered.keys)
        gathered.queries += queries
        with torch.no_grad():
            gathered.pieces.append(self._piece(met, heads, start, columns, fresh))

    def _piece(self, met: Met, heads: tuple[int, ...], start: int, columns: tuple[int, int], fresh: int) -> _Piece:
        places, answered = self.chosen.these_rows(start, met.q.shape[2])
        self.met_rows |= answered
        rows = None if self.chosen.rows is None else places
        chosen_heads = None if self.chosen.heads is None else list(heads)
        tensors: dict[str, Tensor] = {}
        if places:
            if "weights" in self.chosen.keep:
                tensors["weights"] = met.weigh(rows, chosen_heads).detach()
            if "scores" in self.chosen.keep and (scores := met.score(rows, chosen_heads)) is not None:
                tensors["scores"] = scores.detach()
        for name, whole in (("queries", met.q), ("keys", met.k), ("values", met.v), ("outputs", met.outputs)):
            if name in self.chosen.keep:
                of_rows = name in ("queries", "outputs")
                part = whole if of_rows else whole[:, :, whole.shape[2] - fresh :]
                part = part if chosen_heads is None else _of_heads(part, chosen_heads, met.q.shape[1])
                # A copy, since a cache may overwrite the tensors it returned.
                tensors[name] = part[:, :, places].detach() if of_rows else part.detach().clone()
        positions = tuple(start + place for place in places)
        visible = met.see(rows, chosen_heads) if places else None
        return _Piece(columns, positions, tensors, visible, met.real, met.causal)

    def finish(self) -> None:
        """Join the collected pieces into layers and free them."""
        trace = self.trace
        trace._layers, trace._predictions = trace.layers, trace.predictions
        trace._spelled = {side: trace._strings(side) for side in ("tokens", "source_tokens")}
        trace._gathered, trace._predicted, trace._read, trace._spelling = {}, [], {}, None
        trace._settle = lambda: None

    def check(self) -> None:
        """Raise ValueError for chosen layers or rows that did not run, and for attention that was not recorded."""
        if unseen := [module for module, (_, _, times) in self._current.items() if not times]:
            kind, name = type(unseen[0]).__name__, self.names[unseen[0]]
            raise ValueError(
                f"model: expected {kind} ({name}) to compute attention in a way that a trace can record, got none"
            )
        met = sorted(self.numbers.values())
        if wrong := sorted((self.chosen.layers or frozenset()) - set(met)):
            raise ValueError(f"layers: expected layers that ran, {_span(met)}, got {wrong}")
        if self.chosen.rows is not None and met and (missed := sorted(set(self.chosen.rows) - self.met_rows)):
            raise ValueError(f"rows: expected positions of queries that ran, got {missed}")


def _begin(recorder: Recorder, beneath: list[nn.Module]) -> Callable[[nn.Module, Any], None]:
    return lambda module, args: recorder.begin(module, beneath)


def _numbers(ids: list[int]) -> list[str]:
    return [str(number) for number in ids]


def _of_heads(part: Tensor, heads: list[int], count: int) -> Tensor:
    """The key or query head of each chosen query head, among `count` query heads."""
    return part[:, [head // (count // part.shape[1]) for head in heads]]


def _span(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if numbers else "none"
