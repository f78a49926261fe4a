"""The TensorFlow bridge calls functions eagerly and differentiates with a gradient tape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from conformance.frameworks.base import Evaluated, Framework, Request, Setting, by_name


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

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        with tf.device(f"{device.upper()}:0"):
            tensor = tf.constant(values)
            return tf.cast(tensor, dtype) if tensor.dtype == tf.float64 else tensor

    def numpy(self, native: Any) -> np.ndarray:
        if native.dtype == tf.bool:
            return native.numpy()
        return tf.cast(native, tf.float64).numpy()

    def dtype(self, native: Any) -> str:
        return str(native.dtype.name)

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        with tf.device(f"{device.upper()}:0"):
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
