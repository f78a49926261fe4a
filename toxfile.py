"""Environments of tox, one for each line of the section `[everybody]` of tox.ini.

tox imports this file by itself. What an environment needs beyond its line may stand in a section
of its own, `[testenv:NAME]`, as for any other.
"""

from __future__ import annotations

import configparser
import os
import shlex
from pathlib import Path

from tox.config.loader.memory import MemoryLoader
from tox.config.sets import ConfigSet
from tox.plugin import impl
from tox.session.state import State

LABELS = ["everybody", "published"]


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
    return list(lines())


@impl
def tox_add_core_config(core_conf: ConfigSet, state: State) -> None:
    """Configure them, and those that come after all of them."""
    del core_conf
    # `publish` passes them on.
    os.environ["EVERYBODY"] = ",".join(lines())
    arguments = shlex.join(state.conf.pos_args(None) or ())
    for name, (extras, implementations, baseline) in lines().items():
        command = (
            f"mha-conformance gate {implementations} --baseline reports/baselines/{baseline}.toml "
            f"--record reports/records/{name}.json -n {os.environ.get('WORKERS', '2')} {arguments}"
        )
        loader = MemoryLoader(
            description=f"gate: {implementations}",
            labels=LABELS,
            extras=[extras] if extras else [],
            depends="begin",
            commands=[command.strip()],
        )
        state.conf.memory_seed_loaders[name].append(loader)
