"""What the explorer computes beside a pass: changes, twins, effects, generation, costs."""

import math

import pytest
import torch

import explored
import regard as rg
from explored import done_of, frames_of, run, session_of
from regard.explorer.changes import HeadChange, WindowedSoftmax, changed
from regard.explorer.frames import read_frames
from regard.explorer.requests import run_request
from regard.explorer.session import Session
from regard.explorer.twin import random_twin
from regard.explorer.why import explain_weight

CHANGES = {
    "silence": ({"silence": True}, {"silence": True}),
    "mean": ({"mean": True}, {"mean": True}),
    "hide": ({"hide": [1, -1]}, {"hide": [1, -1]}),
    "beta": ({"beta": 2.5}, {"beta": 2.5}),
    "hard": ({"beta": "inf"}, {"beta": math.inf}),
    "quadratic": ({"mechanism": "quadratic"}, {"mechanism": rg.Quadratic()}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_what_intervene_does(name):
    asked, made = CHANGES[name]
    model = explored.decoder()
    session = session_of(model=model)
    before = run(session)
    after = run(session, changes=[{"layers": [1], "heads": [0, 2], **asked}])
    taken = session.snapshot(after[0][0]["run"])
    tokens = taken.subject.inputs[0]
    with torch.no_grad(), rg.intervene(model, layers=[1], heads=[0, 2], **made), rg.trace(model) as trace:
        logits = model(tokens)[0]
        assert torch.equal(taken.output.logits, logits)
    for layer in trace.layers:
        assert torch.equal(taken.layer(layer.index).weights, layer.weights[0])
    old, new = (session.snapshot(frames[0][0]["run"]).output.logits.log_softmax(-1) for frames in (before, after))
    divergence = float((old.exp() * (old - new)).sum(-1).mean())
    assert done_of(after)["divergence"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert done_of(before)["divergence"] is None
    assert done_of(after)["distance"] > 0
    weights, visible = taken.head(1, 2)
    assert not weights[~visible].any()
    assert bool(visible[:, 1].any()) == (name != "hide")


def test_a_change_is_compared_without_a_run_before_it():
    model = explored.decoder()
    alone = done_of(run(session_of(model=model), changes=[{"beta": 0}]))
    session = session_of(model=model)
    run(session)
    assert alone["divergence"] == done_of(run(session, changes=[{"beta": 0}]))["divergence"] > 0


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "softcap"])
def test_a_window_is_the_mask_of_a_window(name):
    model = explored.MODELS[name]()
    base = explored.snapshot(model)
    session = Session({"model": model})
    session.keep(base)
    taken = session.taken(base.subject, run_request(
        {"model": "model", "input": {"text": "a"}, "changes": [{"mechanism": "window", "window": 2}]}
    ).changes)  # fmt: skip
    for view, before in zip(taken.layers, base.layers, strict=True):
        if view.traced.kind == "cross":
            assert not isinstance(taken.mechanism(view, 0), WindowedSoftmax)
            continue
        near = rg.window(before=2, after=2)
        rule = near if view.traced.visible is None else rg.dense(view.traced.visible) & near
        theirs = rg.weights(view.traced.queries, view.traced.keys, before.mechanism, rule, bias=before.bias)[0]
        torch.testing.assert_close(view.weights, theirs, rtol=0, atol=1e-6)
        _, visible = taken.head(view.traced.index, 1)
        assert not visible[0, 3:].any()
        assert explain_weight(taken, view.traced.index, 1, 3, 2)["exact"]
    card = session.cost(_kept(session, taken), 0)
    assert card["mechanism"] == "window"
    assert card["flops"][-1] < 2 * 64 * 16 * 2**20


def _kept(session, taken):
    session.keep(taken)
    return taken.name


def test_a_twin_is_random_and_always_the_same():
    model = explored.decoder()
    state = torch.random.get_rng_state()
    first, second = random_twin(model), random_twin(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = list(zip(first.parameters(), second.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    session = session_of(model=model)
    frames = run(session, twin=True)
    again = run(session_of(model=model), twin=True)
    assert frames[0][0]["twin"]
    assert done_of(frames)["divergence"] == done_of(again)["divergence"] > 0
    assert [data for _, data in frames] == [data for _, data in again]


def test_effects_are_those_of_the_library():
    model = explored.decoder()
    session = session_of(model=model)
    name = run(session)[0][0]["run"]
    frames = frames_of(session.effects, name)
    assert [header["done"] for header, _ in frames[:-1]] == [0, 8]
    measured = rg.effects(model, session.snapshot(name).subject.inputs[0])
    heads = frames[-1][0]["heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [(e.layer, e.head) for e in measured.heads]
    assert [head["divergence"] for head in heads] == pytest.approx([e.divergence for e in measured.heads])


class StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["run", "effects", "generate"])
def test_a_computation_stops_when_it_is_told_to(name):
    session = session_of(model=explored.decoder())
    known_run = run(session)[0][0]["run"]
    calls = []

    def check():
        calls.append(1)
        if len(calls) > 1:
            raise StoppedError

    request = run_request({"model": "model", "input": {"text": "a b"}})
    start = {
        "run": lambda: session.run(request, lambda content: None, check),
        "effects": lambda: session.effects(known_run, lambda content: None, check),
        "generate": lambda: session.generate(known_run, 4, (), lambda content: None, check),
    }
    with pytest.raises(StoppedError):
        start[name]()
    assert done_of(run(session))


def test_generation_is_greedy_and_its_rows_are_its_attention():
    model = explored.decoder()
    session = session_of(model=model)
    name = run(session, text="a b c")[0][0]["run"]
    parts = []
    session.generate(name, 4, (), parts.append)
    frames = list(read_frames(b"".join(parts)))
    steps = [header for header, _ in frames if header["type"] == "step"]
    (written,) = rg.generate(model, "a b c", max_new_tokens=4, alternatives=5)
    assert [step["id"] for step in steps] == written.tokens
    for step, alternatives in zip(steps, written.alternatives, strict=True):
        assert [entry["id"] for entry in step["alternatives"]] == [number for number, _ in alternatives]
        assert step["probability"] == pytest.approx(step["alternatives"][0]["probability"])
    header = next(header for header, _ in frames if header["type"] == "run")
    assert header["generated"] == 3
    assert header["ids"] == [*session.snapshot(name).subject.tokens.ids, *written.tokens]
    parts.clear()
    session.generate(name, 4, (5, 6), parts.append)
    forced = [header for header, _ in read_frames(b"".join(parts)) if header["type"] == "step"]
    assert [step["id"] for step in forced][:2] == [5, 6]
    assert [step["forced"] for step in forced] == [True, True, False, False]
    with pytest.raises(ValueError, match="prefix: expected tokens from 0 to 18, got 99"):
        session.generate(name, 4, (99,), parts.append)


def test_a_run_of_another_takes_its_tokens():
    session = session_of(model=explored.decoder())
    name = run(session, text="a b c")[0][0]["run"]
    parts = []
    session.generate(name, 3, (), parts.append)
    generated = next(header for header, _ in read_frames(b"".join(parts)) if header["type"] == "run")
    again = frames_of(session.run, run_request({"of": generated["run"], "changes": [{"beta": 0}], "twin": True}))
    header, done = again[0][0], done_of(again)
    assert (header["ids"], header["generated"], header["twin"]) == (generated["ids"], 3, True)
    assert done["divergence"] > 0
    trained = frames_of(session.run, run_request({"of": header["run"]}))
    assert not trained[0][0]["twin"]
    model = session.snapshot(trained[0][0]["run"]).subject.model
    assert model is session.shown_models["model"]
    with torch.no_grad():
        logits = model(torch.tensor([header["ids"]]))[0]
    assert torch.equal(session.snapshot(trained[0][0]["run"]).output.logits, logits)
    random = []
    session.generate(header["run"], 2, (), random.append)
    assert next(header for header, _ in read_frames(b"".join(random)) if header["type"] == "run")["twin"]


def test_generation_of_a_translator():
    session = Session()
    name = run(session, "translator", source="Le chat dort.")[0][0]["run"]
    frames = []
    session.generate(name, 16, (), frames.append)
    headers = [header for header, _ in read_frames(b"".join(frames))]
    steps = [header["token"] for header in headers if header["type"] == "step"]
    assert steps == ["The", " cat", " sleeps", ".", "[END]"]
    header = next(header for header in headers if header["type"] == "run")
    assert (header["generated"], header["tokens"]) == (1, ["[START]", *steps])


def test_costs_are_the_librarys():
    session, taken = Session(), explored.snapshot(explored.decoder(), length=9)
    session.keep(taken)
    card = session.cost("1", 0)
    work = rg.Work(query_length=9, key_length=9, num_heads=1, num_kv_heads=1, qk_length=4, value_length=4,
                   dtype=torch.float32, cached=False, mask=rg.causal)  # fmt: skip
    assert card["here"]["flops"] == rg.cost(rg.Softmax(), work).flops
    assert [peer["mechanism"] for peer in card["peers"]] == ["quadratic", "elu", "retention"]
    assert len(card["lengths"]) == len(card["flops"]) == len(card["peers"][0]["bytes"])
    assert card["lengths"][-1] == 2**20
    crossing = {entry["mechanism"]: entry["length"] for entry in card["crossovers"]}
    wider = rg.Work(query_length=64, key_length=64, num_heads=1, num_kv_heads=1, qk_length=4, value_length=4,
                    dtype=torch.float32, mask=rg.causal)  # fmt: skip
    assert crossing["elu"] == rg.crossover(rg.Softmax(), rg.Elu(), wider)


def test_changed_outside_is_unchanged():
    model, tokens = explored.decoder(), torch.tensor([[3, 4, 5]])
    before = model(tokens)
    with changed(model, [HeadChange(layers=(0,), silence=True)]):
        assert not torch.equal(model(tokens), before)
    assert torch.equal(model(tokens), before)
