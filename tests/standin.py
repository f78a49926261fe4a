"""A device for torch that computes on the CPU, so that code for GPUs runs without one.

`register()` makes it torch's accelerator for the rest of the process; this must come before the
first backward pass. A tensor on the device holds one on the CPU, on which all operations run. As on
a GPU, an operation on tensors of two devices raises an error, a failure may show only when the
device is waited for, memory has an end, and freed memory is handed out again as it was left.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "standin"
GENERATOR = torch.Generator()

TO_CPU = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Operations that return numbers, so that they wait for the device."""

OF_BOTH = (
    "aten::_to_copy",
    "aten::copy_",
    "aten::index.Tensor",
    "aten::index_put_",
    "aten::_index_put_impl_",
)
"""Operations that take tensors on the CPU along with tensors on a device."""

UNFILLED = ("aten::new_empty", "aten::empty_like")


class State:
    """What tests set, and what they look at."""

    def __init__(self) -> None:
        self.fresh()

    def fresh(self) -> None:
        """Forget all of it."""
        self.failure: BaseException | None = None
        """What waiting for the device raises, once."""
        self.sticky = False
        """Whether it raises that from then on."""
        self.seconds = 0.0
        """How long the device still computes."""
        self.memory = 2**40
        """Its size in bytes."""
        self.emptied = 0
        """How often unused memory was returned."""
        self.lacks: set[torch.dtype] = set()
        """The dtypes that the device does not have."""
        self.peak = 0


STATE = State()


class OnDevice(torch.Tensor):
    """A tensor on the device; `inner` holds its numbers."""

    inner: torch.Tensor
    storage_of_inner: torch.UntypedStorage
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        """Place a tensor on the device."""
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.inner!r} on {NAME}"

    def tolist(self) -> Any:
        """Return the numbers as lists, which torch does for no other subclass."""
        wait()
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the tensors that those of the arguments hold, and wrap its results."""
    name, schema = function.name(), function._schema
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, torch.Tensor)]
    others = [item for item in tensors if not isinstance(item, OnDevice) and item.dim()]
    if others and name not in OF_BOTH:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{NAME}:0 and {others[0].device}! (when calling {name})"
        )
    to_cpu = name in TO_CPU or (name == "aten::copy_" and not isinstance(args[0], OnDevice))
    if "device" in kwargs:
        to_cpu = torch.device(kwargs["device"] or NAME).type == "cpu"
        kwargs = kwargs | {"device": "cpu"}
    if to_cpu:
        wait()
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    drawn = torch.Tag.nondeterministic_seeded in function.tags
    with drawing() if drawn else contextlib.nullcontext():
        result = function(*inner_args, **inner_kwargs)
    given = {argument.name: item for argument, item in zip(schema.arguments, args, strict=False)}
    written = [
        (given | kwargs)[argument.name]
        for argument in schema.arguments
        if argument.is_write and argument.name in given | kwargs
    ]
    assert all(item.shape == _inner(item).shape for item in written), f"{name} changes a shape"
    if written and schema.returns:
        return written[0] if len(schema.returns) == 1 else tuple(written)
    if to_cpu:
        return result
    if name in UNFILLED and result.is_contiguous():
        return _empty(result.shape, dtype=result.dtype)
    return tree_map(lambda item: placed(item) if isinstance(item, torch.Tensor) else item, result)


def _inner(item: Any) -> Any:
    return item.inner if isinstance(item, OnDevice) else item


_SIZES: dict[int, int] = {}
"""The sizes of what lies on the device, in bytes, by address."""


def used() -> int:
    """The bytes that are used."""
    return sum(_SIZES.values())


def placed(inner: torch.Tensor) -> OnDevice:
    """Place a tensor on the device; raise what torch raises if that is impossible."""
    if inner.dtype in STATE.lacks:
        raise TypeError(f"Cannot convert a tensor to {inner.dtype}, which {NAME} lacks")
    storage = inner.untyped_storage()
    address = storage.data_ptr()
    if address not in _SIZES:
        # torch cannot pass on what Python raises in the thread of a backward pass on a device.
        main = threading.current_thread() is threading.main_thread()
        if main and used() + storage.nbytes() > STATE.memory:
            raise torch.OutOfMemoryError(f"{NAME} out of memory")
        _SIZES[address] = storage.nbytes()
        weakref.finalize(storage, _SIZES.pop, address, None)
        STATE.peak = max(STATE.peak, used())
    made = OnDevice(inner)
    made.storage_of_inner = storage
    return made


_BLOCKS: list[np.ndarray] = []
"""The blocks of memory of tensors that were not filled when they were made."""


def block(size: int) -> np.ndarray:
    """The smallest free block of at least `size` bytes, as it was left, or else a new one of 0."""
    # A block has another reference than those of the list and of the call if a tensor lies in it.
    free = [place for place in range(len(_BLOCKS)) if sys.getrefcount(_BLOCKS[place]) == 2]
    fit = [place for place in free if _BLOCKS[place].size >= size]
    if not fit:
        _BLOCKS.append(np.zeros(size, np.uint8))
        fit = [-1]
    return _BLOCKS[min(fit, key=lambda place: _BLOCKS[place].size)]


@contextlib.contextmanager
def drawing():
    """Draw from the generator of the device."""
    own = torch.get_rng_state()
    torch.set_rng_state(GENERATOR.get_state())
    try:
        yield
    finally:
        GENERATOR.set_state(torch.get_rng_state())
        torch.set_rng_state(own)


def wait(*_: Any) -> None:
    """Wait for the device; what failed since the last time is raised here."""
    seconds, STATE.seconds = STATE.seconds, 0.0
    time.sleep(seconds)
    failure = STATE.failure
    if failure is not None:
        STATE.failure = failure if STATE.sticky else None
        raise failure


class Module:
    """`torch.standin`, as `torch.cuda` is the module of another device."""

    synchronize = staticmethod(wait)
    memory_allocated = memory_reserved = staticmethod(used)
    manual_seed_all = staticmethod(GENERATOR.manual_seed)
    get_rng_state = staticmethod(GENERATOR.get_state)
    set_rng_state = staticmethod(GENERATOR.set_state)
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda: "Stand-in 1000")
    mem_get_info = staticmethod(lambda: (STATE.memory - used(), STATE.memory))
    max_memory_allocated = staticmethod(lambda: STATE.peak)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])

    def empty_cache(self) -> None:
        """Return unused memory."""
        STATE.emptied += 1

    def reset_peak_memory_stats(self) -> None:
        """Count the peak from now on."""
        STATE.peak = used()


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    dtype = dtype or torch.get_default_dtype()
    if 0 in size:
        return placed(torch.empty(size, dtype=dtype))
    count = math.prod(size)
    flat = torch.frombuffer(block(count * dtype.itemsize), dtype=dtype, count=count)
    return placed(flat.view(size))


def _copy_from(source, target, non_blocking=False):
    _inner(target).copy_(_inner(source))
    return target


def _on_device(make):
    """A function that makes a tensor on the device, from one that makes it on the CPU."""
    return lambda *given, device=None, **options: placed(make(*given, **options))


_KEPT: list[torch.library.Library] = []


def register() -> None:
    """Make the device torch's accelerator."""
    if _KEPT:
        return
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    # What is registered lasts as long as this object.
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _on_device(torch.ops.aten.empty_strided), "PrivateUse1")
    # torch would make these from an empty tensor that it enlarges.
    for name in ("arange", "arange.start", "arange.start_step"):
        _, _, overload = name.partition(".")
        make = getattr(torch.ops.aten.arange, overload or "default")
        library.impl(name, _on_device(make), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
