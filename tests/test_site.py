"""The documentation as a site: it builds without a warning, and asks nothing of the network."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pages
import pytest

ASKED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?P<src>[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|icon|preconnect|preload))[^>]*\bhref=["']?(?P<href>[^"'\s>]+)"""
    r"""|(?:@import\s+|\burl\()["']?(?P<url>[^"')]+)"""
)
"""What a browser fetches by itself, in a page or a style sheet; links are for the reader."""


@pytest.mark.night
def test_it_builds_and_fetches_nothing(tmp_path):
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=pages.ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]
    assert len(made) > len([*pages.DOCS.rglob("*.md")])
    assert not {
        (file.name, address) for file in made for address in fetched(file) if "//" in address
    }
    sources = {
        str(file.relative_to(tmp_path / "source")) for file in tmp_path.glob("source/**/*.html")
    }
    assert "docs/examples/numpy_function.py.html" in sources  # linked to, so shown
    assert "adapters/tutorials/tutorial_1.py.html" in sources  # though it is no part of the folder
    # A defect has a page, which those that have it lead to, and which leads to them.
    page = "defects/flax-nnx-causal-beside-padding.html"
    assert f"../{page}" in (tmp_path / "implementations/flax-nnx.html").read_text(encoding="utf-8")
    assert "../implementations/flax-nnx.html" in (tmp_path / page).read_text(encoding="utf-8")


def test_the_page_of_a_defect_is_made_of_its_script():
    site = runpy.run_path(str(pages.DOCS / "site" / "answers.py"))
    made = site["pages"](pages.ROOT)
    defects = {name: text for name, text in made.items() if name.startswith("defects/")}
    everything = defects.pop("defects/all.md")
    for name, text in defects.items():
        assert f"({name.removeprefix('defects/')})" in everything
        script = re.search(r"docs/reproductions/(\w+)\.py\)", text)[1]
        wanted = ("What happens", "A way around", "A program that shows it", "Upstream")
        assert [word for word in wanted if f"\n## {word}\n" not in text] == [], script
        assert len(text.partition("\n")[0]) < 200, script
        assert "numpy" not in text.partition("## Who has it")[2], script
    text = defects["defects/torch-mha-fully-masked-row.md"]
    assert "depends on whether weights are asked for: NaN if they are" in text
    assert "AssertionError: NaN only if weights are asked for" in text
    assert "torch 2." in text
    assert "https://github.com/pytorch/pytorch/issues/160064" in text
    # Each is in the navigation, too.
    assert str(site["navigation"](pages.ROOT)).count("defects/") == len(defects) + 1


def test_a_version_of_numpy_is_none_of_torch():
    site = runpy.run_path(str(pages.DOCS / "site" / "answers.py"))
    shown = site["beyond"](pages.ROOT)["torch-mha"] + site["pages"](pages.ROOT)["can-i-use.md"]
    assert '"with":"numpy 1' not in shown
    assert "Measured: numpy" not in shown


def fetched(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    found = (next(filter(None, item.groups())) for item in ASKED.finditer(text))
    return [address for address in found if not address.startswith(("data:", "#"))]


def test_what_is_fetched_is_recognised(tmp_path):
    """Else the test above could not fail."""
    page = tmp_path / "page.html"
    page.write_text(
        '<script src="https://a/x.js"></script><link href=//b/y.css rel="stylesheet">'
        "<style>@import 'https://c/z.css'; p { src: url(https://d/font) }</style>"
        '<a href="https://e/">no</a><link rel="canonical" href="https://f/">'
    )
    assert fetched(page) == ["https://a/x.js", "//b/y.css", "https://c/z.css", "https://d/font"]


def test_since_is_the_oldest_version_that_answers_as_today():
    since = runpy.run_path(str(pages.DOCS / "site" / "answers.py"))["_since"]

    def asked(*values: str, packages: str = "x {}, python 3.11", now: int = 0) -> str:
        history = [
            {
                "with": packages.format(number),
                "unavailable": "",
                "now": number == (now or len(values)),
                "answers": {"Causal": [[value, "", False]]} if value else {},
            }
            for number, value in enumerate(values, 1)
        ]
        return since(
            {"library": "x", "answers": history[-1]["answers"], "history": history}, "Causal"
        )

    start, end = "top-left", "bottom-right"
    assert asked(start, start, end, end) == f"x 3; x 1 to x 2: {start}"
    assert asked(start, end, start) == f"x 3; x 2: {end}; x 1: {start}"
    assert asked("", start, start) == "x 2, the oldest that answers"
    assert asked(start) == ""
    # The library is the same, and something else made the difference.
    assert asked(start, end, packages="x 7, y {}") == f"x 7, y 2; x 7, y 1: {start}"
    assert asked(start, end, now=1, packages="x 7, python 3.{}") == (
        f"x 7, python 3.1, the oldest that answers; x 7, python 3.2: {end}"
    )


def test_every_question_is_asked_in_full():
    asked = runpy.run_path(str(pages.DOCS / "site" / "answers.py"))["ASKED"]
    site = json.loads((pages.ROOT / "reports" / "published" / "site.json").read_text())
    assert {*site["questions"], *site["features"]} <= {*asked}
    assert all(told.endswith("?") for told in asked.values())
