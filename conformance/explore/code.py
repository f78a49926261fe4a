"""Numbers and formulas as lines of Python: the half of a reproduction that needs NumPy only."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.parameters import Parameter
from conformance.definition.problem import Problem, Shape

WIDTH = 100
"""Columns of a line."""

NAMES = {
    "weights.query": "Wq",
    "weights.key": "Wk",
    "weights.value": "Wv",
    "weights.output": "Wo",
    "weights.query_bias": "bq",
    "weights.key_bias": "bk",
    "weights.value_bias": "bv",
    "weights.output_bias": "bo",
    "weights.score": "u",
}
"""What canonical arrays are called in a script; inputs keep their names."""


def called(name: str) -> str:
    """Return an array's name in a script."""
    return NAMES.get(name, name)


def numbers(problem: Problem, *, cotangent: bool) -> dict[str, np.ndarray]:
    """Return every array that a script needs, by its name there."""
    found = {name: getattr(problem, name) for name in problem.shape.distinct_inputs()}
    found |= {called(f"weights.{k}"): array for k, array in problem.weights.named().items()}
    if problem.allowed is not None:
        found["mask"] = problem.allowed
    if problem.attn_bias is not None:
        found["attn_bias"] = problem.attn_bias
    if cotangent:
        found["cotangent"] = problem.cotangent
    return found


def literal(array: np.ndarray) -> str:
    """Return code for an array: nested lists, with numbers as short as exactness allows."""
    if not array.any() and array.size > 3:
        return f"np.zeros({tuple(array.shape)})"
    return _nested(array.astype(int).tolist() if array.dtype == np.bool_ else array.tolist())


def _nested(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_nested, value))}]"
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, float)
    if math.isinf(value):
        return "-np.inf" if value < 0 else "np.inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e6 else repr(value)


def written(arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return lines that assign the dictionary of arrays to `n`, and the mask to `mask`."""
    entries = [f"{name}={literal(array)}," for name, array in arrays.items() if name != "mask"]
    lines = enclosed("n = dict(", entries, ")")
    lines.append("n = {name: np.array(numbers, float) for name, numbers in n.items()}")
    if "mask" in arrays:
        lines += enclosed("mask = np.array(", [f"{literal(arrays['mask'])},", "bool"], ")")
    return lines


def enclosed(before: str, entries: Iterable[str], after: str) -> list[str]:
    """Return entries between brackets, in one line if there is room."""
    every = list(entries)
    whole = before + " ".join(every).rstrip(",") + after
    if len(whole) <= WIDTH:
        return [whole]
    return [before, *packed(every, "    "), after]


def packed(entries: Iterable[str], indent: str) -> list[str]:
    """Return entries side by side; one that is too long goes over several lines."""
    lines: list[str] = []
    for entry in entries:
        for place, piece in enumerate(_pieces(entry, WIDTH - len(indent))):
            room = lines and len(lines[-1]) + 1 + len(piece) <= WIDTH
            if room and place == 0:
                lines[-1] += f" {piece}"
            else:
                lines.append(indent + piece)
    return lines


def _pieces(entry: str, room: int) -> list[str]:
    if len(entry) <= room:
        return [entry]
    pieces = [""]
    for word in re.split(r"(?<=,) ", entry):
        if pieces[-1] and len(pieces[-1]) + 1 + len(word) > room:
            pieces.append(word)
        else:
            pieces[-1] = f"{pieces[-1]} {word}".lstrip()
    return pieces


def definition(problem: Problem, returned: str) -> list[str]:
    """Return a function `attention(n)` that computes the definition in plain NumPy.

    `returned` is "output", "weights" or "averaged". It takes complex numbers too, for
    derivatives by one small imaginary step.
    """
    shape = problem.shape
    key = "query" if shape.sharing == "self" else "key"
    value = key if shape.sharing != "separate" else "value"
    lines = []
    for letter, source in (("q", "query"), ("k", key), ("v", value)):
        line = f'    {letter} = np.einsum("bse,ehd->bhsd", n["{source}"], n["W{letter}"])'
        lines.append(line + (f' + n["b{letter}"][:, None]' if shape.bias else ""))
    if shape.group > 1:
        lines.append(f"    k, v = k.repeat({shape.group}, axis=1), v.repeat({shape.group}, axis=1)")
    if shape.score == "additive":
        inner = "np.tanh(q[:, :, :, None] + k[:, :, None])"
        logits = f'np.einsum("bhqkd,hd->bhqk", {inner}, n["u"])'
        factor = "" if problem.scale is None else f" * {problem.scale!r}"
    else:
        logits = 'np.einsum("bhqd,bhkd->bhqk", q, k)'
        factor = f" / np.sqrt({shape.head_size})"
        if problem.scale is not None:
            factor = f" * {problem.scale!r}"
        elif shape.head_size == 1:
            factor = ""
    lines.append(f"    logits = {logits}{factor}")
    if problem.attn_bias is not None:
        lines.append('    logits = logits + n["attn_bias"]')
    if problem.allowed is not None:
        lines.append("    logits = np.where(mask, logits, -np.inf)")
    lines += [
        "    powers = np.exp(logits - logits.real.max(axis=-1, keepdims=True))",
        "    weights = powers / powers.sum(axis=-1, keepdims=True)  # the softmax",
    ]
    bias = ' + n["bo"]' if shape.bias else ""
    end = {
        "output": f'np.einsum("bhqk,bhkd,hde->bqe", weights, v, n["Wo"]){bias}',
        "weights": "weights",
        "averaged": "weights.mean(axis=1)",
    }[returned]
    if returned != "output":
        lines = [line for line in lines if not line.startswith("    v = ")]
        lines = [line.replace("k, v = ", "k = ").split(", v.repeat")[0] for line in lines]
    return ["def attention(n):  # the definition", *lines, f"    return {end}"]


def parameter(row: Parameter, shape: Shape) -> str:
    """Return an expression over `n` for a native parameter."""
    canonical, native = layouts.sides(row.pattern)
    left, right = layouts.axes(canonical), layouts.axes(native)
    parts = []
    for name in row.names:
        sizes = dict(zip(left, shape.weight_shapes()[name], strict=True))
        code = f'n["{called(f"weights.{name}")}"]'
        if row.interleaved and shape.group > 1:
            before = ":, " * left.index("heads")
            code += f"[{before}{row.order(shape).tolist()}]"
        order = [left.index(axis) for axis in right]
        if order != sorted(order):
            code += f".transpose({', '.join(map(str, order))})"
        reshaped = layouts.shape(native, sizes)
        if reshaped != tuple(sizes[axis] for axis in right):
            code += f".reshape({', '.join(map(str, reshaped))})"
        parts.append(code)
    if row.stack is None:
        return parts[0]
    axis = f", axis={row.stack}" if row.stack else ""
    return f"np.concatenate([{', '.join(parts)}]{axis})"


def laid_out(array: np.ndarray, problem: Problem) -> str:
    """Return code for the array of a mask argument, by the name of an equal canonical array."""
    known: list[tuple[str, np.ndarray]] = []
    if problem.allowed is not None:
        known = [("mask", problem.allowed), ("~mask", ~problem.allowed)]
    if problem.attn_bias is not None:
        known.append(('n["attn_bias"]', problem.attn_bias))
    for code, canonical in known:
        if canonical.dtype == array.dtype and canonical.size == array.size:
            if canonical.shape == array.shape and (canonical == array).all():
                return code
            if (canonical.reshape(array.shape) == array).all():
                shaped = f"({code})" if code.startswith("~") else code
                return f"{shaped}.reshape({', '.join(map(str, array.shape))})"
    return f"np.array({literal(array)}{', bool' if array.dtype == np.bool_ else ''})"
