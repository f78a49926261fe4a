"""The action and the GitLab template: what they run, run here by a very small runner of ours."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import children
import pytest
import yaml

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
GITLAB = yaml.safe_load((ROOT / "ci" / "gitlab.yml").read_text(encoding="utf-8"))
NARROW = "--dtype float32 --case mask/key-padding/cross --no-isolate"

MINE = """
import numpy as np
from conformance import MaskArgument, attention_function


def attend(query, key, value, visible):
    logits = (query * query.shape[-1] ** -0.5) @ key.swapaxes(-1, -2)
    logits = np.where(visible, logits, -np.inf)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True) @ value


@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"),
                    name="mine")
def right(query, key, value, mask=True):
    return attend(query, key, value, mask)


@attention_function("numpy", MaskArgument("mask", "batch heads query key", true="attends"),
                    name="mine")
def wrong(query, key, value, mask=False):
    return attend(query, key, value, ~np.asarray(mask))
"""

KNOWN = """
[[known]]
implementation = "mine"
verdict = "deviates"
requirement = ["output.*", "mask.*"]
cause = "mask.inverted"
reason = "Until the next release."
"""


@dataclass
class Step:
    """What a step did."""

    code: int
    out: str


class Runner:
    """A folder with a program, and stand-ins for what a build installs."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "mine.py").write_text(MINE)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._program(
            "mha-conformance", f'exec {shlex.join(children.python("-m", "conformance"))} "$@"'
        )
        # There is no network here, and the suite is installed: what pip is told is written down.
        self._program("python", 'shift 2; printf "%s\\n" "$@" > "$PIP_TOLD"')
        for name in ("summary", "output"):
            (folder / name).touch()

    def _program(self, name, text):
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def run(self, text, *shell, **env):
        own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "MHA"))}
        own |= {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(self.folder / "summary"),
            "GITHUB_OUTPUT": str(self.folder / "output"),
            "PIP_TOLD": str(self.folder / "pip"),
            "OMP_NUM_THREADS": "1",
            "CI": "true",
        }
        done = subprocess.run(
            [*shell, text], cwd=self.folder, env=own | env, capture_output=True, text=True,
            timeout=300,
        )  # fmt: skip
        return Step(done.returncode, done.stdout + done.stderr)

    def github(self, **inputs):
        """The steps of the action, as GitHub runs them; outputs of the action."""
        given = {name: str(own.get("default", "")) for name, own in ACTION["inputs"].items()}
        given |= inputs
        steps, failed = {}, False
        for step in ACTION["runs"]["steps"]:
            if failed and "!cancelled()" not in step.get("if", ""):
                continue
            assert "${{" not in step["run"], "what is put into a script could be a command"
            env = {name: expand(value, given) for name, value in step.get("env", {}).items()}
            bash = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c")
            assert step["shell"] == "bash"
            steps[step["name"]] = done = self.run(step["run"], *bash, **env)
            failed |= done.code != 0
        return steps

    def gitlab(self, **variables):
        """The job, as GitLab runs it: the script ends at the first failure."""
        job = GITLAB[".mha-conformance"]
        own = {name: str(value) for name, value in job["variables"].items()} | variables
        script = self.run("\n".join(["set -eo pipefail", *job["script"]]), "bash", "-c", **own)
        after = self.run("\n".join(job["after_script"]), "sh", "-c", **own)
        return script, after


def expand(text, inputs):
    known = {f"inputs.{name}": value for name, value in inputs.items()}
    known["github.action_path"] = "/the/suite"
    return re.sub(r"\$\{\{ ([\w.]+) \}\}", lambda found: known[found[1]], text)


@pytest.fixture
def runner(tmp_path):
    return Runner(tmp_path)


def junit(path):
    root = ET.parse(path).getroot()
    return {name: int(root.get(name)) for name in ("tests", "failures", "skipped")}


@pytest.mark.night
def test_the_action_is_green_where_nothing_deviates(runner):
    steps = runner.github(implementation="mine.py:right", arguments=NARROW, install=". numpy")
    assert [step.code for step in steps.values()] == [0, 0, 0], steps
    assert (runner.folder / "pip").read_text().split() == ["install", "/the/suite", ".", "numpy"]
    assert "| `mine` | 1 |" in (runner.folder / "summary").read_text()
    output = runner.folder / "conformance-results"
    assert json.loads((output / "badge.json").read_text())["message"] == "1 conforms"
    assert junit(output / "junit.xml") == {"tests": 1, "failures": 0, "skipped": 0}
    assert (output / "report.html").read_text().startswith("<!doctype html>")
    assert (
        runner.folder / "output"
    ).read_text() == "record=conformance-results/record.narrowed.json\n"
    assert "::error" not in steps["Report"].out


def test_the_action_is_red_where_something_does_and_says_what(runner):
    steps = runner.github(implementation="mine.py:wrong", arguments=NARROW)
    assert [step.code for step in steps.values()] == [0, 1, 0], steps
    assert "::error file=mine.py,title=mine%3A output.equals-definition::" in steps["Report"].out
    assert "mask inverted" in (runner.folder / "summary").read_text()


@pytest.mark.night
def test_the_action_takes_a_baseline_and_an_earlier_record(runner):
    runner.github(implementation="mine.py:right", arguments=NARROW, output="before")
    (runner.folder / "known.toml").write_text(KNOWN)
    steps = runner.github(
        implementation="mine.py:wrong",
        arguments=NARROW,
        baseline="known.toml",
        previous="before/record.narrowed.json",
    )
    assert [step.code for step in steps.values()] == [0, 0, 0], steps
    text = (runner.folder / "summary").read_text()
    assert "### Since `before/record.narrowed.json`" in text
    assert "**✗ Worse**" in text
    assert "::error" not in steps["Report"].out


@pytest.mark.night
def test_an_earlier_record_that_is_not_there_is_no_mistake(runner):
    steps = runner.github(
        implementation="mine.py:right", arguments=NARROW, previous="cache/record.json"
    )
    assert [step.code for step in steps.values()] == [0, 0, 0], steps


def test_what_the_action_is_given_is_never_a_command(runner):
    trap = "$(touch trapped) `touch trapped` ;touch trapped"
    steps = runner.github(
        **{name: trap for name in ACTION["inputs"] if name != "output"}, output="a b$(touch c)"
    )
    assert steps["Examine"].code == 2
    assert not (runner.folder / "trapped").exists()
    assert not (runner.folder / "c").exists()


@pytest.mark.night
def test_the_job_for_gitlab(runner):
    own = {"MHA_ARGUMENTS": NARROW, "MHA_INSTALL": "mha-conformance[torch] einops"}
    script, after = runner.gitlab(MHA_IMPLEMENTATION="mine.py:right", **own)
    assert (script.code, after.code) == (0, 0), (script, after)
    assert (runner.folder / "pip").read_text().split()[1:] == own["MHA_INSTALL"].split()
    output = runner.folder / "conformance-results"
    (output / "record.narrowed.json").rename(runner.folder / "before.json")
    (output / "record.narrowed.safetensors").unlink(missing_ok=True)
    script, after = runner.gitlab(
        MHA_IMPLEMENTATION="mine.py:wrong", MHA_PREVIOUS="before.json", **own
    )
    assert (script.code, after.code) == (1, 0), (script, after)
    assert junit(output / "junit.xml") == {"tests": 1, "failures": 1, "skipped": 0}
    assert "### Since `before.json`" in (output / "summary.md").read_text()


@pytest.mark.night
def test_gitlab_keeps_expected_values(runner):
    job = GITLAB[".mha-conformance"]
    folder = runner.folder / job["cache"]["paths"][0]
    named = job["variables"]["MHA_CONFORMANCE_CACHE"]
    assert named.replace("$CI_PROJECT_DIR", str(runner.folder)) == str(folder)
    narrow = NARROW.replace("mask/key-padding/cross", "plain/no-mask/long")
    own = {"MHA_IMPLEMENTATION": "mine.py:right", "MHA_ARGUMENTS": narrow}
    times = []
    for _ in range(2):
        script, _ = runner.gitlab(**own, MHA_CONFORMANCE_CACHE=str(folder))
        assert script.code == 0, script
        times.append({path.name: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")})
        shutil.rmtree(runner.folder / "conformance-results")
    # What was kept is read, and not computed and written again.
    assert times[0]
    assert times[0] == times[1]


@pytest.mark.night
def test_jobs_of_gitlab_that_ask_a_part_each(runner):
    own = {name: str(value) for name, value in GITLAB[".mha-conformance"]["variables"].items()}
    own |= {"MHA_IMPLEMENTATION": "mine.py:right", "CI_NODE_TOTAL": "2"}
    jobs = [(".mha-conformance-part", {"CI_NODE_INDEX": number}) for number in "12"]
    own["MHA_ARGUMENTS"] = "--no-isolate --dtype float32 --case mask/per-head --case plain"
    for name, variables in (*jobs, (".mha-conformance-whole", {})):
        script = "\n".join(["set -eo pipefail", *GITLAB[name]["script"]])
        done = runner.run(script, "bash", "-c", **own, **variables)
        assert done.code == 0, (name, done)
    assert "gate: mine: holds" in done.out
    made = {path.name for path in (runner.folder / "conformance-results").glob("*.json")}
    assert {"record.shard-1-of-2.json", "record.shard-2-of-2.json", "record.json"} <= made


TABLE = """
[tool.mha-conformance]
implementations = ["mine.py:wrong"]
cases = ["mask/key-padding/cross"]
dtypes = ["float32"]
baseline = "known.toml"
"""


@pytest.mark.night
def test_builds_take_what_a_project_says_in_its_table(runner):
    (runner.folder / "pyproject.toml").write_text(TABLE)
    (runner.folder / "known.toml").write_text(KNOWN)
    steps = runner.github(arguments="--no-isolate")
    assert [step.code for step in steps.values()] == [0, 0, 0], steps
    assert "✓ known" in (runner.folder / "summary").read_text()
    assert "::error" not in steps["Report"].out
    script, after = runner.gitlab(MHA_ARGUMENTS="--no-isolate --fresh")
    assert (script.code, after.code) == (0, 0), (script, after)
    assert junit(runner.folder / "conformance-results" / "junit.xml")["skipped"] == 1
    # Without the file, it is known of nothing.
    (runner.folder / "known.toml").unlink()
    steps = runner.github(arguments="--no-isolate")
    assert [step.code for step in steps.values()] == [0, 1, 0], steps
    assert "::error" in steps["Report"].out


def test_a_job_that_never_began_reports_nothing(runner):
    script, after = runner.gitlab(MHA_IMPLEMENTATION="none.py:mine")
    assert (script.code, after.code) == (2, 0)
    assert "there is no file none.py" in script.out


# The page about them


def test_the_page_names_every_input_and_no_other():
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    table = text[text.index("| input | meaning |") : text.index("The action writes a record")]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(ACTION["inputs"])
    for name, own in ACTION["inputs"].items():
        assert (
            not own.get("default")
            or f"(default: {own['default']})" in table
            or (own["default"] in re.search(rf"^\| `{name}`.*", table, re.MULTILINE)[0])
        )


def test_the_examples_of_the_page_are_meant_for_these():
    text = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    blocks = [yaml.safe_load(own) for own in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    (workflow,) = [own for own in blocks if isinstance(own, dict) and "jobs" in own]
    steps = workflow["jobs"]["conformance"]["steps"]
    (used,) = [step for step in steps if "mha-conformance" in step.get("uses", "")]
    assert set(used["with"]) <= set(ACTION["inputs"])
    (gitlab,) = [own for own in blocks if isinstance(own, dict) and "conformance" in own]
    job = gitlab["conformance"]
    assert job["extends"] in GITLAB
    assert set(job["variables"]) <= set(GITLAB[job["extends"]]["variables"])
    (parts,) = [own for own in blocks if isinstance(own, dict) and "parts" in own]
    for job in parts.values():
        assert job["extends"] in GITLAB
        assert set(job["variables"]) <= set(GITLAB[".mha-conformance"]["variables"])
    assert parts["parts"]["parallel"] > 1
