"""Grouping: the entries that claim these findings, and no other finding of the run.

There is one entry for what an implementation does wrong in one way. Requirements, and
implementations, of which exactly the same can be said share an entry.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import takewhile
from typing import NamedTuple

from conformance.records.phrase import NOTHING, Phrase
from conformance.reports.gate.judging import Cell

Patterns = tuple[str, ...]

LEAST = 12
"""Characters of an error's text by which it can be known again."""

MOST = 120

FITTED = "factor"
"""The argument of causes whose number was found by a fit, and is another in the next case."""

CAUSES = 2
"""Of a requirement with more causes than these, none among them, the cause depends on the case."""

_SOURCE = re.compile(r" \(at [^()]*\)$")


class Kind(NamedTuple):
    """What an entry says of its findings; `apart` keeps requirements out of each other's entry."""

    verdict: str
    cause: Phrase
    raises: str
    apart: str = ""


class Where(NamedTuple):
    """Where one requirement is not met by one implementation; an empty part is everywhere."""

    case: Patterns
    mode: Patterns
    dtype: str
    """A condition on the dtype."""


@dataclass(frozen=True)
class Group:
    """An entry to be: what to say under each key, "" and () for nothing."""

    verdict: str
    cause: Phrase
    raises: str
    patterns: dict[str, Patterns]
    dtype: str
    cells: tuple[Cell, ...]


def groups(
    cells: Iterable[Cell], decided: Iterable[Cell], *, named: bool, exact: bool = False
) -> list[Group]:
    """Entries for these of the decided findings.

    Args:
        cells: what they are to claim.
        decided: everything that they could claim.
        named: whether to name the implementation also if there is no other.
        exact: whether to name everything, because the run does not show what else there is.
    """
    around = _by_asked(decided)
    told: dict[tuple[str, Kind, Where], dict[str, list[Cell]]] = defaultdict(dict)
    for (name, requirement), asked in _by_asked(cells).items():
        for kind, same in _kinds(asked).items():
            for where, own in _places(same, around[name, requirement], exact=exact):
                told[name, kind, where][requirement] = own
    joined: dict[tuple[Kind, Where, Patterns], dict[str, list[Cell]]] = defaultdict(dict)
    for (name, kind, where), by_requirement in told.items():
        own = [cell for cells in by_requirement.values() for cell in cells]
        joined[kind, where, tuple(sorted(by_requirement))][name] = own
    found = []
    for (kind, where, requirements), by_name in joined.items():
        patterns = {
            "implementation": _names(by_name) if named else (),
            "requirement": _names(requirements),
            "case": where.case,
            "mode": where.mode,
        }
        claimed = tuple(cell for own in by_name.values() for cell in own)
        found.append(
            Group(*kind[:3], {k: v for k, v in patterns.items() if v}, where.dtype, claimed)
        )
    return found


def _by_asked(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """By implementation and requirement."""
    found: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        found[cell.result.implementation, cell.requirement].append(cell)
    return found


# What an entry says


def _kinds(cells: Sequence[Cell]) -> dict[Kind, list[Cell]]:
    """The findings of one requirement by what is wrong."""
    several = len({_cause(cell) for cell in cells}) > CAUSES
    raised = _raised([_text(cell) for cell in cells if cell.finding.verdict == "error"])
    kinds: dict[Kind, list[Cell]] = defaultdict(list)
    for cell in cells:
        finding = cell.finding
        if finding.verdict == "error":
            kind = Kind("error", NOTHING, raised[_text(cell)])
        else:
            cause = NOTHING if several and finding.figures else _cause(cell)
            # With neither a cause nor a number, two requirements are two reasons.
            apart = "" if cause or finding.figures else finding.requirement
            kind = Kind(finding.verdict, cause, "", apart)
        kinds[kind].append(cell)
    return kinds


def _cause(cell: Cell) -> Phrase:
    """Its cause without what is another in other cases."""
    cause = cell.finding.cause
    return Phrase(cause.id, {k: v for k, v in cause.arguments.items() if k != FITTED})


def _text(cell: Cell) -> str:
    return _SOURCE.sub("", cell.finding.detail) or cell.finding.detail


def _raised(texts: Collection[str]) -> dict[str, str]:
    """By what each error is known: texts that differ in numbers only, by how they begin."""
    alike: dict[str, set[str]] = defaultdict(set)
    for text in texts:
        alike[re.sub(r"\d+", "#", text)].add(text)
    found = {}
    for same in alike.values():
        begins = _readable(_beginning(same)) if len(same) > 1 else ""
        for text in same:
            found[text] = begins if len(begins) >= LEAST else _readable(text) or ":"
    return found


def _beginning(texts: Collection[str]) -> str:
    """Whole words with which all of them begin."""
    pairs = zip(min(texts), max(texts), strict=False)
    equal = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return "".join(char for char, _ in equal).rpartition(" ")[0]


def _readable(text: str) -> str:
    """The longest part that prints."""
    readable = "".join(char if char.isprintable() else "\n" for char in text).split("\n")
    return max(readable, key=len)[:MOST].strip()


# Where it says so


def _places(
    cells: Sequence[Cell], decided: Sequence[Cell], *, exact: bool
) -> list[tuple[Where, list[Cell]]]:
    """Cases that deviate in the same modes and dtypes, of one requirement of one implementation."""
    asked = _dtypes(decided)
    alike: dict[tuple[Patterns, Patterns], set[str]] = defaultdict(set)
    for case, wrong in _dtypes(cells).items():
        in_modes: dict[Patterns, list[str]] = defaultdict(list)
        for mode, own in wrong.items():
            in_all = not exact and own == asked[case][mode]
            in_modes[() if in_all else tuple(sorted(own))].append(mode)
        for dtypes, several in in_modes.items():
            in_all = not exact and len(several) == len(asked[case])
            alike[dtypes, () if in_all else tuple(sorted(several))].add(case)
    found = []
    for (dtypes, modes), cases in alike.items():
        # An entry for these modes and dtypes touches nothing else of the other cases.
        within = {
            case: {d for mode, own in by_mode.items() if not modes or mode in modes for d in own}
            for case, by_mode in asked.items()
        }
        touched = {case for case, own in within.items() if own & {*(dtypes or own)}}
        beside = {dtype for case in cases for dtype in within[case]} - {*dtypes}
        where = Where(
            _names(cases) if exact else cover(cases, touched - cases),
            _names(modes),
            condition_on(dtypes, beside) if dtypes else "",
        )
        claimed = [
            cell
            for cell in cells
            if cell.result.case in cases
            and (not modes or cell.result.mode in modes)
            and (not dtypes or cell.result.dtype in dtypes)
        ]
        found.append((where, claimed))
    return found


def _dtypes(cells: Iterable[Cell]) -> dict[str, dict[str, set[str]]]:
    """By case and mode."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        found[cell.result.case][cell.result.mode].add(cell.result.dtype)
    return found


def _names(names: Iterable[str]) -> Patterns:
    return tuple(sorted(map(escape, names)))


def condition_on(names: Collection[str], others: Collection[str]) -> str:
    """That the dtype is one of these names, and none of the others."""
    if len(names) == 1:
        return f'dtype == "{min(names)}"'
    if len(others) == 1:
        return f'dtype != "{min(others)}"'
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"dtype in ({listed})"


def cover(names: Collection[str], others: Collection[str]) -> Patterns:
    """Patterns that find these cases and none of the others; none if there are no others.

    A folder of which all is meant is one pattern; where that is shorter, the others are left out.
    """
    if not others:
        return ()
    wanted, unwanted = folders(names, others), folders(others, names)
    if len(unwanted) < len(wanted):
        return tuple(f"!{pattern}" for pattern in unwanted)
    return wanted


def folders(names: Collection[str], others: Collection[str]) -> Patterns:
    """As `cover`, but nothing is left out."""
    found = set()
    for name in names:
        parts = name.split("/")
        above = ["/".join(parts[:count]) + "/" for count in range(1, len(parts))]
        whole = (
            f"{escape(folder)}*"
            for folder in above
            if not any(other.startswith(folder) for other in others)
            and sum(own.startswith(folder) for own in names) > 1
        )
        found.add(next(whole, escape(name)))
    return tuple(sorted(found))
