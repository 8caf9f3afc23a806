"""What people see of a value: a short `repr`, HTML in a notebook, a figure where they ask for it, a table that fits."""

import base64
import io
import re
import sys
from dataclasses import dataclass
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

import regard as rg
from regard.commands.common import print_table
from regard.core.display import table
from regard.core.laws import LAWS, Cell
from regard.core.laws.case import Case

VOID = {"img", "br"}
SIZES = {"vocabulary_size": 11, "embedding_dim": 8, "num_layers": 2, "num_heads": 2}
TOKENS = ["a", "<b>", "c"]


def model():
    torch.manual_seed(0)
    return rg.Decoder(rg.DecoderConfig(**SIZES)).eval()


def traced():
    decoder = model()
    with rg.trace(decoder, tokens=TOKENS) as trace:
        decoder(torch.tensor([[1, 2, 3]]))
    return trace


def report(broken=0):
    """As large as that of a full check."""
    cells = [
        Cell(law, f"mask {number}", "MHA", "float32", "held" if number else "not applicable", "" if number else "why")
        for law in LAWS
        for number in range(60)
    ]
    case = Case("causal", "GQA", "float16", batch=1, queries=2, keys=2, qk_length=4, value_length=3, seed=0)
    cells += [Cell("weights", f"mask {n}", "GQA", "float16", "broken", "1 < 2", case) for n in range(broken)]
    return rg.Report("Softmax(<>)", tuple(cells))


def plan():
    x = torch.zeros(1, 2, 8, 16)
    return rg.explain(x, x, x, rg.Quadratic(), rg.causal)


VALUES = {
    "mask": lambda: rg.causal & rg.window(before=3),
    "padding": lambda: rg.padding([3, 5]),
    "drawing": lambda: rg.causal.draw(9),
    "long drawing": lambda: rg.causal.draw(2000),
    "plan": plan,
    "work": rg.Work,
    "cost": lambda: rg.cost(rg.Softmax(), rg.Work()),
    "layer cost": lambda: rg.layer_cost(rg.Work(), embedding_dim=64),
    "report": report,
    "broken report": lambda: report(broken=500),
    "summary": lambda: model().summary(),
    "model": model,
    "config": lambda: rg.DecoderConfig.gpt2(**SIZES, mechanism="elu"),
    "trace": traced,
    "traced layer": lambda: traced().layers[0],
    "patterns": lambda: traced().patterns(),
    "head's patterns": lambda: traced().patterns().of(0, 1),
}


class Balanced(HTMLParser):
    """Refuses tags that are not closed in their order, scripts and style sheets."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "style", "b>")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def text_of(html):
    page = Balanced()
    page.feed(html)
    assert page.open == []
    return page.text


@pytest.mark.parametrize("name", VALUES)
def test_a_value_has_a_short_repr_and_an_html_form(name):
    value = VALUES[name]()
    if name != "model":  # whose repr is PyTorch's
        assert len(repr(value).splitlines()) <= 20
        assert len(repr(value)) <= 2000
    html = value._repr_html_()
    assert len(html) <= 40_000
    assert text_of(html).strip()


@pytest.mark.parametrize("value", [model().start(batch=1, capacity=4), rg.prefill(model(), [[1, 2], [3]])])
def test_what_a_model_keeps_is_one_line(value):
    assert len(repr(value)) < 120
    assert "tensor" not in repr(value)


def test_a_config_prints_what_was_chosen_and_can_be_typed_again():
    config = rg.DecoderConfig(**SIZES, mechanism=rg.Softmax(beta=2.0))
    assert repr(config).startswith("DecoderConfig(mechanism=Softmax(beta=2.0, softcap=None), vocabulary_size=11, ")
    assert len(repr(config)) < 150
    assert eval(repr(config), vars(rg) | {"DecoderConfig": rg.DecoderConfig, "Softmax": rg.Softmax}) == config


def test_a_report_says_how_many_laws_hold_and_where_the_first_are_broken():
    assert repr(report()) == (
        f"Softmax(<>): every law holds\n  {len(LAWS)} laws in {60 * len(LAWS):,} cells: "
        f"{59 * len(LAWS):,} held, 0 broken, {len(LAWS)} not applicable"
    )
    lines = repr(report(broken=5)).splitlines()
    assert lines[0] == "Softmax(<>): BROKEN"
    smallest = "batch=1, queries=2, keys=2, qk_length=4, value_length=3, seed=0"
    assert lines[2:4] == ["  weights under mask 0, GQA, float16: 1 < 2", f"    smallest: {smallest}"]
    assert lines[-1] == "  … and 2 more: print the report"
    assert "1 < 2" in text_of(report(broken=5)._repr_html_())


def test_html_is_escaped_wherever_text_comes_from():
    assert text_of(table([{"<i>": "</td>"}], title="<p>", notes=["&amp;"])) == "<p><i></td>&amp;"
    assert "Softmax(<>)" in text_of(report()._repr_html_())


def pixels(html):
    """The pictures in a text of HTML."""
    return [
        torch.tensor(list(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB").get_flattened_data()))
        for data in re.findall(r"base64,([^\"]+)", html)
    ]


def test_a_mask_is_shown_as_it_is():
    (image,) = pixels(rg.causal.draw(5, 7)._repr_html_())
    visible = rg.causal.draw(5, 7).visible.flatten()
    assert torch.equal((image == torch.tensor([0x2B, 0x5C, 0x8A])).all(-1), visible)


def test_masks_of_a_fixed_length_are_shown_at_it():
    (image,) = pixels(rg.segments([[0, 0, 1]])._repr_html_())
    assert image.shape == (9, 3)
    assert rg.window2d(grid=(2, 3), radius=1).plot().axes[0].images[0].get_array().shape == (6, 6)
    assert (rg.causal & rg.dense(torch.ones(4, 4, dtype=torch.bool))).length == 4
    table = torch.ones(2, 6, dtype=torch.bool).tril(3)
    for mask in (rg.dense(table), rg.causal & rg.dense(table), ~~rg.dense(table)):
        (image,) = pixels(mask._repr_html_())
        assert image.shape[:2] == pixels(mask.draw(2, 6)._repr_html_())[0].shape[:2]
        assert len(mask.plot().axes[0].images[0].get_array()) == 2
    beyond = torch.ones(3, dtype=torch.bool)
    assert (rg.causal & (lambda b, h, q, k: beyond[k]))._repr_html_() is None  # a user's table of three keys


def test_weights_are_shown_from_white_to_dark_and_hidden_pairs_grey():
    (image, *_) = pixels(traced().layers[0]._repr_html_())
    first, second = image.view(3, -1, 3)[0, 0].tolist(), image.view(3, -1, 3)[0, 1].tolist()
    assert first == [0x08, 0x30, 0x6B]  # the first token sees itself alone
    assert second == [0xDF, 0xE3, 0xE8]


def test_a_trace_is_drawn_whole_by_layer_and_by_head():
    trace = traced()
    assert len(trace.plot().axes) == 4
    figure = trace.plot(layer=1, head=0)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == TOKENS
    image = figure.axes[0].images[0].get_array()
    assert torch.equal(torch.from_numpy(image.filled(0)), trace.layers[1].weights[0, 0].detach())
    assert torch.equal(torch.from_numpy(~image.mask), rg.causal.draw(3).visible)
    for arguments, message in (
        ({"head": 1}, "layer: expected the layer of head 1, got None"),
        ({"layer": 1, "head": 7}, r"head: expected a recorded head, one of \[0, 1\], got 7"),
        ({"layer": 5}, "layers: expected a recorded layer"),
        ({"sequence": 1}, "sequence: expected 0 to 0, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            trace.plot(**arguments)


def test_a_figure_is_a_picture_in_a_notebook():
    with Image.open(io.BytesIO(rg.causal.plot(4)._repr_png_())) as picture:
        assert picture.width > 100


def test_long_sequences_are_drawn_with_some_positions_named():
    decoder = rg.Decoder(rg.DecoderConfig(**SIZES)).eval()
    with rg.trace(decoder) as trace:
        decoder(torch.zeros(1, 100, dtype=torch.long))
    axes = trace.plot(layer=0).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()][:3] == ["0", "10", "20"]


def test_costs_are_drawn_over_the_length_of_a_work():
    work = rg.Work(num_heads=4, num_kv_heads=4, mask=rg.causal)
    names = [text.get_text() for text in work.plot(rg.Softmax(), rg.Quadratic(), longest=4096).axes[0].texts]
    assert {"Softmax", "Quadratic"} <= set(names)
    with pytest.raises(ValueError, match="mechanisms: expected at least one"):
        work.plot()


@pytest.mark.parametrize(
    "draw",
    [
        rg.causal.plot,
        lambda: rg.Work().plot(rg.Softmax()),
        lambda: traced().plot(),
        lambda: traced().plot(0),
        lambda: traced().patterns().plot(),
    ],
)
def test_drawing_without_matplotlib_names_what_to_install(monkeypatch, draw):
    for name in [
        name for name in sys.modules if name.startswith("matplotlib") or name.endswith(("style", "figure", "figures"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"^a picture needs matplotlib: pip install \"regard\[plots\]\"$"):
        draw()


@dataclass(frozen=True, kw_only=True)
class Wide(rg.Mechanism):
    name: str = "<b>"

    def similarity(self, q, k):
        return torch.sigmoid(q @ k.transpose(-1, -2))


def test_a_users_mechanism_in_a_plan_is_escaped():
    x = torch.zeros(1, 1, 4, 4)
    assert "Wide(name='<b>')" in text_of(rg.explain(x, x, x, Wide())._repr_html_())


ROWS = [
    {"mode": mode, "mechanism": "softmax", "FLOPs": "1.5 G", "state": "16 MB", "note": "a longer text of some words"}
    for mode in ("prefill", "decode")
]


@pytest.mark.parametrize("columns", [30, 60, 100])
def test_a_table_fits_the_window_and_keeps_every_value(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table(ROWS, right=("FLOPs", "state"), section=("mode",))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    words = printed.split()
    for row in ROWS:
        assert set(" ".join(row.values()).split()) <= set(words)
    assert "…" not in printed
