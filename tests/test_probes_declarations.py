"""A declaration that is wrong is exposed, in the entry that is about it; a right one conforms."""

from __future__ import annotations

import numpy as np
import pytest
from mutants import miniatures
from mutants.fakes import attends, blocked, entries, fake, usual
from mutants.miniatures import Correct

from conformance import Adapter, CausalFlag, MaskArgument, Mode
from conformance.experiments import EXPERIMENTS, experiment, find_experiments
from conformance.records.findings import Entry, Phrase
from conformance.requirements.probed import compared, declares
from conformance.running.session import Inquiry, Session, inquiries
from conformance.words import say


def inquire(adapter, name, mode=0):
    """What an experiment says of the declaration, and its entries."""
    inquiry = Inquiry(adapter, experiment(name), "float32", "cpu", adapter.modes[mode])
    result, _ = Session().inquire(inquiry)
    assert result.id == inquiry.id
    finding, *others = result.findings
    assert finding.requirement == declares.id
    assert all(other.verdict == "conforms" for other in others)
    return finding, result.entries


def mask(true="attends", number="added", axes="batch heads query key"):
    return MaskArgument("mask", axes, true=true, number=number)


def no_floats(logits, mask):
    return logits if mask.dtype.kind == "f" else blocked(logits, mask != 0)


def whole(logits, mask):
    return logits + mask if mask.dtype.kind == "f" else blocked(logits, mask != 0)


def dropping(names, active):
    """Dropout in the modes `active`, whatever is declared."""

    class Dropping(Correct):
        modes = (Mode("train"), Mode("eval"))
        dropout_modes = names

        def attend(self, query, key, value, masks, mode, **options):
            context, weights = super().attend(query, key, value, masks, **options)
            if mode.dropout and mode.name in active:
                kept = np.random.default_rng(mode.draw).random(weights.shape) < 0.5
                context = np.einsum("bhqk,bhkd->bhqd", np.where(kept, 2 * weights, 0), value)
            return context.astype(query.dtype), weights

    adapter = Dropping()
    adapter.name = "dropping"
    return adapter


def aligned(alignment, shift):
    """A causal flag: what it declares, and where the triangle is."""

    def logits(logits, is_causal):
        queries, keys = logits.shape[2:]
        if shift is None and queries != keys:
            raise ValueError("lengths must be equal")
        return blocked(logits, np.tri(queries, keys, (keys - queries) * bool(shift), dtype=bool))

    return fake(logits, masks=(), causal_flag=CausalFlag("is_causal", alignment=alignment))


def rows(declared):
    return fake(usual, masks=mask(), fully_masked_row=declared)


def where_one(logits, mask):
    """`masked_fill(mask == 1, -inf)`, literally."""
    return blocked(logits, mask != 1)


NONZERO = "attends if nonzero"
LESS = "is_causal alone, fewer queries than keys"
WRONG = {
    "blocks where it attends": (
        fake(attends, masks=mask("blocks")),
        "masks",
        ("mask, bool", "blocks", "attends"),
    ),
    "added where floats are ignored": (
        fake(no_floats, masks=mask()),
        "masks",
        ("mask, float32 0/−inf", "added", "ignored"),
    ),
    "added where integers are booleans": (
        fake(whole, masks=mask()),
        "masks",
        ("mask, int32 0/1", "added", "attends"),
    ),
    "attends if nonzero where it is added": (
        fake(usual, masks=mask(number="attends if nonzero")),
        "masks",
        ("mask, float32 0/1", "attends", "added"),
    ),
    "blocks if nonzero where it attends": (
        fake(attends, masks=mask(number="blocks if nonzero")),
        "masks",
        ("mask, float32 0/1", "blocks", "attends"),
    ),
    "blocks if nonzero where 1 blocks": (
        fake(where_one, masks=mask("blocks", "blocks if nonzero")),
        "masks",
        ("mask, float32 0/1/2", "blocks", "blocks where 1"),
    ),
    "blocks if 1 where nonzero blocks": (
        fake(lambda logits, mask: blocked(logits, mask == 0), masks=mask("blocks", "blocks if 1")),
        "masks",
        ("mask, float32 0/1/2", "blocks where 1", "blocks"),
    ),
    "attends if 1 where nonzero attends": (
        fake(attends, masks=mask(number="attends if 1")),
        "masks",
        ("mask, float32 0/1/2", "attends where 1", "attends"),
    ),
    "attends if nonzero where more than 0 attends": (
        fake(lambda logits, mask: blocked(logits, mask > 0), masks=mask(number=NONZERO)),
        "masks",
        ("mask, float32 0/−1e9", "attends", "blocks everything"),
    ),
    "attends, 0 or 1 only, where it is added": (
        fake(usual, masks=mask(number="attends, 0 or 1 only")),
        "masks",
        ("mask, float32 0/1", "attends", "added"),
    ),
    "a mask that is refused": (miniatures.Raises(), "masks", ("mask, bool", "attends", "rejected")),
    "another masked row": (
        rows("zeros"),
        "masked-rows",
        ("mask, bool: output", "output bias only", "NaN"),
    ),
    "bottom-right for top-left": (
        aligned("bottom-right", 0),
        "causal",
        (LESS, "bottom-right", "top-left"),
    ),
    "top-left for bottom-right": (
        aligned("top-left", 1),
        "causal",
        (LESS, "top-left", "bottom-right"),
    ),
    "an alignment where it refuses": (
        aligned("top-left", None),
        "causal",
        (LESS, "top-left", "refused"),
    ),
    "refusal where it aligns": (aligned(None, 0), "causal", (LESS, "refused", "top-left")),
    "weights per head for averaged": (
        fake(returned=lambda weights: weights.mean(1)),
        "weights",
        ("returned weights", "per head", "averaged"),
    ),
    "weights where there are none": (
        fake(returned=lambda weights: None),
        "weights",
        ("returned weights", "per head", "none"),
    ),
    "no weights where there are some": (
        fake(returns_weights=None),
        "weights",
        ("returned weights", "none", "per head"),
    ),
    "dropout where there is none": (dropping(("train",), ()), "dropout", ("dropout", "on", "off")),
    "axes in another order": (
        fake(attends, masks=mask(number=None, axes=("batch heads query key", "batch key"))),
        "shapes",
        (
            "mask: shapes it takes",
            "at least [batch, heads, query, key] [batch, key]",
            None,
        ),
    ),
}


CAUSES = {"dropout where there is none": "dropout is off where it is declared to be on"}
"""Where the difference alone says what is wrong."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_is_exposed(name):
    adapter, asked, (subject, declared, value) = WRONG[name]
    finding, found = inquire(adapter, asked)
    entry = next(entry for entry in found if say(entry.subject) == subject)
    assert not entry.agrees
    assert say(entry.declared) == declared
    assert value is None or say(entry.value) == value
    assert finding.verdict == "deviates"
    cause = say(finding.cause)
    assert cause.startswith(CAUSES.get(name, "the declaration and what was seen differ: "))
    assert name in CAUSES or subject in cause or " more" in cause


def test_dropout_in_a_mode_that_is_not_named_is_exposed():
    finding, found = inquire(dropping(("train",), ("train", "eval")), "dropout", mode=1)
    assert (say(found[0].value), say(found[0].declared), found[0].agrees) == ("on", "off", False)
    assert finding.verdict == "deviates"
    assert finding.detail == "dropout: declared off, observed on"


RIGHT = {
    "masks": Correct(),
    "masked-rows": Correct(),
    "causal": Correct(),
    "shapes": Correct(),
    "weights": Correct(),
    "dropout": dropping(("train",), ("train",)),
}
ALSO_RIGHT = [
    (fake(lambda logits, mask: blocked(logits, mask == 0), masks=mask("blocks", None)), "masks"),
    (fake(attends, masks=mask(number=NONZERO)), "masks"),
    (fake(attends, masks=mask(number="attends, 0 or 1 only")), "masks"),
    (fake(where_one, masks=mask("blocks", "blocks if 1")), "masks"),
    (
        fake(lambda logits, mask: blocked(logits, mask == 1), masks=mask(number="attends if 1")),
        "masks",
    ),
    (
        fake(
            lambda logits, mask: blocked(logits, mask > 0.5),
            masks=mask(number="attends, 0 or 1 only"),
        ),
        "masks",
    ),
    (fake(usual, masks=mask(), fully_masked_row="nan"), "masked-rows"),
    # A function that returns zeros, to which the suite adds the output bias.
    (type("Zeros", (Correct,), {"fully_masked_row": "zeros"})(), "masked-rows"),
    (aligned(None, None), "causal"),
    (aligned("bottom-right", 1), "causal"),
    (fake(returned=lambda weights: weights.mean(1), returns_weights="averaged"), "weights"),
    (dropping(("train", "eval"), ("train", "eval")), "dropout"),
]


@pytest.mark.parametrize(
    ("adapter", "asked"), [*((adapter, asked) for asked, adapter in RIGHT.items()), *ALSO_RIGHT]
)
def test_a_right_declaration_conforms(adapter, asked):
    finding, found = inquire(adapter, asked)
    assert finding.verdict == "conforms"
    assert all(entry.agrees for entry in found)
    assert any(entry.declared for entry in found)


def test_where_nothing_is_declared_it_is_observed():
    finding, found = inquire(Correct(), "pairs")
    assert finding.verdict == "observed"
    finding, found = inquire(rows(None), "masked-rows")
    assert finding.verdict == "observed"
    assert found


def test_a_detail_names_three_and_counts_the_others():
    attends, blocks = Phrase("mask.attends"), Phrase("mask.blocks")
    subjects = [Phrase("text", {"text": f"argument {i}"}) for i in range(5)]
    wrong = [Entry(subject, blocks, "", attends, agrees=False) for subject in subjects]
    finding = compared([Entry(Phrase("right"), attends, "", attends), *wrong])
    assert finding.detail.count("declared attends, observed blocks") == 3
    assert finding.detail.endswith("; and 2 more")
    assert compared(wrong[:3]).detail.count("argument") == 3
    assert "more" not in compared(wrong[:3]).detail


def test_a_whole_number_may_be_refused_where_fractions_are_added():
    def floats(logits, mask):
        if mask.dtype.kind in "iu":
            raise TypeError("floats, please")
        return usual(logits, mask)

    adapter = fake(floats, masks=mask())
    assert inquire(adapter, "masks")[0].verdict == "conforms"
    assert entries(adapter, "masks")["mask, int32 0/1"].value == Phrase("mask.rejected")


@pytest.mark.parametrize("said", [None, "attends if nonzero", "blocks if nonzero"])
def test_whole_numbers_may_mean_something_else_than_fractions(said):
    argument = MaskArgument(
        "mask", "batch heads query key", true="attends", number="added", whole=said
    )
    found = entries(fake(whole, masks=argument), "masks")
    assert found["mask, int32 0/1"].agrees == (said == "attends if nonzero")
    assert found["mask, float32 0/1"].agrees


# Whatever happens, an experiment has an outcome

DOUBLES = {
    name: item
    for name, item in vars(miniatures).items()
    if isinstance(item, Adapter)
    or (
        isinstance(item, type)
        and issubclass(item, Adapter)
        and item.__module__ == "mutants.miniatures"
    )
}
OUTCOMES = {
    "Lazy": "unavailable",
    "Unready": "unavailable",
    "Refuses": "unsupported",
    "Puzzled": "error",
    "RawList": "error",
    "ReturnsList": "error",
    "ReturnsForeign": "error",
    "ForeignWeights": "error",
    "OneHead": "error",
    "WrongShape": "error",
    "RawWrongShape": "error",
}


@pytest.mark.parametrize(
    "name", sorted(DOUBLES.keys() - {"Dies", "Hangs", "HangsLater", "Abstract", "Unbuildable"})
)
def test_nothing_that_an_implementation_raises_gets_out(name):
    adapter = DOUBLES[name]() if isinstance(DOUBLES[name], type) else DOUBLES[name]
    adapter.name = name
    names = ("masks", "masked-rows", "causal", "weights", "dropout", "degenerate-sizes")
    session = Session()
    found = {
        session.inquire(item)[0].verdict
        for item in inquiries([adapter], [experiment(item) for item in names], "cpu")
    }
    if name in OUTCOMES:
        assert found == {OUTCOMES[name]}
    else:
        assert found <= {"conforms", "deviates", "observed", "unsupported"}
        assert "conforms" in found or "deviates" in found


# What is planned


def test_experiments_are_found_by_id_prefix_or_pattern():
    assert find_experiments("probe") == EXPERIMENTS
    assert [item.name for item in find_experiments("probe/masks")] == ["masks"]
    assert {item.name for item in find_experiments("probe/mask")} == {"masks", "masked-rows"}
    assert [item.name for item in find_experiments("*/dropout")] == ["dropout"]
    assert find_experiments("mask/shared") == ()


def test_experiments_are_asked_once_in_each_mode_that_may_differ():
    class Moded(Correct):
        modes = (Mode("a"), Mode("b"), Mode("c", optimised=True))
        dtypes = ("float64",)

    adapter = Moded()
    adapter.name = "moded"
    found = [item.id for item in inquiries([adapter], EXPERIMENTS, "cpu")]
    assert len(set(found)) == len(found)
    assert [name for name in found if "/masks:" in name] == [
        "moded:probe/masks:float64:cpu:a",
        "moded:probe/masks:float64:cpu:b",
    ]
    assert [name for name in found if "/shapes:" in name] == ["moded:probe/shapes:float64:cpu:a"]
    assert not any(name.endswith(":c") for name in found)
