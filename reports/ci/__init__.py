"""Output for CI systems: a job's summary, JUnit, annotations, a badge.

All of it is made of records, after a run, so that the run itself is the same everywhere. `summary`
reads records and writes Markdown, and `outputs` writes everything else.
"""
