"""Records: what was found survives interruptions, and what is broken is not half read."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants.miniatures import Correct
from records import resealed

from conformance.errors import BrokenRecord, ConformanceError
from conformance.records import record as records
from conformance.records.findings import (
    INFINITE,
    NOTHING,
    VERDICTS,
    CaseResult,
    Figures,
    Finding,
    Phrase,
    Topic,
    Worst,
    gravity,
    without_outcome,
)
from conformance.records.header import (
    SCHEMA,
    Header,
    Implementation,
    MaskInfo,
    Provenance,
    described,
)
from conformance.records.record import (
    Journal,
    check_sealed,
    check_writable,
    decode_line,
    encode_line,
    finish,
    journal_path,
    read,
    read_arrays,
    read_journal,
)
from conformance.running import provenance
from conformance.running.provenance import describe, header_of, new_run_id, run_id

HEADER = Header(
    schema=SCHEMA,
    name="r",
    provenance=Provenance(
        suite="0", catalogue="c", created="2026-01-01T00:00:00+00:00", run="run", python="3",
        platform="p", device="cpu", device_model="cpu", packages={"numpy": "2"}, command="run",
    ),
    implementations=[
        Implementation(
            "a", "A", "https://a", "numpy", "a.py:A", {"numpy": "2"}, ["default"], ["float32"],
            [MaskInfo("mask", ["batch key"], "attends", None)],
        )
    ],
    planned=3,
)  # fmt: skip


def result(case="plain/no-mask/self", **fields):
    worst = Worst("output", (1, 0, 2), "nan", "-inf", "1e-07")
    figures = Figures("output", INFINITE, 2.5, -0.25, 8.0, "A")
    finding = Finding(
        "output.equals-definition", "deviates", "off", NOTHING, figures, worst, Phrase("a cause")
    )
    found = CaseResult("a", case, "float32", "cpu", "default", [finding])
    return msgspec.structs.replace(found, **fields)


ARRAYS = {
    "output": np.array([[np.nan, np.inf, -np.inf], [0.0, -0.0, 5e-324]]),
    "want": np.arange(6.0).reshape(1, 2, 3)[..., ::-1],
    "noise": np.zeros((0, 3)),
}


def journal(path, *lines):
    written = Journal(path, HEADER)
    for line in lines:
        written.add(line)
    written.close()
    return journal_path(path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "r.json"


@pytest.fixture
def whole(path):
    """A finished record with two results and the arrays of one."""
    journal(path, encode_line(result(), ARRAYS), encode_line(result("mask/shared/self"), {}))
    finish(path)
    return path


def broken(path):
    """The one line that reading says."""
    with pytest.raises(BrokenRecord) as caught:
        read(path)
    told = str(caught.value)
    assert "\n" not in told
    assert path.name in told
    return told


# Journal to record


def test_a_journal_becomes_a_record(path):
    beside = journal(path, encode_line(result(), ARRAYS), encode_line(result("x/y/z"), {}))
    assert not path.exists()
    written = finish(path)
    assert not beside.exists()
    assert written == read(path)
    assert written.header == HEADER
    assert written.complete
    assert written.results == [result(), result("x/y/z")]
    assert sorted(p.name for p in path.parent.iterdir()) == ["r.json", "r.safetensors"]


def test_what_has_no_outcome_is_filled_in(path):
    journal(path, encode_line(result(), {}))
    missing = result("x/y/z", findings=[Finding("run", "not-run")])
    written = finish(path, [missing])
    assert not written.complete
    assert written.results == [result(), missing]
    assert not read(path).complete


def test_a_record_is_a_document_for_people_too(whole):
    text = whole.read_text()
    assert text.endswith("}\n")
    assert json.loads(text)["header"]["schema"] == SCHEMA


def test_a_second_run_replaces_the_first(whole):
    journal(whole, encode_line(result("x/y/z"), {}))
    assert len(read(whole).results) == 2, "the record stays until the run is over"
    finish(whole)
    assert [item.case for item in read(whole).results] == ["x/y/z"]
    assert read_arrays(whole, read(whole)) == {}


def test_each_line_is_on_disk_when_it_was_added(path):
    written = Journal(path, HEADER)
    for count in range(3):
        assert len(read_journal(journal_path(path))[1]) == count
        written.add(encode_line(result(), {}))
    written.close()


def test_an_unfinished_journal_reads_as_an_incomplete_record(path):
    beside = journal(path, encode_line(result(), ARRAYS))
    found = read(beside)
    assert not found.complete
    assert found.results == [result()]


# Arrays


def same(one, other):
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def test_arrays_survive_bit_for_bit(whole):
    found = read_arrays(whole, read(whole))
    own = {name.split("|")[1]: array for name, array in found.items()}
    assert {name.split("|")[0] for name in found} == {result().id}
    assert own.keys() == ARRAYS.keys()
    assert all(same(own[name], np.ascontiguousarray(array)) for name, array in ARRAYS.items())


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.floats(), max_size=12),
    st.text(max_size=8),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
def test_a_line_is_decoded_as_it_was_encoded(values, name, shape):
    size = int(np.prod(shape))
    array = np.resize(np.array(values), size).reshape(shape) if values else np.zeros((0,))
    found, arrays = decode_line(encode_line(result(), {name: array}))
    assert found == result()
    assert same(arrays[name], array)


def test_arrays_of_other_dtypes_become_float64():
    arrays = {"a": np.float32([0.1]), "b": np.array([True]), "c": np.array([1], np.int64)}
    _, found = decode_line(encode_line(result(), arrays))
    assert found["a"][0] == np.float32(0.1)
    assert found["b"][0] == 1.0
    assert found["c"][0] == 1.0


def test_missing_arrays(whole):
    (whole.parent / "r.safetensors").unlink()
    with pytest.raises(BrokenRecord, match=r"r\.safetensors: cannot be read \(No such file"):
        read_arrays(whole, read(whole))


def test_a_process_that_ends_between_two_files_leaves_one_record(whole, monkeypatch):
    """Whichever file is replaced last, the record that is there has its arrays."""
    before = read(whole)
    replace = Path.replace
    for most in range(3):
        calls = iter(range(most))

        def ends(path, to, calls=calls):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return replace(path, to)

        journal(whole, encode_line(result(), {"output": np.ones(3) * most}))
        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", ends)
            if most < 2:
                with pytest.raises(KeyboardInterrupt):
                    finish(whole)
            else:
                finish(whole)
        found = read(whole)
        (*_, last) = read_arrays(whole, found).values()
        if most == 0:
            assert found == before
        else:
            assert last.tolist() == [most] * 3
    assert not (whole.parent / "r.safetensors.new").exists()


def test_tampered_arrays(whole):
    file = whole.parent / "r.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(BrokenRecord, match=r"does not belong to r\.json; run again"):
        read_arrays(whole, read(whole))


def test_arrays_of_another_run(whole):
    (whole.parent / "other").mkdir()
    other = whole.parent / "other" / "r.json"
    journal(other, encode_line(result(), {"output": np.ones(3)}))
    finish(other)
    (other.parent / "r.safetensors").replace(whole.parent / "r.safetensors")
    with pytest.raises(BrokenRecord, match="does not belong"):
        read_arrays(whole, read(whole))


def test_arrays_that_are_none(whole):
    content = b"no arrays at all"
    (whole.parent / "r.safetensors").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    found = msgspec.structs.replace(read(whole), digest=digest)
    with pytest.raises(BrokenRecord, match=r"r\.safetensors: is damaged .*; run again"):
        read_arrays(whole, found)


@pytest.mark.parametrize(
    "name", ["../r.safetensors", "/etc/passwd", "sub/r.safetensors", "./r.safetensors", "..", "."]
)
def test_a_record_names_arrays_in_its_own_folder_only(whole, name):
    found = msgspec.structs.replace(read(whole), exchange=name)
    with pytest.raises(BrokenRecord):
        read_arrays(whole, found)


def test_a_name_outside_is_refused_even_with_the_right_digest(whole):
    outside = whole.parent.parent / "r.safetensors"
    outside.write_bytes((whole.parent / "r.safetensors").read_bytes())
    found = msgspec.structs.replace(read(whole), exchange="../r.safetensors")
    with pytest.raises(BrokenRecord, match="names arrays outside its own folder"):
        read_arrays(whole, found)


def test_a_name_that_no_file_can_have(whole):
    found = msgspec.structs.replace(read(whole), exchange="a\0b")
    with pytest.raises(BrokenRecord, match="cannot be read"):
        read_arrays(whole, found)


# Broken journals


def test_a_last_line_that_was_cut_off_is_left_out(path):
    beside = journal(path, encode_line(result(), {}), encode_line(result("x/y/z"), ARRAYS))
    content = beside.read_bytes()
    start = content.rstrip(b"\n").rindex(b"\n") + 1
    for end in (start, start + 1, (start + len(content)) // 2, len(content) - 2):
        beside.write_bytes(content[:end])
        header, results, arrays = read_journal(beside)
        assert header == HEADER
        assert results == [result()]
        assert arrays == {}


def test_a_last_line_that_lacks_only_its_end(path):
    beside = journal(path, encode_line(result(), {}))
    beside.write_bytes(beside.read_bytes().rstrip(b"\n"))
    assert read_journal(beside)[1] == [result()]


def test_a_last_line_that_is_whole_but_wrong(path):
    beside = journal(path, encode_line(result(), {}), b'{"result": 1}')
    with pytest.raises(BrokenRecord, match=r"r\.json\.journal, line 3: a journal line cannot be"):
        read_journal(beside)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 5000,
        encode_line(result(), ARRAYS)[:-9],
        encode_line(result(), {}).replace(b"deviates", b"excused "),
        encode_line(result(), ARRAYS).replace(b"[2,3]", b"[2,4]"),
        encode_line(result(), ARRAYS).replace(b"[2,3]", b"[%d,3]" % 2**80),
        encode_line(result(), {"a": np.ones(2)}).replace(b"[2]", b'[true]'),
    ],
    ids=repr,
)  # fmt: skip
def test_a_corrupted_line_in_the_middle(path, line):
    beside = journal(path, line, encode_line(result(), {}))
    with pytest.raises(BrokenRecord, match=r"r\.json\.journal, line 2: "):
        read_journal(beside)


@pytest.mark.parametrize("header", [b"", b"{}", b"[]", b'{"schema": 1}', b"\x00", b'{"x":' * 5000])
def test_a_journal_without_its_header(path, header):
    beside = journal_path(path)
    beside.write_bytes(header + b"\n" + encode_line(result(), {}) + b"\n")
    assert "no journal of this suite" in broken(beside)


def test_an_empty_journal(path):
    journal_path(path).write_bytes(b"")
    assert "no journal of this suite" in broken(journal_path(path))


def test_a_journal_of_another_schema(path):
    beside = journal(path, encode_line(result(), {}))
    other = beside.read_bytes().replace(SCHEMA.encode(), b"mha-conformance/record/9")
    beside.write_bytes(other)
    assert "has schema 'mha-conformance/record/9', this suite reads" in broken(beside)


# Broken records


def test_no_file(path):
    assert "cannot be read (No such file or directory)" in broken(path)


def test_a_folder(tmp_path):
    assert "cannot be read" in broken(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "", "no json", "{}", "[]", "null", '{"header": 3}', '{"header": {}}', "[" * 9999,
        '{"x":' * 9999, '{"header": {"schema": "s"}, "x": ' + "[" * 9999,
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_foreign_files(path, text):
    path.write_text(text)
    assert "no record of this suite, or cut off" in broken(path)


def test_another_schema(whole):
    whole.write_text(whole.read_text().replace(SCHEMA, "mha-conformance/record/9"))
    told = broken(whole)
    assert "has schema 'mha-conformance/record/9', this suite reads" in told
    assert told.endswith("; run again")


def test_a_record_of_which_any_end_is_missing(whole):
    content = whole.read_bytes().rstrip()
    for end in range(0, len(content), 97):
        whole.write_bytes(content[:end])
        broken(whole)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"deviates"', '"excused"'),
        ('"float32"', "32"),
        ('"complete": true', '"complete": 1'),
        ('"planned": 3', '"planned": "3"'),
        ('"max_ratio": ', '"max_ratio": "big", "was": '),
        ('"results": [', '"results": [null, '),
    ],
)
def test_a_damaged_record(whole, old, new):
    text = json.dumps(json.loads(whole.read_text()))
    assert old in text
    whole.write_text(text.replace(old, new, 1))
    assert "is damaged" in broken(whole)


def test_a_record_that_is_too_large_is_not_read(whole, monkeypatch):
    size = whole.stat().st_size
    monkeypatch.setattr(records, "MOST_BYTES", size)
    assert read(whole)
    monkeypatch.setattr(records, "MOST_BYTES", size - 1)
    assert f"{size} bytes are more than a record can have" in broken(whole)
    monkeypatch.setattr(records, "MOST_BYTES", 1)
    with pytest.raises(BrokenRecord, match="more than a record can have"):
        read_arrays(whole, msgspec.structs.replace(read_unbounded(whole)))


def packed(path, content):
    file = path.with_name("r.json.gz")
    file.write_bytes(content)
    return file


def test_a_compressed_record_is_read_and_bounded(whole, monkeypatch):
    text = whole.read_bytes()
    content = gzip.compress(text)
    assert read(packed(whole, content)) == read(whole)
    assert "is cut off" in broken(packed(whole, content[:-9]))
    assert "is damaged" in broken(packed(whole, b"no gzip"))
    monkeypatch.setattr(records, "MOST_BYTES", len(text) - 1)
    assert f"more than {len(text) - 1} bytes" in broken(packed(whole, content))


def test_what_is_no_regular_file_is_not_read(tmp_path):
    path = tmp_path / "r.json"
    path.symlink_to("/dev/null")
    assert "cannot be read" in broken(path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"results": [result(), result()]}, "is there 2 times"),
        ({"results": [result(implementation="b")]}, "no implementation is called 'b'"),
        ({"results": [result("x\ny")]}, "has several lines"),
        ({"results": [result(str(i)) for i in range(4)]}, "3 items are planned, 4 are there"),
        ({"implementations": [*HEADER.implementations] * 2}, "2 implementations are called 'a'"),
        ({"planned": records.MOST_PLANNED + 1}, "items are planned, 0 are there"),
    ],
    ids=["item", "implementation", "line", "more", "name", "endless"],
)
def test_a_record_that_contradicts_itself_is_not_read(path, changes, told):
    results = changes.pop("results", [])
    header = msgspec.structs.replace(HEADER, **changes)
    records.save(path, records.Record(header, True, results))
    assert told in broken(path)


def test_as_many_items_as_are_planned_may_be_there(path):
    header = msgspec.structs.replace(HEADER, planned=records.MOST_PLANNED)
    records.save(path, records.Record(header, False, [result(str(i)) for i in range(3)]))
    assert len(read(path).results) == 3
    records.save(path, records.Record(HEADER, True, [result(str(i)) for i in range(3)]))
    assert len(read(path).results) == HEADER.planned


def test_arrays_that_nobody_wants_are_not_kept(path):
    journal(path, encode_line(result(), ARRAYS))
    written = finish(path, keep=lambda name: name.endswith("|want"))
    assert [*read_arrays(path, written)] == [f"{result().id}|want"]


def test_parts_of_a_phrase_are_of_their_kind():
    inner = Phrase("y")
    phrase = Phrase("x", {"text": "t", "phrase": inner, "number": 1, "list": ["t", inner]})
    kinds = {"text": ("t", NOTHING, []), "phrase": ("", inner, []), "number": ("", NOTHING, []),
             "list": ("", NOTHING, ["t", inner]), "absent": ("", NOTHING, [])}  # fmt: skip
    for argument, parts in kinds.items():
        assert (phrase.name(argument), phrase.part(argument), phrase.parts(argument)) == parts
    assert str(phrase) == "x(list=[t, y], number=1, phrase=y, text=t)"
    assert bool(phrase) != bool(NOTHING)


def test_a_deviation_is_as_grave_as_it_is_beyond_its_limit():
    (finding,) = result().findings
    assert gravity(finding) == (INFINITE / 8, 2.5)
    assert gravity(Finding("r", "error")) == (0, 0)
    figures = Figures("output", 9.0, 2.5, 0.0, 0.0)
    assert gravity(Finding("r", "deviates", figures=figures)) == (9, 2.5)


WORST_FIRST = (
    *("crashed", "timed-out", "error", "deviates", "not-run", "unavailable", "conforms"),
    *("observed", "unsupported"),
)


@pytest.mark.parametrize(("worse", "better"), [*itertools.combinations(WORST_FIRST, 2)])
def test_an_item_has_the_worst_verdict_of_its_findings(worse, better):
    findings = [Finding("a.b", better), Finding("c.d", worse), Finding("e.f", better)]
    assert CaseResult("mine", "a", "float32", "cpu", "eval", findings).verdict == worse


def test_an_item_of_which_nothing_was_asked_is_unsupported():
    assert {*WORST_FIRST} == {*VERDICTS}
    assert CaseResult("mine", "a", "float32", "cpu", "eval", []).verdict == "unsupported"


def test_an_item_without_an_outcome_says_so_and_nothing_else():
    lost = without_outcome("mine:a/b:float32:cpu:eval", "not-run", "the run ended")
    assert lost.id == "mine:a/b:float32:cpu:eval"
    assert lost.verdict == "not-run"
    assert lost.findings == [Finding("run", "not-run", "the run ended")]


def test_an_experiment_without_a_revision_is_the_first():
    assert Topic("masks", "Masks", "What do they mean?").revision == 1


def read_unbounded(path):
    return msgspec.json.decode(path.read_bytes(), type=records.Record)


def test_fields_of_a_later_suite_are_no_hindrance(whole):
    found = json.loads(whole.read_text())
    found["later"] = found["header"]["later"] = 1
    whole.write_text(resealed(found))
    assert read(whole).results == [result(), result("mask/shared/self")]


# What was written is what is read


def flipped(content, places=200):
    """The content with one bit flipped, at places spread over it."""
    for place in range(0, len(content), max(1, len(content) // places)):
        other = bytearray(content)
        other[place] ^= 1 << place % 7
        yield bytes(other)


def test_a_flipped_bit_of_a_record_changes_nothing_that_is_read(whole):
    content, known = whole.read_bytes(), read(whole)
    told = []
    for other in flipped(content):
        whole.write_bytes(other)
        try:
            assert read(whole) == known
        except BrokenRecord as error:
            told.append(str(error))
    assert any("is not as it was written" in line for line in told)
    assert not any("\n" in line for line in told)


def test_a_flipped_bit_of_a_journal_changes_nothing_that_is_read(path):
    own = journal(path, encode_line(result(), ARRAYS), encode_line(result("mask/shared/self"), {}))
    content = own.read_bytes()
    header, results, _ = read_journal(own)
    told = []
    for other in flipped(content):
        own.write_bytes(other)
        try:
            now, found, _ = read_journal(own)
            # Without the last line feed, the last line may be cut off.
            assert (now, found) == (header, results[: len(found)])
        except BrokenRecord as error:
            told.append(str(error))
    assert any("is not as it was written" in line for line in told)


def test_the_layout_of_a_record_does_not_matter(whole):
    known = read(whole)
    whole.write_text(json.dumps(json.loads(whole.read_text()), indent=4))
    assert read(whole) == known
    assert known.seal


def test_an_old_record_has_no_seal_and_is_read(whole):
    found = json.loads(whole.read_text())
    del found["seal"]
    whole.write_text(json.dumps(found))
    assert read(whole).seal == ""
    with pytest.raises(BrokenRecord, match="no seal"):
        check_sealed(whole, read(whole))


def test_a_seal_is_of_the_content_however_it_is_laid_out(whole, monkeypatch):
    sealed, text = records.seal_of, whole.read_text()
    whole.write_text(json.dumps(json.loads(text), indent=1))
    assert read(whole).seal
    # What the suite has written is not encoded again to be checked.
    monkeypatch.setattr(records, "seal_of", lambda _: "")
    with pytest.raises(BrokenRecord, match="not as it was written"):
        read(whole)
    whole.write_text(text)
    kept = read(whole)
    monkeypatch.setattr(records, "seal_of", sealed)
    made = kept.header.provenance.created
    edited = text.replace(made, f"{made}0", 1)
    assert edited != text
    whole.write_text(edited)
    with pytest.raises(BrokenRecord, match="not as it was written"):
        read(whole)


# Whatever the bytes, reading either succeeds or says BrokenRecord


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["header", "schema", "results", "findings", "result", "arrays", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
FUZZ = settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def survives(path, content):
    for name in ("f.json", "f.json.journal"):
        file = path.with_name(name)
        file.write_bytes(content)
        try:
            found, told = read(file), ""
        except BrokenRecord as error:
            found, told = None, str(error)
        assert isinstance(found, records.Record) or name in told


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes(path, content):
    survives(path, content)


@FUZZ
@given(JSON)
def test_random_json(path, value):
    survives(path, json.dumps(value).encode())
    head = {"schema": SCHEMA, "x": value}
    survives(path, json.dumps({"header": head, "results": value}).encode())
    survives(path, json.dumps(head).encode() + b"\n" + json.dumps(value).encode() + b"\n")


@FUZZ
@given(st.data())
def test_a_record_with_any_byte_changed(path, data):
    journal(path, encode_line(result(), ARRAYS), encode_line(result("x/y/z"), {}))
    lines = journal_path(path).read_bytes()
    finish(path)
    for content in (bytearray(path.read_bytes()), bytearray(lines)):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
        survives(path, bytes(content))


@FUZZ
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.tuples(st.lists(st.integers(-(2**70), 2**70) | st.booleans(), max_size=3), st.text()),
        max_size=2,
    )
)
def test_random_arrays_in_a_line(arrays):
    line = json.dumps({"result": msgspec.to_builtins(result()), "arrays": arrays})
    try:
        found, _ = decode_line(line)
    except BrokenRecord:
        return
    assert found == result()


# Where a record can be written, known before the run


def test_where_a_record_can_be_written(tmp_path):
    check_writable(tmp_path / "deep" / "er" / "r.json")
    assert list((tmp_path / "deep" / "er").iterdir()) == []
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.json").mkdir()
    for name, told in (
        ("r.txt", "a record's name ends with .json"),
        ("r.json.journal", "a record's name ends with .json"),
        ("folder.json", "is a folder"),
        ("file/r.json", "cannot be written"),
    ):
        with pytest.raises(ConformanceError, match=told):
            check_writable(tmp_path / name)


def test_a_record_there_is_left_as_it_is(whole):
    before = whole.read_bytes()
    check_writable(whole)
    assert whole.read_bytes() == before


# The run that a record belongs to


def test_a_record_belongs_to_the_run_begun_in_its_folder(tmp_path):
    begun = new_run_id()
    (tmp_path / "run").write_text(begun + "\n")
    assert run_id(tmp_path) == begun
    assert run_id(tmp_path / "elsewhere") != begun


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\nexec true\n", b"\xff\xfe", b"20260101"])
def test_another_file_called_run_is_none_of_ours(tmp_path, content):
    (tmp_path / "run").write_bytes(content)
    assert run_id(tmp_path) != run_id(tmp_path)


# What a GPU was


PROPRIETARY = """NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
OPEN = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (at)
GCC version:  gcc version 13.3.0
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """The version of the driver, by what its file holds and what its command prints."""

    def found(file, command):
        monkeypatch.setattr(provenance, "DRIVER", tmp_path / "version")
        if file is not None:
            provenance.DRIVER.write_text(file)
        if command is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{command}\nEND\n")
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return provenance.driver()

    provenance.driver.cache_clear()
    yield found
    provenance.driver.cache_clear()


@pytest.mark.parametrize(
    ("file", "command", "expected"),
    [
        (PROPRIETARY, None, "535.104.05"),
        (OPEN, "1.2", "580.95.05"),
        (None, "580.95.05\n580.95.05", "580.95.05"),
        ("no driver tells this 12.3.0", "580.95.05", "580.95.05"),
        (None, "NVIDIA-SMI has failed because it couldn't communicate with driver 535.1.", ""),
        (None, None, ""),
    ],
)
def test_the_driver_is_found_without_a_framework(driver, file, command, expected):
    assert driver(file, command) == expected


def test_a_command_that_hangs_is_no_driver(driver, monkeypatch):
    def hang(*command, timeout, **options):
        raise provenance.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(provenance.subprocess, "run", hang)
    assert driver(None, "580.95.05") == ""


class OnDevice(Correct):
    """An implementation in the suite's own NumPy, whose GPU is a name."""

    framework = "torch"

    def prepare(self):
        """Import nothing."""

    def versions(self):
        return {"torch": "2.11.0"}

    def toolkit(self):
        return {"CUDA": "13.0", "cuDNN": "9.10.2", "ROCm": ""}

    def device_model(self, device):
        return f"a {device}"


@pytest.mark.parametrize(("device", "told"), [("gpu", "580.95.05"), ("cpu", "")])
def test_a_header_says_what_a_gpu_was(driver, device, told):
    assert driver(OPEN, None) == "580.95.05"
    adapter = OnDevice()
    described = describe([(adapter, "mine.py:OnDevice")], device)
    made = header_of([adapter], described, [], device, "", command="run").provenance
    assert (made.device_model, made.driver) == (f"a {device}", told)
    versions = {name: made.packages.get(name, "") for name in ("CUDA", "cuDNN")}
    assert versions == ({"CUDA": "13.0", "cuDNN": "9.10.2"} if told else {"CUDA": "", "cuDNN": ""})
    assert described[0].toolkit == (versions if told else {})


def test_a_framework_that_does_not_know_its_toolkit_spoils_no_header():
    class Unknown(OnDevice):
        def toolkit(self):
            raise ImportError("no module of that name")

    described = describe([(Unknown(), "mine.py:Unknown")], "gpu")
    assert (described[0].toolkit, described[0].unavailable) == ({}, "")


def test_results_are_immutable():
    with pytest.raises(AttributeError):
        result().case = "other"
    with pytest.raises((AttributeError, dataclasses.FrozenInstanceError)):
        HEADER.planned = 0


def test_how_long_an_item_took_is_kept_and_makes_no_result_another():
    quick = CaseResult("a", "c/d/e", "float32", "cpu", "default", [Finding("x", "conforms")])
    slow = msgspec.structs.replace(quick, seconds=1.5)
    kept, _ = decode_line(encode_line(slow, {}))
    assert kept.seconds == 1.5
    other = {"mode": "other"}, {"findings": [Finding("x", "deviates")]}
    for one, same in (slow, True), *((msgspec.structs.replace(slow, **it), False) for it in other):
        assert (quick == one) is same
        assert (quick != one) is not same


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("model name\t: A\nflags\t\t: fpu avx avx2 avx512f\n\nmodel name\t: B\n", "A, AVX-512"),
        ("model name\t: A\nflags\t\t: fpu avx avx2\n", "A, AVX2"),
        ("model name\t: A\nFeatures\t: fp asimd\n", "A, NEON"),
        ("model name\t: A\n", "A"),
        ("processor\t: 0\nFeatures\t: fp asimd\n", ""),
        ("", ""),
    ],
)
def test_a_machine_is_told_with_the_width_of_its_vectors(text, told):
    assert described(text) == told
