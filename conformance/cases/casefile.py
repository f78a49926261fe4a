"""One problem in one file, which the gate can run again: `--case-file`.

The file has the safetensors format: the numbers as float64, and in its metadata a description in
JSON. Files are not trusted: their size is bounded, and anything unexpected is refused.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from conformance.cases.case import STORED, StoredCase, assembled
from conformance.cases.tensors import Tensor, look, write
from conformance.definition.problem import Causal, Problem, Score, Shape, Sharing
from conformance.errors import BrokenCase, ConformanceError, WrongTensors

SCHEMA = "mha-conformance/case/1"
KEY = "mha-conformance"
"""The entry of the file's metadata that holds the description."""

MOST_BYTES = 64 * 2**20
"""A larger file is refused before it is read."""
MOST_NUMBERS = 2**22
"""Of any array, and of the logits, of which the reference holds sixteen copies and more."""
LARGEST = 1e30
"""No magnitude beyond this: products of two must not overflow float64."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which implementation answered the problem wrongly, and how; `reproduce` reads it."""

    implementation: str
    dtype: str
    mode: str
    requirement: str
    told: str
    versions: dict[str, str]


Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_NUMBERS)]


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `Shape`."""

    batch: Size
    query_length: Size
    key_length: Size
    heads: Size
    kv_heads: Size
    head_size: Size
    value_head_size: Size
    query_width: Size
    key_width: Size
    value_width: Size
    output_width: Size
    bias: bool
    score: Score
    sharing: Sharing


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the arrays of a case file mean."""

    schema: str
    name: str
    why: str
    shape: Sizes
    causal: Causal | None
    scale: float | None
    found: Failure | None


def store(path: Path, name: str, problem: Problem, why: str, found: Failure | None) -> StoredCase:
    """Write a problem as a case file, in one step, and return its case.

    Raises:
        BrokenCase: the problem is beyond what a case file may hold.
        ConformanceError: the file cannot be written.
    """
    sizes = Sizes(**{key: getattr(problem.shape, key) for key in Sizes.__struct_fields__})
    described = Description(SCHEMA, name, why, sizes, problem.causal, problem.scale, found)
    arrays = {key: np.ascontiguousarray(array) for key, array in _arrays(problem).items()}
    case = _case(path, described, arrays)
    tensors = {key: Tensor.of(key, array) for key, array in arrays.items()}
    try:
        write(path, tensors, {KEY: msgspec.json.encode(described).decode()})
    except WrongTensors as error:
        raise ConformanceError(str(error)) from error
    return case


def load_case(path: Path) -> StoredCase:
    """Return the case in this file.

    Raises:
        BrokenCase: the file is missing, damaged, too large, or no case file.
    """
    return read(path)[0]


def read(path: Path) -> tuple[StoredCase, Failure | None]:
    """Return the case in this file, and the failure that it records; raises as `load_case`."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BrokenCase(f"{path} cannot be read: {error.strerror}") from error
    if not path.is_file():
        raise BrokenCase(f"{path} is no file")
    if size > MOST_BYTES:
        raise BrokenCase(f"{path} has {size} bytes; a case file has at most {MOST_BYTES}")
    try:
        file = look(path)
    except WrongTensors as error:
        raise BrokenCase(str(error)) from error
    if set(file.metadata) != {KEY}:
        raise BrokenCase(f"{path} is no case file: its metadata have no {KEY!r}, or more than that")
    try:
        described = msgspec.json.decode(file.metadata[KEY], type=Description)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BrokenCase(f"{path}: its description is not as it must be: {error}") from error
    if described.schema != SCHEMA:
        raise BrokenCase(f"{path} has schema {described.schema!r}; this suite reads {SCHEMA}")
    for name, entry in file.header.items():
        wanted = "U8" if name == "mask" else "F64"
        if entry["dtype"] != wanted:
            raise BrokenCase(f"{path}: {name} is {entry['dtype']}; it must be {wanted}")
    try:
        bits = {name: file.read(name).bits for name in file.header}
    except WrongTensors as error:
        raise BrokenCase(str(error)) from error
    arrays = {name: bit if name == "mask" else bit.view(np.float64) for name, bit in bits.items()}
    return _case(path, described, arrays), described.found


def is_name(text: str) -> bool:
    """Return whether a case may have this name."""
    return _NAME.fullmatch(text) is not None


def _arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Return every array of a problem by its name in the file."""
    names = (*problem.shape.distinct_inputs(), "cotangent", "attn_bias")
    arrays = {name: getattr(problem, name) for name in names}
    arrays |= {f"weights.{name}": array for name, array in problem.weights.named().items()}
    if problem.mask is not None:
        arrays["mask"] = problem.mask.astype(np.uint8)
    return {name: array for name, array in arrays.items() if array is not None}


def _case(path: Path, described: Description, arrays: Mapping[str, np.ndarray]) -> StoredCase:
    if not is_name(described.name):
        raise BrokenCase(
            f"{path}: a case is called by letters, digits and hyphens, not {described.name[:80]!r}"
        )
    try:
        problem = _problem(described, arrays)
    except ConformanceError as error:
        raise BrokenCase(f"{path}: {error}") from error
    digest = hashlib.sha256(
        msgspec.json.encode((described.shape, described.causal, described.scale))
    )
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    return StoredCase(
        name=f"{STORED}/{described.name}",
        family=digest.hexdigest()[:8],
        why=described.why,
        stored=problem,
        path=str(path),
    )


def _problem(described: Description, arrays: Mapping[str, np.ndarray]) -> Problem:
    shape = Shape(**{key: getattr(described.shape, key) for key in Sizes.__struct_fields__})
    _check_sizes(shape)
    inputs = shape.distinct_inputs()
    wanted = {*inputs, "cotangent", *(f"weights.{name}" for name in shape.weight_shapes())}
    optional = {"mask", "attn_bias"}
    missing, foreign = wanted - arrays.keys(), arrays.keys() - wanted - optional
    if missing or foreign:
        raise BrokenCase(f"arrays are missing {sorted(missing)}, or too many {sorted(foreign)}")
    for name, array in arrays.items():
        if name == "mask":
            if not np.isin(array, (0, 1)).all():
                raise BrokenCase("mask has other numbers than 0 and 1")
        elif not (np.abs(array) <= LARGEST).all():
            raise BrokenCase(f"{name} has numbers that are not finite, or beyond {LARGEST:g}")
    scale = described.scale
    if scale is not None and not 1 / LARGEST <= abs(scale) <= LARGEST:
        raise BrokenCase(f"scale is {scale}")
    mask = arrays.get("mask")
    problem = assembled(
        shape,
        arrays,
        mask=None if mask is None else mask.astype(np.bool_),
        attn_bias=arrays.get("attn_bias"),
        causal=described.causal,
        scale=scale,
    )
    if not problem.allowed_in_full().any(axis=-1).all():
        raise BrokenCase("a query may attend no key, and no definition says what it gets")
    return problem


def _check_sizes(shape: Shape) -> None:
    """Check that no array is empty, or larger than those of a small problem."""
    sizes = {
        "logits": shape.logits,
        **shape.input_shapes(),
        **{f"weights.{name}": size for name, size in shape.weight_shapes().items()},
    }
    for name, size in sizes.items():
        if not 0 < math.prod(size) <= MOST_NUMBERS:
            raise BrokenCase(
                f"{name} has shape {list(size)}; a case has 1 to {MOST_NUMBERS} numbers there"
            )
