"""What was not answered: unsupported (which says something), and not verified (which does not)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from conformance.records.findings import NOT_VERIFIED
from conformance.reports.model import Column, NotVerified, Open, Source, Unsupported
from conformance.reports.totals import Seen

_EXAMPLES = 3


def unsupported(columns: Sequence[Column], seen: Iterable[Seen]) -> list[Unsupported]:
    """Reasons by implementation, the most frequent first."""
    items: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for key, result, finding in seen:
        if finding.verdict == "unsupported":
            items[key][finding.detail][result.id] = result.case
    found = []
    for column in columns:
        reasons = items[column.key]
        for reason in sorted(reasons, key=lambda reason: -len(reasons[reason])):
            cases = list(dict.fromkeys(reasons[reason].values()))
            found.append(
                Unsupported(column.key, reason, len(reasons[reason]), len(cases), cases[:_EXAMPLES])
            )
    return found


def not_verified(
    columns: Sequence[Column],
    sources: Sequence[Source],
    seen: Iterable[Seen],
    expected: Sequence[str],
    problems: Sequence[str],
) -> NotVerified:
    """Everything that was to be verified and was not, with the reason."""
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
        incomplete=[_incomplete(source) for source in sources if not source.complete],
        narrowed={
            source.name: _narrowed(source)
            for source in sources
            if source.provenance.selection or source.deselected
        },
        open=[
            Open(
                column,
                verdict,
                reason,
                len(found),
                list(dict.fromkeys(found.values()))[:_EXAMPLES],
            )
            for (column, verdict, reason), found in sorted(
                items.items(), key=lambda item: place[item[0][0]]
            )
        ],
        problems=list(problems),
    )


def _incomplete(source: Source) -> str:
    return (
        f"{source.name}: {source.missing} of {source.planned} planned items have no outcome; "
        "the run ended early"
    )


def _narrowed(source: Source) -> str:
    told = source.provenance.selection
    if source.deselected:
        told += f" ({source.deselected} items deselected)"
    return told.strip()
