"""Does it also deviate when nothing was asked before? Else something is kept between calls."""

from __future__ import annotations

from typing import Any

from conformance.adapter.base import Adapter
from conformance.running.session import Inquiry, Item, Session


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
