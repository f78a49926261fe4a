"""State of the whole process: random generators, settings, environment and current directory.

An implementation that changes it changes the answers of later calls, so the state is compared
before and after calls, and restored.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = list[Any]
"""One for each setting, comparable with ==."""


@dataclass(frozen=True)
class Setting:
    """One piece of state that the whole process shares.

    Attributes:
        name: for people.
        get: returns the value.
        put: restores a value.
        shown: whether its values are short enough for a message.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    shown: bool = True


def look(settings: Sequence[Setting]) -> Values:
    """Return the values of all settings."""
    return [setting.get() for setting in settings]


def put_back(settings: Sequence[Setting], values: Values) -> None:
    """Restore the settings that have another value now."""
    for setting, value in zip(settings, values, strict=True):
        if setting.get() != value:
            setting.put(value)


def changes(settings: Sequence[Setting], before: Values, after: Values) -> list[str]:
    """Return one line for each setting whose value differs."""
    return [
        f"{setting.name}: {one} became {other}" if setting.shown else f"{setting.name} changed"
        for setting, one, other in zip(settings, before, after, strict=True)
        if one != other
    ]


def _numpy_generator() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return (name, keys.tobytes(), *rest)


def _put_numpy_generator(state: tuple[Any, ...]) -> None:
    name, keys, *rest = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))


def _environment() -> dict[Any, Any]:
    """Return the undecoded environment; decoding a copy takes twenty times as long."""
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
"""The settings that every process has."""
