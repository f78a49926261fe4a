"""The header of a record: what was asked in a run, and of which implementations.

It has everything that a report needs beside the findings, so that a record can be read years later,
without the suite that made it, its adapters or any framework.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from conformance.records.findings import Topic

SCHEMA = "mha-conformance/record/2"


class MaskInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A declared mask argument.

    Attributes:
        name: the argument's own name.
        axes: the layouts that it accepts, preferred first, such as "(batch heads) query key".
        true: what True means, "attends" or "blocks"; None if booleans are not accepted.
        number: what a number means, such as "added"; None if numbers are not accepted.
        broadcasts: whether an axis that stands alone in a layout may also have size 1.
    """

    name: str
    axes: list[str]
    true: str | None
    number: str | None
    broadcasts: bool = False


class CausalInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A declared causal flag.

    Attributes:
        name: the argument's own name.
        alignment: "top-left" or "bottom-right"; "" if lengths must be equal.
        needs: a mask argument that must hold the causal mask all the same, or "".
    """

    name: str
    alignment: str = ""
    needs: str = ""


class WeightsInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """How attention weights are declared to come back.

    Attributes:
        returned: "per head" or "averaged".
        option: what the adapter passes to get them per head, or "".
        otherwise: what comes back without that option.
    """

    returned: str
    option: str = ""
    otherwise: str = ""


class ParameterInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of a parameter table: a native parameter made of canonical weights.

    Attributes:
        native: the parameter's own name.
        sources: names of canonical weights, separated by spaces.
        pattern: einops pattern from canonical to native axes.
        stack: the axis on which several sources lie one after another, or None.
    """

    native: str
    sources: str
    pattern: str
    stack: int | None = None


class Implementation(msgspec.Struct, frozen=True, omit_defaults=True):
    """An implementation as its adapter declares it.

    Attributes:
        spec: what to give to --implementation.
        versions: of its framework's and its library's packages.
        modes: names of its modes; the first is the one that others are compared with.
        causal: the causal flag, if there is one.
        unavailable: why nothing of it could be run, or "".
        kind: whether it has weights of its own (layer), attends on heads that are projected
            already (function), or neither is known.
        about: what its adapter says of it, in Markdown.
        example: Python lines that call it, or "".
        mode_notes: mode to how the implementation is called in it, where the adapter says so.
        layout: of the query, key, value and result of a function, such as
            "batch heads length head".
        grouped: whether a function takes fewer key/value heads than query heads.
        parameters: the parameter table of a layer, for equal lengths and heads if it can have them.
        weights: how attention weights come back, or None if they do not.
        custom_scale: whether the factor of the logits can be chosen.
        differentiable: whether it has gradients.
        fully_masked_row: mode to the declared output of a fully masked query; {} if not declared.
        digest: of the code of its adapter, and of the project's own modules that the adapter
            imports.
    """

    name: str
    title: str
    documentation: str
    framework: str
    spec: str
    versions: dict[str, str]
    modes: list[str]
    dtypes: list[str]
    masks: list[MaskInfo]
    causal: CausalInfo | None = None
    unavailable: str = ""
    kind: Literal["layer", "function", "other"] = "other"
    about: str = ""
    example: str = ""
    mode_notes: dict[str, str] = {}
    layout: str = ""
    grouped: bool = False
    parameters: list[ParameterInfo] = []
    weights: WeightsInfo | None = None
    custom_scale: bool = False
    differentiable: bool = True
    fully_masked_row: dict[str, str] = {}
    digest: str = ""


class RequirementInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A requirement of the suite that made the record.

    Attributes:
        id: stable words, "chapter.sentence".
        level: "must", "should" or "observed".
        sentence: what is required.
        why: what goes wrong for users otherwise.
        revision: increased whenever the same answer may get another finding.
    """

    id: str
    level: str
    sentence: str
    why: str = ""
    revision: int = 1

    @property
    def chapter(self) -> str:
        """The first word of the id."""
        return self.id.partition(".")[0]


class Plane(msgspec.Struct, frozen=True):
    """Which keys each query may attend, for some batch entries and heads.

    Attributes:
        where: which of them: "entry 0, heads 0 and 1"; "" if it is so in all.
        queries, keys: its size.
        runs: row by row, lengths of runs of equal elements in turn; the first run is blocked.
    """

    where: str
    queries: int
    keys: int
    runs: list[int]


class CaseInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A case in words and as a picture, so that a record can be read without its catalogue.

    Attributes:
        why: what it does and what it catches.
        facts: its sizes and what else it is made of, a phrase each.
        planes: its mask and causal flag in one; [] if nothing is blocked.
        more: how many further planes there are.
        hash: of every number and flag of the case; two records that agree in it asked the same.
    """

    why: str
    facts: list[str]
    planes: list[Plane] = []
    more: int = 0
    hash: str = ""


class KnownDeviation(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the baseline that a run was held against, with the keys of a baseline file.

    `implementation`, `requirement`, `case`, `mode` and `when` say of which findings it speaks;
    `verdict`, `cause` with its `arguments`, `raises` and `within` what each of them must be;
    `kind`, `reason`, `link` and `reproduction` what is known of them.
    """

    verdict: str
    implementation: list[str] = []
    requirement: list[str] = []
    case: list[str] = []
    mode: list[str] = []
    when: str = ""
    cause: str = ""
    arguments: dict[str, Any] = {}
    raises: str = ""
    within: float | None = None
    strict: bool = True
    kind: str = ""
    reason: str = ""
    link: str = ""
    reproduction: str = ""


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where and how a record was made."""

    suite: str
    catalogue: str
    """Hash of every number of every case."""
    created: str
    """UTC, ISO 8601."""
    run: str
    """Records of one run of tox share this."""
    python: str
    platform: str
    device: str
    device_model: str
    packages: dict[str, str]
    command: str
    selection: str = ""
    """What narrowed the run, or ""."""
    machine: str = ""
    """Architecture and processor."""
    environment: dict[str, str] = {}
    """Variables of the environment that may change numbers, such as `OMP_NUM_THREADS`."""
    code: str = ""
    """Digest of the code of the suite on which every outcome depends."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known before the first finding.

    Attributes:
        planned: how many items (implementation x case x dtype x device x mode) were to be examined.
        deselected: how many more there would have been.
        cases: what each case of the run asks, by id.
        requirements: those of the suite that made the record, in the order of a report.
        topics: those of its experiments, in the order of a card.
        known: entries of the baseline that the run was held against.
        revisions: digest of the code behind each requirement and experiment, by id, and of
            "causes".
    """

    schema: str
    name: str
    provenance: Provenance
    implementations: list[Implementation]
    planned: int
    deselected: int = 0
    cases: dict[str, CaseInfo] = {}
    requirements: list[RequirementInfo] = []
    topics: list[Topic] = []
    known: list[KnownDeviation] = []
    revisions: dict[str, str] = {}

    def requirement(self, name: str) -> RequirementInfo | None:
        """Return the requirement of this id, or None if the record does not have it."""
        return next((item for item in self.requirements if item.id == name), None)

    def question(self, case: str) -> str:
        """Return in words what a case or an experiment asks; "" if the record does not say."""
        if case in self.cases:
            return self.cases[case].why
        return next((topic.question for topic in self.topics if topic.id == case), "")
