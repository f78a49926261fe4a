"""The pytest plugin of the suite. Without `--implementation`, it does nothing but add this option.

pytest loads the plugin in every run of an environment in which the suite is installed. For this
reason, the plugin imports the rest of the suite only in a conformance run.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.running import OPTIONS

if TYPE_CHECKING:
    from conformance.running.run import RunPlugin

SUITE = Path(__file__).with_name("test_conformance.py")
RUN: pytest.StashKey[RunPlugin] = pytest.StashKey()
GROUP, TITLE = "conformance", "conformance of multi-head attention"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes a pytest run a conformance run."""
    parser.getgroup(GROUP, TITLE).addoption(
        "--implementation",
        action="append",
        default=[],
        metavar="NAME",
        help="a built-in implementation, path/to/file.py:NAME or package.module:NAME; repeatable",
    )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser
) -> Generator[None, None, None]:
    """Add all options other than --implementation, but only in a conformance run or for --help.

    In other runs, they could clash with a project's own options, such as --device or --record.

    Raises:
        UsageError: in a conformance run, an option clashes with one of the project's.
    """
    yield
    known = early_config.known_args_namespace
    if known.implementation or known.help:
        try:
            _add_options(parser)
        except ValueError as error:
            if known.implementation:
                raise pytest.UsageError(
                    f"an option of this project is in the way ({error}); use mha-conformance run"
                ) from error


def _add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup(GROUP, TITLE)
    for name, attributes in OPTIONS.items():
        group.addoption(f"--{name}", **attributes)
    group.addoption(
        "--survey",
        action="store_true",
        help="deviations are findings to report, not failures",
    )
    group.addoption(
        "--conformance-baseline",
        default=None,
        metavar="FILE",
        help="pass if exactly the deviations in this file are found",
    )
    group.addoption(
        "--conformance-chosen",
        default="",
        metavar="OPTIONS",
        help="those of case, dtype and mode that restrict no run, because the project asks no more",
    )
    group.addoption(
        "--conformance-verbose",
        action="store_true",
        help="print all deviations that the gate found, not the first of each kind",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Create the run if one is requested.

    The run is created here because, with xdist, the controller does not collect tests.
    """
    if config.getoption("--implementation") and not config.option.help:
        start(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize the conformance test with all rows of the run.

    Raises:
        CollectError: the run cannot be created.
    """
    if "conformance_item" in metafunc.fixturenames:
        try:
            items = start(metafunc.config).ordered
        except pytest.UsageError as error:
            # pytest would show any other exception with a traceback.
            raise pytest.Collector.CollectError(str(error)) from error
        metafunc.parametrize("conformance_item", items, ids=[item.id for item in items])


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Any:
    """Return the run of this pytest session."""
    return start(request.config)


def start(config: pytest.Config) -> RunPlugin:
    """Return the run of this session; the first call creates it and registers it as a plugin.

    Raises:
        UsageError: the run cannot be created, for example because an option is invalid.
    """
    if RUN not in config.stash:
        from conformance.errors import ConformanceError
        from conformance.running.provenance import environment
        from conformance.running.run import RunPlugin

        environment()
        try:
            config.stash[RUN] = RunPlugin(config)
        except ConformanceError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(config.stash[RUN], "mha-conformance-run")
    return config.stash[RUN]
