"""The interface of layers that keep a state: how to build, feed, reset and reorder one.

Only `StatefulLayer.build` and `StatefulLayer.feed` are required. What a layer does not define is
not checked. The layer has its own weights, so it may rotate, group, normalise and cache as it does.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conformance.adapter.loading import located
from conformance.definition.dtypes import DTYPES
from conformance.errors import (
    FailsOnImport,
    NotAnAdapter,
    UnknownName,
    Unsupported,
    WrongDeclaration,
    check_names,
)
from conformance.text import message

EQUAL_BITS = "equal bits"
"""What a layer can promise of a relation: that two ways give the same bits, where −0 equals 0."""

PROMISES = ("batch", "steps", "chunks", "runs", "batch position", "threads")
"""The relations of which a layer can promise equal bits."""


class StatefulLayer(ABC):
    """The base class for layers that keep a state, such as a cache of keys and values.

    A layer is causal: the output of a token depends on that token and on those before it. The suite
    copies what `build` returns for each way through a text, so the layer may keep its state in
    itself.

    Attributes:
        name: the name in tables; that of the class by default.
        framework: the name of the framework whose arrays the layer takes and returns.
        width: the size of the embedding of a token.
        dtypes: the dtypes in which the layer is built.
        window: how many tokens, its own included, a token attends to at most; None for all. A text
            is then longer than the window.
        capacity: how many tokens a static buffer holds; None if the state grows. A text is then
            as long as the buffer.
        promises: for names in `PROMISES`, "equal bits". What is not promised is only observed.
    """

    name: str = ""
    framework: str = "torch"
    width: int
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    window: int | None = None
    capacity: int | None = None
    promises: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def build(self, dtype: str) -> Any:
        """Return the layer with its own weights, which has not been fed anything."""

    @abstractmethod
    def feed(self, layer: Any, tokens: Any) -> Any:
        """Return the outputs `[batch query width]` of new tokens, which follow those fed before.

        `tokens` is `[batch query width]`, in the layer's dtype.
        """

    def feed_padded(self, layer: Any, tokens: Any, real: Any) -> Any:
        """Return the outputs of new tokens, some of which are padding.

        `real` is a boolean array `[batch length]`, which covers the tokens fed before too; False
        marks padding. What is returned for padding is not looked at.
        """
        raise Unsupported("it takes no padding")

    def feed_uncached(self, layer: Any, tokens: Any) -> Any:
        """Return the outputs of a whole text without keeping or using a state."""
        raise Unsupported("its cache cannot be switched off")

    def reset(self, layer: Any) -> None:
        """Forget all tokens."""
        raise Unsupported("it does not reset")

    def rollback(self, layer: Any, count: int) -> None:
        """Forget the last `count` tokens."""
        raise Unsupported("it does not roll back")

    def reorder(self, layer: Any, rows: Sequence[int]) -> None:
        """Let the row `i` of the batch go on with the state of row `rows[i]`.

        A row may occur more than once or not at all, so the batch may shrink.
        """
        raise Unsupported("it does not reorder rows")

    def save(self, layer: Any) -> Any:
        """Return a copy of the state, on which what the layer does later has no influence."""
        raise Unsupported("it saves no state")

    def restore(self, layer: Any, saved: Any) -> None:
        """Replace the state with one that `save` returned; it may be restored more than once."""
        raise Unsupported("it restores no state")

    def fresh(self, layer: Any) -> Any:
        """Return a copy of what `build` returned, with the same weights; by default, a deep copy.

        The original is never fed.
        """
        return copy.deepcopy(layer)

    def wide(self, layer: Any) -> Any:
        """Return a copy with the same weights that computes in float64, to measure rounding noise.

        By default, this is for modules of PyTorch. If it raises `Unsupported`, only the noise of
        the definition counts.
        """
        if not callable(getattr(layer, "double", None)):
            raise Unsupported("it does not compute in float64")
        return self.fresh(layer).double()


def is_stateful(found: Any) -> bool:
    """Return whether an object or class is a `StatefulLayer`."""
    return isinstance(found, StatefulLayer) or (
        inspect.isclass(found) and issubclass(found, StatefulLayer)
    )


def find_stateful(spec: str) -> StatefulLayer | None:
    """Return the layer that `path/to/file.py:Name` or `package.module:Name` names.

    Return None if that is no `StatefulLayer`. Only a source that mentions the class is imported,
    because other implementations are imported in processes of their own.

    Raises:
        ConformanceError: as `declared` and `conformance.adapter.loading.located`.
    """
    place, _, attribute = spec.partition(":")
    file = Path(place)
    if attribute and not place.endswith(".py"):
        try:
            found = importlib.util.find_spec(place)
        except (ImportError, ValueError):
            return None
        file = Path((found and found.origin) or "")
    if not (attribute and file.is_file()):
        return None
    source = file.read_text(encoding="utf-8", errors="ignore")
    if StatefulLayer.__name__ not in source:
        return None
    try:
        named = located(spec)
    except NotAnAdapter as error:
        names = re.findall(r"^(?:class )?(\w+) *[(=].*StatefulLayer", source, re.MULTILINE)
        if isinstance(error, FailsOnImport) or attribute in names or not names:
            raise
        raise UnknownName("stateful layer", attribute, names) from error
    return declared(named, spec) if is_stateful(named) else None


def declared(found: Any, spec: str) -> StatefulLayer:
    """Return the layer for a class, which is instantiated, or an instance, after checking it.

    Args:
        found: the class or instance.
        spec: the text by which the user chose it, for messages and as its name if it has none.

    Raises:
        NotAnAdapter: if `found` is no stateful layer, or lacks the definition of a method.
        FailsOnImport: if the class cannot be instantiated.
        WrongDeclaration: if a declaration is invalid.
    """
    if inspect.isclass(found) and issubclass(found, StatefulLayer):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise NotAnAdapter(f"{spec}: {found.__name__} does not define {missing}")
        try:
            found = found()
        except Exception as error:
            raise FailsOnImport(
                f"{spec}: {found.__name__}() fails: {type(error).__name__}: {message(error)}"
            ) from error
    if not isinstance(found, StatefulLayer):
        raise NotAnAdapter(
            f"{spec}: {type(found).__name__} is no stateful layer; derive from "
            "conformance.StatefulLayer"
        )
    found.name = found.name or spec.rpartition(":")[2] or type(found).__name__
    if not isinstance(getattr(found, "width", None), int) or found.width < 1:
        raise WrongDeclaration(f"{spec}: width must be the size of an embedding")
    for attribute in ("window", "capacity"):
        value = getattr(found, attribute)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise WrongDeclaration(f"{spec}: {attribute} must be a positive number, is {value!r}")
    check_names("dtype", found.dtypes, DTYPES)
    check_names("promise", found.promises, PROMISES)
    for relation, value in found.promises.items():
        if value != EQUAL_BITS:
            raise WrongDeclaration(
                f"{spec}: promises: {relation!r} can be {EQUAL_BITS!r}, not {value!r}"
            )
    return found
