"""Load adapters by a registered name, `path/to/file.py:Name`, or `package.module:Name`.

Names are registered by the entry points of installed packages and by the built-in adapters. The
tables `ADAPTERS` of modules in `adapters/` map names such as "torch-mha" to names of classes.
The tables are read from the source files, so that listing names imports nothing.

Some commands also accept titles: "keras.layers.MultiHeadAttention" stands for the adapters of that
layer for all its backends.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, get_args
from weakref import WeakKeyDictionary

import numpy as np

from conformance.adapter.arguments import CausalFlag, MaskArgument
from conformance.adapter.base import (
    PROMISES,
    Adapter,
    Mode,
    Promise,
    ReturnedStatistic,
    check_promises,
)
from conformance.adapter.code import Example
from conformance.adapter.native import Layer
from conformance.adapter.parameters import Parameter
from conformance.definition.dtypes import DTYPES
from conformance.definition.geometry import Fixed, Geometry
from conformance.definition.problem import Score
from conformance.errors import (
    ConformanceError,
    FailsOnImport,
    NotAnAdapter,
    Unavailable,
    UnknownName,
    WrongDeclaration,
    check_names,
)
from conformance.text import message, short
from conformance.words import tables

GROUP = "conformance.adapters"

BUILT_IN = "conformance.adapters"
"""The package whose modules define the built-in adapters in tables named `ADAPTERS`."""

_TABLES = {
    name: re.compile(rf"^{name} = (\{{.*?\}})$", re.MULTILINE | re.DOTALL)
    for name in ("ADAPTERS", "CHECKPOINTS")
}
_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")


def registered() -> dict[str, EntryPoint]:
    """Return the entry points of the built-in adapters and of installed packages, by name.

    A built-in adapter takes precedence over a package's adapter of the same name.
    """
    points = [*_installed(tuple(sys.path)), *_built_in()]
    return {point.name: point for point in sorted(points, key=lambda point: point.name)}


@cache
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages, cached because reading them takes 0.1 s.

    `path` is the current `sys.path`; the entry points are read again if it has changed.
    """
    del path
    return tuple(entry_points(group=GROUP))


def checkpoints() -> dict[str, EntryPoint]:
    """Return the entry points of layers of trained models, by the `model_type` of the models.

    These are the classes in the tables `CHECKPOINTS` of the modules in `adapters/`.
    """
    return {point.name: point for point in _built_in("CHECKPOINTS")}


@cache
def _built_in(kind: str = "ADAPTERS") -> tuple[EntryPoint, ...]:
    """Return an entry point for each class in the tables `kind`: "ADAPTERS" or "CHECKPOINTS".

    Raises:
        WrongDeclaration: if a table is not a literal, or two tables contain the same name.
    """
    spec = importlib.util.find_spec(BUILT_IN)
    folders = spec.submodule_search_locations if spec is not None else None
    points: dict[str, EntryPoint] = {}
    for folder in map(Path, folders or ()):
        for file in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]):
            table = _TABLES[kind].search(file.read_text(encoding="utf-8"))
            if table is None:
                continue
            parts = file.relative_to(folder).with_suffix("").parts
            module = ".".join([BUILT_IN, *(part for part in parts if part != "__init__")])
            try:
                adapters = dict(ast.literal_eval(table[1]))
            except (SyntaxError, ValueError) as error:
                raise WrongDeclaration(f"{file}: {kind} is no literal table") from error
            for name, attribute in adapters.items():
                if name in points:
                    raise WrongDeclaration(f"{file}: {points[name].value} is called {name!r} too")
                points[name] = EntryPoint(name, f"{module}:{attribute}", GROUP)
    return tuple(points.values())


def load(spec: str) -> Adapter:
    """Return the adapter for a name, `path/to/file.py:Name` or `package.module:Name`.

    Raises:
        UnknownName: if there is no such implementation; the message suggests similar names.
        NotAnAdapter: if the file or module does not exist, if `spec` does not name an object in it,
            or if that object does not exist or is not an adapter.
        FailsOnImport: if importing the module or constructing the adapter raises an exception.
        WrongDeclaration: if the declarations of the adapter are invalid.
        Unavailable: if a package that the module or the constructor imports is not installed.
    """
    known = registered()
    if spec in known:
        return adapted(_guarded(known[spec].load, spec), spec)
    adapter = adapted(located(spec), spec.partition(":")[2], spec)
    place = spec.partition(":")[0]
    if place.endswith(".py"):
        _HOMES[adapter] = str(Path(place).resolve().parent)
    return adapter


def located(spec: str) -> Any:
    """Return the object that `path/to/file.py:Name` or `package.module:Name` names.

    Raises:
        UnknownName, NotAnAdapter, FailsOnImport, Unavailable: as for `load`.
    """
    place, _, attribute = spec.partition(":")
    if not place.strip():
        raise NotAnAdapter(f"{spec!r} names no implementation; name FILE.py:NAME, or one of `list`")
    if place.endswith(".py"):
        module = _guarded(lambda: _from_path(Path(place), spec), spec)
    elif attribute:
        module = _guarded(lambda: _from_module(place, spec), spec)
    elif Path(place).is_dir():
        raise NotAnAdapter(f"{spec} is a folder; name a file in it and an adapter: FILE.py:NAME")
    else:
        raise UnknownName("implementation", spec, registered())
    if not attribute:
        raise NotAnAdapter(f"{place}: name the adapter in it, {place}:NAME; {_offer(module)}")
    if not hasattr(module, attribute):
        raise NotAnAdapter(f"{place} has no {attribute!r}; {_offer(module, attribute)}")
    return getattr(module, attribute)


def find(spec: str) -> tuple[Adapter, ...]:
    """Return the adapters with this name, location or title.

    If no title is exactly `spec`, a final part of the titles in brackets is ignored.
    A title can denote several adapters: "keras.layers.MultiHeadAttention" is one layer, with one
    adapter for each of three backends. Adapters that fail to load are not found by title.

    Raises:
        UnknownName: if there is no such adapter; the message suggests similar names and titles.
        NotAnAdapter, FailsOnImport, WrongDeclaration, Unavailable: for a name or a location, as for
            `load`.
    """
    known = registered()
    if spec in known or ":" in spec or spec.endswith(".py"):
        return (load(spec),)
    every = tuple(importable())
    short = {adapter.title: _BRACKETS.sub("", adapter.title) for adapter in every}
    found = [adapter for adapter in every if adapter.title == spec]
    found = found or [adapter for adapter in every if short[adapter.title] == spec]
    if not found:
        raise UnknownName("implementation", spec, {*known, *short, *short.values()})
    return tuple(found)


def importable() -> Iterator[Adapter]:
    """Yield all registered adapters, skipping those that fail to load."""
    for name in registered():
        try:
            yield load(name)
        except ConformanceError:
            continue


def _from_path(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise NotAnAdapter(f"{spec}: there is no file {path}")
    name = f"_mha_conformance_{path.stem}_{abs(hash(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    located = importlib.util.spec_from_file_location(name, path)
    assert located is not None
    assert located.loader is not None
    module = importlib.util.module_from_spec(located)
    sys.modules[name] = module
    folder = path.resolve().parent
    _look_in(folder)
    _settle_in(str(folder))
    try:
        located.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_FOLDERS: list[str] = []
"""The folders that were added to `sys.path`, the one whose modules are imported now first."""

_HOMES: WeakKeyDictionary[Adapter, str] = WeakKeyDictionary()
"""The folder of the file of each adapter that was loaded from one."""

_AWAY: dict[tuple[str, str], ModuleType] = {}
"""Modules that are not in `sys.modules` now, by the folder of the adapter and their name."""


def _look_in(folder: Path) -> None:
    """Add the folder to `sys.path`, as Python does with the folder of a script that it runs.

    The folder is searched last, so that no file in it hides an installed package.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
        _FOLDERS.append(str(folder))


def at_home(adapter: Adapter) -> None:
    """Make imports of an adapter find the modules beside its file, if it was loaded from one.

    Adapters in several folders may have modules of one name, and import them when they are called.
    """
    folder = _HOMES.get(adapter, "")
    if folder and _FOLDERS[:1] != [folder]:
        _settle_in(folder)


def _settle_in(folder: str) -> None:
    """Search a folder before those of other adapters, and exchange modules that both have."""
    if folder not in _FOLDERS:
        return
    others = [other for other in _FOLDERS if other != folder]
    # The path of a package without __init__.py follows sys.path.
    known = [(name, _home_of(module, others)) for name, module in list(sys.modules.items())]
    homes = {name: home for name, home in known if home}
    _FOLDERS[:] = [folder, *others]
    # A folder that somebody took off the path stays off; its modules may be there nevertheless.
    searched = [place for place in _FOLDERS if place == folder or place in sys.path]
    sys.path[:] = [place for place in sys.path if place not in _FOLDERS] + searched
    importlib.invalidate_caches()
    for name, _ in known:
        top = name.partition(".")[0]
        if top in homes and (Path(folder, f"{top}.py").is_file() or Path(folder, top).is_dir()):
            _AWAY[homes[top], name] = sys.modules.pop(name)
    for (home, name), module in list(_AWAY.items()):
        if home == folder:
            sys.modules[name] = module
            del _AWAY[home, name]


def _home_of(module: ModuleType, folders: Sequence[str]) -> str:
    """Return the one of these folders in which a module or package lies, or ""."""
    own = vars(module) if isinstance(module, ModuleType) else {}
    place = next(iter(own.get("__path__") or [own.get("__file__") or ""]), "")
    home = os.path.dirname(place)
    return home if home in folders else ""


def _from_module(name: str, spec: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise NotAnAdapter(f"{spec}: there is no module {name!r}") from error
        raise


def _guarded(action: Any, spec: str, fails: str = "does not import") -> Any:
    """Run an import or a constructor, and return its result; turn failures into one-line errors.

    `spec` and `fails` are the subject and the verb of the message.

    Raises:
        Unavailable: if a module that `action` imports is not installed.
        FailsOnImport: if `action` raises anything else. Errors of the suite and `KeyboardInterrupt`
            are not caught.
    """
    try:
        # What a module sets on its import would make the suite raise.
        with np.errstate():
            return action()
    except (ConformanceError, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise Unavailable(f"{spec}: it imports {error.name!r}, which is not installed") from error
    except BaseException as error:
        raise FailsOnImport(f"{spec}: {fails}: {type(error).__name__}: {message(error)}") from error


def adapted(found: Any, name: str, spec: str = "") -> Adapter:
    """Return the adapter for a class or instance, after checking its declarations.

    Args:
        found: a class, which is instantiated, or an instance.
        name: the adapter's name if it declares none.
        spec: the text by which the user chose the adapter, for error messages; "" for `name`.

    Raises:
        NotAnAdapter: if `found` is not an adapter, or lacks the definition of a method.
        FailsOnImport: if the constructor raises an exception.
        WrongDeclaration: if the declarations of the adapter are invalid.
        Unavailable: if a package that the constructor imports is not installed.
    """
    spec = spec or name or "implementation"
    if inspect.isclass(found) and issubclass(found, Adapter):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise NotAnAdapter(f"{spec}: {found.__name__} does not define {missing}")
        found = _guarded(found, spec, f"{found.__name__}() fails")
    if not isinstance(found, Adapter):
        is_named = inspect.isfunction(found) and ":" in spec
        wrap = f"; mha-conformance new-adapter {spec} writes one around it" if is_named else ""
        raise NotAnAdapter(
            f"{spec}: {type(found).__name__} is no adapter{wrap}; derive from conformance.Layer, "
            "or decorate a function with conformance.attention_function; a layer that keeps a "
            "cache derives from conformance.StatefulLayer"
        )
    found.name = found.name or name
    found.title = found.title or found.name
    _check_types(found, spec)
    for attribute in ("modes", "dtypes"):
        if not getattr(found, attribute):
            raise WrongDeclaration(f"{spec}: there must be a {attribute.removesuffix('s')}")
    _check_accuracy(found, spec)
    _check_statistics(found, spec)
    check_promises(found.promises, PROMISES, spec)
    if set(found.name) & set(":[] \t\n"):
        raise WrongDeclaration(f"{spec}: the name {found.name!r} has a colon, bracket or blank")
    for pattern, value in found.conventions.items():
        subject = pattern.partition("(")[0]
        if subject not in tables()["entries"]:
            near = difflib.get_close_matches(subject, tables()["entries"], n=1)
            similar = f"; did you mean {near[0]}?" if near else ""
            raise WrongDeclaration(f"{spec}: conventions: no entry is about {subject!r}{similar}")
        if not isinstance(value, str):
            raise WrongDeclaration(f"{spec}: conventions: the value of {pattern!r} is a text")
    _ = found.masks
    return found


_TUPLES: Mapping[str, tuple[type, str]] = {
    "dtypes": (str, "names of dtypes"),
    "scores": (str, "names of scores"),
    "packages": (str, "names of distributions"),
    "dropout_modes": (str, "names of modes"),
    "mask_arguments": (MaskArgument, "conformance.MaskArgument"),
    "implicit_masks": (MaskArgument, "conformance.MaskArgument"),
    "modes": (Mode, "conformance.Mode"),
    "parameters": (Parameter, "conformance.Parameter"),
}
"""By attribute of an adapter, the type of each element of its tuple, and what to call it."""

_SINGLE: Mapping[str, tuple[Any, str]] = {
    **dict.fromkeys(("name", "title", "documentation", "framework"), (str, "text")),
    **dict.fromkeys(("weights_option", "weights_otherwise", "sequence_first"), (str, "text")),
    **dict.fromkeys(("custom_scale", "differentiable"), (bool, "True or False")),
    "projections_supplied": (bool, "True or False"),
    "causal_flag": (CausalFlag | None, "a conformance.CausalFlag or None"),
    "geometry": (Geometry | None, "a conformance.Geometry or None"),
    "fixed": (Fixed | None, "a conformance.Fixed or None"),
    "example": (Example | None, "a conformance.Example or None"),
    "returns_weights": (str | None, '"per head", "averaged" or None'),
    "fully_masked_row": (str | Mapping | None, "text, a dictionary by mode, or None"),
    **dict.fromkeys(("conventions", "promises"), (Mapping, "a dictionary of texts")),
}
"""By attribute of an adapter, its type, and what to call it."""


def _check_types(adapter: Adapter, spec: str) -> None:
    """Raise `WrongDeclaration` if a declaration has another type, or names what there is not."""
    if not isinstance(getattr(type(adapter), "masks", None), property | cached_property):
        raise WrongDeclaration(
            f"{spec}: masks is made by the suite; declare arguments as mask_arguments"
        )
    for attribute, (kind, called) in _SINGLE.items():
        if not isinstance(value := getattr(adapter, attribute), kind):
            raise WrongDeclaration(
                f"{spec}: {attribute} must be {called}, and is {short(repr(value))}"
            )
    for attribute, (kind, called) in _TUPLES.items():
        if attribute == "parameters" and not isinstance(adapter, Layer):
            continue
        values = getattr(adapter, attribute)
        if not isinstance(values, tuple | list) or not all(isinstance(one, kind) for one in values):
            raise WrongDeclaration(
                f"{spec}: {attribute} must be a tuple of {called}, and is {short(repr(values))}"
            )
    for attribute, known in (("dtypes", tuple(DTYPES)), ("scores", get_args(Score))):
        for one in getattr(adapter, attribute):
            if one not in known:
                raise WrongDeclaration(
                    f"{spec}: {attribute}: there is no {one!r}, only {', '.join(known)}"
                )


def _check_statistics(adapter: Adapter, spec: str) -> None:
    """Raise an error if a declared statistic of rows is none, or is returned in no mode or beside
    another one.

    Raises:
        WrongDeclaration: if it is none, or if a mode returns several.
        UnknownName: if there is no such mode.
    """
    for kind in ReturnedStatistic.__subclasses__():
        declared = getattr(adapter, kind.of.name)
        if not isinstance(declared, kind | None):
            raise WrongDeclaration(
                f"{spec}: {kind.of.name} must be a conformance.{kind.__name__} or None, and is "
                f"{short(repr(declared))}"
            )
        named = () if declared is None else declared.modes
        check_names("mode", named, [mode.name for mode in adapter.modes])
    for mode in adapter.modes:
        several = [*adapter.statistics_in(mode)]
        if len(several) > 1:
            raise WrongDeclaration(
                f"{spec}: mode {mode.name!r} returns one of {' and '.join(several)}; name the "
                "modes of each, modes=(...)"
            )


def _check_accuracy(adapter: Adapter, spec: str) -> None:
    """Raise `WrongDeclaration` if the adapter promises a class that there is not in a dtype."""
    declared = adapter.accuracy
    if not isinstance(declared, Mapping):
        if declared not in get_args(Promise):
            raise WrongDeclaration(
                f"{spec}: accuracy={declared!r}; say 'A', 'A0', 'TF32' or nothing, or a dictionary "
                "by dtype"
            )
        return
    for dtype, promised in declared.items():
        if dtype not in DTYPES:
            raise WrongDeclaration(f"{spec}: accuracy: no dtype is called {dtype!r}")
        is_half = DTYPES[dtype].accumulator < DTYPES[dtype].roundoff
        special = {"A"} if is_half else {"TF32"} if dtype == "float32" else set()
        if promised not in {"", "A0", *special}:
            raise WrongDeclaration(f"{spec}: accuracy: {promised!r} is no promise in {dtype}")


def _offer(module: ModuleType, attribute: str = "") -> str:
    """Return a hint that lists the adapters in a module: instances, and classes defined in it.

    If there is none, the hint lists its functions and other classes, and asks for the one that is
    most like `attribute`.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {
        name: value
        for name, value in public.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    }
    adapters = [
        name
        for name, value in vars(module).items()
        if isinstance(value, Adapter)
        or (name in own and inspect.isclass(value) and issubclass(value, Adapter))
    ]
    if adapters:
        return f"adapters in it: {', '.join(adapters)}"
    if not own:
        return "there is no adapter in it"
    near = difflib.get_close_matches(attribute, own, n=1)
    asked = f"did you mean {near[0]}? " if near else ""
    return f"{asked}functions and classes in it: {', '.join(own)}"
