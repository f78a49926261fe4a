"""What new-adapter writes works as it is, is asked for nothing, and overwrites nothing."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import children
import pytest
import yaml

from conformance.cli import main
from conformance.commands.new_adapter import FRAMEWORKS, KINDS, NewAdapter
from conformance.errors import ExitCode

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]

NARROW = ("--dtype", "float32", "--case", "mask/key-padding/cross", "--case", "plain/no-mask/cross")
WRITTEN = (
    "my_attention.py", "test_my_attention.py", "conformance-github.yml", "conformance-gitlab.yml",
)  # fmt: skip
EVERY = [(framework, kind) for framework in FRAMEWORKS for kind in KINDS]


def new(folder, *arguments, name="MyAttention", framework="numpy", kind="function"):
    given = ["--framework", framework, "--kind", kind, "-o", str(folder), *arguments]
    return main(["new-adapter", name, *given])


def adapter(kind):
    return "my_attention" if kind == "function" else "MyAttention"


@pytest.mark.parametrize(("framework", "kind"), EVERY)
def test_what_is_written_conforms(tmp_path, capsys, framework, kind):
    pytest.importorskip(framework)
    assert new(tmp_path, framework=framework, kind=kind) == ExitCode.OK
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(WRITTEN)
    spec = f"{tmp_path / 'my_attention.py'}:{adapter(kind)}"
    assert f"mha-conformance run {spec}" in printed
    arguments = ["run", spec, *NARROW, "--strict", "--no-isolate", "--format", "json"]
    assert main(arguments) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["implementations"]
    assert found["items"] == {"conforms": 2}


def test_its_test_passes_and_fails_when_the_attention_is_wrong(tmp_path):
    assert new(tmp_path, kind="layer") == ExitCode.OK
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    # Two texts of one length, written within one second: bytecode would be stale.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    command = children.python("-m", "pytest", "-q", "-p", "no:cacheprovider")
    command += ["-k", "key-padding and cross and float32", "test_my_attention.py"]

    def test():
        return subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )

    done = test()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+ passed", done.stdout)
    file = tmp_path / "my_attention.py"
    text = file.read_text()
    wrong = text.replace("np.where(mask, logits, -np.inf)", "np.where(mask, -np.inf, logits)")
    assert wrong != text
    file.write_text(wrong)
    done = test()
    assert done.returncode == 1, done.stdout
    assert "equals the answer with the mask inverted" in done.stdout


@pytest.mark.parametrize(("framework", "kind"), EVERY)
def test_what_is_written_is_formatted(tmp_path, framework, kind):
    """By the suite's own rules, so that nobody begins with a mess."""
    assert new(tmp_path, framework=framework, kind=kind) == ExitCode.OK
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--select", "E,F,I,W"], ["format", "--diff"]):
        done = subprocess.run(
            [*ruff, *command, "--no-cache", "--isolated", "--line-length", "100", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("conformance-github.yml", lambda found: [
            step["run"] for step in found["jobs"]["conformance"]["steps"] if "run" in step]),
        ("conformance-gitlab.yml", lambda found: [
            *found["conformance"]["script"], *found["conformance"]["after_script"]]),
    ],
)  # fmt: skip
def test_the_lines_of_a_build_run(tmp_path, monkeypatch, file, lines):
    assert new(tmp_path) == ExitCode.OK
    found = lines(yaml.safe_load((tmp_path / file).read_text()))
    install, *others = found
    assert install == f'python -m pip install "mha-conformance @ git+{SOURCE}"'
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    assert len(others) == 2
    for index, line in enumerate(others):
        program, *arguments = line.split()
        assert program == "mha-conformance"
        if index == 0:
            # The record of a narrowed run lies beside that of a whole one.
            arguments += [*NARROW, "--no-isolate"]
        record = "conformance-results/my_attention.json"
        arguments = [item.replace(record, narrowed(record)) if index else item
                     for item in arguments]  # fmt: skip
        assert main(arguments) == ExitCode.OK
    told = tmp_path / ("summary.md" if "github" in file else "conformance-results/junit.xml")
    assert "my_attention" in told.read_text()


def test_the_owner_is_a_placeholder_in_one_place():
    files = subprocess.run(
        ("git", "grep", "-lwF", "OWNER", "--", ".", ":!tests"),
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    # What is read by people names it where it is explained; in `uses:`, GitHub takes no variable.
    assert set(files) <= {"pyproject.toml", "docs/commands.md", "docs/ci.md"}
    for page, times in (("docs/commands.md", 1), ("docs/ci.md", 1)):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert (
            len(re.findall(rf"(?:{re.escape(SOURCE)}|uses: OWNER/mha-conformance)", text)) == times
        )


def narrowed(record):
    return record.replace(".json", ".narrowed.json")


@pytest.mark.parametrize("there", [name for name in WRITTEN if name.endswith(".py")])
def test_nothing_is_overwritten_and_then_nothing_is_written(tmp_path, capsys, there):
    (tmp_path / there).write_text("mine")
    assert new(tmp_path) == ExitCode.USAGE
    assert "already there; nothing was written" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_a_second_adapter_keeps_the_builds_of_the_first(tmp_path, capsys):
    (tmp_path / "conformance-github.yml").write_text("mine")
    assert new(tmp_path) == ExitCode.OK
    assert "conformance-github.yml: kept as it was; add my_attention.py:" in capsys.readouterr().out
    assert (tmp_path / "conformance-github.yml").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {*WRITTEN}


def test_a_link_that_leads_nowhere_is_there_too(tmp_path):
    (tmp_path / "my_attention.py").symlink_to(tmp_path / "elsewhere.py")
    assert new(tmp_path) == ExitCode.USAGE
    assert not (tmp_path / "elsewhere.py").exists()


@pytest.mark.parametrize(
    ("name", "module", "function", "layer"),
    [
        ("MyAttention", "my_attention", "my_attention", "MyAttention"),
        ("my_attention", "my_attention", "my_attention", "MyAttention"),
        ("FlashMHA", "flash_mha", "flash_mha", "FlashMHA"),
        ("MHAKernel2", "mha_kernel2", "mha_kernel2", "MHAKernel2"),
        ("attend", "attend", "attend", "Attend"),
    ],
)
def test_names(name, module, function, layer):
    assert NewAdapter(name, "numpy", "function").module == module
    assert NewAdapter(name, "numpy", "function").adapter == function
    assert NewAdapter(name, "numpy", "layer").adapter == layer


@pytest.mark.parametrize(
    "name", ["my-attention", "2nd", "class", "a b", "../x", "ä", "torch", "os"]
)
def test_a_name_that_cannot_be_one(tmp_path, capsys, name):
    assert new(tmp_path, name=name) == ExitCode.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "say " in line or "give one such as" in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "which name? say a name, such as my_attention"),
        (["X1"], "which framework? say --framework torch or jax or tensorflow or numpy"),
        (["X1", "--framework", "numpy"], "which kind? say --kind function or layer"),
    ],
)
def test_nobody_is_asked_without_a_terminal(tmp_path, capsys, monkeypatch, arguments, told):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["new-adapter", *arguments]) == ExitCode.USAGE
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_on_a_terminal_what_was_not_said_is_asked(tmp_path):
    keep, give = pty.openpty()
    command = [sys.executable, "-m", "conformance", "new-adapter", "--framework", "numpy"]
    env = {**os.environ, "TERM": "dumb"}
    running = subprocess.Popen(command, stdin=give, stdout=give, stderr=give, cwd=tmp_path, env=env)
    os.close(give)
    # The name is said, the kind is left as it is offered.
    os.write(keep, b"other_attention\n\n")
    shown = b""
    while True:
        try:
            shown += os.read(keep, 4096)
        except OSError:
            break
    os.close(keep)
    assert running.wait(timeout=300) == 0, shown.decode()
    assert b"(my_attention)" in shown
    assert "def other_attention(" in (tmp_path / "other_attention.py").read_text()
