"""Attention and whole models exported by torch.export, with dynamic sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.core.mechanisms import REGISTRY
from regard.core.tensors import weighs_tokens
from transformed import G, H, K, close, inputs, spoiled

MADE: dict[str, Callable[[Tensor], rg.Mask | None]] = {
    "none": lambda real: None,
    "causal": lambda real: rg.causal,
    "lengths": lambda real: rg.causal & rg.padding(real.sum(-1)),
    "valid": lambda real: rg.causal & rg.padding(valid=real),
    "padding": lambda real: rg.padding(valid=real),
    "window": lambda real: rg.causal & rg.window(before=3) & rg.padding(valid=real),
    "wide window": lambda real: rg.window(before=20, after=30) & rg.padding(real.sum(-1)),
    "global": lambda real: (rg.window(before=2, after=5) | rg.global_tokens(1)) & rg.padding(valid=real),
    "table": lambda real: rg.dense(real[:, None, None]),
    "segments": lambda real: rg.segments(real.long()) & rg.padding(valid=real),
}


class Layer(torch.nn.Module):
    """Attention under masks made from an input, as models make them."""

    def __init__(self, mechanism: rg.Mechanism, *masks: str) -> None:
        super().__init__()
        self.mechanism, self.masks = mechanism, masks

    def forward(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> list[Tensor]:
        return [rg.attend(q, k, v, self.mechanism, MADE[mask](real)) for mask in self.masks]


def serves(program: Callable[..., list[Tensor]], layer: Layer, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> None:
    """An exported program computes what its layer does, and lets nothing hidden through: the last row ends with
    padding."""
    dirty = [torch.cat([t[:-1], spoiled(t[-1:])]) for t in (k, v)]
    results = program(q, k, v, real), program(q, *dirty, real), layer(q, k, v, real)
    for mask, out, guarded, expected in zip(layer.masks, *results, strict=True):
        assert close(out, expected), mask
        shown = {"none": 0, "causal": q.shape[2] - 1}.get(mask, q.shape[2])  # queries that do not see the NaN
        assert close(guarded[:, :, :shown], expected[:, :, :shown]), mask


@pytest.mark.parametrize(
    ("name", "mask"),
    [("softmax", mask) for mask in ("causal", "lengths", "valid", "padding", "segments")]
    + [("quadratic", "causal"), ("channel", "padding")],
)
def test_export_with_a_dynamic_length(name: str, mask: str) -> None:
    """One program for all lengths, which lets nothing hidden through either."""
    layer = Layer(REGISTRY[name], mask)

    def example(length: int) -> tuple[Tensor, ...]:
        q, k, v = inputs(length)
        return q, k, v, torch.arange(length) < torch.tensor([[length], [length - 2]])

    length = {2: torch.export.Dim("length", max=4096)}
    shapes = {"q": length, "k": length, "v": length, "real": {1: length[2]}}
    program = torch.export.export(layer, example(9), dynamic_shapes=shapes).module()
    for size in (2, 9, 300):
        serves(program, layer, *example(size))


@dataclass(frozen=True, kw_only=True)
class Projected(rg.Mechanism):
    """A user's formula with matrix products, a learned and a constant one."""

    layer: torch.nn.Module
    matrix: Tensor

    def similarity(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.exp(self.layer(q) @ (k @ self.matrix).transpose(-1, -2) / 4)


MATRIX = torch.arange(float(K * K), dtype=torch.float64).reshape(K, K).cos()
USERS: dict[str, rg.Mechanism] = {
    "projected": Projected(layer=torch.nn.Linear(K, K).double().requires_grad_(False), matrix=MATRIX),
    "kernel": rg.Kernel(feature_map=lambda x: (x @ MATRIX.to(x.dtype)).exp()),
}


@pytest.mark.parametrize("name", [name for name in REGISTRY if weighs_tokens(REGISTRY[name], K)] + list(USERS))
def test_export_with_a_dynamic_batch_and_two_dynamic_lengths(name: str) -> None:
    """One program for fewer queries than keys, as many, and more."""
    masks = list(MADE)[:-1] if name == "softmax" else ["none", "lengths"]  # segments want as many queries as keys
    layer = Layer((REGISTRY | USERS)[name], *masks)

    def example(batch: int, queries: int, keys: int) -> tuple[Tensor, ...]:
        q, (_, k, v) = inputs(queries)[0], inputs(keys)
        ends = keys - (torch.arange(batch) == batch - 1)[:, None] * 2  # the last row ends with padding
        return *(t[:1].repeat(batch, 1, 1, 1) for t in (q, k, v)), torch.arange(keys) < ends

    batch, queries, keys = (torch.export.Dim(size, max=4096) for size in ("batch", "queries", "keys"))
    shapes = {
        "q": {0: batch, 2: queries},
        "k": {0: batch, 2: keys},
        "v": {0: batch, 2: keys},
        "real": {0: batch, 1: keys},
    }
    program = torch.export.export(layer, example(2, 5, 9), dynamic_shapes=shapes).module()
    for size in ((2, 5, 9), (3, 8, 8), (4, 11, 4), (2, 1, 130)):
        serves(program, layer, *example(*size))


@pytest.mark.parametrize("grouped", [False, True], ids=["heads", "grouped"])
def test_export_with_a_dynamic_batch_of_causal_queries_after_a_history(grouped: bool) -> None:
    """With lengths that are known a program takes the path of two parts."""

    class Causal(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return rg.attend(q, k, v, mask=rg.causal)

    q, k, v = inputs(9)
    q = q[:, : H if grouped else G, 4:]
    batch = {0: torch.export.Dim("batch", max=64)}
    program = torch.export.export(Causal(), (q, k, v), dynamic_shapes=[batch] * 3).module()
    assert rg.explain(q, k, v, mask=rg.causal, path="parts").path == "parts"
    for rows in (1, 5):
        tensors = [t[:1].repeat(rows, 1, 1, 1) for t in (q, k, v)]
        assert close(program(*tensors), Causal()(*tensors))


SIZES = {"vocabulary_size": 23, "embedding_dim": 8, "num_layers": 1, "num_heads": 2}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "decoder": lambda: rg.Decoder(rg.DecoderConfig.gpt2(**SIZES, num_kv_heads=1, window=rg.Window(4))),
    "encoder": lambda: rg.Encoder(rg.EncoderConfig(**SIZES, window=rg.Window(3, 3))),
    "t5": lambda: rg.Transformer(rg.TransformerConfig.t5(**SIZES)),
}


class Reader(torch.nn.Module):
    """A model that reads a padded batch."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        return self.model(tokens, mask=rg.padding(valid=real))


@pytest.mark.parametrize("name", ["decoder", "encoder"])
@torch.no_grad()
def test_a_model_is_exported_once_for_all_batches_and_lengths(name: str) -> None:
    torch.manual_seed(0)
    reader = Reader(MODELS[name]().double().eval())

    def example(batch: int, length: int) -> tuple[Tensor, ...]:
        tokens, ends = torch.arange(batch * length).view(batch, length) % 23, length - torch.arange(batch)[:, None]
        return tokens, torch.arange(length) < ends

    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", min=4, max=512)}
    program = torch.export.export(reader, example(3, 9), dynamic_shapes=[sizes, sizes]).module()
    for size in ((2, 5), (3, 9), (4, 200)):
        assert torch.allclose(program(*example(*size)), reader(*example(*size)), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_transformer_is_exported_once_for_all_lengths_of_source_and_target() -> None:
    torch.manual_seed(0)
    model = MODELS["t5"]().double().eval()

    def example(batch: int, *lengths: int) -> tuple[Tensor, ...]:
        return tuple(torch.arange(batch * length).view(batch, length) % 23 for length in lengths)

    batch, source, target = (torch.export.Dim(name, max=512) for name in ("batch", "source", "target"))
    shapes = [{0: batch, 1: source}, {0: batch, 1: target}]
    program = torch.export.export(model, example(3, 9, 7), dynamic_shapes=shapes).module()
    for size in ((3, 9, 7), (2, 12, 12), (1, 5, 60)):
        assert torch.allclose(program(*example(*size)), model(*example(*size)), rtol=1e-6, atol=1e-6)


def test_dynamic_rotary_scaling_says_that_it_is_not_exported() -> None:
    scaling = rg.RotaryScaling(kind="dynamic", factor=2.0)
    model = rg.Decoder(rg.DecoderConfig(**SIZES, rotary_scaling=scaling)).eval()
    with pytest.raises(
        ValueError, match=r"^rotary_scaling: expected none, linear or llama3 for torch\.export, got dyn"
    ):
        torch.export.export(model, (torch.ones(1, 5, dtype=torch.long),))
