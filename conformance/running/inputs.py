"""What the code of implementations reads while it runs: files, packages and environment variables.

A result is valid only while all of these are as they were. The imports in source code do not show
all of them: a module may be imported under a computed name, from a folder without `__init__.py` or
as a dependency of a dependency; a library may be loaded by `ctypes`, numbers from a file. So a
process observes itself by an audit hook, `sys.modules`, `os.environ`, `os.stat`, the finders of
modules and the list of files that are mapped into memory. What compiled code reads otherwise, and
what processes that it starts read, is not seen.

Absence is an input too: code may ask whether a file or a module is there, or which files a folder
has, and does something else as soon as there is another. This is noted only where the project's own
code asks; packages look for hundreds of files and modules that nobody will ever add.

Inputs are named "file PATH", "folder PATH", "package NAME", "variable NAME" or "variables", and
each has a digest.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

from conformance.records.record import CHANGED
from conformance.running.provenance import distributions, parsed

_SUITE = f"{Path(__file__).parent.parent}{os.sep}"
_SUITE_ADAPTERS = f"{os.sep}adapters{os.sep}"
_INSTALLED = ("site-packages", "dist-packages")
_DESCRIBED = re.compile(r"\.(dist|egg)-info[/\\]")
_STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "rich", "hypothesis"})
"""Packages that run the suite, so what they read is no input of an implementation."""
_OWN = (".journal", ".lock", ".new")
"""The suffixes of files that the suite itself writes beside a record while it runs."""
_PLACES = frozenset({"HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP"})
"""Variables that say where something is and who runs it; a change of these changes no result."""
_LARGE = 64 * 2**20
"""The size in bytes above which a file is known by its size and time, not by its content."""


class _Observer:
    """The observer of this process."""

    def __init__(self) -> None:
        self.home = os.getcwd()
        self._names: dict[str, None] = {}
        self._modules = {*sys.modules}
        self._mapped = _mapped()
        self._links = False
        self._digests: dict[str, str] = {}
        sys.addaudithook(self._heard)
        # Finders are asked in turn, so the last one hears of every module that is not there.
        sys.meta_path.append(self)  # type: ignore[arg-type]
        self._watch_variables()
        self._watch_status()

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """Note where the module `name` was looked for in vain."""
        if not _is_of_the_project(sys._getframe(1)):
            return
        # Workers are started with "-c", which is no file in the current folder.
        program = (
            os.path.dirname(os.path.abspath(sys.argv[0])) if os.path.isfile(sys.argv[0]) else ""
        )
        for folder in sys.path if path is None else path:
            standard = folder.startswith(_STANDARD) and not _package(os.path.join(folder, name))
            if folder != program and not standard:
                place = os.path.join(folder, name.rpartition(".")[2])
                self._note(place)
                self._note(f"{place}.py")

    def _watch_variables(self) -> None:
        kind = type(os.environ)
        look_up, list_all = kind.__getitem__, kind.__iter__

        def observed(environment: os._Environ[Any], name: Any) -> Any:
            if isinstance(name, str | bytes) and _is_of_an_implementation(sys._getframe(1)):
                self._names |= _variable(os.fsdecode(name))
            return look_up(environment, name)

        def listed(environment: os._Environ[Any]) -> Iterator[Any]:
            if _is_of_the_project(sys._getframe(1)):
                self._names["variables"] = None
            return list_all(environment)

        kind.__getitem__ = observed  # type: ignore[method-assign]
        kind.__iter__ = listed  # type: ignore[method-assign]

    def _watch_status(self) -> None:
        status_of = os.stat

        def observed(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
            named = isinstance(path, str | bytes | os.PathLike) and not options.get("dir_fd")
            if named and _is_of_the_project(sys._getframe(1)):
                self._note(path)
            return status_of(path, *arguments, **options)

        # Others ask these sets whether `os.stat` takes their arguments.
        for able in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if status_of in able:
                able.add(observed)
        os.stat = observed

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if (
                isinstance(path, str | bytes)
                and not (isinstance(mode, str) and {*"wax+"} & {*mode})
                and not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))
                and _is_of_an_implementation(sys._getframe(1))
            ):
                self._note(path)
        elif event in ("ctypes.dlopen", "sqlite3.connect"):
            self._links = True
            if isinstance(arguments[0], str | bytes) and os.path.isfile(arguments[0]):
                self._note(arguments[0])
        elif event in ("os.listdir", "os.scandir"):
            path = "." if arguments[0] is None else arguments[0]
            frame = sys._getframe(1)
            finding = "importlib" in frame.f_code.co_filename
            if not finding and not isinstance(path, int) and _is_of_the_project(frame):
                self._note(path, "folder")
        elif event == "subprocess.Popen" and _is_of_the_project(sys._getframe(1)):
            # What the program reads is not seen, but a compiler is told the names of its sources.
            _, words, folder, _ = arguments
            for word in [words] if isinstance(words, str | bytes | os.PathLike) else words:
                for part in (os.fsdecode(word), *os.fsdecode(word).split()):
                    file = os.path.join(folder or "", part)
                    if os.path.isfile(file):
                        self._note(file)

    def _note(self, path: str | bytes | os.PathLike[Any], kind: str = "file") -> None:
        # At once, because the process may go to another folder and come back.
        if name := _input(os.fsdecode(path), self.home, kind):
            self._names[name] = None

    def look(self) -> dict[str, str]:
        """Return what was read for the first time since the last call, with digests."""
        loaded = []
        for name in [name for name in [*sys.modules] if name not in self._modules]:
            self._modules.add(name)
            file = getattr(sys.modules.get(name), "__file__", None)
            loaded += [file] if isinstance(file, str) else []
        mapped: set[str] = set()
        # The list is long where programs are compiled, so it is read only if it may be another.
        if loaded or self._links:
            mapped = _mapped() - self._mapped
            self._mapped |= mapped
            self._links = False
        # Some modules have the name of a file that never was, and a mapped one may be deleted.
        for file in filter(os.path.isfile, [*loaded, *mapped]):
            self._note(file)
        names = [*self._names]
        self._names.clear()
        found: dict[str, str] = {}
        for name in names:
            before = self._digests.get(name)
            # Files of a package are opened again and again; a run installs none.
            if before is not None and name.startswith("package "):
                continue
            now = digest(name, self.home)
            if before is None or before not in (now, CHANGED):
                self._digests[name] = found[name] = now if before is None else CHANGED
        return found


_observer: _Observer | None = None


def observe() -> None:
    """Begin to observe this process, unless it is observed already, as started in this folder."""
    global _observer
    _observer = _observer or _Observer()
    _observer.home = os.getcwd()


def news() -> dict[str, str]:
    """Return what this process has read for the first time since the last call, with digests.

    Return {} if the process is not observed.
    """
    return {} if _observer is None else _observer.look()


def stand(inputs: Mapping[str, str]) -> bool:
    """Return whether all inputs of a result are as they were; False if none is known."""
    return bool(inputs) and all(digest(name) == then for name, then in inputs.items())


def digest(name: str, home: str = "") -> str:
    """Return the digest of an input, or "" if it is not there.

    Paths are relative to the folder `home`, by default the current one.
    """
    kind, _, which = name.partition(" ")
    if kind == "variables":
        names = sorted(name for name in os.environ if _variable(name))
        return _hashed("\n".join(names).encode("utf-8", "surrogateescape"))
    if kind == "variable":
        value = os.environ.get(which)
        return "" if value is None else _hashed(value.encode("utf-8", "surrogateescape"))
    if kind == "package":
        return _of_package(which)
    return (_of_folder if kind == "folder" else _of_file)(Path(home, which))


def _variable(name: str) -> dict[str, None]:
    """Return the name of the input that a variable is, in a dictionary, or {} if it is none."""
    none = name in _PLACES or name.startswith("PYTEST_")
    return {} if none else {f"variable {name}": None}


def _of_file(path: Path) -> str:
    """Return the digest of a file; comments and formatting of Python are left out of it.

    For a folder, return that it is one: the digest of its names is that of another input.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return "a folder" if stat.S_ISDIR(status.st_mode) else ""
        if status.st_size > _LARGE:
            return f"{status.st_size} {status.st_mtime_ns}"
        content = path.read_bytes()
    except (OSError, ValueError):
        return ""
    return parsed(content).digest[:16] if path.suffix == ".py" else _hashed(content)


def _of_folder(path: Path) -> str:
    """Return a digest of the names in a folder, without caches and what the suite writes."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    kept = [name for name in names if not name.startswith((".", "__pycache__"))]
    return _hashed("\n".join(name for name in kept if not name.endswith(_OWN)).encode())


def _mapped() -> set[str]:
    """Return the paths of what is mapped into memory, or none where the system does not tell.

    They include what compiled code loads by itself, such as a library that another one is linked
    to, or weights.
    """
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    parts = [line.split(maxsplit=5) for line in lines]
    return {part[5] for part in parts if len(part) == 6 and part[5].startswith("/")}


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


def _at_work(frame: FrameType | None) -> str:
    """Return the file of the code at work, or "": that of the first frame not of the library.

    `frame` is the innermost frame, and the library is Python's own.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen", *_STANDARD)) or _package(file):
            return file
        frame = frame.f_back
    return ""


def _is_of_an_implementation(frame: FrameType | None) -> bool:
    """Return whether the code of an implementation, or a package that it uses, is at work."""
    file = _at_work(frame)
    return bool(file) and not _is_of_the_suite(file) and _package(file) not in _RUNNERS


def _is_of_the_project(frame: FrameType | None) -> bool:
    """Return whether the code of an implementation that is no installed package is at work."""
    file = _at_work(frame)
    return bool(file) and not _is_of_the_suite(file) and not _package(file)


def _is_of_the_suite(file: str) -> bool:
    return file.startswith(_SUITE) and _SUITE_ADAPTERS not in file


@lru_cache(maxsize=2**14)
def _package(file: str) -> str:
    """Return the name of the installed package that a file belongs to, or ""."""
    parts = Path(file).parts
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in _INSTALLED:
            return parts[at + 1].partition(".")[0]
    return ""


def _input(path: str, home: str, kind: str = "file") -> str:
    """Return the name of the input that a file is, or "" if it is none.

    None are files of the suite, whose code has digests of its own, of the standard library and of
    the system, the program that was started, what describes installed packages, temporary files
    and those in hidden folders, which are caches. `home` is the folder that names are relative to.
    """
    if path.endswith(".pyc"):
        with suppress(ValueError):
            path = importlib.util.source_from_cache(path)
    file, here = os.path.abspath(path), home + os.sep
    if _is_of_the_suite(file) or _DESCRIBED.search(file) or file == os.path.abspath(sys.argv[0]):
        return ""
    if package := _package(file):
        return "" if package in _RUNNERS else f"package {package}"
    inside = file.startswith(here) or file == home
    outside = (*_STANDARD, *_SYSTEM, tempfile.gettempdir() + os.sep)
    # A checkout may itself lie in a hidden folder, so only those between it and the file count.
    between = Path(os.path.relpath(file, home)).parent.parts
    hidden = any(part.startswith(".") and part != ".." for part in between)
    if hidden or (not inside and file.startswith(outside)):
        return ""
    return f"{kind} {os.path.relpath(file, home) if inside else file}"
