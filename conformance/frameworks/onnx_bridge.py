"""ONNX models of one operator, run by ONNX' own reference evaluator or by onnxruntime.

No sizes are written into a model, only the number of axes, so that one model serves all shapes.
The reference evaluator is NumPy, operator by operator. onnxruntime runs on the CPU and optimises as
usual; where the CPU has no kernel for float16, it casts to float32 and back by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from conformance.frameworks.runtime_bridge import Runtime

Arrays = Mapping[str, np.ndarray]
Signature = tuple[tuple[str, np.dtype, int], ...]
"""Of each input that is given: name, dtype, number of axes."""

OPSET = 17
"""For operators that did not change since: what every runtime of the last years reads."""


@dataclass(frozen=True)
class Node:
    """One operator.

    Attributes:
        operator: its name.
        inputs: the names of all of its inputs, in order; what is not given is left out.
        outputs: names of those that are asked for, in order; "" for one that is not.
        attributes: name and value of those that are not left to their default.
        opset, domain: where it is defined. Other domains than ONNX' own have version 1.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("output",)
    attributes: tuple[tuple[str, Any], ...] = ()
    opset: int = OPSET
    domain: str = ""

    def model(self, given: Signature) -> onnx.ModelProto:
        """Return the model for inputs of these dtypes; outputs have the dtype of the first."""
        names = [name if name in {item[0] for item in given} else "" for name in self.inputs]
        while not names[-1]:
            names.pop()
        node = helper.make_node(
            self.operator, names, self.outputs, domain=self.domain, **dict(self.attributes)
        )
        inputs = [_typed(name, dtype, [None] * axes) for name, dtype, axes in given]
        outputs = [_typed(name, given[0][1], None) for name in self.outputs if name]
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(self.domain, 1)] if self.domain else []
        return helper.make_model(
            helper.make_graph([node], self.operator, inputs, outputs),
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets[:1]),
        )


def _typed(name: str, dtype: np.dtype, shape: list[None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)


MATMUL = Node("MatMul", ("left", "right"))


class _Models(Runtime):
    """A runner of models; each is loaded once per kind of inputs."""

    node = Node
    """For adapters, which know their bridge and no module of this room."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Node, Signature], Any] = {}

    def run(self, node: Node, arrays: Arrays) -> dict[str, np.ndarray]:
        """Return the requested outputs of the operator, by name."""
        signature = tuple((name, array.dtype, array.ndim) for name, array in arrays.items())
        if (node, signature) not in self._loaded:
            self._loaded[node, signature] = self.loaded(node.model(signature))
        outputs = self._loaded[node, signature].run(None, dict(arrays))
        return dict(zip(filter(None, node.outputs), outputs, strict=True))

    @abstractmethod
    def loaded(self, model: onnx.ModelProto) -> Any:
        """Return the model as an object whose `run(None, arrays by name)` returns the outputs."""

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return self.run(MATMUL, {"left": left, "right": right})["output"]


class OnnxReference(_Models):
    """Models run by `onnx.reference.ReferenceEvaluator`."""

    name = "onnx"
    packages = ("onnx", "ml_dtypes")

    def loaded(self, model: onnx.ModelProto) -> Any:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model)


class OnnxRuntime(_Models):
    """Models run by `onnxruntime.InferenceSession`, with one thread."""

    name = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def loaded(self, model: onnx.ModelProto) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        # Errors are raised; what is logged beside them is said twice.
        options.log_severity_level = 4
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
