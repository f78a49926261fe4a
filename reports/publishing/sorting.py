"""Deviations by what they are: each is matched with the baseline entry that knows of it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.records.findings import CaseResult, Finding, gravity
from conformance.records.phrase import NOTHING, Phrase
from conformance.records.record import Record
from conformance.reports.columns import column_keys
from conformance.reports.gate.baseline import KINDS, Baseline, Entry, read_baseline, recorded
from conformance.reports.gate.judging import Claims
from conformance.reports.model import Loaded
from conformance.reports.totals import WRONG

UNSORTED = "unsorted deviation"


@dataclass(frozen=True)
class Known:
    """One known deviation of one implementation, as a run found it.

    Attributes:
        kind: one of `KINDS`, or `UNSORTED`.
        times: how many findings it explains.
        requirements: those, the most frequent first.
        dtypes, modes: in which.
        cause: what most of them are diagnosed as, or "".
        made_by: "kernel", "projections" or "", where that was asked.
    """

    kind: str
    reason: str
    link: str
    reproduction: str
    when: str
    times: int
    requirements: tuple[str, ...]
    cases: tuple[str, ...]
    dtypes: tuple[str, ...]
    modes: tuple[str, ...]
    verdict: str
    detail: str
    cause: Phrase
    made_by: str


def read_baselines(paths: Iterable[Path]) -> Baseline:
    """The entries of several files, or of all in folders, as one baseline."""
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.toml")) if path.is_dir() else [path])
    ]
    entries = [entry for file in files for entry in read_baseline(file).entries]
    numbered = tuple(replace(entry, number=number) for number, entry in enumerate(entries, 1))
    return Baseline(Path("baselines"), "", numbered)


def sort(records: Sequence[Loaded], baseline: Baseline) -> dict[str, list[Known]]:
    """By column: its deviations, defects first, then by how many findings they explain."""
    keys = column_keys(records)
    return {
        keys[index, name]: known
        for index, (_, record, _) in enumerate(records)
        for name, known in _sorted(record, baseline).items()
    }


def sort_versions(
    records: Sequence[Loaded], baseline: Baseline
) -> dict[tuple[str, str], list[Known]]:
    """The same by record and implementation, of records with other versions."""
    return {
        (record.header.name, name): known
        for _, record, _ in records
        for name, known in _sorted(record, baseline).items()
    }


def _sorted(record: Record, baseline: Baseline) -> dict[str, list[Known]]:
    claims = Claims(baseline, record)
    carried = Claims(recorded(record.header.known), record)
    groups: dict[tuple[str, Entry | None], list[tuple[CaseResult, Finding]]] = defaultdict(list)
    for result in record.results:
        for finding in result.findings:
            if finding.verdict in WRONG:
                entry = claims.knows(result, finding) or carried.knows(result, finding)
                groups[result.implementation, entry].append((result, finding))
    found: dict[str, list[Known]] = {}
    for (name, entry), cells in groups.items():
        found.setdefault(name, []).append(_known(entry, cells))
    order = {kind: place for place, kind in enumerate([UNSORTED, *reversed(KINDS)])}
    for own in found.values():
        own.sort(key=lambda known: (order[known.kind], -known.times))
    return found


def _known(entry: Entry | None, cells: Sequence[tuple[CaseResult, Finding]]) -> Known:
    findings = [finding for _, finding in cells]
    worst = max(findings, key=gravity)
    causes = Counter(finding.cause for finding in findings if finding.cause)
    makers = {finding.made_by for finding in findings} - {""}
    return Known(
        kind=(entry.kind if entry else "") or UNSORTED,
        reason=entry.reason.strip() if entry else "",
        link=entry.link if entry else "",
        reproduction=entry.reproduction if entry else "",
        when=entry.condition.text if entry and entry.condition else "",
        times=len(cells),
        requirements=_frequent(finding.requirement for finding in findings),
        cases=_frequent(result.case for result, _ in cells),
        dtypes=tuple(dict.fromkeys(result.dtype for result, _ in cells)),
        modes=tuple(dict.fromkeys(result.mode for result, _ in cells)),
        verdict=worst.verdict,
        detail=worst.detail,
        cause=causes.most_common(1)[0][0] if causes else NOTHING,
        made_by=makers.pop() if len(makers) == 1 else "",
    )


def _frequent(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(word for word, _ in Counter(words).most_common())
