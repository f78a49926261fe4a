"""Make the screenshot of the documentation: `python tests/browser/screenshots.py`.

It is of what the commands of the tutorial for maintainers write. Beside it, its words are kept,
with `#` for numbers: two machines draw other pixels, and compute other digits, but a
picture whose words are not those of today's page is out of date.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "tutorials" / "maintainer.md"
PICTURE = PAGE.with_name("panel.png")
WORDS = Path(__file__).with_name("panel.txt")
PLACE = "#of=flax-nnx&requirement=output.equals-definition"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def installed() -> str:
    """Path of the browser, or ""."""
    return os.environ.get("CHROMIUM", "") or next(filter(None, map(shutil.which, BROWSERS)), "")


def report(folder: Path) -> Path:
    """Do what the tutorial does up to its page, and return the page."""
    sys.path.insert(0, str(TESTS))
    import pages

    for block in pages.blocks(PAGE, "console"):
        for command, _ in pages.commands(block.text):
            pages.shell(command, folder)
        if (folder / "report.html").exists():
            break
    return folder / "report.html"


def chromium(page: Path, *options: str) -> str:
    """Open the panel that the tutorial shows, and return what the browser prints."""
    with tempfile.TemporaryDirectory() as profile:
        return subprocess.run(
            [
                *(installed(), "--headless", "--no-sandbox", "--disable-gpu"),
                *("--disable-background-networking", "--disable-component-update"),
                *(f"--user-data-dir={profile}", "--force-prefers-reduced-motion"),
                *("--window-size=1400,900", "--virtual-time-budget=5000", *options),
                page.as_uri() + PLACE,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout


def words(page: Path) -> str:
    """Return the lines of the panel in alphabetical order: errors, which differ, order its list."""
    dom = chromium(page, "--dump-dom")
    panel = re.search(r"<dialog\b.*?</dialog>", dom, re.DOTALL)
    assert panel, "the panel did not open"
    whole = re.sub(r"</?(wbr|span|code|b|strong|i|em)\b[^>]*>", "", panel[0])
    text = html.unescape(re.sub(r"<[^>]+>", "\n", whole))
    numbers = re.sub(r"[−-]?\d[\d.]*(e-?\d+|×10[⁰¹²³⁴-⁹]+)?", "#", text)
    lines = {" ".join(line.split()) for line in numbers.splitlines()} - {""}
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        shown = report(Path(made))
        WORDS.write_text(words(shown), encoding="utf-8")
        chromium(shown, f"--screenshot={PICTURE}")
    print(f"{PICTURE}\n{WORDS}")
