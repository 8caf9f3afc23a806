"""The lab's report: killed and gone on with, one page without scripts or addresses elsewhere, a PDF, formulas."""

import json
import re
from html.parser import HTMLParser

import pytest

from processes import finished
from regard import lab
from regard.lab.drawing import svg
from regard.lab.experiment import Check, Experiment, Measurements, Outcome
from regard.lab.reporting import report
from regard.lab.reporting.content import Content, headline
from regard.lab.reporting.formula import mathml, typst
from regard.lab.reporting.markup import html, nodes
from regard.lab.reporting.page import SYMBOLS, page
from regard.lab.reporting.paper import COLOURS, paper
from regard.lab.reporting.store import Entry, fingerprint, keep, kept

MACHINE = {"cpu": "<b>CPU</b>", "threads": 2, "torch": "2", "date": "2026-01-01", "commit": None}
HOSTILE = '<script>alert("x")</script> <img src="http://example.org/a.png"> #eval("1") [link](http://example.org) & \\'


class Page(HTMLParser):
    """A page's tags, ids and links."""

    VOID = ("meta", "br", "img", "hr")

    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.addresses, self.open = set(), [], [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.add(tag)
        self.ids += [values["id"]] if "id" in values else []
        links = [values[name] for name in ("href", "xlink:href") if name in values]
        self.links += links
        self.addresses += [*links, *(values[name] for name in ("src", "srcset", "data", "action") if name in values)]
        self.addresses += re.findall(r"url\(([^)]*)\)", " ".join(filter(None, values.values())))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def entry(verdict, name, claims=("000.1",), title="Title", statement="At $d$.", **options):
    """An experiment that was never run, with an outcome of this verdict."""
    wrong, right, late = (
        Check(name=f"check of {name}", predicted=1.0, measured=number, tolerance=0.5, timed=timed)
        for number, timed in ((3.0, False), (1.0, False), (9.0, True))
    )
    wide = Check(name="wide", predicted=1.0, measured=1.0, tolerance=0.1, interval=(0.0, 2.0))
    groups = {
        "holds": {"statement": (right,)},
        "holds under a condition": {"statement": (wrong,), "within": (right,)},
        "does not hold": {"statement": (wrong,), "instead": (right,)},
        "undecided": {"statement": (wide,)},
        "measured here": {"statement": (late,)},
    }
    experiment = Experiment(
        name=name,
        claims=claims,
        title=title,
        statement=statement,
        formula=r"\frac{1}{\sqrt{d}}",
        condition="if $d > 1$",
        instead="it is $2$",
        measure=lab.experiments()["scaling"].measure,
    )
    measurements = (
        Measurements(table=({"d": 4, "x": float("inf")},), draw=None, **groups[verdict]) if verdict in groups else None
    )
    outcome = Outcome(
        experiment=experiment,
        parameters=experiment.arguments(),
        measurements=measurements,
        missing="needs minilm: pip install weights",
        seconds=0.5,
    )
    assert outcome.verdict == verdict
    return Entry(
        outcome=outcome,
        picture="<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'></svg>" if measurements else "",
    )


VERDICTS = ("holds", "holds under a condition", "does not hold", "undecided", "measured here", "not run")


@pytest.fixture(scope="module")
def content():
    entries = [entry(verdict, f"e{i}", (f"00{i % 5}.1", "004.9")) for i, verdict in enumerate(VERDICTS)]
    return Content(entries=[measured_quickly(), *entries], environment=MACHINE)


def measured_quickly():
    outcome = lab.run("scaling", dims=(4, 64), samples=2_000)
    return Entry(outcome=outcome, picture=svg(outcome.figure, "scaling"))


def test_the_page_stands_alone_and_its_links_resolve(content):
    text = page(content, pdf=True)
    parsed = Page(text)
    assert not parsed.tags & {"script", "link", "iframe", "img", "object", "embed", "form"}
    assert len(parsed.ids) == len(set(parsed.ids))
    for address in parsed.addresses:
        assert address in ("report.json", "report.pdf") or (address[0] == "#" and address[1:] in parsed.ids), address
    assert not re.search(r"@import|url\((?!#)", text)
    assert {"#scaling", "#scaling-code", *(f"#e{i}" for i in range(6))} <= set(parsed.links)
    assert "report.pdf" not in page(content, pdf=False)


def test_every_verdict_is_shown_in_words_and_with_a_sign_of_its_own(content):
    text = page(content, pdf=False)
    assert len(set(SYMBOLS.values())) == len(SYMBOLS) == len(COLOURS) == len(VERDICTS)
    for i, verdict in enumerate(VERDICTS):
        section = text.split(f'<article id="e{i}"')[1].split("</article>")[0]
        style = section.split('class="')[1].split('"')[0]
        assert f'href="#sign-{style}"' in section
        assert verdict in section.split("</header>")[0]
    assert "needs minilm: pip install weights" in text
    assert content.to_dict()["counts"] == {**dict.fromkeys(VERDICTS, 1), "holds": 2}


def test_hostile_text_is_text():
    hostile = entry("does not hold", "hostile", title=HOSTILE, statement=HOSTILE)
    content = Content(entries=[hostile], environment=MACHINE)
    text = page(content, pdf=False)
    assert not Page(text).tags & {"script", "img"}
    assert not [address for address in Page(text).addresses if address[0] != "#" and address != "report.json"]
    assert paper(content)[:5] == b"%PDF-"


def test_the_pdf_has_its_pages(content):
    data = paper(content)
    assert data[:5] == b"%PDF-"
    assert len(re.findall(rb"/Type\s*/Page\b", data)) >= 2 + len({"000", "001", "002", "003", "004"})


KILLED = """
import os, signal, sys
from regard.lab.reporting import report

def begin(name):
    if name == "{second}":
        os.kill(os.getpid(), signal.SIGKILL)

names = ["{first}", "{second}"]
if (child := os.fork()) == 0:
    report(names, folder="{folder}", begin=begin)
    os._exit(0)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, *sorted(os.listdir("{folder}/outcomes")), os.listdir("{folder}"))
before = os.stat("{folder}/outcomes/{first}.json").st_mtime_ns
report(names, folder="{folder}")
print(before == os.stat("{folder}/outcomes/{first}.json").st_mtime_ns)
"""


def test_a_report_that_was_killed_goes_on(tmp_path):
    first, second = "orthogonal", "norm_length"
    done = finished("-c", KILLED.format(folder=tmp_path, first=first, second=second))
    assert done.stdout.splitlines() == [f"-9 {first}.json ['outcomes']", "True"], done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [outcome["experiment"] for outcome in report["outcomes"]] == [first, second]
    assert {path.name for path in tmp_path.iterdir()} == {"index.html", "outcomes", "report.json", "report.pdf"}


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # matplotlib, of a tensor
def test_an_experiment_that_raises_does_not_lose_the_rest(tmp_path, monkeypatch):
    def broken(**_):
        raise RuntimeError("no $x$ <b>")

    monkeypatch.setitem(lab.experiments()["norm_length"].measure.__globals__, "Check", broken)
    written = report(["norm_length", "pointwise"], folder=tmp_path)
    reasons = [entry.outcome.missing for entry in written.entries]
    assert dict(written.counts) == {"holds": 1, "not run": 1}, reasons
    assert "it raised RuntimeError: no" in (tmp_path / "index.html").read_text()
    assert [path.name for path in (tmp_path / "outcomes").iterdir()] == ["pointwise.json"]
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"


def test_an_outcome_is_used_again_as_long_as_nothing_has_changed(tmp_path, monkeypatch):
    experiment = lab.experiments()["scaling"]
    outcome = lab.run("scaling", dims=(4,), samples=2_000)
    keep(tmp_path, Entry(outcome=outcome, picture="<svg/>"))
    again = kept(tmp_path, experiment)
    assert again.outcome.check_rows() == outcome.check_rows()
    assert (again.outcome.verdict, again.outcome.table, again.picture) == (outcome.verdict, outcome.table, "<svg/>")
    before = fingerprint(experiment)
    monkeypatch.setattr("regard.lab.reporting.store._library", lambda: "another")
    assert fingerprint(experiment) != before
    assert kept(tmp_path, experiment) is None
    (tmp_path / "scaling.json").write_text("{")
    assert kept(tmp_path, experiment) is None


def test_an_experiment_without_its_weights_is_not_kept(tmp_path):
    keep(tmp_path, entry("not run", "e"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", lab.experiments())
def test_every_statement_is_in_the_subset_that_both_formats_have(name):
    experiment = lab.experiments()[name]
    for text in (experiment.statement, experiment.condition, experiment.instead):
        nodes(text)
        assert "\\" not in re.sub(r"<code>.*?</code>", "", html(text))
    assert "\\" not in mathml(experiment.formula)


def test_typst_reads_every_formula():
    import typst as engine

    formulas = [experiment.formula for experiment in lab.experiments().values()]
    lines = [f"$ {typst(formula)} $" for formula in (*formulas, *SUBSET)]
    assert engine.compile("\n".join(lines).encode(), ignore_system_fonts=True)[:5] == b"%PDF-"


SUBSET = (
    r"\operatorname*{argmax}_{x'} \left\lVert \frac{x}{2} \right\rVert_2^{10} \ne 10{,}000 \; [0, 1) f(x; y) a/b : c",
    r"\begin{cases} a & \text{if } d > 3 \\ c & \text{else} \end{cases} ",
    r"\begin{pmatrix} 1 & 2{,}5 \\ 3 & 4 \end{pmatrix} \bigl( x \bigr)",
    r"\begin{aligned} a &= b, c \\ &= d \end{aligned}",
    r"\underbrace{a + b}_{n} \hat{x} \bar y \sqrt[3]{8} \lim_{n \to \infty} A^\top",
    r"\mathbb{R}^{d \times d} \left.y\right|_0 \%",
)


@pytest.mark.parametrize(
    "latex", [r"\foo x", r"\text{<b>}", r"\text{\foo}", "{", "a}", r"\left( x", r"\begin{cases} a", "x^", "a & b", "#x"]
)
def test_a_formula_outside_of_the_subset_is_an_error(latex):
    for convert in (typst, mathml):
        with pytest.raises(ValueError, match=r"^formula: expected "):
            convert(latex)


def test_the_board_shows_the_check_that_says_most():
    near = Check(name="near", predicted=5.0, measured=5.9, tolerance=1.0)
    far = Check(name="far", predicted=5.0, measured=5.1, tolerance=1.0)
    zero = Check(name="zero", predicted=0.0, measured=0.99, tolerance=1.0)
    wrong = Check(name="wrong", predicted=0.0, measured=2.0, tolerance=1.0)
    late = Check(name="late", predicted=1.0, measured=9.0, timed=True)
    assert headline((far, near, zero, late)).name == "near"
    assert headline((far, wrong, near)).name == "wrong"
    assert headline((zero, late)).name == "zero"
    assert headline((late,)).name == "late"
