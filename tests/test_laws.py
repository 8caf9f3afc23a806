"""Every law for every mechanism of the registry, and a broken mechanism that each law catches."""

import io
import os
import sys
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn

import regard as rg
from broken import BROKEN, Averages, HidesItsGrowth, Similar, StatesNoSteps
from regard.core.laws import LAWS, count_cells
from regard.core.laws.case import DTYPES, HEADS, LENGTHS, MASKS, Broken, budget, within_budget
from regard.core.mechanisms import REGISTRY
from regard.core.paths.sums import CHUNK

WITHOUT_NUMBERS = ("cost", "refusals")
"""Laws whose outcome no instruction changes."""
STATED = [pytest.param(law, marks=[pytest.mark.once] * (law in WITHOUT_NUMBERS)) for law in LAWS]


def check(mechanism, law, turn=0):
    """Every mask with every dtype, every mask and dtype with every grouping of heads: a third of the cells, which
    mechanisms share by turns. `regard check` (make check) runs them all."""
    for i, mask in enumerate(MASKS):
        for j, dtype in enumerate(DTYPES):
            heads = list(HEADS)[(i + j + turn) % len(HEADS)]
            report = rg.check(mechanism, laws=[law], masks=[mask], heads=[heads], dtypes=[dtype], examples=1)
            assert report.ok, str(report)


@pytest.mark.parametrize("law", STATED)
@pytest.mark.parametrize("name", REGISTRY)
def test_the_law_holds(name, law):
    check(REGISTRY[name], law, turn=list(REGISTRY).index(name))


@pytest.mark.parametrize("law", STATED)
def test_a_users_own_mechanism_keeps_the_law(law):
    check(Similar(), law)


@pytest.mark.once
@pytest.mark.parametrize("law", LAWS)
def test_the_law_catches_a_broken_mechanism(law):
    masks = ["causal"] if law == "gradients" else list(MASKS)  # gradcheck takes long to say what is wrong
    for mask, dtype in product(masks, ["float64", "float16"]):  # until it is caught: to shrink every cell takes long
        report = rg.check(BROKEN[law], laws=[law], masks=[mask], heads=["GQA"], dtypes=[dtype], examples=3)
        if report.broken:
            break
    assert report.broken, f"{law} does not catch {type(BROKEN[law]).__name__}"
    cell = report.broken[0]
    assert cell.reason
    assert "Error: " not in cell.reason, "the law itself says what is wrong"
    assert set(cell.to_dict()["counterexample"]) == {"batch", "queries", "keys", "qk_length", "value_length", "seed"}
    assert cell.reason in str(report)


@pytest.mark.once
@pytest.mark.parametrize("grows", [True, False], ids=["growing", "constant"])
def test_the_law_of_cost_knows_the_steps_and_the_growth_of_a_state_of_ones_own(grows):
    place = {"masks": ["causal"], "heads": ["GQA"], "dtypes": ["float32"]}
    assert rg.check(Averages(grows=grows), **place).ok
    steps = rg.check(StatesNoSteps(grows=grows), laws=["cost"], **place)
    assert "FLOPs stated for a decode step" in steps.broken[0].reason
    report = rg.check(HidesItsGrowth(grows=grows), laws=["cost"], **place)
    assert report.ok == (not grows)
    assert report.ok or "bytes of state stated" in report.broken[0].reason


@pytest.mark.parametrize("law", ["streamed", "weights", "paths", "learned", "curved", "cost", "extremes"])
def test_a_learned_feature_map_keeps_the_law(law):
    mechanism = rg.Kernel(feature_map=nn.Sequential(nn.Linear(12, 6), nn.Softplus()))
    report = rg.check(mechanism, laws=[law], masks=["causal", "padding left"], heads=["GQA"], qk_length=12, examples=1)
    assert report.ok, str(report)
    assert any(cell.outcome == "held" for cell in report.cells)


def test_a_mechanism_for_one_length_says_so():
    mechanism = rg.Kernel(feature_map=nn.Linear(64, 32))
    message = r"^qk_length: expected one that Kernel takes, got 4, .* name that length$"
    with pytest.raises(ValueError, match=message):
        rg.check(mechanism)
    with pytest.raises(ValueError, match=r"^qk_length: expected one that Kernel takes, got 32, "):
        rg.check(mechanism, qk_length=32)
    with pytest.raises(ValueError, match="qk_length: expected a whole number of at least 1, got 0"):
        rg.check(mechanism, qk_length=0)


@dataclass(frozen=True, kw_only=True)
class Distant(rg.Mechanism):
    """A formula that is more than one product, and whose kernel depends on its sizes."""

    weight: nn.Parameter

    def similarity(self, q, k):
        return torch.exp(-torch.cdist(q * self.weight, k @ torch.ones(k.shape[-1], k.shape[-1], dtype=k.dtype)))


@pytest.mark.once
def test_what_a_users_formula_costs_is_counted_whatever_it_contains():
    report = rg.check(Distant(weight=nn.Parameter(torch.ones(()))), laws=["cost"], dtypes=["float32"], examples=2)
    assert report.ok, str(report)


def test_a_cost_counts_tokens_and_pairs_apart():
    class Turned(Similar):
        def similarity(self, q, k):
            return super().similarity(q @ torch.ones(16, 16), k)

    work = rg.Work(
        query_length=500, key_length=700, num_heads=4, num_kv_heads=2, qk_length=16, mask=rg.window(before=9)
    )
    more = rg.cost(Turned(), work).flops - rg.cost(rg.Softmax(), work).flops
    assert more == 2 * 16 * 16 * 500 * 4


def test_a_similarity_of_another_shape_is_named():
    class Summed(Similar):
        def similarity(self, q, k):
            return super().similarity(q, k).sum(-1)

    q = torch.randn(1, 4, 5, 8)
    expected = r"^similarity: expected \(…, T, S\) = \(1, 2, 10, 5\) from queries .* got \(1, 2, 10\) from Summed$"
    for call in (lambda: rg.attend(q, q[:, :2], q[:, :2], Summed()), lambda: rg.weights(q, q[:, :2], Summed())):
        with pytest.raises(ValueError, match=expected):
            call()
    with pytest.raises(ValueError, match=r"^similarity: expected"):
        rg.check(Summed())


def test_every_law_runs_once_before_any_runs_twice():
    names: list[str] = []
    report = rg.check(
        Similar(),
        laws=["groups", "weights"],
        masks=["none", "causal"],
        dtypes=["float64"],
        examples=1,
        progress=names.append,
    )
    assert [name.split(", ")[0] for name in names] == ["groups", "weights"] * 6
    assert [cell.law for cell in report.cells] == ["groups"] * 6 + ["weights"] * 6


def test_a_terminal_shows_a_bar_and_what_is_broken(monkeypatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        rg.check(BROKEN["weights"], laws=["weights"], masks=["none"], dtypes=["float64"], examples=1)
        terminal.flush()
        shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "0/3" in shown
    assert "BROKEN: weights" in shown.replace("\r\n", "")


class NotebookStream(io.StringIO):
    """Standard error as a notebook's kernel gives it; Jupyter itself is no part of the tests."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize(("kind", "shows"), [(NotebookStream, True), (io.StringIO, False)])
def test_a_notebook_shows_a_line_and_a_pipe_nothing(monkeypatch, kind, shows):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    rg.check(BROKEN["weights"], laws=["weights"], masks=["none"], dtypes=["float64"], examples=1)
    shown = stream.getvalue()
    assert bool(shown) == shows
    if shows:
        lines = shown.split("\r")
        assert lines[1].startswith("0/3 nothing broken  (weights, none, ")
        assert any("/3 BROKEN: weights, " in line for line in lines)
        assert "\n" not in shown
        assert not "".join(lines[-2:]).strip()  # it takes itself away


def test_every_law_has_a_broken_mechanism():
    assert set(BROKEN) == set(LAWS)


def test_the_counter_example_is_the_smallest():
    cell = rg.check(BROKEN["weights"], laws=["weights"], masks=["none"], dtypes=["float64"], examples=20).broken[0]
    assert (cell.counterexample.batch, cell.counterexample.queries) == (1, 1)


@pytest.mark.once
def test_a_full_report_has_every_cell_with_an_outcome_or_a_reason():
    report = rg.check(rg.Channel(), examples=1)
    assert len(report.cells) == count_cells() == len(LAWS) * len(MASKS) * len(HEADS) * len(DTYPES)
    for cell in report.cells:
        assert cell.outcome in ("held", "not applicable")
        assert bool(cell.reason) == (cell.outcome == "not applicable")


def test_the_lengths_drawn_include_the_edges():
    assert {0, 1, 63, CHUNK - 1, CHUNK, CHUNK + 1} <= set(LENGTHS)


@dataclass(frozen=True, kw_only=True)
class Unpadded(Averages):
    """A mechanism that is not defined under padding."""

    def refuses(self, call):
        return "mask: expected no padding, got some" if call.structure.paddings else super().refuses(call)


def test_laws_that_add_padding_do_not_apply_to_a_mechanism_that_refuses_it():
    report = rg.check(
        Unpadded(grows=False), masks=["none", "causal", "padding left"], heads=["GQA"], dtypes=["float32"]
    )
    assert report.ok, str(report)
    excused = {cell.law for cell in report.cells if cell.mask == "none" and cell.reason.startswith("mask: expected no")}
    assert excused == {"padded", "empty"}


def test_a_report_says_which_laws_do_not_apply():
    report = rg.check(rg.Retention(), laws=["normalised", "groups", "extremes"], masks=["causal"], dtypes=["float32"])
    notes = [note for note in report.notes() if note.startswith("not applicable: ")]
    assert [note.split(": ")[1] for note in notes] == ["normalised", "groups", "extremes"]
    whole = rg.check(rg.Elu(), laws=["gradients", "curved"], masks=["causal"], heads=["MHA"], dtypes=["float32"])
    assert whole.notes()[0].startswith("not applicable: gradients, curved: ")


def test_an_unknown_law_is_named():
    with pytest.raises(ValueError, match=r"laws: expected some of streamed, .* got 'gravity'"):
        rg.check(rg.Softmax(), laws=["gravity"])
    with pytest.raises(ValueError, match="device: expected one that torch has here, got 'nowhere'"):
        rg.check(rg.Softmax(), device="nowhere")


def test_the_budget_counts_nan_as_broken():
    exact = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(Broken):
        within_budget("it", torch.tensor([0.0, float("nan")]), exact, exact.float())


def test_the_budget_is_the_designs():
    assert budget(torch.float64, 1.0) == 1e-12
    assert budget(torch.float32, 1e-5) == pytest.approx(2e-5 + 1e-6)
    assert budget(torch.bfloat16, 0.1) == pytest.approx(0.2 + 1e-5)
    assert budget(torch.bfloat16, 0.1, gradient=True) == pytest.approx(0.3 + 1e-5)
