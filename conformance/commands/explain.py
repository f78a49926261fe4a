"""`mha-conformance explain`: what a case, a requirement or an experiment means.

Prose, inputs, derivation, and what each adapter declares. A declaration is not the library's
documentation: adapters are written from what a library documents and from how it was seen to
behave. The suite does not believe it; experiments are compared with it.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from conformance.commands.formats import print_json
from conformance.commands.shared import Commands, add_format
from conformance.errors import ConformanceError, ExitCode, UnknownName, Unsupported
from conformance.records.findings import Topic
from conformance.records.header import CaseInfo, Plane
from conformance.text import heading, line, paragraph, plural, some
from conformance.words import say

if TYPE_CHECKING:
    from rich.console import Console

    from conformance.adapter.base import Adapter
    from conformance.cases.case import Case
    from conformance.definition.problem import Problem
    from conformance.requirements.requirement import Requirement

MOST_DRAWN = 32
"""Wider masks are not drawn in a terminal."""

MOST_PRINTED = 8
"""Of more than these, a terminal gets the ids only."""


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    explain = commands.add_parser(
        "explain",
        help="explain a case, an experiment or a requirement",
        description="Explain a case, an experiment or a requirement: what it asks and why, the "
        "inputs, how the expected answer follows, and what each adapter declares.",
    )
    explain.add_argument(
        "name",
        help="an id, the beginning of several, or a pattern: mask/shared, probe/, '*/cross'",
    )
    add_format(explain, "explain")
    explain.set_defaults(action=_explain)


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


class ExplainedCase(msgspec.Struct, frozen=True, tag_field="kind", tag="case"):
    """A case.

    Attributes:
        id: what to give to `--case`.
        case: prose, inputs and masks.
        defined: whether there is an agreed answer.
        derivation: how the expected answer, and what is allowed, follow.
        idle: inputs that by definition do not move the answer here, with the reason.
        requirements: what looks at it.
        put: how each library is told this problem, by its declaration; or why it cannot be.
        command: runs it.
    """

    id: str
    case: CaseInfo
    defined: bool
    derivation: list[str]
    idle: dict[str, str]
    requirements: list[str]
    put: list[Documented]
    command: str


class ExplainedRequirement(msgspec.Struct, frozen=True, tag_field="kind", tag="requirement"):
    """A requirement: how it is `decided`, what `cases` serve it, what adapters declare."""

    id: str
    level: str
    sentence: str
    why: str
    decided: str
    cases: list[str]
    documented: list[Documented]
    command: str


class ExplainedExperiment(msgspec.Struct, frozen=True, tag_field="kind", tag="experiment"):
    """An experiment; `done` is how, `documented` what adapters declare."""

    id: str
    title: str
    question: str
    done: str
    documented: list[Documented]
    command: str


Explained: TypeAlias = ExplainedCase | ExplainedRequirement | ExplainedExperiment


class Explanation(msgspec.Struct, frozen=True):
    """All that a name finds."""

    entries: list[Explained]


def explanation(name: str) -> Explanation:
    """All that has this id, begins with it, or matches it as a pattern: requirements, experiments
    and cases.

    Raises:
        UnknownName: nothing has this name.
        ConformanceError: it is the name of an implementation.
    """
    from conformance.cases.catalogue import catalogue
    from conformance.experiments import TOPICS
    from conformance.requirements import REQUIREMENTS

    requirements = {item.id: item for item in REQUIREMENTS}
    topics = {topic.id: topic for topic in TOPICS}
    cases = {case.id: case for case in catalogue()}
    found = _found(name, [*requirements, *topics, *cases])
    return Explanation(
        [
            *(_requirement(requirements[item]) for item in found if item in requirements),
            *(_experiment(topics[item]) for item in found if item in topics),
            *(_case(cases[item]) for item in found if item in cases),
        ]
    )


def _found(name: str, known: list[str]) -> list[str]:
    """Return the ids that equal this name, begin with it, or match it."""
    if name in known:
        return [name]
    found = [item for item in known if name and item.startswith(name)]
    found = found or [item for item in known if fnmatch.fnmatchcase(item, name)]
    if not found and _is_implementation(name):
        raise ConformanceError(
            f"{name!r} is an implementation; its conventions: mha-conformance probe {name}, "
            f"and whether it is right: mha-conformance run {name}"
        )
    if not found:
        raise UnknownName("case, experiment or requirement", name, known)
    return found


def _is_implementation(name: str) -> bool:
    """Return whether an implementation has this name or title, without importing a file."""
    from conformance.adapter.loading import find

    if ":" in name or name.endswith(".py"):
        return True
    with suppress(ConformanceError):
        return bool(find(name))
    return False


def _explain(options: argparse.Namespace) -> int:
    """Print it; raises as `explanation` does."""
    from rich.console import Console

    found = explanation(options.name)
    if options.format == "json":
        print_json(found)
        return ExitCode.OK
    console = Console(highlight=False, soft_wrap=True)
    if len(found.entries) > MOST_PRINTED:
        _print_ids(console, options.name, found.entries)
        return ExitCode.OK
    for index, item in enumerate(found.entries):
        if index:
            console.print()
        if isinstance(item, ExplainedCase):
            _print_case(console, item, briefly=len(found.entries) > 1)
        elif isinstance(item, ExplainedRequirement):
            _print_requirement(console, item)
        else:
            _print_experiment(console, item)
    return ExitCode.OK


# What is known


def _case(case: Case) -> ExplainedCase:
    from conformance.cases.description import describe
    from conformance.requirements import REQUIREMENTS

    problem = case.problem("float32")
    return ExplainedCase(
        id=case.id,
        case=describe(case),
        defined=case.defined,
        derivation=_derivation(case, problem),
        idle=dict(case.idle),
        requirements=[item.id for item in REQUIREMENTS if item.serves(case)],
        put=_grouped(lambda adapter: _put(adapter, problem)),
        command=f"mha-conformance run NAME --case {case.id} --strict",
    )


def _requirement(requirement: Requirement) -> ExplainedRequirement:
    from conformance.cases.catalogue import catalogue

    return ExplainedRequirement(
        id=requirement.id,
        level=requirement.level,
        sentence=requirement.sentence,
        why=requirement.why,
        decided=_doc(requirement.check),
        cases=[case.id for case in catalogue() if requirement.serves(case)],
        documented=_about(requirement.id),
        command="mha-conformance run NAME --strict",
    )


def _experiment(topic: Topic) -> ExplainedExperiment:
    from conformance.experiments import experiment

    return ExplainedExperiment(
        id=topic.id,
        title=topic.title,
        question=topic.question,
        done=_doc(experiment(topic.name).make),
        documented=_about_topic(topic.name),
        command=f"mha-conformance probe NAME --experiment {topic.name} --evidence",
    )


def _doc(thing: Any) -> str:
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _derivation(case: Case, problem: Problem) -> list[str]:
    """Return the formula with the numbers of this case, and the size of the tolerance."""
    import numpy as np

    from conformance.records.numbers import LIMIT

    shape = problem.shape
    scale = shape.default_scale if problem.scale is None else problem.scale
    if shape.score == "additive":
        logits = "logits = Σ_d score_d · tanh(q_d + k_d)"
    else:
        logits = f"logits = {scale:.4g} · q kᵀ"
        logits += " (1/√head)" if problem.scale is None else " (a scale of its own)"
    told = [logits + (" + bias" if problem.attn_bias is not None else "")]
    if problem.allowed is not None:
        allowed = problem.allowed_in_full()
        blocked = int(allowed.size - np.count_nonzero(allowed))
        told.append(f"−∞ where blocked: {blocked:,} of {allowed.size:,} pairs of query and key")
        empty = int(np.count_nonzero(~allowed.any(axis=-1)))
        if empty:
            told.append(f"{empty} rows may attend nothing")
    told.append("weights = softmax of each row; output = weights · v, heads joined and projected")
    if not case.defined:
        return [*told, "no definition settles the answer: what is seen is recorded, not judged"]
    noise = _noise(case)
    return [
        *told,
        f"evaluated in float64; allowed are {LIMIT:g}σ for every element, where σ is the rounding "
        f"noise of an honest implementation: about {noise['float32']:.1e} in float32 and "
        f"{noise['bfloat16']:.1e} in bfloat16 for the output",
    ]


@cache
def _noise(case: Case) -> dict[str, float]:
    """Return the median σ of the output, by dtype."""
    import numpy as np

    from conformance.definition.expectation import expect

    found = {}
    for dtype in ("float32", "bfloat16"):
        noise = expect(case.problem(dtype)).noise
        found[dtype] = float(np.median(next(iter(noise.values()))["output"]))
    return found


def _put(adapter: Adapter, problem: Problem) -> str:
    try:
        adapter.check(problem)
        if not adapter.mask_arguments and adapter.causal_flag is None:
            return "as it is"
        return adapter.masks.spell(problem).label
    except Unsupported as reason:
        return f"unsupported: {reason}"
    except (ConformanceError, ImportError) as error:
        return f"not known: {error}"


# For people


def _print_ids(console: Console, name: str, found: list[Explained]) -> None:
    line(console, f"{len(found)} begin with or match {name}:")
    for item in found:
        if isinstance(item, ExplainedCase):
            told = item.case.why
        else:
            told = item.sentence if isinstance(item, ExplainedRequirement) else item.question
        line(console, f"{item.id}  {told}", indent=2)
    line(console, f"One of them in full: mha-conformance explain {found[0].id}")


def _print_case(console: Console, item: ExplainedCase, *, briefly: bool) -> None:
    _title(console, item.id, "" if item.defined else "no agreed answer")
    paragraph(console, item.case.why)
    heading(console, "Inputs")
    paragraph(console, "; ".join(item.case.facts))
    for plane in item.case.planes:
        _draw(console, plane)
    if item.case.more:
        paragraph(console, f"and {item.case.more} other masks")
    for name, reason in item.idle.items():
        paragraph(console, f"{name} does not matter here: {reason}")
    if briefly:
        return
    heading(console, "Derivation")
    for step in item.derivation:
        paragraph(console, step, bullet="· ")
    heading(console, "How each library is told")
    _libraries(console, item.put)
    heading(console, "Requirements that look at it")
    paragraph(console, ", ".join(item.requirements) or "none")
    _again(console, item.command)


def _print_requirement(console: Console, item: ExplainedRequirement) -> None:
    _title(console, item.id, item.level)
    paragraph(console, item.sentence, indent=0)
    paragraph(console, f"Why: {item.why}", indent=0)
    if item.decided:
        heading(console, "Decided by")
        paragraph(console, item.decided)
    if item.documented:
        heading(console, "What each adapter declares")
        _libraries(console, item.documented)
    if item.cases:
        heading(console, f"Served by {len(item.cases)} cases")
        paragraph(console, some(item.cases, 8))
    _again(console, item.command)


def _print_experiment(console: Console, item: ExplainedExperiment) -> None:
    _title(console, item.id, item.title)
    paragraph(console, item.question, indent=0)
    if item.done:
        heading(console, "Done by")
        paragraph(console, item.done)
    if item.documented:
        heading(console, "What each adapter declares")
        _libraries(console, item.documented)
    _again(console, item.command)


def _title(console: Console, name: str, beside: str) -> None:
    from rich.markup import escape

    console.print(f"[bold]{escape(name)}[/]" + (f" ({escape(beside)})" if beside else ""))


def _libraries(console: Console, found: Iterable[Documented]) -> None:
    for item in found:
        paragraph(console, ", ".join(item.implementations), bullet="· ")
        paragraph(console, item.says, indent=6)
        for link in item.documentation:
            line(console, link, indent=6, style="dim")


def _again(console: Console, command: str) -> None:
    heading(console, "Ask it")
    line(console, command, indent=2)


def _draw(console: Console, plane: Plane) -> None:
    """Print a mask; rows are queries, columns are keys."""
    where = plane.where or "every entry and head"
    size = f"{plural(plane.queries, 'query', 'queries')} × {plural(plane.keys, 'key')}"
    if plane.keys > MOST_DRAWN or plane.queries > MOST_DRAWN:
        paragraph(console, f"{where}: {size}, too large to draw here")
        return
    paragraph(console, f"{where} ({size}; # may attend, . may not):")
    flat = "".join(".#"[index % 2] * length for index, length in enumerate(plane.runs))
    for start in range(0, len(flat), plane.keys):
        line(console, flat[start : start + plane.keys], indent=4)


# What adapters declare


@cache
def _adapters() -> tuple[Adapter, ...]:
    """Return every installed adapter that can be imported."""
    from conformance.adapter.loading import load, registered

    loaded = []
    for name in registered():
        with suppress(ConformanceError):
            loaded.append(load(name))
    return tuple(loaded)


def _grouped(says: Callable[[Adapter], str]) -> list[Documented]:
    """Group implementations by the text that `says` returns for them."""
    groups: dict[str, list[Adapter]] = {}
    for adapter in _adapters():
        groups.setdefault(says(adapter), []).append(adapter)
    return [
        Documented(
            [adapter.name for adapter in alike],
            text,
            list(dict.fromkeys(a.documentation for a in alike if a.documentation)),
        )
        for text, alike in groups.items()
    ]


def _about(requirement: str) -> list[Documented]:
    """Return what adapters declare about the subject of a requirement; [] if nothing."""
    says = next((say for start, say in _SAYS.items() if requirement.startswith(start)), None)
    return _grouped(says) if says else []


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
    from conformance.requirements.declared import returned_weights

    return f"returns them {say(returned_weights(adapter, seen))}" if seen else "returns none"


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


def _about_topic(topic: str) -> list[Documented]:
    """Return what adapters declare about the subject of an experiment; [] if nothing."""
    return _grouped(_TOPICS[topic]) if topic in _TOPICS else []
