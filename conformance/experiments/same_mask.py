"""Pass one causal mask, written in three ways, to every implementation without conversion.

Users do this when they copy a mask from another library's documentation. The result is the share of
attention that a query gives to future tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from conformance.adapter.arguments import MaskArgument, to_layout
from conformance.definition.dtypes import Array
from conformance.experiments.experiment import Experiment
from conformance.records.findings import Entry, Topic
from conformance.records.phrase import Argument, Phrase
from conformance.requirements.laboratory import (
    REFUSED,
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
    ZERO_ONE,
    Form,
    among,
)
from conformance.requirements.polarity import examined

LENGTH = 5
WRITTEN = ("one-attends", "one-blocks", "added")


def same_mask(lab: Laboratory) -> Iterator[tuple[Entry, Array | None]]:
    """Yield an entry for each way to write the mask, with the weights `[query key]` of head 0."""
    argument = next((item for item in lab.adapter.mask_arguments if _over_queries(item)), None)
    if argument is None:
        return
    problem = lab.problem(Sizes(query=LENGTH, key=LENGTH))
    visible = np.tri(LENGTH, dtype=bool)[None, None]
    takes_bool = examined(lab, argument, BOOL).value != REJECTED
    zero_one = BOOL if takes_bool else ZERO_ONE
    ways: tuple[tuple[Form, Array], ...] = (
        (zero_one, visible * 1.0),
        (zero_one, ~visible * 1.0),
        (ZERO_INFINITE, np.where(visible, 0.0, INFINITE)),
    )
    for written, (form, values) in zip(WRITTEN, ways, strict=True):
        layout = argument.layout_over("query", "key")
        assert layout is not None
        laid = to_layout(values, layout, problem.shape, broadcast=False)
        assert laid is not None
        found = lab.ask(problem, {argument.name: form.array(laid)})
        about: dict[str, Argument] = {"argument": argument.name}
        subject = Phrase("same-mask", about | {"written": Phrase(f"written.{written}")})
        if isinstance(found, Refused):
            yield Entry(subject, REFUSED, found.told), None
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
    plain = lab.plain(Sizes(*found.problem.shape.logits)).applied
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


SAME_MASK = Experiment(
    Topic(
        "same-mask",
        "Somebody else's mask",
        "One causal mask, written in three ways: who sees the future if it is handed over as is?",
    ),
    same_mask,
    place=20,
)
