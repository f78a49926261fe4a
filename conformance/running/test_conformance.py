"""Every item of a run: implementation x case (or experiment) x dtype x device x mode."""

from __future__ import annotations

from conformance.running.run import Run
from conformance.running.session import Row


def test_conforms(conformance_item: Row, conformance_run: Run) -> None:
    """Decide all requirements that the case serves, or run the experiment."""
    conformance_run.examine(conformance_item)
