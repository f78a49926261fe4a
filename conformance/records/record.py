"""Read and write records: the header and all results of one run, in one JSON document.

During a run, results are appended to a journal in the same folder, one line each, so that an
interrupted run keeps its results. A safetensors file in the same folder holds arrays: outputs, so
that implementations can be compared with each other, and attention weights for drawings.

An exploration has a record too: how many problems were tried in each mode, and what was found. Each
finding is a class of deviations, whose smallest problem is saved in a case file beside the record.
The next exploration continues the record, so that the same deviation remains one finding.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import stat
import tempfile
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeVar

import msgspec
import numpy as np

from conformance.errors import BrokenRecord, ConformanceError
from conformance.records.findings import CaseResult, Figures
from conformance.records.header import SCHEMA, Header
from conformance.records.numbers import Array

T = TypeVar("T")

MOST_BYTES = 512 * 2**20
"""The maximum size of a record; larger files are rejected before they are read."""

MOST_PLANNED = 10**8
"""The most items that a run may plan; more would take years."""

CHANGED = "changed"
"""The digest of an input that changed during a run; no file has it."""

PICTURED = ("weights", "weights.want", "weights.noise", "weights.blocked")
"""The names of the arrays stored for drawing attention weights that deviate."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """The record of one run.

    Attributes:
        complete: whether every planned item was examined.
        exchange: the name of the file of arrays in the record's folder, or "".
        digest: the SHA-256 of that file, or "".
        seal: the SHA-256 of everything else in the record, however the file is laid out; "" in
            journals and in records older than this field. It tells edits and damage, not forgery.
    """

    header: Header
    complete: bool
    results: list[CaseResult]
    exchange: str = ""
    digest: str = ""
    seal: str = ""


class Line(msgspec.Struct, omit_defaults=True):
    """A journal line: the result of an item, and arrays by name as (shape, float64 in base64).

    Attributes:
        inputs: what the process of the item's implementation had read for the first time, with
            digests, as in `Implementation.inputs`.
        shared: whether that process has other implementations too, which share what it read.
    """

    result: CaseResult
    arrays: dict[str, tuple[list[int], str]] = {}
    inputs: dict[str, str] = {}
    shared: bool = False


_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
"""The exceptions that a damaged file may raise."""

_SUM = re.compile(rb',"sum":"([0-9a-f]{16})"}$')
"""The end of a journal line, with a checksum of the rest."""

_encoder = msgspec.json.Encoder()


def _encoded(document: Any) -> bytes:
    """Return a document as JSON, in which unpaired surrogates in texts become backslash escapes."""
    try:
        return _encoder.encode(document)
    except UnicodeEncodeError:
        return _encoder.encode(_escaped(msgspec.to_builtins(document)))


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {_escaped(name): _escaped(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def encode_line(
    result: CaseResult,
    arrays: Mapping[str, Array],
    inputs: Mapping[str, str] = MappingProxyType({}),
    *,
    shared: bool = False,
) -> bytes:
    """Return the journal line for a result and its arrays by name, without the newline.

    `inputs` and `shared` are as in `Line`.
    """
    wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    packed = {
        name: (list(array.shape), base64.b64encode(array.tobytes()).decode())
        for name, array in wide.items()
    }
    return _summed(_encoded(Line(result, packed, dict(inputs), shared)))


def _summed(line: bytes) -> bytes:
    """Return a JSON object with a checksum as its last field."""
    return line[:-1] + b',"sum":"%b"}' % hashlib.sha256(line).hexdigest()[:16].encode()


def _check_sum(line: bytes) -> None:
    """Raise `BrokenRecord` if a line has a checksum that is not its own."""
    found = _SUM.search(line)
    if found is not None and _summed(line[: found.start()] + b"}") != line:
        raise BrokenRecord("it is not as it was written")


def decode_line(line: bytes | str) -> tuple[CaseResult, dict[str, Array]]:
    """Return the result in a journal line, and its arrays by name.

    Raises:
        BrokenRecord: the line is damaged.
    """
    item, arrays = _opened(line)
    return item.result, arrays


def _opened(line: bytes | str) -> tuple[Line, dict[str, Array]]:
    """Return a journal line and its arrays by name; raise `BrokenRecord` if it is damaged."""
    try:
        _check_sum(line if isinstance(line, bytes) else line.encode())
        item = msgspec.json.decode(line, type=Line)
        return item, {
            name: np.frombuffer(base64.b64decode(packed), np.float64).reshape(shape)
            for name, (shape, packed) in item.arrays.items()
        }
    except _UNREADABLE as error:
        raise BrokenRecord(f"a journal line cannot be read: {error}") from error


class Journal:
    """A writer that appends results to `<record>.journal` as they arrive.

    An existing journal is replaced atomically. The new journal begins with the header and `lines`,
    the results that are already known.
    """

    def __init__(self, record: Path, header: Header, lines: Iterable[bytes] = ()) -> None:
        self.path = journal_path(record)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        first = _summed(_encoded(header))
        replace_file(self.path, b"".join(line + b"\n" for line in (first, *lines)))
        self._file: IO[bytes] = self.path.open("ab")

    def add(self, line: bytes) -> None:
        """Append a line made by `encode_line` and flush the file."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the journal file."""
        self._file.close()


def check_writable(record: Path) -> None:
    """Check, before a run, that its record can be written, and create the record's folder.

    Raises:
        ConformanceError: the name does not end with .json or is that of a folder, or the folder
            cannot be created or is not writable.
    """
    if record.suffix != ".json":
        raise ConformanceError(f"{record}: a record's name ends with .json")
    try:
        if record.is_dir():
            raise ConformanceError(f"{record}: is a folder")
        # Names of files beside it are longer.
        journal_path(record).with_suffix(f".journal.{os.getpid()}.new").exists()
        record.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=record.parent):
            pass
    except OSError as error:
        raise ConformanceError(
            f"{record}: cannot be written ({error.strerror}); name another place"
        ) from error


def journal_path(record: Path) -> Path:
    """Return the path of the journal that belongs to the record at this path."""
    return record.parent / f"{record.name}.journal"


def narrowed_path(record: Path) -> Path:
    """Return the path for the record of a run that options restricted, beside `record`.

    `record` is the path that was given, which is kept for complete runs.
    """
    return record.parent / f"{record.stem}.narrowed.json"


def finish(
    record: Path,
    missing: Sequence[CaseResult] = (),
    order: Sequence[str] = (),
    keep: Callable[[str], bool] = lambda name: True,
) -> Record:
    """Write the record from its journal, remove the journal, and return the record.

    Args:
        record: the path of the record.
        missing: results for the items that were not examined; without any, the record is complete.
        order: the ids of all items, in the order in which the record lists their results.
        keep: a function that returns whether to keep an array, given its name "item id|array".
    """
    header, results, arrays = read_journal(journal_path(record))
    place = {name: index for index, name in enumerate(order)}
    every = sorted([*results, *missing], key=lambda result: place.get(result.id, len(place)))
    kept = {name: array for name, array in arrays.items() if keep(name)}
    return write(record, Record(header, not missing, every), kept)


def write(path: Path, record: Record, arrays: Mapping[str, Array]) -> Record:
    """Write a record and its arrays, and remove its journal if there is one.

    The keys of `arrays` have the form "item id|array". Return the record with its seal, and the
    name and the digest of the file of arrays; if there are no arrays, these two are "" and no such
    file is written.
    """
    exchange = digest = ""
    file = path.with_suffix(".safetensors")
    if arrays:
        from safetensors.numpy import save as packed

        content = packed({n: np.ascontiguousarray(arrays[n], np.float64) for n in sorted(arrays)})
        _aside(file).write_bytes(content)
        exchange, digest = file.name, hashlib.sha256(content).hexdigest()
    record = msgspec.structs.replace(record, exchange=exchange, digest=digest)
    # From here on, the record is the new one, even if the process ends before the next line.
    record = save(path, record)
    if arrays:
        _aside(file).replace(file)
    journal_path(path).unlink(missing_ok=True)
    return record


def _aside(arrays: Path) -> Path:
    """Return the path where a new file of arrays is complete before its record is replaced."""
    return arrays.with_suffix(".safetensors.new")


def save(path: Path, record: Record) -> Record:
    """Write the record's JSON document atomically, and return the record with its new seal.

    Its file of arrays is not changed.
    """
    record = sealed(record)
    replace_file(path, msgspec.json.format(_encoded(record), indent=0) + b"\n")
    return record


def sealed(record: Record) -> Record:
    """Return a record with a seal of its content."""
    plain = msgspec.structs.replace(record, seal="")
    return msgspec.structs.replace(record, seal=seal_of(_encoded(plain)))


def seal_of(text: bytes) -> str:
    """Return the seal of a record's JSON document, without the one that it may have."""
    document = msgspec.json.decode(text)
    document.pop("seal", None)
    return hashlib.sha256(msgspec.json.encode(document)).hexdigest()


_AT_END = re.compile(rb',"seal":"[0-9a-f]{64}"}\s*$')
"""The seal at the end of a document without spaces."""


def _is_sealed(text: bytes, seal: str) -> bool:
    """Return whether a seal is that of a record's JSON document.

    Where the seal is at the end, as the suite writes it, only spaces have to be left out. To decode
    and encode the document again would take as long as reading the record.
    """
    compact = msgspec.json.format(text, indent=-1)
    found = _AT_END.search(compact, max(0, len(compact) - 128))
    if found and hashlib.sha256(compact[: found.start()] + b"}").hexdigest() == seal:
        return True
    return seal_of(text) == seal


def check_sealed(path: Path, record: Record) -> None:
    """Raise `BrokenRecord` if a record has no seal, so that an edit of it would not be noticed."""
    if not record.seal:
        raise BrokenRecord(f"{path}: has no seal, so it may have been edited; run again")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically, without leaving a partial file if the disk is full."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_document(path: Path, document: msgspec.Struct) -> None:
    """Write a document, such as the record of an exploration, as indented JSON; create its folder.

    The indentation lets version control show changes. `write` writes the record of a run.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def read_document(path: Path, kind: type[T], schema: str, most: int, called: str) -> T:
    """Read and return a document of the type `kind`, such as the record of an exploration.

    Args:
        path: the file of the document.
        kind: the type of the document.
        schema: the schema that the document must have.
        most: the maximum size of the file in bytes.
        called: what the document is called in errors.

    Raises:
        BrokenRecord: the file cannot be read, is too large, or is not such a document.
    """
    try:
        if size_of(path) > most:
            raise BrokenRecord(f"{path} is no {called}: more than {most} bytes")
        content = path.read_bytes()
        # First the schema, because another one may have other fields.
        found = msgspec.json.decode(content, type=_SchemaOnly).schema
        if found != schema:
            raise BrokenRecord(f"{path} has schema {found!r}; this suite reads {schema}")
        return msgspec.json.decode(content, type=kind)
    except (OSError, *_UNREADABLE) as error:
        raise BrokenRecord(f"{path} is no {called}: {error}") from error


def read_journal(path: Path) -> tuple[Header, list[CaseResult], dict[str, Array]]:
    """Return the header, results and arrays in a journal, ignoring a truncated last line.

    The header has what the lines say of inputs.

    Raises:
        BrokenRecord: the journal cannot be read, has another schema, or a line other than a
            truncated last one is damaged.
    """
    content = _bounded(path)
    lines = content.splitlines()
    cut_off = not content.endswith(b"\n")
    first = lines[0] if lines else b""
    try:
        _check_schema(path, msgspec.json.decode(first, type=_SchemaOnly))
        _check_sum(first)
        header = msgspec.json.decode(first, type=Header)
    except BrokenRecord as error:
        raise BrokenRecord(f"{path}, line 1: {error}") from error
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: no journal of this suite ({error})") from error
    items: list[Line] = []
    arrays: dict[str, Array] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            item, exchanged = _opened(line)
        except BrokenRecord as error:
            if cut_off and number == len(lines):
                break
            raise BrokenRecord(f"{path}, line {number}: {error}") from error
        items.append(item)
        arrays |= {f"{item.result.id}|{name}": array for name, array in exchanged.items()}
    return with_inputs(header, _read_by(items)), [item.result for item in items], arrays


def _read_by(lines: Sequence[Line]) -> dict[str, dict[str, str]]:
    """Return for each implementation what the lines of a journal say that it read."""
    together = {line.result.implementation for line in lines if line.shared}
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in filter(lambda line: line.inputs, lines):
        for name in together if line.shared else {line.result.implementation}:
            found[name] = joined_inputs(found[name], line.inputs)
    return found


def joined_inputs(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs of both, with a digest that no file has where the two differ."""
    changed = {name for name in one.keys() & other.keys() if one[name] != other[name]}
    return dict(sorted({**one, **other, **dict.fromkeys(changed, CHANGED)}.items()))


def with_inputs(header: Header, read: Mapping[str, Mapping[str, str]]) -> Header:
    """Return a header in which implementations have these inputs too, given by name."""
    implementations = [
        msgspec.structs.replace(one, inputs=joined_inputs(one.inputs, read.get(one.name, {})))
        for one in header.implementations
    ]
    return msgspec.structs.replace(header, implementations=implementations)


def read(path: Path) -> Record:
    """Return the record in a file, or an incomplete record of the results in a journal.

    Raises:
        BrokenRecord: the file is missing or damaged, contradicts itself, or has an unknown schema.
    """
    if path.suffix == ".journal":
        header, results, _ = read_journal(path)
        return _checked(path, Record(header, False, results))
    text = _text(path)
    try:
        _check_schema(path, msgspec.json.decode(text, type=_Envelope).header)
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: no record of this suite, or cut off ({error})") from error
    try:
        record = msgspec.json.decode(text, type=Record)
        is_same = not record.seal or _is_sealed(text, record.seal)
    except _UNREADABLE as error:
        raise BrokenRecord(f"{path}: is damaged ({error}); run again") from error
    if not is_same:
        raise BrokenRecord(f"{path}: is not as it was written, but edited or damaged; run again")
    return _checked(path, record)


def _checked(path: Path, record: Record) -> Record:
    """Return the record; raise `BrokenRecord` if parts of it contradict each other."""
    header, results = record.header, record.results
    names = Counter(one.name for one in header.implementations)
    items = Counter(result.id for result in results)
    ids = {*names, *items, *(one.requirement for result in results for one in result.findings)}
    strangers = {result.implementation for result in results} - {*names}
    faults = [f"{n} implementations are called {name!r}" for name, n in names.items() if n > 1]
    faults += [f"the item {name!r} is there {n} times" for name, n in items.items() if n > 1]
    faults += [f"no implementation is called {name!r}" for name in strangers]
    faults += [f"{name!r} has several lines" for name in ids if len(name.splitlines()) > 1]
    faults += [
        f"{one.requirement} conforms at {result.id}, with an error above its limit"
        for result in results
        for one in result.findings
        if one.verdict == "conforms" and one.figures and not _is_within(one.figures)
    ]
    if not len(results) <= header.planned <= MOST_PLANNED:
        faults.append(f"{header.planned} items are planned, {len(results)} are there")
    if faults:
        raise BrokenRecord(f"{path}: contradicts itself ({min(faults)[:200]}); run again")
    return record


def _is_within(figures: Figures) -> bool:
    return figures.max_ratio <= figures.limit


def read_arrays(path: Path, record: Record) -> dict[str, Array]:
    """Return the arrays of `record`, which was read from `path`, by names "item id|array".

    They are stored in a file beside the record. Return {} if the record has no arrays.

    Raises:
        BrokenRecord: the file of arrays is missing or damaged, belongs to another record, or is not
            in the record's folder.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    if not record.exchange:
        return {}
    if Path(record.exchange).name != record.exchange:
        raise BrokenRecord(f"{path}: names arrays outside its own folder")
    file = path.with_name(record.exchange)
    # The process that wrote the record may have ended before it renamed its arrays.
    aside = [own for own in (_aside(file),) if os.path.exists(own)]
    for own in (*aside, file):
        content = _bounded(own)
        if hashlib.sha256(content).hexdigest() == record.digest:
            break
    else:
        raise BrokenRecord(f"{file}: does not belong to {path.name}; run again")
    try:
        return load(content)
    except SafetensorError as error:
        raise BrokenRecord(f"{file}: is damaged ({error}); run again") from error


class _SchemaOnly(msgspec.Struct):
    schema: str


class _Envelope(msgspec.Struct):
    header: _SchemaOnly


def _check_schema(path: Path, document: _SchemaOnly) -> None:
    if document.schema != SCHEMA:
        raise BrokenRecord(
            f"{path}: has schema {document.schema!r}, this suite reads {SCHEMA!r}; run again"
        )


def size_of(path: Path) -> int:
    """Return the size of a file in bytes.

    Raises:
        OSError: the file cannot be accessed, or is not a regular file; a pipe or a device may have
            no end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file")
    return status.st_size


def _bounded(path: Path) -> bytes:
    try:
        size = size_of(path)
        if size > MOST_BYTES:
            raise BrokenRecord(f"{path}: {size} bytes are more than a record can have")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        beside = narrowed_path(path)
        if isinstance(error, FileNotFoundError) and beside.exists():
            reason = f"the run was narrowed, so its record is {beside.name}"
        raise BrokenRecord(f"{path}: cannot be read ({reason})") from error


def _text(path: Path) -> bytes:
    """Return the JSON text of a record file, decompressed if its name ends with .gz.

    Raises:
        BrokenRecord: the file cannot be read, is too large, or is damaged.
    """
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


# Records of explorations

EXPLORATION = "mha-conformance/exploration/1"
"""The schema of records of explorations."""


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of deviations.

    Attributes:
        dtype, features, sizes: those of the smallest problem that shows the deviation, with the
            sizes in the order of `conformance.explore.search.SIZES`.
        nature: the requirement that is not met and the kind of the deviation; for an exception, its
            type and the name of the function that raised it.
        modes: the modes in which the deviation was observed.
        array: the array that deviates, or "" if none does; for an exception, the name of the
            function that raised it.
        detail: a sentence about the deviation on the smallest problem.
        ratio: the error in units of σ; None if it is infinite.
        times: the number of problems that showed the deviation in the latest exploration; may be 0.
        case: the name of the case file with the smallest problem.
        since: the versions of the packages with which this smallest problem was found.
    """

    dtype: str
    nature: list[str]
    features: list[str]
    sizes: list[int]
    modes: list[str]
    array: str
    detail: str
    ratio: float | None
    times: int
    case: str
    since: dict[str, str]


class Exploration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of how one implementation was tested on problems outside the catalogue.

    Attributes:
        versions: the versions of the packages that the implementation uses, by name.
        seconds: the time limit for the search of each mode.
        answered: the number of problems that the implementation answered in each mode.
        found: the classes of deviations; those of earlier explorations come first.
    """

    schema: str
    implementation: str
    versions: dict[str, str]
    device: str
    seed: int
    seconds: float
    answered: dict[str, int]
    found: list[Found]


def read_exploration(path: Path) -> Exploration:
    """Read and return the record of an exploration.

    Raises:
        BrokenRecord: the file cannot be read, is too large or is not a record of an exploration, or
            a case file that it names has not the form "NAME-NUMBER.case".
    """
    found = read_document(path, Exploration, EXPLORATION, 2**20, "record of an exploration")
    for one in found.found:
        if not re.fullmatch(r"[\w.-]+-[0-9]{1,6}\.case", one.case):
            raise BrokenRecord(f"{path}: {one.case[:80]!r} is no case file of an exploration")
    return found
