"""The TensorFlow bridge calls functions eagerly and differentiates with a gradient tape.

By default, TensorFlow computes on the CPU what has no kernel for the GPU, and says nothing. What is
computed from that on the GPU lies there again, so only a result that stays on the CPU is noticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from conformance.frameworks.base import (
    DeviceState,
    Evaluated,
    Framework,
    Request,
    Setting,
    by_name,
)


class TensorFlow(Framework):
    """The bridge to TensorFlow."""

    name = "tensorflow"
    packages = ("tensorflow", "tensorflow-cpu")
    array_type = tf.Tensor
    einsum = staticmethod(tf.einsum)
    records_graphs = True
    differentiates_weights = True
    settings = (
        Setting(
            "whether TensorFlow runs functions eagerly",
            tf.config.functions_run_eagerly,
            tf.config.run_functions_eagerly,
        ),
        Setting(
            "whether TensorFlow uses TensorFloat-32",
            tf.config.experimental.tensor_float_32_execution_enabled,
            tf.config.experimental.enable_tensor_float_32_execution,
            recorded=True,
        ),
    )

    def __init__(self) -> None:
        self._state = DeviceState()

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        with tf.device(_names(device)[0]):
            tensor = tf.constant(values)
            return tf.cast(tensor, dtype) if tensor.dtype == tf.float64 else tensor

    def device_of(self, native: Any) -> str:
        # A tensor of a graph lies nowhere.
        if not native.device:
            return ""
        return "gpu" if native.device.endswith(_names("gpu")) else "cpu"

    def numpy(self, native: Any) -> np.ndarray:
        if native.dtype == tf.bool:
            return native.numpy()
        return tf.cast(native, tf.float64).numpy()

    def dtype(self, native: Any) -> str:
        return str(native.dtype.name)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        with tf.device(_names(device)[0]):
            if device == "cpu":
                yield
                return
            with self._state.watching(_try):
                yield

    def differentiate(self, request: Request) -> Evaluated:
        variables, cotangent = request.variables, request.cotangent
        with tf.GradientTape(persistent=request.backwards > 1) as tape:
            tape.watch(variables)
            output, weights = request.function(variables, request.constants)
        if not self.fits(output, cotangent):
            return Evaluated(output, weights, {})
        given, cotangents = request.losses(output, weights)
        cast = [tf.cast(one, to.dtype) for one, to in zip(cotangents, given, strict=True)]
        for _ in range(request.backwards):
            gradients = tape.gradient(given, list(variables.values()), cast)
        return Evaluated(output, weights, by_name(variables, gradients))

    def cast(self, native: Any, dtype: str) -> Any:
        return tf.cast(native, dtype)

    def take(self, native: Any, index: np.ndarray) -> Any:
        return tf.gather(native, index)

    def devices(self) -> dict[str, str]:
        models = {"cpu": "tensorflow on the CPU"}
        gpus = tf.config.list_physical_devices("GPU")
        if gpus:
            models["gpu"] = tf.config.experimental.get_device_details(gpus[0]).get(
                "device_name", "GPU"
            )
        return models

    def device_name(self, device: str) -> str:
        return device.upper()

    def toolkit(self) -> dict[str, str]:
        # The keys differ between builds.
        built = tf.sysconfig.get_build_info()
        return {"CUDA": built.get("cuda_version", ""), "cuDNN": built.get("cudnn_version", "")}


@cache
def _names(device: str) -> tuple[str, ...]:
    """Return TensorFlow's names of the devices of a kind, which end the name of a tensor's device.

    TensorFlow takes nearly all of a GPU's memory when it is first asked for this.
    """
    return tuple(found.name for found in tf.config.list_logical_devices(device.upper()))


def _try() -> None:
    """Use the device of the session; raise an exception if that is no longer possible."""
    tf.zeros(1).numpy()
