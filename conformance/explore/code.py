"""Write arrays and the definition of attention as code: the pure NumPy part of a reproduction."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

import numpy as np

from conformance.adapter import layouts
from conformance.adapter.parameters import Parameter
from conformance.definition.problem import Problem, Shape

WIDTH = 100
"""The maximum length of a line of generated code."""

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
    "norm.query": "gq",
    "norm.key": "gk",
}
"""The names of weights and gains in a generated script; all other arrays keep theirs."""


def called(name: str) -> str:
    """Return the name that the array with this canonical name has in a generated script."""
    return NAMES.get(name, name)


def numbers(problem: Problem, *, cotangent: bool) -> dict[str, np.ndarray]:
    """Return the arrays of numbers that a generated script begins with, by their names in it.

    The array `mask` combines all rules that block keys. Other arrays of integers or booleans are
    not included.
    """
    found = {name: getattr(problem, name) for name in problem.shape.distinct_inputs()}
    found |= {called(f"weights.{k}"): array for k, array in problem.weights.named().items()}
    if problem.allowed is not None:
        found["mask"] = problem.allowed
    if problem.attn_bias is not None:
        found["attn_bias"] = problem.attn_bias
    for name, array in problem.feature_arrays().items():
        if array.dtype.kind == "f":
            found[called(name)] = array
    if cotangent:
        found["cotangent"] = problem.cotangent
    return found


def literal(array: np.ndarray) -> str:
    """Return Python code for an array: nested lists of exact numbers, or a call of `np.zeros`.

    Booleans are written as 0 and 1.
    """
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
    """Return code that assigns the mask to `mask`, and a dictionary of the other arrays to `n`."""
    entries = [f"{name}={literal(array)}," for name, array in arrays.items() if name != "mask"]
    lines = enclosed("n = dict(", entries, ")")
    lines.append("n = {name: np.array(numbers, float) for name, numbers in n.items()}")
    if "mask" in arrays:
        lines += enclosed("mask = np.array(", [f"{literal(arrays['mask'])},", "bool"], ")")
    return lines


def enclosed(before: str, entries: Iterable[str], after: str) -> list[str]:
    """Return code lines with the entries between two brackets, on a single line if they fit."""
    every = list(entries)
    whole = before + " ".join(every).rstrip(",") + after
    if len(whole) <= WIDTH:
        return [whole]
    return [before, *packed(every, "    "), after]


def packed(entries: Iterable[str], indent: str) -> list[str]:
    """Return indented lines filled with entries; an entry that is too long is broken at commas."""
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
    """Return the lines of a function `attention(n)` that computes the definition in plain NumPy.

    `returned` is "output", "weights" or "averaged" (weights averaged over heads). The function also
    accepts complex numbers, so that a small imaginary step yields derivatives.
    """
    shape = problem.shape
    key = "query" if shape.sharing == "self" else "key"
    value = key if shape.sharing != "separate" else "value"
    lines = []
    for letter, source in (("q", "query"), ("k", key), ("v", value)):
        line = f'    {letter} = np.einsum("bse,ehd->bhsd", n["{source}"], n["W{letter}"])'
        lines.append(line + (f' + n["b{letter}"][:, None]' if shape.bias else ""))
    lines += _prepared(problem)
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
    if problem.soft_cap is not None:
        lines.append(f"    logits = {problem.soft_cap!r} * np.tanh(logits / {problem.soft_cap!r})")
    if problem.slopes is not None:
        distance = "abs(at_query[:, None, :, None] - at_key[:, None, None])"
        lines.append(f'    logits = logits - n["slopes"][:, None, None] * {distance}')
    if problem.attn_bias is not None:
        lines.append('    logits = logits + n["attn_bias"]')
    if problem.allowed is not None:
        lines.append("    logits = np.where(mask, logits, -np.inf)")
    lines += [
        "    peak = logits.real.max(axis=-1, keepdims=True)",
        "    powers = np.exp(logits - peak)",
        "    weights = powers / (powers.sum(-1, keepdims=True) + "
        'np.exp(n["sinks"][:, None, None] - peak))',
    ]
    if problem.sinks is None:
        lines[-3:] = [
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
    before = _placed(problem)
    return [*before, "def attention(n):  # the definition", *lines, f"    return {end}"]


def _prepared(problem: Problem) -> list[str]:
    """Return the lines that normalise and rotate the heads `q` and `k`."""
    lines, norm = [], problem.norm
    for x, gain in (("q", "gq"), ("k", "gk")) if norm is not None else ():
        assert norm is not None
        root = f"np.sqrt(({x} * {x}).mean(-1, keepdims=True) + {norm.epsilon!r})"
        lines.append(f'    {x} = {x} / {root} * n["{gain}"]  # the RMS norm')
    if problem.rotary is not None:
        lines.append("    q, k = turned(q, at_query), turned(k, at_key)")
    return lines


def _placed(problem: Problem) -> list[str]:
    """Return the lines that assign the positions and define the rotation, if they are used."""
    rotary = problem.rotary
    if rotary is None and problem.slopes is None:
        return []
    sides = (problem.position_of_queries, problem.position_of_keys)
    at = ", ".join(f"np.array({literal(np.ascontiguousarray(side))})" for side in sides)
    lines = [f"at_query, at_key = {at}"]
    if rotary is None:
        return lines
    half = rotary.size // 2
    one, other, axis = f":{half}", f"{half}:{rotary.size}", -2
    if rotary.pairs == "interleaved":
        one, other, axis = f":{rotary.size}:2", f"1:{rotary.size}:2", -1
    return [
        *lines,
        "def turned(x, at):  # rotary embedding",
        f"    a, b, rest = x[..., {one}], x[..., {other}], x[..., {rotary.size}:]",
        f"    rates = {float(rotary.base)!r} ** (-np.arange({half}) / {half})",
        "    c, s = (f(at[:, None, :, None] * rates) for f in (np.cos, np.sin))",
        f"    pairs = np.stack([a * c - b * s, b * c + a * s], axis={axis})",
        f"    return np.concatenate([pairs.reshape(*x.shape[:-1], {rotary.size}), rest], axis=-1)",
    ]


def parameter(row: Parameter, shape: Shape) -> str:
    """Return a Python expression for a native parameter, computed from the dictionary `n`."""
    canonical, native = layouts.sides(row.pattern)
    left, right = layouts.axes(canonical), layouts.axes(native)
    parts, stack = [], row.stack
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
        if row.grouped and stack is not None:
            each = reshaped[stack] // shape.kv_heads
            reshaped = (*reshaped[:stack], shape.kv_heads, each, *reshaped[stack + 1 :])
        if reshaped != tuple(sizes[axis] for axis in right):
            code += f".reshape({', '.join(map(str, reshaped))})"
        parts.append(code)
    if stack is None:
        return parts[0]
    axis = stack + row.grouped
    joined = f"np.concatenate([{', '.join(parts)}]{f', axis={axis}' if axis else ''})"
    if not row.grouped:
        return joined
    # Merge the axis of the groups with the next one; `reshaped` is the shape of the last part.
    whole = (*reshaped[:stack], -1, *reshaped[stack + 2 :])
    return f"{joined}.reshape({', '.join(map(str, whole))})"


def laid_out(array: np.ndarray, problem: Problem) -> str:
    """Return code for the array of a mask argument.

    The code refers to the script's mask or bias if either has the same elements, and otherwise
    contains all numbers.
    """
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
