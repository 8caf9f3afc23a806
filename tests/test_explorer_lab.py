"""The lab's page: experiments as JSON, in a process of their own, and in a real browser."""

import re
import time

import pytest

import explorer_pages
from explorer_pages import FITS, NEEDS_CHROMIUM, settle, state
from regard import lab
from regard.explorer.lab import asked_experiment, lab_json, measured, outcome_json, words_html

browser, explorer, tab = explorer_pages.browser, explorer_pages.explorer, explorer_pages.tab
QUICK = {"dims": ["4", "64"], "centres": ["0"], "samples": ["2000"]}
LINK = "lab/scaling?dims=4,64&centres=0&samples=2000"


def quick(**more):
    return lab.run("scaling", **{"dims": (4, 64), "centres": (0.0,), "samples": 2000, **more})


def test_the_page_reads_every_experiment_with_its_parameters():
    listed = {entry["id"]: entry for entry in lab_json()["experiments"]}
    assert list(listed) == list(lab.experiments())
    for name, experiment in lab.experiments().items():
        entry = listed[name]
        assert "<math" in entry["formula"]
        assert "$" not in entry["statement"]
        parameters = {parameter["name"]: parameter["default"] for parameter in entry["parameters"]}
        assert asked_experiment({"id": name, "parameters": parameters}) == (name, experiment.arguments())


BROKEN = [
    ({"id": "scalin"}, "did you mean scaling?"),
    ({"id": 3}, "id: expected a text"),
    ({"id": "scaling", "parameters": {"samples": ["5"]}}, "samples: expected a whole number from 1,000 to 1,000,000"),
    ({"id": "scaling", "parameters": {"samples": ["many"]}}, "samples: expected a whole number"),
    ({"id": "scaling", "parameters": {"depth": ["5"]}}, "depth: expected a parameter of scaling"),
    ({"id": "scaling", "parameters": {"dims": []}}, "parameters: expected lists"),
    ({"id": "scaling", "parameters": {"dims": ["4"] * 17}}, "parameters: expected lists"),
    ({"id": "scaling", "parameters": {"dims": ["4" * 99]}}, "parameters: expected lists"),
    ({"id": "scaling", "parameters": ["4"]}, "parameters: expected lists"),
]


@pytest.mark.parametrize(("body", "match"), BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_experiment_is_one_error(body, match):
    with pytest.raises(ValueError, match=re.escape(match)):
        asked_experiment(body)


def test_statements_are_text_but_for_emphasis_and_formulas():
    written = words_html("A *b* `c` <script> $x < 1$\n\n**d**")
    assert written.startswith("<p>A <em>b</em> <code>c</code> &lt;script&gt; <math")
    assert written.endswith("</math></p><p><strong>d</strong></p>")


class EndedError(Exception):
    pass


def test_an_experiment_in_its_process_measures_what_the_library_does_and_ends_when_told(monkeypatch):
    answer = measured(*asked_experiment({"id": "scaling", "parameters": QUICK}))
    expected = outcome_json(quick())
    assert {**answer, "seconds": 0} == {**expected, "seconds": 0}
    long = asked_experiment({"id": "scaling", "parameters": {"dims": ["8192"] * 16, "samples": ["1000000"]}})

    def ended():
        raise EndedError

    begun = time.monotonic()
    with pytest.raises(EndedError):
        measured(*long, ended)
    monkeypatch.setattr("regard.explorer.lab.SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"scaling: expected parameters with which it takes at most 0\.1 s"):
        measured(*long)
    assert time.monotonic() - begun < 60  # either takes minutes to its end


def open_lab(tab, explorer, place):
    tab.goto(f"http://127.0.0.1:{explorer.place.port}/#{place}")
    settle(tab)


def numbers(tab):
    return [row.split("\t") for row in tab.locator("#checks tbody tr").all_inner_texts()]


def expected_numbers(outcome):
    return [[f"✓ {row['what']}", row["predicted"], row["measured"]] for row in outcome.check_rows()]


def slide(tab, name, place):
    tab.evaluate(
        """([name, place]) => { const slider = document.querySelector(`[data-parameter=${name}] input[type=range]`);
        slider.value = place; slider.dispatchEvent(new Event("input", { bubbles: true })); }""",
        [name, place],
    )
    settle(tab)


@NEEDS_CHROMIUM
def test_a_slider_changes_the_picture_and_the_numbers(tab, explorer):
    open_lab(tab, explorer, LINK)
    assert tab.locator("#verdict").inner_text().endswith("holds")
    assert numbers(tab) == expected_numbers(quick())
    before = tab.get_attribute("#labpicture", "src")
    slide(tab, "stds", 750)
    assert tab.url.endswith("&stds=3.02,0.5&samples=2000")
    assert numbers(tab) == expected_numbers(quick(stds=(3.02, 0.5)))
    assert tab.get_attribute("#labpicture", "src") != before
    assert tab.evaluate("document.getElementById('labpicture').naturalWidth > 300")
    slide(tab, "dims", 1000)
    assert [row[1] for row in numbers(tab)][:2] == ["0", f"{8192 * 3.02**4:,.0f}"]
    tab.click("[data-table=table]")
    settle(tab)
    assert tab.locator("#measured tbody tr").first.inner_text().startswith("8,192\t0\t")
    for width, height in ((1024, 700), (1400, 900)):
        tab.set_viewport_size({"width": width, "height": height})
        assert tab.evaluate(FITS)


@NEEDS_CHROMIUM
def test_wrong_values_get_the_librarys_words(browser, explorer):
    with explorer_pages.window(browser) as tab:
        open_lab(tab, explorer, LINK)
        box = tab.locator("[data-parameter=samples] input[type=text]")
        for wrong in ("5", "many", "-1e3", ""):
            box.fill(wrong)
            box.press("Enter")
            settle(tab)
            with pytest.raises(ValueError, match="samples: expected a whole number") as raised:
                lab.experiments()["scaling"].parameters["samples"].read([wrong])
            assert tab.locator("#laberror").inner_text() == str(raised.value)
        box.fill("3000")
        box.press("Enter")
        settle(tab)
        assert tab.locator("#laberror").count() == 0
        open_lab(tab, explorer, "lab/scalin")
        assert "did you mean scaling?" in tab.locator("#labmain").inner_text()


@NEEDS_CHROMIUM
def test_the_lab_is_one_click_and_one_key_away(tab, explorer):
    tab.goto(f"http://127.0.0.1:{explorer.place.port}/#model=encoder&layer=1&head=2")
    settle(tab)
    tab.click("text=Lab")
    assert tab.locator("#labmain h1").inner_text() == lab.experiments()[next(iter(lab.experiments()))].title
    tab.keyboard.press("/")
    tab.keyboard.type("edges")
    settle(tab)
    assert (
        tab.locator("#lablist a").evaluate_all("links => links.map((link) => link.dataset.experiment)")[0]
        == "convolution"
    )
    tab.keyboard.press("Enter")
    settle(tab)
    assert tab.url.endswith("#lab/convolution")
    tab.reload()
    settle(tab)
    assert tab.locator("#verdict").count() == 1
    tab.click("text=Model")
    settle(tab)
    assert tab.locator("#lab").is_hidden()
    assert (state(tab, "run.layers.length"), tab.locator("#title").is_visible()) == (2, True)
