"""Whose attention weights go into the record: the worst few, so that a record stays small.

For each implementation, requirement and cause these are the `MOST` gravest items. Which they are
does not depend on the order of the run: whatever is among the gravest of all was among the gravest
of its process when it came. So each process hands on what is among the gravest so far, and at the
end only the gravest of all are kept.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from conformance.records.findings import CaseResult, gravity, of_weights
from conformance.running.session import Item

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


class Gravest:
    """The gravest items so far."""

    def __init__(self, places: Mapping[str, int]) -> None:
        self._places = places
        self._found: dict[tuple[str, str, str], list[tuple[float, float, int, str]]] = defaultdict(
            list
        )

    def takes(self, result: CaseResult) -> bool:
        """Look at one more; whether it is among the gravest now."""
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
        """Items that are among the gravest of all that were looked at."""
        return {entry[-1] for own in self._found.values() for entry in own}
