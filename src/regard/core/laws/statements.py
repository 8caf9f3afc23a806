"""The laws: `LAWS` lists them with their statements and where they do not apply. How each is tested is in streams.py,
outputs.py, derivatives.py and counts.py."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from regard.core.attention import attend
from regard.core.calls.call import Call
from regard.core.families.mechanism import Mechanism
from regard.core.laws.case import LENGTHS, SHORT, Broken, Case
from regard.core.laws.counts import costs_agree
from regard.core.laws.derivatives import curved, differentiable, double_only, learned, paths_agree
from regard.core.laws.outputs import (
    batched,
    blind,
    extreme,
    grouped,
    leakless,
    no_hidden,
    no_padding,
    normalised,
    padded,
    permuted,
    positional,
    ungrouped,
    weighed,
)
from regard.core.laws.streams import forked, no_stream, streamed
from regard.core.masks import dense, padding


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
        Law("streamed", "whole = streamed = streamed in any chunks", streamed, no_stream, square=True),
        Law("forked", "a forked, reordered or cropped state is its own history", forked, no_stream, square=True),
        Law("batched", "batch = one by one", batched, always),
        Law("padded", "padded = unpadded", padded, no_padding, square=True),
        Law("weights", "weights @ v = output, asking changes nothing, chosen rows are those of all", weighed, always),
        Law("normalised", "weights ≥ 0, rows sum to 1", normalised, always),
        Law(
            "empty",
            "a query with no visible key gives exactly 0, and finite gradients",
            blind,
            no_padding,
            square=True,
        ),
        Law("leakless", "nothing masked leaks, not even NaN, and gets gradient exactly 0", leakless, no_hidden, SHORT),
        Law("permuted", "permuted tokens give permuted outputs", permuted, positional, square=True),
        Law("gradients", "gradients pass gradcheck", differentiable, double_only, SHORT[:-1]),
        Law("extremes", "scores of ±1e4 stay finite", extreme, always),
        Law("groups", "query head h reads key/value head h // (H // G)", grouped, ungrouped),
        Law("paths", "every path agrees with the plain formula, forward and backward", paths_agree, always),
        Law(
            "learned",
            "what is learned gets the plain formula's gradient, whole and streamed",
            learned,
            double_only,
            SHORT,
            square=True,
        ),
        Law("curved", "second derivatives are the plain formula's, or refused", curved, double_only, SHORT),
        Law(
            "cost",
            "FLOPs equal the counted ones, whole and streamed; state bytes those that are stored",
            costs_agree,
            always,
            SHORT,
        ),
        Law("refusals", "bad input is an error that names the argument, before any compute", _refusing, always, (1,)),
    )
}
