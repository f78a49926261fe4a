"""The NumPy bridge, and the base class of bridges to runtimes that take NumPy arrays.

NumPy has no derivatives and no bfloat16. ONNX, onnxruntime and OpenVINO have operators but no
arrays, so their bridges use NumPy arrays, with ml_dtypes for bfloat16, and compute every projection
as a graph of one operator in the runtime, a matrix product. NumPy itself only moves axes (exactly),
adds the biases of projections (rounded once, as in any framework), and norms and rotates the keys
that are put in caches.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import einops
import numpy as np

from conformance.frameworks.base import Framework


class NumPy(Framework):
    """The bridge to NumPy."""

    name = "numpy"
    packages: ClassVar[tuple[str, ...]] = ("numpy",)
    array_type = np.ndarray
    differentiable = False
    has_strides = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        return values.astype(dtype) if values.dtype == np.float64 else values.copy()

    def numpy(self, native: Any) -> np.ndarray:
        return native.copy() if native.dtype == np.bool_ else native.astype(np.float64)

    def expanded(self, native: Any, sizes: tuple[int, ...]) -> Any:
        return np.broadcast_to(native, sizes)

    def overwrite(self, native: Any, by: Any) -> None:
        native[...] = by

    def einsum(self, axes: str, *operands: Any) -> Any:
        return np.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        return {"cpu": "NumPy on the CPU"}


class Runtime(NumPy):
    """The base class of bridges to runtimes that execute graphs on NumPy arrays."""

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        if dtype == "bfloat16" and values.dtype == np.float64:
            import ml_dtypes

            return values.astype(ml_dtypes.bfloat16)
        return super().array(values, dtype, device)

    def einsum(self, axes: str, *operands: Any) -> Any:
        given, wanted = axes.split("->")
        left, right = given.split(",")
        rows, columns = ([axis for axis in names if axis in wanted] for names in (left, right))
        summed = [axis for axis in left if axis not in wanted]
        sizes = dict(zip(left + right, operands[0].shape + operands[1].shape, strict=True))
        product = self.matmul(
            _moved(operands[0], f"{' '.join(left)} -> ({' '.join(rows)}) ({' '.join(summed)})"),
            _moved(operands[1], f"{' '.join(right)} -> ({' '.join(summed)}) ({' '.join(columns)})"),
        )
        pattern = f"({' '.join(rows)}) ({' '.join(columns)}) -> {' '.join(wanted)}"
        return _moved(product, pattern, **{axis: sizes[axis] for axis in wanted})

    @abstractmethod
    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Return the product of two matrices, as the runtime computes it for their dtype."""

    def devices(self) -> dict[str, str]:
        return {"cpu": f"{self.name} on the CPU"}


def _moved(array: np.ndarray, pattern: str, **sizes: int) -> np.ndarray:
    """Return an array rearranged by an einops pattern, as a contiguous array."""
    return np.ascontiguousarray(einops.rearrange(array, pattern, **sizes))
