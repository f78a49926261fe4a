"""What one process does with an item: examine it, and pack what was found into a journal line."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.adapter.base import Adapter
from conformance.definition.dtypes import Array
from conformance.records.findings import CaseResult, gravity, of_weights
from conformance.records.phrase import Phrase
from conformance.records.record import PICTURED, encode_line
from conformance.running.session import Inquiry, Item, Session


def is_exchanged(item: Item | Inquiry) -> bool:
    """Whether the output of an item goes into the record."""
    return isinstance(item, Item) and item.case.exchanged and item.mode is item.adapter.modes[0]


@dataclass
class Examiner:
    """Examines items one after another; remembers what they share.

    Attributes:
        places: item id to its place in the run, for those whose weights may go into the record.
    """

    places: Mapping[str, int]
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self._worst = Worst(self.places)

    def examine(self, item: Item | Inquiry) -> tuple[CaseResult, bytes]:
        """The result, and the same with its arrays as a journal line."""
        if isinstance(item, Inquiry):
            result, arrays = self.session.inquire(item)
        else:
            result = self.session.examine(item)
            arrays = self._exchanged(item, result)
        return result, encode_line(result, arrays)

    def _exchanged(self, item: Item, result: CaseResult) -> dict[str, Array]:
        found: dict[str, Array] = {}
        if is_exchanged(item):
            found |= self.session.examination(item).exchanged()
        if self._worst.takes(result):
            found |= self.session.examination(item).pictured()
        return found


# Attention weights


MOST = 2
"""Items of one implementation, requirement and cause."""
MOST_ELEMENTS = 4096
"""Weights of one item: more would make records large, and nobody sees more in a figure."""


def places(items: Iterable[Item]) -> dict[str, int]:
    """Id to place of the items that are small enough."""
    return {
        item.id: place
        for place, item in enumerate(items)
        if math.prod(item.case.shape.logits) <= MOST_ELEMENTS
    }


class Worst:
    """Whose attention weights go into the record: the worst few, so that a record stays small.

    For each implementation, requirement and cause these are the `MOST` worst items. Which they are
    does not depend on the order of the run: whatever is among the worst of all was among the worst
    of its process when it came. So each process hands on what is among the worst so far, and at the
    end only the worst of all are kept.
    """

    def __init__(self, places: Mapping[str, int]) -> None:
        self._places = places
        self._found: dict[tuple[str, str, Phrase], list[tuple[float, float, int, str]]]
        self._found = defaultdict(list)

    def takes(self, result: CaseResult) -> bool:
        """Look at one more; whether it is among the worst now."""
        place = self._places.get(result.id)
        taken = False
        for finding in result.findings if place is not None else ():
            if finding.verdict != "deviates" or not of_weights(finding.figures, finding.worst):
                continue
            assert place is not None
            own = self._found[result.implementation, finding.requirement, finding.cause]
            ratio, rms = gravity(finding)
            # Of equals the first in the run's order, which is the one that a report shows.
            entry = (-ratio, -rms, place, result.id)
            bisect.insort(own, entry)
            del own[MOST:]
            taken = taken or entry in own
        return taken

    @property
    def ids(self) -> set[str]:
        """Items that are among the worst of all that were looked at."""
        return {entry[-1] for own in self._found.values() for entry in own}


def kept(worst: Collection[str], places: Collection[str]) -> Callable[[str], bool]:
    """Whether the record has an array, by "item id|array": all but weights of other items."""

    def keep(name: str) -> bool:
        item, _, part = name.rpartition("|")
        return item in worst or item not in places or part not in PICTURED

    return keep


# After other calls


def conforms_alone(row: Item | Inquiry) -> bool:
    """Whether a fresh instance of the implementation conforms at this item.

    What compiles would compile again, for each item that deviates: that costs more than it tells.
    """
    if row.adapter.compiles:
        return False
    again = fresh(row.adapter)
    if again is None:
        return False
    mode = next((mode for mode in again.modes if mode.name == row.mode.name), None)
    if mode is None:
        return False
    session = Session(explains=False)
    if isinstance(row, Inquiry):
        inquiry = Inquiry(again, row.experiment, row.dtype, row.device, mode)
        result, _ = session.inquire(inquiry)
    else:
        result = session.examine(Item(again, row.case, row.dtype, row.device, mode))
    return result.verdict in ("conforms", "observed")


def fresh(adapter: Adapter) -> Adapter | None:
    """Another instance, without what the first one keeps; None where there is no way to make it."""
    kind: Any = type(adapter)
    function = getattr(adapter, "_function", None)
    try:
        made: Adapter = kind() if function is None else kind(function)
    except Exception:
        return None
    made.name, made.title = adapter.name, adapter.title
    return made
