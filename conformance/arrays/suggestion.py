"""Write a small problem in which common mistakes show, to be run in another language."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from conformance.arrays.files import grouped, option
from conformance.arrays.given import (
    LAYOUTS,
    Given,
    Numbers,
    given_layout,
    readings,
    separate,
)
from conformance.cases.casefile import Tensor, write
from conformance.definition.dtypes import dtype_of
from conformance.definition.expectation import solve
from conformance.definition.features import ARRAYS
from conformance.errors import BadArrays, ConformanceError

SEED = 20_240_601


def suggest(path: Path, arrays: Mapping[str, Numbers], told: Mapping[str, Any]) -> str:
    """Write query, key and value, other arrays that were told, and the output that is wanted.

    All sizes differ, keys outnumber queries, and logits are of ordinary size, so that no two axes,
    alignments or factors are mistaken for each other. Of a dump, its numbers of heads and its
    features are kept.

    Raises:
        ConformanceError: if the name does not end in .npz or .safetensors.
    """
    if path.suffix not in (".npz", ".safetensors"):
        raise BadArrays(f"{path}: the name says which format, .npz or .safetensors")
    random = np.random.Generator(np.random.PCG64(SEED))
    layout = told.get("layout") or LAYOUTS[4][0]
    dtype = told.get("dtype") or "float32"
    heads, kv_heads = told.get("heads") or 4, told.get("kv_heads") or 2
    if "query" in arrays and "key" in arrays and "value" in arrays:
        found = readings(
            Given(
                query=arrays["query"],
                key=arrays["key"],
                value=arrays["value"],
                output=None,
                layout=told.get("layout", ""),
                heads=told.get("heads"),
                kv_heads=told.get("kv_heads"),
            )
        )[0]
        heads, kv_heads = found.problem.shape.heads, found.problem.shape.kv_heads
        layout, dtype = found.layout, found.problem.dtype
    batch, queries, keys, size = 3, 5, 11, 8

    def drawn(count: int, length: int) -> np.ndarray:
        values = dtype_of(dtype).round(1.5 * random.standard_normal((batch, count, length, size)))
        return (
            given_layout(values, layout) if "batch" in layout else given_layout(values[:1], layout)
        )

    made: dict[str, np.ndarray] = {
        "query": drawn(heads, queries),
        "key": drawn(kv_heads, keys),
        "value": drawn(kv_heads, keys),
    }
    if "mask" in arrays:
        mask = random.random((batch, 1, queries, keys)) < 0.7
        mask[..., 0] = True
        made["mask"] = mask if "batch" in layout else mask[:1]
    if "bias" in arrays:
        made["bias"] = dtype_of(dtype).round(random.standard_normal((1, heads, queries, keys)))
    for name in (name for name, axes in ARRAYS.items() if name in arrays and axes == ("heads",)):
        made[name] = dtype_of(dtype).round(random.standard_normal(heads))
    kept = {
        name: option(name, str(value)) if name in ("causal", "window") else value
        for name, value in told.items()
        if "." not in name and name not in ("layout", "dtype", "accuracy", "mask_true")
    }
    kept |= grouped(told)
    if kept.get("causal") is True:
        kept["causal"] = "bottom-right"
    given = Given(
        **{
            **made,
            "output": None,
            "layout": layout,
            "dtype": dtype,
            "mask_true": ("attends"),
            **kept,
        }
    )
    reading = readings(given)[0]
    output = separate(solve(reading.problem, gradients=False).output, heads)
    made["wanted"] = given_layout(output, layout)
    stored = np.float64 if dtype == "float64" else np.float32
    final = {n: a if a.dtype == np.bool_ else a.astype(stored) for n, a in made.items()}
    try:
        if path.suffix == ".npz":
            np.savez(path, **final)  # type: ignore[arg-type]
        else:
            tensors = {
                name: Tensor.of(name, a.astype(np.uint8) if a.dtype == np.bool_ else a)
                for name, a in final.items()
            }
            write(path, tensors, {})
    except OSError as error:
        raise ConformanceError(f"{path} cannot be written: {error.strerror}") from error
    return f"{path}: {', '.join(final)}, axes {layout}; add your output to it, as output"
