"""Where results go: schema, JUnit, annotations, badge, summary; all made of records."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree as ET

import msgspec
import pytest
from markdown_it import MarkdownIt
from records import GRADIENT, MASKED, NASTY, OUTPUT, bad, full, good, record, result, save
from schemas import RECORD, faults, record_faults

from conformance.cli import main
from conformance.commands.shared import schema
from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import RUN, Finding, Phrase
from conformance.records.record import read
from conformance.reports.changes import compare, load_side
from conformance.reports.ci import COLOURS, MOST, annotated, badge, command, junit
from conformance.reports.ci.summary import comment, load, markdown
from conformance.reports.gate.judging import Claims

UNSUPPORTED = Finding(OUTPUT, "unsupported", detail="no head size 1")
ERROR = Finding(OUTPUT, "error", detail="ValueError: no")
CRASHED = Finding(RUN, "crashed", detail="the process died with SIGSEGV")
NOT_RUN = Finding(RUN, "not-run", detail="the run ended")
OBSERVED = Finding(MASKED, "deviates", detail="declared nan, observed zeros")
EVERYTHING = [
    result(good(), case="plain/a/self"),
    result(bad(cause=Phrase("mask.inverted")), case="mask/b/self"),
    result(UNSUPPORTED, case="plain/c/self"),
    result(ERROR, Finding(GRADIENT, "error", detail="ValueError: no"), case="plain/d/self"),
    result(CRASHED, case="plain/e/self"),
    result(good(), OBSERVED, case="edge/f/self"),
    result(NOT_RUN, case="plain/g/self"),
]

BASELINE = """
[[known]]
requirement = "output.*"
case = "mask/b/*"
verdict = "deviates"
reason = "The mask is inverted until the next release."
"""


@pytest.fixture
def source(tmp_path):
    """What there is to tell of one record of these results."""

    def make(*results, previous=None, baseline=None, **header):
        path = save(tmp_path, record(*results, **header), "now.json")
        before = save(tmp_path, record(*previous), "before.json") if previous else None
        known = None
        if baseline is not None:
            known = tmp_path / "conformance.toml"
            known.write_text(baseline)
        return load([path], before, known)

    return make


# JSON schema


def test_the_published_schema_is_that_of_records():
    told = "regenerate it: mha-conformance schema record > docs/record.schema.json"
    assert json.loads(RECORD.read_bytes()) == json.loads(json.dumps(schema("record"))), told


def test_a_record_with_something_everywhere_is_as_the_schema_says():
    own = full()[0][1]
    document = msgspec.json.decode(msgspec.json.encode(own))
    assert not faults("record", document)
    del document["header"]["planned"]
    document["results"][0]["findings"][0]["verdict"] = "passes"
    told = faults("record", document)
    assert len(told) == 2, told


def test_the_records_of_the_pages_are_as_the_schema_says():
    found = sorted((RECORD.parent / "examples" / "records").glob("*.json"))
    assert len(found) == 2
    assert not record_faults(found[0].parent)
    assert all(read(path).complete for path in found)


# JUnit


def cases(source):
    root = ET.fromstring(junit(source))
    return root, {case.get("name"): case for case in root.iter("testcase")}


def test_junit_counts_and_kinds(source):
    root, found = cases(source(*EVERYTHING))
    (suite,) = root
    assert suite.get("name") == "mine"
    for element in (root, suite):
        counts = [element.get(name) for name in ("tests", "failures", "errors", "skipped")]
        assert counts == ["7", "1", "2", "2"]
    kinds = {name.partition("[")[0]: [child.tag for child in case] for name, case in found.items()}
    assert kinds == {
        "plain/a/self": [],
        "mask/b/self": ["failure"],
        "plain/c/self": ["skipped"],
        "plain/d/self": ["error"],
        "plain/e/self": ["error"],
        # No definition settles it, so it fails nothing; it is told all the same.
        "edge/f/self": ["system-out"],
        "plain/g/self": ["skipped"],
    }


def test_junit_has_the_times_that_a_record_has(source):
    times = (0.25, 0.0, 1.5)
    results = [
        msgspec.structs.replace(result(good(), case=f"plain/{name}/self"), seconds=seconds)
        for name, seconds in zip("abc", times, strict=True)
    ]
    root, found = cases(source(*results))
    assert [case.get("time") for case in found.values()] == ["0.250", None, "1.500"]
    assert [element.get("time") for element in (root, root[0])] == ["1.750", "1.750"]
    # An older record knows of none, and none is made up.
    root, _ = cases(source(result(good())))
    assert not [element for element in root.iter() if "time" in element.attrib]


def test_a_junit_failure_stands_on_its_own(source):
    _, found = cases(source(*EVERYTHING))
    failure = found["mask/b/self[float32-cpu-train]"][0]
    assert failure.get("message") == (
        "deviates: output.equals-definition; equals the answer with the mask inverted"
    )
    assert failure.text.rstrip().splitlines()[-1].startswith("again: mha-conformance run ")
    assert found["plain/c/self[float32-cpu-train]"][0].get("message") == (
        "unsupported: no head size 1"
    )


def test_junit_is_well_formed_whatever_a_record_says(source):
    nasty = f"\x00\x1b[2J]]>{NASTY}&amp;"
    own = result(bad(cause=Phrase(nasty), detail=nasty), name=f"a\x01{NASTY}", case=f"{NASTY}\x07")
    root, found = cases(source(own))
    assert NASTY in next(iter(found))
    assert NASTY in next(root.iter("failure")).text
    assert not list(root.iter("script"))


def test_a_requirement_of_another_version_counts(source):
    _, found = cases(source(result(bad("new.idea"))))
    assert [case[0].tag for case in found.values()] == ["failure"]


# Annotations


def parsed(line):
    """Level, properties and message, as GitHub reads them."""
    level, properties, message = re.fullmatch(r"::(\w+) (.*?)::(.*)", line).groups()
    unescape = {"%0A": "\n", "%0D": "\r", "%3A": ":", "%2C": ",", "%25": "%"}

    def plain(text):
        return re.sub("%0A|%0D|%3A|%2C|%25", lambda found: unescape[found[0]], text)

    pairs = (pair.split("=", 1) for pair in properties.split(","))
    return level, {name: plain(value) for name, value in pairs}, plain(message)


@pytest.mark.parametrize("text", ["plain", "a::error::b", "50%", "a,b:c\nd", "%0A", "%25", NASTY])
def test_an_annotation_says_what_it_was_given(text):
    line = command("error", text, title=text, file=text)
    assert "\n" not in line
    assert parsed(line) == ("error", {"title": text, "file": text}, text)


def test_annotations_say_what_where_and_how_to_see_it_again(source):
    found = [parsed(line) for line in annotated(source(*EVERYTHING))]
    told = {(level, properties["title"]) for level, properties, _ in found}
    assert told == {
        ("error", f"mine: {RUN}"),
        # Many requirements met the same error; it is told once.
        ("error", f"mine: {OUTPUT}"),
        ("warning", f"mine: {MASKED}"),
        ("warning", "mine: not-run"),
    }
    assert {properties.get("file") for _, properties, _ in found} == {None, "path/to/mine.py"}
    messages = [message for level, _, message in found if level == "error"]
    assert all("\nagain: mha-conformance run " in message for message in messages)
    assert any("likely cause: equals the answer with the mask inverted" in m for m in messages)


def test_more_than_github_shows_is_counted(source):
    found = annotated(source(result(*(bad(f"new.idea-{index}") for index in range(30)))))
    assert len(found) == MOST
    assert parsed(found[-1])[1]["title"] == f"and {30 - MOST + 1} more"


def test_a_file_outside_of_the_repository_is_not_named(source):
    from records import implementation

    for spec in ("/elsewhere/mine.py:A", "../mine.py:A", "torch-mha", "package.module:A"):
        own = source(result(bad()), implementations=[implementation("mine", spec=spec)])
        (line,) = annotated(own)
        assert "file" not in parsed(line)[1]


# Badge


@pytest.mark.parametrize(
    ("results", "message", "color"),
    [
        ([result(good())], "1 conforms", "brightgreen"),
        ([result(good()), result(UNSUPPORTED, mode="eval")], "1 conforms, 1 unsupported",
         "brightgreen"),
        ([result(good()), result(bad(), mode="eval")], "1 conforms, 1 deviates", "red"),
        ([result(good()), result(OBSERVED, mode="eval")], "1 conforms, 1 deviates", "brightgreen"),
        ([result(good()), result(NOT_RUN, mode="eval")], "1 conforms, 1 not-run", "yellow"),
        ([result(UNSUPPORTED)], "1 unsupported", "lightgrey"),
        ([], "nothing verified", "lightgrey"),
    ],
)  # fmt: skip
def test_badge(source, results, message, color):
    found = badge(source(*results))
    assert (found.message, found.color, found.schemaVersion) == (message, color, 1)
    assert "%" not in found.message


# Summary


def test_the_summary_counts_and_names_what_deviates(source):
    text = markdown(source(*EVERYTHING))
    assert "| `mine` | 1 | 2 | 1 | 1 | 1 | 1 |" in text
    assert "equals the answer with the mask inverted" in text
    assert "### Not verified" in text
    assert "%" not in text.replace("%20", "")


def test_the_summary_tells_the_delta_with_regressions_first(source):
    previous = [result(good(), case=own.case) for own in EVERYTHING]
    text = markdown(source(*EVERYTHING, previous=previous))
    assert "| `mine` | 1 (-6) | 2 (+2) |" in text
    places = [text.index(word) for word in ("### Since", "**✗ Worse**", "**? No longer answered**",
                                            "### What deviates")]  # fmt: skip
    assert places == sorted(places)


def test_what_a_baseline_knows_is_not_news(source):
    known = source(*EVERYTHING, baseline=BASELINE)
    assert known.totals["known"] == 1
    text = markdown(known)
    assert "### What deviates and is not known (1 item known)" in text
    assert "mask/b/self" not in text
    _, found = cases(known)
    told = found["mask/b/self[float32-cpu-train]"][0]
    assert (told.tag, told.get("message")) == ("skipped", f"known: {OUTPUT}")
    assert badge(source(EVERYTHING[0], EVERYTHING[1], baseline=BASELINE)).color == "brightgreen"
    assert not [line for line in annotated(known) if "mask/b/self" in line]


def test_a_baseline_that_is_out_of_date_is_told(source):
    own = source(result(good(), case="mask/b/self"), baseline=BASELINE)
    assert "### The baseline is out of date" in markdown(own)
    (line,) = annotated(own)
    level, properties, message = parsed(line)
    assert (level, properties["title"]) == ("error", "the baseline is out of date")
    assert properties["line"] == "2"
    assert message.startswith("line 2: requirement output.*")


@pytest.mark.parametrize(
    ("change", "places", "why"),
    [
        (("", ""), ["8"], "says again what is said at line 2"),
        (("next", "last"), ["2", "8"], "says of the same findings something else than line"),
    ],
)
def test_entries_that_are_not_clear_are_told(source, change, places, why):
    own = source(EVERYTHING[1], baseline=BASELINE + BASELINE.replace(*change))
    assert own.judgements[0].exit_code == ExitCode.DEVIATES
    found = [parsed(line) for line in annotated(own)]
    assert [properties["line"] for _, properties, _ in found] == places
    text = markdown(own)
    assert text.count(f": {why}") == len(places)
    assert all(why in message for _, _, message in found)


def test_many_entries_that_are_not_clear_leave_the_summary_short(source):
    several = (BASELINE.replace("next", f"next {index}") for index in range(40))
    own = source(EVERYTHING[1], baseline="".join(several))
    assert len(markdown(own)) < 10_000
    assert "and 1530 more" in markdown(own)


def test_rows_of_several_devices_are_compared_with_nothing(tmp_path):
    def saved(folder, device, *findings):
        (tmp_path / folder).mkdir(exist_ok=True)
        own = [result(one, case=f"plain/{index}/self") for index, one in enumerate(findings)]
        own = [msgspec.structs.replace(one, device=device) for one in own]
        save(tmp_path / folder, record(*own, name=device, device=device))

    for folder, finding in (("old", good()), ("new", bad())):
        saved(folder, "cpu", good(), good())
        saved(folder, "cuda", finding)
    text = markdown(load([tmp_path / "new"], tmp_path / "old"))
    assert "| `mine` | 2 | 0 |" in text
    assert "| `mine` on cuda | 0 | 1 |" in text
    # Nothing but the one device was there: that row has something to be compared with.
    (tmp_path / "old" / "cuda.json").unlink()
    saved("old", "cpu", good(), bad())
    text = markdown(load([tmp_path / "new"], tmp_path / "old"))
    assert "| `mine` | 2 (+1) | 0 (-1) |" in text
    assert "| `mine` on cuda | 0 | 1 |" in text


def test_a_baseline_is_matched_once(source, monkeypatch):
    asked = []
    of = Claims.of
    monkeypatch.setattr(Claims, "of", lambda *own: asked.append(own) or of(*own))
    found = source(*EVERYTHING[:2], baseline=BASELINE)
    assert found.totals["known"] == 1
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["totals", "wrong", "open"])
def test_what_is_told_in_several_places_is_found_once(source, name):
    found = source(*EVERYTHING)
    assert getattr(found, name) is getattr(found, name)
    assert found.items[1].wrong is found.items[1].wrong


def test_nothing_breaks_out_of_the_summary(source):
    previous = [result(good(), name=NASTY, case=NASTY)]
    own = result(bad(cause=Phrase(NASTY), detail=NASTY), name=NASTY, case=NASTY)
    html = (
        MarkdownIt("commonmark", {"html": True})
        .enable("table")
        .render(markdown(source(own, previous=previous)))
    )
    assert "<script" not in html
    assert "alert" in html
    rows = [row.count("<td") for row in re.findall(r"<tr>.*?</tr>", html, re.DOTALL)]
    assert set(rows) <= {0, 2, 3, 5}


def test_a_summary_stays_below_what_github_takes(source):
    results = [
        result(bad(f"new.idea-{index}", cause=Phrase("x" * 500)), case=f"plain/{index}/self")
        for index in range(2000)
    ]
    assert len(markdown(source(*results)).encode()) < 2**20 / 8


# The command


def test_all_of_it_by_the_command(tmp_path, capsys, monkeypatch):
    now = save(tmp_path, record(*EVERYTHING), "now.json")
    before = save(tmp_path, record(result(good(), case="mask/b/self")), "before.json")
    step = tmp_path / "step.md"
    step.write_text("of an earlier step\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(step))
    monkeypatch.chdir(tmp_path)
    arguments = ["report", str(now), "--junit", "out/junit.xml", "--badge", "out/badge.json"]
    arguments += ["--summary", "--annotations", "--previous", str(before)]
    assert main(arguments) == ExitCode.INCOMPLETE
    assert ET.parse("out/junit.xml").getroot().tag == "testsuites"
    badge = json.loads((tmp_path / "out/badge.json").read_text())
    assert badge.keys() == {"schemaVersion", "label", "message", "color"}
    text = step.read_text()
    assert text.startswith("of an earlier step\n## Attention conformance\n")
    assert "before.json" in text
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("::error ")
    assert printed[-1].startswith("written: out/junit.xml, out/badge.json, ")
    # Only what was asked for.
    assert not (tmp_path / "reports").exists()
    assert main([*arguments, "--output", "out/report"]) == ExitCode.INCOMPLETE
    assert (tmp_path / "out/report.html").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["report", "now.json", "--output", "now"],
        ["report", "now.json", "--html", "before.json", "--versions", "before.json"],
        ["report", ".", "--output", "x/../before"],
        ["compare", "before.json", "now.json", "--html", "now.json"],
        ["compare", ".", "now.json", "--comment", "before.json"],
    ],
    ids=" ".join,
)
def test_no_record_that_is_read_is_replaced(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    made = [
        save(tmp_path, record(result(good(), name=name)), f"{name}.json")
        for name in ("now", "before")
    ]
    before = [path.read_bytes() for path in made]
    assert main(command) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert ".json: is a record that this is made from, and would be replaced" in line
    assert [path.read_bytes() for path in made] == before
    assert {*tmp_path.glob("*")} == {*made}


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([result(good())], ExitCode.OK),
        ([result(bad())], ExitCode.OK),
        ([result(UNSUPPORTED)], ExitCode.NOTHING_VERIFIED),
        ([result(ERROR)], ExitCode.NOTHING_VERIFIED),
        ([result(ERROR), result(good(), mode="eval")], ExitCode.OK),
        ([result(good()), result(NOT_RUN, mode="eval")], ExitCode.INCOMPLETE),
    ],
)
def test_exit_codes(tmp_path, results, code):
    path = save(tmp_path, record(*results))
    assert main(["report", str(path), "--badge", str(tmp_path / "b")]) == code


def test_a_baseline_that_is_not_there_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, record(result(good())), "now.json")
    main(["report", str(path), "--summary", "s.md", "--baseline", "none.toml"])
    told = "none.toml: no such file, nothing is known yet"
    assert capsys.readouterr().out.splitlines() == ["written: s.md", told]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--summary"], "there is no GITHUB_STEP_SUMMARY here; name a file"),
        (["--junit", "env.json/j.xml"], "env.json/j.xml: cannot be written ("),
        (["--annotations", "--previous", "none.json"], "none.json: cannot be read ("),
        (["--previous", "env.json"], "--previous changes nothing that is written; add --summary"),
        (["--badge", "b", "--previous", "env.json"], "add --summary or --annotations"),
        (["--html", "h", "--baseline", "k.toml"], "k.toml: no such file"),
        (["--baseline", "k.toml"], "k.toml: no such file"),
        (["--badge", "b", "--baseline", "wrong.toml"], "wrong.toml"),
    ],
)
def test_one_line_for_what_cannot_be_done(tmp_path, capsys, monkeypatch, arguments, told):
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.chdir(tmp_path)
    save(tmp_path, record(result(good())))
    (tmp_path / "wrong.toml").write_text("[[known")
    assert main(["report", "env.json", *arguments]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


# A comment


def change_records(tmp_path, before, after):
    first = save(tmp_path, record(*before), "before.json")
    second = save(tmp_path, record(*after), "after.json")
    return compare(load_side(first), load_side(second))


def test_a_comment_says_what_is_new_fixed_and_lost_with_links_to_the_panel(tmp_path):
    names = ["plain/a/self", "plain/b/self", "plain/c/self", "plain/d/self"]
    before = [good(), bad(), good(), good()]
    after = [bad(cause=Phrase("mask.inverted")), good(), UNSUPPORTED]
    changes = change_records(
        tmp_path,
        [result(one, case=name) for one, name in zip(before, names, strict=True)],
        [result(one, case=name) for one, name in zip(after, names[:3], strict=True)],
    )
    text = comment(changes, "https://example.org/report.html")
    lines = text.splitlines()
    assert lines[0] == "<!-- mha-conformance -->"
    assert lines[1] == (
        "### Attention conformance: 1 new deviation, 1 finding fixed, 1 finding no longer answered"
    )
    panel = "https://example.org/report.html#of=mine&requirement=output.equals-definition&case="
    rows = [line for line in lines if line.startswith("| `mine`")]
    assert [f"{panel}plain/{name}/self&in=float32&mode=train" in row
            for name, row in zip("acb", rows, strict=True)] == [True] * 3  # fmt: skip
    assert "conforms → deviates | 1 | equals the answer with the mask inverted |" in rows[0]
    sections = [line for line in lines if line.startswith("**")]
    assert sections == ["**New**", "**No longer answered**", "**Fixed**", "**Not asked any more**"]
    assert "- 1 case: plain/d/self" in lines
    # Without an address, there is nothing to link to.
    assert "](" not in comment(changes)


def test_a_comment_has_one_row_for_one_cause(tmp_path):
    names = ["output.equals-definition", "weights.equal-definition", "modes.agree", "call.repeats"]
    names = [*names, "kernel.equals-definition"]
    cause = Phrase("mask.inverted")
    changes = change_records(
        tmp_path,
        [result(*(good(name) for name in names), good("dtype.in-is-out"))],
        [result(*(bad(name, cause=cause) for name in names), bad("dtype.in-is-out"))],
    )
    rows = [line for line in comment(changes).splitlines() if line.startswith("| `mine`")]
    assert len(rows) == 2
    (row,) = (line for line in rows if "inverted" in line)
    assert " and 1 more | conforms → deviates | 5 | " in row
    assert sum(f"`{name}`" in row for name in names) == 4


def test_a_comment_about_nothing_is_short_and_one_about_much_fits(tmp_path):
    same = [result(good())]
    assert "Attention conformance: nothing new" in comment(change_records(tmp_path, same, same))
    names = [f"plain/{number}/{'x' * 80}" for number in range(400)]
    causes = [Phrase("text", {"text": f"{number} " + "why " * 60}) for number in range(400)]
    changes = change_records(
        tmp_path,
        [result(good(), case=name) for name in names],
        [result(bad(cause=cause), case=name) for name, cause in zip(names, causes, strict=True)],
    )
    text = comment(changes, "https://example.org/report.html")
    assert len(text) < 65_536
    assert "and 385 more" in text


@pytest.mark.parametrize("page", ["javascript:alert(1)", "https://a) [b](https://c", "report.html"])
def test_an_address_that_is_none_is_refused(tmp_path, page):
    same = [result(good())]
    with pytest.raises(ConformanceError, match="--page"):
        comment(change_records(tmp_path, same, same), page)


def test_compare_writes_the_comment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    change_records(tmp_path, [result(good())], [result(bad())])
    files = ["compare", "before.json", "after.json"]
    assert main([*files, "--comment", "comment.md"]) == ExitCode.DEVIATES
    assert "1 new deviation" in (tmp_path / "comment.md").read_text(encoding="utf-8")
    assert main([*files, "--page", "https://example.org"]) == ExitCode.USAGE
    assert main([*files, "--comment", "no/folder/comment.md"]) == ExitCode.USAGE


# History


def test_a_history_grows_by_a_line_a_run_and_draws_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_SHA", "0123456789abcdef")
    first = save(tmp_path, record(*EVERYTHING), "now.json")
    second = save(tmp_path, record(result(good())), "later.json")
    for path, times in ((first, 1), (first, 1), (second, 2)):
        main(["report", str(path), "--history", "history.jsonl"])
        lines = (tmp_path / "history.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == times, "a run is one line, however often it is reported"
    before, after = map(json.loads, lines)
    assert before["implementations"]["mine"]["deviates"] == 2
    assert after["implementations"] == {"mine": {"conforms": 1}}
    assert before["commit"] == "0123456789abcdef"
    root = ET.fromstring((tmp_path / "history.svg").read_text(encoding="utf-8"))
    groups = root.findall("{*}g")
    heights = [
        sum(float(bar.get("height")) for bar in group.findall("{*}rect")) for group in groups
    ]
    assert len(groups) == 2
    assert heights[0] > heights[1] > 0
    colours = [{bar.get("fill") for bar in group.findall("{*}rect")} for group in groups]
    assert COLOURS["deviates"] in colours[0]
    assert colours[1] == {COLOURS["conforms"]}
    told = [text.text for text in root.findall("{*}text")]
    assert "1 conforms" in told


def test_a_history_that_is_none_is_one_line_and_stays_as_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path, record(result(good())), "now.json")
    (tmp_path / "history.jsonl").write_text("mine\n", encoding="utf-8")
    assert main(["report", str(path), "--history", "history.jsonl"]) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mha-conformance: history.jsonl: line 1 is no run")
    assert (tmp_path / "history.jsonl").read_text(encoding="utf-8") == "mine\n"
