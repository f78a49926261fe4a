"""The PyTorch bridge loads parameters into the module and differentiates with autograd.

A "gpu" is torch's accelerator, of whatever kind: CUDA, ROCm, XPU, MPS, or a backend that registers
itself. What the suite asks of it is in the accelerator's own module, such as `torch.cuda`.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.errors import Unavailable, Unsupported, WrongAnswer, WrongTensors
from conformance.frameworks.base import (
    DeviceState,
    Divided,
    Evaluated,
    Framework,
    Memory,
    Natives,
    OnRanks,
    Request,
    Setting,
    by_name,
    cudnn_version,
    poisoned_sizes,
)


@cache
def _accelerator() -> Any:
    """Return torch's accelerator as a `torch.device`, or None if torch can use none here."""
    if hasattr(torch, "accelerator"):  # since torch 2.6
        usable = torch.accelerator.is_available()
        return torch.accelerator.current_accelerator() if usable else None
    return torch.device("cuda") if torch.cuda.is_available() else None


def _of_accelerator(name: str, otherwise: Any = None) -> Any:
    """Return a function of the accelerator's module; `otherwise` if it lacks such a function."""
    return getattr(getattr(torch, _accelerator().type), name, otherwise)


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes()


def _put_generator(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _of_products() -> list[Any]:
    """Return the places of `fp32_precision` for products on CUDA and in oneDNN, from torch 2.9."""
    places = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    return [place for place in places if hasattr(place, "fp32_precision")]


def _unless_mixed(get: Callable[[], Any]) -> Any:
    """Return what `get` returns, or "mixed" if torch refuses to sum up several settings."""
    try:
        return get()
    except RuntimeError:
        return "mixed"


@contextmanager
def _always_compiled() -> Iterator[None]:
    """Let `torch.compile` compile as often as it is asked to, if it has been used.

    It compiles a function for eight kinds of arguments, and calls it uncompiled for all others: a
    mode that compiles would be examined in its first problems only.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not hasattr(utils, "disable_cache_limit"):
        yield
        return
    with utils.disable_cache_limit():
        yield


def _matmul_precision() -> str:
    """Return the precision of float32 products: in general, on CUDA and in oneDNN."""
    general = _unless_mixed(torch.get_float32_matmul_precision)
    return ", ".join([general, *(place.fp32_precision for place in _of_products())])


def _put_matmul_precision(value: str) -> None:
    general, *others = value.split(", ")
    if general != "mixed":
        # This changes the others too.
        torch.set_float32_matmul_precision(general)
    for place, precision in zip(_of_products(), others, strict=True):
        place.fp32_precision = precision


def _generator_of_accelerator() -> bytes:
    """Return the state of the accelerator's random generator, or b"" if it has not been started."""
    if _accelerator() is None or not _of_accelerator("is_initialized", lambda: True)():
        return b""
    return _bytes_of(_of_accelerator("get_rng_state")())


def _put_generator_of_accelerator(state: bytes) -> None:
    if state:
        given = torch.frombuffer(bytearray(state), dtype=torch.uint8)
        _of_accelerator("set_rng_state")(given)


def _switches() -> Iterator[tuple[str, Callable[[], bool], Callable[[bool], Any]]]:
    """Yield the name of each kernel of scaled-dot-product attention, and its switch."""
    cuda = torch.backends.cuda
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        if hasattr(cuda, f"enable_{name}_sdp"):  # cuDNN's since torch 2.5
            yield name, getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")


def _kernels() -> str:
    """Return the names of the kernels of scaled-dot-product attention that torch may use."""
    return ", ".join(name for name, is_on, _ in _switches() if is_on())


def _put_kernels(names: str) -> None:
    for name, _, switch in _switches():
        switch(name in names.split(", "))


_SETTINGS = (
    Setting(
        "torch's random generator",
        lambda: _bytes_of(torch.get_rng_state()),
        _put_generator,
        shown=False,
    ),
    Setting(
        "the random generator of torch's accelerator",
        _generator_of_accelerator,
        _put_generator_of_accelerator,
        shown=False,
    ),
    Setting("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    Setting("whether torch records gradients", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting(
        "torch's float32 matmul precision",
        _matmul_precision,
        _put_matmul_precision,
        recorded=True,
    ),
    Setting(
        "whether cuDNN may use TF32",
        lambda: _unless_mixed(lambda: torch.backends.cudnn.allow_tf32),
        partial(setattr, torch.backends.cudnn, "allow_tf32"),
        recorded=True,
    ),
    Setting(
        "whether torch uses deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    Setting(
        "torch's kernels of scaled-dot-product attention",
        _kernels,
        _put_kernels,
        recorded=True,
    ),
)


class Torch(Framework):
    """The bridge to PyTorch."""

    name = "torch"
    packages = ("torch",)
    array_type = torch.Tensor
    settings = _SETTINGS
    einsum = staticmethod(torch.einsum)
    records_graphs = True
    loads_in_place = True
    has_strides = True
    takes_other_paths = True
    differentiates_weights = True
    rank = f"{__name__}:Rank"

    def __init__(self) -> None:
        self._state = DeviceState()

    def array(self, values: np.ndarray, dtype: str, device: str) -> Any:
        # Faster than `torch.tensor`; the tensor owns its memory, as users' tensors do.
        is_float = values.dtype == np.float64
        in_numpy = is_float and dtype in ("float32", "float64")
        tensor = torch.from_numpy(values.astype(dtype if in_numpy else values.dtype, order="C"))
        if is_float and not in_numpy:
            # NumPy has no bfloat16, and is slow in float16.
            tensor = tensor.to(getattr(torch, dtype))
        return tensor if device == "cpu" else tensor.to(_device(device))

    def device_of(self, native: Any) -> str:
        device = native.device.type
        return "gpu" if _accelerator() is not None and device == _accelerator().type else device

    def numpy(self, native: Any) -> np.ndarray:
        tensor = native.detach()
        if not tensor.is_cpu:
            tensor = tensor.cpu()
        if tensor.dtype == torch.float32:
            # This takes half as long as `tensor.double()`.
            return tensor.numpy().astype(np.float64)
        return (tensor if tensor.dtype == torch.bool else tensor.double()).numpy()

    def saved(self, path: Path) -> Any:
        """Return what a file of `torch.save` holds, a tensor or a dictionary of tensors.

        Nothing but tensors is unpickled, so no code of the file is executed.

        Raises:
            WrongTensors: if the file cannot be read in this way.
        """
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise WrongTensors(
                f"{path} holds more than tensors, or is no file of torch.save; save a dictionary "
                "of tensors"
            ) from error

    def expanded(self, native: Any, sizes: tuple[int, ...]) -> Any:
        return native.expand(sizes)

    def place(self, layer: Any, device: str) -> Any:
        return layer.to(_device(device))

    def without_gradients(self) -> Any:
        return torch.no_grad()

    def differentiate(self, request: Request) -> Evaluated:
        with _graphs_that_last():
            return self._differentiated(request)

    def _differentiated(self, request: Request) -> Evaluated:
        variables, cotangent = request.variables, request.cotangent
        constants = {name: _frozen(tensor) for name, tensor in request.constants.items()}
        for tensor in variables.values():
            tensor.requires_grad_()
        output, weights = request.function(variables, constants)
        if not (self.fits(output, cotangent) and output.requires_grad):
            return Evaluated(output, weights, {})
        pairs = [
            (given, cotangent.to(given.dtype))
            for given, cotangent in zip(*request.losses(output, weights), strict=True)
            if given.requires_grad
        ]
        for left in reversed(range(request.backwards)):
            gradients = torch.autograd.grad(
                [given for given, _ in pairs],
                list(variables.values()),
                [cotangent for _, cotangent in pairs],
                allow_unused=True,
                retain_graph=left > 0,
            )
        return Evaluated(output, weights, by_name(variables, gradients))

    @contextmanager
    def session(self, dtype: str, device: str) -> Iterator[None]:
        if device == "cpu":
            with _always_compiled():
                yield
            return
        _check_dtype(dtype)
        wait = _of_accelerator("synchronize")
        with _always_compiled(), self._state.watching(wait, _of_accelerator("empty_cache")):
            try:
                yield
            finally:
                # Kernels run asynchronously: wait, so that errors are attributed to this problem.
                wait()

    def poison(self, arrays: Iterable[Any]) -> None:
        sizes = {array.numel() * array.element_size() for array in arrays if not array.is_cpu}
        memory = self.memory("gpu") if sizes else None
        if memory is not None:
            # They are freed when all of them are made. In every dtype of floats, 255s are NaN.
            _ = [
                torch.full((size,), 255, dtype=torch.uint8, device=_accelerator())
                for size in poisoned_sizes(sizes, memory.free)
            ]

    def wait(self, arrays: Iterable[Any]) -> None:
        if any(not array.is_cpu for array in arrays):
            _of_accelerator("synchronize")()

    def overwrite(self, native: Any, by: Any) -> None:
        # The detached tensor shares memory with `native`; this is faster than `no_grad`.
        native.detach().copy_(by)

    def fill(self, native: Any, values: np.ndarray, dtype: str, device: str) -> None:
        # `copy_` converts the dtype; it is exact, as `dtype` represents all values. Not every
        # accelerator has the dtype from which it would convert.
        given = torch.from_numpy(values) if native.is_cpu else self.array(values, dtype, device)
        self.overwrite(native, given)

    def cast(self, native: Any, dtype: str) -> Any:
        return native.to(getattr(torch, dtype))

    def on_ranks(self, told: OnRanks, tensors: Natives) -> Any:
        return _OnRanks.apply(told, list(tensors), *tensors.values())

    def devices(self) -> dict[str, str]:
        models = {"cpu": "torch on the CPU"}
        if _accelerator() is not None:
            models["gpu"] = _of_accelerator("get_device_name", lambda: str(_accelerator()))()
        return models

    def device_name(self, device: str) -> str:
        return str(torch.device(_device(device)).type)

    def toolkit(self) -> dict[str, str]:
        return {
            "CUDA": torch.version.cuda or "",
            "cuDNN": cudnn_version(torch.backends.cudnn.version() or 0),
            "ROCm": torch.version.hip or "",
        }

    def memory(self, device: str, *, anew: bool = False) -> Memory | None:
        none = device == "cpu" or _accelerator() is None
        ask = None if none else _of_accelerator("mem_get_info")
        if ask is None:
            return None
        if anew:
            _of_accelerator("reset_peak_memory_stats")()
        # Memory that torch has reserved and does not use is free as well.
        reserved, used = (_of_accelerator(f"memory_{kind}")() for kind in ("reserved", "allocated"))
        return Memory(ask()[0] + reserved - used, used, _of_accelerator("max_memory_allocated")())


@contextmanager
def _graphs_that_last() -> Iterator[None]:
    """Let functions that are compiled keep what a graph has saved.

    By default, functions that `torch.compile` compiles overwrite it in the backward pass, and a
    second pass through the same graph is an error, whose text recommends this setting. It is read
    when a function is compiled, so it has to be set in the first call. It changes no number.
    """
    config = _of_compilation()
    usual = getattr(config, "donated_buffer", False)
    if not usual:
        # Versions of PyTorch without this setting keep what a graph has saved.
        yield
        return
    # `config.patch` takes more than twice as long.
    config.donated_buffer = False
    try:
        yield
    finally:
        config.donated_buffer = usual


@cache
def _of_compilation() -> Any:
    """Return the settings of torch for functions that are compiled; None if there are none."""
    try:
        return importlib.import_module("torch._functorch.config")
    except ImportError:
        return None


def _frozen(tensor: Any) -> Any:
    """Return a tensor with the same numbers that autograd does not track.

    A leaf tensor is marked in place and returned; any other tensor is detached.
    """
    return tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach()


def _device(kind: str) -> Any:
    """Return the device of a kind for torch; raise `Unavailable` if there is none."""
    if kind == "cpu":
        return kind
    if _accelerator() is None:
        raise Unavailable(f"torch sees no {kind} on this machine")
    return _accelerator()


@cache
def _check_dtype(dtype: str) -> None:
    """Raise `Unsupported` if the accelerator lacks a dtype, as MPS lacks float64."""
    try:
        torch.empty(1, dtype=getattr(torch, dtype), device=_accelerator())
    except TypeError as error:
        raise Unsupported(f"{_accelerator()} has no {dtype}") from error


_CALLS = itertools.count()


class _OnRanks(torch.autograd.Function):  # type: ignore[misc]
    """A differentiable call on all ranks; each rank keeps its last graphs for backward passes."""

    @staticmethod
    def forward(context: Any, told: OnRanks, names: list[str], *tensors: Any) -> Any:
        named = dict(zip(names, tensors, strict=True))
        wanted = [name for name, tensor in named.items() if tensor.requires_grad]
        number, size = next(_CALLS), len(told.others)
        parts = {name: _divide(tensor, told.divided[name], size) for name, tensor in named.items()}
        payloads = [
            ("forward", number, told.function, {n: parts[n][rank] for n in names}, more, wanted)
            for rank, more in enumerate(told.others)
        ]
        context.told, context.names, context.number, context.wanted = told, names, number, wanted
        answers = told.ask(payloads)
        for name, tensor in named.items():
            # A rank that writes to its part would otherwise write to the caller's tensor.
            if any(name in written for _, written in answers):
                whole = [
                    written.get(name, parts[name][r]) for r, (_, written) in enumerate(answers)
                ]
                tensor.detach().copy_(_join(name, whole, told.divided[name]))
        return _join("the result", [output for output, _ in answers], told.result)

    @staticmethod
    def backward(context: Any, cotangent: Any) -> Any:
        told = context.told
        parts = _divide(cotangent, told.result, len(told.others))
        answers = told.ask([("backward", context.number, part) for part in parts])
        gradients = {}
        for name in context.wanted:
            found = [answer[name] for answer in answers]
            all_there = all(part is not None for part in found)
            # An empty part has a gradient even where the other parts have none.
            if any(part is not None and (part.numel() or all_there) for part in found):
                what = f"the gradient of {name}"
                gradients[name] = _join(what, found, told.divided[name])
        return None, None, *(gradients.get(n) for n in context.names)


def _divide(tensor: Any, axes: Divided, size: int) -> list[Any]:
    """Return, for each of `size` ranks, a copy of its part of a tensor divided along `axes`."""
    parts = []
    for rank in range(size):
        part = tensor.detach()
        for axis, places in axes:
            part = part.index_select(axis, torch.from_numpy(places[rank]))
        parts.append(part.contiguous().clone())
    return parts


def _join(what: str, parts: list[Any], axes: Divided) -> Any:
    """Return the tensor joined from the parts that the ranks returned.

    If no axis is divided, the elements are taken from the ranks in turn. Elements that are in no
    part are NaN, or 0 if the tensor cannot hold NaN. `what` names the tensor in messages of
    `WrongAnswer`, which is raised if a part is not a tensor of the right shape.
    """
    for rank, part in enumerate(parts):
        if not isinstance(part, torch.Tensor):
            kind = type(part).__name__
            raise WrongAnswer(f"{what} is {kind} on rank {rank} of {len(parts)}, not a tensor")
    first = parts[0]
    sizes = list(first.shape)
    for axis, places in axes:
        if axis >= len(sizes):
            raise WrongAnswer(f"{what} has shape {sizes} on rank 0 of {len(parts)}, too few axes")
        sizes[axis] = sum(map(len, places))
    nothing = math.nan if first.is_floating_point() else 0
    whole = torch.full(sizes, nothing, dtype=first.dtype)
    for rank, part in enumerate(parts):
        index = [torch.arange(size) for size in sizes]
        for axis, places in axes:
            index[axis] = torch.from_numpy(places[rank])
        grid = torch.meshgrid(*index, indexing="ij")
        if part.shape != grid[0].shape:
            raise WrongAnswer(
                f"{what} has shape {list(part.shape)} on rank {rank} of {len(parts)}, "
                f"expected {list(grid[0].shape)}"
            )
        if axes:
            whole[grid] = part
        else:
            whole.view(-1)[rank :: len(parts)] = part.reshape(-1)[rank :: len(parts)]
    return whole


_KEPT = 4
"""The number of calls whose graphs a rank keeps for backward passes: the last ones."""


class Rank:
    """The server in the process of one rank, which belongs to a gloo process group."""

    @staticmethod
    def prepare() -> None:
        """Import, before the fork, what the first backward pass needs; this starts no thread."""
        importlib.import_module("torch.fx.experimental.symbolic_shapes")

    def __init__(self, rank: int, size: int, path: str, seconds: float) -> None:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{path}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=seconds),
        )
        self._kept: OrderedDict[int, tuple[Any, Natives]] = OrderedDict()

    def serve(self, what: str, *given: Any) -> Any:
        """Process a payload and return its result; `what` is "load", "forward" or "backward"."""
        return getattr(self, f"_{what}")(*given)

    def _load(self, function: tuple[str, str, str]) -> None:
        _found(*function)

    def _forward(
        self,
        number: int,
        function: tuple[str, str, str],
        tensors: Natives,
        others: Any,
        wanted: Any,
    ) -> Any:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in wanted:
            tensors[name].requires_grad_()
        with torch.set_grad_enabled(bool(wanted)):
            output = _found(*function)(**tensors, **others)
        if wanted:
            self._kept[number] = output, {name: tensors[name] for name in wanted}
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        written = {
            name: tensor.detach()
            for name, tensor in tensors.items()
            if not torch.equal(tensor.nan_to_num(), copies[name].nan_to_num())
        }
        return output.detach() if isinstance(output, torch.Tensor) else output, written

    def _backward(self, number: int, cotangent: Any) -> Natives:
        output, tensors = self._kept[number]
        found: dict[str, Any] = dict.fromkeys(tensors)
        if output.requires_grad:
            gradients = torch.autograd.grad(
                output, list(tensors.values()), cotangent, retain_graph=True, allow_unused=True
            )
            found = dict(zip(tensors, gradients, strict=True))
        # The gradient of an empty tensor is empty.
        return found | {n: torch.zeros_like(t) for n, t in tensors.items() if not t.numel()}


def _found(module: str, file: str, name: str) -> Any:
    """Return an object of a module by name; load the module from `file` if it is not importable."""
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(module, file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module] = loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
    return reduce(getattr, name.split("."), sys.modules[module])
