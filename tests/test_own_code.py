"""The mutation tester of the suite's own code, and a sample of its mutants."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from mutants import own_code

ROOT = Path(__file__).parent.parent
MODULE = "conformance.definition.comparison"


@pytest.fixture(scope="module")
def table():
    return tomllib.loads(own_code.TABLE.read_text(encoding="utf-8"))


def changes(source):
    """What may be done to a piece of code, as text."""
    tree = ast.parse(source)
    return {f"{ast.unparse(old)} -> {ast.unparse(ast.fix_missing_locations(new))}"
            for _, old, new, _ in own_code.changes(tree)}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("a < b", "a < b -> a <= b"),
        ("a < b", "a < b -> a >= b"),
        ("a in b", "a in b -> a not in b"),
        ("a + b * c", "b * c -> b / c"),
        ("a += b", "a += b -> pass"),
        ("a and b", "a and b -> a or b"),
        ("a and b and c", "a and b and c -> a and c"),
        ("not a", "not a -> a"),
        ("x = 3", "3 -> 4"),
        ("x = 3", "3 -> 2"),
        ("x = 0.5", "0.5 -> 1.0"),
        ("x = True", "True -> False"),
        ("def f():\n    return x", "return x -> return None"),
        ("for a in b:\n    continue", "continue -> pass"),
        ("f(x)", "f(x) -> pass"),
        ("raise a", "raise a -> pass"),
        ("a if b else c", "a if b else c -> a if True else c"),
        ("any(x)", "any -> all"),
        ("np.minimum(a, b)", "np.minimum -> np.maximum"),
        ("x[a:]", "a: -> a + 1:"),
    ],
)
def test_what_is_changed(source, change):
    assert change in changes(source)


@pytest.mark.parametrize(
    "source", ["zip(a, b, strict=True)", "f'{x + 1}'", "def f(x: a < b): ...", "'text'"]
)
def test_what_is_left_alone(source):
    assert not {change for change in changes(source) if not change.endswith("-> pass")}


@pytest.mark.night
def test_a_mutant_is_noticed_and_the_original_is_not():
    """In a process of its own: of this one the modules are imported, and it may have threads."""
    program = f"""
from mutants.own_code import mutants, survives
tests = ["tests/test_comparison.py", "-k", "at_the_limit or below_the_underflow"]
one, other = (next(m for m in mutants({MODULE!r}) if m.id.endswith(end)) for end in (
    "Comparison.fits: self.excess <= 1 -> self.excess < 1",
    "worst_of: max -> min",
))
print(survives(None, tests), survives(one, tests), survives(other, tests))
print(survives(None, tests, limit=0.01))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "False", "True", "False"]


def test_every_module_has_tests_and_every_entry_a_mutant(table):
    tests = {**table["quick"], **table["slow"]}
    for arguments in tests.values():
        assert all((ROOT / file).exists() for file in arguments if file.endswith(".py"))
    every = {mutant.id for name in tests for mutant in own_code.mutants(f"conformance.{name}")}
    assert not table["equivalent"].keys() - every
    assert all(reason.strip() for reason in table["equivalent"].values())


@pytest.mark.night
def test_a_sample_is_noticed():
    """The same each time, so that it fails for a change of code or tests only."""
    command = ["-m", "mutants.own_code", "--quick", "--part", "1/200"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT / "tests", capture_output=True, text=True
    )
    assert not done.returncode, done.stdout + done.stderr
