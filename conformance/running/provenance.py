"""Describe the setting of a run, the implementations and the code, for the header of a record.

The code is described by digests. As long as the digests for a result are unchanged, its item need
not be measured again. A result depends on the adapter and the modules of the same project that the
adapter imports, on the checks of the requirements that use the case, and on shared code. Source
files are parsed, not imported, so that a run without changes does not wait for a framework. A
digest depends on string constants in code, but not on comments, docstrings or formatting.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import inspect
import os
import platform
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import msgspec

from conformance.adapter.base import Adapter
from conformance.adapter.code import lines
from conformance.adapter.function import Function
from conformance.adapter.loading import registered
from conformance.adapter.native import Layer
from conformance.cases.case import describe_all
from conformance.cases.catalogue import find_cases
from conformance.definition.arithmetic import classes_of
from conformance.definition.dtypes import DTYPES
from conformance.errors import Unavailable
from conformance.experiments import EXPERIMENTS
from conformance.frameworks import BRIDGES
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
from conformance.running.kept import hash_of_catalogue, user_folder
from conformance.running.session import Inquiry, Item, Row
from conformance.text import message

RUN_FILE = "run"
"""The name of the file with the id of a run of several environments, in the folder of records."""

BASE_PACKAGES = ("numpy", "einops")
"""The packages that may affect results, in addition to those of the implementations."""

NUMERIC = (
    *("OMP_", "OPENBLAS_", "MKL_", "XLA_", "JAX_", "TF_", "KERAS_", "NVIDIA_TF32_", "TORCH_"),
    *("ATEN_", "NPY_", "ONEDNN_", "DNNL_", "KMP_", "BLIS_", "CUBLAS_", "CUDNN_"),
)
"""The prefixes of environment variables that numerical libraries read."""
SYSTEM = (
    *("TZ", "LANG", "LC_", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("PYTHONMALLOC", "PYTHON_CPU_COUNT", "PYTHON_GIL"),
)
"""The prefixes of those that the C library, the linker or the interpreter reads by itself.

PYTHONHASHSEED is not among them: tox draws one for each run, and nothing would ever be taken over.
"""
FLAGS = (
    *("optimize", "bytes_warning", "dev_mode", "utf8_mode", "isolated", "ignore_environment"),
    *("no_site", "no_user_site", "safe_path"),
)
"""The flags of the interpreter on which code may depend, whether an option or a variable sets them:
`-O` and `PYTHONOPTIMIZE` leave out what `assert` and `__debug__` say."""
HARMLESS = ("_DIR", "_FILE", "_LOG_LEVEL", "_PATH", "_SECS", "_BYTES")
"""The suffixes of such variables that cannot affect results."""

DRIVER = Path("/proc/driver/nvidia/version")
"""The file in which NVIDIA's driver tells its version; not every container has it."""

_RUN_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{4}")
"""The form of a run id; a file named `run` with any other content is ignored."""


def run_id(folder: Path) -> str:
    """Return the id of the run that was begun in this folder, or a new id if there is none."""
    return begun(folder) or new_run_id()


def begun(folder: Path) -> str:
    """Return the id of the run that was begun in this folder, or "" if there is no valid id."""
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
    chosen: str = "",
    level: str = "full",
    name: str = "",
    folder: Path | None = None,
) -> Header:
    """Return the header of a record.

    Args:
        adapters, described: the implementations and their declarations.
        rows: the rows to examine.
        device: "cpu" or "gpu".
        selection: the options that restrict the run, or "".
        chosen: the options by which the project chooses what is asked, or "".
        level: the level of the run.
        command: the command line.
        name: the name of the record.
        folder: the folder of the record, which may hold records of other environments and the id
            of their run; None to make a new id.
    """
    packages = package_versions(("mha-conformance", *BASE_PACKAGES, "pytest"))
    for one in described:
        packages |= one.toolkit
    model = ""
    for adapter in adapters:
        try:
            packages |= adapter.versions()
            model = model or adapter.device_model(device)
        except Exception:  # `describe` records the reason
            continue
    provenance = Provenance(
        catalogue=hash_of_catalogue(),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=new_run_id() if folder is None else run_id(folder),
        device=device,
        device_model=model or "unknown",
        packages=dict(sorted(packages.items())),
        command=command,
        selection=selection,
        chosen=chosen,
        level=level,
        driver=driver() if device == "gpu" else "",
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
        "suite": suite_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "machine": processor(),
        "environment": environment(),
        "code": suite_code(),
    }


@cache
def environment() -> dict[str, str]:
    """Return the environment variables that may affect results, as of the first call.

    With them are, under their names in `sys`, the flags of the interpreter that are set, the
    filters of warnings that it was given, the letters of an unusual build such as "t", and its name
    unless it is CPython.
    Call it before loading adapters, because some of them set variables for their framework.
    """
    flags = [f"{name}={int(getattr(sys.flags, name))}" for name in FLAGS]
    interpreter = {
        "sys.abiflags": getattr(sys, "abiflags", ""),
        "sys.implementation": sys.implementation.name.replace("cpython", ""),
        "sys.flags": " ".join(flag for flag in flags if not flag.endswith("=0")),
        "sys.warnoptions": " ".join(sys.warnoptions),
    }
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith((*NUMERIC, *SYSTEM)) and not name.endswith(HARMLESS)
    } | {name: value for name, value in interpreter.items() if value}


@cache
def driver() -> str:
    """Return the version of NVIDIA's driver, without any framework; "" if it is unknown."""
    told = ""
    with suppress(OSError):
        told = DRIVER.read_text(encoding="utf-8")
    if found := re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\b", told):
        return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    # Without a driver, the command prints a sentence; with a broken one, it may hang.
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        if found := re.match(r"\d+(\.\d+)+$", told, re.MULTILINE):
            return found[0]
    return ""


def toolkit(adapter: Adapter) -> dict[str, str]:
    """Return the versions of CUDA and cuDNN that an adapter's framework says it uses, by name.

    What the framework does not know is left out.
    """
    told: dict[str, str] = {}
    # Versions are looked up where frameworks keep them, which not all of them promise.
    with suppress(Exception):
        told = adapter.toolkit()
    return {name: version for name, version in told.items() if version}


def describe(adapters: Iterable[tuple[Adapter, str]], device: str) -> list[Implementation]:
    """Return the declaration of each implementation, given its adapter and spec.

    If an implementation cannot be run, its declaration says why, in `unavailable`.
    """
    return [_describe(adapter, spec, device) for adapter, spec in adapters]


_SAME = ("name", "title", "documentation", "framework", "custom_scale", "differentiable")
"""The attributes of an adapter that are copied to `Implementation` under the same names."""


def _describe(adapter: Adapter, spec: str, device: str) -> Implementation:
    reason, versions, settings = "", {}, {}
    try:
        versions = adapter.versions()
        adapter.prepare()
        adapter.device_model(device)
        settings = {each.name: str(each.get()) for each in adapter.settings() if each.recorded}
    except Unavailable as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {message(error)}"
    returned, flag, declared = adapter.returns_weights, adapter.causal_flag, adapter.accuracy
    option = adapter.weights_option if returned == "per head" else ""
    otherwise = adapter.weights_otherwise if option else ""
    rows = {mode.name: adapter.masked_row(mode) for mode in adapter.modes}
    attending: dict[str, Any] = {"kind": "layer"} if isinstance(adapter, Layer) else {}
    if isinstance(adapter, Function):
        layout = adapter.native_layout or adapter.layout
        attending = {"kind": "function", "layout": layout, "grouped": adapter.grouped}
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
            if item.effect == "always"
        ],
        causal=CausalInfo(flag.name, flag.alignment or "", flag.needs or "", flag.effect)
        if flag
        else None,
        unavailable=reason,
        about=_about(adapter),
        scores=list(adapter.scores),
        example=_example(adapter),
        mode_notes={mode.name: mode.about for mode in adapter.modes if mode.about},
        parameters=_parameters(adapter),
        weights=WeightsInfo(returned, option, otherwise) if returned else None,
        accuracy=dict(declared) if isinstance(declared, Mapping) else declared,
        judged_by={dtype: _judged_by(adapter, dtype) for dtype in adapter.dtypes},
        promises=dict(sorted(adapter.promises.items())),
        fully_masked_row={name: row for name, row in rows.items() if row},
        digest=adapter_digest(spec, adapter.framework),
        features=[
            FeatureInfo(type(one).__name__, list(one.says), list(one.names))
            for one in adapter.features
        ],
        toolkit=toolkit(adapter) if device == "gpu" and not reason else {},
        settings=settings,
    )


def _judged_by(adapter: Adapter, dtype: str) -> str:
    """Return the accuracy class by which an adapter's answers in a dtype are judged."""
    promised = adapter.promised(dtype)
    classes = [item.name for item in classes_of(DTYPES[dtype], promised)]
    return promised if promised in classes else classes[-1]


def _about(adapter: Adapter) -> str:
    """Return the docstring of the adapter's module, or else of its class, or ""."""
    name = type(adapter).__module__
    # The class of an adapter made by `attention_function` is not in the user's module.
    module = None if name.startswith("conformance.adapter.") else sys.modules.get(name)
    return inspect.cleandoc((module.__doc__ if module else "") or type(adapter).__doc__ or "")


def _example(adapter: Adapter) -> str:
    """Return Python lines that build and call the implementation with small sizes.

    Return "" if the adapter has no example or raises an exception.
    """
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
    """Return the parameter table of a layer for self-attention, or else for cross-attention.

    Return [] if the layer accepts neither, and for adapters that are not layers.
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


# Digests of code

SUITE = "conformance"
ROOMS = ("definition", "adapter")
"""The subpackages on which every result depends."""
JUDGING = ("requirements", "experiments")
"""The subpackages of which a digest covers only modules that are imported, directly or not."""
BASE = (
    "conformance.frameworks",
    "conformance.frameworks.base",
    "conformance.cases.case",
)
CAUSES = "causes"
"""The key in `revisions()` for the subpackage that explains deviations."""


class SourceFile(msgspec.Struct, frozen=True):
    """A parsed source file.

    Attributes:
        digest: the digest of its code.
        imports: the modules it imports.
        documentation: its docstring.
        dated: whether it can ask `datetime` for the present time or date, unless it is a program.
    """

    digest: str
    imports: list[str]
    documentation: str = ""
    dated: bool = False


# Digests of the suite


@cache
def suite_version() -> str:
    """Return the version of the suite, followed by "+" and a digest of all of its sources.

    Unlike `suite_code`, the digest is the same in every version of Python.
    """
    folder = Path(__file__).parent.parent
    files = sorted(file for kind in ("*.py", "*.toml") for file in folder.rglob(kind))
    names = (f"{file.relative_to(folder).as_posix()} " for file in files)
    sums = (hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    digest = _joined(name + one for name, one in zip(names, sums, strict=True))
    return f"{metadata.version('mha-conformance')}+{digest[:12]}"


@cache
def suite_code() -> str:
    """Return the digest of all code on which every result depends."""
    modules = [*BASE, *(name for room in ROOMS for name in _modules(room))]
    modules += _closure([f"{SUITE}.running.session"], _judges)
    return _digest(sorted(modules))


@cache
def revisions() -> dict[str, str]:
    """Return a digest for each requirement and experiment, by id.

    Each digest covers the module that defines the requirement or experiment, and the modules in
    `JUDGING` that this module imports directly or indirectly. The digest of a requirement is
    preceded by its revision number and a hyphen. The key "causes" has the digest of the package
    `causes`: if this digest changes, deviating items are measured again.
    """

    @cache
    def revision(module: str) -> str:
        return _digest(sorted(_closure([module], _judges)))

    found = {item.id: f"{item.revision}-{revision(item.check.__module__)}" for item in REQUIREMENTS}
    found |= {item.id: revision(item.make.__module__) for item in EXPERIMENTS}
    found[CAUSES] = _digest(_modules("causes"))
    return found


def _judges(module: str) -> bool:
    room, _, name = module.removeprefix(f"{SUITE}.").partition(".")
    # Exclude the packages' __init__ modules: they import everything, so all would be dependent.
    return module.startswith(SUITE) and room in JUDGING and name not in ("", "experiment")


def _modules(room: str) -> list[str]:
    spec = _spec(f"{SUITE}.{room}")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    return [f"{SUITE}.{room}.{file.stem}" for file in sorted(folder.glob("[!_]*.py"))]


def _closure(modules: Iterable[str], follow: Callable[[str], bool]) -> list[str]:
    """Return `modules`, and the modules they import for which `follow` returns True.

    Imports of these modules are followed in the same way. Modules without a file are left out.
    """
    known: dict[str, None] = {}
    todo = list(modules)
    while todo:
        name = todo.pop()
        path = _file(name)
        if name in known or path is None:
            continue
        known[name] = None
        todo += [other for other in source(path).imports if follow(other)]
    return list(known)


def _digest(modules: Iterable[str]) -> str:
    files = ((name, _file(name)) for name in modules)
    return _joined(f"{name} {source(path).digest}" for name, path in files if path is not None)


def _joined(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# Digest of an adapter


@cache
def adapter_digest(spec: str, framework: str) -> str:
    """Return a digest of the code of an adapter and of the code that it uses.

    The digest covers the adapter's module, the modules of its project that it imports, the versions
    of the installed packages that these import, and the suite's code for the adapter's framework.
    The digest is "" if the adapter has no source file; then changes cannot be detected, so all its
    items are measured again.

    Args:
        spec: the argument of `--implementation`.
        framework: the name of the adapter's framework.
    """
    place, start = _start(spec)
    if start is None:
        return ""
    files: dict[Path, str] = {}
    packages: dict[str, str] = {}
    todo = [(start, start.stem if place.endswith(".py") else place)]
    while todo:
        path, name = todo.pop()
        if path in files:
            continue
        files[path] = name
        for imported in source(path).imports:
            todo += _project(imported, path, name, packages)
    lines = [f"{name} {source(path).digest}" for path, name in files.items()]
    lines += [f"{name} {version}" for name, version in packages.items()]
    if framework in BRIDGES:
        bridge = BRIDGES[framework][0]
        lines.append(_digest(sorted(_closure([bridge], _is_bridge))))
    return _joined(sorted(lines))


def documentation(spec: str) -> str:
    """Return the docstring of the module that defines an implementation, or "" if it has none."""
    start = _start(spec)[1]
    return source(start).documentation if start is not None else ""


def _start(spec: str) -> tuple[str, Path | None]:
    """Return the module name or path in an implementation's spec, and the file of the module.

    For a registered name, the module is that of its entry point. The file is None if it does not
    exist.
    """
    known = registered()
    place = (known[spec].value if spec in known else spec).partition(":")[0]
    file = Path(place) if place.endswith(".py") else _file(place)
    return place, file if file is not None and file.is_file() else None


def _is_bridge(module: str) -> bool:
    return module.startswith(f"{SUITE}.frameworks.") and module not in BASE


def _project(
    imported: str, path: Path, importer: str, packages: dict[str, str]
) -> Iterator[tuple[Path, str]]:
    """Yield the file and the name of each module of the project that an import refers to.

    The module `importer` at `path` imports the name `imported`. If this name refers to a package
    outside the project, yield nothing, and add the package to `packages` with its version, or with
    "none" if it is not installed. Ignore the standard library and all modules of the suite except
    its adapters.
    """
    dots = len(imported) - len(imported.lstrip("."))
    if dots:
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        parts = package.split(".")
        imported = ".".join([*parts[: len(parts) - dots + 1], imported.lstrip(".")]).strip(".")
    top = imported.partition(".")[0]
    if top in sys.stdlib_module_names or (
        top == SUITE and not imported.startswith(f"{SUITE}.adapters.")
    ):
        return
    parts = imported.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        file = _file(name) or _beside(path, name)
        if top != SUITE and length == 1:
            if file is None:
                packages[top] = "none"
                return
            if {"site-packages", "dist-packages"} & {*file.parts}:
                packages[top] = _version(top)
                return
        if file is not None and (top != SUITE or length > 2):
            yield file, name


def _beside(path: Path, name: str) -> Path | None:
    """Return the file of the module `name` if it is in the folder of the file `path`, or None."""
    stem = path.parent.joinpath(*name.split("."))
    candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


_MODULES = re.compile(r'^"?([^"/,\n]+?)(?:/[^",\n]*)?\.(?:py|pyd|so)"?,', re.MULTILINE)
"""The package or module at the beginning of each module in a list of files of a distribution."""
_NAME = re.compile(r"^Name:\s*(.+?)\s*$", re.MULTILINE)


@cache
def distributions() -> dict[str, list[str]]:
    """Return the names of the distributions that contain each installed package.

    This is `importlib.metadata.packages_distributions`, which takes five times as long, because it
    makes a path of each installed file and parses the whole description of each distribution.
    """
    found: dict[str, list[str]] = {}
    for one in metadata.distributions():
        listed = one.read_text("RECORD")
        if listed is None:
            listed = "".join(f"{file.as_posix()},\n" for file in one.files or ())
        names = (one.read_text("top_level.txt") or "").split() or [
            name.partition(".")[0] for name in _MODULES.findall(listed)
        ]
        told = _NAME.search(one.read_text("METADATA") or one.read_text("PKG-INFO") or "")
        for name in dict.fromkeys(filter(None, names)):
            found.setdefault(name, []).append(told[1] if told else one.name)
    return found


def _version(package: str) -> str:
    """Return the version of the distribution that has the same name as a package.

    If no distribution has this name, return the names and versions of those that contain the
    package, or "" if none does.
    """
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    names = distributions().get(package, [])
    return ", ".join(sorted(f"{name} {metadata.version(name)}" for name in {*names}))


# Source files


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module, or None if it is not found; do not import its parents."""
    parent = module.rpartition(".")[0]
    path = None
    if parent:
        above = _spec(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = above.submodule_search_locations
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        with suppress(Exception):
            found: ModuleSpec | None = find(module, path) if find is not None else None
            if found is not None:
                return found
    return None


def _file(module: str) -> Path | None:
    """Return the file of a module (source or compiled library), or None if it has no file.

    For a module in an archive on the path, this is the archive.
    """
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    file = Path(spec.origin)
    return next((path for path in (file, *file.parents) if path.is_file()), file)


@cache
def source(path: Path) -> SourceFile:
    """Return the parsed source of a file, or only a digest of its bytes if it is not Python."""
    return parsed(path.read_bytes())


def parsed(content: bytes) -> SourceFile:
    """Return the parsed source that these bytes are, or only their digest if they are none."""
    key = hashlib.sha256(content).hexdigest()
    if key not in _cache():
        _cache()[key] = _read(content)
        _changed.append(key)
    return _cache()[key]


def _read(content: bytes) -> SourceFile:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return SourceFile(hashlib.sha256(content).hexdigest(), [])
    # A module that reads docstrings may depend on its own.
    exact = hashlib.sha256(content).hexdigest() if b"__doc__" in content else ""
    words = ast.get_docstring(tree) or ""
    imports: dict[str, None] = {}
    asks = any(
        isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today")
        for line in tree.body
        if not (isinstance(line, ast.If) and "'__main__'" in ast.unparse(line.test))
        for node in ast.walk(line)
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports |= dict.fromkeys(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            dot = "" if module.endswith(".") else "."
            imports |= dict.fromkeys([module, *(f"{module}{dot}{a.name}" for a in node.names)])
        body = getattr(node, "body", None)
        if isinstance(body, list):
            # Remove docstrings, including those of attributes.
            node.body = [  # type: ignore[attr-defined]
                line
                for line in body
                if not (
                    isinstance(line, ast.Expr)
                    and isinstance(line.value, ast.Constant)
                    and isinstance(line.value.value, str)
                )
            ]
    dated = asks and any(name.partition(".")[0] == "datetime" for name in imports)
    digest = exact or hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return SourceFile(digest, list(imports), words, dated)


_changed: list[str] = []


def _cache_file() -> Path:
    version = ".".join(map(str, sys.version_info[:2]))
    return user_folder() / f"sources-{version}.json"


@cache
def _cache() -> dict[str, SourceFile]:
    """Return the parse results that were saved earlier, by the hash of the file, or {}.

    Parsing all files again would take half a second.
    """
    try:
        return msgspec.json.decode(_cache_file().read_bytes(), type=dict[str, SourceFile])
    except (OSError, RuntimeError, msgspec.MsgspecError):
        return {}


def remember() -> None:
    """Save new parse results to the cache file, which keeps the newest 2000; ignore failures."""
    if not _changed:
        return
    _changed.clear()
    newest = dict(list(_cache().items())[-2000:])
    with suppress(OSError, RuntimeError):
        file = _cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}")
        temporary.write_bytes(msgspec.json.encode(newest))
        temporary.replace(file)
