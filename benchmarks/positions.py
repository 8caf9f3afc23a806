"""The cost of a decode step at several positions, measured and predicted; a table, and one JSON line at the end.

    python benchmarks/positions.py && make pictures

MHA, GQA and MQA decoders of one size at positions 1k to 32k, and a softmax and a quadratic decoder up to 64k. It takes
about two minutes. Results go to results/positions.json, from which `make pictures` draws docs/positions.png.

The states are filled with random keys up to a position, and then some tokens are decoded; times do not depend on the
values of the keys. The cost model predicts the time at a position as the time at the first position, plus the
additional bytes over the memory bandwidth of this machine, plus the additional FLOPs over the rate of a decode step in
which 32 query heads share each key. The last term is what MQA pays: it reads an eighth of MHA's bytes and computes as
much.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from regard.commands.suite.harness import environment
from regard.core.cost import Work, cost
from regard.core.files import write_text
from regard.core.mechanisms import Quadratic, Softmax
from regard.models.decoder import Decoder, DecoderConfig
from regard.models.layers.streaming import ModelState

RESULTS = Path(__file__).parent / "results/positions.json"
POSITIONS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
SIZE = {"vocabulary_size": 1000, "embedding_dim": 512, "num_layers": 4, "num_heads": 8, "context_length": 1 << 20}
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "MHA": ({"num_kv_heads": 8}, 32768),
    "GQA": ({"num_kv_heads": 2}, 32768),
    "MQA": ({"num_kv_heads": 1}, 32768),
    "softmax": ({"num_kv_heads": 8, "qk_length": 32}, 65536),
    "quadratic": ({"num_kv_heads": 8, "qk_length": 32, "mechanism": Quadratic()}, 65536),
}
"""The config fields in which a decoder differs from the others, and its last position. The last two differ only in
their mechanism."""


@dataclass(frozen=True)
class Point:
    """A decoder at a position."""

    kind: str
    position: int
    milliseconds: float
    """Measured time of a decode step: a median."""
    predicted_milliseconds: float
    state_bytes: int
    """Measured, at this length."""
    predicted_state_bytes: int
    read_bytes: int
    """The least bytes that a step reads: weights and state."""
    flops: int
    """Of a step's attention."""


@torch.inference_mode()
def measure(watch: Callable[[str], None] = lambda words: None, steps: int = 10, rounds: int = 15) -> list[Point]:
    """Measure every decoder of `KINDS` at every position up to its last: medians of rounds of `steps` tokens."""
    points: list[Point] = []
    rates: list[tuple[float, float]] = []
    models: dict[str, Decoder] = {}
    states: dict[str, ModelState] = {}
    for kind, (fields, last) in KINDS.items():
        torch.manual_seed(0)
        models[kind] = Decoder(DecoderConfig(**{**SIZE, **fields})).eval()
        states[kind] = models[kind].start(batch=1, capacity=last + steps * (rounds + 1))
        _, states[kind] = _step(models[kind], states[kind], steps)  # the first steps compile
    for position in POSITIONS:
        watch(f"position {position:,}")
        rates.append((_memory_rate(), _arithmetic_rate()))
        kinds = [kind for kind, (_, last) in KINDS.items() if position <= last]
        state_bytes: dict[str, int] = {}
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for kind in kinds:
            states[kind] = _filled(models[kind], states[kind], position)
            state_bytes[kind] = _used_bytes(states[kind])
        for _ in range(rounds):
            for kind in kinds:
                seconds, states[kind] = _step(models[kind], states[kind], steps)
                times[kind].append(seconds)
        for kind in kinds:
            predicted = _predicted(models[kind], position)
            points.append(
                Point(
                    kind=kind,
                    position=position,
                    milliseconds=statistics.median(times[kind]) * 1e3,
                    predicted_milliseconds=0.0,
                    state_bytes=state_bytes[kind],
                    predicted_state_bytes=predicted.state_bytes * SIZE["num_layers"],
                    read_bytes=_read_bytes(models[kind], position),
                    flops=predicted.flops * SIZE["num_layers"],
                )
            )
    # A rate is what the machine can do: the best of some measurements.
    bytes_rate, flops_rate = (max(column) for column in zip(*rates, strict=True))
    points = _with_predictions(points, bytes_rate, flops_rate)
    order = list(KINDS)
    return sorted(points, key=lambda point: order.index(point.kind))


def _with_predictions(points: Sequence[Point], bytes_rate: float, flops_rate: float) -> list[Point]:
    """The points with the time that the cost model predicts from each decoder's first one."""
    first: dict[str, Point] = {}
    predicted = []
    for point in points:
        start = first.setdefault(point.kind, point)
        more = (point.read_bytes - start.read_bytes) / bytes_rate + (point.flops - start.flops) / flops_rate
        predicted.append(replace(point, predicted_milliseconds=start.milliseconds + more * 1e3))
    return predicted


def crossings(points: Sequence[Point]) -> tuple[int | None, int | None]:
    """The position from which a quadratic decode step is faster than a softmax step: predicted, and measured.

    >>> slow = [Point("softmax", n, n / 1e3, n / 1e3, 0, 0, 0, 0) for n in (1024, 2048)]
    >>> flat = [Point("quadratic", n, 1.5, 1.2, 0, 0, 0, 0) for n in (1024, 2048)]
    >>> crossings(slow + flat)
    (1200, 1500)
    """
    return _crossing(points, "predicted_milliseconds"), _crossing(points, "milliseconds")


def _crossing(points: Sequence[Point], what: str) -> int | None:
    """The position from which quadratic stays below softmax, interpolated between two positions."""
    of = {(point.kind, point.position): getattr(point, what) for point in points}
    places = sorted({at for kind, at in of if kind == "quadratic"} & {at for kind, at in of if kind == "softmax"})
    gains = [(at, of["softmax", at] - of["quadratic", at]) for at in places]
    for (low, worse), (high, better) in reversed(list(pairwise(gains))):
        if worse <= 0 < better:
            return round(low + (high - low) * -worse / (better - worse))
    return None


def _filled(model: Decoder, state: ModelState, position: int) -> ModelState:
    """The state with random keys and values up to a position."""
    layers = []
    for block, layer_state in zip(model.stack.layers, state.layers, strict=True):
        attention = block.attention
        while layer_state.length < position:
            count = min(4096, position - layer_state.length)
            shape = (1, attention.num_kv_heads, count)
            k, v = torch.randn(*shape, attention.qk_length), torch.randn(*shape, attention.value_length)
            if hasattr(layer_state, "append"):
                layer_state = layer_state.append(k, v)
            else:
                q = torch.randn(1, attention.num_heads, count, attention.qk_length)
                _, layer_state = attention.mechanism.extend(q, k, v, layer_state)
        layers.append(layer_state)
    return replace(state, layers=tuple(layers), length=position)


def _step(model: Decoder, state: ModelState, steps: int) -> tuple[float, ModelState]:
    token, times = torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(steps):
        begin = time.perf_counter()
        _, state = model.extend(token, state)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), state


def _predicted(model: Decoder, position: int) -> Any:
    attention = model.stack.layers[0].attention
    work = Work(
        key_length=position,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        qk_length=attention.qk_length,
        value_length=attention.value_length,
        dtype=torch.float32,
    )
    return cost(attention.mechanism, work)


def _read_bytes(model: Decoder, position: int) -> int:
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    return weights + _predicted(model, position).bytes * model.config.num_layers


def _used_bytes(state: ModelState) -> int:
    """Bytes of the tokens in a state, without its spare capacity."""
    total = 0
    for layer in state.layers:
        spare = (layer.capacity - layer.length) / layer.capacity if hasattr(layer, "capacity") else 0.0
        total += round(layer.nbytes * (1 - spare))
    return total


def _memory_rate() -> float:
    """Bytes per second that this machine reads from memory."""
    large = torch.ones(1 << 27)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        large.sum()
        times.append(time.perf_counter() - begin)
    return large.numel() * 4 / min(times)


def _arithmetic_rate(heads: int = 32, length: int = 8192) -> float:
    """FLOPs per second of a token's attention where arithmetic is the limit: many query heads share each key."""
    state = Softmax().start(batch=1, num_kv_heads=1, qk_length=64, value_length=64, capacity=length + 300)
    state = state.append(torch.randn(1, 1, length, 64), torch.randn(1, 1, length, 64))
    q, k = torch.randn(1, heads, 1, 64), torch.randn(1, 1, 1, 64)
    times = []
    for _ in range(300):
        began = time.perf_counter()
        _, state = Softmax().extend(q, k, k, state)
        times.append(time.perf_counter() - began)
    work = Work(key_length=length + 150, num_heads=heads, num_kv_heads=1, qk_length=64, value_length=64)
    return cost(Softmax(), work).flops / statistics.median(times)


def main() -> None:
    points = measure(watch=lambda words: print(f"… {words}", flush=True))
    print(f"{'decoder':<10} {'position':>8} {'ms':>8} {'predicted':>10} {'state MB':>9} {'predicted':>10}")
    for point in points:
        print(
            f"{point.kind:<10} {point.position:>8} {point.milliseconds:>8.2f} {point.predicted_milliseconds:>10.2f} "
            f"{point.state_bytes / 1e6:>9.2f} {point.predicted_state_bytes / 1e6:>10.2f}"
        )
    predicted, measured = crossings(points)
    print(f"the quadratic token is cheaper from position {predicted} as predicted, {measured} as measured")
    content = {
        "environment": environment(),
        "points": [asdict(point) for point in points],
        "crossover": [predicted, measured],
    }
    write_text(RESULTS, json.dumps(content, indent=1) + "\n")
    print(json.dumps(content))


if __name__ == "__main__":
    main()
