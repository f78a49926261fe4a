"""Read the table `[tool.mha-conformance]` of a project.

The table has values for options that are not given on the command line.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from conformance.definition.dtypes import DTYPES
from conformance.errors import ConformanceError, UnknownName, check_names
from conformance.running import DEVICES, LEVELS

FILE = Path("pyproject.toml")
BASELINE = "conformance.toml"
"""The default file of known deviations."""


class Settings(msgspec.Struct, frozen=True):
    """The keys of the table; each is an option or argument of a command, apart from `resources`.

    Attributes:
        resources: the resources that `matrix` reserves on a Ray cluster, by environment and name.
    """

    implementations: list[str] = []
    cases: list[str] = []
    dtypes: list[str] = []
    modes: list[str] = []
    level: str | None = None
    device: str = "cpu"
    baseline: str = ""
    record: str | None = None
    resources: dict[str, dict[str, float]] = {}


def read_settings(path: Path = FILE) -> Settings:
    """Return the settings of this file, or the defaults if there is no such file or table.

    Raises:
        ConformanceError: if the file cannot be read or is not TOML, a key is unknown, or a value is
            wrong.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError) as error:
        raise ConformanceError(f"{path}: cannot be read: {error}") from error
    tool = document.get("tool", {})
    table: Any = tool.get("mha-conformance", {}) if isinstance(tool, dict) else {}
    try:
        check_names("key", table, Settings.__struct_fields__)
        settings = msgspec.convert(table, Settings)
        check_names("dtype", settings.dtypes, DTYPES)
        check_names("level", [settings.level] if settings.level is not None else [], LEVELS)
        check_names("device", [settings.device], DEVICES)
    except (UnknownName, msgspec.ValidationError) as error:
        raise ConformanceError(f"{path}: [tool.mha-conformance]: {error}") from error
    return settings


def complete(options: argparse.Namespace) -> None:
    """Fill in, from the table or with defaults, options of a gate that were not given.

    With --from-record nothing is examined, so only the baseline is then taken from the table.

    Raises:
        ConformanceError: if the table is wrong.
    """
    settings = read_settings()
    options.baseline = options.baseline or Path(settings.baseline or BASELINE)
    if options.from_record is None:
        _fill_in(options, settings)
    options.device = options.device or "cpu"


def complete_run(options: argparse.Namespace) -> None:
    """Fill in options of `run` from the table, but only if the command names no implementation.

    Raises:
        ConformanceError: if the table names no implementation either, or is wrong.
    """
    if not options.implementation:
        _fill_in(options, read_settings())
        if not options.implementation:
            raise ConformanceError(
                "which implementation? name one, or write implementations in "
                f"[tool.mha-conformance] of {FILE}"
            )
    options.device = options.device or "cpu"


def known_deviations() -> Path | None:
    """Return the path of the baseline that `gate` reads without --baseline.

    Return None if the table names no baseline and the default file does not exist.
    """
    named = read_settings().baseline
    path = Path(named or BASELINE)
    return path if named or path.exists() else None


def _fill_in(options: argparse.Namespace, settings: Settings) -> None:
    options.implementation = options.implementation or settings.implementations
    options.case = options.case or settings.cases
    options.dtype = options.dtype or settings.dtypes
    options.mode = options.mode or settings.modes
    options.level = options.level or settings.level
    options.device = options.device or settings.device
    if settings.record is not None:
        options.record = options.record or Path(settings.record)
