"""What a run says at its end: for people, and as data."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from conformance.records.findings import NOT_VERIFIED, CaseResult, Finding, count, gravity
from conformance.reports.totals import reasons as reasons_of
from conformance.reports.wording import told
from conformance.requirements import REQUIREMENTS
from conformance.running.message import known
from conformance.text import plural
from conformance.words import say

WRONG = ("deviates", "error")


def counted(name: str, results: Sequence[CaseResult], *, reasons: bool) -> Iterator[str]:
    """Of one implementation: its counts, and what is not met, or was not found out.

    With `reasons`, also why something is unsupported.
    """
    counts = count(result.verdict for result in results)
    yield f"{name}: {told(counts) if counts else 'nothing run'}"
    wrong: dict[str, list[Finding]] = {}
    for result in results:
        for finding in result.findings:
            if finding.verdict in WRONG:
                wrong.setdefault(finding.requirement, []).append(finding)
    for requirement in REQUIREMENTS:
        if found := wrong.get(requirement.id):
            verdicts = told(count(finding.verdict for finding in found))
            yield f"  {requirement.id}: {verdicts}{_cause(found)}"
    for reason, times in reasons_of(results, NOT_VERIFIED).items():
        yield f"  not verified, {plural(times, 'item')}: {reason}"
    if reasons:
        for reason, times in reasons_of(results, ("unsupported",)).most_common():
            yield f"  unsupported, {plural(times, 'item')}: {reason}"


def _cause(found: Sequence[Finding]) -> str:
    """The most frequent cause, with how many have it unless all do."""
    causes = Counter(finding.cause for finding in found if finding.cause)
    if not causes:
        return ""
    cause, times = causes.most_common(1)[0]
    return f" ({f'{times} of them: ' if times < len(found) else ''}{say(cause)})"


def gravest(results: Iterable[CaseResult]) -> tuple[CaseResult | None, int]:
    """The item to tell in full, and how many there are to choose from.

    What is required comes before what is only declared, an answer before a declaration, and what
    has a cause before what has none.
    """
    wrong = [result for result in results if result.verdict in WRONG]
    return max(wrong, key=_weight, default=None), len(wrong)


def _weight(result: CaseResult) -> tuple[bool, bool, bool, tuple[float, float]]:
    return max(
        (_is_must(finding), not result.entries, bool(finding.cause), gravity(finding))
        for finding in result.findings
        if finding.verdict in WRONG
    )


def _is_must(finding: Finding) -> bool:
    requirement = known(finding.requirement)
    return requirement is not None and requirement.level == "must"


def heading(name: str, of: int) -> str:
    """Above the item that is told in full."""
    return f"{name}, {f'the gravest of {of} items' if of > 1 else 'the item'} in full:"


def everything(record: str) -> str:
    """How to see the others; `record` is where the record is, or ""."""
    again = "the same with --strict"
    if record:
        return f"all of them: {shlex.join(['mha-conformance', 'report', record])}, or {again}"
    return f"all of them: {again}; or --record FILE.json, and mha-conformance report FILE.json"


# As data


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
