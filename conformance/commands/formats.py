"""Print the output of commands as JSON for other programs, and the JSON schema of that output.

Every output is a msgspec struct or a list of structs, so each schema is derived from the type of
the output and always agrees with it.
"""

from __future__ import annotations

import json
import pkgutil
from typing import Any, TypeVar

import msgspec

DIALECT = "https://json-schema.org/draft/2020-12/schema"

OUTPUTS = {
    "record": ("conformance.records.record:Record", "everything that one run found"),
    "report": ("conformance.reports.model:Report", "records, joined into a report"),
    "list": ("conformance.commands.listing:Listing", "what mha-conformance list prints"),
    "explain": ("conformance.commands.explain:Explanation", "what mha-conformance explain prints"),
    "run": ("conformance.running.examine:Summary", "what mha-conformance run prints"),
    "probe": ("conformance.commands.probe:Results", "what mha-conformance probe prints"),
    "gate": ("conformance.reports.gate:Gate", "what mha-conformance gate prints"),
    "convert": (
        "conformance.commands.convert:Converted",
        "what mha-conformance convert prints",
    ),
    "long": ("conformance.records.long:Climbs", "what mha-conformance long prints"),
    "explore": ("conformance.commands.explore:Searched", "what mha-conformance explore prints"),
    "reproduce": ("conformance.commands.explore:Searched", "what mha-conformance reproduce prints"),
    "compare": ("conformance.reports.changes:Changes", "what mha-conformance compare prints"),
}
"""For each output, its type as "module:NAME" and a description."""


Struct = TypeVar("Struct", bound=msgspec.Struct)


def printed(struct: type[Struct], item: object, **others: object) -> Struct:
    """Return a struct with the fields `others`, and all other fields copied from the item."""
    names = (name for name in struct.__struct_fields__ if name not in others)
    return struct(**{name: getattr(item, name) for name in names}, **others)


def schema(name: str) -> dict[str, Any]:
    """Return the JSON schema of one of `OUTPUTS`."""
    place, description = OUTPUTS[name]
    output = msgspec.json.schema(pkgutil.resolve_name(place))
    about = {"title": f"mha-conformance {name}", "description": description}
    return {"$schema": DIALECT, **about, **output}


def print_json(output: object) -> None:
    """Print an output to stdout as indented JSON, in which unprintable characters are escaped."""
    encoded = msgspec.json.format(msgspec.json.encode(output), indent=1).decode()
    # JSON does not escape C1 control characters and bidirectional marks, which affect terminals.
    escaped = (
        char if char == "\n" or char.isprintable() else json.dumps(char)[1:-1] for char in encoded
    )
    print("".join(escaped))
