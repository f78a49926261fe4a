"""Errors as users see them: one line, what to do next, and an exit code.

Errors that users see derive from `ConformanceError`. The command line prints the text of such an
error and exits with its code, so both are part of the interface.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from typing import Literal


class ExitCode(IntEnum):
    """Exit codes of `mha-conformance`."""

    OK = 0
    """The command succeeded. `run`, `report`: everything requested was checked. `gate`: the results
    match the baseline."""
    DEVIATES = 1
    """`run --strict`: an implementation violates a requirement of level must. `gate`: a result is
    worse than in the baseline, or the baseline is out of date. `compare`: a result is worse than
    before. `explore`, `reproduce`: a deviation was found. `judge`: a candidate is not right."""
    USAGE = 2
    """The command line, a name or a file was invalid, or `convert` refused to convert."""
    NOTHING_VERIFIED = 3
    """Nothing was checked: everything was unavailable, unsupported or deselected."""
    INCOMPLETE = 4
    """Something requested was not checked; the results obtained so far are kept."""
    CLOSED = 141
    """The program that read the output, such as `head`, closed the pipe early."""
    INTERRUPTED = 130
    """The user interrupted the run; the results obtained so far are kept."""


PYTEST_CODES = {
    ExitCode.OK: 0,
    ExitCode.DEVIATES: 1,
    ExitCode.INTERRUPTED: 2,
    ExitCode.USAGE: 4,
    ExitCode.NOTHING_VERIFIED: 5,
    ExitCode.INCOMPLETE: 6,
}
"""The exit status of a pytest session for each code; of these, pytest itself does not use 6."""


class ConformanceError(Exception):
    """The base class of the errors that the suite reports to users."""

    exit_code = ExitCode.USAGE


MOST_NAMES = 24
"""The most known names that a message lists, before it refers to a command or counts the rest."""

_LISTS = {
    "case": "list cases",
    "requirement": "list requirements",
    "experiment": "list experiments",
    "implementation": "list implementations",
    "case, experiment or requirement": "list cases, list experiments or list requirements",
}
"""The subcommands of `mha-conformance` that list all names of a kind, by kind."""


class UnknownName(ConformanceError):
    """A name does not exist; the message suggests similar names, or else says which names exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {_hint(kind, _near(name, known), known)}")


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnknownName` for the first of `names` that is not in `known`."""
    every = set(known)
    for name in names:
        if name not in every:
            raise UnknownName(kind, name, every)


def _near(name: str, known: list[str]) -> list[str]:
    """Return up to three known names that resemble or contain `name`.

    If there are none, return names of which a part between slashes resembles `name`.
    """
    near = (
        difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        or [candidate for candidate in known if name and name in candidate][:3]
    )
    if near:
        return near
    parts = difflib.get_close_matches(name, {p for one in known for p in one.split("/")}, n=3)
    return [candidate for part in parts for candidate in known if part in candidate.split("/")][:3]


def _hint(kind: str, near: list[str], known: list[str]) -> str:
    long = len(known) > MOST_NAMES
    lists = f"mha-conformance {_LISTS[kind]}" if long and kind in _LISTS else ""
    if near:
        return f"did you mean {' or '.join(near)}?" + (f" All of them: {lists}" if lists else "")
    if lists:
        return f"all that there are: {lists}"
    more = f" and {len(known) - MOST_NAMES} more" if long else ""
    return f"known: {', '.join(known[:MOST_NAMES]) or 'none'}{more}"


class NotAnAdapter(ConformanceError):
    """A file, module or object was given as an adapter but is not one."""


class FailsOnImport(NotAnAdapter):
    """An adapter raised an exception when it was imported or constructed."""


class WrongDeclaration(ConformanceError):
    """The declarations of an adapter contradict each other or the implementation."""


class WrongShape(ConformanceError):
    """The sizes, arrays or options of a problem do not fit together, or an answer is malformed."""


class WrongAnswer(ConformanceError):
    """An implementation returned something other than the required arrays of its framework."""


class Untranslatable(ConformanceError):
    """A mask, window, soft cap or weights are ambiguous, or the target cannot express them."""


class WrongTensors(ConformanceError):
    """A weights file cannot be read or written, or its weights do not fit their implementation."""


class BrokenRecord(ConformanceError):
    """A record cannot be read: it is truncated, not a record, or written by another version."""


class BrokenBaseline(ConformanceError):
    """A baseline cannot be read, or one of its entries is invalid."""


class BrokenCase(ConformanceError):
    """A case file cannot be read: it is truncated, not a case file, or exceeds the limits."""


class RankRaised(ConformanceError):
    """A rank of a world of processes raised an exception."""


class RankLost(ConformanceError):
    """The processes of a world ended or did not answer in time; `verdict` is the item's verdict."""

    verdict: Literal["crashed", "timed-out"]


class RankDied(RankLost):
    """The process of a rank ended before it answered."""

    verdict = "crashed"


class RankLate(RankLost):
    """A rank did not answer in time."""

    verdict = "timed-out"


class Unavailable(ConformanceError):
    """This machine lacks something that an implementation needs, such as a framework or a device.

    The item gets the verdict `unavailable`.
    """

    exit_code = ExitCode.NOTHING_VERIFIED


class NothingRun(ConformanceError):
    """pytest ended without an error but checked nothing, as with --collect-only."""

    exit_code = ExitCode.NOTHING_VERIFIED


class NothingToShow(ConformanceError):
    """There is nothing to draw.

    The implementation returns no attention weights, does not support the case, or fails on it.
    """

    exit_code = ExitCode.NOTHING_VERIFIED


class Unsupported(Exception):
    """Raised by an adapter, with a reason, if the implementation cannot express a problem.

    It is not a `ConformanceError`, because it is a result (verdict `unsupported`), not an error.
    """
