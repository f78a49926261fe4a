"""The baselines of the built-in implementations: every entry is about something, and says why."""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path

import pytest
from test_docs import DOCS, ROOT, anchors

from conformance.cases.catalogue import catalogue
from conformance.gate.baseline import fits, read_baseline
from conformance.interface.loading import registered
from conformance.probes import EXPERIMENTS
from conformance.requirements import REQUIREMENTS

FILES = sorted((ROOT / "reports" / "baselines").glob("*.toml"))
FILES += [DOCS / "examples" / "known.toml"]
ENTRIES = [
    pytest.param(entry, id=f"{file.stem}-{entry.number}")
    for file in FILES
    for entry in read_baseline(file).entries
]


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_pattern_finds_something(entry):
    known = {
        "requirement": [item.id for item in REQUIREMENTS],
        "case": [item.id for item in (*catalogue(), *EXPERIMENTS)],
        "implementation": list(registered()),
    }
    for place, names in known.items():
        for pattern in getattr(entry, place):
            assert any(fits((pattern.removeprefix("!"),), name) for name in names), pattern


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_has_a_reason_and_a_link_that_leads_somewhere(entry):
    assert entry.has_reason
    if not entry.link.startswith("https://"):
        path, _, anchor = entry.link.partition("#")
        assert (ROOT / path).is_file()
        assert not anchor or anchor in anchors(ROOT / path)


def test_every_environment_of_tox_is_a_gate():
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environments = re.split(r",\s*", tox["tox"]["env_list"])
    examined = set()
    for name in environments:
        words = shlex.split(tox[f"testenv:{name}"]["commands"])
        if name in ("begin", "report"):
            continue
        assert words[:2] == ["mha-conformance", "gate"]
        examined |= {word for word in words if word in registered()}
        assert Path(ROOT, words[words.index("--baseline") + 1]) in FILES
        assert f"reports/records/{name}.json" in words
    assert examined == set(registered())
