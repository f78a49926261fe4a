"""The largest logit beside the output: definition, declaration, and its mutants."""

import numpy as np
import pytest
from looped import for_each
from mutants.log_sum_exp import Returning
from mutants.max_logit import MUTANTS, SOUND, TWINS, Largest

from conformance import LogSumExp, MaxLogit, examine
from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases
from conformance.causes.diagnose import explain
from conformance.definition.expectation import solve
from conformance.errors import ConformanceError
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


def test_a_sink_that_is_said_to_count_and_does_not_is_named():
    adapter = Largest()
    adapter.max_logit = MaxLogit(includes_sink=True)
    examination = examined(adapter, "feature/sinks/mqa", "float32")
    finding = find_requirement(REQUIREMENTS[0]).check(examination)
    assert explain(finding, examination).cause.id == "largest.without-sink"


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


@pytest.mark.night
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
