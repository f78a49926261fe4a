"""The interface of layers that keep a state: how to build, feed, reset and reorder one.

Only `StatefulLayer.build` and `StatefulLayer.feed` are required. What a layer does not define is
not checked. The layer has its own weights, so it may rotate, group, normalise and cache as it does.
"""

from __future__ import annotations

import copy
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from conformance.adapter.base import check_promises
from conformance.adapter.loading import located
from conformance.definition.dtypes import DTYPES, Array
from conformance.errors import (
    FailsOnImport,
    NotAnAdapter,
    UnknownName,
    Unsupported,
    WrongDeclaration,
    check_names,
)
from conformance.frameworks import framework
from conformance.text import message

PROMISES = ("batch", "steps", "chunks", "runs", "batch position", "threads")
"""The relations of which a layer can promise equal bits."""


LEAST = 32
"""The fewest tokens that a buffer must hold, so that all ways fit into it."""


class StatefulLayer(ABC):
    """The base class for layers that keep a state, such as a cache of keys and values.

    A layer is causal: the output of a token depends on that token and on those before it. The suite
    copies what `build` returns for each way through a text, so the layer may keep its state in
    itself. A method that raises `NotImplementedError`, or that a class replaces with None, is not
    checked.

    Attributes:
        name: the name in tables; that of the class by default.
        framework: the name of the framework whose arrays the layer takes and returns.
        width: the size of the embedding of a token.
        dtypes: the dtypes in which the layer is built.
        window: how many tokens, its own included, a token attends to at most; None for all. A text
            is then longer than the window.
        stacked: whether several attentions with a window follow each other, which reach further
            together; then it is not checked that the window is the declared one.
        capacity: how many tokens a static buffer holds, at least 32; None if the state grows. A
            text is then as long as the buffer.
        differentiable: whether gradients flow through the state to the tokens that were fed before.
        promises: for names in `PROMISES`, "equal bits". What is not promised is only observed.
    """

    name: str = ""
    framework: str = "torch"
    width: int
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    window: int | None = None
    stacked: bool = False
    capacity: int | None = None
    differentiable: bool = False
    promises: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def build(self, dtype: str) -> Any:
        """Return the layer with its own weights, which has not been fed anything."""

    @abstractmethod
    def feed(self, layer: Any, tokens: Any) -> Any:
        """Return the outputs `[batch query width]` of new tokens, which follow those fed before.

        `tokens` is `[batch query width]`, in the layer's dtype.
        """

    def feed_padded(self, layer: Any, tokens: Any, real: Any) -> Any:
        """Return the outputs of new tokens, some of which are padding.

        `real` is a boolean array `[batch length]`, which covers the tokens fed before too; False
        marks padding. What is returned for padding is not looked at.
        """
        raise Unsupported("it takes no padding")

    def feed_at(self, layer: Any, tokens: Any, positions: Any) -> Any:
        """Return the outputs of new tokens at explicit positions, an integer array `[batch query]`.

        Only the search for a cause calls it, with the positions that the layer should find itself.
        """
        raise Unsupported("it takes no positions")

    def feed_uncached(self, layer: Any, tokens: Any) -> Any:
        """Return the outputs of a whole text without keeping or using a state."""
        raise Unsupported("its cache cannot be switched off")

    def reset(self, layer: Any) -> None:
        """Forget all tokens."""
        raise Unsupported("it does not reset")

    def rollback(self, layer: Any, count: int) -> None:
        """Forget the last `count` tokens."""
        raise Unsupported("it does not roll back")

    def reorder(self, layer: Any, rows: Sequence[int]) -> None:
        """Let the row `i` of the batch go on with the state of row `rows[i]`.

        A row may occur more than once or not at all, so the batch may shrink.
        """
        raise Unsupported("it does not reorder rows")

    def save(self, layer: Any) -> Any:
        """Return a copy of the state, on which what the layer does later has no influence."""
        raise Unsupported("it saves no state")

    def restore(self, layer: Any, saved: Any) -> None:
        """Replace the state with one that `save` returned; it may be restored more than once."""
        raise Unsupported("it restores no state")

    def fresh(self, layer: Any) -> Any:
        """Return a copy of what `build` returned, with the same weights; by default, a deep copy.

        The original is never fed.
        """
        return copy.deepcopy(layer)

    def wide(self, layer: Any) -> Any:
        """Return a copy with the same weights that computes in float64, to measure rounding noise.

        By default, this is for modules of PyTorch. If it raises `Unsupported`, noise is taken to be
        what a few units in the last place of the tokens do to the outputs.
        """
        if not callable(getattr(layer, "double", None)):
            raise Unsupported("it does not compute in float64")
        return self.fresh(layer).double()

    def embeddings(self) -> Array | None:
        """Return embeddings `[number width]`, of which those of texts are mixtures.

        By default, it is None: they are random numbers of variance 1.
        """
        return None

    @staticmethod
    def from_huggingface(
        model: Any,
        cache: Callable[[], Any] | None = None,
        *,
        module: str = "",
        batch: Mapping[str, Any] | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        name: str = "",
        **declared: Any,
    ) -> StatefulLayer:
        """Return the layer of a module that takes a cache, as those of transformers do.

        The argument is `past_key_values`, or `cache` as in newer versions of transformers.

        Its width and window are those of its configuration, unless they are declared.

        Args:
            model: the module, with its weights.
            cache: makes an empty cache, such as `lambda: DynamicCache(config=model.config)`; None
                if the module makes one and returns it.
            module: the path of a part of the model, such as "layers.3.self_attn". If it does not
                take embeddings and a cache alone, the model is called: it makes masks,
                positions and the cache, the part is given the tokens in place of its input, and its
                output is what is compared.
            batch: arguments of the model, such as `input_ids`. The texts that such a part is fed
                are then like what it gets in this forward pass; they are random numbers otherwise.
            within: makes a context in which the model is called, such as one of `torch.autocast`.
            name: the name in tables.
            declared: other attributes of `StatefulLayer`, such as `capacity`.

        Raises:
            UnknownName: if the model has no such part; the message suggests similar names.
            WrongDeclaration: if the module takes no cache, or there is no such attribute, or the
                part is not called once with embeddings.
        """
        part = _part(model, module)
        if module and _needs(part):
            return _Inside(model, module, cache, batch, within, name, declared)
        return _HuggingFace(part, cache, within, name, declared)


def _part(model: Any, path: str) -> Any:
    """Return the part of a model at a path; raise `UnknownName` if there is none."""
    parts = dict(model.named_modules()) if hasattr(model, "named_modules") else {"": model}
    if path not in parts:
        raise UnknownName("module", path, filter(None, parts))
    return parts[path]


_OPTIONAL = (
    *("feed_padded", "feed_at", "feed_uncached", "reset", "rollback", "reorder"),
    *("save", "restore", "wide"),
)
"""The methods without which a layer is checked nevertheless."""

_CASTS = {"float32": "float", "bfloat16": "bfloat16", "float16": "half", "float64": "double"}
"""By dtype, the method with which a module of PyTorch is converted."""

_INPUTS = ("inputs_embeds", "hidden_states")
"""What modules of transformers call the embeddings that they take."""

_CACHES = ("past_key_values", "cache")
"""What modules of older and of newer versions of transformers call the cache."""


_DECLARED = ("width", "window", "stacked", "capacity", "dtypes", "differentiable", "promises")
"""What can be declared of a module that needs no class."""

_OF_MODEL = ("position_embeddings",)
"""Arguments that only a model makes, even if they have a default."""


def _parameters(module: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(module, "forward", module)).parameters


def _input_of(module: Any) -> str:
    """Return the name of the argument that takes the embeddings."""
    parameters = _parameters(module)
    return next((one for one in _INPUTS if one in parameters), next(iter(parameters), ""))


def _cache_of(module: Any) -> str:
    """Return the name of the argument that takes the cache, or ""."""
    parameters = _parameters(module)
    return next((one for one in _CACHES if one in parameters), "")


def _needs(module: Any) -> str:
    """Return why a module cannot be called with embeddings and a cache alone, or ""."""
    parameters = _parameters(module)
    if not _cache_of(module):
        return f"takes no {' or '.join(_CACHES)}; derive from conformance.StatefulLayer"
    needed = [
        it.name
        for it in parameters.values()
        if it.default is it.empty and it.kind is it.POSITIONAL_OR_KEYWORD
    ]
    needed = [one for one in needed if one not in (_input_of(module), _cache_of(module))]
    needed += [one for one in _OF_MODEL if one in parameters and one not in needed]
    if not needed:
        return ""
    return f"needs {', '.join(needed)}, which only its model makes; pass the model, and module="


class _HuggingFace(StatefulLayer):
    """A module that takes and returns a cache by one of the names in `_CACHES`."""

    framework = "torch"

    def __init__(
        self,
        module: Any,
        cache: Callable[[], Any] | None,
        within: Callable[[], AbstractContextManager[Any]],
        name: str,
        declared: Mapping[str, Any],
    ) -> None:
        self.name = name or type(module).__name__
        self._module, self._cache, self._within = module, cache, within
        if needs := _needs(module):
            raise WrongDeclaration(f"{type(module).__name__} {needs}")
        self._input, self._takes = _input_of(module), {*_parameters(module)}
        self._cached = _cache_of(module)
        config = getattr(module, "config", None)
        self.width = getattr(config, "hidden_size", 0)
        if getattr(config, "use_sliding_window", True):
            self.window = getattr(config, "sliding_window", None)
        self.stacked = getattr(config, "num_hidden_layers", 1) > 1
        for attribute, value in declared.items():
            if attribute not in _DECLARED:
                raise WrongDeclaration(f"{self.name}: a stateful layer declares no {attribute!r}")
            setattr(self, attribute, value)
        if not self.width:
            raise WrongDeclaration(f"{self.name} has no config.hidden_size; tell width=")

    def build(self, dtype: str) -> Any:
        module = copy.deepcopy(self._module).eval()
        return _Caching(getattr(module, _CASTS[dtype])(), self._empty())

    def fresh(self, layer: Any) -> Any:
        return _Caching(layer.module, self._empty())

    def wide(self, layer: Any) -> Any:
        return _Caching(copy.deepcopy(layer.module).double(), self._empty())

    def _empty(self) -> Any:
        return None if self._cache is None else self._cache()

    def feed(self, layer: Any, tokens: Any, real: Any = None, **given: Any) -> Any:
        layer.batch, layer.device = len(tokens), framework("torch").device_of(tokens)
        if real is not None:
            if "attention_mask" not in self._takes:
                raise Unsupported("it takes no attention_mask")
            given["attention_mask"] = real.long()
            if "position_ids" in self._takes:
                places = (real.long().cumsum(-1) - 1).clamp(min=0)
                given["position_ids"] = places[:, -tokens.shape[1] :]
        cached = {self._cached: layer.cache, "use_cache": True}
        found, output = self._called(layer, tokens, **cached, **given)
        if not isinstance(found, tuple):
            layer.cache = getattr(found, self._cached, layer.cache)
        elif len(found) > 1:
            layer.cache = found[1]
        return output

    def feed_padded(self, layer: Any, tokens: Any, real: Any) -> Any:
        return self.feed(layer, tokens, real)

    def feed_at(self, layer: Any, tokens: Any, positions: Any) -> Any:
        if "position_ids" not in self._takes:
            raise Unsupported("it takes no position_ids")
        return self.feed(layer, tokens, position_ids=positions)

    def feed_uncached(self, layer: Any, tokens: Any) -> Any:
        return self._called(layer, tokens, use_cache=False)[1]

    def _called(self, layer: Any, tokens: Any, **given: Any) -> tuple[Any, Any]:
        """Return what the module returns, and the outputs to compare."""
        if "use_cache" not in self._takes:
            given.pop("use_cache", None)
        with self._within():
            found = layer.module(**{self._input: tokens}, **given)
        return found, _output(found)

    def reset(self, layer: Any) -> None:
        if hasattr(layer.cache, "reset"):
            layer.cache.reset()
        else:
            layer.cache = self._empty()

    def rollback(self, layer: Any, count: int) -> None:
        crop = self._method(layer, "crop")
        try:
            crop(-count)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            # A ring has overwritten what it would have to go back to, and says so.
            raise Unsupported(f"{type(layer.cache).__name__}: {message(error)}") from error

    def reorder(self, layer: Any, rows: Sequence[int]) -> None:
        name = "reorder_cache" if len(rows) == layer.batch else "batch_select_indices"
        indices = framework("torch").array(np.asarray(rows), "int64", layer.device)
        self._method(layer, name)(indices)
        layer.batch = len(rows)

    def save(self, layer: Any) -> Any:
        return copy.deepcopy(layer.cache)

    def restore(self, layer: Any, saved: Any) -> None:
        layer.cache = copy.deepcopy(saved)

    def _method(self, layer: Any, name: str) -> Any:
        for part in (layer.cache, *getattr(layer.cache, "layers", ())):
            if not hasattr(part, name):
                raise Unsupported(f"{type(part).__name__} has no {name}")
        return getattr(layer.cache, name)


class _Inside(_HuggingFace):
    """A part of a model, which the model calls with the masks, positions and cache that it makes.

    Hooks put the tokens in place of the part's input, and keep its output.
    """

    def __init__(
        self,
        model: Any,
        path: str,
        cache: Callable[[], Any] | None,
        batch: Mapping[str, Any] | None,
        within: Callable[[], AbstractContextManager[Any]],
        name: str,
        declared: Mapping[str, Any],
    ) -> None:
        super().__init__(model, cache, within, name or f"{type(model).__name__}.{path}", declared)
        self._path = path
        self.stacked = declared.get("stacked", False)
        if "window" not in declared:
            self.window = getattr(_part(model, path), "sliding_window", self.window)
        self._embeddings: Array | None = None
        self._record(model, batch)

    def _record(self, model: Any, batch: Mapping[str, Any] | None) -> None:
        """Call the model once, to see whether the part can be fed, and with what."""
        bridge = framework("torch")
        given = batch
        if given is None:
            weight = next(model.parameters())
            zeros = np.zeros((2, 3, self.width))
            tokens = bridge.array(zeros, bridge.dtype(weight), "cpu").to(weight.device)
            given = {self._input: tokens}
        was = model.training
        model.eval()
        try:
            with bridge.without_gradients(), self._within(), _hooked(model, self._path) as seen:
                model(**given)
        finally:
            model.train(was)
        if len(seen) != 1:
            raise WrongDeclaration(
                f"{self.name}: the part is called {len(seen)} times in a forward pass"
            )
        ((taken, made),) = seen
        shapes = [list(getattr(each, "shape", ())) for each in (taken, made)]
        if len(shapes[0]) != 3 or shapes[0][2] != self.width:
            raise WrongDeclaration(
                f"{self.name}: the part takes numbers of another shape than embeddings, {shapes[0]}"
            )
        if shapes[1][:-1] != shapes[0][:-1]:
            raise WrongDeclaration(f"{self.name}: the part gives no output for each token")
        if batch is not None:
            self._embeddings = bridge.numpy(taken).reshape(-1, self.width)

    def embeddings(self) -> Array | None:
        return self._embeddings

    def _called(self, layer: Any, tokens: Any, **given: Any) -> tuple[Any, Any]:
        with _hooked(layer.module, self._path, tokens) as seen:
            found, _ = super()._called(layer, tokens, **given)
        ((_, output),) = seen
        return found, output


@contextmanager
def _hooked(model: Any, path: str, tokens: Any = None) -> Iterator[list[tuple[Any, Any]]]:
    """Yield a list, to which each call of a part of a model adds its input and output.

    If there are `tokens`, they take the place of the input.
    """
    part = model.get_submodule(path)
    seen: list[tuple[Any, Any]] = []
    inputs: list[Any] = []

    def before(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, Any]:
        name = "" if args else next((one for one in _INPUTS if one in given), next(iter(given)))
        inputs.append(args[0] if args else given[name])
        if tokens is None:
            return args, given
        return ((tokens, *args[1:]), given) if args else (args, given | {name: tokens})

    def after(module: Any, args: Any, found: Any) -> None:
        seen.append((inputs.pop(), _output(found)))

    hooks = [part.register_forward_pre_hook(before, with_kwargs=True)]
    hooks.append(part.register_forward_hook(after))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class _Caching:
    """A module with the cache of what it was fed, and the size and device of the last batch."""

    def __init__(self, module: Any, cache: Any) -> None:
        self.module, self.cache = module, cache
        self.batch, self.device = 0, "cpu"

    def to(self, device: Any) -> _Caching:
        """Return the same, with the module on a device, to which its cache follows."""
        return _Caching(self.module.to(device), self.cache)


def _output(found: Any) -> Any:
    """Return the outputs in what a module returned: they come first, or are all of it."""
    if hasattr(found, "last_hidden_state"):
        return found.last_hidden_state
    return found[0] if isinstance(found, tuple) else found


def is_stateful(found: Any) -> bool:
    """Return whether an object or class is a `StatefulLayer`."""
    return isinstance(found, StatefulLayer) or (
        inspect.isclass(found) and issubclass(found, StatefulLayer)
    )


def find_stateful(spec: str) -> StatefulLayer | None:
    """Return the layer that `path/to/file.py:Name` or `package.module:Name` names.

    With `:path.of.part` behind it, `Name` is a model, or a function or class without arguments that
    makes one, and the layer is that part of the model; `:` alone stands for the whole model.

    Return None if that is no `StatefulLayer`.

    Raises:
        ConformanceError: as `declared` and `conformance.adapter.loading.located`.
    """
    place, _, attribute = spec.partition(":")
    attribute, has_part, path = attribute.partition(":")
    if has_part:
        return declared(_part_of(f"{place}:{attribute}", path), spec)
    source = _source(place)
    if StatefulLayer.__name__ not in source:
        return None
    names = re.findall(r"^(?:class )?(\w+) *[(=].*StatefulLayer", source, re.MULTILINE)
    if not attribute:
        if names and place.endswith(".py"):
            raise NotAnAdapter(
                f"{spec}: name the layer in it, {place}:{f' or {place}:'.join(names)}"
            )
        return None
    try:
        named = located(spec)
    except NotAnAdapter as error:
        if isinstance(error, FailsOnImport) or attribute in names or not names:
            raise
        raise UnknownName("stateful layer", attribute, names) from error
    return declared(named, spec) if is_stateful(named) else None


def may_be_stateful(spec: str) -> bool:
    """Return whether `find_stateful` may find a layer, without importing anything.

    That is so if a part is named, or if the source mentions `StatefulLayer`.
    """
    place, _, attribute = spec.partition(":")
    return ":" in attribute or StatefulLayer.__name__ in _source(place)


def _source(place: str) -> str:
    """Return the source of a file or a module, "" if there is none."""
    file = Path(place) if place.endswith(".py") else _source_of(place)
    return file.read_text(encoding="utf-8", errors="ignore") if file.is_file() else ""


def _part_of(spec: str, path: str) -> StatefulLayer:
    """Return the layer at `path` in the model that `spec` names, or that it makes if it is called.

    The model makes its cache itself.

    Raises:
        FailsOnImport: if making the model raises an exception.
        WrongDeclaration: if there is no model of PyTorch, or as `StatefulLayer.from_huggingface`.
        ConformanceError: as `conformance.adapter.loading.located`.
    """
    model = located(spec)
    if is_stateful(model):
        raise WrongDeclaration(f"{spec} is a StatefulLayer, which has no parts; leave out --module")
    made = callable(model) and (inspect.isclass(model) or not hasattr(model, "named_modules"))
    if made:
        try:
            model = model()
        except Exception as error:
            raise FailsOnImport(
                f"{spec}() fails: {type(error).__name__}: {message(error)}"
            ) from error
    if not hasattr(model, "named_modules"):
        is_or_returns = f"{spec}() returns" if made else f"{spec} is"
        raise WrongDeclaration(f"{is_or_returns} {type(model).__name__}, no model of PyTorch")
    return StatefulLayer.from_huggingface(model, module=path)


def _source_of(module: str) -> Path:
    """Return the file of a module, which is not imported; an empty path if there is none."""
    locations: Sequence[str] | None = [*sys.path, str(Path.cwd())]
    found, name = None, ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        found = PathFinder.find_spec(name, locations)
        if found is None:
            return Path()
        locations = found.submodule_search_locations or []
    return Path((found and found.origin) or "")


def declared(found: Any, spec: str) -> StatefulLayer:
    """Return the layer for a class, which is instantiated, or an instance, after checking it.

    Args:
        found: the class or instance.
        spec: the text by which the user chose it, for messages and as its name if it has none.

    Raises:
        NotAnAdapter: if `found` is no stateful layer, or lacks the definition of a method.
        FailsOnImport: if the class cannot be instantiated.
        WrongDeclaration: if a declaration is invalid.
    """
    if inspect.isclass(found) and issubclass(found, StatefulLayer):
        if inspect.isabstract(found):
            missing = ", ".join(sorted(found.__abstractmethods__))
            raise NotAnAdapter(f"{spec}: {found.__name__} does not define {missing}")
        try:
            found = found()
        except Exception as error:
            raise FailsOnImport(
                f"{spec}: {found.__name__}() fails: {type(error).__name__}: {message(error)}"
            ) from error
    if not isinstance(found, StatefulLayer):
        raise NotAnAdapter(
            f"{spec}: {type(found).__name__} is no stateful layer; derive from "
            "conformance.StatefulLayer, or use StatefulLayer.from_huggingface"
        )
    for method in _OPTIONAL:
        # Thus a class takes back what it inherits.
        if getattr(found, method) is None:
            setattr(found, method, partial(getattr(StatefulLayer, method), found))
    found.name = found.name or spec.rpartition(":")[2] or type(found).__name__
    if not isinstance(getattr(found, "width", None), int) or found.width < 1:
        raise WrongDeclaration(f"{spec}: width must be the size of an embedding")
    for attribute in ("window", "capacity"):
        value = getattr(found, attribute)
        if value is not None and (not isinstance(value, int) or value < 1):
            raise WrongDeclaration(f"{spec}: {attribute} must be a positive number, is {value!r}")
    if found.capacity is not None and found.capacity < LEAST:
        raise WrongDeclaration(f"{spec}: capacity is {found.capacity}; the ways need {LEAST}")
    check_names("dtype", found.dtypes, DTYPES)
    check_promises(found.promises, PROMISES, spec)
    return found
