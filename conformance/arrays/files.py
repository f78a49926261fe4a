"""Read dumps: NumPy files, safetensors, files of torch.save, and folders of these.

Nothing in a file is executed: pickles are refused, and torch unpickles tensors only. An array is
recognised by its name, which is that in the file or, in a .npy file, that of the file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance.arrays.given import (
    Numbers,
)
from conformance.cases.casefile import File, look
from conformance.definition.features import ABSENT, FEATURES
from conformance.definition.statistics import STATISTICS
from conformance.errors import BadArrays, UnknownName, WrongTensors
from conformance.frameworks import framework

MOST_NAMED = 8
"""The most unknown names of arrays that an error lists."""

MOST_BYTES = 2**31
"""The largest size of a file in bytes."""

NAMES: Mapping[str, str] = {
    "x": "hidden_states input inputs",
    "query": "q query_states query_layer queries q_proj q_proj_out xq",
    "key": "k key_states key_layer keys k_proj k_proj_out xk",
    "value": "v value_states value_layer values v_proj v_proj_out xv",
    "output": "out o attn_output attention_output attn_out context_layer result got actual",
    "wanted": "expected reference want target",
    "mask": "attn_mask attention_mask",
    "bias": "attn_bias attention_bias",
    "weights": "attn_weights attention_weights attention probs",
    **{name: entry.files for name, entry in STATISTICS.items()},
    **{name: others for entry in FEATURES for name, others in entry.files.items()},
    "gradient.output": "grad_output d_output dout do",
    "gradient.query": "grad_query d_query dq",
    "gradient.key": "grad_key d_key dk",
    "gradient.value": "grad_value d_value dv",
}
"""The names of arrays, each with others that are understood."""

OPTIONS = {
    "causal": str,
    "scale": float,
    **{name: kind for entry in FEATURES for name, kind in entry.options.items()},
    "mask_true": str,
    "layout": str,
    "heads": int,
    "kv_heads": int,
    "batch": int,
    "dtype": str,
    "accuracy": str,
}
"""What files may tell besides arrays, and its type: a scalar or text in .npz, metadata in
safetensors, or an entry of `options.json` in a folder."""

TORCH = (".pt", ".pth", ".bin")
SUFFIXES = (".npz", ".npy", ".safetensors", *TORCH)


def read(paths: Sequence[Path]) -> tuple[dict[str, Numbers], dict[str, Any]]:
    """Return the arrays in files and folders by canonical name, and the options that they tell.

    Raises:
        BadArrays: if a file cannot be read, is of another kind, or two arrays have one name.
    """
    arrays: dict[str, Numbers] = {}
    places: dict[str, Path] = {}
    options: dict[str, Any] = {}
    foreign: list[str] = []
    for path in _files(paths):
        contents = _contents(path)
        for name, array in contents.items():
            canonical = _meant(name, contents)
            if canonical in OPTIONS:
                options[canonical] = _option(path, canonical, array)
            elif canonical is None:
                foreign.append(name)
            elif canonical in arrays:
                raise BadArrays(
                    f"{path}: {name} is a second array for {canonical}, which {places[canonical]} "
                    "holds; a folder, or all files that are named, are one dump: name one file"
                )
            else:
                places[canonical] = path
                arrays[canonical] = Numbers.of(f"{path}: {name}", array)
    if not arrays and foreign:
        raise BadArrays(
            f"no array has a known name, but {', '.join(sorted(foreign)[:MOST_NAMED])}; call them "
            "query, key, value, output, mask, ... (docs/diagnose.md); one output is compared with "
            "another by `diagnose ONE --against OTHER`, whatever its name"
        )
    if {"query", "key", "value"} <= arrays.keys():
        # Heads tell more than what they are projected from.
        arrays.pop("x", None)
    return arrays, options


def weights(paths: Sequence[Path]) -> dict[str, Numbers]:
    """Return the arrays in files that have no known name: the weights of a layer, by their own."""
    found: dict[str, Numbers] = {}
    for path in _files(paths):
        contents = _contents(path) if path.name != "options.json" else {}
        for name, array in contents.items():
            if _meant(name, contents) is None:
                found[name] = Numbers.of(f"{path}: {name}", array)
    return found


_KNOWN = {
    **{other: name for name, others in NAMES.items() for other in (name, *others.split())},
    **{other: name for name in OPTIONS for other in (name, name.replace(".", "_"))},
}


def _meant(name: str, contents: Mapping[str, Any]) -> str | None:
    """Return the canonical name of an array or an option in a file; None for a weight."""
    folder, _, last = name.rpartition("/")
    if folder and any(f"{folder}/{other}" in contents for other in ("kernel", "weight")):
        # Flax and Keras call the bias of a projection so.
        return None
    return _KNOWN.get(last.lower())


def renamed(others: Mapping[str, Any], told: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `conformance.diagnose` that have other names, by their own.

    Args:
        others: the arguments by the names that arrays and options may have in files.
        told: the arguments that have their own names.

    Raises:
        UnknownName: if a name is none of those in files either.
        BadArrays: if an argument is passed under two names.
    """
    found: dict[str, Any] = {}
    for name, value in others.items():
        canonical = _meant(name, {})
        if canonical is None or _argument(canonical) not in told:
            known = [it for it, meant in _KNOWN.items() if _argument(meant) in told]
            raise UnknownName("argument of diagnose", name, known)
        if canonical in found or told.get(canonical) is not None:
            raise BadArrays(f"{name} is a second array for {canonical}; pass one of them")
        found[canonical] = scalar(value)
    parts = grouped(found)
    for name in parts:
        if told.get(name) is not None:
            raise BadArrays(f"{name} is passed as a whole and in parts; pass one of them")
    return {name: it for name, it in found.items() if "." not in name} | parts


def scalar(value: Any) -> Any:
    """Return a number or text that NumPy loaded as an array without axes; else the value."""
    return value.item() if isinstance(value, np.ndarray) and value.ndim == 0 else value


def _argument(canonical: str) -> str:
    """Return the argument of `conformance.diagnose` that an array, or a part of it, belongs to."""
    group = canonical.partition(".")[0]
    return "gradients" if group == "gradient" else group


def bare_outputs(paths: Sequence[Path], count: int) -> list[Numbers]:
    """Return so many arrays of one size that are all in a file, and have no known names; or [].

    Raises:
        BadArrays: if the file cannot be read.
    """
    if len(paths) != 1 or paths[0].is_dir():
        return []
    contents = _contents(paths[0])
    if len(contents) != count or any(_meant(name, contents) for name in contents):
        return []
    found = [Numbers.of(f"{paths[0]}: {name}", array) for name, array in contents.items()]
    return found if len({it.values.size for it in found}) == 1 else []


def output(path: Path) -> Numbers:
    """Return the output in a file or a folder: its only array, or the one with such a name.

    Raises:
        BadArrays: if there is none.
    """
    if not path.is_dir():
        contents = [*_contents(path).items()]
        if len(contents) == 1:
            return Numbers.of(f"{path}: {contents[0][0]}", contents[0][1])
    arrays, _ = read([path])
    for name in ("output", "wanted"):
        if name in arrays:
            return arrays[name]
    raise BadArrays(f"{path} has no array called output or wanted")


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(it for it in path.iterdir() if it.suffix.lower() in SUFFIXES)
            if not found:
                raise BadArrays(f"{path} has no file with a name in {', '.join(SUFFIXES)}")
            yield from found
            if (path / "options.json").is_file():
                yield path / "options.json"
        else:
            yield path


def _contents(path: Path) -> dict[str, Any]:
    """Return what is in a file, by the names in it."""
    suffix = path.suffix.lower()
    try:
        size = path.stat().st_size
    except OSError as error:
        raise BadArrays(f"{path} cannot be read: {error.strerror}") from error
    if size > MOST_BYTES:
        raise BadArrays(
            f"{path} has {size:,} bytes, more than {MOST_BYTES:,}; dump one batch entry, or the "
            "heads that share one key/value head"
        )
    if path.name == "options.json":
        return _json(path)
    if suffix == ".safetensors":
        return _of_safetensors(path)
    if suffix in TORCH:
        bridge: Any = framework("torch")
        found = bridge.saved(path)
        if not isinstance(found, Mapping):
            found = {path.stem: found}
        return dict(found)
    if suffix not in (".npy", ".npz"):
        raise BadArrays(
            f"{path}: the name of a dump ends in {', '.join(SUFFIXES)}; other files, such as "
            "pickles, are not opened"
        )
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {path.stem: loaded}
        with loaded:
            _check_unpacked(path)
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())
        if "pickle" in why:
            why = "it holds Python objects, which are not loaded; save arrays of numbers"
        raise BadArrays(f"{path} cannot be read: {why}") from error


def _check_unpacked(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        total = sum(entry.file_size for entry in archive.infolist())
    if total > MOST_BYTES:
        raise BadArrays(f"{path} unpacks to {total:,} bytes, more than {MOST_BYTES:,}")


def _of_safetensors(path: Path) -> dict[str, Any]:
    try:
        file = look(path)
        plain = {
            name: {**entry, "dtype": "U8"} if entry["dtype"] == "BOOL" else entry
            for name, entry in file.header.items()
        }
        bits = File(file.path, file.metadata, plain, file.start)
        found: dict[str, Any] = {name: bits.read(name) for name in plain}
    except WrongTensors as error:
        raise BadArrays(str(error)) from error
    for name, entry in file.header.items():
        if entry["dtype"] == "BOOL":
            found[name] = found[name].bits.astype(np.bool_)
    return found | {name: text for name, text in file.metadata.items() if name in OPTIONS}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArrays(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not found.keys() <= OPTIONS.keys():
        raise BadArrays(f"{path} is no JSON object with entries among {', '.join(OPTIONS)}")
    return found


def _option(path: Path, name: str, value: Any) -> Any:
    kind = OPTIONS[name]
    # A window may be an array of two numbers.
    value = value.tolist() if hasattr(value, "tolist") else value
    try:
        return kind(value)
    except (TypeError, ValueError) as error:
        raise BadArrays(f"{path}: {name} is {value!r}, no {kind.__name__}") from error


def option(name: str, text: str) -> Any:
    """Return the value of an option that is written as text, such as "128" or "63,0" for a window.

    Raises:
        BadArrays: if the text is no such value.
    """
    if name == "causal":
        said = {"true": True, "1": True, "yes": True, "false": None, "0": None, "none": None}
        if text.lower() not in (*said, "top-left", "bottom-right"):
            raise BadArrays(f"causal is {text!r}; it is true, false, top-left or bottom-right")
        return said.get(text.lower(), text.lower())
    parts = [part.strip() for part in text.strip("()[] ").split(",")]
    try:
        sides = [None if part.lower() in ("none", "-1") else int(part) for part in parts]
    except ValueError as error:
        raise BadArrays(f"window is {text!r}; it is a number, or before,after") from error
    if len(sides) == 1 and sides[0] is not None:
        return sides[0]
    if len(sides) != 2:
        raise BadArrays(f"window is {text!r}; it is a number, or before,after")
    return (sides[0], sides[1])


def arguments(
    arrays: Mapping[str, Numbers], options: Mapping[str, Any], paths: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return arrays and options from files as the arguments of `conformance.diagnose`.

    `paths` are the files, of which an error names the arrays whose names are not known.

    Raises:
        BadArrays: if query, key, value or output is missing.
    """
    needed = ("x", "output") if "x" in arrays else ("query", "key", "value", "output")
    missing = [name for name in needed if name not in arrays]
    if missing:
        foreign = sorted(weights(paths))[:MOST_NAMED]
        advice = (
            "Dump the heads that go into the attention, and its output; with outputs alone, "
            "compare two of them: --against"
        )
        if foreign:
            advice = (
                f"Not known: {', '.join(foreign)}; save each of them under the name of what it is, "
                f"such as {missing[0]}={foreign[0]!r} in np.savez"
            )
        raise BadArrays(
            f"{', '.join(missing)} missing; there is {', '.join(sorted(arrays)) or 'nothing'}. "
            f"{advice}"
        )
    found: dict[str, Any] = {n: a for n, a in arrays.items() if "." not in n}
    for name, value in options.items():
        if name in ("causal", "window"):
            found[name] = option(name, str(value))
        elif "." not in name:
            found[name] = value
    found |= grouped({**arrays, **options})
    return found


def grouped(told: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return parts, such as "rotary.base" or "gradient.key", by the argument that they are of."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in told.items():
        part = name.partition(".")[2]
        if part and _argument(name) in (*ABSENT, "gradients"):
            found.setdefault(_argument(name), {})[part] = value
    return found
