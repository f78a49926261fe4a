"""Report the results of a run, as text and as JSON: failures, counts, and the worst deviation."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from conformance.errors import ExitCode, UnknownName
from conformance.records.findings import (
    NOT_VERIFIED,
    VERIFIED,
    WRONG,
    CaseResult,
    Finding,
    count,
    gravity,
)
from conformance.records.header import RequirementInfo
from conformance.records.phrase import NOTHING
from conformance.reports import wording
from conformance.reports.tables import reasons as reasons_of
from conformance.running.provenance import requirements
from conformance.text import plural
from conformance.words import say

if TYPE_CHECKING:
    from conformance.running.examine import Outcome


# A failure


class _Suite:
    """The requirements of this version of the suite, and what its cases and experiments ask."""

    @cached_property
    def requirements(self) -> dict[str, RequirementInfo]:
        return {item.id: item for item in requirements()}

    def requirement(self, name: str) -> RequirementInfo | None:
        return self.requirements.get(name)

    def question(self, case: str) -> str:
        from conformance.cases.catalogue import case_of
        from conformance.experiments import EXPERIMENTS

        questions = {item.id: item.topic.question for item in EXPERIMENTS}
        with suppress(UnknownName):
            return questions[case] if case in questions else case_of(case).why
        return ""


_SUITE = _Suite()


def failure(
    result: CaseResult, spec: str, file: str = "", *, alone: bool = False, command: str = ""
) -> str:
    """Return a message with all deviations of an item; see `wording.failure` for the arguments."""
    return wording.failure(result, spec, _SUITE, file, alone=alone, command=command)


def is_must(finding: Finding) -> bool:
    """Return whether a finding is about a requirement of level "must"."""
    requirement = _SUITE.requirement(finding.requirement)
    return requirement is not None and requirement.level == "must"


# The end, as text


def counted(name: str, results: Sequence[CaseResult], *, reasons: bool) -> Iterator[str]:
    """Yield lines about an implementation: counts, unmet requirements, items not verified.

    Args:
        name: the name of the implementation.
        results: its results.
        reasons: whether to include the reasons why items are unsupported.
    """
    counts = count(result.verdict for result in results)
    yield f"{name}: {wording.counts_text(counts) if counts else 'nothing run'}"
    asked = [result for result in results if result.verdict != "unsupported"]
    failed = [it for it in asked if _call_failed(it)]
    if asked and len(failed) == len(asked):
        # The call itself fails, so a line for each requirement would say nothing.
        for reason, times in reasons_of(asked, ("error",)).most_common(3):
            yield f"  error, {plural(times, 'item')}: {reason}"
        yield SIZES
        return
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
    if len(failed) > len(asked) / 2:
        yield SIZES


def _call_failed(result: CaseResult) -> bool:
    """Return whether the call itself failed.

    It failed if there is an error, nothing conforms, and nothing was measured. Findings of an
    experiment on the arguments, such as "rejected", may then deviate without being errors.
    """
    answered = [one for one in result.findings if one.verdict != "unsupported"]
    return any(one.verdict == "error" for one in answered) and all(
        one.verdict in WRONG and one.figures is None for one in answered
    )


SIZES = "  If it takes some sizes only, its adapter declares them: docs/adapters.md, section Sizes."


def unmet(results: Iterable[CaseResult]) -> list[tuple[RequirementInfo, list[Finding]]]:
    """Return the requirements that are not met, each with its findings that deviate or failed."""
    wrong: dict[str, list[Finding]] = defaultdict(list)
    for result in results:
        for finding in result.findings:
            if finding.verdict in WRONG:
                wrong[finding.requirement].append(finding)
    return [(item, wrong[name]) for name, item in _SUITE.requirements.items() if name in wrong]


def _cause(findings: Sequence[Finding]) -> tuple[str, int]:
    """Return the text of the most frequent cause and the number of its findings, or "" and 0."""
    causes = Counter(finding.cause for finding in findings if finding.cause)
    cause, times = next(iter(causes.most_common(1)), (NOTHING, 0))
    return say(cause), times


def worst(results: Iterable[CaseResult]) -> tuple[CaseResult | None, int]:
    """Return the item to show in full, and the number of items that deviate or failed.

    The item to show is chosen by these criteria, in this order: a requirement of level "must", a
    case rather than an experiment, a known cause, and a large deviation. It is None if no item
    deviates or failed.
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
    """Return the heading of the item that is shown in full; `of` is the number of items."""
    return f"{name}, {f'the worst of {of} items' if of > 1 else 'the item'} in full:"


def everything(record: str) -> str:
    """Return a hint on how to show all deviations; `record` is the path of the record, or ""."""
    again = "the same with --strict"
    if record:
        return f"all of them: {shlex.join(['mha-conformance', 'report', record])}, or {again}"
    return f"all of them: {again}; or --record FILE.json, and mha-conformance report FILE.json"


def exit_code(results: Iterable[CaseResult], *, complete: bool) -> ExitCode:
    """Return the exit code of a run in which deviations are not failures.

    `complete` says whether every planned item has a result.
    """
    verdicts = {result.verdict for result in results}
    if not verdicts & VERIFIED:
        return ExitCode.NOTHING_VERIFIED
    return ExitCode.OK if complete and not verdicts & NOT_VERIFIED else ExitCode.INCOMPLETE


# The end, as data


SCHEMA = "mha-conformance/summary/1"

Counts = dict[str, int]


class Missed(msgspec.Struct, frozen=True):
    """A requirement that an implementation does not meet.

    Attributes:
        requirement: the id of the requirement.
        level: the level of the requirement.
        findings: the number of findings that deviate or failed, by verdict.
        cause: the text of the most frequent cause, or "".
    """

    requirement: str
    level: str
    findings: Counts
    cause: str


class Examined(msgspec.Struct, frozen=True):
    """The summary of the results of one implementation.

    Attributes:
        name: the name of the implementation.
        spec: its name on the command line.
        items: the number of its items, by verdict.
        missed: the requirements that it does not meet.
        not_verified: the number of items that could not be verified, by reason.
    """

    name: str
    spec: str
    items: Counts
    missed: list[Missed]
    not_verified: dict[str, int]


class Summary(msgspec.Struct, frozen=True):
    """The summary of a run, which `mha-conformance run --json` prints.

    Attributes:
        schema: `SCHEMA`.
        implementations: the summary of each implementation.
        planned: the number of planned items; `missing` of them were not examined.
        selection: the options that restricted the run, or "".
        record: the path of the record, or "".
        exit_code: the exit code of the command.
    """

    schema: str
    implementations: list[Examined]
    planned: int
    missing: int
    selection: str
    record: str
    exit_code: int


def summary(outcome: Outcome, code: int) -> Summary:
    """Return the summary of a run; `code` is the exit code of the command."""
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
