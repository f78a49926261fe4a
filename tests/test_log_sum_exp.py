"""The log-sum-exp beside the output: definition, declaration, merging, and its mutants."""

import itertools
import math

import numpy as np
import pytest
from looped import for_each
from mutants.log_sum_exp import MUTANTS, Returning

from conformance import examine, merge
from conformance.cases.catalogue import find_cases
from conformance.definition.expectation import expect, solve
from conformance.definition.statistics import LOG_SUM_EXP
from conformance.errors import WrongShape
from conformance.records.findings import Phrase
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


@pytest.mark.parametrize(
    ("mutant", "name", "cause"),
    [
        ("lse-detached", "plain/no-mask/gqa", Phrase("lse.gradient-dropped")),
        ("lse-gradient-negated", "plain/no-mask/gqa", Phrase("lse.gradient-negated")),
        (
            "lse-gradient-halved",
            "plain/no-mask/gqa",
            Phrase("lse.gradient-factor", {"factor": 0.5}),
        ),
        (
            "lse-gradient-of-sink-lost",
            "feature/sinks/mqa",
            Phrase("lse.gradient-dropped-in", {"arrays": [Phrase("array.sinks")]}),
        ),
    ],
)
def test_what_becomes_of_the_gradient_of_a_log_sum_exp_is_named(mutant, name, cause):
    adapter = next(it for it in MUTANTS if it.name == mutant).adapter()
    outcome = examine(adapter, cases=name, dtypes="float32")
    found = [one for result in outcome.results for one in result.findings]
    through = [one for one in found if one.requirement == "gradient.through-log-sum-exp"]
    assert {one.cause for one in through if one.verdict == "deviates"} == {cause}


def test_a_gradient_of_a_log_sum_exp_that_one_head_lacks_is_not_named():
    def partly(self, peak, total):
        found = Returning.returned(self, peak, total).clone()
        found[:, 0] = found[:, 0].detach()
        return found

    adapter = type("Partly", (Returning,), {"returned": partly})()
    outcome = examine(adapter, cases="plain/no-mask/gqa", dtypes="float32")
    found = [one for result in outcome.results for one in result.findings]
    (through,) = [one for one in found if one.requirement == "gradient.through-log-sum-exp"]
    assert through.verdict == "deviates"
    assert not through.cause
