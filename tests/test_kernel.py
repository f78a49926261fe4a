"""Who made a deviation of a function: it itself, or the projections that the suite supplies."""

from __future__ import annotations

import numpy as np
import pytest
from looped import for_each
from mutants import miniatures

from conformance import Call, Function, MaskArgument, attention_function
from conformance.cases.catalogue import catalogue, find_cases
from conformance.causes.stages import Stages
from conformance.definition.attention import heads_alone
from conformance.definition.expectation import solve
from conformance.running.session import Item, Session

MASK = MaskArgument("mask", "batch heads query key", true="attends", broadcasts=True)


def examined(adapter, wanted, dtype="float32"):
    adapter.name = adapter.name or "examined"
    (case,) = find_cases(wanted)
    result = Session().examine(Item(adapter, case, dtype, "cpu", adapter.modes[0]))
    return {finding.requirement: finding for finding in result.findings}


class Coarse:
    """A bridge whose products are those of float16."""

    def __init__(self, bridge):
        self.bridge = bridge

    def __getattr__(self, name):
        return getattr(self.bridge, name)

    def einsum(self, axes, *operands):
        rounded = [array.astype(np.float16).astype(array.dtype) for array in operands]
        return self.bridge.einsum(axes, *rounded)


class Projected(miniatures.Correct):
    @property
    def bridge(self):
        return Coarse(super().bridge)


class Scaled(miniatures.Correct):
    def attend(self, query, key, value, masks, **options):
        context, weights = super().attend(1.01 * query, key, value, masks, **options)
        return context.astype(query.dtype), weights.astype(query.dtype)


@pytest.mark.parametrize(
    "case", ["mask/key-padding/cross", "plain/no-mask/gqa", "bias/per-head/self"]
)
def test_it_is_told_who_made_it(case):
    output = "output.equals-definition"
    assert examined(Projected(), case)[output].made_by == "projections"
    assert examined(Scaled(), case)[output].made_by == "kernel"
    right = examined(miniatures.Correct(), case)[output]
    assert (right.verdict, right.made_by) == ("conforms", "")


class WrongAtFirst(miniatures.Correct):
    calls = 0

    def attend(self, query, key, value, masks, **options):
        self.calls += 1
        context, weights = super().attend(query, key, value, masks, **options)
        return context * query.dtype.type(1.5 if self.calls == 1 else 1.0), weights


def wrong_within_a_graph(query, key, value, mask=None):
    import torch

    scale = 1.0 if query.is_leaf else 1.5
    return torch.nn.functional.scaled_dot_product_attention(scale * query, key, value, mask)


@pytest.mark.parametrize(
    "make",
    [WrongAtFirst, lambda: attention_function("torch", MASK)(wrong_within_a_graph)],
    ids=["state", "graph"],
)
def test_projections_that_are_right_are_not_named(make):
    found = examined(make(), "plain/no-mask/cross")["output.equals-definition"]
    assert (found.verdict, found.made_by) == ("deviates", "")


def test_a_finding_about_another_call_has_no_maker():
    import torch

    def fast(query, key, value, mask=None):
        scale = 1.0 if query.requires_grad == key.requires_grad else 1.5
        return torch.nn.functional.scaled_dot_product_attention(scale * query, key, value, mask)

    adapter = attention_function("torch", MASK)(fast)
    found = examined(adapter, "mask/key-padding/separate")
    frozen = found["gradient.does-not-depend-on-what-is-frozen"]
    assert (frozen.verdict, frozen.made_by) == ("deviates", "")


def test_returned_weights_have_a_maker_too():
    found = examined(Scaled(), "plain/no-mask/cross")["weights.equal-definition"]
    assert found.made_by == "kernel"


def _attention(torch, key_of):
    @attention_function("torch", MASK, layout="batch length heads head", grouped=True)
    def attend(query, key, value, mask=None):
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, key_of(key), value, mask, enable_gqa=True
        ).transpose(1, 2)

    return attend


def test_gradients_have_a_maker():
    import torch

    findings = examined(_attention(torch, lambda key: key.detach()), "mask/key-padding/cross")
    assert findings["output.equals-definition"].verdict == "conforms"
    for name in ("gradient.inputs-equal-definition", "gradient.parameters-equal-definition"):
        assert (findings[name].verdict, findings[name].made_by) == ("deviates", "kernel")


@pytest.mark.night
@for_each(case=catalogue())
def test_the_kernel_alone_is_the_kernel_of_the_whole(case):
    problem = case.problem("float64")
    stages = Stages(problem)
    own = heads_alone(problem)
    found = solve(own)
    whole = solve(problem)
    empty = ~problem.allowed_in_full().any(axis=-1)
    heads = found.output.reshape(*found.output.shape[:2], problem.shape.heads, -1)
    for head in range(problem.shape.heads):
        seen = ~empty[:, head]
        want = stages.context[:, head][seen]
        assert np.allclose(heads[:, :, head][seen], want, rtol=1e-9, atol=1e-12)
    assert np.allclose(found.weights, whole.weights, rtol=1e-9, atol=1e-300)
    if problem.attn_bias is not None:
        one, other = found.gradients["attn_bias"], whole.gradients["attn_bias"]
        assert np.allclose(one, other, rtol=1e-6, atol=1e-9 * np.abs(other).max())


def test_the_function_is_called_without_projections():
    (case,) = find_cases("plain/no-mask/gqa")
    problem = heads_alone(case.problem("float64"))
    seen = {}

    class Watching(miniatures.Correct):
        def attend(self, query, key, value, masks, **options):
            seen.update(query=query, key=key, value=value)
            return super().attend(query, key, value, masks, **options)

    answer = Watching().run(problem, Call(projected=True))
    assert seen["query"].shape == (
        problem.shape.batch,
        problem.shape.heads,
        problem.shape.query_length,
        problem.shape.head_size,
    )
    head = problem.query[..., : problem.shape.head_size]
    assert np.array_equal(seen["query"][:, 0], head)
    want = solve(problem)
    assert np.allclose(answer.output, want.output, rtol=1e-12, atol=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax", "tensorflow"])
def test_what_comes_back_in_another_dtype_is_projected_and_shows(framework):
    pytest.importorskip(framework)

    class Narrow(Function):
        def attend(self, query, key, value, masks, **options):
            return self.bridge.cast(value, "float32")

    Narrow.framework = framework
    found = examined(Narrow(), "plain/no-mask/self", dtype="float64")
    assert found["dtype.in-is-out"].detail == "inputs are float64, but output is float32"
    assert found["output.equals-definition"].verdict == "deviates"
