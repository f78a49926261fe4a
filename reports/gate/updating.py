"""Updating: a small edit of a baseline by which it says what is so.

Entries are cut out of the file and put back by lines, so that whatever is between them stays as it
is; within an entry, tomlkit keeps comments and spelling.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.items import Array, String

from conformance.errors import BrokenBaseline, ConformanceError
from conformance.records.phrase import Phrase
from conformance.reports.gate.baseline import PLACES, TODO, Baseline, Entry, baseline_of, fits
from conformance.reports.gate.grouping import Group, condition_on, folders, groups
from conformance.reports.gate.judging import Cell, Judgement, agrees
from conformance.words import causes, say

WIDTH = 100


def propose(baseline: Baseline, found: Judgement, reason: str = "", *, adds: bool = True) -> str:
    """The text of the baseline by which the gate would hold, as far as that can be decided.

    What a narrowed run did not ask stays, and if anything was left open, nothing is removed. Of
    entries that contradict each other, only people can say which is right.

    Args:
        reason: for entries that have none.
        adds: whether new deviations become known.

    Raises:
        BrokenBaseline: the file cannot be edited.
    """
    edit = _Edit(baseline, found, reason)
    if found.answered:
        edit.remove()
        edit.narrow()
    if adds:
        edit.add()
    edit.fill_in()
    text = edit.text()
    baseline_of(baseline.path, text)
    return text


def write(path: Path, text: str) -> None:
    """Write a baseline as a whole or not at all."""
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
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error


@dataclass
class _Edit:
    baseline: Baseline
    found: Judgement
    reason: str
    removed: set[int] = field(default_factory=set)
    changed: dict[int, list[TOMLDocument]] = field(default_factory=dict)
    """What an entry becomes, by its number: one, or several."""
    new: list[TOMLDocument] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines = self.baseline.text.splitlines(keepends=True)
        self.unclear = {
            entry.number for one, two, _ in self.found.ambiguous for entry in (one, two)
        }
        told = self.found.record.header.implementations
        self.named = len(told) > 1 or any(e.implementation for e in self.baseline.entries)

    @property
    def _entries(self) -> Iterable[Entry]:
        """Entries whose fate can be decided."""
        for entry in self.baseline.entries:
            if entry.number in self.found.claimed and not {entry.number} & (
                self.removed | self.unclear
            ):
                yield entry

    def remove(self) -> None:
        """What nothing matches, or is said twice."""
        self.removed |= {entry.number for entry in self.found.unmatched}
        for one, two in self.found.duplicates:
            if {one.number, two.number} & (self.removed | self.unclear):
                continue
            own = [{*self.found.claimed[entry.number]} for entry in (one, two)]
            if own[1] <= own[0]:
                self.removed.add(two.number)
            elif own[0] < own[1]:
                self.removed.add(one.number)

    def narrow(self) -> None:
        """What claims more than is so."""
        for entry in list(self._entries):
            claimed = self.found.claimed[entry.number]
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
            names, others = ({_part(cell, place) for cell in own} for own in (rest, off))
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
        own = tomlkit.dumps(self._document(entry))
        several = []
        for group in groups(rest, self.found.decided, named=self.named):
            several.append(tomlkit.parse(own))
            _place(several[-1], group, _joined(entry, group.dtype))
        self.changed[entry.number] = several

    def add(self) -> None:
        """What is new."""
        left = [
            cell
            for cell in self.found.new
            if (entry := self.found.expected.get(cell)) is None
            or (self.found.answered and entry.number not in self.unclear)
        ]
        for group in groups(left, self.found.decided, named=self.named, exact=not self.found.whole):
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
        """Reasons that are missing."""
        for entry in self.found.reasonless:
            if entry.number in self.removed or (entry.reason.strip() and not self.reason):
                continue
            self._one(entry)
            for document in self.changed[entry.number]:
                _set(document, "reason", self.reason or TODO)

    def text(self) -> str:
        """The file with all of it done."""
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
        """The entry, to be changed."""
        return self.changed.setdefault(entry.number, [self._document(entry)])[0]

    def _document(self, entry: Entry) -> TOMLDocument:
        first, last = self._span(entry)
        return tomlkit.parse("".join(self.lines[first:last]))

    def _span(self, entry: Entry) -> tuple[int, int]:
        """Lines from its head to its last key; comments behind that are the next one's."""
        later = [other.line - 1 for other in self.baseline.entries if other.line > entry.line]
        first, last = max(entry.line - 1, 0), min(later, default=len(self.lines))
        while last > first and self.lines[last - 1].lstrip()[:1] in ("", "#"):
            last -= 1
        return first, last


def _part(cell: Cell, place: str) -> str:
    return cell.result.dtype if place == "dtype" else cell.part(place)


def _joined(entry: Entry, condition: str) -> str:
    """The condition of an entry, and one more."""
    if entry.condition is None or not condition:
        return condition or (entry.condition.text if entry.condition else "")
    if entry.condition.names == {"dtype"}:
        return condition
    own = entry.condition.text.strip()
    return f"({own}) and {condition}" if " or " in own else f"{own} and {condition}"


def _place(document: TOMLDocument, group: Group, condition: str) -> None:
    for name in PLACES:
        _set(document, name, list(group.patterns.get(name, ())))
    _set(document, "when", condition)


def _set(document: TOMLDocument, key: str, value: object) -> None:
    """Give a key its value; none, if that is empty. A comment behind it stays."""
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
    """What stands in a baseline for the arguments of a phrase, or for one of them."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _toml(own) for name, own in value.items()})
        return table
    if isinstance(value, list):
        items = tomlkit.array()
        items.extend([_toml(own) for own in value])
        return items
    if not isinstance(value, Phrase):
        return value
    return _toml({"id": value.id, "arguments": value.arguments}) if value.arguments else value.id


def _array(key: str, values: Sequence[str]) -> Array:
    array = tomlkit.array()
    array.extend(values)
    return array.multiline(len(f"{key} = {array.as_string()}") > WIDTH)


def _string(value: str) -> String:
    """Quoted so that it need not be escaped, where that can be."""
    return tomlkit.string(value, literal='"' in value and "'" not in value and value.isprintable())


def _written(document: TOMLDocument, end: str) -> str:
    return end.join(tomlkit.dumps(document).rstrip().splitlines())


def _close(lines: list[str], place: int) -> None:
    """Where an entry was: not two empty lines one after the other, and none at the end."""
    before = place == 0 or not lines[place - 1].strip()
    if place == len(lines):
        while lines and not lines[-1].strip():
            lines.pop()
    elif before and not lines[place].strip():
        del lines[place]
