"""Data flows one way: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from looped import for_each

import conformance

CORE = Path(conformance.__file__).parent
ROOT = CORE.parent
FOLDERS = {
    "conformance": CORE,
    "conformance.adapters": ROOT / "adapters",
}
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "tensorflow", "keras"}

FLOORS = (
    "errors",
    "text",
    "records",
    "words",
    "definition",
    "cases",
    "frameworks",
    "adapter",
    "requirements",
    "experiments",
    "causes",
    ("explore", "porting", "long"),
    ("arrays", "stateful"),
    "reports",
    "running",
    "judging",
    "commands",
    "cli",
)
"""The rooms from the ground up: each imports from its own floor and from floors below only."""

HEIGHT = {
    room: height
    for height, rooms in enumerate(FLOORS)
    for room in ((rooms,) if isinstance(rooms, str) else rooms)
}

READS = {
    "reports": {"reports", "records", "words", "text", "errors"},
    "records": {"records", "text", "errors"},
    "definition": {"definition", "records", "text", "errors"},
    "experiments": set(HEIGHT) - {"frameworks"},
    "requirements": set(HEIGHT) - {"frameworks"},
    "explore": set(HEIGHT) - {"reports"},
    "long": {
        "definition",
        "adapter",
        "records",
        "frameworks",
        "text",
        "words",
        "errors",
    },
    "porting": set(HEIGHT) - {"reports", "requirements", "experiments", "causes", "records"},
}
"""What a room may import beyond the rule of the floors; a room that is not named: all below."""

ADAPTER_READS = {"conformance", "conformance.adapter", "conformance.adapters"}
"""An adapter knows the adapter interface, and other adapters; never what is expected."""

ALONE = re.compile(
    r"conformance\.adapters\.(ours\.(attention|invariant|positions|ring|jax_ring)|tutorials\.tutorial_\d|triton_flash_kernel)"
)
"""Modules that are examined, and that know of each other at most, and of no suite."""

SANDBOXED = "conformance.judging.runner"
"""A program that runs beside candidates, which the suite never imports."""

pytestmark = pytest.mark.skipif(not (ROOT / "adapters").is_dir(), reason="needs a checkout")


def sources():
    """Module name to file, for everything that the package holds."""
    found = {}
    for top, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((top, *(part for part in parts if part != "__init__")))] = path
    return found


SOURCES = sources()


@cache
def statements(path):
    """What each import of a file names, and whether it is in a function, or for types only."""
    found = []

    def visit(node, within_function, for_types):
        if isinstance(node, ast.Import):
            found.append(({alias.name for alias in node.names}, within_function, for_types))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            found.append((names, within_function, for_types))
        elif isinstance(node, ast.expr):
            return
        within_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, ast.If):
            for_types |= "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.iter_child_nodes(node):
            visit(child, within_function, for_types)

    visit(ast.parse(path.read_text(encoding="utf-8")), False, False)
    return found


def imports(path, *, lazy=True, typing=True):
    """Full names of what a file imports; without `lazy`, only what its import runs."""
    chosen = (
        names
        for names, within_function, for_types in statements(path)
        if (lazy or not within_function) and (typing or not for_types)
    )
    return set().union(*chosen)


def within(names, *packages):
    """Those of the names that lie in one of the packages."""
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in packages)}


def every(package):
    return [name for name in SOURCES if within([name], package)]


def core():
    return [name for name in SOURCES if not within([name], "conformance.adapters")]


def room_of(name):
    """The first name below `conformance`, if it is a room."""
    room = name.split(".")[1] if "." in name else ""
    return room if room in HEIGHT else ""


def test_the_sources_are_found():
    assert {"conformance", "conformance.adapters.torch_mha", "conformance.cli"} <= SOURCES.keys()
    assert "torch" in imports(SOURCES["conformance.frameworks.torch_bridge"])
    lazy = SOURCES["conformance.adapters.torch_mha"]
    assert "torch" in imports(lazy)
    assert "torch" not in imports(lazy, lazy=False)


def test_every_room_has_a_floor():
    rooms = {name.split(".")[1] for name in SOURCES if "." in name} - {"adapters", "__main__"}
    assert rooms == HEIGHT.keys()


@for_each(name=core())
def test_no_arrow_runs_up(name):
    room = room_of(name)
    if not room:
        return
    found = {room_of(n) for n in within(imports(SOURCES[name]), "conformance")} - {"", room}
    up = {other for other in found if HEIGHT[other] >= HEIGHT[room]}
    aside = found - READS.get(room, set(HEIGHT))
    wrong = {f"{name} -> {other}" for other in up | aside}
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    """Not even within a room, where types alone are no arrow."""
    arrows = {}
    for name, path in SOURCES.items():
        found = {n for n in imports(path, typing=False) if n in SOURCES}
        # `from package import name` names the package too; what it is made of imports it not.
        arrows[name] = {n for n in found if not name.startswith(n + ".")} - {name}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(arrows[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(arrows):
        visit(name)


@for_each(name=core())
def test_nothing_imports_an_adapter(name):
    assert not within(imports(SOURCES[name]), "conformance.adapters", "adapters")


@for_each(name=core())
def test_only_bridges_import_a_framework(name):
    if not name.endswith("_bridge") and name != SANDBOXED:
        assert not within(imports(SOURCES[name]), *FRAMEWORKS)


def test_what_runs_beside_candidates_knows_no_suite():
    assert not within(imports(SOURCES[SANDBOXED]), "conformance")
    assert not [name for name, path in SOURCES.items() if SANDBOXED in imports(path)]


@for_each(name=every("conformance.frameworks"))
def test_a_bridge_imports_its_own_framework_only(name):
    own = {"torch_bridge": "torch", "jax_bridge": "jax", "tensorflow_bridge": "tensorflow"}
    allowed = own.get(name.rpartition(".")[2])
    found = {n.partition(".")[0] for n in within(imports(SOURCES[name]), *FRAMEWORKS)}
    assert found <= {allowed}


@for_each(name=core())
def test_no_bridge_is_imported_before_it_is_asked_for(name):
    found = imports(SOURCES[name])
    own = set()
    if name.endswith("_bridge"):
        own = {"conformance.frameworks.numpy_bridge"}
    assert not {n for n in found - own if n.startswith("conformance.") and n.endswith("_bridge")}


@for_each(name=every("conformance.adapters"))
def test_an_adapter_knows_the_interface_only(name):
    found = within(imports(SOURCES[name]), "conformance")
    if ALONE.fullmatch(name):
        assert all(ALONE.match(n) for n in found)
        return
    modules = {n if n in SOURCES else n.rpartition(".")[0] for n in found}
    assert modules - within(modules, "conformance.adapters") <= ADAPTER_READS
    assert not within(imports(SOURCES[name], lazy=False, typing=False), *FRAMEWORKS)


@cache
def private_methods(name):
    """Names of methods that begin with one underscore, in all classes of a module."""
    tree = ast.parse(SOURCES[name].read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = {
        node.name
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {method for method in methods if re.match(r"_(?!_)", method)}


@for_each(name=every("conformance.adapters"))
def test_an_adapter_overrides_no_private_method(name):
    interface = set().union(*map(private_methods, every("conformance.adapter")))
    assert {"_bind", "_evaluate", "_session"} <= interface
    assert not private_methods(name) & interface


@for_each(name=every("conformance.adapter"))
def test_the_interface_never_sees_the_expectation(name):
    hidden = ("expectation", "attention", "arithmetic", "comparison")
    found = imports(SOURCES[name])
    assert not within(found, *(f"conformance.definition.{module}" for module in hidden))
    assert not within(found, "conformance.cases", "conformance.records")


@for_each(name=every("conformance.requirements"))
def test_a_check_never_sees_how_an_implementation_is_called(name):
    natives = {"native", "function", "loading", "parameters"}
    assert not within(imports(SOURCES[name]), *(f"conformance.adapter.{n}" for n in natives))


@for_each(name=every("conformance.explore"))
def test_a_search_needs_no_library_for_tests(name):
    assert not within(imports(SOURCES[name]), "pytest", "hypothesis")


def test_the_packages_are_all_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


EXTRAS = {
    "conformance.commands.listing": {"argcomplete"},
    "conformance.judging.pool": {"ray"},
}
"""What is installed with an extra, and imported only when it is asked for."""


def test_the_core_needs_what_it_declares_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {d.partition(">")[0] for d in project["project"]["dependencies"]}
    optional = {
        re.split("[>=<]", d)[0]
        for extra in project["project"]["optional-dependencies"].values()
        for d in extra
    }
    # jinja2 brings markupsafe along, and hands its type out.
    declared |= {"conformance", "markupsafe"}
    for name in core():
        if name.endswith("_bridge") or within([name], "conformance.running", SANDBOXED):
            continue
        extra = EXTRAS.get(name, set())
        assert extra <= optional, name
        found = {n.partition(".")[0] for n in imports(SOURCES[name], typing=False)}
        assert found - set(sys.stdlib_module_names) <= declared | extra, name


REACHED = """
import sys

from conformance.cli import main

found = []

def called(frame, event, argument):
    if event == "call" and "/conformance/" in frame.f_code.co_filename:
        module = frame.f_globals.get("__name__", "").removeprefix("conformance.")
        name = f"{module}.{frame.f_code.co_qualname}"
        if name not in found:
            found.append(name)

sys.setprofile(called)
main(["run", sys.argv[1], "--no-isolate", "--case", "mask/shared/self", "--dtype", "float32"])
sys.setprofile(None)
print("reached", *found)
"""


def test_a_run_reaches_what_the_page_says_in_that_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("## From a name to its verdict")[2].partition("\n## ")[0]
    stops = re.findall(r"`([a-z]+\.[a-z.]*[A-Za-z_.]+)`", section.partition("\n1. ")[2])
    assert len(stops) >= 12
    isolated = "running.isolation.supervise"
    assert isolated in stops
    wrong = f"{Path(__file__).parent / 'mutants/miniatures.py'}:Inverted"
    done = subprocess.run(
        [sys.executable, "-c", REACHED, wrong], capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    reached = done.stdout.partition("\nreached ")[2].split()
    expected = [stop for stop in stops if stop != isolated]
    assert [name for name in reached if name in expected] == expected, done.stderr
