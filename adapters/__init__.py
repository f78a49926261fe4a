"""The built-in adapters: one file per library, each readable as documentation of that library.

Adapters import their framework when they are first used, and never see expected results.
"""
