"""Decide who raised an exception: the library, or the suite and its adapters.

Only what the library raises is a refusal of the library. The decision is made from the traceback,
here and nowhere else.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import traceback
from contextlib import suppress
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from conformance.errors import ConformanceError, RankRaised

if TYPE_CHECKING:
    from conformance.adapter.base import Adapter

_ADAPTERS = "conformance.adapters."
_SHAPING = {"reshape", "rearrange", "repeat", "swapaxes", "transpose", "broadcast_to", "stack"}
_SHAPING |= {"concatenate", "split", "pad", "take_along_axis", "expand_dims", "squeeze", "astype"}
_HELPERS = {"numpy", "einops", "builtins", *sys.stdlib_module_names}
"""The packages with which the suite and its adapters prepare a call; no library to be examined."""


def is_our_own(error: BaseException, adapter: Adapter) -> bool:
    """Return whether the suite or the adapter raised the error, rather than the library.

    That is so for any error of the suite's classes, and for an error that was raised in a file of
    the suite or of one of its adapters, or in NumPy, einops or Python's own library on behalf of
    such a file. A function of the library that is not written in Python leaves no line of its own
    in the traceback: if such a function was being called, the library raised the error.

    In an adapter of somebody else, whose file may hold the implementation itself, only an error
    that occurred while an array was being rearranged, as in `array.reshape(...)`, is the adapter's.

    Of what one of several processes raised, that process has decided it: see `is_own_on_rank`.
    """
    if isinstance(error, RankRaised):
        return error.ours
    return _is_own_in(error, {kind.__module__ for kind in type(adapter).__mro__})


def is_own_on_rank(error: BaseException) -> bool:
    """Return the same as `is_our_own` in a process that computes a part of a call.

    The process has the adapter's function, but not the adapter; its module shows in the traceback.
    """
    walked = [_module(frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = {name for name in walked if name.startswith(_ADAPTERS)}
    return _is_own_in(error, {name for name in files if "." not in name.removeprefix(_ADAPTERS)})


def _is_own_in(error: BaseException, modules: set[str]) -> bool:
    if isinstance(error, ConformanceError):
        return True
    trace = error.__traceback__
    walked = [frame for frame, _ in traceback.walk_tb(trace)]
    frames = [*zip(traceback.extract_tb(trace), walked, strict=True)]
    own = [index for index, (_, frame) in enumerate(frames) if _is_own(frame, modules)]
    if not own:
        return False
    summary, frame = frames[own[-1]]
    called = _called(summary)
    if called is not None and _name(called) in _SHAPING:
        return True
    if not _module(frame).startswith("conformance."):
        return False
    if any(_package(_module(inner)) not in _HELPERS for _, inner in frames[own[-1] + 1 :]):
        return False
    return called is None or _package(_module_of(called, frame)) in _HELPERS | {"conformance", ""}


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_own(frame: FrameType, modules: set[str]) -> bool:
    """Return whether a frame is of the suite or of the adapter, whose classes are in `modules`.

    Our own implementations, such as `conformance.adapters.ours.ring`, are libraries like others.
    """
    name = _module(frame)
    of_suite = name.startswith("conformance.") and not name.startswith(_ADAPTERS)
    return of_suite or name in modules


def _called(summary: traceback.FrameSummary) -> ast.expr | None:
    """Return the expression of the function that was being called in this frame.

    Return None if the source is not available, or if the line was doing something else than a call.
    """
    first, last = summary.lineno, summary.end_lineno
    if first is None or last is None or summary.colno is None:
        return None
    lines = [linecache.getline(summary.filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][: summary.end_colno]
    lines[0] = lines[0][summary.colno :]
    with suppress(SyntaxError):
        expression = ast.parse(f"({b''.join(lines).decode()})", mode="eval").body
        if isinstance(expression, ast.Call):
            return expression.func
    return None


def _name(called: ast.expr) -> str:
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _module_of(called: ast.expr, frame: FrameType) -> str:
    """Return the name of the module that a called function belongs to; "" if it is not known.

    The names in the expression are looked up in the frame without running any code.
    """
    found = _value(called, frame)
    module = "" if found is None else _home(found)
    if not module and isinstance(called, ast.Attribute):
        # Functions in C may not know their module, but the object that has them does.
        owner = _value(called.value, frame)
        module = "" if owner is None else _home(owner)
    return module


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Return the object that a name or a chain of attributes stands for, or None."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        owner = _value(expression.value, frame)
        if isinstance(owner, ModuleType):
            return getattr(owner, expression.attr, None)
        with suppress(AttributeError):
            return inspect.getattr_static(owner, expression.attr)
    return None


def _home(found: Any) -> str:
    """Return the name of the module that defines a module, function or class, or an object's class.

    Return "" for a function that does not know its module.
    """
    if isinstance(found, ModuleType):
        return found.__name__
    if isinstance(found, type) or inspect.isroutine(found):
        return getattr(found, "__module__", None) or ""
    return type(found).__module__
