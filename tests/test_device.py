"""Code for GPUs runs without one: on stand-ins for them, each in a process of its own."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FRAMEWORKS = (
    *("torch", "paddle", "mlx"),
    # They take long to import, or to compute.
    *(pytest.param(name, marks=pytest.mark.night) for name in ("jax", "tensorflow", "tinygrad")),
)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_on_a_stand_in(framework):
    run(framework, "not at_night")


@pytest.mark.night
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_more_on_a_stand_in(framework):
    run(framework, "at_night")


def run(framework, selection):
    """Run the tests of a framework on a stand-in, in another process."""
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    file = Path(__file__).with_name(f"device_{framework}.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selection, file],
        env={**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
