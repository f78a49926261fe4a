"""PaddlePaddle: autograd on the parameters of the layer itself, loaded in place.

The CPU has no matrix product of bfloat16 or float16, so there these dtypes are `Unsupported`.
"""

from __future__ import annotations

import pickle
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import paddle

from conformance.errors import Unsupported, WrongDeclaration
from conformance.frameworks.base import (
    Evaluated,
    Framework,
    Function,
    Natives,
    Strides,
    other_parameters,
    place_within,
)
from conformance.frameworks.surroundings import Setting


class Paddle(Framework):
    """Paddle tensors in and out."""

    name = "paddle"
    packages = ("paddlepaddle", "paddlepaddle-gpu")
    loads_in_place = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        tensor = paddle.to_tensor(values, place=device)
        return tensor.astype(dtype) if tensor.dtype == paddle.float64 else tensor

    def numpy(self, native: Any) -> np.ndarray:
        tensor = native.detach()
        return (tensor if tensor.dtype == paddle.bool else tensor.astype("float64")).numpy()

    def is_array(self, value: Any) -> bool:
        return isinstance(value, paddle.Tensor)

    def dtype(self, native: Any) -> str:
        return str(native.dtype).removeprefix("paddle.")

    def load(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        own = dict(layer.named_parameters())
        if own.keys() != parameters.keys():
            raise WrongDeclaration(other_parameters(layer, own, parameters))
        for name, values in parameters.items():
            if tuple(own[name].shape) != values.shape:
                raise WrongDeclaration(
                    f"{name} has shape {list(own[name].shape)}, "
                    f"the table makes {list(values.shape)}"
                )
            self.overwrite(own[name], self.array(values, dtype, device))
        return own

    def place(self, layer: Any, device: str) -> Any:
        return layer.to(device=device)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        if device == "cpu" and dtype in ("bfloat16", "float16"):
            raise Unsupported(f"paddle multiplies no matrices of {dtype} on the CPU")
        before = paddle.get_device()
        paddle.set_device(device)
        try:
            yield
        finally:
            paddle.set_device(before)

    def evaluate(
        self,
        function: Function,
        variables: Natives,
        constants: Natives,
        cotangent: Any,
        *,
        gradients: bool,
        program: Hashable,
        optimised: bool = False,
        compiled: bool = True,
        backwards: int = 1,
    ) -> Evaluated:
        if not gradients:
            with paddle.no_grad():
                return Evaluated(*function(variables, constants), {})
        constants = {name: _frozen(tensor) for name, tensor in constants.items()}
        for tensor in variables.values():
            tensor.stop_gradient = False
        output, weights = function(variables, constants)
        if not self.is_array(output) or output.shape != cotangent.shape or output.stop_gradient:
            return Evaluated(output, weights, {})
        for left in reversed(range(backwards)):
            found = paddle.grad(
                [output],
                list(variables.values()),
                [cotangent.astype(output.dtype)],
                retain_graph=left > 0,
                allow_unused=True,
            )
        named = zip(variables, found, strict=True)
        return Evaluated(output, weights, {name: grad for name, grad in named if grad is not None})

    def settings(self) -> tuple[Setting, ...]:
        return _SETTINGS

    def strided(self, native: Any, how: Strides) -> Any:
        if how == "gaps":
            return paddle.stack([native, native], axis=-1)[..., 0]
        larger, window = place_within(native.shape)
        floating = native.is_floating_point()
        around = paddle.full(larger, float("nan") if floating else 1, native.dtype)
        around[window] = native
        return around[window]

    def overwrite(self, native: Any, by: Any) -> None:
        with paddle.no_grad():
            paddle.assign(by, native)

    def einsum(self, axes: str, *operands: Any) -> Any:
        return paddle.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        found = {"cpu": "paddle on the CPU"}
        if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
            found["gpu"] = paddle.device.cuda.get_device_name()
        return found


def _frozen(tensor: Any) -> Any:
    """The same tensor without a gradient; another only where it is computed from something."""
    if not tensor.is_leaf:
        return tensor.detach()
    tensor.stop_gradient = True
    return tensor


_SETTINGS = (
    Setting(
        "Paddle's random generator",
        lambda: pickle.dumps(paddle.get_rng_state("cpu")),
        lambda state: paddle.set_rng_state(pickle.loads(state), "cpu"),
        told=False,
    ),
    Setting("Paddle's default dtype", paddle.get_default_dtype, paddle.set_default_dtype),
    Setting("Paddle's device", paddle.get_device, paddle.set_device),
    Setting("whether Paddle records gradients", paddle.is_grad_enabled, paddle.set_grad_enabled),
)
