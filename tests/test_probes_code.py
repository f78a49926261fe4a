"""The lines on convention cards run without this suite, and print what stands beside them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from conformance.adapter import layouts
from conformance.adapter.arguments import AXES
from conformance.adapter.code import SMALL
from conformance.adapters import torch_mha
from conformance.experiments import experiment
from conformance.experiments.experiment import hiding_code, mask_lines
from conformance.requirements.laboratory import Laboratory

RUNNER = """
import contextlib, io, json, re, sys
from conformance.adapter.loading import load
from conformance.experiments import experiment
from conformance.requirements.laboratory import Laboratory
from conformance.words import say

def printed(lines):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(lines, {})
    return out.getvalue().strip()

found = []
for name in sys.argv[2:]:
    adapter = load(sys.argv[1])
    asked = [mode for mode in adapter.modes if mode.gradients and mode.every_case]
    labs = [Laboratory(adapter, "float32", "cpu", mode) for mode in asked]
    for entry in [entry for lab in labs for entry in experiment(name).run(lab).entries]:
        if entry.code and not any(entry.code == lines for _, _, lines, _, _ in found):
            given = next(name for name in re.findall(r", (\\w+)=", entry.code)
                         if name in say(entry.subject))
            without = re.sub(rf", {given}=(True|[\\w.]+\\(mask\\))", "", entry.code)
            assert without != entry.code
            texts = [say(entry.subject), say(entry.value), entry.code]
            found.append([*texts, printed(entry.code), printed(without)])
print("FOUND", json.dumps(found))
"""


def run(name, *experiments):
    """(subject, value, code, printed, printed without the mask), in modes that have code."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, name, *experiments],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND ")[2])


ALL = ("masks", "masked-rows", "causal")
ASKED = {
    "torch-mha": ("torch", ALL, 12),
    "ours": ("torch", ALL, 8),
    "tutorial-1": ("torch", ALL, 7),
    "tutorial-2": ("torch", ALL, 7),
    "tutorial-3": ("torch", ALL, 7),
    "tutorial-4": ("torch", ALL, 7),
    "tutorial-5": ("torch", ALL, 7),
    "flax-linen": ("flax", ("masks",), 6),
    "flax-nnx": ("flax", ("causal",), 1),
    "keras-torch-mha": ("keras", ALL, 20),
    "keras-tensorflow-mha": ("keras", ("masked-rows", "causal"), 4),
}


@pytest.mark.night
@pytest.mark.parametrize("name", ASKED)
def test_the_code_prints_what_it_says(name):
    needed, experiments, least = ASKED[name]
    pytest.importorskip(needed)
    found = run(name, *experiments)
    assert len(found) >= least
    for subject, value, lines, printed, without in found:
        told = lines.splitlines()[-1].partition("  # ")[2]
        # The tutorials and our own layer are installed beside the suite, and do without it.
        assert not re.search(r"conformance(?!\.adapters\.(ours|tutorials))", lines)
        if told.startswith("0.0: "):
            assert float(printed) == 0, (subject, lines, printed)
            if value != "ignored":
                # What is shown is the mask's doing: without it, the number is another.
                assert float(without) > 1e-4, (subject, lines, without)
        else:
            assert told == value == "NaN", (subject, value, told)
            assert set(printed.strip("[]").split()) == {"nan"}
            assert "nan" not in without


def entries_of(adapter, mode):
    return experiment("masked-rows").run(Laboratory(adapter, "float32", "cpu", mode)).entries


def test_only_the_mode_that_the_lines_take_has_code():
    pytest.importorskip("torch")
    adapter = torch_mha.TorchMultiheadAttention()
    known = {mode.name: mode for mode in adapter.modes}
    assert any(entry.code for entry in entries_of(adapter, known["train"]))
    assert not any(entry.code for entry in entries_of(adapter, known["fast-path"]))
    zeros = [entry.code for entry in entries_of(adapter, known["eval-no-weights"]) if entry.code]
    assert zeros
    assert all("need_weights=False" in lines for lines in zeros)


def test_without_an_example_there_is_no_code():
    class Silent(torch_mha.TorchMultiheadAttention):
        def example_for(self, shape, dtype, scale, mode):
            return None

    adapter = Silent()
    lab = Laboratory(adapter, "float32", "cpu", adapter.modes[0])
    assert hiding_code(lab, "mask", [], "nothing") == ""


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        ("batch key", (2, 4)),
        ("query key", (4, 4)),
        ("(batch heads) query key", (4, 4, 4)),
        ("batch heads query key", (2, 2, 4, 4)),
        ("query (heads key)", (4, 8)),
    ],
)
def test_the_shape_of_a_layout(layout, shape):
    assert layouts.shape(layout, dict(zip(AXES, SMALL.logits, strict=True))) == shape


def test_a_mask_is_written_in_its_own_dtype():
    (line,) = mask_lines("batch key", "own", 0.0, float("-inf"), "marks token 0")
    assert line == "mask = np.full((2, 4), 0, 'float32'); mask[..., 0] = -np.inf  # marks token 0"
    (line,) = mask_lines("batch key", "bool", 1.0, None, "blocks every token")
    assert re.fullmatch(r"mask = np\.full\(\(2, 4\), True, 'bool'\)  # blocks every token", line)
