"""Deviations: findings that say the same become one, with the worst of them as evidence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from conformance.records.findings import Finding
from conformance.records.header import RequirementInfo
from conformance.reports.model import Column, Deviation
from conformance.reports.totals import WRONG, Group, Seen, grouped
from conformance.reports.wording import again

_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")


def deviations(
    columns: Sequence[Column], seen: Iterable[Seen], requirements: Sequence[RequirementInfo]
) -> list[Deviation]:
    """By implementation, then requirement, the most frequent first."""
    every = list(seen)
    asked = {_place(group.worst): group for group in grouped(every, _place)}
    level = {item.id: item.level for item in requirements}
    order = {column.key: index for index, column in enumerate(columns)}
    rank = {name: index for index, name in enumerate(level)}
    specs = {column.key: column.spec for column in columns}
    groups = _alike([own for own in every if own.finding.verdict in WRONG])
    groups.sort(
        key=lambda group: (
            order[group.worst.column],
            rank.get(group.worst.finding.requirement, len(rank)),
            -len(group),
        )
    )
    found: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for group in groups:
        column, requirement = _place(group.worst)
        anchor = anchor_of(column, requirement)
        anchors[anchor] += 1
        found.append(
            _deviation(
                f"{anchor}-{anchors[anchor]}",
                group,
                level.get(requirement, ""),
                asked[column, requirement],
                specs[column],
            )
        )
    return found


def _place(own: Seen) -> tuple[str, str]:
    return own.column, own.finding.requirement


def _alike(wrong: Sequence[Seen]) -> list[Group[Seen]]:
    """Findings that say the same.

    Where no cause is known, they are apart if their cases deviate in other dtypes: what is wrong
    in float64 alone is another fault than what is wrong in all.
    """
    says = {id(own): _says(own) for own in wrong}
    dtypes: dict[tuple[object, str], set[str]] = defaultdict(set)
    for own in wrong:
        dtypes[says[id(own)], own.result.case].add(own.result.dtype)

    def key(own: Seen) -> tuple[object, ...]:
        said = says[id(own)]
        if own.finding.cause or own.finding.figures is None:
            return (said,)
        return said, frozenset(dtypes[said, own.result.case])

    return grouped(wrong, key)


def _says(own: Seen) -> tuple[object, ...]:
    column, result, finding = own
    text = normalised(finding, result.mode, result.dtype)
    said = finding.verdict, finding.cause, finding.made_by, text
    return column, finding.requirement, *said


def _deviation(
    anchor: str, group: Group[Seen], level: str, asked: Group[Seen], spec: str
) -> Deviation:
    column, result, finding = group.worst
    results = [own.result for own in group.members]
    beside = [own.result for own in asked.members if own.result.case in group.cases]
    return Deviation(
        id=anchor,
        column=column,
        requirement=finding.requirement,
        level=level,
        verdict=finding.verdict,
        cause=finding.cause,
        made_by=finding.made_by,
        detail=finding.detail,
        times=len(group),
        of=len(asked),
        dtypes={
            dtype: len({item.case for item in results if item.dtype == dtype})
            for dtype in group.dtypes
        },
        modes=group.modes,
        everywhere=(
            {item.dtype for item in beside} <= {*group.dtypes},
            {item.mode for item in beside} <= {*group.modes},
        ),
        cases=group.cases,
        case=result.case,
        dtype=result.dtype,
        mode=result.mode,
        device=result.device,
        figures=finding.figures,
        worst=finding.worst,
        command=again(result, spec),
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
