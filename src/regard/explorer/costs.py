"""The Cost card: what one head costs over the length, beside other mechanisms, and from which length they are cheaper.

A whole sequence at once. Costs are those of one head with keys and values of its own; a group of heads that shares keys
and values reads them once for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from regard.core.cost import Work, cost, crossover
from regard.core.families.mechanism import Mechanism
from regard.core.masks import causal
from regard.core.mechanisms import REGISTRY
from regard.explorer.layers import LayerView, mechanism_json

SHORTEST, LONGEST = 16, 2**20
PEERS = ("softmax", "quadratic", "elu", "retention")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a mechanism costs at some lengths."""

    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As the page reads it."""
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
    queries, keys = layer.need("queries").shape[2], layer.need("keys").shape[2]
    crossing = layer.kind == "cross"
    work = Work(
        query_length=queries,
        key_length=keys,
        num_heads=1,
        num_kv_heads=1,
        qk_length=layer.need("queries").shape[3],
        value_length=layer.need("values").shape[3],
        dtype=torch.float32,
        cached=False,
        mask=causal if layer.causal or mechanism.ordered else None,
    )
    lengths = list(_lengths())
    here = cost(mechanism, work)
    name = mechanism_json(mechanism, work.qk_length)["name"]
    peers: list[dict[str, Any]] = []
    crossovers: list[dict[str, Any]] = []
    for peer in PEERS:
        other = REGISTRY[peer]
        # A recurrent mechanism looks back only.
        if other == mechanism or peer == name or not layer.by_pairs or (other.ordered and work.mask is None):
            continue
        peers.append({"mechanism": peer, **_curve(other, work, lengths, crossing).to_json()})
        crossovers.append({"mechanism": peer, "length": crossover(mechanism, other, _whole(work, crossing))})
    return {
        "mechanism": name,
        "heads": view.heads,
        "kv_heads": view.kv_heads,
        "lengths": lengths,
        **_curve(mechanism, work, lengths, crossing).to_json(),
        "here": {"length": keys, "queries": queries, "flops": here.flops, "bytes": here.bytes},
        "peers": peers,
        "crossovers": crossovers,
    }


def _lengths() -> Iterator[int]:
    length = SHORTEST
    while length <= LONGEST:
        yield length
        length *= 2


def _whole(work: Work, crossing: bool) -> Work:
    """The work at a length that `crossover` can vary: as many queries as keys, but in cross-attention."""
    return work if crossing and work.query_length != work.key_length else _at(work, 64, crossing)


def _at(work: Work, length: int, crossing: bool) -> Work:
    return replace(work, key_length=length, query_length=work.query_length if crossing else length)


def _curve(mechanism: Mechanism, work: Work, lengths: list[int], crossing: bool) -> Curve:
    costs = [cost(mechanism, _at(work, length, crossing)) for length in lengths]
    return Curve(
        flops=tuple(price.flops for price in costs),
        bytes=tuple(price.bytes for price in costs),
        state_bytes=tuple(price.state_bytes for price in costs),
    )
