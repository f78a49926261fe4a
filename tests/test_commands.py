"""What all commands share: JSON and its schema, progress, refusals, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import children
import pytest
from mutants import miniatures
from records import bad, good, record, result, save
from schemas import faults, validator

from conformance.adapter.loading import registered
from conformance.cases.catalogue import catalogue
from conformance.cli import COMMANDS, main
from conformance.commands import listing
from conformance.commands.listing import missing
from conformance.commands.shared import OUTPUTS, print_json
from conformance.errors import ExitCode
from conformance.experiments import TOPICS
from conformance.requirements import REQUIREMENTS
from conformance.text import Pace

MINIATURES = Path(__file__).with_name("mutants") / "miniatures.py"
NARROW = ("--dtype", "float32", "--case", "mask/per-batch/self", "--no-isolate")


def mini(name):
    return f"{MINIATURES}:{name}"


def told(capsys, *arguments, code=ExitCode.OK):
    assert main([str(item) for item in arguments]) == code
    return capsys.readouterr()


def printed(capsys, *arguments, code=ExitCode.OK):
    """What the command prints as JSON."""
    return json.loads(told(capsys, *arguments, "--format", "json", code=code).out)


# JSON and its schema


@pytest.mark.parametrize(
    ("what", "ids"),
    [
        ("implementations", list(registered())),
        ("cases", [case.id for case in catalogue()]),
        ("experiments", [topic.id for topic in TOPICS]),
        ("requirements", [requirement.id for requirement in REQUIREMENTS]),
    ],
)
def test_lists(capsys, what, ids):
    found = printed(capsys, "list", what)
    assert not faults("list", found)
    assert found["kind"] == what
    assert [entry.get("id") or entry["name"] for entry in found["entries"]] == ids


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("mask.polarity-is-as-declared", "requirement", 1),
        ("causal/bottom-right/cross", "case", 1),
        ("mask/shared", "case", sum("mask/shared" in case.id for case in catalogue())),
        ("probe/", "experiment", len(TOPICS)),
    ],
)
def test_explanations(capsys, name, kind, number):
    found = printed(capsys, "explain", name)
    assert not faults("explain", found)
    assert [entry["kind"] for entry in found["entries"]] == [kind] * number


def test_an_explanation_has_prose_inputs_derivation_and_what_libraries_say(capsys):
    (found,) = printed(capsys, "explain", "causal/bottom-right/cross")["entries"]
    assert found["case"]["why"]
    assert "causal, aligned bottom-right" in found["case"]["facts"]
    assert any("36 of 144 pairs" in line for line in found["derivation"])
    assert any("may be off by 8σ" in line for line in found["derivation"])
    put = {name: own["says"] for own in found["put"] for name in own["implementations"]}
    assert put["torch-mha"] == "attn_mask=bool[query key]"
    assert put["tutorial-3"].startswith("unsupported: ")
    (found,) = printed(capsys, "explain", "mask.polarity-is-as-declared")["entries"]
    says = {name: own["says"] for own in found["documented"] for name in own["implementations"]}
    assert "key_padding_mask: True blocks" in says["torch-mha"]
    assert "mask: True attends" in says["flax-linen"]
    links = {link: of for own in found["documented"] for link, of in own["documentation"].items()}
    (link,) = (link for link, of in links.items() if "torch-mha" in of)
    assert link.startswith("https://docs.pytorch.org/")


def test_a_run_as_json_has_nothing_else_on_stdout(capsys):
    arguments = ["run", mini("Inverted"), mini("Correct"), *NARROW]
    found = printed(capsys, *arguments)
    assert not faults("run", found)
    wrong, right = found["implementations"]
    assert (wrong["name"], wrong["items"]) == ("Inverted", {"deviates": 1})
    assert wrong["missed"][0] == {
        "requirement": "output.equals-definition",
        "level": "must",
        "findings": {"deviates": 1},
        "cause": "equals the answer with the mask inverted",
    }
    assert (right["items"], right["missed"]) == ({"conforms": 1}, [])
    assert (found["planned"], found["missing"], found["exit_code"]) == (2, 0, 0)
    found = printed(capsys, *arguments, "--strict", code=ExitCode.DEVIATES)
    assert found["exit_code"] == ExitCode.DEVIATES


def test_a_card_as_json(capsys):
    found = printed(capsys, "probe", mini("Correct"), "--experiment", "masks")
    assert not faults("probe", found)
    assert found[0]["case"] == "probe/masks"


@pytest.mark.parametrize("command", ["explore", "reproduce"])
def test_what_is_searched_for_as_json(capsys, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    case = ["mask/key-padding/cross"] if command == "reproduce" else []
    options = ["--dtype", "float32", "--seconds", "20"]
    found = printed(capsys, command, *case, mini("Inverted"), *options, code=ExitCode.DEVIATES)
    assert not faults(command, found)
    (one,) = found["deviations"]
    assert (one["implementation"], one["dtype"]) == ("Inverted", "float32")
    assert one["ratio"] is None or one["ratio"] > 8
    assert one["sizes"]["batch"] == 1
    assert found["files"]
    assert all((tmp_path / file).is_file() for file in found["files"])
    assert found["exit_code"] == ExitCode.DEVIATES


def test_nothing_found_as_json(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["reproduce", "mask/key-padding/cross", mini("Correct"), "--dtype", "float32"]
    assert printed(capsys, *arguments) == {"deviations": [], "files": [], "exit_code": 0}


def test_what_changed_as_json(capsys, tmp_path):
    one = save(tmp_path, record(result(good())), "a.json")
    other = save(tmp_path, record(result(bad())), "b.json")
    found = printed(capsys, "compare", one, other, code=ExitCode.DEVIATES)
    assert not faults("compare", found)


def test_a_gate_as_json_says_what_is_new_and_what_is_outdated(capsys, tmp_path):
    baseline = tmp_path / "known.toml"
    about = {"requirement": "dtype.in-is-out", "verdict": "deviates", "reason": "It was so."}
    entry = "\n".join(f"{key} = {json.dumps(value)}" for key, value in about.items())
    baseline.write_text(f"[[known]]\n{entry}\n")
    arguments = ["gate", mini("Inverted"), *NARROW, "--baseline"]
    found = printed(capsys, *arguments, baseline, code=ExitCode.DEVIATES)
    assert not faults("gate", found)
    assert (found["holds"], found["exit_code"]) == (False, ExitCode.DEVIATES)
    assert found["new"][0]["cause"] == "equals the answer with the mask inverted"
    assert [own["why"] for own in found["outdated"]] == ["fixed"]
    arguments[1] = mini("Correct")
    baseline.write_text("")
    found = printed(capsys, *arguments, baseline)
    assert (found["holds"], found["new"], found["outdated"]) == (True, [], [])


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name not in ("record", "report")])
def test_schema_asks_for_nothing_else(capsys, name):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--schema"])
    assert stopped.value.code == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(told(capsys, "schema", name).out)
    assert found["$schema"].startswith("https://json-schema.org/")


def test_every_output_has_a_schema():
    for name in OUTPUTS:
        validator(name)


def test_a_schema_tells_what_is_wrong():
    assert faults("list", {"kind": "cases", "entries": [{"id": "x"}]})
    assert faults("run", {"schema": "mha-conformance/summary/1"})


def test_json_cannot_move_a_cursor(capsys):
    print_json({"a": "\x1b[2J\u202e\u0085\u2028é🙂"})
    text = capsys.readouterr().out
    assert all(char == "\n" or char.isprintable() for char in text)
    assert json.loads(text) == {"a": "\x1b[2J\u202e\u0085\u2028é🙂"}


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recrod", "x.json"], "unknown argument --recrod; did you mean --record? mha-"),
        (["--recrod=x.json"], "unknown argument --recrod=x.json; did you mean --record? mha-"),
        (["--zzz"], "unknown argument --zzz; mha-conformance run --help lists options, and pytest"),
        (["no-such-file"], "file or directory not found: no-such-file"),
        (["-n", "many"], "-n"),
    ],
)
def test_what_run_does_not_know_is_one_line(capsys, arguments, message):
    found = told(capsys, "run", mini("Correct"), *NARROW, *arguments, code=ExitCode.USAGE)
    (line,) = found.err.splitlines()
    assert line.startswith("mha-conformance: ")
    assert message in line
    assert "inifile" not in found.err
    assert "Correct" not in found.out


def test_options_of_pytest_are_passed_on(capsys):
    arguments = [
        "run",
        mini("Correct"),
        "--dtype",
        "float32",
        "--no-isolate",
        "-k",
        "per-batch/self",
    ]
    assert "Correct: 1 conforms" in told(capsys, *arguments).out


# Progress


def test_quiet_and_verbose(capsys):
    arguments = ["run", mini("Correct"), *NARROW]
    usual, quiet = told(capsys, *arguments), told(capsys, *arguments, "-q")
    for one in (usual, quiet):
        assert one.out.strip().startswith("=")
        assert not one.err, "a short run needs no line of progress"
    quiet = quiet.out
    assert "Correct: 1 conforms" in quiet
    verbose = told(capsys, *arguments, "-v").out
    assert "mask/per-batch/self:float32:cpu:default] PASSED" in verbose


@pytest.fixture(autouse=True)
def not_silenced(monkeypatch):
    monkeypatch.setattr("conformance.text._silenced", False)


def on_a_terminal(*arguments, **environment):
    """What a command writes to a terminal of 80 columns."""
    keep, give = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("PYTEST")}
    env |= {"COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"} | environment
    command = children.python("-m", "conformance", *map(str, arguments))
    running = subprocess.Popen(command, stdin=give, stdout=give, stderr=give, env=env)
    os.close(give)
    written = b""
    while True:
        try:
            part = os.read(keep, 65536)
        except OSError:
            break
        if not part:
            break
        written += part
    os.close(keep)
    assert running.wait(timeout=300) == ExitCode.OK
    return written.decode()


@pytest.mark.parametrize(
    ("arguments", "environment", "bar", "colour"),
    [
        ([], {}, True, True),
        ([], {"NO_COLOR": "1"}, True, False),
        ([], {"CI": "true"}, False, True),
        (["-q"], {}, False, True),
    ],
    ids=["terminal", "no colour", "CI", "quiet"],
)
def test_a_bar_for_who_looks_on(arguments, environment, bar, colour):
    text = on_a_terminal("run", mini("Correct"), *NARROW, *arguments, **environment)
    assert ("━" in text) == bar
    assert bool(re.search("\x1b\\[[0-9;]*3[0-7]m", text)) == colour
    # What stays is the same for everybody.
    assert "Correct: 1 conforms" in text


def test_a_log_says_now_and_then_what_is_left(capsys, monkeypatch):
    monkeypatch.setattr("conformance.commands.terminal.FIRST", 0.0)
    monkeypatch.setattr("conformance.commands.terminal.NEXT", 0.0)
    monkeypatch.setattr("conformance.text.SOON", 0.0)
    arguments = [
        "run",
        mini("Inverted"),
        "--case",
        "mask/shared",
        "--no-isolate",
        "--dtype",
        "float32",
    ]
    lines = told(capsys, *arguments).err.splitlines()
    total = len(lines) + 1
    assert total > 2, lines
    for number, line in enumerate(lines, 1):
        told_ = rf"{number} of {total} items(, \d+ deviate)?, about \d+ \S+ left"
        assert re.fullmatch(told_, line), line
    assert f"{total - 1} of {total} items, {total - 1} deviate" in lines[-1]
    assert not told(capsys, *arguments, "--quiet").err


def test_what_is_left_is_told_from_what_took_time(monkeypatch):
    now = iter([0.0, *[100.0] * 20])
    monkeypatch.setattr("conformance.text.time.monotonic", lambda: next(now))
    pace = Pace(1_000, free=800)
    assert not pace.left()
    pace.advance(10)
    assert pace.left() == "about 32 min left"
    pace.advance(90)
    assert pace.left() == "about 2 min left"
    pace.advance(99)
    assert pace.left() == "about 5 s left"
    pace.advance()
    assert not pace.left()


def test_no_bar_where_nobody_looks_on(capsys):
    found = told(capsys, "probe", mini("Correct"), "--experiment", "masks")
    assert not found.err


# Completion


def completed(line, tmp_path):
    """What a shell is offered."""
    file = tmp_path / "offers"
    env = {**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE": "1"}
    env["_ARGCOMPLETE_STDOUT_FILENAME"] = str(file)
    subprocess.run([sys.executable, "-m", "conformance"], env=env, check=True, timeout=300)
    return file.read_text().replace("\v", "\n").split()


def test_a_probe_says_what_a_value_hides(capsys):
    pytest.importorskip("torch")
    assert main(["probe", "tutorial-2", "--experiment", "masks"]) == ExitCode.OK
    assert "Where 0 and −inf attend, −inf counts as True" in capsys.readouterr().out
    assert main(["probe", "tutorial-1", "--experiment", "same-mask", "--code"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "no code for this experiment" in printed
    assert "attend, −inf counts as True" not in printed
    assert "Modes" not in printed, "no mode is named"
    assert main(["probe", "torch-mha", "--experiment", "weights"]) == ExitCode.OK
    printed = " ".join(capsys.readouterr().out.split())
    assert "averaged unless average_attn_weights=False" in printed
    assert "sequence-first: without batch_first=True" in printed


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("line", "offers"),
    [
        ("mha-conformance comp", {"compare", "completion"}),
        ("mha-conformance run torch-m", {"torch-mha"}),
        ("mha-conformance explain mask.pol", {"mask.polarity-is-as-declared"}),
        ("mha-conformance new-adapter plain/no-mask/s", set()),
        ("mha-conformance run ours --dtype z", set()),
        ("mha-conformance run ours --dtype b", {"bfloat16"}),
        ("mha-conformance list req", {"requirements"}),
        ("mha-conformance probe ours --exper", {"--experiment"}),
    ],
)
def test_a_shell_is_offered(tmp_path, line, offers):
    assert set(completed(line, tmp_path)) == offers


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_for_the_shell(capsys, shell):
    script = told(capsys, "completion", shell).out
    assert "mha-conformance" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_completion_without_its_package_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    found = told(capsys, "completion", "bash", code=ExitCode.USAGE)
    assert found.err == ("mha-conformance: completion needs argcomplete; pip install argcomplete\n")


# Help


def test_every_command_has_help_that_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    names = re.findall(r"^    (\w[\w-]*)", text, re.MULTILINE)
    assert len(names) >= len(COMMANDS)
    for name in names:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == ExitCode.OK
        assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines()), name


def test_the_version_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert printed == f"mha-conformance {metadata.version('mha-conformance')}\n"


def test_who_lacks_a_package_beside_the_framework_is_not_installed():
    class Correct(miniatures.Correct):
        imports = packages = ()

    assert missing(Correct()) == []
    Correct.imports = ("msgspec.json",)
    Correct.packages = ("msgspec",)
    assert missing(Correct()) == []
    Correct.imports = ("no_such_module.part",)
    assert missing(Correct()) == ["no_such_module"]
    Correct.packages = ("msgspec", "no-such-module", "no-such-distribution")
    assert missing(Correct()) == ["no_such_module", "no-such-distribution"]


def test_the_list_names_what_is_missing_and_not_what_is_there(capsys, monkeypatch):
    own = {"jax-sdpa": [], "bert-eager": ["transformers"], "torch-mha": ["torch"]}
    monkeypatch.setattr(listing, "missing", lambda adapter: own.get(adapter.name, []))
    assert main(["list", "implementations"]) == ExitCode.OK
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows = {name: framework for name, _, framework in lines}
    assert rows["jax-sdpa"] == "jax"
    assert rows["bert-eager"] == "torch (transformers not installed)"
    assert rows["torch-mha"] == "torch (not installed)"
