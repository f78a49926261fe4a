"""What adapters declare about masks, causal flags, fully masked rows and weights, in few words.

A declaration is not the library's documentation: adapters are written from what a library documents
and from how it was seen to behave. The suite does not believe it; experiments are compared with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache

import msgspec

from conformance.adapter.base import Adapter
from conformance.adapter.loading import load, registered
from conformance.errors import ConformanceError


class Documented(msgspec.Struct, frozen=True):
    """What several adapters declare alike.

    Attributes:
        implementations: their names.
        says: the declaration in few words.
        documentation: links to what the libraries' authors say, or [].
    """

    implementations: list[str]
    says: str
    documentation: list[str]


@cache
def adapters() -> tuple[Adapter, ...]:
    """Every adapter that is installed and imports."""
    loaded = []
    for name in registered():
        with suppress(ConformanceError):
            loaded.append(load(name))
    return tuple(loaded)


def grouped(says: Callable[[Adapter], str]) -> list[Documented]:
    """Implementations by what `says` makes of them."""
    groups: dict[str, list[Adapter]] = {}
    for adapter in adapters():
        groups.setdefault(says(adapter), []).append(adapter)
    return [
        Documented(
            [adapter.name for adapter in alike],
            text,
            list(dict.fromkeys(a.documentation for a in alike if a.documentation)),
        )
        for text, alike in groups.items()
    ]


def about(requirement: str) -> list[Documented]:
    """What adapters declare of what a requirement asks; [] if nothing of the kind."""
    says = next((say for start, say in _SAYS.items() if requirement.startswith(start)), None)
    return grouped(says) if says else []


def _masks(adapter: Adapter) -> str:
    arguments = []
    for item in (*adapter.mask_arguments, *adapter.implicit_masks):
        means = [f"True {item.true}"] if item.true else []
        if item.number:
            means.append(_number(item.number))
        arguments.append(f"{item.name}: {', '.join(means) or 'not said'}")
    return "; ".join(arguments) or "has no mask argument"


def _number(meaning: str) -> str:
    if meaning == "added":
        return "a number is added"
    how, rule = re.split(", | if ", meaning)
    return {
        "nonzero": f"a number {how} if it is not 0",
        "1": f"a number {how} if it is 1",
    }.get(rule, f"1 {how}, of other numbers nothing is said")


def _causal(adapter: Adapter) -> str:
    flag = adapter.causal_flag
    if flag is None:
        return "has no causal flag"
    aligned = f"aligned {flag.alignment}" if flag.alignment else "for equal lengths only"
    return f"{flag.name}, {aligned}" + (f", beside {flag.needs}" if flag.needs else "")


def _rows(adapter: Adapter) -> str:
    declared = adapter.fully_masked_row
    if not declared:
        return "says nothing"
    if isinstance(declared, Mapping):
        by_value: dict[str, list[str]] = {}
        for mode, value in declared.items():
            by_value.setdefault(value, []).append(mode)
        return "; ".join(f"{value} in {', '.join(modes)}" for value, modes in by_value.items())
    return str(declared)


def _weights(adapter: Adapter) -> str:
    seen = adapter.returns_weights
    return f"returns them {adapter.weights_told(seen)}" if seen else "returns none"


def _dtypes(adapter: Adapter) -> str:
    return ", ".join(adapter.dtypes)


def _modes(adapter: Adapter) -> str:
    return ", ".join(mode.name for mode in adapter.modes)


def _dropout(adapter: Adapter) -> str:
    return "active in " + ", ".join(adapter.dropout_modes) if adapter.dropout_modes else "has none"


_SAYS: dict[str, Callable[[Adapter], str]] = {
    "mask.": _masks,
    "observed.fully-masked-row": _rows,
    "observed.causal-alignment": _causal,
    "observed.returned-weights": _weights,
    "weights.": _weights,
    "dtype.": _dtypes,
    "modes.": _modes,
    "dropout.": _dropout,
}
"""Beginning of a requirement's id to what is worth knowing there."""

_TOPICS = {
    "masks": _masks,
    "same-mask": _masks,
    "pairs": _masks,
    "shapes": _masks,
    "coinciding-sizes": _masks,
    "masked-rows": _rows,
    "causal": _causal,
    "weights": _weights,
    "dropout": _dropout,
}


def about_topic(topic: str) -> list[Documented]:
    """The same for an experiment."""
    return grouped(_TOPICS[topic]) if topic in _TOPICS else []
