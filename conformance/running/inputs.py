"""What the code of implementations reads: how each input is named, and its digest.

A result is valid only while all of its inputs are as they were. They are files, packages and
environment variables, named "file PATH", "text PATH" for Python that is read as text, "folder
PATH", "link PATH", "module PATH" for what a module of this name would be found as, "modules FOLDER"
for what hides other modules, "package NAME", "distribution NAME" or "distributions" for what is
installed, "variable NAME" or "variables", "system FUNCTION", and "unseen WHAT" for what cannot be
observed. `conformance.running.observing` finds them out.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from conformance.records.record import CHANGED
from conformance.running.provenance import distributions, parsed

_SUITE = f"{Path(__file__).parent.parent}{os.sep}"
_SUITE_ADAPTERS = f"{os.sep}adapters{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
_DESCRIBED = re.compile(r"\.(dist|egg)-info[/\\]")
STANDARD = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/", "/usr/", "/bin/", "/sbin/", "/lib/", "/lib64/")
RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "rich", "hypothesis"})
"""Packages that run the suite, so what they read is no input of an implementation."""
_OWN = re.compile(r"\.(json\.(journal|lock)|safetensors\.new|json\.new)$|^__pycache__|^\..*cache$")
"""What the names of caches are, and of files that the suite writes beside a record."""
_PLACES = frozenset(
    {"HOME", "PATH", "PWD", "OLDPWD", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "SHLVL", "_"}
)
"""Variables that say where something is and who runs it; a change of these changes no result.

A shell sets the last two for each shell, and for each command."""
_LARGE = 64 * 2**20
"""The size in bytes above which a file is known by its size and time, not by its content."""
ASKED = {
    "os": ("cpu_count", "getlogin", "getuid", "uname"),
    "platform": ("node", "platform", "release", "version"),
    "socket": ("gethostname",),
}
"""Functions without arguments that tell something of the system, by module."""
_MODULES = re.compile(r'^"?([^"\n]+?\.py)"?,', re.MULTILINE)
"""The modules in the list of files of a distribution."""
LIBRARY = re.compile(r"\.(so|dylib|dll|pyd)(\.[\d.]+)?$")
"""What the names of compiled libraries end with."""


def stand(inputs: Mapping[str, str]) -> bool:
    """Return whether all inputs of a result are as they were; False if none is known."""
    return bool(inputs) and all(
        then != CHANGED and digest(name) == then for name, then in inputs.items()
    )


def edited(inputs: Mapping[str, str]) -> list[str]:
    """Return the files of the project that are here, but not as they were read.

    A record may come from another machine, so files that are not here tell nothing.
    """
    home = os.getcwd()
    known = {
        name.removeprefix("file "): then
        for name, then in inputs.items()
        if name.startswith("file ") and then not in ("", CHANGED)
    }
    return [
        file
        for file, then in known.items()
        if not may_pass(os.path.abspath(file), home) and digest(f"file {file}") not in ("", then)
    ]


def unseen(inputs: Mapping[str, str]) -> list[str]:
    """Return texts such as "it starts a program (mine.py:3)", for what cannot be observed."""
    kinds = (name.partition(" ") for name in inputs)
    return [what for kind, _, what in kinds if kind == "unseen"]


def digest(name: str, home: str = "") -> str:
    """Return the digest of an input, or "" if it is not there.

    Paths are relative to the folder `home`, by default the current one.
    """
    kind, _, which = name.partition(" ")
    if kind == "unseen":
        return CHANGED
    if kind == "system":
        module, _, function = which.partition(".")
        known = function in ASKED.get(module, ())
        answer = getattr(importlib.import_module(module), function, None) if known else None
        with suppress(OSError):
            return _hashed(repr(answer and answer()).encode("utf-8", "surrogateescape"))
        return ""
    if kind in ("distribution", "distributions"):
        return _of_distributions(which)
    if kind == "variables":
        names = sorted(name for name in os.environ if variable(name))
        return _hashed("\n".join(names).encode("utf-8", "surrogateescape"))
    if kind == "variable":
        value = os.environ.get(which)
        return "" if value is None else _hashed(value.encode("utf-8", "surrogateescape"))
    if kind == "package":
        return _of_package(which)
    of = {
        **{"folder": _of_folder, "module": _of_module, "modules": _of_modules},
        **{"text": _of_text, "link": _of_link},
    }
    return of.get(kind, _of_file)(Path(home, which))


def variable(name: str) -> dict[str, None]:
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
    if path.suffix == ".py":
        return parsed(content).digest[:16]
    if LIBRARY.search(path.name) and b"getenv" in content:
        content += _named_variables(content)
    return _hashed(content)


def _named_variables(content: bytes) -> bytes:
    """Return the variables whose names are strings in a compiled library, with their values."""
    variables = sorted((name, value) for name, value in os.environ.items() if variable(name))
    pairs = ((os.fsencode(name), os.fsencode(value)) for name, value in variables)
    return b"\0".join(b"%s=%s" % (name, value) for name, value in pairs if name + b"\0" in content)


def _of_folder(path: Path) -> str:
    """Return a digest of the names in a folder, without caches and what the suite writes."""
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return ""
    kept = "\n".join(name for name in names if not _OWN.search(name))
    return _hashed(kept.encode("utf-8", "surrogateescape"))


def _of_text(path: Path) -> str:
    """Return the digest of Python that is read as text, with its comments."""
    with suppress(OSError):
        return _hashed(path.read_bytes())
    return ""


def _of_link(path: Path) -> str:
    with suppress(OSError, ValueError):
        return _hashed(os.readlink(path).encode("utf-8", "surrogateescape"))
    return ""


def _of_module(path: Path) -> str:
    """Return the forms in which there is a module of this name, in the order of preference."""
    forms = (os.sep, f"{os.sep}__init__.py", *EXTENSION_SUFFIXES, ".py", ".pyc")
    return " ".join(form for form in forms if os.path.exists(f"{path}{form}"))


def _of_modules(path: Path) -> str:
    """Return a digest of the modules in a folder that hide others if it is searched before them."""
    try:
        names = os.listdir(path)
    except OSError:
        return ""
    others = sys.stdlib_module_names | distributions().keys()
    hiding = sorted(
        name
        for name in names
        if name.partition(".")[0] in others
        and ("." in name or (path / name / "__init__.py").exists())
    )
    return _hashed("\n".join(hiding).encode())


def _of_distributions(name: str) -> str:
    """Return the version of an installed distribution, or a digest of all if `name` is ""."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        if name:
            return metadata.version(name)
        found = sorted(
            f"{one.name} {one.version} {one.read_text('entry_points.txt')}"
            for one in metadata.distributions()
        )
        return _hashed("\n".join(found).encode())
    return ""


def _of_package(name: str) -> str:
    """Return a digest of the lists of files, with their hashes, of the distributions of a package.

    A distribution without such a list is known by its version. Modules that were edited after they
    had been installed, by the time of the list, are known by their content.
    """
    found = []
    for distribution in sorted({*distributions().get(name, [])}):
        with suppress(metadata.PackageNotFoundError, OSError):
            installed = metadata.distribution(distribution)
            listed = installed.read_text("RECORD")
            found.append(listed or installed.version)
            found += _edited(str(installed.locate_file("")), listed or "")
    return _hashed("\n".join(found).encode())


def _edited(folder: str, listed: str) -> Iterator[str]:
    """Yield name and digest of each module that is newer than the list of files that names it."""
    times = [
        os.stat(os.path.join(folder, file)).st_mtime
        for file in re.findall(r"^(.*\.dist-info/RECORD),", listed, re.MULTILINE)
    ]
    for file in _MODULES.findall(listed) if times else ():
        path = os.path.join(folder, file)
        with suppress(OSError):
            # An installer writes the list within moments of the last file.
            if os.stat(path).st_mtime > times[0] + 10:
                yield f"{file} {_of_file(Path(path))}"


def _hashed(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def is_of_the_suite(file: str) -> bool:
    """Return whether a file is of this suite, its adapters left out."""
    return file.startswith(_SUITE) and _SUITE_ADAPTERS not in file


@lru_cache(maxsize=2**14)
def package_of(file: str) -> str:
    """Return the name of the installed package that a file belongs to, or ""."""
    parts = Path(file).parts
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] in INSTALLED:
            return parts[at + 1].partition(".")[0]
    return ""


def source_of(path: str) -> str:
    """Return the path of the source of byte code, or the path of anything else."""
    if path.endswith(".pyc"):
        with suppress(ValueError):
            return importlib.util.source_from_cache(path)
    return path


def may_pass(file: str, home: str) -> bool:
    """Return whether a file is temporary, or in a hidden folder, which are caches, or the system's.

    A checkout may itself lie in such a folder, so only those between it and the file count.
    """
    between = Path(os.path.relpath(file, home)).parent.parts
    hidden = any(part.startswith(".") and part != ".." for part in between)
    outside = (*_SYSTEM, tempfile.gettempdir() + os.sep)
    return hidden or (not (file + os.sep).startswith(home + os.sep) and file.startswith(outside))


def name_of(file: str, home: str, kind: str = "file") -> str:
    """Return the name of the input that a file is, given by its absolute path, or "" for none.

    None are files of the suite, whose code has digests of its own, of the standard library, the
    program that was started, what describes installed packages and the folders around `home`, the
    folder that names are relative to.
    """
    here = home + os.sep
    if is_of_the_suite(file) or _DESCRIBED.search(file) or file == os.path.abspath(sys.argv[0]):
        return ""
    if package := package_of(file):
        return "" if package in RUNNERS else f"package {package}"
    inside = file.startswith(here) or file == home
    around = kind == "file" and not inside and here.startswith(file.rstrip(os.sep) + os.sep)
    if around or (not inside and file.startswith(STANDARD)):
        return ""
    return f"{kind} {os.path.relpath(file, home) if inside else file}"
