"""The tables of docs/masks.md and docs/features.md, from records of experiments.

    mha-conformance run NAMES --case probe/ --record FOLDER/NAME.json
    python docs/site/masks.py masks.md FOLDER/*.json
    python docs/site/masks.py features.md FOLDER/*.json

Each table stands between two comments, `<!-- table NAME -->` and `<!-- end -->`. Libraries of which
the same was seen share a row.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from conformance.adapter.loading import load as load_adapter
from conformance.reports.cards import GLANCES
from conformance.reports.load import load
from conformance.reports.model import Card, Column, Observed, Report
from conformance.reports.page import views
from conformance.reports.page.markdown import code, text
from conformance.reports.wording import date
from conformance.reports.writing import build

DOCS = Path(__file__).parent.parent
TABLE = re.compile(r"(?<=<!-- table )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

FORMS = {
    "bool": "True",
    "int32 0/1": "1, an integer",
    "float32 0/1": "1.0",
    "float32 0/−inf": "0 and −∞",
}
AT_A_GLANCE = {
    "masked-rows": {
        "A fully masked query gets": "Output",
        "… and gradients": "Gradients",
    },
    "causal": {
        "Causal flag, fewer queries than keys": "Fewer queries than keys",
        "Causal flag beside a mask": "Beside a mask",
    },
    "leaks": {"NaN in a blocked key": "Key", "NaN in a blocked value": "Value"},
    "weights": {"Returned weights": "Returned weights"},
}
"""Tables that are columns of the report's own, and what their headings are here."""

FEATURES = {
    "windows": {
        "A window of 2, or (1, 2)": ("=2, equal lengths", "=(1, 2), equal lengths"),
        "Fewer queries than keys": (
            "=2, fewer queries than keys",
            "=(1, 2), fewer queries than keys",
        ),
        "0": ("=0, equal lengths", "=(0, 0), equal lengths"),
        "−1": ("=-1, equal lengths", "=(-1, -1), equal lengths"),
        "Beyond the length": ("=50, equal lengths", "=(50, 50), equal lengths"),
    },
    "soft-cap": {
        "Formula": (": formula",),
        "Beside a mask": ("a key blocked",),
        "Beside a bias": ("finite numbers",),
        "0": ("=0",),
        "−1": ("=−1",),
        "∞": ("=inf",),
    },
    "sinks": {
        "A sink is": ("sinks: units",),
        "−∞": ("sinks of −inf",),
        "Every key blocked": ("every key blocked",),
    },
    "alibi": {
        "What is added": ("equal lengths",),
        "Fewer queries than keys": ("fewer queries than keys",),
        "More queries": ("more queries",),
    },
    "rotary": {"Pairs": ("whole head, halves", "whole head, neighbours")},
    "lengths": {
        "A number means": (": what it counts of keys",),
        "An entry without keys": (": queries of an entry without keys",),
        "Queries beyond": (": queries beyond it",),
    },
}
"""Tables of an experiment: headings, and how the subjects end that are in such a column."""

Row = tuple[Column, tuple[str, ...]]


def main(page: str, records: Sequence[str]) -> None:
    """Write the tables of these records into a page of the documentation."""
    report = build(load([Path(record) for record in records]).current)
    made = tables(report)
    file = DOCS / page
    told = TABLE.sub(
        lambda found: f"{found[1]}{found[2]}{made[found[1]]}", file.read_text(encoding="utf-8")
    )
    file.write_text(told, encoding="utf-8")


def tables(report: Report) -> dict[str, str]:
    """All of them, by name."""
    columns = {column.key: column for column in report.columns}
    cards = [(columns[card.column], card) for card in report.cards]
    heading = {glance.heading: glance for glance in GLANCES}
    made = {
        "masks": _table(["Argument", *FORMS.values()], _arguments(cards)),
        "same-mask": _table(
            ["Argument", *dict.fromkeys(item.written for item in report.handed)],
            _handed(report, columns),
        ),
        "versions": _versions(report),
        "modes": _table(["Mode", "How it is called"], _modes(report)),
    }
    for name, wanted in AT_A_GLANCE.items():
        rows = [
            (column, tuple(_told(heading[own].take(card)) for own in wanted))
            for column, card in cards
        ]
        made[name] = _table(list(wanted.values()), rows)
    for name, endings in FEATURES.items():
        made[name] = _table(list(endings), [*_of_feature(cards, name, endings)])
    return made


def _of_feature(
    cards: Sequence[tuple[Column, Card]], topic: str, endings: Mapping[str, tuple[str, ...]]
) -> Iterator[Row]:
    """Yield a row for each library of which the experiment has entries."""
    for column, card in cards:
        subjects = [
            subject
            for chapter in card.chapters
            if chapter.topic == topic
            for subject in chapter.subjects
        ]
        told = tuple(
            _joined(
                dict.fromkeys(
                    (item.value, ", ".join(item.modes))
                    for subject in subjects
                    if subject.subject.endswith(own)
                    for item in subject.observed
                    if item.value != "cannot be asked"
                )
            )
            or "·"
            for own in endings.values()
        )
        if set(told) != {"·"}:
            yield column, told


def _arguments(cards: Sequence[tuple[Column, Card]]) -> Iterator[Row]:
    """Arguments of a library that do the same share a row too."""
    for column, card in cards:
        seen: dict[str, dict[str, str]] = defaultdict(dict)
        for chapter in card.chapters:
            for subject in chapter.subjects if chapter.topic == "masks" else ():
                argument, _, form = subject.subject.partition(", ")
                if form in FORMS:
                    seen[argument][form] = _observed(subject.observed)
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for argument, values in seen.items():
            alike[tuple(values.get(form, "·") for form in FORMS)].append(argument)
        for values, arguments in alike.items():
            yield column, (", ".join(map(code, arguments)), *values)


def _handed(report: Report, columns: dict[str, Column]) -> Iterator[Row]:
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for item in report.handed:
        rows[item.column, item.argument].append(text(item.value))
    for (column, argument), values in rows.items():
        yield columns[column], (code(argument), *values)


def _modes(report: Report) -> Iterator[Row]:
    for column in report.columns:
        for mode in load_adapter(column.name).modes:
            yield column, (code(mode.name), text(mode.about) or "as it is")


def _observed(found: Sequence[Observed]) -> str:
    return _joined([(item.value, ", ".join(item.modes)) for item in found])


def _told(found: Sequence) -> str:
    return _joined([(item.value, item.where) for item in found]) or "·"


def _joined(values: Iterable[tuple[str, str]]) -> str:
    # A text that is added to `Markup` would be escaped once more.
    return "<br>".join(
        f"{text(value)} ({text(where)})" if where else str(text(value)) for value, where in values
    )


def _table(headings: Sequence[str], rows: Iterator[Row] | Sequence[Row]) -> str:
    """In the order of the columns; rows that are equal become one, of several libraries."""
    alike: dict[tuple[str, ...], list[Column]] = defaultdict(list)
    for column, values in rows:
        alike[values].append(column)
    lines = [["Library", *headings], [":--"] * (len(headings) + 1)]
    lines += [[_names(columns), *values] for values, columns in alike.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _names(columns: Sequence[Column]) -> str:
    """Titles, each with its backends once; textbook attentions by the names they have here."""
    backends: dict[str, list[str]] = defaultdict(list)
    for column in columns:
        backends[column.group].append(column.variant)
    textbook = [column for column in columns if column.key.startswith("tutorial-")]
    told = []
    for title, variants in backends.items():
        on = ", ".join(filter(None, variants))
        if title not in {column.group for column in textbook}:
            told.append(f"{text(title)} on {text(on)}" if on else str(text(title)))
    if textbook:
        told.append(", ".join(code(column.key) for column in textbook))
    return "<br>".join(told)


def _versions(report: Report) -> str:
    found = sorted(views.versions(report).items())
    told = ", ".join(f"{name} {' and '.join(sorted(own))}" for name, own in found)
    return f"Seen on {date(report.created)}: {told}.\n"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
