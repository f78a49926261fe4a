"""The record of a run: its format, its findings, and the entries of convention cards."""
