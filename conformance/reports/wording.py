"""Words, symbols and formats of numbers that are the same in every rendering of a report.

`failure` describes a failing item in a text that can be understood on its own, in a build's log.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from conformance.records.findings import (
    BAD,
    GRAVITY,
    INFINITE,
    MAKERS,
    NOTHING,
    STATEFUL,
    VERDICTS,
    CaseResult,
    Figures,
    Finding,
    Phrase,
)
from conformance.records.header import CausalInfo, Implementation, RequirementInfo
from conformance.records.numbers import ACCURACY
from conformance.reports.model import FeatureResults
from conformance.text import element, printable
from conformance.words import advice, say, tables

UNSORTED = "unsorted deviation"
"""The kind of deviations that no baseline classifies."""

SYMBOLS = {
    "conforms": "✓",
    "deviates": "✗",
    "observed": "○",
    "unsupported": "–",
    "error": "!",
    "crashed": "†",
    "timed-out": "…",
    "unavailable": "∅",
    "not-run": "?",
}
"""A symbol for each verdict, so that no meaning depends on colour alone."""

MEANINGS = {
    "conforms": "within rounding noise of the definition, or as declared",
    "deviates": "does not do what is required or declared",
    "observed": "nothing is required or declared here; what happens is recorded",
    "unsupported": "cannot express the problem; never a pass",
    "error": "raised, or answered with a wrong shape or type",
    "crashed": "the process died",
    "timed-out": "the process hung",
    "unavailable": "framework or device missing",
    "not-run": "planned, but without an outcome",
}

CLASS_MEANINGS = ACCURACY


def ratio(value: float) -> str:
    """Return a ratio in σ as text with few digits, or "∞" if it is infinite."""
    if value >= INFINITE:
        return "∞"
    if value == 0:
        return "0"
    if value >= 1e4:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}×10{superscript(int(exponent))}"
    if value >= 10:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.05 else f"{value:.1g}"


def magnitude(value: float) -> str:
    """Return a ratio as short text for tables: only a power of ten if it is 1000 or more."""
    if 1e3 <= value < INFINITE:
        return f"10{superscript(math.floor(math.log10(value)))}"
    return ratio(value)


def superscript(value: int) -> str:
    """Return an integer in superscript characters."""
    return str(value).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def limit(value: float) -> str:
    """Return a limit as text, such as "8" or "11.3"."""
    return f"{value:.3g}"


def fared(feature: FeatureResults) -> str:
    """Return the results of a feature as text, such as "✓ 24 of 24" or "not declared".

    The first number counts the items that conform, the second those that were judged.
    """
    if feature.answered:
        sign = SYMBOLS["deviates" if feature.wrong else "conforms"]
        return f"{sign} {feature.items.get('conforms', 0):,} of {feature.answered:,}"
    if feature.items.get("unsupported"):
        return "not declared" if feature.declared == [] else "unsupported"
    return "no answer" if feature.items else "not asked"


def number(value: int) -> str:
    """Return a count as text, with commas between thousands."""
    return f"{value:,}"


def listed(words: Iterable[str]) -> str:
    """Join words into a list such as "a", "a and b" or "a, b and c"; "" if there are none."""
    words = list(words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def vector(counts: Mapping[str, int], order: Sequence[str] = VERDICTS) -> list[tuple[str, int]]:
    """Return pairs of verdict and count in the order of verdicts `order`, without zeros."""
    return [(verdict, counts[verdict]) for verdict in order if counts.get(verdict)]


def worst_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return pairs of verdict and count, the worst verdict first, without zeros."""
    return vector(counts, GRAVITY)


def counts_text(counts: Mapping[str, int]) -> str:
    """Return counts as text, such as "12 conforms, 3 deviates"; "nothing" if all are 0."""
    return ", ".join(f"{times:,} {verdict}" for verdict, times in vector(counts)) or "nothing"


def parts(name: str) -> list[str]:
    """Split a long name where a line may break: after ".", "_", "/", and a "-" inside a word."""
    return re.split(r"(?<=[._/])|(?<=\w-)", name)


def shape(layout: str) -> str:
    """Format a layout as a shape: "(batch heads) query key" as "[batch·heads, query, key]"."""
    axes = re.findall(r"\([^()]*\)|[^\s()]+", layout)
    return f"[{', '.join('·'.join(axis.strip('()').split()) for axis in axes)}]"


def causal(flag: CausalInfo) -> str:
    """Return, as text, how a causal flag is aligned if lengths differ, and which mask it needs."""
    alignment = flag.alignment or "equal lengths only"
    return f"{alignment}, with {flag.needs}" if flag.needs else alignment


def weights(declared: Implementation) -> str:
    """Return, as text, the declared form of the attention weights, or that none are returned."""
    returned = declared.weights
    if returned is None:
        return "none are returned"
    if returned.option:
        return f"{returned.otherwise} unless {returned.option}"
    if declared.layout and "heads" not in declared.layout:
        return "of one head"
    return returned.returned


def scale(declared: Implementation) -> str:
    """Return, as text, by which factor an implementation multiplies the products of its logits."""
    if declared.custom_scale:
        return "can be chosen"
    return "none, the score is additive" if declared.scores == ["additive"] else "1/√head size"


def brief(phrase: Phrase, table: str) -> str:
    """Return the text that the table `table` of `words.toml` has for a phrase, or its usual text.

    If the table has a template for the id "", the usual text is inserted into this template.
    """
    wordings = tables()[table]
    return wordings.get(phrase.id) or wordings.get("", "{text}").format(text=say(phrase))


def consequence(value: Phrase) -> str:
    """Return the effects of a fully masked query as text.

    More than three gradients with NaN are counted instead of listed.
    """
    texts = []
    for part in value.parts("parts"):
        arrays = part.parts("arrays") if isinstance(part, Phrase) else []
        counted = f"NaN in {len(arrays)} gradients" if len(arrays) > 3 else ""
        texts.append(counted or (say(part) if isinstance(part, Phrase) else str(part)))
    return "; ".join(texts)


def date(created: str) -> str:
    """Return the date of an ISO 8601 timestamp."""
    return created[:10]


def web(link: str) -> bool:
    """Return whether a link is a web link; adapters may declare anything as a link."""
    return link.startswith(("https://", "http://"))


def address(link: str) -> str:
    """Return a web link for display, without its scheme, "www." and "github.com/".

    Other links are returned unchanged.
    """
    return re.sub(r"^https?://(www\.)?(github\.com/)?", "", link)


# A failing item

ALONE = (
    "run alone, a fresh instance conforms: this deviates only after other calls. Something is "
    "kept between calls: a cache, a buffer, a seed, an input that is changed in place"
)


class Questions(Protocol):
    """Descriptions of cases and requirements, from a record's header or from the suite."""

    def requirement(self, name: str, /) -> RequirementInfo | None:
        """Return the requirement with this id, or None if it is not known."""

    def question(self, case: str, /) -> str:
        """Return a description of what a case or an experiment checks; "" if it is not known."""


def failure(
    result: CaseResult,
    spec: str,
    asked: Questions,
    file: str = "",
    *,
    alone: bool = False,
    command: str = "",
) -> str:
    """Return every discrepancy of an item as lines of text; the first line is a summary.

    Args:
        result: the result of the item.
        spec: the implementation, as it is named on the command line.
        asked: descriptions of cases and requirements, such as the header of the record.
        file: the case file of the item, or "" if the case is in the catalogue.
        alone: whether a fresh instance that runs only this item conforms.
        command: the command that runs the item again; by default it is made from `spec` and `file`.
    """
    wrong = [finding for finding in result.findings if finding.verdict in BAD]
    causes = sorted({finding.cause for finding in wrong if finding.cause}, key=str)
    first = f"{result.verdict}: {', '.join(finding.requirement for finding in wrong)}"
    if alone:
        first += "; only after other calls"
    elif causes:
        first += f"; {'; '.join(map(say, causes))}"
    lines = [first, f"  case {result.case}, {result.dtype}, mode {result.mode}, on {result.device}"]
    prose = asked.question(result.case)
    lines += [f"  {prose}"] if prose else []
    lines += ["", ALONE] if alone else []
    same: dict[str, list[str]] = defaultdict(list)
    cause = NOTHING
    for finding in wrong:
        if finding.verdict == "error":
            same[finding.detail].append(finding.requirement)
            if len(same[finding.detail]) > 1:
                continue
        lines += _paragraph(finding, asked, said=cause)
        cause = finding.cause or cause
    for others in (names[1:] for names in same.values()):
        lines += ["", f"the same error: {', '.join(others)}"] if others else []
    if any(finding.figures for finding in wrong):
        lines += [
            "",
            f"σ: the rounding error of a correct {result.dtype} computation at that element",
        ]
    program = command or again(result, spec, file)
    if alone:
        program = f"{program} (alone it conforms: run what comes before it too)"
    lines += ["", f"again: {program}"]
    return printable("\n".join(lines))


def again(result: CaseResult, spec: str, file: str = "") -> str:
    """Return the command that runs only this item again.

    `spec` is the implementation as it is named on the command line, and `file` the case file of the
    item, or "" if the case is in the catalogue.
    """
    # A layer that keeps a state is taken on all ways at once.
    every = result.case.startswith(STATEFUL)
    command = ["mha-conformance", "run", spec]
    command += [] if every else ["--case", result.case]
    command += ["--dtype", result.dtype]
    command += ["--case-file", file] if file else []
    command += ["--strict"] if every else ["--mode", result.mode, "--strict"]
    if result.device != "cpu":
        command += ["--device", result.device]
    return shlex.join(command)


def sigmas(value: float) -> str:
    """Return a ratio as text that "σ" can follow: three significant digits, or "∞ "."""
    return "∞ " if value >= INFINITE else f"{value:.3g}"


def measured(figures: Figures) -> str:
    """Return the measured and the allowed error in units of σ, as text, and `together`."""
    element = f"{figures.array}: {sigmas(figures.max_ratio)}σ, allowed {figures.limit:.3g}σ"
    return "; ".join(filter(None, (element, together(figures))))


def together(figures: Figures) -> str:
    """Return the rms and the bias of an array as text; "" if an element exceeds the limit.

    If none does, one of these may be too large instead.
    """
    if figures.max_ratio > figures.limit:
        return ""
    return f"rms {figures.rms_ratio:.3g}σ, bias {figures.bias:.3g}"


def _paragraph(finding: Finding, asked: Questions, said: Phrase) -> list[str]:
    """Return lines about one finding; `said` is the cause that was printed last."""
    lines = ["", finding.requirement]
    requirement = asked.requirement(finding.requirement)
    if requirement is not None:
        lines = ["", f"{finding.requirement} ({requirement.level})", f"  {requirement.sentence}"]
    if finding.detail:
        lines.append(f"  {finding.verdict}: {finding.detail}")
    if finding.figures is not None:
        lines.append(f"  measured {measured(finding.figures)}")
    if finding.worst is not None:
        worst = finding.worst
        lines.append(
            f"  worst element {element(worst.array, worst.index)}: got {worst.got}, "
            f"want {worst.want}, noise σ {worst.noise}"
        )
    if finding.where:
        lines.append(f"  deviates only in: {say(finding.where)}")
    if finding.made_by:
        lines.append(f"  arises in: {MAKERS[finding.made_by]}")
    if finding.cause:
        cause = "the same" if finding.cause == said else say(finding.cause)
        lines.append(f"  likely cause: {cause}")
        if finding.cause != said and (change := advice(finding.cause)):
            lines.append(f"  what to change: {change}")
    return lines
