"""Layers that keep a state: every way notices its mistakes, and the causes are the right ones."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from looped import for_each

pytest.importorskip("torch")

import torch
from mutants.stateful import HARMLESS, LAST_BITS, MISTAKES, Kept

from conformance import StatefulLayer, check_stateful, cli
from conformance.adapter.base import EQUAL_BITS
from conformance.adapters.ours.invariant import InvariantAttention
from conformance.adapters.ours.positions import Cache, Rotary
from conformance.errors import ConformanceError, ExitCode, Unsupported
from conformance.records.findings import BITS, WRONG, CaseResult, Phrase
from conformance.records.record import read
from conformance.running import isolation
from conformance.running.isolation import ProcessLimits
from conformance.stateful.checking import PROMISED, examine_stateful
from conformance.stateful.layer import PROMISES, find_stateful
from conformance.stateful.ways import SENTENCES, WAYS
from conformance.words import tables

FIRST = ("stateful.runs", "stateful.causal")


def serving(requirement):
    """The ways that serve a requirement, behind those that say whether there is a measure."""
    return [way for way in WAYS if way.requirement in (*FIRST, requirement)]


def found(layer, requirement):
    """The findings of a requirement on a layer."""
    done = examine_stateful(layer, ways=serving(requirement))
    every = [finding for result in done.results for finding in result.findings]
    return [finding for finding in every if finding.requirement == requirement]


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_noticed_and_named(name):
    known = MISTAKES[name]
    wrong = [
        finding
        for finding in found(Kept(mistake=name, **known.declared), known.requirement)
        if finding.verdict in WRONG
    ]
    assert wrong, "it survives"
    causes = {finding.cause.id for finding in wrong}
    assert not known.cause or known.cause in causes, causes


HERE = ("--dtype", "float32", "--no-isolate")
"""Options of a run in this process, where its own process is not the point."""


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_right_conforms(name):
    declared = {"dtypes": ("float32", "bfloat16"), **HARMLESS[name]}
    layer = Kept(mistake=name if name == "padding-has-positions" else "", **declared)
    done = examine_stateful(layer)
    assert not done.wrong, str(done)
    taken = {result.case for result in done.results if result.verdict == "conforms"}
    assert len(taken) > 23, str(done)


class Narrow(Kept):
    def wide(self, layer):
        raise Unsupported("no float64")


def test_without_float64_what_is_right_conforms_and_what_is_wrong_does_not():
    layer = Narrow(gain=4.0, dtypes=("float32", "bfloat16"))
    assert not examine_stateful(layer).wrong
    layer.mistake = "cache-in-bfloat16"
    assert examine_stateful(layer, ways=serving("stateful.steps")).wrong


class Three(Kept):
    """Three mistakes at once, of which each one shows in another call."""

    def feed_padded(self, layer, tokens, real):
        ring, layer.mistake = layer.mistake, "padding-attended"
        output = layer(tokens, real)
        layer.mistake = ring
        return output

    def rollback(self, layer, count):
        super().rollback(layer, count)
        layer.mistake = "positions-not-rolled-back"


@pytest.mark.night
def test_three_mistakes_at_once_are_told_apart():
    done = examine_stateful(Three(mistake="ring-off-by-one", window=16))
    causes = {result.case: finding.cause for result, finding in done.wrong}
    assert causes["stateful/steps"] == Phrase("stateful.window-shorter", {"tokens": 1})
    assert causes["stateful/left-padding"] == Phrase("stateful.padding-attended")
    assert causes["stateful/after-rollback"] == Phrase("stateful.positions-off")


class Two(Kept):
    """Two attentions with a window, one behind the other."""

    def build(self, dtype):
        import torch

        return torch.nn.ModuleList([super(Two, self).build(dtype) for _ in range(2)])

    def feed(self, layer, tokens):
        first, second = layer
        return second(tokens + first(tokens))


def test_windows_behind_each_other_reach_further():
    ways = [way for way in WAYS if way.name in ("steps", "reach", "before-window")]
    layer = Two(window=16)
    ((result, finding),) = examine_stateful(layer, ways=ways).wrong
    assert result.case == "stateful/before-window"
    assert finding.cause == Phrase("stateful.window-ignored")
    layer.stacked = True
    done = examine_stateful(layer, ways=ways)
    assert not done.wrong, str(done)
    verdicts = {result.case: result.verdict for result in done.results}
    assert verdicts["stateful/before-window"] == "unsupported"
    assert verdicts["stateful/reach"] == "conforms"


def test_every_requirement_is_served_and_has_a_mistake():
    served = {way.requirement for way in WAYS}
    assert served == {*SENTENCES} == {known.requirement for known in MISTAKES.values()}


def test_every_cause_is_told_of_a_mistake_and_has_advice():
    causes = {name for name in tables()["causes"] if name.startswith("stateful.")}
    told = {known.cause for known in MISTAKES.values()}
    assert told - {""} == causes - {"stateful.tokens-extra"}
    assert causes == {name for name in tables()["advice"] if name.startswith("stateful.")}


# Bits

PROMISING = {"dtypes": ("float32", "bfloat16"), "promises": dict.fromkeys(PROMISES, EQUAL_BITS)}


def bits(layer):
    """The findings on bits, by relation, and whether all ways conform to noise."""
    ways = [way for way in WAYS if any(way.name in names for names in PROMISED.values())]
    done = examine_stateful(layer, ways=ways)
    findings = [f for result in done.results if result.case == BITS for f in result.findings]
    return findings, all(it.verdict == "conforms" for it in done.results if it.case != BITS)


def test_promises_that_are_kept_conform():
    findings, near = bits(Kept(**PROMISING))
    assert {finding.verdict for finding in findings} == {"conforms"}
    assert len(findings) == 2 * len(PROMISES)
    assert near


@pytest.mark.night
@for_each(name=LAST_BITS)
def test_a_last_bit_breaks_a_promise_and_no_other_requirement(name):
    findings, near = bits(Kept(mistake=name, **PROMISING))
    broken = {finding.requirement for finding in findings if finding.verdict == "deviates"}
    assert f"bits.{LAST_BITS[name][0].replace(' ', '-')}" in broken
    assert near


def test_what_is_not_promised_is_observed():
    findings, _ = bits(Kept())
    values = {finding.requirement: finding.value.id for finding in findings}
    assert {finding.verdict for finding in findings} == {"observed"}
    assert values["bits.runs"] == "bits.equal"
    findings, _ = bits(Kept(mistake="positions-restart"))
    values = {finding.requirement: finding.value.id for finding in findings}
    assert values["bits.steps"] == values["bits.chunks"] == "bits.apart"


def test_zeros_of_both_signs_are_equal():
    class Signed(Kept):
        def feed(self, layer, tokens):
            return 0.0 * super().feed(layer, tokens) * (-1) ** tokens.shape[1]

    findings, _ = bits(Signed(promises={"steps": EQUAL_BITS, "chunks": EQUAL_BITS}))
    verdicts = {finding.requirement: finding.verdict for finding in findings}
    assert verdicts["bits.steps"] == verdicts["bits.chunks"] == "conforms"


# Gradients


class Graphless(Kept):
    """Computes no graph, although gradients are declared."""

    def feed(self, layer, tokens):
        return super().feed(layer, tokens).detach()


def gradients(layer):
    done = examine_stateful(layer, ways=serving("stateful.gradients"))
    found = {result.case.partition("/")[2]: result.findings[0] for result in done.results}
    return found["gradients-steps"], found["gradients-chunks"]


def test_gradients_are_asked_about_where_they_are_declared():
    assert {finding.verdict for finding in gradients(Kept())} == {"unsupported"}
    assert {finding.verdict for finding in gradients(Kept(differentiable=True))} == {"conforms"}
    for finding in gradients(Graphless(differentiable=True)):
        assert finding.verdict == "error"
        assert "no gradient with respect to the tokens" in finding.detail


def test_the_first_tokens_whose_gradients_differ_are_named():
    _, chunks = gradients(Kept(mistake="state-detached", differentiable=True))
    assert chunks.verdict == "deviates"
    assert chunks.value == Phrase("stateful.differs", {"step": 1, "start": 0, "stop": 6})


# Other frameworks


class InNumpy(StatefulLayer):
    """Attention with one head, in NumPy; `tokens` are kept and projected again in each call."""

    framework, width, dtypes, promises = "numpy", 8, ("float32", "float64"), {}
    copies = True

    def build(self, dtype):
        return {"tokens": np.zeros((0, 0, self.width), dtype)}

    def feed(self, layer, tokens):
        before = layer["tokens"].reshape(len(tokens), -1, self.width)
        every = np.concatenate([before, tokens], axis=1) if before.size else tokens
        layer["tokens"] = every.copy() if self.copies else every
        seen = np.tri(tokens.shape[1], every.shape[1], every.shape[1] - tokens.shape[1]) > 0
        logits = np.where(seen, tokens @ every.swapaxes(1, 2), -np.inf)
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return powers @ every / powers.sum(-1, keepdims=True)

    def reset(self, layer):
        layer["tokens"] = layer["tokens"][:0]


def test_a_layer_in_numpy_is_checked():
    done = examine_stateful(InNumpy)
    assert not done.wrong, str(done)
    assert done.counts["conforms"] > 25
    # Its first chunk is a part of its state.
    InNumpy.copies = False
    try:
        done = examine_stateful(InNumpy)
    finally:
        InNumpy.copies = True
    assert {finding.cause.id for _, finding in done.wrong} == {"stateful.inputs-kept"}


@pytest.mark.night
@pytest.mark.parametrize("name", ["Linen", "Nnx"])
def test_attentions_of_flax_overwrite_the_last_token_of_a_full_cache(name):
    pytest.importorskip("flax")
    path = Path(__file__).parents[1] / "docs" / "examples" / "flax_stateful.py"
    layer = find_stateful(f"{path}:{name}")
    assert layer is not None
    done = examine_stateful(layer)
    assert [result.case for result, _ in done.wrong] == ["stateful/full-buffer"], str(done)
    assert done.counts["conforms"] >= 15


def test_an_operator_of_onnxruntime_in_a_loop_conforms():
    pytest.importorskip("onnxruntime")
    path = Path(__file__).parents[1] / "docs" / "examples" / "onnxruntime_stateful.py"
    done = examine_stateful(find_stateful(f"{path}:Loop"))
    assert not done.wrong, str(done)
    assert done.counts["conforms"] >= 20


class Ours(StatefulLayer):
    """Our own attention with its cache, and bits that do not depend on how a text is fed."""

    framework = "torch"
    width = 32
    dtypes = ("float32", "bfloat16")
    kind = InvariantAttention
    promises = dict.fromkeys(PROMISES, "equal bits")

    def build(self, dtype):
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        turned = Rotary(8, 10000.0, False)
        layer = self.kind(32, 4, kv_heads=2, rotary=turned, sinks=True, dtype=kind)
        return {"layer": layer, "cache": Cache()}

    def feed(self, state, tokens):
        return state["layer"](tokens, causal="bottom-right", cache=state["cache"])

    def reset(self, state):
        state["cache"] = Cache()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", Ours.dtypes)
def test_our_invariant_attention_keeps_what_it_promises(dtype):
    done = examine_stateful(Ours, dtypes=dtype)
    assert not done.wrong, str(done)
    bits = next(result for result in done.results if result.case == BITS)
    assert {finding.verdict for finding in bits.findings} == {"conforms"}


# On the command line

LAYER = """
from mutants.stateful import Kept


class Layer(Kept):  # a StatefulLayer
    def __init__(self):
        super().__init__(mistake="mask-top-left")


right = Kept()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(LAYER)
    return path


@pytest.mark.night
def test_the_command_tells_the_cause(file, capsys):
    assert cli.main(["run", f"{file}:Layer"]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "aligned top-left" in printed
    assert "differs first in call 2, tokens 7 to 7" in printed
    assert cli.main(["run", f"{file}:Layer", "--strict"]) == ExitCode.DEVIATES
    assert cli.main(["run", f"{file}:right", "--strict"]) == ExitCode.OK


def test_a_module_is_named_as_for_other_implementations(file, capsys, monkeypatch):
    package = file.parent / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    (package / "layers.py").write_text("attention = None")
    monkeypatch.chdir(file.parent)
    assert find_stateful("mine.layers:attention") is None
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(LAYER)
    assert cli.main(["run", "mine.layers:right", "--dtype", "float32"]) == ExitCode.OK
    assert "steps                conforms" in capsys.readouterr().out
    for name in ("torch-mha", "mine.nothing:right", "nothing.py:right", "mine", ":right"):
        assert find_stateful(name) is None


def test_the_command_prints_what_was_found_as_data(file, capsys):
    assert cli.main(["run", f"{file}:right", "--json", *HERE]) == ExitCode.OK
    (layer,) = msgspec.json.decode(capsys.readouterr().out)
    results = msgspec.convert(layer["results"], list[CaseResult])
    assert {result.case for result in results} == {*(f"stateful/{w.name}" for w in WAYS), BITS}


def test_the_command_names_the_way_that_it_takes(file, capsys):
    assert cli.main(["run", f"{file}:right", "-v", *HERE]) == ExitCode.OK
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["whole float32", *(f"{way.name} float32" for way in WAYS)]


LOSSES = ("crashed", "timed-out")

LOST = """
import os, time
from pathlib import Path

from mutants.stateful import Kept


class Twice(Kept):
    def rollback(self, layer, count):
        os.abort()

    def save(self, layer):
        os._exit(0)


class Lost(Twice):  # a StatefulLayer
    def reorder(self, layer, rows):
        time.sleep(10**6)

    def feed_uncached(self, layer, tokens):
        self.kept = bytearray(2 * 10**9)
        time.sleep(10**6)


class Never(Kept):
    def feed(self, layer, tokens):
        while True:
            pass


class Again(Kept):
    def rollback(self, layer, count):
        os.abort()

    def feed(self, layer, tokens):
        mark = Path(__file__).with_name("fed")
        chunk = tokens.shape[1] == 17
        if chunk and mark.exists() and mark.read_text() != str(os.getpid()):
            os._exit(0)
        if chunk:
            mark.write_text(str(os.getpid()))
        return super().feed(layer, tokens)
"""


@pytest.fixture
def walker(tmp_path):
    """A function that returns the supervisor of a class in `LOST`."""
    made = []

    def walk(name, **limits):
        (tmp_path / "lost.py").write_text(LOST)
        made.append(isolation.Walker(f"{tmp_path}/lost.py:{name}", "cpu", ProcessLimits(**limits)))
        return made[-1]

    yield walk
    for each in made:
        each.close()


@pytest.mark.night
def test_a_process_that_is_lost_when_ways_are_taken_again_costs_the_bits(walker):
    ways = ["chunks-17", "after-rollback"]
    results = list(walker("Again").results("float32", ways, str))
    assert [result.case for result in results] == [*(f"stateful/{way}" for way in ways), BITS]
    assert [result.verdict for result in results] == ["conforms", "crashed", "crashed"]


@pytest.mark.night
@pytest.mark.parametrize(
    ("ways", "verdicts"),
    [
        (["after-rollback", "restored"], ["crashed", "crashed", "not-run"]),
        (
            ["after-rollback", "rows-reordered", "restored"],
            ["crashed", "conforms", "crashed", "unsupported"],
        ),
    ],
)
def test_deaths_in_a_row_are_counted(walker, ways, verdicts):
    found = list(walker("Twice", deaths=2).results("float32", ways, str))
    assert [result.case for result in found] == [*(f"stateful/{way}" for way in ways), BITS]
    assert [result.verdict for result in found] == verdicts


@pytest.mark.night
def test_what_ends_the_process_of_a_layer_costs_one_way(tmp_path, capsys):
    path = tmp_path / "lost.py"
    path.write_text(LOST)
    asked = ["--dtype", "float32", "--json", "--item-timeout", "4", "--memory-limit", "1900"]
    assert cli.main(["run", f"{path}:Lost", *asked]) == ExitCode.OK
    (layer,) = msgspec.json.decode(capsys.readouterr().out)
    results = msgspec.convert(layer["results"], list[CaseResult])
    lost = {it.case: it.findings[0] for it in results if it.findings[0].verdict in LOSSES}
    assert {way.partition("/")[2]: finding.verdict for way, finding in lost.items()} == {
        "cache-off": "crashed",
        "after-rollback": "crashed",
        "rows-reordered": "timed-out",
        "reordered-padded": "timed-out",
        "rows-dropped": "timed-out",
        "restored": "crashed",
    }
    assert "SIGABRT" in lost["stateful/after-rollback"].detail
    assert "more than 1900 MiB" in lost["stateful/cache-off"].detail
    assert "exit code 0" in lost["stateful/restored"].detail
    assert {result.case for result in results} == {*(f"stateful/{w.name}" for w in WAYS), BITS}


def test_a_layer_that_never_answers_is_left(tmp_path, capsys):
    path = tmp_path / "lost.py"
    path.write_text(LOST)
    asked = ["--dtype", "float32", "--item-timeout", "2"]
    assert cli.main(["run", f"{path}:Never", *asked]) == ExitCode.NOTHING_VERIFIED
    printed = capsys.readouterr().out
    assert "1 timed-out" in printed
    assert "whole" in printed


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--case", "steps"], "--case: a layer that keeps a state is checked with all ways"),
        (["--dtype", "float33"], "unknown dtype 'float33'; did you mean float32"),
        (["-x"], "-x: a layer that keeps a state needs no pytest"),
        (["torch-mha"], "torch-mha: run it without layers that keep a state"),
    ],
)
def test_a_wrong_option_is_an_error_of_one_line(file, capsys, arguments, told):
    assert cli.main(["run", f"{file}:right", *arguments]) == ExitCode.USAGE
    printed = capsys.readouterr().err
    assert told in printed
    assert len(printed.splitlines()) == 1


def test_a_layer_that_is_not_there_is_an_error_with_names_near_it(file, capsys):
    assert cli.main(["run", f"{file}:Layr"]) == ExitCode.USAGE
    assert "did you mean Layer?" in capsys.readouterr().err
    assert cli.main(["run", str(file)]) == ExitCode.USAGE
    assert f"name the layer in it, {file}:Layer" in capsys.readouterr().err


def test_a_record_is_kept_for_the_gate(file, capsys, tmp_path):
    record, baseline = tmp_path / "records" / "mine.json", tmp_path / "known.toml"
    asked = ["--record", str(record), *HERE]
    judged = ["--from-record", str(record), "--baseline", str(baseline)]
    baseline.write_text("")
    assert cli.main(["run", f"{file}:Layer", *asked]) == ExitCode.OK
    assert f"record: {record}" in capsys.readouterr().out
    kept = read(record)
    (own,) = kept.header.implementations
    assert own.digest
    assert own.versions["torch"]
    assert kept.header.cases["stateful/steps"].why == SENTENCES["stateful.steps"]
    assert {result.case for result in kept.results} == {*(f"stateful/{w.name}" for w in WAYS), BITS}
    assert cli.main(["gate", *judged]) == ExitCode.DEVIATES
    printed = capsys.readouterr().out
    assert "stateful/chunks-17: differs first in call 2, tokens 17 to 33:" in printed
    assert "aligned top-left" in printed
    assert f"again: mha-conformance run {file}:Layer --dtype float32 --strict" in printed
    # What is known is no failure, and what is mended must be taken out.
    assert cli.main(["baseline", "update", *judged, "--reason", "until mended"]) == ExitCode.OK
    assert cli.main(["gate", *judged]) == ExitCode.OK
    mended = file.with_name("mended.py")
    mended.write_text(LAYER.replace('mistake="mask-top-left"', ""))
    assert cli.main(["run", f"{mended}:Layer", *asked]) == ExitCode.OK
    capsys.readouterr()
    assert cli.main(["gate", *judged]) == ExitCode.DEVIATES
    assert "fixed" in capsys.readouterr().out
    assert read(record).header.implementations[0].digest != own.digest


# In a test


def test_a_deviation_is_an_assertion_error():
    declared = {"dtypes": ("float32",)}
    assert check_stateful(Kept(**declared)).counts["conforms"] > 20
    with pytest.raises(AssertionError, match="aligned top-left"):
        check_stateful(Kept(mistake="mask-top-left", **declared))


class Broken(Kept):
    def build(self, dtype):
        raise ValueError("no\nlayer")


class Nothing(Kept):
    def build(self, dtype):
        return None


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (Nothing(), r"Llama: build\('float32'\) returns None; return the layer"),
        (Broken(), r"Llama: build\('float32'\) raises ValueError: no layer"),
        (Kept(width=0), "width must be the size of an embedding"),
        (Kept(window=0), "window must be a positive number, is 0"),
        (Kept(capacity=31), "capacity is 31; the ways need 32"),
        (Kept(dtypes=("float33",)), "unknown dtype 'float33'"),
        (Kept(promises={"step": "equal bits"}), "unknown promise 'step'; did you mean steps"),
        (Kept(promises={"steps": "noise"}), "'steps' can be 'equal bits', not 'noise'"),
        (Kept(framework="torhc"), "unknown framework 'torhc'; did you mean torch"),
        (StatefulLayer, "StatefulLayer does not define build, feed"),
        (object(), "object is no stateful layer"),
    ],
)
def test_a_wrong_declaration_is_an_error_of_one_line(layer, told):
    with pytest.raises(ConformanceError, match=told) as raised:
        check_stateful(layer)
    assert "\n" not in str(raised.value)


def test_what_a_layer_lacks_is_unsupported_and_what_it_raises_an_error():
    class Bare(StatefulLayer):
        width, dtypes, build, feed = 32, ("float32",), Kept.build, lambda _, layer, x: layer(x)
        mistake, window, capacity, promises, gain = "", None, None, {}, 1.0

        def rollback(self, layer, count):
            raise KeyError("no cache")

    done = examine_stateful(Bare)
    verdicts = {result.case: result.verdict for result in done.results}
    assert verdicts["stateful/after-rollback"] == "error"
    assert verdicts["stateful/after-reset"] == verdicts["stateful/left-padding"] == "unsupported"
    assert verdicts["stateful/chunks-17"] == "conforms"
    printed = str(done)
    assert "error: an exception is raised" in printed
    assert re.search(r"KeyError: 'no cache' \(at test_stateful\.py:\d+\)", printed)


def test_a_layer_of_which_every_call_raises_verifies_nothing(tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(
        "from mutants.stateful import Kept, StatefulLayer\n\n\n"
        "class Raises(Kept, StatefulLayer):\n"
        "    def feed(self, *given, **options):\n        raise KeyError('no cache')\n"
    )
    assert cli.main(["run", f"{path}:Raises", *HERE]) == ExitCode.NOTHING_VERIFIED
    assert re.search(r"^Llama: \d+ error\n", capsys.readouterr().out)


def test_a_class_takes_back_what_it_inherits():
    class Ring(Kept):
        reset = None

        def rollback(self, layer, count):
            raise NotImplementedError("the ring has overwritten them")

        def reorder(self, layer, rows):
            raise NotImplementedError

    reasons = {
        result.case: result.findings[0].detail
        for result in examine_stateful(Ring()).results
        if result.verdict == "unsupported"
    }
    assert reasons["stateful/after-reset"] == "it does not reset"
    assert reasons["stateful/after-rollback"] == "the ring has overwritten them"
    assert reasons["stateful/rows-dropped"] == "not implemented"


@for_each(
    feed=[
        lambda layer, tokens: None,
        lambda layer, tokens: layer(tokens)[:, -1:],
        lambda layer, tokens: layer(tokens) / 0,
    ]
)
def test_an_answer_that_is_none_is_an_error(feed):
    class Odd(Kept):
        def feed(self, layer, tokens):
            return feed(layer, tokens)

    done = examine_stateful(Odd())
    assert {result.verdict for result in done.results} == {"error"}
