"""Files of traces: opened as they were saved, and refused if they are none."""

import json

import pytest
import torch
from safetensors.torch import save_file

import regard as rg
from regard.inference.trace import Trace, TracedLayer, patterns, trace
from traced_models import (
    EVERYTHING,
    MODELS,
    inputs,
    layer_of,
    stack,
)


def same(left, right):
    assert (left.tokens, left.source_tokens, left.model) == (right.tokens, right.source_tokens, right.model)
    for mine, theirs in zip(left.layers, right.layers, strict=True):
        for name in TracedLayer.__dataclass_fields__:
            a, b = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, name


@pytest.mark.parametrize("name", ["llama", "bart", "vit"])
def test_a_trace_is_saved_and_opened_as_it_was(name, tmp_path):
    model = MODELS[name]().eval().to(torch.bfloat16 if name == "llama" else torch.float32)
    with trace(model, keep=EVERYTHING, tokens=["ä", "\udc80"], source_tokens=[["▁"], ["b"]]) as traced:
        model(**inputs(name))
    same(Trace.open(traced.save(tmp_path / "one.safetensors")), traced)
    same(Trace.open(Trace().save(tmp_path / "none.safetensors")), Trace())


def test_channel_attention_is_saved_too(tmp_path):
    model = stack(rg.Channel())
    with trace(model) as traced:
        model(torch.randn(1, 5, 16))
    same(Trace.open(traced.save(tmp_path / "one.safetensors")), traced)
    assert patterns(traced).heads == ()


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.safetensors"
    Trace([layer_of(torch.ones(1, 1, 2, 2) / 2)]).save(path)
    before = path.read_bytes()

    def broken(tensors, to, metadata):
        to.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        Trace().save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["one.safetensors"]
    with pytest.raises(ValueError, match="path: expected an existing folder"):
        Trace().save(tmp_path / "nowhere" / "one.safetensors")


FACTS = {"index": 0, "name": "", "kind": "self", "mechanism": "", "heads": [0], "rows": [0, 1], "causal": False}
SOFTMAX = {"name": "Softmax", "scale": 1.0, "softcap": None, "bias": False, "options": {}}
LAYER = {**FACTS, "by_pairs": True, "weights": "w"}
ABOUT = {"format": 1, "model": "", "tokens": None, "source_tokens": None, "layers": [LAYER]}


@pytest.mark.parametrize(
    "about",
    [
        None,
        [],
        {**ABOUT, "format": 3},
        {**ABOUT, "layers": 3},
        {**ABOUT, "layers": [3]},
        {**ABOUT, "layers": [LAYER, LAYER]},
        {**ABOUT, "model": 1},
        {**ABOUT, "tokens": [[1]]},
        {**ABOUT, "tokens": 5},
        {**ABOUT, "layers": [{**LAYER, "index": "0"}]},
        {**ABOUT, "layers": [{**LAYER, "kind": "other"}]},
        {**ABOUT, "layers": [{**LAYER, "heads": [0, 1]}]},
        {**ABOUT, "layers": [{**LAYER, "heads": [-1]}]},
        {**ABOUT, "layers": [{**LAYER, "rows": "01"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "gone"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": ["w"]}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "flat"}]},
        {**ABOUT, "layers": [{**LAYER, "weights": "whole"}]},
        {**ABOUT, "layers": [{**LAYER, "visible": "wide"}]},
        {**ABOUT, "layers": [{**LAYER, "real": "w"}]},
        {**ABOUT, "layers": [{**LAYER, "keys": "none"}]},
        {**ABOUT, "format": 2, "class_token": -1},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "grid": [3]}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "windows": [1, 2]}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "weights": "windows", "windows": [2, 2]}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "definition": {"name": "Softmax"}}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "definition": {**SOFTMAX, "scale": "x"}}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "definition": {**SOFTMAX, "options": {"c": []}}}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "outputs": "none"}]},
        {**ABOUT, "format": 2, "layers": [{**LAYER, "projection": "w"}]},
        {**ABOUT, "format": 2, "predictions": {"positions": [0], "names": [], "real": True}},
        {**ABOUT, "format": 2, "predictions": {"positions": [0, 1], "names": [], "real": False}},
        {**ABOUT, "format": 2, "predictions": {"positions": ["0"], "names": [], "real": False}},
        {**ABOUT, "format": 2, "predictions": {"positions": [0], "names": [[0, 1]], "real": False}},
        {**ABOUT, "format": 2, "predictions": 3},
        {**ABOUT, "layers": [{name: fact for name, fact in LAYER.items() if name != "causal"}]},
    ],
)
def test_files_that_are_no_traces_are_refused(about, tmp_path):
    tensors = {
        "w": torch.ones(1, 1, 2, 3),
        "flat": torch.ones(2, 3),
        "whole": torch.ones(1, 1, 2, 3, dtype=torch.int64),
        "wide": torch.ones(1, 1, 2, 4, dtype=torch.bool),
        "none": torch.ones(1, 0, 3, 4),
        "windows": torch.ones(1, 3, 1, 2, 3),
        "predictions.ids": torch.zeros(1, 1, 5, dtype=torch.int64),
        "predictions.probabilities": torch.zeros(1, 1, 5),
    }
    path = tmp_path / "one.safetensors"
    save_file(tensors, path, metadata={} if about is None else {"regard.inference.trace": json.dumps(about)})
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)


def test_a_file_of_the_first_format_opens_without_what_it_lacks(tmp_path):
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(1, 1, 2, 3)}, path, metadata={"regard.inference.trace": json.dumps(ABOUT)})
    old = Trace.open(path)
    assert old.layers[0].definition is old.layers[0].windows is old.predictions is old.grid is old.class_token is None
    with pytest.raises(ValueError, match="top: expected a model with logits"):
        old.top()


def test_the_file_that_the_refused_ones_were_made_of_opens(tmp_path):
    path = tmp_path / "one.safetensors"
    save_file({"w": torch.ones(1, 1, 2, 3)}, path, metadata={"regard.inference.trace": json.dumps(ABOUT)})
    assert Trace.open(path).layers[0].weights.shape == (1, 1, 2, 3)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)
    path.write_text("not a trace")
    with pytest.raises(ValueError, match=r"one\.safetensors: expected"):
        Trace.open(path)
