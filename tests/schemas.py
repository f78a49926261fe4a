"""Outputs held against their published schemas."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec

from conformance.commands.shared import schema
from conformance.errors import BrokenRecord
from conformance.records.record import read

RECORD = Path(__file__).parent.parent / "docs" / "record.schema.json"


@cache
def validator(name: str) -> Any:
    """For one of `OUTPUTS`; records are held against the committed file."""
    found = json.loads(RECORD.read_bytes()) if name == "record" else schema(name)
    return jsonschema_rs.validator_for(found)


def faults(name: str, document: Any) -> list[str]:
    """What is not as the schema says."""
    return [
        f"{'/'.join(map(str, error.instance_path))}: {error.message[:200]}"
        for error in validator(name).iter_errors(document)
    ]


def record_faults(folder: Path) -> dict[str, list[str]]:
    """Every record under a folder that the suite takes for one and its schema does not."""
    found = {}
    for path in folder.rglob("*.json"):
        try:
            read(path)
        except (BrokenRecord, OSError):
            continue
        document = msgspec.json.decode(path.read_bytes())
        told = faults("record", document)
        if told:
            found[str(path)] = told[:3]
    return found
