"""What the explorer's page saves, and saved pages wherever they are opened, in a real browser."""

import hashlib
import json

import pytest
import torch

import explored
import explorer_pages
import regard as rg
from explorer_pages import HOSTILE, SENTENCE, settle, shown, visit, window
from regard.explorer.notebook import view
from regard.explorer.server import PAGE

pytestmark = explorer_pages.NEEDS_CHROMIUM
browser, explorer, tab = explorer_pages.browser, explorer_pages.explorer, explorer_pages.tab


def test_files_to_save(tab, explorer, tmp_path):
    visit(tab, explorer, model="decoder", layer=0, head=0)
    for kind in ("png", "svg", "csv", "html"):
        with tab.expect_download() as waiting:
            tab.click(f"[data-save={kind}]")
        waiting.value.save_as(tmp_path / f"file.{kind}")
    assert (tmp_path / "file.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "file.svg").read_text().startswith("<svg")
    weights, _ = shown(tab, explorer).head(0, 0)
    rows = [line.split(",") for line in (tmp_path / "file.csv").read_text().splitlines()]
    assert len(rows) == 10
    assert rows[1][2] == ""
    assert float(rows[4][2]) == pytest.approx(float(weights[3, 1]))
    assert (tmp_path / "file.html").read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def stored():
    torch.manual_seed(0)
    layer = rg.MultiHeadAttention(16, 4).eval()
    with rg.trace(layer, tokens=HOSTILE) as trace, torch.no_grad():
        layer(4 * torch.randn(1, len(HOSTILE), 16))
    return trace, view(trace)


PLACES = {
    "file": "{page}",
    "frame": "<!doctype html><meta charset='utf-8'><title>notes</title>{markup}",
    # As JupyterLab shows the output of a cell that has run.
    "output": "<!doctype html><meta charset='utf-8'><title>notes</title><div id='output'></div>"
    "<script>document.getElementById('output').innerHTML = {markup_in_script}</script>",
    # As JupyterLab opens an HTML file that the reader trusts.
    "viewer": "<!doctype html><meta charset='utf-8'><title>notes</title><iframe style='width:100%;height:720px' "
    "sandbox='allow-same-origin allow-scripts allow-popups'></iframe><script>document.querySelector('iframe').src = "
    "URL.createObjectURL(new Blob([{page_in_script}], {{type: 'text/html'}}))</script>",
}


def in_script(text):
    return json.dumps(text).replace("</", "<\\/").replace("<!--", "<\\!--")


@pytest.mark.parametrize("place", PLACES)
def test_an_exported_page_opens_anywhere_and_hostile_tokens_are_text(browser, stored, tmp_path, place):
    trace, page = stored
    path = tmp_path / "page.html"
    markup = page._repr_html_()
    texts = {"page": page.html, "markup": markup}
    texts |= {f"{name}_in_script": in_script(text) for name, text in texts.items()}
    path.write_text(PLACES[place].format(**texts), encoding="utf-8")
    with window(browser) as tab:
        tab.goto(path.as_uri())
        if place != "file":
            tab.wait_for_function("() => document.querySelector('iframe')?.getAttribute('src') !== ''")
        frame = tab.main_frame if place == "file" else tab.query_selector("iframe").content_frame()
        settle(frame)
        assert frame.evaluate("[regard.state.live, regard.state.run.info.tokens]") == [False, HOSTILE]
        weights = trace.layers[0].weights[0]
        head = frame.evaluate("regard.state.head")
        best = int(weights[head].argmax())
        row, column = divmod(best, len(HOSTILE))
        assert frame.evaluate(f"regard.valueAt({row}, {column})") == float(weights[head].max())
        box = frame.evaluate(f"regard.cellOnScreen({row}, {column})")
        offset = {"x": 0, "y": 0} if place == "file" else tab.locator("iframe").bounding_box()
        tab.mouse.click(offset["x"] + box["x"] + box["width"] / 2, offset["y"] + box["y"] + box["height"] / 2)
        settle(frame)
        assert frame.evaluate("regard.state.locked") == {"rows": [row], "columns": [column]}
        assert frame.evaluate("window.broken") is None
        assert tab.evaluate("window.broken") is None
        # The sandbox is the viewer's, and what Chromium says about it too.
        assert [trouble for trouble in tab.troubles if place != "viewer" or "allow-same-origin" not in trouble] == []


def test_a_notebook_shows_a_live_page_that_only_its_address_opens(browser, tmp_path):
    torch.manual_seed(0)
    model = explored.decoder()
    shown = rg.view(model, SENTENCE, live=True)
    try:
        path = tmp_path / "notes.html"
        path.write_text(f"<!doctype html><meta charset='utf-8'><title>notes</title>{shown._repr_html_()}")
        assert shown.server.url in repr(shown)
        with window(browser) as tab:
            tab.goto(path.as_uri())
            frame = tab.query_selector("iframe").content_frame()
            settle(frame)
            assert frame.evaluate("[regard.state.live, regard.state.input.text]") == [True, SENTENCE]
            assert frame.evaluate("regard.state.run.info.tokens") == SENTENCE.split()
            frame.evaluate("document.querySelector('[data-change=silence]').click()")
            settle(frame)
            assert frame.evaluate("regard.state.run !== regard.state.base && regard.state.run.done.divergence > 0")
            assert tab.troubles == []
            answer = tab.request.get(shown.server.url.partition("?")[0])
            assert (answer.status, "token" in answer.json()["error"]) == (403, True)
        saved = shown.save(tmp_path / "page.html").read_text()
        assert shown.server.url not in saved
    finally:
        shown.close()
    assert "srcdoc=" in shown._repr_html_()
    with pytest.raises(ValueError, match="live: expected a model"):
        rg.view(rg.Trace(), live=True)


def test_vendored_files_are_as_published():
    vendor = PAGE / "vendor"
    listed = json.loads((vendor / "vendor.json").read_text())["files"]
    assert {entry["file"] for entry in listed} == {
        path.name for kind in ("js", "css") for path in vendor.glob(f"*.{kind}")
    }
    for entry in listed:
        content = (vendor / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        if "appended" in entry:
            published = content.removesuffix(entry["appended"].encode())
            assert hashlib.sha256(published).hexdigest() == entry["sha256_before"]
        assert (vendor / entry["licence_file"]).read_text()
