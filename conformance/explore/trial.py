"""Run an implementation on one problem, and list where its answer deviates from the definition.

An answer must meet those requirements of the gate that depend on a single answer (see `LOOKED_AT`).
Across millions of elements, however, a correct element occasionally exceeds 8σ, as σ is estimated
from few samples. Each small deviation is therefore measured again, with σ estimated from eight
times as many samples as in the gate.
"""

from __future__ import annotations

import dataclasses
import math
import traceback
import warnings
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.cases.case import Case, StoredCase
from conformance.definition.arithmetic import Exact
from conformance.definition.attention import forward
from conformance.definition.expectation import CAREFUL, Expectation, expect
from conformance.definition.problem import Problem
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.frameworks import LACKS
from conformance.records.findings import INFINITE, STORED, Finding
from conformance.records.numbers import LIMIT
from conformance.requirements import REQUIREMENTS
from conformance.requirements.examination import Examination, RaisedInside, Workbench

MADE_OF_OTHERS = frozenset({"weights.rows-sum-to-one", "weights.made-the-output"})
"""Requirements that a search leaves out, because they compare arrays of one answer with each other.

An answer that does not meet one of them does not meet a requirement on single elements either.
"""

OF_FEATURES = "gradient.features-equal-definition"
"""The requirement that a search checks if a problem has features whose arrays have gradients."""

LOOKED_AT = tuple(
    item
    for item in REQUIREMENTS
    if item.of_answer
    if (item.every_case and item.id not in MADE_OF_OTHERS) or item.id == OF_FEATURES
)
"""The requirements that a search checks.

They are those that a single answer decides and that hold for every case, except `MADE_OF_OTHERS`.
In addition, there is `OF_FEATURES`.
"""

ORDER = ("float32", "float64", "bfloat16", "float16")
"""The dtypes in the order of preference for a reproduction."""

BEYOND_DOUBT = 4
"""An error of more than this many times the limit is reported without estimating σ again."""

ROUGH = 3
"""The number of samples for the first estimate of σ, which takes most of the time of a search.

An answer within `SUSPECT` times the limit by this estimate counts as right.
"""
SUSPECT = 0.75

LARGEST_LOGIT = 130.0
"""The largest absolute value of a logit in problems that are tried.

With larger logits, rounding noise is too large to find anything; see docs/noise.md.
"""


@dataclass(frozen=True, eq=False)
class Trial:
    """A problem in its dtype, and the mode and device with which the implementation is called."""

    problem: Problem
    mode: Mode
    device: str = "cpu"

    def with_problem(self, problem: Problem) -> Trial:
        """Return a trial of another problem, in the same mode and on the same device."""
        return dataclasses.replace(self, problem=problem)

    def case(self) -> StoredCase:
        """Return the problem as a case, which requirements can check."""
        return StoredCase(
            name=f"{STORED}/trial", family="drawn", why="drawn by a search", stored=self.problem
        )


@dataclass(frozen=True)
class TrialDeviation:
    """One way in which an answer is wrong.

    Attributes:
        requirement: the id of the requirement that is not met; "" for an exception.
        kind: "off", "not finite", "missing", "dtype", or the type of the exception.
        array: "output", "weights", "gradient.query", ...; for an exception, the name of the
            function that raised it; "" if the deviation is in no particular array.
        index: the element with the largest error in units of σ or, in a missing array, with the
            largest expected absolute value; () if the deviation is not in an element.
        ratio: the error of that element in units of σ; `INFINITE` if the error is infinite or NaN,
            if σ is 0, or if the deviation is not in an element.
        allowed: the largest allowed error of that element; 0 if the deviation is not in an element.
        text: a sentence that describes the deviation.
    """

    requirement: str
    kind: str
    array: str = ""
    index: tuple[int, ...] = ()
    ratio: float = INFINITE
    allowed: float = 0.0
    text: str = ""

    @property
    def gradient_of(self) -> str:
        """The array whose gradient is wrong; "" if the deviation is not in a gradient."""
        return self.array.removeprefix("gradient.") if self.array.startswith("gradient.") else ""

    @property
    def finite_ratio(self) -> float | None:
        """The `ratio`, or None if that is `INFINITE`."""
        return self.ratio if self.ratio < INFINITE else None

    @property
    def nature(self) -> tuple[str, str, str]:
        """The requirement, `kind` and `array`, by which deviations are compared."""
        return (self.requirement, self.kind, self.array)

    def as_clear_as(self, other: TrialDeviation) -> bool:
        """Return whether this deviation has the nature of `other` and is no less clear.

        It is no less clear if its ratio is at least that of `other`, or at least 100 × `LIMIT`.
        """
        return self.nature == other.nature and self.ratio >= min(other.ratio, 100 * LIMIT)


def deviations(adapter: Adapter, trial: Trial) -> tuple[TrialDeviation, ...]:
    """Return the deviations of the answer to a trial, in the order of the requirements.

    If the implementation fails with an exception, that is the only deviation. If the adapter
    compiles without optimisation in the trial's mode, the problem is run again with optimisation,
    and deviations that do not recur (in requirement, kind and array) are left out.

    Raises:
        Unsupported: the adapter cannot express the problem.
        Unavailable: the framework or the device is missing.
    """
    case, dtype = trial.case(), trial.problem.dtype
    bench = Workbench(expect=_strict)
    look = Examination(adapter, case, dtype, trial.device, trial.mode, bench)
    wrong = examined(look, careful=False)
    if wrong and wrong[0].requirement:
        bench = Workbench(answers=bench.answers)
        wrong = examined(dataclasses.replace(look, bench=bench))
    if wrong and adapter.compiles and not trial.mode.optimised:
        # Report only what is also wrong when compiled with optimisation, as users do.
        mode = dataclasses.replace(trial.mode, optimised=True)
        again = examined(Examination(adapter, case, dtype, trial.device, mode))
        natures = {item.nature for item in again}
        return tuple(item for item in wrong if item.nature in natures)
    return wrong


def examined(examination: Examination, *, careful: bool = True) -> tuple[TrialDeviation, ...]:
    """Return the deviations of the answer to a case, in the order of the requirements.

    If the implementation or the adapter's `check` fails with an exception other than those below,
    that is the only deviation.

    Args:
        careful: whether to estimate σ again, from more samples, for each deviation that is not far
            beyond the limit; this takes as long as 30 rough estimates.

    Raises:
        Unsupported: the adapter cannot express the problem.
        Unavailable: the framework or the device is missing.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            examination.adapter.check(examination.problem)
            _ = examination.answer
        except (Unsupported, Unavailable):
            raise
        except RaisedInside as error:
            return (_raised(error.original, error.told),)
        except (ConformanceError, Exception) as error:
            # An array has a wrong shape, or the adapter's check has a bug.
            return (_raised(error, " ".join(str(error).split())),)
        wrong = []
        for requirement in LOOKED_AT:
            trained = requirement.id == OF_FEATURES and examination.problem.trained()
            if not trained and not requirement.serves(examination.case):
                continue
            try:
                finding = requirement.check(examination)
            except (Unsupported, Unavailable):
                continue
            except ConformanceError as error:
                return (_raised(error, str(error)),)
            if finding is not None and finding.verdict == "deviates":
                deviation = _deviation(finding, examination, careful=careful)
                wrong += [deviation] if deviation is not None else []
    return tuple(wrong)


def _strict(problem: Problem, *, gradients: bool = True, promised: str = "") -> Expectation:
    """Return an expectation that flags too much: its σ is only `SUSPECT` times a rough estimate."""
    rough = expect(problem, samples=ROUGH, gradients=gradients, promised=promised)
    noise = {
        name: {array: SUSPECT * sigma for array, sigma in sigmas.items()}
        for name, sigmas in rough.noise.items()
    }
    return dataclasses.replace(rough, noise=noise)


def ways(
    adapter: Adapter, dtypes: Collection[str] = (), modes: Collection[str] = ()
) -> list[tuple[str, Mode]]:
    """Return the pairs of dtype and mode that an adapter has, by dtype in `ORDER`, then by mode.

    Only the given dtypes and the modes with the given names are used; empty `dtypes` or `modes`
    stand for all of the adapter's. The result is [] if none fit together.
    """
    lacking = LACKS.get(adapter.framework, ())
    return [
        (dtype, mode)
        for dtype in ORDER
        if dtype in adapter.dtypes and dtype not in lacking and (not dtypes or dtype in dtypes)
        for mode in adapter.modes
        if (not modes or mode.name in modes) and mode.has(dtype)
    ]


def worst(
    adapter: Adapter, case: Case, dtypes: Collection[str], modes: Collection[str], device: str
) -> tuple[tuple[Trial, TrialDeviation] | None, int]:
    """Return the worst deviation over dtypes and modes, with its trial, and the number of answers.

    Only the first deviation in each dtype and mode is considered; the worst has the largest ratio.
    If there is no deviation, None takes the place of the trial and the deviation. A dtype and mode
    in which the case is unsupported give no answer.

    Raises:
        Unavailable: the framework or the device is missing.
    """
    best: tuple[Trial, TrialDeviation] | None = None
    answered = 0
    for dtype, mode in ways(adapter, dtypes, modes):
        try:
            wrong = examined(Examination(adapter, case, dtype, device, mode))
        except Unsupported:
            continue
        answered += 1
        if wrong and (best is None or wrong[0].ratio > best[1].ratio):
            best = Trial(case.problem(dtype), mode, device), wrong[0]
    return best, answered


def askable(problem: Problem) -> bool:
    """Return whether the problem has a defined answer whose noise is small enough to be useful.

    Every query must attend to some key, inputs and weights must be finite, and the absolute values
    of logits must not exceed `LARGEST_LOGIT`.
    """
    if not problem.allowed_in_full().any(axis=-1).all():
        return False
    arrays = (problem.query, problem.key, problem.value, *problem.weights.named().values())
    if not all(np.isfinite(array).all() for array in arrays):
        return False
    logits = forward(problem, Exact()).logits
    return bool(np.abs(logits).max() <= LARGEST_LOGIT)


def _raised(error: BaseException, text: str) -> TrialDeviation:
    frames = traceback.extract_tb(error.__traceback__)
    return TrialDeviation(
        "", type(error).__name__, frames[-1].name if frames else "", text=text[:300]
    )


def _deviation(
    finding: Finding, examination: Examination, *, careful: bool
) -> TrialDeviation | None:
    """Return the deviation that a finding describes, or None if its error is within the limit.

    Also return None for a missing array that the definition does not have.
    """
    if finding.requirement == "dtype.in-is-out":
        return TrialDeviation(finding.requirement, "dtype", text=finding.detail)
    expectation = examination.suited_expectation
    if finding.worst is None:
        # The whole array is missing: the element that should be largest represents it.
        array = finding.detail.removeprefix("there is no ").split(",")[0]
        if array not in expectation.arrays:
            return None
        sizes = np.abs(expectation.arrays[array])
        index = tuple(int(i) for i in np.unravel_index(int(sizes.argmax()), sizes.shape))
        got, kind = math.nan, "missing"
    else:
        array, index = finding.worst.array, finding.worst.index
        got = float(examination.answer.arrays()[array][index])
        kind = "off" if math.isfinite(got) else "not finite"
    want = noise = allowed = 0.0
    if finding.requirement != "weights.blocked-are-zero":
        want = float(expectation.arrays[array][index])
        noise = float(expectation.sigma[array][index])
        if careful and not abs(got - want) > BEYOND_DOUBT * LIMIT * noise:
            noise = _careful(examination, array, index)
        allowed = LIMIT * noise + expectation.underflow
    error = abs(got - want)
    if error <= allowed:
        return None
    ratio = min(error / noise, INFINITE) if noise > 0 and math.isfinite(error) else INFINITE
    return TrialDeviation(finding.requirement, kind, array, index, ratio, allowed, finding.detail)


def _careful(examination: Examination, array: str, index: tuple[int, ...]) -> float:
    """Return σ of an element, estimated from more samples, or its σ in `examination` if larger."""
    promised = examination.adapter.promised(examination.dtype)
    careful = expect(examination.problem, CAREFUL, promised=promised)
    noise = careful.sigma[array]
    gate = examination.suited_expectation.sigma[array]
    if noise.ndim > gate.ndim:
        # The implementation returns weights averaged over heads.
        noise = np.sqrt((noise**2).sum(axis=1)) / noise.shape[1]
    return max(float(noise[index]), float(gate[index]))
