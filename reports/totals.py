"""The one place where findings are counted and grouped, and the matrix of these counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from conformance.records.findings import (
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

GRAVITY = (
    "crashed",
    "timed-out",
    "error",
    "deviates",
    "not-run",
    "unavailable",
    "conforms",
    "observed",
    "unsupported",
)
"""Verdicts in the order of `CaseResult.verdict`: the first that occurs decides."""

BAD = ("deviates", "error", "timed-out", "crashed")
"""Verdicts that fail a run, from least to most grave."""

WRONG = frozenset({"deviates", "error"})
"""Verdicts that say with evidence that something is wrong."""

_WITHOUT_OUTCOME = "Items without an outcome: the process died, or the run ended before them."
_UNKNOWN = "The record does not say what this requirement is."

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Located(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A finding, and the item that it was found in.

    Attributes:
        column: the key of its implementation in a report, or "".
        before, after: in a comparison of two records, what was there and what is there now.
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
        """Whether there is evidence that something is wrong."""
        return self.finding.verdict in WRONG

    def part(self, place: str) -> str:
        """Return one of requirement, implementation, case, dtype, device and mode."""
        text: str = self.requirement if place == "requirement" else getattr(self.result, place)
        return text


class Group:
    """Findings that say the same.

    Attributes:
        members: the findings, in the order in which they were found.
        worst: the one that is furthest off, which serves as evidence.
        cases, dtypes, modes: where they were found.
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
        """How often, where, and the worst: what every entry that shows a group has."""
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
    """Return the items by their key, in the order in which keys first occur."""
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def located(results: Iterable[CaseResult], column: str = "") -> list[Located]:
    """Return every finding of some items."""
    return [Located(result, one, column) for result in results for one in result.findings]


def grouped(findings: Iterable[Located], key: Callable[[Located], Hashable]) -> list[Group]:
    """Return the findings in groups of equal keys, in the order of their first members."""
    return [Group(members) for members in by_key(findings, key).values()]


def reasons(results: Iterable[CaseResult], verdicts: Collection[str]) -> Counter[str]:
    """Return why items have one of these verdicts, and how many items have each reason."""
    return Counter(
        (result.findings[0].detail if result.findings else "") or "no requirement applies"
        for result in results
        if result.verdict in verdicts
    )


def worst_verdict(counts: Mapping[str, int]) -> str:
    """Return the worst verdict that occurs, or ""."""
    return next((verdict for verdict in GRAVITY if counts.get(verdict)), "")


def item_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of items of each verdict."""
    return count(result.verdict for result in results)


def finding_counts(results: Iterable[CaseResult]) -> Counts:
    """Return the number of findings of each verdict."""
    return count(finding.verdict for result in results for finding in result.findings)


def standing(findings: Counts, complete: bool) -> Standing:
    """Return one word for an implementation, which conforms only if no question was left open."""
    if any(findings.get(verdict) for verdict in WRONG):
        return "deviates"
    if complete and verified(findings) and not not_verified(findings):
        return "conforms"
    return "not verified"


def totals(columns: Sequence[Column], sources: Iterable[Source], seen: Sequence[Located]) -> Totals:
    """Count everything once."""
    order: tuple[Standing, ...] = ("conforms", "deviates", "not verified")
    standings = [column.standing for column in columns]
    items = _sum(column.items for column in columns)
    # A journal has no line for what it did not reach; a finished record has.
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
    """Return a row for each requirement in the given order, then for what else was recorded."""
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
