"""Observe this process: what does the code of implementations read while it runs?

The imports in source code do not show all: a module may be imported under a computed name, from a
folder without `__init__.py` or as a dependency of a dependency; a library may be loaded by
`ctypes`, numbers from a file. So a process observes itself by an audit hook, `sys.modules`,
`os.environ`, functions such as `os.stat`, the finders of modules and the list of files that are
mapped into memory.

Absence is an input too: code may ask whether a file or a module is there, or which files a folder
has, and does something else as soon as there is another. This is noted only where the project's own
code asks; packages look for hundreds of files and modules that nobody will ever add.

What the project's own code does that cannot be observed, such as starting a process, is an input
that is never the same, so its items are run in every run. What packages do is not among this: many
start processes or read the clock when they are imported.
"""

from __future__ import annotations

import os
import platform
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from conformance.records.record import CHANGED
from conformance.running.inputs import (
    ASKED,
    INSTALLED,
    LIBRARY,
    RUNNERS,
    STANDARD,
    digest,
    is_of_the_suite,
    may_pass,
    name_of,
    package_of,
    source_of,
    variable,
)
from conformance.running.provenance import parsed

_LOOKING_UP = tuple(
    os.path.join(STANDARD[0], *name.split("/")) for name in ("ctypes/util.py", "platform.py")
)
"""Modules of the standard library that start programs to learn something of the system."""

_SHOWING = tuple(
    os.path.join(STANDARD[0], name) for name in ("traceback.py", "warnings.py", "logging")
)
"""Modules of the standard library that show lines of code."""

_STARTING = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"), "a program"),
    **dict.fromkeys(("os.fork", "os.forkpty"), "a process"),
}
"""The audit events of starting something, and what."""

_NETWORK = frozenset(
    f"socket.{name}"
    for name in (
        *("bind", "connect", "sendto", "sendmsg"),
        *("getaddrinfo", "gethostbyaddr", "gethostbyname", "getnameinfo"),
    )
)
"""The audit events of using a network."""

_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
"""The flags of opening a file of which not what was there before is read."""

_IN_C = (
    *("fopen", "fopen64", "freopen", "open", "open64", "openat", "opendir", "shm_open"),
    *("system", "popen", "fork", "vfork", "posix_spawn", "posix_spawnp"),
    *("execl", "execlp", "execv", "execve", "execvp"),
    *("socket", "connect", "getaddrinfo", "gethostbyname", "gethostname"),
    *("time", "gettimeofday", "syscall"),
)
"""Functions of C that read what no observer sees."""

_FILES_IN_CPP = re.compile(rb"\0[^\0]*basic_(?:filebuf|ifstream|fstream)[^\0]*\0")

_STRINGS = re.compile(rb"""["']([^"'\n]{0,200}[./][^"'\n]{0,200})["']""")
"""String constants in Python that may name a file."""

_ZONE = "/etc/localtime"
"""The file with the time zone of the system."""


class _Observer:
    """The observer of this process."""

    def __init__(self) -> None:
        self.home = os.getcwd()
        self._began = time.time()
        self._names: dict[str, str | None] = dict.fromkeys(
            ("variable PYTHONPATH", "variable LD_LIBRARY_PATH")
        )
        """What was read, with a digest of what was absent then and may be there soon."""
        if "TZ" not in os.environ:
            self._names[f"file {_ZONE}"] = None
        self._written: set[str] = set()
        self._path: list[str] = []
        self._unseen: set[str] = set()
        # Python may have imported some of the project's when it started.
        self._modules = {
            name
            for name, module in sys.modules.items()
            if not _is_own(_held(module, "__file__") or "")
        }
        self._mapped = _mapped()
        self._links = self._loads = False
        self._digests: dict[str, str] = {}
        sys.addaudithook(self._heard)
        # Finders are asked in turn, so the last one hears of every module that is not there.
        sys.meta_path.append(self)  # type: ignore[arg-type]
        self._watch_variables()
        self._watch_functions()
        self._watch_distributions()
        self._watch_processes()

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> None:
        """Note where the module `name` was looked for in vain."""
        frame = sys._getframe(1)
        if not _is_of_the_project(frame):
            return
        # Workers are started with "-c", which is no file in the current folder.
        program = (
            os.path.dirname(os.path.abspath(sys.argv[0])) if os.path.isfile(sys.argv[0]) else ""
        )
        for folder in sys.path if path is None else path:
            standard = folder.startswith(STANDARD) and not package_of(os.path.join(folder, name))
            if folder != program and not standard:
                self._note(os.path.join(folder, name.rpartition(".")[2]), "module", frame)

    def _watch_variables(self) -> None:
        kind = type(os.environ)
        look_up, list_all = kind.__getitem__, kind.__iter__

        def observed(environment: os._Environ[Any], name: Any) -> Any:
            if isinstance(name, str | bytes) and _is_of_an_implementation(sys._getframe(1)):
                self._names |= variable(os.fsdecode(name))
            return look_up(environment, name)

        def listed(environment: os._Environ[Any]) -> Iterator[Any]:
            if _is_of_the_project(sys._getframe(1)):
                self._names["variables"] = None
            return list_all(environment)

        kind.__getitem__ = observed  # type: ignore[method-assign]
        kind.__iter__ = listed  # type: ignore[method-assign]

    def _watch_functions(self) -> None:
        def status(frame: FrameType, path: Any = None, *_: Any, **options: Any) -> None:
            if self._is_asked(path, frame) and not options.get("dir_fd"):
                self._note(path, frame=frame)

        def link(frame: FrameType, path: Any = None, *_: Any, **options: Any) -> None:
            if self._is_asked(path, frame) and not options.get("dir_fd"):
                self._note(path, "link", frame)

        def clock(frame: FrameType, *_: Any) -> None:
            # Not where the library reads it for the code, as in each message of a log.
            if _is_own(frame.f_code.co_filename):
                self._cannot_see("it reads the clock", frame)

        def now_at(place: int) -> Callable[..., None]:
            def without_time(frame: FrameType, *arguments: Any) -> None:
                if len(arguments) <= place or arguments[place] is None:
                    clock(frame)

            return without_time

        def clock_of_system(frame: FrameType, which: Any = None, *_: Any) -> None:
            if which == getattr(time, "CLOCK_REALTIME", which):
                clock(frame)

        def beside(frame: FrameType, path: Any = None, *_: Any, **options: Any) -> None:
            # The audit event of opening a file does not tell to which folder it is relative.
            folder = _of_descriptor(options.get("dir_fd"))
            if folder and _is_own(frame.f_code.co_filename):
                self._note(os.path.join(folder, os.fsdecode(path)), frame=frame)

        _watch(os, "open", beside)
        for name in ("stat", "lstat", "access"):
            _watch(os, name, status)
        _watch(os, "readlink", link)
        for name in ("clock_gettime", "clock_gettime_ns"):
            _watch(time, name, clock_of_system)
        for name in ("time", "time_ns"):
            _watch(time, name, clock)
        for name in ("localtime", "gmtime", "ctime", "asctime"):
            _watch(time, name, now_at(0))
        _watch(time, "strftime", now_at(1))
        for module in (os, platform):
            for name in ASKED[module.__name__]:
                _watch(module, name, self._asking(f"{module.__name__}.{name}"))

    def _is_asked(self, path: Any, frame: FrameType) -> bool:
        """Return whether own code asks for a path, or calls a package that asks for its files."""
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        if _is_of_the_project(frame):
            return True
        file = os.path.abspath(os.fsdecode(path))
        return file.startswith(self.home + os.sep) and _is_called(frame)

    def _asking(self, function: str) -> Callable[[FrameType], None]:
        def asked(frame: FrameType) -> None:
            # `platform` asks for the name of the host even if it is to tell the processor only.
            if frame.f_code.co_filename != platform.__file__ and _is_of_the_project(frame):
                self._names[f"system {function}"] = None

        return asked

    def _watch_distributions(self) -> None:
        discover = metadata.Distribution.discover

        def observed(**options: Any) -> Any:
            if _is_of_the_project(sys._getframe(1)):
                context = options.get("context")
                name = options.get("name") or getattr(context, "name", None)
                self._names[f"distribution {name}" if name else "distributions"] = None
            return discover(**options)

        metadata.Distribution.discover = observed  # type: ignore[assignment, method-assign]

    def _watch_processes(self) -> None:
        start = BaseProcess.start

        def observed(process: Any) -> None:
            frame = sys._getframe(1)
            given = (getattr(process, "_target", None), *getattr(process, "_args", ()))
            codes = filter(None, (getattr(each, "__code__", None) for each in given))
            own = any(_is_own(code.co_filename) for code in codes)
            if own or _is_of_the_project(frame):
                self._cannot_see("it starts a process", frame)
            start(process)

        BaseProcess.start = observed  # type: ignore[assignment, method-assign]

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            frame = sys._getframe(1)
            if isinstance(path, str | bytes) and _is_of_an_implementation(frame):
                if {*"wax"} & {*(mode or "")} or (flags or 0) & _WRITING:
                    self._changes(path, frame)
                    return
                data = path[-3:] in (".py", b".py") and _is_of_the_project(frame)
                kind = "text" if data and not _is_code(frame) else "file"
                self._note(path, kind, frame)
        elif event in ("os.remove", "os.rename", "os.rmdir", "os.truncate"):
            for path in arguments[: 2 if event == "os.rename" else 1]:
                if isinstance(path, str | bytes | os.PathLike):
                    self._changes(path, sys._getframe(1))
        elif event in ("ctypes.dlopen", "sqlite3.connect"):
            self._links = True
            if isinstance(arguments[0], str | bytes) and os.path.isfile(arguments[0]):
                self._note(arguments[0], frame=sys._getframe(1))
        elif event == "ctypes.dlsym":
            name, frame = arguments[1], sys._getframe(1)
            if name in (
                *_IN_C,
                "getenv",
                "secure_getenv",
                "environ",
                "mmap",
            ) and _is_of_the_project(frame):
                self._cannot_see(f"it calls {name} of C", frame)
        elif event in ("os.listdir", "os.scandir"):
            path = "." if arguments[0] is None else arguments[0]
            frame = sys._getframe(1)
            finding = "importlib" in frame.f_code.co_filename
            if isinstance(path, int):
                path = _of_descriptor(path)
            if not finding and self._is_asked(path, frame):
                self._note(path, "folder", frame)
        elif event in _STARTING:
            frame = sys._getframe(1)
            if _is_of_the_project(frame) and not _is_looking_up(frame):
                self._cannot_see(f"it starts {_STARTING[event]}", frame)
        elif event == "socket.gethostname":
            self._asking(event)(sys._getframe(1))
        elif event in _NETWORK:
            frame = sys._getframe(1)
            far = event == "socket.connect" and isinstance(arguments[1], tuple)
            if _is_called(frame) if far else _is_of_the_project(frame):
                self._cannot_see("it uses the network", frame)

    def _changes(self, path: str | bytes | os.PathLike[Any], frame: FrameType) -> None:
        """Note that a file is changed now: what own code read before it did is no longer there."""
        file = os.path.abspath(os.fsdecode(path))
        if f"{os.sep}__pycache__{os.sep}" in file:  # what an import writes
            return
        if file not in self._written and _is_of_the_project(frame):
            name = name_of(file, self.home)
            # With no digest yet, it was there.
            if name and (self._names.get(name, "") is None or self._digests.get(name)):
                self._cannot_see(f"it reads {os.path.basename(file)} and changes it", frame)
        self._written.add(file)

    def _note(
        self,
        path: str | bytes | os.PathLike[Any],
        kind: str = "file",
        frame: FrameType | None = None,
    ) -> None:
        """Note a file that is read now; `frame` is the innermost one of the code that reads it."""
        # At once, because the process may go to another folder and come back.
        file = os.path.abspath(source_of(os.fsdecode(path)))
        name = name_of(file, self.home, kind)
        if not name:
            return
        known: str | None = None
        if may_pass(file, self.home):
            # Caches and temporary files count if own code uses what was there before it ran.
            if frame is None or not _is_called(frame):
                return
            if file.startswith(("/proc/", "/sys/")):
                if os.path.isfile(file) and _is_of_the_project(frame):
                    self._cannot_see(f"it reads {file}, which changes by itself", frame)
                return
            try:
                status = os.stat(file)
            except (OSError, ValueError):
                # What a package finds absent in its cache it makes.
                if not _is_of_the_project(frame):
                    return
            else:
                if status.st_ctime >= self._began or not (
                    stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
                ):
                    return
        # What was absent may be made now, and the next process finds it.
        if kind != "module" and not os.path.lexists(file):
            known = ""
        self._names.setdefault(name, known)

    def _cannot_see(self, what: str, frame: FrameType | None = None) -> None:
        """Note what cannot be seen, with the first place in own code that does it."""
        if what in self._unseen:
            return
        self._unseen.add(what)
        while frame is not None and not _is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None:
            what += f" ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
        self._names[f"unseen {what}"] = None

    def _note_path(self) -> None:
        """Note what may hide modules, in the folders where modules are looked for first."""
        if self._path == sys.path:
            return
        self._path = [*sys.path]
        for folder in map(os.path.abspath, self._path):
            inside = (folder + os.sep).startswith(f"{self.home}{os.sep}")
            other = folder.startswith((*STANDARD, sys.prefix, sys.base_prefix)) and not inside
            if not other and not {*INSTALLED} & {*Path(folder).parts} and os.path.isdir(folder):
                name = os.path.relpath(folder, self.home) if inside else folder
                self._names[f"modules {name}"] = None

    def _note_module(self, name: str, file: str) -> None:
        """Note where a module of the project could be, up to the place where it is."""
        parent, _, last = name.rpartition(".")
        folders = _held(sys.modules.get(parent), "__path__") or () if parent else sys.path
        for folder in [*folders]:
            place = os.path.join(folder, last)
            if _is_own(place) and not place.startswith(sys.prefix):
                self._note(place, "module")
            if os.path.abspath(file).startswith((f"{place}.", f"{place}{os.sep}")):
                break

    def _look_into(self, name: str) -> None:
        """Note what code that is an input can read, or do unseen, if this is found by its names."""
        kind, _, which = name.partition(" ")
        path = Path(self.home, which)
        if kind != "file" or not (path.suffix == ".py" or LIBRARY.search(path.name)):
            return
        content = b""
        with suppress(OSError, ValueError):
            content = path.read_bytes()
        if path.suffix == ".py":
            if content and parsed(content).dated:
                self._cannot_see(f"{path.name} can read the clock")
            # Compiled code of a package may read a file that this names.
            for found in {*_STRINGS.findall(content)}:
                for folder in (self.home, path.parent):
                    file = os.path.join(folder, os.fsdecode(found))
                    if os.path.isfile(file) and os.path.abspath(file) not in self._written:
                        self._note(file)
            return
        if may_pass(str(path), self.home) or str(path).startswith((sys.prefix, sys.base_prefix)):
            return
        self._loads |= b"dlopen" in content
        # As C spells them, and as macOS does.
        called = [
            name
            for name in _IN_C
            if any(b"\0%s%s\0" % (mark, name.encode()) in content for mark in (b"", b"_"))
        ]
        called += ["std::fstream"] if _FILES_IN_CPP.search(content) else []
        if called:
            self._cannot_see(f"{path.name} can call {' and '.join(called[:3])}")

    def look(self) -> dict[str, str]:
        """Return what was read for the first time since the last call, with digests."""
        loaded = []
        for name in [name for name in [*sys.modules] if name not in self._modules]:
            self._modules.add(name)
            module = sys.modules.get(name)
            file = _held(module, "__file__")
            if isinstance(file, str):
                loaded.append(file)
            else:  # a package without __init__.py, which any later one hides
                file = next(iter(_held(module, "__path__") or ()), "")
            if isinstance(file, str) and _is_own(file):
                self._note_module(name, file)
        self._note_path()
        mapped: set[str] = set()
        # The list is long where programs are compiled, so it is read only if it may be another.
        if loaded or self._links or self._loads:
            mapped = _mapped() - self._mapped
            self._mapped |= mapped
            self._links = False
        # Some modules have the name of a file that never was, and a mapped one may be deleted.
        for file in filter(os.path.isfile, [*loaded, *mapped]):
            self._note(file)
        for name in [name for name in self._names if name not in self._digests]:
            self._look_into(name)
        names = self._names
        self._names = {}
        found: dict[str, str] = {}
        for name, known in names.items():
            before = self._digests.get(name)
            # Files of a package are opened again and again; a run installs none.
            if before is not None and name.startswith("package "):
                continue
            now = digest(name, self.home) if known is None else known
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


def _held(module: Any, name: str) -> Any:
    """Return an attribute that a module holds, or None; it is not asked to make one.

    Modules that stand for what is not installed raise whatever attribute is asked for, and others
    import something then.
    """
    with suppress(AttributeError):
        return object.__getattribute__(module, "__dict__").get(name)
    return None


class _Watched:
    """A function that is told of before it is called.

    It is no function of Python, because these become methods where a class holds them.
    """

    def __init__(self, function: Any, told: Callable[..., None]) -> None:
        self._function, self._told = function, told

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with suppress(TypeError):  # the function itself rejects arguments that it does not take
            self._told(sys._getframe(1), *arguments, **options)
        return self._function(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> str:
        return str(self._function.__name__)


def _watch(module: ModuleType, name: str, told: Callable[..., None]) -> None:
    """Have `told` called with the calling frame and the arguments of a function, if it is there."""
    function = getattr(module, name, None)
    if function is None:
        return
    watched = _Watched(function, told)
    # Others ask these sets whether a function of `os` takes their arguments.
    sets = ("supports_fd", "supports_dir_fd", "supports_follow_symlinks", "supports_effective_ids")
    for able in (getattr(os, each) for each in sets):
        if function in able:
            able.add(watched)
    setattr(module, name, watched)


def _at_work(frame: FrameType | None) -> str:
    """Return the file of the code at work, or "": that of the first frame not of the library.

    `frame` is the innermost frame, and the library is Python's own.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<frozen", *STANDARD)) or package_of(file):
            return file
        frame = frame.f_back
    return ""


def _is_of_an_implementation(frame: FrameType | None) -> bool:
    """Return whether the code of an implementation, or a package that it uses, is at work."""
    file = _at_work(frame)
    return bool(file) and not is_of_the_suite(file) and package_of(file) not in RUNNERS


def _is_of_the_project(frame: FrameType | None) -> bool:
    """Return whether the code of an implementation that is no installed package is at work."""
    return _is_own(_at_work(frame))


def _is_called(frame: FrameType | None) -> bool:
    """Return whether the project's own code is at work, or has called what is, by no import."""
    within = False
    while frame is not None:
        file = frame.f_code.co_filename
        if within and file.startswith("<frozen importlib"):
            return False
        if is_of_the_suite(file):
            return False
        if package_of(file):
            within = True
        elif _is_own(file):
            return True
        frame = frame.f_back
    return False


def _is_code(frame: FrameType | None) -> bool:
    """Return whether Python is opened to be imported, or to be shown in a traceback or warning."""
    while frame is not None and frame.f_code.co_filename.startswith(("<frozen", *STANDARD)):
        if frame.f_code.co_filename.startswith(
            ("<frozen importlib", "<frozen zipimport", *_SHOWING)
        ):
            return True
        frame = frame.f_back
    return False


def _is_looking_up(frame: FrameType | None) -> bool:
    """Return whether the library starts a program to learn something of the system."""
    while frame is not None and frame.f_code.co_filename.startswith(STANDARD):
        if frame.f_code.co_filename in _LOOKING_UP:
            return True
        frame = frame.f_back
    return False


def _is_own(file: str) -> bool:
    """Return whether a file is of the project: not of Python, the suite or an installed package."""
    other = not file or file.startswith(("<frozen", *STANDARD)) or is_of_the_suite(file)
    return not other and not package_of(file)


def _of_descriptor(descriptor: int | None) -> str:
    """Return the path of an open folder, or "" where the system does not tell."""
    with suppress(OSError):
        return "" if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


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
