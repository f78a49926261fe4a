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


@pytest.mark.sample(8)
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


OF_TRUE = {"attends": "mask", "blocks": "~mask"}


def wrapped(folder, capsys, text, *more, name="mine.py:attend"):
    (folder / "mine.py").write_text("import numpy as np\n\n\n" + text)
    code = main(["new-adapter", f"{folder}/{name}", *more])
    return code, capsys.readouterr()


def attention(parameters="mask=None", mask="mask", heads_first=True):
    """An attention that says nothing of itself, with these parameters and conventions."""
    swap = "" if heads_first else "    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))\n"
    back = "" if heads_first else ".swapaxes(1, 2)"
    return (
        f"def attend(q, k, v, {parameters}):\n{swap}"
        "    logits = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)\n"
        f"    if mask is not None:\n        logits = np.where({mask}, logits, -np.inf)\n"
        "    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))\n"
        f"    return (powers / powers.sum(axis=-1, keepdims=True) @ v){back}\n"
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("true", OF_TRUE)
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_function_that_is_there_is_wrapped(tmp_path, capsys, true, heads_first):
    text = attention("mask=None, dropout=0.0", OF_TRUE[true], heads_first)
    code, told = wrapped(tmp_path, capsys, text)
    assert code == ExitCode.OK
    assert "With this adapter, its output is right where there is no mask" in told.out
    adapter = (tmp_path / "attend_adapter.py").read_text()
    assert f'MaskArgument("mask", "batch heads query key", true="{true}"' in adapter
    layout = "batch heads length head" if heads_first else "batch length heads head"
    assert f'layout="{layout}"' in adapter
    assert "left at their defaults: dropout." in adapter
    assert (tmp_path / "mine.py").read_text().endswith(text)
    spec = f"{tmp_path}/attend_adapter.py:attend"
    assert f"mha-conformance run {spec}" in told.out
    assert main(["run", spec, *NARROW, "--strict", "--format", "json"]) == ExitCode.OK
    (found,) = json.loads(capsys.readouterr().out)["implementations"]
    assert (found["name"], found["items"]) == ("attend", {"conforms": 2})
    ruff = [sys.executable, "-m", "ruff", "format", "--diff", "--no-cache", "--isolated"]
    ruff += ["--line-length", "100", "attend_adapter.py"]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_what_a_flag_and_a_bias_are_called(tmp_path, capsys):
    text = attention("mask=None, attn_bias=None, is_causal=False, softcap=None, scale=None")
    code, _ = wrapped(tmp_path, capsys, text)
    assert code == ExitCode.OK
    adapter = (tmp_path / "attend_adapter.py").read_text()
    for line in (
        'MaskArgument("attn_bias", "batch heads query key", number="added", broadcasts=True)',
        'causal_flag=CausalFlag("is_causal")',
        'features=(SoftCap("softcap"),)',
        "from conformance import CausalFlag, MaskArgument, SoftCap, attention_function",
    ):
        assert line in adapter
    assert "Not recognised" not in adapter


def test_a_function_that_is_wrong_is_wrapped_and_told(tmp_path, capsys):
    text = attention().replace("(q * q.shape[-1] ** -0.5)", "q")
    code, told = wrapped(tmp_path, capsys, text)
    assert code == ExitCode.OK
    assert "Its output is wrong even without a mask" in told.out


def examined(folder, capsys):
    """Return how many items of a few cases, with masks of each kind, have each verdict."""
    cases = [f"mask/{name}/cross" for name in ("key-padding", "shared", "per-batch", "per-head")]
    given = [part for case in (*cases, "plain/no-mask/cross") for part in ("--case", case)]
    capsys.readouterr()
    main(["run", f"{folder}/attend_adapter.py:attend", "--dtype", "float32", *given,
          "--no-isolate", "--format", "json"])  # fmt: skip
    (found,) = json.loads(capsys.readouterr().out)["implementations"]
    return found["items"]


def test_a_mask_without_a_default_is_none_where_there_is_none(tmp_path, capsys):
    code, told = wrapped(tmp_path, capsys, attention("mask"))
    assert code == ExitCode.OK
    assert "its output is right where there is no mask. Ask for the rest:" in told.out
    assert "wrong" not in told.out
    assert 'given.setdefault("mask", None)' in (tmp_path / "attend_adapter.py").read_text()
    assert examined(tmp_path, capsys) == {"conforms": 5}


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "mask",
    ["mask", "~mask", "mask[:, None]", "~mask[:, None, None]", "~mask.squeeze(1)[:, None]"],
)
def test_a_mask_that_must_not_be_none_blocks_nothing(tmp_path, capsys, heads_first, mask):
    given = mask.replace("mask", "mask.astype(bool)")
    text = attention("mask, scale", given, heads_first).replace("q.shape[-1] ** -0.5", "scale")
    code, told = wrapped(tmp_path, capsys, text.replace("if mask is not None", "if True"))
    assert code == ExitCode.OK
    assert "With None in mask, every call raised AttributeError: 'NoneType' object" in told.out
    assert "its output is right where there is no mask. Ask for the rest:" in told.out
    found = examined(tmp_path, capsys)
    assert set(found) <= {"conforms", "unsupported"}
    assert found["conforms"] >= 2
    ruff = [sys.executable, "-m", "ruff", "format", "--diff", "--no-cache", "--isolated"]
    ruff += ["--line-length", "100", "attend_adapter.py"]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("framework", "imports"),
    [("torch", "torch"), ("jax", "jax.numpy"), ("tensorflow", "tensorflow.experimental.numpy")],
)
def test_a_mask_that_blocks_nothing_is_of_the_framework(tmp_path, capsys, framework, imports):
    pytest.importorskip(framework)
    text = (
        f"import {imports} as xp\n\n\ndef attend(q, k, v, mask):\n"
        "    logits = xp.matmul(q, xp.swapaxes(k, 2, 3)) * k.shape[-1] ** -0.5\n"
        "    powers = xp.exp(xp.where(mask[:, None], logits, xp.full_like(logits, -1e9)))\n"
        "    return xp.matmul(powers / xp.sum(powers, -1)[..., None], v)\n"
    )
    code, told = wrapped(tmp_path, capsys, text, "--framework", framework)
    assert code == ExitCode.OK
    assert "is right where there is no mask. Ask for the rest:" in told.out
    adapter = (tmp_path / "attend_adapter.py").read_text()
    assert 'MaskArgument("mask", "batch query key", true="attends", broadcasts=True)' in adapter
    assert "With None in mask, every call raised" in told.out


def test_what_raises_is_told_with_its_error_and_is_not_called_wrong(tmp_path, capsys):
    text = 'def attend(q, k, v, mask):\n    raise ValueError("no such kernel.")\n'
    code, told = wrapped(tmp_path, capsys, text)
    assert code == ExitCode.OK
    assert "Every call raised, even without a mask" in told.out
    assert "are arranged: ValueError: no such kernel. Look whether" in told.out
    assert "wrong" not in told.out


@pytest.mark.parametrize("true", OF_TRUE)
@pytest.mark.parametrize(
    ("axes", "broadcasting"),
    [
        ("batch heads query key", ""),
        ("batch 1 query key", ".squeeze(1)[:, None]"),
        ("batch query key", "[:, None]"),
        ("batch 1 1 key", ".squeeze((1, 2))[:, None, None]"),
        ("batch key", "[:, None, None]"),
        ("query key", "[None, None]"),
    ],
)
def test_the_axes_of_a_mask_and_what_true_means_are_found(
    tmp_path, capsys, axes, broadcasting, true
):
    text = attention("mask=None", OF_TRUE[true] + broadcasting)
    code, told = wrapped(tmp_path, capsys, text)
    assert code == ExitCode.OK
    assert "its output is right where there is no mask. Ask for the rest:" in told.out
    adapter = (tmp_path / "attend_adapter.py").read_text()
    named = axes.replace("1 ", "")
    assert f'MaskArgument("mask", "{named}", true="{true}", broadcasts=True)' in adapter
    assert ('given["mask"] = given["mask"][:, None' in adapter) == (named != axes)
    found = examined(tmp_path, capsys)
    assert set(found) <= {"conforms", "unsupported"}
    assert found["conforms"] >= 2


def test_a_mistake_in_one_kind_of_mask_does_not_hide_behind_narrower_axes(tmp_path, capsys):
    code, _ = wrapped(tmp_path, capsys, attention("mask=None", "mask[:, :, :1]"))
    assert code == ExitCode.OK
    adapter = (tmp_path / "attend_adapter.py").read_text()
    assert 'MaskArgument("mask", "batch heads query key", true="attends"' in adapter
    assert examined(tmp_path, capsys)["deviates"] >= 2


def test_a_mask_that_is_not_identified_is_told_to_be_a_guess(tmp_path, capsys):
    code, told = wrapped(tmp_path, capsys, attention("mask=None", "mask.of_a_kind"))
    assert code == ExitCode.OK
    (line,) = [line for line in told.out.splitlines() if "guess" in line]
    assert "mask could not be identified, so its axes are a guess" in line
    assert "raised AttributeError: 'numpy.ndarray' object has no attribute 'of_a_kind'." in line
    assert "Ask for the rest" not in told.out


@pytest.mark.parametrize(
    ("text", "more", "told"),
    [
        ("def attend(q, k): ...", (), "takes q, k; an attention function takes query, key and v"),
        ("def attend(*, q, k, v): ...", (), "takes q, k, v; an attention function takes query"),
        ("def attend(q, k, v, block): ...", (), "needs block, and nothing is known of it"),
        ("class attend: ...", (), "is no function; for a layer, new-adapter NAME --kind layer"),
        ("attend = 3", (), "is no function"),
        (attention(), ("--kind", "layer"), "a layer has weights of its own"),
        (attention(), ("-o", "elsewhere"), "so it is written beside it"),
    ],
)
def test_a_function_that_cannot_be_wrapped(tmp_path, capsys, text, more, told):
    code, printed = wrapped(tmp_path, capsys, text, *more)
    assert code == ExitCode.USAGE
    (line,) = printed.err.splitlines()
    assert told in line
    assert not (tmp_path / "attend_adapter.py").exists()


def test_a_file_that_python_would_take_for_another_is_not_wrapped(tmp_path, capsys):
    (tmp_path / "code.py").write_text("import numpy as np\n" + attention())
    assert main(["new-adapter", f"{tmp_path}/code.py:attend"]) == ExitCode.USAGE
    assert "cannot be imported as 'code'; rename the file" in capsys.readouterr().err


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
