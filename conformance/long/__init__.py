"""Attention over up to a million tokens: exact values to compare every element with."""

from conformance.long.calling import Heads, call
from conformance.long.checking import check
from conformance.long.drawing import draw
from conformance.long.problem import LongProblem
from conformance.long.visibility import Visibility

__all__ = ["Heads", "LongProblem", "Visibility", "call", "check", "draw"]
