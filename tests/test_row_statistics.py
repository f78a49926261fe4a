"""What each query may return beside its output: the tests that all of `STATISTICS` share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from mutants import log_sum_exp, max_logit
from mutants.run import Examiner

from conformance import LogSumExp, MaxLogit, attention_function, examine
from conformance.cases.catalogue import find_cases
from conformance.causes.diagnose import explain
from conformance.definition.expectation import expect
from conformance.definition.statistics import STATISTICS
from conformance.errors import WrongDeclaration, WrongShape
from conformance.requirements import find_requirement
from conformance.requirements.examination import Examination


@dataclass(frozen=True)
class Returned:
    """What is known of one statistic.

    Attributes:
        declaration: the class by which an adapter declares it, as its attribute of the same name.
        twins: attentions that return it as they declare.
        sound: the cases in which they are asked.
        requirements: those that concern it; the first is that it equals the definition.
        of_gradients: those of them that ask for gradients.
        mutants: attentions that return another number.
        causes: the cause that is named for each mutant whose statistic is not the definition's.
        method: the method of a tensor of logits that computes it.
        in_base_2: what the experiment on it says if it is in base 2.
    """

    declaration: Any
    twins: tuple[Any, ...]
    sound: tuple[str, ...]
    requirements: tuple[str, ...]
    of_gradients: frozenset[str]
    mutants: list[Any]
    causes: dict[str, str]
    method: str
    in_base_2: str


RETURNED = {
    "log_sum_exp": Returned(
        LogSumExp,
        (log_sum_exp.Returning,),
        log_sum_exp.SOUND,
        (
            "log-sum-exp.equals-definition",
            "log-sum-exp.of-no-keys",
            "log-sum-exp.merges-parts",
            "gradient.through-log-sum-exp",
        ),
        frozenset({"gradient.through-log-sum-exp"}),
        log_sum_exp.MUTANTS,
        {
            "lse-in-base-2": "lse.base-2",
            "lse-converted-twice": "lse.natural-taken-for-base-2",
            "lse-negated": "lse.negated",
            "lse-without-maximum": "lse.without-maximum",
            "lse-maximum-only": "lse.maximum-only",
            "lse-of-the-mean": "lse.of-mean",
            "lse-before-scale": "lse.without-scale",
            "lse-before-cap": "lse.without-cap",
            "lse-before-bias": "lse.without-bias",
            "lse-before-mask": "lse.without-mask",
            "lse-without-sink": "lse.without-sink",
            "lse-sink-twice": "lse.sink-twice",
            "lse-of-first-head": "lse.of-first-head",
            "lse-of-first-entry": "lse.of-first-entry",
            "lse-in-bfloat16": "lse.rounded",
        },
        "logsumexp",
        "in base 2",
    ),
    "max_logit": Returned(
        MaxLogit,
        max_logit.TWINS,
        max_logit.SOUND,
        ("max-logit.equals-definition", "max-logit.of-no-keys"),
        frozenset(),
        max_logit.MUTANTS,
        {
            "max-logit-of-blocked-keys": "largest.without-mask",
            "max-logit-of-all-causal": "largest.without-mask",
            "max-logit-before-scale": "largest.without-scale",
            "max-logit-before-cap": "largest.without-cap",
            "max-logit-before-bias": "largest.without-bias",
            "max-logit-in-base-2": "largest.base-2",
            "max-logit-converted-twice": "largest.natural-taken-for-base-2",
            "max-logit-of-first-tile": "largest.of-first-keys",
            "max-logit-with-sink": "largest.with-sink",
            "max-logit-clamped-at-0": "largest.clamped",
            "max-logit-of-previous-query": "largest.of-previous-query",
            "max-logit-of-absolute": "largest.absolute",
            "max-logit-is-log-sum-exp": "largest.log-sum-exp",
            "max-logit-of-first-head": "largest.of-first-head",
            "max-logit-of-first-entry": "largest.of-first-entry",
            "max-logit-of-head": "largest.of-head",
            "max-logit-in-bfloat16": "largest.rounded",
        },
        "amax",
        "of the logits in base 2",
    ),
}


def of_each(attribute: str) -> list[Any]:
    """Each statistic with each of its twins or its mutants."""
    return [
        pytest.param(one, it, id=getattr(it, "name", "") or it.__name__)
        for one in RETURNED.values()
        for it in getattr(one, attribute)
    ]


def test_every_statistic_is_in_the_table():
    assert [*RETURNED] == [*STATISTICS]


@pytest.mark.parametrize("name", RETURNED)
def test_what_holds_statistics_in_float32_returns_it_so(name):
    adapter = RETURNED[name].twins[0]()
    (case,) = find_cases("plain/no-mask/cross")
    examination = Examination(adapter, case, "bfloat16", "cpu", adapter.modes[0])
    problem, _ = examination.with_statistics(getattr(adapter, name))
    noise = expect(problem).noise
    sizes = {accuracy: np.sqrt((each[name] ** 2).mean()) for accuracy, each in noise.items()}
    assert sizes["A0"] < 1e-5 < 1e-3 < sizes["A"] < sizes["B"] < sizes["C"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("one", "twin"), of_each("twins"))
def test_an_attention_that_returns_it_as_declared_conforms(one, twin, dtype):
    adapter, seen = twin(), set()
    for name in one.sound:
        (case,) = find_cases(name)
        examination = Examination(adapter, case, dtype, "cpu", adapter.modes[0])
        for wanted in map(find_requirement, one.requirements):
            finding = wanted.check(examination) if wanted.serves(case) else None
            if finding is not None:
                assert finding.verdict == "conforms", (name, finding)
                seen.add(wanted.id)
    half = dtype in ("bfloat16", "float16")
    assert seen == {*one.requirements} - (one.of_gradients if half else set())


@pytest.mark.sample(6)
@pytest.mark.parametrize(("one", "mutant"), of_each("mutants"))
def test_a_mutant_dies_by_a_requirement_that_was_expected(one, mutant):
    outcome = Examiner().kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.by in mutant.killed_by


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("one", "mutant"), [it for it in of_each("mutants") if it.id in it.values[0].causes]
)
def test_the_cause_is_named(one, mutant):
    (case,), adapter = find_cases(mutant.case), mutant.adapter()
    examination = Examination(adapter, case, "float32", "cpu", adapter.modes[0])
    finding = find_requirement(one.requirements[0]).check(examination)
    assert explain(finding, examination).cause.id == one.causes[mutant.name]


@pytest.mark.parametrize("one", RETURNED.values(), ids=RETURNED)
def test_a_declaration_that_cannot_be_is_refused(one):
    for declared in ({"base": "10"}, {"axes": "batch query"}, {"axes": "batch heads query key"}):
        with pytest.raises(WrongDeclaration, match=one.declaration.__name__):
            one.declaration(**declared)


@pytest.mark.parametrize("name", RETURNED)
def test_a_returned_array_is_read_as_declared(name):
    (case,) = find_cases("plain/no-mask/cross")
    native = np.random.default_rng(0).standard_normal(case.shape.logits[:-1])
    laid = RETURNED[name].declaration("query (batch heads)", base="2")
    given = native.transpose(2, 0, 1).reshape(case.shape.query_length, -1)
    np.testing.assert_allclose(laid.canonical(given, case.shape), native * math.log(2))
    with pytest.raises(WrongShape, match=STATISTICS[name].title):
        laid.canonical(given.T, case.shape)


@pytest.mark.parametrize("name", RETURNED)
def test_a_function_may_declare_base_2_and_another_layout(name):
    """The declaration of a user, from his function to a verdict, and to his card."""
    pytest.importorskip("torch")
    one = RETURNED[name]

    @attention_function("torch", **{name: one.declaration("batch query heads", base="2")})
    def mine(query, key, value):
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.softmax(-1) @ value, getattr(logits, one.method)(-1).mT / math.log(2)

    @attention_function("torch", **{name: one.declaration("batch query heads")})
    def natural(query, key, value):
        return mine._function(query, key, value)

    wanted = ["plain/no-mask/cross", f"probe/{STATISTICS[name].chapter}"]
    good, bad = (examine(each, cases=wanted, dtypes="float32") for each in (mine, natural))
    verdicts = [
        {row["requirement"]: row["verdict"] for row in outcome.findings} for outcome in (good, bad)
    ]
    assert [found[one.requirements[0]] for found in verdicts] == ["conforms", "deviates"]
    assert one.in_base_2 in {row["value"] for row in good.card}
    assert all(row["agrees"] for row in good.card)
    assert not all(row["agrees"] for row in bad.card)
