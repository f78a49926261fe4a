"""The bridge to Paddle with a stand-in for its GPU; see test_device.py.

Everything is computed on the CPU. A tensor counts as one on the GPU, unless it was moved away.
"""

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from devices import MASK, NUMBERS, PROBLEM, assert_same_verdicts

from conformance import Call, attention_function
from conformance.adapter.code import FRAMEWORKS
from conformance.errors import DeviceLost, Unsupported, WrongAnswer
from conformance.frameworks import framework
from conformance.long.calling import call
from conformance.long.problem import draw

BRIDGE = framework("paddle")
ASKED = Call(device="gpu")


class OnGpu(paddle.CPUPlace):
    """Where a tensor on the GPU lies."""

    def is_gpu_place(self):
        """Return what the place of a GPU returns."""
        return True


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Let Paddle believe that it has a GPU; return what the GPU was asked to do."""
    BRIDGE._state.__init__()
    seen = SimpleNamespace(device="cpu", waited=0, emptied=0, placed=set(), failure=None)
    to_tensor, to = paddle.to_tensor, paddle.nn.Layer.to

    def made(values, place="gpu", **options):
        seen.placed.add(place)
        tensor = to_tensor(values, place="cpu", **options)
        return moved(tensor) if place == "cpu" else tensor

    def moved(tensor):
        tensor = tensor.clone()
        tensor.lies_on_the_cpu = True
        return tensor

    def wait():
        seen.waited += 1
        if seen.failure:
            raise seen.failure

    def place(tensor):
        on_gpu = seen.device == "gpu" and not hasattr(tensor, "lies_on_the_cpu")
        return (OnGpu if on_gpu else paddle.CPUPlace)()

    monkeypatch.setattr(paddle, "to_tensor", made)
    monkeypatch.setattr(paddle, "get_device", lambda: seen.device)
    monkeypatch.setattr(paddle, "set_device", lambda device: setattr(seen, "device", device))
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device, "synchronize", wait)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paddle.device.cuda, "get_device_name", lambda: "Stand-in 1000")
    monkeypatch.setattr(
        paddle.device.cuda, "empty_cache", lambda: setattr(seen, "emptied", seen.emptied + 1)
    )
    monkeypatch.setattr(paddle.base.core, "gpu_memory_available", lambda: 2**40, raising=False)
    monkeypatch.setattr(paddle.Tensor, "cpu", moved)
    monkeypatch.setattr(paddle.Tensor, "place", property(place))
    monkeypatch.setattr(
        paddle.nn.Layer,
        "to",
        lambda layer, device="gpu", **options: seen.placed.add(device) or to(layer, **options),
    )
    return seen


@attention_function("paddle", MASK)
def honest(query, key, value, mask=None):
    """Attend where everything lies."""
    logits = query @ key.mT / query.shape[-1] ** 0.5
    if mask is not None:
        logits = paddle.where(mask, logits, paddle.full_like(logits, -np.inf))
    return paddle.nn.functional.softmax(logits, axis=-1) @ value


@attention_function("paddle", MASK)
def falls_back(query, key, value, mask=None):
    """Return the result on the CPU."""
    return honest(query, key, value, mask).cpu()


def test_arrays_and_layers_lie_on_the_device(gpu):
    assert BRIDGE.devices() == {"cpu": "paddle on the CPU", "gpu": "Stand-in 1000"}
    with BRIDGE.session("bfloat16", "gpu"):
        array = BRIDGE.array(NUMBERS, "float32", "gpu")
        assert BRIDGE.device_of(array) == "gpu"
        assert BRIDGE.device_of(array.cpu()) == "cpu"
        assert BRIDGE.numpy(array).tolist() == NUMBERS.tolist()
        BRIDGE.place(paddle.nn.Linear(4, 3), "gpu")
        assert gpu.device == "gpu"
    assert gpu.placed == {"gpu"}
    assert gpu.waited == 1
    assert gpu.device == "cpu"


@pytest.mark.parametrize("name", ["paddle-mha", "paddle-sdpa"])
def test_verdicts_are_those_of_the_cpu(name):
    assert_same_verdicts(name)


def test_what_falls_back_to_the_cpu_is_an_error():
    assert honest.run(PROBLEM, ASKED).gradients
    assert falls_back.run(PROBLEM, Call()).gradients
    with pytest.raises(WrongAnswer, match="its result on another device than the inputs': cpu"):
        falls_back.run(PROBLEM, ASKED)
    with pytest.raises(WrongAnswer, match="returned its result on another device"):
        call(falls_back, draw("float32", 64, 64), "gpu")


def test_an_error_that_shows_later_belongs_to_its_call_and_may_cost_the_device(gpu):
    def attempt():
        with BRIDGE.session("float32", "gpu"):
            pass

    gpu.failure = MemoryError("Out of memory error on GPU 0")
    with pytest.raises(MemoryError):
        attempt()
    gpu.failure = None
    attempt()
    assert gpu.emptied == 1
    gpu.failure = OSError("CUDA error(719), unspecified launch failure")
    for _ in range(2):
        with pytest.raises(DeviceLost, match=r"the device is lost: OSError: CUDA error\(719\)"):
            attempt()


def test_a_script_names_the_device(gpu):
    exec(FRAMEWORKS["paddle"].on_gpu.format(device=BRIDGE.device_name("gpu")), {"paddle": paddle})
    assert gpu.device == "gpu"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_the_cpu_cannot_multiply_is_unsupported_there_alone(dtype):
    with pytest.raises(Unsupported, match=f"no matrices of {dtype} on the CPU"):
        BRIDGE.session(dtype, "cpu").__enter__()
    with BRIDGE.session(dtype, "gpu"):
        pass
