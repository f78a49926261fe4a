"""Grouping: the fewest entries that claim these findings, and no other finding of the run.

Findings that say the same are put together into boxes: sets of implementations, requirements,
cases, dtypes and modes, whose product holds nothing else. Then each set is said as shortly as it
can be without touching a finding outside.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from glob import escape
from itertools import groupby, takewhile

import numpy as np

from conformance.reports.gate.judging import Cell

Place = tuple[str, str, str, str, str]
"""Implementation, requirement, case, dtype, mode."""

Patterns = tuple[str, ...]

AXES = ("implementation", "requirement", "case", "dtype", "mode")

LEAST = 12
"""Characters of an error's text by which it can be known again."""

MOST = 120

FITTED = "times what it should be"
"""In causes whose number was found by a fit, and is another in the next case."""

CAUSES = 2
"""With more causes than these, none among them, one reason is told in the words of several."""

NEIGHBOURS = 24
"""With how many others a box is tried."""

_SOURCE = re.compile(r" \(at [^()]*\)$")


@dataclass(frozen=True)
class Group:
    """An entry to be: what to say under each key, "" and () for nothing."""

    verdict: str
    cause: str
    raises: str
    patterns: dict[str, Patterns]
    dtype: str
    """A condition on the dtype, or ""."""
    cells: tuple[Cell, ...]


def place_of(cell: Cell) -> Place:
    """Where a finding is."""
    result = cell.result
    return (result.implementation, cell.requirement, result.case, result.dtype, result.mode)


def groups(
    cells: Iterable[Cell], decided: Iterable[Cell], *, named: bool, exact: bool = False
) -> list[Group]:
    """Entries for these of the decided findings.

    Args:
        cells: what they are to claim.
        decided: everything else that they could claim.
        named: whether to name the implementation also if there is no other.
        exact: whether to name everything, because the run does not show what else there is.
    """
    around = _Around({place_of(cell) for cell in decided})
    found = []
    for (verdict, cause, _), same in _kinds(cells).items():
        for raises, own in _texts(same, verdict):
            by_place = {place_of(cell): cell for cell in own}
            for box in around.boxes(set(by_place)):
                patterns, dtype = around.said(box, named=named, exact=exact)
                held = tuple(by_place[place] for place in sorted(box.places))
                found.append(Group(verdict, cause, raises, patterns, dtype, held))
    return found


def _kinds(cells: Iterable[Cell]) -> dict[tuple[str, str, str], list[Cell]]:
    cells = list(cells)
    told: dict[tuple[str, str], set[str]] = defaultdict(set)
    for cell in cells:
        told[cell.result.implementation, cell.requirement].add(_cause(cell))
    kinds: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        finding = cell.finding
        several = len(told[cell.result.implementation, cell.requirement]) > CAUSES
        cause = "" if several and finding.figures else _cause(cell)
        same = re.sub(r"\d+", "#", _text(cell)) if finding.verdict == "error" else ""
        if not (same or cause or finding.figures):
            # Neither a cause nor a number: two requirements are two reasons.
            same = finding.requirement
        kinds[finding.verdict, cause, same].append(cell)
    return kinds


def _cause(cell: Cell) -> str:
    """What its cause says in other cases too."""
    cause = cell.finding.cause
    return FITTED if FITTED in cause else cause


def _text(cell: Cell) -> str:
    return _SOURCE.sub("", cell.finding.detail)


def _texts(cells: Sequence[Cell], verdict: str) -> list[tuple[str, list[Cell]]]:
    """By what errors of one kind are known: what they begin with, or each its own text."""
    if verdict != "error":
        return [("", list(cells))]
    texts = {_text(cell) for cell in cells}
    shared = _recognisable(min(texts) if len(texts) == 1 else _beginning(texts))
    if len(shared) >= LEAST:
        return [(shared, list(cells))]
    ordered = sorted(cells, key=_text)
    return [
        (_recognisable(text) or _recognisable(own[0].finding.detail) or ":", own)
        for text, own in ((text, list(own)) for text, own in groupby(ordered, key=_text))
    ]


def _beginning(texts: Collection[str]) -> str:
    """Whole words with which all of them begin."""
    first, last = min(texts), max(texts)
    equal = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(char for char, _ in equal).rpartition(" ")[0]


def _recognisable(text: str) -> str:
    """The longest part that can be read."""
    readable = "".join(char if char.isprintable() else "\n" for char in text).split("\n")
    return max(readable, key=len)[:MOST].strip()


Axes = tuple[frozenset[str], ...]


@dataclass(frozen=True)
class _Box:
    axes: Axes
    places: frozenset[Place]

    def __or__(self, other: _Box) -> _Box:
        axes = (one | two for one, two in zip(self.axes, other.axes, strict=True))
        return _Box(tuple(axes), self.places | other.places)


class _Around:
    """Everything that an entry could claim."""

    def __init__(self, places: Collection[Place]) -> None:
        self._names = [sorted({place[axis] for place in places}) for axis in range(len(AXES))]
        self._index = [{name: at for at, name in enumerate(names)} for names in self._names]
        self._there = np.zeros([len(names) for names in self._names], np.bool_)
        for place in places:
            self._there[self._at(place)] = True

    def boxes(self, places: Collection[Place]) -> list[_Box]:
        """Few boxes that hold these places and none of the others."""
        # Small parts grow together first along dtypes and modes, then over requirements.
        fine: dict[tuple[str, ...], list[Place]] = defaultdict(list)
        for place in sorted(places):
            fine[place[0], place[1], place[3], place[4]].append(place)
        parts = [_box(own) for own in fine.values()]
        for axes in ((0, 1, 3), (0, 1), (0,), ()):
            kept: dict[Axes, list[_Box]] = defaultdict(list)
            for part in parts:
                kept[tuple(part.axes[axis] for axis in axes)].append(part)
            parts = [grown for own in kept.values() for grown in self._grown(own)]
        return parts

    def said(self, box: _Box, *, named: bool, exact: bool) -> tuple[dict[str, Patterns], str]:
        """Patterns for each axis but the dtype, and a condition for that."""
        axes = list(box.axes)
        patterns: dict[str, Patterns] = {}
        dtype = ""
        for axis in (0, 4, 3, 2, 1):
            names, name = box.axes[axis], AXES[axis]
            others = self._seen(axes, axis) - names
            if name == "dtype":
                dtype = condition_on(names, others) if others or exact else ""
            elif named if name == "implementation" else exact:
                patterns[name] = tuple(sorted(escape(one) for one in names))
                continue
            else:
                patterns[name] = cover(names, others, negative=name == "case")
            if not others:
                # Nothing is said of it, so that what follows must not touch any of it.
                axes[axis] = frozenset(self._names[axis])
        if not patterns["requirement"] and not patterns["case"]:
            names = box.axes[1]
            patterns["requirement"] = (escape(min(names)),) if len(names) == 1 else ("*",)
        return {name: patterns[name] for name in AXES if patterns.get(name)}, dtype

    def _grown(self, parts: Sequence[_Box]) -> list[_Box]:
        grown: list[_Box] = []
        for part in parts:
            # Not with each of all: what is scattered is told in many entries, but soon.
            for index in range(max(0, len(grown) - NEIGHBOURS), len(grown)):
                both = part | grown[index]
                if self._is_exact(both):
                    grown[index] = both
                    break
            else:
                grown.append(part)
        return grown if len(grown) == len(parts) else self._grown(grown)

    def _is_exact(self, box: _Box) -> bool:
        return int(self._inside(box.axes).sum()) == len(box.places)

    def _seen(self, axes: Sequence[frozenset[str]], axis: int) -> set[str]:
        """What there is along an axis beside these names of all others."""
        every = [*axes[:axis], frozenset(self._names[axis]), *axes[axis + 1 :]]
        rest = tuple(other for other in range(len(AXES)) if other != axis)
        found = np.atleast_1d(self._inside(every).any(axis=rest))
        return {name for name, there in zip(self._names[axis], found, strict=True) if there}

    def _inside(self, axes: Sequence[frozenset[str]]) -> np.ndarray:
        places = (
            sorted(index[name] for name in names)
            for index, names in zip(self._index, axes, strict=True)
        )
        return self._there[np.ix_(*places)]

    def _at(self, place: Place) -> tuple[int, ...]:
        return tuple(index[name] for index, name in zip(self._index, place, strict=True))


def _box(places: Sequence[Place]) -> _Box:
    axes = (frozenset(place[axis] for place in places) for axis in range(len(AXES)))
    return _Box(tuple(axes), frozenset(places))


def condition_on(names: Collection[str], others: Collection[str]) -> str:
    """That the dtype is one of these names, and none of the others."""
    if len(names) == 1:
        return f'dtype == "{min(names)}"'
    if len(others) == 1:
        return f'dtype != "{min(others)}"'
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"dtype in ({listed})"


def cover(
    names: Collection[str], others: Collection[str], *, negative: bool = False
) -> tuple[str, ...]:
    """Few patterns that find these names and none of the others; no pattern if all are meant."""
    if not others:
        return ()
    wanted = _covered(names, others)
    if negative and len(wanted) > 1 and len(unwanted := _covered(others, names)) < len(wanted):
        return tuple(f"!{pattern}" for pattern in unwanted)
    return wanted


def _covered(names: Collection[str], others: Collection[str]) -> tuple[str, ...]:
    found: list[str] = []
    left = set(names)
    finds: dict[str, set[str]] = {}
    for pattern in {pattern for name in names for pattern in _patterns(name)}:
        match = re.compile(translate(pattern)).match
        if not any(map(match, others)):
            finds[pattern] = set(filter(match, names))
    while left:
        best = max(sorted(finds), key=lambda pattern: len(finds[pattern] & left), default="")
        if not best or len(finds[best] & left) < 2:
            break
        found.append(best)
        left -= finds[best]
    return (*found, *sorted(escape(name) for name in left))


def _patterns(name: str) -> Iterable[str]:
    """Of "mask/shared/self": everything that begins, or ends, as it does."""
    for separator in "/.":
        parts = name.split(separator)
        for count in range(1, len(parts)):
            yield escape(separator.join(parts[:count])) + separator + "*"
            if separator == "/":
                yield "*" + separator + escape(separator.join(parts[-count:]))
