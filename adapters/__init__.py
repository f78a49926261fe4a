"""Who is checked: one file per library, each readable as documentation of that library.

Adapters import their framework when they are first used, and know nothing of what is expected.
"""
