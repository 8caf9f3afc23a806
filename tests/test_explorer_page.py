"""The explorer's page in a real browser: what it shows are the model's numbers, and its controls do what they say.

Driven by playwright in Debian's Chromium; every request beyond loopback is refused and counted.
"""

import csv
import hashlib
import json
import math
import random
import re
import shutil
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

import explored
import regard as rg
from regard.explorer.catalog import Entry
from regard.explorer.guard import Place
from regard.explorer.notebook import view
from regard.explorer.server import PAGE, Explorer, listen, serving
from regard.explorer.session import Session
from regard.explorer.subject import Pair, Text
from regard.inference.tracing.statistics import layer_statistics

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt-get install -y chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip
SENTENCE = "a b c d e f g a b"
MODELS = {
    "decoder": (lambda: explored.decoder(num_kv_heads=2), Text(SENTENCE)),
    "encoder": (lambda: explored.encoder(), Text(SENTENCE)),
    "argmax": (lambda: explored.encoder(mechanism=rg.Argmax()), Text(SENTENCE)),
    "pair": (lambda: explored.translator(), Pair("a b c d", "e f g h i")),
}
FITS = "document.documentElement.scrollHeight <= innerHeight && document.body.scrollWidth <= innerWidth"
HOSTILE = [
    "</script><script>window.broken = 1</script>", "<img src=x onerror='window.broken = 1'>", "\u202eright to left",
    "שלום", "😀", "", "${window.broken = 1}", "a\0b\n",
]  # fmt: skip


@pytest.fixture(scope="module")
def explorer():
    """A server of small models with random weights, in a thread."""
    torch.manual_seed(0)
    session = Session({name: make() for name, (make, _) in MODELS.items()})
    entries = [
        Entry(name=name, title=name, kind="pair" if name == "pair" else "text", example=example)
        for name, (_, example) in MODELS.items()
    ]
    session.shown_models["davit"] = explored.davit()
    entries.append(Entry(name="davit", title="davit", kind="image", example=None))
    entries.append(Entry(name="translator", title="translator", kind="pair", example=Pair("Le chat dort.")))
    entries.append(Entry(name="absent", title="Absent", kind="text", installed=False, install="pip x", example=None))
    opened = listen("127.0.0.1", 0)
    running = Explorer(session, Place(host="127.0.0.1", port=opened.getsockname()[1]), lambda: entries)
    server = serving(running.app())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield running
    server.should_exit = True
    thread.join(10)
    running.close()
    opened.close()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as player:
        chromium = player.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield chromium
        chromium.close()


@contextmanager
def window(browser, **options):
    """A page that may reach this machine only, and what went wrong in it."""
    context = browser.new_context(viewport={"width": 1400, "height": 900}, **options)
    tab = context.new_page()
    troubles = SimpleNamespace(list=[])

    def allow(route):
        local = re.match(r"(http://127\.0\.0\.1:|file:|data:|blob:|about:)", route.request.url)
        if not local:
            troubles.list.append(f"refused {route.request.url}")
        return route.continue_() if local else route.abort()

    def failed(request):
        # Chromium says "aborted" of answers that are read as a stream to their end, and of those no longer wanted.
        if "ERR_ABORTED" not in (request.failure or ""):
            troubles.list.append(f"failed {request.url}")

    context.route("**/*", allow)
    tab.on("console", lambda message: message.type in ("error", "warning") and troubles.list.append(message.text))
    tab.on("pageerror", lambda error: troubles.list.append(str(error)))
    tab.on("requestfailed", failed)
    tab.on("response", lambda answer: answer.status >= 400 and troubles.list.append(f"{answer.status} {answer.url}"))
    tab.troubles = troubles.list
    try:
        yield tab
    finally:
        context.close()


def settle(tab):
    """Wait until nothing is computed, fetched or drawn any more."""
    for _ in range(600):
        if tab.evaluate("Boolean(window.regard)"):
            break
        tab.wait_for_timeout(20)
    tab.evaluate("regard.settled()")


def visit(tab, explorer, **fields):
    address = "&".join(f"{name}={value}" for name, value in fields.items())
    tab.goto(f"http://127.0.0.1:{explorer.place.port}/" + (f"#{address}" if address else ""))
    settle(tab)


@pytest.fixture
def tab(browser, explorer):
    with window(browser) as opened:
        yield opened
        assert opened.troubles == []


def state(tab, name):
    return tab.evaluate(f"regard.state.{name}")


def shown(tab, explorer):
    """The run that the page shows, on the server."""
    return explorer.session.snapshot(tab.evaluate("regard.state.run.id"))


def shape(tab):
    return state(tab, "run.layers[regard.state.layer].rows"), state(tab, "run.layers[regard.state.layer].columns")


def values(tab):
    """All numbers of the chosen head as the page has them; masked pairs are NaN."""
    rows, columns = shape(tab)
    listed = tab.evaluate(
        f"Array.from({{length: {rows * columns}}}, (_, i) => regard.valueAt(Math.floor(i / {columns}), i % {columns}))"
    )
    return torch.tensor([math.nan if number == "masked" else number for number in listed]).view(rows, columns)


def middle(box):
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def cell(tab, row, column):
    return middle(tab.evaluate(f"regard.cellOnScreen({row}, {column})"))


def pixels(tab):
    """The colour in the middle of each cell of the matrix: of row and column, the red, green and blue."""
    rows, columns = shape(tab)
    places = [[*cell(tab, row, column)] for row in range(rows) for column in range(columns)]
    listed = tab.evaluate(
        """(places) => { const canvas = document.querySelector("[data-surface=matrix-0]").previousElementSibling;
        const box = canvas.getBoundingClientRect(), ratio = canvas.width / box.width;
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return places.map(([x, y]) => { const at = 4 * (Math.round((y - box.top) * ratio) * canvas.width
          + Math.round((x - box.left) * ratio)); return [...data.slice(at, at + 3)]; }); }""",
        places,
    )
    # What Chromium advises a page that reads its canvas often; only this test does.
    tab.troubles[:] = [trouble for trouble in tab.troubles if "willReadFrequently" not in trouble]
    return {(i // columns, i % columns): tuple(colour) for i, colour in enumerate(listed)}


def drag(tab, place, release=False):
    """Move the dial as a hand does: many inputs, one change when it is let go."""
    tab.evaluate(
        """([place, release]) => { const dial = document.getElementById("beta");
        dial.value = place; dial.dispatchEvent(new Event("input", { bubbles: true }));
        if (release) dial.dispatchEvent(new Event("change", { bubbles: true })); }""",
        [place, release],
    )
    settle(tab)


def test_the_first_page_is_whole(tab, explorer):
    visit(tab, explorer)
    assert state(tab, "model") == "decoder"
    assert state(tab, "error") == ""
    assert tab.locator("#title").inner_text().startswith("Layer")
    assert tab.input_value("#text") == SENTENCE
    assert tab.locator("#why [data-step=weight]").count() == 1
    assert tab.locator("#topfive tbody tr").count() == 5
    assert tab.locator("#cost canvas").count() == 1
    assert tab.evaluate(FITS)
    tab.set_viewport_size({"width": 1024, "height": 700})
    settle(tab)
    assert tab.evaluate(FITS)


def test_values_on_the_page_are_the_tensors(tab, explorer):
    visit(tab, explorer, model="pair")
    run, draws = shown(tab, explorer), random.Random(0)
    compared = 0
    for place, head in ((place, head) for place in range(len(run.layers)) for head in draws.sample(range(4), 2)):
        spot = tab.evaluate(f"regard.headOnScreen({place}, {head})")
        tab.mouse.click(spot["x"], spot["y"])
        settle(tab)
        assert (state(tab, "layer"), state(tab, "head")) == (place, head)
        weights, visible = run.head(run.layers[place].traced.index, head)
        numbers = values(tab)
        assert numbers.shape == weights.shape
        assert torch.equal(numbers.isnan(), ~visible)
        assert torch.equal(numbers.nan_to_num(0), weights)
        compared += numbers.numel()
    assert compared >= 200


def test_pointing_at_a_cell_shows_its_exact_number(tab, explorer):
    visit(tab, explorer, model="encoder", layer=0, head=1)
    weights, _ = shown(tab, explorer).head(0, 1)
    for row, column in ((0, 0), (3, 5), (8, 2)):
        tab.mouse.move(*cell(tab, row, column))
        settle(tab)
        assert float(tab.locator("#tip .figure b").inner_text()) == pytest.approx(float(weights[row, column]), rel=1e-5)
        assert f"query {row}, key {column}" in tab.locator("#tip").inner_text()


def test_a_weight_of_one_lights_exactly_its_cell(tab, explorer):
    visit(tab, explorer, model="argmax", layer=1, head=2)
    weights, _ = shown(tab, explorer).head(1, 2)
    assert set(weights.flatten().tolist()) == {0.0, 1.0}
    for (row, column), colour in pixels(tab).items():
        assert colour == ((8, 48, 107) if weights[row, column] else (255, 255, 255)), (row, column)


def test_masked_is_drawn_apart_from_zero(tab, explorer):
    visit(tab, explorer, model="decoder", layer=0, head=0)
    assert tab.evaluate("regard.valueAt(0, 1)") == "masked"
    _, visible = shown(tab, explorer).head(0, 0)
    for (row, column), colour in pixels(tab).items():
        assert (colour in ((233, 236, 240), (201, 208, 216))) == (not visible[row, column]), (row, column)


def test_axes_of_a_6_by_4_cross_attention(tab, explorer):
    visit(tab, explorer, model="pair")
    run = shown(tab, explorer)
    place = next(number for number, view in enumerate(run.layers) if view.traced.kind == "cross")
    spot = tab.evaluate(f"regard.headOnScreen({place}, 0)")
    tab.mouse.click(spot["x"], spot["y"])
    settle(tab)
    weights, _ = run.head(run.layers[place].traced.index, 0)
    targets, sources = state(tab, "run.info.tokens"), state(tab, "run.info.sources")
    assert weights.shape == (len(targets), len(sources)) == (6, 4)
    row, column = 5, 1
    tab.mouse.move(*cell(tab, row, column))
    settle(tab)
    tip = tab.locator("#tip").inner_text()
    assert re.match(rf"{re.escape(targets[row])} → {re.escape(sources[column])}\s", tip)
    assert float(tab.locator("#tip .figure b").inner_text()) == pytest.approx(float(weights[row, column]), rel=1e-5)


def test_a_click_locks_and_click_escape_and_button_release(tab, explorer):
    visit(tab, explorer, model="encoder")
    for release in (
        lambda: tab.mouse.click(*cell(tab, 2, 3)),
        lambda: tab.keyboard.press("Escape"),
        lambda: tab.click("#lock"),
    ):
        tab.mouse.click(*cell(tab, 2, 3))
        settle(tab)
        assert state(tab, "locked") == {"rows": [2], "columns": [3]}
        tab.mouse.move(*cell(tab, 6, 6))
        settle(tab)
        assert tab.locator("#lock").get_attribute("aria-pressed") == "true"
        release()
        settle(tab)
        assert state(tab, "locked") is None
        assert tab.locator("#lock").get_attribute("aria-pressed") == "false"


def test_several_tokens_are_summed(tab, explorer):
    visit(tab, explorer, model="encoder", layer=0, head=0)
    weights, _ = shown(tab, explorer).head(0, 0)
    above, below = (cell(tab, row, 0)[1] for row in (1, 4))
    left = tab.evaluate("regard.cellOnScreen(0, 0).x") - 8
    tab.mouse.click(left, above)
    tab.keyboard.down("Shift")
    tab.mouse.click(left, below)
    tab.keyboard.up("Shift")
    settle(tab)
    assert state(tab, "locked.rows") == [1, 4]
    best = (weights[1] + weights[4]).max()
    assert float(tab.locator(".partner").first.inner_text().split()[-1]) == pytest.approx(float(best), abs=6e-4)


def test_the_dials_ends_are_uniform_and_argmax(tab, explorer):
    visit(tab, explorer, model="decoder", layer=1, head=3)
    place = shown(tab, explorer).layers[1]
    q, k = (side[None, None].double() for side in (place.query(3), place.key(3)))
    for position, mechanism, beta in ((0, rg.Uniform(), 0), (200, rg.Argmax(), "inf")):
        expected = rg.weights(q, k, mechanism, rg.causal)[0, 0].float()
        before = state(tab, "changes")
        drag(tab, position)
        assert state(tab, "changes") == before  # the page computes while the dial moves
        torch.testing.assert_close(values(tab).nan_to_num(0), expected, atol=1e-6, rtol=0)
        drag(tab, position, release=True)
        assert state(tab, "changes") == [{"layers": [1], "heads": [3], "beta": beta}]
        torch.testing.assert_close(values(tab).nan_to_num(0), expected, atol=1e-6, rtol=0)


def test_a_moving_dial_is_softmax_at_its_beta(tab, explorer):
    visit(tab, explorer, model="decoder", layer=0, head=1)
    place = shown(tab, explorer).layers[0]
    drag(tab, 150)
    beta = state(tab, "beta")
    assert beta == pytest.approx(10 * place.query(1).shape[-1] ** -0.5)
    q, k = (side[None, None].double() for side in (place.query(1), place.key(1)))
    expected = rg.weights(q, k, rg.Softmax(beta=beta), rg.causal)[0, 0].float()
    torch.testing.assert_close(values(tab).nan_to_num(0), expected, atol=1e-6, rtol=0)


def test_silence_changes_the_outputs_top_five(tab, explorer):
    visit(tab, explorer, model="decoder", layer=1, head=0)
    before = tab.locator("#topfive tbody").inner_text()
    tab.click("[data-scope=layer]")
    tab.click("[data-change=silence]")
    settle(tab)
    assert tab.locator("#topfive tbody").inner_text() != before
    assert tab.locator("#topfive thead").inner_text().split()[-2:] == ["before", "after"]
    assert float(tab.locator("#kl").inner_text()) > 0
    tab.click("#clear")
    settle(tab)
    assert tab.locator("#topfive tbody").inner_text() == before


def test_another_mechanism_stands_beside_the_models_own(tab, explorer):
    visit(tab, explorer, model="decoder", layer=0, head=2)
    base = tab.evaluate("regard.state.run.id")
    tab.select_option("#mechanism", "quadratic")
    settle(tab)
    run = shown(tab, explorer)
    titles = tab.locator(".panetitle").all_inner_texts()
    for title, name, taken in zip(titles, ("before", "after"), (explorer.session.snapshot(base), run), strict=True):
        assert title.startswith(name)
        entropy = layer_statistics(taken.layers[0].traced)[2].entropy
        assert float(title.rpartition(" ")[2]) == pytest.approx(entropy, abs=0.01)
    place = shown(tab, explorer).layers[0]
    q, k = (side[None, None].double() for side in (place.query(2), place.key(2)))
    expected = rg.weights(q, k, rg.Quadratic(), rg.causal)[0, 0].float()
    torch.testing.assert_close(values(tab).nan_to_num(0), expected, atol=1e-5, rtol=0)


CUT = """(select) => { const context = document.createElement("canvas").getContext("2d");
    context.font = getComputedStyle(select).font;
    return context.measureText(select.selectedOptions[0].text).width > select.clientWidth - 12; }"""
CARDS_FIT = "document.getElementById('cards').scrollHeight <= document.getElementById('cards').clientHeight"


def test_nothing_is_cut_off_beside_a_change_and_what_is_written(tab, explorer):
    visit(tab, explorer, model="pair")
    for name in ("silence", "mean"):
        tab.click(f"[data-change={name}]")
        settle(tab)
    tab.click("[data-change=mean]")
    settle(tab)
    assert tab.locator("#written").inner_text()
    assert tab.evaluate(CARDS_FIT)
    tab.click("#before")
    settle(tab)
    assert not tab.locator("#compare").evaluate(CUT)
    tab.click("#clear")
    settle(tab)
    tab.click("#generate")
    settle(tab)
    tab.click("[data-change=silence]")
    settle(tab)
    assert tab.evaluate(CARDS_FIT)
    assert tab.evaluate(FITS)


def test_effects_beside_a_random_twin(tab, explorer):
    visit(tab, explorer, model="decoder")
    tab.click("#effects")
    settle(tab)
    tab.click("#twin-effects")
    settle(tab)
    assert tab.evaluate("[regard.state.effects.size, regard.state.twinEffects.size]") == [8, 8]
    tab.click("[data-sort=effect]")
    settle(tab)
    assert tab.evaluate("regard.headOnScreen(0, 0) !== null")


def test_an_alternative_goes_on_from_there(tab, explorer):
    visit(tab, explorer, model="decoder")
    tab.fill("#count", "4")
    tab.click("#generate")
    settle(tab)
    assert len(state(tab, "steps")) == 4
    assert len(state(tab, "run.info.tokens")) >= 9 + 3
    first, second = (step["id"] for step in state(tab, "steps")[:2])
    other = tab.locator(".step").nth(1).locator(".other").first
    chosen = int(other.get_attribute("data-alternative"))
    assert chosen != second
    other.click()
    settle(tab)
    assert [step["id"] for step in state(tab, "steps")[:2]] == [first, chosen]
    assert state(tab, "step") == 1
    assert state(tab, "locked.rows") == [9]


def test_a_deep_link_survives_a_reload(tab, explorer):
    visit(tab, explorer, model="encoder")
    spot = tab.evaluate("regard.headOnScreen(1, 3)")
    tab.mouse.click(spot["x"], spot["y"])
    tab.click("[data-view=matrix]")
    settle(tab)
    tab.mouse.click(*cell(tab, 4, 2))
    tab.click("[data-change=silence]")
    settle(tab)
    names = ("model", "input", "layer", "head", "view", "locked", "changes")
    before = [state(tab, name) for name in names]
    assert before[2:6] == [1, 3, "matrix", {"rows": [4], "columns": [2]}]
    tab.reload()
    settle(tab)
    assert [state(tab, name) for name in names] == before
    tab.fill("#text", "c b a")
    tab.press("#text", "Enter")
    settle(tab)
    tab.reload()
    settle(tab)
    assert state(tab, "input") == {"text": "c b a"}


def test_the_keyboard(tab, explorer):
    visit(tab, explorer, model="encoder", layer=0, head=0)
    tab.keyboard.press("]")
    settle(tab)
    assert (state(tab, "layer"), state(tab, "head")) == (0, 1)
    tab.mouse.move(*cell(tab, 2, 2))
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowRight")
    settle(tab)
    assert state(tab, "hover") == {"row": 3, "column": 3}
    tab.keyboard.press("Enter")
    settle(tab)
    assert state(tab, "locked") == {"rows": [3], "columns": [3]}
    tab.keyboard.press("Escape")
    tab.focus("#heads")
    tab.keyboard.press("ArrowDown")
    settle(tab)
    assert (state(tab, "layer"), state(tab, "head"), state(tab, "locked")) == (1, 1, None)
    tab.keyboard.press("?")
    assert tab.locator("#help").is_visible()
    tab.keyboard.press("Escape")
    assert not tab.locator("#help").is_visible()


def test_controls_have_names(tab, explorer):
    visit(tab, explorer, model="pair")
    unnamed = tab.evaluate(
        """[...document.querySelectorAll("button, select, input, textarea, canvas[tabindex]")].filter((control) =>
        !control.getAttribute("aria-label") && !control.textContent.trim() && !control.closest("label")
        && !document.querySelector(`label[for="${control.id}"]`)).map((control) => control.outerHTML)"""
    )
    assert unnamed == []


def saved_table(tab, path):
    """The tokens of queries and keys, and the weights between them, as CSV has them."""
    with tab.expect_download() as waiting:
        tab.click("[data-save=csv]")
    waiting.value.save_as(path)
    (_, *keys), *rows = csv.reader(path.read_text().splitlines())
    return [row[0] for row in rows], keys, torch.tensor([[float(cell) for cell in row[1:]] for row in rows])


def membership(numbers):
    """Which token (across) belongs to which word (down)."""
    return torch.tensor([[float(word == number) for number in numbers] for word in dict.fromkeys(numbers)])


def test_word_pieces_are_merged_and_special_tokens_hidden(tab, explorer, tmp_path):
    visit(tab, explorer, model="translator", source="Nous%20mangeons%20des%20framboises.", layer=5, head=3)
    run = shown(tab, explorer)
    weights, _ = run.head(5, 3)
    path = tmp_path / "table.csv"
    queries, keys, numbers = saved_table(tab, path)
    torch.testing.assert_close(numbers, weights)
    tab.check("[data-option=special]")
    settle(tab)
    rows, columns = (~torch.tensor(side.special) for side in (run.subject.tokens, run.subject.sources))
    fewer, fewer_keys, numbers = saved_table(tab, path)
    torch.testing.assert_close(numbers, weights[rows][:, columns])
    assert len(fewer) < len(queries)
    assert fewer_keys == [key for key, stays in zip(keys, columns, strict=True) if stays]
    tab.uncheck("[data-option=special]")
    tab.check("[data-option=words]")
    settle(tab)
    rows, columns = (membership(side.words) for side in (run.subject.tokens, run.subject.sources))
    _, merged, numbers = saved_table(tab, path)
    assert "mangeons" in merged
    torch.testing.assert_close(numbers, (rows / rows.sum(1, keepdim=True)) @ weights @ columns.T)


def test_mean_and_maximum_over_heads(tab, explorer):
    visit(tab, explorer, model="encoder", layer=1, head=0)
    weights = shown(tab, explorer).layers[1].weights
    for name, expected in (("mean", weights.mean(0)), ("max", weights.amax(0))):
        tab.click(f"[data-head={name}]")
        settle(tab)
        assert torch.equal(values(tab), expected)


def test_weights_below_the_threshold_and_beyond_the_top_are_not_drawn(tab, explorer):
    visit(tab, explorer, model="encoder", layer=0, head=1)
    weights, _ = shown(tab, explorer).head(0, 1)
    threshold = """(value) => { const slider = document.getElementById("threshold"); slider.value = value;
        slider.dispatchEvent(new Event("input", { bubbles: true })); }"""
    tab.evaluate(threshold, 0.2)
    settle(tab)
    assert {place for place, colour in pixels(tab).items() if colour != (255, 255, 255)} == {
        tuple(place) for place in (weights >= 0.2).nonzero().tolist()
    }
    tab.evaluate(threshold, 0)
    tab.select_option("#topk", "2")
    settle(tab)
    assert {place for place, colour in pixels(tab).items() if colour != (255, 255, 255)} == {
        (row, column) for row, best in enumerate(weights.topk(2).indices.tolist()) for column in best
    }
    tab.reload()
    settle(tab)
    assert state(tab, "top") == 2


def test_heads_are_sorted_by_entropy_and_label(tab, explorer):
    visit(tab, explorer, model="translator", source="La%20voiture%20rouge%20est%20rapide.")
    places = """() => regard.state.run.layers.flatMap(({ position, labels, strength, entropy }) => labels.map(
        (label, head) => ({ label, strength: strength[head], entropy: entropy[head],
        ...regard.headOnScreen(position, head) })))"""

    def in_order():
        return sorted(tab.evaluate(places), key=lambda head: (round(head["y"]), head["x"]))

    tab.click("[data-sort=entropy]")
    settle(tab)
    entropies = [head["entropy"] for head in in_order()]
    assert entropies == sorted(entropies)
    tab.click("[data-sort=label]")
    settle(tab)
    labels = [head["label"] for head in in_order()]
    assert labels == sorted(labels, key=[*dict.fromkeys(filter(None, labels)), None].index)
    for label in set(filter(None, labels)):
        strengths = [head["strength"] for head in in_order() if head["label"] == label]
        assert strengths == sorted(strengths, reverse=True)


def test_a_chain_that_does_not_end_in_the_weight_says_so(tab, explorer):
    visit(tab, explorer, model="encoder", layer=0, head=0)
    assert tab.locator("#inexact").count() == 0

    def another(route):
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "exact": False})

    tab.route("**/api/why", another)
    tab.mouse.click(*cell(tab, 2, 3))
    settle(tab)
    assert "unknown here" in tab.locator("#inexact").inner_text()


def windows_of(tab, explorer, index):
    """The layer that the page shows, in the trace."""
    return shown(tab, explorer).layers[index].traced.weights[0]


def test_windows_of_a_picture(tab, explorer):
    visit(tab, explorer, model="davit", image="letter%20R")
    assert state(tab, "view") == "picture"
    weights = windows_of(tab, explorer, 0)
    spot = tab.evaluate("regard.headOnScreen(0, 1)")
    tab.mouse.click(*spot.values())
    settle(tab)
    [down, across] = state(tab, "run.layers[0].windows")
    middle_window = down // 2 * across + across // 2
    assert torch.equal(values(tab), weights[middle_window, 1])
    tab.click("#windowafter")
    settle(tab)
    assert torch.equal(values(tab), weights[middle_window + 1, 1])
    names = tab.evaluate("regard.state.window")
    assert names == middle_window + 1
    tab.reload()
    settle(tab)
    assert torch.equal(values(tab), windows_of(tab, explorer, 0)[middle_window + 1, 1])
    tab.mouse.click(*cell(tab, 5, 2))
    settle(tab)
    assert float(tab.locator("#weight").inner_text()) == pytest.approx(
        float(windows_of(tab, explorer, 0)[middle_window + 1, 1, 5, 2]), rel=1e-4
    )
    # A click on the picture outside of the window shows the window there.
    box = tab.locator("[data-surface=picture-0]").bounding_box()
    picture = min(box["width"] - 32, box["height"] - 78)
    x, y = box["x"] + (box["width"] - picture) / 2 + 4, box["y"] + (box["height"] - picture) / 2 - 6
    tab.mouse.click(x, max(y, box["y"] + 38))
    settle(tab)
    assert state(tab, "window") == 0


def test_channels_of_a_picture(tab, explorer):
    visit(tab, explorer, model="davit", image="letter%20R", layer=1, head=1)
    assert torch.equal(values(tab), windows_of(tab, explorer, 1)[1])
    assert tab.locator("[data-surface=picture-0]").count() == 0
    assert tab.locator("[data-head=rollout]").count() == 0
    assert tab.locator("#mechanism").is_disabled()
    tab.mouse.click(*cell(tab, 1, 2))
    settle(tab)
    assert tab.locator("#why .pair").inner_text().split(" → ") == ["channel 1", "channel 2"]


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


def test_a_long_text_stays_light(tab, explorer):
    text = " ".join(random.Random(0).choices("abcdefghijklmnop", k=500))
    visit(tab, explorer, model="encoder", text=text.replace(" ", "%20"))
    assert state(tab, "run.layers[0].rows") >= 500
    assert tab.evaluate("document.querySelectorAll('*').length") <= 5000
    x, y = cell(tab, 250, 100)
    tab.mouse.move(x, y)
    settle(tab)
    weights, _ = shown(tab, explorer).head(state(tab, "layer"), state(tab, "head"))
    row, column = (state(tab, f"hover.{side}") for side in ("row", "column"))
    assert float(tab.locator("#tip .figure b").inner_text()) == pytest.approx(float(weights[row, column]), rel=1e-4)


def test_errors_are_one_sentence(browser, explorer):
    with window(browser) as tab:
        visit(tab, explorer, model="encoder")
        tab.fill("#text", "")
        tab.press("#text", "Enter")
        settle(tab)
        assert "expected" in tab.locator("#error").inner_text()
        tab.fill("#text", "a b")
        tab.press("#text", "Enter")
        settle(tab)
        assert tab.locator("#error").count() == 0
        tab.select_option("#menu", "absent")
        settle(tab)
        assert "pip x" in tab.locator(".message").inner_text()


def test_hostile_text_is_text(tab, explorer):
    visit(tab, explorer, model="encoder")
    tab.fill("#text", " ".join(HOSTILE))
    tab.press("#text", "Enter")
    settle(tab)
    assert tab.input_value("#text").startswith("</script>")
    tab.reload()
    settle(tab)
    assert tab.evaluate("window.broken") is None


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
