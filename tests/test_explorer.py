"""The explorer's numbers are the model's: weights, codes, chains, changes and costs."""

import json
import math

import pytest
import torch

import explored
import regard as rg
from image_models import make, make_davit
from regard.explorer.catalog import catalog, folder_kind, load_model, mechanisms_json
from regard.explorer.changes import HeadChange, WindowedSoftmax, changed
from regard.explorer.codes import MASKED, codes, decoded, pool_size, thumbnails
from regard.explorer.frames import frame, json_text, read_frames
from regard.explorer.limits import check_size, count_weights
from regard.explorer.requests import run_request
from regard.explorer.session import Session
from regard.explorer.snapshot import run_frames
from regard.explorer.subject import Pair, Picture, Text, of_ids, subject_of
from regard.explorer.twin import random_twin
from regard.explorer.why import explain_weight


def frames_of(compute, *arguments):
    parts = []
    compute(*arguments, parts.append)
    return list(read_frames(b"".join(parts)))


def session_of(**models):
    return Session(models)


def run(session, model="model", changes=(), twin=False, **chosen):
    body = {"model": model, "input": chosen or {"text": "a b c d e f"}, "changes": list(changes), "twin": twin}
    return frames_of(session.run, run_request(body))


def table(data, rows, columns, dtype=torch.float32, offset=0):
    return torch.frombuffer(bytearray(data), dtype=dtype, count=rows * columns, offset=offset).view(rows, columns)


def test_frames_are_read_as_they_were_written():
    content = frame({"type": "a", "ü": "</script>\u2028"}, b"\0\1") + frame({"type": "b"})
    assert list(read_frames(content)) == [({"type": "a", "ü": "</script>\u2028"}, b"\0\1"), ({"type": "b"}, b"")]
    assert json_text([math.nan, -math.inf, 1.5, (True, None)]) == "[null,null,1.5,[true,null]]"


@pytest.mark.parametrize("name", explored.MODELS)
def test_values_of_a_head_are_the_traces(name):
    session = Session()
    taken = explored.snapshot(explored.MODELS[name]())
    session.keep(taken)
    generator = torch.Generator().manual_seed(0)
    for layer in taken.trace.layers:
        head = int(torch.randint(4, (), generator=generator))
        [(header, data)] = read_frames(session.head("1", layer.index, head))
        weights = table(data, header["rows"], header["columns"])
        for _ in range(200):
            row, column = (int(torch.randint(size, (), generator=generator)) for size in weights.shape)
            assert weights[row, column] == layer.weights[0, head, row, column]
        visible = table(data, *weights.shape, torch.uint8, offset=4 * weights.numel()).bool()
        assert not weights[~visible].any()
        whole = torch.stack([taken.head(layer.index, number)[0] for number in range(4)])
        torch.testing.assert_close(taken.head(layer.index, "mean")[0], whole.mean(0))
        assert torch.equal(taken.head(layer.index, "max")[0], whole.amax(0))


def test_masked_is_told_apart_from_zero():
    taken = explored.snapshot(explored.decoder(mechanism=rg.Argmax()), length=5)
    weights, visible = taken.head(0, 0)
    assert bool((weights[visible] == 0).any())
    coded = codes(weights, visible)
    assert (coded == MASKED).tolist() == (~visible).tolist()
    assert torch.equal(visible, torch.ones(5, 5, dtype=torch.bool).tril())


@pytest.mark.parametrize("size", [(5, 7), (64, 64), (65, 130), (512, 512), (100, 700)])
def test_a_single_weight_lights_exactly_its_cell(size):
    for row, column in ((0, 0), (size[0] - 1, size[1] - 1), (size[0] // 2, size[1] // 3)):
        weights = torch.zeros(2, *size)
        weights[1, row, column] = 0.5
        small = thumbnails(weights)
        assert max(small.shape[1:]) <= 64
        place = row // pool_size(size[0]), column // pool_size(size[1])
        assert small.nonzero().tolist() == [[1, *place]]
        assert abs(float(decoded(small)[1, place[0], place[1]]) - 0.5) < 0.01


def test_a_cell_is_masked_only_if_all_of_it_is():
    visible = torch.ones(512, 512, dtype=torch.bool).tril()[None]
    small = thumbnails(torch.full((1, 512, 512), 1 / 512), visible)
    assert torch.equal(small[0] == MASKED, ~torch.ones(64, 64, dtype=torch.bool).tril())
    assert int(small[0, 0, 0]) == round(254 * 512**-0.5)
    assert codes(torch.tensor([[-0.25, 2.0, math.nan]])).tolist() == [[127, 254, 0]]


def test_cross_attention_has_its_axes_right():
    taken = explored.snapshot(explored.translator(), length=4, source_length=6)
    header = next(read_frames(next(run_frames(taken))))[0]
    cross = [layer for layer in header["layers"] if layer["kind"] == "cross"]
    assert [(layer["rows"], layer["columns"], layer["queries"], layer["keys"]) for layer in cross] == [
        (4, 6, "tokens", "sources")
    ] * 2
    inside = [layer for layer in header["layers"] if layer["side"] == "encoder"]
    assert [(layer["rows"], layer["columns"], layer["queries"], layer["keys"]) for layer in inside] == [
        (6, 6, "sources", "sources")
    ] * 2
    assert (len(header["tokens"]), len(header["sources"])) == (4, 6)
    weights, _ = taken.head(cross[0]["index"], 1)
    traced = taken.trace.layers[cross[0]["index"]]
    assert torch.equal(weights, traced.weights[0, 1])
    q, k = traced.queries[0, 1], traced.keys[0, 1]
    torch.testing.assert_close(weights, (q @ k.T / 2).softmax(-1))


@pytest.mark.parametrize("name", explored.MODELS)
def test_the_chain_of_why_ends_in_the_weight(name):
    taken = explored.snapshot(explored.MODELS[name]())
    hidden = 0
    for view in taken.layers:
        for head in (0, 1, 3):
            weights, visible = taken.head(view.traced.index, head)
            for query, key in ((0, 0), (2, 1), (3, 3), (3, 0), (1, 4)):
                why = explain_weight(taken, view.traced.index, head, query, key)
                assert why["steps"][-1]["value"] == pytest.approx(float(weights[query, key]), abs=1e-5)
                assert why["exact"]
                assert why["visible"] == bool(visible[query, key])
                assert why["product"] == pytest.approx(sum(map(float.__mul__, why["q"], why["k"])), abs=1e-4)
                hidden += not why["visible"]
                assert why["part_norm"] == pytest.approx(abs(why["weight"]) * why["value_norm"], abs=1e-5)
    assert (hidden > 0) == (name not in ("bert", "quadratic"))


def test_the_chain_of_softmax_can_be_followed_by_hand():
    taken = explored.snapshot(explored.MODELS["t5"](), length=5)
    why = explain_weight(taken, 2, 1, 4, 2)
    assert [step["name"] for step in why["steps"]] == ["product", "scaled", "biased", "exponential", "weight"]
    assert why["score"] == pytest.approx(why["scale"] * why["product"] + why["bias"])
    assert why["weight"] == pytest.approx(math.exp(why["score"] - why["max"]) / why["sum"], abs=1e-5)
    model, view = taken.subject.model, taken.layer(2)
    block = model.decoder.blocks[0].attention
    part = block.W_o.weight[:, 4:8] @ (taken.head(2, 1)[0][4, 2] * view.value(1)[2])
    assert why["out_norm"] == pytest.approx(float(part.detach().norm()), rel=1e-5)
    shares = [explain_weight(taken, 2, 1, 4, key)["share"] for key in range(5)]
    assert sum(shares) == pytest.approx(1)


def test_why_between_channels():
    model = make_davit().float()
    session = Session({"davit": model})
    subject = subject_of("davit", model, Picture(png(48)))
    session.keep(session.taken(subject))
    [name] = session.snapshots
    taken = session.snapshot(name)
    channels = next(view for view in taken.layers if not view.traced.by_pairs)
    why = explain_weight(taken, channels.traced.index, 1, 1, 0)
    assert why["kind"] == "channel"
    assert why["steps"][-1]["value"] == pytest.approx(why["weight"], abs=1e-5)


@pytest.mark.parametrize("name", ["bert", "gpt2", "grouped", "t5"])
def test_the_ends_of_the_dial_are_uniform_and_argmax(name):
    session, taken = Session(), explored.snapshot(explored.MODELS[name]())
    session.keep(taken)
    for view in taken.layers:
        q, k = view.traced.queries, view.traced.keys
        mask = None if view.visible is None else rg.dense(view.traced.visible)
        [(header, data)] = read_frames(session.scores("1", view.traced.index, 2))
        rows, columns = header["rows"], header["columns"]
        products = table(data, rows, columns)
        assert header["has_bias"] == (view.bias is not None)
        offset = 4 * rows * columns * (1 + header["has_bias"])
        visible = table(data, rows, columns, torch.uint8, offset=offset).bool()
        shown = products.masked_fill(~visible, -math.inf)
        uniform = (shown * 0.0).masked_fill(~visible, -math.inf).softmax(-1)
        best = shown == shown.amax(-1, keepdim=True)
        for ours, mechanism in ((uniform, rg.Uniform()), (best / best.sum(-1, keepdim=True), rg.Argmax())):
            theirs = rg.weights(q, k, mechanism, mask, heads=[2])[0, 0]
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
        bias = table(data, rows, columns, offset=4 * rows * columns) if header["has_bias"] else 0.0
        softmax = (header["scale"] * products + bias).masked_fill(~visible, -math.inf).softmax(-1)
        torch.testing.assert_close(softmax, taken.head(view.traced.index, 2)[0], rtol=0, atol=1e-6)


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
    assert after[-1][0]["divergence"] == pytest.approx(divergence, rel=1e-3, abs=1e-6)
    assert before[-1][0]["divergence"] is None
    assert after[-1][0]["distance"] > 0
    weights, visible = taken.head(1, 2)
    assert not weights[~visible].any()
    assert bool(visible[:, 1].any()) == (name != "hide")


def test_a_change_is_compared_without_a_run_before_it():
    model = explored.decoder()
    alone = run(session_of(model=model), changes=[{"beta": 0}])[-1][0]
    session = session_of(model=model)
    run(session)
    assert alone["divergence"] == run(session, changes=[{"beta": 0}])[-1][0]["divergence"] > 0


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
    assert frames[-1][0]["divergence"] == again[-1][0]["divergence"] > 0
    assert [data for _, data in frames] == [data for _, data in again]


def test_a_run_streams_its_layers_with_labels_and_statistics():
    model = explored.encoder()
    session = session_of(model=model)
    frames = run(session, text="a b c a b c")
    header, *layers, done = (header for header, _ in frames)
    assert [layer["type"] for layer in layers] == ["layer"] * 2
    assert done["type"] == "done"
    assert done["top"] is None
    taken = session.snapshot(header["run"])
    patterns, statistics = taken.trace.patterns(), taken.trace.statistics()
    assert [label for layer in layers for label in layer["labels"]] == [head.label for head in patterns.heads]
    assert [value for layer in layers for value in layer["entropy"]] == [head.entropy for head in statistics]
    for (layer, data), view in zip(frames[1:-1], taken.layers, strict=True):
        assert len(data) == 4 * layer["size"][0] * layer["size"][1]
        assert data == codes(view.weights).numpy().tobytes()


def test_tokens_special_tokens_and_words_of_a_shipped_model():
    session = Session()
    frames = run(session, "translator", source="La voiture rouge est rapide.")
    header, done = frames[0][0], frames[-1][0]
    assert header["tokens"] == ["[START]", "The", " red", " car", " is", " fast", "."]
    assert header["special"] == [True] + [False] * 6
    assert header["sources"][-1] == "[END]"
    assert header["source_special"][-1]
    assert len(set(header["words"])) == 7
    assert done["text"] == "The red car is fast."
    assert done["top"][0]["token"] in (" fast", " is", "The", " red", " car", ".")
    assert all(layer["mechanism"]["name"] == "softmax" for layer in header["layers"])
    blind = {"layers": [3, 5], "silence": True}
    silenced = run(session, "translator", changes=[blind], source="La voiture rouge est rapide.")
    assert silenced[0][0]["tokens"] == header["tokens"]
    assert silenced[-1][0]["text"] != done["text"]
    other = run(session, "translator", source="Le chat dort.", target="The dog eats.")
    assert other[0][0]["tokens"] == ["[START]", "The", " dog", " eats", "."]


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
    assert run(session)[-1][0]["type"] == "done"


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
    header, done = again[0][0], again[-1][0]
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


def test_windows_of_a_picture_one_by_one():
    session = session_of(davit=explored.davit())
    session.run(run_request({"model": "davit", "input": {"image": "letter A"}}), lambda content: None)
    [name] = session.snapshots
    taken = session.snapshot(name)
    windows = taken.layers[0].traced.weights[0]
    assert windows.shape[0] == 16
    for window in (0, 7, 15):
        assert torch.equal(taken.head(0, 1, window)[0], windows[window, 1])
        why = explain_weight(taken, 0, 1, 5, 2, window)
        assert why["steps"][-1]["value"] == pytest.approx(float(windows[window, 1, 5, 2]), abs=1e-5)
    assert torch.equal(taken.head(0, 1)[0], windows[10, 1])
    assert session.cost(name, 0)["here"]["length"] == 16
    for wrong in (16, 3):
        with pytest.raises(ValueError, match="window: expected a number below"):
            taken.head(0 if wrong == 16 else 1, 1, wrong)


def test_rollout_is_the_traces():
    session, taken = Session(), explored.snapshot(explored.encoder())
    session.keep(taken)
    [(header, data)] = read_frames(session.rollout("1"))
    assert torch.equal(table(data, header["rows"], header["columns"]), taken.trace.rollout()[0])


def png(size=20, mode="RGB"):
    from io import BytesIO

    from PIL import Image

    file = BytesIO()
    Image.new(mode, (size, size + 4), 128).save(file, "PNG")
    return file.getvalue()


def test_a_picture_becomes_patches():
    model = make().float()
    subject = subject_of("vit", model, Picture(png()))
    assert (subject.grid, subject.class_token, len(subject.tokens)) == ((3, 5), True, 16)
    assert subject.inputs[0].shape == (1, 3, 12, 20)
    session = session_of(vit=model)
    frames = frames_of(session.run, run_request({"model": "vit", "input": {"image": "letter A"}}))
    header, done = frames[0][0], frames[-1][0]
    assert header["kind"] == "image"
    assert header["picture"].startswith("data:image/png;base64,")
    assert len(done["top"]) == 5
    assert header["layers"][0]["rows"] == 16
    for content, match in ((b"GIF89a", "PNG or JPEG"), (png()[:40], "PNG or JPEG"), (b"", "PNG or JPEG")):
        with pytest.raises(ValueError, match=match):
            subject_of("vit", model, Picture(content))


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


def test_changed_outside_is_unchanged():
    model, tokens = explored.decoder(), torch.tensor([[3, 4, 5]])
    before = model(tokens)
    with changed(model, [HeadChange(layers=(0,), silence=True)]):
        assert not torch.equal(model(tokens), before)
    assert torch.equal(model(tokens), before)
