"""The screenshot of the docs is one of today's page, and the page has what is said of it."""

from __future__ import annotations

import pytest
from screenshots import PAGE, PICTURE, WORDS, report, words


def test_the_screenshot_shows_what_the_tutorial_writes(tmp_path):
    pytest.importorskip("flax")
    now = words(report(tmp_path))
    assert now == WORDS.read_text(encoding="utf-8"), "run python tests/browser/screenshots.py"
    # What the tutorial tells of the panel is in it.
    told = PAGE.read_text(encoding="utf-8")
    assert "Likely cause**: *is only as accurate as float32*. The mode is `no-weights`" in told
    for line in ("Likely cause:", "is only as accurate as float#", "allowed #σ"):
        assert line in now.splitlines()
    assert "flax-nnx · float# · mode no-weights · cpu" in now
    assert "✗deviates: modes.agree" in now
    assert PICTURE.read_bytes().startswith(b"\x89PNG")
