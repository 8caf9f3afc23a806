"""The laws every mechanism keeps, run on random shapes: a public proof that compute, stream, see and count agree.

`check(mechanism)` runs each law for each mask, grouping of heads and dtype: a cell. A cell is held, broken (with the
smallest counter-example found) or does not apply, for a stated reason. Our own mechanisms and a user's are checked alike.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from regard.attention import attend, weights
from regard.call import Call
from regard.cost import Work, cost
from regard.mask import Mask, Structure, causal, dense, global_tokens, padding, structure, window
from regard.mechanism import Mechanism
from regard.mechanisms.kernel import RECENT, FeatureMechanism, Kernel
from regard.paths import chunked, reference

LENGTHS = (1, 2, 3, 5, 17, 0, 63, RECENT, RECENT + 1, chunked.CHUNK - 1, chunked.CHUNK, chunked.CHUNK + 1)
SHORT = (1, 2, 3, 5, 17, 0)
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
DTYPES = {
    str(kind).removeprefix("torch."): kind for kind in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


@dataclass(frozen=True)
class Case:
    """One drawn example: shapes, mask, dtype and the seed of its numbers."""

    mask: str
    heads: str
    dtype: str
    batch: int
    queries: int
    keys: int
    qk_length: int
    value_length: int
    seed: int

    @property
    def kind(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def lengths(self, salt: int = 1) -> list[int]:
        """A length for each sequence: anything from none to all of the keys."""
        generator = torch.Generator().manual_seed(self.seed + salt)
        return torch.randint(0, self.keys + 1, (self.batch,), generator=generator).tolist()

    def rule(self, keys: int | None = None) -> Mask | None:
        """The mask, over the first `keys` keys of the sequence."""
        return MASKS[self.mask](self, self.keys if keys is None else keys)

    def tensors(self, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = HEADS[self.heads]
        generator = self.generator

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        q = draw(self.batch, heads, self.queries, self.qk_length) * scale
        k = draw(self.batch, groups, self.keys, self.qk_length) * scale
        v = draw(self.batch, groups, self.keys, self.value_length)
        return q.to(self.kind), k.to(self.kind), v.to(self.kind)


def _right(case: Case, keys: int) -> Mask:
    return padding([min(length, keys) for length in case.lengths()])


def _left(case: Case, keys: int) -> Mask:
    starts = torch.tensor(case.lengths(), dtype=torch.long)
    return padding(valid=torch.arange(keys) >= starts[:, None])


MASKS: dict[str, Callable[[Case, int], Mask | None]] = {
    "none": lambda case, keys: None,
    "causal": lambda case, keys: causal,
    "padding left": _left,
    "padding right": _right,
    "window": lambda case, keys: window(before=2 + case.seed % 3, after=case.seed % 2),
    "global": lambda case, keys: global_tokens(2) | window(before=3),
    "combined": lambda case, keys: causal & _left(case, keys) & (window(before=4) | global_tokens(1)),
}


class Broken(AssertionError):
    """A law that does not hold."""


@dataclass(frozen=True)
class Law:
    """A statement, how to test it on a case, and where it does not apply."""

    name: str
    statement: str
    test: Callable[[Mechanism, Case], None]
    excuse: Callable[[Mechanism, Case], str | None]
    """Why the law has no meaning for a mechanism under a mask and dtype; None where it has."""
    lengths: tuple[int, ...] = LENGTHS
    square: bool = False
    """Whether it needs as many queries as keys."""


@dataclass(frozen=True)
class Cell:
    """A law under one mask, grouping of heads and dtype, with its outcome: held, broken or not applicable."""

    law: str
    mask: str
    heads: str
    dtype: str
    outcome: str
    reason: str = ""
    counterexample: dict[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """What `check` found. Print it, or take `cells` and `to_dict()`.

    >>> import regard as rg
    >>> report = rg.check(rg.Softmax(), laws=["weights"], masks=["causal"], dtypes=["float32"])
    >>> report.ok, len(report.cells)
    (True, 3)
    """

    mechanism: str
    cells: tuple[Cell, ...] = field(default_factory=tuple)

    @property
    def ok(self) -> bool:
        return not self.broken

    @property
    def broken(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.outcome == "broken"]

    def to_dict(self) -> dict[str, Any]:
        return {"mechanism": self.mechanism, "ok": self.ok, "cells": [asdict(cell) for cell in self.cells]}

    def __str__(self) -> str:
        lines = [f"{self.mechanism}: {'every law holds' if self.ok else 'BROKEN'}"]
        for law in dict.fromkeys(cell.law for cell in self.cells):
            mine = [cell for cell in self.cells if cell.law == law]
            held, not_applicable = (sum(c.outcome == o for c in mine) for o in ("held", "not applicable"))
            state = "broken" if held + not_applicable < len(mine) else "held" if held else "-"
            lines.append(
                f"  {law:<12} {state:<7} {held:>4} of {len(mine) - not_applicable} cells   {LAWS[law].statement}"
            )
        for reason in dict.fromkeys(c.reason for c in self.cells if c.outcome == "not applicable"):
            lines.append(f"  not applicable: {reason}")
        for cell in self.broken:
            lines.append(f"  {cell.law} under {cell.mask}, {cell.heads}, {cell.dtype}: {cell.reason}")
            if cell.counterexample:
                lines.append(
                    "    smallest: " + ", ".join(f"{name}={value}" for name, value in cell.counterexample.items())
                )
        return "\n".join(lines)


def check(
    mechanism: Mechanism,
    *,
    laws: Iterable[str] | None = None,
    masks: Iterable[str] | None = None,
    heads: Iterable[str] | None = None,
    dtypes: Iterable[str] | None = None,
    examples: int = 3,
    progress: Callable[[str], object] | None = None,
) -> Report:
    """Run every law on a mechanism, or the chosen ones, on random shapes; `examples` for each cell.

    `progress` is called with the name of each cell before it runs.

    >>> import regard as rg
    >>> print(rg.check(rg.Elu(), laws=["groups"], masks=["causal"], dtypes=["float64"]))
    Elu(): every law holds
      groups       held       2 of 2 cells   query head h reads key/value head h // (H // G)
      not applicable: every query head has keys of its own
    """
    cells = []
    for law in _picked("laws", laws, LAWS):
        for mask in _picked("masks", masks, MASKS):
            for grouping in _picked("heads", heads, HEADS):
                for dtype in _picked("dtypes", dtypes, DTYPES):
                    if progress is not None:
                        progress(f"{law}, {mask}, {grouping}, {dtype}")
                    cells.append(_run(LAWS[law], mechanism, mask, grouping, dtype, examples))
    return Report(repr(mechanism), tuple(cells))


def count_cells() -> int:
    """How many cells a full check of one mechanism has."""
    return len(LAWS) * len(MASKS) * len(HEADS) * len(DTYPES)


def _picked(name: str, wanted: Iterable[str] | None, known: dict[str, Any]) -> Sequence[str]:
    chosen = list(known) if wanted is None else list(wanted)
    for one in chosen:
        if one not in known:
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {one!r}")
    return chosen


def _run(law: Law, mechanism: Mechanism, mask: str, heads: str, dtype: str, examples: int) -> Cell:
    probe = Case(mask, heads, dtype, batch=2, queries=8, keys=8, qk_length=4, value_length=4, seed=0)
    reason = _refused(mechanism, probe) or law.excuse(mechanism, probe)
    if reason is not None:
        return Cell(law.name, mask, heads, dtype, "not applicable", reason)
    failing: list[Case] = []

    @seed(zlib.crc32(f"{law.name} {mask} {heads} {dtype}".encode()))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(_cases(law, mechanism, mask, heads, dtype))
    def hold(case: Case) -> None:
        try:
            law.test(mechanism, case)
        except Exception:
            failing.append(case)
            raise

    try:
        hold()
    except Exception as error:  # whatever a user's mechanism raises is the counter-example we are looking for
        if not failing:
            raise
        message = str(error) if isinstance(error, Broken) else f"{type(error).__name__}: {error}"
        smallest = {
            name: value for name, value in asdict(failing[-1]).items() if name not in ("mask", "heads", "dtype")
        }
        return Cell(law.name, mask, heads, dtype, "broken", message.split("\n")[0], smallest)
    return Cell(law.name, mask, heads, dtype, "held")


def _cases(law: Law, mechanism: Mechanism, mask: str, heads: str, dtype: str) -> st.SearchStrategy[Case]:
    def build(batch: int, queries: int, more: int, lengths: tuple[int, int], number: int) -> Case:
        square = law.square or not mechanism.by_pairs
        keys = queries if square else max(0, queries + more)
        value_length = lengths[1] if mechanism.by_pairs else lengths[0]
        return Case(mask, heads, dtype, batch, queries, keys, lengths[0], value_length, number)

    return st.builds(
        build,
        batch=st.sampled_from((1, 2, 3, 0)),
        queries=st.sampled_from(law.lengths),
        more=st.sampled_from((0, 3, 40, -2)),
        lengths=st.sampled_from(((4, 3), (1, 1), (8, 8), (5, 17))),
        number=st.integers(0, 10**6),
    )


def _refused(mechanism: Mechanism, case: Case) -> str | None:
    q, k, v = case.tensors()
    return mechanism.refuses(Call(mechanism, q, k, v, case.rule()))


def always(mechanism: Mechanism, case: Case) -> str | None:
    """No excuse."""
    return None


def error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference from the float64 reference; NaN counts as infinite."""
    if actual.numel() == 0:
        return 0.0
    difference = (actual.double() - exact.double()).abs().max().item()
    return difference if difference == difference else float("inf")


def budget(dtype: torch.dtype, plain_error: float, *, gradient: bool = False) -> float:
    """How far from the float64 reference a result in `dtype` may be, given the plain formula's own error in it.

    On a handful of numbers the plain formula can be right by luck; its error counts as half a unit in the last place of
    results around 1 at the least, which is what rounding the output alone costs.

    >>> import torch
    >>> budget(torch.float64, 1e-3)
    1e-12
    """
    plain_error = max(plain_error, torch.finfo(dtype).eps / 2)
    if dtype == torch.float64:
        return 1e-12
    if dtype == torch.float32:
        return 2 * plain_error + 1e-6
    return (3 if gradient else 2) * plain_error + 1e-5


def within_budget(what: str, actual: Tensor, exact: Tensor, plain: Tensor, *, gradient: bool = False) -> None:
    """Raise Broken if `actual` is further from `exact` (float64) than the error budget allows."""
    size = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    found, allowed = error(actual, exact), size * budget(actual.dtype, error(plain, exact) / size, gradient=gradient)
    if actual.shape != exact.shape or not found <= allowed:
        raise Broken(f"{what} is off by {found:.2g}, {allowed:.2g} allowed")


def _plain(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> Tensor:
    """The plain formula in the tensors' own dtype: exact weights, rounded, times the values."""
    call = Call(mechanism, q, k, v, rule)
    if call.empty:
        return q.new_zeros(*q.shape[:3], v.shape[3]) + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    visible = None if rule is None else rule.visible(call.batch, call.heads, call.queries, call.keys)
    out = mechanism.mix(mechanism.weigh(q, k, visible).to(q.dtype), v)
    if not mechanism.by_pairs and visible is not None:
        out = out.masked_fill(~visible[:, :, 0, :, None], 0)
    return out


def _exact(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None) -> Tensor:
    return _plain(mechanism, q.double(), k.double(), v.double(), rule)


def _agrees(
    what: str, actual: Tensor, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, rule: Mask | None
) -> None:
    within_budget(what, actual, _exact(mechanism, q, k, v, rule), _plain(mechanism, q, k, v, rule))


def _pieces(case: Case) -> list[int]:
    """A random way to cut the queries: tokens one by one at first, then larger pieces."""
    generator, left, sizes = case.generator, case.queries, []
    while left:
        most = 1 if len(sizes) < 2 else min(left, 97)
        sizes.append(int(torch.randint(1, most + 1, (1,), generator=generator)))
        left -= sizes[-1]
    return sizes


def _start(mechanism: Mechanism, case: Case, capacity: int) -> Any:
    return mechanism.start(
        batch=case.batch,
        num_kv_heads=HEADS[case.heads][1],
        qk_length=case.qk_length,
        value_length=case.value_length,
        capacity=capacity,
        dtype=case.kind,
    )


def _causal_rule(case: Case, keys: int | None = None) -> Mask:
    rule = case.rule(keys)
    return causal if rule is None else causal & rule


def _stream(
    mechanism: Mechanism, case: Case, tensors: tuple[Tensor, Tensor, Tensor], state: Any, sizes: list[int]
) -> tuple[Tensor, Any]:
    q, k, v = tensors
    parts, at = [q.new_zeros(*q.shape[:2], 0, v.shape[3])], state.length
    for size in sizes:
        piece = slice(at, at + size)
        rule = _causal_rule(case, at + size)
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rule)
        parts.append(out)
        at += size
    return torch.cat(parts, dim=2), state


def _no_stream(mechanism: Mechanism, case: Case) -> str | None:
    return mechanism.streams(case.qk_length, structure(_causal_rule(case), case.queries, case.keys))


@torch.no_grad()
def _streamed(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    out, state = _stream(mechanism, case, (q, k, v), _start(mechanism, case, case.keys), _pieces(case))
    if state.length != case.queries:
        raise Broken(f"the state says it has met {state.length} tokens, not {case.queries}")
    _agrees("the stream", out, mechanism, q, k, v, _causal_rule(case))
    _agrees("the whole", attend(q, k, v, mechanism, _causal_rule(case)), mechanism, q, k, v, _causal_rule(case))


@torch.no_grad()
def _forked(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    half = case.queries // 2
    _, early = _stream(mechanism, case, (q, k, v), _start(mechanism, case, case.keys), [half] if half else [])
    rest = [case.queries - half] if case.queries > half else []
    other = tuple(torch.cat([t[:, :, :half], t[:, :, half:].flip(2)], dim=2) for t in (q, k, v))
    futures = [_stream(mechanism, case, story, early, rest)[0] for story in ((q, k, v), other, (q, k, v))]
    for story, out in zip(((q, k, v), other, (q, k, v)), futures, strict=True):
        past = _stream(mechanism, case, story, _start(mechanism, case, case.keys), [half] if half else [])[0]
        _agrees("a fork", torch.cat([past, out], dim=2), mechanism, *story, _causal_rule(case))
    if early.length != half:
        raise Broken(f"a fork changed the length of its origin from {half} to {early.length}")
    _reordered(mechanism, case, (q, k, v), early, rest)
    _cropped(mechanism, case, (q, k, v), early, rest)


def _reordered(mechanism: Mechanism, case: Case, tensors: tuple[Tensor, ...], early: Any, rest: list[int]) -> None:
    rule = _causal_rule(case)
    if case.batch < 2 or not rest or structure(rule, case.queries, case.keys).paddings:
        return  # a padded row cannot change places under a mask that stays
    index = torch.arange(case.batch).roll(1)
    q, k, v = (torch.cat([t[:, :, : early.length][index], t[:, :, early.length :]], dim=2) for t in tensors)
    piece = slice(early.length, None)
    out, _ = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], early.reorder(index), mask=rule)
    exact, plain = _exact(mechanism, q, k, v, rule), _plain(mechanism, q, k, v, rule)
    within_budget("a reordered state", out, exact[:, :, piece], plain[:, :, piece])


def _cropped(mechanism: Mechanism, case: Case, tensors: tuple[Tensor, ...], early: Any, rest: list[int]) -> None:
    if not rest or not early.length:
        return
    q, k, v = tensors
    full = _stream(mechanism, case, (q, k, v), early, rest)[1]
    if getattr(full, "folded", 0) > early.length:
        return  # a kernel's sums cannot be taken apart, and say so
    out, _ = _stream(mechanism, case, (q, k, v), full.crop(early.length), rest)
    piece, rule = slice(early.length, None), _causal_rule(case)
    exact, plain = _exact(mechanism, q, k, v, rule), _plain(mechanism, q, k, v, rule)
    within_budget("a cropped state", out, exact[:, :, piece], plain[:, :, piece])


@torch.no_grad()
def _batched(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    together = attend(q, k, v, mechanism, rule)
    _agrees("the batch", together, mechanism, q, k, v, rule)
    visible = None if rule is None else rule.visible(case.batch, q.shape[1], case.queries, case.keys)
    for row in range(case.batch):
        alone = tuple(t[row : row + 1] for t in (q, k, v))
        one = rule if visible is None or visible.shape[0] == 1 else _row(rule, case, row)
        _agrees("a row alone", attend(*alone, mechanism, one), mechanism, *alone, one)
        exact, plain = _exact(mechanism, *alone, one), _plain(mechanism, *alone, one)
        within_budget("a row in the batch", together[row : row + 1], exact, plain)


def _row(rule: Mask | None, case: Case, row: int) -> Mask | None:
    """One row's own mask: its padding as intervals where there is nothing else, else the row as it is."""
    known = structure(rule, case.queries, case.keys)
    if known == Structure():
        return None
    assert rule is not None
    if known.rest is None and known.rows is not None and not known.windowed:
        low, high = known.rows[row]
        place = torch.arange(case.keys)
        one = padding(valid=((place >= low) & (place < high))[None])
        return causal & one if known.causal else one
    return dense(rule.visible(case.batch, 1, case.queries, case.keys)[row : row + 1])


@torch.no_grad()
def _padded(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    lengths = [min(n, case.keys) for n in case.lengths(salt=2)]
    left = case.mask == "padding left"
    own = None if case.mask.startswith("padding") else case.rule()
    if case.mask == "combined":
        own = causal & (window(before=4) | global_tokens(1))
    place = torch.arange(case.keys)
    ends = torch.tensor(lengths, dtype=torch.long)[:, None]
    pads = padding(valid=place >= case.keys - ends) if left else padding(lengths)
    rule = pads if own is None else own & pads
    out = attend(q, k, v, mechanism, rule)
    for row, length in enumerate(lengths):
        real = slice(case.keys - length, case.keys) if left else slice(0, length)
        alone = tuple(t[row : row + 1, :, real] for t in (q, k, v))
        exact, plain = _exact(mechanism, *alone, own), _plain(mechanism, *alone, own)
        within_budget("a padded row", out[row : row + 1, :, real], exact, plain)


@torch.no_grad()
def _weighed(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    before = attend(q, k, v, mechanism, rule)
    found = weights(q, k, mechanism, rule)
    if not torch.equal(before, attend(q, k, v, mechanism, rule)):
        raise Broken("asking for the weights changed the output")
    if found.numel() == 0:
        return
    if not bool((found >= 0).all()):
        raise Broken(f"a weight is {found.min().item():.3g}")
    total = found.double().sum(-1)
    none = total == 0
    size = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.kind, torch.finfo(case.kind).eps)
    if not bool(((total - 1).abs() <= size)[~none].all()):
        raise Broken(f"a row of weights sums to {total[~none].flatten()[(total[~none] - 1).abs().argmax()].item():.6g}")
    visible = torch.ones(1, 1, 1, 1).bool() if rule is None else rule.visible(case.batch, 4, case.queries, case.keys)
    sees = visible.any(-1).expand(case.batch, 4, case.queries) if mechanism.by_pairs else ~none
    # Only a similarity that can be 0 for every visible key may leave a row without weights.
    if type(mechanism).weigh is not Mechanism.weigh and bool((none & sees).any()):
        raise Broken("a query that sees a key has no weights")
    if bool((~none & ~sees).any()):
        raise Broken("a query that sees no key has weights")
    out = mechanism.mix(found, v)
    if not mechanism.by_pairs and rule is not None:
        out = out.masked_fill(~visible[:, :, 0, :, None], 0)
    exact = _exact(mechanism, q, k, v, rule)
    within_budget("weights @ v", out, exact, _plain(mechanism, q, k, v, rule))
    within_budget("the output", before, exact, _plain(mechanism, q, k, v, rule))
    if mechanism.by_pairs and case.queries:
        some = weights(q, k, mechanism, rule, rows=[-1], heads=[2])
        if not torch.allclose(some, found[:, [2], -1:], rtol=0, atol=4 * torch.finfo(case.kind).eps):
            raise Broken("the weights of one row and head differ from the same row and head among all")


def _blind(mechanism: Mechanism, case: Case) -> None:
    q, k, v = (t.requires_grad_() for t in case.tensors())
    rule, nobody = case.rule(), padding([0] * case.batch)
    out = attend(q, k, v, mechanism, nobody if rule is None else rule & nobody)
    if out.abs().sum() != 0:
        raise Broken(f"a query with no visible key gets {out.abs().max().item():.3g}, not 0")
    if case.keys and weights(q, k, mechanism, nobody if rule is None else rule & nobody).abs().sum() != 0:
        raise Broken("a query with no visible key has weights")
    _finite_gradients(out, (q, k, v))
    if mechanism.by_pairs:
        first = attend(torch.cat([q, q], 2), k, v, mechanism, _past(case))
        if first[:, :, : case.queries * 2 - case.keys].abs().sum() != 0:
            raise Broken("a query before the first key gets something")
        _finite_gradients(first, (q, k, v))


def _past(case: Case) -> Mask:
    """A causal mask for twice the queries, so that the first of them stand before the first key."""
    return causal & padding([case.keys] * case.batch)


def _finite_gradients(out: Tensor, inputs: tuple[Tensor, ...], to: Tensor | None = None) -> list[Tensor]:
    found = torch.autograd.grad(
        out, inputs, torch.ones_like(out) if to is None else to, allow_unused=True, materialize_grads=True
    )
    for name, one in zip("qkv", found, strict=True):
        if not bool(one.isfinite().all()):
            raise Broken(f"the gradient of {name} is not finite")
    return list(found)


def _leakless(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    if rule is None or 0 in (case.batch, case.queries, case.keys):
        return
    visible = rule.visible(case.batch, 4, case.queries, case.keys).expand(case.batch, 4, case.queries, case.keys)
    if bool(visible.all()):
        return
    hidden = ~visible.any(2).any(1)  # keys nobody sees, and one that some may see
    bad = hidden.clone()
    if mechanism.by_pairs:
        bad[:, int(torch.randint(0, case.keys, (1,), generator=case.generator))] = True
    sees = (visible & bad[:, None, None]).any(-1)
    for poison in (float("nan"), float("inf"), float("-inf")):
        dirty_k, dirty_v = (
            torch.where(bad[:, None, :, None], torch.full_like(t, poison), t).requires_grad_() for t in (k, v)
        )
        query = q.clone().requires_grad_()
        out = attend(query, dirty_k, dirty_v, mechanism, rule)
        clean = [torch.where(bad[:, None, :, None], torch.zeros_like(t), t) for t in (k, v)]
        exact, plain = _exact(mechanism, q, *clean, rule), _plain(mechanism, q, *clean, rule)
        kept = ~sees[..., None]
        if not mechanism.by_pairs:
            kept = ~hidden[:, None, :, None].expand(case.batch, 4, case.queries, 1)
        zero = torch.zeros(())
        within_budget(
            f"a query that does not see a masked {poison}",
            torch.where(kept, out.detach(), zero.to(out.dtype)),
            torch.where(kept, exact, zero.double()),
            torch.where(kept, plain, zero.to(plain.dtype)),
        )
        if mechanism.by_pairs and bool(out.detach()[sees].isfinite().any()):
            raise Broken(f"a visible {poison} is hidden from a query that sees it")
        grads = _finite_gradients(out, (query, dirty_k, dirty_v), kept.expand_as(out).to(out.dtype))
        for name, one in zip("kv", grads[1:], strict=True):
            if one[bad[:, None].expand(one.shape[:3])].abs().sum() != 0:
                raise Broken(f"gradient reaches a masked {name}")


def _no_hidden(mechanism: Mechanism, case: Case) -> str | None:
    return "no key is hidden" if case.mask == "none" else None


@torch.no_grad()
def _permuted(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    order = torch.randperm(case.keys, generator=case.generator)
    moved = tuple(t[:, :, order] for t in (q, k, v))
    rule = case.rule()
    if rule is None:
        other = None
    else:
        valid = structure(rule, case.queries, case.keys).valid(case.keys)
        other = None if valid is None else padding(valid=valid[:, order])
    _agrees("the whole", attend(q, k, v, mechanism, rule), mechanism, q, k, v, rule)
    exact, plain = _exact(mechanism, q, k, v, rule), _plain(mechanism, q, k, v, rule)
    out = attend(*moved, mechanism, other)
    within_budget("the permuted sequence", out, exact[:, :, order], plain[:, :, order])


def _positional(mechanism: Mechanism, case: Case) -> str | None:
    return None if case.mask in ("none", "padding left", "padding right") else "the mask speaks of positions"


def _differentiable(mechanism: Mechanism, case: Case) -> None:
    q, k, v = (t.requires_grad_() for t in case.tensors())
    if 0 in (case.batch, case.queries, case.keys):
        return
    rule = case.rule()
    try:
        torch.autograd.gradcheck(lambda *t: attend(*t, mechanism, rule), (q, k, v), fast_mode=True)
    except torch.autograd.gradcheck.GradcheckError as wrong:  # type: ignore[attr-defined]
        raise Broken(f"gradcheck fails: {str(wrong).splitlines()[0]}") from None


def _double_only(mechanism: Mechanism, case: Case) -> str | None:
    return None if case.kind == torch.float64 else "finite differences need float64; the law of paths covers the rest"


def _extreme(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    if 0 in (case.batch, case.queries, case.keys):
        return
    # Scores of ±1e4: q·k = ±100² along one direction.
    direction = torch.nn.functional.normalize(torch.ones(case.qk_length), dim=0).to(case.kind)
    q = (q[..., :1].sign() * 100 * direction).detach().requires_grad_()
    k = (k[..., :1].sign() * 100 * direction).detach().requires_grad_()
    v = v.requires_grad_()
    out = attend(q, k, v, mechanism, case.rule())
    if not bool(out.isfinite().all()):
        raise Broken("scores of ±1e4 give an output that is not finite")
    if out.abs().max() > v.abs().max() * 1.02:
        raise Broken("scores of ±1e4 give an output beyond every value")
    _finite_gradients(out, (q, k, v))


@torch.no_grad()
def _grouped(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule, repeats = case.rule(), q.shape[1] // k.shape[1]
    wide = tuple(t.repeat_interleave(repeats, dim=1) for t in (k, v))
    out = attend(q, k, v, mechanism, rule)
    within_budget("grouped heads", out, _exact(mechanism, q, *wide, rule), _plain(mechanism, q, *wide, rule))


def _ungrouped(mechanism: Mechanism, case: Case) -> str | None:
    return "every query head has keys of its own" if case.heads == "MHA" else None


def _paths_agree(mechanism: Mechanism, case: Case) -> None:
    rule = case.rule()

    def run(compute: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
        out = compute(*leaves)
        to = torch.randn(out.shape, generator=case.generator, dtype=torch.float64).to(out.dtype)
        return [out.detach(), *_finite_gradients(out, leaves, to)]

    tensors = case.tensors()
    exact = run(lambda q, k, v: _exact(mechanism, q, k, v, rule), *(t.double() for t in tensors))
    plain = run(lambda q, k, v: _plain(mechanism, q, k, v, rule), *tensors)
    call = Call(mechanism, *tensors, rule)
    for path in mechanism.paths():
        if path.cannot(call) is not None:
            continue
        found = run(lambda q, k, v, name=path.name: attend(q, k, v, mechanism, rule, path=name), *tensors)
        for what, one, good, rough in zip(("output", "q", "k", "v"), found, exact, plain, strict=True):
            name = f"path {path.name!r}: " + (what if what == "output" else f"the gradient of {what}")
            within_budget(name, one, good, rough, gradient=what != "output")


def _counted(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    work = _work(case, rule)
    stated = cost(mechanism, work)
    if case.queries and case.keys and case.batch:
        counted = _count_flops(mechanism, case, (q, k, v), rule, stated.form)
        if counted != stated.flops:
            raise Broken(f"{stated.flops} FLOPs stated, {counted} counted")
    if mechanism.streams(case.qk_length) is None:
        held = _start(mechanism, case, case.keys).nbytes
        if held != stated.state_bytes:
            raise Broken(f"{stated.state_bytes} bytes of state stated, {held} held")


def _work(case: Case, rule: Mask | None) -> Work:
    heads, groups = HEADS[case.heads]
    return Work(
        batch=case.batch,
        query_length=case.queries,
        key_length=case.keys,
        num_heads=heads,
        num_kv_heads=groups,
        qk_length=case.qk_length,
        value_length=case.value_length,
        dtype=case.kind,
        mask=rule,
    )


@torch.no_grad()
def _count_flops(
    mechanism: Mechanism, case: Case, tensors: tuple[Tensor, Tensor, Tensor], rule: Mask | None, form: str
) -> int:
    """FLOPs as torch counts them: the linear form as it runs, whole, or streamed where fewer queries than keys are new;
    the score form query by query, over its visible keys."""
    q, k, v = tensors
    past = case.keys - case.queries
    if form == "linear" and past > 0:
        state = _start(mechanism, case, case.keys)
        _, state = mechanism.extend(
            q.new_zeros(*q.shape[:2], past, q.shape[3]), k[:, :, :past], v[:, :, :past], state, mask=case.rule(past)
        )
    with FlopCounterMode(display=False) as counter:
        if form == "linear" and past > 0:
            mechanism.extend(q, k[:, :, past:], v[:, :, past:], state, mask=rule)
        elif form == "linear":
            call = Call(mechanism, q, k, v, rule)
            next(path for path in mechanism.paths() if path.cannot(call) is None).run(call)
        else:
            if isinstance(mechanism, FeatureMechanism) and not mechanism.short:
                # Features once a token; a query then meets features, not tokens.
                q, k = mechanism.features(q), mechanism.features(k)
                mechanism = Kernel(feature_map=lambda features: features)
            rule = dense(torch.ones(case.queries, case.keys, dtype=torch.bool)) if rule is None else rule
            visible = rule.visible(case.batch, 1, case.queries, case.keys).expand(
                case.batch, 1, case.queries, case.keys
            )
            for row in range(case.batch):
                for query in range(case.queries):
                    seen = visible[row, 0, query]
                    alone = (
                        q[row : row + 1, :, query : query + 1],
                        k[row : row + 1, :, seen],
                        v[row : row + 1, :, seen],
                    )
                    if bool(seen.any()):
                        reference.run(Call(mechanism, *alone, None))
    return int(counter.get_total_flops())


def _refusing(mechanism: Mechanism, case: Case) -> None:
    q, k, v = replace(case, batch=2, queries=5, keys=5).tensors()
    wrong: dict[str, Callable[[], object]] = {
        "q": lambda: attend(q[0], k, v, mechanism),
        "q ": lambda: attend(q.long(), k, v, mechanism),
        "k": lambda: attend(q, k[..., :0], v, mechanism),
        "k ": lambda: attend(q[:, :3], *(t[:, :1].expand(2, 2, 5, -1) for t in (k, v)), mechanism),
        "v": lambda: attend(q, k, v[:, :, :4], mechanism),
        "v ": lambda: attend(q, k, v.to(torch.float32 if case.kind != torch.float32 else torch.float64), mechanism),
        "mask": lambda: attend(q, k, v, mechanism, torch.zeros(5, 5)),  # type: ignore[arg-type]
        "mask ": lambda: attend(q, k, v, mechanism, padding([1, 2, 3])),
        "mask  ": lambda: attend(q, k, v, mechanism, dense(torch.ones(5, 4, dtype=torch.bool))),
        "path": lambda: attend(q, k, v, mechanism, path="nowhere"),
    }
    for name, mistake in wrong.items():
        try:
            mistake()
        except ValueError as said:
            if not str(said).startswith(name.strip()):
                raise Broken(f"the error for a wrong {name.strip()} does not name it: {said}") from None
        else:
            raise Broken(f"a wrong {name.strip()} passes")


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("streamed", "whole = streamed = streamed in any chunks", _streamed, _no_stream, square=True),
        Law("forked", "a forked, reordered or cropped state is its own history", _forked, _no_stream, square=True),
        Law("batched", "batch = one by one", _batched, always),
        Law("padded", "padded = unpadded", _padded, always, square=True),
        Law("weights", "weights ≥ 0, rows sum to 1, weights @ v = output, asking changes nothing", _weighed, always),
        Law("empty", "a query with no visible key gives exactly 0, and finite gradients", _blind, always, square=True),
        Law(
            "leakless", "nothing masked leaks, not even NaN, and gets gradient exactly 0", _leakless, _no_hidden, SHORT
        ),
        Law("permuted", "permuted tokens give permuted outputs", _permuted, _positional, square=True),
        Law("gradients", "gradients pass gradcheck", _differentiable, _double_only, SHORT),
        Law("extremes", "scores of ±1e4 stay finite", _extreme, always),
        Law("groups", "query head h reads key/value head h // (H // G)", _grouped, _ungrouped),
        Law("paths", "every path agrees with the plain formula, forward and backward", _paths_agree, always),
        Law("cost", "FLOPs equal the counted ones, state bytes the held ones", _counted, always, SHORT),
        Law("refusals", "bad input is an error that names the argument, before any compute", _refusing, always, (1,)),
    )
}
