"""The suite examined: every mutant of the zoo dies as expected, and the original survives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mutants.__main__ import main
from mutants.attention import Attention
from mutants.contestant import Contestant
from mutants.mutant import Mutant
from mutants.page import page
from mutants.run import Examiner, Outcome, count, survivors
from mutants.zoo import CHAPTERS, MUTANTS, find_mutants

from conformance.adapter.base import Call
from conformance.cases.catalogue import catalogue
from conformance.definition.dtypes import DTYPES
from conformance.errors import ExitCode, UnknownName
from conformance.experiments import EXPERIMENTS
from conformance.requirements import REQUIREMENTS

IDLE = Mutant(
    "idle",
    "forward",
    "changes nothing",
    ("output.equals-definition",),
    {},
    case=catalogue()[0].id,
)
PAGE = Path(__file__).parent.parent / "docs" / "kill-matrix.md"


@pytest.fixture(scope="module")
def examiner():
    return Examiner()


@pytest.fixture(scope="module")
def outcomes(examiner):
    return {mutant.name: examiner.kill(mutant) for mutant in MUTANTS}


def test_the_original_survives_everything(examiner):
    assert examiner.original() == []


@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_the_mutant_dies_by_a_requirement_that_was_expected(outcomes, name):
    outcome = outcomes[name]
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.by in outcome.mutant.killed_by


def test_there_are_enough_and_each_is_one_of_its_kind():
    assert len(MUTANTS) >= 120
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.did for mutant in MUTANTS}) == len(MUTANTS)
    assert set(CHAPTERS) == {
        "forward",
        "masks",
        "causal",
        "precision",
        "backward",
        "weights",
        "modes",
    }


def test_what_mutants_name_exists():
    requirements = {item.id for item in REQUIREMENTS}
    places = {case.id for case in catalogue()} | {item.id for item in EXPERIMENTS}
    for mutant in MUTANTS:
        assert mutant.killed_by, mutant.name
        assert set(mutant.killed_by) <= requirements, mutant.name
        assert mutant.case in places, mutant.name
        assert mutant.dtype in DTYPES, mutant.name


def test_every_requirement_is_expected_by_some_mutant():
    expected = {name for mutant in MUTANTS for name in mutant.killed_by}
    assert expected == {item.id for item in REQUIREMENTS}


def test_a_change_is_one_place_or_two_and_never_the_whole():
    stages = {name for name in vars(Attention) if not name.startswith("__")}
    for mutant in MUTANTS:
        assert set(mutant.changes) <= stages - {"forward", "backward"}, mutant.name
        assert 1 <= len(mutant.changes) <= 2, mutant.name


def test_a_mutant_that_does_nothing_survives(monkeypatch):
    monkeypatch.setattr("mutants.run.catalogue", lambda: catalogue()[:3])
    monkeypatch.setattr("mutants.run.EXPERIMENTS", ())
    outcome = Examiner().kill(IDLE)
    assert not outcome.killed
    assert survivors([outcome]) == ["idle"]
    assert count([outcome]) == {"forward": (0, 1)}


def test_a_kill_by_another_requirement_does_not_count(monkeypatch):
    (mutant,) = find_mutants([], ["output-bias-forgotten"])
    elsewhere = Mutant("elsewhere", "forward", "", ("call.repeats",), mutant.changes, IDLE.case)
    monkeypatch.setattr("mutants.run.catalogue", lambda: catalogue()[:3])
    monkeypatch.setattr("mutants.run.EXPERIMENTS", ())
    outcome = Examiner().kill(elsewhere)
    assert not outcome.killed
    assert outcome.noticed["output.equals-definition"]


def test_mutants_that_raise_are_noticed(examiner):
    def broken(attention, merged):
        raise IndexError("out of tiles")

    mutant = Mutant("raises", "forward", "", ("output.equals-definition",), {"finish": broken})
    assert examiner.kill(mutant).killed


def test_gradients_are_those_of_finite_differences():
    """The zoo's backward pass is written by hand, so it is checked without the reference too."""
    (case,) = [case for case in catalogue() if case.id == "bias/with-mask/additive"]
    problem, adapter = case.problem("float64"), Contestant()
    mode = adapter.modes[0]

    def loss(changed):
        return float((adapter.run(changed, Call(mode)).output * problem.cotangent).sum())

    gradient = adapter.run(problem, Call(mode)).gradients["query"]
    step = np.random.default_rng(0).standard_normal(problem.query.shape)
    ahead = loss(problem.with_inputs(query=problem.query + 1e-6 * step))
    behind = loss(problem.with_inputs(query=problem.query - 1e-6 * step))
    assert (ahead - behind) / 2e-6 == pytest.approx(float((gradient * step).sum()), rel=1e-6)


def test_the_page_names_exactly_the_mutants_that_exist():
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.-]+)`(?: \(\w+\))? \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    zoo = [row for row in rows if not row[1].isdigit()]
    assert [row[:2] for row in zoo] == [(mutant.name, mutant.did) for mutant in MUTANTS]
    assert f"| all | {len(MUTANTS)} | {len(MUTANTS)} |" in text
    for name, _, noticed in zoo:
        assert "**" in noticed, name


def test_the_page_is_made_of_outcomes():
    (mutant,) = find_mutants([], ["keys-beyond-128"])
    outcome = Outcome(mutant, "output.equals-definition", "somewhere")
    outcome.noticed["output.equals-definition"] = 7
    text = page([outcome])
    assert (
        "| `keys-beyond-128` | has room for only 128 keys | **output.equals-definition** 7 |"
        in text
    )
    assert "| [forward](#forward) | 1 | 1 |" in text


def test_unknown_names_are_told_with_near_ones(capsys):
    assert main(["--mutant", "scale-mising"]) == ExitCode.USAGE
    assert "did you mean scale-missing" in capsys.readouterr().err
    assert main(["--chapter", "mask"]) == ExitCode.USAGE
    assert "did you mean masks" in capsys.readouterr().err
    with pytest.raises(UnknownName):
        find_mutants([], ["nobody"])


def test_the_command_prints_killed_and_total(capsys):
    assert main(["--mutant", "heads-interleaved"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "heads-interleaved: output.equals-definition at heads-interleaved:plain/" in printed
    assert re.search(r"^forward +1 / 1$", printed, re.MULTILINE)


def test_the_command_fails_if_one_survives(capsys, monkeypatch):
    monkeypatch.setattr("mutants.__main__.find_mutants", lambda *_: (IDLE,))
    monkeypatch.setattr("mutants.run.catalogue", lambda: catalogue()[:3])
    monkeypatch.setattr("mutants.run.EXPERIMENTS", ())
    assert main(["--mutant", "idle"]) == ExitCode.DEVIATES
    assert "survived: idle" in capsys.readouterr().out


def test_the_command_writes_the_matrix(tmp_path, capsys):
    target = tmp_path / "matrix.md"
    assert main(["--mutant", "keys-beyond-128", "--matrix", str(target)]) == 0
    assert "| `keys-beyond-128` |" in target.read_text(encoding="utf-8")
