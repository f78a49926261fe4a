"""The expected answer of a correct implementation: the reference, and the noise σ per element.

σ combines the spread of the noisy evaluations (half the variance of the element and half the mean
variance of its row, because few samples estimate a single element badly) with the final rounding
to the problem's dtype, u·|x|/√3. In float64, σ is √2 times as large, because the reference is
rounded to float64 too. An element that is 0 in all evaluations, such as the weight of a blocked
key, has σ = 0: it must be exact.

The sums of the rows of weights have a σ of their own: errors that all weights of a row have in
common, such as that of their normaliser, do not average out in the sum.

An element conforms to an accuracy class if its error is at most LIMIT times the σ of that class, or
at most the underflow of the dtype.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from conformance.definition import features
from conformance.definition.arithmetic import (
    AROUND_A_FUNCTION,
    CLASSES,
    AccuracyClass,
    Amplified,
    Exact,
    Noisy,
    classes_of,
    is_identity,
)
from conformance.definition.attention import backward, forward
from conformance.definition.dtypes import Array
from conformance.definition.problem import ARRAY_NAMES, Answer, Problem
from conformance.definition.statistics import STATISTICS

ROW_SUMS = "row sums"
"""The name of the sums of the weights of each query, `[batch heads query]`, in an expectation."""

IN_FLOAT32 = {item.name for item in CLASSES if not item.logits}
"""The accuracy classes that hold statistics in float32."""

MOST_ELEMENTS = 2**20
"""The most logits, over several samples, to compute at once: larger arrays do not fit in caches."""

LARGE = 1_200_000
"""A problem counts as large if it has this many products in its logits, or a sixteenth as many
elements in its projected queries and keys. Its noise is amplified, so that samples take less
time."""

LARGE_SAMPLES = 10
HALF_SAMPLES = 6
FEWER_LARGE_SAMPLES = 3
"""The numbers of samples of large problems.

`LARGE_SAMPLES` is for float32 and float64. In half precision, `HALF_SAMPLES` is for the classes
that decide verdicts, where the final rounding is a large part of the noise, and
`FEWER_LARGE_SAMPLES` is for the other classes.

With 6 samples in float32, 2 of 3,400 arrays of correct algorithms had an element beyond 8σ.
"""

CAREFUL = 8
"""How many times more samples are used to estimate σ again before a small deviation is reported.

With 10 samples, the smallest of 66,048 σ of a value gradient was 0.45 of its careful estimate.
"""

MOST_CAREFUL = 64
"""The same for arrays that are doubtful still, where a log-normaliser is stored in the dtype.

Its error is an exponent, so that a few samples have most of the noise: with logits near -300 in
bfloat16, 96 samples gave 0.74 of the σ of 768.
"""

HEAVY = 0.5
"""The error of a log-normaliser from which on the noise of its exponential has heavy tails."""


@dataclass(frozen=True, eq=False)
class Expectation:
    """The reference answer with its noise.

    Attributes:
        arrays: "output", "weights", `ROW_SUMS`, "gradient.query", ... in float64. If the problem
            has a loss on the log-sum-exp, they include the `STATISTICS`.
        noise: σ of each element, by accuracy class and then by array name. Classes are ordered
            from the most accurate to the least.
        underflow: the absolute error that underflow causes in any element of the dtype.
        promised: the accuracy class that the implementation promises; "" for the least accurate.
        careful: a function that returns the same expectation with σ estimated from more samples. It
            returns None if no better estimate is available.
    """

    arrays: Mapping[str, Array]
    noise: Mapping[str, Mapping[str, Array]]
    underflow: float
    promised: str = ""
    careful: Callable[[], Expectation | None] = field(default=lambda: None, compare=False)

    @property
    def sigma(self) -> Mapping[str, Array]:
        """The σ that separates conforming from deviating: that of the promised accuracy class.

        If no class is promised, it is that of the least accurate class.
        """
        return self.noise[self.promised or list(self.noise)[-1]]

    def at_accuracy(self, promised: str) -> Expectation:
        """Return a copy whose `sigma` is that of the accuracy class `promised`.

        If `promised` is "" or a class that the dtype does not have, the least accurate class is
        used. float32 and float64 have only one class, by which every answer is judged.
        """
        return replace(self, promised=promised if promised in self.noise else "")


def solve(problem: Problem, *, gradients: bool = True) -> Answer:
    """Return the reference answer in float64: output, attention weights and, if wanted, gradients.

    Args:
        problem: the problem.
        gradients: whether all gradients are included.
    """
    return _solved(problem, Exact(), gradients)


def _solved(problem: Problem, hold: Exact, gradients: bool) -> Answer:
    results = forward(problem, hold)
    every = backward(problem, results, hold) if gradients else {}
    asked = () if problem.log_sum_exp_cotangent is None else STATISTICS.values()
    statistics = {entry.name: entry.of(problem, results) for entry in asked}
    return Answer(results.output, results.weights, every, statistics=statistics)


def _with_sums(answer: Answer, weights: bool) -> dict[str, Array]:
    """Return all arrays of an answer and, if wanted, its weights and the sums of their rows."""
    more = dict(answer.statistics)
    if not weights:
        return replace(answer, weights=None).arrays() | more
    assert answer.weights is not None
    sums = np.einsum("...k->...", answer.weights)
    first = {"output": answer.output, "weights": answer.weights, ROW_SUMS: sums}
    return first | answer.arrays() | more


def expect(
    problem: Problem,
    times: int = 1,
    samples: int | None = None,
    *,
    gradients: bool = True,
    weights: bool = True,
    promised: str = "",
    classes: Sequence[AccuracyClass] = (),
) -> Expectation:
    """Return the reference answer of a problem with the noise of each accuracy class.

    The function `careful` of the result returns None.

    Args:
        problem: the problem.
        times: how often the noisy evaluations are repeated. Searching millions of elements for an
            outlier needs a better estimate of σ than checking a thousand.
        samples: the number of noisy evaluations of each class, such as a small one for a rough
            estimate; None for the usual numbers.
        gradients: whether gradients are included, which take two thirds of the time. The output and
            the weights do not depend on this.
        weights: whether the weights and the sums of their rows are included.
        promised: the accuracy class by which answers are judged, see `Expectation.at_accuracy`.
        classes: the accuracy classes; () for those to compare with, see `classes_of`.
    """
    classes = tuple(classes) or classes_of(problem.format, promised)
    solved = solve(problem, gradients=gradients)
    exact = _with_sums(solved, weights)
    squares: dict[str, dict[str, Array]] = {}
    for repetition in range(times):
        for accuracy, arrays in _squares(
            problem, solved, exact, _seed(problem) + repetition, samples, classes
        ).items():
            summed = squares.setdefault(accuracy, {})
            for name, square in arrays.items():
                summed[name] = summed[name] + square if name in summed else square
    noise: dict[str, dict[str, Array]] = {name: {} for name in squares}
    for name, values in exact.items():
        for accuracy, arrays in squares.items():
            # What holds its statistics in float32 returns them in float32 too.
            wide = name in STATISTICS and accuracy in IN_FLOAT32
            stored = problem.format.accumulator if wide else problem.format.roundoff
            final = stored**2 / 3 * values**2
            square = arrays[name] / times if times > 1 else arrays[name]
            row = np.add.reduce(square, axis=-1, keepdims=True) / max(1, square.shape[-1])
            variance = (square + row) / 2 + final
            if name == ROW_SUMS:
                # The single weight of a row has no noise, but may be rounded once.
                variance = np.maximum(variance, problem.format.roundoff**2)
            if problem.dtype == "float64":
                # The reference has rounding errors of the same size as the implementation.
                variance *= 2
            variance[(square == 0) & (values == 0)] = 0.0
            sigma = np.sqrt(variance, out=variance)
            # float32 halves the size on disk; only float64 needs the range of its exponents.
            noise[accuracy][name] = sigma if problem.dtype == "float64" else _in_float32(sigma)
    return Expectation(exact, noise, problem.format.underflow).at_accuracy(promised)


def of_function(
    problem: Problem, times: int = 1, *, gradients: bool = True
) -> Mapping[str, Array] | None:
    """Return the σ of each element, by array name, for functions that promise class A0.

    A function cannot hold in float32 what it is given and returns. Return None if the dtype has
    only one class. The other arguments are those of `expect`.
    """
    if len(classes_of(problem.format)) == 1:
        return None
    (sigma,) = expect(
        problem, times, gradients=gradients, classes=(AROUND_A_FUNCTION,)
    ).noise.values()
    return sigma


def expect_carefully(
    problem: Problem, *, gradients: bool = True, promised: str = ""
) -> Expectation:
    """Return the expectation with σ from `CAREFUL` times the samples.

    In small problems, too, all elements of a row may share one error, such as that of a key's only
    logit. Its σ is then estimated from no more numbers than there are samples. The function
    `careful` of the result returns an estimate from `MOST_CAREFUL` times the samples if the least
    accurate class of half precision decides, and log-normalisers are so large that they need it.
    """
    found = expect(problem, CAREFUL, gradients=gradients, promised=promised)
    deciding = classes_of(problem.format)[-1]
    if promised or not deciding.accumulators:
        return found

    def careful() -> Expectation | None:
        exponents = problem.format.roundoff * np.abs(forward(problem, Exact()).log_total)
        if exponents.max(initial=0.0) < HEAVY:
            return None
        return expect(problem, MOST_CAREFUL, gradients=gradients, classes=(deciding,))

    return replace(found, careful=careful)


def _squares(
    problem: Problem,
    solved: Answer,
    exact: Mapping[str, Array],
    seed: int,
    number: int | None,
    classes: Sequence[AccuracyClass],
) -> dict[str, dict[str, Array]]:
    """Return the mean square over samples of each element's noise, by class and array name.

    `number` is how many samples each class has, or None for the usual numbers.
    """
    if _is_large(problem):
        return _squares_of_large(problem, solved, exact, seed, number, classes)
    noisy = Noisy(problem.format, seed, number, classes)
    squares: dict[str, dict[str, Array]] = {item.name: {} for item in noisy.classes}
    logits = math.prod(problem.shape.logits)
    at_once = max(1, MOST_ELEMENTS // max(1, logits))
    # The parts share a generator, so the noise of a part depends on the parts before it.
    gradients = _has_gradients(exact) or at_once < sum(noisy.counts)
    for part, members in noisy.parts(at_once):
        samples = _with_sums(_solved(problem, part, gradients), "weights" in exact)
        for name, values in exact.items():
            error = samples.pop(name) - values
            error *= error
            for accuracy, those in members.items():
                summed = np.add.reduce(error[those])
                squares[accuracy][name] = squares[accuracy].get(name, 0.0) + summed
    return {
        item.name: {name: each / count for name, each in squares[item.name].items()}
        for item, count in zip(noisy.classes, noisy.counts, strict=True)
    }


def _has_gradients(arrays: Mapping[str, Array]) -> bool:
    return any(name.startswith("gradient.") for name in arrays)


def _squares_of_large(
    problem: Problem,
    solved: Answer,
    exact: Mapping[str, Array],
    seed: int,
    number: int | None,
    classes: Sequence[AccuracyClass],
) -> dict[str, dict[str, Array]]:
    """Return the same as `_squares`, but computed with amplified noise and from fewer samples.

    Samples are computed one at a time, in float32 if possible.
    """
    reach = _reach(problem)
    assert solved.weights is not None
    wide = _wide(problem, solved.weights) if reach == 1 else np.float64
    arrays = {name: getattr(problem, name) for name in ARRAY_NAMES if name != "mask"}
    given = {name: a.astype(wide) for name, a in arrays.items() if a is not None}
    narrow = problem.with_weights(
        **{
            name: weight if is_identity(weight) else weight.astype(wide)
            for name, weight in problem.weights.named().items()
        }
    ).replace(**given, **features.rounded(problem, lambda array: array.astype(wide)))
    noisy = Amplified(problem.format, seed, wide, reach)
    gradients = _has_gradients(exact)
    found: dict[str, dict[str, Array]] = {}
    for item in classes:
        usual = HALF_SAMPLES if item.name in ("A", "C") else FEWER_LARGE_SAMPLES
        if len(classes) == 1 or item.operands:
            usual = LARGE_SAMPLES
        count = number or usual
        sums = {name: np.zeros(values.shape) for name, values in exact.items()}
        for sample in range(count):
            noisy.begin(item, sample, count)
            sample_of = _solved(narrow, noisy, gradients)
            for name, values in _with_sums(sample_of, "weights" in exact).items():
                error = values - exact[name]
                error *= error
                sums[name] += error
        scale = 1 / (count * noisy.factor**2)
        found[item.name] = {name: each * scale for name, each in sums.items()}
    return found


FAR = 256.0
"""The position up to which amplified noise of an angle is so small that its effect is linear."""


def _reach(problem: Problem) -> float:
    """Return the greatest position that a rotation uses, as a multiple of `FAR`, but at least 1."""
    if not any(entry.turns for entry in problem.entries):
        return 1.0
    sides = (problem.position_of_queries, problem.position_of_keys)
    return max(1.0, *(float(np.abs(side).max(initial=0)) / FAR for side in sides))


def _wide(problem: Problem, weights: Array) -> type[np.floating]:
    """Return the format for samples of a large problem: float32 if its range suffices, or float64.

    Squares and products of several numbers have to be within this range. In float64, those of the
    attention weights have to be too: a key's gradient may have nothing but a small weight.
    """
    if problem.dtype == "float64" and weights.min(where=weights > 0, initial=1.0) < 2.0**-63:
        return np.float64
    arrays = [getattr(problem, name) for name in ARRAY_NAMES if name != "mask"]
    arrays += [one for one in problem.weights.named().values() if not is_identity(one)]
    for array in arrays:
        size = np.abs(array[array != 0]) if array is not None else np.empty(0)
        if size.size and not (size.min() > 2.0**-24 and size.max() < 2.0**12):
            return np.float64
    return np.float32


def _is_large(problem: Problem) -> bool:
    shape = problem.shape
    tokens = shape.batch * shape.heads * (shape.query_length + shape.key_length)
    return max(math.prod(shape.logits), 16 * tokens) * shape.head_size >= LARGE


def _in_float32(sigma: Array) -> Array:
    """Return float64 values of σ rounded to float32, and clipped to the largest float32 number.

    Values too small for float32 become 0, but the error that underflow causes is larger anyway.
    """
    with np.errstate(under="ignore", over="ignore"):
        return np.minimum(sigma.astype(np.float32), np.finfo(np.float32).max).astype(np.float64)


def _seed(problem: Problem) -> int:
    """Return a seed that depends only on the queries and the dtype of a problem."""
    return zlib.crc32(problem.query.tobytes() + problem.dtype.encode())
