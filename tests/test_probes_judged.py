"""What experiments see is judged: an implementation that answers twice has to agree with itself."""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from mutants.fakes import fake, usual, values
from mutants.miniatures import Correct, FusedSelfAttention, attention

from conformance import MaskArgument, Mode, attention_function, examine
from conformance.adapter.loading import adapted
from conformance.errors import WrongDeclaration
from conformance.experiments import experiment
from conformance.reports.gate import tell, update
from conformance.reports.gate.baseline import read_baseline
from conformance.reports.gate.judging import judge
from conformance.running.session import Session, inquiries


def verdicts(adapter, *names, mode=""):
    """Requirement to the verdicts on the experiments, where there is one about conventions."""
    adapter.name = adapter.name or type(adapter).__name__
    session, found = Session(), defaultdict(set)
    for row in inquiries([adapter], [experiment(name) for name in names], "cpu"):
        if mode in ("", row.mode.name):
            for finding in session.inquire(row)[0].findings:
                found[finding.requirement].add(finding.verdict)
    return found


TWO = {"modes": (Mode("one", {"other": False}), Mode("two", {"other": True}))}


class TwoModes(Correct):
    """Right in its first mode."""

    modes = TWO["modes"]
    fully_masked_row = None


MODES = "conventions.same-in-every-mode"


def in_mode_two(**changed):
    """An attention that hands other arguments on in its second mode."""

    class Moded(TwoModes):
        def attend(self, query, key, value, masks, mode, **options):
            if mode["other"]:
                for name, change in changed.items():
                    if name in masks:
                        masks[name] = change(masks[name])
            return super().attend(query, key, value, masks, **options)

    return Moded()


class MeanInModeTwo(TwoModes):
    """Blocks with a large number in its second mode."""

    def attend(self, query, key, value, masks, mode, **options):
        if mode["other"] and masks.get("mask", np.ones(1)).dtype == np.bool_:
            masks["mask"] = np.where(masks["mask"], 0, -1e9).astype(query.dtype)
        return super().attend(query, key, value, masks, **options)


def nothing(mask):
    return np.ones_like(mask) if mask.dtype == np.bool_ else mask * 0


@pytest.mark.parametrize(
    ("adapter", "name"),
    [
        (MeanInModeTwo(), "masked-rows"),
        (in_mode_two(mask=nothing), "masks"),
        (in_mode_two(is_causal=lambda flag: False), "causal"),
    ],
)
def test_modes_that_answer_have_the_same_conventions(adapter, name):
    assert verdicts(TwoModes(), name)[MODES] == {"conforms"}
    assert verdicts(adapter, name)[MODES] == {"deviates"}
    assert verdicts(adapter, name, mode="two")[MODES] == {"deviates"}, "if asked alone"
    assert not verdicts(adapter, name, mode="one")[MODES]


def test_a_mode_that_refuses_does_not_answer_otherwise():
    class Refusing(TwoModes):
        def attend(self, query, key, value, masks, mode, **options):
            if mode["other"] and masks.get("is_causal"):
                raise ValueError("no flag here")
            return super().attend(query, key, value, masks, **options)

    assert verdicts(Refusing(), "causal")[MODES] <= {"conforms"}


def test_a_fast_path_for_self_attention_has_the_same_conventions():
    name = "conventions.same-for-shared-inputs"
    for of in ("masked-rows", "causal"):
        assert verdicts(FusedSelfAttention(), of)[name] == {"deviates"}
        assert not verdicts(Correct(), of)[name], "nothing differs"


def test_a_fully_masked_query_gets_the_same_in_every_dtype():
    def logits(logits, mask):
        floor = -np.inf if logits.dtype == np.float32 else -6e4
        if mask.dtype == np.bool_:
            return np.where(mask, logits, logits.dtype.type(floor))
        return logits + np.maximum(mask, logits.dtype.type(floor))

    name, dtypes = "conventions.same-in-every-dtype", ("float32", "float16")
    assert verdicts(fake(logits, dtypes=dtypes), "masked-rows")[name] == {"deviates"}
    assert not verdicts(fake(usual, dtypes=dtypes), "masked-rows")[name]


def test_a_fully_masked_query_gets_the_same_with_every_encoding():
    def zeros(weights, mask):
        return np.nan_to_num(weights) if mask.dtype == np.bool_ else weights

    def cut(logits, mask):
        return usual(logits, mask if mask.dtype == np.bool_ else np.maximum(mask, -1e4))

    def lost(weights, mask):
        return weights * np.where((np.asarray(mask) < -1e30).all(-1, keepdims=True), np.nan, 1)

    name = "conventions.same-for-every-encoding"
    assert verdicts(fake(usual), "masked-rows")[name] == {"conforms"}, "a mean of what is added"
    assert verdicts(fake(usual, zeros), "masked-rows")[name] == {"deviates"}
    assert verdicts(fake(cut), "masked-rows")[name] == {"deviates"}
    safe = fake(usual, lambda weights, mask: np.nan_to_num(weights))
    assert verdicts(safe, "masked-rows")[name] == {"conforms"}
    finite = fake(usual, lambda weights, mask: lost(np.nan_to_num(weights), mask))
    assert verdicts(finite, "masked-rows")[name] == {"deviates"}


NAN = "nan.reaches-the-output"


def of_layouts(dead):
    """Takes masks of all heads, of one, and of queries and keys; dead(mask) of an empty row."""
    taken = ("batch heads query key", "query key")
    argument = MaskArgument("mask", taken, true="attends", broadcasts=True)

    def weights(weights, mask):
        return np.where(np.isnan(weights), dead(mask), weights)

    return fake(usual, weights, masks=argument)


@pytest.mark.parametrize(
    ("dead", "verdict"),
    [
        (lambda mask: 0, "conforms"),
        (lambda mask: np.nan if mask.ndim == 2 else 0, "deviates"),
        (lambda mask: 1 if mask.ndim == 4 and mask.shape[1] == 1 else 0, "deviates"),
    ],
    ids=["alike", "without a batch", "with one head for all"],
)
def test_a_fully_masked_query_gets_the_same_in_every_layout(dead, verdict):
    found = verdicts(of_layouts(dead), "masked-rows")
    assert found["conventions.same-in-every-layout"] == {verdict}


class Lowers(Correct):
    """Subtracts a number where its causal flag should block."""

    amount = 1e4

    def attend(self, query, key, value, masks, **options):
        lowered = np.triu(np.full((query.shape[2], key.shape[2]), -self.amount, query.dtype), 1)
        if not masks.pop("is_causal", False):
            return attention(query, key, value, **masks, **options)
        if masks.get("mask") is None:
            return attention(query, key, value, mask=lowered, **options)
        mask = masks["mask"]
        if mask.dtype == np.bool_:
            mask = np.where(mask, 0, -np.inf)
        return attention(query, key, value, mask=(mask + lowered).astype(query.dtype), **options)


class LowersByMore(Lowers):
    """Shows where nothing else is left to a query."""

    amount = 1e9


@pytest.mark.parametrize(
    ("adapter", "large", "verdict"),
    [
        (Correct(), "blocks later keys", "conforms"),
        (Lowers(), "attends to later keys", "deviates"),
        (LowersByMore(), "blocks later keys", "deviates"),
    ],
    ids=["correct", "10,000", "1,000,000,000"],
)
def test_a_causal_flag_has_to_block(adapter, large, verdict):
    assert verdicts(adapter, "causal")["causal.flag-blocks"] == {verdict}
    assert values(adapter, "causal")["is_causal alone, logits of up to 15,000"] == large


PADDING = MaskArgument("pad", "batch key", true="attends", number="attends if nonzero")
ADDITIVE = MaskArgument("mask", "batch heads query key", number="added")


def two_arguments(change):
    """Takes padding and a bias; change(bias, scale, pad) gives the bias and the scale."""

    @attention_function("numpy", PADDING, ADDITIVE, custom_scale=True, returns_weights="per head")
    def attend(query, key, value, pad=None, mask=None, scale=None):
        if mask is not None and mask.dtype == np.bool_:
            mask = np.where(mask, 0, -np.inf).astype(query.dtype)
        bias, scale = change(mask, scale, pad)
        if pad is not None:
            hidden = np.where(pad[:, None, None] != 0, 0, -np.inf).astype(query.dtype)
            bias = hidden if bias is None else bias + hidden
        return attention(query, key, value, mask=bias, scale=scale)

    attend.name = "two"
    return attend


def only_blocks(bias, scale, pad):
    both = bias is not None and pad is not None
    return (np.where(np.isneginf(bias), bias, bias.dtype.type(0)) if both else bias), scale


def scales_bias(bias, scale, pad):
    return (bias if bias is None or scale is None else bias * bias.dtype.type(scale)), scale


@pytest.mark.parametrize(
    ("change", "verdict", "value"),
    [
        (lambda bias, scale, pad: (bias, scale), "conforms", "both"),
        (only_blocks, "deviates", "pad only"),
        (scales_bias, "deviates", "both, mask times the scale"),
        (
            lambda bias, scale, pad: (bias, None if bias is not None else scale),
            "deviates",
            "both, but not the scale",
        ),
    ],
    ids=["correct", "only blocks", "bias times the scale", "scale ignored"],
)
def test_a_bias_and_a_scale_have_their_effect_beside_a_mask(change, verdict, value):
    adapter = two_arguments(change)
    assert verdicts(adapter, "pairs")["mask.arguments-combine"] == {verdict}
    assert values(adapter, "pairs")["pad with mask as a bias, and a scale"] == value


class Polished(Correct):
    """Takes NaN for 0 in one of its inputs."""

    polished = "query"

    def attend(self, query, key, value, masks, **options):
        given = {"query": query, "key": key, "value": value}
        given[self.polished] = np.nan_to_num(given[self.polished])
        return super().attend(*given.values(), masks, **options)


@pytest.mark.parametrize("polished", ["query", "key", "value"])
def test_a_visible_nan_has_to_reach_the_output(polished):
    assert verdicts(Correct(), "leaks")[NAN] == {"conforms"}
    adapter = Polished()
    adapter.polished = polished
    assert verdicts(adapter, "leaks")[NAN] == {"deviates"}


def test_a_softmax_that_hides_nan_is_seen_without_masks_too():
    assert verdicts(fake(masks=(), weights=None), "leaks")[NAN] == {"conforms"}

    class Hiding(Correct):
        mask_arguments = ()

        def attend(self, query, key, value, masks, **options):
            _, weights = super().attend(query, key, value, masks, **options)
            weights = np.nan_to_num(weights)
            return weights @ value, weights

    assert verdicts(Hiding(), "leaks")[NAN] == {"deviates"}


def test_what_one_mode_refuses_the_other_must_not_ignore():
    class Silent(TwoModes):
        def attend(self, query, key, value, masks, mode, **options):
            flag = masks.pop("is_causal", False)
            if flag and not mode["other"]:
                raise ValueError("no flag here")
            return super().attend(query, key, value, masks, **options)

    assert verdicts(Silent(), "causal")[MODES] == {"deviates"}


# What an adapter declares, and what a baseline pins


DECLARED = "adapter.declares-what-is-observed"
LOSSY = {
    "leak(*input=input.value*number=number.nan*)": "leak.reaches*place.output*",
    "leak.visible-unmasked(*)": "leak.visible-reaches-all",
    "size.no-key": "refused",
    "fully-masked.weights(*form.bool*)": "row.nan",
}


def test_any_entry_of_a_card_can_be_declared():
    names = ("leaks", "degenerate-sizes", "masked-rows")
    right = fake(usual, conventions=LOSSY)
    assert verdicts(right, *names)[DECLARED] <= {"conforms", "observed"}
    for pattern in LOSSY:
        wrong = LOSSY | {pattern: "row.zeros"}
        assert "deviates" in verdicts(fake(usual, conventions=wrong), *names)[DECLARED], pattern


def test_what_is_declared_is_no_deviation_from_a_convention():
    hidden = {"leak.visible*(*input.query*)": "leak.visible-reaches-none"}
    adapter = Polished()
    adapter.conventions = hidden
    assert verdicts(adapter, "leaks")[NAN] == {"conforms"}
    assert "deviates" in verdicts(fake(usual, conventions=hidden), "leaks")[DECLARED]


def test_a_declaration_about_no_entry_is_refused():
    adapter = fake(usual, conventions={"leek(*)": "leak.hidden"})
    with pytest.raises(WrongDeclaration, match="did you mean leak"):
        adapted(adapter, "fake")


def recorded(adapter, *names):
    """A record of experiments, as a narrowed run makes it."""
    adapter.name = adapter.name or type(adapter).__name__
    return examine(adapter, cases=[f"probe/{name}" for name in names]).record


EMPTY = '[pinned.Correct."probe/leaks"]\n'


def test_a_pinned_entry_that_changes_turns_the_gate_red(tmp_path, capsys):
    before, path = recorded(Correct(), "leaks"), tmp_path / "pins.toml"
    path.write_text(EMPTY)
    judged = judge(read_baseline(path), before)
    assert not judged.holds
    assert "not written yet" in str(tell(judged))
    assert update(read_baseline(path), before, "") == 0
    assert "leak.visible-reaches-all" in path.read_text()
    assert judge(read_baseline(path), before).holds

    adapter = Polished()
    adapter.name, adapter.polished = "Correct", "value"
    after = recorded(adapter, "leaks")
    judged = judge(read_baseline(path), after)
    assert judged.exit_code == 1
    assert "pinned leak.reaches(places=[place.output]), now leak.hidden" in str(tell(judged))
    assert all("input.value" in one.subject for one in judged.changed)
    assert judge(read_baseline(path), recorded(Correct(), "weights")).holds, "it was not asked"
    assert update(read_baseline(path), after, "It is meant.") == 0
    assert judge(read_baseline(path), after).holds
    assert judge(read_baseline(path), before).changed


CALLED = {"dtypes", "features", "mask_arguments", "opsets"}
"""What an adapter may declare by version: how the library can be called, and with what."""


def test_what_an_old_version_gives_is_not_declared_for_it():
    for file in sorted((Path(__file__).parent.parent / "adapters").rglob("*.py")):
        tree = ast.parse(file.read_text())
        bodies = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for node in itertools.chain.from_iterable(body.body for body in bodies):
            if isinstance(node, ast.Assign | ast.AnnAssign) and "since(" in ast.unparse(node):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                assert target.id in CALLED, (file.name, target.id)
