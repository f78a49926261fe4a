"""The largest logit beside the output: definition, declaration, and its mutants."""

import math

import numpy as np
import pytest
from looped import for_each
from mutants.log_sum_exp import Returning
from mutants.max_logit import MUTANTS, SOUND, TWINS, Largest
from mutants.run import Examiner

from conformance import LogSumExp, MaxLogit, attention_function, examine
from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases
from conformance.causes.diagnose import explain
from conformance.definition.expectation import expect, solve
from conformance.errors import ConformanceError, WrongDeclaration, WrongShape
from conformance.requirements import find_requirement
from conformance.requirements.examination import Examination

REQUIREMENTS = ("max-logit.equals-definition", "max-logit.of-no-keys")


def examined(adapter, name, dtype="float64"):
    (case,) = find_cases(name)
    return Examination(adapter, case, dtype, "cpu", adapter.modes[0])


def asked(name, dtype="float64", adapter=None):
    """The problem of a case with what is returned of each row, and what is expected."""
    adapter = adapter or Largest()
    return examined(adapter, name, dtype).with_statistics(adapter.max_logit)


@pytest.mark.parametrize("name", [*SOUND, "feature/alibi/self", "feature/norm-with-rotary/gqa"])
def test_the_definition_is_the_logit_of_the_largest_weight(name):
    """P_ij = exp(s_ij − L_i), so M_i = L_i + log max_j P_ij: the two are independent outputs."""
    problem, expected = asked(name)
    found = solve(problem)
    seen = problem.allowed_in_full().any(axis=-1)
    assert problem.sinks is None
    largest = np.log(found.weights.max(axis=-1)[seen])
    wanted = found.statistics["log_sum_exp"][seen] + largest
    np.testing.assert_allclose(found.statistics["max_logit"][seen], wanted, atol=1e-12)
    assert (found.statistics["max_logit"][~seen] == 0).all()
    np.testing.assert_array_equal(expected.arrays["max_logit"], found.statistics["max_logit"])


def test_a_sink_counts_where_it_is_declared_only():
    with_sink = Largest()
    with_sink.max_logit = MaxLogit(includes_sink=True)
    problem, expected = asked("feature/sinks/mqa", adapter=with_sink)
    _, without = asked("feature/sinks/mqa")
    counted = np.maximum(without.arrays["max_logit"], problem.sinks[:, None])
    np.testing.assert_array_equal(expected.arrays["max_logit"], counted)
    assert (counted != without.arrays["max_logit"]).any(), "no sink is above a row's maximum"


def test_what_holds_statistics_in_float32_returns_it_so():
    problem, _ = asked("plain/no-mask/cross", "bfloat16")
    noise = expect(problem).noise
    sizes = {name: np.sqrt((each["max_logit"] ** 2).mean()) for name, each in noise.items()}
    assert sizes["A0"] < 1e-5 < 1e-3 < sizes["A"] < sizes["B"] < sizes["C"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("twin", TWINS, ids=lambda it: it.__name__)
def test_an_attention_that_returns_it_as_declared_conforms(twin, dtype):
    adapter, seen = twin(), set()
    for name in SOUND:
        (case,) = find_cases(name)
        examination = examined(adapter, name, dtype)
        for wanted in map(find_requirement, REQUIREMENTS):
            finding = wanted.check(examination) if wanted.serves(case) else None
            if finding is not None:
                assert finding.verdict == "conforms", (name, finding)
                seen.add(wanted.id)
    assert seen == {*REQUIREMENTS}


@pytest.mark.sample(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_dies_by_a_requirement_that_was_expected(mutant):
    outcome = Examiner().kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.by in mutant.killed_by


CAUSES = {
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
}
"""The cause that is named for each mutant whose largest logit is not the definition's."""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "mutant", [one for one in MUTANTS if one.name in CAUSES], ids=lambda it: it.name
)
def test_the_cause_is_named(mutant):
    examination = examined(mutant.adapter(), mutant.case, "float32")
    finding = find_requirement(REQUIREMENTS[0]).check(examination)
    assert explain(finding, examination).cause.id == CAUSES[mutant.name]


def test_a_sink_that_is_said_to_count_and_does_not_is_named():
    adapter = Largest()
    adapter.max_logit = MaxLogit(includes_sink=True)
    examination = examined(adapter, "feature/sinks/mqa", "float32")
    finding = find_requirement(REQUIREMENTS[0]).check(examination)
    assert explain(finding, examination).cause.id == "largest.without-sink"


@for_each(declared=[{"base": "10"}, {"axes": "batch query"}, {"axes": "batch heads query key"}])
def test_a_declaration_that_cannot_be_is_refused(declared):
    with pytest.raises(WrongDeclaration, match="MaxLogit"):
        MaxLogit(**declared)


def test_a_returned_array_is_read_as_declared():
    (case,) = find_cases("plain/no-mask/cross")
    native = np.random.default_rng(0).standard_normal(case.shape.logits[:-1])
    laid = MaxLogit("query (batch heads)", base="2")
    given = native.transpose(2, 0, 1).reshape(case.shape.query_length, -1)
    np.testing.assert_allclose(laid.canonical(given, case.shape), native * math.log(2))
    with pytest.raises(WrongShape, match="largest logit"):
        laid.canonical(given.T, case.shape)


WRONG = {
    "another statistic": ({"max_logit": LogSumExp()}, "must be a conformance.MaxLogit or None"),
    "no declaration": ({"max_logit": "e"}, "must be a conformance.MaxLogit or None"),
    "both": ({"max_logit": MaxLogit(), "log_sum_exp": LogSumExp()}, "returns one of"),
    "no such mode": ({"max_logit": MaxLogit(modes=("max",))}, "max"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_contradicts_the_adapter_is_one_line(name, tmp_path):
    declared, told = WRONG[name]
    adapter = type("Wrong", (Returning,), {"log_sum_exp": None, **declared})
    with pytest.raises(ConformanceError, match=told) as raised:
        examine(adapter(), cases=["plain/no-mask/cross"], dtypes="float32")
    assert "\n" not in str(raised.value)


def test_a_function_may_declare_base_2_and_another_layout():
    """The declaration of a user, from his function to a verdict, and to his card."""
    pytest.importorskip("torch")

    @attention_function("torch", max_logit=MaxLogit("batch query heads", base="2"))
    def mine(query, key, value):
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.softmax(-1) @ value, logits.amax(-1).mT / math.log(2)

    @attention_function("torch", max_logit=MaxLogit("batch query heads"))
    def natural(query, key, value):
        return mine._function(query, key, value)

    wanted = ["plain/no-mask/cross", "probe/max-logit"]
    good, bad = (examine(each, cases=wanted, dtypes="float32") for each in (mine, natural))
    verdicts = [
        {row["requirement"]: row["verdict"] for row in outcome.findings} for outcome in (good, bad)
    ]
    assert [found[REQUIREMENTS[0]] for found in verdicts] == ["conforms", "deviates"]
    read = {row["subject"]: row["value"] for row in good.card}
    assert read["returned largest logit"] == "of the logits in base 2"
    assert all(row["agrees"] for row in good.card)
    assert not all(row["agrees"] for row in bad.card)


@pytest.mark.parametrize("twin", TWINS, ids=lambda it: it.__name__)
def test_the_experiment_reads_what_is_declared(twin):
    outcome = examine(twin(), cases=["probe/max-logit"], dtypes="float32")
    assert outcome.card
    assert all(row["agrees"] for row in outcome.card), outcome.card


READ = {
    "max-logit-before-scale": "of the products before the scale",
    "max-logit-in-base-2": "of the logits in base 2",
    "max-logit-of-absolute": "the largest absolute value",
    "max-logit-is-log-sum-exp": "the log-sum-exp",
    "max-logit-of-head": "the largest of all queries of a head",
    "max-logit-with-sink": "the sink counts",
    "max-logit-of-nothing-0": "0",
    "max-logit-of-nothing-nan": "NaN",
}
"""What the experiment reads off each mutant."""


@for_each(name=READ)
def test_the_experiment_reads_another_convention(name):
    (mutant,) = (one for one in MUTANTS if one.name == name)
    outcome = examine(mutant.adapter(), cases=["probe/max-logit"], dtypes="float32")
    assert READ[name] in {row["value"] for row in outcome.card if not row["agrees"]}, outcome.card


def test_flex_attention_says_that_it_returns_none_on_a_cpu():
    pytest.importorskip("torch.nn.attention.flex_attention")
    outcome = examine(
        "torch-flex", cases=["plain/no-mask/cross"], dtypes="float32", modes="max-scores"
    )
    (found,) = (row for row in outcome.findings if row["requirement"] == REQUIREMENTS[0])
    assert found["verdict"] == "unsupported"


@pytest.fixture
def flex(monkeypatch):
    """The adapter of FlexAttention, with its maximum on CPUs, too.

    Its implementation without a kernel, which other devices call as well, computes the maximum
    anywhere; a check before it refuses to return it on CPUs.
    """
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("the installed torch has no AuxRequest")
    checked = flex._apply_kernel_options

    def unchecked(query, key, value, return_lse, kernel_options, return_aux=None):
        options = checked(query, key, value, return_lse, kernel_options)
        options["OUTPUT_MAX"] = return_aux is not None and return_aux.max_scores
        return options

    monkeypatch.setattr(flex, "_apply_kernel_options", unchecked)
    adapter = load("torch-flex")
    (mode,) = (mode for mode in adapter.modes if mode.name == "max-scores")
    return adapter, mode


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_flex_attention_returns_what_its_adapter_declares(flex, dtype):
    adapter, mode = flex
    seen = set()
    for name in (*SOUND[:2], "bias/in-full/cross", "feature/soft-cap/cross", SOUND[-1]):
        (case,) = find_cases(name)
        examination = Examination(adapter, case, dtype, "cpu", mode)
        for wanted in map(find_requirement, REQUIREMENTS):
            finding = wanted.check(examination) if wanted.serves(case) else None
            if finding is not None:
                assert finding.verdict == "conforms", (name, finding)
                seen.add((name, wanted.id))
    assert len(seen) == 5, seen


def test_a_wrong_declaration_of_flex_attention_is_noticed(flex, monkeypatch):
    adapter, mode = flex
    monkeypatch.setattr(adapter, "max_logit", MaxLogit(base="2", modes=(mode.name,)))
    (case,) = find_cases("mask/per-batch/gqa")
    examination = Examination(adapter, case, "float32", "cpu", mode)
    finding = find_requirement(REQUIREMENTS[0]).check(examination)
    assert explain(finding, examination).cause.id == "largest.natural-taken-for-base-2"
