"""A kernel's stream on a GPU by kernels of our own, in Triton, on the state as stream.py keeps it.

One token is a kernel over the sums and the newest tokens, and one that adds its parts up; every 64th token another one
folds tokens into the sums. Many tokens go through the kernels of `fused`, which begin with the state's sums and end
with the new ones. Nobody looks at the numbers from the CPU: a NaN that is hidden is not read, and one that is not stays
in the sums, which every later query sees.
"""

from typing import Any

import torch
from torch import Tensor

from regard.core.eager import kept, recorded, untouched
from regard.core.masks import Padding, Span
from regard.core.paths import fused, gpu
from regard.core.states.buffer import Buffer

END = 1 << 30
"""Past any token: rows that are real to the end keep one table while a stream goes on."""


def cannot(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, causal: bool, holes: bool
) -> str | None:
    """Why these kernels cannot extend a state by tokens, with padding that may have holes; None if they can.

    Without the state's sums: one that needs no gradient.
    """
    if not q.is_cuda:
        return "made for GPUs"
    if not gpu.TRITON:
        return "Triton is not installed"
    if not untouched():
        return "a trace or transform reaches into plain operators alone"
    if recorded(q, k, v, *(() if sums is None else (sums,))) or mechanism.learns(k.shape[3]):
        return "gradients are recorded, which it does not have"
    return unfit(mechanism, q, v, sums, causal, holes)


def unfit(mechanism: Any, q: Tensor, v: Tensor, sums: Tensor | None, causal: bool, holes: bool) -> str | None:
    """Why these kernels cannot compute an extension, wherever it is; None if they can."""
    if q.numel() == 0:
        return "nothing to compute"
    if not causal and q.shape[2] > 1:
        return "new tokens that see later ones"
    if holes:
        return "padding with holes"
    features = q.shape[3]
    if mechanism.fused_form == "given":
        features = mechanism.feature_length(features) if sums is None else sums.shape[2]
    return fused.too_long(mechanism.fused_form, q.dtype, features, v.shape[3])


def run(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, padding: Padding | None, sums: Tensor, normaliser: Tensor,
    fold_to: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The output of the last tokens of k and v, which come after those in the sums; and the sums with the first
    `fold_to` tokens in them."""
    rows = None if padding is None else padding.rows
    if q.shape[2] > 1:
        return _many(mechanism, q, k, v, rows, sums, normaliser, fold_to)
    if fold_to:
        old, values, limits = k[:, :, :fold_to], v[:, :, :fold_to], _between(rows, 0, fold_to, q.device)
        sums, normaliser = fold(mechanism, old, values, limits, sums, normaliser)
        k, v = k[:, :, fold_to:], v[:, :, fold_to:]
    limits = _between(rows, fold_to, fold_to + k.shape[2], q.device)
    return token(mechanism, q, k, v, limits, sums, normaliser), sums, normaliser


def token(
    mechanism: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    limits: Tensor | None,
    sums: Tensor,
    normaliser: Tensor,
    new: tuple[Tensor, Tensor] | None = None,
    counted: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The output of one query for each head, which sees the sums and, within `limits` (2, B), the keys.

    With `new` key and value, which are stored on the way, and numbers on the GPU as `step_attention.token` has them.
    """
    from regard.core.kernels import step_attention

    tables, form = _tables(mechanism, k.shape[3], q.device)
    q, k, v = _mapped(mechanism, q), _mapped(mechanism, k), v if v.stride(3) == 1 else v.contiguous()
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    work = step_attention.work_of(q, k, v, sums, form, new)
    sums, normaliser = sums.contiguous(), normaliser.contiguous()
    return step_attention.token(work, q, k, v, new, limits, sums, normaliser, tables, k.shape[2], counted)


def step(mechanism: Any, q: Tensor, k: Tensor, v: Tensor, buffer: Buffer, sums: Tensor) -> Any:
    """`token` for queries, keys and values, a buffer's and sums like these, all set up: a function of these, of the
    normaliser, and of the number of keys with the new one; None if the kernel cannot store the new ones."""
    from regard.core.kernels import step_attention
    from regard.core.kernels.launch import Chain

    if not stores(mechanism, k, v) or q.stride(3) != 1:
        return None
    tables, form = _tables(mechanism, k.shape[3], q.device)
    work = step_attention.work_of(q, buffer.keys, buffer.values, sums, form, (k, v))

    def run(
        q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, sums: Tensor, normaliser: Tensor, count: int
    ) -> Tensor:
        return step_attention.token(work, q, keys, values, (k, v), None, sums, normaliser, tables, count)

    return Chain(run, *(tables or ()))


def stores(mechanism: Any, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel for one token stores its key and value: it must meet them as they came."""
    return mechanism.fused_form != "given" and k.stride(3) == v.stride(3) == 1


def _tables(mechanism: Any, qk_length: int, device: torch.device) -> tuple[Any, Any]:
    """phi as the kernels for one token compute it: tables of its features, if it has some, and its form."""
    from regard.core.kernels import step_attention

    if mechanism.fused_form != "square":
        return None, step_attention.Form(mechanism.fused_form)
    pairs = _pairs(mechanism, qk_length, device)
    return pairs.tables, pairs.form


def fold(
    mechanism: Any,
    k: Tensor,
    v: Tensor,
    limits: Tensor | None,
    sums: Tensor,
    normaliser: Tensor,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """The sums and the normaliser with a few keys more, those within `limits` (2, B)."""
    from regard.core.kernels import step_attention

    tables, form = _tables(mechanism, k.shape[3], k.device)
    return step_attention.fold(_mapped(mechanism, k), v, limits, sums, normaliser, tables, form.name, in_place)


def _mapped(mechanism: Any, x: Tensor) -> Tensor:
    """Features, where the kernels do not compute them."""
    if mechanism.fused_form != "given":
        return x
    return mechanism.summed_features(x.to(torch.promote_types(x.dtype, torch.float32)))


def _many(
    mechanism: Any, q: Tensor, k: Tensor, v: Tensor, rows: tuple[Span, ...] | None, sums: Tensor, normaliser: Tensor,
    fold_to: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`run` by the kernels of `fused`: the tokens that are folded and their queries first, then the others."""
    from regard.core.kernels import carried, feature_attention, square_sizes

    first, value_length = max(0, fold_to - (k.shape[2] - q.shape[2])), v.shape[3]
    form = mechanism.fused_form
    pairs = _pairs(mechanism, k.shape[3], q.device) if form == "square" else None
    if pairs is None and (form == "given" or k.shape[3] % fused.ALIGNED):  # padding before a map is not 0 after it
        wide, form = torch.promote_types(q.dtype, torch.float32), "given"
        q, k = (mechanism.summed_features(x.to(wide)).to(v.dtype) for x in (q, k))
    q, k, v = fused.aligned(q), fused.aligned(k), fused.aligned(v)
    sizes = k.shape[3], v.shape[3], q.dtype
    if pairs is None:
        layout: Any = carried.FeatureSums(form, feature_attention.tiles(*sizes))
    else:
        layout = carried.SquareSums(pairs, square_sizes.tiles(*sizes))
    kernel_sums, outs = layout.unpack(sums, normaliser), []
    for start, stop, low, high in ((0, first, 0, fold_to), (first, q.shape[2], fold_to, k.shape[2])):
        if low < high:
            limits, folds = _between(rows, low, high, q.device), high == fold_to
            out, final = layout.extend(
                q[:, :, start:stop], k[:, :, low:high], v[:, :, low:high], limits, kernel_sums, folds
            )
            outs.append(out)
            kernel_sums = final if folds else kernel_sums
    if fold_to:
        sums, normaliser = layout.pack(kernel_sums, sums)
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2))[..., :value_length], sums, normaliser


@kept(64)
def _pairs(mechanism: Any, qk_length: int, device: torch.device) -> Any:
    """A polynomial's features as tables on a device: a mechanism without tensors is a value."""
    from regard.core.kernels.carried import pairs_of

    return pairs_of(qk_length, mechanism.coefficients(qk_length), mechanism.summed_pairs(qk_length), device)


def _between(rows: tuple[Span, ...] | None, low: int, high: int, device: torch.device) -> Tensor | None:
    """The first real key of each batch row in [low, high), from there, and the one after the last; None if all are."""
    if rows is None or all(begin <= low and end >= high for begin, end in rows):
        return None
    spans = tuple((max(0, begin - low), END if end >= high else max(0, end - low)) for begin, end in rows)
    return gpu.table(spans, device)
