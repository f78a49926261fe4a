"""The page of a report as a reader uses it: filters, drill-down, links, keys; axe looks on."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote_plus

import msgspec
import numpy as np
import pytest
from conftest import serious
from playwright.sync_api import Page, expect
from records import (
    GRADIENT,
    NASTY,
    OUTPUT,
    bad,
    entry,
    full,
    good,
    implementation,
    loaded,
    record,
    result,
)

from conformance.cases.case import describe_all
from conformance.cases.catalogue import find_cases
from conformance.records.findings import CaseResult, Finding, Phrase
from conformance.records.header import CaseInfo, Plane
from conformance.records.record import Record
from conformance.reports.changes import compare, load_side
from conformance.reports.page.html import render_changes, render_html
from conformance.reports.writing import build

CASE = "mask/per-head/cross"
LAST_QUERY = Phrase("where.query.last", {"at": 3})
NEGATED = Phrase("gradient.negated", {"arrays": [Phrase("array.key")]})
CELL = f"#of=right&requirement={OUTPUT}"


def with_cases(own: Record) -> Record:
    cases = describe_all(find_cases("mask/per-head") + find_cases("causal/square"))
    return msgspec.structs.replace(own, header=msgspec.structs.replace(own.header, cases=cases))


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> dict[str, Path]:
    """Reports: "two" implementations, a "nasty" one, an "empty" one."""
    folder = tmp_path_factory.mktemp("pages")
    results: list[CaseResult] = []
    for dtype in ("float64", "float32"):
        for mode in ("train", "eval"):
            place = {"dtype": dtype, "mode": mode}
            results += [
                result(good(), good(GRADIENT), name="right", case=CASE, **place),
                result(good(), good(GRADIENT), name="right", case="causal/square/self", **place),
                result(bad(size=1e7, where=LAST_QUERY), good(GRADIENT), name="wrong", case=CASE,
                       **place),
                result(good(), bad(GRADIENT, cause=NEGATED), name="wrong",
                       case="causal/square/self", **place),
            ]  # fmt: skip
    texts = ("mask, bool", "blocks", "fed [1 0]", "attends")
    probed = entry("masks", *texts, agrees=False, code="print(1)")
    found = [Finding("adapter.declares-what-is-observed", "deviates")]
    results.append(CaseResult("wrong", "probe/masks", "float32", "cpu", "train", found, [probed]))
    today = with_cases(record(*results, name="today", created="2026-02-02"))
    before = loaded(record(*results[:-2], name="before", created="2026-01-01"))
    own, expected, problems = full()
    reports = {
        "two": (build([loaded(today)], earlier=[before]), [loaded(today)]),
        "nasty": (build([own], expected, problems), [own]),
        "empty": (build([]), []),
    }
    made = {}
    for name, (report, records) in reports.items():
        made[name] = folder / f"{name}.html"
        made[name].write_text(render_html(report, None, records), encoding="utf-8")
    return made


def address(page: Page) -> str:
    return unquote_plus(page.evaluate("location.hash"))


def panel(page: Page):
    return page.locator("dialog[open]")


# Filters


def test_a_filter_changes_the_matrix_and_the_address(visit, files):
    page = visit(files["two"])
    cell = page.locator(f"tr[data-requirement='{OUTPUT}'] td[data-for='1']")
    expect(cell).to_contain_text("4 deviates")
    page.locator(".open-filter").click()
    page.get_by_role("checkbox", name="float32").check()
    assert address(page) == "#dtype=float32"
    expect(cell).to_contain_text("2 deviates")
    page.get_by_role("checkbox", name="deviates").check()
    expect(cell).to_have_text(re.compile(r"^✗2 deviates\s*$"))
    expect(page.locator(".outcome")).to_have_text("5 of 33 findings")
    page.get_by_role("button", name="Remove filter dtype: float32").click()
    assert address(page) == "#verdict=deviates"
    page.get_by_role("button", name="Clear all").click()
    expect(cell).to_contain_text("4 deviates")
    assert address(page) == ""


def test_implementations_and_chapters_are_hidden_everywhere(visit, files):
    page = visit(files["two"], "#implementation=right&chapter=output")
    expect(page.locator("#the-matrix th[data-column='1']")).to_be_hidden()
    expect(page.locator("#the-matrix th[data-column='0']")).to_be_visible()
    expect(page.locator("#the-matrix tbody[data-chapter=gradient]")).to_be_hidden()
    expect(page.locator("details.about")).to_be_hidden()
    page.reload()
    expect(page.locator("#the-matrix th[data-column='1']")).to_be_hidden()


def test_a_row_in_which_nothing_fits_the_filter_is_hidden(visit, files):
    page = visit(files["two"], "#implementation=right")
    row = page.locator("tr[data-requirement='adapter.declares-what-is-observed']")
    expect(row).to_be_hidden()
    page.get_by_role("button", name="Clear all").click()
    expect(row).to_be_visible()


def test_the_device_is_a_filter(visit, files):
    page = visit(files["two"], "#device=gpu")
    expect(page.locator("#matrix-nothing")).to_be_visible()
    page.locator("#matrix-nothing button").click()
    expect(page.locator("#the-matrix")).to_be_visible()


def test_two_devices_are_two_columns_of_one_filter(visit, tmp_path):
    parts = []
    for device, found in (("cpu", good()), ("gpu", bad())):
        own = msgspec.structs.replace(result(found, name="mine"), device=device)
        parts.append(loaded(record(own, name=device, device=device, driver="580.95.05")))
    file = tmp_path / "devices.html"
    file.write_text(render_html(build(parts), None, parts), encoding="utf-8")
    page = visit(file, "#device=gpu")
    expect(page.locator("#the-matrix thead").get_by_text("mine on gpu")).to_be_visible()
    expect(page.locator("#the-matrix thead").get_by_text("mine on cpu")).to_be_hidden()
    page.get_by_role("button", name="Clear all").click()
    expect(page.locator("#the-matrix thead").get_by_text("mine on cpu")).to_be_visible()
    page = visit(file, "#provenance")
    part = page.locator("section[aria-labelledby=provenance]")
    part.locator("summary", has_text="gpu").click()
    expect(part.locator("details[open]")).to_contain_text("580.95.05")


def test_the_legend_filters_by_verdict(visit, files):
    page = visit(files["two"])
    page.locator("[data-legend=deviates]").click()
    assert address(page) == "#verdict=deviates"
    expect(page.locator("[data-legend=deviates]")).to_have_attribute("aria-pressed", "true")


def test_a_verdict_of_the_legend_leads_to_what_it_filters(visit, files):
    page = visit(files["two"], viewport={"width": 1400, "height": 700})
    expect(page.locator("#the-matrix thead")).not_to_be_in_viewport()
    page.locator("[data-legend=deviates]").click()
    expect(page.locator("#the-matrix thead")).to_be_in_viewport()
    expect(page.locator(".chip")).to_be_in_viewport()


def test_one_implementation_alone_is_not_compared_with_itself(visit, tmp_path):
    records = []
    for name in ("one", "two"):
        own = result(good(), name=name)
        arrays = {f"{own.id}|{part}": np.ones(3) for part in ("output", "want", "noise")}
        records.append(loaded(record(own, name=name), arrays))
    file = tmp_path / "pairs.html"
    file.write_text(render_html(build(records), None, records), encoding="utf-8")
    page = visit(file)
    expect(page.locator(".heat")).to_be_visible()
    expect(page.locator("#pairs-nothing")).to_be_hidden()
    page.goto(f"{file.as_uri()}#implementation=one")
    expect(page.locator(".heat")).to_be_hidden()
    expect(page.locator("#pairs-nothing")).to_be_visible()
    page.goto(f"{file.as_uri()}#dtype=float32")
    expect(page.locator(".heat")).to_be_visible()


@pytest.mark.parametrize("width", [1400, 500, 360])
def test_all_columns_of_what_changed_are_on_the_screen(visit, tmp_path, width):
    for name, finding in (("before", good()), ("after", bad())):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(record(result(finding))))
    changes = compare(load_side(tmp_path / "before.json"), load_side(tmp_path / "after.json"))
    file = tmp_path / "changes.html"
    file.write_text(render_changes(changes), encoding="utf-8")
    page = visit(file, viewport={"width": width, "height": 700})
    evidence = page.locator(".found td", has_text="measured output")
    expect(evidence).to_be_visible()
    box = evidence.bounding_box()
    assert box is not None
    assert 0 <= box["x"] < box["x"] + box["width"] <= width
    column = evidence.evaluate("cell => getComputedStyle(cell, '::before').content")
    assert (column == '"Evidence"') == (width < 700)


def test_a_link_inside_the_page_keeps_the_filter(visit, files):
    page = visit(files["two"], "#dtype=float64")
    page.locator(".bar nav a", has_text="Accuracy").click()
    assert address(page) == "#dtype=float64&at=accuracy"
    expect(page.locator("#accuracy")).to_be_in_viewport()
    expect(page.locator("th[data-dtype=float32]").first).to_be_hidden()


# Down to one finding


def test_a_cell_opens_its_findings_and_one_of_them_in_full(visit, files):
    page = visit(files["two"])
    page.locator(f"tr[data-requirement='{OUTPUT}'] td[data-for='1'] a").click()
    opened = panel(page)
    expect(opened.locator("#panel-title")).to_contain_text(OUTPUT)
    expect(opened.locator(".findings li")).to_have_count(8)
    # The gravest is shown at once.
    expect(opened.locator(".findings [aria-current]")).to_contain_text(CASE)
    detail = opened.locator(".finding")
    for text in (
        "An arbitrary mask for each batch entry and head.",
        "4 queries, 6 keys",
        "1.0×10⁷σ",
        "the output is not the definition's",
        "Deviates only in: query 3 (the last).",
        f"mha-conformance reproduce {CASE} path/to/wrong.py:Attention --dtype float64 --mode train",
        f"mha-conformance run path/to/wrong.py:Attention --case {CASE}",
    ):
        expect(detail).to_contain_text(text)
    rows = detail.locator(".worst-element tr")
    assert [own.inner_text().split("\t") for own in rows.all()] == [
        ["got", "0.5"],
        ["want", "0.25"],
        ["difference", "0.25"],
        ["noise σ", "0.001"],
        ["difference / σ", "250"],
    ]
    mask = detail.get_by_role("img", name=re.compile("entry 0, head 0: 4 queries by 6 keys"))
    expect(mask).to_be_visible()
    detail.locator("figcaption summary").first.click()
    expect(detail.locator("figcaption li").first).to_contain_text("query 0 may attend keys")


def test_a_mask_too_large_to_be_drawn_is_said_to_be_one(visit, tmp_path):
    own = record(result(good(), name="right", case=CASE))
    large = CaseInfo("Why", ["mask of shape 400×400"], [Plane("", 400, 400, [])])
    own = msgspec.structs.replace(
        own, header=msgspec.structs.replace(own.header, cases={CASE: large})
    )
    file = tmp_path / "large.html"
    file.write_text(render_html(build([loaded(own)]), None, [loaded(own)]), encoding="utf-8")
    page = visit(file, CELL)
    case = panel(page).locator(".case")
    expect(case).to_contain_text("Too large to be drawn.")
    expect(case).not_to_contain_text("No mask")
    expect(case.locator("svg")).to_have_count(0)


def test_every_cell_can_be_opened(visit, files):
    page = visit(files["two"])
    expect(page.locator("#the-matrix tbody td a.open").first).to_be_attached()
    links = page.locator("#the-matrix tbody td a.open")
    assert links.count() == page.locator("#the-matrix tbody td .vector").count() > 3
    for link in links.all():
        page.evaluate("(href) => { location.hash = href; }", link.get_attribute("href"))
        expect(panel(page).locator(".finding")).to_be_visible()


def test_findings_are_chosen_from_the_list_and_the_way_back_leads_there(visit, files):
    page = visit(files["two"], f"#requirement={OUTPUT}")
    expect(panel(page).locator(".findings li")).to_have_count(16)
    panel(page).locator(".findings a", has_text="right").first.click()
    assert f"of=right&requirement={OUTPUT}" in address(page)
    expect(panel(page).locator(".findings li")).to_have_count(16)
    expect(panel(page).locator(".finding")).to_contain_text("conforms")
    page.go_back()
    assert address(page) == f"#requirement={OUTPUT}"
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()
    assert address(page) == ""


def test_the_filter_holds_in_the_panel(visit, files):
    page = visit(files["two"], f"#dtype=float32&of=wrong&requirement={OUTPUT}")
    expect(panel(page).locator(".findings li")).to_have_count(4)
    panel(page).get_by_role("button", name="Remove filter dtype: float32").click()
    expect(panel(page).locator(".findings li")).to_have_count(8)


def test_a_panel_leaves_the_filtered_page_as_it_is(visit, files):
    page = visit(files["two"], "#dtype=float32")
    link = page.locator(f"tr[data-requirement='{OUTPUT}'] td[data-for='1'] a")
    link.click()
    panel(page).locator(".findings a").nth(1).click()
    page.keyboard.press("Escape")
    # The cell that was opened is still there, to go on from.
    expect(link).to_be_focused()
    assert address(page) == "#dtype=float32"
    page.evaluate("location.hash = '#dtype=float64'")
    expect(page.locator("th[data-dtype=float32]").first).to_be_hidden()
    assert (
        unquote_plus(link.get_attribute("href")) == f"#dtype=float64&of=wrong&requirement={OUTPUT}"
    )


def test_a_deep_link_shows_one_finding(visit, files):
    place = f"#of=right&requirement={OUTPUT}&case={CASE}&in=float32&mode=eval"
    page = visit(files["two"], place)
    expect(panel(page).locator("#finding-title")).to_contain_text(CASE)
    expect(panel(page).locator(".finding .kicker")).to_have_text(
        "right · float32 · mode eval · cpu"
    )
    assert address(page) == place


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("#of=nobody&requirement=no.such", "Not in this report"),
        (f"{CELL}&case=no/such/case&in=float32&mode=eval", "that this report does not have"),
        ("#card=nobody", "Not in this report"),
        ("#card=right", "Not in this report"),
        ("#case=x", "that this report does not have"),
        ("#%", ""),
        ("#of=%E0%A4%A", "Not in this report"),
    ],
)
def test_an_address_that_leads_nowhere_says_so(visit, files, place, said):
    page = visit(files["two"], place)
    if said:
        expect(panel(page)).to_contain_text(said)
        page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


def test_a_card_has_what_was_seen_and_declared(visit, files):
    page = visit(files["two"])
    page.locator(".glance a", has_text="wrong").click()
    assert address(page) == "#card=wrong"
    for text in ("Not as the adapter declares", "fed [1 0]", "print(1)", "probe path/to/wrong.py"):
        expect(panel(page)).to_contain_text(text)


# Keys


def test_arrow_keys_go_from_cell_to_cell(visit, files):
    page = visit(files["two"])
    first = page.locator(f"tr[data-requirement='{OUTPUT}'] a.open")
    first.nth(1).focus()
    page.keyboard.press("ArrowRight")
    expect(first.nth(2)).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.locator(f"tr[data-requirement='{GRADIENT}'] a.open").nth(2)).to_be_focused()
    page.keyboard.press("Enter")
    expect(panel(page).locator("#panel-title")).to_be_focused()
    expect(panel(page).locator("#panel-title")).to_contain_text(GRADIENT)
    page.keyboard.press("Escape")
    expect(page.locator(f"tr[data-requirement='{GRADIENT}'] a.open").nth(2)).to_be_focused()
    # The matrix is one stop on the way through the page.
    assert page.locator("#the-matrix a.open[tabindex='0']").count() == 1


def test_arrow_keys_go_through_the_list(visit, files):
    page = visit(files["two"], CELL)
    page.locator(".findings a").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(panel(page).locator("#finding-title")).to_be_focused()
    expect(page.locator(".findings a").nth(1)).to_have_attribute("aria-current", "true")


def test_the_filter_is_reached_and_left_by_keys(visit, files):
    page = visit(files["two"])
    button = page.locator(".open-filter")
    button.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#choices")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert address(page) == "#implementation=right"
    page.keyboard.press("Escape")
    expect(page.locator("#choices")).to_be_hidden()
    expect(button).to_be_focused()


# Whatever a record says


def test_a_name_that_looks_like_a_script_is_text(visit, files):
    page = visit(files["nasty"])
    dialogs = []
    page.on("dialog", lambda shown: (dialogs.append(shown.message), shown.dismiss()))
    page.locator("#the-matrix thead a.open").last.click()
    expect(panel(page).locator("#panel-title")).to_have_text(NASTY)
    for link in panel(page).locator(".findings a").all():
        page.evaluate("(href) => { location.hash = href; }", link.get_attribute("href"))
        expect(panel(page).locator(".finding")).to_be_visible()
    expect(panel(page)).to_contain_text("<script>alert")
    assert page.locator("script:not([type])").count() == 1
    assert dialogs == []


def test_without_a_script_there_is_the_summary_and_it_says_so(visit, files):
    page = visit(files["two"], java_script_enabled=False)
    expect(page.locator("#tools")).to_be_hidden()
    expect(page.locator(".standings")).to_contain_text("wrong")


def test_a_folded_implementation_has_its_deviations_when_it_is_opened(visit, files):
    page = visit(files["two"])
    own = page.locator("details.about")
    expect(own.locator("details.panel")).to_have_count(0)
    own.locator("summary").first.click()
    own.locator("details.panel summary").first.click()
    expect(own.locator("details.panel[open]").first).to_contain_text("mha-conformance run")
    # An address leads into what is folded.
    anchor = own.locator("details.panel [id]").first.get_attribute("id")
    page = visit(files["two"], f"#{anchor}")
    expect(page.locator(f"#{anchor}")).to_be_visible()


def test_words_find_implementations_requirements_causes_and_cases(visit, files):
    page = visit(files["two"])
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("causal sq")
    expect(page.locator(".hits h2")).to_have_text(re.compile("^Cases"))
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(panel(page).locator("#finding-title")).to_contain_text("causal/square")
    page.keyboard.press("Escape")
    page.locator("#search").fill("wrong")
    expect(page.locator(".hits")).to_contain_text("Implementations")
    page.locator("#search").fill("<b>")
    expect(page.locator(".hits")).to_contain_text("Nothing in this report has these words.")
    page.keyboard.press("Escape")
    expect(page.locator(".hits")).to_be_hidden()


def test_nothing_to_report_is_said(visit, files):
    page = visit(files["empty"])
    expect(page.locator("header.page")).to_contain_text("There is no record to report on")
    expect(page.locator("#tools")).to_be_hidden()


# Looks


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["two", "nasty", "empty"])
def test_axe_finds_no_serious_fault_on_the_page(visit, files, name, scheme):
    page = visit(files[name], color_scheme=scheme, reduced_motion="reduce")
    page.evaluate("document.querySelectorAll('details').forEach((own) => { own.open = true; })")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert serious(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "place",
    [
        f"#of=wrong&requirement={OUTPUT}",
        "#card=wrong",
        "#of=wrong&by=implementation&verdict=deviates",
        "#of=nobody",
    ],
)
def test_axe_finds_no_serious_fault_in_a_panel(visit, files, place, scheme):
    page = visit(files["two"], place, color_scheme=scheme, reduced_motion="reduce")
    expect(panel(page)).to_be_visible()
    assert serious(page) == []


@pytest.mark.parametrize("width", [320, 390, 1400, 1920])
@pytest.mark.parametrize("place", ["", "#verdict=deviates&dtype=float32", CELL, "#card=wrong"])
def test_nothing_is_wider_than_the_screen(visit, files, width, place):
    page = visit(files["two"], place, viewport={"width": width, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if place in (CELL, "#card=wrong"):
        wide = "(own) => own.scrollWidth - own.clientWidth"
        for pane in page.locator("dialog .panel-body, dialog .list, dialog .detail-pane").all():
            assert pane.evaluate(wide) <= 0


def test_headings_of_the_matrix_stay_in_sight(visit, files):
    page = visit(files["two"], viewport={"width": 1400, "height": 600})
    last = page.locator("#the-matrix tbody tr[data-row] th").last
    last.scroll_into_view_if_needed()
    expect(page.locator("#the-matrix thead .corner")).to_be_in_viewport()
    page.set_viewport_size({"width": 375, "height": 600})
    last.scroll_into_view_if_needed()
    page.locator("#the-matrix").evaluate(
        "(own) => { own.parentElement.scrollIntoView(); own.parentElement.scrollLeft = 60; }"
    )
    expect(last).to_be_in_viewport(ratio=0.9)
    expect(page.locator("#the-matrix thead .corner")).to_be_in_viewport()


def of_layers(folder, count):
    """A report with so many columns."""
    own = loaded(record(*(result(good(), name=f"layer-{n}") for n in range(count))))
    file = folder / "layers.html"
    file.write_text(render_html(build([own]), None, [own]), encoding="utf-8")
    return file


def test_what_is_cut_fades_and_what_fits_is_whole(visit, tmp_path):
    page = visit(of_layers(tmp_path, 14), viewport={"width": 1900, "height": 700})
    box = page.locator(".broad:has(#the-matrix)")
    expect(box).to_have_class(re.compile(r"\bfits\b"))
    expect(box).not_to_have_class(re.compile("cut-right"))
    page.set_viewport_size({"width": 700, "height": 700})
    expect(box).to_have_class(re.compile("cut-right"))
    box.evaluate("(own) => { own.scrollLeft = 1e5; }")
    expect(box).not_to_have_class(re.compile("cut-right"))
    sections = page.locator(".bar nav")
    expect(sections).to_have_class(re.compile("cut-right"))
    page.set_viewport_size({"width": 1900, "height": 700})
    expect(sections).not_to_have_class(re.compile("cut-right"))
    expect(sections).to_have_attribute("aria-label", "Sections")


def test_rows_out_of_sight_are_there_in_the_end(visit, tmp_path):
    """Those who search in the page, save it or take a picture of all of it found empty rows."""
    page = visit(of_layers(tmp_path, 30), viewport={"width": 1400, "height": 300})
    rows = page.locator("#the-matrix tr[data-row]")
    expect(page.locator("#the-matrix td.cell")).to_have_count(30 * rows.count())


def test_on_a_phone_every_cell_of_the_conventions_is_in_sight(visit, files):
    page = visit(files["two"], viewport={"width": 390, "height": 800})
    for table in page.locator(".stacked").all():
        assert table.evaluate("(own) => own.parentElement.scrollWidth") <= 390
    expect(page.locator(".conventions [data-label]").first).to_be_visible()


def test_on_a_phone_every_cell_of_the_versions_is_in_sight(visit, tmp_path):
    versions = [
        loaded(
            record(
                result(finding, name="layer"),
                name=number,
                implementations=[implementation("layer", versions={"library-of-it": number})],
                packages={"numpy": f"{number}.10", "another-package": f"{number}.1"},
            )
        )
        for number, finding in (("1.18", good()), ("1.19", bad()))
    ]
    file = tmp_path / "versions.html"
    report = build(versions[1:], versions=versions[:1])
    file.write_text(render_html(report, None, versions[1:]), encoding="utf-8")
    page = visit(file, viewport={"width": 390, "height": 800})
    for cell in page.locator(".versions tbody :is(th, td) > *").all():
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390, cell.inner_text()
    expect(page.locator(".versions [data-label]", has_text="1 worse")).to_be_visible()


def test_paper_has_the_open_panel_alone(visit, files):
    page = visit(files["two"], CELL)
    page.emulate_media(media="print")
    expect(page.locator("header.page")).to_be_hidden()
    expect(page.locator(".finding")).to_be_visible()
    page.emulate_media(media="screen")
    page.keyboard.press("Escape")
    page.emulate_media(media="print")
    expect(page.locator(".bar")).to_be_hidden()
    expect(page.locator("#the-matrix")).to_be_visible()


def test_a_long_list_is_shown_in_parts(visit, tmp_path):
    asked = [bad() if n % 9 == 0 else good() for n in range(300)]
    results = [result(one, case=f"many/{n}/self", name="long") for n, one in enumerate(asked)]
    own = loaded(record(*results, implementations=[implementation("long")]))
    file = tmp_path / "long.html"
    file.write_text(render_html(build([own]), None, [own]), encoding="utf-8")
    page = visit(file, f"#of=long&requirement={OUTPUT}")
    expect(panel(page).locator(".findings li")).to_have_count(80)
    panel(page).get_by_role("button", name=re.compile("Show more")).click()
    expect(panel(page).locator(".findings li")).to_have_count(300)
    expect(panel(page).locator(".findings a").nth(80)).to_be_focused()
    verdicts = panel(page).locator(".findings .mark").all_inner_texts()
    assert [own.split()[0] for own in verdicts] == ["✗"] * 34 + ["✓"] * 266


def test_equal_errors_are_one_line_until_somebody_asks(visit, tmp_path):
    failed = [
        Finding(name, "error", detail=f"ValueError: no (at {name}:1)")
        for name in (OUTPUT, GRADIENT)
    ]
    results = [result(*failed, case=f"many/{n}/self", name="odd") for n in range(5)]
    results.append(result(bad(), name="odd"))
    own = loaded(record(*results, implementations=[implementation("odd")]))
    file = tmp_path / "odd.html"
    file.write_text(render_html(build([own]), None, [own]), encoding="utf-8")
    page = visit(file, "#of=odd")
    expect(panel(page).locator(".findings a")).to_have_count(2)
    page.keyboard.press("Tab")
    panel(page).get_by_role("button", name="and 9 findings more with this error").click()
    expect(panel(page).locator(".findings a")).to_have_count(11)
    expect(panel(page).locator(".findings a").nth(1)).to_be_focused()
    # A link to one of the others shows it in the list.
    place = (
        f"#of=odd&requirement={GRADIENT}&case=many/3/self&in=float32&mode=train&by=implementation"
    )
    page = visit(file, place)
    expect(panel(page).locator(".findings [aria-current]")).to_contain_text("many/3/self")
