"""The suite inside pytest: items, messages, exit codes, and a record in every circumstance."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import children
import numpy as np
import pytest

from conformance.errors import PYTEST_CODES, ExitCode
from conformance.experiments import EXPERIMENTS
from conformance.records.findings import (
    INFINITE,
    CaseResult,
    Figures,
    Finding,
    Phrase,
    Worst,
)
from conformance.records.record import journal_path, read, read_arrays, read_journal
from conformance.reports.wording import again
from conformance.running.examine import failure
from conformance.running.run import GPUS, take_gpu
from conformance.words import say

MINIATURES = Path(__file__).with_name("mutants") / "miniatures.py"
FLOAT32 = ("--dtype", "float32")
NODE = "running/test_conformance.py::test_conforms"


TIRED = f"""
import sys
sys.path.insert(0, {str(MINIATURES.parents[1])!r})
from mutants.miniatures import Correct

class Tires(Correct):
    calls = 0

    def attend(self, query, key, value, masks, **options):
        self.calls += 1
        context, weights = super().attend(query, key, value, masks, **options)
        return context * query.dtype.type(1 if self.calls < 3 else 2), weights
"""
"""An implementation that is right for the first item."""


def mini(name):
    return f"{MINIATURES}:{name}"


def command(module, *arguments, python=children.python):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return {
        "args": python("-m", module, *map(str, arguments)),
        "env": env | {"NO_COLOR": "1", "COLUMNS": "120"},
        "text": True,
    }


def run_pytest(folder, *arguments, expect=None, python=children.python):
    """`pytest` in a folder of its own; whatever happens, no traceback of ours."""
    options = command("pytest", "-p", "no:cacheprovider", *arguments, python=python)
    done = subprocess.run(**options, capture_output=True, cwd=folder, timeout=300, check=False)
    told = done.stdout + done.stderr
    assert "INTERNALERROR" not in told, told
    assert "Traceback (most" not in told, told
    if expect is not None:
        assert done.returncode == expect, told
    return done


def conformance(folder, *arguments, expect=None):
    return run_pytest(folder, "--pyargs", "conformance", *arguments, expect=expect)


def verdicts(record):
    return {result.id: result.verdict for result in record.results}


# A failure stands on its own


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """(what was printed, the folder) of a run with two deviations, stopped at the first."""
    folder = tmp_path_factory.mktemp("failed")
    arguments = ["--implementation", mini("Inverted"), *FLOAT32, "--case", "mask/shared"]
    arguments += ["--case", "plain/no-mask/self", "-x", "--junitxml", "junit.xml"]
    arguments += ["--record", "r.json", "-rA", "-v"]
    done = conformance(folder, *arguments, expect=pytest.ExitCode.TESTS_FAILED)
    return done.stdout, folder


def test_a_failure_says_what_was_measured_and_how_to_see_it_again(failed):
    printed, _ = failed
    message = printed.partition("= FAILURES =")[2].partition("= PASSES =")[0]
    command = f"mha-conformance run {mini('Inverted')} --case mask/shared/square --dtype float32"
    for told in (
        "deviates: output.equals-definition",
        "equals the answer with the mask inverted",
        "case mask/shared/square, float32, mode default, on cpu",
        "output.equals-definition (must)",
        "The output is that of the definition",
        "measured output: ",
        "σ, allowed 8σ",
        "worst element output[",
        ": got ",
        ", want ",
        ", noise σ ",
        "weights.blocked-are-zero (must)",
        "blocked weights are not zero",
        f"again: {command} --mode default",
    ):
        assert told in message
    assert "test_conformance.py:" not in message, "no source of the suite"


def test_the_command_in_the_message_runs_that_item_again(failed, tmp_path):
    printed, _ = failed
    # Where CI is set, pytest prints the whole message a second time, in its summary.
    (line,) = {line for line in printed.splitlines() if line.startswith("again: ")}
    program, *arguments = shlex.split(line.removeprefix("again: "))
    assert program == "mha-conformance"
    done = subprocess.run(
        **command("conformance", *arguments, "--strict"), capture_output=True, cwd=tmp_path,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.DEVIATES
    assert "Inverted: 1 deviates" in done.stdout
    assert "deviates: output.equals-definition" in done.stdout


def test_node_ids_are_the_items(failed):
    printed, _ = failed
    assert f"PASSED {NODE}[Inverted:plain/no-mask/self:float32:cpu:default]" in printed
    assert f"FAILED {NODE}[Inverted:mask/shared/square:float32:cpu:default]" in printed


def test_a_reason_is_whole_however_long_the_line_before_it(tmp_path):
    arguments = ["--implementation", mini("Inverted"), *FLOAT32, "--survey", "-vv"]
    told = conformance(tmp_path, *arguments, "--case", "mask/shared/").stdout
    words = " ".join(told.split())
    # Between an item and its verdict pytest may say where the test comes from.
    item = r"\[Inverted:mask/shared/{}:float32:cpu:default\]( <- \S+)? {}"
    assert re.search(
        item.format("self", r"DEVIATES \(deviates: output\.equals-definition, "), words
    )
    assert re.search(item.format("additive", r"UNSUPPORTED \(no additive score\) \["), words)


@pytest.mark.night
def test_who_deviates_only_after_other_calls_is_told_so(tmp_path):
    (tmp_path / "tired.py").write_text(TIRED, encoding="utf-8")
    arguments = [*FLOAT32, "--case", "mask/one-allowed-key", "--no-isolate"]
    options = ["--implementation", "tired.py:Tires", *arguments]
    for more in ([], ["--survey"]):
        told = conformance(tmp_path, *options, *more).stdout
        assert "run alone, a fresh instance conforms" in told


def test_x_stops_and_the_record_says_what_was_not_run(failed):
    printed, folder = failed
    assert "stopping after 1 failures" in printed
    assert "not run: 6 of 8 planned items" in printed
    record = read(folder / "r.narrowed.json")
    assert not record.complete
    found = verdicts(record)
    assert sorted(found.values()) == ["conforms", "deviates", *["not-run"] * 6]
    assert record.header.planned == len(found) == 8
    assert not journal_path(folder / "r.narrowed.json").exists()


def test_junitxml(failed):
    _, folder = failed
    suite = ElementTree.parse(folder / "junit.xml").getroot().find("testsuite")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    (wrong,) = (case for case in suite if case.find("failure") is not None)
    assert "mask/shared/square" in wrong.get("name")
    assert "worst element output[" in wrong.find("failure").text


def test_a_message_lists_every_discrepancy():
    figures = Figures("output", INFINITE, 1.0, 0.0, 8.0)
    worst = Worst("output", (0, 1), "nan", "1", "0")
    findings = [
        Finding("output.equals-definition", "deviates", "off", figures=figures, worst=worst),
        Finding("gradient.inputs-equal-definition", "conforms"),
        Finding("dtype.in-is-out", "error", "ValueError: no", cause=Phrase("a cause")),
    ]
    result = CaseResult("a", "c/d/e", "bfloat16", "gpu", "train", findings)
    first, *others = failure(result, "my file.py:A").splitlines()
    assert first == "error: output.equals-definition, dtype.in-is-out; a cause"
    assert "  measured output: ∞ σ, allowed 8σ" in others
    assert "  worst element output[0, 1]: got nan, want 1, noise σ 0" in others
    assert "  error: ValueError: no" in others
    assert not any("gradient.inputs" in line for line in others)
    wanted = "mha-conformance run 'my file.py:A' --case c/d/e --dtype bfloat16"
    assert again(result, "my file.py:A") == f"{wanted} --mode train --strict --device gpu"


# One record, however the items were run


@pytest.mark.night
@pytest.mark.parametrize("survey", [False, True])
def test_with_xdist_the_record_is_the_same(tmp_path, survey):
    names = ("Correct", "Inverted", "Raises")
    arguments = [x for name in names for x in ("--implementation", mini(name))]
    arguments += [*FLOAT32, "--case", "plain/no-mask/self", "--case", "mask/[kps]*/self"]
    arguments += ["--survey"] * survey
    expect = pytest.ExitCode.OK if survey else pytest.ExitCode.TESTS_FAILED
    for label, extra in (("one", ()), ("two", ("-n", "2"))):
        options = (*arguments, "--record", f"{label}.json", *extra)
        conformance(tmp_path, *options, expect=expect)
    one, two = (read(tmp_path / f"{label}.narrowed.json") for label in ("one", "two"))
    assert one.complete
    assert two.complete
    assert len(one.results) == one.header.planned == two.header.planned > 20
    assert {r.id: r for r in one.results} == {r.id: r for r in two.results}
    assert {"conforms", "deviates", "error"} == set(verdicts(one).values())
    arrays = [
        read_arrays(tmp_path / f"{n}.narrowed.json", r) for n, r in (("one", one), ("two", two))
    ]
    assert arrays[0].keys() == arrays[1].keys()
    outputs = [name for name in arrays[0] if "|weights" not in name]
    assert len(outputs) == 2 * 3 * len(names) - 3, "two exchanged cases, one of them raises"
    assert len(outputs) < len(arrays[0]), "and the weights of who deviates"
    assert all(arrays[0][name].tobytes() == arrays[1][name].tobytes() for name in arrays[0])
    sealed = {item.name for item in one.header.implementations}
    assert sealed == set(names)


# A narrowed run never takes the place of a whole one


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder with the record of a whole run."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = ["--implementation", mini("Refuses"), "--record", "sub/r.json"]
    conformance(folder, *arguments, "-q", expect=PYTEST_CODES[ExitCode.NOTHING_VERIFIED])
    return folder


def test_a_whole_run_writes_its_record(whole):
    record = read(whole / "sub" / "r.json")
    assert record.complete
    assert record.header.name == "r"
    assert record.header.deselected == 0
    assert record.header.provenance.selection == ""
    assert record.header.provenance.command.startswith("python -m pytest ")
    assert len(record.results) == record.header.planned > 300
    assert set(verdicts(record).values()) == {"unsupported"}
    assert [path.name for path in (whole / "sub").iterdir()] == ["r.json"]


ONE = f"{NODE}[Refuses:mask/shared/self:float32:cpu:default]"


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("narrowing", "selection", "left"),
    [
        (["-k", "mask/shared/self"], "-k 'mask/shared/self'", 4),
        (["--case", "mask/shared/self"], "--case mask/shared/self", 4),
        (["--dtype", "float32", "-k", "mask/shared/self"], "--dtype float32 -k 'mask/shared/", 1),
        (["--mode", "default", "--case", "mask/*/self"], "--case mask/*/self --mode default", None),
        (["--deselect", "running/test_conformance.py"], "", 0),
    ],
    ids=["-k", "--case", "--dtype", "--mode", "--deselect"],
)
def test_a_narrowed_run_leaves_it_alone(whole, narrowing, selection, left):
    before = (whole / "sub" / "r.json").read_bytes()
    narrow = whole / "sub" / "r.narrowed.json"
    narrow.unlink(missing_ok=True)
    arguments = ["--implementation", mini("Refuses"), "--record", "sub/r.json", *narrowing]
    conformance(whole, *arguments, expect=PYTEST_CODES[ExitCode.NOTHING_VERIFIED])
    assert (whole / "sub" / "r.json").read_bytes() == before
    if left == 0:
        assert not narrow.exists()
        return
    record = read(narrow)
    assert record.header.provenance.selection.startswith(selection)
    assert left is None or len(record.results) == left
    assert record.header.planned == len(record.results)
    assert all("/self" in result.case for result in record.results)


def test_a_node_id_narrows_too(whole):
    before = (whole / "sub" / "r.json").read_bytes()
    item = "conformance.running.test_conformance::test_conforms"
    item += "[Refuses:mask/shared/self:float32:cpu:default]"
    arguments = ["--implementation", mini("Refuses"), "--record", "sub/r.json"]
    run_pytest(whole, "--pyargs", item, *arguments, expect=PYTEST_CODES[ExitCode.NOTHING_VERIFIED])
    assert (whole / "sub" / "r.json").read_bytes() == before
    record = read(whole / "sub" / "r.narrowed.json")
    assert list(verdicts(record)) == ["Refuses:mask/shared/self:float32:cpu:default"]
    assert record.header.deselected == len(read(whole / "sub" / "r.json").results) - 1


# Exit codes in pytest's own words


def test_without_an_implementation(tmp_path):
    done = conformance(tmp_path, expect=pytest.ExitCode.INTERRUPTED)
    assert "which implementation? say --implementation NAME (" in done.stdout
    assert "torch-mha" in done.stdout
    assert ".py:" not in done.stdout, "no place in the source"
    assert ">  " not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--implementation", "torch-mah"], "unknown implementation 'torch-mah'; did you mean"),
        (["--implementation", mini("Correct"), "--case", "x/y"], "unknown case 'x/y'"),
        (["--case", "x/y"], "unrecognized arguments: --case x/y"),
    ],
    ids=["implementation", "case", "none"],
)
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_wrong_usage(tmp_path, arguments, told, workers):
    done = conformance(tmp_path, *arguments, *workers, expect=pytest.ExitCode.USAGE_ERROR)
    assert told in done.stderr
    assert done.stdout.strip() == ""


@pytest.mark.night
@pytest.mark.parametrize("baseline", [(), ("--conformance-baseline", "known.toml")])
def test_a_session_that_another_plugin_ends_early_is_incomplete(tmp_path, baseline):
    """Whatever exit code it asks for: items that were not run are not verified."""
    text = (
        "import pytest\ndef pytest_runtest_logfinish():\n    pytest.exit('enough', returncode=0)\n"
    )
    (tmp_path / "ends.py").write_text(text, encoding="utf-8")
    (tmp_path / "known.toml").write_text("", encoding="utf-8")
    cases = ("--case", "plain/no-mask/self", "--case", "mask/shared/self", "--record", "r.json")
    arguments = ["--pyargs", "conformance", "-p", "ends", "--implementation", mini("Correct")]
    arguments += ["--no-isolate", *FLOAT32, *cases, *baseline]
    code = PYTEST_CODES[ExitCode.INCOMPLETE]
    done = run_pytest(tmp_path, *arguments, expect=code, python=children.anew)
    assert "not run: 1 of 2" in done.stdout or "1 not verified" in done.stdout
    assert sorted(verdicts(read(tmp_path / "r.narrowed.json")).values()) == ["conforms", "not-run"]


RESEEDS = f"""
import sys
sys.path.insert(0, {str(MINIATURES.parents[1])!r})
import numpy as np
from mutants.miniatures import Correct

class Reseeds(Correct):
    factor = 1

    def attend(self, query, key, value, masks, **options):
        np.random.seed(7)
        context, weights = super().attend(query, key, value, masks, **options)
        return context * query.dtype.type(self.factor), weights

class Wrong(Reseeds):
    factor = 1.25
"""
"""What should not be done, alone and beside what must not be done."""


@pytest.mark.parametrize(("name", "code"), [("Reseeds", 0), ("Wrong", 1)])
def test_only_what_must_be_fails_a_test(tmp_path, name, code):
    (tmp_path / "mine.py").write_text(RESEEDS, encoding="utf-8")
    arguments = ["--implementation", f"mine.py:{name}", *FLOAT32, "--record", "r.json"]
    conformance(tmp_path, *arguments, "--case", "mask/key-padding/cross", expect=code)
    (result,) = read(tmp_path / "r.narrowed.json").results
    wrong = {one.requirement for one in result.findings if one.verdict == "deviates"}
    assert "call.leaves-global-state-alone" in wrong
    assert ("output.equals-definition" in wrong) is bool(code)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "told"), [("Segfault", "crashed"), ("Sleeps", "timed-out")])
def test_an_item_whose_process_is_lost_fails(tmp_path, name, told):
    """It is neither passed nor skipped, although nothing is known of the answer."""
    faulty = MINIATURES.with_name("faulty.py")
    arguments = ["--implementation", f"{faulty}:{name}", *FLOAT32, "--item-timeout", "5"]
    case = ("--case", "mask/per-batch/self")
    done = conformance(tmp_path, *arguments, *case, expect=pytest.ExitCode.TESTS_FAILED)
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed in ")
    assert f"1 {told}" in done.stdout


LEAVES = f"""
import os, sys, threading
sys.path.insert(0, {str(MINIATURES.parents[1])!r})
from mutants.miniatures import Correct

class Leaves(Correct):
    def attend(self, *given, **options):
        thread = threading.Thread(target=os._exit, args=(0,))
        thread.start()
        thread.join()
        return super().attend(*given, **options)
"""


def test_a_thread_that_ends_the_session_does_not_end_it_well(tmp_path):
    """Nobody watches over a session of pytest, and the code would be 0 with nothing verified."""
    (tmp_path / "mine.py").write_text(LEAVES, encoding="utf-8")
    arguments = ["--implementation", "mine.py:Leaves", "--no-isolate", *FLOAT32]
    case = ("--case", "plain/no-mask/self")
    conformance(tmp_path, *arguments, *case, expect=ExitCode.INCOMPLETE)


def test_unavailable_items_leave_a_run_incomplete(tmp_path):
    arguments = ["--implementation", mini("Correct"), "--implementation", mini("Unready")]
    arguments += [*FLOAT32, "--case", "mask/shared/self"]
    done = conformance(tmp_path, *arguments, expect=PYTEST_CODES[ExitCode.INCOMPLETE])
    assert "1 passed, 1 unavailable" in done.stdout
    assert "not verified, 1 item: the abacus is not installed" in done.stdout


def test_collect_only_runs_and_writes_nothing(tmp_path):
    arguments = ["--implementation", mini("Hangs"), *FLOAT32, "--case", "mask/shared/self"]
    arguments += ["--collect-only", "-q", "--record", "r.json"]
    done = conformance(tmp_path, *arguments, expect=pytest.ExitCode.OK)
    assert f"{NODE}[Hangs:mask/shared/self:float32:cpu:default]" in done.stdout
    assert list(tmp_path.iterdir()) == []


# Stopped in the middle


HANGING = [
    *FLOAT32, "--case", "plain/no-mask/self", "--case", "mask/key-padding/self",
    "--case", "mask/shared/self", "--record", "r.json",
]  # fmt: skip


def stopped(folder, number, *start):
    """Start a run that hangs at its second item, and signal it there."""
    options = command(*start) | {"cwd": folder, "start_new_session": True}
    path = journal_path(folder / "r.narrowed.json")
    pipe = subprocess.PIPE
    with subprocess.Popen(**options, stdout=pipe, stderr=pipe) as process:
        try:
            deadline = time.monotonic() + 300
            while not (path.exists() and path.read_bytes().count(b"\n") >= 2):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, "the first item never came"
                time.sleep(0.02)
            time.sleep(0.1)
            process.send_signal(number)
            out, err = process.communicate(timeout=300)
        finally:
            if process.poll() is None:
                process.kill()
    return process.returncode, out, err


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("start", "code"),
    [
        (["conformance", "run", mini("Hangs"), *HANGING], ExitCode.INTERRUPTED),
        (
            ["pytest", "-p", "no:cacheprovider", "--pyargs", "conformance", "--implementation",
             mini("Hangs"), *HANGING],
            pytest.ExitCode.INTERRUPTED,
        ),
    ],
    ids=["mha-conformance", "pytest"],
)  # fmt: skip
def test_interrupted_by_the_user(tmp_path, start, code):
    returned, out, err = stopped(tmp_path, signal.SIGINT, *start)
    assert returned == code, out + err
    if start[0] == "pytest":
        assert "KeyboardInterrupt" in out
    else:
        # Nothing of pytest's: the last words are where the results are, and how to go on.
        assert "KeyboardInterrupt" not in out + err
        assert "Traceback" not in err
        assert out.rstrip().endswith("r.narrowed.json")
        assert err.splitlines() == [
            "mha-conformance: interrupted; r.narrowed.json keeps what was measured, and the same "
            "command goes on from there"
        ]
    assert "not run: 2 of 3 planned items" in out
    record = read(tmp_path / "r.narrowed.json")
    assert not record.complete
    # The first item of the catalogue has an outcome, the one that hung has none.
    assert verdicts(record) == {
        f"Hangs:{case}/self:float32:cpu:default": verdict
        for case, verdict in (
            ("plain/no-mask", "conforms"),
            ("mask/key-padding", "not-run"),
            ("mask/shared", "not-run"),
        )
    }
    assert not journal_path(tmp_path / "r.narrowed.json").exists()
    assert len(read_arrays(tmp_path / "r.narrowed.json", record)) == 3


def test_killed(tmp_path):
    start = ["conformance", "run", mini("Hangs"), *HANGING]
    returned, _, _ = stopped(tmp_path, signal.SIGKILL, *start)
    assert returned == -signal.SIGKILL
    assert not (tmp_path / "r.narrowed.json").exists()
    path = journal_path(tmp_path / "r.narrowed.json")
    header, results, arrays = read_journal(path)
    assert header.planned == 3
    assert [(r.case, r.verdict) for r in results] == [("plain/no-mask/self", "conforms")]
    assert len(arrays) == 3
    assert not read(path).complete


# Experiments are items too


def collected(folder, name, *arguments):
    """Ids of what a run would examine."""
    done = conformance(folder, "--implementation", mini(name), "--collect-only", "-q", *arguments)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
    lines = done.stdout.splitlines()
    return [line.partition("[")[2].rstrip("]") for line in lines if line.startswith("running/")]


def test_a_case_may_be_an_experiment(tmp_path):
    every = collected(tmp_path, "Moded", "--case", "probe")
    assert all(":probe/" in name and ":float32:cpu:" in name for name in every)
    # Experiments on features, and on what is returned, are asked of those who declare it.
    asked = {item.id for item in EXPERIMENTS if not item.needs} - {
        "probe/log-sum-exp",
        "probe/max-logit",
    }
    assert {name.split(":")[1] for name in every} == asked
    assert {name.split(":")[4] for name in every} == {"exact", "rough"}
    masks = [f"Moded:probe/masks:float32:cpu:{mode}" for mode in ("exact", "rough")]
    assert collected(tmp_path, "Moded", "--case", "probe/masks") == masks
    assert collected(tmp_path, "Moded", "--case", "probe", "-k", "probe/masks") == masks
    rough = collected(tmp_path, "Moded", "--case", "probe", "--mode", "rough")
    assert rough == [name for name in every if name.endswith(":rough")]
    assert 0 < len(rough) < len(EXPERIMENTS), "those of which one mode is enough ask the first"
    assert collected(tmp_path, "Moded", "--case", "probe", *FLOAT32) == every


def test_a_case_that_is_no_experiment_brings_none(tmp_path):
    masks = collected(tmp_path, "Correct", "--case", "mask", *FLOAT32)
    assert len(masks) > 10
    assert not any(":probe/" in name for name in masks)
    # pytest's own word for one test without a parameter.
    nothing = collected(tmp_path, "Correct", "--case", "probe", "--dtype", "float64")
    assert nothing == ["NOTSET"], "experiments are in float32"


def test_a_pattern_may_match_cases_and_experiments(tmp_path):
    both = collected(tmp_path, "Correct", "--case", "p[lr]*", *FLOAT32)
    assert "Correct:plain/no-mask/self:float32:cpu:default" in both
    assert "Correct:probe/masks:float32:cpu:default" in both
    two = ("--case", "plain/no-mask/self", "--case", "probe/weights")
    assert collected(tmp_path, "Correct", *two, *FLOAT32) == [
        "Correct:plain/no-mask/self:float32:cpu:default",
        "Correct:probe/weights:float32:cpu:default",
    ]


def test_an_experiment_is_recorded_with_its_entries(tmp_path):
    arguments = ["--implementation", mini("Correct"), "--case", "probe/masks"]
    arguments += ["--case", "plain/no-mask/self", *FLOAT32, "--record", "r.json"]
    conformance(tmp_path, *arguments, expect=pytest.ExitCode.OK)
    record = read(tmp_path / "r.narrowed.json")
    assert record.complete
    case, probe = record.results
    assert case.entries == []
    assert [finding.requirement for finding in probe.findings] == [
        "adapter.declares-what-is-observed"
    ]
    assert probe.verdict == "conforms"
    known = {say(entry.subject): entry for entry in probe.entries}
    assert known["mask, bool"].value == known["mask, bool"].declared == Phrase("mask.attends")
    assert known["mask, float32 0/−inf"].value == Phrase("mask.added")
    assert known["mask, bool"].evidence.startswith("entry 0, head 0, query 0: fed [")


def test_a_wrong_declaration_fails_and_says_how_to_see_it_again(tmp_path):
    arguments = ["--implementation", mini("Observant"), "--case", "probe/masked-rows"]
    done = conformance(tmp_path, *arguments, expect=pytest.ExitCode.TESTS_FAILED)
    for told in (
        "deviates: adapter.declares-what-is-observed; the declaration and what was seen differ",
        "case probe/masked-rows, float32, mode default, on cpu",
        "mask, bool: output: declared NaN, observed output bias only",
        f"again: mha-conformance run {mini('Observant')} --case probe/masked-rows",
    ):
        assert told in done.stdout


@pytest.mark.night
def test_with_xdist_the_entries_are_the_same(tmp_path):
    arguments = ["--implementation", mini("Moded"), "--survey"]
    for name in ("masks", "masked-rows", "same-mask", "leaks", "weights"):
        arguments += ["--case", f"probe/{name}"]
    for label, extra in (("one", ()), ("two", ("-n", "2"))):
        options = (*arguments, "--record", f"{label}.json", *extra)
        conformance(tmp_path, *options, expect=pytest.ExitCode.OK)
    one, two = (read(tmp_path / f"{label}.narrowed.json") for label in ("one", "two"))
    assert {r.id: r for r in one.results} == {r.id: r for r in two.results}
    assert sum(len(result.entries) for result in one.results) > 50
    arrays = [
        read_arrays(tmp_path / f"{n}.narrowed.json", r) for n, r in (("one", one), ("two", two))
    ]
    assert arrays[0].keys() == arrays[1].keys() != set()
    assert all(np.array_equal(arrays[0][name], arrays[1][name]) for name in arrays[0])


def test_entries_survive_in_the_journal_of_a_run_that_was_killed(tmp_path):
    start = ["conformance", "run", mini("HangsLater"), "--case", "probe/weights"]
    returned, _, _ = stopped(tmp_path, signal.SIGKILL, *start, "--record", "r.json")
    assert returned == -signal.SIGKILL
    path = journal_path(tmp_path / "r.narrowed.json")
    header, (result,), _ = read_journal(path)
    assert header.planned == 2
    assert (result.case, result.mode) == ("probe/weights", "first")
    assert [say(entry.value) for entry in result.entries] == ["per head", "1", "the same"]
    assert not read(path).complete


# In a project that has nothing to do with it


PROJECT = """
def pytest_addoption(parser):
    # Options that this suite calls its own in its own runs.
    for name in ("--device", "--record", "--case", "--dtype", "--mode", "--survey"):
        parser.addoption(name, default="ours")
"""
TESTS = """
import sys

def test_options(request):
    assert request.config.getoption("--device") == "ours"

def test_nothing_was_imported():
    found = {n for n in sys.modules if n.partition(".")[0] in ("conformance", "numpy", "msgspec")}
    packages = {"conformance", "conformance.records", "conformance.running"}
    assert found <= {*packages, "conformance.running.plugin"}

def test_that_fails():
    assert False
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conftest.py").write_text(PROJECT)
    (tmp_path / "test_project.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers --strict-config\nfilterwarnings = error\n"
    )
    return tmp_path


def test_the_plugin_has_no_effect_there(project):
    options = ("-p", "no:jaxtyping")
    done = run_pytest(project, *options, expect=pytest.ExitCode.TESTS_FAILED, python=children.anew)
    assert "1 failed, 2 passed" in done.stdout
    assert "= conformance =" not in done.stdout
    assert "mha-conformance" in done.stdout, "it is loaded, as its name in the header shows"
    names = {path.name for path in project.iterdir()} - {"__pycache__"}
    assert names == {"conftest.py", "test_project.py", "pytest.ini"}


def test_help_works_there(project):
    done = run_pytest(project, "--help", expect=pytest.ExitCode.OK, python=children.anew)
    assert "--implementation=NAME" in done.stdout


def test_a_conformance_run_there_says_what_is_in_the_way(project):
    arguments = ["--implementation", mini("Correct")]
    options = ("--pyargs", "conformance", *arguments)
    code = pytest.ExitCode.USAGE_ERROR
    done = run_pytest(project, *options, expect=code, python=children.anew)
    assert "an option of this project is in the way" in done.stderr
    assert "use mha-conformance run" in done.stderr
    case = [*FLOAT32, "--case", "mask/shared/self"]
    done = subprocess.run(
        **command("conformance", "run", mini("Correct"), *case), capture_output=True, cwd=project,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert "Correct: 1 conforms" in done.stdout


def test_help_lists_every_option(tmp_path):
    done = run_pytest(tmp_path, "--help", expect=pytest.ExitCode.OK)
    for option in ("implementation", "case", "dtype", "mode", "device", "record", "survey"):
        assert f"--{option}" in done.stdout


def test_a_run_beside_tests_of_the_users_own(tmp_path):
    # One record in the middle of a project's own tests; those are no items.
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    arguments = ["--pyargs", "conformance", "test_own.py", "--implementation", mini("Correct")]
    arguments += [*FLOAT32, "--case", "mask/shared/self", "--record", "r.json"]
    done = run_pytest(tmp_path, *arguments, expect=pytest.ExitCode.OK)
    assert "2 passed" in done.stdout
    record = json.loads((tmp_path / "r.narrowed.json").read_text())
    assert len(record["results"]) == record["header"]["planned"] == 1


def test_a_gate_that_holds_does_not_hide_a_test_of_the_users_own(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): assert False\n")
    (tmp_path / "known.toml").write_text("")
    arguments = ["--pyargs", "conformance", "test_own.py", "--implementation", mini("Correct")]
    arguments += [*FLOAT32, "--case", "mask/shared/self", "--conformance-baseline", "known.toml"]
    done = run_pytest(tmp_path, *arguments, expect=pytest.ExitCode.TESTS_FAILED)
    assert "gate: Correct: holds" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


# GPUs


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ("2,5", ["2", "5", "2"]),
        ("GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b", "GPU-c"]),
        ("7", ["7", "7", "7"]),
        ("", ["", "", ""]),
    ],
)
def test_every_worker_takes_one_gpu_in_turn(monkeypatch, given, own):
    taken = []
    for worker in ("gw0", "gw1", "gw2"):
        monkeypatch.setenv(GPUS, given)
        take_gpu(worker)
        taken.append(os.environ[GPUS])
    assert taken == own


ASKS = """
import os
from pathlib import Path
from conformance import MaskArgument, attention_function

with Path("asked").open("a") as file:
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ["CUDA_VISIBLE_DEVICES"]
    file.write(worker + " " + gpus + "\\n")


@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"))
def attention(query, key, value, mask=True):
    return value
"""


@pytest.mark.night
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_processes_of_a_worker_see_its_gpu_alone(tmp_path, device):
    (tmp_path / "mine.py").write_text(ASKS, encoding="utf-8")
    options = ("--case", "plain/no-mask", "--dtype", "float32", "--device", device, "-n", "2")
    # This process may be a worker itself.
    inherited = {name: value for name, value in os.environ.items() if "XDIST" not in name}
    subprocess.run(
        children.python("-m", "conformance", "run", "mine.py:attention", *options),
        cwd=tmp_path, env=inherited | {GPUS: "3,5"}, capture_output=True, timeout=300,
    )  # fmt: skip
    lines = {line.strip() for line in (tmp_path / "asked").read_text().splitlines()}
    workers = {line for line in lines if line.startswith("gw")}
    every = {"gw0 3", "gw1 5"} if device == "gpu" else {"gw0 3,5", "gw1 3,5"}
    assert workers
    assert workers <= every
    assert "3,5" in lines, "the process that only plans has all"
