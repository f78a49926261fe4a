"""Requirements that output, gradients and attention weights equal the definition's.

Other requirements are that the output and the input gradients have the dtype of the inputs, that
the returned weights of each query sum to one and are 0 for blocked keys, that the output is
made of these weights, and that a returned log-sum-exp or largest logit is the definition's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import einops
import numpy as np

from conformance.definition.comparison import accuracy_class, against, between, element
from conformance.definition.dtypes import Array
from conformance.definition.expectation import ROW_SUMS, Expectation
from conformance.definition.problem import Answer, Problem
from conformance.definition.statistics import LOG_SUM_EXP, MAX_LOGIT, RowStatistic
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.requirements.examination import Examination
from conformance.requirements.requirement import (
    Check,
    judge,
    requirement,
    returns,
)


def _judged(name: str, expectation: Expectation, arrays: dict[str, Array], said: str) -> Finding:
    """Return the finding on whether arrays equal those of an expectation.

    If every array fits, the finding names the most accurate class whose limit every element meets.
    `name` is the id of the requirement. `said` describes a deviation; in it, `{array}` stands for
    the name of the array.
    """
    comparisons = against(expectation, arrays)
    accuracy = ""
    if all(comparison.fits for comparison in comparisons):
        only, *others = expectation.noise
        accuracy = accuracy_class(expectation, arrays) if others else only
    return judge(name, comparisons, accuracy=accuracy, said=said)


def _gradients(name: str, ex: Examination, names: Sequence[str]) -> Finding | None:
    """Return the finding on whether the gradients of the arrays `names` equal the definition's.

    A missing gradient is a deviation. `name` is the id of the requirement. Return None if the mode
    has no gradients or `names` is empty. Raise `Unsupported` if the implementation has no gradients
    in any mode.
    """
    if not ex.mode.gradients or not names:
        return None
    gradients = ex.answer.gradients
    if not ex.adapter.has_gradients:
        raise Unsupported("no gradients")
    missing = [f"gradient.{array}" for array in names if array not in gradients]
    if missing:
        return Finding(name, "deviates", detail=f"there is no {', '.join(missing)}")
    arrays = {f"gradient.{array}": gradients[array] for array in names}
    return _judged(name, ex.expectation, arrays, "{array} is not the definition's")


@requirement(
    "output.equals-definition",
    "The output is that of the definition, element by element, within rounding noise.",
    why="Everything else is worth nothing if a port computes something else.",
    every_case=True,
    of_answer=True,
)
def output(ex: Examination) -> Finding:
    """Compare every element of the output with the float64 reference. The differences must be
    within limits that follow from the rounding noise of a correct implementation in this dtype."""
    arrays = {"output": ex.answer.output}
    return _judged(output.id, ex.expectation, arrays, "the output is not the definition's")


@requirement(
    "gradient.inputs-equal-definition",
    "The gradients of query, key and value are those of the definition.",
    why="A wrong gradient does not show in inference; training just gets worse.",
    every_case=True,
    of_answer=True,
    revision=2,
)
def inputs(ex: Examination) -> Finding | None:
    """Compare every element of the gradients of query, key and value with the float64 reference.
    Inputs that are the same array, as in self-attention, have a single gradient."""
    return _gradients(inputs.id, ex, ex.problem.shape.distinct_inputs())


@requirement(
    "gradient.parameters-equal-definition",
    "The gradients of all weights and biases are those of the definition.",
    why="A parameter that is detached, doubled or transposed in the backward pass trains wrongly.",
    every_case=True,
    of_answer=True,
    revision=2,
)
def parameters(ex: Examination) -> Finding | None:
    """Compare the gradients of all weights and biases with the float64 reference. They are
    converted to the suite's weight layout first, and compared element by element."""
    names = [f"weights.{name}" for name in ex.problem.shape.weight_shapes()]
    return _gradients(parameters.id, ex, names)


@requirement(
    "gradient.bias-equals-definition",
    "The gradient of the additive bias is that of the definition, 0 where it is blocked.",
    why="Learned relative positions train through it; several kernels drop it silently.",
    every_case=True,
    of_answer=True,
    revision=2,
)
def bias(ex: Examination) -> Finding | None:
    """Compare every element of the gradient of the additive bias with the float64 reference. Both
    gradients are summed over the axes along which the bias is broadcast."""
    return _gradients(bias.id, ex, [] if ex.problem.attn_bias is None else ["attn_bias"])


@requirement(
    "gradient.features-equal-definition",
    "The gradients of sinks and of the weights of query/key norms are those of the definition.",
    why="A test with sinks of 0 does not see that a sink is dropped; training then never moves it.",
    cases=("feature/*",),
    of_answer=True,
)
def features(ex: Examination) -> Finding | None:
    """Compare the gradients of sinks and of query/key norm weights with the float64 reference."""
    return _gradients(features.id, ex, [*ex.problem.trained()])


@requirement(
    "kernel.equals-definition",
    "Given heads that are projected already, a function returns the definition's output and "
    "gradients.",
    why="The projections around a function round too, which would hide what the function loses.",
    every_case=True,
)
def kernel(ex: Examination) -> Finding | None:
    """Call the function on heads that are already projected, without the suite's projections. The
    heads are rounded to the dtype. Compare the output and the gradients of the heads and the bias
    with the definition for these heads, allowing only the rounding noise of the function. This
    check is skipped if the function already deviates with the projections, and for layers, which
    have their own projections. If calls are compiled, only one family of shapes is checked."""
    if not ex.adapter.projections_supplied or (ex.adapter.compiles and ex.case.family != "cross"):
        return None
    answer = {n: array for n, array in ex.answer.arrays().items() if n != "weights"}
    if not all(comparison.fits for comparison in against(ex.expectation, answer)):
        # That is a separate finding, which says whether the function or a projection caused it.
        return None
    returned = ex.kernel_answer.arrays()
    names = ("output", *(f"gradient.{name}" for name in ("query", "key", "value", "attn_bias")))
    arrays = {name: returned[name] for name in names if name in returned}
    return _judged(kernel.id, ex.kernel_expectation, arrays, "given the heads, {array} is off")


@requirement(
    "gradient.through-returned-weights",
    "A loss on the returned attention weights reaches query and key, as one on the output does.",
    cases=("mask/per-batch/cross",),
    why="Coverage losses, guided attention and distillation train through the weights; if these "
    "are detached, or made again without a graph, the loss is there and teaches nothing.",
)
def through_weights(ex: Examination) -> Finding | None:
    """Check the gradients of a loss on both the output and the returned attention weights. They are
    compared with those of the float64 reference. Gradients that already deviate for a loss on the
    output alone are left out. If calls are compiled, only one dtype is checked."""
    if not (ex.mode.weights and ex.mode.gradients and ex.adapter.has_gradients):
        return None
    if ex.answer.weights is None or ex.answer.weights.ndim == 3:
        raise Unsupported("returns no attention weights per head")
    if not ex.varies_arguments:
        return None
    random = ex.case.random("loss on weights")
    loss = ex.problem.format.round(random.standard_normal(ex.problem.shape.logits))
    both = ex.problem.replace(weights_cotangent=loss)
    said = "{array} is not that of a loss on the output and the returned weights"
    return _beside(through_weights.id, ex, both, "loss on weights", said)


@requirement(
    "log-sum-exp.equals-definition",
    "The returned log-sum-exp is that of the definition.",
    why="Parts of a text are merged by it, and backward passes make the weights from it.",
    every_case=True,
    of_answer=True,
    where=returns(LOG_SUM_EXP),
)
def log_sum_exp(ex: Examination) -> Finding | None:
    """Compare the log-sum-exp of every query that sees a key, converted to natural logarithms, with
    that of the float64 reference, up to rounding noise. A sink counts if the declaration says
    so."""
    return _as_defined(log_sum_exp.id, ex, LOG_SUM_EXP)


@requirement(
    "log-sum-exp.of-no-keys",
    "The log-sum-exp of a query that sees nothing is the declared number.",
    why="Merging gives a part without keys the weight exp(L): only −∞ gives it none, and 0 or +∞ "
    "gives it all.",
    cases=("edge/fully-masked-row/*", "feature/*lengths*/*", "causal/bottom-right/*"),
    of_answer=True,
    where=returns(LOG_SUM_EXP),
)
def of_no_keys(ex: Examination) -> Finding | None:
    """Look at the log-sum-exps of queries that see neither a key nor a sink that counts. Each must
    be exactly the number that the adapter declares."""
    return _as_declared(of_no_keys.id, ex, LOG_SUM_EXP)


@requirement(
    "gradient.through-log-sum-exp",
    "A loss on the log-sum-exp reaches query and key, as one on the output does.",
    why="Merged parts are trained through it: a gradient that stops there is too small, silently.",
    cases=("plain/no-mask/*", "mask/per-batch/*", "feature/sinks*/*", "feature/soft-cap*/*"),
    where=returns(LOG_SUM_EXP),
)
def through_log_sum_exp(ex: Examination) -> Finding | None:
    """Check the gradients of a loss on both the output and the log-sum-exp, in float32 and float64.
    They are compared with those of the float64 reference. Gradients that already deviate for a loss
    on the output alone are left out."""
    declared = ex.adapter.log_sum_exp_in(ex.mode)
    if declared is None or not (declared.differentiable and ex.mode.gradients):
        return None
    apart = ex.problem.sinks is not None and not declared.includes_sink
    if apart or not ex.varies_arguments or ex.dtype not in ("float32", "float64"):
        return None
    both, _ = ex.with_statistics(declared)
    said = "{array} is not that of a loss on the output and the log-sum-exp"
    return _beside(through_log_sum_exp.id, ex, both, "log-sum-exp", said)


@requirement(
    "max-logit.equals-definition",
    "The returned largest logit is that of the definition.",
    why="Training clips queries and keys by it: a maximum over masked keys clips what no query "
    "sees, and one of other logits clips too late.",
    every_case=True,
    of_answer=True,
    where=returns(MAX_LOGIT),
)
def max_logit(ex: Examination) -> Finding | None:
    """Compare the largest logit of every query that sees a key, converted to base e, with that of
    the float64 reference, up to rounding noise. The logits are those after scale, soft cap, ALiBi
    and bias, of the keys that the query sees. A sink counts only if the declaration says so."""
    return _as_defined(max_logit.id, ex, MAX_LOGIT)


@requirement(
    "max-logit.of-no-keys",
    "The largest logit of a query that sees nothing is the declared number.",
    why="Only −∞ is neutral in a further maximum: 0 hides that all other logits are negative, and "
    "NaN spreads.",
    cases=("edge/fully-masked-row/*", "feature/*lengths*/*", "causal/bottom-right/*"),
    of_answer=True,
    where=returns(MAX_LOGIT),
)
def max_of_no_keys(ex: Examination) -> Finding | None:
    """Look at the largest logits of queries that see neither a key nor a sink that counts. Each
    must be exactly the number that the adapter declares."""
    return _as_declared(max_of_no_keys.id, ex, MAX_LOGIT)


def _as_defined(name: str, ex: Examination, statistic: RowStatistic) -> Finding | None:
    """Return the finding on whether a statistic of queries that see a key is the definition's.

    `name` is the id of the requirement; the result is None if the statistic is not declared.
    """
    declared = ex.adapter.statistics_in(ex.mode).get(statistic.name)
    if declared is None:
        return None
    got = _returned(ex.answer, statistic)
    problem, expected = ex.with_statistics(declared)
    seen, want = problem.allowed_in_full().any(axis=-1), expected.arrays[statistic.name]
    compared = against(expected, {statistic.name: np.where(seen, got, want)})
    return judge(name, compared, said=f"the returned {statistic.title} is not the definition's")


def _as_declared(name: str, ex: Examination, statistic: RowStatistic) -> Finding | None:
    """Return the finding on whether a statistic of queries that see nothing is as declared.

    `name` is the id of the requirement; the result is None if no number is declared, or if every
    query sees a key or a sink that counts.
    """
    declared = ex.adapter.statistics_in(ex.mode).get(statistic.name)
    if declared is None or declared.of_no_keys is None:
        return None
    if ex.problem.sinks is not None and declared.includes_sink:
        return None
    empty = ~ex.problem.allowed_in_full().any(axis=-1)
    if not empty.any():
        return None
    got, want = _returned(ex.answer, statistic), declared.of_no_keys
    wrong = empty & ~(np.isnan(got) if math.isnan(want) else got == want)
    if not wrong.any():
        return Finding(name, "conforms")
    at = np.unravel_index(np.argmax(wrong), wrong.shape)
    worst = element(statistic.name, at, got[at], want, 0.0)
    detail = f"{got[at]:g} instead of {want:g} for {int(wrong.sum())} of {int(empty.sum())} rows"
    return Finding(name, "deviates", detail=detail, worst=worst)


def _returned(answer: Answer, statistic: RowStatistic) -> Array:
    if statistic.name not in answer.statistics:
        raise Unsupported(f"returns no {statistic.title}")
    return answer.statistics[statistic.name]


def _beside(name: str, ex: Examination, both: Problem, variant: str, said: str) -> Finding | None:
    """Return the finding on the gradients of a loss on the output and on something beside it.

    `both` is the problem with that loss, whose expectation is cached under `variant`; `name` is the
    id of the requirement, and `said` describes a deviation. Gradients that already deviate for a
    loss on the output alone are left out; if that leaves none, the result is None.
    """
    expected = ex.expected(variant, lambda: both)
    every = ex.ask(both).arrays()
    alone = {f"gradient.{name}": array for name, array in ex.answer.gradients.items()}
    compared = against(ex.expectation, alone)
    wrong = {each.figures.array for each in compared if not each.fits}
    if not alone.keys() & every.keys():
        raise Unsupported("no gradients")
    arrays = {name: every[name] for name in alone.keys() & every.keys() - wrong}
    return _judged(name, expected, arrays, said) if arrays else None


@requirement(
    "dtype.in-is-out",
    "Output and input gradients have the dtype of the inputs.",
    why="A silent float32 doubles the memory; a silent half precision loses the digits.",
    every_case=True,
    of_answer=True,
)
def dtype(ex: Examination) -> Finding:
    """Compare the dtypes of the output and of the input gradients with the dtype of the inputs.
    These are the dtypes of the native arrays, before the suite converts them to float64."""
    if not ex.answer.dtypes:
        raise Unsupported("the adapter does not say which dtypes it returned")
    names = ("output", "gradient.query", "gradient.key", "gradient.value")
    others = [
        f"{name} is {returned}"
        for name, returned in ex.answer.dtypes.items()
        if name in names and returned != ex.dtype
    ]
    if not others:
        return Finding(dtype.id, "conforms")
    return Finding(dtype.id, "deviates", f"inputs are {ex.dtype}, but {', '.join(others)}")


def _of_weights(check: Callable[[Examination, Array], Finding | None]) -> Check:
    """Return a check that calls `check` with the returned weights.

    The new check returns None in modes without weights, and raises `Unsupported` if the answer has
    no weights although the mode should return them.
    """

    @functools.wraps(check)
    def with_weights(ex: Examination) -> Finding | None:
        if not ex.mode.weights:
            return None
        if ex.answer.weights is None:
            raise Unsupported("returns no attention weights")
        return check(ex, ex.answer.weights)

    return with_weights


@requirement(
    "weights.equal-definition",
    "The returned attention weights are those of the definition.",
    why="People plot them, prune by them and distil from them.",
    every_case=True,
    of_answer=True,
)
@_of_weights
def equal(ex: Examination, weights: Array) -> Finding:
    """Compare every returned attention weight with the float64 reference, up to rounding noise.
    Weights averaged over heads are compared with the average of the reference over heads."""
    comparisons = against(ex.suited_expectation, {"weights": weights})
    said = "the returned attention weights are not the definition's"
    return judge(equal.id, comparisons, said=said)


@requirement(
    "weights.rows-sum-to-one",
    "Each row of the returned weights sums to one.",
    why="A softmax over the wrong axis, or weights after dropout, shows here first.",
    every_case=True,
    of_answer=True,
    revision=2,
)
@_of_weights
def sums(ex: Examination, weights: Array) -> Finding:
    """Sum the returned weights of each query over the keys. Each sum must be that of the reference
    up to rounding: 1, or less if a sink takes a part, and 0 for a query without keys. Errors that
    all weights of a row have in common, such as that of their normaliser, are part of the rounding
    noise of the sum."""
    compared = against(ex.suited_expectation, {ROW_SUMS: weights.sum(axis=-1)})
    return judge(sums.id, compared, said="rows of the returned weights do not sum to one")


@requirement(
    "weights.blocked-are-zero",
    "The returned weight of a blocked key is zero, exactly.",
    why="A weight of 1e-5 on padding is a mask that leaks.",
    every_case=True,
    of_answer=True,
)
@_of_weights
def blocked(ex: Examination, weights: Array) -> Finding | None:
    """Look for returned weights of blocked keys that are not exactly 0. Keys are blocked by the
    mask, the causal mask, or a window, lengths or segments. A weight that is too small for the
    format of the dtype counts as 0."""
    if ex.problem.allowed is None:
        return None
    forbidden = ex.problem.blocked_for(weights)
    with np.errstate(invalid="ignore"):
        wrong = forbidden & ~(np.abs(weights) <= ex.expectation.underflow)
    if not wrong.any():
        return Finding(blocked.id, "conforms")
    size = np.where(wrong, np.nan_to_num(np.abs(weights)), -1)
    at = np.unravel_index(np.argmax(size), wrong.shape)
    worst = element("weights", at, weights[at], 0.0, 0.0)
    detail = f"{int(wrong.sum())} of {int(forbidden.sum())} blocked weights are not zero"
    return Finding(blocked.id, "deviates", detail=detail, worst=worst)


@requirement(
    "weights.made-the-output",
    "The output is made of the returned weights: weights times values, projected.",
    why="Weights that were averaged, taken before the mask or after dropout explain nothing.",
    every_case=True,
    of_answer=True,
)
@_of_weights
def made_the_output(ex: Examination, weights: Array) -> Finding:
    """Compute the output from the returned weights, and compare it with the returned output. To do
    so, multiply the weights by the projected values, and apply the output projection. The two
    outputs must be equal up to rounding noise."""
    if weights.ndim == 3:
        raise Unsupported("weights averaged over heads say little about the output")
    problem, parameters = ex.problem, ex.problem.weights
    values = np.einsum("bke,ehd->bhkd", problem.value, parameters.value)
    if parameters.value_bias is not None:
        values = values + parameters.value_bias[:, None, :]
    values = np.repeat(values, problem.shape.group, axis=1)
    joined = einops.rearrange(weights @ values, "batch head query part -> batch query (head part)")
    output = joined @ einops.rearrange(parameters.output, "head part width -> (head part) width")
    if parameters.output_bias is not None:
        output = output + parameters.output_bias
    # Wrong weights may make this output larger than the expected one, and its noise grows with it.
    size = np.sqrt(np.mean(ex.expectation.arrays["output"] ** 2))
    finite = output[np.isfinite(output)]
    gain = max(1.0, np.sqrt(np.mean(finite**2)) / size) if finite.size and size > 0 else 1.0
    noise = gain * ex.expectation.sigma["output"]
    compared = between("output", ex.answer.output, output, noise, ex.expectation.underflow)
    said = "the output was not made of the returned weights"
    return judge(made_the_output.id, [compared], said=said)
