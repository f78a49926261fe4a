"""The bridge to JAX, where it is not the same as any other."""

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

from conformance import attention_function
from conformance.adapter.loading import load
from conformance.cases.catalogue import case_of
from conformance.cli import main
from conformance.commands import probe
from conformance.errors import ExitCode
from conformance.explore.trial import Trial, deviations
from conformance.frameworks import jax_bridge
from conformance.frameworks.base import Request


@pytest.mark.night
def test_programs_are_dropped_before_there_is_no_room_to_compile(monkeypatch):
    bridge = jax_bridge.Jax()

    def asked(program):
        with bridge.session("float32", "cpu"):
            given = bridge.array(np.ones((2, 3)), "float32", "cpu")
            request = Request(
                lambda variables, _: (variables["x"] * 2, None),
                {"x": given},
                {},
                given,
                gradients=True,
                program=program,
            )
            found = bridge.evaluate(request)
            return bridge.numpy(found.output), bridge.numpy(found.gradients["x"])

    first = asked(0)
    for program in range(1, 40):
        asked(program)
    assert len(bridge._programs) == 40
    monkeypatch.setattr(jax_bridge, "MOST_MAPPED", 0)
    for _ in range(32):
        again = asked(0)
    assert len(bridge._programs) == 1
    assert np.array_equal(again, first)


def test_an_output_that_is_no_array_is_returned_without_gradients():
    bridge = jax_bridge.Jax()
    with bridge.session("float32", "cpu"):
        given = bridge.array(np.ones((2, 3)), "float32", "cpu")
        request = Request(
            lambda variables, _: ([variables["x"]], None), {"x": given}, {}, given, True, "a list"
        )
        found = bridge.evaluate(request)
    assert isinstance(found.output, list)
    assert found.gradients == {}


def test_mappings_are_counted_or_said_to_be_none(monkeypatch):
    assert jax_bridge._mapped() >= 0
    monkeypatch.setattr("builtins.open", lambda *_: (_ for _ in ()).throw(FileNotFoundError))
    assert jax_bridge._mapped() == 0


@pytest.mark.night
def test_experiments_of_a_framework_that_compiles_run_in_two_processes(monkeypatch, capfd):
    monkeypatch.setattr(probe, "WORTH_IT", 1)
    names = ["--experiment", "sizes", "--experiment", "input-layouts", "--experiment", "dropout"]
    assert main(["probe", "jax-sdpa", *names]) == ExitCode.OK
    assert "Sizes" in capfd.readouterr().out
    # What each of the processes does.
    result = probe._inquire("jax-sdpa", (), "dropout", load("jax-sdpa").modes[0].name, "cpu")
    assert result.case == "probe/dropout"


def test_what_is_wrong_only_without_optimisation_is_no_deviation():
    @attention_function("jax")
    def twice(query, key, value):
        weights = jax.nn.softmax(query @ key.mT * query.shape[-1] ** -0.5)
        return 2 * (weights @ value)

    problem = case_of("plain/no-mask/cross").problem("float32")
    assert deviations(twice, Trial(problem, twice.modes[0]))
