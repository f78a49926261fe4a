"""Judge untrusted kernels on fresh problems, in a sandbox, with a verdict that explains mistakes.

A candidate is a function in a file. It runs in a sandbox (`sandbox`), where a small program
(`runner`) receives problems, calls the candidate, and returns arrays. Everything else happens in
the controlling process: it draws problems, compares answers and looks for cheating (`judge`), and
reaches a verdict (`verdict`), for one candidate or for many (`pool`).

docs/judge.md says what is trusted, what is defended against, and what is not.
"""

from __future__ import annotations
