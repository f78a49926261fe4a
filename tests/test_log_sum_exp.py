"""The log-sum-exp beside the output: definition, declaration, merging, and its mutants."""

import itertools
import math

import numpy as np
import pytest
from looped import for_each
from mutants.log_sum_exp import MUTANTS, SOUND, Returning
from mutants.run import Examiner

from conformance import LogSumExp, attention_function, examine, merge
from conformance.cases.catalogue import find_cases
from conformance.causes.diagnose import explain
from conformance.definition.expectation import expect, solve
from conformance.definition.statistics import LOG_SUM_EXP
from conformance.errors import WrongDeclaration, WrongShape
from conformance.requirements import find_requirement
from conformance.requirements.examination import Examination

REQUIREMENTS = (
    "log-sum-exp.equals-definition",
    "log-sum-exp.of-no-keys",
    "log-sum-exp.merges-parts",
    "gradient.through-log-sum-exp",
)


def asked(name, dtype="float64"):
    """The problem of a case, with a loss on the log-sum-exp."""
    (case,) = find_cases(name)
    adapter = Returning()
    examination = Examination(adapter, case, dtype, "cpu", adapter.modes[0])
    problem, _ = examination.with_statistics(adapter.log_sum_exp)
    return problem


def log_sum_exp(problem):
    return solve(problem).statistics[LOG_SUM_EXP.name]


@pytest.mark.parametrize(
    "name",
    [
        "plain/no-mask/gqa",
        "mask/per-batch/gqa",
        "feature/sinks/mqa",
        "feature/soft-cap-with-sinks/cross",
        "feature/alibi/cross",
        "feature/norm-with-rotary/cross",
        "bias/in-full/cross",
    ],
)
def test_the_definition_is_what_autograd_makes_of_it(name):
    torch = pytest.importorskip("torch")
    cases = find_cases(f"{name.rsplit('/', 1)[0]}/*")
    problem = asked(next((case.id for case in cases if case.id == name), cases[0].id))
    if problem.rotary or problem.norm or problem.slopes is not None:
        # The log-sum-exp is a function of the logits, whatever these are made of.
        assert np.isfinite(log_sum_exp(problem)).all()
        return
    found, shape = solve(problem), problem.shape
    given = {name: torch.tensor(getattr(problem, name)) for name in shape.distinct_inputs()}
    for tensor in given.values():
        tensor.requires_grad_()
    query = given["query"]
    key = given.get("key", query)
    value = given.get("value", key)
    w = {name: torch.tensor(array) for name, array in problem.weights.named().items()}

    def heads(x, name):
        projected = torch.einsum("bqe,ehd->bhqd", x, w[name])
        return projected + w[f"{name}_bias"][:, None] if f"{name}_bias" in w else projected

    q, k, v = heads(query, "query"), heads(key, "key"), heads(value, "value")
    k, v = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    logits = problem.logit_scale * q @ k.mT
    if problem.soft_cap is not None:
        logits = problem.soft_cap * (logits / problem.soft_cap).tanh()
    if problem.attn_bias is not None:
        logits = logits + torch.tensor(problem.attn_bias)
    logits = logits.masked_fill(~torch.tensor(problem.allowed_in_full().copy()), -math.inf)
    if problem.sinks is not None:
        sinks = torch.tensor(problem.sinks)[None, :, None, None].expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sinks], -1)
    total = logits.logsumexp(-1)
    context = (logits - total[..., None]).exp()[..., : v.shape[2]] @ v
    output = torch.einsum("bhqd,hde->bqe", context, w["output"])
    loss = (output * torch.tensor(problem.cotangent)).sum()
    loss = loss + (total * torch.tensor(problem.log_sum_exp_cotangent)).sum()
    loss.backward()
    np.testing.assert_allclose(
        found.statistics[LOG_SUM_EXP.name], total.detach(), rtol=0, atol=1e-12
    )
    for name, tensor in given.items():
        wanted = tensor.grad.numpy()
        np.testing.assert_allclose(found.gradients[name], wanted, rtol=0, atol=1e-11)


def test_a_loss_on_it_adds_the_weights_to_the_gradient_of_the_logits():
    """∂L/∂s = P, by a difference quotient along the bias."""
    problem = asked("bias/in-full/cross").replace()
    problem = problem.replace(cotangent=np.zeros_like(problem.cotangent))
    step, direction = 1e-5, np.random.default_rng(1).standard_normal(problem.attn_bias.shape)

    def loss(sign):
        moved = problem.replace(attn_bias=problem.attn_bias + sign * step * direction)
        return (log_sum_exp(moved) * problem.log_sum_exp_cotangent).sum()

    slope = (loss(1) - loss(-1)) / (2 * step)
    got = (solve(problem).gradients["attn_bias"] * direction).sum()
    assert abs(got - slope) < 1e-7 * max(1, abs(slope))


def test_without_a_loss_on_it_nothing_changes():
    (case,) = find_cases("plain/no-mask/cross")
    problem = case.problem("float32")
    assert not solve(problem).statistics
    assert LOG_SUM_EXP.name not in expect(problem).arrays
    other = problem.replace(log_sum_exp_cotangent=np.zeros(problem.shape.logits[:-1]))
    assert other.digest() != problem.digest()
    assert np.array_equal(expect(problem).sigma["output"], expect(other).sigma["output"])


def test_what_holds_statistics_in_float32_returns_it_so():
    noise = expect(asked("plain/no-mask/cross", "bfloat16")).noise
    sizes = {name: np.sqrt((each[LOG_SUM_EXP.name] ** 2).mean()) for name, each in noise.items()}
    assert sizes["A0"] < 1e-5 < 1e-3 < sizes["A"] < sizes["B"] < sizes["C"]


def parts_of(rng, lengths, sink=None):
    q, k = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, sum(lengths), 4))
    v = rng.standard_normal((2, sum(lengths), 5))
    logits = q @ k.mT

    def attend(at, extra=None):
        s, values = logits[..., at], v[:, at]
        with np.errstate(divide="ignore"):
            peak = s.max(-1, initial=-50)[..., None]
            total = np.exp(s - peak).sum(-1)
            total = total if extra is None else total + np.exp(extra - peak[..., 0])
            weights = np.exp(s - peak) / np.where(total > 0, total, 1)[..., None]
            return weights @ values, peak[..., 0] + np.log(total)

    ends = np.cumsum([0, *lengths])
    cuts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    return [attend(c, sink if c is cuts[-1] else None) for c in cuts], attend(slice(None), sink)


@pytest.mark.parametrize("lengths", [(4, 4), (1, 7), (0, 5), (3, 2, 4), (6,)])
@pytest.mark.parametrize("sink", [None, 0.7])
def test_parts_merge_into_the_whole(lengths, sink):
    parts, (output, total) = parts_of(np.random.default_rng(len(lengths)), lengths, sink)
    got = merge(*parts)
    np.testing.assert_allclose(got[0], output, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got[1], total, rtol=0, atol=1e-14)


def test_rows_that_no_part_sees_are_zero():
    empty = np.ones((2, 3)), np.full(2, -np.inf)
    output, total = merge(empty, empty)
    assert (output == 0).all()
    assert np.isneginf(total).all()


@for_each(
    parts=[
        (),
        ((np.ones((2, 3)), np.ones(3)),),
        ((np.ones((2, 3)), np.ones(2)), (np.ones((3, 3)), np.ones(3))),
    ]
)
def test_parts_that_do_not_fit_are_refused(parts):
    with pytest.raises(WrongShape):
        merge(*parts)


@for_each(
    declared=[{"base": "10"}, {"axes": "batch query"}, {"axes": "batch heads query key"}],
)
def test_a_declaration_that_cannot_be_is_refused(declared):
    with pytest.raises(WrongDeclaration, match="LogSumExp"):
        LogSumExp(**declared)


def test_a_returned_array_is_read_as_declared():
    (case,) = find_cases("plain/no-mask/cross")
    shape = case.shape
    native = np.random.default_rng(0).standard_normal(shape.logits[:-1])
    laid = LogSumExp("query (batch heads)", base="2")
    given = native.transpose(2, 0, 1).reshape(shape.query_length, -1)
    np.testing.assert_allclose(laid.canonical(given, shape), native * math.log(2))
    np.testing.assert_array_equal(laid.cotangent(native), given * math.log(2))
    with pytest.raises(WrongShape, match="log-sum-exp"):
        laid.canonical(given.T, shape)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_attention_without_a_defect_conforms(dtype):
    adapter, seen = Returning(), set()
    for name in SOUND:
        (case,) = find_cases(name)
        examination = Examination(adapter, case, dtype, "cpu", adapter.modes[0])
        for wanted in map(find_requirement, REQUIREMENTS):
            finding = wanted.check(examination) if wanted.serves(case) else None
            if finding is not None:
                assert finding.verdict == "conforms", (name, finding)
                seen.add(wanted.id)
    gradients = dtype in ("float64", "float32")
    assert seen == {*REQUIREMENTS} - ({REQUIREMENTS[3]} if not gradients else set())


@pytest.mark.sample(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_dies_by_a_requirement_that_was_expected(mutant):
    outcome = Examiner().kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.by in mutant.killed_by


def test_a_function_may_declare_base_2_and_another_layout():
    """The declaration of a user, from his function to a verdict, and to his card."""
    pytest.importorskip("torch")

    @attention_function("torch", log_sum_exp=LogSumExp("batch query heads", base="2"))
    def mine(query, key, value):
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.softmax(-1) @ value, logits.logsumexp(-1).mT / math.log(2)

    @attention_function("torch", log_sum_exp=LogSumExp("batch query heads"))
    def natural(query, key, value):
        return mine._function(query, key, value)

    wanted = ["plain/no-mask/cross", "probe/log-sum-exp"]
    good, bad = (examine(each, cases=wanted, dtypes="float32") for each in (mine, natural))
    verdicts = [
        {row["requirement"]: row["verdict"] for row in outcome.findings} for outcome in (good, bad)
    ]
    assert [found["log-sum-exp.equals-definition"] for found in verdicts] == [
        "conforms",
        "deviates",
    ]
    assert {"natural", "in base 2"} & {row["value"] for row in good.card} == {"in base 2"}
    assert not all(row["agrees"] for row in bad.card)


CAUSES = {
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
}
"""The cause that is named for each mutant whose log-sum-exp is not the definition's."""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "mutant", [one for one in MUTANTS if one.name in CAUSES], ids=lambda it: it.name
)
def test_the_cause_is_named(mutant):
    (case,), adapter = find_cases(mutant.case), mutant.adapter()
    examination = Examination(adapter, case, "float32", "cpu", adapter.modes[0])
    finding = find_requirement(REQUIREMENTS[0]).check(examination)
    assert explain(finding, examination).cause.id == CAUSES[mutant.name]
