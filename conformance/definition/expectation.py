"""The expected answer of a correct implementation: the reference, and the noise σ per element.

σ combines the spread of the noisy evaluations (regularised: half the element's own variance, half
that of its row, because few samples estimate one element badly), the final rounding to the
problem's dtype, u·|x|/√3, and the underflow. An element with no noise at all, such as the weight
of a blocked key, has σ = 0: it must be exact.

An answer conforms to an accuracy class if every element lies within LIMIT·σ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from conformance.definition.arithmetic import Exact, Noisy
from conformance.definition.attention import backward, forward
from conformance.definition.dtypes import Array
from conformance.definition.problem import Answer, Problem


@dataclass(frozen=True, eq=False)
class Expectation:
    """The reference answer with its noise.

    Attributes:
        arrays: "output", "weights", "gradient.query", ... in float64.
        noise: accuracy class, then array name, to σ of each element. Ordered from the most
            accurate class to the least; the last one decides whether an answer conforms.
        underflow: absolute error that no element of the dtype can avoid.
    """

    arrays: Mapping[str, Array]
    noise: Mapping[str, Mapping[str, Array]]
    underflow: float

    @property
    def loosest(self) -> Mapping[str, Array]:
        """The σ of the least accurate class, which separates conforming from deviating."""
        return list(self.noise.values())[-1]


def solve(problem: Problem) -> Answer:
    """Return the exact answer, as float64."""
    exact = Exact()
    found = forward(problem, exact)
    return Answer(found.output, found.weights, backward(problem, found, exact))


def expect(problem: Problem, times: int = 1) -> Expectation:
    """Return the exact answer and the noise of each accuracy class.

    `times` is how often the noisy evaluations are repeated: who looks for the one element of
    millions that stands out needs more samples than who looks at a thousand.
    """
    exact = solve(problem).arrays()
    squares: dict[str, dict[str, Array]] = {}
    for repetition in range(times):
        for accuracy, arrays in _squares(problem, exact, _seed(problem) + repetition).items():
            known = squares.setdefault(accuracy, {})
            for name, own in arrays.items():
                known[name] = known[name] + own if name in known else own
    noise: dict[str, dict[str, Array]] = {name: {} for name in squares}
    for name, values in exact.items():
        final = problem.format.roundoff**2 / 3 * values**2
        for accuracy, arrays in squares.items():
            own = arrays[name] / times if times > 1 else arrays[name]
            row = np.add.reduce(own, axis=-1, keepdims=True) / own.shape[-1]
            variance = (own + row) / 2 + final
            variance[(own == 0) & (values == 0)] = 0.0
            noise[accuracy][name] = np.sqrt(variance)
    return Expectation(exact, noise, problem.format.underflow)


def _squares(
    problem: Problem, exact: Mapping[str, Array], seed: int
) -> dict[str, dict[str, Array]]:
    """Return the mean squares of the noise of one noisy evaluation, by class and array."""
    noisy = Noisy(problem.format, seed)
    found = forward(problem, noisy)
    samples = Answer(found.output, found.weights, backward(problem, found, noisy)).arrays()
    squares: dict[str, dict[str, Array]] = {item.name: {} for item in noisy.classes}
    for name, values in exact.items():
        error = samples[name] - values
        error *= error
        start = 0
        for accuracy, count in zip(noisy.classes, noisy.counts, strict=True):
            squares[accuracy.name][name] = np.add.reduce(error[start : start + count]) / count
            start += count
    return squares


def _seed(problem: Problem) -> int:
    """Return a seed that is the same for the same problem on every machine."""
    return zlib.crc32(problem.query.tobytes() + problem.dtype.encode())
