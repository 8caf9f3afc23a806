"""The laws, one function each. `LAWS` lists them with their statements and where they do not apply."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from regard.core.attention import attend, weights
from regard.core.calls.call import Call, ordered
from regard.core.cost import Work, cost, count_flops
from regard.core.families.features import RECENT
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import (
    HEADS,
    LENGTHS,
    SHORT,
    Broken,
    Case,
    Triple,
    agrees,
    apply,
    error,
    exact_output,
    in_dtype,
    plain_output,
    within_budget,
)
from regard.core.masks import Mask, causal, dense, global_tokens, padding, window
from regard.core.masks.structure import EVERYTHING, FOREVER, structure_of
from regard.core.paths import reference
from regard.core.tensors import weighs_tokens


@dataclass(frozen=True)
class Law:
    """A statement, how to test it on a case, and where it does not apply."""

    name: str
    statement: str
    test: Callable[[Mechanism, Case], None]
    excuse: Callable[[Mechanism, Case], str | None]
    """Why the law does not apply to a mechanism under a mask and dtype; None where it applies."""
    lengths: tuple[int, ...] = LENGTHS
    square: bool = False
    """Whether it needs as many queries as keys."""


def always(mechanism: Mechanism, case: Case) -> str | None:
    """The law always applies."""
    return None


def _pieces(case: Case) -> list[int]:
    """A random way to split the queries: single tokens at first, then larger pieces."""
    sizes: list[int] = []
    generator, left = case.generator, case.queries
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
        device=case.device,
    )


def _causal_rule(case: Case, keys: int | None = None) -> Mask:
    rule = case.rule(keys)
    return causal if rule is None else causal & rule


def _stream(
    mechanism: Mechanism, case: Case, tensors: Triple, state: Any, sizes: list[int], bias: Tensor | None = None
) -> tuple[Tensor, Any]:
    q, k, v = tensors
    parts, at = [q.new_zeros(*q.shape[:2], 0, v.shape[3])], state.length
    for size in sizes:
        piece = slice(at, at + size)
        rule, rows = _causal_rule(case, at + size), None if bias is None else bias[piece, : at + size]
        out, state = mechanism.extend(q[:, :, piece], k[:, :, piece], v[:, :, piece], state, mask=rule, bias=rows)
        parts.append(out)
        at += size
    return torch.cat(parts, dim=2), state


def _no_stream(mechanism: Mechanism, case: Case) -> str | None:
    return mechanism.streams(case.qk_length, structure_of(_causal_rule(case), case.queries, case.keys))


@torch.no_grad()
def _streamed(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    out, state = _stream(mechanism, case, (q, k, v), _start(mechanism, case, case.keys), _pieces(case))
    if state.length != case.queries:
        raise Broken(f"the state says it has met {state.length} tokens, not {case.queries}")
    agrees("the stream", out, mechanism, q, k, v, _causal_rule(case))
    agrees("the whole", attend(q, k, v, mechanism, _causal_rule(case)), mechanism, q, k, v, _causal_rule(case))


@torch.no_grad()
def _forked(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    half, rest = case.queries // 2, case.queries - case.queries // 2
    _, early = _stream(mechanism, case, (q, k, v), _start(mechanism, case, case.keys), [half] if half else [])
    other = apply(lambda t: torch.cat([t[:, :, :half], t[:, :, half:].flip(2)], dim=2), (q, k, v))
    # The two continuations take turns, so that a write into the other's history would show.
    stories, states = [(q, k, v), other], [early, early]
    outs: list[list[Tensor]] = [[], []]
    for size in (rest - rest // 2, rest // 2):
        for turn in (0, 1):
            if size:
                out, states[turn] = _stream(mechanism, case, stories[turn], states[turn], [size])
                outs[turn].append(out)
    for turn, (story, parts) in enumerate(zip(stories, outs, strict=True)):
        rule, future = _causal_rule(case), slice(half, None)
        exact, plain = exact_output(mechanism, *story, rule), plain_output(mechanism, *story, rule)
        if parts:
            out = torch.cat(parts, dim=2)
            within_budget(f"fork {turn + 1}", out, exact[:, :, future], plain[:, :, future])
    if early.length != half:
        raise Broken(f"a fork changed the length of its origin from {half} to {early.length}")
    _reordered(mechanism, case, (q, k, v), early, [rest] if rest else [])
    _cropped(mechanism, case, (q, k, v), early, [rest] if rest else [])


def _reordered(mechanism: Mechanism, case: Case, tensors: Triple, early: Any, rest: list[int]) -> None:
    rule = _causal_rule(case)
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
    full = _stream(mechanism, case, (q, k, v), early, rest)[1]
    if full.earliest > early.length:
        return  # running sums cannot be cropped so far back, and `earliest` says so
    out, _ = _stream(mechanism, case, (q, k, v), full.crop(early.length), rest)
    piece, rule = slice(early.length, None), _causal_rule(case)
    exact, plain = exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule)
    within_budget("a cropped state", out, exact[:, :, piece], plain[:, :, piece])


@torch.no_grad()
def _batched(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    together = attend(q, k, v, mechanism, rule)
    agrees("the batch", together, mechanism, q, k, v, rule)
    visible = None if rule is None else rule.visible(case.batch, q.shape[1], case.queries, case.keys)
    for row in range(case.batch):
        alone = q[row : row + 1], k[row : row + 1], v[row : row + 1]
        row_rule = rule if visible is None or visible.shape[0] == 1 else _row(rule, case, row)
        agrees("a row alone", attend(*alone, mechanism, row_rule), mechanism, *alone, row_rule)
        exact, plain = exact_output(mechanism, *alone, row_rule), plain_output(mechanism, *alone, row_rule)
        within_budget("a row in the batch", together[row : row + 1], exact, plain)


def _row(rule: Mask | None, case: Case, row: int) -> Mask | None:
    """The mask of one row: padding as an interval if there is nothing else, otherwise that row of the dense mask."""
    structure = structure_of(rule, case.queries, case.keys)
    if structure == EVERYTHING:
        return None
    assert rule is not None
    if structure.rest is None and structure.rows is not None and not structure.windowed:
        low, high = structure.rows[row]
        place = torch.arange(case.keys)
        pads = padding(valid=((place >= low) & (place < high))[None])
        return causal & pads if structure.causal else pads
    return dense(rule.visible(case.batch, 1, case.queries, case.keys)[row : row + 1])


def _no_padding(mechanism: Mechanism, case: Case) -> str | None:
    """Why a mechanism is not defined under padding, which the law adds to the mask."""
    rule, pads = case.rule(), padding([case.keys // 2] * case.batch)
    return mechanism.refuses(Call(mechanism, *case.tensors(), pads if rule is None else rule & pads))


@torch.no_grad()
def _padded(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    lengths = [min(n, case.keys) for n in case.lengths(salt=2)]
    left = case.mask == "padding left"
    inner = None if case.mask.startswith("padding") else case.rule()
    if case.mask == "combined":
        inner = causal & (window(before=4) | global_tokens(1))
    place = torch.arange(case.keys)
    ends = torch.tensor(lengths, dtype=torch.long)[:, None]
    pads = padding(valid=place >= case.keys - ends) if left else padding(lengths)
    rule = pads if inner is None else inner & pads
    out = attend(q, k, v, mechanism, rule)
    for row, length in enumerate(lengths):
        real = slice(case.keys - length, case.keys) if left else slice(0, length)
        alone = q[row : row + 1, :, real], k[row : row + 1, :, real], v[row : row + 1, :, real]
        exact, plain = exact_output(mechanism, *alone, inner), plain_output(mechanism, *alone, inner)
        within_budget("a padded row", out[row : row + 1, :, real], exact, plain)


@torch.no_grad()
def _weighed(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = case.rule()
    before = attend(q, k, v, mechanism, rule)
    table = weights(q, k, mechanism, rule)
    if not torch.equal(before, attend(q, k, v, mechanism, rule)):
        raise Broken("asking for the weights changed the output")
    if table.numel() == 0:
        return
    visible = None if rule is None else _visible(rule, case)
    exact, plain = exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule)
    within_budget("weights @ v", mechanism.mix(table, v, visible), exact, plain)
    within_budget("the output", before, exact, plain)
    if weighs_tokens(mechanism, case.qk_length) and case.queries:
        some = weights(q, k, mechanism, rule, rows=[-1], heads=[2])
        if not torch.allclose(some, table[:, [2], -1:], rtol=0, atol=4 * torch.finfo(case.kind).eps * _size(table)):
            raise Broken("the weights of one row and head differ from the same row and head among all")


def _visible(rule: Mask, case: Case) -> Tensor:
    return rule.visible(case.batch, 4, case.queries, case.keys).to(case.device)


def _size(tensor: Tensor) -> float:
    return max(1.0, tensor.abs().max().item())


@torch.no_grad()
def _normalised(mechanism: Mechanism, case: Case) -> None:
    q, k, _ = case.tensors()
    rule = ordered(mechanism, case.rule())
    table = weights(q, k, mechanism, rule)
    if table.numel() == 0:
        return
    if not bool((table >= 0).all()):
        raise Broken(f"a weight is {table.min().item():.3g}")
    total = table.double().sum(-1)
    none = total == 0
    size = {torch.float64: 1e-12, torch.float32: 1e-5}.get(case.kind, torch.finfo(case.kind).eps)
    if not bool(((total - 1).abs() <= size)[~none].all()):
        raise Broken(f"a row of weights sums to {total[~none].flatten()[(total[~none] - 1).abs().argmax()].item():.6g}")
    if not weighs_tokens(mechanism, case.qk_length):
        return
    visible = table.new_ones(1, 1, 1, 1).bool() if rule is None else _visible(rule, case)
    sees = visible.any(-1).expand(case.batch, 4, case.queries)
    # Only a similarity that can be 0 for every visible key may give a row of zero weights.
    if type(mechanism).weigh is not Mechanism.weigh and bool((none & sees).any()):
        raise Broken("a query that sees a key has no weights")
    if bool((~none & ~sees).any()):
        raise Broken("a query that sees no key has weights")


def _blind(mechanism: Mechanism, case: Case) -> None:
    q, k, v = (t.requires_grad_() for t in case.tensors())
    rule, nobody = case.rule(), padding([0] * case.batch)
    out = attend(q, k, v, mechanism, nobody if rule is None else rule & nobody)
    if out.abs().sum() != 0:
        raise Broken(f"a query with no visible key gets {out.abs().max().item():.3g}, not 0")
    if case.keys and weights(q, k, mechanism, nobody if rule is None else rule & nobody).abs().sum() != 0:
        raise Broken("a query with no visible key has weights")
    _finite_gradients(out, (q, k, v))
    if weighs_tokens(mechanism, case.qk_length):
        first = attend(torch.cat([q, q], 2), k, v, mechanism, _past(case))
        if first[:, :, : case.queries * 2 - case.keys].abs().sum() != 0:
            raise Broken("a query before the first key gets something")
        _finite_gradients(first, (q, k, v))


def _past(case: Case) -> Mask:
    """A causal mask for twice the queries, so that the first of them are before the first key."""
    return causal & padding([case.keys] * case.batch)


def _finite_gradients(out: Tensor, inputs: tuple[Tensor, ...], to: Tensor | None = None) -> list[Tensor]:
    grads = torch.autograd.grad(
        out, inputs, torch.ones_like(out) if to is None else to, allow_unused=True, materialize_grads=True
    )
    for name, grad in zip("qkv", grads, strict=True):
        if not bool(grad.isfinite().all()):
            raise Broken(f"the gradient of {name} is not finite")
    return list(grads)


def _leakless(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    rule = ordered(mechanism, case.rule())
    if rule is None or 0 in (case.batch, case.queries, case.keys):
        return
    visible = _visible(rule, case).expand(case.batch, 4, case.queries, case.keys)
    if bool(visible.all()):
        return
    hidden = ~visible.any(2).any(1)  # keys that no query sees, and one that some may see
    bad = hidden.clone()
    tokens = weighs_tokens(mechanism, case.qk_length)
    if tokens:
        bad[:, int(torch.randint(0, case.keys, (1,), generator=case.generator))] = True
    sees = (visible & bad[:, None, None]).any(-1)
    for poison in (float("nan"), float("inf"), float("-inf"), 50.0):
        dirty_k, dirty_v = (
            torch.where(bad[:, None, :, None], torch.full_like(t, poison), t).requires_grad_() for t in (k, v)
        )
        query = q.clone().requires_grad_()
        out = attend(query, dirty_k, dirty_v, mechanism, rule)
        with torch.no_grad():  # without gradients other paths serve, or other code of the same path
            underived = attend(query, dirty_k, dirty_v, mechanism, rule)
        clean = k.masked_fill(bad[:, None, :, None], 0), v.masked_fill(bad[:, None, :, None], 0)
        exact, plain = exact_output(mechanism, q, *clean, rule), plain_output(mechanism, q, *clean, rule)
        kept = ~sees[..., None]
        if not tokens:
            kept = ~hidden[:, None, :, None].expand(case.batch, 4, case.queries, 1)
        zero = q.new_zeros(())
        for result in (out.detach(), underived):
            within_budget(
                f"a query that does not see a masked {poison}",
                torch.where(kept, result, zero.to(out.dtype)),
                torch.where(kept, exact, zero.double()),
                torch.where(kept, plain, zero.to(plain.dtype)),
            )
            if poison != 50 and tokens and bool(result[sees].isfinite().any()):
                raise Broken(f"a visible {poison} is hidden from a query that sees it")
        grads = _finite_gradients(out, (query, dirty_k, dirty_v), kept.expand_as(out).to(out.dtype))
        for name, grad in zip("kv", grads[1:], strict=True):
            if grad[bad[:, None].expand(grad.shape[:3])].abs().sum() != 0:
                raise Broken(f"gradient reaches a masked {name}")


def _no_hidden(mechanism: Mechanism, case: Case) -> str | None:
    return "no key is hidden" if case.mask == "none" and not mechanism.ordered else None


@torch.no_grad()
def _permuted(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    order = torch.randperm(case.keys, generator=case.generator)
    moved = apply(lambda t: t[:, :, order], (q, k, v))
    rule = case.rule()
    if rule is None:
        other = None
    else:
        valid = structure_of(rule, case.queries, case.keys).valid(case.keys)
        other = None if valid is None else padding(valid=valid[:, order])
    agrees("the whole", attend(q, k, v, mechanism, rule), mechanism, q, k, v, rule)
    exact, plain = exact_output(mechanism, q, k, v, rule), plain_output(mechanism, q, k, v, rule)
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
        torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mechanism, rule), (q, k, v), fast_mode=True)
    except GradcheckError as wrong:
        raise Broken(f"gradcheck fails: {str(wrong).splitlines()[0]}") from None


def _double_only(mechanism: Mechanism, case: Case) -> str | None:
    return (
        None if case.kind == torch.float64 else "derivatives are compared in float64; the law of paths covers the rest"
    )


def _extreme(mechanism: Mechanism, case: Case) -> None:
    q, k, v = case.tensors()
    if 0 in (case.batch, case.queries, case.keys):
        return
    # Scores of ±1e4: q·k = ±100² along one direction.
    direction = torch.nn.functional.normalize(torch.ones(case.qk_length), dim=0).to(q)
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
    wide = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    out = attend(q, k, v, mechanism, rule)
    within_budget(
        "grouped heads", out, exact_output(mechanism, q, *wide, rule), plain_output(mechanism, q, *wide, rule)
    )


def _ungrouped(mechanism: Mechanism, case: Case) -> str | None:
    return "every query head has keys of its own" if case.heads == "MHA" else None


def _paths_agree(mechanism: Mechanism, case: Case) -> None:
    rule = case.rule()

    def run(compute: Callable[..., Tensor], *tensors: Tensor) -> list[Tensor]:
        leaves = tuple(t.detach().clone().requires_grad_() for t in tensors)
        out = compute(*leaves)
        to = torch.randn(out.shape, generator=case.generator, dtype=torch.float64).to(out)
        return [out.detach(), *_finite_gradients(out, leaves, to)]

    tensors = case.tensors()
    exact = run(lambda q, k, v: exact_output(mechanism, q, k, v, rule), *(t.double() for t in tensors))
    plain = run(lambda q, k, v: plain_output(mechanism, q, k, v, rule), *tensors)
    call = Call(mechanism, *apply(lambda t: t.detach().requires_grad_(), tensors), rule)
    for path in mechanism.paths():
        if path.cannot(call) is not None:  # paths without a backward pass are covered by the laws without gradients
            continue
        results = run(lambda q, k, v, name=path.name: attend(q, k, v, mechanism, rule, path=name), *tensors)
        for what, result, good, rough in zip(("output", "q", "k", "v"), results, exact, plain, strict=True):
            name = f"path {path.name!r}: " + (what if what == "output" else f"the gradient of {what}")
            within_budget(name, result, good, rough, gradient=what != "output")


def _learned(mechanism: Mechanism, case: Case) -> None:
    if 0 in (case.batch, case.queries, case.keys):
        return
    q, k, v = _short(case)
    streams = mechanism.streams(case.qk_length, structure_of(_causal_rule(case), FOREVER, FOREVER)) is None
    rule = _causal_rule(case) if streams else case.rule()
    term = torch.randn(case.queries, case.keys, generator=case.generator, dtype=case.kind).to(q).requires_grad_()
    bias = term if mechanism.refuses(Call(mechanism, q, k, v, rule, term)) is None else None
    learned = (*mechanism.parameters(), *(() if bias is None else (bias,)))
    call = Call(mechanism, q, k, v, rule, bias)
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        f"path {path.name!r}": partial(attend, mechanism=mechanism, mask=rule, bias=bias, path=path.name)
        for path in mechanism.paths()
        if path.cannot(call) is None
    }
    if streams:
        state = _start(mechanism, case, case.keys)
        ways["the stream"] = lambda q, k, v: _stream(mechanism, case, (q, k, v), state, _pieces(case), bias)[0]
    to = torch.randn(*q.shape[:3], case.value_length, generator=case.generator, dtype=case.kind).to(q)
    # Gradients of the learned tensors alone; then of the tokens too.
    plain, derived = (q, k, v), apply(lambda t: t.clone().requires_grad_(), (q, k, v))
    for tokens, leaves in ((plain, learned), (derived, (*learned, *derived))):
        if not leaves:
            continue
        exact = _gradients(attend(*tokens, mechanism, rule, bias=bias, path="reference"), leaves, to)
        names = [f"learned tensor {number + 1}" for number in range(len(learned))] + [*"qkv"]
        for way, compute in ways.items():
            for name, grad, good in zip(names, _gradients(compute(*tokens), leaves, to), exact, strict=False):
                within_budget(f"{way}: the gradient of {name}", grad, good, good, gradient=True)


def _short(case: Case) -> Triple:
    """Short queries and keys: near a zero of a polynomial similarity, sums and second derivatives lose digits to
    cancellation."""
    q, k, v = case.tensors()
    return q / 4, k / 4, v


def _gradients(out: Tensor, leaves: tuple[Tensor, ...], to: Tensor) -> tuple[Tensor, ...]:
    if not out.requires_grad:  # nothing is visible
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    return torch.autograd.grad(out, leaves, to, allow_unused=True, materialize_grads=True)


def _curved(mechanism: Mechanism, case: Case) -> None:
    if 0 in (case.batch, case.queries, case.keys):
        return
    tokens = apply(lambda t: t.requires_grad_(), _short(case))
    leaves = (*tokens, *mechanism.parameters())
    call = Call(mechanism, *tokens, case.rule())

    def second(path: str) -> tuple[Tensor, ...]:
        out = attend(*tokens, mechanism, case.rule(), path=path)
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        first = torch.autograd.grad(out.sum() + out.square().sum(), leaves, create_graph=True, **options)
        total = out.sum() + sum(grad.square().sum() for grad in first)
        return torch.autograd.grad(total, leaves, **options)

    exact = second("reference")
    for path in mechanism.paths():
        if path.name == "reference" or path.cannot(call) is not None:
            continue
        try:
            results = second(path.name)
        except RuntimeError as refusal:  # refused by torch or by the path
            if "not implemented" not in str(refusal):
                raise
            continue
        for name, result, good in zip((*"qkv", *["a learned tensor"] * len(leaves)), results, exact, strict=False):
            size = max(1.0, good.abs().max().item())
            if not error(result, good) <= 1e-9 * size:
                raise Broken(f"path {path.name!r}: the second derivative by {name} is off by {error(result, good):.2g}")


def _counted(mechanism: Mechanism, case: Case) -> None:
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
        state, (q, k, v) = _start(mechanism, case, capacity), apply(lambda t: t[:, :, :count], tokens)
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


Mistake = tuple[str, Callable[[], object]]
"""The argument that is wrong, and the call."""


def _refusing(mechanism: Mechanism, case: Case) -> None:
    q, k, v = replace(case, batch=2, queries=5, keys=5).tensors()
    other_dtype = torch.float32 if case.kind != torch.float32 else torch.float64
    mistakes: list[Mistake] = [
        ("q", lambda: attend(q[0], k, v, mechanism)),
        ("q", lambda: attend(q.long(), k, v, mechanism)),
        ("k", lambda: attend(q, k[..., :0], v, mechanism)),
        ("k", lambda: attend(q[:, :3], k[:, :1].expand(2, 2, 5, -1), v[:, :1].expand(2, 2, 5, -1), mechanism)),
        ("v", lambda: attend(q, k, v[:, :, :4], mechanism)),
        ("v", lambda: attend(q, k, v.to(other_dtype), mechanism)),
        ("mask", lambda: attend(q, k, v, mechanism, torch.zeros(5, 5))),
        ("mask", lambda: attend(q, k, v, mechanism, padding([1, 2, 3]))),
        ("mask", lambda: attend(q, k, v, mechanism, dense(torch.ones(5, 4, dtype=torch.bool)))),
        ("path", lambda: attend(q, k, v, mechanism, path="nowhere")),
    ]
    bias = torch.zeros(5, 5, dtype=case.kind)
    if mechanism.refuses(Call(mechanism, q, k, v, bias=bias)) is not None:
        mistakes.append(("bias", lambda: attend(q, k, v, mechanism, bias=bias)))
    for argument, call in mistakes:
        try:
            call()
        except ValueError as error:
            if not str(error).startswith(argument):
                raise Broken(f"the error for a wrong {argument} does not name it: {error}") from None
        else:
            raise Broken(f"a wrong {argument} passes")


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law("streamed", "whole = streamed = streamed in any chunks", _streamed, _no_stream, square=True),
        Law("forked", "a forked, reordered or cropped state is its own history", _forked, _no_stream, square=True),
        Law("batched", "batch = one by one", _batched, always),
        Law("padded", "padded = unpadded", _padded, _no_padding, square=True),
        Law("weights", "weights @ v = output, asking changes nothing, chosen rows are those of all", _weighed, always),
        Law("normalised", "weights ≥ 0, rows sum to 1", _normalised, always),
        Law(
            "empty",
            "a query with no visible key gives exactly 0, and finite gradients",
            _blind,
            _no_padding,
            square=True,
        ),
        Law(
            "leakless", "nothing masked leaks, not even NaN, and gets gradient exactly 0", _leakless, _no_hidden, SHORT
        ),
        Law("permuted", "permuted tokens give permuted outputs", _permuted, _positional, square=True),
        Law("gradients", "gradients pass gradcheck", _differentiable, _double_only, SHORT[:-1]),
        Law("extremes", "scores of ±1e4 stay finite", _extreme, always),
        Law("groups", "query head h reads key/value head h // (H // G)", _grouped, _ungrouped),
        Law("paths", "every path agrees with the plain formula, forward and backward", _paths_agree, always),
        Law(
            "learned",
            "what is learned gets the plain formula's gradient, whole and streamed",
            _learned,
            _double_only,
            SHORT,
            square=True,
        ),
        Law("curved", "second derivatives are the plain formula's, or refused", _curved, _double_only, SHORT),
        Law(
            "cost",
            "FLOPs equal the counted ones, whole and streamed; state bytes the held ones",
            _counted,
            always,
            SHORT,
        ),
        Law("refusals", "bad input is an error that names the argument, before any compute", _refusing, always, (1,)),
    )
}
