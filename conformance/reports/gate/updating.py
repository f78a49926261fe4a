"""Edit a baseline so that it agrees with a run, and draft the new entries for it.

Each way in which an implementation deviates gets an entry, which claims (that is, matches by its
patterns and its condition) the findings that deviate in this way and no other finding of the run.
Requirements, or implementations, that would get the same entry share it. Only the lines of edited
entries are replaced in the file, so that everything between entries is preserved; within an entry,
tomlkit preserves comments and formatting.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from glob import escape
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit
from tomlkit import TOMLDocument

from conformance.errors import BrokenBaseline, ConformanceError
from conformance.records.findings import INFINITE, NOTHING, Phrase, without_place
from conformance.records.record import replace_file
from conformance.reports.gate.baseline import (
    PLACES,
    TODO,
    Baseline,
    BaselineEntry,
    baseline_of,
    fits,
)
from conformance.reports.gate.coverage import counts_after
from conformance.reports.gate.judging import Judgement, agrees, bound
from conformance.reports.tables import Located, by_key
from conformance.words import causes, say

Patterns = tuple[str, ...]

LEAST, MOST = 12, 120
"""The least length of a beginning by which several error texts are recognised together, and the
most characters that an entry quotes from an error text."""

FITTED = "factor"
"""The argument of causes that holds a fitted number, which differs from case to case."""

MOST_CAUSES = 2
"""The most causes that entries name for a requirement. If its findings have more, these depend on
the case, and entries for measured findings name none."""

WIDTH = 100
"""The length beyond which a list is written on several lines."""


class Kind(NamedTuple):
    """What an entry asserts about findings: their verdict, cause and part of an error's text.

    `apart` is a requirement whose findings need an entry of their own, or "". `bounded` is whether
    the entry bounds the size of their errors.
    """

    verdict: str
    cause: Phrase
    raises: str
    apart: str = ""
    bounded: bool = False


class Where(NamedTuple):
    """The cases, modes and dtypes in which an implementation violates a requirement.

    If `case` or `mode` is (), all cases or modes are meant.
    """

    case: Patterns
    mode: Patterns
    dtype: str
    """A condition on the dtype, or "" for every dtype."""


class Draft(NamedTuple):
    """An entry to write: what it asserts, where it applies, and the findings that it covers.

    `dtype` is a condition on the dtype, or ""; `patterns` are given by key, such as "case".
    """

    kind: Kind
    dtype: str
    patterns: dict[str, Patterns]
    cells: list[Located]


def drafts(
    cells: Iterable[Located], decided: Iterable[Located], *, named: bool, exact: bool = False
) -> list[Draft]:
    """Return drafts of entries that match the given findings and no others.

    Args:
        cells: the findings that the entries must match.
        decided: all findings of the run that entries could match.
        named: whether entries name the implementation.
        exact: whether to list every case, mode and dtype. This is needed if options restricted the
            run or it is incomplete, because such a run does not show which others exist.
    """
    around = by_key(decided, _asked)
    # Requirements that would get the same entry share it, and then implementations do.
    of_one: dict[tuple[str, Kind, Where], dict[str, list[Located]]] = defaultdict(dict)
    for (name, requirement), asked in by_key(cells, _asked).items():
        for kind, same in _kinds(asked).items():
            for where, claimed in _places(same, around[name, requirement], exact=exact):
                of_one[name, kind, where].setdefault(requirement, []).extend(claimed)
    alike = by_key(of_one, lambda key: (*key[1:], tuple(sorted(of_one[key]))))
    entries = []
    for (kind, where, requirements), keys in alike.items():
        patterns = {
            "implementation": _names({name for name, *_ in keys}) if named else (),
            "requirement": _names(requirements),
            "case": where.case,
            "mode": where.mode,
        }
        claimed = [cell for key in keys for same in of_one[key].values() for cell in same]
        entries.append(Draft(kind, where.dtype, patterns, claimed))
    return entries


def _asked(cell: Located) -> tuple[str, str]:
    return cell.result.implementation, cell.requirement


# The content of entries


def _kinds(cells: Sequence[Located]) -> dict[Kind, list[Located]]:
    """Group the findings of one requirement by what is wrong."""
    several = len({_cause(cell) for cell in cells}) > MOST_CAUSES
    raised = _raised({_text(cell) for cell in cells if cell.finding.verdict == "error"})

    def kind(cell: Located) -> Kind:
        finding = cell.finding
        if finding.verdict == "error":
            return Kind("error", NOTHING, raised[_text(cell)])
        cause = NOTHING if several and finding.figures else _cause(cell)
        # Without a cause and figures, each requirement needs a separate reason.
        apart = "" if cause or finding.figures else finding.requirement
        # A cause says by itself how large the error is; a NaN has no size.
        bounded = not cause and finding.figures and finding.figures.max_ratio < INFINITE
        return Kind(finding.verdict, cause, "", apart, bool(bounded))

    return by_key(cells, kind)


def _cause(cell: Located) -> Phrase:
    """Return the cause of a finding without the argument that differs from case to case."""
    cause = cell.finding.cause
    return Phrase(cause.id, {k: v for k, v in cause.arguments.items() if k != FITTED})


def _text(cell: Located) -> str:
    return without_place(cell.finding.detail) or cell.finding.detail


def _raised(texts: Collection[str]) -> dict[str, str]:
    """Return, for each error text, the part by which to recognise it.

    For texts that differ only in numbers, this is their common beginning, if it is long enough.
    """
    recognised = {}
    for same in by_key(texts, lambda text: re.sub(r"\d+", "#", text)).values():
        # These are texts, not paths.
        shared = commonprefix(same).rpartition(" ")[0] if len(same) > 1 else ""  # noqa: RUF071
        begins = _readable(shared)
        for text in same:
            recognised[text] = begins if len(begins) >= LEAST else _readable(text)
    return recognised


def _readable(text: str) -> str:
    """Return the longest printable part of a text, up to `MOST` characters."""
    readable = "".join(char if char.isprintable() else "\n" for char in text).split("\n")
    return max(readable, key=len)[:MOST].strip()


# The places of entries


def _places(
    cells: Sequence[Located], decided: Sequence[Located], *, exact: bool
) -> list[tuple[Where, list[Located]]]:
    """Return the places where findings of one requirement deviate, each with its findings.

    Cases that deviate in the same modes and dtypes share a place.
    """
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
        # Only these modes and dtypes of other cases could be matched by mistake.
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


def _dtypes(cells: Iterable[Located]) -> dict[str, dict[str, set[str]]]:
    """Return the dtypes of findings, by case and mode."""
    dtypes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for cell in cells:
        dtypes[cell.result.case][cell.result.mode].add(cell.result.dtype)
    return dtypes


def _names(names: Iterable[str]) -> Patterns:
    return tuple(sorted(map(escape, names)))


def condition_on(names: Collection[str], others: Collection[str]) -> str:
    """Return a condition that is true for dtypes in `names` and false for those in `others`."""
    if len(names) == 1:
        return f'dtype == "{min(names)}"'
    if len(others) == 1:
        return f'dtype != "{min(others)}"'
    listed = ", ".join(f'"{name}"' for name in sorted(names))
    return f"dtype in ({listed})"


def cover(names: Collection[str], others: Collection[str]) -> Patterns:
    """Return patterns that match the cases `names` and none of `others`; () if `others` is empty.

    A folder whose cases are all wanted becomes one pattern. If fewer patterns are needed to exclude
    the others ("!pattern"), the result is these exclusions.
    """
    if not others:
        return ()
    wanted, unwanted = folders(names, others), folders(others, names)
    if len(unwanted) < len(wanted):
        return tuple(f"!{pattern}" for pattern in unwanted)
    return wanted


def folders(names: Collection[str], others: Collection[str]) -> Patterns:
    """Return patterns that match the cases `names` and none of `others`, without exclusions."""
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


def propose(
    baseline: Baseline, judgement: Judgement, reason: str = "", *, adds: bool = True
) -> str:
    """Return the text of the baseline edited so that the gate holds, as far as possible.

    Entries about what options left out of the run are kept. If a selected item has no outcome, no
    entry is removed or restricted. Entries that contradict each other are kept too, because only
    people can decide which one is right.

    Args:
        baseline: the baseline to edit.
        judgement: the judgement on a run with this baseline.
        reason: the reason for entries that have none.
        adds: whether to add entries for new deviations.

    Raises:
        BrokenBaseline: if the file cannot be edited.
    """
    edit = _Edit(baseline, judgement, reason)
    if judgement.answered:
        edit.remove()
        edit.narrow()
        edit.tighten()
    if adds:
        edit.add()
    edit.fill_in()
    text = edit.text()
    baseline_of(baseline.path, text)
    return text


def write(path: Path, text: str) -> None:
    """Write a baseline atomically; raises `ConformanceError` if that fails."""
    # Preserve a symbolic link, which may point to another file system.
    target = path.resolve()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode if target.exists() else 0o644
        replace_file(target, text.encode())
        target.chmod(mode)
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be written ({error.strerror})") from error


class _Edit:
    """The edits of a file so far: replacements of entries, by number, and new entries."""

    def __init__(self, baseline: Baseline, judgement: Judgement, reason: str) -> None:
        self.baseline, self.judgement, self.reason = baseline, judgement, reason
        self.replaced: dict[int, list[TOMLDocument]] = {}
        self.new: list[TOMLDocument] = []
        self.lines = baseline.text.splitlines(keepends=True)
        self.unclear = {entry.number for *pair, _ in judgement.ambiguous for entry in pair}
        several = len(judgement.record.header.implementations) > 1
        self.named = several or any(entry.implementation for entry in baseline.entries)

    def remove(self) -> None:
        """Remove entries that match nothing, and superfluous duplicates.

        Of two duplicates, one is removed if the other matches all of its findings, unless one of
        the two contradicts some entry.
        """
        for entry in self.judgement.unmatched:
            self.replaced[entry.number] = []
        for pair in self.judgement.duplicates:
            if {entry.number for entry in pair} & (self.replaced.keys() | self.unclear):
                continue
            first, second = ({*self.judgement.claimed[entry.number]} for entry in pair)
            if second <= first:
                self.replaced[pair[1].number] = []
            elif first < second:
                self.replaced[pair[0].number] = []

    def narrow(self) -> None:
        """Restrict or remove entries that match findings with which they do not agree.

        An entry that is not strict may match findings that do not deviate, unless it excuses far
        more than deviates. Entries that contradict each other are left unchanged.
        """
        broad = {entry.number for entry, _ in self.judgement.broad}
        for entry in self.baseline.entries:
            claimed = self.judgement.claimed.get(entry.number, ())
            if entry.number in self.replaced.keys() | self.unclear:
                continue
            rest = [cell for cell in claimed if agrees(entry, cell.finding)]
            off = [
                cell
                for cell in claimed
                if not agrees(entry, cell.finding)
                and (cell.wrong or entry.strict or (entry.number in broad and not entry.within))
            ]
            if claimed and not rest:
                self.replaced[entry.number] = []
            elif off:
                self._narrow(entry, rest, off)

    def tighten(self) -> None:
        """Replace the bounds that are far above what was measured."""
        for entry, _ in self.judgement.broad:
            if entry.within is None or entry.number in self.unclear:
                continue
            claimed = self.judgement.claimed[entry.number]
            right = [cell for cell in claimed if agrees(entry, cell.finding)]
            documents = self.replaced.setdefault(entry.number, [self._document(entry)])
            for document in documents:
                _set(document, "within", tomlkit.value(bound(right)))

    def _narrow(
        self, entry: BaselineEntry, rest: Sequence[Located], off: Sequence[Located]
    ) -> None:
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
            document = self._document(entry)
            _set(document, "when" if place == "dtype" else place, value)
            self.replaced[entry.number] = [document]
            return
        # No single key separates the findings, so several entries replace this one.
        several = self.replaced[entry.number] = []
        for draft in drafts(rest, self.judgement.decided, named=self.named):
            several.append(self._document(entry))
            _place(several[-1], draft, _joined(entry, draft.dtype))

    def add(self) -> None:
        """Add entries for new deviations.

        A deviation that an existing entry matches is left out if that entry cannot be restricted,
        because not everything was verified or because it contradicts another entry.
        """
        left = [
            cell
            for cell in self.judgement.new
            if (entry := self.judgement.expected.get(cell)) is None
            or (self.judgement.answered and entry.number not in self.unclear)
        ]
        exact = not self.judgement.whole
        for draft in drafts(left, self.judgement.decided, named=self.named, exact=exact):
            document = tomlkit.parse("[[known]]\n")
            _place(document, draft, draft.dtype)
            cause = draft.kind.cause
            is_id = cause.id in causes()
            _set(document, "verdict", draft.kind.verdict)
            _set(document, "cause", cause.id if is_id else say(cause))
            _set(document, "arguments", _toml(cause.arguments) if is_id else None)
            if draft.kind.bounded:
                _set(document, "within", tomlkit.value(bound(draft.cells)))
            _set(document, "raises", draft.kind.raises)
            _set(document, "reason", self.reason or TODO)
            self.new.append(document)

    def fill_in(self) -> None:
        """Fill in missing reasons, with `TODO` if no reason was given.

        A text that begins with "TODO" is not a reason, but is replaced only by a given reason.
        """
        for entry in self.judgement.reasonless:
            if entry.reason.strip() and not self.reason:
                continue
            if entry.number not in self.replaced:
                self.replaced[entry.number] = [self._document(entry)]
            for document in self.replaced[entry.number]:
                _set(document, "reason", self.reason or TODO)

    def text(self) -> str:
        """Return the text of the file with all edits applied.

        Raises:
            BrokenBaseline: if there are edits, but the line of an entry is unknown.
        """
        if (self.replaced or self.new) and any(not entry.line for entry in self.baseline.entries):
            raise BrokenBaseline(
                f"{self.baseline.path}: can be edited only if each entry begins with [[known]] "
                "on a line of its own"
            )
        lines = list(self.lines)
        end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        for entry in reversed(self.baseline.entries):
            if entry.number not in self.replaced:
                continue
            first, last = self._span(entry)
            if several := [_written(one, end) for one in self.replaced[entry.number]]:
                lines[first:last] = [(end * 2).join(several) + end]
            else:
                del lines[first:last]
                _close(lines, first)
        text = "".join(lines)
        for document in self.new:
            text += end if text and not text.endswith("\n") else ""
            text += (end if text.strip() else "") + _written(document, end) + end
        return text

    def _document(self, entry: BaselineEntry) -> TOMLDocument:
        first, last = self._span(entry)
        return tomlkit.parse("".join(self.lines[first:last]))

    def _span(self, entry: BaselineEntry) -> tuple[int, int]:
        """Return the range of lines of an entry, from its head to its last key.

        Comments after that belong to the next entry.
        """
        later = [other.line - 1 for other in self.baseline.entries if other.line > entry.line]
        first = max(entry.line - 1, 0)
        last = min([*later, counts_after(self.lines, first)])
        while last > first and self.lines[last - 1].lstrip()[:1] in ("", "#"):
            last -= 1
        return first, last


def _joined(entry: BaselineEntry, condition: str) -> str:
    """Return an entry's condition joined with `condition` by "and".

    If the entry's condition is about the dtype alone, `condition` replaces it. If one of the two is
    missing, the other is returned.
    """
    if entry.condition is None or not condition:
        return condition or (entry.condition.text if entry.condition else "")
    if entry.condition.names == {"dtype"}:
        return condition
    first = entry.condition.text.strip()
    return f"({first}) and {condition}" if " or " in first else f"{first} and {condition}"


def _place(document: TOMLDocument, draft: Draft, condition: str) -> None:
    for name in PLACES:
        _set(document, name, list(draft.patterns[name]))
    _set(document, "when", condition)


def _set(document: TOMLDocument, key: str, value: object) -> None:
    """Set a key of the document's entry, keeping a comment on its line.

    Without a value, remove the key and the comment.
    """
    table: Any = document["known"][0]  # type: ignore[index]
    if not value:
        table.pop(key, None)
        return
    if isinstance(value, list):
        array = tomlkit.array()
        array.extend(value)
        is_long = len(f"{key} = {array.as_string()}") > WIDTH
        value = value[0] if len(value) == 1 else array.multiline(is_long)
    if isinstance(value, str):
        # A literal string needs no escapes.
        is_literal = '"' in value and "'" not in value and value.isprintable()
        value = tomlkit.string(value, literal=is_literal)
    table[key] = value


def _toml(value: Any) -> Any:
    """Return the arguments of a phrase as a TOML table, or one argument as a TOML value."""
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


def _written(document: TOMLDocument, end: str) -> str:
    return end.join(tomlkit.dumps(document).rstrip().splitlines())


def _close(lines: list[str], place: int) -> None:
    """Remove the empty lines that an entry leaves behind that was removed at the index `place`.

    They are one of two that now follow each other, or all at the end if nothing follows the entry.
    """
    before = place == 0 or not lines[place - 1].strip()
    if place == len(lines):
        while lines and not lines[-1].strip():
            lines.pop()
    elif before and not lines[place].strip():
        del lines[place]
