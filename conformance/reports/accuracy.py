"""Distances of implementations from the reference, in σ, and from each other, in √2 σ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

import numpy as np

from conformance.records.findings import INFINITE, PREFIX, Figures
from conformance.records.numbers import ACCURACY, LIMIT, UNDERFLOW, Array, ratios
from conformance.records.record import PICTURED
from conformance.reports.model import Accuracy, Apart, Column, Loaded, Pair, Spread
from conformance.reports.tables import Located, RecordPart

# Against the reference

OUTPUT = "output.equals-definition"
"""The requirement whose figures say how accurate an output is."""

_KINDS = {
    OUTPUT: "output",
    "gradient.inputs-equal-definition": "gradients",
    "gradient.parameters-equal-definition": "gradients",
    "gradient.bias-equals-definition": "gradients",
}
"""The requirements that compare an answer with the definition, and what each of them compares."""


def accuracy(columns: Sequence[Column], seen: Iterable[Located]) -> list[Accuracy]:
    """Return the accuracy of each column in each dtype in which an error was measured."""
    measured: dict[tuple[str, str, str], list[tuple[str, Figures]]] = defaultdict(list)
    for one in seen:
        kind, figures = _KINDS.get(one.requirement), one.finding.figures
        if kind is not None and figures is not None:
            measured[one.column, one.result.dtype, kind].append((one.result.case, figures))
    entries = []
    dtypes = dict.fromkeys(dtype for _, dtype, _ in measured)
    for column in columns:
        for dtype in dtypes:
            output = _spread(measured[column.key, dtype, "output"])
            gradients = _spread(measured[column.key, dtype, "gradients"])
            if output is not None or gradients is not None:
                entries.append(Accuracy(column.key, dtype, output, gradients))
    return entries


def limit(entries: Iterable[Accuracy]) -> float:
    """Return the limit on |error| / σ that was used when the records were made.

    It is taken from the first measurement. If nothing was measured, it is `LIMIT`.
    """
    spreads = [spread for entry in entries for spread in (entry.output, entry.gradients)]
    return next((spread.limit for spread in spreads if spread is not None), LIMIT)


def _spread(measured: Sequence[tuple[str, Figures]]) -> Spread | None:
    if not measured:
        return None
    finite = [item for item in measured if item[1].max_ratio < INFINITE]
    case, worst = max(measured, key=lambda item: item[1].max_ratio)
    reached = Counter(figures.accuracy for _, figures in measured)
    # An unknown class comes last but one, before "", which means no class.
    order = {name: place for place, name in enumerate(ACCURACY)}
    names = sorted(reached, key=lambda name: (name == "", order.get(name, len(order)), name))
    return Spread(
        max_ratio=worst.max_ratio,
        case=case,
        rms_ratio=float(f"{median(figures.rms_ratio for _, figures in measured):.4g}"),
        limit=worst.limit,
        findings=len(measured),
        classes={name: reached[name] for name in names},
        worst_class=names[-1],
        comparable=_spread(finite) if len(finite) < len(measured) else None,
    )


# Against each other

_UNDEFINED = "edge/"
"""The prefix of cases whose answer the definition leaves open."""


class Exchanged(NamedTuple):
    """One implementation's output for one case, with the reference and the noise σ."""

    output: Array
    want: Array
    noise: Array

    @property
    def has_nan(self) -> bool:
        """Whether the output contains NaN."""
        return bool(np.isnan(self.output).any())


Answers = dict[tuple[str, str], dict[str, Exchanged]]
"""The outputs by (dtype, case) and then by the key of the column."""


def exchanged(records: Sequence[Loaded], parts: Iterable[RecordPart]) -> tuple[Answers, list[str]]:
    """Return the outputs stored in all records, and a line about each that cannot be compared.

    Arrays stored only for figures are skipped: attention weights, and arrays of experiments.
    """
    answers: Answers = defaultdict(dict)
    problems: list[str] = []
    items = {
        (id(part.record), result.id): (part.key, result)
        for part in parts
        for result in part.results
    }
    for path, record, arrays in records:
        by_item: dict[str, dict[str, Array]] = defaultdict(dict)
        for name, array in arrays.items():
            item, _, kind = name.rpartition("|")
            by_item[item][kind] = np.asarray(array, dtype=np.float64)
        for item, kinds in by_item.items():
            key, result = items.get((id(record), item), ("", None))
            # Attention weights and arrays of experiments are stored for figures only.
            if kinds.keys() <= {*PICTURED} or (result and result.case.startswith(PREFIX)):
                continue
            try:
                answer = Exchanged(kinds["output"], kinds["want"], kinds["noise"])
            except KeyError as missing:
                problems.append(f"{path.name}: {item} exchanges no {missing}")
                continue
            if result is None:
                problems.append(f"{path.name}: exchanges {item}, about which it has no result")
                continue
            others = answers[result.dtype, result.case]
            if all(_same_problem(answer, other) for other in others.values()):
                others.setdefault(key, answer)
            else:
                problems.append(
                    f"{path.name}: {item} was compared with another reference than the others; "
                    "left out of the pairwise comparison"
                )
    return answers, problems


def pairs(columns: Sequence[Column], answers: Answers) -> list[Pair]:
    """Return, for each dtype, all pairs of implementations that have outputs for a common case.

    Cases whose answer the definition leaves open are not compared.
    """
    compared = []
    for dtype in _dtypes(answers):
        cases = {
            case: by_column
            for (other, case), by_column in answers.items()
            if other == dtype and not case.startswith(_UNDEFINED)
        }
        for one, other in combinations((column.key for column in columns), 2):
            common = {
                case: (by_column[one], by_column[other])
                for case, by_column in cases.items()
                if one in by_column and other in by_column
            }
            if common:
                compared.append(_pair(dtype, one, other, common))
    return compared


def _pair(
    dtype: str, one: str, other: str, common: Mapping[str, tuple[Exchanged, Exchanged]]
) -> Pair:
    nan = [case for case, (mine, yours) in common.items() if mine.has_nan or yours.has_nan]
    sizes = {case: _distance(*both, dtype) for case, both in common.items() if case not in nan}
    # Among equals, choose the first by name: the order of arrays in a file is arbitrary.
    worst = max(sorted(sizes), key=lambda case: sizes[case], default="")
    size = min(sizes.get(worst, 0.0), INFINITE)
    return Pair(dtype, one, other, float(f"{size:.4g}"), worst, len(common), nan)


def apart(columns: Sequence[Column], answers: Answers, limit: float) -> list[Apart]:
    """Return the cases with NaN or without a defined answer, with the columns grouped by agreement.

    Outputs agree if the same elements are NaN and the others differ by at most `limit` · √2 σ.
    """
    alike: dict[tuple[str, str, str], Apart] = {}
    dtypes = _dtypes(answers)
    for (dtype, case), given in sorted(answers.items(), key=lambda item: dtypes.index(item[0][0])):
        order = [column.key for column in columns if column.key in given]
        nan = [key for key in order if given[key].has_nan]
        if not nan and not case.startswith(_UNDEFINED):
            continue
        groups: list[list[str]] = []
        for key in order:
            for group in groups:
                if _alike(given[group[0]], given[key], dtype, limit):
                    group.append(key)
                    break
            else:
                groups.append([key])
        entry = alike.setdefault((case, str(groups), str(nan)), Apart(case, [], groups, nan))
        entry.dtypes.append(dtype)
    return list(alike.values())


def _distance(one: Exchanged, other: Exchanged, dtype: str) -> float:
    """Return the largest |a - b| in units of √2 σ, with the σ of `one`; 0 for empty outputs.

    Differences up to the underflow of `dtype` count as 0.
    """
    underflow = UNDERFLOW.get(dtype, 0.0)
    size = np.abs(ratios(one.output, other.output, np.sqrt(2.0) * one.noise, underflow))
    return float(size.max(initial=0.0))


def _alike(one: Exchanged, other: Exchanged, dtype: str, limit: float) -> bool:
    """Return whether the same elements of two outputs are NaN and all others agree.

    Elements agree if they differ by at most `limit` · √2 σ.
    """
    nan = np.isnan(one.output)
    if (nan != np.isnan(other.output)).any():
        return False
    finite = [Exchanged(*(array[~nan] for array in item)) for item in (one, other)]
    return _distance(finite[0], finite[1], dtype) <= limit


def _same_problem(one: Exchanged, other: Exchanged) -> bool:
    return one.output.shape == other.output.shape and bool(
        np.allclose(one.want, other.want, rtol=1e-9, atol=1e-12, equal_nan=True)
    )


def _dtypes(answers: Iterable[tuple[str, str]]) -> list[str]:
    """Return the dtypes of all outputs: the suite's dtypes in its order, then any others."""
    have = dict.fromkeys(dtype for dtype, _ in answers)
    return [*(name for name in UNDERFLOW if name in have), *(n for n in have if n not in UNDERFLOW)]
