"""An experiment on trees of drafted tokens: which of them see which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.adapter.features import Tree
from conformance.definition.dtypes import BoolArray, IntArray
from conformance.definition.features import ancestors
from conformance.definition.problem import Shape
from conformance.experiments.causal import first_rule
from conformance.experiments.experiment import agreeing, topic
from conformance.records.findings import Argument, Entry, Phrase
from conformance.requirements.laboratory import Laboratory, Refused, Sizes, numbers

LENGTHS = (
    (Phrase("lengths.equal"), Sizes(query=6, key=6)),
    (Phrase("lengths.fewer-queries"), Sizes(query=6, key=8)),
)

PARENTS = ([-1, 0, 0, 1, 3, -1], [-1, -1, 0, 0, 2, 4])
"""The tree of six drafted tokens, for two batch entries in turn."""


@topic(
    "trees",
    "Trees of drafted tokens",
    "Which drafted tokens and which cached keys does a drafted token see?",
    place=55,
    every_mode=True,
    shared=True,
    needs=(Tree,),
)
def trees(lab: Laboratory) -> Iterator[Entry]:
    """Pass a tree of six drafted tokens with siblings and up to three generations of ancestors.
    Find the rule that predicts the attention weights, without cached keys and beside two."""
    for argument in lab.features(Tree):
        for lengths, sizes in LENGTHS[:1] if lab.sharing == "self" else LENGTHS:
            problem = lab.problem(sizes)
            tree = np.stack([np.array(PARENTS[n % 2]) for n in range(problem.shape.batch)])
            found = lab.ask(problem, {argument.name: argument.native(tree)})
            about: dict[str, Argument] = {"argument": argument.name, "lengths": lengths}
            subject, said = Phrase("drafts.alone", about), Phrase("drafts.ancestors")
            if isinstance(found, Refused):
                yield agreeing(subject, found.value, found.told, said)
                continue
            rules = ((Phrase(name), seen[:, None]) for name, seen in _rules(problem.shape, tree))
            rows = "; ".join(numbers(row) for row in found.applied[0, 0])
            value = first_rule(lab, found, rules)
            yield agreeing(subject, value, f"entry 0, head 0: {rows}", said)


def _rules(shape: Shape, tree: IntArray) -> Iterator[tuple[str, BoolArray]]:
    """Yield the names of rules, with the keys `[batch query key]` that each leaves visible."""
    count, cached = shape.query_length, shape.key_length - shape.query_length
    line, tokens = ancestors(tree), np.arange(count)
    own, parent = np.eye(count, dtype=np.bool_), tree[:, :, None] == tokens

    def beside_cache(drafted: BoolArray, first: int = 0) -> BoolArray:
        """Return `drafted` with the cached keys from `first` on, as a mask of all keys."""
        of_cache = np.zeros((len(tree), count, cached), np.bool_)
        of_cache[..., first:] = True
        whole = np.broadcast_to(drafted, (len(tree), count, count))
        return np.concatenate([of_cache, whole], axis=2)

    yield "drafts.ancestors", beside_cache(line)
    yield "drafts.chain", beside_cache(tokens <= tokens[:, None])
    yield "drafts.parent", beside_cache(own | parent)
    yield "drafts.own", beside_cache(own)
    yield "drafts.without-own", beside_cache(line & ~own)
    yield "drafts.siblings", beside_cache(line | (tree[:, :, None] == tree[:, None]))
    yield "drafts.both-ways", beside_cache(line | line.swapaxes(1, 2))
    yield "drafts.descendants", beside_cache(line.swapaxes(1, 2))
    yield "drafts.last-too", beside_cache(line | (tokens == count - 1))
    yield "drafts.first-too", beside_cache(line | (tokens == 0))
    if cached:
        yield "drafts.without-cache", beside_cache(line, cached)
        at_start = np.concatenate([line, np.ones((len(tree), count, cached), np.bool_)], axis=2)
        yield "drafts.at-start", at_start
