"""The pytest plugin: options, and nothing else until they are used.

It is loaded into every pytest run of an environment in which the suite is installed, so it imports
nothing of the suite before somebody asks for it.
"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conformance.running import LEVELS, LIMITS

if TYPE_CHECKING:
    from conformance.running.run import Run

SUITE = Path(__file__).with_name("test_conformance.py")
RUN: pytest.StashKey[Run] = pytest.StashKey()
GROUP, TITLE = "conformance", "conformance of multi-head attention"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that makes a pytest run a conformance run."""
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
    """The other options of a conformance run, in such a run only.

    Projects that have nothing to do with it may call options of their own --device or --record.
    """
    yield
    known = early_config.known_args_namespace
    if known.implementation or known.help:
        try:
            _add_options(parser)
        except ValueError as error:
            if not known.implementation:
                return
            raise pytest.UsageError(
                f"an option of this project is in the way ({error}); use mha-conformance run"
            ) from error


def _add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup(GROUP, TITLE)
    group.addoption(
        "--case",
        action="append",
        default=[],
        metavar="CASE",
        help="only cases with this in their id (or matching it as a pattern); repeatable",
    )
    group.addoption(
        "--case-file",
        action="append",
        default=[],
        metavar="FILE",
        help="also the case in this file, as mha-conformance explore writes it; repeatable",
    )
    group.addoption(
        "--dtype", action="append", default=[], metavar="DTYPE", help="only this dtype; repeatable"
    )
    group.addoption(
        "--mode", action="append", default=[], metavar="MODE", help="only this mode; repeatable"
    )
    group.addoption(
        "--level",
        default=None,
        choices=LEVELS,
        help="core: some seconds, one case for each thing that goes wrong often; full: everything "
        "(default)",
    )
    group.addoption(
        "--device", default="cpu", choices=("cpu", "gpu"), help="where to run (default: cpu)"
    )
    group.addoption(
        "--record", default=None, metavar="FILE", help="write what was found to this JSON file"
    )
    group.addoption(
        "--fresh",
        action="store_true",
        help="ask everything, also what still holds of the record that is there",
    )
    group.addoption(
        "--shard",
        default="1/1",
        metavar="K/N",
        help="only the K-th of N equal parts; mha-conformance join makes one record of all",
    )
    group.addoption(
        "--isolate",
        action="store_true",
        default=None,
        help="give each implementation a process of its own (default: those given by path or "
        "module)",
    )
    group.addoption(
        "--no-isolate", dest="isolate", action="store_false", help="run them in this process"
    )
    for name, (default, told) in LIMITS.items():
        group.addoption(f"--{name}", type=float, default=default, metavar="N", help=told)
    group.addoption(
        "--survey",
        action="store_true",
        help="deviations are findings to report, not failures",
    )
    group.addoption(
        "--conformance-baseline",
        default=None,
        metavar="FILE",
        help="pass exactly if what deviates is what this file knows of",
    )
    group.addoption(
        "--conformance-verbose",
        action="store_true",
        help="tell all that the gate found, not the first of each kind",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the run early where it is asked for: under xdist the controller collects nothing."""
    if config.getoption("--implementation") and not config.option.help:
        start(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per item."""
    if "conformance_item" in metafunc.fixturenames:
        try:
            items = start(metafunc.config).planned
        except pytest.UsageError as error:
            # An error while collecting: anything else here is shown as a traceback.
            raise pytest.Collector.CollectError(str(error)) from error
        metafunc.parametrize("conformance_item", items, ids=[item.id for item in items])


@pytest.fixture(scope="session")
def conformance_run(request: pytest.FixtureRequest) -> Any:
    """The run that this pytest session is."""
    return start(request.config)


def start(config: pytest.Config) -> Run:
    """The run of this session, made when first asked for."""
    if RUN not in config.stash:
        from conformance.errors import ConformanceError
        from conformance.running.provenance import environment
        from conformance.running.run import Run

        environment()
        try:
            config.stash[RUN] = Run(config)
        except ConformanceError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(config.stash[RUN], "mha-conformance-run")
    return config.stash[RUN]
