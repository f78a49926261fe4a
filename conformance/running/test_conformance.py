"""Every item of a run: implementation x case (or experiment) x dtype x device x mode."""

from __future__ import annotations

from conformance.running.run import Run
from conformance.running.session import Inquiry, Item


def test_conforms(conformance_item: Item | Inquiry, conformance_run: Run) -> None:
    """All requirements that the case serves, decided together; or what an experiment shows."""
    conformance_run.examine(conformance_item)
