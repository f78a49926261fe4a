"""Explain a wrong answer: which known defect produces it, and which part of it is wrong?

Most defective implementations give the right answer to another problem (the mask inverted, the
scale forgotten, two weights swapped) or compute one stage differently. Each such defect is a
hypothesis. It is reported only if it explains every element of the answer up to rounding noise, and
nothing simpler does: a wrong cause is worse than none. If only a part of an array is wrong, that
part is reported too.

docs/causes.md says how often the reported cause is right; `python -m mutants --causes`, in tests/,
measures it.
"""

from __future__ import annotations

from conformance.causes.diagnose import explain, of_entries

__all__ = ["explain", "of_entries"]
