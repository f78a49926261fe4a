"""Bridges to frameworks, looked up by name and imported when first used."""

from __future__ import annotations

import importlib
import os
from functools import cache

from conformance.errors import Unavailable, UnknownName
from conformance.frameworks.base import Framework

BRIDGES = {
    "numpy": ("conformance.frameworks.numpy_bridge", "NumPy", "numpy"),
    "torch": ("conformance.frameworks.torch_bridge", "Torch", "torch"),
    "jax": ("conformance.frameworks.jax_bridge", "Jax", "jax"),
    "tensorflow": ("conformance.frameworks.tensorflow_bridge", "TensorFlow", "tensorflow"),
    "onnx": ("conformance.frameworks.onnx_bridge", "OnnxReference", "onnx"),
    "onnxruntime": ("conformance.frameworks.onnx_bridge", "OnnxRuntime", "onnxruntime"),
    "openvino": ("conformance.frameworks.openvino_bridge", "OpenVino", "openvino"),
    "mlx": ("conformance.frameworks.mlx_bridge", "Mlx", "mlx.core"),
    "paddle": ("conformance.frameworks.paddle_bridge", "Paddle", "paddle"),
    "tinygrad": ("conformance.frameworks.tinygrad_bridge", "Tinygrad", "tinygrad"),
}
"""For each framework: the module and class of its bridge, and the framework's own module."""

LACKS = {"numpy": ("bfloat16",)}
"""The dtypes that a framework lacks, if any, so that they are known without importing it."""

DISTRIBUTIONS = {"mlx.core": "mlx", "paddle": "paddlepaddle"}
"""The distribution to install, for frameworks whose module is named differently."""

ENVIRONMENT = {"tinygrad": ("DEV", "PYTHON")}
"""An environment variable and its value for a framework, set before the import unless the variable
is set already. tinygrad's devices other than PYTHON need a compiler or a GPU."""


@cache
def framework(name: str) -> Framework:
    """Return the bridge to a framework.

    Raises:
        UnknownName: there is no bridge to a framework of this name.
        Unavailable: the framework cannot be imported, or another package that its bridge needs is
            not installed.
    """
    if name not in BRIDGES:
        raise UnknownName("framework", name, BRIDGES)
    module, bridge, needed = BRIDGES[name]
    if name in ENVIRONMENT:
        os.environ.setdefault(*ENVIRONMENT[name])
    try:
        importlib.import_module(needed)
    except ModuleNotFoundError as error:
        if error.name not in (needed, needed.partition(".")[0]):
            raise Unavailable(f"{needed} does not import: {error}") from error
        package = DISTRIBUTIONS.get(needed, needed)
        raise Unavailable(f"{needed} is not installed; pip install {package}") from error
    except Exception as error:
        raise Unavailable(f"{needed} does not import: {type(error).__name__}: {error}") from error
    try:
        return getattr(importlib.import_module(module), bridge)()
    except ModuleNotFoundError as error:
        if (error.name or "conformance").startswith("conformance"):
            raise
        raise Unavailable(
            f"{needed} needs another package here: "
            f"{error.name} is not installed; pip install {error.name}"
        ) from error


def require(module: str) -> None:
    """Import a module that an adapter needs; raise `Unavailable` if that fails."""
    reason = _why_not(module)
    if reason:
        raise Unavailable(reason)


@cache
def _why_not(module: str) -> str:
    """Return why a module cannot be imported, or "" if it can.

    The result is cached, because a second attempt at importing it may end differently.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        message = " ".join(str(error).split()).replace(f" ({getattr(error, 'path', '')})", "")
        return f"{module} does not import: {type(error).__name__}: {message}"
    return ""
