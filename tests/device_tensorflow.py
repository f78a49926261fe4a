"""TensorFlow's bridge, and Keras, on a second device of the CPU as a GPU; see test_device.py."""

import math

import numpy as np
import pytest
import tensorflow as tf
from devices import MASK, NUMBERS, PROBLEM, assert_same_verdicts

from conformance import Call, attention_function
from conformance.adapter.code import FRAMEWORKS
from conformance.errors import DeviceLost, Unavailable, WrongAnswer
from conformance.frameworks import framework, tensorflow_bridge
from conformance.long.calling import call
from conformance.long.problem import draw

REAL = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(REAL[0], [tf.config.LogicalDeviceConfiguration()] * 2)
CPU, GPU = tf.config.list_logical_devices("CPU")

# TensorFlow lists the devices of a kind as if the second one were a GPU.
tf.config.list_logical_devices = lambda kind: {"CPU": [CPU], "GPU": [GPU]}[kind]
tf.config.list_physical_devices = lambda kind: {"CPU": REAL, "GPU": REAL}[kind]
BRIDGE = framework("tensorflow")


@pytest.fixture(autouse=True)
def nothing_is_left_from_the_last_test():
    BRIDGE._state.__init__()


@attention_function("tensorflow", MASK)
def honest(query, key, value, mask=None):
    """Attend where everything lies."""
    logits = tf.matmul(query / math.sqrt(query.shape[-1]), key, transpose_b=True)
    if mask is not None:
        logits = tf.where(mask, logits, tf.constant(-math.inf, logits.dtype))
    return tf.matmul(tf.nn.softmax(logits), value)


@attention_function("tensorflow", MASK)
def falls_back(query, key, value, mask=None):
    """Compute on the CPU, and forget to go back."""
    with tf.device("CPU:0"):
        return honest(query, key, value, mask)


@attention_function("tensorflow", MASK, returns_weights="per head")
def weights_fall_back(query, key, value, mask=None):
    """Return the weights on the CPU."""
    with tf.device("CPU:0"):
        weights = tf.zeros(query.shape[:3] + key.shape[2:3])
    return honest(query, key, value, mask), weights


def test_arrays_lie_on_the_device_that_was_asked_for():
    assert BRIDGE.devices() == {"cpu": "tensorflow on the CPU", "gpu": "GPU"}
    for kind, device in (("cpu", CPU), ("gpu", GPU)):
        with BRIDGE.session("float32", kind):
            made = BRIDGE.array(NUMBERS, "bfloat16", kind)
            for array in (made, made + 1, tf.zeros(3), BRIDGE.take(made, np.array([1]))):
                assert array.device.endswith(device.name)
                assert BRIDGE.device_of(array) == kind
            assert BRIDGE.numpy(made).tolist() == NUMBERS.tolist()


def test_the_toolkit_is_known(monkeypatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"cuda_version": "12.5.1"})
    assert BRIDGE.toolkit() == {"CUDA": "12.5.1", "cuDNN": ""}


def test_what_is_in_a_graph_lies_nowhere():
    seen = []

    def looks(array):
        seen.append(BRIDGE.device_of(array))
        return array

    # AutoGraph would run a copy of what it calls.
    tf.function(looks, autograph=False)(tf.zeros(3))
    assert seen == [""]


@pytest.mark.parametrize("name", ["keras-tensorflow-mha", "keras-tensorflow-sdpa"])
def test_verdicts_are_those_of_the_cpu(name):
    pytest.importorskip("keras")
    assert_same_verdicts(name)


def test_what_falls_back_to_the_cpu_is_an_error():
    asked = Call(device="gpu")
    assert honest.run(PROBLEM, asked).gradients
    assert falls_back.run(PROBLEM, Call(device="cpu")).gradients
    with pytest.raises(WrongAnswer, match="its result on another device than the inputs': cpu"):
        falls_back.run(PROBLEM, asked)
    with pytest.raises(WrongAnswer, match="returned weights on another device"):
        weights_fall_back.run(PROBLEM, asked)
    with pytest.raises(WrongAnswer, match="returned its result on another device"):
        call(falls_back, draw("float32", 64, 64), "gpu")
    assert call(honest, draw("float32", 64, 64), "gpu").arrays


def test_a_device_that_fails_twice_is_lost(monkeypatch):
    def fail():
        raise tf.errors.InternalError(None, None, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def attempt():
        with BRIDGE.session("float32", "gpu"):
            raise tf.errors.InternalError(None, None, "once")

    with pytest.raises(tf.errors.InternalError, match="once"):
        attempt()
    monkeypatch.setattr(tensorflow_bridge, "_try", fail)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="the device is lost: InternalError: once"):
            attempt()


def test_without_a_gpu_it_is_unavailable(monkeypatch):
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    with pytest.raises(Unavailable, match="tensorflow sees no gpu"):
        honest.run(PROBLEM, Call(device="gpu"))


def test_a_script_fails_without_the_device(monkeypatch):
    line = FRAMEWORKS["tensorflow"].on_gpu.format(device=BRIDGE.device_name("gpu"))
    exec(line, {"tf": tf})
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [])
    with pytest.raises(AssertionError):
        exec(line, {"tf": tf})
