"""The catalogue of cases on which every implementation is run.

`catalogue.toml` lists the cases, and `covering.toml` those that combine features.
`tests/test_cases_bind.py` tests that the answer of each case depends on each of its inputs, except
those that `Case.idle` names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from conformance.cases import patterns
from conformance.cases.case import FAMILIES, KEY_BIAS_IDLE, Case, StoredCase
from conformance.definition.dtypes import DTYPES, Array, BoolArray
from conformance.definition.features import FEATURES
from conformance.definition.geometry import LARGE, Fixed, Geometry, Grid, fixed_for, fixing
from conformance.definition.problem import ARRAY_NAMES, Causal
from conformance.errors import UnknownName

TABLES = (Path(__file__).with_suffix(".toml"), Path(__file__).with_name("covering.toml"))

ONE_KEY_IDLE = dict.fromkeys(
    ("query", "weights.query", "weights.query_bias", "weights.key", "key", "scale"),
    "with one key, every weight is 1 whatever query and key are",
)
ONE_VISIBLE_KEY_IDLE = {name: reason for name, reason in ONE_KEY_IDLE.items() if name != "key"}
SCALE_OF_0_IDLE = dict.fromkeys(
    ("query", "weights.query", "weights.query_bias", "weights.key", "weights.key_bias"),
    "with a scale of 0, every logit is 0 whatever query and key are",
)
_FEEL_KEY_BIAS = {
    name.split("_")[0] for one in FEATURES if one.feels_key_bias for name in one.drawn
}
"""The first words of the names of features with which the key bias affects the answer."""


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A table `[[case]]` in a file of `TABLES`, which stands for one case in each of its families.

    The comment at the top of `catalogue.toml` explains the fields.
    """

    name: str
    families: str
    why: str
    serves: list[str] = []
    also: dict[str, list[str]] = {}
    core: str = ""
    large: str = ""
    exchanged: str = ""
    mask: str = ""
    bias: str = ""
    regime: str = ""
    features: str = ""
    maskable: str = ""
    causal: Causal | None = None
    scale: float | None = None
    defined: bool = True
    tiled: bool = False
    wide: bool = False


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    case: list[_Entry]
    groups: dict[str, list[str]] = {}
    telling: list[str] = []


def _cases(entry: _Entry, groups: Mapping[str, list[str]]) -> Iterator[Case]:
    """Yield the cases of an entry, one for each of its shape families."""
    drawn = {
        kind: getattr(patterns, name)
        for kind in ("mask", "bias", "regime")
        if (name := getattr(entry, kind))
    }
    for family in entry.families.split():
        also = [names for families, names in entry.also.items() if family in families.split()]
        served = [name for names in (entry.serves, *also) for name in names]
        yield Case(
            name=entry.name,
            family=family,
            why=entry.why,
            causal=entry.causal,
            scale=entry.scale,
            defined=entry.defined,
            serves=frozenset(one for name in served for one in groups.get(name, [name])),
            idle=_idle(entry, family),
            core=family in entry.core.split(),
            large=family in entry.large.split(),
            tiled=entry.tiled,
            wide=entry.wide,
            exchanged=family in entry.exchanged.split(),
            maskable=family in entry.maskable.split(),
            features=tuple(getattr(patterns, name) for name in entry.features.split()),
            **drawn,
        )


def _idle(entry: _Entry, family: str) -> dict[str, str]:
    """Return the inputs that cannot affect the answer of a case in this family, with the reasons.

    The input "key" is among them only where it is not the same array as the value.
    """
    shape = FAMILIES[family]
    if family == "one-key":
        return ONE_KEY_IDLE | KEY_BIAS_IDLE
    if entry.scale == 0:
        return SCALE_OF_0_IDLE
    if shape.query_length == 1 and entry.causal == "top-left":
        return ONE_VISIBLE_KEY_IDLE | KEY_BIAS_IDLE
    if _FEEL_KEY_BIAS & {name.split("_")[0] for name in entry.features.split()}:
        return {}
    return KEY_BIAS_IDLE if shape.bias and shape.score == "scaled-dot" else {}


def catalogue() -> tuple[Case, ...]:
    """Return all cases except those that are used on grids only, sorted by shape family.

    Cases of one shape follow each other, so that frameworks compile for each shape only once.
    """
    return tuple(case for case in every_case() if not case.tiled)


@lru_cache(maxsize=1)
def _tables() -> list[_Table]:
    return [msgspec.toml.decode(path.read_bytes(), type=_Table) for path in TABLES]


@lru_cache(maxsize=1)
def most_telling() -> dict[str, int]:
    """Return the places of those cases that notice most mistakes, by "name/family"."""
    ranked = [case for table in _tables() for case in table.telling]
    return {case: place for place, case in enumerate(ranked)}


@lru_cache(maxsize=1)
def every_case() -> tuple[Case, ...]:
    """Return all cases, including those that are used on grids only, sorted by shape family."""
    order = list(FAMILIES)
    tables = _tables()
    cases = [
        case for table in tables for entry in table.case for case in _cases(entry, table.groups)
    ]
    assert len({case.id for case in cases}) == len(cases), "case ids must be unique"
    return tuple(sorted(cases, key=lambda case: order.index(case.family)))


def posed(
    case: Case,
    geometry: Geometry | None,
    *,
    layer: bool,
    page: int = 0,
    fixed: Fixed | None = None,
    numbers: Mapping[str, float] | None = None,
) -> tuple[Case, ...]:
    """Return the cases that a case turns into for what an implementation supports.

    With a geometry, the case is put on the geometry's first grid (a choice of sizes), or on all its
    grids if the case belongs to level "core". A case that is already on one of these grids is
    returned unchanged, as are cases from files and cases with the additive score, which has no
    tiles. If keys are in pages, tiles of keys are made at least as long as a page, unless the
    greatest length forbids it.

    Without a geometry, every size is supported. A case on a grid stays on it, with widths according
    to `layer`. A case without a grid keeps its sizes, unless it is only for grids (`Case.tiled`).
    If keys are in pages, a case of level "core" without a grid is also returned on a grid with
    lengths of several pages, with the same exceptions.

    If something is fixed for the implementation, cases are posed so, see `Fixed`, but for those
    from files and those whose numbers would exceed the range of float16. So are cases with a
    feature of which a number is fixed.

    Args:
        case: a case, on a grid or not.
        geometry: the sizes that the implementation declares, or None if it supports every size.
        layer: whether the implementation is a layer, which has its own projections.
        page: the number of keys in a page; 0 if keys are not in pages.
        fixed: what the implementation declares to be fixed in every call, or None.
        numbers: the numbers that its features fix, by fields of `Fixed`; see `Adapter.numbers`.
    """
    if numbers and not isinstance(case, StoredCase):
        fixed = fixing(fixed, **fixed_for(case.problem("float64"), numbers))
    if fixed is not None and case.fixed is None and not isinstance(case, StoredCase):
        made = case.with_fixed(fixed)
        case = made if not made.beside or _fits(made) else case
    has_grids = not isinstance(case, StoredCase) and case.shape.score != "additive"
    if geometry is None:
        if case.grid is not None:
            return (case.on(msgspec.structs.replace(case.grid, layer=layer)),)
        of_pages = Grid(head_size=PAGED_HEAD, tiles=(PAGED_ROWS, page), layer=layer)
        spread = (case.on(of_pages),) if page and case.core and has_grids else ()
        return spread if case.tiled else (case, *spread)
    grids = tuple(_at_least(page, grid) for grid in geometry.grids(layer=layer))
    if not has_grids or case.grid in grids:
        return (case,)
    return tuple(case.on(grid) for grid in (grids if case.core else grids[:1]))


@lru_cache(maxsize=1024)
def _fits(case: Case) -> bool:
    """Return whether float16 holds the numbers of a case."""
    with np.errstate(over="ignore"):
        problem = case.problem("float16")
        arrays = (problem.query, *problem.weights.named().values())
        return all(np.isfinite(array).all() for array in arrays)


def _at_least(page: int, grid: Grid) -> Grid:
    """Return the grid with tiles of keys at least as long as a page.

    If the greatest length of the grid is at most a page, return the grid unchanged.
    """
    queries, keys = grid.tiles
    if page <= keys or 0 < grid.greatest_length <= page:
        return grid
    return msgspec.structs.replace(grid, tiles=(queries, page))


PAGED_HEAD = PAGED_ROWS = 16
"""The head size and query tile of cases with paged keys if no geometry is declared."""


def large_cases() -> tuple[Case, ...]:
    """Return the cases of level "large", which include those of "core", on each grid in `LARGE`.

    Cases with the additive score are left out, because it has no tiles.
    """
    those = [case for case in every_case() if case.core or case.large]
    return tuple(
        case.on(grid) for grid in LARGE for case in those if case.shape.score != "additive"
    )


def case_of(name: str) -> Case:
    """Return the case with this id, on a grid and with what is fixed if the id says so.

    Raises:
        UnknownName: if there is no such case.
    """
    known = {case.id: case for case in every_case()}
    if name in known:
        return known[name]
    on_grid, _, after = name.partition("+")
    fixed = Fixed.parse(after)
    small, _, grid = on_grid.rpartition(".")
    found = Grid.parse(grid)
    case = known.get(on_grid) or (known.get(small) if found else None)
    if case is None or (after and fixed is None):
        raise UnknownName("case", name, known)
    case = case.with_fixed(fixed) if fixed else case
    return case if on_grid in known or found is None else case.on(found)


def find_cases(pattern: str) -> tuple[Case, ...]:
    """Return the case whose id is `pattern`, or else the cases whose ids contain or match it.

    Raises:
        UnknownName: if there is no such case.
    """
    with suppress(UnknownName):
        return (case_of(pattern),)
    cases = [case for case in every_case() if matches(case.id, pattern)]
    if not cases:
        raise UnknownName("case", pattern, (case.id for case in every_case()))
    return tuple(cases)


def matches(name: str, pattern: str) -> bool:
    """Return whether a name contains the pattern or matches it as a shell-style wildcard."""
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


GENERIC = ("cross", "gqa", "self", "separate", "additive", "additive-self")
"""Families of ordinary shapes, without sizes of 1, in the order of preference of `relatives`."""


@lru_cache(maxsize=1024)
def relatives(case: Case) -> tuple[tuple[Case, ...], ...]:
    """Return two groups of cases of the catalogue that pass the same arguments as `case`.

    The first group has cases in the families `GENERIC`, except the family of `case`; the second has
    other cases in that family. The most similar case of a group comes first. All these cases have
    ordinary inputs or the regime of `case`, and if `case` is on a grid, they are put on this grid.
    If `case` does not belong to the catalogue, return ().
    """
    if type(case) is not Case:
        return ()
    small = dataclasses.replace(case, grid=None)

    def passed(one: Case) -> tuple[object, ...]:
        return (
            _broadcast(one.problem("float64").mask),
            _broadcast(one.problem("float64").attn_bias),
            one.causal,
            # Aligned to either end, the triangle is the same.
            one.causal is not None and one.shape.query_length == one.shape.key_length,
            one.scale is None,
            one.shape.score,
            one.shape.bias or not case.shape.bias,
            one.regime in (None, case.regime),
            one.features,
        )

    similar = [
        one
        for one in catalogue()
        if one.defined and one.id != small.id and passed(one) == passed(small)
    ]
    elsewhere = sorted(
        (one for one in similar if one.family in GENERIC and one.family != case.family),
        key=lambda one: (one.name != case.name, GENERIC.index(one.family)),
    )
    same_family = [one for one in similar if one.family == case.family]
    same_family.sort(key=lambda one: one.regime is not None)
    groups = (tuple(elsewhere), tuple(same_family))
    if case.grid is None:
        return groups
    return tuple(tuple(one.on(case.grid) for one in group) for group in groups)


def _broadcast(mask: Array | BoolArray | None) -> tuple[bool, ...] | None:
    """Return whether the heads axis and the query axis of a mask or bias have size 1.

    An implementation may accept some of these combinations only. Return None if `mask` is None.
    """
    return None if mask is None else tuple(size == 1 for size in mask.shape[1:3])


@lru_cache(maxsize=1)
def catalogue_hash() -> str:
    """Return a hash of the ids and the numbers of the cases in `catalogue()`, in all dtypes."""
    digest = hashlib.sha256()
    for case in catalogue():
        for dtype in DTYPES:
            problem = case.problem(dtype)
            digest.update(f"{case.id} {dtype} {problem.shape} {problem.scale}".encode())
            inputs = {name: getattr(problem, name) for name in ARRAY_NAMES}
            arrays = {**problem.weights.named(), **inputs}
            arrays["mask"] = problem.allowed
            arrays |= problem.feature_arrays()
            if problem.features:
                digest.update(problem.digest().encode())
            for name, array in arrays.items():
                if array is not None:
                    digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()[:16]
