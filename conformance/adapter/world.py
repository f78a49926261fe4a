"""Run attention on several processes (ranks), each of which holds a shard of the tensors.

To the suite, such an implementation is like any other. Each of its modes is a number of ranks and a
way in which tensors are split, so the requirement `modes.agree` compares worlds of all sizes.

A world is a group of ranks that is started once and then called with payloads. Ranks are forked by
a host, a separate process that has already imported the framework, so that a world starts in a
fraction of a second. A world lives until the process that started it ends, or until a call fails:
if a rank raises an exception, dies or is late, the whole world is ended, because the other ranks
may be waiting for that rank in a collective operation. The next call starts a new world.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import inspect
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar

import numpy as np

from conformance.adapter.base import Call, Mode
from conformance.adapter.function import Function
from conformance.adapter.raised import is_own_on_rank
from conformance.definition.problem import Answer, Problem
from conformance.errors import (
    RankDied,
    RankLate,
    RankRaised,
    Unavailable,
    Unsupported,
    WrongDeclaration,
)
from conformance.frameworks.base import OnRanks

QUERIES, KEYS, HEADS, KV_HEADS = "queries", "keys", "heads", "kv heads"

GRACE = 0.5
"""The seconds that other ranks have to answer after one has failed.

Of several exceptions, the one raised first is reported, which need not be the first to arrive."""
START = 120.0
"""The time limit in seconds for starting a world, which includes importing modules."""
MOST = 64
"""The maximum number of ranks in a world."""


@dataclass(frozen=True)
class Split:
    """A way to divide tensors among the ranks; an axis that is not divided is whole on every rank.

    Args:
        name: the name of this way, which becomes a part of the names of modes.
        queries: whether queries are divided, and the result with them.
        keys: whether keys and values are divided.
        heads: whether heads are divided. Each rank gets key/value heads with all query heads that
            use them.
        zigzag: whether a length is cut into 2n parts, of which rank r of n gets the parts r and
            2n-1-r, instead of being cut into n parts. Causal attention is then about the same
            amount of work for every rank. If the length is not a multiple of the number of parts,
            some of the first parts are longer by one.
    """

    name: str
    queries: bool = False
    keys: bool = False
    heads: bool = False
    zigzag: bool = False

    def positions(self, length: int, size: int) -> list[np.ndarray]:
        """Return, for each of `size` ranks, the indices of the `length` tokens that it gets."""
        if not self.zigzag:
            return np.array_split(np.arange(length), size)
        parts = np.array_split(np.arange(length), 2 * size)
        return [np.concatenate((parts[r], parts[-1 - r])) for r in range(size)]

    def places(
        self, query: Sequence[int], key: Sequence[int], size: int
    ) -> dict[str, list[np.ndarray]]:
        """Return, for each divided axis, the indices that each of `size` ranks gets.

        The axes are named "queries", "keys", "heads" and "kv heads". `query` and `key` each hold
        the number of heads and the number of tokens.

        Raises:
            Unsupported: if the key/value heads cannot be divided among so many ranks.
        """
        places = {}
        if self.queries:
            places[QUERIES] = self.positions(query[1], size)
        if self.keys:
            places[KEYS] = self.positions(key[1], size)
        if self.heads:
            if key[0] % size:
                raise Unsupported(f"{key[0]} key/value heads cannot be divided among {size} ranks")
            for kind, count in ((HEADS, query[0]), (KV_HEADS, key[0])):
                places[kind] = np.split(np.arange(count), size)
        return places


@dataclass(frozen=True)
class Shard:
    """What a rank knows about the parts of the tensors that all ranks hold.

    Attributes:
        rank, size: the number of this rank, and how many ranks there are.
        split: the name of the way in which tensors are divided.
        queries, keys: for each rank, the indices of its queries and of its keys among all of them.
    """

    rank: int
    size: int
    split: str
    queries: tuple[np.ndarray, ...]
    keys: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class World:
    """The numbers of ranks and the ways of dividing tensors with which an implementation is run.

    Args:
        sizes: the numbers of ranks, each from 1 to 64.
        splits: the ways in which tensors are divided; each is combined with every size above 1.
        every_case: the sizes with which all cases are run. With other sizes, only the cases of
            level "core" in float32, and a few others, are run (see `Mode.every_case`).
        limit: the number of seconds that one call may take.

    Raises:
        WrongDeclaration: if there are no sizes or no splits, or if a size is out of range.
    """

    sizes: tuple[int, ...]
    splits: tuple[Split, ...]
    every_case: tuple[int, ...] = (1, 3)
    limit: float = 45.0

    def __post_init__(self) -> None:
        if not self.splits or not self.sizes or not 1 <= min(self.sizes) <= max(self.sizes) <= MOST:
            raise WrongDeclaration(
                f"a world has sizes from 1 to {MOST}, and at least one way to split"
            )

    def modes(self) -> tuple[Mode, ...]:
        """Return a mode for each size and split; a world of one rank has the first split only."""
        return tuple(
            Mode(
                f"{split.name}-{size}",
                {"split": split, "size": size},
                every_case=size in self.every_case,
                core_cases=True,
                about=f"on {size} rank{'s' * (size > 1)}",
            )
            for size in self.sizes
            for split in (self.splits if size > 1 else self.splits[:1])
        )


class Distributed(Function):
    """The base class of adapters for functions that every rank of a world calls with its shard.

    A subclass sets `world` and `on_rank`, and may make the same declarations as any `Function`,
    except that `layout` is fixed. Its modes are those of the world.

    Raises:
        WrongDeclaration: if a subclass declares another `layout`.

    Attributes:
        on_rank: a function at the top level of a module. Every rank calls it with keyword
            arguments: its parts of `query`, `key` and `value`, `[batch heads length head]`, a
            `Shard` as `shard`, and the masks and options as in `Function.attend`. It returns its
            part of the result, and communicates through the default process group.
        axes: for each argument other than query, key and value, the names of its axes. Axes named
            "queries", "keys", "heads" or "kv heads" are divided like those of query and key, unless
            they have another size, such as 1. Axes with other names, and arguments that are not
            listed, are not divided.
    """

    framework = "torch"
    world: ClassVar[World]
    on_rank: ClassVar[Callable[..., Any]]
    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "mask": ("batch", HEADS, QUERIES, "all keys"),
        "sinks": (HEADS,),
    }

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if cls.layout != Function.layout:
            raise WrongDeclaration(f"ranks get [{Function.layout}]; transpose in `on_rank` instead")
        if "world" in vars(cls):
            cls.modes = cls.world.modes()

    def check_device(self, device: str) -> None:
        super().check_device(device)
        if device != "cpu":
            raise Unavailable("ranks run on the CPU")

    @contextlib.contextmanager
    def around_call(self, problem: Problem, call: Call) -> Iterator[None]:
        if call.strided or call.around is not None:
            raise Unsupported("each rank gets contiguous parts of its own")
        if call.given is not None:
            raise Unsupported("inputs that contradict each other cannot be divided")
        yield

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        raise Unsupported("each rank gets parts of its own")

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        split, size = mode["split"], mode["size"]
        tensors = {"query": query, "key": key, "value": value}
        tensors |= {n: v for n, v in masks.items() if self.bridge.is_array(v)}
        others = {n: v for n, v in masks.items() if n not in tensors} | options
        axes = self.axes | {"query": ("batch", HEADS, QUERIES)}
        axes |= dict.fromkeys(("key", "value"), ("batch", KV_HEADS, KEYS))
        places = split.places(query.shape[1:3], key.shape[1:3], size)
        (_, heads, queries, _), (_, kv_heads, keys, _) = query.shape, key.shape
        lengths = {QUERIES: queries, KEYS: keys, HEADS: heads, KV_HEADS: kv_heads}
        divided = {
            name: [
                (axis, places[kind])
                for axis, kind in enumerate(axes.get(name, ()))
                # An axis of size 1, such as that of a mask for all heads, is not divided.
                if kind in places and tensor.shape[axis] == lengths[kind]
            ]
            for name, tensor in tensors.items()
        }
        positions = [
            tuple(places.get(kind, [np.arange(lengths[kind])] * size)) for kind in (QUERIES, KEYS)
        ]
        shards = [Shard(rank, size, split.name, *positions) for rank in range(size)]
        told = OnRanks(
            reference(type(self).on_rank),
            divided,
            divided["query"],
            [{**others, "shard": shard} for shard in shards],
            self.ask,
        )
        return self.bridge.on_ranks(told, tensors)

    def ask(self, payloads: Sequence[Any]) -> list[Any]:
        """Send each rank its payload, and return the results of all ranks, as `call_ranks` does."""
        first = ("load", reference(type(self).on_rank))
        return call_ranks(self.bridge.rank, self.world.limit, first, payloads)


def reference(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Return the module, the file and the qualified name by which a rank can find a function.

    Raises:
        WrongDeclaration: if the function is a lambda or is defined inside another function.
    """
    name = function.__qualname__
    if "<" in name:
        raise WrongDeclaration(f"{name}: ranks can only import what a module holds by name")
    return function.__module__, inspect.getfile(function), name


class Host:
    """A process that imports `server`, and then forks ranks, which answer calls with that class.

    `server` is the text "module:class".

    Raises:
        Unavailable: if the operating system cannot fork processes.
    """

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
        """Fork one rank for each of `ends`, and return the ids of the processes.

        Each of `ends` is the file descriptor of the rank's end of a socket pair.

        Raises:
            RankDied: if the host process does not answer.
        """
        return list(map(int, self._ask(b"fork", ends).split()))

    def ended(self, pid: int) -> int:
        """Wait for the end of a rank, and return its exit code, negative for a signal.

        Raises:
            RankDied: if the host process does not answer.
        """
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
        """Close the channel to the host, which then kills its ranks, and wait until it ends."""
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
    """Fork ranks on request until the other end of the socket is closed, and then kill them.

    Another kind of request asks for the exit code of a rank that is ending.

    Args:
        control: the file descriptor of the socket.
        server: the class with which ranks answer calls, as "module:class".
    """
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
        server: the class with which ranks answer calls, as "module:class". Every rank creates an
            instance with (rank, size, path, seconds to wait for other ranks), where `path` is a
            file that does not exist yet, and calls its `serve` with the items of each payload as
            arguments. The class's `prepare` is called once, before ranks are forked.
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
        """Send each rank its payload, and return the results of all ranks, in their order.

        If this raises an exception, ranks may be waiting for others; end the world.

        Raises:
            RankRaised: a rank raised an exception other than `Unsupported`.
            RankDied: the process of a rank ended.
            RankLate: a rank did not answer within `limit` seconds.
            Unsupported: a rank raised `Unsupported`.
        """
        size = len(self._pipes)
        died: list[int] = []
        for rank, (pipe, payload) in enumerate(zip(self._pipes, payloads, strict=True)):
            try:
                pipe.send_bytes(pickle.dumps(payload))
            except OSError:
                died.append(rank)
        answers: dict[int, Any] = {}
        failed: dict[int, tuple[float, str, bool, bool]] = {}
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
            rank, (_, text, refused, ours) = min(failed.items(), key=lambda item: item[1][0])
            raised = RankRaised(f"rank {rank} of {size}: {text}")
            raised.ours = ours
            raise Unsupported(text) if refused else raised
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

    The world has as many ranks as there are payloads. It is kept for later calls, but is ended if
    this raises an exception. When a world is started, which may take further time, every rank first
    gets the payload `first`. `server` is the class with which ranks answer calls, "module:class".

    Raises:
        RankRaised, RankDied, RankLate, Unsupported: see `Processes.call`.
    """
    key = (len(payloads), server)
    kept = _WORLDS.pop(key, None)
    world = kept or Processes(*key)
    try:
        if kept is None:
            world.call([first] * len(payloads), START)
        answers = world.call(payloads, limit)
    except BaseException:
        world.end()
        raise
    _WORLDS[key] = world
    return answers


def _serve(pipe: Connection, server: str, rank: int, size: int) -> None:
    """Answer payloads with the class `server` until the other end of the pipe is closed.

    The answer to a payload is its result or the error that was raised.
    """
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
                answer = (False, (time.time(), str(error), True, True))
            except BaseException as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
                answer = (False, (time.time(), text, False, is_own_on_rank(error)))
            pipe.send_bytes(pickle.dumps(answer))


def _named(server: str) -> Any:
    module, _, name = server.partition(":")
    return getattr(importlib.import_module(module), name)
