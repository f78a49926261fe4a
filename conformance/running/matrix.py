"""Run the environments of a tox project: on this machine with tox, or on a cluster with Ray.

Only the configuration of tox specifies what an environment installs and runs; the nodes of a
cluster run tox, too. Ray is imported only if a cluster is requested.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.errors import BrokenRecord, ConformanceError, ExitCode
from conformance.records.record import narrowed_path, read, replace_file
from conformance.running import node
from conformance.running.node import EnvironmentPart, PartResult
from conformance.text import message, plural

RETRIES = 3
"""How often a part (an environment or a shard of one) is restarted after its node has died."""

_APART = {".git", ".tox", ".venv", "venv", "__pycache__", "node_modules", "build", "dist"}
"""Names of folders that hold no sources; they are excluded if git cannot list the files."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Environments:
    """The names of the tox environments to run, in this order.

    Attributes:
        before: environments that write no record, and on which those in `records` depend, such as
            `begin`.
        records: environments that write a record; the path of the record, relative to the project,
            by the name of the environment.
        after: other environments that write no record, such as `report`.
    """

    before: list[str]
    records: dict[str, str]
    after: list[str]


@dataclass(frozen=True)
class Cluster:
    """A specification of a cluster and of how to run the parts of environments on it.

    Attributes:
        address: "ray://HOST:PORT", or "ray" for a cluster that Ray finds by itself; if it finds
            none, it starts one on this machine.
        shards: the number of parts into which each environment is divided.
        workers: the number of processes of a part, each of which gets a CPU.
        resources: by the name of an environment, the additional resources that each of its parts
            needs, as amounts by Ray's names for the resources.
        arguments: the arguments that tox passes on to the commands that write a record.
    """

    address: str = "ray"
    shards: int = 1
    workers: int = 1
    resources: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


# tox


def environments(chosen: Sequence[str], labels: Sequence[str], root: Path) -> Environments:
    """Return the environments that tox would run in a project, chosen by their names and labels.

    If `chosen` and `labels` are empty, these are the environments that tox runs by default.

    Raises:
        ConformanceError: tox is not installed, finds no configuration in the folder `root`, or
            rejects it; or an environment does not exist, or none of them writes a record.
    """
    command = ["config", "--format", "json", "-k", "depends", "commands"]
    command += ["-e", ",".join(chosen)] if chosen else []
    command += ["-m", *labels] if labels else []
    done = subprocess.run(_tox(*command), cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        told = next((line for line in reversed(said) if line.strip()), "no reason given")
        raise ConformanceError(f"tox refuses its configuration: {told}")
    # If tox has to install itself first, it prints text on the lines before.
    found = json.loads(done.stdout[done.stdout.index("{") :])["env"]
    records = {name: path for name in found if (path := _record_of(found[name]))}
    if not records:
        raise ConformanceError(
            f"none of {', '.join(found) or 'no environment'} writes a record: their commands have "
            "no --record FILE.json"
        )
    awaited = {other for name in records for other in found[name].get("depends") or ()}
    aside = [name for name in found if name not in records]
    before = [name for name in aside if name in awaited]
    return Environments(before, records, [name for name in aside if name not in awaited])


def _record_of(keys: Mapping[str, Any]) -> str:
    """Return the path of the record that the commands of an environment write, or "" if none do.

    `keys` is the environment's configuration, which has the commands.
    """
    for command in keys.get("commands") or ():
        words = shlex.split(command)
        for option, path in pairwise(words):
            if option == "--record" and path.endswith(".json"):
                return path
    return ""


def _tox(*arguments: str) -> list[str]:
    if find_spec("tox") is None:
        raise ConformanceError("tox is not installed here: python -m pip install tox")
    return [sys.executable, "-m", "tox", *arguments]


def run_here(
    chosen: Environments, arguments: Sequence[str], root: Path, *, jobs: int, workers: int
) -> int:
    """Run environments with tox on this machine, and return the exit code of tox.

    tox passes `arguments` on to the commands of the environments. It runs `jobs` environments at
    the same time, and the command of each uses `workers` processes.
    """
    names = [*chosen.before, *chosen.records, *chosen.after]
    how = ["run-parallel", "--parallel", str(jobs)] if jobs > 1 else ["run"]
    command = _tox(*how, "-e", ",".join(names), "--", *arguments)
    settings = os.environ | {"WORKERS": str(workers)}
    return subprocess.run(command, cwd=root, env=settings, check=False).returncode


# Ray


def run_on_cluster(chosen: Environments, cluster: Cluster, root: Path, say: Say) -> ExitCode:
    """Run environments on the nodes of a cluster, and return the exit code.

    Each record is written to this machine when it arrives, and environments without a record are
    run on this machine. `say` is called with each line about the progress.

    Raises:
        ConformanceError: Ray is not installed, the cluster cannot be reached, or none of its nodes
            has the resources that a part needs; or another run is writing the same records.
    """
    from conformance.running.merging import Lock

    with ExitStack() as held, connected(cluster.address) as nodes:
        # Nodes need not have this suite.
        import ray

        ray.cloudpickle.register_pickle_by_value(node)
        for folder in {(root / path).parent for path in chosen.records.values()}:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(Lock(folder / "matrix"))
        run = ClusterRun(chosen, cluster, root, say)
        run.check(nodes)
        if chosen.before and (code := _aside(chosen.before, root)):
            return code
        run.all()
        after = _aside(chosen.after, root) if chosen.after else ExitCode.OK
    return run.code() or after


def on_ray(address: str) -> bool:
    """Return whether an address is that of a Ray cluster."""
    return address == "ray" or address.startswith("ray://")


@contextmanager
def connected(address: str) -> Iterator[list[dict[str, float]]]:
    """Connect to a Ray cluster, or start one, and yield the resources of each node.

    `address` is "ray" or "ray://HOST:PORT"; see `Cluster`. In the `with` body, SIGTERM raises
    `KeyboardInterrupt`.

    Raises:
        ConformanceError: the address is invalid, Ray is not installed, or the cluster cannot be
            reached.
    """
    if not on_ray(address):
        raise ConformanceError(f"--on {address}: ray or ray://HOST:PORT")
    if find_spec("ray") is None:
        raise ConformanceError(
            "Ray is not installed here: python -m pip install 'mha-conformance[cluster]'"
        )
    import ray

    is_named = address != "ray"
    settings = {"address": address} if is_named else {"include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConformanceError(f"no Ray cluster at {address}: {message(error)}") from error
    # A build that is cancelled sends this signal, at which Ray would abort by default.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield [own["Resources"] for own in ray.nodes() if own["Alive"]]
    finally:
        signal.signal(signal.SIGTERM, before)
        ray.shutdown()


def _aside(names: Sequence[str], root: Path) -> ExitCode:
    """Run environments on this machine, one after the other.

    Return `OK`, or `INCOMPLETE` if tox reports a failure.
    """
    done = subprocess.run(_tox("run", "-e", ",".join(names)), cwd=root, check=False)
    return ExitCode.OK if done.returncode == 0 else ExitCode.INCOMPLETE


class ClusterRun:
    """One run of environments on a cluster."""

    def __init__(self, chosen: Environments, cluster: Cluster, root: Path, say: Say) -> None:
        self._records, self._cluster, self._root, self._say = chosen.records, cluster, root, say
        self._codes: dict[str, ExitCode] = {}
        self._shards: dict[str, list[Path]] = defaultdict(list)
        self._left: dict[str, int] = {}
        self._remote: Any = None

    def check(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Raise `ConformanceError` if no node has the resources that an environment needs."""
        for name in self._records:
            asked = self._asked(name)
            if not any(all(own.get(key, 0) >= asked[key] for key in asked) for own in nodes):
                wanted = ", ".join(f"{amount:g} {key}" for key, amount in asked.items())
                raise ConformanceError(f"no node of the cluster has what {name} needs: {wanted}")

    def _asked(self, name: str) -> dict[str, float]:
        return {"CPU": self._cluster.workers, **self._cluster.resources.get(name, {})}

    def all(self) -> None:
        """Run all parts and, if environments are divided into shards, join their records.

        To judge a joined record, the command of the environment is run again. If this method is
        interrupted, the results that have arrived are kept, and the remaining parts are cancelled.
        """
        import ray

        # Each call of `remote` would send the module again.
        self._remote = ray.remote(node.run)
        project = ray.put(archive(self._root))
        waiting: dict[Any, EnvironmentPart] = {}
        for name in self._order():
            shards = self._cluster.shards
            self._left[name] = shards
            for number in range(1, shards + 1):
                part = self._part(name, f"{number}/{shards}" if shards > 1 else "")
                waiting[self._begin(project, part)] = part
        try:
            while waiting:
                (done,), _ = ray.wait([*waiting])
                part = waiting.pop(done)
                self._take(part, done)
                whole = self._whole(part)
                if whole is not None:
                    waiting[self._begin(project, whole)] = whole
                if waiting:
                    self._say(_left([*waiting.values()]))
        finally:
            for ref in waiting:
                ray.cancel(ref, force=True)

    def _order(self) -> list[str]:
        """Return the names of the environments, sorted by decreasing expected time.

        If a long environment came last, one node would work on it while the others wait.
        """
        return sorted(self._records, key=self._expected, reverse=True)

    def _expected(self, name: str) -> float:
        """Return the seconds that an environment took, summed over the items in its last record.

        If there are a complete and a restricted record on this machine, return the larger sum; if
        there is no readable record, return infinity.
        """
        record = self._root / self._records[name]
        found = []
        for file in (record, narrowed_path(record)):
            # The command of the environment will say so if a record is broken.
            with suppress(BrokenRecord):
                if file.is_file():
                    found.append(sum(result.seconds for result in read(file).results))
        return max(found, default=math.inf)

    def _part(self, name: str, shard: str = "") -> EnvironmentPart:
        """Return a part of an environment, with the records that exist already on this machine.

        `shard` is a text such as "2/8", or "" for the whole environment.
        """
        record = self._root / self._records[name]
        files = [record.with_name("run")]
        for own in (record, narrowed_path(record)):
            files += [own, own.with_suffix(".safetensors")]
        found = {
            file.relative_to(self._root).as_posix(): file.read_bytes()
            for file in files
            if file.is_file()
        }
        more = ("--shard", shard) if shard else ()
        return EnvironmentPart(name, shard, (*self._cluster.arguments, *more), found)

    def _begin(self, project: Any, part: EnvironmentPart) -> Any:
        """Have a node run a part, and return Ray's reference to its `PartResult`."""
        asked = self._asked(part.environment)
        own = {key: asked[key] for key in asked if key not in ("CPU", "GPU")}
        remote = self._remote.options(
            num_cpus=asked["CPU"],
            num_gpus=asked.get("GPU", 0),
            resources=own,
            max_retries=RETRIES,
            scheduling_strategy="SPREAD",
            name=part.name,
        )
        folder = Path(self._records[part.environment]).parent.as_posix()
        return remote.remote(project, key_of(self._root), folder, part, self._cluster.workers)

    def _take(self, part: EnvironmentPart, ref: Any) -> None:
        """Write the files of a finished part, report the part, and note its exit code.

        The code is `INCOMPLETE` if the part was lost, failed without writing a record, or ended
        with a code that is not an `ExitCode`.
        """
        import ray

        try:
            answer: PartResult = ray.get(ref)
        except ray.exceptions.RayError as error:
            told = str(error).strip().splitlines()
            self._tell(part, f"lost: {told[-1] if told else type(error).__name__}")
            self._note(part, ExitCode.INCOMPLETE)
            return
        records = []
        for path, content in sorted(answer.files.items()):
            file = self._root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(file, content)
            records += [file] if file.suffix == ".json" else []
        where = f"{answer.seconds:.0f} s on {answer.node}"
        if not records and answer.code:
            self._tell(part, f"was not run (exit code {answer.code}), {where}")
            self._say(answer.tail.strip())
            self._note(part, ExitCode.INCOMPLETE)
            return
        if part.shard:
            self._shards[part.environment] += records
        self._tell(part, f"{_items(records)}exit code {answer.code}, {where}")
        if answer.code and not part.shard:
            self._say(answer.tail.strip())
        known = answer.code in {*ExitCode}
        self._note(part, ExitCode(answer.code) if known else ExitCode.INCOMPLETE)

    def _tell(self, part: EnvironmentPart, text: str) -> None:
        self._say(f"{part.name}: {text}")

    def _note(self, part: EnvironmentPart, code: ExitCode) -> None:
        # The command of the environment judges the joined record, once all shards are there.
        if not part.shard or code == ExitCode.INCOMPLETE:
            self._codes[part.name] = code
        if part.shard:
            self._left[part.environment] -= 1

    def _whole(self, part: EnvironmentPart) -> EnvironmentPart | None:
        """Join the shards of an environment, and return a part that judges the joined record.

        Return None, without joining anything, unless `part` is the last shard to arrive and there
        are records to join.
        """
        from conformance.running.merging import join, joined_selection

        shards = self._shards.pop(part.environment, []) if not self._left[part.environment] else []
        if not part.shard or not shards:
            return None
        record = self._root / self._records[part.environment]
        selections = [read(file).header.provenance.selection for file in shards]
        joined = join(shards, narrowed_path(record) if joined_selection(selections) else record)
        for line in joined.contradictions:
            self._say(f"{part.environment}: contradiction: {line}")
            self._codes[f"{part.environment}, joined"] = ExitCode.DEVIATES
        for file in shards:
            file.unlink()
            file.with_suffix(".safetensors").unlink(missing_ok=True)
        return self._part(part.environment)

    def code(self) -> ExitCode:
        """Return the exit code of the run: `OK` if everything succeeded, or else the worst code.

        The worst is `INCOMPLETE`, followed by `USAGE`, `DEVIATES` and then any other code.
        """
        found = {*self._codes.values()} - {ExitCode.OK}
        order = (ExitCode.INCOMPLETE, ExitCode.USAGE, ExitCode.DEVIATES)
        return next((code for code in order if code in found), max(found, default=ExitCode.OK))


def _left(parts: Sequence[EnvironmentPart]) -> str:
    counts = [plural(len({part.environment for part in parts}), "environment")]
    if any(part.shard for part in parts):
        counts.insert(0, plural(len(parts), "part"))
    return f"  left: {' of '.join(counts)}"


def _items(records: Sequence[Path]) -> str:
    count = sum(len(read(file).results) for file in records)
    return f"{count:,} items, " if records else "as measured before, "


def key_of(root: Path) -> str:
    """Return a name for the project at `root`, under which nodes keep the packages for it."""
    return f"{root.name}-{sha256(str(root).encode()).hexdigest()[:8]}"


def archive(root: Path) -> bytes:
    """Return the source of a project as a tar archive.

    The archive has all files that git tracks or does not ignore. If git cannot list them, the
    archive has all files except those in certain folders, such as "build".
    """
    git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(git, cwd=root, capture_output=True, check=True)
        files: Iterator[Path] = (root / name for name in done.stdout.decode().split("\0") if name)
    except (OSError, subprocess.CalledProcessError):
        files = (file for file in root.rglob("*") if not _APART & {*file.relative_to(root).parts})
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as into:
        for file in sorted(files):
            if file.is_file():
                into.add(file, arcname=file.relative_to(root).as_posix(), recursive=False)
    return content.getvalue()
