"""ONNX itself: its reference evaluator, which is NumPy, operator by operator."""

from __future__ import annotations

import numpy as np
from onnx.reference import ReferenceEvaluator

from conformance.frameworks.onnx_node import MATMUL, Arrays, Node, Signature, signature
from conformance.frameworks.runtime_bridge import Runtime


class OnnxReference(Runtime):
    """Models run by `onnx.reference.ReferenceEvaluator`."""

    name = "onnx"
    packages = ("onnx", "ml_dtypes")

    def __init__(self) -> None:
        self._evaluators: dict[tuple[Node, Signature], ReferenceEvaluator] = {}

    def run(self, node: Node, arrays: Arrays) -> dict[str, np.ndarray]:
        """What the operator gives: the outputs that are asked for, by name."""
        key = (node, signature(arrays))
        if key not in self._evaluators:
            self._evaluators[key] = ReferenceEvaluator(node.model(key[1]))
        return node.named(self._evaluators[key].run(None, dict(arrays)))

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return self.run(MATMUL, {"left": left, "right": right})["output"]
