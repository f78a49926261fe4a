"""How much of the zoo does the judge notice, and what does a verdict cost?

    PYTHONPATH=tests python benchmarks/judge.py --zoo [--level full] [--sample 100 --seed 1]
    PYTHONPATH=tests python benchmarks/judge.py --speed docs/examples/numpy_function.py 20

Mutants are layers made of pieces of the suite, which no sandbox holds. They are asked the problems
of a token in processes of this program, with the requirements and the rule by which candidates are
judged. Mutants of features are asked the chapter "feature" before the others. Left out are those
that no problem of a judge can show: those that only experiments (probe/...), lengths, undefined
problems or additive scores show, and those that no requirement of level "must" notices.

Other processes take turns on a machine, so a verdict is measured in seconds of the processor: of
this process and of all below it, among them those that ended.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import time
from collections import Counter
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from mutants.features import FeatureMutant
from mutants.zoo import MUTANTS

from conformance.cases.catalogue import every_case
from conformance.judging.judge import Judging, Task
from conformance.judging.pool import Candidates, Options
from conformance.requirements import REQUIREMENTS
from conformance.requirements.examination import ResultMemory


def visible():
    """Mutants that a problem of a judge can show."""
    cases = {case.id: case for case in every_case()}
    must = {one.id for one in REQUIREMENTS if one.level == "must"}
    tasks = (Task("full"), Task("full", ("feature",)))
    return [
        mutant
        for mutant in MUTANTS
        if mutant.case in cases
        and any(task.takes(cases[mutant.case]) for task in tasks)
        and must & set(mutant.killed_by)
    ]


EXPECTED = {heads: ResultMemory(4096) for heads in (False, True)}
"""What is expected of heads alone, and of a layer, which is not the same."""


def noticed(mutant, level: str, token: str) -> bool:
    """Whether a problem of the token makes the verdict "wrong"; it ends at the first."""
    adapter = mutant.adapter()
    is_feature = isinstance(mutant, FeatureMutant)
    for chapters in (("feature",), ()) if is_feature else ((),):
        task = Task(level, chapters, (mutant.dtype,) if level == "full" else ())
        judging = Judging(adapter, task, token, EXPECTED[adapter.projections_supplied])
        if any(judging.deviations(judging.ask(item)) for item in judging.items()):
            return True
    return False


def asked(place: int, level: str, token: str) -> tuple[int, bool]:
    """Whether the mutant at a place of the zoo is noticed, beside its place."""
    return place, noticed(MUTANTS[place], level, token)


def zoo(level: str, sample: int, seed: int, jobs: int) -> None:
    """Print the share of mutants that are noticed, by chapter."""
    token = secrets.token_hex(16)
    found: Counter[str] = Counter()
    total: Counter[str] = Counter()
    missed = []
    those = visible()
    print(f"{len(MUTANTS)} mutants, {len(those)} that a judge can see", flush=True)
    if sample:
        those = random.Random(seed).sample(those, min(sample, len(those)))
    places = [MUTANTS.index(mutant) for mutant in those]
    with get_context("spawn").Pool(jobs) as pool:
        ask = partial(asked, level=level, token=token)
        for place, is_noticed in pool.imap_unordered(ask, places, chunksize=4):
            mutant = MUTANTS[place]
            total[mutant.chapter] += 1
            found[mutant.chapter] += is_noticed
            if not is_noticed:
                missed.append(mutant.name)
                print(f"not noticed: {mutant.name} ({mutant.case}, {mutant.dtype})", flush=True)
    print(f"level {level}, token {token}, sample {sample} of seed {seed}")
    for chapter, count in total.items():
        print(f"{chapter:<12} {found[chapter]:>4} of {count}")
    print(f"{'all':<12} {sum(found.values()):>4} of {len(those)}")
    print(f"{100 * sum(found.values()) / len(those):.1f} %; not noticed:", ", ".join(missed))


def spent() -> tuple[float, float]:
    """Seconds of the processor, of this process and of all below it, ended or not."""
    parents, used = {}, {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # It ended meanwhile.
            continue
        number = int(entry.parent.name)
        parents[number] = int(fields[1])
        used[number] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    below = 0.0
    for number, seconds in used.items():
        above = parents[number]
        while above in parents and above != os.getpid():
            above = parents[above]
        below += seconds * (above == os.getpid())
    return time.process_time(), below


def speed(file: str, times: int, *, own_work: bool) -> None:
    """Print what a verdict costs in a warm pool."""
    with Candidates(Options(own_work=own_work).checked()) as candidates:
        first = candidates.judge(file)
        before = spent()
        for _ in range(times):
            candidates.judge(file)
        judge, candidate = ((now - then) / times for then, now in zip(before, spent(), strict=True))
    print(f"{first.candidate}: {first.verdict}, {first.score}, {first.asked} asked")
    print(
        f"{judge + candidate:.2f} s of the processor each, {candidate:.2f} of them the candidate's "
        f"processes; {3600 / (judge + candidate):.0f} an hour and core"
    )


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--level", default="core", choices=("core", "full"))
    parser.add_argument("--sample", type=int, default=0, help="only so many mutants, drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="processes for --zoo (default: 2)")
    parser.add_argument("--own-work", action="store_true")
    parser.add_argument("--speed", nargs=2, metavar=("FILE", "TIMES"))
    options = parser.parse_args()
    if options.speed:
        assert Path(options.speed[0].split(":")[0]).exists()
        speed(options.speed[0], int(options.speed[1]), own_work=options.own_work)
    if options.zoo:
        zoo(options.level, options.sample, options.seed, options.jobs)


if __name__ == "__main__":
    main()
