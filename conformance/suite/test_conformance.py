"""Every item of a run: implementation x case x dtype x device x mode."""

from __future__ import annotations

from conformance.session import Item
from conformance.suite.running import Run


def test_conforms(conformance_item: Item, conformance_run: Run) -> None:
    """All requirements that the case serves, decided together."""
    conformance_run.examine(conformance_item)
