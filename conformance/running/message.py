"""What a failure of a run says: the suite itself knows what its cases and requirements ask."""

from __future__ import annotations

from conformance.errors import UnknownName
from conformance.records.findings import CaseResult
from conformance.records.header import RequirementInfo
from conformance.reports import wording
from conformance.reports.wording import again
from conformance.requirements import find_requirement
from conformance.requirements.requirement import Requirement

__all__ = ["again", "failure", "known"]


class _Suite:
    """The requirements and cases of this version of the suite."""

    def requirement(self, name: str) -> RequirementInfo | None:
        found = known(name)
        if found is None:
            return None
        return RequirementInfo(found.id, found.level, found.sentence, found.why, found.revision)

    def question(self, case: str) -> str:
        from conformance.cases.catalogue import catalogue
        from conformance.experiments import TOPICS

        words = {own.id: own.why for own in catalogue()} | {t.id: t.question for t in TOPICS}
        return words.get(case, "")


def failure(
    result: CaseResult, spec: str, file: str = "", *, alone: bool = False, command: str = ""
) -> str:
    """Return every discrepancy of an item as lines of text; see `wording.failure`."""
    return wording.failure(result, spec, _Suite(), file, alone=alone, command=command)


def known(name: str) -> Requirement | None:
    """Return the requirement; None where the process was lost, or for another version's."""
    try:
        return find_requirement(name)
    except UnknownName:
        return None
