"""What an implementation read while it ran is noticed when it changes, and its items run again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import pytest

from conformance.cli import main
from conformance.records.record import read

CASE = ("--case", "plain/no-mask/self", "--dtype", "float32")
ATTENTION = """
import numpy as np
from conformance import attention_function

{before}

@attention_function("numpy", dtypes=("float32",))
def attention(query, key, value):
    {inside}
    logits = query @ key.swapaxes(-1, -2) * np.float32(factor * query.shape[-1] ** -0.5)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value
"""
FIRST = "import os, sys; sys.path.insert(0, os.path.dirname(__file__))"

WAYS = {
    "a module beside it": ("from helper import factor", "helper.py"),
    "a name that is computed": (
        "import importlib; factor = importlib.import_module('hel' + 'per').factor",
        "helper.py",
    ),
    "__import__": ("factor = __import__('helper').factor", "helper.py"),
    "a folder without __init__": (
        "from folder.inner.helper import factor",
        "folder/inner/helper.py",
    ),
    "a module by its path": (
        "import importlib.util as u, os\n"
        "spec = u.spec_from_file_location('x', os.path.dirname(__file__) + '/other.py')\n"
        "x = u.module_from_spec(spec); spec.loader.exec_module(x); factor = x.factor",
        "other.py",
    ),
    "a program that is executed": (
        "import os; exec(open(os.path.dirname(__file__) + '/program.txt').read())",
        "program.txt",
    ),
    "a name of the standard library": (f"{FIRST}; from colorsys import factor", "colorsys.py"),
}
"""How a factor comes into the attention when it is imported, and from where."""
LATE = {
    "a module that is loaded late": ("from helper import factor", "helper.py"),
    "a file of numbers": (
        "import os; factor = float(np.load(os.path.dirname(__file__) + '/factor.npy'))",
        "factor.npy",
    ),
}


def write(folder: Path, place: str, factor: float) -> None:
    """Write what gives the factor, in its place."""
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if place == "site-packages":
        for name, code in {
            "dependency": f"factor = {factor}",
            "needy": "from dependency import factor",
        }.items():
            package, about = path / name, path / f"{name}-1.0.dist-info"
            package.mkdir(parents=True, exist_ok=True)
            about.mkdir(exist_ok=True)
            (package / "__init__.py").write_text(code)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (about / "RECORD").write_text(f"{name}/__init__.py,{zlib.crc32(code.encode())},\n")
            (about / "top_level.txt").write_text(name)
    elif path.suffix == ".npy":
        np.save(path, factor)
    else:
        path.write_text(f"factor = {factor}\n")


RUN = ["run", "attention.py:attention", *CASE, "--record", "r.json", "--quiet"]


def examined(**environment: str) -> list[str]:
    """Run the attention, in a process of its own if it has other variables; return the verdicts."""
    if environment:
        command = [sys.executable, "-m", "conformance", *RUN]
        ran = subprocess.run(
            command, env=os.environ | environment, check=False, capture_output=True, text=True
        )
        print(ran.stdout + ran.stderr)
    else:
        main(RUN)
    return [result.verdict for result in read(Path("r.narrowed.json")).results]


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A file that is written twice in one second has one name in the cache of byte code.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def written(before="", inside="pass"):
        text = ATTENTION.format(before=before, inside=inside)
        (tmp_path / "attention.py").write_text(text)
        return tmp_path

    return written


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", [*WAYS, *LATE])
def test_a_change_is_noticed(way, project, capsys):
    code, place = (WAYS | LATE)[way]
    folder = project(before=code) if way in WAYS else project(inside=code)
    write(folder, place, 1.0)
    assert examined() == ["conforms"]
    capsys.readouterr()
    assert examined() == ["conforms"]
    assert "1 of 1 items as measured" in capsys.readouterr().out
    write(folder, place, 1.25)
    assert examined() == ["deviates"]


@pytest.mark.night
def test_another_value_of_a_variable_is_noticed(project):
    project(inside="import os; factor = float(os.environ.get('FACTOR', '1'))")
    assert examined(FACTOR="1") == ["conforms"]
    assert examined(FACTOR="1.25") == ["deviates"]


@pytest.mark.night
@pytest.mark.parametrize("package", ["dependency", "needy"])
def test_a_package_that_is_installed_anew_with_its_version_is_noticed(package, project, capsys):
    folder = project(before=f"from {package} import factor")
    path = str(folder / "site-packages")
    for factor, verdict, again in (
        (1.0, "conforms", False),
        (1.0, "conforms", True),
        (1.25, "deviates", False),
    ):
        write(folder, "site-packages", factor)
        capsys.readouterr()
        assert examined(PYTHONPATH=path) == [verdict]
        assert ("as measured" in capsys.readouterr().out) is again


def test_a_library_that_is_built_anew_is_noticed(project, capsys):
    library = next(Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"), None)
    if library is None:
        pytest.skip("this Python has no compiled modules")
    folder = project(before="import ctypes; ctypes.CDLL('./kernel.so')", inside="factor = 1.0")
    shutil.copy(library, folder / "kernel.so")
    for built, again in ((False, False), (False, True), (True, False)):
        if built:
            with (folder / "kernel.so").open("ab") as file:
                file.write(b"built anew")
        capsys.readouterr()
        assert examined() == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again


def test_a_comment_changes_nothing(project, capsys):
    folder = project(before="from helper import factor")
    write(folder, "helper.py", 1.0)
    examined()
    (folder / "helper.py").write_text("# A comment.\nfactor   =   1.0\n")
    capsys.readouterr()
    examined()
    assert "1 of 1 items as measured" in capsys.readouterr().out


def test_a_process_of_several_implementations_says_so_of_all(project):
    folder = project(before="from helper import factor")
    write(folder, "helper.py", 1.0)
    text = (folder / "attention.py").read_text().replace("def attention", "def another")
    (folder / "other.py").write_text(text)
    main([*RUN[:2], "other.py:another", *RUN[2:], "--no-isolate"])
    header = read(Path("r.narrowed.json")).header
    assert all("file helper.py" in one.inputs for one in header.implementations)
