"""A Record: everything that one run found, with provenance. One JSON document.

While a run goes on, its findings are appended to a journal beside the record, one line each, so
that an interrupted run keeps what it measured. The arrays of the exchange cases, by which
implementations are compared with each other, lie beside the record in safetensors.
"""

from __future__ import annotations

import base64
import tempfile
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
    """One run. `complete` is whether every planned item has an outcome of its own."""

    header: Header
    complete: bool
    results: list[CaseResult]
    exchange: str = ""
    """File name of the arrays, beside the record."""
    digest: str = ""
    """SHA-256 of that file."""


class Line(msgspec.Struct, omit_defaults=True):
    """One item in the journal: its findings, and the arrays that it exchanges (float64, base64)."""

    result: CaseResult
    arrays: dict[str, tuple[list[int], str]] = {}


_UNREADABLE = (
    msgspec.MsgspecError,
    ValueError,
    OverflowError,
    RecursionError,
    KeyError,
    TypeError,
    AttributeError,
)
"""What decoding foreign bytes may raise; the last three, where schema 1 is converted."""

_lines = msgspec.json.Decoder(Line)
_encoder = msgspec.json.Encoder()


def encode_line(result: CaseResult, arrays: Mapping[str, Array]) -> bytes:
    """One journal line, without the newline."""
    packed = {
        name: (
            list(array.shape),
            base64.b64encode(np.asarray(array, np.float64).tobytes()).decode(),
        )
        for name, array in arrays.items()
    }
    return _encoder.encode(Line(result, packed))


def decode_line(line: bytes | str, schema: str = SCHEMA) -> tuple[CaseResult, dict[str, Array]]:
    """The inverse of `encode_line`, of any schema that can be read; raises `BrokenRecord`."""
    try:
        if schema == schema1.SCHEMA_1:
            raw = msgspec.json.decode(line)
            found = msgspec.convert(raw | {"result": schema1.upgrade_result(raw["result"])}, Line)
        else:
            found = _lines.decode(line)
        arrays = {}
        for name, (shape, packed) in found.arrays.items():
            arrays[name] = np.frombuffer(base64.b64decode(packed), np.float64).reshape(shape)
    except _UNREADABLE as error:
        raise BrokenRecord(f"a journal line cannot be read: {error}") from error
    return found.result, arrays


class Journal:
    """Appends findings to `<record>.journal` as they come.

    It begins with `lines` that are known already. A journal that was there is replaced by one that
    has these, and never by an empty one.
    """

    def __init__(self, record: Path, header: Header, lines: Iterable[bytes] = ()) -> None:
        self.path = journal_path(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_bytes(b"".join(line + b"\n" for line in (_encoder.encode(header), *lines)))
        temporary.replace(self.path)
        self._file: IO[bytes] = self.path.open("ab")

    def add(self, line: bytes) -> None:
        """Append one encoded line; it is on its way to the disk when this returns."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Nothing more will be added."""
        self._file.close()


def check_writable(record: Path) -> None:
    """Raise `ConformanceError` unless a record can be written there; better before the run."""
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
    """Where the journal of a record lies."""
    return record.with_name(record.name + ".journal")


def finish(
    record: Path,
    missing: Iterable[CaseResult] = (),
    order: Sequence[str] = (),
    keep: Callable[[str], bool] = lambda name: True,
) -> Record:
    """Make the record of its journal, with what has no outcome filled in, and drop the journal.

    `order` is that of the ids: results arrive as workers finish, and records do not depend on that.
    `keep` says of an array, by "item id|array", whether the record is to have it.
    """
    header, results, arrays = read_journal(journal_path(record))
    missing = list(missing)
    place = {name: index for index, name in enumerate(order)}
    results.sort(key=lambda result: place.get(result.id, len(place)))
    arrays = {name: array for name, array in sorted(arrays.items()) if keep(name)}
    exchange, digest = "", ""
    if arrays:
        exchange, digest = _save_arrays(record, arrays)
    found = Record(header, not missing, [*results, *missing], exchange, digest)
    save(record, found)
    journal_path(record).unlink()
    return found


def save(path: Path, record: Record) -> None:
    """Write the document, whole or not at all; arrays beside it stay as they are."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(msgspec.json.format(_encoder.encode(record), indent=0) + b"\n")
    temporary.replace(path)


def read_journal(path: Path) -> tuple[Header, list[CaseResult], dict[str, Array]]:
    """Header, results and arrays; a last line that was cut off is left out."""
    content = _bounded(path)
    lines = content.splitlines()
    cut_off = not content.endswith(b"\n")
    header, schema = _any_header(path, lines[0] if lines else b"")
    results: list[CaseResult] = []
    arrays: dict[str, Array] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            result, own = decode_line(line, schema)
        except BrokenRecord as error:
            if cut_off and number == len(lines):
                break
            raise BrokenRecord(f"{path}, line {number}: {error}") from error
        results.append(result)
        arrays |= {f"{result.id}|{name}": array for name, array in own.items()}
    return header, results, arrays


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a journal, header first, without one that was cut off."""
    return _bounded(path).split(b"\n")[:-1]


def read_header(path: Path, line: bytes) -> Header:
    """The first line of a journal that can be continued; raises `BrokenRecord`."""
    header, schema = _any_header(path, line)
    if schema != SCHEMA:
        raise BrokenRecord(f"{path}: has schema {schema!r}, this suite writes {SCHEMA!r}")
    return header


def _any_header(path: Path, line: bytes) -> tuple[Header, str]:
    """The first line of a journal, and the schema in which it was written."""
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
    """A record, or an unfinished one's journal; raises `BrokenRecord` with what to do."""
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
    """The exchange arrays of a record at `path`, by "item id|array"; {} if it has none."""
    import hashlib

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
    """The JSON of a record, which may be compressed."""
    content = _bounded(path)
    if path.suffix != ".gz":
        return content
    import zlib

    # A few bytes may stand for any number of them.
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


def _save_arrays(record: Path, arrays: dict[str, Array]) -> tuple[str, str]:
    import hashlib

    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    file = record.with_suffix(".safetensors")
    file.write_bytes(content)
    return file.name, hashlib.sha256(content).hexdigest()
