"""The baselines of the built-in implementations: every entry is about something, and says why."""

from __future__ import annotations

import configparser
import os
import re
import runpy
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from looped import for_each
from test_docs import DOCS, ROOT, anchors

from conformance.adapter.loading import load, registered
from conformance.cases.catalogue import catalogue, large_cases
from conformance.experiments import EXPERIMENTS
from conformance.long.ladder import PROBLEMS
from conformance.records.long import PREFIX
from conformance.reports.gate.baseline import KINDS, fits, read_baseline
from conformance.requirements import REQUIREMENTS

FILES = sorted((ROOT / "reports" / "baselines").glob("*.toml"))
EXAMPLE = DOCS / "examples" / "known.toml"


def _entries(files):
    return [
        pytest.param(entry, id=f"{file.stem}-{entry.number}")
        for file in files
        for entry in read_baseline(file).entries
    ]


ENTRIES = _entries(FILES)


@for_each(entry=[*ENTRIES, *_entries([EXAMPLE])])
def test_every_pattern_finds_something(entry):
    known = {
        "requirement": [item.id for item in REQUIREMENTS],
        "case": [
            *(item.id for item in (*catalogue(), *large_cases(), *EXPERIMENTS)),
            *(f"{PREFIX}{problem.replace(' ', '-')}/64x4096" for problem in PROBLEMS),
        ],
        "implementation": list(registered()),
    }
    for place, names in known.items():
        for pattern in getattr(entry, place):
            assert any(fits((pattern.removeprefix("!"),), name) for name in names), pattern


LEANS = re.compile(
    r"^(And|So|But|Likewise|The same|As above)\b|\bas above\b|\bonce more\b", re.IGNORECASE
)


@for_each(entry=ENTRIES)
def test_no_reason_leans_on_the_entry_before_it(entry):
    """A report lists reasons by kind and number of findings, and a page those of one library."""
    assert not LEANS.search(entry.reason), entry.reason


def test_a_reason_that_leans_on_another_is_noticed():
    assert all(map(LEANS.search, ("And so is what it returns.", "The scale is float32, as above.")))


@for_each(entry=[*ENTRIES, *_entries([EXAMPLE])])
def test_every_entry_has_a_reason_and_a_link_that_leads_somewhere(entry):
    assert entry.has_reason
    if not entry.link.startswith("https://"):
        path, _, anchor = entry.link.partition("#")
        assert (ROOT / path).is_file()
        assert not anchor or anchor in anchors(ROOT / path)


TOX = configparser.ConfigParser(interpolation=None)
TOX.read(ROOT / "tox.ini")
EVERYBODY = {
    name: [part.strip() for part in line.split(":")] for name, line in TOX["everybody"].items()
}
"""Environment to its extras, its implementations and, if it has another name, its baseline."""


def test_every_implementation_has_an_environment_that_is_a_gate():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    examined, baselines = [], set()
    for name, (extras, implementations, *baseline) in EVERYBODY.items():
        assert extras in project["optional-dependencies"] or not extras
        baselines |= {*(baseline or [name])}
        examined += implementations.split()
    # No environment on a CPU can run the others.
    on_cpus = [name for name in registered() if not getattr(load(name), "gpus_only", False)]
    assert sorted(examined) == sorted(on_cpus)
    # Without a file, nothing is known to deviate.
    assert {file.stem for file in FILES} <= baselines


STUBS = {
    "tox.config.loader.memory": {"MemoryLoader": dict},
    "tox.config.sets": {"ConfigSet": object},
    "tox.plugin": {"impl": lambda function: function},
    "tox.session.state": {"State": object},
    "tox.execute.api": {"Outcome": object},
    "tox.tox_env.api": {"ToxEnv": object},
}


def test_tox_makes_its_environments_of_that_table(monkeypatch):
    """As tox, which need not be installed here, calls the functions of toxfile.py."""
    for module, names in STUBS.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    monkeypatch.setenv("EVERYBODY", "")
    monkeypatch.setenv("EXPLORED", "")
    monkeypatch.setenv("SIZES", "")
    monkeypatch.delenv("EXPLORE_SECONDS", raising=False)
    monkeypatch.setenv("LONG_SECONDS", "9")
    monkeypatch.setenv("WORKERS", "3")
    monkeypatch.setattr(sys, "argv", ["tox", "-e", "torch"])
    toxfile = runpy.run_path(str(ROOT / "toxfile.py"))
    made = defaultdict(list)
    options = SimpleNamespace(labels=[])
    conf = SimpleNamespace(
        pos_args=lambda _: ("-k", "a or b"), memory_seed_loaders=made, options=options
    )
    toxfile["tox_add_core_config"]({"work_dir": "/made"}, SimpleNamespace(conf=conf))
    explored, sizes = ([f"{name}-{kind}" for name in EVERYBODY] for kind in ("explored", "sizes"))
    every = sorted([*EVERYBODY, *explored, *sizes])
    assert sorted(made) == sorted(toxfile["tox_extend_envs"]()) == every
    assert os.environ["EXPLORED"].split(",") == explored
    assert os.environ["SIZES"].split(",") == sizes
    assert os.environ["EVERYBODY"].split(",") == list(EVERYBODY)
    for name, (extras, implementations, *baseline) in EVERYBODY.items():
        (section,) = made[name]
        assert (section["extras"], section["depends"]) == ([extras] if extras else [], "begin")
        assert section["labels"] == ["everybody", "published"]
        (command,) = section["commands"]
        assert command == (
            f"mha-conformance gate {implementations} --baseline "
            f"reports/baselines/{(baseline or [name])[0]}.toml "
            f"--record reports/records/{name}.json -n 3 -k 'a or b'"
        )
        (section,) = made[f"{name}-explored"]
        assert (section["depends"], section["labels"]) == (name, ["published"])
        installed = str(Path("/made", name, "bin", "mha-conformance"))
        assert section["commands"] == [
            f"- {installed} explore {implementations} --every-mode --seconds 60 "
            "--record reports/published/explored"
        ]
        (section,) = made[f"{name}-sizes"]
        assert (section["depends"], section["package"]) == (name, "skip")
        large, *long = section["commands"]
        assert large.startswith(f"- {installed} run {implementations} --level large ")
        assert [command.split()[:4] for command in long] == [
            ["-", installed, "long", one] for one in implementations.split()
        ]
        assert all("--seconds 9 --record reports/published/long" in command for command in long)


@pytest.mark.parametrize(
    ("arguments", "several"),
    [
        ("", True),
        ("-- --level full", True),
        ("-m everybody", True),
        ("-e torch", False),
        ("run -e torch", False),
        ("-e tests -- -m night", False),
        ("config", False),
    ],
)
def test_environments_run_side_by_side_where_there_are_several(monkeypatch, arguments, several):
    for module, names in STUBS.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    for variable in ("TOX_PARALLEL", "TOX_PARALLEL_NO_SPINNER"):
        # What is set by toxfile.py is taken back with it.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setattr(sys, "argv", ["tox", *arguments.split()])
    toxfile = runpy.run_path(str(ROOT / "toxfile.py"))
    assert toxfile["SIDE_BY_SIDE"] == several
    assert ("TOX_PARALLEL" in os.environ) == several


def test_a_line_of_progress_says_how_far_each_environment_is(monkeypatch, tmp_path):
    for module, names in STUBS.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    monkeypatch.setattr(sys, "argv", ["tox", "-e", "torch"])
    toxfile = runpy.run_path(str(ROOT / "toxfile.py"))
    progress = toxfile["PROGRESS"]
    # No report is written again at once, so that an unchanged run writes few.
    assert not progress.wants_report()
    progress._reported -= toxfile["EVERY"]
    assert [progress.wants_report(), progress.wants_report()] == [True, False]
    progress.state = SimpleNamespace(envs=SimpleNamespace(iter=lambda: ["begin", "ours", "flax"]))
    progress.doing.update(begin="ended", ours="installing")
    assert progress.line() == "0:00  ours installing; 0 of 2 environments have ended"
    results = [b"{}", b'{"findings":[{"verdict":"deviates"}]}']
    journal = tmp_path / "ours.json.journal"
    journal.write_bytes(b"\n".join([b'{"planned":1200}', *results]) + b"\n")
    assert progress.far("ours", tmp_path) == "2 of 1,200 items, 1 deviate"
    # This one was left by an earlier run, and of that one there is none yet.
    os.utime(journal, (0, 0))
    assert progress.far("ours", tmp_path) == progress.far("flax", tmp_path) == "running"


def test_the_default_is_a_part_of_everybody():
    default = re.split(r",\s*", TOX["tox"]["env_list"])
    assert default[0] == "begin"
    assert default[-1] == "report"
    assert set(default[1:-1]) < set(EVERYBODY)


def test_versions_are_no_part_of_the_default_and_have_a_record_each():
    sections = [name for name in TOX.sections() if "versions" in TOX[name].get("labels", "")]
    assert sections
    for name in sections:
        commands = TOX[name]["commands"]
        assert "{[versions]run}" in commands
        assert "{[versions]told}" in commands
        words = set(commands.split()) - {"{[versions]run}", "{[versions]told}"}
        assert words <= set(registered())
    assert "reports/records/versions/{env_name}.json" in TOX["versions"]["told"]
    assert TOX["versions"]["environments"].split(",") == [
        name for section in sections for name in _expanded(section.removeprefix("testenv:"))
    ]


def _expanded(name):
    """The environments of a section: "a-{b,c}" are a-b and a-c."""
    start, _, choices = name.partition("{")
    return [start + choice for choice in choices.rstrip("}").split(",")]


@for_each(entry=ENTRIES)
def test_every_entry_speaks_of_implementations_by_name(entry):
    """All files are read together where deviations are sorted."""
    assert entry.implementation


@for_each(entry=ENTRIES)
def test_every_entry_is_sorted_and_a_defect_has_a_script(entry):
    assert entry.kind in KINDS
    if entry.kind == "defect":
        assert (ROOT / entry.reproduction).is_file()
