"""σ of every element of an attention on given heads, for tests of one's own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from conformance.arrays.given import (
    MOST_LOGITS,
    Given,
    given_layout,
    readings,
    separate,
)
from conformance.definition.arithmetic import Exact, Noisy, classes_of
from conformance.definition.attention import forward
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect, expect_carefully
from conformance.definition.problem import Problem
from conformance.definition.statistics import RowStatistic
from conformance.errors import Ambiguous, BadArrays
from conformance.records.numbers import LIMIT
from conformance.words import say

MOST_AT_ONCE = 2**21
"""The most logits, over several samples, of which noisy evaluations are computed at once."""


@dataclass(frozen=True, eq=False)
class Noise:
    """What is expected of each array, and its noise.

    Attributes:
        dtype: the dtype whose rounding noise it is.
        expected: the expected arrays in float64, by name: "output", "weights" and, if gradients
            were asked for, "gradient.query", "gradient.key" and "gradient.value".
        sigma: σ of each element, by the same names.
        limit: the number of σ within which an element is right.
    """

    dtype: str
    expected: Mapping[str, Array]
    sigma: Mapping[str, Array]
    limit: float


def noise(query: Any, key: Any, value: Any, **told: Any) -> Noise:
    """Return the expected output of attention on these heads, and σ of each of its elements.

    The arrays have the layout of the query, except for the weights `[batch heads query key]`. The
    output is right if every element is within `limit` times its σ.

    Args:
        query: query heads, an array of NumPy or of another framework.
        key: key heads.
        value: value heads.
        told: the other arguments of `conformance.diagnose`.

    Raises:
        ConformanceError: if the arrays contradict each other, or their shapes leave open what they
            mean: then the layout, the meaning of a mask or the alignment has to be told.
    """
    found = readings(Given(query=query, key=key, value=value, output=None, **told))
    if len(found) > 1:
        said = "; or ".join(", ".join(say(it) for it in one.assumed) for one in found)
        raise Ambiguous(
            f"these arrays may be read in {len(found)} ways, {said}; tell layout=, mask_true= or "
            "the alignment of causal="
        )
    (reading,) = found
    expectation = expected(reading.problem, told.get("accuracy", ""), bool(told.get("gradients")))
    shape = reading.problem.shape
    heads = {"output": shape.heads, "gradient.query": shape.heads}
    heads |= {"gradient.key": shape.kv_heads, "gradient.value": shape.kv_heads}

    def shown(arrays: Mapping[str, Array]) -> dict[str, Array]:
        laid = {
            name: given_layout(separate(arrays[name], count), reading.layout)
            for name, count in heads.items()
            if name in arrays
        }
        return laid | {"weights": arrays["weights"]}

    return Noise(reading.problem.dtype, shown(expectation.arrays), shown(expectation.sigma), LIMIT)


def expected(problem: Problem, accuracy: str = "", gradients: bool = False) -> Expectation:
    """Return the expectation of a problem on heads, which can be estimated more carefully.

    Raises:
        BadArrays: if the problem is too large to be examined as a whole.
    """
    logits = math.prod(problem.shape.logits)
    if logits > MOST_LOGITS:
        raise BadArrays(
            f"{logits:,} attention weights are more than are examined as a whole, "
            f"{MOST_LOGITS:,}; pass fewer heads, batch entries or queries"
        )
    found = expect(problem, gradients=gradients, promised=accuracy)
    return replace(
        found,
        careful=lambda: expect_carefully(problem, gradients=gradients, promised=accuracy),
    )


def of_statistic(
    statistic: RowStatistic, problem: Problem, samples: int | None = None
) -> tuple[Array, Array]:
    """Return an expected statistic of rows `[batch heads query]`, and σ of each element.

    σ is that of the least accurate class of the dtype, of the same noisy evaluations as that of the
    other arrays. The statistic of a query that sees no key, and no sink that counts, is −∞.

    Args:
        statistic: the statistic.
        problem: the problem, on heads.
        samples: the number of noisy evaluations; None for the usual one.
    """
    problem = statistic.counted(problem)
    exact = statistic.of(problem, forward(problem, Exact()))
    noisy = Noisy(problem.format, 1, samples, classes_of(problem.format)[-1:])
    square, count = np.zeros_like(exact), 0
    most = max(1, MOST_AT_ONCE // max(1, math.prod(problem.shape.logits)))
    for part, _ in noisy.parts(most):
        found = statistic.of(problem, forward(problem, part))
        square += ((found - exact) ** 2).sum(axis=0)
        count += len(found)
    square /= count
    # The statistic itself is kept in float32 at least.
    kept = max(problem.format.accumulator, 2.0**-53) ** 2 / 3 * exact**2
    variance = (square + square.mean(axis=-1, keepdims=True)) / 2 + kept
    empty = ~problem.allowed_in_full().any(axis=-1)
    if problem.sinks is None:
        exact = np.where(empty, -np.inf, exact)
    return exact, np.sqrt(variance)
