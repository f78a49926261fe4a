"""How far from the reference each implementation is, in σ, and the accuracy class it reaches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from conformance.records.findings import Figures
from conformance.records.numbers import ACCURACY, LIMIT
from conformance.reports.model import Accuracy, Column, Spread
from conformance.reports.totals import Seen

CLASS_ORDER = (*ACCURACY, "")
"""From the most accurate to none."""

OUTPUT = "output.equals-definition"
"""The requirement whose figures say how accurate the output is."""

_KINDS = {
    OUTPUT: "output",
    "gradient.inputs-equal-definition": "gradients",
    "gradient.parameters-equal-definition": "gradients",
    "gradient.bias-equals-definition": "gradients",
}
"""Requirements that compare an answer with the definition, and with which part of it."""

Measured = Sequence[tuple[str, Figures]]
"""Case and figures."""


def accuracy(columns: Sequence[Column], seen: Iterable[Seen]) -> list[Accuracy]:
    """One entry for each column and dtype in which something was measured."""
    measured: dict[tuple[str, str, str], list[tuple[str, Figures]]] = defaultdict(list)
    dtypes: dict[str, None] = {}
    for key, result, finding in seen:
        kind = _KINDS.get(finding.requirement)
        if kind is not None and finding.figures is not None:
            measured[key, result.dtype, kind].append((result.case, finding.figures))
            dtypes[result.dtype] = None
    found = []
    for column in columns:
        for dtype in dtypes:
            output, gradients = (
                _spread(measured[column.key, dtype, kind]) for kind in ("output", "gradients")
            )
            if output is not None or gradients is not None:
                found.append(Accuracy(column.key, dtype, output, gradients))
    return found


def limit(entries: Iterable[Accuracy]) -> float:
    """What was allowed when the records were made."""
    spreads = [spread for entry in entries for spread in (entry.output, entry.gradients)]
    return next((spread.limit for spread in spreads if spread is not None), LIMIT)


def _spread(measured: Measured) -> Spread | None:
    if not measured:
        return None
    case, worst = max(measured, key=lambda item: item[1].max_ratio)
    reached = Counter(figures.accuracy for _, figures in measured)
    classes = {name: reached[name] for name in _known_first(reached)}
    return Spread(
        max_ratio=worst.max_ratio,
        case=case,
        rms_ratio=float(f"{median(figures.rms_ratio for _, figures in measured):.4g}"),
        limit=worst.limit,
        findings=len(measured),
        classes=classes,
        worst_class=next(reversed(classes)),
    )


def _known_first(reached: Iterable[str]) -> list[str]:
    """Classes by accuracy; one that this suite does not know stands before none."""
    order = {name: place for place, name in enumerate(CLASS_ORDER[:-1])}
    return sorted(reached, key=lambda name: (name == "", order.get(name, len(order)), name))
