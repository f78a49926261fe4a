"""The bridge to JAX, and adapters, on a second device of the CPU as a GPU; see test_device.py."""

import math
import os
from types import SimpleNamespace

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices import CASE, MASK, NUMBERS, PROBLEM, assert_same_verdicts

from conformance import Call, Mode, attention_function
from conformance.adapter.code import FRAMEWORKS
from conformance.adapter.loading import load
from conformance.errors import DeviceLost, Unavailable, WrongAnswer
from conformance.frameworks import framework, jax_bridge
from conformance.frameworks.base import Memory
from conformance.long.calling import call
from conformance.long.problem import draw
from conformance.running.examine import examine

CPU, GPU = jax.devices("cpu")


def devices(kind=None):
    """What `jax.devices` returns if the second device is a GPU."""
    return {"cpu": [CPU], "gpu": [GPU], None: [CPU]}[kind]


jax.devices = devices
BRIDGE = framework("jax")


@pytest.fixture(autouse=True)
def nothing_is_left_from_the_last_test():
    BRIDGE._state.__init__()


@attention_function("jax", MASK)
def honest(query, key, value, mask=None):
    """Attend where everything lies."""
    logits = query / math.sqrt(query.shape[-1]) @ key.mT
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return jax.nn.softmax(logits, axis=-1) @ value


@attention_function("jax", MASK)
def falls_back(query, key, value, mask=None):
    """Compute on the CPU, and forget to go back."""
    result = honest(query, key, value, mask)
    return result if isinstance(result, jax.core.Tracer) else jax.device_put(result, CPU)


def test_the_device_is_the_one_that_was_asked_for():
    assert BRIDGE.devices() == {"cpu": "jax on the CPU", "gpu": "cpu"}
    for kind, device in (("cpu", CPU), ("gpu", GPU)):
        with BRIDGE.session("float32", kind):
            made = BRIDGE.array(NUMBERS, "float32", kind)
            for array in (made, made + 1, jnp.zeros(3), jax.random.normal(jax.random.key(0), 3)):
                assert array.devices() == {device}
                assert BRIDGE.device_of(array) == kind
            assert BRIDGE.numpy(made).tolist() == NUMBERS.tolist()
            assert BRIDGE.device_of(BRIDGE.take(made, np.array([1]))) == kind


def test_the_toolkit_is_known(monkeypatch):
    versions = SimpleNamespace(
        cuda_runtime_get_version=lambda: 12090, cudnn_get_version=lambda: 8907
    )
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    assert BRIDGE.toolkit() == {"CUDA": "12.9", "cuDNN": "8.9.7"}


def test_what_is_being_compiled_lies_nowhere():
    seen = []
    jax.jit(lambda array: seen.append(BRIDGE.device_of(array)) or array)(NUMBERS)
    assert seen == [""]


def test_options_of_the_compiler_are_those_for_the_cpu_on_the_cpu_only():
    for kind, given in (("cpu", ["compiler_options"]), ("gpu", [])):
        with BRIDGE.session("float32", kind):
            assert [*jax_bridge._options(True)] == given
    assert [*jax_bridge._options(False)] == ["compiler_options"]


NEEDED = {
    **{"jax-sdpa": "jax", "pallas-gpu": "jax", "flax-linen": "flax", "flax-nnx": "flax"},
    **{"equinox-mha": "equinox", "haiku-mha": "haiku", "keras-jax-mha": "keras"},
}


@pytest.mark.parametrize("name", ["jax-sdpa", "flax-linen", "equinox-mha", "haiku-mha"])
def test_verdicts_are_those_of_the_cpu(name):
    pytest.importorskip(NEEDED[name])
    assert_same_verdicts(name)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("flax-nnx", CASE),
        ("keras-jax-mha", "mask/key-padding/self"),
        ("pallas-gpu", "causal/square/self"),
    ],
)
def test_verdicts_are_those_of_the_cpu_at_night(name, case):
    pytest.importorskip(NEEDED[name])
    assert_same_verdicts(name, case)


def test_what_an_interpreted_kernel_cannot_do_is_unsupported_at_night():
    outcome = examine("pallas-gpu", cases="plain/no-mask/cross", dtypes="bfloat16")
    assert set(outcome.counts) == {"unsupported"}
    assert "interpreted: in bfloat16 self-attention only" in str(outcome.record.results)


def test_the_kernel_of_cudnn_is_asked_for_on_the_device_at_night(monkeypatch):
    written_out = jax.nn.dot_product_attention

    def cudnn(*inputs, implementation, **given):
        assert implementation == "cudnn"
        return written_out(*inputs, **given)

    monkeypatch.setattr(jax.nn, "dot_product_attention", cudnn)
    adapter = load("jax-sdpa-cudnn")
    with pytest.raises(Unavailable, match="GPUs only"):
        adapter.check_device("cpu")
    outcome = examine(adapter, cases="mask/per-batch/cross", dtypes="bfloat16", device="gpu")
    assert {result.verdict for result in outcome.record.results} == {"conforms"}


def test_a_script_names_the_device():
    line = FRAMEWORKS["jax"].on_gpu.format(device=BRIDGE.device_name("gpu"))
    before = jax.config.jax_default_device
    try:
        exec(line, {"jax": jax})
        assert jax.config.jax_default_device == GPU
    finally:
        jax.config.update("jax_default_device", before)


def test_what_falls_back_to_the_cpu_is_an_error():
    asked = Call(device="gpu", compiled=False, mode=Mode("forward", gradients=False))
    assert honest.run(PROBLEM, asked).output.shape == PROBLEM.cotangent.shape
    with pytest.raises(WrongAnswer, match="returned its result on another device"):
        falls_back.run(PROBLEM, asked)
    assert call(honest, draw("float32", 64, 64), "gpu").arrays


def test_a_device_that_fails_twice_is_lost(monkeypatch):
    def fail(device):
        raise RuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS")

    def attempt():
        with BRIDGE.session("float32", "gpu"):
            raise RuntimeError("INTERNAL: once")

    with pytest.raises(RuntimeError, match="once"):
        attempt()
    monkeypatch.setattr(jax_bridge, "_try", fail)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="the device is lost: RuntimeError: INTERNAL: once"):
            attempt()


def test_memory_is_what_the_device_says(monkeypatch):
    assert BRIDGE.memory("cpu") is None
    assert BRIDGE.memory("gpu") is None  # this one says nothing
    told = {"bytes_in_use": 30, "bytes_limit": 2**30, "peak_bytes_in_use": 50}
    with BRIDGE.session("float32", "gpu"):
        monkeypatch.setattr(
            jax_bridge, "_gpus", lambda: (SimpleNamespace(memory_stats=lambda: told),)
        )
        assert BRIDGE.memory("gpu") == Memory(2**30 - 30, 30, 50)


def test_free_memory_is_poisoned_on_the_device_alone(monkeypatch):
    placed = []
    put = jax.device_put
    monkeypatch.setattr(BRIDGE, "memory", lambda device: Memory(2**30, 0, 0))
    monkeypatch.setattr(
        jax, "device_put", lambda a, device: placed.append((a.nbytes, device)) or put(a, device)
    )
    with BRIDGE.session("float32", "cpu"):
        BRIDGE.poison([jnp.zeros(100)])
    assert not placed
    with BRIDGE.session("float32", "gpu"):
        BRIDGE.poison([jnp.zeros(100)])
    assert placed.count((400, GPU)) == 4
    assert {device for _, device in placed} == {GPU}
