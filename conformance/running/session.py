"""The rows of a run, and what the requirements say about each.

A row is an item (implementation x case x dtype x device x mode) or an inquiry, which has an
experiment in place of a case. The requirements of an item are decided together, because one
evaluation serves them all.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from conformance.adapter.base import Adapter, Mode
from conformance.cases.case import Case
from conformance.causes import explain, of_entries
from conformance.definition.dtypes import Array
from conformance.errors import ConformanceError, Unavailable, Unsupported
from conformance.experiments import Experiment, Findings
from conformance.frameworks.surroundings import look, put_back
from conformance.records.findings import CaseResult, Finding, item_id
from conformance.requirements import REQUIREMENTS
from conformance.requirements.declared import DECLARED, compared
from conformance.requirements.examination import Examination, Raised, Workbench
from conformance.requirements.laboratory import Laboratory, NoAnswer
from conformance.requirements.probed import decided
from conformance.requirements.requirement import Requirement
from conformance.running import kept


@dataclass(frozen=True, eq=False)
class Item:
    """One case, put to one implementation in one dtype, device and mode."""

    adapter: Adapter
    case: Case
    dtype: str
    device: str
    mode: Mode

    @property
    def case_id(self) -> str:
        """Return the case's id."""
        return self.case.id

    @property
    def id(self) -> str:
        """Return the id: readable, stable, safe in pytest's -k."""
        return item_id(self.adapter.name, self.case_id, self.dtype, self.device, self.mode.name)

    @property
    def requirements(self) -> list[Requirement]:
        """Return the requirements that this item decides."""
        return [item for item in REQUIREMENTS if item.serves(self.case)]


@dataclass(frozen=True, eq=False)
class Inquiry:
    """An experiment with one implementation, in one dtype, device and mode."""

    adapter: Adapter
    experiment: Experiment
    dtype: str
    device: str
    mode: Mode

    @property
    def case_id(self) -> str:
        """Return the experiment's id in place of a case id."""
        return self.experiment.id

    @property
    def id(self) -> str:
        """Return the id, formed as an item's."""
        return item_id(self.adapter.name, self.case_id, self.dtype, self.device, self.mode.name)


Row = Item | Inquiry


def inquiries(
    adapters: Sequence[Adapter], experiments: Sequence[Experiment], device: str
) -> Iterator[Inquiry]:
    """Yield every experiment, in float32 if the adapter has it; some use further dtypes inside."""
    for adapter in adapters:
        dtype = "float32" if "float32" in adapter.dtypes else adapter.dtypes[0]
        for experiment in experiments:
            for mode in experiment.modes(adapter):
                yield Inquiry(adapter, experiment, dtype, device, mode)


def plan(
    adapters: Sequence[Adapter],
    cases: Iterable[Case],
    dtypes: Sequence[str],
    device: str,
    modes: Callable[[Adapter, Case, str], Sequence[Mode]] | None = None,
) -> Iterator[Item]:
    """Yield every item; those that share an expectation are neighbours."""
    for case in cases:
        for dtype in dtypes:
            for adapter in adapters:
                for mode in (modes or modes_of)(adapter, case, dtype):
                    yield Item(adapter, case, dtype, device, mode)


def modes_of(adapter: Adapter, case: Case, dtype: str) -> tuple[Mode, ...]:
    """Return the modes to examine: only the first if the adapter cannot express the case."""
    try:
        adapter.check(case.problem(dtype))
    except Exception:
        # Unsupported, or an error in the adapter's own check: the item's findings will say which.
        return adapter.modes[:1]
    return tuple(
        mode
        for mode in adapter.modes
        if (mode.every_case or "call.repeats" in case.serves)
        and (mode.dtypes is None or dtype in mode.dtypes)
    )


@dataclass
class Session:
    """A session that examines items and keeps the state that they share.

    Attributes:
        only: mask arguments that experiments look at; all if empty.
        explains: whether to look for the cause of a deviation, which costs more than finding it.
    """

    bench: Workbench = field(default_factory=lambda: Workbench(expect=kept.expectation))
    only: tuple[str, ...] = ()
    laboratories: dict[tuple[str, ...], Laboratory] = field(default_factory=dict)
    explains: bool = True

    def examination(self, item: Item) -> Examination:
        """Return the item's examination, which uses what this session keeps."""
        return Examination(item.adapter, item.case, item.dtype, item.device, item.mode, self.bench)

    def ask(self, row: Row) -> tuple[CaseResult, dict[str, Array]]:
        """Return the findings of a row, and the arrays of an experiment."""
        return self.inquire(row) if isinstance(row, Inquiry) else (self.examine(row), {})

    def examine(self, item: Item) -> CaseResult:
        """Return all findings of one item; whatever an implementation raises is one of them."""
        findings = []
        with _unchanged(item.adapter) as put_back:
            examination = dataclasses.replace(self.examination(item), put_back=put_back)
            for requirement in item.requirements:
                finding = self._decide(requirement, examination)
                if finding is not None:
                    findings.append(finding)
        return CaseResult(
            item.adapter.name, item.case.id, item.dtype, item.device, item.mode.name, findings
        )

    def inquire(self, inquiry: Inquiry) -> tuple[CaseResult, dict[str, Array]]:
        """Return an experiment's entries, what they say about the declaration, and its arrays."""
        adapter, experiment = inquiry.adapter, inquiry.experiment
        place = (adapter.name, inquiry.dtype, inquiry.device, inquiry.mode.name)
        if place not in self.laboratories:
            lab = Laboratory(adapter, inquiry.dtype, inquiry.device, inquiry.mode, only=self.only)
            self.laboratories[place] = lab
        shown = Findings()
        try:
            with _unchanged(adapter):
                shown = experiment.run(self.laboratories[place])
            finding = compared(shown.entries)
        except (Unsupported, Unavailable, NoAnswer) as error:
            finding = _without_answer(DECLARED, error)
        findings = [
            msgspec.structs.replace(finding, cause=of_entries(finding, shown.entries))
            if finding.verdict == "deviates"
            else finding
            for finding in (finding, *decided(experiment.name, shown.entries))
        ]
        key = (adapter.name, experiment.id, inquiry.dtype, inquiry.device, inquiry.mode.name)
        return CaseResult(*key, findings, shown.entries), shown.arrays

    def _decide(self, requirement: Requirement, examination: Examination) -> Finding | None:
        def check() -> Finding | None:
            return requirement.check(examination)

        try:
            if requirement.of_answer:
                key = (requirement.id, examination.answer_identity)
                finding = self.bench.decided.get(key, check)
            else:
                finding = check()
        except (Unsupported, ConformanceError, Raised) as error:
            return _without_answer(requirement, error)
        deviates = finding is not None and finding.verdict == "deviates"
        if finding is not None and deviates and self.explains and not finding.cause:
            return explain(finding, examination)
        return finding


def _without_answer(requirement: Requirement, error: Exception) -> Finding:
    """Return the finding for an exception raised in place of an answer."""
    if isinstance(error, Unsupported):
        return Finding(requirement.id, "unsupported", detail=str(error))
    if isinstance(error, Unavailable):
        return Finding(requirement.id, "unavailable", detail=str(error))
    detail = _one_line(error.original) if isinstance(error, Raised) else str(error)
    return Finding(requirement.id, "error", detail=detail)


@contextmanager
def _unchanged(adapter: Adapter) -> Iterator[Callable[[], None]]:
    """Restore what all implementations of this process share, at the end or when called."""
    try:
        settings = adapter.settings()
    except Unavailable:
        # Nothing of it will run.
        settings = ()
    restore = partial(put_back, settings, look(settings))
    try:
        yield restore
    finally:
        restore()


def _one_line(error: BaseException) -> str:
    """Return the error in one line, with the innermost place outside this suite."""
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    suite = str(Path(__file__).parent.parent)
    outside = [frame for frame in frames if not frame.filename.startswith(suite)]
    place = f" (at {Path(outside[-1].filename).name}:{outside[-1].lineno})" if outside else ""
    return f"{type(error).__name__}: {message[:300]}{place}"
