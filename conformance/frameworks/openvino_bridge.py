"""OpenVINO's CPU plugin: models are made of its own operators, compiled, and inferred.

A compiled model computes in float32 only if it is asked to: `INFERENCE_PRECISION_HINT` is bfloat16
or float16 by itself on CPUs that have such instructions. float64 is computed in float32 whatever is
asked, and so is float16 on most CPUs; inputs and outputs keep their dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import openvino as ov
from openvino import opset13

from conformance.frameworks.runtime_bridge import Runtime

EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    # Of a cache between inferences, which would be in 8 bits.
    "KV_CACHE_PRECISION": "f32",
    # With one thread errors are lost: an inference that failed returns arrays without elements.
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
    """NumPy arrays in and out of compiled models."""

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
        """Return the output of the last of these inferences, which share the state of the model.

        Args:
            program: equal for models that differ in nothing but their inputs' dtypes and sizes.
            make: the model, of parameters with the names of the arrays.
            inferences: arrays by name.
            known: axes whose sizes the model knows, by name.
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
        # After an inference that raised, others of the same compiled model raise too, or end the
        # process.
        compiled = self._compiled.pop(key)
        request = compiled.create_infer_request()
        for given in inferences:
            request.infer([_tensor(given[name]) for name in shapes])
        self._compiled[key] = compiled
        return _array(request.get_output_tensor(0))

    def devices(self) -> dict[str, str]:
        # What it computes in depends on this, and on no other feature of a CPU.
        abilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        return {"cpu": f"openvino on a CPU {'with' if 'BF16' in abilities else 'without'} bfloat16"}

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        def make(left: Any, right: Any) -> ov.Model:
            product = opset13.matmul(left, right, transpose_a=False, transpose_b=False)
            return ov.Model([product], [left, right])

        return self.run("product", make, {"left": left, "right": right})


def _tensor(array: np.ndarray) -> ov.Tensor:
    # Unlike np.ascontiguousarray, it leaves a number without axes so.
    whole = np.require(array, requirements="C")
    if array.dtype == ml_dtypes.bfloat16:
        return ov.Tensor(whole.view(np.uint16), list(whole.shape), ov.Type.bf16)
    return ov.Tensor(whole)


def _array(tensor: ov.Tensor) -> np.ndarray:
    array = np.array(tensor.data)
    bfloat16 = tensor.element_type == ov.Type.bf16 and array.dtype != ml_dtypes.bfloat16
    return array.view(ml_dtypes.bfloat16) if bfloat16 else array
