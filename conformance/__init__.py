"""A conformance suite for multi-head attention.

The names below are the public API for adapters and scripts. Each is imported when it is first
used, so that `import conformance` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conformance.adapter.arguments import CausalFlag as CausalFlag
    from conformance.adapter.arguments import MaskArgument as MaskArgument
    from conformance.adapter.base import Adapter as Adapter
    from conformance.adapter.base import Call as Call
    from conformance.adapter.base import LogSumExp as LogSumExp
    from conformance.adapter.base import MaxLogit as MaxLogit
    from conformance.adapter.base import Mode as Mode
    from conformance.adapter.code import Example as Example
    from conformance.adapter.features import Alibi as Alibi
    from conformance.adapter.features import Chunk as Chunk
    from conformance.adapter.features import HeadNorm as HeadNorm
    from conformance.adapter.features import Lengths as Lengths
    from conformance.adapter.features import PositionIds as PositionIds
    from conformance.adapter.features import RotaryBase as RotaryBase
    from conformance.adapter.features import RotaryConfig as RotaryConfig
    from conformance.adapter.features import RotaryTables as RotaryTables
    from conformance.adapter.features import SegmentIds as SegmentIds
    from conformance.adapter.features import Sinks as Sinks
    from conformance.adapter.features import SoftCap as SoftCap
    from conformance.adapter.features import Spans as Spans
    from conformance.adapter.features import Tree as Tree
    from conformance.adapter.features import Window as Window
    from conformance.adapter.function import Function as Function
    from conformance.adapter.function import attention_function as attention_function
    from conformance.adapter.handing import Cache as Cache
    from conformance.adapter.handing import Packed as Packed
    from conformance.adapter.handing import Pages as Pages
    from conformance.adapter.native import Layer as Layer
    from conformance.adapter.parameters import Parameter as Parameter
    from conformance.adapter.world import Distributed as Distributed
    from conformance.adapter.world import Shard as Shard
    from conformance.adapter.world import Split as Split
    from conformance.adapter.world import World as World
    from conformance.arrays.diagnosis import Diagnosis as Diagnosis
    from conformance.arrays.diagnosis import assert_within_noise as assert_within_noise
    from conformance.arrays.diagnosis import diagnose as diagnose
    from conformance.arrays.layers import diagnose_layer as diagnose_layer
    from conformance.arrays.models import compare as compare
    from conformance.arrays.models import compare_models as compare_models
    from conformance.arrays.noise import noise as noise
    from conformance.definition.attention import merge as merge
    from conformance.definition.geometry import Fixed as Fixed
    from conformance.definition.geometry import Geometry as Geometry
    from conformance.definition.problem import Answer as Answer
    from conformance.definition.problem import Problem as Problem
    from conformance.definition.problem import Shape as Shape
    from conformance.definition.problem import Weights as Weights
    from conformance.errors import Unavailable as Unavailable
    from conformance.errors import Unsupported as Unsupported
    from conformance.judging.pool import judge as judge
    from conformance.running.checks import assert_conforms as assert_conforms
    from conformance.running.checks import parametrize_with_checks as parametrize_with_checks
    from conformance.running.examine import Outcome as Outcome
    from conformance.running.examine import examine as examine
    from conformance.stateful.checking import check_stateful as check_stateful
    from conformance.stateful.layer import StatefulLayer as StatefulLayer

_NAMES = {
    "conformance.adapter.arguments": "CausalFlag MaskArgument",
    "conformance.adapter.base": "Adapter Call LogSumExp MaxLogit Mode",
    "conformance.adapter.code": "Example",
    "conformance.adapter.features": "Alibi Chunk HeadNorm Lengths PositionIds RotaryBase "
    "RotaryConfig RotaryTables SegmentIds Sinks SoftCap Spans Tree Window",
    "conformance.adapter.function": "Function attention_function",
    "conformance.adapter.handing": "Cache Packed Pages",
    "conformance.adapter.native": "Layer",
    "conformance.adapter.parameters": "Parameter",
    "conformance.adapter.world": "Distributed Shard Split World",
    "conformance.arrays.diagnosis": "Diagnosis assert_within_noise diagnose",
    "conformance.arrays.layers": "diagnose_layer",
    "conformance.arrays.models": "compare compare_models",
    "conformance.arrays.noise": "noise",
    "conformance.definition.attention": "merge",
    "conformance.definition.geometry": "Fixed Geometry",
    "conformance.definition.problem": "Answer Problem Shape Weights",
    "conformance.errors": "Unavailable Unsupported",
    "conformance.judging.pool": "judge",
    "conformance.running.checks": "assert_conforms parametrize_with_checks",
    "conformance.running.examine": "Outcome examine",
    "conformance.stateful.checking": "check_stateful",
    "conformance.stateful.layer": "StatefulLayer",
}
"""The public names of each module, separated by spaces, by the name of the module."""

_PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'conformance' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
