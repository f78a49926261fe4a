"""Search for problems that an implementation gets wrong, and shrink them.

A search (`search`) draws problems (`drawing`), runs the implementation on them (`trial`), and makes
a failing problem smaller (`shrinking`). The problem is saved as a case file, which `run` and `gate`
can run again. If it is small, it can also be written as a program that reproduces the failure
(`script`).
"""
