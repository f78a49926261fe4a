"""The gate: what a run found, held against what is known.

A baseline lists the deviations that somebody knows of, each with its reason. The gate holds if
exactly these are found: one more is a change for the worse, and one less is an entry that has to
go, because otherwise it would excuse the same deviation when it comes back.
"""
