"""The explorer's page in a real browser: what it shows are the model's numbers, and its controls do what they say."""

import csv
import random
import re

import pytest
import torch

import explored
import explorer_pages
import regard as rg
from explorer_pages import (
    FITS,
    HOSTILE,
    SENTENCE,
    cell,
    pixels,
    settle,
    shown,
    state,
    values,
    visit,
    window,
)

pytestmark = explorer_pages.NEEDS_CHROMIUM
browser, explorer, tab = explorer_pages.browser, explorer_pages.explorer, explorer_pages.tab


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


HELD_BACK = """
const call = window.fetch;
window.fetch = async (address, ...rest) => {
  const answer = await call(address, ...rest);
  if (!String(address).endsWith("api/run") || window.goOn) return answer;
  const content = new Uint8Array(await answer.arrayBuffer()), view = new DataView(content.buffer);
  let end = 0;
  for (let type = ""; type !== "strongest";) {
    const length = view.getUint32(end, true);
    ({ type } = JSON.parse(new TextDecoder().decode(content.subarray(end + 4, end + 4 + length))));
    end += 8 + length + view.getUint32(end + 4 + length, true);
  }
  return new Response(new ReadableStream({ async start(stream) {
    stream.enqueue(content.slice(0, end));
    await new Promise((resolve) => { window.goOn = resolve; });
    stream.enqueue(content.slice(end));
    stream.close();
  } }));
};
"""
"""An answer to a run is held back after the frame that names the strongest head, until `goOn` is called."""


def test_a_page_is_drawn_before_labels_and_output_are_there(tab, explorer):
    tab.add_init_script(HELD_BACK)
    tab.goto(f"http://127.0.0.1:{explorer.place.port}/")
    tab.wait_for_function("() => window.regard?.state.opened && regard.valueAt(0, 0) !== null")
    assert tab.evaluate("regard.state.run.done === null && regard.state.run.layers.every((layer) => !layer.labels)")
    assert torch.equal(values(tab).nan_to_num(0), shown(tab, explorer).head(state(tab, "layer"), state(tab, "head"))[0])
    tab.wait_for_selector("#why [data-step=weight]")
    # A change that is asked for meanwhile comes after the output, which it is compared with.
    tab.click("[data-change=silence]")
    tab.evaluate("goOn()")
    settle(tab)
    assert tab.evaluate("regard.state.base.done !== null && regard.state.base.layers.every((layer) => layer.entropy)")
    assert tab.locator("#topfive thead th").all_inner_texts()[1:] == ["before", "after"]
    assert tab.locator("#kl").count() == 1


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


def test_a_model_of_a_folder_is_chosen_by_its_path_and_by_a_link(tab, explorer, tmp_path):
    rg.save(explored.translator(), tmp_path / "mine")
    path = str(tmp_path / "mine")
    visit(tab, explorer)
    tab.select_option("#menu", label="a folder…")
    tab.fill("#folder", path)
    tab.press("#folder", "Enter")
    settle(tab)
    tab.troubles[:] = [trouble for trouble in tab.troubles if "400" not in trouble]  # it was asked what it reads
    assert (state(tab, "model"), state(tab, "error")) == (path, "")
    tab.fill("#source", "a b c")
    tab.press("#source", "Enter")
    settle(tab)
    tab.reload()
    settle(tab)
    assert (state(tab, "model"), state(tab, "error")) == (path, "")
    assert tab.input_value("#source") == "a b c"
    assert tab.locator("#menu").input_value() == path


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
