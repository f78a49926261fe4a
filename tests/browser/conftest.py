"""Chromium for the tests of the pages. They are no part of the default tests: `tox -e browser`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright
from screenshots import BROWSERS, installed

PATIENCE = 30_000
"""Milliseconds until something that does not happen has failed; machines may be busy."""


def pytest_configure() -> None:
    """Said once and before anything runs, whatever the number of workers."""
    if not installed():
        raise pytest.UsageError(
            f"no browser: none of {', '.join(BROWSERS)} is on the path; install Chromium, or name "
            "one with CHROMIUM=/path/to/it"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the site, so that one worker builds it while another tests reports."""
    items.sort(key=lambda item: item.path.stem != "test_site")


PAINTED = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
"""A browser drops keys that are pressed before the first frame, which nobody has seen yet."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=installed(), args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


Open = Callable[..., Page]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open a file; at the end, nothing was asked of the network and nothing said on the console.

    A report is one file and asks for no other, unlike a page of the site. `warned` are the
    beginnings of messages that may be said.
    """
    contexts, asked, said, others = [], [], [], [False]
    allowed: list[str] = []

    def opened(
        file: Path,
        address: str = "",
        *,
        alone: bool = True,
        warned: Sequence[str] = (),
        **options: object,
    ) -> Page:
        others[0] |= not alone
        allowed.extend(warned)
        context = browser.new_context(**options)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(file.as_uri() + address)
        if options.get("java_script_enabled", True):
            page.evaluate(PAINTED)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [it for it in said if not it.startswith(tuple(allowed))] == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    assert others[0] or all(url.split("#")[0].endswith(".html") for url in asked)


def serious(page: Page) -> list[str]:
    """Faults of accessibility that axe finds on a page, and calls serious or critical.

    Style sheets are not loaded again for it, which a page from a file must not do. It describes
    nothing but violations, because the elements without any take most of its time.
    """
    page.evaluate(PAINTED)  # scripts hide what does not fit when the page is painted
    options = {"preload": False, "resultTypes": ["violations"]}
    found = Axe().run(page, options=options).response["violations"]
    return [
        f"{own['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
        for own in found
        if own["impact"] in ("serious", "critical")
        for node in own["nodes"][:3]
    ]
