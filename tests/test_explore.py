"""A search finds what is wrong, makes it as small as it gets, and else finds nothing."""

from __future__ import annotations

import time
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from mutants import deviants, miniatures
from mutants.contestant import Featureful
from mutants.features import MUTANTS as MUTANTS_OF_FEATURES

from conformance import Adapter, Geometry, Mode, Unsupported
from conformance.adapter.loading import load
from conformance.cases.casefile import load_case, store
from conformance.cases.catalogue import find_cases
from conformance.cli import main
from conformance.errors import ExitCode, Unavailable
from conformance.explore.drawing import FEATURES, MASKS, Drawer, Frame, Recipe
from conformance.explore.script import script
from conformance.explore.search import ProblemSearch, SearchOptions, survey
from conformance.explore.shrinking import shrink
from conformance.explore.trial import Trial, askable, deviations
from conformance.records.record import read_exploration
from conformance.running.known import similar

HERE = Path(__file__).parent
EXAMPLES = 300


def sought(adapter: Adapter, **wanted):
    """A search of a bounded number of problems, whatever time they take."""
    adapter.name = adapter.name or type(adapter).__name__
    return ProblemSearch(
        adapter, SearchOptions(**({"examples": EXAMPLES} | wanted)), time.monotonic() + 300
    )


def found(adapter: Adapter, **wanted):
    """What a bounded search finds, made as small as it gets."""
    failing = next(iter(sought(adapter, **wanted)), None)
    if failing is None:
        return None
    trial, wrong = failing
    limits = {name: wanted.get(name, ()) for name in ("modes", "dtypes")}
    small = shrink(adapter, trial, wrong[0], time.monotonic() + 300, **limits)
    assert small.finished
    return small


def sizes(small):
    shape = small.trial.problem.shape
    return shape.batch, shape.query_length, shape.key_length, shape.heads, shape.head_size


@pytest.mark.night
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


@pytest.mark.night
def test_what_is_not_a_number_is_found_and_stays_so():
    small = found(deviants.Overflows())
    assert small.deviation.kind == "not finite"
    # How large a head must be for a logit above 60 depends on the numbers.
    assert sizes(small)[:4] == (1, 1, 1, 1)


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


def test_what_an_adapter_refuses_is_not_drawn():
    drawer = Drawer(deviants.Narrow(), "float32")
    recipes = [drawer.draw(np.random.default_rng(seed)) for seed in range(200)]
    assert {(r.frame.sharing, r.frame.bias) for r in recipes} == {("self", False)}
    assert {r.group > 1 for r in recipes} == {True, False}
    assert {r.mask for r in recipes} == set(MASKS)
    assert Drawer(miniatures.Raw(), "float32")  # checks nothing before it runs


def test_problems_are_mostly_small_and_cross_tiles():
    drawer = Drawer(miniatures.Correct(), "float32")
    shapes = [drawer.draw(np.random.default_rng(seed)).shape for seed in range(1000)]
    keys = np.array([shape.key_length for shape in shapes])
    assert np.median(keys) < 20
    for at_least, times in ((65, 100), (129, 60), (257, 20)):
        assert (keys >= at_least).sum() >= times
    assert (keys % 64 == 0).sum() >= 20
    assert sum(shape.heads > 8 for shape in shapes) >= 50
    assert sum(shape.head_size == 128 for shape in shapes) >= 10
    assert max(shape.heads for shape in shapes) == 32
    assert sum(shape.kv_heads > 8 for shape in shapes) >= 30
    assert sum(shape.head_size >= 64 and shape.key_length > 128 for shape in shapes) >= 15
    assert max(keys) <= 640


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "adapter",
    [
        deviants.BeyondATile(),
        deviants.ExactTiles(),
        deviants.NineHeads(),
        deviants.PositiveScale(),
        deviants.ZeroScale(),
        deviants.WideHeads(),
        deviants.MaskOfFirstHead(),
        deviants.CausalBesideMask(),
        deviants.SecondMode(),
    ],
    ids=lambda adapter: type(adapter).__name__,
)
def test_what_shows_only_beyond_a_size_or_with_one_feature_is_found(adapter):
    assert next(iter(sought(adapter)), None) is not None


@pytest.mark.sample(3)
@pytest.mark.parametrize("deviant", [deviants.PaddedHeads, deviants.ThirdTile, deviants.TenHeads])
def test_what_shows_at_the_sizes_of_kernels_only_is_found(deviant):
    assert next(iter(sought(deviant(), examples=700, dtypes=("float32",))), None) is not None


OF_FEATURES = {mutant.name: mutant for mutant in MUTANTS_OF_FEATURES}


def test_nothing_is_found_in_what_has_every_feature_and_is_right():
    search = sought(Featureful(), examples=20, dtypes=("float32",))
    assert list(search) == []
    assert search.answered == 20


def test_features_are_drawn_where_they_are_declared_only():
    drawers = Drawer(Featureful(), "float32"), Drawer(miniatures.Correct(), "float32")
    drawn, none = (
        [drawer.draw(np.random.default_rng(seed)).features for seed in range(40)]
        for drawer in drawers
    )
    assert {name for features in drawn for name, _ in features} == set(FEATURES)
    assert not any(none)


@pytest.mark.sample(15)
@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("sink-gradient-of-first-entry", "sinks"),
        ("chunk-one-more", "chunk"),
        ("spans-ignored", "spans"),
        ("dilation-ignored", "dilation"),
        ("global-rows-only", "global tokens"),
        ("tree-with-siblings", "tree"),
        ("cap-on-unscaled", "soft cap"),
        ("sink-twice", "sinks"),
        ("rotary-pairs-swapped", "rotary"),
        ("linear-twice", "rotary"),
        ("mrope-time-one-pair-more", "position axes"),
        ("mrope-rows-reversed", "position axes"),
        ("norm-weights-exchanged", "query/key norm"),
        ("segments-shifted-by-a-token", "segments"),
        ("window-one-key-less-before", "window"),
    ],
)
def test_a_wrong_feature_is_found_and_shown_by_a_short_script(name, feature, tmp_path):
    adapter = Featureful("mutant", OF_FEATURES[name].kind)
    small = found(adapter, dtypes=("float32",), modes=("eval",))
    trial = small.trial
    assert feature in trial.problem.features
    assert len(trial.problem.features) <= 2
    assert max(trial.problem.shape.logits) <= 4
    assert len(script(adapter, "mutant", trial, small.deviation, "a test").splitlines()) <= 40
    # A case file keeps what has features, too.
    path = tmp_path / "found.case"
    assert store(path, "found", trial.problem, "a test", None).id == load_case(path).id
    again = load_case(path).problem("float32")
    assert again.digest() == trial.problem.digest()


KERNELS = {
    "tiles of 128": Geometry(head_sizes=(80, 128), tiles=(128, 128)),
    "groups": Geometry(head_sizes=(64,), tiles=(64, 32), heads=(8, 40), groups=(1, 4)),
    "multiples": Geometry(head_sizes=(16,), tiles=(32, 32), multiples=(16, 32), greatest_length=96),
    "value heads": Geometry(head_sizes=(64, 64, 96), value_head_sizes=(64, 32, 64)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("geometry", KERNELS.values(), ids=KERNELS)
def test_a_kernel_is_asked_at_its_sizes_only(geometry):
    class Kernel(miniatures.Correct):
        pass

    Kernel.geometry = geometry
    drawer = Drawer(Kernel(), "float32")
    shapes = [drawer.draw(np.random.default_rng(seed)).shape for seed in range(200)]
    for shape in shapes:
        geometry.check(shape)
    assert {(s.head_size, s.value_head_size) for s in shapes} == {*geometry.pairs}
    assert {s.heads for s in shapes} >= {*geometry.heads}
    assert {s.group for s in shapes} >= {*geometry.groups}
    tile = geometry.tiles[1]
    assert sum(shape.key_length > 2 * tile for shape in shapes) >= 10
    assert np.mean([shape.key_length <= tile for shape in shapes]) > 0.3
    assert next(iter(sought(Kernel(), examples=10)), None) is None


@pytest.mark.night
def test_lengths_that_features_exchange_stay_declared_ones():
    class Kernel(Featureful):
        geometry = KERNELS["multiples"]

    drawer = Drawer(Kernel(), "float32")
    for seed in range(200):
        shape = drawer.draw(np.random.default_rng(seed)).shape
        Kernel.geometry.check(shape)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["tiles of 128", "multiples"])
def test_the_smallest_problem_has_declared_sizes(name):
    class Second(deviants.Long):
        """Wrong for more than six keys, in a kernel."""

    Second.geometry = KERNELS[name]
    small = found(Second(), dtypes=("float32",))
    shape = small.trial.problem.shape
    Second.geometry.check(shape)
    assert shape.head_size == min(Second.geometry.head_sizes)
    assert shape.key_length == max(7, Second.geometry.multiples[1])


def test_exact_tiles_stay_exact():
    small = found(deviants.ExactTiles())
    assert small.trial.problem.shape.key_length == 64
    assert sizes(small)[0] == 1


def test_a_boundary_at_a_tile_is_met_exactly():
    small = found(deviants.BeyondATile())
    assert small.trial.problem.shape.key_length == 129
    assert sizes(small)[1] == 1


@pytest.mark.night
def test_the_mode_and_the_dtype_that_were_asked_for_stay():
    class Everywhere(deviants.Long):
        modes = (Mode("exact"), Mode("rough"))

    small = found(Everywhere(), modes=("rough",), dtypes=("float16",))
    assert (small.trial.mode.name, small.trial.problem.dtype) == ("rough", "float16")
    assert found(Everywhere()).trial.mode.name == "exact"


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


def test_both_files_are_written_and_the_gate_runs_the_case_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
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


@pytest.mark.night
def test_every_mode_is_explored_and_a_second_time_nothing_is_new(tmp_path, capsys):
    spec = f"{HERE / 'mutants/deviants.py'}:Scaled"
    folder = tmp_path / "explored"
    arguments = ["explore", spec, "--every-mode", "--seconds", "60", "--examples", "25"]
    arguments += ["--dtype", "float32", "--record", str(folder)]
    assert main(arguments) == ExitCode.DEVIATES
    first = read_exploration(folder / "Scaled.json")
    assert first.answered == {"exact": 25, "rough": 25}
    (one,) = [one for one in first.found if one.array == "output"]
    assert (one.modes, one.features) == (["rough"], ["scale"])
    assert load_case(folder / one.case).stored.scale is not None
    assert main(arguments) == ExitCode.OK
    again = read_exploration(folder / "Scaled.json")
    assert len(again.found) == len(first.found)
    assert "0 new" in capsys.readouterr().out


@pytest.mark.parametrize("during", ["search", "shrinking"])
def test_a_survey_ends_at_ctrl_c_and_keeps_what_was_found(tmp_path, monkeypatch, during):
    module = import_module(f"conformance.explore.{during}")
    real = module.deviations

    def interrupted(adapter, trial):
        if list(tmp_path.glob("*.case")):
            raise KeyboardInterrupt
        return real(adapter, trial)

    monkeypatch.setattr(module, "deviations", interrupted)
    adapter = deviants.TwoDefects()
    adapter.name = "Two"
    with pytest.raises(KeyboardInterrupt):
        survey(adapter, SearchOptions(dtypes=("float32",), examples=200), 60.0, tmp_path)
    (one,) = read_exploration(tmp_path / "Two.json").found
    assert [one.case] == [path.name for path in tmp_path.glob("*.case")]


KNOWN = """
[[known]]
implementation = "Scaled"
requirement = ["output.*", "weights.*", "gradient.*"]
case = {case}
mode = "{mode}"
verdict = "deviates"
reason = "The scale is ignored."
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "mode", "more", "code"),
    [
        ('"*scale*"', "rough", "", ExitCode.OK),
        ('"*"', "rough", 'cause = "scale.default"', ExitCode.OK),
        ('"*"', "rough", 'cause = "scale.missing"', ExitCode.DEVIATES),
        ('"*"', "rough", "within = 9.0", ExitCode.DEVIATES),
        ('"*"', "exact", "", ExitCode.DEVIATES),
        ('"plain/no-mask/*"', "rough", "", ExitCode.DEVIATES),
    ],
    ids=["case", "cause", "another cause", "larger", "another mode", "other cases"],
)
@pytest.mark.parametrize("every", [True, False], ids=["every mode", "first"])
def test_what_a_baseline_explains_is_told_as_known(tmp_path, capsys, case, mode, more, code, every):
    spec = f"{HERE / 'mutants/deviants.py'}:Scaled"
    baseline = tmp_path / "known.toml"
    baseline.write_text(KNOWN.format(case=case, mode=mode) + more)
    arguments = ["explore", spec, "--baseline", str(baseline), "--examples", "12"]
    arguments += ["--dtype", "float32", "--mode", "rough", "--seconds", "20"]
    arguments += ["--every-mode", "--record", str(tmp_path)] if every else ["-o", str(tmp_path)]
    assert main(arguments) == code
    told = capsys.readouterr().out
    assert ("The scale is ignored." in told) == (code == ExitCode.OK)


def test_a_case_of_other_features_or_magnitudes_stands_for_no_drawn_problem():
    (masked,) = find_cases("mask/per-batch/cross")
    standing = similar(masked.problem("float32"))
    assert masked.id in standing
    assert not [name for name in standing if name.startswith(("plain/", "logits/", "bias/"))]


def test_two_defects_are_two_classes(tmp_path):
    adapter = deviants.TwoDefects()
    adapter.name = "two"
    options = SearchOptions(dtypes=("float32",), examples=40)
    new = survey(adapter, options, 60.0, tmp_path)
    assert {one.nature[0] for one in new} >= {"output.equals-definition", "ValueError"}
    raised = [one for one in new if one.nature[0] == "ValueError"]
    assert len(raised) == 1
    assert raised[0].times > 1


def test_a_record_that_is_none_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "Correct.json").write_text("[]")
    spec = f"{HERE / 'mutants/miniatures.py'}:Correct"
    arguments = ["explore", spec, "--every-mode", "--examples", "1", "--record", str(tmp_path)]
    assert main(arguments) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


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
