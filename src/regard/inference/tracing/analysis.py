"""Analyses of recorded weights: attention rollout and value-weighted attention."""

import torch
from torch import Tensor

from regard.inference.tracing.record import Trace, TracedLayer


def rollout(trace: Trace) -> Tensor:
    """Attention rollout (B, T, S): how much of each input token reaches each output token through all layers.

        A_l = norm(0.5 · mean over heads of W_l + 0.5 · I),   norm making rows sum to 1
        R   = A_L · … · A_1

    Uses the recorded layers and heads, which should be all of one stack: `trace.select(kind="self", name="encoder")`.
    Abnar and Zuidema 2020, "Quantifying attention flow in transformers".

    >>> import regard as rg, torch
    >>> from regard.inference.trace import rollout
    >>> layer = rg.MultiHeadAttention(8, 2)
    >>> with rg.trace(layer) as trace:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> rollout(trace).sum(-1).allclose(torch.ones(1, 5))
    True
    """
    layers = list(trace.layers)
    if not layers:
        raise ValueError("trace: expected at least one layer, got none")
    flow: Tensor | None = None
    for layer in layers:
        weights = layer.need("weights")
        whole = layer.by_pairs and layer.windows is None
        square = layer.kind == "self" and whole and layer.rows == tuple(range(weights.shape[3]))
        if not square or (flow is not None and flow.shape[1] != weights.shape[3]):
            raise ValueError(
                f"trace: expected self-attention of one stack with all its rows, got layer {layer.index} "
                f"({layer.name}, {layer.kind}); choose layers with trace.select(kind=…, name=…)"
            )
        mean = weights.float().mean(1)
        mixed = 0.5 * mean + 0.5 * torch.eye(mean.shape[-1], device=mean.device)
        mixed = mixed / mixed.sum(-1, keepdim=True)
        flow = mixed if flow is None else mixed @ flow
    assert flow is not None
    return flow


def value_weighted(layer: TracedLayer, projection: Tensor | None = None) -> Tensor:
    """‖w · v‖, shaped as the weights: how much each key's value contributes; a small value does little at any weight.

    With `projection`, the weight (E, H · V) of the output projection, it is ‖w · W_o v‖, the part that reaches the
    residual stream.
    Kobayashi et al. 2020, "Attention is not only a weight".

    >>> import regard as rg, torch
    >>> from regard.inference.trace import value_weighted
    >>> layer = rg.MultiHeadAttention(8, 2)
    >>> with rg.trace(layer) as trace:
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> value_weighted(trace.layers[0], layer.W_o.weight).shape
    torch.Size([1, 2, 5, 5])
    """
    weights, values = layer.need("weights"), layer.need("values")
    if not layer.by_pairs:
        raise ValueError(f"layer: expected weights between queries and keys, got those of {layer.mechanism}")
    if layer.windows is not None:
        return value_weighted(layer.flat(), projection).unflatten(0, weights.shape[:2])
    heads, length = weights.shape[1], values.shape[3]
    values = values.repeat_interleave(heads // values.shape[1], dim=1).to(weights.dtype)
    if projection is not None:
        if projection.ndim != 2 or projection.shape[1] % length or projection.shape[1] <= max(layer.heads) * length:
            raise ValueError(f"projection: expected (E, H · {length}), got shape {tuple(projection.shape)}")
        by_head = projection.detach().to(values).unflatten(1, (-1, length))[:, list(layer.heads)]
        values = torch.einsum("ehv,bhsv->bhse", by_head, values)
    return weights.abs() * values.norm(dim=-1)[:, :, None]
