"""What somebody types who has the library and not this suite: the frame of a reproduction.

`Example` is the shortest call that makes sense; this one is exact: the layer that an adapter builds
for a shape, loaded with given weights, called in a given mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Script:
    """Lines of a library's own words.

    They find NumPy as `np`, native inputs under `query`, `key` and `value`, and native parameters
    under `native`, a dictionary by the names of the parameter table. In JAX `load` and `call` stand
    in a function of these; elsewhere they follow each other, and `native` holds NumPy arrays.

    Args:
        imports: lines.
        build: lines that make `layer`.
        load: lines that load `native` into it.
        call: one expression; `{masks}` stands for mask arguments with a leading comma, or nothing.
        output: the output within what the call returns, which is `{}`.
        weights: the attention weights, likewise, or "".
        parameter: a parameter as something to differentiate by; `{name}` is its native name.
    """

    imports: Sequence[str]
    build: Sequence[str]
    load: Sequence[str]
    call: str
    output: str = "{}"
    weights: str = ""
    parameter: str = ""
