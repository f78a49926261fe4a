"""Read and write case files, each of which holds one problem, for the option `--case-file`.

A case file has the safetensors format, with numbers in float64 and a JSON description in its
metadata. Files are not trusted: their size is limited, and unexpected content is an error.

`look` and `write` read and write safetensors files in all dtypes in `WIDTH`, bit by bit.
NumPy has no bfloat16 and no 8-bit floats, so elements are represented as unsigned integers, with
the name of their dtype. The safetensors library validates a file; only requested tensors are read.
The format is: 8 bytes with the length of the header, the header in JSON, and the elements.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from conformance.cases.case import StoredCase, assembled
from conformance.definition.features import ABSENT, ARRAYS, FEATURES
from conformance.definition.problem import Causal, Problem, Shape
from conformance.errors import BrokenCase, ConformanceError, WrongTensors
from conformance.records.findings import STORED

SCHEMA = "mha-conformance/case/1"
KEY = "mha-conformance"
"""The key in a case file's metadata under which the description is stored."""

MOST_BYTES = 64 * 2**20
"""The maximum size of a case file in bytes; larger files are rejected before they are read."""
MOST_NUMBERS = 2**22
"""The most elements of an array or of the logits; the reference makes many copies of them."""
LARGEST = 1e30
"""The maximum magnitude of a number, so that products of numbers do not overflow float64."""

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The deviation for which a case file was written; the command `reproduce` reads it.

    `told` is the description of the deviation, and `versions` are those of the packages in use.
    """

    implementation: str
    dtype: str
    mode: str
    requirement: str
    told: str
    versions: dict[str, str]


Size = Annotated[int, msgspec.Meta(ge=0, le=MOST_NUMBERS)]


def _struct(name: str, kinds: Mapping[str, Any], **defaults: Any) -> type:
    """Return a struct with fields of these types, in which every integer is a `Size`."""
    fields = [
        (n, _bounded(kind), *([defaults[n]] if n in defaults else [])) for n, kind in kinds.items()
    ]
    return msgspec.defstruct(
        name, fields, frozen=True, forbid_unknown_fields=True, omit_defaults=bool(defaults)
    )


def _bounded(kind: Any) -> Any:
    """Return the type with `Size` instead of `int`, and a struct instead of a dataclass."""
    parts = get_args(kind)
    if kind is int:
        return Size
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _struct(f"Stored{kind.__name__}", get_type_hints(kind))
    if isinstance(kind, UnionType):
        return reduce(operator.or_, map(_bounded, parts))
    if get_origin(kind) is tuple and ... not in parts:
        return tuple[tuple(map(_bounded, parts))]  # type: ignore[misc]
    return kind


Sizes = _bounded(Shape)
"""A struct with the fields of `Shape` that checks the bounds of sizes."""

NUMBERS = {name: kind for entry in FEATURES for name, kind in entry.numbers.items()}
"""What features have besides arrays, by name, with its type."""

Features = _struct("Features", NUMBERS, **{name: ABSENT.get(name) for name in NUMBERS})


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON description in the metadata of a case file.

    `found` is the deviation for which the file was written, or None.
    """

    schema: str
    name: str
    why: str
    shape: Sizes  # type: ignore[valid-type]
    causal: Causal | None
    scale: float | None
    found: Failure | None
    features: Features | None = None  # type: ignore[valid-type]


def store(path: Path, name: str, problem: Problem, why: str, found: Failure | None) -> StoredCase:
    """Write a problem to a case file atomically, and return it as a case.

    `found` is the deviation that the problem shows, or None.

    Raises:
        BrokenCase: if the name or the problem is not allowed in a case file, for example because a
            query is fully masked.
        ConformanceError: if the file cannot be written.
    """
    sizes = Sizes(**dataclasses.asdict(problem.shape))
    told = {name: value for entry in FEATURES for name, value in entry.told(problem).items()}
    described = Description(
        SCHEMA,
        name,
        why,
        sizes,
        problem.causal,
        problem.scale,
        found,
        msgspec.convert(msgspec.to_builtins(told), Features) if problem.features else None,
    )
    arrays = {key: np.ascontiguousarray(array) for key, array in _arrays(problem).items()}
    case = _case(path, described, arrays)
    tensors = {key: Tensor.of(key, array) for key, array in arrays.items()}
    try:
        write(path, tensors, {KEY: msgspec.json.encode(described).decode()})
    except WrongTensors as error:
        raise ConformanceError(str(error)) from error
    return case


def load_case(path: Path) -> StoredCase:
    """Return the case in a case file.

    Raises:
        BrokenCase: if the file is missing, unreadable, damaged, too large, or not a case file.
    """
    return read(path)[0]


def read(path: Path) -> tuple[StoredCase, Failure | None]:
    """Return the case in a file, and the deviation for which the file was written, or None.

    Raises:
        BrokenCase: if the file is missing, unreadable, damaged, too large, or not a case file.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise BrokenCase(f"{path} is no file")
        if size > MOST_BYTES:
            raise BrokenCase(f"{path} has {size} bytes; a case file has at most {MOST_BYTES}")
        file = look(path)
    except OSError as error:
        raise BrokenCase(f"{path} cannot be read: {error.strerror}") from error
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
    """Return whether a text is a valid name of a stored case.

    A valid name has 1 to 64 lower-case letters, digits and hyphens, with no hyphen at either end.
    """
    return _NAME.fullmatch(text) is not None


def _arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Return the arrays of a problem by their names in a case file."""
    names = (*problem.shape.distinct_inputs(), "cotangent", "attn_bias")
    arrays = {name: getattr(problem, name) for name in names}
    arrays |= {f"weights.{name}": array for name, array in problem.weights.named().items()}
    arrays |= {name: array.astype(float) for name, array in problem.feature_arrays().items()}
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
    if described.features is not None:
        digest.update(msgspec.json.encode(described.features))
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
    shape = Shape(**msgspec.structs.asdict(described.shape))
    _check_sizes(shape)
    inputs = shape.distinct_inputs()
    wanted = {*inputs, "cotangent", *(f"weights.{name}" for name in shape.weight_shapes())}
    optional = {"mask", "attn_bias"}
    if described.features is not None:
        optional |= set(ARRAYS)
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
    if scale and not 1 / LARGEST <= abs(scale) <= LARGEST:
        raise BrokenCase(f"scale is {scale}")
    mask = arrays.get("mask")
    problem = assembled(
        shape,
        arrays,
        mask=None if mask is None else mask.astype(np.bool_),
        attn_bias=arrays.get("attn_bias"),
        causal=described.causal,
        scale=scale,
        **_features(described.features, arrays),
    )
    if not problem.allowed_in_full().any(axis=-1).all():
        raise BrokenCase("a query may attend no key, and no definition says what it gets")
    return problem


def _features(described: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return the features as fields of `Problem`; an empty dictionary if `described` is None.

    Raises:
        BrokenCase: if a number is out of range.
        WrongShape: if a part of a feature is missing.
    """
    if described is None:
        return {}
    plain = msgspec.to_builtins(described)
    for name, value in plain.items():
        for number in value.values() if isinstance(value, dict) else (value,):
            if isinstance(number, float) and not 1 / LARGEST <= number <= LARGEST:
                raise BrokenCase(f"{name} has {number}, not within 1/{LARGEST:g} and {LARGEST:g}")
    told = {
        name: msgspec.convert(plain[name], kind) if name in plain else ABSENT.get(name)
        for name, kind in NUMBERS.items()
    }
    fields: dict[str, Any] = {}
    for entry in FEATURES:
        own = [name for name in entry.arrays if name in arrays]
        read = {name: _whole(name, arrays) if entry.whole else arrays[name] for name in own}
        fields |= entry.made(told, read)
    return fields


def _whole(name: str, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    array = arrays[name]
    if not ((array == np.round(array)) & (np.abs(array) < 2**31)).all():
        raise BrokenCase(f"{name} has numbers that are no integers, or beyond 31 bits")
    return array.astype(np.int64)


def _check_sizes(shape: Shape) -> None:
    """Raise `BrokenCase` if the logits, an input or a weight would be empty or too large."""
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


EXPONENT = {
    "F64": 0x7FF0000000000000,
    "F32": 0x7F800000,
    "F16": 0x7C00,
    "BF16": 0x7F80,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}
"""For each dtype, the bits that are all set only in NaN and infinity (in E4M3, only in NaN)."""

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E5M2": 1, "F8_E4M3": 1} | {
    f"{sign}{8 * size}": size for sign in "IU" for size in (1, 2, 4, 8)
}
"""The size of an element in bytes, by dtype."""

_NUMPY = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"} | {
    f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}"
    for kind in ("int", "uint")
    for size in (1, 2, 4, 8)
}


@dataclass(frozen=True, eq=False)
class Tensor:
    """The bits of a tensor as unsigned integers, and the safetensors name of its dtype."""

    dtype: str
    bits: np.ndarray

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Tensor:
        """Return the tensor for a NumPy array; raise `WrongTensors` for an unknown dtype."""
        if array.dtype.name not in _NUMPY:
            raise WrongTensors(f"{name} is {array.dtype}; weights are {', '.join(_NUMPY)}")
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        flat = np.ascontiguousarray(native).reshape(-1).view(f"u{array.dtype.itemsize}")
        return cls(_NUMPY[array.dtype.name], flat.reshape(array.shape))

    @property
    def finite(self) -> bool:
        """Whether no element is infinite or NaN; True for integers."""
        exponent = EXPONENT.get(self.dtype)
        if exponent is None:
            return True
        mask = self.bits.dtype.type(exponent)
        return not bool(((self.bits & mask) == mask).any())

    @property
    def values(self) -> np.ndarray:
        """The elements in float64.

        Raises:
            WrongTensors: if they are not F64, F32, F16 or BF16.
        """
        if self.dtype == "BF16":
            wide = (self.bits.astype(np.uint32) << 16).view(np.float32)
        elif self.dtype in ("F64", "F32", "F16"):
            wide = self.bits.view(f"f{self.bits.itemsize}")
        else:
            raise WrongTensors(f"numbers in {self.dtype} are only moved, not computed with")
        return wide.astype(np.float64)


@dataclass(frozen=True, eq=False)
class File:
    """A safetensors file whose header has been read.

    `header` describes each tensor, by name; `start` is the offset of the elements in the file.
    """

    path: Path
    metadata: Mapping[str, str]
    header: Mapping[str, Mapping[str, Any]]
    start: int

    def read(self, name: str) -> Tensor:
        """Return one tensor of the file.

        Raises:
            WrongTensors: if the dtype of the tensor is not in `WIDTH`, or the file cannot be read.
            KeyError: if there is no such tensor.
        """
        entry = self.header[name]
        size = WIDTH.get(entry["dtype"])
        if size is None:
            raise WrongTensors(f"{self.path}: {name} is {entry['dtype']}, which is not converted")
        begin, end = entry["data_offsets"]
        with _guarded(self.path, "cannot be read"), self.path.open("rb") as file:
            file.seek(self.start + begin)
            flat = np.frombuffer(file.read(end - begin), dtype=f"<u{size}")
        return Tensor(entry["dtype"], flat.astype(f"u{size}", copy=False).reshape(entry["shape"]))


def look(path: Path) -> File:
    """Read the header of a safetensors file; return the file without its elements.

    Raises:
        WrongTensors: if the file cannot be read, or is not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    with _guarded(path, "cannot be read"), path.open("rb") as file:
        try:
            with safe_open(path, framework="np") as checked:
                metadata = dict(checked.metadata() or {})
        except (SafetensorError, OSError, ValueError) as error:
            raise WrongTensors(
                f"{path} is no safetensors file: {error}; save tensors with "
                "safetensors.torch.save_file(state_dict, path), or safetensors.numpy.save_file"
            ) from error
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return File(path, metadata, header, 8 + length)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, through a temporary file that then replaces `path`.

    Raises:
        WrongTensors: if the file cannot be written; an existing file is then left unchanged.
    """
    # Store the widest elements first, so that all tensors are aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].bits.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in ordered:
        span = [at, at + tensor.bits.nbytes]
        at = span[1]
        shape = list(tensor.bits.shape)
        header[name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": span}
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _guarded(path, "cannot be written", part.unlink):
        with part.open("xb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for _, tensor in ordered:
                file.write(tensor.bits.astype(tensor.bits.dtype.newbyteorder("<")).tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


@contextmanager
def _guarded(path: Path, what: str, undo: Callable[..., None] | None = None) -> Iterator[None]:
    """Turn an OSError in the body of a `with` statement into a one-line `WrongTensors`.

    The message begins with `path` and `what`, such as "cannot be read". Other exceptions are raised
    again. On any exception, first call `undo(missing_ok=True)` if `undo` is given.
    """
    try:
        yield
    except BaseException as error:
        if undo is not None:
            with suppress(OSError):
                undo(missing_ok=True)
        if isinstance(error, OSError):
            raise WrongTensors(f"{path} {what}: {error.strerror or error}") from error
        raise
