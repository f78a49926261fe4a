"""Telling: what the gate found, for somebody who sees nothing but the log of a build."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Sequence

from rich.text import Text

from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import count, gravity
from conformance.reports.gate.baseline import Entry
from conformance.reports.gate.grouping import Group, groups
from conformance.reports.gate.judging import LOST, Cell, Judgement
from conformance.reports.gate.updating import propose
from conformance.reports.totals import reasons
from conformance.reports.wording import again, failure, measured, told
from conformance.text import printable

SHORT = 3
"""Of what is wrong in one way, so many are told unless all are asked for."""

EDIT = 20
"""Lines of the edit, likewise."""

GOOD, BAD, DIM = "green", "red", "dim"


def tell(found: Judgement, *, verbose: bool = False, judged: Sequence[str] = ()) -> Text:
    """One line that says how it stands; then what is worse, what is stale, and the edit.

    `judged` are the arguments by which `baseline update` judges the same without running it again.
    """
    text = Text()
    for line, style in _lines(found, verbose, judged):
        text.append(printable(line), style)
        text.append("\n")
    text.rstrip()
    return text


Line = tuple[str, str]


def _lines(found: Judgement, verbose: bool, judged: Sequence[str]) -> Iterator[Line]:
    yield _summary(found)
    if found.baseline.absence:
        yield found.baseline.absence, DIM
    if found.exit_code == ExitCode.OK and not verbose:
        return
    more = _More(found, verbose, judged)
    yield from more.new()
    yield from more.open()
    yield from more.stale()
    yield from more.edit()
    if verbose:
        yield from more.known()
        yield from more.unsupported()
    elif more.hidden:
        yield "-v shows all of it", DIM


def _summary(found: Judgement) -> Line:
    names = ", ".join(own.name for own in found.record.header.implementations)
    parts = [_many(len(found.known), "known deviation") if found.known else "nothing deviates"]
    if found.new:
        parts = [_many(len(found.new), "new deviation")]
        parts += [f"{len(found.known)} known"] if found.known else []
    stale = {entry.number for _, entry in found.to_edit}
    parts += [f"{_many(len(stale), 'entry', 'entries')} to edit"] if stale else []
    lost = len(found.open) + found.missing
    parts += [f"{lost} not verified"] if lost else []
    narrowed = found.record.header.provenance.selection
    counts = count(result.verdict for result in found.record.results)
    items = told(counts) if counts else ""
    parts = [", ".join(parts), f"items: {items}"] if items else told
    parts += [f"narrowed by {narrowed}"] if narrowed else []
    code = found.exit_code
    if code == ExitCode.NOTHING_VERIFIED:
        return f"gate: nothing was verified of {names}{f' (items: {items})' if items else ''}", BAD
    word = {
        ExitCode.OK: "holds",
        ExitCode.INCOMPLETE: "is incomplete",
    }.get(code, "changed for the worse" if found.worse else "the baseline is out of date")
    return f"gate: {names}: {word} ({'; '.join(parts)})", GOOD if code == ExitCode.OK else BAD


class _More:
    def __init__(self, found: Judgement, verbose: bool, judged: Sequence[str]) -> None:
        self.found = found
        self.verbose = verbose
        self.judged = judged
        self.hidden = False

    def _first(self, items: Sequence, one: str, several: str) -> Iterator:
        """The first few, and how many more there are."""
        shown = items if self.verbose else items[:SHORT]
        yield from shown
        if len(items) > len(shown):
            self.hidden = True
            left = len(items) - len(shown)
            yield f"  and {left} more {one if left == 1 else several}", DIM

    def new(self) -> Iterator[Line]:
        """What nobody knew of, the gravest first."""
        several = groups(self.found.new, self.found.decided, named=True)
        several.sort(key=lambda group: max(gravity(c.finding) for c in group.cells), reverse=True)
        for group in self._first(several, "kind of new deviation", "kinds of new deviations"):
            if isinstance(group, Group):
                yield from self._group(group)
            else:
                yield group

    def _group(self, group: Group) -> Iterator[Line]:
        cell = max(group.cells, key=lambda cell: gravity(cell.finding))
        finding, result = cell.finding, cell.result
        names = sorted({one.requirement for one in group.cells})
        who = sorted({one.result.implementation for one in group.cells})
        yield "", ""
        yield (
            f"new: {_listed(who)} {_does(finding.verdict)} at "
            f"{_many(len(group.cells), 'finding')}: {_listed(names)}",
            BAD,
        )
        where = ", ".join(self._where(group))
        if where:
            yield f"  {where}", ""
        expected = self.found.expected.get(cell)
        if expected is not None:
            known = expected.cause or expected.raises
            known += f" within {expected.within:.3g}σ" if expected.within < math.inf else ""
            told = f"{expected.verdict}{f', {known.strip()}' if known else ''}"
            yield f"  the entry at {expected.place} says otherwise: {told}", ""
        spec = next(
            (
                t.spec
                for t in self.found.record.header.implementations
                if t.name == result.implementation
            ),
            result.implementation,
        )
        if self.verbose:
            yield from (
                (f"  {line}", "")
                for line in failure(result, spec, self.found.record.header).splitlines()
            )
            return
        if finding.figures is not None:
            told = measured(finding.figures).removeprefix(f"{finding.figures.array}: ")
            yield f"  {result.case}: {finding.detail}: {told}", ""
        elif finding.detail:
            yield f"  {result.case}: {finding.detail}", ""
        if finding.cause:
            yield f"  likely cause: {finding.cause}", ""
        yield f"  again: {again(result, spec)}", DIM

    def _where(self, group: Group) -> Iterator[str]:
        """Of what it is so, if not of all: in words, and in numbers where the words are many."""
        for key in ("case", "mode"):
            patterns = group.patterns.get(key, ())
            without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
            if not patterns:
                continue
            if len(patterns) > SHORT and not self.verbose:
                self.hidden = True
                own = {cell.part(key) for cell in group.cells}
                every = {cell.part(key) for cell in self.found.decided} | own
                left = len(every) - len(own)
                yield (
                    f"in all {key}s but {left}"
                    if without
                    else f"in {len(own)} of {len(every)} {key}s"
                )
            elif without:
                yield f"in all {key}s but {', '.join(without)}"
            else:
                yield f"in {key}{'' if len(patterns) == 1 else 's'} {', '.join(patterns)}"
        if group.dtype:
            yield f"where {group.dtype}"

    def unsupported(self) -> Iterator[Line]:
        """Why items are unsupported."""
        for reason, times in reasons(self.found.record.results, ("unsupported",)).most_common():
            yield f"unsupported, {_many(times, 'item')}: {reason}", DIM

    def open(self) -> Iterator[Line]:
        """What has no answer."""
        found = self.found
        by_reason: dict[str, list[Cell]] = {}
        for cell in sorted(found.open, key=lambda cell: cell.finding.verdict not in LOST):
            key = f"{cell.finding.verdict}: {cell.finding.detail}"
            by_reason.setdefault(key, []).append(cell)
        if by_reason or found.missing:
            yield "", ""
        for reason, cells in self._first(list(by_reason.items()), "reason", "reasons"):
            if isinstance(cells, str):
                yield reason, cells
                continue
            yield f"not verified, {_many(len(cells), 'item')}: {reason}", BAD
            yield f"  such as {cells[0].result.id}", DIM
        if found.missing:
            yield f"not verified, {_many(found.missing, 'item')}: the record has no outcome", BAD
        if found.open and not found.worse:
            yield "  what could not be asked is never known; mend that, or narrow the run", DIM

    def stale(self) -> Iterator[Line]:
        """Which entries are wrong, and how."""
        lines = list(self._entries())
        if lines:
            yield "", ""
        yield from self._first(lines, "entry", "entries")

    def _entries(self) -> Iterator[Line]:
        found = self.found
        for entry, cells in found.fixed:
            of = len(found.claimed[entry.number])
            some = f"{len(cells)} of " if len(cells) < of else ""
            told = f"{some}{_many(of, 'finding')} no longer deviate"
            yield f"fixed: {entry.place}: {told}", BAD
        for entry in found.unmatched:
            yield f"unmatched: {entry.place}: {_why_unmatched(entry, found)}", BAD
        for one, two, cells in found.ambiguous:
            told = f"{_many(len(cells), 'finding')}, such as {cells[0].requirement} at "
            told += (
                f"{cells[0].result.case}, claimed by both, who say something else of it: narrow one"
            )
            yield f"ambiguous: {one.place}; and {two.place}: {told}", BAD
        for one, two in found.duplicates:
            yield f"duplicate: {two.place}: says again what {_line(one)} says", BAD
        for entry in found.reasonless:
            yield f'no reason: {entry.place}: say why it is known: reason = "..."', BAD

    def edit(self) -> Iterator[Line]:
        """What to write instead: all of it, or what is stale if something is wrong as well."""
        found = self.found
        if not (found.new or found.stale):
            return
        yield "", ""
        try:
            proposed = propose(found.baseline, found, adds=self.verbose or not found.worse)
        except ConformanceError as error:
            yield str(error), BAD
            return
        name = str(found.baseline.path)
        old, new = (text.splitlines() for text in (found.baseline.text, proposed))
        lines = list(difflib.unified_diff(old, new, name, name, lineterm="", n=1))
        shown = lines if self.verbose else lines[:EDIT]
        if shown:
            yield "the edit to make:", "bold"
        yield from map(coloured, shown)
        if len(lines) > len(shown):
            self.hidden = True
            yield f"and {_many(len(lines) - len(shown), 'more line')}", DIM
        command = ["mha-conformance", "baseline", "update"]
        command += self.judged or [told.spec for told in found.record.header.implementations]
        command += ["--baseline", name]
        if found.new:
            yield "to make the new deviations known, with their reason:", "bold"
            yield f"  {shlex.join(command)} --reason '...'", ""
        elif shown:
            yield f"written by: {shlex.join(command)}", DIM

    def known(self) -> Iterator[Line]:
        """Every entry that holds, with its reason."""
        wrong = {entry.number for _, entry in self.found.to_edit}
        for entry in self.found.baseline.entries:
            cells = self.found.claimed.get(entry.number)
            if entry.number in wrong:
                continue
            if cells is None:
                yield f"not asked here: {entry.place}", DIM
            else:
                yield f"known: {entry.place}: {_many(len(cells), 'finding')}", ""
                yield f"  {' '.join(filter(None, (entry.reason.strip(), entry.link)))}", DIM


def coloured(line: str) -> Line:
    """A line of a diff with its style."""
    return line, {"+": GOOD, "-": BAD}.get(line[:1], DIM)


def _why_unmatched(entry: Entry, found: Judgement) -> str:
    known = [item.id for item in found.record.header.requirements]
    for pattern in entry.requirement:
        if pattern in known or any(char in pattern for char in "*?[!"):
            continue
        near = difflib.get_close_matches(pattern, known, n=1)
        if near:
            return f"no requirement is called {pattern}; did you mean {near[0]}?"
    stem = [pattern.split(".")[0] for pattern in entry.requirement if "*" in pattern]
    for one in stem:
        chapters = sorted({name.split(".")[0] for name in known})
        near = difflib.get_close_matches(one, chapters, n=1)
        if near and one not in chapters:
            return f"no requirement begins with {one}; did you mean {near[0]}?"
    return "nothing that was decided is there"


def _does(verdict: str) -> str:
    return "raises an error" if verdict == "error" else verdict


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _line(entry: Entry) -> str:
    return f"line {entry.line}" if entry.line else f"entry {entry.number}"


def _many(count: int, word: str, several: str = "") -> str:
    return f"{count} {word if count == 1 else several or word + 's'}"
