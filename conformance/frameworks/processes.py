"""Worlds of processes: groups of ranks that are started once and then called with payloads.

Ranks are forked by a host, a separate process that has already imported the framework, so that a
world starts in a fraction of a second. A world lives until the process that started it ends. If a
rank raises an exception, dies or is late, the whole world is ended, because the other ranks may be
waiting for that rank in a collective operation; the next call starts a new world.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from conformance.errors import RankDied, RankLate, RankRaised, Unavailable, Unsupported

GRACE = 0.5
"""Seconds that other ranks have to answer after one failed, so that the first error is named."""
START = 120.0
"""The time limit in seconds for starting a world, which includes importing modules."""
MOST = 64
"""The maximum number of ranks in a world."""


class Host:
    """A process that imports the server of its ranks, "module:class", and then forks the ranks."""

    def __init__(self, server: str) -> None:
        if not hasattr(os, "fork"):
            raise Unavailable("ranks are forked, which this system cannot do")
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(START)
        code = f"from {__name__} import host; host({theirs.fileno()}, {server!r})"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        atexit.register(self.end)

    def fork(self, ends: Sequence[int]) -> list[int]:
        """Fork a rank for each descriptor, the rank's end of a pipe; return the process ids."""
        return list(map(int, self._ask(b"fork", ends).split()))

    def ended(self, pid: int) -> int:
        """Wait for the end of a rank, and return its exit code, negative for a signal."""
        return int(self._ask(b"%d" % pid))

    def _ask(self, what: bytes, ends: Sequence[int] = ()) -> bytes:
        try:
            socket.send_fds(self._channel, [what], ends)
            answer = self._channel.recv(2**16)
        except OSError:
            answer = b""
        if not answer:
            self.end()
            raise RankDied("the process that starts ranks died")
        return answer

    def end(self) -> None:
        """End the host, which kills its ranks."""
        atexit.unregister(self.end)
        for server in [server for server, host in _HOSTS.items() if host is self]:
            del _HOSTS[server]
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def host(control: int, server: str) -> None:
    """Fork ranks until the other end of the control socket is closed, then kill them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _named(server).prepare()
    alive: set[int] = set()
    with socket.socket(fileno=control) as channel, contextlib.suppress(ConnectionError):
        while True:
            what, ends, *_ = socket.recv_fds(channel, 64, MOST)
            if not what:
                break
            if what != b"fork":
                pid = int(what)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                alive.discard(pid)
                channel.sendall(b"%d" % code)
                continue
            pids = []
            for rank, end in enumerate(ends):
                pid = os.fork()
                if not pid:
                    channel.close()
                    for other in ends:
                        if other != end:
                            os.close(other)
                    try:
                        _serve(Connection(end), server, rank, len(ends))
                    finally:
                        os._exit(0)
                pids.append(pid)
            for end in ends:
                os.close(end)
            alive.update(pids)
            channel.sendall(b" ".join(b"%d" % pid for pid in pids))
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


class Processes:
    """The ranks of one world.

    Args:
        size: the number of ranks.
        server: "module:class". Every rank creates an instance with (rank, size, path, seconds to
            wait for other ranks), where `path` is a file that does not exist yet, and calls its
            `serve` with the items of each payload as arguments. The class's `prepare` is called
            once, before ranks are forked.
    """

    def __init__(self, size: int, server: str) -> None:
        self._folder = tempfile.mkdtemp()
        self._host = _HOSTS.get(server) or _HOSTS.setdefault(server, Host(server))
        pairs = [socket.socketpair() for _ in range(size)]
        try:
            self.pids = self._host.fork([theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        self._pipes = [Connection(ours.detach()) for ours, _ in pairs]
        for pipe in self._pipes:
            pipe.send((sys.path, os.path.join(self._folder, "store")))
        atexit.register(self.end)

    def call(self, payloads: Sequence[Any], limit: float) -> list[Any]:
        """Send each rank its payload, and return the results of all ranks.

        If this raises an exception, the world has been ended.

        Args:
            payloads: one payload for each rank.
            limit: the seconds within which all ranks must answer.

        Raises:
            RankRaised: a rank raised an exception other than `Unsupported`.
            RankDied: the process of a rank ended.
            RankLate: a rank did not answer within the limit.
            Unsupported: a rank raised `Unsupported`.
        """
        try:
            return self._call(payloads, limit)
        except BaseException:
            self.end()
            raise

    def _call(self, payloads: Sequence[Any], limit: float) -> list[Any]:
        size = len(self._pipes)
        died: list[int] = []
        for rank, (pipe, payload) in enumerate(zip(self._pipes, payloads, strict=True)):
            try:
                pipe.send_bytes(pickle.dumps(payload))
            except OSError:
                died.append(rank)
        answers: dict[int, Any] = {}
        failed: dict[int, tuple[float, str, bool]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in died}
        until = time.monotonic() + limit
        while waiting and (left := until - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    good, answer = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    died.append(rank)
                else:
                    (answers if good else failed)[rank] = answer
            if died or failed:
                until = min(until, time.monotonic() + GRACE)
        if died:
            code = self._host.ended(self.pids.pop(died[0]))
            end = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise RankDied(f"rank {died[0]} of {size} died {end}")
        if failed:
            rank, (_, text, refused) = min(failed.items(), key=lambda item: item[1][0])
            raise Unsupported(text) if refused else RankRaised(f"rank {rank} of {size}: {text}")
        if waiting:
            late = ", ".join(map(str, sorted(waiting.values())))
            raise RankLate(f"rank {late} of {size} did not answer within {limit:g} s")
        return [answers[rank] for rank in range(size)]

    def end(self) -> None:
        """Kill all ranks, and wait until they have ended."""
        atexit.unregister(self.end)
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(RankDied):
            for pid in self.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._host.ended(pid)
        self.pids = []
        shutil.rmtree(self._folder, ignore_errors=True)


_HOSTS: dict[str, Host] = {}
_WORLDS: dict[tuple[int, str], Processes] = {}


def call_ranks(server: str, limit: float, first: Any, payloads: Sequence[Any]) -> list[Any]:
    """Send one payload to each rank of a world, and return the results within `limit` seconds.

    The world has as many ranks as there are payloads, and is kept for later calls. When it is
    started, every rank first gets the payload `first`.

    Raises:
        RankRaised, RankDied, RankLate, Unsupported: see `Processes.call`.
    """
    key = (len(payloads), server)
    world = _WORLDS.pop(key, None)
    if world is None:
        world = Processes(*key)
        world.call([first] * len(payloads), START)
    answers = world.call(payloads, limit)
    _WORLDS[key] = world
    return answers


def _serve(pipe: Connection, server: str, rank: int, size: int) -> None:
    """Process payloads and send the results until the other end of the pipe is closed."""
    served = None
    with contextlib.suppress(EOFError, OSError):
        sys.path[:], path = pipe.recv()
        while True:
            received = pipe.recv_bytes()
            answer: tuple[bool, Any]
            try:
                if served is None:
                    served = _named(server)(rank, size, path, START)
                answer = (True, served.serve(*pickle.loads(received)))
            except Unsupported as error:
                answer = (False, (time.time(), str(error), True))
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
                answer = (False, (time.time(), text, False))
            pipe.send_bytes(pickle.dumps(answer))


def _named(server: str) -> Any:
    module, _, name = server.partition(":")
    return getattr(importlib.import_module(module), name)
