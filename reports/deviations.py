"""Deviations: findings that say the same become one, with the worst of them as evidence."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from conformance.records.findings import Finding, gravity
from conformance.records.header import RequirementInfo
from conformance.reports.model import Column, Deviation
from conformance.reports.totals import Seen
from conformance.reports.wording import again

_WRONG = ("deviates", "error")
_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")


class Kind(NamedTuple):
    """What findings must have in common to be one deviation.

    `shape` is what the message says; `dtypes` are those in which a case deviates, where no cause
    is known: what is wrong in float64 alone is another fault than what is wrong in all.
    """

    column: str
    requirement: str
    verdict: str
    cause: str
    made_by: str
    shape: str
    dtypes: frozenset[str]


class Asked(NamedTuple):
    """What a requirement was asked of an implementation: how often, and by case in which dtypes
    and modes."""

    times: int
    dtypes: dict[str, set[str]]
    modes: dict[str, set[str]]


def deviations(
    columns: Sequence[Column], seen: Iterable[Seen], requirements: Sequence[RequirementInfo]
) -> list[Deviation]:
    """By implementation, then requirement, the most frequent first."""
    every = list(seen)
    asked = _asked(every)
    groups = _groups([item for item in every if item.finding.verdict in _WRONG])
    level = {item.id: item.level for item in requirements}
    place = {column.key: index for index, column in enumerate(columns)}
    rank = {name: index for index, name in enumerate(level)}
    specs = {column.key: column.spec for column in columns}

    def order(kind: Kind) -> tuple[int, int, int]:
        return (
            place[kind.column],
            rank.get(kind.requirement, len(rank)),
            -len(groups[kind]),
        )

    found: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for kind in sorted(groups, key=order):
        anchor = anchor_of(kind.column, kind.requirement)
        anchors[anchor] += 1
        found.append(
            _deviation(
                f"{anchor}-{anchors[anchor]}",
                groups[kind],
                level.get(kind.requirement, ""),
                asked[kind.column, kind.requirement],
                specs,
            )
        )
    return found


def _asked(seen: Sequence[Seen]) -> dict[tuple[str, str], Asked]:
    times = Counter((item.column, item.finding.requirement) for item in seen)
    found = {kind: Asked(count, {}, {}) for kind, count in times.items()}
    for column, result, finding in seen:
        own = found[column, finding.requirement]
        own.dtypes.setdefault(result.case, set()).add(result.dtype)
        own.modes.setdefault(result.case, set()).add(result.mode)
    return found


def _groups(wrong: Sequence[Seen]) -> dict[Kind, list[Seen]]:
    kinds = [
        Kind(column, own.requirement, own.verdict, own.cause, own.made_by, shape, frozenset())
        for column, result, own in wrong
        for shape in [normalised(own, result.mode, result.dtype)]
    ]
    dtypes: dict[tuple[Kind, str], set[str]] = defaultdict(set)
    for kind, item in zip(kinds, wrong, strict=True):
        dtypes[kind, item.result.case].add(item.result.dtype)
    groups: dict[Kind, list[Seen]] = defaultdict(list)
    for kind, item in zip(kinds, wrong, strict=True):
        if not kind.cause and item.finding.figures is not None:
            kind = kind._replace(dtypes=frozenset(dtypes[kind, item.result.case]))
        groups[kind].append(item)
    return groups


def _deviation(
    anchor: str, group: Sequence[Seen], level: str, asked: Asked, specs: Mapping[str, str]
) -> Deviation:
    column, result, finding = max(group, key=lambda item: gravity(item.finding))
    results = [item.result for item in group]
    dtypes = dict.fromkeys(item.dtype for item in results)
    modes = list(dict.fromkeys(item.mode for item in results))
    cases = list(dict.fromkeys(item.case for item in results))
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
        of=asked.times,
        dtypes={
            dtype: len({item.case for item in results if item.dtype == dtype}) for dtype in dtypes
        },
        modes=modes,
        everywhere=(
            all(asked.dtypes[case] <= set(dtypes) for case in cases),
            all(asked.modes[case] <= set(modes) for case in cases),
        ),
        cases=cases,
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
