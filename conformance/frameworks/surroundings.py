"""Process-wide state: random generators, settings, environment and current directory.

An implementation that changes this state can affect later calls, so the state before and after a
call is compared, and restored.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = list[Any]
"""The values of a sequence of settings, comparable with ==."""


@dataclass(frozen=True)
class Setting:
    """One piece of process-wide state.

    Attributes:
        name: a description for messages.
        get: returns the current value.
        put: restores a value.
        shown: whether messages include the values.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    shown: bool = True


def look(settings: Sequence[Setting]) -> Values:
    """Return the values of all settings."""
    return [setting.get() for setting in settings]


def put_back(settings: Sequence[Setting], values: Values, present: Values | None = None) -> None:
    """Restore those settings whose present value, looked up if not given, is not the given one."""
    present = look(settings) if present is None else present
    for setting, value, now in zip(settings, values, present, strict=True):
        if now != value:
            setting.put(value)


def changes(settings: Sequence[Setting], before: Values, after: Values) -> list[str]:
    """Return one line of text for each setting whose value changed."""
    return [
        f"{setting.name}: {one} became {other}" if setting.shown else f"{setting.name} changed"
        for setting, one, other in zip(settings, before, after, strict=True)
        if one != other
    ]


_WORDS = 4 * (624 + 1)
"""The size in bytes of the state of NumPy's default generator: 624 words and a position."""

_copied: list[Any] = [None, ()]
"""The words and the full state of NumPy's generator when the state was last copied; None instead of
the words if this copy must not be reused."""


def _numpy_generator() -> tuple[Any, ...]:
    """Return the state of NumPy's global generator.

    Copying the state with NumPy takes a hundred times as long as reading its words, so the last
    copy is reused while the words are equal and the generator holds no second normal number.
    """
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    words = None
    if isinstance(generator, np.random.MT19937):
        words = ctypes.string_at(generator.ctypes.state_address, _WORDS)
        if words == _copied[0]:
            return _copied[1]
    state: Any = np.random.get_state()
    name, keys, *rest = state
    whole = (name, keys.tobytes(), *rest)
    _, has_normal, _ = rest
    _copied[:] = (None if has_normal else words, whole)
    return whole


def _put_numpy_generator(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))
    _copied[0] = None


def _environment() -> dict[Any, Any]:
    """Return the environment as undecoded bytes, because decoding it takes twenty times as long."""
    held: dict[Any, Any] | None = getattr(os.environ, "_data", None)
    return dict(os.environ if held is None else held)


def _put_environment(values: dict[Any, Any]) -> None:
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in values.items()})


def _directory() -> str:
    with suppress(OSError):
        return os.getcwd()
    return ""


PROCESS = (
    Setting("Python's random generator", random.getstate, random.setstate, shown=False),
    Setting("NumPy's random generator", _numpy_generator, _put_numpy_generator, shown=False),
    Setting("NumPy's error handling", np.geterr, lambda values: np.seterr(**values)),
    Setting("the environment", _environment, _put_environment, shown=False),
    Setting("the current directory", _directory, os.chdir),
)
"""The settings that exist in every process, whatever the framework."""
