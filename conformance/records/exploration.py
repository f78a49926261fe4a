"""The record of an exploration: how many problems were tried in each mode, and what was found.

Each finding is one class of deviations. Its smallest problem is saved as a case file beside the
record. If there is a record of an earlier exploration, the next one continues it, so that the same
deviation remains one finding.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from conformance.errors import BrokenRecord
from conformance.records.record import read_document

SCHEMA = "mha-conformance/exploration/1"
MOST_BYTES = 2**20
CASE = re.compile(r"[\w.-]+-[0-9]{1,6}\.case")
"""The pattern of the names of case files, which are in the folder of the record."""


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of deviations.

    Attributes:
        dtype, nature, features, sizes: the fields of `conformance.explore.search.Class`.
        modes: the modes in which the deviation was observed.
        array: the array that deviates, or "" if none does; for an exception, the name of the
            function that raised it.
        detail: a sentence about the deviation on the smallest problem.
        ratio: the error in units of σ; None if it is infinite.
        times: the number of problems in the latest exploration that showed it, which may be 0.
        case: the name of the case file with the smallest problem.
        since: the versions of the packages with which this smallest problem was found.
    """

    dtype: str
    nature: list[str]
    features: list[str]
    sizes: list[int]
    modes: list[str]
    array: str
    detail: str
    ratio: float | None
    times: int
    case: str
    since: dict[str, str]


class Exploration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of how one implementation was tested on problems outside the catalogue.

    Attributes:
        versions: the versions of the packages that the implementation uses, by name.
        seconds: the time limit for the search of each mode.
        answered: the number of problems that the implementation answered in each mode.
        found: the classes of deviations; those of earlier explorations come first.
    """

    schema: str
    implementation: str
    versions: dict[str, str]
    device: str
    seed: int
    seconds: float
    answered: dict[str, int]
    found: list[Found]


def read_exploration(path: Path) -> Exploration:
    """Return the record in a file.

    Raises:
        BrokenRecord: the file cannot be read, is too large, or is not a record of an exploration.
    """
    found = read_document(path, Exploration, SCHEMA, MOST_BYTES, "record of an exploration")
    for one in found.found:
        if not CASE.fullmatch(one.case):
            raise BrokenRecord(f"{path}: {one.case[:80]!r} is no case file of an exploration")
    return found
