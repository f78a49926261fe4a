"""Experiments in two processes find what one process finds, and none of them dies unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.adapter.loading import load
from conformance.commands.probe import in_two_processes
from conformance.errors import ConformanceError
from conformance.experiments import experiment
from conformance.running.session import Session, inquiries

HERE = Path(__file__).parent


def asked(spec):
    experiments = [experiment(name) for name in ("masks", "masked-rows", "causal")]
    return list(inquiries([load(spec)], experiments, "cpu"))


def test_two_processes_find_what_one_finds():
    spec = f"{HERE / 'mutants/miniatures.py'}:Correct"
    steps = []
    found = in_two_processes(spec, asked(spec), (), lambda: steps.append(1))
    session = Session()
    assert found == [session.inquire(inquiry)[0] for inquiry in asked(spec)]
    assert len(steps) == len(found) == 3


def test_a_process_that_ends_is_told(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "import conformance\n\n\n"
        "@conformance.attention_function('numpy')\n"
        "def ends(query, key, value):\n"
        "    os._exit(3)\n"
    )
    spec = f"{file}:ends"
    with pytest.raises(ConformanceError, match=r"ended its process; mha-conformance run .* says"):
        in_two_processes(spec, asked(spec), (), lambda: None)
