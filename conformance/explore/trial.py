"""Put one problem to an implementation, and list where the answer is not the definition's.

The rule is that of the gate: the requirements that look at one answer. But across millions of
elements, a correct one occasionally exceeds 8σ, because σ is estimated from few samples; so what
deviates is measured again, against a σ from eight times as many.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.cases.case import STORED, Case, StoredCase, rounded
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.expectation import expect
from conformance.definition.problem import Problem
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.records.findings import INFINITE, Finding
from conformance.records.numbers import LIMIT
from conformance.requirements import REQUIREMENTS
from conformance.requirements.examination import Examination, Raised

MADE_OF_OTHERS = frozenset({"weights.rows-sum-to-one", "weights.made-the-output"})
"""Requirements that compare an answer with itself: if they fail, others fail at some element."""

LOOKED_AT = tuple(
    item
    for item in REQUIREMENTS
    if item.every_case and item.of_answer and item.id not in MADE_OF_OTHERS
)
"""The requirements that a search checks: those that one answer decides."""

ORDER = ("float32", "float64", "bfloat16", "float16")
"""Dtypes in the order in which a reader prefers a reproduction."""

CAREFUL = 8
"""How many times more samples σ is estimated from before a deviation is reported."""

LARGEST_LOGIT = 130.0
"""Beyond this the rounding noise is too large to find anything; see docs/noise.md."""


@dataclass(frozen=True, eq=False)
class Trial:
    """A problem in its dtype, and the mode and device in which it is put."""

    problem: Problem
    mode: Mode
    device: str = "cpu"

    def case(self) -> StoredCase:
        """Return the problem as a case, which requirements can check."""
        return StoredCase(
            name=f"{STORED}/trial", family="drawn", why="drawn by a search", stored=self.problem
        )


@dataclass(frozen=True)
class Deviation:
    """One way in which an answer is wrong.

    Attributes:
        requirement: the id of the one that is not met.
        kind: "off", "not finite", "missing", "dtype", or the type of what was raised.
        array: "output", "weights", "gradient.query", ...; "" where no array came.
        index: the element that is furthest off.
        ratio: its error in units of σ.
        got, want, allowed: that element, the definition's, and how far they may lie apart.
        text: one sentence.
    """

    requirement: str
    kind: str
    array: str = ""
    index: tuple[int, ...] = ()
    ratio: float = INFINITE
    got: float = np.nan
    want: float = np.nan
    allowed: float = 0.0
    text: str = ""

    @property
    def nature(self) -> tuple[str, str, str]:
        """A key that is equal for two deviations of the same kind."""
        return (self.requirement, self.kind, self.array)

    def as_clear_as(self, other: Deviation) -> bool:
        """Return whether this is of the same kind as another, and not a marginal rest of it."""
        return self.nature == other.nature and self.ratio >= min(other.ratio, 100 * LIMIT)


def deviations(adapter: Adapter, trial: Trial) -> tuple[Deviation, ...]:
    """Return everything that is wrong with the answer, in the order of the requirements.

    Raises:
        Unsupported: the implementation cannot express the problem.
        Unavailable: its framework or the device is missing.
    """
    wrong = _asked(adapter, trial, trial.mode)
    if wrong and adapter.compiles and not trial.mode.optimised:
        # The suite compiles quickly; only what is wrong as users compile is the library's doing.
        again = _asked(adapter, trial, dataclasses.replace(trial.mode, optimised=True))
        natures = {item.nature for item in again}
        return tuple(item for item in wrong if item.nature in natures)
    return wrong


def _asked(adapter: Adapter, trial: Trial, mode: Mode) -> tuple[Deviation, ...]:
    case = trial.case()
    return examined(Examination(adapter, case, trial.problem.dtype, trial.device, mode))


def examined(examination: Examination) -> tuple[Deviation, ...]:
    """Return everything that is wrong with the answer to any case; raises as `deviations`."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            examination.adapter.check(examination.problem)
            _ = examination.answer
        except (Unsupported, Unavailable):
            raise
        except Raised as error:
            return (_raised(error.original, error.told),)
        except (ConformanceError, Exception) as error:
            # A wrong shape, or a mistake in the adapter's own check.
            return (_raised(error, " ".join(str(error).split())),)
        found = []
        for requirement in LOOKED_AT:
            if not requirement.serves(examination.case):
                continue
            try:
                finding = requirement.check(examination)
            except (Unsupported, Unavailable):
                continue
            except ConformanceError as error:
                return (_raised(error, str(error)),)
            if finding is not None and finding.verdict == "deviates":
                deviation = _deviation(finding, examination)
                if deviation is not None:
                    found.append(deviation)
    return tuple(found)


def worst(
    adapter: Adapter, case: Case, dtypes: Sequence[str], modes: Sequence[str], device: str
) -> tuple[tuple[Trial, Deviation] | None, int]:
    """Return the worst deviation over dtypes and modes, and how many answers there were."""
    best: tuple[Trial, Deviation] | None = None
    answered = 0
    for dtype in [d for d in ORDER if d in adapter.dtypes and (not dtypes or d in dtypes)]:
        for mode in adapter.modes:
            if (modes and mode.name not in modes) or (mode.dtypes and dtype not in mode.dtypes):
                continue
            try:
                wrong = examined(Examination(adapter, case, dtype, device, mode))
            except Unsupported:
                continue
            answered += 1
            if wrong and (best is None or wrong[0].ratio > best[1].ratio):
                best = Trial(case.problem(dtype), mode, device), wrong[0]
    return best, answered


def askable(problem: Problem) -> bool:
    """Return whether the definition settles the problem, and its noise has a useful size."""
    if not problem.allowed_in_full().any(axis=-1).all():
        return False
    arrays = (problem.query, problem.key, problem.value, *problem.weights.named().values())
    if not all(np.isfinite(array).all() for array in arrays):
        return False
    logits = forward(problem, Exact()).logits
    return bool(np.abs(logits).max() <= LARGEST_LOGIT)


def in_dtype(trial: Trial, dtype: str) -> Trial:
    """Return the trial with its numbers rounded to another dtype."""
    return Trial(rounded(trial.problem, dtype), trial.mode, trial.device)


def _raised(error: BaseException, text: str) -> Deviation:
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].name}" if frames else ""
    return Deviation("", type(error).__name__, place, text=text[:300])


def _deviation(finding: Finding, examination: Examination) -> Deviation | None:
    """Return the deviation of a finding, measured again; None if the careful σ allows it."""
    if finding.requirement == "dtype.in-is-out":
        return Deviation(finding.requirement, "dtype", text=finding.detail)
    expectation = examination.suited_expectation
    if finding.worst is None:
        # The whole array is missing: the element that should be largest represents it.
        array = finding.detail.removeprefix("there is no ").split(",")[0]
        if array not in expectation.arrays:
            return None
        largest = np.abs(expectation.arrays[array])
        index = tuple(int(i) for i in np.unravel_index(int(largest.argmax()), largest.shape))
        got, kind = math.nan, "missing"
    else:
        array, index = finding.worst.array, finding.worst.index
        got = float(examination.answer.arrays()[array][index])
        kind = "off" if math.isfinite(got) else "not finite"
    blocked = finding.requirement == "weights.blocked-are-zero"
    want = 0.0 if blocked else float(expectation.arrays[array][index])
    noise = 0.0 if blocked else _careful(examination, array, index)
    underflow = 0.0 if blocked else expectation.underflow
    allowed = LIMIT * noise + underflow
    error = abs(got - want)
    if error <= allowed:
        return None
    ratio = error / noise if noise > 0 and math.isfinite(error) else INFINITE
    ratio = min(ratio, INFINITE)
    return Deviation(
        finding.requirement, kind, array, index, ratio, got, want, allowed, finding.detail
    )


def _careful(examination: Examination, array: str, index: tuple[int, ...]) -> float:
    """Return σ of one element from more samples; never less than what the gate takes."""
    noise = expect(examination.problem, CAREFUL).loosest[array]
    known = examination.suited_expectation.loosest[array]
    if noise.ndim > known.ndim:
        own = np.sqrt((noise**2).sum(axis=1)) / noise.shape[1]
        return max(float(own[index]), float(known[index]))
    return max(float(noise[index]), float(known[index]))
