"""Expectations kept on disk: the same as computed, and never in the way."""

from __future__ import annotations

import os
import shutil
import sys

import numpy as np
import pytest

from conformance import cases, definition
from conformance.cases.catalogue import find_cases
from conformance.definition.expectation import ROW_SUMS, expect
from conformance.records import numbers
from conformance.running import kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path))
    kept._written.clear()
    return tmp_path


@pytest.fixture
def computed(monkeypatch):
    """The problems that were computed."""
    problems = []

    def counted(problem, *, gradients=True, promised=""):
        problems.append(problem)
        return expect(problem, gradients=gradients, promised=promised)

    monkeypatch.setattr(kept, "expect", counted)
    return problems


def problem_of(case_id, dtype="float32"):
    (case,) = find_cases(case_id)
    return case.problem(dtype)


def assert_same(one, other):
    """Every bit, and the order, which reports and the choice of the worst depend on."""
    assert one.underflow == other.underflow
    assert list(one.noise) == list(other.noise)
    for ours, theirs in (
        (one.arrays, other.arrays),
        *zip(one.noise.values(), other.noise.values(), strict=True),
    ):
        assert list(ours) == list(theirs)
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], strict=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "case", ["plain/no-mask/additive", "bias/with-mask/cross", "plain/no-mask/self"]
)
def test_what_was_kept_is_what_was_computed(folder, computed, case, dtype):
    problem = problem_of(case, dtype)
    first = kept.expectation(problem)
    again = kept.expectation(problem)
    assert computed == [problem]
    assert_same(first, again)
    assert_same(first, expect(problem))


def test_an_expectation_with_tf32_is_not_mixed_up_with_one_without(folder, computed):
    problem = problem_of("mask/key-padding/cross")
    for _ in range(2):
        assert list(kept.expectation(problem).noise) == ["A0"]
        found = kept.expectation(problem, promised="TF32")
        assert_same(found, expect(problem, promised="TF32"))
        assert found.promised == "TF32"
    assert len(computed) == 2
    in_half = problem_of("mask/key-padding/cross", "bfloat16")
    for promised in ("TF32", "A", ""):
        found = kept.expectation(in_half, promised=promised)
        assert found.promised == promised.replace("TF32", "")
    assert len(computed) == 3


def test_other_problems_are_not_mixed_up(folder, computed):
    problem = problem_of("mask/key-padding/cross")
    others = [
        problem.replace(mask=~problem.mask),
        problem.replace(mask=None),
        problem.replace(scale=0.5),
        problem.with_inputs(query=problem.query * 2),
        problem.with_weights(query=-problem.weights.query),
        problem_of("mask/key-padding/cross", "bfloat16"),
    ]
    every = [problem, *others]
    assert len({item.digest() for item in every}) == len(every)
    for item in every:
        assert_same(kept.expectation(item), expect(item))
    assert computed == every


@pytest.mark.parametrize("change", ["attention.py", "numbers.py", "NumPy", "nothing"])
def test_a_changed_reference_is_computed_anew(
    folder, computed, monkeypatch, tmp_path_factory, change
):
    """By another line of code of the definition or of limits, or another version of NumPy."""
    code = tmp_path_factory.mktemp("code")
    shutil.copytree(definition.__path__[0], code, dirs_exist_ok=True)
    monkeypatch.setattr(definition, "__path__", [str(code)])
    shutil.copy(numbers.__file__, code.with_suffix(".py"))
    monkeypatch.setattr(numbers, "__file__", str(code.with_suffix(".py")))
    edited = {"attention.py": code / change, "numbers.py": code.with_suffix(".py")}.get(change)
    problem = problem_of("plain/no-mask/self")
    try:
        kept._code.cache_clear()
        kept.expectation(problem)
        if edited:
            edited.write_text(edited.read_text() + "\nMORE = 1\n")
        if change == "NumPy":
            monkeypatch.setattr(np, "__version__", "9.9.9")
        kept._code.cache_clear()
        kept.expectation(problem)
    finally:
        kept._code.cache_clear()
    assert computed == [problem] * (1 if change == "nothing" else 2)


@pytest.fixture
def hashed(monkeypatch):
    """How often the hash of the catalogue was computed."""
    times = []
    monkeypatch.setattr(kept, "catalogue_hash", lambda: times.append(1) or "0123456789abcdef")
    kept.hash_of_catalogue.cache_clear()
    yield times
    kept.hash_of_catalogue.cache_clear()
    kept._code.cache_clear()


def hash_anew():
    kept.hash_of_catalogue.cache_clear()
    kept._code.cache_clear()
    return kept.hash_of_catalogue()


def test_the_hash_of_the_catalogue_is_kept(folder, hashed):
    assert hash_anew() == hash_anew() == "0123456789abcdef"
    assert len(hashed) == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xff", b"0123456789abcdef", b"0123456789abcdee 1"])
def test_a_damaged_hash_of_the_catalogue_is_computed_anew(folder, hashed, content):
    hash_anew()
    (file,) = folder.iterdir()
    file.write_bytes(content)
    assert hash_anew() == "0123456789abcdef"
    assert len(hashed) == 2


@pytest.mark.parametrize("name", ["catalogue.toml", "patterns.py", "attention.py"])
def test_other_cases_are_hashed_anew(folder, hashed, monkeypatch, tmp_path_factory, name):
    hash_anew()
    for room in (cases, definition):
        code = tmp_path_factory.mktemp("code")
        shutil.copytree(room.__path__[0], code, dirs_exist_ok=True)
        monkeypatch.setattr(room, "__path__", [str(code)])
        if (code / name).exists():
            (code / name).write_text((code / name).read_text() + "\n# More.\n")
    hash_anew()
    assert len(hashed) == 2


def damage_end(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def swap_names(path):
    content = path.read_bytes()
    assert b"gradient.key" in content
    path.write_bytes(content.replace(b"gradient.key", b"gradient.kex"))


@pytest.mark.parametrize(
    "damage",
    [
        damage_end,
        swap_names,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b"no tensors"),
    ],
    ids=["a bit", "a name", "empty", "cut off", "other"],
)
def test_a_damaged_file_is_computed_anew_and_replaced(folder, computed, damage):
    problem = problem_of("plain/no-mask/cross")
    want = kept.expectation(problem)
    (path,) = folder.iterdir()
    damage(path)
    assert_same(kept.expectation(problem), want)
    assert_same(kept.expectation(problem), want)
    assert computed == [problem, problem]


def test_off_keeps_nothing(folder, monkeypatch):
    monkeypatch.setenv(kept.VARIABLE, "off")
    kept.expectation(problem_of("plain/no-mask/self"))
    assert kept.cache_folder() is None
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, monkeypatch, computed):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(kept.VARIABLE, str(tmp_path / "file"))
    problem = problem_of("plain/no-mask/self")
    assert_same(kept.expectation(problem), expect(problem))
    assert computed == [problem]


def test_a_full_disk_leaves_no_half_file(folder, monkeypatch):
    def full(file, target):
        assert file.read_bytes()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.Path, "replace", full)
    problem = problem_of("plain/no-mask/self")
    assert_same(kept.expectation(problem), expect(problem))
    assert not list(folder.iterdir())


def test_the_longest_kept_make_room(folder, monkeypatch):
    for age in range(10):
        path = folder / f"{age}.safetensors"
        path.write_bytes(bytes(1000))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(kept, "MOST_BYTES", 9999)
    kept.expectation(problem_of("plain/no-mask/self"))
    left = {path.name for path in folder.iterdir()}
    assert {name for name in left if len(name) < 20} == {f"{i}.safetensors" for i in range(4)}
    assert len(left) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="where it lies depends on the platform")
def test_by_default_it_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.delenv(kept.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.cache_folder() == tmp_path / "mha-conformance" / "expectations"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kept.cache_folder() == tmp_path / "home" / ".cache" / "mha-conformance" / "expectations"


def test_a_process_that_writes_much_makes_room_again(folder, monkeypatch):
    """A run of level "large" alone writes more than the cache may hold."""
    problems = [problem_of("plain/no-mask/self", name) for name in ("float32", "bfloat16")]
    kept.expectation(problems[0])
    (first,) = folder.iterdir()
    os.utime(first, (1e9, 1e9))
    monkeypatch.setattr(kept, "MOST_BYTES", first.stat().st_size - 1)
    monkeypatch.setattr(kept, "_AT_ONCE", 1)
    kept.expectation(problems[1])
    assert not first.exists()
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_what_has_no_gradients_is_kept_without_them(folder, computed, dtype):
    """The rest is the same to the last bit, whatever is in the cache."""
    problem = problem_of("mask/key-padding/cross", dtype)
    every, forward = kept.expectation(problem), kept.expectation(problem, gradients=False)
    assert_same(kept.expectation(problem, gradients=False), forward)
    assert computed == [problem, problem]
    assert list(forward.arrays) == ["output", "weights", ROW_SUMS]
    for ours, theirs in (
        (forward.arrays, every.arrays),
        *zip(forward.noise.values(), every.noise.values(), strict=True),
    ):
        for name in forward.arrays:
            np.testing.assert_array_equal(ours[name], theirs[name], strict=True)
