"""The bridge to MLX with the CPU as a GPU; see test_device.py."""

import mlx.core as mx
import numpy as np
import pytest
from devices import assert_same_verdicts

from conformance import Call, attention_function
from conformance.adapter.code import FRAMEWORKS
from conformance.cases.catalogue import case_of
from conformance.errors import Unsupported, WrongAnswer
from conformance.frameworks import framework

BRIDGE = framework("mlx")
CASE = "plain/no-mask/cross"


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    monkeypatch.setattr(mx, "gpu", mx.cpu)
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"device_name": "Stand-in 1000"})


def test_the_device_is_that_of_the_session():
    assert BRIDGE.devices() == {"cpu": "mlx on the CPU", "gpu": "Stand-in 1000"}
    with BRIDGE.session("float32", "gpu"):
        # Arrays lie in memory that the devices share.
        assert BRIDGE.device_of(BRIDGE.array(np.zeros(3), "float32", "gpu")) == ""
    with (
        pytest.raises(Unsupported, match="float64 on the CPU only"),
        BRIDGE.session("float64", "gpu"),
    ):
        pass


def test_verdicts_are_those_of_the_cpu():
    assert_same_verdicts("mlx-mha", CASE)


def test_who_changes_the_default_device_is_an_error(monkeypatch):
    @attention_function("mlx")
    def falls_back(query, key, value):
        monkeypatch.setattr(mx, "default_device", lambda: "Device(cpu, 1)")
        scale = query.shape[-1] ** -0.5
        return mx.fast.scaled_dot_product_attention(query, key, value, scale=scale)

    with pytest.raises(WrongAnswer, match=r"default device: .*, 0\) became Device\(cpu, 1"):
        falls_back.run(case_of(CASE).problem("float32"), Call(device="gpu"))


def test_a_script_names_the_device():
    words = FRAMEWORKS["mlx"].on("gpu")
    exec(words.on_gpu.format(device=BRIDGE.device_name("gpu")), {"mx": mx})
    assert eval(words.numpy.format("mx.ones(2)"), {"mx": mx, "np": np}).tolist() == [1, 1]
