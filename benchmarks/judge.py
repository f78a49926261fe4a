"""How much of the zoo does the judge notice, and what does a verdict cost?

    PYTHONPATH=tests python benchmarks/judge.py --zoo [--level full] [--every 10]
    PYTHONPATH=tests python benchmarks/judge.py --speed docs/examples/numpy_function.py 20
    PYTHONPATH=tests python benchmarks/judge.py --cheats

Mutants are layers made of pieces of the suite, which no sandbox holds. They are asked the problems
of a token in this process, with the requirements and the rule by which candidates are judged.
Mutants of features are asked the chapter "feature". Those at length are no candidates of a judge.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import time
from collections import Counter
from pathlib import Path

from cheats import CHEATS
from mutants.features import FeatureMutant
from mutants.long import LongMutant
from mutants.zoo import MUTANTS

from conformance.judging.judge import Judging, Task, marked
from conformance.judging.pool import Candidates, Options
from conformance.requirements.examination import Memory


def noticed(mutant, level: str, token: str, expectations: dict[bool, Memory]) -> bool:
    """Whether a problem of the token is answered wrongly; it ends at the first."""
    chapters = ("feature",) if isinstance(mutant, FeatureMutant) else ()
    task = Task(level, chapters, (mutant.dtype,) if level == "full" else ())
    adapter = mutant.adapter()
    judging = Judging(adapter, task, token, expectations[adapter.projections_supplied])
    for item in judging.items():
        marks = marked(judging.ask(item))
        if marks.supported and not (marks.output and (marks.gradients or not item.mode.gradients)):
            return True
    return False


def zoo(level: str, every: int) -> None:
    """Print the share of mutants that are noticed, by chapter."""
    token = secrets.token_hex(16)
    # What is expected of heads alone is not what is expected of a layer.
    expectations = {heads: Memory(4096) for heads in (False, True)}
    found: Counter[str] = Counter()
    total: Counter[str] = Counter()
    missed = []
    those = [mutant for mutant in MUTANTS if not isinstance(mutant, LongMutant)][::every]
    for mutant in those:
        total[mutant.chapter] += 1
        if noticed(mutant, level, token, expectations):
            found[mutant.chapter] += 1
        else:
            missed.append(mutant.name)
    print(f"level {level}, token {token}, every {every}. mutant")
    for chapter, count in total.items():
        print(f"{chapter:<12} {found[chapter]:>4} of {count}")
    print(f"{'all':<12} {sum(found.values()):>4} of {len(those)}")
    print("not noticed:", ", ".join(missed))


def spent() -> float:
    """Seconds of the processor, of this process and of those that ended."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def speed(file: str, times: int) -> None:
    """Print what a verdict costs in a warm pool, and the start of the pool."""
    before, begun = spent(), time.monotonic()
    with Candidates(Options().checked()) as candidates:
        first = candidates.judge(file)
        start = time.monotonic() - begun
        for _ in range(times):
            candidates.judge(file)
        wall = time.monotonic() - begun - start
    each = (spent() - before) / (times + 1)
    print(f"{first.candidate}: {first.verdict}, {first.score}, {first.asked} asked")
    print(f"first {start:.2f} s; then {wall / times:.2f} s each, {3600 * times / wall:.0f} an hour")
    print(f"{each:.2f} s of the processor each, with the start of the pool")


def cheats() -> None:
    """Print what becomes of each cheat."""
    for cheat in CHEATS:
        print(f"{cheat.name:<36} {cheat.kind or 'no right answer'}")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zoo", action="store_true")
    parser.add_argument("--level", default="core", choices=("core", "full"))
    parser.add_argument("--every", type=int, default=1, help="only every n-th mutant")
    parser.add_argument("--speed", nargs=2, metavar=("FILE", "TIMES"))
    parser.add_argument("--cheats", action="store_true")
    options = parser.parse_args()
    if options.cheats:
        cheats()
    if options.speed:
        assert Path(options.speed[0].split(":")[0]).exists()
        speed(options.speed[0], int(options.speed[1]))
    if options.zoo:
        zoo(options.level, options.every)


if __name__ == "__main__":
    main()
