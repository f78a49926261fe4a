"""Two mask arguments at once, those included that a framework attaches to its tensors by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from conformance.adapter.arguments import AXES, Native
from conformance.definition.dtypes import BoolArray
from conformance.definition.problem import Shape
from conformance.experiments.experiment import Experiment
from conformance.experiments.masks import Blocking, blocking
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import NOTHING, Phrase
from conformance.requirements.laboratory import REFUSED, Laboratory, Refused, Seen, Sizes, numbers
from conformance.requirements.meaning import among_shown, arrange, rows_changed

UNEXPLAINED = Phrase("combined.unexplained")
EQUAL = Sizes(batch=4, heads=4, query=4, key=4)


def pairs(lab: Laboratory) -> Iterator[Entry]:
    """Every pair, with sizes that differ and with sizes that are all the same."""
    known = [found for item in lab.arguments() if (found := blocking(lab, item)) is not None]
    for told, sizes in (("differ", lab.sizes()), ("coincide", EQUAL)):
        for one, other in itertools.combinations(known, 2):
            yield _pair(lab, one, other, sizes, told)


def _pair(lab: Laboratory, one: Blocking, other: Blocking, sizes: Sizes, told: str) -> Entry:
    problem = lab.problem(sizes)
    visible = list(telling_pair(one, other, problem.shape))
    natives: dict[str, Native] = {}
    for item, shown in zip((one, other), visible, strict=True):
        native = item.native(shown, problem.shape)
        assert native is not None
        natives[item.argument.name] = native
    found = lab.ask(problem, natives)
    names = (one.argument.name, other.argument.name)
    subject = Phrase("pair", {"one": names[0], "other": names[1], "sizes": Phrase(f"sizes.{told}")})
    declared = REFUSED if one.argument.alone or other.argument.alone else NOTHING
    if isinstance(found, Refused):
        return Entry(subject, REFUSED, found.told, declared)
    value = combined(lab, found, visible[0], visible[1], names)
    fed = [numbers(np.broadcast_to(v, problem.shape.logits)[0, 0, 0] * 1.0) for v in visible]
    return Entry(
        subject,
        value,
        f"entry 0, head 0, query 0: visible {fed[0]} and {fed[1]}, "
        f"weights {numbers(found.applied[0, 0, 0])}",
        declared,
        not declared,
    )


def telling_pair(one: Blocking, other: Blocking, shape: Shape) -> tuple[BoolArray, BoolArray]:
    """A pattern for each argument, so that every hypothesis of `combined` says something else."""
    for seed in range(100):
        pair = visible_of(one, shape, seed), visible_of(other, shape, seed + 1000)
        if distinct(hypotheses(*pair, shape)):
            break
    return pair


def hypotheses(one: BoolArray, other: BoolArray, shape: Shape) -> dict[str, BoolArray]:
    """Return the visible keys for each hypothesis about the two patterns."""
    first, second = (np.broadcast_to(item, shape.logits) for item in (one, other))
    both, either = first & second, first | second
    neither = np.ones_like(first)
    return {"both": both, "one": first, "other": second, "either": either, "neither": neither}


def distinct(patterns: dict[str, BoolArray]) -> bool:
    """Return whether all patterns differ, even in the rows that none of them hides entirely."""
    several = list(patterns.values())
    shown = np.all([item.any(axis=-1) for item in several], axis=0)[..., None]
    pairs = itertools.combinations(several, 2)
    return all(((one != other) & shown).any() for one, other in pairs)


def visible_of(item: Blocking, shape: Shape, seed: int) -> BoolArray:
    """An asymmetric pattern over the argument's axes, `[batch heads query key]` or 1; the first key
    is visible to all, so that no two patterns together block a row."""
    random = np.random.default_rng([13, seed])
    sizes = [n if a in item.axes else 1 for a, n in zip(AXES, shape.logits, strict=True)]
    last = "key" if "key" in item.axes else "query"
    pattern = arrange(random, sizes, AXES.index(last), (0, 1)) != 0
    if last == "key":
        pattern[..., 0] = True
    return pattern


def combined(
    lab: Laboratory, seen: Seen, one: BoolArray, other: BoolArray, names: tuple[str, str]
) -> Phrase:
    """Which of the two patterns the weights follow; a row that is hidden altogether only has to
    have changed."""
    shape = seen.problem.shape
    plain = lab.plain(Sizes(*shape.logits)).applied
    changed = rows_changed(lab, seen)
    only = dict(zip(("one", "other"), names, strict=True))
    for name, visible in hypotheses(one, other, shape).items():
        hidden = ~visible.any(axis=(1, 3))
        predicted = among_shown(plain, visible, seen)
        if lab.alike(seen, predicted) and (changed | ~hidden).all():
            if name in only:
                return Phrase("combined.only", {"argument": only[name]})
            return Phrase(f"combined.{name}")
    return UNEXPLAINED


PAIRS = Experiment(
    Topic("pairs", "Two masks at once", "Do two mask arguments combine, or does one win?"),
    pairs,
    place=50,
    every_mode=True,
)
