"""The requirements, chapter by chapter, in the order in which reports show them.

Every module of this package may have a table `REQUIREMENTS`; its file is all that it takes.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from conformance.errors import UnknownName
from conformance.requirements.requirement import Requirement

ORDER = (
    "definition",
    "weights",
    "polarity",
    "invariance",
    "agreement",
    "usage",
    "observed",
    "declared",
    "probed",
)
"""Modules in the order of reports; one that is not named comes after them."""


def _collected() -> Iterator[Requirement]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in sorted(names, key=lambda name: (*ORDER, name).index(name)):
        module = importlib.import_module(f"{__name__}.{name}")
        yield from getattr(module, "REQUIREMENTS", ())


REQUIREMENTS: tuple[Requirement, ...] = tuple(_collected())


def find_requirement(name: str) -> Requirement:
    """Return the requirement with this id; raises `UnknownName`."""
    for requirement in REQUIREMENTS:
        if requirement.id == name:
            return requirement
    raise UnknownName("requirement", name, (item.id for item in REQUIREMENTS))
