"""What one process does with an item: examine it, and pack what was found into a journal line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.definition.dtypes import Array
from conformance.records.findings import CaseResult
from conformance.records.record import encode_line
from conformance.running import pictured
from conformance.running.session import Inquiry, Item, Session

EXCHANGED = (
    "plain/no-mask/self",
    "plain/no-mask/cross",
    "plain/no-mask/gqa",
    "plain/no-mask/additive",
    "mask/key-padding/cross",
    "mask/per-batch/self",
    "causal/square/self",
    "causal/top-left/cross",
    "logits/large/cross",
    "edge/fully-masked-row/cross",
)
"""Cases whose outputs go into the record, so that implementations can be compared pairwise."""


@dataclass
class Examiner:
    """Examines items one after another; remembers what they share.

    Attributes:
        places: item id to its place in the run, for those whose weights may go into the record.
    """

    places: Mapping[str, int]
    session: Session = field(default_factory=Session)

    def __post_init__(self) -> None:
        self._gravest = pictured.Gravest(self.places)

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
        if item.case.id in EXCHANGED and item.mode is item.adapter.modes[0]:
            found |= self.session.examination(item).exchanged()
        if self._gravest.takes(result):
            found |= self.session.examination(item).pictured()
        return found
