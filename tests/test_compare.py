"""What changed between two records: each kind of change, what came and went, and exit codes."""

from __future__ import annotations

import json

import msgspec
import pytest
from records import (
    GRADIENT,
    MASKED,
    NASTY,
    OBSERVED,
    OUTPUT,
    bad,
    entry,
    figures,
    good,
    record,
    result,
    save,
)

from conformance.cli import main
from conformance.errors import ExitCode
from conformance.records.findings import RUN, Finding, Phrase
from conformance.records.header import CaseInfo
from conformance.reports.changes import compare, load_side

NAN, ZEROS = (OBSERVED[text] for text in ("nan", "zeros"))
UNSUPPORTED = Finding(OUTPUT, "unsupported", detail="no")
ERROR = Finding(OUTPUT, "error", detail="ValueError: no")
NOT_RUN = Finding(RUN, "not-run", detail="the run ended")
TIMED_OUT = Finding(RUN, "timed-out", detail="no answer within 6 s")
CRASHED = Finding(RUN, "crashed", detail="the process died with SIGABRT")


@pytest.fixture
def changes(tmp_path):
    """What changed between two lists of results, through files."""

    def make(before, after, **headers):
        one = save(tmp_path, record(*before), "a.json")
        other = save(tmp_path, record(*after, **headers), "b.json")
        return compare(load_side(one), load_side(other))

    return make


KINDS = ("worse", "lost", "otherwise", "fixed", "gained")


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (good(), bad(), "worse"),
        (UNSUPPORTED, bad(), "worse"),
        (bad(), ERROR, "worse"),
        (good(), CRASHED, "worse"),
        (bad(), CRASHED, "worse"),
        (good(), TIMED_OUT, "worse"),
        (ERROR, TIMED_OUT, "worse"),
        (TIMED_OUT, CRASHED, "worse"),
        (good(), UNSUPPORTED, "lost"),
        (bad(), UNSUPPORTED, "lost"),
        (good(), NOT_RUN, "lost"),
        (ERROR, bad(), "otherwise"),
        (CRASHED, bad(), "otherwise"),
        (CRASHED, TIMED_OUT, "otherwise"),
        (TIMED_OUT, good(), "fixed"),
        (bad(cause=Phrase("scale.missing")), bad(cause=Phrase("mask.inverted")), "otherwise"),
        (bad(size=20.0), bad(size=2000.0), "otherwise"),
        (Finding(OUTPUT, "conforms", figures=figures(2.0, "A")), good(), "otherwise"),
        (Finding(MASKED, "observed", value=NAN), Finding(MASKED, "observed", value=ZEROS),
         "otherwise"),
        (Finding(MASKED, "conforms"), Finding(MASKED, "deviates"), "otherwise"),
        (bad(), good(), "fixed"),
        (CRASHED, good(), "fixed"),
        (UNSUPPORTED, good(), "gained"),
        (NOT_RUN, good(), "gained"),
    ],
)  # fmt: skip
def test_kinds_of_changes(changes, before, after, kind):
    found = changes([result(before)], [result(after)])
    assert [name for name in KINDS if getattr(found, name)] == [kind]
    (change,) = getattr(found, kind)
    assert change.before != change.after
    assert found.anything_worse == (kind in ("worse", "lost"))
    assert (found.common, found.same) == (1, 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (good(size=1.0), good(size=7.0)),
        (bad(size=90.0), bad(size=110.0)),
        (UNSUPPORTED, Finding(OUTPUT, "unsupported", detail="no, in other words")),
    ],
)
def test_what_is_as_it_was(changes, before, after):
    found = changes([result(before)], [result(after)])
    assert not any(getattr(found, kind) for kind in KINDS)
    assert (found.common, found.same) == (1, 1)


def test_changes_alike_are_one_with_the_gravest_as_evidence(changes):
    cases = [f"plain/{index}/self" for index in range(4)]
    before = [result(good(), case=case) for case in cases]
    after = [result(bad(size=10.0 + i), case=case) for i, case in enumerate(cases)]
    (change,) = changes(before, after).worse
    assert (change.times, change.cases) == (4, cases)
    assert change.case == "plain/3/self"
    assert change.figures is not None
    assert change.figures.max_ratio == 13.0
    assert change.command.startswith(
        "mha-conformance run path/to/mine.py:Attention --case plain/3/"
    )


def test_a_process_that_dies_is_one_change_and_not_one_for_each_requirement(changes):
    found = changes([result(good(), good(GRADIENT))], [result(CRASHED)])
    assert [(change.requirement, change.before, change.after) for change in found.worse] == [
        (RUN, "conforms", "crashed")
    ]


def test_the_gravest_come_first_and_characteristics_last(changes):
    before = [result(good(), good(GRADIENT), Finding(MASKED, "observed", value=NAN))]
    before += [result(good(), case="plain/other/self")]
    after = [result(bad(), bad(GRADIENT), Finding(MASKED, "error", detail="no"))]
    after += [result(CRASHED, case="plain/other/self")]
    found = changes(before, after).worse
    assert [change.requirement for change in found] == [RUN, OUTPUT, GRADIENT, MASKED]


def test_what_was_added_and_removed_is_told_and_is_not_worse(changes):
    before = [result(good()), result(good(), case="plain/old/self"), result(good(), name="gone")]
    after = [
        result(good(), bad(GRADIENT)),
        result(bad(), case="plain/new/self"),
        result(bad(), mode="eval"),
        result(bad(), name="newcomer"),
    ]
    found = changes(before, after)
    assert not found.anything_worse
    assert found.added.implementations == ["newcomer"]
    assert found.removed.implementations == ["gone"]
    assert found.added.cases == ["plain/new/self"]
    assert found.removed.cases == ["plain/old/self"]
    assert (found.added.items, found.added.findings) == (2, 1)
    wrong = {(own.requirement, case) for own in found.added.wrong for case in own.cases}
    # What a new implementation gets wrong is told by its own record.
    assert wrong == {(GRADIENT, "plain/no-mask/self"), (OUTPUT, "plain/new/self"),
                     (OUTPUT, "plain/no-mask/self")}  # fmt: skip


def test_conventions_are_compared_entry_by_entry(changes):
    def card(mode, *values):
        entries = [entry("masks", subject, value) for subject, value in values]
        own = result(good("adapter.declares-what-is-observed"), case="probe/masks", mode=mode)
        return type(own)(**{f: getattr(own, f) for f in own.__struct_fields__} | {
            "entries": entries})  # fmt: skip

    before = [card(mode, ("mask, bool", "attends"), ("old", "x")) for mode in ("train", "eval")]
    after = [card(mode, ("mask, bool", "blocks"), ("new", "y")) for mode in ("train", "eval")]
    found = changes(before, after).conventions
    assert [(item.subject, item.before, item.after, item.modes) for item in found] == [
        ("mask, bool", "attends", "blocks", ["train", "eval"]),
        ("old", "x", "", ["train", "eval"]),
        ("new", "", "y", ["train", "eval"]),
    ]


def test_what_to_know_before_comparing(changes):
    found = changes(
        [result(good())],
        [result(good())],
        suite="2.0",
        catalogue="other",
        packages={"numpy": "2.1", "torch": "2.9"},
        selection="--case plain",
        complete=False,
    )
    told = "\n".join(found.notes)
    for expected in (
        "suite 1.0 → 2.0",
        "the catalogues differ",
        "numpy 2.0 → 2.1",
        "torch none → 2.9",
        "b.json is only a part of a run: --case plain",
        "b.json is incomplete",
    ):
        assert expected in told


@pytest.mark.parametrize(
    ("hashes", "common"), [(("a", "a"), 2), (("a", "b"), 1), (("", "b"), 2), (("a", ""), 2)]
)
def test_a_case_that_asks_something_else_under_its_old_name_is_left_out(tmp_path, hashes, common):
    """A hash that is not known is no reason, and other words are none either."""
    for file, hash_of, own in (("a.json", hashes[0], good()), ("b.json", hashes[1], bad())):
        made = record(result(own), result(good(), case="plain/no-mask/cross"))
        made.header.cases["plain/no-mask/self"] = CaseInfo(why=file, facts=[], hash=hash_of)
        save(tmp_path, made, file)
    found = compare(load_side(tmp_path / "a.json"), load_side(tmp_path / "b.json"))
    changed = common == 1
    assert (found.common, len(found.worse)) == (common, 0 if changed else 1)
    assert found.added.lines == found.removed.lines == []
    told = "left out, since they ask something else now: plain/no-mask/self"
    assert found.notes == [told] * changed


@pytest.mark.parametrize(("hashes", "open_to_doubt"), [(("a", "a"), False), (("", "a"), True)])
def test_catalogues_that_differ_are_told_where_a_hash_is_not_known(tmp_path, hashes, open_to_doubt):
    for file, hash_of in zip(("a.json", "b.json"), hashes, strict=True):
        made = record(result(good()), catalogue=file)
        made.header.cases["plain/no-mask/self"] = CaseInfo(why="", facts=[], hash=hash_of)
        save(tmp_path, made, file)
    found = compare(load_side(tmp_path / "a.json"), load_side(tmp_path / "b.json"))
    told = "the catalogues differ: a case of the same name may have other numbers"
    assert found.notes == [told] * open_to_doubt


# The command


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ([result(good())], [result(good())], ExitCode.OK),
        ([result(bad())], [result(good())], ExitCode.OK),
        ([result(good())], [result(good()), result(bad(), case="plain/new/self")], ExitCode.OK),
        ([result(good())], [result(bad())], ExitCode.DEVIATES),
        ([result(good())], [result(UNSUPPORTED)], ExitCode.DEVIATES),
        ([result(good())], [result(good(), name="other")], ExitCode.NOTHING_VERIFIED),
    ],
)
def test_exit_codes(tmp_path, capsys, before, after, code):
    one, other = (
        str(save(tmp_path, record(*results), f"{index}.json"))
        for index, results in enumerate((before, after))
    )
    assert main(["compare", one, other]) == code
    printed = capsys.readouterr().out
    assert main(["compare", one, other, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert f"{found['same']} of {found['common']} findings as they were" in printed


def test_regressions_come_first_on_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cases = ("plain/a/self", "plain/b/self", "plain/c/self")
    before = [result(f, case=c) for f, c in zip((bad(), good(), UNSUPPORTED), cases, strict=True)]
    after = [result(f, case=c) for f, c in zip((good(), bad(), good()), cases, strict=True)]
    one, other = (
        str(save(tmp_path, record(*results), file))
        for results, file in ((before, "a.json"), (after, "b.json"))
    )
    assert main(["compare", one, other]) == ExitCode.DEVIATES
    printed = capsys.readouterr().out
    places = [printed.index(word) for word in ("✗ worse: 1", "✓ fixed: 1", "+ answered now: 1")]
    assert places == sorted(places)
    assert "mine: 2 conforms (+1), 1 deviates, 0 unsupported (-1)" in printed
    assert printed.splitlines()[-1].startswith("1 worse, 1 fixed, 1 answered now, 0 of 3")
    # Only what is to be copied may be wider.
    wide = [line for line in printed.splitlines() if len(line) > 80]
    assert all("again: " in line or "→" in line for line in wide)


def test_two_folders(tmp_path, capsys):
    for folder, finding in (("old", good()), ("new", bad())):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder, record(result(finding), name="mine"))
        save(tmp_path / folder, record(result(good(), name="theirs"), name="theirs"))
    sides = [str(tmp_path / folder) for folder in ("old", "new")]
    assert main(["compare", *sides]) == ExitCode.DEVIATES
    printed = capsys.readouterr().out
    assert "theirs: 1 conforms\n" in printed
    assert "mine: 0 conforms (-1), 1 deviates (+1)\n" in printed


def on(device, *findings):
    """A record of one implementation on one device."""
    results = [result(own, case=f"plain/{index}/self") for index, own in enumerate(findings)]
    results = [msgspec.structs.replace(own, device=device) for own in results]
    return record(*results, name=device, device=device)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (("cpu", "cuda"), "mine: 2 conforms (-1), 1 deviates (+1)"),
        # What is on another device is another item, and no more of the same.
        (("cpu",), "mine: 2 conforms, 1 deviates"),
    ],
)
def test_one_implementation_on_two_devices_loses_no_counts(tmp_path, capsys, before, told):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    for device in before:
        save(old, on(device, good(), *([good()] if device == "cpu" else [])))
    save(new, on("cpu", good(), good()))
    save(new, on("cuda", bad()))
    found = compare(load_side(old), load_side(new))
    assert found.after.implementations == {"mine": {"conforms": 2, "deviates": 1}}
    assert found.after.devices == {"mine": ["cpu", "cuda"]}
    main(["compare", str(old), str(new)])
    assert told in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("what", ["missing", "empty folder", "twins", "foreign"])
def test_what_cannot_be_compared_is_one_line(tmp_path, capsys, what):
    other = save(tmp_path, record(result(good())), "b.json")
    one = tmp_path / "a"
    if what != "missing":
        one.mkdir()
    if what == "twins":
        save(one, record(result(good())), "x.json")
        save(one, record(result(good())), "y.json")
    if what == "foreign":
        (one / "x.json").write_text("{}")
    assert main(["compare", str(one), str(other)]) == ExitCode.USAGE
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("mha-conformance: ")
    assert not printed.out


def test_what_a_record_says_stays_text(tmp_path, capsys):
    nasty = f"\x1b[2J{NASTY}[bold]\u202e"
    one = save(tmp_path, record(result(good(), name=nasty)), "a.json")
    other = save(
        tmp_path, record(result(bad(cause=Phrase(nasty), detail=nasty), name=nasty)), "b.json"
    )
    assert main(["compare", str(one), str(other)]) == ExitCode.DEVIATES
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\u202e" not in printed
    assert f"\\x1b[2J{NASTY}[bold]" in printed.replace("\n", "")
    assert main(["compare", str(one), str(other), "--format", "json"]) == ExitCode.DEVIATES
    printed = capsys.readouterr().out
    assert not {"\x1b", "\u202e"} & set(printed)
    assert json.loads(printed)["worse"][0]["cause"] == nasty


def test_two_records_stand_side_by_side_on_a_page(tmp_path, capsys):
    nasty = f"\x1b[2J{NASTY}"
    one = save(tmp_path, record(result(good(), name=nasty)), "a.json")
    other = save(tmp_path, record(result(bad(detail=nasty), name=nasty)), "b.json")
    page = tmp_path / "page.html"
    assert main(["compare", str(one), str(other), "--html", str(page)]) == ExitCode.DEVIATES
    text = page.read_text(encoding="utf-8")
    assert text.count("<h2>✗ Worse: 1</h2>") == 1
    assert f"<td>{one}</td><td>{other}</td>" in text
    assert "<div>conforms</div>" in text
    assert "<div>deviates</div>" in text
    assert "\x1b" not in text
    assert NASTY not in text
    assert "default-src &#39;none&#39;" in text
    assert capsys.readouterr().out
    assert main(["compare", str(one), str(other), "--html", str(tmp_path)]) == ExitCode.USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1
