"""Data flows one way: who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import conformance

CORE = Path(conformance.__file__).parent
ROOT = CORE.parent
ALONE = re.compile(
    r"conformance\.adapters\.(ours\.attention|tutorials\.tutorial_\d|triton_flash_kernel)"
)
"""Modules that are examined, and know nothing of any suite."""

ADAPTERS = ROOT / "adapters"
FRAMEWORKS = {"torch", "jax", "jaxlib", "flax", "tensorflow", "keras"}
EXPECTATION = ("reference", "requirements", "findings", "comparison", "examination", "diagnosis")

pytestmark = pytest.mark.skipif(not ADAPTERS.is_dir(), reason="needs a checkout")


def sources():
    """Module name to file, for everything that the package holds."""
    found = {}
    for top, folder in (("conformance", CORE), ("conformance.adapters", ADAPTERS)):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((top, *(part for part in parts if part != "__init__")))
            if not path.is_relative_to(CORE / "adapters"):
                found[name] = path
    return found


SOURCES = sources()


def imports(path, *, lazy=True, typing=True):
    """Full names of what a file imports; without `lazy`, only what its import runs."""
    found = set()

    def visit(node):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not lazy:
            return
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not typing:
            return
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def within(names, *packages):
    """Those of the names that lie in one of the packages."""
    return {n for n in names if any(n == p or n.startswith(p + ".") for p in packages)}


def every(package):
    return [name for name in SOURCES if within([name], package)]


def core():
    return [name for name in SOURCES if not within([name], "conformance.adapters")]


def test_the_sources_are_found():
    assert {"conformance", "conformance.adapters.torch_mha", "conformance.cli"} <= SOURCES.keys()
    assert "torch" in imports(SOURCES["conformance.frameworks.torch_bridge"])
    lazy = SOURCES["conformance.adapters.torch_mha"]
    assert "torch" in imports(lazy)
    assert "torch" not in imports(lazy, lazy=False)


@pytest.mark.parametrize("name", core())
def test_nothing_imports_an_adapter(name):
    assert not within(imports(SOURCES[name]), "conformance.adapters", "adapters")


@pytest.mark.parametrize("name", core())
def test_only_bridges_import_a_framework(name):
    if not name.endswith("_bridge"):
        assert not within(imports(SOURCES[name]), *FRAMEWORKS)


@pytest.mark.parametrize("name", every("conformance.frameworks"))
def test_a_bridge_imports_its_own_framework_only(name):
    own = {"torch_bridge": "torch", "jax_bridge": "jax", "tensorflow_bridge": "tensorflow"}
    allowed = own.get(name.rpartition(".")[2])
    found = {n.partition(".")[0] for n in within(imports(SOURCES[name]), *FRAMEWORKS)}
    assert found <= {allowed}


@pytest.mark.parametrize("name", core())
def test_no_bridge_is_imported_before_it_is_asked_for(name):
    found = imports(SOURCES[name])
    # NumPy is always there; the zoo derives a bridge of its own from it.
    own = set()
    if within([name], "mutants") or name.endswith("_bridge"):
        own = {"conformance.frameworks.numpy_bridge", "conformance.frameworks.runtime_bridge"}
    assert not {n for n in found - own if n.startswith("conformance.") and n.endswith("_bridge")}


@pytest.mark.parametrize("name", every("conformance.adapters"))
def test_an_adapter_never_sees_the_expectation(name):
    hidden = [
        f"conformance.{module}" for module in (*EXPECTATION, "cases", "session", "report", "probes")
    ]
    found = imports(SOURCES[name])
    assert not within(found, *hidden, "conformance.running", "conformance.records.record")
    if ALONE.fullmatch(name):
        assert not within(found, "conformance")


@pytest.mark.parametrize("name", every("conformance.adapters"))
def test_an_adapter_imports_no_framework_before_it_runs(name):
    if not ALONE.fullmatch(name):
        assert not within(imports(SOURCES[name], lazy=False, typing=False), *FRAMEWORKS)


@pytest.mark.parametrize("name", every("conformance.reports"))
def test_a_report_needs_records_only(name):
    bridges = (
        "conformance.frameworks",
        "conformance.adapter",
        "conformance.requirements.examination",
    )
    found = imports(SOURCES[name], typing=False)
    assert not within(found, *bridges, "conformance.running.session", "conformance.causes")
    # Drawing needs arrays only; asking an implementation for them does not belong here.
    assert not within(found, "conformance.running.weights", "conformance.commands.drawing")
    # The plugin's folder holds the message's wording too; what runs items is out of bounds.
    assert not within(found, "conformance.running.run", "conformance.running.plugin", "pytest")


@pytest.mark.parametrize("name", every("conformance.requirements"))
def test_a_check_never_sees_a_framework(name):
    assert not within(imports(SOURCES[name]), "conformance.frameworks", "conformance.running")
    natives = {"native", "layer", "function", "loading", "parameters"}
    assert not within(imports(SOURCES[name]), *(f"conformance.adapter.{n}" for n in natives))


@pytest.mark.parametrize("name", every("conformance.experiments"))
def test_an_experiment_sees_neither_framework_nor_requirement(name):
    hidden = ("frameworks", "requirements", "findings", "cases", "suite", "report", "session")
    assert not within(imports(SOURCES[name]), *(f"conformance.{module}" for module in hidden))


@pytest.mark.parametrize("name", every("conformance.definition.expectation"))
def test_the_reference_knows_the_definition_only(name):
    own = within(imports(SOURCES[name]), "conformance")
    allowed = ("reference", "problem", "dtypes", "errors")
    assert not own - within(own, *(f"conformance.{module}" for module in allowed))


ZOO = [
    name
    for name in every("mutants")
    if within([name], "mutants.zoo")
    or name.rpartition(".")[2] in ("attention", "contestant", "mutant")
]


@pytest.mark.parametrize("name", ZOO)
def test_a_mutant_never_sees_the_expectation(name):
    """The zoo is a contestant: what examines it stands beside it, in `run`."""
    hidden = [f"conformance.{module}" for module in (*EXPECTATION, "cases", "session", "probes")]
    assert not within(imports(SOURCES[name]), *hidden, "mutants.run")


@pytest.mark.parametrize("name", every("conformance.adapter"))
def test_the_interface_never_sees_the_expectation(name):
    further = ("cases", "session", "suite", "probes")
    hidden = [f"conformance.{module}" for module in (*EXPECTATION, *further)]
    assert not within(imports(SOURCES[name]), *hidden)


@pytest.mark.parametrize("name", every("conformance.explore"))
def test_a_search_sees_no_framework_and_a_case_file_needs_no_search(name):
    found = imports(SOURCES[name])
    assert not {n for n in within(found, "conformance.frameworks") if n.endswith("_bridge")}
    assert not within(found, "conformance.running.run", "conformance.running.plugin", "pytest")
    if not name.endswith(("search", "strategies")):
        assert not within(found, "hypothesis")
    if name.endswith("casefile"):
        hidden = ("interface", "examination", "requirements", "explore.search", "explore.trial")
        assert not within(found, *(f"conformance.{module}" for module in hidden))


@pytest.mark.parametrize("name", ["masks", "conversion", "tensors"])
def test_the_translator_needs_declarations_only(name):
    """What masks and weights mean is declared; no answer and no framework has a say in it."""
    found = within(imports(SOURCES[f"conformance.{name}"]), "conformance")
    allowed = ("errors", "interface", "problem", "tensors")
    assert not found - within(found, *(f"conformance.{module}" for module in allowed))


def test_the_packages_are_all_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {name for name, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages


EXTRAS = {
    "conformance.explore.search": {"hypothesis"},
    "conformance.explore.strategies": {"hypothesis"},
    "conformance.commands.completion": {"argcomplete"},
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
        if name.endswith(("_bridge", ".onnx_node")) or within([name], "conformance.running"):
            continue
        extra = EXTRAS.get(name, set())
        assert extra <= optional, name
        found = {n.partition(".")[0] for n in imports(SOURCES[name], typing=False)}
        assert found - set(sys.stdlib_module_names) <= declared | extra, name
