"""What a mechanism costs on some work, and what a layer around it costs."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from regard.core.calls.call import ordered
from regard.core.cost.counting import takes_numbers
from regard.core.cost.work import Cost, LayerCost, Work, accumulator
from regard.core.tensors import fitted, own_dtype

if TYPE_CHECKING:
    from regard.core.families.mechanism import Mechanism


def cost(mechanism: "Mechanism", work: Work) -> Cost:
    """What `mechanism` costs on `work`.

    >>> import regard as rg
    >>> prefill = rg.Work(query_length=65536, key_length=65536, mask=rg.causal)
    >>> rg.cost(rg.Quadratic(), prefill).flops < rg.cost(rg.Softmax(), prefill).flops
    True
    """
    if isinstance(mechanism, type) or not hasattr(mechanism, "cost"):
        raise ValueError(f"mechanism: expected a mechanism like rg.Softmax(), got {mechanism!r}")
    parameters = sum(tensor.numel() for tensor in mechanism.parameters())
    if (dtype := own_dtype(mechanism)) is not None:
        mechanism = fitted(mechanism, dtype)
    try:
        result = mechanism.cost(replace(check_work(work), mask=ordered(mechanism, work.rule)))
    except (RuntimeError, IndexError, TypeError) as error:  # raised by a user's formula, which runs here to be counted
        raise ValueError(
            f"qk_length: expected one that {type(mechanism).__name__} takes, got {work.qk_length}, with which it "
            f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}; mend its formula "
            "or, if it is for heads of one length, name that length"
        ) from error
    notes = [result.note] if result.note else []
    if takes_numbers(mechanism):
        notes.append(f"FLOPs are counted on zeros: {type(mechanism).__name__} does not run on meta tensors")
    return replace(result, parameters=parameters, note="; ".join(notes))


def score_cost(work: Work, precision: torch.dtype, similarity: int | None = None) -> Cost:
    """The cost of a mechanism that compares every visible pair and keeps every key; its weights are in `precision`.

    `similarity` is what comparing costs in FLOPs, by default that of q·k.
    """
    comparing = 2 * work.pairs * work.qk_length if similarity is None else similarity
    weights = work.batch * work.num_heads * work.query_length * work.key_length
    unknown = work.rule is not None and not work.rule.structured
    return Cost(
        flops=comparing + 2 * work.pairs * work.value_length,
        bytes=work.io_bytes,
        state_bytes=key_value_bytes(work),
        activation_bytes=weights * precision.itemsize,
        note="the mask has no known structure: all pairs count" if unknown else "",
    )


def key_value_bytes(work: Work) -> int:
    """Bytes of the keys and values of `key_length` tokens."""
    per_token = work.batch * work.num_kv_heads * (work.qk_length + work.value_length)
    return per_token * work.key_length * work.itemsize


def layer_cost(work: Work, embedding_dim: int, mechanism: "Mechanism | None" = None) -> LayerCost:
    """What a multi-head attention layer costs on `work`: W_q, W_k, W_v, W_o, and the mechanism, softmax by default.

    Only the keys and values of the `query_length` new tokens are projected, since the others are in the KV cache; all
    of them where the work is not cached (cross-attention).

    >>> import regard as rg
    >>> short = rg.Work(query_length=64, key_length=64, num_heads=8, num_kv_heads=8)
    >>> long = rg.Work(query_length=8192, key_length=8192, num_heads=8, num_kv_heads=8)
    >>> rg.layer_cost(short, embedding_dim=512).bottleneck, rg.layer_cost(long, embedding_dim=512).bottleneck
    ('projections', 'attention')
    """
    if not isinstance(embedding_dim, int) or embedding_dim < 1:
        raise ValueError(f"embedding_dim: expected a whole number of at least 1, got {embedding_dim!r}")
    of_queries = work.num_heads * (work.qk_length + work.value_length)  # W_q and W_o
    of_keys = work.num_kv_heads * (work.qk_length + work.value_length)  # W_k and W_v
    queries = check_work(work).batch * work.query_length
    keys = queries if work.cached else work.batch * work.key_length
    projected = queries * of_queries + keys * of_keys
    parameters = embedding_dim * (of_queries + of_keys)
    touched = parameters + 2 * embedding_dim * (queries + keys) + projected
    return LayerCost(
        projections=Cost(
            flops=2 * embedding_dim * projected,
            bytes=touched * work.itemsize,
            state_bytes=0,
            activation_bytes=projected * work.itemsize,
            parameters=parameters,
            form="linear",
        ),
        attention=score_cost(work, accumulator(work.dtype)) if mechanism is None else cost(mechanism, work),
    )


def check_work(work: Work) -> Work:
    """The work itself, or ValueError for anything else."""
    if not isinstance(work, Work):
        raise ValueError(f"work: expected rg.Work(…), got {work!r}")
    return work
