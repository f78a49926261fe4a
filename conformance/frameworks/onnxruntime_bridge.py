"""onnxruntime, on the CPU: one session for each operator and kind of inputs, optimised as usual.

Where the CPU has no kernel for float16, onnxruntime casts to float32 and back by itself.
"""

from __future__ import annotations

import numpy as np
import onnxruntime

from conformance.frameworks.onnx_node import MATMUL, Arrays, Node, Signature, signature
from conformance.frameworks.runtime_bridge import Runtime


class OnnxRuntime(Runtime):
    """Models run by `onnxruntime.InferenceSession`."""

    name = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def __init__(self) -> None:
        self._sessions: dict[tuple[Node, Signature], onnxruntime.InferenceSession] = {}

    def run(self, node: Node, arrays: Arrays) -> dict[str, np.ndarray]:
        """What the operator gives: the outputs that are asked for, by name."""
        key = (node, signature(arrays))
        if key not in self._sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            # Errors are raised; what is logged beside them is said twice.
            options.log_severity_level = 4
            self._sessions[key] = onnxruntime.InferenceSession(
                node.model(key[1]).SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        return node.named(self._sessions[key].run(None, dict(arrays)))

    def matmul(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return self.run(MATMUL, {"left": left, "right": right})["output"]
