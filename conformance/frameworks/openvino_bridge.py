"""The bridge to OpenVINO's CPU plugin: models of OpenVINO operators are compiled and run.

By default, `INFERENCE_PRECISION_HINT` is bfloat16 or float16 on CPUs with such instructions, so the
bridge requests float32. OpenVINO always computes float64 in float32, and on most CPUs float16 too;
inputs and outputs keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from openvino import opset13

from conformance.frameworks.numpy_bridge import Runtime

EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    # The cache between inferences would otherwise have 8 bits.
    "KV_CACHE_PRECISION": "f32",
    # With one thread, errors are lost: a failed inference returns empty arrays.
    "INFERENCE_NUM_THREADS": 2,
}
_TYPES = {
    "float64": ov.Type.f64,
    "float32": ov.Type.f32,
    "float16": ov.Type.f16,
    "bfloat16": ov.Type.bf16,
    "bool": ov.Type.boolean,
    "uint8": ov.Type.u8,
    "int32": ov.Type.i32,
    "int64": ov.Type.i64,
}


class OpenVino(Runtime):
    """The bridge to OpenVINO, with NumPy arrays as inputs and outputs."""

    name = "openvino"
    packages = ("openvino",)

    def __init__(self) -> None:
        self._core = ov.Core()
        self._compiled: dict[Hashable, ov.CompiledModel] = {}

    def run(
        self,
        program: Hashable,
        make: Callable[..., ov.Model],
        *inferences: Mapping[str, np.ndarray],
        known: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> np.ndarray:
        """Return the first output of the last of several inferences, which share the model's state.

        Args:
            program: a key, equal for models that differ only in dtypes and sizes of their inputs.
            make: returns the model, given its parameters as keyword arguments.
            inferences: for each inference, the arrays by name of the parameter.
            known: by name of the parameter, the axes whose sizes the compiled model fixes; the
                sizes of all other axes may vary.
        """
        shapes = {
            name: tuple(
                size if axis in known.get(name, ()) else -1 for axis, size in enumerate(array.shape)
            )
            for name, array in inferences[-1].items()
        }
        types = {name: str(array.dtype) for name, array in inferences[-1].items()}
        key = (program, tuple(shapes.items()), tuple(types.items()))
        if key not in self._compiled:
            parameters = {
                name: opset13.parameter(list(shape), _TYPES[types[name]])
                for name, shape in shapes.items()
            }
            self._compiled[key] = self._core.compile_model(make(**parameters), "CPU", EXACT)
        # Drop the compiled model if an inference raises: further inferences would raise too, or
        # crash the process.
        compiled = self._compiled.pop(key)
        request = compiled.create_infer_request()
        for given in inferences:
            request.infer([_tensor(given[name]) for name in shapes])
        self._compiled[key] = compiled
        return _array(request.get_output_tensor(0))

    def devices(self) -> dict[str, str]:
        # The precision depends only on this feature of the CPU.
        abilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return {"cpu": f"openvino on a CPU {'with' if 'BF16' in abilities else 'without'} bfloat16"}

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        def make(left: Any, right: Any) -> ov.Model:
            product = opset13.matmul(left, right, transpose_a=False, transpose_b=False)
            return ov.Model([product], [left, right])

        return self.run("product", make, {"left": left, "right": right})


def _tensor(array: np.ndarray) -> ov.Tensor:
    # Unlike np.ascontiguousarray, np.require keeps zero-dimensional arrays.
    whole = np.require(array, requirements="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ov.Tensor(whole.view(np.uint16), list(whole.shape), ov.Type.bf16)
    return ov.Tensor(whole)


def _array(tensor: ov.Tensor) -> np.ndarray:
    array = np.array(tensor.data)
    bfloat16 = tensor.element_type == ov.Type.bf16 and array.dtype != ml_dtypes.bfloat16
    return array.view(ml_dtypes.bfloat16) if bfloat16 else array
