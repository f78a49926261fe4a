"""A wrong answer gets its cause named, or none; and where it is wrong."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from mutants import miniatures
from mutants.__main__ import main
from mutants.causes import CAUSES, KINDS, name
from mutants.features import MUTANTS as FEATURES
from mutants.handed import MUTANTS as HANDED
from mutants.honest import (
    Divided,
    Honest,
    KeyByKey,
    MergedTiles,
    Online,
    ScaledQuery,
    cut_tf32,
    nearest_tf32,
    reading,
)
from mutants.run import Examiner
from mutants.zoo import SMALL

from conformance import (
    Alibi,
    Fixed,
    Geometry,
    MaskArgument,
    RotaryBase,
    attention_function,
    examine,
)
from conformance.adapter.base import Call
from conformance.adapter.loading import load
from conformance.cases.catalogue import catalogue, find_cases
from conformance.causes import location, stages
from conformance.causes.diagnose import diagnose, hypotheses
from conformance.causes.hypothesis import Evidence, Maker
from conformance.causes.precision import coarse
from conformance.causes.softmax import made_otherwise
from conformance.causes.stages import Stages
from conformance.definition.dtypes import BFLOAT16
from conformance.definition.expectation import expect, solve
from conformance.errors import ExitCode
from conformance.explore.drawing import Recipe
from conformance.records.findings import NOTHING, Phrase
from conformance.running.examine import failure
from conformance.running.session import Item, Session
from conformance.text import axes, element
from conformance.words import advice, say


def case(wanted):
    (found,) = find_cases(wanted)
    return found


def examined(adapter, wanted, dtype="float32"):
    adapter.name = adapter.name or type(adapter).__name__
    return Session().examine(Item(adapter, case(wanted), dtype, "cpu", adapter.modes[0]))


def finding(result, requirement="output.equals-definition"):
    return next(item for item in result.findings if item.requirement == requirement)


# Mistakes as people make them, in an attention that has nothing of the suite's own stages


class Attention(miniatures.Correct):
    """Right, in steps that the mistakes below change."""

    causal_flag = None
    mask_arguments = (
        MaskArgument("mask", "batch heads query key", true="attends"),
        MaskArgument("bias", "batch heads query key", number="added"),
    )

    def attend(self, query, key, value, masks, **options):
        group = query.shape[1] // key.shape[1]
        key, value = self.shared(key, group), self.shared(value, group)
        logits = query @ key.swapaxes(-1, -2) * query.dtype.type(self.scale(query, **options))
        if "bias" in masks:
            logits = logits + self.bias(masks["bias"])
        if "mask" in masks:
            logits = self.block(logits, masks["mask"])
        weights = self.softmax(logits).astype(query.dtype)
        return weights @ value, self.returned(weights)

    def shared(self, heads, group):
        return np.repeat(heads, group, axis=1)

    def scale(self, query, scale=None):
        return query.shape[-1] ** -0.5 if scale is None else scale

    def bias(self, bias):
        return bias

    def block(self, logits, mask):
        return np.where(mask, logits, -np.inf)

    def softmax(self, logits, axis=-1):
        powers = np.exp(logits - logits.max(axis=axis, keepdims=True))
        return powers / powers.sum(axis=axis, keepdims=True)

    def returned(self, weights):
        return weights


def wrong(**stages):
    return type("Wrong", (Attention,), stages)()


def test_a_mistake_of_the_output_is_no_other_one_of_the_gradients_where_it_hides():
    """Where the largest logit decides, the scale does not matter, and gradients nearly vanish.

    They are those of constant weights then, which is no mistake of the first function.
    """
    torch = pytest.importorskip("torch")

    def attention(query, key, value, mask, scale):
        logits = query @ key.mT * scale
        return torch.softmax(logits.masked_fill(~mask, -torch.inf), dim=-1) @ value

    @attention_function("torch", MaskArgument("mask", "batch heads query key", true="attends"))
    def without_scale(query, key, value, mask):
        return attention(query, key, value, mask, 1.0)

    @attention_function("torch", MaskArgument("mask", "batch heads query key", true="attends"))
    def detached(query, key, value, mask):
        return attention(query.detach(), key.detach(), value, mask, query.shape[-1] ** -0.5)

    for own, cause in ((without_scale, ""), (detached, "backward.softmax-detached")):
        found = examined(own, "logits/large-with-mask/cross", "bfloat16")
        wrong = finding(found, "gradient.inputs-equal-definition")
        assert (wrong.verdict, wrong.cause.id) == ("deviates", cause)


class OtherProblem(Attention):
    """Answers something else than it was asked."""

    def __init__(self, change):
        self._change = change

    def run(self, problem, call):
        return super().run(self._change(problem), call)


def swapped(problem):
    own = problem.weights
    biases = {"query_bias": own.key_bias, "key_bias": own.query_bias}
    return problem.with_weights(query=own.key, key=own.query, **biases)


def interleaved(problem):
    def mix(weight):
        *width, heads, size = weight.shape
        return weight.reshape(*width, size, heads).swapaxes(-1, -2)

    names = [f"{name}{end}" for name in ("query", "key", "value") for end in ("", "_bias")]
    return problem.with_weights(**{n: mix(getattr(problem.weights, n)) for n in names})


def causal(offset, top_left=False):
    def change(problem):
        shape = problem.shape
        first = 0 if top_left else shape.key_length - shape.query_length
        triangle = np.tri(shape.query_length, shape.key_length, first + offset, dtype=np.bool_)
        return problem.replace(mask=np.broadcast_to(triangle, shape.logits), causal=None)

    return change


def without_output_bias(problem):
    return problem.with_weights(output_bias=0 * problem.weights.output_bias)


class Causal(OtherProblem):
    """With a flag, so that causal cases are asked."""

    causal_flag = miniatures.CausalFlag("is_causal", alignment="bottom-right")


def stale(self, logits):
    """An online softmax over tiles of 4 keys that forgets to rescale its normaliser."""
    peak, total, context = -np.inf, 0.0, np.zeros_like(logits)
    for start in range(0, logits.shape[-1], 4):
        tile = logits[..., start : start + 4]
        grown = np.maximum(peak, tile.max(axis=-1, keepdims=True))
        context *= np.exp(peak - grown)
        context[..., start : start + 4] = np.exp(tile - grown)
        total = total + context[..., start : start + 4].sum(axis=-1, keepdims=True)
        peak = grown
    return context / total


COMMON = {
    "mask inverted": (
        lambda: wrong(block=lambda self, x, mask: np.where(mask, -np.inf, x)),
        "mask/shared/cross",
        "with the mask inverted",
    ),
    "mask ignored": (
        lambda: wrong(block=lambda self, x, mask: x),
        "mask/shared/cross",
        "with the mask ignored",
    ),
    "mask multiplied": (
        lambda: wrong(block=lambda self, x, mask: x * mask),
        "mask/shared/cross",
        "with blocked logits set to 0",
    ),
    "mask finite": (
        lambda: wrong(block=lambda self, x, mask: np.where(mask, x, np.float32(-10))),
        "mask/shared/cross",
        "with blocked logits set to -10",
    ),
    "scale missing": (
        lambda: wrong(scale=lambda self, query: 1.0),
        "plain/no-mask/cross",
        "without the scale",
    ),
    "scale 1/d": (
        lambda: wrong(scale=lambda self, query: 1 / query.shape[-1]),
        "plain/no-mask/cross",
        "with scale 1/d instead of 1/sqrt(d)",
    ),
    "scale a little off": (
        lambda: wrong(scale=lambda self, query: 1.02 * query.shape[-1] ** -0.5),
        "plain/no-mask/cross",
        "the scale is 1.02 times what it should be",
    ),
    "causal off by one": (
        lambda: Causal(causal(1)),
        "causal/square/self",
        "with the causal mask off by one (+1)",
    ),
    "causal aligned wrongly": (
        lambda: Causal(causal(0, top_left=True)),
        "causal/bottom-right/cross",
        "with the causal mask aligned top-left",
    ),
    "bias forgotten": (
        lambda: wrong(bias=lambda self, bias: 0 * bias),
        "bias/in-full/cross",
        "with the additive bias ignored",
    ),
    "output bias forgotten": (
        lambda: OtherProblem(without_output_bias),
        "plain/no-mask/cross",
        "with the output bias forgotten",
    ),
    "heads interleaved": (
        lambda: OtherProblem(interleaved),
        "plain/no-mask/self",
        "with heads interleaved: (head heads) in place of (heads head)",
    ),
    "query and key swapped": (
        lambda: OtherProblem(swapped),
        "plain/no-mask/self",
        "with query and key weights swapped",
    ),
    "softmax over queries": (
        lambda: wrong(softmax=lambda self, x: Attention.softmax(self, x, axis=-2)),
        "plain/no-mask/self",
        "with the softmax over the queries",
    ),
    "groups tiled": (
        lambda: wrong(shared=lambda self, heads, group: np.tile(heads, (1, group, 1, 1))),
        "plain/no-mask/gqa",
        "with key/value heads tiled instead of repeated",
    ),
    "padding on the wrong axis": (
        lambda: wrong(block=lambda self, x, mask: np.where(mask.swapaxes(-1, -2), x, -9e9)),
        "mask/key-padding/self",
        "with the padding applied to queries instead of keys",
    ),
    "mask in the first head only": (
        lambda: wrong(
            block=lambda self, x, mask: np.where(
                mask | (np.arange(x.shape[1]) > 0)[:, None, None], x, -np.inf
            )
        ),
        "mask/per-batch/self",
        "with the mask ignored, in heads 1 and later only",
    ),
    "mask in the first head only, among many keys": (
        lambda: wrong(
            block=lambda self, x, mask: np.where(
                mask | (np.arange(x.shape[1]) > 0)[:, None, None], x, -np.inf
            )
        ),
        "causal/top-left/cross.d64t64x64",
        "with the causal flag ignored, in head 1 (the last) only",
    ),
    "normaliser not rescaled": (
        lambda: wrong(softmax=stale),
        "plain/no-mask/long",
        "with the normaliser not rescaled when the running maximum grows (tiles of 4 keys)",
    ),
    "rounded on the way": (
        lambda: wrong(
            softmax=lambda self, x: BFLOAT16.round(Attention.softmax(self, x)).astype(x.dtype)
        ),
        "plain/no-mask/cross",
        "with the attention weights rounded to bfloat16",
    ),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", COMMON)
def test_the_message_names_a_common_mistake(mistake):
    make, wanted, told = COMMON[mistake]
    result = examined(make(), wanted)
    first, *_ = failure(result, "mine.py:attention").splitlines()
    assert told in say(finding(result).cause)
    assert told in first


def test_a_scale_of_less_precision_is_named():
    """As libraries do that keep it as a number of float32."""
    adapter = wrong(scale=lambda self, query: np.float32(query.shape[-1]) ** np.float32(-0.5))
    result = examined(adapter, "plain/no-mask/self", "float64")
    for requirement in ("output.equals-definition", "weights.equal-definition"):
        cause = finding(result, requirement).cause
        assert cause == Phrase("scale.rounded", {"to": "float32"})
        assert say(cause) == "equals the answer with the scale rounded to float32"


def test_averaged_weights_are_named():
    adapter = wrong(
        returned=lambda self, w: np.broadcast_to(w.mean(axis=1, keepdims=True), w.shape)
    )
    found = finding(examined(adapter, "plain/no-mask/cross"), "weights.equal-definition")
    assert found.cause == Phrase("returned.averaged-and-repeated")
    assert say(found.cause) == (
        "the returned weights are the average over heads, repeated for each head"
    )


def test_a_parameter_without_a_gradient_is_told_as_one():
    torch = pytest.importorskip("torch")
    example = Path(__file__).parents[1] / "docs/examples/torch_module.py"
    module = load(f"{example}:CrossAttention")

    class Detached(type(module)):
        def build(self, *given):
            built = super().build(*given)
            own = built.query
            own.forward = lambda x: torch.nn.functional.linear(x, own.weight, own.bias.detach())
            return built

    result = examined(Detached(), "mask/key-padding/cross")
    assert {found.verdict for found in result.findings} <= {"conforms", "deviates", "observed"}
    found = finding(result, "gradient.parameters-equal-definition")
    assert found.cause == Phrase(
        "gradient.not-returned", {"arrays": [Phrase("array.weights.query_bias")]}
    )
    assert say(found.cause) == (
        "no gradient of the query bias comes back: it is detached from the output, or not used"
    )


def test_a_feature_without_a_gradient_is_told_as_one():
    ours = type(load("ours"))

    class Detached(ours):
        def run(self, problem, call):
            answer = super().run(problem, call)
            given = {name: array for name, array in answer.gradients.items() if name != "sinks"}
            return dataclasses.replace(answer, gradients=given)

    result = examined(Detached(), "feature/soft-cap-with-sinks/self")
    found = finding(result, "gradient.features-equal-definition")
    assert found.verdict == "deviates"
    assert found.cause == Phrase("gradient.not-returned", {"arrays": [Phrase("array.sinks")]})


def test_a_right_one_has_no_cause():
    result = examined(Attention(), "mask/per-head/cross")
    assert not [item for item in result.findings if item.cause or item.where]


# What is not named


@pytest.mark.parametrize(
    "damage",
    [
        lambda output: np.where(np.arange(output.shape[1])[:, None] == 2, np.nan, output),
        lambda output: np.where(np.arange(output.shape[1])[:, None] == 2, output + 1e-4, output),
        lambda output: output + 1e-3 * np.cos(np.arange(output.size)).reshape(output.shape),
        lambda output: output[:, :, ::-1],
        lambda output: np.full_like(output, np.nan),
    ],
    ids=["nan in a row", "one row", "a smooth error", "shuffled", "nan"],
)
def test_what_nothing_explains_is_not_named(damage):
    class Damaged(Attention):
        def run(self, problem, call):
            answer = super().run(problem, call)
            object.__setattr__(answer, "output", damage(answer.output))
            return answer

    found = finding(examined(Damaged(), "plain/no-mask/cross"))
    assert found.verdict == "deviates"
    assert found.cause == NOTHING


@pytest.mark.parametrize(("first", "later"), [(1.0, np.nan), (np.nan, 1.0)])
def test_an_answer_that_is_nan_only_now_and_then_changes(first, later):
    class Uninitialised(Attention):
        calls = 0

        def run(self, problem, call):
            answer = super().run(problem, call)
            answer.output[0, 0] = later if self.calls else first
            self.calls += 1
            return answer

    assert finding(examined(Uninitialised(), "plain/no-mask/cross")).cause.id == "state.changes"


def test_rounding_is_told_from_a_small_mistake_by_a_problem_next_to_it():
    problem = case("plain/no-mask/cross").problem("float32")
    expectation = expect(problem)
    want, noise = expectation.arrays["output"], expectation.sigma["output"]
    random = np.random.default_rng(0)

    def told(error, beside):
        evidence = Evidence(want + error, want, noise, expectation.underflow)
        return coarse("output", evidence, "float32", lambda bits: {"output": beside})

    size = 2.0**13 * noise
    one, other = (size * random.standard_normal(want.shape) for _ in range(2))
    assert "only as accurate as TF32 or float16" in say(told(one, other))
    assert told(one, 1.01 * one) == NOTHING
    in_one_row = np.where(np.arange(want.shape[1])[:, None] == 1, one, 0)
    assert told(in_one_row, other) == NOTHING
    assert told(np.where(one > 2 * size, np.nan, one), other) == NOTHING


def inside(kind, rounding):
    """An attention whose projections are the suite's, in float32, and whose products are not."""

    class Kernel(Attention):
        def attend(self, query, key, value, masks, **options):
            scaled = query * query.dtype.type(self.scale(query, **options) * kind)
            logits = rounding(scaled) @ rounding(key).swapaxes(-1, -2) / query.dtype.type(kind)
            powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
            return rounding(powers) @ rounding(value) / powers.sum(axis=-1, keepdims=True)

    return Kernel()


@pytest.mark.sample(4)
@pytest.mark.parametrize(("how", "rounding"), [("rounded", nearest_tf32), ("cut", cut_tf32)])
@pytest.mark.parametrize("wanted", ["plain/no-mask/cross", "plain/no-mask/long"])
@pytest.mark.parametrize("algorithm", [Divided, Online, ScaledQuery], ids=lambda one: one.__name__)
def test_products_in_tf32_are_told(algorithm, wanted, how, rounding):
    """However they are rounded, and whatever is multiplied into the operands before."""
    found = examined(Honest(reading(algorithm, rounding)), wanted)
    about = {"how": Phrase(f"tf32.{how}"), "where": Phrase("tf32.products")}
    assert finding(found).verdict == "deviates"
    assert finding(found).cause == Phrase("precision.tf32", about)
    for framework in ("torch", "JAX", "Triton"):
        assert framework in advice(finding(found).cause)
    declared = examined(Honest(reading(algorithm, rounding), {"float32": "TF32"}), wanted)
    assert {one.verdict for one in declared.findings} == {"conforms"}
    assert finding(declared).figures.accuracy == "TF32"


@pytest.mark.parametrize(("how", "rounding"), [("rounded", nearest_tf32), ("cut", cut_tf32)])
@pytest.mark.parametrize("factor", [1.0, 1.4427])
def test_products_in_tf32_inside_a_kernel_are_told(factor, how, rounding):
    about = {"how": Phrase(f"tf32.{how}"), "where": Phrase("tf32.attention")}
    found = finding(examined(inside(factor, rounding), "plain/no-mask/cross"))
    assert found.cause == Phrase("precision.tf32", about)


@pytest.mark.night
def test_an_output_that_is_normalised_at_every_key_is_told():
    """Its errors are those of one factor for each row, which a wrong factor for all rows is not."""

    class Larger(MergedTiles):
        def fused(self, logits, v):
            context, log_total = super().fused(logits, v)
            return context * self.wide(1 + 2e-6), log_total

    wanted = "logits/low/separate.d64t64x64"
    found = finding(examined(Honest(KeyByKey), wanted))
    assert found.cause == Phrase("precision.normalised-at-every-key")
    assert "once, after the last key" in advice(found.cause)
    assert finding(examined(Honest(MergedTiles), wanted)).verdict == "conforms"
    assert finding(examined(Honest(Larger), wanted)).verdict == "deviates"
    assert finding(examined(Honest(Larger), wanted)).cause.id != found.cause.id


def test_a_small_mistake_is_not_told_to_be_tf32():
    class Scaled(Divided):
        def scaled(self, scores):
            return super().scaled(scores) * self.wide(1.001)

    assert finding(examined(Honest(Scaled), "logits/large/cross")).cause.id == "scale.factor"


def in_float32(self, logits, axis=-1):
    return Attention.softmax(self, logits.astype(np.float32), axis).astype(np.float64)


NARROW = [
    "plain/no-mask/self",  # products in float64: the error is a part of that of float32
    "causal/square/self",  # the first query has no error: its weight is 1
    "mask/one-allowed-key/self",
    "bias/far-below-zero/cross",  # rounded alike if inputs change by one part in 2^23
]


@pytest.mark.parametrize("wanted", NARROW)
def test_a_softmax_in_float32_is_told_in_every_case(wanted):
    found = finding(examined(wrong(softmax=in_float32), wanted, "float64"))
    assert found.cause == Phrase("accuracy.float32")


@pytest.mark.parametrize("wanted", NARROW)
def test_jax_in_float64_is_told_to_be_as_accurate_as_float32(wanted):
    pytest.importorskip("jax")
    found = finding(examined(load("jax-sdpa"), wanted, "float64"))
    assert found.cause == Phrase("accuracy.float32")


@pytest.mark.parametrize("size", [5, 6, 7])
def test_a_scale_of_one_over_a_rounded_root_is_told(size):
    def scale(self, query, scale=None):
        return 1 / np.sqrt(np.float32(query.shape[-1])) if scale is None else scale

    problem = Recipe(query=5, key=5, size=size).problem("float64")
    assert problem.shape.head_size == size
    adapter = wrong(scale=scale)

    def ask(other):
        return adapter.run(other, Call(adapter.modes[0]))

    found = diagnose(problem, expect(problem), ask(problem), ask)
    assert found.output == Phrase("scale.rounded", {"to": "float32"})


# Where it is wrong


@pytest.mark.parametrize(
    ("array", "wrong", "told"),
    [
        ("output", np.s_[1:], "batch entries 1 and later"),
        ("output", np.s_[:, 128:], "queries 128 and later"),
        ("output", np.s_[:, -1], "query 129 (the last)"),
        ("output", np.s_[1, :5], "batch entry 1, queries 0 to 4"),
        ("output", np.s_[:, 3:60:20], "queries 3, 23 and 43"),
        ("output", np.s_[:, ::2], ""),
        ("output", np.s_[:], ""),
        ("gradient.key", np.s_[:, 64:], "keys 64 and later"),
    ],
)
def test_a_region_is_told_by_its_axes(array, wrong, told):
    where = np.zeros((3, 130, 4), dtype=np.bool_)
    where[wrong] = True
    assert say(location.located(array, where)) == told


def test_a_finding_says_where_it_deviates():
    class Batched(Attention):
        def attend(self, query, key, value, masks, **options):
            context, weights = super().attend(query, key, value, masks, **options)
            late = (np.arange(len(context)) > 0)[:, None, None, None]
            return np.where(late, np.cos(context), context), weights

    result = examined(Batched(), "plain/no-mask/cross")
    assert say(finding(result).where) == "batch entries 1 and later"
    assert "  deviates only in: batch entries 1 and later" in failure(result, "x").splitlines()


def test_rows_in_which_a_key_is_blocked():
    problem = case("mask/shared/cross").problem("float32")
    mask = np.ones(problem.shape.logits, dtype=np.bool_)
    mask[1, :, (0, 2), 3] = False
    changed = problem.replace(mask=mask)
    wrong = np.zeros(problem.shape.logits[::2], dtype=np.bool_)
    wrong[1, [0, 2]] = True
    assert say(location.rows(changed, wrong)) == "all rows in which a key is blocked, and no other"
    wrong[1, 1] = True
    assert location.rows(changed, wrong) == NOTHING


def test_elements_are_named_by_their_axes():
    assert element("output", (2, 1, 4)) == "output[batch 2, query 1, component 4]"
    told = element("gradient.weights.output", (0, 3, 7))
    assert told == "gradient.weights.output[head 0, component 3, out 7]"
    assert element("row sums", (0, 1, 2)) == "row sums[batch 0, head 1, query 2]"
    assert element("something", (1,)) == "something[1]"


@pytest.mark.parametrize("family", ["self", "gqa", "additive"])
def test_every_array_of_an_answer_has_named_axes(family):
    problem = case(f"bias/in-full/{family}").problem("float32")
    for array, values in solve(problem).arrays().items():
        names = axes(array, values.ndim)
        assert len(names) == values.ndim, array


# The definition in stages is the definition


@pytest.mark.parametrize("wanted", [it.id for it in catalogue() if it.family != "longer"][::4])
def test_stages_without_a_change_are_the_reference(wanted):
    problem = case(wanted).problem("float64")
    right, want = Stages(problem), solve(problem)
    told = ~np.isnan(right.output)
    assert told.any()
    np.testing.assert_allclose(right.output[told], want.output[told], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(right.weights, want.weights, rtol=1e-9, atol=1e-14)
    assert right.gradients.keys() == want.gradients.keys()
    for array, gradient in right.gradients.items():
        np.testing.assert_allclose(gradient, want.gradients[array], rtol=1e-7, atol=1e-10)


def test_a_hypothesis_that_changes_nothing_explains_nothing():
    problem = case("mask/shared/cross").problem("float32")
    expectation = expect(problem)
    want = expectation.arrays["output"]
    inverted = Maker(problem).masked("", ~problem.allowed).make().output
    evidence = Evidence(inverted, want, expectation.sigma["output"], expectation.underflow)
    assert evidence.explained(inverted)
    assert not evidence.explained(want)
    assert not Evidence(want, want, evidence.noise, evidence.underflow).explained(want)
    nearly = np.where(np.arange(want.shape[1])[:, None] == 0, inverted + 1e-3, inverted)
    assert not evidence.explained(nearly)


SHARED = (
    "feature/rotary-partial-halves/self",
    "feature/norm/self",
    "feature/key-lengths-with-rotary/gqa",
    "mask/per-batch/gqa",
)


@pytest.mark.parametrize("wanted", SHARED)
def test_what_hypotheses_share_changes_no_prediction(wanted, monkeypatch):
    def predicted(problem):
        with np.errstate(all="ignore"):
            return [(one.cause, one.make().output) for one in hypotheses(Maker(problem))]

    problem = case(wanted).problem("float64")
    found = predicted(problem)
    monkeypatch.setattr(Maker, "share", lambda maker, found, *more: None)
    monkeypatch.setattr(Maker, "_share_heads", lambda maker, found: None)
    monkeypatch.setattr(Maker, "_share_before", lambda maker, found, changed: None)
    apart = predicted(problem)
    assert len(found) > 100
    for (cause, one), (_, other) in zip(found, apart, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14, err_msg=say(cause))


def test_keys_are_rotated_once_for_hypotheses_that_rotate_them_alike(monkeypatch):
    problem = case("feature/rotary-causal/separate").problem("float64")
    turn, lengths = stages.cosine_and_sine, []
    monkeypatch.setattr(
        stages, "cosine_and_sine", lambda angles: lengths.append(angles.shape[2]) or turn(angles)
    )
    with np.errstate(all="ignore"):
        made = [one.make().output for one in hypotheses(Maker(problem))]
    assert lengths.count(problem.shape.key_length) < len(made) / 4


def test_what_is_made_otherwise_is_said_of_an_output():
    """`returned.made-otherwise` ends with "an output made of them …"."""
    for wanted in (*SHARED, "feature/window-causal/gqa", "feature/soft-cap/self"):
        with np.errstate(all="ignore"):
            causes = {cause for cause, _ in made_otherwise(Maker(case(wanted).problem("float64")))}
        assert len(causes) > 20
        assert all(say(cause).startswith("equals the answer") for cause in causes)


# The hit rate


def test_expected_causes_are_of_mutants_that_exist():
    assert CAUSES.keys() <= {mutant.name for mutant in (*SMALL, *FEATURES, *HANDED)}


@pytest.mark.night
@pytest.mark.parametrize("part", range(2))
def test_mutants_are_named_rightly_or_not_at_all(part):
    """A sample: `python -m mutants --causes` counts them all."""
    examiner = Examiner()
    named = [name(examiner, mutant) for mutant in (*SMALL[part::12], *FEATURES[part::24])]
    assert not [(one.mutant.name, one.cause) for one in named if one.kind == "named wrongly"]
    kinds = [one.kind for one in named]
    assert kinds.count("named") >= 0.8 * (len(kinds) - kinds.count("none to name"))


def test_the_command_counts_them(capsys):
    arguments = ["--causes", "--mutant", "scale-missing", "--mutant", "exp-by-cubic"]
    assert main(arguments) == ExitCode.OK
    printed = capsys.readouterr().out
    assert printed.split("\n")[0].split() == " ".join(KINDS).split()
    assert re.search(r"^all +1 +0 +1 +0$", printed, re.MULTILINE)
    assert "named: scale-missing: equals the answer without the scale" in printed
    assert "not named: exp-by-cubic: " in printed


def test_a_wrong_name_fails_the_command(monkeypatch):
    monkeypatch.setitem(CAUSES, "scale-missing", Phrase("something.else"))
    arguments = ["--causes", "--mutant", "scale-missing"]
    assert main(arguments) == ExitCode.DEVIATES


NAMED = (
    "output-written-sequence-first",
    "window-each-side-of-whole-width",
    "window-at-end-only-in-backward",
    "window-not-in-returned-weights",
    "alibi-slopes-in-bfloat16",
    "rotary-base-rounded",
    "rotary-second-sign",
    "logits-in-bfloat16-storage",
    "biased-logits-in-bfloat16-storage",
    "cache-in-float16",
    "causal-rows-before-the-first-key-are-nan-again",
)


@pytest.mark.sample(3)
@pytest.mark.parametrize("mutant", NAMED)
def test_a_mistake_that_once_had_no_cause_is_named(mutant):
    found = name(Examiner(), next(it for it in (*SMALL, *FEATURES) if it.name == mutant))
    assert found.kind == "named", say(found.cause)


# Mistakes of whole programs, whose backward pass is torch's


def of_torch(change, *, backward=False, features=(), **declared):
    """A function with a change, or with the right output and the gradients of the change."""
    torch = pytest.importorskip("torch")

    def turned(x, size, partner, sign):
        at = torch.arange(size // 2)
        angle = torch.arange(x.shape[2])[:, None] * 50.0 ** (-2.0 * at / size)
        cos, sin, other = angle.cos().to(x.dtype), sign * angle.sin().to(x.dtype), at + partner
        y = x.clone()
        y[..., at] = x[..., at] * cos - x[..., other] * sin
        y[..., other] = x[..., at] * sin + x[..., other] * cos
        return y

    def computed(query, key, value, size, slopes, **change):
        if size:
            partner = query.shape[-1] // 2 if "whole" in change else size // 2
            sign = -1 if "turned_back" in change else 1
            query, key = (turned(x, size, partner, sign) for x in (query, key))
            if "detached" in change:
                query, key = (
                    torch.cat([x[..., :size], x[..., size:].detach()], -1) for x in (query, key)
                )
        scale = query.shape[1 if "by_heads" in change else -1] ** -0.5
        logits = query @ key.mT * scale
        if slopes is not None:
            scaled = slopes * (scale if "scaled_slopes" in change else 1.0)
            at = torch.arange(max(logits.shape[-2:]))
            far = (at[: logits.shape[-1]] - at[: logits.shape[-2], None]).abs()
            logits = logits - scaled[:, None, None] * far
        if "causal" in change:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        if "base_2" in change:
            half = -(-logits.shape[-1] // 2)
            parts = logits.split(half, -1)
            sums = torch.stack([part.logsumexp(-1, keepdim=True) for part in parts])
            shares = torch.exp2(sums - sums.amax(0))
            of = [part.softmax(-1) for part in parts]
            shares = shares / shares.sum(0)
            logits = torch.cat([w * s for w, s in zip(of, shares, strict=True)], -1)
            return logits @ value
        return logits.softmax(-1) @ value

    def attend(query, key, value, base=None, size=None, slopes=None):
        right = computed(query, key, value, size, slopes)
        wrong = computed(query, key, value, size, slopes, **{change: True})
        return wrong + (right - wrong).detach() if backward else wrong

    return attention_function("torch", features=features, **declared)(attend)


ROTARY = {"features": (RotaryBase("base", "size"),)}
WHOLE = {
    "causal.unasked": ("plain/no-mask/cross", "causal", {}),
    "backward.weights-causal-unasked": ("plain/no-mask/cross", "causal", {"backward": True}),
    "scale.by-number-of-heads": ("plain/no-mask/cross", "by_heads", {}),
    "tiles.merged-in-base-2": ("plain/no-mask/long", "base_2", {}),
    # With one head, this is the slope made for the first of two; with equal lengths, this is a
    # rotation by positions from the end. The likelier mistake is named.
    "alibi.scaled": (
        "feature/alibi-far/longer",
        "scaled_slopes",
        {"features": (Alibi("slopes", alignment="bottom-right"),)},
    ),
    "rotary.turned-back": ("feature/rotary/self", "turned_back", ROTARY),
    "rotary.partners-in-whole-head": ("feature/rotary-partial-halves/self", "whole", ROTARY),
    "backward.rotary-rest-dropped": (
        "feature/rotary-partial-halves/self",
        "detached",
        {"backward": True, **ROTARY},
    ),
}


@pytest.mark.parametrize("cause", WHOLE)
def test_a_mistake_of_a_whole_program_is_named(cause):
    name, change, declared = WHOLE[cause]
    outcome = examine(of_torch(change, **declared), cases=name, dtypes="float32")
    found = [one for result in outcome.results for one in result.findings]
    of = [one for one in found if one.requirement.startswith(("output.", "gradient."))]
    assert {one.cause.id for one in of if one.verdict == "deviates"} == {cause}


@pytest.mark.parametrize(
    "name", ["logits/repeated-maxima/cross", "plain/no-mask/cross.d128t128x128"]
)
def test_a_softmax_that_leaves_the_range_of_float16_is_named(name):
    pytest.importorskip("torch")

    def attend(query, key, value):
        powers = (query @ key.mT * query.shape[-1] ** -0.5).exp()
        return powers / powers.sum(-1, keepdim=True) @ value

    sizes = Geometry(head_sizes=(128,), tiles=(128, 128)) if "." in name else None
    one_shot = attention_function("torch", geometry=sizes)(attend)
    outcome = examine(one_shot, cases=name, dtypes="float16")
    found = [one for result in outcome.results for one in result.findings]
    of = [one for one in found if one.requirement.startswith(("output.", "gradient."))]
    causes = {one.cause.id for one in of if one.verdict == "deviates"}
    assert causes == {"softmax.maximum-not-subtracted"}


def test_a_number_that_others_replace_is_told_as_one_of_several():
    """In `logits/low`, one entry hides what the number is, and the other shows that it is small."""
    torch = pytest.importorskip("torch")

    def attend(query, key, value):
        future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1)
        logits = query @ key.mT * query.shape[-1] ** -0.5
        return logits.masked_fill(future, -30.0).softmax(-1) @ value

    fixed = Fixed(causal="bottom-right", sharing="self", bias=False)
    always = attention_function("torch", fixed=fixed)(attend)
    outcome = examine(always, cases="logits/low/*", dtypes="float32")
    (cause,) = (
        one.cause
        for result in outcome.results
        for one in result.findings
        if one.requirement == "output.equals-definition" and one.verdict == "deviates"
    )
    assert cause.id == "mask.blocked-set"
    assert cause.arguments["others"] >= 1


@pytest.mark.parametrize("number", [-23.0, -30.0, -50.0])
def test_a_finite_number_is_named_that_only_gradients_of_blocked_keys_show(number):
    pytest.importorskip("torch")

    def attend(query, key, value, mask=None):
        logits = query @ key.mT * query.shape[-1] ** -0.5
        logits = logits if mask is None else logits.masked_fill(~mask, number)
        return logits.softmax(-1) @ value

    mask = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)
    finite = attention_function("torch", mask)(attend)
    outcome = examine(finite, cases="mask/key-padding/cross", dtypes="float32")
    found = [one for result in outcome.results for one in result.findings]
    causes = {one.cause for one in found if one.verdict == "deviates" and one.cause}
    assert causes == {Phrase("mask.blocked-set", {"number": number})}


def test_an_error_of_the_search_costs_the_cause_and_not_the_verdict(monkeypatch):
    def failing(maker):
        raise KeyError("query_bias")

    class Softer(Attention):
        def scale(self, query, **options):
            return 0.9 * super().scale(query, **options)

    monkeypatch.setattr("conformance.causes.diagnose.hypotheses", failing)
    result = examined(Softer(), "plain/no-mask/cross")
    found = [finding for finding in result.findings if finding.verdict == "deviates"]
    assert found
    assert all(finding.cause.id == "search.failed" for finding in found)
    assert say(found[0].cause).startswith("unknown, because the search for it failed: KeyError at")
