"""Explain a wrong answer: which known defect produces it, and which part of it is wrong?

Most defective implementations give the right answer to another problem (the mask inverted, the
scale forgotten, two weights swapped) or compute one stage differently. Each such defect is a
hypothesis. Most defects are reported only if the returned array equals the predicted one up to
rounding noise wherever a number is predicted, and no simpler hypothesis fits: a wrong cause is
worse than none. If only a part of an array is wrong, and a short phrase can name this part, it is
reported too.

docs/causes.md says how often the reported cause is right; `python -m mutants --causes`, in tests/,
measures it.
"""

from __future__ import annotations

from conformance.causes.diagnose import explain, of_entries

__all__ = ["explain", "of_entries"]
