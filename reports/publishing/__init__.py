"""What is published of a run over everybody: its records, a table, and a page per implementation.

records ──► keep ──► reports/published/*.json.gz
                          │
baselines ──► sorting ────┼──► table ──► reports/published/README.md
                          └──► page  ──► docs/implementations/*.md
"""
