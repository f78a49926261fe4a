"""Chromium for the tests of the page. They are no part of the default tests: `tox -e browser`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def installed() -> str:
    """Path of the browser, or ""."""
    return os.environ.get("CHROMIUM", "") or next(filter(None, map(shutil.which, BROWSERS)), "")


def pytest_configure() -> None:
    """Said once and before anything runs, whatever the number of workers."""
    if not installed():
        raise pytest.UsageError(
            f"no browser: none of {', '.join(BROWSERS)} is on the path; install Chromium, or name "
            "one with CHROMIUM=/path/to/it"
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=installed(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open a file; at the end, nothing was asked of the network and nothing said on the console."""
    contexts, asked, said = [], [], []

    def opened(file: Path, address: str = "", **options: object) -> Page:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(file.as_uri() + address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert said == []
    assert all(url.startswith("file:") and url.split("#")[0].endswith(".html") for url in asked)
