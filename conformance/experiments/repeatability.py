"""Experiment on determinism: whether the bits stay the same in repeated and equivalent calls.

What an adapter promises of this is declared in `Adapter.promises`. If bits differ, the same is
asked again under other conditions, which tell why: on one thread, with few keys, or with two
queries in place of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from conformance.adapter.arguments import AXES, MaskArgument
from conformance.definition.comparison import all_between, worst_of
from conformance.definition.dtypes import Array
from conformance.definition.expectation import Expectation
from conformance.definition.features import Segments
from conformance.definition.problem import Problem
from conformance.errors import Unsupported
from conformance.experiments.experiment import topic
from conformance.experiments.masks import blocking, visible_of
from conformance.records.findings import NOTHING, Argument, Entry, Phrase
from conformance.requirements.invariance import part_of
from conformance.requirements.laboratory import Accepted, Laboratory, Outcome, Refused
from conformance.requirements.probed import OTHER_BITS, SAME_BITS

HEADS, LENGTH, HEAD = 4, 144, 64
"""Sizes at which the output spans several tiles, so that work is divided among threads."""

FIRST = 64
"""The length of the first of two packed sequences."""

BATCHES: Sequence[int] = (3, 8)
"""The sizes of other batches in which each entry is computed."""

CHUNKS = (2, 3, 5, 17, 64)
"""How many queries are computed at a time, one number after the other."""

FEW = 8
"""So few keys that nobody divides them."""

STRIDED = (("strided", "gaps"), ("window", "window"))


@dataclass(frozen=True, eq=False)
class ProblemDesk:
    """A laboratory with one problem."""

    lab: Laboratory
    problem: Problem

    @cached_property
    def whole(self) -> Outcome:
        """The answer to the problem."""
        return self.ask(self.problem)

    @property
    def output(self) -> Array:
        """The output for the problem; raise `Unsupported` if there is none."""
        if isinstance(self.whole, Refused):
            raise Unsupported(self.whole.told)
        return self.whole.answer.output

    def ask(self, problem: Problem, **manner: Any) -> Outcome:
        """Return the answer to a problem, compiled as users compile if the framework compiles.

        Raises:
            Unsupported: if the problem has a causal mask or segments that cannot be passed.
        """
        adapter, spelling = self.lab.adapter, None
        if problem.causal is not None or problem.segments is not None:
            adapter.check(problem)
            spelling = adapter.masks.spell(problem)
        if adapter.compiles:
            mode = replace(self.lab.mode, optimised=True)
            manner = {"compiled": True, "mode": mode} | manner
        if problem.heads_alone:
            manner["projected"] = True
        return self.lab.ask(problem, spelling, **manner)

    def expectation(self, *, gradients: bool) -> Expectation:
        """Return the expected answer to the problem, for its noise."""
        return _expected(self.problem, gradients, self.lab.expect)

    def having(self, problem: Problem) -> ProblemDesk:
        """Return a desk with another problem."""
        return ProblemDesk(self.lab, problem)

    @cached_property
    def causal(self) -> ProblemDesk:
        """A desk with the same problem under a causal flag, aligned to the last key."""
        return self.having(_causal(self.problem))


@lru_cache(maxsize=8)
def _causal(problem: Problem) -> Problem:
    """Return the same object again, so that its noise is computed once for all implementations."""
    return problem.replace(causal="bottom-right")


@lru_cache(maxsize=8)
def _expected(problem: Problem, gradients: bool, expect: Callable[..., Expectation]) -> Expectation:
    return expect(problem, gradients=gradients)


class EquivalentAnswer(NamedTuple):
    """An answer, and what some of its arrays are in an equivalent call.

    Attributes:
        found: the answer.
        desk: the desk with the problem of the equivalent call.
        want: the arrays of that call, by name.
        part: the index of `want` in the arrays of the whole problem.
    """

    found: Outcome
    desk: ProblemDesk
    want: Mapping[str, Array]
    part: Any = ()


def _output(found: Outcome, desk: ProblemDesk, part: Any = ()) -> EquivalentAnswer:
    return EquivalentAnswer(found, desk, {"output": desk.output[part]}, part)


Pairs = Iterator[EquivalentAnswer]


class Relation(NamedTuple):
    """Two kinds of calls that may give the same bits.

    Attributes:
        name: the id of the subject, without "again.".
        promise: the name in `Adapter.promises`; "" if nothing can be promised.
        take: makes the calls; it raises `Unsupported` if they cannot be made.
    """

    name: str
    promise: str
    take: Callable[[ProblemDesk], Pairs]


@topic(
    "repeatability",
    "The same again",
    "Are the bits the same twice, alone and in a batch, in steps, packed, strided, compiled?",
    place=130,
    every_mode=True,
    revision=5,
)
def repeatability(lab: Laboratory) -> Iterator[Entry]:
    """Repeat a call, and compare the output with that of the first call; of two equal calls, also
    the gradients. The inputs span several tiles if possible. The call is repeated unchanged, with
    other entries in the batch (of all queries, and of one), with some of the queries, packed, on
    another number of threads, with strided inputs, and compiled if the framework compiles; at the
    usual size, also with a strided mask. Arrays are compared bit by bit, then up to the rounding
    noise. What is promised is asked in every dtype, and what is not in one."""
    yield from _related(lab, RELATIONS)
    if getattr(lab.bridge, "has_strides", False):
        for argument in lab.arguments():
            yield from _strided_mask(lab, argument)
    promised = [each for each in RELATIONS if each.promise in lab.adapter.promises]
    for other in lab.in_other_dtypes() if promised else ():
        for entry in _related(other, promised):
            if entry.value.id in OTHER_BITS or not entry.declared:
                subject = entry.subject.having(inputs_in=other.dtype)
                yield msgspec.structs.replace(entry, subject=subject)


def _related(lab: Laboratory, relations: Iterable[Relation]) -> Iterator[Entry]:
    """Yield an entry for each relation, and what tells why bits differ."""
    desk = _first(lab)
    for relation in relations:
        subject = Phrase(f"again.{relation.name}")
        for entry in _compared(desk, relation, subject):
            yield entry
            if entry.value.id in OTHER_BITS:
                yield from _conditions(desk, relation, subject)


def _first(lab: Laboratory) -> ProblemDesk:
    """Return a desk with a problem of several tiles or, if it has no answer, of usual size."""
    large = ProblemDesk(lab, lab.drawn(lab.sizes(heads=HEADS, query=LENGTH, key=LENGTH + 1), HEAD))
    if isinstance(large.whole, Accepted):
        return large
    return ProblemDesk(lab, lab.drawn(lab.sizes(), HEAD))


# The calls


def _entries(problem: Problem, order: Sequence[int]) -> Problem:
    """Return the problem, which must have no mask, with these entries of its batch."""
    shape, chosen = replace(problem.shape, batch=len(order)), list(order)
    inputs = {name: getattr(problem, name)[chosen] for name in shape.distinct_inputs()}
    cotangent = problem.cotangent[chosen]
    return problem.replace(shape=shape, **shape.spread(inputs), cotangent=cotangent)


def _twice(desk: ProblemDesk) -> Pairs:
    yield _output(desk.ask(desk.problem), desk)


def _gradients(desk: ProblemDesk) -> Pairs:
    if not (desk.lab.mode.gradients and desk.lab.adapter.has_gradients):
        raise Unsupported("no gradients")
    first, again = (desk.ask(desk.problem, gradients=True) for _ in range(2))
    if isinstance(first, Refused) or not first.answer.gradients:
        raise Unsupported("no gradients")
    gradients = first.answer.gradients
    yield EquivalentAnswer(
        again, desk, {f"gradient.{name}": array for name, array in gradients.items()}
    )


def _alone(desk: ProblemDesk) -> Pairs:
    for entry in range(desk.problem.shape.batch):
        yield _in_order(desk, [entry])


def _in_batches(desk: ProblemDesk, compiled: slice = slice(1)) -> Pairs:
    """Ask for each entry in larger batches; `compiled` are those of which to ask a compiler."""
    for size in BATCHES[compiled] if desk.lab.adapter.compiles else BATCHES:
        yield _in_order(desk, [entry % desk.problem.shape.batch for entry in range(size)])


def _in_batches_with_one_query(desk: ProblemDesk) -> Pairs:
    """Ask about batches at the sizes of decoding, for which libraries have other kernels.

    If queries and keys are one array, one token is all that there is.
    """
    shape = desk.problem.shape
    first = np.arange(shape.query_length) == 0
    keys = first if shape.sharing == "self" else np.ones(shape.key_length, np.bool_)
    small = desk.having(part_of(desk.problem, slice(None), first, keys))
    yield from _alone(small)
    yield from _in_batches(small, compiled=slice(1, None))


def _at_another_place(desk: ProblemDesk) -> Pairs:
    yield _in_order(desk, [*reversed(range(desk.problem.shape.batch))])


def _in_order(desk: ProblemDesk, order: Sequence[int]) -> EquivalentAnswer:
    return _output(desk.ask(_entries(desk.problem, order)), desk, [*order])


def _one_by_one(desk: ProblemDesk, count: int = 1) -> Pairs:
    """Compare some queries alone, near the ends and bounds of tiles; or `count` queries at once."""
    queries = desk.problem.shape.query_length
    starts = {0, 1, 2, 15, 16, queries // 4, queries // 2 - 1, queries // 2, queries - 2}
    if desk.lab.adapter.compiles:
        starts = {queries // 2}
    spans = ((start, start + count) for start in sorted(starts) if 0 <= start <= queries - 2)
    yield from _by_queries(desk, spans)


def _in_chunks(desk: ProblemDesk) -> Pairs:
    stops = np.cumsum(CHUNKS)
    spans = [*zip(stops - CHUNKS, stops, strict=True)]
    spans = [span for span in spans if span[1] < desk.problem.shape.query_length]
    yield from _by_queries(desk, spans[-1:] if desk.lab.adapter.compiles else spans)


def _by_queries(desk: ProblemDesk, spans: Iterable[tuple[int, int]]) -> Pairs:
    """Compare queries from `start` to `stop` of each span with the same queries of the whole.

    If a causal mask can be passed, their keys are those up to the last of them.
    """
    if desk.problem.shape.sharing == "self":
        raise Unsupported("its queries are its keys")
    plain, desk = desk, desk.causal
    try:
        _ = desk.output
    except Unsupported:
        if plain.lab.adapter.fixed is not None:
            raise
        desk = plain
    shape = desk.problem.shape
    queries, keys = np.arange(shape.query_length), np.arange(shape.key_length)
    for start, stop in spans:
        seen = stop + len(keys) - len(queries) if desk is not plain else len(keys)
        chosen = (start <= queries) & (queries < stop)
        part = part_of(desk.problem, slice(None), chosen, keys < seen)
        yield _output(desk.ask(part), desk, np.s_[:, start:stop])


def _packed(desk: ProblemDesk) -> Pairs:
    """Pack two sequences, and compare each with the same sequence alone."""
    lab = desk.lab
    if not any("segments" in each.covers for each in lab.adapter.features):
        raise Unsupported("no segments")
    whole = desk.having(lab.drawn(lab.sizes(heads=HEADS, query=LENGTH, key=LENGTH), HEAD)).problem
    shape = whole.shape
    if shape.query_length != shape.key_length:
        raise Unsupported("no sequences of equal lengths")
    ids = np.tile((np.arange(shape.key_length) >= FIRST).astype(np.int64), (shape.batch, 1))
    packed = desk.having(whole.replace(segments=Segments(query=ids, key=ids)))
    for chosen in (ids[0] == 0, ids[0] == 1):
        alone = desk.ask(part_of(whole, slice(None), chosen, chosen))
        yield _output(alone, packed, np.s_[:, chosen])


def _on_threads(desk: ProblemDesk) -> Pairs:
    if desk.lab.bridge is None:
        raise Unsupported("its framework is unknown")
    _ = desk.output
    with desk.lab.bridge.on_threads():
        found = desk.ask(desk.problem)
    yield _output(found, desk)


def _strided(desk: ProblemDesk, strided: str) -> Pairs:
    yield _output(desk.ask(desk.problem, strided=strided), desk)


def _compiled(desk: ProblemDesk) -> Pairs:
    if not desk.lab.adapter.compiles:
        raise Unsupported("nothing is compiled")
    yield _output(desk.ask(desk.problem, compiled=False, mode=desk.lab.mode), desk)


RELATIONS = (
    Relation("twice", "runs", _twice),
    Relation("gradients", "gradients", _gradients),
    Relation("alone", "batch", _alone),
    Relation("batches", "batch", _in_batches),
    Relation("batches-with-one-query", "batch", _in_batches_with_one_query),
    Relation("place", "batch position", _at_another_place),
    Relation("steps", "steps", _one_by_one),
    Relation("chunks", "chunks", _in_chunks),
    Relation("packed", "packing", _packed),
    Relation("threads", "threads", _on_threads),
    *(Relation(name, "strides", partial(_strided, strided=lying)) for name, lying in STRIDED),
    Relation("compiled", "compiled", _compiled),
)
"""What the experiment compares, in the order of a card."""


def _conditions(desk: ProblemDesk, relation: Relation, subject: Phrase) -> Iterator[Entry]:
    """Ask what has other bits again, where a known reason for this is absent."""
    again = relation._replace(promise="")
    bridge, shape = desk.lab.bridge, desk.problem.shape
    if relation.promise != "threads" and bridge is not None and bridge.threads > 1:
        with bridge.on_threads(1):
            about = Phrase("again.on-one-thread", {"of": subject})
            yield from _compared(desk.having(desk.problem), again, about)
    if relation.promise == "batch" and shape.sharing != "self":
        every, few = np.ones(shape.query_length, np.bool_), np.arange(shape.key_length) < FEW
        small = desk.having(part_of(desk.problem, slice(None), every, few))
        yield from _compared(small, again, Phrase("again.with-few-keys", {"of": subject}))
    if relation.name == "steps":
        pairs = again._replace(take=partial(_one_by_one, count=2))
        yield from _compared(desk, pairs, Phrase("again.of-two-queries"))


def _strided_mask(lab: Laboratory, argument: MaskArgument) -> Iterator[Entry]:
    """Yield entries that compare the answer for a strided mask with that for a contiguous one.

    Yield nothing if the argument cannot block keys, or if the contiguous mask gives no answer.
    """
    way = blocking(lab, argument)
    if way is None:
        return
    problem = lab.problem()
    natives = way.passed(visible_of(way, problem.shape, 0), problem.shape)
    usual = lab.ask(problem, natives)
    if isinstance(usual, Refused):
        return
    desk, want = ProblemDesk(lab, problem), {"output": usual.answer.output}
    about: dict[str, Argument] = {"argument": argument.name}
    for name, strided in STRIDED:
        pair = EquivalentAnswer(lab.ask(problem, natives, strided=strided), desk, want)
        relation = Relation(f"mask-{name}", "strides", partial(_given, pair=pair))
        yield from _compared(desk, relation, Phrase(f"again.mask-{name}", about))


def _given(desk: ProblemDesk, pair: EquivalentAnswer) -> Pairs:
    yield pair


# The comparison


def _compared(desk: ProblemDesk, relation: Relation, subject: Phrase) -> Iterator[Entry]:
    """Yield an entry that says whether the calls of a relation give the same bits.

    Yield nothing if nothing is promised, and the calls cannot be made.
    """
    is_promised = relation.promise in desk.lab.adapter.promises
    declared = Phrase(SAME_BITS) if is_promised else NOTHING
    try:
        pairs = [*relation.take(desk)]
    except Unsupported as reason:
        if is_promised:
            yield Entry(subject, Phrase("again.not-examined"), str(reason), declared)
        return
    value, evidence = _value(relation, pairs)
    agrees = not (is_promised and value.id in OTHER_BITS)
    yield Entry(subject, value, evidence, declared, agrees)


def _value(relation: Relation, pairs: Sequence[EquivalentAnswer]) -> tuple[Phrase, str]:
    """Return what the answers of a relation have in common with those wanted, and the evidence."""
    differ = []
    for pair in pairs:
        found, want = pair.found, pair.want
        if isinstance(found, Refused):
            # Arrays of some frameworks have no strides.
            missing = found.unsupported and relation.promise == "strides"
            return Phrase("again.not-examined") if missing else found.value, found.told
        arrays = found.answer.arrays()
        lost = [name for name in want if name not in arrays]
        if lost:
            return Phrase("something-else"), f"there is no {', '.join(lost)}"
        got = {name: arrays[name] for name in want}
        if not all(np.array_equal(got[name], want[name], equal_nan=True) for name in want):
            differ.append((pair, got))
    first = pairs[0].found
    if not differ:
        # The number of entries is that of the first call; queries and keys are those of its whole.
        batch = first.problem.shape.batch if isinstance(first, Accepted) else 0
        sizes = zip(AXES, (batch, *pairs[0].desk.problem.shape.logits[1:]), strict=True)
        return Phrase("again.same-bits-at", dict(sizes)), ", ".join(pairs[0].want)
    compared = []
    for pair, got in differ:
        expected = pair.desk.expectation(gradients="output" not in got)
        # Entries and queries have the same noise alone as in the whole.
        sigma = {name: expected.sigma[name][pair.part] for name in got}
        compared += all_between(got, pair.want, sigma, expected.underflow)
    worst = worst_of(compared)
    value = Phrase("again.within-noise" if worst.fits else "again.apart")
    return value, f"{worst.figures.array}: up to {worst.figures.max_ratio:.2g} σ"
