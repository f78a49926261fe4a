"""The PaddlePaddle bridge loads parameters into the layer and differentiates with autograd.

Paddle cannot multiply matrices of bfloat16 or float16 on the CPU, so problems in these dtypes are
`Unsupported` there.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from conformance.errors import Unsupported
from conformance.frameworks.base import (
    DeviceState,
    Evaluated,
    Framework,
    Request,
    Setting,
    by_name,
)


class Paddle(Framework):
    """The bridge to PaddlePaddle."""

    name = "paddle"
    packages = ("paddlepaddle", "paddlepaddle-gpu")
    array_type = paddle.Tensor
    settings = (
        Setting(
            "Paddle's random generator",
            lambda: pickle.dumps(paddle.get_rng_state("cpu")),
            lambda state: paddle.set_rng_state(pickle.loads(state), "cpu"),
            shown=False,
        ),
        Setting("Paddle's default dtype", paddle.get_default_dtype, paddle.set_default_dtype),
        Setting("Paddle's device", paddle.get_device, paddle.set_device),
        Setting(
            "whether Paddle records gradients", paddle.is_grad_enabled, paddle.set_grad_enabled
        ),
    )
    einsum = staticmethod(paddle.einsum)
    records_graphs = True
    loads_in_place = True
    has_strides = True

    def __init__(self) -> None:
        self._state = DeviceState()

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        tensor = paddle.to_tensor(values, place=device)
        return tensor.astype(dtype) if tensor.dtype == paddle.float64 else tensor

    def device_of(self, native: Any) -> str:
        return "gpu" if native.place.is_gpu_place() else "cpu"

    def numpy(self, native: Any) -> np.ndarray:
        tensor = native.detach()
        return (tensor if tensor.dtype == paddle.bool else tensor.astype("float64")).numpy()

    def place(self, layer: Any, device: str) -> Any:
        return layer.to(device=device)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        if device == "cpu" and dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle multiplies no matrices of {dtype} on the CPU")
        before = paddle.get_device()
        paddle.set_device(device)
        try:
            if device == "cpu":
                yield
                return
            wait = paddle.device.synchronize
            with self._state.watching(wait, paddle.device.cuda.empty_cache):
                try:
                    yield
                finally:
                    # Kernels run asynchronously: wait, so that errors are of this problem.
                    wait()
        finally:
            paddle.set_device(before)

    def without_gradients(self) -> Any:
        return paddle.no_grad()

    def differentiate(self, request: Request) -> Evaluated:
        variables, cotangent = request.variables, request.cotangent
        constants = {name: _frozen(tensor) for name, tensor in request.constants.items()}
        for tensor in variables.values():
            tensor.stop_gradient = False
        output, weights = request.function(variables, constants)
        if not self.fits(output, cotangent) or output.stop_gradient:
            return Evaluated(output, weights, {})
        for left in reversed(range(request.backwards)):
            gradients = paddle.grad(
                [output],
                list(variables.values()),
                [cotangent.astype(output.dtype)],
                retain_graph=left > 0,
                allow_unused=True,
            )
        return Evaluated(output, weights, by_name(variables, gradients))

    def overwrite(self, native: Any, by: Any) -> None:
        with paddle.no_grad():
            paddle.assign(by, native)

    def devices(self) -> dict[str, str]:
        models = {"cpu": "paddle on the CPU"}
        if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
            models["gpu"] = paddle.device.cuda.get_device_name()
        return models


def _frozen(tensor: Any) -> Any:
    """Return a tensor with the same numbers that autograd does not track.

    A leaf tensor is marked in place and returned; any other tensor is detached.
    """
    if not tensor.is_leaf:
        return tensor.detach()
    tensor.stop_gradient = True
    return tensor
