"""One run: which items there are, and what the requirements say about each.

An item is implementation x case x dtype x device x mode. Its requirements are decided together,
because one evaluation serves them all.
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
from conformance.experiments.laboratory import Laboratory, NoAnswer
from conformance.frameworks.surroundings import look, put_back
from conformance.records.findings import CaseResult, Finding, item_id
from conformance.requirements import REQUIREMENTS
from conformance.requirements.declared import DECLARED, compared
from conformance.requirements.examination import Examination, Raised, Workbench
from conformance.requirements.probed import decided
from conformance.requirements.requirement import Requirement
from conformance.running import kept


@dataclass(frozen=True, eq=False)
class Item:
    """One row of the run: what is asked of whom, and how."""

    adapter: Adapter
    case: Case
    dtype: str
    device: str
    mode: Mode

    @property
    def id(self) -> str:
        """Readable, stable, safe in pytest's -k."""
        return item_id(self.adapter.name, self.case.id, self.dtype, self.device, self.mode.name)

    @property
    def requirements(self) -> list[Requirement]:
        """What this item says something about."""
        return [item for item in REQUIREMENTS if item.serves(self.case)]


@dataclass(frozen=True, eq=False)
class Inquiry:
    """An experiment with an implementation, in one mode: a row of the run beside the items."""

    adapter: Adapter
    experiment: Experiment
    dtype: str
    device: str
    mode: Mode

    @property
    def id(self) -> str:
        """As an item's, with the experiment for a case."""
        case = self.experiment.id
        return item_id(self.adapter.name, case, self.dtype, self.device, self.mode.name)


def inquiries(
    adapters: Sequence[Adapter], experiments: Sequence[Experiment], device: str
) -> Iterator[Inquiry]:
    """Every experiment, in float32 where there is one; some look at other dtypes beside it."""
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
    """Every item, so ordered that those which share an expectation stand together."""
    for case in cases:
        for dtype in dtypes:
            for adapter in adapters:
                for mode in (modes or modes_of)(adapter, case, dtype):
                    yield Item(adapter, case, dtype, device, mode)


def modes_of(adapter: Adapter, case: Case, dtype: str) -> tuple[Mode, ...]:
    """The modes worth examining: one is enough to say that none of them can express the case."""
    try:
        adapter.check(case.problem(dtype))
    except Exception:
        # Unsupported, or a mistake in the adapter's own check: the item's findings will say which.
        return adapter.modes[:1]
    return tuple(
        mode
        for mode in adapter.modes
        if (mode.every_case or "call.repeats" in case.serves)
        and (mode.dtypes is None or dtype in mode.dtypes)
    )


@dataclass
class Session:
    """Examines items; remembers what they share."""

    bench: Workbench = field(default_factory=lambda: Workbench(expect=kept.expectation))
    only: tuple[str, ...] = ()
    """Mask arguments that experiments look at; all if empty."""
    laboratories: dict[tuple[str, ...], Laboratory] = field(default_factory=dict)
    explains: bool = True
    """Whether to look for the cause of a deviation, which costs more than to find it."""

    def examination(self, item: Item) -> Examination:
        """The item with what this session remembers."""
        return Examination(item.adapter, item.case, item.dtype, item.device, item.mode, self.bench)

    def examine(self, item: Item) -> CaseResult:
        """All findings of one item. Nothing that an implementation raises gets out of here."""
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
        """The entries of one experiment, what they say about the declaration, and its arrays."""
        adapter, experiment = inquiry.adapter, inquiry.experiment
        key = (adapter.name, inquiry.dtype, inquiry.device, inquiry.mode.name)
        if key not in self.laboratories:
            lab = Laboratory(adapter, inquiry.dtype, inquiry.device, inquiry.mode, only=self.only)
            self.laboratories[key] = lab
        found, verdict = Findings(), Finding(DECLARED.id, "observed")
        try:
            with _unchanged(adapter):
                found = experiment.run(self.laboratories[key])
            verdict = compared(found.entries)
        except Unsupported as reason:
            verdict = Finding(DECLARED.id, "unsupported", detail=str(reason))
        except Unavailable as reason:
            verdict = Finding(DECLARED.id, "unavailable", detail=str(reason))
        except NoAnswer as error:
            verdict = Finding(DECLARED.id, "error", detail=str(error))
        own = [
            msgspec.structs.replace(finding, cause=of_entries(finding, found.entries))
            if finding.verdict == "deviates"
            else finding
            for finding in (verdict, *decided(experiment.name, found.entries))
        ]
        result = CaseResult(
            adapter.name,
            experiment.id,
            inquiry.dtype,
            inquiry.device,
            inquiry.mode.name,
            own,
            found.entries,
        )
        return result, found.arrays

    def _find(self, requirement: Requirement, examination: Examination) -> Finding | None:
        if not requirement.of_answer:
            return requirement.check(examination)
        key = (requirement.id, examination.answer_identity)
        return self.bench.decided.get(key, lambda: requirement.check(examination))

    def _decide(self, requirement: Requirement, examination: Examination) -> Finding | None:
        try:
            finding = self._find(requirement, examination)
        except Unsupported as reason:
            return Finding(requirement.id, "unsupported", detail=str(reason))
        except Unavailable as reason:
            return Finding(requirement.id, "unavailable", detail=str(reason))
        except ConformanceError as error:
            return Finding(requirement.id, "error", detail=str(error))
        except Raised as error:
            return Finding(requirement.id, "error", detail=_told(error.original))
        deviates = finding is not None and finding.verdict == "deviates"
        if finding is not None and deviates and self.explains and not finding.cause:
            return explain(finding, examination)
        return finding


@contextmanager
def _unchanged(adapter: Adapter) -> Iterator[Callable[[], None]]:
    """Whatever belongs to everybody in this process is afterwards as it was; or when called."""
    try:
        settings = adapter.settings()
    except Unavailable:
        # Nothing of it will run.
        settings = ()
    before = look(settings)
    restore = partial(put_back, settings, before)
    try:
        yield restore
    finally:
        restore()


def _told(error: BaseException) -> str:
    """The error in one line, with the innermost place that is not ours."""
    message = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parent.parent)
    theirs = [frame for frame in frames if not frame.filename.startswith(here)]
    place = f" (at {Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {message[:300]}{place}"
