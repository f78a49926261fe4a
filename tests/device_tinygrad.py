"""The bridge to tinygrad on a device that counts as a GPU; see test_device.py.

tinygrad has one default device in a process. The one that interprets kernels counts as a GPU here,
and its second one as the CPU.
"""

import os

os.environ["DEV"] = "PYTHON"

import numpy as np
import pytest
from devices import MASK
from tinygrad import Tensor

from conformance import Call, attention_function
from conformance.cases.catalogue import case_of
from conformance.errors import Unavailable, WrongAnswer
from conformance.frameworks import framework, tinygrad_bridge
from conformance.running.examine import examine

BRIDGE = framework("tinygrad")
CPU, GPU = "PYTHON:1", "PYTHON"
NUMBERS = np.arange(6.0).reshape(2, 3)
CASE = "plain/no-mask/cross"
PROBLEM = case_of(CASE).problem("float32")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch):
    kind_of = {CPU: "cpu", GPU: "gpu"}.get
    monkeypatch.setattr(tinygrad_bridge, "_kind_of", kind_of)


@attention_function("tinygrad", MASK)
def honest(query, key, value, mask=None):
    """Attend where everything lies."""
    return query.scaled_dot_product_attention(key, value, mask)


@attention_function("tinygrad", MASK)
def falls_back(query, key, value, mask=None):
    """Compute on the CPU, and forget to go back."""
    mask = None if mask is None else mask.to(CPU)
    return honest(query.to(CPU), key.to(CPU), value.to(CPU), mask)


def test_the_kind_of_a_device_is_known_by_its_name(monkeypatch):
    monkeypatch.undo()
    names = ("PYTHON", "CPU", "CPU:1", "NPY", "CUDA", "CUDA:1", "METAL", "NV", "AMD:0")
    kinds = [tinygrad_bridge._kind_of(name) for name in names]
    assert kinds == ["cpu"] * 4 + ["gpu"] * 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_lie_on_the_device(dtype):
    assert BRIDGE.devices() == {"gpu": "tinygrad on PYTHON"}
    for values in (NUMBERS, NUMBERS > 2):
        array = BRIDGE.array(values, dtype, "gpu")
        assert (BRIDGE.device_of(array), BRIDGE.numpy(array).tolist()) == ("gpu", values.tolist())
        assert BRIDGE.device_of(array.to(CPU)) == "cpu"
    assert BRIDGE.device_of(Tensor(NUMBERS).shard((GPU, CPU), 0)) == ""
    assert BRIDGE.device_of(Tensor(NUMBERS).shard((GPU, GPU), 0)) == "gpu"


def test_verdicts_are_known_on_the_device():
    outcome = examine("tinygrad-sdpa", cases=CASE, dtypes="float32", device="gpu")
    assert {result.verdict for result in outcome.record.results} == {"conforms"}
    with pytest.raises(Unavailable, match=r"tinygrad sees no cpu on this machine \(it has gpu\)"):
        honest.run(PROBLEM, Call())


def test_what_falls_back_to_the_cpu_is_an_error():
    asked = Call(device="gpu")
    assert honest.run(PROBLEM, asked).gradients
    with pytest.raises(WrongAnswer, match="its result on another device than the inputs': cpu"):
        falls_back.run(PROBLEM, asked)
