"""The suite examined: every mutant of the zoo dies as expected, and the original survives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mutants.__main__ import main
from mutants.attention import Attention
from mutants.contestant import Contestant, Featureful
from mutants.featured import Featured
from mutants.features import MUTANTS as FEATURES
from mutants.handed import MUTANTS as HANDED
from mutants.log_sum_exp import MUTANTS as RETURNING
from mutants.long import EVERY_ELEMENT
from mutants.long import MUTANTS as LONG
from mutants.max_logit import MUTANTS as LARGEST
from mutants.mutant import Mutant
from mutants.page import page
from mutants.run import Examiner, Outcome, count, examined, survivors
from mutants.sizes import D64, UNLIKE, Sized
from mutants.sizes import MUTANTS as SIZES
from mutants.tiled import Tiled
from mutants.world import MUTANTS as WORLD
from mutants.zoo import CHAPTERS, MUTANTS, SMALL, find_mutants

from conformance import examine
from conformance.adapter.base import Call
from conformance.cases.catalogue import catalogue, find_cases
from conformance.definition.dtypes import DTYPES
from conformance.errors import ExitCode, UnknownName
from conformance.experiments import EXPERIMENTS
from conformance.requirements import REQUIREMENTS
from conformance.running.session import plan

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


@pytest.mark.night
def test_the_original_survives_everything(examiner):
    """In one dtype for each case; `python -m mutants` asks all of them."""
    assert examiner.original(sample=True) == []


@pytest.mark.sample(12)
@pytest.mark.parametrize("mutant", SMALL, ids=lambda mutant: mutant.name)
def test_the_mutant_dies_by_a_requirement_that_was_expected(examiner, mutant):
    outcome = examiner.kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.by in outcome.mutant.killed_by


def test_there_are_enough_and_each_is_one_of_its_kind():
    assert len(MUTANTS) >= 120
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert len({mutant.did for mutant in MUTANTS}) == len(MUTANTS)
    assert set(CHAPTERS) == {
        "forward",
        "dilation",
        "global",
        "serving",
        "layouts",
        "masks",
        "causal",
        "precision",
        "backward",
        "weights",
        "modes",
        "tiles",
        "offsets",
        "splits",
        "work",
        "heads",
        "storage",
        "length",
        "declared sizes",
        "chunk",
        "spans",
        "tree",
        "window",
        "cap",
        "sink",
        "alibi",
        "rotary",
        "scaling",
        "mrope",
        "norm",
        "lengths",
        "segments",
        "cache",
        "combined",
        "equalities",
        "packed",
        "paged",
        "cached",
        "buffered",
        "ring",
        "log-sum-exp",
        "max-logit",
        "world",
    }


def test_what_mutants_name_exists():
    requirements = {item.id for item in REQUIREMENTS}
    places = {case.id for case in catalogue()} | {item.id for item in EXPERIMENTS}
    for mutant in (*SMALL, *FEATURES, *HANDED, *RETURNING, *LARGEST, *WORLD):
        assert mutant.killed_by, mutant.name
        assert set(mutant.killed_by) <= requirements, mutant.name
        assert mutant.case in places, mutant.name
        assert mutant.dtype in DTYPES, mutant.name


def test_every_requirement_is_expected_by_some_mutant():
    every = (*SMALL, *FEATURES, *RETURNING, *LARGEST, *SIZES)
    expected = {name for mutant in every for name in mutant.killed_by}
    assert expected == {item.id for item in REQUIREMENTS}


def test_a_change_is_one_place_or_two_and_never_the_whole():
    stages = {name for name in vars(Attention) if not name.startswith("__")}
    for mutant in SMALL:
        assert set(mutant.changes) <= stages - {"forward", "backward"}, mutant.name
        assert 1 <= len(mutant.changes) <= 2, mutant.name
    stages |= {name for name in vars(Featured) if not name.startswith("__")}
    for mutant in FEATURES:
        assert set(mutant.changes) <= stages - {"forward", "backward"}, mutant.name
        assert 1 <= len(mutant.changes) <= 2, mutant.name
    stages = {name for name in vars(Tiled) if not name.startswith("__")}
    before = sum(map(len, (SMALL, FEATURES, HANDED, RETURNING, LARGEST, WORLD)))
    for mutant in MUTANTS[before:]:
        assert set(mutant.changes) <= stages - {"forward", "backward", "run"}, mutant.name
        assert 1 <= len(mutant.changes) <= 2, mutant.name


# What kernels have today. All of these mutants are examined by `python -m mutants`; here a part is.


@pytest.mark.sample(6)
@pytest.mark.parametrize("mutant", FEATURES[::6], ids=lambda mutant: mutant.name)
def test_a_mutant_of_a_feature_dies_in_the_case_that_it_names(examiner, mutant):
    outcome = examiner.kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.where.split(":")[1] == mutant.case


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_attention_with_features_conforms(examiner, dtype):
    """In some cases; `test_the_original_survives_everything` asks all of them."""
    for case in [case for case in catalogue() if case.core and case.features][::4]:
        featured = Featureful.for_problem("featured", Featured, case.problem(dtype))
        rows = list(plan([featured], [case], [dtype], "cpu"))
        assert len(rows) == 3
        for row in rows:
            verdicts = {it.verdict for it in examined(examiner.session(), row).findings}
            assert "conforms" in verdicts
            assert verdicts <= {"conforms", "observed", "unsupported"}, row.id


# At the sizes of kernels. All of these mutants are examined by `python -m mutants`; here a part is.

SAMPLED = [mutant for mutant in SIZES if mutant.level == "core" and mutant.dtype == "float32"][::9]


@pytest.mark.night
@pytest.mark.parametrize("mutant", SAMPLED, ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_tiled_attention_dies_at_its_level(examiner, mutant):
    outcome = examiner.kill(mutant)
    assert outcome.killed
    assert outcome.by in mutant.killed_by


@pytest.mark.sample(2)
@pytest.mark.parametrize("geometry", [D64, UNLIKE], ids=["d64", "other value heads"])
def test_the_tiled_attention_conforms_in_cases_of_tiles(geometry):
    outcome = examine(
        Sized(geometry=geometry),
        level="core",
        cases=["plain/tiles/*", "mask/spans/chunk", "causal/last-queries/*", "bias/in-tiles/chunk"],
        dtypes="float32",
    )
    assert set(outcome.counts) == {"conforms"}, outcome.failures[:2]
    assert outcome.counts["conforms"] >= 9


def test_levels_are_those_at_which_they_are_examined():
    assert {mutant.level for mutant in SMALL} == {"full"}
    assert {mutant.level for mutant in SIZES} == {"core", "large"}
    assert len(SIZES) >= 100
    assert {mutant.level for mutant in MUTANTS[-len(LONG) :]} == {"long"}


def test_a_mutant_at_length_is_noticed_by_every_element(examiner):
    (mutant,) = find_mutants([], ["split-without-weight"])
    outcome = examiner.kill(mutant)
    assert (outcome.by, outcome.where) == (EVERY_ELEMENT, "decoding")


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


def test_a_mutant_that_raises_is_noticed_but_proves_nothing(examiner, monkeypatch):
    """Four had become stale: two called a text, and two unpacked what had grown."""

    def broken(attention, merged):
        raise TypeError("'str' object is not callable")

    mutant = Mutant("raises", "forward", "", ("output.equals-definition",), {"finish": broken})
    outcome = examiner.kill(mutant)
    assert outcome.noticed["output.equals-definition"]
    assert not outcome.killed
    monkeypatch.setattr("mutants.run.RAISING", ("raises",))
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


def test_the_command_writes_the_matrix(tmp_path, capsys, monkeypatch):
    (mutant,) = find_mutants([], ["keys-beyond-128"])
    monkeypatch.setattr("mutants.run.catalogue", lambda: find_cases(mutant.case))
    monkeypatch.setattr("mutants.run.TELLING", ())
    target = tmp_path / "matrix.md"
    assert main(["--mutant", "keys-beyond-128", "--matrix", str(target)]) == 0
    assert "| `keys-beyond-128` |" in target.read_text(encoding="utf-8")
