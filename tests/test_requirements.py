"""Every requirement can fail: each has a mutant that it kills, and the originals survive."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("torch")

import by_requirement as mutants
from mutants import wrong_attentions

from conformance.adapters.ours import Ours
from conformance.cases.catalogue import catalogue
from conformance.experiments import EXPERIMENTS, experiment
from conformance.requirements import REQUIREMENTS
from conformance.running.session import Session, inquiries, plan

DTYPE = "float32"


def killed(adapter, wanted=None) -> Counter[str]:
    """Requirement to the number of cases in which the adapter deviates from it.

    With `wanted`, only cases that serve this requirement are examined.
    """
    adapter.name = type(adapter).__name__
    cases = catalogue()
    if wanted is not None:
        requirement = next(item for item in REQUIREMENTS if item.id == wanted)
        cases = [case for case in cases if requirement.serves(case) and case.family != "long"]
    session, found = Session(explains=False), Counter()
    for item in plan([adapter], cases, [DTYPE], "cpu"):
        for finding in session.examine(item).findings:
            assert finding.verdict != "error", (item.id, finding)
            found[finding.requirement] += finding.verdict == "deviates"
    return +found


def test_there_is_a_mutant_for_every_requirement():
    by_case, by_experiment = mutants.KILLS.keys(), mutants.KILLED_BY_EXPERIMENT.keys()
    assert by_case | by_experiment == {item.id for item in REQUIREMENTS}
    assert not by_case & by_experiment


@pytest.mark.parametrize("requirement", sorted(mutants.KILLS))
def test_requirement_kills_its_mutant(requirement):
    assert killed(mutants.KILLS[requirement](), requirement)[requirement]


def inquired(adapter, experiments=EXPERIMENTS) -> dict[str, set[str]]:
    """Requirement to the experiments in which the adapter deviates from it."""
    adapter.name = type(adapter).__name__
    session, found = Session(), {}
    for item in inquiries([adapter], experiments, "cpu"):
        result, _ = session.inquire(item)
        for finding in result.findings:
            assert finding.verdict != "error", (item.id, finding)
            if finding.verdict == "deviates":
                found.setdefault(finding.requirement, set()).add(item.experiment.name)
    return found


@pytest.mark.parametrize("requirement", sorted(mutants.KILLED_BY_EXPERIMENT))
def test_an_experiment_kills_the_mutant_of_a_requirement_that_no_case_serves(requirement):
    mutant, name = mutants.KILLED_BY_EXPERIMENT[requirement]
    assert not any(case_serves(requirement, case) for case in catalogue())
    assert inquired(mutant(), [experiment(name)]) == {requirement: {name}}


def case_serves(requirement, case):
    return next(item for item in REQUIREMENTS if item.id == requirement).serves(case)


@pytest.mark.parametrize("original", [mutants.Right, Ours])
def test_originals_survive_everything(original):
    assert not killed(original())
    assert not inquired(original())


@pytest.mark.parametrize("requirement", sorted(mutants.ALONE))
def test_some_mutants_die_by_one_requirement_alone(requirement):
    assert set(killed(mutants.ALONE[requirement]())) == {requirement}


def test_a_changed_input_is_noticed():
    assert killed(mutants.ChangesInput(), "call.leaves-inputs-unchanged")


def test_a_wrong_causal_flag_disagrees_with_the_mask():
    assert killed(mutants.CausalFlagOffByOne(), "mask.spellings-agree")["mask.spellings-agree"]


def test_an_ignored_mask_is_told_from_an_inverted_one():
    for mutant, seen in ((mutants.Ignored, "ignored"), (mutants.Inverted, "blocks")):
        adapter = mutant()
        adapter.name = mutant.__name__
        cases = [case for case in catalogue() if case.id == "plain/no-mask/cross"]
        (item,) = plan([adapter], cases, [DTYPE], "cpu")
        findings = {f.requirement: f for f in Session().examine(item).findings}
        finding = findings["mask.polarity-is-as-declared"]
        assert finding.verdict == "deviates"
        assert f"declared mask[bool] attends, observed {seen}" in finding.detail
        assert f"mask[bool]={seen}" in finding.value


OUTPUT = {
    "output.equals-definition",
    "gradient.inputs-equal-definition",
    "gradient.parameters-equal-definition",
    "weights.equal-definition",
}
MASKS = {
    "weights.blocked-are-zero",
    "mask.polarity-is-as-declared",
    "mask.blocked-key-has-no-influence",
}
# A row of which the inverted mask leaves nothing is NaN, and NaN does not sum to one. A softmax
# over the queries gives NaN for a key that nobody may attend, which is a blocked key that matters.
NAN = {"weights.rows-sum-to-one"}
QUERIES = {"weights.rows-sum-to-one", "weights.blocked-are-zero"} | {
    "mask.blocked-key-has-no-influence"
}


@pytest.mark.parametrize(
    ("name", "requirements", "cause"),
    [
        ("right", set(), None),
        ("polarity_flipped", OUTPUT | MASKS | NAN, "equals the answer with the mask inverted"),
        ("scale_by_d", OUTPUT, "equals the answer with scale 1/d instead of 1/sqrt(d)"),
        (
            "softmax_over_queries",
            OUTPUT | QUERIES,
            "equals the answer with the softmax over the queries",
        ),
        (
            "mask_added",
            OUTPUT | MASKS,
            "equals the answer with the mask added to the logits as 1 where it may attend",
        ),
    ],
)
def test_a_users_mistake_deviates_where_it_is_spoken_of(name, requirements, cause):
    adapter = getattr(wrong_attentions, name)
    adapter.name = name
    session, found, causes = Session(), set(), Counter()
    for item in plan([adapter], catalogue(), [DTYPE], "cpu"):
        for finding in session.examine(item).findings:
            if finding.verdict == "deviates":
                found.add(finding.requirement)
                if finding.requirement == "output.equals-definition":
                    causes[finding.cause] += 1
                    # Of an answer that is NaN throughout nobody can say how it came about.
                    assert finding.cause or finding.worst.got == "nan", item.id
    assert found == requirements
    assert set(causes) - {""} == ({cause} if cause else set())
