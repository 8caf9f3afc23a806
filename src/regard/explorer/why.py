"""Why a query gives a key its weight: the chain of numbers from the product of the two to the weight.

    softmax       q·k → β q·k → softcap → + bias → − max → exp → / sum
    similarity    q·k → similarity → / sum
    recurrent     q·k → / sqrt(K) → what the tokens between left of it
    channel       Σ over tokens → scale → − max → exp → / sum

Computed in float64 from the recorded queries and keys by the mechanism's own formula: what the last step gives is the
weight that the model computed, within its rounding.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.core.families.channels import ChannelMechanism
from regard.core.families.mechanism import Mechanism, UnnormalisedMechanism
from regard.core.families.scores import ScoreMechanism
from regard.core.mechanisms import Softmax
from regard.explorer.layers import LayerView, family, mechanism_json, scale_of
from regard.explorer.snapshot import Snapshot

CLOSE = 1e-4
"""How far the chain may end from the weight that the model computed, by the rounding of both."""


@dataclass(frozen=True)
class Step:
    """One number of the chain, and the formula that it comes from."""

    name: str
    formula: str
    value: float

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "formula": self.formula, "value": self.value}


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The steps to a weight; `total` is what the last one divides by, `best` the largest score of the row."""

    steps: tuple[Step, ...]
    score: float | None
    total: float | None = None
    best: float | None = None


@torch.no_grad()
def explain_weight(
    snapshot: Snapshot, index: int, head: int, query: int, key: int, window: int | None = None
) -> dict[str, Any]:
    """The Why card of a pair of tokens (or of channels), as JSON."""
    view = snapshot.layer(index, window)
    place, rows, columns = snapshot.head_number(view, head), *view.weights.shape[1:]
    for name, number, size in (("query", query, rows), ("key", key, columns)):
        if type(number) is not int or not 0 <= number < size:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {number!r:.40}")
    mechanism = snapshot.mechanism(view, place)
    weights, visible = snapshot.head(index, place, window)
    weight = float(weights[query, key])
    if isinstance(mechanism, ChannelMechanism):
        q, k = view.query(place)[:, query], view.key(place)[:, key]
        chain = _channel_chain(mechanism, view, place, query, key)
    else:
        q, k = view.query(place)[query], view.key(place)[key]
        bias = view.head_bias(place)
        chain = _chain(mechanism, view, place, query, key, visible[query], None if bias is None else bias[query])
    shown = bool(visible[query, key])
    added = view.head_bias(place) if family(mechanism) == "softmax" else None
    steps = chain.steps if shown else (Step("masked", "the mask hides this key", 0.0),)
    described = mechanism_json(mechanism, view.query(place).shape[-1], view.bias is not None)
    off = abs(steps[-1].value - weight)
    return {
        "kind": family(mechanism),
        "mechanism": described,
        "q": q.tolist(),
        "k": k.tolist(),
        "product": float(q.double() @ k.double()),
        "scale": described["scale"],
        "softcap": described["softcap"],
        "bias": None if added is None else float(added[query, key]),
        "visible": shown,
        "score": chain.score if shown else None,
        "steps": [step.to_json() for step in steps],
        "max": chain.best,
        "sum": chain.total,
        "weight": weight,
        # Not where a Hugging Face model adds something to its scores that only it knows.
        "exact": off <= CLOSE * max(1.0, abs(weight)),
        **_parts(view, place, weights[query], key),
    }


def _chain(
    mechanism: Mechanism,
    view: LayerView,
    head: int,
    query: int,
    key: int,
    visible: Bool[Tensor, "S"],
    bias: Float[Tensor, "S"] | None,
) -> Chain:
    q, k = view.query(head)[query : query + 1].double(), view.key(head).double()
    product = float(q[0] @ k[key])
    start = Step("product", "q·k", product)
    if isinstance(mechanism, ScoreMechanism):
        return _softmax_chain(mechanism, start, q, k, key, visible, bias)
    if mechanism.ordered:
        return _recurrent_chain(mechanism, start, view, head, query, key)
    similar = mechanism.similarity(q[None, None], k[None, None])[0, 0, 0].double().masked_fill(~visible, 0)
    value = float(similar[key])
    formula = mechanism_json(mechanism, q.shape[-1])["formula"].partition(" / ")[0]
    steps = (start, Step("similarity", formula, value))
    if isinstance(mechanism, UnnormalisedMechanism):
        return Chain(steps=(*steps, Step("weight", "the similarity itself", value)), score=value)
    total = float(similar.sum())
    weight = value / total if total else 0.0
    return Chain(steps=(*steps, Step("weight", "similarity / sum", weight)), score=value, total=total)


def _softmax_chain(
    mechanism: ScoreMechanism,
    start: Step,
    q: Tensor,
    k: Tensor,
    key: int,
    visible: Tensor,
    bias: Tensor | None,
) -> Chain:
    scores, scale = mechanism.score(q[None, None], k[None, None])[0, 0, 0].double(), mechanism.scale(q.shape[-1])
    steps = [start]
    if scale == math.inf:
        best = float(scores.masked_fill(~visible, -math.inf).max())
        ties = int((scores.masked_fill(~visible, -math.inf) == best).sum())
        weight = float(float(scores[key]) == best) / ties
        steps += [Step("largest", "max q·k", best), Step("weight", "1 / ties if q·k is the largest, else 0", weight)]
        return Chain(steps=tuple(steps), score=float(scores[key]), total=float(ties), best=best)
    if isinstance(mechanism, Softmax):
        beta = scale_of(mechanism, q.shape[-1])
        steps.append(Step("scaled", "β q·k", beta * start.value))
        if mechanism.softcap is not None:
            steps.append(Step("capped", "c tanh(β q·k / c)", float(scores[key])))
    else:
        steps.append(Step("scored", "scale · score(q, k)", scale * float(scores[key])))
    scores = scores * scale
    if bias is not None:
        scores = scores + bias.double()
        steps.append(Step("biased", "+ bias", float(scores[key])))
    scores = scores.masked_fill(~visible, -math.inf)
    score, best = float(scores[key]), float(scores.max())
    powers = (scores - best).exp()
    total = float(powers.sum())
    steps.append(Step("exponential", "exp(score − max)", float(powers[key])))
    steps.append(Step("weight", "exp / sum", float(powers[key]) / total))
    return Chain(steps=tuple(steps), score=score, total=total, best=best)


def _recurrent_chain(mechanism: Mechanism, start: Step, view: LayerView, head: int, query: int, key: int) -> Chain:
    group = head // (view.heads // view.kv_heads)
    queries, keys = view.traced.need("queries")[:1].double(), view.traced.need("keys")[:1].double()
    # Heads may differ by their number (retention's decays): all of them, as the model computes them.
    real = None if view.traced.real is None else view.traced.real[:1, None, :, None]
    table: Any = mechanism
    places = torch.arange(keys.shape[2] - queries.shape[2], keys.shape[2])[[query]]
    weights = table.table(queries[:, [head], query : query + 1], keys, places, real, [group])[0, 0, 0]
    weight, scaled = float(weights[key]), start.value * queries.shape[-1] ** -0.5
    steps = [start, Step("scaled", "q·k / √K", scaled)]
    if scaled:
        steps.append(Step("faded", "× what the tokens from s to t leave of it", weight / scaled))
    steps.append(Step("weight", "not normalised", weight))
    return Chain(steps=tuple(steps), score=scaled)


def _channel_chain(mechanism: ChannelMechanism, view: LayerView, head: int, query: int, key: int) -> Chain:
    q, k = view.query(head).double(), view.key(head).double()
    tokens = torch.full((1, 1, 1, 1), q.shape[0], dtype=q.dtype)
    scale = float(mechanism.size(tokens, q.shape[-1]).rsqrt())
    scores = scale * (q[:, query] @ k)
    best = float(scores.max())
    powers = (scores - best).exp()
    total = float(powers.sum())
    steps = (
        Step("product", "Σ over tokens of q·k", float(q[:, query] @ k[:, key])),
        Step("scaled", "× scale", float(scores[key])),
        Step("exponential", "exp(score − max)", float(powers[key])),
        Step("weight", "exp / sum", float(powers[key]) / total),
    )
    return Chain(steps=steps, score=float(scores[key]), total=total, best=best)


def _parts(view: LayerView, head: int, weights: Float[Tensor, "S"], key: int) -> dict[str, float | None]:
    """What the key's value adds to the head's output: its norms, and its share of the row."""
    if not view.traced.by_pairs:
        return dict.fromkeys(("value_norm", "part_norm", "share", "out_norm"))
    values = view.value(head).float()
    norms = values.norm(dim=-1)
    parts = weights.abs() * norms
    total, part = float(parts.sum()), float(parts[key])
    length, out_norm = values.shape[-1], None
    projection = view.traced.projection
    if projection is not None and projection.shape[2] == length:
        mixed = projection[head].float() @ (weights[key] * values[key])
        out_norm = float(mixed.norm())
    return {
        "value_norm": float(norms[key]),
        "part_norm": part,
        "share": part / total if total else 0.0,
        "out_norm": out_norm,
    }
