"""The explorer's cards in a real browser: why, what if, effects and generation."""

import pytest
import torch

import explorer_pages
import regard as rg
from explorer_pages import FITS, cell, drag, settle, shown, state, values, visit
from regard.explorer.changes import HeadChange
from regard.inference.tracing.statistics import layer_statistics

pytestmark = explorer_pages.NEEDS_CHROMIUM
browser, explorer, tab = explorer_pages.browser, explorer_pages.explorer, explorer_pages.tab


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


def test_a_head_without_a_beta_has_no_dial_and_a_change_that_fails_is_taken_back(tab, explorer):
    visit(tab, explorer, model="decoder", layer=0, head=2)
    tab.select_option("#mechanism", "elu")
    settle(tab)
    assert tab.locator("#beta").is_disabled()
    tab.click("[data-scope=model]")
    tab.select_option("#mechanism", "uniform")
    settle(tab)
    assert tab.locator("#betavalue").inner_text() == "0"
    before = state(tab, "changes")
    tab.route("**/api/run", lambda route: route.fulfill(status=400, json={"error": "beta: expected a number"}))
    tab.click("[data-change=silence]")
    settle(tab)
    assert "beta: expected a number" in tab.locator("#error").inner_text()
    assert state(tab, "changes") == before
    assert tab.locator("[data-change=silence]").get_attribute("aria-pressed") == "false"
    tab.troubles[:] = [trouble for trouble in tab.troubles if "400" not in trouble]


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
    assert tab.evaluate("[regard.state.run.effects.size, regard.state.run.twinEffects.size]") == [8, 8]
    tab.click("[data-sort=effect]")
    settle(tab)
    assert tab.evaluate("regard.headOnScreen(0, 0) !== null")
    # They are those of this run: a changed one has others, and the unchanged one has these still.
    tab.click("[data-change=silence]")
    settle(tab)
    assert tab.locator("#effects").count() == 1
    tab.click("#clear")
    settle(tab)
    assert tab.locator("#effects").count() == 0


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
    # The changed model goes on from the same prompt.
    tab.click("[data-scope=model]")
    tab.select_option("#mechanism", "uniform")
    tab.click("#generate")
    settle(tab)
    run = shown(tab, explorer)
    assert run.changes == (HeadChange(mechanism="uniform"),)
    with rg.intervene(run.subject.model, mechanism=rg.Uniform()):
        (written,) = rg.generate(run.subject.model, [list(run.subject.tokens.ids[:9])], max_new_tokens=4, temperature=0)
    assert [step["id"] for step in state(tab, "steps")] == written.tokens
    assert tab.evaluate("regard.state.base.info.changed") is False
    titles = tab.locator(".panetitle").all_inner_texts()
    assert [title.startswith(name) for title, name in zip(titles, ("before", "after"), strict=True)] == [True, True]


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
