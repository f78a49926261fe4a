"""Settings for the suite's own tests."""

import gc
import os
import signal
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings

# Arrays are tiny: more threads only wait for each other, the more so under xdist.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How fast examples are drawn depends on what else the machine does.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave to the night what the marker `sample` does not choose, before `-m` selects."""
    seen = Counter()
    for item in items:
        for mark in item.iter_markers("sample"):
            (every,) = mark.args
            if seen[item.function] % every:
                item.add_marker(pytest.mark.night)
            seen[item.function] += 1


def pytest_collection_finish():
    """Exempt what was imported and collected from garbage collection, which takes 5 % otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def processes_can_be_interrupted():
    """Shells make those in their background ignore it, and these hand that on to their own."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def folders_of_modules_are_forgotten(monkeypatch):
    """What one test imported an implementation from hides nothing from the next one."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(scope="session", autouse=True)
def every_record_is_as_its_schema_says(tmp_path_factory):
    """Whatever the tests made the suite write, in this process or in another."""
    yield
    from schemas import record_faults

    assert not record_faults(tmp_path_factory.getbasetemp())
