"""ONNX models of one operator: what is given, what is asked for, and in which opset.

No sizes are written into a model, only the number of axes, so that one model serves all shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

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
        """The model, for inputs of these dtypes; outputs have the dtype of the first."""
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

    def named(self, found: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
        """What a run returned, by the names of the outputs that were asked for."""
        return dict(zip(filter(None, self.outputs), found, strict=True))


def signature(arrays: Arrays) -> Signature:
    """What a model has to know of its inputs."""
    return tuple((name, array.dtype, array.ndim) for name, array in arrays.items())


def _typed(name: str, dtype: np.dtype, shape: list[None] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(dtype), shape)


MATMUL = Node("MatMul", ("left", "right"))
