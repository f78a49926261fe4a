"""What changed between two records: regressions first, and nothing hidden that came or went.

`compare` makes it of records, as data, and `tell` prints it. Records only are read, so no framework
is needed, and neither is the catalogue that they were made with.
"""

from conformance.reports.changes.compare import Changes, compare, load_side

__all__ = ["Changes", "compare", "load_side"]
