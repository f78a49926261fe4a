"""The requirement that an implementation accepts the sizes that it declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from conformance.cases.case import FAMILIES, assembled, draw, rounded
from conformance.definition.attention import heads_alone
from conformance.definition.geometry import Geometry
from conformance.definition.problem import Shape
from conformance.errors import Unsupported
from conformance.records.findings import Finding
from conformance.records.phrase import Phrase
from conformance.requirements.examination import Examination, Raised
from conformance.requirements.requirement import requirement


@requirement(
    "adapter.declared-sizes-are-taken",
    "An implementation takes every size that it declares.",
    why="Whoever chooses a model's sizes by the declaration is refused when it runs; and what is "
    "refused has not been checked.",
    every_case=True,
)
def taken(ex: Examination) -> Finding | None:
    """Check whether a case is refused only because of its sizes, although the adapter declares
    them. If an implementation that declares a `Geometry` refuses a case, it is called again at the
    same sizes, without masks or other arguments. It deviates if it refuses that too, unless the
    refusal seems to have another reason: in this dtype, the implementation accepts no shape of the
    same kind (for example, with shared key/value heads), although it accepts other shapes or
    dtypes."""
    geometry = ex.adapter.geometry
    if geometry is None or ex.case.grid is None:
        return None
    try:
        _ = ex.answer
    except Unsupported as error:
        refused = str(error)
    except Raised as error:
        refused = error.told
    else:
        return None
    try:
        geometry.check(ex.case.shape)
    except Unsupported:
        return None
    if _takes(ex, ex.case.shape, ex.dtype) or not _is_for_its_size(ex, geometry):
        return None
    fields = ("batch", "heads", "kv_heads", "head_size", "value_head_size")
    sizes = {name: getattr(ex.case.shape, name) for name in fields}
    sizes |= {"queries": ex.case.shape.query_length, "keys": ex.case.shape.key_length}
    cause = Phrase("sizes.refused", sizes)
    return Finding(taken.id, "deviates", detail=refused, cause=cause)


def _is_for_its_size(ex: Examination, geometry: Geometry) -> bool:
    """Return whether other sizes are accepted for its kind of shape, or no shape in any dtype."""
    if any(_takes(ex, shape, ex.dtype) for shape in _of_its_kind(ex, geometry)):
        return True
    every = [shape for each in _families(ex, geometry) for shape in each.values()]
    dtypes = [ex.dtype, *(name for name in ex.adapter.dtypes if name != ex.dtype)]
    return not any(_takes(ex, shape, name) for name in dtypes for shape in every)


def _families(ex: Examination, geometry: Geometry) -> Iterator[dict[str, Shape]]:
    """Yield the shapes by case family for each grid of the declared sizes, without "far"."""
    for grid in geometry.grids(layer=not ex.adapter.projections_supplied):
        yield {
            name: grid.shape(name, small)
            for name, small in FAMILIES.items()
            if small.score in ex.adapter.scores and name != "far"
        }


def _of_its_kind(ex: Examination, geometry: Geometry) -> Iterator[Shape]:
    """Yield shapes that differ from the shape of the case only in their sizes."""

    def kind(shape: Shape) -> tuple[object, ...]:
        differ = shape.value_head_size != shape.head_size
        return shape.sharing, shape.bias, shape.score, shape.group > 1, differ

    for shapes in _families(ex, geometry):
        yield from (shape for shape in shapes.values() if kind(shape) == kind(ex.case.shape))
        own = shapes.get(ex.case.family, ex.case.shape)
        for other in shapes.values():
            queries, keys = other.query_length, other.key_length
            if queries == keys or own.sharing != "self":
                yield dataclasses.replace(
                    own, batch=other.batch, query_length=queries, key_length=keys
                )
            if ex.adapter.projections_supplied and (other.group > 1) == (own.group > 1):
                # The inputs of a layer have sizes that depend on its heads.
                yield dataclasses.replace(own, heads=other.heads, kv_heads=other.kv_heads)


def _takes(ex: Examination, shape: Shape, dtype: str) -> bool:
    def ask() -> bool:
        problem = rounded(assembled(shape, draw(shape, np.random.default_rng(0))), dtype)
        if ex.problem.heads_alone:
            problem = heads_alone(problem)
        try:
            ex.ask(problem, mode=dataclasses.replace(ex.mode, gradients=False))
        except (Unsupported, Raised):
            return False
        return True

    return ex.bench.answers.get(("takes", id(ex.adapter), shape, dtype, ex.mode.name), ask)
