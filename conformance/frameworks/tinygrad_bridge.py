"""The tinygrad bridge: tinygrad has lazy tensors, and gradients are further tensors.

Nothing is computed before `realize`. The bridge calls it so that an error is attributed to the
problem that caused it, and for all tensors at once, so that output and gradients share kernels.
Without a compiler, the only device is PYTHON, which interprets kernels number by number: correctly
but slowly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.helpers import ContextVar

from conformance.frameworks.base import Evaluated, Framework, Request, Setting


def _variables() -> dict[str, Any]:
    return {name: variable.value for name, variable in ContextVar._cache.items()}


def _put_variables(values: dict[str, Any]) -> None:
    for name, value in values.items():
        ContextVar._cache[name].value = value


def _generator() -> tuple[int, dict[str, Any]]:
    drawn = {device: counter.tolist() for device, counter in Tensor._device_rng_counters.items()}
    return Tensor._seed, drawn


class Tinygrad(Framework):
    """The bridge to tinygrad."""

    name = "tinygrad"
    packages = ("tinygrad",)
    array_type = Tensor
    settings = (
        Setting("tinygrad's variables, such as DEV", _variables, _put_variables, shown=False),
        # The generator can be restored only to its seed.
        Setting(
            "tinygrad's random generator",
            _generator,
            lambda state: Tensor.manual_seed(state[0]),
            shown=False,
        ),
    )
    einsum = staticmethod(Tensor.einsum)
    compiles = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if values.dtype != np.float64:
            return Tensor(values)
        if dtype == "bfloat16":  # NumPy lacks it; float32 represents its numbers exactly
            return Tensor(values.astype("float32")).cast(dtypes.bfloat16).realize()
        return Tensor(values.astype(dtype))

    def device_of(self, native: Any) -> str:
        names = native.device if isinstance(native.device, tuple) else (native.device,)
        kinds = {_kind_of(name) for name in names}
        return kinds.pop() if len(kinds) == 1 else ""

    def numpy(self, native: Any) -> np.ndarray:
        values = (native.float() if native.dtype == dtypes.bfloat16 else native).numpy()
        return values if values.dtype == np.bool_ else values.astype(np.float64)

    def dtype(self, native: Any) -> str:
        return _NAMES.get(native.dtype, native.dtype.name)

    def call(self, request: Request) -> Evaluated:
        return _realized(super().call(request))

    def differentiate(self, request: Request) -> Evaluated:
        variables, cotangent = request.variables, request.cotangent
        output, weights = request.function(variables, request.constants)
        gradients: list[Any] = []
        if self.fits(output, cotangent):
            gradients = output.gradient(*variables.values(), gradient=cotangent.cast(output.dtype))
        return _realized(Evaluated(output, weights, dict(zip(variables, gradients, strict=False))))

    def overwrite(self, native: Any, by: Any) -> None:
        native.assign(by).realize()

    def cast(self, native: Any, dtype: str) -> Any:
        return native.cast(getattr(dtypes, dtype))

    def devices(self) -> dict[str, str]:
        return {_kind_of(Device.DEFAULT): f"tinygrad on {Device.DEFAULT}"}


def _realized(lazy: Evaluated) -> Evaluated:
    every = (lazy.output, lazy.weights, *lazy.gradients.values())
    tensors = [item for item in every if isinstance(item, Tensor)]
    if tensors:
        Tensor.realize(*tensors)
    return lazy


_ON_CPU = ("PYTHON", "CPU", "NPY")
"""The names of tinygrad's devices that are the CPU; NPY has arrays of NumPy."""


def _kind_of(name: str) -> str:
    """Return the kind of a device, "cpu" or "gpu"; a second one is called, say, "CUDA:1"."""
    return "cpu" if name.partition(":")[0] in _ON_CPU else "gpu"


_NAMES = {
    dtypes.float64: "float64",
    dtypes.float32: "float32",
    dtypes.bfloat16: "bfloat16",
    dtypes.float16: "float16",
}
