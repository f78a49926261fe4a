"""Attention over up to a million tokens: problems, calls, and comparison with exact values."""

from conformance.long.calling import call
from conformance.long.checking import check
from conformance.long.problem import Heads, LongProblem, Visibility, draw

__all__ = ["Heads", "LongProblem", "Visibility", "call", "check", "draw"]
