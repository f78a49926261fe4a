"""Edits of a baseline by which it says what is so, and the entries that they are made of.

There is one entry for what an implementation does wrong in one way: it claims these findings, and
no other finding of the run. Requirements, and implementations, of which exactly the same can be
said share an entry. Entries are cut out of the file and put back by lines, so that whatever is
between them stays as it is; within an entry, tomlkit keeps comments and formatting.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from glob import escape
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import Array, String

from conformance.errors import BrokenBaseline, ConformanceError
from conformance.records.phrase import NOTHING, Phrase
from conformance.reports.gate.baseline import PLACES, TODO, Baseline, Entry, baseline_of, fits
from conformance.reports.gate.judging import Cell, Judgement, agrees
from conformance.reports.totals import by_key
from conformance.words import causes, say

Patterns = tuple[str, ...]

LEAST = 12
"""Characters of an error's text by which it can be recognised."""

MOST = 120

FITTED = "factor"
"""The argument of causes whose number was found by a fit, and differs in the next case."""

MOST_CAUSES = 2
"""If a requirement has more causes than these, the cause depends on the case and is not named."""

_SOURCE = re.compile(r" \(at [^()]*\)$")


class Kind(NamedTuple):
    """The content of an entry; `apart` keeps requirements in separate entries."""

    verdict: str
    cause: Phrase
    raises: str
    apart: str = ""


class Where(NamedTuple):
    """A place where an implementation violates a requirement; "" stands for everywhere."""

    case: Patterns
    mode: Patterns
    dtype: str
    """A condition on the dtype."""


@dataclass(frozen=True)
class Group:
    """An entry to write: what it says under each key, "" and () for nothing."""

    verdict: str
    cause: Phrase
    raises: str
    patterns: dict[str, Patterns]
    dtype: str
    cells: tuple[Cell, ...]


def groups(
    cells: Iterable[Cell], decided: Iterable[Cell], *, named: bool, exact: bool = False
) -> list[Group]:
    """Return entries for these of the decided findings.

    Args:
        cells: what they are to claim.
        decided: everything that they could claim.
        named: whether to name the implementation even if there is no other.
        exact: whether to name everything, because the run does not show what else there is.
    """
    around = by_key(decided, _asked)
    by_where: dict[tuple[str, Kind, Where], dict[str, list[Cell]]] = defaultdict(dict)
    for (name, requirement), asked in by_key(cells, _asked).items():
        for kind, same in _kinds(asked).items():
            for where, claimed in _places(same, around[name, requirement], exact=exact):
                by_where[name, kind, where][requirement] = claimed
    # Requirements of which the same can be said are one entry, and then implementations.
    joined: dict[tuple[Kind, Where, Patterns], dict[str, list[Cell]]] = defaultdict(dict)
    for (name, kind, where), by_requirement in by_where.items():
        claimed = [cell for cells in by_requirement.values() for cell in cells]
        joined[kind, where, tuple(sorted(by_requirement))][name] = claimed
    entries = []
    for (kind, where, requirements), by_name in joined.items():
        patterns = {
            "implementation": _names(by_name) if named else (),
            "requirement": _names(requirements),
            "case": where.case,
            "mode": where.mode,
        }
        together = tuple(cell for claimed in by_name.values() for cell in claimed)
        shown = {place: names for place, names in patterns.items() if names}
        entries.append(Group(*kind[:3], shown, where.dtype, together))
    return entries


def _asked(cell: Cell) -> tuple[str, str]:
    return cell.result.implementation, cell.requirement


# What an entry says


def _kinds(cells: Sequence[Cell]) -> dict[Kind, list[Cell]]:
    """Return the findings of one requirement by what is wrong."""
    several = len({_cause(cell) for cell in cells}) > MOST_CAUSES
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
    """Return its cause without what differs from case to case."""
    cause = cell.finding.cause
    return Phrase(cause.id, {k: v for k, v in cause.arguments.items() if k != FITTED})


def _text(cell: Cell) -> str:
    return _SOURCE.sub("", cell.finding.detail) or cell.finding.detail


def _raised(texts: Collection[str]) -> dict[str, str]:
    """Return a pattern for each error: its text, or the words that similar texts share.

    Texts are similar if they differ in numbers only.
    """
    recognised = {}
    for same in by_key(set(texts), lambda text: re.sub(r"\d+", "#", text)).values():
        # These are texts, and no paths.
        shared = commonprefix(same).rpartition(" ")[0] if len(same) > 1 else ""  # noqa: RUF071
        begins = _readable(shared)
        for text in same:
            recognised[text] = begins if len(begins) >= LEAST else _readable(text) or ":"
    return recognised


def _readable(text: str) -> str:
    """Return the longest part that prints."""
    readable = "".join(char if char.isprintable() else "\n" for char in text).split("\n")
    return max(readable, key=len)[:MOST].strip()


# Where it says so


def _places(
    cells: Sequence[Cell], decided: Sequence[Cell], *, exact: bool
) -> list[tuple[Where, list[Cell]]]:
    """Group cases that deviate in the same modes and dtypes; all are of one requirement."""
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
    places = []
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
        places.append((where, claimed))
    return places


def _dtypes(cells: Iterable[Cell]) -> dict[str, dict[str, set[str]]]:
    """Return the dtypes by case and mode."""
    dtypes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        dtypes[cell.result.case][cell.result.mode].add(cell.result.dtype)
    return dtypes


def _names(names: Iterable[str]) -> Patterns:
    return tuple(sorted(map(escape, names)))


def condition_on(names: Collection[str], others: Collection[str]) -> str:
    """Return a condition that the dtype is one of these names, and none of the others."""
    if len(names) == 1:
        return f'dtype == "{min(names)}"'
    if len(others) == 1:
        return f'dtype != "{min(others)}"'
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"dtype in ({listed})"


def cover(names: Collection[str], others: Collection[str]) -> Patterns:
    """Return patterns for these cases and none of the others; () if there are no others.

    A folder of which all is meant is one pattern; where that is shorter, the others are left out.
    """
    if not others:
        return ()
    wanted, unwanted = folders(names, others), folders(others, names)
    if len(unwanted) < len(wanted):
        return tuple(f"!{pattern}" for pattern in unwanted)
    return wanted


def folders(names: Collection[str], others: Collection[str]) -> Patterns:
    """Return patterns as `cover` does, but never with exclusions."""
    patterns = set()
    for name in names:
        parts = name.split("/")
        above = ["/".join(parts[:count]) + "/" for count in range(1, len(parts))]
        whole = (
            f"{escape(folder)}*"
            for folder in above
            if not any(other.startswith(folder) for other in others)
            and sum(own.startswith(folder) for own in names) > 1
        )
        patterns.add(next(whole, escape(name)))
    return tuple(sorted(patterns))


WIDTH = 100


def propose(
    baseline: Baseline, judgement: Judgement, reason: str = "", *, adds: bool = True
) -> str:
    """Return the text of the baseline by which the gate would hold, as far as can be decided.

    What a narrowed run did not ask stays, and if anything was left open, nothing is removed. If
    entries contradict each other, only people can say which is right.

    Args:
        reason: for entries that have none.
        adds: whether new deviations become known.

    Raises:
        BrokenBaseline: the file cannot be edited.
    """
    edit = _Edit(baseline, judgement, reason)
    if judgement.answered:
        edit.remove()
        edit.narrow()
    if adds:
        edit.add()
    edit.fill_in()
    text = edit.text()
    baseline_of(baseline.path, text)
    return text


def write(path: Path, text: str) -> None:
    """Write a baseline atomically."""
    # A link stays a link, and may lead to another file system.
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".new")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(text.encode())
            Path(name).chmod(target.stat().st_mode if target.exists() else 0o644)
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error


@dataclass
class _Edit:
    baseline: Baseline
    judgement: Judgement
    reason: str
    removed: set[int] = field(default_factory=set)
    changed: dict[int, list[TOMLDocument]] = field(default_factory=dict)
    """The documents that replace an entry, by its number."""
    new: list[TOMLDocument] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = self.baseline.text.splitlines(keepends=True)
        self.unclear = {
            entry.number for one, two, _ in self.judgement.ambiguous for entry in (one, two)
        }
        implementations = self.judgement.record.header.implementations
        self.named = len(implementations) > 1 or any(
            e.implementation for e in self.baseline.entries
        )

    @property
    def _entries(self) -> Iterable[Entry]:
        """Yield the entries whose outcome can be decided."""
        for entry in self.baseline.entries:
            if entry.number in self.judgement.claimed and not {entry.number} & (
                self.removed | self.unclear
            ):
                yield entry

    def remove(self) -> None:
        """Remove entries that nothing matches, or that repeat another."""
        self.removed |= {entry.number for entry in self.judgement.unmatched}
        for one, two in self.judgement.duplicates:
            if {one.number, two.number} & (self.removed | self.unclear):
                continue
            first, second = ({*self.judgement.claimed[entry.number]} for entry in (one, two))
            if second <= first:
                self.removed.add(two.number)
            elif first < second:
                self.removed.add(one.number)

    def narrow(self) -> None:
        """Narrow entries that claim more than is so."""
        for entry in list(self._entries):
            claimed = self.judgement.claimed[entry.number]
            rest = [cell for cell in claimed if agrees(entry, cell.finding)]
            off = [
                cell
                for cell in claimed
                if not agrees(entry, cell.finding) and (cell.wrong or entry.strict)
            ]
            if claimed and not rest:
                self.removed.add(entry.number)
            elif off:
                self._narrow(entry, rest, off)

    def _narrow(self, entry: Entry, rest: Sequence[Cell], off: Sequence[Cell]) -> None:
        for place in (*PLACES[:2], "mode", "dtype", "case"):
            names, others = ({cell.part(place) for cell in cells} for cells in (rest, off))
            if names & others:
                continue
            if place == "dtype":
                value: object = _joined(entry, condition_on(names, others))
            else:
                kept = [pattern for pattern in getattr(entry, place) if pattern not in others]
                left = {name for name in others if fits(tuple(kept), name)}
                value = [*kept, *(f"!{one}" for one in folders(left, names))]
            _set(self._one(entry), "when" if place == "dtype" else place, value)
            return
        # A corner of what it claims: it becomes several.
        text = tomlkit.dumps(self._document(entry))
        several = []
        for group in groups(rest, self.judgement.decided, named=self.named):
            several.append(tomlkit.parse(text))
            _place(several[-1], group, _joined(entry, group.dtype))
        self.changed[entry.number] = several

    def add(self) -> None:
        """Add entries for what is new."""
        left = [
            cell
            for cell in self.judgement.new
            if (entry := self.judgement.expected.get(cell)) is None
            or (self.judgement.answered and entry.number not in self.unclear)
        ]
        for group in groups(
            left, self.judgement.decided, named=self.named, exact=not self.judgement.whole
        ):
            document = tomlkit.parse("[[known]]\n")
            _place(document, group, group.dtype)
            _set(document, "verdict", group.verdict)
            if group.cause.id in causes():
                _set(document, "cause", group.cause.id)
                _set(document, "arguments", _toml(group.cause.arguments))
            else:
                _set(document, "cause", say(group.cause))
            _set(document, "raises", group.raises)
            _set(document, "reason", self.reason or TODO)
            self.new.append(document)

    def fill_in(self) -> None:
        """Fill in missing reasons."""
        for entry in self.judgement.reasonless:
            if entry.number in self.removed or (entry.reason.strip() and not self.reason):
                continue
            self._one(entry)
            for document in self.changed[entry.number]:
                _set(document, "reason", self.reason or TODO)

    def text(self) -> str:
        """Return the file with all changes made."""
        changes = self.removed or self.changed or self.new
        if changes and any(entry.line == 0 for entry in self.baseline.entries):
            raise BrokenBaseline(
                f"{self.baseline.path}: can be edited only if each entry begins with [[known]] "
                "on a line of its own"
            )
        lines = list(self.lines)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        for entry in reversed(self.baseline.entries):
            if entry.number in self.removed:
                first, last = self._span(entry)
                lines[first:last] = []
                _close(lines, first)
            elif entry.number in self.changed:
                first, last = self._span(entry)
                several = self.changed[entry.number]
                lines[first:last] = [(end * 2).join(_written(one, end) for one in several) + end]
        text = "".join(lines)
        for document in self.new:
            text += end if text and not text.endswith("\n") else ""
            text += (end if text.strip() else "") + _written(document, end) + end
        return text

    def _one(self, entry: Entry) -> TOMLDocument:
        """Return the first document that replaces an entry."""
        return self.changed.setdefault(entry.number, [self._document(entry)])[0]

    def _document(self, entry: Entry) -> TOMLDocument:
        first, last = self._span(entry)
        return tomlkit.parse("".join(self.lines[first:last]))

    def _span(self, entry: Entry) -> tuple[int, int]:
        """Return the lines from its head to its last key; later comments are the next one's."""
        later = [other.line - 1 for other in self.baseline.entries if other.line > entry.line]
        first, last = max(entry.line - 1, 0), min(later, default=len(self.lines))
        while last > first and self.lines[last - 1].lstrip()[:1] in ("", "#"):
            last -= 1
        return first, last


def _joined(entry: Entry, condition: str) -> str:
    """Return the condition of an entry joined with one more."""
    if entry.condition is None or not condition:
        return condition or (entry.condition.text if entry.condition else "")
    if entry.condition.names == {"dtype"}:
        return condition
    first = entry.condition.text.strip()
    return f"({first}) and {condition}" if " or " in first else f"{first} and {condition}"


def _place(document: TOMLDocument, group: Group, condition: str) -> None:
    for name in PLACES:
        _set(document, name, list(group.patterns.get(name, ())))
    _set(document, "when", condition)


def _set(document: TOMLDocument, key: str, value: object) -> None:
    """Give a key its value, or remove it if that is empty. A comment behind it stays."""
    table: Any = document["known"][0]  # type: ignore[index]
    if not value:
        table.pop(key, None)
        return
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else _array(key, value)
    if isinstance(value, str):
        value = _string(value)
    table[key] = value


def _toml(value: Any) -> Any:
    """Return the arguments of a phrase, or one of them, as TOML values."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _toml(item) for name, item in value.items()})
        return table
    if isinstance(value, list):
        items = tomlkit.array()
        items.extend([_toml(item) for item in value])
        return items
    if not isinstance(value, Phrase):
        return value
    return _toml({"id": value.id, "arguments": value.arguments}) if value.arguments else value.id


def _array(key: str, values: Sequence[str]) -> Array:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(f"{key} = {array.as_string()}") > WIDTH)


def _string(value: str) -> String:
    """Quote text so that nothing need be escaped, where that is possible."""
    return tomlkit.string(value, literal='"' in value and "'" not in value and value.isprintable())


def _written(document: TOMLDocument, end: str) -> str:
    return end.join(tomlkit.dumps(document).rstrip().splitlines())


def _close(lines: list[str], place: int) -> None:
    """Leave neither two empty lines where an entry was, nor any at the end."""
    before = place == 0 or not lines[place - 1].strip()
    if place == len(lines):
        while lines and not lines[-1].strip():
            lines.pop()
    elif before and not lines[place].strip():
        del lines[place]
