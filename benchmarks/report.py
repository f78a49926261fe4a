"""How large is the page of a report, and how soon can it be used?

    pip install -e '.[browser]'
    python benchmarks/report.py                     800,000 findings of a hundred implementations
    python benchmarks/report.py --findings 20000
    python benchmarks/report.py --html FILE         keep the page, to look at it
    python benchmarks/report.py --records reports/published/records      real ones

A record is made up: every case of the catalogue in four dtypes and as many modes as it takes; one
finding in twelve deviates, with a worst element. The page is opened in Chromium without a screen.

    size      bytes of the page
    render    seconds to build the report and render it
    nodes     elements of the page when it is loaded
    open      milliseconds until the page can be used: its script has run
    filter    milliseconds to apply a filter
    cell      milliseconds until the findings of a cell are shown

Times are the medians of five openings.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from conformance.cases.case import describe_all
from conformance.cases.catalogue import catalogue, catalogue_hash
from conformance.experiments import TOPICS
from conformance.records.findings import CaseResult, Figures, Finding, Worst
from conformance.records.header import SCHEMA, Header, Implementation, Provenance
from conformance.records.record import Record
from conformance.reports.load import find_records, load
from conformance.reports.page.html import render_html
from conformance.reports.writing import build
from conformance.requirements import REQUIREMENTS
from conformance.running.provenance import requirements

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
IMPLEMENTATIONS = 100
DTYPES = ("float64", "float32", "bfloat16", "float16")
FINDINGS_OF_AN_ITEM = 8


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--findings", type=int, default=800_000)
    parser.add_argument("--html", type=Path)
    parser.add_argument("--records", type=Path, nargs="+")
    options = parser.parse_args()
    if options.records:
        loaded = load(find_records(options.records)).current
    else:
        loaded = [(Path("made-up.json"), made_up(options.findings), {})]
    begin = time.perf_counter()
    page = render_html(build(loaded), None, loaded)
    seconds = time.perf_counter() - begin
    findings = sum(len(result.findings) for _, record, _ in loaded for result in record.results)
    print(f"findings  {findings:,}")
    print(f"size      {len(page.encode()) / 1e6:.2f} MB")
    print(f"render    {seconds:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        path = options.html or Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        opened(path)
    return 0


def made_up(findings: int) -> Record:
    """A record of about so many findings, the same every time."""
    names = [f"made-up-{index}" for index in range(IMPLEMENTATIONS)]
    asked = [item for item in REQUIREMENTS if item.level == "must"][:FINDINGS_OF_AN_ITEM]
    modes = [f"mode-{index}" for index in range(99)]
    cases = catalogue()
    results: list[CaseResult] = []
    made = 0
    for mode in modes:
        for name, case, dtype in itertools.product(names, cases, DTYPES):
            if made >= findings:
                break
            own = [finding(item.id, made + place) for place, item in enumerate(asked)]
            results.append(CaseResult(name, case.id, dtype, "cpu", mode, own))
            made += len(own)
    used = list(dict.fromkeys(result.mode for result in results))
    implementations = [
        Implementation(
            name=name,
            title=f"made.up.Attention{index}",
            documentation="",
            framework="numpy",
            spec=f"made_up.py:Attention{index}",
            versions={"numpy": "2.0"},
            modes=used,
            dtypes=list(DTYPES),
            masks=[],
        )
        for index, name in enumerate(names)
    ]
    provenance = Provenance(
        suite="0",
        catalogue=catalogue_hash(),
        created="2026-01-01T00:00:00+00:00",
        run="made-up",
        python=sys.version.split()[0],
        platform="",
        device="cpu",
        device_model="",
        packages={},
        command="benchmarks/report.py",
    )
    header = Header(
        SCHEMA,
        "made-up",
        provenance,
        implementations,
        len(results),
        cases=describe_all(cases),
        requirements=requirements(),
        topics=list(TOPICS),
    )
    return Record(header, True, results)


def finding(requirement: str, number: int) -> Finding:
    """Figures that differ from one finding to the next, as real ones do."""
    spread = ((number * 2654435761) % 9973) / 9973
    wrong = number % 12 == 5
    size = float(f"{10 ** (1 + 6 * spread) if wrong else 0.5 + 4 * spread:.4g}")
    figures = Figures(
        array=("output", "gradient.query", "gradient.weights.key")[number % 3],
        max_ratio=size,
        rms_ratio=float(f"{size / 4.123:.4g}"),
        bias=float(f"{spread - 0.5:.4g}"),
        limit=8.0,
        accuracy="" if wrong else "A0",
    )
    if not wrong:
        return Finding(requirement, "conforms", figures=figures)
    worst = Worst(
        "output", (number % 3, number % 5, 2), f"{spread:.10g}", "0.25", "1.234567891e-07"
    )
    told = f"the output is not the definition's in {number % 40} of 60 elements"
    return Finding(requirement, "deviates", told, figures=figures, worst=worst)


def opened(path: Path) -> None:
    """Open the page a few times, and print what it took."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        print("open      not measured: pip install -e '.[browser]'")
        return
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"open      not measured: none of {', '.join(BROWSERS)} is installed")
        return
    times: dict[str, list[float]] = {"nodes": [], "open": [], "filter": [], "cell": []}
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for _ in range(5):
            page = chromium.new_page()
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            times["open"].append(float(page.get_attribute("html", "data-ready") or 0))
            times["nodes"].append(page.evaluate("document.querySelectorAll('*').length"))
            for name, address in (
                ("filter", "#dtype=float32&verdict=deviates"),
                ("cell", "#of=made-up-3&requirement=output.equals-definition"),
            ):
                times[name].append(page.evaluate(SHOWN, address))
            page.close()
        chromium.close()
    for name, own in times.items():
        print(f"{name:<9} {statistics.median(own):,.0f}{'' if name == 'nodes' else ' ms'}")


SHOWN = """async (address) => {
  const begin = performance.now();
  location.hash = address;
  await new Promise((done) => addEventListener("hashchange", done, { once: true }));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - begin;
}"""


if __name__ == "__main__":
    sys.exit(main())
