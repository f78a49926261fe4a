"""Bridges to frameworks, looked up by name and imported when first used."""

from __future__ import annotations

import importlib
from functools import cache

from conformance.errors import Unavailable, UnknownName
from conformance.frameworks.base import Framework

BRIDGES = {
    "numpy": ("conformance.frameworks.numpy_bridge", "NumPy", "numpy"),
    "torch": ("conformance.frameworks.torch_bridge", "Torch", "torch"),
    "jax": ("conformance.frameworks.jax_bridge", "Jax", "jax"),
    "tensorflow": ("conformance.frameworks.tensorflow_bridge", "TensorFlow", "tensorflow"),
    "onnx": ("conformance.frameworks.onnx_bridge", "OnnxReference", "onnx"),
    "onnxruntime": ("conformance.frameworks.onnxruntime_bridge", "OnnxRuntime", "onnxruntime"),
    "openvino": ("conformance.frameworks.openvino_bridge", "OpenVino", "openvino"),
    "mlx": ("conformance.frameworks.mlx_bridge", "Mlx", "mlx.core"),
    "paddle": ("conformance.frameworks.paddle_bridge", "Paddle", "paddle"),
    "tinygrad": ("conformance.frameworks.tinygrad_bridge", "Tinygrad", "tinygrad"),
}
"""Framework name to module, class and the import that it needs."""

LACKS = {"numpy": ("bfloat16",)}
"""Dtypes that a framework does not have, known without importing it."""


@cache
def framework(name: str) -> Framework:
    """The bridge; raises `Unavailable` where the framework is not installed or does not import."""
    if name not in BRIDGES:
        raise UnknownName("framework", name, BRIDGES)
    module, bridge, needed = BRIDGES[name]
    try:
        importlib.import_module(needed)
    except ModuleNotFoundError as error:
        if error.name != needed:
            raise Unavailable(f"{needed} does not import: {error}") from error
        raise Unavailable(f"{needed} is not installed; pip install {needed}") from error
    except Exception as error:
        raise Unavailable(f"{needed} does not import: {type(error).__name__}: {error}") from error
    try:
        return getattr(importlib.import_module(module), bridge)()
    except ModuleNotFoundError as error:
        if (error.name or "conformance").startswith("conformance"):
            raise
        told = f"{error.name} is not installed; pip install {error.name}"
        raise Unavailable(f"{needed} needs another package here: {told}") from error
