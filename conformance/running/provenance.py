"""Where and how a run was made: enough to run it again, and to refuse to mix what differs."""

from __future__ import annotations

import datetime
import platform
import re
import secrets
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from conformance.adapter.base import Adapter
from conformance.cases.catalogue import catalogue_hash
from conformance.errors import Unavailable
from conformance.frameworks.base import package_versions
from conformance.records.record import Implementation, MaskInfo, Provenance

RUN_FILE = "run"
"""Beside the records of a run of several environments lies this file with the run's id."""

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
"""Another file of that name, such as somebody's script, holds none."""


def suite_version() -> str:
    """Version of this suite."""
    return metadata.version("mha-conformance")


def run_id(folder: Path) -> str:
    """The run that a record in this folder belongs to: the one begun there, or a new one."""
    return begun(folder) or new_run_id()


def begun(folder: Path) -> str:
    """The run that was begun in this folder, or ""."""
    try:
        found = (folder / RUN_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""
    return found if _RUN_ID.fullmatch(found) else ""


def new_run_id() -> str:
    """An id for a run: the time, and a few random digits against collisions."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def provenance(
    adapters: Sequence[Adapter], device: str, command: str, run: str, selection: str
) -> Provenance:
    """What is known before the run."""
    packages = package_versions(("mha-conformance", "numpy", "einops", "pytest"))
    model = ""
    for adapter in adapters:
        try:
            packages |= adapter.versions()
            model = model or adapter.device_model(device)
        except Exception:  # whatever it is, `describe` tells
            continue
    return Provenance(
        suite=suite_version(),
        catalogue=catalogue_hash(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=run,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        device=device,
        device_model=model or "unknown",
        packages=dict(sorted(packages.items())),
        command=command,
        selection=selection,
    )


def describe(adapters: Iterable[tuple[Adapter, str]], device: str) -> list[Implementation]:
    """The adapters' declarations, and why one cannot be run."""
    return [_describe(adapter, spec, device) for adapter, spec in adapters]


def _describe(adapter: Adapter, spec: str, device: str) -> Implementation:
    reason, versions = "", {}
    try:
        versions = adapter.versions()
        adapter.prepare()
        adapter.device_model(device)
    except Unavailable as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    flag = adapter.causal_flag
    causal = ""
    if flag is not None:
        causal = f"{flag.name} ({flag.alignment or 'equal lengths only'}"
        causal += f", with {flag.needs})" if flag.needs else ")"
    return Implementation(
        name=adapter.name,
        title=adapter.title,
        documentation=adapter.documentation,
        framework=adapter.framework,
        spec=spec,
        versions=versions,
        modes=[mode.name for mode in adapter.modes],
        dtypes=list(adapter.dtypes),
        masks=[
            MaskInfo(item.name, list(item.layouts), item.true, item.number)
            for item in adapter.mask_arguments
        ],
        causal=causal,
        unavailable=reason,
    )
