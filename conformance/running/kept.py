"""Expectations kept on disk: computing them costs more than everything else that a run does.

An expectation follows from the problem, the code of `conformance.definition` and NumPy. A hash of
all three names its file, so nothing stale is ever read, and a checksum inside tells a damaged file.
A cache can only save time: whatever goes wrong with it, the expectation is computed.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from conformance import definition
from conformance.definition.arithmetic import classes_of
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation, expect
from conformance.definition.problem import Problem
from conformance.records import numbers

VARIABLE = "MHA_CONFORMANCE_CACHE"
"""The folder to keep expectations in instead of the user's cache; "off" to keep none."""

MOST_BYTES = 400 * 2**20
"""The whole catalogue in four dtypes takes 65 MB; half of what is there goes when this is full."""


def expectation(problem: Problem) -> Expectation:
    """Return `expect(problem)`, from the disk if it was computed before."""
    folder = cache_folder()
    if folder is None:
        return expect(problem)
    path = folder / f"{_code()}-{problem.digest()}.safetensors"
    found = _read(path, problem)
    if found is None:
        found = expect(problem)
        _write(path, found)
    return found


def cache_folder() -> Path | None:
    """Return the folder of expectations; None if they are not kept."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return None if chosen == "off" else Path(chosen)
    if sys.platform == "win32":
        base, default = "LOCALAPPDATA", "AppData/Local"
    elif sys.platform == "darwin":
        base, default = "XDG_CACHE_HOME", "Library/Caches"
    else:
        base, default = "XDG_CACHE_HOME", ".cache"
    try:
        root = Path(os.environ.get(base) or Path.home() / default)
    except RuntimeError:
        # This user has no home directory.
        return None
    return root / "mha-conformance" / "expectations" if root.is_absolute() else None


@cache
def _code() -> str:
    """Return a hash of the code on which an expectation depends, besides the problem."""
    digest = hashlib.blake2b(np.__version__.encode(), digest_size=6)
    for path in (*sorted(Path(definition.__path__[0]).glob("*.py")), Path(numbers.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, problem: Problem) -> Expectation | None:
    """Return the expectation in this file; None if it is missing or damaged."""
    try:
        tensors = safetensors.numpy.load(path.read_bytes())
        if int(tensors.pop("checksum")[0]) != _checksum(tensors):
            return None
    except (OSError, SafetensorError, LookupError, ValueError):
        return None
    rows: list[dict[str, Array]] = [{}, *({} for _ in classes_of(problem.format))]
    for key in sorted(tensors):
        for row, array in zip(rows, tensors[key], strict=True):
            row[key.partition("|")[2]] = array
    names = [accuracy.name for accuracy in classes_of(problem.format)]
    return Expectation(rows[0], dict(zip(names, rows[1:], strict=True)), problem.format.underflow)


def _write(path: Path, found: Expectation) -> None:
    """Write an expectation atomically."""
    rows = [found.arrays, *found.noise.values()]
    # safetensors sorts by name, so the names begin with the place of the array.
    tensors = {
        f"{place:02}|{name}": np.stack([row[name] for row in rows])
        for place, name in enumerate(found.arrays)
    }
    tensors["checksum"] = np.array([_checksum(tensors)], np.uint64)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path.parent)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
            part = Path(file.name)
            file.write(safetensors.numpy.save(tensors))
        part.replace(path)
    except OSError:
        if part is not None:
            with suppress(OSError):
                part.unlink()


def _checksum(tensors: Mapping[str, np.ndarray]) -> int:
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(f"{name} {tensors[name].shape}".encode(), total)
        total = zlib.crc32(tensors[name].tobytes(), total)
    return total


@cache
def _make_room(folder: Path) -> None:
    """Remove the oldest files, once per process, if the folder is full."""
    files = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    size = sum(status.st_size for status, _ in files)
    if size <= MOST_BYTES:
        return
    for status, path in sorted(files, key=lambda item: item[0].st_mtime):
        if size <= MOST_BYTES // 2:
            return
        path.unlink(missing_ok=True)
        size -= status.st_size
