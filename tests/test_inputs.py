"""What an implementation read while it ran is noticed when it changes, and its items run again."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import conformance
from conformance.cli import main
from conformance.records.record import read
from conformance.running import inputs

CORE = Path(conformance.__file__).parent
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
    "a folder that it enters and leaves": (
        "import os; home = os.getcwd(); os.chdir('inner')\n"
        "exec(open('program.txt').read()); os.chdir(home)",
        "inner/program.txt",
    ),
    "a hidden file": ("exec(open('.settings').read())", ".settings"),
    "a database": (
        "import sqlite3; base = sqlite3.connect('factor.sqlite')\n"
        "(factor,) = base.execute('select factor from factors').fetchone(); base.close()",
        "factor.sqlite",
    ),
}
"""How a factor comes into the attention when it is imported, and from where."""
LATE = {
    "a module that is loaded late": ("from helper import factor", "helper.py"),
    "a file of numbers": (
        "import os; factor = float(np.load(os.path.dirname(__file__) + '/factor.npy'))",
        "factor.npy",
    ),
}

ABSENT = {
    "a file that it asks for": ("import os; factor = 1 + os.path.exists('fast') / 4", "fast"),
    "a path that it asks for": (
        "from pathlib import Path; factor = 1 + Path(__file__).with_name('fast').is_file() / 4",
        "fast",
    ),
    "a folder that it asks for": ("import os; factor = 1 + os.path.isdir('fast') / 4", "fast/x"),
    "a file that it opens": (
        "try:\n    open('fast')\nexcept FileNotFoundError:\n    factor = 1.0\n"
        "else:\n    factor = 1.25",
        "fast",
    ),
    "a file among others": (
        "import glob; factor = 1 + len(glob.glob('several/*.txt')) / 4",
        "several/fast.txt",
    ),
    "a file in a tree": (
        "from pathlib import Path; factor = 1 + len([*Path('several').rglob('*.txt')]) / 4",
        "several/fast.txt",
    ),
    "a module that it asks for": (
        "import importlib.util as u; factor = 1 + (u.find_spec('fast') is not None) / 4",
        "fast.py",
    ),
    "a module that it imports if it can": (
        "try:\n    __import__('fa' + 'st')\nexcept ImportError:\n    factor = 1.0\n"
        "else:\n    factor = 1.25",
        "fast.py",
    ),
    "a module among others": (
        "import pkgutil; factor = 1 + len([*pkgutil.iter_modules(['several'])]) / 4",
        "several/fast.py",
    ),
}
"""What makes the factor another one once it is there, and where."""


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
            (about / "RECORD").write_text(
                f"{name}/__init__.py,{zlib.crc32(code.encode())},\n{about.name}/RECORD,,\n"
            )
            (about / "top_level.txt").write_text(name)
    elif path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as base, base:
            base.execute("create table if not exists factors (factor)")
            base.execute("delete from factors")
            base.execute("insert into factors values (?)", (factor,))
    elif path.suffix == ".npy":
        np.save(path, factor)
    elif path.suffix == ".bin":
        np.asarray(factor, np.float64).tofile(path)
    elif path.suffix == ".safetensors":
        save_file({"factor": np.asarray(factor)}, path)
    else:
        path.write_text(f"factor = {factor}\n")


RUN = ["run", "attention.py:attention", *CASE, "--record", "r.json", "--quiet"]


def examined(*flags: str, **environment: str) -> list[str]:
    """Run the attention, in a process of its own if it has other variables or flags of Python;
    return the verdicts."""
    if environment or flags:
        command = [sys.executable, *flags, "-m", "conformance", *RUN]
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


@pytest.mark.sample(8)
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


@pytest.mark.sample(6)
@pytest.mark.parametrize("way", ABSENT)
def test_what_was_absent_is_noticed_once_it_is_there(way, project, capsys):
    code, place = ABSENT[way]
    folder = project(before=code)
    (folder / "several").mkdir()
    assert examined() == ["conforms"]
    capsys.readouterr()
    assert examined() == ["conforms"]
    assert "1 of 1 items as measured" in capsys.readouterr().out
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("")
    assert examined() == ["deviates"]


def test_a_folder_with_the_record_is_asked_again_once(project, capsys):
    project(before="import os; os.listdir()", inside="factor = 1.0")
    for again in (False, False, True):
        examined()
        assert ("as measured" in capsys.readouterr().out) is again


@pytest.mark.night
def test_files_beside_a_hidden_checkout_are_no_caches(project, monkeypatch):
    folder = project()
    checkout = folder / ".worktrees" / "mine"
    (checkout / "inner").mkdir(parents=True)
    (checkout / "program.txt").write_text("factor = 1.0")
    (folder / "attention.py").rename(checkout / "inner" / "attention.py")
    attention = checkout / "inner" / "attention.py"
    attention.write_text(
        ATTENTION.format(before="exec(open('../program.txt').read())", inside="pass")
    )
    monkeypatch.chdir(attention.parent)
    # Temporary files are no inputs, so this checkout must not be one.
    assert examined(TMPDIR="/var/tmp") == ["conforms"]
    (checkout / "program.txt").write_text("factor = 1.25")
    assert examined(TMPDIR="/var/tmp") == ["deviates"]


@pytest.mark.night
@pytest.mark.parametrize(
    ("read", "before"), [("dict(os.environ)", {}), ("os.environ", {"FACTOR": "1"})]
)
def test_a_variable_that_is_new_or_has_another_value_is_noticed(project, read, before):
    project(inside=f"import os; factor = float({read}.get('FACTOR', '1'))")
    assert examined(OTHER="1", **before) == ["conforms"]
    assert examined(OTHER="1", FACTOR="1.25") == ["deviates"]


STARTED = {
    "warnings that are errors": (
        "import sys; factor = 1.25 if 'error' in sys.warnoptions else 1.0",
        ("-Werror",),
        {},
    ),
    "an option": ("factor = 1.0 if __debug__ else 1.25", ("-O",), {}),
    "a variable for it": ("factor = 1.0 if __debug__ else 1.25", (), {"PYTHONOPTIMIZE": "1"}),
    "an assertion": (
        "factor = 1.25\ntry:\n    assert not factor\nexcept AssertionError:\n    factor = 1.0",
        ("-O",),
        {},
    ),
    "how exactly a library multiplies": (
        "import posix; factor = 1.25 if b'ONEDNN_DEFAULT_FPMATH_MODE' in posix.environ else 1.0",
        (),
        {"ONEDNN_DEFAULT_FPMATH_MODE": "BF16"},
    ),
    "a time zone": (
        "import time; factor = 1.25 if time.localtime(0).tm_hour else 1.0",
        (),
        {"TZ": "Asia/Tokyo"},
    ),
    "a locale": (
        "import locale; locale.setlocale(locale.LC_ALL, '')\n"
        "factor = 1.25 if locale.setlocale(locale.LC_COLLATE) == 'C' else 1.0\n"
        "locale.setlocale(locale.LC_ALL, 'C')",
        (),
        {"LC_ALL": "C"},
    ),
}
"""What makes the factor another one, if Python is started so: by options and by variables."""
USUAL = {"TZ": "UTC", "LC_ALL": "C.UTF-8"}


@pytest.mark.night
@pytest.mark.parametrize("way", STARTED)
def test_what_python_is_started_with_is_noticed(way, project, capsys):
    """No code reads it: the compiler, the interpreter or the C library does, before or in C."""
    code, flags, environment = STARTED[way]
    project(before=code)
    # tox draws another seed of hashes for each run.
    for again, seed in ((False, "1"), (True, "2")):
        assert examined(**USUAL, PYTHONHASHSEED=seed) == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
    assert examined(*flags, **USUAL | environment) == ["deviates"]


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


def test_fresh_measures_what_nothing_has_changed_of(project, capsys):
    """As is needed after a change that nobody sees."""
    project(inside="factor = 1.0")
    for more, again in ((), False), ((), True), (("--fresh",), False):
        main([*RUN, *more])
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


# What changes beside the files that it opens


def compiled(folder: Path, code: str) -> None:
    """Compile C code into `kernel.so` in a folder, or skip the test if nothing compiles it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler of C")
    (folder / "kernel.c").write_text(code)
    command = [compiler, "-shared", "-fPIC", "-o", "kernel.so", "kernel.c"]
    subprocess.run(command, cwd=folder, check=True)


KERNEL = "import ctypes; kernel = ctypes.CDLL('./kernel.so')"
BESIDE = {
    "a module earlier on the path": (
        "import sys; sys.path.append('later')\nfactor = __import__('hel' + 'per').factor",
        "later/helper.py",
        "helper.py",
    ),
    "a package with the name of a module": (
        "factor = __import__('hel' + 'per').factor",
        "helper.py",
        "helper/__init__.py",
    ),
    "a module with the name of a standard one": (
        f"{FIRST}; import colorsys; factor = getattr(colorsys, 'factor', 1.0)",
        "unused.py",
        "colorsys.py",
    ),
    "a package that hides a folder": (
        "import sys; sys.path.append('later')\n"
        "factor = getattr(__import__('fol' + 'der'), 'factor', 1.0)",
        "folder/helper.py",
        "later/folder/__init__.py",
    ),
    "a module that hides a folder": (
        "factor = getattr(__import__('fol' + 'der'), 'factor', 1.0)",
        "folder/helper.py",
        "folder.py",
    ),
    "a temporary file": ("exec(open('../{name}.txt').read())", "../{name}.txt", ""),
    "a temporary file that was absent": (
        "factor = 1.25 if os.path.exists('../{name}.txt') else 1.0",
        "unused.py",
        "../{name}.txt",
    ),
    "numbers in a hidden folder": (
        "factor = float(np.load('.cache/factor.npy'))",
        ".cache/factor.npy",
        "",
    ),
    "access to a file": ("factor = 1.25 if os.access('fast', 4) else 1.0", "unused.py", "fast"),
    "a link": (
        "factor = 1.25 if os.path.lexists('fast') else 1.0",
        "unused.py",
        "fast",
    ),
    "a file relative to an open folder": (
        "d = os.open('several', os.O_RDONLY)\n"
        "exec(os.read(os.open('program.txt', os.O_RDONLY, dir_fd=d), 99))",
        "several/program.txt",
        "",
    ),
    "an open folder": (
        "factor = 1.25 if 'fast.npy' in os.listdir(os.open('several', os.O_RDONLY)) else 1.0",
        "several/x.npy",
        "several/fast.npy",
    ),
    "a file that it may change": ("exec(open('program.txt', 'r+').read())", "program.txt", ""),
    "numbers that are mapped and may change": (
        "factor = float(np.memmap('factor.bin', np.float64)[0])",
        "factor.bin",
        "",
    ),
    "numbers that compiled code of a package reads": (
        "from safetensors.numpy import load_file\n"
        "factor = float(load_file('factor.safetensors')['factor'])",
        "factor.safetensors",
        "",
    ),
    "a file that a package looks for": (
        "import sys; sys.path.append('site-packages')\nimport asker\n"
        "factor = 1.25 if asker.asked() else 1.0",
        "unused.py",
        ".env",
    ),
    "a folder that a package lists": (
        "import sys; sys.path.append('site-packages')\nimport asker\n"
        "factor = 1.25 if 'fast.npy' in asker.listed() else 1.0",
        "several/x.npy",
        "several/fast.npy",
    ),
    "a hidden name in a folder": (
        "factor = 1.25 if '.fast' in os.listdir('several') else 1.0",
        "several/x.npy",
        "several/.fast",
    ),
    "a lock in a folder": (
        "factor = 1.25 if 'fast.lock' in os.listdir('several') else 1.0",
        "several/x.npy",
        "several/fast.lock",
    ),
}
"""How the attention finds its factor, what it finds at first, and what is there later, which
otherwise is the same."""


@pytest.mark.night
def test_the_byte_code_of_a_package_is_written_by_its_import(project, capsys, monkeypatch):
    code = "import sys; sys.path.append('site-packages')\nimport asker"
    folder = project(before=code, inside="factor = 1.0")
    (folder / "site-packages" / "asker").mkdir(parents=True)
    (folder / "site-packages" / "asker" / "__init__.py").write_text("")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    for again in (False, True):
        assert examined(**USUAL) == ["conforms"]
        assert ("1 of 1 items as measured" in capsys.readouterr().out) is again
    assert (folder / "site-packages" / "asker" / "__pycache__").exists()


def test_what_a_package_makes_in_its_cache_was_no_input(project, capsys):
    """As JAX does, which keeps what it compiled in a folder that may be hidden."""
    code = "import sys; sys.path.append('site-packages')\nimport asker\nasker.compiled()"
    folder = project(before=code, inside="factor = 1.0")
    (folder / ".kept").mkdir()
    (folder / "site-packages" / "asker").mkdir(parents=True)
    (folder / "site-packages" / "asker" / "__init__.py").write_text(
        "def compiled():\n    try:\n        return open('.kept/program').read()\n"
        "    except FileNotFoundError:\n        open('.kept/program', 'w').close()\n"
    )
    for again in (False, True):
        assert examined() == ["conforms"]
        assert ("1 of 1 items as measured" in capsys.readouterr().out) is again


@pytest.mark.sample(24)
@pytest.mark.parametrize("way", BESIDE)
def test_what_changes_beside_is_noticed(way, project, capsys):
    code, before, after = BESIDE[way]
    folder = project()
    code, before, after = (text.replace("{name}", folder.name) for text in (code, before, after))
    project(before=f"import os\n{code}")
    asker = folder / "site-packages" / "asker"
    asker.mkdir(parents=True)
    (asker / "__init__.py").write_text(
        "import os\ndef asked(): return os.path.exists('.env')\n"
        "def listed(): return os.listdir('several')\n"
    )
    write(folder, before, 1.0)
    assert examined() == ["conforms"]
    capsys.readouterr()
    assert examined() == ["conforms"]
    assert "1 of 1 items as measured" in capsys.readouterr().out
    write(folder, after or before, 1.25)
    assert examined() == ["deviates"]


WORDS = {
    "its docstring": ("import helper; exec(helper.given())", '"""{}"""\n'),
    "comments of a module": ("import helper; exec(helper.source()[2:].splitlines()[0])", "# {}\n"),
    "comments of a file": ("exec(open('helper.py').read()[2:].splitlines()[0])", "# {}\n"),
}
"""How the attention gets at words that are no code, and where they are."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WORDS)
def test_words_that_are_read_are_noticed(way, project, capsys):
    code, words = WORDS[way]
    folder = project(before=code)
    for factor, verdict, again in (
        (1.0, "conforms", False),
        (1.0, "conforms", True),
        (1.25, "deviates", False),
    ):
        (folder / "helper.py").write_text(
            words.format(f"factor = {factor}") + "import inspect, sys\n"
            "def given(): return __doc__\n"
            "def source(): return inspect.getsource(sys.modules[__name__])\n"
        )
        assert examined() == [verdict]
        assert ("as measured" in capsys.readouterr().out) is again


def test_a_link_to_another_folder_is_noticed(project, capsys):
    folder = project(
        before="import os; exec(open(os.path.realpath('model') + '/program.txt').read())"
    )
    for factor in (1.0, 1.25):
        write(folder, f"{factor}/program.txt", factor)
    for place, verdict, again in (
        ("1.0", "conforms", False),
        ("1.0", "conforms", True),
        ("1.25", "deviates", False),
    ):
        (folder / "model").unlink(missing_ok=True)
        (folder / "model").symlink_to(place)
        assert examined() == [verdict]
        assert ("as measured" in capsys.readouterr().out) is again


LEFT = {
    "a count": (
        "n = int(open('count').read())\nopen('count', 'w').write(str(n + 1))\n"
        "factor = 1.25 if n else 1.0",
        True,
    ),
    "what it moves": (
        "os.path.exists('count'); os.rename('count', 'old')\n"
        "factor = 1.0 if os.path.exists('other') else 1.25",
        True,
    ),
    "a cache": (
        "factor = 1.25 if os.path.exists('cache') else 1.0\nopen('cache', 'w').close()",
        False,
    ),
    "a mark that it removes": (
        "factor = 1.0 if os.path.exists('count') else 1.25\nif factor == 1: os.remove('count')",
        True,
    ),
}
"""What the attention leaves for its next process, and whether the summary says so."""


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", LEFT)
def test_what_it_leaves_for_the_next_process_is_noticed(way, project, capsys):
    code, told = LEFT[way]
    folder = project(before=f"import os\n{code}")
    (folder / "count").write_text("0")
    (folder / "other").write_text("")
    assert examined() == ["conforms"]
    assert ("and changes it" in capsys.readouterr().out) is told
    (folder / "other").unlink()
    if way == "what it moves":
        (folder / "count").write_text("1")
    assert examined() == ["deviates"]


@pytest.mark.night
@pytest.mark.parametrize("name", ["started", "sitecustomize"])
def test_a_module_that_is_there_before_it_is_observed(project, capsys, name):
    """As one that a file in site-packages imports when Python starts, and this file itself."""
    folder = project(before="import sys; factor = sys.factor")
    (folder / "custom").mkdir()
    (folder / "custom" / "sitecustomize.py").write_text("import started")
    for factor, verdict, again in (
        (1.0, "conforms", False),
        (1.0, "conforms", True),
        (1.25, "deviates", False),
    ):
        (folder / "custom" / f"{name}.py").write_text(f"import sys; sys.factor = {factor}")
        assert examined(PYTHONPATH="custom") == [verdict]
        assert ("as measured" in capsys.readouterr().out) is again


@pytest.mark.night
def test_a_library_that_its_own_loads_late_is_noticed(project, capsys):
    folder = project(before=KERNEL, inside="factor = 1.0 + kernel.set() / 4")
    late = "int value(void) {{ return {}; }}"
    calling = (
        "#include <dlfcn.h>\nint set(void) {\n"
        '  int (*value)(void) = (int (*)(void)) dlsym(dlopen("./late.so", RTLD_NOW), "value");\n'
        "  return value();\n}"
    )
    for value, verdict, again in (
        (0, "conforms", False),
        (0, "conforms", True),
        (1, "deviates", False),
    ):
        compiled(folder, late.format(value))
        (folder / "kernel.so").replace(folder / "late.so")
        compiled(folder, calling)
        assert examined() == [verdict]
        assert ("as measured" in capsys.readouterr().out) is again


SET = {
    "a variable that its C code reads": (
        f"{KERNEL}; factor = 1.0 + kernel.set() / 4",
        '#include <stdlib.h>\nint set(void) { return getenv("FACTOR") != NULL; }',
        {"FACTOR": "1"},
    ),
    "a path of modules": (
        "import sys; sys.path.append('later'); factor = __import__('hel' + 'per').factor",
        "",
        {"PYTHONPATH": "other"},
    ),
    "a module that customises Python": (
        "import sys; factor = getattr(sys, 'factor', 1.0)",
        "",
        {"PYTHONPATH": "custom"},
    ),
}
"""What reads variables beside the code, the C code if there is any, and the variables."""


@pytest.mark.night
@pytest.mark.parametrize("way", SET)
def test_a_variable_that_no_code_of_python_reads_is_noticed(way, project, capsys):
    code, kernel, variables = SET[way]
    folder = project(before=code)
    write(folder, "later/helper.py", 1.0)
    write(folder, "other/helper.py", 1.25)
    (folder / "custom").mkdir()
    (folder / "custom" / "sitecustomize.py").write_text("import sys; sys.factor = 1.25")
    if kernel:
        compiled(folder, kernel)
    for again in (False, True):
        assert examined(OTHER=str(again)) == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
    assert examined(OTHER="1", **variables) == ["deviates"]


def test_a_package_that_is_edited_in_place_is_noticed(project, capsys):
    folder = project(before="from dependency import factor")
    write(folder, "site-packages", 1.0)
    path = str(folder / "site-packages")
    for again in (False, True):
        assert examined(PYTHONPATH=path) == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
    module = folder / "site-packages" / "dependency" / "__init__.py"
    module.write_text("factor = 1.5 ")
    later = module.stat().st_mtime + 60
    os.utime(module, (later, later))
    assert examined(PYTHONPATH=path) == ["deviates"]


@pytest.mark.night
@pytest.mark.parametrize("asked", ["version", "entry_points"])
def test_what_is_installed_is_noticed_if_it_is_asked(asked, project, capsys):
    code = {
        "version": "try:\n    m.version('extra')\n    factor = 1.25\n"
        "except m.PackageNotFoundError:\n    factor = 1.0",
        "entry_points": "factor = 1.0 + len(m.entry_points(group='fast_attention')) / 4",
    }[asked]
    folder = project(before=f"import importlib.metadata as m\n{code}")
    about = folder / "more" / "extra-1.0.dist-info"
    about.parent.mkdir()
    for again in (False, True):
        assert examined(PYTHONPATH="more") == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[fast_attention]\nfast = os:name\n")
    assert examined(PYTHONPATH="more") == ["deviates"]


SYSTEM = {
    "its name": ("import platform; platform.node()", "platform.node"),
    "its name, by a socket": ("import socket; socket.gethostname()", "socket.gethostname"),
    "how many processors it has": ("import os; os.cpu_count()", "os.cpu_count"),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", SYSTEM)
def test_what_it_asks_of_the_system_is_noticed(way, project, capsys, monkeypatch):
    code, function = SYSTEM[way]
    project(before=code, inside="factor = 1.0")
    for again in (False, True):
        examined()
        assert ("as measured" in capsys.readouterr().out) is again
    monkeypatch.setattr(function, lambda: 77)
    examined()
    assert "as measured" not in capsys.readouterr().out


def test_the_time_zone_of_the_system_is_noticed(project, capsys, monkeypatch, tmp_path):
    project(inside="factor = 1.0")
    monkeypatch.delenv("TZ", raising=False)
    for again in (False, True):
        examined()
        assert ("as measured" in capsys.readouterr().out) is again
    real = inputs._of_file
    monkeypatch.setattr(
        inputs, "_of_file", lambda path: "other" if "localtime" in str(path) else real(path)
    )
    examined()
    assert "as measured" not in capsys.readouterr().out


# What cannot be seen

CAT = "['cat', 'program.txt']"
UNSEEN = {
    "a program": (f"import subprocess; exec(subprocess.check_output({CAT}))", "a program"),
    "a shell": ("exec(os.popen('cat program.txt').read())", "a program"),
    "a command": (
        "os.system('cat program.txt > copy.txt'); exec(open('copy.txt').read())",
        "a program",
    ),
    "posix_spawn": (
        "f = [(os.POSIX_SPAWN_OPEN, 1, 'copy.txt', os.O_WRONLY | os.O_CREAT, 0o600)]\n"
        f"os.waitpid(os.posix_spawnp('cat', {CAT}, os.environ, file_actions=f), 0)\n"
        "exec(open('copy.txt').read())",
        "a program",
    ),
    "a fork": (
        "r, w = os.pipe()\nif not os.fork():\n"
        "    os.write(w, open('program.txt', 'rb').read()); os._exit(0)\n"
        "exec(os.read(r, 99))",
        "a process",
    ),
    "a worker": (
        "from multiprocessing import get_context\ndef work(queue):\n"
        "    queue.put(open('program.txt').read())\nqueue = get_context('fork').Queue()\n"
        "p = get_context('fork').Process(target=work, args=(queue,)); p.start()\n"
        "exec(queue.get()); p.join()",
        "a process",
    ),
    "a worker that is spawned": (
        "import reading\nfrom multiprocessing import get_context\n"
        "from concurrent.futures import ProcessPoolExecutor as P\n"
        "with P(1, mp_context=get_context('spawn')) as p:\n"
        "    exec(p.submit(reading.read, 'program.txt').result())",
        "a process",
    ),
    "a connection": (
        "import socket; s = socket.socket(); s.settimeout(1)\n"
        "try:\n    s.connect(('127.0.0.1', 9))\nexcept OSError:\n    pass\ns.close()\n"
        "exec(open('program.txt').read())",
        "the network",
    ),
    "a name of the network": (
        "import socket; socket.getaddrinfo('127.0.0.1', 9); exec(open('program.txt').read())",
        "the network",
    ),
    "the time": ("import time; time.time(); exec(open('program.txt').read())", "the clock"),
    "the local time": (
        "import time; time.strftime('%H'); exec(open('program.txt').read())",
        "the clock",
    ),
    "the date": (
        "import datetime; datetime.date.today(); exec(open('program.txt').read())",
        "the clock",
    ),
    "a variable by the C library": (
        "import ctypes; ctypes.CDLL(None).getenv(b'FACTOR'); exec(open('program.txt').read())",
        "getenv",
    ),
    "a file by the C library": (
        "import ctypes; c = ctypes.CDLL(None); c.fopen.restype = ctypes.c_void_p\n"
        "b = ctypes.create_string_buffer(99)\n"
        "f = ctypes.c_void_p(c.fopen(b'program.txt', b'r')); c.fread(b, 1, 98, f)\n"
        "exec(b.value.decode())",
        "fopen",
    ),
    "a file that compiled code maps": (
        "import ctypes; c = ctypes.CDLL(None); c.mmap.restype = ctypes.c_void_p\n"
        "size, start = ctypes.c_size_t(14), ctypes.c_long(0)\n"
        "exec(ctypes.string_at(c.mmap(None, size, 1, 1, c.open(b'program.txt', 0), start), 13))",
        "open",
    ),
    "the time by its clock": (
        "import time; time.clock_gettime(time.CLOCK_REALTIME); exec(open('program.txt').read())",
        "the clock",
    ),
    "all variables by the C library": (
        "import ctypes; ctypes.c_void_p.in_dll(ctypes.CDLL(None), 'environ')\n"
        "exec(open('program.txt').read())",
        "environ",
    ),
    "what changes by itself": (
        "open('/proc/uptime').read(); exec(open('program.txt').read())",
        "/proc/uptime",
    ),
}
"""How the attention gets at its factor, and what the summary says of it."""


WITH = {
    "a worker that is spawned": {"PYTHONPATH": "."},
    "a variable by the C library": {"FACTOR": "1"},
    "all variables by the C library": {"FACTOR": "1"},
}
"""The variables with which some of them have to be started, in a process of their own."""


@pytest.mark.sample(24)
@pytest.mark.parametrize("way", UNSEEN)
def test_what_cannot_be_seen_is_asked_again(way, project, capsys):
    code, told = UNSEEN[way]
    folder = project(before=f"import os\n{code}")
    (folder / "reading.py").write_text("def read(name): return open(name).read()")
    write(folder, "program.txt", 1.0)
    variables = WITH.get(way, {})
    for _ in range(2):
        assert examined(**variables) == ["conforms"]
        printed = capsys.readouterr().out
        assert "as measured" not in printed
        assert "attention is measured anew in every run: " in printed
        assert told in printed
    write(folder, "program.txt", 1.25)
    assert examined(**variables) == ["deviates"]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("fopen", '#include <stdio.h>\nint set(void) { return fopen("x", "r") != NULL; }'),
        ("syscall", "#include <unistd.h>\nint set(void) { return syscall(2); }"),
        ("popen", '#include <stdio.h>\nint set(void) { return popen("x", "r") == NULL; }'),
    ],
)
def test_of_c_code_that_can_read_anything_everything_is_asked_again(name, call, project, capsys):
    folder = project(before=KERNEL, inside="factor = 1.0")
    compiled(folder, call)
    for _ in range(2):
        examined()
        printed = capsys.readouterr().out
        assert "as measured" not in printed
        assert f"kernel.so can call {name}" in printed


HONEST = {
    "what it imports but does not call": (
        "import ctypes, datetime, multiprocessing, socket, subprocess, time"
    ),
    "a clock that has no date": "import time; time.perf_counter(), time.monotonic()",
    "the time of a fixed moment": "import time; time.strftime('%H', time.gmtime(0))",
    "the kind of system": "import platform; platform.system(), platform.machine()",
    "a library that is looked up": "import ctypes.util; ctypes.util.find_library('m')",
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "with P(2) as p: assert [*p.map(abs, [1])] == [1]"
    ),
    "a temporary file of its own": (
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n"
        "    f.write('x'); f.flush(); open(f.name).read()\n"
        "with tempfile.TemporaryDirectory() as d:\n"
        "    open(d + '/y', 'w').close(); open(d + '/y').close(); os.listdir(d)"
    ),
    "words that nobody reads": "import traceback; traceback.format_stack()",
    "a message": (
        "import logging, warnings; logging.warning('x'); logging.info('y')\nwarnings.warn('z')"
    ),
    "a resolved path": "from pathlib import Path; Path(__file__).resolve()",
    "a file of a log": "print('x', file=open('log.txt', 'a+'))",
    "a file that it writes and reads": (
        "open('copy.txt', 'w').write('x'); open('copy.txt').read(); os.remove('copy.txt')"
    ),
    "a device": "open('/dev/null').close()",
    "a package that starts a process": "import starter",
    "a package that reads the clock": "import clock",
    "a kernel": KERNEL,
    "a clock that only its script reads": (
        "import datetime\nif __name__ == '__main__':\n    print(datetime.datetime.now())"
    ),
}


@pytest.mark.sample(24)
@pytest.mark.parametrize("way", HONEST)
def test_what_is_as_it_was_is_not_asked_again(way, project, capsys):
    folder = project(before=f"import os\n{HONEST[way]}", inside="factor = 1.0")
    if HONEST[way] == KERNEL:
        compiled(folder, "int set(void) { return 0; }")
    for name, code in {
        "starter": "import subprocess, socket; subprocess.run(['true']); socket.socket()",
        "clock": "import time, datetime; time.time(), datetime.datetime.now()",
    }.items():
        (folder / "site-packages" / name).mkdir(parents=True)
        (folder / "site-packages" / name / "__init__.py").write_text(code)
    path = {"PYTHONPATH": "site-packages"} if way.startswith("a package") else {}
    for again in (False, True):
        assert examined(**path) == ["conforms"]
        printed = capsys.readouterr().out
        assert ("as measured" in printed) is again
        assert "anew" not in printed


@pytest.mark.night
@pytest.mark.parametrize("within", [True, False], ids=["in the project", "elsewhere"])
def test_the_suite_may_be_installed_like_any_package(within, project, capsys, tmp_path_factory):
    """Not only as it is here, where its files lie outside site-packages."""
    folder = project(before="from helper import factor")
    write(folder, "helper.py", 1.0)
    place = folder / ".venv" if within else tmp_path_factory.mktemp("environment")
    installed = place / "lib" / "site-packages"
    # With its byte code, which takes seconds to write.
    shutil.copytree(CORE, installed / "conformance")
    shutil.copytree(CORE.parent / "adapters", installed / "conformance/adapters")
    for again in (False, True):
        assert examined(PYTHONPATH=str(installed)) == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
    write(folder, "helper.py", 1.25)
    assert examined(PYTHONPATH=str(installed)) == ["deviates"]


def test_a_module_that_has_no_attributes_is_not_asked_for_any(project, capsys):
    """As haiku.experimental.flax where Flax is not installed."""
    project(
        before="import sys, types\n\n"
        "class Missing(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        if name == '__file__':\n"
        "            return None\n"
        "        raise ImportError(name)\n\n"
        "sys.modules['missing'] = Missing('missing')\n"
        "sys.modules['nothing'] = None\n"
        "sys.modules['number'] = 1",
        inside="factor = 1.0",
    )
    for again in (False, True):
        assert examined() == ["conforms"]
        assert ("as measured" in capsys.readouterr().out) is again
