"""Print the output of commands for programs: JSON, and its JSON schema.

Every output is a struct of msgspec, so the schema is made of the type and cannot drift from it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import msgspec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

OUTPUTS = {
    "record": ("conformance.records.record:Record", "everything that one run found"),
    "report": ("conformance.reports.model:Report", "records, joined into a report"),
    "list": ("conformance.commands.listing:Listing", "what mha-conformance list prints"),
    "explain": (
        "conformance.commands.explain:Explanation",
        "what mha-conformance explain prints",
    ),
    "run": ("conformance.running.ending:Summary", "what mha-conformance run prints"),
    "probe": ("conformance.commands.probe:Results", "what mha-conformance probe prints"),
    "compare": (
        "conformance.reports.changes:Changes",
        "what mha-conformance compare prints",
    ),
}
"""Name to type, as "module:NAME", and what it is."""


def schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of one of `OUTPUTS`."""
    place, told = OUTPUTS[name]
    module, _, attribute = place.partition(":")
    made = msgspec.json.schema(getattr(importlib.import_module(module), attribute))
    return {"$schema": DIALECT, "title": f"mha-conformance {name}", "description": told, **made}


def print_json(found: object) -> None:
    """Print indented JSON to stdout; JSON escapes control characters, so a terminal is safe."""
    encoded = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    # Characters beyond ASCII stand as they are in JSON, C1 controls and bidirectional marks too.
    sys.stdout.write("".join(_escaped(char) for char in encoded) + "\n")


def _escaped(char: str) -> str:
    if char == "\n" or char.isprintable():
        return char
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
