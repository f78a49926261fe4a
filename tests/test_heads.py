"""Heads to look at: what a figure shows, what the command says, and how it gets into the report."""

from __future__ import annotations

import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from records import looked_at, render_html

from conformance.adapter.loading import load
from conformance.cases.catalogue import find_cases
from conformance.cli import main
from conformance.commands.heads import ask
from conformance.commands.shared import replace_file
from conformance.errors import ConformanceError, ExitCode, WrongShape
from conformance.records.findings import (
    CaseResult,
    Figures,
    Finding,
    Phrase,
    Worst,
    item_id,
    of_weights,
)
from conformance.records.record import read, read_arrays
from conformance.reports.figures import (
    INK,
    PAPER,
    FigureSubject,
    heatmap,
    picture,
    png,
    sentences,
    svg,
    title,
)
from conformance.reports.figures.heatmap import TEXT_UP_TO, HeatGrid, number, ticks
from conformance.reports.load import load as load_records
from conformance.reports.page.html import figures
from conformance.reports.writing import build
from conformance.running import session as examiner
from conformance.running.session import Item, plan

SVG = "{http://www.w3.org/2000/svg}"
HERE = Path(__file__).parent
MINIATURES = HERE / "mutants/miniatures.py"
SUBJECT = FigureSubject("mine", "a/b/self", "float32", "default", "cpu")
NASTY = "<script>alert('1')</script>&\"]]>--"
EASY = ("--case", "mask/per-head/self")

PART = """
from conformance import Mode
from mutants.miniatures import Correct, attention

class Averaged(Correct):
    returns_weights = "averaged"
    def attend(self, query, key, value, masks, **options):
        context, weights = attention(query, key, value, **masks, **options)
        return context, weights.mean(axis=1, dtype=weights.dtype)

class Silent(Correct):
    returns_weights = None
    def attend(self, query, key, value, masks, **options):
        return attention(query, key, value, **masks, **options)[0]

class Sometimes(Correct):
    modes = (Mode("fast", weights=False), Mode("slow"), Mode("slower"))
"""


def drawn(got, want=None, *, blocked=None, noise=1e-3, subject=SUBJECT, **options):
    """A picture of arrays; the reference is the same as what came, if not given."""
    got = np.asarray(got, np.float64)
    want = got if want is None else np.asarray(want, np.float64)
    none = np.zeros(got.shape, np.bool_)
    return picture(
        subject,
        got=got,
        want=want,
        noise=np.broadcast_to(noise, got.shape).astype(np.float64),
        blocked=none if blocked is None else np.broadcast_to(blocked, got.shape),
        underflow=0.0,
        **options,
    )


def maps(text):
    """The heat maps of a figure, row by row: `<g transform="translate(...)">` with a frame."""
    root = ET.fromstring(text)
    groups = [g for g in root.findall(f"{SVG}g") if g.find(f"{SVG}rect[@fill='none']") is not None]
    return root, groups


def texts(element):
    """All texts in cells: those of groups that have a fill."""
    return [
        "".join(text.itertext())
        for group in element.findall(f"{SVG}g[@fill]")
        for text in group.findall(f"{SVG}text")
    ]


def fills(element):
    """(ink, opacity, cells) of the map's shades."""
    return {
        (path.get("fill"), float(path.get("fill-opacity", "1"))): path.get("d", "").count("M")
        for path in element.findall(f"{SVG}path[@shape-rendering]")
    }


WEIGHTS = [[[[1.0, 0.0], [0.25, 0.75]]]]
REFERENCE = [[[[1.0, 0.0], [0.5, 0.5]]]]


# Numbers


def test_a_row_is_told_in_numbers():
    row = drawn(WEIGHTS, REFERENCE).row(0, 0)
    assert row.difference == 0.25
    assert row.ratio == pytest.approx(250)
    assert row.at == (1, 0)
    assert not row.fits
    assert drawn(WEIGHTS).row(0, 0).fits


def test_the_entry_that_is_furthest_off_is_shown():
    got = np.zeros((3, 1, 2, 2))
    want = got.copy()
    want[1] += 0.1
    want[2] += 0.2
    assert drawn(got, want).entries == (2,)
    assert drawn(got).entries == (0,)
    assert drawn(got, want, entry=1).entries == (1,)
    assert drawn(got, want, every=True).entries == (0, 1, 2)
    got[1] = np.nan
    assert drawn(got, want).entries == (1,)
    want[:] = 0
    got[:] = 0.1
    got[2] = 0.2
    assert drawn(got, want, noise=0.0).entries == (2,), "all are infinitely far; the larger miss"


def test_within_the_noise_the_first_entry_is_shown():
    want = np.zeros((2, 1, 2, 2))
    want[1] += 1e-3
    assert drawn(np.zeros(want.shape), want).entries == (0,)


@pytest.mark.parametrize("entry", [-1, 2])
def test_an_entry_that_is_not_there_is_an_error(entry):
    with pytest.raises(ConformanceError, match="there are 0 to 1"):
        drawn(np.zeros((2, 1, 2, 2)), entry=entry)


def test_arrays_that_do_not_fit_together_are_an_error():
    with pytest.raises(WrongShape, match="cannot be drawn"):
        drawn(np.zeros((1, 2, 2, 2)), np.zeros((1, 2, 2)), blocked=False)
    with pytest.raises(WrongShape):
        drawn(np.zeros((1, 0, 2, 2)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.123, "0.12"), (1.0, "1.00"), (1e-5, "1e−5"), (-0.3, "−0.30"), (12.3, "12"),
        (-2e-7, "−2e−7"), (4e5, "4e5"), (np.nan, "NaN"), (-np.inf, "−∞"),
    ],
)  # fmt: skip
def test_cells_are_short_and_zero_is_only_zero(value, text):
    assert heatmap.cell(value) == text


def test_what_is_not_zero_has_a_colour():
    assert heatmap.shade(0.0, 1.0) == 0
    assert heatmap.shade(1e-9, 1.0) > 0
    assert heatmap.shade(-7.0, 1.0) == 1
    assert heatmap.exponent(3.2e-8) == -8
    assert heatmap.exponent(0.3) == 0


def luminance(colour):
    parts = [part / 255 for part in colour]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def rgb(colour):
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], np.float64)


@pytest.mark.parametrize(("paper", "ink"), [(PAPER, INK), ("#1b1f23", "#e6e4df")])
@pytest.mark.parametrize("colour", [heatmap.WEIGHT, heatmap.MORE, heatmap.LESS])
def test_numbers_are_legible_on_every_shade(paper, ink, colour):
    for step in range(heatmap.STEPS + 1):
        opacity = step / heatmap.STEPS
        ground = opacity * rgb(colour) + (1 - opacity) * rgb(paper)
        text = rgb("#ffffff" if opacity > heatmap.WHITE_ABOVE else ink)
        low, high = sorted((luminance(ground), luminance(text)))
        assert (high + 0.05) / (low + 0.05) >= 3.9, opacity


# Figures


def test_cells_have_their_colours_and_values():
    root, (got, want, difference) = maps(svg(drawn(WEIGHTS, REFERENCE)))
    assert texts(got) == ["0", "0.25", "0.75", "1.00"]
    assert fills(got) == {
        (heatmap.WEIGHT, 1.0): 1, (heatmap.WEIGHT, 0.76): 1, (heatmap.WEIGHT, 0.24): 1,
    }  # fmt: skip
    assert sorted(texts(want)) == ["0", "0.50", "0.50", "1.00"]
    assert sorted(texts(difference)) == ["+0.25", "0", "0", "−0.25"]
    assert fills(difference) == {(heatmap.MORE, 1.0): 1, (heatmap.LESS, 1.0): 1}
    told = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    for word in ("mine: attention weights of a/b/self", "float32", "query", "key", "head 0",
                 "reference", "beyond noise", "max |difference| 0.25", "250σ"):  # fmt: skip
        assert word in told, word


def test_a_figure_is_accessible():
    root, _ = maps(svg(drawn(WEIGHTS, REFERENCE), name="x"))
    assert root.get("role") == "img"
    labels = (root.get("aria-labelledby") or "").split()
    ids = {element.get("id"): element for element in root.iter() if element.get("id")}
    assert [ids[label].tag for label in labels] == [f"{SVG}title", f"{SVG}desc"]
    assert all(name.startswith("x-") for name in ids)
    assert "head 0: beyond noise: 250σ, allowed 8σ" in (ids[labels[1]].text or "")


def test_blocked_pairs_are_hatched_and_a_leak_is_framed():
    blocked = [[[[False, True], [False, True]]]]
    root, (got, want, _) = maps(svg(drawn(WEIGHTS, [[[[1, 0], [1, 0]]]], blocked=blocked)))
    assert len(got.findall(f"{SVG}path[@stroke-opacity='.3']")) == 1
    (marks,) = got.findall(f"{SVG}path[@stroke='{heatmap.MORE}']")
    assert marks.get("d", "").count("M") == 1, "the other blocked pair is zero"
    assert want.find(f"{SVG}path[@stroke='{heatmap.MORE}']") is None
    assert texts(want) == ["1.00", "1.00"], "a hatch alone says that nothing is there"
    told = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    assert "a leak" in told
    assert "blocked, but not zero: 1" in told
    assert "a leak" not in svg(drawn(REFERENCE))


@pytest.mark.parametrize("size", [2, TEXT_UP_TO + 1])
def test_what_is_no_number_has_a_colour_and_a_sign(size):
    values = np.zeros((1, 1, size, size))
    values[0, 0, 0] = np.nan
    root, (got, _, difference) = maps(svg(drawn(values, np.zeros_like(values))))
    for element in (got, difference):
        assert fills(element)[heatmap.UNREAL, 1.0] == size
        if size <= TEXT_UP_TO:
            assert texts(element).count("NaN") == size
        else:
            assert len(element.findall(f"{SVG}path[@stroke='#fff']")) == 1
    assert "NaN: no number" in " ".join(t.text or "" for t in root.iter(f"{SVG}text"))


def test_a_negative_weight_is_not_taken_for_a_small_one():
    text = svg(drawn([[[[-0.5, 1.5]]]]))
    _, (got, _, _) = maps(text)
    assert fills(got) == {(heatmap.LESS, 0.5): 1, (heatmap.WEIGHT, 1.0): 1}
    assert "a negative weight" in text


def test_small_differences_have_a_unit():
    text = svg(drawn(np.array(WEIGHTS) + 3e-8, WEIGHTS, noise=1e-8))
    root, (*_, difference) = maps(text)
    assert texts(difference) == ["+3.00"] * 4
    assert "difference ×10−8" in ["".join(t.itertext()) for t in root.iter(f"{SVG}text")]
    assert "within noise" in text


def test_weights_averaged_over_heads_are_one_row():
    shown = drawn(np.array(WEIGHTS)[:, 0], np.array(REFERENCE)[:, 0])
    assert shown.averaged
    _, groups = maps(svg(shown))
    assert len(groups) == 3
    assert "mean over" in svg(shown)
    assert sentences(shown)[0].startswith("Batch entry 0, mean over heads: beyond noise")


def test_every_head_of_every_entry_is_a_row():
    values = np.full((2, 3, 4, 5), 0.2)
    root, groups = maps(svg(drawn(values, every=True)))
    assert len(groups) == 2 * 3 * 3
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert names.count("head 2") == 2
    assert "batch entry 1" in names


def test_long_maps_have_no_text_and_few_ticks():
    values = np.random.default_rng(0).dirichlet(np.ones(131), (1, 2, 19))
    text = svg(drawn(values))
    _, groups = maps(text)
    assert not any(texts(group) for group in groups)
    assert ticks(131) == list(range(0, 131, 10))
    assert ticks(7) == list(range(7))
    assert len(text) < 400_000
    assert HeatGrid(19, 131).width < 480


def test_hostile_names_stay_text():
    subject = FigureSubject(NASTY, NASTY, NASTY, NASTY, NASTY, NASTY)
    text = svg(drawn(WEIGHTS, subject=subject))
    root = ET.fromstring(text)
    assert "<script" not in text
    assert not list(root.iter(f"{SVG}script"))
    assert unescape(root.find(f"{SVG}title").text or "") == title(drawn(WEIGHTS, subject=subject))


def test_a_figure_needs_no_style_and_fetches_nothing():
    text = svg(drawn(WEIGHTS, REFERENCE, blocked=True))
    assert not re.search(r"\bstyle=|<style|href|url\(|<image|<script", text)


def test_a_figure_alone_has_paper_and_one_in_a_page_has_the_pages():
    assert PAPER in svg(drawn(REFERENCE))
    inline = svg(drawn(REFERENCE), alone=False)
    assert PAPER not in inline
    assert INK not in inline


# Asking


def asked(spec, entry=""):
    (case,) = find_cases("mask/per-head/self")
    return ask(load(spec), case, entry=entry)


def test_the_picture_is_what_the_implementation_answers():
    seen = asked(f"{MINIATURES}:Inverted")
    (case,) = find_cases("mask/per-head/self")
    (entry,) = seen.entries
    blocked = ~case.problem("float32").allowed_in_full()[entry]
    assert np.array_equal(seen.blocked[0], blocked)
    assert np.all(seen.want[0][blocked] == 0)
    assert seen.leaks.any()
    right = asked(f"{MINIATURES}:Correct")
    assert all(right.row(0, head).fits for head in range(3))


@pytest.fixture
def doubles(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    file = tmp_path / "doubles.py"
    file.write_text(PART)
    return file


def test_averaged_weights_are_drawn_against_the_averaged_reference(doubles):
    shown = asked(f"{doubles}:Averaged", entry="all")
    assert shown.averaged
    assert shown.got.shape == (2, 1, 7, 7)
    assert all(shown.row(entry, 0).fits for entry in range(2))


def test_the_first_mode_with_weights_is_drawn(doubles):
    seen = asked(f"{doubles}:Sometimes")
    assert seen.subject.mode == "slow"


# The command


def heads(*arguments):
    return main(["heads", *map(str, arguments)])


@pytest.mark.parametrize("suffix", ["svg", "html", "png"])
def test_the_three_formats(tmp_path, capsys, suffix):
    if suffix == "png":
        pytest.importorskip("resvg_py")
    output = tmp_path / f"heads.{suffix}"
    assert heads(f"{MINIATURES}:Inverted", *EASY, "-o", output) == ExitCode.OK
    content = output.read_bytes()
    assert content.startswith(
        {"svg": b"<svg", "html": b"<!doctype html>", "png": b"\x89PNG"}[suffix]
    )
    assert [path.name for path in tmp_path.iterdir()] == [output.name]
    printed = capsys.readouterr().out
    assert "head 0: beyond noise" in printed
    assert printed.splitlines()[-1] == f"drawn: {output}"


def test_the_page_stands_alone(tmp_path):
    output = tmp_path / "heads.html"
    heads(f"{MINIATURES}:Inverted", *EASY, "-o", output)
    text = output.read_text()
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert "default-src 'none'" in unescape(text)
    assert f"style-src 'sha256-{digest}'" in unescape(text)
    assert not re.search(r"<script|<link|<img|\bstyle=|src=", text)
    for word in ("mask/per-head/self", "numpy 2", "mha-conformance 0", "--mode default", "--entry"):
        assert word in text, word
    (case,) = find_cases("mask/per-head/self")
    assert case.why in unescape(text)


def test_the_command_in_the_page_draws_the_same_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heads(f"{MINIATURES}:Inverted", *EASY, "-o", "heads.html")
    first = Path("heads.html").read_text()
    (command,) = re.findall(r"<pre><code>mha-conformance heads (.*?)</code>", first)
    Path("heads.html").unlink()
    assert heads(*unescape(command).split()) == ExitCode.OK
    assert Path("heads.html").read_text() == first


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("Correct", *EASY, "-o", "x.jpg"), ExitCode.USAGE, ".svg, .png or .html"),
        (("Correct", *EASY, "-o", "x"), ExitCode.USAGE, ".svg, .png or .html"),
        (("Correct", *EASY, "-o", "no/folder/x.svg"), ExitCode.USAGE, "cannot be written"),
        (("Correct", *EASY, "-o", "."), ExitCode.USAGE, "the name says"),
        (("Correct", "--case", "nope", "-o", "x.svg"), ExitCode.USAGE, "unknown case 'nope'"),
        (("Correct", "--case", "mask/*/self", "-o", "x.svg"), ExitCode.USAGE, "say which: mask/"),
        (("Wrong", *EASY, "-o", "x.svg"), ExitCode.USAGE, "has no 'Wrong'"),
        (("Correct", *EASY, "--mode", "no", "-o", "x.svg"), ExitCode.USAGE, "unknown mode 'no'"),
        (("Correct", *EASY, "--dtype", "f32", "-o", "x.svg"), ExitCode.USAGE, "unknown dtype"),
        (("Correct", *EASY, "--entry", "2", "-o", "x.svg"), ExitCode.USAGE, "0 to 1"),
        (("Correct", *EASY, "--entry", "two", "-o", "x.svg"), ExitCode.USAGE, "a number, or all"),
        (("Refuses", *EASY, "-o", "x.svg"), ExitCode.NOTHING_VERIFIED, "today I cannot"),
        (("Raises", *EASY, "-o", "x.svg"), ExitCode.NOTHING_VERIFIED, "ValueError: this mask"),
        (("Exits", *EASY, "-o", "x.svg"), ExitCode.NOTHING_VERIFIED, "SystemExit"),
        (("WrongShape", *EASY, "-o", "x.svg"), ExitCode.NOTHING_VERIFIED, "has shape"),
        (("Unready", *EASY, "-o", "x.svg"), ExitCode.NOTHING_VERIFIED, "the abacus"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, arguments, code, told
):
    monkeypatch.chdir(tmp_path)
    name, *rest = arguments
    assert heads(f"{MINIATURES}:{name}", *rest) == code
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("mha-conformance: ")
    assert told in printed.err
    assert not printed.out
    assert not list(tmp_path.iterdir())


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path, capsys):
    (tmp_path / "x.svg").mkdir()
    assert heads(f"{MINIATURES}:Correct", *EASY, "-o", tmp_path / "x.svg") == ExitCode.USAGE
    assert "is a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("Silent",), "returns no attention weights, so there is nothing to draw; if it does"),
        (("Sometimes", "--mode", "fast"), "in mode fast; try --mode slow\n"),
    ],
)
def test_without_weights_it_says_which_mode_has_them(doubles, capsys, arguments, told):
    name, *rest = arguments
    output = doubles.with_name("x.svg")
    code = heads(f"{doubles}:{name}", *rest, *EASY, "-o", output)
    assert code == ExitCode.NOTHING_VERIFIED
    assert told in capsys.readouterr().err
    assert not output.exists()


def test_what_was_there_survives_a_failed_write(tmp_path, monkeypatch):
    output = tmp_path / "x.svg"
    output.write_bytes(b"before")

    def full(path, content):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConformanceError, match=r"No space left on device\); name another"):
        replace_file(output, b"after")
    monkeypatch.undo()
    assert output.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]


def test_without_the_library_a_png_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "resvg_py", None)
    output = tmp_path / "x.png"
    assert heads(f"{MINIATURES}:Correct", *EASY, "-o", output) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "pip install resvg_py" in told
    assert told.count("\n") == 1
    assert heads(f"{MINIATURES}:Correct", *EASY, "-o", output.with_suffix(".svg")) == ExitCode.OK


def test_a_png_without_any_font_is_an_error_and_no_silent_picture():
    pytest.importorskip("resvg_py")
    with pytest.raises(ConformanceError, match="needs a font"):
        png(svg(drawn(WEIGHTS)), skip_system_fonts=True)


# Records and the report


def item(name="mine", case="mask/per-head/self", dtype="float32", size=100.0, cause="", mode="m"):
    """A result in which the weights deviate."""
    finding = Finding(
        "weights.equal-definition", "deviates", detail="not the definition's", cause=Phrase(cause),
        figures=Figures("weights", size, size / 2, 0.0, 8.0),
        worst=Worst("weights", (0, 0, 0, 0), "1", "0", "0.1"),
    )  # fmt: skip
    return CaseResult(name, case, dtype, "cpu", mode, [finding])


def test_the_gravest_do_not_depend_on_the_order():
    results = [item(dtype=f"d{i}", size=10.0 + i % 5, cause=f"c{i % 2}") for i in range(20)]
    places = {result.id: place for place, result in enumerate(results)}

    def kept(order):
        gravest = examiner.WorstItems(places)
        handed = {result.id for result in order if gravest.takes(result)}
        assert gravest.ids <= handed
        return gravest.ids

    wanted = kept(results)
    assert len(wanted) == 2 * examiner.MOST
    random = np.random.default_rng(0)
    for _ in range(20):
        shuffled = [results[i] for i in random.permutation(20)]
        assert kept(shuffled) == wanted
        # As in two processes, whose gravest together hold the gravest of all.
        assert wanted <= kept(shuffled[:10]) | kept(shuffled[10:])


def test_what_is_too_large_or_not_about_weights_is_left_out():
    adapter = load(f"{MINIATURES}:Correct")
    cases = find_cases("plain/no-mask/*")
    own = examiner.places(plan([adapter], cases, ["float32"], "cpu"))
    named = {name.split(":")[1] for name in own}
    assert "plain/no-mask/self" in named
    assert "plain/no-mask/long" not in named
    output = Finding("output.equals-definition", "deviates", figures=Figures("output", 9, 9, 0, 8))
    (case,) = find_cases("plain/no-mask/self")
    of_case = Item(adapter, case, "float32", "cpu", adapter.modes[0])
    result = CaseResult("Correct", case.id, "float32", "cpu", "default", [output])
    assert of_case.id == result.id
    assert not examiner.WorstItems(own).takes(result)


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory):
    """A folder with records of one who is wrong and one who is right."""
    folder = tmp_path_factory.mktemp("records")
    cases = ("--case", "mask/*/self", "--case", "mask/*/cross", "--dtype", "float32")
    for name in ("Inverted", "Correct"):
        code = main(
            ["run", f"{MINIATURES}:{name}", *cases, "--record", str(folder / f"{name}.json")]
        )
        assert code == ExitCode.OK
    return folder


def narrowed(folder, name):
    path = folder / f"{name}.narrowed.json"
    return path, read(path), read_arrays(path, read(path))


def test_a_record_has_the_weights_of_the_worst_few_and_stays_small(surveyed):
    _, record, arrays = narrowed(surveyed, "Inverted")
    pictures = {name.rpartition("|")[0] for name in arrays if "|weights" in name}
    deviating = [
        (result.id, finding.requirement, finding.cause)
        for result in record.results
        for finding in result.findings
        if finding.verdict == "deviates" and of_weights(finding.figures, finding.worst)
    ]
    assert pictures < {item for item, *_ in deviating}
    assert 1 <= len(pictures) <= examiner.MOST * len({tuple(kind) for _, *kind in deviating})
    for name in pictures:
        case = find_cases(name.split(":")[1])[0]
        for part in ("weights", "weights.want", "weights.noise", "weights.blocked"):
            assert arrays[f"{name}|{part}"].shape == case.shape.logits
    _, _, right = narrowed(surveyed, "Correct")
    assert right
    assert not [name for name in right if "|weights" in name]


def rendered(*loaded):
    report = build(loaded)
    return report, render_html(report, figures(report, loaded))


def test_the_report_of_who_is_wrong_has_the_figure_and_that_of_who_is_right_has_none(surveyed):
    report, page = rendered(narrowed(surveyed, "Inverted"))
    assert not report.not_verified.problems
    found = re.findall(r"<svg xmlns.*?</svg>\n", page, re.DOTALL)
    assert found
    for figure in found:
        ET.fromstring(figure)
        assert "Inverted: attention weights of mask/" in figure
    assert "mha-conformance heads" in page
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    for link in re.findall(r'class="drawn-there">.*?href="#([^"]*)"', page):
        assert link in ids
    _, page = rendered(narrowed(surveyed, "Correct"))
    assert "<svg xmlns" not in page


def test_the_figure_is_that_of_the_evidence(surveyed):
    loaded = narrowed(surveyed, "Inverted")
    report, _ = rendered(loaded)
    drawn_there = figures(report, [loaded])
    of_weights = [d for d in report.deviations if d.requirement == "weights.equal-definition"]
    assert of_weights
    for deviation in of_weights:
        figure = drawn_there[deviation.id]
        assert f"--case {deviation.case} --dtype {deviation.dtype}" in figure.command
    once = [figure for figure in drawn_there.values() if figure.svg]
    assert len({figure.command for figure in once}) == len(once), "each item is drawn once"


def test_the_report_command_draws_too(surveyed, tmp_path):
    path, _, _ = narrowed(surveyed, "Inverted")
    assert main(["report", str(path), "--output", str(tmp_path / "r")]) == ExitCode.OK
    assert '<figure class="heads">' in looked_at((tmp_path / "r.html").read_text())
    assert "<svg" not in (tmp_path / "r.md").read_text()


def test_damaged_or_hostile_arrays_do_not_stop_the_report(surveyed):
    path, record, arrays = narrowed(surveyed, "Inverted")
    report = build([(path, record, arrays)])
    cut = {
        name: array[..., :1] if name.endswith("|weights") else array
        for name, array in arrays.items()
    }
    assert not figures(report, [(path, record, cut)])
    missing = {name: array for name, array in arrays.items() if not name.endswith("noise")}
    assert not figures(report, [(path, record, missing)])
    assert not figures(report, [(path, record, {})])


def test_records_with_weights_load_without_a_problem(surveyed):
    paths = [surveyed / f"{name}.narrowed.json" for name in ("Inverted", "Correct")]
    loaded, _, problems = load_records(paths)
    report = build(loaded)
    assert not problems
    assert not report.not_verified.problems
    assert {pair.cases for pair in report.pairs} == {2}, "as many exchange cases as were run"


def test_an_items_id_is_what_the_arrays_are_named_by():
    assert item().id == item_id("mine", "mask/per-head/self", "float32", "cpu", "m")


@pytest.mark.parametrize(
    ("value", "text"),
    [(999.4, "999"), (999.9, "1,000"), (9.999e5, "1.00×10⁶"), (-4.56e-7, "-4.56×10⁻⁷")],
)
def test_numbers_are_rounded_before_they_are_written(value, text):
    assert number(value) == text
