"""Judge kernels that nobody trusts yet: fresh problems, a sandbox, and a verdict that teaches.

A candidate is a function in a file. It runs in a sandbox (`sandbox`) with a small program beside it
(`runner`), which gets problems and returns arrays. All else happens here, in the controller: the
problems are drawn (`fresh`), answers are compared, and a verdict is made (`judge`, `verdict`). Many
candidates are judged by several processes (`pool`).

What is trusted, what is defended and what is not: docs/judge.md.
"""

from __future__ import annotations
