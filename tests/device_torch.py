"""The bridge to torch, adapters and commands on a stand-in for a GPU; see test_device.py."""

import gc
import math
import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import standin
import torch
from devices import MASK, NUMBERS, assert_same_verdicts
from standin import STATE
from test_flash_attention import NAMES, stand_in, without_gpu  # noqa: F401 - a fixture

from conformance import (
    Cache,
    Call,
    CausalFlag,
    Packed,
    assert_conforms,
    attention_function,
    parametrize_with_checks,
)
from conformance.adapter.arguments import NO_MASK
from conformance.adapter.loading import load
from conformance.cases.catalogue import case_of
from conformance.cli import main
from conformance.definition.expectation import expect
from conformance.errors import Unavailable, Unsupported, WrongAnswer
from conformance.explore.drawing import Frame, Recipe
from conformance.explore.script import script
from conformance.explore.trial import Trial, TrialDeviation
from conformance.frameworks import framework, torch_bridge
from conformance.frameworks.torch_bridge import _check_dtype
from conformance.long.calling import call
from conformance.long.ladder import BEYOND, Ladder, LongLimits
from conformance.long.problem import draw
from conformance.records.numbers import LIMIT
from conformance.records.record import decode_line
from conformance.running.examine import examine
from conformance.running.isolation_child import (
    Declare,
    Declared,
    Ended,
    Examine,
    Examined,
    RequestHandler,
    plan_key,
)

standin.register()
os.environ["KERAS_BACKEND"] = "torch"  # also if another library imports Keras first
BRIDGE = framework("torch")
CASE = "mask/per-batch/self"
PROBLEM = case_of(CASE).problem("float32")
FEW = ("plain/no-mask/cross", CASE)


@pytest.fixture(autouse=True)
def nothing_is_left_from_the_last_test():
    STATE.fresh()
    BRIDGE._state.__init__()
    gc.collect()


@attention_function("torch", MASK)
def honest(query, key, value, mask=None):
    """Attend where everything lies."""
    logits = query / math.sqrt(query.shape[-1]) @ key.mT
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    return torch.softmax(logits, dim=-1) @ value


@attention_function("torch")
def no_array(query, key, value):
    """Return what is no tensor."""
    return "nothing"


def lies(array):
    return BRIDGE.device_of(array), BRIDGE.numpy(array).tolist()


# The bridge


def test_the_device_is_known_by_the_name_that_it_gives_itself():
    assert BRIDGE.devices() == {"cpu": "torch on the CPU", "gpu": "Stand-in 1000"}


@pytest.mark.parametrize(
    ("cuda", "cudnn", "hip", "number"),
    [("13.0", "9.10.2", "", 91002), ("12.1", "8.9.7", "", 8907), ("", "", "6.4", None)],
)
def test_the_toolkit_is_known(monkeypatch, cuda, cudnn, hip, number):
    monkeypatch.setattr(torch.version, "cuda", cuda or None)
    monkeypatch.setattr(torch.version, "hip", hip or None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert BRIDGE.toolkit() == {"CUDA": cuda, "cuDNN": cudnn, "ROCm": hip}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_arrays_lie_on_the_device_and_come_back(dtype):
    for values in (NUMBERS, NUMBERS > 5, NUMBERS.astype(np.int32)):
        assert lies(BRIDGE.array(values, dtype, "gpu")) == ("gpu", values.tolist())
        assert lies(BRIDGE.array(values, dtype, "cpu")) == ("cpu", values.tolist())


@pytest.mark.parametrize("how", ["gaps", "transposed", "window", "expanded"])
def test_arrays_with_strides_lie_on_the_device(how):
    for values in (NUMBERS, NUMBERS > 5):
        array = BRIDGE.array(values, "float32", "gpu")
        assert lies(BRIDGE.strided(array, how, "gpu")) == ("gpu", values.tolist())
        assert lies(BRIDGE.surrounded(array, np.nan, "gpu")) == ("gpu", values.tolist())


def test_parameters_are_moved_and_written_on_the_device():
    layer = BRIDGE.place(torch.nn.Linear(4, 3), "gpu")
    numbers = {"weight": NUMBERS[0], "bias": NUMBERS[1, :, 0]}
    loaded = BRIDGE.load(layer, numbers, "float32", "gpu")
    assert {name: lies(array) for name, array in loaded.items()} == {
        name: ("gpu", values.tolist()) for name, values in numbers.items()
    }
    array = BRIDGE.array(NUMBERS, "float32", "gpu")
    BRIDGE.overwrite(array, 2 * array)
    assert lies(array) == ("gpu", (2 * NUMBERS).tolist())
    assert lies(BRIDGE.take(array, np.array([1, 0]))) == ("gpu", (2 * NUMBERS[::-1]).tolist())


def test_the_random_generator_of_the_device_is_a_setting():
    names = [setting.name for setting in BRIDGE.settings]
    (place,) = [
        n for n, name in enumerate(names) if name.endswith("generator of torch's accelerator")
    ]
    setting = BRIDGE.settings[place]
    before = setting.get()
    drawn = torch.rand(3, device="standin").tolist()
    assert setting.get() != before
    setting.put(before)
    assert torch.rand(3, device="standin").tolist() == drawn


def test_the_kernels_of_sdpa_are_a_setting_that_records_name():
    (setting,) = [one for one in BRIDGE.settings if one.name.startswith("torch's kernels of")]
    assert setting.recorded
    assert setting.get() == "flash, mem_efficient, math, cudnn"
    torch.backends.cuda.enable_cudnn_sdp(False)
    assert setting.get() == "flash, mem_efficient, math"
    setting.put("flash, cudnn")
    assert setting.get() == "flash, cudnn"
    assert not torch.backends.cuda.math_sdp_enabled()
    setting.put("flash, mem_efficient, math, cudnn")
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_dtype_that_the_device_lacks_is_unsupported():
    STATE.lacks = {torch.float64}
    _check_dtype.cache_clear()
    try:
        with pytest.raises(Unsupported, match="standin has no float64"):
            honest.run(PROBLEM.replace(dtype="float64"), Call(device="gpu"))
        assert honest.run(PROBLEM, Call(device="gpu")).gradients
    finally:
        _check_dtype.cache_clear()


# Adapters: every item gets the verdict that it gets on the CPU

SOME = [
    "mask/key-padding/self",
    "mask/per-head/self",
    "bias/per-head/self",
    "mask/key-padding/additive",
    "causal/bottom-right/gqa",
    "causal/square/self",
    "edge/fully-masked-row/self",
    "feature/cache-rotary/gqa",
    "feature/norm-with-rotary/gqa",
    "feature/gpt-oss/gqa",
    "feature/segments/self",
    "feature/alibi-in-models/self",
    "feature/key-lengths/cross",
    "feature/lengths-causal/separate",
    "feature/key-lengths-causal/decoding",
]


@pytest.mark.parametrize(
    ("name", "modes", "cases"),
    [
        ("ours", "train", SOME[:3]),
        ("torch-mha", "train eval", SOME[:4]),
    ],
)
def test_verdicts_are_those_of_the_cpu(name, modes, cases):
    assert_same_verdicts(name, cases, modes.split())


@pytest.mark.parametrize(
    ("name", "modes", "cases"),
    [
        ("ours", "train", SOME[3:]),
        ("torch-mha", "train eval", SOME[4:8]),
        ("torch-sdpa", "", SOME[:8]),
        ("torch-sdpa-math", "", SOME[:3]),
        ("docs/examples/torch_features.py:windowed_attention", "", SOME),
        # Nested tensors of a tensor that stands for another are none.
        ("torch-encoder-layer", "train fast-path", SOME[:3]),
        *((f"tutorial-{number}", "", SOME[:4]) for number in (1, 2, 3, 4, 5)),
        ("docs/examples/torch_paged.py:paged_attention", "", SOME),
        ("docs/examples/torch_module.py:CrossAttention", "", SOME[:4]),
        ("torch-encoder-layer", "encoder", ["plain/no-mask/self"]),
        ("bert-sdpa", "", SOME[:2]),
        ("llama-eager", "", SOME[4:6]),
        (
            "llama-model-eager",
            "",
            ["feature/segments/self", "mask/key-padding/self", "feature/covering-06/self"],
        ),
        ("keras-torch-mha", "", SOME[:2]),
    ],
)
def test_verdicts_are_those_of_the_cpu_at_night(name, modes, cases):
    needed = {"bert": "transformers", "llama": "transformers", "keras": "keras"}
    pytest.importorskip(needed.get(name.partition("-")[0], "torch"))
    assert_same_verdicts(name, cases, modes.split())


def test_lengths_lie_on_the_device_at_night():
    pytest.importorskip("transformers")
    problem = case_of("feature/rotary/self").problem("float32")
    problem = problem.replace(causal="top-left", key_lengths=np.array([7, 4]))
    adapter = load("llama-model-eager")
    call = Call(adapter.modes[0], device="gpu")
    assert "lengths=int64[2]" in adapter.masks.spell(problem).label
    got = adapter.run(problem, call).output
    np.testing.assert_allclose(got, expect(problem).arrays["output"], atol=1e-5)


@pytest.mark.parametrize(
    "manner", [{"around": np.nan}, *({"strided": how} for how in ("gaps", "transposed", "window"))]
)
def test_calls_with_arrays_that_lie_otherwise_are_those_of_the_cpu(manner):
    answers = [honest.run(PROBLEM, Call(device=kind, **manner)) for kind in ("cpu", "gpu")]
    assert all(
        np.array_equal(array, answers[1].arrays()[name])
        for name, array in answers[0].arrays().items()
    )


@attention_function("torch", features=(Packed("query_at", "key_at", slack=2, only=True),))
def packed(query, key, value, query_at, key_at):
    """Attend within each sequence."""
    result = query.new_zeros(*query.shape[:2], value.shape[-1])
    at = [[*zip(ends.tolist(), ends[1:].tolist(), strict=False)] for ends in (query_at, key_at)]
    for (begin, end), (first, last) in zip(*at, strict=True):
        one = (query[begin:end], key[first:last], value[first:last])
        result[begin:end] = honest(*(part.transpose(0, 1) for part in one)).transpose(0, 1)
    return result


@attention_function(
    "torch", causal_flag=CausalFlag("causal", "bottom-right"), features=(Cache("past", "values"),)
)
def cached(query, key, value, past=None, values=None, causal=False):
    """Attend to what is in the cache, and to what is new."""
    if past is not None:
        key, value = torch.cat([past, key], 2), torch.cat([values, value], 2)
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return honest(query, key, value, mask.tril(keys - queries) if causal else mask)


def test_packed_sequences_and_caches_conform_at_night():
    for adapter, case in (
        (packed, "feature/lengths/self"),
        (cached, "causal/bottom-right/cross"),
    ):
        assert verdicts(adapter, case)[case] == CONFORMS
        assert verdicts(adapter, case, "cpu")[case] == CONFORMS


@pytest.mark.parametrize("name", ["feature/cache-rotary/gqa", "feature/cache-norm/gqa"])
def test_keys_in_a_cache_are_normed_and_rotated_on_the_device(name):
    problem = case_of(name).problem("float32")
    spelling, masks, found = NO_MASK, {}, {}
    if problem.norm is not None:
        variable = SimpleNamespace(argument="gain")
        spelling = SimpleNamespace(variables={"norm.key": variable})
        masks = {"gain": problem.norm.key}
    shape = problem.shape
    numbers = np.random.default_rng(0).normal(
        size=(shape.batch, shape.kv_heads, shape.key_length, shape.head_size)
    )
    for kind in ("cpu", "gpu"):
        given = {n: BRIDGE.array(values, "float32", kind) for n, values in masks.items()}
        keys = BRIDGE.array(numbers, "float32", kind)
        found[kind] = lies(honest._cached(problem, keys, given, spelling, kind))
    assert found["gpu"] == ("gpu", found["cpu"][1])
    assert found["gpu"][1] != BRIDGE.numpy(keys).tolist()


def test_no_device_is_taken_for_another(monkeypatch):
    assert BRIDGE.device_of(torch.zeros(1, device="meta")) == "meta"
    monkeypatch.setattr(torch_bridge, "_accelerator", lambda: None)
    assert BRIDGE.devices().keys() == {"cpu"}
    assert BRIDGE.memory("gpu") is None
    with pytest.raises(Unavailable, match="torch sees no gpu"):
        BRIDGE.array(NUMBERS, "float32", "gpu")


def test_before_torch_had_accelerators_there_was_cuda(monkeypatch):
    monkeypatch.delattr(torch, "accelerator")
    find = torch_bridge._accelerator.__wrapped__
    assert find() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find() == torch.device("cuda")


# Kernels for GPUs, with functions of the documented signatures in their place


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("stand_in")
def test_kernels_are_given_what_lies_on_the_device_at_night(name):
    adapter = without_gpu(name, gpus_only=True)
    cases = ["plain/no-mask/gqa", "feature/window-causal/gqa", "feature/cache-rotary/gqa"]
    with pytest.raises(Unavailable, match="GPUs only"):
        adapter.check_device("cpu")
    found = verdicts(adapter, cases)
    assert {verdict for verdict, _ in found.values()} <= {"conforms", "unsupported"}, found
    assert CONFORMS in found.values()


@pytest.mark.parametrize("name", ["torch-sdpa-efficient", "torch-sdpa-cudnn"])
def test_kernels_of_torch_are_asked_for_on_the_device(name, monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", nullcontext)
    adapter = without_gpu(name, gpus_only=True)
    with pytest.raises(Unavailable, match="GPUs only"):
        adapter.check_device("cpu")
    assert verdicts(adapter, FEW[0])[FEW[0]] == CONFORMS


def indices(*sizes, device):
    """The indices along each axis, to index arrays with."""
    return torch.meshgrid(*(torch.arange(n, device=device) for n in sizes), indexing="ij")


def create_block_mask(rule, batch, heads, queries, keys, device):
    """Return the whole mask, as no flex_attention does."""
    return rule(*indices(batch or 1, heads or 1, queries, keys, device=device))


def flex_attention(query, key, value, score_mod=None, block_mask=None, enable_gqa=False):
    """Attend as the documentation says, on any device; torch lists those that it supports."""
    assert enable_gqa == (query.shape[1] != key.shape[1])
    logits = query @ key.mT / math.sqrt(query.shape[-1])
    if score_mod is not None:
        logits = score_mod(logits, *indices(*logits.shape, device=query.device))
    if block_mask is not None:
        logits = logits.masked_fill(~block_mask, -math.inf)
    return torch.softmax(logits, dim=-1).nan_to_num() @ value


def test_masks_of_flex_attention_are_made_on_the_device(monkeypatch):
    from torch.nn.attention import flex_attention as flex

    monkeypatch.setattr(flex, "flex_attention", flex_attention)
    monkeypatch.setattr(flex, "create_block_mask", create_block_mask)
    cases = [CASE, "bias/per-head/self", "mask/per-head/self"]
    outcome = examine("torch-flex", cases=cases, dtypes="float32", modes="eager", device="gpu")
    found = {result.case: result.verdict for result in outcome.record.results}
    assert found == dict.fromkeys(cases, "conforms")


def test_triton_compiles_on_the_device(monkeypatch):
    pytest.importorskip("triton")
    seen = []

    def flash_attention(*heads, mask=None, causal=False, scale=None):
        seen.append(os.environ.get("TRITON_INTERPRET"))
        return honest(*heads, mask)

    module = SimpleNamespace(flash_attention=flash_attention)
    monkeypatch.setitem(sys.modules, "conformance.adapters.triton_flash_kernel", module)
    adapter = load("triton-flash")
    for device, asked in (("gpu", "0"), ("cpu", "1")):
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        assert verdicts(adapter, CASE, device)[CASE] == CONFORMS
        assert {*seen} == {asked}
        assert os.environ["TRITON_INTERPRET"] == "0"
        seen.clear()


# What an implementation does wrong with the device


def verdicts(adapter, cases=FEW, device="gpu"):
    """The verdict of each case, and the details of the findings with this verdict."""
    outcome = examine(adapter, cases=cases, dtypes="float32", device=device)
    return {
        result.case: (
            result.verdict,
            {one.detail for one in result.findings if one.verdict == result.verdict},
        )
        for result in outcome.record.results
    }


CONFORMS = ("conforms", {""})


@attention_function("torch", MASK)
def falls_back(query, key, value, mask=None):
    """Compute on the CPU, and forget to go back."""
    mask = None if mask is None else mask.cpu()
    return honest(query.cpu(), key.cpu(), value.cpu(), mask)


@attention_function("torch", MASK, returns_weights="per head")
def weights_fall_back(query, key, value, mask=None):
    """Return the weights on the CPU."""
    output = honest(query, key, value, mask)
    return output, torch.zeros(query.shape[:3] + key.shape[2:3])


@attention_function("torch", MASK)
def mask_of_the_cpu(query, key, value, mask=None):
    """Forget where the inputs lie when it makes a mask."""
    full = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    return honest(query, key, value, full if mask is None else mask & full)


@attention_function("torch", MASK)
def reads_unwritten(query, key, value, mask=None):
    """Leave the rows of the first query as they happen to be, which must be 0 by luck."""
    context = honest(query, key, value, mask)
    result = torch.empty_like(context)
    result[:, :, 1:] = context[:, :, 1:]
    return context - context.detach() + result.detach() + first_row_of(context)


def first_row_of(context):
    rows = torch.arange(context.shape[2], device=context.device)[:, None]
    return context.detach() * (rows == 0)


ELSEWHERE = "returned its result on another device than the inputs': cpu, not gpu"


def test_what_falls_back_to_the_cpu_is_an_error():
    found = verdicts(falls_back)
    assert found.keys() >= {*FEW}
    assert all(found[case] == ("error", {ELSEWHERE}) for case in FEW)
    for fine in (verdicts(falls_back, device="cpu"), verdicts(honest)):
        assert all(fine[case] == CONFORMS for case in FEW)


def test_weights_on_the_cpu_are_an_error():
    with pytest.raises(WrongAnswer, match="returned weights on another device"):
        weights_fall_back.run(PROBLEM, Call(device="gpu"))


def test_what_falls_back_at_length_is_an_error():
    heads = draw("float32", 64, 64)
    with pytest.raises(WrongAnswer, match="returned its result on another device"):
        call(falls_back, heads, "gpu")
    assert call(honest, heads, "gpu").arrays.keys() == {"output", "query", "key", "value"}
    with pytest.raises(WrongAnswer, match="returned str, no array of torch"):
        call(no_array, heads, "gpu")


def test_tensors_of_two_devices_are_an_error_as_on_a_gpu():
    verdict, why = verdicts(mask_of_the_cpu)[CASE]
    assert verdict == "error"
    assert all("Expected all tensors to be on the same device" in one for one in why)


def test_memory_that_was_not_written_is_not_lucky(monkeypatch):
    assert verdicts(reads_unwritten, CASE)[CASE][0] == "deviates"
    standin._BLOCKS.clear()
    monkeypatch.setattr(type(BRIDGE), "poison", lambda *_: None)
    assert verdicts(reads_unwritten, CASE)[CASE] == CONFORMS


# Errors that show later, and what they leave behind


def of_case(query, key):
    """Whether a call is of CASE, not of the other one."""
    return query.shape[2] == key.shape[2]


def test_an_error_belongs_to_the_call_that_made_it():
    @attention_function("torch", MASK)
    def fails_later(query, key, value, mask=None):
        if of_case(query, key):
            STATE.failure = torch.AcceleratorError("standin error: misaligned address")
        return honest(query, key, value, mask)

    found = verdicts(fails_later)
    verdict, why = found[CASE]
    assert verdict == "error"
    assert all(one.startswith("AcceleratorError: standin error: misaligned") for one in why)
    assert all(found[case] == CONFORMS for case in FEW if case != CASE)


def test_time_belongs_to_the_call_that_takes_it():
    @attention_function("torch", MASK)
    def slow(query, key, value, mask=None):
        STATE.seconds = 0.3
        return honest(query, key, value, mask)

    assert call(slow, draw("float32", 64, 64), "gpu").seconds >= 0.3


@attention_function("torch", MASK)
def asserts(query, key, value, mask=None):
    """Fail for good at CASE."""
    if of_case(query, key):
        STATE.failure = torch.AcceleratorError("standin error: device-side assert triggered")
        STATE.sticky = True
    return honest(query, key, value, mask)


LOST = "the device is lost: AcceleratorError: standin error: device-side assert triggered"


def test_a_lost_device_ends_the_process_and_its_item_alone():
    asserts.name = "asserts"
    desk = RequestHandler(asserts, "", "gpu", lambda line: None)
    before = desk.answer(Examine(FEW[0], "float32", "default"))
    assert isinstance(before, Examined)
    assert not before.spent
    assert decode_line(before.line)[0].verdict == "conforms"
    after = desk.answer(Examine(CASE, "float32", "default"))
    assert isinstance(after, Examined)
    assert after.spent  # so that the next item is examined by a new process
    result = decode_line(after.line)[0]
    assert (result.verdict, [one.detail for one in result.findings]) == ("crashed", [LOST])
    # So is the next question of an experiment.
    question = Examine("probe/bad-input", "float32", "default", question=0)
    assert desk.answer(question) == Ended("crashed", LOST)


@attention_function("torch", MASK)
def asserts_in_self_attention(query, key, value, mask=None):
    """Fail for good where queries and keys are as many, and nothing is masked; see test_gpu.py."""
    if mask is None and of_case(query, key):
        STATE.failure = torch.AcceleratorError("standin error: device-side assert triggered")
        STATE.sticky = True
    return honest(query, key, value, mask)


def test_at_length_nothing_is_asked_of_a_lost_device():
    @attention_function("torch", MASK)
    def fails(query, key, value, mask=None):
        if query.shape[2] == 512:
            STATE.failure, STATE.sticky = torch.AcceleratorError("standin error"), True
        return honest(query, key, value, mask)

    ladder = Ladder(fails, [128, 512, 1024], ["float32"], LongLimits(), device="gpu")
    steps = list(ladder.climb())
    errors = [step for step in steps if step.verdict == "error"]
    assert [(step.length, step.why[:31]) for step in errors] == [
        (512, "DeviceLost: the device is lost:")
    ]
    after = steps[steps.index(errors[0]) + 1 :]
    assert {step.verdict for step in after} == {"not reached"}
    assert all(
        step.why.startswith("not asked, because earlier the device is lost") for step in after
    )


def test_what_does_not_fit_is_the_verdict_of_its_item_alone():
    @attention_function("torch", MASK)
    def hungry(query, key, value, mask=None):
        kept = torch.zeros(2**16, device=query.device)
        if of_case(query, key):
            room, STATE.memory = STATE.memory, standin.used() + 2**10
            try:
                kept = [kept, torch.zeros(2**20, device=query.device)]
            finally:
                STATE.memory = room
        return honest(query, key, value, mask)

    gc.collect()
    before = standin.used()
    found = verdicts(hungry, (CASE, FEW[0]))
    verdict, why = found[CASE]
    assert verdict == "error"
    assert all(one.startswith("OutOfMemoryError: standin out of memory") for one in why)
    assert found[FEW[0]] == CONFORMS
    assert STATE.emptied
    assert standin.used() < before + 2**16


# At length


def test_lengths_that_do_not_fit_on_the_device_are_not_begun():
    STATE.memory = standin.used() + 2**22
    ladder = Ladder(honest, [256, 4096], ["float32"], LongLimits(), device="gpu")
    begun = []
    steps = list(ladder.climb(lambda step, left: begun.append((step, ladder.needs(step)))))
    assert {step.verdict for step in steps if step.length == 256} == {"conforms"}
    whole = {step.problem: step for step in steps if step.length == 4096}
    assert whole["full"].verdict == "not reached"
    assert "GiB on the device; 0.0 GiB hold 2,04" in whole["full"].why
    assert all(" GiB on the device" in needs for _, needs in begun)


def test_what_holds_all_logits_is_not_begun_where_the_device_has_no_room():
    STATE.memory = standin.used() + 2**25
    ladder = Ladder(honest, [256, 1024, 4096], ["float32"], LongLimits(), device="gpu")
    (step,) = (s for s in ladder.climb() if (s.problem, s.length) == ("full", 4096))
    assert "GiB on the device, for its memory grows" in step.why


def test_indices_beyond_31_bits_are_asked_where_the_device_holds_them():
    for memory, reason in ((2**30, "needs 16.5 GiB on the device; there are 1.0 GiB"), (2**36, "")):
        STATE.memory = standin.used() + memory
        ladder = Ladder(honest, [2**20], ["bfloat16"], LongLimits(), device="gpu")
        ladder._rooms[0].free = 2**40
        (step,) = (step for step, _ in ladder._plan if step.problem == BEYOND)
        assert ladder._beyond(step).startswith(reason)
        assert ladder.needs(step).endswith("16.5 GiB on the device")


# Commands


def test_checks_of_a_test_suite_run_on_the_device():
    assert_conforms(honest, cases=FEW, dtypes="float32", device="gpu")
    with pytest.raises(AssertionError, match="on another device"):
        assert_conforms(falls_back, cases=FEW, dtypes="float32", device="gpu")
    mark = parametrize_with_checks(honest, cases=CASE, dtypes="float32", device="gpu")
    *checks, _ = mark.args[1]
    assert [check.id.split(":")[3:] for check in checks] == [["gpu"]]
    for check in mark.args[1]:
        check()


def test_a_child_declares_what_it_runs_on_the_device():
    honest.name = "honest"
    declared = RequestHandler(honest, "", "gpu", lambda line: None).answer(
        Declare(cases={CASE: ""}, dtypes=["float32"])
    )
    assert isinstance(declared, Declared)
    assert declared.device_model == "Stand-in 1000"
    assert declared.plan == {plan_key(CASE, "float32"): ["default"]}


def test_commands_run_on_the_device_at_night(capsys, tmp_path):
    for command in (
        ["run", "torch-mha", "--no-isolate", "--case", CASE, "--dtype", "float32"],
        ["heads", "torch-mha", "--case", CASE, "--output", str(tmp_path / "heads.svg")],
        ["long", "torch-sdpa", "--lengths", "64:256", "--dtype", "float32"],
        ["long", "torch-mha", "--lengths", "64:256", "--dtype", "float32"],
        ["explore", "tutorial-1", "--examples", "3", "--dtype", "float32"],
        ["probe", "torch-mha", "--experiment", "causal", "--mode", "train"],
    ):
        capsys.readouterr()
        code = main([*command, "--device", "gpu"])
        told = capsys.readouterr()
        assert code == 0, (command, told)


def scripted(adapter, spec, array):
    """A script for an element of an array that does not deviate, found on the device."""
    recipe = Recipe(
        frame=Frame(bias=False), batch=1, query=2, kv_heads=1, size=1, causal="top-left"
    )
    problem = recipe.problem("float32")
    expected = expect(problem)
    index = tuple(size - 1 for size in expected.arrays[array].shape)
    allowed = LIMIT * float(expected.sigma[array][index])
    deviation = TrialDeviation("x", "off", array, index, allowed=allowed, text="nothing")
    trial = Trial(problem, adapter.modes[0], "gpu")
    return script(adapter, spec, trial, deviation, "a test")


@pytest.mark.parametrize("array", ["output", "gradient.query", "gradient.weights.key"])
def test_a_script_runs_on_the_device_of_the_finding(array):
    text = scripted(load("torch-mha"), "torch-mha", array)
    assert 'torch.set_default_device("standin")' in text
    assert "on Stand-in 1000; a test" in " ".join(text.split("\n# "))
    names = {}
    try:
        exec(text, names)
    finally:
        torch.set_default_device(None)
    assert BRIDGE.device_of(names["query"]) == "gpu"
    assert {BRIDGE.device_of(one) for one in names["layer"].parameters()} == {"gpu"}


def test_a_script_that_calls_the_adapter_names_the_device():
    text = scripted(honest, "mine.py:honest", "output")
    assert 'adapter.run(problem, Call(adapter.modes[0], "gpu")).arrays()' in text
