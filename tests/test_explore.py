"""A search finds what is wrong, makes it as small as it gets, and else finds nothing."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from mutants import deviants, miniatures

from conformance import Adapter, Unsupported
from conformance.adapter.loading import load
from conformance.cases.casefile import load_case
from conformance.cli import main
from conformance.errors import ExitCode, Unavailable
from conformance.explore.recipe import Frame, Recipe
from conformance.explore.search import Options, learn, search
from conformance.explore.shrinking import shrink
from conformance.explore.trial import Trial, askable, deviations

HERE = Path(__file__).parent
EXAMPLES = 300


def found(adapter: Adapter, **wanted):
    """What a bounded search finds, made as small as it gets."""
    adapter.name = adapter.name or type(adapter).__name__
    forever = time.monotonic() + 300
    seen = search(adapter, Options(**({"examples": EXAMPLES} | wanted)), forever, lambda: forever)
    if seen.failing is None:
        return None
    small = shrink(adapter, *seen.failing, forever)
    assert small.finished
    return small


def sizes(small):
    shape = small.trial.problem.shape
    return shape.batch, shape.query_length, shape.key_length, shape.heads, shape.head_size


@pytest.mark.parametrize("adapter", [miniatures.Correct(), deviants.Narrow()])
def test_nothing_is_found_in_what_is_right(adapter):
    assert found(adapter, examples=80) is None


def test_a_boundary_of_lengths_is_met_exactly():
    small = found(deviants.Long())
    assert sizes(small) == (1, 1, 7, 1, 1)
    assert small.trial.problem.allowed is None
    assert not small.trial.problem.shape.bias


def test_a_boundary_of_the_batch_is_met_exactly():
    small = found(deviants.Batched())
    assert sizes(small) == (2, 1, 1, 1, 1)
    assert set(np.unique(small.trial.problem.query)) <= {0.0, 1.0}


def test_key_value_heads_are_as_few_as_show_it():
    shape = found(deviants.Grouped()).trial.problem.shape
    assert (shape.kv_heads, shape.heads, shape.batch) == (2, 4, 1)


def test_a_dtype_that_matters_stays():
    small = found(deviants.Half())
    assert small.trial.problem.dtype == "float16"
    assert sizes(small) == (1, 1, 1, 1, 1)


def test_a_mode_and_a_scale_that_matter_stay():
    small = found(deviants.Scaled())
    assert small.trial.mode.name == "rough"
    assert small.trial.problem.scale is not None
    assert sizes(small)[:4] == (1, 1, 2, 1)


def test_what_is_not_a_number_is_found_and_stays_so():
    small = found(deviants.Overflows())
    assert small.deviation.kind == "not finite"
    assert sizes(small) == (1, 1, 1, 1, 1)


def test_an_exception_is_found():
    small = found(miniatures.Raises())
    assert small.deviation.kind == "ValueError"
    assert sizes(small) == (1, 1, 1, 1, 1)


def test_a_wrong_shape_is_found():
    assert found(miniatures.WrongShape(), examples=20).deviation.kind == "WrongShape"


def test_a_mistake_in_what_an_adapter_says_about_shapes_is_found():
    assert found(miniatures.Puzzled(), examples=20).deviation.kind == "KeyError"


def test_equal_seeds_find_the_same():
    first, second = (found(deviants.Long(), seed=5) for _ in range(2))
    one, other = first.trial.problem, second.trial.problem
    assert one.shape == other.shape
    assert np.array_equal(one.query, other.query)


def test_numbers_of_a_small_problem_are_simple():
    problem = found(load(f"{HERE.parent}/docs/examples/mistakes.py:flipped_mask")).trial.problem
    arrays = [problem.query, problem.key, *problem.weights.named().values()]
    assert all(set(np.unique(array)) <= {0.0, 1.0} for array in arrays)
    assert problem.shape.logits == (1, 1, 2, 2) or problem.shape.logits == (1, 1, 1, 2)


def test_what_is_unavailable_is_told_and_not_found():
    with pytest.raises(Unavailable, match="abacus"):
        found(miniatures.Unready())


def test_an_implementation_that_takes_nothing_is_told():
    class Nothing(miniatures.Correct):
        def check_shape(self, shape):
            raise Unsupported("closed today")

    with pytest.raises(Unsupported, match="plainest"):
        found(Nothing())


def test_limits_are_learned():
    limits = learn(deviants.Narrow(), "float32")
    assert {(f.sharing, f.bias) for f in limits.frames} == {("self", False)}
    assert limits.grouped
    assert ("per-head", "none", None) in limits.masks
    assert learn(miniatures.Raw(), "float32").masks  # checks nothing before it runs


@pytest.mark.parametrize("causal", ["top-left", "bottom-right"])
@pytest.mark.parametrize("mask", ["padding", "left-padding", "per-head", "one-key"])
def test_every_query_of_a_recipe_has_a_key(mask, causal):
    frame = Frame(sharing="memory")
    for seed in range(20):
        recipe = Recipe(frame=frame, query=3, key=5, mask=mask, causal=causal, seed=seed)
        assert recipe.problem("float32").allowed_in_full().any(axis=-1).all()


def test_what_no_definition_settles_is_not_asked():
    problem = Recipe().problem("float32")
    assert askable(problem)
    assert not askable(problem.replace(mask=np.zeros((1, 1, 3, 3), bool)))
    assert not askable(problem.with_weights(query=problem.weights.query * 1e6))


def test_an_honest_answer_is_no_deviation():
    adapter = miniatures.Correct()
    trial = Trial(Recipe(mask="per-head").problem("float16"), adapter.modes[0])
    assert deviations(adapter, trial) == ()


# On the command line


def test_both_files_are_written_and_the_gate_runs_the_case_again(tmp_path, capsys):
    spec = f"{HERE / 'mutants/deviants.py'}:Batched"
    code = main(["explore", spec, "--seconds", "30", "--examples", "300", "-o", str(tmp_path)])
    assert code == ExitCode.DEVIATES
    told = capsys.readouterr().out
    (case,), (program,) = tmp_path.glob("*.case"), tmp_path.glob("*.py")
    assert str(case) in told
    assert "fails as it should" in told
    assert len(program.read_text().splitlines()) <= 40
    assert load_case(case).id.startswith("file/batched-output-float32/")
    again = ["run", spec, "--case-file", str(case), "--case", "file/", "--strict"]
    assert main(again) == ExitCode.DEVIATES
    right = f"{HERE / 'mutants/miniatures.py'}:Correct"
    assert main([*again[:1], right, *again[2:]]) == ExitCode.OK


def test_nothing_found_is_zero(tmp_path, capsys):
    spec = f"{HERE / 'mutants/miniatures.py'}:Correct"
    arguments = ["explore", spec, "--examples", "20", "--dtype", "float32", "-o", str(tmp_path)]
    assert main(arguments) == ExitCode.OK
    assert "no deviation found" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "inf"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--mode", "fast"], "unknown mode"),
        (["--dtype", "int8"], "unknown dtype"),
        (["-o", "/nowhere/at/all"], "no folder"),
    ],
)
def test_wrong_usage_is_one_line_before_anything_is_searched(more, told, capsys):
    assert main(["explore", f"{HERE / 'mutants/miniatures.py'}:Correct", *more]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_an_interruption_keeps_what_was_found(tmp_path, monkeypatch, capsys):
    from conformance.explore import shrinking

    calls = []
    real = shrinking.deviations

    def interrupted(adapter, trial):
        calls.append(trial)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return real(adapter, trial)

    monkeypatch.setattr(shrinking, "deviations", interrupted)
    spec = f"{HERE / 'mutants/deviants.py'}:Long"
    arguments = ["explore", spec, "--seconds", "30", "--examples", "300", "-o", str(tmp_path)]
    assert main(arguments) == ExitCode.DEVIATES
    assert "not finished" in capsys.readouterr().out
    assert list(tmp_path.glob("*.case"))


def test_without_hypothesis_one_line_says_what_to_install(monkeypatch, capsys):
    import sys

    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert main(["explore", f"{HERE / 'mutants/miniatures.py'}:Correct"]) == ExitCode.USAGE
    assert "pip install hypothesis" in capsys.readouterr().err
