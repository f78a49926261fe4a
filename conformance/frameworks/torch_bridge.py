"""PyTorch: autograd on the parameters of the module itself, loaded in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from conformance.frameworks.base import Evaluated, Framework, Request, by_name
from conformance.frameworks.surroundings import Setting


class Torch(Framework):
    """torch tensors in and out."""

    name = "torch"
    packages = ("torch",)
    array_type = torch.Tensor
    einsum = staticmethod(torch.einsum)
    records_graphs = True
    loads_in_place = True
    has_strides = True
    takes_other_paths = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        # Twice as quick as `torch.tensor`. The tensor owns its memory, as a user's does.
        tensor = torch.from_numpy(np.array(values, order="C"))
        wanted = getattr(torch, dtype) if tensor.dtype == torch.float64 else tensor.dtype
        return tensor.to(_device(device), wanted, copy=True)

    def numpy(self, native: Any) -> np.ndarray:
        tensor = native.detach().cpu()
        return (tensor if tensor.dtype == torch.bool else tensor.double()).numpy()

    def place(self, layer: Any, device: str) -> Any:
        return layer.to(_device(device))

    def without_gradients(self) -> Any:
        return torch.no_grad()

    def differentiate(self, request: Request) -> Evaluated:
        variables, cotangent = request.variables, request.cotangent
        constants = {name: _frozen(tensor) for name, tensor in request.constants.items()}
        for tensor in variables.values():
            tensor.requires_grad_()
        output, weights = request.function(variables, constants)
        if not (self.fits(output, cotangent) and output.requires_grad):
            return Evaluated(output, weights, {})
        for left in reversed(range(request.backwards)):
            gradients = torch.autograd.grad(
                output,
                list(variables.values()),
                cotangent.to(output.dtype),
                allow_unused=True,
                retain_graph=left > 0,
            )
        return Evaluated(output, weights, by_name(variables, gradients))

    def settings(self) -> tuple[Setting, ...]:
        return _SETTINGS

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        try:
            yield
        finally:
            if device == "gpu":
                # Kernels fail later than they are called: this failure belongs to this problem.
                torch.cuda.synchronize()

    def overwrite(self, native: Any, by: Any) -> None:
        with torch.no_grad():
            native.copy_(by)

    def cast(self, native: Any, dtype: str) -> Any:
        return native.to(getattr(torch, dtype))

    def devices(self) -> dict[str, str]:
        models = {"cpu": "torch on the CPU"}
        if torch.cuda.is_available():
            models["gpu"] = torch.cuda.get_device_name()
        return models


def _frozen(tensor: Any) -> Any:
    """Return the tensor without a gradient; a new one only if it is computed from others."""
    return tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach()


def _put_generator(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


_SETTINGS = (
    Setting(
        "torch's random generator",
        lambda: torch.get_rng_state().numpy().tobytes(),
        _put_generator,
        shown=False,
    ),
    Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("whether torch records gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "torch's float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    Setting(
        "whether torch uses deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Setting(
        "torch's kernels of scaled-dot-product attention",
        lambda: (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        lambda values: (
            torch.backends.cuda.enable_flash_sdp(values[0]),
            torch.backends.cuda.enable_mem_efficient_sdp(values[1]),
            torch.backends.cuda.enable_math_sdp(values[2]),
        ),
    ),
)


def _device(kind: str) -> str:
    return "cuda" if kind == "gpu" else kind
