"""What the code of implementations reads while it runs: files, packages and environment variables.

A result is valid only while all of these are as they were. The imports in source code do not show
all of them: a module may be imported under a computed name, from a folder without `__init__.py` or
as a dependency of a dependency; a library may be loaded by `ctypes`, numbers from a file. So a
process observes itself by an audit hook, `sys.modules` and `os.environ`. What compiled code reads
by itself is not seen.

Inputs are named "file PATH", "package NAME" or "variable NAME", and each has a digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import FrameType

from conformance.records.record import CHANGED
from conformance.running.provenance import distributions, parsed

_SUITE = f"{Path(__file__).parent.parent}{os.sep}"
_SUITE_ADAPTERS = f"{os.sep}adapters{os.sep}"
_INSTALLED = ("site-packages", "dist-packages")
_DESCRIBED = re.compile(r"\.(dist|egg)-info[/\\]")
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SYSTEM = tuple(f"/{name}/" for name in ("proc", "sys", "dev", "etc", "usr", "lib", "lib64"))
_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "rich", "hypothesis"})
"""Packages that run the suite, so what they read is no input of an implementation."""
_PLACES = frozenset({"HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP"})
"""Variables that say where something is and who runs it; a change of these changes no result."""
_LARGE = 64 * 2**20
"""The size in bytes above which a file is known by its size and time, not by its content."""


class _Observer:
    """The observer of this process."""

    def __init__(self) -> None:
        self._opened: dict[str, None] = {}
        self._variables: dict[str, None] = {}
        self._modules = {*sys.modules}
        self._digests: dict[str, str] = {}
        sys.addaudithook(self._heard)
        kind = type(os.environ)
        look_up = kind.__getitem__

        def observed(environment: os._Environ[str], name: str) -> str:
            if isinstance(name, str) and _is_of_an_implementation(sys._getframe(1)):
                self._variables[name] = None
            return look_up(environment, name)

        kind.__getitem__ = observed  # type: ignore[method-assign, assignment]

    def _heard(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (
                isinstance(path, str | bytes)
                and not (isinstance(mode, str) and {*"wax+"} & {*mode})
                and not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
                and _is_of_an_implementation(sys._getframe(1))
            ):
                self._opened[os.fsdecode(path)] = None
        elif event == "ctypes.dlopen" and isinstance(arguments[0], str):
            self._opened[arguments[0]] = None

    def look(self) -> dict[str, str]:
        """Return what was read for the first time since the last call, with digests."""
        paths = [*self._opened]
        self._opened.clear()
        for name in [name for name in [*sys.modules] if name not in self._modules]:
            self._modules.add(name)
            file = getattr(sys.modules.get(name), "__file__", None)
            paths += [file] if isinstance(file, str) else []
        names = dict.fromkeys(name for path in paths if (name := _input(path)))
        names |= {f"variable {name}": None for name in self._variables if name not in _PLACES}
        self._variables.clear()
        found: dict[str, str] = {}
        for name in names:
            before = self._digests.get(name)
            # Files of a package are opened again and again; a run installs none.
            if before is not None and name.startswith("package "):
                continue
            now = digest(name)
            if before is None or before not in (now, CHANGED):
                self._digests[name] = found[name] = now if before is None else CHANGED
        return found


_observer: _Observer | None = None


def observe() -> None:
    """Begin to observe this process, unless it is observed already."""
    global _observer
    _observer = _observer or _Observer()


def news() -> dict[str, str]:
    """Return what this process has read for the first time since the last call, with digests.

    Return {} if the process is not observed.
    """
    return {} if _observer is None else _observer.look()


def stand(inputs: Mapping[str, str]) -> bool:
    """Return whether all inputs of a result are as they were; False if none is known."""
    return bool(inputs) and all(digest(name) == then for name, then in inputs.items())


def digest(name: str) -> str:
    """Return the digest of an input, or "" if it is not there."""
    kind, _, which = name.partition(" ")
    if kind == "variable":
        value = os.environ.get(which)
        return "" if value is None else _hashed(value.encode("utf-8", "surrogateescape"))
    return _of_package(which) if kind == "package" else _of_file(Path(which))


def _of_file(path: Path) -> str:
    """Return the digest of a file; comments and formatting of Python are left out of it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        content = path.read_bytes()
    except (OSError, ValueError):
        return ""
    return parsed(content).digest[:16] if path.suffix == ".py" else _hashed(content)


def _of_package(name: str) -> str:
    """Return a digest of the lists of files, with their hashes, of the distributions of a package.

    A distribution without such a list is known by its version.
    """
    found = []
    for distribution in sorted({*distributions().get(name, [])}):
        with suppress(metadata.PackageNotFoundError, OSError):
            installed = metadata.distribution(distribution)
            found.append(installed.read_text("RECORD") or installed.version)
    return _hashed("\n".join(found).encode())


def _hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _is_of_an_implementation(frame: FrameType | None) -> bool:
    """Return whether the code of an implementation, or a package that it uses, is at work.

    `frame` is the innermost frame. The first one that is not of the standard library decides.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen", *_STANDARD)) or _package(file):
            return not _is_of_the_suite(file) and _package(file) not in _RUNNERS
        frame = frame.f_back
    return False


def _is_of_the_suite(file: str) -> bool:
    return file.startswith(_SUITE) and _SUITE_ADAPTERS not in file


def _package(file: str) -> str:
    """Return the name of the installed package that a file belongs to, or ""."""
    parts = Path(file).parts
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in _INSTALLED:
            return parts[at + 1].partition(".")[0]
    return ""


def _input(path: str) -> str:
    """Return the name of the input that a file is, or "" if it is none.

    None are files of the suite, whose code has digests of its own, of the standard library and of
    the system, the program that was started, what describes installed packages, and temporary and
    hidden files, which are caches.
    """
    if path.endswith(".pyc"):
        with suppress(ValueError):
            path = importlib.util.source_from_cache(path)
    file, here = os.path.abspath(path), os.getcwd() + os.sep
    if _is_of_the_suite(file) or _DESCRIBED.search(file) or file == os.path.abspath(sys.argv[0]):
        return ""
    if package := _package(file):
        return "" if package in _RUNNERS else f"package {package}"
    inside = file.startswith(here)
    outside = (*_STANDARD, *_SYSTEM, tempfile.gettempdir() + os.sep)
    name = file.removeprefix(here)
    hidden = any(part.startswith(".") for part in Path(name).parts)
    if hidden or (not inside and file.startswith(outside)) or not os.path.isfile(file):
        return ""
    return f"file {name}"
