"""Wrap implementations: declarations, base classes, and lookup by name.

The names that `conformance` exports suffice for most adapters. This package also exports the
declarations of features, and names for adapters that support several versions of a library or
handle native arrays.
"""

from conformance.adapter.arguments import FlagEffect, MaskTable, Spelling
from conformance.adapter.base import FullyMasked
from conformance.adapter.code import keywords
from conformance.adapter.features import (
    Alibi,
    Chunk,
    Feature,
    HeadNorm,
    Lengths,
    PositionIds,
    RotaryBase,
    RotaryConfig,
    RotaryTables,
    Said,
    SegmentIds,
    Sinks,
    SoftCap,
    Spans,
    Static,
    Tree,
    Window,
)
from conformance.adapter.handing import Cache, Packed, Pages
from conformance.adapter.native import NativeAdapter, Prepared
from conformance.adapter.parameters import Checkpoint
from conformance.definition.dtypes import DTYPES
from conformance.frameworks import framework
from conformance.frameworks.base import Framework, Natives, since

__all__ = [
    "DTYPES",
    "Alibi",
    "Cache",
    "Checkpoint",
    "Chunk",
    "Feature",
    "FlagEffect",
    "Framework",
    "FullyMasked",
    "HeadNorm",
    "Lengths",
    "MaskTable",
    "NativeAdapter",
    "Natives",
    "Packed",
    "Pages",
    "PositionIds",
    "Prepared",
    "RotaryBase",
    "RotaryConfig",
    "RotaryTables",
    "Said",
    "SegmentIds",
    "Sinks",
    "SoftCap",
    "Spans",
    "Spelling",
    "Static",
    "Tree",
    "Window",
    "framework",
    "keywords",
    "since",
]
