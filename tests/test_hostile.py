"""Records are data from strangers: whatever is in them is refused in a line, or shown as it is.

Bytes are mutated, then values that fit the schema; the reader may refuse, and nothing may crash,
hang, write elsewhere, or reach a terminal or a page as anything but text.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import children
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from records import render_html, resealed

from conformance.cli import main
from conformance.errors import BrokenRecord, ExitCode
from conformance.records.record import Record, read, read_arrays, read_journal
from conformance.reports.page.markdown import render_markdown
from conformance.reports.writing import build
from conformance.text import printable

HERE = Path(__file__).parent
NASTY = "\x1b]0;owned\x07\x1b[2J</title><script>alert(1)</script>\u202e|`x`\r\n"
QUICKLY = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A record with findings, figures, entries and arrays, of a small wrong implementation."""
    folder = tmp_path_factory.mktemp("records")
    spec = f"{HERE / 'mutants/miniatures.py'}:Inverted"
    cases = ("mask/key-padding/cross", "edge/fully-masked-row/cross", "probe/masks")
    cases += ("probe/same-mask", "probe/masked-rows")
    told = [part for case in cases for part in ("--case", case)]
    main(["run", spec, *told, "--dtype", "float32", "--record", str(folder / "r.json")])
    (folder / "r.narrowed.json").rename(folder / "whole.json")
    document = json.loads((folder / "whole.json").read_text())
    assert any(result.get("entries") for result in document["results"])
    assert document["exchange"]
    return folder


@pytest.fixture(scope="module")
def content(folder):
    return (folder / "whole.json").read_bytes()


def mutated(data: st.DataObject, content: bytes) -> bytes:
    """The bytes with a few changed, taken out, put in or repeated."""
    found = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(len(found) - 1, 0)))
        length = data.draw(st.sampled_from([1, 2, 17, 400]))
        kind = data.draw(st.sampled_from(["change", "drop", "insert", "repeat", "cut"]))
        if kind == "change":
            found[at : at + length] = data.draw(st.binary(min_size=1, max_size=length))
        elif kind == "drop":
            del found[at : at + length]
        elif kind == "insert":
            found[at:at] = data.draw(st.binary(min_size=1, max_size=length))
        elif kind == "repeat":
            found[at:at] = found[at : at + length]
        else:
            del found[at:]
    return bytes(found)


def shown(record: Record, path: Path, arrays: dict | None = None) -> str:
    """Everything that a report makes of a record."""
    report = build([(path, record, arrays or {})])
    # In Markdown a command stands in a fence, where markup is text; the renderer escapes it.
    pages = [
        render_html(report, None, [(path, record, arrays or {})]),
        MarkdownIt().enable("table").render(render_markdown(report)),
    ]
    return "\n".join(pages)


@pytest.mark.night
@QUICKLY
@given(data=st.data())
def test_a_mutated_record_is_read_or_refused(data, content, tmp_path):
    path = tmp_path / "r.json"
    path.write_bytes(mutated(data, content))
    try:
        record = read(path)
    except BrokenRecord as error:
        assert str(path) in str(error)  # noqa: PT017 - reading it is as good
        return
    shown(record, path)


@QUICKLY
@given(data=st.data())
def test_a_mutated_journal_is_read_or_refused(data, folder, tmp_path):
    document = json.loads((folder / "whole.json").read_text())
    lines = [json.dumps(document["header"])]
    lines += [json.dumps({"result": result}) for result in document["results"]]
    path = tmp_path / "r.json.journal"
    path.write_bytes(mutated(data, ("\n".join(lines) + "\n").encode()))
    try:
        read_journal(path)
    except BrokenRecord:
        return


@QUICKLY
@given(data=st.data())
def test_mutated_arrays_are_refused(data, folder, tmp_path):
    record = read(folder / "whole.json")
    original = (folder / record.exchange).read_bytes()
    changed = mutated(data, original)
    (tmp_path / record.exchange).write_bytes(changed)
    try:
        read_arrays(tmp_path / "whole.json", record)
        assert changed == original
    except BrokenRecord:
        assert changed != original


def places(document: object, path: tuple = ()) -> list[tuple]:
    """Paths to every string and number of a JSON document."""
    if isinstance(document, dict):
        return [p for key, value in document.items() for p in places(value, (*path, key))]
    if isinstance(document, list):
        return [p for i, value in enumerate(document[:6]) for p in places(value, (*path, i))]
    return [path]


VALUES = st.one_of(
    st.just(NASTY),
    st.text(max_size=12),
    st.sampled_from([-1, 0, 10**18, 1e308, -1e308, 5e-324, "", "nan", "../../etc/passwd"]),
    st.just("x" * 5000),
)


@QUICKLY
@given(data=st.data())
def test_values_that_fit_the_schema_can_be_anything(data, content, tmp_path):
    document = json.loads(content)
    known = places(document)
    for _ in range(data.draw(st.integers(1, 6))):
        *inner, last = data.draw(st.sampled_from(known))
        place = document
        for key in inner:
            place = place[key]
        place[last] = data.draw(VALUES)
    path = tmp_path / "r.json"
    path.write_text(resealed(document))
    try:
        record = read(path)
        arrays = read_arrays(path, record)
    except BrokenRecord:
        return
    page = shown(record, path, arrays)
    assert "<script>alert(1)" not in page


def test_every_string_of_a_record_is_text_on_every_page(content, tmp_path):
    """All strings at once that the schema lets be anything."""
    document = json.loads(content)
    fixed = {"schema", "verdict", "exchange", "digest", "case", "requirement"}
    fixed |= {"made_by", "kind"}
    for *inner, last in places(document):
        place = document
        for key in inner:
            place = place[key]
        if isinstance(place[last], str) and last not in fixed:
            place[last] = NASTY
    path = tmp_path / "r.json"
    path.write_text(resealed(document))
    page = shown(msgspec.json.decode(path.read_bytes(), type=Record), path)
    assert "<script>alert(1)" not in page
    assert "&lt;script&gt;" in page


def test_arrays_of_any_shape_are_no_reason_to_crash(folder):
    record = read(folder / "whole.json")
    names = list(read_arrays(folder / "whole.json", record))
    odd = [np.zeros(()), np.zeros((0, 3)), np.full((2, 2, 2), np.nan), np.zeros((1, 7))]
    for array in odd:
        shown(record, folder / "whole.json", dict.fromkeys(names, array))


def test_a_report_of_a_hostile_record_prints_no_control_sequence(content, tmp_path):
    document = json.loads(content)
    name = "evil\x1b[31m\u202e"
    document["header"]["implementations"][0]["name"] = name
    for result in document["results"]:
        result["implementation"] = name
    del document["exchange"], document["digest"]
    path = tmp_path / "evil\x1b[2J.json"
    path.write_text(resealed(document))
    (tmp_path / "broken\x1b[2J.json").write_text("{")
    command = [sys.executable, "-m", "conformance", "report", str(tmp_path)]
    command += ["--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    printed = done.stdout + done.stderr
    assert "evil" in printed
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed), repr(printed)


EVIL = """
from conformance import MaskArgument, attention_function

@attention_function("numpy", MaskArgument("mask", "query key", true="attends"), title="\\x1b[2Jx")
def evil(query, key, value, mask=None):
    raise ValueError("\\x1b]0;owned\\x07\\u202e[bold]not markup[/bold]")
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "command",
    [
        ["run", "{spec}", "--case", "plain/no-mask/cross", "--case", "probe/masks"],
        ["run", "{spec}", "--case", "plain/no-mask/cross", "--strict"],
        ["probe", "{spec}", "--evidence", "--code"],
    ],
    ids=lambda command: command[0] + command[-1],
)
def test_what_an_implementation_says_is_no_control_sequence(command, tmp_path):
    (tmp_path / "evil.py").write_text(EVIL)
    spec = str(tmp_path / "evil.py") + ":evil"
    arguments = [part.format(spec=spec) for part in command]
    done = subprocess.run(
        children.python("-m", "conformance", *arguments),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "", "NO_COLOR": "1", "PYTHONPATH": ":".join(sys.path), "TERM": "dumb"},
    )
    printed = done.stdout + done.stderr
    assert "Traceback" not in printed
    assert "evil" in printed
    if command[0] == "probe" or "--strict" in command:
        assert "x1b]0;owned" in printed
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", printed), repr(printed)


@given(st.text())
def test_printable_text_prints_and_loses_nothing(text):
    shown_text = printable(text)
    assert all(char.isprintable() or char == "\n" for char in shown_text)
    if text.isprintable():
        assert shown_text == text


def test_an_oversized_record_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    with path.open("wb") as file:
        file.truncate(600 * 2**20)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("it was read"))
    with pytest.raises(BrokenRecord, match="more than a record can have"):
        read(path)


def test_a_closed_pipe_ends_a_command_quietly(tmp_path):
    command = f"{sys.executable} -m conformance list cases | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert not done.stderr
    # A short list may be written before anybody can close the pipe.
    assert int(done.stdout.splitlines()[-1]) in (ExitCode.OK, ExitCode.CLOSED)


@pytest.mark.parametrize("what", ["requirements", "cases --schema"])
def test_a_pipe_that_was_closed_before_is_as_quiet(what):
    listed = f"{{ sleep 0.5; {sys.executable} -m conformance list {what}; }}"
    command = f"{listed} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert not done.stderr
    assert int(done.stdout) == ExitCode.CLOSED


@pytest.mark.parametrize("what", ["requirements", "cases --schema"])
def test_a_pipe_that_is_closed_while_the_last_lines_wait_is_as_quiet(tmp_path, monkeypatch, what):
    with (tmp_path / "nobody").open("w") as file, monkeypatch.context() as patch:

        def closed():
            raise BrokenPipeError

        patch.setattr(file, "flush", closed, raising=False)
        patch.setattr(sys, "stdout", file)
        assert main(["list", *what.split()]) == ExitCode.CLOSED


def test_the_document_of_a_record_is_not_changed_by_reading(content):
    document = json.loads(content)
    assert copy.deepcopy(document) == json.loads(msgspec.json.encode(json.loads(content)))
