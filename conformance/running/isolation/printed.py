"""What a process prints: read as it comes, and only the end of it is kept."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection

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
