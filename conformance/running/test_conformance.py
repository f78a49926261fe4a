"""The test that pytest runs for each row: one case or experiment in one dtype and mode."""

from __future__ import annotations

from conformance.running.run import RunPlugin
from conformance.running.session import Row


def test_conforms(conformance_item: Row, conformance_run: RunPlugin) -> None:
    """Examine a row: check all requirements on a case, or run an experiment.

    The test passes, fails or is skipped accordingly.
    """
    conformance_run.examine(conformance_item)
