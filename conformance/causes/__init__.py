"""Name the mistake: which known defect gives exactly this wrong answer, and where is it wrong?

Most defects of an attention are a right answer to another problem (the mask inverted, the scale
forgotten, two weights swapped) or a computation with one stage done otherwise. So a hypothesis is
one of the two, and it is named only if it explains every element of the answer, to the noise, and
nothing simpler does. What explains nothing is not named: a wrong name is worse than none. Beside
the cause it is told where an array is wrong, if it is not all over.

The numbers of how often that is right are in docs/causes.md, and
`python -m mutants --causes`, in tests/, counts them.
"""

from __future__ import annotations

from conformance.causes.declared import of_entries
from conformance.causes.diagnose import explain

__all__ = ["explain", "of_entries"]
