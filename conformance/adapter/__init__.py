"""Wrap implementations: declarations, base classes, and lookup by name.

An adapter of one's own needs what `conformance` exports. Adapters of libraries, with several
versions and native arrays of their own, also need these names.
"""

from conformance.adapter.arguments import MaskTable, Spelling
from conformance.adapter.base import FullyMasked
from conformance.adapter.code import keywords
from conformance.adapter.native import NativeAdapter
from conformance.definition.dtypes import DTYPES
from conformance.frameworks import framework
from conformance.frameworks.base import Framework, Natives, since

__all__ = [
    "DTYPES",
    "Framework",
    "FullyMasked",
    "MaskTable",
    "NativeAdapter",
    "Natives",
    "Spelling",
    "framework",
    "keywords",
    "since",
]
