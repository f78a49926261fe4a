"""`mha-conformance explain`: explain what a case, a requirement or an experiment means.

The output has prose and, if adapters can declare something about the subject, what they declare.
For a case, it also has the inputs, the derivation of the expected answer and how adapters pass the
masks. Declarations are not the library's documentation: the author of an adapter derived them from
the documentation and from observed behaviour. Experiments check them.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from conformance.commands.shared import Commands, add_format, print_json, printed
from conformance.errors import ConformanceError, ExitCode, UnknownName, Unsupported
from conformance.records.header import CaseInfo, Plane
from conformance.text import heading, line, paragraph, plural, some
from conformance.words import say

if TYPE_CHECKING:
    from rich.console import Console

    from conformance.adapter.base import Adapter
    from conformance.cases.case import Case
    from conformance.definition.problem import Problem
    from conformance.experiments import Experiment
    from conformance.requirements.requirement import Requirement

MOST_DRAWN = 32
"""Masks with more queries or keys than this are not drawn; only their size is printed."""

MOST_PRINTED = 8
"""If a name matches more subjects than this, only their ids and summaries are printed as text."""

MOST_GROUPS, MOST_NAMES = 8, 3
"""As text, at most so many groups of implementations are printed, with so many names of each."""

UNSUPPORTED = "unsupported: "
"""The beginning of what is said of an implementation that cannot express a problem."""


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    explain = commands.add_parser(
        "explain",
        help="explain a case, an experiment or a requirement",
        description="Explain a case, an experiment or a requirement: what it tests and why, the "
        "inputs, the derivation of the expected answer, and what each adapter declares.",
    )
    explain.add_argument(
        "name",
        help="an id, the beginning of several, or a pattern: mask/shared, probe/, '*/cross'",
    )
    explain.add_argument(
        "implementation",
        nargs="?",
        help="what this implementation does or declares, with its documentation: a name as "
        "mha-conformance list implementations prints it, a title, or path/to/file.py:NAME",
    )
    add_format(explain, "explain")
    explain.set_defaults(action=_explain)


class Documented(msgspec.Struct, frozen=True):
    """What one or more adapters declare about a subject, or how they pass the masks of a case.

    Attributes:
        implementations: the names of the adapters, which all declare or do the same.
        says: in a few words, the declaration, or how the masks are passed or why they cannot be.
        documentation: links to documentation, each with the names of the implementations that it
            documents.
    """

    implementations: list[str]
    says: str
    documentation: dict[str, list[str]]


class ExplainedCase(msgspec.Struct, frozen=True, tag_field="kind", tag="case"):
    """The explanation of a case.

    Attributes:
        id: the value for `--case`.
        case: its description: prose, inputs and masks.
        defined: whether there is an agreed answer.
        derivation: the steps that lead from the formula to the tolerance; without an agreed
            answer, the last step says so and there is no tolerance.
        idle: inputs that by definition do not affect the answer here, with the reason.
        requirements: ids of the requirements that are checked on the case.
        put: how registered adapters pass the masks to their libraries, or why they cannot.
        command: the command that runs the case, with NAME for the implementation.
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
    """The explanation of a requirement.

    Attributes:
        decided: how the requirement is checked.
        cases: ids of the cases on which the requirement is checked.
        documented: what registered adapters declare about the requirement's subject; [] if nothing
            can be declared.
        command: a command that checks the requirement, with NAME for the implementation.
    """

    id: str
    level: str
    sentence: str
    why: str
    decided: str
    cases: list[str]
    documented: list[Documented]
    command: str


class ExplainedExperiment(msgspec.Struct, frozen=True, tag_field="kind", tag="experiment"):
    """The explanation of an experiment.

    Attributes:
        done: how the experiment works.
        documented: what registered adapters declare about the experiment's question; [] if nothing
            can be declared.
        command: the command that runs the experiment, with NAME for the implementation.
    """

    id: str
    title: str
    question: str
    done: str
    documented: list[Documented]
    command: str


Explained: TypeAlias = ExplainedCase | ExplainedRequirement | ExplainedExperiment


class Explanation(msgspec.Struct, frozen=True):
    """The explanations of everything that a name matches."""

    entries: list[Explained]


def explanation(name: str, implementation: str | None = None) -> Explanation:
    """Return explanations of the requirements, experiments and cases that a name matches.

    The name is tried as an id, then as the beginning of ids, then as a glob pattern. With
    `implementation`, only the adapters that it names are asked what they declare.

    Raises:
        UnknownName: if nothing matches, or there is no such implementation.
        ConformanceError: instead of `UnknownName`, if the name is that of an implementation or
            looks like the location of one; the message suggests commands.
    """
    from conformance.cases.catalogue import case_of, catalogue
    from conformance.experiments import EXPERIMENTS
    from conformance.requirements import REQUIREMENTS

    asked = _Asked(implementation)
    explain: dict[str, Callable[[], Explained]] = {
        **{item.id: partial(_requirement, item, asked) for item in REQUIREMENTS},
        **{item.id: partial(_experiment, item, asked) for item in EXPERIMENTS},
        **{case.id: partial(_case, case, asked) for case in catalogue()},
    }
    ids = [name] if name in explain else [id_ for id_ in explain if name and id_.startswith(name)]
    ids = ids or fnmatch.filter(explain, name)
    if not ids:
        # Cases on grids are not listed, because their sizes depend on the implementation.
        with suppress(UnknownName):
            return Explanation([_case(case_of(name), asked)])
    if not ids and _is_implementation(name):
        raise ConformanceError(
            f"{name!r} is an implementation; its conventions: mha-conformance probe {name}, "
            f"and whether it is right: mha-conformance run {name}"
        )
    if not ids:
        raise UnknownName("case, experiment or requirement", name, explain)
    return Explanation([explain[id_]() for id_ in ids])


class _Asked:
    """The adapters to ask what they declare: all registered ones, or those that a name finds.

    They are loaded when they are first needed.
    """

    def __init__(self, implementation: str | None) -> None:
        self._implementation = implementation

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        if self._implementation is None:
            return _registered()
        from conformance.adapter.loading import find

        return find(self._implementation)

    def command(self, command: str) -> str:
        """Return a command with the implementation's name, where one is known, for NAME."""
        name = self._implementation
        return command if name is None else command.replace("NAME", shlex.quote(name))


def _is_implementation(name: str) -> bool:
    """Return whether a name is an implementation's name or title, or looks like a location."""
    from conformance.adapter.loading import find

    with suppress(ConformanceError):
        return ":" in name or name.endswith(".py") or bool(find(name))
    return False


def _explain(options: argparse.Namespace) -> int:
    from rich.console import Console

    one = options.implementation
    entries = explanation(options.name, one).entries
    console = Console(highlight=False, soft_wrap=True)
    if options.format == "json":
        print_json(Explanation(entries))
    elif len(entries) > MOST_PRINTED:
        line(console, f"{len(entries)} begin with or match {options.name}:")
        for item in entries:
            line(console, f"{item.id}  {_summary(item)}", indent=2)
        line(console, f"One of them in full: mha-conformance explain {entries[0].id}")
    else:
        for index, item in enumerate(entries):
            if index:
                console.print()
            if isinstance(item, ExplainedCase):
                _print_case(console, item, one, briefly=len(entries) > 1 and one is None)
            else:
                _print_question(console, item, one)
    return ExitCode.OK


def _summary(item: Explained) -> str:
    if isinstance(item, ExplainedCase):
        return item.case.why
    return item.sentence if isinstance(item, ExplainedRequirement) else item.question


# Creating explanations


def _case(case: Case, asked: _Asked) -> ExplainedCase:
    from conformance.cases.case import describe
    from conformance.requirements import REQUIREMENTS

    problem = case.problem("float32")
    return printed(
        ExplainedCase,
        case,
        case=describe(case),
        derivation=_derivation(case, problem),
        idle=dict(case.idle),
        requirements=[item.id for item in REQUIREMENTS if item.serves(case)],
        put=_grouped(lambda adapter: _put(adapter, problem), asked),
        command=asked.command(f"mha-conformance run NAME --case {case.id} --strict"),
    )


def _requirement(requirement: Requirement, asked: _Asked) -> ExplainedRequirement:
    from conformance.cases.catalogue import catalogue

    return printed(
        ExplainedRequirement,
        requirement,
        decided=_first_paragraph(requirement.check),
        cases=[case.id for case in catalogue() if requirement.serves(case)],
        documented=_declared(requirement.id, asked),
        command=asked.command("mha-conformance run NAME --strict"),
    )


def _experiment(experiment: Experiment, asked: _Asked) -> ExplainedExperiment:
    return printed(
        ExplainedExperiment,
        experiment.topic,
        done=_first_paragraph(experiment.make),
        documented=_declared(experiment.id, asked),
        command=asked.command(
            f"mha-conformance probe NAME --experiment {experiment.name} --evidence"
        ),
    )


def _first_paragraph(documented: object) -> str:
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())


def _derivation(case: Case, problem: Problem) -> list[str]:
    """Return the steps that lead from the formula to the tolerance, with this case's numbers.

    If no definition settles the answer, the last step says so instead of giving a tolerance.
    """
    import numpy as np

    from conformance.records.numbers import LIMIT

    if problem.shape.score == "additive":
        logits = "Σ_d score_d · tanh(q_d + k_d)"
    else:
        name = "(1/√head)" if problem.scale is None else "(a scale of its own)"
        logits = f"{problem.logit_scale:.4g} · q kᵀ {name}"
    steps = [f"logits = {logits}" + (" + bias" if problem.attn_bias is not None else "")]
    if problem.allowed is not None:
        blocked = ~problem.allowed_in_full()
        pairs = f"{np.count_nonzero(blocked):,} of {blocked.size:,} pairs of query and key"
        steps.append(f"−∞ where blocked: {pairs}")
        if empty := np.count_nonzero(blocked.all(axis=-1)):
            steps.append(f"{empty} rows are fully masked")
    steps.append("weights = softmax of each row; output = weights · v, heads joined and projected")
    if not case.defined:
        return [*steps, "no definition settles the answer: it is recorded, not judged"]
    noise = _noise(case)
    return [
        *steps,
        f"evaluated in float64; every element may be off by {LIMIT:g}σ, where σ is the "
        f"rounding noise of a correct implementation: about {noise['float32']:.1e} in float32 and "
        f"{noise['bfloat16']:.1e} in bfloat16 for the output",
    ]


def _noise(case: Case) -> dict[str, float]:
    """Return the median σ of the output by dtype, for float32 and bfloat16.

    σ is the rounding noise of the most accurate class of implementations.
    """
    import numpy as np

    from conformance.definition.expectation import expect

    found = {}
    for dtype in ("float32", "bfloat16"):
        sigmas = next(iter(expect(case.problem(dtype)).noise.values()))
        found[dtype] = float(np.median(sigmas["output"]))
    return found


def _put(adapter: Adapter, problem: Problem) -> str:
    """Return how the adapter passes a problem's masks, why it cannot, or why this is not known.

    The result is "as it is" if the adapter declares neither a mask argument nor a causal flag.
    """
    try:
        adapter.check(problem)
        if not adapter.mask_arguments and adapter.causal_flag is None:
            return "as it is"
        return adapter.masks.spell(problem).label
    except Unsupported as reason:
        return f"{UNSUPPORTED}{reason}"
    except (ConformanceError, ImportError) as error:
        return f"not known: {error}"


# Printing


def _print_case(
    console: Console, item: ExplainedCase, implementation: str | None, *, briefly: bool
) -> None:
    _title(console, item.id, "" if item.defined else "no agreed answer")
    paragraph(console, item.case.why)
    _section(console, "Inputs", "; ".join(item.case.facts))
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
    _libraries(console, "How each library receives it", item.id, item.put, implementation)
    _section(console, "Requirements that look at it", ", ".join(item.requirements) or "none")
    _ask_it(console, item.command)


def _print_question(
    console: Console,
    item: ExplainedRequirement | ExplainedExperiment,
    implementation: str | None,
) -> None:
    if isinstance(item, ExplainedRequirement):
        _title(console, item.id, item.level)
        paragraph(console, item.sentence, indent=0)
        paragraph(console, f"Why: {item.why}", indent=0)
        _section(console, "Decided by", item.decided)
    else:
        _title(console, item.id, item.title)
        paragraph(console, item.question, indent=0)
        _section(console, "Done by", item.done)
    if item.documented:
        title = "What each adapter declares"
        _libraries(console, title, item.id, item.documented, implementation)
    if isinstance(item, ExplainedRequirement) and item.cases:
        _section(console, f"Served by {len(item.cases)} cases", some(item.cases, 8))
    _ask_it(console, item.command)


def _title(console: Console, name: str, beside: str) -> None:
    from rich.markup import escape

    console.print(f"[bold]{escape(name)}[/]" + (f" ({escape(beside)})" if beside else ""))


def _section(console: Console, title: str, text: str) -> None:
    """Print a heading and a paragraph, unless the text is empty."""
    if text:
        heading(console, title)
        paragraph(console, text)


def _libraries(
    console: Console, title: str, id_: str, groups: list[Documented], implementation: str | None
) -> None:
    """Print what implementations declare or do: of one in full, of all of them the most frequent.

    All of them would be a hundred lines, most of them addresses of documentation.
    """
    if implementation is not None:
        heading(console, re.sub("each (library|adapter)", implementation, title))
        for group in groups:
            paragraph(console, ", ".join(group.implementations), bullet="· ")
            paragraph(console, group.says, indent=6)
            for link in group.documentation:
                line(console, link, indent=6, style="dim")
        return
    heading(console, title)
    lacking = [name for group in groups for name in group.implementations if _lacks(group)]
    groups = sorted(
        (group for group in groups if not _lacks(group)),
        key=lambda group: -len(group.implementations),
    )
    for group in groups[:MOST_GROUPS]:
        of = some(group.implementations, MOST_NAMES)
        paragraph(console, f"{group.says}: {of}", bullet="· ")
    if others := [name for group in groups[MOST_GROUPS:] for name in group.implementations]:
        ways = plural(len(groups) - MOST_GROUPS, "other answer")
        paragraph(console, f"{ways}: {some(others, MOST_NAMES)}", bullet="· ")
    if lacking:
        paragraph(console, f"unsupported: {some(lacking, MOST_NAMES)}", bullet="· ")
    names = [name for group in groups for name in group.implementations] or lacking
    if names:
        line(
            console, f"One of them, with links: mha-conformance explain {id_} {names[0]}", indent=2
        )


def _lacks(group: Documented) -> bool:
    return group.says.startswith(UNSUPPORTED)


def _ask_it(console: Console, command: str) -> None:
    heading(console, "Ask it")
    line(console, command, indent=2)


def _draw(console: Console, plane: Plane) -> None:
    """Print a mask with a row per query and a column per key, # where a query may attend.

    If there are more than `MOST_DRAWN` queries or keys, print only the size of the mask.
    """
    where = plane.where or "every entry and head"
    size = f"{plural(plane.queries, 'query', 'queries')} × {plural(plane.keys, 'key')}"
    if max(plane.keys, plane.queries) > MOST_DRAWN:
        paragraph(console, f"{where}: {size}, too large to draw here")
        return
    paragraph(console, f"{where} ({size}; # may attend, . may not):")
    cells = "".join(".#"[index % 2] * length for index, length in enumerate(plane.runs))
    for start in range(0, len(cells), plane.keys):
        line(console, cells[start : start + plane.keys], indent=4)


# What adapters declare


@cache
def _registered() -> tuple[Adapter, ...]:
    from conformance.adapter.loading import importable

    return tuple(importable())


def _grouped(says: Callable[[Adapter], str], asked: _Asked) -> list[Documented]:
    """Return one `Documented` for each text that `says` returns, with the adapters that share it.

    Registered adapters that cannot be loaded are left out.
    """
    groups: dict[str, Documented] = {}
    for adapter in asked.adapters:
        text = says(adapter)
        group = groups.setdefault(text, Documented([], text, {}))
        group.implementations.append(adapter.name)
        if adapter.documentation:
            group.documentation.setdefault(adapter.documentation, []).append(adapter.name)
    return list(groups.values())


def _declared(id_: str, asked: _Asked) -> list[Documented]:
    """Return what adapters declare about the subject of a requirement or experiment.

    `id_` is the id of the requirement or experiment. The result is [] if nothing can be declared
    about its subject.
    """
    says = next((says for says, beginnings in _SAYS.items() if id_.startswith(beginnings)), None)
    return _grouped(says, asked) if says else []


_NUMBERS = {
    "added": "a number is added",
    "attends, 0 or 1 only": "1 attends, 0 blocks, other numbers are undefined",
    "blocks, 0 or 1 only": "1 blocks, 0 attends, other numbers are undefined",
}
"""Texts for the values of `MaskArgument.number` that would be unclear after "a number ..."."""


def _masks(adapter: Adapter) -> str:
    arguments = []
    for item in (*adapter.mask_arguments, *adapter.implicit_masks):
        means = [f"True {item.true}"] if item.true else []
        if item.effect != "always":
            means = ["ignored" if item.effect == "none" else "refused"]
        elif item.number:
            means.append(_NUMBERS.get(item.number, f"a number {item.number}"))
        arguments.append(f"{item.name}: {', '.join(means) or 'not said'}")
    return "; ".join(arguments) or "has no mask argument"


def _causal(adapter: Adapter) -> str:
    flag = adapter.causal_flag
    if flag is None:
        return "has no causal flag"
    if flag.effect == "none":
        return f"{flag.name}, which is ignored"
    aligned = f"aligned {flag.alignment}" if flag.alignment else "for equal lengths only"
    beside = {
        "without a mask": ", ignored beside a mask",
        "instead of masks": ", beside which masks are ignored",
    }.get(flag.effect, f", beside {flag.needs}" if flag.needs else "")
    return f"{flag.name}, {aligned}{beside}"


def _rows(adapter: Adapter) -> str:
    declared = adapter.fully_masked_row
    if not isinstance(declared, Mapping):
        return declared or "says nothing"
    modes: dict[str, list[str]] = defaultdict(list)
    for mode, row in declared.items():
        modes[row].append(mode)
    return "; ".join(f"{row} in {', '.join(names)}" for row, names in modes.items())


def _weights(adapter: Adapter) -> str:
    from conformance.requirements.probed import returned_weights

    if not adapter.returns_weights:
        return "returns none"
    return f"returns them {say(returned_weights(adapter, adapter.returns_weights))}"


def _dropout(adapter: Adapter) -> str:
    return "active in " + ", ".join(adapter.dropout_modes) if adapter.dropout_modes else "has none"


_MASK_EXPERIMENTS = ("masks", "same-mask", "pairs", "shapes", "coinciding-sizes")
_SAYS: dict[Callable[[Adapter], str], tuple[str, ...]] = {
    _masks: ("mask.", *(f"probe/{name}" for name in _MASK_EXPERIMENTS)),
    _rows: ("observed.fully-masked-row", "probe/masked-rows"),
    _causal: ("observed.causal-alignment", "probe/causal"),
    _weights: ("observed.returned-weights", "weights.", "probe/weights"),
    lambda adapter: ", ".join(adapter.dtypes): ("dtype.",),
    lambda adapter: ", ".join(mode.name for mode in adapter.modes): ("modes.",),
    _dropout: ("dropout.", "probe/dropout"),
}
"""Functions that describe what an adapter declares about a subject.

Each is given with prefixes of the ids of the requirements and experiments about that subject.
"""
