"""Shapes, two masks at once, masked rows, the causal flag, leaks: each has a name of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mutants.fakes import attends, blocked, entries, fake, laboratory, softmax, usual, values
from mutants.miniatures import MASK, Correct

from conformance import Answer, CausalFlag, MaskArgument, attention_function
from conformance.cases.catalogue import find_cases
from conformance.experiments import experiment
from conformance.experiments.blocked_keys import nan_places
from conformance.requirements.laboratory import Accepted
from conformance.words import say

# Shapes


def of_three_axes(over):
    """Takes four axes, and three as said: nothing is broadcast."""

    def logits(logits, mask):
        batch, heads, queries, keys = logits.shape
        known = {"heads": (heads, queries, keys), "batch": (batch, queries, keys)}
        if mask.shape == known[over]:
            mask = mask[None] if over == "heads" else mask[:, None]
        elif mask.shape != logits.shape:
            raise ValueError("this shape is not for me")
        return blocked(logits, mask != 0)

    return fake(logits)


def turns(logits, mask):
    """Turns a transposed mask around, and says nothing."""
    if mask.shape[-2:] == logits.shape[:1:-1] != logits.shape[2:]:
        mask = mask.swapaxes(-1, -2)
    return blocked(logits, mask != 0)


def split(text):
    return {item.strip(" []") for item in text.split("]") if item.strip()}


def test_numpy_broadcasting_is_seen_as_such():
    found = values(fake(attends), "shapes")
    assert split(found["mask: shapes it takes"]) == {
        "key",
        "query, key",
        "1, key",
        "query, 1",
        "heads, query, key",
        "1, query, key",
        "batch, heads, query, key",
        "batch, 1, query, key",
        "1, heads, query, key",
        "1, 1, query, key",
        "batch, 1, 1, key",
        "batch, heads, 1, key",
        "batch, heads, query, 1",
    }
    assert found.keys() == {"mask: shapes it takes", "mask: shapes it refuses"}, "all explained"
    refused = split(found["mask: shapes it refuses"])
    assert {"query", "key, query", "batch, query, key", "heads+1, query, key"} <= refused


@pytest.mark.parametrize("over", ["heads", "batch"])
def test_three_axes_are_read_as_they_are(over):
    shape = f"{over}, query, key"
    found = values(of_three_axes(over), "shapes")
    assert split(found["mask: shapes it takes"]) == {shape, "batch, heads, query, key"}
    for told, entry in values(of_three_axes(over), "coinciding-sizes").items():
        readings = {item.partition(" is ")[2] for item in entry.split("; ")}
        assert readings == {f"[{shape}]", "[batch, heads, query, key]"}, told


def test_a_transposed_mask_that_is_taken_is_seen():
    found = values(fake(turns), "shapes")
    assert {"key, query", "query, key"} <= split(found["mask: shapes it takes"])
    coinciding = values(fake(turns), "coinciding-sizes")
    different = coinciding["mask, batch = query, heads = key"]
    assert "[5, 3] is [key, query]" in different
    assert "[3, 5] is [query, key]" in different
    assert "[5, 5] is [query, key]" in coinciding["mask, batch = heads, query = key"]


def test_who_reads_queries_for_keys_is_seen_where_sizes_coincide():
    adapter = fake(lambda logits, mask: blocked(logits, mask.swapaxes(-1, -2) != 0))
    adapter.mask_arguments = (MaskArgument("mask", "batch heads key query", true="attends"),)
    found = entries(adapter, "shapes")["mask: shapes it takes"]
    assert "batch, heads, key, query" in split(say(found.value))
    assert found.agrees
    square = values(adapter, "coinciding-sizes")["mask, batch = heads, query = key"]
    assert "[5, 5] is [key, query]" in square


def padded(mask, keys):
    """Blocks the keys that the mask does not reach, as ONNX's operator does."""
    length = mask.shape[-1]
    return np.concatenate([mask, np.zeros((*mask.shape[:-1], keys - length))], axis=-1)


def of_heads(chosen):
    return lambda mask, heads: mask[chosen(np.arange(heads), len(mask))]


@pytest.mark.parametrize(
    ("heads", "more", "fewer"),
    [
        (lambda at, n: np.minimum(at, n - 1), "the rest is ignored", "the last serves the others"),
        (lambda at, n: at % n, "the rest is ignored", "which serve the others in turn"),
    ],
    ids=["clamped", "in turn"],
)
def test_a_mask_of_another_number_of_heads_is_made_to_fit(heads, more, fewer):
    def logits(logits, mask):
        return blocked(logits, of_heads(heads)(mask.reshape(-1, 4, 5), logits.shape[1]) != 0)

    argument = MaskArgument("mask", "heads query key", true="attends")
    found = values(fake(logits, masks=argument), "shapes")
    assert more in found["mask: takes [batch·heads, query, key] [heads+1, query, key]"]
    assert fewer in found["mask: takes [batch, query, key]"]


def test_a_mask_that_ends_before_the_last_key_is_made_to_fit():
    def logits(logits, mask):
        return blocked(logits, padded(mask, logits.shape[-1]) != 0)

    found = values(fake(logits), "shapes")
    assert found["mask: takes [query] [batch]"] == "[key], and the keys beyond are blocked"


def test_a_mask_may_stand_beside_a_causal_mask():
    """As in a decoder, which adds its own to a mask of the padding alone."""

    def logits(logits, mask):
        batch, _, queries, keys = logits.shape
        if mask.ndim == 2:
            if len(mask) < batch or mask.shape[1] != keys:
                raise ValueError("it is no padding")
            mask = mask[:batch, None, None] * np.tri(queries, keys, keys - queries)
        return blocked(logits, mask != 0)

    found = values(fake(logits), "shapes")
    assert found["mask: takes [batch, key]"] == "[batch, key], under a causal mask"
    first = "[batch, key] of the first entries, and the rest is ignored, under a causal mask"
    assert found["mask: takes [query, key] [heads, key]"] == first
    square = values(fake(logits), "coinciding-sizes")["mask, batch = query, heads = key"]
    assert "[3, 5] is [batch, key], under a causal mask" in square

    def padding(found, mask):
        return logits(found, mask if mask.ndim == 4 else mask == 0)

    told = "[batch, key], under a causal mask, where what blocks in other shapes attends"
    assert values(fake(padding), "shapes")["mask: takes [batch, key]"] == told


def test_a_mask_may_take_the_elements_in_their_order():
    def logits(logits, mask):
        return blocked(logits, mask.reshape(logits.shape) != 0)

    found = values(fake(logits), "shapes")
    told = "its elements in their order, as [batch, heads, query, key]"
    (shapes,) = (subject for subject, value in found.items() if value == told)
    assert "[heads, batch, query, key]" in shapes
    assert "batch, heads, query, key" in split(found["mask: shapes it takes"])


def test_a_mask_of_one_column_may_be_one_of_entries():
    """As in a decoder, whose mask of padding has an axis of size 1."""

    def logits(logits, mask):
        if mask.shape[-1] == 1:
            mask = mask[: len(logits), :, None, None] == 0
        elif mask.ndim < 4:
            raise ValueError("it is neither")
        return blocked(logits, mask != 0)

    found = values(fake(logits), "shapes")
    inverted = ", where what blocks in other shapes attends"
    first = f"[batch, 1] of the first entries, and the rest is ignored{inverted}"
    assert found["mask: takes [query, 1]"] == first
    assert found["mask: takes [batch, 1]"] == f"[batch, 1]{inverted}"


def test_a_mask_may_be_read_as_numbers_of_keys():
    def logits(logits, mask):
        if mask.ndim == 1:
            mask = np.arange(logits.shape[-1]) < mask.astype(int)[:, None]
        return blocked(logits, mask[:, None, None] != 0)

    argument = MaskArgument("mask", "batch key", true="attends")
    found = values(fake(logits, masks=argument), "shapes")
    assert found["mask: takes [batch]"] == "a number of visible keys for each of [batch]"


def test_a_shape_that_is_taken_for_nothing_is_not_guessed_at():
    def logits(logits, mask):
        if mask.ndim < 4:
            mask = np.resize(np.roll(mask, 1), logits.shape)
        return blocked(logits, mask != 0)

    found = values(fake(logits), "shapes")
    unread = next(value for subject, value in found.items() if "[heads, query, key]" in subject)
    assert unread == "taken, but no reading of its axes explains it"


# Two masks at once

PAD = MaskArgument("pad", "batch key", true="attends")
SQUARE = MaskArgument("mask", "query key", true="attends")


def joined(join):
    def logits(logits, **masks):
        opened = {"pad": lambda m: m[:, None, None, :], "mask": lambda m: m[None, None]}
        shown = [opened[name](array) for name, array in masks.items()]
        visible = shown[0] if len(shown) == 1 else join(*shown)
        return blocked(logits, visible)

    return fake(logits, masks=(PAD, SQUARE))


def one_only(pad, mask):
    raise ValueError("one mask, please")


@pytest.mark.parametrize(
    ("join", "value"),
    [
        (lambda pad, mask: pad & mask, "both"),
        (lambda pad, mask: pad, "pad only"),
        (lambda pad, mask: mask, "mask only"),
        (lambda pad, mask: pad | mask, "either"),
        (lambda pad, mask: np.ones_like(pad | mask), "neither"),
        (lambda pad, mask: pad | ~mask, "what pad shows or mask blocks"),
        (lambda pad, mask: ~pad & mask, "what mask shows and pad blocks"),
        (lambda pad, mask: ~(pad ^ mask), "unexplained"),
        (one_only, "refused"),
    ],
    ids=["both", "first", "second", "either", "neither", "or not", "not", "unexplained", "refused"],
)
def test_two_masks_at_once(join, value):
    found = values(joined(join), "pairs")
    assert found == {
        "pad with mask, sizes differ": value,
        "pad with mask, sizes coincide": value,
    }


@pytest.mark.parametrize(
    ("pads", "value"),
    [(lambda mask: True, "both"), (lambda mask: mask.ndim == 2, "mask only")],
    ids=["always", "in the first layout"],
)
def test_two_masks_at_once_in_each_layout(pads, value):
    """One that forgets the padding beside a mask of three axes."""

    def logits(logits, pad=True, mask=True):
        padded = pad is not True and (mask is True or pads(mask))
        if mask is not True:
            mask = mask if mask.ndim == 2 else mask[:, None]
        return blocked(logits, (pad[:, None, None] if padded else True) & mask)

    layouts = MaskArgument("mask", ("query key", "batch query key"), true="attends")
    assert values(fake(logits, masks=(PAD, layouts)), "pairs") == {
        "pad with mask, sizes differ": "both",
        "pad with mask, sizes coincide": "both",
        "pad [batch key] with mask [batch query key]": value,
    }


# A fully masked query


def filled(fill, **declared):
    """What a fully masked row has for weights: fill(weights without a mask)."""

    @attention_function("numpy", MASK, returns_weights="per head", **declared)
    def attend(query, key, value, mask=None):
        logits = np.einsum("bhqd,bhkd->bhqk", query, key) * query.dtype.type(
            query.shape[-1] ** -0.5
        )
        plain = softmax(logits)
        logits = logits if mask is None else usual(logits, mask)
        dead = np.isneginf(logits).all(axis=-1, keepdims=True)
        weights = np.where(dead, fill(plain), softmax(logits)).astype(query.dtype)
        return np.einsum("bhqk,bhkd->bhqd", weights, value), weights

    attend.name = "filled"
    return attend


@pytest.mark.parametrize(
    ("fill", "output", "weights"),
    [
        (lambda plain: np.nan, "NaN", "NaN"),
        (lambda plain: 0, "output bias only", "zeros"),
        (lambda plain: 1 / plain.shape[-1], "mean of the values", "uniform"),
        (lambda plain: plain, "as if unmasked", "as if unmasked"),
        (lambda plain: 1 / 128, *["equal weights that sum to less than 1"] * 2),
        (lambda plain: np.eye(plain.shape[-1])[0], "something else", "something else"),
    ],
    ids=["NaN", "zeros", "mean", "unmasked", "padded tile", "first key"],
)
def test_a_fully_masked_row(fill, output, weights):
    found = values(filled(fill), "masked-rows")
    for form in ("bool", "float32 0/−inf"):
        assert found[f"mask, {form}: output"] == output
        assert found[f"mask, {form}: returned weights"] == weights
    assert found["mask, float32 0/−1e9: output"] == "mean of the values", "nothing is infinite"


def test_zeros_are_told_from_the_output_bias_alone():
    class Zeros(Correct):
        def run(self, problem, call):
            answer = super().run(problem, call)
            seen = answer.weights.any(axis=(1, 3))[..., None]
            return Answer(np.where(seen, answer.output, 0), answer.weights, {})

    assert values(Zeros(), "masked-rows")["mask, bool: output"] == "zeros"


BLOCKED = np.array([[False, True, False, False], [False] * 4])


@pytest.mark.parametrize(
    ("lost", "places"),
    [
        ([], []),
        ([("query", (0, 1))], ["the masked queries"]),
        ([("query", (0, 2))], ["other queries"]),
        ([("query", (1, 1))], ["other queries"]),
        ([("query", ())], ["the masked queries", "other queries"]),
        ([("key", (0, 0)), ("value", (1, 2))], ["keys", "values"]),
        ([("weights.query", ()), ("weights.output", ())], ["parameters"]),
    ],
    ids=["none", "masked", "another", "another entry", "all", "keys and values", "parameters"],
)
def test_where_gradients_are_lost(lost, places):
    shapes = {"query": (2, 4, 3), "key": (2, 5, 3), "value": (2, 5, 3)}
    shapes |= {"weights.query": (3, 1, 3), "weights.output": (1, 3, 3)}
    gradients = {name: np.zeros(shape) for name, shape in shapes.items()}
    for name, index in lost:
        gradients[name][index] = np.nan
    seen = Accepted(None, Answer(np.zeros((2, 4, 3)), None, gradients), np.zeros((2, 1, 4, 5)))
    assert list(map(say, nan_places(seen, BLOCKED))) == places


def in_torch(finish, **declared):
    """A plain attention in torch; finish(logits, rows without a key) gives its weights."""
    torch = pytest.importorskip("torch")

    @attention_function("torch", MASK, **declared)
    def attend(query, key, value, mask=None):
        logits = query @ key.mT / query.shape[-1] ** 0.5
        dead = torch.zeros_like(logits[..., :1], dtype=torch.bool)
        if mask is not None:
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, -torch.inf)
            else:
                logits = logits + mask
            dead = torch.isneginf(logits).all(dim=-1, keepdim=True)
        return finish(torch, logits, dead) @ value

    attend.name = "in torch"
    return attend


@pytest.mark.parametrize(
    ("finish", "output", "filled", "added"),
    [
        (
            lambda torch, logits, dead: logits.softmax(-1),
            "NaN",
            "NaN: values, parameters",
            "NaN: the masked queries, keys, values, parameters",
        ),
        (
            lambda torch, logits, dead: torch.where(dead, 0, logits.softmax(-1)),
            "output bias only",
            "finite",
            "NaN: the masked queries, keys, parameters",
        ),
        (
            lambda torch, logits, dead: torch.where(
                dead, 0, torch.where(dead, 0, logits).softmax(-1)
            ),
            "output bias only",
            "finite",
            "finite",
        ),
    ],
    ids=["softmax", "hidden afterwards", "hidden twice"],
)
def test_gradients_of_a_fully_masked_row(finish, output, filled, added):
    found = values(in_torch(finish), "masked-rows")
    for form, gradients in (("bool", filled), ("float32 0/−inf", added)):
        assert found[f"mask, {form}: output"] == output
        # masked_fill hands no gradient on to what it fills; an addition does.
        assert found[f"mask, {form}: gradients"] == gradients


@pytest.mark.parametrize(
    ("left", "value"),
    [(1e-14, "Σ dV = 0, as in the output"), (0.5, "not those of the output: the masked queries")],
)
def test_rounding_noise_is_no_gradient_of_a_masked_query(left, value):
    @attention_function("torch", MASK)
    def attend(query, key, value, mask=None):
        logits = query @ key.mT / query.shape[-1] ** 0.5
        seen = 1 if mask is None else mask != 0
        powers = logits.exp() * seen
        weights = powers / powers.sum(-1, keepdim=True).clamp_min(1e-30)
        # A residual that cancels in the output may leave a part of it in the gradient.
        return weights @ value + left * (query - query.detach()).sum(-1, keepdim=True)

    pytest.importorskip("torch")
    found = values(attend, "masked-rows")
    assert found["mask, bool: gradients if only the masked query has a cotangent"] == value


@pytest.mark.parametrize("form", ["bool", "float32 0/−inf", "float32 0/−1e9"])
def test_a_row_is_also_filled_with_numbers_where_all_but_0_block(form):
    adapter = fake(lambda logits, mask: blocked(logits, mask == 0))
    assert values(adapter, "masked-rows")[f"mask, {form}: output"] == "NaN"


# The causal flag


def causal(triangle, join=lambda triangle, mask: triangle & mask, alignment="top-left"):
    def logits(logits, mask=None, is_causal=False):
        visible = triangle(*logits.shape[2:]) if is_causal else None
        if mask is not None:
            visible = mask if visible is None else join(visible, mask)
        return blocked(logits, visible)

    masks = MaskArgument("mask", "batch heads query key", true="attends")
    flag = CausalFlag("is_causal", alignment=alignment)
    return fake(logits, masks=masks, causal_flag=flag)


def top_left(queries, keys):
    return np.tri(queries, keys, dtype=bool)


def bottom_right(queries, keys):
    return np.tri(queries, keys, keys - queries, dtype=bool)


def everything(queries, keys):
    return np.ones((queries, keys), dtype=bool)


def square_only(queries, keys):
    if queries != keys:
        raise ValueError("lengths must be equal")
    return top_left(queries, keys)


@pytest.mark.parametrize(
    ("triangle", "alone"),
    [
        (top_left, ["causal", "top-left", "top-left"]),
        (bottom_right, ["causal", "bottom-right", "bottom-right"]),
        (square_only, ["causal", "refused", "refused"]),
        (everything, ["ignored"] * 3),
        (
            lambda queries, keys: np.tri(queries, keys, 1, dtype=bool),
            [f"{name}, and the next key" for name in ("causal", "top-left", "top-left")],
        ),
        (
            lambda queries, keys: np.tri(queries, keys, keys - queries - 1, dtype=bool),
            [f"{name}, without a query's own key" for name in ("causal", *["bottom-right"] * 2)],
        ),
        (
            lambda queries, keys: (
                top_left(queries, keys) | (np.arange(queries) == queries - 1)[:, None]
            ),
            ["causal", "top-left, but the last query sees every key", "top-left"],
        ),
        (
            lambda queries, keys: ~np.tri(queries, keys, -1, dtype=bool),
            [f"{name}, but the other half is visible" for name in ("causal", *["top-left"] * 2)],
        ),
        (lambda queries, keys: top_left(queries, keys)[::-1], ["unexplained"] * 3),
        (lambda queries, keys: np.zeros((queries, keys), bool), ["NaN"] * 3),
    ],
    ids=[
        "top-left",
        "bottom-right",
        "refused",
        "ignored",
        "off by one",
        "strict",
        "last query",
        "other half",
        "upside down",
        "nan",
    ],
)
def test_where_the_triangle_is(triangle, alone):
    found = values(causal(triangle), "causal")
    lengths = ("equal lengths", "fewer queries than keys", "more queries")
    assert [found[f"is_causal alone, {told}"] for told in lengths] == alone


@pytest.mark.parametrize("triangle", [top_left, bottom_right])
@pytest.mark.parametrize(
    ("join", "value"),
    [
        (lambda triangle, mask: triangle & mask, "both"),
        (lambda triangle, mask: triangle | np.zeros_like(mask), "is_causal only"),
        (lambda triangle, mask: mask, "mask only"),
        (lambda triangle, mask: mask | ~triangle, "what mask shows or is_causal blocks"),
        (one_only, "refused"),
    ],
    ids=["both", "flag", "mask", "or not", "refused"],
)
def test_the_flag_beside_a_mask(triangle, join, value):
    found = values(causal(triangle, join), "causal")
    for told in ("equal lengths", "fewer queries than keys", "more queries"):
        assert found[f"is_causal with mask, {told}"] == value


def test_the_flag_beside_a_mask_in_each_form():
    def logits(logits, mask=None, is_causal=False):
        triangle = top_left(*logits.shape[2:]) if is_causal else True
        if mask is None or mask.dtype != bool:
            return blocked(logits + (0 if mask is None else mask), triangle)
        # The triangle is filled in with a number, which is True.
        return blocked(logits, mask | ~np.bool_(triangle))

    masks = MaskArgument("mask", "batch heads query key", true="attends", number="added")
    adapter = fake(logits, masks=masks, causal_flag=CausalFlag("is_causal", "top-left"))
    found = values(adapter, "causal")
    assert found["is_causal with mask, equal lengths"] == "what mask shows or is_causal blocks"
    assert found["is_causal with mask, float32 0/−inf, equal lengths"] == "both"
    # Where both forms do the same, one is enough.
    both = values(causal(top_left), "causal")
    assert not any("0/−inf, equal lengths" in subject for subject in both)


def test_a_fully_masked_row_beside_the_causal_flag():
    def logits(logits, mask=None, is_causal=False):
        triangle = top_left(*logits.shape[2:]) if is_causal else True
        visible = triangle if mask is None else triangle & mask
        dead = ~np.broadcast_to(visible, logits.shape).any(axis=-1, keepdims=True)
        # Only the causal kernel looks for rows without keys.
        return blocked(logits, visible | dead if is_causal else visible)

    masks = MaskArgument("mask", "batch heads query key", true="attends")
    adapter = fake(logits, masks=masks, causal_flag=CausalFlag("is_causal", "top-left"))
    found = values(adapter, "masked-rows")
    assert found["mask, bool: output"] == "NaN"
    assert found["mask, bool: output, beside is_causal"] == "as if unmasked"
    assert not any("beside" in it for it in values(causal(top_left), "masked-rows"))


@pytest.mark.parametrize(
    ("effect", "triangle", "join", "wrong"),
    [
        ("instead of masks", top_left, lambda triangle, mask: triangle | np.zeros_like(mask), 0),
        ("instead of masks", top_left, lambda triangle, mask: triangle & mask, 3),
        ("without a mask", top_left, lambda triangle, mask: mask, 0),
        ("without a mask", top_left, lambda triangle, mask: triangle & mask, 3),
        ("none", everything, lambda triangle, mask: mask, 0),
        ("none", top_left, lambda triangle, mask: mask, 3),
        ("none", everything, lambda triangle, mask: mask & False, 3),
    ],
    ids=["mask ignored", "mask obeyed", "replaced", "combined", "ignored", "obeyed", "hides all"],
)
def test_a_flag_that_is_declared_to_be_ignored(effect, triangle, join, wrong):
    adapter = causal(triangle, join)
    adapter.causal_flag = replace(adapter.causal_flag, effect=effect)
    found = experiment("causal").run(laboratory(adapter)).entries
    assert [entry.agrees for entry in found].count(False) == wrong


@pytest.mark.parametrize("effect", ["without a mask", "instead of masks", "none"])
def test_no_problem_is_encoded_by_a_flag_that_is_ignored(effect):
    adapter = causal(top_left, lambda triangle, mask: mask)
    adapter.causal_flag = replace(adapter.causal_flag, effect=effect)
    for name, flagged in (("square", effect != "none"), ("with-left-aligned-padding", False)):
        (case,) = find_cases(f"causal/{name}/self")
        labels = [one.label for one in adapter.masks.spellings(case.problem("float32"))]
        assert any("is_causal" in label for label in labels) == flagged
        assert any("is_causal" not in label for label in labels)


def test_without_a_flag_there_is_one_entry():
    assert values(fake(attends), "causal") == {"causal flag": "none is declared"}


# NaN behind the mask


def hiding(how):
    @attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"))
    def attend(query, key, value, mask=None):
        with np.errstate(all="ignore"):
            logits = np.einsum("bhqd,bhkd->bhqk", query, key)
            if mask is not None and how == "added":
                logits = logits + np.where(mask, 0, -np.inf).astype(query.dtype)
            elif mask is not None:
                logits = blocked(logits, mask)
            weights = softmax(logits).astype(query.dtype)
            if mask is not None and how == "everywhere":
                value = np.where(mask.any(axis=2)[..., None], value, 0)
            return np.einsum("bhqk,bhkd->bhqd", weights, value)

    attend.name = "hiding"
    return attend


@pytest.mark.parametrize(
    ("how", "key", "value"),
    [
        ("everywhere", "hidden", "hidden"),
        ("logits", "hidden", "reaches the output"),
        ("added", "reaches the output", "reaches the output"),
    ],
)
def test_what_is_behind_the_mask(how, key, value):
    found = values(hiding(how), "leaks")
    for told in ("NaN", "inf", "−inf"):
        assert found[f"{told} in a blocked key (mask, bool)"] == key
        assert found[f"{told} in a blocked value (mask, bool)"] == value


@pytest.mark.night
def test_gradients_are_reached_where_the_output_is_not():
    adapter = in_torch(lambda torch, logits, dead: logits.softmax(-1))
    found = values(adapter, "leaks")["NaN in a blocked key (mask, bool)"]
    assert found == "reaches gradients of query, gradients of parameters"


# One mask, handed to everybody


@pytest.mark.parametrize(
    ("adapter", "expected"),
    [
        (fake(usual), ["as meant", "100% on blocked keys, NaN", "as meant"]),
        (
            fake(lambda logits, mask: blocked(logits, mask == 0)),
            ["100% on blocked keys, NaN", "as meant", "as meant"],
        ),
        (fake(), ["ignored"] * 3),
    ],
    ids=["attends", "blocks", "ignores"],
)
def test_one_causal_mask_handed_to_everybody(adapter, expected):
    lab = laboratory(adapter)
    found = experiment("same-mask").run(lab)
    assert [say(entry.value) for entry in found.entries] == expected
    assert all(found.arrays[str(entry.subject)].shape == (5, 5) for entry in found.entries)
    future = np.triu(np.ones((5, 5), bool), 1)
    for entry in found.entries:
        seen = np.nan_to_num(found.arrays[str(entry.subject)])[future].any()
        assert seen == (entry.value.id != "same-mask.as-meant")
