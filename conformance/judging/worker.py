"""A worker: the process that runs one candidate, and the messages to and from it.

The form of every message from it is checked here. The contents are not trusted: they are only
compared with expected numbers, which the worker never receives.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from conformance.definition.dtypes import Array
from conformance.errors import ConformanceError
from conformance.judging.sandbox import SANDBOX_LOST, Sandbox

HEADER = struct.Struct("<II")
MOST_JSON, MOST_ARRAYS = 2**20, 2**28


class Lost(ConformanceError):
    """The process of a candidate ended, hung, or sent something that is not an answer."""


class Refused(ConformanceError):
    """A candidate cannot be imported, or its function or framework cannot be determined."""


class Raised(msgspec.Struct, frozen=True):
    """An exception that a candidate raised: its type, text, and line."""

    kind: str
    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" + (f" ({self.place})" if self.place else "")


class Returned(msgspec.Struct, frozen=True):
    """The description of a returned array, whose numbers follow the message as float64."""

    name: str
    shape: list[int]
    dtype: str


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply of a worker: arrays, a declaration or an exception, and the observed behaviour."""

    id: str
    violations: list[tuple[str, str]] = []
    calls: list[str] = []
    raised: Raised | None = None
    declared: dict[str, Any] | None = None
    arrays: list[Returned] | None = None


class Worker:
    """A candidate in its own process.

    Attributes:
        violations: forbidden behaviour of the candidate, as pairs of a kind and a sentence.
        calls: the names of existing attention functions that it called.
        asked: the number of problems that were sent to it.
        lost: how its process was lost; "" while it is alive.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self.violations: dict[tuple[str, str], None] = {}
        self.calls: dict[str, None] = {}
        self.asked = 0
        self.lost = ""
        self._sandbox = sandbox
        self._channel = sandbox.fork()
        self._until = time.monotonic() + sandbox.limits.seconds

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def load(
        self,
        source: str,
        file: str,
        name: str,
        framework: str,
        frameworks: Sequence[str],
        *,
        profiled: bool = False,
    ) -> dict[str, Any]:
        """Import the candidate; return its declaration as plain data.

        `profiled` is whether to record which ready attentions it calls meanwhile.

        Raises:
            Refused: the candidate cannot be imported, or its function or framework is unclear.
            Lost: the process ended, hung, or sent an invalid reply.
        """
        head = {"do": "import", "source": source, "file": file, "name": name}
        more = {"framework": framework, "frameworks": list(frameworks), "profile": profiled}
        reply, _ = self._exchange(head | more, (), self._sandbox.limits.start)
        if reply.raised is not None:
            raise Refused(str(reply.raised))
        if reply.declared is None:
            raise self._end("sent something else than a declaration")
        return reply.declared

    def ask(
        self, head: Mapping[str, Any], arrays: Sequence[np.ndarray]
    ) -> tuple[Raised | None, dict[str, Array], dict[str, str]]:
        """Send a problem; return the exception or None, and the arrays and dtypes by name.

        Raises:
            Lost: the process ended, hung, or sent an invalid reply.
        """
        self.asked += 1
        data = [np.ascontiguousarray(array).tobytes() for array in arrays]
        reply, body = self._exchange({"do": "ask", **head}, data, self._sandbox.limits.item)
        if reply.raised is not None:
            return reply.raised, {}, {}
        if reply.arrays is None:
            raise self._end("sent something else than an answer")
        found: dict[str, Array] = {}
        at = 0
        for one in reply.arrays:
            if any(size < 0 for size in one.shape):
                raise self._end("sent an array of a negative size")
            size = 8 * math.prod(one.shape)
            if at + size > len(body):
                raise self._end("sent half an answer")
            found[one.name] = np.frombuffer(body[at : at + size]).reshape(one.shape).copy()
            at += size
        if at != len(body) or len(found) != len(reply.arrays):
            raise self._end("sent more than an answer")
        return None, found, {one.name: one.dtype for one in reply.arrays}

    def close(self) -> None:
        """End the process and everything that it started."""
        self._channel.close()
        self._sandbox.bury()

    def _exchange(
        self, head: dict[str, Any], arrays: Sequence[bytes], seconds: float
    ) -> tuple[Reply, bytes]:
        if self.lost:
            raise Lost(self.lost)
        name = secrets.token_hex(8)
        text = json.dumps(head | {"id": name}).encode()
        body = b"".join(arrays)
        until = min(time.monotonic() + seconds, self._until)
        try:
            self._channel.settimeout(max(0.01, until - time.monotonic()))
            self._channel.sendall(HEADER.pack(len(text), len(body)) + text + body)
            sizes = HEADER.unpack(self._exactly(HEADER.size, until))
            if sizes[0] > MOST_JSON or sizes[1] > MOST_ARRAYS:
                raise self._end("sent more than an answer can hold")
            told, returned = (self._exactly(size, until) for size in sizes)
        except TimeoutError:
            spent = time.monotonic() >= self._until
            limits = self._sandbox.limits
            if spent:
                raise self._end(f"used all of its {limits.seconds} s") from None
            raise self._end(f"no answer within {seconds:g} s") from None
        except OSError:
            raise self._end("its process ended") from None
        try:
            reply = msgspec.json.decode(told, type=Reply)
        except (msgspec.MsgspecError, RecursionError):
            raise self._end("sent something that is no answer") from None
        if reply.id != name:
            raise self._end("answered another question")
        self.violations |= dict.fromkeys(
            (kind[:40], text[:200]) for kind, text in reply.violations[:20]
        )
        self.calls |= dict.fromkeys(call[:100] for call in reply.calls[:20])
        return reply, returned

    def _exactly(self, size: int, until: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._channel.settimeout(left)
            more = self._channel.recv(min(size - len(data), 2**20))
            if not more:
                raise OSError("closed")
            data += more
        return bytes(data)

    def _end(self, why: str) -> Lost:
        how = ""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        if why == "its process ended":
            how = self._sandbox.bury()
            if how == SANDBOX_LOST:
                self.violations["tampering", "it ended or stopped the process beside it"] = None
        self.lost = why + (f": {how}" if how else "")
        return Lost(self.lost)
