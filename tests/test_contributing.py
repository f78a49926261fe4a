"""CONTRIBUTING.md, gone through as a contributor does: each section in a copy of the checkout."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pages
import pytest
from test_docs import anchors
from test_walkthroughs import patched

PAGE = pages.ROOT / "CONTRIBUTING.md"
TEXT = PAGE.read_text(encoding="utf-8")
SECTIONS = {
    found[1]: (TEXT.count("\n", 0, found.start()), TEXT.count("\n", 0, found.end()))
    for found in re.finditer(
        r"^## (Add .+?)$\n.*?(?=^## |\Z)", TEXT, flags=re.MULTILINE | re.DOTALL
    )
}
"""Heading of each of the days to the lines of the page that it covers."""

TARGETS = {
    "Add a case": {"conformance/cases/catalogue.toml", "tests/case_ids.txt"},
    "Add a requirement": {"conformance/requirements/linearity.py", "tests/mutants/backward.py"},
    "Add an experiment": {
        "conformance/experiments/nan_query.py",
        "conformance/words.toml",
        "tests/test_probe_nan_query.py",
    },
    "Add an adapter": {"adapters/numpy_float64.py", "tox.ini"},
    "Add a field that the report shows": {
        "conformance/records/header.py",
        "conformance/running/provenance.py",
        "conformance/reports/page/provenance.html.j2",
        "docs/record.schema.json",
    },
    "Add a feature of attention": set(),
}
"""Files that a contributor touches; what commands write beside the sources is not among them."""

COPIED = ("conformance", "adapters", "reports", "tests", "docs")
LEFT_OUT = {
    "reports": ("published", "records"),
    "tests": ("browser",),
    "docs": ("implementations",),
}

pytestmark = pytest.mark.skipif(not (pages.ROOT / "tests").is_dir(), reason="needs a checkout")


def copied(folder: Path) -> Path:
    """A checkout whose packages are those of this folder, not of the installation."""
    for name in COPIED:
        left_out = shutil.ignore_patterns("__pycache__", *LEFT_OUT.get(name, ()))
        shutil.copytree(pages.ROOT / name, folder / name, ignore=left_out)
    for name in ("pyproject.toml", "tox.ini", "toxfile.py"):
        shutil.copy(pages.ROOT / name, folder / name)
    (folder / "conformance" / "adapters").symlink_to(folder / "adapters")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every source file of the copy."""
    files = (Path(at, name) for at, _, names in os.walk(folder) for name in names)
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in files
        if not {"__pycache__", ".pytest_cache", ".hypothesis"} & {*file.parts}
        and not file.name.startswith("made.")
    }


@pytest.mark.night
@pytest.mark.parametrize("section", SECTIONS)
def test_a_contributor_gets_what_the_page_shows(section, tmp_path, monkeypatch):
    if section == "Add a requirement":
        pytest.importorskip("torch")
    folder = copied(tmp_path / "checkout")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{folder / 'tests'}")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before = contents(folder)
    first, last = SECTIONS[section]
    tried = 0
    for language, text, line in pages.blocks(PAGE, "python", "diff", "console"):
        if not first < line <= last:
            continue
        if language == "python":
            (folder / text.partition("\n")[0].removeprefix("# ")).write_text(
                text.partition("\n")[2].lstrip("\n"), encoding="utf-8"
            )
        elif language == "diff":
            for change in re.split(r"^(?=--- )", text, flags=re.MULTILINE)[1:]:
                patched(folder, change)
        for command, wanted in pages.commands(text) if language == "console" else ():
            done = pages.shell(command, folder)
            missing = [*pages.missing(wanted, done.stdout)]
            assert not missing, f"line {line}: $ {command}\n{missing}\n\n{done.stdout}"
            tried += 1
    assert tried
    after = contents(folder)
    names = before.keys() | after.keys()
    assert {name for name in names if before.get(name) != after.get(name)} == TARGETS[section]


def test_every_day_is_there_and_every_block_is_gone_through():
    assert list(SECTIONS) == list(TARGETS)
    days = TEXT.partition("## Add a case")[2]
    fences = days.count("\n```")
    languages = ("python", "diff", "console")
    first, _ = SECTIONS["Add a case"]
    tried = [block for block in pages.blocks(PAGE, *languages) if block.line > first]
    assert fences == 2 * len(tried)


def test_what_the_page_names_exists():
    prose = pages.prose(PAGE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, anchor = link.partition("#")
        target = pages.ROOT / path if path else PAGE
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
    made = set().union(*TARGETS.values())
    places = re.findall(r"\b(?:conformance|adapters|reports|tests|docs)/[\w./-]+\w", prose)
    assert len(places) > 30
    for place in {*places} - made:
        # Those of the adapter that the page adds are written by its commands.
        assert (pages.ROOT / place).exists() or "numpy-float64" in place, place
