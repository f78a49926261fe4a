"""An experiment takes the path that it names, and an entry says no more than was seen."""

from __future__ import annotations

import numpy as np
import pytest
from mutants.fakes import attends, blocked, entries, fake, usual, values
from mutants.miniatures import (
    MASK,
    Correct,
    FusedSelfAttention,
    InexpressibleMasks,
    ShortWithMasks,
)

from conformance import Function, MaskArgument, Unsupported, attention_function
from conformance.adapter.loading import load
from conformance.cases.catalogue import catalogue
from conformance.requirements import find_requirement
from conformance.requirements.examination import Examination
from conformance.requirements.laboratory import Laboratory
from conformance.requirements.probed import compared
from conformance.words import say

# Shared inputs


def test_another_path_for_shared_inputs_is_on_the_card():
    found = values(FusedSelfAttention(), "masked-rows")
    assert found["mask, bool: output"] == "output bias only"
    assert found["mask, bool: output, shared inputs"] == "NaN"
    found = values(FusedSelfAttention(), "causal")
    assert found["is_causal alone, equal lengths"] == "causal"
    assert found["is_causal alone, equal lengths, shared inputs"] == "ignored"
    assert found["is_causal with mask, equal lengths, shared inputs"] == "mask only"


@pytest.mark.parametrize("name", ["masks", "masked-rows", "causal", "pairs", "weights"])
def test_what_is_the_same_for_shared_inputs_is_said_once(name):
    assert not [subject for subject in values(Correct(), name) if "shared" in subject]


def test_a_mask_that_belongs_to_an_array_is_not_examined_in_shared_inputs():
    class Attached(Correct):
        implicit_masks = (MaskArgument("query._mask", "batch query", true="attends"),)

    separate = Laboratory(Attached(), "float32", "cpu", Attached.modes[0])
    names = [argument.name for argument in separate.arguments()]
    assert "query._mask" in names
    shared = separate.with_shared_inputs
    assert [item.name for item in shared.arguments()] == [n for n in names if n != "query._mask"]


def test_the_fast_path_of_torch_is_taken():
    pytest.importorskip("torch")
    found = values(load("torch-mha"), "masked-rows", "fast-path")
    assert found["key_padding_mask, bool: output, shared inputs"] == "NaN"
    found = values(load("torch-mha"), "causal", "fast-path")
    assert found["is_causal alone, equal lengths"] == "refused"
    assert found["is_causal alone, equal lengths, shared inputs"] == "ignored"
    assert all(entry.agrees for entry in entries(load("torch-mha"), "causal", "fast-path").values())


# What was refused, and by whom


def test_what_the_adapter_cannot_express_is_neither_refused_nor_a_deviation():
    found = entries(InexpressibleMasks(), "masks")
    assert {say(entry.value) for entry in found.values()} == {"cannot be asked"}
    assert all(entry.agrees for entry in found.values())
    assert values(Correct(), "input-layouts")["input without a batch axis"] == "cannot be asked"


def test_polarity_is_unsupported_if_no_mask_can_be_passed():
    case = next(case for case in catalogue() if case.id == "mask/key-padding/cross")
    adapter = InexpressibleMasks()
    adapter.name = "inexpressible"
    ex = Examination(adapter, case, "float32", "cpu", adapter.modes[0])
    with pytest.raises(Unsupported, match="no mask fits into the cache"):
        find_requirement("mask.polarity-is-as-declared").check(ex)


def test_an_answer_of_another_shape_is_not_refused():
    found = entries(ShortWithMasks(), "masks")
    assert say(found["mask, bool"].value) == "answered with another shape"
    assert not found["mask, bool"].agrees
    assert compared(list(found.values())).verdict == "deviates"


def test_what_the_adapter_itself_stumbles_over_is_not_refused():
    pytest.importorskip("torch")

    class Merging(Function):
        framework = "torch"
        mask_arguments = (MASK,)

        def attend(self, query, key, value, masks, **options):
            import torch

            batch, _, length, _ = query.shape
            query.swapaxes(1, 2).reshape(batch, length, -1)
            mask = masks.get("mask")
            return torch.nn.functional.scaled_dot_product_attention(
                query.contiguous(), key, value, attn_mask=mask
            )

    found = entries(Merging(), "degenerate-sizes")
    assert say(found["batch of 0"].value) == "cannot be asked"
    assert "reshape" in found["batch of 0"].evidence
    assert values(Merging(), "masks")["mask, int32 0/1"] == "rejected", "by the library"


# Layouts in every order of axes


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "layout",
    [
        "query key batch",
        "key batch heads query",
        "(heads batch) query key",
        "key (query batch)",
        "(batch query) heads key",
    ],
)
def test_a_declared_layout_is_asked_for_in_its_own_order(layout):
    import einops

    argument = MaskArgument("mask", layout, true="attends")
    missing = [axis for axis in ("batch", "heads", "query", "key") if axis not in layout]

    def logits(logits, mask):
        sizes = dict(zip(("batch", "heads", "query", "key"), logits.shape, strict=True))
        order = " ".join("1" if axis in missing else axis for axis in sizes)
        held = {axis: size for axis, size in sizes.items() if axis not in missing}
        return blocked(logits, einops.rearrange(mask, f"{layout} -> {order}", **held) != 0)

    adapter = fake(logits, masks=argument)
    found = entries(adapter, "shapes")["mask: shapes it takes"]
    assert found.agrees, (say(found.declared), say(found.value))
    assert say(found.value).count("[") == 1
    assert not [subject for subject in values(adapter, "shapes") if "takes [" in subject]
    for subject, value in values(adapter, "coinciding-sizes").items():
        assert "unexplained" not in value, subject
        assert "no reading" not in value, subject


def test_joined_axes_in_another_order_than_declared_are_still_a_deviation():
    def logits(logits, mask):
        return blocked(logits, mask.reshape(logits.shape) != 0)

    layouts = ("batch heads query key", "(heads batch) query key")
    argument = MaskArgument("mask", layouts, true="attends")
    assert not entries(fake(logits, masks=argument), "shapes")["mask: shapes it takes"].agrees


# The gradient of a fully masked query


FIRST = np.float32([1, 0, 0, 0, 0])
"""Weights that sum to 1, as equal ones do."""


def finishing(forward, backward):
    """An attention in torch that has other weights of a fully masked query in its gradient."""
    forward, backward = (np.float32(weights) for weights in (forward, backward))
    torch = pytest.importorskip("torch")

    @attention_function("torch", MASK)
    def attend(query, key, value, mask=None):
        logits = query @ key.mT / query.shape[-1] ** 0.5
        dead = torch.zeros_like(logits[..., :1], dtype=torch.bool)
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask != -torch.inf
            dead = ~mask.any(dim=-1, keepdim=True)
            logits = logits.masked_fill(~mask & ~dead, -torch.inf)
        weights = logits.softmax(-1)
        fills = (torch.as_tensor(fill) for fill in (forward, backward))
        shown, used = (torch.where(dead, fill, weights) @ value for fill in fills)
        return used + (shown - used).detach()

    attend.name = "finishing"
    return attend


@pytest.mark.parametrize(
    ("forward", "backward", "value"),
    [
        (0.0, 0.0, "Σ dV = 0, as in the output"),
        (0.0, 0.2, "Σ dV = 1, not 0 as in the output"),
        (0.2, 0.2, "Σ dV = 1, as in the output"),
        (0.2, 1.0, "Σ dV = 5, not 1 as in the output"),
        (0.2, 0.0, "Σ dV = 0, not 1 as in the output"),
        (0.2, FIRST, "not those of the output: values"),
    ],
)
def test_the_gradient_of_a_fully_masked_query_has_a_value(forward, backward, value):
    found = values(finishing(forward, backward), "masked-rows")
    assert found["mask, bool: gradients"] == "finite"
    assert found["mask, bool: gradients if only the masked query has a cotangent"] == value
    if np.all(forward == backward):
        other = found["mask, bool: gradients if only the masked query has none"]
        assert other == "those of the other queries"


def test_a_gradient_that_is_wrong_in_one_dtype_only_is_seen():
    torch = pytest.importorskip("torch")

    @attention_function("torch", MASK, dtypes=("float32", "float16"))
    def attend(query, key, value, mask=None):
        logits = query @ key.mT / query.shape[-1] ** 0.5
        if mask is not None:
            floor = torch.finfo(query.dtype).min if query.dtype == torch.float16 else -torch.inf
            logits = logits.masked_fill(~mask, floor) if mask.dtype == torch.bool else logits + mask
        return logits.softmax(-1) @ value

    attend.name = "half"
    found = values(attend, "masked-rows")
    assert found["mask, bool: output"] == "NaN"
    assert found["mask, bool: output, inputs float16"] == "mean of the values"


# NaN, infinities and large numbers behind a mask, and where they are visible


def test_every_argument_is_tried():
    def logits(logits, mask=None, other=None):
        logits = logits if mask is None else blocked(logits, mask)
        return logits if other is None else logits + np.where(other, 0, -np.inf).astype("f")

    masks = (MASK, MaskArgument("other", "batch heads query key", true="attends"))
    found = values(fake(logits, masks=masks), "leaks")
    assert found["NaN in a blocked key (mask, bool)"] == "hidden"
    assert found["NaN in a blocked key (other, bool)"].startswith("reaches the output")


def test_a_weight_that_is_almost_zero_lets_the_largest_number_through():
    def clipped(logits, mask):
        highest = np.where(mask != 0, logits, -np.inf).max(axis=-1, keepdims=True)
        return np.maximum(blocked(logits, mask != 0), highest - 64)

    found = values(fake(clipped), "leaks")
    assert found["1e5 in a blocked value (mask, bool)"] == "hidden"
    assert found["the largest number in a blocked value (mask, bool)"].startswith("reaches")
    found = values(fake(attends), "leaks")
    assert found["the largest number in a blocked value (mask, bool)"] == "hidden"


def test_a_blocked_token_may_attend_as_a_query():
    adapter = finishing(0.0, 0.0)
    found = values(adapter, "leaks")
    assert found["1e5 in a blocked key (mask, bool)"] == "hidden"
    assert not [subject for subject in found if subject.startswith("1e5") and "shared" in subject]


def test_nan_that_is_visible_has_to_be_seen():
    class Polished(Correct):
        def attend(self, query, key, value, masks, **options):
            return super().attend(query, np.nan_to_num(key), value, masks, **options)

    found = values(Polished(), "leaks")
    assert found["NaN in a visible key (mask, bool)"] == "does not reach the output"
    assert found["NaN in a visible value (mask, bool)"] == "reaches the output"
    assert values(Correct(), "leaks")["NaN in a visible key (mask, bool)"] == "reaches the output"


# Values and dtypes of masks


def test_the_least_number_is_not_minus_1e9():
    def base_2(logits, mask):
        if mask.dtype == np.bool_:
            return blocked(logits, mask)
        factor = np.float32(np.log2(np.e))
        return (logits * factor + mask * factor) / factor

    found = values(fake(base_2), "masked-rows")
    assert found["mask, float32 0/−1e9: output"] == "mean of the values"
    assert found["mask, float32 0/finfo.min: output"] == "NaN"
    found = values(fake(usual), "masked-rows")
    assert found["mask, float32 0/finfo.min: output"] == "mean of the values"


def test_a_mask_may_have_another_dtype_than_the_inputs():
    def own(logits, mask):
        if mask.dtype not in (np.bool_, logits.dtype):
            raise TypeError("in the dtype of the query, please")
        return usual(logits, mask)

    found = values(fake(own), "masks")
    assert found["mask, float32 0/−inf"] == "added"
    assert found["mask, float16 0/−inf"] == "rejected"
    assert values(fake(usual), "masks")["mask, float16 0/−inf"] == "added"


# The same again


def test_the_same_bits_are_said_with_their_size():
    found = values(fake(usual), "repeatability")
    assert found["asked twice"] == "same bits (batch 2, heads 4, query 144, key 145)"
    assert found["mask whole and cut out"] == "same bits (batch 2, heads 6, query 4, key 5)"


def test_bits_that_depend_on_the_order_of_tiles_show():
    calls = []

    def in_turn(weights):
        calls.append(0)
        tiles = [weights[..., start : start + 64] for start in range(0, weights.shape[-1], 64)]
        order = tiles[:: -1 if len(calls) % 2 else 1]
        return weights / sum(tile.sum(axis=-1, keepdims=True) for tile in order)

    found = values(fake(weights=lambda weights, **_: weights, masks=()), "repeatability")
    assert found["asked twice"].startswith("same bits")

    class Tiled(Correct):
        def attend(self, query, key, value, masks, **options):
            weights = in_turn(super().attend(query, key, value, masks, **options)[1])
            return (weights @ value).astype(query.dtype), weights.astype(query.dtype)

    assert values(Tiled(), "repeatability")["asked twice"] == "within noise"
