"""Laws of outputs and weights: batches, padding, masks, permutations, large scores, groups of heads."""

import torch
from torch import Tensor

from regard.core.attention import attend, weights
from regard.core.calls.call import Call, ordered
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import Broken, Case, agrees, apply, exact_output, plain_output, within_budget
from regard.core.laws.derivatives import finite_gradients
from regard.core.masks import Mask, causal, dense, global_tokens, padding, window
from regard.core.masks.structure import EVERYTHING, structure_of
from regard.core.tensors import weighs_tokens


@torch.no_grad()
def batched(mechanism: Mechanism, case: Case) -> None:
    """A batch gives what each of its rows gives alone."""
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


def no_padding(mechanism: Mechanism, case: Case) -> str | None:
    """Why a mechanism is not defined under padding, which the law adds to the mask."""
    rule, pads = case.rule(), padding([case.keys // 2] * case.batch)
    return mechanism.refuses(Call(mechanism, *case.tensors(), pads if rule is None else rule & pads))


@torch.no_grad()
def padded(mechanism: Mechanism, case: Case) -> None:
    """A padded row gives what it gives without its padding."""
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
def weighed(mechanism: Mechanism, case: Case) -> None:
    """The weights times the values are the output, and asking for them changes nothing."""
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
def normalised(mechanism: Mechanism, case: Case) -> None:
    """Weights are at least 0, and each row sums to 1."""
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


def blind(mechanism: Mechanism, case: Case) -> None:
    """A query with no visible key gives 0 and has finite gradients."""
    q, k, v = (t.requires_grad_() for t in case.tensors())
    rule, nobody = case.rule(), padding([0] * case.batch)
    out = attend(q, k, v, mechanism, nobody if rule is None else rule & nobody)
    if out.abs().sum() != 0:
        raise Broken(f"a query with no visible key gets {out.abs().max().item():.3g}, not 0")
    if case.keys and weights(q, k, mechanism, nobody if rule is None else rule & nobody).abs().sum() != 0:
        raise Broken("a query with no visible key has weights")
    finite_gradients(out, (q, k, v))
    if weighs_tokens(mechanism, case.qk_length):
        first = attend(torch.cat([q, q], 2), k, v, mechanism, _past(case))
        if first[:, :, : case.queries * 2 - case.keys].abs().sum() != 0:
            raise Broken("a query before the first key gets something")
        finite_gradients(first, (q, k, v))


def _past(case: Case) -> Mask:
    """A causal mask for twice the queries, so that the first of them are before the first key."""
    return causal & padding([case.keys] * case.batch)


def leakless(mechanism: Mechanism, case: Case) -> None:
    """Nothing that is masked reaches an output or gets a gradient; what is visible is not hidden."""
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
        grads = finite_gradients(out, (query, dirty_k, dirty_v), kept.expand_as(out).to(out.dtype))
        for name, grad in zip("kv", grads[1:], strict=True):
            if grad[bad[:, None].expand(grad.shape[:3])].abs().sum() != 0:
                raise Broken(f"gradient reaches a masked {name}")


def no_hidden(mechanism: Mechanism, case: Case) -> str | None:
    """Why no key is hidden; None if one may be."""
    return "no key is hidden" if case.mask == "none" and not mechanism.ordered else None


@torch.no_grad()
def permuted(mechanism: Mechanism, case: Case) -> None:
    """Permuted tokens give permuted outputs."""
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


def positional(mechanism: Mechanism, case: Case) -> str | None:
    """Why positions count under the mask of a case; None if they do not."""
    return None if case.mask in ("none", "padding left", "padding right") else "the mask speaks of positions"


def extreme(mechanism: Mechanism, case: Case) -> None:
    """Scores of ±1e4 give finite numbers."""
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
    finite_gradients(out, (q, k, v))


@torch.no_grad()
def grouped(mechanism: Mechanism, case: Case) -> None:
    """Grouped heads give what repeated keys and values give."""
    q, k, v = case.tensors()
    rule, repeats = case.rule(), q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    out = attend(q, k, v, mechanism, rule)
    within_budget(
        "grouped heads", out, exact_output(mechanism, q, *wide, rule), plain_output(mechanism, q, *wide, rule)
    )


def ungrouped(mechanism: Mechanism, case: Case) -> str | None:
    """Why heads are in no groups; None if they are."""
    return "every query head has keys of its own" if case.heads == "MHA" else None
