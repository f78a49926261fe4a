"""A case file is read whole or refused, with one line; what was written comes back, bit for bit."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from conformance.cases import casefile
from conformance.cases.casefile import KEY, Failure, load_case, look, read, store
from conformance.cli import main
from conformance.errors import BrokenCase, ConformanceError, ExitCode
from conformance.explore.drawing import Frame, Recipe

HERE = Path(__file__).parent
FOUND = Failure("fake", "float32", "default", "output.equals-definition", "off", {"numpy": "2"})
RECIPE = Recipe(
    frame=Frame(sharing="memory"), query=2, mask="per-head", bias="per-head", scale=0.75
)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "a.case"
    store(path, "tiny", RECIPE.problem("float32"), "because", FOUND)
    return path


def changed(path, *, arrays=None, gone=(), **description):
    """The file with other arrays or another description."""
    numbers = load_file(path) | (arrays or {})
    numbers = {name: array for name, array in numbers.items() if name not in gone}
    described = json.loads(look(path).metadata[KEY])
    shape = description.pop("shape", {})
    described |= description
    described["shape"] |= shape
    save_file(numbers, path, {KEY: json.dumps(described)})
    return path


@pytest.mark.parametrize("sharing", ["self", "memory", "separate"])
@pytest.mark.parametrize("causal", [None, "top-left"])
def test_what_is_written_comes_back(tmp_path, sharing, causal):
    recipe = Recipe(frame=Frame(sharing=sharing), mask="padding", causal=causal, bias="shared")
    problem = recipe.problem("float32")
    written = store(tmp_path / "a.case", "tiny", problem, "because", FOUND)
    case, found = read(tmp_path / "a.case")
    again = case.problem("float32")
    assert found == FOUND
    assert case.id == written.id
    assert case.id.startswith("file/tiny/")
    assert again.shape == problem.shape
    assert again.causal == causal
    assert (again.key is again.query) == (sharing == "self")
    for name in ("query", "key", "value", "cotangent", "mask", "attn_bias"):
        assert np.array_equal(getattr(again, name), getattr(problem, name))
    for name, array in problem.weights.named().items():
        assert np.array_equal(getattr(again.weights, name), array)


def test_features_come_back_and_decide_what_the_case_is_called(tmp_path):
    plain = RECIPE.problem("float32")
    names = set()
    for number, fields in enumerate(
        ({}, {"window": (1, None)}, {"soft_cap": 2.0}, {"sinks": np.ones(plain.shape.heads)})
    ):
        path = tmp_path / f"{number}.case"
        case = store(path, "tiny", plain.replace(**fields), "because", FOUND)
        again = load_case(path)
        assert again.id == case.id
        assert again.problem("float32").digest() == plain.replace(**fields).digest()
        names.add(case.id)
    assert len(names) == 4


def test_numbers_are_rounded_to_the_dtype_that_is_asked_for(stored):
    problem = load_case(stored).problem("bfloat16")
    assert problem.dtype == "bfloat16"
    assert np.array_equal(problem.query, problem.format.round(problem.query))


def test_other_numbers_have_another_id(stored):
    before = load_case(stored).id
    query = load_file(stored)["query"] + 1
    assert load_case(changed(stored, arrays={"query": query})).id != before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "mha-conformance/case/2"}, "schema"),
        ({"name": "../../etc"}, "letters"),
        ({"name": ""}, "letters"),
        ({"extra": 1}, "description"),
        ({"causal": "diagonal"}, "description"),
        ({"scale": 1e-40}, "scale"),
        ({"scale": 1e300}, "scale"),
        ({"gone": ["query"]}, "missing ['query']"),
        ({"gone": ["weights.output_bias"]}, "missing ['weights.output_bias']"),
        ({"arrays": {"extra": np.zeros(2)}}, "too many ['extra']"),
        ({"arrays": {"query": np.zeros((1, 2, 3), np.float32)}}, "must be F64"),
        ({"arrays": {"mask": np.zeros((1, 1, 1, 1))}}, "must be U8"),
        ({"arrays": {"query": np.full((2, 2, 6), np.nan)}}, "not finite"),
        ({"arrays": {"query": np.full((2, 2, 6), 1e200)}}, "beyond"),
        ({"arrays": {"mask": np.full((1, 1, 1, 3), 2, np.uint8)}}, "0 and 1"),
        ({"arrays": {"mask": np.zeros((1, 1, 1, 3), np.uint8)}}, "no key"),
        ({"shape": {"batch": 3}}, "has shape"),
        ({"shape": {"batch": -1}}, "description"),
        ({"shape": {"batch": 10**12}}, "description"),
        ({"shape": {"heads": 2**20, "kv_heads": 2**20}}, "numbers there"),
        ({"shape": {"heads": 10**400}}, "description"),
        ({"shape": {"head_size": 0}}, "numbers there"),
        ({"shape": {"kv_heads": 0}}, "heads"),
        ({"shape": {"sharing": "self"}}, "one array"),
        ({"shape": {"score": "cosine"}}, "description"),
    ],
)
def test_what_is_not_as_it_must_be_is_refused(stored, change, told):
    with pytest.raises(BrokenCase) as error:
        load_case(changed(stored, **change))
    assert told in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 64, b"PK\x03\x04 not a case"])
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "a.case"
    path.write_bytes(content)
    with pytest.raises(BrokenCase):
        load_case(path)


def test_weights_of_a_model_are_no_case(tmp_path):
    save_file({"w": np.zeros(3)}, tmp_path / "a.case")
    with pytest.raises(BrokenCase, match="no case file"):
        load_case(tmp_path / "a.case")


def test_folders_and_missing_files_are_refused(tmp_path):
    with pytest.raises(BrokenCase, match="no file"):
        load_case(tmp_path)
    with pytest.raises(BrokenCase, match="cannot be read"):
        load_case(tmp_path / "nothing.case")


def test_an_oversized_file_is_refused_before_it_is_read(stored, monkeypatch):
    monkeypatch.setattr(casefile, "MOST_BYTES", 100)
    monkeypatch.setattr(casefile, "look", None)
    with pytest.raises(BrokenCase, match="at most 100"):
        load_case(stored)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_or_make_a_whole_case(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("case") / "a.case"
    store(path, "tiny", Recipe(batch=1, kv_heads=1, size=1).problem("float32"), "", None)
    content = bytearray(path.read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    else:
        content[at:at] = data.draw(st.binary(min_size=1, max_size=16))
    path.write_bytes(bytes(content))
    with suppress(BrokenCase):
        assert np.isfinite(load_case(path).problem("float32").query).all()


@pytest.mark.night
@settings(max_examples=100, deadline=None)
@given(
    field=st.sampled_from(["name", "why", "shape", "causal", "scale", "found", "schema"]),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=5,
    ),
)
def test_any_description_is_refused_or_makes_a_whole_case(tmp_path_factory, field, value):
    path = tmp_path_factory.mktemp("case") / "a.case"
    store(path, "tiny", Recipe(batch=1, kv_heads=1, size=1).problem("float32"), "", None)
    numbers, described = load_file(path), json.loads(look(path).metadata[KEY])
    described[field] = value
    save_file(numbers, path, {KEY: json.dumps(described)})
    with suppress(BrokenCase):
        assert load_case(path).id.startswith("file/")


def test_nothing_is_written_where_nothing_can_be(tmp_path):
    with pytest.raises(ConformanceError):
        store(tmp_path / "no" / "a.case", "tiny", RECIPE.problem("float32"), "", None)
    with pytest.raises(BrokenCase):
        store(tmp_path / "a.case", "Tiny!", RECIPE.problem("float32"), "", None)
    assert not list(tmp_path.iterdir())


# In a run


def test_a_broken_case_file_ends_the_run_with_one_line(tmp_path, capsys):
    (tmp_path / "a.case").write_bytes(b"broken")
    code = main(
        ["run", f"{HERE}/mutants/miniatures.py:Correct", "--case-file", str(tmp_path / "a.case")]
    )
    assert code == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_the_record_names_the_file_and_counts_as_narrowed(stored, tmp_path):
    arguments = ["run", f"{HERE}/mutants/miniatures.py:Correct", "--case-file", str(stored)]
    arguments += ["--case", "file/tiny", "--dtype", "float32", "--no-isolate"]
    assert main([*arguments, "--record", str(tmp_path / "r.json")]) == ExitCode.OK
    assert not (tmp_path / "r.json").exists()
    record = msgspec.json.decode((tmp_path / "r.narrowed.json").read_bytes())
    assert load_case(stored).id in record["header"]["provenance"]["selection"]
    assert [result["case"] for result in record["results"]] == [load_case(stored).id]


def test_the_command_in_a_failure_names_the_file(stored, capsys):
    arguments = [
        "run",
        f"{HERE}/mutants/deviants.py:Batched",
        "--case-file",
        str(stored),
        "--strict",
    ]
    assert main([*arguments, "--case", "file/", "--dtype", "float32"]) == ExitCode.DEVIATES
    assert f"--case-file {stored}" in capsys.readouterr().out


def test_without_a_pattern_it_joins_the_catalogue(stored, capsys):
    arguments = ["run", f"{HERE}/mutants/miniatures.py:Correct", "--case-file", str(stored)]
    main([*arguments, "--collect-only", "-k", "file/tiny or plain/no-mask/self"])
    told = capsys.readouterr().out
    assert "file/tiny" in told
    assert "plain/no-mask/self" in told
