"""How a process ended, in words: the verdict of the item at which it did, and the reason."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
