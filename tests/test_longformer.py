"""Windows and global tokens as Longformer of transformers has them, held against the definition.

Its global tokens have projections of their own; with those of the others copied into them, one set
of weights is that of the definition. It has no dilation any more.
"""

from __future__ import annotations

import numpy as np
import pytest

from conformance.definition.expectation import expect
from conformance.definition.problem import Problem, Shape, Weights
from conformance.records.numbers import LIMIT

torch = pytest.importorskip("torch")
modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")

SIDES = ("query", "key", "value")
SHAPE = Shape(
    **{"batch": 2, "query_length": 12, "key_length": 12, "heads": 2, "kv_heads": 2},
    **{"head_size": 4, "value_head_size": 4, "output_width": 8},
    **{f"{side}_width": 8 for side in SIDES},
    bias=SIDES,
    sharing="self",
)
REACH = 2
"""How many keys before and after are seen; Longformer's `attention_window` is twice as large."""

TOKENS = np.zeros((2, 12), int)
TOKENS[0, [0, 7]] = TOKENS[1, 4] = 1
LENGTHS = np.array([12, 9])

SETTINGS = {
    "window": {},
    "global tokens": {"global_tokens": TOKENS},
    "padding": {"query_lengths": LENGTHS, "key_lengths": LENGTHS},
    "global tokens and padding": {
        "global_tokens": TOKENS,
        "query_lengths": LENGTHS,
        "key_lengths": LENGTHS,
    },
}


def layer(*, copied=True):
    """Longformer's self-attention, whose global projections are copies of the others."""
    torch.manual_seed(3)
    config = modeling.LongformerConfig(
        hidden_size=8,
        num_attention_heads=2,
        attention_window=[2 * REACH],
        attention_probs_dropout_prob=0.0,
    )
    made = modeling.LongformerSelfAttention(config, 0).eval()
    for side in SIDES:
        # With the usual weights, all logits are nearly the same.
        torch.nn.init.normal_(getattr(made, side).weight, std=0.5)
        torch.nn.init.normal_(getattr(made, side).bias, std=0.5)
        if copied:
            getattr(made, f"{side}_global").load_state_dict(getattr(made, side).state_dict())
    return made


def problem_of(made, setting):
    """The problem that the layer solves."""
    random = np.random.default_rng(5)

    def numbers(*sizes):
        return random.standard_normal(sizes).astype("float32").astype("float64")

    weights = {"output": np.eye(8).reshape(2, 4, 8)}
    for side in SIDES:
        linear = getattr(made, side)
        weights[side] = linear.weight.detach().double().numpy().T.reshape(8, 2, 4)
        weights[f"{side}_bias"] = linear.bias.detach().double().numpy().reshape(2, 4)
    x = numbers(2, 12, 8)
    return Problem(
        shape=SHAPE,
        dtype="float32",
        weights=Weights(**weights),
        **dict.fromkeys(SIDES, x),
        cotangent=numbers(2, 12, 8),
        window=(REACH, REACH),
        **SETTINGS[setting],
    )


def answer(made, problem):
    """The output of the layer, and the gradients by their names in the definition."""
    x = torch.tensor(problem.query, dtype=torch.float32, requires_grad=True)
    tokens = problem.global_tokens
    tokens = np.zeros((2, 12), int) if tokens is None else tokens
    padding = ~np.broadcast_to(problem.used()[1], (2, 12))
    mask = torch.tensor(np.where(padding, -10000.0, 10000.0 * tokens), dtype=torch.float32)
    (output,) = made(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=bool((mask > 0).any()),
    )
    made.zero_grad()
    output.backward(torch.tensor(problem.cotangent, dtype=torch.float32))
    found = {"output": output.detach(), "gradient.query": x.grad}
    for side in SIDES:
        # What one projection of the definition does, two do here.
        both = [getattr(made, side), getattr(made, f"{side}_global")]
        weight = sum(one.weight.grad for one in both if one.weight.grad is not None)
        found[f"gradient.weights.{side}"] = weight.T.reshape(8, 2, 4)
    return {name: array.double().numpy() for name, array in found.items()}


def worst(problem, found):
    """How many σ the worst element of the worst array is off."""
    expected = expect(problem)
    return max(
        float(
            np.max(
                np.abs(array - expected.arrays[name])
                / (expected.sigma[name] + expected.underflow + 1e-30)
            )
        )
        for name, array in found.items()
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_longformer_is_the_definition(setting):
    made = layer()
    problem = problem_of(made, setting)
    assert worst(problem, answer(made, problem)) <= LIMIT


@pytest.mark.parametrize(
    "changes",
    [
        {"global_tokens": None},
        {"global_tokens": TOKENS[:1].repeat(2, axis=0)},
        {"window": (REACH, REACH + 1)},
        {"window": (REACH, None)},
        {"dilation": 2},
        {"causal": "top-left"},
        {"key_lengths": None},
    ],
    ids=str,
)
def test_another_definition_is_not_that_of_longformer(changes):
    made = layer()
    problem = problem_of(made, "global tokens and padding")
    assert worst(problem.replace(**changes), answer(made, problem)) > 100 * LIMIT


def test_projections_of_global_tokens_are_seen_to_be_others():
    made = layer(copied=False)
    problem = problem_of(made, "global tokens")
    assert worst(problem, answer(made, problem)) > 100 * LIMIT
    plain = problem_of(made, "window")
    assert worst(plain, answer(made, plain)) <= LIMIT
