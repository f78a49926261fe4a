"""The tables of docs/masks.md against experiments made now, with what is installed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re

import pages
import pytest

from conformance.adapter.base import DEFAULT_MODE
from conformance.adapter.loading import load, registered
from conformance.cli import main
from conformance.experiments import experiment
from conformance.records.record import read
from conformance.reports.load import load as load_records
from conformance.reports.writing import build

NAMES = ("torch-mha", "tutorial-1", "tutorial-2")
EXPERIMENTS = ("masks", "same-mask", "masked-rows")
PUBLISHED = pages.ROOT / "reports" / "published" / "records"


def loaded(name):
    """A program that writes tables of the documentation, as a module."""
    file = pages.DOCS / "site" / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"{name}_page", file)
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    return program


@pytest.fixture
def made(tmp_path):
    """The tables, by name, as the page's program makes them."""
    pytest.importorskip("torch")
    record = tmp_path / "torch.json"
    cases = [word for name in EXPERIMENTS for word in ("--case", f"probe/{name}")]
    assert main(["run", *NAMES, *cases, "--record", str(record), "-p", "no:cacheprovider"]) == 0
    program = loaded("masks")
    (written,) = record.parent.glob("*.json")
    return program.tables(build(load_records([written]).current))


def test_texts_in_the_tables_are_escaped_once():
    told = "e&#42;f (query.&#95;mask)<br>g"
    assert loaded("masks")._joined([("e*f", "query._mask"), ("g", "")]) == told
    for page in pages.DOCS.rglob("*.md"):
        assert "&amp;#" not in page.read_text(encoding="utf-8"), page


@pytest.mark.night
def test_every_mode_is_explained():
    page = (pages.DOCS / "masks.md").read_text(encoding="utf-8")
    tables, _, told = page.partition("## What are the modes in brackets?")
    shown = 0
    # A page shows what was measured, which a new mode may not have been yet.
    measured = {
        (own["name"], mode)
        for file in PUBLISHED.glob("*.json.gz")
        for own in json.loads(gzip.decompress(file.read_bytes()))["header"]["implementations"]
        for mode in own["modes"]
    }
    for adapter in map(load, registered()):
        for mode in adapter.modes:
            assert mode.about or mode is DEFAULT_MODE, (adapter.name, mode.name)
        # Kernels for GPUs are not in the tables, which were made on a CPU.
        if not (pages.DOCS / "implementations" / f"{adapter.name}.md").is_file():
            continue
        # A name stands alone, and a title may be the beginning of another.
        if re.search(rf"(?<![\w-]){re.escape(adapter.title.partition(' (')[0])}(?![\w-])", tables):
            shown += 1
            for mode in adapter.modes:
                known = (adapter.name, mode.name) in measured
                assert not known or f"`{mode.name}`" in told, (adapter.name, mode.name)
    assert shown >= 6


def rows(table: str) -> set[tuple[str, ...]]:
    """Rows with one library each, without that of the headings."""
    found = set()
    for line in table.strip().splitlines()[2:]:
        libraries, *cells = (cell.strip() for cell in line.strip("|\n ").split(" | "))
        found |= {(name, *cells) for name in re.split(r"<br>|, (?=`)", libraries)}
    return found


def published_revision(name):
    """The revision of an experiment with which the records were published."""
    header = read(PUBLISHED / "torch.json.gz").header
    (revision,) = (topic.revision for topic in header.topics if topic.name == name)
    return revision


@pytest.mark.night
def test_the_page_says_what_experiments_show(made):
    page = (pages.DOCS / "masks.md").read_text(encoding="utf-8")
    comparable = [n for n in EXPERIMENTS if published_revision(n) == experiment(n).topic.revision]
    if not comparable:
        pytest.skip("all of these experiments have changed since records were published")
    for table in comparable:
        shown = re.search(rf"<!-- table {table} -->\n(.*?)<!-- end -->", page, re.DOTALL)[1]
        now = rows(made[table])
        assert {row[0] for row in now} == {
            "torch.nn.MultiheadAttention",
            "`tutorial-1`",
            "`tutorial-2`",
        }
        assert not now - rows(shown)
