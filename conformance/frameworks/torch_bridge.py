"""PyTorch: autograd on the parameters of the module itself, loaded in place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch

from conformance.errors import WrongDeclaration
from conformance.frameworks.base import Evaluated, Framework, Function, Natives

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class Torch(Framework):
    """torch tensors in and out."""

    name = "torch"
    packages = ("torch",)
    takes_other_paths = True

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        tensor = torch.tensor(values, device=_device(device))
        return tensor.to(_DTYPES[dtype]) if tensor.dtype == torch.float64 else tensor

    def numpy(self, native: Any) -> np.ndarray:
        tensor = native.detach().cpu()
        return (tensor if tensor.dtype == torch.bool else tensor.double()).numpy()

    def is_array(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def dtype(self, native: Any) -> str:
        return str(native.dtype).removeprefix("torch.")

    def load(
        self, layer: Any, parameters: Mapping[str, np.ndarray], dtype: str, device: str
    ) -> Natives:
        own = dict(layer.named_parameters())
        if own.keys() != parameters.keys():
            raise WrongDeclaration(
                f"{type(layer).__name__} has parameters {sorted(own)}, "
                f"the table has {sorted(parameters)}"
            )
        with torch.no_grad():
            for name, values in parameters.items():
                if tuple(own[name].shape) != values.shape:
                    raise WrongDeclaration(
                        f"{name} has shape {list(own[name].shape)}, "
                        f"the table makes {list(values.shape)}"
                    )
                own[name].copy_(torch.tensor(values))
        return dict(own)

    def place(self, layer: Any, device: str) -> Any:
        return layer.to(_device(device))

    def evaluate(
        self,
        function: Function,
        variables: Natives,
        constants: Natives,
        cotangent: Any,
        *,
        gradients: bool,
        program: Hashable,
        optimised: bool = False,
        compiled: bool = True,
    ) -> Evaluated:
        if not gradients:
            with torch.no_grad():
                return Evaluated(*function(variables, constants), {})
        for tensor in variables.values():
            tensor.requires_grad_()
        output, weights = function(variables, constants)
        if not self.is_array(output) or output.shape != cotangent.shape or not output.requires_grad:
            return Evaluated(output, weights, {})
        found = torch.autograd.grad(
            output, list(variables.values()), cotangent.to(output.dtype), allow_unused=True
        )
        named = zip(variables, found, strict=True)
        return Evaluated(output, weights, {name: grad for name, grad in named if grad is not None})

    def strided(self, native: Any) -> Any:
        return torch.stack([native, native], dim=-1)[..., 0]

    def einsum(self, axes: str, *operands: Any) -> Any:
        return torch.einsum(axes, *operands)

    def devices(self) -> dict[str, str]:
        found = {"cpu": "torch on the CPU"}
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
        return found


def _device(kind: str) -> str:
    return "cuda" if kind == "gpu" else kind
