"""Load adapters by name: built in, `path/to/file.py:Name`, or `package.module:Name`.

A built-in adapter is named by the table `ADAPTERS` of its own module, "torch-mha" to the name of
the class. The tables are read from the source files, so that listing names imports nothing.

Titles are names too where a user means a library's layer, whatever its backend.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.adapter.base import Adapter
from conformance.errors import (
    ConformanceError,
    FailsOnImport,
    NotAnAdapter,
    Unavailable,
    UnknownName,
    WrongDeclaration,
)

GROUP = "conformance.adapters"

BUILT_IN = "conformance.adapters"
"""The package of which every module may have a table `ADAPTERS`."""

_TABLE = re.compile(r"^ADAPTERS = (\{.*?\})$", re.MULTILINE | re.DOTALL)
_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")


def registered() -> dict[str, EntryPoint]:
    """Return the built-in adapters and the entry points of installed packages, by name."""
    points = [*entry_points(group=GROUP), *_built_in()]
    return {point.name: point for point in sorted(points, key=lambda point: point.name)}


@cache
def _built_in() -> tuple[EntryPoint, ...]:
    """Return an entry point for each implementation that the `ADAPTERS` tables name.

    Raises:
        WrongDeclaration: a table that is no literal, or a name that two modules have.
    """
    spec = importlib.util.find_spec(BUILT_IN)
    folders = spec.submodule_search_locations if spec is not None else None
    points: dict[str, EntryPoint] = {}
    for folder in map(Path, folders or ()):
        for file in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
            table = _TABLE.search(file.read_text(encoding="utf-8"))
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join([BUILT_IN, *(part for part in parts if part != "__init__")])
            for name, attribute in _literal(table[1], file).items() if table else ():
                if name in points:
                    raise WrongDeclaration(f"{file}: {points[name].value} is called {name!r} too")
                points[name] = EntryPoint(name, f"{module}:{attribute}", GROUP)
    return tuple(points.values())


def _literal(table: str, file: Path) -> dict[str, str]:
    try:
        found = ast.literal_eval(table)
    except (SyntaxError, ValueError) as error:
        raise WrongDeclaration(f"{file}: ADAPTERS is no literal table") from error
    return dict(found)


def load(spec: str) -> Adapter:
    """Return the adapter that a name, a path or a module denotes.

    Raises:
        UnknownName: no such implementation; the message has the nearest names.
        NotAnAdapter: the file, module or object is there but is no adapter.
        Unavailable: what it imports is not installed.
    """
    known = registered()
    if spec in known:
        return _adapter(_guarded(known[spec].load, spec), spec, spec)
    place, _, attribute = spec.partition(":")
    if place.endswith(".py"):
        module = _guarded(lambda: _from_path(Path(place), spec), spec)
    elif attribute:
        module = _guarded(lambda: _from_module(place, spec), spec)
    else:
        raise UnknownName("implementation", spec, known)
    if not attribute:
        raise NotAnAdapter(f"{spec}: name the adapter in it, {spec}:NAME; {_offer(module)}")
    if not hasattr(module, attribute):
        raise NotAnAdapter(f"{place} has no {attribute!r}; {_offer(module)}")
    return _adapter(getattr(module, attribute), spec, attribute)


def find(spec: str) -> tuple[Adapter, ...]:
    """Return the adapters of this name, title, title without what is in brackets, path or module.

    If you port a model you think in titles: "keras.layers.MultiHeadAttention" is one layer, and
    three adapters, one for each backend. Only such a title has several. No framework is imported.

    Raises:
        UnknownName: there is none; the message has the nearest names and titles.
        NotAnAdapter: a path or module that holds no such adapter.
        Unavailable: what its module imports is not installed.
    """
    known = registered()
    if spec in known or ":" in spec or spec.endswith(".py"):
        return (load(spec),)
    titled = [(adapter.title, adapter) for adapter in _importable()]
    found = [adapter for title, adapter in titled if title == spec]
    found = found or [adapter for title, adapter in titled if _short(title) == spec]
    if not found:
        titles = {name for title, _ in titled for name in (title, _short(title))}
        raise UnknownName("implementation", spec, {*known, *titles})
    return tuple(found)


def _importable() -> Iterator[Adapter]:
    """Yield all registered adapters, except those that a broken package prevents."""
    for name in registered():
        try:
            yield load(name)
        except ConformanceError:
            continue


def _short(title: str) -> str:
    return _BRACKETS.sub("", title)


def _from_path(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise NotAnAdapter(f"{spec}: there is no file {path}")
    name = f"_mha_conformance_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise NotAnAdapter(f"{spec}: there is no module {name!r}") from error
        raise


def _guarded(action: Any, spec: str, fails: str = "does not import") -> Any:
    """Run a third-party import or constructor; report its failure as a one-line error."""
    try:
        return action()
    except (ConformanceError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise Unavailable(f"{spec}: it imports {error.name!r}, which is not installed") from error
    except BaseException as error:
        told = " ".join(str(error).split())
        raise FailsOnImport(f"{spec}: {fails}: {type(error).__name__}: {told}") from error


def adapted(found: Any, name: str) -> Adapter:
    """Return an adapter class or instance as `load` would, with this name if it has none."""
    return _adapter(found, name or "implementation", name)


def _adapter(found: Any, spec: str, default_name: str) -> Adapter:
    if inspect.isclass(found) and issubclass(found, Adapter):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise NotAnAdapter(f"{spec}: {found.__name__} does not define {missing}")
        found = _guarded(found, spec, f"{found.__name__}() fails")
    if not isinstance(found, Adapter):
        raise NotAnAdapter(
            f"{spec}: {type(found).__name__} is no adapter; derive from conformance.Layer, "
            "or decorate a function with conformance.attention_function"
        )
    found.name = found.name or default_name
    found.title = found.title or found.name
    if set(found.name) & set(":[] \t\n"):
        raise WrongDeclaration(f"{spec}: the name {found.name!r} has a colon, bracket or blank")
    for attribute in ("mask_arguments", "modes", "dtypes", "scores"):
        if not isinstance(getattr(found, attribute), tuple | list):
            raise WrongDeclaration(f"{spec}: {attribute} must be a tuple")
    if not found.modes:
        raise WrongDeclaration(f"{spec}: there must be a mode")
    _ = found.masks
    return found


def _offer(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Adapter)
        or (
            inspect.isclass(value)
            and issubclass(value, Adapter)
            and value.__module__ == module.__name__
        )
    ]
    return f"adapters in it: {', '.join(names)}" if names else "there is no adapter in it"
