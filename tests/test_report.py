"""The report: what is counted, what is refused, what the pages say, and that nothing breaks out."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import msgspec
import numpy as np
import pytest
from markdown_it import MarkdownIt
from records import (
    GRADIENT,
    MASKED,
    NASTY,
    OUTPUT,
    POLARITY,
    REPORTS,
    backends,
    bad,
    entry,
    full_report,
    good,
    implementation,
    loaded,
    observed,
    record,
    render_html,
    report,
    result,
    save,
)

from conformance.errors import ConformanceError, ExitCode
from conformance.records.findings import (
    INFINITE,
    VERDICTS,
    CaseResult,
    Entry,
    Figures,
    Finding,
    Phrase,
    item_id,
)
from conformance.records.header import CaseInfo, MaskInfo
from conformance.records.record import Journal, encode_line, finish, journal_path
from conformance.reports import model as data
from conformance.reports.load import find_records, load
from conformance.reports.page.markdown import render_markdown
from conformance.reports.page.views import cards, polarity, pooled, position, symptoms, where
from conformance.reports.tables import normalised, worst_verdict
from conformance.reports.wording import fared, parts, ratio, shape
from conformance.reports.writing import build, write
from conformance.text import short

# Counting


def load_records(paths, run=""):
    read = load(paths, run)
    return read.current, read.problems


def test_items_and_findings_are_counted_as_vectors():
    found = report(
        result(good(), Finding(GRADIENT, "unsupported", detail="no gradients")),
        result(bad(), good(GRADIENT), case="plain/no-mask/cross"),
        result(Finding(OUTPUT, "unsupported", detail="no"), case="plain/no-mask/gqa"),
    )
    assert found.totals.items == {"conforms": 1, "deviates": 1, "unsupported": 1}
    assert found.totals.findings == {"conforms": 2, "deviates": 1, "unsupported": 2}
    assert found.totals.cases == 3
    row = next(row for row in found.matrix if row.requirement == OUTPUT)
    assert row.cells[0].counts == {"conforms": 1, "deviates": 1, "unsupported": 1}
    assert row.cells[0].verdict == "deviates"
    assert row.level == "must"
    assert row.sentence


def test_the_parts_add_up_to_the_totals():
    found = report(*(result(good(), bad(GRADIENT), case=f"plain/{i}/self") for i in range(5)))
    in_cells = sum(sum(cell.counts.values()) for row in found.matrix for cell in row.cells)
    assert in_cells == sum(found.totals.findings.values()) == 10
    in_columns = sum(sum(column.items.values()) for column in found.columns)
    assert in_columns == sum(found.totals.items.values()) == 5


@pytest.mark.parametrize("pair", list(itertools.combinations(VERDICTS, 2)))
def test_gravest_agrees_with_the_verdict_of_an_item(pair):
    item = result(*(Finding(OUTPUT, verdict) for verdict in pair))
    assert worst_verdict(dict.fromkeys(pair, 1)) == item.verdict


@pytest.mark.parametrize(
    ("findings", "standing"),
    [
        ([good()], "conforms"),
        ([good(), bad()], "deviates"),
        ([good(), Finding(OUTPUT, "error", detail="raised")], "deviates"),
        ([good(), Finding(OUTPUT, "crashed", detail="signal 11")], "not verified"),
        ([Finding(OUTPUT, "unsupported", detail="no")], "not verified"),
        ([Finding(OUTPUT, "unavailable", detail="no")], "not verified"),
        ([], "not verified"),
    ],
)
def test_standing(findings, standing):
    assert report(result(*findings)).columns[0].standing == standing


def test_a_requirement_that_the_suite_does_not_know_keeps_its_row():
    found = report(result(Finding("new.idea", "conforms")))
    assert found.matrix[-1].requirement == "new.idea"
    assert found.matrix[-1].level == ""
    assert "new.<wbr>idea" in render_html(found)


def test_a_line_breaks_after_a_hyphen_and_not_after_a_minus_sign():
    assert parts("keras-jax-mha") == ["keras-", "jax-", "mha"]
    assert parts("(blocks, -1e20)") == ["(blocks, -1e20)"]


def test_no_percentages():
    page = render_markdown(report(result(good()), result(bad(), case="plain/x/self")))
    assert "%" not in page


# What was not verified


def test_expected_records_that_are_not_there_are_named():
    found = build([loaded(record(result(good()), name="torch"))], ["ours", "torch", "flax"])
    assert found.not_verified.missing == ["ours", "flax"]
    assert found.not_verified.anything
    for page in (render_html(found), render_markdown(found)):
        assert "could not be set up or did not finish" in page


def test_an_unfinished_run_counts_what_it_did_not_reach():
    found = report(result(good()), complete=False, planned=4)
    assert found.totals.items == {"conforms": 1, "not-run": 3}
    assert found.sources[0].missing == 3
    assert found.not_verified.incomplete == [
        "env: 3 of 4 planned items have no outcome; the run has not ended, or ended early"
    ]


def test_items_without_outcome_are_not_counted_twice():
    missing = result(Finding("run", "not-run", detail="the run ended before this item"))
    found = report(missing, complete=False)
    assert found.totals.items == {"not-run": 1}
    assert [item.verdict for item in found.not_verified.open] == ["not-run"]


def test_unavailable_is_said_once_with_its_reason():
    gone = implementation(unavailable="torch is not installed")
    found = report(
        result(Finding(OUTPUT, "unavailable", detail="torch is not installed")),
        implementations=[gone],
    )
    assert found.not_verified.unavailable == {"mine": "torch is not installed"}
    assert found.not_verified.open == []
    assert "torch is not installed" in render_html(found)


def test_unsupported_has_reasons_and_examples():
    no = Finding(OUTPUT, "unsupported", detail="no such score")
    also = Finding(GRADIENT, "unsupported", detail="no such score")
    found = report(*(result(no, also, case=f"plain/{i}/self") for i in range(5)))
    (entry,) = found.unsupported
    assert (entry.reason, entry.items, entry.cases, len(entry.examples)) == (
        "no such score",
        5,
        5,
        3,
    )
    assert not found.not_verified.anything


def test_a_narrowed_run_says_so_and_is_not_incomplete():
    found = report(result(good()), selection="--dtype float32")
    assert found.not_verified.narrowed == {"env": "--dtype float32"}
    assert not found.not_verified.anything
    assert "--dtype float32" in render_html(found)


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_an_empty_report_says_that_nothing_was_verified(render):
    found = build([], ["torch"], ["x.json: is damaged"])
    page = render(found)
    assert "nothing was verified" in page
    assert "x.json: is damaged" in page
    assert "torch" in page
    assert found.totals.items == {}


# Loading


def test_records_are_read_with_their_arrays(tmp_path):
    own = result(good(), name="mine")
    header = record(own).header
    with_journal = tmp_path / "env.json"
    journal = Journal(with_journal, header)
    arrays = {name: np.ones((1, 2, 3)) for name in ("output", "want", "noise")}
    journal.add(encode_line(own, arrays))
    journal.close()
    finish(with_journal)
    ((path, found, read),), problems = load_records([with_journal])
    assert path == with_journal
    assert found.results == [own]
    assert set(read) == {f"{own.id}|{name}" for name in arrays}
    assert problems == []


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"a": 1}', '{"header": {"schema": "other/1"}}', "\0\0"]
)
def test_a_broken_or_foreign_record_is_a_line_and_not_a_crash(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    kept, problems = load_records([path, save(tmp_path, record(result(good())))])
    assert len(kept) == 1
    assert len(problems) == 1
    assert problems[0].startswith("bad.json: ")
    assert str(tmp_path) not in problems[0]


def test_a_record_that_is_not_there_is_a_line(tmp_path):
    assert load_records([tmp_path / "no.json"])[1][0].startswith("no.json: cannot be read")


def test_arrays_of_another_record_are_refused(tmp_path):
    own = record(result(good()))
    (tmp_path / "env.safetensors").write_bytes(b"something else")
    own = msgspec.structs.replace(own, exchange="env.safetensors", digest="0" * 64)
    kept, problems = load_records([save(tmp_path, own)])
    assert kept == []
    assert "does not belong to env.json" in problems[0]


@pytest.mark.parametrize(
    ("field", "told"),
    [("suite", "suite version is 9"), ("catalogue", "catalogue hash is 9")],
)
def test_what_differs_from_the_majority_is_refused_by_name(tmp_path, field, told):
    changes: dict[str, dict] = {"one": {}, "two": {}, "odd": {field: "9"}}
    paths = [
        save(tmp_path, record(result(good(), name=name), name=name, **own))
        for name, own in changes.items()
    ]
    kept, problems = load_records(paths)
    assert [own.header.name for _, own, _ in kept] == ["one", "two"]
    assert problems[0].startswith(f"odd.json: left out; {told}, the other records have ")
    assert problems[0].endswith("run tox -e odd again")


def of_catalogue(name, catalogue, **hashes):
    """A record that knows the hashes of its cases."""
    own = record(result(good(), name=name), name=name, catalogue=catalogue)
    cases = {case: CaseInfo("why", [], hash=digest) for case, digest in hashes.items()}
    return msgspec.structs.replace(own, header=msgspec.structs.replace(own.header, cases=cases))


@pytest.mark.parametrize(
    ("odd", "fits"),
    [
        ({"old": "1"}, True),
        ({"old": "1", "added": "2"}, True),
        ({"old": "2"}, False),
        ({"old": "1", "other": "9"}, False),
        ({"old": ""}, False),
        ({"added": "2"}, False),
    ],
)
def test_a_record_of_a_grown_catalogue_belongs_if_shared_cases_are_the_same(tmp_path, odd, fits):
    own = [of_catalogue(name, "1", old="1", other="3") for name in ("one", "two")]
    own.append(of_catalogue("odd", "2", **odd))
    kept, problems = load_records([save(tmp_path, each) for each in own])
    assert [each.header.name for _, each, _ in kept] == ["one", "two", *(["odd"] if fits else [])]
    assert bool(problems) != fits


def test_records_of_another_run_are_refused_only_if_a_run_is_given(tmp_path):
    paths = [
        save(tmp_path, record(result(good(), name=name), name=name, run=run))
        for name, run in (("one", "run-1"), ("two", "run-2"))
    ]
    assert load_records(paths)[1] == []
    kept, problems = load_records(paths, run="run-2")
    assert [own.header.name for _, own, _ in kept] == ["two"]
    assert problems == [
        "one.json: left out; is of run run-1, this report is of run run-2; run tox -e one again"
    ]


def test_an_implementation_counts_once(tmp_path):
    first = save(tmp_path, record(result(good()), name="first"))
    second = save(tmp_path, record(result(bad()), name="second"))
    kept, problems = load_records([first, second])
    assert [own.header.name for _, own, _ in kept] == ["first"]
    assert "mine on cpu is already in first.json" in problems[0]


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a.py:f", "b.py:f", "c.py:f"], ["a.f", "b.f", "c.f"]),
        (["one/mine.py:f", "two/mine.py:f", "c.py:f"], ["one.mine.f", "two.mine.f", "c.f"]),
        (["kern.one:f", "kern.two:f"], ["one.f", "two.f"]),
        (["a.py:f", "kern.a.b:f"], ["a.f", "b.f"]),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_functions_of_one_name_in_several_files_are_several(tmp_path, specs, names, complete):
    paths = []
    for number, spec in enumerate(specs):
        made = record(
            result(bad(), name="f"),
            implementations=[implementation("f", spec=spec, title="f")],
            complete=complete,
            name=f"r{number}",
        )
        paths.append(save(tmp_path, made))
    kept, problems = load_records(paths)
    assert not problems
    ones = [one for _, own, _ in kept for one in own.header.implementations]
    assert [(one.name, one.title, one.spec) for one in ones] == [
        (name, name, spec) for name, spec in zip(names, specs, strict=True)
    ]
    assert [own.results[0].implementation for _, own, _ in kept] == names
    # The arrays go with their results.
    for _, own, arrays in kept:
        assert {key.partition(":")[0] for key in arrays} <= {own.results[0].implementation}


def test_a_narrowed_report_has_no_empty_section(tmp_path):
    def headings(**changes):
        path = save(tmp_path, record(result(good()), name="r", **changes))
        write([path], tmp_path / "out")
        return re.findall(r"^## (.*)$", (tmp_path / "out.md").read_text(), re.MULTILINE)

    empty = "Implementations against each other"
    assert empty in headings()
    assert empty not in headings(selection="--case mask/shared")


def test_one_file_by_several_paths_is_one_implementation(tmp_path):
    paths = [
        save(
            tmp_path,
            record(
                result(good(), name="f"),
                implementations=[implementation("f", spec=spec)],
                name=name,
            ),
        )
        for name, spec in (("first", "mine.py:f"), ("second", "/home/me/mine.py:f"))
    ]
    kept, problems = load_records(paths)
    assert [one.name for _, own, _ in kept for one in own.header.implementations] == ["f"]
    assert "f on cpu is already in first.json" in problems[0]


def test_the_same_implementation_on_two_devices_is_two_columns(tmp_path):
    paths = [
        save(tmp_path, record(result(good()), name=device, device=device))
        for device in ("cpu", "gpu")
    ]
    kept, problems = load_records(paths)
    assert problems == []
    assert [column.key for column in build(kept).columns] == ["mine on cpu", "mine on gpu"]


@pytest.mark.parametrize("render", [render_html, render_markdown])
def test_the_provenance_of_a_gpu_has_its_driver_and_its_toolkit(render):
    gpu = {"device": "gpu", "device_model": "an H100", "driver": "580.95.05"}
    packages = {"torch": "2.11", "CUDA": "13.0", "cuDNN": "9.13.0"}
    page = render(report(result(good()), packages=packages, **gpu))
    for told in ("gpu: an H100", "580.95.05", "CUDA 13.0", "cuDNN 9.13.0"):
        assert told in page
    assert "river" not in render(report(result(good())))


def test_folders_give_whole_records_and_unfinished_journals(tmp_path):
    save(tmp_path, record(result(good()), name="torch"))
    save(tmp_path, record(result(good()), name="torch"), "torch.narrowed.json")
    (tmp_path / "torch.narrowed.json.gz").touch()
    unfinished = record(name="flax", implementations=[implementation("flax")], planned=2)
    Journal(tmp_path / "flax.json", unfinished.header).close()
    found = find_records([tmp_path])
    assert [path.name for path in found] == ["flax.json.journal", "torch.json"]
    kept, problems = load_records([tmp_path / "torch.json", journal_path(tmp_path / "flax.json")])
    assert [own.complete for _, own, _ in kept] == [True, False]
    assert problems == []


def test_a_finished_record_goes_before_a_journal_beside_it(tmp_path):
    path = save(tmp_path, record(result(good()), name="torch"))
    Journal(path, record(name="torch", planned=2).header).close()
    kept, problems = load_records(find_records([tmp_path]))
    assert [own.complete for _, own, _ in kept] == [True]
    assert "an unfinished run was to replace" in problems[0]


# Conventions


def test_what_a_mask_means_is_what_was_observed():
    found = report(observed(POLARITY, "mask[bool]=blocks other[0/1]=attends"))
    (card,) = cards(found)
    (argument,) = card.arguments
    assert [item.value for item in argument.true] == ["blocks"]
    assert argument.agrees is False
    assert argument.surprises == ["booleans: blocks, declared attends"]
    page = render_html(found)
    assert "True blocks" in page
    assert "not as declared" in page


def test_numbers_may_block():
    masks = [MaskInfo("mask", ["batch key"], None, "blocks if nonzero")]
    for seen, agrees in (("blocks", True), ("attends", False)):
        result = observed(POLARITY, f"mask[0/1]={seen}")
        found = report(result, implementations=[implementation(masks=masks)])
        (argument,) = cards(found)[0].arguments
        assert argument.agrees is agrees
        words = {
            "blocks": "1\u00a0blocks, 0\u00a0attends",
            "attends": "1\u00a0attends, 0\u00a0blocks",
        }
        assert words[seen] in render_html(found)


def test_a_declaration_that_nobody_tested_is_told_as_such():
    found = report(result(good()))
    (argument,) = cards(found)[0].arguments
    assert argument.agrees is None
    assert [item.value for item in argument.true] == ["attends"]
    assert "declared, not observed" in render_html(found)


@pytest.mark.parametrize(
    ("odd", "expected"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"mode": "eval"}, "mode eval"),
        ({"dtype": "float16", "mode": "eval"}, "float16; mode eval"),
    ],
)
def test_where_observations_differ_is_said(odd, expected):
    results = []
    for dtype, mode in itertools.product(("float32", "float16"), ("train", "eval")):
        place = {"dtype": dtype, "mode": mode}
        meaning = "ignored" if odd.items() <= place.items() else "attends"
        results.append(observed(POLARITY, f"mask[bool]={meaning}", **place))
    (argument,) = cards(report(*results))[0].arguments
    told = {item.value: item.where for item in argument.true}
    assert told["ignored"] == expected
    assert told["attends"] in ("otherwise", "float32", "mode train")


def test_fully_masked_rows_and_their_gradients_are_told_apart():
    found = report(
        observed(MASKED, "nan; NaN in gradients of query, key", mode="train"),
        observed(MASKED, "nan", mode="fast"),
        observed(MASKED, "output bias; gradients finite", mode="eval"),
    )
    nan, bias = found.conventions[0].fully_masked
    assert (nan.row.phrase.id, nan.row.where) == ("row.nan", "modes train, fast")
    assert [item.value for item in nan.consequences] == ["NaN in gradients of query, key"]
    assert (bias.row.phrase.id, bias.row.where) == ("row.output-bias", "mode eval")


def test_a_mode_with_both_values_is_told_as_shared():
    bias, nan = "output bias; gradients finite", "nan"
    modes = {"train": (nan, nan, nan), "fast": (nan, bias, nan), "eval": (bias, bias, bias)}
    found = report(
        *(
            observed(MASKED, value, mode=mode, case=f"mask/{case}/self")
            for mode, values in modes.items()
            for case, value in zip(("a", "b", "c"), values, strict=True)
        )
    )
    rows = [(item.row.phrase.id, item.row.where) for item in found.conventions[0].fully_masked]
    assert rows == [("row.nan", "otherwise"), ("row.output-bias", "mode eval; in part mode fast")]


def test_a_layer_on_several_backends_is_one_block():
    found = backends("attends", "attends", "blocks")
    assert {column.group for column in found.columns} == {"keras.Attention"}
    (card,) = cards(found)
    assert [(item.value, item.where) for item in card.arguments[0].true] == [
        ("attends", "tensorflow, jax"),
        ("blocks", "torch"),
    ]
    assert polarity([card])["attends"] == [(card, card.arguments)]
    page = render_html(found)
    assert 'colspan="3"' in page
    assert "on tensorflow, jax and torch" in page
    # The short answer has the exception too.
    assert "(True blocks in torch)" in page


def probed(topic: str, *entries: tuple[str, str], **where: str) -> CaseResult:
    own = result(Finding("adapter.declares-what-is-observed", "observed"),
                 case=f"probe/{topic}", **where)  # fmt: skip
    return msgspec.structs.replace(own, entries=[entry(topic, *texts) for texts in entries])


def test_every_form_says_what_experiments_found():
    found = report(
        observed(POLARITY, "mask[bool]=attends"),
        probed("masks", ("mask, bool", "attends"), ("mask, float32 0/1", "ignored")),
        probed("masks", ("mask, bool", "ignored"), ("mask, float32 0/−inf", "added"), mode="eval"),
    )
    (argument,) = cards(found)[0].arguments
    assert [(item.value, item.times, item.where) for item in argument.true] == [
        ("attends", 2, "mode train"),
        ("ignored", 1, "mode eval"),
    ]
    assert [item.value for item in argument.ones] == ["ignored"]
    assert [item.value for item in argument.infinite] == ["added"]
    assert argument.surprises == ["booleans: ignored (mode eval), declared attends"]


def test_a_masked_row_that_only_an_experiment_saw_is_told():
    seen = ("mask, bool: output", "mean of the values"), ("mask, bool: gradients", "finite")
    large = ("mask, float32 0/−1e9: output", "as if unmasked")
    (row,) = report(probed("masked-rows", *seen, large)).conventions[0].fully_masked
    assert (row.row.phrase.id, row.row.where) == ("row.mean-of-values", "")
    assert [item.value for item in row.consequences] == ["gradients finite"]


def test_gradients_of_a_masked_row_are_those_of_the_same_call():
    """With inputs in another dtype the output was NaN, which the card said of all dtypes."""
    of_keys = Phrase("gradients.nan", {"places": [Phrase("place.keys")]})
    entries = []
    for more, output, gradients in (
        ({}, Phrase("row.mean-of-values"), Phrase("gradients.finite")),
        ({"inputs_in": "float16"}, Phrase("row.nan"), of_keys),
    ):
        call = {"argument": "mask", "form": Phrase("form.bool"), **more}
        entries.append(Entry(Phrase("fully-masked.output", call), output, ""))
        entries.append(Entry(Phrase("fully-masked.gradients", call), gradients, ""))
    own = msgspec.structs.replace(probed("masked-rows"), entries=entries)
    mean, nan = report(own).conventions[0].fully_masked
    assert (mean.row.phrase.id, mean.row.where) == ("row.mean-of-values", "float32")
    assert [(item.value, item.where) for item in mean.consequences] == [("gradients finite", "")]
    assert (nan.row.phrase.id, nan.row.where) == ("row.nan", "float16")
    assert [(item.value, item.where) for item in nan.consequences] == [("gradients NaN: keys", "")]


def test_nothing_is_said_of_modes_that_nobody_asked():
    """One backend was asked in one mode, the other in both: "otherwise" would say too much."""
    names = ["keras-jax", "keras-torch"]
    results = [
        observed(MASKED, "output bias; gradients finite", name=name, mode="train") for name in names
    ]
    results.append(observed(MASKED, "nan; gradients finite", name="keras-torch", mode="eval"))
    results.append(probed("masked-rows", ("mask, bool: output", "NaN"), name=names[0], mode="eval"))
    found = report(
        *results,
        implementations=[
            implementation(name, title=f"keras.Attention ({name.partition('-')[2]})")
            for name in names
        ],
    )
    (card,) = cards(found)
    told = [(item.row.phrase.id, item.row.where) for item in card.fully_masked]
    assert told == [("row.output-bias", "mode train"), ("row.nan", "mode eval")]
    some = [data.Variant("a", 1, "mode x"), data.Variant("b", 1, "mode y")]
    alone = pooled([("jax", [data.Variant("a", 1, "")]), ("torch", some)])
    assert [item.where for item in alone] == ["jax · torch: mode x", "torch: mode y"]


def test_a_title_in_brackets_alone_is_no_group():
    found = report(result(good()), implementations=[implementation(title="Attention (ours)")])
    assert (found.columns[0].group, found.columns[0].variant) == ("Attention (ours)", "")


def test_pooling_keeps_what_is_common_short():
    same = [data.Variant("a", 3, "mode x")]
    assert pooled([("one", same), ("two", same)]) == [data.Variant("a", 6, "mode x")]


def test_shapes_are_written_as_people_write_them():
    assert shape("(batch heads) query key") == "[batch·heads, query, key]"
    assert shape("batch key") == "[batch, key]"


# Accuracy and pairs


def test_accuracy_has_worst_typical_and_classes():
    found = report(
        result(good(size=1.0), case="plain/a/self"),
        result(good(size=3.0), case="plain/b/self"),
        result(bad(size=INFINITE), case="plain/c/self"),
    )
    (entry,) = found.accuracy
    assert entry.gradients is None
    spread = entry.output
    assert spread is not None
    assert (spread.max_ratio, spread.case) == (INFINITE, "plain/c/self")
    assert spread.rms_ratio == 0.75
    assert spread.classes == {"A0": 2, "": 1}
    assert spread.worst_class == ""
    assert (spread.limit, found.limit) == (8.0, 8.0)
    for page in (render_html(found), render_markdown(found)):
        assert "∞" in page
        assert "1e+300" not in page


def exchange(**outputs: list[float]) -> data.Report:
    """Records of implementations that answer one case, with σ = 1 (and 0 for the last element)."""
    records = []
    for name, output in outputs.items():
        case = "edge/x/cross" if name.startswith("edge") else "plain/no-mask/self"
        item = item_id(name, case, "float32", "cpu", "train")
        size = len(output)
        arrays = {
            f"{item}|output": np.array(output),
            f"{item}|want": np.zeros(size),
            f"{item}|noise": np.array([1.0] * (size - 1) + [0.0]),
        }
        own = result(good(), name=name, case=case)
        records.append(loaded(record(own, name=name), arrays))
    return build(records)


def test_pairs_are_compared_in_units_of_their_common_noise():
    (pair,) = exchange(a=[0.0, 3.0, 0.0], b=[0.0, 0.0, 0.0]).pairs
    assert (pair.one, pair.other, pair.dtype, pair.cases) == ("a", "b", "float32", 1)
    assert pair.max_ratio == pytest.approx(3 / np.sqrt(2), rel=1e-3)
    assert pair.case == "plain/no-mask/self"


def test_an_element_that_must_be_exact_is_infinitely_far():
    (pair,) = exchange(a=[0.0, 1.0], b=[0.0, 0.0]).pairs
    assert pair.max_ratio == INFINITE
    assert "∞" in render_html(exchange(a=[0.0, 1.0], b=[0.0, 0.0]))


def test_nan_is_listed_and_not_measured():
    found = exchange(a=[np.nan, 0.0], b=[0.0, 0.0], c=[0.5, 0.0])
    by_names = {(pair.one, pair.other): pair for pair in found.pairs}
    assert by_names["a", "b"].nan_cases == ["plain/no-mask/self"]
    assert by_names["b", "c"].nan_cases == []
    (entry,) = found.apart
    assert (entry.groups, entry.nan) == ([["a"], ["b", "c"]], ["a"])
    assert ">NaN</td>" in render_html(found)


def test_undefined_cases_are_not_in_the_pairs():
    found = exchange(edge_a=[0.0, 0.0], edge_b=[50.0, 0.0], edge_c=[0.1, 0.0])
    assert found.pairs == []
    (entry,) = found.apart
    assert entry.groups == [["edge_a", "edge_c"], ["edge_b"]]


def test_answers_to_another_problem_are_not_compared():
    records = []
    for name, want in (("a", 0.0), ("b", 1.0)):
        item = item_id(name, "plain/no-mask/self", "float32", "cpu", "train")
        arrays = {f"{item}|{part}": np.full(2, want) for part in ("output", "want", "noise")}
        records.append(loaded(record(result(good(), name=name), name=name), arrays))
    found = build(records)
    assert found.pairs == []
    assert "compared with another reference" in found.not_verified.problems[0]


def test_arrays_without_a_result_or_incomplete_are_problems():
    arrays = {"nobody|output": np.ones(2), "nobody|want": np.ones(2), "nobody|noise": np.ones(2)}
    found = build([loaded(record(result(good())), arrays | {"half|output": np.ones(2)})])
    assert len(found.not_verified.problems) == 2


def test_the_axis_is_logarithmic_and_bounded():
    assert position(0.1) == position(0.0)
    assert position(1e9) == position(INFINITE) == position(1000.0)
    assert position(1.0) - position(0.1) == pytest.approx(position(10.0) - position(1.0), abs=0.02)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0"),
        (0.567, "0.6"),
        (9.96, "10.0"),
        (11.3, "11"),
        (1234.0, "1,234"),
        (12345.0, "1.2×10⁴"),
    ],
)
def test_ratios_for_people(value, told):
    assert ratio(value) == told


# Deviations


def test_deviations_that_say_the_same_are_one_with_the_worst_as_evidence():
    cause = Phrase("mask.inverted")
    found = report(
        result(bad(size=10.0, cause=cause), case="mask/a/self", dtype="float64"),
        result(bad(size=50.0, cause=cause), case="mask/b/self", mode="eval"),
        result(bad(size=20.0), case="mask/c/self"),
        result(good(), case="mask/d/self"),
    )
    one, other = found.deviations
    assert (one.times, one.of, one.cause) == (2, 4, cause)
    assert one.cases == ["mask/a/self", "mask/b/self"]
    assert one.dtypes == {"float64": 1, "float32": 1}
    assert one.figures is not None
    assert one.figures.max_ratio == 50.0
    assert one.command == (
        "mha-conformance run path/to/mine.py:Attention "
        "--case mask/b/self --dtype float32 --mode eval --strict"
    )
    assert other.times == 1
    for page in (render_html(found), render_markdown(found)):
        assert one.command in page
        assert "equals the answer with the mask inverted" in page


def test_details_that_differ_in_numbers_and_names_only_are_the_same():
    texts = [
        ("gradient.key in mode eval is not that in mode train", "eval", "gradient.key"),
        ("gradient.query in mode fast is not that in mode train", "fast", "gradient.query"),
    ]
    found = {
        normalised(
            Finding("modes.agree", "deviates", detail=text, figures=Figures(array, 1, 1, 0, 8)),
            mode,
            "float32",
        )
        for text, mode, array in texts
    }
    assert len(found) == 1
    told = ["marked (0,1) (2,3): 12 of 30", "marked (4,5): 3 of 7"]
    assert len({normalised(Finding("x", "error", detail=text), "m", "d") for text in told}) == 1


def test_symptoms_gather_one_error_over_its_requirements():
    found = report(
        result(
            Finding(OUTPUT, "error", detail="ValueError: no (at a.py:1)"),
            Finding(GRADIENT, "error", detail="ValueError: no (at b.py:2)"),
            bad("weights.equal-definition"),
        ),
        result(good(), dtype="float64", mode="eval"),
    )
    error, off = symptoms(found, found.columns[0])
    assert (error.text, error.times, len(error.deviations)) == ("ValueError: no", 2, 2)
    assert error.folded
    assert off.text == "beyond rounding noise in plain/no-mask/self, every dtype and mode"
    page = render_markdown(found)
    assert page.count("--case plain/no-mask/self --dtype float32") == 2
    for anchor in (item.id for item in error.deviations):
        assert f'id="{anchor}"' in render_html(found)


def test_what_is_wrong_in_one_dtype_is_not_what_is_wrong_in_all():
    """Without a cause, a case that deviates in all dtypes is another fault than those of one."""
    dtypes = ("float64", "float32", "float16")
    results = [result(bad(), case="plain/no-mask/size-one", dtype=dtype) for dtype in dtypes]
    for case in ("mask/a/self", "mask/b/self"):
        results += [
            result(bad(size=1e7) if dtype == "float64" else good(), case=case, dtype=dtype)
            for dtype in dtypes
        ]
    found = report(*results)
    assert [(item.dtypes, len(item.cases)) for item in found.deviations] == [
        ({"float64": 1, "float32": 1, "float16": 1}, 1),
        ({"float64": 2}, 2),
    ]
    assert [item.text for item in symptoms(found, found.columns[0])] == [
        "beyond rounding noise in plain/no-mask/size-one, every dtype and mode",
        "beyond rounding noise in float64, every mode",
    ]


def test_dtypes_with_different_numbers_of_cases_say_how_many():
    results = [
        result(bad(cause=Phrase("a cause")), case=case, dtype=dtype)
        for case, dtype in (
            ("a/b/self", "float64"),
            ("a/c/self", "float64"),
            ("a/c/self", "float32"),
        )
    ]
    (item,) = report(*results).deviations
    assert where(item) == "float64 (2 cases) and float32 (1 case); mode train; 2 cases"


def test_an_implementation_of_an_unfinished_run_does_not_conform():
    assert report(result(good()), complete=False, planned=2).columns[0].standing == "not verified"


def test_a_crash_leads_to_its_reason():
    page = render_html(report(result(good(), Finding(GRADIENT, "crashed", detail="signal 11"))))
    assert '<a href="#not-verified">reasons</a>' in page
    assert "only partly verified" in page
    assert "signal 11" in page


# Markdown


@pytest.fixture(params=sorted(REPORTS))
def any_report(request):
    return REPORTS[request.param]()


def parsed(text: str) -> list:
    return MarkdownIt("commonmark").enable("table").parse(text)


def test_markdown_tables_keep_their_columns(any_report):
    width = 0
    for token in parsed(render_markdown(any_report)):
        if token.type == "table_open":
            width = 0
        elif token.type == "tr_open":
            cells = 0
        elif token.type in ("th_open", "td_open"):
            cells += 1
        elif token.type == "tr_close":
            width = width or cells
            assert cells == width


def test_nothing_breaks_out_of_the_markdown():
    text = render_markdown(full_report())
    allowed = {"<br>", "<details>", "</details>", "<summary>", "</summary>", "<b>", "</b>"}
    allowed |= {"<code>", "</code>"}
    for token in parsed(text):
        assert token.type != "html_block" or "<script" not in token.content
        for child in token.children or []:
            assert child.type not in ("link_open", "image", "em_open")
            assert child.type != "html_inline" or child.content in allowed
    fences = [token.content for token in parsed(text) if token.type == "fence"]
    assert any(content == f"{NASTY}\n```\nmore\n" for content in fences)


def test_markdown_tables_have_as_many_rows_as_said():
    """A row that is cut off by a blank line would silently end its table."""
    found = backends("attends", "attends", "blocks")
    rows = Counter(token.type for token in parsed(render_markdown(found)))["tr_open"]
    piped = [line for line in render_markdown(found).splitlines() if line.startswith("|")]
    rulers = [line for line in piped if set(line) <= set("|:- ")]
    assert rows == len(piped) - len(rulers)


# JSON, and all of it at once


def test_the_report_survives_json(any_report):
    encoded = msgspec.json.encode(any_report)
    assert msgspec.json.decode(encoded, type=data.Report) == any_report
    assert json.loads(encoded)["schema"] == "mha-conformance/report/2"


def test_rendering_twice_gives_the_same(any_report):
    assert render_html(any_report) == render_html(any_report)
    assert render_markdown(any_report) == render_markdown(any_report)


@pytest.mark.parametrize(
    ("results", "expected", "code"),
    [
        ([result(good())], [], ExitCode.OK),
        ([result(bad())], [], ExitCode.OK),
        ([result(good())], ["other"], ExitCode.INCOMPLETE),
        (
            [result(good()), result(Finding(OUTPUT, "timed-out"), mode="eval")],
            [],
            ExitCode.INCOMPLETE,
        ),
        ([result(Finding(OUTPUT, "unsupported"))], [], ExitCode.NOTHING_VERIFIED),
        # As in a run, in which an item that ends in an error verifies nothing.
        ([result(Finding(OUTPUT, "error"))], [], ExitCode.NOTHING_VERIFIED),
        ([result(bad(), Finding(GRADIENT, "error"))], [], ExitCode.NOTHING_VERIFIED),
        ([result(Finding(OUTPUT, "error")), result(bad(), mode="eval")], [], ExitCode.OK),
    ],
)
def test_writing_gives_three_files_and_an_exit_code(tmp_path, capsys, results, expected, code):
    save(tmp_path, record(*results))
    output = tmp_path / "out" / "compatibility"
    assert write([tmp_path], output, expected) == code
    for suffix in ("json", "md", "html"):
        assert (tmp_path / "out" / f"compatibility.{suffix}").stat().st_size > 500
    assert "mine: 1" in capsys.readouterr().out


def test_writing_without_records_verifies_and_writes_nothing(tmp_path, capsys):
    page = tmp_path / "x.html"
    assert write([tmp_path / "none"], tmp_path / "x") == ExitCode.NOTHING_VERIFIED
    assert write([], tmp_path / "x", ["torch"], html=page) == ExitCode.NOTHING_VERIFIED
    assert "torch could not be set up" in capsys.readouterr().out
    save(tmp_path, record(result(good()))).rename(tmp_path / "a.narrowed.json")
    assert write([tmp_path], None, html=page) == ExitCode.NOTHING_VERIFIED
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("nothing is written, because no record was found")
    assert told.endswith(f"it is named: {tmp_path / 'a.narrowed.json'}")
    assert not [*tmp_path.glob("x*")]


def test_the_run_is_read_from_its_file(tmp_path):
    path = save(tmp_path, record(result(good()), run="run-1"))
    run = tmp_path / "run"
    run.write_text("run-2\n")
    assert write([path], tmp_path / "x", run=run) == ExitCode.NOTHING_VERIFIED
    run.write_text("run-1\n")
    assert write([path], tmp_path / "x", run=run) == ExitCode.OK
    with pytest.raises(ConformanceError, match="mha-conformance begin"):
        write([path], tmp_path / "x", run=tmp_path / "nothing")


# Features


def told(argument: str, value: str, before: str) -> Entry:
    lengths = Phrase("lengths.equal")
    return Entry(
        Phrase("window.alone", {"argument": argument, "value": value, "lengths": lengths}),
        Phrase("window.sees", {"before": before, "after": "0"}),
    )


@pytest.mark.parametrize(
    ("value", "before", "expected"),
    [
        ("2", "1", ["counts the own key"]),
        ("2", "2", ["does not count the own key"]),
        ("(1, 2)", "1", ["does not count the own key"]),
        ("-1", "all", []),
        ("0", "0", []),
    ],
)
def test_a_window_counts_the_own_key_or_not(value, before, expected):
    asked = CaseResult("mine", "probe/windows", "float32", "cpu", "train",
                       [Finding("adapter.declares-what-is-observed", "observed")],
                       [told("size", value, before)])  # fmt: skip
    (window, *others) = report(asked).features
    assert [item.value for item in window.seen] == expected
    assert window.declared == ["size"]
    assert fared(window) == "not asked"
    assert all(other.declared is None and not other.seen for other in others)


def test_a_feature_counts_the_items_whose_case_has_it():
    """A record of before cases said their features was not asked."""
    own = record(
        result(good()),
        result(bad(), case="a/b/self"),
        result(Finding(OUTPUT, "unsupported"), case="c/d/self"),
        result(Finding("cache.steps-equal-the-whole", "deviates"), case="e/f/self"),
    )
    before = {one.feature: one.items for one in build([loaded(own)]).features if one.items}
    assert before == {"Caches, pages": {"deviates": 1}}
    names = ("plain/no-mask/self", "a/b/self", "c/d/self")
    cases = {name: CaseInfo("", [], features=["window", "sinks"]) for name in names}
    header = msgspec.structs.replace(own.header, cases=cases)
    found = {
        one.feature: one
        for one in build([loaded(msgspec.structs.replace(own, header=header))]).features
    }
    assert found["Window"].items == found["Sinks"].items
    assert found["Window"].items == {"conforms": 1, "deviates": 1, "unsupported": 1}
    assert fared(found["Window"]) == "✗ 1 of 2"
    assert fared(found["ALiBi"]) == "not asked"


@pytest.mark.parametrize(
    ("text", "most", "cut"),
    [
        ("the mean of the values", 30, "the mean of the values"),
        ("the mean of the values, but", 26, "the mean of the values…"),
        ("lost to rounding. scaled_dot", 20, "lost to rounding…"),
        ("attention_mask_of_a_decoder", 12, "attention_m…"),
    ],
)
def test_a_long_text_is_cut_between_words(text, most, cut):
    assert short(text, most) == cut
