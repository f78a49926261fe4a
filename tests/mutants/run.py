"""Put mutants before the suite: who dies, by what, and where.

Each is looked for first where it is expected to show, then in the whole catalogue, and it is
left alone as soon as a requirement that it names has noticed it. What is expected of a problem is
computed once for all of them; answers are not shared, since every mutant has its own.

Mutants of features are looked for in the cases that have features. Those of the tiled attention are
looked for at the level that they name, at the sizes that they declare, or at length. All of these
are always left alone as soon as they are noticed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from longer import compared

from conformance.adapter.base import Adapter
from conformance.cases.case import Case
from conformance.cases.catalogue import catalogue
from conformance.definition.dtypes import DTYPES
from conformance.experiments import EXPERIMENTS, experiment
from conformance.records.findings import CaseResult
from conformance.requirements.examination import ResultMemory, Workbench
from conformance.requirements.requirement import Requirement
from conformance.running.selection import Selection, telling
from conformance.running.session import Inquiry, Item, Row, Session, inquiries, plan
from mutants.contestant import Contestant, Featureful
from mutants.featured import Featured
from mutants.features import FeatureMutant
from mutants.long import LongMutant
from mutants.mutant import Mutant
from mutants.sizes import EXPECTED, TAKEN, SizeMutant


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the requirement that killed it and where, both "" if it survived.

    `noticed` counts, by requirement, the rows that noticed it: of all rows where everything was
    looked at, else of those before the kill. `where` is the id of a row, or a problem at length.
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

    expectations: ResultMemory = field(default_factory=lambda: ResultMemory(2048))
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)

    @cached_property
    def cases(self) -> dict[str, Case]:
        """The catalogue by id."""
        return {case.id: case for case in catalogue()}

    def kill(self, mutant: Mutant) -> Outcome:
        """Look for it until an expected requirement notices it."""
        if isinstance(mutant, LongMutant):
            return at_length(mutant)
        adapter, session = mutant.adapter(), self.session()
        noticed: Counter[str] = Counter()
        for row in self.likeliest_first(mutant, adapter):
            found = wrong(session, row)
            noticed.update([*found])
            for requirement, verdict in found.items():
                if kills(mutant, requirement, verdict):
                    self.kills[mutant.chapter, row.asked.id] += 1
                    return Outcome(mutant, requirement, row.id, noticed)
        return Outcome(mutant, noticed=noticed)

    def look_everywhere(self, mutant: Mutant) -> Outcome:
        """The whole catalogue in the mutant's dtype, and the experiments."""
        if mutant.level != "full" or isinstance(mutant, FeatureMutant):
            return self.kill(mutant)
        adapter, session = mutant.adapter(), self.session()
        noticed: Counter[str] = Counter()
        by = where = ""
        rows: list[Row] = [*plan([adapter], catalogue(), [mutant.dtype], "cpu")]
        own = [experiment(mutant.case)] if mutant.case.startswith("probe/") else []
        telling = dict.fromkeys([*map(experiment, TELLING), *own])
        rows += inquiries([adapter], [*telling], "cpu")
        for row in rows:
            found = wrong(session, row)
            noticed.update([*found])
            for requirement, verdict in found.items():
                if not by and kills(mutant, requirement, verdict):
                    by, where = requirement, row.id
        return Outcome(mutant, by, where, noticed)

    def original(self, *, sample: bool = False) -> list[str]:
        """Where the attention that all mutants are made of deviates: nowhere.

        A sample asks each case in one dtype, and each dtype of every fourth case.
        """
        adapter, session = Contestant(), self.session()
        rows: list[Row] = [*inquiries([adapter], EXPERIMENTS, "cpu")]
        for number, case in enumerate(catalogue()):
            dtypes = [[*DTYPES][number % len(DTYPES)]] if sample else [*DTYPES]
            rows += plan([adapter], [case], dtypes, "cpu")
            if case.features:
                problem = case.problem("float64")
                featured = Featureful.for_problem("featured", Featured, problem)
                rows += plan([featured], [case], dtypes, "cpu")
        return [f"{row.id}: {told}" for row in rows for told in deviations(session, row)]

    def at_level(self, mutant: Mutant, level: str) -> tuple[bool, int]:
        """Whether a level of a run notices a mutant, and after how many rows.

        Like implementations of users, a mutant would have a process of its own.
        """
        adapter, session = mutant.adapter(), self.session()
        rows = Selection(level=level).rows([adapter], "cpu")
        apart = [one for one in EXPERIMENTS if one.apart and level == "default"]
        rows = sorted([*rows, *inquiries([adapter], apart, "cpu")], key=telling)
        for number, row in enumerate(rows, 1):
            if deviations(session, row):
                return True, number
        return False, len(rows)

    def session(self) -> Session:
        """A session that shares what is expected."""
        return Session(Workbench(expectations=self.expectations), explains=False)

    def likeliest_first(self, mutant: Mutant, adapter: Adapter) -> Iterator[Row]:
        """Every row, beginning where it is expected to show."""
        if isinstance(mutant, SizeMutant):
            yield from self._at_its_sizes(mutant, adapter)
            return
        if mutant.case.startswith("probe/"):
            yield from inquiries([adapter], [experiment(mutant.case)], "cpu")
        else:
            yield from plan([adapter], [self.cases[mutant.case]], [mutant.dtype], "cpu")
        if isinstance(mutant, FeatureMutant):
            others = [case for case in catalogue() if case.features and case.id != mutant.case]
            yield from plan([adapter], others, [mutant.dtype], "cpu")
            return
        for dtype in dict.fromkeys((mutant.dtype, *DTYPES)):
            yield from plan([adapter], catalogue(), [dtype], "cpu")
        yield from inquiries([adapter], EXPERIMENTS, "cpu")

    def _at_its_sizes(self, mutant: SizeMutant, adapter: Adapter) -> list[Row]:
        """The cases of its level, beginning where most of its chapter died, then the smallest."""
        rows = [
            Narrow(row.adapter, row.asked, row.dtype, row.device, row.mode)
            for row in Selection(level=mutant.level, dtypes=[mutant.dtype]).rows([adapter], "cpu")
            if isinstance(row, Item)
        ]
        return sorted(
            rows,
            key=lambda row: (
                -self.kills[mutant.chapter, row.asked.id],
                math.prod(row.asked.shape.logits),
            ),
        )


class Narrow(Item):
    """An item of which only what is expected to notice a mutant of the tiled attention is asked."""

    @property
    def requirements(self) -> list[Requirement]:
        return [item for item in super().requirements if item.id in (*EXPECTED, *TAKEN)]


def at_length(mutant: LongMutant) -> Outcome:
    """What the comparison of every element makes of a mutant."""
    found = compared(mutant.case, mutant.kernel)
    (by,) = mutant.killed_by
    wrong = [name for name, tally in found.decisive("A").items() if tally.excess > 1]
    noticed = Counter({by: len(wrong)}) if wrong else Counter()
    return Outcome(mutant, by if wrong else "", mutant.case if wrong else "", noticed)


TELLING = ("dropout", "repeatability", "masked-rows", "leaks")
"""Experiments that decide requirements which no case serves; the others mostly observe."""


RAISING = ("world-one-hop-too-few", "world-one-hop-too-few-of-three")
"""Mutants with which torch raises. Others must answer: a stale one dies of its own mistake."""


def kills(mutant: Mutant, requirement: str, verdict: str) -> bool:
    """Whether it is noticed by what is expected to, and not by an error of its own."""
    raises = isinstance(mutant, SizeMutant) or mutant.name in RAISING
    return requirement in mutant.killed_by and (raises or verdict == "deviates")


def deviations(session: Session, row: Row) -> list[str]:
    """The requirements that notice something here; one that raises is noticed too."""
    return [*wrong(session, row)]


def wrong(session: Session, row: Row) -> dict[str, str]:
    """The requirements that notice something here, each with its verdict."""
    findings = examined(session, row).findings
    return {f.requirement: f.verdict for f in findings if f.verdict in ("deviates", "error")}


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
