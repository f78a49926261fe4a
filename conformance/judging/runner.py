"""The program that calls a candidate in a sandbox: it receives problems and returns plain arrays.

It imports nothing from the suite, and receives one problem at a time, without expected values. Its
replies are never trusted: the controller checks their form and compares their numbers. What it
reports on the candidate's behaviour is reliable only if the candidate is an ordinary Python
program; see docs/judge.md.

The first process imports the frameworks and waits. For each candidate it forks a child, which gives
up its privileges before it imports the candidate.
"""

import _thread
import ctypes
import functools
import gc
import importlib.util
import json
import linecache
import marshal
import os
import platform
import re
import resource
import shutil
import signal
import socket
import struct
import sys
import threading
import types

import numpy as np

HEADER = struct.Struct("<II")
"""The format of the beginning of a message: the sizes in bytes of its JSON part and its arrays."""

MOST_BYTES = 2**28

READY = re.compile(
    r"attention|flash_attn|multi_head|transformer_encoder|(^|[._])(mha|sdpa|sdfp)(_|$)",
    re.IGNORECASE,
)
"""Names of functions, classes, operators and symbols that compute attention, if a library defines
them. A candidate may give such names to its own ones, and to sections of a profile."""

WORDS = (
    b"attention",
    b"flash_attn",
    b"multi_head",
    b"transformer_encoder",
    b"mha",
    b"sdpa",
    b"sdfp",
)
"""The parts of `READY`, at least one of which is in a file that defines an attention."""

LIBRARY_OPERATORS = "aten::"
"""What the names of torch's own operators begin with."""
OWN_OPERATORS = re.compile(r"torch\._ops\.(?!aten$)")
"""What the names of the modules of other operators begin with."""
USER_SCOPE = 7
"""The scope, in a profile of torch, of a section with a name that the program has chosen."""

READY_MODULES = re.compile(
    r"(flash_attn|flash_attn_interface|xformers|transformer_engine|flashinfer|sageattention"
    r"|keras.*attention|flax.*attention"
    r"|haiku.*attention|equinox.*attention|transformers\.models|conformance)(\.|$)"
)
COMPILERS = re.compile(
    r"torch\.(_dynamo|_export|_functorch|_inductor|export|fx|jit|onnx\._internal)\b"
)
"""Modules with functions whose names match `READY`, but which only look for attention in the code
that they compile. The functions of all other libraries count."""
NO_CALCULATION = re.compile(r"(^|\.)(__(?!call)\w+__|_?(register|reset)\w*|<\w+>)$")
"""Qualified names of functions that compute nothing, whatever their classes are called."""
FEW_NAMES, MANY_NAMES, ALIKE = 8, 16, 0.85
"""A function of a candidate counts as a copy of one of a library if it uses the same names in the
same order, at least the first number, and the same variables; or if it uses at least the second
number of names, and at least the third part of the names of both are common to both. The
instructions are no measure: the compiler of Python makes others of a call if it saw an import."""

READY_METHODS = {("torch.nn.modules.transformer", "forward")}
"""Further methods that compute attention, as pairs of a module and a name."""

USED = (
    (json, "dumps loads"),
    (json.encoder, "JSONEncoder c_make_encoder encode_basestring_ascii"),
    (json.JSONEncoder, "encode iterencode"),
    (sys, "_getframe setprofile settrace"),
    (gc, "disable enable"),
    (os, "fspath"),
    (os.path, "realpath"),
    (re, "match sub"),
    (socket.socket, "recv send sendall"),
)
"""Functions of the standard library that this program uses while a candidate runs, by module or
class. A method that a class only inherits must not appear in the dictionary of that class."""

SUSPICIOUS = {
    "gc.get_objects": "looks through the garbage collector",
    "gc.get_referrers": "looks through the garbage collector",
    "gc.get_referents": "looks through the garbage collector",
    "sys.setprofile": "replaces the profile function",
    "sys.settrace": "traces the interpreter",
    "threading.setprofile": "replaces the profile function",
    "sys._current_frames": "reads the frames of other code",
    "code.__new__": "makes code objects",
    "sys._getframe": "reads the frames of its callers",
}
"""Audit events that no kernel causes, each with what the candidate does to cause it; events that
libraries cause are ignored."""


MISSING = object()
"""What is not in the dictionary of a module or a class."""

REPLACES = "torch._inductor.fx_passes.fuse_attention"
"""The module of torch's compiler that replaces an attention that it recognises by torch's own."""

CALLS_OPERATOR = "torch._ops.__call__"
"""What stands for the methods by which programs call an operator of torch."""

RESOLVES = {"dlsym", "dlvsym"}
"""Functions that find others by name, and so hide which ones a candidate calls."""

PAIRS = 3
"""The number of problems in each kind of `CandidateHost._compare_paths`."""


class Violation(Exception):
    """A candidate did or returned something that is not allowed; the text is "kind: sentence"."""


# Messages


def send(channel, head, arrays=(), *, dumps=json.dumps):
    """Send a message: JSON, then the bytes of the arrays in the order of `head["arrays"]`."""
    text = dumps(head).encode()
    body = b"".join(arrays)
    channel.sendall(HEADER.pack(len(text), len(body)) + text + body)


def receive(channel):
    """Return the JSON part of the next message and the bytes after it; None if the channel closed.

    Raises:
        ValueError: the message is too large, or its first part is not JSON.
    """
    head = _exactly(channel, HEADER.size)
    if head is None:
        return None
    sizes = HEADER.unpack(head)
    if sum(sizes) > MOST_BYTES:
        raise ValueError("the message is too large")
    text, body = (_exactly(channel, size) for size in sizes)
    return None if text is None or body is None else (json.loads(text), body)


def _exactly(channel, size):
    data = bytearray()
    while len(data) < size:
        more = channel.recv(min(size - len(data), 2**20))
        if not more:
            return None
        data += more
    return bytes(data)


# Frameworks


class NumPyArrays:
    """Operations on NumPy arrays, which have no derivatives."""

    name = "numpy"
    modules = (np, np.linalg, np.testing)

    def native(self, values, dtype):
        return values.astype(dtype)

    def plain(self, array):
        if type(array) is not np.ndarray:
            raise Violation(f"type: returned {_type(array)}, not a plain numpy.ndarray")
        if array.dtype.kind not in "fiub":
            raise Violation(f"type: returned numbers of type {array.dtype}")
        return np.array(array, np.float64), str(array.dtype)

    def values(self, array):
        return array

    def shares(self, array, others):
        return any(np.may_share_memory(array, other) for other in others)

    def filled(self, shape, like, number):
        return np.full(shape, number, like.dtype)

    def overwrite(self, array, by):
        array[...] = by

    def call(self, function, variables, wanted, cotangents, backwards):
        return function(), {}

    def profile(self, call):
        return call(), ()

    def profile_threads(self, call):
        return self.profile(call)

    def poison(self, size):
        held = [np.full(n, np.nan, t) for n in {size, 2 * size} for t in ("f4", "f8", "f2")]
        del held


class TorchArrays(NumPyArrays):
    """Operations on torch tensors, differentiated by autograd."""

    name = "torch"

    def __init__(self):
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        try:
            self.record = torch.autograd._enable_profiler_legacy
            self.recorded = torch.autograd._disable_profiler_legacy
            self.recorder = torch.autograd.profiler_legacy.profile().config()
        except (AttributeError, TypeError) as error:
            raise RuntimeError(
                f"torch {torch.__version__} lacks what tells its operators: {error}; "
                "candidates are judged with torch 2.13"
            ) from None
        # Functions that a candidate may replace later.
        self.grad, tensor = torch.autograd.grad, torch.Tensor
        self.cpu, self.detach, self.double = tensor.cpu, tensor.detach, tensor.double
        self.modules = (
            np,
            torch,
            torch.Tensor,
            torch._C._nn,
            torch.autograd,
            torch.nn.functional,
            torch.testing,
            torch.linalg,
            torch.autograd.profiler,
        )

    def native(self, values, dtype):
        return self.torch.from_numpy(values.copy()).to(getattr(self.torch, dtype))

    def plain(self, array):
        if type(array) is not self.torch.Tensor:
            raise Violation(f"type: returned {_type(array)}, not a plain torch.Tensor")
        if array.layout is not self.torch.strided or array.is_quantized or not array.is_cpu:
            raise Violation("type: returned a tensor that is not dense, or not on the device asked")
        if not (array.dtype.is_floating_point or array.dtype is self.torch.bool):
            raise Violation(f"type: returned numbers of type {array.dtype}")
        value = self.double(self.cpu(self.detach(array))).numpy()
        return np.array(value, np.float64), str(array.dtype).rpartition(".")[2]

    def values(self, array):
        array = self.detach(array)
        return (array if array.dtype is self.torch.bool else self.double(array)).numpy()

    def shares(self, array, others):
        places = {other.untyped_storage().data_ptr() for other in others}
        return array.numel() > 0 and array.untyped_storage().data_ptr() in places

    def filled(self, shape, like, number):
        return self.torch.full(shape, number, dtype=like.dtype)

    def overwrite(self, array, by):
        self.detach(array).copy_(by)

    def call(self, function, variables, wanted, cotangents, backwards):
        if not wanted:
            with self.torch.no_grad():
                return function(), {}
        for name in wanted:
            variables[name].requires_grad_()
        results = function()
        pairs = [
            (result, cotangent.to(result.dtype))
            for result, cotangent in zip(results, cotangents)
            if cotangent is not None and type(result) is self.torch.Tensor and result.requires_grad
        ]
        if not pairs or any(a.shape != b.shape for a, b in pairs):
            return results, {}
        for left in reversed(range(backwards)):
            found = self.grad(
                [a for a, _ in pairs],
                [variables[name] for name in wanted],
                [b for _, b in pairs],
                allow_unused=True,
                retain_graph=left > 0,
            )
        return results, {n: g for n, g in zip(wanted, found) if g is not None}

    def profile(self, call):
        # This profiler records only names and takes 1 ms a call; that of all threads takes 8 ms.
        self.record(self.recorder)
        try:
            result = call()
        finally:
            try:
                records = self.recorded()
            except RuntimeError:
                raise Violation("tampering: ended the profiler") from None
        return result, _operators((one.name(), one.scope()) for thread in records for one in thread)

    def profile_threads(self, call):
        profiler = self.torch.autograd.profiler
        options = self.torch._C._profiler._ExperimentalConfig
        # Operators that are called in a thread of the candidate count as well.
        told = "profile_all_threads" in str(options.__init__.__doc__)
        every = options(profile_all_threads=True) if told else options()
        try:
            with (
                profiler.profile(experimental_config=every) as profiled,
                profiler.record_function("the candidate"),
            ):
                result = call()
        except RuntimeError as error:
            if "rofiler" not in str(error):
                raise
            raise Violation("tampering: ended the profiler") from None
        seen = {(event.name, event.scope) for event in profiled.function_events}
        if ("the candidate", USER_SCOPE) not in seen:
            raise Violation("tampering: ended the profiler")
        return result, _operators(seen)

    def poison(self, size):
        for dtype in (self.torch.float32, self.torch.float64, self.torch.bfloat16):
            held = [self.torch.full((n,), float("nan"), dtype=dtype) for n in (size, 2 * size)]
            del held
        super().poison(size)


def _operators(seen):
    """Return the names of torch's own operators in pairs of a name and a scope of a profile."""
    return {
        name.removeprefix(LIBRARY_OPERATORS)
        for name, scope in seen
        if scope != USER_SCOPE and name.startswith(LIBRARY_OPERATORS)
    }


class JaxArrays(NumPyArrays):
    """Operations on JAX arrays, which cannot be written to."""

    name = "jax"

    def __init__(self):
        import jax

        jax.config.update("jax_enable_x64", True)
        self.jax, self.numbers = jax, jax.numpy
        self.vjp = jax.vjp
        self.modules = (np, jax, jax.numpy, jax.nn, jax.lax)

    def native(self, values, dtype):
        return self.numbers.asarray(values.copy()).astype(dtype)

    def plain(self, array):
        if not isinstance(array, self.jax.Array) or isinstance(array, self.jax.core.Tracer):
            raise Violation(f"type: returned {_type(array)}, not an array of JAX")
        return np.array(array).astype(np.float64), str(array.dtype)

    def values(self, array):
        return np.asarray(array)

    def shares(self, array, others):
        return any(array is other for other in others)

    def overwrite(self, array, by):
        raise TypeError("arrays of JAX cannot be written to")

    def call(self, function, variables, wanted, cotangents, backwards):
        if not wanted:
            return function(), {}
        first = [variables[name] for name in wanted]

        def pure(*values):
            variables.update(zip(wanted, values))
            try:
                return tuple(r for r in function() if r is not None)
            finally:
                variables.update(zip(wanted, first))

        results, back = self.vjp(pure, *first)
        given = [
            c.astype(r.dtype) if c is not None else self.numbers.zeros_like(r)
            for r, c in zip(results, cotangents)
        ]
        if any(a.shape != b.shape for a, b in zip(results, given)):
            return results, {}
        return results, dict(zip(wanted, back(tuple(given))))


FRAMEWORKS = {"numpy": NumPyArrays, "torch": TorchArrays, "jax": JaxArrays}


def _type(value):
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"[:80]


# What candidates may import from the suite: names for declarations, whose calls are recorded


class RecordedCall:
    """A recorded call of one of the suite's declaration classes, such as `MaskArgument`."""

    def __init__(self, kind, args, named):
        self.kind, self.args, self.named = kind, args, named


class UnsupportedProblem(Exception):
    """Raised by a candidate for a problem that it does not support."""


def stand_in(words):
    """Return a stand-in for the module `conformance`, which records declarations made with it.

    `words` are the names of the classes with which candidates declare.
    """
    module = types.ModuleType("conformance")
    for word in words:
        setattr(module, word, lambda *args, _kind=word, **named: RecordedCall(_kind, args, named))

    def attention_function(framework, *masks, **declaration):
        flat = [
            m for group in masks for m in (group if isinstance(group, (list, tuple)) else [group])
        ]

        def decorate(function):
            function.declared_as = (framework, flat, declaration)
            return function

        return decorate

    module.attention_function = attention_function
    module.Unsupported = UnsupportedProblem
    return module


def recorded(value):
    """Return a declared value in a form that JSON can hold; raise `TypeError` if there is none."""
    if isinstance(value, RecordedCall):
        return {"kind": value.kind, "args": recorded(value.args), "named": recorded(value.named)}
    if isinstance(value, (list, tuple)):
        return [recorded(one) for one in value]
    if isinstance(value, dict):
        return {"map": {str(name): recorded(one) for name, one in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a declaration holds {_type(value)}")


def only(module):
    """Return the name of the only function in a module that can be the candidate.

    Objects that can be called are functions too, but classes are not. If any functions have a
    declaration, the candidate must be among them. Otherwise, it is the function named "attention"
    or, without such a function, the module's only function.

    Raises:
        TypeError: there is no such function, or more than one.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if callable(value)
        and not isinstance(value, type)
        and (
            getattr(inner(value), "__module__", "") == module.__name__
            # The class of a module that torch.jit.script has compiled is torch's.
            or (name == "attention" and hasattr(value, "forward"))
        )
    }
    declared = [name for name, value in own.items() if hasattr(value, "declared_as")]
    found = declared or [name for name in own if name == "attention"] or list(own)
    if len(found) != 1:
        raise TypeError(f"which function is it? say FILE:NAME; there are {found[:10]}")
    return found[0]


def inner(function):
    """Return the function or module that a `functools.partial` or a compiled function calls."""
    # Some objects have every attribute.
    for _ in range(9):
        # By torch.jit.script and torch.jit.trace, by torch.compile, and by jax.jit.
        names = ["_torchdynamo_inline", "_torchdynamo_orig_callable", "_orig_mod"]
        names += [] if hasattr(function, "__code__") else ["__wrapped__"]
        if isinstance(function, functools.partial):
            names = ["func"]
        found = next((name for name in names if hasattr(function, name)), None)
        if found is None:
            break
        function = getattr(function, found)
    return function


def parameters(function):
    """Return the names of a function's parameters, without those that a partial object has set."""
    if isinstance(function, functools.partial):
        left = parameters(function.func)[len(function.args) :]
        return [name for name in left if name not in function.keywords]
    function = inner(function)
    if isinstance(function, (types.FunctionType, types.MethodType)):
        code = function.__code__
        found = list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        return found[isinstance(function, types.MethodType) :]
    if hasattr(function, "schema"):
        # A method of a module that torch.jit.script has compiled.
        return [argument.name for argument in function.schema.arguments][1:]
    # A module of torch takes anything when it is called, and passes it to `forward`.
    for method in (getattr(function, name, None) for name in ("__call__", "forward")):
        known = isinstance(method, types.MethodType) or hasattr(method, "schema")
        if known and (found := parameters(method)):
            return found
    return []


def declaration(function, name, module):
    """Return a dict of a function's name, parameters, framework, masks and further declarations.

    If the function has no declaration, "masks" is None, and the framework is the first of torch,
    jax and numpy of which `module`, or that of the function, has imported the package or a
    submodule; "" if there is none.
    """
    roots = {
        getattr(value, "__name__", "").partition(".")[0]
        for held in (vars(module), getattr(inner(function), "__globals__", {}))
        for value in held.values()
        if isinstance(value, types.ModuleType)
    }
    guessed = next((one for one in ("torch", "jax", "numpy") if one in roots), "")
    framework, masks, more = getattr(function, "declared_as", (guessed, None, {}))
    return {
        "name": name,
        "parameters": parameters(function),
        "framework": framework,
        "masks": None if masks is None else recorded(masks),
        "declaration": recorded(dict(more)),
    }


# The candidate


class CandidateHost:
    """The host of a candidate, which imports and calls it when the controller requests this."""

    def __init__(self, channel):
        self.channel = channel
        self.violations = []
        self.calls = set()
        self.slots = {}
        self.function = self.framework = None
        self.bases = {}
        self.hearing = False
        self.allowed_threads = set()
        # Libraries are imported from here; the candidate may change the path.
        self.places = sorted({f"{place}/" for place in sys.path if place}, key=len, reverse=True)
        self.libraries = {}
        self.read = set()
        self.indexed = set()
        self.known = {}
        self.entered = {}
        self.state = None
        self.path, self.traced = None, False
        self.spared, self.observed = None, False
        self.paths = {True: [], False: []}

    def serve(self):
        """Process requests until the controller closes the channel."""
        while True:
            message = receive(self.channel)
            if message is None:
                return
            head, body = message
            if head["do"] == "import":
                self._import(head)
            elif head["do"] == "ask":
                self._ask(head, body)

    def blame(self, kind, text):
        """Record that the candidate did something that a kernel must not do.

        Repetitions are not recorded, and at most 20 violations are.
        """
        if (kind, text) not in self.violations and len(self.violations) < 20:
            self.violations.append((kind, text))

    def _import(self, head):
        self.id, name = head["id"], head["name"]
        sys.modules["conformance"] = stand_in(head["words"])
        sys.modules.pop("__main__", None)
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            held = {one: FRAMEWORKS[one]() for one in head["frameworks"] if one in FRAMEWORKS}
        except Exception as error:
            self._send({"raised": _told(error, "")})
            return
        if "torch" in held:
            # The engine of autograd starts a thread at its first use.
            torch = held["torch"].torch
            one = torch.ones(1, requires_grad=True)
            (one * one).sum().backward()
        for framework in held.values():
            for module in framework.modules:
                self.bases.setdefault(id(module), (module, dict(vars(module))))
        self._watch_threads()
        for module in (__builtins__, threading, _thread):
            self.bases[id(module)] = (module, dict(vars(module)))
        for module, names in USED:
            held = {name: vars(module).get(name, MISSING) for name in names.split()}
            self.bases.setdefault(id(module), (module, held))
        if head["profile"]:
            keep_plain_operations()
        self.file = head["file"]
        sys.addaudithook(self._heard)
        module = types.ModuleType("candidate")
        module.__file__ = self.file
        # The file is not on this disk, but torch.jit.script reads the source of a function.
        lines = head["source"].splitlines(keepends=True)
        linecache.cache[self.file] = len(head["source"]), None, lines, self.file
        sys.modules["candidate"] = module
        try:
            # What is traced or compiled now is not entered again when the candidate is called.
            sys.setprofile(self._profile if head["profile"] else None)
            try:
                exec(compile(head["source"], self.file, "exec"), vars(module))
            finally:
                sys.setprofile(None)
            name = name or only(module)
            self.function = getattr(module, name)
            if not callable(self.function):
                raise TypeError(f"{name} cannot be called")
            said = declaration(self.function, name, module)
            wanted = head["framework"] or said["framework"]
            if wanted not in FRAMEWORKS:
                known = ", ".join(FRAMEWORKS)
                raise TypeError(f"of which framework are its arrays? say --framework ({known})")
            said["framework"] = wanted
            self.framework = held.get(wanted) or FRAMEWORKS[wanted]()
        except BaseException as error:
            self._send({"raised": _told(error, self.file)})
            return
        self.allowed_threads = set(threading.enumerate())
        self._send({"declared": said})

    def _watch_threads(self):
        """Wrap the functions that start threads, so that `_profile` profiles every new thread."""

        def watched(start):
            def begin(function, *more, **named):
                def run(*args, **options):
                    sys.setprofile(self._profile)
                    sys.settrace(self._trace if self.traced else None)
                    return function(*args, **options)

                return start(run, *more, **named)

            return begin

        starts = ("start_new_thread", "start_new", "start_joinable_thread")
        for name in (*starts, *(f"_{name}" for name in starts)):
            for module in (_thread, threading):
                if hasattr(module, name):
                    setattr(module, name, watched(getattr(module, name)))

    def _spare_compiler(self):
        """Observe nothing while torch's compiler translates a function, once it is imported.

        What it translates is observed when it runs. The compiler enters millions of functions, so
        a candidate that it compiles would get no answer in time.
        """
        module = sys.modules.get("torch._dynamo.convert_frame")
        translate = getattr(module, "_compile", None)
        if translate is None or self.spared is translate:
            return

        def unobserved(*args, **options):
            sys.setprofile(None)
            sys.settrace(None)
            try:
                return translate(*args, **options)
            finally:
                if self.observed:
                    sys.settrace(self._trace if self.traced else None)
                    sys.setprofile(self._profile)

        module._compile = self.spared = unobserved

    def _heard(self, event, args):
        if self.hearing:
            return
        # Looking at the caller's frame, or at a symbol, raises such an event too.
        self.hearing = True
        try:
            if event in SUSPICIOUS:
                if sys._getframe(1).f_code.co_filename == self.file:
                    self.blame("tampering", SUSPICIOUS[event])
            elif event == "open" and isinstance(args[0], str) and args[0].endswith((".py", ".pyc")):
                self._opened(args[0])
            elif event in ("ctypes.dlsym", "ctypes.dlsym/handle"):
                self._resolved(*args)
        finally:
            self.hearing = False

    def _opened(self, file):
        """Note a file with Python code; a compiled one is noted as its source."""
        if file.endswith(".pyc"):
            folder, name = os.path.split(os.path.dirname(file)), os.path.basename(file)
            file = os.path.join(folder[0], name.partition(".")[0] + ".py")
        self.read.add(os.path.realpath(file) if os.path.islink(file) else file)

    def _resolved(self, library, name):
        """Record a call of a symbol that is a library's attention; it is to be called by ctypes."""
        if not isinstance(name, str):
            return
        if name in RESOLVES:
            self.calls.add(f"ctypes.{name}")
        elif READY.search(name):
            file = _file_of_symbol(getattr(library, "_handle", library), name)
            module = self._library(os.path.realpath(file)) if file else ""
            if module:
                self.calls.add(f"{module}.{name}")

    def _send(self, head, arrays=()):
        self._look_around()
        more = {"id": self.id, "violations": self.violations, "calls": sorted(self.calls)[:20]}
        send(self.channel, more | head, arrays)

    def _ask(self, head, body):
        self.id = head["id"]
        framework, natives, values = self.framework, {}, {}
        kept, self.slots = self.slots, {}
        try:
            at = 0
            for one in head["arrays"]:
                kind = np.dtype(one["kind"])
                size = int(np.prod(one["shape"], dtype=np.int64)) * kind.itemsize
                array = np.frombuffer(body[at : at + size], kind).reshape(one["shape"])
                at += size
                native = framework.native(array, one["dtype"])
                if one["slot"] in kept and framework.name != "jax":
                    framework.overwrite(kept[one["slot"]], native)
                    native = kept[one["slot"]]
                elif one["around"] is not None:
                    native = surrounded(framework, native, float(one["around"]))
                elif one["strides"]:
                    native = strided(framework, native, one["strides"])
                self.slots[one["slot"]] = native
                natives[one["name"]], values[one["name"]] = native, framework.values(native).copy()
            gc.disable()
            framework.poison(max(1, int(np.prod(natives["query"].shape))))
            results, gradients = self._called(head, natives)
            arrays, listed = [], []
            given = list(natives.values())
            for name, native in {**results, **gradients}.items():
                array, dtype = framework.plain(native)
                # With one visible key, a result may equal a row of the values, but not share it.
                if name in results and framework.shares(native, given):
                    raise Violation("aliasing: returned the memory of an input")
                listed.append({"name": name, "shape": array.shape, "dtype": dtype})
                arrays.append(array.tobytes())
            for name, native in natives.items():
                if not np.array_equal(framework.values(native), values[name], equal_nan=True):
                    raise Violation(f"writing: the input {name} was written to")
            self._look_for_threads()
        except Violation as error:
            kind, _, text = str(error).partition(": ")
            self.blame(kind, text)
            self._send({"raised": {"kind": "Violation", "text": text, "place": ""}})
        except BaseException as error:
            self._send({"raised": _told(error, self.file)})
        else:
            self._send({"arrays": listed}, arrays)
        finally:
            gc.enable()

    def _called(self, head, natives):
        """Call the candidate; return a dictionary of its results and one of its gradients.

        The keys are "output" and "weights" for results, and "gradient.query" etc. for gradients.
        """
        inputs = ("query", "key", "value")
        wanted = head["wanted"]
        variables = {n: a for n, a in natives.items() if not n.startswith("cotangent")}

        def function():
            masks = {n: a for n, a in variables.items() if n not in inputs}
            three = [variables[n] for n in inputs]
            self.path, self.traced = set() if head["path"] else None, head["traced"]
            self._spare_compiler()
            self.observed = True
            sys.setprofile(self._profile)
            sys.settrace(self._trace if self.traced else None)
            try:
                result = self.function(*three, **masks, **head["options"])
            finally:
                sys.settrace(None)
                sys.setprofile(None)
                self.observed = False
                path, self.path = self.path, None
            if path is not None:
                self._compare_paths(head["path"], path)
            if type(result) is list:
                raise Violation("type: returned builtins.list")
            if type(result) is not tuple:
                result = (result,)
            if len(result) > 2 or not result:
                raise TypeError(f"returned a tuple of {len(result)}; return (output, weights)")
            return result

        cotangents = [natives.get("cotangent"), natives.get("cotangent.weights")]

        def call():
            return self.framework.call(function, variables, wanted, cotangents, head["backwards"])

        if head["profile"]:
            every = head["profile"] == "threads"
            profile = self.framework.profile_threads if every else self.framework.profile
            (results, gradients), seen = profile(call)
            self.calls |= {name for name in seen if READY.search(name)}
        else:
            results, gradients = call()
        named = {n: r for n, r in zip(("output", "weights"), results) if r is not None}
        return named, {f"gradient.{name}": array for name, array in gradients.items()}

    def _trace(self, frame, event, argument):
        """Record which instructions of the candidate's own code are executed."""
        code = frame.f_code
        if code.co_filename == __file__ or self._library(code.co_filename):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True

        def step(frame, event, argument):
            if self.path is not None:
                self.path.add((code.co_name, code.co_firstlineno, frame.f_lasti))
            return step

        return step

    def _compare_paths(self, kind, path):
        """Blame a candidate that skips, for inputs that it had before, what it does for new ones.

        `kind` is "new" or "seen". What a call does for its shape or its number only is not blamed:
        the controller mixes both kinds. A path is the instructions of the candidate's own code, or
        the functions entered: a candidate can find out that its instructions are traced.
        """
        paths = self.paths[self.traced]
        paths.append((kind, path))
        new, seen = ([path for one, path in paths if one == k] for k in ("new", "seen"))
        if len(new) == len(seen) == PAIRS and set.intersection(*new) - set.union(*seen):
            self.blame("memory", "does less when the same numbers come again")

    def _profile(self, frame, event, argument):
        if event == "c_call":
            name = getattr(argument, "__name__", "")
            if self.path is not None:
                self.path.add(name)
            if READY.search(name):
                module = getattr(argument, "__module__", None) or "torch"
                file = getattr(sys.modules.get(module), "__file__", None)
                own = OWN_OPERATORS.match(module) or (file and not self._library(file))
                if not own:
                    self.calls.add(f"{module}.{name}")
        elif event == "call" and frame.f_code.co_flags & 1:  # A function, not a module's body.
            code = frame.f_code
            if self.path is not None:
                self.path.add((code.co_filename, code.co_name, code.co_firstlineno))
            # This is asked at every call: comparing code is slow, so its identity must do.
            if id(code) not in self.entered:
                self.entered[id(code)] = code, self._attention(code)
            name = self.entered[id(code)][1]
            if name == CALLS_OPERATOR:
                operator = _called_operator(frame.f_locals.get("self"))
                name = f"torch.ops.{operator}" if READY.search(operator) else ""
            if name:
                self.calls.add(name)

    def _attention(self, code):
        """Return the name of the attention of a library whose code this is; "" if it is none."""
        module = self._library(code.co_filename)
        if not module:
            copied = self._copied(code)
            return f"a copy of {copied}" if copied else ""
        name = f"{module}.{code.co_qualname}"
        if code.co_name == "__call__" and module == "torch._ops":
            return CALLS_OPERATOR
        return name if self._is_ready(module, code.co_qualname) else ""

    def _is_ready(self, module, qualified):
        """Return whether a function of a library computes attention; both names are its own."""
        if (module, qualified.rpartition(".")[2]) in READY_METHODS or READY_MODULES.match(module):
            return True
        if NO_CALCULATION.search(qualified) or not READY.search(qualified):
            return False
        return not COMPILERS.match(module)

    def _copied(self, code):
        """Return the attention of a library of which a function of a candidate is a copy.

        The result is its qualified name, or "". The functions of all libraries are known that have
        been imported, or whose files have been read.
        """
        if len(code.co_names) < FEW_NAMES or code.co_filename == __file__:
            return ""
        state = len(sys.modules), len(self.read)
        if state != self.state:
            self.state = state
            self._index()
        own = set(code.co_names)
        for (names, variables), name in self.known.items():
            if (names, variables) == (code.co_names, code.co_varnames):
                return name
            many = min(len(own), len(names)) >= MANY_NAMES
            if many and len(own.intersection(names)) >= ALIKE * len(own.union(names)):
                return name
        return ""

    def _index(self):
        """Add to `known` the attentions in files of libraries that were imported or read."""
        loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
        files = {file for file in loaded if isinstance(file, str)} | self.read
        for file in files - self.indexed:
            self.indexed.add(file)
            module = self._library(file) if file.endswith(".py") else ""
            for code in _functions_in(file) if module else ():
                if READY.search(code.co_qualname) and self._is_ready(module, code.co_qualname):
                    name = f"{module}.{code.co_qualname}"
                    self.known[code.co_names, code.co_varnames] = name

    def _library(self, file):
        """Return the module that a file of a library defines; "" for other files.

        The file, unlike the names of functions and modules, is not the candidate's choice.
        """
        if file not in self.libraries:
            place = next((place for place in self.places if file.startswith(place)), "")
            path = file[len(place) :] if place and file != self.file else ""
            self.libraries[file] = re.sub(r"(/__init__)?\.\w+$", "", path).replace("/", ".")
        return self.libraries[file]

    def _look_around(self):
        """Record a violation if the candidate has replaced functions of libraries or of Python."""
        for module, before in self.bases.values():
            now = vars(module)
            for name, value in before.items():
                held = now.get(name, value)
                # torch.compile wraps functions of torch for itself.
                wrapped = getattr(held, "__wrapped__", None)
                if held is value or wrapped is value or name.startswith("__"):
                    continue
                if not isinstance(value, (bool, int, float, str, dict, list, tuple)):
                    where = getattr(module, "__name__", "?")
                    self.blame("tampering", f"replaced {where}.{name}")

    def _look_for_threads(self):
        for thread in set(threading.enumerate()) - self.allowed_threads:
            # A library may watch something, such as how far its compiler has come.
            file = getattr(getattr(type(thread).run, "__code__", None), "co_filename", "")
            if thread.is_alive() and not (file != threading.__file__ and self._library(file)):
                self.blame("left running", f"the thread {thread.name[:40]} runs after the answer")


def keep_plain_operations():
    """Keep torch's compiler from replacing what a candidate has written by a ready attention."""
    stub = types.ModuleType(REPLACES)
    stub._sfdp_init = lambda *_, **__: None
    sys.modules[REPLACES] = stub


def _functions_in(file):
    """Yield the code of the functions in a file of Python, if it mentions any attention."""
    try:
        try:
            with open(importlib.util.cache_from_source(file), "rb") as stream:
                data = stream.read()
            load = functools.partial(marshal.loads, data[16:])
        except OSError:
            with open(file, "rb") as stream:
                data = stream.read()
            load = functools.partial(compile, data, file, "exec")
        text = data.lower()
        waiting = [load()] if any(word in text for word in WORDS) else []
    except (OSError, SyntaxError, ValueError, EOFError):
        return
    while waiting:
        code = waiting.pop()
        waiting += [one for one in code.co_consts if isinstance(one, types.CodeType)]
        if code.co_flags & 1 and len(code.co_names) >= FEW_NAMES:
            yield code


class Symbol(ctypes.Structure):
    """What the loader of programs knows of an address: first, the file it lies in."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _file_of_symbol(handle, name):
    """Return the file of the library in which a symbol is defined; "" if there is none."""
    loader = ctypes.CDLL(None)
    loader.dlsym.restype = ctypes.c_void_p
    loader.dlsym.argtypes = ctypes.c_void_p, ctypes.c_char_p
    loader.dladdr.argtypes = ctypes.c_void_p, ctypes.c_void_p
    found, place = Symbol(), loader.dlsym(handle, name.encode())
    if not place or not loader.dladdr(place, ctypes.byref(found)):
        return ""
    return os.fsdecode(found.file or b"")


def _called_operator(operator):
    """Return the name of an operator of torch; "" if it is not torch's own."""
    library, *names = str(operator).split(".")
    if not names:
        return library if type(operator).__module__.startswith("torch.") else ""
    return names[0] if f"{library}::" == LIBRARY_OPERATORS else ""


def strided(framework, native, how):
    """Return the numbers of `native` as a view of a larger array.

    If `how` is "gaps", each number is stored twice in a row; if it is "transposed", the last two
    axes are swapped in memory. Otherwise, the view is a slice along the axes between the first and
    the last (along all if there are fewer than three), surrounded by NaN, True or 1.
    `Framework.strided` does the same.
    """
    sizes = tuple(native.shape)
    dtype = str(native.dtype)
    filler = True if "bool" in dtype else 1 if "int" in dtype else float("nan")
    if how == "transposed":
        if len(sizes) < 2:
            return native
        around = framework.filled((*sizes[:-2], sizes[-1], sizes[-2]), native, filler)
        around[...] = native.swapaxes(-1, -2)
        return around.swapaxes(-1, -2)
    if how == "gaps":
        around = framework.filled((*sizes, 2), native, filler)
        around[..., 0] = around[..., 1] = native
        return around[..., 0]
    between = range(1, len(sizes) - 1) or range(len(sizes))
    larger, window = list(sizes), [slice(None)] * len(sizes)
    for axis in between:
        larger[axis] += 3
        window[axis] = slice(1, 1 + sizes[axis])
    around = framework.filled(tuple(larger), native, filler)
    window = tuple(window)
    around[window] = native
    return around[window]


def surrounded(framework, native, by):
    """Return the numbers of `native` as a contiguous view of an array with padding around it.

    There are 4096 copies of `by` on either side, or of `bool(by)` if the dtype is not
    floating-point.
    """
    if "float" not in str(native.dtype):
        by = bool(by)
    count = int(np.prod(native.shape))
    around = framework.filled((count + 8192,), native, by)
    around[4096:-4096] = native.reshape(-1)
    return around[4096:-4096].reshape(tuple(native.shape))


def _told(error, file):
    trace, place = error.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            place = f"line {trace.tb_lineno}"
        trace = trace.tb_next
    try:
        # Half of a surrogate pair cannot be sent.
        text = str(error)[:300].encode("utf-8", "backslashreplace").decode()
    except BaseException:
        text = ""
    kind = "Unsupported" if isinstance(error, UnsupportedProblem) else type(error).__name__[:80]
    return {"kind": kind, "text": text, "place": place}


# What a child gives up before it imports a candidate

DENIED = {
    "x86_64": (
        0xC000003E,
        (9, 302, 203, 56, 435),
        # fork vfork execve execveat socket ptrace unshare setns mount umount2 pivot_root chroot
        (57, 58, 59, 322, 41, 101, 272, 308, 165, 166, 155, 161)
        # bpf userfaultfd perf_event_open keyctl add_key request_key io_uring_setup
        + (321, 323, 298, 250, 248, 249, 425)
        # process_vm_readv process_vm_writev pidfd_getfd init_module finit_module kexec_load
        + (310, 311, 438, 175, 313, 246)
        # Memory that outlives a process: shm*, sem*, msg*, mq_open.
        + (29, 30, 31, 67, 64, 65, 66, 220, 68, 69, 70, 71, 240)
        # setpriority sched_setparam sched_setscheduler sched_setattr ioprio_set process_madvise
        + (141, 142, 144, 314, 251, 440),
        # memfd_create memfd_secret
        (319, 447),
    ),
    "aarch64": (
        0xC00000B7,
        (222, 261, 122, 220, 435),
        (221, 281, 198, 117, 97, 268, 40, 39, 41, 51)
        + (280, 282, 241, 219, 217, 218, 425)
        + (270, 271, 438, 105, 273, 104)
        + (194, 196, 195, 197, 190, 193, 191, 192, 186, 189, 188, 187, 180)
        + (140, 118, 119, 274, 30, 440),
        (279, 447),
    ),
}
"""For each architecture, its audit number and three groups of numbers of system calls.

The first group is mmap, prlimit64, sched_setaffinity, clone and clone3, for which there are special
rules. The second is refused, except that calls that start processes or programs are not refused if
processes are allowed. The third is refused only if processes are not allowed.
"""


def refuse_system_calls(processes):
    """Install a filter of system calls that denies sockets, new programs, new processes and more.

    If `processes` is true, the candidate may start processes and programs: a kernel may have to
    call a compiler. `DENIED` lists the calls.

    Raises:
        OSError: there is no list for this architecture, or the filter cannot be installed.
    """
    machine = platform.machine()
    if machine not in DENIED:
        raise OSError(f"no table of system calls for {machine}")
    arch, (mmap, prlimit, affinity, clone, clone3), denied, alone = DENIED[machine]
    if processes:
        allowed = (57, 58, 59, 322) if machine == "x86_64" else (221, 281)
        denied = tuple(number for number in denied if number not in allowed)
    load, equal, any_bit, ret = 0x20, 0x15, 0x45, 0x06
    errno, allow = 0x00050000, 0x7FFF0000
    lines = [(load, 0, 0, 4), (equal, 1, 0, arch), (ret, 0, 0, errno | 1), (load, 0, 0, 0)]
    # The second set of numbers of x86_64.
    lines += [(0x35, 0, 1, 0x40000000), (ret, 0, 0, errno | 38)]
    lines += [line for n in denied for line in ((equal, 0, 1, n), (ret, 0, 0, errno | 1))]
    # Refuse to set limits or CPU affinity of another process, which would outlive this one.
    lines += [(equal, 1, 0, prlimit), (equal, 0, 4, affinity)]
    lines += [(load, 0, 0, 16), (equal, 0, 1, 0), (ret, 0, 0, allow), (ret, 0, 0, errno | 1)]
    if not processes:
        lines += [line for n in alone for line in ((equal, 0, 1, n), (ret, 0, 0, errno | 1))]
        # The limit on memory does not count mappings with MAP_SHARED or MAP_GROWSDOWN.
        lines += [(equal, 0, 4, mmap), (load, 0, 0, 40), (any_bit, 0, 1, 0x101)]
        lines += [(ret, 0, 0, errno | 12), (ret, 0, 0, allow)]
        lines += [(equal, 0, 1, clone3), (ret, 0, 0, errno | 38)]
        # Threads are clones that share everything.
        lines += [(equal, 0, 4, clone), (load, 0, 0, 16), (any_bit, 1, 0, 0x10000)]
        lines += [(ret, 0, 0, errno | 1), (ret, 0, 0, allow)]
    lines += [(ret, 0, 0, allow)]
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(buffer))
    held = ctypes.create_string_buffer(program, len(program))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(22, 2, held, 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp")


def give_up_capabilities():
    """Give up the capabilities of root, with which one may write into any process.

    Without them, the processes of this user that have any can be neither traced nor written to.

    Raises:
        OSError: the system refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        libc.prctl(24, capability, 0, 0, 0)
    libc.prctl(47, 4, 0, 0, 0)
    head, none = struct.pack("<Ii", 0x20080522, 0), bytes(24)
    if libc.capset(head, none):
        raise OSError(ctypes.get_errno(), "capset")


def limit(limits):
    """Set the resource limits of this process; memory that is already in use is not counted."""
    status = open("/proc/self/status").read() if os.path.exists("/proc/self/status") else ""
    found = re.search(r"VmData:\s+(\d+)", status)
    used = int(found[1]) * 1024 if found else 0
    for name, value in (
        ("RLIMIT_DATA", used + limits["memory"] * 2**20),
        ("RLIMIT_FSIZE", limits["file"] * 2**20),
        # The controller's clock ends a candidate earlier than this, with a message.
        ("RLIMIT_CPU", 2 * limits["seconds"] + 60),
        ("RLIMIT_NOFILE", 256),
        ("RLIMIT_CORE", 0),
        # This counts all processes and threads of the user; for 0 processes, the filter suffices.
        *([("RLIMIT_NPROC", limits["processes"])] if limits["processes"] else []),
    ):
        if hasattr(resource, name):
            number = getattr(resource, name)
            hard = resource.getrlimit(number)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(number, (value, value))


def be_a_child(channel, head):
    """Close other files, set the limits in `head`, filter system calls, and serve one candidate."""
    os.environ.clear()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    sys.stdin = open(0, closefd=False)
    sys.stdout = sys.stderr = open(1, "w", errors="replace", closefd=False)
    os.closerange(3, channel.fileno())
    os.closerange(channel.fileno() + 1, 1024)
    # The system tells the controller which process this message comes from.
    channel.sendall(b"r")
    limit(head["limits"])
    give_up_capabilities()
    refuse_system_calls(head["limits"]["processes"] > 0)
    CandidateHost(channel).serve()


def main():
    """Fork a child for each candidate, and clean up after it."""
    control = socket.socket(fileno=int(sys.argv[1]))
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        # Not even another process of the same user may inspect this one.
        libc.prctl(4, 0, 0, 0, 0)
    os.chdir("/tmp" if sys.argv[2] == "alone" else os.getcwd())
    loaded = []
    for name in sys.argv[3:]:
        try:
            __import__(name)
            loaded.append(name)
        except ImportError:
            pass
    control.sendall(b"r")
    child = 0
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 2**16, 1)
        if not data:
            break
        head = json.loads(data)
        if head["do"] == "fork":
            child = os.fork()
            if child == 0:
                control.close()
                try:
                    os.setsid()
                    be_a_child(socket.socket(fileno=descriptors[0]), head)
                except BaseException as error:
                    send(socket.socket(fileno=descriptors[0]), {"refused": repr(error)[:300]})
                finally:
                    os._exit(0)
            os.close(descriptors[0])
            control.sendall(struct.pack("<i", child))
        else:
            status = _buried(child)
            if sys.argv[2] == "alone":
                _cleaned("/tmp")
            control.sendall(struct.pack("<i", status))
            child = 0
    if child:
        _buried(child)


def _buried(child):
    """Kill the candidate's process `child` and all that it started; return its wait status.

    The status is 0 if the process cannot be waited for.

    Under bubblewrap, every other process is killed; otherwise, only the candidate's process group.
    """
    if sys.argv[2] == "alone":
        try:
            os.kill(-1, signal.SIGKILL)
        except OSError:
            pass
    else:
        for send_to in (os.killpg, os.kill):
            try:
                send_to(child, signal.SIGKILL)
            except OSError:
                pass
    try:
        return os.waitpid(child, 0)[1]
    except OSError:
        return 0


def _cleaned(folder):
    for entry in os.scandir(folder):
        try:
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except OSError:
            pass


if __name__ == "__main__":
    main()
