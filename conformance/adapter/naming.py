"""From what people call an implementation to its adapters: also by title, with or without brackets.

`conformance.adapter.loading` knows names, paths and modules. Who ports a model thinks in titles:
"keras.layers.MultiHeadAttention" is one layer to them and three adapters here, one for each
backend.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load, registered
from conformance.errors import ConformanceError, UnknownName

_BRACKETS = re.compile(r"\s*\([^()]*\)\s*$")


def find(spelled: str) -> tuple[Adapter, ...]:
    """The adapters that a name, title, title without brackets, path or module spells.

    Only a title without its brackets may spell several. No framework is imported.

    Raises:
        UnknownName: there is none; the message has the nearest names and titles.
        NotAnAdapter: a path or module that holds no such adapter.
        Unavailable: what its module imports is not installed.
    """
    known = registered()
    if spelled in known or ":" in spelled or spelled.endswith(".py"):
        return (load(spelled),)
    titled = [(adapter.title, adapter) for adapter in _importable()]
    found = [adapter for title, adapter in titled if title == spelled]
    found = found or [adapter for title, adapter in titled if _short(title) == spelled]
    if not found:
        titles = {name for title, _ in titled for name in (title, _short(title))}
        raise UnknownName("implementation", spelled, {*known, *titles})
    return tuple(found)


def _importable() -> Iterator[Adapter]:
    """All registered adapters, but for those that somebody else's package breaks."""
    for name in registered():
        try:
            yield load(name)
        except ConformanceError:
            continue


def _short(title: str) -> str:
    return _BRACKETS.sub("", title)
