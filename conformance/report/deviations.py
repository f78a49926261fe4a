"""Deviations: findings that say the same become one, with the worst of them as evidence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from conformance.findings import Finding, gravity
from conformance.report.matrix import levels
from conformance.report.model import Column, Deviation
from conformance.report.totals import Seen
from conformance.suite.message import again

_WRONG = ("deviates", "error")
_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")


def deviations(columns: Sequence[Column], seen: Iterable[Seen]) -> list[Deviation]:
    """By implementation, then requirement, the most frequent first."""
    groups: dict[tuple[str, str, str, str, str], list[Seen]] = defaultdict(list)
    asked: Counter[tuple[str, str]] = Counter()
    for item in seen:
        column, result, finding = item
        asked[column, finding.requirement] += 1
        if finding.verdict in _WRONG:
            same = normalised(finding, result.mode, result.dtype)
            groups[column, finding.requirement, finding.verdict, finding.cause, same].append(item)
    level = levels()
    place = {column.key: index for index, column in enumerate(columns)}
    rank = {name: index for index, name in enumerate(level)}
    specs = {column.key: column.spec for column in columns}

    def order(kind: tuple[str, str, str, str, str]) -> tuple[int, int, int]:
        column, requirement, *_ = kind
        return place[column], rank.get(requirement, len(rank)), -len(groups[kind])

    found: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for kind in sorted(groups, key=order):
        column, requirement = kind[:2]
        anchor = anchor_of(column, requirement)
        anchors[anchor] += 1
        found.append(
            _deviation(
                f"{anchor}-{anchors[anchor]}",
                groups[kind],
                level.get(requirement, ""),
                asked[column, requirement],
                specs,
            )
        )
    return found


def _deviation(
    anchor: str, group: Sequence[Seen], level: str, of: int, specs: Mapping[str, str]
) -> Deviation:
    column, result, finding = max(group, key=lambda item: gravity(item.finding))
    results = [item.result for item in group]
    return Deviation(
        id=anchor,
        column=column,
        requirement=finding.requirement,
        level=level,
        verdict=finding.verdict,
        cause=finding.cause,
        detail=finding.detail,
        times=len(group),
        of=of,
        dtypes=list(dict.fromkeys(item.dtype for item in results)),
        modes=list(dict.fromkeys(item.mode for item in results)),
        cases=list(dict.fromkeys(item.case for item in results)),
        case=result.case,
        dtype=result.dtype,
        mode=result.mode,
        device=result.device,
        figures=finding.figures,
        worst=finding.worst,
        command=again(result, specs[column]),
    )


def normalised(finding: Finding, mode: str, dtype: str) -> str:
    """The detail without what varies from item to item: array, mode, dtype, numbers."""
    array = finding.figures.array if finding.figures is not None else ""
    text = finding.detail
    for word in (array, mode, dtype):
        if word:
            text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", "…", text)
    return _REPEATED.sub("(…)", _NUMBER.sub("#", text))


def anchor_of(column: str, requirement: str) -> str:
    """Safe in a link, whatever the implementation is called."""
    return re.sub(r"[^a-z0-9]+", "-", f"{column} {requirement}".lower()).strip("-")
