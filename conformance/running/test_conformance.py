"""The test that pytest runs for each row: implementation x case x dtype x device x mode."""

from __future__ import annotations

from conformance.running.run import Run
from conformance.running.session import Row


def test_conforms(conformance_item: Row, conformance_run: Run) -> None:
    """Check all requirements on an item, or run the experiment of an inquiry."""
    conformance_run.examine(conformance_item)
