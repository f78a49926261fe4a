"""What a node of a cluster does: run an environment of a tox project, and hand back its records.

A node has Ray and tox, and neither this suite nor a copy of the project. This module is sent to it,
so it imports nothing beyond the standard library.
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
from pathlib import Path
from typing import BinaryIO

_TAIL = 4_000
"""Bytes of what a part printed last that come back."""
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
"""A program that kills what is left of a session, whose id it reads from its standard input, once
that is closed. It is no child of the worker, because Ray kills those before the worker."""

Files = dict[str, bytes]


@dataclass(frozen=True)
class Part:
    """An environment of tox, or a shard of one.

    Attributes:
        environment: its name in tox.
        shard: "2/8", or "" for all of it.
        arguments: what tox passes on to the environment's command, the shard included.
        files: files of the project that are no part of its source: records that exist already.
    """

    environment: str
    shard: str = ""
    arguments: tuple[str, ...] = ()
    files: Files = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The environment, and the shard if it is one."""
        return f"{self.environment} {self.shard}".strip()


@dataclass(frozen=True)
class Answer:
    """What came of a part.

    Attributes:
        code: the exit code of tox, which is that of the environment's command.
        files: the files in the folder of records that are new or have changed, by path.
        tail: what was printed last.
        node: the name of the node.
        seconds: how long it took there.
    """

    code: int
    files: Files
    tail: str
    node: str
    seconds: float


def run(project: bytes, key: str, folder: str, part: Part, workers: int) -> Answer:
    """Run a part in a copy of the project.

    The node keeps what tox installed, so that the next run of the same project finds it.

    Args:
        project: the files of the project, as a tar archive.
        key: names the project among those of which the node keeps something.
        folder: the folder of records, relative to the project.
        part: what is to be run.
        workers: the processes that the environment's command may use.
    """
    begun = time.monotonic()
    home, release = _claimed(key, part.environment)
    try:
        root = home / "project"
        _unpack(project, root)
        for path, content in part.files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
        before = _contents(root, folder)
        command = [sys.executable, "-m", "tox", "run", "-e", part.environment]
        command += ["--workdir", str(home / "tox"), "--", *part.arguments]
        with (home / "output").open("w+b") as output:
            code = _ended(command, root, output, workers)
            tail = _tail(output)
        after = _contents(root, folder)
    finally:
        release()
    files = {path: content for path, content in after.items() if before.get(path) != content}
    return Answer(code, files, tail, socket.gethostname(), time.monotonic() - begun)


def _unpack(project: bytes, root: Path) -> None:
    """Make a folder hold the files of an archive, and no others.

    Files that have not changed are left as they are, so that Python need not compile them again.
    """
    with tarfile.open(fileobj=io.BytesIO(project)) as archive:
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
                # Python compares this with what it has compiled.
                member.mtime = time.time()
                archive.extract(member, root, filter="data")


def _holds(path: Path, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    """Return whether a file is already what the archive has in its place."""
    if path.is_symlink() or not path.is_file() or (content := archive.extractfile(member)) is None:
        return False
    is_program = bool(member.mode & 0o100)
    return os.access(path, os.X_OK) == is_program and path.read_bytes() == content.read()


def _claimed(key: str, environment: str) -> tuple[Path, Callable[[], None]]:
    """Return a folder that no other part on this machine uses, and what gives it back."""
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
    """Run a program to its end, which also comes if this process is killed."""
    settings = os.environ | {"WORKERS": str(workers)}
    # Ray leads its workers to the packages of the node, which are not those of the environment.
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
    # The id of the session stays taken until the guard is done.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    guard.communicate()
    return process.wait()


def _tail(output: BinaryIO) -> str:
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL))
    return output.read().decode(errors="replace")


def _contents(root: Path, folder: str) -> Files:
    """Return the files below a folder of the project, by path; no locks and no temporary files."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in (root / folder).rglob("*.*")
        if path.suffix in {".json", ".safetensors"}
    }
