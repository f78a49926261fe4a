"""Group deviations and unanswered items: findings that say the same become one entry."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from conformance.records.findings import NOT_VERIFIED, Finding
from conformance.records.header import RequirementInfo
from conformance.reports.model import Column, Deviation, NotVerified, Open, Source, Unsupported
from conformance.reports.totals import WRONG, Group, Seen, by_key, grouped
from conformance.reports.wording import again

_NUMBER = re.compile(r"-?\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b")
_REPEATED = re.compile(r"\(#,#\)(?: \(#,#\))*")

_EXAMPLES = 3


def deviations(
    columns: Sequence[Column], seen: Sequence[Seen], requirements: Sequence[RequirementInfo]
) -> list[Deviation]:
    """Return the deviations by implementation, then requirement, the most frequent first.

    The worst finding of each is its evidence.
    """
    asked = {_place(group.worst): group for group in grouped(seen, _place)}
    level = {item.id: item.level for item in requirements}
    order = {column.key: index for index, column in enumerate(columns)}
    rank = {name: index for index, name in enumerate(level)}
    groups = sorted(
        _alike([one for one in seen if one.finding.verdict in WRONG]),
        key=lambda group: (
            order[group.worst.column],
            rank.get(group.worst.finding.requirement, len(rank)),
            -len(group),
        ),
    )
    entries: list[Deviation] = []
    anchors: Counter[str] = Counter()
    for group in groups:
        column, requirement = place = _place(group.worst)
        # Safe in a link, whatever the implementation is called.
        anchor = re.sub(r"[^a-z0-9]+", "-", f"{column} {requirement}".lower()).strip("-")
        anchors[anchor] += 1
        spec = columns[order[column]].spec
        identifier = f"{anchor}-{anchors[anchor]}"
        entries.append(
            _deviation(identifier, group, level.get(requirement, ""), asked[place], spec)
        )
    return entries


def _place(one: Seen) -> tuple[str, str]:
    return one.column, one.finding.requirement


def _alike(wrong: Sequence[Seen]) -> list[Group[Seen]]:
    """Group findings that say the same.

    Where no cause is known, they are apart if their cases deviate in other dtypes: what is wrong
    in float64 alone is another fault than what is wrong in all.
    """

    def says(one: Seen) -> tuple[object, ...]:
        finding = one.finding
        text = normalised(finding, one.result.mode, one.result.dtype)
        return *_place(one), finding.verdict, finding.cause, finding.made_by, text

    said = {id(one): says(one) for one in wrong}
    dtypes: dict[tuple[object, str], set[str]] = defaultdict(set)
    for one in wrong:
        dtypes[said[id(one)], one.result.case].add(one.result.dtype)

    def key(one: Seen) -> tuple[object, ...]:
        same = said[id(one)]
        if one.finding.cause or one.finding.figures is None:
            return (same,)
        return same, frozenset(dtypes[same, one.result.case])

    return grouped(wrong, key)


def _deviation(
    identifier: str, group: Group[Seen], level: str, asked: Group[Seen], spec: str
) -> Deviation:
    column, result, finding = group.worst
    cases = by_key((member.result for member in group.members), lambda item: item.dtype)
    beside = [one.result for one in asked.members if one.result.case in group.cases]
    return Deviation(
        id=identifier,
        column=column,
        requirement=finding.requirement,
        level=level,
        verdict=finding.verdict,
        cause=finding.cause,
        made_by=finding.made_by,
        detail=finding.detail,
        times=len(group),
        of=len(asked),
        dtypes={dtype: len({item.case for item in items}) for dtype, items in cases.items()},
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
    """Return the detail without what varies from item to item: array, mode, dtype, numbers."""
    array = finding.figures.array if finding.figures is not None else ""
    text = finding.detail
    for word in filter(None, (array, mode, dtype)):
        text = re.sub(rf"(?<![\w.]){re.escape(word)}(?![\w.])", "…", text)
    return _REPEATED.sub("(…)", _NUMBER.sub("#", text))


# What was not answered


def unsupported(columns: Sequence[Column], seen: Iterable[Seen]) -> list[Unsupported]:
    """Return the reasons by implementation, the most frequent first."""
    items: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for key, result, finding in seen:
        if finding.verdict == "unsupported":
            items[key][finding.detail][result.id] = result.case
    entries = []
    for column in columns:
        for reason, cases in sorted(items[column.key].items(), key=lambda item: -len(item[1])):
            names = list(dict.fromkeys(cases.values()))
            entries.append(
                Unsupported(column.key, reason, len(cases), len(names), names[:_EXAMPLES])
            )
    return entries


def not_verified(
    columns: Sequence[Column],
    sources: Sequence[Source],
    seen: Iterable[Seen],
    expected: Sequence[str],
    problems: Sequence[str],
) -> NotVerified:
    """Return everything that was to be verified and was not, with the reason."""
    present = {source.name for source in sources}
    unavailable = {column.key: column.unavailable for column in columns if column.unavailable}
    items: dict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for column, result, finding in seen:
        if finding.verdict in NOT_VERIFIED and not (
            finding.verdict == "unavailable" and column in unavailable
        ):
            items[column, finding.verdict, finding.detail][result.id] = result.case
    place = {column.key: index for index, column in enumerate(columns)}
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
            source.name: _narrowed(source)
            for source in sources
            if source.provenance.selection or source.deselected
        },
        open=[
            Open(*about, len(cases), list(dict.fromkeys(cases.values()))[:_EXAMPLES])
            for about, cases in sorted(items.items(), key=lambda item: place[item[0][0]])
        ],
        problems=list(problems),
    )


def _narrowed(source: Source) -> str:
    deselected = f" ({source.deselected} items deselected)" if source.deselected else ""
    return f"{source.provenance.selection}{deselected}".strip()
