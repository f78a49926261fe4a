"""Environments of tox, three for each line of the section `[everybody]` of tox.ini.

One holds the implementations against their baseline. The other two belong to a publication only,
and run what the first has installed: one explores every mode of the implementations, one examines
them at the sizes of kernels and at length.

tox imports this file by itself. What an environment needs beyond its line may stand in a section
of its own, `[testenv:NAME]`, as for any other.
"""

from __future__ import annotations

import configparser
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.execute.api import Outcome
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv

LABELS = ["everybody", "published"]
EXPLORED = "{}-explored"
"""Names the environment in which every mode of the same implementations is explored."""
SIZES = "{}-sizes"
"""Names the one in which the same implementations are examined at level "large" and at length."""

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MOST = 8
"""The most environments of the matrix that run beside each other."""

EVERY = 15
"""The seconds between two lines of progress of environments that run beside each other."""

BEGINNING = (
    "examining implementations, which takes minutes the first time; from the end of the first one, "
    "the report is in reports/compatibility.html; what reports/baselines lists may deviate"
)
"""The first line of progress."""

RECORDS = "reports/records"
REPORTED = (0, 1, 4)
"""The exit codes with which a report was written."""

LARGE = "--level large --case *.d64t64x64 --dtype float32 --dtype bfloat16 --mode first"
LONG = "--lengths 1024:65536 --dtype float32 --dtype bfloat16 --memory-limit 8GiB"


def is_matrix(arguments: list[str]) -> bool:
    """Return whether a command line of tox, without the program, runs several environments.

    That is so without a subcommand and without -e, or with -m alone.
    """
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return not own or own[0] == "-m"


SIDE_BY_SIDE = is_matrix(sys.argv[1:])
if SIDE_BY_SIDE:
    # A process each is faster than several for one: a framework is imported once, and no program
    # is compiled twice. tox reads options from such variables.
    os.environ.setdefault("TOX_PARALLEL", str(min(CORES, MOST)))
    # `Progress` says more than names.
    os.environ.setdefault("TOX_PARALLEL_NO_SPINNER", "true")


def lines() -> dict[str, tuple[str, str, str]]:
    """Return the extras, the implementations and the baseline of each environment, by name."""
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(Path(__file__).with_name("tox.ini"), encoding="utf-8")
    found = {}
    for name, line in ini["everybody"].items():
        extras, implementations, *baseline = (part.strip() for part in line.split(":"))
        found[name] = (extras, implementations, baseline[0] if baseline else name)
    return found


class Progress(threading.Thread):
    """Prints a line now and then: how far each environment is, and how many have ended.

    Attributes:
        doing: what each environment that has begun does, by its name.
        state: the state of tox, which knows how many environments there are.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.doing: dict[str, str] = {}
        self.state: State | None = None
        self._began = self._reported = time.time()
        self._lock = threading.Lock()

    def note(self, name: str, doing: str) -> None:
        """Note what an environment does now; the first note begins the thread."""
        # The names of environments that tox makes for itself begin with a dot.
        if not SIDE_BY_SIDE or name.startswith("."):
            return
        with self._lock:
            self.doing[name] = doing
            if not self.is_alive():
                self.start()

    def run(self) -> None:
        """Print what comes, and then a line every `EVERY` seconds until the process ends."""
        print(BEGINNING, flush=True)
        while True:
            time.sleep(EVERY)
            print(self.line(), flush=True)

    def line(self) -> str:
        """Return the line of this moment."""
        minutes, seconds = divmod(round(time.time() - self._began), 60)
        parts = [
            f"{name} {self.far(name) if doing == 'running' else doing}"
            for name, doing in [*self.doing.items()]
            if doing != "ended"
        ]
        assert self.state is not None
        # What only starts a run has examined nothing.
        every = [name for name in self.state.envs.iter() if name != "begin"]
        ended = sum(self.doing.get(name) == "ended" for name in every)
        of = f"{ended} of {len(every)} environments have ended"
        return f"{minutes}:{seconds:02}  {'; '.join([*parts, of])}"

    def wants_report(self) -> bool:
        """Return whether `EVERY` seconds have passed since it was last wanted, or since the start.

        Writing one takes seconds, which are most of a run in which nothing has changed.
        """
        with self._lock:
            if time.time() - self._reported < EVERY:
                return False
            self._reported = time.time()
            return True

    def far(self, name: str, folder: Path = Path(RECORDS)) -> str:
        """Return how far the commands of an environment are, by the journal of its record."""
        journal = folder / f"{name}.json.journal"
        # An older one is of a run that was interrupted. Times of files are coarser than the clock.
        with suppress(OSError, ValueError, KeyError):
            if journal.stat().st_mtime >= self._began - 1:
                with journal.open("rb") as lines:
                    planned = json.loads(next(lines))["planned"]
                    deviations = [b'"verdict":"deviates"' in line for line in lines]
                text = f"{len(deviations):,} of {planned:,} items"
                return f"{text}, {sum(deviations):,} deviate" if any(deviations) else text
        return "running"


PROGRESS = Progress()


@impl
def tox_extend_envs() -> list[str]:
    """Name the environments."""
    return [form.format(name) for form in ("{}", EXPLORED, SIZES) for name in lines()]


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Configure them, and those that come after all of them."""
    PROGRESS.state = state
    # `publish` passes them on.
    os.environ["EVERYBODY"] = ",".join(lines())
    for variable, form in (("EXPLORED", EXPLORED), ("SIZES", SIZES)):
        os.environ[variable] = ",".join(map(form.format, lines()))
    # What is published was asked in every dtype and mode.
    published = "published" in (state.conf.options.labels or ())
    arguments = shlex.join(
        [*(["--level", "full"] if published else []), *(state.conf.pos_args(None) or ())]
    )
    workers = os.environ.get("WORKERS", "2")
    if SIDE_BY_SIDE and "WORKERS" not in os.environ:
        # 0 is no further process.
        workers = str(CORES // MOST if CORES >= 2 * MOST else 0)
        arguments = f"--quiet {arguments}".strip()
    for name, (extras, implementations, baseline) in lines().items():
        command = (
            f"mha-conformance gate {implementations} --baseline reports/baselines/{baseline}.toml "
            f"--record reports/records/{name}.json -n {workers} {arguments}"
        )
        _add(
            state,
            name,
            description=f"gate: {implementations}",
            labels=LABELS,
            extras=[extras] if extras else [],
            depends="begin",
            commands=[command.strip()],
        )
        scripts = Path(core_conf["work_dir"]) / name / ("Scripts" if os.name == "nt" else "bin")
        installed = shlex.quote(str(scripts / "mha-conformance"))
        # What is found there is no failure of the publication, but a part of it.
        explore = (
            f"- {installed} explore {implementations} --every-mode "
            f"--seconds {os.environ.get('EXPLORE_SECONDS', '60')} "
            "--record reports/published/explored"
        )
        large = (
            f"- {installed} run {implementations} {LARGE} --quiet "
            f"--record reports/records/large/{name}.json -n {workers}"
        )
        # One after the other: where one ends its process, the next is examined all the same.
        long = [
            f"- {installed} long {one} {LONG} --seconds {os.environ.get('LONG_SECONDS', '25')} "
            "--record reports/published/long"
            for one in implementations.split()
        ]
        for form, told, commands in (
            (EXPLORED, "explore", [explore]),
            (SIZES, "sizes of kernels", [large, *long]),
        ):
            _add(
                state,
                form.format(name),
                description=f"{told}: {implementations}, as installed in {name}",
                labels=["published"],
                package="skip",
                deps="",
                allowlist_externals=[str(scripts / "mha-conformance")],
                depends=name,
                commands=commands,
            )


@impl
def tox_on_install(tox_env: ToxEnv, arguments: object, section: str, of_type: str) -> None:
    """Show that packages are installed."""
    PROGRESS.note(tox_env.name, "installing")


@impl
def tox_before_run_commands(tox_env: ToxEnv) -> None:
    """Show how far its commands are."""
    PROGRESS.note(tox_env.name, "running")


@impl
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[Outcome]) -> None:
    """Renew the report as environments end, so that a long run shows what it has found.

    Beside other environments, tox prints nothing that an environment prints, unless it fails.
    """
    PROGRESS.note(tox_env.name, "ended")
    told = (outcome.out.strip() for outcome in outcomes if outcome.out.strip())
    if SIDE_BY_SIDE and not exit_code:
        print(*told, sep="\n", flush=True)
    if tox_env.name not in lines():
        return
    if SIDE_BY_SIDE and not PROGRESS.wants_report():
        return
    command = [Path(tox_env.conf["env_bin_dir"]) / "mha-conformance", "report", RECORDS, "--quiet"]
    command += ["--output", "reports/compatibility", "--run-file", f"{RECORDS}/run"]
    done = subprocess.run(
        list(map(str, command)),
        cwd=tox_env.conf["change_dir"],
        env=tox_env.environment_variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode in REPORTED:
        print(f"{tox_env.name}: the report so far is reports/compatibility.html", flush=True)


def _add(state: State, name: str, **settings: object) -> None:
    """Configure an environment."""
    state.conf.memory_seed_loaders[name].append(MemoryLoader(**settings))
