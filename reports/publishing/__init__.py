"""Publish a run over all implementations: records, a table, and a page for each.

`write` keeps records in reports/published/, and writes what `pages` renders of them and of the
baselines: reports/published/README.md and docs/implementations/*.md.
"""
