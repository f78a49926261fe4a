"""NumPy: no derivative, no bfloat16, and the shortest bridge to read first."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from conformance.frameworks.base import Framework


class NumPy(Framework):
    """NumPy arrays in and out."""

    name = "numpy"
    packages: ClassVar[tuple[str, ...]] = ("numpy",)
    array_type = np.ndarray
    differentiable = False
    has_strides = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        return values.astype(dtype) if values.dtype == np.float64 else values.copy()

    def numpy(self, native: Any) -> np.ndarray:
        return native.copy() if native.dtype == np.bool_ else native.astype(np.float64)

    def overwrite(self, native: Any, by: Any) -> None:
        native[...] = by

    def einsum(self, axes: str, *operands: Any) -> Any:
        return np.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        return {"cpu": "NumPy on the CPU"}
