"""The law of cost: FLOPs as they are counted, bytes of states as they are held."""

from dataclasses import replace
from typing import Any

import torch

from regard.core.attention import attend
from regard.core.calls.call import Call, ordered
from regard.core.cost import Work, cost, count_flops
from regard.core.families.features import RECENT
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import HEADS, Broken, Case, Triple, apply, in_dtype
from regard.core.laws.streams import start
from regard.core.masks import Mask, causal
from regard.core.paths import reference


def costs_agree(mechanism: Mechanism, case: Case) -> None:
    """Stated FLOPs are the counted ones, and stated bytes of states those that are held."""
    # The stated FLOPs are the formula's; PyTorch counts those of the operators it runs.
    if case.device != "cpu":
        case, mechanism = replace(case, device="cpu"), in_dtype(mechanism, case.kind, "cpu")
    q, k, v = case.tensors()
    rule = case.rule()
    work = _work(case, rule)
    stated = cost(mechanism, work)
    if case.queries and case.keys and case.batch:
        counted = _count_flops(mechanism, case, (q, k, v), rule, stated.form)
        if counted != stated.flops:
            raise Broken(f"{stated.flops} FLOPs stated, {counted} counted")
    if mechanism.streams(case.qk_length) is None:
        _counted_stream(mechanism, case)


@torch.no_grad()
def _counted_stream(mechanism: Mechanism, case: Case) -> None:
    """The bytes of a state after all tokens; the FLOPs of a decode step over a state of few tokens, since longer ones
    of kernel mechanisms fold many tokens at once, which the cost spreads over the steps."""
    tokens = replace(case, queries=case.keys).tensors()
    work = replace(_work(case, causal), cached=True)

    def after(count: int, capacity: int) -> Any:
        state, (q, k, v) = start(mechanism, case, capacity), apply(lambda t: t[:, :, :count], tokens)
        return mechanism.extend(q, k, v, state, causal)[1] if count else state

    stated, actual = cost(mechanism, work).state_bytes, after(case.keys, case.keys).nbytes
    if actual != stated:
        raise Broken(f"{stated} bytes of state stated, {actual} held after {case.keys} tokens")
    keys = min(case.keys, RECENT // 2)
    state = after(max(0, keys - 1), keys)
    if keys > 1 and case.batch and state.history() is None:  # over keys and values a step is the formula
        q, k, v = apply(lambda t: t[:, :, keys - 1 : keys], tokens)
        counted = count_flops(lambda: mechanism.extend(q, k, v, state, causal))
        flops = cost(mechanism, replace(work, query_length=1, key_length=keys)).flops
        if counted != flops:
            raise Broken(f"{flops} FLOPs stated for a decode step over {keys} tokens, {counted} counted")


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
        cached=False,
        mask=rule,
    )


@torch.no_grad()
def _count_flops(mechanism: Mechanism, case: Case, tensors: Triple, rule: Mask | None, form: str) -> int:
    """FLOPs as torch counts them: of the linear form as it runs; of the score form those of the plain formula, with the
    visible share of what the pairs cost."""
    q, k, v = tensors
    if form == "linear":
        return count_flops(lambda: attend(q, k, v, mechanism, rule))
    whole = count_flops(lambda: reference.run(Call(mechanism, q, k, v, None)))
    none, rule = (q[:, :, :0], k[:, :, :0]), ordered(mechanism, rule)
    tokens = count_flops(lambda: mechanism.compare_heads(q, none[1]))
    tokens += count_flops(lambda: mechanism.compare_heads(none[0], k))
    tokens -= count_flops(lambda: mechanism.compare_heads(*none))
    share = 1 if rule is None else rule.visible(case.batch, 1, case.queries, case.keys).double().mean().item()
    return tokens + round((whole - tokens) * share)
