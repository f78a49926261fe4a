"""Environments of tox, three for each line of the section `[everybody]` of tox.ini.

One holds the implementations against their baseline. The other two belong to a publication only,
and run what the first has installed: one explores every mode of the implementations, one examines
them at the sizes of kernels and at length.

tox imports this file by itself. What an environment needs beyond its line may stand in a section
of its own, `[testenv:NAME]`, as for any other.
"""

from __future__ import annotations

import configparser
import os
import shlex
import subprocess
from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.plugin import impl
from tox.session.state import State
from tox.tox_env.api import ToxEnv

LABELS = ["everybody", "published"]
EXPLORED = "{}-explored"
"""Names the environment in which every mode of the same implementations is explored."""
SIZES = "{}-sizes"
"""Names the one in which the same implementations are examined at level "large" and at length."""

RECORDS = "reports/records"
REPORTED = (0, 1, 4)
"""The exit codes with which a report was written."""

LARGE = "--level large --case *.d64t64x64 --dtype float32 --dtype bfloat16 --mode first"
LONG = "--lengths 1024:65536 --dtype float32 --dtype bfloat16 --memory-limit 8GiB"


def lines() -> dict[str, tuple[str, str, str]]:
    """Return the extras, the implementations and the baseline of each environment, by name."""
    ini = configparser.ConfigParser(interpolation=None)
    ini.read(Path(__file__).with_name("tox.ini"), encoding="utf-8")
    found = {}
    for name, line in ini["everybody"].items():
        extras, implementations, *baseline = (part.strip() for part in line.split(":"))
        found[name] = (extras, implementations, baseline[0] if baseline else name)
    return found


@impl
def tox_extend_envs() -> list[str]:
    """Name the environments."""
    return [form.format(name) for form in ("{}", EXPLORED, SIZES) for name in lines()]


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Configure them, and those that come after all of them."""
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
def tox_after_run_commands(tox_env: ToxEnv, exit_code: int, outcomes: list[object]) -> None:
    """Renew the report after each environment, so that a long run shows what it has found."""
    if tox_env.name not in lines():
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
