"""Promises of equal bits: each is broken by a last bit, and kept where no bit differs."""

from __future__ import annotations

import numpy as np
import pytest
from looped import for_each

pytest.importorskip("torch")

import torch
from mutants.fakes import entries, laboratory
from mutants.miniatures import Correct
from mutants.promises import BROKEN, TORCH, Exact

from conformance.adapter.base import EQUAL_BITS, PROMISES
from conformance.adapter.loading import adapted
from conformance.definition.expectation import expect
from conformance.errors import UnknownName, WrongDeclaration
from conformance.experiments import experiment
from conformance.experiments.repeatability import CHUNKS, RELATIONS
from conformance.records.findings import Phrase
from conformance.requirements.examination import Workbench
from conformance.requirements.probed import is_promise
from conformance.running.session import Inquiry, Session

PROMISED, DECLARES = "bits.are-as-promised", "adapter.declares-what-is-observed"


def findings(adapter):
    """The entries of the experiment, and its findings by requirement."""
    asked = experiment("repeatability")
    row = Inquiry(adapter, asked, adapter.dtypes[0], "cpu", adapter.modes[0])
    result = Session().inquire(row)[0]
    return result.entries, {finding.requirement: finding for finding in result.findings}


def dtypes_of(name):
    dtypes = [dtype for dtype in ("bfloat16", "float16") if name.endswith(dtype)]
    return ("float32", *dtypes)


def test_every_promise_is_asked_about_and_broken_by_a_mistake():
    assert {relation.promise for relation in RELATIONS} == {*PROMISES}
    assert {broken.promise for broken in BROKEN.values()} == {*TORCH}


def test_promises_that_are_kept_conform():
    adapter = Exact(dtypes=("float32", "bfloat16"))
    seen, found = findings(adapter)
    assert found[PROMISED].verdict == "conforms"
    assert found[DECLARES].verdict == "observed", "a promise is no convention"
    assert all(is_promise(entry) and entry.value.id == "again.same-bits-at" for entry in seen)
    subjects = {f"again.{relation.name}" for relation in RELATIONS} - {"again.compiled"}
    masks = {"again.mask-strided", "again.mask-window"}
    assert {entry.subject.id for entry in seen} == subjects | masks


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", BROKEN)
def test_a_last_bit_breaks_a_promise(name):
    broken = BROKEN[name]
    adapter = Exact(name, dtypes_of(name), [broken.promise])
    seen, found = findings(adapter)
    assert found[PROMISED].verdict == "deviates"
    wrong = {entry.subject.id for entry in seen if not entry.agrees}
    assert wrong <= {f"again.{end}" for end in broken.subjects}
    assert wrong
    assert {entry.value.id for entry in seen if not entry.agrees} == {"again.within-noise"}


def test_what_is_not_promised_is_observed():
    seen, found = findings(Exact("batch-of-one", promises=["steps"]))
    values = {entry.subject.id: entry.value.id for entry in seen}
    assert values["again.alone"] == "again.within-noise"
    assert values["again.batches"] == values["again.steps"] == "again.same-bits-at"
    assert found[PROMISED].verdict == "conforms"
    _, found = findings(Exact("batch-of-one", promises=[]))
    assert PROMISED not in found


class OfWhole(Exact):
    """Has other last bits for a part of the queries."""

    def attend(self, query, key, value, masks, **options):
        output = super().attend(query, key, value, masks, **options)
        return output if query.shape[2] > CHUNKS[-1] else output * (1 + 2.0**-22)


def test_the_noise_of_a_problem_is_computed_once():
    asked = []

    def expecting(problem, *, gradients):
        asked.append((problem.digest(), gradients))
        return expect(problem, gradients=gradients)

    adapter = OfWhole(promises=["steps", "chunks"])
    row = Inquiry(adapter, experiment("repeatability"), "float32", "cpu", adapter.modes[0])
    seen = Session(Workbench(expect=expecting)).inquire(row)[0].entries
    values = {entry.subject.id: entry.value.id for entry in seen}
    assert values["again.steps"] == values["again.chunks"] == "again.within-noise"
    assert len(asked) == len({*asked}) > 0


class Apart(Exact):
    """Gives something else for a single query, by far more than noise."""

    def attend(self, query, key, value, masks, **options):
        output = super().attend(query, key, value, masks, **options)
        return 1.1 * output if query.shape[2] == 1 else output


def test_what_is_not_even_within_noise_is_said():
    seen, found = findings(Apart(promises=["steps"]))
    values = {entry.subject.id: entry.value.id for entry in seen}
    assert values["again.steps"] == "again.apart"
    assert found[PROMISED].verdict == "deviates"
    assert found[PROMISED].detail == "one query at a time and all at once: apart"


@pytest.mark.night
@for_each(
    expected=[
        ("keys-split-by-batch", "batch", "bits.keys-divided-by-batch"),
        ("one-query", "steps", "bits.path-for-one-query"),
        ("few-keys", "steps", ""),
        ("batch-of-one", "batch", ""),
        ("batch-of-one-in-bfloat16", "batch", ""),
        ("every-other-call", "steps", ""),
    ]
)
def test_what_breaks_them_is_named_where_an_experiment_decides(expected):
    name, promise, cause = expected
    _, found = findings(Exact(name, dtypes_of(name), [promise]))
    assert found[PROMISED].cause == Phrase(cause), found[PROMISED]


class Threaded(Exact):
    """Adds up in another order in every other call, except on one thread."""

    def attend(self, query, key, value, masks, **options):
        output = super().attend(query, key, value, masks, **options)
        if torch.get_num_threads() > 1 and self._calls % 2:
            return torch.nextafter(output, torch.full_like(output, torch.inf))
        return output


@pytest.mark.night
def test_threads_are_named():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen, found = findings(Threaded(promises=["runs"]))
    finally:
        torch.set_num_threads(before)
    assert found[PROMISED].cause == Phrase("bits.of-threads")
    on_one = Phrase("again.on-one-thread", {"of": Phrase("again.twice")})
    assert on_one in {entry.subject for entry in seen}


class Signed(Exact):
    """Gives −0 for a single entry, and 0 for several."""

    def attend(self, query, key, value, masks, **options):
        output = super().attend(query, key, value, masks, **options)
        return torch.zeros_like(output) * (-1.0 if len(query) == 1 else 1.0)


def test_zeros_of_both_signs_are_equal():
    _, found = findings(Signed(promises=["batch"]))
    assert found[PROMISED].verdict == "conforms"


class OnlySelf(Exact):
    """Has no segments, and no queries apart from its keys."""

    features = ()


def test_a_promise_that_cannot_be_examined_is_not_kept():
    seen, found = findings(OnlySelf(promises=["packing", "runs"]))
    assert found[PROMISED].verdict == "unsupported"
    assert found[PROMISED].detail == "alone and packed: not examined"
    (entry,) = (entry for entry in seen if entry.subject.id == "again.packed")
    assert entry.evidence == "no segments"


def test_an_attention_in_numpy_is_observed():
    # `einsum` multiplies matrices in NumPy, which may add up in another order for another size.
    found = entries(Correct(), "repeatability")
    assert found["asked twice"].value.id == "again.same-bits-at"
    assert "one query at a time and all at once" in found
    assert "alone and packed" not in found
    assert "on another number of threads" not in found


def test_projections_of_the_suite_take_no_part():
    problem = laboratory(Exact()).drawn(laboratory(Exact()).sizes(), 8)
    assert problem.heads_alone
    assert np.array_equal(problem.query, np.float32(problem.query))


@for_each(
    wrong=[
        ({"step": EQUAL_BITS}, UnknownName, "unknown promise 'step'; did you mean steps"),
        ({"steps": "noise"}, WrongDeclaration, "'steps' can be 'equal bits', not 'noise'"),
        (("steps",), WrongDeclaration, "promises must be a dictionary of texts"),
    ]
)
def test_a_wrong_promise_is_an_error_of_one_line(wrong):
    promises, kind, told = wrong

    class Wrong(Correct):
        pass

    Wrong.promises = promises
    with pytest.raises(kind, match=told) as raised:
        adapted(Wrong, "wrong")
    assert "\n" not in str(raised.value)
