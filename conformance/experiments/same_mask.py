"""Experiment that passes one causal mask in three encodings, without conversion.

Users do this when they copy a mask from another library's documentation. The result is the share of
attention that queries give to future tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.adapter.arguments import MaskArgument, to_layout
from conformance.definition.dtypes import Array
from conformance.experiments.experiment import topic
from conformance.records.findings import Entry
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import (
    CANNOT_BE_ASKED,
    SOMETHING_ELSE,
    Laboratory,
    Refused,
    Seen,
    Sizes,
)
from conformance.requirements.meaning import (
    BLOCKS_EVERYTHING,
    BOOL,
    IGNORED,
    INFINITE,
    REJECTED,
    ZERO_INFINITE,
    Form,
    among,
    zero_one,
)
from conformance.requirements.polarity import examined

LENGTH = 5
WRITTEN = ("one-attends", "one-blocks", "added")


@topic(
    "same-mask",
    "A mask made for another library",
    "One causal mask, encoded in three ways and passed unchanged: does it hide the future?",
    place=20,
    revision=2,
)
def same_mask(lab: Laboratory) -> Iterator[tuple[Entry, Array | None]]:
    """Pass one causal mask in three encodings, without converting it to what the library expects.
    In the first, 1 attends; in the second, 1 blocks; in the third, 0 and −inf are to be added.
    Measure the share of attention that queries give to future tokens.

    Yields an entry for each encoding, with the weights `[query key]` of batch entry 0 and head 0,
    or None if there was no answer. There are no entries if no mask argument covers queries and
    keys.
    """
    argument = next((item for item in lab.adapter.mask_arguments if _over_queries(item)), None)
    if argument is None:
        return
    problem = lab.problem(Sizes(query=LENGTH, key=LENGTH))
    visible = np.tri(LENGTH, dtype=bool)[None, None]
    takes_bool = examined(lab, argument, BOOL).value not in (REJECTED, CANNOT_BE_ASKED)
    marks = BOOL if takes_bool else zero_one(argument)
    ways: tuple[tuple[Form, Array], ...] = (
        (marks, visible * 1.0),
        (marks, ~visible * 1.0),
        (ZERO_INFINITE, np.where(visible, 0.0, INFINITE)),
    )
    for written, (form, values) in zip(WRITTEN, ways, strict=True):
        layout = argument.layout_over("query", "key")
        assert layout is not None
        laid = to_layout(values, layout, problem.shape.logits, broadcast=False)
        assert laid is not None
        found = lab.ask(problem, {argument.name: form.array(laid)})
        about: dict[str, Argument] = {"argument": argument.name}
        subject = Phrase("same-mask", about | {"written": Phrase(f"written.{written}")})
        if isinstance(found, Refused):
            yield Entry(subject, found.value, found.told), None
        else:
            yield Entry(subject, *_outcome(lab, found)), found.applied[0, 0]


def _outcome(lab: Laboratory, found: Seen) -> tuple[Phrase, str]:
    future = np.triu(np.ones((LENGTH, LENGTH), bool), 1)
    weights = found.applied
    lost = np.isnan(weights).any(axis=-1)
    shares = np.where(lost, 0.0, np.nan_to_num(weights) @ np.ones(LENGTH))
    ahead = np.where(future, np.nan_to_num(weights), 0.0).sum(axis=-1)
    # The last query has no future.
    share = float(ahead[..., :-1].sum() / max(shares[..., :-1].sum(), 1e-300))
    told = f"{share:.0%} of the attention of queries that have a future goes there"
    if lost.any():
        told += f"; {lost.mean():.0%} of the queries get NaN"
    plain = lab.unmasked(found)
    if lab.alike(found, among(plain, np.broadcast_to(~future, weights.shape))):
        return Phrase("same-mask.as-meant"), told
    if lab.alike(found, plain):
        return IGNORED, told
    if share == 0 and not lost.any():
        return (SOMETHING_ELSE if weights.any() else BLOCKS_EVERYTHING), told
    name = "same-mask.attends-future" + ("-with-nan" if lost.any() else "")
    return Phrase(name, {"percent": round(100 * share)}), told


def _over_queries(argument: MaskArgument) -> bool:
    return argument.layout_over("query", "key") is not None
