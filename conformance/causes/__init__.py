"""Explain a wrong answer: which known defect produces it, and which part of it is wrong?

Most defective implementations give the right answer to another problem (the mask inverted, the
scale forgotten, two weights swapped) or compute one stage differently. Each such defect is a
hypothesis, which predicts an answer. A wrong cause is worse than none, so most defects are reported
only if the returned array equals the predicted one, up to rounding noise, wherever a number is
predicted, and no simpler hypothesis fits. If only a part of an array is wrong, and a short phrase
can name this part, the phrase is reported too.

docs/causes.md says how often the reported cause is right; `python -m mutants --causes`, in tests/,
measures this.
"""

from __future__ import annotations

from conformance.causes.diagnose import explain, of_entries

__all__ = ["explain", "of_entries"]
