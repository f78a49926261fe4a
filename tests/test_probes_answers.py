"""Returned weights, dropout, degenerate sizes, layouts of the input, and the same again."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from mutants.fakes import fake, values
from mutants.miniatures import Correct, attention

from conformance import Answer, Function, Mode, SoftCap, Unsupported
from conformance.adapter.loading import load

# Returned weights


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda weights: weights, ["per head", "1", "the same"]),
        (lambda weights: weights.mean(axis=1), ["averaged", "1", "the same"]),
        (lambda weights: weights[:, 0], ["averaged", "1", "others"]),
        (lambda weights: None, ["none"]),
        (lambda weights: 2 * weights, ["per head", "not 1", "others"]),
        (lambda weights: weights * np.float32(1.0001), ["per head", "not 1", "others"]),
        (lambda weights: np.roll(weights, 1, -1), ["per head", "1", "others"]),
        (lambda weights: np.roll(weights, 1, 1), ["per head", "1", "others"]),
    ],
    ids=["same", "averaged", "of one head", "none", "doubled", "slightly off", "keys", "heads"],
)
def test_returned_weights(returned, expected):
    assert list(values(fake(returned=returned), "weights").values()) == expected


def test_weights_of_a_library_without_heads_are_those_of_one():
    class Single(Correct):
        native_layout = "batch length head"

    assert values(Single(), "weights")["returned weights"] == "of one head"
    Single.native_layout = "batch length heads head"
    assert values(Single(), "weights")["returned weights"] == "per head"


# Dropout


class Dropping(Function):
    """Drops weights with probability p, in mode "train" or always."""

    returns_weights = "per head"
    modes = (Mode("train"), Mode("eval"))
    dropout_modes = ("train",)
    shared: tuple[int, ...] = ()
    always, after = False, False

    def attend(self, query, key, value, masks, mode, **options):
        context, weights = attention(query, key, value)
        if mode.dropout and (self.always or mode.name == "train"):
            shape = [1 if axis in self.shared else size for axis, size in enumerate(weights.shape)]
            kept = np.random.default_rng(mode.draw).random(shape) >= mode.dropout
            dropped = self.scaled(weights * kept, mode.dropout).astype(weights.dtype)
            context = np.einsum("bhqk,bhkd->bhqd", dropped, value)
            weights = dropped if self.after else weights
        return context, weights

    def scaled(self, weights, probability):
        return weights / (1 - probability)


class Unscaled(Dropping):
    def scaled(self, weights, probability):
        return weights


class Renormalised(Dropping):
    def scaled(self, weights, probability):
        return weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-9)


def changed(kind=Dropping, **attributes):
    found = type(kind.__name__, (kind,), attributes)()
    found.name = "dropping"
    return found


@pytest.mark.parametrize(
    ("adapter", "changes"),
    [
        (changed(), {}),
        (changed(after=True), {"returned weights are those": "after dropout"}),
        (
            changed(Unscaled),
            {"kept weights": "not scaled", "mean over draws": "not the weights"},
        ),
        (
            changed(Renormalised),
            {"kept weights": "something else", "mean over draws": "not the weights"},
        ),
        (changed(shared=(0,)), {"a draw is": "the same for all batch entries"}),
        (changed(shared=(1,)), {"a draw is": "the same for all heads"}),
        (changed(shared=(2,)), {"a draw is": "the same for all queries"}),
        (changed(shared=(1, 2)), {"a draw is": "the same for all heads and queries"}),
        (changed(shared=(3,)), {"a draw is": "the same for all keys"}),
    ],
    ids=["usual", "after", "unscaled", "renormalised", "batch", "heads", "queries", "two", "keys"],
)
def test_dropout(adapter, changes):
    usual = {
        "dropout": "on",
        "kept weights": "scaled by 1/(1−p)",
        "mean over draws": "the weights",
        "a draw is": "one for each weight",
        "returned weights are those": "before dropout",
    }
    assert values(adapter, "dropout") == usual | changes


def test_dropout_in_evaluation():
    assert values(changed(), "dropout", "eval") == {"dropout": "off"}
    assert values(changed(always=True), "dropout", "eval")["dropout"] == "on"


def test_without_a_mode_with_dropout_there_is_nothing_to_ask():
    with pytest.raises(Unsupported, match="names no mode with dropout"):
        values(changed(dropout_modes=()), "dropout")


# Sizes and layouts


def test_degenerate_sizes():
    assert values(fake(), "degenerate-sizes") == {
        "batch of 0": "an empty output",
        "no query": "an empty output",
        "no key": "refused",
        "one key": "the value",
    }


@pytest.mark.parametrize("masked_first", [False, True])
def test_returned_logits_are_those_of_a_stage(masked_first):
    """As in ONNX, which has changed the order of the cap and the mask, and so of its options."""

    class Four(Correct):
        features = (SoftCap("cap"),)
        returned_logits = MappingProxyType({f"stage={n}": {"stage": n} for n in range(4)})

        def attend(self, query, key, value, masks, mode, **options):
            products = np.einsum("bhqd,bhkd->bhqk", query, key)
            stages = [products, products * query.dtype.type(query.shape[-1] ** -0.5)]

            def capped(logits):
                cap = masks.get("cap")
                return logits if cap is None else cap * np.tanh(logits / cap)

            def masked(logits):
                mask = masks.get("mask", 0)
                return logits + (0 if getattr(mask, "dtype", None) == np.bool_ else mask)

            for change in (masked, capped) if masked_first else (capped, masked):
                stages.append(change(stages[-1]).astype(query.dtype))
            given = {name: mask for name, mask in masks.items() if name != "cap"}
            context, weights = super().attend(query, key, value, given, **options)
            return context, stages[mode["stage"]] if "stage" in mode.options else weights

    found = values(Four(), "weights")
    both = ["after the cap, before a bias", "after the cap, with a bias"]
    if masked_first:
        both = ["with a bias, before the cap", "with a bias, after the cap"]
    assert [found[f"returned with stage={stage}"] for stage in range(4)] == [
        "products of query and key, before the scale",
        "logits, before the cap and a bias",
        *(f"logits {stage}" for stage in both),
    ]
    assert "returned with stage=0" not in values(Correct(), "weights")


@pytest.mark.parametrize(
    ("empty", "value"),
    [(np.zeros, "output bias only"), (lambda shape: np.full(shape, np.nan), "NaN")],
    ids=["zeros", "NaN"],
)
def test_no_key(empty, value):
    class Without(Correct):
        def attend(self, query, key, value, masks, **options):
            if not key.shape[2]:
                return empty(query.shape).astype(query.dtype)
            return super().attend(query, key, value, masks, **options)

    assert values(Without(), "degenerate-sizes")["no key"] == value


def test_one_key_gets_all_the_attention_or_it_is_something_else():
    class Sigmoid(Correct):
        def attend(self, query, key, value, masks, **options):
            logits = np.einsum("bhqd,bhkd->bhqk", query, key)
            weights = 1 / (1 + np.exp(-logits))
            return np.einsum("bhqk,bhkd->bhqd", weights, value).astype(query.dtype)

    assert values(Sigmoid(), "degenerate-sizes")["one key"] == "something else"


def test_layouts_of_a_layer():
    pytest.importorskip("torch")
    assert values(load("torch-mha"), "input-layouts") == {
        "input without a batch axis": "taken",
        "sequence-first input": "taken",
    }


def test_self_attention_may_take_what_other_inputs_may_not():
    pytest.importorskip("torch")

    class Particular(type(load("torch-mha"))):
        def call(self, layer, query, key, value, masks, mode):
            if query.ndim == 2 and query is not key:
                raise ValueError("queries of a batch only")
            return super().call(layer, query, key, value, masks, mode)

    assert values(Particular(), "input-layouts") == {
        "input without a batch axis": "refused",
        "input without a batch axis, shared inputs": "taken",
        "sequence-first input": "taken",
    }


def test_a_switch_that_does_nothing_is_seen():
    class Switched(Correct):
        modes = (Mode("batch-first"), Mode("sequence-first"))
        sequence_first = "sequence-first"

        def attend(self, query, key, value, masks, mode, **options):
            if mode.name == "sequence-first":
                key = np.roll(key, 1, axis=0)
            return super().attend(query, key, value, masks, **options)

    assert values(Switched(), "input-layouts") == {
        "input without a batch axis": "cannot be asked",
        "sequence-first input": "something else",
    }


# The same again

SAME = "same bits (batch 2, heads 4, query 144, key 145)"


@pytest.mark.parametrize(
    ("size", "twice"),
    [(0, SAME), (1.2e-7, "within noise"), (1e-2, "apart")],
    ids=["none", "rounding", "noise"],
)
def test_asked_twice(size, twice):
    class Restless(Correct):
        calls = 0

        def run(self, problem, call):
            self.calls += 1
            answer = super().run(problem, call)
            return Answer(answer.output * (1 + size * (self.calls % 2)), answer.weights, {})

    found = values(Restless(), "repeatability")
    assert found["asked twice"] == twice
    masks = {"mask contiguous and strided", "mask whole and cut out"}
    # With noise, no way to block a key is recognised.
    assert found.keys() & masks == (masks if size < 1e-3 else set())
    assert {name for name in found if "," not in name} - masks - {
        "two queries at a time and all at once",
    } == {
        "asked twice",
        "alone and inside a batch",
        "in batches of other sizes",
        "a single query in batches of other sizes",
        "at another place of the batch",
        "one query at a time and all at once",
        "several queries at a time and all at once",
        "contiguous and strided",
        "whole and cut out",
    }


def test_a_batch_that_leaks_is_told_apart():
    class Leaky(Correct):
        def attend(self, query, key, value, masks, **options):
            mixed = key + np.float32(0.1) * key.mean(axis=0)
            return super().attend(query, mixed, value, masks, **options)

    found = values(Leaky(), "repeatability")
    assert found["asked twice"] == SAME
    assert found["contiguous and strided"] != "apart" != found["whole and cut out"]
    assert found["alone and inside a batch"] == "apart"
    assert values(fake(), "repeatability")["alone and inside a batch"] != "apart"


@pytest.mark.parametrize(
    ("strides", "subject"), [("gaps", "contiguous and strided"), ("window", "whole and cut out")]
)
def test_what_lies_in_memory_may_matter(strides, subject):
    class Naive(Correct):
        def run(self, problem, call):
            answer = super().run(problem, call)
            off = 0.1 * (call.strided == strides)
            return Answer(answer.output + off, answer.weights, {})

    found = values(Naive(), "repeatability")
    assert found.pop(subject) == "apart"
    assert found.pop(f"mask {subject}") == "apart"
    assert "apart" not in found.values()
