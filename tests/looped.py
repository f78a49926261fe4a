"""Check every entry of a table in one test, whose message names each entry that fails.

As an item of its own, an entry would cost more time than most of these checks take.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def for_each(**tables: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that calls a test for every combination of the entries of `tables`.

    The keys are the names of the test's arguments; all others are fixtures, which the calls share.
    An entry may be a `pytest.param` with an id. Every combination is tried. The test is skipped
    only if each of them is.
    """
    every = list(itertools.product(*map(tuple, tables.values())))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def looped(**fixtures: Any) -> None:
            failed, skipped = [], []
            for entries in every:
                name = ", ".join(map(_name, entries))
                try:
                    test(**dict(zip(tables, map(_value, entries), strict=True)), **fixtures)
                except pytest.skip.Exception as reason:
                    skipped.append(f"{name}: {reason}")
                except (Exception, pytest.fail.Exception) as error:
                    failed.append(f"{name}: {type(error).__name__}: {error}")
            assert every, f"{test.__name__}: there is nothing to check"
            assert not failed, f"{len(failed)} of {len(every)} fail:\n" + "\n".join(failed)
            if len(skipped) == len(every):
                pytest.skip(skipped[0])

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in tables]
        looped.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return looped

    return decorate


def _value(entry: Any) -> Any:
    return entry.values[0] if isinstance(entry, type(pytest.param())) else entry


def _name(entry: Any) -> str:
    return str(getattr(entry, "id", None) or getattr(entry, "__name__", None) or entry)
