"""Inputs that contradict each other: what is read beyond an array, and what ends a process."""

from __future__ import annotations

from pathlib import Path

import einops
import numpy as np
import pytest
from mutants import faulty
from mutants.fakes import entries, laboratory, values
from mutants.miniatures import Correct, Raw

from conformance import examine
from conformance.adapter.base import Call
from conformance.cases.catalogue import catalogue
from conformance.errors import Unsupported
from conformance.experiments import experiment
from conformance.frameworks.base import GUARD
from conformance.records.record import decode_line
from conformance.requirements.probed import decided
from conformance.running import isolation
from conformance.running.isolation import ProcessLimits, Supervisor
from conformance.running.session import Inquiry, Item, Session
from conformance.words import say

BEYOND = "call.reads-only-what-it-is-given"
QUICK = ProcessLimits(item=1.0, start=30.0, memory=2048.0, deaths=3)
SHORT = "fewer values than keys"
READS = "reads beyond an array"
FILE = Path(faulty.__file__)


def spec(name):
    return f"{FILE}:{name}"


@pytest.fixture
def supervisor():
    """A function that supervises one of the attentions in `mutants.faulty`."""
    made = []

    def start(name, limits=QUICK):
        made.append(Supervisor(spec(name), "cpu", limits))
        return made[-1]

    yield start
    for one in made:
        one.close()


def inquiry(adapter):
    adapter.name = type(adapter).__name__
    return Inquiry(adapter, experiment("bad-input"), "float32", "cpu", adapter.modes[0])


def card(result):
    return {say(entry.subject): say(entry.value) for entry in result.entries}


def verdict(result):
    return {finding.requirement: finding.verdict for finding in result.findings}[BEYOND]


# In this process


@pytest.mark.parametrize(
    ("kind", "subject"),
    [
        (faulty.CountsByTheKeys, SHORT),
        (faulty.CountsByTheLogits, "too few keys in mask"),
        (faulty.CountsByTheLogits, "too few queries in mask"),
        (faulty.ReadsFloats, "queries of another dtype"),
    ],
)
def test_numbers_beyond_an_array_show_in_the_answer(kind, subject):
    found = entries(kind(), "bad-input")
    beyond = {told for told, entry in found.items() if say(entry.value) == READS}
    assert subject in beyond
    (finding,) = decided("bad-input", [*found.values()])
    assert (finding.requirement, finding.verdict) == (BEYOND, "deviates")
    assert subject in {entry for entry in beyond if entry in finding.detail} or len(beyond) > 1


@pytest.mark.parametrize("mutant", [Correct, faulty.Truncates])
def test_what_only_answers_or_raises_is_no_deviation(mutant):
    found = entries(mutant(), "bad-input")
    assert READS not in {say(entry.value) for entry in found.values()}
    (finding,) = decided("bad-input", [*found.values()])
    assert finding.verdict == "conforms"


class Stretching(Correct):
    """Broadcasts keys and values of length 1, as `logits * value` does where a sum is meant."""

    def attend(self, query, key, value, masks, **options):
        longest = max(key.shape[2], value.shape[2])
        key, value = (
            np.repeat(array, longest, axis=2) if array.shape[2] == 1 else array
            for array in (key, value)
        )
        return super().attend(query, key, value, masks, **options)


def test_an_answer_is_that_of_a_call_that_is_well_defined():
    truncated, broadcast = values(faulty.Truncates(), "bad-input"), values(Correct(), "bad-input")
    assert truncated[SHORT].endswith("as if cut to the shorter")
    assert truncated["fewer keys than values"].endswith("as if cut to the shorter")
    assert broadcast[SHORT] == "refused"
    assert broadcast["values of a batch of 1"].endswith("as if broadcast")
    assert truncated["keys of length 1"].endswith("as if cut to the shorter")
    assert values(Stretching(), "bad-input")["keys of length 1"].endswith("as if broadcast")
    # einsum broadcasts, so the weight of the single key, which is 1, serves every value.
    assert broadcast["keys of length 1"].endswith("as if the values were added up")
    assert broadcast["values of length 1"].endswith("as if broadcast")
    assert broadcast["mask of several queries, inputs of 1"].endswith("as if broadcast")
    assert broadcast["queries of another dtype"].endswith("as if cast")


def test_float64_beside_float32_is_cast_or_promoted_or_refused():
    found = values(Correct(), "bad-input")
    assert found["queries in float64"].endswith("as if all were float64")
    assert found["keys in float64"].endswith("as if cast")
    assert "inputs in float64, weights not" not in found, "a function has no weights"
    assert values(faulty.ReadsFloats(), "bad-input")["queries in float64"].endswith("]")

    class Strict(Correct):
        def attend(self, query, key, value, masks, **options):
            if len({array.dtype for array in (query, key, value)}) > 1:
                raise TypeError("one dtype, please")
            return super().attend(query, key, value, masks, **options)

    assert values(Strict(), "bad-input")["values in float64"] == "refused"


def test_a_layer_is_given_inputs_wider_than_its_weights():
    pytest.importorskip("torch")
    from conformance.adapter.loading import load

    found = values(load("torch-mha"), "bad-input")
    assert found["inputs in float64, weights not"] == "refused"


class Nested(Correct):
    """Takes two batch axes, which it joins, with each other or with the length."""

    joined = "a b heads length head -> (a b) heads length head"

    def attend(self, query, key, value, masks, **options):
        if query.ndim == 4:
            return super().attend(query, key, value, masks, **options)
        inputs = (einops.rearrange(array, self.joined) for array in (query, key, value))
        context, _ = super().attend(*inputs, masks, **options)
        left, right = reversed(self.joined.split(" -> "))
        return einops.rearrange(context, f"{left} -> {right}", a=len(query), b=query.shape[1])


class OneSequence(Nested):
    joined = "a b heads length head -> a heads (b length) head"


def test_a_second_batch_axis_is_one_or_belongs_to_the_length():
    two = "inputs with two batch axes"
    assert values(Nested(), "bad-input")[two].endswith("as with one batch axis")
    assert values(OneSequence(), "bad-input")[two].endswith("were one sequence")
    assert values(Correct(), "bad-input")[two] == "refused"


def test_masks_larger_than_an_axis_of_1():
    found = values(Correct(), "bad-input")
    assert found["mask of several keys, inputs of one"].endswith("as if broadcast")
    assert found["mask of two heads, inputs of one"].startswith("an answer of shape")


def test_an_error_is_told_with_its_class_and_first_line():
    found = entries(Correct(), "bad-input")["mask transposed"]
    assert found.evidence.startswith("ValueError: operands could not be broadcast")
    assert "mask bool[2, 6, 5, 4]" in found.evidence


def test_arrays_are_surrounded_and_hold_the_same():
    adapter, problem = Correct(), laboratory(Correct()).problem()
    bridge = adapter.bridge
    for around in (np.nan, 0.0):
        for array in (np.arange(6.0).reshape(2, 3), np.ones((2, 2), np.bool_), np.arange(4)):
            native = bridge.surrounded(bridge.array(array, "float32", "cpu"), around, "cpu")
            assert native.flags.c_contiguous
            assert np.array_equal(native, array)
            beside = native.base.ravel()[[0, GUARD - 1, -1]].astype(np.float64)
            wanted = around if native.dtype == np.float32 else float(bool(around))
            assert np.array_equal(beside, np.full(3, wanted), equal_nan=True)
    plain = adapter.run(problem, Call(adapter.modes[0]))
    assert np.array_equal(adapter.run(problem, Call(around=np.nan)).output, plain.output)


def test_an_adapter_of_numpy_arrays_has_nothing_to_ask():
    with pytest.raises(Unsupported, match="NumPy arrays"):
        entries(Raw(), "bad-input")


def test_every_question_is_asked_once():
    subjects = [q.subject for q in experiment("bad-input").questions(laboratory(Correct()))]
    assert len(set(map(str, subjects))) == len(subjects)


# In a process of its own


def test_a_process_of_its_own_finds_the_same(supervisor):
    asked = inquiry(faulty.Truncates())
    apart = supervisor("Truncates").inquire(asked)
    assert card(apart) == values(faulty.Truncates(), "bad-input")
    assert Session().inquire(asked)[0].findings == apart.findings


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("Ending", "ends the process", "SIGSEGV"),
        ("EndsInSilence", "ends the process", "exit code 0"),
        ("Ponders", "does not end", "no answer within 1 s"),
    ],
)
def test_an_end_costs_one_question(supervisor, name, value, told):
    found = supervisor(name).inquire(inquiry(getattr(faulty, name)()))
    seen = card(found)
    assert seen[SHORT] == value
    assert told in next(e.evidence for e in found.entries if say(e.subject) == SHORT)
    assert set(seen) == set(values(faulty.Fine(), "bad-input"))
    # Too few values are asked for twice.
    assert list(seen.values()).count(value) == 2
    assert verdict(found) == "deviates"


@pytest.mark.night
def test_time_in_which_a_process_waits_for_a_processor_does_not_count(supervisor, monkeypatch):
    monkeypatch.setattr(isolation, "_activity", lambda *_, **__: (0.0, False))
    seen = card(supervisor("Hesitates").inquire(inquiry(faulty.Hesitates())))
    assert seen[SHORT] != "does not end"
    assert "does not end" not in seen.values()


@pytest.mark.night
def test_a_process_that_never_gets_a_processor_is_given_up(supervisor, monkeypatch):
    monkeypatch.setattr(isolation, "_activity", lambda *_, **__: (0.0, False))
    monkeypatch.setattr(isolation, "SLOWEST", 3)
    one = supervisor("Ponders", ProcessLimits(item=5.0, start=30.0, memory=2048.0, deaths=3))
    seen = card(one.inquire(inquiry(faulty.Ponders())))
    assert seen[SHORT] == "does not end"


def test_a_process_that_always_ends_is_not_started_forever(supervisor):
    found = supervisor("EndsAlways").inquire(inquiry(faulty.EndsAlways()))
    assert {"ends the process", "cannot be asked"} <= set(card(found).values())
    assert verdict(found) == "deviates"


def test_what_follows_gets_a_process_that_saw_no_such_input(supervisor):
    # Computing what is expected takes longer than the other tests grant an item.
    one = supervisor("Fine", ProcessLimits())
    one.start()
    first = one._process
    row = inquiry(faulty.Fine())
    assert decode_line(one.examine(row, -1))[0].entries
    assert one._process is first
    (case,) = [case for case in catalogue() if case.id == "plain/no-mask/self"]
    item = Item(row.adapter, case, "float32", "cpu", row.mode)
    result = decode_line(one.examine(item, -1))[0]
    assert result.verdict == "conforms", result
    assert one._process is not first


def test_a_call_of_examine_survives_what_ends_a_process():
    outcome = examine(spec("Ending"), cases="probe/bad-input", modes=())
    assert {row["value"] for row in outcome.card} >= {"ends the process"}
    assert outcome.worst["requirement"] == BEYOND


def test_a_local_implementation_has_no_process_of_its_own():
    class Local(faulty.Ending):
        pass

    (result,) = examine(Local, cases="probe/bad-input").results
    assert result.verdict == "unsupported"
    assert "process of its own" in result.findings[0].detail
