"""The suite in somebody's own tests: collected, run, selected, distributed, and what it says."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from mutants import miniatures

from conformance import Mode, assert_conforms, attention_function, parametrize_with_checks
from conformance.cases.catalogue import catalogue
from conformance.errors import ConformanceError, NotAnAdapter, UnknownName
from conformance.requirements import REQUIREMENTS

pytest_plugins = ["pytester"]

NARROW = "cases=['plain/no-mask/self', 'mask/shared/self'], dtypes='float32'"
# Hypothesis' plugin imports all of hypothesis, in each of these runs.
QUIET = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
PROGRAM = """
from mutants import miniatures
from conformance import parametrize_with_checks

@parametrize_with_checks({which}, {how})
def test_conforms(check):
    check()
"""


@pytest.fixture(autouse=True)
def miniatures_are_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def program(pytester, which, how=NARROW):
    pytester.makepyfile(test_mine=PROGRAM.format(which=which, how=how))


def run(pytester, *arguments):
    return pytester.runpytest_inprocess(*QUIET, *arguments)


# Collecting


def test_ids_are_short_and_in_the_order_of_the_catalogue(pytester):
    program(pytester, "[miniatures.Moded, miniatures.Correct]", "cases='plain/no-mask/self'")
    lines = run(pytester, "--collect-only", "-q").outlines
    assert lines[:8] == [
        "test_mine.py::test_conforms[Moded:plain/no-mask/self:float32:exact]",
        "test_mine.py::test_conforms[Moded:plain/no-mask/self:float32:rough]",
        "test_mine.py::test_conforms[Moded:plain/no-mask/self:float16:exact]",
        "test_mine.py::test_conforms[Moded:plain/no-mask/self:float16:rough]",
        "test_mine.py::test_conforms[Moded:verified]",
        "test_mine.py::test_conforms[Correct:plain/no-mask/self:float32]",
        "test_mine.py::test_conforms[Correct:plain/no-mask/self:float16]",
        "test_mine.py::test_conforms[Correct:verified]",
    ]


def test_collecting_calls_nothing(pytester):
    pytester.makepyfile(
        """
        from mutants import miniatures
        from conformance import parametrize_with_checks

        class Loud(miniatures.Correct):
            def run(self, problem, call):
                raise SystemExit("called")

        @parametrize_with_checks(Loud, cases="plain/no-mask/self")
        def test_conforms(check):
            check()
        """
    )
    assert run(pytester, "--collect-only", "-q").ret == 0


def test_collecting_imports_no_framework(pytester):
    program(pytester, "['torch-mha', 'flax-linen', 'keras-tensorflow-mha']", "level='core'")
    pytester.makeconftest(
        """
        import sys

        def pytest_collection_finish(session):
            loaded = {"torch", "jax", "tensorflow", "keras", "flax"} & set(sys.modules)
            print("loaded:", sorted(loaded), len(session.items) > 60)
        """
    )
    found = pytester.runpytest_subprocess(*QUIET, "--collect-only", "-q", "-s")
    assert "loaded: [] True" in found.stdout.str()


def test_k_selects(pytester):
    program(pytester, "[miniatures.Correct, miniatures.Inverted]")
    run(pytester, "-k", "Inverted and plain").assert_outcomes(passed=1, deselected=5)


def test_what_cannot_be_expressed_is_not_collected(pytester):
    program(pytester, "[miniatures.Correct]", "cases='plain/no-mask', dtypes='float32'")
    ids = [line for line in run(pytester, "--collect-only", "-q").outlines if "::" in line]
    assert len(ids) > 5
    assert not [line for line in ids if "additive" in line]


# Running


def test_a_right_one_passes(pytester):
    program(pytester, "[miniatures.Correct]")
    run(pytester).assert_outcomes(passed=3)


def test_a_wrong_one_fails_with_a_message_that_stands_on_its_own(pytester):
    program(pytester, "miniatures.Inverted()")
    found = run(pytester)
    found.assert_outcomes(passed=2, failed=1)
    printed = found.stdout.str()
    for told in (
        "deviates: output.equals-definition",
        "case mask/shared/self, float32, mode default, on cpu",
        "One arbitrary mask for all batch entries and heads.",
        "The output is that of the definition, element by element",
        "σ, allowed 8σ",
        "worst element output[batch ",
        "likely cause: equals the answer with the mask inverted",
        "σ: the rounding error of a correct float32 computation at that element",
        "again: pytest 'test_mine.py::test_conforms[Inverted:mask/shared/self:float32]'",
    ):
        assert told in printed, told
    assert "checks.py" not in printed, "no source of the suite"


def test_the_command_in_the_message_runs_that_check_again(pytester):
    program(pytester, "miniatures.Inverted")
    (line,) = {line for line in run(pytester).outlines if line.startswith("again: ")}
    node = line.removeprefix("again: pytest ").strip("'")
    run(pytester, node).assert_outcomes(failed=1)


@pytest.mark.night
def test_under_xdist(pytester):
    program(pytester, "[miniatures.Correct, miniatures.Inverted]")
    pytester.runpytest_subprocess(*QUIET, "-n", "2").assert_outcomes(passed=5, failed=1)


def test_a_skip_says_why_and_is_no_pass(pytester):
    program(pytester, "[miniatures.Refuses]")
    found = run(pytester, "-rs")
    found.assert_outcomes(skipped=2, failed=1)
    assert "unsupported: today I cannot" in found.stdout.str()
    assert "Refuses: nothing was verified (2 unsupported)" in found.stdout.str()


def test_what_is_not_installed_fails_once(pytester):
    program(pytester, "[miniatures.Unready]")
    found = run(pytester)
    found.assert_outcomes(skipped=2, failed=1)
    assert "unavailable: the abacus is not installed" in found.stdout.str()


def test_errors_fail(pytester):
    program(pytester, "[miniatures.Raises]")
    found = run(pytester)
    found.assert_outcomes(passed=2, failed=1)
    assert "ValueError: this mask" in found.stdout.str()


# Known deviations


def test_a_known_deviation_is_expected(pytester):
    program(pytester, "miniatures.Inverted", NARROW + ", known={'mask/shared': 'issue 12'}")
    found = run(pytester, "-rx")
    found.assert_outcomes(passed=2, xfailed=1)
    assert "known: issue 12" in found.stdout.str()


def test_a_known_deviation_that_is_mended_fails(pytester):
    program(pytester, "miniatures.Correct", NARROW + ", known={'mask/shared': 'issue 12'}")
    found = run(pytester)
    found.assert_outcomes(passed=2, failed=1)
    assert "known to deviate (issue 12), and does not: remove it from known=" in found.stdout.str()


def test_a_known_deviation_that_is_not_verified_is_no_mended_one(pytester):
    known = {"mask/shared": "issue 12"}
    program(pytester, "miniatures.Refuses", f"{NARROW}, known={known}")
    run(pytester).assert_outcomes(skipped=2, failed=1)
    with pytest.raises(AssertionError, match="nothing was verified"):
        assert_conforms(miniatures.Refuses, **ONE, known=known)


def test_known_needs_a_reason_and_a_check():
    with pytest.raises(ConformanceError, match="no reason"):
        parametrize_with_checks(miniatures.Correct, known={"plain/no-mask/self": " "})
    with pytest.raises(UnknownName, match="plain/no-musk"):
        parametrize_with_checks(miniatures.Correct, known={"plain/no-musk/self": "issue 12"})


# One call


ONE = {"cases": "mask/shared/self", "dtypes": "float32"}


@attention_function("numpy", miniatures.MASK)
def decorated(query, key, value, mask=None):
    return miniatures.attention(query, key, value, mask)[0]


@pytest.mark.parametrize(
    "given", [miniatures.Correct, miniatures.Correct(), decorated, f"{miniatures.__file__}:Correct"]
)
def test_assert_conforms_takes_what_people_have(given):
    assert_conforms(given, **ONE)


def test_assert_conforms_tells_how_many_why_and_the_first_in_full():
    with pytest.raises(AssertionError) as raised:
        assert_conforms(miniatures.Inverted, cases="mask/*/self", dtypes="float32")
    first, cause, *others = str(raised.value).splitlines()
    assert re.fullmatch(r"Inverted: \d+ of \d+ checks fail", first)
    assert re.fullmatch(r"  \d+: equals the answer with the mask inverted", cause)
    told = "\n".join(others)
    assert told.count("σ, allowed 8σ") >= 2
    assert re.search(r"again: mha-conformance run \S*miniatures.py:Inverted --case mask/", told)
    assert re.search(r"and \d+ more:\n  Inverted:mask/\S+:float32", told)


def test_assert_conforms_verifies_something():
    with pytest.raises(AssertionError, match="nothing was verified"):
        assert_conforms(miniatures.Refuses, **ONE)


def test_known_deviations_of_one_call():
    assert_conforms(miniatures.Inverted, **ONE, known={"mask/shared": "issue 12"})
    with pytest.raises(AssertionError, match="does not: remove it"):
        assert_conforms(miniatures.Correct, **ONE, known={"mask/shared": "issue 12"})


def test_what_is_only_wrong_after_other_calls_is_told_so():
    class Tires(miniatures.Correct):
        """Right for the two calls that a function gets for an item."""

        def __init__(self):
            self.calls = 0

        def attend(self, query, key, value, masks, **options):
            self.calls += 1
            context, weights = super().attend(query, key, value, masks, **options)
            return context * query.dtype.type(1 if self.calls < 3 else 2), weights

    with pytest.raises(AssertionError) as raised:
        assert_conforms(Tires, cases="mask/shared", dtypes="float32")
    told = str(raised.value)
    assert "; only after other calls" in told
    assert "run alone, a fresh instance conforms" in told
    assert "run what comes before it too" in told
    with pytest.raises(AssertionError) as raised:
        assert_conforms(miniatures.Inverted, cases="mask/shared", dtypes="float32")
    assert "only after other calls" not in str(raised.value)


def test_what_is_no_implementation_is_told():
    with pytest.raises(NotAnAdapter, match="derive from"):
        assert_conforms(int, **ONE)
    with pytest.raises(UnknownName, match="did you mean torch-mha"):
        assert_conforms("torch-mah", **ONE)
    with pytest.raises(UnknownName, match="unknown level 'cor'; did you mean core"):
        assert_conforms(miniatures.Correct, level="cor")
    with pytest.raises(UnknownName, match="unknown case"):
        assert_conforms(miniatures.Correct, cases="plain/musk")
    with pytest.raises(ConformanceError, match="two implementations are called 'Correct'"):
        parametrize_with_checks([miniatures.Correct, miniatures.Correct])


def test_nothing_to_check_is_an_error():
    class Nothing(miniatures.Correct):
        scores = ()

    with pytest.raises(ConformanceError, match="Nothing: nothing to check"):
        parametrize_with_checks(Nothing)


# Levels


def test_core_has_cases_of_the_catalogue_for_every_must():
    cases = {case.id: case for case in catalogue()}
    core = [case for case in cases.values() if case.core]
    asked = {item.id for item in REQUIREMENTS for case in core if item.serves(case)}
    of_cases = {item.id for item in REQUIREMENTS if any(map(item.serves, cases.values()))}
    must = {item.id for item in REQUIREMENTS if item.level == "must"} & of_cases
    assert must <= asked


def test_levels_differ_in_dtypes_and_experiments(pytester):
    program(pytester, "miniatures.Correct", "level='core'")
    core = [line for line in run(pytester, "--collect-only", "-q").outlines if "::" in line]
    program(pytester, "miniatures.Correct", "level='full'")
    full = [line for line in run(pytester, "--collect-only", "-q").outlines if "::" in line]
    assert len(core) < len(full) / 3
    assert not [line for line in core if "probe/" in line or "float64" in line]
    assert [line for line in full if "probe/masks" in line]
    assert [line for line in full if "float64" in line]


def test_core_notices_a_mistake_in_one_mode():
    class Moody(miniatures.Correct):
        modes = (Mode("train"), Mode("eval"))

        def attend(self, query, key, value, masks, mode, **options):
            context, weights = super().attend(query, key, value, masks, **options)
            return (context * np.float32(1.0 if mode.name == "train" else 1.01)).astype(
                query.dtype
            ), weights

    with pytest.raises(AssertionError, match=r"is 1\.01 times what it should be"):
        assert_conforms(Moody, dtypes="float32")
