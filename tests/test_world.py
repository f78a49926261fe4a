"""Attention on several ranks: divided and joined right, and whatever ends is named and cleared."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from mutants import faulty_ranks
from mutants.mutant import UNCHANGED
from mutants.run import Examiner, examined
from mutants.world import MUTANTS, Ranks, threaded

from conformance import Call, Split, Unsupported, World, examine
from conformance.adapter import world
from conformance.cases.catalogue import find_cases
from conformance.definition.expectation import solve
from conformance.errors import RankDied, WrongDeclaration
from conformance.running.session import Item

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")

GROUPED = find_cases("plain/no-mask/gqa")[0].problem("float64")


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


# How tensors are divided


def test_every_token_is_on_one_rank():
    for length in (0, 1, 5, 7, 8, 131):
        for size in (1, 2, 3, 4, 8):
            for zigzag in (False, True):
                places = Split("any", zigzag=zigzag).positions(length, size)
                assert sorted(np.concatenate(places)) == list(range(length))
                assert len(places) == size


def test_zigzag_gives_every_rank_an_early_and_a_late_part():
    places = Split("any", zigzag=True).positions(12, 3)
    assert [list(part) for part in places] == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


def test_modes_are_sizes_and_splits():
    world = World((1, 2, 8), (Split("ring", True, True), Split("heads", heads=True)))
    names = [mode.name for mode in world.modes()]
    assert names == ["ring-1", "ring-2", "heads-2", "ring-8", "heads-8"]
    assert [mode.every_case for mode in world.modes()] == [True, False, False, False, False]
    ring = (Split("ring"),)
    for sizes, splits in (((), ring), ((0,), ring), ((65,), ring), ((2,), ())):
        with pytest.raises(WrongDeclaration, match="sizes from 1 to 64, and at least one way"):
            World(sizes, splits)


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(Unsupported, match="2 key/value heads cannot be divided among 3 ranks"):
        Split("heads", heads=True).places((4, 5), (2, 7), 3)


def test_ranks_find_functions_of_modules():
    module, file, name = world.reference(faulty_ranks.Right.on_rank)
    assert (module, name) == ("mutants.faulty_ranks", "Right.on_rank")
    assert file == faulty_ranks.__file__
    with pytest.raises(WrongDeclaration, match="ranks can only import"):
        world.reference(lambda: None)


# The ring attention, on ranks that are threads


@pytest.fixture(scope="module")
def examiner():
    return Examiner()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("causal/square/self", "float32"),
        ("feature/window/narrow", "bfloat16"),
        ("feature/sinks/mqa", "float32"),
    ],
)
def test_the_ring_conforms(examiner, case, dtype):
    """In a few modes; `tox -e ours-ring` asks all of them, on ranks that are processes."""
    for mode in (Ranks.modes[3], Ranks.modes[4], Ranks.modes[-1]):
        adapter = Ranks()
        adapter.name = "sound"
        row = Item(adapter, examiner.cases[case], dtype, "cpu", mode)
        verdicts = {finding.verdict for finding in examined(examiner.session(), row).findings}
        assert "conforms" in verdicts, mode.name
        assert verdicts <= {"conforms", "observed", "unsupported"}, mode.name


@pytest.mark.sample(4)
@pytest.mark.parametrize("mutant", MUTANTS[::5], ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_ring_dies_in_the_case_that_it_names(examiner, mutant):
    """All of them are examined by `python -m mutants`."""
    outcome = examiner.kill(mutant)
    assert outcome.killed, f"survived; noticed by {dict(outcome.noticed) or 'nothing'}"
    assert outcome.where.split(":")[1] == mutant.case


def test_what_mutants_replace_is_there():
    for mutant in MUTANTS:
        assert set(mutant.changes) <= {*dir(threaded())} - {"forward", "backward"}, mutant.name
        assert 1 <= len(mutant.changes) <= 2, mutant.name
    assert len(MUTANTS) >= 40


# What ends


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kind", "verdict", "detail"),
    [
        (faulty_ranks.Right, "conforms", ""),
        (faulty_ranks.Dies, "crashed", "rank 1 of 2 died with SIGKILL"),
        (faulty_ranks.Exits, "crashed", "rank 1 of 2 died with exit code 3"),
        (faulty_ranks.Late, "timed-out", "rank 1 of 2 did not answer within 0.5 s"),
        (
            faulty_ranks.RaisesWhileOthersWait,
            "error",
            "rank 1 of 2: ValueError: not today (on_rank",
        ),
        (faulty_ranks.LeavesByItself, "error", "rank 1 of 2: SystemExit: 0"),
        (faulty_ranks.Refuses, "unsupported", "no mask here"),
        (faulty_ranks.OtherShape, "error", "the result has shape [4, 3, 4, 8] on rank 1 of 2"),
        (faulty_ranks.TooFewAxes, "error", "the result has shape [] on rank 0 of 2, too few axes"),
        (faulty_ranks.Nothing, "error", "the result is NoneType on rank 1 of 2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_rank_is_named(kind, verdict, detail):
    asked = {"cases": "mask/per-batch/gqa", "dtypes": "float32", "modes": "heads-2"}
    (found,) = examine(kind, **asked).results
    assert found.verdict == verdict
    assert {f.detail.startswith(detail) for f in found.findings if f.verdict == verdict} == {True}
    if verdict in ("crashed", "timed-out"):
        assert len(found.findings) == 1


def test_elements_that_no_rank_returns_are_not_arbitrary():
    """They are the blocks off the diagonal if two divided axes are divided among the same ranks."""
    from conformance.frameworks.torch_bridge import _join

    axes = [(axis, [np.array([0]), np.array([1])]) for axis in (0, 1)]
    for dtype, nothing in ((torch.float32, np.nan), (torch.bool, False)):
        joined = _join("the result", [torch.ones(1, 1, dtype=dtype)] * 2, axes)
        np.testing.assert_array_equal(joined, [[1, nothing], [nothing, 1]])


def test_heads_come_before_the_length():
    layout = "batch length heads head"
    with pytest.raises(WrongDeclaration, match=r"ranks get \[batch heads length head\]"):
        type("Other", (faulty_ranks.Right,), {"layout": layout})


@pytest.mark.night
def test_a_rank_that_is_lost_in_a_process_of_its_own_is_named_too():
    asked = {"cases": "probe/bad-input", "modes": "heads-2"}
    (found,) = examine(f"{faulty_ranks.__file__}:Dies", **asked).results
    assert found.verdict == "crashed"
    assert found.findings[0].detail == "rank 1 of 2 died with SIGKILL"


def test_what_a_rank_writes_into_its_part_is_noticed():
    asked = {
        "cases": "causal/with-left-aligned-padding/cross",
        "dtypes": "float32",
        "modes": "heads-2",
    }
    (found,) = examine(faulty_ranks.WritesIntoItsMask, **asked).results
    assert [f.requirement for f in found.findings if f.verdict == "deviates"] == [UNCHANGED]


def test_a_world_is_kept_and_one_that_ended_is_started_anew():
    call = Call(faulty_ranks.Right.modes[1])
    pids = []
    for _ in range(2):
        faulty_ranks.Right().run(GROUPED, call)
        pids.append(ranks(2))
    assert pids[0] == pids[1]
    os.kill(pids[0][0], 9)
    with pytest.raises(RankDied, match="rank 0 of 2 died with SIGKILL"):
        faulty_ranks.Right().run(GROUPED, call)
    assert not any(map(alive, pids[0]))
    answer = faulty_ranks.Right().run(GROUPED, call)
    np.testing.assert_allclose(answer.output, solve(GROUPED).output, atol=1e-12)
    assert not {*ranks(2)} & {*pids[0]}


def ranks(size):
    (processes,) = (p for key, p in world._WORLDS.items() if key[0] == size)
    return list(processes.pids)


LEAVES = """
import os, sys, threading
from conformance.adapter import world
echo = "mutants.faulty_ranks:Echo"
world.call_ranks(echo, 20.0, [1], [[1], [2]])
(processes,), (host,) = world._WORLDS.values(), world._HOSTS.values()
print(host._process.pid, *processes.pids, flush=True)
if sys.argv[1] == "killed":
    threading.Timer(0.2, os.kill, (os.getpid(), 9)).start()
    world.call_ranks(echo, 20.0, [1], [["sleep"], ["sleep"]])
"""


def test_nothing_is_left_running():
    """Neither when a run ends by itself nor when it is killed while ranks are busy."""
    path = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    runs = [
        subprocess.Popen([sys.executable, "-c", LEAVES, how], stdout=subprocess.PIPE, env=path)
        for how in ("ended", "killed")
    ]
    for run in runs:
        pids = list(map(int, run.communicate()[0].split()))
        assert len(pids) == 3
        until = time.monotonic() + 300
        while any(map(alive, pids)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(alive, pids))
