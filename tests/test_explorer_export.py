"""The exported page, the view in a notebook, and the command that makes them."""

import base64
import gzip
import hashlib
import html
import json
import re
import struct
import sys

import pytest
import torch

import explored
import regard as rg
from processes import forks
from regard.commands import main
from regard.explorer.bundle import converted, one_module
from regard.explorer.codes import codes, decoded
from regard.explorer.export import export, exported_page, largest
from regard.explorer.frames import read_frames
from regard.explorer.notebook import View, of_trace
from regard.explorer.snapshot import take
from regard.explorer.subject import Pair, Text, subject_of
from traced_models import MODELS, layer_of

TOKENS = ["</script>", "<!--", "\u2028", "\u202eabc", "👩‍🚀", "", "&amp;", '"', "'", "`${x}`", "]]>", "\\", "\0"]


def content_of(page):
    """The frames in an exported page."""
    data = re.search(r'<script type="application/octet-stream" id="data">([^<]*)</script>', page)[1]
    return list(read_frames(gzip.decompress(base64.b64decode(data))))


def strange():
    """A trace whose tokens could break a page."""
    weights = torch.rand(1, 2, len(TOKENS), len(TOKENS)).softmax(-1)
    return rg.Trace([layer_of(weights)], tokens=TOKENS, model="</title><script>alert(1)</script>")


def test_tokens_cannot_leave_the_element_that_they_stand_in():
    page = rg.view(strange()).html
    assert content_of(page)[0][0]["tokens"] == TOKENS
    assert "alert(1)</script>" not in page.replace("&lt;/script&gt;", "")
    assert page.count("<script") == page.count("</script>") == 2
    assert "\u202e" not in page
    assert page.count("</title>") == 1


def test_the_policy_allows_exactly_what_is_inline():
    page = rg.view(strange()).html
    policy = html.unescape(re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1])
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert "http" not in policy
    script = re.search(r'<script type="module">(.*?)</script>', page, re.S)[1]
    style = re.search(r"<style>(.*?)</style>", page, re.S)[1]
    for text, name in ((script, "script-src"), (style, "style-src")):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy
    markup = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.S)
    assert not re.search(r'(?:src|href)="(?!data:)', markup)
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_modules_are_joined_in_the_order_of_their_imports():
    text = one_module()
    assert not re.search(r"^\s*(?:import|export)\s", text, re.M)
    declared = re.findall(r"^const (module_\d+) =", text, re.M)
    assert len(declared) == len(set(declared)) >= 20
    for name in declared:
        assert text.index(f"const {name} =") == min(match.start() - 6 for match in re.finditer(rf"\b{name}\b", text))


@pytest.mark.parametrize(
    ("text", "body", "exports"),
    [
        ('import { a } from "./x.js";', "const { a } = M;", []),
        ('import * as x from "./x.js"', "const x = M;", []),
        ('import "./x.js";', "M;", []),
        ("export async function f() {}", "async function f() {}", ["f"]),
        ("export class C {}", "class C {}", ["C"]),
        ("let n = 1;\nexport{n as m,n as k};", "let n = 1;\n", ["m", "k"]),
        ("const s = 'export const';", "const s = 'export const';", []),
    ],
)
def test_forms_of_imports_and_exports(text, body, exports):
    result, names = converted(text, lambda path: "M")
    assert result == body
    assert [name.split("(")[0].removeprefix("get ") for name in names] == exports


@pytest.mark.parametrize("text", ["export default 3;", 'import x from "./x.js";', 'import { a } from "lit";'])
def test_other_forms_are_refused(text):
    with pytest.raises(ValueError, match="page: expected imports and exports of a simple form"):
        converted(text, lambda path: "M")


def cells_of(data):
    return [struct.unpack_from("<HHf", data, place) for place in range(0, len(data), 8)]


@pytest.mark.parametrize("full", [False, True])
def test_stored_weights_are_the_traces(full):
    taken = explored.snapshot(explored.decoder(), length=40)
    frames = content_of(exported_page(taken, full=full))
    header = frames[0][0]
    assert header["full"] == full
    top = {(head["layer"], head["head"]): data for head, data in frames if head["type"] == "top"}
    stored = {(head["layer"], head["head"]): data for head, data in frames if head["type"] == "codes"}
    assert len(top) == 8
    assert len(stored) == (8 if full else 0)
    for (layer, head), data in top.items():
        weights, visible = taken.head(layer, head)
        cells = cells_of(data)
        for row, column, weight in cells:
            assert weight == weights[row, column]
            assert visible[row, column]
        rows = {row for row, _, _ in cells}
        assert rows == set(range(40))
        for row in rows:
            assert max(weight for place, _, weight in cells if place == row) == weights[row].max()
        if full:
            assert stored[layer, head] == codes(weights, visible).numpy().tobytes()
            assert (decoded(codes(weights, visible)).sqrt() - weights.sqrt()).abs().max() <= 0.5 / 254 + 1e-6


def test_rows_and_columns_beyond_a_signed_number():
    """16 bits without a sign reach 65,535."""
    weights = torch.zeros(1, 40_000)
    weights[0, 39_999] = 1
    assert (0, 39_999, 1.0) in cells_of(largest(weights))


def test_an_export_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    taken = explored.snapshot(explored.decoder())
    path = export(taken, tmp_path / "page.html")
    first = path.read_text()
    assert first == export(taken, path).read_text()
    monkeypatch.setattr("regard.explorer.export.one_page", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(taken, path)
    assert path.read_text() == first
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]
    for wrong, match in (("page.png", "expected a file.html"), ("no/page.html", "existing folder")):
        with pytest.raises(ValueError, match=match):
            export(taken, tmp_path / wrong)


def test_a_notebook_shows_a_sandboxed_frame(tmp_path):
    model = explored.decoder().train()
    shown = rg.view(model, "a b c", height=500)
    assert isinstance(shown, View)
    assert model.training
    assert repr(shown).startswith("View of Decoder: 2 layers, 8 heads, ")
    markup = shown._repr_html_()
    sandbox = re.search(r'sandbox="([^"]*)"', markup)[1]
    assert "allow-same-origin" not in sandbox
    assert "height:500px" in markup
    assert html.unescape(re.search(r'srcdoc="([^"]*)"', markup)[1]) == shown.html
    assert shown.save(tmp_path / "a.html").read_text() == shown.html
    header = content_of(shown.html)[0][0]
    assert (header["tokens"], header["input"]) == (["a", "b", "c"], {"text": "a b c"})


def test_a_trace_alone_is_shown():
    model = explored.translator()
    with rg.trace(model, tokens=[list("abcd")] * 2, source_tokens=[list("efghij")] * 2) as trace:
        model(torch.randint(3, 9, (2, 6)), torch.randint(3, 9, (2, 4)))
    header = content_of(rg.view(trace).html)[0][0]
    assert (header["tokens"], header["sources"], header["kind"]) == (list("abcd"), list("efghij"), "pair")
    assert [(layer["rows"], layer["columns"]) for layer in header["layers"]] == [
        (6, 6),
        (6, 6),
        (4, 4),
        (4, 6),
        (4, 4),
        (4, 6),
    ]
    second = of_trace(trace, 1)
    assert torch.equal(second.head(3, 0)[0], trace.layers[3].weights[1, 0])
    unnamed = rg.Trace([layer_of(torch.eye(3)[None, None])])
    assert content_of(rg.view(unnamed).html)[0][0]["tokens"] == ["0", "1", "2"]
    with rg.trace(model, rows=[-1], keep=("weights",)) as rows:
        model(torch.randint(3, 9, (1, 6)), torch.randint(3, 9, (1, 4)))
    with pytest.raises(ValueError, match="trace: expected all rows"):
        rg.view(rows)
    with pytest.raises(ValueError, match="trace: expected at least one layer"):
        rg.view(rg.Trace())


def test_bad_arguments_of_view_are_refused():
    model = explored.decoder()
    for arguments, more, match in (
        ((3,), {}, "trace_or_model: expected a trace or a model, got int"),
        ((model,), {}, "text: expected what the model reads"),
        ((model, "a"), {"image": b""}, "image: expected it without a text"),
        ((model, ""), {}, "at least one token"),
        ((strange(), "a"), {}, "text: expected none with a trace"),
        ((torch.nn.Linear(2, 2), "a"), {}, "model: expected one with a tokenizer"),
    ):
        with pytest.raises(ValueError, match=match):
            rg.view(*arguments, **more)


class Letters:
    """What the explorer asks of a tokenizer of transformers."""

    all_special_ids = (1, 2)

    def __call__(self, text=None, text_target=None, return_tensors="pt"):
        import transformers

        ids = [1, *(3 + ord(letter) % 30 for letter in text or text_target), 2]
        return transformers.BatchEncoding({"input_ids": torch.tensor([ids])})

    def convert_ids_to_tokens(self, ids):
        return [f"Ġt{number}" for number in ids]


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart"])
def test_hugging_face_models_are_shown(name):
    model = MODELS[name]().eval()
    two_sided = name in ("t5", "bart")
    page = rg.view(model, "abcde", target="xyz" if two_sided else None, tokenizer=Letters()).html
    frames = content_of(page)
    header, done = frames[0][0], next(head for head, _ in frames if head["type"] == "done")
    assert len(header["sources" if two_sided else "tokens"]) == 7
    assert (header["sources"] is not None) == two_sided
    assert (done["top"] is not None) == (name != "bert")
    kinds = [layer["kind"] for layer in header["layers"]]
    assert ("cross" in kinds) == two_sided


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "bart"])
def test_why_of_hugging_face_models(name):
    from regard.explorer.why import explain_weight

    chosen = Pair("abcde", "xyzab") if name in ("t5", "bart") else Text("abcde")
    taken = take("1", subject_of(name, MODELS[name]().eval(), chosen, Letters()))
    for view in taken.layers:
        for query, key in ((0, 0), (3, 1), (1, 3)):
            why = explain_weight(taken, view.traced.index, 2, query, key)
            assert why["steps"][-1]["value"] == pytest.approx(why["weight"], abs=1e-5)
            assert why["exact"]
            assert why["out_norm"] is not None
            # T5 adds its bias in self-attention, the other models add none.
            assert any(step["name"] == "biased" for step in why["steps"]) == (
                name == "t5" and view.traced.kind == "self" and why["visible"]
            )


def command(monkeypatch, capsys, *words):
    """The exit status of `regard view`, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["regard", "view", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


def test_the_command_exports_one_file(tmp_path, monkeypatch, capsys):
    path = tmp_path / "page.html"
    code, printed, _ = command(monkeypatch, capsys, "--export", path, "--json")
    report = json.loads(printed)
    assert (code, report["model"], report["heads"], report["tokens"]) == (0, "translator", 24, 7)
    assert report["bytes"] == path.stat().st_size
    header = content_of(path.read_text())[0][0]
    assert header["tokens"][1:3] == ["The", " red"]
    rg.save(explored.decoder(), tmp_path / "mine")
    code, printed, _ = command(monkeypatch, capsys, tmp_path / "mine", "a b", "--export", path, "--mechanism", "elu")
    assert (code, printed.startswith(f"-> {path}, ")) == (0, True)
    header = content_of(path.read_text())[0][0]
    assert (header["tokens"], header["layers"][0]["mechanism"]["name"]) == (["a", "b"], "elu")
    code, _, _ = command(monkeypatch, capsys, "translator", "--pair", "Le chat dort.", "A cat.", "--export", path)
    assert (code, content_of(path.read_text())[0][0]["tokens"][1:]) == (0, ["A", " cat", "."])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nosuch"], "nosuch: expected a folder with config.json, a .gguf file or one of smollm2"),
        (["--full"], "--full: expected --export as well"),
        (["minilm", "a", "--pair", "b", "c"], "text: expected one of TEXT, --image and --pair, got TEXT and --pair"),
        (["--image", "no.png"], "--image: expected a file, got 'no.png'"),
        (["--export", "page.txt"], "--export: expected a file.html, got 'page.txt'"),
        (["--export", "no/page.html"], "--export: expected a file in an existing folder"),
        (["--mechanism", "sofmax"], "--mechanism: expected one of softmax"),
        (["--lab", "scalin"], "did you mean scaling?"),
        (["--lab", "scaling", "a text"], "lab: expected it without TEXT, got both"),
        (["--port", "99999"], "--port: expected at most 65535, got"),
        (["--host", "nosuch.invalid", "--no-open"], "--host: expected an address of this machine"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_before_any_work(monkeypatch, capsys, tmp_path, words, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("regard.explorer.catalog.load_model", lambda *args: 1 / 0)
    code, printed, error = command(monkeypatch, capsys, *words)
    assert (code, printed) == (2, "")
    assert sentence in error


def test_without_the_extra_the_command_says_so():
    hiding = """
import sys
class Without:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("starlette", "uvicorn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without)
"""
    code = """
import contextlib, io, sys
from regard.commands import main
sys.argv = ["regard", "view", "--no-open"]
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        main()
    except SystemExit as stop:
        answer = [stop.code, said.getvalue()]
"""
    with forks(hiding) as run:
        answer, _ = run(code)
        view, modules = run("import regard as rg\nanswer = rg.view.__name__")
    assert answer == [2, 'regard: error: the explorer needs starlette: pip install "regard[view]"\n']
    assert (view, modules & {"starlette", "uvicorn"}) == ("view", set())
