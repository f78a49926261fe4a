"""What a run says at its end, from results made by hand."""

from __future__ import annotations

import pytest

from conformance.records.findings import INFINITE, CaseResult, Figures, Finding, Phrase
from conformance.running.examine import DECLARE, counted, everything, worst

OUTPUT = "output.equals-definition"
DECLARED = "observed.fully-masked-row"


def deviates(cause="", ratio=100.0, requirement=OUTPUT):
    figures = Figures("output", ratio, ratio / 2, 0.0, 8.0)
    return Finding(requirement, "deviates", "off", figures=figures, cause=Phrase(cause))


def item(number, *findings):
    return CaseResult("mine", f"case/{number}", "float32", "cpu", "default", list(findings))


def told(*found, reasons=False):
    return list(counted("mine", [item(i, one) for i, one in enumerate(found)], reasons=reasons))


@pytest.mark.parametrize(
    ("causes", "line"),
    [
        (["doubled"], "1 deviates (doubled)"),
        (["doubled"] * 3, "3 deviates (doubled)"),
        (["doubled", "", "", ""], "4 deviates (1 of them: doubled)"),
        (["doubled", "halved", "doubled"], "3 deviates (2 of them: doubled)"),
        (["", ""], "2 deviates"),
    ],
)
def test_a_cause_is_told_of_those_that_have_it(causes, line):
    assert told(*map(deviates, causes)) == [
        f"mine: {len(causes)} deviates",
        f"  {OUTPUT}: {line}",
    ]


def test_an_error_of_every_call_is_one_line():
    error = [Finding(f"requirement.{number}", "error", "it raises") for number in range(15)]
    rejected = Finding("mask.polarity-is-as-declared", "deviates", "rejected: it raises")
    unsupported = Finding("causal.flag-blocks", "unsupported", "no flag")

    def lines(*more):
        return list(counted("mine", [item(0, *error, rejected, unsupported, *more)], reasons=False))

    assert lines()[:3] == [
        "mine: 1 error",
        "  nothing was verified: no item conforms or deviates",
        "  error, 1 item: it raises",
    ]
    # Something was answered, so not every call fails.
    for one in (Finding(OUTPUT, "conforms"), deviates()):
        assert "  error, 1 item: it raises" not in lines(one)


def test_reasons_are_counted():
    unsupported = Finding(OUTPUT, "unsupported", "no causal flag")
    lost = Finding("run", "crashed", "it died")
    found = (unsupported, lost, unsupported)
    assert told(*found) == [
        "mine: 2 unsupported, 1 crashed",
        "  unsupported, 2 items: no causal flag",
        DECLARE,
        "  not verified, 1 item: it died",
    ]
    conforms = [Finding(OUTPUT, "conforms")] * 6
    assert not any("no causal flag" in line for line in told(*found, *conforms))
    assert told(*found, *conforms, reasons=True)[-1] == "  unsupported, 2 items: no causal flag"


@pytest.mark.parametrize(
    ("found", "index"),
    [
        ([deviates(ratio=10), deviates(ratio=1e5), deviates(ratio=1e3)], 1),
        ([deviates(ratio=INFINITE), deviates("inverted", ratio=10)], 1),
        ([deviates("declared", INFINITE, DECLARED), deviates(ratio=10)], 1),
        ([Finding(OUTPUT, "conforms"), Finding(OUTPUT, "error", "TypeError")], 1),
    ],
    ids=["ratio", "cause", "level", "error"],
)
def test_the_worst_item(found, index):
    results = [item(number, finding) for number, finding in enumerate(found)]
    result, of = worst(results)
    assert result is results[index]
    assert of == sum(finding.verdict != "conforms" for finding in found)


def test_nothing_is_worst_where_nothing_deviates():
    assert worst([item(0, Finding(OUTPUT, "conforms"))]) == (None, 0)


def test_a_record_shows_everything():
    assert "mha-conformance report '/a b.json'" in everything("/a b.json")
    assert "--strict" in everything("")
