"""Record where and how a run was made, to repeat it and to join only records that are alike."""

from __future__ import annotations

import datetime
import inspect
import os
import platform
import re
import secrets
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from conformance.adapter.base import Adapter
from conformance.adapter.code import lines
from conformance.adapter.function import Function
from conformance.adapter.layer import Layer
from conformance.cases.catalogue import catalogue_hash, find_cases
from conformance.cases.description import describe_all
from conformance.errors import Unavailable
from conformance.frameworks.base import package_versions
from conformance.records.header import (
    SCHEMA,
    CausalInfo,
    Header,
    Implementation,
    MaskInfo,
    ParameterInfo,
    Provenance,
    RequirementInfo,
    WeightsInfo,
)
from conformance.requirements import REQUIREMENTS
from conformance.running.digests import adapter_digest, revisions, suite_code
from conformance.running.session import Inquiry, Item, Row

RUN_FILE = "run"
"""The file with the run's id, beside the records of a run of several environments."""

BASE_PACKAGES = ("numpy", "einops")
"""Packages that may change an answer, besides those of the implementations."""

NUMERIC = ("OMP_", "OPENBLAS_", "MKL_", "XLA_", "JAX_", "TF_", "KERAS_", "NVIDIA_TF32_", "TORCH_")
"""Prefixes of environment variables that frameworks and libraries read."""
HARMLESS = ("_DIR", "_FILE", "_LOG_LEVEL", "_PATH", "_SECS", "_BYTES")
"""Suffixes of such variables that change no number."""

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
"""A file named `run` may be something else, such as a script."""


def suite_version() -> str:
    """Return the version of this suite."""
    return metadata.version("mha-conformance")


def run_id(folder: Path) -> str:
    """Return the run of a record in this folder: the one begun there, or a new one."""
    return begun(folder) or new_run_id()


def begun(folder: Path) -> str:
    """Return the id of the run that was begun in this folder, or ""."""
    try:
        found = (folder / RUN_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""
    return found if _RUN_ID.fullmatch(found) else ""


def new_run_id() -> str:
    """Return an id for a run: the time, and a few random digits against collisions."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


def header_of(
    adapters: Sequence[Adapter],
    described: Sequence[Implementation],
    rows: Sequence[Row],
    device: str,
    selection: str,
    *,
    command: str,
    name: str = "",
    folder: Path | None = None,
) -> Header:
    """Return the header of a record.

    Args:
        adapters: the implementations, and
        described: their declarations.
        rows: what is examined.
        device: "cpu" or "gpu".
        selection: what narrows the run, or "".
        command: the command line.
        name: the record's name.
        folder: the folder of the record, which may belong to a run of several environments.
    """
    run = new_run_id() if folder is None else run_id(folder)
    topics = [row.experiment.topic for row in rows if isinstance(row, Inquiry)]
    return Header(
        schema=SCHEMA,
        name=name,
        provenance=provenance(adapters, device, command, run, selection),
        implementations=list(described),
        planned=len(rows),
        cases=describe_all(row.case for row in rows if isinstance(row, Item)),
        requirements=requirements(),
        topics=list(dict.fromkeys(topics)),
        revisions=revisions(),
    )


def provenance(
    adapters: Sequence[Adapter], device: str, command: str, run: str, selection: str
) -> Provenance:
    """Return the provenance that is known before the run."""
    packages = package_versions(("mha-conformance", *BASE_PACKAGES, "pytest"))
    model = ""
    for adapter in adapters:
        try:
            packages |= adapter.versions()
            model = model or adapter.device_model(device)
        except Exception:  # `describe` records the reason
            continue
    return Provenance(
        suite=suite_version(),
        catalogue=catalogue_hash(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=run,
        device=device,
        device_model=model or "unknown",
        packages=dict(sorted(packages.items())),
        command=command,
        selection=selection,
        **setting(),
    )


def setting() -> dict[str, Any]:
    """Return the fields of the provenance that need no framework."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "machine": _processor(),
        "environment": environment(),
        "code": suite_code(),
    }


@cache
def environment() -> dict[str, str]:
    """Return variables that may change numbers, as they were when this was first called.

    Call it before an adapter is loaded, since some set variables for their framework.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC) and not name.endswith(HARMLESS)
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()


def describe(adapters: Iterable[tuple[Adapter, str]], device: str) -> list[Implementation]:
    """Return the adapters' declarations, each with the reason if it cannot be run."""
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
    returned = adapter.returns_weights
    option = adapter.weights_option if returned == "per head" else ""
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
            MaskInfo(item.name, list(item.layouts), item.true, item.number, item.broadcasts)
            for item in adapter.mask_arguments
        ],
        causal=_causal(adapter),
        unavailable=reason,
        kind=_kind(adapter),
        about=_about(adapter),
        example=_example(adapter),
        mode_notes={mode.name: mode.about for mode in adapter.modes if mode.about},
        layout=adapter.layout if isinstance(adapter, Function) else "",
        grouped=isinstance(adapter, Function) and adapter.grouped,
        parameters=_parameters(adapter),
        weights=WeightsInfo(returned, option, adapter.weights_otherwise if option else "")
        if returned
        else None,
        custom_scale=adapter.custom_scale,
        differentiable=adapter.differentiable,
        fully_masked_row={
            mode.name: row for mode in adapter.modes if (row := adapter.masked_row(mode))
        },
        digest=adapter_digest(spec, adapter.framework),
    )


def _causal(adapter: Adapter) -> CausalInfo | None:
    flag = adapter.causal_flag
    return CausalInfo(flag.name, flag.alignment or "", flag.needs or "") if flag else None


def _kind(adapter: Adapter) -> Literal["layer", "function", "other"]:
    if isinstance(adapter, Layer):
        return "layer"
    return "function" if isinstance(adapter, Function) else "other"


def _about(adapter: Adapter) -> str:
    """Return the description of the library from the adapter's file."""
    name = type(adapter).__module__
    # An adapter made by `attention_function` has no module of its own.
    module = None if name.startswith("conformance.adapter.") else sys.modules.get(name)
    return inspect.cleandoc((module.__doc__ if module else "") or type(adapter).__doc__ or "")


def _example(adapter: Adapter) -> str:
    """Return lines that build and call the implementation, at sizes that are easy to read."""
    try:
        example = adapter.small_example(adapter.modes[0])
    except Exception:  # the checks report errors of an adapter
        return ""
    if example is None:
        return ""
    call = example.call.replace("{masks}", ", ..." if adapter.mask_arguments else "")
    shown = [*lines(example.imports), *lines(example.build), *lines(example.fresh)]
    return "\n".join([*shown, f"output = {example.output.replace('{}', call)}"])


def _parameters(adapter: Adapter) -> list[ParameterInfo]:
    """Return the parameter table of a layer, for the first of the simplest shapes that it takes."""
    if not isinstance(adapter, Layer):
        return []
    for name in ("plain/no-mask/self", "plain/no-mask/cross"):
        (case,) = find_cases(name)
        shape = case.problem("float32").shape
        try:
            adapter.check_shape(shape)
            rows = adapter.parameters_for(shape)
        except Exception:  # the checks report errors of an adapter
            continue
        return [ParameterInfo(row.native, row.sources, row.pattern, row.stack) for row in rows]
    return []


def requirements() -> list[RequirementInfo]:
    """Return every requirement of this suite, in the order of a report."""
    return [
        RequirementInfo(item.id, item.level, item.sentence, item.why, item.revision)
        for item in REQUIREMENTS
    ]
