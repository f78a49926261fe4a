"""Code that shows a convention without this suite: a handful of lines in the library's own words.

Made from the adapter's `example`. The inputs are one array, so that the lines fit implementations
that know self-attention only. Each prints a number whose meaning stands beside it; tests run the
lines and compare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conformance.adapter.arguments import AXES
from conformance.experiments.laboratory import Laboratory

SIZES = {"batch": 2, "heads": 2, "query": 4, "key": 4}
WIDTH = 8

_IMPORT = {"torch": "import torch", "jax": "import jax.numpy as jnp"}
_IMPORT |= {"tensorflow": "import tensorflow as tf", "mlx": "import mlx.core as mx"}
_IMPORT |= {"paddle": "import paddle", "tinygrad": "from tinygrad import Tensor"}
_NATIVE = {"torch": "torch.tensor({})", "jax": "jnp.asarray({})", "tensorflow": "tf.constant({})"}
_NATIVE |= {"mlx": "mx.array({})", "paddle": "paddle.to_tensor({})", "tinygrad": "Tensor({})"}
_NUMPY = {"torch": "{}.detach().numpy()", "jax": "np.asarray({})", "tensorflow": "{}.numpy()"}
_NUMPY |= {"mlx": "np.array({})", "paddle": "{}.numpy()", "tinygrad": "{}.numpy()"}
# They take and return NumPy arrays.
for _runtime in ("onnx", "onnxruntime", "openvino"):
    _IMPORT[_runtime], _NATIVE[_runtime], _NUMPY[_runtime] = "import numpy as np", "{}", "{}"


def hiding(lab: Laboratory, name: str, made: Sequence[str], told: str, *, token: int = 0) -> str:
    """Lines that print how far the other outputs move when a token is replaced.

    Args:
        lab: whose adapter has an `example` for its mode; "" without one.
        name: the argument, or "" for none.
        made: lines that make the array `mask`; none for a flag.
        told: what the number means.
        token: 0, with the outputs after it looked at, or -1, with those before.
    """
    rows = "1:" if token == 0 else ":-1"
    return _code(
        lab,
        made,
        name,
        [
            "first = {call}",
            f"x = x.copy(); x[:, {token}] += 1  # another token",
            "query = key = value = {x}",
            "second = {call}",
            f"print(abs(first - second)[:, {rows}].max())  # {told}",
        ],
    )


def difference(lab: Laboratory, name: str, made: Sequence[str], told: str) -> str:
    """Lines that print how far the output with the argument is from the one without."""
    lines = ["first = {call}", "second = {plain}", f"print(abs(first - second).max())  # {told}"]
    return _code(lab, made, name, lines)


def output(lab: Laboratory, name: str, made: Sequence[str], shown: str, told: str) -> str:
    """Lines that print an expression of `output`."""
    return _code(lab, made, name, ["output = {call}", f"print({shown})  # {told}"])


def mask(layout: str, dtype: str, fill: float, mark: float | None, note: str) -> list[str]:
    """Lines that make the array `mask`: all `fill`, and `mark` at token 0."""
    shape = layout_shape(layout)
    kind = "float32" if dtype == "own" else dtype
    made = f"mask = np.full({shape}, {_written(fill, kind)}, {kind!r})"
    if mark is not None:
        made += f"; mask[..., 0] = {_written(mark, kind)}"
    return [f"{made}  # {note}"]


def layout_shape(layout: str) -> tuple[int, ...]:
    """The shape of a layout, such as "(batch heads) query key", at the sizes of the code."""
    shape: list[int] = []
    joined = False
    for word in layout.replace("(", " ( ").replace(")", " ) ").split():
        if word in "()":
            joined = word == "("
            shape += [1] if joined else []
        elif joined:
            shape[-1] *= SIZES[word]
        else:
            shape.append(SIZES[word])
    return tuple(shape)


def _code(lab: Laboratory, made: Sequence[str], name: str, lines: Sequence[str]) -> str:
    example, framework = lab.adapter.example_in(lab.mode), lab.adapter.framework
    if example is None or framework not in _NATIVE:
        return ""
    heads = SIZES[AXES[1]]
    known = {"heads": heads, "head_size": WIDTH // heads, "value_head_size": WIDTH // heads}
    known |= {f"{which}_width": WIDTH for which in ("query", "key", "value", "output")}
    native = _NATIVE[framework]
    given = native.format("mask") if made else "True"
    masks = f", {name}={given}" if name else ""
    call = _NUMPY[framework].format(example.call.format(masks=masks, **known))
    plain = _NUMPY[framework].format(example.call.format(masks="", **known))
    imports = ["import numpy as np", *example.imports.splitlines()]
    if _IMPORT[framework] not in imports:
        imports.append(_IMPORT[framework])
    sizes = f"({SIZES['batch']}, {SIZES['key']}, {WIDTH})"
    start = [
        f'x = np.random.default_rng(0).normal(size={sizes}).astype("float32")',
        "query = key = value = {x}",
        *example.build.format(**known).splitlines(),
        *made,
    ]
    replaced = [
        line.replace("{call}", call).replace("{plain}", plain).replace("{x}", native.format("x"))
        for line in (*start, *lines)
    ]
    return "\n".join([*imports, *replaced])


def _written(value: float, dtype: str) -> str:
    if dtype == "bool":
        return str(bool(value))
    return "-np.inf" if np.isneginf(value) else f"{value:g}"
