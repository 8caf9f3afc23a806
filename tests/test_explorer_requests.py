"""What the explorer is asked for: inputs, limits, broken requests, the menu."""

import json
import math

import pytest

import explored
import regard as rg
from explored import png, run, session_of
from image_models import make
from regard.explorer.catalog import catalog, folder_kind, load_model, mechanisms_json
from regard.explorer.limits import check_size, count_weights
from regard.explorer.requests import run_request
from regard.explorer.session import Session
from regard.explorer.subject import Pair, Picture, Text, of_ids, subject_of


def test_inputs_that_do_not_fit_are_refused():
    model, pair = explored.decoder(), explored.translator()
    for chosen, kind, match in (
        (Text(""), model, "at least one token"),
        (Pair("a", "b"), model, "expected one text"),
        (Text("a"), pair, "source and a target"),
        (Pair("", "b"), pair, "source: expected a text"),
        (Picture(png()), model, "got a picture"),
        (Text("a"), make(), "expected a picture"),
    ):
        with pytest.raises(ValueError, match=match):
            subject_of("model", kind, chosen)


def test_size_is_checked_before_any_work(monkeypatch):
    model = explored.decoder(num_layers=3, num_heads=2, context_length=8192)
    subject = of_ids("model", model, [3] * 10)
    assert count_weights(subject) == 3 * 2 * 100
    assert check_size(subject) is subject
    with pytest.raises(ValueError, match="at most 2,048 tokens, got 3,000"):
        check_size(of_ids("model", model, [3] * 3000))
    monkeypatch.setattr("regard.explorer.limits.MOST_WEIGHTS", 500)
    with pytest.raises(ValueError, match="at most 500 weights in all layers and heads, got 600"):
        check_size(subject)
    pair = explored.translator()
    assert count_weights(of_ids("model", pair, [3] * 4, [3] * 6)) == 4 * (2 * 36 + 2 * 16 + 2 * 24)


def test_snapshots_that_nobody_asked_for_are_dropped(monkeypatch):
    session = session_of(model=explored.decoder())
    monkeypatch.setattr("regard.explorer.session.MOST_BYTES", 3000)
    names = [run(session)[0][0]["run"] for _ in range(5)]
    assert list(session.snapshots) == names[-2:]
    with pytest.raises(ValueError, match="run: expected a recent run, got '1'; run it again"):
        session.snapshot(names[0])


BROKEN = [
    ({"model": 3, "input": {"text": "a"}}, "model: expected a text"),
    ({"model": "m", "input": "a"}, "input: expected an object"),
    ({"model": "m", "input": {}}, "input: expected text, source or image"),
    ({"model": "m", "input": {"text": "a" * 200_000}}, "at most 100,000 characters"),
    ({"model": "m", "input": {"text": "\ud800"}}, "half of a surrogate pair"),
    ({"model": "m", "input": {"image": "%" * 100}}, "image: expected the name of a picture, or base64"),
    ({"model": "m", "input": {"text": "a"}, "twin": 1}, "twin: expected true or false"),
    ({"model": "m", "input": {"text": "a"}, "changes": {}}, None),
    ({"model": "m", "input": {"text": "a"}, "changes": "x"}, "changes: expected a list"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{}] * 300}, "changes: expected a list of at most 256"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{}]}, "changes: expected one of"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"layers": [0]}]}, "changes: expected one of"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"silence": "yes"}]}, "silence: expected true or false"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"beta": -1}]}, "beta: expected a number"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"beta": math.nan}]}, "beta: expected a number"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"mechanism": "os:system"}]}, "mechanism: expected one of"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"mechanism": "elu", "window": 3}]}, "window: expected it"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"layers": [True], "silence": True}]}, "layers: expected"),
    ({"model": "m", "input": {"text": "a"}, "changes": [{"silence": True, "x\ud800": 1}]}, "changes: expected some"),
]


@pytest.mark.parametrize(("body", "match"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_request_is_one_error(body, match):
    if match is None:
        assert run_request(body).changes == ()
        return
    with pytest.raises(ValueError, match=match) as raised:
        run_request(body)
    json.dumps(str(raised.value), ensure_ascii=False).encode()  # an answer can carry it
    assert len(str(raised.value)) < 300


def test_the_menu_begins_with_the_shipped_translator(tmp_path, monkeypatch):
    rg.save(explored.translator(), tmp_path / "runs/mine/model")
    monkeypatch.chdir(tmp_path)
    entries = {entry.name: entry for entry in catalog()}
    assert next(iter(entries)) == "translator"
    assert entries["translator"].installed
    assert entries["runs/mine/model"].kind == "pair"
    assert entries["vision"].install == "regard train vision --out runs/vision"
    json.dumps([entry.to_json() for entry in entries.values()])
    assert all(entry["title"] and entry["formula"] for entry in mechanisms_json())
    assert {entry["name"] for entry in mechanisms_json()} >= {"softmax", "quadratic", "elu", "window"}
    assert folder_kind(tmp_path) is None
    with pytest.raises(ValueError, match="regard train vision"):
        load_model("vision")
    with pytest.raises(ValueError, match="model: expected one of the menu"):
        Session(any_path=False).model(str(tmp_path / "elsewhere"))
