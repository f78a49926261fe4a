"""Draw the attention weights of one case into a file: .svg, .png or .html, as its name says."""

from __future__ import annotations

import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from conformance.adapter.base import Adapter, Mode
from conformance.adapter.loading import load
from conformance.cases.case import Case
from conformance.cases.catalogue import find_cases
from conformance.cases.description import describe
from conformance.definition.dtypes import dtype_of
from conformance.errors import (
    ConformanceError,
    ExitCode,
    NothingToShow,
    UnknownName,
    Unsupported,
    WrongShape,
)
from conformance.frameworks.base import package_versions
from conformance.reports.figures.drawing import again, page, png, renderer, sentences, svg
from conformance.reports.figures.picture import Picture, Subject, picture
from conformance.requirements.examination import Examination, Raised

SUFFIXES = (".svg", ".png", ".html")


@dataclass(frozen=True)
class Question:
    """The request for a drawing, as on the command line; "" is the first mode with weights."""

    implementation: str
    case: str
    dtype: str = "float32"
    mode: str = ""
    device: str = "cpu"
    entry: str = ""
    """A batch entry, "all", or "" for the entry with the largest deviation."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A picture, with the adapter and the case that it is of."""

    picture: Picture
    adapter: Adapter
    case: Case


def draw(question: Question, output: Path) -> int:
    """Evaluate the case, write the figure, and print a summary of it.

    Returns:
        `OK`, whatever is seen: a drawing is no verdict.

    Raises:
        ConformanceError: see `ask`; or the file cannot be written. Then there is no file, or what
            was there before.
    """
    check_output(output)
    seen = ask(question)
    replace(output, render(seen, question, output))
    for line in sentences(seen.picture):
        print(line)
    print(f"drawn: {output}")
    return ExitCode.OK


def check_output(output: Path) -> None:
    """Raise `ConformanceError` unless a figure can be written there; better before the work."""
    if output.suffix not in SUFFIXES:
        raise ConformanceError(
            f"{output}: the name says which format, {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
        )
    if output.is_dir():
        raise ConformanceError(f"{output}: is a folder; name a file in it")
    try:
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as error:
        raise ConformanceError(
            f"{output}: cannot be written ({error.strerror}); name another place"
        ) from error
    if output.suffix == ".png":
        renderer()


def render(seen: Seen, question: Question, output: Path) -> bytes:
    """Return the content of the file."""
    if output.suffix == ".html":
        versions = package_versions(("mha-conformance", "numpy")) | seen.adapter.versions()
        command = again(seen.picture, question.implementation, output.name, question.entry)
        return page(seen.picture, describe(seen.case), command, versions).encode()
    figure = svg(seen.picture)
    return png(figure) if output.suffix == ".png" else figure.encode()


def replace(output: Path, content: bytes) -> None:
    """Write the whole file or nothing."""
    temporary = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConformanceError(
            f"{output}: cannot be written ({error.strerror}); name another place"
        ) from error


# Asking for the weights


def ask(question: Question) -> Seen:
    """Evaluate the case with the implementation.

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
    """Return the only case of this id or pattern.

    Raises:
        UnknownName: no case matches.
        ConformanceError: several do; the message lists them.
    """
    cases = find_cases(pattern)
    if len(cases) > 1:
        found = ", ".join(case.id for case in cases[:12]) + ", ..." * (len(cases) > 12)
        raise ConformanceError(
            f"--case {pattern} finds {len(cases)} cases, and one is drawn at a time; say which: "
            f"{found}"
        )
    return cases[0]


def _mode(adapter: Adapter, wanted: str, dtype: str) -> Mode:
    """Return the mode of this name, or the first that returns weights."""
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
    """Name the dtype if it is the reason."""
    return f" in {dtype}" if adapter.returns_weights else ""


def _weights(examination: Examination) -> np.ndarray:
    """Return the weights; any failure of the implementation becomes a one-line error."""
    name, case = examination.adapter.name, examination.case.id
    try:
        # The figure shows what a framework would warn about, such as a fully masked query.
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
