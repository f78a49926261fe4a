"""A small factory of records and reports, for the tests of what is made of them."""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from pathlib import Path

import msgspec
import numpy as np

from conformance.experiments import TOPICS
from conformance.records import schema1
from conformance.records.findings import (
    CaseResult,
    Entry,
    Figures,
    Finding,
    Phrase,
    Worst,
)
from conformance.records.header import (
    SCHEMA,
    CausalInfo,
    Header,
    Implementation,
    MaskInfo,
    Provenance,
)
from conformance.records.record import Record
from conformance.reports import model as data
from conformance.reports.page.html import render_html as rendered
from conformance.reports.writing import build
from conformance.running.provenance import requirements

OUTPUT = "output.equals-definition"
GRADIENT = "gradient.inputs-equal-definition"
POLARITY = "mask.polarity-is-as-declared"
MASKED = "observed.fully-masked-row"
NASTY = "<script>alert('1')</script>|`a`*b*_c_[d](e)&#64;"


def implementation(name: str = "mine", **changes: object) -> Implementation:
    fields: dict = {
        "name": name,
        "title": name.title(),
        "documentation": "https://example.org/docs",
        "framework": "torch",
        "spec": f"path/to/{name}.py:Attention",
        "versions": {"torch": "2.9"},
        "modes": ["train", "eval"],
        "dtypes": ["float64", "float32"],
        "masks": [MaskInfo("mask", ["batch heads query key"], "attends", None)],
    }
    return Implementation(**fields | changes)


def figures(size: float, accuracy: str = "A0", limit: float = 8.0) -> Figures:
    return Figures("output", size, size / 4, 0.0, limit, accuracy)


def result(
    *findings: Finding,
    name: str = "mine",
    case: str = "plain/no-mask/self",
    dtype: str = "float32",
    mode: str = "train",
) -> CaseResult:
    return CaseResult(name, case, dtype, "cpu", mode, list(findings))


def good(requirement: str = OUTPUT, size: float = 2.0) -> Finding:
    return Finding(requirement, "conforms", figures=figures(size))


def bad(requirement: str = OUTPUT, size: float = 99.0, **changes: object) -> Finding:
    fields: dict = {
        "detail": "the output is not the definition's",
        "figures": figures(size, ""),
        "worst": Worst("output", (0, 1, 2), "0.5", "0.25", "0.001"),
    }
    return Finding(requirement, "deviates", **fields | changes)


def provenance(**changes: object) -> Provenance:
    fields: dict = {
        "suite": "1.0",
        "catalogue": "abc",
        "created": "2026-01-02T03:04:05+00:00",
        "run": "run-1",
        "python": "3.11.0",
        "platform": "Linux x86_64",
        "device": "cpu",
        "device_model": "a CPU",
        "packages": {"numpy": "2.0"},
        "command": "mha-conformance run mine",
    }
    return Provenance(**fields | changes)


def record(
    *results: CaseResult,
    name: str = "env",
    implementations: list[Implementation] | None = None,
    complete: bool = True,
    planned: int | None = None,
    **changes: object,
) -> Record:
    if implementations is None:
        names = dict.fromkeys(item.implementation for item in results) or ["mine"]
        implementations = [implementation(own) for own in names]
    header = Header(
        SCHEMA,
        name,
        provenance(**changes),
        implementations,
        len(results) if planned is None else planned,
        requirements=requirements(),
        topics=list(TOPICS),
    )
    return Record(header, complete, list(results))


def loaded(own: Record, arrays: dict | None = None) -> data.Loaded:
    return Path(f"{own.header.name}.json"), own, arrays or {}


def report(*results: CaseResult, **changes: object) -> data.Report:
    return build([loaded(record(*results, **changes))])


def save(folder: Path, own: Record, file: str = "") -> Path:
    path = folder / (file or f"{own.header.name}.json")
    path.write_bytes(msgspec.json.encode(own))
    return path


def observed(requirement: str, value: str, **where: str) -> CaseResult:
    phrase = schema1.parsed(value, f"observed {requirement}")
    return result(Finding(requirement, "conforms", value=phrase), **where)


def entry(
    experiment: str,
    subject: str,
    value: str,
    evidence: str = "",
    declared: str = "",
    *,
    agrees: bool = True,
    code: str = "",
) -> Entry:
    """An entry by its texts, as those of schema 1 are read."""
    about = schema1.parsed(subject, f"subject {experiment}")
    seen, said = (schema1.value(experiment, text, about.id) for text in (value, declared))
    return Entry(about, seen, evidence, said, agrees, code)


def backends(*values: str) -> data.Report:
    names = [f"keras-{backend}" for backend in ("tensorflow", "jax", "torch")[: len(values)]]
    return report(
        *(
            observed(POLARITY, f"mask[bool]={value}", name=name)
            for name, value in zip(names, values, strict=True)
        ),
        implementations=[
            implementation(name, title=f"keras.Attention ({name.partition('-')[2]})")
            for name in names
        ],
    )


def full() -> tuple[data.Loaded, list[str], list[str]]:
    """A record with something for every section and a nasty name in every place, what else was
    expected, and problems."""
    names = ["plain", NASTY]
    results, arrays = [], {}
    for name in names:
        results += [
            result(good(), bad(GRADIENT, detail=NASTY, cause=Phrase(NASTY)), name=name),
            result(Finding(OUTPUT, "error", detail=NASTY), name=name, case=f"a/{NASTY}/self"),
            result(Finding(OUTPUT, "crashed", detail=NASTY), name=name, dtype="float64"),
            result(Finding(OUTPUT, "unsupported", detail=NASTY), name=name, case="a/b/self"),
            observed(POLARITY, f"mask[bool]={NASTY}", name=name, case="a/c/self"),
            observed(MASKED, f"nan; {NASTY}", name=name, case="edge/a/self"),
            observed("observed.causal-alignment", NASTY, name=name, case="a/d/self"),
            observed("observed.returned-weights", NASTY, name=name, case="a/e/self"),
        ]
        item = results[-8]
        for part in ("output", "want", "noise"):
            arrays[f"{item.id}|{part}"] = np.ones(3)
    own = record(
        *results,
        implementations=[
            implementation(
                name,
                title=f"{NASTY} ({name})",
                documentation=f"javascript:{NASTY}",
                versions={NASTY: NASTY},
                causal=CausalInfo(NASTY, "top-left"),
                masks=[MaskInfo(NASTY, ["batch key"], "attends", NASTY)],
                unavailable=NASTY if name == NASTY else "",
            )
            for name in names
        ],
        selection=NASTY,
        command=f"{NASTY}\n```\nmore",
        device_model=NASTY,
        packages={NASTY: NASTY},
        complete=False,
        planned=99,
    )
    return loaded(own, arrays), [NASTY], [NASTY]


def full_report() -> data.Report:
    """A report of it."""
    own, expected, problems = full()
    return build([own], expected, problems)


REPORTS = {
    "empty": lambda: build([]),
    "small": lambda: report(result(good())),
    "backends": lambda: backends("attends", "attends", "blocks"),
    "full": full_report,
}


def _unpacked(text: str, name: str) -> bytes:
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">(.*?)</script>', text, re.DOTALL)
    return gzip.decompress(base64.b64decode(found))


def held(text: str) -> dict:
    """The data in the page, as its script reads it, with every finding as an object."""
    page = json.loads(_unpacked(text, "contents"))
    line, _, content = _unpacked(text, "findings-of").partition(b"\n")
    head = json.loads(line)
    columns: dict[str, list[int]] = {}
    for name, many, wide in head["numbers"]:
        octets = np.frombuffer(content[: many * wide], dtype=np.uint8).reshape(wide, many)
        columns[name] = [int(n) for n in octets.T @ 256 ** np.arange(wide)]
        content = content[many * wide :]
    assert not content
    lists, items, at = head["lists"], [], 0
    for column, case, dtype, mode, many in zip(
        *(columns[name] for name in ("column", "case", "dtype", "mode", "many")), strict=True
    ):
        findings = []
        for place in range(at, at + many):
            own = {name: values[place] for name, values in columns.items() if name in _OF_FINDINGS}
            exact, worst = head["exact"][own["exact"]]
            limit = lists["limits"][own["limit"]]
            findings.append(
                {
                    "requirement": own["requirement"],
                    "verdict": own["verdict"],
                    "detail": lists["texts"][own["text"]][0],
                    "figures": (exact or {"max_ratio": lists["ratios"][own["max"]]})
                    if limit
                    else None,
                    "worst": worst,
                }
            )
        at += many
        items.append(
            {
                "column": column,
                "case": lists["cases"][case],
                "dtype": lists["in"][dtype],
                "mode": lists["modes"][mode],
                "findings": findings,
            }
        )
    return page | {
        "items": items,
        "cards": json.loads(_unpacked(text, "cards-of")),
        "cases": head["cases"],
        "axes": head["axes"],
    }


_OF_FINDINGS = ("requirement", "verdict", "text", "max", "limit", "exact")


def render_html(*given: object, **options: object) -> str:
    """The page as it is when every part of it was looked at."""
    return looked_at(rendered(*given, **options))  # type: ignore[arg-type]


def looked_at(text: str) -> str:
    """A page with all its parts in place."""
    for name, part in json.loads(_unpacked(text, "contents"))["parts"].items():
        empty = f'<div class="part" data-part="{name}"></div>'
        text = text.replace(empty, empty.replace("></", f">{part}</"))
    return text


if __name__ == "__main__":
    # Most of a page is compressed in it; this prints a page as a reader sees it.
    print(looked_at(Path(sys.argv[1]).read_text(encoding="utf-8")))
