"""`mha-conformance matrix`: run the environments of a tox project, here or on a cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from conformance.commands.shared import Commands, read_settings
from conformance.errors import ConformanceError, ExitCode


def add_parser(commands: Commands) -> None:
    """Add the parser of this command to `commands`."""
    matrix = commands.add_parser(
        "matrix",
        help="run the environments of tox, here or on a Ray cluster",
        description="Run environments of the tox project in this folder. Those whose commands "
        "write a record (--record FILE.json) are run by the engine; others, such as one that makes "
        "a report of them, are run here, before or after them. Options that are not listed go to "
        "the commands of the former. Exit code 0: all commands returned 0; 1: one returned 1, or "
        "shards contradict each other; 4: something was not run.",
    )
    matrix.add_argument(
        "environment", nargs="*", help="an environment of tox (default: those of its env_list)"
    )
    matrix.add_argument(
        "-m", "--label", action="append", default=[], help="all environments with it; repeatable"
    )
    matrix.add_argument(
        "--on",
        default="tox",
        metavar="ENGINE",
        help="tox, on this machine (the default); ray, on the cluster that RAY_ADDRESS names or "
        "on one that is begun here; ray://HOST:PORT, on that cluster",
    )
    for option, meaning in (
        ("jobs", "with tox: run so many environments at once (default: 1)"),
        (
            "workers",
            "processes for each environment or shard, for which Ray reserves a CPU each; tox.ini "
            "finds the number in the variable WORKERS (default: 1)",
        ),
        ("shards", "with Ray: divide each environment into so many parts, and join their records"),
    ):
        matrix.add_argument(f"--{option}", type=int, default=1, metavar="N", help=meaning)
    matrix.set_defaults(action=_matrix, passes_on=True)


def _matrix(options: argparse.Namespace) -> int:
    from conformance.running.matrix import (
        Cluster,
        environments,
        on_ray,
        run_here,
        run_on_cluster,
    )

    for name in ("jobs", "workers", "shards"):
        if getattr(options, name) < 1:
            raise ConformanceError(f"--{name} {getattr(options, name)}: at least 1")
    is_cluster = on_ray(options.on)
    if options.on != "tox" and not is_cluster:
        raise ConformanceError(f"--on {options.on}: tox, ray or ray://HOST:PORT")
    if options.shards > 1 and not is_cluster:
        raise ConformanceError("--shards needs --on ray; on one machine, use --workers or --jobs")
    root = Path.cwd()
    settings = read_settings()
    chosen = environments(options.environment, options.label, root)
    if not is_cluster:
        code = run_here(chosen, options.rest, root, jobs=options.jobs, workers=options.workers)
        return code if code in {*ExitCode} else ExitCode.INCOMPLETE
    size = (options.shards, options.workers)
    cluster = Cluster(options.on, *size, settings.resources, tuple(options.rest))
    return run_on_cluster(chosen, cluster, root, _say)


def _say(line: str) -> None:
    from conformance.text import printable

    print("\n".join(map(printable, line.splitlines())), flush=True)
