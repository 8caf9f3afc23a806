"""Every law for every mechanism of the registry, and a broken mechanism that each law catches."""

import pytest
import torch

import regard as rg
from broken import BROKEN, Similar
from regard.laws import LAWS, count_cells
from regard.laws.case import DTYPES, HEADS, LENGTHS, MASKS, Broken, budget, within_budget
from regard.mechanisms import REGISTRY
from regard.paths.sums import CHUNK


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", REGISTRY)
def test_the_law_holds(name, law):
    report = rg.check(REGISTRY[name], laws=[law], examples=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("law", LAWS)
def test_a_users_own_mechanism_keeps_the_law(law):
    report = rg.check(Similar(), laws=[law], examples=2)
    assert report.ok, str(report)


@pytest.mark.parametrize("law", LAWS)
def test_the_law_catches_a_broken_mechanism(law):
    report = rg.check(BROKEN[law], laws=[law], dtypes=["float64", "float16"], examples=10)
    assert report.broken, f"{law} does not catch {type(BROKEN[law]).__name__}"
    cell = report.broken[0]
    assert cell.reason
    assert set(cell.counterexample) == {"batch", "queries", "keys", "qk_length", "value_length", "seed"}
    assert cell.reason in str(report)


def test_every_law_has_a_broken_mechanism():
    assert set(BROKEN) == set(LAWS)


def test_the_counter_example_is_the_smallest():
    cell = rg.check(BROKEN["weights"], laws=["weights"], masks=["none"], dtypes=["float64"], examples=20).broken[0]
    assert (cell.counterexample["batch"], cell.counterexample["queries"]) == (1, 1)


def test_a_full_report_has_every_cell_with_an_outcome_or_a_reason():
    report = rg.check(rg.Channel(), examples=1)
    assert len(report.cells) == count_cells() == len(LAWS) * len(MASKS) * len(HEADS) * len(DTYPES)
    for cell in report.cells:
        assert cell.outcome in ("held", "not applicable")
        assert bool(cell.reason) == (cell.outcome == "not applicable")


def test_the_lengths_drawn_include_the_edges():
    assert {0, 1, 63, CHUNK - 1, CHUNK, CHUNK + 1} <= set(LENGTHS)


def test_an_unknown_law_is_named():
    with pytest.raises(ValueError, match=r"laws: expected some of streamed, .* got 'gravity'"):
        rg.check(rg.Softmax(), laws=["gravity"])


def test_the_budget_counts_nan_as_broken():
    exact = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(Broken):
        within_budget("it", torch.tensor([0.0, float("nan")]), exact, exact.float())


def test_the_budget_is_the_designs():
    assert budget(torch.float64, 1.0) == 1e-12
    assert budget(torch.float32, 1e-5) == pytest.approx(2e-5 + 1e-6)
    assert budget(torch.bfloat16, 0.1) == pytest.approx(0.2 + 1e-5)
    assert budget(torch.bfloat16, 0.1, gradient=True) == pytest.approx(0.3 + 1e-5)
