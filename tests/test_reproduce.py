"""Reproductions run on their own: they fail while the defect is there, and pass without it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from looped import for_each

from conformance.adapter.loading import load, registered
from conformance.adapter.native import Layer
from conformance.adapter.parameters import ParameterTable
from conformance.adapters.transformers_models import ADAPTERS as MODELS
from conformance.cases.catalogue import catalogue, find_cases
from conformance.cli import main
from conformance.definition.expectation import expect
from conformance.errors import ExitCode
from conformance.explore.script import MOST_LINES, TooLong, literal, parameter, script
from conformance.explore.trial import Trial, TrialDeviation
from conformance.records.findings import STORED
from conformance.records.numbers import LIMIT

HERE = Path(__file__).parent
REPRODUCTIONS = sorted((HERE.parent / "docs" / "reproductions").glob("*.py"))
ALONE = """
import contextlib, io, json, runpy, sys, traceback
sys.modules["conformance"] = None
ended = {}
for path in sys.argv[1:]:
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            runpy.run_path(path)
        except BaseException:
            code = 1
            traceback.print_exc()
    ended[path] = code, printed.getvalue()
print(json.dumps(ended), file=sys.__stdout__)
"""
"""One process for several scripts of one library, which takes seconds to import."""
NEEDS = {
    "keras": ("keras", "tensorflow"),
    "kerashub": ("keras_hub",),
    "flax": ("flax", "jax"),
    "ring": ("ring_attention_pytorch",),
    "rotary": ("rotary_embedding_torch",),
    "x": ("x_transformers",),
}

MINE = """
import numpy as np
from conformance import MaskArgument, attention_function

@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"))
def mine(query, key, value, mask=True):
    logits = query @ key.swapaxes(-1, -2) * query.dtype.type(query.shape[-1] ** {power})
    logits = np.where(mask, logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ value
"""


def run(path):
    """Exit code and output of a script in a process of its own."""
    return launch([sys.executable, str(path)], path.parent)


def run_alone(*paths):
    """Exit code and output of each script, in one process that cannot import this suite."""
    command = [sys.executable, "-c", ALONE, *map(str, paths)]
    code, printed = launch(command, paths[0].parent)
    assert code == 0, printed
    ended = json.loads(printed.splitlines()[-1])
    return [tuple(ended[str(path)]) for path in paths]


def launch(command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    # Other tests of this process have chosen a backend; each script chooses its own.
    environment.pop("KERAS_BACKEND", None)
    ran = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    return ran.returncode, ran.stderr + ran.stdout


@for_each(path=REPRODUCTIONS)
def test_reproductions_of_the_docs_are_short_and_need_no_suite(path):
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 100
    assert "conformance" not in text


@for_each(path=sorted((HERE.parent / "docs" / "reproductions").rglob("*.py")))
def test_a_reproduction_says_what_is_wrong_without_words_of_this_suite(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    chapters = "|".join({STORED, *(case.chapter for case in catalogue())})
    assert not re.search(rf"(?<![\w./])({chapters})/[a-z]", head), "a case"
    assert "the definition's" not in head


def library(path):
    """What scripts of one process share: the library, Keras' backend, and whether they compile.

    What torch compiles takes ten times as long as all of its other scripts together.
    """
    backend = re.search(r'KERAS_BACKEND"\W+(\w+)', path.read_text("utf-8"))
    compiled = "compiled" if "flex" in path.stem else ""
    return path.stem.split("_")[0], backend[1] if backend else compiled


LIBRARIES = sorted({library(path) for path in REPRODUCTIONS})


@pytest.mark.parametrize(
    "wanted",
    [pytest.param(own, marks=[pytest.mark.night] * (own != ("torch", ""))) for own in LIBRARIES],
    ids=lambda wanted: "-".join(filter(None, wanted)),
)
def test_reproductions_of_the_docs_run_without_this_suite(wanted):
    for package in NEEDS.get(wanted[0], wanted[:1]):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    paths = [path for path in REPRODUCTIONS if library(path) == wanted]
    for path, (code, printed) in zip(paths, run_alone(*paths), strict=True):
        assert re.search(r"got \S+, want \S+, apart \S+", printed), (path.name, printed)
        # 0 once the library is fixed: then the page that says otherwise is out of date.
        fails = code == 1 and "AssertionError" in printed
        # Bits may be equal on another processor.
        assert fails or (code == 0 and "_bits_of_" in path.name), (path.name, printed)


def test_there_are_three_of_them_and_the_page_names_each():
    page = (HERE.parent / "docs" / "explore.md").read_text(encoding="utf-8")
    assert len(REPRODUCTIONS) >= 3
    assert all(f"reproductions/{path.name}" in page for path in REPRODUCTIONS)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE.format(power=-1))
    return path


def test_a_script_fails_with_the_defect_and_passes_without(mine, capsys):
    output = mine.parent / "repro.py"
    arguments = ["reproduce", "mask/key-padding/cross", f"{mine}:mine", "-o", str(output)]
    assert main(arguments) == ExitCode.DEVIATES
    told = capsys.readouterr().out
    assert "fails as it should" in told
    assert "head size 2" in told
    code, told = run(output)
    assert code == 1
    assert "AssertionError: more than rounding" in told
    mine.write_text(MINE.format(power=-0.5))
    assert run(output)[0] == 0


def test_a_script_that_fails_in_another_way_is_told_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("conformance.explore.script.script", lambda *_: "import no_such_module\n")
    arguments = ["reproduce", "plain/no-mask/cross", f"{HERE}/mutants/deviants.py:Batched"]
    assert main([*arguments, "-o", str(tmp_path / "r.py")]) == ExitCode.DEVIATES
    told = capsys.readouterr().out
    assert "it fails in another way; correct it before you use it: ModuleNotFoundError: No" in told


def test_nothing_is_written_where_nothing_deviates(tmp_path, capsys):
    output = tmp_path / "repro.py"
    arguments = ["reproduce", "plain/no-mask/cross", f"{HERE}/mutants/miniatures.py:Correct"]
    assert main([*arguments, "-o", str(output)]) == ExitCode.OK
    assert "nothing deviates" in capsys.readouterr().out
    assert not output.exists()


def test_what_raises_is_named_once(tmp_path, capsys):
    output = tmp_path / "repro.py"
    arguments = ["reproduce", "plain/no-mask/cross", f"{HERE}/mutants/miniatures.py:Puzzled"]
    assert main([*arguments, "-o", str(output)]) == ExitCode.DEVIATES
    first = capsys.readouterr().out.splitlines()[0]
    kind = first.partition(": ")[0]
    assert kind.endswith("Error")
    assert first.count(kind) == 1


def test_what_is_unsupported_is_told(tmp_path, capsys):
    arguments = ["reproduce", "plain/no-mask/additive", f"{HERE}/mutants/miniatures.py:Correct"]
    assert main([*arguments, "-o", str(tmp_path / "r.py")]) == ExitCode.NOTHING_VERIFIED
    assert "unsupported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "more", "told"),
    [
        ("no/such/case", [], "unknown case"),
        ("causal", [], "finds"),
        ("edge/fully-masked-row/cross", [], "no definition"),
        ("nothing.case", [], "cannot be read"),
        ("plain/no-mask/cross", ["--mode", "fast"], "unknown mode"),
        ("plain/no-mask/cross", ["--seconds", "0"], "--seconds"),
        ("plain/no-mask/cross", ["-o", "/nowhere/at/all.py"], "no folder"),
    ],
)
def test_wrong_usage_is_one_line(case, more, told, capsys):
    arguments = ["reproduce", case, f"{HERE}/mutants/deviants.py:Batched", *more]
    assert main(arguments) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_problem_that_is_too_large_is_refused_and_nothing_is_written(tmp_path, capsys):
    arguments = [
        "reproduce",
        "plain/no-mask/cross",
        f"{HERE}/mutants/deviants.py:Batched",
        "--no-shrink",
    ]
    assert main([*arguments, "-o", str(tmp_path / "r.py")]) == ExitCode.USAGE
    assert "more than 40" in capsys.readouterr().err
    assert not (tmp_path / "r.py").exists()


# What scripts are made of


LAYERS = [name for name in registered() if isinstance(load(name), Layer)]
NO_EXAMPLE = ("keras-hub-cached", "torch-encoder-layer", *MODELS)
"""Their modes are more than one call of a layer. A whole model is also made, of which everything
but the attention is taken out, and some modes call it in chunks beside a cache."""


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NO_EXAMPLE])
def test_every_layer_says_what_its_users_type(name):
    adapter = load(name)
    (case,) = find_cases("plain/no-mask/self")
    for mode in adapter.modes:
        example = adapter.example_for(case.shape, "float32", None, mode)
        assert example is not None
        assert example.load


@pytest.mark.parametrize("name", ["llama-eager", "llama-sdpa", "bert-sdpa", "torch-mha"])
@pytest.mark.parametrize("family", ["self", "tiles"])
def test_what_users_type_builds_the_layer(name, family):
    """Heads of one case have an even size, those of the other an odd one."""
    adapter = load(name)
    for package in adapter.packages:
        pytest.importorskip(package)
    (case,) = find_cases(f"plain/no-mask/{family}")
    example = adapter.example_for(case.shape, "float32", None, adapter.modes[0])
    made = {}
    exec("\n".join([*example.imports, *example.build]), made)
    # Query, key and value may be one matrix.
    rows = {len(one) // parts for one in made["layer"].parameters() for parts in (1, 3)}
    assert case.shape.heads * case.shape.head_size in rows


@pytest.mark.parametrize("name", sorted({*NO_EXAMPLE} & {*LAYERS}))
def test_layers_are_exempt_from_examples_only_while_they_have_none(name):
    adapter = load(name)
    (case,) = find_cases("plain/no-mask/self")
    assert not all(adapter.example_for(case.shape, "float32", None, it) for it in adapter.modes)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("family", ["self", "cross", "separate", "gqa", "additive"])
def test_native_parameters_are_made_as_the_table_says(name, family):
    adapter = load(name)
    problem = find_cases(f"mask/key-padding/{family}")[0].problem("float32")
    try:
        adapter.check(problem)
    except Exception:
        pytest.skip("not for this family")
    n = {}
    for own, array in problem.weights.named().items():
        short = {"score": "u"}.get(own, ("b" if own.endswith("_bias") else "W") + own[0])
        n[short] = array
    rows = adapter.parameters_for(problem.shape)
    native = ParameterTable(rows, problem.shape).load(problem.weights)
    for row in ParameterTable(rows, problem.shape).rows:
        made = eval(parameter(row, problem.shape), {"np": np, "n": n})
        assert np.array_equal(made, native[row.native])


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((2, 3)), "np.zeros((2, 3))"),
        (np.array([[1.0, -0.5]]), "[[1, -0.5]]"),
        (np.array([0.0, -np.inf]), "[0, -np.inf]"),
        (np.array([True, False]), "[1, 0]"),
        (np.array([-0.0]), "[0]"),
    ],
)
def test_numbers_are_told_as_short_as_they_can_be(array, code):
    assert literal(array) == code
    assert np.array_equal(np.array(eval(code, {"np": np}), array.dtype), array)


@pytest.mark.night
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("array", ["output", "weights", "gradient.query", "gradient.weights.key"])
def test_an_honest_layer_passes_its_script(array, tmp_path):
    from conformance.explore.drawing import Frame, Recipe

    recipe = Recipe(
        frame=Frame(bias=False), batch=1, query=2, kv_heads=1, size=1, causal="top-left"
    )
    adapter, problem = load("torch-mha"), recipe.problem("float64")
    expected = expect(problem)
    index = tuple(size - 1 for size in expected.arrays[array].shape)
    allowed = LIMIT * float(expected.sigma[array][index])
    deviation = TrialDeviation("x", "off", array, index, allowed=allowed, text="nothing")
    text = script(adapter, "torch-mha", Trial(problem, adapter.modes[0]), deviation, "a test")
    # Who reads it in an issue knows no definition but the one in the script.
    assert f"float64: {array} is not that of attention(n)" in text
    assert "def attention(n)" in text
    path = tmp_path / "script.py"
    path.write_text(text)
    ((code, printed),) = run_alone(path)
    assert code == 0, printed


def test_a_script_is_never_longer_than_forty_lines():
    problem = find_cases("plain/no-mask/self")[0].problem("float64")
    adapter = load("torch-mha")
    deviation = TrialDeviation("x", "off", "output", (0, 0, 0), text="off")
    with pytest.raises(TooLong, match="40"):
        script(adapter, "torch-mha", Trial(problem, adapter.modes[0]), deviation, "a test")
