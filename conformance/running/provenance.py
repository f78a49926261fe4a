"""Describe the setting of a run and the implementations, for the header of a record."""

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
from typing import Any

import msgspec

from conformance.adapter.base import Adapter
from conformance.adapter.code import lines
from conformance.adapter.function import Function
from conformance.adapter.native import Layer
from conformance.cases.catalogue import catalogue_hash, find_cases
from conformance.cases.description import describe_all
from conformance.errors import Unavailable
from conformance.frameworks.base import package_versions
from conformance.records.header import (
    SCHEMA,
    CausalInfo,
    FeatureInfo,
    Header,
    Implementation,
    MaskInfo,
    ParameterInfo,
    Provenance,
    RequirementInfo,
    WeightsInfo,
    processor,
)
from conformance.requirements import REQUIREMENTS
from conformance.running.digests import adapter_digest, revisions, suite_code
from conformance.running.session import Inquiry, Item, Row
from conformance.text import message

RUN_FILE = "run"
"""The name of the file with the id of a run of several environments, in the folder of records."""

BASE_PACKAGES = ("numpy", "einops")
"""The packages that may affect results, in addition to those of the implementations."""

NUMERIC = ("OMP_", "OPENBLAS_", "MKL_", "XLA_", "JAX_", "TF_", "KERAS_", "NVIDIA_TF32_", "TORCH_")
"""The prefixes of environment variables that numerical libraries read."""
HARMLESS = ("_DIR", "_FILE", "_LOG_LEVEL", "_PATH", "_SECS", "_BYTES")
"""The suffixes of such variables that cannot affect results."""

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
"""The form of a run id; a file named `run` with any other content is ignored."""


def run_id(folder: Path) -> str:
    """Return the id of the run that was begun in this folder, or a new id if there is none."""
    return begun(folder) or new_run_id()


def begun(folder: Path) -> str:
    """Return the id of the run that was begun in this folder, or "" if there is none."""
    try:
        found = (folder / RUN_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError):
        return ""
    return found if _RUN_ID.fullmatch(found) else ""


def new_run_id() -> str:
    """Return a new run id, made of the time and a few random hexadecimal digits."""
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
        adapters: the implementations.
        described: the declarations of the implementations.
        rows: the rows to examine.
        device: "cpu" or "gpu".
        selection: the options that restrict the run, or "".
        command: the command line.
        name: the name of the record.
        folder: the folder of the record, which may hold records of other environments and the id
            of their run; None to make a new id.
    """
    packages = package_versions(("mha-conformance", *BASE_PACKAGES, "pytest"))
    model = ""
    for adapter in adapters:
        try:
            packages |= adapter.versions()
            model = model or adapter.device_model(device)
        except Exception:  # `describe` records the reason
            continue
    provenance = Provenance(
        catalogue=catalogue_hash(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=new_run_id() if folder is None else run_id(folder),
        device=device,
        device_model=model or "unknown",
        packages=dict(sorted(packages.items())),
        command=command,
        selection=selection,
        **setting(),
    )
    return Header(
        schema=SCHEMA,
        name=name,
        provenance=provenance,
        implementations=list(described),
        planned=len(rows),
        cases=describe_all(row.asked for row in rows if isinstance(row, Item)),
        requirements=requirements(),
        topics=list(dict.fromkeys(row.asked.topic for row in rows if isinstance(row, Inquiry))),
        revisions=revisions(),
    )


def setting() -> dict[str, Any]:
    """Return the fields of `Provenance` that can be determined without a framework, by name."""
    return {
        "suite": metadata.version("mha-conformance"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "machine": processor(),
        "environment": environment(),
        "code": suite_code(),
    }


@cache
def environment() -> dict[str, str]:
    """Return the environment variables that may affect results, as of the first call.

    Call it before loading adapters, because some of them set variables for their framework.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC) and not name.endswith(HARMLESS)
    }


def describe(adapters: Iterable[tuple[Adapter, str]], device: str) -> list[Implementation]:
    """Return the declaration of each implementation, given its adapter and spec.

    If an implementation cannot be run, its declaration says why, in `unavailable`.
    """
    return [_describe(adapter, spec, device) for adapter, spec in adapters]


_SAME = ("name", "title", "documentation", "framework", "custom_scale", "differentiable")
"""The attributes of an adapter that are copied to `Implementation` under the same names."""


def _describe(adapter: Adapter, spec: str, device: str) -> Implementation:
    reason, versions = "", {}
    try:
        versions = adapter.versions()
        adapter.prepare()
        adapter.device_model(device)
    except Unavailable as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {message(error)}"
    returned, flag = adapter.returns_weights, adapter.causal_flag
    option = adapter.weights_option if returned == "per head" else ""
    otherwise = adapter.weights_otherwise if option else ""
    rows = {mode.name: adapter.masked_row(mode) for mode in adapter.modes}
    attending: dict[str, Any] = {"kind": "layer"} if isinstance(adapter, Layer) else {}
    if isinstance(adapter, Function):
        attending = {"kind": "function", "layout": adapter.layout, "grouped": adapter.grouped}
    return Implementation(
        **{name: getattr(adapter, name) for name in _SAME},
        **attending,
        spec=spec,
        versions=versions,
        modes=[mode.name for mode in adapter.modes],
        dtypes=list(adapter.dtypes),
        masks=[
            MaskInfo(item.name, list(item.layouts), item.true, item.number, item.broadcasts)
            for item in adapter.mask_arguments
        ],
        causal=CausalInfo(flag.name, flag.alignment or "", flag.needs or "") if flag else None,
        unavailable=reason,
        about=_about(adapter),
        example=_example(adapter),
        mode_notes={mode.name: mode.about for mode in adapter.modes if mode.about},
        parameters=_parameters(adapter),
        weights=WeightsInfo(returned, option, otherwise) if returned else None,
        accuracy=adapter.accuracy,
        fully_masked_row={name: row for name, row in rows.items() if row},
        digest=adapter_digest(spec, adapter.framework),
        features=[
            FeatureInfo(type(one).__name__, list(one.says), list(one.names))
            for one in adapter.features
        ],
    )


def _about(adapter: Adapter) -> str:
    """Return the docstring of the adapter's module, or else of its class, or ""."""
    name = type(adapter).__module__
    # The class of an adapter made by `attention_function` is not in the user's module.
    module = None if name.startswith("conformance.adapter.") else sys.modules.get(name)
    return inspect.cleandoc((module.__doc__ if module else "") or type(adapter).__doc__ or "")


def _example(adapter: Adapter) -> str:
    """Return Python lines that build and call the implementation with small sizes, or ""."""
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
    """Return the parameter table of a layer for the simplest shape that it accepts.

    Return [] for a function, or if neither of the simplest shapes is accepted.
    """
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
        return msgspec.convert(rows, list[ParameterInfo], from_attributes=True)
    return []


def requirements() -> list[RequirementInfo]:
    """Return all requirements of the suite as records store them, in the order of a report."""
    return msgspec.convert(REQUIREMENTS, list[RequirementInfo], from_attributes=True)
