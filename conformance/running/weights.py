"""Get the attention weights of one case from an implementation, with the reference beside them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.catalogue import find_cases
from conformance.definition.dtypes import dtype_of
from conformance.errors import ConformanceError, NothingToShow, UnknownName, Unsupported, WrongShape
from conformance.reports.figures.picture import Picture, Subject, picture
from conformance.requirements.examination import Examination, Raised


@dataclass(frozen=True)
class Question:
    """What is to be drawn, as the command line says it; an empty mode is the first with weights."""

    implementation: str
    case: str
    dtype: str = "float32"
    mode: str = ""
    device: str = "cpu"
    entry: str = ""
    """A number, "all", or "" for the entry that is furthest off."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A picture, with the adapter and the case that it is of."""

    picture: Picture
    adapter: Adapter
    case: Case


def ask(question: Question) -> Seen:
    """Put the case to the implementation.

    Raises:
        UnknownName: no such implementation, case, dtype or mode.
        ConformanceError: the case is not one but several, the entry is no number, or the
            implementation cannot be loaded.
        NothingToShow: it returns no weights, cannot express the case, or fails at it.
        Unavailable: its framework or the device is missing.
    """
    case, every, entry = one_case(question.case), question.entry == "all", None
    if question.entry and not every:
        if not question.entry.isdecimal():
            raise ConformanceError(f"--entry is {question.entry!r}; say a number, or all")
        entry = int(question.entry)
    dtype = dtype_of(question.dtype).name
    adapter = load(question.implementation)
    mode = _mode(adapter, question.mode, dtype)
    examination = Examination(adapter, case, dtype, question.device, mode)
    got = _weights(examination)
    expectation, problem = examination.suited_expectation, examination.problem
    note = "" if case.defined else "No definition settles this case; the reference has zeros here."
    drawn = picture(
        Subject(adapter.name, case.id, dtype, mode.name, question.device, note),
        got=got,
        want=expectation.arrays["weights"],
        noise=expectation.loosest["weights"],
        blocked=problem.blocked_for(got),
        underflow=problem.format.underflow,
        entry=entry,
        every=every,
    )
    return Seen(drawn, adapter, case)


def one_case(pattern: str) -> Case:
    """The case of this id or pattern; raises `UnknownName`, or names those that it finds."""
    cases = find_cases(pattern)
    if len(cases) > 1:
        found = ", ".join(case.id for case in cases[:12]) + ", ..." * (len(cases) > 12)
        raise ConformanceError(
            f"--case {pattern} finds {len(cases)} cases, and one is drawn at a time; say which: "
            f"{found}"
        )
    return cases[0]


def _mode(adapter: Adapter, wanted: str, dtype: str) -> Mode:
    """The mode of this name, or the first that returns weights."""
    known = {mode.name: mode for mode in adapter.modes}
    if wanted and wanted not in known:
        raise UnknownName("mode", wanted, known)
    having = [
        mode
        for mode in adapter.modes
        if adapter.returns_weights
        and mode.weights
        and (mode.dtypes is None or dtype in mode.dtypes)
    ]
    if not having:
        raise NothingToShow(
            f"{adapter.name} returns no attention weights{_in(adapter, dtype)}, so there is "
            "nothing to draw; if it does return them, its adapter must declare returns_weights"
        )
    mode = known[wanted] if wanted else having[0]
    if not mode.weights:
        raise NothingToShow(
            f"{adapter.name} returns no attention weights in mode {mode.name}; "
            f"try --mode {having[0].name}"
        )
    if mode.dtypes is not None and dtype not in mode.dtypes:
        raise NothingToShow(
            f"{adapter.name} has no {dtype} in mode {mode.name}; try --dtype {mode.dtypes[0]}"
        )
    return mode


def _in(adapter: Adapter, dtype: str) -> str:
    """In which dtype, where that is the reason."""
    return f" in {dtype}" if adapter.returns_weights else ""


def _weights(examination: Examination) -> np.ndarray:
    """The weights; whatever the implementation does instead is one line."""
    name, case = examination.adapter.name, examination.case.id
    try:
        # What a framework has to say about a row without keys, the picture shows.
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            weights = examination.answer.weights
    except Unsupported as reason:
        raise NothingToShow(
            f"{name} cannot express {case} in {examination.dtype}: {reason}; try another case, see "
            "mha-conformance list cases"
        ) from reason
    except Raised as error:
        raise NothingToShow(
            f"{name} raised {error.told}; mha-conformance run tells where"
        ) from error
    except WrongShape as error:
        raise NothingToShow(f"{name}: {error}; mha-conformance run tells more") from error
    if weights is None:
        raise NothingToShow(
            f"{name} returned no attention weights for {case}; mha-conformance run tells more"
        )
    return weights
