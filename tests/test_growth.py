"""What changed since a record was made is asked again, and nothing else is."""

from __future__ import annotations

import copy
import dataclasses
import errno
import shutil
import sys
import zipfile
from importlib import metadata
from types import SimpleNamespace

import msgspec
import pytest
from mutants import miniatures
from mutants.miniatures import Correct, Inverted

from conformance.adapter.base import Mode
from conformance.adapter.loading import load
from conformance.cases.case import case_hash
from conformance.cases.catalogue import catalogue, find_cases
from conformance.cli import main
from conformance.errors import ConformanceError, ExitCode
from conformance.experiments import experiment
from conformance.frameworks.base import changes, look, put_back
from conformance.records.header import Header
from conformance.records.record import (
    Journal,
    decode_line,
    encode_line,
    finish,
    read,
    read_arrays,
    save,
    with_inputs,
)
from conformance.requirements import REQUIREMENTS
from conformance.running import provenance
from conformance.running.inputs import digest
from conformance.running.merging import Lock, as_measured, earlier, join, unchanged
from conformance.running.provenance import describe, environment, header_of
from conformance.running.selection import parse_shard, part
from conformance.running.session import Examiner, inquiries, kept, places, plan

DTYPES = ["float32", "bfloat16"]
READ = {name: digest(name) for name in ("package numpy", "variable NOBODY_READS_THIS")}
"""What every implementation of these records has read."""


def planned(adapter, cases, dtypes=DTYPES):
    items = list(plan([adapter], cases, dtypes, "cpu"))
    return items, list(inquiries([adapter], [experiment("weights")], "cpu"))


def header(adapter, items, asked=(), selection=""):
    described = describe([(adapter, "mine.py:Mine")], "cpu")
    rows = [*items, *asked]
    return header_of([adapter], described, rows, "cpu", selection, command="run", name="r")


def record(path, adapter, items, asked=(), selection="", change=lambda header: header):
    """Examine the items as one process would, and write the record."""
    every = [*items, *asked]
    placed = places(every)
    examiner, results = Examiner(placed), []
    journal = Journal(path, change(header(adapter, items, asked, selection)))
    for item in every:
        result, arrays = examiner.examine(item)
        results.append(result)
        journal.add(encode_line(result, arrays, READ))
    journal.close()
    return finish(path, (), [item.id for item in every], kept(results, placed))


def know(monkeypatch):
    for module in ("provenance", "merging"):
        monkeypatch.setattr(
            f"conformance.running.{module}.adapter_digest", lambda spec, framework: "adapter"
        )


@pytest.fixture
def known(monkeypatch):
    """Adapters of this file have a digest, as those that are loaded by a name."""
    know(monkeypatch)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What all tests change a copy of: a record, and another one of a whole run and its halves."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        know(monkeypatch)
        made = Made(tmp_path_factory.mktemp("made") / "r.json", Correct())
        return made, halved(tmp_path_factory.mktemp("halved"))


class Made:
    """A record of some cases, and what is to be asked again after a change."""

    def __init__(self, path, adapter):
        self.path, self.adapter = path, adapter
        self.items, self.asked = planned(adapter, find_cases("mask/*/self"))
        self.record = record(path, adapter, self.items, self.asked)

    def again(self, items=None, change=lambda header: header):
        """Ids of what a run would ask that plans these items."""
        items = self.items if items is None else items
        after = change(header(self.adapter, items, self.asked))
        every = [*items, *self.asked]
        found = earlier([self.path], after, every, places(items))
        return {item.id for item in every} - found.lines.keys()

    @property
    def every(self):
        return {item.id for item in [*self.items, *self.asked]}


@pytest.fixture
def made(tmp_path, known, measured):
    own = copy.copy(measured[0])
    shutil.copytree(own.path.parent, tmp_path, dirs_exist_ok=True)
    own.path = tmp_path / own.path.name
    return own


def test_of_the_same_nothing_is_asked_again(made):
    assert len(made.every) > 10
    assert made.again() == set()


def test_one_number_of_a_case(made):
    """Exactly the items of this case are asked again."""
    edited = find_cases("mask/shared/self")[0]

    def regime(shape, drawn, random):
        drawn["query"][0, 0, 0] += 2.0**-20

    other = dataclasses.replace(edited, regime=regime)
    assert case_hash(other) != case_hash(edited)
    items = [
        dataclasses.replace(item, asked=other) if item.asked is edited else item
        for item in made.items
    ]
    assert made.again(items) == {item.id for item in made.items if item.asked is edited} != set()


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"causal": "top-left"},
        {"serves": frozenset({"call.repeats"})},
        {"defined": False},
        {"idle": {"query": "no reason"}},
        {"mask": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_the_hash_of_a_case_has_its_flags(change):
    case = find_cases("mask/shared/self")[0]
    assert case_hash(dataclasses.replace(case, **change)) != case_hash(case)


def test_the_hash_of_a_case_has_none_of_its_words():
    case = find_cases("mask/shared/self")[0]
    assert case_hash(dataclasses.replace(case, why="otherwise")) == case_hash(case)


def test_every_case_has_a_hash_of_its_own():
    assert len({case_hash(case) for case in catalogue()}) == len(catalogue())


def edit(path, value):
    """A change of one field of a header, by its path."""

    def change(header):
        document = msgspec.to_builtins(header)
        place = document
        *way, last = path
        for step in way:
            place = place[step]
        place[last] = value
        return msgspec.convert(document, Header)

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit(("provenance", "packages", "numpy"), "1.0"),
        edit(("provenance", "python"), "3.9.0"),
        edit(("provenance", "machine"), "another"),
        edit(("provenance", "device_model"), "another"),
        edit(("provenance", "driver"), "580.95.05"),
        edit(("provenance", "environment", "OMP_NUM_THREADS"), "7"),
        edit(("provenance", "code"), "other"),
        edit(("implementations", 0, "digest"), "other"),
        edit(("implementations", 0, "versions"), {"torch": "3.0"}),
        edit(("implementations", 0, "toolkit"), {"CUDA": "13.0"}),
        edit(("implementations", 0, "modes"), ["default", "fast"]),
        edit(("implementations", 0, "digest"), ""),
    ],
)
def test_what_every_outcome_depends_on(made, change):
    assert made.again(change=change) == made.every


def test_of_code_that_nobody_knows_everything_is_asked_again(made):
    """Two digests that are both missing are not the same code."""
    unknown = edit(("implementations", 0, "digest"), "")
    save(made.path, msgspec.structs.replace(made.record, header=unknown(made.record.header)))
    assert made.again(change=unknown) == made.every


def test_another_value_of_what_was_read_is_a_change(made, monkeypatch):
    assert made.again() == set()
    monkeypatch.setenv("NOBODY_READS_THIS", "1")
    assert made.again() == made.every


def test_another_promise_is_a_change(made):
    for change in (
        edit(("implementations", 0, "judged_by", "float32"), "TF32"),
        edit(("implementations", 0, "promises"), {"runs": "equal bits"}),
    ):
        assert made.again(change=change) == made.every


@pytest.mark.parametrize(
    "change",
    [
        edit(("provenance", "suite"), "9.9"),
        edit(("provenance", "packages", "pytest"), "1.0"),
        edit(("provenance", "command"), "mha-conformance gate"),
        edit(("implementations", 0, "about"), "Better words."),
    ],
)
def test_what_no_outcome_depends_on(made, change):
    assert made.again(change=change) == set()


def test_a_revision_of_a_requirement(made, monkeypatch):
    """Exactly the items of the cases that serve it."""
    name = "mask.blocked-key-has-no-influence"
    own = next(item for item in REQUIREMENTS if item.id == name)
    again = made.again(change=edit(("revisions", name), "2-other"))
    assert again == {item.id for item in made.items if own.serves(item.asked)}
    assert 0 < len(again) < len(made.every)


def test_a_revision_of_an_experiment(made):
    again = made.again(change=edit(("revisions", "probe/weights"), "other"))
    assert again == {item.id for item in made.asked} != set()


def test_a_new_requirement_is_asked_where_it_is_served(made, monkeypatch):
    own = REQUIREMENTS[0]
    new = dataclasses.replace(own, id="new.requirement", every_case=False)
    monkeypatch.setattr("conformance.running.session.REQUIREMENTS", (*REQUIREMENTS, new))
    case = find_cases("mask/shared/self")[0]
    serving = dataclasses.replace(case, serves=case.serves | {new.id})
    items = [
        dataclasses.replace(item, asked=serving) if item.asked is case else item
        for item in made.items
    ]
    assert made.again(items) == {item.id for item in items if item.asked is serving}


def test_causes_matter_where_something_deviates(tmp_path, known):
    for adapter in (Correct(), Inverted()):
        made = Made(tmp_path / f"{adapter.name or 'x'}.json", adapter)
        again = made.again(change=edit(("revisions", "causes"), "other"))
        wrong = {
            result.id
            for result in made.record.results
            if any(finding.verdict == "deviates" for finding in result.findings)
        }
        assert again == wrong
    assert wrong


def test_who_was_lost_is_asked_again(made):
    document = msgspec.to_builtins(made.record)
    verdicts = ("crashed", "timed-out", "not-run", "unavailable")
    for result, verdict in zip(document["results"], verdicts, strict=False):
        result["findings"] = [{"requirement": "run", "verdict": verdict}]
    save(made.path, msgspec.convert(document, type(made.record)))
    assert made.again() == {result.id for result in made.record.results[:4]}


def test_arrays_come_along(tmp_path, known):
    """A record of which half was measured earlier equals that of one run."""
    adapter = Inverted()
    items, asked = planned(adapter, find_cases("*/self"), ["float32"])
    whole = record(tmp_path / "whole.json", adapter, items, asked)
    record(tmp_path / "half.json", adapter, items[::2])
    now = header(adapter, items, asked)
    placed = places(items)
    found = earlier([tmp_path / "half.json"], now, [*items, *asked], placed)
    assert 0 < len(found.lines) <= len(items[::2])
    examiner = Examiner(placed)
    journal = Journal(tmp_path / "both.json", now, found.lines.values())
    results = [decode_line(line)[0] for line in found.lines.values()]
    for item in [*items, *asked]:
        if item.id not in found.lines:
            result, arrays = examiner.examine(item)
            results.append(result)
            journal.add(encode_line(result, arrays))
    journal.close()
    order = [item.id for item in [*items, *asked]]
    both = finish(tmp_path / "both.json", (), order, kept(results, placed))
    assert both.results == whole.results
    assert both.digest == whole.digest


def test_without_its_arrays_an_item_is_asked_again(made):
    """As those of a published record, which has none."""
    save(made.path, msgspec.structs.replace(made.record, exchange="", digest=""))
    arrays = read_arrays(made.path, made.record)
    having = {name.rpartition("|")[0] for name in arrays} & {item.id for item in made.items}
    assert made.again() == having != set()


def test_each_outcome_says_when_it_was_measured(made):
    change = edit(("provenance", "created"), "2030-01-02T00:00:00+00:00")
    later = change(header(made.adapter, made.items, made.asked))
    every = [*made.items, *made.asked]
    found = earlier([made.path], later, every, places(made.items))
    day = made.record.header.provenance.created[:10]
    assert {decode_line(line)[0].measured for line in found.lines.values()} == {day}
    assert {*found.days.values()} == {day}
    # And keeps it when it is taken over once more.
    path = made.path.with_name("later.json")
    journal = Journal(path, with_inputs(later, found.inputs), found.lines.values())
    journal.close()
    finish(path)
    again = earlier([path], header(made.adapter, made.items, made.asked), every, {})
    assert {*again.days.values()} == {day}


def test_what_cannot_be_read_is_named(made):
    made.path.write_text("{")
    found = earlier([made.path], header(made.adapter, made.items), made.items, {})
    assert not found.lines
    assert "cut off" in found.problems[0]


def test_days():
    assert as_measured(["2026-11-22"] * 1803, 1848) == (
        "1,803 of 1,848 items as measured on 2026-11-22"
    )
    assert as_measured(["2026-01-02", "2026-01-01"], 2).endswith("on 2026-01-01 and 2026-01-02")
    days = [f"2026-01-0{day}" for day in range(1, 6)]
    assert as_measured(days, 9) == "5 of 9 items as measured between 2026-01-01 and 2026-01-05"


def test_variables_that_may_change_numbers(monkeypatch):
    changes = {"OMP_NUM_THREADS": "3", "NVIDIA_TF32_OVERRIDE": "1", "LANG": "C", "TZ": "UTC"}
    harmless = {"JAX_COMPILATION_CACHE_DIR": "x", "TF_CPP_MIN_LOG_LEVEL": "3", "EDITOR": "C"}
    for name, value in (changes | harmless).items():
        monkeypatch.setenv(name, value)
    found = environment.__wrapped__()
    assert found.items() >= changes.items()
    assert not found.keys() & harmless.keys()
    assert not found.keys() & {"sys.abiflags", "sys.implementation"}
    # A build of the same version without a global lock, and another interpreter.
    monkeypatch.setattr(sys, "abiflags", "t", raising=False)
    monkeypatch.setattr(sys, "implementation", SimpleNamespace(name="pypy"))
    other = environment.__wrapped__()
    assert (other["sys.abiflags"], other["sys.implementation"]) == ("t", "pypy")


def test_settings_that_decide_how_precisely_a_framework_computes():
    torch = pytest.importorskip("torch")
    adapter = load("torch-mha")
    before = look(adapter.settings())
    try:
        for value in ("high", "highest"):
            torch.set_float32_matmul_precision(value)
            (described,) = describe([(adapter, "torch-mha")], "cpu")
            assert described.settings["torch's float32 matmul precision"].startswith(value)
            assert described.settings["whether cuDNN may use TF32"] == "True"
    finally:
        put_back(adapter.settings(), before)
    (described,) = describe([(Correct(), "miniatures:Correct")], "cpu")
    assert described.settings == {}


@pytest.mark.parametrize("newer", [False, True])
def test_a_change_of_torchs_precision_is_noticed_and_undone(newer):
    torch = pytest.importorskip("torch")
    if newer and not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this torch has no fp32_precision")
    settings = load("torch-mha").settings()
    before = look(settings)
    try:
        if newer:
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        else:
            torch.set_float32_matmul_precision("high")
        changed = changes(settings, before, look(settings))
        assert any("precision" in line for line in changed)
    finally:
        put_back(settings, before)
    assert look(settings) == before
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


# Digests


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An adapter with a helper beside it and a package of its own."""
    (tmp_path / "mine.py").write_text(
        "import numpy\nimport helper\nfrom own.deep import thing\nclass Mine: pass\n"
    )
    (tmp_path / "helper.py").write_text("FACTOR = 1\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    (tmp_path / "own" / "deep.py").write_text("from . import sibling\nthing = 1\n")
    (tmp_path / "own" / "sibling.py").write_text("x = 1\n")
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(folder, spec="", framework="numpy"):
    for function in (provenance.adapter_digest, provenance.source, provenance._spec):
        function.cache_clear()
    sys.path_importer_cache.clear()
    return provenance.adapter_digest(spec or f"{folder / 'mine.py'}:Mine", framework)


@pytest.mark.parametrize("file", ["mine.py", "helper.py", "own/deep.py", "own/sibling.py"])
def test_an_adapter_is_its_file_and_what_it_imports_of_its_project(project, file):
    before = digest(project)
    path = project / file
    path.write_text(path.read_text() + "ANOTHER = 2\n")
    assert digest(project) != before


def test_a_helper_in_an_archive_on_the_path(project, monkeypatch):
    def write(text):
        with zipfile.ZipFile(project / "helpers.zip", "w") as archive:
            archive.writestr("zipped.py", text)

    write("FACTOR = 1\n")
    monkeypatch.syspath_prepend(project / "helpers.zip")
    (project / "mine.py").write_text("import zipped\nclass Mine: pass\n")
    before = digest(project)
    assert digest(project) == before
    write("FACTOR = 2\n")
    assert digest(project) != before


def test_a_helper_that_is_only_beside_it(project, monkeypatch):
    """Scripts put their own folder first."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
    before = digest(project)
    (project / "helper.py").write_text("FACTOR = 2\n")
    assert digest(project) != before


def test_the_same_by_another_name(project):
    before = digest(project, "own.deep:thing")
    (project / "own" / "__init__.py").write_text("EARLY = 1\n")
    assert digest(project, "own.deep:thing") != before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("unrelated.py", "x = 2\n"),
        ("helper.py", '"""What it is."""\n\n# Why.\nFACTOR = 1\n"""About it."""\n'),
    ],
    ids=["unrelated", "words"],
)
def test_what_an_adapter_does_not_depend_on(project, file, text):
    before = digest(project)
    (project / file).write_text(text)
    assert digest(project) == before


def test_the_version_of_an_installed_package(project, monkeypatch):
    before = digest(project)
    version = provenance.metadata.version
    monkeypatch.setattr(
        provenance.metadata, "version", lambda name: "9.9" if name == "numpy" else version(name)
    )
    assert digest(project) != before


def test_what_contains_a_package_is_what_python_says():
    """`packages_distributions` of Python 3.12 and later also has names that cannot be imported."""
    told = metadata.packages_distributions()
    assert {"numpy", "pytest", "_pytest", "yaml"} <= told.keys()
    found = provenance.distributions()
    for package, names in told.items():
        if package.isidentifier():
            assert {*found[package]} == {*names}, package


@pytest.mark.parametrize(
    ("written", "package"),
    [
        ({"RECORD": "one/__init__.py,,\none-1.dist-info/RECORD,,\n"}, "one"),
        ({"RECORD": '"one.py",,\n../../bin/run.py,,\n'}, "one"),
        ({"RECORD": "one.cpython-311-x86_64-linux-gnu.so,,\n"}, "one"),
        ({"RECORD": "other.py,,\n", "top_level.txt": "one\n"}, "one"),
        ({"RECORD": "data/one.txt,,\n"}, ""),
        ({}, ""),
    ],
)
def test_packages_are_found_in_the_list_of_files(written, package, tmp_path, monkeypatch):
    about = tmp_path / "one-1.dist-info"
    about.mkdir()
    for name, text in {"METADATA": "Name: The-One\nVersion: 1\n", **written}.items():
        (about / name).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    provenance.distributions.cache_clear()
    try:
        found = dict(provenance.distributions())
    finally:
        provenance.distributions.cache_clear()
    assert found == ({package: ["The-One"]} if package else {})


def test_a_package_that_is_missing(project):
    (project / "mine.py").write_text("try:\n    import flash\nexcept ImportError:\n    pass\n")
    before = digest(project)
    (project / "flash.py").write_text("x = 1\n")
    assert digest(project) != before


def test_the_bridge_belongs_to_the_adapter(project):
    assert digest(project, framework="torch") != digest(project, framework="jax")


def test_built_in_adapters_differ():
    names = ("ours", "torch-mha", "torch-sdpa", "flax-nnx", "tutorial-1")
    found = {name: provenance.adapter_digest(name, load(name).framework) for name in names}
    assert all(found.values())
    assert len({*found.values()}) == len(names)


def test_nobody_knows_of_what_has_no_source():
    assert provenance.adapter_digest("no.such.module:Mine", "numpy") == ""


def test_revisions_are_of_their_own_modules():
    found = provenance.revisions()
    assert {item.id for item in REQUIREMENTS} < found.keys()
    assert found["probe/weights"] != found["probe/masks"]
    names = (REQUIREMENTS[0].id, "dropout.is-unbiased")
    assert len({found[name].partition("-")[2] for name in names}) == 2


def test_a_requirement_carries_its_own_revision(monkeypatch):
    own = dataclasses.replace(REQUIREMENTS[0], revision=7)
    monkeypatch.setattr(provenance, "REQUIREMENTS", (own,))
    provenance.revisions.cache_clear()
    assert provenance.revisions()[own.id].startswith("7-")
    monkeypatch.undo()
    provenance.revisions.cache_clear()


def test_the_catalogue_is_no_code(monkeypatch):
    """A new case changes nothing for the others."""
    modules = provenance._closure(["conformance.running.session"], provenance._judges)
    assert not any("cases" in module for module in [*modules, *provenance.BASE[:-1]])
    assert "conformance.requirements.examination" in modules


# Nothing changed at all


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """A record that a run of everything made, as far as there is anything."""
    cases = find_cases("mask/shared/self")
    monkeypatch.setattr("conformance.running.merging.catalogue", lambda: cases)
    monkeypatch.setattr("conformance.running.merging.TOPICS", ())
    adapter = load("tutorial-1")
    items = list(plan([adapter], cases, ["float32"], "cpu"))
    described = describe([(adapter, "tutorial-1")], "cpu")
    path = tmp_path / "r.json"
    record(
        path,
        adapter,
        items,
        change=lambda header: msgspec.structs.replace(header, implementations=described),
    )
    return path


def test_a_whole_record_stands_until_something_changes(whole):
    first = read(whole).header

    def stands(change=lambda header: header, specs=("tutorial-1",), device="cpu"):
        save(whole, msgspec.structs.replace(read(whole), header=change(first)))
        return unchanged(whole, specs, device, "full") is not None

    assert stands()
    assert not stands(specs=("tutorial-2",))
    assert not stands(specs=("tutorial-1", "tutorial-2"))
    assert not stands(device="gpu")
    for way, value in (
        (("provenance", "code"), "other"),
        (("provenance", "suite"), "9.9"),
        (("provenance", "selection"), "--case x"),
        (("provenance", "packages", "numpy"), "1.0"),
        (("provenance", "environment", "OMP_NUM_THREADS"), "7"),
        (("implementations", 0, "digest"), "other"),
        (("implementations", 0, "about"), "Other words."),
        (("implementations", 0, "versions", "torch"), "1.0"),
        (("cases", "mask/shared/self", "hash"), "other"),
        (("cases", "mask/shared/self", "why"), "Other words."),
        (("revisions", REQUIREMENTS[0].id), "other"),
        (("requirements", 0, "sentence"), "Other words."),
        (("planned",), 3),
        (("deselected",), 1),
    ):
        assert not stands(edit(way, value)), way
    assert stands()


def test_a_whole_record_does_not_stand_if_what_was_read_has_changed(whole, monkeypatch):
    assert unchanged(whole, ("tutorial-1",), "cpu", "full")
    monkeypatch.setenv("NOBODY_READS_THIS", "1")
    assert not unchanged(whole, ("tutorial-1",), "cpu", "full")


def test_a_whole_record_stands_without_cases_that_nobody_asked(whole, monkeypatch):
    more = find_cases("mask/shared/*")
    monkeypatch.setattr("conformance.running.merging.catalogue", lambda: more)
    monkeypatch.setattr("conformance.running.merging.hash_of_catalogue", lambda: "then")
    header = read(whole).header
    for before, stands in (("then", True), ("before", False)):
        save(
            whole,
            msgspec.structs.replace(
                read(whole), header=edit(("provenance", "catalogue"), before)(header)
            ),
        )
        assert (unchanged(whole, ["tutorial-1"], "cpu", "full") is not None) == stands


@pytest.mark.parametrize(
    ("verdicts", "stands"),
    [
        (("deviates", "deviates"), True),
        (("conforms", "error"), True),
        (("error", "error"), False),
        (("conforms", "unsupported"), True),
        (("unsupported", "unsupported"), False),
        (("crashed", "crashed"), False),
        (("crashed", "conforms"), False),
        (("conforms", "timed-out"), False),
        (("unavailable", "deviates"), False),
    ],
)
def test_a_record_with_an_open_question_does_not_stand(whole, verdicts, stands):
    for number, verdict in enumerate(verdicts):

        def change(result, verdict=verdict):
            result["findings"] = [{"requirement": "run", "verdict": verdict}]

        change_result(whole, number, change)
    assert (unchanged(whole, ["tutorial-1"], "cpu", "full") is not None) == stands


@pytest.mark.parametrize("verb", ["gate", "run"])
def test_a_command_that_has_nothing_to_ask(whole, monkeypatch, capsys, verb):
    """It loads no adapter, says what it knows, and makes the record one of the run begun here."""

    def never(*_, **__):
        raise AssertionError("nothing is to be asked")

    monkeypatch.setattr("conformance.commands.run.examine", never)
    monkeypatch.setattr("conformance.commands.gate.examine", never)
    # First in the module that has it by import, or it would have this one for good.
    monkeypatch.setattr("conformance.running.run.load", never)
    monkeypatch.setattr("conformance.adapter.loading.load", never)
    monkeypatch.chdir(whole.parent)
    begun = "20300102T030405Z-abcd"
    (whole.parent / "run").write_text(begun)
    before = read(whole)
    assert main([verb, "tutorial-1", "--record", "r.json", "-n", "2"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "2 conforms" in lines[0]
    day = before.header.provenance.created[:10]
    assert f"2 of 2 items as measured on {day}; --fresh measures all again" in lines
    assert lines[-1] == f"record: {whole}"
    after = read(whole)
    assert after.header.provenance.run == begun
    assert after.results == before.results
    assert after.digest == before.digest
    for more in (
        ["--fresh"],
        ["--case", "mask"],
        ["--shard", "1/2"],
        ["-k", "x"],
        ["--level=core"],
    ):
        with pytest.raises(AssertionError, match="nothing is to be asked"):
            main([verb, "tutorial-1", "--record", "r.json", *more])


def test_a_gate_that_does_not_hold_shows_its_failures(whole, monkeypatch, capsys):
    def change(result):
        result["findings"][0]["verdict"] = "deviates"

    change_result(whole, 0, change)
    monkeypatch.chdir(whole.parent)
    monkeypatch.setattr("conformance.commands.gate.examine", lambda *_, **__: 77)
    assert main(["gate", "tutorial-1", "--record", "r.json"]) == 77


# Parts


def test_shards_are_the_whole(made):
    whole = [item.id for item in part([*made.items, *made.asked], 1, 1)]
    shards = [part([*made.items, *made.asked], number, 3) for number in (1, 2, 3)]
    ids = [[item.id for item in shard] for shard in shards]
    assert sorted(name for own in ids for name in own) == sorted(whole)
    sizes = [len(own) for own in ids]
    assert max(sizes) - min(sizes) <= 2
    assert all(own == [name for name in whole if name in own] for own in ids)


def test_the_record_of_a_shard_says_of_which_part_it_is(tmp_path, monkeypatch):
    """Otherwise a gate would take it for the whole, of which much is no longer verified."""
    monkeypatch.chdir(tmp_path)
    cases = ("--case", "plain/no-mask/self", "--case", "mask/shared/self", "--dtype", "float32")
    arguments = ["run", f"{miniatures.__file__}:Correct", *cases, "--no-isolate", "--quiet"]
    main([*arguments, "--shard", "2/2", "--record", "r.json"])
    (made,) = tmp_path.glob("*.json")
    assert read(made).header.provenance.selection.endswith(" --dtype float32 --shard 2/2")


def test_items_that_share_an_expectation_stay_together():
    class Moded(Correct):
        modes = (Mode("one"), Mode("two"))

    items = list(plan([Moded()], find_cases("mask/*/self"), DTYPES, "cpu"))
    for number in (1, 2, 3, 4):
        own = {(item.asked.id, item.dtype) for item in part(items, number, 4)}
        others = {
            (item.asked.id, item.dtype)
            for other in {1, 2, 3, 4} - {number}
            for item in part(items, other, 4)
        }
        assert not own & others


@pytest.mark.parametrize("text", ["0/2", "3/2", "2", "a/b", "1/0", "-1/2"])
def test_a_shard_that_there_is_not(text):
    with pytest.raises(ConformanceError, match="say which of how many"):
        parse_shard(text)


@pytest.fixture
def shards(tmp_path, known, measured):
    return shutil.copytree(measured[1], tmp_path, dirs_exist_ok=True)


def halved(folder):
    """Two halves of a run that deviates, and the record of the whole."""
    adapter = Inverted()
    items, asked = planned(adapter, find_cases("*/self"))
    record(folder / "whole.json", adapter, items, asked)
    for number in (1, 2):
        own = part([*items, *asked], number, 2)
        mine = [item for item in own if item in items], [item for item in own if item in asked]
        record(folder / f"{number}.json", adapter, *mine, f"--shard {number}/2")
    return folder


def test_two_shards_are_the_record_of_one_run(shards):
    files = [shards / "2.json", shards / "1.json"]
    joined = join(files, shards / "both.json")
    whole = read(shards / "whole.json")
    assert not joined.contradictions
    assert joined.record == read(shards / "both.json")
    assert joined.record.complete
    assert joined.record.results == whole.results
    assert joined.record.digest == whole.digest
    names = ("name", "provenance")
    one, other = (
        {name: value for name, value in msgspec.to_builtins(r.header).items() if name not in names}
        for r in (joined.record, whole)
    )
    assert one == other
    made = {"created", "run", "command"}
    one, other = (
        {n: v for n, v in msgspec.to_builtins(r.header.provenance).items() if n not in made}
        for r in (joined.record, whole)
    )
    assert one == other


def test_a_missing_shard_is_named(shards):
    joined = join([shards / "2.json"], shards / "one.json")
    assert joined.record.header.provenance.selection == "--shard 2/2"


def change_result(path, number, edit):
    found = read(path)
    document = msgspec.to_builtins(found)
    edit(document["results"][number])
    save(path, msgspec.convert(document, type(found)))
    return found.results[number].id


def test_a_contradiction_is_named(shards):
    def deny(result):
        result["findings"][0]["verdict"] = "error"

    name = change_result(shards / "1.json", 0, deny)
    joined = join([shards / "whole.json", shards / "1.json"], shards / "both.json")
    (line,) = joined.contradictions
    was = next(r.verdict for r in joined.record.results if r.id == name)
    assert line.startswith(f"{name}: {was} in whole.json, error in 1.json")
    assert joined.record.results == read(shards / "whole.json").results


def test_what_one_part_lost_another_has(shards):
    def lose(result):
        result["findings"] = [{"requirement": "run", "verdict": "crashed"}]

    whole = read(shards / "whole.json").results
    change_result(shards / "1.json", 0, lose)
    joined = join([shards / "1.json", shards / "whole.json"], shards / "both.json")
    assert not joined.contradictions
    assert joined.record.results == whole


def test_the_command(shards, capsys):
    files = [str(shards / name) for name in ("1.json", "2.json", "whole.json")]
    output = ["--output", str(shards / "both.json")]
    assert main(["join", *files[:2], *output]) == ExitCode.OK
    assert capsys.readouterr().out.endswith(f"record: {shards / 'both.json'}\n")
    assert main(["join", files[0], *output]) == ExitCode.OK
    assert "narrowed by --shard 1/2\n" in capsys.readouterr().out

    def deny(result):
        result["findings"][0]["verdict"] = "error"

    name = change_result(shards / "1.json", 0, deny)
    assert main(["join", *files, *output]) == ExitCode.DEVIATES
    assert f"contradiction: {name}: error in 1.json, " in capsys.readouterr().out


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (edit(("provenance", "code"), "other"), "code is 'other' there"),
        (edit(("provenance", "device"), "gpu"), "device is 'gpu' there"),
        (edit(("implementations", 0, "digest"), "other"), "has other code there"),
        (edit(("implementations", 0, "versions"), {"torch": "3"}), "has other versions there"),
    ],
)
def test_parts_of_something_else_are_refused(shards, change, text):
    path = shards / "2.json"
    save(path, msgspec.structs.replace(read(path), header=change(read(path).header)))
    with pytest.raises(ConformanceError, match=text):
        join([shards / "1.json", path], shards / "both.json")
    assert not (shards / "both.json").exists()


def test_another_machine_is_a_part_and_is_named(shards):
    path = shards / "2.json"
    change = edit(("provenance", "machine"), "another")
    save(path, msgspec.structs.replace(read(path), header=change(read(path).header)))
    joined = join([shards / "1.json", path], shards / "both.json")
    assert joined.record.header.provenance.machine.endswith("; another")


def test_a_record_has_one_writer(tmp_path):
    told = r"r\.json: process \d+, which began at .* writes"
    with Lock(tmp_path / "r.json"), pytest.raises(ConformanceError, match=told):
        Lock(tmp_path / "r.json").__enter__()
    with Lock(tmp_path / "r.json"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_on_a_full_disk(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    told = r"r\.json: cannot be written \(No space left on device\); name another place"
    # The file cannot be created, and nothing can be written to it.
    for name in ("pathlib.Path.open", "conformance.running.merging.os.getpid"):
        with monkeypatch.context() as patched:
            patched.setattr(name, full)
            with pytest.raises(ConformanceError, match=told):
                Lock(tmp_path / "r.json").__enter__()
        assert not list(tmp_path.iterdir())
