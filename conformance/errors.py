"""The exit codes of the command line, and the errors that the suite reports to users.

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
    before. `explore`, `reproduce`: a deviation was found. `judge`: a candidate is not right.
    `convert`: source and target differ with the converted weights. `diagnose`: the output deviates
    from attention by more than noise."""
    USAGE = 2
    """The command line, a name or a file was invalid, or `convert` refused to convert.

    This is also the exit code of every `ConformanceError` that does not define another one."""
    NOTHING_VERIFIED = 3
    """Nothing was verified, for example because everything was unavailable, unsupported or
    deselected, or crashed."""
    INCOMPLETE = 4
    """Something requested was not checked; results obtained so far are kept if a record is
    written."""
    CLOSED = 141
    """The program that read the output, such as `head`, closed the pipe early."""
    INTERRUPTED = 130
    """The user interrupted the command; results obtained so far are kept if a record is written."""


PYTEST_CODES = {
    ExitCode.OK: 0,
    ExitCode.DEVIATES: 1,
    ExitCode.INTERRUPTED: 2,
    ExitCode.USAGE: 4,
    ExitCode.NOTHING_VERIFIED: 5,
    ExitCode.INCOMPLETE: 6,
}
"""The exit status of a pytest session for each exit code with which a session can end.

`INCOMPLETE` is 6, because pytest itself exits with 6 only if its option --max-warnings is used.
"""


class ConformanceError(Exception):
    """The base class of the errors that the suite reports to users."""

    exit_code = ExitCode.USAGE


MOST_NAMES = 24
"""The maximum number of known names that the message of `UnknownName` lists.

If more names are known, the message refers to a command that lists them or, if there is no such
command, counts the rest.
"""

_LISTS = {
    "case": "list cases",
    "requirement": "list requirements",
    "experiment": "list experiments",
    "implementation": "list implementations",
    "case, experiment or requirement": "list cases, list experiments or list requirements",
}
"""The subcommands of `mha-conformance` that list all names of a kind, by kind."""


class UnknownName(ConformanceError):
    """A name, such as that of a case or an implementation, does not exist.

    The message suggests similar names. If no name is similar, it lists the names that exist, or
    refers to a command that lists them.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {_hint(kind, _near(name, known), known)}")


def check_names(kind: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UnknownName` for the first of `names` that is not in `known`.

    `kind` says what the names stand for, such as "case".
    """
    every = set(known)
    for name in names:
        if name not in every:
            raise UnknownName(kind, name, every)


def _near(name: str, known: list[str]) -> list[str]:
    """Return up to three names in `known` to suggest instead of the unknown `name`.

    They resemble `name`; or else they contain it; or else one of their parts between slashes
    resembles it. If no known name meets any of these conditions, return [].
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
    """A file, module or object given as an adapter does not exist or is not an adapter."""


class FailsOnImport(NotAnAdapter):
    """Importing or constructing an adapter raised an exception other than a `ConformanceError`.

    If a package is missing, `Unavailable` is raised instead.
    """


class WrongDeclaration(ConformanceError):
    """Declarations of an adapter are invalid, or contradict each other or the implementation."""


class WrongShape(ConformanceError):
    """A problem's sizes, arrays or options are invalid or do not fit together.

    An adapter's `Answer` with arrays that do not fit the problem is such an error too.
    """


class WrongAnswer(ConformanceError):
    """An implementation returned something other than the required arrays, such as another type."""


class Untranslatable(ConformanceError):
    """A mask, window, soft cap or weights cannot be converted for another implementation.

    They are ambiguous or malformed, or the other implementation cannot express them.
    """


class WrongTensors(ConformanceError):
    """A file of weights cannot be read or written, or its weights do not fit an implementation."""


class Disagreement(ConformanceError):
    """Two implementations give different outputs with weights that were converted."""

    exit_code = ExitCode.DEVIATES


class BadArrays(ConformanceError):
    """Arrays are missing, hold no numbers to compute with, contradict each other or too large."""


class Ambiguous(BadArrays):
    """Arrays fit several layouts, and their numbers do not decide which one is meant."""


class BrokenRecord(ConformanceError):
    """A record cannot be read: it is missing, damaged or no record, or its schema is unknown."""


class BrokenBaseline(ConformanceError):
    """A baseline cannot be read, or one of its entries is invalid."""


class BrokenCase(ConformanceError):
    """A case file cannot be read: it is missing, damaged, not a case file, or too large."""


class RankRaised(ConformanceError):
    """A rank, that is, one of several processes that compute one call together, raised an error.

    `ours` says whether the suite or an adapter raised it there, rather than the library.
    """

    ours = True


class ProcessLost(ConformanceError):
    """This process can examine nothing more, because of what the implementation did.

    `verdict` is the verdict of the item that was being examined.
    """

    verdict: Literal["crashed", "timed-out"]


class DeviceLost(ProcessLost):
    """An implementation made an error after which every call on its device fails in this process.

    On a GPU, such are failed assertions and accesses to memory out of range.
    """

    verdict = "crashed"


class RankLost(ProcessLost):
    """One of several processes that compute one call together ended or did not answer in time."""


class RankDied(RankLost):
    """A process that computes part of a call, or the process that starts such processes, died."""

    verdict = "crashed"


class RankLate(RankLost):
    """A process that computes part of a call did not answer in time."""

    verdict = "timed-out"


class Unwritten(ConformanceError):
    """What was measured could not be written, for example because the disk is full."""

    exit_code = ExitCode.INCOMPLETE


class Unavailable(ConformanceError):
    """This machine lacks something that an implementation needs, such as a framework or a device.

    The item gets the verdict `unavailable`.
    """

    exit_code = ExitCode.NOTHING_VERIFIED


class NothingRun(ConformanceError):
    """pytest ended without an error but checked nothing, as with --collect-only."""

    exit_code = ExitCode.NOTHING_VERIFIED


class NothingToShow(ConformanceError):
    """There are no attention weights to draw.

    The implementation returns none, does not support the case or dtype, or fails.
    """

    exit_code = ExitCode.NOTHING_VERIFIED


class Unsupported(Exception):
    """Raised by an adapter, with a reason, if the implementation cannot express a problem.

    It is not a `ConformanceError`, because it is a result (verdict `unsupported`), not an error.
    """
