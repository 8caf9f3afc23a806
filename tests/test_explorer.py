"""The explorer's numbers are the model's: weights, codes, chains, labels, pictures."""

import math
import struct
import zlib

import pytest
import torch

import explored
import regard as rg
from explored import done_of, frames_of, png, run, session_of, table
from image_models import make, make_davit
from regard.explorer.codes import MASKED, codes, decoded, pool_size, thumbnails
from regard.explorer.frames import frame, json_text, read_frames
from regard.explorer.notebook import of_trace
from regard.explorer.requests import run_request
from regard.explorer.session import Session
from regard.explorer.snapshot import layer_frames, run_frames
from regard.explorer.subject import Picture, subject_of
from regard.explorer.why import explain_weight


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


def test_a_run_streams_thumbnails_then_labels_and_its_output_then_statistics():
    model = explored.encoder()
    session = session_of(model=model)
    frames = run(session, text="a b c a b c")
    headers = [header for header, _ in frames]
    assert [header["type"] for header in headers] == [
        "run", "layer", "layer", "strongest", "labels", "labels", "done", "statistics", "statistics"
    ]  # fmt: skip
    assert headers[6]["top"] is None
    taken = session.snapshot(headers[0]["run"])
    patterns, statistics = taken.trace.patterns(), taken.trace.statistics()
    assert [label for part in headers[4:6] for label in part["labels"]] == [head.label for head in patterns.heads]
    assert [value for part in headers[7:] for value in part["entropy"]] == [head.entropy for head in statistics]
    for (layer, data), view in zip(frames[1:3], taken.layers, strict=True):
        assert len(data) == 4 * layer["size"][0] * layer["size"][1]
        assert data == codes(view.weights).numpy().tobytes()


@pytest.mark.parametrize("tokens", [12, 300])
def test_a_page_begins_with_the_strongest_head_and_labels_are_those_of_all_rows(tokens):
    """Head 2 of layer 1 attends to the token before; head 0 does in its first rows, and is uniform after them."""
    before = torch.eye(tokens).roll(-1, 1)
    even = torch.full((tokens, tokens), 1 / tokens)
    partly = torch.where(torch.arange(tokens)[:, None] < 0.6 * tokens, before, even)
    weights = [torch.stack([even, even, even, even]), torch.stack([partly, even, before, even])]
    layers = [
        rg.TracedLayer(
            index=index, name=f"layers.{index}", kind="self", mechanism="", heads=(0, 1, 2, 3),
            rows=tuple(range(tokens)), weights=table[None],
        )
        for index, table in enumerate(weights)
    ]  # fmt: skip
    trace = rg.Trace(layers)
    headers = [header for content in layer_frames(of_trace(trace)) for header, _ in read_frames(content)]
    (strongest,) = (header for header in headers if header["type"] == "strongest")
    assert (strongest["index"], strongest["head"]) == (1, 2)
    labels = [label for header in headers if header["type"] == "labels" for label in header["labels"]]
    strength = [share for header in headers if header["type"] == "labels" for share in header["strength"]]
    assert labels == [head.label for head in trace.patterns().heads]
    assert strength == [head.strength for head in trace.patterns().heads]
    assert labels[4] == labels[6] == "previous"


def test_tokens_special_tokens_and_words_of_a_shipped_model():
    session = Session()
    frames = run(session, "translator", source="La voiture rouge est rapide.")
    header, done = frames[0][0], done_of(frames)
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
    assert done_of(silenced)["text"] != done["text"]
    other = run(session, "translator", source="Le chat dort.", target="The dog eats.")
    assert other[0][0]["tokens"] == ["[START]", "The", " dog", " eats", "."]


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


def test_a_picture_becomes_patches():
    model = make().float()
    subject = subject_of("vit", model, Picture(png()))
    assert (subject.grid, subject.class_token, len(subject.tokens)) == ((3, 5), True, 16)
    assert subject.inputs[0].shape == (1, 3, 12, 20)
    session = session_of(vit=model)
    frames = frames_of(session.run, run_request({"model": "vit", "input": {"image": "letter A"}}))
    header, done = frames[0][0], done_of(frames)
    assert header["kind"] == "image"
    assert header["picture"].startswith("data:image/png;base64,")
    assert len(done["top"]) == 5
    assert header["layers"][0]["rows"] == 16
    huge = png().replace(struct.pack(">II", 20, 24), struct.pack(">II", 60_000, 60_000))
    header = huge[12:29]  # with the checksum that belongs to it
    huge = huge[:29] + struct.pack(">I", zlib.crc32(header)) + huge[33:]
    wrong = ((b"GIF89a", "PNG or JPEG"), (png()[:40], "PNG or JPEG"), (b"", "PNG or JPEG"), (huge, "16,000,000 pixels"))
    for content, match in wrong:
        with pytest.raises(ValueError, match=match):
            subject_of("vit", model, Picture(content))
