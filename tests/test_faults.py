"""Whatever an implementation does to its process, each item has a verdict with its reason.

Every fault is real: a process dies, hangs or eats memory.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import children
import filelock
import msgspec
import psutil
import pytest

from conformance.errors import ExitCode
from conformance.records.record import journal_path, read, read_arrays, read_journal

FAULTY = Path(__file__).with_name("mutants") / "faulty.py"
BEFORE, FAULT, AFTER = "plain/no-mask/self", "mask/per-batch/self", "logits/large/self"
THREE = ("--dtype", "float32", "--case", BEFORE, "--case", FAULT, "--case", AFTER)
LIMITS = ("--item-timeout", 3, "--memory-limit", 400)

FAULTS = {
    "Raises": ("error", r"ValueError: not today \(at faulty\.py:\d+\)"),
    "Interrupts": ("error", r"KeyboardInterrupt: by itself"),
    "RaisesBase": ("error", r"OwnExit: out of line.*"),
    "SysExit": ("error", r"SystemExit: 3 \(at faulty\.py:\d+\)"),
    "OsExit": (
        "crashed",
        "the process ended with exit code 0; it printed last: about to leave",
    ),
    "Segfault": ("crashed", r"the process died with SIGSEGV \(at faulty\.py:\d+\)"),
    "Abort": (
        "crashed",
        r"the process died with SIGABRT \(at faulty\.py:\d+\); it printed last: "
        r"terminate called after throwing an instance of 'std::bad_alloc'",
    ),
    "KilledFromOutside": ("crashed", "the process died with SIGKILL"),
    "Sleeps": (
        "timed-out",
        r"no answer within 3 s; the process was killed \(at faulty\.py:\d+\); "
        "it printed last: waiting for a lock",
    ),
    "HangsInC": (
        "timed-out",
        r"no answer within 3 s; the process was killed \(at faulty\.py:\d+\)",
    ),
    "IgnoresSignals": (
        "timed-out",
        r"no answer within 3 s; the process was killed \(at faulty\.py:\d+\)",
    ),
    "PrintsForever": ("timed-out", r"no answer within 3 s; the process was killed.*"),
    "EatsMemory": ("crashed", "used more than 400 MiB; the process was killed"),
    "EatsMemoryElsewhere": ("crashed", "used more than 400 MiB; the process was killed"),
    "LeavesSomebodyBehind": (
        "crashed",
        r"the process ended with exit code 5; it printed last: started \d+",
    ),
    "ReturnsNone": ("error", "returned NoneType, not an array of numpy"),
    "ReturnsText": ("error", "returned str, not an array of numpy"),
    "WrongShape": ("error", "what it returned, .* has shape .*, wanted .*"),
    "ForeignArray": ("error", "returned Foreign, not an array of numpy"),
    "WrongDtype": ("deviates", "inputs are float32, but output is float64"),
    "ExplainedSlowly": ("deviates", "the output is not the definition's"),
    "NotANumber": ("deviates", "the output is not the definition's"),
}
"""Verdict of the item with the fault, and its reason."""


def faulty(name):
    return f"{FAULTY}:{name}"


def command(*arguments, python=children.anew):
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return {
        "args": python("-m", "conformance", "run", *map(str, arguments)),
        "env": env | {"NO_COLOR": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        "text": True,
    }


def run(folder, *arguments, expect=None):
    """Run to the end; whatever happens, no traceback of ours."""
    done = subprocess.run(
        **command(*arguments, python=children.python_alone),
        cwd=folder,
        capture_output=True,
        timeout=600,
        check=False,
    )
    told = done.stdout + done.stderr
    assert "INTERNALERROR" not in told, told
    assert "Traceback (most" not in told, told
    if expect is not None:
        assert done.returncode == expect, told
    return done


def verdicts(record, name):
    return {
        result.case: result.verdict for result in record.results if result.implementation == name
    }


def reasons(record, name, case=FAULT):
    (result,) = (r for r in record.results if (r.implementation, r.case) == (name, case))
    gravest = [finding for finding in result.findings if finding.verdict == result.verdict]
    return [finding.detail for finding in gravest]


def processes(mark):
    """Processes of runs with this mark in their environment."""
    found = []
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("FAULTS_RUN") == str(mark):
            found.append(process)
    return found


# Each fault takes one item, and nothing else


USED = {"OsExit", "Sleeps", "PrintsForever", "LeavesSomebodyBehind"}
"""Those that other tests look at."""


def _is_of_fault(item):
    return (
        item.originalname == test_a_fault_is_the_verdict_of_its_item_and_the_others_go_on.__name__
    )


@pytest.fixture(scope="module")
def faults(request, tmp_path_factory):
    """(record, what was printed) of one run of those that are asked for, and one that is fine."""
    folder = tmp_path_factory.getbasetemp()
    # Processes of pytest-xdist have folders beside each other, and one of them runs it.
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "faults"
    asked = {item.callspec.params["name"] for item in request.session.items if _is_of_fault(item)}
    faults = [name for name in FAULTS if name in asked | USED]
    names = [faulty(name) for name in ("Fine", *faults, "Prints")]
    with filelock.FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            options = (*THREE, *LIMITS, "--record", "r.json")
            done = run(folder, *names, *options, expect=ExitCode.INCOMPLETE)
            (folder / "printed.txt").write_text(done.stdout, encoding="utf-8")
    return read(folder / "r.narrowed.json"), (folder / "printed.txt").read_text(encoding="utf-8")


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_the_verdict_of_its_item_and_the_others_go_on(faults, name):
    record, printed = faults
    verdict, reason = FAULTS[name]
    assert verdicts(record, name) == {BEFORE: "conforms", FAULT: verdict, AFTER: "conforms"}
    assert any(re.fullmatch(reason, told) for told in reasons(record, name)), reasons(record, name)
    if verdict in ("crashed", "timed-out"):
        assert f"not verified, 1 item: {reasons(record, name)[0]}" in printed


def test_the_record_is_complete_and_valid(faults):
    record, printed = faults
    assert record.complete
    assert record.header.planned == len(record.results) == 3 * len(record.header.implementations)
    assert len(record.header.implementations) >= 2 + len(USED)
    assert set(verdicts(record, "Fine").values()) == {"conforms"}
    again = msgspec.json.decode(msgspec.json.encode(record), type=type(record))
    assert again == record
    assert "Fine: 3 conforms" in printed


def test_what_it_prints_goes_nowhere(faults):
    record, printed = faults
    assert set(verdicts(record, "Prints").values()) == {"conforms"}
    # A deviation that is told in full speaks of noise, too.
    for told in ("noise", "descriptor", "other\n", "\x1b"):
        assert told not in printed.replace("rounding noise.", "").replace(", noise σ ", "")
    for name in ("OsExit", "Sleeps", "PrintsForever"):
        assert "xxxx" not in str(reasons(record, name))[300:]


def test_what_it_prints_does_not_break_the_json_of_probe(tmp_path):
    arguments = ["probe", faulty("Prints"), "--json", "--experiment", "masks"]
    options = command() | {"args": [sys.executable, "-m", "conformance", *arguments]}
    done = subprocess.run(**options, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert done.returncode == ExitCode.OK
    (result,) = msgspec.json.decode(done.stdout)
    assert result["case"] == "probe/masks"
    assert "straight to the descriptor" in done.stderr
    assert "noise" in done.stderr


def test_who_started_a_process_leaves_none_behind(faults):
    record, _ = faults
    (told,) = reasons(record, "LeavesSomebodyBehind")
    other = int(told.rpartition(" ")[2])
    assert not psutil.pid_exists(other) or psutil.Process(other).status() == psutil.STATUS_ZOMBIE


def test_a_crash_told_in_full(tmp_path):
    arguments = ["--dtype", "float32", "--case", FAULT, "--strict"]
    done = run(tmp_path, faulty("OsExit"), *arguments, expect=ExitCode.DEVIATES)
    assert "crashed: run\n" in done.stdout
    assert "crashed: the process ended with exit code 0; it printed last" in done.stdout
    assert "again: mha-conformance run " in done.stdout


def test_losses_in_a_row_come_to_an_end(tmp_path):
    arguments = ["--dtype", "float32", "--case", "mask/*", "--record", "r.json"]
    run(tmp_path, faulty("OsExit"), *arguments, expect=ExitCode.NOTHING_VERIFIED)
    record = read(tmp_path / "r.narrowed.json")
    found = [result for result in record.results if result.verdict != "unsupported"]
    assert sum(result.verdict == "crashed" for result in found) == 10
    left = [result for result in found if result.verdict != "crashed"]
    rest = {(f.verdict, f.detail) for result in left for f in result.findings}
    assert rest <= {("not-run", "not asked: its process was lost at 10 items in a row")}
    assert rest
    assert record.complete


# What belongs to everybody


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Draws", ["Python's random generator changed", "NumPy's random generator changed"]),
        ("Reseeds", ["Python's random generator changed", "NumPy's random generator changed"]),
        (
            "Rearranges",
            ["NumPy's error handling: ", "the environment changed", "the current directory: "],
        ),
    ],
)
@pytest.mark.parametrize("option", ["--isolate", "--no-isolate"])
def test_who_changes_what_belongs_to_everybody_is_told_and_stays_alone(
    tmp_path, name, changed, option
):
    arguments = [faulty(name), faulty("Fine"), "--case", "mask/key-padding/cross", option]
    arguments += ["--case", AFTER, "--dtype", "float32", "--record", "r.json"]
    run(tmp_path, *arguments, expect=ExitCode.OK)
    record = read(tmp_path / "r.narrowed.json")
    found = {
        finding.requirement: finding.detail
        for result in record.results
        for finding in result.findings
        if result.implementation == name and finding.verdict == "deviates"
    }
    assert list(found) == ["call.leaves-global-state-alone"]
    told = found["call.leaves-global-state-alone"]
    assert all(part in told for part in changed), told
    assert set(verdicts(record, "Fine").values()) == {"conforms"}


def test_generators_settings_and_environment_are_put_back(monkeypatch):
    from mutants import faulty as doubles

    from conformance.cases.catalogue import find_cases
    from conformance.frameworks.base import PROCESS, look
    from conformance.running.session import Session, plan

    monkeypatch.setenv("FAULTY_BEFORE", "1")
    before = look(PROCESS)
    cases = [*find_cases("mask/key-padding/cross"), *find_cases("mask/shared/self")]
    for kind in (doubles.Draws, doubles.Reseeds, doubles.Rearranges):
        adapter = kind()
        adapter.name = kind.__name__
        for item in plan([adapter], cases, ["float32"], "cpu"):
            Session().examine(item)
            assert look(PROCESS) == before


TESTS = Path(__file__).parent

REPLACES = """
import os, sys
sys.path.insert(0, {tests!r})
import numpy as np
from mutants.miniatures import Correct, Inverted

_exp = np.exp

def coarse(x, *given, **options):
    return _exp(np.multiply(1.001, x), *given, **options)

def nothing(*_, **__):
    return 0

class OnImport(Correct):
    pass

class InItsCall(Inverted):
    def attend(self, *given, **options):
        np.{name} = {by}
        return super().attend(*given, **options)

if {now}:
    np.{name} = {by}
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize("option", ["--isolate", "--no-isolate"])
@pytest.mark.parametrize(
    ("name", "by", "now"),
    [("exp", "coarse", True), ("abs", "nothing", False), ("linalg.norm", "nothing", False)],
)
def test_who_replaces_functions_of_numpy_is_not_verified_and_spoils_nothing(
    tmp_path, monkeypatch, name, by, now, option
):
    """Expectations are computed in its process, and kept for everybody."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("MHA_CONFORMANCE_CACHE", str(cache))
    text = REPLACES.format(tests=str(TESTS), name=name, by=by, now=now)
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    spec = "mine.py:OnImport" if now else "mine.py:InItsCall"
    asked = ("--case", "logits/large-with-mask/cross", "--dtype", "float32")
    told = run(tmp_path, spec, *asked, option, expect=ExitCode.NOTHING_VERIFIED).stdout
    assert f"numpy.{name} was replaced in its process, so nothing can be verified there" in told
    spoilt = {path.name: path.read_bytes() for path in cache.glob("*")}
    # What was kept meanwhile is what is computed without it.
    for path in cache.glob("*"):
        path.unlink()
    run(tmp_path, faulty("Fine"), *asked, expect=ExitCode.OK)
    kept = {path.name: path.read_bytes() for path in cache.glob("*")}
    assert kept
    # Causes are sought with other problems.
    assert [name for name in spoilt.keys() & kept.keys() if spoilt[name] != kept[name]] == []


@pytest.mark.parametrize("option", ["--isolate", "--no-isolate"])
def test_errors_of_numpy_that_a_module_raises_are_not_those_of_the_suite(tmp_path, option):
    text = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport numpy as np\n"
    text += "from mutants.miniatures import Correct\nnp.seterr(all='raise')\n"
    text += "class Mine(Correct): pass\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    asked = ("--case", "logits/large-with-mask/cross", "--dtype", "float16")
    assert "1 conforms" in run(tmp_path, "mine.py:Mine", *asked, option).stdout


# Faults of the file itself


IMPORTS = {
    "raises": ("raise RuntimeError('a broken file')", "unavailable", "a broken file"),
    "exits": ("import sys; sys.exit(4)", "unavailable", "does not import: SystemExit: 4"),
    "interrupts": ("raise KeyboardInterrupt", "unavailable", "does not import: KeyboardInterrupt"),
    "needs": ("import nothing_that_is_there", "unavailable", "which is not installed"),
    "dies": (
        "import ctypes\nctypes.string_at(0)",
        "crashed",
        "the process died with SIGSEGV (at dies.py:2)",
    ),
    "leaves": ("import os; os._exit(0)", "crashed", "the process ended with exit code 0"),
    "hangs": (
        "print('downloading')\nimport time\ntime.sleep(600)",
        "timed-out",
        "no answer to its import within 10 s; the process was killed (at hangs.py:3); "
        "it printed last: downloading",
    ),
    "fails": (
        "from mutants.miniatures import Correct\nclass A(Correct):\n    def __init__(self): 1 / 0",
        "unavailable",
        "A() fails: ZeroDivisionError: division by zero",
    ),
}
"""A file, the verdict of every item, and its reason."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("workers", [("-n", 2), ()], ids=["xdist", "alone"])
def test_a_file_that_does_not_import(tmp_path, workers):
    for name, (text, _, _) in IMPORTS.items():
        text = text.replace(
            "from mutants.miniatures",
            f"import sys\nsys.path.insert(0, {str(FAULTY.parents[1])!r})\nfrom mutants.miniatures",
        )
        (tmp_path / f"{name}.py").write_text(text)
    chosen = list(IMPORTS) if not workers else ["raises", "dies"]
    specs = [f"{name}.py:A{name}" if name != "fails" else "fails.py:A" for name in chosen]
    arguments = [*THREE, "--start-timeout", 10, "--record", "r.json", *workers]
    run(tmp_path, *specs, faulty("Fine"), *arguments, expect=ExitCode.INCOMPLETE)
    record = read(tmp_path / "r.narrowed.json")
    assert record.complete
    for name in chosen:
        _, verdict, reason = IMPORTS[name]
        own = f"A{name}" if name != "fails" else "A"
        assert verdicts(record, own) == dict.fromkeys((BEFORE, FAULT, AFTER), verdict)
        assert all(reason in told for told in reasons(record, own))
        (told,) = (i for i in record.header.implementations if i.name == own)
        assert reason in told.unavailable
    assert set(verdicts(record, "Fine").values()) == {"conforms"}


def test_a_name_that_is_wrong_is_still_one_line(tmp_path):
    done = run(tmp_path, faulty("Fine"), faulty("Nobody"), *THREE, expect=ExitCode.USAGE)
    (line,) = done.stderr.splitlines()
    assert "has no 'Nobody'" in line
    assert done.stdout == ""


# Who is isolated


@pytest.mark.parametrize(
    ("options", "alone"),
    [([], True), (["--isolate"], True), (["--no-isolate"], False), (["--pdb"], False)],
)
def test_a_path_has_a_process_of_its_own_unless_somebody_says_no(tmp_path, options, alone):
    (tmp_path / "mine.py").write_text(
        f"import os, sys\nsys.path.insert(0, {str(FAULTY.parents[1])!r})\n"
        "from mutants.miniatures import Correct\n"
        "class A(Correct):\n    def attend(self, *args, **options):\n"
        "        open('who', 'w').write(f'{os.getpid()} {os.getsid(0)}')\n"
        "        return super().attend(*args, **options)\n"
    )
    run(tmp_path, "mine.py:A", "--dtype", "float32", "--case", BEFORE, *options, expect=ExitCode.OK)
    process, session = (tmp_path / "who").read_text().split()
    assert (process == session) == alone


SERVED = """
import os, sys, threading
from multiprocessing import get_context
sys.path.insert(0, {tests!r})
from mutants.miniatures import Correct

with open("server.txt", "w") as file:
    print("pytest" in sys.modules, open(f"/proc/{{os.getppid()}}/cmdline").read(), file=file)

def another():
    for method in ("forkserver", "spawn"):
        process = get_context(method).Process(target=abs, args=(1,))
        process.start()
        process.join()
        with open("server.txt", "a") as file:
            print(process.exitcode, file=file)

if __name__ != "__mp_main__":
    thread = threading.Thread(target=another)
    thread.start()
    thread.join()

class Mine(Correct):
    pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a server is started as usual")
def test_the_server_of_a_command_is_a_fork_that_has_imported_the_suite_only(tmp_path):
    (tmp_path / "mine.py").write_text(SERVED.format(tests=str(TESTS)), encoding="utf-8")
    options = command("mine.py:Mine", "--case", BEFORE, "--dtype", "float32", "--record", "r.json")
    subprocess.run(**options, cwd=tmp_path, timeout=600, check=True)
    assert set(verdicts(read(tmp_path / "r.narrowed.json"), "Mine").values()) == {"conforms"}
    told, *codes = (tmp_path / "server.txt").read_text().splitlines()
    imported, _, line = told.partition(" ")
    assert imported == "False"
    assert "conformance\0run" in line
    # It may itself start processes in both ways.
    assert codes == ["0", "0"]


def test_who_is_not_isolated_pays_nothing(tmp_path):
    code = (
        "import sys\nfrom conformance.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "own = ('conformance.running.isolation', 'psutil')\n"
        "found = {n for n in sys.modules if n.startswith(own)}\n"
        "assert not found, found\n"
    )
    arguments = [faulty("Fine"), "--no-isolate", *THREE]
    options = command() | {"args": [sys.executable, "-c", code, "run", *map(str, arguments)]}
    done = subprocess.run(**options, cwd=tmp_path, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.night
@pytest.mark.parametrize("workers", [(), ("-n", 2)], ids=["alone", "xdist"])
def test_isolated_or_not_the_record_is_the_same(tmp_path, workers):
    names = [faulty(name) for name in ("Fine", "Slow")]
    wanted = ("mask/key-padding/self", "mask/per-head/self", "plain/no-mask", "probe/masks")
    arguments = ["--dtype", "float32", *(word for case in wanted for word in ("--case", case))]
    for label, option in (("in", "--no-isolate"), ("out", "--isolate")):
        extra = workers if option == "--isolate" else ()
        run(tmp_path, *names, *arguments, option, "--record", f"{label}.json", *extra, expect=0)
    assert_same(tmp_path / "in.narrowed.json", tmp_path / "out.narrowed.json")


def assert_same(one, other):
    """Equal but for the times and names of the run."""
    records = [read(path) for path in (one, other)]
    for record in records:
        assert record.complete
    assert records[0].results == records[1].results
    told = [
        (
            # A process that is shared has read what others needed.
            [msgspec.structs.replace(one, inputs={}) for one in h.implementations],
            *(h.planned, h.provenance.packages, h.provenance.selection),
        )
        for h in (record.header for record in records)
    ]
    assert told[0] == told[1]
    arrays = [read_arrays(path, record) for path, record in zip((one, other), records, strict=True)]
    assert arrays[0].keys() == arrays[1].keys()
    assert all(arrays[0][name].tobytes() == arrays[1][name].tobytes() for name in arrays[0])


# The whole run is killed


QUICK = (faulty("Slow"), "--dtype", "float32", "--case", "mask/*/self")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run that nobody killed, and how long it took."""
    folder = tmp_path_factory.mktemp("whole")
    start = time.monotonic()
    run(folder, *QUICK, "--record", "r.json", expect=ExitCode.OK)
    return folder / "r.narrowed.json", time.monotonic() - start


def killed(folder, seconds, mark, *arguments, journal=None, lines=1):
    """Start, and kill after this time (since so many lines here); whether it still ran."""
    options = command(*arguments, "--record", "r.json")
    options["env"]["FAULTS_RUN"] = str(mark)
    with subprocess.Popen(
        **options, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while journal and process.poll() is None:
            if journal.exists() and journal.read_bytes().count(b"\n") > lines:
                break
            time.sleep(0.01)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            return True
    return False


@pytest.mark.night
def test_killed_at_random_moments(whole, tmp_path):
    record, seconds = whole
    random_moment = random.Random(20)
    interrupted = halfway = 0
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        journal = journal_path(folder / "r.narrowed.json")
        # Most of a run so short is its start: half of the moments come after it.
        if number % 2:
            lines = random_moment.randint(1, 5)
            interrupted += killed(folder, 0, tmp_path, *QUICK, journal=journal, lines=lines)
        else:
            moment = random_moment.uniform(0, 1) * seconds
            interrupted += killed(folder, moment, tmp_path, *QUICK)
        if not journal.exists():
            continue
        content = journal.read_bytes()
        if b"\n" in content:
            # What was written can be read: at most the last line is cut off.
            _, results, _ = read_journal(journal)
            assert len(results) >= content.count(b"\n") - 1
            halfway += bool(results)
        if number % 4 == 1:
            run(folder, *QUICK, "--record", "r.json", expect=ExitCode.OK)
            assert_same(folder / "r.narrowed.json", record)
            assert not journal.exists()
    assert interrupted >= 5
    assert halfway >= 2
    wait_until(lambda: not processes(tmp_path))


def wait_until(true):
    deadline = time.monotonic() + 300
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def cut(folder, record, lines, torn=b""):
    """A folder with the journal of so many items of a finished run.

    Those with arrays come first, as in a journal whatever was among the worst has them.
    """
    found = read(record)
    arrays = read_arrays(record, found)
    having = {name.rpartition("|")[0] for name in arrays}
    chosen = sorted(found.results, key=lambda r: r.id not in having)[:lines]
    own = [
        (
            r,
            {
                name.rpartition("|")[2]: a
                for name, a in arrays.items()
                if name.startswith(r.id + "|")
            },
        )
        for r in chosen
    ]
    from conformance.records.record import encode_line

    text = [msgspec.json.encode(found.header), *(encode_line(*item) for item in own)]
    journal = journal_path(folder / record.name)
    journal.write_bytes(b"".join(line + b"\n" for line in text) + torn)
    return journal


@pytest.mark.sample(4)
@pytest.mark.parametrize("workers", [(), ("-n", 2)], ids=["alone", "xdist"])
@pytest.mark.parametrize("option", ["--isolate", "--no-isolate"])
def test_a_resumed_run_equals_an_uninterrupted_one(whole, tmp_path, workers, option):
    record, _ = whole
    journal = cut(tmp_path, record, 7, torn=b'{"result":{"implem')
    arguments = [*QUICK, "--record", "r.json", option, *workers]
    done = run(tmp_path, *arguments, expect=ExitCode.OK)
    planned = len(read(record).results)
    assert f"7 of {planned} items as measured on 20" in done.stdout
    assert_same(tmp_path / record.name, record)
    assert not journal.exists()
    # Nothing is counted twice, and what was found earlier is counted.
    assert f"Slow: {count(read(record))}" in done.stdout


def count(record):
    from conformance.records.findings import count

    counts = count(result.verdict for result in record.results)
    return ", ".join(f"{times} {verdict}" for verdict, times in counts.items())


@pytest.mark.night
def test_a_run_that_was_interrupted_resumes_from_its_record(tmp_path):
    arguments = [faulty("Sleeps"), *THREE, "--case", "plain", "--record", "r.json"]
    options = command(*arguments)
    with subprocess.Popen(**options, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        journal = journal_path(tmp_path / "r.narrowed.json")
        # The second item sleeps.
        wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
    assert process.returncode == ExitCode.INTERRUPTED
    found = read(tmp_path / "r.narrowed.json")
    assert not found.complete
    known = sum(result.verdict != "not-run" for result in found.results)
    assert 0 < known < len(found.results)
    arguments += ["--item-timeout", 4]
    done = run(tmp_path, *arguments, expect=ExitCode.INCOMPLETE)
    assert f"{known} of {len(found.results)} items as measured on 20" in done.stdout
    after = read(tmp_path / "r.narrowed.json")
    assert after.complete
    assert [r.id for r in after.results] == [r.id for r in found.results]


@pytest.mark.night
def test_of_a_damaged_journal_nothing_is_used(whole, tmp_path):
    record, _ = whole
    journal = cut(tmp_path, record, 3)
    whole_text = journal.read_bytes()
    lines = whole_text.splitlines(keepends=True)
    one = ["--case", BEFORE, "--dtype", "float32", "--record", "r.json"]
    broken = b"".join([*lines[:2], b"{broken\n", *lines[2:]])
    for content, told in ((broken, "a journal line cannot be read"), (lines[0], "nothing was mea")):
        journal.write_bytes(content)
        done = run(tmp_path, QUICK[0], *one, expect=ExitCode.OK)
        assert "as measured on" not in done.stdout
        assert told in done.stdout
        assert read(tmp_path / record.name).complete
        (tmp_path / record.name).unlink()


@pytest.mark.night
def test_a_record_that_another_run_writes_is_refused(tmp_path):
    options = command(faulty("Sleeps"), *THREE, "--record", "r.json")
    with subprocess.Popen(**options, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        wait_until((tmp_path / "r.json.lock").exists)
        done = run(tmp_path, *QUICK, "--record", "r.json", expect=ExitCode.USAGE)
        holders = [process.pid, *(it.pid for it in psutil.Process(process.pid).children())]
        process.kill()
    (line,) = done.stderr.strip().splitlines()
    among = "|".join(map(str, holders))
    assert re.search(rf"r\.json: process ({among}), which began at .* writes this record", line)
    # The lock ends with whoever held it.
    run(tmp_path, *QUICK, "--record", "r.json", expect=ExitCode.OK)
    assert not (tmp_path / "r.json.lock").exists()
