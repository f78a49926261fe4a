"""The MLX bridge: arrays are lazy, gradients come from `mx.vjp`, and only the CPU has float64.

Nothing is computed before `mx.eval`, which the bridge calls so that an error is attributed to the
problem that caused it. Output and weights are captured while the function is traced, because
`mx.vjp` needs a cotangent of the same dtype for everything that the function returns.

CPU and GPU share their memory, so arrays lie on no device in particular, and MLX does not tell on
which an operation runs. A call that computes on the CPU is therefore not noticed, unless it leaves
another default device behind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from conformance.errors import Unsupported, WrongAnswer
from conformance.frameworks.base import Evaluated, Framework, Function, Natives, Request, Setting


def _generator() -> int:
    high, low = np.array(mx.random.state[0]).tolist()
    return (high << 32) | low


class Mlx(Framework):
    """The bridge to MLX."""

    name = "mlx"
    packages = ("mlx", "mlx-cpu", "mlx-metal", "mlx-cuda-12", "mlx-cuda-13")
    array_type = mx.array
    settings = (
        Setting("MLX' random generator", _generator, mx.random.seed, shown=False),
        Setting("MLX' default device", mx.default_device, mx.set_default_device),
        Setting(
            "MLX' default stream",
            lambda: mx.default_stream(mx.default_device()),
            mx.set_default_stream,
        ),
    )
    einsum = staticmethod(mx.einsum)
    takes_other_paths = True
    has_strides = True
    compiles_modes = True

    def __init__(self) -> None:
        self._programs: dict[Hashable, Callable[..., dict[str, Any]]] = {}

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        # From 0.32 on, MLX refuses negative strides.
        values = np.asarray(values, order="C")
        if values.dtype != np.float64:
            return mx.array(values)
        with mx.stream(mx.cpu):
            native = mx.array(values, mx.float64).astype(getattr(mx, dtype))
            mx.eval(native)
        return native

    def numpy(self, native: Any) -> np.ndarray:
        if native.dtype == mx.bool_:
            return np.array(native)
        with mx.stream(mx.cpu):
            return np.array(native.astype(mx.float64))

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        if dtype == "float64" and device != "cpu":
            raise Unsupported("mlx has float64 on the CPU only")
        with mx.stream(getattr(mx, device)):
            before = mx.default_device()
            yield
            after = mx.default_device()
        if after != before:
            raise WrongAnswer(f"MLX' default device: {before} became {after}")

    def call(self, request: Request) -> Evaluated:
        return self._run(request, _plain(request.function))

    def differentiate(self, request: Request) -> Evaluated:
        try:
            return self._run(request, _vjp(request.function))
        except _NoDerivative:
            return self.call(replace(request, compiled=False))

    def _run(self, request: Request, run: Callable[..., dict[str, Any]]) -> Evaluated:
        if request.optimised and request.compiled:
            key = (request.program, request.gradients)
            run = self._programs.setdefault(key, mx.compile(run))
        arrays = run(request.variables, request.constants, request.cotangent)
        mx.eval(arrays)
        return Evaluated(arrays["output"], arrays.get("weights"), arrays.get("gradients", {}))

    def overwrite(self, native: Any, by: Any) -> None:
        native[...] = by

    def cast(self, native: Any, dtype: str) -> Any:
        return native.astype(getattr(mx, dtype))

    def take(self, native: Any, index: np.ndarray) -> Any:
        return native[mx.array(index)]

    def devices(self) -> dict[str, str]:
        models = {"cpu": "mlx on the CPU"}
        if mx.is_available(mx.gpu):
            models["gpu"] = str(mx.device_info(mx.gpu).get("device_name", "GPU"))
        return models


class _NoDerivative(Exception):
    """Raised if the output of the function is not an array of the cotangent's shape."""


def _vjp(function: Function) -> Callable[..., dict[str, Any]]:
    def run(variables: Natives, constants: Natives, cotangent: Any) -> dict[str, Any]:
        results: dict[str, Any] = {}

        def forward(*given: Any) -> Any:
            results.update(_plain(function)(dict(zip(variables, given, strict=True)), constants))
            output = results["output"]
            if not isinstance(output, mx.array) or output.shape != cotangent.shape:
                raise _NoDerivative
            return output.astype(cotangent.dtype)

        _, gradients = mx.vjp(forward, list(variables.values()), [cotangent])
        return results | {"gradients": dict(zip(variables, gradients, strict=True))}

    return run


def _plain(function: Function) -> Callable[..., dict[str, Any]]:
    def run(variables: Natives, constants: Natives, cotangent: Any = None) -> dict[str, Any]:
        output, weights = function(variables, constants)
        return {"output": output} | ({} if weights is None else {"weights": weights})

    return run
