"""The Cost card: what one head costs over the length, beside other mechanisms, and from which length they are cheaper.

A whole sequence at once. Costs are those of one head with keys and values of its own; a group of heads that shares keys
and values reads them once for all.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.core.cost import Cost, Work, cost, crossover
from regard.core.families.mechanism import Mechanism
from regard.core.masks import Mask, Window, causal
from regard.core.mechanisms import REGISTRY
from regard.explorer.changes import WindowedSoftmax
from regard.explorer.layers import LayerView, mechanism_json
from regard.inference.trace import TracedLayer

SHORTEST, LONGEST = 16, 2**20
PEERS = ("softmax", "quadratic", "elu", "retention")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a mechanism costs at some lengths."""

    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON values, for the page."""
        return {"flops": self.flops, "bytes": self.bytes, "state_bytes": self.state_bytes}


def cost_card(view: LayerView, mechanism: Mechanism) -> dict[str, Any]:
    """What a head of a layer costs, as JSON.

    >>> import regard as rg, torch
    >>> from regard.explorer.subject import Text, subject_of
    >>> from regard.explorer.snapshot import take
    >>> model = rg.Decoder(rg.DecoderConfig(vocabulary_size=3, embedding_dim=8, num_layers=1, num_heads=2)).eval()
    >>> model.tokenizer = rg.Tokenizer.from_vocabulary(["[UNK]", "a", "b"])
    >>> card = cost_card(take("1", subject_of("mine", model, Text("a b a"))).layers[0], rg.Softmax())
    >>> card["here"]["flops"], card["peers"][0]["mechanism"]
    (96, 'quadratic')
    """
    layer = view.traced
    queries, qk_length = view.query(0).shape
    keys, value_length = view.value(0).shape
    crossing = layer.kind == "cross"
    work = Work(
        query_length=queries,
        key_length=keys,
        num_heads=1,
        num_kv_heads=1,
        qk_length=qk_length,
        value_length=value_length,
        dtype=torch.float32,
        cached=False,
    )
    lengths = list(_lengths())

    def price(priced: Mechanism, at: Work) -> Cost:
        """Each mechanism with the mask that it has: a window is the mechanism's own."""
        return cost(priced, replace(at, mask=_mask(layer, priced)))

    here = price(mechanism, work)
    name = mechanism_json(mechanism, work.qk_length)["name"]
    peers: list[dict[str, Any]] = []
    crossovers: list[dict[str, Any]] = []
    for peer in PEERS:
        other = REGISTRY[peer]
        # A recurrent mechanism looks back only.
        if other == mechanism or peer == name or not layer.by_pairs or (other.ordered and not layer.causal):
            continue
        peers.append({"mechanism": peer, **_curve(price, other, work, lengths, crossing).to_json()})
        cheaper = crossover(
            mechanism, other, _varied(work, crossing), seconds=lambda priced, at: float(price(priced, at).flops)
        )
        crossovers.append({"mechanism": peer, "length": cheaper})
    return {
        "mechanism": name,
        "heads": view.heads,
        "kv_heads": view.kv_heads,
        "lengths": lengths,
        **_curve(price, mechanism, work, lengths, crossing).to_json(),
        "here": {"length": keys, "queries": queries, "flops": here.flops, "bytes": here.bytes},
        "peers": peers,
        "crossovers": crossovers,
    }


def _mask(layer: TracedLayer, mechanism: Mechanism) -> Mask | None:
    """What tokens see, at any length."""
    is_causal = layer.causal or mechanism.ordered
    if isinstance(mechanism, WindowedSoftmax):
        return Window(mechanism.window, 0 if is_causal else mechanism.window)
    return causal if is_causal else None


def _lengths() -> Iterator[int]:
    length = SHORTEST
    while length <= LONGEST:
        yield length
        length *= 2


def _varied(work: Work, crossing: bool) -> Work:
    """The work at a length that `crossover` varies: of queries and keys alike, but in cross-attention of keys alone."""
    return _at(work, 64 if work.query_length != 64 else 65, crossing)


def _at(work: Work, length: int, crossing: bool) -> Work:
    return replace(work, key_length=length, query_length=work.query_length if crossing else length)


def _curve(
    price: Callable[[Mechanism, Work], Cost], mechanism: Mechanism, work: Work, lengths: list[int], crossing: bool
) -> Curve:
    costs = [price(mechanism, _at(work, length, crossing)) for length in lengths]
    return Curve(
        flops=tuple(entry.flops for entry in costs),
        bytes=tuple(entry.bytes for entry in costs),
        state_bytes=tuple(entry.state_bytes for entry in costs),
    )
