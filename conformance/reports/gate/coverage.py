"""Coverage, promises and pinned conventions: what a baseline stores besides known deviations.

For each implementation and each "dtype:device:mode", the counts give the minimum number of findings
that must be verified in each chapter of cases. Without them, an implementation could pass more
easily by supporting less:

    [verified.mine]
    "default:float32:cpu:eval" = {causal = 31, mask = 77, plain = 24}
    "float32:cpu:eval" = {causal = 120, mask = 310, plain = 96}

The place "*:cpu:*" sums over dtypes and modes, and counts by case and by requirement, so that what
is lost in a chapter is noticed although something else in it is gained:

    [verified.mine."*:cpu:*"]
    "mask/key-padding/long" = 28
    "weights.equal-definition" = 164

A count belongs to runs of one level, with which its place begins, or to runs of level "full".

Promises say how strictly the counted findings were judged: the accuracy class that decides in each
dtype, and what has equal bits. They are stored by implementation and device:

    [promised.mine.cpu]
    float32 = "A0"
    bfloat16 = "A"
    runs = "equal bits"

Pins are entries of a convention card that must not change. A convention is not a deviation, so a
change of it in a new version would go unnoticed. They are stored by implementation, experiment and
"dtype:device:mode":

    [pinned.mine."probe/leaks"."float32:cpu:eval"]
    "leak(argument=mask, form=form.bool, input=input.key, number=number.nan)" = "leak.hidden"

`baseline update` fills in an empty table, `[pinned.mine."probe/leaks"]`, for all modes. It updates
values that have changed, and removes pins of entries that are no longer observed, unless a mode
would be left without pins. Entries that are not pinned may appear, change and disappear.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import tomlkit

from conformance.errors import BrokenBaseline
from conformance.records import LEVELS
from conformance.records.findings import (
    ANSWERED,
    NOT_VERIFIED,
    RUN,
    STORED,
    VERIFIED,
    WRONG,
    CaseResult,
    Finding,
)
from conformance.records.numbers import ACCURACY, UNDERFLOW
from conformance.records.record import Record

Counts = Mapping[str, Mapping[str, Mapping[str, int]]]
"""The number of verified findings by implementation, place and chapter of cases.

A place is "dtype:device:mode" or, except at level "full", "level:dtype:device:mode". If the dtype
and the mode are "*", the numbers are by case and by requirement instead of by chapter."""

Promises = Mapping[str, Mapping[str, Mapping[str, str]]]
"""What is promised, by implementation, device and subject.

The subject is a dtype, whose answers are judged by an accuracy class, or one of those calls that
give equal bits, such as "runs"."""

Pins = Mapping[str, Mapping[str, Mapping[str, Mapping[str, str]]]]
"""The text of a pinned value, by implementation, experiment, "dtype:device:mode" and subject."""

NOT_OBSERVED, NOT_WRITTEN = "not observed", "not written yet: run baseline update"

OPTIONS = ("--case", "--dtype", "--mode", "-k", "--level", "--shard", "--deselect")
_NARROWS = re.compile(rf"(^| )({'|'.join(OPTIONS)})( |$)")
"""Matches options that leave something out of a run; case files only add to it."""

HEAD = """\
# Findings that were verified at least, by chapter of cases. `baseline update` raises these numbers.
"""

_TABLE = re.compile(r"[ \t]*\[[ \t]*[\"']?(verified|promised|pinned)\b")
_ENTRY = re.compile(r"[ \t]*\[\[[ \t]*known\b")


def is_narrowed(record: Record) -> bool:
    """Return whether options, or the level of a run, left something out of it."""
    return _is_restricted(record) or record.header.provenance.level != "full"


def _is_restricted(record: Record) -> bool:
    """Return whether options left out something that belongs to the level of a run."""
    header = record.header
    return bool(header.deselected or _NARROWS.search(header.provenance.selection))


def is_open(finding: Finding) -> bool:
    """Return whether a finding verifies nothing, because its item has no outcome."""
    return finding.requirement == RUN or finding.verdict in NOT_VERIFIED


def is_whole(record: Record) -> bool:
    """Return whether a run has an outcome for all that belongs to its level."""
    return (
        record.complete
        and len(record.results) >= record.header.planned
        and not _is_restricted(record)
        and not any(is_open(one) for result in record.results for one in result.findings)
    )


def _place(result: CaseResult) -> str:
    return f"{result.dtype}:{result.device}:{result.mode}"


# Counts of verified findings


class Loss(NamedTuple):
    """A chapter of cases in which fewer findings were verified than the baseline requires.

    Attributes:
        place: "dtype:device:mode", after the level unless it is "full". If the dtype and the mode
            are "*", the `chapter` is a case or a requirement.
        reason: the most frequent reason why findings there are unsupported, or "".
        wrong: the findings there that deviate or are errors. Of an answer that is wrong, fewer
            questions are asked.
    """

    implementation: str
    place: str
    chapter: str
    expected: int
    verified: int
    reason: str
    wrong: int = 0


def read_counts(table: Any) -> Counts:
    """Return the counts in the `verified` table; raises `BrokenBaseline` if they are invalid."""
    kind = dict[str, dict[str, dict[str, Annotated[int, msgspec.Meta(ge=0)]]]]
    try:
        counts = msgspec.convert(table, kind)
    except (msgspec.ValidationError, OverflowError) as error:
        raise BrokenBaseline(
            "verified holds numbers of findings, such as verified.mine "
            f'= {{"float32:cpu:eval" = {{mask = 310}}}} ({error})'
        ) from error
    for name, places in counts.items():
        for place in places:
            level, _, rest = place.partition(":")
            if (rest if level in LEVELS and level != "full" else place).count(":") != 2:
                raise BrokenBaseline(
                    f'verified.{name}: {place!r} is not "dtype:device:mode", nor is it after a '
                    'level, such as "default:"'
                )
    return counts


def counted(record: Record, verdicts: Collection[str] = VERIFIED) -> Counts:
    """Count findings with these verdicts, by implementation, place and chapter, as `Counts` do.

    Cases that were read from files are not counted.
    """
    counts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for name, place, chapter, finding in _findings(record):
        counts[name][place][chapter] += finding.verdict in verdicts
    return {
        name: {
            place: {chapter: times for chapter, times in sorted(chapters.items()) if times}
            for place, chapters in places.items()
        }
        for name, places in counts.items()
    }


def losses(expected: Counts, record: Record) -> list[Loss]:
    """Return where less was verified on the record's device than expected.

    The result is [] if options left something out of the run, or if an item has no outcome.
    """
    if not expected or not is_whole(record):
        return []
    now, device = counted(record), record.header.provenance.device
    level = _level(record)
    reasons: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    wrong: Counter[tuple[str, str, str]] = Counter()
    for name, place, chapter, finding in _findings(record):
        if finding.verdict == "unsupported":
            reasons[name, place, chapter][finding.detail] += 1
        wrong[name, place, chapter] += finding.verdict in WRONG
    found = []
    for one in record.header.implementations:
        for place, chapters in expected.get(one.name, {}).items():
            *levels, _, on, _ = place.split(":")
            if on != device or "".join(levels) != level:
                continue
            for chapter, least in chapters.items():
                times = now.get(one.name, {}).get(place, {}).get(chapter, 0)
                if times < least:
                    key = one.name, place, chapter
                    reason = max(reasons[key], key=reasons[key].__getitem__, default="")
                    found.append(Loss(*key, least, times, reason, wrong[key]))
    return found


def implementations_counted(
    expected: Counts, record: Record, *, every_level: bool = False
) -> set[str]:
    """Return the implementations that have counts for the device and the level of a record.

    With `every_level`, those of other levels are among them.
    """
    device, level = record.header.provenance.device, _level(record)
    return {
        name
        for name, places in expected.items()
        for *levels, _, on, _ in (place.split(":") for place in places)
        if on == device and (every_level or "".join(levels) == level)
    }


def _level(record: Record) -> str:
    level = record.header.provenance.level
    return level if level != "full" else ""


def _findings(record: Record) -> Iterator[tuple[str, str, str, Finding]]:
    """Yield each finding after its implementation, its place and its chapter, as `Counts` has them.

    Each occurs three times: for its chapter, its case and its requirement. Findings of cases that
    were read from files are left out.
    """
    level = _level(record)
    for result in record.results:
        chapter = result.case.partition("/")[0]
        if chapter == STORED:  # The file need not be there in the next run.
            continue
        for finding in result.findings:
            place = ":".join(filter(None, (level, _place(result))))
            every = ":".join(filter(None, (level, "*", result.device, "*")))
            yield result.implementation, place, chapter, finding
            yield result.implementation, every, result.case, finding
            yield result.implementation, every, finding.requirement, finding


def raised(text: str, record: Record, *, allow_less: bool = False) -> str:
    """Return the text of a baseline with its counts and promises raised to those of a record.

    Errors are not counted, and a run that was not whole changes nothing. If `allow_less` is true,
    counts that the record does not reach are lowered to what it has verified; promises never are.
    """
    if not is_whole(record):
        return text

    def edit(document: Any) -> bool:
        verified = document.setdefault("verified", tomlkit.table(is_super_table=True))
        changed = False
        if allow_less:
            for loss in losses(read_counts(verified.unwrap()), record):
                changed = True
                chapters = verified[loss.implementation][loss.place]
                if loss.verified:
                    chapters[loss.chapter] = loss.verified
                else:
                    del chapters[loss.chapter]
        # An error is recorded for more requirements than the output that replaces it once fixed.
        for name, places in counted(record, ANSWERED).items():
            table = verified.setdefault(name, tomlkit.table())
            for place, chapters in places.items():
                before = table.get(place, {})
                most = {
                    chapter: max(before.get(chapter, 0), chapters.get(chapter, 0))
                    for chapter in sorted({*before, *chapters})
                }
                if most and most != dict(before):
                    changed = True
                    # There are hundreds of cases, each of which gets a line.
                    written = tomlkit.table() if "*" in place else tomlkit.inline_table()
                    written.update(most)
                    table[place] = written
        for one in _promised_otherwise(read_promises(document.get("promised", {})), record):
            if not one.is_less:
                every = document.setdefault("promised", tomlkit.table(is_super_table=True))
                own = every.setdefault(one.implementation, tomlkit.table(is_super_table=True))
                own.setdefault(one.device, tomlkit.table())[one.subject] = one.now
                changed = True
        return changed

    return _edited(text, edit, HEAD)


# Promises


class Promise(NamedTuple):
    """A promise that is another one in a record than in the baseline.

    Attributes:
        subject: a dtype, or the calls that have equal bits, such as "runs".
        pinned, now: the promise in the baseline and in the record, such as "A0" or "equal bits"; ""
            if there is none.
    """

    implementation: str
    device: str
    subject: str
    pinned: str
    now: str

    @property
    def is_less(self) -> bool:
        """Whether less is promised now than the baseline says."""
        classes = [*ACCURACY]
        if self.pinned in classes and self.now in classes:
            return classes.index(self.now) > classes.index(self.pinned)
        return bool(self.pinned)


def read_promises(table: Any) -> Promises:
    """Return the promises in the `promised` table; raises `BrokenBaseline` if they are invalid."""
    try:
        promises = msgspec.convert(table, dict[str, dict[str, dict[str, str]]])
    except msgspec.ValidationError as error:
        raise BrokenBaseline(
            'promised holds promises by device, such as promised.mine.cpu = {bfloat16 = "A"} '
            f"({error})"
        ) from error
    for name, devices in promises.items():
        for device, own in devices.items():
            for subject, promise in own.items():
                if subject in UNDERFLOW and promise not in ACCURACY:
                    raise BrokenBaseline(
                        f"promised.{name}.{device}: {subject} = {promise!r} is no accuracy class; "
                        f"it is one of {', '.join(ACCURACY)}"
                    )
    return promises


def withdrawn_and_gained(
    promises: Promises, record: Record
) -> tuple[Sequence[Promise], Sequence[Promise]]:
    """Return what a record promises less, and what more, than a baseline says.

    Implementations without promises in the baseline, and other devices than the record's, are
    skipped. Options that restrict a run do not matter, because a promise is part of a declaration.
    """
    device = record.header.provenance.device
    found = [
        one
        for one in _promised_otherwise(promises, record)
        if device in promises.get(one.implementation, {})
    ]
    return [one for one in found if one.is_less], [one for one in found if not one.is_less]


def _promised_otherwise(promises: Promises, record: Record) -> Iterator[Promise]:
    """Yield every promise that differs between a record and a baseline, or is in only one."""
    device = record.header.provenance.device
    for one in record.header.implementations:
        if one.unavailable:  # What stands in for it declares nothing.
            continue
        before, now = promises.get(one.name, {}).get(device, {}), one.judged_by | one.promises
        for subject in {**before, **now}:
            pair = before.get(subject, ""), now.get(subject, "")
            if pair[0] != pair[1]:
                yield Promise(one.name, device, subject, *pair)


# Pinned conventions


class PinChange(NamedTuple):
    """A pinned entry whose value has changed, or an experiment without any pinned entries yet.

    `pinned` and `now` are the texts of phrases, but `now` is `NOT_OBSERVED` if the record has no
    such entry. For an experiment without pinned entries, `now` is `NOT_WRITTEN`, and `place`,
    `subject` and `pinned` are "".
    """

    implementation: str
    experiment: str
    place: str
    subject: str
    pinned: str
    now: str


def read_pins(table: Any) -> Pins:
    """Return the pinned entries in the `pinned` table; raises `BrokenBaseline` if invalid."""
    try:
        return msgspec.convert(table, dict[str, dict[str, dict[str, dict[str, str]]]])
    except msgspec.ValidationError as error:
        raise BrokenBaseline(
            'pinned holds values of entries, such as [pinned.mine."probe/leaks"."float32:cpu:eval"]'
            f" ({error})"
        ) from error


def changes(pins: Pins, record: Record) -> Iterator[PinChange]:
    """Yield pinned entries whose value in a record differs, and experiments without pinned entries.

    Pinned entries of other devices, and of experiments that options left out of the run or that
    have no outcome, are skipped.
    """
    for name in {one.name for one in record.header.implementations} & pins.keys():
        for experiment, places in pins[name].items():
            if not places:
                yield PinChange(name, experiment, "", "", "", NOT_WRITTEN)
            observed = _observed(record, name, experiment)
            for place, expected in places.items():
                on_device = place.split(":")[1:2] == [record.header.provenance.device]
                if not on_device or (place not in observed and is_narrowed(record)):
                    continue
                now = observed.get(place, {})
                if now is None:
                    continue
                for subject, value in expected.items():
                    if now.get(subject) != value:
                        there = now.get(subject, NOT_OBSERVED)
                        yield PinChange(name, experiment, place, subject, value, there)


def repinned(text: str, pins: Pins, record: Record) -> str:
    """Return the text of a baseline with its pinned entries updated to the values in a record.

    Values are filled in for an experiment without pinned entries, and entries that the record lacks
    are removed, unless none would be left for a "dtype:device:mode".
    """

    def edit(document: Any) -> bool:
        changed = False
        for name in {one.name for one in record.header.implementations} & pins.keys():
            for experiment, places in pins[name].items():
                table = document["pinned"][name][experiment]
                for place, now in _observed(record, name, experiment).items():
                    if now is None or (places and place not in places):
                        continue
                    kept = {it: now[it] for it in places.get(place, now) if it in now}
                    if kept and kept != places.get(place):
                        table[place] = tomlkit.item(kept)
                        changed = True
        return changed

    return _edited(text, edit) if any(pins.values()) else text


def _observed(record: Record, name: str, experiment: str) -> dict[str, dict[str, str] | None]:
    """Return the values that an experiment observed, by "dtype:device:mode" and subject.

    Instead of values, there is None for a "dtype:device:mode" without an outcome.
    """
    return {
        _place(result): None
        if any(map(is_open, result.findings))
        else {str(entry.subject): str(entry.value) for entry in result.entries}
        for result in record.results
        if (result.implementation, result.case) == (name, experiment)
    }


# In the file


def _edited(text: str, edit: Callable[[Any], bool], head: str = "") -> str:
    """Return the text of a baseline with its tables of counts and pins edited by `edit`.

    If they change, these tables are moved to the end of the file, after all entries.

    Args:
        text: the content of the file.
        edit: function that changes the parsed tables, and returns whether it did.
        head: a comment to write above the tables if there were none before.
    """
    rest, tables = _apart(text)
    document: Any = tomlkit.parse(tables)
    if not edit(document):
        return text
    end = "\r\n" if "\r\n" in text else "\n"
    written = ("" if tables.strip() else head) + tomlkit.dumps(document).strip()
    return rest.rstrip() + (end * 2 if rest.strip() else "") + end.join(written.splitlines()) + end


def counts_after(lines: Sequence[str], first: int) -> int:
    """Return the index in `lines` where counts or pins begin, at or after the index `first`.

    Without such a line, the result is the number of lines.
    """
    for place in range(first, len(lines)):
        if _TABLE.match(lines[place]) or lines[place].strip() == HEAD.strip():
            return place
    return len(lines)


def _apart(text: str) -> tuple[str, str]:
    """Split the text of a baseline into its entries, and its tables of counts and pins.

    The comment `HEAD` above these tables belongs to them.
    """
    lines = text.splitlines(keepends=True)
    start = counts_after(lines, 0)
    entries = (n for n in range(start, len(lines)) if _ENTRY.match(lines[n]))
    stop = next(entries, len(lines))
    while stop < len(lines) and lines[stop - 1].lstrip().startswith("#"):
        # A comment above an entry belongs to the entry.
        stop -= 1
    return "".join(lines[:start] + lines[stop:]), "".join(lines[start:stop])
