"""Cache expectations and the catalogue's hash on disk, because they take most of a run's time.

An expectation, which has the reference answer and its noise σ, depends on the problem, on code of
the suite, mostly `conformance.definition`, and on NumPy. The file name contains hashes of these, so
an outdated file is never read, and a checksum in the file detects damage. If a file cannot be read,
its expectation is computed.

The module of an implementation may replace functions of NumPy, or of the suite, in the process that
computes its expectations. They are computed with the functions that were there before, and
`replaced` names the others.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from conformance import cases, definition
from conformance.cases.catalogue import catalogue_hash
from conformance.definition.arithmetic import classes_of
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect
from conformance.definition.problem import Problem
from conformance.records import numbers

VARIABLE = "MHA_CONFORMANCE_CACHE"
"""The environment variable that names the folder of the cache; "off" disables the cache."""

MOST_BYTES = 2 * 2**30
"""The size in bytes above which old files are deleted from the cache.

A run of level "full" takes 50 MB, "large" up to 1 GB.
"""

_AT_ONCE = 100 * 2**20
"""How many bytes a process writes before it checks the size of the cache again."""

_written: dict[Path, int] = {}


def _functions(module: ModuleType) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Return the names of a module's callables, and the callables."""
    found = {name: value for name, value in vars(module).items() if callable(value)}
    return tuple(found), tuple(found.values())


_JUDGES = [
    np,
    np.linalg,
    math,
    numbers,
    *(module for name, module in sys.modules.items() if name.startswith(f"{definition.__name__}.")),
]
"""The modules with which expectations are computed and answers are compared."""

_OWN = [(module, *_functions(module)) for module in _JUDGES]
"""Their functions as they were when this module was imported, before any implementation."""


def _others() -> Iterator[tuple[ModuleType, str, Any, Any]]:
    """Yield each function that was replaced, as (module, name, function then, object now)."""
    for module, names, functions in _OWN:
        now = [*map(vars(module).get, names)]
        # This is asked for every expectation, and almost always in vain.
        if not all(map(operator.is_, now, functions)):
            for name, function, other in zip(names, functions, now, strict=True):
                if other is not function:
                    yield module, name, function, other


def replaced() -> str:
    """Return a text that names a function of NumPy or the suite that was replaced, or ""."""
    found = next(_others(), None)
    if found is None:
        return ""
    name = f"{found[0].__name__}.{found[1]}"
    return f"{name} was replaced in its process, so nothing can be verified there; put it back"


@contextmanager
def _unspoiled() -> Iterator[None]:
    """Return a context with the functions, and NumPy's handling of errors, as they were before."""
    others = list(_others())
    for module, name, function, _ in others:
        setattr(module, name, function)
    try:
        with np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"):
            yield
    finally:
        for module, name, _, now in others:
            setattr(module, name, now)


def expectation(problem: Problem, *, gradients: bool = True, promised: str = "") -> Expectation:
    """Return the expectation of a problem, with or without gradients, from the cache if possible.

    If the expectation is not in the cache, it is computed and written to the cache. Its `sigma` is
    that of the accuracy class `promised`.
    """
    with _unspoiled():
        return _expectation(problem, gradients, promised)


def _expectation(problem: Problem, gradients: bool, promised: str) -> Expectation:
    folder = cache_folder()
    if folder is None:
        return expect(problem, gradients=gradients, promised=promised)
    classes = [item.name for item in classes_of(problem.format, promised)]
    name = f"{_code()}-{problem.digest()}" + ("" if gradients else "-forward")
    if "TF32" in classes:
        name += "-tf32"
    path = folder / f"{name}.safetensors"
    found = _read(path, problem, classes)
    if found is None:
        found = expect(problem, gradients=gradients, promised=promised)
        _write(path, found)
    return found.at_accuracy(promised)


def cache_folder() -> Path | None:
    """Return the folder of the cache, or None if there is no cache.

    There is no cache if the environment variable `VARIABLE` is "off", or if it is not set and the
    user's folder for caches is unknown or not absolute.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return None if chosen == "off" else Path(chosen)
    try:
        folder = user_folder()
    except RuntimeError:
        return None
    return folder / "expectations" if folder.is_absolute() else None


def user_folder() -> Path:
    """Return the suite's folder among the user's caches.

    Raises:
        RuntimeError: the environment names no folder for caches, and there is no home directory.
    """
    if sys.platform == "win32":
        base, default = "LOCALAPPDATA", "AppData/Local"
    elif sys.platform == "darwin":
        base, default = "XDG_CACHE_HOME", "Library/Caches"
    else:
        base, default = "XDG_CACHE_HOME", ".cache"
    return Path(os.environ.get(base) or Path.home() / default) / "mha-conformance"


@cache
def hash_of_catalogue() -> str:
    """Return `catalogue_hash()`, from the cache if possible, because it draws every input."""
    folder = cache_folder()
    if folder is None:
        return catalogue_hash()
    path = folder / f"{_code(cases)}-catalogue"
    with suppress(OSError, ValueError):
        kept, checksum = path.read_text("ascii").split()
        if int(checksum) == zlib.crc32(kept.encode()):
            return kept
    with _unspoiled():
        found = catalogue_hash()
    _replace(path, f"{found} {zlib.crc32(found.encode())}".encode())
    return found


@cache
def _code(*rooms: ModuleType) -> str:
    """Return a hash of the code and tables on which expectations, and `rooms`, depend, and of
    NumPy's version."""
    digest = hashlib.blake2b(np.__version__.encode(), digest_size=6)
    for room in (definition, *rooms):
        for path in sorted(Path(room.__path__[0]).glob("*.*")):
            digest.update(path.read_bytes())
    digest.update(Path(numbers.__file__).read_bytes())
    return digest.hexdigest()


def _read(path: Path, problem: Problem, classes: Sequence[str]) -> Expectation | None:
    """Return the expectation of a problem from a file; None if the file is missing or damaged.

    `classes` are the names of the accuracy classes in the file.
    """
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
        if int(tensors.pop("checksum")[0]) != _checksum(tensors):
            return None
    except (OSError, SafetensorError, LookupError, ValueError):
        return None
    arrays: dict[str, Array] = {}
    noise: dict[str, dict[str, Array]] = {name: {} for name in classes}
    for key in sorted(key for key in tensors if not key.endswith(_NOISE)):
        name = key.partition("|")[2]
        arrays[name] = tensors[key]
        for sigmas, sigma in zip(noise.values(), tensors[key + _NOISE], strict=True):
            sigmas[name] = sigma.astype(np.float64)
    return Expectation(arrays, noise, problem.format.underflow)


def _write(path: Path, found: Expectation) -> None:
    """Write an expectation to a file, ignoring failures."""
    # safetensors sorts by name, so the names begin with the index of the array.
    tensors: dict[str, np.ndarray] = {}
    for place, (name, array) in enumerate(found.arrays.items()):
        sigmas = np.stack([each[name] for each in found.noise.values()])
        with np.errstate(over="ignore", under="ignore"):
            narrow = sigmas.astype(np.float32)
        tensors[f"{place:02}|{name}"] = np.ascontiguousarray(array)
        exact = np.array_equal(narrow, sigmas)
        tensors[f"{place:02}|{name}{_NOISE}"] = narrow if exact else sigmas
    tensors["checksum"] = np.array([_checksum(tensors)], np.uint64)
    _replace(path, safetensors.numpy.save(tensors))


def _replace(path: Path, content: bytes) -> None:
    """Write a file of the cache atomically, ignoring failures."""
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent, len(content))
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(content)
        part.replace(path)
    except OSError:
        if part is not None:
            with suppress(OSError):
                part.unlink()


def _checksum(tensors: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(f"{name} {tensors[name].shape}".encode(), total)
        total = zlib.crc32(np.ascontiguousarray(tensors[name]).data, total)
    return total


_NOISE = "|noise"
"""The suffix of tensors with the noise σ of each accuracy class.

These tensors are in float32 if that represents all of their numbers exactly, or else in float64.
"""


def _make_room(folder: Path, size: int) -> None:
    """If the cache has more than `MOST_BYTES`, delete the oldest files until it has at most half.

    The size of the cache is determined when a process first writes to it, and again each time the
    process has written another `_AT_ONCE` bytes. `size` is the number of bytes to be written next.
    """
    _written[folder] = _written.get(folder, _AT_ONCE) + size
    if _written[folder] <= _AT_ONCE:
        return
    _written[folder] = 0
    files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    size = sum(status.st_size for status, _ in files)
    if size <= MOST_BYTES:
        return
    for status, path in sorted(files, key=lambda item: item[0].st_mtime):
        if size <= MOST_BYTES // 2:
            return
        path.unlink(missing_ok=True)
        size -= status.st_size
