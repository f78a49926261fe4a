"""What the tests of all frameworks on a stand-in for a GPU share; see test_device.py."""

import numpy as np

from conformance import MaskArgument
from conformance.cases.catalogue import case_of
from conformance.running.examine import examine

NUMBERS = np.arange(24.0).reshape(2, 3, 4)
CASE = "mask/per-batch/cross"
PROBLEM = case_of(CASE).problem("float32")
MASK = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def assert_same_verdicts(name, cases=CASE, modes=()):
    """Assert that an implementation gets the same verdicts on the device as on the CPU."""
    found = {}
    for device in ("cpu", "gpu"):
        outcome = examine(name, cases=cases, dtypes="float32", modes=modes, device=device)
        assert outcome.record.header.provenance.device == device
        found[device] = {
            (result.case, result.mode, finding.requirement): (finding.verdict, finding.detail)
            for result in outcome.record.results
            for finding in result.findings
        }
    assert found["gpu"] == found["cpu"]
    assert ("conforms", "") in found["gpu"].values()
