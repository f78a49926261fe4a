"""The base of ONNX, onnxruntime and OpenVINO: NumPy arrays go into a graph and come out of it.

Such a runtime has operators, not arrays. So arrays are NumPy's, with ml_dtypes for bfloat16, and
every product is a graph of one operator that the runtime runs. NumPy only moves axes, which rounds
nothing, and adds the bias of a projection, which rounds once in any framework.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

import ml_dtypes
import numpy as np

from conformance.frameworks.numpy_bridge import NumPy


class Runtime(NumPy):
    """A bridge to a runtime of graphs, with arrays of NumPy."""

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if dtype == "bfloat16" and values.dtype == np.float64:
            return values.astype(ml_dtypes.bfloat16)
        return super().array(values, dtype, device)

    def einsum(self, axes: str, *operands: Any) -> Any:
        given, wanted = axes.split("->")
        left, right = given.split(",")
        rows = [axis for axis in left if axis in wanted]
        summed = [axis for axis in left if axis not in wanted]
        columns = [axis for axis in right if axis in wanted]
        sizes = {
            axis: size
            for names, operand in zip((left, right), operands, strict=True)
            for axis, size in zip(names, operand.shape, strict=True)
        }

        def matrix(operand: Any, names: str, first: list[str], second: list[str]) -> Any:
            moved = operand.transpose([names.index(axis) for axis in (*first, *second)])
            both = [math.prod(sizes[axis] for axis in part) for part in (first, second)]
            return np.ascontiguousarray(moved.reshape(both))

        product = self.matmul(
            matrix(operands[0], left, rows, summed), matrix(operands[1], right, summed, columns)
        )
        made = (*rows, *columns)
        opened = product.reshape([sizes[axis] for axis in made])
        return np.ascontiguousarray(opened.transpose([made.index(axis) for axis in wanted]))

    @abstractmethod
    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the product of two matrices, computed by the runtime in their dtype."""

    def devices(self) -> dict[str, str]:
        return {"cpu": f"{self.name} on the CPU"}
