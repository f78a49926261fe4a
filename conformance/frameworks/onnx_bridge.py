"""ONNX models of one operator, run by ONNX's reference evaluator or by onnxruntime.

Models fix the number of axes of their inputs but not the sizes, so one model serves all sizes.
The reference evaluator runs each operator in NumPy. onnxruntime runs on the CPU with its default
optimisations; operators without a float16 kernel are computed in float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from conformance.frameworks.numpy_bridge import Runtime

Arrays = Mapping[str, np.ndarray]
Signature = tuple[tuple[str, np.dtype, int], ...]
"""The name, dtype and number of axes of each input that is passed."""


@dataclass(frozen=True)
class Node:
    """An ONNX operator with its attributes.

    Attributes:
        operator: the name of the operator.
        inputs: the names of all its inputs, in order; optional inputs need not be passed.
        outputs: the names of its outputs, in order; "" for one that is not requested.
        attributes: names and values of the attributes that differ from their default.
        opset: the operator set; the default is old enough for all recent runtimes.
        domain: the domain that defines the operator, in version 1; "" for ONNX's own domain, in
            version `opset`.
    """

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("output",)
    attributes: tuple[tuple[str, Any], ...] = ()
    opset: int = 17
    domain: str = ""

    def model(self, given: Signature) -> onnx.ModelProto:
        """Return a model of the operator for these inputs; outputs have the first input's dtype."""
        types = {name: helper.np_dtype_to_tensor_dtype(dtype) for name, dtype, _ in given}
        names = [name if name in types else "" for name in self.inputs]
        while not names[-1]:
            names.pop()
        node = helper.make_node(
            self.operator, names, self.outputs, domain=self.domain, **dict(self.attributes)
        )
        info = helper.make_tensor_value_info
        inputs = [info(name, types[name], [None] * axes) for name, _, axes in given]
        outputs = [info(name, types[given[0][0]], None) for name in self.outputs if name]
        opsets = [helper.make_opsetid("", self.opset)]
        opsets += [helper.make_opsetid(self.domain, 1)] if self.domain else []
        return helper.make_model(
            helper.make_graph([node], self.operator, inputs, outputs),
            opset_imports=opsets,
            ir_version=helper.find_min_ir_version_for(opsets[:1]),
        )


MATMUL = Node("MatMul", ("left", "right"))


class _Models(Runtime):
    """The base class of both ONNX bridges; it caches one loaded model per `Node` and signature."""

    node = Node
    """The class `Node`, for adapters, which must not import this module."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Node, Signature], Any] = {}

    def run(self, node: Node, arrays: Arrays) -> dict[str, np.ndarray]:
        """Run the operator on the inputs `arrays`, and return its requested outputs, by name."""
        signature = tuple((name, array.dtype, array.ndim) for name, array in arrays.items())
        if (node, signature) not in self._loaded:
            self._loaded[node, signature] = self.loaded(node.model(signature))
        outputs = self._loaded[node, signature].run(None, dict(arrays))
        return dict(zip(filter(None, node.outputs), outputs, strict=True))

    @abstractmethod
    def loaded(self, model: onnx.ModelProto) -> Any:
        """Load the model: return an object whose `run(None, arrays)` returns the outputs."""

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return self.run(MATMUL, {"left": left, "right": right})["output"]


class OnnxReference(_Models):
    """The bridge to ONNX models run by `onnx.reference.ReferenceEvaluator`."""

    name = "onnx"
    packages = ("onnx", "ml_dtypes")

    def loaded(self, model: onnx.ModelProto) -> Any:
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model)


class OnnxRuntime(_Models):
    """The bridge to ONNX models run by `onnxruntime.InferenceSession`, with one thread."""

    name = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def loaded(self, model: onnx.ModelProto) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        # Log nothing, because errors are raised as exceptions too.
        options.log_severity_level = 4
        return onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
