"""The built-in adapters: a file for each API or family of layers, which also shows how to call it.

Adapters import their framework when they are first used, and never see expected results.
"""
