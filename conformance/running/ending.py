"""What a run says at its end, for people: counts, reasons, and the gravest deviation in full."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

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
