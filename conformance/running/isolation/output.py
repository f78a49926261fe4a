"""What a process prints, and what is said of how it ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
"""Asks a process where it is; answered by C code, also while Python hangs."""

KEPT = 64 * 2**10
"""Bytes at the end, enough for the stack of a crash and the line before it."""
AT_ONCE = 2**20
"""Bytes read before somebody else gets a turn, of a process that prints without end."""


class Printed:
    """The reading end of the pipe that a process has for stdout and stderr.

    A file would be simpler, and fill the disk when a process prints for a minute.
    """

    def __init__(self, channel: Connection) -> None:
        self.channel = channel
        self._end = b""
        os.set_blocking(channel.fileno(), False)

    def read(self) -> bool:
        """Take what is there; False when nothing can come any more."""
        taken = 0
        while taken < AT_ONCE:
            try:
                some = os.read(self.channel.fileno(), KEPT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not some:
                return False
            taken += len(some)
            self._end = (self._end + some)[-KEPT:]
        return True

    def forget(self) -> None:
        """What was printed so far tells nothing about what comes next."""
        self.read()
        self._end = b""

    @property
    def text(self) -> str:
        """The end of what was printed."""
        self.read()
        return self._end.decode(errors="replace")

    def close(self) -> None:
        """Nobody reads any more."""
        with contextlib.suppress(OSError):
            self.channel.close()


_DUMP = re.compile(r"^(Fatal Python error: |Current thread |Thread 0x|Stack \(most recent)", re.M)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Fate:
    """No answer: the verdict, and why."""

    verdict: Literal["crashed", "timed-out"]
    told: str


def died(code: int | None) -> str:
    """How a process ended by itself."""
    if code is not None and code < 0:
        try:
            return f"the process died with {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died with signal {-code}"
    return f"the process ended with exit code {'unknown' if code is None else code}"


def has_stack(text: str) -> bool:
    """Whether the process printed where it was."""
    return bool(_FRAME.search(text))


def last_words(text: str, spec: str) -> str:
    """Where it was, and the last line that it printed, as far as known: "" or " (at ...)"."""
    dump = _DUMP.search(text)
    own, stack = (text[: dump.start()], text[dump.start() :]) if dump else (text, "")
    lines = [line.strip() for line in own.splitlines() if line.strip()]
    place, words = _place(stack, spec), lines[-1][:200] if lines else ""
    return (f" (at {place})" if place else "") + (f"; it printed last: {words}" if words else "")


def _place(stack: str, spec: str) -> str:
    """The innermost line in the implementation's file, or else the innermost of all."""
    frames = _FRAME.findall(stack)
    file = Path(spec.partition(":")[0]).name
    theirs = [frame for frame in frames if Path(frame[0]).name == file] or frames
    return f"{Path(theirs[0][0]).name}:{theirs[0][1]}" if theirs else ""
