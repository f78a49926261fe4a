"""Wording is not behaviour: with every sentence replaced, everything but the sentences is the same.

Causes, places, card entries, requirements, topics and cases get placeholders for their English.
Verdicts, gates, exit codes and the structure of pages must not notice.
"""

from __future__ import annotations

import re
import shutil

import msgspec
import pytest
from mutants import miniatures
from records import loaded, render_html
from test_docs import ROOT

from conformance import words
from conformance.cases.catalogue import find_cases
from conformance.records.findings import Phrase
from conformance.records.record import Record, read
from conformance.reports.gate.baseline import read_baseline
from conformance.reports.gate.judging import judge
from conformance.reports.gate.updating import propose
from conformance.reports.page.markdown import render_markdown
from conformance.reports.publishing import Wanted, render
from conformance.reports.publishing import read as read_published
from conformance.reports.writing import build
from conformance.requirements import REQUIREMENTS
from conformance.running.session import Session, plan

PUBLISHED = ROOT / "reports" / "published"
BASELINES = ROOT / "reports" / "baselines"
JUDGED = {
    "keras-ops-jax": "keras-ops",
    "onnxruntime": "onnxruntime",
    "torch-kernels": "torch-kernels",
    "x-transformers": "x-transformers",
}
"""Published records that deviate for a cause that their baseline names."""

CASES = "mask/shared/*", "plain/no-mask/self", "causal/bottom-right/cross"


@pytest.fixture
def reword(monkeypatch):
    """Replace all English by placeholders: the id, and what it is about."""

    def replace():
        def placeholder(name):
            return lambda **about: f"⟪{Phrase(name, about)}⟫"

        tables = words.tables()
        around = {name: f"⟪{name} {{{name}}}⟫ {{text}}" for name in tables["around"]}
        replaced = {name: placeholder(name) for name in words.wordings()}
        monkeypatch.setattr(words, "tables", lambda: tables | {"around": around})
        monkeypatch.setattr(words, "wordings", lambda: replaced)
        for requirement in REQUIREMENTS:
            for part in ("sentence", "why"):
                was = getattr(requirement, part)
                object.__setattr__(requirement, part, f"⟪{part}⟫")
                undo.append((requirement, part, was))

    undo = []
    yield replace
    for requirement, part, was in undo:
        object.__setattr__(requirement, part, was)


def sentences_replaced(own: Record) -> Record:
    """The record with placeholders for the sentences that it carries."""
    header = own.header
    replace = msgspec.structs.replace
    requirements = [replace(item, sentence="⟪…⟫", why="⟪…⟫") for item in header.requirements]
    topics = [replace(item, title="⟪…⟫", question="⟪…⟫") for item in header.topics]
    cases = {name: replace(case, why="⟪…⟫") for name, case in header.cases.items()}
    header = replace(header, requirements=requirements, topics=topics, cases=cases)
    return replace(own, header=header)


def published(name: str) -> Record:
    return read(PUBLISHED / "records" / f"{name}.json.gz")


def structure(page: str) -> dict[str, list[str]]:
    """Tags, anchors and links of a page, without its text; rows, headings and lists of Markdown."""
    page = re.sub(r"<script\b.*?</script>|<style\b.*?</style>", "", page, flags=re.DOTALL)
    return {
        # Where a long word may be broken depends on the word.
        "tags": re.findall(r"<(/?(?!wbr\b)\w+)", page),
        "classes": re.findall(r'\bclass="([^"]*)"', page),
        "anchors": re.findall(r'\bid="([^"]*)"', page),
        "links": re.findall(r'\bhref="(#[^"]*)"|\]\(([^)]*)\)', page),
        "lines": [
            f"{line[:2]} {line.count('|')}" for line in page.splitlines() if line[:1] in "#|-"
        ],
    }


# Runs


class Scaled(miniatures.Correct):
    """The scale is 1.5 times what it should be."""

    def attend(self, query, key, value, masks, **options):
        return super().attend(1.5 * query, key, value, masks, **options)


def examined():
    adapters = [miniatures.Correct(), miniatures.Inverted(), Scaled()]
    for adapter in adapters:
        adapter.name = type(adapter).__name__
    cases = [case for pattern in CASES for case in find_cases(pattern)]
    session = Session()
    return [session.examine(item) for item in plan(adapters, cases, ["float32"], "cpu")]


@pytest.mark.night
def test_a_run_finds_the_same(reword):
    before = examined()
    assert {finding.cause.id for result in before for finding in result.findings} > {
        "mask.inverted",
        "scale.factor",
    }
    reword()
    assert examined() == before


# Gates


def judgement(own, baseline):
    found = judge(baseline, own)
    return {
        "exit code": found.exit_code,
        "known": {(cell.result.id, cell.requirement) for cell in found.known},
        "new": {(cell.result.id, cell.requirement) for cell in found.new},
        "to edit": [(entry.number, why) for why, entry in found.to_edit],
        "proposed": propose(baseline, found, "because"),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", JUDGED)
def test_a_gate_judges_the_same(reword, name):
    own, baseline = published(name), read_baseline(BASELINES / f"{JUDGED[name]}.toml")
    before = judgement(own, baseline)
    assert before["known"]
    assert not before["new"]
    reword()
    assert judgement(sentences_replaced(own), baseline) == before


# Pages


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["onnxruntime", "torch-kernels", "tinygrad"])
def test_a_report_has_the_same_structure(reword, name):
    own = published(name)

    def pages(one):
        report = build([loaded(one)])
        return structure(render_html(report)), structure(render_markdown(report))

    before = pages(own)
    assert before[0]["anchors"]
    assert before[1]["lines"]
    reword()
    assert pages(sentences_replaced(own)) == before


@pytest.mark.night
def test_published_pages_have_the_same_structure(reword, tmp_path):
    for name in ("jax", "x-transformers"):
        (tmp_path / "records").mkdir(exist_ok=True)
        shutil.copy(PUBLISHED / "records" / f"{name}.json.gz", tmp_path / "records")
    (tmp_path / "versions").mkdir()
    wanted = Wanted([], [], [], [], None, tmp_path, tmp_path / "pages", [BASELINES])

    def pages():
        made = render(read_published(wanted, root=ROOT))
        return {path.name: structure(content) for path, content in made.items()}

    before = pages()
    assert len(before) > 2
    reword()
    assert pages() == before


# Words


def test_no_id_has_two_meanings():
    tables = [*(words.tables()[name] for name in words.TABLES), words._FUNCTIONS]
    assert sum(map(len, tables)) == len(words.wordings())
