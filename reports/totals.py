"""Count and group findings, and build the matrix of requirements and implementations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from conformance.records.findings import (
    GRAVITY,
    PREFIX,
    RUN,
    CaseResult,
    Finding,
    count,
    gravity,
    not_verified,
    verified,
)
from conformance.records.header import RequirementInfo
from conformance.reports.model import Cell, Column, Counts, Row, Source, Standing, Totals

BAD = ("deviates", "error", "timed-out", "crashed")
"""The verdicts that fail a run, from least to most severe."""

WRONG = frozenset({"deviates", "error"})
"""The verdicts that are evidence of something wrong."""

_WITHOUT_OUTCOME = "Items without an outcome: the process died, or the run ended before them."
_UNKNOWN = "The record does not say what this requirement is."

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Located(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A finding together with the result of the item in which it was made.

    Attributes:
        column: the key of its implementation in a report, or "".
        before, after: in a comparison of two records, the states in the first and the second.
    """

    result: CaseResult
    finding: Finding
    column: str = ""
    before: str = ""
    after: str = ""

    @property
    def requirement(self) -> str:
        """The id of the requirement."""
        return self.finding.requirement

    @property
    def wrong(self) -> bool:
        """Whether the finding is a deviation or an error."""
        return self.finding.verdict in WRONG

    def part(self, place: str) -> str:
        """Return the requirement, or the field of the item's result, that `place` names."""
        text: str = self.requirement if place == "requirement" else getattr(self.result, place)
        return text


class Group:
    """Equivalent findings.

    Attributes:
        members: the findings, in the given order.
        worst: the worst finding, which serves as evidence.
        cases, dtypes, modes: those in which the findings were made.
    """

    def __init__(self, members: Sequence[Located]) -> None:
        self.members = members
        self.worst = max(members, key=lambda member: gravity(member.finding))
        self.cases = list(dict.fromkeys(member.result.case for member in members))
        self.dtypes = list(dict.fromkeys(member.result.dtype for member in members))
        self.modes = list(dict.fromkeys(member.result.mode for member in members))

    def __len__(self) -> int:
        return len(self.members)

    @property
    def evidence(self) -> dict[str, Any]:
        """The fields that `Deviation` and `changes.Change` share: frequency, places, worst item."""
        result, finding = self.worst.result, self.worst.finding
        return {
            "times": len(self),
            "cases": self.cases,
            "modes": self.modes,
            "figures": finding.figures,
            "worst": finding.worst,
            **{name: getattr(result, name) for name in ("case", "dtype", "mode", "device")},
        }


def by_key(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Group items by a key, in the order in which keys first occur."""
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def located(results: Iterable[CaseResult], column: str = "") -> list[Located]:
    """Return every finding of some items, together with its item."""
    return [Located(result, one, column) for result in results for one in result.findings]


def grouped(findings: Iterable[Located], key: Callable[[Located], Hashable]) -> list[Group]:
    """Group findings with equal keys, in the order of the groups' first members."""
    return [Group(members) for members in by_key(findings, key).values()]


def reasons(results: Iterable[CaseResult], verdicts: Collection[str]) -> Counter[str]:
    """Count the reasons why items have one of these verdicts."""
    return Counter(
        (result.findings[0].detail if result.findings else "") or "no requirement applies"
        for result in results
        if result.verdict in verdicts
    )


def worst_verdict(counts: Mapping[str, int]) -> str:
    """Return the worst verdict that occurs, or ""."""
    return next((verdict for verdict in GRAVITY if counts.get(verdict)), "")


def item_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of items with each verdict."""
    return count(result.verdict for result in results)


def finding_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of findings with each verdict."""
    return count(finding.verdict for result in results for finding in result.findings)


def standing(findings: Counts, complete: bool) -> Standing:
    """Return the standing of an implementation from its findings, counted by verdict.

    It deviates if any finding is wrong. It conforms if none is wrong, the record is complete, and
    there are verified findings but no unverified ones.
    """
    if any(findings.get(verdict) for verdict in WRONG):
        return "deviates"
    if complete and verified(findings) and not not_verified(findings):
        return "conforms"
    return "not verified"


def totals(columns: Sequence[Column], sources: Iterable[Source], seen: Sequence[Located]) -> Totals:
    """Return the totals of the report."""
    order: tuple[Standing, ...] = ("conforms", "deviates", "not verified")
    standings = [column.standing for column in columns]
    items = _sum(column.items for column in columns)
    # A journal has no lines for items that were not reached; a finished record has.
    items["not-run"] = max(items["not-run"], sum(source.missing for source in sources))
    cases = {one.result.case for one in seen}
    experiments = sum(case.startswith(PREFIX) for case in cases)
    return Totals(
        implementations={name: standings.count(name) for name in order if name in standings},
        items=count(items.elements()),
        findings=count(_sum(column.findings for column in columns).elements()),
        cases=len(cases) - experiments,
        experiments=experiments,
        dtypes=list(dict.fromkeys(one.result.dtype for one in seen)),
    )


def matrix(
    columns: Sequence[Column], seen: Iterable[Located], requirements: Sequence[RequirementInfo]
) -> list[Row]:
    """Return one row for each given requirement, then one for each other that has findings."""
    verdicts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in seen:
        verdicts[one.requirement][one.column].append(one.finding.verdict)
    rows = [
        Row(item.id, item.chapter, item.level, item.sentence, item.why, []) for item in requirements
    ]
    for name in sorted(verdicts.keys() - {row.requirement for row in rows}):
        sentence = _WITHOUT_OUTCOME if name == RUN else _UNKNOWN
        rows.append(Row(name, name.split(".")[0], "", sentence, "", []))
    for row in rows:
        for column in columns:
            counts = count(verdicts[row.requirement][column.key])
            row.cells.append(Cell(column.key, counts, worst_verdict(counts)))
    return rows


def _sum(vectors: Iterable[Counts]) -> Counter[str]:
    total: Counter[str] = Counter()
    for vector in vectors:
        total.update(vector)
    return total
