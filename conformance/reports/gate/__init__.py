"""The gate: compare the deviations that a run found with those that are known.

A baseline lists the known deviations, each with its reason. The gate holds if exactly these are
found, everything was verified, and the counts and conventions stored in the baseline still hold. A
further deviation is a change for the worse. If a known deviation is no longer found, its entry has
to be removed, because otherwise it would excuse the same deviation if that comes back.

This module prints the outcome for a reader who sees only the log of a build.
"""

from __future__ import annotations

import difflib
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
from rich.console import Console
from rich.text import Text

from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import CaseResult, gravity
from conformance.records.record import Record
from conformance.reports.gate.baseline import Baseline, BaselineEntry, baseline_of
from conformance.reports.gate.coverage import Promise, raised, repinned
from conformance.reports.gate.judging import LOST, Judgement, judge
from conformance.reports.gate.updating import Draft, drafts, propose, write
from conformance.reports.tables import Group, by_key, item_counts, reasons
from conformance.reports.wording import again, counts_text, failure, measured
from conformance.text import line, plural, printable, some
from conformance.words import say

SHORT, EDIT = 3, 20
"""How many items of each list, and how many lines of the edit, are shown unless verbose."""

MOST_LOST = 8
"""How many chapters, cases and requirements that lost something are named unless verbose."""

GOOD, BAD, DIM = "green", "red", "dim"

T = TypeVar("T")


def gate(judgement: Judgement, judged: Sequence[str], *, verbose: bool) -> int:
    """Print the judgement on a record and return the exit code.

    `judged` are the command-line arguments that named the record.
    """
    Console(highlight=False).print(tell(judgement, verbose=verbose, judged=judged), soft_wrap=True)
    return judgement.exit_code


class NewDeviation(msgspec.Struct, frozen=True):
    """Findings that no entry of the baseline covers and that a single new entry would cover.

    Attributes:
        findings: the number of these findings.
        cases, dtypes, modes: those in which the findings were made.
        case, detail: the case and the message of the worst of these findings.
        ratio: the largest error of the worst finding in units of the noise, or None if it was not
            measured.
        cause: the known mistake that explains the worst finding, or "".
        command: the command that runs only the item of the worst finding.
        expected: the place of the entry whose patterns match the worst finding but which expects
            another deviation, or "".
    """

    implementations: list[str]
    requirements: list[str]
    verdict: str
    findings: int
    cases: list[str]
    dtypes: list[str]
    modes: list[str]
    case: str
    detail: str
    ratio: float | None
    cause: str
    command: str
    expected: str


class OutdatedEntry(msgspec.Struct, frozen=True):
    """An entry of the baseline that needs to be edited.

    `why` is "fixed", "unmatched", "ambiguous", "duplicate", "too broad" or "no reason", and `told`
    explains it. `line` is 0 if unknown, and `entry` says where the entry is and what it applies to.
    """

    why: str
    line: int
    entry: str
    told: str


class Gate(msgspec.Struct, frozen=True):
    """The output of `gate --format json`.

    Attributes:
        known: the number of deviations that agree with the baseline.
        less: lines about chapters of cases in which less was verified than the baseline requires,
            and about promises that are weaker than it says.
        changed: lines about conventions that differ from those pinned in the baseline, or that are
            still to be pinned.
        open: reasons why findings are not verified, each with the number of these findings.
        missing: the number of planned items for which the record has no outcome.
    """

    schema: str
    baseline: str
    holds: bool
    exit_code: int
    implementations: list[str]
    items: dict[str, int]
    known: int
    new: list[NewDeviation]
    outdated: list[OutdatedEntry]
    less: list[str]
    changed: list[str]
    open: dict[str, int]
    missing: int


def answer(judgement: Judgement) -> Gate:
    """Return the judgement on a record in machine-readable form."""
    new = []
    for _, group in _kinds(judgement):
        finding, result = group.worst.finding, group.worst.result
        expected = judgement.expected.get(group.worst)
        deviation = NewDeviation(
            implementations=_named(group, "implementation"),
            requirements=_named(group, "requirement"),
            verdict=finding.verdict,
            findings=len(group),
            cases=group.cases,
            dtypes=group.dtypes,
            modes=group.modes,
            case=result.case,
            detail=finding.detail,
            ratio=finding.figures.max_ratio if finding.figures else None,
            cause=say(finding.cause),
            command=again(result, _spec(judgement, result)),
            expected=expected.place if expected else "",
        )
        new.append(deviation)
    return Gate(
        schema="mha-conformance/gate/1",
        baseline=str(judgement.baseline.path),
        holds=judgement.holds,
        exit_code=judgement.exit_code,
        implementations=[one.name for one in judgement.record.header.implementations],
        items=item_counts(judgement.record.results),
        known=len(judgement.known),
        new=new,
        outdated=[
            OutdatedEntry(why, entry.line, entry.place, told)
            for why, entry, told in _outdated(judgement)
        ],
        less=[
            f"{one.implementation} at {one.place}: {one.chapter} {one.verified} of {one.expected}"
            for one in judgement.less
        ]
        + [f"{one.implementation} on {one.device}: {_promise(one)}" for one in judgement.withdrawn],
        changed=[
            f"{one.implementation}, {one.experiment}: {one.subject}: {one.pinned}, now {one.now}"
            for one in judgement.changed
        ],
        open=dict(
            Counter(f"{one.finding.verdict}: {one.finding.detail}" for one in judgement.open)
        ),
        missing=judgement.missing,
    )


def update(
    baseline: Baseline,
    record: Record,
    reason: str,
    judged: Sequence[str] = (),
    *,
    allow_less: bool = False,
) -> int:
    """Edit a baseline so that the gate holds if possible, print the edit, and return an exit code.

    The exit code is 0 if the gate holds after the edit, or will hold once all entries have reasons.
    If nothing was verified, the baseline is not edited. `judged` are the command-line arguments
    that named the record, or () if there were none; `reason` is for entries that have no reason. If
    `allow_less` is true, the numbers of what was verified are lowered where less was.

    Raises:
        ConformanceError: if the baseline cannot be edited or written.
    """
    console = Console(highlight=False)
    judgement = judge(baseline, record)
    if judgement.exit_code == ExitCode.NOTHING_VERIFIED:
        console.print(tell(judgement, judged=judged), soft_wrap=True)
        return judgement.exit_code
    text = raised(propose(baseline, judgement, reason), record, allow_less=allow_less)
    text = repinned(text, baseline.pinned, record)
    if text != baseline.text:
        write(baseline.path, text)
        old, new = baseline.text.splitlines(), text.splitlines()
        for row in list(difflib.unified_diff(old, new, lineterm="", n=1))[2:]:
            line(console, row, style=_colour(row))
    edited = baseline_of(baseline.path, text)
    left = judge(edited, record)
    done = "written" if text != baseline.text else "nothing to edit"
    line(console, f"{baseline.path}: {done}")
    if left.holds and not (edited.entries or edited.verified or edited.promised or edited.pinned):
        line(console, "nothing deviates: the baseline is empty")
    others = (left.fixed, left.unmatched, left.ambiguous, left.duplicates, left.broad)
    if left.reasonless and not any(others):
        lines = ", ".join(str(entry.line or entry.number) for entry in left.reasonless)
        line(console, f"the gate holds once these say why: line {lines}")
        return ExitCode.OK if not (left.worse or left.open or left.missing) else left.exit_code
    if not left.holds:
        console.print(tell(left, judged=judged), soft_wrap=True)
    return left.exit_code


def tell(judgement: Judgement, *, verbose: bool = False, judged: Sequence[str] = ()) -> Text:
    """Return a one-line summary, then what is worse, unverified or outdated, and the edit to make.

    If the gate holds and `verbose` is not set, return only the summary, with one more line if there
    is no baseline file. `judged` are the arguments with which `baseline update` judges the same
    record without another run; they are part of the suggested command.
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
        self._gained()
        if judgement.exit_code != ExitCode.OK or verbose:
            self._new()
            self._less()
            self._withdrawn()
            self._changed()
            self._open()
            self._stale()
            self._edit(judged)
            if verbose:
                self._known()
                unsupported = reasons(judgement.record.results, ("unsupported",))
                for reason, times in unsupported.most_common():
                    self._line(f"unsupported, {plural(times, 'item')}: {reason}", DIM)
            elif self.hidden:
                self._line("-v shows all of it", DIM)
        self.text.rstrip()

    def _line(self, line: str, style: str = "") -> None:
        # A line feed in a name would begin a new line, which could be a command such as ::error::.
        self.text.append(printable(line).replace("\n", "\\n"), style)
        self.text.append("\n")

    def _first(self, items: Sequence[T], one: str, several: str) -> Iterator[T]:
        """Yield the first few items, or all if verbose, and print how many others there are.

        `one` and `several` are the singular and the plural of what the items are called.
        """
        shown = items if self.verbose else items[:SHORT]
        yield from shown
        if len(items) > len(shown):
            self.hidden = True
            self._line(
                f"  and {plural(len(items) - len(shown), f'more {one}', f'more {several}')}", DIM
            )

    def _summary(self) -> None:
        judgement, header = self.judgement, self.judgement.record.header
        names = some([one.name for one in header.implementations], 4)
        counts = item_counts(judgement.record.results)
        items = f"items: {counts_text(counts)}" if counts else ""
        code = judgement.exit_code
        if code == ExitCode.NOTHING_VERIFIED:
            more = f" ({items})" if items else ""
            nothing = ", ".join(judgement.unverified) or names
            self._line(f"gate: nothing was verified of {nothing}{more}", BAD)
            return
        new, known = len(judgement.new), len(judgement.known)
        if new:
            deviations = plural(new, "new deviation") + (f", {known} known" if known else "")
        else:
            deviations = plural(known, "known deviation") if known else "nothing deviates"
        stale = len({entry.number for _, entry in judgement.to_edit})
        lost = len(judgement.open) + judgement.missing
        parts = [
            deviations,
            f"{plural(stale, 'entry', 'entries')} to edit" if stale else "",
            f"{lost} not verified" if lost else "",
            "less verified than before" if judgement.less else "",
            "less promised than before" if judgement.withdrawn else "",
            "not counted" if judgement.uncounted else "",
            plural(len(judgement.changed), "changed convention") if judgement.changed else "",
        ]
        selection = header.provenance.selection
        narrowed = f"narrowed by {selection}" if selection else ""
        chosen = header.provenance.chosen
        chosen = f"all that pyproject.toml asks: {chosen}" if chosen else ""
        about = "; ".join(filter(None, [", ".join(filter(None, parts)), items, chosen, narrowed]))
        word = {ExitCode.OK: "holds", ExitCode.INCOMPLETE: "is incomplete"}.get(
            code, "changed for the worse" if judgement.worse else "the baseline is out of date"
        )
        self._line(f"gate: {names}: {word} ({about})", GOOD if code == ExitCode.OK else BAD)

    def _new(self) -> None:
        """Print the deviations that no entry covers, the worst first."""
        kinds = _kinds(self.judgement)
        for kind in self._first(kinds, "kind of new deviation", "kinds of new deviations"):
            self._kind(*kind)

    def _kind(self, draft: Draft, group: Group) -> None:
        finding, result = group.worst.finding, group.worst.result
        does = "raises an error" if finding.verdict == "error" else finding.verdict
        names, requirements = (some(_named(group, p), 3) for p in ("implementation", "requirement"))
        self._line("")
        self._line(f"new: {names} {does} at {plural(len(group), 'finding')}: {requirements}", BAD)
        if where := ", ".join(self._where(draft)):
            self._line(f"  {where}")
        if expected := self.judgement.expected.get(group.worst):
            within = f"within {expected.within:.3g}σ" if expected.within is not None else ""
            details = " ".join(filter(None, [expected.cause or expected.raises, within]))
            entry = ", ".join(filter(None, [expected.verdict, details]))
            self._line(f"  the entry at {expected.place} says otherwise: {entry}")
        spec = _spec(self.judgement, result)
        if self.verbose:
            for line in failure(result, spec, self.judgement.record.header).splitlines():
                self._line(f"  {line}")
            return
        size = measured(finding.figures).partition(": ")[2] if finding.figures else ""
        if told := ": ".join(filter(None, (finding.detail or say(finding.value), size))):
            self._line(f"  {result.case}: {told}")
        if finding.cause:
            self._line(f"  likely cause: {say(finding.cause)}")
        self._line(f"  again: {again(result, spec)}", DIM)

    def _where(self, draft: Draft) -> Iterator[str]:
        """Yield phrases about where a deviation occurs; none if it occurs everywhere."""
        for key in ("case", "mode"):
            patterns = draft.patterns[key]
            without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
            if len(patterns) > SHORT and not self.verbose:
                self.hidden = True
                names = {cell.part(key) for cell in draft.cells}
                every = {cell.part(key) for cell in self.judgement.decided} | names
                but = f"in all {key}s but {len(every) - len(names)}"
                yield but if without else f"in {len(names)} of {len(every)} {key}s"
            elif without:
                yield f"in all {key}s but {', '.join(without)}"
            elif patterns:
                yield f"in {key if len(patterns) == 1 else key + 's'} {', '.join(patterns)}"
        if draft.dtype:
            yield f"where {draft.dtype}"

    def _less(self) -> None:
        """Print where less was verified than the baseline requires."""
        places = by_key(self.judgement.less, lambda loss: (loss.implementation, loss.place))
        if uncounted := self.judgement.uncounted:
            path = self.judgement.baseline.path
            self._line("")
            self._line(
                f"not counted: {', '.join(uncounted)}: {path} has numbers of others, or of other "
                "levels, only",
                BAD,
            )
            self._line("  baseline update writes what is verified; or was it renamed?", DIM)
        if not places:
            return
        self._line("")
        for (name, place), losses in self._first(list(places.items()), "place", "places"):
            lost = [f"{it.chapter} {it.verified} of {it.expected}" for it in losses]
            self.hidden |= len(lost) > MOST_LOST and not self.verbose
            counts = some(lost, len(lost) if self.verbose else MOST_LOST)
            self._line(f"less verified: {name} at {place}: {counts}", BAD)
            if wrong := sum(it.wrong for it in losses):
                few = f"{plural(wrong, 'finding')} there that {'is' if wrong == 1 else 'are'} wrong"
                self._line(f"  beside {few}, less is asked of the same answers", DIM)
            elif reason := next((it.reason for it in losses if it.reason), ""):
                self._line(f"  unsupported: {reason}", DIM)
        path = self.judgement.baseline.path
        mend = "mend what deviates, or, " if any(it.wrong for it in self.judgement.less) else ""
        meant = (
            f"{mend}if that is meant, baseline update --allow-less lowers these numbers in {path}"
        )
        self._line(f"  {meant}", DIM)

    def _gained(self) -> None:
        """Print on one line for each implementation what it promises beyond the baseline."""
        of_each = by_key(self.judgement.gained, lambda one: (one.implementation, one.device))
        for (name, device), gained in of_each.items():
            told = ", ".join(map(_promise, gained))
            self._line(f"promised now: {name} on {device}: {told}; baseline update pins it", DIM)

    def _withdrawn(self) -> None:
        """Print the promises that are weaker than the baseline says."""
        if not self.judgement.withdrawn:
            return
        self._line("")
        for one in self._first(self.judgement.withdrawn, "promise", "promises"):
            self._line(f"less promised: {one.implementation} on {one.device}: {_promise(one)}", BAD)
        path = self.judgement.baseline.path
        self._line(f"  if that is meant, edit these lines of [promised.NAME] in {path}", DIM)

    def _changed(self) -> None:
        """Print the pinned conventions that have changed."""
        if not self.judgement.changed:
            return
        self._line("")
        for one in self._first(self.judgement.changed, "convention", "conventions"):
            place = " at ".join(filter(None, [one.experiment, one.place]))
            subject = f"{one.subject}: pinned {one.pinned}, now " if one.subject else ""
            self._line(f"changed: {one.implementation}, {place}: {subject}{one.now}", BAD)
        path = self.judgement.baseline.path
        self._line(f"  if that is meant, baseline update writes [pinned.NAME] in {path} again", DIM)

    def _open(self) -> None:
        """Print the items that could not be verified."""
        judgement = self.judgement
        by_reason = by_key(
            sorted(judgement.open, key=lambda one: one.finding.verdict not in LOST),
            lambda one: f"{one.finding.verdict}: {one.finding.detail}",
        )
        if by_reason or judgement.missing:
            self._line("")
        for reason, cells in self._first(list(by_reason.items()), "reason", "reasons"):
            self._line(f"not verified, {plural(len(cells), 'item')}: {reason}", BAD)
            self._line(f"  such as {cells[0].result.id}", DIM)
        if judgement.missing:
            missing = plural(judgement.missing, "item")
            self._line(f"not verified, {missing}: the record has no outcome", BAD)
        if judgement.open and not judgement.worse:
            self._line("  what could not be asked is never known; fix that, or narrow the run", DIM)

    def _stale(self) -> None:
        """Print the entries that need to be edited, and why."""
        lines = [f"{word}: {entry.place}: {why}" for word, entry, why in _outdated(self.judgement)]
        if lines:
            self._line("")
        for stale in self._first(lines, "entry", "entries"):
            self._line(stale, BAD)

    def _edit(self, judged: Sequence[str]) -> None:
        """Print the edit to make, and the command for it.

        If anything is worse, the edit contains new entries only if verbose.
        """
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
        for row in shown:
            self._line(row, _colour(row))
        if len(lines) > len(shown):
            self.hidden = True
            self._line(f"and {plural(len(lines) - len(shown), 'more line')}", DIM)
        command = ["mha-conformance", "baseline", "update"]
        command += judged or [one.spec for one in found.record.header.implementations]
        command += ["--baseline", name]
        if found.new:
            self._line("to record the new deviations as known, with a reason:", "bold")
            self._line(f"  {shlex.join(command)} --reason '...'")
        elif shown:
            self._line(f"to make this edit: {shlex.join(command)}", DIM)

    def _known(self) -> None:
        """Print the entries that need no edit, with their reasons if they apply to the run."""
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


def _promise(one: Promise) -> str:
    """Return what is promised now of a dtype or of equal bits, and what was pinned."""
    return f"{one.subject}: pinned {one.pinned or 'nothing'}, now {one.now or 'nothing'}"


def _kinds(judgement: Judgement) -> list[tuple[Draft, Group]]:
    """Return the deviations that no entry covers, grouped, the worst group first."""
    several = drafts(judgement.new, judgement.decided, named=True)
    kinds = [(draft, Group(draft.cells)) for draft in several]
    return sorted(kinds, key=lambda kind: gravity(kind[1].worst.finding), reverse=True)


def _named(group: Group, part: str) -> list[str]:
    """Return the implementations or the requirements of a group, sorted."""
    return sorted({one.part(part) for one in group.members})


def _spec(judgement: Judgement, result: CaseResult) -> str:
    """Return how a result's implementation is named on the command line; if unknown, its name."""
    specs = {one.name: one.spec for one in judgement.record.header.implementations}
    return specs.get(result.implementation, result.implementation)


def _outdated(judgement: Judgement) -> Iterator[tuple[str, BaselineEntry, str]]:
    """Yield the problems of entries, each as (word, entry, explanation)."""
    for entry, cells in judgement.fixed:
        every = len(judgement.claimed[entry.number])
        part = f"{len(cells)} of " if len(cells) < every else ""
        yield "fixed", entry, f"{part}{plural(every, 'finding')} no longer deviate"
    for entry in judgement.unmatched:
        yield "unmatched", entry, _why_unmatched(entry, judgement)
    for one, two, cells in judgement.ambiguous:
        both = f"{plural(len(cells), 'finding')}, such as {cells[0].requirement}"
        why = "claimed by both, who say something else of it: narrow one"
        yield "ambiguous", one, f"and {two.place}: {both} at {cells[0].result.case}, {why}"
    for one, two in judgement.duplicates:
        yield "duplicate", two, f"says again what {one.address} says"
    for entry, told in judgement.broad:
        yield "too broad", entry, told
    for entry in judgement.reasonless:
        yield "no reason", entry, 'say why it is known: reason = "..."'


def _colour(line: str) -> str:
    """Return the style of a line of a diff."""
    return {"+": GOOD, "-": BAD}.get(line[:1], DIM)


def _why_unmatched(entry: BaselineEntry, judgement: Judgement) -> str:
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
