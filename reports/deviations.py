"""Group equivalent deviations, and items unsupported or not verified for the same reason."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from conformance.records.findings import NOT_VERIFIED, Finding
from conformance.records.header import KnownDeviation, RequirementInfo
from conformance.reports.model import Column, Deviation, NotVerified, Open, Source, Unsupported
from conformance.reports.totals import Group, Located, by_key, grouped
from conformance.reports.wording import UNSORTED, again

_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")

_EXAMPLES = 3


def deviations(
    columns: Sequence[Column],
    seen: Sequence[Located],
    requirements: Sequence[RequirementInfo],
    known: Mapping[Located, KnownDeviation],
) -> list[Deviation]:
    """Return the deviations, sorted by implementation, requirement, and frequency (highest first).

    The worst finding of each deviation is its evidence. `known` maps findings to the baseline entry
    that covers them.
    """
    asked = {_place(group.worst): group for group in grouped(seen, _place)}
    level = {item.id: item.level for item in requirements}
    order = {column.key: index for index, column in enumerate(columns)}
    rank = {name: index for index, name in enumerate(level)}
    groups = sorted(
        _alike([one for one in seen if one.wrong], known),
        key=lambda group: (
            order[group.worst.column],
            rank.get(group.worst.requirement, len(rank)),
            -len(group),
        ),
    )
    entries: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for group in groups:
        column, requirement = place = _place(group.worst)
        # The anchor must be safe in a link, whatever the name of the implementation.
        anchor = re.sub(r"[^a-z0-9]+", "-", f"{column} {requirement}".lower()).strip("-")
        anchors[anchor] += 1
        spec = columns[order[column]].spec
        identifier = f"{anchor}-{anchors[anchor]}"
        entries.append(
            _deviation(
                identifier,
                group,
                level.get(requirement, ""),
                asked[place],
                spec,
                known.get(group.worst),
            )
        )
    return entries


def _place(one: Located) -> tuple[str, str]:
    return one.column, one.requirement


def _alike(wrong: Sequence[Located], known: Mapping[Located, KnownDeviation]) -> list[Group]:
    """Group equivalent findings.

    Measured findings without a known cause are kept apart if their cases deviate in different
    dtypes: what is wrong only in float64 is a different fault from what is wrong in all dtypes.
    """

    def says(one: Located) -> tuple[object, ...]:
        finding = one.finding
        text = normalised(finding, one.result.mode, one.result.dtype)
        entry = id(known.get(one))
        return *_place(one), entry, finding.verdict, finding.cause, finding.made_by, text

    said = {id(one): says(one) for one in wrong}
    dtypes: dict[tuple[object, str], set[str]] = defaultdict(set)
    for one in wrong:
        dtypes[said[id(one)], one.result.case].add(one.result.dtype)

    def key(one: Located) -> tuple[object, ...]:
        same = said[id(one)]
        if one.finding.cause or one.finding.figures is None:
            return (same,)
        return same, frozenset(dtypes[same, one.result.case])

    return grouped(wrong, key)


def _deviation(
    identifier: str,
    group: Group,
    level: str,
    asked: Group,
    spec: str,
    entry: KnownDeviation | None,
) -> Deviation:
    result, finding = group.worst.result, group.worst.finding
    cases = by_key((member.result for member in group.members), lambda item: item.dtype)
    beside = [one.result for one in asked.members if one.result.case in group.cases]
    return Deviation(
        **group.evidence,
        id=identifier,
        column=group.worst.column,
        requirement=finding.requirement,
        level=level,
        verdict=finding.verdict,
        cause=finding.cause,
        made_by=finding.made_by,
        detail=finding.detail,
        of=len(asked),
        dtypes={dtype: len({item.case for item in items}) for dtype, items in cases.items()},
        everywhere=(
            {item.dtype for item in beside} <= {*group.dtypes},
            {item.mode for item in beside} <= {*group.modes},
        ),
        command=again(result, spec),
        kind=(entry.kind if entry else "") or UNSORTED,
        reason=entry.reason.strip() if entry else "",
        link=entry.link if entry else "",
        reproduction=entry.reproduction if entry else "",
    )


def normalised(finding: Finding, mode: str, dtype: str) -> str:
    """Return the message of a finding with array, mode, dtype and numbers replaced.

    These vary from item to item; without them, equivalent findings have equal texts.
    """
    array = finding.figures.array if finding.figures is not None else ""
    text = finding.detail
    for word in filter(None, (array, mode, dtype)):
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", "…", text)
    return _REPEATED.sub("(…)", _NUMBER.sub("#", text))


# What was not answered


def unsupported(columns: Sequence[Column], seen: Iterable[Located]) -> list[Unsupported]:
    """Return the unsupported items by implementation and reason, the most frequent reason first."""
    left = [one for one in seen if one.finding.verdict == "unsupported"]
    groups = _unanswered(columns, left)
    entries = [
        Unsupported(group.worst.column, group.worst.finding.detail, items, len(group.cases), some)
        for group, items, some in sorted(groups, key=lambda group: -group[1])
    ]
    return [entry for column in columns for entry in entries if entry.column == column.key]


def _unanswered(
    columns: Sequence[Column], seen: Iterable[Located]
) -> list[tuple[Group, int, list[str]]]:
    """Group findings by column, verdict and reason; add the number of items and a few cases."""
    groups = grouped(seen, lambda one: (one.column, one.finding.verdict, one.finding.detail))
    place = {column.key: index for index, column in enumerate(columns)}
    return [
        (group, len({one.result.id for one in group.members}), group.cases[:_EXAMPLES])
        for group in sorted(groups, key=lambda group: place[group.worst.column])
    ]


def not_verified(
    columns: Sequence[Column],
    sources: Sequence[Source],
    seen: Iterable[Located],
    expected: Sequence[str],
    problems: Sequence[str],
) -> NotVerified:
    """Return everything that should have been verified but was not, with the reasons."""
    present = {source.name for source in sources}
    unavailable = {column.key: column.unavailable for column in columns if column.unavailable}
    left = (
        one
        for one in seen
        if one.finding.verdict in NOT_VERIFIED
        and not (one.finding.verdict == "unavailable" and one.column in unavailable)
    )
    return NotVerified(
        missing=[name for name in dict.fromkeys(expected) if name not in present],
        unavailable=unavailable,
        incomplete=[
            f"{source.name}: {source.missing} of {source.planned} planned items have no outcome; "
            "the run ended early"
            for source in sources
            if not source.complete
        ],
        narrowed={
            source.name: (
                source.provenance.selection
                + (f" ({source.deselected} items deselected)" if source.deselected else "")
            ).strip()
            for source in sources
            if source.provenance.selection or source.deselected
        },
        open=[
            Open(one.column, one.finding.verdict, one.finding.detail, items, some)
            for group, items, some in _unanswered(columns, left)
            for one in [group.worst]
        ],
        problems=list(problems),
    )
