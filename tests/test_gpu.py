"""`mha-conformance gpu`: stages within a limit of time, rehearsed with attentions in NumPy.

Nothing here asserts how long something takes: a test waits for what it expects, for minutes if need
be, and what has to be cut off would never end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from records import OUTPUT, good, result, save
from records import record as record_of

from conformance.adapter.loading import load, registered
from conformance.cli import main
from conformance.commands import gpu
from conformance.errors import ExitCode
from conformance.records.findings import Finding
from conformance.records.header import Implementation, Provenance
from conformance.records.long import SCHEMA, Climb, Step, read_climb
from conformance.records.record import (
    Journal,
    decode_line,
    encode_line,
    journal_path,
    read,
    write_document,
)

CORRECT = f"{Path(__file__).with_name('mutants') / 'miniatures.py'}:Correct"
PATIENCE = 300.0
"""Seconds after which what a test waits for counts as missing."""

SLEEPS = """
import os, time
import numpy as np
from conformance import MaskArgument, attention_function

@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"))
def sleeps(query, key, value, mask=None):
    with open({calls!r}, "a") as file:
        file.write("called\\n")
    if os.path.exists({stop!r}):
        time.sleep(3600)
    logits = (query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5).astype(query.dtype)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(query.dtype) @ value
"""


def ask(folder, *implementations, more=(), seconds="600"):
    """The arguments of a rehearsal that has one stage and one dtype."""
    options = ["--device", "cpu", "--dtype", "float32", "--seconds", seconds, "--jobs", "1"]
    return ["gpu", *implementations, *options, "--record", str(folder), *more]


def test_a_rehearsal_leaves_a_record_and_a_table(tmp_path, capfd):
    assert main(ask(tmp_path, CORRECT, more=("--stage", "core"))) == ExitCode.OK
    record = read(tmp_path / "Correct.narrowed.json")
    assert record.complete
    assert {result.verdict for result in record.results} <= {"conforms", "unsupported"}
    conforming = sum(result.verdict == "conforms" for result in record.results)
    assert conforming > 20
    printed = capfd.readouterr().out
    (row,) = [line.split() for line in printed.splitlines() if line.startswith("Correct ")]
    assert row[:3] == ["Correct", "float32", str(conforming)]
    assert "not reached" not in printed


def test_the_stages_pass_one_after_the_other_for_all(tmp_path):
    options = SimpleNamespace(dtype=[], seconds=420.0, record=tmp_path, device="gpu")
    adapters = {name: load(name) for name in ("ours", "torch-sdpa")}
    jobs = [job for stage in gpu.STAGES for job in gpu._jobs(stage, adapters, options)]
    order = [(job.stage.name, job.name) for job in jobs]
    assert order[:4] == [
        *(("core", "ours"), ("core", "torch-sdpa")),
        *(("large", "ours"), ("large", "torch-sdpa")),
    ]
    # `long` takes functions of heads.
    assert order[4:6] == [("long", "torch-sdpa"), ("million", "torch-sdpa")]
    core, full = jobs[0], jobs[-2]
    assert (core.stage.name, full.stage.name) == ("core", "full")
    # The last stage goes on with the records of the first.
    assert core.record == full.record
    assert [word for word in jobs[2].command if word in gpu.DTYPES] == ["float32", "bfloat16"]


def test_what_is_examined_by_default_runs_on_one_device():
    names = gpu._candidates()
    assert set(gpu.TELLING) <= {*registered()}
    assert names[: len(gpu.TELLING)] == [*gpu.TELLING]
    assert {"torch-dtensor", "jax-sharded", "pallas-tpu-flash", "ours-ring"}.isdisjoint(names)


def test_without_a_gpu_nothing_is_verified(tmp_path, capfd):
    assert main(["gpu", CORRECT, "--record", str(tmp_path)]) == ExitCode.NOTHING_VERIFIED
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert line.endswith("nothing here can use a gpu: the suite runs numpy on the CPU only")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import sys; sys.exit('CUDA driver version is insufficient')", "driver version is"),
        ("import os; os._exit(7)", "exit code 7"),
        ('print(\'{"cpu": "a CPU"}\')', "torch sees no gpu (it has cpu)"),
    ],
)
def test_a_framework_that_cannot_use_the_device_is_named(monkeypatch, program, reason):
    monkeypatch.setattr(gpu, "_ASK", program)
    models, missing, reasons = gpu._usable({"torch-sdpa": load("torch-sdpa")}, "gpu")
    assert not models
    assert reason in missing["torch-sdpa"]
    assert missing["torch-sdpa"] == reasons["torch"]


def test_a_framework_that_is_left_out_is_told(tmp_path, monkeypatch, capfd):
    fails = "if sys.argv[1] == 'torch': sys.exit('no driver')"
    monkeypatch.setattr(gpu, "_ASK", f'import sys\n{fails}\nprint(\'{{"cpu": "a CPU"}}\')')
    monkeypatch.setattr(gpu, "_candidates", lambda: [CORRECT, "torch-sdpa"])
    # There is no time to begin anything.
    assert main(ask(tmp_path, seconds="13")) == ExitCode.NOTHING_VERIFIED
    printed = capfd.readouterr().out
    assert "numpy: a CPU" in printed
    assert "torch is left out: no driver" in printed
    assert "not reached: core: Correct" in printed


def test_a_name_that_does_not_exist_is_refused(tmp_path, capfd):
    assert main(ask(tmp_path, CORRECT, more=("--stage", "cores"))) == ExitCode.USAGE
    assert "did you mean core?" in capfd.readouterr().err
    assert main(ask(tmp_path, CORRECT, seconds="3")) == ExitCode.USAGE


def job(tmp_path, name, program, seconds=3600.0, stage=gpu.STAGES[0]):
    """A job that runs a program instead of the suite."""
    record, log = tmp_path / f"{name}.json", tmp_path / f"{name}.txt"
    return gpu.Job(stage, name, [sys.executable, "-c", program], record, log, seconds)


def test_who_takes_more_than_a_share_makes_room(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu, "GRACE", 0.2)
    jobs = [
        job(tmp_path, "deaf", "import time; time.sleep(3600)", 0.5),
        job(tmp_path, "quick", "print('done')"),
    ]
    line = gpu.JobLine(jobs, ends=time.monotonic() + PATIENCE, most=1)
    # A process that is started by one that ignores the signal ignores it from the beginning.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert not line.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [one.name for one in line.ended] == ["deaf", "quick"]
    assert [one.name for one in line.cut] == ["deaf"]
    assert jobs[0].code == -signal.SIGKILL
    assert "quick" in capfd.readouterr().out


def test_a_share_binds_only_while_others_wait_for_the_same_stage(tmp_path):
    jobs = [
        job(tmp_path, "long", "import time; time.sleep(1)", 0.01),
        job(tmp_path, "next", "print('next')", stage=gpu.STAGES[1]),
    ]
    line = gpu.JobLine(jobs, ends=time.monotonic() + PATIENCE, most=1)
    line.run()
    assert not line.cut
    assert len(line.ended) == 2


@pytest.mark.night
@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="it is installed")
def test_what_is_named_and_not_installed_is_told(tmp_path, capfd):
    arguments = ask(tmp_path, CORRECT, "flash-attn", more=("--stage", "core"))
    assert main(arguments) == ExitCode.INCOMPLETE
    assert "unavailable: flash-attn: " in capfd.readouterr().out


def test_who_interrupts_gets_the_table_and_the_code(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpu.JobLine, "run", lambda line: True)
    assert main(ask(tmp_path, CORRECT, more=("--stage", "core"))) == ExitCode.INTERRUPTED
    assert "not reached: core: Correct" in capfd.readouterr().out


def test_a_job_that_ends_in_errors_alone_verifies_nothing(tmp_path, capfd):
    jobs = [job(tmp_path, name, "") for name in ("wrong", "right")]
    for one, finding in zip(jobs, (Finding(OUTPUT, "error"), good()), strict=True):
        save(tmp_path, record_of(result(finding), name=one.name))
    line = gpu.JobLine(jobs, ends=time.monotonic() + PATIENCE, most=1)
    line.run()
    assert re.search(r"wrong +0 s  1 error", capfd.readouterr().out)
    assert line.verified == 1


@pytest.mark.night
def test_at_the_end_of_the_time_the_rest_is_said_to_be_not_reached(tmp_path, capfd):
    jobs = [job(tmp_path, name, "import time; time.sleep(3600)") for name in ("one", "two")]
    line = gpu.JobLine(jobs, ends=time.monotonic() + gpu.GRACE + gpu.LEAST + 1, most=1)
    line.run()
    assert [one.name for one in line.cut] == ["one"]
    assert [one.name for one in line.waiting] == ["two"]
    gpu._print_unfinished("not reached", line.waiting, jobs)
    assert "not reached: core: two" in capfd.readouterr().out
    gpu._print_unfinished("not reached", jobs, jobs)
    assert "not reached: core: all" in capfd.readouterr().out


@pytest.mark.night
@pytest.mark.skipif(os.name != "posix", reason="groups of processes")
def test_what_a_killed_call_has_measured_is_kept_and_continued(tmp_path):
    calls, stop, records = tmp_path / "calls", tmp_path / "stop", tmp_path / "records"
    mine = tmp_path / "mine.py"
    mine.write_text(SLEEPS.format(calls=str(calls), stop=str(stop)))
    arguments = ask(records, f"{mine}:sleeps", more=("--stage", "core"))
    record = records / "sleeps.narrowed.json"
    killed = subprocess.Popen([sys.executable, "-m", "conformance", *arguments])
    try:
        wait_for(lambda: lines(journal_path(record)) > 8)
        # From here on it hangs, so that the record cannot be finished before the process dies.
        stop.touch()
        before = lines(calls)
        wait_for(lambda: lines(calls) > before)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    kept = [decode_line(line)[0] for line in journal_path(record).read_bytes().splitlines()[1:]]
    asked = [result for result in kept if result.verdict != "unsupported"]
    assert asked
    # Whoever waits for an answer is gone too.
    wait_for(lambda: not any("sleeps" in command for command in commands()))
    stop.unlink()
    called = lines(calls)
    assert subprocess.run([sys.executable, "-m", "conformance", *arguments]).returncode == 0
    complete = read(record)
    assert complete.complete
    assert not journal_path(record).exists()
    # The second call has left out what the first one has measured.
    again = lines(calls) - called
    arguments[arguments.index(str(records))] = str(tmp_path / "afresh")
    assert subprocess.run([sys.executable, "-m", "conformance", *arguments]).returncode == 0
    whole = lines(calls) - called - again
    assert 0 < again <= whole - len(asked)


@pytest.mark.night
def test_the_journal_of_a_killed_run_becomes_an_incomplete_record(tmp_path):
    assert main(ask(tmp_path, CORRECT, more=("--stage", "core"))) == ExitCode.OK
    record = tmp_path / "Correct.narrowed.json"
    whole = read(record)
    journal = Journal(record, whole.header, [encode_line(one, {}) for one in whole.results[:7]])
    journal.close()
    record.unlink()
    gpu._settle(record)
    half = read(record)
    assert not half.complete
    assert half.results == whole.results[:7]
    assert not journal.path.exists()


def climb(folder, name, lengths, verdicts):
    """A record of `long` with one step for each length."""
    own = Implementation(name, name, "", "numpy", "", {}, [], [], [], None)
    steps = [
        Step("causal", "float32", "default", length, length, verdict)
        for length, verdict in zip(lengths, verdicts, strict=True)
    ]
    made = Provenance("", "", "", "", "", "", "cpu", "", {}, "", "")
    document = Climb(SCHEMA, own, made, lengths, 64, 0, None, None, steps)
    folder.mkdir(exist_ok=True)
    write_document(folder / f"{name}.json", document)


def test_a_million_tokens_join_the_shorter_lengths(tmp_path):
    climb(tmp_path / "long", "mine", [4096, 16384], ["conforms", "deviates"])
    climb(tmp_path / "million", "mine", [2**20], ["conforms"])
    record = gpu._lengthened(tmp_path / "long" / "mine.json", tmp_path / "million" / "mine.json")
    assert record == tmp_path / "long" / "mine.json"
    joined = read_climb(record)
    assert joined.lengths == [4096, 16384, 2**20]
    assert [step.verdict for step in joined.steps] == ["conforms", "deviates", "conforms"]
    assert not (tmp_path / "million" / "mine.json").exists()
    # Measured again, a length is replaced.
    climb(tmp_path / "million", "mine", [2**20], ["error"])
    gpu._lengthened(record, tmp_path / "million" / "mine.json")
    assert [step.verdict for step in read_climb(record).steps] == ["conforms", "deviates", "error"]
    assert gpu._lengthened(record, tmp_path / "million" / "none.json").name == "none.json"


ON_A_STAND_IN = """
import sys
import standin
from conformance.cli import main
from conformance.commands import gpu

standin.register()
# The process that is asked for the devices has to know the stand-in, too.
gpu._ASK = "import standin; standin.register()" + gpu._ASK
names = ("self", "size-one", "cross")
cases = [word for name in names for word in ("--case", f"plain/no-mask/{name}")]
gpu.STAGES = (gpu.Stage("core", ("run", *cases)),)
sys.exit(main(sys.argv[1:]))
"""
"""The command `gpu`, with a stand-in for one and few cases."""


@pytest.mark.night
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_a_lost_device_costs_one_item_and_a_new_process_goes_on(tmp_path):
    tests = Path(__file__).parent
    paths = [str(tests), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-c", ON_A_STAND_IN),
            *("gpu", f"{tests / 'device_torch.py'}:asserts_in_self_attention"),
            *("--dtype", "float32", "--jobs", "1", "--record", str(tmp_path)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.OK, done.stdout + done.stderr
    record = read(tmp_path / "asserts_in_self_attention.narrowed.json")
    assert record.header.provenance.device_model == "Stand-in 1000"
    lost = [result for result in record.results if result.verdict == "crashed"]
    details = {finding.detail for result in lost for finding in result.findings}
    assert details == {
        "the device is lost: AcceleratorError: standin error: device-side assert triggered"
    }
    # Each is lost in a process of its own, and what comes next is examined by another one.
    assert [(result.case, result.verdict) for result in record.results] == [
        ("plain/no-mask/self", "crashed"),
        ("plain/no-mask/cross", "conforms"),
        ("plain/no-mask/size-one", "crashed"),
    ]
    assert "torch: Stand-in 1000" in done.stdout


def lines(file):
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def commands():
    """The command lines of all processes that can be seen, without this one."""
    import psutil

    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid():
            yield " ".join(process.info["cmdline"] or ())


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)
