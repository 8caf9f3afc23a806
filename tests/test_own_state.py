"""A mechanism with a state of its own, in a file outside of the package."""

import copy
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard as rg
from forgetting_cases import SIZES, B, G, K, V, draw, off

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def outside() -> Any:
    path = ROOT / "examples/forgetful_mechanism.py"
    spec = importlib.util.spec_from_file_location("forgetful_mechanism", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_a_state_of_ones_own_streams_forks_reorders_and_remembers(outside: Any) -> None:
    mechanism, (q, k, v) = outside.Forgetful(), draw(30)
    real = torch.arange(30) >= torch.tensor([[0], [9]])
    k, v = (t.masked_fill(~real[:, None, :, None], math.nan) for t in (k, v))
    whole = rg.attend(q, k, v, mechanism, rg.padding(valid=real))
    state = mechanism.start(batch=B, num_kv_heads=G, qk_length=K, value_length=V, dtype=torch.float64)
    first, state = mechanism.extend(
        q[:, :, :20], k[:, :, :20], v[:, :, :20], state, rg.causal & rg.padding(valid=real[:, :20])
    )
    assert isinstance(state, outside.FadingState)
    order = torch.tensor([1, 0, 1])
    for rows, now in ((torch.arange(B), state), (order, state.reorder(order))):
        rest, longer = mechanism.extend(q[rows, :, 20:], k[rows, :, 20:], v[rows, :, 20:], now)
        assert off(torch.cat([first[rows], rest], 2), whole[rows]) <= 1e-13
        assert (longer.length, longer.batch, state.length) == (30, len(rows), 20)
    with pytest.raises(ValueError, match="mask: expected padding that leaves the first 20 tokens"):
        mechanism.extend(
            q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state, rg.padding(valid=real & (torch.arange(30) != 12))
        )
    with pytest.raises(ValueError, match="length: expected 20, since FadingState cannot be cropped, got 3"):
        state.crop(3)
    k[0, 0, 25] = math.nan
    rest, longer = mechanism.extend(q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], state)
    assert rest[0, :2, 5:].isnan().all()
    assert rest[0, :2, :5].isfinite().all()
    assert rest[1].isfinite().all()
    later, _ = mechanism.extend(q[:, :, :1], q[:, :2, :1], q[:, :2, :1, :V], longer)
    assert later[0, :2].isnan().all()
    assert later[0, 2:].isfinite().all()


def test_a_state_of_ones_own_serves_a_model_generation_prompts_and_traces(outside: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=outside.Forgetful(rate=0.7))).eval()
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8]]
    together = rg.generate(model, prompts, max_new_tokens=6)
    assert [row.tokens for row in together] == [rg.generate(model, [p], max_new_tokens=6)[0].tokens for p in prompts]
    assert rg.generate(model, [[1, 2]], beams=3, max_new_tokens=4)[0].tokens
    prompt = rg.prefill(model, prompts)
    prompt.save(tmp_path / "prompt.safetensors")
    again = rg.Prompt.load(tmp_path / "prompt.safetensors", model)
    assert again.nbytes == prompt.nbytes
    assert [row.tokens for row in rg.generate(model, state=again, max_new_tokens=6)] == [row.tokens for row in together]
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad(), rg.trace(model, keep=("queries", "keys", "weights")) as whole:
        model(tokens)
    with torch.no_grad(), rg.trace(model, keep=("queries", "keys", "weights")) as steps:
        _, state = model.extend(tokens[:, :3], model.start(batch=1))
        model.extend(tokens[:, 3:], state)
    for layer, step in zip(whole.layers, steps.layers, strict=True):
        assert torch.allclose(layer.weights, step.weights, atol=1e-6)
        assert torch.equal(layer.weights, rg.weights(layer.queries, layer.keys, outside.Forgetful(rate=0.7), rg.causal))


def with_fields(outside: Any, first: dict[str, Any], later: dict[str, Any]) -> rg.Decoder:
    """A decoder whose states have more fields: some at first, others once they have met tokens."""
    names = dict.fromkeys(first, Any)
    state_kind: Any = dataclass(frozen=True, eq=False, kw_only=True)(
        type("Noting", (outside.FadingState,), {"__annotations__": names})
    )

    class Noting(outside.Forgetful):  # type: ignore[misc,name-defined]
        def state_type(self, qk_length: int) -> Any:
            return state_kind

        def empty_state(self, *arguments: Any) -> Any:
            return state_kind(**vars(super().empty_state(*arguments)), **first)

        def advance(self, *arguments: Any) -> Any:
            out, state = super().advance(*arguments)
            return out, replace(state, **copy.deepcopy(later))

    torch.manual_seed(0)
    return rg.Decoder(rg.DecoderConfig(**SIZES, mechanism=Noting())).eval()


FIELDS = {
    "numbers": ({"one": 0, "two": 0.5}, {"one": 3, "two": math.inf}),
    "whole, then not": ({"one": 0, "two": 1.0}, {"one": 0.25, "two": 2}),
    "words and truths": ({"one": "", "two": False}, {"one": "é\n", "two": True}),
    "None, then a number": ({"one": None, "two": 7}, {"one": -4, "two": None}),
    "None, then tensors": (
        {"one": None, "two": None},
        {"one": torch.rand(3, 2, 5), "two": torch.tensor([1, 2, 3], dtype=torch.int32)},
    ),
    "a tensor, then None": ({"one": torch.rand(1, 2, 5), "two": 0}, {"one": None, "two": 0}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_are_no_tensors_are_saved_and_restored(outside: Any, tmp_path: Path, name: str) -> None:
    first, later = FIELDS[name]
    model = with_fields(outside, first, later)
    rg.prefill(model, [[1, 2, 3], [4], [5]]).save(tmp_path / "prompt.safetensors")
    for layer in rg.Prompt.load(tmp_path / "prompt.safetensors", model).state.layers:
        for field, value in later.items():
            restored = getattr(layer, field)
            assert type(restored) is type(value)
            assert torch.equal(restored, value) if isinstance(value, Tensor) else restored == value
        assert torch.equal(layer.reorder(torch.tensor([2])).sums, layer.sums[2:])
        assert layer.device == torch.device("cpu")


@pytest.mark.parametrize(
    "value", [[1, 2], {"a": 1}, torch.float32, nn.Linear(1, 1), 1j], ids=lambda value: str(type(value))
)
def test_a_field_that_no_file_holds_is_refused_when_the_state_is_saved(
    outside: Any, tmp_path: Path, value: object
) -> None:
    prompt = rg.prefill(with_fields(outside, {"noted": None}, {"noted": value}), [[1, 2]])
    message = rf"^noted: expected a tensor, a number, .* in a Noting that is saved, got {type(value).__name__}$"
    with pytest.raises(ValueError, match=message):
        prompt.save(tmp_path / "prompt.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "described",
    [
        {"one": 3},
        {"one": "3", "two": 0.5, "three": None},
        {"one": True, "two": 0.5, "three": None},
        {"one": {"dtype": "float32", "shape": [2]}, "two": 0.5, "three": None},
        {"one": 3, "two": [0.5], "three": None},
        {"one": 3, "two": 0.5, "three": [1]},
        {"one": 3, "two": 0.5, "three": {"dtype": "load", "shape": []}},
        {"one": 3, "two": 0.5, "three": {"dtype": "float32", "shape": [10**9]}},
        None,
    ],
    ids=str,
)
def test_fields_of_other_kinds_in_a_file_are_refused(outside: Any, tmp_path: Path, described: Any) -> None:
    model = with_fields(outside, {"one": 0, "two": 0.5, "three": None}, {})
    rg.prefill(model, [[1, 2]]).save(tmp_path / "prompt")
    with safe_open(tmp_path / "prompt", "pt") as file:
        plan = json.loads(file.metadata()["regard.prompt"])
    plan["layers"][0]["fields"] = described
    save_file(load_file(tmp_path / "prompt"), tmp_path / "changed", metadata={"regard.prompt": json.dumps(plan)})
    with pytest.raises(rg.CheckpointError, match="expected a saved prompt of this model"):
        rg.Prompt.load(tmp_path / "changed", model)


def test_a_state_of_ones_own_keeps_every_law(outside: Any) -> None:
    masks = ["none", "padding left"]
    report = rg.check(outside.Forgetful(), masks=masks, heads=["GQA"], dtypes=["float64"], examples=1)
    assert report.ok, str(report)
    holding = {cell.law for cell in report.cells if cell.outcome == "held"}
    assert {cell.law for cell in report.cells} - holding == {"permuted"}
