"""Run an environment of a tox project on a node of a cluster, and return its records.

A node has Ray and tox, but neither this suite nor a copy of the project. This module is sent to the
node, so it imports nothing but the standard library.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

_TAIL = 4_000
"""How many bytes of the end of a part's output are returned."""
_GUARD = """
import os, signal, sys, time

if os.fork():
    os._exit(0)
os.setsid()
session = int(sys.stdin.read())
# Twice, because a process may begin another one while they are counted.
for pause in (0, 0.1):
    time.sleep(pause)
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
"""
"""A program that reads the id of a session of processes from its standard input until the input is
closed, and then kills what is left of the session. The program detaches from the process that
started it, a worker of Ray, because Ray kills a worker's children first."""

Files = dict[str, bytes]


@dataclass(frozen=True)
class EnvironmentPart:
    """A tox environment to run, or a shard of one.

    Attributes:
        environment: the name of the environment.
        shard: the shard, such as "2/8", or "" for the whole environment.
        arguments: the arguments that tox passes on to the environment's command, including those
            for the shard.
        files: files of the project that are not part of its source, by path: existing records, and
            the file with the id of the run.
    """

    environment: str
    shard: str = ""
    arguments: tuple[str, ...] = ()
    files: Files = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the environment, followed by the shard if there is one."""
        return f"{self.environment} {self.shard}".strip()


@dataclass(frozen=True)
class PartResult:
    """The result of running a part.

    Attributes:
        code: the exit code of tox, which is that of the environment's command if it was run.
        files: the records and files of arrays that are new or have changed, by path.
        tail: the end of what tox printed.
        node: the name of the node.
        seconds: the time that the part took on the node.
    """

    code: int
    files: Files
    tail: str
    node: str
    seconds: float


def run(project: bytes, key: str, folder: str, part: EnvironmentPart, workers: int) -> PartResult:
    """Run a part in a copy of the project, and return its answer.

    The node keeps the packages that tox installed, for the next run of the same project.

    Args:
        project: the files of the project, as a tar archive.
        key: a name that distinguishes the project from others of which the node keeps files.
        folder: the folder of records, relative to the project.
        part: the part to run.
        workers: the number of processes that the environment's command may use.
    """
    begun = time.monotonic()
    home, release = _claimed(key, part.environment)
    try:
        root = home / "project"
        unpack(project, root)
        for path, content in part.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        before = _contents(root, folder)
        source, installed = sha256(project).hexdigest(), home / "installed"
        is_installed = installed.is_file() and installed.read_text() == source
        command = [sys.executable, "-m", "tox", "run", "--workdir", str(home / "tox")]
        # tox would build the package of the same source again, and install it again. If it has to
        # make the environment anew, for another Python, the second attempt installs everything.
        for options in (["--skip-pkg-install"], []) if is_installed else ([],):
            asked = [*command, *options, "-e", part.environment, "--", *part.arguments]
            with (home / "output").open("w+b") as output:
                code = _ended(asked, root, output, workers)
                output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
                tail = output.read().decode(errors="replace")
            after = _contents(root, folder)
            files = {path: after[path] for path in after if before.get(path) != after[path]}
            if files or code == 0:
                installed.write_text(source)
                break
    finally:
        release()
    return PartResult(code, files, tail, socket.gethostname(), time.monotonic() - begun)


def unpack(project: bytes, root: Path) -> None:
    """Make a folder contain the files of an archive, and no others except compiled Python files.

    Files that have not changed are not written again, so that Python need not compile them again.
    For the same reason, compiled files beside the sources are kept.
    """
    with tarfile.open(fileobj=io.BytesIO(project)) as archive:
        # Python 3.11 has filters only since 3.11.4.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        members = {root / member.name: member for member in archive}
        sources = {path.parent for path in members}
        # The deepest come first, because only an empty folder can be removed.
        for path in sorted(root.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                with suppress(OSError):
                    path.rmdir()
            elif path not in members and not (
                path.parent.name == "__pycache__" and path.parents[1] in sources
            ):
                path.unlink()
        for path, member in members.items():
            if not _holds(path, archive, member):
                # Python compares this time with that of the compiled file.
                member.mtime = time.time()
                archive.extract(member, root)


def _holds(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """Return whether the file at this path has the content of a member of the archive.

    The file must also be executable if and only if the member is.
    """
    if path.is_symlink() or not path.is_file() or (content := archive.extractfile(member)) is None:
        return False
    is_program = bool(member.mode & 0o100)
    return os.access(path, os.X_OK) == is_program and path.read_bytes() == content.read()


def _claimed(key: str, environment: str) -> tuple[Path, Callable[[], None]]:
    """Return a folder that no other part on this machine uses, and a function to release it."""
    import fcntl

    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for number in itertools.count(1):
        home = caches / "mha-conformance" / "matrix" / key / f"{environment}-{number}"
        home.mkdir(parents=True, exist_ok=True)
        lock = (home / "lock").open("w")
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return home, lock.close
        lock.close()
    raise AssertionError


def _ended(command: Sequence[str], root: Path, output: BinaryIO, workers: int) -> int:
    """Run a program in the folder `root`, write its output to a file, and return its exit code.

    When the program ends, any processes that it leaves behind in its session are killed. If this
    process dies, the program and all processes of its session are killed.
    """
    settings = os.environ | {"WORKERS": str(workers)}
    # Ray makes its workers use the packages of the node, which are not those of the environment.
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME"):
        settings.pop(name, None)
    guard = subprocess.Popen(
        [sys.executable, "-c", _GUARD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process = subprocess.Popen(
        command,
        cwd=root,
        env=settings,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert guard.stdin is not None
    print(process.pid, file=guard.stdin, flush=True)
    # Do not reap the process yet: the id of the session must not be reused before the guard ends.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    guard.communicate()
    return process.wait()


def _contents(root: Path, folder: str) -> Files:
    """Return the records below a folder of the project, and their files of arrays.

    The keys are paths relative to the project, and the values are contents.
    """
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in (root / folder).rglob("*.*")
        if path.suffix in {".json", ".safetensors"}
    }
