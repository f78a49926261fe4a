"""The header of a record: the cases and requirements of a run, and the implementations examined.

With the results and the arrays stored beside them, it contains everything that a report needs, so
that a record can be read years later, without the suite that wrote it, its adapters or any
framework.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Literal

import msgspec

from conformance.records.findings import Topic

SCHEMA = "mha-conformance/record/2"


class MaskInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A declared mask argument.

    Attributes:
        name: the name of the argument in the implementation.
        axes: the layouts that it accepts, preferred first, such as "(batch heads) query key".
        true: what True means, "attends" or "blocks"; None if booleans are not accepted.
        number: what a number means, such as "added"; None if numbers are not accepted.
        broadcasts: whether an axis may also have size 1, unless it is joined with others by
            parentheses in `axes`.
    """

    name: str
    axes: list[str]
    true: str | None
    number: str | None
    broadcasts: bool = False


class CausalInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A declared causal flag.

    Attributes:
        name: the name of the argument in the implementation.
        alignment: the corner of the mask `[query key]` through which its diagonal goes, "top-left"
            or "bottom-right"; "" if there must be as many queries as keys.
        needs: a mask argument that must hold the causal mask in addition to the flag, or "".
        effect: when it has an effect: "always"; "without a mask", if a mask replaces it; "instead
            of masks", if it replaces masks; or "none".
    """

    name: str
    alignment: str = ""
    needs: str = ""
    effect: str = "always"


class WeightsInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The declaration of how attention weights are returned.

    Attributes:
        returned: "per head" or "averaged".
        option: the option that the adapter passes to get them per head, or "".
        otherwise: what is returned without this option; "" if there is no option.
    """

    returned: str
    option: str = ""
    otherwise: str = ""


class ParameterInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A row of a parameter table: how a layer's parameter is made from the suite's weights.

    Attributes:
        native: the parameter's name in the implementation.
        sources: the suite's names of these weights, separated by spaces.
        pattern: the einops pattern from the suite's axes to those of the parameter.
        stack: the axis along which several sources are concatenated, or None.
    """

    native: str
    sources: str
    pattern: str
    stack: int | None = None


class FeatureInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A declared feature beyond masks, such as a window.

    Attributes:
        kind: the class of the declaration, such as "Window" or "Pages".
        says: the parts of a problem that the feature expresses, such as "window" or "key lengths".
        names: the names of the arguments, or of the parameters.
    """

    kind: str
    says: list[str]
    names: list[str]


class Implementation(msgspec.Struct, frozen=True, omit_defaults=True):
    """An implementation as its adapter declares it.

    Attributes:
        spec: the value to pass to --implementation.
        versions: the versions of the packages of its framework and its library.
        modes: the names of its modes; answers in later modes are compared with those in the first.
        causal: the causal flag, if there is one.
        unavailable: the reason if it could not be run at all, or "".
        kind: "layer" if it holds its weights, "function" if it takes projected heads, or "other"
            if neither is known.
        about: the description in its adapter, in Markdown.
        example: Python lines that call it, or "".
        mode_notes: by mode, a text on how the implementation is called; modes may be missing.
        layout: the layout of the query, key, value and result of a function, as the library takes
            them, such as "batch heads length head".
        grouped: whether a function accepts fewer key/value heads than query heads.
        parameters: the parameter table of a layer, for the simplest shape that it accepts, or [].
        weights: how attention weights are returned, or None if they are not.
        custom_scale: whether the scale of the logits can be chosen.
        scores: the scores that it computes, "scaled-dot" or "additive"; [] in records older than
            this field.
        differentiable: whether it has gradients.
        accuracy: the accuracy class promised in the dtypes that have it, or "" for none; if it
            differs among dtypes, by dtype.
        judged_by: for each dtype, the accuracy class by which answers are judged: the promised one,
            or else the least accurate that the dtype has; {} in records older than this field.
        promises: what is promised to have equal bits, such as {"runs": "equal bits"}.
        fully_masked_row: the declared output of a fully masked query, by mode; may be empty.
        digest: a digest of the code of its adapter and of the modules in the same project that the
            adapter imports.
        features: the declared features beyond masks; None in records older than this field.
        toolkit: on a GPU, the versions of CUDA and cuDNN that its framework uses, as far as the
            framework knows them; else {}.
        settings: the settings of its framework that decide how precisely it computes, such as
            whether TF32 is allowed, by name.
        inputs: the files, packages and environment variables that it read while it ran, such as
            "file kernel.py", with their digests; {} if they are unknown.
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
    scores: list[str] = []
    differentiable: bool = True
    accuracy: str | dict[str, str] = ""
    judged_by: dict[str, str] = {}
    promises: dict[str, str] = {}
    fully_masked_row: dict[str, str] = {}
    digest: str = ""
    features: list[FeatureInfo] | None = None
    toolkit: dict[str, str] = {}
    settings: dict[str, str] = {}
    inputs: dict[str, str] = {}


class RequirementInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """A requirement of the suite that wrote the record.

    Attributes:
        id: a stable id of two parts, "chapter.name".
        level: "must", "should" or "observed".
        sentence: what is required.
        why: how a violation affects users.
        revision: a number that is increased whenever a change to the requirement may lead to other
            findings about the same answer.
    """

    id: str
    level: str
    sentence: str
    why: str = ""
    revision: int = 1

    @property
    def chapter(self) -> str:
        """The chapter of the requirement: the part of its id before the dot."""
        return self.id.partition(".")[0]


class Plane(msgspec.Struct, frozen=True):
    """The mask of some batch entries and heads: which keys each query may attend to.

    Attributes:
        where: the entries and heads, such as "entry 0, heads 0 and 1"; "" for all.
        queries, keys: the size of the mask.
        runs: lengths of alternating blocked and allowed runs, row by row, blocked first.
    """

    where: str
    queries: int
    keys: int
    runs: list[int]


class CaseInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of a case, so that a record can be read without its catalogue.

    Attributes:
        why: what the case does and which mistakes it catches.
        facts: short texts about its sizes, masks, bias, scale, score and features.
        planes: the first few distinct masks `[query key]` that result from combining the mask with
            the causal mask, the window, the lengths and the segments. If the masks are too large to
            draw, the list holds one plane without runs; if the case has none of these, it is [].
        more: the number of further masks that are not stored.
        hash: a hash of the problem and of what is required of its answer, without names and texts.
        features: the names of its features beyond masks, such as "window" or "sinks".
    """

    why: str
    facts: list[str]
    planes: list[Plane] = []
    more: int = 0
    hash: str = ""
    features: list[str] = []


class KnownDeviation(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of the baseline with which a run was compared.

    The fields are named like the keys in a baseline file. `implementation`, `requirement`, `case`,
    `mode` and `when` select findings. `verdict`, `cause` with its `arguments`, `raises` and
    `within` describe how each of these findings must deviate; if `strict` is false, some of them
    need not deviate. `kind`, `reason`, `link` and `reproduction` document the deviation.
    """

    verdict: str
    implementation: tuple[str, ...] = ()
    requirement: tuple[str, ...] = ()
    case: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
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
    """The version of the suite; "+" and a digest of its sources follow, except in old records."""
    catalogue: str
    """A hash of all numbers of all cases in the catalogue."""
    created: str
    """The time of creation in UTC, in ISO 8601 format."""
    run: str
    """The id that all records of one tox run share."""
    python: str
    platform: str
    device: str
    device_model: str
    packages: dict[str, str]
    command: str
    selection: str = ""
    """The options that restricted the run, or ""."""
    chosen: str = ""
    """The options by which the project's settings choose what every run asks, or ""."""
    level: str = "full"
    """The level of the run: with "full", every case was asked in every dtype and mode."""
    machine: str = ""
    """The processor of the machine, or its architecture, and its widest vector extension."""
    environment: dict[str, str] = {}
    """Environment variables that may change results, such as `OMP_NUM_THREADS`, and what is unusual
    about the interpreter, such as "optimize=1" in "sys.flags"."""
    code: str = ""
    """A digest of that part of the suite's code on which all results depend."""
    driver: str = ""
    """The version of the GPU's driver, or "" on the CPU and where it is unknown."""


class Header(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a record that is known before the first result.

    Attributes:
        planned: the number of items (implementation x case x dtype x device x mode) to examine.
        deselected: the number of items that options such as pytest's -k excluded.
        cases: the description of each case of the run, by id.
        requirements: the requirements of the suite, in the order of a report.
        topics: the descriptions of the run's experiments, in the order of a card.
        known: the entries of the baseline with which the run was compared.
        revisions: a digest of the code of each requirement and experiment, by id, and of the
            package "causes".
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
        """Return the requirement with this id, or None if the record does not contain it."""
        return next((item for item in self.requirements if item.id == name), None)

    def question(self, case: str) -> str:
        """Return the purpose of the case or the question of the experiment with the id `case`.

        Return "" if the record contains neither.
        """
        if case in self.cases:
            return self.cases[case].why
        return next((topic.question for topic in self.topics if topic.id == case), "")


def processor() -> str:
    """Return the model of this machine's processor, and its widest vector extension, if known.

    Without a model, return the architecture. The result is `Provenance.machine`. The extension
    matters because a kernel may do something else with what does not fill a vector.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return described(text) or platform.processor() or platform.machine()


VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sve": "SVE", "asimd": "NEON"}
"""The vector extensions that are named, by their flags in Linux, the widest of each kind first."""


def described(cpuinfo: str) -> str:
    """Return the first processor's model and vector extension in the text of `/proc/cpuinfo`.

    Return "" if the text names no model.
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields: dict[str, str] = {}
    for name, _, value in lines:
        fields.setdefault(name.strip().lower(), value.strip())
    model = fields.get("model name", "")
    flags = set(f"{fields.get('flags', '')} {fields.get('features', '')}".split())
    vector = next((told for flag, told in VECTORS.items() if flag in flags), "")
    return f"{model}, {vector}" if model and vector else model
