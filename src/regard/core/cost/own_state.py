"""The cost of a mechanism with its own state: real tokens extend real states, which are measured."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from regard.core.cost.counting import count_flops, interpolation
from regard.core.cost.work import Cost, Work
from regard.core.masks import causal
from regard.core.masks.structure import FOREVER, structure_of
from regard.core.tensors import cast, made_on, probe

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism

STEP = 128
"""States of up to three times as many tokens are measured at their length. For longer ones, states of one, two and
three times as many tokens show how the state and its steps grow; one that the third of them does not change has stopped
growing. Where growth slows down, the step is doubled, up to `LONGEST_STEP`, so that its end is not missed."""
LONGEST_STEP = 1024


def own_state_cost(mechanism: "Mechanism", work: Work, formula: Cost) -> Cost:
    """The cost of a mechanism with its own state, given the cost of its formula, which computes whole sequences.

    The state's bytes are those of real states. A decode step is one of `extend`: its FLOPs are counted as it runs, and
    it moves its tokens and reads the state once.
    """
    if mechanism.streams(work.qk_length) is not None:
        return formula
    state_bytes, notes = _state_bytes(mechanism, work, work.key_length), [formula.note] if formula.note else []
    longest = max(tokens for tokens, _ in _points(mechanism, work, work.key_length))
    if work.key_length > longest:
        notes.append(f"its state is measured up to {longest} tokens and extrapolated")
    counted = replace(formula, state_bytes=state_bytes, note="; ".join(notes))
    if not (work.cached and work.query_length < work.key_length):
        return counted
    structure = structure_of(work.rule, work.query_length, work.key_length)
    if (reason := mechanism.streams(work.qk_length, structure)) is not None:
        return replace(counted, note="; ".join([*notes, f"counted as its formula, not as a decode step: {reason}"]))
    return replace(
        counted,
        flops=_step_flops(mechanism, work),
        bytes=replace(work, key_length=work.query_length, mask=None).io_bytes + state_bytes,
        activation_bytes=state_bytes,  # the longer state, beside the one that it was made from
        form="linear" if _stops_growing(mechanism, work) else "score",
    )


def _state_bytes(mechanism: "Mechanism", work: Work, length: int) -> int:
    """Bytes of the states of a batch after `length` tokens."""
    points = _points(mechanism, work, length)
    return work.batch * round(sum(share * _row_bytes(mechanism, work, tokens) for tokens, share in points))


def _row_bytes(mechanism: "Mechanism", work: Work, length: int) -> int:
    """Bytes of the state of one sequence, measured."""

    def measure(tokens: int) -> int:
        return int(_extended(cast(mechanism, work.dtype), work, tokens, tokens).nbytes)

    return _once(mechanism, work, measure, length)


def _points(mechanism: "Mechanism", work: Work, length: int) -> list[tuple[int, Fraction]]:
    """Lengths to measure at for a history of `length` tokens, each with its factor."""
    step = STEP
    while length > 3 * step:
        first, second, last = (_row_bytes(mechanism, work, times * step) for times in (1, 2, 3))
        if last <= second:  # it has stopped growing, or never grew
            return [(3 * step, Fraction(1))]
        if last - second >= second - first:
            return interpolation(length, step)
        if step == LONGEST_STEP:  # a parabola would bend down to less than nothing
            x = Fraction(length, step)
            return [(2 * step, 3 - x), (3 * step, x - 2)]
        step *= 2
    return [(length, Fraction(1))]


def _stops_growing(mechanism: "Mechanism", work: Work) -> bool:
    """Whether a longer history makes the state no larger, in the end."""
    return len(_points(mechanism, work, FOREVER)) == 1


def _step_flops(mechanism: "Mechanism", work: Work) -> int:
    """FLOPs of extending the states of a batch by `query_length` tokens."""

    def measure(before: int, new: int) -> int:
        computing = cast(mechanism, work.dtype)
        state = _extended(computing, work, before, before + new)
        return count_flops(lambda: _extend(computing, work, state, new))

    before = work.key_length - work.query_length
    histories, steps = _points(mechanism, work, before), interpolation(work.query_length, STEP)
    flops = sum(
        share * part * _once(mechanism, work, measure, before, new)
        for (before, share), (new, part) in product(histories, steps)
    )
    return work.batch * round(flops)


_measured: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Measures by mechanism and sizes: a crossover asks for the same hundreds of times."""


def _once(mechanism: "Mechanism", work: Work, measure: Callable[..., int], *tokens: int) -> int:
    measured: dict[Any, int] = _measured.setdefault(mechanism, {})
    sizes = work.num_heads, work.num_kv_heads, work.qk_length, work.value_length, work.dtype, work.rule is None
    key = *tokens, *sizes  # of another length for steps than for states
    if key not in measured:
        measured[key] = measure(*tokens)
    return measured[key]


def _extended(mechanism: "Mechanism", work: Work, tokens: int, capacity: int) -> Any:
    """The state of one sequence after some tokens."""
    device = probe(mechanism, (0,)).device
    state = mechanism.start(
        batch=1,
        num_kv_heads=work.num_kv_heads,
        qk_length=work.qk_length,
        value_length=work.value_length,
        capacity=capacity,
        dtype=work.dtype,
        device=device,
    )
    with torch.no_grad():
        return _extend(mechanism, work, state, tokens) if tokens else state


def _extend(mechanism: "Mechanism", work: Work, state: Any, tokens: int) -> Any:
    device, generator = probe(mechanism, (0,)).device, torch.Generator(device="cpu").manual_seed(state.length)

    def draw(heads: int, length: int) -> Tensor:
        drawn = torch.randn(1, heads, tokens, length, generator=generator, device="cpu")
        return drawn.to(device, work.dtype)

    q, k = draw(work.num_heads, work.qk_length), draw(work.num_kv_heads, work.qk_length)
    with made_on(device):
        v = draw(work.num_kv_heads, work.value_length)
        return mechanism.extend(q, k, v, state, None if work.rule is None else causal)[1]
