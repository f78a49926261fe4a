"""What changed between two records, as data."""

from __future__ import annotations

import msgspec

from conformance.records.findings import Figures, Worst

SCHEMA = "mha-conformance/changes/1"

Counts = dict[str, int]


class Side(msgspec.Struct, frozen=True):
    """One of the two: a record, or several in a folder.

    Attributes:
        file: as given.
        created: when the last of its records was made.
        suite, catalogue: versions; several if its records differ.
        packages: versions of packages.
        selection: what narrowed it, or "".
        complete: whether every planned item has an outcome.
        implementations: name to verdicts of its items, on all devices.
        devices: name to the devices that these are of.
    """

    file: str
    created: str
    suite: str
    catalogue: str
    packages: dict[str, str]
    selection: str
    complete: bool
    implementations: dict[str, Counts]
    devices: dict[str, list[str]]


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """Findings of one implementation and requirement that changed alike.

    Attributes:
        implementation, device: whose.
        requirement: which; "run" where the process was lost.
        level: of the requirement, or "".
        before, after: verdicts, or values of a characteristic; "" if it was not asked.
        told: what there is to say about the state now, or "".
        cause: the known mistake that explains it now, or "".
        times: how many findings.
        cases, dtypes, modes: where.
        case, dtype, mode: the item that is furthest off.
        figures, worst: its evidence.
        command: runs just that item.
    """

    implementation: str
    device: str
    requirement: str
    level: str
    before: str
    after: str
    times: int
    cases: list[str]
    dtypes: list[str]
    modes: list[str]
    case: str
    dtype: str
    mode: str
    command: str
    told: str = ""
    cause: str = ""
    figures: Figures | None = None
    worst: Worst | None = None


class Convention(msgspec.Struct, frozen=True):
    """An entry of a convention card that is another now; "" stands for no entry."""

    implementation: str
    device: str
    experiment: str
    subject: str
    before: str
    after: str
    modes: list[str]


class Members(msgspec.Struct, frozen=True):
    """What only one of the two has.

    Attributes:
        implementations: by name.
        cases: of implementations that both have.
        items: how many items of these implementations, in all cases, dtypes and modes.
        findings: how many findings of items that both have.
        wrong: those findings and items that deviate.
    """

    implementations: list[str]
    cases: list[str]
    items: int
    findings: int
    wrong: list[Change]


class Changes(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
        worse: what conformed, was unsupported or deviated less gravely, and is wrong now.
        lost: what was answered and is not any more.
        otherwise: what is another now, and neither better nor worse.
        fixed: what was wrong and conforms.
        gained: what was not answered and is now.
        conventions: what experiments show otherwise.
        added, removed: what only the second, or only the first has.
        notes: what to know before comparing, such as another catalogue.
        common: how many findings both have.
        same: how many of them are as they were.
    """

    schema: str
    before: Side
    after: Side
    worse: list[Change]
    lost: list[Change]
    otherwise: list[Change]
    fixed: list[Change]
    gained: list[Change]
    conventions: list[Convention]
    added: Members
    removed: Members
    notes: list[str]
    common: int
    same: int

    @property
    def anything_worse(self) -> bool:
        """Whether something is worse, or no longer answered."""
        return bool(self.worse or self.lost)
