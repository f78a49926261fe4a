"""Green means verified: whatever a gate did not check, or checked less of than before, is red."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import children
import psutil
import pytest
from mutants import faulty
from records import resealed
from test_cli import mha, mini
from test_gate import Made
from test_gate_command import NARROW, QUICK, here, records  # noqa: F401 - fixtures

from conformance.cli import main
from conformance.errors import BrokenBaseline, BrokenRecord, ExitCode
from conformance.records.record import read
from conformance.reports.gate import tell
from conformance.reports.gate.baseline import baseline_of
from conformance.reports.gate.judging import judge
from conformance.running.merging import earlier

FAULTY = faulty.__file__

HEAD = """
import os, sys
sys.path.insert(0, {tests!r})
from mutants.miniatures import Correct
"""


@pytest.fixture
def implementation(tmp_path):
    """A function that writes an implementation that differs from a correct one by its body."""

    def write(body, name="Mine"):
        tests = os.path.dirname(os.path.abspath(__file__))
        lines = [f"class {name}(Correct):", *("    " + line for line in body.splitlines())]
        text = HEAD.format(tests=tests) + "\n".join(lines) + "\n"
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        return f"mine.py:{name}"

    return write


def one_line(done):
    (line,) = done.stderr.strip().splitlines()
    return line


# Something that was named is not judged


@pytest.mark.parametrize("option", ["--from-record", "--baseline", "--record"])
@pytest.mark.parametrize("command", [("gate",), ("baseline", "update")])
def test_an_option_that_names_one_file_is_given_once(here, command, option):  # noqa: F811
    printed = here(*command, "x", option, "a.json", option, "b.json", expect=ExitCode.USAGE)
    assert f"{option} is given twice" in printed.err


# Nothing was run


@pytest.mark.sample(3)
@pytest.mark.parametrize("option", ["--collect-only", "--version", "--markers", "--fixtures"])
@pytest.mark.parametrize("command", ["run", "gate"])
def test_options_by_which_pytest_runs_nothing(tmp_path, command, option):
    done = mha(command, mini("Correct"), *QUICK, option, cwd=tmp_path)
    assert ExitCode(done.returncode) == ExitCode.NOTHING_VERIFIED, done.stdout + done.stderr
    assert "nothing was" in done.stdout + done.stderr or "nothing run" in done.stdout


@pytest.mark.parametrize("option", ["--collect-only", "--markers", "--setup-plan"])
def test_variables_by_which_pytest_runs_nothing(tmp_path, option):
    arguments = ["gate", mini("Correct"), *QUICK]
    done = _mha_with_pytest_variables(*arguments, cwd=tmp_path, PYTEST_ADDOPTS=option)
    assert ExitCode(done.returncode) == ExitCode.NOTHING_VERIFIED, done.stdout + done.stderr
    assert "nothing was" in done.stdout + done.stderr


def _mha_with_pytest_variables(*arguments, cwd, **variables):
    env = os.environ | variables
    env.pop("PYTEST_CURRENT_TEST", None)
    return subprocess.run(
        children.python("-m", "conformance", *map(str, arguments)),
        capture_output=True, text=True, timeout=300, cwd=cwd, check=False, env=env,
    )  # fmt: skip


def test_deselecting_is_narrowing(tmp_path):
    node = (
        "running/test_conformance.py::test_conforms[Correct:mask/shared/self:float32:cpu:default]"
    )
    options = ("--no-isolate", "--case", "mask/shared/self", "--case", "plain/no-mask/self")
    options += ("--dtype", "float32")
    told = mha("gate", mini("Correct"), *options, "--deselect", node, cwd=tmp_path).stdout
    assert "--deselect" in told
    assert "narrowed by" in told


def test_plugins_need_not_load_by_themselves(tmp_path):
    arguments = ["run", mini("Correct"), *QUICK]
    done = _mha_with_pytest_variables(*arguments, cwd=tmp_path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    assert "2 conforms" in done.stdout


@pytest.mark.sample(2)
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("command", ["run", "gate"])
def test_an_implementation_that_leaves_the_process_is_an_error(
    tmp_path, implementation, command, code
):
    # What comes after it is never reached, whatever it would return.
    body = f"    os._exit({code})\n    return super().attend(*given, **options)"
    spec = implementation(f"def attend(self, *given, **options):\n{body}")
    done = mha(command, spec, *QUICK, cwd=tmp_path)
    expected = ExitCode.NOTHING_VERIFIED if command == "run" else ExitCode.DEVIATES
    assert ExitCode(done.returncode) == expected, done.stdout + done.stderr
    assert "error" in done.stdout


LEAVING = """
import ctypes, signal

libc = ctypes.CDLL(None)

class Native(Correct):
    def attend(self, *given, **options):
        libc._exit(0)

class Forked(Correct):
    def attend(self, *given, **options):
        if os.fork():
            libc._exit(0)
        return super().attend(*given, **options)

class Exec(Correct):
    def attend(self, *given, **options):
        os.execv(sys.executable, [sys.executable, "-c", ""])

class Group(Correct):
    def attend(self, *given, **options):
        os.killpg(0, signal.SIGKILL)

class Everything(Correct):
    def attend(self, *given, **options):
        os.closerange(3, 256)
        return super().attend(*given, **options)

class Stdout(Correct):
    def attend(self, *given, **options):
        try:
            os.close(1)
        except OSError:
            pass
        return super().attend(*given, **options)

class Children(Correct):
    def attend(self, *given, **options):
        if os.fork() == 0:
            os._exit(0)
        return super().attend(*given, **options)
"""


@pytest.mark.sample(4)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a command is watched where it can be forked")
@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("Native", ExitCode.INCOMPLETE, "ended with exit code 0 before the command did"),
        ("Forked", ExitCode.INCOMPLETE, "ended with exit code 0 before the command did"),
        ("Exec", ExitCode.INCOMPLETE, "ended with exit code 0 before the command did"),
        ("Everything", ExitCode.INCOMPLETE, "before the command did"),
        ("Stdout", ExitCode.INCOMPLETE, "standard output is closed"),
        ("Group", -9, ""),
        ("Children", ExitCode.OK, ""),
    ],
)
def test_a_gate_is_not_green_if_its_process_is_ended(tmp_path, name, code, told):
    """Whatever C code does to the process of the run: no code in that process sees it."""
    tests = os.path.dirname(os.path.abspath(__file__))
    (tmp_path / "mine.py").write_text(HEAD.format(tests=tests) + LEAVING, encoding="utf-8")
    options = ["--no-isolate", *NARROW, "--dtype", "float32", "--record", "r.json"]
    done = subprocess.run(
        children.python("-m", "conformance", "gate", f"mine.py:{name}", *options),
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert told in done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_watched_command_gets_signals_and_ends_with_its_parent(tmp_path, number, code):
    command = [sys.executable, "-m", "conformance", "run", f"{FAULTY}:Slow", "--no-isolate"]
    command += ["--record", "r.json"]
    journal = tmp_path / "r.json.journal"
    told = tmp_path / "told.txt"
    with (
        told.open("wb") as file,
        subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file) as process,
    ):
        until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 3)
        (child,) = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(300) == code, told.read_text()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def until(true, seconds=300):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupt_whose_traceback_cannot_be_drawn_is_one_all_the_same(tmp_path, monkeypatch):
    """pytest calculates with the number of a line, which CPython may not have for a new frame."""

    def drawn(self, excinfo):
        raise TypeError

    monkeypatch.setattr("_pytest.terminal.TerminalReporter.pytest_keyboard_interrupt", drawn)
    command = ["run", f"{FAULTY}:Interrupts", "--no-isolate", "--case", "mask/per-head/self"]
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--record", "r.json"]) == ExitCode.INTERRUPTED
    assert not read(tmp_path / "r.narrowed.json").complete


def test_an_implementation_that_leaves_while_it_is_imported_is_one_line(tmp_path, implementation):
    spec = implementation("os._exit(0)")
    done = mha("gate", spec, *QUICK, cwd=tmp_path)
    assert done.returncode not in (ExitCode.OK, ExitCode.DEVIATES)
    assert "SystemExit" in one_line(done)


# A record that is not what it says


@pytest.fixture
def edited(records, tmp_path):  # noqa: F811
    """A function that judges a record of a correct implementation after an edit."""

    def run(edit, here, expect):  # noqa: F811
        document = json.loads(records["Correct"].read_text())
        edit(document)
        (tmp_path / "edited.json").write_text(resealed(document))
        return here("gate", "--from-record", "edited.json", expect=expect)

    return run


def _twice(document):
    document["results"] += document["results"][:1] * 2
    document["header"]["planned"] += 2


def _other_suite(document):
    document["header"]["provenance"]["suite"] = "99.0"


def _other_catalogue(document):
    document["header"]["provenance"]["catalogue"] = "0" * 12


def _other_question(document):
    case = next(iter(document["header"]["cases"].values()))
    case["hash"] = "0" * 12


def _unknown_case(document):
    document["results"][0]["case"] = "plain/easy/self"


def _stranger(document):
    document["results"][0]["implementation"] = "Somebody"


def _endless(document):
    document["header"]["planned"] = 10**18


def _more_than_planned(document):
    document["header"]["planned"] = 1


def _nobody(document):
    document["header"]["implementations"] *= 2


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_twice, "3 times"),
        (_other_suite, "suite 99.0"),
        (_other_catalogue, "other cases"),
        (_other_question, "another question"),
        (_unknown_case, "plain/easy/self"),
        (_stranger, "Somebody"),
        (_endless, "planned"),
        (_more_than_planned, "planned"),
        (_nobody, "Correct"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_record_that_contradicts_itself_or_this_suite_is_one_line(edited, here, edit, told):  # noqa: F811
    (line,) = edited(edit, here, ExitCode.USAGE).err.strip().splitlines()
    assert told in line


def _flipped(document):
    for result in document["results"]:
        for finding in result["findings"]:
            finding["verdict"] = "conforms"


def _dropped(document):
    del document["results"][0]["findings"][0]


def _copied(document):
    first, second = document["results"][:2]
    first["findings"] = second["findings"]


def _fewer(document):
    del document["results"][-1]
    document["header"]["planned"] -= 1


def _other_code(document):
    document["header"]["provenance"]["code"] = "0" * 16


def _other_check(document):
    document["header"]["revisions"]["output.equals-definition"] = "1-" + "0" * 16


@pytest.mark.parametrize(
    "edit", [_flipped, _dropped, _copied, _fewer, _other_code, _other_check, _other_suite]
)
def test_an_edited_record_is_neither_judged_nor_told(records, tmp_path, here, edit):  # noqa: F811
    document = json.loads(records["Inverted"].read_text())
    edit(document)
    (tmp_path / "edited.json").write_text(json.dumps(document))
    (line,) = here("gate", "--from-record", "edited.json", expect=ExitCode.USAGE).err.splitlines()
    assert "edited.json: is not as it was written" in line
    told = here("report", "edited.json", expect=ExitCode.NOTHING_VERIFIED)
    assert "edited.json: is not as it was written" in told.out
    known = earlier([tmp_path / "edited.json"], read(records["Inverted"]).header, [], {})
    assert "is not as it was written" in known.problems[0]


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (_flipped, "with an error above its limit"),
        (_other_code, "made by other code of the suite"),
        (_other_check, "made by other code of the suite"),
    ],
)
def test_what_a_record_says_against_itself_is_refused_with_any_seal(
    records,  # noqa: F811
    tmp_path,
    here,  # noqa: F811
    edit,
    told,
):
    document = json.loads(records["Inverted"].read_text())
    edit(document)
    (tmp_path / "edited.json").write_text(resealed(document))
    (line,) = here("gate", "--from-record", "edited.json", expect=ExitCode.USAGE).err.splitlines()
    assert told in line


def test_a_record_without_a_seal_is_told_and_not_judged(records, tmp_path, here):  # noqa: F811
    document = json.loads(records["Correct"].read_text())
    del document["seal"], document["exchange"], document["digest"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    (line,) = here("gate", "--from-record", "old.json", expect=ExitCode.USAGE).err.splitlines()
    assert "old.json: has no seal" in line
    told = here("report", "old.json", "--html", "r.html", expect=ExitCode.OK).out
    assert "without a seal, so edits would not be noticed: old.json" in told
    known = earlier([tmp_path / "old.json"], read(records["Correct"]).header, [], {})
    assert "has no seal" in known.problems[0]


def test_an_incomplete_record_is_incomplete_whatever_its_plan_says(edited, here):  # noqa: F811
    def edit(document):
        document["complete"] = False
        del document["results"][-1]
        document["header"]["planned"] = len(document["results"])

    assert "not verified" in edited(edit, here, ExitCode.INCOMPLETE).out


def test_a_record_whose_next_run_did_not_finish_is_not_judged(edited, here, tmp_path):  # noqa: F811
    (tmp_path / "edited.json.journal").write_text("")
    assert "did not finish" in edited(lambda document: None, here, ExitCode.USAGE).err


FULL = ("--no-isolate", "--from-record", "r.json")

UNDER_NO_GRAD = """
import torch
from conformance import attention_function

@attention_function("torch", dtypes=("float32",))
def mine(query, key, value):
    {guard}:
        weights = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1)
        return weights @ value
"""


def test_a_forward_pass_without_gradients_deviates(tmp_path):
    pytest.importorskip("torch")
    text = UNDER_NO_GRAD.format(guard="with torch.no_grad()")
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    arguments = ["gate", "mine.py:mine", "--no-isolate", "--case", "plain/no-mask/self"]
    done = mha(*arguments, cwd=tmp_path, expect=ExitCode.DEVIATES)
    assert "gradient.inputs-equal-definition" in done.stdout
    declared = text.replace('("float32",)', '("float32",), differentiable=False')
    (tmp_path / "mine.py").write_text(declared, encoding="utf-8")
    mha(*arguments, cwd=tmp_path, expect=ExitCode.OK)


# Whatever an implementation does, each item has a verdict and a reason

ODD = """
import numpy as np
from conformance import Adapter, Answer

class Surrogates(Correct):
    def attend(self, *given, **options):
        raise ValueError("half a pair: \\udcff")

class Refuses(Correct):
    def attend(self, *given, **options):
        from conformance import Unsupported
        raise Unsupported("half a pair: \\udcff")

class Mute(Correct):
    def attend(self, *given, **options):
        class Silent(Exception):
            def __str__(self):
                raise RuntimeError("no text")
        raise Silent

class Forks(Correct):
    def attend(self, *given, **options):
        os.fork()
        return super().attend(*given, **options)

class Raw(Adapter):
    differentiable = False
    def run(self, problem, call):
        return self.answer(problem.cotangent.shape)

class NoAnswer(Raw):
    def answer(self, shape): return None

class Objects(Raw):
    def answer(self, shape): return Answer(np.full(shape, None, object))

class Complex(Raw):
    def answer(self, shape): return Answer(np.zeros(shape, complex))

class NoMapping(Raw):
    def answer(self, shape): return Answer(np.zeros(shape), gradients=None, dtypes=None)
"""


@pytest.mark.sample(5)
@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
@pytest.mark.parametrize(
    ("name", "verdict", "told"),
    [
        ("Surrogates", "error", r"ValueError: half a pair: \udcff"),
        ("Refuses", "unsupported", r"half a pair: \udcff"),
        ("Mute", "error", "Silent: its text cannot be read: RuntimeError"),
        ("Forks", "conforms", ""),
        ("NoAnswer", "error", "returned NoneType, not an Answer"),
        ("Objects", "error", "output is of object"),
        ("Complex", "error", "output is of complex128"),
        ("NoMapping", "error", "no mapping"),
    ],
)
def test_whatever_comes_back_has_a_verdict_and_a_reason(tmp_path, name, verdict, told, isolate):
    tests = os.path.dirname(os.path.abspath(__file__))
    (tmp_path / "odd.py").write_text(HEAD.format(tests=tests) + ODD, encoding="utf-8")
    options = [isolate, *NARROW, "--record", "r.json"]
    python = children.anew if name == "Forks" else children.python
    mha("run", f"odd.py:{name}", *options, cwd=tmp_path, python=python)
    results = read(tmp_path / "r.narrowed.json").results
    assert len(results) == 2
    for result in results:
        wanted = {"unsupported"} if name == "Refuses" else {verdict}
        if name == "Forks":
            # Frameworks seed their generators anew in a child; this is a deviation of another kind.
            wanted |= {"deviates"}
        assert result.verdict in wanted
        if told:
            assert any(told in finding.detail for finding in result.findings), result


@pytest.mark.parametrize("attribute", ["dtypes", "modes"])
def test_a_declaration_of_nothing_is_one_line(tmp_path, implementation, attribute):
    done = mha("run", implementation(f"{attribute} = ()"), *QUICK, cwd=tmp_path, expect=2)
    assert "there must be a" in one_line(done)


@pytest.mark.night
@pytest.mark.parametrize("isolate", ["--isolate", "--no-isolate"])
def test_a_full_disk_leaves_what_was_measured(tmp_path, isolate):
    """A file that may not grow is a disk that is full."""
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    options = [mini("Correct"), isolate, "--dtype", "float32", "--case", "mask"]
    done = subprocess.run(
        [sys.executable, "-m", "conformance", "run", *options, "--record", "r.json"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, check=False, preexec_fn=limit,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
        | {"MHA_CONFORMANCE_CACHE": "off"},
    )  # fmt: skip
    told = done.stdout + done.stderr
    assert done.returncode == ExitCode.INCOMPLETE, told
    assert "Traceback" not in told
    assert "INTERNALERROR" not in told
    assert "cannot be written" in told
    kept = read(tmp_path / "r.narrowed.json.journal")
    assert kept.results


# Files that are none


@pytest.mark.parametrize("kind", ["fifo", "endless", "socket"])
@pytest.mark.parametrize("option", ["--from-record", "--baseline"])
def test_what_is_no_regular_file_is_one_line(tmp_path, here, kind, option):  # noqa: F811
    path = tmp_path / "strange.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            os.chdir(tmp_path)
            server.bind(path.name)
    more = [] if option == "--from-record" else [mini("Correct"), *NARROW]
    printed = here("gate", *more, option, path, expect=ExitCode.USAGE).err
    assert len(printed.strip().splitlines()) == 1
    assert "no regular file" in printed


@pytest.mark.parametrize(
    "text",
    [
        ".".join("a" * 100_000) + " = 1",
        "[" + ".".join("a" * 100_000) + "]",
        "[[known]]\narguments = {" + " . ".join(["'b'"] * 40_000) + " = 1}",
        '[[known]]\ncase = "*"\nverdict = "deviates"\nreason = "x"\nwithin = ' + "9" * 401,
        '[[known]]\ncase = "*"\nverdict = "deviates"\nreason = "x"\nwithin = ' + "9" * 5000,
        '[[known]]\ncase = "*"\nverdict = "deviates"\nreason = "x"\nwithin = nan',
        "known = " + "[" * 20_000,
    ],
    ids=["key", "table", "inline", "401", "5000", "nan", "deep"],
)
def test_a_hostile_baseline_is_one_line(tmp_path, text):
    with pytest.raises(BrokenBaseline) as raised:
        baseline_of(tmp_path / "b.toml", text)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("digits", [401, 5000])
def test_a_number_without_end_in_a_record_is_one_line(tmp_path, records, digits):  # noqa: F811
    document = json.loads(records["Correct"].read_text())
    document["header"]["planned"] = 0
    text = json.dumps(document).replace('"planned": 0', '"planned": ' + "9" * digits)
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(BrokenRecord) as raised:
        read(tmp_path / "r.json")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_name_with_a_newline_is_no_command_of_a_workflow(edited, here):  # noqa: F811
    def edit(document):
        name = "x\n::error::owned"
        document["header"]["implementations"][0]["name"] = name
        for result in document["results"]:
            result["implementation"] = name

    printed = edited(edit, here, ExitCode.USAGE)
    assert not re.search(r"^::", printed.out + printed.err, re.MULTILINE)


@pytest.mark.parametrize("end", ["\\n", "\\r", "\\u2028"])
def test_a_pattern_with_a_newline_is_no_command_of_a_workflow(tmp_path, end):
    entry = f'[[known]]\ncase = "mask/{end}::error::owned"\nverdict = "deviates"\nreason = "x"\n'
    baseline = baseline_of(tmp_path / "b.toml", entry)
    (only,) = baseline.entries
    assert only.place.splitlines() == [only.place]
    assert not re.search(r"^::", str(tell(judge(baseline, Made().record()))), re.MULTILINE)
