"""What findings say has one wording."""

from __future__ import annotations

import gzip
import re
import string
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from conformance.records.findings import NOTHING, Phrase
from conformance.words import TABLES, advice, causes, say, tables, worded, wordings

PUBLISHED = Path(__file__).parent.parent / "reports" / "published" / "records"
RECORDS = sorted(PUBLISHED.glob("*.json.gz"))

pytestmark = pytest.mark.skipif(not RECORDS, reason="needs a checkout")


class _Entry(msgspec.Struct):
    subject: Phrase
    value: Phrase = NOTHING
    declared: Phrase = NOTHING


class _Finding(msgspec.Struct):
    value: Phrase = NOTHING


class _Result(msgspec.Struct):
    entries: list[_Entry] = []
    findings: list[_Finding] = []


class _Record(msgspec.Struct):
    """What is of interest here of a record; to read all takes four times as long."""

    results: list[_Result]


def said() -> Iterator[Phrase]:
    """All that published records say of subjects and values."""
    for file in RECORDS:
        for result in msgspec.json.decode(gzip.decompress(file.read_bytes()), type=_Record).results:
            for entry in result.entries:
                yield from (entry.subject, entry.value, entry.declared)
            yield from (finding.value for finding in result.findings)


CODE = re.compile(r"−?[\d.]+(e[+−]\d+)?( and \d+)?|b?float\d+|Geometry\(.*\)")


def is_number(phrase: Phrase) -> bool:
    """Whether it is a number or code, as sizes and dtypes are, and no sentence."""
    told = str(phrase.arguments.get("text", ""))
    return phrase.id == "text" and bool(CODE.fullmatch(told))


def ids(phrase: Phrase) -> Iterator[str]:
    """Of the phrase and of all that it is made of."""
    yield phrase.id
    for value in phrase.arguments.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Phrase):
                yield from ids(part)


def test_an_id_has_one_wording():
    """Phrases are looked up in one table after the other."""
    names = [name for table in TABLES for name in tables()[table]]
    assert sorted(names) == sorted(set(names))


def test_all_that_published_records_say_has_a_wording():
    sentences = {phrase for phrase in set(said()) - {NOTHING} if not is_number(phrase)}
    known = {name for phrase in sentences for name in ids(phrase)}
    assert len(known) > 100
    assert known <= wordings().keys()
    assert "text" not in known, "a text in place of a phrase"


def test_an_entry_of_a_card_and_a_cause_have_different_ids():
    assert not tables()["entries"].keys() & tables()["causes"].keys()


def test_a_phrase_is_printed_with_its_text_and_read_back():
    phrase = Phrase("leak.reaches", {"places": [Phrase("place.output")]})
    printed = msgspec.json.decode(msgspec.json.encode(worded(phrase)))
    assert printed.pop("text") == "reaches the output"
    assert msgspec.convert(printed, Phrase) == phrase
    assert worded(NOTHING) is None


def test_an_id_of_a_newer_suite_stands_for_itself():
    phrase = Phrase("newer.finding", {"size": 2, "of": Phrase("other")})
    assert say(phrase) == str(phrase) == "newer.finding(of=other, size=2)"
    assert say(Phrase("mask.meaning", {"unknown": 1})) == "mask.meaning(unknown=1)"


def test_advice_is_of_causes_and_asks_for_no_more_than_they_have():
    for cause, template in [*tables()["advice"].items(), *tables()["advice for arrays"].items()]:
        assert cause in causes(), cause
        asked = {name for _, name, _, _ in string.Formatter().parse(template) if name}
        known = {name for _, name, _, _ in string.Formatter().parse(tables()["causes"][cause])}
        assert asked <= known, cause
    assert advice(Phrase("projection.transposed", {"of": "query"})).startswith(
        "transpose the query weight"
    )
    assert advice(Phrase("projection.transposed")) == "", "an argument that is not there"
    assert advice(Phrase("state.changes")) == advice(NOTHING) == ""


def test_advice_for_arrays_asks_for_no_declaration():
    ours, theirs = tables()["advice"], tables()["advice for arrays"]
    assert theirs.keys() <= ours.keys()
    for cause in ours:
        # A geometry, a layer with a state: no arrays show these.
        if cause != "sizes.refused" and not cause.startswith("stateful."):
            template = theirs.get(cause, ours[cause])
            assert not {"adapter", "declare"} & {*re.findall(r"\w+", template)}, cause
    aligned = Phrase("causal.aligned", {"alignment": "top-left"})
    assert "--causal top-left" in advice(aligned, of_arrays=True)
    assert "in the adapter" in advice(aligned)
    missing = Phrase("scale.missing")
    assert advice(missing, of_arrays=True) == advice(missing) != ""


def test_help_reads_no_wording():
    code = """
import conformance
from conformance import cli, words
from conformance.records import record
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert not words.tables.cache_info().currsize
assert words.tables()["entries"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_data_files_are_in_the_wheel():
    """What is read beside a module is declared as data of its package."""
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in (("conformance", "."), ("conformance.cases", "cases")):
        patterns = settings["package-data"][package]
        data = [*(root / "conformance" / folder).glob("*.toml")]
        data += (root / "conformance" / folder).glob("*.json")
        assert data
        assert all(any(file.match(pattern) for pattern in patterns) for file in data)


def test_equal_phrases_have_equal_hashes():
    one, other = (
        Phrase("size", {"keys": 1, "of": ["a", 2]}),
        Phrase("size", {"of": ["a", 2.0], "keys": 1.0}),
    )
    assert one == other
    assert hash(one) == hash(other)
