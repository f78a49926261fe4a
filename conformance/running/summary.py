"""What `mha-conformance run` says at its end, as data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance.records.findings import NOT_VERIFIED, CaseResult, count
from conformance.requirements import REQUIREMENTS
from conformance.words import say

SCHEMA = "mha-conformance/summary/1"

Counts = dict[str, int]


class Missed(msgspec.Struct, frozen=True):
    """A requirement that is not met: how often, and the most frequent cause, or ""."""

    requirement: str
    level: str
    findings: Counts
    cause: str


class Examined(msgspec.Struct, frozen=True):
    """An implementation.

    Attributes:
        items: verdicts of its items.
        missed: requirements from which it departs.
        not_verified: reason to number of items.
    """

    name: str
    spec: str
    items: Counts
    missed: list[Missed]
    not_verified: dict[str, int]


class Outcome(NamedTuple):
    """What is known when a run has ended.

    Attributes:
        implementations: name and spec of each.
        results: those that there are, of all items that were to be examined.
        planned: how many items those are.
        selection: what narrowed the run, or "".
        record: where the record is.
    """

    implementations: list[tuple[str, str]]
    results: list[CaseResult]
    planned: int
    selection: str
    record: Path | None


class Summary(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        planned: how many items there were; `missing` of them have no outcome.
        selection: what narrowed it, or "".
        record: where the record is, or "".
        exit_code: of the command.
    """

    schema: str
    implementations: list[Examined]
    planned: int
    missing: int
    selection: str
    record: str
    exit_code: int


def summary(run: Outcome, exit_code: int) -> Summary:
    """Of a run that has ended, or of a record that still holds."""
    return Summary(
        schema=SCHEMA,
        implementations=[
            examined(name, spec, [own for own in run.results if own.implementation == name])
            for name, spec in run.implementations
        ],
        planned=run.planned,
        missing=run.planned - len(run.results),
        selection=run.selection,
        record=str(run.record or ""),
        exit_code=exit_code,
    )


def examined(name: str, spec: str, results: Iterable[CaseResult]) -> Examined:
    """Of one implementation."""
    results = list(results)
    wrong = defaultdict(list)
    reasons: Counter[str] = Counter()
    for result in results:
        if result.verdict in NOT_VERIFIED:
            reasons[result.findings[0].detail if result.findings else ""] += 1
        for finding in result.findings:
            if finding.verdict in ("deviates", "error"):
                wrong[finding.requirement].append(finding)
    missed = []
    for requirement in REQUIREMENTS:
        found = wrong.get(requirement.id, [])
        causes = Counter(finding.cause for finding in found if finding.cause)
        if found:
            missed.append(
                Missed(
                    requirement.id,
                    requirement.level,
                    count(finding.verdict for finding in found),
                    say(causes.most_common(1)[0][0]) if causes else "",
                )
            )
    return Examined(name, spec, count(result.verdict for result in results), missed, dict(reasons))
