"""Report a run as text and as data: failures, counts, and the worst deviation."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from conformance.errors import ExitCode, UnknownName
from conformance.records.findings import NOT_VERIFIED, VERIFIED, CaseResult, Finding, count, gravity
from conformance.records.header import RequirementInfo
from conformance.reports import wording
from conformance.reports.totals import WRONG
from conformance.reports.totals import reasons as reasons_of
from conformance.requirements import REQUIREMENTS, find_requirement
from conformance.requirements.requirement import Requirement
from conformance.text import plural
from conformance.words import say

if TYPE_CHECKING:
    from conformance.running.examine import Outcome


# A failure


class _Suite:
    """The requirements and cases of this version of the suite."""

    def requirement(self, name: str) -> RequirementInfo | None:
        item = _requirement(name)
        if item is None:
            return None
        return RequirementInfo(item.id, item.level, item.sentence, item.why, item.revision)

    def question(self, case: str) -> str:
        from conformance.cases.catalogue import catalogue
        from conformance.experiments import EXPERIMENTS

        words = {item.id: item.why for item in catalogue()}
        return (words | {item.id: item.topic.question for item in EXPERIMENTS}).get(case, "")


def failure(
    result: CaseResult, spec: str, file: str = "", *, alone: bool = False, command: str = ""
) -> str:
    """Return every discrepancy of an item as lines of text; see `wording.failure`."""
    return wording.failure(result, spec, _Suite(), file, alone=alone, command=command)


def is_must(finding: Finding) -> bool:
    """Return whether the requirement is of level must; False if its process was lost."""
    requirement = _requirement(finding.requirement)
    return requirement is not None and requirement.level == "must"


def _requirement(name: str) -> Requirement | None:
    try:
        return find_requirement(name)
    except UnknownName:
        return None


# The end, as text


def counted(name: str, results: Sequence[CaseResult], *, reasons: bool) -> Iterator[str]:
    """Yield lines about one implementation: counts, unmet requirements, what was not verified.

    With `reasons`, also why items are unsupported.
    """
    counts = count(result.verdict for result in results)
    yield f"{name}: {wording.counts_text(counts) if counts else 'nothing run'}"
    for requirement, findings in unmet(results):
        cause, times = _cause(findings)
        share = f"{times} of them: " if times < len(findings) else ""
        verdicts = wording.counts_text(count(finding.verdict for finding in findings))
        yield f"  {requirement.id}: {verdicts}{f' ({share}{cause})' if cause else ''}"
    for reason, times in reasons_of(results, NOT_VERIFIED).items():
        yield f"  not verified, {plural(times, 'item')}: {reason}"
    if reasons:
        for reason, times in reasons_of(results, ("unsupported",)).most_common():
            yield f"  unsupported, {plural(times, 'item')}: {reason}"


def unmet(results: Iterable[CaseResult]) -> list[tuple[Requirement, list[Finding]]]:
    """Return the requirements that are not met, each with the findings that say so."""
    wrong: dict[str, list[Finding]] = defaultdict(list)
    for result in results:
        for finding in result.findings:
            if finding.verdict in WRONG:
                wrong[finding.requirement].append(finding)
    return [(item, wrong[item.id]) for item in REQUIREMENTS if item.id in wrong]


def _cause(findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the most frequent cause, and how many findings have it; "" and 0 if none has one."""
    causes = Counter(finding.cause for finding in findings if finding.cause)
    for cause, times in causes.most_common(1):
        return say(cause), times
    return "", 0


def worst(results: Iterable[CaseResult]) -> tuple[CaseResult | None, int]:
    """Return the deviating item to show in full, and the number of deviating items.

    What is required comes before what is only declared, an answer before a declaration, and what
    has a cause before what has none.
    """
    wrong = [result for result in results if result.verdict in WRONG]
    return max(wrong, key=_weight, default=None), len(wrong)


def _weight(result: CaseResult) -> tuple[bool, bool, bool, tuple[float, float]]:
    return max(
        (is_must(finding), not result.entries, bool(finding.cause), gravity(finding))
        for finding in result.findings
        if finding.verdict in WRONG
    )


def heading(name: str, of: int) -> str:
    """Return the line above the item that is shown in full."""
    return f"{name}, {f'the worst of {of} items' if of > 1 else 'the item'} in full:"


def everything(record: str) -> str:
    """Return a hint on how to see the other items; `record` is the path of the record, or ""."""
    again = "the same with --strict"
    if record:
        return f"all of them: {shlex.join(['mha-conformance', 'report', record])}, or {again}"
    return f"all of them: {again}; or --record FILE.json, and mha-conformance report FILE.json"


def exit_code(results: Iterable[CaseResult], *, complete: bool) -> ExitCode:
    """Return the exit code of a run in which deviations are findings, not failures."""
    verdicts = {result.verdict for result in results}
    if not verdicts & VERIFIED:
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.OK if complete and not verdicts & NOT_VERIFIED else ExitCode.INCOMPLETE


# The end, as data


SCHEMA = "mha-conformance/summary/1"

Counts = dict[str, int]


class Missed(msgspec.Struct, frozen=True):
    """A requirement that is not met: how often, and the most frequent cause, or ""."""

    requirement: str
    level: str
    findings: Counts
    cause: str


class Examined(msgspec.Struct, frozen=True):
    """The outcome for one implementation.

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


def summary(outcome: Outcome, code: int) -> Summary:
    """Return the output of `mha-conformance run --json`; `code` is its exit code."""
    header, results = outcome.record.header, outcome.results
    return Summary(
        schema=SCHEMA,
        implementations=[
            _examined(one.name, one.spec, outcome.results_of(one.name))
            for one in header.implementations
        ],
        planned=header.planned,
        missing=header.planned - len(results),
        selection=header.provenance.selection,
        record=str(outcome.path or ""),
        exit_code=code,
    )


def _examined(name: str, spec: str, results: Sequence[CaseResult]) -> Examined:
    missed = [
        Missed(item.id, item.level, count(f.verdict for f in findings), _cause(findings)[0])
        for item, findings in unmet(results)
    ]
    reasons = reasons_of(results, NOT_VERIFIED)
    return Examined(name, spec, count(r.verdict for r in results), missed, dict(reasons))
