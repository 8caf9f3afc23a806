"""The three verbs: attend, weights, explain."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from regard.core.calls import repeats
from regard.core.calls.call import Call, in_own_dtype
from regard.core.calls.choice import Plan, choose, compute, plan
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, MaskFunction, as_mask, whole_number
from regard.core.mechanisms.softmax import Softmax


def attend(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    mechanism: Mechanism = Softmax(),  # noqa: B008 - a frozen value
    mask: Mask | MaskFunction | Tensor | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    path: str | None = None,
) -> Float[Tensor, "B H T V"]:
    """Attention of queries to keys and values, on the fastest path, or on the path that `path` names.

    A query with no visible key gets exactly 0. A NaN in a key or value reaches the queries that see it and no others;
    an infinity does not reach the others either.

    >>> import regard as rg, torch
    >>> q, k, v = torch.randn(2, 8, 10, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 4)
    >>> rg.attend(q, k, v, rg.Softmax(), mask=rg.causal & rg.padding([12, 7])).shape
    torch.Size([2, 8, 10, 4])
    """
    key = repeats.key_of(q, k, v, mechanism, mask) if bias is None and path is None else None
    if key is not None and (again := repeats.find(key)) is not None:
        return again(q, k, v)
    call = Call(_mechanism(mechanism), q, k, v, as_mask(mask), bias)
    call.check()
    chosen = choose(call, path)
    if call.mechanism is mechanism:  # a cast tensor would keep today's numbers
        repeats.keep(key, call, chosen)
    with in_own_dtype(q):
        return compute(call, chosen)


def explain(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S V"],
    mechanism: Mechanism = Softmax(),  # noqa: B008 - a frozen value
    mask: Mask | MaskFunction | Tensor | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    path: str | None = None,
) -> Plan:
    """The path `attend` takes for the same arguments, why, and why not the others. Print it.

    >>> import regard as rg, torch
    >>> q = k = v = torch.randn(1, 2, 300, 16)
    >>> rg.explain(q, k, v, rg.Quadratic(), rg.causal & rg.window(before=9)).notes
    ('quadratic in the length: a sliding window drops keys again, which running sums cannot',)
    """
    call = Call(_mechanism(mechanism), q, k, v, as_mask(mask), bias)
    call.check()
    return plan(call, path)


def weights(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    mechanism: Mechanism = Softmax(),  # noqa: B008 - a frozen value
    mask: Mask | MaskFunction | Tensor | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
) -> Float[Tensor, "..."]:
    """The exact weights (B, H, T, S): `weights @ v` is the output of `attend`. Between channels for `Channel`.

    `rows` and `heads` choose query rows and heads, in that order, and only those are computed. Negative numbers count
    from the end, so `rows=[-1]` is the newest token's row.

    >>> import regard as rg, torch
    >>> q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    >>> w = rg.weights(q, k, rg.Quadratic(), mask=rg.causal)
    >>> torch.allclose(w.sum(-1), torch.ones(1, 4, 6))
    True
    >>> torch.allclose(rg.weights(q, k, rg.Quadratic(), rg.causal, rows=[-1], heads=[2]), w[:, [2], -1:])
    True
    """
    call = Call(_mechanism(mechanism), q, k, k, as_mask(mask), bias)
    call.check()
    chosen_rows, chosen_heads = _chosen("rows", rows, call.queries), _chosen("heads", heads, call.heads)
    return call.mechanism.choose_weights(call, chosen_rows, chosen_heads)


def _chosen(name: str, indices: Sequence[int] | Tensor | None, size: int) -> list[int] | None:
    if indices is None:
        return None
    listed = isinstance(indices, list | tuple | range) or getattr(indices, "ndim", 0) == 1
    chosen = [whole_number(i) for i in indices] if listed else [None]
    if not all(i is not None and -size <= i < size for i in chosen):
        raise ValueError(f"{name}: expected whole numbers from {-size} to {size - 1}, got {indices!r}")
    return [i % size for i in chosen if i is not None]


def _mechanism(mechanism: Mechanism) -> Mechanism:
    if not isinstance(mechanism, Mechanism):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax(), got {mechanism!r}")
    return mechanism
