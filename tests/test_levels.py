"""Levels: what each asks for, in which order, and what it still notices."""

from __future__ import annotations

from collections import defaultdict

import pytest
from mutants.contestant import Contestant
from mutants.run import Examiner
from mutants.zoo import MUTANTS

from conformance import attention_function, examine
from conformance.adapter.base import Mode
from conformance.cases.catalogue import catalogue, most_telling
from conformance.definition.dtypes import DTYPES
from conformance.errors import ConformanceError
from conformance.reports.publishing import Wanted, publish
from conformance.running import level_of
from conformance.running.selection import Selection, telling
from conformance.running.session import Inquiry, Item

LEVELS = ("first", "core", "default", "full")


def rows(level, adapter=None):
    return Selection(level=level).rows([adapter or Contestant()], "cpu")


def items(level, adapter=None):
    return [row for row in rows(level, adapter) if isinstance(row, Item)]


def pairs(items):
    """Each dtype and mode together, and each beside the name, family and features of a case."""
    found = set()
    for item in items:
        if item.refused:
            continue
        case = item.asked
        for part in (case.name, case.family, *(each.__name__ for each in case.features)):
            found |= {(part, item.dtype), (part, item.mode.name)}
        found.add((item.dtype, item.mode.name))
    return found


def test_each_level_asks_for_more():
    first, core, default, full = ({row.id for row in rows(n)} for n in LEVELS)
    assert first | core | default <= full
    assert len(first) < len(core) < len(default) < len(full) / 2


def test_the_default_asks_each_case():
    asked = {item.asked.id for item in items("default")}
    assert asked == {item.asked.id for item in items("full")}
    accepted = {item.asked.id for item in items("full") if not item.refused}
    assert {item.asked.id for item in items("default") if not item.refused} == accepted


def test_the_default_covers_what_full_covers():
    assert pairs(items("default")) == pairs(items("full"))


def test_numbers_near_the_limits_are_asked_in_every_dtype():
    asked = defaultdict(set)
    for item in items("default"):
        if item.asked.regime is not None:
            asked[item.asked].add(item.dtype)
    assert len(asked) > 10
    assert all(dtypes == {*filter(one.posed_in, DTYPES)} for one, dtypes in asked.items())


class WithoutFloat32(Contestant):
    dtypes = ("bfloat16", "float16")


def test_without_float32_each_case_is_still_asked():
    asked = {item.asked.id for item in items("default", WithoutFloat32())}
    assert asked == {item.asked.id for item in items("full")}


class NoMasks(Contestant):
    mask_arguments = ()
    modes = (Mode("only", {"train": False, "fused": False}),)

    def __init__(self):
        super().__init__("no-masks")
        self.causal_flag = None


@pytest.mark.parametrize("adapter", [Contestant, NoMasks])
def test_the_first_items_are_few_and_accepted(adapter):
    chosen = items("first", adapter())
    assert 4 <= len(chosen) <= 40
    assert not any(item.refused for item in chosen)
    assert not [row for row in rows("first", adapter()) if isinstance(row, Inquiry)]


@pytest.mark.parametrize(
    ("declared", "asked"),
    [
        (("float16",), {"float16"}),
        (("float64", "float16"), {"float64", "float16"}),
        (("float64", "float32", "float16"), {"float32", "float16"}),
    ],
)
def test_core_is_asked_in_the_dtypes_that_there_are(declared, asked):
    @attention_function("numpy", dtypes=declared)
    def some(query, key, value):
        raise AssertionError

    rows = Selection(level="core").rows([some], "cpu")
    assert {row.dtype for row in rows} == asked


def test_every_run_begins_with_the_most_telling_items():
    planned = sorted(rows("default"), key=telling)
    names = [row.asked.off_grid for row in planned[:20]]
    order = {name: place for place, name in enumerate(most_telling())}
    assert [order[name] for name in names] == sorted(order[name] for name in names)
    assert all(row.mode.name == "train" for row in planned[:20])


def test_the_most_telling_cases_exist():
    ids = {case.id for case in catalogue()}
    assert most_telling().keys() <= ids


def test_what_narrows_a_run_makes_it_full():
    assert level_of(None, [], []) == "default"
    assert level_of(None, [], ["float64"]) == "full"
    assert level_of("core", ["mask"]) == "core"


def test_the_level_is_in_the_record():
    outcome = examine(Contestant(), level="first")
    assert outcome.record.header.provenance.level == "first"
    assert (
        examine(Contestant(), cases="plain/no-mask/self").record.header.provenance.level == "full"
    )


def test_pages_are_not_made_of_a_part(tmp_path):
    file = tmp_path / "mine.json"
    examine(Contestant(), level="default", dtypes="float32", cases="plain").save(file)
    wanted = Wanted([file], [], [], [], None, tmp_path / "out", tmp_path / "pages", [])
    with pytest.raises(ConformanceError, match="its level is 'default'"):
        publish(wanted)


@pytest.mark.sample(200)
@pytest.mark.parametrize(
    "mutant", [m for m in MUTANTS if m.level == "full"][::12], ids=lambda mutant: mutant.name
)
def test_the_default_notices_what_full_notices(mutant):
    """`python -m mutants --levels` prints the shares of all levels by chapter."""
    assert Examiner().at_level(mutant, "default")[0]
