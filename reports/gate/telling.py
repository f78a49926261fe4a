"""Print the outcome of the gate, for a reader who sees only the log of a build."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import count, gravity
from conformance.records.record import Record
from conformance.reports.gate.baseline import Baseline, Entry, baseline_of
from conformance.reports.gate.judging import LOST, Judgement, judge
from conformance.reports.gate.updating import Group, groups, propose, write
from conformance.reports.totals import by_key, reasons
from conformance.reports.wording import again, counts_text, failure, measured
from conformance.text import plural, printable, some
from conformance.words import say

SHORT = 3
"""How many of each kind are shown unless all are asked for."""

EDIT = 20
"""How many lines of the edit are shown, likewise."""

GOOD, BAD, DIM = "green", "red", "dim"

T = TypeVar("T")


def gate(judgement: Judgement, judged: Sequence[str], *, verbose: bool) -> int:
    """Print how a record was judged; `judged` are the arguments that named it."""
    Console(highlight=False).print(tell(judgement, verbose=verbose, judged=judged), soft_wrap=True)
    return judgement.exit_code


def update(baseline: Baseline, record: Record, reason: str, judged: Sequence[str] = ()) -> int:
    """Edit a baseline so that the gate holds; 0 if it does, or would with reasons.

    `judged` are the arguments that named the record, if it stays.
    """
    console = Console(highlight=False)
    judgement = judge(baseline, record)
    if judgement.exit_code == ExitCode.NOTHING_VERIFIED:
        console.print(tell(judgement, judged=judged), soft_wrap=True)
        return judgement.exit_code
    text = propose(baseline, judgement, reason)
    if text != baseline.text:
        write(baseline.path, text)
        old, new = baseline.text.splitlines(), text.splitlines()
        for line in list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]:
            console.print(Text(printable(line), _colour(line)), soft_wrap=True)
    edited = baseline_of(baseline.path, text)
    left = judge(edited, record)
    done = "written" if text != baseline.text else "nothing to edit"
    console.print(Text(printable(f"{baseline.path}: {done}")), soft_wrap=True)
    if left.holds and not edited.entries:
        console.print("nothing deviates: the baseline is empty", soft_wrap=True)
    if left.reasonless and not (left.fixed or left.unmatched or left.ambiguous or left.duplicates):
        lines = ", ".join(str(entry.line or entry.number) for entry in left.reasonless)
        console.print(f"the gate holds once these say why: line {lines}", soft_wrap=True)
        return ExitCode.OK if not (left.worse or left.open or left.missing) else left.exit_code
    if not left.holds:
        console.print(tell(left, judged=judged), soft_wrap=True)
    return left.exit_code


def tell(judgement: Judgement, *, verbose: bool = False, judged: Sequence[str] = ()) -> Text:
    """Return a summary in one line; then what is worse, what is out of date, and the edit.

    `judged` are the arguments by which `baseline update` judges the same without running it again.
    """
    return _Log(judgement, verbose, judged).text


class _Log:
    def __init__(self, judgement: Judgement, verbose: bool, judged: Sequence[str]) -> None:
        self.judgement = judgement
        self.verbose = verbose
        self.hidden = False
        self.text = Text()
        self._summary()
        if judgement.baseline.absence:
            self._line(judgement.baseline.absence, DIM)
        if judgement.exit_code != ExitCode.OK or verbose:
            self._new()
            self._open()
            self._stale()
            self._edit(judged)
            if verbose:
                self._known()
                for reason, times in reasons(
                    judgement.record.results, ("unsupported",)
                ).most_common():
                    self._line(f"unsupported, {plural(times, 'item')}: {reason}", DIM)
            elif self.hidden:
                self._line("-v shows all of it", DIM)
        self.text.rstrip()

    def _line(self, line: str, style: str = "") -> None:
        self.text.append(printable(line), style)
        self.text.append("\n")

    def _first(self, items: Sequence[T], one: str, several: str) -> Iterator[T]:
        """Yield the first few lines, and one line that counts the others."""
        shown = items if self.verbose else items[:SHORT]
        yield from shown
        if len(items) > len(shown):
            self.hidden = True
            self._line(
                f"  and {plural(len(items) - len(shown), f'more {one}', f'more {several}')}", DIM
            )

    def _summary(self) -> None:
        found = self.judgement
        names = ", ".join(one.name for one in found.record.header.implementations)
        counts = count(result.verdict for result in found.record.results)
        items = f"items: {counts_text(counts)}" if counts else ""
        code = found.exit_code
        if code == ExitCode.NOTHING_VERIFIED:
            more = f" ({items})" if items else ""
            self._line(f"gate: nothing was verified of {names}{more}", BAD)
            return
        parts = [plural(len(found.known), "known deviation") if found.known else "nothing deviates"]
        if found.new:
            parts = [plural(len(found.new), "new deviation")]
            parts += [f"{len(found.known)} known"] if found.known else []
        stale = {entry.number for _, entry in found.to_edit}
        parts += [f"{plural(len(stale), 'entry', 'entries')} to edit"] if stale else []
        lost = len(found.open) + found.missing
        parts += [f"{lost} not verified"] if lost else []
        narrowed = found.record.header.provenance.selection
        whole = [", ".join(parts), items, f"narrowed by {narrowed}" if narrowed else ""]
        word = {ExitCode.OK: "holds", ExitCode.INCOMPLETE: "is incomplete"}.get(
            code, "changed for the worse" if found.worse else "the baseline is out of date"
        )
        style = GOOD if code == ExitCode.OK else BAD
        self._line(f"gate: {names}: {word} ({'; '.join(filter(None, whole))})", style)

    def _new(self) -> None:
        """Print the deviations that no entry covers, the worst first."""
        several = groups(self.judgement.new, self.judgement.decided, named=True)
        several.sort(key=lambda group: max(gravity(c.finding) for c in group.cells), reverse=True)
        for group in self._first(several, "kind of new deviation", "kinds of new deviations"):
            self._group(group)

    def _group(self, group: Group) -> None:
        cell = max(group.cells, key=lambda cell: gravity(cell.finding))
        finding, result, header = cell.finding, cell.result, self.judgement.record.header
        requirements = sorted({one.requirement for one in group.cells})
        names = sorted({one.result.implementation for one in group.cells})
        does = "raises an error" if finding.verdict == "error" else finding.verdict
        times = plural(len(group.cells), "finding")
        self._line("")
        self._line(f"new: {some(names, 3)} {does} at {times}: {some(requirements, 3)}", BAD)
        if where := ", ".join(self._where(group)):
            self._line(f"  {where}")
        if expected := self.judgement.expected.get(cell):
            details = [expected.cause or expected.raises]
            details += [f"within {expected.within:.3g}σ"] if expected.within < math.inf else []
            entry = ", ".join(filter(None, [expected.verdict, " ".join(filter(None, details))]))
            self._line(f"  the entry at {expected.place} says otherwise: {entry}")
        specs = {one.name: one.spec for one in header.implementations}
        spec = specs.get(result.implementation, result.implementation)
        if self.verbose:
            for line in failure(result, spec, header).splitlines():
                self._line(f"  {line}")
            return
        if finding.figures is not None:
            size = measured(finding.figures).removeprefix(f"{finding.figures.array}: ")
            self._line(f"  {result.case}: {finding.detail}: {size}")
        elif finding.detail:
            self._line(f"  {result.case}: {finding.detail}")
        if finding.cause:
            self._line(f"  likely cause: {say(finding.cause)}")
        self._line(f"  again: {again(result, spec)}", DIM)

    def _where(self, group: Group) -> Iterator[str]:
        """Yield where a deviation occurs, if not everywhere: patterns, or counts if many."""
        for key in ("case", "mode"):
            patterns = group.patterns.get(key, ())
            without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
            if len(patterns) > SHORT and not self.verbose:
                self.hidden = True
                names = {cell.part(key) for cell in group.cells}
                every = {cell.part(key) for cell in self.judgement.decided} | names
                but = f"in all {key}s but {len(every) - len(names)}"
                yield but if without else f"in {len(names)} of {len(every)} {key}s"
            elif without:
                yield f"in all {key}s but {', '.join(without)}"
            elif patterns:
                yield f"in {key if len(patterns) == 1 else key + 's'} {', '.join(patterns)}"
        if group.dtype:
            yield f"where {group.dtype}"

    def _open(self) -> None:
        """Print the items that have no answer."""
        found = self.judgement
        by_reason = by_key(
            sorted(found.open, key=lambda cell: cell.finding.verdict not in LOST),
            lambda cell: f"{cell.finding.verdict}: {cell.finding.detail}",
        )
        if by_reason or found.missing:
            self._line("")
        for reason, cells in self._first(list(by_reason.items()), "reason", "reasons"):
            self._line(f"not verified, {plural(len(cells), 'item')}: {reason}", BAD)
            self._line(f"  such as {cells[0].result.id}", DIM)
        if found.missing:
            missing = plural(found.missing, "item")
            self._line(f"not verified, {missing}: the record has no outcome", BAD)
        if found.open and not found.worse:
            self._line("  what could not be asked is never known; fix that, or narrow the run", DIM)

    def _stale(self) -> None:
        """Print which entries are wrong, and how."""
        lines = list(self._entries())
        if lines:
            self._line("")
        for line in self._first(lines, "entry", "entries"):
            self._line(line, BAD)

    def _entries(self) -> Iterator[str]:
        found = self.judgement
        for entry, cells in found.fixed:
            every = len(found.claimed[entry.number])
            part = f"{len(cells)} of " if len(cells) < every else ""
            yield f"fixed: {entry.place}: {part}{plural(every, 'finding')} no longer deviate"
        for entry in found.unmatched:
            yield f"unmatched: {entry.place}: {_why_unmatched(entry, found)}"
        for one, two, cells in found.ambiguous:
            first = f"{cells[0].requirement} at {cells[0].result.case}"
            yield (
                f"ambiguous: {one.place}; and {two.place}: {plural(len(cells), 'finding')}, such "
                f"as {first}, claimed by both, who say something else of it: narrow one"
            )
        for one, two in found.duplicates:
            yield f"duplicate: {two.place}: says again what {one.address} says"
        for entry in found.reasonless:
            yield f'no reason: {entry.place}: say why it is known: reason = "..."'

    def _edit(self, judged: Sequence[str]) -> None:
        """Print the edit; if something is wrong as well, only the edit of outdated entries."""
        found = self.judgement
        if not (found.new or found.to_edit):
            return
        self._line("")
        try:
            proposed = propose(found.baseline, found, adds=self.verbose or not found.worse)
        except ConformanceError as error:
            self._line(str(error), BAD)
            return
        name = str(found.baseline.path)
        old, new = (text.splitlines() for text in (found.baseline.text, proposed))
        lines = list(difflib.unified_diff(old, new, name, name, lineterm="", n=1))
        shown = lines if self.verbose else lines[:EDIT]
        if shown:
            self._line("the edit to make:", "bold")
        for line in shown:
            self._line(line, _colour(line))
        if len(lines) > len(shown):
            self.hidden = True
            self._line(f"and {plural(len(lines) - len(shown), 'more line')}", DIM)
        command = ["mha-conformance", "baseline", "update"]
        command += judged or [one.spec for one in found.record.header.implementations]
        command += ["--baseline", name]
        if found.new:
            self._line("to make the new deviations known, with their reason:", "bold")
            self._line(f"  {shlex.join(command)} --reason '...'")
        elif shown:
            self._line(f"written by: {shlex.join(command)}", DIM)

    def _known(self) -> None:
        """Print every entry that holds, with its reason."""
        wrong = {entry.number for _, entry in self.judgement.to_edit}
        for entry in self.judgement.baseline.entries:
            cells = self.judgement.claimed.get(entry.number)
            if entry.number in wrong:
                continue
            if cells is None:
                self._line(f"not asked here: {entry.place}", DIM)
            else:
                self._line(f"known: {entry.place}: {plural(len(cells), 'finding')}")
                self._line(f"  {' '.join(filter(None, (entry.reason.strip(), entry.link)))}", DIM)


def _colour(line: str) -> str:
    """Return the style of a line of a diff."""
    return {"+": GOOD, "-": BAD}.get(line[:1], DIM)


def _why_unmatched(entry: Entry, judgement: Judgement) -> str:
    known = [item.id for item in judgement.record.header.requirements]
    chapters = sorted({name.partition(".")[0] for name in known})
    for pattern in entry.requirement:
        stem = pattern.partition(".")[0]
        literal = pattern not in known and not any(char in pattern for char in "*?[!")
        if literal and (near := difflib.get_close_matches(pattern, known, n=1)):
            return f"no requirement is called {pattern}; did you mean {near[0]}?"
        abroad = "*" in pattern and stem not in chapters
        if abroad and (near := difflib.get_close_matches(stem, chapters, n=1)):
            return f"no requirement begins with {stem}; did you mean {near[0]}?"
    return "nothing that was decided is there"
