"""What changed between two records: regressions first, and nothing hidden that came or went.

`model` is the outcome as data, `compare` makes it of records, `tell` prints it. Records only are
read, so no framework is needed, and neither is the catalogue that they were made with.
"""

from conformance.reports.changes.compare import compare, load_side
from conformance.reports.changes.model import Changes

__all__ = ["Changes", "compare", "load_side"]
