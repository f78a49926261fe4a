"""Compute digests of the code on which a result depends.

An item need not be measured again as long as its result cannot have changed. A result depends on
the adapter and the modules of the same project that it imports, on the checks of the requirements
that use the case, and on code shared by all of these. Source files are parsed, not imported, so
that a run without changes does not wait for a framework.

A digest depends on string constants in code, but not on comments, docstrings or formatting.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec

from conformance.adapter.loading import registered
from conformance.experiments import EXPERIMENTS
from conformance.frameworks import BRIDGES
from conformance.requirements import REQUIREMENTS
from conformance.running.kept import user_folder

SUITE = "conformance"
ROOMS = ("definition", "adapter")
"""The subpackages on which every result depends."""
JUDGING = ("requirements", "experiments")
"""The subpackages of which a digest covers only the modules that are imported, also indirectly."""
BASE = (
    "conformance.frameworks",
    "conformance.frameworks.base",
    "conformance.cases.case",
)
CAUSES = "causes"
"""The key in `revisions()` for the subpackage that explains deviations."""


class Source(msgspec.Struct, frozen=True):
    """A parsed source file: the digest of its code, the modules it imports and its docstring."""

    digest: str
    imports: list[str]
    documentation: str = ""


# Digests of the suite


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
    `JUDGING` that this module imports. That of a requirement begins with its revision number. The
    key "causes" has the digest of the package `causes`: if it changes, deviating items are measured
    again.
    """
    of_module: dict[str, str] = {}

    def revision(module: str) -> str:
        if module not in of_module:
            of_module[module] = _digest(sorted(_closure([module], _judges)))
        return of_module[module]

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
    """Return these modules and those that they import, directly or indirectly.

    Imported modules are included only if `follow` returns True for their names.
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
    """Return the digest of an adapter, its project's modules that it imports, and its bridge.

    The digest includes the versions of installed packages that the adapter and these modules
    import. It is "" if there is no source file; in this case, changes cannot be detected, so
    everything is measured again.

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
    """Return the docstring of the module that defines an implementation, or ""."""
    start = _start(spec)[1]
    return source(start).documentation if start is not None else ""


def _start(spec: str) -> tuple[str, Path | None]:
    """Return the module name or path in an implementation's spec, and its source file.

    The latter is None if there is no source file.
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

    If the import refers to an installed or missing package, add its version or "none" to `packages`
    instead. Ignore the standard library and all modules of the suite except its adapters.

    Args:
        imported: the name in the import statement, with leading dots if it is relative.
        path: the file that contains the statement.
        importer: the name of the module in that file.
        packages: the versions of packages by name.
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
        if top != SUITE and length == 1 and (file is None or _is_installed(file)):
            packages[top] = _version(top) if file is not None else "none"
            return
        if file is not None and (top != SUITE or length > 2):
            yield file, name


def _beside(path: Path, name: str) -> Path | None:
    """Return the file of module `name` in the folder of `path`, which imports it, or None."""
    stem = path.parent.joinpath(*name.split("."))
    candidates = (stem.with_name(stem.name + ".py"), stem / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def _is_installed(file: Path) -> bool:
    return bool({"site-packages", "dist-packages"} & {*file.parts})


_distributions = cache(metadata.packages_distributions)


def _version(package: str) -> str:
    """Return the version of the distribution with the name of an import package.

    If there is none, return the names and versions of all distributions that contain the package;
    "" if there are no such distributions either.
    """
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    names = _distributions().get(package, [])
    return ", ".join(sorted(f"{name} {metadata.version(name)}" for name in {*names}))


# Source files


@cache
def _spec(module: str) -> ModuleSpec | None:
    """Return the spec of a module, or None; unlike `find_spec`, do not import its parents."""
    parent = module.rpartition(".")[0]
    path = None
    if parent:
        above = _spec(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = above.submodule_search_locations
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            found: ModuleSpec | None = find(module, path) if find is not None else None
        except Exception:
            found = None
        if found is not None:
            return found
    return None


def _file(module: str) -> Path | None:
    """Return the file of a module (source or compiled library), or None."""
    spec = _spec(module)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    return Path(spec.origin)


@cache
def source(path: Path) -> Source:
    """Return the parsed source of a file.

    If it is not valid Python, the result has only a digest of its bytes.
    """
    content = path.read_bytes()
    key = hashlib.sha256(content).hexdigest()
    if key not in _cache():
        _cache()[key] = _read(content)
        _changed.append(key)
    return _cache()[key]


def _read(content: bytes) -> Source:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return Source(hashlib.sha256(content).hexdigest(), [])
    words = ast.get_docstring(tree) or ""
    imports: dict[str, None] = {}
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
    return Source(hashlib.sha256(ast.dump(tree).encode()).hexdigest(), list(imports), words)


_changed: list[str] = []


def _cache_file() -> Path:
    version = ".".join(map(str, sys.version_info[:2]))
    return user_folder() / f"code-{version}.json"


@cache
def _cache() -> dict[str, Source]:
    """Return the cached parse results, by the hash of the file.

    Without this cache, parsing all files takes half a second.
    """
    try:
        return msgspec.json.decode(_cache_file().read_bytes(), type=dict[str, Source])
    except (OSError, RuntimeError, msgspec.MsgspecError):
        return {}


def remember() -> None:
    """Save new parse results to the cache file, ignoring failures."""
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
