"""The reference answer and the noise that an honest implementation may show."""

from conformance.reference.expectation import LIMIT, Expectation, expect, solve

__all__ = ["LIMIT", "Expectation", "expect", "solve"]
