"""Errors as users see them: one line, what to do next, and an exit code.

Everything that the suite raises on purpose derives from `ConformanceError`. The command line
prints its text as one line and exits with its code, so both are part of the interface.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `mha-conformance`."""

    OK = 0
    """Everything that was to be verified was verified (`run`, `report`), and is as the baseline
    says (`gate`)."""
    DEVIATES = 1
    """`run --strict`: an implementation deviates from a requirement of level must. `gate`:
    something is worse than the baseline says, or the baseline is out of date."""
    USAGE = 2
    """The command line, a name or a file was wrong; nothing was run."""
    NOTHING_VERIFIED = 3
    """Not one finding: everything was unavailable, unsupported or deselected."""
    INCOMPLETE = 4
    """Something that was to be verified was not; what was measured is kept."""
    CLOSED = 141
    """Whoever read the output, such as `head`, closed it before its end."""
    INTERRUPTED = 130
    """Stopped by the user; what was measured is kept."""


PYTEST_CODES = {
    ExitCode.OK: 0,
    ExitCode.DEVIATES: 1,
    ExitCode.INTERRUPTED: 2,
    ExitCode.USAGE: 4,
    ExitCode.NOTHING_VERIFIED: 5,
    ExitCode.INCOMPLETE: 6,
}
"""The same as pytest ends with them, to which 3 and 4 mean something else; 6 is none of its own."""


class ConformanceError(Exception):
    """Base of every error that the suite raises on purpose."""

    exit_code = ExitCode.USAGE


MOST_NAMES = 24
"""Names that one line can list; of more, those that are near, or the command that lists all."""

_LISTS = {
    "case": "list cases",
    "requirement": "list requirements",
    "experiment": "list experiments",
    "implementation": "list implementations",
    "case, experiment or requirement": "list cases, list experiments or list requirements",
}
"""By the kind of name, what `mha-conformance` lists them."""


class UnknownName(ConformanceError):
    """A name that nothing has; the message lists the nearest ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"unknown {kind} {name!r}; {_hint(kind, _near(name, known), known)}")


def _near(name: str, known: list[str]) -> list[str]:
    """Return up to three similar names, matched as a whole or by a part between slashes."""
    return (
        difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        or [candidate for candidate in known if name and name in candidate][:3]
        or _near_in_part(name, known)
    )


def _near_in_part(name: str, known: list[str]) -> list[str]:
    parts = {part for candidate in known for part in candidate.split("/")}
    near = difflib.get_close_matches(name, parts, n=3)
    return [candidate for part in near for candidate in known if part in candidate.split("/")][:3]


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
    """A file, module or object that is no adapter."""


class FailsOnImport(NotAnAdapter):
    """An adapter that raises when it is imported or constructed."""


class WrongDeclaration(ConformanceError):
    """An adapter whose tables contradict themselves or the implementation."""


class WrongShape(ConformanceError):
    """An array whose shape does not fit the problem."""


class Untranslatable(ConformanceError):
    """A mask or weights that may be read in two ways, or that the target has no way to say."""


class WrongTensors(ConformanceError):
    """Weights that do not fit the parameter table of their implementation."""


class BrokenRecord(ConformanceError):
    """A record that cannot be read: truncated, foreign or from another suite."""


class BrokenBaseline(ConformanceError):
    """A baseline that cannot be read, or an entry of it that cannot be meant."""


class BrokenCase(ConformanceError):
    """A case file that cannot be read: truncated, foreign, or beyond what one may hold."""


class Unavailable(ConformanceError):
    """A framework or a device that this machine does not have: the verdict `unavailable`."""

    exit_code = ExitCode.NOTHING_VERIFIED


class NothingToShow(ConformanceError):
    """There is no answer to draw: no attention weights, an unsupported case, an implementation
    that fails."""

    exit_code = ExitCode.NOTHING_VERIFIED


class Unsupported(Exception):
    """An adapter says: this implementation cannot express the problem, and why.

    Not a `ConformanceError`: it is an answer (the verdict `unsupported`), not a fault.
    """
