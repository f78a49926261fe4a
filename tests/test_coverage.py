"""What was verified at least: the counts that a baseline keeps, and what is less than they say."""

from __future__ import annotations

import msgspec
import pytest
from test_gate import COARSE, CROSS, GRADIENT, KEYS, ONE, OUTPUT, SELF, Made

from conformance.errors import BrokenBaseline, ExitCode
from conformance.records.findings import RUN, CaseResult, Entry, Finding, Phrase
from conformance.reports.gate import answer, coverage, tell, update
from conformance.reports.gate.baseline import baseline_of, read_baseline
from conformance.reports.gate.judging import judge


def test_each_implementation_of_a_gate_must_be_verified():
    nothing = Made("other").say("unsupported", detail="no such thing")
    judgement = judge(baseline_of("b.toml", ""), Made().record(nothing))
    assert judgement.exit_code == ExitCode.NOTHING_VERIFIED
    assert "nothing was verified of other" in str(tell(judgement))


def test_what_a_narrowed_run_did_not_ask_of_an_implementation_is_not_missing():
    absent = Made("other")
    absent.found = {}
    whole, narrowed = Made().record(absent), Made().record(absent, selection="-k 'mine'")
    nothing_known = baseline_of("b.toml", "")
    assert judge(nothing_known, whole).exit_code == ExitCode.NOTHING_VERIFIED
    assert judge(nothing_known, narrowed).exit_code == ExitCode.OK


def counted(tmp_path, made):
    """The baseline that an update by this record leaves."""
    path = tmp_path / "conformance.toml"
    before = read_baseline(path)
    update(before, made.record() if isinstance(made, Made) else made, "because")
    return read_baseline(path)


def test_an_update_counts_what_is_verified(tmp_path):
    text = counted(tmp_path, Made()).text
    assert '"float32:cpu:eval" = {mask = 3, plain = 6}' in text
    assert "[verified.mine]" in text


def test_a_second_update_changes_nothing(tmp_path):
    assert counted(tmp_path, Made()).text == counted(tmp_path, Made()).text


def without(made, **where):
    for key in list(made.found):
        values = dict(zip(("requirement", "case", "dtype", "mode"), key, strict=True))
        if all(values[name] == value for name, value in where.items()):
            del made.found[key]
    return made


@pytest.mark.parametrize(
    ("less", "told"),
    [
        (lambda: Made(dtypes=("float32",)), "float64:cpu:eval: mask 0 of 3, plain 0 of 6"),
        (lambda: Made(modes=("other",)), "float32:cpu:eval: mask 0 of 3, plain 0 of 6"),
        (lambda: without(Made(), case=CROSS), "float32:cpu:eval: mask 0 of 3"),
        (
            lambda: Made().say("unsupported", requirement=GRADIENT, detail="no gradients"),
            "unsupported: no gradients",
        ),
    ],
    ids=["dtype", "mode", "chapter", "unsupported"],
)
def test_less_than_before_is_red_and_says_what_fell_away(tmp_path, less, told):
    judgement = judge(counted(tmp_path, Made()), less().record())
    assert judgement.exit_code == ExitCode.DEVIATES
    printed = str(tell(judgement))
    assert told in printed
    assert "changed for the worse (nothing deviates, less verified than before" in printed
    assert "red" in str(tell(judgement).spans[0].style)
    assert "mine" in printed


def test_less_is_verified_where_answers_are_wrong(tmp_path):
    """What is unsupported has not changed, so it is no reason."""
    before = Made().say("unsupported", requirement=GRADIENT, case=CROSS, detail="no gradients")
    now = without(Made(), requirement=GRADIENT, case=SELF).say("deviates", requirement=OUTPUT)
    now.say("unsupported", requirement=GRADIENT, case=CROSS, detail="no gradients")
    printed = str(tell(judge(counted(tmp_path, before), now.record())))
    assert "beside 2 findings there that are wrong, less is asked of the same answers" in printed
    assert "  mend what deviates, or, if that is meant, baseline update --allow-less" in printed
    assert "unsupported: no gradients" not in printed


@pytest.mark.parametrize(
    "less",
    [
        lambda: without(Made(), requirement=GRADIENT, case=SELF),
        lambda: without(Made(), case=CROSS),
        lambda: Made(dtypes=("float32",)),
        lambda: without(Made(), requirement=GRADIENT).say("deviates", requirement=OUTPUT),
    ],
    ids=["requirement", "chapter", "dtype", "wrong"],
)
def test_an_accepted_loss_is_green_and_a_greater_one_is_red(tmp_path, less):
    path = tmp_path / "conformance.toml"
    counted(tmp_path, Made())
    record = less().record()
    assert update(read_baseline(path), record, "because") == ExitCode.DEVIATES
    assert update(read_baseline(path), record, "because", allow_less=True) == ExitCode.OK
    assert judge(read_baseline(path), record).holds
    text = read_baseline(path).text
    assert update(read_baseline(path), record, "because", allow_less=True) == ExitCode.OK
    assert read_baseline(path).text == text
    greater = without(less(), case=ONE, requirement=OUTPUT).record()
    assert any(one.chapter == ONE for one in judge(read_baseline(path), greater).less)


def test_a_narrowed_run_lowers_nothing(tmp_path):
    path = tmp_path / "conformance.toml"
    text = counted(tmp_path, Made()).text
    narrowed = without(Made(), case=CROSS).record(selection="-k 'mine'")
    update(read_baseline(path), narrowed, "because", allow_less=True)
    assert read_baseline(path).text == text


def test_a_loss_is_red_although_as_much_is_gained(tmp_path):
    """A case of the chapter is lost in one requirement, and another is gained in it."""
    before = without(Made(), case=SELF, requirement=GRADIENT)
    for lost in (
        without(Made(), case=SELF, requirement=OUTPUT),
        without(Made(), case=ONE, requirement=GRADIENT),
    ):
        now = lost.record()
        assert coverage.counted(now)["mine"]["float32:cpu:eval"] == {"mask": 3, "plain": 5}
        judgement = judge(counted(tmp_path, before), now)
        assert judgement.exit_code == ExitCode.DEVIATES
        assert "less verified: mine at *:cpu:*: " in str(tell(judgement))
        (tmp_path / "conformance.toml").unlink()


def test_one_of_many_is_a_loss(tmp_path):
    text = f'[verified.mine."*:cpu:*"]\n"{OUTPUT}" = '
    made = Made(modes=("eval", "train")).record()
    for least, code in ((12, ExitCode.OK), (13, ExitCode.DEVIATES)):
        assert judge(baseline_of(tmp_path / "b.toml", f"{text}{least}"), made).exit_code == code


def test_a_place_that_is_new_is_counted_beside_the_sums(tmp_path):
    """In TOML, what follows a table belongs to it."""
    counted(tmp_path, Made(dtypes=("float32",)))
    known = counted(tmp_path, Made(modes=("eval", "train")))
    assert known.verified["mine"]["float64:cpu:train"] == {"mask": 3, "plain": 6}
    assert known.verified["mine"]["*:cpu:*"][SELF] == 12
    assert known.verified["mine"]["*:cpu:*"][OUTPUT] == 12
    assert judge(known, Made(modes=("eval", "train")).record()).holds
    assert known.text == counted(tmp_path, Made(modes=("eval", "train"))).text


def test_many_losses_are_named_in_part(tmp_path, monkeypatch):
    monkeypatch.setattr("conformance.reports.gate.MOST_LOST", 2)
    found = judge(counted(tmp_path, Made()), without(Made(), requirement=OUTPUT).record())
    printed = str(tell(found))
    assert f"{CROSS} 4 of 6, {OUTPUT} 0 of 6 and 2 more\n" in printed
    assert "-v shows all of it" in printed
    assert f"{ONE} 4 of 6, {SELF} 4 of 6\n" in str(tell(found, verbose=True))


def test_as_much_as_before_or_more_is_green(tmp_path):
    known = counted(tmp_path, without(Made(), case=CROSS))
    assert judge(known, Made().record()).holds
    raised = counted(tmp_path, Made())
    assert raised.verified["mine"]["float32:cpu:eval"] == {"mask": 3, "plain": 6}
    assert raised.text.count(coverage.HEAD) == 1


def test_an_error_that_is_fixed_is_no_loss(tmp_path):
    """An error stands at every requirement, also at those that do not ask of an answer."""
    failing = Made().say("error", case=CROSS, detail="ValueError: no such mask")
    known = counted(tmp_path, failing)
    assert known.verified["mine"]["float32:cpu:eval"] == {"plain": 6}
    fixed = without(Made(), case=CROSS, requirement=GRADIENT)
    assert not judge(known, fixed.record()).less
    assert not judge(known, failing.record()).less


def test_an_update_never_lowers_what_was_verified(tmp_path):
    known = counted(tmp_path, Made())
    assert counted(tmp_path, without(Made(), case=CROSS)).text == known.text


@pytest.mark.parametrize(
    "option", ["--case mask", "--dtype float32", "--mode eval", "-k 'x'", "--shard 1/2",
               "--level core", "--deselect x"]
)  # fmt: skip
def test_a_narrowed_run_is_neither_compared_nor_counted(tmp_path, option):
    known = counted(tmp_path, Made())
    part = without(Made(), case=CROSS).record(selection=option)
    assert judge(known, part).holds
    (tmp_path / "conformance.toml").unlink()
    assert not counted(tmp_path, part).verified


def test_each_level_has_counts_of_its_own(tmp_path):
    part, whole = without(Made(), case=CROSS).record(level="default"), Made().record()
    update(read_baseline(tmp_path / "conformance.toml"), part, "because")
    known = counted(tmp_path, whole)
    assert '"default:float32:cpu:eval" = {plain = 6}' in known.text
    assert '"float32:cpu:eval" = {mask = 3, plain = 6}' in known.text
    assert judge(known, part).holds
    assert judge(known, whole).holds
    less = without(without(Made(), case=CROSS), case=SELF).record(level="default")
    assert "default:float32:cpu:eval: plain 3 of 6" in str(tell(judge(known, less)))


def test_an_implementation_that_has_no_counts_beside_others_is_not_counted(tmp_path):
    found = judge(counted(tmp_path, Made("other")), Made().record())
    assert found.uncounted == ["mine"]
    assert not found.holds
    assert not found.worse
    assert judge(counted(tmp_path, Made()), Made().record()).holds


def test_a_count_of_another_device_is_not_asked(tmp_path):
    text = counted(tmp_path, Made()).text.replace(":cpu:", ":gpu:")
    assert judge(baseline_of(tmp_path / "b.toml", text), Made().record()).holds


def test_entries_and_counts_share_a_file(tmp_path):
    path = tmp_path / "conformance.toml"
    wrong = Made().say("deviates", requirement=OUTPUT, dtype="float64", cause=COARSE)
    first = counted(tmp_path, wrong)
    assert first.text.index("[[known]]") < first.text.index("[verified.mine]")
    path.write_text(first.text + "# mine\n", encoding="utf-8")
    wrong.say("deviates", requirement=OUTPUT, case=SELF, dtype="float32", cause=COARSE)
    second = counted(tmp_path, wrong)
    assert judge(second, wrong.record()).holds, second.text
    assert second.text.count("[verified.mine]") == 1
    assert "# mine" in second.text
    assert judge(counted(tmp_path, Made()), Made().record()).holds


def test_a_comment_between_counts_and_an_entry_is_of_the_entry(tmp_path):
    path = tmp_path / "conformance.toml"
    few = counted(tmp_path, without(Made(), case=CROSS)).text
    entry = (
        f'# one\n# two\n[[known]]\nrequirement = "{OUTPUT}"\nverdict = "deviates"\nreason = "so"\n'
    )
    path.write_text(few + "\n" + entry, encoding="utf-8")
    text = counted(tmp_path, Made().say("deviates", requirement=OUTPUT)).text
    assert entry.rstrip() in text
    assert text.index("[[known]]") < text.index(coverage.HEAD) < text.index("[verified.mine]")


def test_what_pytest_deselected_is_no_loss(tmp_path):
    known = counted(tmp_path, Made())
    record = without(Made(), case=CROSS).record()
    header = msgspec.structs.replace(record.header, deselected=1)
    assert judge(known, record).less
    assert judge(known, msgspec.structs.replace(record, header=header)).holds


def test_a_run_without_an_end_is_neither_compared_nor_counted(tmp_path):
    record = Made().record()
    unfinished = msgspec.structs.replace(record, complete=False)
    longer = msgspec.structs.replace(record.header, planned=record.header.planned + 1)
    for part in (unfinished, msgspec.structs.replace(record, header=longer)):
        assert coverage.is_whole(record)
        assert not coverage.is_whole(part)
        assert not counted(tmp_path, part).verified


@pytest.mark.parametrize("verdict", ["crashed", "timed-out", "unavailable", "not-run"])
def test_what_was_lost_is_not_counted(tmp_path, verdict):
    """A run with open ends is red anyway, and says nothing about what can be verified."""
    lost = Made().say(verdict, case=CROSS)
    assert not counted(tmp_path, lost).verified
    assert not judge(baseline_of("b.toml", ""), lost.record()).holds


def test_what_was_observed_is_verified(tmp_path):
    assert counted(tmp_path, Made().say("observed")).verified == counted(tmp_path, Made()).verified
    assert judge(baseline_of("b.toml", ""), Made().say("observed").record()).holds


@pytest.mark.parametrize(
    "text",
    [
        "verified = 3",
        "[verified]\nmine = 3",
        "[verified.mine]\n'float32:cpu:eval' = {mask = -1}",
        "[verified.mine]\n'float32:cpu:eval' = {mask = 'x'}",
        "[verified.mine]\n'float32' = {mask = 1}",
        "[verified.mine]\n'defualt:float32:cpu:eval' = {mask = 1}",
        "[verified.mine]\n'float32:cpu:eval' = {mask = true}",
        "promised = 3",
        "[promised.mine]\ncpu = 3",
        "[promised.mine.cpu]\nfloat32 = 3",
        "[promised.mine.cpu]\nfloat32 = 'A9'",
    ],
)
def test_counts_and_promises_that_are_none_are_one_line(tmp_path, text):
    with pytest.raises(BrokenBaseline, match=text.lstrip("[")[:8]) as raised:
        baseline_of(tmp_path / "b.toml", text)
    assert "\n" not in str(raised.value)


def test_counts_of_a_record():
    (places,) = coverage.counted(Made(dtypes=("float32",)).record()).values()
    assert places == {
        "float32:cpu:eval": {"mask": 3, "plain": 6},
        "*:cpu:*": dict.fromkeys((CROSS, ONE, SELF, OUTPUT, KEYS, GRADIENT), 3),
    }


# What is promised


STRICT = {"judged_by": {"float32": "A0", "float16": "A"}, "promises": {"runs": "equal bits"}}


def promising(**changes):
    return Made(**{**STRICT, **changes}).record()


def pinned(tmp_path, record=None):
    return counted(tmp_path, record or promising())


def test_an_update_pins_what_is_promised(tmp_path):
    known = pinned(tmp_path)
    assert known.promised == {"mine": {"cpu": STRICT["judged_by"] | STRICT["promises"]}}
    assert '[promised.mine.cpu]\nfloat32 = "A0"\nfloat16 = "A"\nruns = "equal bits"\n' in known.text
    assert pinned(tmp_path).text == known.text
    assert judge(known, promising()).holds


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"judged_by": {"float32": "TF32", "float16": "A"}}, "float32: pinned A0, now TF32"),
        ({"judged_by": {"float32": "A0", "float16": "C"}}, "float16: pinned A, now C"),
        ({"judged_by": {"float32": "A0"}}, "float16: pinned A, now nothing"),
        ({"promises": {}}, "runs: pinned equal bits, now nothing"),
        ({"promises": {"steps": "equal bits"}}, "runs: pinned equal bits, now nothing"),
    ],
)
@pytest.mark.parametrize("selection", ["", "--case mask"])
def test_a_weaker_promise_is_red_on_one_line(tmp_path, changes, told, selection):
    record = promising(**changes)
    provenance = msgspec.structs.replace(record.header.provenance, selection=selection)
    header = msgspec.structs.replace(record.header, provenance=provenance)
    found = judge(pinned(tmp_path), msgspec.structs.replace(record, header=header))
    assert found.exit_code == ExitCode.DEVIATES
    printed = str(tell(found))
    assert f"less promised: mine on cpu: {told}\n" in printed
    assert "less promised than before" in printed
    assert answer(found).less == [f"mine on cpu: {told}"]


def test_an_update_withdraws_no_promise(tmp_path):
    known = pinned(tmp_path)
    weaker = promising(judged_by={"float32": "TF32", "float16": "C"}, promises={})
    assert pinned(tmp_path, weaker).text == known.text


def test_a_stronger_promise_is_told_and_pinned_by_an_update(tmp_path):
    known = pinned(tmp_path)
    stronger = promising(
        judged_by={"float32": "A0", "float16": "A0"},
        promises={"runs": "equal bits", "steps": "equal bits"},
    )
    found = judge(known, stronger)
    assert found.holds
    assert (
        "promised now: mine on cpu: float16: pinned A, now A0, steps: pinned nothing, now equal "
        "bits; baseline update pins it"
    ) in str(tell(found))
    again = judge(pinned(tmp_path, stronger), stronger)
    assert again.holds
    assert not again.gained
    assert judge(again.baseline, promising()).exit_code == ExitCode.DEVIATES


def test_promises_that_the_baseline_has_not_are_not_asked(tmp_path):
    """It is older than they are, or speaks of another device."""
    text = pinned(tmp_path).text
    older = text[: text.index("[promised.mine.cpu]")]
    for own in (older, text.replace("[promised.mine.cpu]", "[promised.mine.gpu]")):
        found = judge(baseline_of(tmp_path / "b.toml", own), promising(promises={}))
        assert found.holds
        assert "promise" not in str(tell(found))


def test_what_is_unavailable_has_withdrawn_nothing(tmp_path):
    """The adapter could not be read, so nobody knows what it promises."""
    known = pinned(tmp_path)
    absent = Made(unavailable="no such package").say("unavailable").record()
    assert not judge(known, absent).withdrawn


@pytest.mark.parametrize("option", ["--case mask", "--level core"])
def test_a_narrowed_run_pins_no_promises(tmp_path, option):
    assert not counted(tmp_path, Made(**STRICT).record(selection=option)).promised


# What excuses everything


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ('requirement = "*"\nverdict = "deviates"\nstrict = false', "everything"),
        ('case = "**"\nverdict = "deviates"\nstrict = false', "everything"),
        ('case = ["*", "!none"]\nverdict = "deviates"\nstrict = false', "everything"),
        ('requirement = "?*"\ncase = "*"\nverdict = "deviates"\nstrict = false', "everything"),
        ('requirement = "*"\ncase = "*/*"\nverdict = "deviates"\nstrict = false', "everything"),
        ('case = "mask/*"\nverdict = "error"\nraises = ":"', "raises"),
        ('case = "mask/*"\nverdict = "error"\nraises = " (at"', "raises"),
        ('case = "mask/*"\nverdict = "error"\nraises = "Error"', "raises"),
        ('case = "mask/*"\nverdict = "error"\nraises = "Error: "', "raises"),
    ],
)
def test_an_entry_that_excuses_everything_is_one_line(tmp_path, entry, told):
    with pytest.raises(BrokenBaseline, match=told) as raised:
        baseline_of(tmp_path / "b.toml", f'[[known]]\nreason = "x"\n{entry}\n')
    assert "\n" not in str(raised.value)


def test_cases_of_files_are_not_counted():
    """They need not be there the next time."""
    record = Made(dtypes=("float32",)).record()
    more = msgspec.structs.replace(record.results[0], case="file/mine")
    record = msgspec.structs.replace(record, results=[*record.results, more])
    (places,) = coverage.counted(record).values()
    assert places == {
        "float32:cpu:eval": {"mask": 3, "plain": 6},
        "*:cpu:*": dict.fromkeys((CROSS, ONE, SELF, OUTPUT, KEYS, GRADIENT), 3),
    }


def test_only_the_places_that_are_pinned_are_pinned_again():
    record = Made().record()
    one = msgspec.structs.replace(record.results[0], entries=[Entry(Phrase("a"), Phrase("new"))])
    other = msgspec.structs.replace(one, mode="another")
    record = msgspec.structs.replace(record, results=[one, other])
    place = f"{one.dtype}:{one.device}:{one.mode}"
    pins = {one.implementation: {one.case: {place: {"a": "old"}}}}
    text = f'[pinned.{one.implementation}."{one.case}"."{place}"]\na = "old"\n'
    assert coverage.repinned(text, pins, record) == text.replace("old", "new")


EXPERIMENT = "probe/leaks"
PINNED = """
[pinned.mine."probe/leaks"."float32:cpu:eval"]
a = "one"
b = "two"
"""


def observing(*values, **provenance):
    """A record with an experiment that observed these values of a, b and so on."""
    record = Made(dtypes=("float32",)).record(**provenance)
    entries = [
        Entry(Phrase(name), Phrase(value)) for name, value in zip("abc", values, strict=False)
    ]
    found = [Finding("conventions.agree", "observed")]
    result = CaseResult("mine", EXPERIMENT, "float32", "cpu", "eval", found, entries)
    return msgspec.structs.replace(record, results=[*record.results, result])


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (("one", "other"), "b: pinned two, now other"),
        (("one",), "b: pinned two, now not observed"),
        ((), "a: pinned one, now not observed"),
        (None, "a: pinned one, now not observed"),
    ],
)
def test_a_pinned_convention_that_is_another_or_gone_is_red(tmp_path, values, told):
    known = baseline_of(tmp_path / "b.toml", PINNED)
    assert judge(known, observing("one", "two", "three")).holds
    record = Made(dtypes=("float32",)).record() if values is None else observing(*values)
    found = judge(known, record)
    assert found.exit_code == ExitCode.DEVIATES
    assert f"changed: mine, probe/leaks at float32:cpu:eval: {told}\n" in str(tell(found))


def test_a_convention_is_pinned_on_one_device_and_in_what_was_asked(tmp_path):
    elsewhere = baseline_of(tmp_path / "b.toml", PINNED.replace(":cpu:", ":gpu:"))
    assert judge(elsewhere, observing("other")).holds
    known = baseline_of(tmp_path / "b.toml", PINNED)
    part = Made(dtypes=("float32",)).record(selection="--case mask")
    assert judge(known, part).holds


def test_an_experiment_whose_conventions_are_still_to_be_pinned_is_red(tmp_path):
    known = baseline_of(tmp_path / "b.toml", '[pinned.mine."probe/leaks"]\n')
    found = judge(known, observing("one"))
    assert found.exit_code == ExitCode.DEVIATES
    assert "not written yet: run baseline update" in str(tell(found))


def test_an_experiment_without_an_outcome_is_not_verified_and_keeps_its_pins(tmp_path):
    known = baseline_of(tmp_path / "b.toml", PINNED)
    record = observing()
    lost = [Finding(RUN, "crashed", "the process died")]
    died = msgspec.structs.replace(record.results[-1], findings=lost)
    record = msgspec.structs.replace(record, results=[*record.results[:-1], died])
    found = judge(known, record)
    assert not found.changed
    assert found.open
    assert coverage.repinned(PINNED, known.pinned, record) == PINNED


def test_an_update_by_what_verified_nothing_writes_nothing(tmp_path):
    path = tmp_path / "conformance.toml"
    path.write_text('[[known]]\ncase = "x"\nverdict = "deviates"\nreason = "so"\n')
    before = path.read_text()
    code = update(read_baseline(path), Made().say("unsupported").record(), "because")
    assert code == ExitCode.NOTHING_VERIFIED
    assert path.read_text() == before


def test_what_a_record_lacks_is_counted_in_the_first_line(tmp_path):
    record = Made().record()
    header = msgspec.structs.replace(record.header, planned=record.header.planned + 3)
    found = judge(
        baseline_of(tmp_path / "b.toml", ""), msgspec.structs.replace(record, header=header)
    )
    assert found.exit_code == ExitCode.INCOMPLETE
    assert "gate: mine: is incomplete (nothing deviates, 3 not verified" in str(tell(found))
