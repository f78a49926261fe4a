"""Put mutants before the suite: who dies, by what, and where.

Each is looked for first where it is expected to show, then in the whole catalogue, and it is
left alone as soon as a requirement that it names has noticed it. What is expected of a problem is
computed once for all of them; answers are not shared, since every mutant has its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from conformance.adapter.base import Adapter
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.definition.dtypes import DTYPES
from conformance.experiments import EXPERIMENTS, experiment
from conformance.records.findings import CaseResult
from conformance.requirements.examination import Memory, Workbench
from conformance.running.session import Inquiry, Item, Session, inquiries, plan
from mutants.contestant import Contestant
from mutants.mutant import Mutant

Row = Item | Inquiry


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the requirement that killed it and where, both "" if it survived.

    `noticed` counts, by requirement, the rows that noticed it: of all rows where everything was
    looked at, else of those before the kill.
    """

    mutant: Mutant
    by: str = ""
    where: str = ""
    noticed: Counter[str] = field(default_factory=Counter)

    @property
    def killed(self) -> bool:
        """By a requirement that was expected to."""
        return bool(self.by)


@dataclass
class Examiner:
    """Examines one after the other; remembers what is expected."""

    expectations: Memory = field(default_factory=lambda: Memory(2048))

    @cached_property
    def cases(self) -> dict[str, Case]:
        """The catalogue by id."""
        return {case.id: case for case in catalogue()}

    def kill(self, mutant: Mutant) -> Outcome:
        """Look for it until an expected requirement notices it."""
        adapter, session = mutant.adapter(), self._session()
        noticed: Counter[str] = Counter()
        for row in self.likeliest_first(mutant, adapter):
            found = deviations(session, row)
            noticed.update(found)
            for requirement in found:
                if requirement in mutant.killed_by:
                    return Outcome(mutant, requirement, row.id, noticed)
        return Outcome(mutant, noticed=noticed)

    def look_everywhere(self, mutant: Mutant) -> Outcome:
        """The whole catalogue in the mutant's dtype, and the experiments."""
        adapter, session = mutant.adapter(), self._session()
        noticed: Counter[str] = Counter()
        by = where = ""
        rows: list[Row] = [*plan([adapter], catalogue(), [mutant.dtype], "cpu")]
        rows += inquiries([adapter], [experiment(name) for name in TELLING], "cpu")
        for row in rows:
            found = deviations(session, row)
            noticed.update(found)
            for requirement in found:
                if not by and requirement in mutant.killed_by:
                    by, where = requirement, row.id
        return Outcome(mutant, by, where, noticed)

    def original(self) -> list[str]:
        """Where the attention that all mutants are made of deviates: nowhere."""
        adapter, session = Contestant(), self._session()
        rows: list[Row] = [*plan([adapter], catalogue(), list(DTYPES), "cpu")]
        rows += inquiries([adapter], EXPERIMENTS, "cpu")
        return [f"{row.id}: {told}" for row in rows for told in deviations(session, row)]

    def _session(self) -> Session:
        return Session(Workbench(expectations=self.expectations), explains=False)

    def likeliest_first(self, mutant: Mutant, adapter: Adapter) -> Iterator[Row]:
        """Every row, beginning where it is expected to show."""
        if mutant.case.startswith("probe/"):
            yield from inquiries([adapter], [experiment(mutant.case)], "cpu")
        else:
            yield from plan([adapter], [self.cases[mutant.case]], [mutant.dtype], "cpu")
        for dtype in dict.fromkeys((mutant.dtype, *DTYPES)):
            yield from plan([adapter], catalogue(), [dtype], "cpu")
        yield from inquiries([adapter], EXPERIMENTS, "cpu")


TELLING = ("dropout", "repeatability")
"""Experiments that decide requirements which no case serves; the others mostly observe."""


def deviations(session: Session, row: Row) -> list[str]:
    """The requirements that notice something here; one that raises is noticed too."""
    findings = examined(session, row).findings
    return [f.requirement for f in findings if f.verdict in ("deviates", "error")]


def examined(session: Session, row: Row) -> CaseResult:
    """What a row came to; mutants may overflow where they like."""
    with np.errstate(all="ignore"):
        return session.inquire(row)[0] if isinstance(row, Inquiry) else session.examine(row)


def count(outcomes: Iterable[Outcome]) -> dict[str, tuple[int, int]]:
    """Killed and total, by chapter."""
    total: Counter[str] = Counter()
    killed: Counter[str] = Counter()
    for outcome in outcomes:
        total[outcome.mutant.chapter] += 1
        killed[outcome.mutant.chapter] += outcome.killed
    return {chapter: (killed[chapter], total[chapter]) for chapter in total}


def survivors(outcomes: Sequence[Outcome]) -> list[str]:
    """Names of those that nothing expected noticed."""
    return [outcome.mutant.name for outcome in outcomes if not outcome.killed]
