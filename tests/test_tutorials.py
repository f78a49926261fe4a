"""Five textbook attentions: right where they are used as they ask for it, each with its quirks."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np
import pytest

from conformance import Call, MaskArgument, Unsupported
from conformance.adapter.code import lines
from conformance.adapter.loading import load
from conformance.adapters import tutorials
from conformance.cases.case import FAMILIES
from conformance.cases.catalogue import catalogue, find_cases
from conformance.running.session import Session, plan
from conformance.words import say

torch = pytest.importorskip("torch")

NAMES = [f"tutorial-{number}" for number in range(1, 6)]
WIDTH, HEADS, BATCH, LENGTH = 6, 2, 3, 4
FINITE = {"tutorial-2", "tutorial-4", "tutorial-5"}
"""They block with a number that float16 cannot hold."""

each = pytest.mark.parametrize("name", NAMES)


def page(name, **options):
    """The module as its reader gets it, with weights that are the same every time."""
    module = importlib.import_module(f"conformance.adapters.tutorials.{name.replace('-', '_')}")
    (attention,) = {value for key, value in vars(module).items() if key.endswith("Attention")}
    torch.manual_seed(0)
    return attention(WIDTH, HEADS, **options)


def ask(name, layer, x, mask=None):
    """Self-attention in the page's own argument order: (output, weights or None)."""
    # Tutorial 5 has one mask for all heads.
    mask = mask[:, 0] if name == "tutorial-5" and mask is not None else mask
    arguments = (x, mask) if name == "tutorial-3" else (x, x, x, mask)
    found = layer(*arguments)
    return found if isinstance(found, tuple) else (found, None)


def tokens():
    return torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def pattern():
    """`[batch heads query key]`: asymmetric, with two ones and two zeros in each row."""
    rows = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
    return rows.expand(BATCH, HEADS, LENGTH, LENGTH)


def readers(name, mask):
    """Which queries move with each token: True at `[query token]` if the query attends it."""
    layer, x = page(name).eval(), tokens()
    before = ask(name, layer, x, mask)[0]
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for token in range(LENGTH):
        changed = x.clone()
        changed[:, token] += 1.0
        after = ask(name, layer, changed, mask)[0]
        seen[:, token] = (after != before).any(-1).any(0)
    return seen


def findings(adapter, case_id, dtype="float32"):
    """Requirement to finding, of every mode."""
    (case,) = find_cases(case_id)
    session = Session()
    return {
        (finding.requirement, item.mode.name): finding
        for item in plan([adapter], [case], [dtype], "cpu")
        for finding in session.examine(item).findings
    }


# As the suite asks.


@pytest.mark.sample(6)
@each
def test_it_computes_the_definition(name):
    adapter = load(name)
    session, conforming = Session(), 0
    cases = [case for case in catalogue() if case.family != "long"]
    for item in plan([adapter], cases, ["float32"], "cpu"):
        for finding in session.examine(item).findings:
            assert finding.verdict in ("conforms", "unsupported"), (item.id, finding)
            conforming += finding.verdict == "conforms"
    assert conforming > 100


@each
@pytest.mark.parametrize(
    "use", ["encoder-self-attention", "decoder-self-attention", "decoder-cross-attention"]
)
def test_it_serves_in_encoder_and_decoder(name, use):
    families = {"tutorial-5": ("additive-self", "additive")}.get(name, ("self", "cross"))
    found = findings(load(name), f"transformer/{use}/{families['cross' in use]}")
    if name == "tutorial-3" and "cross" in use:
        assert found["output.equals-definition", "train"].detail == "self-attention only"
    else:
        assert found["output.equals-definition", "train"].verdict == "conforms"
        assert found["gradient.inputs-equal-definition", "eval"].verdict == "conforms"


@each
def test_a_sentinel_that_float16_cannot_hold_is_an_error_there(name):
    family = "additive-self" if name == "tutorial-5" else "self"
    case = f"transformer/encoder-self-attention/{family}"
    finding = findings(load(name), case, "float16")["output.equals-definition", "train"]
    if name in FINITE:
        assert finding.verdict == "error"
        assert "without overflow" in finding.detail
    else:
        assert finding.verdict == "conforms"


def test_a_number_that_blocks_is_told_from_one_that_attends():
    class Misread(tutorials.Tutorial1):
        mask_arguments = (
            MaskArgument("mask", tutorials.FOUR_AXES, true="blocks", number="attends if nonzero"),
        )

    adapter = Misread()
    adapter.name = "misread"
    polarity = ("mask.polarity-is-as-declared", "train")
    wrong = findings(adapter, "plain/no-mask/cross")[polarity]
    assert wrong.verdict == "deviates"
    assert "declared mask[0/1] attends, observed blocks" in wrong.detail
    right = findings(load("tutorial-1"), "plain/no-mask/cross")[polarity]
    assert say(right.value) == "mask[bool]=blocks mask[0/1]=blocks"


@pytest.mark.parametrize("family", ["narrow", "gqa", "value-head", "mqa", "one-head"])
@each
def test_it_says_which_shapes_it_cannot_have(name, family):
    with pytest.raises(Unsupported):
        load(name).check_shape(FAMILIES[family])


# As a reader uses them.


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@each
def test_the_same_mask_means_the_opposite_in_the_first(name, kind):
    marked = pattern()[0, 0] == 1
    attended = ~marked if name == "tutorial-1" else marked
    # A token is a query too: whether it attends itself does not show.
    others = ~torch.eye(LENGTH, dtype=torch.bool)
    assert torch.equal(readers(name, pattern().to(kind)) & others, attended & others)


def test_a_mask_of_tutorial_1_gives_the_complement_in_tutorial_4():
    x, mask = tokens(), pattern()
    first = ask("tutorial-1", page("tutorial-1").eval(), x, mask)[1]
    fourth = ask("tutorial-4", page("tutorial-4").eval(), x, mask)[1]
    assert torch.equal(first > 0, mask == 0)
    assert torch.equal(fourth > 0, mask == 1)


def test_tutorial_1_asks_for_one_literally():
    x, mask = tokens(), 2 * torch.ones(BATCH, HEADS, LENGTH, LENGTH).triu(1)
    layer = page("tutorial-1").eval()
    assert torch.equal(ask("tutorial-1", layer, x, mask)[0], ask("tutorial-1", layer, x)[0])


@each
def test_a_fully_masked_row_is_nan_or_the_mean_of_values(name):
    x, mask = tokens(), torch.ones(BATCH, HEADS, LENGTH, LENGTH)
    mask[0, :, 1] = 0
    mask = 1 - mask if name == "tutorial-1" else mask
    layer = page(name).eval()
    row = ask(name, layer, x, mask)[0][0, 1]
    assert torch.isnan(row).all() == (name not in FINITE)
    if name in FINITE:
        # One token with the mean as its content has the mean of the values: they are linear.
        mean = ask(name, layer, x.mean(1, keepdim=True))[0][0, 0]
        torch.testing.assert_close(row, mean)


def test_masks_of_tutorial_3_come_expanded_for_every_head():
    (argument,) = load("tutorial-3").mask_arguments
    assert argument.layouts == ("batch heads query key",)
    assert not argument.broadcasts
    adapter = load("tutorial-3")
    for case in ("mask/key-padding/self", "mask/shared/self", "causal/square/self"):
        problem = find_cases(case)[0].problem("float32")
        for spelling in adapter.masks.spellings(problem):
            assert spelling.arguments["attention_mask"].shape == problem.shape.logits


def test_tutorial_5_has_one_mask_for_all_heads():
    found = findings(load("tutorial-5"), "mask/per-head/additive")
    assert "varies over batch, heads" in found["output.equals-definition", "train"].detail


def test_the_masks_of_tutorial_5_are_those_of_an_encoder_and_a_decoder():
    module = importlib.import_module("conformance.adapters.tutorials.tutorial_5")
    lengths = torch.tensor([4, 2])
    padding = module.pad_mask(lengths, 4)
    assert padding.int().tolist() == [[[1, 1, 1, 1]], [[1, 1, 0, 0]]]
    both = padding & module.causal_mask(4)
    assert both.shape == (2, 4, 4)
    assert both[1].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]


# Dropout.


@pytest.mark.parametrize("name", ["tutorial-1", "tutorial-3"])
def test_dropout_is_active_in_training_only(name):
    x, layer = tokens(), page(name)
    evaluated = [ask(name, layer.eval(), x)[0] for _ in range(2)]
    trained = [ask(name, layer.train(), x)[0] for _ in range(8)]
    assert torch.equal(*evaluated)
    assert any(not torch.equal(trained[0], other) for other in trained[1:])


def test_tutorial_1_returns_the_weights_after_dropout():
    weights = ask("tutorial-1", page("tutorial-1", dropout=0.5).train(), tokens())[1]
    assert (weights == 0).any()


@pytest.mark.parametrize("name", ["tutorial-1", "tutorial-3", "ours", "torch-mha"])
def test_a_mode_may_ask_for_dropout(name):
    adapter = load(name)
    modes = [mode for mode in adapter.modes if mode.name in adapter.dropout_modes]
    assert len(modes) == len(adapter.dropout_modes) > 0
    problem = find_cases("plain/no-mask/self")[0].problem("float64")

    def output(mode, dropout, draw):
        asked = dataclasses.replace(mode, dropout=dropout, draw=draw)
        return adapter.run(problem, Call(asked)).output

    for mode in modes:
        plain = adapter.run(problem, Call(mode)).output
        assert np.array_equal(output(mode, 0.0, 7), plain)
        assert np.array_equal(output(mode, 0.5, 7), output(mode, 0.5, 7))
        assert not np.array_equal(output(mode, 0.5, 7), output(mode, 0.5, 8))
        assert not np.allclose(output(mode, 0.5, 7), plain)


@pytest.mark.parametrize("name", ["tutorial-2", "tutorial-4", "tutorial-5"])
def test_the_others_have_no_dropout(name):
    assert load(name).dropout_modes == ()


# What a user types.


@pytest.mark.parametrize("name", [*NAMES, "ours", "torch-mha"])
def test_the_example_is_a_program(name):
    adapter, fields = load(name), dataclasses.asdict(FAMILIES["self"])
    example = adapter.example_for(FAMILIES["self"], "float32", None, adapter.modes[0])
    x = torch.randn(2, 7, fields["query_width"])
    names = {"query": x, "key": x, "value": x}
    exec("\n".join([*lines(example.imports), *lines(example.build)]), names)
    assert eval(example.expression({}), names).shape == x.shape
    if example.weights:
        weights = eval(example.expression({}, weights=True), names)
        assert weights.shape == (2, fields["heads"], 7, 7)
    assert bool(example.weights) == (load(name).returns_weights is not None)
