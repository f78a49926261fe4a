"""`mha-conformance matrix --on ray`, with real nodes of Ray on this machine: `tox -e cluster`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray.cluster_utils import Cluster

from conformance.judging.sandbox import IsolationMissing, check
from conformance.records.record import read

ROOT = Path(__file__).parents[2]
PROJECT = """\
[tox]
env_list = first, second

[testenv]
package = skip
deps =
    -c{root}/constraints.txt
    -e {root}
    pytest-xdist
pass_env =
    PIP_*
    UV_*
    WORKERS
commands = mha-conformance gate attention.py:attention --baseline known.toml \
--record records/{{env_name}}.json -n {{env:WORKERS:1}} {{posargs}}

[testenv:worse]
commands = mha-conformance gate worse.py:attention --record records/worse.json {{posargs}}

[testenv:unbuilt]
deps = no-such-package-of-mha-conformance
commands = mha-conformance gate attention.py:attention --record records/unbuilt.json

[testenv:slow]
deps =
skip_install = true
commands = python -c "import time; time.sleep(600)" --record records/slow.json

[testenv:aside]
deps =
skip_install = true
allowlist_externals = true
commands = true
"""
FEW = ("--", "--case", "mask/", "--dtype", "float32", "--dtype", "float64")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with an attention in NumPy, whose nodes keep nothing beyond the test."""
    monkeypatch.setenv("UV_CACHE_DIR", os.environ.get("UV_CACHE_DIR") or caches("uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tox.ini").write_text(PROJECT.format(root=ROOT), encoding="utf-8")
    example = (ROOT / "docs" / "examples" / "numpy_function.py").read_text(encoding="utf-8")
    (folder / "attention.py").write_text(example, encoding="utf-8")
    scale = "query.shape[-1] ** -0.5"
    assert example.count(scale) == 1
    (folder / "worse.py").write_text(example.replace(scale, "0.5"), encoding="utf-8")
    (folder / "known.toml").write_text("", encoding="utf-8")
    return folder


def caches(name):
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name)


@pytest.fixture
def nodes(project, monkeypatch):
    """A cluster with a head that runs nothing, and two nodes with one CPU each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    cluster.add_node(num_cpus=1)
    cluster.add_node(num_cpus=1, resources={"rare": 1})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def command(*arguments):
    return [sys.executable, "-m", "conformance", "matrix", "--on", "ray", *arguments]


def matrix(project, *arguments):
    return subprocess.run(
        command(*arguments), cwd=project, capture_output=True, text=True, timeout=500, check=False
    )


def outcomes(file):
    """What a record says, but for when, where and how fast."""
    record = read(file)
    said = {
        result.id: [(one.requirement, one.verdict, one.value) for one in result.findings]
        for result in record.results
    }
    assert record.complete
    assert len(said) > 20
    return said


@pytest.fixture
def whole(project):
    """The record of one run on one machine."""
    run = [sys.executable, "-m", "conformance", "run", "attention.py:attention", *FEW[1:]]
    subprocess.run([*run, "--record", "whole.json"], cwd=project, check=True, capture_output=True)
    return outcomes(project / "whole.narrowed.json")


def test_shards_on_two_nodes_make_the_record_of_one_run(project, nodes, whole):
    done = matrix(project, "first", "second", "aside", "--shards", "2", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("first", "second"):
        assert outcomes(project / "records" / f"{name}.narrowed.json") == whole
        for shard in ("1/2", "2/2"):
            assert f"{name} {shard}: " in done.stdout
    assert not [*(project / "records").glob("*.shard-*")]


def test_one_environment_does_not_spoil_another(project, nodes, whole):
    done = matrix(project, "first", "worse", "unbuilt", *FEW)
    assert done.returncode == 4, done.stdout + done.stderr
    assert "unbuilt: was not run" in done.stdout
    assert "no-such-package-of-mha-conformance" in done.stdout
    assert outcomes(project / "records" / "first.narrowed.json") == whole
    assert outcomes(project / "records" / "worse.narrowed.json") != whole
    done = matrix(project, "first", "worse", *FEW)
    assert done.returncode == 1, done.stdout + done.stderr


# More deaths, at other moments: NODE_DEATHS=10 tox -e cluster -- tests/cluster -k dead_node
@pytest.mark.parametrize("later", range(int(os.environ.get("NODE_DEATHS", "2"))))
def test_what_a_dead_node_ran_is_run_elsewhere(project, nodes, whole, later):
    running = subprocess.Popen(
        command("first", "second", *FEW), cwd=project, stdout=subprocess.PIPE, text=True
    )
    victim = next(iter(nodes.worker_nodes))
    await_process("--record", "records/")
    time.sleep(later)
    nodes.remove_node(victim, allow_graceful=False)
    nodes.add_node(num_cpus=1)
    printed, _ = running.communicate(timeout=500)
    assert running.returncode == 0, printed
    for name in ("first", "second"):
        assert outcomes(project / "records" / f"{name}.narrowed.json") == whole


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_has_come_and_leaves_nothing_running(
    project, nodes, whole, by
):
    running = subprocess.Popen(
        command("first", "slow", *FEW),
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    await_process("time.sleep(600)")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("first: ")
    running.send_signal(by)
    _, printed = running.communicate(timeout=60)
    assert running.returncode == 130, printed
    assert outcomes(project / "records" / "first.narrowed.json") == whole
    deadline = time.monotonic() + 30
    while processes("time.sleep(600)") and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not processes("time.sleep(600)")


def test_a_part_ends_with_its_node(project, nodes):
    running = subprocess.Popen(command("slow"), cwd=project, stdout=subprocess.DEVNULL)
    await_process("time.sleep(600)")
    (begun,) = processes("time.sleep(600)")
    for each in [*nodes.worker_nodes]:
        nodes.remove_node(each, allow_graceful=False)
    psutil.wait_procs([begun], timeout=60)
    assert not begun.is_running()
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 130


def test_two_runs_do_not_write_the_same_records(project, nodes):
    running = subprocess.Popen(command("first", *FEW), cwd=project, stdout=subprocess.DEVNULL)
    await_process("--record", "records/")
    done = matrix(project, "first", *FEW)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert f"process {running.pid}" in done.stderr
    assert running.wait(500) == 0


def test_what_no_node_has_is_an_error_at_once(project, nodes):
    table = '[tool.mha-conformance.resources]\nfirst = { GPU = 1, "rare" = 2 }\n'
    (project / "pyproject.toml").write_text(table, encoding="utf-8")
    done = matrix(project, "first", *FEW)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "what first needs: 1 CPU, 1 GPU, 2 rare" in done.stderr


def test_a_part_runs_where_its_resources_are(project, nodes):
    table = '[tool.mha-conformance.resources]\nfirst = { "rare" = 1 }\n'
    (project / "pyproject.toml").write_text(table, encoding="utf-8")
    done = matrix(project, "first", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr


def test_candidates_are_judged_on_nodes_as_they_are_here(project, nodes):
    try:
        check("bubblewrap")
    except IsolationMissing as error:
        pytest.skip(str(error))
    (project / "broken.py").write_text("import no_such_module\n", encoding="utf-8")
    task = ("--chapter", "plain", "--dtype", "float32", "--no-gradients", "--token", "5eed" * 8)
    files = ("attention.py", "worse.py", "broken.py")
    verdicts = {}
    for engine in ((), ("--on", "ray")):
        begun = [sys.executable, "-m", "conformance", "judge", *engine, *task, *files]
        done = subprocess.run(begun, cwd=project, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        verdicts[engine] = {
            verdict["candidate"].partition(":")[0]: (
                verdict["verdict"],
                verdict["score"],
                verdict["causes"],
            )
            for verdict in map(json.loads, done.stdout.splitlines())
        }
    here, there = verdicts.values()
    assert here == there
    assert [here[file][0] for file in files] == ["right", "wrong", "failed"]


def test_no_such_cluster_is_one_line(project):
    begun = [sys.executable, "-m", "conformance", "matrix", "--on", "ray://127.0.0.1:1", "first"]
    done = subprocess.run(begun, cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "no Ray cluster at ray://127.0.0.1:1" in done.stderr


def processes(*words):
    """Commands of this suite, other than the one that waits for them, that have these words."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if all(word in line for word in words) and "caches/mha-conformance" in line:
            found.append(process)
    return found


def await_process(*words):
    deadline = time.monotonic() + 120
    while not processes(*words):
        assert time.monotonic() < deadline, "nothing was begun"
        time.sleep(0.2)
