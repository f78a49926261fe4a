"""tinygrad: lazy tensors, and gradients as further tensors.

Nothing is computed before `realize`; it is asked for here, so that an error belongs to the problem
that made it, and for everything at once, so that output and gradients share their kernels. Without
a compiler there is one device only, PYTHON, which interprets kernels number by number: correct,
and slow.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.helpers import ContextVar

from conformance.errors import Unsupported
from conformance.frameworks.base import Evaluated, Framework, Function, Natives
from conformance.frameworks.surroundings import Setting


class Tinygrad(Framework):
    """tinygrad tensors in and out."""

    name = "tinygrad"
    packages = ("tinygrad",)
    compiles = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if values.dtype != np.float64:
            return Tensor(values)
        if dtype == "bfloat16":  # which NumPy does not have; the numbers are float32's too
            return Tensor(values.astype("float32")).cast(dtypes.bfloat16).realize()
        return Tensor(values.astype(dtype))

    def numpy(self, native: Any) -> np.ndarray:
        values = (native.float() if native.dtype == dtypes.bfloat16 else native).numpy()
        return values if values.dtype == np.bool_ else values.astype(np.float64)

    def is_array(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def dtype(self, native: Any) -> str:
        return _NAMES.get(native.dtype, native.dtype.name)

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
        if backwards > 1:
            raise Unsupported("derivatives of tinygrad are functions, not graphs")
        output, weights = function(variables, constants)
        found: list[Any] = []
        if gradients and self.is_array(output) and output.shape == cotangent.shape:
            pulled = cotangent.cast(output.dtype)
            found = output.gradient(*variables.values(), gradient=pulled)
        wanted = [item for item in (output, weights, *found) if self.is_array(item)]
        if wanted:
            Tensor.realize(*wanted)
        return Evaluated(output, weights, dict(zip(variables, found, strict=False)))

    def settings(self) -> tuple[Setting, ...]:
        return _SETTINGS

    def overwrite(self, native: Any, by: Any) -> None:
        native.assign(by).realize()

    def einsum(self, axes: str, *operands: Any) -> Any:
        return Tensor.einsum(axes, *operands)

    def cast(self, native: Any, dtype: str) -> Any:
        return native.cast(getattr(dtypes, dtype))

    def devices(self) -> dict[str, str]:
        kind = "cpu" if Device.DEFAULT in ("PYTHON", "CPU") else "gpu"
        return {kind: f"tinygrad on {Device.DEFAULT}"}


_NAMES = {
    dtypes.float64: "float64",
    dtypes.float32: "float32",
    dtypes.bfloat16: "bfloat16",
    dtypes.float16: "float16",
}


def _variables() -> dict[str, Any]:
    return {name: variable.value for name, variable in ContextVar._cache.items()}


def _put_variables(values: dict[str, Any]) -> None:
    for name, value in values.items():
        ContextVar._cache[name].value = value


def _generator() -> tuple[int, dict[str, Any]]:
    drawn = {device: counter.tolist() for device, counter in Tensor._device_rng_counters.items()}
    return Tensor._seed, drawn


_SETTINGS = (
    Setting("tinygrad's variables, such as DEV", _variables, _put_variables, told=False),
    # Put back to its seed, not to what was drawn since.
    Setting(
        "tinygrad's random generator",
        _generator,
        lambda state: Tensor.manual_seed(state[0]),
        told=False,
    ),
)
