"""What is fixed in an implementation: the cases are posed so, and its mistakes are noticed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from test_cases_bind import BINDS, LIMIT, SYMMETRIC, far_from, solve, spoilt

from conformance import Fixed, Geometry, MaskArgument, examine
from conformance.adapter.loading import load
from conformance.cases.case import FAMILIES, assembled, case_hash, draw
from conformance.cases.catalogue import case_of, every_case, posed
from conformance.causes import gradients
from conformance.causes.diagnose import hypotheses
from conformance.causes.hypothesis import Maker
from conformance.cli import main
from conformance.definition.expectation import expect
from conformance.definition.geometry import PROJECTIONS, apart, joined
from conformance.errors import ExitCode, Unsupported, WrongDeclaration
from conformance.requirements.examination import without_masked_rows
from conformance.words import say

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
LLAMA = f"{EXAMPLES / 'torch_llama.py'}:LlamaLike"
LAYERS = {
    name: f"{EXAMPLES / 'torch_layers.py'}:{name}"
    for name in ("GPT2Like", "ViTLike", "BertLike", "T5Like", "PerceiverLike", "SwinLike")
} | {"LlamaLike": LLAMA}
SIXTEEN = Geometry(head_sizes=(16,), tiles=(16, 16))
FIXED = {
    "llama": Fixed(causal="bottom-right", rotary_base=10000.0, sharing="self", bias=False),
    "gpt-neox": Fixed(
        causal="top-left", rotary_base=1e6, rotary_pairs="interleaved", rotary_size=4, bias=True
    ),
    "gpt-2": Fixed(causal="bottom-right", sharing="self", width="heads", grouped=False),
    "vit": Fixed(sharing="self", bias=("output",), width="heads", value_heads="alike"),
    "perceiver": Fixed(sharing="memory", bias=False, output_width="query"),
    "qwen-2": Fixed(scale=0.125, bias=("query", "key", "value"), sharing="memory"),
}


LEVELS = pytest.mark.parametrize("level", ["first", pytest.param("core", marks=pytest.mark.night)])


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", LAYERS)
@LEVELS
def test_a_layer_of_a_model_is_asked_and_conforms(name, level):
    pytest.importorskip("torch")
    outcome = examine(LAYERS[name], level=level)
    assert outcome.counts["conforms"] >= {"first": 20, "core": 60}[level]
    assert not set(outcome.counts) - {"conforms", "unsupported"}, outcome.counts


def module(name):
    adapter = load(LAYERS[name])
    return adapter, vars(__import__("sys").modules[type(adapter).__module__])


def changed(name, **methods):
    """The adapter of a layer, whose module has these methods instead of its own."""
    adapter, names = module(name)
    own = names["LlamaLikeModule" if name == "LlamaLike" else "Attention"]
    broken = type("Broken", (own,), methods)

    def build(self, shape, dtype, scale, mode):
        layer = type(adapter).build(adapter, shape, dtype, scale, mode)
        layer.__class__ = broken
        return layer

    return type(f"Broken{name}", (type(adapter),), {"build": build})()


def llama(**change):
    """A forward pass of Llama's with something changed."""
    import torch

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        q, k = change.get("turned", lambda s, q, k: (s.rotated(q), s.rotated(k)))(self, q, k)
        group = self.heads // self.kv_heads
        spread = change.get("spread", lambda y: y.repeat_interleave(group, dim=1))
        k, v = spread(k), spread(v)
        if k.shape[1] != q.shape[1]:
            k, v = k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1)
        logits = q @ k.mT * change.get("scale", self.head**-0.5)
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(change.get("diagonal", 1))
        weights = logits.masked_fill(future, change.get("blocked", -torch.inf)).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))

    return {"forward": forward}


def interleaved(self, q, k):
    def swapped(y):
        return y.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def back(y):
        return y.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    return back(self.rotated(swapped(q))), back(self.rotated(swapped(k)))


BROKEN = {
    "pairs are neighbours": ("LlamaLike", {"turned": interleaved}, "rotary"),
    "keys are not rotated": ("LlamaLike", {"turned": lambda s, q, k: (s.rotated(q), k)}, "rot"),
    "nothing is rotated": ("LlamaLike", {"turned": lambda s, q, k: (q, k)}, "rotary"),
    "sees the next key": ("LlamaLike", {"diagonal": 2}, "causal"),
    "shares heads the other way": ("LlamaLike", {"spread": lambda y: y}, "head"),
    "no scale": ("LlamaLike", {"scale": 1.0}, "scale"),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", BROKEN)
@LEVELS
def test_a_mistake_in_what_is_fixed_is_noticed_and_named(name, level):
    pytest.importorskip("torch")
    layer, change, cause = BROKEN[name]
    outcome = examine(changed(layer, **llama(**change)), level=level, dtypes="float32")
    assert outcome.counts.get("deviates", 0) >= 3, outcome.counts
    findings = [finding for result in outcome.results for finding in result.findings]
    causes = {say(finding.cause) for finding in findings if finding.cause}
    assert any(cause in text for text in causes), causes


def padded_llama(positions):
    """A layer as in Llama that masks padding, with positions that are made from the mask."""
    import torch

    adapter, names = module("LlamaLike")

    class Padded(names["LlamaLikeModule"]):
        def forward(self, x, real=None):
            real = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real
            places, heads = positions(real), (self.heads, self.kv_heads, self.kv_heads)
            projections = zip((self.q_proj, self.k_proj, self.v_proj), heads, strict=True)
            q, k, v = (project(x).unflatten(-1, (n, -1)) for project, n in projections)
            frequencies = 10000.0 ** (-torch.arange(0, self.head, 2).double() / self.head)
            angles = (places[:, :, None, None] * frequencies).repeat(1, 1, 1, 2)
            q, k = (
                y * angles.cos().to(y)
                + torch.cat([-y.chunk(2, -1)[1], y.chunk(2, -1)[0]], -1) * angles.sin().to(y)
                for y in (q, k)
            )
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=2) for y in (k, v))
            logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.head**-0.5
            seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril() & real[:, None, None]
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            return self.o_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))

    class Adapter(type(adapter)):
        title = "Padded"
        mask_arguments = (MaskArgument("real", "batch key", true="attends"),)

        def build(self, shape, dtype, scale, mode):
            layer = type(adapter).build(self, shape, dtype, scale, mode)
            layer.__class__ = Padded
            return layer

        def call(self, layer, query, key, value, masks, mode):
            return layer(query, **masks)

    return Adapter()


def test_positions_that_do_not_count_padding_are_named():
    pytest.importorskip("torch")
    for positions, cause in (
        (lambda real: (real | True).cumsum(-1) - 1, ""),
        (lambda real: (real.long().cumsum(-1) - 1).clamp(min=0), "rotary.padding-not-counted"),
    ):
        asked = {"cases": ["mask/key-padding"], "dtypes": "float32"}
        outcome = examine(padded_llama(positions), **asked)
        findings = [finding for result in outcome.results for finding in result.findings]
        causes = {finding.cause.id for finding in findings if finding.verdict == "deviates"}
        assert causes == ({cause} if cause else set()), causes
        assert outcome.counts["deviates" if cause else "conforms"] > 3, outcome.counts


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["shares heads the other way", "sees the next key"])
def test_the_first_items_notice_it(name):
    pytest.importorskip("torch")
    layer, change, _ = BROKEN[name]
    outcome = examine(changed(layer, **llama(**change)), level="first")
    assert outcome.counts.get("deviates", 0) >= 1, outcome.counts


def test_the_change_alone_is_the_mistake():
    pytest.importorskip("torch")
    outcome = examine(changed("LlamaLike", **llama()), level="core", dtypes="float32")
    assert set(outcome.counts) == {"conforms", "unsupported"}


@pytest.mark.parametrize("name", FIXED)
def test_a_name_says_what_is_fixed(name):
    fixed = FIXED[name]
    assert (Fixed.parse(fixed.name) or Fixed()) == fixed
    for text in ("causal-left", f"{fixed.name}+nothing", "biases-of-all", "rotary-halves-x"):
        assert Fixed.parse(text) is None


@pytest.mark.night
@pytest.mark.parametrize("name", FIXED)
def test_every_case_is_posed_as_it_is_fixed(name):
    fixed = FIXED[name]
    cases = [case for case in every_case() if case.shape.score == "scaled-dot"]
    for case, geometry in itertools.product(cases, (None, SIXTEEN)):
        for one in posed(case, geometry, layer=True, fixed=fixed):
            again = case_of(one.id)
            assert again.id == one.id
            problem = one.problem("float32")
            assert problem.digest() == again.problem("float32").digest()
            try:
                fixed.check(problem)
            except Unsupported:
                # Only what a case itself is about may contradict.
                assert case.causal or case.scale is not None or case.features


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.night)])
def test_every_input_binds_as_it_is_fixed(name, share):
    """As in `tests/test_cases_bind.py`, for cases that such an implementation is asked."""
    for case in every_case()[::share]:
        if not case.is_bare or case.tiled or not case.defined or case.shape.key_length > 140:
            continue
        one = case.with_fixed(FIXED[name])
        if FIXED[name].causal == "top-left" and 1 in one.shape.logits[2:]:
            continue  # There is one key to see.
        problem = one.problem("float32")
        exact, noise = solve(problem).arrays(), expect(problem)
        for what, how, wrong in spoilt(problem):
            moved = max(far_from(exact, noise, solve(wrong).arrays()).values())
            if what in one.idle:
                assert moved < LIMIT, (one.id, what, how)
            elif (case.id, what, how) not in SYMMETRIC:
                assert moved > BINDS["float32"], (one.id, what, how)


BIASES = [names for count in range(4) for names in itertools.combinations(PROJECTIONS, count)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("bias", BIASES, ids="+".join)
@pytest.mark.parametrize("case", ["plain/no-mask/self", "mask/per-batch/gqa", "bias/in-full/cross"])
def test_every_mistake_can_be_tried_where_some_projections_have_biases(case, bias):
    """A search that raised would take the verdict with it."""
    fixed = Fixed(bias=bias or False)
    maker = Maker(case_of(case).with_fixed(fixed).problem("float64"))
    assert {name for name in PROJECTIONS if f"{name}_bias" in maker.right.own} == set(bias)
    for hypothesis in hypotheses(maker):
        assert hypothesis.make().output.size
    for hypothesis in gradients.hypotheses(maker):
        assert hypothesis.make().gradients


@pytest.mark.parametrize("row", [np.nan, 0.0])
def test_nan_of_a_query_without_keys_is_not_judged_in_gradients_either(row):
    """As one input, lengths leave the first query without keys: 0 · NaN is NaN in a softmax."""
    case = case_of("feature/key-lengths-with-window/gqa").with_fixed(Fixed(sharing="self"))
    problem = case.problem("float32")
    empty = ~problem.allowed_in_full().any(axis=(1, 3))
    assert empty.any()
    right = solve(problem)
    output = np.where(empty[..., None], row, right.output)
    spoilt_key = np.full_like(right.gradients["weights.key"], np.nan)
    gradients = {**right.gradients, "weights.key": spoilt_key}
    answer = dataclasses.replace(right, output=output, gradients=gradients)
    found = without_masked_rows(answer, problem)
    assert np.isfinite(found.output).all()
    assert np.isnan(found.gradients["weights.key"]).any() == np.isfinite(row)
    wrong = {**gradients, "weights.key": 2 * right.gradients["weights.key"]}
    found = without_masked_rows(dataclasses.replace(answer, gradients=wrong), problem)
    np.testing.assert_array_equal(found.gradients["weights.key"], wrong["weights.key"])


def test_nothing_changes_where_nothing_is_fixed():
    for case in every_case():
        assert case_hash(case) == case_hash(dataclasses.replace(case, fixed=None))


def test_several_inputs_beside_each_other_compute_the_same():
    case = case_of("logits/huge/cross").with_fixed(Fixed(sharing="self"))
    problem = case.problem("float64")
    assert problem.shape.sharing == "self"
    shape = apart(problem.shape, FAMILIES["cross"].sharing)
    drawn = draw(shape, np.random.default_rng(0))
    several, one = (
        assembled(shape, drawn),
        assembled(problem.shape, joined(shape, drawn, problem.shape.query_width)),
    )
    first, second = (expect(each).arrays["output"] for each in (several, one))
    np.testing.assert_allclose(first, second, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"causal": "left"}, "say one of 'top-left', 'bottom-right', None"),
        ({"rotary_base": -1.0}, "say a number, 0 for none"),
        ({"rotary_size": 3}, "rotated in pairs"),
        ({"bias": ("qkv",)}, "some of query, key, value, output"),
        ({"bias": ("query", "key", "value", "output")}, "say True"),
        ({"sharing": "both"}, "say one of 'separate', 'memory', 'self', ''"),
        ({"scale": True}, "say a number"),
        ({}, "nothing"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, said):
    with pytest.raises(WrongDeclaration, match=said):
        Fixed(**fields)


def test_experiments_say_why_they_have_nothing_to_ask():
    pytest.importorskip("torch")
    outcome = examine(LLAMA, cases="probe/masks")
    (result,) = outcome.results
    assert result.verdict == "unsupported"
    assert "always causal" in result.findings[0].detail


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_mistake_is_found_by_exploring_and_the_script_shows_it(tmp_path, capsys, seed):
    pytest.importorskip("torch")
    text = Path(LLAMA.rpartition(":")[0]).read_text(encoding="utf-8")
    broken = text.replace("k = self.rotated(self.k_proj(x)", "k = (self.k_proj(x)")
    assert broken != text
    (tmp_path / "mine.py").write_text(broken, encoding="utf-8")
    spec = f"{tmp_path / 'mine.py'}:LlamaLike"
    arguments = ["explore", spec, "--examples", "20", "--dtype", "float32", "--seed", str(seed)]
    with contextlib.chdir(tmp_path):
        assert main(arguments) == ExitCode.DEVIATES
    told = capsys.readouterr().out
    assert "script: " in told
    assert "in another way" not in told


@pytest.mark.night
def test_nothing_deviates_when_layers_are_explored(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    for spec in LAYERS.values():
        assert main(["explore", spec, "--examples", "12", "--dtype", "float32"]) == ExitCode.OK
