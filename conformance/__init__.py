"""A conformance suite for multi-head attention.

The names below are the public API for adapters and scripts. Each is imported when it is first
used, so that `import conformance` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.adapter.arguments import CausalFlag, MaskArgument
    from conformance.adapter.base import Adapter, Call, Mode
    from conformance.adapter.code import Example
    from conformance.adapter.features import (
        Alibi,
        HeadNorm,
        Lengths,
        PositionIds,
        RotaryBase,
        RotaryTables,
        SegmentIds,
        Sinks,
        SoftCap,
        Window,
    )
    from conformance.adapter.function import Function, attention_function
    from conformance.adapter.handing import Cache, Packed, Pages
    from conformance.adapter.native import Layer
    from conformance.adapter.parameters import Parameter
    from conformance.adapter.world import Distributed, Shard, Split, World
    from conformance.definition.geometry import Geometry
    from conformance.definition.problem import Answer, Problem, Shape, Weights
    from conformance.errors import Unavailable, Unsupported
    from conformance.judging.pool import judge
    from conformance.running.checks import assert_conforms, parametrize_with_checks
    from conformance.running.examine import Outcome, examine

_PUBLIC = {
    "Adapter": "conformance.adapter.base",
    "Alibi": "conformance.adapter.features",
    "Answer": "conformance.definition.problem",
    "Cache": "conformance.adapter.handing",
    "Call": "conformance.adapter.base",
    "CausalFlag": "conformance.adapter.arguments",
    "Distributed": "conformance.adapter.world",
    "Example": "conformance.adapter.code",
    "Function": "conformance.adapter.function",
    "Geometry": "conformance.definition.geometry",
    "HeadNorm": "conformance.adapter.features",
    "Layer": "conformance.adapter.native",
    "Lengths": "conformance.adapter.features",
    "MaskArgument": "conformance.adapter.arguments",
    "Mode": "conformance.adapter.base",
    "Outcome": "conformance.running.examine",
    "Packed": "conformance.adapter.handing",
    "Pages": "conformance.adapter.handing",
    "Parameter": "conformance.adapter.parameters",
    "PositionIds": "conformance.adapter.features",
    "Problem": "conformance.definition.problem",
    "RotaryBase": "conformance.adapter.features",
    "RotaryTables": "conformance.adapter.features",
    "SegmentIds": "conformance.adapter.features",
    "Shape": "conformance.definition.problem",
    "Shard": "conformance.adapter.world",
    "Sinks": "conformance.adapter.features",
    "SoftCap": "conformance.adapter.features",
    "Split": "conformance.adapter.world",
    "Unavailable": "conformance.errors",
    "Unsupported": "conformance.errors",
    "Weights": "conformance.definition.problem",
    "Window": "conformance.adapter.features",
    "World": "conformance.adapter.world",
    "assert_conforms": "conformance.running.checks",
    "attention_function": "conformance.adapter.function",
    "examine": "conformance.running.examine",
    "judge": "conformance.judging.pool",
    "parametrize_with_checks": "conformance.running.checks",
}

__all__ = [
    "Adapter",
    "Alibi",
    "Answer",
    "Cache",
    "Call",
    "CausalFlag",
    "Distributed",
    "Example",
    "Function",
    "Geometry",
    "HeadNorm",
    "Layer",
    "Lengths",
    "MaskArgument",
    "Mode",
    "Outcome",
    "Packed",
    "Pages",
    "Parameter",
    "PositionIds",
    "Problem",
    "RotaryBase",
    "RotaryTables",
    "SegmentIds",
    "Shape",
    "Shard",
    "Sinks",
    "SoftCap",
    "Split",
    "Unavailable",
    "Unsupported",
    "Weights",
    "Window",
    "World",
    "assert_conforms",
    "attention_function",
    "examine",
    "judge",
    "parametrize_with_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
