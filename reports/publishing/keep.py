"""Records as they are kept in the repository: whole but for the exchanged arrays, compressed.

The same record gives the same bytes, so that nothing changes in the repository where nothing was
found anew. Version control keeps every edition for ever, hence the limits.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from conformance.errors import ConformanceError
from conformance.records.record import Record
from conformance.reports.model import Loaded

RECORDS, VERSIONS = "records", "versions"
"""Folders of the records, and of those that are there for their versions only."""

MADE = "made.json"

MOST_RECORD = 512 * 2**10
MOST_TOGETHER = 16 * 2**20
"""Bytes that one record, and all of them together, may have in the repository."""


class Made(msgspec.Struct, frozen=True):
    """How the records were made, so that the pages can be rendered again.

    Attributes:
        cores: logical processors.
        memory: GiB.
        minutes: from the run's begin to its publication; 0 if nobody measured.
        expected: names of records that were to be there.
        problems: lines about records that could not be used.
    """

    processor: str
    cores: int
    memory: int
    minutes: int
    expected: list[str]
    problems: list[str]


def keep(records: Sequence[Loaded], folder: Path) -> int:
    """Write these records into a folder, and nothing else of their kind stays there.

    Returns:
        How many bytes they have.

    Raises:
        ConformanceError: one of them, or all together, are larger than what may be kept.
    """
    files = {f"{record.header.name}.json.gz": packed(record) for _, record, _ in records}
    for name, content in files.items():
        if len(content) > MOST_RECORD:
            raise ConformanceError(
                f"{name}: {len(content):,} bytes, {MOST_RECORD:,} are the most that a published "
                "record can have; examine fewer implementations in one environment"
            )
    size = sum(map(len, files.values()))
    if size > MOST_TOGETHER:
        raise ConformanceError(
            f"{folder}: {size:,} bytes, {MOST_TOGETHER:,} are the most that published records "
            "can have together"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    for file in folder.glob("*.json.gz"):
        if file.name not in files:
            file.unlink()
    return size


def packed(record: Record) -> bytes:
    """A record without its arrays, which lie beside it and are not kept."""
    text = msgspec.json.encode(msgspec.structs.replace(record, exchange="", digest=""))
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=9, mtime=0, filename="") as file:
        file.write(text)
    return buffer.getvalue()


def made_here(minutes: int, expected: Sequence[str], problems: Sequence[str]) -> Made:
    """On the machine that this runs on."""
    return Made(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory=round(psutil.virtual_memory().total / 2**30),
        minutes=minutes,
        expected=list(expected),
        problems=list(problems),
    )


def write_made(made: Made, folder: Path) -> None:
    """Beside the records."""
    text = msgspec.json.format(msgspec.json.encode(made), indent=1)
    (folder / MADE).write_bytes(text + b"\n")


def read_made(folder: Path) -> Made | None:
    """What was written beside the records, or None."""
    try:
        return msgspec.json.decode((folder / MADE).read_bytes(), type=Made)
    except (OSError, msgspec.MsgspecError):
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()
