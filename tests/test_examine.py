"""`conformance.examine`: the outcome as an object, and as the commands see it."""

from __future__ import annotations

import json
import sys
from types import ModuleType

import numpy as np
import pytest
from mutants import miniatures
from mutants.contestant import Contestant
from rich.console import Console

import conformance
from conformance import Outcome, attention_function, examine
from conformance.cli import main
from conformance.definition.problem import Answer
from conformance.errors import ConformanceError, ExitCode, NotAnAdapter, UnknownName
from conformance.records.findings import CaseResult, Finding, Phrase
from conformance.records.record import read, read_arrays
from conformance.running.examine import counted, worst
from conformance.words import say

ONE = {"cases": "mask/shared/self", "dtypes": "float32"}
SOME = {"cases": ["mask/*/self", "probe/masks"], "dtypes": "float32"}


@pytest.fixture(scope="module")
def inverted():
    return examine(miniatures.Inverted, **SOME)


def test_a_correct_implementation():
    outcome = examine(miniatures.Correct, **ONE)
    assert isinstance(outcome, Outcome)
    assert outcome.counts == {"conforms": 1}
    assert outcome.worst is None
    assert outcome.card == []
    assert "conforms" in {row["verdict"] for row in outcome.findings} <= {"conforms", "unsupported"}
    (output,) = (r for r in outcome.findings if r["requirement"] == "output.equals-definition")
    assert (output["array"], output["limit"]) == ("output", 8.0)
    assert 0 < output["max_ratio"] < 8
    assert repr(outcome) == "<Outcome of Correct: 1 conforms>"
    assert str(outcome) == "Correct: 1 conforms"


def test_a_defective_implementation(inverted):
    assert set(inverted.counts) == {"deviates"}
    worst = inverted.worst
    assert worst in inverted.findings
    assert (worst["verdict"], worst["cause_id"]) == ("deviates", "mask.inverted")
    assert worst["max_ratio"] > worst["limit"]
    (entry,) = (row for row in inverted.card if row["subject"] == "mask, bool")
    assert (entry["value"], entry["declared"], entry["agrees"]) == ("blocks", "attends", False)


@pytest.mark.night
def test_it_counts_what_the_command_counts(inverted, tmp_path, capsys):
    options = ["--case", "mask/*/self", "--case", "probe/masks", "--dtype", "float32", "--json"]
    path = str(tmp_path / "r.json")
    spec = f"{miniatures.__file__}:Inverted"
    assert main(["run", spec, *options, "--no-isolate", "--record", path]) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    own = inverted.to_dict()
    for name in ("planned", "missing", "selection", "exit_code"):
        assert own[name] == printed[name], name
    (one,), (other,) = own["implementations"], printed["implementations"]
    assert {**one, "spec": ""} == {**other, "spec": ""}
    # The saved record has the same findings and arrays.
    file = tmp_path / "r.narrowed.json"
    saved = inverted.save(tmp_path / "saved.json")
    first, second = read(file), read(saved)
    assert first.results == second.results
    assert first.digest == second.digest
    # In a process of its own as in this one, it is known how long an item took.
    assert all(result.seconds > 0 for result in first.results)
    assert first.header.cases == second.header.cases
    assert first.header.topics == second.header.topics
    assert read_arrays(saved, second).keys() == inverted.arrays.keys()


def test_a_saved_record_is_read_by_report(inverted, tmp_path, capsys):
    path = inverted.save(str(tmp_path / "mine.json"))
    assert path == tmp_path / "mine.json"
    assert {file.name for file in tmp_path.iterdir()} == {"mine.json", "mine.safetensors"}
    assert read(path).header.name == "mine"
    assert main(["report", str(path), "--output", str(tmp_path / "report")]) == ExitCode.OK
    assert f"Inverted: {len(inverted.results)} deviates" in capsys.readouterr().out
    with pytest.raises(ConformanceError, match=r"ends with \.json"):
        inverted.save(tmp_path / "mine.txt")


def test_its_data_is_plain(inverted):
    data = json.loads(json.dumps(inverted.to_dict()))
    assert data["counts"] == inverted.counts
    assert len(data["findings"]) == len(inverted.findings)
    assert len(data["card"]) == len(inverted.card)


def test_a_table_needs_pandas(inverted, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConformanceError, match=r"needs pandas; install it, or use \.findings"):
        inverted.to_pandas()
    pandas = ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("table", rows)
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert inverted.to_pandas() == ("table", inverted.findings)


def test_a_terminal_and_a_notebook_show_the_worst_item(inverted):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(inverted)
    html = inverted._repr_html_()
    for text in (capture.get(), html):
        assert "Inverted: " in text
        assert f"the worst of {len(inverted.results)} items in full:" in text
        assert "allowed 8σ" in text
    assert html.startswith("<pre>")


def test_nothing_of_an_implementation_is_html():
    class Nasty(miniatures.Raises):
        def attend(self, *arguments, **options):
            raise ValueError("<script>\x1b[2J")

    html = examine(Nasty, **ONE)._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "\x1b" not in html


@attention_function("numpy", miniatures.MASK)
def decorated(query, key, value, mask=None):
    return miniatures.attention(query, key, value, mask)[0]


@pytest.mark.parametrize(
    "given",
    [miniatures.Correct, miniatures.Correct(), decorated, f"{miniatures.__file__}:Correct", "ours"],
)
def test_it_takes_what_the_checks_take(given):
    assert examine(given, **ONE).counts.keys() == {"conforms"}


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        ("torch-mah", {}, UnknownName, "did you mean torch-mha"),
        (int, {}, NotAnAdapter, "derive from"),
        (miniatures.Correct, {"cases": "plain/musk"}, UnknownName, "unknown case"),
        (miniatures.Correct, {"dtypes": "float23"}, UnknownName, "float23"),
        (miniatures.Correct, {"modes": "quick"}, UnknownName, "unknown mode 'quick'"),
        (miniatures.Correct, {"level": "cor"}, UnknownName, "did you mean core"),
        (miniatures.Correct, {"device": "tpu"}, UnknownName, "unknown device 'tpu'"),
        (
            miniatures.Correct,
            {"cases": "probe/masks", "dtypes": "float64"},
            ConformanceError,
            "no item matches --case probe/masks --dtype float64",
        ),
    ],
)
def test_what_matches_nothing_is_an_error(given, options, error, text):
    with pytest.raises(error, match=text):
        examine(given, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--case", "plain/musk"], "unknown case"),
        (["--dtype", "float23"], "float23"),
        (["--mode", "quick"], "unknown mode 'quick'"),
        (
            ["--level", "core", "--case", "key-padding/narrow"],
            "not in level core; without",
        ),
        (["--level", "core", "--case", "probe/dropout"], "probe/dropout is not in level core"),
        (["--level", "large", "--case", "key-padding/narrow"], "is not in level large; without"),
    ],
)
def test_the_command_says_the_same(options, text, capsys):
    spec = f"{miniatures.__file__}:Correct"
    assert main(["run", spec, "--no-isolate", *options]) == ExitCode.USAGE
    assert text in capsys.readouterr().err


def test_core_is_less_and_one_mode_is_one():
    core = examine(miniatures.Refuses, level="core")
    # What is refused in every dtype is asked in one.
    assert {row.dtype for row in core.results} == {"float32"}
    assert core.record.header.provenance.selection == "--level core"
    assert core.to_dict()["exit_code"] == ExitCode.NOTHING_VERIFIED
    both = examine(Contestant(), level="core", cases="key-padding")
    names = {row.case.removeprefix("mask/key-padding/") for row in both.results}
    assert {"cross", "self", "separate", "square"} <= names
    assert {row.dtype for row in both.results} == {"float32", "bfloat16"}
    rough = examine(miniatures.Moded, cases="plain/no-mask/self", dtypes="float32", modes="rough")
    assert [row.mode for row in rough.results] == ["rough"]


def test_it_is_public():
    assert {"examine", "Outcome"} <= {*conformance.__all__}
    assert {"examine", "Outcome"} <= {*dir(conformance)}


class WithUndeclaredGradients(miniatures.Raw):
    def run(self, problem, call):
        found = super().run(problem, call)
        return Answer(found.output, found.weights, {"query": np.zeros_like(problem.query)})


def test_gradients_that_are_not_declared_are_not_compared():
    """They are not expected either, which would take most of the time."""
    asked = {"cases": "plain/no-mask/cross", "dtypes": "float32"}
    one, other = (
        [(row["requirement"], row["verdict"]) for row in examine(kind, **asked).findings]
        for kind in (miniatures.Raw, WithUndeclaredGradients)
    )
    assert one == other
    assert ("output.equals-definition", "conforms") in one


def test_causes_that_differ_in_their_numbers_are_one():
    def result(case, cause):
        wrong = Finding("output.equals-definition", "deviates", "the output", cause=cause)
        return CaseResult("mine", case, "float32", "cpu", "default", [wrong])

    added = Phrase("mask.added-where-attended")
    factors = [Phrase("scale.factor", {"factor": factor}) for factor in (0.5, 0.8, 0.8)]
    results = [
        *(result("mask/shared/self", added) for _ in range(2)),
        *(result("plain/no-mask/cross", cause) for cause in factors),
    ]
    (line,) = (line for line in counted("mine", results, reasons=False) if "output." in line)
    assert line.endswith(f"(3 of them, with other numbers: {say(factors[1])})")
    shown, count = worst(results)
    assert (shown.findings[0].cause.id, count) == ("scale.factor", 5)
