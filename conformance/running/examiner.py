"""Examine rows one after another; decide which of their arrays a record keeps."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.adapter.base import Adapter
from conformance.definition.dtypes import Array
from conformance.records.findings import CaseResult, gravity, of_weights
from conformance.records.phrase import Phrase
from conformance.records.record import PICTURED
from conformance.running.session import Inquiry, Item, Row, Session


def is_exchanged(row: Row) -> bool:
    """Return whether the output goes into the record, to be compared between implementations."""
    return isinstance(row, Item) and row.case.exchanged and row.mode is row.adapter.modes[0]


@dataclass
class Examiner:
    """An examiner of rows in one process, with the state that they share.

    Attributes:
        places: item id to its place in the run, for items whose weights may go into the record.
    """

    places: Mapping[str, int]
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self._worst = Worst(self.places)

    def examine(self, row: Row) -> tuple[CaseResult, dict[str, Array]]:
        """Return the findings, and the arrays that a record may keep."""
        result, arrays = self.session.ask(row)
        if isinstance(row, Item):
            if is_exchanged(row):
                arrays |= self.session.examination(row).exchanged()
            if self._worst.takes(result):
                arrays |= self.session.examination(row).pictured()
        return result, arrays


# Attention weights


MOST = 2
"""Items of one implementation, requirement and cause."""
MOST_ELEMENTS = 4096
"""Weights of one item: more would make records large, and a figure could not show them."""


def places(rows: Iterable[Row]) -> dict[str, int]:
    """Return the place of each item that is small enough, by id."""
    return {
        row.id: place
        for place, row in enumerate(rows)
        if isinstance(row, Item) and math.prod(row.case.shape.logits) <= MOST_ELEMENTS
    }


class Worst:
    """The items whose attention weights go into the record: few, so that a record stays small.

    For each implementation, requirement and cause these are the `MOST` worst items. Which they are
    does not depend on the order of the run: an item that is among the worst of all was among the
    worst of its process when it was examined. So each process hands over what is among its worst so
    far, and at the end only the worst of all are kept.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self._places = places
        self._entries: dict[tuple[str, str, Phrase], list[tuple[float, float, int, str]]]
        self._entries = defaultdict(list)

    def takes(self, result: CaseResult) -> bool:
        """Add a result; return whether it is among the worst now."""
        if result.id not in self._places:
            return False
        taken = False
        for finding in result.findings:
            if finding.verdict != "deviates" or not of_weights(finding.figures, finding.worst):
                continue
            entries = self._entries[result.implementation, finding.requirement, finding.cause]
            ratio, rms = gravity(finding)
            # Of equals the first in the run's order, which is the one that a report shows.
            entry = (-ratio, -rms, self._places[result.id], result.id)
            bisect.insort(entries, entry)
            del entries[MOST:]
            taken = taken or entry in entries
        return taken

    @property
    def ids(self) -> set[str]:
        """Return the items that are among the worst of all results."""
        return {entry[-1] for entries in self._entries.values() for entry in entries}


def worst_of(results: Iterable[CaseResult], places: Mapping[str, int]) -> set[str]:
    """Return the ids of the items whose attention weights go into a record of these results."""
    worst = Worst(places)
    for result in results:
        worst.takes(result)
    return worst.ids


def kept(results: Iterable[CaseResult], places: Mapping[str, int]) -> Callable[[str], bool]:
    """Return whether a record keeps an array, by "item id|array": all but weights of most items."""
    worst = worst_of(results, places)

    def keep(name: str) -> bool:
        item, _, part = name.rpartition("|")
        return item in worst or item not in places or part not in PICTURED

    return keep


# State between calls


def conforms_alone(row: Row) -> bool:
    """Return whether a fresh instance of the implementation conforms to this item.

    Returns False for implementations that compile: compiling again for each deviating item costs
    more than the answer is worth.
    """
    if row.adapter.compiles:
        return False
    again = fresh(row.adapter)
    if again is None:
        return False
    mode = next((mode for mode in again.modes if mode.name == row.mode.name), None)
    if mode is None:
        return False
    alone: Row
    if isinstance(row, Inquiry):
        alone = Inquiry(again, row.experiment, row.dtype, row.device, mode)
    else:
        alone = Item(again, row.case, row.dtype, row.device, mode)
    return Session(explains=False).ask(alone)[0].verdict in ("conforms", "observed")


def fresh(adapter: Adapter) -> Adapter | None:
    """Return another instance, without the state of the first; None if it cannot be made."""
    kind: Any = type(adapter)
    function = getattr(adapter, "_function", None)
    try:
        made: Adapter = kind() if function is None else kind(function)
    except Exception:
        return None
    made.name, made.title = adapter.name, adapter.title
    return made
