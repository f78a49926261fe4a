"""The one place where findings become counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from conformance.records.findings import (
    PREFIX,
    CaseResult,
    Finding,
    count,
    gravity,
    not_verified,
    verified,
)
from conformance.reports.model import Column, Counts, Source, Standing, Totals

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
"""As `CaseResult.verdict` has it: the first that occurs decides."""

BAD = ("deviates", "error", "timed-out", "crashed")
"""Verdicts that a run fails by, from least to most grave."""

WRONG = frozenset({"deviates", "error"})
"""Verdicts that say that something is wrong, with evidence."""


class Seen(NamedTuple):
    """A finding with the column and the item that it belongs to."""

    column: str
    result: CaseResult
    finding: Finding


class Found(Protocol):
    """A finding, and the item that it was found in."""

    @property
    def result(self) -> CaseResult:
        """The item."""

    @property
    def finding(self) -> Finding:
        """What one requirement says of it."""


T = TypeVar("T", bound=Found)


class Group(Generic[T]):
    """Findings that say the same.

    Attributes:
        members: in the order in which they were found.
        worst: the one that is furthest off, as evidence.
        cases, dtypes, modes: where they were found.
    """

    def __init__(self, members: Sequence[T]) -> None:
        self.members = members
        self.worst = max(members, key=lambda own: gravity(own.finding))
        self.cases = list(dict.fromkeys(own.result.case for own in members))
        self.dtypes = list(dict.fromkeys(own.result.dtype for own in members))
        self.modes = list(dict.fromkeys(own.result.mode for own in members))

    def __len__(self) -> int:
        return len(self.members)


def grouped(found: Iterable[T], key: Callable[[T], Hashable]) -> list[Group[T]]:
    """Groups of findings of which the key is the same, in the order of their first members."""
    groups: dict[Hashable, list[T]] = {}
    for own in found:
        groups.setdefault(key(own), []).append(own)
    return [Group(members) for members in groups.values()]


def reasons(results: Iterable[CaseResult], verdicts: Collection[str]) -> Counter[str]:
    """Why items have one of these verdicts, and how many are for each reason."""
    return Counter(
        (result.findings[0].detail if result.findings else "") or "no requirement applies"
        for result in results
        if result.verdict in verdicts
    )


def gravest(counts: Mapping[str, int]) -> str:
    """The gravest verdict that occurs, or ""."""
    return next((verdict for verdict in GRAVITY if counts.get(verdict)), "")


def item_counts(results: Iterable[CaseResult]) -> Counts:
    """Verdicts of items."""
    return count(result.verdict for result in results)


def finding_counts(results: Iterable[CaseResult]) -> Counts:
    """Verdicts of findings."""
    return count(finding.verdict for result in results for finding in result.findings)


def standing(findings: Counts, complete: bool) -> Standing:
    """One word for an implementation: it conforms only if no question was left open."""
    if any(findings.get(verdict) for verdict in WRONG):
        return "deviates"
    if complete and verified(findings) and not not_verified(findings):
        return "conforms"
    return "not verified"


def totals(columns: Iterable[Column], sources: Iterable[Source], seen: Iterable[Seen]) -> Totals:
    """Everything, counted once."""
    columns, seen = list(columns), list(seen)
    order: tuple[Standing, ...] = ("conforms", "deviates", "not verified")
    standings = [column.standing for column in columns]
    items = Counter(_sum(column.items for column in columns))
    # A journal has no line for what it did not reach; a finished record has.
    items["not-run"] = max(items["not-run"], sum(source.missing for source in sources))
    return Totals(
        implementations={name: standings.count(name) for name in order if name in standings},
        items=count(items.elements()),
        findings=_sum(column.findings for column in columns),
        cases=len({result.case for _, result, _ in seen if not _experiment(result)}),
        experiments=len({result.case for _, result, _ in seen if _experiment(result)}),
        dtypes=list(dict.fromkeys(result.dtype for _, result, _ in seen)),
    )


def _experiment(result: CaseResult) -> bool:
    return result.case.startswith(PREFIX)


def _sum(vectors: Iterable[Counts]) -> Counts:
    total: Counter[str] = Counter()
    for vector in vectors:
        total.update(vector)
    return count(total.elements())
