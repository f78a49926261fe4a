"""The page: well formed, nothing breaks out of it, nothing leaves it, and what its script reads."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from records import (
    GRADIENT,
    NASTY,
    OUTPUT,
    REPORTS,
    bad,
    full,
    full_report,
    good,
    held,
    loaded,
    record,
    render_html,
    rendered,
    report,
    result,
    save,
)

from conformance.cases.case import describe_all
from conformance.cases.catalogue import find_cases
from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import CaseResult, Finding, Phrase, Worst
from conformance.reports import model as data
from conformance.reports.gate.baseline import Baseline, BaselineEntry
from conformance.reports.load import find_records, load
from conformance.reports.page import views
from conformance.reports.page.html import IN_FULL, PAGE
from conformance.reports.page.markdown import render_markdown
from conformance.reports.writing import build, write


class Page(HTMLParser):
    """Structure of a page: elements, links, tables as grids."""

    VOID = frozenset({"meta", "link", "br", "input", "wbr", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[list[tuple[int, int]]]] = []
        self.feed(text)
        self.close()
        assert self.stack == [], self.stack

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        own = dict(attrs)
        self.attributes.append((tag, own))
        if tag not in self.VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.stack.append(tag)
        if tag == "table":
            self.rows.append([])
        elif tag == "tr":
            self.rows[-1].append([])
        elif tag in ("td", "th"):
            span = int(own.get("colspan") or 1), int(own.get("rowspan") or 1)
            self.rows[-1][-1].append(span)

    def handle_endtag(self, tag):
        if tag not in self.VOID and tag in self.stack[-1:]:
            self.stack.pop()
        elif tag not in self.VOID and (self.get_starttag_text() or "").endswith("/>") is False:
            raise AssertionError(f"</{tag}> closes nothing: {self.stack[-3:]}")

    def widths(self) -> list[set[int]]:
        """Widths of the rows of each table, with spans."""
        found = []
        for rows in self.rows:
            open_spans: Counter[int] = Counter()
            own = set()
            for index, row in enumerate(rows):
                own.add(sum(columns for columns, _ in row) + open_spans[index])
                for columns, span in row:
                    for below in range(index + 1, index + span):
                        open_spans[below] += columns
            found.append(own)
        return found


@pytest.fixture(params=sorted(REPORTS))
def any_report(request):
    return REPORTS[request.param]()


def test_the_page_is_well_formed_and_its_tables_are_rectangular(any_report):
    page = Page(render_html(any_report))
    for widths in page.widths():
        assert len(widths) == 1
    assert page.tags["caption"] == page.tags["table"]
    for tag, attributes in page.attributes:
        if tag == "th":
            assert attributes.get("scope") in ("col", "row", "colgroup", "rowgroup")


def test_links_lead_somewhere_and_ids_are_unique(any_report):
    page = Page(render_html(any_report))
    ids = [own["id"] for _, own in page.attributes if "id" in own]
    assert len(set(ids)) == len(ids)
    targets = [own["href"] for tag, own in page.attributes if tag == "a"]
    assert targets
    for target in targets:
        assert target is not None
        if target.startswith("#"):
            assert target[1:] in ids
        else:
            assert target.startswith("https://")


def test_nothing_breaks_out_of_the_page():
    text = render_html(full_report())
    page = Page(text)
    assert page.tags["script"] == 4
    assert page.tags["style"] == 1
    assert "<script>alert" not in text
    for tag, own in page.attributes:
        assert not any(name.startswith("on") for name in own)
        assert "style" not in own
        assert not any((value or "").startswith("javascript:") for value in own.values()), tag


def test_the_page_needs_no_network_and_runs_only_its_own_script():
    text = render_html(full_report())
    page = Page(text)
    assert not {"link", "img", "iframe", "object"} & page.tags.keys()
    assert not any("src" in own for _, own in page.attributes)
    (policy,) = (own["content"] for _, own in page.attributes if own.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", content)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_verdicts_are_never_colour_alone():
    text = render_html(full_report())
    for verdict in ("conforms", "deviates", "error", "crashed", "unsupported"):
        assert re.search(rf'class="count v-{verdict}"[^>]*>\s*<span class="sign"[^>]*>\S', text)
        assert f'<span class="unseen"> {verdict}</span>' in text


def test_the_summary_says_what_was_compared():
    text = render_html(report(result(good()), result(bad(), case="a/b/self")))
    for told in (
        "2026-01-02",
        "torch 2.9",
        "cpu on Linux x86_64, Python 3.11.0",
        "a CPU",
        "2 items",
    ):
        assert told in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(scheme):
    style = (PAGE / "style.css").read_text()
    light, dark = (block for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2])
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", light))
    if scheme == "dark":
        colours |= dict(re.findall(r"--([\w-]+): (#\w{6})", dark))

    def luminance(name: str) -> float:
        parts = [int(colours[name][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    verdicts = ["conforms", "deviates", "observed", "unsupported", "error", "gone", "open"]
    for ground in ("paper", "panel"):
        for ink in ("ink", "soft", "link", *verdicts):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    for ground in ("deviates-wash", "error-wash", "open-wash"):
        for ink in verdicts:
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    assert contrast("panel", "observed") >= 4.5
    assert contrast("heat-4-ink", "heat-4") >= 4.5
    for ground in ("heat-1", "heat-2", "heat-3"):
        assert contrast("heat-ink", ground) >= 4.5


# What the page holds for its script


def findings_of(text: str) -> list[tuple]:
    """Every finding in the page, as tuples."""
    page = held(text)
    return [
        (
            page["columns"][item["column"]]["key"],
            item["case"],
            item["dtype"],
            item["mode"],
            page["requirements"][finding["requirement"]][0],
            page["verdicts"][finding["verdict"]],
            finding["figures"]["max_ratio"] if finding["figures"] else None,
            tuple(finding["worst"][name] for name in ("got", "want", "noise"))
            if finding["worst"]
            else None,
            finding.get("detail", ""),
        )
        for item in page["items"]
        for finding in item["findings"]
    ]


def test_every_finding_of_every_record_is_in_the_page():
    own = []
    for name in ("one", "two"):
        results = [
            result(good(), bad(GRADIENT), name=name),
            result(bad(), name=name, dtype="float64"),
            result(Finding(OUTPUT, "error", detail="raised"), name=name, mode="eval"),
        ]
        own.append(loaded(record(*results, name=name)))
    found = findings_of(render_html(build(own), None, own))
    for name in ("one", "two"):
        case = (name, "plain/no-mask/self")
        off = ("0.5", "0.25", "0.001")
        told = "the output is not the definition's"
        assert [entry for entry in found if entry[0] == name] == [
            (*case, "float32", "train", OUTPUT, "conforms", 2.0, None, ""),
            (*case, "float32", "train", GRADIENT, "deviates", 99.0, off, told),
            (*case, "float64", "train", OUTPUT, "deviates", 99.0, off, told),
            (*case, "float32", "eval", OUTPUT, "error", None, None, "raised"),
        ]


def test_the_data_is_text_to_the_page_whatever_a_record_says():
    own, expected, problems = full()
    text = render_html(build([own], expected, problems), None, [own])
    assert "<script>alert" not in text
    page = held(text)
    assert NASTY in [column["key"] for column in page["columns"]]
    assert NASTY in {found.get("detail") for item in page["items"] for found in item["findings"]}
    assert Page(text).tags["script"] == 4


def test_the_data_is_small():
    """A hundred thousand findings must fit into ten million bytes."""
    findings = [bad() if i % 12 == 0 else good(size=1 + i % 7) for i in range(10)]
    own = loaded(record(*(result(*findings, case=f"a/{n}/self") for n in range(400))))
    empty = len(render_html(build([own])))
    assert len(render_html(build([own]), None, [own])) - empty < 4000 * 80


def test_a_record_that_has_its_cases_shows_them_in_words():
    own = record(result(good(), case="mask/per-head/cross"))
    cases = describe_all(find_cases("mask/per-head/cross"))
    own = msgspec.structs.replace(own, header=msgspec.structs.replace(own.header, cases=cases))
    page = held(render_html(build([loaded(own)]), None, [loaded(own)]))
    (case,) = page["cases"].values()
    assert case["why"] == "An arbitrary mask for each batch entry and head."
    assert "4 queries, 6 keys" in case["facts"]
    assert case["planes"][0]["queries"] == 4


def test_the_page_is_light_until_somebody_looks_closer():
    """The tables of a hundred implementations are not on the page before they are looked at."""
    names = [f"layer-{index}" for index in range(100)]
    asked = [result(good(), bad(GRADIENT), name=name) for name in names]
    own = loaded(record(*asked))
    text = rendered(build([own]), None, [own])
    page = Page(text)
    assert sum(page.tags.values()) < 2500
    assert "and scripts are disabled" in text
    assert "mha-conformance run path/to/layer-7.py:Attention" not in text
    assert "mha-conformance run path/to/layer-7.py:Attention" in render_html(build([own]))


def test_the_gravest_findings_are_in_full_and_the_others_to_two_digits():
    found = [bad(size=1000.0 + n) for n in range(30)]
    own = loaded(record(*(result(one, case=f"a/{n}/self") for n, one in enumerate(found))))
    page = held(rendered(build([own]), None, [own]))
    sizes = [item["findings"][0]["figures"]["max_ratio"] for item in page["items"]]
    assert sizes[-IN_FULL:] == [1000.0 + n for n in range(30 - IN_FULL, 30)]
    assert set(sizes[:-IN_FULL]) == {1000.0}
    assert [bool(item["findings"][0]["worst"]) for item in page["items"]].count(True) == IN_FULL


def test_kinds_of_a_baseline_come_before_what_was_found():
    entries = (
        BaselineEntry(
            "deviates",
            requirement=(OUTPUT,),
            kind="accuracy",
            reason="In float32.",
            number=1,
            link="https://github.com/a/b/issues/1",
        ),
    )
    own = loaded(record(result(bad(), bad(GRADIENT)), result(bad(), case="a/b/self")))
    made = build([own], baseline=Baseline(Path(), "", entries))
    kinds = {(one.requirement, one.kind, one.reason, one.times) for one in made.deviations}
    assert kinds == {
        (OUTPUT, "accuracy", "In float32.", 2),
        (GRADIENT, "unsorted deviation", "", 1),
    }
    text = render_html(made)
    assert text.index("beyond rounding noise in ") < text.index("In float32.")
    for told in ("a/b/issues/1", '<span class="kind k-accuracy">accuracy</span>'):
        assert told in text


def test_the_filter_finds_what_it_filters():
    """Elements say what they speak of by numbers that the script knows."""
    own = [
        loaded(record(result(good(), bad(GRADIENT), name=name), name=name)) for name in ("a", "b")
    ]
    page = Page(render_html(build(own), None, own))
    said: dict[str, set] = {
        name: set() for name in ("data-for", "data-row", "data-dtype", "data-chapter")
    }
    for _, attributes in page.attributes:
        for name in said.keys() & attributes.keys():
            said[name] |= set((attributes[name] or "").split())
    assert said["data-for"] == {"0", "1"}
    assert said["data-dtype"] == {"float32"}
    assert said["data-chapter"] == {"output", "gradient"}
    rows = [build(own).matrix[int(place)].requirement for place in said["data-row"]]
    assert set(rows) >= {OUTPUT, GRADIENT}


def test_what_nobody_was_asked_is_one_line():
    text = render_html(report(result(good())))
    assert "that this run did not check" in text
    assert len(re.findall(r'<tr data-row="\d', text)) == 1


def test_a_report_of_experiments_alone_claims_no_conformance():
    only = CaseResult("mine", "probe/same-mask", "float32", "cpu", "train",
                      [Finding("adapter.declares-what-is-observed", "observed")])  # fmt: skip
    for page in (render_html(report(only)), render_markdown(report(only))):
        assert "took part in 1 experiment" in page
        assert "nothing was run that can be right or wrong" in page
        assert "0 problems" not in page
        assert "conform to" not in page


def test_what_is_beyond_the_axis_says_how_far():
    text = render_html(report(result(good(size=3e5)), result(good(size=7e8), case="a/b/self")))
    assert re.findall(r'class="far"[^>]*>(.*?)<', text) == ["10⁷", "10⁸"]


def test_the_worst_element_is_named_by_its_axes():
    own = bad(worst=Worst("output", (2, 1, 6), "0.5", "0.25", "0.001"))
    found = loaded(record(result(own)))
    text = render_html(build([found]), None, [found])
    assert "output[batch 2, query 1, component 6]" in text
    assert "output[batch 2, query 1, component 6]" in render_markdown(build([found]))
    assert held(text)["axes"] == {"output 3": ["batch", "query", "component"]}


# Trend


def dated(created: str, *results: CaseResult, **changes: object) -> data.Loaded:
    return loaded(record(*results, name=f"of-{created}", created=created, **changes))


def test_earlier_records_make_a_trend_and_are_in_no_table(tmp_path):
    for created, own in (
        ("2026-01-01", [result(good(), good(GRADIENT))]),
        ("2026-02-01", [result(bad(size=50.0), good(GRADIENT)), result(good(), dtype="float64")]),
        ("2026-03-01", [result(good(), bad(GRADIENT)), result(good(), dtype="float64")]),
    ):
        save(tmp_path, dated(created, *own)[1])
    found = load(find_records([tmp_path]))
    assert found.problems == []
    made = build(found.current, earlier=found.earlier)
    assert made.totals.findings == {"conforms": 2, "deviates": 1}
    (trend,) = made.trends
    first, second, third = trend.points
    assert [point.created for point in trend.points] == ["2026-01-01", "2026-02-01", "2026-03-01"]
    assert first.change is None
    assert second.change == data.Change({OUTPUT: 1}, {}, [], 1, 0)
    assert third.change == data.Change({GRADIENT: 1}, {OUTPUT: 1}, [], 0, 0)
    assert second.worst == {"float32": 50.0, "float64": 2.0}
    for page in (render_html(made), render_markdown(made)):
        assert "2026-02-01" in page
        assert "1 worse" in page
    Page(render_html(made))


def test_an_earlier_record_of_another_catalogue_is_no_problem(tmp_path):
    save(tmp_path, dated("2026-01-01", result(good()), catalogue="old")[1])
    save(tmp_path, dated("2026-02-01", result(good()))[1])
    found = load(find_records([tmp_path]))
    assert found.problems == []
    assert "other catalogue" in render_html(build(found.current, earlier=found.earlier))


@pytest.mark.parametrize("changes", [{"selection": "--dtype float32"}, {"complete": False}])
def test_a_part_is_no_point_of_a_trend(tmp_path, changes):
    save(tmp_path, dated("2026-01-01", result(good()))[1])
    save(tmp_path, dated("2026-02-01", result(good()), **changes)[1])
    found = load(find_records([tmp_path]))
    assert found.earlier == []
    assert "is already in" in found.problems[0]


def test_the_page_alone(tmp_path, capsys):
    record_file = save(tmp_path, record(result(good())))
    page = tmp_path / "new" / "page.html"
    assert write([record_file], None, html=page) == ExitCode.OK
    assert [file.name for file in page.parent.iterdir()] == ["page.html"]
    assert str(page) in capsys.readouterr().out
    with pytest.raises(ConformanceError, match="cannot be written"):
        write([record_file], None, html=tmp_path / "env.json" / "page.html")


def test_the_course_of_a_trend_is_drawn_with_its_limit():
    points = [
        data.Point("r", f"2026-0{month}-01", "0", "c", {}, {"conforms": 1}, worst, None)
        for month, worst in ((1, {"float64": 0.1}), (2, {"float64": 1000.0, "float32": 1.0}))
    ]
    float64, float32 = views.lines(data.Trend("mine", points))
    (left, low, _), (right, high, _) = float64.points
    assert left < right == float32.points[0][0]
    assert low > float32.points[0][1] > views.height(8.0) > high >= 0
    assert float64.mark != float32.mark


def test_a_feature_of_which_nothing_is_known_has_no_column():
    found = [
        data.FeatureResults("mine", name, declared, items, [])
        for name, declared, items in (
            ("Window", [], {"conforms": 2}),
            ("Sinks", ["sinks"], {}),
            ("ALiBi", [], {}),
            ("Rotary", None, {}),
        )
    ]
    known = msgspec.structs.replace(report(result(good())), features=found)
    assert views.features(known) == (["Window", "Sinks"], ["ALiBi", "Rotary"])
    page = render_html(known)
    assert "Nobody here declares, or was asked about, any of these: ALiBi; Rotary." in page
    assert 'colspan="3">Window' in page
    assert 'colspan="3">ALiBi' not in page


@pytest.mark.parametrize(
    ("size", "told"),
    [(6.0, "6.0σ, allowed 8σ, but all together: rms 1.5σ, bias 0"), (99.0, "99σ, allowed 8σ")],
)
def test_what_deviates_though_no_element_does_says_why(size, told):
    """Deviates, up to 6σ, allowed 8σ: that contradicts itself."""
    own = loaded(record(result(bad(size=size))))
    report = build([own])
    (said,) = re.findall(r"up to ([^<]*)</span></summary>", render_html(report))
    assert said == told
    assert f"- Measured: `output` {told}\n" in render_markdown(report)


@pytest.mark.parametrize(("number", "told"), [(1, True), (3, True), (4, False)])
def test_of_a_few_that_deviate_the_summary_says_how(number, told):
    scale = Phrase("scale.missing")
    results = [
        result(*(bad(requirement, cause=scale) for requirement in (OUTPUT, GRADIENT)), name=name)
        for name in "abcd"[:number]
    ]
    results += [result(bad(), name=name, case="mask/other/self") for name in "abcd"[:number]]
    page = render_html(build([loaded(record(*results))]))
    said = "equals the answer without the scale, 2 of 3 findings"
    assert page.partition("<h2>Requirements")[0].count(said) == (number if told else 0)
