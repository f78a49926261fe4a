"""Records of schema 1, converted to the current schema while they are read.

Everything happens to decoded JSON, before it becomes a `Record`. What such a record lacks comes
from `schema1.json`: the requirements and experiments of the last suite that wrote schema 1. Its
statements were English sentences; where they are phrases now, this is the only place that
recognises the old sentences.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from conformance.records import schema1_phrases
from conformance.records.card import PREFIX
from conformance.records.header import SCHEMA
from conformance.records.phrase import Phrase
from conformance.records.schema1_causes import old_cause, old_place

SCHEMA_1 = "mha-conformance/record/1"

_CAUSAL = re.compile(r"(?P<name>.+) \((?P<alignment>[a-z -]+)(?:, with (?P<needs>.+))?\)")


def upgrade_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a whole record in the current schema."""
    results = [upgrade_result(result) for result in record["results"]]
    return record | {"header": upgrade_header(record["header"]), "results": results}


def upgrade_header(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header in the current schema."""
    implementations = [_implementation(item) for item in header["implementations"]]
    return header | _frozen() | {"schema": SCHEMA, "implementations": implementations}


def upgrade_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one item in the current schema."""
    entries = [_entry(result["case"], entry) for entry in result.get("entries", [])]
    differing = tuple(
        msgspec.convert(entry["subject"], Phrase | str)
        for entry in entries
        if not entry.get("agrees", True)
    )
    findings = [_finding(finding, differing) for finding in result["findings"]]
    return result | {"findings": findings} | ({"entries": entries} if entries else {})


def _finding(finding: dict[str, Any], differing: tuple[Phrase | str, ...]) -> dict[str, Any]:
    """A finding with its observed value, cause and place as phrases.

    `differing` are the subjects of the item's entries that are otherwise than declared.
    """
    upgraded = finding.copy()
    if "value" in finding:
        value = schema1_phrases.observed(finding["requirement"], finding["value"])
        upgraded["value"] = _builtins(value)
    if "cause" in finding:
        upgraded["cause"] = msgspec.to_builtins(old_cause(finding["cause"], differing))
    if "where" in finding:
        upgraded["where"] = msgspec.to_builtins(old_place(finding["where"]))
    return upgraded


def _entry(case: str, entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the card of the experiment `case`; here subjects and values become phrases."""
    experiment = case.removeprefix(PREFIX)
    subject = schema1_phrases.subject(experiment, entry["subject"])
    phrases = {"subject": _builtins(subject)}
    for name in entry.keys() & {"value", "declared"}:
        value = schema1_phrases.value(experiment, entry[name], subject.id)
        phrases[name] = _builtins(value)
    return entry | phrases


@cache
def _builtins(phrase: Phrase) -> dict[str, Any]:
    return msgspec.to_builtins(phrase)


def _implementation(item: dict[str, Any]) -> dict[str, Any]:
    causal = _CAUSAL.fullmatch(item.get("causal", ""))
    without = {name: value for name, value in item.items() if name != "causal"}
    if causal is None:
        return without
    alignment = "" if causal["alignment"] == "equal lengths only" else causal["alignment"]
    flag = {"name": causal["name"], "alignment": alignment, "needs": causal["needs"] or ""}
    return without | {"causal": flag}


@cache
def _frozen() -> dict[str, Any]:
    """The requirements and topics of the last suite that wrote schema 1."""
    file = Path(__file__).with_name("schema1.json")
    frozen: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    return frozen
