"""JUnit XML: a test suite for each implementation, a test case for each item.

What `run --strict` would fail is a failure, what has no answer is an error, and what is unsupported
or known is skipped, with the reason.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

import msgspec

from conformance.records.header import Implementation
from conformance.records.record import Record
from conformance.reports.ci.source import KNOWN, Source, Told
from conformance.reports.wording import failure
from conformance.text import printable


def junit(source: Source) -> bytes:
    """The file."""
    root = ET.Element("testsuites", name="mha-conformance")
    for record, own in source.implementations:
        _suite(root, source, record, own)
    for suite in root:
        for name in ("tests", "failures", "errors", "skipped"):
            root.set(name, str(int(root.get(name, "0")) + int(suite.get(name, "0"))))
    ET.indent(root)
    return ET.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def _suite(root: ET.Element, source: Source, record: Record, own: Implementation) -> None:
    made = record.header.provenance
    suite = ET.SubElement(root, "testsuite")
    properties = ET.SubElement(suite, "properties")
    for name, value in {
        "suite": made.suite,
        "catalogue": made.catalogue,
        "device": made.device_model,
        "python": made.python,
        **{f"version.{name}": version for name, version in own.versions.items()},
    }.items():
        ET.SubElement(properties, "property", name=printable(name), value=printable(value))
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for item in source.items:
        if item.record is not record or item.result.implementation != own.name:
            continue
        counts["tests"] += 1
        kind = _case(suite, item, own.spec)
        if kind:
            counts[kind] += 1
    suite.attrib |= {
        "name": printable(own.name),
        "timestamp": printable(made.created),
        **{name: str(number) for name, number in counts.items()},
    }


def _case(suite: ET.Element, item: Told, spec: str) -> str:
    """Add one; returns which count it belongs to, or ""."""
    result = item.result
    case = ET.SubElement(
        suite,
        "testcase",
        classname=printable(f"{result.implementation}.{result.case.split('/')[0]}"),
        name=printable(f"{result.case}[{result.dtype}-{result.device}-{result.mode}]"),
    )
    if item.wrong:
        text = _failure(item, spec)
        if not item.fails:
            ET.SubElement(case, "system-out").text = text
            return ""
        raised = {finding.verdict for finding in item.wrong} - {"deviates"}
        told = ET.SubElement(
            case,
            "error" if raised else "failure",
            type=next(iter(sorted(raised)), "deviates"),
            message=text.splitlines()[0],
        )
        told.text = text
        return "errors" if raised else "failures"
    if item.verdict == KNOWN:
        message = "known: " + ", ".join(finding.requirement for finding in item.known)
    elif item.verdict in ("unsupported", "unavailable", "not-run"):
        reason = next((f.detail for f in result.findings if f.detail), "")
        message = f"{item.verdict}: {reason}"
    else:
        return ""
    ET.SubElement(case, "skipped", message=printable(message))
    return "skipped"


def _failure(item: Told, spec: str) -> str:
    wrong = msgspec.structs.replace(item.result, findings=list(item.wrong))
    return failure(wrong, spec, item.record.header)
