"""From a name to an adapter, and what somebody hears who gets the name wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mutants.miniatures import Correct

from conformance import attention_function, frameworks
from conformance.adapter import loading
from conformance.adapter.base import Adapter, Call
from conformance.adapter.loading import adapted, load, registered
from conformance.cases.catalogue import find_cases
from conformance.cli import main
from conformance.errors import (
    ExitCode,
    NotAnAdapter,
    Unavailable,
    UnknownName,
    WrongDeclaration,
)
from conformance.frameworks import BRIDGES, framework
from conformance.running.provenance import describe
from conformance.running.session import Session, plan

MINIATURES = Path(__file__).with_name("mutants") / "miniatures.py"
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "tensorflow", "keras")


def refused(spec, kind=NotAnAdapter):
    """The one line that `load` says."""
    with pytest.raises(kind) as caught:
        load(str(spec))
    told = str(caught.value)
    assert "\n" not in told
    return told


def file(folder, text, name="mine.py"):
    path = folder / name
    path.write_text(text)
    return path


def python(code, *arguments, cwd=None):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "KERAS"))}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=300, cwd=cwd, env=env, check=False,
    )  # fmt: skip


# Names that are right


def test_a_file_imports_its_neighbours_and_a_module_is_found_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    made = {"mine_beside_it", "mine_in_this_folder", "the_neighbour"}
    for name in ("mine_beside_it", "mine_in_this_folder"):
        text = "from mutants.miniatures import Correct\nfrom the_neighbour import TITLE\n"
        text += "class Mine(Correct):\n    title = TITLE\n"
        file(tmp_path, text, f"{name}.py")
    file(tmp_path, "TITLE = 'from beside'", "the_neighbour.py")
    # What is installed goes before a file of the same name.
    file(tmp_path, "raise RuntimeError('hidden')", "einops.py")
    try:
        assert load(f"{tmp_path}/mine_beside_it.py:Mine").title == "from beside"
        monkeypatch.setattr(sys, "path", [it for it in sys.path if it != str(tmp_path)])
        monkeypatch.chdir(tmp_path)
        assert load("mine_in_this_folder:Mine").title == "from beside"
        assert importlib.util.find_spec("einops").origin != str(tmp_path / "einops.py")
    finally:
        for name in made & {*sys.modules}:
            del sys.modules[name]


def test_a_built_in_name():
    adapter = load("torch-mha")
    assert adapter.name == "torch-mha"
    assert adapter.title == "torch.nn.MultiheadAttention"


def test_every_registered_name_loads():
    # Loading imports no framework, so this holds wherever the suite is installed.
    for name in registered():
        assert load(name).name == name


@pytest.mark.parametrize("name", ["Correct", "instance", "decorated"])
def test_a_class_an_object_or_a_decorated_function_in_a_file(name):
    adapter = load(f"{MINIATURES}:{name}")
    assert isinstance(adapter, Adapter)
    assert adapter.name == name
    assert adapter.title == name


def test_a_relative_path(monkeypatch):
    monkeypatch.chdir(MINIATURES.parent)
    assert load("miniatures.py:Correct").name == "Correct"
    assert load("./miniatures.py:Correct").name == "Correct"


def test_a_module():
    assert type(load("mutants.miniatures:Correct")) is Correct
    assert load("conformance.adapters.torch_mha:TorchMultiheadAttention").framework == "torch"


def test_a_name_of_its_own_stays(tmp_path):
    path = file(
        tmp_path, "from mutants.miniatures import *\nclass A(Correct):\n    name = 'my-own'\n"
    )
    assert load(f"{path}:A").name == "my-own"


def test_a_file_is_imported_once(tmp_path):
    path = file(tmp_path, "from mutants.miniatures import *\ncount = []\nclass A(Correct): pass\n")
    assert type(load(f"{path}:A")) is type(load(f"{path}:A"))


def test_two_files_of_one_name_are_two_modules(tmp_path):
    (tmp_path / "other").mkdir()
    texts = (f"from mutants.miniatures import *\nclass A(Correct): title = '{t}'\n" for t in "xy")
    folders = (tmp_path, tmp_path / "other")
    paths = [file(folder, text) for folder, text in zip(folders, texts, strict=True)]
    assert [load(f"{path}:A").title for path in paths] == ["x", "y"]


@pytest.mark.parametrize("beside", ["helper.py", "helper/__init__.py", "helper/part.py"])
def test_two_files_import_the_modules_beside_each(tmp_path, beside):
    """A function imports late, and is called after the other was loaded."""
    module = beside.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    text = f"""
from {module} import TITLE
from mutants.miniatures import Correct
class A(Correct):
    title = TITLE
    def attend(self, *given, **options):
        from {module} import TITLE
        self.titles = [*getattr(self, "titles", ()), TITLE]
        return super().attend(*given, **options)
"""
    adapters = []
    for name in ("x", "y"):
        (tmp_path / name / beside).parent.mkdir(parents=True)
        file(tmp_path / name, f"TITLE = {name!r}", beside)
        adapters.append(load(f"{file(tmp_path / name, text)}:A"))
    try:
        assert [one.title for one in adapters] == ["x", "y"]
        case = find_cases("plain/no-mask/self")
        for one in (*adapters, *adapters):
            (item,) = plan([one], case, ["float32"], "cpu")
            Session().ask(item)
        assert [set(one.titles) for one in adapters] == [{"x"}, {"y"}]
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "helper"]:
            del sys.modules[name]


# Names that are wrong


@pytest.mark.parametrize(
    ("name", "near"),
    [("torch-mah", "torch-mha"), ("flax", "flax-nnx or flax-linen"), ("Ours", "ours")],
)
def test_an_unknown_name_with_the_nearest(name, near):
    told = refused(name, UnknownName)
    assert told.startswith(f"unknown implementation {name!r}; did you mean ")
    assert near in told


def test_a_name_like_no_other_lists_them_all():
    told = refused("xyzzy", UnknownName)
    known = ", ".join(registered())
    there = "all that there are: mha-conformance list implementations"
    assert told in (
        f"unknown implementation 'xyzzy'; known: {known}",
        f"unknown implementation 'xyzzy'; {there}",
    )


def test_a_file_without_a_name_lists_its_adapters():
    told = refused(MINIATURES)
    assert f"name the adapter in it, {MINIATURES}:NAME" in told
    offered = told.split("adapters in it: ")[1].split(", ")
    assert {"Correct", "Raw", "decorated", "instance"} <= set(offered)
    # Base classes that it imports are not its own.
    assert not {"Function", "Layer", "Adapter", "Foreign"} & set(offered)


def test_a_name_that_the_file_lacks():
    told = refused(f"{MINIATURES}:Corect")
    assert told.startswith(f"{MINIATURES} has no 'Corect'; adapters in it: Correct, ")


def test_a_file_without_adapters(tmp_path):
    assert refused(file(tmp_path, "x = 1")).endswith("there is no adapter in it")


def test_no_such_file(tmp_path):
    missing = tmp_path / "missing.py"
    assert f"there is no file {missing}" in refused(f"{missing}:A")
    assert f"there is no file {tmp_path}" in refused(f"{folder(tmp_path)}:A")


def folder(path):
    (path / "folder.py").mkdir()
    return path / "folder.py"


def test_a_syntax_error(tmp_path):
    told = refused(f"{file(tmp_path, 'def broken(:')}:A")
    assert "does not import: SyntaxError: invalid syntax (mine.py, line 1)" in told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("raise RuntimeError('two\\nlines')", "does not import: RuntimeError: two lines"),
        ("import sys; sys.exit(3)", "does not import: SystemExit: 3"),
        ("from os import nothing_like_it", "does not import: ImportError: cannot import name"),
        ("1 / 0", "does not import: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_fails(tmp_path, line, told):
    path = file(tmp_path, line)
    assert told in refused(f"{path}:A")
    # Nothing half imported is left behind: the second attempt says the same.
    assert told in refused(f"{path}:A")


def test_a_file_that_imports_a_missing_package(tmp_path):
    path = file(tmp_path, "import no_such_package_anywhere.part")
    told = refused(f"{path}:A", Unavailable)
    assert told == f"{path}:A: it imports 'no_such_package_anywhere', which is not installed"


def test_an_object_that_is_no_adapter():
    told = refused(f"{MINIATURES}:not_an_adapter")
    assert "dict is no adapter; derive from conformance.Layer, or decorate a function" in told
    assert "type is no adapter" in refused(f"{MINIATURES}:Foreign")
    assert "new-adapter" not in told
    spec = f"{MINIATURES}:attention"
    told = refused(spec)
    assert f"function is no adapter; mha-conformance new-adapter {spec} writes one" in told


def test_an_adapter_with_something_left_to_define():
    told = refused(f"{MINIATURES}:Abstract")
    assert told.endswith("Abstract does not define build, call")


def test_an_adapter_that_cannot_be_made():
    told = refused(f"{MINIATURES}:Unbuildable")
    assert "Unbuildable() fails: TypeError: " in told
    assert "'path'" in told


@pytest.mark.parametrize("spec", ["no.such.module:A", "no_such_module:A", "path/to/file:A"])
def test_no_such_module(spec):
    assert f"there is no module {spec.partition(':')[0]!r}" in refused(spec)


def test_a_module_that_can_be_none():
    assert "does not import" in refused("..relative:A")


@pytest.mark.parametrize("spec", ["", " ", ":", ":A"])
def test_a_place_that_is_empty(spec):
    assert refused(spec).startswith(f"{spec!r} names no implementation; name FILE.py:NAME")


def test_a_module_that_imports_a_missing_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file(tmp_path, "import no_such_package_anywhere", "needy.py")
    assert "it imports 'no_such_package_anywhere'" in refused("needy:A", Unavailable)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("mask_arguments = MASK", "mask_arguments must be a tuple"),
        ("masks = (MASK,)", "masks is made by the suite; declare arguments as mask_arguments"),
        ("mask_arguments = (MASK, MASK)", "two mask arguments have the same name"),
        ("dtypes = 'float32'", "dtypes must be a tuple"),
        ("scores = 'additive'", "scores must be a tuple"),
        ("modes = Mode('eval')", "modes must be a tuple"),
        ("modes = ()", "there must be a mode"),
        ("mask_arguments = ('mask',)", "mask_arguments must be a tuple of conformance.MaskArgum"),
        ("modes = ('train',)", "modes must be a tuple of conformance.Mode, and is ('train',)"),
        ("dtypes = ('float7',)", "dtypes: there is no 'float7', only float64, float32"),
        ("scores = ('dot',)", "scores: there is no 'dot', only scaled-dot, additive"),
        ("causal_flag = 'is_causal'", "causal_flag must be a conformance.CausalFlag or None"),
        ("custom_scale = 'yes'", "custom_scale must be True or False, and is 'yes'"),
        ("returns_weights = 3", 'returns_weights must be "per head", "averaged" or None'),
        ("fully_masked_row = 3", "fully_masked_row must be text, a dictionary by mode, or None"),
        ("conventions = 3", "conventions must be a dictionary of texts"),
        ("example = 'mine(q, k, v)'", "example must be a conformance.Example or None"),
        ("title = 3", "title must be text, and is 3"),
        ("geometry = (64,)", "geometry must be a conformance.Geometry or None"),
        ("name = 'my:attention'", "the name 'my:attention' has a colon, bracket or blank"),
        ("name = 'my attention'", "has a colon, bracket or blank"),
        ("causal_flag = CausalFlag('c', needs='x')", "causal flag needs 'x'"),
        ("mask_arguments = (MaskArgument('m', 'batch key'),)", "accepts neither"),
    ],
)
def test_a_declaration_that_cannot_be(tmp_path, body, told):
    path = file(tmp_path, f"from mutants.miniatures import *\nclass A(Correct):\n    {body}\n")
    assert told in refused(f"{path}:A", WrongDeclaration)


@pytest.mark.parametrize("parameters", ["('x',)", "'query'", "None"])
def test_a_parameter_table_of_something_else(tmp_path, parameters):
    body = f"parameters = {parameters}\n    build = call = lambda *given: None"
    path = file(tmp_path, f"from conformance import Layer\nclass A(Layer):\n    {body}\n")
    told = refused(f"{path}:A", WrongDeclaration)
    assert "parameters must be a tuple of conformance.Parameter" in told


def test_a_decorated_function_with_an_attribute_that_adapters_lack(tmp_path):
    path = file(
        tmp_path,
        "from mutants.miniatures import *\n@attention_function('numpy', causal='is_causal')\n"
        "def f(query, key, value): pass\n",
    )
    assert refused(f"{path}:f", WrongDeclaration) == "adapters have no attribute 'causal'"


# Frameworks: imported when asked for, and not before

WITHOUT_FRAMEWORKS = f"""
import sys
from functools import cached_property

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(FRAMEWORKS)}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""


def test_unknown_frameworks():
    with pytest.raises(UnknownName, match="unknown framework 'pytorch'; did you mean torch"):
        framework("pytorch")


@pytest.mark.parametrize("isolated", ["--isolate", "--no-isolate"])
def test_a_misspelt_framework_is_one_line(tmp_path, capsys, isolated):
    path = tmp_path / "mine.py"
    path.write_text(
        "from conformance import attention_function\n"
        "@attention_function('torhc')\ndef mine(query, key, value): ...\n"
    )
    assert main(["run", f"{path}:mine", isolated]) == ExitCode.USAGE
    told = "mha-conformance: unknown framework 'torhc'; did you mean torch?"
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_framework_that_breaks_while_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file(tmp_path, "raise OSError('no libfoo.so')", "breaks_inside.py")
    monkeypatch.setitem(frameworks.BRIDGES, "odd", ("x", "X", "breaks_inside"))
    with pytest.raises(Unavailable, match=r"breaks_inside does not import: OSError: no libfoo\.so"):
        framework("odd")


def test_a_library_beside_its_framework_that_breaks_while_it_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    file(tmp_path, "from os import nothing_like_it", "breaks_beside.py")

    @attention_function("numpy", packages=("numpy",), imports=("breaks_beside",))
    def mine(query, key, value):
        return query

    (told,) = describe([(adapted(mine, "mine"), "mine")], "cpu")
    reason = "breaks_beside does not import: ImportError: cannot import name 'nothing_like_it'"
    assert told.unavailable == f"{reason} from 'os'"
    assert told.versions == {"numpy": np.__version__}
    problem = find_cases("plain/no-mask/self")[0].problem("float32")
    for _ in range(2):
        with pytest.raises(Unavailable, match=reason):
            mine.run(problem, Call())


@pytest.mark.parametrize("name", [name for name in BRIDGES if name != "numpy"])
def test_what_to_install_where_a_framework_is_missing(name, monkeypatch):
    needed = "no_such_framework_anywhere"
    monkeypatch.setitem(frameworks.BRIDGES, name, ("x", "X", needed))
    framework.cache_clear()
    try:
        with pytest.raises(Unavailable) as caught:
            framework(name)
    finally:
        framework.cache_clear()
    assert str(caught.value) == f"{needed} is not installed; pip install {needed}"


def test_a_run_without_any_framework(tmp_path):
    code = WITHOUT_FRAMEWORKS + "from conformance.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["--dtype", "float32", "--case", "mask/per-batch/self", "--record", "r.json"]
    names = ["ours", "torch-mha", "flax-linen", "keras-tensorflow-mha"]
    done = python(code, "run", *names, *options, cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    record = json.loads((tmp_path / "r.narrowed.json").read_text())
    told = {it["name"]: it["unavailable"] for it in record["header"]["implementations"]}
    assert told.keys() == set(names)
    assert told["torch-mha"] == "torch is not installed; pip install torch"
    assert told["torch-mha"] in done.stdout
    assert told["flax-linen"] == "jax is not installed; pip install jax"
    found = [f for result in record["results"] for f in result["findings"]]
    assert {f["verdict"] for f in found} == {"unavailable"}
    assert all("is not installed; pip install" in f["detail"] for f in found)


IMPORTED = f"\nimport sys; print(sorted(set({FRAMEWORKS!r}) & set(sys.modules)))"

EVERYTHING = """
import importlib, pkgutil, conformance
own = ("adapters.ours.attention", "adapters.ours.positions")
for found in pkgutil.walk_packages(conformance.__path__, "conformance."):
    if not found.name.endswith(("_bridge", "_node", "__main__", *own)):
        importlib.import_module(found.name)
from conformance.adapter.loading import load, registered
for name in registered():
    load(name)
import conformance.adapters.ours, conformance.adapters.torch_mha
"""


@pytest.mark.parametrize(
    "code",
    [
        "import conformance; conformance.Layer; dir(conformance)",
        "import conformance.running.plugin",
        EVERYTHING,
        "from conformance.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from conformance.cli import main; main(['list', 'implementations']);"
        "main(['list', 'requirements']); main(['explain', 'mask/shared/cross'])",
    ],
    ids=["package", "plugin", "everything", "--help", "list and explain"],
)
def test_no_framework_is_imported(code):
    done = python(code + IMPORTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_package_and_the_plugin_import_next_to_nothing():
    code = "import conformance, conformance.running.plugin, sys\n"
    code += "print(*[n for n in sys.modules if n.startswith('conformance.')])\n"
    code += "print(*{'numpy', 'msgspec', 'einops', 'rich'} & set(sys.modules))"
    own, others = python(code).stdout.split("\n", 1)
    packages = {"conformance.records", "conformance.running"}  # no module of them but the plugin
    assert set(own.split()) == {*packages, "conformance.running.plugin"}
    assert not others.split()


def test_public_names():
    import conformance

    for name in conformance.__all__:
        assert getattr(conformance, name).__name__ == name
    assert set(dir(conformance)) == set(conformance.__all__)
    with pytest.raises(AttributeError, match="'conformance' has no attribute 'Leyer'"):
        _ = conformance.Leyer


def test_a_built_in_adapter_is_named_by_its_own_file(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text('import nothing_like_it\n\nADAPTERS = {"first": "First"}\n')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__init__.py").write_text(
        'ADAPTERS = {\n    "second": "Second",\n    "third": "Third",\n}\n'
    )
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: spec)
    built_in = loading._built_in.__wrapped__
    assert {point.name: point.value for point in built_in()} == {
        "first": "conformance.adapters.one:First",
        "second": "conformance.adapters.folder:Second",
        "third": "conformance.adapters.folder:Third",
    }
    (tmp_path / "two.py").write_text('ADAPTERS = {"first": "Other"}\n')
    with pytest.raises(WrongDeclaration, match="one:First is called 'first' too"):
        built_in()
    (tmp_path / "two.py").write_text('ADAPTERS = {"other": Other}\n')
    with pytest.raises(WrongDeclaration, match=r"two\.py: ADAPTERS is no literal table"):
        built_in()


def file_of(module):
    return Path(importlib.util.find_spec(module).origin)


def test_every_built_in_name_is_an_adapter_of_a_class_that_its_file_defines():
    for point in registered().values():
        if point.module.startswith("conformance.adapters."):
            assert f"class {point.attr}(" in file_of(point.module).read_text(encoding="utf-8")


def test_an_accuracy_class_that_there_is_not(tmp_path):
    path = tmp_path / "b.py"
    path.write_text(
        "from mutants.miniatures import Correct\n\nclass B(Correct):\n    accuracy = 'B'\n"
    )
    with pytest.raises(WrongDeclaration, match="accuracy='B'; say 'A', 'A0', 'TF32' or nothing"):
        load(f"{path}:B")


@pytest.mark.parametrize(
    ("declared", "told"),
    [
        ({"float32": "A"}, "'A' is no promise in float32"),
        ({"bfloat16": "TF32"}, "'TF32' is no promise in bfloat16"),
        ({"bfloat16": "C"}, "'C' is no promise in bfloat16"),
        ({"float8": "A"}, "no dtype is called 'float8'"),
    ],
)
def test_a_class_that_a_dtype_does_not_have(tmp_path, declared, told):
    path = tmp_path / "b.py"
    path.write_text(
        f"from mutants.miniatures import Correct\n\nclass B(Correct):\n    accuracy = {declared}\n"
    )
    with pytest.raises(WrongDeclaration, match=told):
        load(f"{path}:B")


@pytest.mark.parametrize(
    ("declared", "promised"),
    [
        ("", ["", ""]),
        ("A", ["A", "A"]),
        ("TF32", ["TF32", "TF32"]),
        ({"float32": "TF32", "bfloat16": "A"}, ["TF32", "A"]),
        ({"float32": "TF32"}, ["TF32", ""]),
    ],
)
def test_a_class_for_every_dtype_or_by_dtype(tmp_path, declared, promised):
    path = tmp_path / "b.py"
    path.write_text(
        "from mutants.miniatures import Correct\n\n"
        f"class B(Correct):\n    accuracy = {declared!r}\n"
    )
    adapter = load(f"{path}:B")
    assert [adapter.promised(dtype) for dtype in ("float32", "bfloat16")] == promised


def test_a_property_that_is_cached_is_not_attached_to_an_array():
    class Sharded(np.ndarray):
        @cached_property
        def is_fully_replicated(self):
            return True

    array = np.ones(3).view(Sharded)
    assert array.is_fully_replicated
    assert "is_fully_replicated" in array.__dict__
    array.mask = None
    assert framework("numpy").attached(array) == {"mask": "NoneType"}


def test_a_folder_is_no_adapter(tmp_path):
    with pytest.raises(NotAnAdapter, match="is a folder; name a file in it"):
        load(str(tmp_path))
