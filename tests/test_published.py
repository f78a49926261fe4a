"""What is published: the records are whole and small, the pages are those that they make."""

from __future__ import annotations

import gzip
import itertools
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import msgspec
import pytest
from looped import for_each
from records import (
    GRADIENT,
    MASKED,
    OBSERVED,
    OUTPUT,
    bad,
    entry,
    good,
    implementation,
    loaded,
    provenance,
    record,
    render_html,
    result,
)
from schemas import faults
from test_docs import ROOT, anchors

from conformance.adapter.loading import load as load_adapter
from conformance.cli import main
from conformance.errors import BrokenRecord, ConformanceError, ExitCode
from conformance.records import long
from conformance.records.findings import Finding, Phrase
from conformance.records.header import CaseInfo, WeightsInfo
from conformance.records.record import (
    EXPLORATION,
    Exploration,
    Found,
    Journal,
    encode_line,
    write_document,
)
from conformance.records.record import read as read_record
from conformance.reports import publishing as keep
from conformance.reports import wording
from conformance.reports.gate.baseline import KINDS, Baseline, read_baselines
from conformance.reports.load import find_records, load, load_versions
from conformance.reports.page.markdown import render_markdown
from conformance.reports.publishing import Wanted, read, render
from conformance.reports.publishing.pages import Known, lengths_of, sort
from conformance.reports.wording import UNSORTED
from conformance.reports.writing import build
from conformance.running.provenance import describe

PUBLISHED = ROOT / "reports" / "published"
RECORDS = sorted(PUBLISHED.glob("*/*.json.gz"))
WANTED = Wanted(
    records=[],
    versions=[],
    expected=[],
    expected_versions=[],
    run=None,
    output=PUBLISHED,
    pages=ROOT / "docs" / "implementations",
    baselines=[ROOT / "reports" / "baselines"],
)


# What is in the repository


@for_each(file=RECORDS[::6])
def test_some_records_are_as_the_schema_says(file):
    assert not faults("record", msgspec.json.decode(gzip.decompress(file.read_bytes())))


@pytest.mark.night
@for_each(file=RECORDS)
def test_every_record_is_as_the_schema_says(file):
    assert not faults("record", msgspec.json.decode(gzip.decompress(file.read_bytes())))
    assert file.stat().st_size <= keep.MOST_RECORD


def test_together_they_are_small():
    assert RECORDS
    assert sum(file.stat().st_size for file in RECORDS) <= keep.MOST_TOGETHER


@pytest.fixture(scope="module")
def published():
    return read(WANTED, root=ROOT)


def test_the_pages_are_those_that_the_records_make(published):
    made = render(published)
    for path, content in made.items():
        assert path.read_text(encoding="utf-8") == content, f"{path.name}: mha-conformance publish"
    kept = {*PUBLISHED.glob("*.md"), *PUBLISHED.rglob("*.svg"), *WANTED.pages.glob("*.md")}
    assert kept == set(made)


@pytest.mark.parametrize(("times", "told"), [(4, True), (2, True), (1, False), (0, False)])
def test_a_cause_is_told_where_it_is_that_of_half_of_the_findings(times, told):
    cause = Phrase("scale.ignored")
    causes = [cause] * times + [Phrase("")] * (4 - times)
    members = [SimpleNamespace(finding=SimpleNamespace(cause=one)) for one in causes]
    known = Known(None, SimpleNamespace(members=members))
    assert known.cause == (cause if told else Phrase(""))


def test_every_deviation_is_sorted(published):
    unsorted = {
        key: [item.most_frequent("case") for item in known if item.kind == UNSORTED]
        for own in filter(None, (published, published.gpu))
        for one in (own.known, own.beside, own.sizes)
        for key, known in one.items()
    }
    assert not {key: told for key, told in unsorted.items() if told}


def test_every_defect_has_a_script(published):
    everything = [
        known
        for own in filter(None, (published, published.gpu))
        for one in (own.known, own.beside, own.sizes)
        for known in one.values()
    ]
    for known in itertools.chain.from_iterable(everything):
        if known.kind == "defect":
            assert known.entry.reproduction, known.reason
            assert (ROOT / known.entry.reproduction).is_file()


def test_links_of_the_pages_lead_somewhere(published):
    for path, content in render(published).items():
        if path.suffix != ".md":
            continue
        prose = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", content)
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", prose):
            place, _, anchor = target.partition("#")
            file = (path.parent / place).resolve() if place else path
            assert file.exists(), (path.name, target)
            if anchor and file.suffix == ".md" and file != path:
                assert anchor in anchors(file), (path.name, target)


# How it is made


def publish(tmp_path, *records, versions=(), baseline=""):
    for folder, own in (("records", records), ("versions", versions)):
        (tmp_path / folder).mkdir()
        for one in own:
            file = tmp_path / folder / f"{one.header.name}.json"
            file.write_bytes(msgspec.json.encode(one))
    known = tmp_path / "known.toml"
    known.write_text(baseline)
    arguments = ["publish", str(tmp_path / "records"), "--output", "published", "--pages", "pages"]
    arguments += ["--baseline", str(known)]
    return main([*arguments, "--versions", str(tmp_path / "versions"), "--quiet"])


OURS = implementation("ours", title="MultiHeadAttention (ours)", versions={"torch": "2.9"})


def of(*results, name="env", ours=OURS, **changes):
    return record(*results, name=name, implementations=[ours], **changes)


def test_records_are_kept_and_rendered_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = of(result(good(), bad(GRADIENT), name="ours"))
    old = of(
        result(bad(), good(GRADIENT), name="ours"),
        name="old",
        ours=msgspec.structs.replace(OURS, versions={"torch": "2.8"}),
    )
    known = f'[[known]]\nrequirement="{GRADIENT}"\nverdict="deviates"\nkind="defect"\n'
    known += 'reason="it is wrong"\n'
    assert publish(tmp_path, own, versions=[old], baseline=known) == ExitCode.OK
    table = Path("published/README.md").read_text()
    page = Path("pages/ours.md").read_text()
    assert "| defect |" in table
    assert "it is wrong" in table
    assert "### Defect: it is wrong\n" in page
    assert "- In float32" in page
    assert "- Since torch 2.9; not in torch 2.8." in page
    assert "1 worse: gradient.inputs-equal-definition; 1 fixed: output.equals-definition" in page
    assert "| unsorted deviation |" in page.partition("## Versions")[2]
    only = page.partition("## What deviates in other versions only")[2]
    assert "### Unsorted deviation in other versions: " in only
    assert "- In float32, mode train." in only
    assert "- With torch 2.8." in only
    kept = read_record(Path("published/records/env.json.gz"))
    assert kept.results == own.results
    assert kept.exchange == ""
    before = {file: file.read_bytes() for file in Path("published").rglob("*.gz")}
    assert (
        main(["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"])
        == ExitCode.OK
    )
    assert Path("published/README.md").read_text() == table
    assert {file: file.read_bytes() for file in Path("published").rglob("*.gz")} == before
    capsys.readouterr()


def test_what_was_explored_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path, of(result(good(), name="ours")))
    assert "Explored" not in Path("pages/ours.md").read_text()
    found = Found(
        "float32",
        ["output.equals-definition", "off"],
        ["mask", "scale"],
        [1, 1, 65, 1, 1, 1],
        ["train"],
        "output",
        "the output is <not> the definition's",
        None,
        3,
        "ours-1.case",
        {"torch": "2.13"},
    )
    exploration = Exploration(
        EXPLORATION, "ours", {"torch": "2.13"}, "cpu", 0, 60.0, {"train": 40, "eval": 1}, [found]
    )
    write_document(Path("published/explored/ours.json"), exploration)
    rendered = ["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"]
    assert main(rendered) == ExitCode.OK
    page = Path("pages/ours.md").read_text()
    assert "Explored: 41 problems in 2 modes, 60 s each, with torch 2.13; found 1 class" in page
    assert "mode train, with mask and scale" in page
    assert "published/explored/ours-1.case" in page
    assert "<not>" not in page
    Path("published/explored/ours.json").rename("published/explored/other.json")
    assert main(rendered) == ExitCode.USAGE


def climb(*steps, **changes):
    fields = {
        "schema": long.SCHEMA,
        "implementation": OURS,
        "provenance": provenance(),
        "lengths": [1024, 4096, 16384],
        "head_size": 64,
        "tile": 0,
        "memory": None,
        "seconds": 25.0,
        "steps": list(steps),
    }
    return long.Climb(**fields | changes)


def step(problem, length, verdict="conforms", *, largest=2.0, **changes):
    few = 64 if problem == "few queries" else length
    seen = [long.ArrayStatistics("output", 1.0, 0.5, 0.0, 0.0, 0.25)]
    seen += [long.ArrayStatistics("key", largest, 0.5, 0.0, 0.0, largest / 8)]
    fields = {"dtype": "float32", "mode": "train", "called": 0.5, "own": 0.25}
    fields["seen"] = seen if verdict in ("conforms", "deviates") else []
    return long.Step(problem, queries=few, keys=length, verdict=verdict, **fields | changes)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pages").write_text("a file stands where the folder of pages belongs")
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.USAGE
    assert "cannot be written" in capsys.readouterr().err


def test_what_was_examined_at_length_is_a_column_and_a_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish(tmp_path, of(result(good(), name="ours")))
    assert "Long" not in Path("published/README.md").read_text()
    examined = climb(
        step("causal", 1024),
        step("few queries", 4096),
        step("causal", 4096, dtype="bfloat16"),
        step("causal", 16384, "deviates", largest=17.0, dtype="bfloat16", detail="<there>"),
        step("causal", 16384, "not reached", why="takes about 70 s"),
        step(
            "full",
            16384,
            "not reached",
            why="needs about 9 GiB, for its memory grows as queries × keys",
        ),
    )
    file = Path("published/long/ours.json")
    write_document(file, examined)
    assert long.read_climb(file) == examined
    rendered = ["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"]
    assert main(rendered) == ExitCode.OK
    table = Path("published/README.md").read_text()
    assert "float32 1,024<br>bfloat16 4,096, ✗ 16,384 (17σ, unsorted deviation) |" in table
    assert "![Error in σ over length](long.svg)" in table
    Path("known.toml").write_text(
        '[[known]]\nimplementation="ours"\ncase="long/*/16384x*"\nwhen=\'dtype=="bfloat16"\'\n'
        f'requirement="{GRADIENT}"\nverdict="deviates"\nkind="accuracy"\nreason="it is coarse"\n'
    )
    assert main(rendered) == ExitCode.OK
    assert "✗ 16,384 (17σ, accuracy) |" in Path("published/README.md").read_text()
    page = Path("pages/ours.md").read_text()
    assert "| float32 | 1,024 | 4,096 | none | 488, 244 |" in page
    assert "the time (causal from 16,384)<br>the memory (full from 16,384)" in page
    assert "`long/causal/16384x16384`: key, 17σ, accuracy" in page
    assert "### Accuracy at the sizes of kernels: it is coarse\n" in page
    assert "- In bfloat16" in page
    ElementTree.fromstring(Path("published/long.svg").read_text().partition("\n<!--")[0])
    file.rename("published/long/other.json")
    assert main(rendered) == ExitCode.USAGE


def test_each_problem_that_was_not_reached_has_a_length_of_its_own():
    memory = {"verdict": "not reached", "why": "needs about 9 GiB"}
    steps = (
        step("causal", 16384, **memory),
        step("full", 16384),
        step("causal", 65536, **memory),
        step("full", 65536, **memory),
        step("sampled", 16384, "not reached", why="takes about 70 s"),
    )
    (found,) = lengths_of(climb(*steps), Baseline(Path(), "", ()))
    assert found.text == "float32 16,384"
    assert found.missing == [
        "the memory (causal from 16,384; full from 65,536)",
        "the time (sampled from 16,384)",
    ]


def test_where_nothing_was_compared_at_length_nothing_is_said_to_conform(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = [msgspec.structs.replace(OURS, name=name) for name in ("other", "third")]
    records = [
        of(result(good(), name=one.name), name=one.name, ours=one) for one in (OURS, *others)
    ]
    refused = step("causal", 1024, "unsupported", dtype="bfloat16", why="no bfloat16")
    for one, seconds in zip((OURS, *others), (90.0, 9.6, None), strict=True):
        made = climb(step("causal", 1024), refused, seconds=seconds, implementation=one)
        Path("published/long").mkdir(parents=True, exist_ok=True)
        write_document(Path(f"published/long/{one.name}.json"), made)
    publish(tmp_path, *records)
    assert "| bfloat16 | · | · | · | · | no bfloat16" in Path("pages/ours.md").read_text()
    assert "memory and time (10 to 90 seconds) allow" in Path("published/README.md").read_text()


@pytest.mark.parametrize(
    "wrong", ["", "[]", '{"schema": "mha-conformance/long/1"}', "not JSON"], ids=str
)
def test_what_is_no_examination_at_length_is_refused(tmp_path, wrong):
    file = tmp_path / "ours.json"
    file.write_text(wrong)
    with pytest.raises(BrokenRecord, match="no record of an examination at length"):
        long.read_climb(file)
    write_document(file, climb(schema="mha-conformance/long/99"))
    with pytest.raises(BrokenRecord, match="long/99"):
        long.read_climb(file)
    # What a later suite writes may have other fields.
    file.write_text('{"schema": "mha-conformance/long/99", "later": 1}')
    with pytest.raises(BrokenRecord, match="has schema"):
        long.read_climb(file)


def test_how_far_an_implementation_conforms_is_said_of_whole_sequences():
    def far(*steps):
        (reach,) = long.reaches(steps)
        return reach.most, reach.beside, reach.first and reach.first.length

    assert far(step("causal", 1024), step("few queries", 4096)) == (1024, 4096, None)
    assert far(step("causal", 1024), step("few queries", 1024, "deviates")) == (0, 0, 1024)
    assert far(step("causal", 1024, "unsupported"), step("few queries", 256)) == (0, 256, None)
    assert far(step("key lengths", 1024), step("few queries", 4096)) == (1024, 4096, None)
    error = step("full", 4096, "error", why="RuntimeError: no")
    assert far(step("causal", 1024), step("causal", 4096), error) == (1024, 1024, 4096)
    (finding,) = long.as_record(climb(error)).results[0].findings
    assert (finding.verdict, finding.detail) == ("error", "RuntimeError: no")


def test_level_large_is_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "large"
    folder.mkdir()
    own = of(
        result(good(), bad(GRADIENT, size=24.0), name="ours", case="logits/rising/self.d64t64x64"),
        result(good(), name="ours", case="plain/no-mask/self.d64t64x64", dtype="bfloat16"),
        selection="--level large",
    )
    (folder / "env.narrowed.json").write_bytes(msgspec.json.encode(own))
    publish(tmp_path, of(result(good(), name="ours")))
    rendered = ["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"]
    assert main([*rendered, "--large", str(folder)]) == ExitCode.OK
    expected = "float32 ✗ 1 of 2, 24σ: unsorted deviation<br>bfloat16 ✓ 1 |"
    assert expected in Path("published/README.md").read_text()
    assert main(rendered) == ExitCode.OK
    assert expected in Path("published/README.md").read_text()
    known = '[[known]]\ncase="logits/rising/*.d64t64x64"\nverdict="deviates"\nkind="accuracy"\n'
    Path("known.toml").write_text(known + 'reason="its exponentials are approximate"\n')
    assert main(rendered) == ExitCode.OK
    assert "24σ: accuracy<br>" in Path("published/README.md").read_text()
    heading = "### Accuracy at the sizes of kernels: its exponentials are approximate\n"
    assert heading in Path("pages/ours.md").read_text()


ADD = ["--add", "--output", "published", "--pages", "pages", "--baseline", "known.toml", "--quiet"]


# Beside the CPU, a GPU


RENDERED = ["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"]
TOOLKIT = {"CUDA": "13.0", "cuDNN": "9.13.0"}
H100 = {"device": "gpu", "device_model": "NVIDIA <H100>", "driver": "580.95.05"}
ON_GPU = "NVIDIA &#60;H100&#62;, driver 580.95.05, CUDA 13.0, cuDNN 9.13.0"
COARSE = (
    f'[[known]]\nrequirement="{GRADIENT}"\nwhen=\'device == "gpu"\'\nverdict="deviates"\n'
    'kind="accuracy"\nreason="It is coarse there."\nlink="https://example.org/coarse"\n'
)


def on_gpu(*results, name="ours", ours=OURS, **changes):
    """A record as a GPU would have made it, of what a CPU said."""
    ours = msgspec.structs.replace(
        ours, name=name, versions={"torch": "2.11"}, toolkit=TOOLKIT, features=[]
    )
    results = [msgspec.structs.replace(one, device="gpu") for one in results]
    return of(*results, name=name, ours=ours, selection="--level core", **H100 | changes)


def gpus(folder, *records, climbs=(), large=()):
    """A folder as `mha-conformance gpu` leaves it."""
    folder.mkdir()
    for place, own in ((folder, records), (folder / "large", large)):
        for one in own:
            place.mkdir(exist_ok=True)
            (place / f"{one.header.name}.json").write_bytes(msgspec.json.encode(one))
    for one in climbs:
        write_document(folder / "long" / f"{one.implementation.name}.json", one)
    return str(folder)


def test_what_no_gpu_was_asked_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    table, page = Path("published/README.md").read_text(), Path("pages/ours.md").read_text()
    assert "Not measured on a GPU." in table
    assert "cpu; not measured on a GPU\n" in page
    assert (table + page).count("GPU") == 2


def test_a_gpu_stands_beside_the_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = of(result(good(), name="other"), name="two", ours=implementation("other"))
    cpu = of(result(good(), good(GRADIENT), name="ours"))
    assert publish(tmp_path, cpu, other, baseline=COARSE) == ExitCode.OK
    gpu = on_gpu(result(good(), bad(GRADIENT, size=24.0), name="ours"))
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", gpu)]) == ExitCode.OK
    assert "no baseline sorts" not in capsys.readouterr().out
    table = Path("published/README.md").read_text()
    assert "1 implementation, NVIDIA &#60;H100&#62;, driver 580.95.05 (2026-01-02)." in table
    (row,) = [line for line in table.splitlines() if "(ours)" in line]
    assert row.endswith("✓ nothing | float32 ✗ 24σ<br>accuracy<br>with torch 2.11 |")
    (row,) = [line for line in table.splitlines() if "**Other**" in line]
    assert row.endswith("✓ nothing | – |")
    page = Path("pages/ours.md").read_text()
    assert "Linux x86_64, cpu; [on a GPU too](#on-a-gpu)\n" in page
    where = f"{ON_GPU} · torch 2.11 · 2026-01-02, Python 3.11.0, Linux x86_64"
    assert f"## On a GPU\n\n{where} · asked: `--level core`\n" in page
    assert "| float32 | 2.0σ, 0.5σ | ✗ 24σ, 6.0σ | A0 |" in page
    assert "### Accuracy on a GPU: It is coarse there\n" in page
    assert "- Upstream: [example.org/coarse](https://example.org/coarse).\n" in page
    # The section about the CPU says nothing of it.
    assert "Nothing that it supports." in page.partition("## On a GPU")[0]
    assert "not measured on a GPU" in Path("pages/other.md").read_text()
    before = {file: file.read_bytes() for file in Path().glob("p*/**/*.*")}
    assert main(RENDERED) == ExitCode.OK
    assert {file: file.read_bytes() for file in Path().glob("p*/**/*.*")} == before


def test_what_deviates_on_one_device_only_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known = "".join(
        f'[[known]]\nrequirement="{requirement}"\nverdict="deviates"\nkind="{kind}"\n'
        f'reason="{reason}"\n'
        for requirement, kind, reason in (
            (GRADIENT, "defect", "It is everywhere."),
            (OUTPUT, "defect", "It is on the CPU."),
        )
    )
    wrong = result(bad(), bad(GRADIENT), name="ours")
    beyond = result(bad(MASKED), name="ours", case="edge/a/self")
    assert publish(tmp_path, of(wrong, beyond), baseline=known) == ExitCode.OK
    gpu = on_gpu(result(good(), bad(GRADIENT), name="ours"))
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", gpu)]) == ExitCode.OK
    section = Path("pages/ours.md").read_text().partition("## On a GPU")[2]
    assert "- As on the CPU: defect: It is everywhere\n" in section
    assert "- Not there, although it was asked: defect: It is on the CPU\n" in section
    # What was not asked there is neither.
    assert section.count("although it was asked") == 1
    assert "### " not in section
    table = Path("published/README.md").read_text().partition("## Defects")[2]
    assert "| `ours`, `ours on gpu` | It is everywhere. |" in table
    assert "| `ours` | It is on the CPU. |" in table


def test_a_defect_of_several_is_told_as_most_of_them_have_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reasons = {
        "ours": "With an option of ours, their function is called. It is wrong everywhere.",
        "theirs": "It is wrong everywhere.",
        "others": "It is wrong everywhere.",
    }
    known = "".join(
        f'[[known]]\nimplementation="{name}"\nrequirement="{OUTPUT}"\nverdict="deviates"\nkind="defect"\n'
        f'reproduction="docs/reproductions/torch_sdpa_nan_in_query.py"\nreason="{reason}"\n'
        for name, reason in reasons.items()
    )
    named = [msgspec.structs.replace(OURS, name=name, title=name) for name in reasons]
    wrong = [result(bad(), name=name) for name in reasons]
    whole = record(*wrong, name="env", implementations=named)
    assert publish(tmp_path, whole, baseline=known) == ExitCode.OK
    table = Path("published/README.md").read_text().partition("## Defects")[2]
    assert "| `ours`, `theirs`, `others` | It is wrong everywhere. |" in table


def test_what_only_a_gpu_can_run_has_a_row_and_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours")), baseline=COARSE) == ExitCode.OK
    fused = msgspec.structs.replace(OURS, title="fused")
    gpu = on_gpu(result(bad(GRADIENT), name="fused"), name="fused", ours=fused)
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", gpu)]) == ExitCode.OK
    (row,) = [line for line in Path("published/README.md").read_text().splitlines()
              if "**fused**" in line]  # fmt: skip
    assert row.endswith("| not measured on a CPU | float32 ✗ 99σ<br>accuracy |")
    page = Path("pages/fused.md").read_text()
    assert f"{ON_GPU}; not measured on a CPU · asked: `--level core`\n" in page
    assert "### Accuracy: It is coarse there\n" in page
    assert "## On a GPU" not in page
    assert "`fused`, on a GPU: accuracy" in Path("pages/index.md").read_text()
    answers = {one["key"]: one for one in site(tmp_path)["implementations"]}
    assert (answers["ours"]["device"], answers["ours"]["gpu"]) == ("cpu", None)
    assert answers["fused"]["device"] == "gpu"
    assert answers["fused"]["gpu"]["known"] == answers["fused"]["known"] != []


def site(folder):
    return msgspec.json.decode((folder / "published" / "site.json").read_bytes())


def test_the_sizes_of_kernels_are_told_of_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    long = climb(
        step("causal", 1024),
        step("causal", 4096, "deviates", largest=17.0),
        provenance=provenance(**H100),
    )
    large = on_gpu(result(good(), name="ours", case="plain/no-mask/self.d64t64x64"))
    folder = gpus(tmp_path / "gpu", climbs=[long], large=[large])
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.OK
    told = "large: float32 ✓ 1<br>long: float32 1,024, ✗ 4,096 (17σ, unsorted deviation)"
    assert told in Path("published/README.md").read_text()
    page = Path("pages/ours.md").read_text()
    assert "### Unsorted deviation at the sizes of kernels on a GPU: " in page
    assert "## At the sizes of kernels\n" not in page
    ElementTree.fromstring(Path("published/gpu/long.svg").read_text().partition("\n<!--")[0])
    # A folder without them replaces all of it, and with --add nothing that it does not have.
    own = gpus(tmp_path / "own", on_gpu(result(good(), name="ours")))
    assert main([*RENDERED, "--gpu", own, "--add"]) == ExitCode.OK
    assert told in Path("published/README.md").read_text()
    assert main([*RENDERED, "--gpu", own]) == ExitCode.OK
    assert "float32 A0<br>✓ nothing<br>with torch 2.11 |" in Path("published/README.md").read_text()


def test_what_could_not_be_run_on_a_gpu_is_no_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    ours = msgspec.structs.replace(OURS, unavailable="torch sees no gpu")
    gone = result(Finding(OUTPUT, "unavailable", "torch sees no gpu"), name="ours")
    folder = gpus(tmp_path / "gpu", on_gpu(gone, ours=ours))
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.OK
    table = Path("published/README.md").read_text()
    assert "| unavailable: torch sees no gpu" in table
    assert "## Not verified on a GPU\n\n- **ours** is unavailable: torch sees no gpu\n" in table
    page = Path("pages/ours.md").read_text()
    assert "**It could not be run there: torch sees no gpu**" in page
    assert "Nothing that was asked deviates" not in page


def test_a_run_that_was_cut_off_on_a_gpu_is_published_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    own = on_gpu(result(good(), name="ours"), complete=False, planned=9)
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", own)]) == ExitCode.OK
    table, page = Path("published/README.md").read_text(), Path("pages/ours.md").read_text()
    assert "float32 A0<br>not verified<br>with torch 2.11 |" in table
    assert "## Not verified on a GPU" in table
    assert "Nothing that was asked deviates, but not all of it was verified." in page


@pytest.mark.parametrize("kind", ["records", "large", "climbs"])
def test_a_record_of_a_cpu_is_not_taken_for_one_of_a_gpu(tmp_path, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    cpu = of(result(good(), name="ours"))
    assert publish(tmp_path, cpu) == ExitCode.OK
    given = {"records": ([cpu], {}), "large": ([], {"large": [cpu]}),
             "climbs": ([], {"climbs": [climb(step("causal", 1024))]})}  # fmt: skip
    records, sizes = given[kind]
    folder = gpus(tmp_path / "gpu", *records, **sizes)
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.USAGE
    assert "it was made on the device 'cpu', not 'gpu'" in capsys.readouterr().err
    assert main(RENDERED) == ExitCode.OK
    assert "Not measured on a GPU." in Path("published/README.md").read_text()


def test_a_folder_of_gpu_records_that_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    assert main([*RENDERED, "--gpu", "nowhere"]) == ExitCode.USAGE
    assert "nowhere: no folder of records" in capsys.readouterr().err
    # Nor does a wrong folder remove what is kept.
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "empty")]) == ExitCode.USAGE
    assert "no records are there" in capsys.readouterr().err


def test_nothing_is_replaced_by_a_part_of_what_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    given = gpus(tmp_path / "a", on_gpu(result(good(), name="ours")))
    assert main([*RENDERED, "--gpu", given]) == ExitCode.OK
    kept = Path("published/gpu/records/ours.json.gz").read_bytes()
    other = gpus(tmp_path / "b", on_gpu(result(bad(), name="ours")), climbs=[climb()])
    assert main([*RENDERED, "--gpu", other]) == ExitCode.USAGE
    assert Path("published/gpu/records/ours.json.gz").read_bytes() == kept


def test_of_a_run_that_was_begun_again_the_whole_record_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    whole = on_gpu(result(good(), good(GRADIENT), name="ours"))
    folder = gpus(tmp_path / "gpu", whole)
    journal = Journal(tmp_path / "gpu" / "ours.json", whole.header)
    journal.add(encode_line(msgspec.structs.replace(whole.results[0], findings=[bad()]), {}))
    journal.close()
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.OK
    assert read_record(Path("published/gpu/records/ours.json.gz")).results == whole.results
    # Without it, what the journal has is published, as not verified.
    Path("gpu/ours.json").unlink()
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.OK
    assert not read_record(Path("published/gpu/records/ours.json.gz")).complete


ANSWERS = runpy.run_path(str(ROOT / "docs" / "site" / "answers.py"))


def pages_of_the_site(folder):
    """What the site makes of what is published in a folder."""
    (folder / "reports").mkdir(exist_ok=True)
    shutil.copytree(folder / "published", folder / "reports" / "published", dirs_exist_ok=True)
    return ANSWERS["pages"](folder)


def test_on_the_site_a_gpu_is_a_switch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = [
        of(result(good(), name=name), name=name, ours=implementation(name))
        for name in ("other", "third")
    ]
    cpu = of(result(good(), good(GRADIENT), name="ours"))
    known = COARSE + COARSE.replace("accuracy", "defect").replace(GRADIENT, OUTPUT)
    assert publish(tmp_path, cpu, *others, baseline=known) == ExitCode.OK
    made = pages_of_the_site(tmp_path)
    assert "On CPUs: nothing was measured on a GPU." in made["can-i-use.md"]
    assert "on-gpu" not in made["can-i-use.md"]
    records = (
        on_gpu(result(bad(), bad(GRADIENT), name="ours")),
        on_gpu(result(good(), name="only"), name="only", ours=implementation("only")),
        on_gpu(result(good(), name="third"), name="third", ours=implementation("third")),
    )
    main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", *records)])
    made = pages_of_the_site(tmp_path)
    assert "nothing was measured" not in made["can-i-use.md"]
    glance = made["can-i-use.md"].partition("## Everybody at a glance")[2].partition("<script")[0]
    names = ("ours", "Other", "Third", "Only")
    rows = {name: line for line in glance.splitlines() for name in names if name in line}
    halves = '<span class="on-cpu">{}</span><span class="on-gpu" hidden>{}</span> |'
    assert rows["ours"].endswith(halves.format("conforms", "defect, accuracy"))
    assert rows["Other"].endswith(halves.format("conforms", "not measured on a GPU"))
    assert rows["Only"].endswith(halves.format("not measured on a CPU", "conforms"))
    # What both devices say is there once.
    assert rows["Third"].endswith("| conforms |")
    assert "[Only &#40;on a GPU&#41;]" in rows["Only"]
    (defect,) = (path for path in made if path.startswith("defects/") and "all" not in path)
    assert "on a GPU]" in made[defect]
    assert "torch 2.11" in made[defect]
    assert "on a GPU]" in made["known/accuracy.md"]
    assert "on a GPU]" in made[f"requirements/{GRADIENT}.md"]
    assert "conforms" in made["badges/ours.svg"]
    beyond = ANSWERS["beyond"](tmp_path)
    assert defect in beyond["ours"]
    assert beyond["other"] == ""


def test_what_is_not_sorted_on_a_gpu_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    folder = gpus(tmp_path / "gpu", on_gpu(result(bad(), name="ours")))
    assert main([*RENDERED, "--gpu", folder]) == ExitCode.OK
    assert "ours on gpu: 1 deviation that no baseline sorts" in capsys.readouterr().out


def test_a_gpu_of_another_catalogue_stays(tmp_path, monkeypatch):
    """Nobody has every GPU again when a case is added."""
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    records = (
        on_gpu(result(good(), name=name), name=name, catalogue=name) for name in ("ours", "other")
    )
    assert main([*RENDERED, "--gpu", gpus(tmp_path / "gpu", *records)]) == ExitCode.OK
    assert "2 implementations, NVIDIA" in Path("published/README.md").read_text()


def test_one_record_is_added_to_those_that_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    kept = Path("published/records/env.json.gz").read_bytes()
    other = implementation("other", title="another", versions={"torch": "2.9"})
    new = of(result(good(), name="other"), name="new", ours=other)
    Path("new.json").write_bytes(msgspec.json.encode(new))
    assert main(["publish", "new.json", *ADD]) == ExitCode.OK
    assert Path("published/records/env.json.gz").read_bytes() == kept
    assert {file.name for file in Path("pages").iterdir()} == {"index.md", "ours.md", "other.md"}
    assert keep.read_made(Path("published")).expected == ["new"]


def test_a_record_that_is_added_replaces_what_it_measured_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(bad(), name="ours"))) == ExitCode.OK
    again = of(result(good(), name="ours"), created="2026-12-01T00:00:00")
    Path("env.json").write_bytes(msgspec.json.encode(again))
    assert main(["publish", "env.json", *ADD]) == ExitCode.OK
    (file,) = Path("published/records").iterdir()
    assert read_record(file).results == again.results


def test_other_versions_are_added_to_those_that_are_kept(tmp_path, monkeypatch):
    """The dots of a version are no end of a name."""
    monkeypatch.chdir(tmp_path)
    old, older = (of(result(good(), name="ours"), name=f"env-v0.{n}") for n in (8, 7))
    assert publish(tmp_path, of(result(good(), name="ours")), versions=[old, older]) == ExitCode.OK
    kept = Path("published/versions/env-v0.7.json.gz").read_bytes()
    again = of(result(bad(), name="ours"), name="env-v0.8")
    Path("env-v0.8.json").write_bytes(msgspec.json.encode(again))
    assert main(["publish", "--versions", "env-v0.8.json", *ADD]) == ExitCode.OK
    assert Path("published/versions/env-v0.7.json.gz").read_bytes() == kept
    assert read_record(Path("published/versions/env-v0.8.json.gz")).results == again.results


def test_versions_without_records_are_not_ignored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    assert main([*RENDERED, "--versions", "versions"]) == ExitCode.USAGE
    assert "use --add" in capsys.readouterr().err


def test_a_record_of_another_catalogue_is_not_added(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(good(), name="ours"))) == ExitCode.OK
    kept = Path("published/records/env.json.gz").read_bytes()
    other = implementation("other", title="another", versions={"torch": "2.9"})
    new = of(result(good(), name="other"), name="new", ours=other, catalogue="another")
    Path("new.json").write_bytes(msgspec.json.encode(new))
    assert main(["publish", "new.json", *ADD]) != ExitCode.OK
    assert "new.json: left out; catalogue hash is another" in capsys.readouterr().err
    assert [file.name for file in Path("published/records").iterdir()] == ["env.json.gz"]
    assert Path("published/records/env.json.gz").read_bytes() == kept


def test_what_is_not_sorted_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert publish(tmp_path, of(result(bad(), name="ours"))) == ExitCode.OK
    assert "ours: 1 deviation that no baseline sorts" in capsys.readouterr().out
    assert "| unsorted deviation |" in Path("published/README.md").read_text()


def test_of_other_versions_it_is_named_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    old = of(result(bad(), name="ours"), name="old")
    assert publish(tmp_path, of(result(good(), name="ours")), versions=[old]) == ExitCode.OK
    assert "ours, old: 1 deviation that no baseline sorts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"scores": ["scaled-dot"]}, "1/√head size"),
        ({"scores": ["additive"]}, "none, the score is additive"),
        ({"scores": ["scaled-dot", "additive"]}, "1/√head size"),
        ({"scores": ["scaled-dot"], "custom_scale": True}, "can be chosen"),
    ],
)
def test_the_scale_is_that_of_products(declared, told):
    declared |= {"layout": "batch length head", "weights": WeightsInfo("per head")}
    info = implementation(kind="function", **declared)
    assert wording.scale(info) == told
    assert wording.weights(info) == "of one head"
    heads = msgspec.structs.replace(info, layout="batch length (heads head)")
    assert wording.weights(heads) == "per head"


def test_what_adapters_compute_is_in_the_record():
    pytest.importorskip("torch")
    for name, scores in {"tutorial-4": ["scaled-dot"], "tutorial-5": ["additive"]}.items():
        (described,) = describe([(load_adapter(name), name)], "cpu")
        assert described.scores == scores


def test_a_title_may_be_all_in_brackets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ours = msgspec.structs.replace(OURS, title="(mine)")
    assert publish(tmp_path, of(result(good(), name="ours"), ours=ours)) == ExitCode.OK
    assert "[**(mine)**]" in Path("published/README.md").read_text()


def test_pages_of_somebody_else_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own, other = of(result(good(), name="ours")), tmp_path / "pages" / "own.md"
    other.parent.mkdir()
    other.write_text("written by hand\n")
    assert publish(tmp_path, own) == ExitCode.OK
    made = tmp_path / "pages" / "ours.md"
    made.rename(made.with_name("gone.md"))
    command = ["publish", "--output", "published", "--pages", "pages", "--baseline", "known.toml"]
    assert main(command) == ExitCode.OK
    assert {file.name for file in other.parent.iterdir()} == {"index.md", "ours.md", "own.md"}


def test_pages_may_lie_outside_of_the_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    record = tmp_path / "env.json"
    record.write_bytes(msgspec.json.encode(of(result(good(), name="ours"))))
    told = ["publish", str(record), "--output", str(tmp_path / "p"), "--pages", "../q"]
    assert main([*told, "--baseline", "."]) == ExitCode.OK
    assert "(../q/ours.md)" in (tmp_path / "p" / "README.md").read_text()


def test_what_could_not_be_set_up_is_said_and_the_rest_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "env.json").write_bytes(
        msgspec.json.encode(of(result(good(), name="ours")))
    )
    (tmp_path / "records" / "broken.json").write_text("{")
    code = main(
        [
            "publish",
            "records",
            "--output",
            "p",
            "--pages",
            "q",
            "--baseline",
            ".",
            "--expect",
            "env,other",
            "--expect-versions",
            "env-1,env-2",
        ]
    )
    assert code == ExitCode.INCOMPLETE
    table = Path("p/README.md").read_text()
    assert "**other**: its environment could not be set up" in table
    assert "broken.json: no record of this suite" in table
    assert "env-2: these versions could not be set up" in table
    assert "MultiHeadAttention (ours)" in table


def test_nothing_to_render_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["publish"]) == ExitCode.USAGE
    assert "no records are kept there" in capsys.readouterr().err


BLIND = """
import sys
from collections import Counter
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from conformance.cli import main
code = main(["publish", "mine.narrowed.json", "--output", "published", "--pages", "pages"])
rooms = ("adapters", "cases", "experiments", "requirements", "running")
rooms = tuple(f"conformance.{room}." for room in rooms)
assert not [name for name in sys.modules if name.startswith(rooms)]
raise SystemExit(code)
"""
"""Publishing without torch, and without what only a run needs."""


@pytest.mark.night
def test_a_record_is_published_without_its_adapter_and_its_framework(tmp_path):
    pytest.importorskip("torch")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# mine\.py\n.*?)```", readme, re.DOTALL)
    mine = tmp_path / "mine.py"
    mine.write_text(example.replace(" / math.sqrt(query.shape[-1])", ""))
    known = tmp_path / "known.toml"
    known.write_text(
        '[[known]]\ncase="mask/key-padding/cross"\nverdict="deviates"\nkind="defect"\n'
        'reason="The logits are not scaled."\n'
    )

    def call(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True
        )

    asked = ["--case", "mask/key-padding/cross", "--case", "probe/masks", "--dtype", "float32"]
    command = ["-m", "conformance", "gate", "mine.py:my_attention", *asked, "--no-isolate"]
    call(*command, "--baseline", "known.toml", "--record", "mine.json")
    mine.unlink()
    known.unlink()
    done = call("-c", BLIND)
    assert done.returncode == ExitCode.OK, done.stderr
    page = (tmp_path / "pages" / "my_attention.md").read_text(encoding="utf-8")
    assert "A function of projected heads" in page
    assert "| `mask` | `[batch, heads, query, key]`, each axis may be 1 | attends |" in page
    assert "| True in a mask | **attends** |" in page
    assert "### Defect: The logits are not scaled\n" in page
    assert "The logits are not scaled." in page


def test_a_record_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(keep, "MOST_RECORD", 10)
    with pytest.raises(ConformanceError, match=r"env\.json\.gz: .* 10 are the most"):
        keep.keep([loaded(of(result(good(), name="ours")))], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_record_is_packed_to_the_same_bytes():
    own = of(result(good(), name="ours"))
    assert keep.packed(own) == keep.packed(own)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda content: content[:-9], "cut off"),
        (lambda content: b"no gzip", "damaged"),
        (lambda content: gzip.compress(b"{}"), "no record"),
    ],
)
def test_what_is_no_compressed_record_is_one_line(tmp_path, spoil, told):
    file = tmp_path / "env.json.gz"
    file.write_bytes(spoil(keep.packed(of(result(good(), name="ours")))))
    with pytest.raises(BrokenRecord, match=told) as raised:
        read_record(file)
    assert "\n" not in str(raised.value)


def test_a_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("conformance.records.record.MOST_BYTES", 2**16)
    file = tmp_path / "env.json.gz"
    file.write_bytes(gzip.compress(b" " * 2**20))
    with pytest.raises(BrokenRecord, match="no record"):
        read_record(file)


def test_defects_come_first_and_all_is_counted(tmp_path):
    text = "".join(
        f'[[known]]\nimplementation="ours"\nrequirement="{requirement}"\nverdict="deviates"\n'
        f'kind="{kind}"\nreason="{kind}"\n'
        for requirement, kind in zip((OUTPUT, GRADIENT), KINDS[::3], strict=True)
    )
    (tmp_path / "a.toml").write_text(text)
    own = of(
        result(bad(made_by="kernel"), bad(GRADIENT), name="ours"),
        result(bad(), name="ours", dtype="float64"),
    )
    ((_, known),) = sort([loaded(own)], read_baselines([tmp_path]))
    assert [(item.kind, len(item.group)) for item in known] == [("defect", 1), ("convention", 2)]
    assert known[1].made_by == "kernel"
    assert known[1].group.dtypes == ["float32", "float64"]


# Versions


def version(name, number, *results, **changes):
    ours = msgspec.structs.replace(OURS, versions={"torch": "2.9", "mine": number}, **changes)
    return loaded(of(*results, name=name, ours=ours))


def test_versions_stand_in_their_own_order():
    seen, other = (
        result(
            Finding(MASKED, "observed", value=OBSERVED[text]),
            good(),
            name="ours",
        )
        for text in ("nan", "zeros")
    )
    newest = version("new", "1.10", other)
    others = [
        version("broken", "1.9", unavailable="mine does not import: no such name"),
        version("old", "1.2", result(good(), bad(GRADIENT), name="ours")),
        version("middle", "1.8", seen),
    ]
    made = build([newest], versions=others)
    (course,) = made.timelines
    assert [point.versions["mine"] for point in course.points] == ["1.2", "1.8", "1.9", "1.10"]
    assert course.points[2].unavailable == "mine does not import: no such name"
    assert course.points[2].change is None
    # What does not import is stepped over.
    assert course.points[3].change.other == [("observed.fully-masked-row", "nan", "zeros", 1)]
    for page in (render_html(made), render_markdown(made)):
        assert "mine does not import: no such name" in page
        assert "nan → " in page
    assert made.trends == []
    assert made.totals.implementations == {"conforms": 1}


@pytest.mark.parametrize("wrong", [bad(GRADIENT), Finding(GRADIENT, "error", "TypeError")])
def test_what_was_not_supported_was_not_better(wrong):
    unsupported = Finding(GRADIENT, "unsupported", "no gradients")
    for first, second in ((unsupported, wrong), (wrong, unsupported)):
        made = [version(n, n, result(one, name="ours")) for n, one in (("1", first), ("2", second))]
        (course,) = build(made[1:], versions=made[:1]).timelines
        change = course.points[1].change
        assert (change.worse, change.better) == ({}, {})
        assert change.other == [(GRADIENT, first.verdict, second.verdict, 1)]


def test_a_convention_that_changed_is_told():
    def shown(value):
        own = result(good(), name="ours", case="probe/masks")
        return msgspec.structs.replace(own, entries=[entry("masks", "mask, bool", value)])

    made = build(
        [version("new", "2", shown("blocks"))], versions=[version("old", "1", shown("attends"))]
    )
    assert made.timelines[0].points[1].change.other == [
        ("masks: mask, bool", "attends", "blocks", 1)
    ]


def test_of_lists_of_shapes_the_difference_is_told():
    def shown(takes, refuses):
        own = result(good(), name="ours", case="probe/shapes")
        taken = entry("shapes", "mask: shapes it takes", takes)
        entries = [taken, entry("shapes", "mask: shapes it refuses", refuses)]
        return msgspec.structs.replace(own, entries=entries)

    newer = version("new", "2", shown("[key] [batch, key]", "[query]"))
    older = version("old", "1", shown("[key] [query]", "[batch, key]"))
    (course,) = build([newer], versions=[older]).timelines
    assert course.points[1].change.other == [
        ("shapes: mask: shapes it takes", "[query]", "[batch, key]", 1)
    ]


def test_a_case_that_was_changed_says_nothing_of_versions():
    """What the same case asks now is compared; of unknown hashes, too."""

    def one(name, number, hash_of, own):
        path, made, arrays = version(name, number, result(own, name="ours"))
        case = CaseInfo("a case", "plain", {}, hash=hash_of)
        header = msgspec.structs.replace(made.header, cases={"plain/no-mask/self": case})
        return path, msgspec.structs.replace(made, header=header), arrays

    for hashes, worse in ((("a", "a"), 1), (("a", "b"), 0), (("", "b"), 1)):
        newer, older = one("new", "2", hashes[1], bad()), one("old", "1", hashes[0], good())
        (course,) = build([newer], versions=[older]).timelines
        change = course.points[1].change
        assert sum(change.worse.values()) == worse, hashes
        assert (change.added, change.removed) == (0, 0)


@pytest.mark.parametrize(("machines", "told"), [("one one", 1), ("one other", 0), (" other", 0)])
def test_equal_bits_on_another_machine_say_nothing_of_versions(machines, told):
    bits = Phrase("again.same-bits"), Phrase("again.within-noise")
    made = []
    for number, machine, value in zip("12", machines.split(" "), bits, strict=True):
        finding = Finding("call.memory-layout-does-not-matter", "conforms", value=value)
        own = result(finding, name="ours", case="probe/repeatability")
        seen = entry("repeatability", "alone and inside a batch", value)
        own = msgspec.structs.replace(own, entries=[seen])
        ours = msgspec.structs.replace(OURS, versions={"torch": "2.9", "mine": number})
        made.append(loaded(of(own, name=number, ours=ours, machine=machine)))
    (course,) = build(made[1:], versions=made[:1]).timelines
    assert len(course.points[1].change.other) == 2 * told


def test_python_and_numpy_are_told_where_they_differ():
    records = [
        loaded(of(result(good(), name="ours"), name=name, python=python, packages={"numpy": numpy}))
        for name, python, numpy in (
            ("a", "3.13.0", "2.0"),
            ("b", "3.11.7", "2.0"),
            ("c", "3.11.7", "1.26"),
        )
    ]
    (course,) = build(records[:1], versions=records[1:]).timelines
    assert [(point.versions["numpy"], point.versions["python"]) for point in course.points] == [
        ("1.26", "3.11"),
        ("2.0", "3.11"),
        ("2.0", "3.13"),
    ]


def test_a_record_in_the_folder_of_versions_is_one_version(tmp_path):
    records = ROOT / "docs" / "examples" / "records"
    report = tmp_path / "report"
    asked = [str(records / "after.json"), "--versions", str(records), "--output", str(report)]
    assert main(["report", *asked]) == ExitCode.OK
    made = msgspec.json.decode(report.with_suffix(".json").read_bytes())
    assert [len(course["points"]) for course in made["timelines"]] == [2]


def test_records_of_versions_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    found, problems = load_versions(find_records([tmp_path]))
    assert found == []
    assert problems[0].startswith("x.json: no record")
    assert load(find_records([tmp_path])).current == []


def test_what_a_library_raises_is_told_in_its_own_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = [f"ValueError: [1mno key[0m of size 3 (at {file}.py:1)" for file in "ab"]
    details = {"train": told[0], "eval": told[1], "fast": "TypeError: size 3"}
    results = [
        result(Finding(GRADIENT, "error", detail), name="ours", mode=mode)
        for mode, detail in details.items()
    ]
    known = f'[[known]]\nrequirement="{GRADIENT}"\nverdict="error"\nraises="size 3"\n'
    own = of(*results, result(bad(), name="ours", mode="slow"))
    assert publish(tmp_path, own, baseline=f"{known}reason='it is wrong'") == ExitCode.OK
    page = Path("pages/ours.md").read_text()
    (excused,) = (part for part in page.split("\n### ") if "it is wrong" in part)
    assert "- It raises `ValueError: no key of size 3`.\n" in excused
    assert page.count("It raises") == 1


def test_neighbouring_versions_are_told_as_a_range(tmp_path, monkeypatch):
    """Its ends say all that tells them from the next version outside."""
    monkeypatch.chdir(tmp_path)
    torch = msgspec.structs.replace(OURS, title="torch.MultiHeadAttention")
    wrong = ["2.2 3.11", "2.3 3.11", "2.4 3.11", "2.6 3.12", "2.7 3.11", "2.9 3.12"]
    versions = [
        of(
            result(bad() if version in wrong else good(), name="ours"),
            name=version.replace(" ", "-"),
            ours=msgspec.structs.replace(
                torch, versions=dict(zip(("torch", "python"), version.split(), strict=True))
            ),
        )
        for version in (*wrong, "2.1 3.11", "2.5 3.11", "2.6 3.11", "2.8 3.11")
    ]
    ours = msgspec.structs.replace(torch, versions={"torch": "2.9", "python": "3.11"})
    own = of(result(good(), name="ours"), ours=ours)
    assert publish(tmp_path, own, versions=versions) == ExitCode.OK
    page = Path("pages/ours.md").read_text()
    told = ["2.2 to 2.4", "2.7, python 3.11", "2.6, python 3.12 to torch 2.9, python 3.12"]
    assert f"- With torch {'; torch '.join(told)}, of those measured.\n" in page


@pytest.mark.parametrize(
    ("before", "since"),
    [
        (good(GRADIENT), "torch 2.9; not in torch 2.8"),
        (bad(GRADIENT), "torch 2.8, the oldest version that was measured"),
        (good(), "torch 2.9, the oldest version in which it was asked"),
        (
            Finding(GRADIENT, "unsupported", "no gradients"),
            "torch 2.9, the oldest version in which it was asked",
        ),
        (
            Finding(GRADIENT, "error", "TypeError: no"),
            "torch 2.9; in torch 2.8 the same findings are errors",
        ),
        (
            bad(GRADIENT, size=999.0),
            "torch 2.9; in torch 2.8 the same findings deviate for another reason",
        ),
    ],
)
def test_since_when_something_deviates_is_what_was_measured(tmp_path, monkeypatch, before, since):
    monkeypatch.chdir(tmp_path)
    old = of(
        result(before, name="ours"),
        name="old",
        ours=msgspec.structs.replace(OURS, versions={"torch": "2.8"}),
    )
    known = f'[[known]]\nrequirement="{GRADIENT}"\nverdict="deviates"\nwithin=100\nreason="wrong"\n'
    own = of(result(bad(GRADIENT), name="ours"))
    assert publish(tmp_path, own, versions=[old], baseline=known) == ExitCode.OK
    assert f"- Since {since}.\n" in Path("pages/ours.md").read_text()


@pytest.mark.parametrize(
    ("oldest", "since"),
    [
        (bad(GRADIENT), "torch 2.7, the oldest version that was measured"),
        (good(GRADIENT), "torch 2.9; not in torch 2.7"),
        (good(), "torch 2.9, the oldest version in which it was asked"),
    ],
)
def test_a_version_of_which_it_was_not_asked_does_not_end_the_search(
    tmp_path, monkeypatch, oldest, since
):
    """Its record may be of an older suite than those of still older versions."""
    monkeypatch.chdir(tmp_path)
    versions = [
        of(
            result(finding, name="ours"),
            name=f"v{number}",
            ours=msgspec.structs.replace(OURS, versions={"torch": number}),
        )
        for number, finding in (("2.7", oldest), ("2.8", good()))
    ]
    known = f'[[known]]\nrequirement="{GRADIENT}"\nverdict="deviates"\nreason="it is wrong"\n'
    own = of(result(bad(GRADIENT), name="ours"))
    assert publish(tmp_path, own, versions=versions, baseline=known) == ExitCode.OK
    assert f"- Since {since}.\n" in Path("pages/ours.md").read_text()


def test_no_page_has_two_headings_that_read_the_same():
    for path in (ROOT / "docs" / "implementations").glob("*.md"):
        heads = [line for line in path.read_text().splitlines() if line.startswith("#")]
        twice = [head for head, times in Counter(heads).items() if times > 1]
        assert not twice, path.name
