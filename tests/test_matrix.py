"""`mha-conformance matrix` with tox on this machine; with Ray, `tox -e cluster`."""

from __future__ import annotations

import compileall
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from records import resealed

from conformance.cli import main
from conformance.commands.shared import read_settings
from conformance.running import matrix, node

ROOT = Path(__file__).parents[1]
TOX = """\
[tox]
env_list = begin, right, report

[testenv]
package = skip
skip_install = true

[testenv:right]
depends = begin
commands = python record.py --record records/right.json {posargs}

[testenv:wrong]
depends = begin
commands = python record.py 1 --record records/wrong.json

[testenv:begin]
commands = python record.py 0

[testenv:report]
depends = right, wrong
commands = python record.py 0
"""
RECORD = """\
import os, pathlib, sys
print(os.environ.get("WORKERS"), *sys.argv[1:])
if "--record" in sys.argv:
    file = pathlib.Path(sys.argv[sys.argv.index("--record") + 1])
    file.parent.mkdir(exist_ok=True)
    before = file.read_text() if file.exists() else ""
    file.write_text(before + " ".join(sys.argv[1:]))
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else 0)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    pytest.importorskip("tox")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tox.ini").write_text(TOX, encoding="utf-8")
    (folder / "record.py").write_text(RECORD, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return folder


def test_what_writes_a_record_is_told_from_what_stands_beside_it(project):
    found = matrix.environments([], [], project)
    assert found == matrix.Environments(["begin"], {"right": "records/right.json"}, ["report"])
    found = matrix.environments(["wrong", "report"], [], project)
    assert found == matrix.Environments([], {"wrong": "records/wrong.json"}, ["report"])


@pytest.mark.night
def test_here_tox_runs_them(project, capfd):
    assert main(["matrix", "--workers", "3", "--", "--more"]) == 0
    assert (project / "records" / "right.json").read_text() == "--record records/right.json --more"
    assert main(["matrix", "right", "wrong"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing"], "tox refuses its configuration: nothing"),
        (["begin"], "none of begin writes a record: their commands have no --record FILE.json"),
        (["--on", "slurm"], "--on slurm: tox, ray or ray://HOST:PORT"),
        (["--shards", "2"], "--shards needs --on ray; on one machine, use --workers or --jobs"),
        (["--jobs", "0"], "--jobs 0: at least 1"),
    ],
)
def test_bad_input_is_one_line(project, capsys, arguments, text):
    assert main(["matrix", *arguments]) == 2
    assert capsys.readouterr().err == f"mha-conformance: {text}\n"


def test_without_a_configuration_it_says_so(project, capsys):
    (project / "tox.ini").unlink()
    assert main(["matrix"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_tox_or_ray_it_says_what_to_install(project, capsys, monkeypatch):
    find = matrix.find_spec
    monkeypatch.setattr(matrix, "find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["matrix", "--on", "ray"]) == 2
    assert "pip install 'mha-conformance[cluster]'" in capsys.readouterr().err
    monkeypatch.setattr(matrix, "find_spec", lambda name: None)
    assert main(["matrix"]) == 2
    assert "pip install tox" in capsys.readouterr().err


@pytest.mark.night
def test_a_node_runs_a_part_beside_others_and_hands_back_its_records(project):
    (project / "records").mkdir()
    (project / "records" / "other.json").write_text("as it was")
    source = matrix.archive(project)
    part = node.EnvironmentPart(
        "right", "1/2", ("--shard", "1/2"), {"records/right.json": b"before; "}
    )
    answer = node.run(source, "key", "records", part, 1)
    assert (answer.code, answer.node) != (1, "")
    assert answer.files == {
        "records/right.json": b"before; --record records/right.json --shard 1/2"
    }
    # While one part has the folder, another has its own; and the next finds what is installed.
    home, release = node._claimed("key", "right")
    other, release_other = node._claimed("key", "right")
    assert (home.name, other.name) == ("right-1", "right-2")
    assert (home / "tox" / "right").is_dir()
    release()
    release_other()
    wrong = node.run(source, "key", "records", node.EnvironmentPart("wrong"), 1)
    assert wrong.code == 1
    assert "FAIL" in wrong.tail


PACKAGED = """\
[testenv:right]
package = wheel
commands = python -P -m packaged --record records/right.json
"""


@pytest.mark.night
def test_a_node_installs_the_same_source_once(project):
    (project / "tox.ini").write_text(PACKAGED, encoding="utf-8")
    (project / "pyproject.toml").write_text(
        '[project]\nname = "packaged"\nversion = "1"\n'
        '[tool.setuptools]\npy-modules = ["packaged"]\n'
    )

    def written(says):
        code = "import pathlib; pathlib.Path('records').mkdir(exist_ok=True); "
        code += f"pathlib.Path('records/right.json').write_text({says!r})"
        (project / "packaged.py").write_text(code)

    def run(says):
        answer = node.run(
            matrix.archive(project), "key", "records", node.EnvironmentPart("right"), 1
        )
        assert answer.code == 0, answer.tail
        assert answer.files == {"records/right.json": says.encode()}
        return answer.tail

    written("first")
    assert "install_package" in run("first")
    assert "install_package" not in run("first")
    written("second")
    assert "install_package" in run("second")
    # Without its environment, everything is installed again.
    home, release = node._claimed("key", "right")
    release()
    shutil.rmtree(home / "tox")
    assert "install_package" in run("second")


def test_a_node_keeps_bytecode_of_what_has_not_changed_and_nothing_else(project, tmp_path):
    held = tmp_path / "held"
    (project / "package").mkdir()
    (project / "package" / "same.py").write_text("one = 1\n")
    (project / "package" / "link.py").symlink_to("same.py")
    for name in ("folder", "file"):
        (project / name).mkdir()
        (project / name / "gone.py").write_text("one = 1\n")
    node.unpack(matrix.archive(project), held)
    assert compileall.compile_dir(held, quiet=1)
    (held / "records").mkdir()
    (held / "records" / "old.json").write_text("{}")
    same = held / "package" / "same.py"
    before = same.stat().st_mtime_ns
    (project / "record.py").write_text(RECORD.replace("sys.exit", "exit_is"))
    (project / "tox.ini").chmod(0o755)
    shutil.rmtree(project / "folder")
    shutil.rmtree(project / "file")
    (project / "file").write_text("a folder before")
    # As a checkout leaves it, which is made anew for every build.
    os.utime(project / "package" / "same.py", (1, 1))
    node.unpack(matrix.archive(project), held)
    files = {path.relative_to(held).as_posix() for path in held.rglob("*") if path.is_file()}
    source = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    kept = {name for name in files if "__pycache__" in name}
    assert files - kept == source
    assert {name.split(".")[0] for name in kept} == {
        "__pycache__/record",
        "package/__pycache__/same",
        "package/__pycache__/link",
    }
    assert (held / "record.py").read_text().count("exit_is") == 1
    assert os.access(held / "tox.ini", os.X_OK)
    assert (held / "package" / "link.py").is_symlink()
    assert same.stat().st_mtime_ns == before


def test_the_source_is_what_git_does_not_ignore(project):
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    (project / ".gitignore").write_text("secret\n")
    (project / "secret").write_text("ignored")
    with tarfile.open(fileobj=io.BytesIO(matrix.archive(project))) as archive:
        assert sorted(archive.getnames()) == [".gitignore", "record.py", "tox.ini"]


def test_without_git_it_is_everything_but_environments(project):
    for folder in (".tox", "__pycache__", "package"):
        (project / folder).mkdir()
        (project / folder / "file.py").write_text("")
    with tarfile.open(fileobj=io.BytesIO(matrix.archive(project))) as archive:
        assert sorted(archive.getnames()) == ["package/file.py", "record.py", "tox.ini"]


def test_resources_come_from_the_table(tmp_path):
    table = tmp_path / "pyproject.toml"
    table.write_text('[tool.mha-conformance.resources]\nfused = { GPU = 1, "rare" = 0.5 }\n')
    resources = read_settings(table).resources
    assert resources == {"fused": {"GPU": 1, "rare": 0.5}}
    cluster = matrix.Cluster(workers=2, resources=resources)
    run = matrix.ClusterRun(
        matrix.Environments([], {"fused": "fused.json"}, []), cluster, tmp_path, print
    )
    run.check([{"CPU": 1}, {"CPU": 2, "GPU": 1, "rare": 1}])
    with pytest.raises(Exception, match=r"what fused needs: 2 CPU, 1 GPU, 0\.5 rare"):
        run.check([{"CPU": 8, "GPU": 1}, {"CPU": 2, "rare": 1}])


def test_a_node_needs_nothing_of_this_suite_and_nobody_imports_ray():
    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); "
        "assert not {'conformance', 'ray', 'numpy'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code, node.__file__], check=True)
    code = (
        "import sys, conformance, conformance.running.matrix, conformance.commands.matrix; "
        "assert 'ray' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shards_of_a_narrowed_run_leave_a_complete_record_alone(tmp_path):
    example = ROOT / "docs" / "examples" / "numpy_function.py"
    record = tmp_path / "records" / "right.json"
    for number in (1, 2):
        few = ["--case", "plain/no-mask/", "--dtype", "float32", "--shard", f"{number}/2"]
        assert main(["run", f"{example}:attention", *few, "--record", str(record), "-q"]) == 0
    shards = sorted(record.parent.glob("*.json"))
    assert len(shards) == 2
    record.write_text("complete")
    chosen = matrix.Environments([], {"right": "records/right.json"}, [])
    run = matrix.ClusterRun(chosen, matrix.Cluster(shards=2), tmp_path, print)
    run._shards["right"], run._left["right"] = shards, 0
    whole = run._whole(node.EnvironmentPart("right", "2/2"))
    assert record.read_text() == "complete"
    assert "records/right.narrowed.json" in whole.files
    assert not [*record.parent.glob("*.shard-*")]


def test_the_longest_environment_is_begun_first(tmp_path):
    example = ROOT / "docs" / "examples" / "numpy_function.py"
    few = ["--case", "plain/no-mask/self", "--dtype", "float32"]
    assert main(["run", f"{example}:attention", *few, "--record", f"{tmp_path}/a.json", "-q"]) == 0
    taken = (tmp_path / "a.narrowed.json").read_text(encoding="utf-8")
    for name, seconds in (("brief.json", 3), ("long.json", 1), ("long.narrowed.json", 5)):
        changed = re.sub(r'(?<="seconds": )[\d.e-]+', str(seconds), taken)
        (tmp_path / name).write_text(resealed(json.loads(changed)))
    (tmp_path / "broken.json").write_text("{}")
    records = {name: f"{name}.json" for name in ("brief", "unknown", "broken", "long")}
    run = matrix.ClusterRun(matrix.Environments([], records, []), matrix.Cluster(), tmp_path, print)
    assert run._order() == ["unknown", "broken", "long", "brief"]
