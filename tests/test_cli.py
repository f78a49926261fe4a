"""The command line, as programs and people meet it: output, one-line errors, exit codes."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import children
import pytest
from mutants import miniatures

from conformance.adapter.base import DEFAULT_MODE
from conformance.adapter.loading import registered
from conformance.cases.catalogue import catalogue
from conformance.cli import COMMANDS, EXIT_CODES, main
from conformance.errors import ExitCode
from conformance.judging.verdict import Isolation, Verdict
from conformance.requirements import REQUIREMENTS
from conformance.running.session import Item, Session, plan

MINIATURES = Path(__file__).with_name("mutants") / "miniatures.py"
NARROW = ("--dtype", "float32", "--case", "plain/no-mask/self", "--case", "mask/per-batch/self")
OWN = f"{Path(miniatures.__file__)}:Correct"
EVERYONE = (
    "Correct", "Inverted", "Moded", "Raises", "Refuses", "Unready", "Lazy", "ReturnsList",
    "ReturnsForeign", "ForeignWeights", "WrongShape", "OneHead", "WrongDtype", "Raw", "RawList",
    "RawWrongShape", "decorated", "instance",
)  # fmt: skip


def mini(name):
    return f"{MINIATURES}:{name}"


def mha(*arguments, cwd=None, expect=None, python=children.python):
    """Run the command; whatever happens, no traceback of ours."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        python("-m", "conformance", *map(str, arguments)),
        capture_output=True, text=True, timeout=300, cwd=cwd, check=False,
        env=env | {"NO_COLOR": "1", "COLUMNS": "80"},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert "Traceback (most" not in told, told
    assert "INTERNALERROR" not in told, told
    if expect is not None:
        assert ExitCode(done.returncode) == expect, told
    return done


def narrowed(folder, name="r"):
    return json.loads((folder / f"{name}.narrowed.json").read_text())


def findings(record, **wanted):
    """(requirement, verdict, detail) of the results with these fields."""
    return [
        (finding["requirement"], finding["verdict"], finding.get("detail", ""))
        for result in record["results"]
        if all(result[name] == value for name, value in wanted.items())
        for finding in result["findings"]
    ]


# What a survey writes down about each miniature


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    """(record, what was printed) of one run of everyone."""
    folder = tmp_path_factory.mktemp("survey")
    done = mha("run", *map(mini, EVERYONE), *NARROW, "--record", "r.json", cwd=folder)
    # Of two it was not found out what they do.
    assert done.returncode == ExitCode.INCOMPLETE, done.stdout + done.stderr
    return narrowed(folder), done.stdout


def test_every_item_has_an_outcome(survey):
    record, _ = survey
    asked = {(result["implementation"], result["case"]) for result in record["results"]}
    cases = ("plain/no-mask/self", "mask/per-batch/self")
    assert asked == {(name, case) for name in EVERYONE for case in cases}
    # Both modes of "Moded" at the case that repeats calls, the first at the other.
    assert len(record["results"]) == record["header"]["planned"] == 2 * len(EVERYONE) + 1
    assert record["complete"]


@pytest.mark.parametrize("name", ["Correct", "decorated", "instance", "Raw"])
def test_who_is_right_conforms(survey, name):
    found = findings(survey[0], implementation=name)
    assert {verdict for _, verdict, _ in found} == {"conforms", "unsupported"}
    assert ("output.equals-definition", "conforms", "") in found


def test_who_is_wrong_deviates_where_it_is_wrong(survey):
    record, printed = survey
    told = findings(record, implementation="Inverted", case="mask/per-batch/self")
    assert "output.equals-definition" in [r for r, verdict, _ in told if verdict == "deviates"]
    plain = findings(record, implementation="Inverted", case="plain/no-mask/self")
    assert "deviates" not in [verdict for _, verdict, _ in plain]
    assert "(equals the answer with the mask inverted)" in printed


def test_a_mode_is_compared_with_the_first(survey):
    rough = findings(survey[0], implementation="Moded", mode="rough")
    assert "deviates" in [verdict for r, verdict, _ in rough if r == "modes.agree"]
    exact = findings(survey[0], implementation="Moded", mode="exact")
    assert "deviates" not in [verdict for _, verdict, _ in exact]


def test_who_raises_for_one_case_goes_on_with_the_others(survey):
    told = findings(survey[0], implementation="Raises", case="mask/per-batch/self")
    assert {verdict for _, verdict, _ in told} == {"error"}
    place = r"ValueError: this mask is not for me \(at miniatures\.py:\d+\)"
    assert all(re.fullmatch(place, detail) for _, _, detail in told)
    plain = findings(survey[0], implementation="Raises", case="plain/no-mask/self")
    assert ("output.equals-definition", "conforms", "") in plain


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ReturnsList", "returned list, not an array of numpy"),
        ("ReturnsForeign", "returned Foreign, not an array of numpy"),
        (
            "ForeignWeights",
            "returned Foreign as weights, not an array of numpy, the adapter's `framework`",
        ),
        (
            "WrongShape",
            "what it returned, [batch heads length head], has shape [2, 4, 6, 6], "
            "wanted [2, 4, 7, 6]",
        ),
        (
            "OneHead",
            "what it returned, [batch heads length head], has shape [2, 1, 7, 6], "
            "wanted [2, 4, 7, 6]",
        ),
        ("RawList", "output is list, not a NumPy array"),
        ("RawWrongShape", "output has shape [3, 7, 24], wanted [2, 7, 24]"),
    ],
)
def test_an_answer_that_is_none_is_an_error_in_words(survey, name, told):
    found = findings(survey[0], implementation=name, case="plain/no-mask/self")
    # Raw arrays are only looked at when they are compared; their inputs are unchanged for sure.
    found = [item for item in found if not item[0].startswith("call.leaves-")]
    assert {verdict for _, verdict, _ in found} == {"error"}
    assert {detail for _, _, detail in found} == {told}


def test_another_dtype_is_a_deviation_of_the_dtype_only(survey):
    found = findings(survey[0], implementation="WrongDtype")
    deviating = {(r, detail) for r, verdict, detail in found if verdict == "deviates"}
    assert deviating == {("dtype.in-is-out", "inputs are float32, but output is float64")}


def test_what_it_cannot_express_is_unsupported_with_its_reason(survey):
    found = findings(survey[0], implementation="Refuses")
    assert {(verdict, detail) for _, verdict, detail in found} == {
        ("unsupported", "today I cannot")
    }


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Unready", "the abacus is not installed"),
        (
            "Lazy",
            "no_such_package_anywhere is not installed; pip install no_such_package_anywhere",
        ),
    ],
)
def test_what_is_not_installed_is_unavailable(survey, name, told):
    record, printed = survey
    found = findings(record, implementation=name)
    assert {(verdict, detail) for _, verdict, detail in found} == {("unavailable", told)}
    assert f"not verified, 2 items: {told}" in printed


def test_the_summary_counts_by_verdict_and_never_gives_a_percentage(survey):
    _, printed = survey
    summary = printed.partition("conformance ====")[2]
    assert "\nCorrect: 2 conforms\n" in summary
    assert "\nRaises: 1 conforms, 1 error\n" in summary
    assert "\nRefuses: 2 unsupported\n" in summary
    assert "%" not in summary
    assert "def test_conforms" not in printed, "no source of the suite for an error of others"


def test_the_record_says_who_and_how(survey):
    header = survey[0]["header"]
    assert [item["name"] for item in header["implementations"]] == list(EVERYONE)
    by_name = {item["name"]: item for item in header["implementations"]}
    assert by_name["Unready"]["unavailable"] == "the abacus is not installed"
    assert "unavailable" not in by_name["Correct"]
    assert by_name["Correct"]["spec"] == mini("Correct")
    assert by_name["Correct"]["causal"] == {"name": "is_causal", "alignment": "top-left"}
    provenance = header["provenance"]
    assert provenance["packages"]["numpy"]
    assert provenance["command"].startswith("python -m conformance run ")
    assert provenance["selection"] == (
        "--case plain/no-mask/self --case mask/per-batch/self --dtype float32"
    )


# Exit codes


def test_a_correct_implementation_is_0_and_stays_0_when_strict():
    # A characteristic that is not as declared is worth knowing, but breaks no requirement.
    case = ("--dtype", "float32", "--case", "edge/fully-masked-row/cross")
    done = mha("run", mini("Correct"), mini("Observant"), *case, "--strict", expect=ExitCode.OK)
    assert "Correct: 1 conforms" in done.stdout
    assert "Observant: 1 deviates" in done.stdout


def test_a_wrong_implementation_is_0_in_a_survey():
    done = mha("run", mini("Inverted"), mini("Raises"), *NARROW, expect=ExitCode.OK)
    assert "Inverted: 1 conforms, 1 deviates" in done.stdout


def test_a_survey_ends_with_the_gravest_deviation_as_strict_tells_it():
    narrow = ("--dtype", "float32", "--case", "mask/shared/", "--no-isolate")
    told = mha("run", mini("Inverted"), mini("Correct"), *narrow).stdout
    left, _, last = told.partition("\nInverted, the worst of ")
    assert "measured" not in left
    message = last.partition("\n")[2].partition("\nall of them: the same with --strict; or ")[0]
    assert "likely cause: equals the answer with the mask inverted" in message
    again = re.search(r"^again: mha-conformance (.*)$", message, re.MULTILINE)[1]
    assert message.strip() in mha(*again.split(), "--no-isolate").stdout
    assert "Correct, the" not in told


def test_an_experiment_that_needs_a_process_of_its_own_is_not_dropped_in_silence():
    """Level default has it for isolated implementations only; level full starts a process."""
    case = ("--dtype", "float32", "--case", "key-padding/cross", "--case", "probe/bad-input")
    options = ("run", mini("Correct"), *case)
    told = mha(*options, "--no-isolate", "--level", "default", expect=ExitCode.OK).stdout
    line = "not asked, 1 item: probe/bad-input needs a process of its own, which --isolate or"
    assert "Correct: 1 conforms\n" in told
    assert line in told
    for more in (("--isolate", "--level", "default"), ("--no-isolate", "--level", "full")):
        told = mha(*options, *more, expect=ExitCode.OK).stdout
        assert "Correct: 2 conforms\n" in told
        assert "not asked" not in told


@pytest.mark.parametrize("more", [("--strict",), ("-n", "2")], ids=["strict", "xdist"])
def test_what_cannot_be_imported_is_told_once_and_without_a_count(tmp_path, more):
    """Nobody knows how many items would be asked of it; the record has one for each."""
    (tmp_path / "ad.py").write_text("import nobody_has_this\n")
    (tmp_path / "fails.py").write_text("raise ValueError('no such file')\n")
    arguments = ("run", "ad.py:f", "fails.py:g", mini("Correct"), *NARROW, "--record", "r.json")
    told = mha(*arguments, *more, cwd=tmp_path, expect=ExitCode.INCOMPLETE).stdout
    assert "\nnot verified: ad.py:f: it imports 'nobody_has_this', which is not installed\n" in told
    assert "\nnot verified: fails.py:g: does not import: ValueError: no such file\n" in told
    assert "unavailable" not in told
    assert told.count("nobody_has_this") == 1
    assert re.search(r"^2 passed in ", told, re.MULTILINE)
    verdicts = [verdict for _, verdict, _ in findings(narrowed(tmp_path))]
    assert verdicts.count("unavailable") == 4


def test_what_is_told_already_is_not_promised(tmp_path):
    narrow = ("--dtype", "float32", "--case", "mask/shared/self", "--no-isolate")
    told = mha("run", mini("Inverted"), *narrow).stdout
    assert "Inverted, the item in full:" in told
    assert "all of them" not in told
    assert "in full" not in mha("run", mini("Inverted"), *narrow, "--strict").stdout


def test_a_reason_for_what_is_unsupported_is_told_when_asked():
    narrow = ("--dtype", "float32", "--case", "plain/no-mask", "--no-isolate")
    told = mha("run", mini("Correct"), *narrow, "-v").stdout
    assert re.search(r"^  unsupported, \d+ items?: no additive score$", told, re.MULTILINE)
    assert "  unsupported" not in mha("run", mini("Correct"), *narrow).stdout


def test_where_much_is_unsupported_the_reasons_are_told_and_what_to_declare():
    narrow = ("--dtype", "float32", "--case", "additive", "--no-isolate")
    told = mha("run", mini("Correct"), *narrow).stdout
    assert re.search(r"^  unsupported, \d+ items: no additive score$", told, re.MULTILINE)
    assert "its adapter declares as fixed: docs/adapters.md" in told


@pytest.mark.sample(3)
@pytest.mark.parametrize("stops", [["-x"], ["--maxfail=1"], ["-x", "-n", "2"]], ids=" ".join)
def test_a_run_that_stops_at_a_failure_has_failures(stops):
    done = mha("run", mini("Inverted"), *NARROW, *stops, expect=ExitCode.DEVIATES)
    assert re.search("[12] failed", done.stdout)
    assert "ended early, as -x or --maxfail asks" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["Inverted", "Raises"])
def test_a_wrong_implementation_is_1_when_strict(name):
    done = mha("run", mini(name), *NARROW, "--strict", expect=ExitCode.DEVIATES)
    assert "1 failed" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-k", "nothing"], "Correct: nothing run"),
        (["--case", "plain/no-mask/additive"], "Correct: 1 unsupported"),
        (["--case", "mask/shared/self", "--dtype", "bfloat16"], "Correct: 1 unsupported"),
    ],
    ids=["deselected", "unsupported", "dtype"],
)
def test_nothing_verified_is_3(arguments, told):
    if "bfloat16" not in arguments:
        arguments = [*arguments, "--dtype", "float32"]
    done = mha("run", mini("Correct"), *arguments, expect=ExitCode.NOTHING_VERIFIED)
    assert told in done.stdout


def test_nothing_is_verified_where_every_call_raises():
    narrow = ["--case", "mask/*", "--dtype", "float32"]
    done = mha("run", mini("Raises"), *narrow, expect=ExitCode.NOTHING_VERIFIED)
    assert "nothing was verified: no item conforms or deviates" in done.stdout
    whole = ["--case", "mask/per-batch/self", "--case", "plain/no-mask/self", "--dtype", "float32"]
    assert "nothing was verified" not in mha("run", mini("Raises"), *whole).stdout


def test_a_device_that_is_not_there(tmp_path):
    arguments = ["--dtype", "float32", "--case", "mask/per-batch/self", "--device", "gpu"]
    arguments += ["--record", "r.json"]
    mha("run", mini("Correct"), *arguments, cwd=tmp_path, expect=ExitCode.NOTHING_VERIFIED)
    record = narrowed(tmp_path)
    told = "numpy sees no gpu on this machine (it has cpu)"
    assert {(verdict, detail) for _, verdict, detail in findings(record)} == {("unavailable", told)}
    assert record["header"]["implementations"][0]["unavailable"] == told
    assert record["header"]["provenance"]["device"] == "gpu"


def test_a_mode_that_the_selected_cases_do_not_look_at():
    arguments = ["--dtype", "float32", "--case", "mask/per-batch/self", "--mode", "rough"]
    done = mha("run", mini("Moded"), *arguments, expect=ExitCode.NOTHING_VERIFIED)
    assert "Moded: nothing run" in done.stdout


def test_a_process_that_dies_takes_one_item_with_it(tmp_path):
    arguments = [*NARROW, "--no-isolate", "-n", "2", "--record", "r.json"]
    done = mha("run", mini("Dies"), *arguments, cwd=tmp_path, expect=ExitCode.INCOMPLETE)
    assert "Dies: 1 conforms, 1 crashed" in done.stdout
    assert findings(narrowed(tmp_path), case="mask/per-batch/self") == [
        ("run", "crashed", "the process died at this item")
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (
            ["run", "torch-mah"],
            ExitCode.USAGE,
            "unknown implementation 'torch-mah'; did you mean torch-mha or ",
        ),
        (["gat"], ExitCode.USAGE, "argument COMMAND: unknown: 'gat'; did you mean gate?"),
        (["run", "ours", "--level", "cor"], ExitCode.USAGE, "choose from 'first', 'core', 'defa"),
        (["run", "missing.py:A"], ExitCode.USAGE, "missing.py:A: there is no file missing.py"),
        (
            ["run", "empty.py"],
            ExitCode.USAGE,
            "empty.py: name the adapter in it, empty.py:NAME; th",
        ),
        (["run", "empty.py:A"], ExitCode.USAGE, "empty.py has no 'A'; there is no adapter in it"),
        (["run", "plain.py:nope"], ExitCode.USAGE, "functions and classes in it: mine, Layer"),
        (["new-adapter", "plain.py:mien"], ExitCode.USAGE, "did you mean mine? functions and cl"),
        (
            ["run", "needy.py:A", "--no-isolate"],
            ExitCode.NOTHING_VERIFIED,
            "it imports 'no_such_package_anywhere'",
        ),
        (
            ["explain", "mask/sharde/self"],
            ExitCode.USAGE,
            "unknown case, experiment or requirement 'mask/sh",
        ),
        (["explain", "output-equals"], ExitCode.USAGE, "did you mean output.equals-definition"),
        (
            ["explain", "torch-mha"],
            ExitCode.USAGE,
            "'torch-mha' is an implementation; its conventions: mha-conformance probe torch-mha,",
        ),
        (["explain", "mine.py:A"], ExitCode.USAGE, "is an implementation"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_one_line_for_what_is_not_there(tmp_path, arguments, code, told):
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "needy.py").write_text("import no_such_package_anywhere")
    own = "def mine(q, k, v): return q\nclass Layer: pass\ndef _helper(): pass\n"
    (tmp_path / "plain.py").write_text(f"from os.path import join\n{own}")
    done = mha(*arguments, cwd=tmp_path, expect=code)
    (line,) = done.stderr.splitlines()
    assert line.startswith("mha-conformance: ")
    assert told in line
    assert done.stdout == ""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--case", "mask/sharde/self"], "unknown case 'mask/sharde/self'; did you mean mask/shar"),
        (["--case", "causl"], "did you mean causal/"),
        (["--case", "xyzzy"], "unknown case 'xyzzy'; all that there are: mha-conformance list ca"),
        (["--dtype", "flaot32"], "unknown dtype 'flaot32'; did you mean float32 or "),
        (["--mode", "defualt"], "unknown mode 'defualt'; did you mean default?"),
        (["--record", "folder.json"], "folder.json: is a folder"),
        (["--record", "r.txt"], "r.txt: a record's name ends with .json"),
        (["--record", "file/r.json"], "r.json: cannot be written ("),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_one_line_for_what_cannot_be_selected_or_written(tmp_path, arguments, told):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    done = mha("run", mini("Correct"), *arguments, cwd=tmp_path, expect=ExitCode.USAGE)
    (line,) = done.stderr.strip().splitlines()
    assert told in line
    assert len(line) < 300
    assert done.stdout == ""


LONG = "x" * 300
NINES = "9" * 5000


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["gate", "--from-record", "."], ".: cannot be read (no regular file)"),
        (["gate", "--from-record", "/"], "/: cannot be read (no regular file)"),
        (["report", LONG], "File name too long"),
        (["run", OWN, "--record", f"{LONG}.json"], "File name too long; name another place"),
        # The name itself is short enough, but not those of its journal.
        (["run", OWN, "--record", f"{LONG[:245]}.json"], "cannot be written (File name too long)"),
        (["gate", OWN, "--record", f"{LONG[:245]}.json"], "cannot be written (File name too long)"),
        (["gate", OWN, "--baseline", LONG], "cannot be read (File name too long)"),
        (["explain", "mask/shared/self", f"{LONG}.py:f"], "File name too long"),
        (["run", OWN, "--shard", "1/99999999999"], "at most 10,000 parts"),
        (["run", OWN, "--shard", f"1/{NINES}"], "at most 10,000 parts"),
        (["long", OWN, "--memory-limit", f"{NINES}GiB"], "say a size such as 4GiB"),
        (["run", OWN, "--shard", "0/2"], "say which of how many, such as 2/8"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_one_line_for_a_place_or_a_number_that_cannot_be(
    tmp_path, monkeypatch, capsys, arguments, told
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mha-conformance: ")
    assert told in line
    assert len(line) < 1000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", OWN, "--case", ""], "--case: is empty; leave the option out to select everything"),
        (["gate", OWN, "--dtype", " "], "--dtype: is empty"),
        (["explore", OWN, "--seed", "-1"], "--seed: '-1'; say a whole number from 0 on"),
        (["explore", OWN, "--seed", NINES], "--seed: '9999"),
        (["explore", OWN, "--examples", "0"], "--examples: '0'; say a whole number from 1 on"),
        (["long", OWN, "--seconds", "nan"], "--seconds: 'nan'; say a number above 0"),
        (["long", OWN, "--seconds", "-1"], "--seconds: '-1'; say a number above 0"),
        (["judge", OWN, "--once", "inf"], "--once: 'inf'; say a number above 0"),
        (["judge", OWN, "--seconds", "0"], "--seconds: '0'; say a whole number from 1 on"),
        (["judge", OWN, "--memory", "-1"], "--memory: '-1'; say a whole number from 1 on"),
        (["judge", OWN, "--jobs", "0"], "--jobs: '0'; say a whole number from 1 on"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_an_option_without_a_meaning(capsys, arguments, told):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == ExitCode.USAGE
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[tool.mha-conformance]]\nlevel = "core"', "it begins with [tool.mha-conformance]"),
        ("[tool]\nmha-conformance = 3", "it begins with [tool.mha-conformance]"),
        ('[tool.mha-conformance]\ncases = [""]', "cases has an empty text"),
        ("\ufeff[tool.mha-conformance]\nno = 1", "unknown key 'no'"),
    ],
    ids=["array of tables", "number", "empty", "byte-order mark"],
)
def test_one_line_for_a_table_that_cannot_be(tmp_path, monkeypatch, capsys, text, told):
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for command in ("run", "gate"):
        assert main([command]) == ExitCode.USAGE
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("mha-conformance: pyproject.toml: ")
        assert told in line


@pytest.mark.parametrize(
    ("most", "code", "told"),
    [
        # Not even a temporary folder can be written to; then the record alone.
        (0, ExitCode.INCOMPLETE, "free some space"),
        (8, ExitCode.INCOMPLETE, "r.narrowed.json: cannot be written (File too large)"),
    ],
)
def test_a_full_disk(tmp_path, most, code, told):
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); "
        "from conformance.cli import main; sys.exit(main())"
    )
    arguments = ("run", OWN, *NARROW, "--record", "r.json")

    def python(*given):
        return children.anew("-c", limited, *given[2:])

    done = mha(*arguments, cwd=tmp_path, expect=code, python=python)
    assert told in done.stdout + done.stderr


def test_a_verdict_on_a_full_disk_is_printed(tmp_path, monkeypatch, capsys):
    own = {"level": "core", "token": "", "isolation": Isolation("limits")}
    verdict = Verdict(candidate="mine.py", verdict="right", score=1.0, **own)
    monkeypatch.setattr("conformance.judging.pool.judged", lambda *_: iter([verdict]))
    (tmp_path / "full").symlink_to("/dev/full")
    assert main(["judge", "mine.py", "--output", str(tmp_path / "full")]) == ExitCode.INCOMPLETE
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "right"
    assert "cannot be written (No space left on device)" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["walk"],
        ["list", "everything"],
        ["list", "cases", "--all"],
        ["run", "ours", "--device", "tpu"],
    ],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"mha-conformance: .*; mha-conformance.* --help says what there is", line)


def test_without_a_command_there_is_help(capsys):
    assert main([]) == ExitCode.USAGE
    assert "usage: mha-conformance" in capsys.readouterr().err


def test_without_an_implementation_one_line_says_where_to_name_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run"]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "which implementation?" in line
    assert "pyproject.toml" in line


def test_an_argument_that_pytest_does_not_know_runs_nothing(tmp_path):
    (tmp_path / "r.json").write_text("a record of before")
    arguments = ["--record", "r.json", "no-such-file"]
    done = mha("run", mini("Correct"), *arguments, cwd=tmp_path, expect=ExitCode.USAGE)
    assert "no-such-file" in done.stderr
    assert (tmp_path / "r.json").read_text() == "a record of before"


def test_two_implementations_of_one_name():
    done = mha("run", mini("Correct"), mini("Correct"), expect=ExitCode.USAGE)
    assert "two implementations are called 'Correct'; rename one" in done.stderr


def test_functions_of_one_name_are_refused_before_they_are_loaded(tmp_path, monkeypatch, capsys):
    """A class, or a file that says `name=` somewhere, may have another name than its own."""
    monkeypatch.chdir(tmp_path)
    function = "print(1 / 0)\ndef mine(query, key, value): ...\n"
    for file, text in (("a.py", function), ("b.py", function), ("c.py", function + "name = 1\n")):
        Path(file).write_text(text)
    for specs, told in (
        (["a.py:mine", "b.py:mine"], "two implementations are called 'mine': a.py:mine and b.py:"),
        (["c.py:mine", "c.py:mine"], "two implementations are called 'mine'; rename one"),
        (["a.py:mine", "c.py:mine"], "a.py:mine: does not import: ZeroDivisionError"),
    ):
        main(["run", *specs, "--no-isolate"])
        assert told in capsys.readouterr().err


def test_two_files_with_a_function_of_one_name(tmp_path, monkeypatch, capsys):
    text = Path(miniatures.__file__).read_text()
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "a.py:Correct", "b.py:Correct", "--no-isolate"]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "'Correct': a.py:Correct and b.py:Correct; rename one, or run them one by one" in line
    assert main(["report", "a.py:Correct", "b.py:Correct"]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "first mha-conformance run a.py:Correct --record a-Correct.json, each" in line


@pytest.mark.parametrize("more", [[], ["--html", "page.html"]], ids=["plain", "html"])
def test_a_report_of_one_missing_record_is_one_line(more, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "nope.json", *more]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert "nope.json: cannot be read (No such file" in told.err
    assert (told.out, told.err.count("\n"), [*tmp_path.iterdir()]) == ("", 1, [])
    # The record of a narrowed run lies beside, and the line names it.
    (tmp_path / "nope.narrowed.json").touch()
    assert main(["report", "nope.json", *more]) == ExitCode.USAGE
    assert "nope.narrowed.json" in capsys.readouterr().err
    # A report of several records says which are missing, and goes on.
    assert main(["report", "nope.json", "no.json", *more]) == ExitCode.NOTHING_VERIFIED


# Help and lists


def test_help_says_where_a_narrowed_run_is_recorded(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "NAME.narrowed.json" in capsys.readouterr().out


def test_help_names_every_exit_code(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == ExitCode.OK
    printed = capsys.readouterr().out
    assert EXIT_CODES.keys() == set(ExitCode)
    for code in ExitCode:
        assert re.search(rf"^  {code:d} +\w", printed, re.MULTILINE)


def test_whatever_ends_with_1_is_in_the_help_and_on_the_page():
    page = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"^\| 1 \| (.+) \|$", page, re.MULTILINE)
    of = {module: added(module) for module in COMMANDS}
    names = set().union(*of.values())
    clauses = EXIT_CODES[ExitCode.DEVIATES].split("; ")
    labels = " ".join(clause.partition(":")[0] for clause in clauses)
    told = {name for name in names if re.search(rf"\b{name}\b", labels)}
    assert told == {name for name in names if re.search(rf"`{name}\b", row)}
    # `convert` raises what has this code.
    assert "convert" in told
    for module, own in of.items():
        if "ExitCode.DEVIATES" in inspect.getsource(module):
            assert own & told, module.__name__


def added(module):
    """The names of the commands that a module adds."""
    return set(re.findall(r'add_parser\(\s*"([\w-]+)"', inspect.getsource(module)))


def test_the_command_and_the_module_are_the_same():
    (script,) = metadata.entry_points(group="console_scripts", name="mha-conformance")
    assert script.load() is main


@pytest.mark.parametrize(
    ("what", "ids"),
    [
        ("implementations", list(registered())),
        ("cases", [case.id for case in catalogue()]),
        ("requirements", [requirement.id for requirement in REQUIREMENTS]),
    ],
)
def test_a_list_for_programs_has_whole_lines(what, ids, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["list", what]) == ExitCode.OK
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ids
    assert all(cell and "…" not in cell for row in rows for cell in row)


def test_a_list_for_people_shows_ids_in_full(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["list", "cases"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert all(case.id in printed for case in catalogue())


def test_explain_a_requirement(capsys):
    assert main(["explain", "mask.polarity-is-as-declared"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.startswith("mask.polarity-is-as-declared (must)\nEach mask argument means")
    assert "Why: " in printed
    assert "plain/no-mask/cross" in printed


def test_explain_a_case(capsys):
    assert main(["explain", "causal/bottom-right/cross"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.startswith("causal/bottom-right/cross\n")
    assert "causal, aligned bottom-right" in printed
    # Three queries of the last four... the last query sees all six keys.
    assert "\n    ###...\n    ####..\n    #####.\n    ######\n" in printed


@pytest.mark.parametrize("name", ["mask/shared/self", "mask.polarity-is-as-declared"])
def test_an_explanation_folds_what_all_libraries_do(capsys, name):
    assert main(["explain", name]) == ExitCode.OK
    folded = capsys.readouterr().out
    assert len(folded.splitlines()) < 60
    assert "https://" not in folded
    (again,) = re.findall(r"One of them, with links: mha-conformance (explain .*)", folded)
    assert main(again.split()) == ExitCode.OK
    assert "https://" in capsys.readouterr().out
    assert main(["explain", name, "torch-mha"]) == ExitCode.OK
    one = capsys.readouterr().out
    assert "How torch-mha receives it\n" in one or "What torch-mha declares\n" in one
    assert "https://docs.pytorch.org/" in one
    assert "mha-conformance run torch-mha" in one
    assert "flax" not in one


def test_an_explanation_of_an_attention_of_your_own(capsys):
    own = f"{Path(miniatures.__file__)}:Correct"
    assert main(["explain", "mask/shared/self", own]) == ExitCode.OK
    assert f"How {own} receives it" in capsys.readouterr().out
    assert main(["explain", "mask/shared/self", "torch-mah"]) == ExitCode.USAGE
    assert "did you mean torch-mha" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plain/no-mask/cross.d64t64x64-layer", "plain/tiles/few-queries"])
def test_explain_a_case_whose_sizes_an_implementation_decides(capsys, name):
    assert main(["explain", name]) == ExitCode.OK
    assert capsys.readouterr().out.startswith(f"{name}\n")


def test_explain_every_case_that_a_pattern_finds(capsys):
    assert main(["explain", "mask/shared"]) == ExitCode.OK
    printed = capsys.readouterr().out
    for case in catalogue():
        assert (f"{case.id}\n" in printed) == (case.name == "mask/shared")


def test_explain_takes_the_beginning_and_lists_many(capsys):
    assert main(["explain", "mask/"]) == ExitCode.OK
    title, *lines, again = capsys.readouterr().out.splitlines()
    found = [case.id for case in catalogue() if case.id.startswith("mask/")]
    assert title == f"{len(found)} begin with or match mask/:"
    assert [line.split()[0] for line in lines] == found
    assert again == f"One of them in full: mha-conformance explain {found[0]}"
    assert main(["explain", "output.equals"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("output.equals-definition (must)\n")
    assert main(["explain", "*/bottom-right/cross"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("causal/bottom-right/cross\n")


def test_what_adapters_declare_is_not_called_documentation(capsys):
    assert main(["explain", "observed.fully-masked-row"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "What each adapter declares\n" in printed
    assert "documents" not in printed


@pytest.mark.night
def test_explain_every_name_there_is(capsys, monkeypatch):
    # One reference answer for each case takes seconds, and other tests have them all.
    monkeypatch.setattr("conformance.commands.explain._noise", lambda case: defaultdict(float))
    for name in [*(r.id for r in REQUIREMENTS), *(case.id for case in catalogue())]:
        assert main(["explain", name]) == ExitCode.OK
        assert capsys.readouterr().out.startswith(name)


def test_begin_writes_an_id(tmp_path, capsys):
    file = tmp_path / "records" / "run"
    assert main(["begin", "--run-file", str(file)]) == ExitCode.OK
    assert capsys.readouterr().out == f"run {file.read_text()}"
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{4}\n", file.read_text())


def test_a_run_file_that_is_no_text_is_one_line(tmp_path, capsys):
    (tmp_path / "run").write_bytes(b"\xff\xfe")
    command = ["report", str(tmp_path), "--run-file", str(tmp_path / "run")]
    assert main(command) == ExitCode.USAGE
    assert "run: cannot be read (it is no UTF-8 text); start the run" in capsys.readouterr().err


# What the checks do with an implementation that is not there, or that ends the program


def case_of(name):
    return next(case for case in catalogue() if case.id == name)


def examined(adapter, case):
    adapter.name = "mini"
    return Session().examine(Item(adapter, case_of(case), "float32", "cpu", DEFAULT_MODE))


def test_nothing_deviates_that_was_never_there():
    found = examined(miniatures.Unready(), "plain/no-mask/cross").findings
    assert {finding.verdict for finding in found} == {"unavailable"}


def test_who_ends_the_program_has_made_an_error():
    assert examined(miniatures.Exits(), "mask/per-batch/self").verdict == "error"


def test_a_mistake_in_an_adapter_does_not_end_the_plan():
    case = case_of("mask/per-batch/self")
    (item,) = plan([miniatures.Puzzled()], [case], ["float32"], "cpu")
    assert Session().examine(item).verdict == "error"


def test_without_a_command_the_help_lists_all_of_them(capsys):
    assert main([]) == ExitCode.USAGE
    assert re.search(r"^    gate +fail if", capsys.readouterr().err, re.MULTILINE)
