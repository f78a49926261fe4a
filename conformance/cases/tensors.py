"""Read and write safetensors files without changing a bit, in all dtypes in `WIDTH`.

NumPy has no bfloat16 and no 8-bit floats, so elements are represented as unsigned integers, with
the name of their dtype. The safetensors library validates a file; only requested tensors are read.
The format is: 8 bytes with the length of the header, the header in JSON, and the elements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conformance.errors import WrongTensors

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
        """Whether all elements are finite."""
        exponent = EXPONENT.get(self.dtype)
        if exponent is None:
            return True
        mask = self.bits.dtype.type(exponent)
        return not bool(((self.bits & mask) == mask).any())


@dataclass(frozen=True, eq=False)
class File:
    """A safetensors file whose header has been read; `start` is the offset of the elements."""

    path: Path
    metadata: Mapping[str, str]
    header: Mapping[str, Mapping[str, Any]]
    start: int

    def read(self, name: str) -> Tensor:
        """Return one tensor of the file.

        Raises:
            WrongTensors: if its dtype is not supported, or the file cannot be read.
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
    """Return a file with its header read.

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
    """Write a file atomically: first to a temporary file, which then replaces `path`.

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
    """Turn an OSError in the body into a one-line `WrongTensors`.

    On any failure, first call `undo(missing_ok=True)` if it is given.
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
