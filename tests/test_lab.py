"""Experiments of the lab: verdicts, the same for ten seeds, and others when the library or a formula is wrong."""

import json
import re

import pytest

import lab_cases_practice
import lab_cases_problems
import lab_cases_theory
from regard import lab
from regard.commands.lab import run_
from regard.lab.experiment import Check, Measurements

CASES = {**lab_cases_theory.CASES, **lab_cases_practice.CASES, **lab_cases_problems.CASES}
CLAIMS = {
    "000.1a": "holds",
    "000.1a.softmax": "holds",
    "000.2a": "holds under a condition",
    "000.2b": "holds under a condition",
    "000.3a": "holds",
    "000.3b": "holds under a condition",
    "001": "holds",
    "001.4": "holds",
    "002.1.1b": "holds",
    "002.1.1c": "holds",
    "002.1.1d": "holds",
    "002.1.1e": "does not hold",
    "002.1.1f": "holds under a condition",
    "002.1.3c": "does not hold",
    "002.1.3d": "holds",
    "002.1.3e": "holds under a condition",
    "003.1": "holds",
    "003.2": "holds",
    "003.3": "does not hold",
    "003.3b": "holds under a condition",
    "003.4": "holds",
    "003.4.einsum": "does not hold",
    "003.6a": "holds under a condition",
    "003.5": "holds",
    "real.reach": "holds",
    "real.atoms": "holds",
    "real.sinks": "holds",
    "000.2c": "holds",
    "000.2d": "holds",
    "002.1.4a": "measured here",
    "002.1.4b": "measured here",
    "002.1.5": "holds",
    "003.6b": "holds",
    "003.6c": "holds",
    "003.6d": "holds",
    "004.12.1": "does not hold",
    "004.12.2": "holds",
    "004.12.3": "holds",
    "004.12.4": "does not hold",
    "004.12.5": "does not hold",
    "004.12.6": "holds",
    "004.12.7": "does not hold",
    "004.12.8": "holds",
    "004.12.9": "holds under a condition",
    "004.12.10": "does not hold",
}
"""The statements of the documents, with the verdict that each has."""


def outcome_of(name, **parameters):
    outcome = lab.run(name, **{**CASES[name].quick, **parameters})
    if outcome.verdict == "not run":
        pytest.skip(outcome.missing)
    return outcome


def test_every_experiment_has_a_case_and_every_statement_an_experiment():
    assert set(CASES) == set(lab.experiments())
    claimed = {claim for experiment in lab.experiments().values() for claim in experiment.claims}
    assert claimed == set(CLAIMS)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_follows_and_turns_when_something_is_broken(name, monkeypatch):
    outcome = outcome_of(name)
    assert outcome.verdict == CASES[name].verdict, outcome.check_rows()
    for claim in outcome.experiment.claims:
        assert CLAIMS[claim] == outcome.verdict
    assert json.loads(json.dumps(outcome.to_dict(), allow_nan=False))["verdict"] == outcome.verdict
    assert outcome.reading or outcome.verdict in ("holds", "measured here")
    CASES[name].flip(monkeypatch)
    assert lab.run(name, **CASES[name].quick).verdict != outcome.verdict


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.statistical])
def test_a_statistical_verdict_is_the_same_for_ten_seeds(name):
    assert {outcome_of(name, seed=seed).verdict for seed in range(1, 11)} == {CASES[name].verdict}


def checks(*results):
    numbers = {"passed": 1.0, "failed": 3.0, "undecided": 1.0}
    return tuple(
        Check(
            name=result,
            predicted=1.0,
            measured=numbers[result],
            tolerance=0.5,
            interval=(-9.0, 11.0) if result == "undecided" else (0.9, 1.1) if result == "passed" else (2.9, 3.1),
        )
        for result in results
    )


@pytest.mark.parametrize(
    ("statement", "within", "instead", "verdict"),
    [
        (["passed"], [], [], "holds"),
        (["passed", "undecided"], [], [], "undecided"),
        (["failed"], ["passed"], [], "holds under a condition"),
        (["failed"], ["passed"], ["passed"], "holds under a condition"),
        (["failed"], ["failed"], ["passed"], "does not hold"),
        (["failed"], [], ["passed"], "does not hold"),
        (["failed"], [], ["failed"], "undecided"),
        (["failed"], [], [], "does not hold"),
        (["failed"], [], ["undecided"], "undecided"),
    ],
)
def test_a_verdict_follows_from_the_results_of_checks(statement, within, instead, verdict):
    measurements = Measurements(
        statement=checks(*statement), within=checks(*within), instead=checks(*instead), draw=lambda: None
    )
    assert [check.result for check in measurements.checks] == [*statement, *within, *instead]
    assert measurements.verdict == verdict


def test_a_slow_machine_decides_nothing():
    late = Check(name="ms", predicted=1.0, measured=9.0, timed=True)
    right = Check(name="FLOPs", predicted=4.0, measured=4.0)
    assert Measurements(statement=(late, right), draw=lambda: None).verdict == "holds"
    assert Measurements(statement=(late,), draw=lambda: None).verdict == "measured here"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dims": (4, 9000)}, "dims: expected 1 to 16 whole numbers from 1 to 8,192, got (4, 9000)"),
        ({"dims": 4.5}, "dims: expected 1 to 16 whole numbers from 1 to 8,192, got 4.5"),
        ({"samples": True}, "samples: expected a whole number from 1,000 to 1,000,000, got True"),
        ({"size": 3}, "size: expected a parameter of scaling (dims, centres, stds, samples, seed)"),
    ],
)
def test_a_wrong_parameter_is_named_before_any_work(parameters, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lab.run("scaling", **parameters)


def test_an_unknown_experiment_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"got 'scalign'; did you mean scaling\?"):
        lab.run("scalign")


def test_the_command_takes_parameters_and_prints_json(capsys):
    run_(["scaling", "--dims", "4", "4096", "--samples=5000", "--seed", "7"], as_json=True)
    (outcome,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert outcome["verdict"] == "holds"
    assert outcome["parameters"]["dims"] == [4, 4096]
    assert outcome["parameters"]["seed"] == 7
    with pytest.raises(ValueError, match=r"^--size: expected a parameter of scaling \(--dims, --centres, --stds, "):
        run_(["scaling", "--size", "3"])
    with pytest.raises(ValueError, match=r"^experiment: expected at least one ID"):
        run_(["--dims", "4"])


def test_in_a_notebook_an_outcome_is_a_table_and_a_figure():
    assert outcome_of("orthogonal").table[0]["weight of itself"] == pytest.approx(0.2797, abs=5e-5)
    page = outcome_of("norm_length")._repr_html_()
    assert "<table" in page
    assert "<svg" in page
