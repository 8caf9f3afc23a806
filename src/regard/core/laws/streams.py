"""Laws of streams: what is computed from states in any pieces, forks and orders is what is computed whole."""

from typing import Any

import torch
from torch import Tensor

from regard.core.attention import attend
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import HEADS, Broken, Case, Triple, agrees, apply, exact_output, plain_output, within_budget
from regard.core.masks import Mask, causal
from regard.core.masks.structure import structure_of


def pieces(case: Case) -> list[int]:
    """A random way to split the queries: single tokens at first, then larger pieces."""
    sizes: list[int] = []
    generator, left = case.generator, case.queries
    while left:
        most = 1 if len(sizes) < 2 else min(left, 97)
        sizes.append(int(torch.randint(1, most + 1, (1,), generator=generator)))
        left -= sizes[-1]
    return sizes


def start(mechanism: Mechanism, case: Case, capacity: int) -> Any:
    """An empty state for a case."""
    return mechanism.start(
        batch=case.batch,
        num_kv_heads=HEADS[case.heads][1],
        qk_length=case.qk_length,
        value_length=case.value_length,
        capacity=capacity,
        dtype=case.kind,
        device=case.device,
    )


def causal_rule(case: Case, keys: int | None = None) -> Mask:
    """The mask of a case, and causality."""
    rule = case.rule(keys)
    return causal if rule is None else causal & rule


def stream(
    mechanism: Mechanism, case: Case, tensors: Triple, state: Any, sizes: list[int], bias: Tensor | None = None
) -> tuple[Tensor, Any]:
    """The output of a state that is extended by pieces of these sizes, and the longer state."""
    q, k, v = tensors
    parts, at = [q.new_zeros(*q.shape[:2], 0, v.shape[3])], state.length
    for size in sizes:
        piece = slice(at, at + size)
        rule, rows = causal_rule(case, at + size), None if bias is None else bias[piece, : at + size]
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rule, bias=rows)
        parts.append(out)
        at += size
    return torch.cat(parts, dim=2), state


def no_stream(mechanism: Mechanism, case: Case) -> str | None:
    """Why a mechanism has no token-by-token form under the mask of a case; None if it has one."""
    return mechanism.streams(case.qk_length, structure_of(causal_rule(case), case.queries, case.keys))


@torch.no_grad()
def streamed(mechanism: Mechanism, case: Case) -> None:
    """Whole = streamed, in random pieces."""
    q, k, v = case.tensors()
    out, state = stream(mechanism, case, (q, k, v), start(mechanism, case, case.keys), pieces(case))
    if state.length != case.queries:
        raise Broken(f"the state says it has met {state.length} tokens, not {case.queries}")
    agrees("the stream", out, mechanism, q, k, v, causal_rule(case))
    agrees("the whole", attend(q, k, v, mechanism, causal_rule(case)), mechanism, q, k, v, causal_rule(case))


@torch.no_grad()
def forked(mechanism: Mechanism, case: Case) -> None:
    """Two continuations of one state, a reordered and a cropped one are histories of their own."""
    q, k, v = case.tensors()
    half, rest = case.queries // 2, case.queries - case.queries // 2
    _, early = stream(mechanism, case, (q, k, v), start(mechanism, case, case.keys), [half] if half else [])
    other = apply(lambda t: torch.cat([t[:, :, :half], t[:, :, half:].flip(2)], dim=2), (q, k, v))
    # The two continuations take turns, so that a write into the other's history would show.
    stories, states = [(q, k, v), other], [early, early]
    outs: list[list[Tensor]] = [[], []]
    for size in (rest - rest // 2, rest // 2):
        for turn in (0, 1):
            if size:
                out, states[turn] = stream(mechanism, case, stories[turn], states[turn], [size])
                outs[turn].append(out)
    for turn, (story, parts) in enumerate(zip(stories, outs, strict=True)):
        rule, future = causal_rule(case), slice(half, None)
        exact, plain = exact_output(mechanism, *story, rule), plain_output(mechanism, *story, rule)
        if parts:
            out = torch.cat(parts, dim=2)
            within_budget(f"fork {turn + 1}", out, exact[:, :, future], plain[:, :, future])
    if early.length != half:
        raise Broken(f"a fork changed the length of its origin from {half} to {early.length}")
    _reordered(mechanism, case, (q, k, v), early, [rest] if rest else [])
    _cropped(mechanism, case, (q, k, v), early, [rest] if rest else [])


def _reordered(mechanism: Mechanism, case: Case, tensors: Triple, early: Any, rest: list[int]) -> None:
    rule = causal_rule(case)
    if case.batch < 2 or not rest or structure_of(rule, case.queries, case.keys).paddings:
        return  # rows cannot be reordered under padding, which stays with the row's index
    index = torch.arange(case.batch).roll(1)
    q, k, v = apply(lambda t: torch.cat([t[:, :, : early.length][index], t[:, :, early.length :]], dim=2), tensors)
    piece = slice(early.length, None)
    out, _ = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], early.reorder(index), mask=rule)
    exact, plain = exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule)
    within_budget("a reordered state", out, exact[:, :, piece], plain[:, :, piece])


def _cropped(mechanism: Mechanism, case: Case, tensors: Triple, early: Any, rest: list[int]) -> None:
    if not rest or not early.length:
        return
    q, k, v = tensors
    full = stream(mechanism, case, (q, k, v), early, rest)[1]
    if full.earliest > early.length:
        return  # running sums cannot be cropped so far back, and `earliest` says so
    out, _ = stream(mechanism, case, (q, k, v), full.crop(early.length), rest)
    piece, rule = slice(early.length, None), causal_rule(case)
    exact, plain = exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule)
    within_budget("a cropped state", out, exact[:, :, piece], plain[:, :, piece])
