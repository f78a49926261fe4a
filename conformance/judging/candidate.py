"""The adapter for a candidate: its declaration, and calls that are forwarded to its worker.

The worker is the candidate's process. It reads the declaration and sends it as plain data. Only
declarations of the adapter interface can be built from this, and sizes are bounded, so that a false
declaration harms only the candidate itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from conformance.adapter.arguments import CausalFlag, MaskArgument
from conformance.adapter.base import Call, Mode, SideEffects
from conformance.adapter.function import Function
from conformance.adapter.loading import adapted
from conformance.definition.dtypes import DTYPES
from conformance.definition.geometry import Geometry
from conformance.definition.problem import Answer, Problem
from conformance.errors import ConformanceError, Unsupported, WrongDeclaration
from conformance.frameworks import LACKS
from conformance.frameworks.base import Evaluated, Framework, Natives, Request, Strides
from conformance.judging.sandbox import DECLARABLE, Worker

FRAMEWORKS = ("numpy", "torch", "jax")
MOST_SIZE = 1024
"""The largest head size, tile size, number of heads, group size and common multiple in a declared
geometry; larger ones would cost the judge too much."""

MOST_PAIRS = 8
"""The most pairs of a key head size and a value head size that a candidate may declare; each adds
problems."""

MOST_MODES = 4
"""The most modes that a candidate may declare."""

LEAST_SIZE = 2
"""The least head size or tile size in a declared geometry. With heads of size 1 the scale is 1, and
a softmax over a tile of size 1 is 1, so mistakes in scale or softmax would not show."""

_WORDS: Mapping[str, Any] = {kind.__name__: kind for kind in DECLARABLE}
"""The classes whose objects a declaration may contain, by name."""

_DECLARED = (
    "layout",
    "grouped",
    "causal_flag",
    "dtypes",
    "returns_weights",
    "custom_scale",
    "differentiable",
    "accuracy",
    "geometry",
    "features",
    "modes",
    "fully_masked_row",
    "weights_option",
)
"""The attributes of an adapter that a candidate may declare; the judge has no use for others."""


@dataclass(eq=False)
class Held:
    """A stand-in, in the controlling process, for an array of a candidate's framework.

    Attributes:
        values: the numbers.
        dtype: the dtype of the candidate's array.
        slot: the number under which the worker keeps the array; -1 for a result.
        strides: the memory layout, "gaps", "transposed" or "window" (see
            `Framework.strided`); "" if contiguous.
        around: the number that fills the memory directly before and after the array; None to
            leave that memory as it is.
    """

    values: np.ndarray
    dtype: str
    slot: int
    strides: str = ""
    around: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(self.values.shape)


class Remote(Framework):
    """The bridge to a candidate's framework, which is imported in the candidate's worker only."""

    packages: ClassVar[tuple[str, ...]] = ()
    array_type = Held

    def __init__(self, name: str) -> None:
        self.name = name  # type: ignore[misc]
        self.differentiable = name != "numpy"  # type: ignore[misc]
        self.has_strides = name != "jax"  # type: ignore[misc]
        self.records_graphs = name == "torch"  # type: ignore[misc]
        self.differentiates_weights = name != "numpy"  # type: ignore[misc]
        self.takes_other_paths = name == "torch"  # type: ignore[misc]
        self._slots = itertools.count()
        self.request: Request | None = None
        self.gradients: Natives = {}

    def array(self, values: np.ndarray, dtype: str, device: str) -> Held:
        """Return a stand-in for a copy of the values.

        Values in float64 have to be exactly representable in `dtype`, which becomes the dtype of
        the array. Other values, such as booleans, keep their own dtype.
        """
        own = dtype if values.dtype == np.float64 else str(values.dtype)
        return Held(values.copy(), own, next(self._slots))

    def numpy(self, native: Any) -> np.ndarray:
        return np.asarray(native.values)

    def dtype(self, native: Any) -> str:
        return str(native.dtype)

    def einsum(self, axes: str, *operands: Any) -> Any:
        raise Unsupported("a candidate is given heads only")

    def devices(self) -> dict[str, str]:
        return {"cpu": "a sandbox"}

    def strided(self, native: Any, how: Strides, device: str) -> Any:
        if not self.has_strides:
            raise Unsupported(f"arrays of {self.name} have no strides")
        if how == "expanded":
            return self.expanded(native, native.shape)
        native.strides = how
        return native

    def surrounded(self, native: Any, by: float, device: str) -> Any:
        if self.has_strides:
            native.around = by
        return native

    def overwrite(self, native: Any, by: Any) -> None:
        if self.name == "jax":
            raise Unsupported("arrays of jax cannot be written to")
        native.values, native.dtype = by.values, by.dtype

    def attached(self, native: Any) -> dict[str, str]:
        return {}

    def evaluate(self, request: Request) -> Evaluated:
        if request.weights_cotangent is not None and not self.differentiates_weights:
            raise Unsupported("no loss on the weights")
        if request.backwards > 1 and not self.records_graphs:
            raise Unsupported(f"derivatives of {self.name} are no graphs")
        self.request, self.gradients = request, {}
        output, weights = request.function(request.variables, request.constants)
        return Evaluated(output, weights, self.gradients)


class Candidate(Function):
    """The adapter for a function in a worker process, for problems whose inputs are heads.

    Attributes:
        worker: the process that runs the function; None until one is started.
        profiled: whether the framework's profiler watches every call, in all threads. This takes
            most of the time, and a candidate can detect it.
        watched: whether the profiler watches the next call; it always does if `profiled` is set.
        path: whether the numbers of the next call are "new" to the process or were "seen" by it, if
            the worker is to compare what is executed; "" otherwise.
        traced: whether the worker traces the instructions of the next call.
    """

    worker: Worker | None = None
    profiled = False
    watched = False
    path = ""
    traced = False
    packages = ()

    def __init__(self) -> None:
        self._bridge = Remote(self.framework)

    @property
    def bridge(self) -> Framework:
        """The bridge to the worker."""
        return self._bridge

    def prepare(self) -> None:
        """Do nothing, because the framework is in the worker."""

    def versions(self) -> dict[str, str]:
        return {}

    def run(self, problem: Problem, call: Call) -> Answer:
        if not problem.heads_alone:
            raise Unsupported("a candidate is given heads only")
        if problem.shape.sharing != "separate":
            raise Unsupported("its inputs are three arrays in another process")
        return super().run(problem, replace(call, projected=True))

    def rewritten(self, problem: Problem, earlier: Problem, call: Call) -> Answer:
        return super().rewritten(problem, earlier, replace(call, projected=True))

    def reread(self, problem: Problem, later: Problem, call: Call) -> tuple[Answer, Answer]:
        raise Unsupported("its answers are copies from another process")

    def interrupted(self, problem: Problem, later: Problem, call: Call) -> Answer:
        raise Unsupported("its calls in another process include the backward pass")

    def side_effects(self, problem: Problem, call: Call) -> SideEffects:
        return super().side_effects(problem, replace(call, projected=True))

    def attend(
        self, query: Any, key: Any, value: Any, masks: dict[str, Any], mode: Mode, **options: Any
    ) -> Any:
        """Compute attention in the worker; return the context, or (context, weights).

        Gradients that the current request wants are stored in the bridge.

        Raises:
            Unsupported: the candidate does not support the problem.
            CandidateError: the candidate raised another exception.
            ConformanceError: the worker was lost, or the answer has no output.
        """
        request = self._bridge.request
        assert self.worker is not None
        assert request is not None
        arrays = {"query": query, "key": key, "value": value}
        arrays |= {name: held for name, held in masks.items() if isinstance(held, Held)}
        options |= {name: held for name, held in masks.items() if not isinstance(held, Held)}
        options |= dict(mode.options)
        names = {id(held): name for name, held in request.variables.items()}
        wanted = {n: names[id(held)] for n, held in arrays.items() if id(held) in names}
        if request.gradients:
            arrays["cotangent"] = request.cotangent
            if request.weights_cotangent is not None:
                arrays["cotangent.weights"] = request.weights_cotangent
        head = {
            "options": options,
            "wanted": list(wanted) if request.gradients else [],
            "backwards": request.backwards,
            "profile": "threads" if self.profiled else "names" if self.watched else "",
            "path": self.path,
            "traced": self.traced,
            "arrays": [
                {
                    "name": name,
                    "shape": held.shape,
                    "kind": held.values.dtype.str,
                    "dtype": held.dtype,
                    "slot": held.slot,
                    "strides": held.strides,
                    "around": None if held.around is None else str(held.around),
                }
                for name, held in arrays.items()
            ],
        }
        raised, found, dtypes = self.worker.ask(head, [held.values for held in arrays.values()])
        if raised is not None:
            if raised.kind == "Unsupported":
                raise Unsupported(raised.text)
            raise CandidateError(str(raised))
        if "output" not in found:
            raise ConformanceError("the answer has no output")
        native = {name: Held(array, dtypes[name], -1) for name, array in found.items()}
        self._bridge.gradients = {
            own: native[f"gradient.{name}"]
            for name, own in wanted.items()
            if f"gradient.{name}" in native
        }
        output = native["output"]
        return (output, native["weights"]) if "weights" in native else output


class CandidateError(Exception):
    """An exception other than `Unsupported` that a candidate raised in its worker."""


def candidate(said: Any, *, dtypes: tuple[str, ...] = ()) -> Candidate:
    """Return the adapter that a candidate's declaration describes; it has no worker yet.

    Args:
        said: the declaration, as the worker sent it.
        dtypes: the dtypes to judge; empty for all that the candidate supports.

    Raises:
        WrongDeclaration: the declaration is invalid, is not allowed for a candidate, or contains
            none of the dtypes to judge.
    """
    try:
        framework, title = said["framework"], str(said["name"])[:100]
        declared = {n: _meant(v) for n, v in said["declaration"]["map"].items()}
        parameters = [str(name) for name in said["parameters"]]
        masks = None if said["masks"] is None else _meant(said["masks"])
    except WrongDeclaration:
        raise
    except (Exception, RecursionError) as error:
        raise WrongDeclaration(f"the declaration cannot be read: {error}") from error
    if framework not in FRAMEWORKS:
        raise WrongDeclaration(f"arrays of {framework!r}; say one of {', '.join(FRAMEWORKS)}")
    unknown = sorted(declared.keys() - set(_DECLARED))
    if unknown:
        raise WrongDeclaration(f"a candidate cannot declare {', '.join(map(repr, unknown))}")
    if masks is None:
        masks, declared = _conventional(parameters, declared)
    if isinstance(declared.get("causal_flag"), str):
        declared["causal_flag"] = CausalFlag(declared["causal_flag"])
    lacking = LACKS.get(framework, ())
    own = tuple(
        name
        for name in dict.fromkeys(declared.get("dtypes", DTYPES))
        if name in DTYPES and name not in lacking and (not dtypes or name in dtypes)
    )
    if not own:
        raise WrongDeclaration("none of the dtypes asked for")
    members = {
        "custom_scale": "scale" in parameters,
        **declared,
        "name": "candidate",
        "title": title,
        "framework": framework,
        "dtypes": own,
        "mask_arguments": tuple(masks),
        "differentiable": framework != "numpy" and declared.get("differentiable", True),
    }
    try:
        made = adapted(type("Candidate", (Candidate,), members), "candidate")
    except ConformanceError:
        raise
    except Exception as error:
        raise WrongDeclaration(f"the declaration is wrong: {error}") from error
    assert isinstance(made, Candidate)
    if made.geometry is not None:
        _check_sizes(made.geometry)
    if "float32" in own and made.promised("float32") == "TF32":
        # Unlike the other promises, this one would make the limits wider.
        raise WrongDeclaration("a candidate cannot declare accuracy 'TF32'")
    if len(made.modes) > MOST_MODES:
        raise WrongDeclaration(f"a candidate has at most {MOST_MODES} modes")
    return made


def _meant(said: Any) -> Any:
    """Return the value that plain data from the worker describes, with declared objects rebuilt.

    Raises:
        WrongDeclaration: an object is of a class not in `_WORDS`, or cannot be made.
    """
    if isinstance(said, list):
        return tuple(_meant(one) for one in said)
    if isinstance(said, dict) and "map" in said:
        return {name: _meant(one) for name, one in said["map"].items()}
    if isinstance(said, dict):
        word = _WORDS.get(said["kind"])
        if word is None:
            raise WrongDeclaration(f"a candidate cannot declare a {said['kind']!r}")
        named = {name: _meant(one) for name, one in said["named"]["map"].items()}
        try:
            return word(*(_meant(one) for one in said["args"]), **named)
        except Exception as error:
            raise WrongDeclaration(f"{said['kind']}: {error}") from error
    return said


def _conventional(
    parameters: list[str], declared: dict[str, Any]
) -> tuple[tuple[MaskArgument, ...], dict[str, Any]]:
    """Return the mask arguments of an undecorated function, and its declaration `declared`.

    Masks are recognised by the names of the parameters after the first three; unknown names are
    ignored. A causal flag recognised in this way is added to the dict `declared` itself, unless
    `declared` has one already.
    """
    axes = "batch heads query key"
    masks = []
    for name in parameters[3:]:
        if name in ("mask", "attn_mask"):
            masks.append(MaskArgument(name, axes, true="attends", number="added", broadcasts=True))
        elif name in ("bias", "attn_bias"):
            masks.append(MaskArgument(name, axes, number="added", broadcasts=True))
        elif name in ("is_causal", "causal"):
            declared.setdefault("causal_flag", CausalFlag(name, alignment="top-left"))
    return tuple(masks), declared


def _check_sizes(geometry: Geometry) -> None:
    if len(geometry.pairs) > MOST_PAIRS:
        raise WrongDeclaration(f"a geometry of a candidate has at most {MOST_PAIRS} sizes of heads")
    sizes = [*itertools.chain.from_iterable(geometry.pairs), *geometry.tiles]
    if min(sizes) < LEAST_SIZE or max(*sizes, *geometry.heads, *geometry.groups) > MOST_SIZE:
        raise WrongDeclaration(f"sizes of a geometry are from {LEAST_SIZE} to {MOST_SIZE}")
    if math.lcm(*geometry.multiples) > MOST_SIZE:
        raise WrongDeclaration(f"the multiples of a geometry have one of at most {MOST_SIZE}")
