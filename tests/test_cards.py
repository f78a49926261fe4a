"""Convention cards in the report: from the records of experiments to pages, and nothing added."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from records import entry, held, render_html

from conformance.cli import main
from conformance.errors import ExitCode
from conformance.experiments import EXPERIMENTS, TOPICS
from conformance.records import findings
from conformance.records.findings import Argument, CaseResult, Finding, Phrase
from conformance.records.header import SCHEMA, Header, Implementation, Provenance
from conformance.records.record import Record
from conformance.reports.cards import GLANCES
from conformance.reports.figures.heatmap import MORE, UNREAL, WEIGHT, pattern
from conformance.reports.model import Card, Report
from conformance.reports.page.markdown import render_markdown
from conformance.reports.page.views import families
from conformance.reports.writing import build

DECLARED = "adapter.declares-what-is-observed"
NASTY = "<script>alert('1')</script>"
HERE = Path(__file__).parent


class Entry:
    """An entry by its texts; `result` knows of which experiment."""

    def __init__(self, *texts: str, **fields: object) -> None:
        self.texts, self.fields = texts, fields


def result(topic: str, *given: Entry, name: str = "mine", mode: str = "train") -> CaseResult:
    entries = [entry(topic, *item.texts, **item.fields) for item in given]
    verdict = "conforms" if all(entry.agrees for entry in entries) else "deviates"
    found = [Finding(DECLARED, verdict)]  # type: ignore[arg-type]
    return CaseResult(name, f"probe/{topic}", "float32", "cpu", mode, found, entries)


def report(*results: CaseResult, arrays: dict | None = None) -> Report:
    names = dict.fromkeys(item.implementation for item in results)
    implementations = [
        Implementation(
            name=name,
            title=name.title(),
            documentation="https://example.org",
            framework="torch",
            spec=f"{name}.py:Attention",
            versions={"torch": "2.9"},
            modes=["train", "eval"],
            dtypes=["float32"],
            masks=[],
        )
        for name in names
    ]
    made = Provenance("0.1", "hash", "2026-01-01T00:00:00", "run", "3.11", "Linux", "cpu", "a CPU",
                      {}, "mha-conformance run")  # fmt: skip
    header = Header(
        SCHEMA, "mine", made, implementations, planned=len(results), topics=list(TOPICS)
    )
    own = Record(header, complete=True, results=list(results))
    return build([(Path("mine.json"), own, arrays or {})])


def card(*results: CaseResult) -> Card:
    (found,) = report(*results).cards
    return found


def cell(found: Card, heading: str) -> list[tuple[str, str]]:
    (glance,) = [item for item in GLANCES if item.heading == heading]
    return [(told.value, told.where) for told in glance.take(found)]


ORDER = "masks same-mask masked-rows causal pairs shapes coinciding-sizes leaks weights dropout"
ORDER += " degenerate-sizes sizes input-layouts repeatability"


def test_the_modules_of_experiments_make_up_a_card_in_its_order():
    # One that is new may stand anywhere.
    assert [topic.name for topic in TOPICS if topic.name in ORDER.split()] == ORDER.split()
    assert [item.topic for item in EXPERIMENTS] == list(TOPICS)
    assert len({item.place for item in EXPERIMENTS}) == len(EXPERIMENTS)


def test_modes_that_agree_are_one_line():
    same = Entry("mask, bool", "blocks")
    found = card(result("masks", same), result("masks", same, mode="eval"))
    (chapter,) = found.chapters
    (subject,) = chapter.subjects
    assert [(item.value, item.modes) for item in subject.observed] == [("blocks", [])]
    assert chapter.modes == ["train", "eval"]


def test_modes_that_differ_are_told_apart():
    found = card(
        result("masks", Entry("mask, bool", "blocks")),
        result("masks", Entry("mask, bool", "ignored"), mode="eval"),
    )
    (subject,) = found.chapters[0].subjects
    told = [(item.value, item.modes) for item in subject.observed]
    assert told == [("blocks", ["train"]), ("ignored", ["eval"])]


def test_an_experiment_with_nothing_to_ask_says_why():
    nothing = CaseResult(
        "mine",
        "probe/dropout",
        "float32",
        "cpu",
        "train",
        [Finding(DECLARED, "unsupported", detail="the adapter names no mode with dropout")],
    )
    found = card(result("masks", Entry("mask, bool", "blocks")), nothing)
    chapter = found.chapters[1]
    assert not chapter.subjects
    assert chapter.unsupported == "the adapter names no mode with dropout"


def test_a_chapter_has_the_command_that_asks_again():
    (chapter,) = card(result("masks", Entry("mask, bool", "blocks"))).chapters
    assert chapter.command == "mha-conformance probe mine.py:Attention --experiment masks"


def test_an_entry_that_disagrees_is_named_on_the_card_and_counted_in_the_matrix():
    wrong = Entry("mask, bool", "attends", declared="blocks", agrees=False)
    found = report(result("masks", wrong))
    (item,) = found.cards[0].chapters[0].subjects[0].observed
    assert (item.declared, item.value, item.agrees) == ("blocks", "attends", False)
    (row,) = [row for row in found.matrix if row.requirement == DECLARED]
    assert row.cells[0].counts == {"deviates": 1}


def test_the_table_says_for_which_argument_a_meaning_holds():
    found = card(
        result(
            "masks",
            Entry("attn_mask, bool", "blocks"),
            Entry("key_mask, bool", "attends"),
            Entry("attn_mask, float32 0/1", "added"),
        )
    )
    assert cell(found, "True in a mask") == [("blocks", "attn_mask"), ("attends", "key_mask")]
    assert cell(found, "0 and 1, as floats") == [("added", "")]
    assert cell(found, "0 and −inf") == []


def test_the_table_leaves_out_large_finite_numbers():
    found = card(
        result(
            "masked-rows",
            Entry("mask, bool: output", "NaN"),
            Entry("mask, float32 0/−1e9: output", "mean of the values"),
            Entry("mask, bool: gradients", "NaN: keys"),
        )
    )
    assert cell(found, "A fully masked query gets") == [("NaN", "")]
    assert cell(found, "… and gradients") == [("NaN: keys", "")]


def test_the_table_says_that_finite_gradients_are_not_those_of_the_output():
    forms = [Phrase("form.bool"), Phrase("form.zero-large", {"dtype": "float32", "large": "1e9"})]
    sums = [
        Phrase("gradients.sum", {"sum": 0.0}),
        Phrase("gradients.sum-unlike", {"sum": 5.0, "expected": 1.0}),
    ]
    entries = []
    for form, value in zip(forms, sums, strict=True):
        about = {"argument": "mask", "form": form}
        finite = Phrase("gradients.finite")
        entries.append(findings.Entry(Phrase("fully-masked.gradients", about), finite))
        entries.append(findings.Entry(Phrase("fully-masked.gradients-alone", about), value))
    found = card(msgspec.structs.replace(result("masked-rows"), entries=entries))
    wrong = ("Σ dV = 5, not 1 as in the output", "mask float32 0/−1e9")
    assert cell(found, "… and gradients") == [wrong]
    right = [each for each in entries if each.value != sums[1]]
    found = card(msgspec.structs.replace(result("masked-rows"), entries=right))
    assert cell(found, "… and gradients") == [("finite", "")]


def test_the_table_names_what_a_flag_stands_beside():
    found = card(
        result(
            "causal",
            Entry("flag alone, equal lengths", "causal"),
            Entry("flag alone, fewer queries than keys", "top-left"),
            Entry("flag with attn_mask causal, equal lengths", "causal"),
            Entry("flag with attn_mask, equal lengths", "flag only"),
            Entry("flag with padding, equal lengths", "both"),
        )
    )
    assert cell(found, "Causal flag, fewer queries than keys") == [("top-left", "")]
    beside = [("flag only", "attn_mask"), ("both", "padding")]
    assert cell(found, "Causal flag beside a mask") == beside


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("hidden", "hidden"),
        ("reaches the output, gradients of key", "reaches the output"),
        ("reaches gradients of parameters", "reaches gradients"),
    ],
)
def test_the_table_says_how_far_a_nan_gets(value, told):
    found = card(result("leaks", Entry("NaN in a blocked key (mask, bool)", value)))
    assert cell(found, "NaN in a blocked key") == [(told, "")]


def test_weights_that_only_some_modes_return_are_those_of_the_others():
    found = card(
        result("weights", Entry("returned weights", "per head")),
        result("weights", Entry("returned weights", "none"), mode="eval"),
        result("dropout", Entry("returned weights are those", "after dropout")),
    )
    told = [("per head", ""), ("those after dropout", "")]
    assert cell(found, "Returned weights") == told


# One mask for everybody

WRITTEN = ("1 = may attend", "1 = blocked")


def handed(name: str, *values: str) -> CaseResult:
    entries = [Entry(f"mask, {w}", v) for w, v in zip(WRITTEN, values, strict=True)]
    return result("same-mask", *entries, name=name)


def test_those_who_understand_the_same_writing_stand_together():
    found = report(
        handed("one", "as meant", "100% on blocked keys"),
        handed("two", "99% on blocked keys", "as meant"),
        handed("three", "as meant", "100% on blocked keys"),
        handed("four", "refused", "refused"),
    )
    told = [(family.title, [row.column.key for row in family.rows]) for family in families(found)]
    assert told == [
        ("Right with 1 = may attend", ["one", "three"]),
        ("Right with 1 = blocked", ["two"]),
        ("Right with none", ["four"]),
    ]


def test_the_weights_of_a_record_are_drawn():
    weights = np.array([[1.0, 0.0], [np.nan, 0.25]])
    own = handed("one", "as meant", "refused")
    found = report(own, arrays={f"{own.id}|{own.entries[0].subject}": weights})
    assert found.handed[0].weights == [[1.0, 0.0], [None, 0.25]]
    assert found.handed[1].weights == []
    page = render_html(found)
    assert page.count('<svg class="pattern"') == 1
    assert ">0.25</text>" in page


def shades(drawn):
    """Inks of the cells that have one."""
    return re.findall(r'<path fill="(#\w+)"', drawn)


def test_a_pattern_tells_past_future_nothing_and_nan_apart():
    drawn = pattern([[1.0, 0.5], [0.0, None]], "told")
    assert sorted(shades(drawn)) == sorted([WEIGHT, WEIGHT, UNREAL])
    assert drawn.count(f'stroke="{MORE}"') == 1
    assert re.findall(r">([^<>]+)</text>", drawn) == ["0.50", "0", "1.00", "NaN"]
    assert 'stroke-opacity=".3"' in drawn
    assert 'aria-label="told"' in drawn
    assert shades(pattern([[0.0, 0.0]], "")) == []


def test_a_small_weight_in_the_future_is_still_seen():
    drawn = pattern([[1.0, 1e-6]], "")
    assert f'stroke="{MORE}"' in drawn
    assert f'stroke="{MORE}"' not in pattern([[1.0, 0.0]], "")


# Pages


def test_what_a_record_says_cannot_become_code():
    found = report(
        result(
            "masks",
            Entry(NASTY, NASTY, NASTY, NASTY, agrees=False, code=NASTY),
            name="mine",
        ),
        result("same-mask", Entry(f"{NASTY}, {NASTY}", NASTY, NASTY)),
    )
    page = render_html(found)
    assert NASTY not in page
    assert "&lt;script&gt;" in page
    assert NASTY not in render_markdown(found)


def test_a_report_holds_the_cards_whole(tmp_path, capsys):
    record = tmp_path / "one.json"
    spec = f"{HERE / 'mutants/miniatures.py'}:Correct"
    assert main(["run", spec, "--case", "probe/masks", "--record", str(record)]) == ExitCode.OK
    narrowed = tmp_path / "one.narrowed.json"
    page = tmp_path / "report.html"
    assert main(["report", str(narrowed), "--html", str(page)]) == ExitCode.OK
    assert [file.name for file in tmp_path.glob("report*")] == ["report.html"]
    (card,) = held(page.read_text())["cards"]
    subjects = [own["subject"] for chapter in card["chapters"] for own in chapter["subjects"]]
    assert "mask, bool" in subjects
    assert "problem" not in capsys.readouterr().out


# The command


def probe(*arguments: str) -> int:
    return main(["probe", *arguments])


def miniature(name: str) -> str:
    return f"{HERE / 'mutants/miniatures.py'}:{name}"


def test_probe_prints_what_was_seen(capsys):
    assert probe(miniature("Correct"), "--experiment", "masks", "--evidence") == ExitCode.OK
    printed = capsys.readouterr().out
    assert re.search(r"mask, bool +attends", printed)
    assert re.search(r"mask, float32 0/−inf +added", printed)
    assert "without it" in " ".join(printed.split())


def test_probe_says_what_an_adapter_declares_wrongly(capsys):
    wrong = miniature("Inverted")
    assert probe(wrong, "--experiment", "masks") == ExitCode.OK
    assert "✗ declared attends" in capsys.readouterr().out
    assert probe(wrong, "--experiment", "masks", "--strict") == ExitCode.DEVIATES
    right = miniature("Correct")
    assert probe(right, "--experiment", "masks", "--strict") == ExitCode.OK


def test_probe_hands_out_json(capsys):
    assert probe(miniature("Correct"), "--experiment", "weights", "--json") == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)
    assert found["case"] == "probe/weights"
    per_head = {"id": "weights.per-head", "text": "per head"}
    assert found["entries"][0] == {
        "subject": {"id": "weights.returned", "text": "returned weights"},
        "value": per_head,
        "evidence": "shape [2, 6, 4, 5], [batch, heads, query, key]",
        "declared": per_head,
    }


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--experiment", "mask"], "unknown experiment 'mask'; did you mean masks"),
        (["--argument", "maks"], "unknown mask argument 'maks'; did you mean mask?"),
        (["--mode", "defualt"], "unknown mode 'defualt'; did you mean default?"),
    ],
)
def test_probe_asks_nothing_if_a_name_is_wrong(arguments, told, capsys):
    assert probe(miniature("Correct"), *arguments) == ExitCode.USAGE
    printed = capsys.readouterr()
    assert not printed.out
    assert told in printed.err


@pytest.mark.parametrize("name", ["Lazy", "Unready"])
def test_probe_of_what_is_not_installed_verifies_nothing(name, capsys):
    assert probe(miniature(name), "--experiment", "masks") == ExitCode.NOTHING_VERIFIED
    assert "is not installed" in capsys.readouterr().out


def bits(*entries: tuple[str, str, str]) -> Card:
    """A card of the experiment; an entry is a subject, a value, and another dtype or ""."""
    sizes: dict[str, Argument] = {"batch": 2, "heads": 4, "query": 144, "key": 145}
    found = [
        findings.Entry(
            Phrase(f"again.{subject}", {"inputs_in": dtype} if dtype else {}),
            Phrase(f"again.{value}", sizes if value.endswith("at") else {}),
            "",
        )
        for subject, value, dtype in entries
    ]
    own = result("repeatability")
    return card(msgspec.structs.replace(own, entries=found))


def test_equal_bits_are_columns_with_the_worst_that_was_observed():
    usual = [("alone", "same-bits-at", ""), ("batches", "same-bits-at", "")]
    heading = "Bits in another batch"
    # They are equal at these lengths; which kernel a library takes depends on them.
    assert cell(bits(*usual), heading) == [("same bits (query length 144, key length 145)", "")]
    assert cell(bits(("batches", "same-bits", "")), heading) == [("same bits", "")]
    assert cell(bits(*usual, ("place", "within-noise", "")), heading) == [("within noise", "")]
    assert cell(bits(("batches", "apart", ""), usual[0]), heading) == [("apart", "")]
    # A record of an older suite was asked about one of them only.
    assert cell(bits(usual[0]), heading) == []
    assert cell(bits(*usual), "Bits of one query alone") == []
    steps = bits(("steps", "same-bits-at", ""), ("steps", "within-noise", "bfloat16"))
    assert cell(steps, "Bits of one query alone") == [("within noise", "with inputs in bfloat16")]
