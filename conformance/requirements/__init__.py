"""All requirements, in the order in which reports show them.

They are collected from the modules of this package, so a `Requirement` needs no registration.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

from conformance.errors import UnknownName
from conformance.requirements.requirement import Requirement

ORDER = (
    "definition",
    "meaning",
    "invariance",
    "agreement",
    "observed",
    "probed",
)
"""The modules of this package in the order in which reports show their requirements.

Modules that are not listed here come last, in alphabetical order.
"""


def _defined() -> Iterator[Requirement]:
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in sorted(names, key=lambda name: (*ORDER, name).index(name)):
        module = importlib.import_module(f"{__name__}.{name}")
        for item in vars(module).values():
            if isinstance(item, Requirement) and item.check.__module__ == module.__name__:
                yield item


REQUIREMENTS: tuple[Requirement, ...] = tuple(_defined())


def find_requirement(name: str) -> Requirement:
    """Return the requirement with this id; raise `UnknownName` if there is none."""
    for requirement in REQUIREMENTS:
        if requirement.id == name:
            return requirement
    raise UnknownName("requirement", name, (item.id for item in REQUIREMENTS))
