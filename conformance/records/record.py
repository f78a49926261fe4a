"""A record: the header and all results of one run, in one JSON document.

During a run its results are appended to a journal beside the record, one line each, so that an
interrupted run keeps what it measured. The arrays of the exchange cases, by which implementations
are compared with each other, are in a safetensors file beside the record.
"""

from __future__ import annotations

import base64
import hashlib
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from conformance.errors import BrokenRecord, ConformanceError
from conformance.records import schema1
from conformance.records.findings import CaseResult
from conformance.records.header import SCHEMA, Header
from conformance.records.numbers import Array

MOST_BYTES = 512 * 2**20
"""A record larger than this is refused before it is read."""


PICTURED = ("weights", "weights.want", "weights.noise", "weights.blocked")
"""Arrays of an item whose attention weights deviate; others are for comparing implementations."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run.

    Attributes:
        complete: whether every planned item has an outcome of its own.
        exchange: name of the file of arrays beside the record, or "".
        digest: SHA-256 of that file.
    """

    header: Header
    complete: bool
    results: list[CaseResult]
    exchange: str = ""
    digest: str = ""


class Line(msgspec.Struct, omit_defaults=True):
    """One item in the journal: its findings, and the arrays that it exchanges (float64, base64)."""

    result: CaseResult
    arrays: dict[str, tuple[list[int], str]] = {}


_UNREADABLE = (
    *(msgspec.MsgspecError, ValueError, OverflowError, RecursionError),
    *(KeyError, TypeError, AttributeError),
)
"""What decoding a damaged file may raise; the second line, where schema 1 is converted."""

_lines = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def encode_line(result: CaseResult, arrays: Mapping[str, Array]) -> bytes:
    """Return one line of a journal, without the newline."""

    def packed(array: Array) -> tuple[list[int], str]:
        content = np.asarray(array, np.float64).tobytes()
        return list(array.shape), base64.b64encode(content).decode()

    return _encoder.encode(Line(result, {name: packed(a) for name, a in arrays.items()}))


def decode_line(line: bytes | str, schema: str = SCHEMA) -> tuple[CaseResult, dict[str, Array]]:
    """Return the result and the arrays of a line of a journal.

    Raises:
        BrokenRecord: the line is not one of this schema.
    """
    try:
        if schema == schema1.SCHEMA_1:
            raw = msgspec.json.decode(line)
            item = msgspec.convert(raw | {"result": schema1.upgrade_result(raw["result"])}, Line)
        else:
            item = _lines.decode(line)
        return item.result, {
            name: np.frombuffer(base64.b64decode(packed), np.float64).reshape(shape)
            for name, (shape, packed) in item.arrays.items()
        }
    except _UNREADABLE as error:
        raise BrokenRecord(f"a journal line cannot be read: {error}") from error


class Journal:
    """Appends results to `<record>.journal` as they come.

    An existing journal is replaced in one step by one that begins with `lines`, the results that
    are known already.
    """

    def __init__(self, record: Path, header: Header, lines: Iterable[bytes] = ()) -> None:
        self.path = journal_path(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_bytes(b"".join(line + b"\n" for line in (_encoder.encode(header), *lines)))
        temporary.replace(self.path)
        self._file: IO[bytes] = self.path.open("ab")

    def add(self, line: bytes) -> None:
        """Append one encoded line, and flush it."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_writable(record: Path) -> None:
    """Check, before a run, that its record can be written.

    Raises:
        ConformanceError: it cannot.
    """
    if record.suffix != ".json":
        raise ConformanceError(f"{record}: a record's name ends with .json")
    if record.is_dir():
        raise ConformanceError(f"{record}: is a folder")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=record.parent):
            pass
    except OSError as error:
        raise ConformanceError(f"{record}: cannot be written ({error.strerror})") from error


def journal_path(record: Path) -> Path:
    """Return the path of the journal of a record."""
    return record.with_name(record.name + ".journal")


def finish(
    record: Path,
    missing: Iterable[CaseResult] = (),
    order: Sequence[str] = (),
    keep: Callable[[str], bool] = lambda name: True,
) -> Record:
    """Turn the journal of a record into the record, and remove the journal.

    Args:
        missing: results of the items without an outcome.
        order: all ids in the order of the record, which must not depend on which worker was first.
        keep: whether the record keeps an array, by "item id|array".
    """
    header, results, arrays = read_journal(journal_path(record))
    missing = list(missing)
    place = {name: index for index, name in enumerate(order)}
    results.sort(key=lambda result: place.get(result.id, len(place)))
    kept = {name: array for name, array in arrays.items() if keep(name)}
    return write(record, Record(header, not missing, [*results, *missing]), kept)


def write(path: Path, record: Record, arrays: Mapping[str, Array]) -> Record:
    """Write a record with its arrays, by "item id|array"; return it with their digest.

    A journal that lies beside it is removed.
    """
    exchange, digest = _save_arrays(path, arrays) if arrays else ("", "")
    record = msgspec.structs.replace(record, exchange=exchange, digest=digest)
    save(path, record)
    journal_path(path).unlink(missing_ok=True)
    return record


def save(path: Path, record: Record) -> None:
    """Write the document in one step; the arrays beside it stay as they are."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(msgspec.json.format(_encoder.encode(record), indent=0) + b"\n")
    temporary.replace(path)


def read_journal(path: Path) -> tuple[Header, list[CaseResult], dict[str, Array]]:
    """Return header, results and arrays of a journal, without a last line that was cut off.

    Raises:
        BrokenRecord: it cannot be read, or any other line is damaged.
    """
    content = _bounded(path)
    lines = content.splitlines()
    cut_off = not content.endswith(b"\n")
    header, schema = _any_header(path, lines[0] if lines else b"")
    results: list[CaseResult] = []
    arrays: dict[str, Array] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            result, exchanged = decode_line(line, schema)
        except BrokenRecord as error:
            if cut_off and number == len(lines):
                break
            raise BrokenRecord(f"{path}, line {number}: {error}") from error
        results.append(result)
        arrays |= {f"{result.id}|{name}": array for name, array in exchanged.items()}
    return header, results, arrays


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a journal, header first, without one that was cut off."""
    return _bounded(path).split(b"\n")[:-1]


def read_header(path: Path, line: bytes) -> Header:
    """Return the header in the first line of a journal.

    Raises:
        BrokenRecord: it has another schema, so that the run cannot be resumed.
    """
    header, schema = _any_header(path, line)
    if schema != SCHEMA:
        raise BrokenRecord(f"{path}: has schema {schema!r}, this suite writes {SCHEMA!r}")
    return header


def _any_header(path: Path, line: bytes) -> tuple[Header, str]:
    """Return the header in the first line of a journal, and the schema in which it was written."""
    try:
        schema = msgspec.json.decode(line, type=_SchemaOnly).schema
        _check_schema(path, schema)
        if schema == schema1.SCHEMA_1:
            raw = schema1.upgrade_header(msgspec.json.decode(line))
            return msgspec.convert(raw, Header), schema
        return msgspec.json.decode(line, type=Header), schema
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: no journal of this suite ({error})") from error


def read(path: Path) -> Record:
    """Return a record, or what the journal of an unfinished one has.

    Raises:
        BrokenRecord: the file is missing, damaged or of an unknown schema.
    """
    if path.suffix == ".journal":
        header, results, _ = read_journal(path)
        return Record(header, False, results)
    text = _text(path)
    try:
        schema = msgspec.json.decode(text, type=_Envelope).header.schema
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: no record of this suite, or cut off ({error})") from error
    _check_schema(path, schema)
    try:
        if schema == schema1.SCHEMA_1:
            return msgspec.convert(schema1.upgrade_record(msgspec.json.decode(text)), Record)
        return msgspec.json.decode(text, type=Record)
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: is damaged ({error}); run again") from error


def read_arrays(path: Path, record: Record) -> dict[str, Array]:
    """Return the exchange arrays of the record at `path`, by "item id|array"; {} if it has none.

    Raises:
        BrokenRecord: their file is missing, damaged or of another record.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if not record.exchange:
        return {}
    if Path(record.exchange).name != record.exchange:
        raise BrokenRecord(f"{path}: names arrays outside its own folder")
    file = path.with_name(record.exchange)
    content = _bounded(file)
    if hashlib.sha256(content).hexdigest() != record.digest:
        raise BrokenRecord(f"{file}: does not belong to {path.name}; run again")
    try:
        return load(content)
    except SafetensorError as error:
        raise BrokenRecord(f"{file}: is damaged ({error}); run again") from error


class _SchemaOnly(msgspec.Struct):
    schema: str


class _Envelope(msgspec.Struct):
    header: _SchemaOnly


def _check_schema(path: Path, schema: str) -> None:
    if schema not in (SCHEMA, schema1.SCHEMA_1):
        raise BrokenRecord(f"{path}: has schema {schema!r}, this suite reads {SCHEMA!r}; run again")


def _bounded(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise BrokenRecord(f"{path}: {size} bytes are more than a record can have")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BrokenRecord(f"{path}: cannot be read ({reason})") from error


def _text(path: Path) -> bytes:
    """Return the JSON of a record, which may be compressed."""
    content = _bounded(path)
    if path.suffix != ".gz":
        return content
    # A small compressed file may expand to any size.
    inflate = zlib.decompressobj(wbits=31)
    try:
        text = inflate.decompress(content, MOST_BYTES)
    except zlib.error as error:
        raise BrokenRecord(f"{path}: is damaged ({error})") from error
    if inflate.unconsumed_tail:
        raise BrokenRecord(f"{path}: more than {MOST_BYTES} bytes are no record")
    if not inflate.eof:
        raise BrokenRecord(f"{path}: is cut off")
    return text


def _save_arrays(record: Path, arrays: Mapping[str, Array]) -> tuple[str, str]:
    from safetensors.numpy import save as packed

    content = packed({n: np.ascontiguousarray(arrays[n], np.float64) for n in sorted(arrays)})
    file = record.with_suffix(".safetensors")
    file.write_bytes(content)
    return file.name, hashlib.sha256(content).hexdigest()
