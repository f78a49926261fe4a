"""What findings say has one wording, and the records of schema 1 said it in the same words."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

from conformance.records import schema1
from conformance.records.findings import PREFIX
from conformance.records.phrase import NOTHING, Phrase
from conformance.records.record import read
from conformance.words import say, worded, wordings

PUBLISHED = Path(__file__).parent.parent / "reports" / "published" / "records"
RECORDS = sorted(PUBLISHED.glob("*.json.gz"))

pytestmark = pytest.mark.skipif(not RECORDS, reason="needs a checkout")


@cache
def said() -> frozenset[tuple[str, str, str, Phrase]]:
    """Table of schema 1, its key, the id of the subject and the phrase, of published records."""
    found: set[tuple[str, str, str, Phrase]] = set()
    for file in RECORDS:
        for result in read(file).results:
            experiment = result.case.removeprefix(PREFIX)
            for entry in result.entries:
                about = entry.subject.id
                found.add(("subject", experiment, about, entry.subject))
                found.add(("value", experiment, about, entry.value))
                found.add(("value", experiment, about, entry.declared))
            for finding in result.findings:
                found.add(("observed", finding.requirement, "", finding.value))
    return frozenset(item for item in found if item[3] != NOTHING)


def ids(phrase: Phrase) -> Iterator[str]:
    """Of the phrase and of all that it is made of."""
    yield phrase.id
    for value in phrase.arguments.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Phrase):
                yield from ids(part)


def test_all_that_published_records_say_has_a_wording():
    known = {name for *_, phrase in said() for name in ids(phrase)}
    assert len(known) > 100
    assert known <= wordings().keys()
    assert "text" not in known, "a sentence of schema 1 that no template fits"


def test_the_sentences_of_schema_1_are_read_as_what_they_say():
    for table, key, about, phrase in said():
        read_again = {
            "subject": lambda text, key=key: schema1.subject(key, text),
            "value": lambda text, key=key, about=about: schema1.value(key, text, about),
            "observed": lambda text, key=key: schema1.observed(key, text),
        }[table]
        assert read_again(say(phrase)) == phrase


def test_a_sentence_that_no_template_fits_stays_as_it_is():
    for text in ("what nobody wrote", "mask, bool", "<b>", "NaN: nowhere"):
        phrase = schema1.value("leaks", text, "leak")
        assert phrase == Phrase("text", {"text": text})
        assert say(phrase) == text


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


def test_help_reads_no_wording():
    code = """
import conformance
from conformance import cli, words
from conformance.records import record, schema1
try:
    cli.main(["--help"])
except SystemExit:
    pass
assert not words.tables.cache_info().currsize
assert not schema1._frozen.cache_info().currsize
assert words.tables()["entries"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_data_files_are_in_the_wheel():
    """What is read beside a module is declared as data of its package."""
    root = Path(__file__).parent.parent
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package, folder in (("conformance", "."), ("conformance.records", "records")):
        patterns = settings["package-data"][package]
        data = [*(root / "conformance" / folder).glob("*.toml")]
        data += (root / "conformance" / folder).glob("*.json")
        assert data
        assert all(any(file.match(pattern) for pattern in patterns) for file in data)
