"""A conformance suite for multi-head attention.

The names below are what an adapter or a script needs. Each loads when it is first used, so that
`import conformance` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.adapter.arguments import CausalFlag, MaskArgument
    from conformance.adapter.base import Adapter, Call, Mode
    from conformance.adapter.code import Example
    from conformance.adapter.function import Function, attention_function
    from conformance.adapter.layer import Layer
    from conformance.adapter.parameters import Parameter
    from conformance.definition.problem import Answer, Problem, Shape, Weights
    from conformance.errors import Unavailable, Unsupported
    from conformance.running.checks import assert_conforms, parametrize_with_checks
    from conformance.running.examine import Outcome, examine

_PUBLIC = {
    "Adapter": "conformance.adapter.base",
    "Answer": "conformance.definition.problem",
    "Call": "conformance.adapter.base",
    "CausalFlag": "conformance.adapter.arguments",
    "Example": "conformance.adapter.code",
    "Function": "conformance.adapter.function",
    "Layer": "conformance.adapter.layer",
    "MaskArgument": "conformance.adapter.arguments",
    "Mode": "conformance.adapter.base",
    "Outcome": "conformance.running.examine",
    "Parameter": "conformance.adapter.parameters",
    "Problem": "conformance.definition.problem",
    "Shape": "conformance.definition.problem",
    "Unavailable": "conformance.errors",
    "Unsupported": "conformance.errors",
    "Weights": "conformance.definition.problem",
    "assert_conforms": "conformance.running.checks",
    "attention_function": "conformance.adapter.function",
    "examine": "conformance.running.examine",
    "parametrize_with_checks": "conformance.running.checks",
}

__all__ = [
    "Adapter",
    "Answer",
    "Call",
    "CausalFlag",
    "Example",
    "Function",
    "Layer",
    "MaskArgument",
    "Mode",
    "Outcome",
    "Parameter",
    "Problem",
    "Shape",
    "Unavailable",
    "Unsupported",
    "Weights",
    "assert_conforms",
    "attention_function",
    "examine",
    "parametrize_with_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(_PUBLIC)
