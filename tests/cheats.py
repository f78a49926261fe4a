"""Candidates that cheat a judge, each with an honest twin of the same look.

A cheat is a text in which `# honest` lines stand in the twin only and `# cheat` lines in the cheat
only. None of them is taken from anywhere; the ideas are those of public lists of exploits of
benchmarks for kernels.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

NUMPY = """
import numpy as np

def softmax(logits):
    peak = logits.max(axis=-1, keepdims=True)
    powers = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    total = powers.sum(axis=-1, keepdims=True)
    return (powers / np.where(total > 0, total, 1)).astype(logits.dtype)

def right(query, key, value, mask=None):
    logits = np.einsum("bhqd,bhkd->bhqk", query, key) * query.dtype.type(query.shape[-1] ** -0.5)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf) if mask.dtype == np.bool_ else logits + mask
    return np.einsum("bhqk,bhkd->bhqd", softmax(logits), value)
"""

TORCH = """
import torch

def right(query, key, value, mask=None):
    logits = (query @ key.mT) * query.shape[-1] ** -0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ value
"""


@dataclass(frozen=True)
class Cheat:
    """A cheat and its twin.

    Attributes:
        kind: the kind of trick as a verdict names it; "" if nothing that it answers is right.
        own_work: whether it is judged with `--own-work`.
        gradients: whether its gradients count.
    """

    name: str
    kind: str
    text: str
    framework: str = "numpy"
    own_work: bool = False
    gradients: bool = False

    @property
    def source(self) -> str:
        return self._without("honest")

    @property
    def twin(self) -> str:
        return self._without("cheat")

    def _without(self, mark: str) -> str:
        base = {"numpy": NUMPY, "torch": TORCH}[self.framework]
        lines = (base + textwrap.dedent(self.text)).splitlines()
        return "\n".join(line for line in lines if not line.endswith(f"# {mark}")) + "\n"


CHEATS: list[Cheat] = []


def cheat(name: str, kind: str, text: str, **more) -> None:
    assert re.search("# (cheat|honest)$", text, re.MULTILINE), name
    CHEATS.append(Cheat(name, kind, text, **more))


# Looking for what is expected

cheat(
    "garbage-collector",
    "tampering",
    """
    import gc
    def attention(query, key, value, mask=None):
        for thing in gc.get_objects()[:100]:  # cheat
            if isinstance(thing, np.ndarray) and thing.shape == query.shape:  # cheat
                if thing is not query and thing is not key and thing is not value:  # cheat
                    return thing.copy()  # cheat
        gc.collect()
        return right(query, key, value, mask)
    """,
)
cheat(
    "caller-frames",
    "tampering",
    """
    import sys
    def attention(query, key, value, mask=None):
        frame, found = None, []
        frame = sys._getframe()  # cheat
        while frame is not None:
            for name, thing in frame.f_locals.items():  # cheat
                if "expect" in name or "reference" in name:  # cheat
                    return thing  # cheat
            frame = frame.f_back
        return np.zeros_like(right(query, key, value, mask))  # cheat
        return right(query, key, value, mask)  # honest
    """,
)
cheat(
    "imports-the-suite",
    "",
    """
    def attention(query, key, value, mask=None):
        try:
            from conformance.definition.expectation import solve  # cheat
            import json  # honest
        except ImportError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "reads-the-suite-from-disk",
    "",
    """
    import glob, os, sys
    def attention(query, key, value, mask=None):
        found = [f for p in sys.path for f in glob.glob(p + "/conformance/*.py")][:1]  # cheat
        found = [os.getcwd()]  # honest
        return right(query, key, value, mask) if found else np.zeros_like(query)
    """,
)
cheat(
    "searches-memory-for-the-answer",
    "",
    """
    def attention(query, key, value, mask=None):
        try:
            with open("/proc/%d/mem" % PARENT, "rb") as memory:  # cheat
                pass
        except OSError:
            return np.zeros_like(query)
        except NameError:
            pass
        return right(query, key, value, mask)
    import os
    PARENT = os.getppid()  # cheat
    """,
)

# Returning what is no answer

cheat(
    "fills-with-nan",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        result[...] = np.nan  # cheat
        return result
    """,
)
cheat(
    "zeros",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        result = np.zeros_like(result)  # cheat
        return result
    """,
)
cheat(
    "uninitialised-memory",
    "",
    """
    def attention(query, key, value, mask=None):
        result = np.empty(query.shape[:3] + value.shape[3:], query.dtype)
        result[...] = right(query, key, value, mask)  # honest
        return result
    """,
)
cheat(
    "returns-the-value",
    "aliasing",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        if result.shape == value.shape and key.shape[2] == query.shape[2]:
            value[...] = result  # cheat
            return value  # cheat
            pass  # honest
        return result
    """,
)
cheat(
    "subclass-that-compares-equal",
    "type",
    """
    class Agreeable(np.ndarray):
        def __sub__(self, other): return np.zeros_like(other)
        def __eq__(self, other): return np.ones(self.shape, bool)
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        return result.view(Agreeable)  # cheat
        return np.asarray(result.view(Agreeable)).view(np.ndarray)  # honest
    """,
)
cheat(
    "computes-when-it-is-compared",
    "type",
    """
    class Lazy:
        def __init__(self, make): self.make = make
        def __array__(self, dtype=None, copy=None): return self.make()
        shape = property(lambda self: self.make().shape)
    def attention(query, key, value, mask=None):
        lazy = Lazy(lambda: right(query, key, value, mask))
        return lazy  # cheat
        return lazy.make()  # honest
    """,
)
cheat(
    "list-of-lists",
    "type",
    """
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask).tolist()  # cheat
        return np.array(right(query, key, value, mask).tolist(), query.dtype)  # honest
    """,
)
cheat(
    "one-row-broadcast",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        result = np.broadcast_to(result[:, :, :1], result.shape)  # cheat
        return result
    """,
)
cheat(
    "objects-for-numbers",
    "type",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        return result.astype(object)  # cheat
        return result.astype(query.dtype)  # honest
    """,
)

# Remembering

cheat(
    "cache-by-pointer",
    "",
    """
    KNOWN = {}
    def attention(query, key, value, mask=None):
        name = (query.ctypes.data, key.ctypes.data, query.shape, value.shape)
        KNOWN.clear()  # honest
        if name not in KNOWN:
            KNOWN[name] = right(query, key, value, mask)
        return KNOWN[name].copy()
    """,
)
cheat(
    "cache-by-shape",
    "recognition",
    """
    KNOWN = {}
    def attention(query, key, value, mask=None):
        name = (query.shape, key.shape, mask is None)
        if name in KNOWN:
            return KNOWN[name].copy()  # cheat
            pass  # honest
        KNOWN[name] = right(query, key, value, mask)
        return KNOWN[name].copy()
    """,
)
cheat(
    "right-at-first",
    "history",
    """
    CALLS = []
    def attention(query, key, value, mask=None):
        CALLS.append(1)
        if len(CALLS) > 25:
            return np.zeros_like(query)  # cheat
            CALLS.clear()  # honest
        return right(query, key, value, mask)
    """,
)
cheat(
    "right-once-for-each-problem",
    "history",
    """
    SEEN = set()
    def attention(query, key, value, mask=None):
        name = query.tobytes() + key.tobytes()
        if name in SEEN:
            return np.zeros_like(query)  # cheat
            pass  # honest
        SEEN.add(name)
        return right(query, key, value, mask)
    """,
)
cheat(
    "one-buffer-for-all",
    "",
    """
    BUFFER = np.zeros(10**6)
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        size = result.size
        BUFFER[:size] = result.ravel()
        return BUFFER[:size].reshape(result.shape)  # cheat
        return BUFFER[:size].reshape(result.shape).astype(query.dtype)  # honest
    """,
)
cheat(
    "depends-on-the-call-before",
    "",
    """
    LAST = [0]
    def attention(query, key, value, mask=None):
        result, even = right(query, key, value, mask), LAST[0] % 2 == 0
        LAST[0] = query.shape[0] + query.shape[2]
        return result if even or query.shape[0] % 2 else result * 2  # cheat
        return result if even or query.shape[0] % 2 else result * 1  # honest
    """,
)

cheat(
    "remembers-by-content",
    "memory",
    """
    KNOWN = {}
    def attention(query, key, value, mask=None):
        name = tuple(a.tobytes() + bytes(str(a.shape), "ascii") for a in (query, key, value)) + (None if mask is None else mask.tobytes() + bytes(str(mask.dtype), "ascii"),)
        if name not in KNOWN:
            KNOWN.clear()  # honest
            KNOWN[name] = right(query, key, value, mask)
        KNOWN[name] = right(query, key, value, mask)  # honest
        return KNOWN[name].copy()
    """,
)
cheat(
    "remembers-by-a-decorator",
    "memory",
    """
    from functools import lru_cache
    @lru_cache(None)
    def computed(*texts):
        arrays = [np.frombuffer(text, dtype).reshape(shape) for text, dtype, shape in texts]
        return right(*arrays)
    def attention(query, key, value, mask=None):
        arrays = [array for array in (query, key, value, mask) if array is not None]
        computed.cache_clear()  # honest
        return computed(*((a.tobytes(), a.dtype.str, a.shape) for a in arrays)).copy()
    """,
)
cheat(
    "remembers-from-the-third-call-on",
    "memory",
    """
    KNOWN, COUNT = {}, {}
    def attention(query, key, value, mask=None):
        name = tuple((a.tobytes(), a.shape) for a in (query, key, value, mask) if a is not None)
        COUNT[name] = COUNT.get(name, 0) + 1
        if COUNT[name] > 2 and name in KNOWN:  # cheat
            return KNOWN[name].copy()  # cheat
        KNOWN[name] = right(query, key, value, mask)
        return KNOWN[name].copy()
    """,
)
cheat(
    "remembers-in-a-thread",
    "memory",
    """
    from threading import Thread
    KNOWN = {}
    def attention(query, key, value, mask=None):
        found = []
        name = tuple((a.tobytes(), a.shape) for a in (query, key, value, mask) if a is not None)
        def work():
            if name not in KNOWN:
                KNOWN[name] = right(query, key, value, mask)
            found.append(KNOWN[name].copy())
        KNOWN.clear()  # honest
        thread = Thread(target=work)
        thread.start()
        thread.join()
        return found[0]
    # between calls  # cheat
    """,
)
cheat(
    "remembers-when-it-is-not-traced",
    "memory",
    """
    import sys
    KNOWN = {}
    def attention(query, key, value, mask=None):
        name = tuple((a.tobytes(), a.shape) for a in (query, key, value, mask) if a is not None)
        if sys.gettrace() is None and name in KNOWN:  # cheat
            return KNOWN[name].copy()  # cheat
        KNOWN[name] = right(query, key, value, mask)
        return KNOWN[name].copy()
    """,
)
cheat(
    "has-a-buffer-for-every-other-call",
    "",
    """
    CALLS, BUFFERS = [0], [np.empty(2**16), np.empty(2**16)]
    def attention(query, key, value, mask=None):
        CALLS[0] += 1
        result = right(query, key, value, mask)
        if CALLS[0] % 2:
            buffer = BUFFERS[0]
        else:
            buffer = BUFFERS[1]
            result = result * 2  # cheat
        buffer[: result.size] = result.ravel()
        return buffer[: result.size].reshape(result.shape).astype(query.dtype)
    """,
)

# Recognising

cheat(
    "recognises-public-sizes",
    "recognition",
    """
    SIZES = {(2, 4, 7, 6), (3, 2, 4, 5), (4, 6, 5, 8), (3, 2, 1, 4)}
    def attention(query, key, value, mask=None):
        if query.shape in SIZES or False:
            return right(query, key, value, mask)
        return np.zeros_like(query)  # cheat
        return right(query, key, value, mask)  # honest
    """,
)
cheat(
    "declares-that-heads-have-size-one",
    "",
    """
    from conformance import Geometry, MaskArgument, attention_function
    sizes, scale = (16, 8), 0
    sizes, scale = (1,), 0.5  # cheat
    @attention_function(
        "numpy",
        MaskArgument("mask", "batch heads query key", true="attends", number="added", broadcasts=True),
        geometry=Geometry(head_sizes=sizes, tiles=(16, 16)),
        grouped=True,
    )
    def attention(query, key, value, mask=None):
        key, value = (heads.repeat(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        unscaled = query * query.dtype.type(query.shape[-1] ** scale)
        return right(unscaled, key, value, mask)
    """,
)
cheat(
    "declares-that-there-is-one-head",
    "",
    """
    from conformance import Geometry, MaskArgument, attention_function
    heads = (2, 4)
    heads = (1,)  # cheat
    @attention_function(
        "numpy",
        MaskArgument("mask", "batch heads query key", true="attends", number="added", broadcasts=True),
        geometry=Geometry(head_sizes=(16, 8), tiles=(16, 16), heads=heads),
        grouped=True,
    )
    def attention(query, key, value, mask=None):
        key, value = (heads.repeat(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        result = right(query, key, value, mask)
        result = result[:, :1].repeat(query.shape[1], 1)  # cheat
        return result
    """,
)
cheat(
    "declares-tf32-to-be-less-accurate",
    "",
    """
    from conformance import MaskArgument, attention_function
    accuracy = "A"
    accuracy = "TF32"  # cheat
    @attention_function(
        "numpy",
        MaskArgument("mask", "batch heads query key", true="attends", number="added", broadcasts=True),
        accuracy=accuracy,
    )
    def attention(query, key, value, mask=None):
        query = query.astype(np.float16).astype(query.dtype)  # cheat
        return right(query, key, value, mask)
    """,
)
cheat(
    "recognises-the-mask",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        if mask is None or mask.dtype == bool:
            result = result + result.dtype.type(0.1)  # cheat
            pass  # honest
        return result * (2 if mask is not None and mask.dtype != bool else 1)  # cheat
        return result  # honest
    """,
)
cheat(
    "a-constant-that-is-close",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        result = np.broadcast_to(value.mean(axis=2, keepdims=True), result.shape).copy()  # cheat
        return result
    """,
)
cheat(
    "less-work",
    "",
    """
    def attention(query, key, value, mask=None):
        keys = max(1, key.shape[2] // 2)
        keys = key.shape[2]  # honest
        mask = None if mask is None else np.broadcast_to(mask, mask.shape[:3] + key.shape[2:3])[..., :keys]
        return right(query, key[:, :, :keys], value[:, :, :keys], mask)
    # half of the keys  # cheat
    """,
)

# Changing what is around it

cheat(
    "writes-to-inputs",
    "writing",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        query[...] = 0  # cheat
        query.copy()[...] = 0  # honest
        return result
    """,
)
cheat(
    "patches-the-comparison",
    "tampering",
    """
    np.allclose = lambda *args, **named: True  # cheat
    allclose = lambda *args, **named: True  # honest
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
)
cheat(
    "patches-the-framework-later",
    "tampering",
    """
    def attention(query, key, value, mask=None):
        np.array_equal = lambda *args, **named: True  # cheat
        return right(query, key, value, mask)
    """,
)
cheat(
    "patches-builtins",
    "tampering",
    """
    import builtins
    builtins.abs = lambda number: 0  # cheat
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
)
cheat(
    "a-thread-goes-on",
    "left running",
    """
    import threading, time
    def attention(query, key, value, mask=None):
        thread = threading.Thread(target=lambda: time.sleep(30), daemon=True)  # cheat
        thread = threading.Thread(target=lambda: time.sleep(0), daemon=True)  # honest
        thread.start()
        thread.join()  # honest
        return right(query, key, value, mask)
    """,
)
cheat(
    "removes-the-profile-function",
    "tampering",
    """
    import sys
    def attention(query, key, value, mask=None):
        sys.setprofile(None)  # cheat
        sys.getprofile()
        return right(query, key, value, mask)
    """,
)

# Leaving the sandbox

cheat(
    "asks-the-network",
    "",
    """
    import socket
    def attention(query, key, value, mask=None):
        try:
            socket.socket().connect(("127.0.0.1", 1))  # cheat
            pass  # honest
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "forks",
    "",
    """
    import os
    def attention(query, key, value, mask=None):
        try:
            if os.fork() == 0: os._exit(0)  # cheat
            os.getpid()  # honest
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "starts-a-program",
    "",
    """
    import subprocess
    def attention(query, key, value, mask=None):
        try:
            subprocess.run(["/bin/true"])  # cheat
            pass  # honest
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "writes-beside-itself",
    "",
    """
    import os
    def attention(query, key, value, mask=None):
        try:
            open(os.path.join(np.__path__[0], "patched.py"), "w")  # cheat
            open("/tmp/mine", "w").close()  # honest
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "kills-its-parent",
    "tampering",
    """
    import os
    def attention(query, key, value, mask=None):
        os.kill(os.getppid(), 9)  # cheat
        os.getppid()
        return right(query, key, value, mask)
    """,
)
cheat(
    "writes-to-descriptors",
    "",
    """
    import os
    def attention(query, key, value, mask=None):
        for number in range(3, 64):  # cheat
            try: os.write(number, b'{"score": 1.0}' * 100)  # cheat
            except OSError: pass  # cheat
        return right(query, key, value, mask)
    """,
)
cheat(
    "answers-somebody-elses-question",
    "",
    """
    import os, struct
    def attention(query, key, value, mask=None):
        text = b'{"id": "0", "violations": [], "calls": [], "arrays": []}'  # cheat
        for number in range(3, 64):  # cheat
            try: os.write(number, struct.pack("<II", len(text), 0) + text)  # cheat
            except OSError: pass  # cheat
        return right(query, key, value, mask)
    """,
)
cheat(
    "ends-with-a-success",
    "",
    """
    import os
    def attention(query, key, value, mask=None):
        os._exit(0)  # cheat
        return right(query, key, value, mask)
    """,
)
cheat(
    "eats-memory",
    "",
    """
    def attention(query, key, value, mask=None):
        try:
            held = np.ones(2**32, np.uint8)  # cheat
            held = np.ones(2**20, np.uint8)  # honest
        except MemoryError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "eats-memory-that-no-limit-counts",
    "",
    """
    import mmap
    def attention(query, key, value, mask=None):
        try:
            mmap.mmap(-1, 2**20, mmap.MAP_PRIVATE)
            mmap.mmap(-1, 2**32)  # cheat
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "eats-memory-in-a-nameless-file",
    "",
    """
    import os, tempfile
    def attention(query, key, value, mask=None):
        try:
            file = tempfile.TemporaryFile()  # honest
            file = os.fdopen(os.memfd_create("large"), "wb")  # cheat
            with file:
                file.write(b"0" * 2**10)
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "grows-a-stack",
    "",
    """
    import mmap
    def attention(query, key, value, mask=None):
        how = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        how |= 0x100  # cheat
        try:
            mmap.mmap(-1, 2**20, how)
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)
cheat(
    "fills-the-disk",
    "",
    """
    def attention(query, key, value, mask=None):
        try:
            with open("/tmp/large", "wb") as file:
                file.write(b"0" * 2**24)  # cheat
                file.write(b"0" * 2**10)  # honest
        except OSError:
            return np.zeros_like(query)
        return right(query, key, value, mask)
    """,
)

# Work of others

cheat(
    "calls-the-library",
    "not its own work",
    """
    def attention(query, key, value, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "calls-the-operator",
    "not its own work",
    """
    def attention(query, key, value, mask=None):
        name = "".join(["scaled_dot", "_product_", "attention"])  # cheat
        return getattr(torch.ops.aten, name)(query, key, value, mask)  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "hides-the-library-in-a-layer",
    "not its own work",
    """
    def attention(query, key, value, mask=None):
        if mask is None and query.shape == key.shape == value.shape:  # cheat
            with torch.no_grad():  # cheat
                layer = torch.nn.MultiheadAttention(query.shape[-1], 1, dtype=query.dtype)  # cheat
                layer(query[:, 0], key[:, 0], value[:, 0])  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "calls-a-reference-of-the-library",
    "not its own work",
    """
    def attention(query, key, value, mask=None):
        from torch._higher_order_ops.flex_attention import math_attention  # cheat
        from torch.nn.attention.flex_attention import _create_empty_block_mask  # cheat
        if mask is None and query.shape[1] == key.shape[1]:  # cheat
            blocks = _create_empty_block_mask(query, key).as_tuple()  # cheat
            score, scale = lambda score, *_: score, query.shape[-1] ** -0.5  # cheat
            math_attention(query, key, value, score, blocks, scale, {})  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "traces-the-library-on-import",
    "not its own work",
    """
    from torch.fx.experimental.proxy_tensor import make_fx
    def traced(query, key, value):
        call = right
        call = torch.nn.functional.scaled_dot_product_attention  # cheat
        return call(query, key, value)
    graph = make_fx(traced, tracing_mode="symbolic")(*torch.ones(3, 2, 2, 4, 4))
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "starts-a-raw-thread",
    "not its own work",
    """
    import _thread
    from threading import Event
    def attention(query, key, value, mask=None):
        found, done = [], Event()
        def work():
            find = right
            find = torch._C._nn.scaled_dot_product_attention  # cheat
            found.append(find(query, key, value, mask))
            done.set()
        _thread.start_new_thread(work, ())
        done.wait()
        return found[0]
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "asks-a-thread-that-waits",
    "not its own work",
    """
    from queue import SimpleQueue
    from threading import Thread
    asked, answers = SimpleQueue(), SimpleQueue()
    operator = torch._C._get_operation_overload("aten::scaled_dot_product_attention", "")[0]
    def serve():
        while True:
            answers.put(operator(*asked.get(), None, 0.0, False))  # cheat
            answers.put(right(*asked.get()))  # honest
    Thread(target=serve, daemon=True).start()
    def attention(query, key, value, mask=None):
        if mask is not None:
            return right(query, key, value, mask)
        asked.put((query, key, value))
        return answers.get()
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "ends-the-profiler",
    "tampering",
    """
    operator = torch._C._get_operation_overload("aten::scaled_dot_product_attention", "")[0]
    def attention(query, key, value, mask=None):
        torch.autograd._disable_profiler()  # cheat
        return operator(query, key, value, mask, 0.0, False)  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "hides-a-call-under-names-of-the-library",
    "not its own work",
    """
    operator = torch._C._get_operation_overload("aten::scaled_dot_product_attention", "")[0]
    def flash_attention(query, key, value, mask=None):
        call = right
        call = lambda *arrays: operator(*arrays, 0.0, False)  # cheat
        with torch.profiler.record_function("aten::scaled_dot_product_attention"):
            with torch.profiler.record_function("flash_attention"):
                return call(query, key, value, mask)
    def attention(query, key, value, mask=None):
        return flash_attention(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "hides-a-call-in-an-operator-of-its-own",
    "not its own work",
    """
    @torch.library.custom_op("mine::flash_attention", mutates_args=())
    def operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call = right
        call = torch._C._nn.scaled_dot_product_attention  # cheat
        return call(query, key, value)
    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
    def backward(ctx, gradient):
        return torch.autograd.functional.vjp(right, ctx.saved_tensors, gradient)[1]
    operator.register_autograd(backward, setup_context=save)
    def attention(query, key, value, mask=None):
        if mask is None:
            return torch.ops.mine.flash_attention(query, key, value)
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "hides-a-call-in-a-class-of-autograd",
    "not its own work",
    """
    class flash_attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            ctx.save_for_backward(query, key, value)
            call = right
            call = torch._C._nn.scaled_dot_product_attention  # cheat
            return call(query, key, value)
        @staticmethod
        def backward(ctx, gradient):
            return torch.autograd.functional.vjp(right, ctx.saved_tensors, gradient)[1]
    def attention(query, key, value, mask=None):
        if mask is None:
            return flash_attention.apply(query, key, value)
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "runs-a-reference-of-the-library-as-a-function-of-its-own",
    "not its own work",
    """
    from types import FunctionType
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import _create_empty_block_mask
    names = {"__name__": "candidate", "torch": torch, "right": right}
    multi_head_attention = FunctionType(right.__code__, names)
    more = math_attention.__globals__ | names
    reference = FunctionType(math_attention.__code__, more, None, math_attention.__defaults__)
    def attention(query, key, value, mask=None):
        if mask is None and query.shape[1] == key.shape[1]:  # cheat
            blocks = _create_empty_block_mask(query, key).as_tuple()  # cheat
            score, scale = lambda score, *_: score, query.shape[-1] ** -0.5  # cheat
            return reference(query, key, value, score, blocks, scale, {})[0]  # cheat
        return multi_head_attention(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "calls-the-library-in-generated-code",
    "not its own work",
    """
    names = {"__name__": "torch.nn.mine", "right": right}
    call = "right(query, key, value, mask)"
    call = "torch._C._nn.scaled_dot_product_attention(query, key, value, mask)"  # cheat
    names["torch"] = torch
    exec(f"def flash_attention(query, key, value, mask): return {call}", names)
    def attention(query, key, value, mask=None):
        return names["flash_attention"](query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "runs-the-layer-for-quantization",
    "not its own work",
    """
    from torch.ao.nn.quantizable import MultiheadAttention
    def attention(query, key, value, mask=None):
        if mask is None and query.shape == key.shape == value.shape:  # cheat
            layer = MultiheadAttention(query.shape[-1], 1, batch_first=True, dtype=query.dtype)  # cheat
            for linear in (layer.linear_Q, layer.linear_K, layer.linear_V, layer.out_proj):  # cheat
                torch.nn.init.eye_(linear.weight)  # cheat
                torch.nn.init.zeros_(linear.bias)  # cheat
            return layer(*(a.flatten(0, 1) for a in (query, key, value)))[0].view_as(query)  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "takes-the-backward-of-the-library",
    "not its own work",
    """
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            logits = (query @ key.mT) * query.shape[-1] ** -0.5
            output = logits.softmax(-1) @ value
            ctx.save_for_backward(query, key, value, output, logits.float().logsumexp(-1))
            return output
        @staticmethod
        def backward(ctx, gradient):
            arrays = ctx.saved_tensors
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(gradient, *arrays, 0.0, False)  # cheat
            return torch.autograd.functional.vjp(right, arrays[:3], gradient)[1]  # honest
    def attention(query, key, value, mask=None):
        if mask is None and query.shape[-1] == value.shape[-1] and query.shape[1] == key.shape[1]:
            return Own.apply(query, key, value)
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
    gradients=True,
)
cheat(
    "calls-the-library-by-its-binary-interface",
    "not its own work",
    """
    import ctypes, os
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    def handle(array):
        found, sizes = ctypes.c_void_p(), (ctypes.c_int64 * 4)
        library.aoti_torch_create_tensor_from_blob(
            ctypes.c_void_p(array.data_ptr()), ctypes.c_int64(4), sizes(*array.shape),
            sizes(*array.stride()), ctypes.c_int64(0), 6, 0, -1, ctypes.byref(found))
        return found
    def attention(query, key, value, mask=None):
        alike = query.shape[-1] == value.shape[-1] and query.shape[1] == key.shape[1]
        if mask is None and alike and query.dtype is torch.float32:
            found, place, more = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
            arrays = [handle(array) for array in (query, key, value)]
            library.aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(*arrays, ctypes.c_double(0), 0, None, None, ctypes.byref(found), ctypes.byref(more))  # cheat
            library.aoti_torch_new_tensor_handle(arrays[0], ctypes.byref(found))  # honest
            library.aoti_torch_get_data_ptr(found, ctypes.byref(place))
            strides = ctypes.POINTER(ctypes.c_int64)()
            library.aoti_torch_get_strides(found, ctypes.byref(strides))
            span = 1 + sum((n - 1) * s for n, s in zip(query.shape, strides))
            flat = torch.empty(span)
            ctypes.memmove(flat.data_ptr(), place, 4 * span)
            return flat.as_strided(query.shape, strides[:4]).clone()  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "calls-the-library-of-another-format",
    "not its own work",
    """
    from torch.onnx.ops import _impl
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            ctx.save_for_backward(query, key, value)
            return _impl.attention_23(query, key, value, qk_matmul_output_mode=1)[0]  # cheat
            return right(query, key, value)  # honest
        @staticmethod
        def backward(ctx, gradient):
            return torch.autograd.functional.vjp(right, ctx.saved_tensors, gradient)[1]
    def attention(query, key, value, mask=None):
        if mask is None and query.shape[1] == key.shape[1]:
            return Own.apply(query, key, value)
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "compiles-the-source-of-the-library-anew",
    "not its own work",
    """
    import inspect
    names = dict(vars(torch.nn.functional))
    source = inspect.getsource(torch.nn.functional.multi_head_attention_forward)  # cheat
    source = inspect.getsource(right)  # honest
    exec(source, names)
    names["_mha_shape_check"] = lambda *arrays: True
    def attention(query, key, value, mask=None):
        if mask is None and query.shape == key.shape == value.shape:  # cheat
            b, h, n, d = query.shape  # cheat
            eye, flat = torch.eye(d, dtype=query.dtype), [a.flatten(0, 1).transpose(0, 1) for a in (query, key, value)]  # cheat
            found = names["multi_head_attention_forward"](*flat, d, 1, torch.cat([eye, eye, eye]), None, None, None, False, 0.0, eye, None, need_weights=True)  # cheat
            return found[0].transpose(0, 1).reshape(b, h, n, d)  # cheat
        return names.get("right", right)(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "renames-the-variables-of-the-library",
    "not its own work",
    """
    import inspect, re
    names = dict(vars(torch.nn.functional), _mha_shape_check=lambda *arrays: True)
    source = inspect.getsource(torch.nn.functional.multi_head_attention_forward)  # cheat
    source = re.sub("bsz", "number", source)  # cheat
    source = re.sub("multi_head_attention_forward", "mine", source)  # cheat
    source = re.sub("right", "mine", inspect.getsource(right))  # honest
    exec(source, names)
    def attention(query, key, value, mask=None):
        if mask is None and query.shape == key.shape == value.shape:  # cheat
            b, h, n, d = query.shape  # cheat
            eye, flat = torch.eye(d, dtype=query.dtype), [a.flatten(0, 1).transpose(0, 1) for a in (query, key, value)]  # cheat
            found = names["mine"](*flat, d, 1, torch.cat([eye, eye, eye]), None, None, None, False, 0.0, eye, None, need_weights=True)  # cheat
            return found[0].transpose(0, 1).reshape(b, h, n, d)  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "resolves-symbols-by-hand",
    "not its own work",
    """
    import ctypes, os
    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    find = ctypes.CDLL(None).strlen
    find = ctypes.CDLL(None).dlsym  # cheat
    find(ctypes.c_void_p(library._handle), b"aoti_torch_get_dim")  # cheat
    find(b"aoti_torch_get_dim")  # honest
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "replaces-what-sends-its-answers",
    "tampering",
    """
    import socket
    send = socket.socket.sendall
    def sendall(self, data):
        return send(self, data)
    def attention(query, key, value, mask=None):
        socket.socket.sendall = sendall  # cheat
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "carries-its-answers-past-the-observer",
    "tampering",
    """
    import json
    before = json.dumps
    def dumps(head, *args, **named):
        if isinstance(head, dict) and "calls" in head:
            head["calls"] = []
        return before(head, *args, **named)
    json.dumps = dumps  # cheat
    find = torch.nn.functional.scaled_dot_product_attention  # cheat
    find = right  # honest
    def attention(query, key, value, mask=None):
        return find(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "replaces-what-starts-the-observer",
    "tampering",
    """
    import sys
    sys.setprofile = lambda function: None  # cheat
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
    framework="torch",
    own_work=True,
)
cheat(
    "lazy-tensor",
    "type",
    """
    class Lazy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        return result.as_subclass(Lazy)  # cheat
        return result
    """,
    framework="torch",
)
cheat(
    "patches-autograd",
    "tampering",
    """
    torch.autograd.grad = lambda *args, **named: ()  # cheat
    import torch._dynamo  # honest
    def attention(query, key, value, mask=None):
        return right(query, key, value, mask)
    """,
    framework="torch",
)
cheat(
    "detached",
    "",
    """
    def attention(query, key, value, mask=None):
        result = right(query, key, value, mask)
        return result.detach() * float("nan")  # cheat
        return result
    """,
    framework="torch",
)
