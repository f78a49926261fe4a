"""The requirements, chapter by chapter, in the order in which reports show them."""

from __future__ import annotations

from conformance.errors import UnknownName
from conformance.requirements import (
    agreement,
    declared,
    definition,
    invariance,
    observed,
    polarity,
    probed,
    usage,
    weights,
)
from conformance.requirements.requirement import Requirement

REQUIREMENTS: tuple[Requirement, ...] = (
    *definition.REQUIREMENTS,
    *weights.REQUIREMENTS,
    *polarity.REQUIREMENTS,
    *invariance.REQUIREMENTS,
    *agreement.REQUIREMENTS,
    *usage.REQUIREMENTS,
    *observed.REQUIREMENTS,
    *declared.REQUIREMENTS,
    *probed.REQUIREMENTS,
)


def find_requirement(name: str) -> Requirement:
    """The requirement of this id; raises `UnknownName`."""
    for requirement in REQUIREMENTS:
        if requirement.id == name:
            return requirement
    raise UnknownName("requirement", name, (item.id for item in REQUIREMENTS))
