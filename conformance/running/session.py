"""Plan the rows of a run, check the requirements on each, and choose the arrays to record.

A row is an item (implementation x case x dtype x device x mode) or an inquiry, which has an
experiment instead of a case. All requirements of an item are checked together, because they share
evaluations of the implementation.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, cast

import msgspec

from conformance.adapter.base import Adapter, Mode
from conformance.adapter.features import Unasked, parts_of
from conformance.adapter.loading import at_home
from conformance.cases.case import Case
from conformance.cases.catalogue import posed
from conformance.causes import explain, of_entries
from conformance.definition.dtypes import Array
from conformance.errors import DeviceLost, ProcessLost, Unavailable, Unsupported
from conformance.experiments import Experiment, Question
from conformance.experiments.experiment import declared
from conformance.frameworks.base import look, put_back
from conformance.records.findings import (
    NOTHING,
    CaseResult,
    Entry,
    Finding,
    Phrase,
    Verdict,
    gravity,
    item_id,
    of_weights,
    without_outcome,
)
from conformance.records.record import PICTURED
from conformance.requirements import REQUIREMENTS
from conformance.requirements.examination import NO_ANSWER, Examination, RaisedInside, Workbench
from conformance.requirements.laboratory import Laboratory, NoAnswer
from conformance.requirements.probed import ONE_FOR_ALL, between_modes, compared, decided, declares
from conformance.requirements.requirement import Requirement
from conformance.running.kept import expectation, replaced
from conformance.text import message, one_line

EVERY_MODE = ("edge/fully-masked-row/self",)
"""The ids of cases to run in every mode that supports the dtype, in addition to the cases for the
requirement `call.repeats`."""


@dataclass(frozen=True, eq=False)
class Row:
    """A case or experiment to run with one implementation, dtype, device and mode.

    Attributes:
        asked: the case or experiment.
        refused: whether the adapter's check rejects the case, so that the row will only say why.
    """

    adapter: Adapter
    asked: Case | Experiment
    dtype: str
    device: str
    mode: Mode
    refused: bool = False

    @cached_property
    def id(self) -> str:
        """The stable id "implementation:case:dtype:device:mode"."""
        return item_id(self.adapter.name, self.asked.id, self.dtype, self.device, self.mode.name)

    def result(self, findings: list[Finding], entries: Iterable[Entry] = ()) -> CaseResult:
        """Return a `CaseResult` for this row with these findings and entries."""
        names = (self.adapter.name, self.asked.id, self.dtype, self.device, self.mode.name)
        return CaseResult(*names, findings, [*entries])


class Item(Row):
    """A row with a case."""

    asked: Case

    @property
    def requirements(self) -> Sequence[Requirement]:
        """The requirements that are checked on this item."""
        found = _requirements_of(self.asked)
        return [item for item in found if item.where(self.adapter, self.mode)]


@lru_cache(maxsize=64)
def _requirements_of(case: Case) -> tuple[Requirement, ...]:
    return tuple(item for item in REQUIREMENTS if item.serves(case))


class Inquiry(Row):
    """A row with an experiment."""

    asked: Experiment

    def concluded(self, entries: Sequence[Entry], others: Iterable[Finding] = ()) -> CaseResult:
        """Return the result with these entries, and with the findings that follow from them.

        A finding that deviates gets the cause that the entries show, if any. `others` are
        additional findings, which do not follow from these entries alone.
        """
        findings = (compared(entries), *decided(self.asked.name, entries), *others)
        explained = [
            msgspec.structs.replace(finding, cause=of_entries(finding, entries))
            if finding.verdict == "deviates"
            else finding
            for finding in findings
        ]
        return self.result(explained, entries)


def inquiries(
    adapters: Sequence[Adapter], experiments: Sequence[Experiment], device: str
) -> Iterator[Inquiry]:
    """Yield a row for each adapter, experiment and mode that the experiment examines.

    The dtype of a row is float32, or else the adapter's first dtype. Some experiments also call the
    implementation in other dtypes.
    """
    for adapter in adapters:
        dtype = "float32" if "float32" in adapter.dtypes else adapter.dtypes[0]
        for experiment in experiments:
            for mode in experiment.modes(adapter):
                yield Inquiry(adapter, experiment, dtype, device, mode)


class Asked(NamedTuple):
    """The modes in which a case is examined in a dtype.

    If the adapter's check rejects the case, `refused` is true, and there is one mode, which reports
    this.
    """

    modes: tuple[Mode, ...] = ()
    refused: bool = False


class Planned(Adapter):
    """A proxy adapter whose modes were planned by the process that runs the implementation."""

    @abstractmethod
    def planned_modes(self, case: Case, dtype: str) -> Asked:
        """Return the modes in which a case is examined in this dtype."""


def posed_to(adapter: Adapter, case: Case) -> tuple[Case, ...]:
    """Return the cases that a case turns into for what the adapter declares."""
    return posed(
        case,
        adapter.geometry,
        layer=not adapter.projections_supplied,
        page=adapter.page,
        fixed=adapter.fixed,
        numbers=adapter.numbers,
    )


def plan(
    adapters: Sequence[Adapter], cases: Iterable[Case], dtypes: Sequence[str], device: str
) -> Iterator[Item]:
    """Yield an item for each adapter, case and dtype, and for each mode that `modes_of` returns.

    Cases are posed at the sizes that the adapter declares. Items that share an expectation (the
    reference answer) are adjacent.
    """
    takers: dict[Case, list[Adapter]] = defaultdict(list)
    for case in cases:
        for adapter in adapters:
            for one in posed_to(adapter, case):
                if adapter not in takers[one]:
                    takers[one].append(adapter)
    for case, those in takers.items():
        for dtype in dtypes:
            for adapter in those:
                asked = modes_of(adapter, case, dtype)
                for mode in asked.modes:
                    yield Item(adapter, case, dtype, device, mode, asked.refused)


def modes_of(adapter: Adapter, case: Case, dtype: str) -> Asked:
    """Return the modes in which to examine a case in a dtype; none if the case does not apply.

    A case with features, such as a window, applies only if the adapter declares one of them, or if
    masks can express them (the case is `maskable`) and the adapter accepts these masks. If the
    adapter rejects a case that applies, return only the first mode, which will report this. A mode
    is left out if it lacks the dtype, or if it is run only on some cases and `case` is not among
    them.
    """
    if isinstance(adapter, Planned):
        return adapter.planned_modes(case, dtype)
    declared = {part for feature in adapter.features for part in feature.covers}
    if not case.posed_in(dtype) or (case.features and not (declared or case.maskable)):
        return Asked()
    problem = case.problem(dtype)
    own = {*parts_of(problem)} - {*(Unasked(adapter.fixed).says if adapter.fixed else ())}
    by_masks = bool(case.features) and declared.isdisjoint(own)
    if by_masks and not case.maskable:
        return Asked()
    try:
        adapter.check(problem)
    except Exception:
        if by_masks:
            return Asked()
        # Examining the item will report `Unsupported`, or an error in the adapter's check.
        return Asked(adapter.modes[:1], refused=True)
    modes = (
        mode
        for mode in adapter.modes
        if (
            mode.every_case
            or (mode.core_cases and case.core and dtype == "float32")
            or "call.repeats" in case.serves
            or case.off_grid in EVERY_MODE
        )
        and mode.has(dtype)
    )
    return Asked(tuple(modes))


@dataclass
class Session:
    """A session that examines rows and keeps the state that they share.

    Attributes:
        bench: the caches that examinations share.
        only: the names of the mask arguments that experiments examine; empty for all.
        laboratories: the objects with which experiments call the implementation, by implementation,
            dtype, device and mode.
        questions: the questions of experiments that are asked one by one, by the id of the row.
        explains: whether to search for the causes of deviations, which is expensive.
        apart: a function that runs an experiment in another process, for experiments that may end
            the process; None to run these in this process, too.
        checked: a function that is called with the result of an item before the search for the
            causes of its deviations, if there is such a search.
        entries: the entries (observations) of experiments in their first mode, by the id of the
            row, for comparison with other modes.
        lost_device: whether a device was lost, so that this process can examine nothing more on it.
    """

    bench: Workbench = field(default_factory=lambda: Workbench(expect=expectation))
    only: tuple[str, ...] = ()
    laboratories: dict[tuple[str, ...], Laboratory] = field(default_factory=dict)
    questions: dict[str, list[Question]] = field(default_factory=dict)
    explains: bool = True
    apart: Callable[[Inquiry], CaseResult] | None = None
    checked: Callable[[CaseResult], None] = lambda result: None
    entries: dict[str, Sequence[Entry]] = field(default_factory=dict)
    lost_device: bool = False

    def examination(self, item: Item, put_back: Callable[[], None] = lambda: None) -> Examination:
        """Return an examination of the item, which shares this session's caches."""
        where = (item.dtype, item.device, item.mode)
        return Examination(item.adapter, item.asked, *where, self.bench, put_back)

    def ask(self, row: Row) -> tuple[CaseResult, dict[str, Array]]:
        """Examine a row; return its result, and its arrays by name, which only experiments have.

        If the implementation has replaced functions with which the suite judges, the row has no
        outcome.
        """
        if told := replaced():
            return without_outcome(row.id, "unavailable", told), {}
        at_home(row.adapter)
        try:
            if isinstance(row, Inquiry):
                found = self.inquire(row)
            else:
                assert isinstance(row, Item)
                found = self.examine(row), {}
        except Exception:
            # It may have been replaced by something with which the suite cannot compute.
            if not replaced():
                raise
        if told := replaced():
            return without_outcome(row.id, "unavailable", told), {}
        return found

    def examine(self, item: Item) -> CaseResult:
        """Return the result of an item; exceptions of the implementation become findings.

        If the device, or one of several processes that compute a call together, is lost, the only
        finding says so.
        """
        try:
            with _unchanged(item.adapter) as put_back:
                examination = self.examination(item, put_back)
                decided = (self._decide(one, examination) for one in item.requirements)
                findings = [finding for finding in decided if finding is not None]
                if self.explains and any(_unexplained(finding) for finding in findings):
                    self.checked(item.result(findings))
                    findings = [
                        explain(finding, examination) if _unexplained(finding) else finding
                        for finding in findings
                    ]
        except ProcessLost as error:
            # Every other requirement would lose it again, after the same time.
            self.lost_device |= isinstance(error, DeviceLost)
            return without_outcome(item.id, error.verdict, str(error))
        return item.result(findings)

    def inquire(self, inquiry: Inquiry) -> tuple[CaseResult, dict[str, Array]]:
        """Run an experiment; return its result, with entries and findings, and arrays by name."""
        if inquiry.asked.apart and self.apart is not None:
            return self.apart(inquiry), {}
        try:
            with _unchanged(inquiry.adapter):
                shown = inquiry.asked.run(self._laboratory(inquiry))
        except (Unsupported, Unavailable, NoAnswer) as error:
            return inquiry.result([_without_answer(declares, error)]), {}
        except ProcessLost as error:
            self.lost_device |= isinstance(error, DeviceLost)
            return without_outcome(inquiry.id, error.verdict, str(error)), {}
        others = self._between_modes(inquiry, shown.entries)
        return inquiry.concluded(shown.entries, others), shown.arrays

    def question(self, inquiry: Inquiry, number: int) -> CaseResult:
        """Ask one question of an experiment, and return a result with the entry for it.

        `number` is the index of the question. For -1, ask nothing; the result then has an entry
        with only a subject for each question. If the experiment cannot be run, the result says why.
        """
        try:
            with _unchanged(inquiry.adapter):
                if inquiry.id not in self.questions:
                    self.questions[inquiry.id] = inquiry.asked.questions(self._laboratory(inquiry))
                questions = self.questions[inquiry.id]
                if number < 0:
                    return inquiry.result([], [Entry(one.subject, NOTHING) for one in questions])
                return inquiry.result([], declared([questions[number].ask()], inquiry.adapter))
        except (Unsupported, Unavailable, NoAnswer) as error:
            return inquiry.result([_without_answer(declares, error)])

    def _laboratory(self, inquiry: Inquiry) -> Laboratory:
        adapter, where = inquiry.adapter, (inquiry.dtype, inquiry.device, inquiry.mode)
        place = (adapter.name, *where[:2], inquiry.mode.name)
        if place not in self.laboratories:
            self.laboratories[place] = Laboratory(
                adapter, *where, only=self.only, expect=self.bench.expect
            )
        return self.laboratories[place]

    def _between_modes(self, inquiry: Inquiry, entries: Sequence[Entry]) -> Iterator[Finding]:
        """Compare the entries with those of the experiment's first mode, and yield any finding.

        In the first mode, only store the entries and yield nothing. Also yield nothing if modes may
        differ in this experiment, or if no entries are comparable.
        """
        if inquiry.asked.name not in ONE_FOR_ALL:
            return
        first = dataclasses.replace(inquiry, mode=inquiry.asked.modes(inquiry.adapter)[0])
        if first.mode.name == inquiry.mode.name:
            self.entries[inquiry.id] = entries
            return
        if first.id not in self.entries:
            # The run is restricted, or divided among several processes.
            self.inquire(first)
        yield from between_modes(self.entries.get(first.id, ()), entries, first.mode.name)

    def _decide(self, requirement: Requirement, examination: Examination) -> Finding | None:
        check = partial(requirement.check, examination)
        try:
            if requirement.of_answer:
                key = (requirement.id, examination.answer_identity)
                return self.bench.decided.get(key, check)
            return check()
        except ProcessLost:
            raise
        except NO_ANSWER as error:
            return _without_answer(requirement, error)


def _unexplained(finding: Finding) -> bool:
    return finding.verdict == "deviates" and not finding.cause


def _without_answer(requirement: Requirement, error: Exception) -> Finding:
    """Return the finding for a requirement that could not be checked because of an exception."""
    verdict: Verdict = "error"
    if isinstance(error, Unsupported | Unavailable):
        verdict = "unsupported" if isinstance(error, Unsupported) else "unavailable"
    detail = one_line(error.original) if isinstance(error, RaisedInside) else message(error)
    return Finding(requirement.id, verdict, detail=detail)


@contextmanager
def _unchanged(adapter: Adapter) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the process-wide settings that the adapter names.

    The settings become as they were before the `with` body. The function is also called at its end.
    """
    try:
        settings = adapter.settings()
    except Unavailable:
        # The implementation cannot run, so there is nothing to restore.
        settings = ()
    restore = partial(put_back, settings, look(settings))
    try:
        yield restore
    finally:
        restore()


# Arrays for the record


def is_exchanged(row: Row) -> bool:
    """Return whether a row's output is recorded, so that implementations can be compared."""
    return isinstance(row, Item) and row.asked.exchanged and row.mode is row.adapter.modes[0]


@dataclass
class Examiner:
    """An examiner of rows that also selects the arrays to record.

    Attributes:
        places: the position in the run of each item whose weights may be recorded, by item id.
        session: the session that examines the rows.
    """

    places: Mapping[str, int]
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self._worst = WorstItems(self.places)

    def examine(self, row: Row) -> tuple[CaseResult, dict[str, Array]]:
        """Return the result of a row, and the arrays that may be recorded, by name."""
        began = time.perf_counter()
        result, arrays = self.session.ask(row)
        if isinstance(row, Item):
            if is_exchanged(row):
                arrays |= self.session.examination(row).exchanged()
            if self._worst.takes(result):
                arrays |= self.session.examination(row).pictured()
        # Milliseconds are enough to find what is slow, and keep records small.
        seconds = max(round(time.perf_counter() - began, 3), 0.001)
        return msgspec.structs.replace(result, seconds=seconds), arrays


MOST = 2
"""The maximum number of items whose weights are recorded, per implementation, requirement and
cause."""
MOST_ELEMENTS = 4096
"""The maximum number of attention weights recorded of an item; more would be unreadable."""


def places(rows: Iterable[Row]) -> dict[str, int]:
    """Return the positions of those items whose weights are few enough to record, by item id."""
    return {
        row.id: place
        for place, row in enumerate(rows)
        if isinstance(row, Item) and math.prod(row.asked.shape.logits) <= MOST_ELEMENTS
    }


class WorstItems:
    """The worst items, whose attention weights are recorded.

    So that records stay small, these are only the `MOST` worst items for each implementation,
    requirement and cause. An item that is among the worst of the whole run is also among the worst
    of those that its process has examined so far. Therefore each process passes on the weights of
    an item that is among the worst so far, and at the end of the run only the weights of the worst
    items of the whole run are kept.
    """

    def __init__(self, places: Mapping[str, int], results: Iterable[CaseResult] = ()) -> None:
        self._places = places
        self._entries: dict[tuple[str, str, Phrase], list[tuple[float, float, int, str]]]
        self._entries = defaultdict(list)
        for result in results:
            self.takes(result)

    def takes(self, result: CaseResult) -> bool:
        """Add a result; return whether its item is now among the worst.

        Return False for an item whose weights must not be recorded.
        """
        if result.id not in self._places:
            return False
        taken = False
        for finding in result.findings:
            if finding.verdict != "deviates" or not of_weights(finding.figures, finding.worst):
                continue
            entries = self._entries[result.implementation, finding.requirement, finding.cause]
            ratio, rms = gravity(finding)
            # Among equals, prefer the first one in the order of the run, which reports show.
            entry = (-ratio, -rms, self._places[result.id], result.id)
            bisect.insort(entries, entry)
            del entries[MOST:]
            taken = taken or entry in entries
        return taken

    @property
    def ids(self) -> set[str]:
        """The ids of the worst items of all results so far."""
        return {entry[-1] for entries in self._entries.values() for entry in entries}


def kept(results: Iterable[CaseResult], places: Mapping[str, int]) -> Callable[[str], bool]:
    """Return a function that decides by the name "item id|array" of an array whether to record it.

    All arrays are recorded, except the attention weights of those items in `places` that are not
    among the worst of `results`. `places` is as the function `places` returns it.
    """
    worst = WorstItems(places, results).ids

    def keep(name: str) -> bool:
        item, _, part = name.rpartition("|")
        return item in worst or item not in places or part not in PICTURED

    return keep


# State between calls


def conforms_alone(row: Row) -> bool:
    """Return whether a new instance of the implementation gets "conforms" or "observed" on a row.

    Return False if no new instance can be created, and for implementations that compile, because
    compiling again for each deviating item would take too long.
    """
    adapter, kind = row.adapter, cast("Any", type(row.adapter))
    if adapter.compiles:
        return False
    function = getattr(adapter, "_function", None)
    try:
        fresh = kind() if function is None else kind(function)
    except Exception:
        return False
    fresh.name, fresh.title = adapter.name, adapter.title
    mode = next((mode for mode in fresh.modes if mode.name == row.mode.name), None)
    if mode is None:
        return False
    alone = dataclasses.replace(row, adapter=fresh, mode=mode)
    return Session(explains=False).ask(alone)[0].verdict in ("conforms", "observed")
